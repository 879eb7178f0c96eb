//! How much of what a stranger wrote goes into a message.
//!
//! A header may have a hundred megabytes, and all of them may be one name, or one shape. A message is read by people and goes
//! into logs: it has the start of such a thing, and is never much longer than that. So is the memory that it takes.

use std::fmt::{self, Display, Formatter, Write};

/// Characters of a name.
const NAME: usize = 200;
/// Characters of what a parser says, which may quote the text.
const SAID: usize = 400;
/// Axes of a shape.
const AXES: usize = 8;

/// A name, or its start.
pub(super) fn name(name: &str) -> String {
    Start(name, NAME).to_string()
}

/// What a parser says, or its start.
pub(super) fn said(what: &dyn Display) -> impl Display + '_ {
    Start(what, SAID)
}

/// A shape, or its start and how many axes it has.
pub(super) fn shape(axes: &[usize]) -> Shape<'_> {
    Shape(axes)
}

/// The first so many characters of a text.
struct Start<T>(T, usize);

impl<T: Display> Display for Start<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut upto = Upto { f, left: self.1, over: false };
        write!(upto, "{}", self.0)?;
        if upto.over { f.write_str("...") } else { Ok(()) }
    }
}

/// Passes on so many characters, and forgets the rest.
struct Upto<'a, 'b> {
    f: &'a mut Formatter<'b>,
    left: usize,
    over: bool,
}

impl Write for Upto<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut end = 0;
        for character in text.chars() {
            if self.left == 0 {
                self.over = true;
                break;
            }
            self.left -= 1;
            end += character.len_utf8();
        }
        self.f.write_str(text.get(..end).unwrap_or_default())
    }
}

/// See [`shape`].
pub(super) struct Shape<'a>(&'a [usize]);

impl Display for Shape<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0.get(..AXES) {
            Some(first) if self.0.len() > AXES => {
                f.write_char('[')?;
                first.iter().try_for_each(|axis| write!(f, "{axis}, "))?;
                write!(f, "... {} axes]", self.0.len())
            }
            _ => write!(f, "{:?}", self.0),
        }
    }
}

//! Names and texts of files, made fit to be shown in an error: what steers a terminal or takes no room is escaped, and
//! the text has an end.

use std::fmt::{self, Display, Formatter, Write};

/// The most characters of a name that are shown.
pub const NAME: usize = 200;

/// Displays the start of a value: at most this many characters, and `...` if there are more. Backslashes and quotes stay
/// as they are, so that an escaped text is not escaped again.
pub struct Shown<'a, T: ?Sized>(pub &'a T, pub usize);

impl<T: Display + ?Sized> Display for Shown<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut start = Start { f, left: self.1, over: false };
        match write!(start, "{}", self.0) {
            Err(_) if start.over => f.write_str("..."),
            result => result,
        }
    }
}

/// Passes on so many characters, escaped, and then stops the writing: a value may be as long as a file.
struct Start<'a, 'b> {
    f: &'a mut Formatter<'b>,
    left: usize,
    over: bool,
}

impl Write for Start<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            let is_plain = matches!(c, ' '..='~') || (!c.is_ascii() && c.escape_debug().len() == 1);
            let len = if is_plain { 1 } else { c.escape_default().len() };
            let Some(left) = self.left.checked_sub(len) else {
                self.over = true;
                return Err(fmt::Error);
            };
            self.left = left;
            if is_plain { self.f.write_char(c)? } else { write!(self.f, "{}", c.escape_default())? }
        }
        Ok(())
    }
}

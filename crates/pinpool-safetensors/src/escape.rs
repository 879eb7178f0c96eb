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
        let (text, mut left) = (self.0.to_string(), self.1);
        for c in text.chars() {
            let is_plain = matches!(c, ' '..='~') || (!c.is_ascii() && c.escape_debug().len() == 1);
            let len = if is_plain { 1 } else { c.escape_unicode().len() };
            let Some(rest) = left.checked_sub(len) else { return f.write_str("...") };
            left = rest;
            if is_plain { f.write_char(c)? } else { write!(f, "{}", c.escape_unicode())? }
        }
        Ok(())
    }
}

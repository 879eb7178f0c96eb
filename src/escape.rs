//! Text from outside, made fit to be shown: on a terminal, in a line of a log, in an error's message.
//!
//! A file, a name or a server may contain anything: sequences that steer a terminal, newlines that forge a line of a
//! log, characters that reverse text or take no room, or nine megabytes. What is shown of it has its control
//! characters, its direction characters and its invisible characters escaped (`\u{1b}`), and a greatest length. The
//! whole crate shows such text through [`Shown`], [`text`] or [`clean`].
//!
//! Backslashes stay as they are, so that an escaped text is not escaped again when messages are put together.

use std::borrow::Cow;
use std::fmt::{self, Display, Formatter, Write};

/// The most characters of a name that are shown.
pub const NAME: usize = 200;
/// The most characters of a message that are shown: it may have a path in it (Linux's `PATH_MAX` is 4096).
pub const TEXT: usize = 5000;

/// Displays the start of a value: at most this many characters, and `...` if there are more.
pub struct Shown<'a, T: ?Sized>(pub &'a T, pub usize);

/// A message, shown up to [`TEXT`] characters.
pub fn text<T: Display + ?Sized>(what: &T) -> Shown<'_, T> {
    Shown(what, TEXT)
}

/// A message without the name that it begins with, for a text that has said that name.
#[cfg_attr(not(any(feature = "acl", feature = "cuda")), allow(dead_code, reason = "of drivers"))]
pub fn unnamed<'a>(text: &'a str, name: &str) -> &'a str {
    text.strip_prefix(name).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(text)
}

/// A text as [`Shown`] shows it, without a copy if that is the same text.
pub fn clean(text: &str, most: usize) -> Cow<'_, str> {
    // (A text has at least as many bytes as characters.)
    if text.len() <= most && text.chars().all(is_plain) {
        return text.into();
    }
    Shown(text, most).to_string().into()
}

impl<T: Display + ?Sized> Display for Shown<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut writer = Escaping { f, left: self.1, over: false };
        match write!(writer, "{}", self.0) {
            // The writer stopped it.
            Err(_) if writer.over => f.write_str("..."),
            result => result,
        }
    }
}

/// Passes on this many characters, escaped, and then stops the writing.
struct Escaping<'a, 'b> {
    f: &'a mut Formatter<'b>,
    left: usize,
    over: bool,
}

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut plain = 0;
        for (at, character) in text.char_indices() {
            let escape = (!is_plain(character)).then(|| character.escape_default());
            let Some(left) = self.left.checked_sub(escape.as_ref().map_or(1, ExactSizeIterator::len)) else {
                self.over = true;
                self.f.write_str(&text[plain..at])?;
                return Err(fmt::Error);
            };
            self.left = left;
            if let Some(escape) = escape {
                write!(self.f, "{}{escape}", &text[plain..at])?;
                plain = at + character.len_utf8();
            }
        }
        self.f.write_str(&text[plain..])
    }
}

/// Whether a character is shown as itself and does nothing else.
fn is_plain(character: char) -> bool {
    match character {
        ' '..='~' => true,
        '\0'..='\u{9f}' => false,
        // Unicode's Default_Ignorable_Code_Point, as far as they count as letters or marks: they are shown as nothing.
        '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{3164}' | '\u{ffa0}' => false,
        '\u{180b}'..='\u{180f}' | '\u{fe00}'..='\u{fe0f}' | '\u{e0000}'..='\u{e0fff}' => false,
        // The standard library knows which characters can be printed: none of the categories Cc, Cf (directions, zero
        // width), Zl, Zp, Cs, Co and Cn. An accent is printed if it follows a letter.
        _ => {
            let mut bytes = *b"a\0\0\0\0";
            let len = 1 + character.encode_utf8(&mut bytes[1..]).len();
            std::str::from_utf8(&bytes[..len]).is_ok_and(|pair| pair.escape_debug().nth(1) == Some(character))
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_steers_or_hides_is_written_out() {
        for (raw, shown) in [
            ("plain \"text\" \\ é e\u{301} 漢字 हिन्दी 😀", "plain \"text\" \\ é e\u{301} 漢字 हिन्दी 😀"),
            ("\u{1b}[2J\u{9b}31m\u{7f}\0", "\\u{1b}[2J\\u{9b}31m\\u{7f}\\u{0}"),
            ("a\nb\r\tc\u{85}\u{2028}", "a\\nb\\r\\tc\\u{85}\\u{2028}"),
            ("\u{202e}txt\u{2066}\u{200f}", "\\u{202e}txt\\u{2066}\\u{200f}"),
            ("a\u{200b}\u{200d}\u{feff}\u{ad}b", "a\\u{200b}\\u{200d}\\u{feff}\\u{ad}b"),
            ("\u{fe0f}\u{e0041}\u{3164}\u{34f}", "\\u{fe0f}\\u{e0041}\\u{3164}\\u{34f}"),
        ] {
            assert_eq!(text(raw).to_string(), shown);
            assert_eq!(clean(raw, 200), shown);
            assert_eq!(clean(shown, 200), shown, "once is enough");
        }
    }

    #[test]
    fn what_is_long_has_an_end() {
        assert_eq!(Shown("abc", 3).to_string(), "abc");
        assert_eq!(Shown("abcd", 3).to_string(), "abc...");
        assert_eq!(Shown("a\u{1b}b", 6).to_string(), "a...", "no part of an escape");
        assert_eq!(clean("ééé", 3), "ééé");
        assert!(matches!(clean("abc", 3), Cow::Borrowed(_)));
        // A writer without end is stopped.
        struct Endless;
        impl Display for Endless {
            fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
                loop {
                    f.write_str("\n")?;
                }
            }
        }
        assert_eq!(Shown(&Endless, 5).to_string(), "\\n\\n...");
    }

    proptest! {
        #[test]
        fn nothing_but_plain_characters_comes_out(raw in any::<String>(), most in 0..60_usize) {
            let shown = Shown(&*raw, most).to_string();
            prop_assert!(shown.chars().all(is_plain) && shown.chars().count() <= most + 3);
            prop_assert_eq!(clean(&raw, most), shown);
        }
    }
}

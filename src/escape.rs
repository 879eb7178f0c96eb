//! Text from outside, made fit to be shown: on a terminal, in a log, in an error's message.
//!
//! A file, a name or a server may contain anything: sequences that steer a terminal, newlines that
//! forge a line of a log, characters that reverse text or take no room, or nine megabytes. What is
//! shown of it has its control, direction and invisible characters escaped (`\u{1b}`), and a
//! greatest length. The whole crate shows such text through [`text`] or [`clean`].
//!
//! Backslashes stay, so that an escaped text is not escaped again in another message.

use std::borrow::Cow;

/// The most characters of a name that are shown.
pub const NAME: usize = 200;
/// The most characters of a message that are shown: it may have a path (`PATH_MAX` is 4096).
const TEXT: usize = 5000;

/// A message, shown up to [`TEXT`] characters.
pub fn text(text: &str) -> Cow<'_, str> {
    clean(text, TEXT)
}

/// A message without the name that it begins with, for a text that has said that name.
#[cfg_attr(not(any(feature = "acl", feature = "cuda")), allow(dead_code, reason = "of drivers"))]
pub fn unnamed<'a>(text: &'a str, name: &str) -> &'a str {
    text.strip_prefix(name).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(text)
}

/// The start of a text, escaped, and `...` if it has more than `most` characters.
pub fn clean(text: &str, most: usize) -> Cow<'_, str> {
    // (A text has at least as many bytes as characters.)
    if text.len() <= most && text.chars().all(is_plain) {
        return text.into();
    }
    let (mut shown, mut left) = (String::new(), most);
    for character in text.chars() {
        let escape = (!is_plain(character)).then(|| character.escape_default());
        let Some(rest) = left.checked_sub(escape.as_ref().map_or(1, ExactSizeIterator::len)) else {
            shown.push_str("...");
            break;
        };
        left = rest;
        match escape {
            Some(escape) => shown.extend(escape),
            None => shown.push(character),
        }
    }
    shown.into()
}

/// Whether a character is shown as itself and does nothing else.
fn is_plain(character: char) -> bool {
    match character {
        ' '..='~' => true,
        '\0'..='\u{9f}' => false,
        // Letters and marks of Unicode's Default_Ignorable_Code_Point, which show nothing.
        '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{3164}' | '\u{ffa0}' => false,
        '\u{180b}'..='\u{180f}' | '\u{fe00}'..='\u{fe0f}' | '\u{e0000}'..='\u{e0fff}' => false,
        // The standard library knows which characters can be printed: not Cc, Cf (directions, zero
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
    use super::*;

    #[test]
    fn what_steers_or_hides_is_written_out_and_what_is_long_has_an_end() {
        for (raw, most, shown) in [
            ("plain \"text\" \\ é e\u{301} 漢字 हिन्दी 😀", 200, "plain \"text\" \\ é e\u{301} 漢字 हिन्दी 😀"),
            ("\u{1b}[2J\u{9b}31m\u{7f}\0", 200, "\\u{1b}[2J\\u{9b}31m\\u{7f}\\u{0}"),
            ("a\nb\r\tc\u{85}\u{2028}", 200, "a\\nb\\r\\tc\\u{85}\\u{2028}"),
            ("\u{202e}txt\u{2066}\u{200f}", 200, "\\u{202e}txt\\u{2066}\\u{200f}"),
            ("a\u{200b}\u{200d}\u{feff}\u{ad}b", 200, "a\\u{200b}\\u{200d}\\u{feff}\\u{ad}b"),
            ("\u{fe0f}\u{e0041}\u{3164}\u{34f}", 200, "\\u{fe0f}\\u{e0041}\\u{3164}\\u{34f}"),
            ("abc", 3, "abc"),
            ("abcd", 3, "abc..."),
            ("ééé", 3, "ééé"),
            // No part of an escape.
            ("a\u{1b}b", 6, "a..."),
        ] {
            assert_eq!(clean(raw, most), shown);
            assert_eq!(text(shown), shown, "once is enough");
        }
    }
}

//! Texts of files, drivers and servers, made fit to be shown: what steers a terminal or takes no
//! room is escaped, and the text has an end.

use std::borrow::Cow;

/// The most characters of a name that are shown.
pub const NAME: usize = 200;
/// The most characters of a message that are shown: it may have a path (`PATH_MAX` is 4096).
const TEXT: usize = 5000;

/// A message in one line.
pub fn text(what: &str) -> Cow<'_, str> {
    clean(what, TEXT)
}

/// A message without the name that it begins with, for a text that has said that name.
pub fn unnamed<'a>(text: &'a str, name: &str) -> &'a str {
    text.strip_prefix(name).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(text)
}

/// The start of a text: at most this many characters, and `...` if there are more. Backslashes and
/// quotes stay as they are, so that an escaped text is not escaped again.
pub fn clean(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most && text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return text.into();
    }
    let (mut shown, mut left) = (String::new(), most);
    for c in text.chars() {
        let is_plain = matches!(c, ' '..='~') || (!c.is_ascii() && !is_unseen(c));
        let len = if is_plain { 1 } else { c.escape_default().len() };
        let Some(rest) = left.checked_sub(len) else {
            shown += "...";
            break;
        };
        left = rest;
        if is_plain { shown.push(c) } else { shown.extend(c.escape_default()) }
    }
    shown.into()
}

/// What the standard library does not print as it is, and the letters that fonts show as nothing.
fn is_unseen(c: char) -> bool {
    c.escape_debug().len() > 1
        || matches!(c, '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{3164}' | '\u{ffa0}')
}

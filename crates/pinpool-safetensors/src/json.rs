//! JSON as serde_json reads it, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. serde_json keeps a copy of a text that has escapes, and writes a value of the wrong kind into its
//! error. So each name and each value is taken as it stands in the text ([`RawValue`]), which only checks it, and this
//! module looks at those that are asked for.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use pinpool::{Error, Result};

/// The longest name of a tensor, in bytes as the file has it.
pub(super) const LONGEST_NAME: usize = 65_535;
/// How deep arrays and objects may be nested, as in serde_json's other readers.
const DEEPEST: usize = 128;

/// Why an object could not be read.
pub(super) enum Fault<'a> {
    /// It is something else.
    NoObject,
    /// It is no JSON: what serde_json says, and the name of the value that this is in, if it is in one.
    Syntax(serde_json::Error, Option<Text<'a>>),
    /// The caller has refused an entry.
    Refused(Error),
}

/// Calls `each` with the name and the value of every entry of an object.
pub(super) fn object<'a>(
    text: &'a str,
    each: impl FnMut(Text<'a>, &'a str) -> Result<()>,
) -> Result<(), Fault<'a>> {
    if !text.trim_start_matches([' ', '\t', '\n', '\r']).starts_with('{') {
        return Err(Fault::NoObject);
    }
    let (mut at, mut refused) = (None, None);
    let mut json = serde_json::Deserializer::from_str(text);
    let read = json.deserialize_map(Entries { each, at: &mut at, refused: &mut refused });
    match (refused, read.and_then(|()| json.end())) {
        (Some(error), _) => Err(Fault::Refused(error)),
        (None, Err(error)) => Err(Fault::Syntax(error, at)),
        (None, Ok(())) => Ok(()),
    }
}

struct Entries<'s, 'a, F> {
    each: F,
    /// The name of the value that is being read.
    at: &'s mut Option<Text<'a>>,
    refused: &'s mut Option<Error>,
}

impl<'de, F: FnMut(Text<'de>, &'de str) -> Result<()>> Visitor<'de> for Entries<'_, 'de, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<&RawValue>()? {
            let name = Text::of(name.get()).ok_or_else(|| A::Error::custom("half of a surrogate pair"))?;
            *self.at = Some(name);
            let value = map.next_value::<&RawValue>()?;
            *self.at = None;
            (self.each)(name, value.get()).map_err(|error| {
                *self.refused = Some(error);
                A::Error::custom("")
            })?;
        }
        Ok(())
    }
}

/// Whether arrays and objects are nested no deeper than they may be. (serde_json notes a byte for each level of a value
/// that it skips, and has no limit there. A text that is not mostly brackets is not looked at: the notes are short.)
pub(super) fn is_shallow(text: &str) -> bool {
    if text.bytes().filter(|byte| matches!(byte, b'[' | b'{')).count() <= text.len() / 8 {
        return true;
    }
    let (mut depth, mut bytes) = (0_usize, text.bytes());
    while let Some(byte) = bytes.next() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'"' => {
                while bytes.by_ref().find(|byte| matches!(byte, b'"' | b'\\')) == Some(b'\\') {
                    // The byte behind a backslash ends no text.
                    bytes.next();
                }
            }
            _ => {}
        }
        if depth > DEEPEST {
            return false;
        }
    }
    true
}

/// Where a part of a text starts in it.
pub(super) fn place(text: &str, part: &str) -> usize {
    part.as_ptr() as usize - text.as_ptr() as usize
}

/// The whole numbers of a list, `None` for each element that is something else. `None` for what is no list.
pub(super) fn numbers(list: &str) -> Option<impl Iterator<Item = Option<u64>> + '_> {
    let inside = list.strip_prefix('[')?.strip_suffix(']')?.trim();
    let parts = if inside.is_empty() { None } else { Some(inside.split(',')) };
    Some(parts.into_iter().flatten().map(|number| number.trim().parse().ok()))
}

/// A string as it stands between its quotes, checked and with its escapes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Text<'a>(&'a str);

impl<'a> Text<'a> {
    /// `None` for a value that is no string, or one with half of a surrogate pair, which serde_json lets pass in values
    /// that it takes as they stand.
    pub(super) fn of(value: &'a str) -> Option<Self> {
        let text = Self(value.strip_prefix('"')?.strip_suffix('"')?);
        text.unescape(|_| ()).then_some(text)
    }

    /// What was between the quotes of a string that was checked before.
    pub(super) fn checked(raw: &'a str) -> Self {
        Self(raw)
    }

    /// A string that was checked before, and starts here.
    pub(super) fn at(text: &'a str) -> Option<Self> {
        let mut json = serde_json::Deserializer::from_str(text);
        let value = <&RawValue as serde::Deserialize>::deserialize(&mut json).ok()?;
        Self::of(value.get())
    }

    pub(super) fn raw(self) -> &'a str {
        self.0
    }

    /// Calls `put` with the parts of the unescaped string. `false`: half of a surrogate pair stands alone.
    pub(super) fn unescape(self, mut put: impl FnMut(&str)) -> bool {
        let mut rest = self.0;
        while let Some((before, escape)) = rest.split_once('\\') {
            put(before);
            let unit = |at: usize| escape.get(at..at + 4).and_then(|hex| u16::from_str_radix(hex, 16).ok());
            let (character, len) = match escape.as_bytes()[0] {
                b'b' => ('\u{8}', 1),
                b'f' => ('\u{c}', 1),
                b'n' => ('\n', 1),
                b'r' => ('\r', 1),
                b't' => ('\t', 1),
                b'u' => {
                    // The second half of a pair is behind another `\u`.
                    let second = unit(7).filter(|_| escape[5..].starts_with("\\u"));
                    let units = [unit(1), second].into_iter().flatten();
                    let Some(Ok(character)) = char::decode_utf16(units).next() else { return false };
                    (character, if character.len_utf16() == 2 { 11 } else { 5 })
                }
                same => (char::from(same), 1),
            };
            put(character.encode_utf8(&mut [0; 4]));
            rest = &escape[len..];
        }
        put(rest);
        true
    }

    /// The unescaped string: a copy where it has escapes, so only for strings that are known to be short.
    pub(super) fn get(self) -> Cow<'a, str> {
        if !self.0.contains('\\') {
            return self.0.into();
        }
        let mut text = String::with_capacity(self.0.len());
        self.unescape(|part| text.push_str(part));
        text.into()
    }

    /// The string for a message, which shows its start: as the file has it, where unescaping it would copy too much.
    pub(super) fn start(self) -> Cow<'a, str> {
        if self.0.len() > LONGEST_NAME { self.0.into() } else { self.get() }
    }

    /// Whether the unescaped string is `other`.
    pub(super) fn is(self, other: &str) -> bool {
        // An escape has six bytes for one at most.
        self.0 == other || (self.0.len() <= 6 * other.len() && self.get() == other)
    }
}

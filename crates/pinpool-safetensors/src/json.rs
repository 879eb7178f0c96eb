//! JSON as serde_json reads it, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. serde_json keeps a copy of a string that has escapes, and writes a value of the wrong kind into its
//! error. So names and values are taken as they stand in the text, which only checks them; short ones are then read
//! further ([`text`]). Each byte of a tensor is read by serde_json once.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{Deserialize, DeserializeSeed, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The longest string that is read, in bytes as the file has it: the name of a tensor, for example.
pub(super) const LONGEST: usize = 65_535;

/// How many arrays and objects begin in a text, at most. serde_json notes a byte for each level of a value that it passes
/// over, so a text that is mostly brackets is an error.
pub(super) fn brackets(text: &str) -> Result<usize, &'static str> {
    // Counted in pieces whose counts fit a byte, which is several times as fast.
    let count = |piece: &[u8]| piece.iter().map(|byte| u8::from(matches!(byte, b'[' | b'{'))).sum::<u8>();
    let opened = text.as_bytes().chunks(255).map(|piece| usize::from(count(piece))).sum();
    if opened <= text.len() / 8 + 100 { Ok(opened) } else { Err("it is mostly brackets") }
}

/// A key as it stands in the text, without its quotes, and the text from its value on.
#[derive(Clone, Copy)]
pub(super) struct Key<'a> {
    pub(super) raw: &'a str,
    pub(super) rest: &'a str,
    /// Whether the text has no escapes.
    pub(super) plain: bool,
}

/// What takes the entries of an object, in the order of the text.
pub(super) trait Entries<'a> {
    /// Takes an entry, whose value is the next of `map`.
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error>;
}

/// Reads a text that is one object.
pub(super) fn read_object<'a>(
    text: &'a str,
    entries: &mut impl Entries<'a>,
) -> Result<(), serde_json::Error> {
    if !is_object(text) {
        return Err(serde_json::Error::custom("an object is expected"));
    }
    let mut json = serde_json::Deserializer::from_str(text);
    Object { text, plain: !text.contains('\\'), entries }.deserialize(&mut json)?;
    json.end()
}

/// Whether the value that a text starts with is an object. (Of a string in its place serde_json's error has all.)
pub(super) fn is_object(text: &str) -> bool {
    text.trim_ascii_start().starts_with('{')
}

/// The value that a text starts with, which was checked before.
pub(super) fn first(text: &str) -> &str {
    <&RawValue>::deserialize(&mut serde_json::Deserializer::from_str(text)).map_or("", RawValue::get)
}

/// Reads an object that begins in `text`. `plain`: the text has no escapes.
pub(super) struct Object<'e, 'a, E> {
    pub(super) text: &'a str,
    pub(super) plain: bool,
    pub(super) entries: &'e mut E,
}

impl<'a, E: Entries<'a>> DeserializeSeed<'a> for Object<'_, 'a, E> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'a, E: Entries<'a>> Visitor<'a> for Object<'_, 'a, E> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { text, plain, entries } = self;
        loop {
            // serde_json copies only a string that has escapes.
            let raw = match plain {
                true => map.next_key::<&str>()?,
                false => map.next_key::<&RawValue>()?.and_then(|key| inside(key.get())),
            };
            let Some(raw) = raw else { return Ok(()) };
            let rest = text[place(text, raw) as usize + raw.len() + 1..].trim_ascii_start();
            let rest = rest.strip_prefix(':').unwrap_or(rest).trim_ascii_start();
            entries.entry(Key { raw, rest, plain }, &mut map)?;
        }
    }
}

/// Where a part of a text starts in it. Texts have at most 100,000,000 bytes, so it fits 32 bits.
pub(super) fn place(text: &str, part: &str) -> u32 {
    (part.as_ptr() as usize - text.as_ptr() as usize) as u32
}

/// A string without its quotes. `None`: another value.
pub(super) fn inside(value: &str) -> Option<&str> {
    value.strip_prefix('"')?.strip_suffix('"')
}

/// The string that stands in a text so, between its quotes.
pub(super) fn text(raw: &str) -> Result<Cow<'_, str>, String> {
    match raw.len() <= LONGEST {
        false => Err("a text is longer than 65,535 bytes".into()),
        true if !raw.as_bytes().contains(&b'\\') => Ok(raw.into()),
        true => serde_json::from_str(&format!("\"{raw}\"")).map(Cow::Owned).map_err(|said| said.to_string()),
    }
}

/// A name for a message: as the file has it, where it cannot be read.
pub(super) fn named(raw: &str) -> Cow<'_, str> {
    text(raw).unwrap_or(raw.into())
}

/// Calls `each` with the whole numbers of a list that was checked and starts a text. `false`: it is something else, or has
/// something else in it.
pub(super) fn numbers(text: &str, mut each: impl FnMut(u64)) -> bool {
    let mut number = None::<u64>;
    for byte in text.strip_prefix('[').unwrap_or_default().bytes() {
        match byte {
            b'0'..=b'9' => {
                let shifted = number.unwrap_or(0).checked_mul(10);
                let Some(more) = shifted.and_then(|n| n.checked_add(u64::from(byte - b'0'))) else {
                    return false;
                };
                number = Some(more);
            }
            b',' | b' ' | b'\t' | b'\n' | b'\r' | b']' => {
                number.take().into_iter().for_each(&mut each);
                if byte == b']' {
                    return true;
                }
            }
            _ => return false,
        }
    }
    false
}

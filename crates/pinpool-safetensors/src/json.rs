//! JSON as serde_json reads it, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. serde_json keeps a copy of a string that has escapes, and writes a value of the wrong kind into its
//! error. So keys and values are taken as they stand in the text, which only checks them; short ones are then read
//! further ([`text`], [`numbers`]).

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{Error as _, MapAccess, Visitor};
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

/// Why an object was not read to its end.
pub(super) enum Stop<'a, E> {
    /// It is no JSON, or no object. The key is that of the value in which it was found.
    Json(serde_json::Error, Option<&'a str>),
    /// What was said of an entry.
    Refused(E),
}

impl<E: fmt::Display> fmt::Display for Stop<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error, _) => error.fmt(f),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

/// Whether the value that a text starts with is an object.
pub(super) fn is_object(text: &str) -> bool {
    text.trim_ascii_start().starts_with('{')
}

/// Reads a text that is one object. `each` takes each key, without its quotes, and its value, as they stand in the text.
pub(super) fn entries<'a, E>(
    text: &'a str,
    each: impl FnMut(&'a str, &'a str) -> Result<(), E>,
) -> Result<(), Stop<'a, E>> {
    // Of a string in its place serde_json's error has all.
    if !is_object(text) {
        return Err(Stop::Json(serde_json::Error::custom("an object is expected"), None));
    }
    let mut object = Object { each, is_plain: !text.contains('\\'), at: None, refused: None };
    let mut json = serde_json::Deserializer::from_str(text);
    let read = json.deserialize_map(&mut object).and_then(|()| json.end());
    read.map_err(|error| match object.refused {
        Some(refused) => Stop::Refused(refused),
        None => Stop::Json(error, object.at),
    })
}

struct Object<'a, F, E> {
    each: F,
    /// Whether its text has no escapes.
    is_plain: bool,
    /// The key of the entry that is being read.
    at: Option<&'a str>,
    refused: Option<E>,
}

impl<'a, E, F: FnMut(&'a str, &'a str) -> Result<(), E>> Visitor<'a> for &mut Object<'a, F, E> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        loop {
            // serde_json copies only a string that has escapes.
            let key = match self.is_plain {
                true => map.next_key::<&str>()?,
                false => map.next_key::<&RawValue>()?.and_then(|key| inside(key.get())),
            };
            let Some(key) = key else { return Ok(()) };
            self.at = Some(key);
            let value = map.next_value::<&RawValue>()?.get();
            if let Err(refused) = (self.each)(key, value) {
                self.refused = Some(refused);
                return Err(A::Error::custom(""));
            }
            self.at = None;
        }
    }
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

/// Calls `each` with the whole numbers of a list that was checked. `false`: it is something else, or has something else in
/// it.
pub(super) fn numbers(list: &str, mut each: impl FnMut(u64)) -> bool {
    let mut number = None::<u64>;
    for byte in list.strip_prefix('[').unwrap_or("-").bytes() {
        match byte {
            b'0'..=b'9' => {
                let shifted = number.unwrap_or(0).checked_mul(10);
                number = shifted.and_then(|number| number.checked_add(u64::from(byte - b'0')));
                if number.is_none() {
                    return false;
                }
            }
            b',' | b']' | b' ' | b'\t' | b'\n' | b'\r' => number.take().into_iter().for_each(&mut each),
            _ => return false,
        }
    }
    true
}

//! JSON as serde_json reads it, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. serde_json keeps a copy of a string that has escapes, and writes a value of the wrong kind into
//! its error. So keys and values are taken as they stand in the text, which only checks them; short ones are then read
//! further ([`text`], [`numbers`]).

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The longest string that is read, in bytes as the file has it: the name of a tensor, for example.
pub(super) const LONGEST: usize = 65_535;

/// How many arrays and objects begin in a text, at most. serde_json notes a byte for each level of a value that it
/// passes over, so a text that is mostly brackets is an error.
pub(super) fn brackets(text: &str) -> Result<usize, &'static str> {
    // Counted in pieces whose counts fit a byte, which is several times as fast.
    let count = |piece: &[u8]| piece.iter().map(|byte| u8::from(matches!(byte, b'[' | b'{'))).sum::<u8>();
    let opened = text.as_bytes().chunks(255).map(|piece| usize::from(count(piece))).sum();
    if opened <= text.len() / 8 + 100 { Ok(opened) } else { Err("it is mostly brackets") }
}

/// Whether the value that a text starts with is an object.
pub(super) fn is_object(text: &str) -> bool {
    text.starts_with('{')
}

/// Reads a text that is one object, and the objects that are its values, each byte once. `each` takes every entry when
/// it was read, as it stands in the text: for one of an inner object that object's key, its own key and its value. Keys
/// have no quotes. `told` makes an error of what is no JSON, with the key of the object's value in which that was
/// found.
pub(super) fn entries<'a, E>(
    text: &'a str,
    told: impl FnOnce(serde_json::Error, Option<&'a str>) -> E,
    each: impl FnMut(Option<&'a str>, &'a str, &'a str) -> Result<(), E>,
) -> Result<(), E> {
    // Of a string in its place serde_json's error has all.
    if !is_object(text.trim_ascii_start()) {
        return Err(told(serde_json::Error::custom("an object is expected"), None));
    }
    let is_plain = !text.contains('\\');
    let mut reading = Reading { text, is_plain, end: 0, each, at: None, refused: None };
    let mut json = serde_json::Deserializer::from_str(text);
    let object = Object { reading: &mut reading, outer: None };
    let read = object.deserialize(&mut json).and_then(|()| json.end());
    read.map_err(|error| reading.refused.unwrap_or_else(|| told(error, reading.at)))
}

struct Reading<'a, F, E> {
    text: &'a str,
    /// Whether the text has no escapes.
    is_plain: bool,
    /// The place in the text behind what was read last.
    end: usize,
    each: F,
    /// The key of the outer entry that is being read.
    at: Option<&'a str>,
    refused: Option<E>,
}

impl<'a, F, E> Reading<'a, F, E> {
    /// The next key of an object, without its quotes.
    fn next_key<A: MapAccess<'a>>(&mut self, map: &mut A) -> Result<Option<&'a str>, A::Error> {
        let key = match self.is_plain {
            // serde_json copies only a string that has escapes.
            true => map.next_key::<&str>()?,
            false => map.next_key::<&RawValue>()?.and_then(|key| inside(key.get())),
        };
        self.end = key.map_or(self.end, |key| self.behind(key) + 1);
        Ok(key)
    }

    fn behind(&self, part: &str) -> usize {
        part.as_ptr() as usize - self.text.as_ptr() as usize + part.len()
    }
}

/// An object that is being read: the text's, or that which the outer one has by this key.
struct Object<'r, 'a, F, E> {
    reading: &'r mut Reading<'a, F, E>,
    outer: Option<&'a str>,
}

impl<'a, F, E> DeserializeSeed<'a> for Object<'_, 'a, F, E>
where
    F: FnMut(Option<&'a str>, &'a str, &'a str) -> Result<(), E>,
{
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'a, F, E> Visitor<'a> for Object<'_, 'a, F, E>
where
    F: FnMut(Option<&'a str>, &'a str, &'a str) -> Result<(), E>,
{
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { reading, outer } = self;
        while let Some(key) = reading.next_key(&mut map)? {
            reading.at = outer.or(Some(key));
            let rest = if outer.is_none() { &reading.text[reading.end..] } else { "" };
            let rest = rest.trim_ascii_start().trim_start_matches(':').trim_ascii_start();
            let value = if is_object(rest) {
                map.next_value_seed(Object { reading: &mut *reading, outer: Some(key) })?;
                &rest[..rest.len() - (reading.text.len() - reading.end)]
            } else {
                map.next_value::<&RawValue>()?.get()
            };
            reading.end = reading.behind(value);
            if let Err(refused) = (reading.each)(outer, key, value) {
                reading.refused = Some(refused);
                return Err(A::Error::custom(""));
            }
            reading.at = outer;
        }
        // Only white space comes before the bracket that ends it.
        let rest = &reading.text[reading.end..];
        reading.end += rest.find('}').map_or(0, |bracket| bracket + 1);
        Ok(())
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

/// Calls `each` with the whole numbers of a list that was checked and starts a text. `false`: it is something else, or
/// has something else in it.
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

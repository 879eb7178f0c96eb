//! JSON as serde_json reads it, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. serde_json keeps a copy of a string that has escapes, and writes a value of the wrong kind into its
//! error. So keys and values are taken as they stand in the text, which only checks them; short ones are then read
//! further ([`text`], [`numbers`]).

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
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

/// Whether the value that a text starts with is an object.
pub(super) fn is_object(text: &str) -> bool {
    text.trim_ascii_start().starts_with('{')
}

/// The fields of a tensor's entry.
pub(super) const FIELDS: [&str; 3] = ["dtype", "shape", "data_offsets"];

/// Their values, as they stand in the text.
pub(super) type FieldValues<'a> = [Option<&'a str>; FIELDS.len()];

/// Reads a text that is one object. `each` takes each key, without its quotes, and its value, as they stand in the text.
/// `told` makes an error of what is no JSON, with the key of the value in which that was found.
pub(super) fn entries<'a, E>(
    text: &'a str,
    told: impl FnOnce(serde_json::Error, Option<&'a str>) -> E,
    mut each: impl FnMut(&'a str, &'a str) -> Result<(), E>,
) -> Result<(), E> {
    objects(text, |_| false, told, |key, value, _| each(key, value))
}

/// The same for an object of objects, each byte of which is read once: where a key `opens` an object, `each` takes that
/// object's fields, and the text from it on.
pub(super) fn objects<'a, E>(
    text: &'a str,
    opens: impl Fn(&str) -> bool,
    told: impl FnOnce(serde_json::Error, Option<&'a str>) -> E,
    each: impl FnMut(&'a str, &'a str, Option<FieldValues<'a>>) -> Result<(), E>,
) -> Result<(), E> {
    // Of a string in its place serde_json's error has all.
    if !is_object(text) {
        return Err(told(serde_json::Error::custom("an object is expected"), None));
    }
    let mut object = Object { text, is_plain: !text.contains('\\'), opens, each, at: None, refused: None };
    let mut json = serde_json::Deserializer::from_str(text);
    let read = json.deserialize_map(&mut object).and_then(|()| json.end());
    read.map_err(|error| object.refused.unwrap_or_else(|| told(error, object.at)))
}

struct Object<'a, O, F, E> {
    text: &'a str,
    /// Whether the text has no escapes.
    is_plain: bool,
    opens: O,
    each: F,
    /// The key of the entry that is being read.
    at: Option<&'a str>,
    refused: Option<E>,
}

impl<'a, E, O, F> Visitor<'a> for &mut Object<'a, O, F, E>
where
    O: Fn(&str) -> bool,
    F: FnMut(&'a str, &'a str, Option<FieldValues<'a>>) -> Result<(), E>,
{
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = next_key(&mut map, self.is_plain)? {
            self.at = Some(key);
            let end = key.as_ptr() as usize - self.text.as_ptr() as usize + key.len() + 1;
            let behind = self.text[end..].trim_ascii_start().trim_start_matches(':');
            let (value, fields) = match (self.opens)(key) && is_object(behind) {
                true => (behind, Some(map.next_value_seed(Fields { is_plain: self.is_plain })?)),
                false => (map.next_value::<&RawValue>()?.get(), None),
            };
            if let Err(refused) = (self.each)(key, value, fields) {
                self.refused = Some(refused);
                return Err(A::Error::custom(""));
            }
            self.at = None;
        }
        Ok(())
    }
}

/// Reads an object that is opened.
struct Fields {
    is_plain: bool,
}

impl<'a> DeserializeSeed<'a> for Fields {
    type Value = FieldValues<'a>;

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'a> Visitor<'a> for Fields {
    type Value = FieldValues<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = [None; FIELDS.len()];
        while let Some(key) = next_key(&mut map, self.is_plain)? {
            let value = map.next_value::<&RawValue>()?.get();
            let name = if self.is_plain { key.into() } else { text(key).map_err(A::Error::custom)? };
            let field = FIELDS.iter().position(|field| *field == name);
            if field.and_then(|field| fields[field].replace(value)).is_some() {
                return Err(A::Error::custom(format_args!("its {name} is said twice")));
            }
        }
        Ok(fields)
    }
}

/// The next key of an object, without its quotes.
fn next_key<'a, A: MapAccess<'a>>(map: &mut A, is_plain: bool) -> Result<Option<&'a str>, A::Error> {
    match is_plain {
        // serde_json copies only a string that has escapes.
        true => map.next_key::<&str>(),
        false => Ok(map.next_key::<&RawValue>()?.and_then(|key| inside(key.get()))),
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

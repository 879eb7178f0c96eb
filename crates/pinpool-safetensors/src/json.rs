//! JSON objects as serde_json reads them, entry by entry, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and refusing it must take little
//! more memory. serde_json copies a string that has escapes, and writes a value of the wrong kind
//! into its error. So keys and values are taken as the text has them, and only short ones are read
//! further.

use std::borrow::Cow;
use std::fmt;

use pinpool::{Error, Result};
use serde::Deserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The longest string, and the longest description of a tensor, in bytes as the file has them.
pub(super) const LONGEST: usize = 65_535;

/// Calls `each` with the keys and values of a text that is one object, as the text has them:
/// strings have quotes. `told` makes an error of what is no such object.
pub(super) fn entries<'a>(
    text: &'a str,
    told: impl FnOnce(&dyn fmt::Display) -> Error,
    each: impl FnMut(&'a str, &'a str) -> Result<()>,
) -> Result<()> {
    // Counted in pieces whose counts fit a byte, which is several times as fast.
    let count = |piece: &[u8]| piece.iter().map(|byte| u8::from(matches!(byte, b'[' | b'{'))).sum::<u8>();
    let brackets: usize = text.as_bytes().chunks(255).map(|piece| usize::from(count(piece))).sum();
    // serde_json notes a byte for each level of a value that it passes over.
    if brackets > text.len() / 8 + 100 {
        return Err(told(&"it is mostly brackets"));
    }
    if !text.trim_ascii_start().starts_with('{') {
        return Err(told(&"an object is expected"));
    }
    let mut refused = None;
    let mut json = serde_json::Deserializer::from_str(text);
    let read = json.deserialize_map(Entries { each, refused: &mut refused }).and_then(|()| json.end());
    read.map_err(|error| refused.unwrap_or_else(|| told(&error)))
}

struct Entries<'r, F> {
    each: F,
    /// The error of `each`: serde passes on texts only.
    refused: &'r mut Option<Error>,
}

impl<'a, F: FnMut(&'a str, &'a str) -> Result<()>> Visitor<'a> for Entries<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some((key, value)) = map.next_entry::<&RawValue, &RawValue>()? {
            if let Err(error) = (self.each)(key.get(), value.get()) {
                *self.refused = Some(error);
                return Err(A::Error::custom(""));
            }
        }
        Ok(())
    }
}

/// The string that a key or value is.
pub(super) fn string(raw: &str) -> Result<Cow<'_, str>, String> {
    let inside = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).ok_or("a text is expected")?;
    if inside.len() > LONGEST {
        return Err(format!("a text is longer than {LONGEST} bytes"));
    }
    match inside.contains('\\') {
        false => Ok(inside.into()),
        true => serde_json::from_str(raw).map(Cow::Owned).map_err(|said| said.to_string()),
    }
}

/// A key for a message: as it stands in the text, where it cannot be read.
pub(super) fn named(key: &str) -> Cow<'_, str> {
    string(key).unwrap_or(key.into())
}

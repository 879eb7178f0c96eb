//! JSON as serde_json reads it, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. serde_json keeps a copy of a text that has escapes, and writes a value of the wrong kind into its
//! error. So each name and each value is taken as it stands in the text ([`RawValue`]), which only checks it, and this
//! module looks at those that are asked for. What is asked for stands in objects in one object: both levels are visited
//! by serde_json, and each byte is read by it once.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
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

/// What stands behind a name in an object.
pub(super) enum Part<'a> {
    /// A value that is no object, as it stands in the text.
    Value(&'a str),
    /// An entry of a value that is an object: the entry's name, and its value as it stands in the text.
    Entry(Text<'a>, &'a str),
    /// The end of such a value, with all of it as it stands in the text.
    End(&'a str),
}

/// Calls `each` with every name of an object, and with each part of its value, in the order of the text. Each part is
/// read once.
pub(super) fn object<'a>(
    text: &'a str,
    each: impl FnMut(Text<'a>, Part<'a>) -> Result<()>,
) -> Result<(), Fault<'a>> {
    if !text.trim_start_matches([' ', '\t', '\n', '\r']).starts_with('{') {
        return Err(Fault::NoObject);
    }
    let mut reader = Reader { each, at: None, refused: None };
    let mut json = serde_json::Deserializer::from_str(text);
    let read = Entries { text, of: None, reader: &mut reader }.deserialize(&mut json);
    match (reader.refused, read.and_then(|()| json.end())) {
        (Some(error), _) => Err(Fault::Refused(error)),
        (None, Err(error)) => Err(Fault::Syntax(error, reader.at)),
        (None, Ok(())) => Ok(()),
    }
}

struct Reader<'a, F> {
    each: F,
    /// The name whose value is being read.
    at: Option<Text<'a>>,
    refused: Option<Error>,
}

impl<'a, F: FnMut(Text<'a>, Part<'a>) -> Result<()>> Reader<'a, F> {
    fn tell<E: serde::de::Error>(&mut self, name: Text<'a>, part: Part<'a>) -> Result<(), E> {
        (self.each)(name, part).map_err(|error| {
            self.refused = Some(error);
            E::custom("")
        })
    }
}

/// The entries of an object.
struct Entries<'s, 'a, F> {
    /// It starts with the object, or in the whole text with what is before it.
    text: &'a str,
    /// The name behind which the object stands. `None`: the object is the whole text.
    of: Option<Text<'a>>,
    reader: &'s mut Reader<'a, F>,
}

impl<'de, F: FnMut(Text<'de>, Part<'de>) -> Result<()>> DeserializeSeed<'de> for Entries<'_, 'de, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de, F: FnMut(Text<'de>, Part<'de>) -> Result<()>> Visitor<'de> for Entries<'_, 'de, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { text, of, reader } = self;
        let mut end = 0;
        while let Some(name) = map.next_key::<&RawValue>()? {
            let behind = &text[place(text, name.get()) + name.get().len()..];
            let name = Text::of(name.get()).ok_or_else(|| A::Error::custom("half of a surrogate pair"))?;
            if let Some(of) = of {
                let value = map.next_value::<&RawValue>()?.get();
                end = place(text, value) + value.len();
                reader.tell(of, Part::Entry(name, value))?;
                continue;
            }
            reader.at = Some(name);
            // Looked at before serde_json does, which copies a value of another kind into its error.
            let value = behind.trim_start_matches([':', ' ', '\t', '\n', '\r']);
            if value.starts_with('{') {
                map.next_value_seed(Entries { text: value, of: Some(name), reader: &mut *reader })?;
            } else {
                let value = map.next_value::<&RawValue>()?.get();
                reader.tell(name, Part::Value(value))?;
            }
            reader.at = None;
        }
        let Some(of) = of else { return Ok(()) };
        // Behind the last value comes only the brace that ends the object.
        end += text[end..].bytes().position(|byte| byte == b'}').map_or(0, |brace| brace + 1);
        reader.tell(of, Part::End(&text[..end]))
    }
}

/// Whether arrays and objects are nested no deeper than they may be. (serde_json notes a byte for each level of a value
/// that it skips, and has no limit there. A text that is not mostly brackets is not looked at: the notes are short.)
pub(super) fn is_shallow(text: &str) -> bool {
    // Counted in pieces whose counts fit a byte, which is several times as fast.
    let count = |piece: &[u8]| piece.iter().map(|byte| u8::from(matches!(byte, b'[' | b'{'))).sum::<u8>();
    let opened: usize = text.as_bytes().chunks(255).map(|piece| usize::from(count(piece))).sum();
    if opened <= text.len() / 8 {
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

/// Calls `each` with the whole numbers of a list that was checked and starts here. `false`: it is something else, or has
/// something else in it.
pub(super) fn numbers(text: &str, mut each: impl FnMut(u64)) -> bool {
    let Some(list) = text.strip_prefix('[') else { return false };
    let mut number: Option<u64> = None;
    for byte in list.bytes() {
        match byte {
            b'0'..=b'9' => {
                let shifted = number.unwrap_or(0).checked_mul(10);
                let Some(more) = shifted.and_then(|n| n.checked_add((byte - b'0').into())) else {
                    return false;
                };
                number = Some(more);
            }
            b',' | b']' => {
                number.take().into_iter().for_each(&mut each);
                if byte == b']' {
                    return true;
                }
            }
            b' ' | b'\t' | b'\n' | b'\r' => {}
            _ => return false,
        }
    }
    false
}

/// A string that was checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Text<'a> {
    /// As it stands between its quotes, with its escapes.
    pub(super) raw: &'a str,
    /// Whether it has no escapes.
    pub(super) plain: bool,
}

impl<'a> Text<'a> {
    /// `None` for a value that is no string, or one with half of a surrogate pair, which serde_json lets pass in values
    /// that it takes as they stand.
    pub(super) fn of(value: &'a str) -> Option<Self> {
        let raw = value.strip_prefix('"')?.strip_suffix('"')?;
        let text = Self { raw, plain: !raw.as_bytes().contains(&b'\\') };
        (text.plain || text.unescape(|_| ())).then_some(text)
    }

    /// A string that was checked before, and starts here.
    pub(super) fn at(text: &'a str) -> Option<Self> {
        let mut json = serde_json::Deserializer::from_str(text);
        let value = <&RawValue as serde::Deserialize>::deserialize(&mut json).ok()?;
        Self::of(value.get())
    }

    /// Calls `put` with the parts of the unescaped string. `false`: half of a surrogate pair stands alone.
    fn unescape(self, mut put: impl FnMut(&str)) -> bool {
        let mut rest = self.raw;
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
    #[inline]
    pub(super) fn get(self) -> Cow<'a, str> {
        if self.plain {
            return self.raw.into();
        }
        let mut text = String::with_capacity(self.raw.len());
        self.unescape(|part| text.push_str(part));
        text.into()
    }

    /// The string for a message, which shows its start: as the file has it, where unescaping it would copy too much.
    pub(super) fn start(self) -> Cow<'a, str> {
        if self.raw.len() > LONGEST_NAME { self.raw.into() } else { self.get() }
    }

    /// Whether the unescaped string is `other`, a short one.
    #[inline]
    pub(super) fn is(self, other: &str) -> bool {
        self.raw == other || (!self.plain && self.start() == other)
    }
}

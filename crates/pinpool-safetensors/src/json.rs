//! JSON as serde_json reads it, with a copy of nothing.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. serde_json keeps a copy of a text that has escapes, and writes a value of the wrong kind into its
//! error. So each name and each value is taken as it stands in the text ([`RawValue`]), which only checks it, and an
//! object is visited only where the text shows one ([`is_object`]). Each byte of a tensor is read by serde_json once.
//! Values that were checked are then looked at in the text.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The longest name of a tensor, in bytes as the file has it.
pub(super) const LONGEST_NAME: usize = 65_535;
/// How deep arrays and objects may be nested, as in serde_json's other readers.
const DEEPEST: usize = 128;

/// The name of an entry, the text from its value on, and whether that has no escapes.
pub(super) struct Key<'a> {
    pub(super) name: Text<'a>,
    pub(super) rest: &'a str,
    pub(super) plain: bool,
}

/// What takes the entries of an object, in the order of the text.
pub(super) trait Entries<'a> {
    /// Takes an entry, whose value is the next of `map`.
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error>;
}

/// Reads a text that is one object.
pub(super) fn read<'a>(text: &'a str, entries: &mut impl Entries<'a>) -> Result<(), serde_json::Error> {
    if !is_object(text) {
        return Err(serde_json::Error::custom("it is no object"));
    }
    let mut json = serde_json::Deserializer::from_str(text);
    Object { text, plain: !text.contains('\\'), entries }.deserialize(&mut json)?;
    json.end()
}

/// Whether the value that a text starts with is an object.
pub(super) fn is_object(text: &str) -> bool {
    behind_space(text).starts_with('{')
}

/// A text from its first value on.
fn behind_space(text: &str) -> &str {
    let space = text.bytes().take_while(|byte| matches!(byte, b':' | b' ' | b'\t' | b'\n' | b'\r'));
    &text[space.count()..]
}

/// The next value as it stands in the text, checked.
pub(super) fn value<'a, A: MapAccess<'a>>(map: &mut A) -> Result<&'a str, A::Error> {
    Ok(map.next_value::<&RawValue>()?.get())
}

/// The value that a text starts with, which was checked before.
pub(super) fn first(text: &str) -> &str {
    let mut json = serde_json::Deserializer::from_str(text);
    <&RawValue as serde::Deserialize>::deserialize(&mut json).map_or("", RawValue::get)
}

/// Reads an object.
pub(super) struct Object<'e, 'a, E> {
    /// The text from somewhere before the object on, and whether it has no escapes.
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
            let name = match plain {
                true => map.next_key::<&str>()?,
                false => map.next_key::<&RawValue>()?.map(RawValue::get),
            };
            let Some(name) = name else { return Ok(()) };
            let name = match plain {
                true => Text { raw: name, plain },
                false => Text::of(name).ok_or_else(|| A::Error::custom("half of a surrogate pair"))?,
            };
            // Its quote is behind it.
            let rest = behind_space(&text[place(text, name.raw) as usize + name.raw.len() + 1..]);
            entries.entry(Key { name, rest, plain }, &mut map)?;
        }
    }
}

/// How many arrays and objects begin in a text, at most. `None`: they are nested deeper than they may be. (serde_json
/// notes a byte for each level of a value that it skips, and has no limit there.)
pub(super) fn brackets(text: &str) -> Option<usize> {
    // Counted in pieces whose counts fit a byte, which is several times as fast.
    let count = |piece: &[u8]| piece.iter().map(|byte| u8::from(matches!(byte, b'[' | b'{'))).sum::<u8>();
    let opened: usize = text.as_bytes().chunks(255).map(|piece| usize::from(count(piece))).sum();
    // A text that is not mostly brackets is not looked at: the notes are short.
    if opened <= text.len() / 8 {
        return Some(opened);
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
            return None;
        }
    }
    Some(opened)
}

/// Where a part of a text starts in it. Texts have at most 100,000,000 bytes, so it fits 32 bits.
pub(super) fn place(text: &str, part: &str) -> u32 {
    (part.as_ptr() as usize - text.as_ptr() as usize) as u32
}

/// Calls `each` with the whole numbers of a list that was checked and starts a text. `false`: it is something else, or has
/// something else in it.
pub(super) fn numbers(text: &str, mut each: impl FnMut(u64)) -> bool {
    let Some(list) = text.strip_prefix('[') else { return false };
    let (list, mut at) = (list.as_bytes(), 0);
    loop {
        let (start, mut number) = (at, 0_u64);
        while let Some(digit @ b'0'..=b'9') = list.get(at) {
            let shifted = number.checked_mul(10);
            let Some(more) = shifted.and_then(|n| n.checked_add(u64::from(digit - b'0'))) else {
                return false;
            };
            (number, at) = (more, at + 1);
        }
        if at > start {
            each(number);
        }
        match list.get(at) {
            Some(b',' | b' ' | b'\t' | b'\n' | b'\r') => at += 1,
            end => return end == Some(&b']'),
        }
    }
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
    #[inline]
    pub(super) fn of(value: &'a str) -> Option<Self> {
        let raw = value.strip_prefix('"')?.strip_suffix('"')?;
        let text = Self { raw, plain: !raw.as_bytes().contains(&b'\\') };
        (text.plain || text.unescape(|_| ())).then_some(text)
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

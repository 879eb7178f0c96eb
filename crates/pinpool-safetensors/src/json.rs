//! JSON, read in place.
//!
//! A header or an index may be a hundred megabytes of anything, and one that is refused must take little more memory
//! than its own bytes. The usual readers copy each string that has an escape in it, and all of a wrong value into their
//! error. This reader allocates nothing:
//!
//! - a string comes out as it stands in the text ([`Text`]), checked, and the caller unescapes it where it is kept;
//! - a value that the caller does not ask for is skipped, down to 128 levels;
//! - a fault names its place, and shows the text there.
//!
//! A caller goes forward through the text and names the kind of value that it expects. Objects and arrays call a
//! closure for each entry, which must read the entry's value. A place can be noted and read again later. Property tests
//! compare the reader with `serde_json`.

use std::borrow::Cow;
use std::fmt::{self, Display, Formatter};

use crate::escape::Shown;

/// How deep arrays and objects may be nested.
const DEEPEST: u32 = 128;
/// Characters of the text that a fault shows.
const NEAR: usize = 40;

/// A fault in the text, and its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonFault<'a> {
    kind: JsonKind,
    why: &'static str,
    at: usize,
    near: &'a str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonKind {
    /// The text ends too soon.
    End,
    /// The text is no JSON.
    Syntax,
    /// The text is JSON, but not the value that the caller expects.
    Other,
}

impl JsonFault<'_> {
    pub(super) fn kind(&self) -> JsonKind {
        self.kind
    }
}

impl Display for JsonFault<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { kind, why, at, near } = self;
        match kind {
            JsonKind::End => write!(f, "{why}, and the text ends at byte {at}"),
            _ => write!(f, "{why} at byte {at}: {}", Shown(*near, NEAR)),
        }
    }
}

type Result<'a, T> = std::result::Result<T, JsonFault<'a>>;

/// A string, as it stands between its quotes: checked, and not unescaped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Text<'a> {
    pub(super) raw: &'a str,
    /// Where it starts in the whole text.
    pub(super) at: usize,
    /// Whether it has no escapes.
    pub(super) plain: bool,
}

impl<'a> Text<'a> {
    /// A string that was read before, at this place and of this length.
    pub(super) fn checked(text: &'a str, at: usize, len: usize, plain: bool) -> Self {
        Self { raw: text.get(at..at + len).unwrap_or_default(), at, plain }
    }

    /// The length of the unescaped string, in bytes.
    pub(super) fn unescaped_len(self) -> usize {
        if self.plain { self.raw.len() } else { self.chars().map(char::len_utf8).sum() }
    }

    /// The unescaped characters.
    pub(super) fn chars(self) -> impl Iterator<Item = char> + 'a {
        let mut chars = self.raw.chars();
        std::iter::from_fn(move || {
            let character = chars.next()?;
            if character != '\\' {
                return Some(character);
            }
            Some(match chars.next()? {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                'u' => {
                    let mut unit =
                        || chars.by_ref().take(4).fold(0, |n, c| n * 16 + c.to_digit(16).unwrap_or(0));
                    let mut code = unit();
                    if (0xd800..0xdc00).contains(&code) {
                        // The other half of the pair, behind another `\u`, as `string` has checked.
                        let low = chars.by_ref().nth(1).map_or(0, |_| {
                            chars.by_ref().take(4).fold(0, |n, c| n * 16 + c.to_digit(16).unwrap_or(0))
                        });
                        code = 0x10000 + ((code - 0xd800) << 10) + (low & 0x3ff);
                    }
                    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
                same => same,
            })
        })
    }

    /// The unescaped string: a copy where it has escapes, so only for strings that are known to be short.
    pub(super) fn get(self) -> Cow<'a, str> {
        if self.plain { self.raw.into() } else { self.chars().collect() }
    }

    /// Appends the unescaped string. It is never longer than `raw`, for which `text` has room.
    pub(super) fn add_to(self, text: &mut String) {
        if self.plain {
            text.push_str(self.raw);
        } else {
            text.extend(self.chars());
        }
    }

    /// Whether the unescaped string is `other`.
    pub(super) fn is(self, other: &str) -> bool {
        if self.plain { self.raw == other } else { self.chars().eq(other.chars()) }
    }

    /// Compares the unescaped strings.
    pub(super) fn compare(self, other: Text<'_>) -> std::cmp::Ordering {
        // The order of UTF-8's bytes is that of the characters.
        match self.plain && other.plain {
            true => self.raw.cmp(other.raw),
            false => self.chars().cmp(other.chars()),
        }
    }
}

/// A reader, at a place of its text.
#[derive(Clone, Debug)]
pub(super) struct Json<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Json<'a> {
    /// A reader at a place between two values.
    pub(super) fn at(text: &'a str, at: usize) -> Self {
        Self { text, at }
    }

    /// The reader's place, in bytes.
    pub(super) fn place(&self) -> usize {
        self.at
    }

    /// A fault at the reader's place.
    pub(super) fn fault(&self, why: &'static str) -> JsonFault<'a> {
        self.fault_at(self.at, JsonKind::Other, why)
    }

    fn fault_at(&self, at: usize, kind: JsonKind, why: &'static str) -> JsonFault<'a> {
        let near = self.text.get(at..).unwrap_or_default();
        let kind = if near.is_empty() { JsonKind::End } else { kind };
        JsonFault { kind, why, at, near }
    }

    fn syntax<T>(&self, why: &'static str) -> Result<'a, T> {
        Err(self.fault_at(self.at, JsonKind::Syntax, why))
    }

    /// The next byte that is no white space.
    fn peek(&mut self) -> Option<u8> {
        let rest = self.text.as_bytes().get(self.at..)?;
        let space = rest.iter().position(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
        self.at += space.unwrap_or(rest.len());
        rest.get(space?).copied()
    }

    /// Goes past the next byte that is no white space, if it is `byte`.
    fn take(&mut self, byte: u8) -> bool {
        let is = self.peek() == Some(byte);
        self.at += usize::from(is);
        is
    }

    /// Reads an object. Calls `each` with the name of every entry; it must read the entry's value.
    pub(super) fn object(
        &mut self,
        mut each: impl FnMut(&mut Self, Text<'a>) -> Result<'a, ()>,
    ) -> Result<'a, ()> {
        if !self.take(b'{') {
            return Err(self.fault("an object is expected"));
        }
        if self.take(b'}') {
            return Ok(());
        }
        loop {
            if self.peek() != Some(b'"') {
                return self.syntax("a name in quotes is expected");
            }
            let name = self.string()?;
            if !self.take(b':') {
                return self.syntax("a colon is expected");
            }
            self.peek();
            each(self, name)?;
            if self.take(b'}') {
                return Ok(());
            }
            if !self.take(b',') {
                return self.syntax("a comma or the object's end is expected");
            }
        }
    }

    /// Reads an array. Calls `each` for every element, which it must read.
    pub(super) fn array(&mut self, mut each: impl FnMut(&mut Self) -> Result<'a, ()>) -> Result<'a, ()> {
        if !self.take(b'[') {
            return Err(self.fault("a list is expected"));
        }
        if self.take(b']') {
            return Ok(());
        }
        loop {
            self.peek();
            each(self)?;
            if self.take(b']') {
                return Ok(());
            }
            if !self.take(b',') {
                return self.syntax("a comma or the list's end is expected");
            }
        }
    }

    /// Reads a string.
    pub(super) fn string(&mut self) -> Result<'a, Text<'a>> {
        if self.peek() != Some(b'"') {
            return Err(self.fault("a text is expected"));
        }
        let (bytes, start) = (self.text.as_bytes(), self.at + 1);
        let (mut at, mut plain) = (start, true);
        loop {
            at += ordinary(&bytes[at..]);
            match bytes.get(at) {
                Some(b'"') => break,
                Some(b'\\') => {
                    plain = false;
                    let Some(len) = escape_len(&bytes[at..]) else {
                        return Err(self.fault_at(at, JsonKind::Syntax, "this is no escape"));
                    };
                    at += len;
                }
                Some(_) => {
                    return Err(self.fault_at(at, JsonKind::Syntax, "a control character is in a text"));
                }
                None => return Err(self.fault_at(at, JsonKind::End, "a text has no end")),
            }
        }
        self.at = at + 1;
        Ok(Text { raw: &self.text[start..at], at: start, plain })
    }

    /// Reads a colon and the string behind it.
    pub(super) fn colon_string(&mut self) -> Result<'a, Text<'a>> {
        self.take(b':');
        self.string()
    }

    /// Reads a whole number.
    pub(super) fn unsigned(&mut self) -> Result<'a, u64> {
        self.peek();
        let rest = &self.text.as_bytes()[self.at..];
        let digits = digits(rest);
        let number = rest[..digits]
            .iter()
            .try_fold(0_u64, |number, digit| number.checked_mul(10)?.checked_add(u64::from(digit - b'0')));
        let whole = digits > 0 && (digits == 1 || rest[0] != b'0');
        match number {
            Some(number) if whole && !matches!(rest.get(digits), Some(b'.' | b'e' | b'E')) => {
                self.at += digits;
                Ok(number)
            }
            _ => Err(self.fault("a whole number below 2^64 is expected")),
        }
    }

    /// Goes past `null`, if that is next.
    pub(super) fn null(&mut self) -> bool {
        self.word("null")
    }

    fn word(&mut self, word: &str) -> bool {
        self.peek();
        let is = self.text[self.at..].starts_with(word);
        self.at += if is { word.len() } else { 0 };
        is
    }

    /// Reads any value, and checks it.
    pub(super) fn skip(&mut self) -> Result<'a, ()> {
        self.skip_within(DEEPEST)
    }

    fn skip_within(&mut self, depth: u32) -> Result<'a, ()> {
        let next = self.peek();
        let deeper = || depth.checked_sub(1).ok_or(self.fault("this is nested too deeply"));
        match next {
            Some(b'{') => {
                let depth = deeper()?;
                self.object(|json, _| json.skip_within(depth))
            }
            Some(b'[') => {
                let depth = deeper()?;
                self.array(|json| json.skip_within(depth))
            }
            Some(b'"') => self.string().map(drop),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ if ["null", "true", "false"].iter().any(|word| self.word(word)) => Ok(()),
            _ => self.syntax("a value is expected"),
        }
    }

    fn number(&mut self) -> Result<'a, ()> {
        let bytes = self.text.as_bytes();
        let mut at = self.at + usize::from(bytes[self.at] == b'-');
        let part = |at: usize| digits(bytes.get(at..).unwrap_or_default());
        let whole = part(at);
        let mut right = whole == 1 || (whole > 1 && bytes[at] != b'0');
        at += whole;
        if bytes.get(at) == Some(&b'.') {
            let fraction = part(at + 1);
            right &= fraction > 0;
            at += 1 + fraction;
        }
        if matches!(bytes.get(at), Some(b'e' | b'E')) {
            at += 1 + usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
            let exponent = part(at);
            right &= exponent > 0;
            at += exponent;
        }
        if !right {
            return self.syntax("this is no number");
        }
        self.at = at;
        Ok(())
    }

    /// Checks that nothing but white space follows.
    pub(super) fn end(&mut self) -> Result<'a, ()> {
        match self.peek() {
            None => Ok(()),
            Some(_) => self.syntax("something follows the value"),
        }
    }
}

/// How many digits the bytes start with.
fn digits(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

/// How many bytes there are before a quote, a backslash or a control character. Looks at eight at a time, since names
/// are most of a header.
fn ordinary(bytes: &[u8]) -> usize {
    const ONES: u64 = u64::MAX / 255;
    // Sets the top bit of each byte that is zero. A borrow may set it in bytes above a zero byte too; the lowest set
    // bit is right, and only that one is used.
    let zero = |word: u64| word.wrapping_sub(ONES) & !word;
    let mut before = 0;
    for chunk in bytes.chunks_exact(8) {
        let word = chunk.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let control = word.wrapping_sub(ONES * 0x20) & !word;
        let found =
            (control | zero(word ^ (ONES * u64::from(b'"'))) | zero(word ^ (ONES * u64::from(b'\\'))))
                & (ONES * 0x80);
        if found != 0 {
            return before + found.trailing_zeros() as usize / 8;
        }
        before += 8;
    }
    before + bytes[before..].iter().take_while(|byte| !matches!(byte, b'"' | b'\\' | 0..0x20)).count()
}

/// The length of the escape that the bytes start with.
fn escape_len(bytes: &[u8]) -> Option<usize> {
    let unit = |at: usize| {
        let digits = bytes.get(at..at + 6).filter(|bytes| bytes.starts_with(b"\\u"))?;
        digits[2..].iter().try_fold(0, |n, digit| Some(n * 16 + char::from(*digit).to_digit(16)?))
    };
    match bytes.get(1)? {
        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(2),
        b'u' => match unit(0)? {
            // The first half of a surrogate pair must be followed by the second.
            0xd800..0xdc00 => matches!(unit(6)?, 0xdc00..0xe000).then_some(12),
            0xdc00..0xe000 => None,
            _ => Some(6),
        },
        _ => None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// Reads a value by this module's calls alone, into the type of `serde_json`.
    fn read<'a>(json: &mut Json<'a>) -> Result<'a, Value> {
        match json.peek() {
            Some(b'{') => {
                let mut map = serde_json::Map::new();
                json.object(|json, name| {
                    map.insert(name.get().into_owned(), read(json)?);
                    Ok(())
                })?;
                Ok(Value::Object(map))
            }
            Some(b'[') => {
                let mut list = Vec::new();
                json.array(|json| {
                    list.push(read(json)?);
                    Ok(())
                })?;
                Ok(Value::Array(list))
            }
            Some(b'"') => {
                let text = json.string()?;
                let mut copy = String::with_capacity(text.raw.len());
                let room = copy.capacity();
                text.add_to(&mut copy);
                assert!(copy.capacity() == room && text.is(&copy) && copy == text.get());
                Ok(copy.into())
            }
            Some(b'0'..=b'9') if json.clone().unsigned().is_ok() => Ok(json.unsigned()?.into()),
            _ => {
                let start = json.place();
                json.skip()?;
                Ok(serde_json::from_str(&json.text[start..json.place()]).unwrap_or(Value::Null))
            }
        }
    }

    fn same(text: &str) {
        let mut json = Json::at(text, 0);
        let ours = read(&mut json).and_then(|value| json.end().map(|()| value));
        let mut skipping = Json::at(text, 0);
        let skipped = skipping.skip().and_then(|()| skipping.end());
        match serde_json::from_str::<Value>(text) {
            Ok(theirs) => {
                assert_eq!(ours.unwrap(), theirs, "{text:?}");
                assert!(skipped.is_ok(), "{text:?}");
            }
            // `serde_json` refuses numbers beyond the range of floating point; this reader does not.
            Err(error) if error.to_string().contains("out of range") => {}
            Err(error) => assert!(ours.is_err() && skipped.is_err(), "{text:?}: {error}"),
        }
    }

    #[test]
    fn the_edges_are_those_of_the_well_known_reader() {
        for text in [
            "",
            " ",
            "{}",
            "[]",
            "[ ]",
            "{ }",
            "[,]",
            "[1,]",
            "{\"a\":1,}",
            "{\"a\"}",
            "{a:1}",
            "{\"a\" : [ 1 , 2 ] }",
            "nul",
            "null",
            "nulll",
            "true",
            "-",
            "-0",
            "0",
            "00",
            "01",
            "1.",
            "1.5",
            ".5",
            "1e",
            "1e+",
            "1e+5",
            "1E5",
            "1.0e-3",
            "-1.5e3",
            "18446744073709551615",
            "18446744073709551616",
            "\"",
            "\"a",
            "\"\\\"",
            "\"\\u00e9\"",
            "\"\\ud83d\\ude00\"",
            "\"\\ud83d\"",
            "\"\\ude00\"",
            "\"\\ud83d\\u0041\"",
            "\"\\ud83dx\"",
            "\"\\u12\"",
            "\"\\u12g4\"",
            "\"\\x\"",
            "\"\t\"",
            "\"\u{7f}\u{80}é\"",
            "\"12345678\\n12345678\"",
            "\"1234567\n\"",
            "[1 2]",
            "{} x",
            "[\"\\/\\b\\f\\n\\r\\t\\\\\"]",
        ] {
            same(text);
        }
        for depth in [100, 126, 127, 129, 100_000] {
            let deep = "[".repeat(depth) + &"]".repeat(depth);
            assert_eq!(Json::at(&deep, 0).skip().is_ok(), depth < 128, "{depth}");
        }
    }

    proptest! {
        #[test]
        fn whatever_it_is(text in "[\\[\\]{}:,\"\\\\ abu0-9dDeEfnrtls.+-]{0,24}") {
            same(&text);
        }

        #[test]
        fn texts_of_any_characters(text in any::<String>(), after in "[ ,x]{0,9}") {
            let quoted = serde_json::to_string(&text).unwrap();
            same(&quoted);
            let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            same(&format!("[\"{escaped}\"]"));
            same(&format!("{quoted}{after}"));
        }
    }
}

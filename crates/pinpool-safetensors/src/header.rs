//! A file's header: what it says, and whether that can be.
//!
//! # How it works
//!
//! The header is JSON, and read in three passes.
//!
//! 1. [`Notes`] reads the text in place ([`super::json`]) and notes 32 bytes of each entry ([`HeaderEntry`]). An
//!    entry's text is longer than that, so a header that is refused takes at most two and a half times its own bytes of
//!    memory, these included.
//! 2. [`place`] and [`named_once`] check the notes, in the file's order, by the format's rules: no gaps, no overlaps,
//!    nothing past the end, as many bytes as type and shape need, each name once.
//! 3. [`entries_to_tensors`] makes what is kept: a list of tensors, which share one text with all names and one list
//!    with all axes ([`NamesAndAxes`]). It reads names and axes from the text again.
//!
//! Memory in proportion to the header is asked for in few large pieces, each by way of [`reserved`], so that the system
//! can refuse it. The `safetensors` crate knows the types of elements.

use std::borrow::Borrow;
use std::fmt;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ::safetensors::Dtype;
use serde::de::Deserialize;
use serde::de::value::{Error as Unknown, StrDeserializer};
use xxhash_rust::xxh3::xxh3_64;

use super::json::{Json, JsonFault, JsonKind, Text};
use super::{blamed, malformed, reserved, stand_in, unread};
use crate::escape::{NAME, Shown};
use pinpool::{Error, Result};

/// Bytes before the header: its length, as a little-endian number.
pub(super) const FRONT: usize = 8;
/// Bytes of a file's start that are looked at to say what it is where it is no safetensors file.
pub(super) const START: usize = 64;
/// The longest header that the format allows.
const LONGEST_HEADER: u64 = 100_000_000;
/// The most axes that a tensor may have: NumPy's arrays have no more (`NPY_MAXDIMS`).
const AXES: usize = 64;
/// Axes that a message shows.
const SHOWN_AXES: usize = 8;
/// The longest name of a tensor, in bytes as the file has it.
pub(super) const LONGEST_NAME: usize = 65_535;
/// The length of the shortest entry of a tensor: it bounds how many entries a header can have.
const SHORTEST_ENTRY: usize = r#""":{"dtype":"U8","shape":[],"data_offsets":[0,0]},"#.len();
/// The header's entry that is no tensor.
const METADATA_KEY: &str = "__metadata__";

/// A tensor in a file, as the file's header describes it.
///
/// ```
/// use pinpool_safetensors::{Dtype, Header};
///
/// let header = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
/// let start = [&(header.len() as u64).to_le_bytes()[..], header].concat();
/// let header = Header::parse("a.safetensors", &start, start.len() as u64 + 24)?;
///
/// let tensor = &header.tensors[0];
/// assert_eq!((tensor.name(), tensor.dtype(), tensor.shape()), ("a", Dtype::F32, &[2_usize, 3][..]));
/// assert_eq!(tensor.len(), 24);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    all: Arc<NamesAndAxes>,
    /// Its range in `all.names`: start and end.
    name: (u32, u32),
    /// Its range in `all.axes`: start and count.
    axes: (u32, u8),
    dtype: Dtype,
    /// Its bytes in the file.
    range: Range<u64>,
}

/// What the tensors of a file share: their names, one behind the other, and their axes.
#[derive(Default)]
struct NamesAndAxes {
    names: String,
    axes: Vec<usize>,
}

impl Tensor {
    /// Its name, unique in its checkpoint. It is as the file has it and may be any text: escape it (`{:?}`) where it is
    /// shown.
    #[must_use]
    pub fn name(&self) -> &str {
        self.all.names.get(self.name.0 as usize..self.name.1 as usize).unwrap_or_default()
    }

    /// Its name, as a key of a map.
    pub(super) fn key(&self) -> HeaderKey {
        HeaderKey(self.all.clone(), self.name)
    }

    /// The type of its elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each axis. Those along the last axis lie side by side. Empty for a single element.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        let (first, count) = (self.axes.0 as usize, usize::from(self.axes.1));
        self.all.axes.get(first..first + count).unwrap_or_default()
    }

    /// The number of its bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether it has no elements, which the format allows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The range of its bytes in the file.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}

impl PartialEq for Tensor {
    fn eq(&self, other: &Self) -> bool {
        (self.name(), self.dtype, self.shape(), &self.range)
            == (other.name(), other.dtype, other.shape(), &other.range)
    }
}

impl Eq for Tensor {}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("name", &self.name())
            .field("dtype", &self.dtype)
            .field("shape", &self.shape())
            .field("range", &self.range)
            .finish()
    }
}

/// A tensor's name as a key of a map, without a copy of the text.
pub(super) struct HeaderKey(Arc<NamesAndAxes>, (u32, u32));

impl Borrow<str> for HeaderKey {
    fn borrow(&self) -> &str {
        self.0.names.get(self.1.0 as usize..self.1.1 as usize).unwrap_or_default()
    }
}

impl PartialEq for HeaderKey {
    fn eq(&self, other: &Self) -> bool {
        Borrow::<str>::borrow(self) == Borrow::<str>::borrow(other)
    }
}

impl Eq for HeaderKey {}

impl Hash for HeaderKey {
    fn hash<H: Hasher>(&self, to: &mut H) {
        Borrow::<str>::borrow(self).hash(to);
    }
}

impl fmt::Debug for HeaderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Borrow::<str>::borrow(self).fmt(f)
    }
}

/// A header's metadata (`__metadata__`): keys and values, in the header's order, unchecked.
///
/// ```
/// use pinpool_safetensors::Header;
///
/// let header = br#"{"__metadata__":{"format":"pt"}}"#;
/// let start = [&(header.len() as u64).to_le_bytes()[..], header].concat();
/// let header = Header::parse("a.safetensors", &start, start.len() as u64)?;
/// assert_eq!(header.metadata.iter().next(), Some(("format", "pt")));
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// All keys and values, one behind the other.
    text: String,
    /// Where in `text` each of them ends.
    ends: Vec<u32>,
}

impl Metadata {
    /// The pairs of key and value.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        let part = |index: usize| {
            let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
            self.text.get(start as usize..self.ends[index] as usize).unwrap_or_default()
        };
        (0..self.ends.len() / 2).map(move |pair| (part(2 * pair), part(2 * pair + 1)))
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// A file's header, checked: the tensors lie side by side, from the end of the header to the end of the file.
///
/// [`read`](Self::read) reads it from a file. [`parse`](Self::parse) takes the first bytes of one, from an object store
/// for example:
///
/// ```
/// use pinpool_safetensors::Header;
///
/// let header = br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// let start = [&(header.len() as u64).to_le_bytes()[..], header].concat();
/// let header = Header::parse("a.safetensors", &start, start.len() as u64 + 4)?;
/// assert_eq!(header.tensors[0].range().start, start.len() as u64);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The tensors, in the file's order.
    pub tensors: Vec<Tensor>,
    /// The metadata (`__metadata__`).
    pub metadata: Metadata,
}

impl Header {
    /// Reads a file's header. `name` is the file's name in errors.
    ///
    /// While it is read, a header that is refused takes at most two and a half times its bytes of memory, and one that
    /// is accepted at most five times. What is kept has some 60 bytes for each tensor, and its name.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Malformed`] for a [refused](super#what-is-refused) header; [`Error::OutOfMemory`].
    pub fn read(file: &File, name: &str) -> Result<Self> {
        let len = file.metadata().map_err(|error| unread(name, 0, &error))?.len();
        Self::of_file(file, name, len)
    }

    /// Reads the header of a file of `file_len` bytes from its first bytes, `start`, which must have all of the header.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a [refused](super#what-is-refused) header, and for one that is not wholly in `start`;
    /// [`Error::OutOfMemory`].
    pub fn parse(name: &str, start: &[u8], file_len: u64) -> Result<Self> {
        let len = header_len(name, start, file_len)?;
        match start.get(FRONT..FRONT + len) {
            Some(header) => Self::check(name, header, file_len),
            None => {
                let there = start.len() - FRONT;
                Err(malformed(name, format!("its header has {len} bytes, of which {there} are there")))
            }
        }
    }

    /// As [`read`](Self::read), of a file that has `len` bytes.
    pub(super) fn of_file(file: &File, name: &str, len: u64) -> Result<Self> {
        let unread = |error: io::Error| unread(name, 0, &error);
        let mut start = [0; START];
        let start = &mut start[..len.min(START as u64) as usize];
        file.read_exact_at(start, 0).map_err(unread)?;
        // Checked before memory is asked for.
        let header = header_len(name, start, len)?;
        let mut bytes = Vec::new();
        reserved(bytes.try_reserve_exact(header), name, header)?;
        bytes.resize(header, 0);
        file.read_exact_at(&mut bytes, FRONT as u64).map_err(unread)?;
        Self::check(name, &bytes, len)
    }

    fn check(what: &str, header: &[u8], file_len: u64) -> Result<Self> {
        // The whole header at once is faster than each of its strings.
        let text = std::str::from_utf8(header).map_err(|error| no_object(what, &error))?;
        let mut notes = Notes { text, what, entries: Vec::new(), metadata: None, at: None, unknown: None };
        notes.read()?;
        let Notes { mut entries, metadata, .. } = notes;
        // Headers mostly have the file's order already. A tensor without bytes starts where another does, and comes
        // before it.
        let order = |a: &HeaderEntry, b: &HeaderEntry| {
            (a.from, a.to).cmp(&(b.from, b.to)).then_with(|| a.name(text).compare(b.name(text)))
        };
        if !entries.is_sorted_by(|a, b| order(a, b).is_le()) {
            entries.sort_unstable_by(order);
        }
        let start = (FRONT + header.len()) as u64;
        place(what, text, &entries, file_len.saturating_sub(start))?;
        named_once(what, text, &mut entries)?;
        entries_to_tensors(what, text, &entries, start, metadata)
    }
}

/// The header's length, from the file's first bytes, checked against the file's length and the format.
fn header_len(name: &str, start: &[u8], file_len: u64) -> Result<usize> {
    let Some((front, rest)) = start.split_first_chunk::<FRONT>() else {
        let len = file_len.min(start.len() as u64);
        let why =
            format!("{len} bytes are too few for a safetensors file, which starts with 8 bytes of length");
        return Err(malformed(name, why));
    };
    let len = u64::from_le_bytes(*front);
    if len > LONGEST_HEADER {
        let why = stand_in(start).unwrap_or_else(|| {
            let is_header = rest.starts_with(b"{") && len < file_len;
            let remedy = if is_header { "split it into several files" } else { "it is no safetensors file" };
            format!("its header would have {len} bytes, where the format allows {LONGEST_HEADER}; {remedy}")
        });
        return Err(malformed(name, why));
    }
    let room = file_len.saturating_sub(FRONT as u64);
    if len > room {
        let why = format!(
            "its header has {len} bytes, and the file only {room} behind the first 8; it was cut off: get it again"
        );
        return Err(malformed(name, why));
    }
    usize::try_from(len).map_err(|_| malformed(name, "its header is larger than all memory"))
}

fn no_object(what: &str, said: &dyn fmt::Display) -> Error {
    let said = Shown(said, 2 * NAME);
    malformed(what, format!("its header is no JSON object ({said}); it is no safetensors file, or damaged"))
}

/// The error for two tensors of one file with the same name.
pub(super) fn twice(what: &str, tensor: &str) -> Error {
    fault(what, &tensor, "is there twice, and it is unknown which of the two is meant")
}

/// The error for a fault of one tensor, with the remedy for a file that is damaged or made to mislead.
fn fault(what: &str, tensor: &dyn fmt::Display, why: impl fmt::Display) -> Error {
    let why = format!("{why}; the file is damaged or made to mislead: get it from where it can be trusted");
    blamed(what, tensor, why)
}

/// What is noted of a tensor: where its parts are in the header's text, and the numbers that are checked.
struct HeaderEntry {
    /// Its name between the quotes: start and length in the text.
    name: (u32, u32),
    /// Whether the name has no escapes.
    plain: bool,
    /// Where its list of axes starts in the text.
    shape: u32,
    /// How many axes it has.
    axes: u8,
    dtype: Dtype,
    /// Whether type and shape need as many bytes as it has.
    fits: bool,
    /// Its bytes, counted from the start of the data.
    from: u64,
    to: u64,
}

impl HeaderEntry {
    fn name<'a>(&self, text: &'a str) -> Text<'a> {
        Text::checked(text, self.name.0 as usize, self.name.1 as usize, self.plain)
    }

    fn bytes(&self) -> Range<u64> {
        self.from..self.to
    }
}

/// Reads a list of axes, and calls `each` for every one. Returns how many there are.
fn axes<'a>(json: &mut Json<'a>, mut each: impl FnMut(usize)) -> std::result::Result<u8, JsonFault<'a>> {
    let mut count = 0;
    json.array(|json| {
        if count == AXES {
            return Err(json.fault("its shape has more than 64 axes"));
        }
        let axis =
            usize::try_from(json.clone().unsigned()?).map_err(|_| json.fault("no memory is so large"))?;
        json.unsigned()?;
        count += 1;
        each(axis);
        Ok(())
    })?;
    Ok(count as u8)
}

/// The first pass: reads the header into notes.
struct Notes<'a> {
    text: &'a str,
    /// The file's name, for errors.
    what: &'a str,
    entries: Vec<HeaderEntry>,
    metadata: Option<Pairs>,
    /// The name of the entry that is being read.
    at: Option<Text<'a>>,
    /// The name of its type, if that could be the name of one, and is not known.
    unknown: Option<&'a str>,
}

/// What is noted of the metadata.
#[derive(Clone, Copy, Default)]
struct Pairs {
    /// Where its object starts in the text. `None`: it is `null`.
    at: Option<usize>,
    /// How many pairs it has.
    count: usize,
    /// The bytes of all keys and values in the text.
    bytes: usize,
}

impl<'a> Notes<'a> {
    fn read(&mut self) -> Result<()> {
        let mut json = Json::at(self.text, 0);
        let (mut kind, mut refused) = (None, None);
        let result = json.object(|json, name| {
            self.at = Some(name);
            if name.is(METADATA_KEY) {
                if self.metadata.is_some() {
                    return Err(json.fault("it is there twice"));
                }
                self.metadata = Some(pairs(json)?);
            } else {
                let entry = entry(json, name, &mut kind, &mut self.unknown)?;
                if let Err(error) = self.add(entry, json.place()) {
                    refused = Some(error);
                    return Err(json.fault("no memory"));
                }
            }
            self.at = None;
            Ok(())
        });
        let result = result.and_then(|()| json.end());
        match refused {
            Some(error) => Err(error),
            None => result.map_err(|fault| self.blame(&fault)),
        }
    }

    /// Adds an entry, which ends at `place` in the text.
    fn add(&mut self, entry: HeaderEntry, place: usize) -> Result<()> {
        if self.entries.len() == self.entries.capacity() {
            // The list doubles, but to no more entries than the rest of the text has room for: so the old list and the
            // new one together take less than the text.
            let most = (self.text.len() - place) / SHORTEST_ENTRY + 1;
            let more = self.entries.len().max(64).min(most);
            reserved(self.entries.try_reserve_exact(more), self.what, more * size_of::<HeaderEntry>())?;
        }
        self.entries.push(entry);
        Ok(())
    }

    /// The error for a fault in the text, with the tensor's name if the fault is in its entry.
    fn blame(&self, found: &JsonFault<'_>) -> Error {
        match self.at {
            Some(name) if name.is(METADATA_KEY) && found.kind() == JsonKind::Other => {
                malformed(self.what, format!("its metadata is not an object of texts ({found})"))
            }
            Some(name) if self.unknown.is_some() => {
                let why = format!(
                    "has elements of a type that is not known, {:?}; the file may be of a newer version of the format: \
                     upgrade pinpool",
                    self.unknown.unwrap_or_default()
                );
                blamed(self.what, &Unescaped(name), why)
            }
            Some(name) if found.kind() != JsonKind::End && !name.is(METADATA_KEY) => {
                let why = format!("is not described as the format asks ({found})");
                fault(self.what, &Unescaped(name), format_args!("{why}"))
            }
            _ => no_object(self.what, found),
        }
    }
}

/// Displays a string of the file without its JSON escapes.
pub(super) struct Unescaped<'a>(pub(super) Text<'a>);

impl fmt::Display for Unescaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        self.0.chars().try_for_each(|character| f.write_char(character))
    }
}

/// Reads the metadata into a note.
fn pairs<'a>(json: &mut Json<'a>) -> std::result::Result<Pairs, JsonFault<'a>> {
    let mut pairs = Pairs { at: Some(json.place()), ..Pairs::default() };
    if json.null() {
        return Ok(Pairs::default());
    }
    json.object(|json, key| {
        pairs.count += 1;
        pairs.bytes += key.raw.len() + json.string()?.raw.len();
        Ok(())
    })?;
    Ok(pairs)
}

/// Reads the entry of one tensor. `before` is the type of the entry before, which most tensors have too. `unknown`: see
/// [`Notes`].
fn entry<'a>(
    json: &mut Json<'a>,
    name: Text<'a>,
    before: &mut Option<(&'a str, Dtype)>,
    unknown: &mut Option<&'a str>,
) -> std::result::Result<HeaderEntry, JsonFault<'a>> {
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    let mut elements = Some(1_u64);
    json.object(|json, field| {
        let again = |there: bool| if there { Err(json.fault("this is said twice")) } else { Ok(()) };
        if field.is("dtype") {
            again(dtype.is_some())?;
            let wrong = json.fault("this is the name of no type");
            let said = json.string()?;
            let known = before.filter(|(name, _)| *name == said.raw).map(|(_, dtype)| dtype);
            let read = || {
                // No type has a name that is longer, even with each character escaped.
                let name = if said.raw.len() <= 100 { said.get() } else { return None };
                Dtype::deserialize(StrDeserializer::<Unknown>::new(&name)).ok()
            };
            let Some(known) = known.or_else(read) else {
                let is_name =
                    said.raw.len() <= 32 && said.raw.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
                *unknown = is_name.then_some(said.raw);
                return Err(wrong);
            };
            *before = Some((said.raw, known));
            dtype = Some(known);
        } else if field.is("shape") {
            again(shape.is_some())?;
            let (at, mut empty) = (json.place() as u32, false);
            let count = axes(json, |axis| {
                empty |= axis == 0;
                elements = elements.and_then(|n| n.checked_mul(axis as u64));
            })?;
            // An axis of no elements makes a tensor of no elements, also where the others would overflow.
            elements = if empty { Some(0) } else { elements };
            shape = Some((at, count));
        } else if field.is("data_offsets") {
            again(offsets.is_some())?;
            let wrong = json.fault("two offsets are expected");
            let (mut ends, mut count) = ([0; 2], 0);
            json.array(|json| {
                *ends.get_mut(count).ok_or(wrong)? = json.unsigned()?;
                count += 1;
                Ok(())
            })?;
            if count != 2 {
                return Err(wrong);
            }
            offsets = Some(ends);
        } else {
            json.skip()?;
        }
        Ok(())
    })?;
    let Some(dtype) = dtype else { return Err(json.fault("it has no dtype")) };
    let Some((shape, axes)) = shape else { return Err(json.fault("it has no shape")) };
    let Some([from, to]) = offsets else { return Err(json.fault("it has no data_offsets")) };
    if name.raw.len() > LONGEST_NAME {
        return Err(json.fault("its name is longer than 65,535 bytes"));
    }
    let bits = elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64));
    let fits = bits.zip(to.checked_sub(from)).is_some_and(|(bits, len)| bits % 8 == 0 && bits / 8 == len);
    // A header has at most 100,000,000 bytes, so positions in it fit 32 bits.
    let (name, plain) = ((name.at as u32, name.raw.len() as u32), name.plain);
    Ok(HeaderEntry { name, plain, shape, axes, dtype, fits, from, to })
}

/// Checks tensors, which are in the order of their offsets, against each other and against the `data` bytes of the
/// file behind the header.
fn place(what: &str, text: &str, entries: &[HeaderEntry], data: u64) -> Result<()> {
    let mut end = 0;
    for (index, entry) in entries.iter().enumerate() {
        let Range { start: from, end: to } = entry.bytes();
        let name = Unescaped(entry.name(text));
        let wrong = |why: String| Err(fault(what, &name, why));
        if to < from {
            return wrong(format!("ends at {to}, before its start at {from}"));
        }
        if from < end {
            let other = index.checked_sub(1).map(|before| Unescaped(entries[before].name(text)));
            let other = other.as_ref().map_or(&"" as &dyn fmt::Display, |name| name);
            let other = Shown(other, NAME);
            return wrong(format!("starts at {from}, inside of tensor \"{other}\", which ends at {end}"));
        }
        if from > end {
            return wrong(format!("starts at {from}, and bytes {end}..{from} before it belong to no tensor"));
        }
        if !entry.fits {
            return wrong(misfit(text, entry));
        }
        if to > data {
            let why = format!(
                "lies at {from}..{to} of {data} bytes, past the file's end; the file was cut off: get it again"
            );
            return Err(blamed(what, &name, why));
        }
        end = to;
    }
    if end < data {
        let why = format!("{} bytes at its end belong to no tensor; get it again", data - end);
        return Err(malformed(what, why));
    }
    Ok(())
}

/// Why a tensor has not as many bytes as its type and shape need.
fn misfit(text: &str, entry: &HeaderEntry) -> String {
    let mut shape = Vec::with_capacity(AXES);
    // No error is possible: the first pass has read this list.
    let _ = axes(&mut Json::at(text, entry.shape as usize), |axis| shape.push(axis));
    let told = match shape.get(..SHOWN_AXES) {
        Some(first) if shape.len() > SHOWN_AXES => {
            let first: String = first.iter().map(|axis| format!("{axis}, ")).collect();
            format!("[{first}... {} axes]", shape.len())
        }
        _ => format!("{shape:?}"),
    };
    let (dtype, Range { start: from, end: to }) = (entry.dtype, entry.bytes());
    let elements = match shape.contains(&0) {
        true => Some(0),
        false => shape.iter().try_fold(1_u64, |n, &axis| n.checked_mul(axis as u64)),
    };
    match elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64)) {
        None => format!("has the shape {told}, more elements than any memory holds"),
        Some(bits) if bits % 8 != 0 => {
            format!("is {dtype} of shape {told}, which is no whole number of bytes")
        }
        Some(bits) => {
            let (need, have) = (bits / 8, to.saturating_sub(from));
            format!("is {dtype} of shape {told}, {need} bytes, and has {have} at {from}..{to}")
        }
    }
}

/// An error if two tensors have the same name. Names are compared by their hashes, which take eight bytes each, and
/// only where two hashes are equal by their text.
fn named_once(what: &str, text: &str, entries: &mut [HeaderEntry]) -> Result<()> {
    let mut hashes = Vec::new();
    reserved(hashes.try_reserve_exact(entries.len()), what, size_of_val(entries) / 4)?;
    hashes.extend(entries.iter().map(|entry| xxh3_64(entry.name(text).get().as_bytes())));
    hashes.sort_unstable();
    if hashes.windows(2).all(|pair| pair[0] != pair[1]) {
        return Ok(());
    }
    drop(hashes);
    let mut by_name: Vec<u32> = Vec::new();
    reserved(by_name.try_reserve_exact(entries.len()), what, size_of_val(entries) / 8)?;
    by_name.extend(0..entries.len() as u32);
    let name = |place: u32| entries[place as usize].name(text);
    by_name.sort_unstable_by(|a, b| name(*a).compare(name(*b)));
    match by_name.windows(2).find(|pair| name(pair[0]).compare(name(pair[1])).is_eq()) {
        Some(pair) => Err(twice(what, &name(pair[0]).get())),
        None => Ok(()),
    }
}

/// The last pass: what is kept of a header that was checked. The data starts at `start` in the file.
fn entries_to_tensors(
    what: &str,
    text: &str,
    entries: &[HeaderEntry],
    start: u64,
    metadata: Option<Pairs>,
) -> Result<Header> {
    let (mut shared, mut tensors) = (NamesAndAxes::default(), Vec::new());
    let (bytes, count) = entries.iter().fold((0, 0), |(bytes, count), entry| {
        (bytes + entry.name.1 as usize, count + usize::from(entry.axes))
    });
    reserved(shared.names.try_reserve_exact(bytes), what, bytes)?;
    reserved(shared.axes.try_reserve_exact(count), what, count * size_of::<usize>())?;
    reserved(tensors.try_reserve_exact(entries.len()), what, entries.len() * size_of::<Tensor>())?;
    for entry in entries {
        entry.name(text).add_to(&mut shared.names);
        // No error is possible: the first pass has read this list.
        let _ = axes(&mut Json::at(text, entry.shape as usize), |axis| shared.axes.push(axis));
    }
    let all = Arc::new(shared);
    let (mut name, mut axis) = (0, 0);
    tensors.extend(entries.iter().map(|entry| {
        let to = name + entry.name(text).unescaped_len() as u32;
        let range = start + entry.from..start + entry.to;
        let tensor = Tensor {
            all: all.clone(),
            name: (name, to),
            axes: (axis, entry.axes),
            dtype: entry.dtype,
            range,
        };
        (name, axis) = (to, axis + u32::from(entry.axes));
        tensor
    }));
    let mut kept = Metadata::default();
    if let Some(Pairs { at: Some(at), count, bytes }) = metadata {
        reserved(kept.text.try_reserve_exact(bytes), what, bytes)?;
        reserved(kept.ends.try_reserve_exact(2 * count), what, 2 * count * size_of::<u32>())?;
        // No error is possible: the first pass has read this object.
        let _ = Json::at(text, at).object(|json, key| {
            for part in [key, json.string()?] {
                part.add_to(&mut kept.text);
                kept.ends.push(kept.text.len() as u32);
            }
            Ok(())
        });
    }
    Ok(Header { tensors, metadata: kept })
}

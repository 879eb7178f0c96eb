//! A file's header: what it says, and whether that can be.
//!
//! # How it works
//!
//! The header is JSON, and read in three passes.
//!
//! 1. [`Notes`] reads the text in place ([`super::json`]) and notes 32 bytes of each tensor ([`Entry`]). A tensor's text
//!    is longer than that, so a header that is refused takes at most two and a half times its own bytes of memory, these
//!    included. Whatever concerns one tensor is checked here.
//! 2. [`side_by_side`] and [`Names::sort`] check the notes against each other: no gaps, no overlaps, nothing past the end,
//!    each name once.
//! 3. [`Notes::keep`] makes what is kept: a table of all tensors, with one text of all names and one list of all axes.
//!    The notes become its entries. It reads names and axes from the text again.
//!
//! Memory in proportion to the header is asked for in few large pieces, each by way of [`reserved`], so that the system
//! can refuse it. The `safetensors` crate knows the types of elements.

use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use ::safetensors::Dtype;
use serde::de::{Error as _, IgnoredAny, MapAccess};

use super::json::{self, Entries, Key, LONGEST_NAME, Object, Text};
use super::{NAME, blamed, malformed, reserved, shown, stand_in, unread};
use pinpool::{Error, Result};

/// Bytes before the header: its length, as a little-endian number.
pub(super) const FRONT: usize = 8;
/// Bytes of a file's start that are looked at to say what it is where it is no safetensors file.
pub(super) const START: usize = 64;
/// The longest header that the format allows.
const LONGEST_HEADER: u64 = 100_000_000;
/// The most axes that a tensor may have: NumPy's arrays have no more (`NPY_MAXDIMS`).
const AXES: usize = 64;
/// Characters of a value that a message shows.
const NEAR: usize = 40;
/// The length of the shortest entry of a tensor, and the brackets in each: they bound how many a header can have.
const SHORTEST_ENTRY: usize = r#""":{"dtype":"U8","shape":[],"data_offsets":[0,0]},"#.len();
const ENTRY_BRACKETS: usize = 3;
/// The header's entry that is no tensor.
const METADATA_KEY: &str = "__metadata__";

/// What a file's header says: a table of its tensors, in the file's order.
pub(super) struct Table {
    pub(super) path: Box<Path>,
    /// The tensors' names, one behind the other, and their axes.
    names: String,
    axes: Vec<usize>,
    pub(super) entries: Vec<Entry>,
    metadata: Option<Box<str>>,
}

/// A tensor. Until [`Notes::keep`], `name` and `shape` are places in the header's text, and offsets count from the start
/// of the data; from then on they are places in the table's names and axes, and the file's offsets.
pub(super) struct Entry {
    name: u32,
    shape: u32,
    name_len: u16,
    axes: u8,
    /// Whether the name stands in the text without escapes.
    plain: bool,
    dtype: Dtype,
    /// Whether it belongs to the checkpoint: an index may leave it out.
    pub(super) listed: bool,
    pub(super) from: u64,
    pub(super) to: u64,
}

impl Entry {
    pub(super) fn is_empty(&self) -> bool {
        self.from == self.to
    }

    pub(super) fn bytes(&self) -> u64 {
        self.to - self.from
    }

    /// Its name in the header's text.
    fn text<'a>(&self, text: &'a str) -> Text<'a> {
        let raw = &text[self.name as usize..][..usize::from(self.name_len)];
        Text { raw, plain: self.plain }
    }
}

impl Table {
    pub(super) fn name(&self, tensor: u32) -> &str {
        let entry = &self.entries[tensor as usize];
        &self.names[entry.name as usize..][..usize::from(entry.name_len)]
    }

    /// The tensors that belong to the checkpoint.
    pub(super) fn listed(&self) -> impl Iterator<Item = (u32, &Entry)> {
        (0..).zip(&self.entries).filter(|(_, entry)| entry.listed)
    }
}

/// A tensor in a file, as the file's header describes it. A clone is a handle to the same description.
#[derive(Clone)]
pub struct Tensor {
    pub(super) table: Arc<Table>,
    pub(super) index: u32,
}

impl Tensor {
    pub(super) fn entry(&self) -> &Entry {
        &self.table.entries[self.index as usize]
    }

    /// Its name, unique in its checkpoint. It is as the file has it and may be any text: escape it (`{:?}`) where it is
    /// shown.
    #[must_use]
    pub fn name(&self) -> &str {
        self.table.name(self.index)
    }

    /// The type of its elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.entry().dtype
    }

    /// Elements along each axis. Those along the last axis lie side by side. Empty for a single element.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        let entry = self.entry();
        &self.table.axes[entry.shape as usize..][..usize::from(entry.axes)]
    }

    /// The number of its bytes. The format allows tensors without elements, which have none.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.entry().bytes()
    }

    /// The range of its bytes in the file.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.entry().from..self.entry().to
    }

    /// The path of its file, as it was given or found.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.table.path
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("name", &self.name())
            .field("dtype", &self.dtype())
            .field("shape", &self.shape())
            .field("range", &self.range())
            .finish()
    }
}

/// A file's header, checked: the tensors lie side by side, from the end of the header to the end of the file.
/// [`Checkpoint::open`](super::Checkpoint::open) reads it from a file; this is for one in an object store, for example.
///
/// ```
/// use pinpool_safetensors::{Dtype, Header};
///
/// let header = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"__metadata__":{"format":"pt"}}"#;
/// let start = [&(header.len() as u64).to_le_bytes()[..], header].concat();
/// let header = Header::parse("a.safetensors", &start, start.len() as u64 + 24)?;
/// assert_eq!(header.metadata(), Some(r#"{"format":"pt"}"#));
///
/// let tensor = header.tensors().next().expect("it has one");
/// assert_eq!((tensor.name(), tensor.dtype(), tensor.shape()), ("a", Dtype::F32, &[2_usize, 3][..]));
/// assert_eq!(tensor.range(), start.len() as u64..start.len() as u64 + 24);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Header(pub(super) Arc<Table>);

impl Header {
    /// Reads the header of a file of `file_len` bytes from its first bytes, `start`, which must have all of the header.
    ///
    /// # Errors
    /// [`Error::Malformed`] for a [refused](super#what-is-refused) header, and for one that is not wholly in `start`;
    /// [`Error::OutOfMemory`].
    pub fn parse(name: &str, start: &[u8], file_len: u64) -> Result<Self> {
        let len = header_len(name, start, file_len)?;
        let Some(header) = start.get(FRONT..FRONT + len) else {
            let there = start.len() - FRONT;
            return Err(malformed(name, format!("its header has {len} bytes, of which {there} are there")));
        };
        let (table, _) = read(name, Path::new(name), header, file_len)?;
        Ok(Self(Arc::new(table)))
    }

    /// The tensors, in the file's order.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor> {
        self.0.listed().map(|(index, _)| Tensor { table: self.0.clone(), index })
    }

    /// The metadata (`__metadata__`), as the header has it: a JSON object of texts.
    #[must_use]
    pub fn metadata(&self) -> Option<&str> {
        self.0.metadata.as_deref()
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.tensors()).finish()
    }
}

/// Reads the header of a file that has `len` bytes: its table, and the places there by names.
pub(super) fn of_file(file: &File, what: &str, path: &Path, len: u64) -> Result<(Table, Names<u32>)> {
    let unread = |error: io::Error| unread(what, 0, &error);
    let mut start = [0; START];
    let start = &mut start[..len.min(START as u64) as usize];
    file.read_exact_at(start, 0).map_err(unread)?;
    // Checked before memory is asked for.
    let header = header_len(what, start, len)?;
    let mut bytes = Vec::new();
    reserved(bytes.try_reserve_exact(header), what, header)?;
    bytes.resize(header, 0);
    file.read_exact_at(&mut bytes, FRONT as u64).map_err(unread)?;
    read(what, path, &bytes, len)
}

fn read(what: &str, path: &Path, header: &[u8], file_len: u64) -> Result<(Table, Names<u32>)> {
    // The whole header at once is faster than each of its strings.
    let text = std::str::from_utf8(header).map_err(|error| no_object(what, &error))?;
    let Some(brackets) = json::brackets(text) else {
        return Err(no_object(what, &"it is nested too deeply"));
    };
    let most = (text.len() / SHORTEST_ENTRY + 1).min(brackets / ENTRY_BRACKETS);
    let mut notes =
        Notes { text, what, entries: Vec::new(), metadata: None, dtype: None, at: None, refused: None };
    reserved(notes.entries.try_reserve_exact(most), what, most * size_of::<Entry>())?;
    let read = json::read(text, &mut notes);
    if let Some(error) = notes.refused {
        return Err(error);
    }
    read.map_err(|said| match notes.at.filter(|_| !said.is_eof()) {
        Some(name) if name.is(METADATA_KEY) => no_metadata(what, &said),
        Some(name) => undescribed(what, name, &said),
        None => no_object(what, &said),
    })?;
    // Headers mostly have the file's order already. A tensor without bytes starts where another does, and comes before
    // it.
    let order = |a: &Entry, b: &Entry| {
        (a.from, a.to).cmp(&(b.from, b.to)).then_with(|| a.text(text).get().cmp(&b.text(text).get()))
    };
    if !notes.entries.is_sorted_by(|a, b| order(a, b).is_le()) {
        notes.entries.sort_unstable_by(order);
    }
    let start = (FRONT + header.len()) as u64;
    side_by_side(what, text, &notes.entries, file_len.saturating_sub(start))?;
    let name = |tensor: u32| notes.entries[tensor as usize].text(text).get();
    // (A header has no room for 2^32 tensors.)
    let count = notes.entries.len();
    let hashed = (0..count as u32).map(|tensor| (hash(&name(tensor)), tensor));
    let (names, again) = Names::sort(what, count, hashed, name)?;
    if let Some((tensor, _)) = again {
        return Err(twice(what, &name(tensor)));
    }
    Ok((notes.keep(path, start)?, names))
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
    Ok(len as usize)
}

fn no_object(what: &str, said: &dyn fmt::Display) -> Error {
    malformed(what, format!("its header is no JSON object ({said}); it is no safetensors file, or damaged"))
}

fn no_metadata(what: &str, said: &dyn fmt::Display) -> Error {
    malformed(what, format!("its metadata is not an object of texts ({said})"))
}

/// The error for an entry that is not what the format asks for.
fn undescribed(what: &str, tensor: Text<'_>, said: &dyn fmt::Display) -> Error {
    fault(what, tensor, format_args!("is not described as the format asks ({said})"))
}

/// The error for a fault of one tensor, with the remedy for a file that is damaged or made to mislead.
fn fault(what: &str, tensor: Text<'_>, why: impl fmt::Display) -> Error {
    let why = format!("{why}; the file is damaged or made to mislead: get it from where it can be trusted");
    blamed(what, &tensor.start(), why)
}

/// What the entry of a tensor has: the text from each value on.
#[derive(Default)]
struct Fields<'a> {
    dtype: Option<&'a str>,
    shape: Option<&'a str>,
    offsets: Option<&'a str>,
    again: Option<&'a str>,
}

impl<'a> Entries<'a> for Fields<'a> {
    #[inline(always)]
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error> {
        let Key { name, rest, .. } = key;
        map.next_value::<IgnoredAny>()?;
        let field = match () {
            () if name.is("dtype") => &mut self.dtype,
            () if name.is("shape") => &mut self.shape,
            () if name.is("data_offsets") => &mut self.offsets,
            () => return Ok(()),
        };
        if field.replace(rest).is_some() {
            self.again = Some(name.raw);
        }
        Ok(())
    }
}

/// The first pass: reads the header into notes.
struct Notes<'a> {
    text: &'a str,
    /// The file's name, for errors.
    what: &'a str,
    entries: Vec<Entry>,
    metadata: Option<&'a str>,
    /// The type of the tensor before, which most tensors have too.
    dtype: Option<(&'a str, Dtype)>,
    /// The name of the entry that is being read, and why it was refused.
    at: Option<Text<'a>>,
    refused: Option<Error>,
}

impl<'a> Entries<'a> for Notes<'a> {
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error> {
        let Key { name, rest, plain } = key;
        self.at = Some(name);
        let noted = if name.is(METADATA_KEY) {
            let value = json::value(map)?;
            self.note_metadata(value)
        } else if json::is_object(rest) {
            let mut fields = Fields::default();
            map.next_value_seed(Object { text: rest, plain, entries: &mut fields })?;
            self.note(name, &fields)
        } else {
            let told = shown(json::value(map)?, NEAR);
            Err(undescribed(self.what, name, &format_args!("an object is expected: {told}")))
        };
        self.at = None;
        noted.map_err(|error| {
            self.refused = Some(error);
            A::Error::custom("")
        })
    }
}

/// Metadata: an object of texts.
struct Texts;

impl<'a> Entries<'a> for Texts {
    fn entry<A: MapAccess<'a>>(&mut self, _: Key<'a>, map: &mut A) -> Result<(), A::Error> {
        let text = Text::of(json::value(map)?).map(drop);
        text.ok_or_else(|| A::Error::custom("a text is expected"))
    }
}

impl<'a> Notes<'a> {
    fn note_metadata(&mut self, value: &'a str) -> Result<()> {
        if self.metadata.replace(value).is_some() {
            return Err(no_metadata(self.what, &"it is there twice"));
        }
        match value {
            "null" => Ok(()),
            value => json::read(value, &mut Texts).map_err(|said| no_metadata(self.what, &said)),
        }
    }

    /// Makes the note of a tensor.
    fn note(&mut self, name: Text<'a>, fields: &Fields<'a>) -> Result<()> {
        let what = self.what;
        let wrong = |said: &dyn fmt::Display| undescribed(what, name, said);
        if name.raw.len() > LONGEST_NAME {
            return Err(wrong(&"its name is longer than 65,535 bytes"));
        }
        if let Some(field) = fields.again {
            return Err(wrong(&format_args!("its {field} is said twice")));
        }
        let dtype = self.dtype(name, fields.dtype.ok_or_else(|| wrong(&"it has no dtype"))?)?;
        let shape = fields.shape.ok_or_else(|| wrong(&"it has no shape"))?;
        let told = |rest| shown(json::first(rest), NEAR);
        let (axes, elements) = axes(shape).map_err(|said| wrong(&format_args!("{said}: {}", told(shape))))?;
        let offsets = fields.offsets.ok_or_else(|| wrong(&"it has no data_offsets"))?;
        let (mut count, mut from, mut to) = (0, 0, 0);
        let are_numbers = json::numbers(offsets, |offset| (count, from, to) = (count + 1, to, offset));
        if !are_numbers || count != 2 {
            return Err(wrong(&format_args!("two offsets are expected: {}", told(offsets))));
        }
        if to < from {
            return Err(fault(what, name, format!("ends at {to}, before its start at {from}")));
        }
        let bits = elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64));
        if bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != to - from) {
            return Err(fault(what, name, misfit(dtype, &told(shape), bits, &(from..to))));
        }
        self.entries.push(Entry {
            name: json::place(self.text, name.raw),
            shape: json::place(self.text, shape),
            name_len: name.raw.len() as u16,
            axes,
            plain: name.plain,
            dtype,
            listed: true,
            from,
            to,
        });
        Ok(())
    }

    /// The type of a tensor's elements, whose name starts `rest` of the text.
    fn dtype(&mut self, tensor: Text<'_>, rest: &'a str) -> Result<Dtype> {
        if let Some((_, dtype)) = self.dtype.filter(|(last, _)| rest.starts_with(last)) {
            return Ok(dtype);
        }
        let value = json::first(rest);
        // No type has a name that is longer, even with each character escaped.
        let known = Some(value).filter(|value| value.starts_with('"') && value.len() <= 100);
        let dtype = known.and_then(|value| serde_json::from_str(value).ok()).ok_or_else(|| {
            let why = format!(
                "has elements of no type that is known: {}; if the file is of a newer version of the format, upgrade \
                 pinpool",
                shown(value, NEAR)
            );
            blamed(self.what, &tensor.start(), why)
        })?;
        self.dtype = Some((value, dtype));
        Ok(dtype)
    }

    /// The last pass: what is kept of a header that was checked. The data starts at `start` in the file.
    fn keep(self, path: &Path, start: u64) -> Result<Table> {
        let Self { text, what, mut entries, .. } = self;
        let (mut names, mut axes, mut metadata) = (String::new(), Vec::<usize>::new(), String::new());
        let bytes = entries.iter().map(|entry| usize::from(entry.name_len)).sum();
        let count = entries.iter().map(|entry| usize::from(entry.axes)).sum();
        let said = self.metadata.filter(|metadata| *metadata != "null");
        let len = said.map_or(0, str::len);
        reserved(names.try_reserve_exact(bytes), what, bytes)?;
        reserved(axes.try_reserve_exact(count), what, count * size_of::<usize>())?;
        reserved(metadata.try_reserve_exact(len), what, len)?;
        for entry in &mut entries {
            let (name, shape) = (names.len(), axes.len());
            names.push_str(&entry.text(text).get());
            // That each axis fits was checked before.
            json::numbers(&text[entry.shape as usize..], |axis| axes.push(axis as usize));
            (entry.name, entry.name_len, entry.shape) =
                (name as u32, (names.len() - name) as u16, shape as u32);
            (entry.from, entry.to) = (start + entry.from, start + entry.to);
        }
        metadata.push_str(said.unwrap_or_default());
        let metadata = said.map(|_| metadata.into());
        Ok(Table { path: path.into(), names, axes, entries, metadata })
    }
}

/// How many axes a shape has, and how many elements: `None` where these are more than a number holds.
fn axes(list: &str) -> Result<(u8, Option<u64>), &'static str> {
    let (mut axes, mut elements, mut empty, mut fit) = (0, Some(1_u64), false, true);
    let are_numbers = json::numbers(list, |axis| {
        axes += 1;
        empty |= axis == 0;
        fit &= usize::try_from(axis).is_ok();
        elements = elements.and_then(|n| n.checked_mul(axis));
    });
    if !are_numbers || !fit {
        return Err("a list of whole numbers is expected");
    }
    if axes > AXES {
        return Err("its shape has more than 64 axes");
    }
    // An axis of no elements makes a tensor of no elements, also where the others would overflow.
    Ok((axes as u8, if empty { Some(0) } else { elements }))
}

/// Checks tensors, which are in the order of their offsets, against each other and against the `data` bytes of the
/// file behind the header.
fn side_by_side(what: &str, text: &str, entries: &[Entry], data: u64) -> Result<()> {
    let (mut end, mut last) = (0, None);
    for entry in entries {
        let (from, to, name) = (entry.from, entry.to, entry.text(text));
        if from < end {
            let other = shown(&last.map_or("".into(), Text::start), NAME);
            let why = format!("starts at {from}, inside of tensor \"{other}\", which ends at {end}");
            return Err(fault(what, name, why));
        }
        if from > end {
            let why = format!("starts at {from}, and bytes {end}..{from} before it belong to no tensor");
            return Err(fault(what, name, why));
        }
        if to > data {
            let why = format!(
                "lies at {from}..{to} of {data} bytes, past the file's end; the file was cut off: get it again"
            );
            return Err(blamed(what, &name.start(), why));
        }
        (end, last) = (to, Some(name));
    }
    if end < data {
        let why = format!("{} bytes at its end belong to no tensor; get it again", data - end);
        return Err(malformed(what, why));
    }
    Ok(())
}

/// Why a tensor has not as many bytes as its type and shape need: `bits`, or `None` for more than a number holds.
fn misfit(dtype: Dtype, shape: &str, bits: Option<u64>, range: &Range<u64>) -> String {
    match bits {
        None => format!("has the shape {shape}, more elements than any memory holds"),
        Some(bits) if bits % 8 != 0 => {
            format!("is {dtype} of shape {shape}, which is no whole number of bytes")
        }
        Some(bits) => {
            let (need, have) = (bits / 8, range.end - range.start);
            format!("is {dtype} of shape {shape}, {need} bytes, and has {have} at {range:?}")
        }
    }
}

/// The error for two tensors of one file with the same name.
pub(super) fn twice(what: &str, tensor: &str) -> Error {
    let why = "is there twice, and it is unknown which of the two is meant; get the file from where it can be trusted";
    blamed(what, tensor, why)
}

/// The hash of a name. Its keys are the process's own, so nobody can make names that collide.
pub(super) fn hash(name: &str) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one(name)
}

/// The places of tensors by the hashes of their names, sorted.
pub(super) struct Names<T>(pub(super) Vec<(u64, T)>);

impl<T: Copy + Ord> Names<T> {
    /// Sorts places with their hashes, `count` at most, and gives two that have the same name, if there are two. `what`
    /// has them, for errors.
    pub(super) fn sort<N: AsRef<str>>(
        what: &str,
        count: usize,
        hashed: impl Iterator<Item = (u64, T)>,
        name: impl Fn(T) -> N,
    ) -> Result<(Self, Option<(T, T)>)> {
        let mut list = Vec::new();
        reserved(list.try_reserve_exact(count), what, count.saturating_mul(size_of::<(u64, T)>()))?;
        list.extend(hashed);
        list.sort_unstable_by_key(|(hash, _)| *hash);
        let is_same = |a: &(u64, T), b: &(u64, T)| name(a.1).as_ref() == name(b.1).as_ref();
        let twice = list.chunk_by(|a, b| a.0 == b.0).find_map(|group| {
            let mut pairs = (1..group.len()).flat_map(|n| group[..n].iter().map(move |a| (a, &group[n])));
            pairs.find(|(a, b)| is_same(a, b)).map(|(a, b)| (a.1.min(b.1), a.1.max(b.1)))
        });
        Ok((Self(list), twice))
    }

    /// The place of a name. `name`: as for [`sort`](Self::sort).
    pub(super) fn get<N: AsRef<str>>(&self, wanted: &str, name: impl Fn(T) -> N) -> Option<T> {
        let hash = hash(wanted);
        let first = self.0.partition_point(|(other, _)| *other < hash);
        let mut same = self.0[first..].iter().take_while(|(other, _)| *other == hash);
        same.find(|(_, place)| name(*place).as_ref() == wanted).map(|(_, place)| *place)
    }
}

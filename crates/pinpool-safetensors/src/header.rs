//! A file's header: what it says, and whether that can be.
//!
//! The header is JSON, which serde_json reads in place ([`super::json`]).
//!
//! 1. [`Notes`] notes 32 bytes of each tensor ([`Entry`]), whose text is longer than that: a header that is refused takes
//!    at most two and a half times its own bytes of memory, these included. Whatever concerns one tensor is checked here.
//! 2. [`side_by_side`] and [`Names::sort`] check the notes against each other: no gaps, no overlaps, nothing past the end,
//!    each name once.
//! 3. [`Notes::keep`] makes the table: one text of all names and one list of all axes, for which there is memory now.
//!
//! Memory in proportion to the header is asked for in few large pieces, each by way of [`reserved`], so that the system
//! can refuse it. The `safetensors` crate knows the types of elements.

use std::borrow::Cow;
use std::cmp::Ordering::{Equal, Greater, Less};
use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use ::safetensors::Dtype;
use serde::de::value::StrDeserializer;
use serde::de::{Deserialize, Error as _, IgnoredAny, MapAccess};
use serde_json::value::RawValue;

use super::json::{
    Entries, Key, LONGEST, Object, brackets, first, inside, is_object, named, numbers, place, read_object,
    text,
};
use super::{NAME, blamed, malformed, reserved, shown, stand_in, unread};
use pinpool::{Error, Result};

/// Bytes before the header: its length, as a little-endian number.
pub(super) const FRONT: usize = 8;
/// Bytes of a file's start that are looked at to say what it is where it is no safetensors file.
pub(super) const START: usize = 64;
/// The longest header that the format allows.
pub(super) const LONGEST_HEADER: u64 = 100_000_000;
/// The most axes that a tensor may have: NumPy's arrays have no more (`NPY_MAXDIMS`).
const AXES: usize = 64;
/// Characters of a value that a message shows.
const NEAR: usize = 40;
/// The length of the shortest entry of a tensor, and the brackets in each: they bound how many a header can have.
const SHORTEST_ENTRY: usize = r#""":{"dtype":"U8","shape":[],"data_offsets":[0,0]},"#.len();
const ENTRY_BRACKETS: usize = 3;
/// The header's entry that is no tensor.
const METADATA: &str = "__metadata__";

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
    /// Whether an index has named it.
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
}

impl Table {
    pub(super) fn name(&self, tensor: u32) -> &str {
        let entry = &self.entries[tensor as usize];
        &self.names[entry.name as usize..][..usize::from(entry.name_len)]
    }

    /// The hashes of all names, with their places. `shard` is the file's number. (A file has no 2^32 tensors.)
    pub(super) fn hashed(&self, shard: u32) -> impl Iterator<Item = (u64, Place)> {
        (0..self.entries.len() as u32).map(move |tensor| (hash(self.name(tensor)), (shard, tensor)))
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
        write!(f, "Tensor({:?}, {}, {:?}, {:?})", self.name(), self.dtype(), self.shape(), self.range())
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
        let (table, _) = read(name, Path::new(name), header, file_len, 0)?;
        Ok(Self(Arc::new(table)))
    }

    /// The tensors, in the file's order.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor> {
        (0..self.0.entries.len() as u32).map(|index| Tensor { table: self.0.clone(), index })
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

/// Reads the header of a file that has `len` bytes: its table, and the places of its names. `shard` is the file's number.
pub(super) fn of_file(file: &File, what: &str, path: &Path, len: u64, shard: u32) -> Result<(Table, Names)> {
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
    read(what, path, &bytes, len, shard)
}

fn read(what: &str, path: &Path, header: &[u8], file_len: u64, shard: u32) -> Result<(Table, Names)> {
    // The whole header at once is faster than each of its strings.
    let text = std::str::from_utf8(header).map_err(|error| no_object(what, &error))?;
    let brackets = brackets(text).map_err(|said| no_object(what, &said))?;
    let most = (text.len() / SHORTEST_ENTRY + 1).min(brackets / ENTRY_BRACKETS);
    let mut notes = Notes { text, entries: Vec::new(), metadata: None, dtype: None, at: None, refused: None };
    reserved(notes.entries.try_reserve_exact(most), what, most * size_of::<Entry>())?;
    read_object(text, &mut notes).map_err(|said| match (notes.at, notes.refused.take()) {
        (Some(METADATA), why) => {
            let said = why.unwrap_or_else(|| said.to_string());
            malformed(what, format!("its metadata is not an object of texts ({said})"))
        }
        (Some(key), Some(why)) => blamed(what, &named(key), why),
        (Some(key), None) if !said.is_eof() => blamed(what, &named(key), undescribed(&said)),
        _ => no_object(what, &said),
    })?;
    // Headers mostly have the file's order already. A tensor without bytes starts where another does, and comes before
    // it.
    let order = |entry: &Entry| (entry.from, entry.to, entry.name);
    if !notes.entries.is_sorted_by_key(order) {
        notes.entries.sort_unstable_by_key(order);
    }
    let start = (FRONT + header.len()) as u64;
    side_by_side(what, &notes, file_len.saturating_sub(start))?;
    let name = |(_, tensor): Place| notes.name(&notes.entries[tensor as usize]);
    // (A header has no room for 2^32 tensors.)
    let count = notes.entries.len();
    let hashed = (0..count as u32).map(|tensor| (hash(&name((shard, tensor))), (shard, tensor)));
    let (names, again) = Names::sort(what, count, hashed, name)?;
    if let Some((tensor, _)) = again {
        return Err(twice(what, &name(tensor)));
    }
    Ok((notes.keep(what, path, start)?, names))
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

/// A fault of one tensor, with the remedy for a file that is damaged or made to mislead.
fn fault(why: impl fmt::Display) -> String {
    format!("{why}; the file is damaged or made to mislead: get it from where it can be trusted")
}

fn undescribed(said: impl fmt::Display) -> String {
    fault(format_args!("is not described as the format asks ({said})"))
}

/// What is read of a header before all of it is checked.
struct Notes<'a> {
    text: &'a str,
    entries: Vec<Entry>,
    metadata: Option<&'a str>,
    /// The type of the tensor before, which most tensors have too.
    dtype: Option<(&'a str, Dtype)>,
    /// The name of the entry that is being read, and why it was refused.
    at: Option<&'a str>,
    refused: Option<String>,
}

/// What the entry of a tensor has: the text from each value on, in the order of these names.
#[derive(Default)]
struct Fields<'a>([Option<&'a str>; 3]);
const FIELDS: [&str; 3] = ["dtype", "shape", "data_offsets"];

impl<'a> Entries<'a> for Fields<'a> {
    #[inline(always)]
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error> {
        map.next_value::<IgnoredAny>()?;
        let name = if key.plain { key.raw.into() } else { text(key.raw).map_err(A::Error::custom)? };
        let field = FIELDS.iter().position(|field| *field == name);
        match field.and_then(|field| self.0[field].replace(key.rest)) {
            None => Ok(()),
            Some(_) => Err(A::Error::custom(format_args!("its {name} is said twice"))),
        }
    }
}

impl<'a> Entries<'a> for Notes<'a> {
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error> {
        self.at = Some(key.raw);
        let noted = if key.raw == METADATA {
            let value = map.next_value::<&RawValue>()?.get();
            match self.metadata.replace(value) {
                Some(_) => Err("it is there twice".into()),
                None if value == "null" => Ok(()),
                None => read_object(value, &mut Texts).map_err(|said| said.to_string()),
            }
        } else if is_object(key.rest) {
            let mut fields = Fields::default();
            map.next_value_seed(Object { text: key.rest, plain: key.plain, entries: &mut fields })?;
            self.note(key.raw, &fields)
        } else {
            let value = shown(map.next_value::<&RawValue>()?.get(), NEAR);
            Err(undescribed(format_args!("an object is expected: {value}")))
        };
        if let Err(why) = noted {
            self.refused = Some(why);
            return Err(A::Error::custom(""));
        }
        self.at = None;
        Ok(())
    }
}

/// Metadata: an object of texts.
struct Texts;

impl<'a> Entries<'a> for Texts {
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error> {
        let value = inside(map.next_value::<&RawValue>()?.get());
        let value = value.ok_or_else(|| A::Error::custom("a text is expected"))?;
        // Long ones are not read.
        let mut short = [key.raw, value].into_iter().filter(|raw| raw.len() <= LONGEST);
        short.try_for_each(|raw| text(raw).map(drop)).map_err(A::Error::custom)
    }
}

impl<'a> Notes<'a> {
    /// The name of a tensor as it stands in the text.
    fn raw(&self, entry: &Entry) -> &'a str {
        &self.text[entry.name as usize..][..usize::from(entry.name_len)]
    }

    /// The name of a tensor.
    fn name(&self, entry: &Entry) -> Cow<'a, str> {
        let raw = self.raw(entry);
        if entry.plain { raw.into() } else { named(raw) }
    }

    /// Makes the note of a tensor, or says why not.
    fn note(&mut self, key: &'a str, fields: &Fields<'a>) -> Result<(), String> {
        let plain = text(key).map(|name| matches!(name, Cow::Borrowed(_))).map_err(undescribed)?;
        let [Some(dtype), Some(shape), Some(offsets)] = fields.0 else {
            let missing = FIELDS.iter().zip(fields.0).find(|(_, value)| value.is_none());
            return Err(undescribed(format_args!("it has no {}", missing.map_or("", |(field, _)| field))));
        };
        let dtype = self.dtype(dtype)?;
        let told = |rest| shown(first(rest), NEAR);
        let (mut axes, mut bits, mut empty) = (0, Some(dtype.bitsize() as u64), false);
        let are_numbers = numbers(shape, |axis| {
            (axes, bits) = (axes + 1, bits.and_then(|bits| bits.checked_mul(axis)));
            empty |= axis == 0;
        });
        if !are_numbers || axes > AXES {
            let what = if are_numbers {
                "its shape has more than 64 axes"
            } else {
                "a list of whole numbers is expected"
            };
            return Err(undescribed(format_args!("{what}: {}", told(shape))));
        }
        let (mut count, mut from, mut to) = (0, 0, 0);
        if !numbers(offsets, |offset| (count, from, to) = (count + 1, to, offset)) || count != 2 {
            return Err(undescribed(format_args!("two offsets are expected: {}", told(offsets))));
        }
        if to < from {
            return Err(fault(format_args!("ends at {to}, before its start at {from}")));
        }
        // An axis of no elements makes a tensor of no elements, also where the others would overflow.
        let bits = if empty { Some(0) } else { bits };
        if bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != to - from) {
            let need = match bits {
                None => "more elements than any memory holds".into(),
                Some(bits) if bits % 8 != 0 => "no whole number of bytes".into(),
                Some(bits) => format!("{} bytes", bits / 8),
            };
            let (shape, have) = (told(shape), to - from);
            return Err(fault(format_args!(
                "is {dtype} of shape {shape}, {need}, and has {have} at {from}..{to}"
            )));
        }
        let (name, shape) = (place(self.text, key), place(self.text, shape));
        let (name_len, axes) = (key.len() as u16, axes as u8);
        self.entries.push(Entry { name, shape, name_len, axes, plain, dtype, listed: false, from, to });
        Ok(())
    }

    /// The type of elements whose name starts `rest` of the text.
    fn dtype(&mut self, rest: &'a str) -> Result<Dtype, String> {
        if let Some((_, dtype)) = self.dtype.filter(|(last, _)| rest.starts_with(last)) {
            return Ok(dtype);
        }
        let value = first(rest);
        let name = inside(value).and_then(|name| text(name).ok());
        let known = name.map(|name| Dtype::deserialize(StrDeserializer::<serde_json::Error>::new(&name)));
        let Some(Ok(dtype)) = known else {
            return Err(format!(
                "has elements of no type that is known: {}; if the file is of a newer version of the format, upgrade \
                 pinpool",
                shown(value, NEAR)
            ));
        };
        self.dtype = Some((value, dtype));
        Ok(dtype)
    }

    /// Makes what is kept of a header that was checked. The data starts at `start` in the file.
    fn keep(mut self, what: &str, path: &Path, start: u64) -> Result<Table> {
        let said = self.metadata.filter(|metadata| *metadata != "null");
        let (mut names, mut axes, mut metadata) = (String::new(), Vec::new(), String::new());
        let bytes = self.entries.iter().map(|entry| usize::from(entry.name_len)).sum();
        let count = self.entries.iter().map(|entry| usize::from(entry.axes)).sum();
        let len = said.map_or(0, str::len);
        reserved(names.try_reserve_exact(bytes), what, bytes)?;
        reserved(axes.try_reserve_exact(count), what, count * size_of::<usize>())?;
        reserved(metadata.try_reserve_exact(len), what, len)?;
        metadata.push_str(said.unwrap_or_default());
        let mut entries = std::mem::take(&mut self.entries);
        for entry in &mut entries {
            let (name, shape) = (names.len(), axes.len());
            names.push_str(&self.name(entry));
            numbers(&self.text[entry.shape as usize..], |axis| axes.push(axis as usize));
            (entry.name, entry.name_len, entry.shape) =
                (name as u32, (names.len() - name) as u16, shape as u32);
            (entry.from, entry.to) = (start + entry.from, start + entry.to);
        }
        Ok(Table { path: path.into(), names, axes, entries, metadata: said.map(|_| metadata.into()) })
    }
}

/// Checks tensors, which are in the order of their offsets, against each other and against the `data` bytes of the
/// file behind the header.
fn side_by_side(what: &str, notes: &Notes<'_>, data: u64) -> Result<()> {
    let (mut end, mut last) = (0, "");
    for entry in &notes.entries {
        let (from, to, key) = (entry.from, entry.to, notes.raw(entry));
        if from != end || to > data {
            let other = shown(&named(last), NAME);
            let why = match from.cmp(&end) {
                Less => {
                    fault(format_args!("starts at {from}, inside of tensor \"{other}\", which ends at {end}"))
                }
                Greater => fault(format_args!(
                    "starts at {from}, and bytes {end}..{from} before it belong to no tensor"
                )),
                Equal => format!(
                    "lies at {from}..{to} of {data} bytes, past the file's end; the file was cut off: get it again"
                ),
            };
            return Err(blamed(what, &named(key), why));
        }
        (end, last) = (to, key);
    }
    match data - end {
        0 => Ok(()),
        left => Err(malformed(what, format!("{left} bytes at its end belong to no tensor; get it again"))),
    }
}

/// The error for two tensors of one file with the same name.
pub(super) fn twice(what: &str, tensor: &str) -> Error {
    let why = "is there twice, and it is unknown which of the two is meant; get the file from where it can be trusted";
    blamed(what, tensor, why)
}

/// The hash of a name. Its keys are the process's own, so nobody can make names that collide.
fn hash(name: &str) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one(name)
}

/// Where a tensor is: the number of its file, and its place in the file's table.
pub(super) type Place = (u32, u32);

/// The places of tensors by the hashes of their names, sorted.
pub(super) struct Names(pub(super) Vec<(u64, Place)>);

impl Names {
    /// Sorts places with their hashes, `count` at most, and gives two that have the same name, if there are two. `what`
    /// has them, for errors.
    pub(super) fn sort<'n>(
        what: &str,
        count: usize,
        hashed: impl Iterator<Item = (u64, Place)>,
        name: impl Fn(Place) -> Cow<'n, str>,
    ) -> Result<(Self, Option<(Place, Place)>)> {
        let mut list = Vec::new();
        reserved(list.try_reserve_exact(count), what, count.saturating_mul(size_of::<(u64, Place)>()))?;
        list.extend(hashed);
        list.sort_unstable();
        // Of the same hash are one, or the same names.
        for same in list.chunk_by_mut(|a, b| a.0 == b.0).filter(|same| same.len() > 1) {
            same.sort_unstable_by(|(_, a), (_, b)| name(*a).cmp(&name(*b)).then_with(|| a.cmp(b)));
        }
        let is_same = |pair: &&[(u64, Place)]| pair[0].0 == pair[1].0 && name(pair[0].1) == name(pair[1].1);
        let twice = list.windows(2).find(is_same).map(|pair| (pair[0].1, pair[1].1));
        Ok((Self(list), twice))
    }

    /// The place of a name. `name`: as for [`sort`](Self::sort).
    pub(super) fn get<'n>(&self, wanted: &str, name: impl Fn(Place) -> &'n str) -> Option<Place> {
        let hash = hash(wanted);
        let first = self.0.partition_point(|(other, _)| *other < hash);
        let mut same = self.0[first..].iter().take_while(|(other, _)| *other == hash);
        same.find(|(_, place)| name(*place) == wanted).map(|(_, place)| *place)
    }
}

//! A file's header: what it says, and whether that can be.
//!
//! The header is JSON, which serde_json reads in place ([`super::json`]). Its text stays in the file's [`Table`],
//! beside 32 bytes for each tensor ([`Entry`]), whose text is longer than that: so a header that is refused takes at
//! most two and a half times its own bytes of memory, these included.
//!
//! 1. [`Notes`] checks whatever concerns one tensor.
//! 2. [`Table::side_by_side`] checks that there are no gaps, no overlaps, and nothing past the end.
//! 3. [`Names`] has the tensors of all files by name. Each name is in a file once.
//! 4. [`Table::read_axes`] makes a list of all axes, for which there is memory now.
//!
//! Memory in proportion to the header is asked for in few large pieces, each by way of [`reserved`], so that the system
//! can refuse it. The `safetensors` crate knows the types of elements.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ::safetensors::Dtype;

use super::json::{LONGEST, brackets, entries, inside, is_object, named, numbers, text};
use super::{NAME, blamed, malformed, read_at, reserved, shown, stand_in};
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
/// What a tensor's entry must have.
const FIELDS: [&str; 3] = ["dtype", "shape", "data_offsets"];

/// What a file's header says: a table of its tensors, in the file's order.
pub(super) struct Table {
    pub(super) path: Box<Path>,
    /// The header, with the names themselves in the places of those that were written with escapes.
    text: String,
    /// Where the metadata is in it. Empty: there is none.
    metadata: Range<usize>,
    pub(super) entries: Vec<Entry>,
    /// The axes of all tensors, one tensor's behind the other's.
    axes: Vec<usize>,
    /// The bits of the lengths of all tensors; all bits where an index has left some out.
    pub(super) lengths: u64,
}

/// A tensor.
pub(super) struct Entry {
    /// Where its name is in the header's text.
    name: u32,
    name_len: u16,
    axes: u8,
    dtype: Dtype,
    /// Where its axes are: in the header's text, and from [`Table::read_axes`] on in the table's list.
    shape: u32,
    /// Whether an index has named it.
    pub(super) listed: bool,
    /// Its bytes in the file; while the header is checked, behind the header.
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

    fn name(&self) -> Range<usize> {
        self.name as usize..self.name as usize + usize::from(self.name_len)
    }
}

impl Table {
    /// Reads a header, which stands behind the first bytes of a file of `file_len` bytes.
    fn read(what: &str, path: &Path, header: Vec<u8>, file_len: u64) -> Result<Self> {
        // The whole header at once is faster than each of its strings.
        let text = String::from_utf8(header).map_err(|error| no_object(what, &error.utf8_error()))?;
        let Notes { entries, metadata, .. } = Notes::read(what, &text)?;
        let metadata = metadata.unwrap_or_default();
        let mut table = Self { path: path.into(), text, metadata, entries, axes: Vec::new(), lengths: 0 };
        table.unescape();
        // Headers mostly have the file's order already. A tensor without bytes starts where another does, and comes
        // before it.
        let order = |entry: &Entry| (entry.from, entry.to, entry.name);
        if !table.entries.is_sorted_by_key(order) {
            table.entries.sort_unstable_by_key(order);
        }
        let start = (FRONT + table.text.len()) as u64;
        table.side_by_side(what, file_len.saturating_sub(start))?;
        for entry in &mut table.entries {
            (entry.from, entry.to) = (start + entry.from, start + entry.to);
        }
        Ok(table)
    }

    /// Writes each name over what the text has for it, which is as long or longer.
    fn unescape(&mut self) {
        if !self.text.contains('\\') {
            return;
        }
        for entry in &mut self.entries {
            let place = entry.name();
            let raw = &self.text[place.clone()];
            if raw.contains('\\') {
                let mut name = named(raw).into_owned();
                entry.name_len = name.len() as u16;
                name.extend(std::iter::repeat_n(' ', place.len() - name.len()));
                self.text.replace_range(place, &name);
            }
        }
    }

    pub(super) fn name(&self, tensor: u32) -> &str {
        &self.text[self.entries[tensor as usize].name()]
    }

    /// Checks tensors, which are in the order of their offsets, against each other and against the `data` bytes of the
    /// file behind the header.
    fn side_by_side(&self, what: &str, data: u64) -> Result<()> {
        let (mut end, mut last) = (0, "");
        for entry in &self.entries {
            let (from, to, name) = (entry.from, entry.to, &self.text[entry.name()]);
            if from != end || to > data {
                let other = shown(last, NAME);
                let why = match from.cmp(&end) {
                    Less => fault(format_args!(
                        "starts at {from}, inside of tensor \"{other}\", which ends at {end}"
                    )),
                    Greater => fault(format_args!(
                        "starts at {from}, and bytes {end}..{from} before it belong to no tensor"
                    )),
                    Equal => format!(
                        "lies at {from}..{to} of {data} bytes, past the file's end; the file was cut off: get it again"
                    ),
                };
                return Err(blamed(what, name, why));
            }
            (end, last) = (to, name);
        }
        match data - end {
            0 => Ok(()),
            left => {
                Err(malformed(what, format!("{left} bytes at its end belong to no tensor; get it again")))
            }
        }
    }

    /// Reads the axes of all tensors, the last that is done of a table.
    pub(super) fn read_axes(&mut self, what: &str) -> Result<()> {
        let count = self.entries.iter().map(|entry| usize::from(entry.axes)).sum();
        reserved(self.axes.try_reserve_exact(count), what, count * size_of::<usize>())?;
        let mut end = self.entries.first().map_or(0, |entry| entry.from);
        for entry in &mut self.entries {
            self.lengths |= if entry.from == end { entry.bytes() } else { u64::MAX };
            end = entry.to;
            let first = self.axes.len() as u32;
            numbers(&self.text[entry.shape as usize..], |axis| self.axes.push(axis as usize));
            entry.shape = first;
        }
        Ok(())
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
        let mut bytes = Vec::new();
        reserved(bytes.try_reserve_exact(len), name, len)?;
        bytes.extend_from_slice(header);
        let mut table = Table::read(name, Path::new(name), bytes, file_len)?;
        Names::of(|_| name, std::slice::from_ref(&table))?;
        table.read_axes(name)?;
        Ok(Self(Arc::new(table)))
    }

    /// The tensors, in the file's order.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor> {
        (0..self.0.entries.len() as u32).map(|index| Tensor { table: self.0.clone(), index })
    }

    /// The metadata (`__metadata__`), as the header has it: a JSON object of texts.
    #[must_use]
    pub fn metadata(&self) -> Option<&str> {
        Some(&self.0.text[self.0.metadata.clone()]).filter(|text| !text.is_empty())
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.tensors()).finish()
    }
}

/// Reads the header of a file that has `len` bytes.
pub(super) fn of_file(file: &File, what: &str, path: &Path, len: u64) -> Result<Table> {
    let start = read_at(file, what, 0, len.min(START as u64) as usize)?;
    // Checked before memory is asked for.
    let header = header_len(what, &start, len)?;
    Table::read(what, path, read_at(file, what, FRONT as u64, header)?, len)
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

/// What is read of a header.
struct Notes<'a> {
    text: &'a str,
    entries: Vec<Entry>,
    metadata: Option<Range<usize>>,
    /// The values of [`FIELDS`] of the tensor that is being read.
    fields: [Option<&'a str>; FIELDS.len()],
    /// The type of the tensor before, which most tensors have too.
    dtype: Option<(&'a str, Dtype)>,
}

impl<'a> Notes<'a> {
    fn read(what: &str, text: &'a str) -> Result<Self> {
        let brackets = brackets(text).map_err(|said| no_object(what, &said))?;
        let most = (text.len() / SHORTEST_ENTRY + 1).min(brackets / ENTRY_BRACKETS);
        let mut notes = Self { text, entries: Vec::new(), metadata: None, fields: [None; 3], dtype: None };
        reserved(notes.entries.try_reserve_exact(most), what, most * size_of::<Entry>())?;
        let metadata = |said: &dyn fmt::Display| {
            malformed(what, format!("its metadata is not an object of texts ({said})"))
        };
        let told = |said: serde_json::Error, at: Option<&str>| match at {
            Some(METADATA) => metadata(&said),
            Some(key) if !said.is_eof() => blamed(what, &named(key), undescribed(&said)),
            _ => no_object(what, &said),
        };
        entries(text, told, |outer, key, value| match outer {
            Some(METADATA) => is_pair(key, value).map_err(|why| metadata(&why)),
            None if key == METADATA => notes.metadata(value).map_err(|why| metadata(&why)),
            Some(tensor) => notes.field(key, value).map_err(|why| blamed(what, &named(tensor), why)),
            None => notes.tensor(key, value).map_err(|why| blamed(what, &named(key), why)),
        })?;
        Ok(notes)
    }

    /// Where a part of the text starts in it. A header has at most 100,000,000 bytes, so it fits 32 bits.
    fn place(&self, part: &str) -> u32 {
        (part.as_ptr() as usize - self.text.as_ptr() as usize) as u32
    }

    /// Notes the metadata, or says why not.
    fn metadata(&mut self, value: &str) -> Result<(), String> {
        let (start, is_null) = (self.place(value) as usize, value == "null");
        let place = start..start + if is_null { 0 } else { value.len() };
        if self.metadata.replace(place).is_some() {
            return Err("it is there twice".into());
        }
        if is_null || is_object(value) { Ok(()) } else { Err("an object is expected".into()) }
    }

    /// Notes a field of the tensor that is being read, or says why not.
    fn field(&mut self, key: &str, value: &'a str) -> Result<(), String> {
        let known = |name: &str| FIELDS.iter().position(|field| *field == name);
        let field = match known(key) {
            // Another one, or one that is written with escapes.
            None => known(&text(key).map_err(undescribed)?),
            plain => plain,
        };
        match field.filter(|field| self.fields[*field].replace(value).is_some()) {
            Some(field) => Err(undescribed(format_args!("its {} is said twice", FIELDS[field]))),
            None => Ok(()),
        }
    }

    /// Notes a tensor, whose fields were noted, or says why not.
    fn tensor(&mut self, key: &'a str, value: &str) -> Result<(), String> {
        text(key).map_err(undescribed)?;
        let told = |value| shown(value, NEAR);
        if !is_object(value) {
            return Err(undescribed(format_args!("an object is expected: {}", told(value))));
        }
        let fields = std::mem::take(&mut self.fields);
        let [Some(dtype), Some(shape), Some(offsets)] = fields else {
            let missing = FIELDS.iter().zip(fields).find(|(_, value)| value.is_none());
            return Err(undescribed(format_args!("it has no {}", missing.map_or("", |(field, _)| field))));
        };
        let dtype = self.dtype(dtype)?;
        let (mut axes, mut bits, mut empty) = (0, Some(dtype.bitsize() as u64), false);
        let are_numbers = numbers(shape, |axis| {
            axes += 1;
            bits = bits.and_then(|bits| bits.checked_mul(axis));
            empty |= axis == 0;
        });
        if !are_numbers || axes > AXES {
            let what = match are_numbers {
                true => "its shape has more than 64 axes",
                false => "a list of whole numbers is expected",
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
        let (name, shape) = (self.place(key), self.place(shape));
        let (name_len, axes) = (key.len() as u16, axes as u8);
        self.entries.push(Entry { name, name_len, axes, dtype, shape, listed: false, from, to });
        Ok(())
    }

    /// The type of elements of this name.
    fn dtype(&mut self, name: &'a str) -> Result<Dtype, String> {
        if let Some((_, dtype)) = self.dtype.filter(|(last, _)| *last == name) {
            return Ok(dtype);
        }
        // A long one would be in the error.
        let known = inside(name).filter(|name| name.len() < LONGEST).map(|_| serde_json::from_str(name));
        let Some(Ok(dtype)) = known else {
            return Err(format!(
                "has elements of no type that is known: {}; if the file is of a newer version of the format, upgrade \
                 pinpool",
                shown(name, NEAR)
            ));
        };
        self.dtype = Some((name, dtype));
        Ok(dtype)
    }
}

/// Whether an entry of the metadata is a text, or why not.
fn is_pair(key: &str, value: &str) -> Result<(), String> {
    let value = inside(value).ok_or("a text is expected")?;
    // Long ones are not read.
    let mut short = [key, value].into_iter().filter(|raw| raw.len() <= LONGEST);
    short.try_for_each(|raw| text(raw).map(drop))
}

/// The error for two tensors of one file with the same name.
pub(super) fn twice(what: &str, tensor: &str) -> Error {
    let why = "is there twice, and it is unknown which of the two is meant; get the file from where it can be trusted";
    blamed(what, tensor, why)
}

/// Where a tensor is: the number of its file, and its place in the file's table.
pub(super) type Place = (u32, u32);

/// The tensors of several files by the hashes of their names, sorted.
pub(super) struct Names {
    /// The process's own, so that nobody can make names that collide.
    keys: RandomState,
    list: Vec<(u64, Place)>,
}

impl Names {
    /// Each name is in a file once, or it is an error. `what`: the name of a table's file, for errors. (A file has no
    /// 2^32 tensors.)
    pub(super) fn of<'w>(what: impl Fn(u32) -> &'w str, tables: &[Table]) -> Result<Self> {
        let (keys, mut list) = (RandomState::new(), Vec::new());
        let count = tables.iter().map(|table| table.entries.len()).sum::<usize>();
        reserved(list.try_reserve_exact(count), what(0), count.saturating_mul(size_of::<(u64, Place)>()))?;
        for (shard, table) in (0..).zip(tables) {
            let tensors = 0..table.entries.len() as u32;
            list.extend(tensors.map(|tensor| (keys.hash_one(table.name(tensor)), (shard, tensor))));
        }
        list.sort_unstable();
        let names = Self { keys, list };
        let again = names.twice(tables).find(|(first, second)| first.0 == second.0);
        match again {
            Some((_, (shard, tensor))) => Err(twice(what(shard), tables[shard as usize].name(tensor))),
            None => Ok(names),
        }
    }

    /// Tensors of one name, in pairs. Those of one file come together: two names have one hash of 64 bits hardly ever.
    pub(super) fn twice(&self, tables: &[Table]) -> impl Iterator<Item = (Place, Place)> {
        let name = |(shard, tensor): Place| tables[shard as usize].name(tensor);
        let pairs = self.list.windows(2).filter(|pair| pair[0].0 == pair[1].0);
        pairs.map(|pair| (pair[0].1, pair[1].1)).filter(move |(first, second)| name(*first) == name(*second))
    }

    /// The tensors of a name. `name`: that of a tensor.
    pub(super) fn get<'n>(
        &self,
        wanted: &str,
        name: impl Fn(Place) -> &'n str,
    ) -> impl Iterator<Item = Place> {
        let hash = self.keys.hash_one(wanted);
        let first = self.list.partition_point(|(other, _)| *other < hash);
        let same = self.list[first..].iter().take_while(move |(other, _)| *other == hash);
        same.map(|(_, place)| *place).filter(move |place| name(*place) == wanted)
    }
}

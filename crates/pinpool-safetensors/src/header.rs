//! A file's header: what it says, and whether that can be.
//!
//! # How it works
//!
//! The header is JSON, and read in three passes.
//!
//! 1. [`Notes`] reads the text in place ([`super::json`]) and notes 32 bytes of each entry ([`HeaderEntry`]). An
//!    entry's text is longer than that, so a header that is refused takes at most two and a half times its own bytes of
//!    memory, these included.
//! 2. [`place`] and [`Names::list`] check the notes, in the file's order, by the format's rules: no gaps, no overlaps,
//!    nothing past the end, as many bytes as type and shape need, each name once.
//! 3. [`entries_to_tensors`] makes what is kept: a list of tensors, which share one text with all names and one list
//!    with all axes ([`NamesAndAxes`]). It reads names and axes from the text again.
//!
//! Memory in proportion to the header is asked for in few large pieces, each by way of [`reserved`], so that the system
//! can refuse it. The `safetensors` crate knows the types of elements.

use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ::safetensors::Dtype;

use super::json::{self, Fault, LONGEST_NAME, Part, Text};
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
/// Axes that a message shows.
const SHOWN_AXES: usize = 8;
/// The length of the shortest entry of a tensor: it bounds how many entries a header can have.
const SHORTEST_ENTRY: usize = r#""":{"dtype":"U8","shape":[],"data_offsets":[0,0]},"#.len();
/// The header's entry that is no tensor.
const METADATA_KEY: &str = "__metadata__";

/// A tensor in a file, as the file's header describes it.
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

/// A file's header, checked: the tensors lie side by side, from the end of the header to the end of the file.
/// [`Checkpoint::open`](super::Checkpoint::open) reads it from a file; this is for one in an object store, for example.
///
/// ```
/// use pinpool_safetensors::{Dtype, Header};
///
/// let header = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"__metadata__":{"format":"pt"}}"#;
/// let start = [&(header.len() as u64).to_le_bytes()[..], header].concat();
/// let header = Header::parse("a.safetensors", &start, start.len() as u64 + 24)?;
/// assert_eq!(header.metadata.as_deref(), Some(r#"{"format":"pt"}"#));
///
/// let tensor = &header.tensors[0];
/// assert_eq!((tensor.name(), tensor.dtype(), tensor.shape()), ("a", Dtype::F32, &[2_usize, 3][..]));
/// assert_eq!(tensor.range(), start.len() as u64..start.len() as u64 + 24);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Header {
    /// The tensors, in the file's order.
    pub tensors: Vec<Tensor>,
    /// The metadata (`__metadata__`), as the header has it: a JSON object of texts.
    pub metadata: Option<Box<str>>,
}

impl Header {
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

    /// Reads the header of a file that has `len` bytes.
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
        if !json::is_shallow(text) {
            return Err(no_object(what, &"it is nested too deeply"));
        }
        let mut notes =
            Notes { text, what, entries: Vec::new(), fields: Fields::default(), metadata: None, last: None };
        let most = text.len() / SHORTEST_ENTRY + 1;
        reserved(notes.entries.try_reserve_exact(most), what, most * size_of::<HeaderEntry>())?;
        json::object(text, |name, part| notes.add(name, part)).map_err(|fault| match fault {
            Fault::Refused(error) => error,
            Fault::NoObject => no_object(what, &"it begins with no brace"),
            Fault::Syntax(said, Some(name)) if !said.is_eof() => match name.is(METADATA_KEY) {
                true => no_metadata(what, &said),
                false => undescribed(what, name, &said),
            },
            Fault::Syntax(said, _) => no_object(what, &said),
        })?;
        let Notes { mut entries, metadata, .. } = notes;
        // Headers mostly have the file's order already. A tensor without bytes starts where another does, and comes
        // before it.
        let order = |a: &HeaderEntry, b: &HeaderEntry| {
            (a.from, a.to).cmp(&(b.from, b.to)).then_with(|| a.name(text).get().cmp(&b.name(text).get()))
        };
        if !entries.is_sorted_by(|a, b| order(a, b).is_le()) {
            entries.sort_unstable_by(order);
        }
        let start = (FRONT + header.len()) as u64;
        place(what, text, &entries, file_len.saturating_sub(start))?;
        let name = |place: u32| entries[place as usize].name(text).get();
        // (A header has no room for 2^32 tensors.)
        let (_, again) = Names::list(what, 0..entries.len() as u32, entries.len(), name)?;
        if let Some((place, _)) = again {
            return Err(twice(what, &name(place)));
        }
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

/// What is noted of a tensor: where its parts are in the header's text, and the numbers that are checked.
struct HeaderEntry {
    /// Its name between the quotes: start and length in the text.
    name: (u32, u32),
    /// Whether its name has no escapes.
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
        let (start, len) = (self.name.0 as usize, self.name.1 as usize);
        Text { raw: &text[start..start + len], plain: self.plain }
    }

    /// Calls `put` with the elements along each axis, which are read again.
    fn shape(&self, text: &str, mut put: impl FnMut(usize)) {
        // That each fits was checked before.
        json::numbers(&text[self.shape as usize..], |axis| put(axis as usize));
    }
}

/// The first pass: reads the header into notes.
struct Notes<'a> {
    text: &'a str,
    /// The file's name, for errors.
    what: &'a str,
    entries: Vec<HeaderEntry>,
    /// What the entry that is being read has.
    fields: Fields<'a>,
    metadata: Option<&'a str>,
    /// The type of the entry before, which most tensors have too.
    last: Option<(&'a str, Dtype)>,
}

/// What an entry of a tensor has.
#[derive(Default)]
struct Fields<'a> {
    dtype: Option<Dtype>,
    /// The list, how many axes it has, and how many elements these make ([`axes`]).
    shape: Option<(&'a str, u8, Option<u64>)>,
    offsets: Option<(u64, u64)>,
}

impl<'a> Notes<'a> {
    /// Reads a part of an entry of the header.
    fn add(&mut self, name: Text<'a>, part: Part<'a>) -> Result<()> {
        if name.is(METADATA_KEY) {
            return self.add_metadata(part);
        }
        match part {
            Part::Entry(field, value) => self.add_field(name, field, value),
            Part::End(_) => {
                let entry = self.entry(name)?;
                self.entries.push(entry);
                Ok(())
            }
            Part::Value(value) => {
                let told = shown(value, NEAR);
                Err(undescribed(self.what, name, &format_args!("an object is expected: {told}")))
            }
        }
    }

    fn add_metadata(&mut self, part: Part<'a>) -> Result<()> {
        let wrong = match part {
            Part::Entry(_, value) if Text::of(value).is_some() => return Ok(()),
            Part::Entry(..) => "a text is expected",
            Part::Value(value) if value != "null" => "an object is expected",
            Part::Value(text) | Part::End(text) => match self.metadata.replace(text) {
                None => return Ok(()),
                Some(_) => "it is there twice",
            },
        };
        Err(no_metadata(self.what, &wrong))
    }

    /// Reads a field of a tensor's entry.
    fn add_field(&mut self, name: Text<'a>, field: Text<'a>, value: &'a str) -> Result<()> {
        let what = self.what;
        let wrong = |said: &dyn fmt::Display| undescribed(what, name, said);
        let told = || shown(value, NEAR);
        let mut is_again = false;
        if field.is("dtype") {
            let dtype = self.dtype(name, value)?;
            is_again = self.fields.dtype.replace(dtype).is_some();
        } else if field.is("shape") {
            let (axes, elements) = axes(value).map_err(|said| wrong(&format_args!("{said}: {}", told())))?;
            is_again = self.fields.shape.replace((value, axes, elements)).is_some();
        } else if field.is("data_offsets") {
            let (mut count, mut from, mut to) = (0, 0, 0);
            let are_numbers = json::numbers(value, |offset| {
                (count, from, to) = (count + 1, to, offset);
            });
            if !are_numbers || count != 2 {
                return Err(wrong(&format_args!("two offsets are expected: {}", told())));
            }
            is_again = self.fields.offsets.replace((from, to)).is_some();
        }
        if is_again {
            return Err(wrong(&format_args!("its {} is said twice", field.raw)));
        }
        Ok(())
    }

    /// Makes the note of a tensor, whose entry was read.
    fn entry(&mut self, name: Text<'a>) -> Result<HeaderEntry> {
        let wrong = |said| undescribed(self.what, name, &said);
        if name.raw.len() > LONGEST_NAME {
            return Err(wrong("its name is longer than 65,535 bytes"));
        }
        let Fields { dtype, shape, offsets } = std::mem::take(&mut self.fields);
        let dtype = dtype.ok_or_else(|| wrong("it has no dtype"))?;
        let (shape, axes, elements) = shape.ok_or_else(|| wrong("it has no shape"))?;
        let (from, to) = offsets.ok_or_else(|| wrong("it has no data_offsets"))?;
        let bits = elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64));
        let fits = bits.zip(to.checked_sub(from)).is_some_and(|(bits, len)| bits % 8 == 0 && bits / 8 == len);
        // A header has at most 100,000,000 bytes, so places in it fit 32 bits.
        let place = |part: &str| json::place(self.text, part) as u32;
        let (plain, shape) = (name.plain, place(shape));
        let name = (place(name.raw), name.raw.len() as u32);
        Ok(HeaderEntry { name, plain, shape, axes, dtype, fits, from, to })
    }

    /// The type of a tensor's elements.
    fn dtype(&mut self, tensor: Text<'_>, value: &'a str) -> Result<Dtype> {
        if let Some((_, dtype)) = self.last.filter(|(last, _)| *last == value) {
            return Ok(dtype);
        }
        let name = value.strip_prefix('"').and_then(|name| name.strip_suffix('"'));
        // No type has a name that is longer, even with each character escaped.
        let known = name.filter(|name| name.len() <= 100).and_then(|_| serde_json::from_str(value).ok());
        if let Some(dtype) = known {
            self.last = Some((value, dtype));
            return Ok(dtype);
        }
        let is_name =
            |name: &&str| name.len() <= 32 && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        match name.filter(is_name) {
            Some(name) => {
                let why = format!(
                    "has elements of a type that is not known, {name:?}; the file may be of a newer version of the \
                     format: upgrade pinpool"
                );
                Err(blamed(self.what, &tensor.start(), why))
            }
            None => {
                let told = shown(value, NEAR);
                Err(undescribed(self.what, tensor, &format_args!("this is the name of no type: {told}")))
            }
        }
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
fn place(what: &str, text: &str, entries: &[HeaderEntry], data: u64) -> Result<()> {
    let (mut end, mut last) = (0, None);
    for entry in entries {
        let (from, to, name) = (entry.from, entry.to, entry.name(text));
        let wrong = |why: String| Err(fault(what, name, why));
        if to < from {
            return wrong(format!("ends at {to}, before its start at {from}"));
        }
        if from < end {
            let other = shown(&last.map_or("".into(), Text::start), NAME);
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

/// Why a tensor has not as many bytes as its type and shape need.
fn misfit(text: &str, entry: &HeaderEntry) -> String {
    let mut shape = Vec::new();
    entry.shape(text, |axis| shape.push(axis as u64));
    let told = match shape.get(..SHOWN_AXES) {
        Some(first) if shape.len() > SHOWN_AXES => {
            let first: String = first.iter().map(|axis| format!("{axis}, ")).collect();
            format!("[{first}... {} axes]", shape.len())
        }
        _ => format!("{shape:?}"),
    };
    let HeaderEntry { dtype, from, to, .. } = entry;
    let elements = match shape.contains(&0) {
        true => Some(0),
        false => shape.iter().try_fold(1_u64, |n, axis| n.checked_mul(*axis)),
    };
    match elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64)) {
        None => format!("has the shape {told}, more elements than any memory holds"),
        Some(bits) if bits % 8 != 0 => {
            format!("is {dtype} of shape {told}, which is no whole number of bytes")
        }
        Some(bits) => {
            let (need, have) = (bits / 8, to.saturating_sub(*from));
            format!("is {dtype} of shape {told}, {need} bytes, and has {have} at {from}..{to}")
        }
    }
}

/// The error for two tensors of one file with the same name.
pub(super) fn twice(what: &str, tensor: &str) -> Error {
    let why = "is there twice, and it is unknown which of the two is meant; get the file from where it can be trusted";
    blamed(what, tensor, why)
}

/// The last pass: what is kept of a header that was checked. The data starts at `start` in the file.
fn entries_to_tensors(
    what: &str,
    text: &str,
    entries: &[HeaderEntry],
    start: u64,
    metadata: Option<&str>,
) -> Result<Header> {
    let (mut shared, mut tensors) = (NamesAndAxes::default(), Vec::new());
    let bytes = entries.iter().map(|entry| entry.name.1 as usize).sum();
    let axes = entries.iter().map(|entry| usize::from(entry.axes)).sum();
    reserved(shared.names.try_reserve_exact(bytes), what, bytes)?;
    reserved(shared.axes.try_reserve_exact(axes), what, axes * size_of::<usize>())?;
    reserved(tensors.try_reserve_exact(entries.len()), what, entries.len() * size_of::<Tensor>())?;
    for entry in entries {
        shared.names.push_str(&entry.name(text).get());
        entry.shape(text, |axis| shared.axes.push(axis));
    }
    let all = Arc::new(shared);
    let (mut name, mut axis) = (0, 0);
    tensors.extend(entries.iter().map(|entry| {
        let to = name + entry.name(text).get().len() as u32;
        let range = start + entry.from..start + entry.to;
        let (names, axes) = ((name, to), (axis, entry.axes));
        (name, axis) = (to, axis + u32::from(entry.axes));
        Tensor { all: all.clone(), name: names, axes, dtype: entry.dtype, range }
    }));
    let mut kept = String::new();
    let metadata = metadata.filter(|metadata| *metadata != "null");
    reserved(kept.try_reserve_exact(metadata.map_or(0, str::len)), what, metadata.map_or(0, str::len))?;
    kept.push_str(metadata.unwrap_or_default());
    Ok(Header { tensors, metadata: metadata.map(|_| kept.into()) })
}

/// Places by their names' hashes, sorted.
pub(super) struct Names<T> {
    hasher: RandomState,
    places: Vec<(u64, T)>,
}

impl<T: Copy> Names<T> {
    /// Lists names, and gives two that are the same, if there are two. `what` has them, for errors.
    pub(super) fn list<N: AsRef<str>>(
        what: &str,
        places: impl Iterator<Item = T>,
        count: usize,
        name: impl Fn(T) -> N,
    ) -> Result<(Self, Option<(T, T)>)> {
        let (hasher, mut list) = (RandomState::new(), Vec::new());
        reserved(list.try_reserve_exact(count), what, count.saturating_mul(size_of::<(u64, T)>()))?;
        list.extend(places.map(|place| (hasher.hash_one(name(place).as_ref()), place)));
        let order = |a: &(u64, T), b: &(u64, T)| {
            a.0.cmp(&b.0).then_with(|| name(a.1).as_ref().cmp(name(b.1).as_ref()))
        };
        list.sort_unstable_by_key(|(hash, _)| *hash);
        if list.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            list.sort_unstable_by(order);
        }
        let twice = list.windows(2).find(|pair| order(&pair[0], &pair[1]).is_eq());
        let twice = twice.map(|pair| (pair[0].1, pair[1].1));
        Ok((Self { hasher, places: list }, twice))
    }

    /// The place of a name. `name`: as for [`list`](Self::list).
    pub(super) fn get<N: AsRef<str>>(&self, wanted: &str, name: impl Fn(T) -> N) -> Option<T> {
        let hash = self.hasher.hash_one(wanted);
        let first = self.places.partition_point(|(other, _)| *other < hash);
        let mut same = self.places[first..].iter().take_while(|(other, _)| *other == hash);
        same.find(|(_, place)| name(*place).as_ref() == wanted).map(|(_, place)| *place)
    }
}

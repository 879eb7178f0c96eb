//! A file's header: what it says, and whether that can be.
//!
//! The header is JSON. The `safetensors` crate says what types there are; the entries are read one by one into their list,
//! which is the only thing that grows with the header, so a header of nonsense ends at its first wrong entry, or at an axis
//! too many, and whatever is refused can be named. Then one pass over the list, in the file's order, applies the format's
//! rules: no gaps, no overlaps, nothing past the end, as many bytes as type and shape say.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ::safetensors::Dtype;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;

use super::{blamed, malformed, short, unread};
use crate::error::{Error, Result};

/// Bytes before the header, which are its length.
const FRONT: usize = 8;
/// The longest header that the format allows.
const LONGEST: u64 = 100_000_000;
/// The most axes that a tensor may have: NumPy's arrays have no more (`NPY_MAXDIMS`).
const AXES: usize = 64;
/// The header's entry that is no tensor.
const METADATA: &str = "__metadata__";

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    name: Arc<str>,
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<u64>,
}

impl Tensor {
    /// Its name, unique in its checkpoint.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same, shared.
    pub(super) fn shared_name(&self) -> Arc<str> {
        self.name.clone()
    }

    /// The type of its elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements along each axis, the last of which lie side by side. None: a single element.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Bytes of it.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether it has no elements, which the format allows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Where in its file its bytes are.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}

/// What a file says about itself, checked: the tensors lie side by side in the file, from the header's end to the file's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// In the file's order.
    pub tensors: Vec<Tensor>,
    /// What it says beside (`__metadata__`), sorted.
    pub metadata: Vec<(String, String)>,
}

impl Header {
    /// Reads a file's header. `name` is for errors.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Malformed`].
    pub fn read(file: &File, name: &str) -> Result<Self> {
        let len = file.metadata().map_err(|error| unread(name, 0, &error))?.len();
        Self::of_file(file, name, len)?.named_once(name)
    }

    /// The same, from the first bytes of a file that has `file_len`: its header at least.
    ///
    /// # Errors
    /// [`Error::Malformed`], for a header that is not all there as well.
    pub fn parse(name: &str, start: &[u8], file_len: u64) -> Result<Self> {
        let Some((front, rest)) = start.split_first_chunk::<FRONT>() else {
            return Err(too_short(name, file_len.min(start.len() as u64)));
        };
        let len = header_len(name, *front, file_len)?;
        match rest.get(..len) {
            Some(header) => Self::check(name, header, file_len)?.named_once(name),
            None => {
                Err(malformed(name, format!("its header has {len} bytes, of which {} are there", rest.len())))
            }
        }
    }

    /// As [`read`](Self::read), of a file that has `len` bytes. Whether two tensors have the same name is left to whoever
    /// lists them by name.
    pub(super) fn of_file(file: &File, name: &str, len: u64) -> Result<Self> {
        let unread = |error: io::Error| unread(name, 0, &error);
        let mut front = [0; FRONT];
        if len < FRONT as u64 {
            return Err(too_short(name, len));
        }
        file.read_exact_at(&mut front, 0).map_err(unread)?;
        // Before memory is asked for.
        let header = header_len(name, front, len)?;
        let mut bytes = vec![0; header];
        file.read_exact_at(&mut bytes, FRONT as u64).map_err(unread)?;
        Self::check(name, &bytes, len)
    }

    fn check(name: &str, header: &[u8], file_len: u64) -> Result<Self> {
        let mut entries = Entries::default();
        // At once, and not each of its texts.
        let text = std::str::from_utf8(header).map_err(|error| no_object(name, &error))?;
        let mut json = serde_json::Deserializer::from_str(text);
        if let Err(error) = (&mut entries).deserialize(&mut json).and_then(|()| json.end()) {
            return Err(entries.blame(name, &error));
        }
        let Entries { mut tensors, metadata, .. } = entries;
        // In the order of the file mostly. Those without bytes lie where others start: they come first.
        let order = |a: &Tensor, b: &Tensor| {
            (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name))
        };
        if !tensors.is_sorted_by(|a, b| order(a, b).is_le()) {
            tensors.sort_unstable_by(order);
        }
        let start = (FRONT + header.len()) as u64;
        place(name, &mut tensors, start, file_len.saturating_sub(start))?;
        Ok(Self { tensors, metadata: metadata.unwrap_or_default().into_iter().collect() })
    }

    /// An error if two tensors have the same name.
    fn named_once(self, what: &str) -> Result<Self> {
        let mut names = HashSet::with_capacity(self.tensors.len());
        match self.tensors.iter().find(|tensor| !names.insert(tensor.name())) {
            Some(tensor) => Err(twice(what, tensor.name())),
            None => Ok(self),
        }
    }
}

fn too_short(name: &str, len: u64) -> Error {
    malformed(
        name,
        format!("{len} bytes are too few for a safetensors file, which starts with 8 bytes of length"),
    )
}

/// The header's length, which fits the file and the format.
fn header_len(name: &str, front: [u8; FRONT], file_len: u64) -> Result<usize> {
    let len = u64::from_le_bytes(front);
    if len > LONGEST {
        return Err(malformed(
            name,
            format!(
                "its header would have {len} bytes, where the format allows {LONGEST}; it is no safetensors file"
            ),
        ));
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
    let said = short::said(said);
    malformed(what, format!("its header is no JSON object ({said}); it is no safetensors file, or damaged"))
}

/// Two tensors of one file have the same name.
pub(super) fn twice(what: &str, tensor: &str) -> Error {
    fault(what, tensor, "is there twice, and which of the two is meant nobody can tell")
}

/// What is wrong with a tensor.
fn fault(what: &str, tensor: &str, why: impl fmt::Display) -> Error {
    let why = format!("{why}; the file is damaged or made to mislead: get it from where it can be trusted");
    blamed(what, tensor, why)
}

/// Checks tensors, which are in the order of their offsets, against each other and the `data` bytes that there are for them,
/// and makes the offsets those of the file, whose data starts at `start`.
fn place(what: &str, tensors: &mut [Tensor], start: u64, data: u64) -> Result<()> {
    let mut end = 0;
    for index in 0..tensors.len() {
        let Tensor { name, dtype, shape, range } = &tensors[index];
        let (from, to) = (range.start, range.end);
        let wrong = |why: String| Err(fault(what, name, why));
        if to < from {
            return wrong(format!("ends at {to}, before its start at {from}"));
        }
        if from < end {
            let other = short::name(index.checked_sub(1).map_or("", |before| tensors[before].name()));
            return wrong(format!("starts at {from}, inside of tensor {other:?}, which ends at {end}"));
        }
        if from > end {
            return wrong(format!("starts at {from}, and bytes {end}..{from} before it belong to no tensor"));
        }
        let told = short::shape(shape);
        // None along one axis are none in all, however many there would be along the others.
        let mut axes = shape.iter().map(|&axis| axis as u64);
        let elements = match shape.contains(&0) {
            true => Some(0),
            false => axes.try_fold(1_u64, u64::checked_mul),
        };
        match elements.and_then(|n| n.checked_mul(dtype.bitsize() as u64)) {
            None => return wrong(format!("has the shape {told}, more elements than any memory holds")),
            Some(bits) if bits % 8 != 0 => {
                return wrong(format!("is {dtype} of shape {told}, which is no whole number of bytes"));
            }
            Some(bits) if bits / 8 != to - from => {
                let (need, have) = (bits / 8, to - from);
                return wrong(format!(
                    "is {dtype} of shape {told}, {need} bytes, and has {have} at {from}..{to}"
                ));
            }
            Some(_) => {}
        }
        if to > data {
            let why = format!(
                "lies at {from}..{to} of {data} bytes, past the file's end; the file was cut off: get it again"
            );
            return Err(blamed(what, name, why));
        }
        tensors[index].range = start + from..start + to;
        end = to;
    }
    if end < data {
        let why = format!("{} bytes at its end belong to no tensor; get it again", data - end);
        return Err(malformed(what, why));
    }
    Ok(())
}

/// A header's entries, read one by one.
#[derive(Default)]
struct Entries {
    /// In the header's order, with offsets that count from the data's start.
    tensors: Vec<Tensor>,
    metadata: Option<BTreeMap<String, String>>,
    /// The name of the entry that is being read.
    at: Option<Arc<str>>,
}

impl Entries {
    /// Why the header was refused, with the tensor's name if it is one tensor's fault.
    fn blame(&self, what: &str, error: &serde_json::Error) -> Error {
        match &self.at {
            Some(name) if error.classify() == Category::Data && &**name == METADATA => {
                malformed(what, format!("its metadata is not an object of texts ({})", short::said(error)))
            }
            // (What is JSON, but no type's name, is an error of syntax to the reader, too.)
            Some(name) if error.classify() != Category::Eof && &**name != METADATA => {
                let said = short::said(error);
                fault(what, name, format_args!("is not described as the format asks ({said})"))
            }
            _ => no_object(what, error),
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut Entries {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Entries {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        while let Some(Name(name)) = map.next_key()? {
            let about = &**self.at.insert(name);
            if about == METADATA {
                let pairs: Option<BTreeMap<String, String>> = map.next_value()?;
                if self.metadata.replace(pairs.unwrap_or_default()).is_some() {
                    return Err(A::Error::custom("it is there twice"));
                }
                continue;
            }
            let Entry { dtype, shape: Shape(shape), data_offsets: (from, to) } = map.next_value()?;
            if let Some(name) = self.at.take() {
                self.tensors.push(Tensor { name, dtype, shape, range: from..to });
            }
        }
        self.at = None;
        Ok(())
    }
}

/// What the header says of a tensor.
#[derive(serde::Deserialize)]
struct Entry {
    dtype: Dtype,
    shape: Shape,
    /// Its first byte, and one past its last.
    data_offsets: (u64, u64),
}

/// Elements along each axis. A list that goes on and on is not kept to its end.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of lengths")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Shape, A::Error> {
                let mut axes = Vec::new();
                while let Some(axis) = list.next_element()? {
                    if axes.len() == AXES {
                        return Err(A::Error::custom(format_args!("its shape has more than {AXES} axes")));
                    }
                    axes.push(axis);
                }
                Ok(Shape(axes))
            }
        }
        from.deserialize_seq(List)
    }
}

/// A key, in memory that is shared from then on.
struct Name(Arc<str>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, text: &str) -> std::result::Result<Name, E> {
                Ok(Name(text.into()))
            }
        }
        from.deserialize_str(Text)
    }
}

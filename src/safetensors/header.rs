//! A file's header: what it says, and whether that can be.
//!
//! The header is JSON, and the `safetensors` crate reads it and knows the format's rules. Its refusals do not say which
//! tensor is meant; so where it refuses, the header is looked through once more, slowly, for the tensor to name.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use ::safetensors::Dtype;
use ::safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::{malformed, unread};
use crate::error::{Error, Result};

/// Bytes before the header, which are its length.
const FRONT: usize = 8;
/// The longest header that the format allows.
const LONGEST: u64 = 100_000_000;
/// The header's entry that is no tensor.
const METADATA: &str = "__metadata__";

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    name: String,
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
        let unread = |error: io::Error| unread(name, 0, &error);
        let len = file.metadata().map_err(unread)?.len();
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
            Some(header) => Self::check(name, header, file_len),
            None => {
                Err(malformed(name, format!("its header has {len} bytes, of which {} are there", rest.len())))
            }
        }
    }

    fn check(name: &str, header: &[u8], file_len: u64) -> Result<Self> {
        let metadata: Metadata =
            serde_json::from_slice(header).map_err(|error| blame(name, header, &error.to_string()))?;
        let start = (FRONT + header.len()) as u64;
        let data = file_len.saturating_sub(start);
        let mut tensors: Vec<Tensor> = Vec::with_capacity(metadata.offset_keys().len());
        for key in metadata.offset_keys() {
            let Some(info) = metadata.info(&key) else { continue };
            let (from, to) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
            if to > data {
                return Err(Error::Malformed {
                    what: name.into(),
                    tensor: Some(key.into()),
                    why: format!(
                        "lies at {from}..{to} of {data} bytes, past the file's end; the file was cut off: get it again"
                    ),
                });
            }
            let range = start + from..start + to;
            tensors.push(Tensor { name: key, dtype: info.dtype, shape: info.shape.clone(), range });
        }
        let end = metadata.data_len() as u64;
        if end < data {
            let why = format!("{} bytes at its end belong to no tensor; get it again", data - end);
            return Err(malformed(name, why));
        }
        // Those without bytes lie where others start: put before them, or the file's order is none.
        tensors.sort_by(|a, b| {
            (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name))
        });
        let mut rest: Vec<(String, String)> =
            metadata.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect();
        rest.sort();
        Ok(Self { tensors, metadata: rest })
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

/// Why a header was refused, with the tensor's name if it is one tensor's fault. `said`: what the crate says.
fn blame(what: &str, header: &[u8], said: &str) -> Error {
    let fault = |tensor: &str, why: String| {
        let why =
            format!("{why}; the file is damaged or made to mislead: get it from where it can be trusted");
        Error::Malformed { what: what.into(), tensor: Some(tensor.into()), why }
    };
    let Ok(Value::Object(entries)) = serde_json::from_slice::<Value>(header) else {
        return malformed(
            what,
            format!("its header is no JSON object ({said}); it is no safetensors file, or damaged"),
        );
    };
    let mut infos: Vec<(String, TensorInfo)> = Vec::new();
    for (name, entry) in entries {
        if name == METADATA {
            let fine = entry.as_object().is_some_and(|pairs| pairs.values().all(Value::is_string));
            if !fine && !entry.is_null() {
                return malformed(what, "its metadata is not an object of texts");
            }
            continue;
        }
        match serde_json::from_value::<TensorInfo>(entry) {
            Ok(info) => infos.push((name, info)),
            Err(error) => return fault(&name, format!("is not described as the format asks ({error})")),
        }
    }
    infos.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
    let mut end = 0;
    let mut before = None;
    for (name, TensorInfo { dtype, shape, data_offsets: (from, to) }) in &infos {
        if to < from {
            return fault(name, format!("ends at {to}, before its start at {from}"));
        }
        if *from < end {
            let other = before.unwrap_or_default();
            return fault(name, format!("starts at {from}, inside of tensor {other:?}, which ends at {end}"));
        }
        if *from > end {
            return fault(
                name,
                format!("starts at {from}, and bytes {end}..{from} before it belong to no tensor"),
            );
        }
        let elements = shape.iter().try_fold(1_usize, |n, &axis| n.checked_mul(axis));
        let bits = elements.and_then(|n| n.checked_mul(dtype.bitsize()));
        match bits {
            None => {
                return fault(name, format!("has the shape {shape:?}, more elements than any memory holds"));
            }
            Some(bits) if bits % 8 != 0 => {
                return fault(
                    name,
                    format!("is {dtype} of shape {shape:?}, which is no whole number of bytes"),
                );
            }
            Some(bits) if bits / 8 != to - from => {
                let need = bits / 8;
                let have = to - from;
                return fault(
                    name,
                    format!("is {dtype} of shape {shape:?}, {need} bytes, and has {have} at {from}..{to}"),
                );
            }
            Some(_) => {}
        }
        end = *to;
        before = Some(name.as_str());
    }
    malformed(what, format!("its header cannot be read ({said})"))
}

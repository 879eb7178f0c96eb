//! Files in the safetensors format, and others, in a folder of a test's own. The command's tests have this file, too.

#![allow(dead_code, reason = "each of them uses a part of it")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::support::bytes;
use crate::support::rig::pattern;

/// A tensor to be written: bytes of no type's in particular.
#[derive(Clone, Debug)]
pub struct Made {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub fn made(name: &str, dtype: &'static str, shape: &[usize], seed: u64) -> Made {
    let size = match dtype {
        "U8" | "BOOL" => 1,
        "BF16" | "F16" => 2,
        "F32" => 4,
        "I64" => 8,
        _ => panic!("{dtype}"),
    };
    let len = shape.iter().product::<usize>() * size;
    Made { name: name.into(), dtype, shape: shape.to_vec(), bytes: pattern(len, seed) }
}

/// The header of a file in the format, for tensors in this order, and its bytes.
pub fn file(tensors: &[Made]) -> Vec<u8> {
    let mut header = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut end = 0;
    for Made { name, dtype, shape, bytes } in tensors {
        let to = end + bytes.len();
        write!(header, r#","{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{end},{to}]}}"#)
            .unwrap();
        end = to;
    }
    header.push('}');
    with_header(&header, tensors.iter().map(|tensor| &*tensor.bytes).collect::<Vec<_>>().concat())
}

/// A file of this header, whatever it says, and what follows.
pub fn with_header(header: &str, rest: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend(rest);
    bytes
}

/// A folder for the time of a test.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// A file of bytes that differ from chunk to chunk.
    pub fn make(&self, name: &str, len: usize) -> PathBuf {
        self.put(name, bytes(len, len))
    }
}

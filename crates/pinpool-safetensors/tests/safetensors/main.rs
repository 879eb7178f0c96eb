//! Checkpoints in the safetensors format: what arrives, where, and in which order; what is refused; and what is left
//! behind when something goes wrong. On the host device with late copies, and on the stand-in libcuda.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used)]

mod fork;
#[cfg(feature = "cuda")]
mod gpu;
mod headers;
mod indexes;
mod loading;
mod many;
mod memory;
mod strange;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod trouble;
mod waiting;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pinpool::Error;
use pinpool::copier::Copier;
use pinpool_safetensors::{Checkpoint, DeviceTensor, Load};

pub(crate) use support::rig::{Rig, block_on, pattern};

pub(crate) const HANG: Duration = Duration::from_secs(20);

/// A tensor to be written: bytes of no type's in particular.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) fn made(name: &str, dtype: &'static str, shape: &[usize], seed: u64) -> Made {
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
pub(crate) fn file(tensors: &[Made]) -> Vec<u8> {
    let mut header = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut end = 0;
    for Made { name, dtype, shape, bytes } in tensors {
        let to = end + bytes.len();
        write!(header, r#","{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{end},{to}]}}"#)
            .unwrap();
        end = to;
    }
    header.push('}');
    with_header(&header, tensors.iter().flat_map(|tensor| tensor.bytes.iter().copied()))
}

/// A file of this header, whatever it says, and what follows.
pub(crate) fn with_header(header: &str, rest: impl IntoIterator<Item = u8>) -> Vec<u8> {
    (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(rest).collect()
}

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// Files of so many of the tensors each, `1.safetensors` and so on, and the checkpoint of all.
pub(crate) fn shards(folder: &Folder, tensors: &[Made], each: usize) -> (Vec<PathBuf>, Checkpoint) {
    let parts = tensors.chunks(each).zip(1..);
    let paths: Vec<PathBuf> =
        parts.map(|(part, number)| folder.put(&format!("{number}.safetensors"), file(part))).collect();
    let checkpoint = Checkpoint::open_files(&paths).unwrap();
    (paths, checkpoint)
}

/// Waits for it.
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// All that a load still gives: the tensors, and the first error. One of both comes out for each that is left.
pub(crate) fn drained(load: &Load) -> (Vec<DeviceTensor>, Option<Error>) {
    let left = load.left();
    let (tensors, errors): (Vec<_>, Vec<_>) = load.blocking().partition(Result::is_ok);
    assert_eq!((tensors.len() + errors.len(), load.left()), (left, 0));
    assert!(load.blocking().next().is_none() && block_on(load.next_tensor()).is_none());
    (tensors.into_iter().flatten().collect(), errors.into_iter().find_map(Result::err))
}

/// Loads one tensor, and waits for it.
pub(crate) fn one(
    checkpoint: &Checkpoint,
    copier: &Copier,
    name: &str,
) -> Result<Option<DeviceTensor>, Error> {
    Ok(checkpoint.loader(copier).filter(|tensor| tensor.name() == name).load()?.pop())
}

pub(crate) fn names(tensors: &[DeviceTensor]) -> Vec<&str> {
    tensors.iter().map(|tensor| tensor.name()).collect()
}

/// The same tensors, with the same bytes on the device, in the same order.
pub(crate) fn arrived<'a>(
    copier: &Copier,
    tensors: &[DeviceTensor],
    expected: impl IntoIterator<Item = &'a Made>,
) {
    let expected: Vec<&Made> = expected.into_iter().collect();
    assert_eq!(names(tensors), expected.iter().map(|made| &made.name).collect::<Vec<_>>());
    for (tensor, made) in tensors.iter().zip(expected) {
        assert_eq!(tensor.shape(), made.shape);
        assert_eq!(tensor.dtype().to_string(), made.dtype);
        match tensor.slice() {
            Some(slice) => assert!(
                copier.download(slice, Vec::new()).unwrap().wait().unwrap() == made.bytes,
                "{}",
                made.name
            ),
            None => assert!(made.bytes.is_empty()),
        }
    }
}

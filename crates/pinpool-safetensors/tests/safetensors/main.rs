//! Checkpoints in the safetensors format: what arrives, where, and in which order; what is refused; and what is left
//! behind when something goes wrong. On the host device with late copies.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used)]

mod fork;
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
mod windows;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use pinpool::Error;
use pinpool::copier::Copier;
use pinpool_safetensors::{Checkpoint, DeviceTensor, Load};

use support::rig::{Rig, block_on, pattern};
use support::{HANG, until};

/// A tensor to be written: bytes of no type's in particular.
#[derive(Clone, Debug)]
struct Made {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn made(name: &str, dtype: &'static str, shape: &[usize], seed: u64) -> Made {
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
fn file(tensors: &[Made]) -> Vec<u8> {
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
fn with_header(header: &str, rest: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend(rest);
    bytes
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// Files of so many of the tensors each, `1.safetensors` and so on, and the checkpoint of all.
fn shards(folder: &Folder, tensors: &[Made], each: usize) -> (Vec<PathBuf>, Checkpoint) {
    let parts = tensors.chunks(each).zip(1..);
    let paths: Vec<PathBuf> =
        parts.map(|(part, number)| folder.put(&format!("{number}.safetensors"), file(part))).collect();
    let checkpoint = Checkpoint::open_files(&paths).unwrap();
    (paths, checkpoint)
}

/// All that a load still gives, to a thread or a task: the tensors, and the first error. One of both comes
/// out for each that is left, and progress never goes back meanwhile.
fn drained(load: &Load, task: bool) -> (Vec<DeviceTensor>, Option<Error>) {
    let (left, mut last) = (load.left(), load.progress());
    let mut next = || {
        let next = if task { block_on(load.next_tensor()) } else { load.blocking().next() };
        let now = load.progress();
        assert!(now.done >= last.done && now.landed_to >= last.landed_to, "{last:?}, then {now:?}");
        assert!(now.done <= now.total && now.landed_to <= now.done, "{now:?}");
        last = now;
        next
    };
    let (tensors, errors): (Vec<_>, Vec<_>) = std::iter::from_fn(&mut next).partition(Result::is_ok);
    assert_eq!((tensors.len() + errors.len(), load.left()), (left, 0));
    assert!(load.blocking().next().is_none() && block_on(load.next_tensor()).is_none());
    (tensors.into_iter().flatten().collect(), errors.into_iter().find_map(Result::err))
}

/// Loads one tensor, and waits for it.
fn one(checkpoint: &Checkpoint, copier: &Copier, name: &str) -> Result<Option<DeviceTensor>, Error> {
    Ok(checkpoint.loader(copier).filter(|tensor| tensor.name() == name).load()?.pop())
}

fn names(tensors: &[DeviceTensor]) -> Vec<&str> {
    tensors.iter().map(|tensor| tensor.name()).collect()
}

/// The same tensors, with the same bytes on the device, in the same order.
fn arrived<'a>(copier: &Copier, tensors: &[DeviceTensor], expected: impl IntoIterator<Item = &'a Made>) {
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

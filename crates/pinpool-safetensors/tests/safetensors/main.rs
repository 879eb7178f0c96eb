//! Checkpoints in the safetensors format: what arrives, where, and in which order; what is refused; and what is left
//! behind when something goes wrong. On the host device with late copies.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used)]

mod files;
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

use std::path::PathBuf;

use pinpool::Error;
use pinpool::copier::Copier;
use pinpool_safetensors::{Checkpoint, DeviceTensor, Load};

use files::{Folder, Made, file, made, with_header};
use support::rig::{Rig, block_on};
use support::{HANG, until};

/// Files of so many of the tensors each, `1.safetensors` and so on, and the checkpoint of all.
fn shards(folder: &Folder, tensors: &[Made], each: usize) -> (Vec<PathBuf>, Checkpoint) {
    let parts = tensors.chunks(each).zip(1..);
    let paths: Vec<PathBuf> =
        parts.map(|(part, number)| folder.put(&format!("{number}.safetensors"), file(part))).collect();
    let checkpoint = Checkpoint::open_files(&paths).unwrap();
    (paths, checkpoint)
}

/// The next of a load, to a thread or a task.
fn next(load: &Load, task: bool) -> Option<Result<DeviceTensor, Error>> {
    if task { block_on(load.next_tensor()) } else { load.blocking().next() }
}

#[track_caller]
fn is_argument(error: &Error, why: &str) {
    assert!(matches!(error, Error::Argument(text) if text.contains(why)), "{error}");
}

/// All that a load still gives, to a thread or a task: the tensors, and the first error. One of both comes
/// out for each that is left, and progress never goes back meanwhile.
fn drained(load: &Load, task: bool) -> (Vec<DeviceTensor>, Option<Error>) {
    let (left, mut last) = (load.left(), load.progress());
    let watched = || {
        let next = next(load, task);
        let now = load.progress();
        assert!(now.done >= last.done && now.landed_to >= last.landed_to, "{last:?}, then {now:?}");
        assert!(now.done <= now.total && now.landed_to <= now.done, "{now:?}");
        last = now;
        next
    };
    let (tensors, errors): (Vec<_>, Vec<_>) = std::iter::from_fn(watched).partition(Result::is_ok);
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
        let there = tensor.slice().map(|slice| copier.download(slice, Vec::new()).unwrap());
        let there = there.map(|download| download.wait().unwrap()).unwrap_or_default();
        assert!(there == made.bytes, "{}", made.name);
    }
}

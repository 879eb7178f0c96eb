//! Tensors to memory of the program's own, in the order of need, and for many threads.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pinpool::{DeviceSlice, Error, Result};
use pinpool_safetensors::{Checkpoint, Load, Tensor};

use super::{Folder, Made, Rig, arrived, made, names, shards, until};

/// Short ones and long ones, of layers that lie in no order, and one without bytes.
fn layers() -> Vec<Made> {
    let mut all = vec![made("embed", "F32", &[333, 100], 1), made("none", "F32", &[0, 5], 2)];
    for layer in [3_u64, 0, 2, 1] {
        all.push(made(&format!("h.{layer}.w"), "BF16", &[64, 513], 10 + layer));
        all.push(made(&format!("h.{layer}.b"), "BF16", &[63], 20 + layer));
    }
    all.push(made("head", "F32", &[333, 333], 9));
    all
}

fn two_files(folder: &Folder, tensors: &[Made]) -> Checkpoint {
    shards(folder, tensors, tensors.len().div_ceil(2)).1
}

#[test]
fn each_tensor_goes_to_memory_of_its_own() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), layers());
    let (copier, checkpoint) = (rig.copier(), two_files(&folder, &tensors));
    let given = RefCell::new(HashMap::new());
    let place = |tensor: &Tensor| {
        if tensor.name().starts_with("h.2.") {
            return Ok(None);
        }
        // Longer than needed: what is behind is left alone.
        let memory = rig.device.alloc(tensor.bytes() as usize + 64)?;
        copier.upload_slice(&vec![0xEE; memory.len()], &memory)?;
        let slice = memory.slice(..)?;
        assert!(given.borrow_mut().insert(tensor.name().to_owned(), slice.clone()).is_none());
        Ok(Some(slice))
    };
    let got = checkpoint.loader(&copier).places(place).load().unwrap();
    let expected: Vec<&Made> = tensors.iter().filter(|made| !made.name.starts_with("h.2.")).collect();
    arrived(&copier, &got, expected.iter().copied());
    let given = given.into_inner();
    assert_eq!(given.len(), expected.len() - 1, "what has no bytes needs no memory");
    for tensor in got.iter().filter(|tensor| tensor.slice().is_some()) {
        let memory = &given[tensor.name()];
        assert_eq!(tensor.slice().map(DeviceSlice::address), Some(memory.address()));
        let len = tensor.bytes() as usize;
        assert_eq!(tensor.slice().map(DeviceSlice::len), Some(len));
        let behind = copier.download(memory.slice(len..).unwrap(), Vec::new()).unwrap().wait().unwrap();
        assert!(behind.iter().all(|byte| *byte == 0xEE), "{}", tensor.name());
    }
    let none = checkpoint.loader(&copier).places(|_| Ok(None)).load().unwrap();
    assert_eq!(names(&none), ["none"], "which has no bytes");
    rig.all_is_back();
}

#[test]
fn memory_that_does_not_serve_is_an_error_with_the_tensors_name() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), layers());
    let (copier, checkpoint) = (rig.copier(), two_files(&folder, &tensors));
    let (other, large) = (Rig::late(), rig.device.alloc(4 << 20).unwrap());
    let load = |bad: &dyn Fn(&Tensor) -> Result<DeviceSlice>| {
        let place = |tensor: &Tensor| match tensor.name() {
            "h.1.w" => bad(tensor).map(Some),
            _ => rig.device.alloc(tensor.bytes() as usize)?.slice(..).map(Some),
        };
        let error = checkpoint.loader(&copier).places(place).start().map(drop).unwrap_err();
        rig.all_is_back();
        error
    };
    let cause = |error: Error| match error {
        Error::Tensor { tensor, landed: 0, cause, .. } if &*tensor == "h.1.w" => *cause,
        error => panic!("{error}"),
    };
    let short = cause(load(&|tensor| rig.device.alloc(tensor.bytes() as usize - 1)?.slice(..)));
    assert!(matches!(short, Error::TooSmall { need: 65_664, have: 65_663 }), "{short}");
    let crooked = cause(load(&|_| large.slice(1..)));
    assert!(matches!(&crooked, Error::Argument(text) if text.contains("align")), "{crooked}");
    let foreign = cause(load(&|_| other.device.alloc(1 << 20)?.slice(..)));
    assert!(matches!(foreign, Error::Mismatch { .. }), "{foreign}");
    assert_eq!(load(&|_| Err(Error::Closed)), Error::Closed, "the program's own error comes as it is");
    // The same memory for two, in two files.
    let twice = checkpoint.loader(&copier).places(|_| large.slice(..).map(Some)).start().map(drop);
    let Err(Error::Tensor { cause, .. }) = twice else { panic!("{twice:?}") };
    assert!(matches!(&*cause, Error::Argument(text) if text.contains("overlaps")), "{cause}");
    // Side by side is no overlap.
    let at = RefCell::new(0);
    let place = |tensor: &Tensor| {
        let start = *at.borrow();
        *at.borrow_mut() = (start + tensor.bytes() as usize).next_multiple_of(16);
        large.slice(start..).map(Some)
    };
    let got = checkpoint.loader(&copier).places(place).load().unwrap();
    arrived(&copier, &got, &tensors);
    rig.all_is_back();
}

#[test]
fn what_is_needed_first_comes_first() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), layers());
    let (copier, checkpoint) = (rig.copier(), two_files(&folder, &tensors));
    let order =
        ["head", "h.1.b", "h.0.w", "h.0.b", "h.1.w", "embed", "none", "h.3.w", "h.3.b", "h.2.w", "h.2.b"];
    let expected: Vec<&Made> =
        order.iter().map(|name| tensors.iter().find(|made| made.name == *name).unwrap()).collect();
    let loader = || {
        let first = ["head", "h.1.b", "nothing", "h.0.", "h.1."];
        first.into_iter().fold(checkpoint.loader(&copier), |loader, prefix| loader.first(prefix))
    };
    arrived(&copier, &loader().load().unwrap(), expected.clone());
    let place = |tensor: &Tensor| rig.device.alloc(tensor.bytes() as usize)?.slice(..).map(Some);
    arrived(&copier, &loader().places(place).load().unwrap(), expected.clone());
    let memory = rig.device.alloc(4 << 20).unwrap();
    let at = RefCell::new(0);
    let block = |len: usize| {
        let start = *at.borrow();
        *at.borrow_mut() = (start + len).next_multiple_of(16);
        memory.slice(start..start + len)
    };
    arrived(&copier, &loader().memory(block).load().unwrap(), expected);
    // With a choice, too.
    let got = loader()
        .filter(|tensor| tensor.name().starts_with("h.") && tensor.name().ends_with('b'))
        .load()
        .unwrap();
    assert_eq!(names(&got), ["h.1.b", "h.0.b", "h.3.b", "h.2.b"]);
    rig.all_is_back();
}

#[test]
fn threads_wait_for_tensors_by_name() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), layers());
    let (copier, checkpoint) = (rig.copier(), two_files(&folder, &tensors));
    for round in 0..20 {
        let load = checkpoint.loader(&copier).start().unwrap();
        assert_eq!(load.left(), tensors.len());
        assert!(load.take("no such tensor").unwrap().is_none());
        let taken = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let (load, tensors, taken, copier) = (load.clone(), &tensors, &taken, &copier);
                scope.spawn(move || {
                    for n in 0..tensors.len() {
                        // Each thread in another order; each tensor is one thread's.
                        let made = &tensors[(n * (2 * thread + 1) + round) % tensors.len()];
                        if let Some(tensor) = load.take(&made.name).unwrap() {
                            arrived(copier, &[tensor], [made]);
                            taken.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        // (Steps that 11 does not divide reach all.)
        assert_eq!((taken.into_inner(), load.left()), (tensors.len(), 0));
    }
    rig.all_is_back();
}

/// A thread that waits for the last tensor holds up none that waits for an earlier one.
#[test]
fn a_wait_for_a_late_tensor_holds_up_no_other() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), layers());
    // At this rate all of it takes 2.5 s, and the first chunks 0.7 s at most.
    let (copier, checkpoint) = (rig.builder().rate(300_000).build().unwrap(), two_files(&folder, &tensors));
    let load = checkpoint.loader(&copier).first("h.1.b").start().unwrap();
    let last = load.clone();
    let waits = std::thread::spawn(move || last.take("head"));
    let early = load.take("h.1.b").unwrap().unwrap();
    assert!(!waits.is_finished(), "all of it cannot have come");
    arrived(&rig.copier(), &[early], tensors.iter().find(|made| made.name == "h.1.b"));
    assert!(waits.join().unwrap().unwrap().is_some());
    drop(load);
    rig.all_is_back();
}

#[test]
fn a_load_that_fails_or_is_cancelled_ends_all_waits() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), layers());
    // All of it takes 2.5 s.
    let copier = rig.builder().rate(300_000).build().unwrap();
    for cut in [false, true] {
        let checkpoint = two_files(&folder, &tensors);
        let load: Load = checkpoint.loader(&copier).start().unwrap();
        let started = Arc::new(AtomicUsize::new(0));
        let waits: Vec<_> = ["head", "h.1.b", "head"]
            .map(|name| {
                let (load, started) = (load.clone(), started.clone());
                std::thread::spawn(move || {
                    started.fetch_add(1, Ordering::SeqCst);
                    load.take(name)
                })
            })
            .into();
        until("they start", || started.load(Ordering::SeqCst) == 3);
        if cut {
            let path = folder.path().join("2.safetensors");
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1000).unwrap();
        } else {
            load.cancel();
        }
        let said: Vec<Result<_>> = waits.into_iter().map(|thread| thread.join().unwrap()).collect();
        let bad = |error: &Error| match error {
            Error::Tensor { .. } | Error::Malformed { .. } => cut,
            Error::Cancelled { .. } => !cut,
            _ => false,
        };
        assert!(said.iter().any(Result::is_err), "{said:?}");
        assert!(said.iter().filter_map(|said| said.as_ref().err()).all(bad), "{said:?}");
        assert!(load.take("head").is_err(), "the same again");
        for handle in [load.clone(), load.clone(), load] {
            assert_eq!(
                handle.blocking().filter(Result::is_err).count(),
                1,
                "each handle ends with the error"
            );
            assert!(handle.blocking().next().is_none(), "and gives it once");
        }
        rig.all_is_back();
    }
    // Dropped with its tensors on the way.
    let checkpoint = two_files(&folder, &tensors);
    drop(checkpoint.loader(&copier).start().unwrap());
    rig.all_is_back();
}

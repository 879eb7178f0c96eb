//! What arrives, where, and in which order.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use pinpool::{DeviceSlice, Error, Result};
use pinpool_safetensors::{Checkpoint, DeviceTensor, Tensor};

use super::{Folder, Made, Rig, arrived, file, is_argument, made, names, one, shards};
use crate::support::skip;

/// Tensors of all kinds of sizes: none, a byte, odd ones, larger than several chunks; of layers that lie in no order.
fn various() -> Vec<Made> {
    vec![
        made("wte", "F32", &[100, 700], 1),
        made("none", "F32", &[0, 5], 2),
        made("scalar", "I64", &[], 3),
        made("odd", "U8", &[3], 4),
        made("h.1.w", "BF16", &[64, 513], 5),
        made("h.1.b", "BF16", &[64], 6),
        made("h.0.w", "BF16", &[64, 64], 7),
        made("h.0.b", "BF16", &[63], 8),
        made("head", "F32", &[333, 333], 9),
        made("last", "U8", &[1], 10),
    ]
}

#[test]
fn all_tensors_arrive_in_the_files_order_with_every_byte() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let (copier, (paths, checkpoint)) = (rig.copier(), shards(&folder, &tensors, 4));
    assert_eq!(checkpoint.tensors().count(), tensors.len());
    assert_eq!(checkpoint.bytes(), tensors.iter().map(|t| t.bytes.len() as u64).sum::<u64>());
    assert_eq!(checkpoint.metadata().collect::<Vec<_>>(), [r#"{"format":"pt"}"#; 3]);
    assert!(checkpoint.get("last").is_some_and(|tensor| tensor.file() == paths[2]));
    arrived(&copier, &checkpoint.loader(&copier).load().unwrap(), &tensors);
    let loading = checkpoint.loader(&copier).start().unwrap();
    let got: Vec<DeviceTensor> = (1..=tensors.len())
        .rev()
        .map(|left| {
            assert_eq!(loading.left(), left);
            loading.blocking().next().unwrap().unwrap()
        })
        .collect();
    // At once, not a little later.
    let stats = rig.pool.stats();
    assert_eq!(stats.checked_out_bytes + stats.in_flight_bytes, 0, "{stats:?}");
    assert!(loading.blocking().next().is_none() && loading.progress().over && loading.left() == 0);
    arrived(&copier, &got, &tensors);
    let none = checkpoint.loader(&copier).filter(|_| false).start().unwrap();
    assert!(none.left() == 0 && none.progress().over, "of nothing it has ended");
    rig.all_is_back();
}

#[test]
fn tensors_lie_side_by_side_where_their_alignment_lets_them() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let copier = rig.copier();
    let checkpoint = Checkpoint::open(folder.put("model.safetensors", file(&tensors))).unwrap();
    for align in [1, 2, 16, 256, 4096, 1 << 16] {
        let got = checkpoint.loader(&copier).align(align).load().unwrap();
        let places: Vec<(u64, u64)> = got
            .iter()
            .filter_map(|t| t.slice().map(|slice| (slice.address(), slice.address() + t.bytes())))
            .collect();
        for (place, next) in places.iter().zip(&places[1..]) {
            assert_eq!(place.1.next_multiple_of(align as u64), next.0, "padding only");
        }
        assert!(places.iter().all(|place| place.0 % align as u64 == 0), "{align} {places:x?}");
        arrived(&copier, &got, &tensors);
    }
    for align in [0, 3] {
        let refused = checkpoint.loader(&copier).align(align).start().map(drop);
        is_argument(&refused.unwrap_err(), "no alignment");
    }
}

#[test]
fn memory_of_the_callers_own_is_used() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let (copier, (_, checkpoint)) = (rig.copier(), shards(&folder, &tensors, 10));
    let memory = rig.device.alloc(4 << 20).unwrap();
    let got = checkpoint.loader(&copier).memory(|len| memory.slice(4096..4096 + len)).load().unwrap();
    assert_eq!(got[0].slice().map(|slice| slice.address()), Some(memory.address() + 4096));
    arrived(&copier, &got, &tensors);
    // What does not serve is refused as the places of tensors are.
    let refused = |get: &dyn Fn(usize) -> Result<DeviceSlice>| {
        checkpoint.loader(&copier).memory(get).start().map(drop).unwrap_err()
    };
    is_argument(&refused(&|len| memory.slice(1..=len)), "align");
    assert_eq!(refused(&|_| Err(Error::Closed)), Error::Closed);
    // Of two files, the second's may lie behind the bytes that the first uses, and not in them.
    let (_, checkpoint) = shards(&folder, &tensors, 5);
    for (step, fits) in [(0, false), (16, false), (1 << 20, true)] {
        let at = Cell::new(0);
        let loader = checkpoint.loader(&copier).memory(|_| {
            at.set(at.get() + step);
            memory.slice(at.get()..)
        });
        match loader.load() {
            Ok(got) => arrived(&copier, &got, &tensors),
            Err(error) => {
                is_argument(&error, "overlap");
                assert!(!fits);
            }
        }
    }
}

#[test]
fn each_tensor_goes_to_memory_of_its_own() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let (copier, (_, checkpoint)) = (rig.copier(), shards(&folder, &tensors, 5));
    let given = RefCell::new(HashMap::new());
    let place = |tensor: &Tensor| {
        if tensor.name().starts_with("h.1.") {
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
    let expected: Vec<&Made> = tensors.iter().filter(|made| !made.name.starts_with("h.1.")).collect();
    arrived(&copier, &got, expected.iter().copied());
    assert_eq!(given.borrow().len(), expected.len() - 1, "what has no bytes needs no memory");
    for tensor in got.iter().filter(|tensor| tensor.slice().is_some()) {
        let (memory, len) = (&given.borrow()[tensor.name()], tensor.bytes() as usize);
        let place = tensor.slice().map(|slice| (slice.address(), slice.len()));
        assert_eq!(place, Some((memory.address(), len)));
        let behind = copier.download(memory.slice(len..).unwrap(), Vec::new()).unwrap().wait().unwrap();
        assert!(behind.iter().all(|byte| *byte == 0xEE), "{}", tensor.name());
    }
    let none = checkpoint.loader(&copier).places(|_| Ok(None)).load().unwrap();
    assert_eq!(names(&none), ["none"], "which has no bytes");

    let (other, large) = (Rig::late(), rig.device.alloc(4 << 20).unwrap());
    let refused = |bad: &dyn Fn(&Tensor) -> Result<DeviceSlice>| {
        let place = |tensor: &Tensor| match tensor.name() {
            "h.1.w" => bad(tensor).map(Some),
            _ => rig.device.alloc(tensor.bytes() as usize)?.slice(..).map(Some),
        };
        let error = checkpoint.loader(&copier).places(place).start().map(drop).unwrap_err();
        rig.all_is_back();
        match error {
            Error::Tensor { tensor, landed: 0, cause, .. } if &*tensor == "h.1.w" => *cause,
            error => error,
        }
    };
    is_argument(&refused(&|_| large.slice(..65_663)), "outside of 65663 bytes");
    is_argument(&refused(&|_| large.slice(1..)), "align");
    assert!(matches!(refused(&|_| other.device.alloc(1 << 20)?.slice(..)), Error::Mismatch { .. }));
    assert_eq!(refused(&|_| Err(Error::Closed)), Error::Closed, "the program's own error comes as it is");
    let twice = checkpoint.loader(&copier).places(|_| large.slice(..).map(Some)).start().map(drop);
    let Err(Error::Tensor { cause, .. }) = twice else { panic!("{twice:?}") };
    is_argument(&cause, "overlaps");
}

#[test]
fn what_is_needed_first_comes_first_and_what_is_not_asked_for_never() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let (copier, (_, checkpoint)) = (rig.copier(), shards(&folder, &tensors, 5));
    let order = ["head", "h.1.b", "h.0.w", "h.0.b", "h.1.w", "wte", "none", "scalar", "odd", "last"];
    let expected = order.map(|name| tensors.iter().find(|made| made.name == name).unwrap());
    let loader = || {
        let first = ["head", "h.1.b", "nothing", "h.0.", "h.1."];
        first.into_iter().fold(checkpoint.loader(&copier), |loader, prefix| loader.first(prefix))
    };
    arrived(&copier, &loader().load().unwrap(), expected);
    let place = |tensor: &Tensor| rig.device.alloc(tensor.bytes() as usize)?.slice(..).map(Some);
    arrived(&copier, &loader().places(place).load().unwrap(), expected);
    let got = loader().filter(|tensor| tensor.name().ends_with('b')).load().unwrap();
    assert_eq!(names(&got), ["h.1.b", "h.0.b"]);
    // With gaps between them in the file.
    let mut turn = 0;
    let every_second = |_: &Tensor| {
        turn += 1;
        turn % 2 == 0
    };
    let got = checkpoint.loader(&copier).filter(every_second).load().unwrap();
    arrived(&copier, &got, tensors.iter().skip(1).step_by(2));
    let none = one(&checkpoint, &copier, "none").unwrap().unwrap();
    assert!(none.slice().is_none() && none.bytes() == 0);
    assert!(checkpoint.get("even").is_none());
}

/// A path is bytes; what it is called in messages is not where it is.
#[test]
fn files_are_where_they_are_said_to_be() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    let path = folder.path().join(std::ffi::OsStr::from_bytes(b"m\xff.safetensors"));
    if let Err(error) = std::fs::write(&path, file(&[made("a", "U8", &[5], 1)])) {
        skip!("this file system has no such names: {error}");
        return;
    }
    let tensor = Checkpoint::open(&path).unwrap().get("a").unwrap();
    assert!(tensor.file() == path && std::fs::File::open(tensor.file()).is_ok());
}

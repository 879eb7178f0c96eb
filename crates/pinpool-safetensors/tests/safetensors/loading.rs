//! What arrives, where, and when.

use std::future::Future;
use std::task::{Context, Waker};

use pinpool::Error;
use pinpool::copier::Reading;
use pinpool_safetensors::{Checkpoint, DeviceTensor};

use super::{Folder, Made, Rig, arrived, block_on, file, made, shards};
use crate::support::skip;

/// Tensors of all kinds of sizes: none, a byte, odd ones, larger than several chunks.
fn various() -> Vec<Made> {
    vec![
        made("wte", "F32", &[100, 700], 1),
        made("none", "F32", &[0, 5], 2),
        made("scalar", "I64", &[], 3),
        made("odd", "U8", &[3], 4),
        made("h.0.w", "BF16", &[64, 64], 5),
        made("h.0.b", "BF16", &[64], 6),
        made("h.1.w", "BF16", &[64, 64], 7),
        made("h.1.b", "BF16", &[63], 8),
        made("head", "F32", &[333, 333], 9),
        made("last", "U8", &[1], 10),
    ]
}

#[test]
fn all_tensors_arrive_in_the_files_order_with_every_byte() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let path = folder.put("model.safetensors", file(&tensors));
    let copier = rig.copier();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.tensors().count(), tensors.len());
    assert_eq!(checkpoint.bytes(), tensors.iter().map(|t| t.bytes.len() as u64).sum::<u64>());
    assert_eq!(checkpoint.metadata().collect::<Vec<_>>(), [r#"{"format":"pt"}"#]);
    assert!(checkpoint.tensors().all(|tensor| tensor.file() == path));
    for reading in [Reading::Auto, Reading::Buffered, Reading::Direct] {
        let got = checkpoint.loader(&copier).reading(reading).load().unwrap();
        arrived(&copier, &got, &tensors);
    }
    rig.all_is_back();
}

#[test]
fn tensors_lie_side_by_side_where_their_alignment_lets_them() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let path = folder.put("model.safetensors", file(&tensors));
    let copier = rig.copier();
    let checkpoint = Checkpoint::open(path).unwrap();
    for align in [1, 2, 16, 256, 4096, 1 << 16] {
        let got = checkpoint.loader(&copier).align(align).load().unwrap();
        let places: Vec<(u64, u64)> = got
            .iter()
            .filter_map(|t| t.slice().map(|slice| (slice.address(), slice.address() + t.bytes())))
            .collect();
        for (place, next) in places.iter().zip(&places[1..]) {
            assert_eq!(
                place.1.next_multiple_of(align as u64),
                next.0,
                "nothing but the alignment between them"
            );
        }
        assert!(places.iter().all(|place| place.0 % align as u64 == 0), "{align} {places:x?}");
        arrived(&copier, &got, &tensors);
    }
    for align in [0, 3, 4 << 20] {
        let refused = checkpoint.loader(&copier).align(align).start().map(drop).unwrap_err();
        assert!(matches!(&refused, Error::Argument(text) if text.contains("no alignment")), "{refused}");
    }
    rig.all_is_back();
}

#[test]
fn what_is_not_asked_for_is_not_loaded() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let path = folder.put("model.safetensors", file(&tensors));
    let copier = rig.copier();
    let checkpoint = Checkpoint::open(path).unwrap();
    let got =
        checkpoint.loader(&copier).filter(|t| t.name().starts_with("h.") && t.shape().len() == 2).load();
    let got = got.unwrap();
    arrived(&copier, &got, [&tensors[4], &tensors[6]]);
    // With gaps between them in the file.
    let mut turn = 0;
    let loader = checkpoint.loader(&copier).filter(|_| {
        turn += 1;
        turn % 2 == 0
    });
    let got = loader.load().unwrap();
    arrived(&copier, &got, tensors.iter().skip(1).step_by(2));
    assert!(checkpoint.loader(&copier).filter(|_| false).load().unwrap().is_empty());

    // Lazily, one at a time.
    let one = checkpoint.tensor(&copier, "h.0.w").unwrap().unwrap();
    arrived(&copier, &[one], [&tensors[4]]);
    let none = checkpoint.tensor(&copier, "none").unwrap().unwrap();
    assert!(none.slice().is_none() && none.bytes() == 0);
    assert!(checkpoint.tensor(&copier, "h.2.w").unwrap().is_none());
    assert_eq!(checkpoint.get("odd").unwrap().shape(), [3]);
    assert!(checkpoint.get("even").is_none());
    rig.all_is_back();
}

#[test]
fn a_load_knows_how_many_are_left() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let (copier, (_, checkpoint)) = (rig.copier(), shards(&folder, &tensors, 5));
    let loading = checkpoint.loader(&copier).filter(|t| t.name() != "odd").start().unwrap();
    for left in (0..tensors.len()).rev() {
        assert_eq!(loading.left(), left);
        // A caller that takes just the tensors that are left has seen the load's end.
        assert_eq!(loading.progress().over, left == 0);
        assert_eq!(loading.blocking().next().is_some(), left > 0);
    }
    assert!(loading.blocking().next().is_none() && loading.blocking().next().is_none());
}

#[test]
fn the_first_tensor_is_there_while_the_last_are_on_their_way() {
    let (rig, folder) = (Rig::late(), Folder::new());
    let tensors: Vec<Made> = (0..64).map(|i| made(&format!("t{i}"), "F32", &[16 << 10], i)).collect();
    let path = folder.put("model.safetensors", file(&tensors));
    // All of it takes two seconds; a tensor may lie in two chunks.
    let copier = rig.builder().rate(2 << 20).build().unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    let loading = checkpoint.loader(&copier).start().unwrap();
    let first = loading.blocking().next().unwrap().unwrap();
    let progress = loading.progress();
    assert!(progress.done >= 65_536 && progress.done < progress.total && !progress.over, "{progress:?}");
    arrived_first(&rig.copier(), &first, &tensors[0]);
    let rest: Vec<DeviceTensor> = loading.blocking().map(Result::unwrap).collect();
    arrived(&copier, &rest, tensors.iter().skip(1));
    let progress = loading.progress();
    assert_eq!((progress.done, progress.total, progress.landed_to), (4 << 20, 4 << 20, 4 << 20));
    assert!(progress.over);
    rig.all_is_back();
}

/// By a stream of its own: the copier is as slow as it was told.
fn arrived_first(copier: &pinpool::copier::Copier, tensor: &DeviceTensor, made: &Made) {
    let stream = copier.device().stream().unwrap();
    let mut back = vec![0; made.bytes.len()];
    stream.download_blocking(tensor.slice().unwrap(), &mut back).unwrap();
    assert!(back == made.bytes);
}

#[test]
fn several_shards_are_one_checkpoint_and_nothing_is_in_use_at_its_end() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let (copier, (_, checkpoint)) = (rig.copier(), shards(&folder, &tensors, 4));
    let loading = checkpoint.loader(&copier).start().unwrap();
    let got: Vec<DeviceTensor> = loading.blocking().map(Result::unwrap).collect();
    assert!(loading.blocking().next().is_none());
    // At once, not a little later.
    let stats = rig.pool.stats();
    assert_eq!(stats.checked_out_bytes + stats.in_flight_bytes, 0, "{stats:?}");
    arrived(&copier, &got, &tensors);
    let none = checkpoint.loader(&copier).filter(|_| false).start().unwrap();
    assert!(none.left() == 0 && none.progress().over, "of nothing it has ended");
    rig.all_is_back();
}

#[test]
fn memory_of_the_callers_own_is_used() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let path = folder.put("model.safetensors", file(&tensors));
    let copier = rig.copier();
    let checkpoint = Checkpoint::open(path).unwrap();
    let memory = rig.device.alloc(4 << 20).unwrap();
    let get = |len: usize| memory.slice(4096..4096 + len);
    let got = checkpoint.loader(&copier).memory(get).load().unwrap();
    assert_eq!(got[0].slice().map(|slice| slice.address()), Some(memory.address() + 4096));
    arrived(&copier, &got, &tensors);
    let small = checkpoint.loader(&copier).memory(|len| memory.slice(..len - 1)).start().map(drop);
    assert!(matches!(small, Err(Error::TooSmall { .. })), "{small:?}");
    let crooked = checkpoint.loader(&copier).memory(|len| memory.slice(1..=len)).start().map(drop);
    assert!(matches!(&crooked, Err(Error::Argument(text)) if text.contains("align")), "{crooked:?}");
    let none = checkpoint.loader(&copier).memory(|_| Err(Error::Closed)).start().map(drop);
    assert_eq!(none, Err(Error::Closed));
    let other = Rig::late();
    let foreign = other.device.alloc(4 << 20).unwrap();
    let wrong = checkpoint.loader(&copier).memory(|len| foreign.slice(..len)).start().map(drop);
    assert!(matches!(wrong, Err(Error::Mismatch { .. })), "{wrong:?}");
    rig.all_is_back();
}

#[test]
fn tasks_get_tensors_as_threads_do() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), various());
    let (copier, (_, checkpoint)) = (rig.copier(), shards(&folder, &tensors, 3));
    let got = block_on(async {
        let loading = checkpoint.loader(&copier).start().unwrap();
        let mut got = Vec::new();
        while let Some(tensor) = loading.next_tensor().await {
            got.push(tensor.unwrap());
        }
        assert!(loading.next_tensor().await.is_none());
        got
    });
    let stats = rig.pool.stats();
    assert_eq!(stats.checked_out_bytes + stats.in_flight_bytes, 0, "{stats:?}");
    arrived(&copier, &got, &tensors);

    // Polled once, and dropped: what it had begun ends by itself.
    let loading = checkpoint.loader(&copier).start().unwrap();
    let mut next = Box::pin(loading.next_tensor());
    let _ = next.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    drop(next);
    drop(loading);
    rig.all_is_back();
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
    let checkpoint = Checkpoint::open(&path).unwrap();
    let tensor = checkpoint.get("a").unwrap();
    assert_eq!((tensor.file(), checkpoint.get("b").is_none()), (&*path, true));
    assert!(std::fs::File::open(tensor.file()).is_ok());
}

//! What goes wrong while tensors are on their way.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use pinpool::host::{Call, Failure, Fault};
use pinpool::{Error, ErrorClass};
use pinpool_safetensors::{Checkpoint, DeviceTensor};

use super::{Folder, Made, Rig, arrived, block_on, drained, file, made, next, one, shards, until};

fn many() -> Vec<Made> {
    (0..40).map(|i| made(&format!("t{i:02}"), "F32", &[25_000 + i as usize % 3], i)).collect()
}

/// And all who wait for what has not come are told.
#[test]
fn a_cancelled_load_leaves_nothing_behind_and_what_arrived_stays() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), many());
    let (_, checkpoint) = shards(&folder, &tensors, 20);
    // Slow enough for few to be whole before they are cancelled.
    let copier = rig.builder().rate(4 << 20).build().unwrap();
    let mut cancelled = 0;
    for after in [0, 1, 7, 19, 20, 23] {
        let loading = checkpoint.loader(&copier).start().unwrap();
        let waits = ["t38", "t39", "t39"].map(|name| {
            let load = loading.clone();
            std::thread::spawn(move || load.take(name))
        });
        let mut got: Vec<DeviceTensor> = loading.blocking().take(after).map(Result::unwrap).collect();
        std::thread::scope(|scope| scope.spawn(|| loading.cancel()).join().unwrap());
        let (rest, error) = drained(&loading, after % 2 == 0);
        got.extend(rest);
        got.extend(waits.into_iter().filter_map(|thread| match thread.join().unwrap() {
            Err(Error::Cancelled { .. }) => None,
            taken => taken.unwrap(),
        }));
        got.sort_by(|a, b| a.name().cmp(b.name()));
        let is_cancelled = matches!(error, Some(Error::Cancelled { .. }));
        assert!(is_cancelled || got.len() == tensors.len(), "{} tensors: {error:?}", got.len());
        cancelled += usize::from(is_cancelled);
        drop(loading);
        // What comes first of each file.
        let front = |file: &str| got.iter().filter(|tensor| tensor.file().ends_with(file)).count();
        let (first, second) = (front("1.safetensors"), front("2.safetensors"));
        arrived(&rig.copier(), &got, tensors[..first].iter().chain(&tensors[20..20 + second]));
        rig.all_is_back();
    }
    assert!(cancelled >= 3, "{cancelled}");
}

/// Sets another time of modification, however coarse the system's clock of files is.
fn write_to(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    file.write_all_at(&[0xa5], len - 1).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(100)).unwrap();
}

/// A file that becomes shorter. A loop that goes on behind errors has one for each tensor that is missing,
/// and all tensors of the other file.
#[test]
fn an_error_comes_once_for_each_tensor_and_ends_no_other_file() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), many());
    for (task, number) in [(false, 0), (true, 1)] {
        let (paths, checkpoint) = shards(&folder, &tensors, 20);
        let (own, its) = (20 * number..20 * number + 20, |what: &str| {
            paths[number].ends_with(what.rsplit('/').next().unwrap())
        });
        let slow = rig.builder().rate(8 << 20).build().unwrap();
        let loading = checkpoint.loader(&slow).start().unwrap();
        let (by_name, last) = (loading.clone(), tensors[own.end - 1].name.clone());
        let waits = std::thread::spawn(move || by_name.take(&last).map(drop));
        OpenOptions::new().write(true).open(&paths[number]).unwrap().set_len(100_000).unwrap();
        let (mut got, mut missing) = (Vec::new(), Vec::new());
        while let Some(next) = next(&loading, task) {
            let Err(error) = next else {
                got.extend(next);
                continue;
            };
            // The first that is missing by its name, and how many are there; the cause has the file.
            let Error::Tensor { tensor, landed, total: 40, cause } = error else { panic!("{error}") };
            let Error::Read { what, offset: 100_000, kind: std::io::ErrorKind::UnexpectedEof, .. } = *cause
            else {
                panic!("{cause:?}")
            };
            assert!(its(&what), "{what}");
            missing.push((tensor, landed));
        }
        let first = own.end - missing.len();
        assert!(own.contains(&first) && loading.left() == 0 && loading.progress().over);
        for ((name, landed), made) in missing.iter().zip(&tensors[first..own.end]) {
            assert_eq!((&**name, *landed), (&*made.name, first), "{missing:?}");
            assert!(matches!(loading.take(name), Err(Error::Tensor { .. })), "{name}");
            assert!(matches!(block_on(loading.take_async(name)), Err(Error::Tensor { .. })), "{name}");
        }
        arrived(&rig.copier(), &got, tensors[..first].iter().chain(&tensors[own.end..]));
        assert!(matches!(waits.join().unwrap(), Err(Error::Tensor { .. })));
        drop((got, loading));
        rig.all_is_back();
        // It was cut before this one.
        let error = checkpoint.loader(&slow).start().map(drop).unwrap_err();
        assert!(matches!(&error, Error::Malformed { what, .. } if its(what)), "{error}");
    }
}

#[test]
fn a_load_that_cannot_start_all_files_leaves_nothing_on_the_wire() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), many());
    let (_, checkpoint) = shards(&folder, &tensors, 20);
    let copier = rig.copier();
    let mut blocks = 0;
    std::thread::scope(|scope| {
        let memory = |len: usize| {
            blocks += 1;
            if blocks == 1 {
                rig.node.hang(0);
                return rig.device.alloc(len)?.slice(..);
            }
            until("nothing is on its way", || rig.pool.stats().in_flight_bytes > 0);
            let node = &rig.node;
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                node.resume(0);
            });
            Err(Error::Closed)
        };
        let ended = checkpoint.loader(&copier).memory(memory).load().map(drop);
        assert_eq!(ended, Err(Error::Closed));
        assert_eq!(rig.pool.stats().in_flight_bytes, 0, "its memory may be used again");
    });
    assert_eq!(blocks, 2);
}

#[test]
fn a_device_that_fails_half_way_is_an_error_and_the_rest_is_given_back() {
    let (folder, tensors) = (Folder::new(), many());
    let path = folder.put("1.safetensors", file(&tensors));
    for nth in [0, 3, 30] {
        let rig = Rig::late();
        let copier = rig.copier();
        let checkpoint = Checkpoint::open(&path).unwrap();
        rig.node.fail(Fault { device: 0, call: Call::Copy, nth, failure: Failure::Transient });
        let loading = checkpoint.loader(&copier).start().unwrap();
        let (got, error) = drained(&loading, nth > 0);
        drop(loading);
        let error = error.expect("a copy fails");
        let Error::Tensor { tensor, landed, total: 40, cause } = &error else { panic!("{error:?}") };
        assert_eq!((&**tensor, *landed), (&*tensors[got.len()].name, got.len()), "{error}");
        assert!(matches!(**cause, Error::Transfer { .. }), "{error}");
        assert_eq!(error.class(), ErrorClass::Transient, "{error}");
        arrived(&copier, &got, tensors.iter().take(got.len()));
    }
    // One that dies ends the load for threads and for tasks.
    for task in [false, true] {
        let rig = Rig::plain();
        let copier = rig.builder().rate(1 << 20).build().unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let loading = checkpoint.loader(&copier).start().unwrap();
        rig.node.kill(0);
        let error = drained(&loading, task).1.expect("it does not end without an error");
        assert_eq!(error.class(), ErrorClass::DeviceLost, "{error}");
        assert!(checkpoint.loader(&copier).start().map(drop).is_err());
    }
}

/// The error is in the place of the file's last tensor: a caller need not ask for more than there is.
#[test]
fn a_file_that_was_written_to_is_told_with_the_last_that_is_left() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), many());
    let (paths, _) = shards(&folder, &tensors, 20);
    for (path, before) in [(&paths[0], 19), (&paths[1], 39)] {
        for task in [false, true] {
            let checkpoint = Checkpoint::open_files(&paths).unwrap();
            let slow = rig.builder().rate(4 << 20).build().unwrap();
            let loading = checkpoint.loader(&slow).start().unwrap();
            write_to(path);
            let results: Vec<_> = (0..=before).map_while(|_| next(&loading, task)).collect();
            let (last, good) = results.split_last().unwrap();
            assert!(good.len() == before && good.iter().all(Result::is_ok), "{} came", good.len());
            let told = |what: &str| path.ends_with(what.rsplit('/').next().unwrap());
            assert!(
                matches!(last, Err(Error::Malformed { what, why, .. }) if told(what) && why.contains("was written to")),
                "{last:?}"
            );
            drop(results);
            rig.all_is_back();
        }
    }
}

/// The program's own code may do anything, and end in any way.
#[test]
fn callbacks_that_panic_or_wait_leave_nothing_behind() {
    let (rig, folder, tensors) = (Rig::late(), Folder::new(), many());
    let (_, checkpoint) = shards(&folder, &tensors, 20);
    let copier = rig.copier();
    let panics = |what: &dyn Fn() -> bool| {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(what));
        assert!(caught.is_err());
        rig.all_is_back();
    };
    panics(&|| checkpoint.loader(&copier).filter(|t| t.name() != "t30" || panic!("as told")).start().is_ok());

    // Between its tensors, a wait for another load by the same copier.
    let loading = checkpoint.loader(&copier).start().unwrap();
    for (count, tensor) in loading.blocking().enumerate().step_by(13) {
        let other = one(&checkpoint, &copier, "t39").unwrap().expect("it is there");
        arrived(&copier, &[tensor.unwrap(), other], [&tensors[count], &tensors[39]]);
    }
    drop(loading);
}

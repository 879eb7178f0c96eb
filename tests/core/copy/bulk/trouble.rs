//! What goes wrong: a clear error each, no wrong byte reported as right, and nothing left behind.

use pinpool::ErrorClass;

use super::*;
use crate::support::panicking::Bomb;

/// A source that ends in some way at a place of its bytes. Its transfer ends with that place, and no thread
/// does, of which there are as few as can be.
#[test]
fn a_source_that_fails_or_panics_ends_its_transfer_with_the_place() {
    let rig = Rig::late();
    let copier = rig.builder().threads(1).build().unwrap();
    let (bytes, memory) = (pattern(1 << 20, 2), rig.device.alloc(1 << 20).unwrap());
    type End = fn() -> io::Result<()>;
    let ends: [(End, _, _); 3] = [
        (|| Err(io::Error::other("the disk is on fire")), io::ErrorKind::Other, "on fire"),
        (|| std::panic::panic_any(Bomb), io::ErrorKind::Other, "panicked"),
        (|| Ok(()), io::ErrorKind::UnexpectedEof, "1048576"),
    ];
    for (end, due, word) in ends {
        for at in [0, 300_000, (1 << 20) - 1] {
            let bytes = bytes.clone();
            let odd = source("odd", 1 << 20, move |offset, into: &mut Fill<'_>| {
                let until = offset + into.remaining() as u64;
                let good = if (offset..until).contains(&at) { at } else { until };
                into.push(&bytes[offset as usize..good as usize]);
                if good < until { end() } else { Ok(()) }
            });
            let failed = copier.upload(odd, &memory).unwrap().wait().map(drop).unwrap_err();
            assert!(failed.buffer.is_some(), "the source comes back");
            let Error::Read { what, offset, kind, text } = failed.error else { panic!("{failed}") };
            assert_eq!((&*what, offset, kind), ("odd", at, due));
            assert!(text.contains(word), "{text}");
        }
    }
    copier.upload_slice(&bytes, &memory).unwrap();
    assert!(downloaded(&copier, &memory) == bytes);
}

/// The call returns when nothing of it is on the wire, and the copier works as before.
#[test]
fn a_reader_or_writer_that_fails_or_panics_does_so_alone() {
    let rig = Rig::late();
    let (copier, bytes, memory) = with(&rig, 1 << 20, 2);
    // Takes or gives no more than is left, and then fails or panics.
    let torn = |left: &mut usize, n: usize, panics: bool| {
        if *left < n {
            assert!(!panics, "on purpose");
            return Err(io::Error::other("the line is dead"));
        }
        *left -= n;
        Ok(n)
    };
    for good in [0, 200_000, 500_000] {
        let up = |panics| {
            let mut left = good;
            let mut torn = reader(|into| {
                let n = into.len().min(left).max(1);
                torn(&mut left, n, panics)
            });
            copier.upload_read(&mut torn, &memory)
        };
        let down = |panics| {
            let mut left = good;
            copier.download_write(&memory, &mut writer(|_, bytes| torn(&mut left, bytes.len(), panics)))
        };
        let failed = down(false).unwrap_err();
        assert!(matches!(&failed, Error::Write { offset, .. } if *offset <= good as u64), "{failed}");
        for call in [&down as &dyn Fn(bool) -> Result<u64, Error>, &up] {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(true))).unwrap_err();
            assert_eq!(rig.pool.stats().in_flight_bytes, 0, "its memory may be used again");
        }
        // What was read before is on the wire when the reader fails.
        rig.node.hang(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                rig.node.resume(0);
            });
            let failed = up(false).unwrap_err();
            assert!(matches!(&failed, Error::Read { offset, .. } if *offset == good as u64), "{failed}");
            assert_eq!(rig.pool.stats().in_flight_bytes, 0, "its memory may be used again");
        });
        rig.all_is_back();
    }
    for failure in [Failure::RunsAnyway, Failure::Transient] {
        rig.node.fail(Fault { device: 0, call: Call::Copy, nth: 2, failure });
        let failed = copier.upload_read(&mut &bytes[..], &memory).unwrap_err();
        assert!(matches!(failed, Error::Transfer { .. }), "{failure:?}: {failed}");
        rig.all_is_back();
    }
    copier.upload_slice(&bytes, &memory).unwrap();
    assert!(downloaded(&copier, &memory) == bytes);
}

#[test]
fn a_file_that_becomes_shorter_is_an_error_with_its_end() {
    let rig = Rig::plain();
    let len = 2 << 20;
    let (copier, bytes, memory) = with(&rig, len, 3);
    for reading in [Reading::Auto, Reading::Buffered, Reading::Direct] {
        for cut in [0, 1_000_000, len - 1] {
            let file = file_of(&bytes);
            let source = FileSource::open(file.path()).unwrap().reading(reading);
            file.as_file().set_len(cut as u64).unwrap();
            let failed = copier.upload(source, &memory).unwrap().wait().unwrap_err();
            let name = file.path().display().to_string();
            match failed.error {
                Error::Read { what, offset, kind: io::ErrorKind::UnexpectedEof, text } => {
                    assert_eq!((what, offset), (name, cut as u64), "{reading:?}");
                    assert!(text.contains("not at 2097152"), "{text}");
                }
                other => panic!("{reading:?} {cut}: {other}"),
            }
            rig.all_is_back();
        }
    }
}

#[test]
fn a_lost_device_ends_everything_with_its_error() {
    for nth in [0, 17] {
        let rig = Rig::late();
        let (copier, bytes, memory) = with(&rig, 2 << 20, 6);
        let other = rig.device.alloc(2 << 20).unwrap();
        rig.node.fail(Fault { device: 0, call: Call::Copy, nth, failure: Failure::DeviceLost });
        let owned = copier.upload(bytes.clone(), &other).unwrap();
        for error in [
            copier.upload_slice(&bytes, &memory).unwrap_err(),
            copier.download_slice(&memory, &mut vec![0; 2 << 20]).unwrap_err(),
            owned.wait().map(drop).unwrap_err().error,
            copier.upload_read(&mut &bytes[..], &memory).unwrap_err(),
        ] {
            assert_eq!(error.class(), ErrorClass::DeviceLost, "{error}");
        }
        rig.pool.check().unwrap();
    }
}

/// Parts of a chunk that were submitted before one was refused are in flight, and so is a copy that
/// is refused and runs all the same: until they are through the transfer is not over.
#[test]
fn a_chunk_that_is_refused_half_way_is_over_when_its_copies_are() {
    for (stalls, failure) in
        [(true, Failure::Argument), (true, Failure::RunsAnyway), (false, Failure::RunsAnyway)]
    {
        let rig = Rig::plain();
        let copier = rig.builder().threads(1).depth(1).build().unwrap();
        let (bytes, new) = (pattern(3000, 1), pattern(1000, 2));
        let memory = rig.device.alloc(10_000).unwrap();
        let fail = |nth, failure| rig.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
        rig.node.start_trace();
        if stalls {
            fail(0, Failure::Stall);
        }
        fail(u64::from(stalls), failure);
        // Neighbours in the source and not on the device: one chunk of several copies.
        let place = |n: usize| memory.slice(n * 3000..n * 3000 + 1000).unwrap();
        let pieces = (0..3).map(|n| CopyRange::new(n as u64 * 1000, place(n))).collect::<Vec<_>>();
        let load = copier.upload(bytes.clone(), pieces).unwrap();
        if stalls {
            let copies = || rig.node.trace().iter().filter(|call| **call == Call::Copy).count();
            until("the second is refused", || copies() >= 2);
            std::thread::sleep(Duration::from_millis(50));
            assert!(!load.is_over(), "a copy is in flight");
            rig.node.resume(0);
        }
        assert!(load.wait().is_err());
        copier.upload(new.clone(), place(0)).unwrap().wait().unwrap();
        rig.all_is_back();
        assert!(downloaded(&copier, place(0)) == new, "{failure:?}: what came later is what stays");
    }
}

/// Whether it lands after it was cancelled or before.
#[test]
fn what_has_landed_for_nobody_waits_for_no_worker() {
    for late in [true, false] {
        let rig = Rig::plain();
        let copier = rig.builder().threads(1).build().unwrap();
        let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
        let blocks = Blocks::default();
        let upload = copier.upload(blocks.source(1 << 20, 0), &memory[0]).unwrap();
        until("the only worker is inside the call", || blocks.calls() > 0);
        if late {
            rig.node.hang(0);
        }
        let download = copier.download(&memory[1], sink(|_, _: &[u8]| Ok(()))).unwrap();
        // Otherwise all that may land has landed.
        std::thread::sleep(Duration::from_millis(50));
        download.cancel();
        rig.node.resume(0);
        let ended = download.wait_timeout(HANG).expect("it ends").map(drop).unwrap_err();
        assert!(matches!(ended.error, Error::Cancelled { .. }), "{ended:?}");
        blocks.go_on();
        upload.wait().unwrap();
    }
}

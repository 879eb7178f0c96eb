//! What goes wrong: a clear error each, no wrong byte reported as right, and nothing left behind.

use std::fs::OpenOptions;
use std::future::Future as _;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use crate::support::downloaded;
use pinpool::copier::{CopyRange, FileSink, FileSource, Fill, Reading, Source};
use pinpool::host::{Call, Failure, Fault};
use pinpool::{Error, ErrorClass};

use super::{HANG, Rig, file_of, io, pattern, reader, sink, source, told, until, with, writer};

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Fails,
    Panics,
    Ends,
}

/// A source that fails, panics or is short at a place.
fn odd(bytes: Vec<u8>, at: u64, how: How) -> impl Source {
    let len = bytes.len();
    source("odd", len, move |offset, into: &mut Fill<'_>| {
        let end = offset + into.remaining() as u64;
        let good = if (offset..end).contains(&at) { at } else { end };
        into.push(&bytes[offset as usize..good as usize]);
        match how {
            How::Fails if good < end => Err(io::Error::other("the disk is on fire")),
            How::Panics if good < end => panic!("on purpose"),
            _ => Ok(()),
        }
    })
}

#[test]
fn a_source_that_fails_ends_its_transfer_with_the_place() {
    for rig in [Rig::plain(), Rig::late()] {
        let (copier, bytes, memory) = with(&rig, 1 << 20, 2);
        for how in [How::Fails, How::Panics, How::Ends] {
            for at in [0, 1, 300_000, (1 << 20) - 1] {
                let odd = odd(pattern(1 << 20, 1), at, how);
                let failed = copier.upload(odd, &memory).unwrap().wait().map(drop).unwrap_err();
                assert!(failed.buffer.is_some(), "the source comes back");
                let Error::Read { what, offset, kind, text } = failed.error else { panic!("{failed}") };
                assert!(what == "odd" && offset == at, "{what} {offset}");
                match how {
                    How::Fails => assert!(text.contains("on fire"), "{text}"),
                    How::Panics => assert!(text.contains("panicked"), "{text}"),
                    How::Ends => {
                        assert!(kind == io::ErrorKind::UnexpectedEof && text.contains("1048576"), "{text}");
                    }
                }
            }
        }
        // The copier works as before.
        copier.upload_slice(&bytes, &memory).unwrap();
        assert!(downloaded(&copier, &memory) == bytes);
        rig.all_is_back();
    }
}

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
    for good in [0, 100_000, 500_000] {
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
        let failed = up(false).unwrap_err();
        assert!(matches!(&failed, Error::Read { offset, .. } if *offset == good as u64), "{failed}");
        let failed = down(false).unwrap_err();
        assert!(matches!(&failed, Error::Write { offset, .. } if *offset <= good as u64), "{failed}");
        let panicked = |work: &dyn Fn()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_err();
        };
        let calls: [&dyn Fn(); 2] = [&|| drop(up(true)), &|| drop(down(true))];
        for call in calls {
            panicked(call);
            assert_eq!(rig.pool.stats().in_flight_bytes, 0, "its memory may be used again");
        }
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
        for cut in [0, 4096, 1_000_000, len - 1] {
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

/// The place is the file's, wherever the sink begins in it.
#[test]
fn a_full_disk_is_an_error_with_the_place() {
    let rig = Rig::late();
    let (copier, _, memory) = with(&rig, 1 << 20, 1);
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    let whole = memory.slice(..).unwrap();
    for (memory, at) in [(whole.clone(), 0), (memory.slice(..4096).unwrap(), 1 << 30)] {
        let sink = FileSink::new(full(), "/dev/full").at(at);
        let failed = copier.download(memory, sink).unwrap().wait().unwrap_err();
        assert!(failed.buffer.is_some());
        let text = failed.error.to_string();
        let Error::Write { what, kind, offset, .. } = failed.error else { panic!("{text}") };
        assert!(what == "/dev/full" && kind == io::ErrorKind::StorageFull && text.contains("make room"));
        assert!(at == 0 || offset == at, "{offset}");
    }
    let failed = copier.download_write(&whole, &mut full()).unwrap_err();
    assert!(matches!(failed, Error::Write { offset: 0, .. }), "{failed}");
    rig.all_is_back();
}

#[test]
fn a_file_that_cannot_be_read_is_an_error() {
    assert!(matches!(FileSource::open("/nonexistent/file"), Err(Error::Read { offset: 0, .. })));
    assert!(matches!(FileSink::create("/nonexistent/file"), Err(Error::Write { offset: 0, .. })));
    let rig = Rig::plain();
    let copier = rig.copier();
    let memory = rig.device.alloc(4096).unwrap();
    // Open for writing only.
    let file = file_of(&[1; 4096]);
    let file = OpenOptions::new().write(true).open(file.path()).unwrap();
    let source = FileSource::new(file, "write-only").unwrap().reading(Reading::Buffered);
    let failed = copier.upload(source, &memory).unwrap().wait().unwrap_err();
    assert!(matches!(&failed.error, Error::Read { what, .. } if what == "write-only"), "{}", failed.error);
    let empty = FileSource::new(tempfile::tempfile().unwrap(), "empty").unwrap();
    assert!(matches!(
        copier.upload(empty, &memory).unwrap_err().error,
        Error::Argument(text) if text.contains("nothing to copy")
    ));
    rig.all_is_back();
}

#[test]
fn a_lost_device_ends_everything_with_its_error() {
    for nth in [0, 3, 17] {
        let rig = Rig::late();
        let call = Call::Copy;
        let copier = rig.copier();
        let memory = rig.device.alloc(2 << 20).unwrap();
        let bytes = pattern(2 << 20, 6);
        let other = rig.device.alloc(2 << 20).unwrap();
        rig.node.fail(Fault { device: 0, call, nth, failure: Failure::DeviceLost });
        let owned = copier.upload(bytes.clone(), &other).unwrap();
        let mut back = vec![0; 2 << 20];
        let results = [
            copier.upload_slice(&bytes, &memory).unwrap_err(),
            copier.download_slice(&memory, &mut back).unwrap_err(),
            owned.wait().map(drop).unwrap_err().error,
        ];
        for error in results {
            assert_eq!(error.class(), ErrorClass::DeviceLost, "{error}");
        }
        let read = copier.upload_read(&mut &bytes[..], &memory);
        assert_eq!(read.unwrap_err().class(), ErrorClass::DeviceLost);
        rig.pool.check().unwrap();
    }
}

#[test]
fn cancelled_futures_and_dropped_handles_leave_nothing() {
    let rig = Rig::late();
    let copier = rig.copier();
    let bytes: Arc<[u8]> = pattern(2 << 20, 7).into();
    let memory = rig.device.alloc(2 << 20).unwrap();
    for round in 0..20 {
        let load = copier.upload(bytes.clone(), &memory).unwrap();
        match round % 4 {
            0 => drop(load),
            1 => {
                // Polled once, and dropped.
                let mut load = Box::pin(load);
                let _ = load.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            }
            2 => {
                load.cancel();
                match load.wait().map_err(|failed| failed.error) {
                    Ok(_) => {}
                    Err(Error::Cancelled { done, total, .. }) => assert!(done < total && total == 2 << 20),
                    Err(other) => panic!("{other}"),
                }
            }
            _ => {
                // By another thread than the one that waits.
                std::thread::scope(|scope| {
                    scope.spawn(|| load.cancel());
                    assert!(load.wait_landed(u64::MAX) || load.outcome().is_some());
                });
            }
        }
    }
    // Those whose handles were dropped go on, one after the other. Then nothing has a share of the source any more.
    until("all transfers are over", || Arc::strong_count(&bytes) == 1);
    rig.all_is_back();
    copier.upload_slice(&bytes, &memory).unwrap();
    assert!(downloaded(&copier, &memory)[..] == bytes[..]);
}

#[test]
fn a_sink_that_fails_or_panics_ends_its_transfer() {
    let rig = Rig::late();
    let (copier, bytes, memory) = with(&rig, 1 << 20, 9);
    copier.upload_slice(&bytes, &memory).unwrap();
    let took = Arc::new(Mutex::new(vec![0; 1 << 20]));
    let odd = |at: u64, panics: bool| {
        let took = took.clone();
        sink(move |offset, bytes: &[u8]| {
            if (offset..offset + bytes.len() as u64).contains(&at) {
                assert!(!panics, "on purpose");
                return Err(io::Error::other("no"));
            }
            took.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        })
    };
    for panics in [false, true] {
        let failed = copier.download(&memory, odd(300_000, panics)).unwrap().wait().map(drop).unwrap_err();
        assert!(failed.buffer.is_some() && matches!(failed.error, Error::Write { .. }), "{}", failed.error);
    }
    took.lock().unwrap()[..].fill(0);
    drop(
        copier
            .download(&memory, odd(u64::MAX, false))
            .unwrap()
            .wait()
            .map_err(|failed| failed.error)
            .unwrap(),
    );
    assert!(*took.lock().unwrap() == bytes);
    rig.all_is_back();
}

/// The payload that a source or sink panics with: dropping it panics as well.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("on purpose, when what it panicked with is dropped");
    }
}

#[test]
fn a_panic_that_cannot_be_dropped_ends_its_transfer_and_no_thread() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let bytes = pattern(1 << 20, 12);
    for _ in 0..3 {
        let bomber = source("a bomb", 1 << 20, |_, _: &mut Fill<'_>| std::panic::panic_any(Bomb));
        let up = copier.upload(bomber, &memory).unwrap();
        assert!(up.wait_timeout(HANG).expect("it is over").is_err());
        copier.upload_slice(&bytes, &memory).unwrap();
        let down = copier.download(&memory, sink(|_, _: &[u8]| std::panic::panic_any(Bomb))).unwrap();
        assert!(down.wait_timeout(HANG).expect("it is over").is_err());
        assert!(downloaded(&copier, &memory) == bytes);
    }
    rig.all_is_back();
}

#[test]
fn a_wait_on_a_thread_that_has_to_do_the_work_is_refused() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let memory = rig.device.alloc(20).unwrap();
    let (own, place) = (copier.clone(), memory.slice(10..).unwrap());
    let nested = source("nested", 10, move |_, into: &mut Fill<'_>| {
        own.upload_slice(&[1; 10], &place)?;
        into.push(&[0; 10]);
        Ok(())
    });
    let failed = copier.upload(nested, memory.slice(..10)).unwrap().wait().map(drop).unwrap_err();
    assert!(failed.error.to_string().contains("own thread"), "{}", failed.error);
    rig.all_is_back();
}

/// Parts of a chunk that were submitted before one was refused are in flight, and so is a copy that
/// is refused and runs all the same: until they are through the transfer is not over.
#[test]
fn a_chunk_that_is_refused_half_way_is_over_when_its_copies_are() {
    for (stalls, failure) in [
        (true, Failure::Argument),
        (true, Failure::RunsAnyway),
        (false, Failure::RunsAnyway),
        (false, Failure::RunsAnyway),
    ] {
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
        let pieces = [0, 1, 2].map(|n| {
            CopyRange::new(n * 1000, memory.slice(n as usize * 3000..).unwrap().slice(..1000).unwrap())
        });
        let load = copier.upload(bytes.clone(), pieces.to_vec()).unwrap();
        if stalls {
            let copies = || rig.node.trace().iter().filter(|call| **call == Call::Copy).count();
            until("the second is refused", || copies() >= 2);
            std::thread::sleep(Duration::from_millis(50));
            assert!(!load.is_over(), "a copy is in flight");
            rig.node.resume(0);
        }
        assert!(load.wait().is_err());
        copier.upload(new.clone(), memory.slice(..1000).unwrap()).unwrap().wait().unwrap();
        rig.all_is_back();
        let back = downloaded(&copier, memory.slice(..1000).unwrap());
        assert!(back == new, "{failure:?}: what came later is what stays");
        rig.all_is_back();
    }
}

#[test]
fn what_has_stopped_does_not_wait_for_the_rate() {
    let rig = Rig::plain();
    // The second chunk could go after 18 hours.
    let copier = rig.builder().threads(1).rate(1).build().unwrap();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let (go_on, source) = told(1 << 20, 1);
    let upload = copier.upload(source, &memory).unwrap();
    // It is being filled now, or never will be.
    std::thread::sleep(Duration::from_millis(100));
    upload.cancel();
    go_on.send(()).unwrap();
    let ended = upload.wait_timeout(HANG).expect("it ends").map(drop).unwrap_err();
    assert!(matches!(ended.error, Error::Cancelled { .. }), "{ended:?}");
    rig.all_is_back();
}

#[test]
fn a_call_that_fails_leaves_nothing_on_the_wire() {
    for panics in [false, true] {
        let rig = Rig::plain();
        let copier = rig.copier();
        let memory = rig.device.alloc(1 << 20).unwrap();
        rig.node.hang(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                rig.node.resume(0);
            });
            let mut left = (128 << 10) + 10;
            let mut breaks = reader(|into| {
                let n = into.len().min(left);
                left -= n;
                match n {
                    0 if panics => panic!("on purpose"),
                    0 => Err(io::Error::other("the line is dead")),
                    n => Ok(n),
                }
            });
            let call = || copier.upload_read(&mut breaks, &memory);
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)) {
                Ok(failed) => assert!(!panics && matches!(failed, Err(Error::Read { .. })), "{failed:?}"),
                Err(_) => assert!(panics),
            }
            assert_eq!(rig.pool.stats().in_flight_bytes, 0, "its memory may be used again");
        });
        rig.all_is_back();
    }
}

/// Whether it lands after it was cancelled or before.
#[test]
fn what_has_landed_for_nobody_waits_for_no_worker() {
    for late in [true, false] {
        let rig = Rig::plain();
        let copier = rig.builder().threads(1).build().unwrap();
        let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
        let (go_on, source) = told(1 << 20, 0);
        let upload = copier.upload(source, &memory[0]).unwrap();
        // The only worker is inside the call.
        std::thread::sleep(Duration::from_millis(50));
        let file = tempfile::tempfile().unwrap();
        if late {
            rig.node.hang(0);
        }
        let download = copier.download(&memory[1], FileSink::new(file, "a file")).unwrap();
        // Otherwise all that may land has landed.
        std::thread::sleep(Duration::from_millis(100));
        download.cancel();
        rig.node.resume(0);
        let ended = download.wait_timeout(HANG).expect("it ends").map(drop).unwrap_err();
        assert!(matches!(ended.error, Error::Cancelled { .. }), "{ended:?}");
        drop(go_on);
        upload.wait().unwrap();
        rig.all_is_back();
    }
}

//! What goes wrong: a clear error each, no wrong byte reported as right, and nothing left behind.

use std::borrow::Cow;
use std::fs::OpenOptions;
use std::future::Future as _;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::downloaded;
use pinpool::copier::{CopyRange, FileSink, FileSource, Fill, Reading, Sink, Source};
use pinpool::host::{Call, Failure, Fault, HostConfig};
use pinpool::{Copier, Error, ErrorClass};

use super::{Rig, block_on, pattern};

/// A source that fails, panics, is short or waits at a place.
struct Odd {
    bytes: Vec<u8>,
    at: u64,
    how: How,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Fails,
    Panics,
    Ends,
}

impl Source for Odd {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn name(&self) -> Cow<'_, str> {
        "odd".into()
    }
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        let end = offset + into.remaining() as u64;
        let good = if (offset..end).contains(&self.at) { self.at } else { end };
        into.push(&self.bytes[offset as usize..good as usize]);
        match self.how {
            _ if good == end => Ok(()),
            How::Fails => Err(io::Error::other("the disk is on fire")),
            How::Panics => panic!("on purpose"),
            How::Ends => Ok(()),
        }
    }
}

#[test]
fn a_source_that_fails_ends_its_transfer_with_the_place() {
    for rig in [Rig::plain(), Rig::late()] {
        let copier = rig.copier();
        let memory = rig.device.alloc(1 << 20).unwrap();
        for how in [How::Fails, How::Panics, How::Ends] {
            for at in [0, 1, 300_000, (1 << 20) - 1] {
                let odd = Odd { bytes: pattern(1 << 20, 1), at, how };
                let failed = copier.upload(odd, &memory).unwrap().wait().map(drop).unwrap_err();
                assert!(failed.buffer.is_some(), "the source comes back");
                match (how, failed.error) {
                    (How::Fails, Error::Read { what, offset, text, .. }) => {
                        assert!(what == "odd" && offset == at && text.contains("on fire"));
                    }
                    (How::Panics, Error::Read { offset, text, .. }) => {
                        assert!(offset == at && text.contains("panicked"), "{offset} {text}");
                    }
                    (How::Ends, Error::Read { offset, kind, text, .. }) => {
                        assert!(
                            offset == at && kind == io::ErrorKind::UnexpectedEof && text.contains("1048576")
                        );
                    }
                    (_, other) => panic!("{other}"),
                }
            }
        }
        // The copier works as before.
        let bytes = pattern(1 << 20, 2);
        copier.upload_slice(&bytes, &memory).unwrap();
        assert!(downloaded(&copier, &memory) == bytes);
        rig.all_is_back();
    }
}

#[test]
fn a_reader_or_writer_that_fails_or_panics_does_so_alone() {
    struct Torn(usize, bool);
    impl Read for Torn {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.0 == 0 {
                assert!(!self.1, "on purpose");
                return Err(io::Error::other("the line is dead"));
            }
            let n = into.len().min(self.0);
            self.0 -= n;
            Ok(n)
        }
    }
    impl Write for Torn {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0 < bytes.len() {
                assert!(!self.1, "on purpose");
                return Err(io::Error::other("the line is dead"));
            }
            self.0 -= bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let rig = Rig::late();
    let copier = rig.copier();
    let memory = rig.device.alloc(1 << 20).unwrap();
    for good in [0, 100_000, 500_000] {
        let failed = copier.upload_read(&mut Torn(good, false), &memory).unwrap_err();
        assert!(matches!(&failed, Error::Read { offset, .. } if *offset == good as u64), "{failed}");
        let failed = copier.download_write(&memory, &mut Torn(good, false)).unwrap_err();
        assert!(matches!(&failed, Error::Write { offset, .. } if *offset <= good as u64), "{failed}");
        let panicked = |work: &mut dyn FnMut()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_err();
        };
        panicked(&mut || drop(copier.upload_read(&mut Torn(good, true), &memory)));
        panicked(&mut || drop(copier.download_write(&memory, &mut Torn(good, true))));
        rig.all_is_back();
    }
    let bytes = pattern(1 << 20, 2);
    copier.upload_slice(&bytes, &memory).unwrap();
    assert!(downloaded(&copier, &memory) == bytes);
}

#[test]
fn a_file_that_becomes_shorter_is_an_error_with_its_end() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let len = 2 << 20;
    let bytes = pattern(len, 3);
    let memory = rig.device.alloc(len).unwrap();
    for reading in [Reading::Auto, Reading::Buffered, Reading::Direct] {
        for cut in [0, 4096, 1_000_000, len - 1] {
            let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            std::fs::write(file.path(), &bytes).unwrap();
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
fn a_file_cut_off_while_it_is_read_is_an_error_or_was_whole() {
    let rig = Rig::late();
    let copier = rig.copier();
    let len = 2 << 20;
    let bytes = pattern(len, 4);
    let memory = rig.device.alloc(len).unwrap();
    for round in 0..24 {
        let reading = [Reading::Auto, Reading::Buffered][round % 2];
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let source = FileSource::open(file.path()).unwrap().reading(reading);
        let load = copier.upload(source, &memory).unwrap();
        while load.progress().done < (round as u64 * 80_000) && !load.is_over() {
            std::thread::yield_now();
        }
        file.as_file().set_len(777_777).unwrap();
        let landed = |load: &pinpool::copier::Transfer<FileSource>| load.progress().landed_to;
        let _ = load.wait_landed(u64::MAX);
        let right = landed(&load).min(len as u64) as usize;
        match load.wait().map_err(|failed| failed.error) {
            Ok(_) => assert_eq!(right, len),
            Err(Error::Read { offset, kind: io::ErrorKind::UnexpectedEof, .. }) => {
                assert_eq!(offset, 777_777)
            }
            Err(other) => panic!("{other}"),
        }
        // What is said to have landed is what the file had.
        if right > 0 {
            assert!(downloaded(&copier, memory.slice(..right)) == bytes[..right], "{reading:?}");
        }
        rig.all_is_back();
    }
}

#[test]
fn a_full_disk_is_an_error_with_the_place() {
    let rig = Rig::late();
    let copier = rig.copier();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    let failed = copier.download(&memory, FileSink::new(full(), "/dev/full")).unwrap().wait().unwrap_err();
    assert!(failed.buffer.is_some());
    let text = failed.error.to_string();
    match failed.error {
        Error::Write { what, kind, .. } => {
            assert!(what == "/dev/full" && kind == io::ErrorKind::StorageFull && text.contains("make room"));
        }
        other => panic!("{other}"),
    }
    let failed = copier.download_write(&memory, &mut full()).unwrap_err();
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
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), [1; 4096]).unwrap();
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
fn a_device_error_half_way_ends_the_transfer_and_no_other() {
    for call in [Call::Copy, Call::Record, Call::CreateEvent, Call::Query] {
        for failure in [Failure::Argument, Failure::Transient, Failure::RunsAnyway] {
            for nth in [0, 5, 14, 15] {
                let rig = Rig::plain();
                let copier = rig.copier();
                let bytes = pattern(1 << 20, 5);
                let memory = rig.device.alloc(1 << 20).unwrap();
                rig.node.fail(Fault { device: 0, call, nth, failure });
                let first = copier.upload_slice(&bytes, &memory);
                if call == Call::Copy {
                    let error = first.unwrap_err();
                    let Error::Transfer { what, cause, .. } = &error else { panic!("{error}") };
                    assert!(what == "bytes in memory" && matches!(**cause, Error::Device(_)));
                } else {
                    // A failed event is made up for by a later one.
                    assert!(
                        first.is_ok() || matches!(first, Err(Error::Transfer { .. })),
                        "{call:?} {first:?}"
                    );
                }
                rig.node.clear_faults();
                copier.upload_slice(&bytes, &memory).unwrap();
                assert!(downloaded(&copier, &memory) == bytes);
                rig.all_is_back();
            }
        }
    }
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
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                let _ = load.as_mut().poll(&mut cx);
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
                let canceller = load.canceller();
                std::thread::scope(|scope| {
                    scope.spawn(|| canceller.cancel());
                    let _ = block_on(load);
                });
            }
        }
    }
    use std::future::Future;
    // Those whose handles were dropped go on, one after the other. Then nothing has a share of the source any more.
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while Arc::strong_count(&bytes) > 1 {
        assert!(std::time::Instant::now() < deadline, "a transfer is not over");
        std::thread::yield_now();
    }
    rig.all_is_back();
    copier.upload_slice(&bytes, &memory).unwrap();
    assert!(downloaded(&copier, &memory)[..] == bytes[..]);
}

#[test]
fn a_thousand_loads_aborted_at_random_points() {
    let rig = Rig::new(HostConfig::new().late(Duration::ZERO, 5), 8 << 20);
    // Some of the workers stay awake, whatever the machine; and little is in flight, so that there is something to
    // stop.
    let copier = rig.builder().depth(2).build().unwrap();
    let len = 768 << 10;
    let bytes = pattern(len, 8);
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let memory = rig.device.alloc(len).unwrap();
    let mut x = 12345_u64;
    let mut ended = [0; 2];
    for _ in 0..1000 {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let stop_at = (x >> 33) % (len as u64 * 5 / 4);
        let reading = if x & (1 << 20) == 0 { Reading::Auto } else { Reading::Buffered };
        let source = FileSource::open(file.path()).unwrap().reading(reading);
        let load = copier.upload(source, &memory).unwrap();
        while load.progress().done < stop_at && !load.is_over() {
            std::thread::yield_now();
        }
        load.cancel();
        match load.wait() {
            Ok(_) => ended[0] += 1,
            Err(failed) => {
                assert!(matches!(failed.error, Error::Cancelled { .. }), "{}", failed.error);
                assert!(failed.buffer.is_some(), "the file comes back");
                ended[1] += 1;
            }
        }
    }
    assert!(ended[0] > 50 && ended[1] > 50, "{ended:?}");
    rig.all_is_back();
    copier.upload_slice(&bytes, &memory).unwrap();
    assert!(downloaded(&copier, &memory) == bytes);
}

#[test]
fn a_sink_that_fails_or_panics_ends_its_transfer() {
    struct Odd(u64, bool, Mutex<Vec<u8>>);
    impl Sink for Odd {
        fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            if (offset..offset + bytes.len() as u64).contains(&self.0) {
                assert!(!self.1, "on purpose");
                return Err(io::Error::other("no"));
            }
            self.2.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
    }
    let rig = Rig::late();
    let copier = rig.copier();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let bytes = pattern(1 << 20, 9);
    copier.upload_slice(&bytes, &memory).unwrap();
    for panics in [false, true] {
        let sink = Odd(300_000, panics, Mutex::new(vec![0; 1 << 20]));
        let failed = copier.download(&memory, sink).unwrap().wait().map(drop).unwrap_err();
        assert!(failed.buffer.is_some() && matches!(failed.error, Error::Write { .. }), "{}", failed.error);
    }
    let sink = Odd(u64::MAX, false, Mutex::new(vec![0; 1 << 20]));
    let sink = copier.download(&memory, sink).unwrap().wait().map_err(|failed| failed.error).unwrap();
    assert!(sink.2.into_inner().unwrap() == bytes);
    rig.all_is_back();
}

/// The payload that a source or sink panics with: dropping it panics as well.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("on purpose, when what it panicked with is dropped");
    }
}

struct Bomber(u64);

impl Source for Bomber {
    fn len(&self) -> u64 {
        self.0
    }
    fn fill(&self, _: u64, _: &mut Fill<'_>) -> io::Result<()> {
        std::panic::panic_any(Bomb)
    }
}

impl Sink for Bomber {
    fn put(&self, _: u64, _: &[u8]) -> io::Result<()> {
        std::panic::panic_any(Bomb)
    }
}

#[test]
fn a_panic_that_cannot_be_dropped_ends_its_transfer_and_no_thread() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let bytes = pattern(1 << 20, 12);
    let long = Duration::from_secs(10);
    for _ in 0..3 {
        let up = copier.upload(Bomber(1 << 20), &memory).unwrap();
        assert!(up.wait_timeout(long).expect("it is over").is_err());
        copier.upload_slice(&bytes, &memory).unwrap();
        let down = copier.download(&memory, Bomber(0)).unwrap();
        assert!(down.wait_timeout(long).expect("it is over").is_err());
        assert!(downloaded(&copier, &memory) == bytes);
    }
    rig.all_is_back();
}

#[test]
fn many_threads_at_once_do_not_mix_anything_up() {
    let rig = &Rig::late();
    let copier = rig.builder().threads(4).build().unwrap();
    let stop = AtomicBool::new(false);
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..6_u64 {
            let (copier, stop, rounds) = (&copier, &stop, &rounds);
            scope.spawn(move || {
                let [memory, other] = [(); 2].map(|()| rig.device.alloc(400_000).unwrap());
                let mut round = 0;
                // Relaxed: a flag.
                while !stop.load(Ordering::Relaxed) {
                    round += 1;
                    let len = 1 + (thread * 77_777 + round * 131_313) as usize % 400_000;
                    let bytes = pattern(len, thread * 1000 + round);
                    copier.upload_slice(&bytes, memory.slice(..len)).unwrap();
                    assert!(downloaded(copier, memory.slice(..len)) == bytes);
                    if round % 7 == 0 {
                        drop(copier.upload(bytes, other.slice(..len)).unwrap());
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while rounds.load(Ordering::Relaxed) < 150 {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
    });
    rig.all_is_back();
}

#[test]
fn a_wait_on_a_thread_that_has_to_do_the_work_is_refused() {
    struct Nested(pinpool::copier::Copier, pinpool::DeviceSlice);
    impl Source for Nested {
        fn len(&self) -> u64 {
            10
        }
        fn fill(&self, _: u64, into: &mut Fill<'_>) -> io::Result<()> {
            self.0.upload_slice(&[1; 10], &self.1)?;
            into.push(&[0; 10]);
            Ok(())
        }
    }
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let memory = rig.device.alloc(20).unwrap();
    let nested = Nested(copier.clone(), memory.slice(10..).unwrap());
    let failed = copier.upload(nested, memory.slice(..10)).unwrap().wait().map(drop).unwrap_err();
    assert!(failed.error.to_string().contains("own thread"), "{}", failed.error);
    rig.all_is_back();
}

#[test]
fn a_waker_that_panics_does_so_alone() {
    struct Panics;
    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("on purpose");
        }
    }
    use std::future::Future;
    let waker = std::task::Waker::from(Arc::new(Panics));
    for rig in [Rig::plain(), Rig::late()] {
        let copier = rig.copier();
        let bytes = pattern(2 << 20, 11);
        let memory = rig.device.alloc(2 << 20).unwrap();
        let mut load = Box::pin(copier.upload(bytes.clone(), &memory).unwrap());
        let _ = load.as_mut().poll(&mut std::task::Context::from_waker(&waker));
        copier.upload_slice(&bytes, &memory).unwrap();
        // Transfers are not ordered, and the thread that wakes prints where it was.
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while !load.is_over() {
            assert!(std::time::Instant::now() < deadline, "a panic of a waker ends no transfer");
            std::thread::yield_now();
        }
        assert!(downloaded(&copier, &memory) == bytes);
        drop(load);
        rig.all_is_back();
    }
}

/// Parts of a chunk that were submitted before one was refused are in flight: until they are through the transfer is
/// not over.
#[test]
fn a_chunk_that_is_refused_half_way_is_over_when_its_copies_are() {
    for failure in [Failure::Argument, Failure::RunsAnyway] {
        let rig = Rig::plain();
        let copier = rig.builder().threads(1).depth(1).build().unwrap();
        let (bytes, new) = (pattern(3000, 1), pattern(1000, 2));
        let memory = rig.device.alloc(10_000).unwrap();
        rig.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::Stall });
        rig.node.fail(Fault { device: 0, call: Call::Copy, nth: 1, failure });
        // Neighbours in the source and not on the device: one chunk of several copies.
        let pieces = [0, 1, 2].map(|n| {
            CopyRange::new(n * 1000, memory.slice(n as usize * 3000..).unwrap().slice(..1000).unwrap())
        });
        let load = copier.upload(bytes.clone(), pieces.to_vec()).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!load.is_over(), "a copy is in flight");
        rig.node.resume(0);
        assert!(load.wait().is_err());
        copier.upload(new.clone(), memory.slice(..1000).unwrap()).unwrap().wait().unwrap();
        rig.all_is_back();
        let back = downloaded(&copier, memory.slice(..1000).unwrap());
        assert!(back == new, "{failure:?}: what came later is what stays");
        rig.all_is_back();
    }
}

#[test]
fn a_copy_that_is_refused_and_runs_anyway_is_waited_for() {
    let rig = Rig::plain();
    let copier = rig.builder().depth(1).build().unwrap();
    let (bytes, new) = (pattern(1000, 1), pattern(1000, 2));
    let memory = rig.device.alloc(1000).unwrap();
    for _ in 0..3 {
        rig.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::RunsAnyway });
        let load = copier.upload(bytes.clone(), &memory).unwrap();
        assert!(load.wait().is_err());
        copier.upload(new.clone(), &memory).unwrap().wait().unwrap();
        rig.all_is_back();
        assert!(downloaded(&copier, &memory) == new);
    }
    rig.all_is_back();
}

/// On the thread that sees copies complete no code may wait for a copy: the wait would be for its own thread.
#[test]
fn a_waker_of_a_stream_cannot_wait_for_a_transfer() {
    struct Sends {
        copier: Copier,
        memory: pinpool::DeviceSlice,
        told: Mutex<std::sync::mpsc::Sender<Result<(), Error>>>,
    }
    impl std::task::Wake for Sends {
        fn wake(self: Arc<Self>) {
            let sent = self.copier.upload_slice(&pattern(1 << 20, 1), &self.memory);
            self.told.lock().unwrap().send(sent).unwrap();
        }
    }
    let rig = Rig::late();
    let (told, hears) = std::sync::mpsc::channel();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let sends = Sends { copier: rig.copier(), memory: rig.device.alloc(1 << 20).unwrap(), told: told.into() };
    let waker = std::task::Waker::from(Arc::new(sends));
    let stream = rig.device.stream().unwrap();
    let mut buf = rig.pool.checkout(1 << 20).unwrap();
    buf.try_resize(1 << 20, 1).unwrap();
    let mut sent = stream.upload(buf, &memory).unwrap();
    let polled = std::pin::Pin::new(&mut sent).poll(&mut std::task::Context::from_waker(&waker));
    assert!(polled.is_pending());
    let said = hears.recv_timeout(Duration::from_secs(10)).expect("it does not wait for itself");
    assert!(matches!(said, Err(Error::Unsupported(_))), "{said:?}");
    drop(sent);
    drop(waker);
    rig.all_is_back();
}

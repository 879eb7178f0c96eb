//! Transfers that stop: what they leave in flight, with workers and in the memory of handles that outlive them.

use std::borrow::Cow;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use pinpool::Error;
use pinpool::copier::{FileSink, Fill, Source};

use super::{Rig, block_on, pattern};

/// Longer than anything takes.
const HANG: Duration = Duration::from_secs(10);

/// Breaks or panics behind the given number of bytes.
struct Breaks {
    left: usize,
    panics: bool,
}

impl Read for Breaks {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.left.min(into.len());
        self.left -= n;
        match n {
            0 if self.panics => panic!("on purpose"),
            0 => Err(io::Error::other("the line is dead")),
            n => Ok(n),
        }
    }
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
            let mut reader = Breaks { left: (128 << 10) + 10, panics };
            let call = || copier.upload_read(&mut reader, &memory);
            match catch_unwind(AssertUnwindSafe(call)) {
                Ok(failed) => assert!(!panics && matches!(failed, Err(Error::Read { .. })), "{failed:?}"),
                Err(_) => assert!(panics),
            }
            assert_eq!(rig.pool.stats().in_flight_bytes, 0, "its memory may be used again");
        });
        rig.all_is_back();
    }
}

#[test]
fn a_canceller_keeps_nothing() {
    let rig = Rig::plain();
    let copier = rig.copier();
    // Of 1 GiB.
    let memory = rig.device.alloc(700 << 20).unwrap();
    let upload = copier.upload(pattern(1 << 20, 1), &memory).unwrap();
    let canceller = upload.canceller();
    assert_eq!(canceller.progress().total, 1 << 20);
    block_on(upload).unwrap();
    drop((copier, memory));
    let progress = canceller.progress();
    assert!(progress.over && progress.done == 1 << 20 && progress.landed_to == 1 << 20, "{progress:?}");
    canceller.cancel();
    assert_eq!(canceller.progress(), progress);
    let deadline = std::time::Instant::now() + HANG;
    while rig.device.alloc(700 << 20).is_err() {
        assert!(std::time::Instant::now() < deadline, "the memory is kept");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the test before it gives what lies at `at` or behind.
struct Waits {
    bytes: Vec<u8>,
    at: u64,
    goes_on: Mutex<Receiver<()>>,
}

impl Source for Waits {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
    fn name(&self) -> Cow<'_, str> {
        "waits".into()
    }
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        if offset >= self.at {
            _ = self.goes_on.lock().unwrap().recv_timeout(2 * HANG);
        }
        into.push(&self.bytes[offset as usize..]);
        Ok(())
    }
}

#[test]
fn what_has_stopped_does_not_wait_for_the_rate() {
    let rig = Rig::plain();
    // The second chunk could go after 18 hours.
    let copier = rig.builder().threads(1).rate(1).build().unwrap();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let (go_on, goes_on) = channel();
    let source = Waits { bytes: pattern(1 << 20, 1), at: 1, goes_on: Mutex::new(goes_on) };
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
fn what_has_landed_for_nobody_waits_for_no_worker() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
    let (go_on, goes_on) = channel();
    let source = Waits { bytes: pattern(1 << 20, 1), at: 0, goes_on: Mutex::new(goes_on) };
    let upload = copier.upload(source, &memory[0]).unwrap();
    // The only worker is inside the call.
    std::thread::sleep(Duration::from_millis(50));
    let file = tempfile::tempfile().unwrap();
    rig.node.hang(0);
    let download = copier.download(&memory[1], FileSink::new(file, "a file")).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    download.cancel();
    rig.node.resume(0);
    let ended = download.wait_timeout(HANG).expect("it ends").map(drop).unwrap_err();
    assert!(matches!(ended.error, Error::Cancelled { .. }), "{ended:?}");
    drop(go_on);
    upload.wait().unwrap();
    rig.all_is_back();
}

#[test]
fn what_has_landed_before_it_was_cancelled_waits_for_no_worker_either() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
    let (go_on, goes_on) = channel();
    let source = Waits { bytes: pattern(1 << 20, 1), at: 0, goes_on: Mutex::new(goes_on) };
    let upload = copier.upload(source, &memory[0]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let file = tempfile::tempfile().unwrap();
    let download = copier.download(&memory[1], FileSink::new(file, "a file")).unwrap();
    // All that may land has landed.
    std::thread::sleep(Duration::from_millis(100));
    download.cancel();
    let ended = download.wait_timeout(HANG).expect("it ends").map(drop).unwrap_err();
    assert!(matches!(ended.error, Error::Cancelled { .. }), "{ended:?}");
    drop(go_on);
    upload.wait().unwrap();
    rig.all_is_back();
}

//! What two threads do to one timeline at the same time, with a driver that pauses in the middle of a call or panics in
//! one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use crate::locks::Mutex;

use crate::device::handle::Device;
use crate::device::hooked::Hooked;
use crate::device::host::{Call, Failure, Fault, HostConfig, HostNode};
use crate::error::Error;
use crate::pool::Pool;
use crate::region::Unpinned;
use crate::stream::timeline::EventState;

/// A stepped host device. The first call of one kind tells that it has begun, and waits until the test lets it go on.
struct Pause {
    node: HostNode,
    device: Device,
    began: Receiver<()>,
    go_on: SyncSender<()>,
    /// Calls of that kind.
    calls: Arc<AtomicU32>,
    /// Events that exist.
    events: Arc<AtomicI64>,
}

impl Pause {
    fn at(at: Call, name: &'static str) -> Self {
        let node = HostNode::new(HostConfig::new().stepped(3)).unwrap();
        let ((begun, began), (go_on, may)) = (sync_channel(1), sync_channel(1));
        let (calls, events) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicI64::new(0)));
        let (count, exist, may) = (calls.clone(), events.clone(), Mutex::new(may));
        let before = move |call| {
            match call {
                Call::CreateEvent => _ = exist.fetch_add(1, Ordering::SeqCst),
                Call::DestroyEvent => _ = exist.fetch_sub(1, Ordering::SeqCst),
                _ => {}
            }
            if call == at && count.fetch_add(1, Ordering::SeqCst) == 0 {
                begun.send(()).unwrap();
                may.lock().recv().unwrap();
            }
        };
        let device = Hooked::device(name, node.driver(0).unwrap(), before).unwrap();
        Self { node, device, began, go_on, calls, events }
    }
}

/// A host device that panics before one call of a kind, when that is armed: it stands for a mistake in this crate.
fn panics(node: &HostNode, at: Call, name: &'static str) -> (Device, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let is_armed = armed.clone();
    let before = move |call| {
        assert!(call != at || !is_armed.swap(false, Ordering::SeqCst), "a mistake, on purpose");
    };
    (Hooked::device(name, node.driver(0).unwrap(), before).unwrap(), armed)
}

/// The reaper panics in its look at one stream. What is in flight there is quarantined and the stream is lost; other
/// streams, and later work, go on.
#[test]
fn a_panic_of_the_reaper_costs_one_stream() {
    const LEN: usize = 4096;
    let node = HostNode::new(HostConfig::new()).unwrap();
    let (device, armed) = panics(&node, Call::Query, "panics");
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
    node.hang(0);
    let mut buf = pool.checkout(LEN).unwrap();
    buf.try_resize(LEN, 1).unwrap();
    drop(stream.upload(Arc::new(buf), &memory).unwrap());
    armed.store(true, Ordering::SeqCst);
    let since = Instant::now();
    while armed.load(Ordering::SeqCst) {
        assert!(since.elapsed() < Duration::from_secs(20), "the reaper has not asked");
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = loop {
        match stream.timeline().usable() {
            Ok(()) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Internal(_)), "{error}");
    let out = |pool: &Pool| {
        let stats = pool.stats();
        stats.in_flight_bytes + stats.checked_out_bytes + stats.quarantined_bytes
    };
    // The device may use it for good.
    let kept = out(&pool);
    assert!(kept >= LEN, "{:?}", pool.stats());
    node.resume(0);
    let other = device.stream().unwrap();
    let mut buf = pool.checkout(LEN).unwrap();
    buf.try_resize(LEN, 2).unwrap();
    let back = other.upload(buf, &memory).unwrap().wait().unwrap();
    assert!(back.iter().all(|byte| *byte == 2));
    drop(other.upload(back, &memory).unwrap());
    let since = Instant::now();
    while out(&pool) > kept {
        assert!(since.elapsed() < Duration::from_secs(20), "the reaper has ended: {:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.check().unwrap();
}

/// The submission of a chunk panics before any copy is made. No push of it reads as done, and the copier goes on.
#[test]
fn a_panic_in_a_submission_fails_its_pushes() {
    const LEN: usize = 256;
    let node = HostNode::new(HostConfig::new()).unwrap();
    let (device, at_copy) = panics(&node, Call::Copy, "panics in submissions");
    let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let copier = crate::Copier::builder(&pool, &device).threads(1).build().unwrap();
    let memory = device.alloc(LEN).unwrap();
    let push = || copier.push(&[7; LEN], &memory).unwrap().wait();
    push().unwrap();
    for _ in 0..4 {
        at_copy.store(true, Ordering::SeqCst);
        assert!(push().is_err());
        assert!(!at_copy.load(Ordering::SeqCst), "nothing was submitted");
        push().unwrap();
    }
    drop(copier);
    let since = Instant::now();
    let in_use = || {
        let stats = pool.stats();
        stats.in_flight_bytes + stats.checked_out_bytes
    };
    while in_use() > 0 {
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.check().unwrap();
}

#[test]
fn a_mark_that_is_being_recorded_keeps_the_timeline_listed() {
    let Pause { node, device, began, go_on, events, .. } = Pause::at(Call::Record, "held up");
    let stream = device.stream().unwrap();
    drop(stream.hold(()).unwrap());
    let timeline = stream.timeline().clone();
    let recording = std::thread::spawn(move || timeline.close());
    began.recv().unwrap();
    // Meanwhile the event of another entry covers the first one too, and completes.
    drop(stream.hold(()).unwrap());
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
    // Now only the recording thread and the device's list hold the stream.
    drop(stream);
    device.reap();
    go_on.send(()).unwrap();
    recording.join().unwrap();
    while node.step() {}
    for _ in 0..4 {
        device.reap();
    }
    drop(device);
    assert_eq!(events.load(Ordering::SeqCst), 0, "an event is neither in use nor destroyed");
}

/// The stream is lost, though not its device, while a thread asks about its event. The event counts as leaked, and so it
/// is not recorded again, although the answer says that it is complete.
#[test]
fn an_event_that_is_asked_about_while_its_stream_is_lost_is_leaked_once() {
    let Pause { node, device, began, go_on, events, .. } = Pause::at(Call::Query, "asked");
    let stream = device.stream().unwrap();
    drop(stream.hold(()).unwrap());
    stream.timeline().close();
    while node.step() {}
    let timeline = stream.timeline().clone();
    let asking = std::thread::spawn(move || timeline.ask());
    began.recv().unwrap();
    stream.timeline().lose(&Error::Internal("a mistake, on purpose"));
    go_on.send(()).unwrap();
    asking.join().unwrap();
    // Another stream records an event, a fresh one.
    let other = device.stream().unwrap();
    drop(other.hold(()).unwrap());
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
    assert_eq!(events.load(Ordering::SeqCst), 2, "a leaked event was recorded again");
    let holds = device.context().holds().clone();
    drop((stream, other, device));
    assert_eq!((holds.leaks(), events.load(Ordering::SeqCst)), (1, 1), "leaked, and not destroyed");
}

/// While an event is being recorded, it is due, and no other is recorded in its place. It fails when the driver has
/// refused it.
#[test]
fn an_event_that_is_being_recorded_is_due() {
    let Pause { node, device, began, go_on, calls, .. } = Pause::at(Call::Record, "recorded slowly");
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let stream = device.stream().unwrap();
    let states = || {
        let mut states = Vec::new();
        stream.timeline().for_each_kept(|_, _, event| states.push(event));
        states
    };
    drop(stream.hold(pool.checkout(100).unwrap()).unwrap());
    let timeline = stream.timeline().clone();
    let recording = std::thread::spawn(move || timeline.close());
    began.recv().unwrap();
    assert_eq!(states(), [EventState::Due]);
    device.reap();
    assert_eq!(calls.load(Ordering::SeqCst), 1, "recorded twice");
    node.fail(Fault { device: 0, call: Call::Record, nth: 0, failure: Failure::Transient });
    go_on.send(()).unwrap();
    recording.join().unwrap();
    assert_eq!(states(), [EventState::Failing]);
    // A later event covers it.
    stream.timeline().close();
    assert_eq!(states(), [EventState::Recorded]);
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
    assert_eq!(states(), []);
}

/// A copy counts as complete though its segment was claimed meanwhile: by a buffer that is not used, and by one that is
/// used for the next copy.
#[test]
fn a_copy_whose_segment_was_claimed_counts_as_complete() {
    const LEN: usize = 300_000;
    let node = HostNode::new(HostConfig::new().stepped(3)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    // Room for one segment.
    let pool = Pool::builder(&device).capacity(512 << 10).unpinned(Unpinned::Allow).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
    let filled = || {
        let mut buf = pool.checkout(LEN).unwrap();
        buf.try_resize(LEN, 1).unwrap();
        buf
    };
    let claimed = || {
        let buf = pool.checkout_on(&stream, LEN).unwrap();
        assert!(buf.was_claimed(), "not a segment in flight");
        buf
    };
    let complete = || {
        for _ in 0..4 {
            device.reap();
            while node.step() {}
        }
        let look = stream.timeline().look();
        (look.submitted, look.completed, look.entries)
    };
    drop(stream.upload(filled(), &memory).unwrap());
    let unused = claimed();
    assert_eq!(complete(), (1, 1, 0));
    drop(unused);
    // One that keeps device memory, and one that does not.
    drop(stream.upload(filled(), &memory).unwrap());
    drop(stream.download(&memory, claimed()).unwrap());
    assert_eq!(complete(), (3, 3, 0));
    drop(stream.hold(filled()).unwrap());
    drop(stream.download(&memory, claimed()).unwrap());
    assert_eq!(complete(), (5, 5, 0));
}

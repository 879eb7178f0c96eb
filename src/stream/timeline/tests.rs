//! What two threads do to one timeline at the same time, with a driver that pauses in the middle of a call or panics in
//! one.

#![allow(unsafe_code, reason = "a driver around another one")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use crate::locks::Mutex;

use crate::device::handle::Device;
use crate::device::host::{Call, Failure, Fault, HostConfig, HostNode};
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, Stepped, StreamHandle, Transfer};
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::region::Unpinned;
use crate::stream::timeline::EventState;

/// A stepped host device. The first recording, or the first question about an event, tells that it has begun, and waits
/// until the test lets it go on.
#[derive(Debug)]
struct Paused {
    inner: Arc<dyn Driver>,
    /// The calls that pause.
    at: Call,
    calls: Arc<AtomicU32>,
    begun: SyncSender<()>,
    go_on: Mutex<Receiver<()>>,
    /// Events that exist.
    events: Arc<AtomicI64>,
}

/// The test's side of a [`Paused`] device.
struct Pause {
    node: HostNode,
    device: Device,
    began: Receiver<()>,
    go_on: SyncSender<()>,
    calls: Arc<AtomicU32>,
    events: Arc<AtomicI64>,
}

impl Pause {
    fn at(at: Call, name: &str) -> Self {
        let node = HostNode::new(HostConfig::new().stepped(3)).unwrap();
        let ((begun, began), (go_on, may)) = (sync_channel(1), sync_channel(1));
        let (calls, events) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicI64::new(0)));
        let driver = Paused {
            inner: node.driver(0).unwrap(),
            at,
            calls: calls.clone(),
            begun,
            go_on: Mutex::new(may),
            events: events.clone(),
        };
        let device = Device::known(name.into(), Arc::new(driver)).unwrap();
        Self { node, device, began, go_on, calls, events }
    }
}

macro_rules! delegate {
    ($( fn $name:ident($($arg:ident : $ty:ty),*) -> $ret:ty; )* unsafe: $( fn $uname:ident($($uarg:ident : $uty:ty),*) -> $uret:ty; )*) => {
        $( fn $name(&self, $($arg: $ty),*) -> $ret { self.inner.$name($($arg),*) } )*
        // SAFETY: the caller's word.
        $( unsafe fn $uname(&self, $($uarg: $uty),*) -> $uret { unsafe { self.inner.$uname($($uarg),*) } } )*
    };
}

/// A host device's driver that panics at one question about an event, or in one batch of copies: it stands for a
/// mistake in this crate.
#[derive(Debug)]
struct Panics {
    inner: Arc<dyn Driver>,
    armed: Arc<AtomicBool>,
    /// The panic comes before the copies are made.
    at_batch: Arc<AtomicBool>,
}

impl Driver for Panics {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn family(&self) -> &'static str {
        self.inner.family()
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn leave(&self, last: crate::device::holds::Last) {
        self.inner.leave(last);
    }

    fn query(&self, event: EventHandle) -> Result<bool> {
        assert!(!self.armed.swap(false, Ordering::SeqCst), "a mistake, on purpose");
        self.inner.query(event)
    }

    unsafe fn copy_many(&self, on: StreamHandle, copies: &[Transfer], failed: &mut dyn FnMut(usize, Error)) {
        assert!(!self.at_batch.swap(false, Ordering::SeqCst), "a mistake in a batch, on purpose");
        // SAFETY: the caller's word.
        unsafe { self.inner.copy_many(on, copies, failed) }
    }

    delegate! {
        fn can_use(kind: HostKind) -> Result<()>;
        fn allocate_host(len: usize, kind: HostKind) -> Result<NonNull<u8>>;
        fn device_address(at: NonNull<u8>) -> Result<u64>;
        fn allocate(len: usize) -> Result<DevicePtr>;
        fn free(ptr: DevicePtr) -> Result<()>;
        fn create_stream() -> Result<StreamHandle>;
        fn destroy_stream(stream: StreamHandle) -> Result<()>;
        fn create_event() -> Result<EventHandle>;
        fn destroy_event(event: EventHandle) -> Result<()>;
        fn record(event: EventHandle, stream: StreamHandle) -> Result<()>;
        fn wait_event(stream: StreamHandle, event: EventHandle) -> Result<()>;
        unsafe:
        fn pin(base: NonNull<u8>, len: usize) -> Result<()>;
        fn unpin(base: NonNull<u8>, len: usize) -> Result<()>;
        fn register(base: NonNull<u8>, len: usize, read_only: bool) -> Result<()>;
        fn unregister(base: NonNull<u8>, len: usize) -> Result<()>;
        fn free_host(base: NonNull<u8>, len: usize, kind: HostKind) -> Result<()>;
        fn copy(stream: StreamHandle, transfer: Transfer) -> Result<()>;
        fn copy_blocking(stream: StreamHandle, transfer: Transfer) -> Result<()>;
    }
}

/// The reaper panics in its look at one stream. What is in flight there is quarantined and the stream is lost; other
/// streams, and later work, go on.
#[test]
fn a_panic_of_the_reaper_costs_one_stream() {
    const LEN: usize = 4096;
    let node = HostNode::new(HostConfig::new()).unwrap();
    let armed = Arc::new(AtomicBool::new(false));
    let (inner, at_batch) = (node.driver(0).unwrap(), Arc::default());
    let driver = Panics { inner, armed: armed.clone(), at_batch };
    let device = Device::known("panics".into(), Arc::new(driver)).unwrap();
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

/// The submission of a batch panics before any copy is made. No copy of it reads as done, and the queue goes on.
#[test]
fn a_panic_in_a_batch_fails_its_copies() {
    const LEN: usize = 256;
    let node = HostNode::new(HostConfig::new()).unwrap();
    let at_batch = Arc::new(AtomicBool::new(false));
    let (inner, armed) = (node.driver(0).unwrap(), Arc::default());
    let driver = Panics { inner, armed, at_batch: at_batch.clone() };
    let device = Device::known("panics in batches".into(), Arc::new(driver)).unwrap();
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let (queue, memory) = (device.copy_queue().unwrap(), device.alloc(LEN).unwrap());
    let download = || queue.download(&memory, pool.checkout(LEN).unwrap()).map_err(|e| e.error);
    download().unwrap().wait().unwrap();
    for _ in 0..20 {
        at_batch.store(true, Ordering::SeqCst);
        // Either the queue's thread submits, or the push itself does, which then panics.
        let pushed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(download));
        if let Ok(flight) = pushed {
            let error = flight.unwrap().wait().unwrap_err();
            assert!(matches!(error, Error::Internal(_)), "{error}");
        }
        assert!(!at_batch.load(Ordering::SeqCst), "no batch was submitted");
        download().unwrap().wait().unwrap();
    }
    let since = Instant::now();
    while pool.stats().in_flight_bytes + pool.stats().checked_out_bytes > 0 {
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.check().unwrap();
}

impl Paused {
    fn pause(&self, at: Call) {
        if self.at == at && self.calls.fetch_add(1, Ordering::SeqCst) == 0 {
            self.begun.send(()).unwrap();
            self.go_on.lock().recv().unwrap();
        }
    }
}

impl Driver for Paused {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn family(&self) -> &'static str {
        self.inner.family()
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn leave(&self, last: crate::device::holds::Last) {
        self.inner.leave(last);
    }

    fn stepped(&self) -> Option<&dyn Stepped> {
        self.inner.stepped()
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.events.fetch_add(1, Ordering::SeqCst);
        self.inner.create_event()
    }

    fn destroy_event(&self, event: EventHandle) -> Result<()> {
        self.events.fetch_sub(1, Ordering::SeqCst);
        self.inner.destroy_event(event)
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.pause(Call::Record);
        self.inner.record(event, stream)
    }

    fn query(&self, event: EventHandle) -> Result<bool> {
        self.pause(Call::Query);
        self.inner.query(event)
    }

    delegate! {
        fn can_use(kind: HostKind) -> Result<()>;
        fn allocate_host(len: usize, kind: HostKind) -> Result<NonNull<u8>>;
        fn device_address(at: NonNull<u8>) -> Result<u64>;
        fn allocate(len: usize) -> Result<DevicePtr>;
        fn free(ptr: DevicePtr) -> Result<()>;
        fn create_stream() -> Result<StreamHandle>;
        fn destroy_stream(stream: StreamHandle) -> Result<()>;
        fn wait_event(stream: StreamHandle, event: EventHandle) -> Result<()>;
        unsafe:
        fn pin(base: NonNull<u8>, len: usize) -> Result<()>;
        fn unpin(base: NonNull<u8>, len: usize) -> Result<()>;
        fn register(base: NonNull<u8>, len: usize, read_only: bool) -> Result<()>;
        fn unregister(base: NonNull<u8>, len: usize) -> Result<()>;
        fn free_host(base: NonNull<u8>, len: usize, kind: HostKind) -> Result<()>;
        fn copy(stream: StreamHandle, transfer: Transfer) -> Result<()>;
        fn copy_blocking(stream: StreamHandle, transfer: Transfer) -> Result<()>;
    }
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

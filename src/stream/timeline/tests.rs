//! What two threads do to one timeline at the same time, with a driver that can be held up in the middle of a call.

#![allow(unsafe_code, reason = "a driver around another one")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::locks::Mutex;

use crate::device::host::{HostConfig, HostNode};
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, Stepped, StreamHandle, Transfer};
use crate::error::Result;
use crate::runtime::Device;

/// A stepped host device, the first recording of which says when it has begun and waits until it may go on.
#[derive(Debug)]
struct Held {
    inner: Arc<dyn Driver>,
    records: AtomicU32,
    begun: SyncSender<()>,
    go_on: Mutex<Receiver<()>>,
    /// Events there are.
    events: Arc<AtomicI64>,
}

macro_rules! delegate {
    ($( fn $name:ident($($arg:ident : $ty:ty),*) -> $ret:ty; )* unsafe: $( fn $uname:ident($($uarg:ident : $uty:ty),*) -> $uret:ty; )*) => {
        $( fn $name(&self, $($arg: $ty),*) -> $ret { self.inner.$name($($arg),*) } )*
        // SAFETY: the caller's word.
        $( unsafe fn $uname(&self, $($uarg: $uty),*) -> $uret { unsafe { self.inner.$uname($($uarg),*) } } )*
    };
}

impl Driver for Held {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn family(&self) -> &'static str {
        self.inner.family()
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
        if self.records.fetch_add(1, Ordering::SeqCst) == 0 {
            self.begun.send(()).unwrap();
            self.go_on.lock().recv().unwrap();
        }
        self.inner.record(event, stream)
    }

    delegate! {
        fn can_use(kind: HostKind) -> Result<()>;
        fn allocate_host(len: usize, kind: HostKind) -> Result<NonNull<u8>>;
        fn device_address(at: NonNull<u8>) -> Result<u64>;
        fn allocate(len: usize) -> Result<DevicePtr>;
        fn free(ptr: DevicePtr) -> Result<()>;
        fn create_stream() -> Result<StreamHandle>;
        fn destroy_stream(stream: StreamHandle) -> Result<()>;
        fn query(event: EventHandle) -> Result<bool>;
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
    let node = HostNode::new(HostConfig::new().stepped(3)).unwrap();
    let ((begun, began), (go_on, may)) = (sync_channel(1), sync_channel(1));
    let events = Arc::new(AtomicI64::new(0));
    let inner = node.driver(0).unwrap();
    let held = Held { inner, records: 0.into(), begun, go_on: Mutex::new(may), events: events.clone() };
    let device = Device::known("held up".into(), Arc::new(held)).unwrap();
    let stream = device.stream().unwrap();
    drop(stream.hold(()).unwrap());
    let timeline = stream.timeline().clone();
    let recording = std::thread::spawn(move || timeline.close());
    began.recv().unwrap();
    // Meanwhile another mark, made because that one is due, covers the same, and lands.
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
    // Nobody but the one who records knows the stream any more, and the device's list.
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

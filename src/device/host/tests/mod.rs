//! The host device against the contract's rules, and against the promises of its own page. This file has the rig that
//! all tests use, and what is checked before an operation runs; the files are by subject.

mod failing;
mod hostmem;
mod memory;
mod stepped;
mod threads;

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer};
use crate::error::ErrorClass;
use crate::foreign::Owned;

/// Host memory that copies use while the test still has it. The tests read and write it only while no copy does.
struct Host(Box<[UnsafeCell<u8>]>);

// SAFETY: the tests access the bytes only while no copy does.
unsafe impl Sync for Host {}
// SAFETY: plain bytes.
unsafe impl Send for Host {}

impl Host {
    fn new(len: usize, value: u8) -> Self {
        Self((0..len).map(|_| UnsafeCell::new(value)).collect())
    }

    fn of(bytes: &[u8]) -> Self {
        Self(bytes.iter().map(|&byte| UnsafeCell::new(byte)).collect())
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn ptr(&self) -> *mut u8 {
        UnsafeCell::raw_get(self.0.as_ptr())
    }

    fn set(&self, value: u8) {
        // SAFETY: the box has `len` bytes, and no copy uses them now.
        unsafe { self.ptr().write_bytes(value, self.len()) }
    }

    fn get(&self) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len()) }.to_vec()
    }

    fn all(&self, value: u8) -> bool {
        self.get() == vec![value; self.len()]
    }
}

/// One device of a node, with shorter calls.
struct Rig {
    node: HostNode,
    driver: Arc<dyn Driver>,
}

impl Rig {
    fn new(config: HostConfig) -> Self {
        let node = HostNode::new(config).unwrap();
        let driver = node.driver(0).unwrap();
        Self { node, driver }
    }

    fn stepped() -> Self {
        Self::new(HostConfig::new().memory(64 << 20).stepped(1))
    }

    fn threaded() -> Self {
        Self::new(HostConfig::new().memory(64 << 20))
    }

    fn stream(&self) -> StreamHandle {
        self.driver.create_stream().unwrap()
    }

    fn event(&self) -> EventHandle {
        self.driver.create_event().unwrap()
    }

    fn memory(&self, len: usize) -> DevicePtr {
        self.driver.allocate(len).unwrap()
    }

    fn try_upload(&self, stream: StreamHandle, from: &Host, to: DevicePtr) -> Result<()> {
        // SAFETY: the tests keep the memory until the copy has ended or is dropped.
        unsafe { self.driver.copy(stream, Transfer::Upload { src: from.ptr(), dst: to, len: from.len() }) }
    }

    fn try_download(&self, stream: StreamHandle, from: DevicePtr, to: &Host) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver.copy(stream, Transfer::Download { src: from, dst: to.ptr(), len: to.len() }) }
    }

    fn upload(&self, stream: StreamHandle, from: &Host, to: DevicePtr) {
        self.try_upload(stream, from, to).unwrap();
    }

    fn download(&self, stream: StreamHandle, from: DevicePtr, to: &Host) {
        self.try_download(stream, from, to).unwrap();
    }

    fn on_device(&self, stream: StreamHandle, src: DevicePtr, dst: DevicePtr, len: usize) {
        // SAFETY: no host memory is used.
        unsafe { self.driver.copy(stream, Transfer::OnDevice { src, dst, len }).unwrap() }
    }

    fn upload_blocking(&self, stream: StreamHandle, from: &Host, to: DevicePtr) -> Result<()> {
        // SAFETY: `from` lives until the call returns.
        unsafe {
            self.driver.copy_blocking(stream, Transfer::Upload { src: from.ptr(), dst: to, len: from.len() })
        }
    }

    fn download_blocking(&self, stream: StreamHandle, from: DevicePtr, to: &Host) -> Result<()> {
        // SAFETY: `to` lives until the call returns.
        unsafe {
            self.driver.copy_blocking(stream, Transfer::Download { src: from, dst: to.ptr(), len: to.len() })
        }
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) {
        self.driver.record(event, stream).unwrap();
    }

    fn query(&self, event: EventHandle) -> bool {
        self.driver.query(event).unwrap()
    }

    /// Steps until nothing can run.
    fn drain(&self) {
        while self.node.step() {}
    }

    /// Waits until the event is complete.
    fn wait(&self, event: EventHandle) {
        eventually(|| self.query(event));
    }

    /// Gives back what the test made, and checks that nothing is left.
    fn close(&self, streams: &[StreamHandle], events: &[EventHandle], memory: &[DevicePtr]) {
        for &stream in streams {
            self.driver.destroy_stream(stream).unwrap();
        }
        for &event in events {
            self.driver.destroy_event(event).unwrap();
        }
        for &ptr in memory {
            self.driver.free(ptr).unwrap();
        }
        assert_eq!(self.node.live(0), HostUsage::default());
    }
}

/// Waits for something that other threads do.
fn eventually(mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !happened() {
        assert!(Instant::now() < end, "it did not happen");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn class<T: std::fmt::Debug>(result: Result<T>) -> ErrorClass {
    result.unwrap_err().class()
}

fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn configurations_are_checked() {
    assert!(HostNode::new(HostConfig::new().devices(0)).is_err());
    assert!(HostNode::new(HostConfig::new().devices(MAX_DEVICES + 1)).is_err());
    assert!(HostNode::new(HostConfig::new().memory(0)).is_err());
    assert!(HostNode::new(HostConfig::new().stepped(1).late(Duration::ZERO, 1)).is_err());
    assert!(HostConfig::default().capacity() >= LEAST_MEMORY);
}

#[test]
fn devices_are_found_by_number() {
    let node = HostNode::new(HostConfig::new().devices(3)).unwrap();
    assert_eq!(node.devices(), 3);
    assert_eq!(node.driver(2).unwrap().name(), "host:2");
    assert_eq!(node.driver(2).unwrap().family(), "host");
    let error = node.driver(3).unwrap_err().to_string();
    assert!(error.contains("host:3") && error.contains("host:2"), "{error}");
    assert_eq!(format!("{node:?}"), r#"HostNode(["host:0", "host:1", "host:2"])"#);
    assert_eq!(HostNode::system().devices(), 1);
    assert!(HostNode::system().driver(0).unwrap().stepped().is_none());
}

#[test]
fn a_device_that_does_not_exist_is_nothing() {
    let node = HostNode::new(HostConfig::new().stepped(1)).unwrap();
    node.kill(9);
    node.hang(9);
    node.resume(9);
    assert!(!node.hang_stream(9, 0) && !node.resume_stream(9, 0) && !node.hang_stream(0, 0));
    assert!(!node.step() && !node.step_stream(9, 0) && !node.step_stream(0, 0));
    assert_eq!((node.queued(9), node.runnable(9), node.live(9)), (0, 0, HostUsage::default()));
}

#[test]
fn handles_that_name_nothing_are_refused() {
    let node = HostNode::new(HostConfig::new().devices(2).stepped(1)).unwrap();
    let rig = Rig { driver: node.driver(0).unwrap(), node: node.clone() };
    let other = Rig { driver: node.driver(1).unwrap(), node };
    let (stream, event, memory, host) = (rig.stream(), rig.event(), rig.memory(8), Host::new(8, 1));
    // Streams and events that were destroyed, that never existed, and that belong to another device.
    let (destroyed_stream, destroyed_event) = (rig.stream(), rig.event());
    rig.driver.destroy_stream(destroyed_stream).unwrap();
    rig.driver.destroy_event(destroyed_event).unwrap();
    for stream in [destroyed_stream, StreamHandle(0), StreamHandle(u64::MAX), other.stream()] {
        assert_eq!(class(rig.try_upload(stream, &host, memory)), ErrorClass::Argument);
        assert_eq!(class(rig.upload_blocking(stream, &host, memory)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.record(event, stream)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.wait_event(stream, event)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.destroy_stream(stream)), ErrorClass::Argument);
    }
    for event in [destroyed_event, EventHandle(0), EventHandle(u64::MAX), other.event()] {
        assert_eq!(class(rig.driver.record(event, stream)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.query(event)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.wait_event(stream, event)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.destroy_event(event)), ErrorClass::Argument);
    }
    assert_eq!(rig.node.queued(0), 0);
    assert!(rig.query(event), "a recording that was refused is none");
    rig.close(&[stream], &[event], &[memory]);
}

#[test]
fn ranges_are_checked_when_submitted() {
    let node = HostNode::new(HostConfig::new().devices(2).memory(1 << 20).stepped(1)).unwrap();
    let rig = Rig { driver: node.driver(0).unwrap(), node: node.clone() };
    let foreign = node.driver(1).unwrap().allocate(64).unwrap();
    let (stream, memory, host) = (rig.stream(), rig.memory(64), Host::new(64, 0));
    let past = rig.try_upload(stream, &host, DevicePtr(memory.0 + 1));
    assert!(text(past).contains("1 bytes past the end"));
    assert!(text(rig.try_download(stream, foreign, &host)).contains("belongs to host:1"));
    let outside = rig.try_upload(stream, &host, DevicePtr(memory.0 + 64));
    assert!(text(outside).contains("outside of any allocation"));
    // SAFETY: refused, so no memory is touched.
    unsafe {
        let upload =
            |src: *const u8, len| rig.driver.copy(stream, Transfer::Upload { src, dst: memory, len });
        assert_eq!(class(upload(std::ptr::null(), 1)), ErrorClass::Argument);
        assert_eq!(class(upload(host.ptr(), usize::MAX)), ErrorClass::Argument);
        let on_device = |src, dst| rig.driver.copy(stream, Transfer::OnDevice { src, dst, len: 64 });
        assert_eq!(class(on_device(memory, foreign)), ErrorClass::Argument);
        assert_eq!(class(on_device(DevicePtr(0), memory)), ErrorClass::Argument);
        upload(std::ptr::null(), 0).unwrap();
    }
    rig.drain();
    rig.close(&[stream], &[], &[memory]);
}

#[test]
fn memory_runs_out_and_comes_back() {
    let rig = Rig::new(HostConfig::new().memory(1000).stepped(1));
    assert_eq!(class(rig.driver.allocate(0)), ErrorClass::Argument);
    assert_eq!(class(rig.driver.allocate(1001)), ErrorClass::Transient);
    assert_eq!(class(rig.driver.allocate(usize::MAX)), ErrorClass::Transient);
    let a = rig.memory(600);
    let refused = text(rig.driver.allocate(401));
    assert!(refused.contains("401 bytes wanted, 400 bytes of 1000 bytes left"), "{refused}");
    let b = rig.memory(400);
    assert_eq!((rig.node.live(0).allocations, rig.node.live(0).allocated_bytes), (2, 1000));
    assert!(a.0 % 256 == 0 && b.0 % 256 == 0);
    assert_eq!(class(rig.driver.free(DevicePtr(a.0 + 1))), ErrorClass::Argument);
    rig.driver.free(a).unwrap();
    assert_eq!(class(rig.driver.free(a)), ErrorClass::Argument);
    let c = rig.memory(600);
    rig.close(&[], &[], &[b, c]);
}

#[test]
fn memory_that_the_system_does_not_have_is_refused() {
    let rig = Rig::new(HostConfig::new().memory(usize::MAX).stepped(1));
    assert_eq!(class(rig.driver.allocate(usize::MAX / 4)), ErrorClass::Transient);
    assert_eq!(class(rig.driver.allocate(usize::MAX)), ErrorClass::Transient);
    rig.close(&[], &[], &[]);
}

#[test]
fn pinning_is_accounted_and_does_not_overlap() {
    let node = HostNode::new(HostConfig::new().devices(2).stepped(1)).unwrap();
    let rig = Rig { driver: node.driver(0).unwrap(), node: node.clone() };
    let other = node.driver(1).unwrap();
    let page = crate::os::page_size();
    let base = crate::os::map(4 * page, 1).unwrap();
    // SAFETY: mapped until the end of the test, and used by no copy but the one below.
    unsafe {
        let second = base.add(page);
        assert_eq!(class(rig.driver.pin(base.add(1), page)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.pin(base, page + 1)), ErrorClass::Argument);
        assert_eq!(class(rig.driver.pin(base, 0)), ErrorClass::Argument);
        rig.driver.pin(second, 2 * page).unwrap();
        assert_eq!(node.live(0).pinned_bytes, 2 * page);
        assert_eq!(node.live(1).pinned_bytes, 0);
        for (start, pages) in [(0, 2), (0, 4), (1, 1), (1, 2), (2, 1), (2, 2)] {
            assert_eq!(class(other.pin(base.add(start * page), pages * page)), ErrorClass::Argument);
        }
        other.pin(base.add(3 * page), page).unwrap();
        other.pin(base, page).unwrap();
        // Only the whole range is unpinned, and only by the device that pinned it.
        assert_eq!(class(rig.driver.unpin(second, page)), ErrorClass::Argument);
        assert_eq!(class(other.unpin(second, 2 * page)), ErrorClass::Argument);

        let (stream, memory) = (rig.stream(), rig.memory(8));
        rig.driver.copy(stream, Transfer::Download { src: memory, dst: second.as_ptr(), len: 8 }).unwrap();
        assert_eq!(class(rig.driver.unpin(second, 2 * page)), ErrorClass::Argument, "a copy uses it");
        rig.drain();
        rig.driver.unpin(second, 2 * page).unwrap();
        assert_eq!(class(rig.driver.unpin(second, 2 * page)), ErrorClass::Argument);
        other.unpin(base, page).unwrap();
        other.unpin(base.add(3 * page), page).unwrap();
        rig.close(&[stream], &[], &[memory]);

        crate::os::unmap(base, 4 * page).unwrap();
        let unmapped = std::ptr::NonNull::new(std::ptr::without_provenance_mut(page)).unwrap();
        match rig.driver.pin(unmapped, page) {
            // Sanitizers make mlock do nothing.
            Ok(()) => rig.driver.unpin(unmapped, page).unwrap(),
            Err(error) => assert!(matches!(error, Error::MemLock { .. }), "{error}"),
        }
        assert_eq!(node.live(0).pinned_bytes, 0, "nothing is left of a pin that failed");
    }
}

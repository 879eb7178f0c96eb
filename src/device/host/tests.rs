//! The rules of the host device's page, on its driver. `tests` has the contract of all devices.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::device::{DevicePtr, Driver, EventHandle, StreamHandle, Transfer, Whose};
use crate::error::{Error, ErrorClass, Result};

/// A device with a stream, an event and device memory, and host memory for copies.
struct Rig {
    node: HostNode,
    driver: Arc<dyn Driver>,
    stream: StreamHandle,
    event: EventHandle,
    memory: DevicePtr,
    host: Vec<AtomicU8>,
}

impl Rig {
    fn new(config: HostConfig, len: usize) -> Self {
        let node = HostNode::new(config.memory(64 << 20)).unwrap();
        let driver = node.driver(0).unwrap();
        let (stream, event) = (driver.create_stream(false).unwrap(), driver.create_event().unwrap());
        let (memory, host) = (driver.allocate(len).unwrap(), (0..len).map(|_| AtomicU8::new(1)).collect());
        Self { node, driver, stream, event, memory, host }
    }

    /// Copies zeros to the host memory.
    fn download(&self, blocking: bool) -> Result<()> {
        let (dst, len) = (self.host.as_ptr().cast_mut().cast(), self.host.len());
        let transfer = Transfer::Download { src: self.memory, dst, len };
        // SAFETY: the tests keep the host memory until the copy's end, and look at it only then.
        unsafe {
            match blocking {
                true => self.driver.copy_blocking(self.stream, transfer),
                false => self.driver.copy(self.stream, transfer),
            }
        }
    }

    fn is_all(&self, value: u8) -> bool {
        self.host.iter().all(|byte| byte.load(Ordering::Relaxed) == value)
    }

    /// The node's users are its handle, the driver, and each stream's thread.
    fn no_thread_is_left(&self) {
        until(|| Arc::strong_count(&self.node.0) == 2);
    }

    fn arm(&self, call: Call, failure: Failure) {
        self.node.fail(Fault { device: 0, call, nth: 0, failure });
    }

    /// Gives back what the rig has, also of a dead device, and checks that nothing is left.
    fn close(&self) {
        self.driver.destroy_stream(self.stream).unwrap();
        self.driver.destroy_event(self.event).unwrap();
        self.driver.free(self.memory).unwrap();
        until(|| self.node.live(0) == HostUsage::default());
    }
}

fn until(mut happened: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !happened() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it did not happen");
        thread::sleep(Duration::from_micros(200));
    }
}

fn class<T: std::fmt::Debug>(result: Result<T>) -> ErrorClass {
    result.unwrap_err().class()
}

#[test]
fn what_is_not_there_is_refused_and_addresses_are_never_used_again() {
    assert!([0, 1025].iter().all(|devices| HostNode::new(HostConfig::new().devices(*devices)).is_err()));
    let node = HostNode::new(HostConfig::new().devices(3).memory(1000)).unwrap();
    assert!(node.driver(3).unwrap_err().to_string().contains("host:2"));
    node.kill(9);
    assert_eq!(node.live(9), HostUsage::default());
    let driver = node.driver(0).unwrap();
    let first = driver.allocate(600).unwrap();
    assert_eq!(class(driver.allocate(401)), ErrorClass::Transient, "400 bytes are left");
    driver.free(first).unwrap();
    let next = driver.allocate(1000).unwrap();
    for at in [first.0, next.0 + 1001, 0, u64::MAX] {
        let error = driver.examine(DevicePtr(at), 1).unwrap_err().to_string();
        assert!(error.contains("the driver knows no memory there"), "{at:#x}: {error}");
    }
    assert_eq!(class(driver.free(first)), ErrorClass::Argument);
    driver.free(next).unwrap();
    let driver = HostNode::new(HostConfig::new().memory(usize::MAX)).unwrap().driver(0).unwrap();
    assert!([usize::MAX, 1 << 52].iter().all(|len| class(driver.allocate(*len)) == ErrorClass::Transient));
}

#[test]
fn memory_stays_pinned_while_a_copy_uses_it() {
    let rig = Rig::new(HostConfig::new().devices(2), 8);
    let (other, base) = (rig.node.driver(1).unwrap(), NonNull::from(&rig.host[0]).cast());
    // SAFETY: the memory lives until the end.
    unsafe { other.register(base, 8, Whose::Program).unwrap() };
    // SAFETY: as above, and the call is refused where a copy or another device uses it.
    let unpin = |driver: &Arc<dyn Driver>| unsafe { driver.unpin(base, 8) };
    rig.node.hang(0);
    rig.download(false).unwrap();
    let error = unpin(&other).unwrap_err().to_string();
    assert!(error.contains("used by a copy that is queued or running"), "{error}");
    rig.node.resume(0);
    until(|| rig.node.live(0).queued == 0);
    assert!(unpin(&rig.driver).is_err(), "only the device that pinned it may unpin it");
    unpin(&other).unwrap();
    rig.close();
}

/// Memory that went unpinned is pinned again under copies. All of it is locked, or nothing.
#[test]
fn memory_that_cannot_be_locked_is_not_pinned_although_a_copy_uses_it() {
    const LEN: usize = 4096;
    let rig = Rig::new(HostConfig::new(), LEN);
    // SAFETY: a mapping of its own.
    let base = unsafe {
        let (reserved, private) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        NonNull::new(libc::mmap(std::ptr::null_mut(), LEN, reserved, private, -1, 0)).unwrap().cast::<u8>()
    };
    rig.node.hang(0);
    let dst = base.as_ptr();
    // SAFETY: the device dies before it makes the copy.
    unsafe { rig.driver.copy(rig.stream, Transfer::Download { src: rig.memory, dst, len: LEN }).unwrap() };
    for _ in 0..2 {
        // SAFETY: the memory stays mapped.
        let refused = unsafe { rig.driver.register(base, LEN, Whose::Program) }.unwrap_err();
        assert!(matches!(refused, Error::MemLock { .. }), "{refused}");
        assert_eq!(rig.node.live(0).pinned_bytes, 0);
    }
    rig.node.kill(0);
    rig.close();
}

#[test]
fn faults_due_together_strike_one_after_the_other_and_traces_have_all_calls() {
    let rig = Rig::new(HostConfig::new(), 8);
    rig.node.start_trace();
    rig.arm(Call::CreateEvent, Failure::Transient);
    rig.arm(Call::CreateEvent, Failure::Argument);
    rig.node.fail(Fault { device: 1, call: Call::CreateEvent, nth: 0, failure: Failure::Capture });
    assert_eq!(class(rig.driver.create_event()), ErrorClass::Transient);
    assert_eq!(class(rig.driver.create_event()), ErrorClass::Argument);
    assert!(rig.driver.query(rig.event).unwrap());
    assert_eq!(rig.node.trace(), [Call::CreateEvent, Call::CreateEvent, Call::Query]);
    assert_eq!(rig.node.clear_faults(), 1);
    rig.close();
}

#[test]
fn late_copies_are_overtaken_and_killed_devices_release_who_waits() {
    let rig = Rig::new(HostConfig::new().late(Duration::from_secs(3600), 1), 8);
    let (quick, before) = (rig.driver.create_stream(false).unwrap(), rig.driver.create_event().unwrap());
    rig.download(false).unwrap();
    rig.driver.record(rig.event, rig.stream).unwrap();
    rig.driver.record(before, quick).unwrap();
    until(|| rig.driver.query(before).unwrap());
    rig.driver.wait_event(quick, rig.event).unwrap();
    assert!(!rig.driver.query(rig.event).unwrap());
    thread::scope(|scope| {
        let waits = scope.spawn(|| rig.download(true));
        until(|| rig.node.live(0).queued == 4);
        rig.node.kill(0);
        assert_eq!(class(waits.join().unwrap()), ErrorClass::DeviceLost);
    });
    assert!(rig.is_all(1) && rig.node.live(0).queued == 0);
    assert_eq!(class(rig.driver.create_event()), ErrorClass::DeviceLost);
    rig.driver.destroy_stream(quick).unwrap();
    rig.driver.destroy_event(before).unwrap();
    rig.close();
    rig.no_thread_is_left();
}

#[test]
fn what_is_queued_runs_although_its_stream_is_destroyed() {
    let rig = Rig::new(HostConfig::new(), 8);
    let (other, after) = (rig.driver.create_stream(false).unwrap(), rig.driver.create_event().unwrap());
    rig.arm(Call::Copy, Failure::Stall);
    rig.download(false).unwrap();
    rig.driver.record(rig.event, rig.stream).unwrap();
    rig.driver.wait_event(other, rig.event).unwrap();
    rig.driver.record(after, other).unwrap();
    rig.driver.destroy_stream(rig.stream).unwrap();
    rig.driver.destroy_stream(other).unwrap();
    // A call for another device wakes the threads.
    rig.node.resume(1);
    thread::sleep(Duration::from_millis(5));
    assert!(rig.is_all(1) && !rig.driver.query(after).unwrap());
    assert_eq!(class(rig.download(false)), ErrorClass::Argument);
    rig.node.resume(0);
    until(|| rig.driver.query(after).unwrap());
    assert!(rig.is_all(0) && rig.driver.query(rig.event).unwrap());
    rig.no_thread_is_left();
}

#[test]
fn nothing_is_written_once_a_device_is_known_to_be_dead() {
    for round in 0..16 {
        let rig = Rig::new(HostConfig::new().late(Duration::ZERO, round), 2 << 20);
        let work = || {
            while rig.download(true).is_ok() {}
            // SAFETY: no copy uses the memory any more: no thread's call fails before that.
            unsafe { rig.host.as_ptr().cast_mut().cast::<u8>().write_bytes(9, rig.host.len()) };
        };
        thread::scope(|scope| {
            let worker = scope.spawn(work);
            thread::sleep(Duration::from_micros(100 * round));
            match round % 2 {
                0 => rig.node.kill(0),
                _ => {
                    rig.arm(Call::Query, Failure::DeviceLost);
                    assert_eq!(class(rig.driver.query(rig.event)), ErrorClass::DeviceLost);
                }
            }
            worker.join().unwrap();
        });
        thread::sleep(Duration::from_millis(1));
        assert!(rig.is_all(9));
        rig.close();
    }
}

#[test]
fn freeing_what_a_queued_operation_uses_kills_the_device() {
    let rig = Rig::new(HostConfig::new(), 8);
    rig.node.hang(0);
    rig.download(false).unwrap();
    rig.driver.free(rig.memory).unwrap();
    rig.node.resume(0);
    let error = rig.driver.query(rig.event).unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("freed"), "{error}");
    assert!(rig.is_all(1) && rig.node.live(0).queued == 0);
}

#[test]
fn copies_within_a_device_that_cross_do_not_deadlock() {
    let rig = Rig::new(HostConfig::new(), 3 << 20);
    let (half, other) = (DevicePtr(rig.memory.0 + (3 << 19)), rig.driver.create_stream(false).unwrap());
    for _ in 0..20 {
        for (stream, src, dst) in [(rig.stream, rig.memory, half), (other, half, rig.memory)] {
            // SAFETY: no host memory is used.
            unsafe { rig.driver.copy(stream, Transfer::OnDevice { src, dst, len: 3 << 19 }).unwrap() };
        }
    }
    until(|| rig.node.live(0).queued == 0);
    rig.driver.destroy_stream(other).unwrap();
    rig.close();
}

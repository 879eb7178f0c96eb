//! The rules of the host device's page, on its driver. The crate's contract with all devices is tested in `tests`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer};
use crate::error::ErrorClass;
use crate::foreign::Owned;
use crate::os;

const HOUR: Duration = Duration::from_secs(3600);

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
        let (stream, event) = (driver.create_stream().unwrap(), driver.create_event().unwrap());
        let (memory, host) = (driver.allocate(len).unwrap(), (0..len).map(|_| AtomicU8::new(1)).collect());
        Self { node, driver, stream, event, memory, host }
    }

    /// A copy of zeros to the host memory.
    fn download(&self) -> Transfer {
        let dst = self.host.as_ptr().cast_mut().cast();
        Transfer::Download { src: self.memory, dst, len: self.host.len() }
    }

    fn copy(&self, transfer: Transfer) -> Result<()> {
        // SAFETY: the tests keep the host memory until the copy has ended, and look at it only then.
        unsafe { self.driver.copy(self.stream, transfer) }
    }

    fn copy_blocking(&self) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver.copy_blocking(self.stream, self.download()) }
    }

    fn is_all(&self, value: u8) -> bool {
        self.host.iter().all(|byte| byte.load(Ordering::Relaxed) == value)
    }

    fn is_done(&self) -> bool {
        self.driver.query(self.event).unwrap()
    }

    fn arm(&self, call: Call, failure: Failure) {
        self.node.fail(Fault { device: 0, call, nth: 0, failure });
    }

    /// Gives back what the rig has, also of a dead device, and checks that nothing is left.
    fn close(&self) {
        let _ = self.driver.destroy_stream(self.stream);
        let _ = self.driver.destroy_event(self.event);
        let _ = self.driver.free(self.memory);
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
fn configurations_and_devices_are_checked() {
    let new = HostConfig::new;
    for config in [new().devices(0), new().devices(1025), new().memory(0)] {
        assert!(HostNode::new(config).is_err());
    }
    let node = HostNode::new(HostConfig::new().devices(3)).unwrap();
    let error = node.driver(3).unwrap_err().to_string();
    assert!(error.contains("host:3") && error.contains("host:2"), "{error}");
    node.kill(9);
    node.resume(9);
    assert!(!node.hang_stream(9, 0) && !node.hang_stream(0, 0) && !node.resume_stream(0, 0));
    assert_eq!((node.queued(9), node.live(9)), (0, HostUsage::default()));
}

#[test]
fn addresses_are_never_used_again() {
    let node = HostNode::new(HostConfig::new().memory(1000)).unwrap();
    let driver = node.driver(0).unwrap();
    let first = driver.allocate(600).unwrap();
    assert_eq!(class(driver.allocate(401)), ErrorClass::Transient, "400 bytes are left");
    driver.free(first).unwrap();
    let next = driver.allocate(1000).unwrap();
    for at in [first.0, next.0 + 1000, 0, u64::MAX] {
        let error = driver.examine(DevicePtr(at), 1).unwrap_err().to_string();
        assert!(error.contains("the driver knows no memory there"), "{at:#x}: {error}");
    }
    assert_eq!(class(driver.free(first)), ErrorClass::Argument);
    driver.free(next).unwrap();
    // Memory that neither the addresses nor the system has.
    let driver = HostNode::new(HostConfig::new().memory(usize::MAX)).unwrap().driver(0).unwrap();
    for len in [usize::MAX, usize::MAX / 4, 1 << 52] {
        assert_eq!(class(driver.allocate(len)), ErrorClass::Transient);
    }
    assert_eq!(class(driver.query(EventHandle(0))), ErrorClass::Argument);
}

#[test]
fn pinned_ranges_share_pages_and_do_not_overlap() {
    let (rig, page) = (Rig::new(HostConfig::new().devices(2), 8), os::page_size());
    let base = os::map(3 * page, 1).unwrap();
    // SAFETY: the mapping stays until the end.
    let register = |at: usize, len| unsafe { rig.driver.register(base.add(at), len, false) };
    // SAFETY: as above.
    let unregister = |at: usize, len| unsafe { rig.driver.unpin(base.add(at), len) };
    register(100, page).unwrap();
    register(100 + page, 50).unwrap();
    for (at, len) in [(99, 2), (100, 1), (page, 200), (99 + page, 1), (0, 3 * page)] {
        let error = register(at, len).unwrap_err().to_string();
        assert!(error.contains("overlaps"), "{error}");
    }
    // A range is unregistered only as a whole, and once.
    for (at, len) in [(100, page - 1), (101, page), (0, 1)] {
        assert!(unregister(at, len).is_err());
    }
    assert_eq!(rig.node.live(0).pinned_bytes, page + 50);
    unregister(100, page).unwrap();
    unregister(100 + page, 50).unwrap();
    assert!(unregister(100 + page, 50).is_err());
    // Memory stays pinned or allocated while a copy of any device uses it, which is queued or running.
    let other = rig.node.driver(1).unwrap();
    let own = rig.driver.allocate_host(page, HostKind::Managed).unwrap();
    // SAFETY: as above.
    unsafe { other.register(base.add(100), page, false).unwrap() };
    let state = || rig.node.0.units[0].state.lock();
    let block = Arc::clone(&state().memory[&rig.memory.0]);
    for (host, last) in [(base, 92 + page), (own, page - 8)] {
        // SAFETY: as above, once no copy uses it.
        let give_back = || unsafe {
            if host == own {
                return rig.driver.free_host(own, page, HostKind::Managed);
            }
            other.unpin(base.add(100), page)
        };
        // SAFETY: within the mapping.
        let dst = unsafe { host.as_ptr().add(last) };
        let held = block.locks[0].lock();
        rig.node.hang(0);
        rig.copy(Transfer::Download { src: rig.memory, dst, len: 8 }).unwrap();
        for running in [false, true] {
            if running {
                rig.node.resume(0);
                until(|| state().copying == 1);
            }
            let error = give_back().unwrap_err();
            assert_eq!(error.class(), ErrorClass::Argument);
            assert!(error.to_string().contains("used by a copy that is queued or running"), "{error}");
        }
        drop(held);
        until(|| rig.node.queued(0) == 0);
        let error = unregister(100, page).unwrap_err().to_string();
        assert!(error.contains("not what host:0 has pinned"), "only the device that pinned it: {error}");
        give_back().unwrap();
    }
    // The page that two ranges are on stays locked until both are gone.
    let node = &rig.node.0;
    node.enter(&(100..100 + page), (0, None)).unwrap();
    node.enter(&(100 + page..150 + page), (0, None)).unwrap();
    assert_eq!(node.leave(&(100..100 + page), (0, None)), Ok(0..page));
    assert_eq!(node.leave(&(100 + page..150 + page), (0, None)), Ok(page..2 * page));
    // SAFETY: nothing uses it.
    unsafe { os::unmap(base, 3 * page).unwrap() };
    rig.close();
}

#[test]
fn faults_that_queue_hold_a_stream_or_run_anyway() {
    let rig = Rig::new(HostConfig::new(), 8);
    for call in [Call::Copy, Call::Record, Call::WaitEvent, Call::CopyBlocking, Call::Allocate] {
        rig.arm(call, Failure::RunsAnyway);
    }
    rig.node.hang(0);
    assert_eq!(class(rig.copy(rig.download())), ErrorClass::Transient);
    assert_eq!(class(rig.driver.record(rig.event, rig.stream)), ErrorClass::Transient);
    assert_eq!(class(rig.driver.wait_event(rig.stream, rig.event)), ErrorClass::Transient);
    assert_eq!(class(rig.driver.allocate(8)), ErrorClass::Transient);
    assert!(rig.node.queued(0) == 3 && !rig.is_done() && rig.is_all(1));
    // A blocking copy waits for a hung device, and returns its error when it has run.
    thread::scope(|scope| {
        let waits = scope.spawn(|| rig.copy_blocking());
        until(|| rig.node.queued(0) == 4);
        thread::sleep(Duration::from_millis(2));
        assert!(!waits.is_finished() && rig.is_all(1));
        rig.node.resume(0);
        assert_eq!(class(waits.join().unwrap()), ErrorClass::Transient);
    });
    assert!(rig.is_all(0) && rig.is_done());
    let (other, first) = (rig.driver.create_stream().unwrap(), rig.driver.create_event().unwrap());
    for held in [true, false] {
        match held {
            true => rig.arm(Call::Record, Failure::Stall),
            false => assert!(rig.node.hang_stream(0, 0) && !rig.node.hang_stream(0, 2)),
        }
        rig.driver.record(rig.event, rig.stream).unwrap();
        rig.driver.record(first, other).unwrap();
        until(|| rig.driver.query(first).unwrap());
        assert!(!rig.is_done(), "the other stream alone goes on");
        assert!(rig.node.resume_stream(0, 0));
        until(|| rig.is_done());
    }
    rig.driver.destroy_stream(other).unwrap();
    rig.driver.destroy_event(first).unwrap();
    rig.close();
}

#[test]
fn faults_due_together_strike_one_after_the_other_and_traces_have_all_calls() {
    let rig = Rig::new(HostConfig::new(), 8);
    rig.node.start_trace();
    rig.arm(Call::CreateEvent, Failure::Transient);
    rig.node.fail_any(0, Failure::Argument);
    rig.node.fail(Fault { device: 1, call: Call::CreateEvent, nth: 0, failure: Failure::Capture });
    rig.node.fail(Fault { device: 0, call: Call::Query, nth: 1, failure: Failure::Capture });
    assert_eq!(class(rig.driver.create_event()), ErrorClass::Transient);
    assert_eq!(class(rig.driver.create_event()), ErrorClass::Argument);
    assert!(rig.is_done() && class(rig.driver.query(rig.event)) == ErrorClass::Capture);
    let calls = [Call::CreateEvent, Call::CreateEvent, Call::Query, Call::Query];
    assert_eq!((rig.node.trace(), rig.node.stop_trace()), (calls.to_vec(), calls.to_vec()));
    assert_eq!((rig.node.clear_faults(), rig.node.trace()), (1, vec![]));
    rig.close();
}

#[test]
fn late_copies_are_overtaken_and_killed_devices_release_who_waits() {
    for hangs in [false, true] {
        let rig = Rig::new(HostConfig::new().late(HOUR, 1), 8);
        if hangs {
            rig.node.hang(0);
        }
        let (quick, before) = (rig.driver.create_stream().unwrap(), rig.driver.create_event().unwrap());
        let base = std::ptr::NonNull::from(&rig.host[0]).cast();
        // SAFETY: the host memory lives until the end.
        unsafe { rig.driver.register(base, 8, false).unwrap() };
        rig.copy(rig.download()).unwrap();
        rig.driver.record(rig.event, rig.stream).unwrap();
        rig.driver.record(before, quick).unwrap();
        if !hangs {
            until(|| rig.driver.query(before).unwrap());
        }
        rig.driver.wait_event(quick, rig.event).unwrap();
        assert!(!rig.is_done());
        thread::scope(|scope| {
            let waits = scope.spawn(|| rig.copy_blocking());
            until(|| rig.node.queued(0) >= 4);
            rig.node.kill(0);
            assert_eq!(class(waits.join().unwrap()), ErrorClass::DeviceLost);
        });
        assert!(rig.is_all(1) && rig.node.queued(0) == 0);
        assert!(rig.driver.allocate(1).unwrap_err().to_string().contains("was killed"));
        // SAFETY: registered above, and no copy uses it any more.
        unsafe { rig.driver.unpin(base, 8).unwrap() };
        assert_eq!(class(rig.driver.destroy_stream(quick)), ErrorClass::DeviceLost);
        assert_eq!(class(rig.driver.destroy_event(before)), ErrorClass::DeviceLost);
        rig.close();
    }
}

#[test]
fn nothing_is_written_once_a_device_is_known_to_be_dead() {
    for round in 0..16 {
        let rig = Rig::new(HostConfig::new().late(Duration::ZERO, round), 2 << 20);
        let work = || {
            while rig.copy_blocking().is_ok() {}
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
fn a_queued_operation_whose_memory_was_freed_kills_the_device() {
    let other = |rig: &Rig| rig.driver.allocate(8).unwrap();
    for work in 0..3 {
        let rig = Rig::new(HostConfig::new(), 8);
        let kept = other(&rig);
        rig.node.hang(0);
        match work {
            0 => rig.copy(rig.download()).unwrap(),
            1 => rig.copy(Transfer::OnDevice { src: kept, dst: rig.memory, len: 8 }).unwrap(),
            _ => {
                let driver = rig.driver.as_any().downcast_ref::<HostDriver>().unwrap();
                let function: HostFunction = Box::new(|_, _| panic!("it was called"));
                driver.launch(rig.stream, &[(kept, 8)], &[(rig.memory, 8)], Owned::new(function)).unwrap();
            }
        }
        rig.driver.free(rig.memory).unwrap();
        rig.node.resume(0);
        until(|| rig.driver.query(rig.event).is_err_and(|error| error.to_string().contains("freed")));
        assert!(rig.is_all(1) && rig.node.queued(0) == 0);
        rig.driver.free(kept).unwrap();
        rig.close();
    }
}

#[test]
fn threads_end_with_their_streams_and_with_the_driver() {
    let rig = Rig::new(HostConfig::new(), 8);
    let users = |node: &HostNode| Arc::strong_count(&node.0.units[0]);
    assert!(rig.node.hang_stream(0, 0));
    rig.copy(rig.download()).unwrap();
    rig.driver.destroy_stream(rig.stream).unwrap();
    assert_eq!(class(rig.copy(rig.download())), ErrorClass::Argument);
    assert_eq!((rig.node.live(0).queued, rig.node.live(0).streams), (1, 0));
    rig.node.resume(0);
    until(|| users(&rig.node) == 2 && rig.is_all(0));
    rig.close();

    let Rig { node, driver, stream, event, host, .. } = Rig::new(HostConfig::new(), 8);
    node.hang(0);
    driver.record(event, stream).unwrap();
    driver.wait_event(driver.create_stream().unwrap(), event).unwrap();
    assert_eq!((users(&node), node.queued(0)), (4, 2));
    drop(driver);
    until(|| users(&node) == 1);
    let live = node.live(0);
    assert_eq!((live.queued, live.streams, live.events), (0, 2, 1), "leaks stay in sight");
    drop(host);
}

#[test]
fn copies_within_a_device_that_cross_do_not_deadlock() {
    let rig = Rig::new(HostConfig::new(), 3 << 20);
    let (half, other) = (DevicePtr(rig.memory.0 + (3 << 19)), rig.driver.create_stream().unwrap());
    for _ in 0..20 {
        for (stream, src, dst) in [(rig.stream, rig.memory, half), (other, half, rig.memory)] {
            // SAFETY: no host memory is used.
            unsafe { rig.driver.copy(stream, Transfer::OnDevice { src, dst, len: 3 << 19 }).unwrap() };
        }
    }
    until(|| rig.node.queued(0) == 0);
    rig.driver.destroy_stream(other).unwrap();
    rig.close();
}

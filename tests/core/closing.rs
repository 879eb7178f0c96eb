//! `Device::close` where not everything comes back: devices that fail, hang and die. (The contract's suite has what
//! every device does when all goes well.)

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{CloseError, Device, DeviceSlice, PinnedBuf, Pool, Stream, Unpinned};

use crate::support::own_process;

/// Longer than anything takes: what is waited for so long hangs the test.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

fn open() -> (HostNode, Device) {
    let node = HostNode::new(HostConfig::new().devices(2).memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    (node, device)
}

fn fail(node: &HostNode, call: Call, nth: u64, failure: Failure) {
    node.fail(Fault { device: 0, call, nth, failure });
}

struct Bed {
    pool: Pool,
    stream: Stream,
    memory: DeviceSlice,
}

impl Bed {
    fn on(device: &Device) -> Self {
        let pool = Pool::builder(device).capacity(1 << 20).unpinned(Unpinned::Allow);
        Self {
            pool: pool.build().unwrap(),
            stream: device.stream().unwrap(),
            memory: device.alloc(4096).unwrap(),
        }
    }

    fn filled(&self) -> PinnedBuf {
        let mut buf = self.pool.checkout(4096).unwrap();
        buf.try_resize(4096, 1).unwrap();
        buf
    }
}

#[test]
fn what_hangs_is_told_and_waited_for() {
    let (node, device) = open();
    let Bed { pool, stream, memory } = Bed::on(&device);
    node.hang(0);
    let bed = Bed { pool, stream, memory };
    drop(bed.stream.upload(bed.filled(), &bed.memory).unwrap());
    drop(bed);
    let error = device.close(Duration::from_millis(30)).unwrap_err();
    let held = error.held_by();
    assert_eq!((held.handles, held.streams, held.busy_streams), (0, 1, 1), "{error}");
    assert_eq!((held.buffers, held.quarantined, held.memory_bytes), (1, 0, 4096), "{error}");
    assert!(!error.is_closed(), "{error}");
    node.resume(0);
    error.wait(FOREVER).unwrap();
    assert_eq!(node.live(0), Default::default());
}

/// A lost stream keeps what was in flight there for good: `close` does not wait for it.
#[test]
fn what_never_comes_back_is_not_waited_for() {
    let (node, device) = open();
    let bed = Bed::on(&device);
    fail(&node, Call::Query, 0, Failure::Argument);
    // As often as it is tried.
    for _ in 0..2000 {
        fail(&node, Call::Query, 0, Failure::Argument);
    }
    node.hang(0);
    let flight = bed.stream.upload(bed.filled(), &bed.memory).unwrap();
    assert!(flight.wait().is_err());
    node.clear_faults();
    node.resume(0);
    drop(bed);
    let error = device.close(FOREVER).unwrap_err();
    let held = error.held_by();
    assert_eq!((held.buffers, held.quarantined), (1, 1), "{error}");
    assert!(held.quarantined_bytes >= 4096 && !error.is_closed(), "{error}");
    assert!(
        error.to_string().contains("1 quarantined buffers with")
            && error.to_string().contains("never come back")
    );
    // The device memory that the copy may still use stays allocated.
    assert_eq!((held.memory_bytes, held.handles), (4096, 0), "{error}");
    assert!(held.leaked >= 1, "the driver's event may still be recorded: {error}");
    let error = error.wait(FOREVER).unwrap_err();
    assert!(!error.is_closed(), "{error}");
}

/// While another thread still holds something that can come back, `close` waits for it, whatever else never does.
#[test]
fn what_can_come_back_is_waited_for_all_the_same() {
    let (node, device) = open();
    let (bed, other) = (Bed::on(&device), Bed::on(&device));
    for _ in 0..2000 {
        fail(&node, Call::Query, 0, Failure::Argument);
    }
    node.hang(0);
    assert!(bed.stream.upload(bed.filled(), &bed.memory).unwrap().wait().is_err());
    node.clear_faults();
    node.resume(0);
    drop(bed);
    let buf = other.filled();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            drop((buf, other));
        });
        let error = device.close(FOREVER).unwrap_err();
        let held = error.held_by();
        assert_eq!((held.handles, held.buffers, held.quarantined), (0, 1, 1), "{error}");
    });
}

/// The driver refuses to take something back: the device is closed all the same, and the error says that something
/// stays.
fn refused(call: Call) -> CloseError {
    let (node, device) = open();
    let bed = Bed::on(&device);
    drop(bed.stream.upload(bed.filled(), &bed.memory).unwrap().wait().unwrap());
    fail(&node, call, 0, Failure::Argument);
    drop(bed);
    let error = device.close(FOREVER).unwrap_err();
    assert_eq!((error.is_closed(), error.held_by().leaked), (true, 1), "{call:?}: {error}");
    assert!(error.to_string().contains("is closed, but not everything was given back: 1 things"), "{error}");
    let live = node.live(0);
    assert_ne!(live, Default::default(), "{call:?}: something stays");
    // `close` is over: a further wait changes nothing.
    error.wait(FOREVER).unwrap_err()
}

#[test]
fn what_the_driver_does_not_take_back_is_told() {
    for call in [Call::Free, Call::DestroyStream, Call::DestroyEvent, Call::Unpin] {
        assert!(refused(call).is_closed());
    }
}

#[test]
fn a_device_that_was_lost_says_so() {
    let (node, device) = open();
    let bed = Bed::on(&device);
    node.kill(0);
    assert!(bed.stream.synchronize().is_err());
    drop(bed);
    let error = device.close(FOREVER).unwrap_err();
    assert!(error.is_closed() && error.held_by().lost.is_some(), "{error}");
    assert!(error.to_string().contains("was lost"), "{error}");
}

/// The handles of a pool of several devices keep all of these open; its memory keeps the one that allocated it open.
#[test]
fn a_pool_of_two_devices() {
    let node = HostNode::new(HostConfig::new().devices(2).memory(64 << 20)).unwrap();
    let (first, second) = (Device::on(&node, 0).unwrap(), Device::on(&node, 1).unwrap());
    let pool = Pool::builder(&first).device(&second).capacity(1 << 20).unpinned(Unpinned::Allow);
    let pool = pool.build().unwrap();
    let buf = pool.checkout(100).unwrap();
    let stream = second.stream().unwrap();
    let error = second.close(Duration::ZERO).unwrap_err();
    // Those of the pool and of the stream. The buffer's memory is the first one's.
    assert_eq!((error.held_by().handles, error.held_by().buffers), (2, 0), "{error}");
    // Once the pool is dropped its memory keeps the first device open, and no other.
    drop(pool);
    let error = error.wait(Duration::ZERO).unwrap_err();
    assert_eq!((error.held_by().handles, error.held_by().buffers), (1, 0), "{error}");
    drop(stream);
    error.wait(FOREVER).unwrap();
    let error = first.close(Duration::ZERO).unwrap_err();
    assert_eq!((error.held_by().handles, error.held_by().buffers), (0, 1), "{error}");
    drop(buf);
    error.wait(FOREVER).unwrap();
}

/// Counts what is out while threads are at work: a return may be counted before the checkout that it ends.
#[test]
fn buffers_that_change_hands_meanwhile_make_no_nonsense() {
    let (_node, device) = open();
    let pool = Pool::builder(&device).capacity(8 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let held = pool.checkout(4096).unwrap();
    let over = AtomicBool::new(false);
    let (send, receive) = std::sync::mpsc::sync_channel(4);
    let mut most = 0;
    std::thread::scope(|scope| {
        let (pool, over) = (&pool, &over);
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                send.send(pool.checkout(100).unwrap()).unwrap();
            }
        });
        scope.spawn(move || receive.into_iter().for_each(drop));
        for _ in 0..20_000 {
            let error = device.clone().close(Duration::ZERO).unwrap_err();
            most = most.max(error.held_by().buffers);
        }
        over.store(true, Ordering::Relaxed);
    });
    // One is held, a few are in the channel.
    assert!(most <= 100, "{most}");
    drop(held);
}

/// A stepped device is stepped by `close`.
#[test]
fn a_stepped_device_is_moved_first() {
    let node = HostNode::new(HostConfig::new().memory(64 << 20).stepped(5)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let bed = Bed::on(&device);
    drop(bed.stream.upload(bed.filled(), &bed.memory).unwrap());
    assert!(node.queued(0) > 0);
    drop(bed);
    device.close(FOREVER).unwrap();
    assert_eq!(node.live(0), Default::default());
    // No other thread steps it, so `close` does not wait for the memory.
    let device = Device::on(&node, 0).unwrap();
    let memory = device.alloc(64).unwrap();
    let error = device.close(FOREVER).unwrap_err();
    assert_eq!(error.held_by().memory_bytes, 64);
    drop(memory);
    error.wait(Duration::ZERO).unwrap();
}

/// The names of the crate's threads in this process.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).filter(|name| name.starts_with("pinpool-")).collect()
}

/// It gives back what still comes back. The device's other threads end.
#[test]
fn a_dead_device_with_quarantined_memory_keeps_its_region_thread_alone() {
    own_process!();
    let (node, device) = open();
    let Bed { pool, stream, memory } = Bed::on(&device);
    let bed = Bed { pool, stream, memory };
    node.hang(0);
    let out = bed.filled();
    drop(bed.stream.upload(bed.filled(), &bed.memory).unwrap());
    node.kill(0);
    drop(bed);
    let error = device.close(Duration::from_millis(30)).unwrap_err();
    assert!(!error.is_closed(), "{error}");
    drop(out);
    let error = error.wait(FOREVER).unwrap_err();
    assert_eq!((error.held_by().buffers, error.held_by().quarantined), (1, 1), "{error}");
    while threads() != ["pinpool-host:0"] {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A device that has died, with a buffer in flight whose memory another device pinned: nothing of it stays for good, so
/// closing it waits for what the program still has.
#[test]
fn a_dead_device_that_keeps_nothing_is_waited_for() {
    own_process!();
    for shared in [false, true] {
        let (node, first) = open();
        let second = Device::on(&node, 1).unwrap();
        let pool = Pool::builder(&first).device(&second).capacity(1 << 20).unpinned(Unpinned::Allow);
        let bed = Bed { pool: pool.build().unwrap(), ..Bed::on(&second) };
        let kept = second.alloc(4096).unwrap();
        node.hang(1);
        if shared {
            drop(bed.stream.upload(std::sync::Arc::new(bed.filled()), &bed.memory).unwrap());
        } else {
            drop(bed.stream.upload(bed.filled(), &bed.memory).unwrap());
        }
        node.kill(1);
        while second.lost().is_none() {
            second.reap();
        }
        drop(bed);
        let dropping = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(kept);
        });
        let error = second.close(FOREVER).unwrap_err();
        assert!(error.is_closed(), "shared {shared}: {error}");
        dropping.join().unwrap();
    }
}

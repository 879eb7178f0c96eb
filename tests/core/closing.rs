//! `Device::close` where not everything comes back: devices that fail, hang and die. (The contract's suite has what
//! every device does when all goes well.)

use pinpool::InFlight;

use super::*;
use crate::support::process::threads;

/// Longer than anything takes: what is waited for so long hangs the test.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// The next such call fails.
fn fail(node: &HostNode, call: Call) {
    node.fail(Fault { device: 0, call, nth: 0, failure: Failure::Argument });
}

struct Bed {
    pool: Pool,
    stream: Stream,
    memory: DeviceSlice,
}

impl Bed {
    fn on(device: &Device) -> Self {
        let (stream, memory) = (device.stream().unwrap(), device.alloc(4096).unwrap());
        Self { pool: pool(device, 1 << 20), stream, memory }
    }

    fn filled(&self) -> PinnedBuf {
        filled(&self.pool, 4096, 1)
    }

    fn send(&self) -> InFlight<PinnedBuf> {
        self.stream.upload(self.filled(), &self.memory).unwrap()
    }

    /// Has the stream lost with a buffer in flight, while the device lives on.
    fn lose_stream(&self, node: &HostNode) {
        // As often as it is tried.
        for _ in 0..2000 {
            fail(node, Call::Query);
        }
        node.hang(0);
        assert!(self.send().wait().is_err());
        node.clear_faults();
        node.resume(0);
    }
}

#[test]
fn what_hangs_is_told_and_waited_for() {
    let (node, device) = host();
    let bed = Bed::on(&device);
    node.hang(0);
    drop(bed.send());
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

/// A lost stream keeps what was in flight there for good: `close` does not wait for it. While another thread
/// still holds something that can come back, `close` waits for that, whatever else never does.
#[test]
fn what_never_comes_back_is_not_waited_for_and_what_can_is() {
    let (node, device) = host();
    let (bed, other) = (Bed::on(&device), Bed::on(&device));
    bed.lose_stream(&node);
    drop(bed);
    let buf = other.filled();
    let dropping = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop((buf, other));
    });
    let error = device.close(FOREVER).unwrap_err();
    let held = error.held_by();
    // The device memory that the copy may still use stays allocated.
    assert_eq!((held.handles, held.buffers, held.quarantined, held.memory_bytes), (0, 1, 1, 4096), "{error}");
    assert!(held.quarantined_bytes >= 4096 && !error.is_closed(), "{error}");
    let text = error.to_string();
    assert!(text.contains("1 quarantined buffers with") && text.contains("never come back"), "{text}");
    assert_eq!(held.leaked, 0, "the stream's event is destroyed when nothing keeps the device: {error}");
    assert!(!error.wait(FOREVER).unwrap_err().is_closed());
    dropping.join().unwrap();
}

/// The device is closed all the same, and the error says that something stays.
#[test]
fn what_the_driver_does_not_take_back_is_told() {
    for call in [Call::Free, Call::DestroyStream, Call::DestroyEvent, Call::Unpin] {
        let (node, device) = host();
        let bed = Bed::on(&device);
        drop(bed.send().wait().unwrap());
        fail(&node, call);
        drop(bed);
        let error = device.close(FOREVER).unwrap_err();
        assert_eq!((error.is_closed(), error.held_by().leaked), (true, 1), "{call:?}: {error}");
        let told = "is closed, but not everything was given back: 1 things";
        assert!(error.to_string().contains(told), "{error}");
        assert_ne!(node.live(0), Default::default(), "{call:?}: something stays");
        // `close` is over: a further wait changes nothing.
        assert!(error.wait(FOREVER).unwrap_err().is_closed());
    }
}

/// The handles of a pool of several devices keep all of these open; its memory keeps the one that allocated it open.
#[test]
fn a_pool_of_two_devices() {
    let (_node, [first, second]) = hosts();
    let pool = builder(&first, 1 << 20).device(&second).build().unwrap();
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

/// It gives back what still comes back. The device's other threads end.
#[test]
fn a_dead_device_with_quarantined_memory_keeps_its_region_thread_alone() {
    own_process!();
    let (node, device) = host();
    let bed = Bed::on(&device);
    node.hang(0);
    let out = bed.filled();
    drop(bed.send());
    node.kill(0);
    drop(bed);
    let error = device.close(Duration::from_millis(30)).unwrap_err();
    assert!(!error.is_closed(), "{error}");
    drop(out);
    let error = error.wait(FOREVER).unwrap_err();
    assert_eq!((error.held_by().buffers, error.held_by().quarantined), (1, 1), "{error}");
    // Waiting is a remedy only where something can still come back.
    assert!(!error.is_closed() && error.held_by().lost.is_some(), "{error:?}");
    let text = error.to_string();
    assert!(!text.contains("wait longer") && !text.contains("drop what"), "{text}");
    assert!(text.contains("waiting changes nothing") && text.contains("until the process ends"), "{text}");
    while threads("pinpool-") != ["pinpool-host:0"] {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A device that has died, with a buffer in flight whose memory another device pinned: nothing of it stays
/// for good, so closing it waits for what the program still has.
#[test]
fn a_dead_device_that_keeps_nothing_is_waited_for_and_says_that_it_was_lost() {
    for shared in [false, true] {
        let (node, [first, second]) = hosts();
        let pool = builder(&first, 1 << 20).device(&second);
        let bed = Bed { pool: pool.build().unwrap(), ..Bed::on(&second) };
        let kept = second.alloc(4096).unwrap();
        node.hang(1);
        match shared {
            true => drop(bed.stream.upload(std::sync::Arc::new(bed.filled()), &bed.memory).unwrap()),
            false => drop(bed.send()),
        }
        node.kill(1);
        while second.lost().is_none() {
            second.reap();
        }
        drop(bed);
        let dropping = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(kept);
        });
        // Another thread closes it, too.
        let also = second.clone();
        let closing = std::thread::spawn(move || also.close(FOREVER).is_err_and(|error| error.is_closed()));
        let error = second.close(FOREVER).unwrap_err();
        assert!(error.is_closed() && error.held_by().lost.is_some(), "shared {shared}: {error}");
        assert!(closing.join().unwrap());
        assert!(error.to_string().contains("was lost"), "{error}");
        dropping.join().unwrap();
    }
}

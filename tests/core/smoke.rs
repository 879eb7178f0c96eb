//! The main path, end to end, on the production host device and on a stepped one.

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Device, Pool, Unpinned};

#[test]
fn a_buffer_goes_to_the_device_and_back() {
    let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(16 << 20).build().unwrap();
    let stream = device.stream().unwrap();
    let weights = device.alloc(1 << 20).unwrap();

    let mut buf = pool.checkout(1 << 20).unwrap();
    let bytes: Vec<u8> = (0..1 << 20).map(|i| (i * 7) as u8).collect();
    buf.extend_from_slice(&bytes);
    assert!(buf.is_pinned());
    pool.check().unwrap();
    let sent = stream.upload(buf, weights.slice(..)).unwrap();
    drop(sent);
    let landing = pool.checkout_on(&stream, 1 << 20).unwrap();
    let back = stream.download(weights.slice(..), landing).unwrap().wait().unwrap();
    assert!(*back == *bytes);
    drop(back);
    stream.synchronize().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (0, 0), "{stats:?}");
    pool.check().unwrap();
    drop(stream);
    let down = pool.shutdown(std::time::Duration::from_secs(5));
    assert!(down.drained, "{down:?}");
}

#[test]
fn nothing_comes_back_before_the_device_is_done() {
    let node = HostNode::new(HostConfig::new().memory(1 << 20).stepped(1)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(1 << 20).build().unwrap();
    let stream = device.stream().unwrap();
    let target = device.alloc(4096).unwrap();
    let mut buf = pool.checkout(4096).unwrap();
    buf.extend_from_slice(&[7; 4096]);
    let first = buf.as_ptr();
    drop(stream.upload(buf, &target).unwrap());
    for _ in 0..3 {
        device.reap();
        let other = pool.checkout(4096).unwrap();
        assert_ne!(other.as_ptr(), first);
        assert_eq!(pool.check().unwrap().in_flight_bytes, 4160);
    }
    // The same stream may have it, in order.
    while node.step() {}
    assert!(device.reap());
    assert_eq!(pool.check().unwrap().in_flight_bytes, 0);
}

#[test]
fn a_stream_waits_for_another() {
    let node = HostNode::new(HostConfig::new().memory(1 << 20).stepped(2)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(1 << 20).build().unwrap();
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let memory = device.alloc(4096).unwrap();
    let mut buf = pool.checkout(4096).unwrap();
    buf.extend_from_slice(&[9; 4096]);
    drop(first.upload(buf, &memory).unwrap());
    second.wait_for(&first).unwrap();
    let landing = pool.checkout(4096).unwrap();
    let back = second.download(&memory, landing).unwrap();
    // The second stream has nothing to run until the first has.
    assert!(!node.step_stream(0, 1));
    assert_eq!(*back.wait().unwrap(), [9; 4096]);
    pool.check().unwrap();
}

#[test]
fn a_claim_may_outlast_the_work_that_it_waits_for() {
    const LEN: usize = 4096;
    let node = HostNode::new(HostConfig::new().memory(1 << 20).stepped(1)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(1 << 16).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
    let mut buf = pool.checkout(LEN).unwrap();
    buf.extend_from_slice(&[7; LEN]);
    let mut others = Vec::new();
    while let Ok(other) = pool.try_checkout(LEN) {
        others.push(other);
    }
    // The first look has an event recorded, which the second sees complete.
    let all_done = || {
        for _ in 0..2 {
            device.reap();
            while node.step() {}
        }
        device.reap();
    };
    for used in [true, false] {
        drop(stream.upload(buf, &memory).unwrap());
        let claimed = pool.checkout_on(&stream, LEN).unwrap();
        assert!(claimed.was_claimed() && claimed.capacity() == LEN);
        assert_eq!(pool.check().unwrap().in_flight_bytes, 4160);
        // The upload ends, and the claim stays.
        all_done();
        assert_eq!(pool.check().unwrap().in_flight_bytes, 0);
        if used {
            let back = stream.download(&memory, claimed).unwrap();
            assert_eq!(pool.check().unwrap().in_flight_bytes, 4160);
            buf = back.wait().unwrap();
            assert_eq!(*buf, [7; LEN]);
        } else {
            buf = claimed.wait().unwrap();
            assert!(buf.is_empty());
        }
        pool.check().unwrap();
        buf.clear();
        buf.extend_from_slice(&[7; LEN]);
    }
    // A claim that is given up goes back to the flight, or to the pool if the flight is over.
    for over in [false, true] {
        drop(stream.upload(buf, &memory).unwrap());
        let claimed = pool.checkout_on(&stream, LEN).unwrap();
        assert!(claimed.was_claimed());
        if over {
            all_done();
        }
        drop(claimed);
        assert_eq!(pool.check().unwrap().in_flight_bytes, if over { 0 } else { 4160 });
        all_done();
        assert_eq!(pool.check().unwrap().in_flight_bytes, 0);
        buf = pool.try_checkout(LEN).unwrap();
        buf.extend_from_slice(&[7; LEN]);
    }
}

/// A capacity is a bound and no request: nothing but the start is pinned or made ready for it.
#[test]
fn a_capacity_beyond_the_machine_takes_what_is_used_alone() {
    let device = Device::on(&HostNode::new(HostConfig::new().memory(1 << 20)).unwrap(), 0).unwrap();
    let builder = |capacity| Pool::builder(&device).capacity(capacity).unpinned(Unpinned::Allow);
    let pool = builder(1 << 40).initial(8 << 20).build().unwrap();
    let taken = || pool.stats().pinned_bytes + pool.stats().unpinned_bytes;
    assert_eq!((taken(), pool.stats().capacity_bytes), (8 << 20, 1 << 40));
    drop(pool.checkout(1 << 20).unwrap());
    assert_eq!(taken(), 8 << 20);
    pool.check().unwrap();
    let pool = builder(usize::MAX).initial(0).region(4 << 20).build().unwrap();
    assert!(usize::MAX - pool.stats().capacity_bytes < 1 << 20);
    drop(pool.checkout(1 << 20).unwrap());
    assert_eq!(pool.stats().pinned_bytes + pool.stats().unpinned_bytes, 4 << 20);
    pool.check().unwrap();
}

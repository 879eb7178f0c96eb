//! Streams and claims on a simulated GPU that the test moves, and a capacity beyond the machine.

use pinpool::Pool;

use crate::support::hand::Machine;
use crate::{builder, filled, host};

#[test]
fn a_stream_waits_for_another() {
    let machine = Machine::new(1, 1 << 20, 2);
    let device = machine.device(0);
    let pool = Pool::builder(&device).capacity(1 << 20).build().unwrap();
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let memory = device.alloc(4096).unwrap();
    drop(first.upload(filled(&pool, 4096, 9), &memory).unwrap());
    second.wait_for(&first).unwrap();
    let landing = pool.checkout(4096).unwrap();
    let back = second.download(&memory, landing).unwrap();
    // The second stream has nothing to run until the first has.
    assert!(!machine.step_stream(0, 1));
    assert_eq!(*back.wait().unwrap(), [9; 4096]);
    pool.check().unwrap();
}

#[test]
fn a_claim_may_outlast_the_work_that_it_waits_for() {
    const LEN: usize = 4096;
    let machine = Machine::new(1, 1 << 20, 1);
    let device = machine.device(0);
    let pool = Pool::builder(&device).capacity(1 << 16).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
    let mut buf = filled(&pool, LEN, 7);
    let _others: Vec<_> = std::iter::from_fn(|| pool.try_checkout(LEN).ok()).collect();
    // The first look has an event recorded, which the second sees complete.
    let all_done = || {
        for _ in 0..2 {
            device.reap();
            while machine.step() {}
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
    let device = host().1;
    let pool = builder(&device, 1 << 40).initial(8 << 20).build().unwrap();
    let taken = || pool.stats().pinned_bytes + pool.stats().unpinned_bytes;
    assert_eq!((taken(), pool.stats().capacity_bytes), (8 << 20, 1 << 40));
    drop(pool.checkout(1 << 20).unwrap());
    assert_eq!(taken(), 8 << 20);
    pool.check().unwrap();
    let pool = builder(&device, usize::MAX).initial(0).region(4 << 20).build().unwrap();
    assert!(usize::MAX - pool.stats().capacity_bytes < 1 << 20);
    drop(pool.checkout(1 << 20).unwrap());
    assert_eq!(pool.stats().pinned_bytes + pool.stats().unpinned_bytes, 4 << 20);
    pool.check().unwrap();
}

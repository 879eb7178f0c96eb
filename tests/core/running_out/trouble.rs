//! What goes wrong meanwhile: quarantine, streams that hang, panics, and pools that end before their buffers do.

use super::*;

#[test]
fn waiting_ends_when_quarantine_has_made_it_impossible() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let stream = rig.device.stream().unwrap();
    rig.node.hang(0);
    let kept = pool.checkout(pages(6)).unwrap();
    send(&stream, pool.checkout(pages(10)).unwrap());
    let mut possible = Waiter::new(pool.checkout_async(pages(6)));
    let hopeless = [vec![pages(7)], vec![pages(3), pages(4)], vec![pages(4), pages(4)]]
        .map(|requests| Waiter::new(pool.checkout_many_async(requests)));
    // A waker may do anything, looking at the pool included: none is called under a lock.
    let (asked, seen) = (pool.clone(), Arc::new(AtomicUsize::new(0)));
    let tell = seen.clone();
    let looks = waker(move || tell.store(asked.stats().quarantined_bytes, Ordering::Relaxed));
    let mut looking = pool.checkout_async(pages(8));
    assert!(Pin::new(&mut looking).poll(&mut Context::from_waker(&looks)).is_pending());
    rig.node.kill(0);
    until(|| seen.load(Ordering::Relaxed) == 10 * PAGE, || format!("{pool:?}"));
    for waiter in hopeless {
        until(|| waiter.rung() == 1, || "it is not woken".into());
        let error = waiter.ready().unwrap_err();
        assert!(
            matches!(error, Error::Impossible { quarantined, .. } if quarantined == 10 * PAGE),
            "{error}"
        );
    }
    possible.still_waits();
    let error = pool.checkout(pages(7)).unwrap_err();
    assert!(matches!(error, Error::Impossible { .. }), "{error}");
    drop(kept);
    drop(possible.ready().unwrap());
    assert!(stream.synchronize().unwrap_err().is_device_lost());
    assert!(rig.device.lost().is_some() && rig.device.stream().is_err());
    let stats = checked(&pool);
    assert_eq!((stats.quarantined_bytes, stats.in_flight_bytes), (10 * PAGE, 0));
    let end = pool.shutdown(HANG);
    assert_eq!((end.drained, end.outstanding, end.quarantined_bytes), (false, 1, 10 * PAGE));
}

#[test]
fn a_stuck_stream_keeps_only_its_own_buffers() {
    let rig = Rig::threads();
    let pool = rig.pool(64 << 10);
    let (stuck, going) = (rig.device.stream().unwrap(), rig.device.stream().unwrap());
    rig.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::Stall });
    send(&stuck, pool.checkout(pages(4)).unwrap());
    let held = stuck.hold(pool.checkout(pages(1)).unwrap()).unwrap();
    for _ in 0..50 {
        // All that the other stream uses is reused again and again.
        send(&going, pool.checkout_timeout(pages(8), HANG).unwrap());
    }
    going.synchronize().unwrap();
    until(|| pool.stats().in_flight_bytes == 5 * PAGE, || format!("{pool:?}"));
    assert!(!held.is_done().unwrap());
    let error = held.wait_timeout(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error.error, Error::Timeout(_)));
    rig.node.resume(0);
    drop(error.buffer.unwrap().wait().unwrap());
    stuck.synchronize().unwrap();
    until(|| pool.stats().in_flight_bytes == 0, || format!("{pool:?}"));
    let stats = checked(&pool);
    assert_eq!((stats.checked_out_bytes, stats.quarantined_bytes), (0, 0));
}

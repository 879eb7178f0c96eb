//! What goes wrong meanwhile: quarantine, streams that hang, panics, and pools that end before their buffers do.

use super::*;

#[test]
fn waiting_ends_when_quarantine_has_made_it_impossible() {
    for rig in Rig::both() {
        let pool = rig.pool(64 << 10);
        let stream = rig.device.stream().unwrap();
        rig.hang(true);
        let kept = pool.checkout(pages(6)).unwrap();
        send(&stream, pool.checkout(pages(10)).unwrap());
        let mut possible = Waiter::new(pool.checkout_async(pages(6)));
        let hopeless = [
            Waiter::new(pool.checkout_many_async([pages(7)])),
            Waiter::new(pool.checkout_many_async([pages(3), pages(4)])),
            Waiter::new(pool.checkout_many_async([pages(4), pages(4)])),
        ];
        rig.kill();
        eventually(
            || {
                rig.device.reap();
                (pool.stats().quarantined_bytes > 0).then_some(())
            },
            || format!("{pool:?}"),
        );
        for waiter in hopeless {
            eventually(|| (waiter.rung() == 1).then_some(()), || "it is not woken".into());
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
}

#[test]
fn a_stuck_stream_keeps_only_its_own_buffers() {
    for rig in Rig::both() {
        let pool = rig.pool(64 << 10);
        let (stuck, going) = (rig.device.stream().unwrap(), rig.device.stream().unwrap());
        rig.hang_stream(true);
        send(&stuck, pool.checkout(pages(4)).unwrap());
        let held = stuck.hold(pool.checkout(pages(1)).unwrap()).unwrap();
        for _ in 0..50 {
            // All that the other stream uses is reused again and again.
            send(&going, pool.checkout_timeout(pages(8), HANG).unwrap());
        }
        going.synchronize().unwrap();
        eventually(
            || {
                rig.device.reap();
                (pool.stats().in_flight_bytes == 5 * PAGE).then_some(())
            },
            || format!("{pool:?}"),
        );
        assert!(!held.is_done().unwrap());
        let error = held.wait_timeout(Duration::from_millis(1)).unwrap_err();
        assert!(matches!(error.error, Error::Timeout(_)));
        rig.hang_stream(false);
        drop(error.buffer.unwrap().wait().unwrap());
        stuck.synchronize().unwrap();
        let stats =
            eventually(|| Some(pool.stats()).filter(|s| s.in_flight_bytes == 0), || format!("{pool:?}"));
        assert_eq!((stats.checked_out_bytes, stats.quarantined_bytes), (0, 0));
        checked(&pool);
    }
}

#[test]
fn a_panic_in_the_callers_code_loses_nothing() {
    let rig = Rig::threads();
    let pool = rig.pool(2 << 20);
    let stream = rig.device.stream().unwrap();
    let quietly = std::panic::take_hook();
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("on purpose") {
            eprintln!("{info}");
        }
    }));
    for _ in 0..20 {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let mut filled = pool.checkout(1000).unwrap();
            filled.extend_from_slice(&[1; 1000]);
            let shared = Arc::new(filled);
            let memory = rig.device.alloc(1000).unwrap();
            let _sent = stream.upload(shared.clone(), &memory).unwrap();
            let _held = stream.hold(pool.checkout(5000).unwrap()).unwrap();
            let _ready = pool.checkout_on(&stream, 1000).unwrap();
            let _waiting = pool.checkout_async(10);
            let _several = pool.checkout_many(&[Request::new(10), pages(3)], None).unwrap();
            let _landing = stream.download(&memory, pool.checkout(1000).unwrap()).unwrap();
            panic!("on purpose");
        }));
        assert!(caught.is_err());
        // A thread that holds a thread cache panics.
        let thread = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _buf = (pool.checkout(100).unwrap(), pool.checkout(100).unwrap());
                    panic!("on purpose");
                })
                .join()
        });
        assert!(thread.is_err());
    }
    std::panic::set_hook(quietly);
    stream.synchronize().unwrap();
    let stats =
        eventually(|| Some(pool.stats()).filter(|s| s.checkouts == s.returns), || format!("{pool:?}"));
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes, stats.quarantined_bytes), (0, 0, 0));
    assert_eq!(stats.errors, Default::default());
    checked(&pool);
    drop((stream, pool));
    rig.all_is_given_back();
}

#[test]
fn a_panic_in_a_callback_loses_nothing() {
    struct Bomb;
    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            panic!("on purpose, in a waker");
        }
    }
    let rig = Rig::threads();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let pool = rig
        .builder(128 << 10)
        .before_unpin(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            panic!("on purpose, before unpinning");
        })
        .build()
        .unwrap();
    let stream = rig.device.stream().unwrap();
    let bomb = Waker::from(Arc::new(Bomb));
    let mut cx = Context::from_waker(&bomb);
    // Woken by the reaper, which has other waiters to wake and other buffers to return.
    rig.hang(true);
    let mut sent = Box::pin(stream.hold(pool.checkout(pages(30)).unwrap()).unwrap());
    assert!(sent.as_mut().poll(&mut cx).is_pending());
    let mut waiting: Pin<Box<Checkout>> = Box::pin(pool.checkout_async(pages(3)));
    assert!(waiting.as_mut().poll(&mut cx).is_pending());
    rig.hang(false);
    let landed = eventually(
        || match sent.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(buf) => Some(buf.unwrap()),
            Poll::Pending => None,
        },
        || format!("{pool:?}"),
    );
    drop(landed);
    let granted = block_on(waiting).unwrap();
    // And the reaper still works.
    send(&stream, granted);
    drop(pool.checkout_timeout(pages(32), HANG).unwrap());
    assert_eq!(checked(&pool).checked_out_bytes, 0);
    drop((stream, pool, sent));
    rig.all_is_given_back();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[test]
fn buffers_outlive_their_pool() {
    for rig in Rig::both() {
        let stream = rig.device.stream().unwrap();
        let memory = rig.device.alloc(4096).unwrap();
        let pool = rig.pool(1 << 20);
        let hog = pool.checkout(pages(240)).unwrap();
        let more = pool.checkout(pages(16)).unwrap();
        drop(hog);
        let mut out = pool.checkout(4096).unwrap();
        let unused = pool.checkout(4096).unwrap();
        let ready = pool.checkout_on(&stream, 1000).unwrap();
        let mut sent = pool.checkout(4096).unwrap();
        sent.extend_from_slice(&[6; 4096]);
        let sent = stream.upload(sent, &memory).unwrap();
        send(&stream, pool.checkout(1000).unwrap());
        // A thread still waits when the last handle is dropped: not for ever.
        let waiting = pool.clone().checkout_async(10);
        drop(pool);
        drop(waiting);
        assert!(rig.pinned() == 1 << 20);
        // All of it works on.
        out.extend_from_slice(&[8; 4096]);
        drop(sent.wait().unwrap());
        let back = stream.download(&memory, unused).unwrap().wait().unwrap();
        assert!(*back == [6; 4096] && *out == [8; 4096]);
        let out = stream.upload(out, &memory).unwrap().wait().unwrap();
        stream.synchronize().unwrap();
        drop((out, more, back, ready, memory, stream));
        rig.all_is_given_back();
    }
}

#[test]
fn shutting_down_ends_all_waits() {
    for rig in Rig::both() {
        let pool = rig.pool(128 << 10);
        let stream = rig.device.stream().unwrap();
        let all = [(); 2].map(|()| pool.checkout(pages(16)).unwrap());
        let one = Waiter::new(pool.checkout_async(1));
        let several = Waiter::new(pool.checkout_many_async([Request::new(1), Request::new(2)]));
        let threads = rig.has_threads();
        std::thread::scope(|scope| {
            let parked = threads.then(|| scope.spawn(|| pool.checkout(7)));
            if threads {
                eventually(|| (pool.stats().waiting == 3).then_some(()), || format!("{pool:?}"));
            }
            let end = pool.shutdown(Duration::ZERO);
            assert_eq!((end.drained, end.outstanding, end.quarantined_bytes), (false, 2, 0));
            checked(&pool);
            if let Some(parked) = parked {
                assert!(matches!(parked.join().unwrap(), Err(Error::Closed)));
            }
        });
        assert!(matches!(one.ready(), Err(Error::Closed)));
        assert!(matches!(several.ready(), Err(Error::Closed)));
        assert!(matches!(pool.checkout(1), Err(Error::Closed)));
        assert!(matches!(block_on(pool.checkout_async(1)), Err(Error::Closed)));
        let [a, b] = all;
        drop(a);
        send(&stream, b);
        let end = pool.shutdown(HANG);
        assert_eq!((end.drained, end.outstanding), (true, 0));
        assert_eq!(checked(&pool).free_bytes, 128 << 10);
        drop((pool, stream));
        rig.all_is_given_back();
    }
}

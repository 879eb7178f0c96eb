//! Requests that wait, handles that are waited for, and memory that is still in flight.

use std::time::Instant;

use pinpool::SubmitError;

use super::*;
use crate::support::is_pending;

/// Of which a pool of 64 KiB has room for one.
const LEN: usize = 60_000;
const ONE: usize = 64 << 10;

/// Callers that hold one buffer and wait for another can wait for each other for ever; here each asks for both at once.
#[test]
fn all_who_check_out_several_together_are_served() {
    on_every_device(|on| {
        // Three buffers, and five threads that need two each.
        let pool = on.pool(3 * ONE);
        let both = [Request::new(LEN), Request::new(LEN)];
        let work = |thread: usize| {
            let (stream, memory) = (on.stream(), on.device.alloc(LEN).unwrap());
            let mut served = 0;
            for round in 0..20 {
                let bufs = match (thread + round) % 2 {
                    0 => pool.checkout_many(&both, Some(HANG)).unwrap(),
                    _ => block_on(pool.checkout_many_async(both).timeout(HANG)).unwrap(),
                };
                assert_eq!(bufs.len(), 2);
                for mut buf in bufs {
                    buf.extend_from_slice(&bytes(round, LEN));
                    drop(stream.upload(buf, &memory).unwrap());
                }
                served += 1;
            }
            stream.synchronize().unwrap();
            served
        };
        let served: usize = std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = (0..5).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(served, 100);
        // All or nothing: what cannot be had together is not held in part.
        let out = pool.checkout_many(&both, None).unwrap();
        assert!(matches!(pool.checkout_many(&both, Some(Duration::ZERO)), Err(Error::Timeout(_))));
        // (The third one may still be on its way back: the thread that saw its copy complete returns it.)
        drop(pool.checkout_timeout(LEN, HANG).unwrap());
        drop(out);
        pool.check().unwrap();
    });
}

#[test]
fn waiting_ends_at_its_deadline_and_leaves_no_trace() {
    on_every_device(|on| {
        let (pool, stream, memory) = (on.pool(ONE), on.stream(), on.device.alloc(LEN).unwrap());
        let soon = Duration::from_millis(5);
        let since = Instant::now();
        let all = filled(&pool, &bytes(1, LEN));
        for error in [
            pool.checkout_timeout(LEN, soon).unwrap_err(),
            pool.checkout_many(&[LEN.into()], Some(soon)).unwrap_err(),
            block_on(pool.checkout_async(LEN).timeout(soon)).unwrap_err(),
        ] {
            assert!(matches!(&error, Error::Timeout(waited) if waited.time >= soon), "{error}");
        }
        assert!(matches!(pool.try_checkout(LEN), Err(Error::Exhausted(_))));
        assert_eq!(pool.stats().waiting, 0);
        // A copy's handle comes back from a wait that was too short, and the copy goes on.
        on.hang(true);
        let flight = stream.upload(all, &memory).unwrap();
        let flight = match flight.wait_timeout(soon) {
            Err(SubmitError { error: Error::Timeout(_), buffer: Some(flight) }) => flight,
            other => panic!("{other:?}"),
        };
        assert!(since.elapsed() < HANG, "far too late");
        on.hang(false);
        let buf = match flight.wait_timeout(Duration::ZERO) {
            Ok(buf) => buf,
            Err(early) => early.buffer.unwrap().wait_timeout(Duration::MAX).unwrap(),
        };
        assert!(*buf == *bytes(1, LEN));
        // A deadline that is not reached changes nothing.
        drop(buf);
        drop(pool.checkout_timeout(LEN, Duration::MAX).unwrap());
        pool.check().unwrap();
    });
}

#[test]
fn tasks_wait_for_buffers_and_for_copies() {
    on_every_device(|on| {
        let (pool, stream, memory) = (on.pool(ONE), on.stream(), on.device.alloc(LEN).unwrap());
        for round in 0..5 {
            let mut buf = block_on(pool.checkout_async(LEN)).unwrap();
            buf.extend_from_slice(&bytes(round, LEN));
            let buf = block_on(stream.upload(buf, &memory).unwrap()).unwrap();
            let back = block_on(stream.download(&memory, buf).unwrap()).unwrap();
            assert!(*back == *bytes(round, LEN));
            // Woken by a copy's end, and by another thread's return.
            drop(stream.upload(back, &memory).unwrap());
            let held = block_on(pool.checkout_async(LEN)).unwrap();
            std::thread::scope(|scope| {
                let task = scope.spawn(|| block_on(pool.checkout_async(LEN)).map(drop));
                until("the task waits", || pool.stats().waiting == 1);
                drop(held);
                task.join().unwrap().unwrap();
            });
        }
        pool.check().unwrap();
    });
}

#[test]
fn a_future_may_be_dropped_at_any_time() {
    on_every_device(|on| {
        let (pool, stream, memory) = (on.pool(ONE), on.stream(), on.device.alloc(LEN).unwrap());
        let idle = |on: &On| {
            until("all is back", || {
                on.device.reap();
                let stats = pool.stats();
                stats.checked_out_bytes + stats.in_flight_bytes == 0
            });
            assert_eq!(pool.stats().waiting, 0);
            drop(pool.checkout_timeout(LEN, HANG).unwrap());
        };
        // Never polled.
        drop(pool.checkout_async(LEN));
        // While it waits: it leaves the queue.
        let held = filled(&pool, &bytes(1, LEN));
        let (mut one, mut several) = (pool.checkout_async(LEN), pool.checkout_many_async([LEN.into()]));
        assert!(is_pending(&mut one) && is_pending(&mut several));
        assert_eq!(pool.stats().waiting, 2);
        drop(one);
        assert_eq!(pool.stats().waiting, 1);
        // Granted, and dropped before it was polled again: the buffer goes back.
        drop(held);
        drop(several);
        idle(on);
        // A copy goes on without its handle, and the buffer returns when it is complete.
        on.hang(true);
        let mut flight = stream.upload(filled(&pool, &bytes(2, LEN)), &memory).unwrap();
        assert!(is_pending(&mut flight));
        drop(flight);
        assert!(pool.try_checkout(LEN).is_err(), "the device still reads it");
        on.hang(false);
        idle(on);
        let mut back = vec![0; LEN];
        stream.download_blocking(&memory, &mut back).unwrap();
        assert!(back == bytes(2, LEN));
        pool.check().unwrap();
    });
}

/// Memory that a stream still reads is given to later work of the same stream, and to nobody else.
#[test]
fn a_stream_gets_the_memory_that_it_still_reads() {
    on_every_device(|on| {
        let (pool, stream, other) = (on.pool(ONE), on.stream(), on.stream());
        let (first, second) = (on.device.alloc(LEN).unwrap(), on.device.alloc(LEN).unwrap());
        stream.upload_blocking(&bytes(2, LEN), &second).unwrap();
        on.hang(true);
        let sent = filled(&pool, &bytes(1, LEN));
        let at = sent.as_ptr();
        drop(stream.upload(sent, &first).unwrap());
        assert!(matches!(pool.try_checkout(LEN), Err(Error::Exhausted(_))));
        assert!(matches!(pool.try_checkout_on(&other, LEN), Err(Error::Exhausted(_))));
        let claimed = pool.checkout_on(&stream, LEN).unwrap();
        assert!(claimed.was_claimed());
        // Not on another stream, and not for the CPU until the stream is done with it.
        let claimed = match other.download(&second, claimed) {
            Err(SubmitError {
                error: Error::Mismatch { what: "a stream-ready buffer", .. },
                buffer: Some(claimed),
            }) => claimed,
            wrong => panic!("{wrong:?}"),
        };
        let back = stream.download(&second, claimed).unwrap();
        assert!(!back.is_done().unwrap());
        on.hang(false);
        // The upload has read its bytes before the download wrote over them.
        let back = back.wait().unwrap();
        assert!(*back == *bytes(2, LEN) && back.as_ptr() == at);
        drop(back);
        let mut uploaded = vec![0; LEN];
        stream.download_blocking(&first, &mut uploaded).unwrap();
        assert!(uploaded == bytes(1, LEN));
        pool.check().unwrap();
    });
}

//! The six scenarios, each written once: a round of it.
//!
//! A round compares by itself; it drops handles at once, a little later, or after waiting for them in one of
//! several ways.

use std::sync::Arc;

use pinpool::PinnedBuf;

use super::worker::replay;
use super::{SLOTS, WORDS};

/// A server fills its buffer for the next batch while the copy of this batch has not read it yet.
#[test]
fn source_overwritten_before_the_copy_reads() {
    replay("source_overwritten_before_the_copy_reads", 1, |w| {
        let mut sent = Vec::new();
        for slot in 0..SLOTS {
            let (buf, seq, n) = w.filled();
            drop(w.streams[0].upload(buf, w.slot(slot, n)).unwrap());
            sent.push((slot, seq, n));
        }
        w.streams[0].synchronize().unwrap();
        w.expect_on_device(&sent);
    });
}

/// A request's buffer goes back to the pool when its handle is dropped, and another thread fills it.
#[test]
fn returned_on_drop_while_in_flight() {
    replay("returned_on_drop_while_in_flight", 2, |w| {
        let mut sent = Vec::new();
        let mut kept = Vec::new();
        for slot in 0..SLOTS {
            let stream = slot % 2;
            let (buf, seq, n) = w.filled();
            let flight = w.streams[stream].upload(buf, w.slot(slot, n)).unwrap();
            // Some handles are dropped a little later, in any order.
            kept.push(flight);
            if kept.len() > 3 {
                drop(kept.swap_remove(w.random.below(4) as usize));
            }
            sent.push((slot, seq, n));
        }
        drop(kept);
        w.streams[0].synchronize().unwrap();
        w.streams[1].synchronize().unwrap();
        w.expect_on_device(&sent);
    });
}

/// A result is read right after its download was submitted.
#[test]
fn download_read_at_once() {
    replay("download_read_at_once", 1, |w| {
        let first = w.fill_device();
        let mut late = Vec::new();
        for slot in 0..SLOTS {
            let (n, seq) = (w.random.len(), first + slot as u64);
            let (stream, source) = (slot % 2, w.slot(slot, n));
            let flight = if w.random.one_in(2) {
                w.sum.checkouts += 1;
                let landing = w.pool.checkout_on(&w.streams[stream], w.len_of(n)).unwrap();
                // A claimed buffer continues the same checkout, with another length.
                w.sum.checkouts -= u64::from(landing.was_claimed());
                w.streams[stream].download(source, landing).unwrap()
            } else {
                let landing = w.checkout(n);
                w.streams[stream].download(source, landing).unwrap()
            };
            match w.random.below(4) {
                // The handle is dropped; its memory may be claimed while the copy is under way.
                0 => drop(flight),
                1 if late.len() < 8 => late.push((flight, seq, n)),
                _ => {
                    let buf = w.land(flight);
                    w.expect_in(&buf, seq, n);
                }
            }
        }
        while let Some((flight, seq, n)) = late.pop() {
            let buf = w.land(flight);
            w.expect_in(&buf, seq, n);
        }
    });
}

/// One buffer feeds copies on two streams, and goes back when the first is done.
#[test]
fn two_streams_with_one_shared_buffer() {
    replay("two_streams_with_one_shared_buffer", 2, |w| {
        let mut sent = Vec::new();
        for pair in 0..SLOTS / 2 {
            let (buf, seq, n) = w.filled();
            let shared = Arc::new(buf);
            let [a, b] = [0, 1].map(|s| {
                sent.push((pair * 2 + s, seq, n));
                w.streams[s].upload(shared.clone(), w.slot(pair * 2 + s, n)).unwrap()
            });
            drop(shared);
            match w.random.below(4) {
                0 => drop((a, b)),
                // Done on one of them.
                1 => drop(a.wait().unwrap()),
                2 => drop(b.wait().unwrap()),
                _ => {
                    // Held by both, for work that the pool does not see.
                    let (held, seq, n) = w.filled();
                    let held = Arc::new(held);
                    let flights = [0, 1].map(|s| w.streams[s].hold(held.clone()).unwrap());
                    if w.random.one_in(2) {
                        flights.into_iter().for_each(|flight| drop(w.land(flight)));
                        w.expect_in(&held, seq, n);
                    }
                }
            }
        }
        w.streams[0].synchronize().unwrap();
        w.streams[1].synchronize().unwrap();
        w.expect_on_device(&sent);
    });
}

/// A request is aborted while its blocks are being fetched; the next request gets them, and the late copies
/// write there.
#[test]
fn aborted_half_way() {
    const BLOCKS: usize = 8;
    replay("aborted_half_way", 2, |w| {
        let first = w.fill_device();
        for _ in 0..4 {
            // A request fetches blocks, and is aborted somewhere in the middle.
            let stop = w.random.below(BLOCKS as u64 + 1) as usize;
            let mut fetched = Vec::new();
            for block in 0..BLOCKS {
                let landing = w.checkout(WORDS);
                if block >= stop {
                    // Aborted: the copy was never submitted.
                    break;
                }
                fetched.push(w.streams[block % 2].download(w.slot(block, WORDS), landing).unwrap());
            }
            drop(fetched);
            // The next request has buffers of its own, and no copy of another writes to them.
            let mut next = Vec::new();
            for _ in 0..BLOCKS {
                next.push(w.filled());
            }
            w.drift();
            let mut sent = Vec::new();
            for (block, (buf, seq, n)) in next.into_iter().enumerate() {
                w.expect_in(&buf, seq, n);
                let slot = BLOCKS + block;
                let flight = w.streams[0].upload(buf, w.slot(slot, n)).unwrap();
                if w.random.one_in(2) {
                    let buf = w.land(flight);
                    w.expect_in(&buf, seq, n);
                }
                sent.push((slot, seq, n));
            }
            w.streams[0].synchronize().unwrap();
            w.expect_on_device(&sent);
        }
        // What was fetched is still what it was.
        let kept: Vec<_> = (0..BLOCKS).map(|s| (s, first + s as u64, WORDS)).collect();
        w.expect_on_device(&kept);
    });
}

/// A copy is reported as failed, or polling it fails, and a server takes that for its end; but the copy runs.
#[test]
fn error_reported_as_done() {
    let failures = replay("error_reported_as_done", 1, |w| {
        let first = w.fill_device();
        let mut sent = Vec::new();
        let mut next: Vec<(PinnedBuf, u64, usize)> = Vec::new();
        for slot in 0..SLOTS / 2 {
            let mut source = w.slot(slot, WORDS);
            if w.random.one_in(3) {
                source = w.machine().fail_copy(source);
            }
            if w.random.one_in(3) {
                let capture = w.random.one_in(2);
                w.machine().fail_query(capture);
            }
            if w.random.one_in(4) {
                w.machine().fail_record();
            }
            let landing = w.checkout(WORDS);
            match w.streams[slot % 2].download(source, landing) {
                Ok(flight) if w.random.one_in(2) => {
                    let buf = w.patiently(flight);
                    w.expect_in(&buf, first + slot as u64, WORDS);
                }
                Ok(flight) => drop(flight),
                Err(e) => {
                    assert!(e.buffer.is_none(), "the driver was called: {e}");
                    w.sum.failures += 1;
                }
            }
            // These were free, so no copy writes to them, failed or not.
            next.push(w.filled());
            if next.len() > 6 {
                let at = w.random.below(6) as usize;
                let (buf, seq, n) = next.swap_remove(at);
                w.expect_in(&buf, seq, n);
                let target = w.slot(SLOTS / 2 + slot, n);
                if let Ok(flight) = w.streams[1].upload(buf, target) {
                    sent.push((SLOTS / 2 + slot, seq, n));
                    if w.random.one_in(2) {
                        let buf = w.patiently(flight);
                        w.expect_in(&buf, seq, n);
                    }
                }
            }
        }
        for (buf, seq, n) in next {
            w.expect_in(&buf, seq, n);
        }
        w.machine().calm();
        w.streams[1].synchronize().unwrap();
        w.expect_on_device(&sent);
    });
    assert!(failures > 0, "no copy failed");
}

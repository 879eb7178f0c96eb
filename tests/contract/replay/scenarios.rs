//! The six scenarios, each written once: a round of it on the plain pool, and one on pinpool.
//!
//! A round on the plain pool tells how many messages it got wrong. A round on pinpool compares by itself; it drops
//! handles at once, a little later, or after waiting for them in one of several ways.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pinpool::PinnedBuf;

use super::plain::{Engine, Words, memory};
use super::worker::{Site, replay};
use super::{SLOTS, WORDS};

/// A server fills its buffer for the next batch while the copy of this batch has not read it yet.
pub fn source_overwritten_before_the_copy_reads(site: &dyn Site) {
    let (engine, memory) = (Engine::new(8), memory());
    replay(
        site,
        "source overwritten before the copy reads",
        1,
        |pool, random, first| {
            let mut sent = Vec::new();
            for (slot, target) in memory.iter().enumerate() {
                let (buf, seq, n) = (pool.checkout(), first + slot as u64, random.len());
                buf.words.write(seq, n);
                engine.copy(&buf.words, target, n);
                sent.push((slot, seq, n));
            }
            engine.synchronize();
            sent.iter().filter(|&&(slot, seq, n)| !memory[slot].is(seq, n)).count() as u64
        },
        |w| {
            let mut sent = Vec::new();
            for slot in 0..SLOTS {
                let (buf, seq, n) = w.filled();
                drop(w.streams[0].upload(buf, w.slot(slot, n)).unwrap());
                sent.push((slot, seq, n));
            }
            w.streams[0].synchronize().unwrap();
            w.expect_on_device(&sent);
        },
    );
}

/// A request's buffer goes back to the pool when its handle is dropped, and another thread fills it.
pub fn returned_on_drop_while_in_flight(site: &dyn Site) {
    let (engines, memories) = ([(); 2].map(|()| Engine::new(4)), [(); 2].map(|()| memory()));
    replay(
        site,
        "returned on drop while in flight",
        2,
        |pool, _, first| {
            let one = |w: usize| {
                let first = first + w as u64 * 5_000;
                for (slot, target) in memories[w].iter().enumerate() {
                    let buf = pool.checkout();
                    buf.words.write(first + slot as u64, WORDS);
                    engines[w].copy(&buf.words, target, WORDS);
                }
                engines[w].synchronize();
                (0..SLOTS).filter(|&s| !memories[w][s].is(first + s as u64, WORDS)).count() as u64
            };
            std::thread::scope(|scope| {
                let other = scope.spawn(|| one(1));
                one(0) + other.join().unwrap()
            })
        },
        |w| {
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
        },
    );
}

/// A result is read right after its download was submitted.
pub fn download_read_at_once(site: &dyn Site) {
    let (engine, memory) = (Engine::new(8), memory());
    replay(
        site,
        "download read at once",
        1,
        |pool, _, first| {
            memory.iter().enumerate().for_each(|(s, m)| m.write(first + s as u64, WORDS));
            let mut wrong = 0;
            for (slot, source) in memory.iter().enumerate() {
                let buf = pool.checkout();
                engine.copy(source, &buf.words, WORDS);
                wrong += u64::from(!buf.words.is(first + slot as u64, WORDS));
            }
            engine.synchronize();
            wrong
        },
        |w| {
            let first = w.fill_device();
            let mut late = Vec::new();
            for slot in 0..SLOTS {
                let (n, seq) = (w.random.len(), first + slot as u64);
                let (stream, source) = (slot % 2, w.slot(slot, n));
                let flight = if w.random.one_in(2) {
                    w.checkouts += 1;
                    let landing = w.pool.checkout_on(&w.streams[stream], w.len_of(n)).unwrap();
                    // A claimed buffer continues the same checkout, with another length.
                    w.checkouts -= u64::from(landing.was_claimed());
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
        },
    );
}

/// One buffer feeds copies on two streams, and goes back when the first is done.
pub fn two_streams_with_one_shared_buffer(site: &dyn Site) {
    let engines = [Engine::new(0), Engine::new(8)];
    let memories = [memory(), memory()];
    replay(
        site,
        "two streams with one shared buffer",
        2,
        |pool, _, first| {
            for (slot, (one, other)) in memories[0].iter().zip(&memories[1]).enumerate() {
                let buf = pool.checkout();
                buf.words.write(first + slot as u64, WORDS);
                engines[0].copy(&buf.words, one, WORDS);
                engines[1].copy(&buf.words, other, WORDS);
                engines[0].synchronize();
            }
            engines[1].synchronize();
            let wrong =
                |m: &[Arc<Words>]| (0..SLOTS).filter(|&s| !m[s].is(first + s as u64, WORDS)).count() as u64;
            wrong(&memories[0]) + wrong(&memories[1])
        },
        |w| {
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
        },
    );
}

/// A request is aborted while its blocks are being fetched; the next request gets them, and the late copies write
/// there.
pub fn aborted_half_way(site: &dyn Site) {
    let (engine, memory) = (Engine::new(16), memory());
    const BLOCKS: usize = 8;
    replay(
        site,
        "aborted half-way",
        2,
        |pool, _, first| {
            let fetched: Vec<_> = (0..BLOCKS).map(|_| pool.checkout()).collect();
            fetched.iter().zip(&memory).for_each(|(buf, m)| engine.copy(m, &buf.words, WORDS));
            drop(fetched);
            let next: Vec<_> = (0..BLOCKS).map(|_| pool.checkout()).collect();
            next.iter().enumerate().for_each(|(i, buf)| buf.words.write(first + i as u64, WORDS));
            engine.synchronize();
            next.iter().enumerate().filter(|(i, buf)| !buf.words.is(first + *i as u64, WORDS)).count() as u64
        },
        |w| {
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
        },
    );
}

/// A copy is reported as failed, or polling it fails, and a server takes that for its end; but the copy runs.
pub fn error_reported_as_done(site: &dyn Site) {
    let (engine, memory) = (Engine::new(8), memory());
    let failures = AtomicU64::new(0);
    replay(
        site,
        "error reported as done",
        1,
        |pool, random, first| {
            let mut wrong = 0;
            for (i, source) in memory.iter().enumerate() {
                let buf = pool.checkout();
                engine.copy(source, &buf.words, WORDS);
                if random.one_in(4) {
                    // Said to have failed, so a plain server takes it for complete: the buffer goes back.
                    drop(buf);
                    let next = pool.checkout();
                    next.words.write(first + i as u64, WORDS);
                    engine.synchronize();
                    wrong += u64::from(!next.words.is(first + i as u64, WORDS));
                } else {
                    engine.synchronize();
                }
            }
            wrong
        },
        |w| {
            let first = w.fill_device();
            let mut sent = Vec::new();
            let mut next: Vec<(PinnedBuf, u64, usize)> = Vec::new();
            for slot in 0..SLOTS / 2 {
                let mut source = w.slot(slot, WORDS);
                if w.random.one_in(3) {
                    source = w.machine.fail_copy(source);
                }
                if w.random.one_in(3) {
                    let capture = w.random.one_in(2);
                    w.machine.fail_query(capture);
                }
                if w.random.one_in(4) {
                    w.machine.fail_record();
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
                        failures.fetch_add(1, Ordering::Relaxed);
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
            w.machine.calm();
            w.streams[1].synchronize().unwrap();
            w.expect_on_device(&sent);
        },
    );
    assert!(failures.into_inner() > 0, "no copy failed");
}

//! The field's early-reuse bugs, replayed.
//!
//! Four ways in which servers lost or mixed up bytes because a pinned buffer was used again, or read, while a copy was
//! still under way: pinpool must not get a single byte wrong, nor lose a buffer. (A fifth, an error that was taken for
//! the end of a copy, is in `faults`, where every call is said to fail that does its work all the same.)
//!
//! A round compares by itself; it drops handles at once, a little later, or after waiting for them in one of several
//! ways. On a real GPU a kernel of a tenth of a millisecond now and then holds up a stream whose handle was given out,
//! so that dozens of copies are in flight behind it while their handles are dropped.

use std::collections::HashSet;

use pinpool::{InFlight, Lend};

use super::*;
use crate::support::{Random, variable};
#[cfg(feature = "cuda")]
use crate::support::{doubles::StandIn, kernels::Kernels};

/// Of the longest message, and of a slot of device memory.
const BYTES: usize = 512;
/// Slots that a worker has, and transfers of a round.
const SLOTS: usize = 64;
/// How long the kernels run that hold up a stream.
#[cfg(feature = "cuda")]
const HOLD_UP_NANOSECONDS: u64 = 100_000;

/// One thread of a server, with streams and device memory of its own.
struct Worker<'a> {
    on: &'a Subject,
    pool: &'a Pool,
    /// Whether it asks for just what is needed, in many classes, or for one size only.
    exact: bool,
    streams: [Stream; 2],
    memory: DeviceSlice,
    #[cfg(feature = "cuda")]
    kernels: Option<Kernels<'static>>,
    random: Random,
    seq: usize,
    checkouts: usize,
    /// Where the buffers were.
    places: HashSet<usize>,
}

/// A message in a slot: its number and length.
type Sent = (usize, usize, usize);

/// The kernels of a real GPU whose streams' handles are given out, for this thread.
#[cfg(feature = "cuda")]
fn kernels(on: &Subject) -> Option<Kernels<'static>> {
    static RAW: std::sync::OnceLock<StandIn> = std::sync::OnceLock::new();
    (on.shared && !on.is_ascend() && on.is_real()).then(|| {
        let raw = RAW.get_or_init(StandIn::of_this_process);
        raw.current(pinpool::cuda::raw_context(&on.device).unwrap() as usize);
        Kernels::load(raw)
    })
}

impl Worker<'_> {
    /// Moves a device a little that is moved by hand, and holds up a real GPU now and then.
    fn drift(&mut self) {
        if !self.on.has_threads() && self.random.one_in(3) {
            self.on.pump();
        }
        #[cfg(feature = "cuda")]
        if let Some(kernels) = self.kernels.as_ref().filter(|_| self.random.one_in(32)) {
            let stream = pinpool::cuda::raw_stream(&self.streams[self.random.below(2)]).unwrap();
            kernels.spin(HOLD_UP_NANOSECONDS, stream as usize);
        }
    }

    fn any_len(&mut self) -> usize {
        64 + self.random.below(BYTES - 63)
    }

    fn request(&mut self, len: usize) -> usize {
        self.checkouts += 1;
        self.drift();
        if self.exact { len } else { BYTES }
    }

    fn checkout(&mut self, len: usize) -> PinnedBuf {
        let buf = self.pool.checkout(self.request(len)).unwrap();
        self.places.insert(buf.as_ptr().addr());
        buf
    }

    /// A buffer that holds a new message: its number and length come with it.
    fn filled(&mut self) -> (PinnedBuf, usize, usize) {
        let len = self.any_len();
        let mut buf = self.checkout(len);
        self.seq += 1;
        buf.extend_from_slice(&bytes(self.seq, len));
        (buf, self.seq, len)
    }

    fn slot(&self, slot: usize, len: usize) -> DeviceSlice {
        self.memory.slice(slot * BYTES..slot * BYTES + len).unwrap()
    }

    /// Waits for both streams and compares what lies in device memory.
    fn expect_on_device(&self, messages: &[Sent]) {
        self.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        let mut all = vec![0; SLOTS * BYTES];
        self.streams[0].download_blocking(&self.memory, &mut all).unwrap();
        for &(slot, seq, len) in messages {
            assert!(all[slot * BYTES..][..len] == bytes(seq, len), "message {seq} in slot {slot}");
        }
    }

    /// Fills all slots with messages of full length; the first one's number.
    fn fill_device(&mut self) -> usize {
        let first = self.seq + 1;
        self.seq += SLOTS;
        let all: Vec<u8> = (first..=self.seq).flat_map(|seq| bytes(seq, BYTES)).collect();
        // Downloads of the round before whose handles were dropped may still read there, on the other stream:
        // nothing but this orders two streams, for a blocking copy as for any other.
        self.streams[0].wait_for(&self.streams[1]).unwrap();
        self.streams[0].upload_blocking(&all, &self.memory).unwrap();
        first
    }

    /// Waits for a handle in one of the ways that there are.
    fn land<B: Lend>(&mut self, flight: InFlight<B>) -> B {
        match self.random.below(3) {
            0 => return block_on(|| self.on.pump(), flight).unwrap(),
            1 => {
                while !flight.is_done().unwrap() {
                    self.on.pump();
                }
            }
            _ => {}
        }
        flight.wait().unwrap()
    }
}

/// Runs rounds on workers of one pool until they have checked out enough buffers, and looks for lost ones: with many
/// classes, and with so little memory of one class that a round does not fit and a worker always waits for what is in
/// flight.
fn replay(on: &Subject, workers: usize, round: impl Fn(&mut Worker<'_>) + Sync) {
    let workers = if on.has_threads() { workers } else { 1 };
    let all = variable("PINPOOL_REPLAY", 2000) as usize;
    for (exact, capacity) in [(true, 64 << 10), (false, 24 << 10)] {
        let pool = on.pool(capacity);
        std::thread::scope(|scope| {
            let start = |number| {
                let (pool, round) = (&pool, &round);
                scope.spawn(move || {
                    let mut worker = Worker {
                        on,
                        pool,
                        exact,
                        streams: [on.stream(), on.stream()],
                        memory: on.alloc(SLOTS * BYTES),
                        #[cfg(feature = "cuda")]
                        kernels: kernels(on),
                        random: Random::new(number as u64),
                        seq: number * 1_000_003,
                        checkouts: 0,
                        places: HashSet::new(),
                    };
                    while worker.checkouts < all / 2 / workers {
                        round(&mut worker);
                    }
                    // Early reuse can only show where there is reuse.
                    let (checkouts, places) = (worker.checkouts, worker.places.len());
                    assert!(checkouts > places * 3 / 2, "{checkouts} checkouts of {places} buffers");
                })
            };
            // Joined, unlike at the scope's end, a thread has given up what it caches of the pool.
            let threads: Vec<_> = (0..workers).map(start).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        all_back(on, &pool);
        let stats = pool.stats();
        assert_eq!((stats.checkouts, stats.quarantined_bytes), (stats.returns, 0), "{stats:?}");
        assert_eq!(
            stats.free_bytes + stats.cut_bytes,
            stats.pinned_bytes + stats.unpinned_bytes,
            "{stats:?}"
        );
    }
}

/// A request's buffer goes back to the pool when its handle is dropped, and is filled for the next batch while the copy of
/// this batch has not read it yet; by this thread or another one.
pub fn returned(on: &Subject) {
    replay(on, 2, |w| {
        let (mut sent, mut kept) = (Vec::new(), Vec::new());
        for slot in 0..SLOTS {
            let (buf, seq, len) = w.filled();
            kept.push(w.streams[slot % 2].upload(buf, w.slot(slot, len)).unwrap());
            // At once, or a little later in any order.
            if kept.len() > 3 || w.random.one_in(2) {
                drop(kept.swap_remove(w.random.below(kept.len())));
            }
            sent.push((slot, seq, len));
        }
        drop(kept);
        w.expect_on_device(&sent);
    });
}

/// A result is read right after its download was submitted.
pub fn read_at_once(on: &Subject) {
    replay(on, 1, |w| {
        let first = w.fill_device();
        let mut late = Vec::new();
        for slot in 0..SLOTS {
            let (len, seq) = (w.any_len(), first + slot);
            let (stream, source) = (slot % 2, w.slot(slot, len));
            let flight = if w.random.one_in(2) {
                let len = w.request(len);
                let landing = w.pool.checkout_on(&w.streams[stream], len).unwrap();
                w.streams[stream].download(source, landing).unwrap()
            } else {
                let landing = w.checkout(len);
                w.streams[stream].download(source, landing).unwrap()
            };
            match w.random.below(4) {
                // The handle is dropped; its memory may be claimed while the copy is under way.
                0 => drop(flight),
                1 if late.len() < 8 => late.push((flight, seq, len)),
                _ => assert!(*w.land(flight) == *bytes(seq, len), "message {seq}"),
            }
        }
        for (flight, seq, len) in late.into_iter().rev() {
            assert!(*w.land(flight) == *bytes(seq, len), "message {seq}");
        }
    });
}

/// One buffer feeds copies on two streams, and goes back when the first is done.
pub fn shared(on: &Subject) {
    replay(on, 2, |w| {
        let mut sent = Vec::new();
        for pair in 0..SLOTS / 2 {
            let (buf, seq, len) = w.filled();
            let shared = Arc::new(buf);
            let [a, b] = [0, 1].map(|s| {
                sent.push((pair * 2 + s, seq, len));
                w.streams[s].upload(shared.clone(), w.slot(pair * 2 + s, len)).unwrap()
            });
            assert!(**shared == *bytes(seq, len), "it can be read meanwhile");
            drop(shared);
            match w.random.below(4) {
                0 => drop((a, b)),
                // Done on one of them.
                1 => drop(a.wait().unwrap()),
                2 => drop(b.wait().unwrap()),
                _ => {
                    // Held by both, for work that the pool does not see.
                    let (held, seq, len) = w.filled();
                    let held = Arc::new(held);
                    let flights = [0, 1].map(|s| w.streams[s].hold(held.clone()).unwrap());
                    if w.random.one_in(2) {
                        flights.into_iter().for_each(|flight| drop(w.land(flight)));
                        assert!(**held == *bytes(seq, len), "message {seq}");
                    }
                }
            }
        }
        w.expect_on_device(&sent);
    });
}

/// A request is aborted while its blocks are being fetched; the next request gets them, and the late copies
/// write there.
pub fn aborted(on: &Subject) {
    const BLOCKS: usize = 8;
    replay(on, 2, |w| {
        let first = w.fill_device();
        for _ in 0..4 {
            // A request fetches blocks, and is aborted somewhere in the middle: before a copy was submitted.
            let stop = w.random.below(BLOCKS + 1);
            let mut fetched = Vec::new();
            for block in 0..BLOCKS {
                let landing = w.checkout(BYTES);
                if block >= stop {
                    break;
                }
                fetched.push(w.streams[block % 2].download(w.slot(block, BYTES), landing).unwrap());
            }
            drop(fetched);
            // The next request has buffers of its own, and no copy of another writes to them.
            let next: Vec<_> = (0..BLOCKS).map(|_| w.filled()).collect();
            w.drift();
            let mut sent = Vec::new();
            for (block, (buf, seq, len)) in next.into_iter().enumerate() {
                assert!(*buf == *bytes(seq, len), "message {seq}");
                let slot = BLOCKS + block;
                let flight = w.streams[0].upload(buf, w.slot(slot, len)).unwrap();
                if w.random.one_in(2) {
                    assert!(*w.land(flight) == *bytes(seq, len), "message {seq}");
                }
                sent.push((slot, seq, len));
            }
            w.expect_on_device(&sent);
        }
        // What was fetched is still what it was.
        let kept: Vec<_> = (0..BLOCKS).map(|slot| (slot, first + slot, BYTES)).collect();
        w.expect_on_device(&kept);
    });
}

//! The field's early-reuse bugs, replayed.
//!
//! Six ways in which servers lost or mixed up bytes because a pinned buffer was used again, or read, while a copy was
//! still under way. Each is run twice: against a plain pool that takes a buffer back when its handle is dropped, with a
//! copy engine that is as late as real ones may be, and against pinpool on host devices that are just as late. The plain
//! pool is seen to corrupt; pinpool must not get a single byte wrong, nor lose a buffer.
//!
//! The plain pool's bytes are relaxed atomics, so that its race is a defined one: what it reads is wrong, the test is not.
//!
//! `PINPOOL_REPLAY=full` runs at least 1,700,000 checkouts in each scenario, 10,200,000 in all; otherwise a small part.
//! Most of them are on the threaded device, where streams run late and against each other, some with random delays, and
//! a quarter on the stepped device, where a copy runs only when nobody can go on without it or the seed says so.

use std::collections::HashSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Device, DeviceBuffer, DeviceSlice, InFlight, PinnedBuf, Pool, Stream};

/// Checkouts per scenario when everything is run.
const FULL: u64 = 1_700_000;
const _: () = assert!(6 * FULL >= 10_000_000 && FULL >= 1_000_000);

/// Words of a slot of device memory, which is what the longest buffer has: 512 bytes.
const WORDS: usize = 64;
const BYTES: usize = WORDS * 8;
/// Slots that a worker has, and transfers of a round.
const SLOTS: usize = 64;

fn target() -> u64 {
    if std::env::var("PINPOOL_REPLAY").is_ok_and(|v| v == "full") { FULL } else { 40_000 }
}

/// Word `i` of the message with this number. (The mixing of splitmix64.)
fn word(seq: u64, i: usize) -> u64 {
    let mut x = seq.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i as u64);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn message(seq: u64, n: usize) -> [u64; WORDS] {
    std::array::from_fn(|i| if i < n { word(seq, i) } else { 0 })
}

fn is_message(words: &[u64], seq: u64) -> bool {
    words.iter().enumerate().all(|(i, &w)| w == word(seq, i))
}

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        word(self.0, 7) % n
    }

    /// Words of a message.
    fn len(&mut self) -> usize {
        8 + self.below(WORDS as u64 - 7) as usize
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

// --- the plain pool --------------------------------------------------------------------------------------------------

/// What many servers have: a list of buffers under a lock, and a handle that returns its buffer when it is dropped.
mod plain {
    use std::collections::VecDeque;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
    use std::sync::{Arc, Mutex};
    use std::thread::JoinHandle;

    pub struct Words([AtomicU64; super::WORDS]);

    impl Words {
        pub fn new() -> Self {
            Self(std::array::from_fn(|_| AtomicU64::new(0)))
        }

        pub fn write(&self, seq: u64, n: usize) {
            (0..n).for_each(|i| self.0[i].store(super::word(seq, i), Ordering::Relaxed));
        }

        pub fn is(&self, seq: u64, n: usize) -> bool {
            (0..n).all(|i| self.0[i].load(Ordering::Relaxed) == super::word(seq, i))
        }

        fn copy(&self, to: &Self, n: usize) {
            (0..n).for_each(|i| to.0[i].store(self.0[i].load(Ordering::Relaxed), Ordering::Relaxed));
        }
    }

    #[derive(Default)]
    pub struct Pool {
        free: Mutex<Vec<Arc<Words>>>,
        pub checkouts: AtomicU64,
    }

    pub struct Buf<'a> {
        pub words: Arc<Words>,
        pool: &'a Pool,
    }

    impl Pool {
        pub fn checkout(&self) -> Buf<'_> {
            self.checkouts.fetch_add(1, Ordering::Relaxed);
            let words = self.free.lock().unwrap().pop();
            Buf { words: words.unwrap_or_else(|| Arc::new(Words::new())), pool: self }
        }
    }

    impl Drop for Buf<'_> {
        fn drop(&mut self) {
            self.pool.free.lock().unwrap().push(self.words.clone());
        }
    }

    enum Job {
        Copy(Arc<Words>, Arc<Words>, usize),
        Sync(SyncSender<()>),
    }

    /// A stream: copies in order, each only when `lag` more have been submitted or somebody waits.
    pub struct Engine {
        jobs: Option<Sender<Job>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Engine {
        pub fn new(lag: usize) -> Self {
            let (jobs, queue) = channel();
            let thread = std::thread::spawn(move || serve(&queue, lag));
            Self { jobs: Some(jobs), thread: Some(thread) }
        }

        fn send(&self, job: Job) {
            self.jobs.as_ref().unwrap().send(job).unwrap();
        }

        pub fn copy(&self, from: &Arc<Words>, to: &Arc<Words>, n: usize) {
            self.send(Job::Copy(from.clone(), to.clone(), n));
        }

        pub fn synchronize(&self) {
            let (tell, told) = sync_channel(1);
            self.send(Job::Sync(tell));
            told.recv().unwrap();
        }
    }

    fn serve(queue: &Receiver<Job>, lag: usize) {
        let mut late = VecDeque::new();
        let run = |(from, to, n): (Arc<Words>, Arc<Words>, usize)| from.copy(&to, n);
        for job in queue {
            match job {
                Job::Copy(from, to, n) => {
                    late.push_back((from, to, n));
                    if late.len() > lag {
                        late.pop_front().into_iter().for_each(run);
                    }
                }
                Job::Sync(tell) => {
                    late.drain(..).for_each(run);
                    tell.send(()).unwrap();
                }
            }
        }
    }

    impl Drop for Engine {
        fn drop(&mut self) {
            self.jobs = None;
            self.thread.take().map(JoinHandle::join);
        }
    }

    /// A device's memory.
    pub fn memory() -> Vec<Arc<Words>> {
        (0..super::SLOTS).map(|_| Arc::new(Words::new())).collect()
    }
}

/// Runs rounds against a plain pool until it has given out so many buffers. Returns checkouts and corruptions.
fn plain(target: u64, round: impl Fn(&plain::Pool, &mut Random, u64) -> u64) -> (u64, u64) {
    let (pool, mut random) = (plain::Pool::default(), Random(1));
    let (mut wrong, mut seq) = (0, 1);
    while pool.checkouts.load(Ordering::Relaxed) < target {
        wrong += round(&pool, &mut random, seq);
        seq += 10_000;
    }
    (pool.checkouts.load(Ordering::Relaxed), wrong)
}

// --- pinpool ---------------------------------------------------------------------------------------------------------

/// One thread of a server, with streams and device memory of its own.
struct Worker<'a> {
    node: &'a HostNode,
    device: &'a Device,
    pool: &'a Pool,
    streams: [Stream; 2],
    memory: DeviceBuffer,
    stepped: bool,
    /// Ask for just what is needed, in many classes, or for one size only.
    exact: bool,
    random: Random,
    seq: u64,
    checkouts: u64,
    wrong: u64,
    verified: u64,
    /// Where the buffers were.
    places: HashSet<usize>,
}

impl Worker<'_> {
    /// Lets a stepped device do a little. Another one does so by itself.
    fn drift(&mut self) {
        if self.stepped {
            if self.random.one_in(3) {
                self.node.step();
            }
            if self.random.one_in(5) {
                self.device.reap();
            }
        }
    }

    fn len_of(&self, n: usize) -> usize {
        if self.exact { n * 8 } else { BYTES }
    }

    fn checkout(&mut self, n: usize) -> PinnedBuf {
        self.checkouts += 1;
        self.drift();
        let buf = self.pool.checkout(self.len_of(n)).unwrap();
        self.places.insert(buf.as_ptr().addr());
        buf
    }

    /// A buffer that holds a new message: its number and length come with it.
    fn filled(&mut self) -> (PinnedBuf, u64, usize) {
        let n = self.random.len();
        let mut buf = self.checkout(n);
        self.seq += 1;
        buf.try_extend_from(&message(self.seq, n)[..n]).unwrap();
        (buf, self.seq, n)
    }

    fn slot(&self, slot: usize, n: usize) -> DeviceSlice {
        self.memory.slice(slot * BYTES..slot * BYTES + n * 8).unwrap()
    }

    fn expect(&mut self, words: &[u64], seq: u64, n: usize) {
        self.verified += 1;
        self.wrong += u64::from(words.len() != n || !is_message(words, seq));
    }

    fn expect_in(&mut self, buf: &PinnedBuf, seq: u64, n: usize) {
        self.expect(buf.view::<u64>().unwrap(), seq, n);
    }

    /// Compares what lies in device memory: slot, number, length.
    fn expect_on_device(&mut self, messages: &[(usize, u64, usize)]) {
        let mut words = vec![0u64; SLOTS * WORDS];
        self.streams[0].download_blocking(&self.memory, bytemuck::cast_slice_mut(&mut words)).unwrap();
        for &(slot, seq, n) in messages {
            let at = slot * WORDS;
            self.expect(&words[at..at + n], seq, n);
        }
    }

    /// Fills all slots with messages of full length; the first one's number.
    fn fill_device(&mut self) -> u64 {
        let first = self.seq + 1;
        self.seq += SLOTS as u64;
        let words: Vec<u64> = (0..SLOTS).flat_map(|s| message(first + s as u64, WORDS)).collect();
        self.streams[0].upload_blocking(bytemuck::cast_slice(&words), &self.memory).unwrap();
        first
    }

    /// Lands a handle in one of the ways that there are.
    fn land(&mut self, flight: InFlight<PinnedBuf>) -> PinnedBuf {
        match self.random.below(3) {
            0 => self.block_on(flight),
            1 => {
                while !flight.is_done().unwrap() {
                    if self.stepped {
                        self.node.step();
                    } else {
                        std::thread::yield_now();
                    }
                }
                flight.wait().unwrap()
            }
            _ => flight.wait().unwrap(),
        }
    }

    fn block_on<R>(&self, future: impl Future<Output = pinpool::Result<R>>) -> R {
        struct Unpark(std::thread::Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => return result.unwrap(),
                Poll::Pending if self.stepped => {
                    self.node.step();
                }
                Poll::Pending => std::thread::park(),
            }
        }
    }
}

/// What came of a scenario.
#[derive(Default)]
struct Tally {
    checkouts: u64,
    verified: u64,
    wrong: u64,
    /// Different buffers among the checkouts.
    places: u64,
}

/// Runs rounds on several workers of one pool until they have checked out so many buffers, and looks for what is lost.
fn phase(
    config: HostConfig,
    stepped: bool,
    (workers, exact, target): (usize, bool, u64),
    round: &(impl Fn(&mut Worker<'_>) + Sync),
    tally: &mut Tally,
) {
    let node = HostNode::new(config.memory(1 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    // A run for each class; or, of one class, so little that a round does not fit and somebody always waits for what is
    // in flight.
    let capacity = if exact { 640 << 10 } else { 24 << 10 };
    let pool = Pool::builder(&device).capacity(capacity).build().unwrap();
    let (mut counted, mut places) = (0, 0);
    let streams = || [device.stream().unwrap(), device.stream().unwrap()];
    let mut all: Vec<Worker<'_>> = (0..workers as u64)
        .map(|w| Worker {
            node: &node,
            device: &device,
            pool: &pool,
            streams: streams(),
            memory: device.alloc(SLOTS * BYTES).unwrap(),
            stepped,
            exact,
            random: Random(w << 32),
            seq: (w + 1) << 40,
            checkouts: 0,
            wrong: 0,
            verified: 0,
            places: HashSet::new(),
        })
        .collect();
    std::thread::scope(|scope| {
        for worker in &mut all {
            scope.spawn(move || {
                while worker.checkouts < target.div_ceil(workers as u64) {
                    round(worker);
                }
            });
        }
    });
    for worker in all {
        counted += worker.checkouts;
        places += worker.places.len() as u64;
        tally.verified += worker.verified;
        tally.wrong += worker.wrong;
    }
    node.clear_faults();
    let since = Instant::now();
    let stats = loop {
        while node.step() {}
        device.reap();
        let stats = pool.stats();
        // On threads the last ones come back a little later.
        if stats.returns == stats.checkouts || since.elapsed() > Duration::from_secs(20) {
            break stats;
        }
        std::thread::yield_now();
    };
    pool.check().unwrap();
    assert_eq!((stats.checkouts, stats.returns), (counted, counted), "{stats:?}");
    assert_eq!(stats.free_bytes + stats.cut_bytes, stats.pinned_bytes, "{stats:?}");
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes, stats.quarantined_bytes), (0, 0, 0));
    assert!(pool.shutdown(Duration::from_secs(20)).drained);
    tally.checkouts += counted;
    tally.places += places;
}

/// A scenario: `plain` and `round` are one round of it on the plain pool and on pinpool.
fn replay(
    name: &str,
    workers: usize,
    plain_round: impl Fn(&plain::Pool, &mut Random, u64) -> u64,
    round: impl Fn(&mut Worker<'_>) + Sync,
) {
    let target = target();
    let (checkouts, corruptions) = plain(target, plain_round);
    let mut tally = Tally::default();
    let late = |max| HostConfig::new().late(max, 5);
    phase(late(Duration::ZERO), false, (workers, false, target * 40 / 100), &round, &mut tally);
    phase(late(Duration::ZERO), false, (workers, true, target * 34 / 100), &round, &mut tally);
    phase(late(Duration::from_micros(50)), false, (workers, false, target / 100), &round, &mut tally);
    phase(HostConfig::new().stepped(1), true, (1, false, target / 8), &round, &mut tally);
    phase(HostConfig::new().stepped(2), true, (1, true, target / 8), &round, &mut tally);
    let Tally { checkouts: ours, verified, wrong, places } = tally;
    println!(
        "{name}: plain pool {corruptions} corruptions in {checkouts} checkouts; pinpool {wrong} in {ours}, \
         {verified} messages compared"
    );
    assert!(corruptions > 0, "the scenario does not show the bug: the plain pool got everything right");
    assert!(ours >= target && checkouts >= target);
    // Early reuse can only show where there is reuse.
    assert!(ours > 8 * places, "{ours} checkouts of {places} buffers");
    assert!(verified >= ours / 4, "{verified} messages compared");
    assert_eq!(wrong, 0, "wrong messages");
}

// --- the scenarios ---------------------------------------------------------------------------------------------------

/// A server fills its buffer for the next batch while the copy of this batch has not read it yet.
#[test]
fn source_overwritten_before_the_copy_reads() {
    let (engine, memory) = (plain::Engine::new(8), plain::memory());
    replay(
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
#[test]
fn returned_on_drop_while_in_flight() {
    let (engines, memories) = ([(); 2].map(|()| plain::Engine::new(4)), [(); 2].map(|()| plain::memory()));
    replay(
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
#[test]
fn download_read_at_once() {
    let (engine, memory) = (plain::Engine::new(8), plain::memory());
    replay(
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
                    // A claimed buffer is the same checkout going on, under another length.
                    w.checkouts -= u64::from(landing.was_claimed());
                    w.streams[stream].download(source, landing).unwrap()
                } else {
                    let landing = w.checkout(n);
                    w.streams[stream].download(source, landing).unwrap()
                };
                match w.random.below(4) {
                    // Nobody wants it any more; its memory may be claimed while the copy is under way.
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
#[test]
fn two_streams_with_one_shared_buffer() {
    let engines = [plain::Engine::new(0), plain::Engine::new(8)];
    let memories = [plain::memory(), plain::memory()];
    replay(
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
            let wrong = |m: &[Arc<plain::Words>]| {
                (0..SLOTS).filter(|&s| !m[s].is(first + s as u64, WORDS)).count() as u64
            };
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
                        let all = [&w.streams[0], &w.streams[1]];
                        let flight = Stream::hold_on_all(&all, held).unwrap();
                        if w.random.one_in(2) {
                            let held = w.land(flight);
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

/// A request is aborted while its blocks are being fetched; the next request gets them, and the late copies land there.
#[test]
fn aborted_half_way() {
    let (engine, memory) = (plain::Engine::new(16), plain::memory());
    const BLOCKS: usize = 8;
    replay(
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
                        // Aborted: this one was never submitted.
                        break;
                    }
                    fetched.push(w.streams[block % 2].download(w.slot(block, WORDS), landing).unwrap());
                }
                drop(fetched);
                // The next one has buffers of its own, and nobody else writes to them.
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

/// A copy is reported as failed, or asking about it fails, and that is taken for its end; but it runs.
#[test]
fn error_reported_as_done() {
    let (engine, memory) = (plain::Engine::new(8), plain::memory());
    let failures = AtomicU64::new(0);
    replay(
        "error reported as done",
        1,
        |pool, random, first| {
            let mut wrong = 0;
            for (i, source) in memory.iter().enumerate() {
                let buf = pool.checkout();
                engine.copy(source, &buf.words, WORDS);
                if random.one_in(4) {
                    // Said to have failed, so it is over: back with the buffer.
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
                if w.random.one_in(3) {
                    w.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::RunsAnyway });
                }
                if w.random.one_in(3) {
                    let failure = if w.random.one_in(2) { Failure::Moment } else { Failure::Capture };
                    w.node.fail(Fault { device: 0, call: Call::Query, nth: 0, failure });
                }
                if w.random.one_in(4) {
                    w.node.fail(Fault {
                        device: 0,
                        call: Call::Record,
                        nth: 0,
                        failure: Failure::RunsAnyway,
                    });
                }
                let landing = w.checkout(WORDS);
                match w.streams[slot % 2].download(w.slot(slot, WORDS), landing) {
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
            w.node.clear_faults();
            w.streams[1].synchronize().unwrap();
            w.expect_on_device(&sent);
        },
    );
    assert!(failures.into_inner() > 0, "no copy failed");
}

impl Worker<'_> {
    /// Waits, also where a stepped device says that it cannot go on just now, because asking failed.
    fn patiently(&mut self, mut flight: InFlight<PinnedBuf>) -> PinnedBuf {
        loop {
            match flight.wait_timeout(Duration::from_secs(20)) {
                Ok(buf) => return buf,
                Err(e) => flight = e.buffer.unwrap_or_else(|| panic!("lost: {}", e.error)),
            }
        }
    }
}

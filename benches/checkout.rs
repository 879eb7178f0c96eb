//! What a checkout and a return cost, beside other ways to get a buffer and beside the price they are held to: two
//! relaxed increments of an atomic that nobody else touches.
//!
//! # How it is measured
//!
//! Threads are started for each measurement, prepare what they need and run a thousand operations to warm up; a barrier
//! then releases them together. Each takes the wall time of its own operations, and a measurement is the *mean over the
//! threads*, so a figure is nanoseconds per operation as one thread sees it, however many run beside it.
//!
//! Figures of separate runs differ by more than what they are to show, above all on a machine that others use. What
//! counts is therefore the table at the end: contenders take short turns, round after round, each round gives a ratio to
//! the first contender of the same round (`two_fetch_adds`, where it takes part), and the table has the median of the
//! rounds with their quartiles.
//!
//! # What is measured
//!
//! | group | an operation is |
//! | --- | --- |
//! | `checkout_return` | check out 64 KiB, write one byte, return |
//! | `checkout_return_64_live` | the same while the thread has 64 buffers of eight sizes: one, chosen at random, is replaced |
//! | `cross_thread_return` | one thread checks out, another returns; between them an `ArrayQueue`, alone in `bare_token` |
//! | `churn_65536` | as the first with 4 KiB, where 65,536 segments were out and a random half was returned, and in bursts that outrun what a thread caches |
//!
//! `glibc` and `mimalloc` are called through their own functions and are not the global allocator. They are asked for
//! an alignment of 16 bytes, their fast path, though the pool gives 64. `array_queue` and `parking_lot_vec` keep a queue
//! or a stack for each size; the pool finds the size class of each length.
//!
//! # Running it
//!
//! `cargo bench --bench checkout`, or the executable by itself: with `--bench` it runs criterion's groups and then the
//! table, without only the table. `PINPOOL_BENCH_THREADS=1,2,4` sets the numbers of threads, `PINPOOL_BENCH_QUICK=1`
//! makes everything short.
#![allow(missing_docs, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use crossbeam::queue::ArrayQueue;
use crossbeam::utils::{Backoff, CachePadded};
use parking_lot::Mutex;
use pinpool::{Device, PinnedBuf, Pool, Unpinned};

/// The plain figure's one size.
const PLAIN: &[usize] = &[64 << 10];
/// Metadata, token ids, and blocks of caches.
const MIXED: &[usize] = &[200, 1 << 10, 3000, 4 << 10, 16 << 10, 20_000, 32 << 10, 64 << 10];
/// Buffers that each thread keeps in the second group.
const LIVE: usize = 64;

// --- contenders ------------------------------------------------------------------------------------------------------

/// A source of buffers.
trait Store: Sync {
    /// What each thread has for itself.
    type Local;
    type Buf;
    fn local(&self) -> Self::Local;
    /// A buffer of the size at this index, one byte of it written.
    fn take(&self, local: &mut Self::Local, size: usize) -> Self::Buf;
    fn give(&self, local: &mut Self::Local, buf: Self::Buf);
}

/// Writes one byte, in a way that the compiler cannot take back.
///
/// # Safety
/// The start of a buffer of at least one byte that the caller owns.
#[inline(always)]
unsafe fn touch(start: *mut u8) {
    // SAFETY: the caller's word.
    unsafe { start.write_volatile(1) };
}

struct Pinpool {
    pool: Pool,
    sizes: &'static [usize],
}

impl Store for Pinpool {
    type Local = ();
    type Buf = PinnedBuf;
    fn local(&self) {}
    #[inline(always)]
    fn take(&self, (): &mut (), size: usize) -> PinnedBuf {
        let mut buf = self.pool.checkout(self.sizes[size]).expect("the pool is large enough");
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(buf.as_mut_ptr()) };
        buf
    }
    #[inline(always)]
    fn give(&self, (): &mut (), buf: PinnedBuf) {
        drop(buf);
    }
}

/// The measure: what any bookkeeping in a word that nobody else touches costs once it is atomic.
struct TwoFetchAdds;

impl Store for TwoFetchAdds {
    type Local = Box<CachePadded<AtomicU64>>;
    type Buf = ();
    fn local(&self) -> Self::Local {
        black_box(Box::default())
    }
    #[inline(always)]
    fn take(&self, local: &mut Self::Local, _: usize) {
        local.fetch_add(1, Ordering::Relaxed);
    }
    #[inline(always)]
    fn give(&self, local: &mut Self::Local, (): ()) {
        local.fetch_add(1, Ordering::Relaxed);
    }
}

/// A block of an allocator's.
struct Block(NonNull<u8>, Layout);

// SAFETY: a block is owned memory.
unsafe impl Send for Block {}

struct Malloc<A> {
    allocator: A,
    sizes: &'static [usize],
}

impl<A: GlobalAlloc + Sync> Malloc<A> {
    fn block(&self, size: usize) -> Block {
        let layout = Layout::from_size_align(self.sizes[size], 16).expect("sizes are sane");
        // SAFETY: no size is 0.
        Block(NonNull::new(unsafe { self.allocator.alloc(layout) }).expect("memory"), layout)
    }
}

impl<A: GlobalAlloc + Sync> Store for Malloc<A> {
    type Local = ();
    type Buf = Block;
    fn local(&self) {}
    #[inline(always)]
    fn take(&self, (): &mut (), size: usize) -> Block {
        let block = self.block(size);
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(block.0.as_ptr()) };
        block
    }
    #[inline(always)]
    fn give(&self, (): &mut (), Block(start, layout): Block) {
        // SAFETY: allocated in `take` with this layout.
        unsafe { self.allocator.dealloc(start.as_ptr(), layout) }
    }
}

/// Blocks of each size for a pool made by hand. They are never freed: the bench ends with its process.
fn stock(sizes: &'static [usize], count: usize) -> Vec<Vec<(usize, Block)>> {
    let system = Malloc { allocator: System, sizes };
    (0..sizes.len()).map(|size| (0..count).map(|_| (size, system.block(size))).collect()).collect()
}

struct Queues(Vec<ArrayQueue<(usize, Block)>>);

impl Queues {
    fn new(sizes: &'static [usize], count: usize) -> Self {
        let fill = |blocks: Vec<(usize, Block)>| {
            let queue = ArrayQueue::new(blocks.len());
            blocks.into_iter().for_each(|b| assert!(queue.push(b).is_ok()));
            queue
        };
        Self(stock(sizes, count).into_iter().map(fill).collect())
    }
}

impl Store for Queues {
    type Local = ();
    type Buf = (usize, Block);
    fn local(&self) {}
    #[inline(always)]
    fn take(&self, (): &mut (), size: usize) -> Self::Buf {
        let buf = self.0[size].pop().expect("the queue holds more than all threads take");
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(buf.1.0.as_ptr()) };
        buf
    }
    #[inline(always)]
    fn give(&self, (): &mut (), buf: Self::Buf) {
        assert!(self.0[buf.0].push(buf).is_ok());
    }
}

struct Stacks(Vec<Mutex<Vec<(usize, Block)>>>);

impl Stacks {
    fn new(sizes: &'static [usize], count: usize) -> Self {
        Self(stock(sizes, count).into_iter().map(Mutex::new).collect())
    }
}

impl Store for Stacks {
    type Local = ();
    type Buf = (usize, Block);
    fn local(&self) {}
    #[inline(always)]
    fn take(&self, (): &mut (), size: usize) -> Self::Buf {
        let buf = self.0[size].lock().pop().expect("the stack holds more than all threads take");
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(buf.1.0.as_ptr()) };
        buf
    }
    #[inline(always)]
    fn give(&self, (): &mut (), buf: Self::Buf) {
        self.0[buf.0].lock().push(buf);
    }
}

fn pool(capacity: usize) -> Pool {
    let device = Device::open("host").expect("the host device is always there");
    // Where the memlock limit is low the cost is the same: no operation here looks at whether pages are locked.
    let builder = Pool::builder(&device).capacity(capacity).initial(capacity).unpinned(Unpinned::Allow);
    let pool = builder.build().expect("memory for a pool");
    pool.wait_pinned(None).expect("pinning ends");
    pool
}

// --- measuring -------------------------------------------------------------------------------------------------------

/// What each thread does.
#[derive(Clone, Copy)]
enum Work {
    /// Check out, return.
    Pair,
    /// Replace one of [`LIVE`] buffers.
    Live,
}

/// Small and reproducible; made before the clock starts.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % n
    }
}

/// One thread's operations: `warm` of them, the barrier, and `iters` on the clock.
fn turn<S: Store>(store: &S, work: Work, sizes: usize, seed: u64, iters: u64, barrier: &Barrier) -> Duration {
    let mut local = store.local();
    let warm = 1000;
    match work {
        Work::Pair => {
            let mut run = |n: u64| {
                for _ in 0..n {
                    let buf = store.take(&mut local, black_box(0));
                    store.give(&mut local, buf);
                }
            };
            run(warm);
            barrier.wait();
            let since = Instant::now();
            run(iters);
            since.elapsed()
        }
        Work::Live => {
            let mut random = Random(0x9E37_79B9_7F4A_7C15 ^ (seed << 32 | 1));
            let steps: Vec<(usize, usize)> =
                (0..1 << 14).map(|_| (random.below(LIVE), random.below(sizes))).collect();
            let mut live: Vec<S::Buf> =
                (0..LIVE).map(|_| store.take(&mut local, random.below(sizes))).collect();
            let mut steps = steps.iter().cycle();
            let mut run = |n: u64| {
                for _ in 0..n {
                    let Some(&(at, size)) = steps.next() else { return };
                    let new = store.take(&mut local, size);
                    let old = std::mem::replace(&mut live[at], new);
                    store.give(&mut local, old);
                }
            };
            run(warm * 20);
            barrier.wait();
            let since = Instant::now();
            run(iters);
            let taken = since.elapsed();
            live.drain(..).for_each(|buf| store.give(&mut local, buf));
            taken
        }
    }
}

/// The mean over the threads of the wall time that `iters` operations took.
fn measure<S: Store>(store: &S, work: Work, sizes: usize, threads: usize, iters: u64) -> Duration {
    let barrier = Barrier::new(threads);
    let sum: Duration = std::thread::scope(|scope| {
        let start = |n| {
            let barrier = &barrier;
            scope.spawn(move || turn(store, work, sizes, n as u64, iters, barrier))
        };
        let running: Vec<_> = (0..threads).map(start).collect();
        running.into_iter().map(|t| t.join().expect("no thread panics")).sum()
    });
    sum / threads as u32
}

/// A contender with its type left behind: time for (threads, operations).
struct Contender {
    name: &'static str,
    run: Box<dyn Fn(usize, u64) -> Duration>,
}

fn contenders(work: Work, most_threads: usize) -> Vec<Contender> {
    fn entry<S: Store + 'static>(name: &'static str, store: S, work: Work, sizes: usize) -> Contender {
        let run = move |threads, iters| measure(&store, work, sizes, threads, iters);
        Contender { name, run: Box::new(run) }
    }
    let (sizes, each) = match work {
        Work::Pair => (PLAIN, 4),
        Work::Live => (MIXED, LIVE + 2),
    };
    let n = sizes.len();
    // Twice what all threads can hold, since each may also keep some for itself.
    let held = most_threads * each * sizes.iter().max().map_or(0, |s| s + 4096);
    let pool = pool((2 * held).clamp(128 << 20, 1 << 30));
    vec![
        entry("two_fetch_adds", TwoFetchAdds, work, n),
        entry("pinpool", Pinpool { pool, sizes }, work, n),
        entry("array_queue", Queues::new(sizes, most_threads * each), work, n),
        entry("parking_lot_vec", Stacks::new(sizes, most_threads * each), work, n),
        entry("mimalloc", Malloc { allocator: mimalloc::MiMalloc, sizes }, work, n),
        entry("glibc", Malloc { allocator: System, sizes }, work, n),
    ]
}

/// From one thread to another through a queue: `make` on this thread, drop on the other.
fn relay<T: Send>(iters: u64, mut make: impl FnMut() -> T) -> Duration {
    let queue = ArrayQueue::new(256);
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            let backoff = Backoff::new();
            let mut left = iters;
            while left > 0 {
                match queue.pop() {
                    Some(item) => {
                        drop::<T>(item);
                        left -= 1;
                        backoff.reset();
                    }
                    None => backoff.snooze(),
                }
            }
            barrier.wait();
        });
        barrier.wait();
        let since = Instant::now();
        let backoff = Backoff::new();
        for _ in 0..iters {
            let mut item = make();
            while let Err(back) = queue.push(item) {
                item = back;
                backoff.snooze();
            }
            backoff.reset();
        }
        barrier.wait();
        since.elapsed()
    })
}

fn relays() -> Vec<Contender> {
    let pool = pool(128 << 20);
    let checkout = move |_, iters| {
        relay(iters, || {
            let mut buf = pool.checkout(black_box(PLAIN[0])).expect("the pool is large enough");
            // SAFETY: just checked out, and no size is 0.
            unsafe { touch(buf.as_mut_ptr()) };
            buf
        })
    };
    vec![
        Contender { name: "bare_token", run: Box::new(|_, iters| relay(iters, || black_box(1usize))) },
        Contender { name: "pinpool", run: Box::new(checkout) },
    ]
}

/// A pool on which little or much has happened, on the thread that measures.
fn churned() -> Vec<Contender> {
    const SEGMENTS: usize = 65_536;
    const LEN: usize = 4096;
    /// More than a thread caches of one class.
    const BURST: usize = 256;
    let capacity = SEGMENTS * (LEN + 64) * 9 / 8;
    let fresh = pool(capacity);
    let worn = pool(capacity);
    let mut random = Random(7);
    let mut live: Vec<PinnedBuf> =
        (0..SEGMENTS).map(|_| worn.checkout(LEN).expect("the pool is large enough")).collect();
    for _ in 0..SEGMENTS / 2 {
        let at = random.below(live.len());
        drop(live.swap_remove(at));
    }
    let pair = |pool: &Pool, iters: u64| {
        let since = Instant::now();
        for _ in 0..iters {
            let mut buf = pool.checkout(black_box(LEN)).expect("the pool is large enough");
            // SAFETY: just checked out, and no size is 0.
            unsafe { touch(buf.as_mut_ptr()) };
        }
        since.elapsed()
    };
    let burst = |pool: &Pool, iters: u64| {
        let mut held = Vec::with_capacity(BURST);
        let since = Instant::now();
        for _ in 0..iters.div_ceil(BURST as u64) {
            for _ in 0..BURST {
                let mut buf = pool.checkout(black_box(LEN)).expect("the pool is large enough");
                // SAFETY: just checked out, and no size is 0.
                unsafe { touch(buf.as_mut_ptr()) };
                held.push(buf);
            }
            held.clear();
        }
        since.elapsed().mul_f64(iters as f64 / iters.next_multiple_of(BURST as u64) as f64)
    };
    let (fresh2, worn2) = (fresh.clone(), worn.clone());
    // The live half stays out for as long as the contender that it is there for.
    let worn_pair = move |_: usize, iters| {
        black_box(&live);
        pair(&worn, iters)
    };
    vec![
        Contender { name: "empty", run: Box::new(move |_, iters| pair(&fresh, iters)) },
        Contender { name: "churned", run: Box::new(worn_pair) },
        Contender { name: "empty_bursts", run: Box::new(move |_, iters| burst(&fresh2, iters)) },
        Contender { name: "churned_bursts", run: Box::new(move |_, iters| burst(&worn2, iters)) },
    ]
}

// --- the table -------------------------------------------------------------------------------------------------------

/// The value at a quantile, of values that are sorted for it.
fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * q).round() as usize]
}

/// Contenders take turns; each round's ratio is to the round's first contender.
fn table(title: &str, contenders: &[Contender], threads: &[usize], quick: bool) {
    let (rounds, iters) = if quick { (7, 20_000) } else { (41, 200_000) };
    println!("\n{title}: median of {rounds} rounds by turns, {iters} operations each");
    println!("{:>8} {:<18} {:>9} {:>9}   quartiles of the ratio", "threads", "", "ns", "ratio");
    for &n in threads {
        let mut times = vec![Vec::new(); contenders.len()];
        for round in 0..rounds {
            // Every contender comes first in some rounds, so that none always follows the same one.
            for i in 0..contenders.len() {
                let i = (i + round) % contenders.len();
                times[i].push((contenders[i].run)(n, iters).as_secs_f64() * 1e9 / iters as f64);
            }
        }
        for (i, contender) in contenders.iter().enumerate() {
            let mut ratios: Vec<f64> = times[i].iter().zip(&times[0]).map(|(t, base)| t / base).collect();
            let ns = quantile(&mut times[i].clone(), 0.5);
            let [low, mid, high] = [0.25, 0.5, 0.75].map(|q| quantile(&mut ratios, q));
            println!("{n:>8} {:<18} {ns:>9.2} {mid:>9.3}   {low:.3} to {high:.3}", contender.name);
        }
    }
}

fn group(c: &mut Criterion, name: &str, contenders: &[Contender], threads: &[usize]) {
    let mut group = c.benchmark_group(name);
    for &n in threads {
        for contender in contenders {
            let id = BenchmarkId::new(contender.name, n);
            group.bench_function(id, |b| b.iter_custom(|iters| (contender.run)(n, iters)));
        }
    }
    group.finish();
}

fn main() {
    let quick = std::env::var("PINPOOL_BENCH_QUICK").is_ok_and(|v| v != "0");
    let list = std::env::var("PINPOOL_BENCH_THREADS").unwrap_or_else(|_| "1,2".into());
    let threads: Vec<usize> = list.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    assert!(
        !threads.is_empty() && !threads.contains(&0),
        "PINPOOL_BENCH_THREADS is {list:?}, not like 1,2,4"
    );
    let most = threads.iter().copied().max().unwrap_or(1);

    let plain = contenders(Work::Pair, most);
    let live = contenders(Work::Live, most);
    let relays = relays();
    let churned = churned();
    let groups: [(&str, &[Contender], &[usize]); 4] = [
        ("checkout_return", &plain, &threads),
        ("checkout_return_64_live", &live, &threads),
        ("cross_thread_return", &relays, &[2]),
        ("churn_65536", &churned, &[1]),
    ];
    if std::env::args().any(|a| a == "--bench") {
        let (sample, warm, time) = if quick { (10, 50, 200) } else { (40, 500, 2000) };
        let mut criterion = Criterion::default()
            .sample_size(sample)
            .warm_up_time(Duration::from_millis(warm))
            .measurement_time(Duration::from_millis(time))
            .configure_from_args();
        for (name, contenders, threads) in groups {
            group(&mut criterion, name, contenders, threads);
        }
        criterion.final_summary();
    }
    for (name, contenders, threads) in groups {
        table(name, contenders, threads, quick);
    }
}

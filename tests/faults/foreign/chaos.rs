//! All of it at once: random work, under a subscriber, a recorder, wakers, values, sources and sinks that at a random
//! call panic, block for a short time, or call the pool.
//!
//! The owner of a buffer fills it, and compares it before it is dropped or sent; uploads are compared with downloads.
//! At the end everything is back, by the pool's count and by the device's. `PINPOOL_FOREIGN_SECONDS` says how long (2
//! by default), `PINPOOL_FOREIGN_SEED` with which seed.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::future::Future;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use pinpool::copier::{Fill, Priority, Sink, Source};
use pinpool::host::{Call as HostCall, Failure, Fault, HostConfig, HostNode};
use pinpool::telemetry::Sampler;
use pinpool::{Copier, Device, DeviceSlice, Error, PinnedBuf, Pool, Request, Stream, SubmitError, Unpinned};

use super::hostile::{Bomb, Quiet, Turn, waker};
use crate::support::own_process;
use crate::support::value::Value;

/// Longer than anything takes here: what is not there by then hangs.
const HANG: Duration = Duration::from_secs(30);
const THREADS: usize = 4;
const MEMORY: usize = 256 << 10;

/// Numbers that a seed gives.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

std::thread_local! {
    static RANDOM: Cell<u64> = const { Cell::new(0) };
    /// Misdeeds do not misbehave within each other.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// What foreign code does when the crate calls it.
struct Mischief {
    pool: Pool,
    on: AtomicBool,
    /// Calls of foreign code, and misdeeds.
    calls: AtomicU64,
    misdeeds: AtomicU64,
    seed: u64,
}

impl Mischief {
    fn new(pool: &Pool, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            pool: pool.clone(),
            on: AtomicBool::new(true),
            calls: AtomicU64::new(0),
            misdeeds: AtomicU64::new(0),
            seed,
        })
    }

    fn draw(&self, end: u64) -> u64 {
        RANDOM.with(|state| {
            let fresh = self.seed ^ (self.calls.load(Ordering::Relaxed) << 20);
            let mut random = Random(if state.get() == 0 { fresh | 1 } else { state.get() });
            let drawn = random.below(end);
            state.set(random.0);
            drawn
        })
    }

    /// One call. `rare`: one in that many is a misdeed.
    fn happens(&self, rare: u64) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        // A second panic within the first one's unwinding ends any process.
        if !self.on.load(Ordering::Relaxed)
            || std::thread::panicking()
            || BUSY.with(|busy| busy.replace(true))
        {
            return;
        }
        struct Over;
        impl Drop for Over {
            fn drop(&mut self) {
                BUSY.with(|busy| busy.set(false));
            }
        }
        let _over = Over;
        if self.draw(rare) != 0 {
            return;
        }
        self.misdeeds.fetch_add(1, Ordering::Relaxed);
        match self.draw(12) {
            0..=2 => panic_any(Quiet),
            3 => panic_any(Bomb(1)),
            4 => panic_any(Bomb(5)),
            5 => std::thread::sleep(Duration::from_micros(self.draw(2000))),
            6 => _ = self.pool.stats(),
            7 => drop(self.pool.snapshot()),
            8 => drop(self.pool.stuck(Duration::ZERO)),
            9 => {
                if let Ok(mut buf) = self.pool.try_checkout(1 + self.draw(5000) as usize) {
                    let filled = Stamped::new(&mut buf, self.draw(250) as u8);
                    filled.check(&buf, "a buffer of a misdeed's");
                }
            }
            10 => drop((self.pool.regions(), self.pool.pinning())),
            _ => _ = self.pool.trim(usize::MAX),
        }
    }
}

#[cfg(feature = "metrics")]
mod recorder {
    //! A recorder that misbehaves.

    use std::sync::{Arc, Mutex, PoisonError};

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
        SharedString, Unit,
    };

    use super::Mischief;

    static MISCHIEF: Mutex<Option<Arc<Mischief>>> = Mutex::new(None);

    pub(super) fn set(mischief: Option<Arc<Mischief>>) {
        *MISCHIEF.lock().unwrap_or_else(PoisonError::into_inner) = mischief;
        // Once in a process.
        let _ = metrics::set_global_recorder(Recording);
    }

    fn happens() {
        let mischief = MISCHIEF.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(mischief) = mischief {
            mischief.happens(200);
        }
    }

    struct Recording;

    /// Methods that misbehave, and give this.
    macro_rules! misbehave {
        ($($of:ident { $($name:ident($($given:ty),*) $(-> $given_back:ty = $made:expr)?;)* })*) => {
            $(impl $of for Recording {
                $(fn $name(&self $(, _: $given)*) $(-> $given_back)? {
                    happens();
                    $($made)?
                })*
            })*
        };
    }

    misbehave! {
        CounterFn { increment(u64); absolute(u64); }
        GaugeFn { increment(f64); decrement(f64); set(f64); }
        HistogramFn { record(f64); }
        Recorder {
            describe_counter(KeyName, Option<Unit>, SharedString);
            describe_gauge(KeyName, Option<Unit>, SharedString);
            describe_histogram(KeyName, Option<Unit>, SharedString);
            register_counter(&Key, &Metadata<'_>) -> Counter = Counter::from_arc(Arc::new(Recording));
            register_gauge(&Key, &Metadata<'_>) -> Gauge = Gauge::from_arc(Arc::new(Recording));
            register_histogram(&Key, &Metadata<'_>) -> Histogram = Histogram::from_arc(Arc::new(Recording));
        }
    }
}

/// What a buffer holds, as its owner wrote it.
struct Stamped(u8);

impl Stamped {
    fn new(buf: &mut PinnedBuf, byte: u8) -> Self {
        let len = buf.capacity();
        buf.clear();
        buf.try_resize(len, byte).unwrap();
        Self(byte)
    }

    fn check(&self, bytes: &[u8], what: &str) {
        if let Some(at) = bytes.iter().position(|byte| *byte != self.0) {
            eprintln!("{what}: {:#x} at {at} in place of {:#x}", bytes[at], self.0);
            // A panic here would be caught by the crate under test.
            std::process::abort();
        }
    }
}

/// A source or sink that misbehaves now and then.
struct Steady {
    mischief: Arc<Mischief>,
    len: u64,
    byte: u8,
}

impl Source for Steady {
    fn len(&self) -> u64 {
        self.len
    }
    fn name(&self) -> Cow<'_, str> {
        self.mischief.happens(60);
        "a source".into()
    }
    fn fill(&self, _: u64, into: &mut Fill<'_>) -> io::Result<()> {
        self.mischief.happens(20);
        into.write_all(&vec![self.byte; into.remaining()])
    }
}

impl Sink for Steady {
    fn put(&self, _: u64, bytes: &[u8]) -> io::Result<()> {
        Stamped(self.byte).check(bytes, "bytes of a sink");
        self.mischief.happens(20);
        Ok(())
    }
}

impl Drop for Steady {
    fn drop(&mut self) {
        self.mischief.happens(20);
    }
}

/// Polls for at most that long, with wakers that misbehave before or after they wake.
fn awaited<F: Future>(mischief: &Arc<Mischief>, future: F, limit: Duration) -> Option<F::Output> {
    let mut future = pin!(future);
    let end = Instant::now() + limit;
    loop {
        let (thread, own, late) = (std::thread::current(), mischief.clone(), mischief.draw(2) == 0);
        let waker = waker(move || {
            if late {
                thread.unpark();
            }
            own.happens(10);
            thread.unpark();
        });
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(value);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        // A waker that panics before it wakes wakes no task.
        std::thread::park_timeout(left.min(Duration::from_millis(2)));
    }
}

/// Drops what the crate has given back: a panic in there is the caller's own matter.
fn quiet<T>(run: impl FnOnce() -> T) -> T {
    let before = BUSY.with(|busy| busy.replace(true));
    let value = run();
    BUSY.with(|busy| busy.set(before));
    value
}

/// The reason of a refusal; the refused buffer is dropped.
fn refused<B>(refused: SubmitError<B>) -> Error {
    quiet(move || refused.into())
}

/// What one thread works with.
struct Worker<'a> {
    mischief: &'a Arc<Mischief>,
    device: &'a Device,
    pool: &'a Pool,
    copier: &'a Copier,
    bulk: &'a Copier,
    stream: Stream,
    random: Random,
    faults: bool,
    /// Which of the things below it does.
    what: u64,
}

impl Worker<'_> {
    fn filled(&mut self, len: usize) -> Result<(PinnedBuf, Stamped), Error> {
        let byte = self.random.below(250) as u8;
        let mut buf = self.pool.checkout_timeout(len, Duration::from_millis(20))?;
        let stamped = Stamped::new(&mut buf, byte);
        Ok((buf, stamped))
    }

    fn value(&self, len: usize, byte: u8) -> Value {
        let mischief = self.mischief.clone();
        Value::new(vec![byte; len], move || mischief.happens(3))
    }

    /// One of many things that a server does. A refusal by a full pool, a failing device or a misbehaving source is no
    /// failure.
    fn act(&mut self) -> Result<(), Error> {
        const LENGTHS: [usize; 6] = [1, 64, 700, 4096, 20_000, 120_000];
        let len = LENGTHS[self.random.below(6) as usize];
        let byte = self.random.below(250) as u8;
        self.what = self.random.below(15);
        match self.what {
            0 | 1 => {
                let (buf, stamped) = self.filled(len)?;
                std::thread::yield_now();
                stamped.check(&buf, "a buffer");
            }
            2 => {
                let wait = Duration::from_micros(self.random.below(3000));
                if let Some(buf) = awaited(self.mischief, self.pool.checkout_async(len), wait) {
                    let mut buf = buf?;
                    let stamped = Stamped::new(&mut buf, byte);
                    stamped.check(&buf, "an awaited buffer");
                }
            }
            3 | 4 => {
                let (buf, stamped) = self.filled(len)?;
                let memory = self.device.alloc(buf.len())?;
                let sent = self.stream.upload(buf, &memory).map_err(refused)?;
                match self.random.below(3) {
                    0 => drop(sent),
                    1 => stamped.check(&sent.wait()?, "an uploaded buffer"),
                    _ => {
                        if let Some(buf) = awaited(self.mischief, sent, HANG) {
                            stamped.check(&buf?, "an awaited upload");
                        }
                    }
                }
                let landing = self.pool.checkout_on(&self.stream, memory.len())?;
                let back = self.stream.download(&memory, landing).map_err(refused)?.wait()?;
                if !self.faults {
                    stamped.check(&back, "a downloaded buffer");
                }
            }
            5 => {
                let memory = self.device.alloc(len)?;
                let value = self.device.register(self.value(len, byte)).map_err(refused)?;
                let sent = self.stream.upload(value, &memory).map_err(refused)?;
                match self.random.below(3) {
                    0 => drop(sent),
                    1 => {
                        let value = sent.wait()?.into_inner()?;
                        quiet(move || drop(value));
                    }
                    _ => drop(sent.wait()?),
                }
            }
            6 => {
                let value = Arc::new(self.device.register(self.value(len, byte)).map_err(refused)?);
                let memory = self.device.alloc(len)?;
                for _ in 0..3 {
                    drop(self.stream.upload(value.clone(), &memory).map_err(refused)?);
                }
            }
            7 => {
                let (buf, stamped) = self.filled(len.min(4096))?;
                let memory = self.device.alloc(buf.len())?;
                self.copier.upload_slices(&[(&buf, memory.slice(..)?)])?;
                stamped.check(&buf, "a buffer that was lent");
                let back = self.stream.download(&memory, buf).map_err(refused)?.wait()?;
                if !self.faults {
                    stamped.check(&back, "what was lent");
                }
            }
            8 | 9 => {
                let long = 1 + self.random.below(MEMORY as u64);
                let memory = self.device.alloc(long as usize)?;
                let urgent = self.random.below(4) == 0;
                let bulk =
                    if urgent { self.bulk.with_priority(Priority::Foreground) } else { self.bulk.clone() };
                let source = Steady { mischief: self.mischief.clone(), len: long, byte };
                let sent = bulk.upload(source, &memory).map_err(refused)?;
                match self.random.below(4) {
                    0 => drop(sent),
                    1 => {
                        let sent = awaited(self.mischief, sent, Duration::from_micros(800));
                        quiet(move || drop(sent));
                    }
                    _ => {
                        let source = sent.wait().map_err(refused)?;
                        quiet(move || drop(source));
                        if self.faults {
                            return Ok(());
                        }
                        let sink = Steady { mischief: self.mischief.clone(), len: long, byte };
                        let taken = bulk.download(&memory, sink).map_err(refused)?.wait().map_err(refused)?;
                        quiet(move || drop(taken));
                    }
                }
            }
            10 => {
                let lengths: Vec<Request> = (0..self.random.below(4))
                    .map(|_| Request::new(1 + self.random.below(9000) as usize))
                    .collect();
                for mut buf in self.pool.checkout_many(&lengths, Some(Duration::from_millis(10)))? {
                    let stamped = Stamped::new(&mut buf, byte);
                    stamped.check(&buf, "one of many");
                }
            }
            11 => {
                let memory = self.device.alloc(64 << 10)?;
                let bytes = vec![byte; 700];
                let pieces: Vec<(&[u8], DeviceSlice)> = (0..60)
                    .map(|i| (&bytes[..1 + i * 11], memory.slice(i * 1024..i * 1024 + 1000).unwrap()))
                    .collect();
                self.copier.upload_slices(&pieces)?;
                let mut back = vec![0; 700];
                let last = memory.slice(59 * 1024..59 * 1024 + 650)?;
                self.copier.download_slices(&mut [(last, &mut back[..])])?;
                if !self.faults {
                    assert_eq!(back[..650], bytes[..650], "pieces");
                }
            }
            12 => {
                // Copied from where it is, beside a value of the program's.
                let (buf, stamped) = self.filled(len)?;
                let memory = self.device.alloc(2 * len)?;
                let value = self.device.register(self.value(len, byte)).map_err(refused)?;
                let (first, second) = (memory.slice(..len)?, memory.slice(len..)?);
                drop(self.copier.upload_pages(vec![(value, second)]).map_err(refused)?);
                let sent = self.copier.upload_pages(vec![(buf, first.clone())]).map_err(refused)?;
                if self.random.below(3) == 0 {
                    sent.cancel();
                }
                let came = match self.random.below(3) {
                    0 => {
                        drop(sent);
                        return Ok(());
                    }
                    1 => sent.wait()?,
                    _ => match awaited(self.mischief, sent, HANG) {
                        Some(came) => came?,
                        None => return Ok(()),
                    },
                };
                came.iter().for_each(|buf| stamped.check(buf, "a block"));
                let landings = came.into_iter().map(|buf| (first.clone(), buf)).collect();
                let back = self.copier.download_pages(landings).map_err(refused)?.wait()?;
                if !self.faults {
                    stamped.check(&back[0], "a block that was downloaded by a copier");
                }
            }
            13 => {
                let mut sampler = Sampler::new(self.pool);
                sampler.poll();
            }
            _ => {
                let memory = self.device.alloc(len)?;
                self.stream.upload_blocking(&vec![byte; len], &memory)?;
                let mut back = vec![0; len];
                self.stream.download_blocking(&memory, &mut back)?;
                if !self.faults {
                    Stamped(byte).check(&back, "borrowed memory");
                }
            }
        }
        Ok(())
    }
}

fn number(name: &str, or: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(or)
}

fn chaos(faults: bool) {
    let turn = Turn::take();
    let (seconds, seed) = (number("PINPOOL_FOREIGN_SECONDS", 2), number("PINPOOL_FOREIGN_SEED", 7));
    let node =
        HostNode::new(HostConfig::new().memory(256 << 20).late(Duration::from_micros(60), seed)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device)
        .capacity(3 << 20)
        .region(1 << 20)
        .initial(1 << 20)
        .thread_cache(128 << 10)
        .unpinned(Unpinned::Allow)
        .build()
        .unwrap();
    let copier = Copier::builder(&pool, &device).threads(2).chunk(64 << 10).share(512 << 10).build().unwrap();
    let bulk = Copier::builder(&pool, &device).threads(2).chunk(64 << 10).share(512 << 10).build().unwrap();
    let mischief = Mischief::new(&pool, seed);
    let own = mischief.clone();
    turn.act(move |_| own.happens(40));
    #[cfg(feature = "metrics")]
    recorder::set(Some(mischief.clone()));
    let beats: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let (stop, over) = (AtomicBool::new(false), AtomicU64::new(0));
    let unwound = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for (at, beat) in beats.iter().enumerate() {
            let stream = device.stream().unwrap();
            let (mischief, device, pool, bulk) = (&mischief, &device, &pool, &bulk);
            let copier = &copier;
            let (stop, over, unwound) = (&stop, &over, &unwound);
            scope.spawn(move || {
                let random = Random::new(seed ^ (at as u64 + 1) << 40);
                let mut worker =
                    Worker { mischief, device, pool, copier, bulk, stream, random, faults, what: 0 };
                while !stop.load(Ordering::Relaxed) {
                    beat.fetch_add(1, Ordering::Relaxed);
                    // A refusal by the pool, the device or a source is an error, never a panic.
                    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| worker.act())) {
                        // Its drop may panic.
                        std::mem::forget(payload);
                        unwound.lock().unwrap().insert(worker.what);
                    }
                }
                over.fetch_add(1, Ordering::Relaxed);
            });
        }
        let (mut random, mut seen) = (Random::new(seed), vec![(0, Instant::now()); THREADS]);
        let end = Instant::now() + Duration::from_secs(seconds);
        while over.load(Ordering::Relaxed) < THREADS as u64 {
            std::thread::sleep(Duration::from_millis(3));
            if Instant::now() >= end {
                stop.store(true, Ordering::Relaxed);
                node.clear_faults();
                node.resume(0);
            } else if faults {
                const FAILURES: [Failure; 4] =
                    [Failure::Transient, Failure::RunsAnyway, Failure::Argument, Failure::Stall];
                const CALLS: [HostCall; 6] = [
                    HostCall::Copy,
                    HostCall::Record,
                    HostCall::Query,
                    HostCall::CreateEvent,
                    HostCall::Pin,
                    HostCall::WaitEvent,
                ];
                let failure = FAILURES[random.below(4) as usize];
                let call = CALLS[random.below(6) as usize];
                node.fail(Fault { device: 0, call, nth: random.below(5), failure });
                node.resume(0);
            }
            for (beat, seen) in beats.iter().zip(&mut seen) {
                let now = beat.load(Ordering::Relaxed);
                if seen.0 != now {
                    *seen = (now, Instant::now());
                } else if seen.1.elapsed() > HANG && over.load(Ordering::Relaxed) < THREADS as u64 {
                    eprintln!("a thread hangs; {:?}", pool.stats());
                    std::process::abort();
                }
            }
        }
    });
    node.clear_faults();
    node.resume(0);
    mischief.on.store(false, Ordering::Relaxed);
    let unwound = unwound.into_inner().unwrap();
    assert!(unwound.is_empty(), "calls of the crate's unwound, by number: {unwound:?}");
    println!(
        "{} rounds, {} calls of code of others, {} misdeeds",
        beats.iter().map(|beat| beat.load(Ordering::Relaxed)).sum::<u64>(),
        mischief.calls.load(Ordering::Relaxed),
        mischief.misdeeds.load(Ordering::Relaxed)
    );
    assert!(mischief.misdeeds.load(Ordering::Relaxed) > 0);
    turn.quiet();
    #[cfg(feature = "metrics")]
    recorder::set(None);
    drop((bulk, copier, mischief));
    let shutdown = pool.shutdown(HANG);
    pool.check().unwrap();
    let stats = pool.stats();
    let out = stats.checked_out_bytes + stats.in_flight_bytes + stats.quarantined_bytes;
    assert_eq!(out, 0, "{shutdown:?}, {stats:?}");
    drop(pool);
    device.close(HANG).unwrap();
}

#[test]
fn random_work_among_misdeeds() {
    own_process!();
    chaos(false);
}

#[test]
fn random_work_among_misdeeds_on_a_failing_device() {
    own_process!();
    chaos(true);
}

//! Foreign code: subscribers, recorders, wakers, values of the program's, sources and sinks that panic
//! (with payloads whose drop panics, too), block, and call back into the pool. None of it costs a
//! byte, a thread of the crate's, or a statistic.
//!
//! All of it at once: random work, in which foreign code misbehaves at a random call. The owner of a
//! buffer fills it, and compares it before it is dropped or sent; uploads are compared with downloads.
//! At the end everything is back, by the pool's count and by the device's.
//!
//! Each test has a process of its own, since a process has one subscriber.

#![cfg(target_os = "linux")]

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};
use std::task::{Context, Poll, Wake};
use std::time::{Duration, Instant};

use pinpool::copier::{Fill, Priority, Sink, Source, Transfer};
use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode, HostUsage};
use pinpool::telemetry::Sampler;
use pinpool::{
    Copier, Device, DeviceSlice, Error, InFlight, Lend, PinnedBuf, Pool, Request, Stream, SubmitError,
    Unpinned,
};

use crate::support::doubles::gpu::filled;
use crate::support::panicking::{self, Bomb};
use crate::support::rig::Rig;
use crate::support::value::Value;
use crate::support::{HANG, Random, own_process, until, variable};

const THREADS: usize = 4;
const MEMORY: u64 = 256 << 10;

std::thread_local! {
    static RANDOM: RefCell<Option<Random>> = const { RefCell::new(None) };
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
    /// A random number below that one: each thread has its own.
    fn draw(&self, end: u64) -> u64 {
        let fresh = || Random::new(self.seed ^ (self.calls.fetch_add(1, Ordering::Relaxed) << 20));
        RANDOM.with_borrow_mut(|random| random.get_or_insert_with(fresh).below(end as usize) as u64)
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
            0..=2 => panic_any(Bomb(0)),
            3 => panic_any(Bomb(1)),
            4 => panic_any(Bomb(5)),
            5 => std::thread::sleep(Duration::from_micros(self.draw(2000))),
            6 => _ = self.pool.stats(),
            7 => drop(self.pool.snapshot()),
            8 => drop(self.pool.stuck(Duration::ZERO)),
            9 => {
                if let Ok(buf) = self.pool.try_checkout(1 + self.draw(5000) as usize) {
                    let byte = self.draw(250) as u8;
                    check(&stamp(buf, byte), byte, "a buffer of a misdeed's");
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

    use std::sync::Arc;

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
        SharedString, Unit,
    };

    use super::Mischief;

    #[derive(Clone)]
    pub(super) struct Recording(pub Arc<Mischief>);

    /// Methods that misbehave, and give what is made of the recorder.
    macro_rules! misbehave {
        ($($of:ident { $($name:ident($($given:ty),*) $(-> $made:ident)?;)* })*) => {
            $(impl $of for Recording {
                $(fn $name(&self $(, _: $given)*) $(-> $made)? {
                    self.0.happens(200);
                    $($made::from_arc(Arc::new(self.clone())))?
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
            register_counter(&Key, &Metadata<'_>) -> Counter;
            register_gauge(&Key, &Metadata<'_>) -> Gauge;
            register_histogram(&Key, &Metadata<'_>) -> Histogram;
        }
    }
}

/// Fills a buffer with a byte.
fn stamp(mut buf: PinnedBuf, byte: u8) -> PinnedBuf {
    buf.clear();
    let len = buf.capacity();
    buf.try_resize(len, byte).unwrap();
    buf
}

/// Looks whether all of these are that byte.
fn check(bytes: &[u8], byte: u8, what: &str) {
    if let Some(at) = bytes.iter().position(|found| *found != byte) {
        eprintln!("{what}: {:#x} at {at} in place of {byte:#x}", bytes[at]);
        // A panic here would be caught by the crate under test.
        std::process::abort();
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
        check(bytes, self.byte, "bytes of a sink");
        self.mischief.happens(20);
        Ok(())
    }
}

impl Drop for Steady {
    fn drop(&mut self) {
        self.mischief.happens(20);
    }
}

/// A waker that misbehaves after it has woken its thread, or before.
struct Wakes {
    thread: std::thread::Thread,
    mischief: Arc<Mischief>,
    late: bool,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        if self.late {
            self.thread.unpark();
        }
        self.mischief.happens(10);
        self.thread.unpark();
    }
}

/// Polls for at most that long.
fn awaited<F: Future>(mischief: &Arc<Mischief>, future: F, limit: Duration) -> Option<F::Output> {
    let mut future = pin!(future);
    let end = Instant::now() + limit;
    loop {
        let (thread, late) = (std::thread::current(), mischief.draw(2) == 0);
        let waker = Arc::new(Wakes { thread, mischief: mischief.clone(), late }).into();
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
    stream: Stream,
    faults: bool,
    /// Which of the things below it does.
    what: u64,
}

impl Worker<'_> {
    fn below(&self, end: u64) -> u64 {
        self.mischief.draw(end)
    }

    fn filled(&self, len: usize, byte: u8) -> Result<PinnedBuf, Error> {
        Ok(stamp(self.pool.checkout_timeout(len, Duration::from_millis(20))?, byte))
    }

    fn value(&self, len: usize, byte: u8) -> Value {
        let mischief = self.mischief.clone();
        Value::new(vec![byte; len], move || mischief.happens(3))
    }

    fn steady(&self, len: usize, byte: u8) -> Steady {
        Steady { mischief: self.mischief.clone(), len: len as u64, byte }
    }

    /// Drops a handle, waits for it, or awaits it.
    fn ends<B: Lend>(&self, sent: InFlight<B>) -> Result<Option<B>, Error> {
        match self.below(3) {
            0 => Ok(None),
            1 => sent.wait().map(Some),
            _ => awaited(self.mischief, sent, HANG).transpose(),
        }
    }

    /// The same of a transfer; or awaits it for a short time, or cancels it.
    fn is_over<T>(&self, sent: Transfer<T>) -> Result<Option<T>, Error> {
        match self.below(5) {
            0 => drop(sent),
            1 => return sent.wait().map(Some).map_err(refused),
            2 => quiet(|| drop(awaited(self.mischief, sent, Duration::from_micros(800)))),
            3 => sent.cancel(),
            _ => return awaited(self.mischief, sent, HANG).transpose().map_err(refused),
        }
        Ok(None)
    }

    /// One of many things that a server does. A refusal by a full pool, a failing device or a misbehaving source is no
    /// failure.
    fn act(&mut self) -> Result<(), Error> {
        const LENGTHS: [usize; 6] = [1, 64, 700, 4096, 20_000, 120_000];
        let len = LENGTHS[self.below(6) as usize];
        let byte = self.below(250) as u8;
        // Bytes that a failing device copied may be any.
        let landed = |bytes: &[u8], what: &str| {
            if !self.faults {
                check(bytes, byte, what);
            }
        };
        self.what = self.below(11);
        match self.what {
            0..=2 => {
                let wait = Duration::from_micros(self.below(3000));
                let bufs = match self.what {
                    0 => vec![self.pool.checkout_timeout(len, wait)?],
                    1 => awaited(self.mischief, self.pool.checkout_async(len), wait)
                        .transpose()?
                        .into_iter()
                        .collect(),
                    _ => self.pool.checkout_many(&[700, len, 4096].map(Request::new), Some(wait))?,
                };
                for buf in bufs {
                    let buf = stamp(buf, byte);
                    std::thread::yield_now();
                    check(&buf, byte, "a buffer");
                }
            }
            3 | 4 => {
                let buf = self.filled(len, byte)?;
                let memory = self.device.alloc(buf.len())?;
                if let Some(buf) = self.ends(self.stream.upload(buf, &memory).map_err(refused)?)? {
                    check(&buf, byte, "an uploaded buffer");
                }
                let landing = self.pool.checkout_on(&self.stream, memory.len())?;
                let back = self.stream.download(&memory, landing).map_err(refused)?.wait()?;
                landed(&back, "a downloaded buffer");
            }
            5 => {
                let (memory, value) = (self.device.alloc(len)?, self.value(len, byte));
                let value = self.device.register(value).map_err(refused)?;
                if let Some(value) = self.ends(self.stream.upload(value, &memory).map_err(refused)?)? {
                    let value = value.into_inner()?;
                    quiet(move || drop(value));
                }
            }
            6 => {
                let adopted = self.pool.adopt(self.value(200_000, byte)).map_err(refused);
                self.pool.trim(self.below(2 << 20) as usize);
                self.pool.check().unwrap();
                adopted?;
            }
            7 => {
                let long = 1 + self.below(MEMORY) as usize;
                let memory = self.device.alloc(long)?;
                let priority = if self.below(4) == 0 { Priority::Foreground } else { Priority::Bulk };
                let copier = self.copier.with_priority(priority);
                let sent = copier.upload(self.steady(long, byte), &memory).map_err(refused)?;
                if let Some(source) = self.is_over(sent)? {
                    quiet(move || drop(source));
                    if !self.faults {
                        let sent = copier.download(&memory, self.steady(long, byte)).map_err(refused)?;
                        let sink = self.is_over(sent)?;
                        quiet(move || drop(sink));
                    }
                }
            }
            8 => {
                let memory = self.device.alloc(64 << 10)?;
                let bytes = vec![byte; 700];
                let pieces: Vec<(&[u8], DeviceSlice)> = (0..60)
                    .map(|i| (&bytes[..1 + i * 11], memory.slice(i * 1024..i * 1024 + 1000).unwrap()))
                    .collect();
                self.copier.upload_slices(&pieces)?;
                let mut back = vec![0; 650];
                let last = memory.slice(59 * 1024..59 * 1024 + 650)?;
                self.copier.download_slices(&mut [(last, &mut back[..])])?;
                landed(&back, "pieces");
            }
            9 => {
                // Copied from where it is, beside a value of the program's.
                let buf = self.filled(len, byte)?;
                let memory = self.device.alloc(2 * len)?;
                let value = self.device.register(self.value(len, byte)).map_err(refused)?;
                let (first, second) = (memory.slice(..len)?, memory.slice(len..)?);
                drop(self.copier.upload_pages(vec![(value, second)]).map_err(refused)?);
                let sent = self.copier.upload_pages(vec![(buf, first.clone())]).map_err(refused)?;
                if let Some(came) = self.is_over(sent)? {
                    came.iter().for_each(|buf| check(buf, byte, "a block"));
                    let landings = came.into_iter().map(|buf| (first.clone(), buf)).collect();
                    let back = self.copier.download_pages(landings).map_err(refused)?.wait()?;
                    landed(&back[0], "a block that was downloaded by a copier");
                }
            }
            _ => {
                let mut sampler = Sampler::new(self.pool);
                #[cfg(feature = "metrics")]
                metrics::with_local_recorder(&recorder::Recording(self.mischief.clone()), || sampler.poll());
                #[cfg(not(feature = "metrics"))]
                sampler.poll();
                let memory = self.device.alloc(len)?;
                self.stream.upload_blocking(&vec![byte; len], &memory)?;
                let mut back = vec![0; len];
                self.stream.download_blocking(&memory, &mut back)?;
                landed(&back, "borrowed memory");
            }
        }
        Ok(())
    }
}

fn chaos(faults: bool) {
    panicking::install();
    let (seconds, seed) = (variable("PINPOOL_FOREIGN_SECONDS", 2), variable("PINPOOL_FOREIGN_SEED", 7));
    let node =
        HostNode::new(HostConfig::new().memory(256 << 20).late(Duration::from_micros(60), seed)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    // The pool's own callback has no share of the pool.
    let known = Arc::new(OnceLock::<Weak<Mischief>>::new());
    let callback = known.clone();
    let pool = Pool::builder(&device)
        .before_unpin(move |_| {
            let mischief = callback.get().and_then(Weak::upgrade);
            mischief.iter().for_each(|mischief| mischief.happens(3));
        })
        .capacity(3 << 20)
        .region(1 << 20)
        .initial(1 << 20)
        .thread_cache(128 << 10)
        .unpinned(Unpinned::Allow)
        .build()
        .unwrap();
    let copier = Copier::builder(&pool, &device).threads(2).chunk(64 << 10).share(512 << 10).build().unwrap();
    let (on, calls, misdeeds) = (AtomicBool::new(true), AtomicU64::new(0), AtomicU64::new(0));
    let mischief = Arc::new(Mischief { pool: pool.clone(), on, calls, misdeeds, seed });
    _ = known.set(Arc::downgrade(&mischief));
    let own = mischief.clone();
    panicking::act(move |_, _| own.happens(40));
    let beats: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let (stop, over) = (AtomicBool::new(false), AtomicU64::new(0));
    let unwound = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for beat in &beats {
            let stream = device.stream().unwrap();
            let (mischief, device, pool, copier) = (&mischief, &device, &pool, &copier);
            let (stop, over, unwound) = (&stop, &over, &unwound);
            scope.spawn(move || {
                let mut worker = Worker { mischief, device, pool, copier, stream, faults, what: 0 };
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
        let mut seen = vec![(0, Instant::now()); THREADS];
        let end = Instant::now() + Duration::from_secs(seconds);
        while over.load(Ordering::Relaxed) < THREADS as u64 {
            std::thread::sleep(Duration::from_millis(3));
            if Instant::now() >= end {
                stop.store(true, Ordering::Relaxed);
                node.clear_faults();
                node.resume(0);
            } else if faults {
                use Call::{Allocate, Copy, CopyBlocking, CreateEvent, Pin, Query, Record, WaitEvent};
                use Failure::{Argument, Capture, RunsAnyway, Stall, Transient};
                const FAILURES: [Failure; 5] = [Transient, RunsAnyway, Argument, Stall, Capture];
                const CALLS: [Call; 8] =
                    [Copy, Record, Query, CreateEvent, Pin, WaitEvent, CopyBlocking, Allocate];
                let (failure, call) = (FAILURES[mischief.draw(5) as usize], CALLS[mischief.draw(8) as usize]);
                node.fail(Fault { device: 0, call, nth: mischief.draw(5), failure });
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
    assert!(mischief.misdeeds.load(Ordering::Relaxed) > 0);
    panicking::quiet();
    drop((copier, mischief));
    let shutdown = pool.shutdown(HANG);
    // Adopted values keep the pool, by the mischief that their drop makes.
    pool.trim(0);
    pool.check().unwrap();
    let stats = pool.stats();
    let out = stats.checked_out_bytes + stats.in_flight_bytes + stats.quarantined_bytes;
    assert_eq!(out, 0, "{shutdown:?}, {stats:?}");
    drop(pool);
    device.close(HANG).unwrap();
    assert_eq!(node.live(0), HostUsage::default());
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

/// A subscriber asks the pool when an event reports that a stream is lost, and gets its answer.
/// (Above it asks when pinning fails, too.)
#[test]
fn a_subscriber_asks_the_pool_when_a_stream_is_lost() {
    own_process!();
    panicking::install();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let rig = Rig::new(HostConfig::new(), 1 << 20);
        let Rig { node, device, pool, .. } = &rig;
        let (asked, answered) = (pool.clone(), Arc::new(AtomicU64::new(0)));
        let count = answered.clone();
        panicking::act(move |call, what| {
            if call == panicking::Call::Event
                && what.is_some_and(|what| *what.level() <= tracing::Level::WARN)
            {
                drop((asked.stats(), asked.snapshot(), asked.stuck(Duration::ZERO)));
                drop((asked.check(), asked.trim(0), asked.try_checkout(64)));
                drop((asked.pinning(), asked.regions()));
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let (stream, small) = (device.stream().unwrap(), device.alloc(64).unwrap());
        node.hang(0);
        let flight = stream.upload(filled(pool, &[1; 64]), &small).unwrap();
        node.kill(0);
        let lost = flight.wait_timeout(HANG).unwrap_err();
        assert!(lost.error.is_device_lost(), "{}", lost.error);
        until("the subscriber has had its answer", || answered.load(Ordering::Relaxed) > 0);
        _ = pool.stats();
        panicking::quiet();
        tell.send(())
    });
    told.recv_timeout(HANG).expect("a question hangs, or panicked");
}

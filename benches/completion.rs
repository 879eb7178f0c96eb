//! The cost of learning when a copy is complete, beside the driver's own ways to learn it.
//!
//! # Tracking (`--only track`)
//!
//! Threads with a stream each upload 4 KiB or 64 KiB again and again. Each contender submits a batch of copies, then
//! waits until the batch's last copy is complete, by polling every 2 us. All contenders wait in the same way, so the
//! same number of bytes is in flight for each, and the waiting costs each the same.
//!
//! | contender | a copy is |
//! | --- | --- |
//! | `bare` | `cuMemcpyHtoDAsync` from registered memory, and nothing else (one event a batch, to wait for) |
//! | `event` | the same and `cuEventRecord` of its own event, from a ring, without timing: the gate's measure |
//! | `pool_kept` | `upload` of a buffer that the thread keeps; the batch's buffers come back from their handles |
//! | `pool_fresh` | `checkout`, `upload`, drop: the buffer returns by itself |
//! | `pool_shared` | `upload` of a clone of an `Arc` of a buffer that many copies read, drop |
//!
//! All run with the context current, as in a thread that works with the GPU. Fresh buffers are not filled but declared
//! to be written, since filling is not part of tracking. Each contender has as many distinct sources and targets as a
//! batch has copies. A figure is the time of whole batches, divided by copies, as a mean over the threads.
//! `benches/peers/torch_host.cpp` measures PyTorch's allocator in the same way.
//!
//! # Latency (`--only latency`)
//!
//! One thread, one copy of 4 KiB at a time, from before the call until the thread knows that the copy is complete: by
//! `cuEventQuery` without a pause (`polled`), by `InFlight::wait` (`pool_wait`), by `cuEventSynchronize` of an event
//! with blocking sync (`blocking`), by awaiting the handle in a task on an executor that sleeps (`pool_await`). Once back
//! to back, and once with 2 ms of sleep before each copy, so that all threads involved sleep.
//!
//! # The reaper (`--only reaper`)
//!
//! Its processor time while one copy is in flight behind a kernel that runs for 10 s (`--seconds`), half of the time
//! without a waiter and half with a thread in `wait`; and for 2 s while nothing is in flight. The kernel is launched on
//! the pool's own stream, by its handle.
//!
//! # Running it
//!
//! `cargo bench --bench completion`, or the executable by itself. `--quick` makes it short; `--rounds`, `--batch`,
//! `--threads 1,16` and `--seconds` set these. Without a GPU the pool's contenders run alone, on the host device, which
//! only shows that they run.
#![allow(missing_docs, unsafe_code)]

mod driver;
mod measure;

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use driver::{Address, Driver, Event, Pinned};
use measure::small::pool;
use measure::{Rounds, Spread, at_most, line, number, numbers, processor_time, quantile, spin, wanted};
use pinpool::{Device, DeviceSlice, InFlight, PinnedBuf, Pool, Stream};

/// The start of the reaper's thread name.
const REAPER: &str = "pinpool-reap-";
/// The pause between two polls of a batch's last copy.
const PAUSE: Duration = Duration::from_micros(2);

// --- tracking

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Bare,
    Event,
    Kept,
    Fresh,
    Shared,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Event => "event",
            Self::Kept => "pool_kept",
            Self::Fresh => "pool_fresh",
            Self::Shared => "pool_shared",
        }
    }

    fn is_raw(self) -> bool {
        matches!(self, Self::Bare | Self::Event)
    }
}

/// One row of figures.
#[derive(Clone, Copy)]
struct Track {
    len: usize,
    threads: usize,
    batch: usize,
    /// Batches in a turn, for each thread.
    batches: usize,
    rounds: usize,
}

/// What a thread needs to call the driver itself.
struct Raw {
    driver: &'static Driver,
    stream: driver::Stream,
    source: Pinned,
    target: Address,
    events: Vec<Event>,
    last: Event,
}

impl Raw {
    fn new(driver: &'static Driver, track: Track) -> Self {
        Self {
            driver,
            stream: driver.stream(),
            source: Pinned::new(driver, track.len * track.batch),
            target: driver.allocate(track.len * track.batch),
            events: (0..track.batch).map(|_| driver.event()).collect(),
            last: driver.event(),
        }
    }

    fn batch(&self, way: Way, len: usize) {
        let driver = self.driver;
        for (i, &event) in self.events.iter().enumerate() {
            // SAFETY: both have room for as many copies as there are events, and live until the batch is done.
            unsafe {
                let target = Address(self.target.0 + (i * len) as u64);
                driver.upload(target, self.source.memory.at(i * len), len, self.stream);
            }
            if way != Way::Bare {
                driver.record(event, self.stream);
            }
        }
        let last = match (way, self.events.last()) {
            (Way::Event, Some(&last)) => last,
            _ => {
                driver.record(self.last, self.stream);
                self.last
            }
        };
        wait(|| driver.is_done(last));
    }
}

/// Polls every [`PAUSE`] until it is so: the same way of waiting for all contenders.
fn wait(mut done: impl FnMut() -> bool) {
    while !done() {
        spin(PAUSE);
    }
}

/// A thread's state for the pool's contenders.
struct Pooled {
    pool: Pool,
    stream: Stream,
    targets: Vec<DeviceSlice>,
    kept: Vec<PinnedBuf>,
    shared: Vec<Arc<PinnedBuf>>,
    flights: Vec<InFlight<PinnedBuf>>,
}

/// A buffer whose bytes count as written.
#[inline(always)]
fn checkout(pool: &Pool, len: usize) -> PinnedBuf {
    let mut buf = pool.checkout(len).expect("the pool is large enough");
    // SAFETY: the length is at most the capacity. The pool's pages are mapped and were touched, so the bytes are
    // initialised; their values do not matter here.
    unsafe { buf.set_len(len) };
    buf
}

impl Pooled {
    fn new(device: &Device, pool: &Pool, track: Track) -> Self {
        let memory = device.alloc(track.len * track.batch).expect("device memory");
        let slice = |i: usize| memory.slice(i * track.len..(i + 1) * track.len).expect("within the memory");
        Self {
            pool: pool.clone(),
            stream: device.stream().expect("a stream"),
            targets: (0..track.batch).map(slice).collect(),
            kept: (0..track.batch).map(|_| checkout(pool, track.len)).collect(),
            shared: (0..track.batch).map(|_| Arc::new(checkout(pool, track.len))).collect(),
            flights: Vec::with_capacity(track.batch),
        }
    }

    fn batch(&mut self, way: Way, len: usize) {
        match way {
            Way::Kept => {
                for (buf, target) in self.kept.drain(..).zip(&self.targets) {
                    self.flights.push(self.stream.upload(buf, target).expect("a copy"));
                }
                let last = self.flights.last().expect("a batch is not empty");
                wait(|| last.is_done().expect("the device works"));
                for flight in self.flights.drain(..) {
                    self.kept.push(flight.wait().expect("the device works"));
                }
            }
            Way::Shared => {
                let mut last = None;
                for (buf, target) in self.shared.iter().zip(&self.targets) {
                    last = Some(self.stream.upload(buf.clone(), target).expect("a copy"));
                }
                let last = last.expect("a batch is not empty");
                wait(|| last.is_done().expect("the device works"));
            }
            _ => {
                let mut last = None;
                for target in &self.targets {
                    let buf = checkout(&self.pool, len);
                    // The previous buffer is dropped here.
                    last = Some(self.stream.upload(buf, target).expect("a copy"));
                }
                let last = last.expect("a batch is not empty");
                wait(|| last.is_done().expect("the device works"));
            }
        }
    }
}

/// One thread's turns, by round and contender, in ns a copy.
fn track_thread(
    driver: Option<&'static Driver>,
    device: &Device,
    pool: &Pool,
    ways: &[Way],
    track: Track,
    barrier: &Barrier,
) -> Vec<Vec<f64>> {
    driver.into_iter().for_each(Driver::enter);
    let raw = driver.map(|driver| Raw::new(driver, track));
    let mut pooled = Pooled::new(device, pool, track);
    let copies = (track.batches * track.batch) as f64;
    let mut rounds = Vec::new();
    // The first round is for warming up.
    for round in 0..=track.rounds {
        let mut turns = vec![0.0; ways.len()];
        // Each contender comes first in some rounds, so that none always follows the same one.
        for i in (0..ways.len()).map(|i| (i + round) % ways.len()) {
            let way = ways[i];
            let mut batch = || match &raw {
                Some(raw) if way.is_raw() => raw.batch(way, track.len),
                _ => pooled.batch(way, track.len),
            };
            batch();
            barrier.wait();
            let since = Instant::now();
            (0..track.batches).for_each(|_| batch());
            turns[i] = since.elapsed().as_nanos() as f64 / copies;
            barrier.wait();
        }
        if round > 0 {
            rounds.push(turns);
        }
    }
    rounds
}

fn track(driver: Option<&'static Driver>, device: &Device) {
    let rounds = number("rounds", if measure::quick() { 5 } else { 25 });
    let batch = number("batch", 128);
    let default: &[usize] = if driver.is_some() && !measure::quick() { &[1, 16] } else { &[1, 2] };
    let copies = if measure::quick() { 1024 } else { 8192 };
    let mut ways = vec![Way::Kept, Way::Fresh, Way::Shared];
    if driver.is_some() {
        ways.splice(0..0, [Way::Bare, Way::Event]);
    }
    let at = |way: Way| ways.iter().position(|&w| w == way);
    for len in [4 << 10, 64 << 10] {
        for threads in numbers("threads", default) {
            let batches = (copies / threads / batch).max(1);
            let track = Track { len, threads, batch, batches, rounds };
            let all = track_all(driver, device, &ways, track);
            println!(
                "\ntracking, {} KiB, {threads} threads: median of {rounds} rounds by turns, {} copies a turn, \
                 {batch} in flight a thread at most",
                len >> 10,
                batches * batch * threads,
            );
            println!("{:<14} {:>9} {:>8}", "", "ns", "ratio");
            let base = at(Way::Event).unwrap_or(0);
            for (i, way) in ways.iter().enumerate() {
                let Spread { low, mid, high } = all.ratio(i, base);
                println!("{:<14} {:>9.0} {mid:>8.3} {low:>7.3} {high:>7.3}", way.name(), all.spread(i).mid);
                line(format!("track_{}_{len}", way.name()), threads, all.spread(i));
            }
            let Some(event) = at(Way::Event) else { continue };
            for (i, way) in ways.iter().enumerate().filter(|(_, way)| !way.is_raw()) {
                let what = format!("{} KiB, {threads} threads: {} over event", len >> 10, way.name());
                at_most(what, all.ratio(i, event), 1.02, None);
            }
        }
    }
}

/// The means over the threads, by contender and round.
fn track_all(driver: Option<&'static Driver>, device: &Device, ways: &[Way], track: Track) -> Rounds {
    // Kept, shared and fresh buffers, and as many again.
    let each = track.len + track.len / 8 + 4096;
    let pool = pool(device, (4 * track.threads * track.batch * each).next_multiple_of(1 << 20));
    let barrier = Barrier::new(track.threads);
    let threads: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
        let (pool, barrier) = (&pool, &barrier);
        let start = |_| scope.spawn(move || track_thread(driver, device, pool, ways, track, barrier));
        let running: Vec<_> = (0..track.threads).map(start).collect();
        running.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    });
    let mut figures = Rounds::new(ways.len());
    for round in 0..track.rounds {
        for way in 0..ways.len() {
            let sum: f64 = threads.iter().map(|thread| thread[round][way]).sum();
            figures.add(way, sum / track.threads as f64);
        }
    }
    figures
}

// --- latency

/// A minimal executor: it sleeps until it is woken.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Knowing {
    Polled,
    PoolWait,
    Blocking,
    PoolAwait,
}

impl Knowing {
    fn name(self) -> &'static str {
        match self {
            Self::Polled => "polled",
            Self::PoolWait => "pool_wait",
            Self::Blocking => "blocking",
            Self::PoolAwait => "pool_await",
        }
    }
}

fn latency(driver: Option<&'static Driver>, device: &Device) {
    const LEN: usize = 4 << 10;
    let rounds = number("rounds", if measure::quick() { 5 } else { 31 });
    let mut ways = vec![Knowing::PoolWait, Knowing::PoolAwait];
    if driver.is_some() {
        ways.extend([Knowing::Polled, Knowing::Blocking]);
    }
    let pool = pool(device, 4 << 20);
    let stream = device.stream().expect("a stream");
    let memory = device.alloc(LEN).expect("device memory");
    let mut buf = Some(checkout(&pool, LEN));
    let raw = driver.map(|driver| {
        driver.enter();
        let events = (driver.event(), driver.blocking_event());
        (driver, driver.stream(), Pinned::new(driver, LEN), driver.allocate(LEN), events)
    });
    // One copy, from before the call until it is known to be complete; in ns.
    let mut once = |way: Knowing| -> f64 {
        let since = Instant::now();
        match way {
            Knowing::PoolWait | Knowing::PoolAwait => {
                let flight = buf.take().map(|buf| stream.upload(buf, &memory).expect("a copy"));
                let flight = flight.expect("it came back");
                let back = if way == Knowing::PoolWait { flight.wait() } else { block_on(flight) };
                buf = Some(back.expect("the device works"));
            }
            _ => {
                let (driver, stream, source, target, (event, blocking)) = raw.as_ref().expect("a driver");
                // SAFETY: both have that many bytes and live longer than the copy.
                unsafe { driver.upload(*target, source.memory.at(0), LEN, *stream) };
                if way == Knowing::Polled {
                    driver.record(*event, *stream);
                    while !driver.is_done(*event) {
                        std::hint::spin_loop();
                    }
                } else {
                    driver.record(*blocking, *stream);
                    driver.wait(*blocking);
                }
            }
        }
        since.elapsed().as_nanos() as f64
    };
    for (title, idle, samples) in
        [("back to back", Duration::ZERO, 64), ("after 2 ms without work", Duration::from_millis(2), 16)]
    {
        let mut medians = Rounds::new(ways.len());
        for round in 0..=rounds {
            for i in (0..ways.len()).map(|i| (i + round) % ways.len()) {
                let one = |_| {
                    if !idle.is_zero() {
                        std::thread::sleep(idle);
                    }
                    once(ways[i])
                };
                let taken: Vec<f64> = (0..samples).map(one).collect();
                if round > 0 {
                    medians.add(i, quantile(&taken, 0.5));
                }
            }
        }
        println!(
            "\nlatency, 4 KiB, one copy at a time, {title}: {rounds} rounds by turns, {samples} copies each"
        );
        for (i, way) in ways.iter().enumerate() {
            println!("{:<14} {:>9.0} ns", way.name(), medians.spread(i).mid);
            let suffix = if idle.is_zero() { "" } else { "_idle" };
            line(format!("latency_{}{suffix}_{LEN}", way.name()), 1, medians.spread(i));
        }
        let at = |way: Knowing| ways.iter().position(|&w| w == way);
        if let (Some(pool), Some(driver)) = (at(Knowing::PoolWait), at(Knowing::Polled)) {
            at_most(
                format!("wait() over a polled event, {title}"),
                medians.ratio(pool, driver),
                2.0,
                Some(1.2),
            );
        }
        if let (Some(pool), Some(driver)) = (at(Knowing::PoolAwait), at(Knowing::Blocking)) {
            let what = format!("a task's wake-up over a blocking event wait, {title}");
            at_most(what, medians.ratio(pool, driver), 1.0, Some(0.5));
        }
    }
}

// --- the reaper

/// Seconds of processor time while `during` runs, of the reaper and of the whole process, and the seconds that it took.
fn load(during: impl FnOnce()) -> (f64, f64, f64) {
    let (since, reaper, all) = (Instant::now(), processor_time(REAPER), processor_time(""));
    during();
    let seconds = since.elapsed().as_secs_f64();
    let taken = |before: Duration, prefix| processor_time(prefix).saturating_sub(before).as_secs_f64();
    (taken(reaper, REAPER), taken(all, ""), seconds)
}

fn reaper(driver: Option<&'static Driver>, device: &Device) {
    let seconds = number("seconds", if measure::quick() { 2 } else { 10 });
    let pool = pool(device, 4 << 20);
    let print = |what: &str, (reaper, all, seconds): (f64, f64, f64), gate: f64| {
        let share = reaper / seconds * 100.0;
        println!(
            "{what}: reaper {:.1} ms, the whole process {:.1} ms of processor time in {seconds:.2} s",
            reaper * 1e3,
            all * 1e3
        );
        at_most(
            format!("{what}, reaper, in per cent of a core"),
            Spread { low: share, mid: share, high: share },
            gate,
            None,
        );
    };
    println!("\nthe reaper's processor time");
    let Some(driver) = driver else {
        println!("behind a long kernel: skipped without a GPU");
        return idle(device, &pool, print);
    };
    driver.enter();
    let kernel = driver.spin_kernel();
    let (stream, memory) = (device.stream().expect("a stream"), device.alloc(4096).expect("device memory"));
    let handle = driver::handle(&stream);
    println!("behind a kernel of {seconds} s on the pool's own stream");
    driver.spin(kernel, 1, Duration::from_secs(seconds as u64).as_nanos() as u64, handle);
    let since = Instant::now();
    let upload = || stream.upload(checkout(&pool, 4096), &memory).expect("a copy");
    // The handle is dropped, so no thread waits for this copy.
    drop(upload());
    let waited = upload();
    let half = Duration::from_secs(seconds as u64) / 2;
    let alone = load(|| std::thread::sleep(half));
    assert!(!waited.is_done().expect("the device works"), "the stream is not as busy as it should be");
    let joined = load(|| drop(waited.wait().expect("the device works")));
    println!("in flight for {:.2} s", since.elapsed().as_secs_f64());
    print("no thread waits", alone, 2.0);
    print("a thread waits", joined, 2.0);
    drop(stream);
    idle(device, &pool, print);
}

/// Measures the reaper while nothing is in flight.
fn idle(device: &Device, pool: &Pool, print: impl Fn(&str, (f64, f64, f64), f64)) {
    let stream = device.stream().expect("a stream");
    let memory = device.alloc(4096).expect("device memory");
    drop(stream.upload(checkout(pool, 4096), &memory).expect("a copy"));
    stream.synchronize().expect("the device works");
    // Time for work that follows the copy.
    std::thread::sleep(Duration::from_millis(200));
    // Zero, but for the resolution of the clocks.
    print("an idle pool", load(|| std::thread::sleep(Duration::from_secs(2))), 0.01);
}

fn main() {
    let driver = driver::find();
    let device = match driver {
        Some(_) => Device::open("cuda:0").expect("the driver is there"),
        None => {
            println!("the pool alone, on the host device: nothing here is comparable with a GPU");
            Device::open("host").expect("the host device is always there")
        }
    };
    if wanted("track") {
        track(driver, &device);
    }
    if wanted("latency") {
        latency(driver, &device);
    }
    if wanted("reaper") {
        reaper(driver, &device);
    }
    measure::used();
}

//! A server on pinpool that runs the scenarios, and what it runs on.
//!
//! A [`Site`] is a kind of device: it says which phases a scenario has there. A [`Machine`] is the device of one phase:
//! what the scenarios can tell it beside pinpool. [`replay`] runs one scenario on one site, and on the plain pool where
//! the site asks for it, and judges.

use std::collections::HashSet;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use pinpool::{Device, DeviceSlice, InFlight, Lend, PinnedBuf, Pool, Stream};

use super::plain;
use super::{BYTES, Random, SLOTS, WORDS, message, word};

/// A kind of device to run the scenarios on.
pub trait Site: Sync {
    fn name(&self) -> &str;

    /// Checkouts of a scenario, through pinpool and through the plain pool. One site's are enough to see that the plain
    /// pool corrupts.
    fn targets(&self) -> (u64, u64);

    /// Runs a scenario's parts, which add up to that many checkouts.
    fn phases(&self, target: u64, phase: &mut dyn FnMut(On<'_>, Setup));
}

/// The device of one phase.
pub trait Machine: Sync {
    /// All that the phase needs is there.
    fn ready(&self, _: &Device) {}

    /// A thread that uses the device begins.
    fn enter(&self) {}

    /// Whether nothing of it runs by itself.
    fn by_hand(&self) -> bool {
        false
    }

    /// Makes such a device do one operation. `false`: there is none.
    fn step(&self) -> bool {
        false
    }

    /// Keeps a stream busy for a while.
    fn delay(&self, _: &Stream) {}

    /// Makes the next copy be reported as failed. Returns what it is to copy from.
    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice;

    /// Makes polling a copy fail once: transiently, or because of a capture.
    fn fail_query(&self, _capture: bool) {}

    /// Makes the next event be recorded, and reported as failed.
    fn fail_record(&self) {}

    /// Ends the failures.
    fn calm(&self) {}
}

/// One thread of a server, with streams and device memory of its own.
pub struct Worker<'a> {
    pub machine: &'a dyn Machine,
    device: &'a Device,
    pub pool: &'a Pool,
    pub streams: [Stream; 2],
    memory: DeviceSlice,
    /// Ask for just what is needed, in many classes, or for one size only.
    exact: bool,
    pub random: Random,
    seq: u64,
    pub checkouts: u64,
    /// Bytes.
    wrong: u64,
    verified: u64,
    bytes: u64,
    /// Where the buffers were.
    places: HashSet<usize>,
}

impl Worker<'_> {
    /// Moves a device a little that is moved by hand, and keeps another one busy now and then, if it can be.
    pub fn drift(&mut self) {
        if self.machine.by_hand() {
            if self.random.one_in(3) {
                self.machine.step();
            }
            if self.random.one_in(5) {
                self.device.reap();
            }
        } else if self.random.one_in(32) {
            self.machine.delay(&self.streams[self.random.below(2) as usize]);
        }
    }

    pub fn len_of(&self, n: usize) -> usize {
        if self.exact { n * 8 } else { BYTES }
    }

    pub fn checkout(&mut self, n: usize) -> PinnedBuf {
        self.checkouts += 1;
        self.drift();
        let buf = self.pool.checkout(self.len_of(n)).unwrap();
        self.places.insert(buf.as_ptr().addr());
        buf
    }

    /// A buffer that holds a new message: its number and length come with it.
    pub fn filled(&mut self) -> (PinnedBuf, u64, usize) {
        let n = self.random.len();
        let mut buf = self.checkout(n);
        self.seq += 1;
        buf.try_extend_from(&message(self.seq, n)[..n]).unwrap();
        (buf, self.seq, n)
    }

    pub fn slot(&self, slot: usize, n: usize) -> DeviceSlice {
        self.memory.slice(slot * BYTES..slot * BYTES + n * 8).unwrap()
    }

    fn expect(&mut self, words: &[u64], seq: u64, n: usize) {
        assert_eq!(words.len(), n, "a message of another length");
        self.verified += 1;
        self.bytes += n as u64 * 8;
        // Mostly none is wrong, which is looked at by words.
        for (i, found) in words.iter().enumerate() {
            let differs = found ^ word(seq, i);
            if differs != 0 {
                self.wrong += differs.to_ne_bytes().iter().filter(|b| **b != 0).count() as u64;
            }
        }
    }

    pub fn expect_in(&mut self, buf: &PinnedBuf, seq: u64, n: usize) {
        self.expect(buf.view::<u64>().unwrap(), seq, n);
    }

    /// Compares what lies in device memory: slot, number, length.
    pub fn expect_on_device(&mut self, messages: &[(usize, u64, usize)]) {
        let mut words = vec![0u64; SLOTS * WORDS];
        self.streams[0].download_blocking(&self.memory, bytemuck::cast_slice_mut(&mut words)).unwrap();
        for &(slot, seq, n) in messages {
            let at = slot * WORDS;
            self.expect(&words[at..at + n], seq, n);
        }
    }

    /// Fills all slots with messages of full length; the first one's number.
    pub fn fill_device(&mut self) -> u64 {
        let first = self.seq + 1;
        self.seq += SLOTS as u64;
        let words: Vec<u64> = (0..SLOTS).flat_map(|s| message(first + s as u64, WORDS)).collect();
        // Downloads of the round before whose handles were dropped may still read there, on the other stream: nothing
        // but this orders two streams, for a blocking copy as for any other.
        self.streams[0].wait_for(&self.streams[1]).unwrap();
        self.streams[0].upload_blocking(bytemuck::cast_slice(&words), &self.memory).unwrap();
        first
    }

    /// Waits for a handle in one of the ways that there are.
    pub fn land<B: Lend>(&mut self, flight: InFlight<B>) -> B {
        match self.random.below(3) {
            0 => self.block_on(flight),
            1 => {
                while !flight.is_done().unwrap() {
                    if self.machine.by_hand() {
                        self.machine.step();
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
                Poll::Pending if self.machine.by_hand() => {
                    self.machine.step();
                }
                Poll::Pending => std::thread::park(),
            }
        }
    }

    /// Waits, also where a device that is moved by hand says that it cannot go on just now, because polling failed.
    pub fn patiently(&mut self, mut flight: InFlight<PinnedBuf>) -> PinnedBuf {
        loop {
            match flight.wait_timeout(Duration::from_secs(20)) {
                Ok(buf) => return buf,
                Err(e) => flight = e.buffer.unwrap_or_else(|| panic!("lost: {}", e.error)),
            }
        }
    }
}

/// The result of a scenario.
#[derive(Default)]
struct Tally {
    checkouts: u64,
    verified: u64,
    bytes: u64,
    /// Bytes.
    wrong: u64,
    /// Different buffers among the checkouts.
    places: u64,
}

/// What a phase runs on.
pub type On<'a> = (&'a dyn Machine, &'a Device);

/// A part of a scenario's checkouts.
#[derive(Clone, Copy)]
pub struct Setup {
    pub workers: usize,
    pub exact: bool,
    /// Checkouts.
    pub target: u64,
}

/// Runs rounds on several workers of one pool until they have checked out that many buffers, and looks for lost ones.
fn phase(
    (machine, device): On<'_>,
    Setup { workers, exact, target }: Setup,
    round: &(impl Fn(&mut Worker<'_>) + Sync),
    tally: &mut Tally,
) {
    // A run for each class; or, of one class, so little that a round does not fit and a worker always waits for what is
    // in flight.
    let capacity = if exact { 640 << 10 } else { 24 << 10 };
    let pool = Pool::builder(device).capacity(capacity).build().unwrap();
    let (mut counted, mut places) = (0, 0);
    let streams = || [device.stream().unwrap(), device.stream().unwrap()];
    let mut all: Vec<Worker<'_>> = (0..workers as u64)
        .map(|w| Worker {
            machine,
            device,
            pool: &pool,
            streams: streams(),
            memory: device.alloc(SLOTS * BYTES).unwrap(),
            exact,
            random: Random(w << 32),
            seq: (w + 1) << 40,
            checkouts: 0,
            wrong: 0,
            verified: 0,
            bytes: 0,
            places: HashSet::new(),
        })
        .collect();
    machine.ready(device);
    std::thread::scope(|scope| {
        for worker in &mut all {
            scope.spawn(move || {
                machine.enter();
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
        tally.bytes += worker.bytes;
        tally.wrong += worker.wrong;
    }
    machine.calm();
    let since = Instant::now();
    let stats = loop {
        while machine.step() {}
        device.reap();
        let stats = pool.stats();
        // With threads, the last buffers come back a little later.
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

/// A scenario: `plain_round` and `round` are one round of it on the plain pool and on pinpool.
pub fn replay(
    site: &dyn Site,
    name: &str,
    workers: usize,
    plain_round: impl Fn(&plain::Pool, &mut Random, u64) -> u64,
    round: impl Fn(&mut Worker<'_>) + Sync,
) {
    let (target, plain_target) = site.targets();
    let (checkouts, corruptions) = plain::run(plain_target, plain_round);
    let mut tally = Tally::default();
    site.phases(target, &mut |on, setup| {
        // Where a scenario has one worker, or the phase has.
        let workers = workers.min(setup.workers);
        phase(on, Setup { workers, ..setup }, &round, &mut tally);
    });
    let Tally { checkouts: ours, verified, bytes, wrong, places } = tally;
    println!(
        "{name}, on {}: plain pool {corruptions} corruptions in {checkouts} checkouts; pinpool {wrong} wrong bytes in \
         {ours} checkouts, {bytes} bytes of {verified} messages compared",
        site.name()
    );
    assert!(
        corruptions > 0 || plain_target == 0,
        "the scenario does not show the bug: the plain pool got everything right"
    );
    assert!(ours >= target && checkouts >= plain_target);
    // Early reuse can only show where there is reuse.
    let uses = if super::full() { 8 } else { 2 };
    assert!(ours > uses * places, "{ours} checkouts of {places} buffers");
    assert!(verified >= ours / 4, "{verified} messages compared");
    assert_eq!(wrong, 0, "wrong bytes");
}

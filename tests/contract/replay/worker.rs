//! A server on pinpool that runs the scenarios, and what it runs on.
//!
//! A [`Site`] is a kind of device and the phases that a scenario has there. A [`Machine`] is the device of
//! one phase: what the scenarios can tell it beside pinpool. [`replay`] runs one scenario on every site, and
//! judges.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use pinpool::{Device, DeviceSlice, InFlight, Lend, PinnedBuf, Pool, Stream};

use super::{BYTES, Random, SLOTS, WORDS, host, message, word};
use crate::support::doubles::StandIn;
#[cfg(all(feature = "acl", target_os = "linux"))]
use crate::support::doubles::npu::{OF_2024, ON_DEVICE, TODAY};

/// A kind of device to run the scenarios on.
pub struct Site {
    pub name: String,
    /// Checkouts of a scenario.
    pub target: u64,
    pub phases: Vec<Phase>,
    /// The simulated machine, whose rules must not be broken.
    pub stand_in: Option<StandIn>,
}

/// A part of a scenario's checkouts.
pub struct Phase {
    pub device: Device,
    pub machine: Box<dyn Machine>,
    pub workers: usize,
    /// Whether each worker asks for just what is needed, in many classes, or for one size only.
    pub exact: bool,
    /// Checkouts.
    pub target: u64,
}

/// The device of one phase.
pub trait Machine: Send + Sync {
    /// All that the phase needs is there.
    fn ready(&self, _: &Device) {}

    /// A thread that uses the device begins.
    fn enter(&self) {}

    /// Makes a device that is moved by hand do one operation: whether there was one. `None`: it runs by
    /// itself.
    fn step(&self) -> Option<bool> {
        None
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
    phase: &'a Phase,
    by_hand: bool,
    pub pool: &'a Pool,
    pub streams: [Stream; 2],
    memory: DeviceSlice,
    pub random: Random,
    seq: u64,
    pub sum: Tally,
    /// Where the buffers were.
    places: HashSet<usize>,
}

impl Worker<'_> {
    pub fn machine(&self) -> &dyn Machine {
        &*self.phase.machine
    }

    /// Moves a device a little that is moved by hand, and keeps another one busy now and then, if it can be.
    pub fn drift(&mut self) {
        if self.by_hand {
            if self.random.one_in(3) {
                self.machine().step();
            }
            if self.random.one_in(5) {
                self.phase.device.reap();
            }
        } else if self.random.one_in(32) {
            let stream = self.random.below(2) as usize;
            self.machine().delay(&self.streams[stream]);
        }
    }

    pub fn len_of(&self, n: usize) -> usize {
        if self.phase.exact { n * 8 } else { BYTES }
    }

    pub fn checkout(&mut self, n: usize) -> PinnedBuf {
        self.sum.checkouts += 1;
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
        buf.try_extend_from(&message(self.seq, n)).unwrap();
        (buf, self.seq, n)
    }

    pub fn slot(&self, slot: usize, n: usize) -> DeviceSlice {
        self.memory.slice(slot * BYTES..slot * BYTES + n * 8).unwrap()
    }

    fn expect(&mut self, words: &[u64], seq: u64, n: usize) {
        assert_eq!(words.len(), n, "a message of another length");
        self.sum.verified += 1;
        self.sum.bytes += n as u64 * 8;
        // Mostly none is wrong, which is looked at by words.
        for (i, found) in words.iter().enumerate() {
            let differs = found ^ word(seq, i);
            if differs != 0 {
                self.sum.wrong += differs.to_ne_bytes().iter().filter(|b| **b != 0).count() as u64;
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
        // Downloads of the round before whose handles were dropped may still read there, on the other stream:
        // nothing but this orders two streams, for a blocking copy as for any other.
        self.streams[0].wait_for(&self.streams[1]).unwrap();
        self.streams[0].upload_blocking(bytemuck::cast_slice(&words), &self.memory).unwrap();
        first
    }

    /// Waits for a handle in one of the ways that there are.
    pub fn land<B: Lend>(&mut self, flight: InFlight<B>) -> B {
        let way = self.random.below(3);
        let pump = || {
            if self.by_hand {
                self.machine().step();
                self.phase.device.reap();
            } else {
                std::thread::yield_now();
            }
        };
        match way {
            0 => crate::waiting::block_on(pump, flight).unwrap(),
            1 => {
                while !flight.is_done().unwrap() {
                    pump();
                }
                flight.wait().unwrap()
            }
            _ => flight.wait().unwrap(),
        }
    }

    /// Waits, also where a device that is moved by hand says that it cannot go on just now, because polling
    /// failed.
    pub fn patiently(&mut self, mut flight: InFlight<PinnedBuf>) -> PinnedBuf {
        loop {
            match flight.wait_timeout(Duration::from_secs(20)) {
                Ok(buf) => return buf,
                Err(e) => flight = e.buffer.unwrap_or_else(|| panic!("lost: {}", e.error)),
            }
        }
    }
}

/// The sums of a worker, or of a scenario on a site.
#[derive(Default)]
pub struct Tally {
    pub checkouts: u64,
    /// Copies that failed.
    pub failures: u64,
    verified: u64,
    bytes: u64,
    /// Bytes.
    wrong: u64,
    /// Different buffers among the checkouts.
    places: u64,
}

/// Runs rounds on several workers of one pool until they have checked out that many buffers, and looks for
/// lost ones.
fn run(phase: &Phase, workers: usize, round: &(impl Fn(&mut Worker<'_>) + Sync), tally: &mut Tally) {
    let Phase { device, machine, exact, target, .. } = phase;
    // A run for each class; or, of one class, so little that a round does not fit and a worker always waits
    // for what is in flight.
    let capacity = if *exact { 640 << 10 } else { 24 << 10 };
    let pool = Pool::builder(device).capacity(capacity).build().unwrap();
    let mut all: Vec<Worker<'_>> = (0..workers as u64)
        .map(|w| Worker {
            phase,
            by_hand: machine.step().is_some(),
            pool: &pool,
            streams: [(); 2].map(|()| device.stream().unwrap()),
            memory: device.alloc(SLOTS * BYTES).unwrap(),
            random: Random(w << 32),
            seq: (w + 1) << 40,
            sum: Tally::default(),
            places: HashSet::new(),
        })
        .collect();
    machine.ready(device);
    std::thread::scope(|scope| {
        for worker in &mut all {
            scope.spawn(move || {
                machine.enter();
                while worker.sum.checkouts < target.div_ceil(workers as u64) {
                    round(worker);
                }
            });
        }
    });
    let counted = all.iter().map(|worker| worker.sum.checkouts).sum();
    tally.checkouts += counted;
    for Worker { sum, places, .. } in all {
        tally.failures += sum.failures;
        tally.places += places.len() as u64;
        tally.verified += sum.verified;
        tally.bytes += sum.bytes;
        tally.wrong += sum.wrong;
    }
    machine.calm();
    let since = Instant::now();
    let stats = loop {
        while machine.step() == Some(true) {}
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
}

/// Runs a scenario, which is a test of this name, on at most so many workers at a time. Returns how many
/// copies failed on the site that had the fewest such.
#[allow(unused_mut, unused_variables, reason = "without accelerators there is one site")]
pub fn replay(test: &str, workers: usize, round: impl Fn(&mut Worker<'_>) + Sync) -> u64 {
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    if let Some(site) = super::gpu::of_child() {
        return replay_on(&site, workers, &round);
    }
    let mut fewest = replay_on(&host::site(), workers, &round);
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    if !super::gpu::in_a_child(test) {
        fewest = fewest.min(replay_on(&super::simulated::gpus(), workers, &round));
    }
    #[cfg(all(feature = "acl", target_os = "linux"))]
    for way in [TODAY, ON_DEVICE, OF_2024] {
        fewest = fewest.min(replay_on(&super::simulated::npus(way), workers, &round));
    }
    fewest
}

fn replay_on(site: &Site, workers: usize, round: &(impl Fn(&mut Worker<'_>) + Sync)) -> u64 {
    let mut tally = Tally::default();
    for phase in &site.phases {
        // Where a scenario has one worker, or the phase has.
        run(phase, workers.min(phase.workers), round, &mut tally);
    }
    let Tally { checkouts, failures, verified, bytes, wrong, places } = tally;
    println!(
        "on {}: {wrong} wrong bytes in {checkouts} checkouts, {bytes} bytes of {verified} messages compared",
        site.name
    );
    assert!(checkouts >= site.target);
    // Early reuse can only show where there is reuse.
    assert!(checkouts > super::checkouts(8, 2) * places, "{checkouts} checkouts of {places} buffers");
    assert!(verified >= checkouts / 4, "{verified} messages compared");
    assert_eq!(wrong, 0, "wrong bytes");
    if let Some(stand_in) = &site.stand_in {
        assert_eq!(stand_in.report().violations, Vec::<String>::new());
    }
    failures
}

//! The host tier of `examples/kv_tier.rs`: loads and stores of a request's blocks, and a load beside a stream that computes.
//!
//! # What is measured
//!
//! A request has 256 blocks (`--blocks`) of 64 pages, 4, 16 or 32 KiB each (`--pages`): one page in each plane of the
//! device's cache. As many blocks have room on the device, so that each request moves all of its own.
//!
//! | row | what it is, by wall time of the caller |
//! | --- | --- |
//! | `load` | a request for blocks that the host has: from the call to the last layer, lists and all |
//! | `store` | a request for new blocks, whose places have blocks that the host lacks: until these are stored |
//! | `pages_load`, `pages_store` | the copier alone: `upload_pages` and `download_pages` of as many blocks, each contiguous on the host |
//!
//! Each row is given in MB/s and in thousandths of the pinned peak of its round: the best of five copies of 64 MiB in the
//! same direction, just before (`link_` and the row's name). Bytes of loads and stores are compared once for
//! each length, over the way to the host and back.
//!
//! # Computing beside it
//!
//! Then a request waits for one layer after the other and launches a kernel for each, on its stream. All kernels
//! together last as long as the load (`--compute` for another share of it, in per cent). Layer *l* arrives at a time
//! that the host sees, and the kernels from there on need `(32 - l)` times one kernel's time. The largest of these sums
//! is the earliest possible end. *Stalls* is the end that was seen over the earliest possible one: above 1 the stream
//! has waited for something that is not its own layer's data. `beside` is the load meanwhile over the load alone.
//! Without kernels (no GPU) a copy within the device takes their place.
//!
//! `benches/peers/vllm_blocks.py` moves the same blocks in vLLM's two ways, and prints rows of the same kind.
#![allow(missing_docs, unsafe_code)]

#[path = "driver/mod.rs"]
mod driver;
#[allow(dead_code, reason = "the bench uses a part of it")]
#[path = "../examples/kv_tier.rs"]
mod kv_tier;
#[path = "measure/mod.rs"]
mod measure;

use std::time::Instant;

use kv_tier::{Hash, LAYERS, PLANES, Tier, content, request};
use measure::small::{Random, checkout, peak, pool};
use measure::{Spread, at_least, at_most, beside, line, number, numbers, quantile};
use pinpool::{Copier, Device, DeviceSlice, PinnedBuf, Pool, Stream};

/// Bytes of the copies that give the peak, and of the copier's segments.
const WHOLE: usize = 64 << 20;
const SEGMENTS: usize = 128 << 20;
/// Pages of a block.
const PAGES: usize = LAYERS * PLANES;

struct Setup {
    device: Device,
    /// The copier's segments, and the buffer of the peak.
    pool: Pool,
    copier: Copier,
    stream: Stream,
    memory: DeviceSlice,
    rounds: usize,
}

/// A tier for one length of pages, and what its requests use.
struct Turn<'a> {
    setup: &'a Setup,
    tier: Tier,
    blocks: usize,
    page: usize,
    random: Random,
    /// Which of the two requests' blocks the device lacks.
    next: u64,
}

fn main() {
    // `cargo test` runs benches with this argument.
    if measure::flag("test") {
        return println!("kv_tier: not a test");
    }
    let driver = driver::find();
    let device = Device::open(if driver.is_some() { "cuda:0" } else { "host" }).expect("a device");
    let own = pool(&device, WHOLE + 2 * SEGMENTS);
    let few = measure::quick() || driver.is_none();
    let setup = Setup {
        copier: Copier::builder(&own, &device).share(SEGMENTS).build().expect("a copier"),
        pool: own,
        stream: device.stream().expect("a stream"),
        memory: device.alloc(WHOLE).expect("device memory"),
        rounds: number("rounds", if few { 2 } else { 9 }),
        device,
    };
    let blocks = number("blocks", if few { 16 } else { 256 });
    for page in numbers("pages", &[4, 16, 32]).into_iter().map(|kib| kib << 10) {
        setup.of(driver, page, blocks);
    }
    measure::used();
}

impl Setup {
    fn peak(&self, upload: bool) -> f64 {
        peak(&self.pool, &self.stream, &self.memory, WHOLE, upload)
    }

    fn of(&self, driver: Option<&'static driver::Driver>, page: usize, blocks: usize) {
        let total = blocks * PAGES * page;
        println!("\n{blocks} blocks of {PAGES} pages of {} KiB, {} MiB", page >> 10, total >> 20);
        // Two requests' blocks, and what classes round up.
        let hosts = pool(&self.device, 2 * total + total / 2 + (64 << 20));
        let tier = Tier::new(&hosts, self.copier.clone(), blocks, page, None).expect("device memory");
        let mut turn = Turn { setup: self, tier, blocks, page, random: Random(page as u64 + 3), next: 0 };
        turn.check();
        let load = turn.loads();
        turn.computes(driver, load);
        turn.stores();
        drop((turn, hosts));
        self.pages(page, blocks);
        let stats = self.copier.stats();
        println!(
            "so far: {} MiB by the ring ({} launches of {} chunks), {} in batches, {} in place",
            stats.ring_bytes >> 20,
            stats.launches,
            stats.launched_chunks,
            stats.batch_bytes >> 20,
            stats.in_place_bytes >> 20
        );
    }

    /// The copier alone, beside the tier's rows.
    fn pages(&self, page: usize, blocks: usize) {
        let (len, kib) = (PAGES * page, page >> 10);
        let pool = pool(&self.device, blocks * (len + len / 4) + (64 << 20));
        let cache = self.device.alloc(blocks * len).expect("device memory");
        // A block's pages lie apart by a plane.
        let places = |place: usize| {
            cache.strided(place * page..(place + 1) * page, blocks * page, PAGES).expect("within")
        };
        let mut bufs: Vec<PinnedBuf> = (0..blocks).map(|n| checkout(&pool, len, n * 5 + 1)).collect();
        let (mut up, mut down) = (Vec::new(), Vec::new());
        for round in 0..=self.rounds {
            let order = Random(round as u64 + 9).order(blocks);
            let link = self.peak(true);
            let work = bufs.drain(..).zip(&order).map(|(buf, place)| (buf, places(*place))).collect();
            let since = Instant::now();
            bufs = self.copier.upload_pages(work).expect("copies").wait().expect("the device works");
            let rate = (blocks * len) as f64 / since.elapsed().as_nanos() as f64;
            up.push((rate, link));
            let link = self.peak(false);
            let mut seeds: Vec<u8> = bufs.iter().map(|buf| buf[0]).collect();
            bufs.iter_mut().for_each(PinnedBuf::clear);
            let work = order.iter().zip(bufs.drain(..)).map(|(place, buf)| (places(*place), buf)).collect();
            let since = Instant::now();
            bufs = self.copier.download_pages(work).expect("copies").wait().expect("the device works");
            let rate = (blocks * len) as f64 / since.elapsed().as_nanos() as f64;
            down.push((rate, link));
            for (buf, seed) in bufs.iter().zip(seeds.drain(..)) {
                assert!(buf.len() == len && buf.iter().all(|byte| *byte == seed), "pages of {kib} KiB");
            }
        }
        row(&format!("pages_load_{kib}k"), &up[1..]);
        row(&format!("pages_store_{kib}k"), &down[1..]);
    }
}

/// Prints the rates of rounds, with the peak of each. Gives the shares of the peak.
fn row(name: &str, rounds: &[(f64, f64)]) -> Spread {
    let rates: Vec<f64> = rounds.iter().map(|(rate, _)| rate * 1e3).collect();
    let peaks: Vec<f64> = rounds.iter().map(|(_, peak)| peak * 1e3).collect();
    let shares: Vec<f64> = rounds.iter().map(|(rate, peak)| rate / peak).collect();
    let permille: Vec<f64> = shares.iter().map(|share| share * 1e3).collect();
    let (rate, share) = (Spread::of(&rates), Spread::of(&shares));
    println!(
        "{name:<16} {:>7.2} GB/s, {:.3} of the peak ({:.3} to {:.3})",
        rate.mid / 1e3,
        share.mid,
        share.low,
        share.high
    );
    line(format!("kv_{name}_mb_per_s"), 1, rate);
    line(format!("kv_{name}_permille"), 1, Spread::of(&permille));
    line(format!("kv_link_{name}_mb_per_s"), 1, Spread::of(&peaks));
    share
}

impl Turn<'_> {
    fn kib(&self) -> usize {
        self.page >> 10
    }

    /// The blocks of a request, in no order.
    fn hashes(&mut self, set: u64) -> Vec<Hash> {
        let order = self.random.order(self.blocks);
        order.into_iter().map(|block| set * 1_000_000 + block as u64).collect()
    }

    /// Those of two requests by turns, which the device lacks and the host has.
    fn others(&mut self) -> Vec<Hash> {
        self.next = 1 - self.next;
        self.hashes(1 - self.next)
    }

    fn total(&self) -> usize {
        self.blocks * PAGES * self.page
    }

    /// Nothing of the last request is under way.
    fn settle(&self) {
        self.setup.stream.synchronize().expect("the device works");
    }

    /// A request that is granted at once or soon, and the time of the call that granted it.
    fn lease(&self, hashes: &[Hash]) -> (kv_tier::Lease<'_>, Instant) {
        loop {
            let since = Instant::now();
            if let Some(lease) = self.tier.lease(hashes, &self.setup.stream).expect("the device works") {
                return (lease, since);
            }
            std::thread::yield_now();
        }
    }

    /// Two requests' blocks are computed, stored, and loaded; every byte is compared. Afterwards the host has both, and the
    /// device has the second's.
    fn check(&mut self) {
        let read = self.setup.device.alloc(self.total()).expect("device memory");
        let mut back = vec![0; self.total()];
        for set in [0, 1, 0, 1] {
            let hashes = self.hashes(set);
            while !request(&self.tier, &self.setup.stream, &hashes, &read).expect("the device works") {
                std::thread::yield_now();
            }
            self.setup.stream.download_blocking(&read, &mut back).expect("a copy");
            let mut pages = back.chunks(self.page);
            for layer in 0..LAYERS {
                for (hash, plane) in
                    hashes.iter().flat_map(|hash| (0..PLANES).map(move |plane| (hash, plane)))
                {
                    let (page, byte) = (pages.next().expect("a page"), content(*hash, layer, plane));
                    assert!(
                        page.iter().all(|found| *found == byte),
                        "block {hash}, layer {layer}, plane {plane}"
                    );
                }
            }
        }
        let blocks = self.blocks as u64;
        assert_eq!(self.tier.counts(), (2 * blocks, 2 * blocks), "blocks loaded and stored");
    }

    /// Seconds of a load, by the median.
    fn loads(&mut self) -> f64 {
        let mut rounds = Vec::new();
        for _ in 0..=self.setup.rounds {
            let (hashes, link) = (self.others(), self.setup.peak(true));
            self.settle();
            let (lease, since) = self.lease(&hashes);
            for layer in 0..LAYERS {
                lease.layer(layer, &self.setup.stream).expect("the device works");
            }
            let taken = since.elapsed().as_secs_f64();
            assert!(!(0..self.blocks).any(|block| lease.is_new(block)), "all are loaded");
            lease.release(&self.setup.stream).expect("the device works");
            rounds.push((self.total() as f64 / taken / 1e9, link));
        }
        let name = format!("load_{}k", self.kib());
        let share = row(&name, &rounds[1..]);
        at_least(format!("{name} of the pinned peak"), share, 0.88, Some(0.95));
        let rates: Vec<f64> = rounds[1..].iter().map(|(rate, _)| *rate).collect();
        self.total() as f64 / quantile(&rates, 0.5) / 1e9
    }

    fn stores(&mut self) {
        let mut rounds = Vec::new();
        for round in 0..=self.setup.rounds as u64 {
            // The first request's places have blocks that the host has.
            let (hashes, link) = (self.hashes(round + 2), self.setup.peak(false));
            self.settle();
            let before = self.tier.counts().1;
            let (lease, since) = self.lease(&hashes);
            let taken = since.elapsed().as_secs_f64();
            assert_eq!(self.tier.counts().1 - before, if round == 0 { 0 } else { self.blocks as u64 });
            lease.release(&self.setup.stream).expect("the device works");
            rounds.push((self.total() as f64 / taken / 1e9, link));
        }
        let name = format!("store_{}k", self.kib());
        let share = row(&name, &rounds[1..]);
        at_least(format!("{name} of the pinned peak"), share, 0.92, Some(0.97));
    }

    /// Loads beside kernels; `alone`: the seconds of one without.
    fn computes(&mut self, driver: Option<&'static driver::Driver>, alone: f64) {
        let Setup { device, stream, .. } = self.setup;
        let nanos = (alone * 1e9 * number("compute", 100) as f64 / 100.0 / LAYERS as f64) as u64;
        let kernel = driver.map(|driver| (driver, driver.spin_kernel()));
        let from = device.alloc(1 << 20).expect("device memory");
        let to = device.alloc(1 << 20).expect("device memory");
        let launch = || match kernel {
            Some((driver, kernel)) => driver.spin(kernel, 32, nanos, driver::handle(stream)),
            None => drop(stream.copy(&from, &to).expect("a copy")),
        };
        let seconds = |since: Instant| since.elapsed().as_secs_f64();
        let (mut stalls, mut loads) = (Vec::new(), Vec::new());
        for _ in 0..=self.setup.rounds {
            self.settle();
            let since = Instant::now();
            (0..LAYERS).for_each(|_| launch());
            stream.synchronize().expect("the device works");
            let each = seconds(since) / LAYERS as f64;
            let hashes = self.others();
            self.settle();
            let (lease, since) = self.lease(&hashes);
            let mut landed = [0.0; LAYERS];
            for (layer, landed) in landed.iter_mut().enumerate() {
                lease.layer(layer, stream).expect("the device works");
                *landed = seconds(since);
                launch();
            }
            stream.synchronize().expect("the device works");
            let end = seconds(since);
            lease.release(stream).expect("the device works");
            let ends = landed.iter().enumerate().map(|(layer, at)| at + (LAYERS - layer) as f64 * each);
            stalls.push(end / ends.fold(0.0, f64::max));
            loads.push(landed[LAYERS - 1] / alone);
        }
        let permille: Vec<f64> = stalls[1..].iter().map(|stalls| stalls * 1e3).collect();
        line(format!("kv_stalls_{}k_permille", self.kib()), 1, Spread::of(&permille));
        let name = format!("load_{}k beside {LAYERS} kernels of {:.0} us", self.kib(), nanos as f64 / 1e3);
        at_most(
            format!("{name}: the end over the earliest that the layers allow"),
            Spread::of(&stalls[1..]),
            1.05,
            Some(1.02),
        );
        beside(format!("{name}: the load over the load alone"), Spread::of(&loads[1..]));
    }
}

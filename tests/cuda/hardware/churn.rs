//! Many threads that check out, fill, upload and drop at once, and every byte checked on the device.
//!
//! With kernels the check runs on the GPU, on the stream of the upload, right behind it; the buffer's handle is dropped
//! as soon as both are submitted, so the host refills segments while copies are under way. Without kernels (the
//! stand-in) each upload is copied back and compared on the host a little later.
//!
//! Device memory is a ring for each thread, used again in the order of the thread's one stream.

use std::collections::VecDeque;

use pinpool::{Device, DeviceSlice, InFlight, PinnedBuf, Pool, Stream};

use super::{Gpu, HANG, bridge, filled, open, skip, until};
use crate::support::kernels::{self, Counts, Kernels};

const LARGEST: usize = 1 << 20;
const USUAL: usize = 64 << 10;
/// Pieces of device memory in a thread's ring.
const RING: usize = 4;

/// What was done and found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub uploads: u64,
    pub bytes: u64,
    pub checked: Counts,
}

impl Totals {
    /// # Panics
    /// If a byte was wrong, or one that was sent was not looked at.
    pub fn judge(&self) {
        let Counts { wrong, bytes, launches } = self.checked;
        assert_eq!(wrong, 0, "wrong bytes: {self:?}");
        assert_eq!((launches, bytes), (self.uploads, self.bytes), "not all was checked: {self:?}");
    }
}

/// A number generator for lengths and seeds.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x2545_F491_4F6C_DD1D) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// 1 B to 64 KiB, and one in a hundred 1 MiB.
    fn len(&mut self) -> usize {
        match self.next() % 100 {
            0 => LARGEST,
            _ => 1 + self.next() as usize % USUAL,
        }
    }
}

/// What a thread needs to make the GPU check: its stream's handle and the counts.
struct OnGpu<'a> {
    kernels: &'a Kernels<'a>,
    stream: usize,
    counts: u64,
}

/// One thread's part.
fn worker(
    gpu: &Gpu,
    pool: &Pool,
    device: &Device,
    stream: &Stream,
    on: Option<(&Kernels<'_>, usize)>,
    number: u64,
    count: u64,
) -> Totals {
    let ring: Vec<DeviceSlice> = (0..RING).map(|_| device.alloc(LARGEST).expect("device memory")).collect();
    let on_gpu = on.map(|(kernels, context)| {
        gpu.raw.set_current(context);
        let stream = bridge::raw_stream(stream).expect("looked at before");
        OnGpu { kernels, stream, counts: kernels.counts() }
    });
    let (mut random, mut totals) = (Random::new(number), Totals::default());
    let mut landing: VecDeque<(InFlight<PinnedBuf>, u64)> = VecDeque::new();
    let compare = |(flight, seed): (InFlight<PinnedBuf>, u64)| {
        let back = flight.wait().expect("it lands");
        Counts { wrong: kernels::wrong(&back, seed) as u64, bytes: back.len() as u64, launches: 1 }
    };
    for n in 0..count {
        let (len, seed) = (random.len(), random.next());
        let memory = &ring[n as usize % RING];
        let slice = memory.slice(..len).expect("within the ring");
        // The handle is dropped at once: the segment returns when the copy is complete.
        drop(stream.upload(filled(pool, len, seed), &slice).expect("an upload"));
        match &on_gpu {
            Some(on) => {
                let at = bridge::address(memory).expect("looked at before");
                on.kernels.check(at, len, seed, on.counts, on.stream);
            }
            None => {
                let buf = pool.checkout_timeout(len, HANG).expect("the pool has room");
                landing.push_back((stream.download(&slice, buf).expect("a download"), seed));
                // Few at a time: another thread may be waiting for what one holds.
                if landing.len() > 2 {
                    totals.checked += landing.pop_front().map(compare).unwrap_or_default();
                }
            }
        }
        totals.uploads += 1;
        totals.bytes += len as u64;
    }
    landing.into_iter().for_each(|last| totals.checked += compare(last));
    if let Some(on) = on_gpu {
        gpu.raw.synchronize(on.stream);
        totals.checked += on.kernels.read(on.counts);
        gpu.raw.free(on.counts);
    }
    totals
}

/// `count` checkouts by several threads, each on a stream of one device. `kernels`: what checks, where a GPU can.
pub fn churn(
    gpu: &Gpu,
    pool: &Pool,
    (device, ordinal): (&Device, usize),
    kernels: Option<&Kernels<'_>>,
    (threads, streams): (u64, usize),
    count: u64,
) -> Totals {
    let streams: Vec<Stream> = (0..streams).map(|_| device.stream().expect("a stream")).collect();
    let context = kernels.map(|_| gpu.raw.enter(ordinal));
    let totals = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                let stream = &streams[number as usize % streams.len()];
                let share = count / threads + u64::from(number < count % threads);
                let on = kernels.zip(context);
                let seed = number + 1000 * ordinal as u64;
                scope.spawn(move || worker(gpu, pool, device, stream, on, seed, share))
            })
            .collect();
        let mut totals = Totals::default();
        for worker in workers {
            let part = worker.join().expect("a worker");
            totals.uploads += part.uploads;
            totals.bytes += part.bytes;
            totals.checked += part.checked;
        }
        totals
    });
    if context.is_some() {
        gpu.raw.release(ordinal);
    }
    totals
}

/// How many checkouts.
pub fn count(gpu: &Gpu) -> u64 {
    let asked = std::env::var("PINPOOL_HARDWARE_CHECKOUTS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(if gpu.real { 20_000 } else { 2_000 })
}

/// Whether kernels can run behind pinpool's own copies.
pub fn can_check(gpu: &Gpu, device: &Device) -> bool {
    let stream = device.stream().expect("a stream");
    let memory = device.alloc(1).expect("device memory");
    gpu.real && bridge::raw_stream(&stream).is_some() && bridge::address(&memory).is_some()
}

pub fn sixteen_threads(gpu: &Gpu) {
    const TEST: &str = "every_byte_is_checked_while_the_host_refills";
    let device = open(0);
    let pool = Pool::builder(&device).capacity(256 << 20).initial(32 << 20).build().expect("a pool");
    let kernels = gpu.kernels().filter(|_| can_check(gpu, &device));
    let totals = churn(gpu, &pool, (&device, 0), kernels.as_ref(), (16, 8), count(gpu));
    until("all is back", || pool.stats().in_flight_bytes == 0);
    let stats = pool.stats();
    println!(
        "{TEST}: {} checkouts of 16 threads on 8 streams, {} bytes; checked {}: {} times, {} bytes, {} wrong; the pool \
         pinned {} bytes, {} checkouts waited",
        totals.uploads,
        totals.bytes,
        if kernels.is_some() { "by kernels" } else { "on the host" },
        totals.checked.launches,
        totals.checked.bytes,
        totals.checked.wrong,
        stats.pinned_bytes,
        stats.waits,
    );
    totals.judge();
    assert_eq!((stats.checked_out_bytes, stats.quarantined_bytes), (0, 0), "{stats:?}");
    pool.check().expect("the pool is whole");
    gpu.no_violations();
    if gpu.real && kernels.is_none() {
        skip(TEST, "checked on the host only: raw streams and addresses are not switched on");
    }
}

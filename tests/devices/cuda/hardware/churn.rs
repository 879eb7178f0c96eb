//! Many threads that check out, fill, upload and drop at once, and every byte checked on the device.
//!
//! A kernel checks, on the stream of the upload, right behind it; the buffer's handle is dropped as soon as
//! both are submitted, so the host refills segments while copies are under way. (Without kernels
//! `contract/replay` does the like.)
//!
//! Device memory is a ring for each thread, used again in the order of the thread's one stream.

use pinpool::{Copier, Device, DeviceSlice, Pool, Stream};

use super::{StandIn, filled, kernels_of, open, raw_stream, until};
use crate::support::kernels::{Counts, Kernels};
use crate::support::{Random, variable};

const LARGEST: usize = 1 << 20;
const USUAL: usize = 64 << 10;
/// Pieces of device memory in a thread's ring.
const RING: usize = 4;

/// 1 B to 64 KiB, and one in a hundred 1 MiB.
fn any_len(random: &mut Random) -> usize {
    if random.below(100) == 0 { LARGEST } else { 1 + random.below(USUAL) }
}

/// One thread's part, with its stream of the device: each byte that it sends is looked at, and right.
fn worker(
    raw: &StandIn,
    pool: &Pool,
    (device, stream): (&Device, &Stream),
    (kernels, context): (&Kernels<'_>, usize),
    number: u64,
    count: u64,
) {
    let ring: Vec<DeviceSlice> = (0..RING).map(|_| device.alloc(LARGEST).expect("device memory")).collect();
    raw.current(context);
    let (handle, counts) = (raw_stream(stream), kernels.counts());
    let (mut random, mut sent) = (Random::new(number), 0);
    for n in 0..count {
        let (len, seed) = (any_len(&mut random), random.next());
        let memory = &ring[n as usize % RING];
        // The handle is dropped at once: the segment returns when the copy is complete.
        drop(stream.upload(filled(pool, len, seed), memory.slice(..len)).expect("an upload"));
        kernels.check(memory.address(), len, seed, counts, handle);
        sent += len as u64;
    }
    raw.synchronize(handle);
    assert_eq!(kernels.read(counts), Counts { wrong: 0, bytes: sent, launches: count });
    raw.ok("cuMemFree_v2", &[counts as usize]);
}

/// `count` checkouts by several threads, each on a stream of one device.
pub fn churn(
    raw: &StandIn,
    pool: &Pool,
    (device, ordinal): (&Device, usize),
    kernels: &Kernels<'_>,
    (threads, streams): (u64, usize),
    count: u64,
) {
    let streams: Vec<Stream> = (0..streams).map(|_| device.stream().expect("a stream")).collect();
    let context = raw.retain(ordinal);
    std::thread::scope(|scope| {
        for number in 0..threads {
            let stream = &streams[number as usize % streams.len()];
            let share = count / threads + u64::from(number < count % threads);
            let seed = number + 1000 * ordinal as u64;
            scope.spawn(move || worker(raw, pool, (device, stream), (kernels, context), seed, share));
        }
    });
    raw.ok("cuDevicePrimaryCtxRelease_v2", &[ordinal]);
}

pub fn count() -> u64 {
    variable("PINPOOL_HARDWARE_CHECKOUTS", 20_000)
}

pub fn sixteen_threads(raw: &StandIn) {
    let device = open(0);
    let pool = Pool::builder(&device).capacity(256 << 20).initial(32 << 20).build().expect("a pool");
    let kernels = kernels_of(raw, 0);
    churn(raw, &pool, (&device, 0), &kernels, (16, 8), count());
    until("all is back", || pool.stats().in_flight_bytes == 0);
    let stats = pool.stats();
    assert_eq!((stats.checked_out_bytes, stats.quarantined_bytes), (0, 0), "{stats:?}");
    pool.check().expect("the pool is whole");
}

/// Very short pieces by several threads at once, which a driver was seen to lose the device over
/// (`device/cuda/batch.rs`).
pub fn thousands(_: &StandIn) {
    const LEN: usize = 1 << 10;
    const COUNT: usize = 1 << 18;
    let device = open(0);
    let pool = Pool::builder(&device).capacity(64 << 20).build().unwrap();
    // By the device ring, and in batches.
    let copiers = [64 << 20, 0]
        .map(|ring| Copier::builder(&pool, &device).threads(8).share(32 << 20).ring(ring).build().unwrap());
    let memory = device.alloc(2 * COUNT * LEN).unwrap();
    let sources: Vec<[u8; LEN]> = (0..COUNT).map(|i| [i as u8; LEN]).collect();
    // Every second place or so, in the order of a multiplication.
    let place = |i: usize| i.wrapping_mul(0x9E37_79B1) % (2 * COUNT) * LEN;
    let places = (0..COUNT).map(|i| memory.slice(place(i)..place(i) + LEN).unwrap());
    let pieces: Vec<(&[u8], DeviceSlice)> = sources.iter().map(|source| &source[..]).zip(places).collect();
    for copier in &copiers {
        device.stream().unwrap().upload_blocking(&vec![255; memory.len()], &memory).unwrap();
        for _ in 0..24 {
            copier.upload_slices(&pieces).unwrap();
        }
        let mut back = vec![[255_u8; LEN]; COUNT];
        let places = pieces.iter().map(|(_, place)| place.clone());
        copier
            .download_slices(&mut places.zip(back.iter_mut().map(|bytes| &mut bytes[..])).collect::<Vec<_>>())
            .unwrap();
        assert!(back == sources, "a piece is elsewhere");
    }
}

//! The copier on a GPU: pieces through the device ring and its kernels, and in batches, against a plain
//! model; drivers with and without these calls; and a driver that fails, hangs and dies.
//!
//! What every device does is in `contract`, and what needs no kernel is in `core/copy/pieces.rs`, on host devices.

use pinpool::{Copier, Device, DeviceSlice, Error, ErrorClass, Pool, Unpinned};
use pinpool_sim::cuda::Driver;

use crate::cuda::rig::open;
use crate::support::doubles::gpu::{
    Gpu, all_back, bytes, calls, filled, on_driver, on_gpu, on_stand_in, until,
};
use crate::support::doubles::{HANG, StandIn};
use crate::support::in_use;

const PIECE: usize = 512;
/// Of different lengths, so that the rows of a table differ.
fn len(i: usize) -> usize {
    500 - i % 7
}

/// With room for whole chunks.
fn pool(device: &Device, capacity: usize) -> Pool {
    let built = Pool::builder(device).capacity(capacity).extent(1 << 20).region(2 << 20);
    built.unpinned(Unpinned::Allow).build().unwrap()
}

fn copier(pool: &Pool, device: &Device, ring: usize) -> Copier {
    Copier::builder(pool, device).threads(2).chunk(256 << 10).ring(ring).build().unwrap()
}

fn place(memory: &DeviceSlice, i: usize) -> DeviceSlice {
    memory.slice(i * PIECE..i * PIECE + len(i)).unwrap()
}

/// Uploads pieces that lie near each other, by one call.
fn upload(copier: &Copier, memory: &DeviceSlice, count: usize) -> Result<(), Error> {
    let sources: Vec<_> = (0..count).map(|i| bytes(i, len(i))).collect();
    let pieces: Vec<_> = (0..).zip(&sources).map(|(i, bytes)| (&bytes[..], place(memory, i))).collect();
    copier.upload_slices(&pieces)
}

fn arrived(device: &Device, memory: &DeviceSlice, count: usize) {
    let mut all = vec![0; memory.len()];
    device.stream().unwrap().download_blocking(memory, &mut all).unwrap();
    for i in 0..count {
        assert!(all[i * PIECE..][..len(i)] == bytes(i, len(i)), "piece {i}");
    }
}

/// The ring is given back when it was unused for a while, and taken again.
#[test]
fn an_idle_ring_is_given_back() {
    on_gpu(|_| {
        let device = open();
        let pool = pool(&device, 8 << 20);
        let copier = copier(&pool, &device, 8 << 20);
        let memory = device.alloc(2000 * PIECE).unwrap();
        for round in 0..2 {
            let before = copier.stats().ring_bytes;
            upload(&copier, &memory, 2000).unwrap();
            arrived(&device, &memory, 2000);
            // On a busy machine the ring may have been given back by now.
            assert!(copier.stats().ring_bytes > before, "round {round}");
            if round == 0 {
                until("the ring is given back", || copier.stats().ring == 0);
            }
        }
    });
}

/// Streams that are lost keep the slots of what was in flight there. Calls that are refused after that keep
/// none, so no ring is allocated in place of one that has none left.
#[test]
fn refused_calls_keep_no_device_memory() {
    on_stand_in(|_, d| {
        const RING: usize = 8 << 20;
        const MEMORY: usize = 4 << 20;
        let device = open();
        let memory = device.alloc(MEMORY).unwrap();
        let pool = Pool::builder(&device).capacity(96 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let copier =
            Copier::builder(&pool, &device).threads(3).depth(1).chunk(1 << 20).ring(RING).build().unwrap();
        let bytes = vec![1; 1 << 10];
        let places: Vec<_> =
            (0..2000).map(|n| memory.slice(n << 11..(n << 11) + bytes.len()).unwrap()).collect();
        let up = || {
            let pieces = places.iter().map(|place| (&bytes[..], place.clone()));
            copier.upload_slices(&pieces.collect::<Vec<_>>())
        };
        let down = || {
            let mut back = vec![bytes.clone(); places.len()];
            let pieces = places.iter().cloned().zip(back.iter_mut().map(|back| &mut back[..]));
            copier.download_slices(&mut pieces.collect::<Vec<_>>())
        };
        up().unwrap();
        down().unwrap();
        // More than there are attempts on all streams.
        (1..=10_000).for_each(|nth| d.fail("cuEventRecord", nth, 1, false));
        for _ in 0..100 {
            up().unwrap_err();
            down().unwrap_err();
        }
        assert!(copier.stats().ring_bytes > 20 << 20, "{:?}", copier.stats());
        drop((places, memory, copier, pool));
        let error = device.close(HANG).unwrap_err();
        assert!(error.held_by().memory_bytes < MEMORY + 5 * RING, "{error}");
    });
}

/// The pieces of a call go together: by the kernel, or in batches, with one event each.
#[test]
fn pieces_go_by_the_kernel_or_in_batches_or_one_by_one() {
    on_gpu(|gpu| go_together(gpu, true, 16 << 20));
    on_gpu(|gpu| go_together(gpu, true, 0));
    // Kernels that cannot be loaded.
    on_stand_in(|gpu, d| {
        d.fail("cuModuleLoadData", 1, 218, false);
        go_together(gpu, true, 8 << 20);
        assert_eq!(d.struck(), 1);
    });
    on_driver(Driver::Cuda12_0, |gpu| go_together(gpu, false, 0));
}

fn go_together(gpu: &Gpu, has_batches: bool, ring: usize) {
    const COUNT: usize = 2000;
    let device = open();
    let pool = pool(&device, 16 << 20);
    let copier = copier(&pool, &device, ring);
    let memory = device.alloc(COUNT * PIECE).unwrap();
    const CALLS: [&str; 3] = ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuMemcpyBatchAsync"];
    let counts = |d: &StandIn| CALLS.map(|name| calls(d, name));
    let before = gpu.stand_in.as_ref().map(counts);
    upload(&copier, &memory, COUNT).unwrap();
    arrived(&device, &memory, COUNT);
    let stats = copier.stats();
    assert_eq!(stats.ring_bytes + stats.batch_bytes, (0..COUNT).map(len).sum::<usize>() as u64);
    let has_ring = ring > 0 && gpu.stand_in.as_ref().is_none_or(|d| d.struck() == 0);
    assert_eq!((stats.ring_bytes > 0, stats.launches > 0), (has_ring, has_ring), "{stats:?}");
    assert!(
        stats.ring <= ring && (stats.launches..=stats.chunks).contains(&stats.launched_chunks),
        "{stats:?}"
    );
    if let (Some(d), Some(before)) = (&gpu.stand_in, before) {
        let now = counts(d);
        let [copies, events, batches] = [0, 1, 2].map(|i| now[i] - before[i]);
        assert!(stats.chunks < COUNT as u64 / 4, "{stats:?}");
        assert!(events < COUNT as u64 / 2, "{events} events");
        assert_eq!(copies < COUNT as u64 / 2, ring > 0 || has_batches, "{copies} copies");
        if ring == 0 || d.struck() > 0 {
            assert_eq!(batches > 0, has_batches, "{batches}");
            assert!(stats.ring_bytes == 0 && (ring == 0 || !stats.has_kernels), "{stats:?}");
        }
    }
    drop(copier);
    all_back(&pool);
}

/// Pieces of one call, borrowed ones, which are packed, and pinned blocks from where they are; some of which
/// overlap: what overlaps is in no batch together. A batch that is refused, or is said to be, is made copy by
/// copy: only if one of these is refused has the chunk failed.
#[test]
fn pieces_of_one_call_go_in_batches() {
    on_stand_in(|_, d| {
        const COUNT: usize = 400;
        const ROW: usize = 4096;
        const LEN: usize = 500;
        let device = open();
        let (pool, memory) = (pool(&device, 8 << 20), device.alloc(COUNT * ROW).unwrap());
        let copier = Copier::builder(&pool, &device).ring(0).build().unwrap();
        for (overlap, packed) in [(false, false), (false, true), (true, false), (true, true)] {
            let place = |i: usize| if overlap && i % 5 == 0 { i / 10 * 513 } else { i * 7919 % COUNT * ROW };
            let place = |i: usize| memory.slice(place(i)..place(i) + LEN).unwrap();
            let upload = || -> pinpool::Result<()> {
                if packed {
                    let all: Vec<_> = (0..COUNT).map(|i| bytes(i, LEN)).collect();
                    let pieces: Vec<_> = (0..COUNT).map(|i| (&all[i][..], place(i))).collect();
                    return copier.upload_slices(&pieces);
                }
                let blocks = (0..COUNT).map(|i| (filled(&pool, &bytes(i, LEN)), place(i)));
                drop(copier.upload_pages(blocks.collect()).unwrap().wait()?);
                Ok(())
            };
            for after in [false, true] {
                let case = format!("overlap {overlap}, packed {packed}, after {after}");
                let struck = d.struck();
                (1..=200).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 1, after));
                upload().unwrap();
                assert!(d.struck() > struck, "{case}: no batch was made");
                let mut back = vec![[0; LEN]; COUNT];
                let mut targets: Vec<_> =
                    back.iter_mut().enumerate().map(|(i, back)| (place(i), &mut back[..])).collect();
                copier.download_slices(&mut targets).unwrap();
                let wrong = (0..COUNT).find(|i| back[*i] != *bytes(*i, LEN));
                assert!(overlap || wrong.is_none(), "{case}: piece {wrong:?}");
                d.fail("cuMemcpyHtoDAsync_v2", 77, 1, false);
                assert_eq!(upload().unwrap_err().class(), ErrorClass::Argument, "{case}");
                d.calm();
                all_back(&pool);
            }
            upload().unwrap();
        }
        let stats = copier.stats();
        assert!(stats.batch_bytes > 0 && stats.in_place_bytes > 0, "{stats:?}");
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// Chunks of pages have no table before they may go: by a rate that would take long, while others need the
/// pool.
#[test]
fn pages_that_wait_for_the_rate_keep_nothing_of_the_copiers_pool() {
    on_stand_in(|_, _| {
        const COUNT: usize = 8192;
        let device = open();
        let (blocks, tables) = (pool(&device, 16 << 20), pool(&device, 16 << 20));
        let copier =
            Copier::builder(&tables, &device).threads(2).chunk(256 << 10).rate(1 << 20).build().unwrap();
        let memory = device.alloc(COUNT * PIECE).unwrap();
        let block = |nth: usize| {
            let memory = memory.slice(nth * COUNT / 4 * PIECE..).unwrap();
            let places = memory.strided(..PIECE / 2, PIECE, COUNT / 4).unwrap();
            (blocks.checkout_zeroed(COUNT / 4 * PIECE / 2).unwrap(), places)
        };
        let sent = copier.upload_pages((0..4).map(block).collect()).unwrap();
        until("the first chunk has gone", || sent.progress().done > 0);
        until("no other has a table", || in_use(&tables) == 0);
        assert!(sent.progress().done < 1 << 20, "{:?}", sent.progress());
        sent.wait().unwrap();
        // Those that waited while the ring was allocated go through it.
        let stats = copier.stats();
        assert!(stats.ring_bytes > 1 << 20, "{stats:?}");
        drop(copier);
        all_back(&tables);
        all_back(&blocks);
    });
}

/// Each call that pieces make fails once, with each kind of error, done or not: nothing is lost, and nothing
/// is reported as done that is not.
#[test]
fn every_call_of_pieces_fails_once() {
    const COUNT: usize = 150;
    for call in [
        "cuMemcpyBatchAsync",
        "cuMemcpyHtoDAsync_v2",
        "cuLaunchKernel",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventCreate",
    ] {
        // On a machine for each call, whose device has no events yet.
        on_stand_in(|_, d| {
            for (code, after) in [(1, false), (2, false), (2, true), (999, false)] {
                for ring in [8 << 20, 0] {
                    let case = format!("{call} {code} {after} {ring}");
                    let device = open();
                    let pool = pool(&device, 8 << 20);
                    let copier = copier(&pool, &device, ring);
                    let memory = device.alloc(COUNT * PIECE).unwrap();
                    (1..=3).for_each(|nth| d.fail(call, nth, code, after));
                    let together = upload(&copier, &memory, COUNT / 3).is_ok();
                    let start = |i: usize| copier.upload(bytes(i, len(i)), place(&memory, i)).unwrap();
                    let singly: Vec<_> = (COUNT / 3..COUNT).map(start).collect();
                    let mut sent = vec![together; COUNT / 3];
                    sent.extend(singly.into_iter().map(|one| one.wait().is_ok()));
                    d.calm();
                    let mut all = vec![0; memory.len()];
                    device.stream().unwrap().download_blocking(&memory, &mut all).unwrap();
                    for (i, sent) in sent.iter().enumerate() {
                        let there = all[i * PIECE..][..len(i)] == bytes(i, len(i));
                        assert!(!sent || there, "{case}: piece {i}");
                    }
                    upload(&copier, &memory, COUNT).unwrap();
                    drop(copier);
                    all_back(&pool);
                    assert_eq!(pool.stats().quarantined_bytes, 0, "{case}");
                    assert_eq!(device.lost(), None, "{case}");
                }
            }
            assert!(d.struck() > 0, "{call} is never made");
            assert_eq!(d.report().violations, Vec::<String>::new());
        });
    }
}

//! Many short pieces on a GPU: the device ring and its kernels, batches, drivers with and without them, and trouble.
//!
//! What every device does is in `contract`. Here is what only a GPU's driver has: the kernel, the call for many copies in
//! its two forms, streams of the server's, and a driver that fails, hangs and dies, which only a double can be made to do.

use std::time::Duration;

use pinpool::copier::Transfer;
use pinpool::{Copier, Device, DeviceSlice, Error, ErrorClass, Pool, Unpinned};
use pinpool_sim::cuda::Driver;

use crate::rig::{adopt, open};
use crate::support::doubles::StandIn;
use crate::support::doubles::gpu::{
    Gpu, all_back, bytes, calls, filled, on_driver, on_gpu, on_stand_in, until,
};
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

/// Starts an upload of each piece by itself.
fn start(copier: &Copier, memory: &DeviceSlice, count: usize) -> Vec<Transfer<Vec<u8>>> {
    (0..count).map(|i| copier.upload(bytes(i, len(i)), place(memory, i)).unwrap()).collect()
}

fn arrived(device: &Device, memory: &DeviceSlice, count: usize) {
    let mut all = vec![0; memory.len()];
    device.stream().unwrap().download_blocking(memory, &mut all).unwrap();
    for i in 0..count {
        assert!(all[i * PIECE..][..len(i)] == bytes(i, len(i)), "piece {i}");
    }
}

/// The pieces of a call go together: by the kernel, or in batches, with one event each.
fn go_together(driver: Option<Driver>, batch: Option<&str>, ring: usize) {
    let test = |gpu: &Gpu| {
        const COUNT: usize = 2000;
        let device = open();
        let pool = pool(&device, 16 << 20);
        let copier = copier(&pool, &device, ring);
        let memory = device.alloc(COUNT * PIECE).unwrap();
        let counts = |d: &StandIn| {
            [
                calls(d, "cuMemcpyHtoDAsync_v2"),
                calls(d, "cuEventRecord"),
                batch.map_or(0, |name| calls(d, name)),
            ]
        };
        let before = gpu.stand_in.as_ref().map(counts);
        upload(&copier, &memory, COUNT).unwrap();
        arrived(&device, &memory, COUNT);
        let stats = copier.stats();
        assert_eq!(stats.ring_bytes + stats.batch_bytes, (0..COUNT).map(len).sum::<usize>() as u64);
        if let (Some(d), Some(before)) = (&gpu.stand_in, before) {
            let now = counts(d);
            let [copies, events, batches] = [0, 1, 2].map(|i| now[i] - before[i]);
            assert!(stats.chunks < COUNT as u64 / 4, "{stats:?}");
            assert!(events < COUNT as u64 / 2, "{events} events");
            if ring > 0 {
                assert!(stats.ring_bytes > 0 && stats.launches > 0, "{stats:?}");
                assert!(copies < COUNT as u64 / 2, "{copies} copies");
            } else {
                let together = batches > 0 && copies < COUNT as u64 / 2;
                assert_eq!(together, batch.is_some(), "{batches}, {copies}");
                assert!(together || calls(d, "cuMemcpyBatchAsync") == 0);
            }
        }
        drop(copier);
        all_back(&pool);
    };
    match driver {
        Some(driver) => on_driver(driver, test),
        None => on_gpu(test),
    }
}

#[test]
fn pieces_go_by_the_kernel_or_in_batches_or_one_by_one() {
    go_together(None, Some("cuMemcpyBatchAsync"), 16 << 20);
    go_together(None, Some("cuMemcpyBatchAsync"), 0);
    go_together(Some(Driver::Cuda13_0), Some("cuMemcpyBatchAsync"), 0);
    go_together(Some(Driver::Cuda12_0), None, 0);
}

/// Threads that have another context current, or none, and one in the middle of a capture: transfers are not in its way.
#[test]
fn transfers_leave_captures_and_contexts_alone() {
    on_gpu(|gpu| {
        let device = open();
        let (pool, memory) = (pool(&device, 8 << 20), device.alloc(64 * PIECE).unwrap());
        let other = gpu.other_context();
        let raw = gpu.stream();
        // In global mode: unsafe calls of any thread would spoil it, those that load the kernels among them.
        gpu.begin_capture(raw, 0);
        let copier = copier(&pool, &device, 8 << 20);
        for context in [0, other] {
            gpu.current(context);
            upload(&copier, &memory, 64).unwrap();
            assert_eq!(gpu.made("cuCtxGetCurrent", &[]), context);
        }
        gpu.current(gpu.context);
        assert!(gpu.stand_in.is_none() || copier.stats().launches > 0, "{:?}", copier.stats());
        // Nothing outside comes before what a graph does.
        assert!(matches!(copier.wait_for(&adopt(&device, raw).unwrap()), Err(Error::Capturing { .. })));
        // The capture is as it was: `end_capture` would tell.
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        arrived(&device, &memory, 64);
        drop(copier);
        all_back(&pool);
        gpu.ok("cuStreamDestroy_v2", &[raw]);
        gpu.ok("cuCtxDestroy_v2", &[other]);
    });
}

/// Pieces of one call at random places, some of which overlap: what overlaps is in no batch together, and where
/// batches, or some of their copies, are refused, the handle says so and every buffer returns. Borrowed pieces, which are
/// packed, and pinned blocks from where they are.
#[test]
fn pieces_of_one_call_go_in_batches() {
    on_gpu(|gpu| {
        const COUNT: usize = 900;
        const ROW: usize = 4096;
        const LEN: usize = 500;
        let device = open();
        let (from, memory) = (pool(&device, 8 << 20), device.alloc(COUNT * ROW).unwrap());
        for (overlap, fails, packed) in (0..8).map(|case| (case & 1 > 0, case & 2 > 0, case & 4 > 0)) {
            let pool = pool(&device, 4 << 20);
            let copier = Copier::builder(&pool, &device).ring(0).build().unwrap();
            let place = |i: usize| if overlap && i % 5 == 0 { i / 10 * 513 } else { i * 7919 % COUNT * ROW };
            let place = |i: usize| memory.slice(place(i)..place(i) + LEN).unwrap();
            let upload = || -> pinpool::Result<()> {
                if packed {
                    let all: Vec<_> = (0..COUNT).map(|i| bytes(i, LEN)).collect();
                    let pieces: Vec<_> = (0..COUNT).map(|i| (&all[i][..], place(i))).collect();
                    return copier.upload_slices(&pieces);
                }
                let blocks = (0..COUNT).map(|i| (filled(&from, &bytes(i, LEN)), place(i)));
                drop(copier.upload_pages(blocks.collect()).unwrap().wait()?);
                Ok(())
            };
            let batches = || gpu.stand_in.as_ref().map(|d| calls(d, "cuMemcpyBatchAsync"));
            let before = batches();
            if let (true, Some(d)) = (fails, &gpu.stand_in) {
                (1..=40).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 1, false));
                d.fail("cuMemcpyHtoDAsync_v2", 77, 1, false);
            }
            let said = upload();
            let class = said.err().map(|error| error.class());
            assert_eq!(class, (fails && gpu.stand_in.is_some()).then_some(ErrorClass::Argument));
            if let Some(d) = &gpu.stand_in {
                d.calm();
                assert!(batches() > before);
                assert_eq!(d.report().violations, Vec::<String>::new());
            }
            all_back(&from);
            if !overlap {
                if fails {
                    upload().unwrap();
                }
                let mut came = vec![vec![0; LEN]; COUNT];
                if packed {
                    let mut targets: Vec<_> =
                        came.iter_mut().enumerate().map(|(i, to)| (place(i), &mut to[..])).collect();
                    copier.download_slices(&mut targets).unwrap();
                } else {
                    let landings = (0..COUNT).map(|i| (place(i), from.checkout(LEN).unwrap()));
                    let bufs = copier.download_pages(landings.collect()).unwrap().wait().unwrap();
                    came = bufs.iter().map(|buf| buf.to_vec()).collect();
                }
                let wrong = came.iter().enumerate().filter(|(i, piece)| **piece != bytes(*i, LEN)).count();
                assert_eq!(wrong, 0, "overlap {overlap}, fails {fails}, packed {packed}");
            }
            let stats = copier.stats();
            assert_eq!((stats.batch_bytes > 0, stats.in_place_bytes > 0), (packed, !packed), "{stats:?}");
            drop(copier);
            all_back(&from);
            all_back(&pool);
        }
    });
}

// --- trouble ---------------------------------------------------------------------------------------------------------

/// Chunks of pages have no table before they may go: by a rate that would take long, while others need the pool.
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

/// A batch that is refused, or is said to be, is made copy by copy: only if one of these is refused has the chunk failed.
#[test]
fn a_refused_batch_of_pieces_goes_one_by_one() {
    on_stand_in(|_, d| {
        const COUNT: usize = 300;
        let device = open();
        let pool = pool(&device, 8 << 20);
        let copier = copier(&pool, &device, 0);
        for after in [false, true] {
            let memory = device.alloc(COUNT * PIECE).unwrap();
            let before = d.struck();
            (1..=50).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 1, after));
            upload(&copier, &memory, COUNT).unwrap();
            d.calm();
            assert!(d.struck() > before, "no batch was made");
            arrived(&device, &memory, COUNT);
        }
        drop(copier);
        all_back(&pool);
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// Each call that pieces make fails once, with each kind of error, done or not: nothing is lost, and nothing is reported
/// as done that is not.
#[test]
fn every_call_of_pieces_fails_once() {
    on_stand_in(|_, d| {
        const COUNT: usize = 150;
        for call in [
            "cuMemcpyBatchAsync",
            "cuMemcpyHtoDAsync_v2",
            "cuLaunchKernel",
            "cuEventRecord",
            "cuEventQuery",
            "cuEventCreate",
        ] {
            let struck = d.struck();
            for (code, after) in [(1, false), (2, false), (2, true), (999, false)] {
                for ring in [8 << 20, 0] {
                    let device = open();
                    {
                        let pool = pool(&device, 8 << 20);
                        let copier = copier(&pool, &device, ring);
                        let memory = device.alloc(COUNT * PIECE).unwrap();
                        for nth in [1, 2, 3] {
                            d.fail(call, nth, code, after);
                        }
                        let together = upload(&copier, &memory, COUNT / 3).is_ok();
                        let mut sent = vec![together; COUNT / 3];
                        for i in COUNT / 3..COUNT {
                            let one = copier.upload(bytes(i, len(i)), place(&memory, i)).unwrap();
                            sent.push(one.wait().is_ok());
                        }
                        d.calm();
                        let mut all = vec![0; memory.len()];
                        device.stream().unwrap().download_blocking(&memory, &mut all).unwrap();
                        for (i, sent) in sent.iter().enumerate() {
                            let there = all[i * PIECE..][..len(i)] == bytes(i, len(i));
                            assert!(!sent || there, "{call} {code} {ring}: piece {i}");
                        }
                        upload(&copier, &memory, COUNT).unwrap();
                        drop(copier);
                        all_back(&pool);
                        assert_eq!(pool.stats().quarantined_bytes, 0, "{call} {code} {ring}");
                    }
                    assert_eq!(device.lost(), None);
                }
            }
            assert!(d.struck() > struck, "{call} is never made");
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// The device dies with transfers that wait, that are in flight, and that are waited for.
#[test]
fn a_device_dies_under_transfers() {
    on_stand_in(|_, d| {
        let device = open();
        let pool = pool(&device, 8 << 20);
        let copier = copier(&pool, &device, 8 << 20);
        let memory = device.alloc(400 * PIECE).unwrap();
        d.hang(true);
        let mut sent = start(&copier, &memory, 400);
        let last = sent.pop().unwrap();
        let waiting = std::thread::spawn(move || last.wait().unwrap_err().error);
        std::thread::sleep(Duration::from_millis(20));
        d.kill(0, 700);
        let error = waiting.join().unwrap();
        assert!(error.is_device_lost(), "{error}");
        for sent in sent {
            // Some may have completed before; no transfer says so that did not.
            if let Err(refused) = sent.wait() {
                assert!(refused.error.is_device_lost(), "{refused:?}");
            }
        }
        until("nothing is in flight", || in_use(&pool) == 0);
        let error = copier.upload(b"more".to_vec(), &memory).unwrap_err().error;
        assert!(error.is_device_lost(), "{error}");
        pool.check().unwrap();
        drop((copier, memory, pool, device));
        // A sticky code says that the context is of no use; the crate gives nothing back to it.
    });
}

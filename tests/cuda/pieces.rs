//! Pieces by a copier on a GPU, without the kernels that spread them: how its copies go to the driver.
//!
//! What every device does is in `contract/copier.rs`. Here is what only a GPU's driver has: batches that it
//! refuses.

#![cfg(all(feature = "cuda", target_os = "linux"))]

use pinpool::{Copier, Device, Pool, Unpinned};

use crate::support::doubles::HANG;
use crate::support::doubles::gpu::{all_back, bytes, calls, filled, on_gpu, pool};

const LEN: usize = 500;
const PIECE: usize = 512;

fn open() -> Device {
    Device::open("cuda:0").unwrap()
}

fn copier(pool: &Pool, device: &Device) -> Copier {
    Copier::builder(pool, device).ring(0).build().unwrap()
}

/// Pieces of one call at random places, some of which overlap: what overlaps is in no batch together, and where
/// batches, or some of their copies, are refused, the handle says so and every buffer returns. Packed, and from where
/// they are.
#[test]
fn pieces_of_one_call_go_in_batches() {
    on_gpu("pieces_of_one_call_go_in_batches", |gpu| {
        const COUNT: usize = 900;
        const ROW: usize = 4096;
        let device = open();
        let (from, memory) = (pool(&device, 8 << 20), device.alloc(COUNT * ROW).unwrap());
        for (overlap, fails, room) in (0..8).map(|case| (case & 1 > 0, case & 2 > 0, case & 4 > 0)) {
            // It grows no more, so what is taken below is all that it ever has.
            let whole = Pool::builder(&device).capacity(4 << 20).initial(4 << 20).extent(128 << 10);
            let pool = whole.region(256 << 10).unpinned(Unpinned::Allow).build().unwrap();
            pool.wait_pinned(Some(HANG)).unwrap();
            let copier = copier(&pool, &device);
            let mut taken = Vec::new();
            for len in [1 << 20, 64 << 10, 4 << 10, 64] {
                taken.extend(std::iter::from_fn(|| pool.try_checkout(len).ok().filter(|_| !room)));
            }
            let place = |i: usize| if overlap && i % 5 == 0 { i / 10 * 513 } else { i * 7919 % COUNT * ROW };
            let pieces = || -> Vec<_> {
                (0..COUNT)
                    .map(|i| (filled(&from, &bytes(i, LEN)), memory.slice(place(i)..place(i) + LEN).unwrap()))
                    .collect()
            };
            let batches = || gpu.stand_in.as_ref().map(|d| calls(d, "cuMemcpyBatchAsync"));
            let before = batches();
            if let (true, Some(d)) = (fails, &gpu.stand_in) {
                (1..=40).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 1, false));
                d.fail("cuMemcpyHtoDAsync_v2", 77, 1, false);
            }
            let came = copier.upload_buffers(pieces()).unwrap().wait();
            assert_eq!(came.is_err(), fails && gpu.stand_in.is_some(), "{:?}", came.as_ref().err());
            drop(came);
            if let Some(d) = &gpu.stand_in {
                d.calm();
                assert!(batches() > before);
                assert_eq!(d.report().violations, Vec::<String>::new());
            }
            all_back(&from);
            if !overlap {
                if fails {
                    drop(copier.upload_buffers(pieces()).unwrap().wait().unwrap());
                }
                let landings = (0..COUNT)
                    .map(|i| (memory.slice(place(i)..place(i) + LEN).unwrap(), from.checkout(LEN).unwrap()));
                let came = copier.download_buffers(landings.collect()).unwrap().wait().unwrap();
                let wrong = came.iter().enumerate().filter(|(i, buf)| ***buf != *bytes(*i, LEN)).count();
                assert_eq!(wrong, 0, "overlap {overlap}, fails {fails}, room {room}");
            }
            let stats = copier.stats();
            let (packed, in_place) = (stats.batch_bytes > 0, stats.in_place_bytes > 0);
            assert_eq!((packed, in_place), (room, !room), "{stats:?}");
            drop((copier, taken));
            all_back(&from);
            all_back(&pool);
        }
    });
}

/// Drivers lose the device when batches are submitted by several threads at once: the copier's do not.
#[test]
fn one_thread_at_a_time_submits_a_batch() {
    on_gpu("one_thread_at_a_time_submits_a_batch", |gpu| {
        const COUNT: usize = 4000;
        let device = open();
        let (pool, memory) = (pool(&device, 16 << 20), device.alloc(COUNT * PIECE).unwrap());
        let copier = Copier::builder(&pool, &device).ring(0).threads(8).chunk(64 << 10).build().unwrap();
        let place = |i: usize| memory.slice(i * 7919 % COUNT * PIECE..).unwrap();
        let all: Vec<_> = (0..COUNT).map(|i| bytes(i, LEN)).collect();
        let pieces: Vec<_> = all.iter().enumerate().map(|(i, piece)| (&piece[..], place(i))).collect();
        for _ in 0..8 {
            copier.upload_pieces(&pieces).unwrap().wait().unwrap();
        }
        if let Some(d) = &gpu.stand_in {
            assert!(calls(d, "cuMemcpyBatchAsync") > 8);
            assert_eq!(d.report().violations, Vec::<String>::new());
        }
        drop(copier);
        all_back(&pool);
    });
}

//! Pieces by a copier on a GPU, without the kernels that spread them: how its copies go to the driver.
//!
//! What every device does is in `contract/copier.rs`. Here is what only a GPU's driver has: batches that it
//! refuses.

#![cfg(all(feature = "cuda", target_os = "linux"))]

use pinpool::{Copier, Device, Pool};

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
/// batches, or some of their copies, are refused, the handle says so and every buffer returns. Borrowed pieces, which are
/// packed, and pinned blocks from where they are.
#[test]
fn pieces_of_one_call_go_in_batches() {
    on_gpu("pieces_of_one_call_go_in_batches", |gpu| {
        const COUNT: usize = 900;
        const ROW: usize = 4096;
        let device = open();
        let (from, memory) = (pool(&device, 8 << 20), device.alloc(COUNT * ROW).unwrap());
        for (overlap, fails, packed) in (0..8).map(|case| (case & 1 > 0, case & 2 > 0, case & 4 > 0)) {
            let pool = pool(&device, 4 << 20);
            let copier = copier(&pool, &device);
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
            assert_eq!(said.is_err(), fails && gpu.stand_in.is_some(), "{:?}", said.err());
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
            copier.upload_slices(&pieces).unwrap();
        }
        if let Some(d) = &gpu.stand_in {
            assert!(calls(d, "cuMemcpyBatchAsync") > 8);
            assert_eq!(d.report().violations, Vec::<String>::new());
        }
        drop(copier);
        all_back(&pool);
    });
}

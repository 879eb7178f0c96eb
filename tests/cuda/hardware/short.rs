//! Very short pieces by several threads at once, which a driver was seen to lose the device over
//! (`device/cuda/batch.rs`).

use pinpool::{Copier, DeviceSlice};

use super::{Needs, on_gpu, open};
use crate::support::doubles::gpu::calls;

#[test]
fn thousands_of_very_short_copies_leave_the_device_alive() {
    on_gpu("hardware::short::thousands_of_very_short_copies_leave_the_device_alive", Needs::Driver, |gpu| {
        const LEN: usize = 1 << 10;
        let (count, rounds) = if gpu.real { (1 << 18, 24) } else { (1 << 10, 2) };
        let device = open(0);
        let pool = pinpool::Pool::builder(&device).capacity(64 << 20).build().unwrap();
        // By the device ring, and in batches.
        let copiers = [64 << 20, 0].map(|ring| {
            Copier::builder(&pool, &device).threads(8).share(32 << 20).ring(ring).build().unwrap()
        });
        let memory = device.alloc(2 * count * LEN).unwrap();
        let sources: Vec<[u8; LEN]> = (0..count).map(|i| [i as u8; LEN]).collect();
        // Every second place or so, in the order of a multiplication.
        let place = |i: usize| i.wrapping_mul(0x9E37_79B1) % (2 * count);
        let pieces: Vec<(&[u8], DeviceSlice)> = sources
            .iter()
            .enumerate()
            .map(|(i, source)| (&source[..], memory.slice(place(i) * LEN..(place(i) + 1) * LEN).unwrap()))
            .collect();
        for copier in &copiers {
            device.stream().unwrap().upload_blocking(&vec![255; memory.len()], &memory).unwrap();
            for _ in 0..rounds {
                copier.upload_slices(&pieces).unwrap();
            }
            let mut back = vec![[255_u8; LEN]; count];
            let mut targets: Vec<(DeviceSlice, &mut [u8])> = back
                .iter_mut()
                .zip(&pieces)
                .map(|(bytes, (_, place))| (place.clone(), &mut bytes[..]))
                .collect();
            copier.download_slices(&mut targets).unwrap();
            assert!(back == sources, "a piece is elsewhere");
        }
        if let Some(stand_in) = gpu.stand_in() {
            assert!(calls(stand_in, "cuMemcpyBatchAsync") > 8);
        }
        drop((copiers, pieces, memory, pool, device));
        gpu.no_violations();
    });
}

//! Very short pieces by several threads at once, which a driver was seen to lose the device over
//! (`device/cuda/batch.rs`).

use pinpool::{Copier, DeviceSlice};

use super::{StandIn, open};

pub fn thousands(_: &StandIn) {
    const LEN: usize = 1 << 10;
    const COUNT: usize = 1 << 18;
    let device = open(0);
    let pool = pinpool::Pool::builder(&device).capacity(64 << 20).build().unwrap();
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

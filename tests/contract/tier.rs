//! The example of a host tier for a cache of keys and values, by many threads at once.

#[allow(dead_code, reason = "the test uses a part of it")]
#[path = "../../examples/kv_tier.rs"]
mod kv_tier;

use std::sync::atomic::{AtomicUsize, Ordering};

use kv_tier::{LAYERS, PLANES, Tier, content, request};
use pinpool::Stream;

use super::{Subject, all_back};

const PAGE: usize = 512;
const BLOCKS: usize = 3;
/// Blocks that all threads use.
const HASHES: u64 = 90;

/// Sixteen threads with a stream each, more blocks than the device has places, and more than the host has room for. A
/// place is filled with other bytes before another block gets it. Every byte that a request reads is compared.
pub(super) fn storm(on: &Subject) {
    if !on.has_threads() {
        return;
    }
    let pool = on.pool(4 << 20);
    let segments = on.pool(4 << 20);
    let copier = pinpool::Copier::builder(&segments, &on.device).build().unwrap();
    let tier = Tier::new(&pool, copier, 16 * BLOCKS + 8, PAGE, Some(0xEE)).unwrap();
    let refused = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..16_u64 {
            let (tier, refused) = (&tier, &refused);
            scope.spawn(move || {
                let stream = on.stream();
                let read = on.alloc(BLOCKS * LAYERS * PLANES * PAGE);
                for round in 0..3 {
                    let first = (thread * 31 + round * 17) % HASHES;
                    let hashes: Vec<u64> = (0..BLOCKS as u64).map(|n| (first + n * 7) % HASHES).collect();
                    while !request(tier, &stream, &hashes, &read).unwrap() {
                        // Relaxed: a count.
                        refused.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(std::time::Duration::from_micros(100));
                    }
                    compare(&stream, &hashes, &read);
                }
            });
        }
    });
    let (loaded, stored) = tier.counts();
    println!("{loaded} blocks loaded, {stored} stored, {} leases refused", refused.into_inner());
    assert!(loaded > 0 && stored > 0);
    drop(tier);
    all_back(on, &pool);
    all_back(on, &segments);
}

fn compare(stream: &Stream, hashes: &[u64], read: &pinpool::DeviceSlice) {
    let mut all = vec![0; read.len()];
    stream.download_blocking(read, &mut all).unwrap();
    let mut pages = all.chunks(PAGE);
    for layer in 0..LAYERS {
        for &hash in hashes {
            for plane in 0..PLANES {
                let (page, byte) = (pages.next().unwrap(), content(hash, layer, plane));
                assert!(
                    page.iter().all(|found| *found == byte),
                    "block {hash}, layer {layer}, plane {plane}"
                );
            }
        }
    }
}

//! Transfers of a few bytes each, on every device: their order with streams, and drops.

use pinpool::Copier;
use pinpool::copier::Transfer;

use super::copier::copiers;
use super::*;

fn start(copier: &Copier, bytes: &[u8], dst: impl pinpool::DeviceRange) -> Transfer<Vec<u8>> {
    copier.upload(bytes.to_vec(), dst).map_err(|refused| refused.error).unwrap()
}

pub(super) fn order(on: &Subject) {
    copiers(on, 8 << 20, |pool, copier| {
        let stream = on.stream();
        let (memory, copy) = (on.alloc(200_000), on.alloc(200_000));
        for round in 0..10 {
            let sent = bytes(round, 200_000);
            // A stream's work after a transfer.
            let upload = start(&copier, &sent, &memory);
            upload.order(&stream).unwrap();
            drop(stream.copy(&memory, &copy).unwrap());
            drop(upload);
            // What the copier does after a stream's work.
            copier.wait_for(&stream).unwrap();
            let mut back = vec![0; 200_000];
            copier.download_slice(&copy, &mut back).unwrap();
            assert!(back == sent, "round {round}");
            // A transfer after a stream's work.
            let other = on.stream();
            drop(stream.upload(filled(pool, &bytes(round + 50, 200_000)), &memory).unwrap());
            copier.wait_for(&stream).unwrap();
            start(&copier, &sent[..100], &memory).order(&other).unwrap();
            let all = fetch(pool, &other, &memory);
            assert!(all[..100] == sent[..100] && all[100..] == bytes(round + 50, 200_000)[100..]);
        }
    });
}

/// Everything that belongs to transfers is dropped in any order, with transfers that wait and that are under
/// way.
pub(super) fn drops(on: &Subject) {
    for order in 0..5 {
        let pool = on.pool(8 << 20);
        let memory = on.alloc(64 << 10);
        let copier = Copier::builder(&pool, &on.device).threads(2).build().unwrap();
        let uploads: Vec<_> =
            (0..64).map(|i| start(&copier, &bytes(i, 1000), memory.slice(i * 1024..))).collect();
        match order {
            0 if on.has_threads() => drop((copier, uploads)),
            1 if on.has_threads() => drop((uploads, copier)),
            2 | 3 => {
                // Handles outlive their copier, or all but another handle to it.
                let clone = (order == 3).then(|| copier.clone());
                drop(copier);
                uploads.into_iter().for_each(|upload| drop(upload.wait().unwrap()));
                drop(clone);
            }
            _ => {
                let check = pool.clone();
                drop((pool, memory, uploads));
                drop(copier);
                all_back(on, &check);
                continue;
            }
        }
        // A transfer whose handle was dropped may have no segment yet, and is there some time after its
        // segments are back: the ring is in between.
        until(on, "all is there", || {
            let all = fetch(&pool, &on.stream(), &memory);
            (0..64).all(|i| all[i * 1024..][..1000] == bytes(i, 1000))
        });
        all_back(on, &pool);
    }
}

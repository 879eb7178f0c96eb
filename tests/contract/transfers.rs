//! Transfers of a few bytes each, on every device: their order with streams, waits by tasks, drops, and many threads.

use std::sync::Mutex;

use pinpool::Copier;
use pinpool::copier::Transfer;

use super::copier::{HANG, all_back, copiers, read};
use super::waiting::block_on_with;
use super::*;

/// What is in memory as soon as that is as it must be. A transfer whose handle was dropped may have no segment yet, and is
/// there some time after its segments are back: the ring is in between.
fn there(on: &Subject, pool: &Pool, memory: &DeviceSlice, done: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let since = std::time::Instant::now();
    loop {
        all_back(on, pool);
        let all = read(on, pool, memory);
        if done(&all) {
            return all;
        }
        assert!(since.elapsed() < HANG);
    }
}

/// Starts an upload of these bytes.
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
        if let Some(other) = &on.other {
            let far = other.stream().unwrap();
            mismatch(&start(&copier, b"here", &memory).order(&far).unwrap_err());
            mismatch(&copier.wait_for(&far).unwrap_err());
        }
    });
}

pub(super) fn awaited(on: &Subject) {
    copiers(on, 8 << 20, |pool, copier| {
        let pump = || {
            on.pump();
            copier.reap();
        };
        let (memory, other) = (on.alloc(50_000), on.alloc(50_000));
        for round in 0..30 {
            let sent = bytes(round, 50_000);
            block_on_with(pump, start(&copier, &sent, &memory)).unwrap();
            assert!(read(on, pool, &memory) == sent);
            // Polled once and dropped: the waker is taken back.
            let mut upload = start(&copier, &sent, &other);
            let _ = Pin::new(&mut upload).poll(&mut Context::from_waker(Waker::noop()));
            drop(upload);
        }
        let several: Vec<_> =
            (0..3).map(|i| start(&copier, &bytes(i, 10_000), memory.slice(i * 10_000..))).collect();
        several.into_iter().for_each(|upload| drop(block_on_with(pump, upload).unwrap()));
        let all = read(on, pool, &memory);
        assert!((0..3).all(|i| all[i * 10_000..][..10_000] == bytes(i, 10_000)));
    });
}

/// Handles that are never dropped. In here, and not by `mem::forget`, so that a search for leaks finds other leaks
/// only.
static FORGOTTEN: Mutex<Vec<Transfer<Vec<u8>>>> = Mutex::new(Vec::new());

/// Everything that belongs to transfers is dropped in any order, with transfers that wait and that are under way.
pub(super) fn drops(on: &Subject) {
    for order in 0..6 {
        let pool = on.pool(8 << 20);
        let memory = on.alloc(64 << 10);
        let copier = Copier::builder(&pool, &on.device).threads(2).build().unwrap();
        let uploads: Vec<_> =
            (0..64).map(|i| start(&copier, &bytes(i, 1000), memory.slice(i * 1024..))).collect();
        match order {
            0 if on.has_threads() => drop((copier, uploads)),
            1 if on.has_threads() => drop((uploads, copier)),
            2 => {
                drop(copier);
                uploads.into_iter().for_each(|upload| drop(upload.wait().unwrap()));
            }
            3 => {
                let clone = copier.clone();
                drop(copier);
                uploads.into_iter().for_each(|upload| drop(upload.wait().unwrap()));
                drop(clone);
            }
            4 if on.may_stay_open() => {
                // A handle is leaked: what it names is leaked with it, and nothing else is harmed.
                let mut uploads = uploads;
                FORGOTTEN.lock().unwrap().extend(uploads.pop());
                drop((uploads, copier));
                continue;
            }
            _ => {
                let check = pool.clone();
                drop((pool, memory, uploads));
                drop(copier);
                all_back(on, &check);
                continue;
            }
        }
        there(on, &pool, &memory, |all| (0..64).all(|i| all[i * 1024..][..1000] == bytes(i, 1000)));
        all_back(on, &pool);
    }
}

pub(super) fn threads(on: &Subject) {
    if !on.has_threads() {
        return;
    }
    for (workers, share) in [(1, 4 << 20), (3, 4 << 20), (3, 200 << 10)] {
        let pool = on.pool(4 << 20);
        let copier = Copier::builder(&pool, &on.device).threads(workers).chunk(32 << 10).share(share);
        threads_through(on, &pool, copier.build().unwrap());
    }
}

fn threads_through(on: &Subject, pool: &Pool, copier: Copier) {
    const THREADS: usize = 6;
    const EACH: usize = 200;
    let memories: Vec<_> = (0..THREADS).map(|_| on.alloc(EACH * 512)).collect();
    std::thread::scope(|scope| {
        for (t, memory) in memories.iter().enumerate() {
            let copier = copier.clone();
            scope.spawn(move || {
                let mut last = None;
                for i in 0..EACH {
                    let range = || memory.slice(i * 512..i * 512 + 500);
                    let sent = bytes(t * EACH + i, 500);
                    let upload = start(&copier, &sent, range());
                    match i % 5 {
                        0 => last = Some((upload, sent, range())),
                        1 => {
                            upload.wait().unwrap();
                            let mut back = vec![0; 500];
                            copier.download_slice(range(), &mut back).unwrap();
                            assert!(back == sent, "thread {t}, upload {i}");
                        }
                        2 => drop(block_on(on, upload).unwrap()),
                        _ => drop(upload),
                    }
                    if let Some((upload, sent, range)) = last.take_if(|_| i % 10 == 9) {
                        upload.wait().unwrap();
                        let mut back = vec![0; 500];
                        copier.download_slice(range, &mut back).unwrap();
                        assert!(back == sent);
                    }
                }
            });
        }
    });
    for (t, memory) in memories.iter().enumerate() {
        let arrived = |all: &[u8], i: usize| all[i * 512..i * 512 + 500] == bytes(t * EACH + i, 500);
        there(on, pool, memory, |all| (0..EACH).all(|i| arrived(all, i)));
    }
    drop(copier);
    all_back(on, pool);
}

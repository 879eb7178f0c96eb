//! Pushes, on every device: nothing is lost, nothing is early, order is what handles say.

use std::sync::Mutex;

use pinpool::Copier;
use pinpool::copier::Transfer;

use super::copier::{HANG, all_back};
use super::waiting::block_on_with;
use super::*;

fn read(on: &Subject, pool: &Pool, memory: &DeviceBuffer) -> Vec<u8> {
    fetch(pool, &on.stream(), memory)
}

fn doubles_watch() -> bool {
    #[cfg(feature = "cuda")]
    return doubles::is_set();
    #[cfg(not(feature = "cuda"))]
    false
}

/// With the device ring, where there is one, and without.
fn copiers(on: &Subject, test: impl Fn(&Pool, Copier)) {
    for ring in [64 << 20, 0] {
        let pool = on.pool(8 << 20);
        test(&pool, Copier::builder(&pool, &on.device).threads(3).ring(ring).build().unwrap());
        all_back(on, &pool);
    }
}

/// What is in memory as soon as that is as it must be. Pushes whose handles are dropped are there some time after their
/// segments are back: the ring is in between.
fn there(on: &Subject, pool: &Pool, memory: &DeviceBuffer, done: impl Fn(&[u8]) -> bool) -> Vec<u8> {
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

pub(super) fn round_trips(on: &Subject) {
    copiers(on, |pool, copier| {
        let memory = on.alloc(1 << 20);
        let sizes = [1, 2, 15, 16, 17, 63, 64, 65, 1000, 4095, 4096, 4097, 65_537, 300_001];
        for (i, len) in sizes.into_iter().enumerate() {
            for (j, offset) in [0, 1, 4097].into_iter().enumerate() {
                let sent = bytes(i * 8 + j, len);
                let range = || memory.slice(offset..offset + len);
                copier.push(&sent, range()).unwrap().wait().unwrap();
                let mut back = vec![0; len];
                copier.download_slice(range(), &mut back).unwrap();
                assert!(back == sent, "{len} bytes at {offset}");
            }
        }
        // Many at once, some of whose handles are dropped, beside what must stay as it is. The bytes are free at once.
        let pieces = 3000;
        on.stream().upload_blocking(&[7; 3000 * 96], &memory).unwrap();
        let mut kept = Vec::new();
        let mut own = Vec::new();
        for piece in 0..pieces {
            own.clear();
            own.extend(bytes(piece, 77));
            let sent = copier.push(&own, memory.slice(piece * 96..)).unwrap();
            if piece % 3 > 0 {
                kept.push(sent);
            }
        }
        kept.into_iter().for_each(|sent| sent.wait().unwrap());
        // What was dropped may be behind them.
        let all = there(on, pool, &memory, |all| (0..pieces).all(|i| all[i * 96..][..77] == bytes(i, 77)));
        for piece in 0..pieces {
            assert!(all[piece * 96 + 77..][..19] == [7; 19], "beside piece {piece}");
        }
    });
}

pub(super) fn order(on: &Subject) {
    copiers(on, |pool, copier| {
        let stream = on.stream();
        let (memory, copy) = (on.alloc(200_000), on.alloc(200_000));
        for round in 0..10 {
            let sent = bytes(round, 200_000);
            // A stream's work after a push.
            let push = copier.push(&sent, &memory).unwrap();
            push.order(&stream).unwrap();
            drop(stream.copy(&memory, &copy).unwrap());
            drop(push);
            // What the copier does after a stream's work.
            copier.wait_for(&stream).unwrap();
            let mut back = vec![0; 200_000];
            copier.download_slice(&copy, &mut back).unwrap();
            assert!(back == sent, "round {round}");
            // A push after a stream's work.
            let other = on.stream();
            drop(stream.upload(filled(pool, &bytes(round + 50, 200_000)), &memory).unwrap());
            copier.wait_for(&stream).unwrap();
            copier.push(&sent[..100], &memory).unwrap().order(&other).unwrap();
            let all = fetch(pool, &other, &memory);
            assert!(all[..100] == sent[..100] && all[100..] == bytes(round + 50, 200_000)[100..]);
        }
        if let Some(other) = &on.other {
            let wrong = |error: Error| assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
            let far = other.stream().unwrap();
            wrong(copier.push(b"here", &memory).unwrap().order(&far).unwrap_err());
            wrong(copier.wait_for(&far).unwrap_err());
        }
    });
}

/// Pushes to the same bytes, and to overlapping ones: either wins, byte by byte, and a push after a wait comes later.
pub(super) fn overlaps(on: &Subject) {
    const LEN: usize = 1000;
    // Stand-in drivers report that a launch, or two copies, write the same bytes: with them each push waits for its
    // predecessor.
    let alone = doubles_watch() || on.is_ascend();
    copiers(on, |pool, copier| {
        let memory = on.alloc(64 << 10);
        let place = |i: usize| i * 7 % 40 * 100;
        let sent: Vec<_> = (0..200)
            .map(|i| {
                let push = copier.push(&bytes(i, LEN), memory.slice(place(i)..place(i) + LEN)).unwrap();
                _ = alone && push.wait_landed(LEN as u64);
                push
            })
            .collect();
        sent.into_iter().for_each(|sent| sent.wait().unwrap());
        let all = read(on, pool, &memory);
        let sources: Vec<Vec<u8>> = (0..200).map(|i| bytes(i, LEN)).collect();
        for (at, byte) in all[..40 * 100 - 100 + LEN].iter().enumerate() {
            let mut there = (0..200).filter(|&i| (place(i)..place(i) + LEN).contains(&at));
            assert!(there.any(|i| sources[i][at - place(i)] == *byte), "byte {at}");
        }
        copier.push(&[222; 3000], memory.slice(500..3500)).unwrap().wait().unwrap();
        assert!(read(on, pool, &memory)[500..3500] == [222; 3000]);
    });
}

pub(super) fn refusals(on: &Subject) {
    copiers(on, |pool, copier| {
        let memory = on.alloc(1000);
        let sent = bytes(0, 2000);
        let small = Error::TooSmall { need: 2000, have: 1000 };
        assert_eq!(copier.push(&sent, &memory).unwrap_err(), small);
        assert_eq!(copier.try_push(&sent, &memory).unwrap_err(), small);
        let outside = Error::OutOfRange { start: 10, end: 1001, len: 1000 };
        assert_eq!(copier.try_push(&sent, memory.slice(10..1001)).unwrap_err(), outside);
        assert_eq!(copier.push(&[], &memory).unwrap_err(), Error::Empty);
        if let Some(other) = &on.other {
            let wrong = |error: Error| assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
            let far = other.alloc(5000).unwrap();
            wrong(copier.push(&sent, &far).unwrap_err());
            wrong(Copier::builder(pool, other).build().unwrap_err());
        }
        // Long ones go by themselves.
        let long = bytes(3, 700_000);
        let far = on.alloc(700_000);
        copier.push(&long, &far).unwrap().wait().unwrap();
        assert!(read(on, pool, &far) == long);
        assert!(matches!(copier.try_push(&long, &far), Err(Error::Unsupported(_))));
    });
}

/// A copier with few segments: a caller that does not wait is told so, one that waits gets through, and nothing is lost.
pub(super) fn room(on: &Subject) {
    let pool = on.pool(8 << 20);
    let copier =
        Copier::builder(&pool, &on.device).threads(1).chunk(16 << 10).share(64 << 10).build().unwrap();
    let memory = on.alloc(1 << 20);
    let one = bytes(1, 8000);
    let (mut sent, mut full) = (Vec::new(), 0);
    for _ in 0..3000 {
        match copier.try_push(&one, memory.slice(..8000)) {
            Ok(push) => sent.push(push),
            Err(Error::Exhausted { .. }) => full += 1,
            Err(error) => panic!("{error:?}"),
        }
        if full == 20 {
            break;
        }
    }
    sent.into_iter().for_each(|sent| sent.wait().unwrap());
    let last: Vec<_> = (0..100)
        .map(|round| copier.push(&bytes(round, 4096), memory.slice(round * 4096..)).unwrap())
        .collect();
    last.into_iter().for_each(|sent| sent.wait().unwrap());
    let all = read(on, &pool, &memory);
    for round in 0..100 {
        assert!(all[round * 4096..][..4096] == bytes(round, 4096), "piece {round}");
    }
    drop(copier);
    all_back(on, &pool);
}

pub(super) fn awaited(on: &Subject) {
    copiers(on, |pool, copier| {
        let pump = || {
            on.pump();
            copier.reap();
        };
        let (memory, other) = (on.alloc(50_000), on.alloc(50_000));
        for round in 0..30 {
            let sent = bytes(round, 50_000);
            block_on_with(pump, copier.push(&sent, &memory).unwrap()).unwrap();
            assert!(read(on, pool, &memory) == sent);
            // Polled once and dropped: the waker is taken back.
            let mut push = copier.push(&sent, &other).unwrap();
            let _ = Pin::new(&mut push).poll(&mut Context::from_waker(Waker::noop()));
            drop(push);
        }
        let several: Vec<_> =
            (0..3).map(|i| copier.push(&bytes(i, 10_000), memory.slice(i * 10_000..)).unwrap()).collect();
        for push in several {
            // Others' pushes may be among them, so a handle cancels nothing.
            push.cancel();
            push.canceller().cancel();
            block_on_with(pump, push).unwrap();
        }
        let all = read(on, pool, &memory);
        assert!((0..3).all(|i| all[i * 10_000..][..10_000] == bytes(i, 10_000)));
    });
}

/// Handles that are never dropped. In here, and not by `mem::forget`, so that a search for leaks finds other leaks
/// only.
static FORGOTTEN: Mutex<Vec<Transfer>> = Mutex::new(Vec::new());

/// Everything that belongs to pushes is dropped in any order, with pushes in chunks and under way.
pub(super) fn drops(on: &Subject) {
    for order in 0..6 {
        let pool = on.pool(8 << 20);
        let memory = on.alloc(64 << 10);
        let copier = Copier::builder(&pool, &on.device).threads(2).build().unwrap();
        let pushes: Vec<_> =
            (0..64).map(|i| copier.push(&bytes(i, 1000), memory.slice(i * 1024..)).unwrap()).collect();
        match order {
            0 if on.has_threads() => drop((copier, pushes)),
            1 if on.has_threads() => drop((pushes, copier)),
            2 => {
                drop(copier);
                pushes.into_iter().for_each(|push| push.wait().unwrap());
            }
            3 => {
                let clone = copier.clone();
                drop(copier);
                pushes.into_iter().for_each(|push| push.wait().unwrap());
                drop(clone);
            }
            // Not on the system's host device, which later tests close.
            4 if on.device.name().starts_with("host") && on.other.is_some() => {
                // A handle is leaked: what it names is leaked with it, and nothing else is harmed. (The stand-in driver
                // would report what is leaked.)
                let mut pushes = pushes;
                FORGOTTEN.lock().unwrap().extend(pushes.pop());
                drop((pushes, copier));
                continue;
            }
            _ => {
                let check = pool.clone();
                drop((pool, memory, pushes));
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
                    let push = copier.push(&sent, range()).unwrap();
                    match i % 5 {
                        0 => last = Some((push, sent, range())),
                        1 => {
                            push.wait().unwrap();
                            let mut back = vec![0; 500];
                            copier.download_slice(range(), &mut back).unwrap();
                            assert!(back == sent, "thread {t}, push {i}");
                        }
                        2 => block_on(on, push).unwrap(),
                        _ => drop(push),
                    }
                    if let Some((push, sent, range)) = last.take_if(|_| i % 10 == 9) {
                        push.wait().unwrap();
                        let mut back = vec![0; 500];
                        copier.download_slice(range, &mut back).unwrap();
                        assert!(back == sent);
                    }
                }
            });
        }
    });
    all_back(on, pool);
    for (t, memory) in memories.iter().enumerate() {
        let all = read(on, pool, memory);
        for i in 0..EACH {
            assert!(all[i * 512..i * 512 + 500] == bytes(t * EACH + i, 500), "thread {t}, push {i}");
        }
    }
    drop(copier);
    all_back(on, pool);
}

//! Pieces moved by a copier's threads, on host devices: every byte is in its place whichever thread packed it, in pools
//! that have room for all of the segments or for hardly any, and where copies fail or the device dies half-way.

#![allow(unsafe_code, reason = "a promise about a value of its own")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pinpool::copier::CopyRange;
use pinpool::host::{Call, Failure, HostConfig};
use pinpool::{DeviceSlice, Error, ErrorClass, PinnedBuf, Pool, Result, SubmitError, Unpinned};

use crate::setup::{HANG, Node, Setup, ends, until};
use crate::support::{bytes, own_process};

const THREADS: usize = 4;

fn setup(node: impl Into<Node>, capacity: usize) -> Setup {
    Setup::new(node, capacity, |copier| copier.threads(THREADS))
}

/// Pieces that are neighbours on the device, or nearly so, in no order.
struct Pieces {
    sources: Vec<Vec<u8>>,
    places: Vec<DeviceSlice>,
}

impl Pieces {
    fn new(memory: &DeviceSlice, first: usize, lens: impl Iterator<Item = usize>) -> Self {
        let mut at = first;
        let mut made: Vec<_> = lens
            .enumerate()
            .map(|(i, len)| {
                let place = memory.slice(at..at + len).unwrap();
                at += len + if i % 7 == 0 { 13 } else { 0 };
                (bytes(i + first, len), place)
            })
            .collect();
        // Shuffled, the same way each time.
        let count = made.len();
        (0..count).for_each(|i| made.swap(i, (i * 7919 + 13) % count));
        let (sources, places) = made.into_iter().unzip();
        Self { sources, places }
    }

    fn all(&self) -> Vec<(&[u8], DeviceSlice)> {
        self.sources.iter().zip(&self.places).map(|(bytes, place)| (&bytes[..], place.clone())).collect()
    }

    /// What is there.
    fn try_back(&self, s: &Setup) -> Result<Vec<Vec<u8>>> {
        let mut back: Vec<Vec<u8>> = self.sources.iter().map(|bytes| vec![0; bytes.len()]).collect();
        let mut targets: Vec<(DeviceSlice, &mut [u8])> =
            self.places.iter().cloned().zip(back.iter_mut().map(|bytes| &mut bytes[..])).collect();
        s.copier.download_slices(&mut targets)?;
        Ok(back)
    }

    fn come_back(&self, s: &Setup) {
        for (i, (there, here)) in self.try_back(s).unwrap().iter().zip(&self.sources).enumerate() {
            assert!(there == here, "piece {i} of {} bytes", here.len());
        }
    }
}

fn is_argument(error: &Error, word: &str) {
    assert!(matches!(error, Error::Argument(text) if text.contains(word)), "{error}");
}

fn short(count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(|i| [16_384, 1, 9000, 64, 20_000, 4095][i % 6])
}

/// Threads of copiers in this process.
fn threads() -> usize {
    let comm =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.map(comm).filter(|name| name.starts_with("pinpool-copy-")).count()
}

/// Pools with room for many segments, a few, or one at a time.
#[test]
fn every_byte_is_in_its_place() {
    for capacity in [32 << 20, 5 << 20, 1 << 20] {
        for config in [HostConfig::new(), HostConfig::new().late(Duration::from_micros(200), 3)] {
            let s = setup(config, capacity);
            // Short ones, which are planned by the thread that packs them; and long ones beside them. No two overlap:
            // calls have no order.
            for pieces in [
                Pieces::new(&s.memory, 5, short(1200)),
                Pieces::new(&s.memory, 12 << 20, short(60).chain([3 << 20, 700_000, 5 << 20])),
                Pieces::new(&s.memory, (22 << 20) + 64, [9 << 20].into_iter()),
            ] {
                s.copier.upload_slices(&pieces.all()).unwrap();
                pieces.come_back(&s);
                s.copier.upload_slices(&pieces.all()[..pieces.places.len() / 2]).unwrap();
            }
            s.all_back();
        }
    }
    if let Some(node) = Node::by_hand(3) {
        let s = setup(node, 3 << 20);
        let pieces = Pieces::new(&s.memory, 5, short(1200));
        s.copier.upload_slices(&pieces.all()).unwrap();
        pieces.come_back(&s);
    }
}

/// Callers share the copier's threads: no more of them than the settings say, none before the first transfer, and none
/// after the copier is dropped.
#[test]
fn callers_share_the_threads() {
    own_process!();
    let s = setup(HostConfig::new(), 8 << 20);
    assert_eq!(threads(), 0, "before anything is copied");
    std::thread::scope(|scope| {
        for caller in 0..3 {
            let s = &s;
            scope.spawn(move || {
                let pieces = Pieces::new(&s.memory, caller * (10 << 20), short(1000));
                for _ in 0..3 {
                    s.copier.upload_slices(&pieces.all()).unwrap();
                    pieces.come_back(s);
                    assert_eq!(threads(), THREADS + 1);
                }
            });
        }
    });
    s.all_back();
    drop(s.copier);
    until("the threads end with their copier", || threads() == 0);
}

/// Pinned blocks at the given places, each `LEN` bytes, numbered.
fn pinned(s: &Setup, from: &Pool, places: impl Iterator<Item = usize>) -> Vec<(PinnedBuf, DeviceSlice)> {
    let places: Vec<usize> = places.collect();
    let mut bufs: Vec<PinnedBuf> = places.iter().map(|_| from.checkout(LEN).unwrap()).collect();
    // Neighbours on the device are none on the host.
    (0..bufs.len()).for_each(|i| bufs.swap(i, (i * 7919 + 13) % places.len()));
    let piece = |(i, (at, mut buf)): (usize, (usize, PinnedBuf))| {
        buf.try_extend_from_slice(&bytes(i, LEN)).unwrap();
        (buf, s.memory.slice(at..at + LEN).unwrap())
    };
    places.into_iter().zip(bufs).enumerate().map(piece).collect()
}

const LEN: usize = 8 << 10;

/// Checks that the bytes of pinned blocks are there, by a download to others, which come back in order.
fn pinned_come_back(s: &Setup, from: &Pool, places: &[DeviceSlice]) {
    let landing = |place: &DeviceSlice| {
        let mut landing = from.checkout(LEN).unwrap();
        landing.try_resize(LEN, 0xEE).unwrap();
        (place.clone(), landing)
    };
    let landings = places.iter().map(landing).collect();
    let came = s.copier.download_pages(landings).unwrap().wait().unwrap();
    assert_eq!(came.len(), places.len());
    for (i, buf) in came.iter().enumerate() {
        assert!(**buf == *bytes(i, LEN), "piece {i}");
    }
}

/// Blocks with gaps between them on the device.
fn apart(s: &Setup, from: &Pool, count: usize) -> Vec<(PinnedBuf, DeviceSlice)> {
    pinned(s, from, (0..count).map(|i| i * (LEN + 64)))
}

/// On each device. The blocks are of a pool of their own, and the copier's pool has room for segments or none.
fn both_ways(test: impl Fn(&Setup, &Pool)) {
    for room in [true, false] {
        for node in Node::each() {
            let s = setup(node, 24 << 20);
            let from = Pool::builder(&s.device).capacity(40 << 20).unpinned(Unpinned::Allow).build().unwrap();
            let taken = if room { Vec::new() } else { s.emptied() };
            test(&s, &from);
            drop(taken);
            s.all_back();
            s.all_back_to(&from);
        }
    }
}

/// One copy of pieces or of blocks fails: the call or the handle says so, all blocks return, and nothing is lost.
#[test]
fn a_copy_fails() {
    const COUNT: usize = 300;
    both_ways(|s, from| {
        let pieces = Pieces::new(&s.memory.slice(8 << 20..).unwrap(), 0, short(1200));
        let places: Vec<DeviceSlice> = apart(s, from, COUNT).into_iter().map(|(_, place)| place).collect();
        let blocks_up = || s.copier.upload_pages(apart(s, from, COUNT)).unwrap().wait().map(drop);
        let blocks_down = || {
            let landings = |place: &DeviceSlice| (place.clone(), from.checkout(LEN).unwrap());
            s.copier.download_pages(places.iter().map(landings).collect()).unwrap().wait().map(drop)
        };
        let calls: [&dyn Fn() -> Result<()>; 4] = [
            &|| blocks_up().map_err(|failed| failed.error),
            &|| blocks_down().map_err(|failed| failed.error),
            &|| s.copier.upload_slices(&pieces.all()),
            &|| pieces.try_back(s).map(drop),
        ];
        // Borrowed pieces need segments.
        let calls = if s.has_room() { &calls[..] } else { &calls[..2] };
        for (call, nth) in calls.iter().flat_map(|call| [0, 3, 63].map(|nth| (call, nth))) {
            for failure in [Failure::Argument, Failure::Transient, Failure::RunsAnyway] {
                // By hand, and of pieces, there are few copies.
                s.node.fail(Call::Copy, nth % 9, failure);
                let error = call().unwrap_err();
                let due =
                    if failure == Failure::Argument { ErrorClass::Argument } else { ErrorClass::Transient };
                assert_eq!(error.class(), due, "{failure:?}: {error}");
                assert!(s.node.calm());
                call().unwrap();
            }
        }
        pinned_come_back(s, from, &places);
        assert_eq!(s.pool.stats().quarantined_bytes + from.stats().quarantined_bytes, 0);
    });
}

/// The device dies at any point of a call with pieces, or under blocks whose handle waits or was
/// dropped: all end with that error, nothing stays in use for good, and no wait lasts for ever.
#[test]
fn a_device_dies_under_pieces_and_blocks() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Under {
        Pieces,
        Waited,
        Dropped,
    }
    let late = || HostConfig::new().late(Duration::from_micros(200), 3);
    for (under, after) in [
        (Under::Pieces, [0, 300, 1000, 3000]),
        (Under::Waited, [0, 200, 500, 800]),
        (Under::Dropped, [0, 200, 500, 800]),
    ] {
        for after in after {
            let s = setup(late(), if under == Under::Pieces { 4 << 20 } else { 24 << 20 });
            let pieces = Pieces::new(&s.memory, 0, short(1200));
            let blocks = || {
                let block = |i: usize| {
                    let mut buf = s.pool.try_checkout(LEN).ok()?;
                    buf.try_extend_from_slice(&bytes(i, LEN)).ok()?;
                    Some((buf, s.memory.slice(i * (LEN + 64)..i * (LEN + 64) + LEN).ok()?))
                };
                s.copier.upload_pages((0..1500).map_while(block).collect()).map_err(|refused| refused.error)
            };
            let once = || match under {
                // One or the other is under way.
                Under::Pieces => {
                    s.copier.upload_slices(&pieces.all()).and_then(|()| pieces.try_back(&s).map(drop)).err()
                }
                Under::Waited => {
                    blocks().and_then(|sent| sent.wait().map(drop).map_err(|failed| failed.error)).err()
                }
                Under::Dropped => blocks().map(drop).err().or_else(|| s.device.lost()),
            };
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_micros(after));
                    s.node.host().kill(0);
                });
                let error = (0..100_000).find_map(|_| once());
                assert!(error.as_ref().is_some_and(Error::is_device_lost), "{under:?}: {error:?}");
            });
            s.all_back();
        }
    }
}

/// A device that dies may still read blocks and write to them, so none of those in flight there is used again.
#[test]
fn blocks_in_flight_on_a_dead_device_never_come_back() {
    for up in [true, false] {
        let s = setup(HostConfig::new(), 24 << 20);
        s.node.hang(true);
        let block = |i: usize| (s.filled(&[1; LEN]), s.memory.slice(i * LEN..(i + 1) * LEN).unwrap());
        let blocks: Vec<_> = (0..20).map(block).collect();
        let granted = s.pool.stats().granted_bytes;
        let sent = if up {
            s.copier.upload_pages(blocks).unwrap()
        } else {
            s.copier.download_pages(blocks.into_iter().map(|(buf, place)| (place, buf)).collect()).unwrap()
        };
        until("all are in flight", || s.pool.stats().in_flight_bytes >= granted);
        s.node.host().kill(0);
        let error = sent.wait().unwrap_err().error;
        assert!(error.is_device_lost(), "{error}");
        until("none is in flight", || s.pool.stats().in_flight_bytes == 0);
        assert!(s.pool.stats().quarantined_bytes >= granted, "{:?}", s.pool.stats());
        s.pool.check().unwrap();
    }
}

/// A stream that is lost takes with it the blocks of the chunks that are in flight there, and no others of the call.
#[test]
fn a_lost_stream_keeps_the_blocks_of_its_chunks_alone() {
    const BLOCK: usize = 1 << 20;
    let Some(node) = Node::by_hand(5) else { return };
    let s = Setup::new(node, 64 << 20, |copier| copier.chunk(BLOCK).depth(1));
    let (pool, memory) = (&s.pool, &s.memory);
    let block = |n: usize| (s.filled(&vec![7; BLOCK]), memory.slice(n * BLOCK..(n + 1) * BLOCK).unwrap());
    let blocks: Vec<_> = (0..24).map(block).collect();
    no_event_is_recorded(&s);
    let sent = s.copier.upload_pages(blocks).unwrap();
    until("the stream is given up", || {
        s.copier.reap();
        s.device.reap();
        sent.is_over()
    });
    assert!(sent.wait().is_err_and(|failed| failed.error.class() == ErrorClass::Argument));
    let stats = pool.stats();
    pool.check().unwrap();
    assert!(stats.quarantined_bytes > 0 && stats.quarantined_bytes < 12 * BLOCK, "{stats:?}");
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (0, 0), "{stats:?}");
    // The copies were submitted all the same. A stream that is lost is destroyed whatever it has queued.
    while s.node.step() {}
}

/// Values of the program's own as blocks, neighbours on the device among others, both ways.
#[test]
fn registered_values_come_back_in_order() {
    const SHORT: usize = 700;
    for node in Node::each() {
        let s = setup(node, 8 << 20);
        // Every third is alone and longer.
        let len = |i: usize| if i % 3 == 2 { 5000 } else { SHORT };
        let mut at = 0;
        let places: Vec<DeviceSlice> = (0..90)
            .map(|i| {
                at += if i % 3 == 2 { 100 } else { 0 };
                let place = s.memory.slice(at..at + len(i)).unwrap();
                at += len(i) + if i % 3 == 2 { 100 } else { 0 };
                place
            })
            .collect();
        let value = |bytes: Vec<u8>| s.device.register(bytes.into_boxed_slice()).unwrap();
        let up =
            places.iter().enumerate().map(|(i, place)| (value(bytes(i, len(i))), place.clone())).collect();
        let came = s.copier.upload_pages(up).unwrap().wait().unwrap();
        assert!(came.iter().enumerate().all(|(i, value)| **value == *bytes(i, len(i))));
        drop(came);
        let down = places.iter().map(|place| (place.clone(), value(vec![0; place.len() + 9]))).collect();
        let came = s.copier.download_pages(down).unwrap().wait().unwrap();
        for (i, value) in came.iter().enumerate() {
            assert!(value[..len(i)] == bytes(i, len(i)) && value[len(i)..] == [0; 9], "piece {i}");
        }
        drop(came);
        s.all_back();
    }
}

/// Pieces without bytes take nothing from a pool that has nothing left, alone or behind others.
#[test]
fn empty_pieces_wait_for_nothing() {
    let s = setup(HostConfig::new(), 1 << 20);
    let place = s.memory.slice(..1).unwrap();
    let one = [7_u8];
    s.copier.upload_slices(&[(&one, place.clone()), (&[], place.clone()), (&[], place.clone())]).unwrap();
    let (taken, copier) = (s.emptied(), s.copier.clone());
    ends("a wait for room that is not needed", move || {
        copier.upload_slices(&[(&[], place.clone()), (&[], place.clone())]).unwrap();
    });
    drop(taken);
    s.all_back();
}

/// Pinned blocks that leave no room: there is no segment, nor one to wait for.
#[test]
fn pinned_blocks_may_be_all_that_the_pool_has() {
    let s = setup(HostConfig::new(), 1 << 20);
    let mut pieces = Vec::new();
    while let Ok(mut buf) = s.pool.try_checkout(1000) {
        buf.extend_from_slice(&bytes(pieces.len(), 1000));
        let at = 1000 * pieces.len();
        pieces.push((buf, s.memory.slice(at..at + 1000).unwrap()));
    }
    let places: Vec<DeviceSlice> = pieces.iter().map(|piece| piece.1.clone()).collect();
    let copier = s.copier.clone();
    ends("a wait for its own blocks", move || drop(copier.upload_pages(pieces).unwrap().wait().unwrap()));
    for (seed, place) in places.iter().enumerate().step_by(97) {
        assert!(*s.read(place) == *bytes(seed, 1000), "piece {seed}");
    }
    s.all_back();
}

/// Each call with many pieces says which of them it refuses, and how long that one's device memory is.
#[test]
fn a_refused_piece_is_named() {
    let s = setup(HostConfig::new(), 4 << 20);
    let (place, short) =
        (|i: usize| s.memory.slice(i * 100..i * 100 + 100).unwrap(), s.device.alloc(99).unwrap());
    let pick = |i: usize, wrong: usize| if i == wrong { DeviceSlice::from(&short) } else { place(i) };
    let small = |error: Error, number: usize, len: usize, (want, room): (usize, usize)| {
        assert_eq!((error.class(), error.is_retryable()), (ErrorClass::Argument, false));
        let Error::Piece { piece, memory, cause } = &error else { panic!("{error}") };
        assert_eq!((*piece, *memory), (number, len), "{error}");
        assert!(matches!(**cause, Error::TooSmall { need, have } if (need, have) == (want, room)), "{error}");
    };
    let up: Vec<(&[u8], DeviceSlice)> = (0..1000).map(|i| (&[7; 100][..], pick(i, 777))).collect();
    small(s.copier.upload_slices(&up).unwrap_err(), 777, 99, (100, 99));
    let targets = vec![[0_u8; 100]; 1000];
    let cut = |(i, to): (usize, &'static mut [u8])| (place(i), if i == 778 { &mut to[..98] } else { to });
    let targets: &'static mut [[u8; 100]] = targets.leak();
    let mut down: Vec<_> = targets.iter_mut().map(|to| &mut to[..]).enumerate().map(cut).collect();
    small(s.copier.download_slices(&mut down).unwrap_err(), 778, 100, (100, 98));
    // Blocks of two places each.
    let blocks =
        |i: usize| (s.filled(&vec![7; if i == 3 { 150 } else { 200 }]), vec![place(2 * i), place(2 * i + 1)]);
    let refused = s.copier.upload_pages((0..5).map(blocks).collect()).unwrap_err();
    small(refused.error, 3, 200, (200, 150));
    let back: Vec<usize> = refused.buffer.unwrap().iter().map(|(buf, _)| buf.len()).collect();
    assert_eq!(back, [200, 200, 200, 150, 200]);
    let blocks = |i: usize| {
        (vec![place(2 * i), place(2 * i + 1)], s.pool.checkout(if i == 4 { 199 } else { 200 }).unwrap())
    };
    let refused = s.copier.download_pages((0..5).map(blocks).collect()).unwrap_err();
    assert!(matches!(refused.error, Error::Piece { piece: 4, memory: 200, .. }), "{}", refused.error);
    drop(refused.buffer);
    // Of a call for one piece there is no number.
    assert!(matches!(s.copier.upload_slice(&[7; 100], &short), Err(Error::TooSmall { need: 100, have: 99 })));
    s.all_back();
}

/// Places at even distances: as one handle, and in lists beside others.
#[test]
fn pages_at_even_distances() {
    let s = setup(HostConfig::new(), 8 << 20);
    const PAGE: usize = 24;
    const PLANE: usize = 5 * PAGE;
    let cache = s.device.alloc(64 * PLANE).unwrap();
    let mut model = vec![0; 64 * PLANE];
    s.copier.upload_slice(&model, &cache).unwrap();
    // Two blocks: all planes of one, and of the other one some planes, then two pages side by side.
    let all = cache.strided(PAGE..2 * PAGE, PLANE, 64).unwrap();
    let some = cache.strided(..PAGE, 3 * PLANE, 20).unwrap();
    let beside = cache.strided(3 * PAGE..4 * PAGE, PAGE, 2).unwrap();
    assert_eq!((all.count(), some.count(), beside.count()), (64, 20, 2));
    let places = |n: usize| match n {
        0 => vec![all.clone()],
        _ => vec![some.clone(), beside.clone()],
    };
    let fill = |n: usize, len: usize| s.filled(&bytes(n, len));
    let lens = [64 * PAGE, 22 * PAGE];
    let sent: Vec<_> = (0..2).map(|n| (fill(n, lens[n]), places(n))).collect();
    s.copier.upload_pages(sent).unwrap().wait().unwrap();
    let mut put = |at: usize, from: &[u8]| model[at..at + PAGE].copy_from_slice(from);
    let sources = [0, 1].map(|n| bytes(n, lens[n]));
    sources[0].chunks(PAGE).enumerate().for_each(|(n, page)| put(n * PLANE + PAGE, page));
    sources[1].chunks(PAGE).enumerate().for_each(|(n, page)| {
        put(if n < 20 { 3 * n * PLANE } else { (3 + n - 20) * PAGE }, page);
    });
    let mut seen = vec![0xFF; model.len()];
    s.copier.download_slice(&cache, &mut seen).unwrap();
    assert!(seen == model, "each page in its place, and nothing beside them");
    let landings = (0..2).map(|n| (places(n), s.pool.checkout(lens[n]).unwrap())).collect();
    let came = s.copier.download_pages(landings).unwrap().wait().unwrap();
    assert!(came.iter().zip(&sources).all(|(buf, source)| **buf == **source));
    drop(came);
    // A block of one handle, or of a range.
    let back = s.copier.download_pages(vec![(all.clone(), s.pool.checkout(lens[0]).unwrap())]);
    assert!(*back.unwrap().wait().unwrap()[0] == *sources[0]);
    let one = all.get(63).unwrap();
    assert_eq!((one.address(), one.len()), (cache.address() + (63 * PLANE + PAGE) as u64, PAGE));
    let back = s.copier.download_pages(vec![(one, s.pool.checkout(PAGE).unwrap())]);
    assert!(*back.unwrap().wait().unwrap()[0] == sources[0][63 * PAGE..]);
    // What is none.
    for at in [64, usize::MAX] {
        is_argument(&all.get(at).unwrap_err(), "range");
    }
    // The last one leaves it.
    is_argument(&cache.strided(PLANE - PAGE + 1..PLANE + 1, PLANE, 64).unwrap_err(), "range");
    for (stride, count, word) in
        [(PLANE, 65, "range"), (usize::MAX, 3, "range"), (PLANE, 0, "nothing to copy")]
    {
        is_argument(&cache.strided(..PAGE, stride, count).unwrap_err(), word);
    }
    is_argument(&cache.strided(PAGE..PAGE, PLANE, 2).unwrap_err(), "nothing to copy");
    let overlap = cache.strided(..PAGE, PAGE - 1, 2).unwrap_err();
    let text =
        format!("ranges of {PAGE} bytes with a stride of {} overlap: it takes at least {PAGE}", PAGE - 1);
    assert_eq!(overlap.to_string(), text);
    assert_eq!(cache.strided(.., 0, 1).unwrap().get(0).unwrap().len(), cache.len());
    let refused = s.copier.upload_pages(vec![(fill(0, 10), all.clone())]).unwrap_err();
    assert!(matches!(refused.error, Error::Piece { piece: 0, memory: 1536, .. }), "{}", refused.error);
    drop(refused.buffer);
    let none: Vec<DeviceSlice> = Vec::new();
    let refused = s.copier.upload_pages(vec![(fill(0, 10), none)]).unwrap_err();
    assert!(refused.to_string().contains("nothing to copy"), "{}", refused.error);
    drop(refused.buffer);
    s.all_back();
}

/// A thousand bytes, and another number from the `steady`-th question on.
struct Changes {
    bytes: Vec<u8>,
    then: usize,
    asked: AtomicUsize,
    steady: usize,
}

impl std::ops::Deref for Changes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let is_steady = self.asked.fetch_add(1, Ordering::Relaxed) < self.steady;
        &self.bytes[..if is_steady { 1000 } else { self.then }]
    }
}

// SAFETY: the bytes are on the heap, and none are added or removed.
unsafe impl pinpool::StableDeref for Changes {}

fn changes(then: usize, steady: usize) -> Changes {
    Changes { bytes: vec![5; 1500], then, asked: 0.into(), steady }
}

#[test]
fn what_grows_meanwhile_is_copied_no_further_than_its_place() {
    let s = setup(HostConfig::new(), 1 << 20);
    for steady in 0..40 {
        let place = s.memory.slice(..8000).unwrap();
        s.copier.upload_slice(&[9; 8000], &place).unwrap();
        let piece = |i: usize| {
            let grows = changes(1500, steady + 100 * usize::from(i != 3));
            let place = s.memory.slice(i * 1000..(i + 1) * 1000).unwrap();
            (s.device.register(grows).unwrap(), place)
        };
        let all = (0..4).map(piece).collect();
        // Taken as it was, or refused.
        if let Ok(sent) = s.copier.upload_pages(all) {
            let _ = sent.wait();
        }
        assert!(
            s.read(&place)[4000..].iter().all(|byte| *byte == 9),
            "beyond all of them, asked {steady} times"
        );
    }
    s.all_back();
}

/// More calls fail than there are attempts to record an event.
fn no_event_is_recorded(s: &Setup) {
    (0..2000).for_each(|nth| s.node.fail(Call::Record, nth, Failure::Argument));
}

/// Events fail for good, so the copier's stream is given up while its copies are queued, on a device that is alive. The
/// segment, which the copies read, is not taken again.
#[test]
fn a_segment_outlives_copies_whose_end_is_never_known() {
    const LEN: usize = 300;
    let Some(node) = Node::by_hand(5) else { return };
    let s = setup(node, 4 << 20);
    no_event_is_recorded(&s);
    let (first, last) = (bytes(1, LEN), bytes(2, LEN));
    // They overlap on the device, so they never share a batch.
    let places = [s.memory.slice(4096..4096 + LEN).unwrap(), s.memory.slice(4196..4196 + LEN).unwrap()];
    let ranges = vec![CopyRange::new(0, places[0].clone()), CopyRange::new(LEN as u64, places[1].clone())];
    let sent = s.copier.upload([&first[..], &last[..]].concat(), ranges).unwrap();
    assert!(!sent.is_over(), "nothing has been copied yet");
    until("the stream is given up", || {
        s.copier.reap();
        s.device.reap();
        sent.is_over()
    });
    assert!(sent.wait().is_err_and(|failed| failed.error.class() == ErrorClass::Argument));
    // Nothing has been copied yet. The test takes all that the pool has, and writes to it.
    assert!(s.node.queued() > 0);
    let mut taken = s.emptied();
    for buf in &mut taken {
        buf.try_resize(buf.capacity(), 0xEE).unwrap();
    }
    assert!(!taken.is_empty() && s.pool.stats().quarantined_bytes > 0, "{:?}", s.pool.stats());
    s.node.calm();
    while s.node.step() {}
    drop(taken);
    // Where they overlap, either wins.
    for (place, sent, own) in [(&places[0], first, 0..100), (&places[1], last, 200..LEN)] {
        let back = s.read(place);
        assert!(back[own.clone()] == sent[own], "the copy read what another wrote to its segment");
    }
    s.pool.check().unwrap();
}

#[test]
fn what_shrinks_meanwhile_is_copied_as_it_was_or_refused() {
    let s = setup(HostConfig::new(), 4 << 20);
    let stream = s.device.stream().unwrap();
    for steady in 0..12 {
        for part in [0..1000, 500..1000] {
            let dst = s.memory.slice(..1000).unwrap();
            match stream.upload_part(s.device.register(changes(100, steady)).unwrap(), part.clone(), &dst) {
                Ok(sent) => drop(sent.wait().unwrap()),
                Err(SubmitError { error, buffer }) => {
                    is_argument(&error, "range");
                    assert!(buffer.is_some());
                }
            }
        }
    }
    s.all_back();
}

/// A call keeps the segment that it has to its end: it goes on while other requests wait for what it would give back.
#[test]
fn a_call_goes_on_with_the_segment_that_it_has() {
    let node = HostConfig::new().late(Duration::from_millis(1), 1);
    let s = Setup::new(node, 4 << 20, |copier| copier.chunk(64 << 10));
    let (source, place) = (bytes(1, 2 << 20), s.memory.slice(..2 << 20).unwrap());
    // All but one segment.
    let one = s.pool.checkout(80 << 10).unwrap();
    let rest = s.emptied();
    drop(one);
    let call = s.copier.upload(source.clone(), &place).unwrap();
    until("the call has its segment", || s.copier.stats().chunks > 0);
    assert!(!call.is_over());
    let (mut kept, since) = (Vec::new(), Instant::now());
    while !call.is_over() {
        kept.extend(s.pool.checkout_timeout(1000, Duration::from_millis(5)));
        assert!(since.elapsed() < HANG, "the call waits for a request that waits for the call");
    }
    call.wait().unwrap();
    drop(rest);
    assert!(*s.read(&place) == *source);
    drop(kept);
    s.all_back();
}

/// A long call ends, though other callers start short ones all the time.
#[test]
fn a_call_gets_its_turn_beside_others_that_keep_the_copier_busy() {
    let s = setup(HostConfig::new().late(Duration::from_micros(50), 1), 2 << 20);
    let stop = AtomicBool::new(false);
    // Checked out once: a pool that is full of short buffers gives longer ones out slowly.
    let mut long = pinned(&s, &s.pool, (0..64).map(|i| i * LEN));
    let places: Vec<_> = long.iter().map(|(_, place)| place.clone()).collect();
    std::thread::scope(|scope| {
        for t in 0..8 {
            let (s, stop) = (&s, &stop);
            scope.spawn(move || {
                let place = s.memory.slice((16 << 20) + t * 64..(16 << 20) + t * 64 + 64).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    drop(s.copier.upload_pages(vec![(s.filled(&[1; 64]), place.clone())]).unwrap());
                }
            });
        }
        for _ in 0..2 {
            let sent = s.copier.upload_pages(std::mem::take(&mut long)).unwrap().wait_timeout(HANG);
            stop.fetch_or(sent.is_err(), Ordering::Relaxed);
            long = sent.expect("it gets through").unwrap().into_iter().zip(places.iter().cloned()).collect();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(long.iter().enumerate().all(|(i, (buf, _))| **buf == *bytes(i, LEN)), "in their order");
    drop(long);
    pinned_come_back(&s, &s.pool, &places);
    s.all_back();
}

/// Blocks of one call that overlap on the device: either wins, byte by byte, and nothing hangs.
#[test]
fn blocks_of_a_call_may_overlap() {
    both_ways(|s, from| {
        let mut pieces = pinned(s, from, (0..300).map(|i| (i % 7) * LEN + 7));
        // Long ones over all of them.
        pieces.extend(pinned(s, from, [3, 1000].into_iter()));
        let came = s.copier.upload_pages(pieces).unwrap().wait().unwrap();
        assert_eq!(came.len(), 302);
        drop(came);
        let pieces = pinned(s, from, (0..300).map(|i| (i % 7) * (LEN + 1)));
        drop(s.copier.upload_pages(pieces).unwrap().wait().unwrap());
        for place in 0..7 {
            let mut back = vec![0; LEN];
            let at = place * (LEN + 1);
            s.device.stream().unwrap().download_blocking(s.memory.slice(at..at + LEN), &mut back).unwrap();
            let sources: Vec<Vec<u8>> = (place..300).step_by(7).map(|i| bytes(i, LEN)).collect();
            for (n, byte) in back.iter().enumerate() {
                assert!(sources.iter().any(|source| source[n] == *byte), "place {place}, byte {n}");
            }
        }
    });
}

/// Buffers whose memory the copier's device may not reach are refused before anything is copied.
#[test]
fn buffers_of_another_device_are_refused() {
    let (s, other) = (setup(HostConfig::new(), 4 << 20), setup(HostConfig::new(), 1 << 20));
    let wrong = |error: Error| {
        let Error::Piece { piece: 1, memory: 8, cause } = &error else { panic!("{error}") };
        assert!(matches!(**cause, Error::Mismatch { .. }), "{error}");
    };
    // The last of two.
    let place = |i: usize| s.memory.slice(i * 8..i * 8 + 8).unwrap();
    let both = || [s.filled(b"neighbor"), other.filled(b"neighbor")].into_iter().enumerate();
    let refused = s.copier.upload_pages(both().map(|(i, buf)| (buf, place(i))).collect()).unwrap_err();
    let back = refused.buffer.unwrap();
    assert!(back.len() == 2 && back.iter().all(|(buf, _)| **buf == *b"neighbor"));
    wrong(refused.error);
    let refused = s.copier.download_pages(both().map(|(i, buf)| (place(i), buf)).collect()).unwrap_err();
    assert_eq!(refused.buffer.map(|pieces| pieces.len()), Some(2));
    wrong(refused.error);
    assert_eq!(s.copier.stats().chunks, 0);
    drop(back);
    s.all_back();
}

/// Checks of a pool that copiers and streams use meanwhile find nothing wrong.
#[test]
fn a_busy_pool_is_sound() {
    let s = setup(HostConfig::new(), 4 << 20);
    let stream = s.device.stream().unwrap();
    let pieces = Pieces::new(&s.memory.slice(8 << 20..).unwrap(), 0, short(40));
    let calls: [&(dyn Fn() + Sync); 4] = [
        &|| s.copier.upload_slices(&pieces.all()).unwrap(),
        &|| {
            drop(
                s.copier.upload_pages(pinned(&s, &s.pool, (0..40).map(|i| i * LEN))).unwrap().wait().unwrap(),
            )
        },
        &|| s.copier.upload_slice(&s.filled(&[1; LEN]), s.memory.slice(4 << 20..)).unwrap(),
        &|| drop(stream.hold(s.pool.checkout(LEN).unwrap()).unwrap().wait().unwrap()),
    ];
    let until = Instant::now() + Duration::from_millis(1500);
    let busy = || Instant::now() < until;
    std::thread::scope(|scope| {
        for call in calls {
            scope.spawn(move || {
                while busy() {
                    call();
                }
            });
        }
        while busy() {
            s.pool.check().unwrap();
        }
    });
    s.all_back();
}

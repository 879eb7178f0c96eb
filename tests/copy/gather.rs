//! Gather and scatter by several threads, on host devices: every byte is in its place whichever thread packed it, in
//! pools that have room for all of the segments or for hardly any, and where copies fail or the device dies half-way.

#![allow(unsafe_code, reason = "a promise about a value of its own")]

use std::future::Future as _;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig};
use pinpool::{DeviceBuffer, DeviceSlice, Error, ErrorClass, PinnedBuf, Pool, QueueOptions, Unpinned};

use crate::support::own_process;
use crate::support::rig::queue::Setup;

const HANG: Duration = Duration::from_secs(20);
const PACKERS: usize = 4;

fn setup(config: HostConfig, capacity: usize) -> Setup {
    Setup::new(config.memory(80 << 20), capacity, QueueOptions::new().packers(PACKERS), 32 << 20)
}

/// `len` bytes, different ones for each seed.
fn bytes(seed: usize, len: usize) -> Vec<u8> {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    let noise =
        NOISE.get_or_init(|| (0..65_537_u32).map(|i| (i.wrapping_mul(0x9E37_79B1) >> 13) as u8).collect());
    let mut made = noise[seed * 61 % 60_000..].to_vec();
    while made.len() < len {
        made.extend_from_slice(noise);
    }
    made.truncate(len);
    made
}

/// Pieces that are neighbours on the device, or nearly so, in no order.
struct Pieces {
    sources: Vec<Vec<u8>>,
    places: Vec<DeviceSlice>,
}

impl Pieces {
    fn new(memory: &DeviceBuffer, first: usize, lens: impl Iterator<Item = usize>) -> Self {
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

    fn gather(&self) -> Vec<(&[u8], DeviceSlice)> {
        self.sources.iter().zip(&self.places).map(|(bytes, place)| (&bytes[..], place.clone())).collect()
    }

    fn come_back(&self, s: &Setup) {
        let mut back: Vec<Vec<u8>> = self.sources.iter().map(|bytes| vec![0; bytes.len()]).collect();
        let mut targets: Vec<(DeviceSlice, &mut [u8])> =
            self.places.iter().cloned().zip(back.iter_mut().map(|bytes| &mut bytes[..])).collect();
        s.queue.scatter_blocking(&s.pool, &mut targets).unwrap();
        for (i, (there, here)) in back.iter().zip(&self.sources).enumerate() {
            assert!(there == here, "piece {i} of {} bytes", here.len());
        }
    }
}

fn short(count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(|i| [16_384, 1, 9000, 64, 20_000, 4095][i % 6])
}

fn all_back(s: &Setup) {
    let since = Instant::now();
    while s.pool.stats().in_flight_bytes + s.pool.stats().checked_out_bytes > 0 {
        assert!(since.elapsed() < HANG, "{:?}", s.pool.stats());
        s.node.step();
        s.device.reap();
        std::thread::yield_now();
    }
    s.pool.check().unwrap();
}

/// Threads of this process that pack.
fn packers() -> usize {
    let comm =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.map(comm).filter(|name| name.starts_with("pinpool-pack-")).count()
}

/// Waits until there are none.
fn no_packers() {
    let since = Instant::now();
    while packers() > 0 {
        assert!(since.elapsed() < HANG, "helpers outlive their queue");
        std::thread::yield_now();
    }
}

/// Pools with room for many segments, a few, or one at a time.
#[test]
fn every_byte_is_in_its_place() {
    own_process!();
    for capacity in [32 << 20, 5 << 20, 1 << 20] {
        for config in [HostConfig::new(), HostConfig::new().late(Duration::from_micros(200), 3)] {
            let s = setup(config, capacity);
            // Short ones, which are planned by the thread that packs them; and long ones beside them. No two overlap:
            // copies of one queue have no order.
            for pieces in [
                Pieces::new(&s.memory, 5, short(1200)),
                Pieces::new(&s.memory, 12 << 20, short(60).chain([3 << 20, 700_000, 5 << 20])),
                Pieces::new(&s.memory, (22 << 20) + 64, [9 << 20].into_iter()),
            ] {
                s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap();
                pieces.come_back(&s);
                drop(s.queue.gather(&s.pool, &pieces.gather()[..pieces.places.len() / 2]).unwrap());
            }
            s.queue.synchronize().unwrap();
            all_back(&s);
        }
    }
    // No helper packs where there are no threads.
    let s = setup(HostConfig::new().stepped(3), 3 << 20);
    let pieces = Pieces::new(&s.memory, 5, short(1200));
    s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap();
    pieces.come_back(&s);
}

/// Callers share the helpers: no more of them than the options say, none before there is much to do, and none after the
/// queue is dropped.
#[test]
fn callers_share_the_helpers() {
    own_process!();
    no_packers();
    let s = setup(HostConfig::new(), 8 << 20);
    let few = Pieces::new(&s.memory, 0, short(100));
    s.queue.gather_blocking(&s.pool, &few.gather()).unwrap();
    few.come_back(&s);
    assert_eq!(packers(), 0, "for so little");
    std::thread::scope(|scope| {
        for caller in 0..3 {
            let s = &s;
            scope.spawn(move || {
                let pieces = Pieces::new(&s.memory, caller * (10 << 20), short(1000));
                for _ in 0..3 {
                    s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap();
                    pieces.come_back(s);
                    assert!((1..PACKERS).contains(&packers()), "{} helpers", packers());
                }
            });
        }
    });
    all_back(&s);
    drop(s.queue);
    no_packers();
}

/// Pinned pieces at the given places, each `LEN` bytes, numbered.
fn pinned(s: &Setup, from: &Pool, places: impl Iterator<Item = usize>) -> Vec<(PinnedBuf, DeviceSlice)> {
    let piece = |(i, at): (usize, usize)| {
        let mut buf = from.checkout(LEN).unwrap();
        buf.try_extend_from_slice(&bytes(i, LEN)).unwrap();
        (buf, s.memory.slice(at..at + LEN).unwrap())
    };
    places.enumerate().map(piece).collect()
}

const LEN: usize = 8 << 10;

/// Checks that the bytes of a gather of pinned pieces are there, by a scatter to other buffers, which come back in
/// order.
fn pinned_come_back(s: &Setup, from: &Pool, places: &[DeviceSlice]) {
    let landing = |place: &DeviceSlice| {
        let mut landing = from.checkout(LEN).unwrap();
        landing.try_resize(LEN, 0xEE).unwrap();
        (place.clone(), landing)
    };
    let landings = places.iter().map(landing).collect();
    let came = s.queue.scatter_pinned(&s.pool, landings).unwrap().wait().unwrap();
    assert_eq!(came.len(), places.len());
    for (i, buf) in came.iter().enumerate() {
        assert!(**buf == *bytes(i, LEN), "piece {i}");
    }
}

/// Short pinned pieces that are neighbours on the device are packed, both ways, where there are threads and segments
/// for it; others are copied from where they are, each by itself. Either way the buffers come back in their order, with
/// their bytes.
#[test]
fn pinned_pieces_are_packed_or_stay_in_place() {
    const COUNT: usize = 2048;
    own_process!();
    let mut s = setup(HostConfig::new(), 16 << 20);
    s.queue = s.device.copy_queue_with(QueueOptions::new().packers(8)).unwrap();
    let builder = Pool::builder(&s.device).capacity(48 << 20).unpinned(Unpinned::Allow);
    let from = builder.build().unwrap();
    // In no order on the host, neighbours on the device; the same with gaps; neighbours without room to pack; and
    // neighbours in the order of the call.
    let mixed = |i: usize| i * 7919 % COUNT;
    for (stride, packs, room, sorted) in [
        (LEN, true, true, false),
        (LEN + 512, false, true, false),
        (LEN, false, false, false),
        (LEN, true, true, true),
    ] {
        let pieces =
            pinned(&s, &from, (0..COUNT).map(|i| if sorted { i * stride } else { mixed(i) * stride }));
        let places: Vec<DeviceSlice> = pieces.iter().map(|(_, place)| place.clone()).collect();
        let taken: Vec<_> = std::iter::from_fn(|| s.pool.try_checkout(64 << 10).ok())
            .take(if room { 0 } else { 999 })
            .collect();
        let before = s.queue.stats().copies;
        let came = s.queue.gather_pinned(&s.pool, pieces).unwrap().wait().unwrap();
        let between = s.queue.stats().copies;
        assert!(came.iter().enumerate().all(|(i, buf)| **buf == *bytes(i, LEN)));
        drop(came);
        pinned_come_back(&s, &from, &places);
        for (way, copies) in [("up", between - before), ("down", s.queue.stats().copies - between)] {
            let case = format!("{way}, {copies} copies, stride {stride}, room {room}, sorted {sorted}");
            assert_eq!(copies < COUNT as u64 / 8, packs, "{case}");
            assert!(packs || copies == COUNT as u64, "{case}");
        }
        drop(taken);
        all_back(&s);
    }
    assert_eq!(from.stats().checked_out_bytes + from.stats().in_flight_bytes, 0);
}

/// Longer ones that are neighbours in another order than the call's stay in place: to sort them takes longer than
/// packing gains.
#[test]
fn longer_pieces_are_not_sorted() {
    const COUNT: usize = 1024;
    const LONG: usize = 16 << 10;
    own_process!();
    let mut s = setup(HostConfig::new(), 40 << 20);
    s.queue = s.device.copy_queue_with(QueueOptions::new().packers(8)).unwrap();
    for (sorted, packs) in [(false, false), (true, true)] {
        let piece = |i: usize| {
            let mut buf = s.pool.checkout(LONG).unwrap();
            buf.try_extend_from_slice(&bytes(i, LONG)).unwrap();
            let at = if sorted { i } else { i * 7919 % COUNT } * LONG;
            (buf, s.memory.slice(at..at + LONG).unwrap())
        };
        let pieces: Vec<_> = (0..COUNT).map(piece).collect();
        let places: Vec<DeviceSlice> = pieces.iter().map(|(_, place)| place.clone()).collect();
        let before = s.queue.stats().copies;
        let came = s.queue.gather_pinned(&s.pool, pieces).unwrap().wait().unwrap();
        let copies = s.queue.stats().copies - before;
        assert_eq!(copies < COUNT as u64 / 8, packs, "{copies} copies, sorted {sorted}");
        drop(came);
        let mut back = vec![0; LONG];
        for i in (0..COUNT).step_by(37) {
            s.device.stream().unwrap().download_blocking(&places[i], &mut back).unwrap();
            assert!(back == bytes(i, LONG), "piece {i}, sorted {sorted}");
        }
    }
    all_back(&s);
}

/// Pieces that stay in place, with gaps between them on the device.
fn apart(s: &Setup, count: usize) -> Vec<(PinnedBuf, DeviceSlice)> {
    pinned(s, &s.pool, (0..count).map(|i| i * (LEN + 64)))
}

/// With threads, some late; with lanes that a call overfills; and without any threads.
fn in_place(test: impl Fn(Setup)) {
    let late = HostConfig::new().late(Duration::from_micros(100), 3);
    for (config, depth) in [(late, 1024), (HostConfig::new(), 5), (HostConfig::new().stepped(3), 64)] {
        let mut s = setup(config, 24 << 20);
        s.queue = s.device.copy_queue_with(QueueOptions::new().depth(depth)).unwrap();
        test(s);
    }
}

/// Pieces that are pushed in groups count as that many copies, as that many lent buffers, and come back in whichever
/// way the handle ends.
#[test]
fn groups_count_as_their_copies() {
    const COUNT: usize = 1500;
    own_process!();
    in_place(|s| {
        let before = s.queue.stats().copies;
        let places: Vec<DeviceSlice> = apart(&s, COUNT).into_iter().map(|(_, place)| place).collect();
        drop(s.queue.gather_pinned(&s.pool, apart(&s, COUNT)).unwrap());
        s.queue.synchronize().unwrap();
        all_back(&s);
        assert_eq!(s.queue.stats().copies - before, COUNT as u64);
        assert_eq!(s.queue.stats().outstanding, 0);
        pinned_come_back(&s, &s.pool, &places);
        let gathered = s.queue.gather_pinned(&s.pool, apart(&s, COUNT)).unwrap();
        while !gathered.is_done().unwrap() {
            s.node.step();
        }
        let came = gathered.wait().unwrap();
        assert!(came.iter().enumerate().all(|(i, buf)| **buf == *bytes(i, LEN)));
        drop(came);
        all_back(&s);
    });
    // Nothing moves until the node resumes.
    let s = setup(HostConfig::new().stepped(3), 24 << 20);
    let pieces = apart(&s, 100);
    let out = s.pool.stats().checked_out_bytes;
    let gathered = s.queue.gather_pinned(&s.pool, pieces).unwrap();
    assert_eq!(s.queue.stats().outstanding, 100);
    assert!(s.queue.stats().batches < 10, "{:?}", s.queue.stats());
    assert_eq!((s.pool.stats().in_flight_bytes, s.pool.stats().checked_out_bytes), (out, 0));
    drop(gathered);
    assert_eq!(s.pool.stats().in_flight_bytes, out, "the device is not done");
    while s.node.step() {}
    all_back(&s);
}

/// One copy of a group fails: the call's handle says so, the others happen, and all buffers return.
#[test]
fn a_copy_fails_in_a_group() {
    const COUNT: usize = 300;
    own_process!();
    in_place(|s| {
        let places: Vec<DeviceSlice> = apart(&s, COUNT).into_iter().map(|(_, place)| place).collect();
        for nth in [0, 63, 170] {
            for failure in [Failure::Argument, Failure::RunsAnyway] {
                let fault = || s.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
                let clear = vec![0xEE; s.memory.len()];
                s.device.stream().unwrap().upload_blocking(&clear, &s.memory).unwrap();
                fault();
                let error = s.queue.gather_pinned(&s.pool, apart(&s, COUNT)).unwrap().wait().unwrap_err();
                assert!(matches!(error.class(), ErrorClass::Argument | ErrorClass::Transient), "{error}");
                assert_eq!(s.node.clear_faults(), 0);
                all_back(&s);
                let mut there = vec![0; s.memory.len()];
                s.device.stream().unwrap().download_blocking(&s.memory, &mut there).unwrap();
                let missing = (0..COUNT).filter(|i| there[i * (LEN + 64)..][..LEN] != bytes(*i, LEN)).count();
                assert!(missing <= 1, "{missing} of the others did not happen");
                s.queue.gather_pinned(&s.pool, apart(&s, COUNT)).unwrap().wait().unwrap();
                // And back.
                fault();
                let landings = |place: &DeviceSlice| (place.clone(), s.pool.checkout(LEN).unwrap());
                let down = s.queue.scatter_pinned(&s.pool, places.iter().map(landings).collect()).unwrap();
                drop(down.wait().unwrap_err());
                fault();
                drop(s.queue.scatter_pinned(&s.pool, places.iter().map(landings).collect()).unwrap());
                s.queue.synchronize().unwrap();
                assert_eq!(s.node.clear_faults(), 0);
                pinned_come_back(&s, &s.pool, &places);
                all_back(&s);
            }
        }
        assert_eq!(s.pool.stats().quarantined_bytes, 0);
    });
}

/// The device dies with groups pushed and in flight, with a handle that waits or a dropped one: nothing stays in use
/// for good, and no wait lasts for ever.
#[test]
fn a_device_dies_under_groups() {
    own_process!();
    for after in [0, 200, 800] {
        for waits in [true, false] {
            let s = setup(HostConfig::new().late(Duration::from_micros(200), 3), 24 << 20);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_micros(after));
                    s.node.kill(0);
                });
                let error = (0..100_000).find_map(|_| {
                    let pieces: Vec<_> = (0..1500)
                        .map_while(|i| {
                            let mut buf = s.pool.try_checkout(LEN).ok()?;
                            buf.try_extend_from_slice(&bytes(i, LEN)).ok()?;
                            Some((buf, s.memory.slice(i * (LEN + 64)..i * (LEN + 64) + LEN).ok()?))
                        })
                        .collect();
                    match s.queue.gather_pinned(&s.pool, pieces) {
                        Ok(gathered) if waits => gathered.wait().err(),
                        Ok(gathered) => {
                            drop(gathered);
                            s.queue.synchronize().err()
                        }
                        Err(refused) => Some(refused.error),
                    }
                });
                assert!(error.as_ref().is_some_and(Error::is_device_lost), "{error:?}");
            });
            all_back(&s);
        }
    }
}

/// Pieces of one call that overlap on the device: one of them wins, whole where they are the same place, and nothing
/// hangs.
#[test]
fn pieces_of_a_call_may_overlap() {
    own_process!();
    in_place(|s| {
        let mut pieces = pinned(&s, &s.pool, (0..300).map(|i| (i % 7) * LEN + 7));
        // Long ones over all of them.
        pieces.extend(pinned(&s, &s.pool, [3, 1000].into_iter()));
        let came = s.queue.gather_pinned(&s.pool, pieces).unwrap().wait().unwrap();
        assert_eq!(came.len(), 302);
        drop(came);
        let pieces = pinned(&s, &s.pool, (0..300).map(|i| (i % 7) * (LEN + 1)));
        drop(s.queue.gather_pinned(&s.pool, pieces).unwrap().wait().unwrap());
        for place in 0..7 {
            let mut back = vec![0; LEN];
            let at = place * (LEN + 1);
            s.device.stream().unwrap().download_blocking(s.memory.slice(at..at + LEN), &mut back).unwrap();
            assert!((0..300).filter(|i| i % 7 == place).any(|i| back == bytes(i, LEN)), "place {place}");
        }
        all_back(&s);
    });
}

/// Values of the program's own, short neighbours that are staged among others that stay in place, both ways.
#[test]
fn registered_values_are_packed_and_come_back_in_order() {
    const SHORT: usize = 700;
    own_process!();
    for config in [HostConfig::new(), HostConfig::new().stepped(3)] {
        let s = setup(config, 8 << 20);
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
        let came = s.queue.gather_pinned(&s.pool, up).unwrap().wait().unwrap();
        assert!(came.iter().enumerate().all(|(i, value)| **value == *bytes(i, len(i))));
        drop(came);
        let before = s.queue.stats().copies;
        let down = places.iter().map(|place| (place.clone(), value(vec![0; place.len() + 9]))).collect();
        let came = s.queue.scatter_pinned(&s.pool, down).unwrap().wait().unwrap();
        assert!(s.queue.stats().copies - before < 70, "neighbours by one copy: {:?}", s.queue.stats());
        for (i, value) in came.iter().enumerate() {
            assert!(value[..len(i)] == bytes(i, len(i)) && value[len(i)..] == [0; 9], "piece {i}");
        }
        drop(came);
        all_back(&s);
    }
}

/// Pieces without bytes take nothing from a pool that has nothing left, alone or behind others.
#[test]
fn empty_pieces_wait_for_nothing() {
    own_process!();
    let s = setup(HostConfig::new(), 1 << 20);
    let place = s.memory.slice(..1).unwrap();
    let one = [7_u8];
    s.queue
        .gather_blocking(&s.pool, &[(&one, place.clone()), (&[], place.clone()), (&[], place.clone())])
        .unwrap();
    let mut taken = Vec::new();
    for len in [64 << 10, 4 << 10, 64] {
        taken.extend(std::iter::from_fn(|| s.pool.try_checkout(len).ok()));
    }
    let (send, receive) = std::sync::mpsc::channel();
    let (queue, pool) = (s.queue.clone(), s.pool.clone());
    std::thread::spawn(move || {
        let up = queue.gather_blocking(&pool, &[(&[], place.clone()), (&[], place.clone())]);
        let down = queue.scatter_blocking(&pool, &mut [(place, &mut [])]);
        send.send(up.and(down)).unwrap();
    });
    assert_eq!(receive.recv_timeout(HANG).expect("it waits for room that it does not need"), Ok(()));
    drop(taken);
    all_back(&s);
}

/// Pinned pieces that leave no room: there is no segment to pack them in, nor to wait for.
#[test]
fn pinned_pieces_may_be_all_that_the_pool_has() {
    own_process!();
    let s = setup(HostConfig::new(), 1 << 20);
    let mut pieces = Vec::new();
    while let Ok(mut buf) = s.pool.try_checkout(1000) {
        buf.extend_from_slice(&bytes(pieces.len(), 1000));
        let at = 1000 * pieces.len();
        pieces.push((buf, s.memory.slice(at..at + 1000).unwrap()));
    }
    let places: Vec<DeviceSlice> = pieces.iter().map(|piece| piece.1.clone()).collect();
    let (send, receive) = std::sync::mpsc::channel();
    let (queue, pool) = (s.queue.clone(), s.pool.clone());
    std::thread::spawn(move || {
        let back = queue.gather_pinned(&pool, pieces).expect("in place").wait();
        send.send(back.is_ok()).unwrap();
    });
    assert!(receive.recv_timeout(HANG).expect("it waits for its own buffers"));
    for (seed, place) in places.iter().enumerate().step_by(97) {
        let back = s.device.stream().unwrap().download(place, s.pool.checkout(1000).unwrap()).unwrap();
        assert!(back.wait().unwrap()[..] == bytes(seed, 1000)[..], "piece {seed}");
    }
    all_back(&s);
}

/// Of thousands of pieces one is refused: all come back in their order, and nothing was copied.
#[test]
fn a_refused_piece_comes_back_with_all_others() {
    const COUNT: usize = 4096;
    own_process!();
    let s = setup(HostConfig::new(), 1 << 20);
    let builder = Pool::builder(&s.device).capacity(48 << 20).unpinned(Unpinned::Allow);
    let from = builder.build().unwrap();
    for wrong in [0, 255, 256, 3000, COUNT - 1] {
        let landing = |i: usize| {
            let len = if i == wrong { 64 } else { LEN };
            (s.memory.slice(i * 4096..i * 4096 + LEN).unwrap(), from.checkout(len).unwrap())
        };
        let refused = s.queue.scatter_pinned(&s.pool, (0..COUNT).map(landing).collect()).unwrap_err();
        assert!(matches!(refused.error, Error::TooSmall { .. }), "{}", refused.error);
        let back = refused.buffer.unwrap();
        let places: Vec<u64> = back.iter().map(|(place, _)| place.address()).collect();
        assert!(places.is_sorted() && places.len() == COUNT);
        assert_eq!(s.queue.stats().copies, 0);
        let first = s.memory.slice(wrong * 4096..).unwrap().address();
        assert!(places.contains(&first), "the piece that was refused is among them");
        assert_eq!(back.iter().filter(|(_, buf)| buf.capacity() < LEN).count(), 1);
        drop(back);
        s.queue.synchronize().unwrap();
        let since = Instant::now();
        while from.stats().in_flight_bytes + from.stats().checked_out_bytes > 0 {
            assert!(since.elapsed() < HANG, "{:?}", from.stats());
            s.device.reap();
        }
        from.check().unwrap();
    }
}

/// A copy fails: the gather says so, whichever thread packed it, and the others happen.
#[test]
fn a_copy_fails_in_a_gather() {
    own_process!();
    let s = setup(HostConfig::new(), 8 << 20);
    let pieces = Pieces::new(&s.memory, 0, short(1200));
    for nth in [0, 3, 9] {
        for failure in [Failure::Argument, Failure::Transient, Failure::RunsAnyway] {
            s.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
            let error = s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap_err();
            assert!(matches!(error.class(), ErrorClass::Argument | ErrorClass::Transient), "{error}");
            s.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
            drop(s.queue.gather(&s.pool, &pieces.gather()).unwrap());
            s.queue.synchronize().unwrap();
            s.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
            let mut back: Vec<Vec<u8>> = pieces.sources.iter().map(|bytes| vec![0; bytes.len()]).collect();
            let mut targets: Vec<(DeviceSlice, &mut [u8])> =
                pieces.places.iter().cloned().zip(back.iter_mut().map(|bytes| &mut bytes[..])).collect();
            s.queue.scatter_blocking(&s.pool, &mut targets).unwrap_err();
            assert_eq!(s.node.clear_faults(), 0);
            s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap();
            pieces.come_back(&s);
        }
    }
    all_back(&s);
    assert_eq!(s.pool.stats().quarantined_bytes, 0);
}

/// The device dies at any point of a gather or a scatter: both end, with that error, and nothing is in use.
#[test]
fn a_device_dies_under_a_gather() {
    own_process!();
    for after in [0, 300, 1000, 3000] {
        let s = setup(HostConfig::new().late(Duration::from_micros(100), 3), 4 << 20);
        let pieces = Pieces::new(&s.memory, 0, short(1200));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(after));
                s.node.kill(0);
            });
            // One or the other is under way.
            let ended = (0..100_000).find_map(|_| {
                let mut back: Vec<Vec<u8>> = pieces.sources.iter().map(|b| vec![0; b.len()]).collect();
                let mut targets: Vec<(DeviceSlice, &mut [u8])> =
                    pieces.places.iter().cloned().zip(back.iter_mut().map(|bytes| &mut bytes[..])).collect();
                s.queue
                    .gather_blocking(&s.pool, &pieces.gather())
                    .and_then(|()| s.queue.scatter_blocking(&s.pool, &mut targets))
                    .err()
            });
            let error = ended.unwrap();
            assert!(error.is_device_lost(), "{error}");
        });
        all_back(&s);
    }
}

/// A batch that another thread's copies have begun has no room for a group of a batch's length: the group's turn comes
/// all the same.
#[test]
fn a_long_group_has_its_turn_beside_single_copies() {
    own_process!();
    let s = setup(HostConfig::new(), 8 << 20);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let one = s.device.alloc(4096).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // Relaxed: a flag.
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let Ok(buf) = s.pool.try_checkout(64) else { continue };
                    let mut buf = buf;
                    buf.extend_from_slice(&[1; 64]);
                    drop(s.queue.upload(buf, &one).unwrap());
                }
            });
        }
        let (queue, pool) = (s.queue.clone(), s.pool.clone());
        let places: Vec<DeviceSlice> =
            (0..256).map(|i| s.memory.slice(i * 4096..i * 4096 + 2048).unwrap()).collect();
        std::thread::spawn(move || {
            for _ in 0..20 {
                let piece = |place: &DeviceSlice| {
                    let mut buf = pool.checkout(2048).unwrap();
                    buf.extend_from_slice(&[2; 2048]);
                    (buf, place.clone())
                };
                let sent = queue.gather_pinned(&pool, places.iter().map(piece).collect()).unwrap();
                sent.wait().unwrap();
            }
            send.send(()).unwrap();
        });
        let done = receive.recv_timeout(HANG);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        done.expect("it is never submitted");
    });
    all_back(&s);
}

/// A waker on the queue's thread must not wait, nor make helpers wait for what only that thread does.
#[test]
fn a_waker_that_scatters_is_refused() {
    struct Scatters {
        queue: pinpool::CopyQueue,
        pool: Pool,
        memory: DeviceBuffer,
        told: std::sync::mpsc::SyncSender<(String, Result<(), Error>)>,
    }
    impl std::task::Wake for Scatters {
        fn wake(self: std::sync::Arc<Self>) {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let mut bytes = vec![0; self.memory.len()];
            let mut pieces: Vec<(DeviceSlice, &mut [u8])> = bytes
                .chunks_mut(1 << 14)
                .enumerate()
                .map(|(i, chunk)| (self.memory.slice(i << 14..(i + 1) << 14).unwrap(), chunk))
                .collect();
            let result = self.queue.scatter_blocking(&self.pool, &mut pieces);
            let _ = self.told.send((name, result));
        }
    }
    own_process!();
    let s = Setup::new(
        HostConfig::new().memory(64 << 20).late(Duration::from_micros(100), 3),
        32 << 20,
        QueueOptions::new().threads(1).packers(4),
        8 << 20,
    );
    let (told, hears) = std::sync::mpsc::sync_channel(1000);
    let (mut refused, since) = (0, Instant::now());
    while refused < 3 && since.elapsed() < HANG {
        let (queue, pool) = (s.queue.clone(), s.pool.clone());
        let scatters = Scatters { queue, pool, memory: s.device.alloc(8 << 20).unwrap(), told: told.clone() };
        let waker = std::task::Waker::from(std::sync::Arc::new(scatters));
        let push = |i: usize| {
            let mut buf = s.pool.checkout(64).unwrap();
            buf.extend_from_slice(&[1; 64]);
            s.queue.upload(buf, s.memory.slice(i * 64..(i + 1) * 64).unwrap()).unwrap()
        };
        let mut sent: Vec<_> = (0..20).map(push).collect();
        let polled = std::pin::Pin::new(&mut sent[0]).poll(&mut std::task::Context::from_waker(&waker));
        drop(waker);
        if polled.is_pending() {
            let (name, result) = hears.recv_timeout(HANG).expect("it waits for itself");
            if name.starts_with("pinpool-send") {
                assert!(matches!(result, Err(Error::Unsupported(_))), "{result:?}");
                refused += 1;
            }
        }
        sent.drain(1..).for_each(|sent| drop(sent.wait().unwrap()));
    }
    assert!(refused > 0, "never on that thread");
    all_back(&s);
}

/// Bytes that are more each time the crate asks for them.
struct Grows {
    bytes: Vec<u8>,
    asked: std::sync::atomic::AtomicUsize,
    steady: usize,
}

impl std::ops::Deref for Grows {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let asked = self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if asked < self.steady { &self.bytes[..1000] } else { &self.bytes }
    }
}

// SAFETY: the bytes are on the heap, and none are added.
unsafe impl pinpool::StableDeref for Grows {}

#[test]
fn what_grows_meanwhile_is_copied_no_further_than_its_place() {
    own_process!();
    let s = setup(HostConfig::new(), 1 << 20);
    for steady in 0..40 {
        let stream = s.device.stream().unwrap();
        let mut guard = s.pool.checkout(8000).unwrap();
        guard.extend_from_slice(&[9; 8000]);
        stream.upload(guard, s.memory.slice(..8000).unwrap()).unwrap().wait().unwrap();
        let piece = |i: usize| {
            let bytes = vec![5; 1500];
            let grows = Grows { bytes, asked: 0.into(), steady: steady + 100 * usize::from(i != 3) };
            // Neighbours, so that they are packed.
            let place = s.memory.slice(i * 1000..(i + 1) * 1000).unwrap();
            (s.device.register(grows).unwrap(), place)
        };
        let all = (0..4).map(piece).collect();
        // Taken as it was, or refused.
        if let Ok(sent) = s.queue.gather_pinned(&s.pool, all) {
            let _ = sent.wait();
        }
        let back = stream.download(s.memory.slice(..8000).unwrap(), s.pool.checkout(8000).unwrap());
        let back = back.unwrap().wait().unwrap();
        assert!(back[4000..].iter().all(|byte| *byte == 9), "beyond all of them, asked {steady} times");
    }
    all_back(&s);
}

/// A segment for short neighbours is longer than they are, by the gaps between them.
#[test]
fn a_segment_that_is_there_is_long_enough() {
    own_process!();
    let s = setup(HostConfig::new(), 1 << 20);
    let mut pieces = Vec::new();
    for i in 0..200 {
        let mut buf = s.pool.checkout(8).unwrap();
        buf.extend_from_slice(&[i as u8; 8]);
        // Pairs of neighbours, with gaps.
        let at = i / 2 * 100 + i % 2 * 8;
        pieces.push((buf, s.memory.slice(at..at + 8).unwrap()));
    }
    // All that is left, but for one that would do for the bytes alone.
    let one = s.pool.checkout(1600).unwrap();
    let mut rest: Vec<PinnedBuf> = Vec::new();
    for len in [1 << 18, 1 << 14, 1 << 12, 1600, 512, 8] {
        rest.extend(std::iter::from_fn(|| s.pool.try_checkout(len).ok()));
    }
    drop(one);
    assert!(s.pool.try_checkout(6352).is_err() && s.pool.try_checkout(1600).is_ok());
    let (send, receive) = std::sync::mpsc::channel();
    let (queue, pool) = (s.queue.clone(), s.pool.clone());
    std::thread::spawn(move || {
        let back = queue.gather_pinned(&pool, pieces).expect("one way or another").wait();
        send.send(back.map(|back| back.len())).unwrap();
    });
    assert_eq!(receive.recv_timeout(HANG).expect("it waits for its own buffers").unwrap(), 200);
    drop(rest);
    all_back(&s);
}

/// A call keeps the segments that it has to its end, so it goes on while other requests wait for them, and for the
/// call.
#[test]
fn a_call_goes_on_with_the_segment_that_it_has() {
    own_process!();
    let s = setup(HostConfig::new(), 4 << 20);
    let mut pieces = Vec::new();
    let mut expected = Vec::new();
    for i in 0..2400 {
        let mut buf = s.pool.checkout(1000).unwrap();
        buf.extend_from_slice(&bytes(i, 1000));
        expected.extend_from_slice(&bytes(i, 1000));
        pieces.push((buf, s.memory.slice(i * 1000..(i + 1) * 1000).unwrap()));
    }
    // All but one segment, whatever length that has.
    let one =
        [1_500_000, 1 << 20, 600_000].into_iter().find_map(|len| s.pool.try_checkout(len).ok()).unwrap();
    let mut rest: Vec<PinnedBuf> = Vec::new();
    for len in [1 << 18, 1 << 16, 1 << 14, 1 << 12, 1000, 64] {
        rest.extend(std::iter::from_fn(|| s.pool.try_checkout(len).ok()));
    }
    drop(one);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (send, receive) = std::sync::mpsc::channel();
    let (queue, pool) = (s.queue.clone(), s.pool.clone());
    let done = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            let mut kept = Vec::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                kept.extend(s.pool.checkout_timeout(1000, Duration::from_millis(20)));
            }
        });
        std::thread::spawn(move || {
            let back = queue.gather_pinned(&pool, pieces).expect("one way or another").wait();
            send.send(back.map(|back| back.len())).unwrap();
        });
        let done = receive.recv_timeout(HANG);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        done
    });
    assert_eq!(done.expect("the call waits for a request that waits for the call").unwrap(), 2400);
    drop(rest);
    let stream = s.device.stream().unwrap();
    let back =
        stream.download(s.memory.slice(..expected.len()).unwrap(), s.pool.checkout(expected.len()).unwrap());
    assert!(back.unwrap().wait().unwrap()[..] == expected[..]);
    all_back(&s);
}

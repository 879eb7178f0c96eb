//! Gather and scatter by several threads, on host devices: every byte is in its place whoever packed it, in pools that have
//! room for all of the segments or for hardly any, and where copies fail or the device dies half-way.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{CopyQueue, Device, DeviceBuffer, DeviceSlice, ErrorClass, Pool, QueueOptions, Unpinned};

const HANG: Duration = Duration::from_secs(20);
const PACKERS: usize = 4;

/// One test after the other: the process's threads are counted.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Setup {
    node: HostNode,
    device: Device,
    pool: Pool,
    queue: CopyQueue,
    memory: DeviceBuffer,
}

fn setup(config: HostConfig, capacity: usize) -> Setup {
    let node = HostNode::new(config.memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(capacity).unpinned(Unpinned::Allow).build().unwrap();
    let queue = device.copy_queue_with(QueueOptions::new().packers(PACKERS)).unwrap();
    let memory = device.alloc(32 << 20).unwrap();
    Setup { node, device, pool, queue, memory }
}

/// So many bytes, different ones for each seed.
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
        // Thrown about, the same way each time.
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

/// Whatever the pool has room for: many segments, a few, or one at a time.
#[test]
fn every_byte_is_in_its_place() {
    let _alone = alone();
    for capacity in [32 << 20, 5 << 20, 1 << 20] {
        for config in [HostConfig::new(), HostConfig::new().late(Duration::from_micros(200), 3)] {
            let s = setup(config, capacity);
            // Short ones, which are planned by who packs them; and long ones beside them.
            for pieces in [
                Pieces::new(&s.memory, 5, short(1200)),
                Pieces::new(&s.memory, 0, short(60).chain([3 << 20, 700_000, 5 << 20])),
                Pieces::new(&s.memory, 64, [9 << 20].into_iter()),
            ] {
                s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap();
                pieces.come_back(&s);
                drop(s.queue.gather(&s.pool, &pieces.gather()[..pieces.places.len() / 2]).unwrap());
            }
            s.queue.synchronize().unwrap();
            all_back(&s);
        }
    }
    // Nobody helps where there are no threads.
    let s = setup(HostConfig::new().stepped(3), 3 << 20);
    let pieces = Pieces::new(&s.memory, 5, short(1200));
    s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap();
    pieces.come_back(&s);
}

/// Callers share the helpers, of which there are no more than was said, none before there is much to do, and none when the
/// queue is gone.
#[test]
fn callers_share_the_helpers() {
    let _alone = alone();
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

/// A copy fails: the gather says so, whoever packed it, and the others happen.
#[test]
fn a_copy_fails_in_a_gather() {
    let _alone = alone();
    let s = setup(HostConfig::new(), 8 << 20);
    let pieces = Pieces::new(&s.memory, 0, short(1200));
    for nth in [0, 3, 9] {
        for failure in [Failure::Argument, Failure::Moment, Failure::RunsAnyway] {
            s.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
            let error = s.queue.gather_blocking(&s.pool, &pieces.gather()).unwrap_err();
            assert!(matches!(error.class(), ErrorClass::Argument | ErrorClass::Moment), "{error}");
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

/// The device dies at any moment of a gather or a scatter: both end, with that error, and nothing is in use.
#[test]
fn a_device_dies_under_a_gather() {
    let _alone = alone();
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
            assert!(error.is_sticky(), "{error}");
        });
        all_back(&s);
    }
}

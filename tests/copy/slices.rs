//! Short slices, which a copier copies at once on the calling thread: they need nothing of the pool, keep to the rate, and fail
//! alone.

use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Copier, CopierBuilder, Device, DeviceSlice, Error, ErrorClass, Pool, Unpinned};

use crate::support::{bytes, in_use};

const LEN: usize = 3000;
/// The longest that are copied at once.
const LONGEST: usize = 256 << 10;
const HANG: Duration = Duration::from_secs(20);

struct Setup {
    node: HostNode,
    pool: Pool,
    copier: Copier,
    memory: DeviceSlice,
}

fn setup(options: impl FnOnce(CopierBuilder) -> CopierBuilder) -> Setup {
    let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(32 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let copier = options(Copier::builder(&pool, &device).threads(2)).build().unwrap();
    let memory = device.alloc(8 << 20).unwrap();
    Setup { node, pool, copier, memory }
}

impl Setup {
    fn range(&self, i: usize) -> DeviceSlice {
        self.memory.slice(i * LONGEST..i * LONGEST + LEN).unwrap()
    }

    fn is_there(&self, i: usize, expected: &[u8]) {
        let mut back = vec![0; LEN];
        self.copier.download_slice(self.range(i), &mut back).unwrap();
        assert!(back == expected, "piece {i}");
    }

    fn all_back(&self) {
        until("all is back", || in_use(&self.pool) == 0);
        self.pool.check().unwrap();
    }
}

fn until(what: &str, there: impl Fn() -> bool) {
    let since = Instant::now();
    while !there() {
        assert!(since.elapsed() < HANG, "never: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn short_slices_need_no_memory_of_the_pool() {
    let s = setup(|copier| copier);
    s.pool.wait_pinned(None).unwrap();
    let mut taken = Vec::new();
    for len in [8 << 20, 1 << 20, 64 << 10, 4 << 10, 64] {
        taken.extend(std::iter::from_fn(|| s.pool.try_checkout(len).ok()));
    }
    for len in [1, LEN, LONGEST] {
        let mut back = vec![0; len];
        s.copier.upload_slice(&bytes(len, len), &s.memory).unwrap();
        s.copier.download_slice(s.memory.slice(..len).unwrap(), &mut back).unwrap();
        assert!(back == bytes(len, len), "{len} bytes");
    }
    let stats = s.copier.stats();
    assert_eq!((stats.chunks, stats.batch_bytes), (6, 2 * (1 + LEN + LONGEST) as u64));
    std::thread::scope(|scope| {
        let longer = scope.spawn(|| s.copier.upload_slice(&bytes(1, LONGEST + 1), &s.memory));
        std::thread::sleep(Duration::from_millis(5));
        assert!(!longer.is_finished(), "a chunk needs a segment");
        taken.clear();
        longer.join().unwrap().unwrap();
    });
    s.all_back();
}

/// An error of the driver's is that call's alone.
#[test]
fn the_driver_refuses_a_short_slice() {
    let s = setup(|copier| copier);
    for _ in 0..3 {
        let fail =
            || s.node.fail(Fault { device: 0, call: Call::CopyBlocking, nth: 0, failure: Failure::Argument });
        fail();
        match s.copier.upload_slice(&bytes(1, LEN), s.range(1)) {
            Err(Error::Transfer { what, offset: 0, cause }) => {
                assert_eq!((&*what, cause.class()), ("bytes in memory", ErrorClass::Argument));
            }
            other => panic!("{other:?}"),
        }
        fail();
        let said = s.copier.download_slice(s.range(1), &mut [0; LEN]);
        assert!(matches!(said, Err(Error::Transfer { offset: 0, .. })), "{said:?}");
        assert_eq!(s.node.clear_faults(), 0);
        s.copier.upload_slice(&bytes(2, LEN), s.range(1)).unwrap();
        s.is_there(1, &bytes(2, LEN));
    }
    s.node.kill(0);
    let lost = s.copier.upload_slice(&bytes(1, LEN), s.range(1)).unwrap_err();
    assert_eq!(lost.class(), ErrorClass::DeviceLost, "{lost}");
}

/// The rate of bulk copies holds for short slices, too.
#[test]
fn short_slices_keep_to_the_rate() {
    let s = setup(|copier| copier.rate(1 << 20));
    let since = Instant::now();
    for i in 0..20 {
        s.copier.upload_slice(&bytes(i, 16 << 10), s.memory.slice(i * LONGEST..).unwrap()).unwrap();
    }
    // All but the last are to have had their time, of which a copy may be ten milliseconds late.
    assert!(since.elapsed() >= Duration::from_millis(19 * 1000 / 64 - 10), "{:?}", since.elapsed());
}

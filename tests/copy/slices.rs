//! Short slices, which a copier copies at once on the calling thread: they need nothing of the pool, keep to the rate, and fail
//! alone.

use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, HostConfig};
use pinpool::{CopierBuilder, DeviceSlice, Error, ErrorClass};

use crate::setup::Setup;
use crate::support::bytes;

const LEN: usize = 3000;
/// The longest that are copied at once.
const LONGEST: usize = 256 << 10;

fn setup(options: impl FnOnce(CopierBuilder) -> CopierBuilder) -> Setup {
    Setup::new(HostConfig::new(), 32 << 20, |copier| options(copier.threads(2)))
}

fn is_there(s: &Setup, expected: &[u8], place: &DeviceSlice) {
    let mut back = vec![0; LEN];
    s.copier.download_slice(place, &mut back).unwrap();
    assert!(back == expected);
}

#[test]
fn short_slices_need_no_memory_of_the_pool() {
    let s = setup(|copier| copier);
    s.pool.wait_pinned(None).unwrap();
    let mut taken = s.emptied();
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
    let place = s.memory.slice(..LEN).unwrap();
    for _ in 0..3 {
        let fail = || s.node.fail(Call::CopyBlocking, 0, Failure::Argument);
        fail();
        match s.copier.upload_slice(&bytes(1, LEN), &place) {
            Err(Error::Transfer { what, offset: 0, cause }) => {
                assert_eq!((&*what, cause.class()), ("bytes in memory", ErrorClass::Argument));
            }
            other => panic!("{other:?}"),
        }
        fail();
        let said = s.copier.download_slice(&place, &mut [0; LEN]);
        assert!(matches!(said, Err(Error::Transfer { offset: 0, .. })), "{said:?}");
        assert!(s.node.calm());
        s.copier.upload_slice(&bytes(2, LEN), &place).unwrap();
        is_there(&s, &bytes(2, LEN), &place);
    }
    s.node.host().kill(0);
    let lost = s.copier.upload_slice(&bytes(1, LEN), &place).unwrap_err();
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

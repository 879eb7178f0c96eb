//! What happens when the system refuses to lock pages.
//!
//! Each test has a process of its own that is not root's any more, and may lock 16 pages then. A plain `mlock` of 1 MiB
//! must fail there first; where it does not, the test could show nothing, and says so.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use super::*;
use crate::support::process;

/// Pages that may be locked.
const LIMIT: usize = 16;
/// No user of a process here.
const NOBODY: libc::uid_t = 65_533;

fn pages(n: usize) -> usize {
    // SAFETY: sysconf only reads a value.
    n * usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

/// Gives up what root may do, and lowers the limit. Whether this process may still lock more than that.
fn can_lock_after_all() -> bool {
    process::limit(libc::RLIMIT_MEMLOCK, pages(LIMIT) as u64);
    let bytes = vec![0_u8; 1 << 20];
    // SAFETY: a number, and memory of this function's own, which stays locked for as long as it is mapped.
    unsafe {
        libc::setuid(NOBODY);
        libc::mlock(bytes.as_ptr().cast(), bytes.len()) == 0
    }
}

/// Runs `body` with a device in this process, which may lock next to nothing. All that the body had is given back then.
fn limited(body: impl FnOnce(&Device)) {
    if can_lock_after_all() {
        return skip!("a plain mlock of 1 MiB succeeds over the limit, for a user that is not root");
    }
    let locked = locked_bytes();
    let (node, device) = host();
    body(&device);
    drop(device);
    let given_back = || (node.live(0), locked_bytes()) == (HostUsage::default(), locked);
    until(given_back, || format!("{:?}, {} bytes locked", node.live(0), locked_bytes()));
}

fn locked_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<usize>().unwrap() << 10
}

/// Bytes that are in memory. (The allocator maps much more for each thread than it uses.)
fn resident_bytes() -> usize {
    let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
    sizes.split(' ').nth(1).unwrap().parse::<usize>().map(pages).unwrap()
}

/// A pool that starts within the limit and leaves it as it grows.
fn growing(device: &Device) -> PoolBuilder {
    Pool::builder(device).capacity(pages(64)).initial(pages(4)).region(pages(16)).extent(pages(8))
}

fn round_trip(device: &Device, mut buf: PinnedBuf) {
    let bytes: Vec<u8> = (0..buf.capacity()).map(|i| ((i * 31) >> 3) as u8).collect();
    buf.extend_from_slice(&bytes);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(buf.capacity()).unwrap());
    let mut buf = stream.upload(buf, &memory).unwrap().wait().unwrap();
    buf.clear();
    let buf = stream.download(&memory, buf).unwrap().wait().unwrap();
    assert!(*buf == *bytes);
}

#[test]
fn refusing_is_an_error_and_leaves_nothing_behind() {
    own_process!();
    limited(|device| {
        let mut resident = 0;
        for round in 0..40 {
            let error = Pool::builder(device).capacity(32 << 20).initial(32 << 20).build().unwrap_err();
            let limit = format!("{} KiB", pages(LIMIT) >> 10).replace("1024 KiB", "1 MiB");
            assert_eq!(error, Error::MemLock { wanted: 32 << 20, limit: limit.clone() });
            assert!(error.is_retryable());
            let text = error.to_string();
            for part in [&*limit, "32 MiB", "ulimit -l", "CAP_IPC_LOCK", "allow unpinned"] {
                assert!(text.contains(part), "{part:?} is missing: {text}");
            }
            if round == 8 {
                resident = resident_bytes();
            }
        }
        // The pages were touched before they were to be locked: had the 31 later attempts kept them, it would be a
        // gigabyte.
        assert!(resident_bytes() < resident + (256 << 20), "{resident} bytes, now {}", resident_bytes());
    });
}

#[test]
fn a_limit_hit_while_growing_leaves_what_is_there() {
    own_process!();
    limited(|device| {
        let pool = growing(device).build().unwrap();
        let earlier = pool.checkout(100).unwrap();
        assert!(earlier.is_pinned());
        // 4 pages are there; of the next 16 one extent of 8 fits, the other does not.
        let first = pool.checkout(pages(8) - 32).unwrap();
        let pinning = pool.wait_pinned(Some(HANG)).unwrap();
        assert!(matches!(pinning.error, Some(Error::MemLock { .. })), "{pinning:?}");
        assert_eq!((pinning.ready, pinning.wanted), (pages(12), pages(12)));
        let stats = checked(&pool);
        assert_eq!((stats.pinned_bytes, stats.unpinned_bytes), (pages(12), 0));
        assert!(first.is_pinned());
        round_trip(device, pool.checkout(100).unwrap());
        let again = pool.try_checkout(pages(8) - 32);
        assert!(matches!(again, Err(Error::Exhausted(_))), "{again:?}");
        pool.wait_pinned(Some(HANG)).unwrap();
        // A request that returned buffers cannot serve gets the error.
        drop(first);
        let refused = pool.checkout_many(&[Request::new(pages(8) - 32); 2], Some(HANG));
        assert!(matches!(refused, Err(Error::MemLock { .. })), "{refused:?}");
        drop(earlier);
        assert_eq!(checked(&pool).waiting, 0);
        assert!(pool.shutdown(HANG).drained);
    });
}

/// A region is as long as the limit allows, where it could be longer.
#[test]
fn a_pool_grows_by_what_the_limit_allows() {
    own_process!();
    limited(|device| {
        let pool = Pool::builder(device).capacity(1 << 20).initial(0).build().unwrap();
        let buf = pool.checkout(pages(2) - 32).unwrap();
        assert!(buf.is_pinned());
        // Less than the limit is what it takes to be told the limit: nothing shorter serves this one.
        let error = pool.checkout(pages(LIMIT) - 32).unwrap_err();
        assert!(matches!(error, Error::MemLock { .. }), "{error}");
    });
}

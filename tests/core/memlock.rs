//! What happens when the system refuses to lock pages.
//!
//! Each test has a process of its own that gives up CAP_IPC_LOCK, and may lock 16 pages then. A plain `mlock` of 1 MiB must
//! fail there first; where it does not, the test could show nothing, and says so.

#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

use pinpool::host::HostUsage;
use pinpool::{Device, Error, PinnedBuf, Pool, PoolBuilder, Request};

use crate::support::{own_process, skip};
use crate::{HANG, checked, host, until};

/// Pages that may be locked.
const LIMIT: usize = 16;
const CAP_IPC_LOCK: u32 = 14;

fn pages(n: usize) -> usize {
    // SAFETY: sysconf only reads a value.
    n * usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

/// Gives up CAP_IPC_LOCK, for this thread and those that it starts, and lowers the process's limit.
fn give_up_locking() {
    // _LINUX_CAPABILITY_VERSION_3 and this thread. The sets are the effective, the permitted and the inheritable
    // one of the first 32 capabilities, and then those of the others.
    let (mut header, mut sets) = ([0x2008_0522_u32, 0], [0_u32; 6]);
    let limit = libc::rlimit { rlim_cur: pages(LIMIT) as u64, rlim_max: pages(LIMIT) as u64 };
    // SAFETY: the pointers are to live values of the layouts that these calls read and write.
    unsafe {
        if libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) == 0 {
            sets[..3].iter_mut().for_each(|set| *set &= !(1 << CAP_IPC_LOCK));
            libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr());
        }
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit), 0);
    }
}

/// Whether this thread may lock more than the limit.
fn can_lock() -> bool {
    const LEN: usize = 1 << 20;
    // SAFETY: a new mapping of our own, locked and unmapped.
    unsafe {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = libc::mmap(std::ptr::null_mut(), LEN, prot, flags, -1, 0);
        assert_ne!(base, libc::MAP_FAILED);
        let locked = libc::mlock(base, LEN);
        libc::munmap(base, LEN);
        locked == 0
    }
}

/// Runs `body` with a device on a thread that may lock next to nothing, nor the threads that it starts, in a process of the
/// test's own. All that the body had is given back then.
fn limited(body: impl FnOnce(&Device)) {
    give_up_locking();
    if can_lock() {
        return skip!("a plain mlock of 1 MiB succeeds without CAP_IPC_LOCK and over the limit");
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

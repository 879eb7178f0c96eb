//! Where host memory comes from: what the driver allocates, what the pool adopts, values that are registered.

use std::fs::File;
use std::io::Write;
use std::ops::Deref;
use std::os::fd::FromRawFd;

use memmap2::{Mmap, MmapMut};
use pinpool::{Backing, HostAllocFlags, Lend, RegionInfo, Registered, StableDeref};

use super::*;
use crate::support::value::Value;

const PAGE: usize = 64 << 10;

/// Registers a value. `None`: the host's memlock limit is used up, by pools that are about to end or for good; or the
/// device cannot have such memory registered.
fn register<T>(on: &Subject, mut value: T, read_only: bool) -> Option<Registered<T>>
where
    T: Deref<Target = [u8]> + StableDeref + Send + Sync + 'static,
{
    for _ in 0..200 {
        let registered =
            if read_only { on.device.register_read_only(value) } else { on.device.register(value) };
        match registered {
            Ok(registered) => return Some(registered),
            Err(refused) if on.cannot(&refused.error) => {
                println!("refused, as it may be here: {}", refused.error);
                return None;
            }
            Err(refused) => {
                assert!(matches!(refused.error, Error::MemLock { .. }), "{}", refused.error);
                value = refused.buffer.unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    skip!("the memlock limit is used up");
    None
}

fn upload<B: Lend + std::fmt::Debug>(stream: &Stream, from: B, to: &DeviceSlice) -> B {
    stream.upload(from, to).unwrap().wait().unwrap()
}

pub fn backings(on: &Subject) {
    let flags =
        (0..8).map(|i| HostAllocFlags { portable: i & 1 > 0, mapped: i & 2 > 0, write_combined: i & 4 > 0 });
    let driver = flags.map(Backing::HostAlloc).chain([Backing::Managed]);
    for backing in [Backing::default()].into_iter().chain(driver) {
        let pool = Pool::builder(&on.device)
            .capacity(16 * PAGE)
            .initial(4 * PAGE)
            .region(4 * PAGE)
            .extent(2 * PAGE)
            .backing(backing)
            .unpinned(Unpinned::Allow)
            .build();
        let pool = match pool {
            Err(error) if on.cannot(&error) && !matches!(backing, Backing::HostAlloc(_)) => continue,
            pool => pool.unwrap(),
        };
        pool.wait_pinned(Some(HANG)).unwrap();
        let regions = pool.regions();
        // Ranges that the driver allocates share no mapping.
        let lengths: Vec<usize> = regions.iter().map(|r| r.len).collect();
        let own = backing == Backing::Registered;
        assert_eq!(lengths, if own { vec![4 * PAGE] } else { vec![2 * PAGE; 2] }, "{backing:?}");
        assert!(regions.iter().all(|r| r.base.as_ptr().addr() % 4096 == 0), "{regions:?}");
        have_addresses(on, &pool, backing);
        let (stream, memory) = (on.stream(), on.alloc(PAGE));
        // Enough for the pool to grow.
        let bufs: Vec<PinnedBuf> = (0..14).map(|i| filled(&pool, &bytes(i, PAGE - 4096))).collect();
        pool.wait_pinned(Some(HANG)).unwrap();
        let stats = pool.stats();
        assert_eq!(stats.pinned_bytes + stats.unpinned_bytes, 16 * PAGE, "{backing:?}: {stats:?}");
        let managed = backing == Backing::Managed;
        assert!(!managed || stats.unpinned_bytes == 16 * PAGE, "managed memory is not pinned: {stats:?}");
        assert!(bufs.iter().all(|b| !managed || !b.is_pinned()));
        if stats.unpinned_bytes == 0 {
            assert!(bufs.iter().all(PinnedBuf::is_pinned));
        }
        for (i, buf) in bufs.into_iter().enumerate() {
            drop(upload(&stream, buf, &memory));
            assert!(fetch(&pool, &stream, &memory)[..PAGE - 4096] == bytes(i, PAGE - 4096), "{backing:?}");
        }
        pool.check().unwrap();
        assert_eq!(pool.trim(4 * PAGE), 12 * PAGE, "{backing:?}");
        assert_eq!((pool.stats().pinned_bytes + pool.stats().unpinned_bytes), 4 * PAGE);
        assert_eq!(pool.trim(0), 4 * PAGE);
        assert_eq!(pool.regions(), []);
        drop(filled(&pool, b"again"));
        assert!(pool.shutdown(HANG).drained);
    }
}

/// Buffers of a new pool have addresses on the device, and of a pool of two devices on both.
fn have_addresses(on: &Subject, pool: &Pool, backing: Backing) {
    let bufs = [filled(pool, b"one"), filled(pool, b"another")];
    match bufs.each_ref().map(|buf| buf.device_address(&on.device)) {
        [Ok(a), Ok(b)] => {
            let on_host = bufs.each_ref().map(|buf| buf.as_ptr().addr() as u64);
            assert!(a % 64 == 0 && a > 0, "{a:#x}");
            let apart = on_host[0].wrapping_sub(on_host[1]);
            assert_eq!(a.wrapping_sub(b), apart, "as far apart as on the host");
        }
        // Ascend: what the library allocates has none.
        [Err(error), Err(_)] if on.cannot(&error) && matches!(backing, Backing::HostAlloc(_)) => {}
        [_, Err(error)] | [Err(error), _] => {
            let unpinned = bufs.iter().any(|buf| !buf.is_pinned());
            assert!(unpinned && backing != Backing::Managed, "{error}");
        }
    }
    if let Some(other) = &on.other {
        let both = Pool::builder(&on.device).device(other).capacity(2 * PAGE).backing(backing);
        let buf = filled(&both.unpinned(Unpinned::Allow).build().unwrap(), b"both");
        let (a, b) = (buf.device_address(&on.device), buf.device_address(other));
        // Ascend: an address is the registering device's alone.
        assert!(a.is_ok() == b.is_ok() || b.is_err_and(|error| on.cannot(&error)));
    }
}

fn base(info: &RegionInfo) -> usize {
    info.base.as_ptr().addr()
}

pub fn adopted(on: &Subject) {
    let pool = Pool::builder(&on.device)
        .capacity(16 * PAGE)
        .initial(0)
        .region(2 * PAGE)
        .extent(2 * PAGE)
        .unpinned(Unpinned::Allow)
        .build()
        .unwrap();
    let content = bytes(1, 5 * PAGE + 777);
    let (value, dropped) = Value::watched(content.clone());
    let (start, end) = (value.as_ptr().addr(), value.as_ptr().addr() + value.len());
    let info = match pool.adopt(value) {
        Err(refused) if on.cannot(&refused.error) => {
            return println!("refused, as it may be here: {}", refused.error);
        }
        adopted => adopted.unwrap(),
    };
    assert!(start <= base(&info) && base(&info) + info.len <= end && base(&info) % 4096 == 0);
    // All of its whole pages, whatever a page is here.
    assert!(info.len > 4 * PAGE && base(&info) - start < PAGE && end - (base(&info) + info.len) < PAGE);
    assert_eq!(pool.regions(), [info]);
    let stats = pool.stats();
    assert_eq!(stats.pinned_bytes + stats.unpinned_bytes, info.len);
    assert_eq!((stats.pinned_bytes, stats.free_bytes), (info.pinned, info.len));
    // Served like any other.
    let (stream, memory) = (on.stream(), on.alloc(PAGE));
    for round in 0..3 {
        let buf = filled(&pool, &bytes(round, PAGE));
        assert!((start..end).contains(&buf.as_ptr().addr()), "the pool has no other memory");
        drop(upload(&stream, buf, &memory));
        assert!(fetch(&pool, &stream, &memory) == bytes(round, PAGE));
    }
    pool.check().unwrap();
    pool.adopt(MmapMut::map_anon(2 * PAGE).unwrap()).unwrap();
    assert_eq!(pool.regions().len(), 2);
    // What does not fit now, or never, is refused as it was, and takes up no room.
    let before = (pool.stats(), pool.pinning().wanted);
    let large = MmapMut::map_anon(11 * PAGE).unwrap();
    let at = large.as_ptr();
    let refused = pool.adopt(large).unwrap_err();
    let Error::Exhausted(shortage) = &refused.error else { panic!("{}", refused.error) };
    assert_eq!((shortage.requested, shortage.capacity), (11 * PAGE, 16 * PAGE));
    let left = 16 * PAGE - info.len - 2 * PAGE;
    let told = format!("; {} KiB are left for memory to adopt; trim the pool, or raise", left / 1024);
    assert!(refused.error.to_string().contains(&told), "{}", refused.error);
    let large = refused.buffer.unwrap();
    assert_eq!(large.as_ptr(), at);
    let refused = pool.adopt(bytes(3, 4095)).unwrap_err();
    argument(&refused.error, "no whole page");
    assert!(refused.buffer.unwrap() == bytes(3, 4095));
    assert_eq!((pool.stats(), pool.pinning().wanted), before);
    pool.check().unwrap();
    assert_eq!(pool.trim(0), 16 * PAGE - left);
    until(on, "the value is dropped", || dropped.load(Ordering::SeqCst) == 1);
    assert_eq!((pool.regions(), pool.stats().pinned_bytes), (vec![], 0));
    assert_eq!(pool.adopt(large).unwrap().len, 11 * PAGE);
    assert_eq!(pool.trim(0), 11 * PAGE);
    let closed = on.pool(4 * PAGE);
    assert!(closed.shutdown(HANG).drained);
    let refused = closed.adopt(vec![5; 2 * PAGE]).unwrap_err();
    assert_eq!((refused.error, refused.buffer), (Error::Closed, Some(vec![5; 2 * PAGE])));
    // It ends with the pool as well, and not while a buffer is out.
    let (value, dropped) = Value::watched(content);
    pool.adopt(value).unwrap();
    let last = filled(&pool, b"last");
    drop(pool);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!((dropped.load(Ordering::SeqCst), &*last), (0, &b"last"[..]));
    drop(last);
    until(on, "the value is dropped", || dropped.load(Ordering::SeqCst) == 1);
}

pub fn registered(on: &Subject) {
    let (pool, stream, memory) = (on.pool(4 << 20), on.stream(), on.alloc(300_000));
    let before = on.device.stats().registered_bytes;
    let content = bytes(1, 300_000);
    let vec = content.clone();
    let at = vec.as_ptr();
    let Some(mut value) = register(on, vec, false) else { return };
    assert!(value.device_address(&on.device).unwrap() > 0);
    if let Some(Err(error)) = on.other.as_ref().map(|other| value.device_address(other)) {
        assert!(on.cannot(&error), "{error}");
    }
    assert!(value.as_ptr() == at && *value.as_ref() == *content && !value.is_read_only());
    assert_eq!(on.device.stats().registered_bytes - before, 300_000);
    assert_eq!(pool.stats().pinned_bytes + pool.stats().unpinned_bytes, 4 << 20, "outside of every pool");
    // Up as a whole, in part, held, written to in between.
    value = upload(&stream, value, &memory);
    assert!(fetch(&pool, &stream, &memory) == content);
    value[..1000].fill(7);
    let part = stream.upload_part(value, 500..2500, memory.slice(100..2100)).unwrap();
    value = part.wait().unwrap();
    let mut expected = content.clone();
    expected[100..600].fill(7);
    expected[600..2100].copy_from_slice(&content[1000..2500]);
    assert!(fetch(&pool, &stream, &memory) == expected);
    value = stream.hold(value).unwrap().wait().unwrap();
    // Down: the front of it is written, the rest stays.
    value.fill(1);
    value = stream.download(memory.slice(0..200_000), value).unwrap().wait().unwrap();
    assert!(value[..200_000] == expected[..200_000] && value[200_000..].iter().all(|b| *b == 1));
    // A range that the value does not have is refused with it.
    let refused = stream.upload_part(value, 10..300_001, &memory).unwrap_err();
    argument(&refused.error, "range");
    let value = refused.buffer.unwrap();
    let last = value.to_vec();
    let vec = value.into_inner().unwrap();
    assert!(vec.as_ptr() == at && vec == last);
    assert_eq!(on.device.stats().registered_bytes, before);
    // Other devices of the family may use memory that one has registered.
    if let Some(other) = &on.other {
        let Some(value) = register(on, vec, false) else { return };
        let (stream, memory) = (other.stream().unwrap(), other.alloc(300_000).unwrap());
        let value = upload(&stream, value, &memory);
        let mut back = vec![0; 300_000];
        stream.download_blocking(&memory, &mut back).unwrap();
        assert!(back == last && *value == *last);
    }
}

pub fn registered_is_kept(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let before = on.device.stats().registered_bytes;
    for (shared, waits) in [(false, false), (true, false), (false, true), (true, true)] {
        // Whole pages, of which no other value has a part.
        let content = bytes(usize::from(shared), 200_001);
        let (value, dropped) = Value::watched(content.clone());
        let Some(value) = register(on, value, false) else { return };
        let memory = on.alloc(200_001);
        if shared {
            let value = Arc::new(value);
            let flights = [(); 2].map(|()| stream.upload(value.clone(), &memory).unwrap());
            drop(value);
            flights.into_iter().for_each(|f| if waits { drop(f.wait().unwrap()) } else { drop(f) });
        } else {
            let flight = stream.upload(value, &memory).unwrap();
            if waits { drop(flight.wait().unwrap()) } else { drop(flight) }
        }
        // Its bytes are overwritten when it is dropped: if that was too early, it shows here.
        assert!(fetch(&pool, &stream, &memory) == content);
        until(on, "the value is dropped", || dropped.load(Ordering::SeqCst) == 1);
    }
    until(on, "all is unregistered", || on.device.stats().registered_bytes == before);
    // Downloads write to the value until they are complete, though its handle was dropped.
    let (value, dropped) = Value::watched(vec![0; 100_000]);
    let Some(value) = register(on, value, false) else { return };
    let memory = on.alloc(100_000);
    drop(stream.download(&memory, value).unwrap());
    stream.synchronize().unwrap();
    until(on, "the value is dropped", || dropped.load(Ordering::SeqCst) == 1);
}

fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file
}

fn shared_memory(content: &[u8]) -> File {
    // SAFETY: a name that ends with a zero byte.
    let fd = unsafe { libc::memfd_create(c"pinpool".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: just made, and this function's alone.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(content).unwrap();
    file
}

pub fn mapped(on: &Subject) {
    let (pool, stream, memory) = (on.pool(4 << 20), on.stream(), on.alloc(123_456));
    let content = bytes(6, 123_456);
    // SAFETY: no other code has the file.
    let map = unsafe { Mmap::map(&file(&content)) }.unwrap();
    let at = map.as_ptr();
    if let Some(value) = register(on, map, true) {
        assert!(value.is_read_only() && value.as_ptr() == at);
        let value = upload(&stream, value, &memory);
        assert!(fetch(&pool, &stream, &memory) == content);
        let map = value.into_inner().unwrap();
        assert!(map.as_ptr() == at && *map == *content);
    }
    let shared = shared_memory(&content);
    // SAFETY: only this test has the files, and reads them by other ways when no copy writes to them.
    let maps = unsafe { [MmapMut::map_mut(&shared), memmap2::MmapOptions::new().map_copy(&file(&content))] };
    for map in maps.map(Result::unwrap) {
        let at = map.as_ptr();
        let Some(value) = register(on, map, false) else { return };
        assert!(value.as_ptr() == at && *value == *content);
        let mut value = upload(&stream, value, &memory);
        assert!(fetch(&pool, &stream, &memory) == content);
        value.reverse();
        let value = upload(&stream, value, &memory);
        let back = stream.download(&memory, value).unwrap().wait().unwrap().into_inner().unwrap();
        assert!(back.as_ptr() == at && back.iter().eq(content.iter().rev()));
    }
    // What was downloaded into shared memory shows in every mapping of it.
    // SAFETY: as above.
    let other = unsafe { Mmap::map(&shared) }.unwrap();
    assert!(other.iter().eq(content.iter().rev()));
    // Shared memory can be a part of a pool as well.
    let adopting = Pool::builder(&on.device).capacity(8 * PAGE).initial(0).unpinned(Unpinned::Allow);
    let adopting = adopting.build().unwrap();
    let shared = shared_memory(&vec![8; 3 * PAGE]);
    // SAFETY: as above.
    let map = unsafe { MmapMut::map_mut(&shared) }.unwrap();
    let info = adopting.adopt(map).unwrap();
    assert_eq!(info.len, 3 * PAGE);
    // SAFETY: as above.
    let other = unsafe { Mmap::map(&shared) }.unwrap();
    assert!(other.iter().all(|b| *b == 8), "adopting changed what was there");
    let buf = upload(&stream, filled(&adopting, b"seen by others"), &memory);
    let offset = buf.as_ptr().addr() - base(&info);
    assert_eq!(&other[offset..offset + 14], b"seen by others");
}

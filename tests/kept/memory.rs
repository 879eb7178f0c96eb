//! Host memory and copies, on every kind of device.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use memmap2::{Mmap, MmapMut};
use pinpool::{HugePages, RegionInfo, SubmitError};

use super::*;
use crate::support::value::Value;

const PAGE: usize = 64 << 10;

/// Host to device, within the device, device to host, and host to host: `cudaMemcpyKind`. Device memory is
/// `cudaMalloc`'s.
#[test]
fn all_kinds_of_copies_carry_every_byte() {
    on_every_device(|on| {
        let (pool, stream) = (on.pool(2 << 20), on.stream());
        for len in [1, 777, 65_537, 300_000] {
            let sent = bytes(len, len);
            let (first, second) = (on.device.alloc(len).unwrap(), on.device.alloc(len).unwrap());
            let (from, to) = stream.copy_host(filled(&pool, &sent), pool.checkout(len).unwrap()).unwrap();
            assert!(*from.wait().unwrap() == *sent);
            // In the order of the stream, with no wait in between.
            drop(stream.upload(to.wait().unwrap(), &first).unwrap());
            drop(stream.copy(&first, &second).unwrap());
            let back = stream.download(&second, pool.checkout(len).unwrap()).unwrap().wait().unwrap();
            assert!(*back == *sent, "{len} bytes");
            // Memory of no pool.
            let mut plain = vec![0; len];
            stream.upload_blocking(&back, &first).unwrap();
            stream.download_blocking(&first, &mut plain).unwrap();
            assert!(plain == sent, "{len} bytes");
        }
        if on.stand_in().is_some() {
            let made = on.calls("cuMemAlloc_v2") + on.calls("aclrtMalloc");
            assert!(made >= 8, "each buffer is an allocation of the driver's");
            until("all are freed", || on.calls("cuMemFree_v2") + on.calls("aclrtFree") == made);
        }
        pool.check().unwrap();
    });
}

/// Whether this device can have memory of the program's pinned: newer libraries of Ascend, and there on a host only.
fn registers(on: &On) -> bool {
    let can = |npu: &crate::StandIn| npu.has("aclrtHostRegister") && !npu.is("rc true");
    !on.is_npu() || on.stand_in().is_some_and(can)
}

/// What came of registering or adopting these bytes. `None`: the process may lock too little, which the test says; or the
/// device, if it is not one that `can`, does not have it, and the value comes back as it was.
fn had<T, V>(on: &On, can: bool, got: Result<T, SubmitError<V>>, content: &[u8]) -> Option<T>
where
    V: std::ops::Deref<Target = [u8]>,
{
    match got {
        Ok(got) => return Some(got),
        Err(SubmitError { error: error @ Error::MemLock { .. }, .. }) => crate::skip!("{error}"),
        Err(SubmitError { error, buffer }) => {
            assert!(!can && on.lacks(&error), "{error}");
            assert!(*buffer.unwrap() == *content, "the value comes back");
        }
    }
    None
}

#[test]
fn a_registered_value_is_copied_from_where_it_is_and_comes_back() {
    on_every_device(|on| {
        let (stream, memory) = (on.stream(), on.device.alloc(100_000).unwrap());
        let (value, dropped) = Value::watched(bytes(1, 100_000));
        let at = value.as_ptr();
        let registered = had(on, registers(on), on.device.register(value), &bytes(1, 100_000));
        let Some(value) = registered else { return };
        assert!(registers(on) && value.as_ptr() == at);
        assert_eq!(on.device.stats().registered_bytes, 100_000);
        // Up, and down into it.
        let mut value = stream.upload(value, &memory).unwrap().wait().unwrap();
        value.fill(0);
        let value = stream.download(&memory, value).unwrap().wait().unwrap();
        assert!(*value == *bytes(1, 100_000));
        on.was_called("cuMemHostRegister_v2 1", 1);
        // Unregistered and given back, as it was.
        let value = value.into_inner().unwrap();
        assert!(value.as_ptr() == at && *value == *bytes(1, 100_000));
        assert_eq!((on.device.stats().registered_bytes, dropped.load(Ordering::SeqCst)), (0, 0));
        // A copy in flight keeps the value, and the last one lets go of it.
        let value = on.device.register(value).unwrap();
        // (An Ascend device waits for a copy from the middle of a page.)
        on.hang(!on.is_npu());
        drop(stream.upload(value, &memory).unwrap());
        assert!(on.is_npu() || dropped.load(Ordering::SeqCst) == 0);
        on.hang(false);
        until("the value is dropped", || dropped.load(Ordering::SeqCst) == 1);
        until("it is unregistered", || on.device.stats().registered_bytes == 0);
    });
}

/// `cudaHostRegisterReadOnly`: memory that the process itself cannot write to.
#[test]
fn what_is_registered_read_only_is_uploaded_and_never_written() {
    on_every_device(|on| {
        const LEN: usize = 65_536;
        let (stream, memory) = (on.stream(), on.device.alloc(LEN).unwrap());
        let content = bytes(1, LEN);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        // SAFETY: no other code has the file.
        let map = unsafe { Mmap::map(&file) }.unwrap();
        let registered = had(on, !on.is_npu(), on.device.register_read_only(map), &content);
        let Some(value) = registered else { return };
        assert!(value.is_read_only() && !on.is_npu());
        let value = stream.upload(value, &memory).unwrap().wait().unwrap();
        let mut back = vec![0; LEN];
        stream.download_blocking(&memory, &mut back).unwrap();
        assert!(back == content);
        drop(value.into_inner().unwrap());
        // `cudaHostRegisterPortable` and `cudaHostRegisterReadOnly`.
        on.was_called("cuMemHostRegister_v2 9", 1);
        // Nothing is downloaded into what could be written to, and is only read.
        let value = on.device.register_read_only(content.clone()).unwrap();
        let refused = stream.download(&memory, value).unwrap_err();
        assert!(refused.error.to_string().contains("reading only"), "{}", refused.error);
        let value = stream.upload(refused.buffer.unwrap(), &memory).unwrap().wait().unwrap();
        assert!(*value == *content);
    });
}

#[test]
fn buffers_have_addresses_on_the_device() {
    on_every_device(|on| {
        for backing in [Backing::Registered, Backing::HostAlloc(HostAllocFlags::default())] {
            let builder = Pool::builder(&on.device).capacity(8 * PAGE).backing(backing);
            let pool = match builder.unpinned(Unpinned::Allow).build() {
                Ok(pool) => pool,
                Err(error) => {
                    assert!(backing == Backing::Registered && !registers(on) && on.lacks(&error), "{error}");
                    continue;
                }
            };
            let bufs = [filled(&pool, b"one"), filled(&pool, b"another")];
            let on_host = bufs.each_ref().map(|buf| buf.as_ptr().addr() as u64);
            match bufs.each_ref().map(|buf| buf.device_address(&on.device)) {
                [Ok(one), Ok(another)] if on.is_npu() => {
                    assert_eq!(another.wrapping_sub(one), on_host[1].wrapping_sub(on_host[0]));
                }
                // One address for both sides.
                [Ok(one), Ok(another)] => assert_eq!([one, another], on_host),
                // What an Ascend library allocates has none.
                [Err(error), Err(_)] => {
                    let allocated = matches!(backing, Backing::HostAlloc(_));
                    assert!(allocated && on.lacks(&error), "{error}");
                }
                mixed => panic!("{mixed:?}"),
            }
            let other = on.other(1);
            assert!(matches!(bufs[0].device_address(&other), Err(Error::Mismatch { .. })));
        }
    });
}

#[test]
fn memory_of_the_program_becomes_a_region_of_the_pool() {
    on_every_device(|on| {
        let pool = Pool::builder(&on.device).capacity(16 * PAGE).initial(0).region(2 * PAGE).extent(2 * PAGE);
        let pool = pool.unpinned(Unpinned::Allow).build().unwrap();
        let (value, dropped) = Value::watched(bytes(1, 5 * PAGE));
        let whole = value.as_ptr_range();
        let adopted = had(on, registers(on), pool.adopt(value), &bytes(1, 5 * PAGE));
        let Some(info) = adopted else { return };
        // Its whole pages, and nothing else.
        assert!(info.len > 4 * PAGE && whole.contains(&info.base.as_ptr().cast_const()));
        assert_eq!(pool.regions(), [info]);
        let buf = filled(&pool, &bytes(2, PAGE));
        assert!(whole.contains(&buf.as_ptr()), "the pool has no other memory");
        assert_eq!((pool.trim(0), dropped.load(Ordering::SeqCst)), (0, 0), "a buffer is out");
        drop(buf);
        round_trip(&pool, &on.stream(), &bytes(3, PAGE));
        // It goes like any other region, and the value with it.
        until("nothing is in flight", || pool.stats().in_flight_bytes == 0);
        assert_eq!(pool.trim(0), info.len);
        until("the value is dropped", || dropped.load(Ordering::SeqCst) == 1);
        assert_eq!(pool.regions(), []);
        // What does not fit is refused, as it was.
        let large = MmapMut::map_anon(17 * PAGE).unwrap();
        let refused = pool.adopt(large).unwrap_err();
        assert!(matches!(refused.error, Error::Impossible { .. }) && refused.buffer.is_some());
    });
}

/// For a program that has registered the regions elsewhere, too.
#[test]
fn a_region_is_announced_before_it_is_unpinned() {
    on_every_device(|on| {
        type Told = Arc<Mutex<Vec<(u64, usize, u64)>>>;
        let told = Told::default();
        // The calls that take pinned memory back, as the stand-in has counted them.
        const UNPINS: [&str; 4] =
            ["cuMemHostUnregister", "aclrtFreeHost", "aclrtHostUnregister", "aclrtFreeHostWithDevSync"];
        let stand_in = on.stand_in().cloned();
        let unpinned = move || stand_in.iter().flat_map(|it| UNPINS.map(|call| calls(it, call))).sum::<u64>();
        let (list, count) = (told.clone(), unpinned.clone());
        let pool = Pool::builder(&on.device)
            .capacity(2 * PAGE)
            .unpinned(Unpinned::Allow)
            .before_unpin(move |region| list.lock().unwrap().push((region.id, region.len, count())));
        let pool = pool.build().unwrap();
        pool.wait_pinned(Some(HANG)).unwrap();
        let regions = pool.regions();
        let (before, len) = (unpinned(), regions.iter().map(|region| region.len).sum::<usize>());
        assert!(told.lock().unwrap().is_empty());
        assert_eq!(pool.trim(0), len);
        until("each region is announced", || told.lock().unwrap().len() == regions.len());
        let announced = told.lock().unwrap().clone();
        assert_eq!(announced.iter().map(|told| told.1).sum::<usize>(), len);
        assert_eq!(announced[0].2, before, "nothing was unpinned before");
        for region in regions {
            assert!(announced.iter().any(|told| told.0 == region.id), "{region:?}");
        }
    });
}

#[test]
fn trimming_gives_idle_regions_back_and_the_pool_grows_anew() {
    on_every_device(|on| {
        let sizes =
            Pool::builder(&on.device).capacity(8 * PAGE).initial(2 * PAGE).region(2 * PAGE).extent(2 * PAGE);
        let pool = sizes.unpinned(Unpinned::Allow).build().unwrap();
        let held = |pool: &Pool| pool.stats().pinned_bytes + pool.stats().unpinned_bytes;
        for _ in 0..2 {
            let mut bufs: Vec<_> = (0..7).map(|seed| filled(&pool, &bytes(seed, PAGE - 4096))).collect();
            pool.wait_pinned(Some(HANG)).unwrap();
            assert_eq!(held(&pool), 8 * PAGE);
            let last = bufs.pop();
            drop(bufs);
            // A region with a buffer out stays, and so do the bytes that are to be kept.
            assert_eq!((pool.trim(4 * PAGE), held(&pool)), (4 * PAGE, 4 * PAGE));
            assert_eq!((pool.trim(0), held(&pool)), (2 * PAGE, 2 * PAGE));
            drop(last);
            assert_eq!((pool.trim(0), held(&pool)), (2 * PAGE, 0));
            assert_eq!(pool.regions(), []);
        }
        pool.check().unwrap();
    });
}

/// Whether the system was asked for huge pages in the mapping that has this byte. `Err`: the system does not say.
fn asked_for_huge_pages(at: usize) -> Result<bool, &'static str> {
    let maps = std::fs::read_to_string("/proc/self/smaps").map_err(|_| "no smaps")?;
    let mut within = false;
    for line in maps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-') {
            let parse = |text| usize::from_str_radix(text, 16).unwrap_or(0);
            within = (parse(from)..parse(to)).contains(&at);
        } else if let (true, Some(flags)) = (within, line.strip_prefix("VmFlags:")) {
            return Ok(flags.split_whitespace().any(|flag| flag == "hg"));
        }
    }
    Err("no flags of mappings")
}

#[test]
fn huge_pages_are_asked_for_as_the_program_says() {
    on_every_device(|on| {
        for huge in [HugePages::Auto, HugePages::Always, HugePages::Never] {
            let pool = Pool::builder(&on.device).capacity(4 << 20).region(4 << 20).huge_pages(huge);
            let pool = match pool.backing(Backing::Registered).unpinned(Unpinned::Allow).build() {
                Ok(pool) => pool,
                Err(error) => return assert!(!registers(on) && on.lacks(&error), "{error}"),
            };
            pool.wait_pinned(Some(HANG)).unwrap();
            let base = pool.regions()[0].base.as_ptr().addr();
            assert_eq!(base % (2 << 20), 0, "a region of the pool's own begins with a huge page");
            match (huge, asked_for_huge_pages(base)) {
                (_, Err(why)) => crate::skip!("{why}"),
                (HugePages::Auto, Ok(_)) => {}
                (_, Ok(asked)) => assert_eq!(asked, huge == HugePages::Always, "{huge:?}"),
            }
            round_trip(&pool, &on.stream(), &bytes(1, PAGE));
        }
    });
}

/// Segments begin on multiples of 64 bytes, and the next one is no nearer than `ALIGN_UP(len, 32) + 32`: the rule of
/// Ascend's library, which the pool keeps on all devices. The stand-in checks it, too, at each copy.
#[test]
fn segments_keep_their_distance() {
    on_every_device(|on| {
        let span = |len: usize| len.next_multiple_of(32) + 32;
        let (pool, stream, memory) = (on.pool(2 << 20), on.stream(), on.device.alloc(200_000).unwrap());
        let lens = (1..130).chain([4000, 4032, 4064, 4065, 4096, 32_768, 65_504, 65_536, 100_001, 200_000]);
        // Such an alignment makes for pages of the segment's own, which end on the length but for the rule.
        let aligned = [4064, 4065, 4096, 8192, 8192].map(|len| (len, 4096));
        let request = |(len, align)| {
            let mut buf = pool.checkout(Request::new(len).align(align)).unwrap();
            assert_eq!(buf.as_ptr().addr() % align.max(64), 0, "{len} bytes");
            buf.extend_from_slice(&bytes(len, len));
            buf
        };
        let mut held: Vec<_> = lens.map(|len| (len, 1)).chain(aligned).map(request).collect();
        held.sort_by_key(|buf| buf.as_ptr());
        let begins = |region: &RegionInfo| region.base.as_ptr().addr();
        let regions = pool.regions().into_iter().map(|region| begins(&region)..begins(&region) + region.len);
        let regions: Vec<_> = regions.collect();
        for (n, buf) in held.iter().enumerate() {
            let start = buf.as_ptr().addr();
            let region = regions.iter().find(|region| region.contains(&start)).expect("in a region");
            let end = start + span(buf.len());
            assert!(end <= region.end, "{} bytes", buf.len());
            assert!(held.get(n + 1).is_none_or(|next| end <= next.as_ptr().addr()), "{} bytes", buf.len());
        }
        for buf in held {
            let len = buf.len();
            let buf = stream.upload(buf, memory.slice(..len)).unwrap().wait().unwrap();
            let back = stream.download(memory.slice(..len), buf).unwrap().wait().unwrap();
            assert!(*back == *bytes(len, len));
        }
        pool.check().unwrap();
    });
}

#[test]
fn size_0_is_refused_by_every_call() {
    on_every_device(|on| {
        let (pool, stream, memory) = (on.pool(4 * PAGE), on.stream(), on.device.alloc(100).unwrap());
        let none = [100.into(), 0.into()];
        for error in [
            pool.checkout(0).unwrap_err(),
            pool.try_checkout(0).unwrap_err(),
            pool.checkout_timeout(0, HANG).unwrap_err(),
            pool.checkout_zeroed(0).unwrap_err(),
            pool.checkout_on(&stream, 0).unwrap_err(),
            pool.try_checkout_on(&stream, 0).unwrap_err(),
            pool.checkout_many(&none, None).unwrap_err(),
            block_on(pool.checkout_async(0)).unwrap_err(),
            block_on(pool.checkout_many_async(none)).unwrap_err(),
            on.device.alloc(0).unwrap_err(),
        ] {
            assert_eq!(error, Error::ZeroLength);
        }
        // A range of no bytes.
        for error in [
            memory.slice(5..5).unwrap_err(),
            stream.upload_blocking(&[], &memory).unwrap_err(),
            stream.upload_part(filled(&pool, b"five"), 2..2, &memory).unwrap_err().error,
            on.device.register(Vec::new()).unwrap_err().error,
            on.device.register_read_only(Vec::new()).unwrap_err().error,
            // SAFETY: refused.
            unsafe { on.device.raw_memory(memory.address(), 0, ()) }.unwrap_err().error,
        ] {
            assert!(matches!(&error, Error::Argument(text) if text.contains("nothing to copy")));
        }
        // A buffer without a written byte.
        let [one, two, three] = [100, 9, 9].map(|len| pool.checkout(len).unwrap());
        for error in [
            stream.upload(one, &memory).map(drop).unwrap_err().error,
            stream.copy_host(two, three).map(drop).unwrap_err().error,
        ] {
            let words = ["no byte of the buffer was written", "extend_from_slice"];
            assert!(matches!(&error, Error::Argument(text) if words.iter().all(|word| text.contains(word))));
        }
        assert_eq!((pool.stats().checked_out_bytes, pool.stats().waiting), (0, 0));
        pool.check().unwrap();
    });
}

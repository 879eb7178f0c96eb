//! Host memory: alignment and the segment rule in both run modes, zeros, what is registered.

use pinpool::{Backing, RegionInfo, Request};

use super::*;

/// How many bytes of a block a segment of that length must have, by the vendor's rule.
fn span(len: usize) -> usize {
    len.next_multiple_of(32) + 32
}

/// The simulation, too, looks whether each copy keeps to the rule.
#[test]
fn segments_keep_to_the_rule_in_both_modes() {
    on_each(&[TODAY, ON_DEVICE, OF_2024], |_| {
        let device = open(0);
        let (stream, memory) = (device.stream().unwrap(), device.alloc(200_000).unwrap());
        for extent in [64 << 10, 256 << 10, 1 << 20] {
            let built = Pool::builder(&device).capacity(4 << 20).region(1 << 20).extent(extent);
            let pool = built.build().unwrap();
            let (mut held, mut given): (Vec<PinnedBuf>, usize) = (Vec::new(), 0);
            for round in 0..96 {
                let len = [1 + round, 200 + round * 41 % 4800, 5000 + round * 7919 % 195_000][round % 3];
                let align = 64 << (round % 7);
                let mut buf = match pool.try_checkout(Request::new(len).align(align)) {
                    Ok(buf) => buf,
                    Err(Error::Exhausted(_) | Error::TooLong { .. }) => continue,
                    Err(error) => panic!("{error}"),
                };
                given += 1;
                let start = buf.as_ptr().addr();
                assert_eq!(start % align, 0);
                // Each extent is a block of the library's, and a region.
                let within = |region: &RegionInfo| {
                    let base = region.base.as_ptr().addr();
                    base % 4096 == 0
                        && region.len <= extent
                        && base <= start
                        && start + span(len) <= base + region.len
                };
                assert!(pool.regions().iter().any(within), "{len} bytes at {start:#x}");
                for other in &held {
                    let at = other.as_ptr().addr();
                    assert!(
                        start + span(len) <= at || at + span(other.len()) <= start,
                        "two segments overlap"
                    );
                }
                let sent = bytes(round, len);
                buf.extend_from_slice(&sent);
                let buf = stream.upload(buf, memory.slice(..len)).unwrap().wait().unwrap();
                let back = stream.download(memory.slice(..len), buf).unwrap().wait().unwrap();
                assert!(*back == sent);
                held.extend((round % 2 == 0).then_some(back));
            }
            assert!(given > 60, "{given} of 96 with extents of {extent} bytes");
            pool.check().unwrap();
        }
    });
}

#[test]
fn a_buffer_whose_zeros_cannot_be_written_is_back() {
    on_each(&[ON_DEVICE], |stand_in| {
        let pool = pool(&open(0), 256 << 10);
        assert_eq!(pool.checkout_zeroed(0).unwrap_err(), Error::ZeroLength);
        stand_in.fail("aclrtMemset", 1, 507_000, false);
        let error = pool.checkout_zeroed(100).unwrap_err().to_string();
        assert!(error.contains("aclrtMemset") && error.contains("507000"), "{error}");
        assert_eq!(pool.stats().checked_out_bytes, 0);
        // Pools of other devices have it, too.
        assert_eq!(*pool_on_host().checkout_zeroed(777).unwrap(), [0; 777]);
    });
}

#[test]
fn one_block_may_be_too_large_for_the_library() {
    on_each(&[TODAY, ON_DEVICE], |stand_in| {
        stand_in.command(&format!("host {} {}", 300 << 10, usize::MAX));
        let device = open(0);
        let built = |extent| Pool::builder(&device).capacity(1 << 20).extent(extent).build();
        let error = built(512 << 10).unwrap_err().to_string();
        assert!(error.contains("207001") && error.contains("PoolBuilder::extent"), "{error}");
        let pool = built(256 << 10).unwrap();
        pool.wait_pinned(Some(HANG)).unwrap();
        assert_eq!(pool.stats().pinned_bytes, 1 << 20);
    });
}

#[test]
fn registering_works_in_whole_pages() {
    on_each(&[TODAY], |stand_in| {
        let device = open(0);
        let (stream, memory) = (device.stream().unwrap(), device.alloc(3 * 4096).unwrap());
        let mut page = memmap2::MmapMut::map_anon(4 * 4096).unwrap();
        page.fill(3);
        // Values in the middle of pages; the slices live as long as the mapping, which is never unmapped.
        let all: &'static mut [u8] = &mut Box::leak(Box::new(page))[..];
        let (first, rest) = all.split_at_mut(4096 + 100);
        let (second, third) = rest.split_at_mut(2000);
        let (first, second, third): (&'static [u8], &'static [u8], &'static [u8]) = (first, second, third);
        let registered = device.register(first).unwrap();
        let refused = device.register(second).unwrap_err();
        assert!(refused.error.to_string().contains("page of 4096"), "{}", refused.error);
        assert_eq!(refused.buffer.unwrap(), second);
        // On a registered page in part, borrowed: copied all the same, both ways and with the edges inside.
        stream.upload_blocking(&third[..3 * 2048], memory.slice(..3 * 2048)).unwrap();
        stream.upload_blocking(second, memory.slice(..2000)).unwrap();
        drop(stream.upload(registered, memory.slice(..4196)).unwrap());
        stream.synchronize().unwrap();
        until("it is unregistered", || calls(stand_in, "aclrtHostUnregister") == 1);
        let registered = device.register(second).unwrap();
        let mut over = vec![0; 3 * 4096];
        stream.download_blocking(memory.slice(..), &mut over).unwrap();
        assert!(over[..4196] == *first);
        // What begins and ends within the registered value.
        stream.upload_blocking(&registered[10..1000], memory.slice(..990)).unwrap();
        // Read-only memory is refused before the library is called.
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        // SAFETY: no other code has the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let refused = device.register_read_only(map).unwrap_err();
        assert!(
            matches!(&refused.error, Error::Unsupported(text) if text.contains("written to")),
            "{}",
            refused.error
        );
        assert_eq!(refused.buffer.unwrap().len(), 8192);
    });
}

#[test]
fn what_cannot_be_registered_says_so() {
    on_each(&[TODAY, ON_DEVICE, OF_2024], |stand_in| {
        stand_in.command("registers false");
        let device = open(0);
        let says = |error: Error| {
            let text = error.to_string();
            assert!(matches!(error, Error::Unsupported(_)) && text.contains("Backing::HostAlloc"), "{text}");
        };
        says(Pool::builder(&device).backing(Backing::Registered).build().unwrap_err());
        let refused = device.register(vec![5_u8; 10_000]).unwrap_err();
        assert!(refused.buffer.unwrap() == [5; 10_000]);
        says(refused.error);
        let pool = pool(&device, 1 << 20);
        pool.trim(0);
        says(pool.adopt(vec![0; 100_000]).unwrap_err().error);
        says(Pool::builder(&device).backing(Backing::Managed).build().unwrap_err());
        assert_eq!(device.registered_bytes(), 0);
    });
}

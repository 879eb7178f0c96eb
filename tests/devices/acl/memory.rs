//! Host memory that is not the pool's own, or that the library does not give.

use pinpool::{Backing, PoolBuilder, Unpinned};

use super::*;

fn of_one(device: &Device) -> PoolBuilder {
    Pool::builder(device).capacity(1 << 20).region(1 << 20).extent(1 << 20)
}

#[test]
fn plain_memory_is_never_copied_from_asynchronously() {
    on_each(&npu::WAYS, |stand_in| {
        let device = open(0);
        let stream = device.stream().unwrap();
        let memory = device.alloc(100_000).unwrap();
        // The library has no page-locked memory left, however often the pool asks for it.
        for call in ["aclrtMallocHost", "aclrtHostRegister"] {
            (1..1000).for_each(|nth| stand_in.fail(call, nth, 207_001, false));
        }
        let refused = of_one(&device).build().unwrap_err().to_string();
        let whose = format!("{}: aclrtMallocHost", npu_name(0));
        for part in [&*whose, "ulimit -l", "memory.max", "PoolBuilder::extent"] {
            assert!(refused.contains(part), "{part} is not in: {refused}");
        }
        let pool = of_one(&device).unpinned(Unpinned::Allow).build().unwrap();
        assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (0, 1 << 20));
        for round in 0..8 {
            let sent = bytes(round, 100_000);
            let buf = filled(&pool, &sent);
            assert!(!buf.is_pinned());
            drop(stream.upload(buf, &memory).unwrap());
            let landing = pool.checkout_on(&stream, 100_000).unwrap();
            assert!(*stream.download(&memory, landing).unwrap().wait().unwrap() == sent);
            stream.upload_blocking(&sent[..777], memory.slice(100..877)).unwrap();
            let mut back = vec![0; 777];
            stream.download_blocking(memory.slice(100..877), &mut back).unwrap();
            assert!(back == sent[..777]);
        }
        assert_eq!(calls(stand_in, "aclrtMemcpyAsync"), 0);
        assert_eq!(calls(stand_in, "aclrtMemcpy"), 4 * 8);
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
        let all: &'static [u8] = &Box::leak(Box::new(page))[..];
        let ((first, rest), second) = (all.split_at(4096 + 100), &all[4196..6196]);
        let registered = device.register(first).unwrap();
        let refused = device.register(second).unwrap_err();
        assert!(refused.error.to_string().contains("page of 4096"), "{}", refused.error);
        assert_eq!(refused.buffer.unwrap(), second);
        // On a registered page in part, borrowed: copied all the same, with the edges inside.
        stream.upload_blocking(&rest[..3 * 2048], memory.slice(..3 * 2048)).unwrap();
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
        let map = memmap2::MmapMut::map_anon(8192).unwrap().make_read_only().unwrap();
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
        // The driver cannot, where the library could.
        (1..100).for_each(|nth| stand_in.fail("aclrtHostRegister", nth, 207_000, false));
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
        assert_eq!(device.stats().registered_bytes, 0);
    });
}

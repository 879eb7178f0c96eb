//! The suite's part about memory: copies between host memory, and memory by its address.

use super::*;

pub fn host_copies(on: &Subject) {
    let (pool, stream) = (on.pool(16 << 20), on.stream());
    let memory = on.alloc(70_000);
    for (round, len) in [1, 63, 4096, 65_537, (3 << 20) + 7].into_iter().enumerate() {
        let sent = bytes(round, len);
        let (from, to) = (filled(&pool, &sent), pool.checkout(len + 5).unwrap());
        let (from, to) = stream.copy_host(from, to).unwrap();
        assert!(*to.wait().unwrap() == *sent, "{len} bytes");
        assert!(*from.wait().unwrap() == *sent, "a copy leaves its source as it was");
    }
    for round in 0..10 {
        // In the stream's order: what is copied has only just been downloaded, and is uploaded next.
        let sent = bytes(round, 70_000);
        stream.upload_blocking(&sent, &memory).unwrap();
        let first = stream.download(&memory, pool.checkout(70_000).unwrap()).unwrap();
        let shared = Arc::new(filled(&pool, &bytes(round + 1, 70_000)));
        let landing = pool.checkout_on(&stream, 70_000).unwrap();
        let (from, to) = stream.copy_host(shared.clone(), landing).unwrap();
        drop(from);
        let to = to.wait().unwrap();
        assert!(first.is_done().unwrap(), "a later copy was done first");
        assert!(*to == bytes(round + 1, 70_000));
        assert!(*first.wait().unwrap() == *sent);
        // Dropped at once, and allocated again at once.
        let small = pool.checkout(10_000).unwrap();
        drop(stream.copy_host(shared, small).map(drop).unwrap_err());
        let (from, to) = (filled(&pool, &sent), pool.checkout(70_000).unwrap());
        drop(stream.copy_host(from, to).unwrap());
    }
    let sent = bytes(0, 100);
    let refused = stream.copy_host(filled(&pool, &sent), pool.checkout(99).unwrap()).unwrap_err();
    assert_eq!(refused.error, Error::TooSmall { need: 100, have: 99 });
    assert!(*refused.buffer.unwrap().0 == *sent);
    let landing = pool.checkout_on(&on.stream(), 100).unwrap();
    not_ready(&stream.copy_host(filled(&pool, &sent), landing).unwrap_err().error);
    stream.synchronize().unwrap();
    all_back(on, &pool);
    assert_eq!(pool.stats().quarantined_bytes, 0);
}

pub fn by_address(on: &Subject) {
    let (pool, stream) = (on.pool(8 << 20), on.stream());
    let memory = on.alloc(300_000);
    let (at, sent) = (memory.address(), bytes(1, 200_000));
    let owner = Arc::new(memory);
    let gone = Arc::downgrade(&owner);
    // SAFETY: the owner keeps it, and only this stream uses it.
    let raw = unsafe { on.device.raw_memory(at + 100_000, 200_000, owner) }.unwrap();
    assert_eq!((raw.len(), raw.address()), (200_000, at + 100_000));
    drop(stream.upload(filled(&pool, &sent), &raw).unwrap());
    drop(stream.copy(raw.slice(..50_000), raw.slice(50_000..100_000)).unwrap());
    let mut back = vec![0; 50_000];
    stream.download_blocking(raw.slice(50_000..100_000), &mut back).unwrap();
    assert!(back == sent[..50_000]);
    stream.upload_blocking(&[7; 10], raw.slice(10..20)).unwrap();
    // The last handle is dropped when the copy is complete; until then the copy holds the owner.
    let landing = pool.checkout(100_000).unwrap();
    let last = stream.download(raw.slice(100_000..).unwrap(), landing).unwrap();
    drop(raw);
    assert!(*last.wait().unwrap() == sent[100_000..]);
    until(on, "the owner is dropped", || gone.strong_count() == 0);
    let memory = on.alloc(1000);
    let refused = |address: u64, len: usize, word: &str| {
        // SAFETY: refused.
        match unsafe { on.device.raw_memory(address, len, "owner".to_owned()) } {
            Err(SubmitError { error: Error::Argument(text), buffer: Some(owner) }) => {
                assert!(text.contains(&format!("{len} bytes at address {address:#x}")), "{text}");
                assert!(text.contains(word) && owner == "owner", "{word:?} is not in: {text}");
            }
            wrong => panic!("{wrong:?}"),
        }
    };
    let at = memory.address();
    refused(at, 1001, &format!("starts at {at:#x} and has 1000 bytes, and the range leaves it by 1"));
    refused(at + 10, 1010, "leaves it by 20");
    refused(at + 10, usize::MAX, "leaves it by");
    refused(0, 1, "null");
    let local = [0_u8; 16];
    if on.tells_addresses() {
        refused(local.as_ptr() as u64, 16, "ordinary host memory");
    }
    let pinned = pool.checkout(16).unwrap();
    let kind = if pinned.is_pinned() { "page-locked host memory" } else { "ordinary host memory" };
    refused(pinned.as_ptr() as u64, 16, kind);
    refused(16, 16, "knows no memory there");
    assert_eq!(on.device.lost(), None);
}

//! Copies on streams: what arrives, in which order, and how long each side keeps its memory.

use super::*;

pub fn round_trips(on: &Subject) {
    let (pool, stream) = (on.pool(24 << 20), on.stream());
    let memory = on.alloc((5 << 20) + 8192);
    let sizes = [1, 2, 31, 32, 33, 63, 64, 65, 255, 1000, 4095, 4096, 4097, 65_537, 1 << 20, (5 << 20) + 7];
    for (i, len) in sizes.into_iter().enumerate() {
        for (j, offset) in [0, 1, 63, 4096, 4097].into_iter().enumerate() {
            let sent = bytes(i * 8 + j, len + j);
            let buf = filled(&pool, &sent);
            let flight = stream.upload_part(buf, j.., memory.slice(offset..offset + len)).unwrap();
            if i % 2 == 0 {
                let mut source = flight.wait().unwrap();
                assert!(*source == *sent, "an upload leaves its source as it was");
                source.fill(0xFF);
            }
            let landing = pool.checkout(len).unwrap();
            let back = stream.download(memory.slice(offset..offset + len), landing).unwrap().wait().unwrap();
            assert!(*back == sent[j..], "{len} bytes at {offset}");
        }
    }
}

pub fn bounds_are_kept(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let memory = on.alloc(10_000);
    drop(stream.upload(filled(&pool, &[1; 10_000]), &memory).unwrap());
    drop(stream.upload(filled(&pool, &[2; 333]), memory.slice(77..410)).unwrap());
    let mut expected = vec![1; 10_000];
    expected[77..410].fill(2);
    assert!(fetch(&pool, &stream, &memory) == expected);
    // On the host side, what lies behind a part stays as it was.
    let mut landing = filled(&pool, &[9; 5000]);
    landing.truncate(4999);
    let back = stream.download(memory.slice(0..100), landing).unwrap().wait().unwrap();
    assert!(*back == expected[..100], "the length is that of the copy");
}

pub fn stream_order(on: &Subject) {
    let (pool, stream) = (on.pool(8 << 20), on.stream());
    let (x, y) = (on.alloc(300_000), on.alloc(300_000));
    for round in 0..8 {
        let (a, b) = (bytes(round, 300_000), bytes(round + 100, 300_000));
        drop(stream.upload(filled(&pool, &a), &x).unwrap());
        drop(stream.copy(&x, &y).unwrap());
        drop(stream.upload(filled(&pool, &b), &x).unwrap());
        let first = stream.download(&y, pool.checkout(300_000).unwrap()).unwrap();
        let second = stream.download(&x, pool.checkout(300_000).unwrap()).unwrap();
        assert!(*second.wait().unwrap() == *b);
        assert!(first.is_done().unwrap(), "a later copy was done first");
        assert!(*first.wait().unwrap() == *a);
    }
}

pub fn holds(on: &Subject) {
    let (pool, stream) = (on.pool(8 << 20), on.stream());
    let memory = on.alloc(1 << 20);
    let sent = stream.upload(filled(&pool, &bytes(1, 1 << 20)), &memory).unwrap();
    let held = stream.hold(filled(&pool, b"held")).unwrap();
    assert!(*held.wait().unwrap() == *b"held");
    assert!(sent.is_done().unwrap(), "the hold was over before the copy");
}

pub fn memory_is_kept(on: &Subject) {
    let (pool, stream) = (on.pool(8 << 20), on.stream());
    let kept = on.alloc(50_000);
    for round in 0..30 {
        let memory = on.alloc(50_000);
        drop(stream.upload(filled(&pool, &bytes(round, 50_000)), &memory).unwrap());
        drop(stream.copy(&memory, &kept).unwrap());
        drop(memory);
        // The next allocation would get the same memory, were it freed.
        let other = on.alloc(50_000);
        stream.upload_blocking(&[0xEE; 50_000], &other).unwrap();
        assert!(fetch(&pool, &stream, &kept) == bytes(round, 50_000), "round {round}");
    }
    assert_eq!(on.device.lost(), None);
}

pub fn stream_ready(on: &Subject) {
    // Room for two, so that what is in flight must be claimed.
    let (pool, stream, other) = (on.pool(160 << 10), on.stream(), on.stream());
    let (from, to) = (on.alloc(60_000), on.alloc(60_000));
    for round in 0..50 {
        let sent = bytes(round, 60_000);
        drop(stream.upload(filled(&pool, &sent), &from).unwrap());
        drop(stream.copy(&from, &to).unwrap());
        let landing = pool.checkout_on(&stream, 60_000).unwrap();
        let refused = other.download(&to, landing).unwrap_err();
        not_ready(&refused.error);
        let landing = refused.buffer.unwrap();
        assert!(*stream.download(&to, landing).unwrap().wait().unwrap() == *sent);
        drop(pool.checkout_on(&stream, 60_000).unwrap());
        assert_eq!(pool.checkout_on(&stream, 60_000).unwrap().wait().unwrap().len(), 0);
    }
    pool.check().unwrap();
}

pub fn blocking(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let memory = on.alloc(100_001);
    let sent = bytes(5, 100_001);
    // Unpinned, at odd addresses.
    stream.upload_blocking(&sent[1..], memory.slice(..100_000)).unwrap();
    let mut back = vec![0; 100_001];
    stream.download_blocking(memory.slice(..100_000), &mut back[1..]).unwrap();
    assert!(back[1..] == sent[1..]);
    // In the stream's order.
    drop(stream.upload(filled(&pool, &sent), &memory).unwrap());
    stream.download_blocking(&memory, &mut back).unwrap();
    assert!(back == sent);
    stream.upload_blocking(&[7; 50], memory.slice(50..100)).unwrap();
    assert!(fetch(&pool, &stream, &memory)[50..100] == [7; 50]);
    let error = stream.download_blocking(&memory, &mut [0; 10]);
    assert_eq!(error, Err(Error::TooSmall { need: 100_001, have: 10 }));
}

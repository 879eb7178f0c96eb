//! Many pieces by a copier, on every device: each byte in its place, borrowed or owned, and what is refused.

use pinpool::Copier;
use pinpool::copier::CopyRange;

use super::waiting::block_on_with;
use super::*;

pub(super) const HANG: Duration = Duration::from_secs(20);

/// All of a pool is back, though the thread that completes copies may need a little longer.
pub(super) fn all_back(on: &Subject, pool: &Pool) {
    let since = std::time::Instant::now();
    loop {
        let stats = pool.stats();
        if (stats.in_flight_bytes, stats.checked_out_bytes) == (0, 0) {
            break;
        }
        assert!(since.elapsed() < HANG, "{stats:?}");
        on.pump();
    }
    pool.check().unwrap();
}

pub(super) fn read(on: &Subject, pool: &Pool, memory: &DeviceSlice) -> Vec<u8> {
    fetch(pool, &on.stream(), memory)
}

/// Makes a device and a copier that do not move by themselves do a step.
fn pump(on: &Subject, copier: &Copier) {
    on.pump();
    copier.reap();
}

/// What is wrong with a piece of this number.
fn at_fault(error: &Error, number: usize) -> Error {
    match error {
        Error::Piece { piece, cause, .. } if *piece == number => Error::clone(cause),
        other => panic!("not of piece {number}: {other}"),
    }
}

/// With the device ring, where there is one, and without.
pub(super) fn copiers(on: &Subject, capacity: usize, test: impl Fn(&Pool, Copier)) {
    for ring in [64 << 20, 0] {
        let pool = on.pool(capacity);
        test(&pool, Copier::builder(&pool, &on.device).threads(3).ring(ring).build().unwrap());
        all_back(on, &pool);
    }
}

pub(super) fn pieces(on: &Subject) {
    copiers(on, 2 << 20, |pool, copier| {
        let (memory, other) = (on.alloc(1 << 20), on.alloc(64 << 10));
        // Neighbours, gaps, long and short ones, in no order, and one of no bytes.
        let lens = [1, 31, 64, 65, 700, 4096, 9000, 100_001];
        let (mut at, mut ranges) = (0, Vec::new());
        for i in 0..90 {
            let len = lens[i * 5 % lens.len()];
            if at + len > 900_000 {
                break;
            }
            ranges.push((at, len));
            at += len + if i % 3 == 0 { 17 } else { 0 };
        }
        ranges.reverse();
        let sources: Vec<Vec<u8>> = ranges.iter().enumerate().map(|(i, (_, len))| bytes(i, *len)).collect();
        let target = |(at, len): (usize, usize)| memory.slice(at..at + len).unwrap();
        let mut pieces: Vec<(&[u8], DeviceSlice)> =
            sources.iter().zip(&ranges).map(|(bytes, range)| (&bytes[..], target(*range))).collect();
        pieces.push((&[], other.slice(..1).unwrap()));
        pieces.push((&sources[0], other.slice(5..5 + sources[0].len()).unwrap()));
        on.stream().upload_blocking(&[9; 1 << 20], &memory).unwrap();
        copier.upload_slices(&pieces).unwrap();
        let mut all = vec![9; 1 << 20];
        for (source, (at, len)) in sources.iter().zip(&ranges) {
            all[*at..at + len].copy_from_slice(source);
        }
        assert!(read(on, pool, &memory) == all, "and nothing beside the pieces");
        assert!(read(on, pool, &other)[5..5 + sources[0].len()] == sources[0]);
        // And back, into memory of any kind.
        let mut back: Vec<Vec<u8>> = ranges.iter().map(|(_, len)| vec![0; *len]).collect();
        let mut targets: Vec<(DeviceSlice, &mut [u8])> =
            back.iter_mut().zip(&ranges).map(|(bytes, range)| (target(*range), &mut bytes[..])).collect();
        copier.download_slices(&mut targets).unwrap();
        assert!(back == sources);
        // Owned bytes to the same places: dropped, awaited, asked. The dropped one may still be on its way, and transfers
        // are not ordered: to memory of its own.
        let elsewhere = on.alloc(1 << 20);
        let all = sources.concat();
        let places = |memory: &DeviceSlice| {
            let mut from = 0;
            let place = |(at, len): &(usize, usize)| {
                let range = CopyRange::new(from as u64, memory.slice(*at..at + len).unwrap());
                from += len;
                range
            };
            ranges.iter().map(place).collect::<Vec<_>>()
        };
        drop(copier.upload(all.clone(), places(&elsewhere)).unwrap());
        block_on_with(|| pump(on, &copier), copier.upload(all.clone(), places(&memory)).unwrap()).unwrap();
        let sent = copier.upload(all.clone(), places(&memory)).unwrap();
        assert_eq!(sent.progress().total, all.len() as u64);
        while !sent.is_over() {
            pump(on, &copier);
        }
        assert_eq!(sent.progress().landed_to, all.len() as u64);
        drop(sent);
        // After a stream's work, and before it.
        let stream = on.stream();
        drop(stream.upload(filled(pool, &[5; 1000]), memory.slice(..1000)).unwrap());
        copier.wait_for(&stream).unwrap();
        let sent = copier.upload(vec![6; 1000], memory.slice(..1000)).unwrap();
        sent.order(&stream).unwrap();
        let back = stream.download(memory.slice(..1000), pool.checkout(1000).unwrap()).unwrap();
        assert!(*back.wait().unwrap() == [6; 1000]);
        drop(sent);
        // Refused, and nothing was copied.
        let error = copier.upload_slices(&[(&sources[0], other.slice(..3).unwrap())]).unwrap_err();
        assert!(matches!(at_fault(&error, 0), Error::TooSmall { have: 3, .. }), "{error}");
        let error = copier.download_slices(&mut [(target((0, 8)), &mut [0; 7][..])]).unwrap_err();
        assert_eq!(error.to_string(), "piece 0 (8 bytes of device memory): 8 bytes do not fit into 7");
        if let Some(wrong) = &on.other {
            let wrong = DeviceSlice::from(&wrong.alloc(10).unwrap());
            let error = copier.upload_slices(&[(&[1; 10], wrong.clone())]).unwrap_err();
            mismatch(&at_fault(&error, 0));
            let error = copier.download_slices(&mut [(wrong, &mut [0; 10][..])]).unwrap_err();
            mismatch(&at_fault(&error, 0));
        }
        assert!(read(on, pool, &other)[5..5 + sources[0].len()] == sources[0]);
    });
}

pub(super) fn blocks(on: &Subject) {
    copiers(on, 2 << 20, |pool, copier| {
        let (memory, other) = (on.alloc(1 << 20), on.alloc(64 << 10));
        // Pinned blocks come back.
        let bufs = || -> Vec<(PinnedBuf, DeviceSlice)> {
            let apart = (0..200).map(|i| {
                let len = 100 + i * 13;
                (filled(pool, &bytes(i, len)), memory.slice(i * 4000..i * 4000 + len).unwrap())
            });
            let neighbours =
                (0..50).map(|i| (filled(pool, &bytes(i, 64)), other.slice(i * 64..i * 64 + 64).unwrap()));
            apart.chain(neighbours).collect()
        };
        let came = copier.upload_pages(bufs()).unwrap().wait().unwrap();
        assert_eq!(came.len(), 250);
        for (i, buf) in came.iter().enumerate() {
            let sent = if i < 200 { bytes(i, 100 + i * 13) } else { bytes(i - 200, 64) };
            assert!(**buf == *sent, "piece {i}");
        }
        drop(came);
        let landings = |n: usize| -> Vec<(DeviceSlice, PinnedBuf)> {
            (0..n)
                .map(|i| {
                    let len = 100 + i * 13;
                    (memory.slice(i * 4000..i * 4000 + len).unwrap(), pool.checkout(len).unwrap())
                })
                .collect()
        };
        let came =
            block_on_with(|| pump(on, &copier), copier.download_pages(landings(200)).unwrap()).unwrap();
        for (i, buf) in came.iter().enumerate() {
            assert!(**buf == *bytes(i, 100 + i * 13), "piece {i}");
        }
        drop(came);
        let neighbours = read(on, pool, &other);
        assert!(neighbours[..50 * 64].chunks(64).enumerate().all(|(i, part)| *part == *bytes(i, 64)));
        // Blocks of many places, one behind the other.
        const PAGE: usize = 50;
        const PAGES: usize = 40;
        let at = |block: usize, page: usize| block * 64 + page * 20_000;
        let pages = |block: usize| -> Vec<DeviceSlice> {
            (0..PAGES).map(|page| memory.slice(at(block, page)..at(block, page) + PAGE).unwrap()).collect()
        };
        let sent: Vec<_> = (0..9).map(|block| bytes(block, PAGES * PAGE)).collect();
        let up = sent.iter().enumerate().map(|(block, sent)| (filled(pool, sent), pages(block))).collect();
        drop(copier.upload_pages(up).unwrap().wait().unwrap());
        let down = (0..9).map(|block| (pages(block), pool.checkout(PAGES * PAGE).unwrap())).collect();
        let came = copier.download_pages(down).unwrap().wait().unwrap();
        assert!(came.iter().zip(&sent).all(|(buf, sent)| **buf == **sent));
        drop(came);
        let all = read(on, pool, &memory);
        for (block, sent) in sent.iter().enumerate() {
            for (page, sent) in sent.chunks(PAGE).enumerate() {
                assert!(all[at(block, page)..][..PAGE] == *sent, "page {page} of block {block}");
            }
        }
        // Long ones, and values of the program's own where the device takes them.
        let sent: Vec<_> = (0..3).map(|i| bytes(i, 70_000)).collect();
        let place = |i: usize| memory.slice(i * 70_001..i * 70_001 + 70_000).unwrap();
        let long = sent.iter().enumerate().map(|(i, sent)| (filled(pool, sent), place(i))).collect();
        drop(copier.upload_pages(long).unwrap());
        let stream = on.stream();
        // Of one moment: a buffer that goes from one sum to the other is in neither of two.
        let out = |stats: pinpool::PoolStats| stats.in_flight_bytes + stats.checked_out_bytes;
        while out(pool.stats()) > 0 {
            pump(on, &copier);
        }
        for (i, sent) in sent.iter().enumerate() {
            let back = stream.download(place(i), pool.checkout(70_000).unwrap()).unwrap().wait().unwrap();
            assert!(*back == **sent, "long piece {i}");
        }
        match on.device.register(vec![0; 70_000].into_boxed_slice()) {
            Ok(value) => {
                let came = copier.download_pages(vec![(place(1), value)]).unwrap().wait().unwrap();
                assert!(*came[0] == *sent[1]);
            }
            Err(error) => assert!(on.cannot(&error.error), "{}", error.error),
        }
        // Refused: everything comes back, and nothing was copied.
        let before = copier.stats().chunks;
        let mut wrong = bufs();
        wrong.push((pool.checkout(10).unwrap(), other.slice(..10).unwrap()));
        let refused = copier.upload_pages(wrong).unwrap_err();
        argument(&at_fault(&refused.error, 250), "no byte of the buffer was written");
        assert_eq!(refused.buffer.map(|pieces| pieces.len()), Some(251));
        let mut short = landings(5);
        short[3].1 = pool.checkout(7).unwrap();
        let refused = copier.download_pages(short).unwrap_err();
        assert!(matches!(at_fault(&refused.error, 3), Error::TooSmall { have: 7, .. }), "{}", refused.error);
        assert_eq!(refused.buffer.map(|pieces| pieces.len()), Some(5));
        let ready = vec![(place(0), pool.checkout_on(&stream, 70_000).unwrap())];
        let refused = copier.download_pages(ready).unwrap_err();
        not_ready(&at_fault(&refused.error, 0));
        if let Some(wrong) = &on.other {
            let wrong = wrong.alloc(10).unwrap();
            let refused =
                copier.upload_pages(vec![(filled(pool, &[1; 10]), DeviceSlice::from(&wrong))]).unwrap_err();
            mismatch(&at_fault(&refused.error, 0));
            assert_eq!(refused.buffer.map(|pieces| pieces[0].0.to_vec()), Some(vec![1; 10]));
        }
        assert_eq!(copier.stats().chunks, before);
    });
}

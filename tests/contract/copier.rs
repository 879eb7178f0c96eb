//! Many pieces by a copier, on every device: each byte in its place, borrowed or owned, and what is refused.

use pinpool::Copier;
use pinpool::copier::CopyRange;

use super::*;

/// With the device ring, where there is one, and without.
pub(super) fn copiers(on: &Subject, capacity: usize, test: impl Fn(&Pool, Copier)) {
    for ring in [64 << 20, 0] {
        let pool = on.pool(capacity);
        test(&pool, Copier::builder(&pool, &on.device).threads(3).ring(ring).build().unwrap());
        all_back(on, &pool);
    }
}

/// What is wrong with a piece of this number.
fn at_fault(error: &Error, number: usize) -> Error {
    match error {
        Error::Piece { piece, cause, .. } if *piece == number => Error::clone(cause),
        other => panic!("not of piece {number}: {other}"),
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
        let there = || fetch(pool, &on.stream(), &memory);
        assert!(there() == all, "and nothing beside the pieces");
        assert!(fetch(pool, &on.stream(), &other)[5..5 + sources[0].len()] == sources[0]);
        // And back, into memory of any kind.
        let mut back: Vec<Vec<u8>> = ranges.iter().map(|(_, len)| vec![0; *len]).collect();
        let mut targets: Vec<(DeviceSlice, &mut [u8])> =
            back.iter_mut().zip(&ranges).map(|(bytes, range)| (target(*range), &mut bytes[..])).collect();
        copier.download_slices(&mut targets).unwrap();
        assert!(back == sources);
        // Owned bytes to the same places.
        on.stream().upload_blocking(&[9; 1 << 20], &memory).unwrap();
        let mut from = 0;
        let place = |(at, len): &(usize, usize)| {
            from += len;
            CopyRange::new((from - len) as u64, target((*at, *len)))
        };
        let sent = copier.upload(sources.concat(), ranges.iter().map(place).collect::<Vec<_>>()).unwrap();
        assert_eq!(sent.progress().total, sources.concat().len() as u64);
        until(on, "it has landed", || {
            copier.reap();
            sent.is_over()
        });
        assert_eq!(sent.progress().landed_to, sent.progress().total);
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
        assert!(there() == all);
    });
}

/// Pinned blocks come back.
pub(super) fn blocks(on: &Subject) {
    copiers(on, 2 << 20, |pool, copier| {
        let (memory, other) = (on.alloc(1 << 20), on.alloc(64 << 10));
        let (len, place) =
            (|i: usize| 100 + i * 13, |i: usize| memory.slice(i * 4000..i * 4013 + 100).unwrap());
        let apart = (0..200).map(|i| (filled(pool, &bytes(i, len(i))), place(i)));
        let next = |i: usize| other.slice(i * 64..i * 64 + 64).unwrap();
        let neighbours = (0..50).map(|i| (filled(pool, &bytes(i, 64)), next(i)));
        let came = copier.upload_pages(apart.chain(neighbours).collect()).unwrap().wait().unwrap();
        for (i, buf) in came.iter().enumerate() {
            let sent = if i < 200 { bytes(i, len(i)) } else { bytes(i - 200, 64) };
            assert!(**buf == *sent, "piece {i}");
        }
        assert_eq!(came.len(), 250);
        drop(came);
        let landings = (0..200).map(|i| (place(i), pool.checkout(len(i)).unwrap()));
        let came = copier.download_pages(landings.collect()).unwrap().wait().unwrap();
        assert!(came.iter().enumerate().all(|(i, buf)| **buf == *bytes(i, len(i))));
        drop(came);
        let neighbours = fetch(pool, &on.stream(), &other);
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
        let all = fetch(pool, &on.stream(), &memory);
        for (block, sent) in sent.iter().enumerate() {
            for (page, sent) in sent.chunks(PAGE).enumerate() {
                assert!(all[at(block, page)..][..PAGE] == *sent, "page {page} of block {block}");
            }
        }
        // Places in several allocations by turns, whose handles are dropped while the copies run.
        let all = [(); 3].map(|()| on.alloc(20 * PAGE));
        let ranges = (0..60).map(|n| (n % 3, n / 3 * PAGE));
        let places: Vec<_> = ranges.map(|(of, at)| all[of].slice(at..at + PAGE).unwrap()).collect();
        let sent = bytes(77, 60 * PAGE);
        let up = copier.upload_pages(vec![(filled(pool, &sent), places.clone())]).unwrap();
        drop(all);
        drop(up.wait().unwrap());
        let down = vec![(places, pool.checkout(sent.len()).unwrap())];
        assert!(*copier.download_pages(down).unwrap().wait().unwrap()[0] == *sent);
        // A long one whose handle is dropped, and a value of the program's own where the device takes it.
        let (sent, long) = (bytes(1, 70_000), memory.slice(7..70_007).unwrap());
        drop(copier.upload_pages(vec![(filled(pool, &sent), long.clone())]).unwrap());
        until(on, "it has landed", || {
            copier.reap();
            in_use(pool) == 0
        });
        assert!(fetch(pool, &on.stream(), &DeviceSlice::from(&long)) == sent);
        match on.device.register(vec![3; 70_009].into_boxed_slice()) {
            Ok(value) => {
                let came = copier.download_pages(vec![(long, value)]).unwrap().wait().unwrap();
                assert!(came[0][..70_000] == *sent && came[0][70_000..] == [3; 9]);
            }
            Err(error) => assert!(on.cannot(&error.error), "{}", error.error),
        }
        // Refused: everything comes back, and nothing was copied.
        let before = copier.stats().chunks;
        let mut wrong: Vec<_> = (0..5).map(|i| (filled(pool, &bytes(i, len(i))), place(i))).collect();
        wrong.push((pool.checkout(10).unwrap(), other.slice(..10).unwrap()));
        let refused = copier.upload_pages(wrong).unwrap_err();
        argument(&at_fault(&refused.error, 5), "no byte of the buffer was written");
        let back = refused.buffer.unwrap();
        assert!(
            back.len() == 6 && back[..5].iter().enumerate().all(|(i, (buf, _))| **buf == *bytes(i, len(i)))
        );
        let landing = |i: usize| (place(i), pool.checkout(if i == 3 { 7 } else { len(i) }).unwrap());
        let refused = copier.download_pages((0..5).map(landing).collect()).unwrap_err();
        assert!(matches!(at_fault(&refused.error, 3), Error::TooSmall { have: 7, .. }), "{}", refused.error);
        assert_eq!(refused.buffer.map(|pieces| pieces.len()), Some(5));
        let ready = vec![(place(0), pool.checkout_on(&on.stream(), len(0)).unwrap())];
        not_ready(&at_fault(&copier.download_pages(ready).unwrap_err().error, 0));
        if let Some(wrong) = &on.other {
            let wrong = DeviceSlice::from(&wrong.alloc(10).unwrap());
            let refused = copier.upload_pages(vec![(filled(pool, &[1; 10]), wrong)]).unwrap_err();
            mismatch(&at_fault(&refused.error, 0));
            assert_eq!(refused.buffer.map(|pieces| pieces[0].0.to_vec()), Some(vec![1; 10]));
        }
        assert_eq!(copier.stats().chunks, before);
    });
}

//! Many pieces by a copier, on every device: each byte in its place, borrowed or owned, and what is refused.

use pinpool::Copier;
use pinpool::copier::CopyRange;

use super::*;
use crate::support::Random;

/// With the device ring, where there is one, and without. (The simulations and the host get short chunks, to have many.)
pub(super) fn copiers(on: &Subject, capacity: usize, test: impl Fn(&Pool, Copier)) {
    let chunk = if on.is_real() { 1 << 20 } else { 128 << 10 };
    for ring in [64 << 20, 0] {
        let pool = on.pool(capacity);
        test(&pool, Copier::builder(&pool, &on.device).threads(3).chunk(chunk).ring(ring).build().unwrap());
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

/// Random pieces in no order, as borrowed slices, owned bytes and pinned blocks of pages, one of which is longer than a
/// chunk: each is in its place, both ways, and nothing beside them is touched.
pub(super) fn pieces(on: &Subject) {
    // What has no kernels of its own to get wrong needs few.
    let (room, most, lengths) = match on.is_real() {
        true => (24 << 20, 8000, &[200, 1024, 5000, 40_000, 300_000][..]),
        false => (1 << 20, 300, &[1000, 100_000][..]),
    };
    copiers(on, 4 * room, |pool, copier| {
        let (memory, mut random) = (on.alloc(room), Random::new(7));
        let there = || {
            let mut all = vec![0; room];
            on.stream().download_blocking(&memory, &mut all).unwrap();
            all
        };
        for &longest in lengths {
            let (mut places, mut end) = (Vec::new(), random.below(64));
            while places.len() < most {
                let len = 1 + random.below(longest);
                if end + len > room {
                    break;
                }
                places.push((end, len));
                // Neighbours now and then.
                end += len + if random.one_in(4) { 0 } else { random.below(200) };
            }
            (1..places.len()).rev().for_each(|i| places.swap(i, random.below(i + 1)));
            let mut model = vec![0xEE; room];
            on.stream().upload_blocking(&model, &memory).unwrap();
            let place = |&(at, len): &(usize, usize)| memory.slice(at..at + len).unwrap();
            let mut expect = |places: &[(usize, usize)], mut sent: &[u8], how: &str| {
                for (at, len) in places {
                    let (piece, rest) = sent.split_at(*len);
                    model[*at..at + len].copy_from_slice(piece);
                    sent = rest;
                }
                assert!(there() == model, "{how}, at most {longest} bytes");
            };
            let sent: Vec<Vec<u8>> = places.iter().map(|(at, len)| bytes(*at, *len)).collect();
            let mut pieces: Vec<_> =
                sent.iter().map(|bytes| &bytes[..]).zip(places.iter().map(place)).collect();
            pieces.push((&[], memory.slice(..1).unwrap()));
            copier.upload_slices(&pieces).unwrap();
            expect(&places, &sent.concat(), "borrowed");
            let mut back: Vec<Vec<u8>> = places.iter().map(|(_, len)| vec![0x11; len + 3]).collect();
            let targets = back.iter_mut().map(|bytes| &mut bytes[..]);
            copier.download_slices(&mut places.iter().map(place).zip(targets).collect::<Vec<_>>()).unwrap();
            assert!(back.iter().zip(&sent).all(|(back, sent)| *back == [&sent[..], &[0x11; 3]].concat()));
            let all = bytes(longest, sent.concat().len());
            let mut from = 0;
            let range = |of: &(usize, usize)| {
                from += of.1;
                CopyRange::new((from - of.1) as u64, place(of))
            };
            let up = copier.upload(all.clone(), places.iter().map(range).collect::<Vec<_>>()).unwrap();
            assert_eq!(up.progress().total, all.len() as u64);
            until(on, "it has landed", || {
                copier.reap();
                up.is_over()
            });
            assert_eq!(up.progress().landed_to, up.progress().total);
            expect(&places, &all, "owned");
            // The first half in blocks of 37 places, the second in one. They come back as they were.
            let (short, long) = places.split_at(places.len() / 2);
            let blocks: Vec<&[(usize, usize)]> = short.chunks(37).chain([long]).collect();
            let slices = |n: usize| blocks[n].iter().map(place).collect::<Vec<_>>();
            let content = |n: usize| bytes(n, blocks[n].iter().map(|(_, len)| len).sum());
            let up = (0..blocks.len()).map(|n| (filled(pool, &content(n)), slices(n))).collect();
            let came = copier.upload_pages(up).unwrap().wait().unwrap();
            assert!(came.iter().enumerate().all(|(n, buf)| **buf == *content(n)));
            drop(came);
            expect(&places, &(0..blocks.len()).flat_map(content).collect::<Vec<_>>(), "blocks");
            let landing = |n: usize| (slices(n), pool.checkout(content(n).len() + 5).unwrap());
            let down =
                copier.download_pages((0..blocks.len()).map(landing).collect()).unwrap().wait().unwrap();
            assert!(down.iter().enumerate().all(|(n, buf)| **buf == *content(n)));
        }
    });
}

/// Blocks whose memory or handle is dropped, values as blocks, and pieces and blocks that are refused.
pub(super) fn blocks(on: &Subject) {
    copiers(on, 2 << 20, |pool, copier| {
        let (memory, other) = (on.alloc(1 << 20), on.alloc(64 << 10));
        let (len, place) =
            (|i: usize| 100 + i * 13, |i: usize| memory.slice(i * 4000..i * 4013 + 100).unwrap());
        const PAGE: usize = 50;
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
        let before = (copier.stats().chunks, fetch(pool, &on.stream(), &memory));
        let error = copier.upload_slices(&[(&[1; 8][..], memory.slice(..3).unwrap())]).unwrap_err();
        assert!(matches!(at_fault(&error, 0), Error::TooSmall { have: 3, .. }), "{error}");
        let short = (memory.slice(..8).unwrap(), &mut [0; 7][..]);
        let error = copier.download_slices(&mut [short]).unwrap_err();
        assert_eq!(error.to_string(), "piece 0 (8 bytes of device memory): 8 bytes do not fit into 7");
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
            let error = copier.upload_slices(&[(&[1; 10], wrong.clone())]).unwrap_err();
            mismatch(&at_fault(&error, 0));
            let error = copier.download_slices(&mut [(wrong.clone(), &mut [0; 10][..])]).unwrap_err();
            mismatch(&at_fault(&error, 0));
            let refused = copier.upload_pages(vec![(filled(pool, &[1; 10]), wrong)]).unwrap_err();
            mismatch(&at_fault(&refused.error, 0));
            assert_eq!(refused.buffer.map(|pieces| pieces[0].0.to_vec()), Some(vec![1; 10]));
        }
        assert!((copier.stats().chunks, fetch(pool, &on.stream(), &memory)) == before);
    });
}

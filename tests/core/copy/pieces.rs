//! Borrowed bytes and pinned blocks moved by a copier's threads: where copies fail or the device dies
//! half-way, beside others, and where what is copied changes meanwhile.

#![allow(unsafe_code, reason = "a promise about a value of its own")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pinpool::copier::Transfer;
use pinpool::host::{Call, Failure, HostConfig};
use pinpool::{DeviceSlice, Error, ErrorClass, PinnedBuf, Result, SubmitError};

use super::setup::{HANG, Setup, late, until};
use crate::support::{bytes, downloaded, own_process, process};

const THREADS: usize = 4;

fn setup(config: HostConfig, capacity: usize) -> Setup {
    Setup::new(config, capacity, |copier| copier.threads(THREADS))
}

fn is_argument(error: &Error, word: &str) {
    assert!(matches!(error, Error::Argument(text) if text.contains(word)), "{error}");
}

/// Callers share the copier's threads: no more of them than the settings say, none before the first transfer, and none
/// after the copier is dropped.
#[test]
fn callers_share_the_threads() {
    own_process!();
    let threads = || process::threads("pinpool-copy-").len();
    let s = setup(HostConfig::new(), 8 << 20);
    assert_eq!(threads(), 0, "before anything is copied");
    std::thread::scope(|scope| {
        for caller in 0..3 {
            let s = &s;
            scope.spawn(move || {
                let (sent, place) =
                    (bytes(caller, 3 << 20), caller * (10 << 20)..caller * (10 << 20) + (3 << 20));
                for _ in 0..3 {
                    s.copier.upload_slice(&sent, s.memory.slice(place.clone())).unwrap();
                    assert!(downloaded(&s.copier, s.memory.slice(place.clone())) == sent);
                    assert_eq!(threads(), THREADS + 1);
                }
            });
        }
    });
    s.all_is_back();
    drop(s.copier);
    until("the threads end with their copier", || threads() == 0);
}

/// Pinned blocks for these places, each `LEN` bytes, numbered.
fn pinned(s: &Setup, places: impl Iterator<Item = usize>) -> Vec<(PinnedBuf, DeviceSlice)> {
    let block = |(i, at): (usize, usize)| (s.filled(&bytes(i, LEN)), s.memory.slice(at..at + LEN).unwrap());
    places.enumerate().map(block).collect()
}

const LEN: usize = 8 << 10;

/// One copy of a download fails: the call or the handle says so, all blocks return, and nothing is lost. (Uploads are
/// in `devices`, `cuda::copier::every_call_of_pieces_fails_once`.)
#[test]
fn a_download_fails() {
    let s = setup(late(100), 24 << 20);
    let (sent, place) = (bytes(7, 3 << 20), s.memory.slice(8 << 20..11 << 20).unwrap());
    let blocks = || pinned(&s, (0..100).map(|i| i * (LEN + 64)));
    s.copier.upload_slice(&sent, &place).unwrap();
    drop(s.copier.upload_pages(blocks()).unwrap().wait().unwrap());
    let lent = || {
        let mut back = vec![0; 3 << 20];
        s.copier.download_slice(&place, &mut back)?;
        assert!(back == sent);
        Ok(())
    };
    let pages = || {
        let landings = blocks().into_iter().map(|(mut landing, place)| {
            landing.fill(0xEE);
            (place, landing)
        });
        let came = s.copier.download_pages(landings.collect()).unwrap().wait();
        let came = came.map_err(|failed| failed.error)?;
        assert!(came.len() == 100 && came.iter().enumerate().all(|(i, buf)| **buf == *bytes(i, LEN)));
        Ok(())
    };
    for call in [&lent as &dyn Fn() -> Result<()>, &pages] {
        for (nth, failure, due) in [
            (0, Failure::Argument, ErrorClass::Argument),
            (3, Failure::Transient, ErrorClass::Transient),
            (3, Failure::RunsAnyway, ErrorClass::Transient),
        ] {
            s.fail(Call::Copy, nth, failure);
            let error = call().unwrap_err();
            assert_eq!(error.class(), due, "{failure:?}: {error}");
            assert!(s.calm());
            call().unwrap();
        }
    }
}

/// A device that dies may still read blocks and write to them, so none of those in flight there is used
/// again, whether the handle waits or was dropped.
#[test]
fn blocks_in_flight_on_a_dead_device_never_come_back() {
    for (up, waits) in [(true, true), (false, true), (true, false)] {
        let s = setup(HostConfig::new(), 24 << 20);
        s.node.hang(0);
        let blocks = pinned(&s, (0..20).map(|i| i * LEN));
        let granted = s.pool.stats().granted_bytes;
        let sent = match up {
            true => s.copier.upload_pages(blocks).unwrap(),
            false => s
                .copier
                .download_pages(blocks.into_iter().map(|(buf, place)| (place, buf)).collect())
                .unwrap(),
        };
        until("all are in flight", || s.pool.stats().in_flight_bytes >= granted);
        s.node.kill(0);
        match waits {
            true => assert!(sent.wait().unwrap_err().error.is_device_lost()),
            false => drop(sent),
        }
        until("none is in flight", || s.pool.stats().in_flight_bytes == 0);
        assert!(s.pool.stats().quarantined_bytes >= granted, "{:?}", s.pool.stats());
        s.pool.check().unwrap();
    }
}

/// More calls fail than there are attempts to record an event, while nothing is copied: the stream of the
/// next copies is given up with them, on a device that is alive.
fn no_event_is_recorded(s: &Setup) {
    s.loses.store(true, Ordering::Relaxed);
    s.node.hang(0);
    (0..2000).for_each(|nth| s.fail(Call::Record, nth, Failure::Argument));
}

/// Waits until the transfer has ended with the error of its events.
fn is_given_up<T>(s: &Setup, sent: Transfer<T>) {
    until("the stream is given up", || {
        s.device.reap();
        sent.is_over()
    });
    assert!(sent.wait().is_err_and(|failed| failed.error.class() == ErrorClass::Argument));
}

/// A stream that is lost takes with it the blocks of the chunks that are in flight there, and no others of the call.
#[test]
fn a_lost_stream_keeps_the_blocks_of_its_chunks_alone() {
    const BLOCK: usize = 1 << 20;
    let s = Setup::new(HostConfig::new(), 64 << 20, |copier| copier.chunk(BLOCK).depth(1));
    let block = |n: usize| (s.filled(&vec![7; BLOCK]), s.memory.slice(n * BLOCK..(n + 1) * BLOCK).unwrap());
    let blocks: Vec<_> = (0..24).map(block).collect();
    no_event_is_recorded(&s);
    is_given_up(&s, s.copier.upload_pages(blocks).unwrap());
    let stats = s.pool.stats();
    s.pool.check().unwrap();
    assert!(stats.quarantined_bytes > 0 && stats.quarantined_bytes < 12 * BLOCK, "{stats:?}");
    assert_eq!((stats.in_flight_bytes, stats.checked_out_bytes), (0, 0), "{stats:?}");
    s.node.resume(0);
}

/// Places at even distances: as one handle, and in lists beside others.
#[test]
fn pages_at_even_distances() {
    const PAGE: usize = 24;
    const PLANE: usize = 5 * PAGE;
    let s = setup(HostConfig::new(), 8 << 20);
    let cache = s.device.alloc(64 * PLANE).unwrap();
    let mut model = vec![0; 64 * PLANE];
    s.copier.upload_slice(&model, &cache).unwrap();
    // Two blocks: all planes of one, and of the other one some planes, then two pages side by side.
    let all = cache.strided(PAGE..2 * PAGE, PLANE, 64).unwrap();
    let some = cache.strided(..PAGE, 3 * PLANE, 20).unwrap();
    let beside = cache.strided(3 * PAGE..4 * PAGE, PAGE, 2).unwrap();
    assert_eq!((all.count(), some.count(), beside.count()), (64, 20, 2));
    let places = [vec![all.clone()], vec![some, beside]];
    let sources = [bytes(0, 64 * PAGE), bytes(1, 22 * PAGE)];
    let sent = sources.iter().zip(&places).map(|(source, places)| (s.filled(source), places.clone()));
    s.copier.upload_pages(sent.collect()).unwrap().wait().unwrap();
    let ats =
        (0..64).map(|n| n * PLANE + PAGE).chain((0..20).map(|n| 3 * n * PLANE)).chain([3 * PAGE, 4 * PAGE]);
    for (at, page) in ats.zip(sources.iter().flat_map(|source| source.chunks(PAGE))) {
        model[at..at + PAGE].copy_from_slice(page);
    }
    let mut seen = vec![0xFF; model.len()];
    s.copier.download_slice(&cache, &mut seen).unwrap();
    assert!(seen == model, "each page in its place, and nothing beside them");
    let landings =
        sources.iter().zip(places).map(|(source, to)| (to, s.pool.checkout(source.len()).unwrap()));
    let came = s.copier.download_pages(landings.collect()).unwrap().wait().unwrap();
    assert!(came.iter().zip(&sources).all(|(buf, source)| **buf == **source));
    drop(came);
    let one = all.get(63).unwrap();
    assert_eq!((one.address(), one.len()), (cache.address() + (63 * PLANE + PAGE) as u64, PAGE));
    let back = s.copier.download_pages(vec![(one, s.pool.checkout(PAGE).unwrap())]);
    assert!(*back.unwrap().wait().unwrap()[0] == sources[0][63 * PAGE..]);
    // What is none. The last range of the second leaves the memory.
    for (refused, word) in [
        (all.get(64).map(drop), "range"),
        (cache.strided(PLANE - PAGE + 1..PLANE + 1, PLANE, 64).map(drop), "range"),
        (cache.strided(..PAGE, PLANE, 65).map(drop), "range"),
        (cache.strided(..PAGE, PLANE, 0).map(drop), "nothing to copy"),
        (
            cache.strided(..PAGE, 23, 2).map(drop),
            "24 bytes with a stride of 23 overlap: it takes at least 24",
        ),
    ] {
        is_argument(&refused.unwrap_err(), word);
    }
    assert_eq!(cache.strided(.., 0, 1).unwrap().get(0).unwrap().len(), cache.len());
    let refused = s.copier.upload_pages(vec![(s.filled(&[1; 10]), all)]).unwrap_err();
    assert!(matches!(refused.error, Error::Piece { piece: 0, memory: 1536, .. }), "{}", refused.error);
    let none: Vec<DeviceSlice> = Vec::new();
    let empty = s.copier.upload_pages(vec![(s.filled(&[1; 10]), none)]).unwrap_err();
    assert!(empty.to_string().contains("nothing to copy"), "{}", empty.error);
    drop((refused.buffer, empty.buffer));
}

/// A thousand bytes, and another number from the `steady`-th question on.
struct Changes {
    bytes: Vec<u8>,
    then: usize,
    asked: AtomicUsize,
    steady: usize,
}

impl std::ops::Deref for Changes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let is_steady = self.asked.fetch_add(1, Ordering::Relaxed) < self.steady;
        &self.bytes[..if is_steady { 1000 } else { self.then }]
    }
}

// SAFETY: the bytes are on the heap, and none are added or removed.
unsafe impl pinpool::StableDeref for Changes {}

fn changes(then: usize, steady: usize) -> Changes {
    Changes { bytes: vec![5; 1500], then, asked: 0.into(), steady }
}

#[test]
fn what_grows_or_shrinks_meanwhile_is_copied_no_further_than_its_place() {
    let s = setup(HostConfig::new(), 1 << 20);
    for steady in 0..40 {
        let place = s.memory.slice(..8000).unwrap();
        s.copier.upload_slice(&[9; 8000], &place).unwrap();
        let piece = |i: usize| {
            let grows = changes(1500, steady + 100 * usize::from(i != 3));
            let place = s.memory.slice(i * 1000..(i + 1) * 1000).unwrap();
            (s.device.register(grows).unwrap(), place)
        };
        let all = (0..4).map(piece).collect();
        // Taken as it was, or refused.
        if let Ok(sent) = s.copier.upload_pages(all) {
            let _ = sent.wait();
        }
        assert!(
            s.read(&place)[4000..].iter().all(|byte| *byte == 9),
            "beyond all of them, asked {steady} times"
        );
    }
    // What shrinks is copied as it was, or refused.
    let stream = s.device.stream().unwrap();
    for steady in 0..12 {
        for part in [0..1000, 500..1000] {
            let dst = s.memory.slice(..1000).unwrap();
            match stream.upload_part(s.device.register(changes(100, steady)).unwrap(), part.clone(), &dst) {
                Ok(sent) => drop(sent.wait().unwrap()),
                Err(SubmitError { error, buffer }) => {
                    is_argument(&error, "range");
                    assert!(buffer.is_some());
                }
            }
        }
    }
}

/// The segment of a chunk whose stream is given up, which the copies read, is not taken again.
#[test]
fn a_segment_outlives_copies_whose_end_is_never_known() {
    const LEN: usize = 300;
    let s = setup(HostConfig::new(), 4 << 20);
    no_event_is_recorded(&s);
    let (source, place) = (bytes(1, LEN), s.memory.slice(4096..4096 + LEN).unwrap());
    let sent = s.copier.upload(source.clone(), &place).unwrap();
    is_given_up(&s, sent);
    // Nothing has been copied yet. The test takes all that the pool has, and writes to it.
    assert!(s.node.live(0).queued > 0);
    let mut taken = s.emptied();
    for buf in &mut taken {
        buf.try_resize(buf.capacity(), 0xEE).unwrap();
    }
    assert!(!taken.is_empty() && s.pool.stats().quarantined_bytes > 0, "{:?}", s.pool.stats());
    s.node.clear_faults();
    s.node.resume(0);
    drop(taken);
    until("the copies are made", || s.node.live(0).queued == 0);
    assert!(*s.read(&place) == *source, "the copy read what another wrote to its segment");
    s.pool.check().unwrap();
}

/// A call keeps the segment that it has to its end: it goes on while other requests wait for what it would give back.
#[test]
fn a_call_goes_on_with_the_segment_that_it_has() {
    let s = Setup::new(late(1000), 4 << 20, |copier| copier.chunk(64 << 10));
    let (source, place) = (bytes(1, 2 << 20), s.memory.slice(..2 << 20).unwrap());
    let one = s.pool.checkout(80 << 10).unwrap();
    let rest = s.emptied();
    drop(one);
    let call = s.copier.upload(source.clone(), &place).unwrap();
    until("the call has its segment", || s.copier.stats().chunks > 0);
    assert!(!call.is_over());
    let (mut kept, since) = (Vec::new(), Instant::now());
    while !call.is_over() {
        kept.extend(s.pool.checkout_timeout(1000, Duration::from_millis(5)));
        assert!(since.elapsed() < HANG, "the call waits for a request that waits for the call");
    }
    call.wait().unwrap();
    drop(rest);
    assert!(*s.read(&place) == *source);
    drop(kept);
}

/// A long call ends, though other callers start short ones all the time.
#[test]
fn a_call_gets_its_turn_beside_others_that_keep_the_copier_busy() {
    let s = setup(late(50), 2 << 20);
    let stop = AtomicBool::new(false);
    // Checked out once: a pool that is full of short buffers gives longer ones out slowly.
    let mut long = pinned(&s, (0..64).map(|i| i * LEN));
    let places: Vec<_> = long.iter().map(|(_, place)| place.clone()).collect();
    std::thread::scope(|scope| {
        for t in 0..8 {
            let (s, stop) = (&s, &stop);
            scope.spawn(move || {
                let place = s.memory.slice((16 << 20) + t * 64..(16 << 20) + t * 64 + 64).unwrap();
                let start = || s.copier.upload_pages(vec![(s.filled(&[1; 64]), place.clone())]).unwrap();
                // As many of each thread's at once, whichever end first: there are always others.
                let mut sent: Vec<Transfer<_>> = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    sent.retain(|sent| !sent.is_over());
                    match sent.len() {
                        ..60 => sent.push(start()),
                        _ => std::thread::yield_now(),
                    }
                }
            });
        }
        for _ in 0..2 {
            let sent = s.copier.upload_pages(std::mem::take(&mut long)).unwrap().wait_timeout(HANG);
            stop.fetch_or(sent.is_err(), Ordering::Relaxed);
            long = sent.expect("it gets through").unwrap().into_iter().zip(places.iter().cloned()).collect();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(long.iter().enumerate().all(|(i, (buf, _))| **buf == *bytes(i, LEN)), "in their order");
    drop(long);
    assert!(places.iter().enumerate().all(|(i, place)| *s.read(place) == *bytes(i, LEN)));
}

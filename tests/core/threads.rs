//! The pool under many threads, on host devices whose copies run late.
//!
//! What is asserted must hold in any interleaving: each byte that went to the device is the one that was written, each
//! byte that came back is the one that was there, and when all threads have ended nothing is in use. These tests also
//! are what runs the asymmetric fence for real (a compiler fence against the membarrier system call): loom models the
//! protocol with two full fences instead.

use pinpool::copier::{FileSink, FileSource, Transfer};
use pinpool::telemetry::{ClassStats, Snapshot};
use pinpool::{Checkout, InFlight, Registered, StreamBuf};

use super::*;
use crate::support::{Random, bytes};

const THREADS: usize = 6;

/// How much longer than usual.
fn rounds(usual: usize) -> usize {
    let times = std::env::var("PINPOOL_CASES").map_or(1, |v| v.parse().expect("PINPOOL_CASES is a number"));
    usual * times
}

fn late() -> Device {
    on(HostConfig::new().late(Duration::from_micros(50), 3)).1
}

impl Random {
    /// Over all magnitudes up to 2^`bits`.
    fn len(&mut self, bits: usize) -> usize {
        let bits = self.below(bits);
        (1 << bits) + self.below(1 << bits)
    }
}

/// A number that no other round of any thread has.
fn stamp(thread: usize, round: usize) -> u64 {
    (thread as u64) << 40 | round as u64 | 1 << 63
}

fn fill(buf: &mut PinnedBuf, stamp: u64) {
    buf.clear();
    buf.extend_from_slice(&bytes(stamp as usize, buf.capacity()));
}

fn is(found: &[u8], stamp: u64) -> bool {
    *found == *bytes(stamp as usize, found.len())
}

/// All users have ended: nothing may be in use.
fn all_idle(pool: &Pool, streams: &[Stream]) {
    streams.iter().for_each(|s| s.synchronize().unwrap());
    let stats = checked(pool);
    let used = (stats.checked_out_bytes, stats.in_flight_bytes, stats.claimed_bytes, stats.quarantined_bytes);
    assert_eq!(used, (0, 0, 0, 0), "{stats:?}");
    assert_eq!((stats.requested_bytes, stats.waiting), (0, 0), "{stats:?}");
    assert_eq!(stats.checkouts, stats.returns, "{stats:?}");
    // What threads have counted that ended is counted still.
    let classes = pool.snapshot().classes;
    let sum = |of: fn(&ClassStats) -> u64| classes.iter().map(of).sum::<u64>();
    let counted = (sum(|class| class.checkouts), sum(|class| class.returns));
    assert_eq!(counted, (stats.checkouts, stats.returns), "{stats:?}");
}

#[test]
fn every_byte_arrives_whatever_the_threads_do() {
    [false, true].into_iter().for_each(every_byte_arrives);
}

fn every_byte_arrives(track: bool) {
    let device = late();
    let pool = builder(&device, 2 << 20).region(512 << 10).thread_cache(64 << 10).track_checkouts(track);
    let pool = pool.build().unwrap();
    let kept: Vec<_> = (0..40).map(|_| pool.checkout(Request::new(2000).tag("kept")).unwrap()).collect();
    let streams: Vec<Stream> = (0..3).map(|_| device.stream().unwrap()).collect();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, streams, device, done) = (&pool, &streams, &device, &done);
            scope.spawn(move || {
                let mut random = Random::new(thread as u64);
                let memory = device.alloc(64 << 10).unwrap();
                for round in 0..rounds(300) {
                    let (len, stamp) = (random.len(15), stamp(thread, round));
                    let stream = &streams[random.below(streams.len())];
                    let mut buf = pool.checkout(len).unwrap();
                    fill(&mut buf, stamp);
                    let sent = stream.upload(buf, &memory).unwrap();
                    match random.below(4) {
                        // Back at once, and reused by any thread.
                        0 => drop(sent),
                        1 => assert!(is(&sent.wait().unwrap(), stamp)),
                        2 => {
                            drop(sent);
                            let mut other = pool.checkout(len).unwrap();
                            fill(&mut other, !stamp);
                        }
                        _ => drop(stream.hold(sent.wait().unwrap()).unwrap()),
                    }
                    let back = if random.below(2) == 0 {
                        let landing = pool.checkout_on(stream, len).unwrap();
                        stream.download(memory.slice(..len), landing).unwrap()
                    } else {
                        stream.download(memory.slice(..len), pool.checkout(len).unwrap()).unwrap()
                    };
                    assert!(is(&back.wait().unwrap(), stamp), "thread {thread}, round {round}, {len} bytes");
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        // Takes back what threads at work cache, and checks, all the time: each revokes every thread's permit. (Regions
        // in use stay.)
        while done.load(Ordering::SeqCst) < THREADS {
            pool.trim(2 << 20);
            checked(&pool);
            let Snapshot { pool: stats, classes, .. } = pool.snapshot();
            let sum = |of: fn(&ClassStats) -> u64| classes.iter().map(of).sum::<u64>();
            let counted = [sum(|c| c.out_bytes as u64), sum(|c| c.checkouts), sum(|c| c.returns)];
            assert_eq!(counted, [stats.granted_bytes as u64, stats.checkouts, stats.returns], "{stats:?}");
            // What is out all the time is listed once. (Of a pool that does not track, a sample is.)
            let listed = pool.stuck(Duration::ZERO).iter().filter(|buffer| buffer.tag.is_some()).count();
            assert!(listed == kept.len() || !track && listed < kept.len(), "{listed} of {}", kept.len());
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert!(track || pool.stats().reclaims > 0, "{:?}", pool.stats());
    drop(kept);
    all_idle(&pool, &streams);
}

/// One thread checks out, another returns, `together` at a time; the lengths follow each other, so that cached segments
/// of the last length are in the way of the next.
fn flow_one_way(together: usize, lens: &[usize]) {
    const CACHE: usize = 1 << 20;
    let device = late();
    let pool = builder(&device, 64 << 20).initial(64 << 20).thread_cache(CACHE).build().unwrap();
    pool.wait_pinned(None).unwrap();
    let (give, take) = mpsc::sync_channel::<Vec<(u64, PinnedBuf)>>(400 / together);
    let total = rounds(20_000).div_ceil(together);
    std::thread::scope(|scope| {
        let pool = &pool;
        scope.spawn(move || {
            let mut stamp = 0;
            let mut stamped = |len: usize| {
                let mut buf = pool.checkout(len).unwrap();
                stamp += 1;
                buf.extend_from_slice(&bytes(stamp as usize, 16));
                (stamp, buf)
            };
            for len in lens {
                for _ in 0..total {
                    give.send((0..together).map(|_| stamped(*len)).collect()).unwrap();
                }
            }
        });
        scope.spawn(move || {
            for (at, bufs) in take.into_iter().enumerate() {
                assert!(bufs.iter().all(|(stamp, buf)| is(buf, *stamp)), "two owners of one segment");
                drop(bufs);
                if at % (100 / together) == 0 {
                    // Two thread caches; and a transfer cache that holds twice as much, or of several classes half as
                    // much for each: they share a thread's cache, a batch is half of what a class has of it, and there
                    // are eight batches.
                    let cached = pool.stats().cached_bytes;
                    let between = if lens.len() == 1 { 2 * CACHE } else { lens.len() * CACHE / 2 };
                    assert!(cached <= 2 * CACHE + between, "{cached} bytes are cached");
                }
                if at % (5000 / together) == 0 {
                    pool.check().unwrap();
                }
            }
        });
    });
    let stats = pool.stats();
    assert_eq!(stats.checkouts, (lens.len() * total * together) as u64);
    // Batches circulate between the two threads: few checkouts find their cache empty. (Where the cache is small for its
    // sizes, the last of them have room for two segments, and a batch is one.)
    let few = if lens.len() == 1 { stats.checkouts / 4 } else { stats.checkouts / 2 };
    assert!(stats.misses <= few, "{stats:?}");
    all_idle(&pool, &[]);
}

#[test]
fn what_flows_one_way_is_bounded_and_comes_round() {
    flow_one_way(100, &[8 << 10]);
    flow_one_way(1, &[8 << 10]);
    // Each class has a transfer cache of its own.
    flow_one_way(100, &[2000, 3000, 4000, 5000, 6000, 8000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000]);
}

/// After a few rounds a thread's own cache serves each checkout, of many sizes and of one that is used much.
#[test]
fn a_thread_hits_for_each_size_that_it_uses() {
    // 24 classes from 32 KiB to 256 KiB: an eighth of the cache for each would be three times what it may hold. And 32
    // buffers of 1 MiB at once, which are half of the cache.
    let many: Vec<usize> =
        (0..3).flat_map(|doubling| (9..17).map(move |step| ((step * 4096) << doubling) - 64)).collect();
    for (mib, cache, lens, together) in [(64, 16 << 20, many, 1), (80, 65 << 20, vec![1 << 20], 32)] {
        let device = late();
        let pool = builder(&device, mib << 20).initial(mib << 20).thread_cache(cache);
        let pool = pool.build().unwrap();
        pool.wait_pinned(None).unwrap();
        let take =
            |len: &usize| drop((0..together).map(|_| pool.checkout(*len).unwrap()).collect::<Vec<_>>());
        (0..4).for_each(|_| lens.iter().for_each(take));
        let before = pool.stats();
        (0..50).for_each(|_| lens.iter().for_each(take));
        let after = pool.stats();
        let made = (50 * lens.len() * together) as u64;
        assert_eq!((after.checkouts - before.checkouts, after.misses - before.misses), (made, 0));
        all_idle(&pool, &[]);
    }
}

/// A thread finds the cache of the pool that it used last at once. With others it takes a longer way,
/// but its own cache serves all the same, and what is returned goes to the pool that it is of.
#[test]
fn more_pools_than_a_thread_has_at_hand_serve_it_from_its_caches() {
    let device = host().1;
    let pools: Vec<Pool> = (0..9).map(|_| pool(&device, 1 << 20)).collect();
    let round = || {
        let mut held: Vec<_> = pools.iter().map(|pool| filled(pool, 1000, 1)).collect();
        while !held.is_empty() {
            drop(held.swap_remove(held.len() * 3 / 7));
        }
    };
    (0..3).for_each(|_| round());
    let misses = || pools.iter().map(|pool| pool.stats().misses).collect::<Vec<_>>();
    let before = misses();
    (0..100).for_each(|_| round());
    assert_eq!(misses(), before);
    for pool in &pools {
        all_idle(pool, &[]);
        drop(pool.try_checkout(700 << 10).unwrap());
    }
}

#[test]
fn a_buffer_dropped_by_a_thread_local_comes_back() {
    thread_local! {
        static LAST: std::cell::RefCell<Vec<PinnedBuf>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    let device = late();
    let pool = builder(&device, 256 << 10).build().unwrap();
    for first in [false, true] {
        let theirs = pool.clone();
        std::thread::spawn(move || {
            // Registered before the pool's own thread-locals or after them, and so destroyed after them or before.
            if first {
                LAST.with(|l| l.borrow_mut().reserve(1));
            }
            let bufs = [theirs.checkout(1000).unwrap(), theirs.checkout(100_000).unwrap()];
            LAST.with(|l| l.borrow_mut().extend(bufs));
        })
        .join()
        .unwrap();
        all_idle(&pool, &[]);
    }
}

/// Runs `main` beside a thread that makes a call each time that it is told to.
fn beside<R>(mut call: impl FnMut() + Send, main: impl FnOnce(&mut dyn FnMut()) -> R) -> R {
    let ((go, told), (say, said)) = (mpsc::channel::<()>(), mpsc::channel());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while told.recv().is_ok() {
                call();
                say.send(()).unwrap();
            }
        });
        // Dropped on the way out, which ends the thread.
        let go = go;
        main(&mut || {
            go.send(()).unwrap();
            said.recv().unwrap()
        })
    })
}

#[test]
fn a_growing_pool_leaves_threads_at_work_alone_and_a_full_one_does_not() {
    let device = late();
    let pool = builder(&device, 512 << 10).initial(256 << 10).region(256 << 10);
    let pool = pool.thread_cache(128 << 10).build().unwrap();
    pool.wait_pinned(None).unwrap();
    let nearly_all = Request::new(250 << 10).align(4096);
    let pair = || drop((0..12).map(|_| pool.checkout(1000).unwrap()).collect::<Vec<_>>());
    beside(pair, |pair| {
        pair();
        let cached = pool.stats().cached_bytes;
        assert!(cached >= 12 * 1000);
        // The cached segments stand in the way of this request for all but the last three of 64 pages. There is room
        // for another region, though.
        let large = pool.try_checkout(nearly_all);
        let large = large.or_else(|_| {
            pool.wait_pinned(None).unwrap();
            pair();
            assert_eq!(pool.stats().cached_bytes, cached, "it still has what it had");
            pool.try_checkout(nearly_all)
        });
        let large = large.unwrap();
        pair();
        let stats = pool.stats();
        assert_eq!((stats.growths, stats.cached_bytes), (1, cached), "and this was made of new memory");
        // No further region fits. (The thread has used its cache since the last look at it.)
        let other = pool.try_checkout(nearly_all).expect("what a thread caches is taken back");
        assert!(pool.stats().reclaims > 0);
        assert_eq!(pool.stats().cached_bytes, 0, "its cache is empty");
        drop((large, other));
        pair();
    });
    all_idle(&pool, &[]);
}

#[test]
fn a_thread_at_work_shares_what_it_has_of_a_class() {
    let device = late();
    // Six segments, in runs of one, one, two and two. A thread may cache two of them, and gets them one by one.
    let pool = builder(&device, 72 << 10).build().unwrap();
    pool.wait_pinned(None).unwrap();
    let mut first = true;
    let call = || {
        let count = if std::mem::take(&mut first) { 2 } else { 1 };
        drop((0..count).map(|_| pool.checkout(10_000).unwrap()).collect::<Vec<_>>());
    };
    beside(call, |call| {
        call();
        let mut mine: Vec<PinnedBuf> = (0..4).map(|_| pool.try_checkout(10_000).unwrap()).collect();
        let both = pool.stats().cached_bytes;
        assert!(both > 0, "{:?}", pool.stats());
        let since = Instant::now();
        mine.push(pool.try_checkout(10_000).expect("one of the two"));
        let left = pool.stats().cached_bytes;
        // A thread that has not used the pool for a millisecond counts as idle, and gives up both.
        if left > 0 || since.elapsed() < Duration::from_millis(1) {
            assert_eq!(left * 2, both, "the other stays where it was");
            call();
            assert_eq!(pool.stats().cached_bytes * 2, both, "and serves its owner");
        }
        drop(mine);
    });
    all_idle(&pool, &[]);
}

/// What is pinned never exceeds the capacity while threads trim and others make the pool grow. And a region goes once: two
/// threads that trimmed at once counted an unpinned region twice, which was room that never came back, or an overflow.
#[test]
fn what_goes_is_unpinned_once_and_before_what_comes_is_pinned() {
    const REGION: usize = 64 << 10;
    let (node, device) = host();
    let (most, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (seen, told) = (most.clone(), gone.clone());
    let before = move |region: &pinpool::RegionInfo| {
        // What is pinned while a region that leaves is still pinned.
        seen.fetch_max(node.live(0).pinned_bytes, Ordering::Relaxed);
        told.fetch_add(region.len, Ordering::Relaxed);
    };
    let pool = builder(&device, 4 * REGION).region(REGION).thread_cache(0).before_unpin(before);
    let pool = pool.build().unwrap();
    let done = AtomicBool::new(false);
    let said: usize = std::thread::scope(|scope| {
        let trim = || {
            let mut said = 0;
            while !done.load(Ordering::Relaxed) {
                said += pool.trim(0);
            }
            said
        };
        let trimmers = [(); 3].map(|()| scope.spawn(trim));
        let take = || {
            for _ in 0..rounds(1000) {
                // What both threads take is all of the capacity, so that a region that leaves for good is missed.
                let two = [(); 2].map(|()| pool.checkout_timeout(60 << 10, HANG));
                assert!(two.iter().all(Result::is_ok), "{two:?}, {:?}", pool.stats());
            }
        };
        let takers = [(); 2].map(|()| scope.spawn(take));
        let taken = takers.map(|taker| taker.join().is_ok());
        done.store(true, Ordering::Relaxed);
        assert_eq!(taken, [true; 2]);
        trimmers.map(|trimmer| trimmer.join().unwrap()).into_iter().sum()
    });
    drop(pool);
    // The worker tells of each region, in its own time.
    until(|| gone.load(Ordering::Relaxed) >= said, || format!("{said} bytes were said to go"));
    // The others were given back with the pool.
    let (gone, most) = (gone.load(Ordering::Relaxed), most.load(Ordering::Relaxed));
    assert!(gone <= said + 4 * REGION, "{said} bytes were said to go, {gone} went");
    assert!(most <= 4 * REGION, "{most} bytes were pinned at once");
}

/// What the types of the crate are, for programs that share them between threads and catch panics.
#[test]
fn all_handles_may_be_sent_shared_and_used_after_a_caught_panic() {
    fn is<T: Send + Sync + std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    is::<(Device, Pool, Stream, Copier, Sampler)>();
    is::<(PinnedBuf, StreamBuf, Registered<Vec<u8>>, DeviceSlice)>();
    is::<(Checkout, Checkout<Vec<PinnedBuf>>)>();
    is::<(InFlight<PinnedBuf>, InFlight<Registered<Vec<u8>>>)>();
    is::<(Transfer<Vec<u8>>, Transfer<Vec<PinnedBuf>>, FileSource, FileSink)>();
}

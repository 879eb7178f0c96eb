//! How a copier behaves beside others: how much it takes, the order of bulk and foreground, and what it does when
//! there is nothing to do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{downloaded, in_use};
use pinpool::copier::{Fill, Priority, Transfer};
use pinpool::host::{Call, Failure, Fault, HostConfig};
use pinpool::{Copier, Error};

use super::{Rig, pattern, sink, source, until};

#[test]
fn settings_that_make_no_sense_are_refused_and_say_why() {
    let rig = Rig::plain();
    let builder = || Copier::builder(&rig.pool, &rig.device);
    for (wrong, word) in [
        (builder().threads(0), "threads"),
        (builder().depth(0), "depth"),
        (builder().chunk(0), "chunk"),
        (builder().rate(0), "rate"),
        (builder().chunk(1 << 30), "chunk"),
        (builder().share(8192), "share"),
        (builder().chunk(usize::MAX), "chunk"),
        (builder().threads(usize::MAX), "threads"),
        (builder().depth(usize::MAX), "depth"),
    ] {
        match wrong.build() {
            Err(Error::Argument(text)) => assert!(text.contains(word), "{word}: {text}"),
            other => panic!("{word}: {other:?}"),
        }
    }
    let other = Rig::plain();
    let wrong = Copier::builder(&rig.pool, &other.device).build();
    assert!(matches!(wrong, Err(Error::Mismatch { .. })));
    // Small pools get small chunks by themselves.
    for capacity in [256 << 10, 1 << 20, 5 << 20, 64 << 20] {
        let rig = Rig::new(HostConfig::new(), capacity);
        let copier = Copier::builder(&rig.pool, &rig.device).build().unwrap();
        let (bytes, memory) = (pattern(3 << 20, 1), rig.device.alloc(3 << 20).unwrap());
        copier.upload_slice(&bytes, &memory).unwrap();
        assert!(downloaded(&copier, &memory) == bytes, "{capacity} {copier:?}");
        rig.all_is_back();
    }
}

#[test]
fn a_load_stays_within_its_share_and_leaves_some_of_it_to_the_foreground() {
    let rig = Rig::late();
    let copier = rig.builder().threads(4).share(1 << 20).build().unwrap();
    let most = Arc::new(AtomicUsize::new(0));
    let memory = rig.device.alloc(6 << 20).unwrap();
    let (bytes, pool, seen) = (pattern(6 << 20, 1), rig.pool.clone(), most.clone());
    let looks = source("looks", bytes.len(), move |offset, into: &mut Fill<'_>| {
        seen.fetch_max(in_use(&pool), Ordering::Relaxed);
        into.push(&bytes[offset as usize..]);
        Ok(())
    });
    copier.upload(looks, &memory).unwrap().wait().map_err(|failed| failed.error).unwrap();
    let most = most.load(Ordering::Relaxed);
    assert!(most > 200_000, "several segments were in use: {most}");
    assert!(most <= (1 << 20) - 80_000, "one segment at least is not theirs: {most}");
    rig.all_is_back();
}

/// The next so many copies get stuck on their streams. Returns a function that waits for a number of copies.
fn stall(rig: &Rig, count: u64) -> impl Fn(usize) + '_ {
    rig.node.start_trace();
    (0..count)
        .for_each(|nth| rig.node.fail(Fault { device: 0, call: Call::Copy, nth, failure: Failure::Stall }));
    |most| {
        let copies = || rig.node.trace().iter().filter(|call| **call == Call::Copy).count();
        until("so many are submitted", || copies() >= most);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(copies(), most, "no more are submitted");
    }
}

#[test]
fn at_most_so_many_bulk_chunks_are_on_the_wire_and_the_foreground_goes_past_them() {
    let rig = Rig::plain();
    let copier = rig.builder().depth(2).build().unwrap();
    let (bytes, memory) = (pattern(2 << 20, 2), rig.device.alloc(2 << 20).unwrap());
    let small = rig.device.alloc(300_000).unwrap();
    let submitted = stall(&rig, 2);
    let load = copier.upload(bytes.clone(), &memory).unwrap();
    submitted(2);
    assert!(!load.is_over() && load.progress().done == 0);
    // A foreground transfer still gets through, on the caller's thread.
    let first = copier.with_priority(Priority::Foreground);
    first.upload_slice(&bytes[..1000], small.slice(..1000)).unwrap();
    assert!(downloaded(&first, small.slice(..1000)) == bytes[..1000]);
    // Through the workers, which see it while the watcher waits for the others.
    let sent = first.upload(bytes[..300_000].to_vec(), &small).unwrap();
    assert!(sent.wait_timeout(Duration::from_secs(10)).is_ok(), "no worker looks");
    assert!(!load.is_over());
    rig.node.resume(0);
    load.wait().unwrap();
    assert!(downloaded(&copier, &memory) == bytes);
    rig.all_is_back();
}

#[test]
fn while_a_foreground_copy_is_on_the_wire_bulk_chunks_go_one_by_one() {
    let rig = Rig::plain();
    let copier = rig.builder().build().unwrap();
    let (bytes, memory) = (pattern(2 << 20, 2), rig.device.alloc(2 << 20).unwrap());
    let small = rig.device.alloc(1000).unwrap();
    let submitted = stall(&rig, 6);
    let first = copier.with_priority(Priority::Foreground).upload(vec![1; 1000], &small).unwrap();
    submitted(1);
    let load = copier.upload(bytes.clone(), &memory).unwrap();
    submitted(2);
    for _ in 0..100 {
        rig.node.resume(0);
        if load.is_over() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    load.wait().unwrap();
    first.wait().unwrap();
    assert!(downloaded(&copier, &memory) == bytes);
    rig.all_is_back();
}

#[test]
fn a_rate_is_kept() {
    let rig = Rig::plain();
    let copier = rig.builder().rate(4 << 20).build().unwrap();
    let (bytes, memory) = (pattern(1 << 20, 3), rig.device.alloc(1 << 20).unwrap());
    let since = Instant::now();
    copier.upload_slice(&bytes, &memory).unwrap();
    let taken = since.elapsed();
    // The first chunk, less than a quarter, goes at once. A machine that is slower than this is within its rate.
    assert!(taken >= Duration::from_millis(190), "{taken:?}");
    // The foreground has no rate.
    let copier = rig.builder().rate(1).build().unwrap();
    let first = copier.with_priority(Priority::Foreground);
    let other = rig.device.alloc(1 << 20).unwrap();
    let slow = copier.upload(bytes.clone(), &other).unwrap();
    first.upload_slice(&bytes, &memory).unwrap();
    assert!(downloaded(&first, &memory) == bytes);
    assert!(!slow.is_over());
    slow.cancel();
    slow.wait().unwrap_err();
    rig.all_is_back();
}

#[test]
fn a_pool_that_others_have_emptied_is_waited_for_and_not_stood_in_line_twice() {
    let rig = Rig::new(HostConfig::new(), 2 << 20);
    let copier = rig.builder().threads(4).build().unwrap();
    let (bytes, memory) = (pattern(1 << 20, 4), rig.device.alloc(1 << 20).unwrap());
    let mut all = rig.emptied();
    let load = copier.upload(bytes.clone(), &memory).unwrap();
    until("it waits like any other", || rig.pool.stats().waiting > 0);
    // Longer than a waiter waits at a time: it keeps its place.
    std::thread::sleep(Duration::from_millis(900));
    let stats = rig.pool.stats();
    assert_eq!((stats.waiting, stats.timeouts), (1, 0), "one request, however many threads");
    assert!(!load.is_over());
    // Enough for one segment is enough.
    all.truncate(all.len() / 2);
    load.wait().unwrap();
    drop(all);
    // A load that waits can be cancelled, and a reader is served when there is room.
    let mut all = rig.emptied();
    let load = copier.upload(bytes.clone(), &memory).unwrap();
    load.cancel();
    assert!(matches!(load.wait().unwrap_err().error, Error::Cancelled { done: 0, .. }));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            all.clear();
        });
        assert_eq!(copier.upload_read(&mut &bytes[..], &memory).unwrap(), 1 << 20);
    });
    assert!(downloaded(&copier, &memory) == bytes);
    rig.all_is_back();
}

#[test]
fn progress_says_how_far_it_is_and_what_is_left() {
    // All of it takes 2 s.
    const LEN: usize = 2 << 20;
    let rig = Rig::plain();
    let copier = rig.builder().rate(1 << 20).build().unwrap();
    let (bytes, memory) = (pattern(LEN, 6), rig.device.alloc(LEN).unwrap());
    let load = copier.upload(bytes, &memory).unwrap();
    assert!(load.wait_landed(300_000));
    let progress = load.progress();
    assert!(progress.done >= 300_000 && progress.landed_to >= 300_000 && !progress.over);
    assert!(progress.rate() > 0.0 && progress.remaining().is_some());
    let load = load.wait_timeout(Duration::ZERO).unwrap_err();
    assert!(matches!(load.error, Error::Timeout(_)));
    let load = load.buffer.unwrap();
    assert!(load.wait_landed(LEN as u64));
    assert!(!load.wait_landed(LEN as u64 + 1), "there is no more");
    let progress = load.progress();
    assert!(progress.over && progress.done == progress.total && progress.remaining() == Some(Duration::ZERO));
    load.wait().unwrap();
    rig.all_is_back();
}

/// The link carries both directions at once: a download does not wait until all of an earlier upload has been taken.
#[test]
fn both_directions_go_at_once() {
    const LEN: usize = 8 << 20;
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let (bytes, up, down) = (pattern(LEN, 6), rig.device.alloc(LEN).unwrap(), rig.device.alloc(LEN).unwrap());
    copier.upload_slice(&bytes, &down).unwrap();
    // Nothing arrives before both have started.
    rig.node.hang(0);
    let load = copier.upload(bytes.clone(), &up).unwrap();
    // Into pinned memory: a sink would have the only worker to itself.
    let target = vec![(down.slice(..).unwrap(), rig.pool.checkout(LEN).unwrap())];
    let store = copier.download_pages(target).unwrap();
    rig.node.resume(0);
    assert!(load.wait_landed(LEN as u64));
    let done = store.progress().done;
    assert!(done > 0, "none has come while all of the upload went");
    load.wait().unwrap();
    assert!(*store.wait().unwrap()[0] == bytes[..]);
    assert!(downloaded(&copier, &up) == bytes);
    rig.all_is_back();
}

/// A worker that is about to call a source or a sink owns chunks of that job only: it lets its other chunks end before. A
/// stream of transfers in the other direction does not keep it from that.
#[test]
fn neither_direction_keeps_sources_and_sinks_of_the_other_from_going() {
    const LEN: usize = 2 << 20;
    const MOST: usize = 100;
    for threads in [1, 3] {
        let rig = Rig::new(HostConfig::new().late(Duration::from_micros(300), 3), 64 << 20);
        let copier = rig.builder().threads(threads).build().unwrap();
        let (bytes, memory) = (Arc::new(pattern(LEN, 6)), rig.device.alloc(LEN).unwrap());
        let others: [_; 3] = std::array::from_fn(|_| rig.device.alloc(LEN).unwrap());
        // Keeps three transfers going until `is_over`, which is to be before `MOST` of them have ended.
        let beside = |start: &dyn Fn(usize) -> Box<dyn Fn() -> bool>, is_over: &dyn Fn() -> bool| {
            let mut going: VecDeque<_> = (0..3).map(start).collect();
            let mut ended = 0;
            while !is_over() && ended < MOST {
                if going[0]() {
                    ended += 1;
                    going.pop_front();
                    going.push_back(start(ended % 3));
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            assert!(ended < MOST, "{threads} threads: {ended} others of as many bytes are over before");
            going.iter().for_each(|is_over| {
                while !is_over() {
                    std::thread::yield_now()
                }
            });
        };
        let download = |n: usize| -> Box<dyn Fn() -> bool> {
            let to = rig.pool.checkout(LEN).unwrap();
            let sent = copier.download_pages(vec![(others[n].slice(..).unwrap(), to)]).unwrap();
            Box::new(move || sent.is_over())
        };
        let upload = |n: usize| -> Box<dyn Fn() -> bool> {
            let sent = copier.upload(bytes.clone(), &others[n]).unwrap();
            Box::new(move || sent.is_over())
        };
        others.iter().for_each(|other| copier.upload_slice(&bytes, other).unwrap());
        let filled = source("sevens", LEN, |_, into: &mut Fill<'_>| {
            into.push(&vec![7; into.remaining()]);
            Ok(())
        });
        let filled = copier.upload(filled, &memory).unwrap();
        beside(&download, &|| filled.is_over());
        filled.wait().map_err(|failed| failed.error).unwrap();
        let landed = Arc::new(AtomicUsize::new(0));
        let counts = || {
            let landed = landed.clone();
            let counted = sink(move |_, bytes: &[u8]| {
                landed.fetch_add(bytes.len(), Ordering::Relaxed);
                Ok(())
            });
            copier.download(&memory, counted).unwrap()
        };
        let save = counts();
        beside(&upload, &|| save.is_over());
        save.wait().unwrap();
        // Without a segment.
        let pinned = |n: usize| -> Box<dyn Fn() -> bool> {
            let mut buf = rig.pool.checkout(LEN).unwrap();
            buf.extend_from_slice(&bytes);
            let sent = copier.upload_pages(vec![(buf, others[n].slice(..).unwrap())]).unwrap();
            Box::new(move || sent.is_over())
        };
        let save = counts();
        beside(&pinned, &|| save.is_over());
        save.wait().unwrap();
        assert_eq!(landed.load(Ordering::Relaxed), 2 * LEN);
        rig.all_is_back();
    }
}

/// Bulk chunks keep their segments for as long as the rate wants. The foreground, which the rate does not hold up, has one
/// of its own, also where there are few.
#[test]
fn the_foreground_finds_a_segment_beside_all_that_wait_for_the_rate() {
    const LEN: usize = 1 << 20;
    for threads in [1, 4] {
        let rig = Rig::plain();
        let copier = rig.builder().threads(threads).share(600 << 10).rate(1 << 10).build().unwrap();
        let memory: [_; 6] = std::array::from_fn(|_| rig.device.alloc(LEN).unwrap());
        std::thread::scope(|scope| {
            let loads: Vec<_> =
                memory[..5].iter().map(|memory| copier.upload(vec![1; LEN], memory).unwrap()).collect();
            let loads = &*loads.leak();
            for load in loads {
                scope.spawn(|| load.wait_landed(u64::MAX));
            }
            // They take what they can get.
            std::thread::sleep(Duration::from_millis(50));
            let urgent = copier.with_priority(Priority::Foreground);
            let sent = urgent.upload(vec![2; LEN], &memory[5]).unwrap().wait_timeout(Duration::from_secs(20));
            loads.iter().for_each(Transfer::cancel);
            let said =
                sent.unwrap_or_else(|_| panic!("{threads} threads: the foreground waits for the rate"));
            said.unwrap();
        });
        rig.all_is_back();
    }
}

#[test]
fn the_foreground_goes_before_what_has_landed_in_bulk() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).build().unwrap();
    let first = copier.with_priority(Priority::Foreground);
    // Longer than what is copied on the caller's own thread.
    let (bytes, small) = (pattern(300_000, 3), rig.device.alloc(300_000).unwrap());
    let memory = rig.device.alloc(6 << 20).unwrap();
    copier.upload_slice(&pattern(6 << 20, 2), &memory).unwrap();
    let slow = sink(|_, _: &[u8]| {
        std::thread::sleep(Duration::from_millis(30));
        Ok(())
    });
    let saves = copier.download(&memory, slow).unwrap();
    while saves.progress().done < 200_000 {
        std::thread::yield_now();
    }
    first.upload_slice(&bytes, &small).unwrap();
    assert!(downloaded(&first, &small) == bytes);
    let done = saves.progress();
    assert!(!done.over && done.done < 4 << 20, "it had to wait for the whole of it: {done:?}");
    saves.cancel();
    drop(saves);
    rig.all_is_back();
}

#[test]
fn what_has_landed_is_used_beside_the_rest() {
    const LANDED: usize = 300_000;
    let rig = Rig::plain();
    // One thread sends the chunks in their order. Of several any may be the first.
    let copier = rig.builder().threads(1).rate(1 << 20).build().unwrap();
    let (bytes, memory) = (pattern(3 << 20, 6), rig.device.alloc(3 << 20).unwrap());
    let load = copier.upload(bytes.clone(), &memory).unwrap();
    // The rest takes more than two seconds.
    assert!(load.wait_landed(LANDED as u64));
    // By a stream, which the load does not hold up.
    let (stream, other) = (rig.device.stream().unwrap(), rig.device.alloc(LANDED).unwrap());
    drop(stream.copy(memory.slice(..LANDED), &other).unwrap());
    let mut back = vec![0; LANDED];
    stream.download_blocking(&other, &mut back).unwrap();
    assert!(back == bytes[..LANDED]);
    assert!(!load.is_over(), "all of it was beside the load");
    load.wait().unwrap();
    rig.all_is_back();
}

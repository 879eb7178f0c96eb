//! How a copier behaves beside others: how much it takes, the order of bulk and foreground, and what it does when
//! there is nothing to do.

use std::collections::VecDeque;

use pinpool::copier::Transfer;

use super::*;
use crate::support::in_use;

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
    ] {
        match wrong.build() {
            Err(Error::Argument(text)) => assert!(text.contains(word), "{word}: {text}"),
            other => panic!("{word}: {other:?}"),
        }
    }
    // Small pools get small chunks by themselves.
    for capacity in [256 << 10, 5 << 20] {
        let rig = Rig::new(HostConfig::new(), capacity);
        let copier = Copier::builder(&rig.pool, &rig.device).build().unwrap();
        let (bytes, memory) = (pattern(3 << 20, 1), rig.device.alloc(3 << 20).unwrap());
        copier.upload_slice(&bytes, &memory).unwrap();
        assert!(downloaded(&copier, &memory) == bytes, "{capacity} {copier:?}");
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
fn at_most_so_many_bulk_chunks_are_on_the_wire_and_one_beside_the_foreground_which_goes_past_them() {
    let rig = Rig::plain();
    let copier = rig.builder().depth(2).build().unwrap();
    let first = copier.with_priority(Priority::Foreground);
    let (bytes, memory) = (pattern(2 << 20, 2), rig.device.alloc(2 << 20).unwrap());
    let small = rig.device.alloc(300_000).unwrap();
    let submitted = stall(&rig, 2);
    let load = copier.upload(bytes.clone(), &memory).unwrap();
    submitted(2);
    assert!(!load.is_over() && load.progress().done == 0);
    // A foreground transfer still gets through, on the caller's thread, and through the workers.
    first.upload_slice(&bytes[..1000], small.slice(..1000)).unwrap();
    let sent = first.upload(bytes[..300_000].to_vec(), &small).unwrap();
    assert!(sent.wait_timeout(Duration::from_secs(10)).is_ok(), "no worker looks");
    assert!(downloaded(&first, &small) == bytes[..300_000] && !load.is_over());
    rig.node.resume(0);
    load.wait().unwrap();
    assert!(downloaded(&copier, &memory) == bytes);
    // The foreground first.
    let submitted = stall(&rig, 6);
    let sent = first.upload(vec![1; 1000], &small).unwrap();
    submitted(1);
    let load = copier.upload(bytes, &memory).unwrap();
    submitted(2);
    until("all of it goes", || {
        rig.node.resume(0);
        load.is_over()
    });
    load.wait().unwrap();
    sent.wait().unwrap();
}

#[test]
fn progress_says_how_far_it_is_and_what_has_landed_is_used_beside_the_rest() {
    const LEN: usize = 8 << 20;
    const LANDED: usize = 600_000;
    let rig = Rig::plain();
    // All of it would take eight seconds. One thread sends the chunks in their order: of several any may be
    // the first.
    let copier = rig.builder().threads(1).rate(1 << 20).build().unwrap();
    let (bytes, memory) = (pattern(LEN, 6), rig.device.alloc(LEN).unwrap());
    let since = Instant::now();
    let load = copier.upload(bytes.clone(), &memory).unwrap();
    assert!(load.wait_landed(LANDED as u64));
    // The first of ten chunks goes at once.
    assert!(since.elapsed() >= Duration::from_millis(500), "the rate is not kept: {:?}", since.elapsed());
    let progress = load.progress();
    assert!(progress.done >= LANDED as u64 && progress.landed_to >= LANDED as u64 && !progress.over);
    assert!(progress.rate() > 0.0 && progress.remaining().is_some());
    // By a stream, which the load does not hold up.
    let (stream, other) = (rig.device.stream().unwrap(), rig.device.alloc(LANDED).unwrap());
    drop(stream.copy(memory.slice(..LANDED), &other).unwrap());
    let mut back = vec![0; LANDED];
    stream.download_blocking(&other, &mut back).unwrap();
    assert!(back == bytes[..LANDED]);
    let load = load.wait_timeout(Duration::ZERO).unwrap_err();
    assert!(matches!(load.error, Error::Timeout(_)), "all of it was beside the load");
    load.buffer.unwrap().cancel();
    let load = rig.copier().upload(bytes, &memory).unwrap();
    assert!(load.wait_landed(LEN as u64));
    assert!(!load.wait_landed(LEN as u64 + 1), "there is no more");
    let progress = load.progress();
    assert!(progress.over && progress.done == progress.total && progress.remaining() == Some(Duration::ZERO));
    load.wait().unwrap();
}

/// A worker that is about to call a source or a sink owns chunks of that job only: it lets its other chunks
/// end before. A stream of transfers in the other direction does not keep it from that.
#[test]
fn neither_direction_keeps_sources_and_sinks_of_the_other_from_going() {
    const LEN: usize = 2 << 20;
    const MOST: usize = 100;
    type Going = Box<dyn Fn() -> bool>;
    for threads in [1, 3] {
        let rig = Rig::new(HostConfig::new().late(Duration::from_micros(300), 3), 64 << 20);
        let copier = rig.builder().threads(threads).build().unwrap();
        let (bytes, memory) = (Arc::new(pattern(LEN, 6)), rig.device.alloc(LEN).unwrap());
        let others: [_; 3] = std::array::from_fn(|_| rig.device.alloc(LEN).unwrap());
        let place = |n: usize| others[n].slice(..).unwrap();
        // Keeps three transfers going until `is_over`, which is to be before `MOST` of them have ended.
        let beside = |start: &dyn Fn(usize) -> Going, is_over: &dyn Fn() -> bool| {
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
            going.iter().for_each(|is_over| until("it is over", is_over));
        };
        let download = |n: usize| -> Going {
            let sent = copier.download_pages(vec![(place(n), rig.pool.checkout(LEN).unwrap())]).unwrap();
            Box::new(move || sent.is_over())
        };
        let upload = |n: usize| -> Going {
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
        let save = copier.download(&memory, sink(|_, _: &[u8]| Ok(()))).unwrap();
        beside(&upload, &|| save.is_over());
        save.wait().map(drop).map_err(|failed| failed.error).unwrap();
    }
}

/// Bulk chunks keep their segments for as long as the rate wants. The foreground, which the rate does not
/// hold up, has one of its own, also where there are few.
#[test]
fn the_foreground_finds_a_segment_beside_all_that_wait_for_the_rate() {
    const LEN: usize = 1 << 20;
    for threads in [1, 4] {
        let rig = Rig::plain();
        let copier = rig.builder().threads(threads).share(600 << 10).rate(1 << 10).build().unwrap();
        let memory: [_; 6] = std::array::from_fn(|_| rig.device.alloc(LEN).unwrap());
        let loads: Vec<_> =
            memory[..5].iter().map(|memory| copier.upload(vec![1; LEN], memory).unwrap()).collect();
        // They take what they can get.
        std::thread::sleep(Duration::from_millis(50));
        let urgent = copier.with_priority(Priority::Foreground);
        let sent = urgent.upload(vec![2; LEN], &memory[5]).unwrap().wait_timeout(Duration::from_secs(20));
        assert!(!loads.iter().any(Transfer::is_over));
        loads.iter().for_each(Transfer::cancel);
        sent.unwrap_or_else(|_| panic!("{threads} threads: the foreground waits for the rate")).unwrap();
        drop(loads);
    }
}

//! Transfers that wait for a segment, for a permit or for the pool, where only other transfers can make
//! room: they go on when there is some.

use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::setup::{Node, Setup};
use crate::support::downloaded;
use pinpool::copier::{FileSink, Fill, Priority, Source};
use pinpool::host::HostConfig;
use pinpool::{Error, Request};

use super::{HANG, Rig, Whole, file_of, io, pattern, reader, sink, source, told, until};

/// Bytes that the copier cannot take for memory.
fn opaque(bytes: Vec<u8>) -> impl Source {
    let len = bytes.len();
    source("opaque", len, move |offset, into: &mut Fill<'_>| {
        into.push(&bytes[offset as usize..]);
        Ok(())
    })
}

/// The worker that waits in the pool's queue for all of them leaves it, and another has to join it.
#[test]
fn a_cancelled_transfer_leaves_its_place_in_the_pools_queue_to_another() {
    let rig = Rig::new(HostConfig::new(), 2 << 20);
    let copier = rig.builder().threads(4).build().unwrap();
    let bytes = pattern(1 << 20, 3);
    let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
    copier.upload_slice(&bytes, &memory[0]).unwrap();
    rig.all_is_back();
    let all = rig.emptied();
    let first = copier.download(&memory[0], Whole::default()).unwrap();
    until("it waits for the pool", || rig.pool.stats().waiting == 1);
    let second = copier.upload(bytes.clone(), &memory[1]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    first.cancel();
    // Longer than a worker takes to see that.
    std::thread::sleep(Duration::from_millis(500));
    drop(all);
    assert!(second.wait_timeout(HANG).is_ok(), "no worker is in the pool's queue any more");
    assert!(matches!(first.wait().unwrap_err().error, Error::Cancelled { .. }));
    // A worker in the queue, and a thread that waits.
    rig.all_is_back();
    let all = rig.emptied();
    let first = copier.upload(bytes.clone(), &memory[0]).unwrap();
    until("it waits for the pool", || rig.pool.stats().waiting == 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            first.cancel();
            std::thread::sleep(Duration::from_millis(500));
            drop(all);
        });
        copier.upload_read(&mut &bytes[..], &memory[1]).unwrap();
    });
    drop(first);
    assert!(downloaded(&copier, &memory[1]) == bytes);
    rig.all_is_back();
}

/// A reader that makes a call before it gives its first bytes.
fn reads(call: impl FnOnce(), mut bytes: &[u8]) -> impl io::Read {
    let mut call = Some(call);
    reader(move |into| {
        call.take().into_iter().for_each(|call| call());
        io::Read::read(&mut bytes, into)
    })
}

/// A call does not take the last two segments of the pool: its reader may wait for a transfer that needs the second one.
#[test]
fn a_reader_leaves_a_segment_to_the_transfer_that_it_waits_for() {
    // The first copy is not complete when the second segment is filled.
    let rig = Rig::new(HostConfig::new().late(Duration::from_millis(20), 1), 2 << 20);
    let copier = rig.copier();
    let (bytes, memory) = (pattern(500_000, 4), [0, 1].map(|_| rig.device.alloc(500_000).unwrap()));
    rig.pool.wait_pinned(None).unwrap();
    let segment = Request::new(copier.stats().chunk + (12 << 10)).align(4096);
    let mut whole: Vec<_> = std::iter::from_fn(|| rig.pool.try_checkout(segment).ok()).collect();
    let _rest = rig.emptied();
    whole.truncate(whole.len() - 2);
    let mut calls = 0;
    let mut second = reader(|into| {
        calls += 1;
        if calls == 2 {
            let load = copier.upload(bytes.clone(), &memory[0]).unwrap();
            assert!(load.wait_timeout(HANG).is_ok(), "the call has both");
        }
        into.fill(7);
        Ok(into.len())
    });
    copier.upload_read(&mut second, &memory[1]).unwrap();
    assert!(downloaded(&copier, &memory[0]) == bytes);
}

#[test]
fn who_waits_for_the_pool_holds_neither_the_wire_nor_the_only_thread() {
    let rig = Rig::plain();
    let bytes = pattern(200_000, 6);
    let memory = [0, 1].map(|_| rig.device.alloc(200_000).unwrap());
    for threads in [1, 3] {
        let copier = rig.builder().threads(threads).depth(1).build().unwrap();
        memory.iter().for_each(|memory| copier.upload_slice(&bytes, memory).unwrap());
        for up in [false, true] {
            rig.all_is_back();
            let mut pinned = rig.pool.checkout(200_000).unwrap();
            pinned.try_extend_from_slice(&bytes).unwrap();
            let all = rig.emptied();
            let file = file_of(&[]);
            let staged: Box<dyn FnOnce() -> bool> = if up {
                let load = copier.upload(opaque(bytes.clone()), &memory[0]).unwrap();
                Box::new(move || load.wait_timeout(HANG).is_ok())
            } else {
                let load = copier.download(&memory[0], FileSink::create(file.path()).unwrap()).unwrap();
                Box::new(move || load.wait_timeout(HANG).is_ok())
            };
            until("it waits for the pool", || rig.pool.stats().waiting == 1);
            let plain = copier.upload_pages(vec![(pinned, memory[1].slice(..).unwrap())]).unwrap();
            assert!(plain.wait_timeout(HANG).is_ok(), "it needs no segment");
            drop(all);
            assert!(staged());
        }
    }
    rig.all_is_back();
}

/// A caller with a reader or a writer asks the pool itself while all workers are busy, also where they wait for the rate.
#[test]
fn readers_and_writers_are_served_while_all_workers_are_busy() {
    for (rate, rounds, up) in [(None, 3, true), (Some(256), 10, true), (None, 1, false)] {
        let rig = Rig::plain();
        let builder = rig.builder().threads(1);
        let copier = rate.map_or(builder.clone(), |rate| builder.rate(rate)).build().unwrap();
        let memory = [0, 1, 2].map(|_| rig.device.alloc(1 << 20).unwrap());
        copier.upload_slice(&pattern(64 << 10, 1), &memory[2]).unwrap();
        rig.all_is_back();
        // The only worker, with a segment.
        let (told, source) = told(64 << 10, 0);
        let slow = copier.upload(source, &memory[0]).unwrap();
        until("a segment is in use", || rig.pool.stats().checked_out_bytes > 0);
        let all = rig.emptied();
        let (done, hears_done) = std::sync::mpsc::channel();
        let urgent = copier.with_priority(Priority::Foreground);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if up {
                    let mut reads = reads(|| done.send(0).unwrap(), &[7; 1000]);
                    urgent.upload_read(&mut reads, &memory[1]).unwrap();
                } else {
                    let mut to = Vec::new();
                    copier.download_write(&memory[1], &mut to).unwrap();
                    done.send(to.len()).unwrap();
                }
            });
            // It has asked the pool in vain, more than once.
            std::thread::sleep(Duration::from_millis(rounds * 250));
            drop(all);
            let came = hears_done.recv_timeout(HANG);
            slow.cancel();
            drop(told);
            assert_eq!(came, Ok(if up { 0 } else { 1 << 20 }), "no thread asks the pool");
        });
        assert!(slow.wait().is_err());
        rig.all_is_back();
    }
}

/// Each copier asks the pool in vain now and then, while transfers of its own end. A thread that has looked meanwhile
/// must not sleep for what the pool never gave.
#[test]
fn copiers_on_a_pool_with_room_for_a_few_chunks_all_go_on() {
    let rig = Rig::new(HostConfig::new(), 400_000);
    let until = Instant::now() + Duration::from_secs(3);
    std::thread::scope(|scope| {
        for number in 0..6_u64 {
            let rig = &rig;
            scope.spawn(move || {
                let builder = rig.builder().threads(1 + number as usize % 3).share(400_000);
                let bulk = builder.build().unwrap();
                let urgent = bulk.with_priority(Priority::Foreground);
                let mut random = number * 77 + 1;
                while Instant::now() < until {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let len = 1 + (random >> 11) as usize % 500_000;
                    let memory = rig.device.alloc(len).unwrap();
                    let copier = if random >> 60 < 4 { &urgent } else { &bulk };
                    match random >> 40 & 3 {
                        0 | 1 => drop(copier.upload(vec![1; len], &memory).unwrap()),
                        2 => drop(copier.download(&memory, Whole::default()).unwrap()),
                        _ => {
                            let waited =
                                copier.download(&memory, Whole::default()).unwrap().wait_timeout(2 * HANG);
                            assert!(waited.is_ok(), "it does not move");
                        }
                    }
                }
            });
        }
    });
    rig.all_is_back();
}

#[test]
fn polling_for_a_part_moves_a_device_by_hand() {
    let Some(node) = Node::by_hand(7) else { return };
    let s = Setup::new(node, 4 << 20, |copier| copier.chunk(64 << 10).share(1 << 20));
    let transfer = s.copier.upload(pattern(1 << 20, 3), s.memory.slice(..1 << 20)).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let landed = (0..10_000).any(|_| {
        s.node.step();
        transfer.poll_landed(&mut cx, 1 << 20) == Poll::Ready(true)
    });
    assert!(landed, "{:?}", transfer.progress());
    transfer.wait().unwrap();
    s.all_back();
}

/// An arrival makes room for a copy and brings a chunk to be drained: two workers are woken.
#[test]
fn a_place_on_the_wire_is_told_beside_what_has_landed() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(2).depth(1).build().unwrap();
    let memory = [0, 1].map(|_| rig.device.alloc(64 << 10).unwrap());
    let (told, hears) = std::sync::mpsc::channel::<()>();
    let hears = std::sync::Mutex::new(hears);
    rig.node.hang(0);
    let waits = sink(move |_, _| {
        _ = hears.lock().unwrap().recv_timeout(2 * HANG);
        Ok(())
    });
    let slow = copier.download(&memory[0], waits).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let plain = copier.download(&memory[1], Whole::default()).unwrap();
    // Both workers have looked for a place.
    std::thread::sleep(Duration::from_millis(50));
    rig.node.resume(0);
    let over = plain.wait_timeout(HANG).is_ok();
    drop(told);
    slow.wait().unwrap();
    assert!(over, "no worker was told of the place");
    rig.all_is_back();
}

/// The reader may be waiting for one of the other transfers.
#[test]
fn a_reader_that_holds_a_segment_does_not_keep_others_from_what_the_pool_gets_back() {
    let rig = Rig::new(HostConfig::new(), 2 << 20);
    let copier = rig.copier();
    let bytes = pattern(200_000, 4);
    let memory = [0, 1].map(|_| rig.device.alloc(200_000).unwrap());
    copier.upload_slice(&bytes, &memory[0]).unwrap();
    rig.all_is_back();
    let beside = || {
        for upload in [false, true] {
            let all = rig.emptied();
            let third = rig.device.alloc(200_000).unwrap();
            let waits: Box<dyn FnOnce() -> bool> = if upload {
                let load = copier.upload(bytes.clone(), &third).unwrap();
                Box::new(move || load.wait_timeout(HANG).is_ok())
            } else {
                let load = copier.download(&memory[0], Whole::default()).unwrap();
                Box::new(move || load.wait_timeout(HANG).is_ok())
            };
            std::thread::sleep(Duration::from_millis(50));
            drop(all);
            assert!(waits(), "upload: {upload}");
        }
    };
    copier.upload_read(&mut reads(beside, &bytes), &memory[1]).unwrap();
    assert!(downloaded(&copier, &memory[1]) == bytes);
    rig.all_is_back();
}

//! What the caller's own thread brings or takes: where it ends, what it costs, and both at once.

use std::io::Read;
use std::sync::mpsc::{channel, sync_channel};
use std::time::Duration;

use crate::support::downloaded;
use pinpool::copier::Priority;
use pinpool::host::{Call, Failure, Fault};
use pinpool::{Copier, Error};

use super::{HANG, Rig, Whole, first, io, pattern, reader, told, until, writer};

#[test]
fn a_reader_may_end_where_a_chunk_does() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let chunk = copier.stats().chunk;
    let bytes = pattern(4 * chunk, 1);
    let memory = rig.device.alloc(1 << 20).unwrap();
    // (The first chunks of an upload may be shorter, each a power of two of pages.)
    for len in [0, 1, chunk / 8, chunk / 4, chunk / 2, chunk, 2 * chunk, 3 * chunk, 3 * chunk + 1, 4 * chunk]
    {
        copier.upload_slice(&vec![0xa5; 1 << 20], &memory).unwrap();
        assert_eq!(copier.upload_read(&mut &bytes[..len], &memory).unwrap(), len as u64);
        let back = downloaded(&copier, &memory);
        assert!(back[..len] == bytes[..len] && back[len..].iter().all(|byte| *byte == 0xa5), "{len}");
    }
    rig.all_is_back();
}

/// From the device to the device, by way of a writer and a reader.
fn round_trip(rig: &Rig, copier: Copier) {
    let (from, to) = (rig.device.alloc(4 << 20).unwrap(), rig.device.alloc(4 << 20).unwrap());
    let bytes = pattern(4 << 20, 2);
    rig.copier().upload_slice(&bytes, &from).unwrap();
    let (done, is_done) = channel();
    let (written, read) = sync_channel::<Vec<u8>>(0);
    let target = to.slice(..).unwrap();
    let (down, both) = (copier.clone(), done.clone());
    let threads = [
        std::thread::spawn(move || {
            let mut to = writer(|_, bytes| {
                written.send(bytes.to_vec()).map_err(io::Error::other)?;
                Ok(bytes.len())
            });
            both.send(down.download_write(&from, &mut to).unwrap()).unwrap();
        }),
        std::thread::spawn(move || {
            let mut there = Vec::new();
            let mut from = reader(|into| {
                if there.is_empty() {
                    there = read.recv().unwrap_or_default();
                }
                let n = into.len().min(there.len());
                into[..n].copy_from_slice(&there[..n]);
                there.drain(..n);
                Ok(n)
            });
            done.send(copier.upload_read(&mut from, target).unwrap()).unwrap();
        }),
    ];
    for _ in 0..2 {
        assert_eq!(is_done.recv_timeout(HANG).expect("neither waits for the other"), 4 << 20);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(downloaded(&rig.copier(), &to) == bytes);
}

#[test]
fn a_download_can_be_read_by_an_upload_of_the_same_copier() {
    let rig = Rig::plain();
    round_trip(&rig, rig.copier());
    round_trip(&rig, rig.copier().with_priority(Priority::Foreground));
    round_trip(&rig, rig.builder().share(300 << 10).build().unwrap());
    rig.all_is_back();
}

/// A writer that makes a call when it has its first bytes, and all that its transfer may have has landed.
fn calls(mut call: impl FnMut()) -> impl io::Write {
    first(move || {
        std::thread::sleep(Duration::from_millis(100));
        call();
    })
}

#[test]
fn a_writer_may_wait_for_another_download() {
    for priority in [Priority::Bulk, Priority::Foreground] {
        let rig = Rig::plain();
        let copier = rig.copier().with_priority(priority);
        let memory = [0, 1].map(|_| rig.device.alloc(4 << 20).unwrap());
        let bytes = pattern(4 << 20, 4);
        memory.iter().for_each(|memory| copier.upload_slice(&bytes, memory).unwrap());
        let beside = || {
            let Ok(back) = copier.download(&memory[1], Whole::default()).unwrap().wait_timeout(HANG) else {
                panic!("it has segments of its own")
            };
            assert!(back.unwrap().into_vec() == bytes);
        };
        copier.download_write(&memory[0], &mut calls(beside)).unwrap();
        // The same way once more, within.
        let (done, is_done) = channel();
        let (other, inner) = (copier.clone(), memory[1].slice(..).unwrap());
        let outer = memory[0].slice(..).unwrap();
        let thread = std::thread::spawn(move || {
            let nested = || assert_eq!(other.download_write(&inner, &mut io::sink()).unwrap(), 4 << 20);
            copier.download_write(&outer, &mut calls(nested)).unwrap();
            done.send(()).unwrap();
        });
        is_done.recv_timeout(HANG).expect("each has segments of its own");
        thread.join().unwrap();
        rig.all_is_back();
    }
}

/// Two of them together leave room for what their writers wait for.
#[test]
fn writers_of_two_downloads_may_wait_for_others() {
    for (priority, share) in
        [(Priority::Bulk, 300 << 10), (Priority::Foreground, 400 << 10), (Priority::Bulk, 1 << 20)]
    {
        let rig = Rig::plain();
        let copier = rig.builder().share(share).build().unwrap().with_priority(priority);
        let memory: Vec<_> = (0..3).map(|_| rig.device.alloc(2 << 20).unwrap()).collect();
        let bytes = pattern(2 << 20, 6);
        memory.iter().for_each(|memory| copier.upload_slice(&bytes, memory).unwrap());
        let (done, is_done) = channel();
        let threads: Vec<_> = (0..2)
            .map(|i| {
                let (from, other) = (memory[i].slice(..).unwrap(), memory[2].slice(..).unwrap());
                let (copier, done) = (copier.clone(), done.clone());
                std::thread::spawn(move || {
                    let beside = || drop(downloaded(&copier, &other));
                    copier.download_write(&from, &mut calls(beside)).unwrap();
                    done.send(()).unwrap();
                })
            })
            .collect();
        (0..2).for_each(|_| is_done.recv_timeout(HANG).expect("one segment is left for others"));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        rig.all_is_back();
    }
}

/// A copy that is refused, and runs all the same, ends the call with segments filled, in flight and not taken yet.
#[test]
fn a_device_that_fails_under_a_reader_leaves_no_segment_in_use() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(1).share(500 << 10).build().unwrap();
    let (memory, chunk) = (rig.device.alloc(1 << 20).unwrap(), copier.stats().chunk);
    let bytes = pattern(6 * chunk, 1);
    for nth in [0, 1, 2, 4] {
        for failure in [Failure::RunsAnyway, Failure::Transient] {
            rig.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
            let failed = copier.upload_read(&mut &bytes[..], &memory).unwrap_err();
            assert!(!matches!(failed, Error::Read { .. }), "copy {nth}, {failure:?}: {failed}");
        }
    }
    let after = copier.upload(vec![3; 4 * chunk], &memory).unwrap();
    after.wait_timeout(HANG).expect("a segment is left").unwrap();
    rig.all_is_back();
}

/// Chunks that were read and that no worker had taken when the reader failed leave the copier's share.
#[test]
fn readers_that_fail_leave_no_segment_in_use() {
    let rig = Rig::plain();
    // One thread, and room for few segments.
    let copier = rig.builder().threads(1).share(500 << 10).build().unwrap();
    let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
    let chunk = copier.stats().chunk;
    for round in 0..12 {
        // The only worker.
        let (told, source) = told(chunk, 0);
        let held = copier.upload(source, &memory[0]).unwrap();
        until("a segment is in use", || rig.pool.stats().checked_out_bytes > 0);
        let bytes = pattern(2 * chunk + 10, round);
        let broken = reader(|_| Err(io::Error::other("the line is dead")));
        let failed = copier.upload_read(&mut (&bytes[..]).chain(broken), &memory[1]).unwrap_err();
        assert!(matches!(failed, Error::Read { .. }), "round {round}: {failed}");
        // With a segment too few the reader would have had to wait for the worker.
        assert!(!held.progress().over, "round {round}: segments are still in use");
        drop(told);
        held.wait().unwrap();
    }
    let after = copier.upload(vec![3; 4 * chunk], &memory[1]).unwrap();
    after.wait_timeout(HANG).expect("a segment is left").unwrap();
    rig.all_is_back();
}

//! What the caller's own thread brings or takes: where it ends, what it costs, and both at once.

use std::io::{self, Read};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

use crate::support::downloaded;
use pinpool::copier::{Fill, Priority, Source};
use pinpool::host::{Call, Failure, Fault};
use pinpool::{Copier, Error};

use super::{Rig, Whole, pattern};

/// Longer than anything takes.
const HANG: Duration = Duration::from_secs(10);

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

/// A reader that records what it is given.
struct Looks {
    left: usize,
    given: u64,
}

impl Read for Looks {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.given += into.len() as u64;
        let n = into.len().min(self.left).min(1000);
        // What is behind the bytes that are there is as the last call left it.
        into.fill(7);
        self.left -= n;
        Ok(n)
    }
}

#[test]
fn a_reader_of_small_parts_fills_chunks() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let mut reader = Looks { left: 300_000, given: 0 };
    assert_eq!(copier.upload_read(&mut reader, &memory).unwrap(), 300_000);
    assert!(reader.given > 300_000);
    assert!(downloaded(&copier, memory.slice(..300_000).unwrap()).iter().all(|byte| *byte == 7));
    rig.all_is_back();
}

/// What is written to it can be read, by another thread.
#[derive(Default)]
struct Pipe<E>(E, Vec<u8>);

impl io::Write for Pipe<SyncSender<Vec<u8>>> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Pipe<Receiver<Vec<u8>>> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.1.is_empty() {
            self.1 = self.0.recv().unwrap_or_default();
        }
        let n = into.len().min(self.1.len());
        into[..n].copy_from_slice(&self.1[..n]);
        self.1.drain(..n);
        Ok(n)
    }
}

/// From the device to the device, by way of a writer and a reader.
fn round_trip(rig: &Rig, copier: Copier) {
    let (from, to) = (rig.device.alloc(4 << 20).unwrap(), rig.device.alloc(4 << 20).unwrap());
    let bytes = pattern(4 << 20, 2);
    rig.copier().upload_slice(&bytes, &from).unwrap();
    let (done, is_done) = channel();
    let (written, read) = sync_channel(0);
    let target = to.slice(..).unwrap();
    let (down, both) = (copier.clone(), done.clone());
    let threads = [
        std::thread::spawn(move || {
            both.send(down.download_write(&from, &mut Pipe(written, Vec::new())).unwrap()).unwrap();
        }),
        std::thread::spawn(move || {
            done.send(copier.upload_read(&mut Pipe(read, Vec::new()), target).unwrap()).unwrap();
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

/// A slow writer keeps no more than its half from others.
#[test]
fn a_slow_writer_of_the_foreground_leaves_room() {
    let rig = Rig::plain();
    let first = rig.copier().with_priority(Priority::Foreground);
    let (from, to) = (rig.device.alloc(4 << 20).unwrap(), rig.device.alloc(4 << 20).unwrap());
    let bytes = pattern(4 << 20, 3);
    first.upload_slice(&bytes, &from).unwrap();
    struct Slow<F: FnMut()>(F, usize);
    impl<F: FnMut()> io::Write for Slow<F> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1 += 1;
            if self.1 == 3 {
                (self.0)();
            }
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let beside = || {
        // All that the writer's transfer may have has landed.
        std::thread::sleep(Duration::from_millis(100));
        let since = Instant::now();
        let load = first.upload(bytes.clone(), &to).unwrap();
        assert!(load.wait_timeout(HANG).is_ok(), "it has segments of its own");
        assert!(since.elapsed() < HANG);
    };
    first.download_write(&from, &mut Slow(beside, 0)).unwrap();
    assert!(downloaded(&first, &to) == bytes);
    rig.all_is_back();
}

/// A writer that makes a call when it has its first bytes.
struct Calls<F: FnMut()>(Option<F>);

impl<F: FnMut()> io::Write for Calls<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(mut call) = self.0.take() {
            // All that its transfer may have has landed.
            std::thread::sleep(Duration::from_millis(100));
            call();
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
        copier.download_write(&memory[0], &mut Calls(Some(beside))).unwrap();
        // The same way once more, within.
        let (done, is_done) = channel();
        let (other, inner) = (copier.clone(), memory[1].slice(..).unwrap());
        let outer = memory[0].slice(..).unwrap();
        let thread = std::thread::spawn(move || {
            let nested = || assert_eq!(other.download_write(&inner, &mut io::sink()).unwrap(), 4 << 20);
            copier.download_write(&outer, &mut Calls(Some(nested))).unwrap();
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
                    copier.download_write(&from, &mut Calls(Some(beside))).unwrap();
                    done.send(()).unwrap();
                })
            })
            .collect();
        (0..2).for_each(|_| is_done.recv_timeout(HANG).expect("one segment is left for others"));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        rig.all_is_back();
    }
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
        let (told, hears) = channel::<()>();
        let hears = Mutex::new(hears);
        let held = copier.upload(Held(chunk, hears), &memory[0]).unwrap();
        let since = Instant::now();
        while rig.pool.stats().checked_out_bytes == 0 {
            assert!(since.elapsed() < HANG);
            std::thread::yield_now();
        }
        let bytes = pattern(2 * chunk + 10, round);
        let failed = copier.upload_read(&mut (&bytes[..]).chain(Broken), &memory[1]).unwrap_err();
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

struct Broken;

impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::other("the line is dead"))
    }
}

/// So many bytes, when its sender is dropped.
struct Held(usize, Mutex<Receiver<()>>);

impl Source for Held {
    fn len(&self) -> u64 {
        self.0 as u64
    }
    fn fill(&self, _: u64, into: &mut Fill<'_>) -> io::Result<()> {
        let _ = self.1.lock().unwrap().recv_timeout(HANG);
        into.push(&vec![7; into.remaining()]);
        Ok(())
    }
}

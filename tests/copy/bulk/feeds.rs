//! What the caller's own thread brings or takes: where it ends, what it costs, and both at once.

use std::io::{self, Read};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use pinpool::copier::Priority;
use pinpool::host::{Call, Failure, Fault};
use pinpool::{Copier, Pool, Unpinned};

use super::{Rig, pattern};

/// Longer than anything takes.
const HANG: Duration = Duration::from_secs(10);

#[test]
fn a_reader_may_end_where_a_chunk_does() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let chunk = copier.chunk();
    let bytes = pattern(4 * chunk, 1);
    let memory = rig.device.alloc(1 << 20).unwrap();
    // (The first chunks of an upload may be shorter, each a power of two of pages.)
    for len in [0, 1, chunk / 8, chunk / 4, chunk / 2, chunk, 2 * chunk, 3 * chunk, 3 * chunk + 1, 4 * chunk]
    {
        copier.upload_slice(&vec![0xa5; 1 << 20], &memory).unwrap();
        assert_eq!(copier.upload_read(&mut &bytes[..len], &memory).unwrap(), len as u64);
        let back = copier.download_vec(&memory).unwrap();
        assert!(back[..len] == bytes[..len] && back[len..].iter().all(|byte| *byte == 0xa5), "{len}");
        let mut feed = copier.feed(&memory).unwrap();
        feed.push_blocking(&bytes[..len]).unwrap();
        assert_eq!(feed.finish_blocking().unwrap(), len as u64);
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
    assert!(copier.download_vec(memory.slice(..300_000).unwrap()).unwrap().iter().all(|byte| *byte == 7));
    rig.all_is_back();
}

/// From the device to the device, by way of the caller.
fn round_trip(rig: &Rig, copier: Copier) {
    let (from, to) = (rig.device.alloc(4 << 20).unwrap(), rig.device.alloc(4 << 20).unwrap());
    let bytes = pattern(4 << 20, 2);
    rig.copier().upload_slice(&bytes, &from).unwrap();
    let (done, is_done) = channel();
    let target = to.slice(..).unwrap();
    let thread = std::thread::spawn(move || {
        let mut feed = copier.feed(target).unwrap();
        let written = copier.download_write(&from, &mut feed).unwrap();
        done.send((written, feed.finish_blocking().unwrap())).unwrap();
    });
    assert_eq!(is_done.recv_timeout(HANG).expect("neither waits for the other"), (4 << 20, 4 << 20));
    thread.join().unwrap();
    assert!(rig.copier().download_vec(&to).unwrap() == bytes);
}

#[test]
fn a_download_can_be_written_to_a_feed_of_the_same_copier() {
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
    assert!(first.download_vec(&to).unwrap() == bytes);
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
            let Ok(back) = copier.download_collect(&memory[1]).unwrap().wait_timeout(HANG) else {
                panic!("it has segments of its own")
            };
            assert!(back.unwrap().into_vec().unwrap() == bytes);
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

#[test]
fn one_thread_may_fill_two_feeds_by_turns() {
    let rig = Rig::plain();
    let copier = rig.builder().share(300 << 10).build().unwrap();
    let memory = [0, 1].map(|_| rig.device.alloc(100_000).unwrap());
    let bytes = pattern(100_000, 5);
    let (done, is_done) = channel();
    let (sent, to) = (bytes.clone(), [0, 1].map(|i: usize| memory[i].slice(..).unwrap()));
    let feeding = copier.clone();
    let thread = std::thread::spawn(move || {
        let mut feeds = to.map(|to| feeding.feed(to).unwrap());
        for part in sent.chunks(1000) {
            feeds.iter_mut().for_each(|feed| feed.push_blocking(part).unwrap());
        }
        feeds.into_iter().for_each(|feed| assert_eq!(feed.finish_blocking().unwrap(), 100_000));
        done.send(()).unwrap();
    });
    is_done.recv_timeout(HANG).expect("neither waits for the other");
    thread.join().unwrap();
    assert!(memory.iter().all(|memory| copier.download_vec(memory).unwrap() == bytes));
    rig.all_is_back();
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
                    let beside = || drop(copier.download_vec(&other).unwrap());
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

/// Chunks that were fed and that no worker had taken when the transfer failed leave the copier's share.
#[test]
fn feeds_that_fail_leave_no_segment_in_use() {
    const CHUNK: usize = 1 << 20;
    let rig = Rig::plain();
    let pool = Pool::builder(&rig.device).capacity(32 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let builder = Copier::builder(&pool, &rig.device).threads(1).chunk(CHUNK).share(14 << 20);
    let copier = builder.build().unwrap();
    let urgent = copier.with_priority(Priority::Foreground);
    let (memory, many) = (rig.device.alloc(8 << 20).unwrap(), rig.device.alloc(2 << 20).unwrap());
    let pause = || std::thread::sleep(Duration::from_millis(50));
    for round in 0..12 {
        rig.node.hang(0);
        rig.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::RunsAnyway });
        let mut feed = urgent.feed(&memory).unwrap();
        // Refused, and in flight.
        feed.push_blocking(&pattern(CHUNK, 1)).unwrap();
        pause();
        // The worker has as many chunks as it may have.
        copier.set_rate(Some(1 << 20));
        let waits: Vec<_> = (0..20)
            .map(|n| {
                let mut buf = pool.checkout(64 << 10).unwrap();
                buf.try_resize(64 << 10, 1).unwrap();
                copier.upload_buffers(vec![(buf, many.slice(n * (64 << 10)..).unwrap())]).unwrap()
            })
            .collect();
        pause();
        let feeds = std::thread::spawn(move || {
            feed.push_blocking(&pattern(2 * CHUNK, 2)).and_then(|()| feed.finish_blocking())
        });
        pause();
        rig.node.resume(0);
        assert!(feeds.join().unwrap().is_err(), "round {round}");
        copier.set_rate(None);
        waits.into_iter().for_each(|sent| drop(sent.wait().unwrap()));
        let after = copier.upload(vec![3; 64], &memory).unwrap();
        after.wait_timeout(HANG).expect("a segment is left").unwrap();
    }
}

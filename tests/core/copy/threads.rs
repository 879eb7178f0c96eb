//! Which threads move a transfer, and what code of the program's that runs on one of them may do.

use std::pin::Pin;
use std::sync::mpsc::{Receiver, channel};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use crate::support::downloaded;
use pinpool::copier::CopierBuilder;
use pinpool::copier::{Fill, Priority, Transfer};
use pinpool::host::{Call, Failure, HostConfig};
use pinpool::{DeviceSlice, Error, ErrorClass};

use super::bulk::{Blocks, sink, source};
use super::setup::{HANG, Setup, ends, late, until};
use crate::support::{bytes, in_use};

const LEN: usize = 300;
const PIECE: usize = 512;

fn setup(config: HostConfig, options: impl FnOnce(CopierBuilder) -> CopierBuilder) -> Setup {
    Setup::new(config, 8 << 20, options)
}

impl Setup {
    fn range(&self, i: usize) -> DeviceSlice {
        self.memory.slice(i * PIECE..i * PIECE + LEN).unwrap()
    }

    fn start(&self, i: usize) -> Transfer<Vec<u8>> {
        self.copier.upload(bytes(i, LEN), self.range(i)).unwrap()
    }

    fn is_there(&self, i: usize) {
        assert!(*self.read(&self.range(i)) == *bytes(i, LEN), "piece {i}");
    }
}

/// Whether a waker ran on a thread of the copier's, and how its calls ended.
type Told = (bool, Vec<Result<(), Error>>);

/// A waker that makes a call which starts a transfer, and calls that would wait.
fn waker(s: &Setup) -> (Waker, Receiver<Told>) {
    let (told, hears) = channel();
    let (pool, copier, stream) = (s.pool.clone(), s.copier.clone(), s.device.stream().unwrap());
    let memory = s.memory.slice(16 << 20..17 << 20).unwrap();
    let called = move || {
        // More bytes than are copied at once.
        let mut bytes = vec![0; memory.len()];
        let start = || copier.upload(vec![7; LEN], memory.slice(..LEN));
        let copied = || {
            let mut buf = pool.try_checkout(LEN)?;
            buf.extend_from_slice(&[7; LEN]);
            stream.upload(buf, memory.slice(..LEN))?.wait().map(drop)
        };
        let said = vec![
            start().map(drop).map_err(|refused| refused.error),
            copier.upload_slice(&bytes, &memory),
            copier.download_slices(&mut [(memory.clone(), &mut bytes[..])]),
            // What is over already is not waited for.
            start().unwrap().wait().map(drop).map_err(|refused| refused.error),
            start().unwrap().order(&stream),
            copied(),
        ];
        let thread = std::thread::current();
        let _ = told.send((thread.name().is_some_and(|name| name.starts_with("pinpool-copy")), said));
    };
    (crate::support::waker(called), hears)
}

/// The calls of a waker: the first starts a transfer; the next two would wait for a thread such as the waker's.
fn are_as_due(said: &[Result<(), Error>]) {
    let is_refused = |said: &Result<(), Error>| matches!(said, Err(Error::Unsupported(_)));
    assert!(said[0].is_ok() && said[1..3].iter().all(is_refused), "{said:?}");
    assert!(said[3..].iter().all(|said| said.is_ok() || is_refused(said)), "{said:?}");
}

/// Wakers run on threads that move chunks. They may start transfers, and are refused where they would wait.
#[test]
fn a_waker_starts_transfers_and_does_not_wait() {
    ends("a transfer whose waker waits", || {
        let s = setup(late(100), |copier| copier.threads(1).chunk(16 << 10).share(100 << 10));
        let (mut there, since) = (0, Instant::now());
        while there < 5 {
            assert!(since.elapsed() < HANG, "never on the copier's thread");
            let (waker, hears) = waker(&s);
            let mut sent = s.start(0);
            if Pin::new(&mut sent).poll(&mut Context::from_waker(&waker)).is_pending() {
                let (is_the_copiers, said) = hears.recv_timeout(HANG).expect("the waker returns");
                if is_the_copiers {
                    are_as_due(&said);
                    there += 1;
                }
                sent.wait().unwrap();
            }
        }
    });
}

/// So it is on the thread that sees copies of streams complete: the wait would be for itself.
#[test]
fn a_waker_of_a_stream_cannot_wait_for_a_transfer() {
    let s = setup(HostConfig::new(), |copier| copier);
    let (waker, hears) = waker(&s);
    s.node.hang(0);
    let mut sent = s.device.stream().unwrap().upload(s.filled(&[1; LEN]), s.range(0)).unwrap();
    assert!(Pin::new(&mut sent).poll(&mut Context::from_waker(&waker)).is_pending());
    drop(waker);
    s.node.resume(0);
    let (_, said) = hears.recv_timeout(HANG).expect("it does not wait for itself");
    are_as_due(&said);
    drop(sent);
}

/// A worker that is about to call what may block leaves other work to one that sleeps. Here all that are
/// awake turn to a source of the foreground, whose chunks are short, so that few workers are woken for it.
#[test]
fn a_transfer_does_not_wait_for_sources_that_block() {
    ends("a transfer beside a source that blocks", || {
        let s = setup(HostConfig::new(), |copier| copier.threads(3).chunk(16 << 10).depth(1));
        for _ in 0..5 {
            s.start(0).wait().unwrap();
            s.all_is_back();
            s.node.hang(0);
            let first = s.start(0);
            until("the first goes", || s.pool.stats().in_flight_bytes > 0);
            let blocks = Blocks::default();
            let urgent = s.copier.with_priority(Priority::Foreground);
            let upload = urgent.upload(blocks.source(32 << 10, 0), s.memory.slice(1 << 20..)).unwrap();
            until("the source is asked", || blocks.calls() >= 1);
            // The worker of the first is to send this one.
            let second = s.start(1);
            s.node.resume(0);
            until("the first is over", || first.is_over());
            until("all of the source is asked for", || blocks.calls() == 2);
            second.wait_timeout(HANG).expect("it waits for the source").unwrap();
            blocks.go_on();
            upload.wait().unwrap();
            s.is_there(1);
            s.all_is_back();
        }
    });
}

/// One thread and one segment are left for transfers that cannot block, for which a source or sink may wait.
#[test]
fn sources_and_sinks_wait_for_another_transfer() {
    for (threads, share, upload) in
        [(2, 4 << 20, true), (8, 4 << 20, false), (8, 130 << 10, true), (8, 70 << 10, false)]
    {
        ends(&format!("{threads} threads, a share of {share}, upload: {upload}"), move || {
            let s = setup(HostConfig::new(), |copier| copier.threads(threads).chunk(16 << 10).share(share));
            let (slice, other) = (bytes(1, 512 << 10), s.memory.slice(..512 << 10).unwrap());
            let urgent = s.copier.with_priority(Priority::Foreground);
            for copier in [&s.copier, &urgent] {
                let blocks = Blocks::default();
                let place = s.memory.slice(1 << 20..2 << 20).unwrap();
                let is_over: Box<dyn Fn() -> bool> = if upload {
                    let sent = urgent.upload(blocks.source(1 << 20, 0), place).unwrap();
                    Box::new(move || sent.is_over())
                } else {
                    let waits = blocks.clone();
                    let sink = sink(move |_, _: &[u8]| {
                        waits.wait();
                        Ok(())
                    });
                    let sent = urgent.download(place, sink).unwrap();
                    Box::new(move || sent.is_over())
                };
                until("it is asked", || blocks.calls() > 0);
                // Until all have called that will.
                std::thread::sleep(Duration::from_millis(20));
                assert!(blocks.calls() <= threads);
                copier.upload_slice(&slice, &other).unwrap();
                blocks.go_on();
                until("it goes on", is_over);
                assert!(downloaded(&s.copier, &other) == slice);
            }
        });
    }
}

/// Nothing of the pool is in use when a caller hears of the only chunk's error.
#[test]
fn a_failed_source_leaves_nothing_in_use() {
    let s = setup(HostConfig::new(), |copier| copier.threads(1));
    for _ in 0..20 {
        let fails = source("fails", LEN, |_, _: &mut Fill<'_>| Err(std::io::Error::other("no more")));
        let failed = s.copier.upload(fails, s.range(0)).unwrap().wait().map(drop).unwrap_err();
        assert!(matches!(failed.error, Error::Read { .. }), "{}", failed.error);
        assert_eq!(in_use(&s.pool), 0);
    }
}

// --- short slices, on the calling thread -----------------------------------------------------------------------------

/// The longest that are copied at once.
const LONGEST: usize = 256 << 10;

#[test]
fn short_slices_need_no_memory_of_the_pool() {
    let s = setup(HostConfig::new(), |copier| copier);
    s.pool.wait_pinned(None).unwrap();
    let mut taken = s.emptied();
    for len in [1, LEN, LONGEST] {
        let mut back = vec![0; len];
        s.copier.upload_slice(&bytes(len, len), &s.memory).unwrap();
        s.copier.download_slice(s.memory.slice(..len).unwrap(), &mut back).unwrap();
        assert!(back == bytes(len, len), "{len} bytes");
    }
    let stats = s.copier.stats();
    assert_eq!((stats.chunks, stats.batch_bytes), (6, 2 * (1 + LEN + LONGEST) as u64));
    std::thread::scope(|scope| {
        let longer = scope.spawn(|| s.copier.upload_slice(&bytes(1, LONGEST + 1), &s.memory));
        std::thread::sleep(Duration::from_millis(5));
        assert!(!longer.is_finished(), "a chunk needs a segment");
        taken.clear();
        longer.join().unwrap().unwrap();
    });
}

/// An error of the driver's is that call's alone.
#[test]
fn the_driver_refuses_a_short_slice() {
    let s = setup(HostConfig::new(), |copier| copier);
    let (place, mut back) = (s.memory.slice(..LEN).unwrap(), [0; LEN]);
    let fail = || s.fail(Call::CopyBlocking, 0, Failure::Argument);
    fail();
    match s.copier.upload_slice(&bytes(1, LEN), &place) {
        Err(Error::Transfer { what, offset: 0, cause }) => {
            assert_eq!((&*what, cause.class()), ("bytes in memory", ErrorClass::Argument));
        }
        other => panic!("{other:?}"),
    }
    fail();
    let said = s.copier.download_slice(&place, &mut back);
    assert!(matches!(said, Err(Error::Transfer { offset: 0, .. })), "{said:?}");
    assert!(s.calm());
    s.copier.upload_slice(&bytes(2, LEN), &place).unwrap();
    s.copier.download_slice(&place, &mut back).unwrap();
    assert!(back[..] == bytes(2, LEN));
    s.node.kill(0);
    let lost = s.copier.upload_slice(&bytes(1, LEN), &place).unwrap_err();
    assert_eq!(lost.class(), ErrorClass::DeviceLost, "{lost}");
}

/// The rate of bulk copies holds for short slices, too.
#[test]
fn short_slices_keep_to_the_rate() {
    let s = setup(HostConfig::new(), |copier| copier.rate(1 << 20));
    let since = Instant::now();
    for i in 0..10 {
        s.copier.upload_slice(&bytes(i, 16 << 10), s.memory.slice(i * LONGEST..).unwrap()).unwrap();
    }
    // All but the last are to have had their time, of which a copy may be ten milliseconds late.
    assert!(since.elapsed() >= Duration::from_millis(9 * 1000 / 64 - 10), "{:?}", since.elapsed());
}

//! Which thread moves a small transfer: the copier's own, one that waits for it, or one that moves the device by hand;
//! and what a waker on such a thread may do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use crate::support::downloaded;
use pinpool::copier::{CopyRange, Fill, Priority, Source, Transfer};
use pinpool::host::{Call, Failure, HostConfig};
use pinpool::{Copier, CopierBuilder, DeviceSlice, Error, Stream};

use crate::bulk::{sink, source};
use crate::setup::{HANG, Node, Setup, ends, until};
use crate::support::{bytes, in_use};

const LEN: usize = 300;
const PIECE: usize = 512;

fn setup(node: impl Into<Node>, options: impl FnOnce(CopierBuilder) -> CopierBuilder) -> Setup {
    Setup::new(node, 8 << 20, options)
}

impl Setup {
    fn range(&self, i: usize) -> DeviceSlice {
        self.memory.slice(i * PIECE..i * PIECE + LEN).unwrap()
    }

    fn start(&self, i: usize) -> Transfer<Vec<u8>> {
        self.copier.upload(bytes(i, LEN), self.range(i)).unwrap()
    }

    fn all(&self, count: usize) -> Vec<Transfer<Vec<u8>>> {
        (0..count).map(|i| self.start(i)).collect()
    }

    fn is_there(&self, i: usize) {
        let mut back = vec![0; LEN];
        self.copier.download_slice(self.range(i), &mut back).unwrap();
        assert!(back == bytes(i, LEN), "piece {i}");
    }
}

/// A failed event is made up for by a later one.
#[test]
fn events_fail() {
    for share in [4 << 20, 100 << 10] {
        for node in Node::each() {
            let s = setup(node, |copier| copier.threads(2).chunk(16 << 10).share(share));
            for call in [Call::Record, Call::Query, Call::CreateEvent] {
                (0..3).for_each(|nth| s.node.fail(call, nth, Failure::Transient));
                s.all(100).into_iter().for_each(|sent| drop(sent.wait().unwrap()));
                (0..100).for_each(|i| s.is_there(i));
                s.node.calm();
                s.all_back();
            }
        }
    }
}

/// What a waker tries, though it must not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tries {
    Start,
    Wait,
    Order,
    /// Calls that block, of more bytes than are copied at once.
    Block,
}

/// Whether the waker ran on a thread of the copier's, and how its try ended.
type Told = (bool, Result<(), Error>);

struct Waiter {
    tries: Tries,
    copier: Copier,
    stream: Stream,
    memory: DeviceSlice,
    blocks: DeviceSlice,
    told: SyncSender<Told>,
}

impl Waiter {
    fn waker(s: &Setup, tries: Tries) -> (Waker, Receiver<Told>) {
        let (told, hears) = sync_channel(1000);
        let (copier, stream) = (s.copier.clone(), s.device.stream().unwrap());
        let (memory, blocks) = (s.range(900), s.memory.slice(16 << 20..17 << 20).unwrap());
        (Waker::from(Arc::new(Self { tries, copier, stream, memory, blocks, told })), hears)
    }

    fn run(&self) -> Result<(), Error> {
        let sent = self.copier.upload(vec![7; LEN], &self.memory).map_err(|refused| refused.error)?;
        match self.tries {
            Tries::Start => {
                drop(sent);
                Ok(())
            }
            Tries::Wait => sent.wait().map(drop).map_err(|refused| refused.error),
            Tries::Order => sent.order(&self.stream),
            Tries::Block => {
                let mut bytes = vec![0; self.blocks.len()];
                let up = self.copier.upload_slice(&bytes, &self.blocks);
                assert!(matches!(up, Err(Error::Unsupported(_))), "{up:?}");
                self.copier.download_slices(&mut [(self.blocks.clone(), &mut bytes[..])])
            }
        }
    }
}

impl Wake for Waiter {
    fn wake(self: Arc<Self>) {
        let is_the_copiers =
            std::thread::current().name().is_some_and(|name| name.starts_with("pinpool-copy"));
        let result = self.run();
        let _ = self.told.send((is_the_copiers, result));
    }
}

/// Wakers run on threads that move chunks. They may start transfers, and are refused where they would wait.
#[test]
fn a_waker_starts_transfers_and_does_not_wait() {
    for tries in [Tries::Start, Tries::Wait, Tries::Order, Tries::Block] {
        ends(&format!("{tries:?}"), move || {
            let config = HostConfig::new().late(Duration::from_micros(100), 3);
            let s = setup(config, |copier| copier.threads(1).chunk(16 << 10).share(100 << 10));
            let stream = s.device.stream().unwrap();
            let (mut there, since) = (0, Instant::now());
            while there < 5 {
                assert!(since.elapsed() < HANG, "{tries:?}: never on the copier's thread");
                let (waker, hears) = Waiter::waker(&s, tries);
                let mut sent = s.all(20);
                let mut first = sent.remove(0);
                let polled = std::pin::Pin::new(&mut first).poll(&mut Context::from_waker(&waker));
                drop(waker);
                if polled.is_pending() {
                    let (is_the_copiers, result) = hears.recv_timeout(HANG).expect("the waker returns");
                    if is_the_copiers {
                        let as_due = match tries {
                            Tries::Start => result.is_ok(),
                            Tries::Block => matches!(result, Err(Error::Unsupported(_))),
                            // What is over already is not waited for.
                            Tries::Wait | Tries::Order => {
                                matches!(result, Ok(()) | Err(Error::Unsupported(_)))
                            }
                        };
                        assert!(as_due, "{tries:?}: {result:?}");
                        there += 1;
                    }
                    first.wait().unwrap();
                }
                sent.into_iter().for_each(|sent| drop(sent.wait().unwrap()));
            }
            s.start(1).order(&stream).unwrap();
            s.all_back();
        });
    }
}

/// So it is on the thread that sees copies of streams complete: the wait would be for itself.
#[test]
fn a_waker_of_a_stream_cannot_wait_for_a_transfer() {
    let s = setup(HostConfig::new(), |copier| copier);
    let (waker, hears) = Waiter::waker(&s, Tries::Block);
    s.node.hang(true);
    let mut sent = s.device.stream().unwrap().upload(s.filled(&[1; LEN]), s.range(0)).unwrap();
    assert!(std::pin::Pin::new(&mut sent).poll(&mut Context::from_waker(&waker)).is_pending());
    drop(waker);
    s.node.hang(false);
    let (_, said) = hears.recv_timeout(HANG).expect("it does not wait for itself");
    assert!(matches!(said, Err(Error::Unsupported(_))), "{said:?}");
    drop(sent);
    s.all_back();
}

/// Blocks sources and sinks until they are told to go on.
#[derive(Clone, Default)]
struct Blocks(Arc<(AtomicUsize, AtomicBool)>);

impl Blocks {
    fn calls(&self) -> usize {
        self.0.0.load(Ordering::Relaxed)
    }

    fn go_on(&self) {
        self.0.1.store(true, Ordering::Relaxed);
    }

    fn wait(&self) {
        self.0.0.fetch_add(1, Ordering::Relaxed);
        while !self.0.1.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn source(&self, len: usize) -> impl Source + std::fmt::Debug + use<> {
        let blocks = self.clone();
        source("blocks", len, move |_, into: &mut Fill<'_>| {
            blocks.wait();
            into.push(&vec![7; into.remaining()]);
            Ok(())
        })
    }
}

/// A worker that is about to call what may block leaves other work to one that sleeps. Here all that are awake turn to a
/// source of the foreground, whose chunks are short, so that few workers are woken for it.
#[test]
fn a_transfer_does_not_wait_for_sources_that_block() {
    ends("a transfer beside a source that blocks", || {
        let s = setup(HostConfig::new(), |copier| copier.threads(3).chunk(16 << 10).depth(1));
        for _ in 0..5 {
            s.start(0).wait().unwrap();
            s.all_back();
            s.node.hang(true);
            let first = s.start(0);
            until("the first goes", || s.pool.stats().in_flight_bytes > 0);
            let blocks = Blocks::default();
            let urgent = s.copier.with_priority(Priority::Foreground);
            let upload = urgent.upload(blocks.source(32 << 10), s.memory.slice(1 << 20..)).unwrap();
            until("the source is asked", || blocks.calls() >= 1);
            // The worker of the first is to send this one.
            let second = s.start(1);
            s.node.hang(false);
            while !first.is_over() {
                std::thread::yield_now();
            }
            until("all of the source is asked for", || blocks.calls() == 2);
            second.wait_timeout(HANG).expect("it waits for the source").unwrap();
            blocks.go_on();
            upload.wait().unwrap();
            s.is_there(1);
            s.all_back();
        }
    });
}

/// One thread and one segment are left for transfers that cannot block, for which a source or sink may wait.
#[test]
fn sources_and_sinks_wait_for_another_transfer() {
    for (threads, share, upload) in [
        (2, 4 << 20, true),
        (8, 4 << 20, true),
        (8, 4 << 20, false),
        (8, 130 << 10, true),
        (8, 70 << 10, false),
    ] {
        ends(&format!("{threads} threads, a share of {share}, upload: {upload}"), move || {
            let s = setup(HostConfig::new(), |copier| copier.threads(threads).chunk(16 << 10).share(share));
            let slice = bytes(1, 512 << 10);
            let urgent = s.copier.with_priority(Priority::Foreground);
            for copier in [&s.copier, &urgent] {
                let blocks = Blocks::default();
                let place = s.memory.slice(1 << 20..2 << 20).unwrap();
                let (up, down) = if upload {
                    (Some(urgent.upload(blocks.source(1 << 20), place).unwrap()), None)
                } else {
                    let waits = blocks.clone();
                    let sink = sink(move |_, _: &[u8]| {
                        waits.wait();
                        Ok(())
                    });
                    (None, Some(urgent.download(place, sink).unwrap()))
                };
                until("it is asked", || blocks.calls() > 0);
                // Until all have called that will.
                std::thread::sleep(Duration::from_millis(20));
                assert!(blocks.calls() <= threads);
                copier.upload_slice(&slice, s.memory.slice(..512 << 10).unwrap()).unwrap();
                blocks.go_on();
                up.into_iter().for_each(|sent| drop(sent.wait().unwrap()));
                down.into_iter().for_each(|sent| drop(sent.wait().unwrap()));
                assert!(downloaded(&s.copier, s.memory.slice(..512 << 10).unwrap()) == slice);
            }
            s.all_back();
        });
    }
}

/// Nothing of the pool is in use when a caller hears of the only chunk's error.
#[test]
fn a_failed_source_leaves_nothing_in_use() {
    let s = setup(HostConfig::new(), |copier| copier.threads(1));
    for _ in 0..20 {
        let fails = source("fails", 1 << 20, |_, _: &mut Fill<'_>| Err(std::io::Error::other("no more")));
        let one = vec![CopyRange { at: 0, device: s.range(0) }];
        let said = s.copier.upload(fails, one).unwrap().wait();
        let Err(failed) = said else { panic!("it fails") };
        assert!(matches!(failed.error, Error::Read { .. }), "{}", failed.error);
        assert_eq!(in_use(&s.pool), 0);
    }
}

/// Two threads move one device by hand.
#[test]
fn two_threads_wait_on_a_device_by_hand() {
    let Some(node) = Node::by_hand(7) else { return };
    let s = setup(node, |copier| copier);
    let stream = s.device.stream().unwrap();
    std::thread::scope(|scope| {
        for t in 0..2 {
            let (s, stream) = (&s, &stream);
            scope.spawn(move || {
                s.node.enter();
                for i in 0..1000 {
                    let (piece, place) = (bytes(i, LEN), s.range(t));
                    s.copier.upload(piece.clone(), &place).unwrap().wait().unwrap();
                    drop(stream.upload(s.filled(&piece), &place).unwrap().wait().unwrap());
                }
            });
        }
    });
    // Where nothing can move, a wait ends.
    s.node.hang(true);
    let is_late = |sent: Transfer<Vec<u8>>| match sent.wait().unwrap_err().error {
        Error::Transfer { cause, .. } => matches!(*cause, Error::Timeout(_)),
        _ => false,
    };
    assert!(is_late(s.start(0)));
    // Also that of a chunk which no worker has taken.
    assert!(s.all(18).into_iter().all(is_late));
    s.node.hang(false);
    s.all(3).into_iter().for_each(|sent| drop(sent.wait().unwrap()));
    s.all_back();
}

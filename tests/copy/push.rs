//! Pushes on host devices, also on ones that are told to fail, to hang and to die: every byte is in its place, each
//! handle says what became of its chunk, and nothing is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use pinpool::copier::{Fill, Priority, Source, Transfer};
use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{
    Copier, CopierBuilder, Device, DeviceBuffer, DeviceSlice, Error, ErrorClass, Pool, Stream, Unpinned,
};

use crate::support::{bytes, in_use};

const LEN: usize = 300;
const PIECE: usize = 512;
const HANG: Duration = Duration::from_secs(20);

struct Setup {
    node: HostNode,
    device: Device,
    pool: Pool,
    copier: Copier,
    memory: DeviceBuffer,
}

fn setup(config: HostConfig, options: impl FnOnce(CopierBuilder) -> CopierBuilder) -> Setup {
    let node = HostNode::new(config.memory(64 << 20)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(8 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let copier = options(Copier::builder(&pool, &device)).build().unwrap();
    let memory = device.alloc(4 << 20).unwrap();
    Setup { node, device, pool, copier, memory }
}

/// With threads, some of which are late, and without any; with one lane and with several.
fn everywhere(test: impl Fn(Setup)) {
    test(setup(HostConfig::new(), |copier| copier.threads(3)));
    test(setup(HostConfig::new(), |copier| copier.threads(1).chunk(16 << 10).share(100 << 10)));
    test(setup(HostConfig::new().late(Duration::from_micros(100), 3), |copier| {
        copier.threads(2).chunk(16 << 10)
    }));
    test(setup(HostConfig::new().stepped(5), |copier| copier));
}

impl Setup {
    fn range(&self, i: usize) -> DeviceSlice {
        self.memory.slice(i * PIECE..i * PIECE + LEN).unwrap()
    }

    fn push(&self, count: usize) -> Vec<Transfer> {
        (0..count).map(|i| self.copier.push(&bytes(i, LEN), self.range(i)).unwrap()).collect()
    }

    fn is_there(&self, i: usize) {
        let mut back = vec![0; LEN];
        self.copier.download_slice(self.range(i), &mut back).unwrap();
        assert!(back == bytes(i, LEN), "piece {i}");
    }

    fn all_back(&self) {
        let since = Instant::now();
        while in_use(&self.pool) > 0 {
            assert!(since.elapsed() < HANG, "never back: {:?}", self.pool.stats());
            self.node.step();
            self.device.reap();
            self.copier.reap();
            std::thread::yield_now();
        }
        self.pool.check().unwrap();
    }
}

/// Runs a test that may hang instead of failing.
fn ends(what: &str, test: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let _done = done;
        test();
    });
    let ended = ended.recv_timeout(2 * HANG);
    assert_ne!(ended, Err(std::sync::mpsc::RecvTimeoutError::Timeout), "hangs: {what}");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn pushes_arrive() {
    everywhere(|s| {
        for round in 0..20 {
            let mut sent = s.push(100);
            let last = sent.pop().unwrap();
            last.wait().unwrap();
            s.is_there(99);
            if round % 2 == 0 {
                sent.into_iter().for_each(|sent| sent.wait().unwrap());
                (0..100).for_each(|i| s.is_there(i));
            }
        }
        s.all_back();
        assert_eq!(s.copier.stats().pushes, 2000);
    });
}

/// Many threads, of several priorities and lengths, to neighbours and to places apart, in several allocations.
#[test]
fn pushes_of_many_threads_arrive() {
    for options in [(3, 1 << 20, 6 << 20), (1, 16 << 10, 60 << 10), (2, 16 << 10, 1 << 20)] {
        let (threads, chunk, share) = options;
        let s = setup(HostConfig::new(), |copier| copier.threads(threads).chunk(chunk).share(share));
        let memories = [s.device.alloc(1 << 20).unwrap(), s.device.alloc(1 << 20).unwrap()];
        std::thread::scope(|scope| {
            for t in 0..8_usize {
                let (s, memory) = (&s, &memories[t % 2]);
                scope.spawn(move || {
                    let priority = if t % 3 == 0 { Priority::Foreground } else { Priority::Bulk };
                    let copier = s.copier.with_priority(priority);
                    let mut at = t / 2 * (256 << 10);
                    for n in 0..400 {
                        let len = 1 + (n * 37 + t) % 601;
                        let sent = copier.push(&bytes(at, len), memory.slice(at..at + len)).unwrap();
                        match n % 50 {
                            7 => sent.wait().unwrap(),
                            9 => sent.cancel(), // others' too: it does nothing
                            _ => drop(sent),
                        }
                        at += len + n % 3;
                    }
                });
            }
        });
        // One behind the others in each lane and priority: all that was pushed before is over when these are.
        s.all_back();
        for t in 0..8 {
            let mut at = t / 2 * (256 << 10);
            for n in 0..400 {
                let len = 1 + (n * 37 + t) % 601;
                let mut back = vec![0; len];
                s.copier.download_slice(memories[t % 2].slice(at..at + len), &mut back).unwrap();
                assert!(back == bytes(at, len), "thread {t}, push {n}");
                at += len + n % 3;
            }
        }
        assert_eq!(s.copier.stats().pushes, 8 * 400);
    }
}

/// Pushes while nothing can go are few chunks.
#[test]
fn pushes_are_combined() {
    let s = setup(HostConfig::new(), |copier| copier.threads(1).depth(1));
    s.node.hang(0);
    let sent = s.push(2000);
    s.node.resume(0);
    sent.into_iter().for_each(|sent| sent.wait().unwrap());
    (0..2000).for_each(|i| s.is_there(i));
    let stats = s.copier.stats();
    assert!(stats.chunks < 2000 + 20, "{stats:?}");
    s.all_back();
}

#[test]
fn long_and_wrong_pushes() {
    let s = setup(HostConfig::new(), |copier| copier.threads(2).chunk(64 << 10));
    let long = bytes(5, 200 << 10);
    s.copier.push(&long, &s.memory).unwrap().wait().unwrap();
    let mut back = vec![0; long.len()];
    s.copier.download_slice(s.memory.slice(..long.len()), &mut back).unwrap();
    assert!(back == long);
    let refused = |error: Error| matches!(error, Error::Unsupported(_));
    assert!(s.copier.try_push(&long, &s.memory).is_err_and(refused));
    assert_eq!(s.copier.push(&[], &s.memory).unwrap_err(), Error::Empty);
    let small = s.memory.slice(..10).unwrap();
    assert_eq!(s.copier.push(&[1; 11], &small).unwrap_err(), Error::TooSmall { need: 11, have: 10 });
    let other = Device::on(&HostNode::new(HostConfig::new()).unwrap(), 0).unwrap();
    let elsewhere = other.alloc(100).unwrap();
    assert!(matches!(s.copier.push(&[1; 11], &elsewhere), Err(Error::WrongDevice { .. })));
    assert!(matches!(
        s.copier.push(&[1; 11], s.memory.slice(usize::MAX - 1..)),
        Err(Error::OutOfRange { .. })
    ));
    s.all_back();
}

/// A chunk fails: the handles of its pushes say so, and no others.
#[test]
fn a_chunk_fails_alone() {
    everywhere(|s| {
        for failure in [Failure::Argument, Failure::Transient, Failure::RunsAnyway] {
            s.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure });
            // Waited for one by one: each push is a chunk.
            let alone: Vec<_> =
                (0..20).map(|i| s.copier.push(&bytes(i, LEN), s.range(i)).unwrap().wait()).collect();
            assert_eq!(s.node.clear_faults(), 0, "nothing was copied");
            let class =
                if failure == Failure::Argument { ErrorClass::Argument } else { ErrorClass::Transient };
            for (i, result) in alone.into_iter().enumerate() {
                match result {
                    Ok(()) => s.is_there(i),
                    Err(error) => assert!(i == 0 && error.error.class() == class, "{i}: {error}"),
                }
            }
            for nth in [0, 7, 40] {
                s.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
                let results: Vec<_> = s.push(60).into_iter().map(Transfer::wait).collect();
                assert_eq!(s.node.clear_faults(), 0, "it was not copied that often");
                let failed = results.iter().filter(|result| result.is_err()).count();
                assert!((1..=60).contains(&failed), "{failure:?} {nth}: {failed}");
                results
                    .iter()
                    .enumerate()
                    .filter(|(_, result)| result.is_ok())
                    .for_each(|(i, _)| s.is_there(i));
                s.all_back();
                assert_eq!(s.pool.stats().quarantined_bytes, 0);
            }
        }
        // Where no caller asks, nothing is kept.
        s.node.fail(Fault { device: 0, call: Call::Copy, nth: 3, failure: Failure::Transient });
        drop(s.push(20));
        s.all_back();
        s.node.clear_faults();
    });
}

/// A failed event is made up for by a later one.
#[test]
fn marks_fail() {
    everywhere(|s| {
        for call in [Call::Record, Call::Query, Call::CreateEvent] {
            for nth in 0..3 {
                s.node.fail(Fault { device: 0, call, nth, failure: Failure::Transient });
            }
            s.push(100).into_iter().for_each(|sent| sent.wait().unwrap());
            (0..100).for_each(|i| s.is_there(i));
            s.node.clear_faults();
            s.all_back();
        }
    });
}

/// The device dies with pushes in chunks, in flight and waited for, with the copier's handles there or dropped.
#[test]
fn a_device_dies_under_pushes() {
    for keeps in [true, false] {
        everywhere(|s| {
            s.node.hang(0);
            let count = if s.copier.share() < 200 << 10 { 40 } else { 200 };
            let mut sent = s.push(count);
            let asked = sent.pop().unwrap();
            let Setup { node, device, pool, copier, memory } = s;
            let mut copier = Some(copier);
            if !keeps {
                copier = None;
            }
            node.kill(0);
            let error = asked.wait().unwrap_err().error;
            assert!(error.is_device_lost(), "{error}");
            for sent in sent.drain(..count / 2) {
                assert!(sent.wait().is_err_and(|refused| refused.error.is_device_lost()));
            }
            drop(sent);
            let since = Instant::now();
            while in_use(&pool) > 0 {
                assert!(since.elapsed() < HANG, "{:?}", pool.stats());
                device.reap();
                copier.iter().for_each(|copier| _ = copier.reap());
                std::thread::yield_now();
            }
            pool.check().unwrap();
            if let Some(copier) = copier {
                assert!(copier.push(b"more", &memory).unwrap_err().is_device_lost());
            }
        });
    }
}

/// A device hangs: deadlines pass, and when it resumes all arrives. A push that does not wait says that there is no room.
#[test]
fn a_device_hangs_under_pushes() {
    let s = setup(HostConfig::new(), |copier| copier.threads(1).chunk(16 << 10).share(100 << 10));
    s.node.hang(0);
    let mut sent = Vec::new();
    let error = loop {
        let i = sent.len();
        match s.copier.try_push(&bytes(i, LEN), s.range(i)) {
            Ok(push) => sent.push(push),
            Err(error) => break error,
        }
        assert!(i < 5000, "there is always room");
    };
    assert!(matches!(error, Error::Exhausted { .. }), "{error}");
    let late = sent.remove(0).wait_timeout(Duration::from_millis(2)).unwrap_err();
    assert!(matches!(late.error, Error::Timeout(_)));
    sent.insert(0, late.buffer.unwrap());
    s.pool.check().unwrap();
    s.node.resume(0);
    for (i, sent) in sent.into_iter().enumerate() {
        sent.wait().unwrap();
        s.is_there(i);
    }
    s.all_back();
}

/// Threads that wait for room, in turns of one lane, all get through.
#[test]
fn full_lanes_let_all_threads_through() {
    let config = HostConfig::new().late(Duration::from_micros(20), 1);
    let s = setup(config, |copier| copier.threads(2).chunk(16 << 10).share(40 << 10));
    std::thread::scope(|scope| {
        for t in 0..4 {
            let s = &s;
            scope.spawn(move || {
                for i in 0..500 {
                    let place = t * 500 + i;
                    drop(s.copier.push(&bytes(place, LEN), s.range(place)).unwrap());
                }
            });
        }
    });
    s.all_back();
    (0..2000).for_each(|place| s.is_there(place));
}

/// A copier that is dropped with pushes open sends them.
#[test]
fn a_dropped_copier_sends_what_was_pushed() {
    for keeps in [true, false] {
        let s =
            setup(HostConfig::new().late(Duration::from_micros(100), 3), |copier| copier.threads(2).depth(1));
        let sent = s.push(500);
        let Setup { node, device, pool, copier, memory } = s;
        drop(copier);
        let since = Instant::now();
        if keeps {
            sent.into_iter().for_each(|sent| sent.wait().unwrap());
        } else {
            drop(sent);
        }
        while in_use(&pool) > 0 {
            assert!(since.elapsed() < HANG, "{:?}", pool.stats());
            device.reap();
            std::thread::yield_now();
        }
        pool.check().unwrap();
        let copier = Copier::builder(&pool, &device).build().unwrap();
        let s = Setup { node, device, pool, copier, memory };
        (0..500).for_each(|i| s.is_there(i));
    }
}

/// Pushes of threads that end, each with one push alone.
#[test]
fn threads_end_behind_their_push() {
    let s = setup(HostConfig::new(), |copier| copier.threads(2).chunk(16 << 10).share(1 << 20));
    for i in 0..100 {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(s.copier.push(&bytes(i, LEN), s.range(i)).unwrap())).join()
        })
        .unwrap();
    }
    s.all_back();
    (0..100).for_each(|i| s.is_there(i));
}

/// What a waker tries, though it must not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tries {
    Push,
    ForRoom,
    ForPush,
    Order,
}

struct Waiter {
    tries: Tries,
    copier: Copier,
    stream: Stream,
    memory: DeviceSlice,
    told: SyncSender<(bool, Result<(), Error>)>,
}

impl Waiter {
    fn run(&self) -> Result<(), Error> {
        let push = || self.copier.push(&[7; LEN], &self.memory);
        match self.tries {
            Tries::Push => push().map(drop),
            Tries::ForRoom => (0..10_000).try_for_each(|_| push().map(drop)),
            Tries::ForPush => push()?.wait().map_err(|refused| refused.error),
            Tries::Order => push()?.order(&self.stream),
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

/// Wakers run on threads that move pushes. They may push, and are refused where they would wait.
#[test]
fn a_waker_pushes_and_does_not_wait() {
    for tries in [Tries::Push, Tries::ForRoom, Tries::ForPush, Tries::Order] {
        ends(&format!("{tries:?}"), move || {
            let config = HostConfig::new().late(Duration::from_micros(100), 3);
            let s = setup(config, |copier| copier.threads(1).chunk(16 << 10).share(100 << 10));
            let stream = s.device.stream().unwrap();
            let (told, hears) = sync_channel(1000);
            let (mut there, since) = (0, Instant::now());
            while there < 5 {
                assert!(since.elapsed() < HANG, "{tries:?}: never on the copier's thread");
                let waker = Waker::from(Arc::new(Waiter {
                    tries,
                    copier: s.copier.clone(),
                    stream: stream.clone(),
                    memory: s.range(900),
                    told: told.clone(),
                }));
                let mut sent = s.push(20);
                let mut first = sent.remove(0);
                let polled = std::pin::Pin::new(&mut first).poll(&mut Context::from_waker(&waker));
                drop(waker);
                if polled.is_pending() {
                    let (is_the_copiers, result) = hears.recv_timeout(HANG).expect("the waker returns");
                    if is_the_copiers {
                        let as_due = match tries {
                            Tries::Push => result.is_ok(),
                            Tries::ForRoom => matches!(result, Err(Error::Exhausted { .. })),
                            // What is over already is not waited for.
                            Tries::ForPush | Tries::Order => {
                                matches!(result, Ok(()) | Err(Error::Unsupported(_)))
                            }
                        };
                        assert!(as_due, "{tries:?}: {result:?}");
                        there += 1;
                    }
                    first.wait().unwrap();
                }
                sent.into_iter().for_each(|sent| sent.wait().unwrap());
            }
            s.copier.push(&[7; LEN], s.range(1)).unwrap().order(&stream).unwrap();
            s.all_back();
        });
    }
}

/// A waker that is woken since the device is lost pushes again, and is told.
#[test]
fn a_waker_pushes_to_a_lost_device() {
    ends("a waker on a lost device", || {
        let s = setup(HostConfig::new(), |copier| copier.threads(1));
        s.node.hang(0);
        let (told, hears) = sync_channel(100);
        let waker = Waker::from(Arc::new(Waiter {
            tries: Tries::Push,
            copier: s.copier.clone(),
            stream: s.device.stream().unwrap(),
            memory: s.range(900),
            told,
        }));
        let mut sent = s.push(1);
        assert!(std::pin::Pin::new(&mut sent[0]).poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        s.node.kill(0);
        // It may have been woken before, when the chunk was taken.
        let (_, result) = hears.recv_timeout(HANG).expect("the waker returns");
        assert!(result.is_ok() || result.is_err_and(|error| error.is_device_lost()));
        assert!(sent.remove(0).wait().is_err_and(|refused| refused.error.is_device_lost()));
        assert!(s.copier.push(&[7; LEN], s.range(1)).is_err_and(|error| error.is_device_lost()));
    });
}

/// A source that blocks until it is told to go on.
#[derive(Clone, Default)]
struct Blocks {
    calls: Arc<AtomicUsize>,
    goes_on: Arc<AtomicBool>,
}

impl Source for Blocks {
    fn len(&self) -> u64 {
        32 << 10
    }

    fn fill(&self, _: u64, into: &mut Fill<'_>) -> std::io::Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        while !self.goes_on.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        into.push(&vec![7; into.remaining()]);
        Ok(())
    }
}

/// A worker that is about to call what may block leaves other work to one that sleeps. Here all that are awake turn from a
/// push to a source of the foreground, whose chunks are short, so that few workers are woken for it.
#[test]
fn a_push_does_not_wait_for_sources_that_block() {
    ends("a push beside a source that blocks", || {
        let s = setup(HostConfig::new(), |copier| copier.threads(3).chunk(16 << 10).depth(1));
        let until = |what: &str, holds: &dyn Fn() -> bool| {
            let since = Instant::now();
            while !holds() {
                assert!(since.elapsed() < HANG, "{what}");
                std::thread::yield_now();
            }
        };
        for _ in 0..5 {
            s.push(1).into_iter().for_each(|sent| sent.wait().unwrap());
            s.all_back();
            s.node.hang(0);
            let first = s.copier.push(&bytes(0, LEN), s.range(0)).unwrap();
            until("the first push goes", &|| s.pool.stats().in_flight_bytes > 0);
            let source = Blocks::default();
            let urgent = s.copier.with_priority(Priority::Foreground);
            let upload = urgent.upload(source.clone(), s.memory.slice(1 << 20..)).unwrap();
            until("the source is asked", &|| source.calls.load(Ordering::Relaxed) >= 1);
            // The worker of the first push is to send this one.
            let second = s.copier.push(&bytes(1, LEN), s.range(1)).unwrap();
            s.node.resume(0);
            first.wait().unwrap();
            until("all of the source is asked for", &|| source.calls.load(Ordering::Relaxed) == 2);
            second.wait_timeout(HANG).expect("it waits for the source").unwrap();
            source.goes_on.store(true, Ordering::Relaxed);
            upload.wait().unwrap();
            s.is_there(1);
            s.all_back();
        }
    });
}

/// A thread that waits moves its push, and all chunks of a transfer, itself where no worker does: here the only one is held
/// up by a source.
#[test]
fn a_thread_that_waits_moves_its_push() {
    ends("transfers while all threads of the copier are held up", || {
        let s = setup(HostConfig::new(), |copier| copier.threads(1));
        let source = Blocks::default();
        let upload = s.copier.upload(source.clone(), s.memory.slice(1 << 20..)).unwrap();
        while source.calls.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        for i in 0..50 {
            s.copier.push(&bytes(i, LEN), s.range(i)).unwrap().wait().unwrap();
            s.is_there(i);
        }
        // A failure of its copy is that push's alone.
        s.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::Argument });
        s.copier.push(&bytes(1, LEN), s.range(50)).unwrap().wait().unwrap_err();
        s.copier.push(&bytes(51, LEN), s.range(51)).unwrap().wait().unwrap();
        s.is_there(51);
        // Of many chunks.
        let all = bytes(3, 4 << 20);
        let long = s.device.alloc(all.len()).unwrap();
        s.copier.upload(all.clone(), &long).unwrap().wait().unwrap();
        assert!(s.copier.download_collect(&long).unwrap().wait().unwrap().into_vec().unwrap() == all);
        source.goes_on.store(true, Ordering::Relaxed);
        upload.wait().unwrap();
        s.all_back();
    });
}

/// Such a thread may have its chunk for long. Other pushes do not wait for it, nor for its rate.
#[test]
fn a_thread_that_waits_holds_up_no_other_push() {
    ends("a push beside a thread that waits for its own", || {
        let s = setup(HostConfig::new(), |copier| copier.threads(1).rate(1 << 10));
        for round in 0..5 {
            // The next bulk copy has to wait for half a minute.
            s.copier.push(&bytes(0, 32 << 10), s.memory.slice(1 << 20..)).unwrap().wait().unwrap();
            let slow = s.copier.push(&bytes(round, LEN), s.range(0)).unwrap();
            std::thread::scope(|scope| {
                let slow = scope.spawn(|| slow.wait());
                std::thread::sleep(Duration::from_millis(2));
                let urgent = s.copier.with_priority(Priority::Foreground);
                for i in 1..20 {
                    let push = urgent.push(&bytes(i, LEN), s.range(i)).unwrap();
                    push.wait_timeout(HANG / 2).expect("it waits for the other thread").unwrap();
                }
                assert!(!slow.is_finished());
                s.copier.set_rate(None);
                slow.join().unwrap().unwrap();
            });
            (1..20).for_each(|i| s.is_there(i));
            s.copier.set_rate(Some(1 << 10));
        }
        s.copier.set_rate(None);
        s.all_back();
    });
}

/// A push that has no segment goes on when any chunk ends, not its lane's alone.
#[test]
fn a_push_waits_for_no_lane() {
    ends("a push while its lane hangs", || {
        let s = setup(HostConfig::new(), |copier| copier.threads(2).chunk(256 << 10).share(2 << 20).depth(4));
        // The first chunk's copy is on stream 0.
        (0..10).for_each(|n| _ = s.node.hang_stream(0, n));
        let (told, hears) = sync_channel(100);
        let (copier, memory) = (s.copier.clone(), s.memory.slice(..).unwrap());
        let pusher = std::thread::spawn(move || {
            let piece = vec![7; 100 << 10];
            let at = |n: usize| memory.slice(n * piece.len()..(n + 1) * piece.len());
            let sent: Vec<_> = (0..40)
                .map(|n| {
                    let sent = copier.push(&piece, at(n)).unwrap();
                    told.send(n).unwrap();
                    sent
                })
                .collect();
            sent.into_iter().for_each(|sent| sent.wait().unwrap());
        });
        // All segments are full.
        let mut pushed = 0;
        while let Ok(n) = hears.recv_timeout(Duration::from_millis(500)) {
            pushed = n;
        }
        assert!(pushed < 39, "{pushed}");
        (1..10).for_each(|n| _ = s.node.resume_stream(0, n));
        assert!(hears.recv_timeout(HANG).is_ok(), "it waits for stream 0");
        s.node.resume_stream(0, 0);
        hears.iter().for_each(drop);
        pusher.join().unwrap();
        s.all_back();
    });
}

/// Two threads drive one stepped device.
#[test]
fn two_threads_wait_on_a_stepped_device() {
    let s = setup(HostConfig::new().stepped(7), |copier| copier);
    let stream = s.device.stream().unwrap();
    std::thread::scope(|scope| {
        for t in 0..2 {
            let (s, stream) = (&s, &stream);
            scope.spawn(move || {
                for i in 0..1000 {
                    let (piece, place) = (bytes(i, LEN), s.range(t));
                    s.copier.push(&piece, &place).unwrap().wait().unwrap();
                    let mut buf = s.pool.checkout(LEN).unwrap();
                    buf.extend_from_slice(&piece);
                    drop(stream.upload(buf, &place).unwrap().wait().unwrap());
                }
            });
        }
    });
    // Where no thread steps the device, a wait ends.
    s.node.hang(0);
    let late = s.push(1).remove(0).wait();
    assert!(late.is_err_and(|refused| matches!(refused.error, Error::Timeout(_))));
    // Also that of a chunk which no worker has taken.
    let depth = 6;
    let all: Vec<_> = (0..3 * depth).map(|_| s.copier.push(&[7; LEN], s.range(3)).unwrap()).collect();
    for late in all {
        assert!(late.wait().is_err_and(|refused| matches!(refused.error, Error::Timeout(_))));
    }
    s.node.resume(0);
    s.push(3).into_iter().for_each(|sent| sent.wait().unwrap());
    s.all_back();
}

/// What is pushed is in the pool's sums, and an open chunk is a checkout like others.
#[test]
fn pushed_chunks_are_counted() {
    let s = setup(HostConfig::new(), |copier| copier.threads(1).chunk(16 << 10).share(1 << 20));
    s.node.hang(0);
    let mut sent = Vec::new();
    for i in 0..400 {
        sent.push(s.copier.push(&bytes(i, LEN), s.range(i)).unwrap());
        if i % 20 == 0 {
            let census = s.pool.check().unwrap();
            assert!(census.in_flight + census.checked_out <= (1 << 20) + (64 << 10), "push {i}: {census:?}");
            assert!(census.in_flight + census.checked_out > 0, "push {i}: {census:?}");
        }
    }
    s.node.resume(0);
    sent.into_iter().for_each(|sent| sent.wait().unwrap());
    s.all_back();
}

/// Checks of a pool that pushes and streams use meanwhile find nothing wrong.
#[test]
fn a_busy_pool_is_sound() {
    let s = setup(HostConfig::new(), |copier| copier.threads(2).chunk(16 << 10));
    let streams = [(); 2].map(|()| s.device.stream().unwrap());
    let until = Instant::now() + Duration::from_millis(1500);
    let busy = || Instant::now() < until;
    std::thread::scope(|scope| {
        // One push at a time goes by itself, and many go together.
        for count in [1, 40] {
            let s = &s;
            scope.spawn(move || {
                while busy() {
                    s.push(count).into_iter().skip(count / 2).for_each(|sent| sent.wait().unwrap());
                }
            });
        }
        scope.spawn(|| {
            while busy() {
                let mut buf = s.pool.checkout_timeout(LEN, HANG).unwrap();
                buf.extend_from_slice(&bytes(1, LEN));
                drop(streams[0].hold(buf).unwrap().wait().unwrap());
            }
        });
        let mut checks = 0;
        while busy() {
            checks += 1;
            s.pool.check().unwrap_or_else(|wrong| panic!("check {checks}: {wrong}"));
        }
    });
    s.all_back();
}

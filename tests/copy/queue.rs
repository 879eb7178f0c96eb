//! The copy queue on host devices that are told to fail, to hang and to die: each copy's handle says what became of
//! that copy, and nothing is lost.

use std::future::Future as _;
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig};
use pinpool::{DeviceSlice, Error, ErrorClass, InFlight, PinnedBuf, Pool, QueueOptions, Stream};

use crate::support::bytes;
use crate::support::rig::queue::Setup;

/// More failures than there are attempts to record an event.
const FOR_GOOD: u64 = 10_000;

const LEN: usize = 300;
const PIECE: usize = 512;
const HANG: Duration = Duration::from_secs(20);

fn setup(config: HostConfig, options: QueueOptions) -> Setup {
    Setup::new(config.memory(64 << 20), 4 << 20, options, 1 << 20)
}

/// With threads, some of which are late, and without any.
fn everywhere(test: impl Fn(Setup)) {
    test(setup(HostConfig::new(), QueueOptions::new()));
    test(setup(HostConfig::new().late(Duration::from_micros(100), 3), QueueOptions::new().threads(2)));
    test(setup(HostConfig::new().stepped(5), QueueOptions::new()));
}

impl Setup {
    fn range(&self, i: usize) -> DeviceSlice {
        self.memory.slice(i * PIECE..i * PIECE + LEN).unwrap()
    }

    fn filled(&self, bytes: &[u8]) -> PinnedBuf {
        let mut buf = self.pool.checkout_timeout(bytes.len(), HANG).unwrap();
        buf.extend_from_slice(bytes);
        buf
    }

    fn push(&self, count: usize) -> Vec<InFlight<PinnedBuf>> {
        (0..count).map(|i| self.queue.upload(self.filled(&bytes(i, LEN)), self.range(i)).unwrap()).collect()
    }

    fn until(&self, what: &str, so: impl Fn() -> bool) {
        let since = Instant::now();
        while !so() {
            assert!(since.elapsed() < HANG, "never: {what}");
            self.node.step();
            self.device.reap();
            std::thread::yield_now();
        }
    }

    fn all_back(&self) {
        let none = || self.pool.stats().in_flight_bytes + self.pool.stats().checked_out_bytes == 0;
        self.until("all is back", none);
        self.pool.check().unwrap();
    }
}

/// One copy fails: its handle says so, and the others', of whatever batch, do not.
#[test]
fn a_copy_fails_alone() {
    everywhere(|s| {
        for failure in [Failure::Argument, Failure::Transient, Failure::RunsAnyway] {
            for nth in [0, 7, 40] {
                s.node.fail(Fault { device: 0, call: Call::Copy, nth, failure });
                let results: Vec<_> = s.push(60).into_iter().map(InFlight::wait).collect();
                assert_eq!(s.node.clear_faults(), 0, "it was not copied that often");
                let failed: Vec<_> = results.iter().filter_map(|r| r.as_ref().err()).collect();
                assert_eq!(failed.len(), 1, "{failure:?} {nth}: {failed:?}");
                let class =
                    if failure == Failure::Argument { ErrorClass::Argument } else { ErrorClass::Transient };
                assert_eq!(failed[0].class(), class);
                for (i, result) in results.iter().enumerate().filter(|(_, r)| r.is_ok()) {
                    assert!(**result.as_ref().unwrap() == *bytes(i, LEN));
                    let landing = s.pool.checkout(LEN).unwrap();
                    let back = s.queue.download(s.range(i), landing).unwrap().wait().unwrap();
                    assert!(*back == *bytes(i, LEN), "piece {i}");
                }
                drop(results);
                s.all_back();
                assert_eq!(s.pool.stats().quarantined_bytes, 0);
            }
        }
        // Where no caller asks, nothing is kept.
        s.node.fail(Fault { device: 0, call: Call::Copy, nth: 3, failure: Failure::Transient });
        drop(s.push(20));
        s.queue.synchronize().unwrap();
        s.all_back();
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
            for (i, flight) in s.push(100).into_iter().enumerate() {
                assert!(*flight.wait().unwrap() == *bytes(i, LEN));
            }
            s.node.clear_faults();
            s.all_back();
        }
    });
}

/// The device dies with copies pushed, submitted and waited for, with a queue's handles there or dropped.
#[test]
fn a_device_dies_under_a_queue() {
    for keeps in [true, false] {
        everywhere(|s| {
            s.node.hang(0);
            let mut flights = s.push(200);
            let asked = flights.pop().unwrap();
            let Setup { node, device, pool, queue, memory } = s;
            let mut queue = Some(queue);
            if !keeps {
                queue = None;
            }
            node.kill(0);
            let error = asked.wait().unwrap_err();
            assert!(error.is_device_lost(), "{error}");
            for flight in flights.drain(..100) {
                assert!(flight.wait().is_err_and(|error| error.is_device_lost()));
            }
            drop(flights);
            let since = Instant::now();
            while pool.stats().in_flight_bytes + pool.stats().checked_out_bytes > 0 {
                assert!(since.elapsed() < HANG, "{:?}", pool.stats());
                device.reap();
                std::thread::yield_now();
            }
            pool.check().unwrap();
            if let Some(queue) = queue {
                let mut buf = pool.checkout(4).unwrap();
                buf.extend_from_slice(b"more");
                let refused = queue.upload(buf, &memory).unwrap_err();
                assert!(refused.error.is_device_lost() && refused.buffer.is_some_and(|buf| *buf == *b"more"));
                assert!(queue.synchronize().is_err());
            }
        });
    }
}

/// A queue whose device hangs: deadlines pass, handles come back, and when the device resumes all copies complete.
#[test]
fn a_device_hangs_under_a_queue() {
    let s = setup(HostConfig::new(), QueueOptions::new().depth(20).threads(1));
    s.node.hang(0);
    let mut flights = s.push(20);
    let refused = s.queue.try_upload(s.filled(b"more"), s.range(0)).unwrap_err();
    assert!(refused.error == Error::QueueFull { depth: 20 } && refused.buffer.is_some());
    drop(refused);
    let late = flights.remove(0).wait_timeout(Duration::from_millis(2)).unwrap_err();
    assert!(matches!(late.error, Error::Timeout(_)));
    flights.insert(0, late.buffer.unwrap());
    let error = s.queue.shutdown(Duration::from_millis(2)).unwrap_err();
    assert!(matches!(&error, Error::Timeout(waited) if *waited >= Duration::from_millis(2)), "{error}");
    let stats = s.queue.stats();
    assert_eq!((stats.outstanding, stats.copies <= 20), (20, true), "{stats:?}");
    s.node.resume(0);
    for (i, flight) in flights.into_iter().enumerate() {
        assert!(*flight.wait().unwrap() == *bytes(i, LEN));
    }
    s.queue.shutdown(HANG).unwrap();
    let stats = s.queue.stats();
    assert_eq!((stats.outstanding, stats.copies), (0, 20), "{stats:?}");
    assert!((1..=20).contains(&stats.batches));
    s.all_back();
}

/// Copies are pushed by threads that wait for room, in turns of one lane.
#[test]
fn a_full_queue_lets_everyone_through() {
    let s =
        setup(HostConfig::new().late(Duration::from_micros(20), 1), QueueOptions::new().depth(2).threads(2));
    std::thread::scope(|scope| {
        for t in 0..4 {
            let s = &s;
            scope.spawn(move || {
                for i in 0..200 {
                    let place = t * 200 + i;
                    drop(s.queue.upload(s.filled(&bytes(place, LEN)), s.range(place)).unwrap());
                }
            });
        }
    });
    s.queue.synchronize().unwrap();
    for place in 0..800 {
        let back = s.queue.download(s.range(place), s.pool.checkout(LEN).unwrap()).unwrap().wait().unwrap();
        assert!(*back == *bytes(place, LEN), "piece {place}");
    }
    s.all_back();
}

impl Setup {
    /// Makes recording an event fail for good, while the device works.
    fn fail_events(&self) {
        self.node.start_trace();
        for _ in 0..FOR_GOOD {
            self.node.fail(Fault { device: 0, call: Call::Record, nth: 0, failure: Failure::Argument });
        }
    }

    /// Events that the crate tried to record since then.
    fn tried(&self) -> usize {
        self.node.trace().iter().filter(|call| **call == Call::Record).count()
    }
}

/// How many events in a row must fail until a stream is given up.
fn tries() -> usize {
    let s = setup(HostConfig::new().stepped(5), QueueOptions::new());
    s.fail_events();
    let sent = s.push(1).remove(0);
    while sent.is_done().is_ok() {
        assert!(s.tried() < FOR_GOOD as usize, "the stream is never given up");
    }
    s.tried()
}

/// On the thread that submits no other thread would submit the copy that a waker wants to come first.
#[test]
fn a_waker_may_have_a_stream_wait_for_a_copy_that_it_has_pushed() {
    struct Pushes {
        queue: pinpool::CopyQueue,
        stream: pinpool::Stream,
        pool: Pool,
        memory: DeviceSlice,
        told: std::sync::mpsc::SyncSender<(String, Result<(), Error>)>,
    }
    impl std::task::Wake for Pushes {
        fn wake(self: std::sync::Arc<Self>) {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let mut buf = self.pool.checkout(LEN).unwrap();
            buf.extend_from_slice(&[7; LEN]);
            let sent = self.queue.upload(buf, &self.memory).unwrap();
            let result = self.stream.wait_for_copy(&sent);
            let _ = self.told.send((name, result));
        }
    }
    let config = HostConfig::new().late(Duration::from_micros(100), 3);
    let s = setup(config, QueueOptions::new().threads(1));
    let (told, hears) = std::sync::mpsc::sync_channel(1000);
    let mut on_the_queues = 0;
    let since = Instant::now();
    while on_the_queues < 20 && since.elapsed() < HANG {
        let pushes = Pushes {
            queue: s.queue.clone(),
            stream: s.device.stream().unwrap(),
            pool: s.pool.clone(),
            memory: s.range(900),
            told: told.clone(),
        };
        let waker = std::task::Waker::from(std::sync::Arc::new(pushes));
        // More follow it, so that the queue's thread is awake and looks.
        let mut sent = s.push(20);
        let polled = std::pin::Pin::new(&mut sent[0]).poll(&mut std::task::Context::from_waker(&waker));
        drop(waker);
        if polled.is_pending() {
            let (name, result) = hears.recv_timeout(HANG).expect("the waker returns");
            result.unwrap();
            on_the_queues += usize::from(name.starts_with("pinpool-send"));
        }
        sent.drain(1..).for_each(|sent| drop(sent.wait().unwrap()));
    }
    assert!(on_the_queues > 0, "never on that thread");
    s.all_back();
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

/// What a waker tries, though it must not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    ForRoom,
    ForCopy,
    ForAll,
    /// On the stream of the copy whose completion wakes it.
    OnStream,
}

struct Waiter {
    waits: Waits,
    queue: pinpool::CopyQueue,
    stream: pinpool::Stream,
    pool: Pool,
    memory: DeviceSlice,
    told: std::sync::mpsc::SyncSender<(std::thread::ThreadId, Result<(), Error>)>,
}

impl Waiter {
    fn buf(&self) -> PinnedBuf {
        let mut buf = self.pool.try_checkout(LEN).unwrap();
        buf.extend_from_slice(&[7; LEN]);
        buf
    }

    fn push(&self) -> Result<InFlight<PinnedBuf>, Error> {
        self.queue.upload(self.buf(), &self.memory).map_err(|refused| refused.error)
    }

    fn wait(&self) -> Result<(), Error> {
        match self.waits {
            Waits::ForRoom => (0..3).try_for_each(|_| self.push().map(drop)),
            Waits::ForCopy => self.push()?.wait().map(drop),
            Waits::ForAll => {
                drop(self.push()?);
                self.queue.synchronize()
            }
            Waits::OnStream => {
                let sent = self.stream.upload(self.buf(), &self.memory).map_err(|refused| refused.error)?;
                sent.wait().map(drop)
            }
        }
    }
}

impl std::task::Wake for Waiter {
    fn wake(self: std::sync::Arc<Self>) {
        let result = self.wait();
        let _ = self.told.send((std::thread::current().id(), result));
    }
}

/// A thread of the program that waits sees by itself what is complete, and wakes other waiters as it does. A waker that
/// waited there would wait for that very thread.
#[test]
fn a_waker_on_a_callers_thread_is_told_that_it_must_not_wait() {
    for waits in [Waits::ForRoom, Waits::ForCopy, Waits::ForAll, Waits::OnStream] {
        ends(&format!("{waits:?}"), move || {
            let s = setup(HostConfig::new(), QueueOptions::new().threads(1).depth(2));
            let stream = s.device.stream().unwrap();
            let (told, hears) = std::sync::mpsc::sync_channel(100);
            let (mut here, since) = (0, Instant::now());
            while here < 5 {
                assert!(since.elapsed() < HANG, "{waits:?}: never on this thread");
                let send = |i: usize| match waits {
                    Waits::OnStream => stream.upload(s.filled(&bytes(i, LEN)), s.range(i)).unwrap(),
                    _ => s.queue.upload(s.filled(&bytes(i, LEN)), s.range(i)).unwrap(),
                };
                let (mut first, second) = (send(0), send(1));
                let waker = std::task::Waker::from(std::sync::Arc::new(Waiter {
                    waits,
                    queue: s.queue.clone(),
                    stream: stream.clone(),
                    pool: s.pool.clone(),
                    memory: s.range(900),
                    told: told.clone(),
                }));
                let polled = std::pin::Pin::new(&mut first).poll(&mut std::task::Context::from_waker(&waker));
                drop(waker);
                drop(second.wait().unwrap());
                if polled.is_pending() {
                    let (thread, result) = hears.recv_timeout(HANG).expect("the waker returns");
                    if thread == std::thread::current().id() {
                        let as_due = match waits {
                            Waits::ForRoom => result == Err(Error::QueueFull { depth: 2 }),
                            _ => matches!(result, Err(Error::Unsupported(_))),
                        };
                        assert!(as_due, "{waits:?}: {result:?}");
                        here += 1;
                    }
                    drop(first.wait().unwrap());
                }
                s.queue.synchronize().unwrap();
            }
            // Refused in a waker only.
            drop(s.queue.upload(s.filled(&bytes(1, LEN)), s.range(1)).unwrap().wait().unwrap());
            drop(stream.upload(s.filled(&bytes(1, LEN)), s.range(1)).unwrap().wait().unwrap());
            stream.synchronize().unwrap();
            s.all_back();
        });
    }
}

/// A stream is lost on a thread that submits, which wakes the waiters. Only that thread would submit what one of them
/// wants to come first, and it never will.
#[test]
fn a_waker_of_a_lost_queue_may_ask_to_be_preceded_by_what_nobody_will_submit() {
    struct Follows {
        queue: pinpool::CopyQueue,
        stream: pinpool::Stream,
        pool: Pool,
        memory: DeviceSlice,
        told: std::sync::mpsc::SyncSender<Result<(), Error>>,
    }
    impl std::task::Wake for Follows {
        fn wake(self: std::sync::Arc<Self>) {
            // Its own lane is lost by now; so is any other thread's that shares it.
            let sent = (0..64).find_map(|_| {
                let (queue, pool, memory) = (self.queue.clone(), self.pool.clone(), self.memory.clone());
                let pusher = std::thread::spawn(move || {
                    let mut buf = pool.try_checkout(LEN).unwrap();
                    buf.extend_from_slice(&[7; LEN]);
                    queue.upload(buf, &memory).ok()
                });
                pusher.join().unwrap()
            });
            let sent = sent.expect("a lane that is not lost");
            let result = self.stream.wait_for_copy(&sent);
            let after = sent.is_done().map(drop);
            let _ = self.told.send(result.and(after));
        }
    }
    ends("a waker of a lost queue", || {
        let tries = tries();
        let s = setup(HostConfig::new().stepped(5), QueueOptions::new());
        let (told, hears) = std::sync::mpsc::sync_channel(100);
        let waker = std::task::Waker::from(std::sync::Arc::new(Follows {
            queue: s.queue.clone(),
            stream: s.device.stream().unwrap(),
            pool: s.pool.clone(),
            memory: s.range(900),
            told,
        }));
        s.fail_events();
        let mut before = s.push(1);
        let polled = std::pin::Pin::new(&mut before[0]).poll(&mut std::task::Context::from_waker(&waker));
        assert!(polled.is_pending());
        drop(waker);
        while s.tried() < tries - 1 {
            s.device.reap();
        }
        // The event behind this copy is one failure too many, on this thread, which submits it.
        let last = s.push(1);
        assert_eq!(s.tried(), tries);
        let told = hears.recv_timeout(HANG).expect("the waker returns");
        assert!(told.as_ref().is_err_and(|error| error.class() == ErrorClass::Argument), "{told:?}");
        for sent in before.into_iter().chain(last) {
            assert!(sent.wait().is_err());
        }
        s.node.clear_faults();
        while s.node.step() {}
        s.pool.check().unwrap();
    });
}

/// Two threads drive one stepped device. While one of them sees copies complete, the other one has nothing to step; but
/// its copy is about to be complete.
#[test]
fn two_threads_wait_on_a_stepped_device() {
    let s = setup(HostConfig::new().stepped(7), QueueOptions::new());
    let stream = s.device.stream().unwrap();
    std::thread::scope(|scope| {
        for t in 0..2 {
            let (s, stream) = (&s, &stream);
            scope.spawn(move || {
                for i in 0..2000 {
                    let (piece, place) = (bytes(i, LEN), s.range(t));
                    drop(s.queue.upload(s.filled(&piece), &place).unwrap().wait().unwrap());
                    let sent = stream.upload(s.filled(&piece), &place).unwrap();
                    drop(sent.wait().unwrap());
                }
            });
        }
    });
    // Where no thread steps the device, a wait ends.
    s.node.hang(0);
    let late = s.push(1).remove(0).wait();
    assert!(matches!(late, Err(Error::Timeout(_))), "{late:?}");
    s.node.resume(0);
    s.all_back();
}

/// Bytes that are fewer from the `steady`-th question on.
struct Shrinks {
    bytes: Vec<u8>,
    asked: std::sync::atomic::AtomicUsize,
    steady: usize,
}

impl std::ops::Deref for Shrinks {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let asked = self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if asked < self.steady { &self.bytes } else { &self.bytes[..100] }
    }
}

// SAFETY: the bytes are on the heap, and none are removed.
#[allow(unsafe_code, reason = "a promise")]
unsafe impl pinpool::StableDeref for Shrinks {}

#[test]
fn what_shrinks_meanwhile_is_copied_as_it_was_or_refused() {
    let s = setup(HostConfig::new(), QueueOptions::new());
    let stream = s.device.stream().unwrap();
    for steady in 0..12 {
        for part in [0..1000, 500..1000] {
            let shrinks = || {
                let bytes = Shrinks { bytes: vec![5; 1000], asked: 0.into(), steady };
                s.device.register(bytes).unwrap()
            };
            let dst = s.memory.slice(..1000).unwrap();
            let sent = [
                s.queue.upload_part(shrinks(), part.clone(), &dst).map_err(|e| (e.error, e.buffer.is_some())),
                stream.upload_part(shrinks(), part.clone(), &dst).map_err(|e| (e.error, e.buffer.is_some())),
                stream
                    .copy_host_part(shrinks(), part.clone(), s.pool.checkout(1000).unwrap())
                    .map(|(sent, landing)| {
                        assert!(*landing.wait().unwrap() == *vec![5; part.len()]);
                        sent
                    })
                    .map_err(|e| (e.error, e.buffer.is_some())),
            ];
            for sent in sent {
                match sent {
                    Ok(sent) => drop(sent.wait().unwrap()),
                    Err((error, back)) => {
                        assert!(matches!(error, Error::OutOfRange { .. }) && back, "{error}");
                    }
                }
            }
        }
    }
    s.all_back();
}

/// A copy is in flight from the push on, whether it was submitted or not: its segment and the sums say so.
#[test]
fn pushed_copies_are_in_flight_at_once() {
    let s = setup(HostConfig::new(), QueueOptions::new().threads(1));
    // No copy completes until the node resumes.
    s.node.fail(Fault { device: 0, call: Call::Copy, nth: 0, failure: Failure::Stall });
    let mut flights = Vec::new();
    let mut granted = 0;
    for i in 0..400 {
        let buf = s.filled(&bytes(i, LEN));
        granted = granted.max(s.pool.stats().checked_out_bytes);
        flights.push(s.queue.upload(buf, s.range(i)).unwrap());
        let stats = s.pool.stats();
        assert_eq!(
            (stats.in_flight_bytes, stats.checked_out_bytes),
            (flights.len() * granted, 0),
            "push {i}"
        );
    }
    let census = s.pool.check().unwrap();
    assert_eq!((census.in_flight, census.checked_out), (400 * granted, 0));
    s.node.resume(0);
    flights.into_iter().for_each(|flight| drop(flight.wait().unwrap()));
    s.all_back();
}

/// Checks of a pool that queues and streams use meanwhile find nothing wrong.
#[test]
fn a_busy_pool_is_sound() {
    let s = setup(HostConfig::new(), QueueOptions::new().threads(2));
    let streams = [(); 2].map(|()| s.device.stream().unwrap());
    let until = Instant::now() + Duration::from_millis(1500);
    let busy = || Instant::now() < until;
    std::thread::scope(|scope| {
        // One copy at a time goes to the driver by itself, and many go in batches.
        scope.spawn(|| {
            while busy() {
                s.push(1).into_iter().for_each(|flight| drop(flight.wait().unwrap()));
            }
        });
        scope.spawn(|| {
            while busy() {
                s.push(40).into_iter().skip(20).for_each(|flight| drop(flight.wait().unwrap()));
            }
        });
        scope.spawn(|| {
            while busy() {
                let buf = s.filled(&bytes(1, LEN));
                drop(Stream::hold_on_all(&[&streams[0], &streams[1]], buf).unwrap().wait().unwrap());
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

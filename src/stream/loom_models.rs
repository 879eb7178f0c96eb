//! Loom models of timelines: sequence numbers, events, and who meets in a segment's state word.
//!
//! The driver is a double that is as late as the contract allows: a copy reads its source when an
//! event recorded after it is first seen complete, and no sooner. An event that was never recorded
//! asks as complete, as the contract warns. Each segment has a cell: the owner of the segment
//! writes to it, the late copy reads it. Loom fails the model where these two accesses are not
//! ordered, which is what early reuse of a segment looks like.

#![allow(unsafe_code)]

use std::future::Future;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Poll, Wake as TaskWake, Waker};

use loom::thread::JoinHandle;

use super::hold::{Hold, Resource};
use super::timeline::reaper::Listing;
use super::timeline::{Ticket, Timeline};
use crate::buffer::Lend;
use crate::buffer::{InFlight, PinnedBuf, StreamBuf};
use crate::central::{CentralConfig, CentralPool, ReclaimLevel, Segment, end_leases};
use crate::device::context::Context;
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer, Whose};
use crate::error::{DeviceError, Error, ErrorClass, Result};
use crate::freelist::state;
use crate::region::Owner;
use crate::sealed::KEY;
use crate::segment::PAGE;
use crate::segment::RegionId;
use crate::sync::{Mutex, UnsafeCell, model, step, thread};

/// A length whose class has no list in thread caches under loom: every take and return goes through
/// the central pool.
const LEN: usize = 2000;
/// The most segments of that class in two pages.
const ALL: usize = 3;

// --- the double ----------------------------------------------------------------------------------

/// The driver, and the memory it copies from.
#[derive(Debug)]
struct Late {
    stream: Mutex<Queue>,
    memory: [UnsafeCell<u32>; ALL],
    /// How many copies have run, by segment.
    ran: [AtomicU32; ALL],
    /// The next recording fails, and loses the stream, though not the device.
    refuses: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    /// The segments that copies read, in the order of submission.
    copies: Vec<usize>,
    /// How many of them have run.
    ran: usize,
    /// How many copies each event covers, if it was ever recorded.
    events: Vec<Option<usize>>,
}

// SAFETY: the cells are loom's, which checks each access.
unsafe impl Sync for Late {}
// SAFETY: as above.
unsafe impl Send for Late {}

/// The number of the segment at this address.
fn number(address: *const u8) -> usize {
    (address.addr() - PAGE) / crate::segment::Class::of(LEN).unwrap().stride()
}

impl Late {
    fn write(&self, at: *const u8) {
        // SAFETY: loom fails the model if another thread accesses the cell at the same time.
        self.memory[number(at)].with_mut(|p| unsafe { *p += 1 });
    }

    fn ran(&self, segment: &Segment) -> u32 {
        self.ran[number(segment.base().as_ptr())].load(Ordering::Relaxed)
    }
}

/// Calls that succeed and do nothing.
macro_rules! nothing {
    ($([$($safety:tt)?] $name:ident($($arg:ty),*);)*) => {
        $($($safety)? fn $name(&self, $(_: $arg),*) -> Result<()> {
            Ok(())
        })*
    };
}

impl Driver for Late {
    fn name(&self) -> &str {
        "late"
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
    fn allocate_host(&self, _: usize, _: HostKind) -> Result<NonNull<u8>> {
        Err(Error::Unsupported("no host memory in a model".into()))
    }
    fn device_address(&self, at: NonNull<u8>) -> Result<u64> {
        Ok(at.as_ptr().addr() as u64)
    }
    fn allocate(&self, _: usize) -> Result<DevicePtr> {
        Ok(DevicePtr(0))
    }
    fn create_stream(&self, _: bool) -> Result<StreamHandle> {
        Ok(StreamHandle(0))
    }
    nothing! {
        [unsafe] unpin(NonNull<u8>, usize);
        [unsafe] register(NonNull<u8>, usize, Whose);
        [unsafe] free_host(NonNull<u8>, usize, HostKind);
        [unsafe] copy_blocking(StreamHandle, Transfer);
        [] free(DevicePtr);
        [] examine(DevicePtr, usize);
        [] destroy_stream(StreamHandle);
        [] destroy_event(EventHandle);
        [] wait_event(StreamHandle, EventHandle);
    }
    unsafe fn copy(&self, _: StreamHandle, transfer: Transfer) -> Result<()> {
        if let Transfer::Upload { src, .. } = transfer {
            self.stream.lock().copies.push(number(src));
        }
        Ok(())
    }
    fn create_event(&self) -> Result<EventHandle> {
        let mut queue = self.stream.lock();
        queue.events.push(None);
        Ok(EventHandle(queue.events.len() as u64 - 1))
    }
    fn record(&self, event: EventHandle, _: StreamHandle) -> Result<()> {
        // Another thread may come to the end of its call first.
        step();
        let mut queue = self.stream.lock();
        if self.refuses.swap(false, Ordering::Relaxed) {
            return Err(Error::Device(DeviceError {
                device: "late".into(),
                call: "record",
                code: 1,
                text: "refused".into(),
                class: ErrorClass::Argument,
            }));
        }
        queue.events[event.0 as usize] = Some(queue.copies.len());
        Ok(())
    }
    fn query(&self, event: EventHandle) -> Result<bool> {
        let mut queue = self.stream.lock();
        let Queue { copies, ran, events } = &mut *queue;
        let covered = events[event.0 as usize].unwrap_or(0);
        for &segment in copies.get(*ran..covered).unwrap_or_default() {
            // SAFETY: loom fails the model if another thread writes to the cell at the same time.
            self.memory[segment].with(|p| unsafe { *p });
            self.ran[segment].fetch_add(1, Ordering::Relaxed);
        }
        *ran = covered.max(*ran);
        Ok(true)
    }
}

// --- what models share ---------------------------------------------------------------------------

/// A stream with its central pool.
#[derive(Clone)]
struct Setup {
    driver: Arc<Late>,
    listing: Arc<Listing>,
    timeline: Arc<Timeline>,
    central: Arc<CentralPool>,
}

impl Setup {
    fn new() -> Self {
        let driver = Arc::new(Late {
            stream: Mutex::new(Queue::default()),
            memory: std::array::from_fn(|_| UnsafeCell::new(0)),
            ran: std::array::from_fn(|_| AtomicU32::new(0)),
            refuses: AtomicBool::new(false),
        });
        // A model has no threads of the crate, and queries move this driver.
        let context = Context::new(driver.clone(), Some(Box::new(|| false))).unwrap();
        let listing = Arc::new(Listing::default());
        let timeline = Timeline::new(context, StreamHandle(0), true, true, None, listing.clone());
        let config = CentralConfig {
            capacity: 2 * PAGE,
            thread_cache: 0,
            transfer_cache: 0,
            largest: PAGE,
            step: 0,
            by_hand: true,
            devices: Vec::new(),
            track: false,
        };
        let central = CentralPool::new(config, None);
        let base = NonNull::new(std::ptr::without_provenance_mut(PAGE)).unwrap();
        // SAFETY: the arena only does arithmetic on it.
        unsafe { central.add_extent(RegionId(0), base, 2 * PAGE, true) };
        Self { driver, listing, timeline, central }
    }

    /// Takes a segment and writes to it.
    fn take(&self) -> Option<Segment> {
        let want = self.central.place(LEN, 64).unwrap();
        let fresh = self.central.try_take(&[want], ReclaimLevel::All).unwrap()?.pop()?;
        let segment = fresh.into_segment();
        self.driver.write(segment.base().as_ptr());
        Some(segment)
    }

    /// What `Stream::upload` does, step by step.
    fn upload(&self, segment: Segment) -> InFlight<PinnedBuf> {
        step();
        let ticket = Ticket { timeline: self.timeline.clone(), seq: u64::MAX };
        let src = segment.base().as_ptr().cast_const();
        let submission = self.timeline.begin(Resource::Segment(segment.alias()), None).unwrap();
        // SAFETY: the segment is on the timeline now; the buffer is used only after completion.
        let mut flight = InFlight::new(ticket, unsafe { PinnedBuf::new(segment, 0) }, None);
        step();
        let transfer = Transfer::Upload { src, dst: DevicePtr(0), len: LEN };
        // SAFETY: nothing is really copied.
        unsafe { self.driver.copy(StreamHandle(0), transfer) }.unwrap();
        step();
        flight.submitted(submission.commit());
        flight
    }

    /// Takes every free segment and writes to it, as the next owner would.
    fn reuse(&self) {
        step();
        let all: Vec<Segment> = std::iter::from_fn(|| self.take()).collect();
        for segment in all {
            // SAFETY: taken above, and nothing uses it.
            unsafe { segment.release() };
        }
    }

    /// Lets everything complete, and checks that every segment is back.
    fn finish(self) {
        while !self.timeline.is_idle() {
            self.timeline.advance(true);
        }
        self.reuse();
        let snapshot = self.central.snapshot();
        assert_eq!((snapshot.out, snapshot.quarantined), (0, 0), "everything is back");
        let (bytes, claimed, _) = self.timeline.flight(self.central.number());
        assert_eq!((bytes, claimed), (0, 0));
        self.central.check(|_, _| ()).unwrap();
        self.central.close();
        assert_eq!(Arc::strong_count(&self.central), 1);
        // Takes the timeline off the list, which keeps it alive.
        self.listing.look(true);
    }
}

type Threads = Vec<JoinHandle<()>>;

/// A model of one stream. `run` returns the threads to be joined before everything completes.
fn stream_model(name: &'static str, run: impl Fn(&Setup) -> Threads + Sync + Send + 'static) {
    model(name, 3, move || {
        let setup = Setup::new();
        run(&setup).into_iter().for_each(|thread| thread.join().unwrap());
        setup.finish();
    });
}

/// A thread that gives its thread caches back before it can be joined.
fn spawn(run: impl FnOnce() + 'static) -> JoinHandle<()> {
    loom::thread::spawn(move || {
        step();
        run();
        end_leases();
    })
}

/// Waits while another thread asks. (`wait` cannot, on a device that does nothing by itself.)
fn until(done: impl Fn() -> bool) {
    while !done() {
        crate::sync::yield_now();
    }
}

impl Setup {
    fn spawn(&self, run: impl FnOnce(&Self) + 'static) -> JoinHandle<()> {
        let setup = self.clone();
        spawn(move || run(&setup))
    }

    /// A thread that asks, as the reaper does, and then takes every segment that came back.
    fn reaper(&self) -> JoinHandle<()> {
        self.spawn(|setup| {
            setup.timeline.advance(true);
            setup.reuse();
        })
    }

    /// The owner of a handle: waits for the segment if it is complete, else drops the handle.
    fn end(&self, flight: InFlight<PinnedBuf>, segment: &Segment, copies: u32) {
        step();
        if segment.descriptor().word().state() == state::COMPLETED {
            assert_eq!(self.driver.ran(segment), copies, "completed, and the copy has not run");
            let buf = flight.wait().unwrap();
            self.driver.write(buf.as_ptr());
        }
    }

    /// Uploads a segment, and ends the handle.
    fn upload_and_end(&self, segment: Segment) {
        let alias = segment.alias();
        let flight = self.upload(segment);
        self.end(flight, &alias, 1);
    }

    /// Claims a segment in flight, as a stream-ready checkout does.
    fn claim(&self) -> Option<(StreamBuf, Segment)> {
        step();
        let class = crate::segment::Class::of(LEN).unwrap();
        let segment = self.timeline.claim(&self.central, class, LEN)?;
        let alias = segment.alias();
        Some((StreamBuf::claimed(self.timeline.clone(), segment), alias))
    }
}

// --- sequence numbers and events -----------------------------------------------------------------

#[test]
fn loom_event_after_loss() {
    model("events: one is recorded while the stream is given up", 3, || {
        let setup = Setup::new();
        let flight = setup.upload(setup.take().unwrap());
        setup.driver.refuses.store(true, Ordering::Relaxed);
        let closers = [0, 1].map(|_| {
            setup.spawn(|setup| {
                // Closes even if nothing new was submitted, as a stream that waits for another
                // does.
                let _ = setup.timeline.wait_here(StreamHandle(1));
            })
        });
        for closer in closers {
            closer.join().unwrap();
        }
        // Returns, whichever thread came first, and has nothing to ask about.
        assert!(!setup.timeline.ask());
        assert!(setup.timeline.usable().is_err());
        assert!(flight.wait().is_err());
        assert!(setup.timeline.is_idle());
        setup.listing.look(true);
        setup.central.close();
    });
}

#[test]
fn loom_seqs_and_events() {
    stream_model("events: two submit, one closes, one asks", |setup| {
        let mut threads: Threads = Vec::new();
        for _ in 0..2 {
            let segment = setup.take().unwrap();
            threads.push(setup.spawn(|setup| setup.upload_and_end(segment)));
        }
        threads.push(setup.spawn(|setup| _ = setup.timeline.close()));
        step();
        setup.timeline.ask();
        setup.reuse();
        threads
    });
}

#[test]
fn loom_share_closes() {
    stream_model("events: one submits while the stream's handle is given out", |setup| {
        let segment = setup.take().unwrap();
        let submitter = setup.spawn(|setup| drop(setup.upload(segment)));
        step();
        setup.timeline.share();
        submitter.join().unwrap();
        // From here on the program may submit: no event may be recorded later for what was
        // submitted before.
        setup.timeline.ask();
        assert!(setup.timeline.is_idle(), "a sequence number stayed open");
        Vec::new()
    });
}

#[test]
fn loom_completion_wakes() {
    struct Task(thread::Thread);
    impl TaskWake for Task {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    stream_model("completion: a task sleeps until the reaper has seen its event", |setup| {
        let segment = setup.take().unwrap();
        let alias = segment.alias();
        let mut flight = setup.upload(segment);
        // As the reaper does: looks until nothing is in flight.
        let reaper = setup.spawn(|setup| {
            while !setup.timeline.is_idle() {
                step();
                setup.timeline.advance(false);
                crate::sync::yield_now();
            }
        });
        let waker: Waker = Arc::new(Task(thread::current())).into();
        let buf = loop {
            step();
            match std::pin::Pin::new(&mut flight).poll(&mut std::task::Context::from_waker(&waker)) {
                Poll::Ready(buf) => break buf.unwrap(),
                Poll::Pending => thread::park_until(None),
            }
        };
        assert_eq!(setup.driver.ran(&alias), 1);
        setup.driver.write(buf.as_ptr());
        drop(buf);
        vec![reaper]
    });
}

// --- the parties that meet in the word -----------------------------------------------------------

#[test]
fn loom_completion_against_drop() {
    stream_model("completion: two reapers against two handles", |setup| {
        let (one, two) = (setup.take().unwrap(), setup.take().unwrap());
        let alias = two.alias();
        let (one, two) = (setup.upload(one), setup.upload(two));
        let threads = vec![setup.reaper(), spawn(|| drop(one))];
        setup.end(two, &alias, 1);
        threads
    });
}

/// A segment is claimed, against the reaper and the handle. `then` gets it.
fn claim_model(name: &'static str, then: impl Fn(&Setup, StreamBuf, Segment) + Sync + Send + 'static) {
    stream_model(name, move |setup| {
        let flight = setup.upload(setup.take().unwrap());
        let threads = vec![setup.reaper(), spawn(|| drop(flight))];
        if let Some((claimed, segment)) = setup.claim() {
            step();
            then(setup, claimed, segment);
        }
        threads
    });
}

#[test]
fn loom_claim_unused() {
    claim_model("claim: not used", |_, claimed, _| drop(claimed));
}

#[test]
fn loom_claim_waited_for() {
    claim_model("claim: waited for", |setup, claimed, segment| {
        until(|| setup.timeline.poll_complete(1).unwrap());
        let buf = claimed.wait().unwrap();
        assert_eq!(setup.driver.ran(&segment), 1, "host-ready, and the copy has not run");
        setup.driver.write(segment.base().as_ptr());
        drop(buf);
    });
}

#[test]
fn loom_claim_used() {
    claim_model("claim: submitted again", |setup, claimed, segment| {
        let flight = setup.upload(claimed.into_segment());
        setup.end(flight, &segment, 2);
    });
}

#[test]
fn loom_claim_leaves_handles_alone() {
    stream_model("claim: a handle that is kept gets its segment back", |setup| {
        let flight = setup.upload(setup.take().unwrap());
        let keeping = setup.spawn(|setup| {
            until(|| flight.is_done().unwrap());
            let buf = flight.wait().unwrap();
            setup.driver.write(buf.as_ptr());
        });
        let reaper = setup.reaper();
        assert!(setup.claim().is_none(), "claimed under its handle");
        vec![keeping, reaper]
    });
}

// --- holds ---------------------------------------------------------------------------------------

#[test]
fn loom_lost_hold_keeps() {
    model("holds: of two on one segment one is lost, against the handle", 3, || {
        let setup = Setup::new();
        let segment = setup.take().unwrap();
        let (alias, central) = (segment.alias(), setup.central.clone());
        let shared = Resource::Segment(segment.alias()).shared();
        let (lost, other) = (Hold::new(shared.clone()), Hold::new(shared));
        let releasing = spawn(|| other.release());
        // SAFETY: the segment is lent, and the buffer is only let go of.
        let handle = unsafe { PinnedBuf::new(segment, 0) };
        let dropping = spawn(|| Lend::abandon(handle, KEY));
        step();
        let mut quarantined = Vec::new();
        lost.quarantine(&mut quarantined);
        assert_eq!(quarantined.len(), 1);
        for thread in [releasing, dropping] {
            thread.join().unwrap();
        }
        assert_eq!(alias.descriptor().word().state(), state::QUARANTINED, "a lost hold lets the segment go");
        assert_eq!(central.unlisted_bytes(), (0, true));
        let others: Vec<Segment> = std::iter::from_fn(|| setup.take()).collect();
        // Each of the two pages is a run, with one segment.
        assert!(others.len() == 1 && others.iter().all(|other| other.base() != alias.base()));
        for segment in others {
            // SAFETY: taken above, and nothing uses it.
            unsafe { segment.release() };
        }
        setup.central.close();
    });
}

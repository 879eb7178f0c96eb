//! What two threads do to one timeline at the same time, with a driver that pauses in the middle of a call or panics in
//! one; and what a timeline notes of its events.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::EVENT_TRIES;
use crate::device::confined::Confined;
use crate::device::context::{self, Hand};
use crate::device::handle::Device;
use crate::device::host::{Call, Failure, Fault, HostConfig, HostNode};
use crate::error::Error;
use crate::locks::Mutex;
use crate::pool::Pool;
use crate::region::Unpinned;
use crate::stream::Stream;

const MISTAKE: Error = Error::Internal("a mistake, on purpose");
/// More than half of the pool's memory, so that there is room for one segment.
const LARGE: usize = 300_000;

/// A host device that a test moves by hand: it hangs but while [`context::Context::advance`] runs all that is queued.
pub(super) fn by_hand() -> (HostNode, Device) {
    let node = HostNode::new(HostConfig::new()).unwrap();
    node.hang(0);
    let own = node.clone();
    let hand = Hand::new(move || {
        let is_queued = || own.live(0).queued > 0;
        let any = is_queued();
        own.resume(0);
        until("the queues run empty", || !is_queued());
        own.hang(0);
        any
    });
    let context = context::Context::by_hand(node.driver(0).unwrap(), Some(hand)).unwrap();
    (node, Device::start(context).unwrap())
}

/// A host device with a stream and a pool.
struct Rig {
    node: HostNode,
    device: Device,
    stream: Stream,
    pool: Pool,
}

impl Rig {
    /// A device by hand, with a trace of its calls.
    fn by_hand() -> Self {
        let rig = Self::of(by_hand());
        rig.node.start_trace();
        rig
    }

    fn new() -> Self {
        let node = HostNode::new(HostConfig::new()).unwrap();
        let device = Device::on(&node, 0).unwrap();
        Self::of((node, device))
    }

    fn of((node, device): (HostNode, Device)) -> Self {
        let pool = Pool::builder(&device).capacity(512 << 10).unpinned(Unpinned::Allow).build().unwrap();
        let stream = device.stream().unwrap();
        Self { node, device, stream, pool }
    }

    /// Submits a hold of nothing.
    fn hold(&self) {
        drop(self.stream.hold(()).unwrap());
    }

    fn close(&self) {
        _ = self.stream.timeline().close();
    }

    /// Lets the device come to the end of all work, and looks at every stream.
    fn settle(&self) {
        for _ in 0..4 {
            self.device.reap();
            self.device.context().advance();
        }
    }

    /// The number, the event's state and the date of each buffer in flight.
    fn kept(&self) -> Vec<(u64, &'static str, Option<Instant>)> {
        let mut kept = Vec::new();
        self.stream.timeline().for_each_kept(|_, seq, event, since| kept.push((seq, event.name(), since)));
        kept
    }

    /// Holds a buffer.
    fn hold_buffer(&self) {
        drop(self.stream.hold(self.pool.checkout(100).unwrap()).unwrap());
    }

    /// How many such calls were made since the trace began.
    fn calls(&self, call: Call) -> usize {
        self.node.trace().iter().filter(|made| **made == call).count()
    }

    /// The next call of this kind fails.
    fn fail(&self, call: Call, failure: Failure) {
        self.node.fail(Fault { device: 0, call, nth: 0, failure });
    }

    /// The first call of this kind tells that it has begun, and waits until the test lets it go on.
    fn pause(&self, at: Call) -> (Receiver<()>, SyncSender<()>) {
        let ((begun, began), (go_on, may)) = (sync_channel(1), sync_channel(1));
        let (first, may) = (AtomicBool::new(true), Mutex::new(may));
        self.node.hook(move |call| {
            if call == at && first.swap(false, Ordering::SeqCst) {
                begun.send(()).unwrap();
                may.lock().recv().unwrap();
            }
        });
        (began, go_on)
    }

    /// The next call of this kind panics whenever that is armed: it stands for a mistake in this crate.
    fn panics(&self, at: Call) -> Arc<AtomicBool> {
        let armed = Arc::new(AtomicBool::new(false));
        let is_armed = armed.clone();
        self.node
            .hook(move |call| assert!(call != at || !is_armed.swap(false, Ordering::SeqCst), "{MISTAKE}"));
        armed
    }

    /// Bytes that are not free.
    fn out(&self) -> usize {
        let stats = self.pool.stats();
        stats.in_flight_bytes + stats.checked_out_bytes + stats.quarantined_bytes
    }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn completed(stream: &Stream) -> u64 {
    stream.timeline().look().completed
}

/// The reaper panics in its look at one stream. What is in flight there is quarantined and the stream is lost; other
/// streams, and later work, go on.
#[test]
fn a_panic_of_the_reaper_costs_one_stream() {
    const LEN: usize = 4096;
    let rig = Rig::new();
    let (armed, memory) = (rig.panics(Call::Query), rig.device.alloc(LEN).unwrap());
    let filled = |byte| {
        let mut buf = rig.pool.checkout(LEN).unwrap();
        buf.try_resize(LEN, byte).unwrap();
        buf
    };
    rig.node.hang(0);
    drop(rig.stream.upload(Arc::new(filled(1)), &memory).unwrap());
    armed.store(true, Ordering::SeqCst);
    until("the stream is not given up", || rig.stream.timeline().usable().is_err());
    assert!(matches!(rig.stream.timeline().usable(), Err(Error::Internal(_))));
    // The device may always use it.
    let kept = rig.out();
    assert!(kept >= LEN, "{:?}", rig.pool.stats());
    rig.node.resume(0);
    let other = rig.device.stream().unwrap();
    let back = other.upload(filled(2), &memory).unwrap().wait().unwrap();
    assert!(back.iter().all(|byte| *byte == 2));
    drop(other.upload(back, &memory).unwrap());
    until("the reaper has ended", || rig.out() <= kept);
    rig.pool.check().unwrap();
}

/// The submission of a chunk panics before any copy is made. Its transfer does not read as done, and the copier goes
/// on.
#[test]
fn a_panic_in_a_submission_fails_its_transfer() {
    const LEN: usize = 256;
    let rig = Rig::new();
    let (at_copy, memory) = (rig.panics(Call::Copy), rig.device.alloc(LEN).unwrap());
    let copier = crate::Copier::builder(&rig.pool, &rig.device).threads(1).build().unwrap();
    let upload = || copier.upload(vec![7; LEN], &memory).unwrap().wait();
    upload().unwrap();
    for _ in 0..4 {
        at_copy.store(true, Ordering::SeqCst);
        assert!(upload().is_err());
        assert!(!at_copy.load(Ordering::SeqCst), "nothing was submitted");
        upload().unwrap();
    }
    drop(copier);
    until("memory is still in use", || rig.out() == 0);
    rig.pool.check().unwrap();
}

#[test]
fn an_event_that_is_being_recorded_keeps_the_timeline_listed() {
    let rig = Rig::by_hand();
    let (began, go_on) = rig.pause(Call::Record);
    rig.hold();
    let timeline = rig.stream.timeline().clone();
    let recording = std::thread::spawn(move || _ = timeline.close());
    began.recv().unwrap();
    // Meanwhile the event of another entry covers the first one too, and completes.
    rig.hold();
    rig.settle();
    // Now only the recording thread and the device's list hold the stream.
    let Rig { node, device, stream, pool } = rig;
    drop((stream, pool));
    device.reap();
    go_on.send(()).unwrap();
    recording.join().unwrap();
    for _ in 0..4 {
        device.context().advance();
        device.reap();
    }
    drop(device);
    let [made, destroyed] = [Call::CreateEvent, Call::DestroyEvent]
        .map(|call| node.trace().iter().filter(|made| **made == call).count());
    assert_eq!(made, destroyed, "an event is neither in use nor destroyed");
}

/// The stream is lost, though not its device, while a thread asks about its event. The event counts as leaked, and so
/// it is not recorded again, although the answer says that it is complete.
#[test]
fn an_event_that_is_asked_about_while_its_stream_is_lost_is_leaked_once() {
    let rig = Rig::by_hand();
    let (began, go_on) = rig.pause(Call::Query);
    rig.hold();
    rig.close();
    rig.device.context().advance();
    let timeline = rig.stream.timeline().clone();
    let asking = std::thread::spawn(move || timeline.ask());
    began.recv().unwrap();
    rig.stream.timeline().lose(&MISTAKE);
    go_on.send(()).unwrap();
    asking.join().unwrap();
    // Another stream records an event, a fresh one.
    drop(rig.device.stream().unwrap().hold(()).unwrap());
    rig.settle();
    assert_eq!(rig.calls(Call::CreateEvent), 2, "a leaked event was recorded again");
    let holds = rig.device.context().holds().clone();
    let Rig { node, device, stream, pool } = rig;
    drop((device, stream, pool));
    let destroyed = node.trace().iter().filter(|call| **call == Call::DestroyEvent).count();
    assert_eq!((holds.leaks.get(), destroyed), (1, 1), "leaked, and not destroyed");
}

/// A report tells since when a look has known of what is in flight, and never an earlier time. Of what is timed it
/// tells when it was submitted.
#[test]
fn what_is_in_flight_is_dated_by_looks() {
    let rig = Rig::by_hand();
    let start = Instant::now();
    (0..2).for_each(|_| rig.hold_buffer());
    let [(1, "due", Some(first)), (1, "due", None)] = rig.kept()[..] else { panic!("{:?}", rig.kept()) };
    std::thread::sleep(Duration::from_millis(1));
    rig.device.reap();
    rig.hold_buffer();
    let [(1, "recorded", Some(again)), (1, _, Some(second)), (2, "due", None)] = rig.kept()[..] else {
        panic!("{:?}", rig.kept())
    };
    assert!(start <= first && first == again && first < second);
    std::thread::sleep(Duration::from_millis(1));
    (0..2).for_each(|_| _ = rig.device.reap());
    let [_, (1, _, Some(again)), (2, _, Some(third))] = rig.kept()[..] else { panic!("{:?}", rig.kept()) };
    assert!(second == again && second < third);
    rig.settle();
    assert!(rig.kept().is_empty());
}

/// While an event is being recorded, it is due, and no other is recorded in its place. It fails when the driver has
/// refused it.
#[test]
fn an_event_that_is_being_recorded_is_due() {
    let rig = Rig::by_hand();
    let (began, go_on) = rig.pause(Call::Record);
    let state = || rig.kept().first().map(|kept| kept.1);
    rig.hold_buffer();
    let timeline = rig.stream.timeline().clone();
    let recording = std::thread::spawn(move || _ = timeline.close());
    began.recv().unwrap();
    assert_eq!(state(), Some("due"));
    rig.device.reap();
    assert_eq!(rig.calls(Call::Record), 0, "recorded twice");
    rig.fail(Call::Record, Failure::Transient);
    go_on.send(()).unwrap();
    recording.join().unwrap();
    assert_eq!(state(), Some("failing"));
    // A later event covers it.
    rig.close();
    assert_eq!(state(), Some("recorded"));
    rig.settle();
    assert_eq!(state(), None);
}

/// A copy counts as complete though its segment was claimed meanwhile, and a reader that looks twice sees that
/// something has changed.
#[test]
fn a_claim_leaves_the_copy_to_be_completed() {
    let rig = Rig::by_hand();
    let timeline = rig.stream.timeline();
    let flight = || timeline.flight(rig.pool.central().number());
    drop(rig.stream.hold(rig.pool.checkout(LARGE).unwrap()).unwrap());
    let claimed = rig.pool.checkout_on(&rig.stream, LARGE - 100).unwrap();
    assert!(claimed.was_claimed() && rig.pool.stats().requested_bytes == LARGE - 100);
    let (look, before) = (timeline.look(), flight());
    assert!(look.claimed_bytes >= LARGE && look.claimed_bytes == look.in_flight_bytes, "{look:?}");
    assert_eq!((before.0, before.1), (look.in_flight_bytes, look.claimed_bytes));
    rig.settle();
    let look = timeline.look();
    assert_eq!((look.submitted, look.completed, look.in_flight), (1, 1, 0));
    assert_ne!(flight().2, before.2);
    drop(claimed);
    assert_eq!(rig.pool.check().unwrap().requested_bytes, 0);
}

/// While the one thread that can name a stream is about to record its event, no other thread records one that covers
/// the stream. When that thread could not, another one does.
#[test]
fn the_event_of_a_confined_stream_is_left_to_its_thread_unless_that_failed() {
    let rig = Rig::by_hand();
    let (began, go_on) = rig.pause(Call::CreateEvent);
    let covering = rig.device.stream().unwrap();
    let (handle, covering) = (rig.stream.timeline().stream(), covering.timeline().stream());
    let of = rig.device.clone();
    let submitting = std::thread::spawn(move || {
        let stream = Stream::adopted(&of, handle, None, None, Some(Confined::here(covering)));
        drop(stream.hold(()).unwrap());
        stream
    });
    began.recv().unwrap();
    rig.device.reap();
    assert_eq!(rig.calls(Call::Record), 0, "recorded by another thread");
    rig.fail(Call::CreateEvent, Failure::Transient);
    go_on.send(()).unwrap();
    let stream = submitting.join().unwrap();
    rig.settle();
    assert_eq!((completed(&stream), rig.calls(Call::Record)), (1, 1));
    // A thread that destroys the stream waits until no other one names it.
    assert_eq!(stream.timeline().state.lock().under_way, 0);
}

#[test]
fn no_more_events_are_recorded_than_are_needed() {
    let rig = Rig::by_hand();
    // The first fails. The second covers it, and the third comes after both.
    rig.hold();
    rig.fail(Call::Record, Failure::Transient);
    rig.close();
    rig.close();
    let held = rig.stream.hold(()).unwrap();
    rig.close();
    rig.device.reap();
    assert_eq!(rig.calls(Call::Record), 3);
    // A question about a number that is closed leaves the open one open.
    rig.hold();
    assert!(!held.is_done().unwrap());
    assert_eq!(rig.calls(Call::Record), 3);
    rig.settle();
    // The device's answer voids the event only if it is the one that a capture gives, on a stream that can be captured.
    for (is_shared, failure) in [(false, Failure::Capture), (true, Failure::Argument)] {
        let (before, stream) = (rig.calls(Call::Record), rig.device.stream().unwrap());
        if is_shared {
            stream.timeline().share();
        }
        drop(stream.hold(()).unwrap());
        rig.fail(Call::Query, failure);
        rig.settle();
        assert_eq!((rig.calls(Call::Record), completed(&stream)), (before + 1, 1), "{failure:?}");
    }
    // Where nothing waits for an event, none is due after a failure.
    let before = rig.calls(Call::Record);
    rig.fail(Call::Record, Failure::Transient);
    assert!(rig.device.stream().unwrap().wait_for(&rig.stream).is_err());
    rig.settle();
    assert_eq!(rig.calls(Call::Record), before + 1);
}

#[test]
fn a_driver_that_cannot_answer_for_long_loses_no_stream() {
    let rig = Rig::by_hand();
    rig.hold();
    (0..=EVENT_TRIES).for_each(|_| rig.fail(Call::Query, Failure::Transient));
    (0..=EVENT_TRIES).for_each(|_| _ = rig.device.reap());
    assert_eq!(rig.node.clear_faults(), 0);
    rig.settle();
    rig.stream.timeline().usable().unwrap();
    assert_eq!(completed(&rig.stream), 1);
}

/// Only failures in a row show that no event can be recorded: behind a long kernel nothing is complete in between. The
/// events that failed are used again when a later one is complete.
#[test]
fn failures_to_record_with_successes_in_between_lose_no_stream() {
    let rig = Rig::by_hand();
    let fail_once = |failure| {
        rig.fail(Call::Record, failure);
        rig.hold();
        rig.close();
        rig.close();
        assert_eq!(rig.node.clear_faults(), 0);
    };
    for _ in 0..100 {
        fail_once(Failure::Transient);
        rig.settle();
    }
    assert_eq!(completed(&rig.stream), 100);
    let made = rig.calls(Call::CreateEvent);
    assert!(made <= 8, "{made} events were made");
    (0..=EVENT_TRIES).for_each(|_| fail_once(Failure::Argument));
    rig.stream.timeline().usable().unwrap();
    assert_eq!(completed(&rig.stream), 100);
    rig.settle();
    assert!(rig.stream.timeline().is_idle());
}

/// Also one that goes on submitting: else what it was given would never come back, and never be quarantined.
#[test]
fn a_stream_that_can_never_be_asked_is_lost() {
    let rig = Rig::by_hand();
    for _ in 0..EVENT_TRIES {
        assert!(rig.stream.timeline().usable().is_ok());
        rig.fail(Call::Query, Failure::Argument);
        rig.hold();
        rig.device.reap();
    }
    assert!(rig.stream.timeline().usable().is_err());
    assert!(rig.stream.timeline().is_idle());
}

/// It keeps what the device may always use, and thereby the device open; and nothing else.
#[test]
fn a_stream_that_is_lost_quarantines_what_the_device_may_use() {
    let rig = Rig::by_hand();
    let (using, holds) = (rig.device.stream().unwrap(), rig.device.context().holds());
    let held = rig.stream.hold(()).unwrap();
    rig.stream.timeline().for_each_kept(|segment, _, _, _| panic!("a report names {segment:?}"));
    rig.stream.timeline().lose(&MISTAKE);
    assert!(held.is_done().is_err() && rig.calls(Call::CreateEvent) == 0);
    assert!(!holds.has_quarantined());
    // A segment is its pool's, which counts it.
    drop(using.hold(Arc::new(rig.pool.checkout(100).unwrap())).unwrap());
    using.timeline().lose(&MISTAKE);
    assert!(!holds.has_quarantined());
    assert!(rig.pool.check().unwrap().quarantined_bytes > 0);
    // The registration of a value is the device's.
    let (using, registered) = (rig.device.stream().unwrap(), rig.device.register(vec![0; 100]).unwrap());
    drop(using.hold(registered).unwrap());
    using.timeline().lose(&MISTAKE);
    assert!(holds.has_quarantined());
}

#[test]
fn a_thread_that_waits_for_long_leaves_the_asking_to_the_reaper() {
    let rig = Rig::new();
    rig.node.hang(0);
    let held = rig.stream.hold(()).unwrap();
    let waiting = std::thread::spawn(move || held.wait());
    until("it goes on asking", || !rig.stream.timeline().state.lock().waiting.is_empty());
    rig.node.resume(0);
    waiting.join().unwrap().unwrap();
}

#[test]
fn a_task_that_waits_no_more_is_let_go_of() {
    let rig = Rig::by_hand();
    let mut held = rig.stream.hold(()).unwrap();
    let waits = || !rig.stream.timeline().state.lock().waiting.is_empty();
    assert!(!waits());
    assert!(std::pin::pin!(&mut held).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(waits());
    drop(held);
    assert!(!waits() && !rig.stream.timeline().is_idle());
    rig.settle();
}

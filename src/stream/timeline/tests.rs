//! What two threads do to one timeline at the same time, with a driver that pauses in the middle of
//! a call or panics in one; and what a timeline notes of its events.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::{EVENT_TRIES, SEQ_ENTRIES};
use crate::device::Confined;
use crate::device::context::{self, Hand};
use crate::device::handle::Device;
use crate::device::host::{Call, Failure, Fault, HostConfig, HostNode};
use crate::error::Error;
use crate::locks::Mutex;
use crate::pool::Pool;
use crate::region::Unpinned;
use crate::segment::Class;
use crate::stream::Stream;
use crate::stream::hold::Retain;

const MISTAKE: Error = Error::Internal("a mistake, on purpose");

/// A host device that a test moves by hand: it hangs but while [`context::Context::advance`] runs
/// all that is queued.
pub(super) fn by_hand() -> (HostNode, Device) {
    let node = HostNode::new(HostConfig::new()).unwrap();
    node.hang(0);
    let own = node.clone();
    let hand: Hand = Box::new(move || {
        let is_queued = || own.live(0).queued > 0;
        let any = is_queued();
        own.resume(0);
        until("the queues run empty", || !is_queued());
        own.hang(0);
        any
    });
    let context = context::Context::new(node.driver(0).unwrap(), Some(hand)).unwrap();
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

    /// Holds a buffer.
    fn hold_buffer(&self) {
        drop(self.stream.hold(self.pool.checkout(100).unwrap()).unwrap());
    }

    fn close(&self) {
        _ = self.stream.timeline().close();
    }

    /// The state of the event and the date of each buffer in flight.
    fn kept(&self) -> Vec<(&'static str, Option<Instant>)> {
        let mut kept = Vec::new();
        self.stream.timeline().for_each_kept(|_, _, event, since| kept.push((event.name(), since)));
        kept
    }

    fn calls(&self, call: Call) -> usize {
        calls(&self.node, call)
    }

    /// The next call of this kind fails.
    fn fail(&self, call: Call, failure: Failure) {
        self.node.fail(Fault { device: 0, call, nth: 0, failure });
    }

    /// The next call of this kind panics when armed: it stands for a mistake in this crate.
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

/// How many such calls were made since the trace began.
fn calls(node: &HostNode, call: Call) -> usize {
    node.trace().iter().filter(|made| **made == call).count()
}

/// Lets the device come to the end of all work, and looks at every stream.
fn settle(device: &Device) {
    for _ in 0..4 {
        device.reap();
        device.context().advance();
    }
}

/// Does `work` on another thread, and `meanwhile` in the middle of the first call of this kind.
fn amid<R: Send>(node: &HostNode, at: Call, work: impl FnOnce() -> R + Send, meanwhile: impl FnOnce()) -> R {
    let ((begun, began), (go_on, may)) = (sync_channel(1), sync_channel(1));
    let (first, may) = (AtomicBool::new(true), Mutex::new(may));
    node.hook(move |call| {
        if call == at && first.swap(false, Ordering::SeqCst) {
            begun.send(()).unwrap();
            may.lock().recv().unwrap();
        }
    });
    std::thread::scope(|scope| {
        // Dropped in a panic, which ends the other thread's pause.
        let go_on = go_on;
        let working = scope.spawn(work);
        began.recv().unwrap();
        meanwhile();
        go_on.send(()).unwrap();
        working.join().unwrap()
    })
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

/// The reaper panics in its look at one stream. What is in flight there is quarantined and the
/// stream is lost; other streams, and later work, go on.
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

/// The submission of a chunk panics before any copy is made. Its transfer does not read as done,
/// and the copier goes on.
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
    let (node, device, timeline) = (rig.node.clone(), rig.device.clone(), rig.stream.timeline().clone());
    rig.hold();
    let recording = move || _ = timeline.close();
    amid(&node, Call::Record, recording, || {
        // The event of another entry covers the first one too, and completes. Then only the
        // recording thread and the device's list hold the stream.
        rig.hold();
        settle(&device);
        drop(rig);
        device.reap();
    });
    settle(&device);
    drop(device);
    let [made, destroyed] = [Call::CreateEvent, Call::DestroyEvent].map(|call| calls(&node, call));
    assert_eq!(made, destroyed, "an event is neither in use nor destroyed");
}

/// The stream is lost, though not its device, while a thread asks about its event. The event is not
/// recorded again, although the answer says that it is complete.
#[test]
fn an_event_that_is_asked_about_while_its_stream_is_lost_is_set_aside() {
    let rig = Rig::by_hand();
    let node = rig.node.clone();
    rig.hold();
    rig.close();
    rig.device.context().advance();
    let timeline = rig.stream.timeline();
    amid(&node, Call::Query, || timeline.ask(), || timeline.lose(&MISTAKE));
    // Another stream records an event, a fresh one.
    drop(rig.device.stream().unwrap().hold(()).unwrap());
    settle(&rig.device);
    assert_eq!(rig.calls(Call::CreateEvent), 2, "an event that does not count was recorded again");
    drop(rig);
    assert_eq!(calls(&node, Call::DestroyEvent), 2, "both are destroyed, each once");
}

/// A report tells which event a buffer in flight waits for, and since when a look has known of it;
/// or, of what is timed, when it was submitted.
#[test]
fn a_report_tells_the_event_and_the_date_of_what_is_in_flight() {
    let rig = Rig::by_hand();
    let start = Instant::now();
    (0..2).for_each(|_| rig.hold_buffer());
    let [("due", Some(first)), ("due", None)] = rig.kept()[..] else { panic!("{:?}", rig.kept()) };
    rig.device.reap();
    let [("recorded", Some(again)), (_, Some(second))] = rig.kept()[..] else { panic!("{:?}", rig.kept()) };
    assert!(start <= first && first == again && first < second);
    rig.hold_buffer();
    let (state, close) = (|| rig.kept().last().map(|(event, _)| *event), || rig.close());
    amid(&rig.node, Call::Record, close, || {
        rig.device.reap();
        let dates: Vec<_> = rig.kept().iter().map(|(_, since)| since.unwrap()).collect();
        assert!(dates[..2] == [first, second] && second < dates[2]);
        assert_eq!((state(), rig.calls(Call::Record)), (Some("due"), 1), "recorded twice");
        rig.fail(Call::Record, Failure::Transient);
    });
    assert_eq!(state(), Some("failing"));
    // A later event covers it.
    rig.close();
    assert_eq!(state(), Some("recorded"));
    // A reader that looks twice sees that something has changed.
    let moves = || rig.stream.timeline().flight(rig.pool.central().number()).2;
    let before = moves();
    // A buffer is claimed and given up.
    let timeline = rig.stream.timeline();
    timeline.unclaim(timeline.claim(rig.pool.central(), Class::of(100).unwrap(), 100).unwrap());
    let between = moves();
    settle(&rig.device);
    assert!(state().is_none() && before != between && between != moves());
}

/// While the one thread that can name a stream is about to record its event, no other thread
/// records one that covers the stream. When that thread could not, another one does.
#[test]
fn the_event_of_a_confined_stream_is_left_to_its_thread_unless_that_failed() {
    let rig = Rig::by_hand();
    let covering = rig.device.stream().unwrap();
    let (handle, covering) = (rig.stream.timeline().stream(), covering.timeline().stream());
    let submit = || {
        let stream = Stream::adopted(&rig.device, handle, None, None, Some(Confined::here(covering)));
        drop(stream.hold(()).unwrap());
        stream
    };
    let stream = amid(&rig.node, Call::CreateEvent, submit, || {
        rig.device.reap();
        assert_eq!(rig.calls(Call::Record), 0, "recorded by another thread");
        rig.fail(Call::CreateEvent, Failure::Transient);
    });
    settle(&rig.device);
    assert_eq!((completed(&stream), rig.calls(Call::Record)), (1, 1));
    // A thread that destroys the stream waits until no other one names it.
    assert_eq!(stream.timeline().state.lock().under_way, 0);
}

#[test]
fn a_number_is_closed_when_it_is_full_or_waited_for() {
    let rig = Rig::by_hand();
    for entries in 1..=2 * SEQ_ENTRIES + 1 {
        rig.hold();
        assert_eq!(rig.calls(Call::Record), entries / SEQ_ENTRIES);
    }
    let mut held = rig.stream.hold(()).unwrap();
    for _ in 0..2 {
        assert!(std::pin::pin!(&mut held).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(rig.calls(Call::Record), 3);
    }
    settle(&rig.device);
    // One in sixteen is timed: the first, the seventeenth and the thirty-third.
    assert_eq!(rig.device.context().flights.lock().count(), 3);
}

#[test]
fn no_more_events_are_made_and_recorded_than_are_needed() {
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
    settle(&rig.device);
    // The device's answer voids the event only if it is the one that a capture gives, on a stream
    // that can be captured.
    for (is_shared, failure) in [(false, Failure::Capture), (true, Failure::Argument)] {
        let (before, stream) = (rig.calls(Call::Record), rig.device.stream().unwrap());
        if is_shared {
            stream.timeline().share();
        }
        drop(stream.hold(()).unwrap());
        rig.fail(Call::Query, failure);
        settle(&rig.device);
        assert_eq!((rig.calls(Call::Record), completed(&stream)), (before + 1, 1), "{failure:?}");
    }
    // A question about what is complete leaves the open number open, on a shared stream, too.
    let stream = rig.device.stream().unwrap();
    stream.timeline().share();
    let mut held = stream.hold(()).unwrap();
    settle(&rig.device);
    let before = rig.calls(Call::Record);
    drop(stream.hold_patiently(()).unwrap());
    assert!(std::pin::pin!(&mut held).poll(&mut Context::from_waker(Waker::noop())).is_ready());
    assert_eq!(rig.calls(Call::Record), before);
    settle(&rig.device);
    // Where nothing waits for an event, none is due after a failure.
    let before = rig.calls(Call::Record);
    rig.fail(Call::Record, Failure::Transient);
    assert!(rig.device.stream().unwrap().wait_for(&rig.stream).is_err());
    settle(&rig.device);
    assert_eq!(rig.calls(Call::Record), before + 1);
    // Events that failed are used again when the next one is complete.
    let rig = Rig::by_hand();
    for _ in 0..100 {
        rig.hold();
        rig.fail(Call::Record, Failure::Transient);
        settle(&rig.device);
    }
    assert_eq!((rig.node.clear_faults(), completed(&rig.stream)), (0, 100));
    assert_eq!(rig.calls(Call::CreateEvent), 2);
}

/// A driver that cannot answer for long loses no stream, nor do recordings that fail with others in
/// between, although nothing completes meanwhile behind a long kernel. A stream that can never be
/// asked is lost, also one that goes on submitting: else what it was given would never come back,
/// and never be quarantined.
#[test]
fn only_lasting_failures_in_a_row_lose_a_stream() {
    for (call, failure, lost) in [
        (Call::Query, Failure::Transient, None),
        (Call::Record, Failure::Argument, None),
        (Call::Query, Failure::Argument, Some(EVENT_TRIES)),
    ] {
        let rig = Rig::by_hand();
        let timeline = rig.stream.timeline();
        let is_lost = |_: &u32| {
            rig.fail(call, failure);
            rig.hold();
            rig.device.reap();
            rig.close();
            timeline.usable().is_err()
        };
        assert_eq!((1..=EVENT_TRIES + 1).find(is_lost), lost, "{call:?}, {failure:?}");
        assert_eq!(rig.node.clear_faults(), 0);
        settle(&rig.device);
        assert!(timeline.is_idle());
        assert_eq!(completed(&rig.stream), lost.map_or(u64::from(EVENT_TRIES) + 1, |_| 0));
    }
}

/// A device that lacks events gets them back as what it has recorded is completed, and else never.
#[test]
fn a_lasting_lack_of_events_loses_a_stream_that_has_none_recorded() {
    for recorded in [0, 1] {
        let rig = Rig::by_hand();
        for _ in 0..recorded {
            rig.hold();
            rig.close();
        }
        rig.hold();
        for _ in 0..EVENT_TRIES {
            rig.fail(Call::CreateEvent, Failure::Transient);
            rig.close();
        }
        assert_eq!((rig.node.clear_faults(), rig.stream.timeline().usable().is_err()), (0, recorded == 0));
    }
}

/// It keeps the device open by the device's own, such as a registration; a segment is its pool's.
#[test]
fn a_stream_that_is_lost_quarantines_what_the_device_may_use() {
    let rig = Rig::by_hand();
    let (using, holds) = (rig.device.stream().unwrap(), rig.device.context().holds());
    let held = rig.stream.hold(()).unwrap();
    assert!(rig.kept().is_empty());
    rig.stream.timeline().lose(&MISTAKE);
    assert!(held.is_done().is_err() && rig.calls(Call::CreateEvent) == 0);
    assert!(!holds.has_quarantined());
    drop(using.hold(rig.device.register(vec![0; 100]).unwrap()).unwrap());
    using.timeline().lose(&MISTAKE);
    assert!(holds.has_quarantined());
    // What several copies share is more than segments, if a part of it is.
    assert!(vec![Arc::new(())].for_each_segment(&mut |_| {}));
}

#[test]
fn whoever_waits_for_long_is_listed_until_it_waits_no_more() {
    let rig = Rig::new();
    rig.node.hang(0);
    let waits = || !rig.stream.timeline().state.lock().waiting.is_empty();
    // A task, which gives up.
    let mut held = rig.stream.hold(()).unwrap();
    assert!(!waits());
    assert!(std::pin::pin!(&mut held).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(waits());
    drop(held);
    assert!(!waits() && !rig.stream.timeline().is_idle());
    // A thread, which leaves the asking to the reaper.
    let held = rig.stream.hold(()).unwrap();
    let waiting = std::thread::spawn(move || held.wait());
    until("it goes on asking", waits);
    rig.node.resume(0);
    waiting.join().unwrap().unwrap();
}

//! What two threads do to one timeline at the same time, with a driver that pauses in the middle of a call or panics in
//! one.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use crate::locks::Mutex;

use super::EVENT_TRIES;
use super::look::Stillness;
use crate::device::confined::Confined;
use crate::device::handle::Device;
use crate::device::hooked::Hooked;
use crate::device::host::{Call, Failure, Fault, HostConfig, HostNode};
use crate::error::Error;
use crate::pool::Pool;
use crate::region::Unpinned;
use crate::stream::Stream;
use crate::stream::hold::Resource;

/// A stepped host device. The first call of one kind tells that it has begun, and waits until the test lets it go on.
struct Pause {
    node: HostNode,
    device: Device,
    began: Receiver<()>,
    go_on: SyncSender<()>,
    /// Calls of that kind.
    calls: Arc<AtomicU32>,
    /// Events that exist.
    events: Arc<AtomicI64>,
}

impl Pause {
    fn at(at: Call, name: &'static str) -> Self {
        let node = HostNode::new(HostConfig::new().stepped(3)).unwrap();
        let ((begun, began), (go_on, may)) = (sync_channel(1), sync_channel(1));
        let (calls, events) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicI64::new(0)));
        let (count, exist, may) = (calls.clone(), events.clone(), Mutex::new(may));
        let before = move |call| {
            match call {
                Call::CreateEvent => _ = exist.fetch_add(1, Ordering::SeqCst),
                Call::DestroyEvent => _ = exist.fetch_sub(1, Ordering::SeqCst),
                _ => {}
            }
            if call == at && count.fetch_add(1, Ordering::SeqCst) == 0 {
                begun.send(()).unwrap();
                may.lock().recv().unwrap();
            }
        };
        let device = Hooked::device(name, node.driver(0).unwrap(), before).unwrap();
        Self { node, device, began, go_on, calls, events }
    }
}

/// A host device that panics before one call of a kind, when that is armed: it stands for a mistake in this crate.
fn panics(node: &HostNode, at: Call, name: &'static str) -> (Device, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let is_armed = armed.clone();
    let before = move |call| {
        assert!(call != at || !is_armed.swap(false, Ordering::SeqCst), "a mistake, on purpose");
    };
    (Hooked::device(name, node.driver(0).unwrap(), before).unwrap(), armed)
}

/// The reaper panics in its look at one stream. What is in flight there is quarantined and the stream is lost; other
/// streams, and later work, go on.
#[test]
fn a_panic_of_the_reaper_costs_one_stream() {
    const LEN: usize = 4096;
    let node = HostNode::new(HostConfig::new()).unwrap();
    let (device, armed) = panics(&node, Call::Query, "panics");
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
    node.hang(0);
    let mut buf = pool.checkout(LEN).unwrap();
    buf.try_resize(LEN, 1).unwrap();
    drop(stream.upload(Arc::new(buf), &memory).unwrap());
    armed.store(true, Ordering::SeqCst);
    let since = Instant::now();
    while armed.load(Ordering::SeqCst) {
        assert!(since.elapsed() < Duration::from_secs(20), "the reaper has not asked");
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = loop {
        match stream.timeline().usable() {
            Ok(()) => std::thread::yield_now(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Internal(_)), "{error}");
    let out = |pool: &Pool| {
        let stats = pool.stats();
        stats.in_flight_bytes + stats.checked_out_bytes + stats.quarantined_bytes
    };
    // The device may use it for good.
    let kept = out(&pool);
    assert!(kept >= LEN, "{:?}", pool.stats());
    node.resume(0);
    let other = device.stream().unwrap();
    let mut buf = pool.checkout(LEN).unwrap();
    buf.try_resize(LEN, 2).unwrap();
    let back = other.upload(buf, &memory).unwrap().wait().unwrap();
    assert!(back.iter().all(|byte| *byte == 2));
    drop(other.upload(back, &memory).unwrap());
    let since = Instant::now();
    while out(&pool) > kept {
        assert!(since.elapsed() < Duration::from_secs(20), "the reaper has ended: {:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.check().unwrap();
}

/// The submission of a chunk panics before any copy is made. Its transfer does not read as done, and the copier goes on.
#[test]
fn a_panic_in_a_submission_fails_its_transfer() {
    const LEN: usize = 256;
    let node = HostNode::new(HostConfig::new()).unwrap();
    let (device, at_copy) = panics(&node, Call::Copy, "panics in submissions");
    let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let copier = crate::Copier::builder(&pool, &device).threads(1).build().unwrap();
    let memory = device.alloc(LEN).unwrap();
    let upload = || copier.upload(vec![7; LEN], &memory).unwrap().wait();
    upload().unwrap();
    for _ in 0..4 {
        at_copy.store(true, Ordering::SeqCst);
        assert!(upload().is_err());
        assert!(!at_copy.load(Ordering::SeqCst), "nothing was submitted");
        upload().unwrap();
    }
    drop(copier);
    let since = Instant::now();
    let in_use = || {
        let stats = pool.stats();
        stats.in_flight_bytes + stats.checked_out_bytes
    };
    while in_use() > 0 {
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.check().unwrap();
}

#[test]
fn a_mark_that_is_being_recorded_keeps_the_timeline_listed() {
    let Pause { node, device, began, go_on, events, .. } = Pause::at(Call::Record, "held up");
    let stream = device.stream().unwrap();
    drop(stream.hold(()).unwrap());
    let timeline = stream.timeline().clone();
    let recording = std::thread::spawn(move || timeline.close());
    began.recv().unwrap();
    // Meanwhile the event of another entry covers the first one too, and completes.
    drop(stream.hold(()).unwrap());
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
    // Now only the recording thread and the device's list hold the stream.
    drop(stream);
    device.reap();
    go_on.send(()).unwrap();
    recording.join().unwrap();
    while node.step() {}
    for _ in 0..4 {
        device.reap();
    }
    drop(device);
    assert_eq!(events.load(Ordering::SeqCst), 0, "an event is neither in use nor destroyed");
}

/// The stream is lost, though not its device, while a thread asks about its event. The event counts as leaked, and so it
/// is not recorded again, although the answer says that it is complete.
#[test]
fn an_event_that_is_asked_about_while_its_stream_is_lost_is_leaked_once() {
    let Pause { node, device, began, go_on, events, .. } = Pause::at(Call::Query, "asked");
    let stream = device.stream().unwrap();
    drop(stream.hold(()).unwrap());
    stream.timeline().close();
    while node.step() {}
    let timeline = stream.timeline().clone();
    let asking = std::thread::spawn(move || timeline.ask());
    began.recv().unwrap();
    stream.timeline().lose(&Error::Internal("a mistake, on purpose"));
    go_on.send(()).unwrap();
    asking.join().unwrap();
    // Another stream records an event, a fresh one.
    let other = device.stream().unwrap();
    drop(other.hold(()).unwrap());
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
    assert_eq!(events.load(Ordering::SeqCst), 2, "a leaked event was recorded again");
    let holds = device.context().holds().clone();
    drop((stream, other, device));
    assert_eq!((holds.leaks(), events.load(Ordering::SeqCst)), (1, 1), "leaked, and not destroyed");
}

/// A report tells since when the reaper has known of what is in flight, and never an earlier time.
#[test]
fn what_is_in_flight_is_dated_by_the_reapers_looks() {
    let (node, device, stream) = stepped();
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let dates = || {
        let mut dates = Vec::new();
        stream.timeline().for_each_kept(|_, seq, _, since| dates.push((seq, since)));
        dates
    };
    let hold = || drop(stream.hold(pool.checkout(100).unwrap()).unwrap());
    let start = Instant::now();
    hold();
    device.reap();
    hold();
    assert_eq!(dates(), [(1, None), (2, None)], "the look has closed the first number");
    device.reap();
    let [(1, Some(first)), (2, None)] = dates()[..] else { panic!("{:?}", dates()) };
    assert!(first >= start);
    std::thread::sleep(Duration::from_millis(1));
    (0..2).for_each(|_| _ = device.reap());
    let [(1, Some(before)), (2, Some(second))] = dates()[..] else { panic!("{:?}", dates()) };
    assert!(before == first && second > first);
    settle(&node, &device);
    assert!(dates().is_empty() && stream.timeline().state.lock().dates.is_empty());
    hold();
    (0..2).for_each(|_| _ = device.reap());
    assert!(!stream.timeline().state.lock().dates.is_empty());
    stream.timeline().lose(&Error::Internal("a mistake, on purpose"));
    assert!(stream.timeline().state.lock().dates.is_empty());
}

/// While an event is being recorded, it is due, and no other is recorded in its place. It fails when the driver has
/// refused it.
#[test]
fn an_event_that_is_being_recorded_is_due() {
    let Pause { node, device, began, go_on, calls, .. } = Pause::at(Call::Record, "recorded slowly");
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let stream = device.stream().unwrap();
    let states = || {
        let mut states = Vec::new();
        stream.timeline().for_each_kept(|_, _, event, _| states.push(event.name()));
        states
    };
    drop(stream.hold(pool.checkout(100).unwrap()).unwrap());
    let timeline = stream.timeline().clone();
    let recording = std::thread::spawn(move || timeline.close());
    began.recv().unwrap();
    assert_eq!(states(), ["due"]);
    device.reap();
    assert_eq!(calls.load(Ordering::SeqCst), 1, "recorded twice");
    node.fail(Fault { device: 0, call: Call::Record, nth: 0, failure: Failure::Transient });
    go_on.send(()).unwrap();
    recording.join().unwrap();
    assert_eq!(states(), ["failing"]);
    // A later event covers it.
    stream.timeline().close();
    assert_eq!(states(), ["recorded"]);
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
    assert!(states().is_empty());
}

/// A copy counts as complete though its segment was claimed meanwhile: by a buffer that is not used, and by one that is
/// used for the next copy.
#[test]
fn a_copy_whose_segment_was_claimed_counts_as_complete() {
    const LEN: usize = 300_000;
    let node = HostNode::new(HostConfig::new().stepped(3)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    // Room for one segment.
    let pool = Pool::builder(&device).capacity(512 << 10).unpinned(Unpinned::Allow).build().unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
    let filled = || {
        let mut buf = pool.checkout(LEN).unwrap();
        buf.try_resize(LEN, 1).unwrap();
        buf
    };
    let claimed = || {
        let buf = pool.checkout_on(&stream, LEN).unwrap();
        assert!(buf.was_claimed(), "not a segment in flight");
        buf
    };
    let complete = || {
        for _ in 0..4 {
            device.reap();
            while node.step() {}
        }
        let look = stream.timeline().look();
        (look.submitted, look.completed, look.in_flight)
    };
    drop(stream.upload(filled(), &memory).unwrap());
    let unused = claimed();
    assert_eq!(complete(), (1, 1, 0));
    drop(unused);
    // One that keeps device memory, and one that does not.
    drop(stream.upload(filled(), &memory).unwrap());
    drop(stream.download(&memory, claimed()).unwrap());
    assert_eq!(complete(), (3, 3, 0));
    drop(stream.hold(filled()).unwrap());
    drop(stream.download(&memory, claimed()).unwrap());
    assert_eq!(complete(), (5, 5, 0));
}

/// A stepped device with a stream, and a trace of its calls.
fn stepped() -> (HostNode, Device, Stream) {
    let node = HostNode::new(HostConfig::new().stepped(3)).unwrap();
    let device = Device::on(&node, 0).unwrap();
    let stream = device.stream().unwrap();
    node.start_trace();
    (node, device, stream)
}

/// Lets the device come to the end of all work, and looks at every stream.
fn settle(node: &HostNode, device: &Device) {
    for _ in 0..4 {
        device.reap();
        while node.step() {}
    }
}

/// The events that were recorded since the trace began.
fn records(node: &HostNode) -> usize {
    node.trace().iter().filter(|call| **call == Call::Record).count()
}

/// The next call of this kind fails.
fn fail(node: &HostNode, call: Call, failure: Failure) {
    node.fail(Fault { device: 0, call, nth: 0, failure });
}

/// While the one thread that can name a stream is about to record its event, no other thread records one that covers the
/// stream. When that thread could not, another one does.
#[test]
fn the_event_of_a_confined_stream_is_left_to_its_thread_unless_that_failed() {
    let Pause { node, device, began, go_on, .. } = Pause::at(Call::CreateEvent, "confined");
    let (own, covering) = (device.stream().unwrap(), device.stream().unwrap());
    let (handle, covering) = (own.timeline().stream(), covering.timeline().stream());
    node.start_trace();
    let of = device.clone();
    let submitting = std::thread::spawn(move || {
        let stream = Stream::adopted(&of, handle, None, None, Some(Confined::here(covering)));
        drop(stream.hold(()).unwrap());
        stream
    });
    began.recv().unwrap();
    device.reap();
    assert_eq!(records(&node), 0, "recorded by another thread");
    fail(&node, Call::CreateEvent, Failure::Transient);
    go_on.send(()).unwrap();
    let stream = submitting.join().unwrap();
    settle(&node, &device);
    assert_eq!((stream.timeline().look().completed, records(&node)), (1, 1));
    // A thread that destroys the stream waits until no other one names it.
    assert_eq!(stream.timeline().state.lock().closing, 0);
    // Where nothing waits for an event, none is due after a failure.
    let (node, device, stream) = stepped();
    fail(&node, Call::CreateEvent, Failure::Transient);
    assert!(device.stream().unwrap().wait_for(&stream).is_err());
    assert_eq!(stream.timeline().state.lock().unpublished, 0);
}

#[test]
fn no_more_events_are_recorded_than_are_needed() {
    let (node, device, stream) = stepped();
    // The first fails. The second covers it, and the third comes after both.
    drop(stream.hold(()).unwrap());
    fail(&node, Call::Record, Failure::Transient);
    stream.timeline().close();
    stream.timeline().close();
    let held = stream.hold(()).unwrap();
    stream.timeline().close();
    device.reap();
    assert_eq!(records(&node), 3);
    // A question about a number that is closed leaves the open one open.
    drop(stream.hold(()).unwrap());
    assert!(!held.is_done().unwrap());
    assert_eq!(records(&node), 3);
    settle(&node, &device);
    // The device's answer voids the event only if it is the one that a capture gives, on a stream that can be captured.
    for (is_shared, failure) in [(false, Failure::Capture), (true, Failure::Argument)] {
        let (before, stream) = (records(&node), device.stream().unwrap());
        if is_shared {
            stream.timeline().share();
        }
        drop(stream.hold(()).unwrap());
        fail(&node, Call::Query, failure);
        settle(&node, &device);
        assert_eq!((records(&node), stream.timeline().look().completed), (before + 1, 1), "{failure:?}");
    }
}

/// Patient entries of a shared stream wait for an event together. They are no less in flight than others.
#[test]
fn a_patient_entry_is_in_flight_under_the_open_number() {
    let (node, device, stream) = stepped();
    let timeline = stream.timeline();
    timeline.share();
    let submit = || {
        let mut submission = timeline.begin(Resource::Nothing, None).unwrap();
        submission.patient = true;
        submission.commit()
    };
    assert_eq!([(); 2].map(|()| submit()), [1, 1]);
    assert_eq!((timeline.is_complete(1).unwrap(), records(&node)), (false, 0));
    settle(&node, &device);
    assert_eq!((timeline.is_complete(1).unwrap(), records(&node)), (true, 1));
}

#[test]
fn a_driver_that_cannot_answer_for_long_loses_no_stream() {
    let (node, device, stream) = stepped();
    drop(stream.hold(()).unwrap());
    (0..=EVENT_TRIES).for_each(|_| fail(&node, Call::Query, Failure::Transient));
    (0..=EVENT_TRIES).for_each(|_| _ = device.reap());
    assert_eq!(node.clear_faults(), 0);
    settle(&node, &device);
    stream.timeline().usable().unwrap();
    assert_eq!(stream.timeline().look().completed, 1);
}

/// Otherwise a thread that steps the device would take another thread's work under way for the end of all work.
#[test]
fn a_timeline_is_busy_while_a_thread_asks_records_or_quarantines() {
    let (_node, _device, stream) = stepped();
    let timeline = stream.timeline();
    let seen = || (timeline.is_busy(), timeline.flight(0).1.is_none());
    assert_eq!(seen(), (false, false));
    timeline.asking.store(true, Ordering::Relaxed);
    assert_eq!(seen(), (true, false));
    timeline.asking.store(false, Ordering::Relaxed);
    timeline.state.lock().recording = 1;
    assert_eq!(seen(), (true, false));
    timeline.state.lock().recording = 0;
    // The segments' words have changed, and the central pools do not know yet.
    timeline.accounting.store(1, Ordering::Relaxed);
    assert_eq!(seen(), (true, true));
    timeline.accounting.store(0, Ordering::Relaxed);
    // Nothing comes any more after three looks in a row with no thread busy and nothing to step.
    let mut still = Stillness::default();
    assert_eq!([(); 2].map(|()| still.is_final(false)), [false; 2]);
    still.stepped();
    assert_eq!([(); 3].map(|()| still.is_final(false)), [false, false, true]);
}

/// It keeps what the device may use for good, and thereby the device open; and nothing else.
#[test]
fn a_stream_that_is_lost_quarantines_what_the_device_may_use() {
    let (node, device, empty) = stepped();
    let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let using = device.stream().unwrap();
    let lose = |stream: &Stream| stream.timeline().lose(&Error::Internal("a mistake, on purpose"));
    let held = empty.hold(()).unwrap();
    empty.timeline().for_each_kept(|segment, _, _, _| panic!("a report names {segment:?}"));
    lose(&empty);
    assert!(held.is_done().is_err() && !node.trace().contains(&Call::CreateEvent));
    assert!(!device.context().holds().has_quarantined());
    drop(using.hold(Arc::new(pool.checkout(100).unwrap())).unwrap());
    lose(&using);
    assert!(device.context().holds().has_quarantined());
    pool.check().unwrap();
}

/// In the statistics it has the claimer's length until it is back.
#[test]
fn a_claimed_segment_has_the_length_that_the_claimer_asked_for() {
    const LEN: usize = 300_000;
    let (node, device, stream) = stepped();
    // Room for one segment.
    let pool = Pool::builder(&device).capacity(512 << 10).unpinned(Unpinned::Allow).build().unwrap();
    drop(stream.hold(pool.checkout(LEN).unwrap()).unwrap());
    let claimed = pool.checkout_on(&stream, LEN - 100).unwrap();
    assert!(claimed.was_claimed());
    assert_eq!(pool.stats().requested_bytes, LEN - 100);
    let look = stream.timeline().look();
    assert!(look.claimed_bytes >= LEN && look.claimed_bytes == look.in_flight_bytes, "{look:?}");
    let central = pool.central().number();
    let before = stream.timeline().flight(central);
    assert_eq!((before.0.bytes, before.0.claimed), (look.in_flight_bytes, look.claimed_bytes));
    settle(&node, &device);
    // A reader that looks twice sees that something has changed.
    assert_ne!(stream.timeline().flight(central).1, before.1);
    drop(claimed);
    assert_eq!(pool.stats().requested_bytes, 0);
    pool.check().unwrap();
}

#[test]
fn a_thread_that_waits_for_long_leaves_the_asking_to_the_reaper() {
    let node = HostNode::new(HostConfig::new()).unwrap();
    let stream = Device::on(&node, 0).unwrap().stream().unwrap();
    node.hang(0);
    let held = stream.hold(()).unwrap();
    let waiting = std::thread::spawn(move || held.wait());
    let since = Instant::now();
    while stream.timeline().state.lock().waiting.is_empty() {
        assert!(since.elapsed() < Duration::from_secs(20), "it goes on asking");
        std::thread::sleep(Duration::from_millis(1));
    }
    node.resume(0);
    waiting.join().unwrap().unwrap();
}

#[test]
fn a_task_that_waits_no_more_is_let_go_of() {
    let (node, device, stream) = stepped();
    let mut held = stream.hold(()).unwrap();
    let waits = || !stream.timeline().state.lock().waiting.is_empty();
    assert!(!waits());
    assert!(std::pin::pin!(&mut held).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(waits());
    drop(held);
    assert!(!waits() && !stream.timeline().is_idle());
    settle(&node, &device);
}

#[test]
fn an_event_whose_recording_failed_is_used_again_after_a_later_one() {
    let (node, device, stream) = stepped();
    for _ in 0..100 {
        drop(stream.hold(()).unwrap());
        fail(&node, Call::Record, Failure::Transient);
        // The first fails, and the second covers what the first should have.
        stream.timeline().close();
        stream.timeline().close();
        settle(&node, &device);
        assert_eq!(stream.timeline().look().in_flight, 0);
    }
    let made = node.trace().iter().filter(|call| **call == Call::CreateEvent).count();
    assert!(made <= 8, "{made} events were made");
}

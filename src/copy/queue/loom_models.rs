//! Loom models of copy queues: no copy is left behind with nobody to submit it, nobody sleeps through what it waits
//! for, and buffers that go through a queue meet their handles as on a stream.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::bell::{Bell, Role};
use super::flow::Flow;
use super::lane::Lane;
use super::line::Line;
use crate::buffer::{InFlight, PinnedBuf};
use crate::central::{Segment, Wake};
use crate::device::memory::DeviceBuffer;
use crate::device::{DevicePtr, Transfer};
use crate::stream::awaited::{Place, Range};
use crate::stream::loom_models::{Setup, spawn, until};
use crate::stream::timeline::Resource;
use crate::sync::{AtomicBool, Ordering, UnsafeCell, model, step, thread};

/// Whoever pushes, and the thread that lies down to sleep.
#[test]
fn loom_bell_wakes() {
    model("queue: a push and a thread that goes to sleep", 3, || {
        let shared = Arc::new((Bell::asleep(), [AtomicBool::new(false), AtomicBool::new(false)]));
        let pushers = [0, 1].map(|lane| {
            let shared = shared.clone();
            loom::thread::spawn(move || {
                let (bell, lanes) = &*shared;
                step();
                lanes[lane].swap(true, Ordering::Relaxed);
                if bell.is_asleep() {
                    bell.ring();
                }
            })
        });
        let (bell, lanes) = &*shared;
        bell.introduce(thread::current());
        let mut taken = 0;
        // With a wake-up missed it sleeps for good, which loom tells.
        while taken < 2 {
            taken += lanes.iter().filter(|lane| lane.swap(false, Ordering::Relaxed)).count();
            if taken < 2 {
                bell.sleep(|| !lanes.iter().any(|lane| lane.load(Ordering::Relaxed)));
            }
        }
        for pusher in pushers {
            pusher.join().unwrap();
        }
    });
}

/// Threads that submit what they push while the queue's own sleeps.
#[test]
fn loom_role_leaves_nothing() {
    model("queue: threads that push and submit", 3, || {
        let shared = Arc::new((
            Bell::asleep(),
            Role::new(),
            [AtomicBool::new(false), AtomicBool::new(false)],
            UnsafeCell::new(0_u32),
        ));
        let pushers = [0, 1].map(|lane| {
            let shared = shared.clone();
            loom::thread::spawn(move || {
                let (bell, role, lanes, desk) = &*shared;
                let filled = || lanes.iter().any(|lane| lane.load(Ordering::Relaxed));
                // Twice, so that one who has found the role taken comes again.
                for _ in 0..2 {
                    step();
                    lanes[lane].swap(true, Ordering::Relaxed);
                    assert!(bell.is_asleep());
                    while let Some(held) = role.try_take() {
                        // SAFETY: loom fails the model if anyone else is at it.
                        desk.with_mut(|desk| unsafe { *desk += 1 });
                        for lane in lanes {
                            lane.swap(false, Ordering::Relaxed);
                        }
                        drop(held);
                        if !filled() {
                            break;
                        }
                    }
                }
            })
        });
        for pusher in pushers {
            pusher.join().unwrap();
        }
        assert!(!shared.2.iter().any(|lane| lane.load(Ordering::Relaxed)), "a copy is left behind");
    });
}

/// Whoever lies down to wait for a number, and whoever lands it.
#[test]
fn loom_lane_wakes() {
    model("queue: landing and a thread that lies down", 3, || {
        let lane = Arc::new(Lane::new());
        let lander = {
            let lane = lane.clone();
            loom::thread::spawn(move || {
                step();
                lane.land(1);
                step();
                lane.land(3);
            })
        };
        for last in [1, 2] {
            let range = Range { first: last, last };
            while !lane.verdict(&range).unwrap() {
                step();
                // With a wake-up missed it sleeps for good.
                if let Some(key) = lane.lie_down(last, Wake::Thread(thread::current())) {
                    thread::park_until(None);
                    lane.get_up(key);
                }
            }
        }
        lander.join().unwrap();
    });
}

/// What `CopyQueue::upload` does, step by step.
fn push(flow: &Arc<Flow>, lane: u32, segment: Segment, memory: &DeviceBuffer) -> InFlight<PinnedBuf> {
    let src = segment.base().as_ptr().cast_const();
    let transfer = Transfer::Upload { src, dst: DevicePtr(u64::from(lane) * 64), len: 64 };
    step();
    let line = Arc::new(Line { flow: flow.clone(), lane });
    let entry = line.lane().enter(4).unwrap();
    let number = line.submit(entry, transfer, Resource::Segment(segment.alias()), memory.allocation());
    // SAFETY: in flight, and touched when it has landed only.
    let buf = unsafe { PinnedBuf::new(segment, 0) };
    InFlight::queued(Place { line, range: Range { first: number, last: number }, quiet: false }, buf, None)
}

/// Two threads push; one drops its handle, the other waits; a third finds out what is done.
#[test]
fn loom_queue_lands() {
    model("queue: two threads push, a third lands", 2, || {
        let setup = Setup::new();
        let flow = Flow::new(setup.timeline.clone(), 2, 4, true, Arc::new(Bell::asleep()));
        let memory = DeviceBuffer::new(setup.timeline.context(), 64).unwrap();
        let pusher = {
            let (setup, flow, memory) = (setup.clone(), flow.clone(), memory.clone());
            spawn(move || {
                // Whoever reuses what is free may have all of it just now.
                let Some(segment) = setup.take() else { return };
                // It may have been the other's before.
                let before = setup.driver.ran(&segment);
                let flight = push(&flow, 0, segment.alias(), &memory);
                let landed = || flow.lanes().next().is_some_and(|lane| lane.has_landed(1));
                until(|| {
                    setup.timeline.advance(true);
                    landed()
                });
                assert_eq!(setup.driver.ran(&segment), before + 1, "landed, and the copy has not run");
                let buf = flight.wait().unwrap();
                setup.driver.write(buf.segment());
            })
        };
        let segment = setup.take().unwrap();
        drop(push(&flow, 1, segment, &memory));
        setup.timeline.advance(true);
        setup.reuse();
        pusher.join().unwrap();
        until(|| {
            setup.timeline.advance(true);
            !flow.is_flying()
        });
        drop((flow, memory));
        setup.finish();
    });
}

/// Two threads share a lane: one pushes between the other's copies, which go to the driver at once where they can. Its
/// copies are submitted in the order of their numbers all the same, or one would count as landed that has not run.
#[test]
fn loom_lane_keeps_order() {
    model("queue: two threads share a lane", 2, || {
        let setup = Setup::new();
        let flow = Flow::new(setup.timeline.clone(), 1, 4, false, Arc::new(Bell::asleep()));
        let memory = DeviceBuffer::new(setup.timeline.context(), 64).unwrap();
        let segments = [(); 3].map(|()| setup.take().unwrap());
        let [first, between, last] = segments;
        let pusher = {
            let (setup, flow, memory) = (setup.clone(), flow.clone(), memory.clone());
            spawn(move || {
                let flight = push(&flow, 0, between.alias(), &memory);
                until(|| {
                    setup.timeline.advance(true);
                    flight.is_done().unwrap()
                });
                assert_eq!(setup.driver.ran(&between), 1, "landed, and the copy has not run");
                let buf = flight.wait().unwrap();
                setup.driver.write(buf.segment());
            })
        };
        drop(push(&flow, 0, first, &memory));
        drop(push(&flow, 0, last, &memory));
        pusher.join().unwrap();
        until(|| {
            setup.timeline.advance(true);
            !flow.is_flying()
        });
        drop((flow, memory));
        setup.finish();
    });
}

/// A queue's thread that ends, while another one is in the midst of submitting what was pushed: two copies that are in
/// each other's way, so that one of them is left over.
#[test]
fn loom_end_leaves_nothing() {
    model("queue: a thread that ends, and another that submits", 3, || {
        let setup = Setup::new();
        let flow = Flow::new(setup.timeline.clone(), 1, 4, true, Arc::new(Bell::asleep()));
        let memory = DeviceBuffer::new(setup.timeline.context(), 64).unwrap();
        let [first, last] = [(); 2].map(|()| setup.take().unwrap());
        for segment in [&first, &last] {
            let src = segment.base().as_ptr().cast_const();
            let transfer = Transfer::Upload { src, dst: DevicePtr(0), len: 64 };
            let line = Arc::new(Line { flow: flow.clone(), lane: 0 });
            let mut entry = line.lane().enter(4).unwrap();
            let resource = Resource::Segment(segment.alias());
            let number = entry.push(flow.filled(), 0, transfer, resource, memory.allocation());
            drop(entry);
            // SAFETY: in flight, and touched by nobody.
            let buf = unsafe { PinnedBuf::new(segment.alias(), 0) };
            let range = Range { first: number, last: number };
            // Nobody waits for it: it returns by itself.
            drop(InFlight::queued(Place { line, range, quiet: false }, buf, None));
        }
        let submitter = {
            let flow = flow.clone();
            // Once: it has waited for the first of them.
            spawn(move || _ = flow.submit())
        };
        // As the queue's thread does when there are no more handles.
        until(|| {
            step();
            if flow.is_filled() {
                flow.submit();
            }
            flow.is_over()
        });
        submitter.join().unwrap();
        assert!(!flow.is_filled(), "a copy is left behind");
        until(|| {
            setup.timeline.advance(true);
            !flow.is_flying()
        });
        assert_eq!([&first, &last].map(|segment| setup.driver.ran(segment)), [1, 1]);
        drop((flow, memory));
        setup.finish();
    });
}

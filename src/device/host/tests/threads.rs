//! The device with threads: the same rules, under true concurrency.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::*;

#[test]
fn copies_there_and_back() {
    let rig = Rig::threaded();
    let (stream, event) = (rig.stream(), rig.event());
    let bytes: Vec<u8> = (0..3_000_001).map(|i: usize| (i % 241) as u8).collect();
    let (source, target, memory) = (Host::of(&bytes), Host::new(bytes.len(), 0), rig.memory(bytes.len()));
    rig.upload(stream, &source, memory);
    rig.download(stream, memory, &target);
    rig.record(event, stream);
    rig.wait(event);
    assert!(target.get() == bytes);
    target.set(0);
    rig.download_blocking(stream, memory, &target).unwrap();
    assert!(target.get() == bytes);
    rig.close(&[stream], &[event], &[memory]);
}

#[test]
fn events_can_be_recorded_again_and_again() {
    let rig = Rig::threaded();
    let (stream, event, memory) = (rig.stream(), rig.event(), rig.memory(64));
    let (source, target) = (Host::new(64, 0), Host::new(64, 0));
    for round in 0..500 {
        source.set(round as u8);
        rig.upload(stream, &source, memory);
        rig.download(stream, memory, &target);
        rig.record(event, stream);
        while !rig.query(event) {
            thread::yield_now();
        }
        assert!(target.all(round as u8));
    }
    rig.close(&[stream], &[event], &[memory]);
}

#[test]
fn a_stream_waits_for_another() {
    let rig = Rig::new(HostConfig::new().memory(1 << 20).late(Duration::from_micros(300), 5));
    let (a, b, memory) = (rig.stream(), rig.stream(), rig.memory(64));
    let (from_a, from_b) = (rig.event(), rig.event());
    let (source, target) = (Host::new(64, 0), Host::new(64, 0));
    for round in 0..100 {
        source.set(round);
        rig.upload(a, &source, memory);
        rig.record(from_a, a);
        rig.driver.wait_event(b, from_a).unwrap();
        rig.download(b, memory, &target);
        rig.record(from_b, b);
        rig.wait(from_b);
        assert!(rig.query(from_a) && target.all(round));
    }
    rig.close(&[a, b], &[from_a, from_b], &[memory]);
}

#[test]
fn late_copies_are_overtaken() {
    let rig = Rig::new(HostConfig::new().memory(1 << 20).late(Duration::from_secs(3600), 1));
    let (late, quick, memory, host) = (rig.stream(), rig.stream(), rig.memory(4), Host::new(4, 0));
    let (behind, before) = (rig.event(), rig.event());
    rig.upload(late, &host, memory);
    rig.record(behind, late);
    // Recording is not delayed, and overtakes the copy that was submitted first.
    rig.record(before, quick);
    rig.wait(before);
    assert!(!rig.query(behind));
    // And a delay does not outlive its device.
    rig.node.kill(0);
    assert_eq!(rig.node.queued(0), 0);
}

#[test]
fn a_killed_device_releases_who_waits() {
    for hang in [false, true] {
        let rig = Rig::new(HostConfig::new().memory(1 << 20).late(Duration::from_secs(3600), 2));
        if hang {
            rig.node.hang(0);
        }
        let (stream, other, event) = (rig.stream(), rig.stream(), rig.event());
        let (memory, target) = (rig.memory(4), Host::new(4, 1));
        rig.download(other, memory, &target);
        rig.record(event, other);
        rig.driver.wait_event(stream, event).unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| rig.download_blocking(stream, memory, &target));
            eventually(|| rig.node.queued(0) >= 4);
            assert!(!waits.is_finished());
            rig.node.kill(0);
            assert_eq!(class(waits.join().unwrap()), ErrorClass::DeviceLost);
        });
        assert!(target.all(1));
        assert_eq!(class(rig.driver.query(event)), ErrorClass::DeviceLost);
        for stream in [stream, other] {
            assert_eq!(class(rig.driver.destroy_stream(stream)), ErrorClass::DeviceLost);
        }
        assert_eq!(class(rig.driver.destroy_event(event)), ErrorClass::DeviceLost);
        rig.close(&[], &[], &[memory]);
    }
}

#[test]
fn nothing_is_written_once_a_device_is_known_to_be_dead() {
    for round in 0..20 {
        let rig = Rig::threaded();
        let (len, streams) = (8 << 20, [rig.stream(), rig.stream()]);
        let (memory, targets) = (rig.memory(len), [Host::new(len, 7), Host::new(len, 7)]);
        for (stream, target) in streams.iter().zip(&targets) {
            rig.download(*stream, memory, target);
            rig.download(*stream, memory, target);
        }
        thread::sleep(Duration::from_micros(100 * round));
        // The call that reads the loss is made on another thread than the kill.
        thread::scope(|scope| {
            scope.spawn(|| {
                while rig.driver.query(EventHandle(0)).unwrap_err().class() != ErrorClass::DeviceLost {}
            });
            rig.node.kill(0);
        });
        // Writing now is no race (the thread sanitizer would report one), and the bytes stay.
        targets.iter().for_each(|target| target.set(9));
        thread::sleep(Duration::from_millis(1));
        assert!(targets.iter().all(|target| target.all(9)));
    }
}

#[test]
fn hanging_holds_threads_until_resumed() {
    let rig = Rig::threaded();
    let (a, b) = (rig.stream(), rig.stream());
    let (on_a, on_b, memory, target) = (rig.event(), rig.event(), rig.memory(4), Host::new(4, 1));
    assert!(rig.node.hang_stream(0, 0));
    rig.download(a, memory, &target);
    rig.record(on_a, a);
    rig.record(on_b, b);
    rig.wait(on_b);
    assert!(!rig.query(on_a) && target.all(1));
    assert!(rig.node.resume_stream(0, 0));
    rig.wait(on_a);
    assert!(target.all(0));

    rig.node.hang(0);
    rig.node.fail(Fault { device: 0, call: Call::Record, nth: 1, failure: Failure::Stall });
    rig.record(on_a, a);
    rig.record(on_b, b);
    thread::sleep(Duration::from_millis(5));
    assert!(!rig.query(on_a) && !rig.query(on_b));
    rig.node.resume(0);
    rig.wait(on_a);
    rig.wait(on_b);
    rig.close(&[a, b], &[on_a, on_b], &[memory]);
}

#[test]
fn a_blocking_copy_waits_for_a_hung_device() {
    let rig = Rig::threaded();
    let (stream, memory, target) = (rig.stream(), rig.memory(4), Host::new(4, 1));
    rig.node.hang(0);
    thread::scope(|scope| {
        let waits = scope.spawn(|| rig.download_blocking(stream, memory, &target));
        eventually(|| rig.node.queued(0) == 1);
        thread::sleep(Duration::from_millis(5));
        assert!(!waits.is_finished());
        rig.node.resume(0);
        waits.join().unwrap().unwrap();
    });
    assert!(target.all(0));
    rig.close(&[stream], &[], &[memory]);
}

#[test]
fn a_copy_after_the_free_of_its_memory_kills_the_device() {
    let rig = Rig::threaded();
    let (stream, host, freed) = (rig.stream(), Host::new(4, 0), rig.memory(4));
    rig.node.hang(0);
    rig.upload(stream, &host, freed);
    rig.driver.free(freed).unwrap();
    rig.node.resume(0);
    eventually(|| rig.driver.create_event().is_err_and(|error| error.is_device_lost()));
}

#[test]
fn a_destroyed_stream_runs_out_and_ends() {
    let rig = Rig::threaded();
    let (stream, memory, target) = (rig.stream(), rig.memory(4), Host::new(4, 1));
    rig.node.hang(0);
    rig.download(stream, memory, &target);
    rig.driver.destroy_stream(stream).unwrap();
    assert_eq!(rig.node.live(0).queued, 1);
    rig.node.resume(0);
    eventually(|| rig.node.live(0).queued == 0);
    assert!(target.all(0));
    rig.close(&[], &[], &[memory]);
}

#[test]
fn threads_end_with_their_streams_and_with_the_driver() {
    // The thread keeps its stream, so the weak reference says when the thread has ended.
    let watch = |rig: &Rig| rig.node.watch_streams(0);
    let rig = Rig::threaded();
    let stream = rig.stream();
    let ended = watch(&rig);
    rig.driver.destroy_stream(stream).unwrap();
    eventually(|| ended.iter().all(|stream| stream.upgrade().is_none()));

    let (stream, event, memory, target) = (rig.stream(), rig.event(), rig.memory(4), Host::new(4, 1));
    let _idle = rig.stream();
    let ended = watch(&rig);
    rig.node.hang(0);
    rig.download(stream, memory, &target);
    rig.record(event, stream);
    let Rig { node, driver } = rig;
    driver.destroy_event(event).unwrap();
    drop(driver);
    eventually(|| ended.iter().all(|stream| stream.upgrade().is_none()));
    node.resume(0);
    assert!(target.all(1), "what was queued is dropped");
}

#[test]
fn threads_end_when_the_device_dies() {
    let rig = Rig::threaded();
    let streams = [rig.stream(), rig.stream()];
    let ended = rig.node.watch_streams(0);
    rig.node.kill(0);
    for stream in streams {
        let _ = rig.driver.destroy_stream(stream);
    }
    eventually(|| ended.iter().all(|stream| stream.upgrade().is_none()));
}

#[test]
fn streams_that_write_the_same_bytes_do_not_race() {
    let rig = Rig::threaded();
    let memory = rig.memory(3 << 20);
    let sources: Vec<Host> = (1..=4).map(|value| Host::new(3 << 20, value)).collect();
    let targets: Vec<Host> = (0..4).map(|_| Host::new(3 << 20, 0)).collect();
    let streams: Vec<StreamHandle> = (0..4).map(|_| rig.stream()).collect();
    let events: Vec<EventHandle> = (0..4).map(|_| rig.event()).collect();
    for i in 0..4 {
        for _ in 0..3 {
            rig.upload(streams[i], &sources[i], memory);
            rig.on_device(streams[i], memory, DevicePtr(memory.0 + 1000), 2 << 20);
            rig.on_device(streams[i], DevicePtr(memory.0 + 1000), memory, 2 << 20);
            rig.download(streams[i], memory, &targets[i]);
        }
        rig.record(events[i], streams[i]);
    }
    events.iter().for_each(|event| rig.wait(*event));
    assert!(targets.iter().all(|target| target.get().iter().all(|byte| (1..=4).contains(byte))));
    rig.close(&streams, &events, &[memory]);
}

#[test]
fn all_calls_may_come_from_all_threads() {
    let rig = Rig::new(HostConfig::new().memory(16 << 20).late(Duration::ZERO, 3));
    let shared = rig.stream();
    thread::scope(|scope| {
        for value in 1..=6_u8 {
            let rig = &rig;
            scope.spawn(move || {
                for round in 0..60 {
                    let (stream, event, memory) = (rig.stream(), rig.event(), rig.memory(5000));
                    let (source, target) = (Host::new(5000, value), Host::new(5000, 0));
                    rig.upload(shared, &source, memory);
                    rig.record(event, shared);
                    rig.driver.wait_event(stream, event).unwrap();
                    if round % 2 == 0 {
                        rig.download_blocking(stream, memory, &target).unwrap();
                    } else {
                        rig.download(stream, memory, &target);
                        rig.record(event, stream);
                        rig.wait(event);
                    }
                    assert!(target.all(value));
                    rig.driver.destroy_event(event).unwrap();
                    rig.driver.destroy_stream(stream).unwrap();
                    rig.driver.free(memory).unwrap();
                }
            });
        }
    });
    rig.close(&[shared], &[], &[]);
}

#[test]
fn dying_amid_calls_loses_nobody() {
    for round in 0..10 {
        let rig = Rig::new(HostConfig::new().memory(64 << 20).late(Duration::ZERO, round));
        let lost = AtomicUsize::new(0);
        thread::scope(|scope| {
            let work = || {
                let (target, mut last) = (Host::new(2 << 20, 1), Ok(()));
                while last.is_ok() {
                    last = rig.driver.create_stream().and_then(|stream| {
                        let memory = rig.driver.allocate(target.len())?;
                        let result = rig.download_blocking(stream, memory, &target);
                        rig.driver.free(memory)?;
                        result.and(rig.driver.destroy_stream(stream))
                    });
                }
                if class(last) == ErrorClass::DeviceLost {
                    lost.fetch_add(1, Ordering::Relaxed);
                    target.set(5);
                    thread::yield_now();
                    assert!(target.all(5));
                }
            };
            let workers = [(); 3].map(|()| scope.spawn(work));
            thread::sleep(Duration::from_millis(round));
            rig.node.kill(0);
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            assert_eq!(lost.load(Ordering::Relaxed), 3);
        });
        let live = rig.node.live(0);
        assert_eq!((live.allocations, live.queued, live.events), (0, 0, 0));
    }
}

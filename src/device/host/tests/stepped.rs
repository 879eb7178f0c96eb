//! The device without threads: order, lateness, overtaking, and equal runs from equal seeds.

use super::*;

#[test]
fn nothing_happens_before_it_is_stepped() {
    let rig = Rig::stepped();
    let (stream, memory) = (rig.stream(), rig.memory(4));
    let (source, target) = (Host::new(4, 1), Host::new(4, 0));
    rig.upload(stream, &source, memory);
    rig.download(stream, memory, &target);
    assert!(target.all(0));
    assert_eq!((rig.node.queued(0), rig.node.runnable(0)), (2, 1));
    // The source is read when the copy runs: this is how the device shows a write that comes too early.
    source.set(9);
    assert!(rig.driver.stepped().unwrap().step());
    assert!(target.all(0));
    assert!(rig.node.step());
    assert!(target.all(9));
    assert!(!rig.node.step());
    rig.close(&[stream], &[], &[memory]);
}

#[test]
fn a_stream_keeps_its_order_and_others_overtake_it() {
    let rig = Rig::stepped();
    let (a, b) = (rig.stream(), rig.stream());
    let (event_a, event_b) = (rig.event(), rig.event());
    let memory = rig.memory(1);
    let sources: Vec<Host> = (1..=4).map(|value| Host::new(1, value)).collect();
    let seen: Vec<Host> = (0..4).map(|_| Host::new(1, 0)).collect();
    for (i, stream) in [a, a, b, b].into_iter().enumerate() {
        rig.upload(stream, &sources[i], memory);
        rig.download(stream, memory, &seen[i]);
    }
    rig.record(event_a, a);
    rig.record(event_b, b);
    // All of the second stream first.
    while rig.node.runnable(0) == 2 {
        assert!(rig.node.step_stream(0, 1));
    }
    assert!(rig.query(event_b) && !rig.query(event_a));
    assert!(seen[2].all(3) && seen[3].all(4) && seen[0].all(0));
    assert!(!rig.node.step_stream(0, 1), "only one stream has anything left");
    while rig.node.step_stream(0, 0) {}
    assert!(rig.query(event_a));
    assert!(seen[0].all(1) && seen[1].all(2));
    rig.close(&[a, b], &[event_a, event_b], &[memory]);
}

#[test]
fn events_cover_what_came_before() {
    let rig = Rig::stepped();
    let (stream, event, memory, source) = (rig.stream(), rig.event(), rig.memory(4), Host::new(4, 1));
    assert!(rig.query(event), "never recorded");
    rig.upload(stream, &source, memory);
    rig.record(event, stream);
    rig.upload(stream, &source, memory);
    assert!(!rig.query(event));
    rig.node.step();
    assert!(!rig.query(event));
    rig.node.step();
    assert!(rig.query(event));
    assert_eq!(rig.node.queued(0), 1);
    rig.drain();
    rig.close(&[stream], &[event], &[memory]);
}

#[test]
fn a_recording_replaces_the_one_before() {
    let rig = Rig::stepped();
    let (a, b, event) = (rig.stream(), rig.stream(), rig.event());
    for round in 0..3 {
        rig.record(event, a);
        assert!(!rig.query(event), "round {round}");
        rig.node.step();
        assert!(rig.query(event));
    }
    // On two streams at once: only the later recording counts, in either order.
    rig.record(event, a);
    rig.record(event, b);
    assert!(rig.node.step_stream(0, 0));
    assert!(!rig.query(event));
    assert!(rig.node.step_stream(0, 0));
    assert!(rig.query(event));
    rig.record(event, a);
    rig.record(event, b);
    assert!(rig.node.step_stream(0, 1));
    assert!(rig.query(event));
    rig.drain();
    rig.close(&[a, b], &[event], &[]);
}

#[test]
fn a_new_event_knows_nothing_of_the_one_before() {
    let rig = Rig::stepped();
    let (stream, old) = (rig.stream(), rig.event());
    rig.record(old, stream);
    rig.driver.destroy_event(old).unwrap();
    let new = rig.event();
    assert!(rig.query(new));
    rig.drain();
    assert!(rig.query(new));
    rig.record(new, stream);
    assert!(!rig.query(new));
    rig.drain();
    assert!(rig.query(new));
    rig.close(&[stream], &[new], &[]);
}

#[test]
fn a_stream_waits_for_an_event_as_it_was_recorded() {
    let rig = Rig::stepped();
    let (a, b, c) = (rig.stream(), rig.stream(), rig.stream());
    let (event, memory, source, target) = (rig.event(), rig.memory(4), Host::new(4, 5), Host::new(4, 0));
    rig.driver.wait_event(b, event).unwrap();
    assert_eq!(rig.node.queued(0), 0, "never recorded: nothing to wait for");
    rig.upload(a, &source, memory);
    rig.record(event, a);
    rig.driver.wait_event(b, event).unwrap();
    rig.download(b, memory, &target);
    // Recorded again on another stream and complete there; the first stream still waits for the first recording.
    rig.record(event, c);
    assert!(rig.node.step_stream(0, 1));
    assert!(rig.query(event));
    assert_eq!(rig.node.runnable(0), 1);
    rig.drain();
    assert!(target.all(5));
    rig.close(&[a, b, c], &[event], &[memory]);
}

#[test]
fn a_blocking_copy_runs_what_must_come_before() {
    let rig = Rig::stepped();
    let (a, b, c) = (rig.stream(), rig.stream(), rig.stream());
    let (first, second) = (rig.event(), rig.event());
    let (memory, source, target) = (rig.memory(4), Host::new(4, 3), Host::new(4, 0));
    // c waits for b, which waits for a; a has more work behind that.
    rig.upload(a, &source, memory);
    rig.record(first, a);
    rig.upload(a, &source, memory);
    rig.driver.wait_event(b, first).unwrap();
    rig.record(second, b);
    rig.driver.wait_event(c, second).unwrap();
    rig.download_blocking(c, memory, &target).unwrap();
    assert!(target.all(3));
    assert_eq!(rig.node.queued(0), 1, "an operation that no stream waits for is still late");
    rig.drain();
    rig.close(&[a, b, c], &[first, second], &[memory]);
}

#[test]
fn a_blocking_copy_that_cannot_run_lets_go() {
    let rig = Rig::stepped();
    let (a, b, event) = (rig.stream(), rig.stream(), rig.event());
    let (memory, source, target) = (rig.memory(4), Host::new(4, 3), Host::new(4, 0));
    rig.upload(a, &source, memory);
    rig.record(event, a);
    rig.driver.wait_event(b, event).unwrap();
    assert!(rig.node.hang_stream(0, 0));
    assert_eq!(class(rig.download_blocking(b, memory, &target)), ErrorClass::Transient);
    assert_eq!(rig.node.queued(0), 3, "all but the copy itself");
    assert!(rig.node.resume_stream(0, 0));
    rig.node.hang(0);
    assert_eq!(class(rig.download_blocking(b, memory, &target)), ErrorClass::Transient);
    assert!(!rig.node.step());
    rig.node.resume(0);
    rig.drain();
    assert!(target.all(0), "a copy that was taken out of its queue never runs");
    rig.download_blocking(b, memory, &target).unwrap();
    assert!(target.all(3));
    rig.close(&[a, b], &[event], &[memory]);
}

#[test]
fn copies_within_the_device_move_overlapping_bytes_whole() {
    let rig = Rig::stepped();
    let stream = rig.stream();
    // Longer than the buffer that the copies go through, and across stripes.
    let len = 3 << 20;
    let bytes: Vec<u8> = (0..len).map(|i: usize| (i % 253) as u8).collect();
    let (source, target, memory) = (Host::of(&bytes), Host::new(len, 0), rig.memory(len));
    for (from, to, n) in [
        (0, 1, len - 1),
        (1, 0, len - 1),
        (0, 300_000, len - 300_000),
        (300_000, 7, 2 << 20),
        (5, 5, 99),
        (9, 0, 0),
    ] {
        rig.upload_blocking(stream, &source, memory).unwrap();
        rig.on_device(stream, DevicePtr(memory.0 + from as u64), DevicePtr(memory.0 + to as u64), n);
        rig.download_blocking(stream, memory, &target).unwrap();
        let mut expected = bytes.clone();
        expected.copy_within(from..from + n, to);
        assert!(target.get() == expected, "{from} to {to}, {n} bytes");
    }
    let other = rig.memory(len);
    rig.upload_blocking(stream, &source, memory).unwrap();
    rig.on_device(stream, memory, other, len);
    rig.download_blocking(stream, other, &target).unwrap();
    assert!(target.get() == bytes);
    rig.close(&[stream], &[], &[memory, other]);
}

#[test]
fn a_destroyed_stream_still_runs_what_it_has() {
    let rig = Rig::stepped();
    let (a, b, memory) = (rig.stream(), rig.stream(), rig.memory(4));
    let (source, target) = (Host::new(4, 8), Host::new(4, 0));
    rig.upload(a, &source, memory);
    rig.download(a, memory, &target);
    rig.driver.destroy_stream(a).unwrap();
    assert_eq!(class(rig.try_upload(a, &source, memory)), ErrorClass::Argument);
    assert_eq!(class(rig.driver.destroy_stream(a)), ErrorClass::Argument);
    assert_eq!((rig.node.live(0).streams, rig.node.live(0).queued), (1, 2));
    assert!(rig.node.hang_stream(0, 0) && !rig.node.hang_stream(0, 1), "it is not counted any more");
    rig.node.resume(0);
    rig.drain();
    assert!(target.all(8));
    rig.close(&[b], &[], &[memory]);
}

#[test]
fn a_dropped_driver_drops_what_is_queued() {
    let rig = Rig::stepped();
    let (stream, event, memory) = (rig.stream(), rig.event(), rig.memory(4));
    let target = Host::new(4, 1);
    rig.download(stream, memory, &target);
    rig.record(event, stream);
    rig.driver.wait_event(stream, event).unwrap();
    let Rig { node, driver } = rig;
    drop(driver);
    assert!(!node.step());
    assert!(target.all(1));
    let live = node.live(0);
    assert_eq!(
        (live.queued, live.streams, live.events, live.allocations),
        (0, 1, 1, 1),
        "leaks stay in sight"
    );
    // The next driver of the device begins with nothing, and knows no stream of the driver before.
    let rig = Rig { driver: node.driver(0).unwrap(), node };
    assert_eq!(class(rig.try_download(stream, memory, &target)), ErrorClass::Argument);
    let fresh = rig.stream();
    rig.download(fresh, memory, &target);
    rig.drain();
    assert!(target.all(0));
}

/// The order in which the seed runs sixteen streams of two devices.
fn order(seed: u64) -> Vec<usize> {
    let node = HostNode::new(HostConfig::new().devices(2).memory(1 << 20).stepped(seed)).unwrap();
    let rigs: Vec<Rig> =
        (0..2).map(|i| Rig { driver: node.driver(i).unwrap(), node: node.clone() }).collect();
    let events: Vec<(usize, EventHandle)> = (0..48)
        .map(|i| {
            let rig = &rigs[i % 2];
            let event = rig.event();
            rig.record(event, rig.stream());
            (i, event)
        })
        .collect();
    let mut order = Vec::new();
    while node.step() {
        for (i, event) in &events {
            if !order.contains(i) && rigs[i % 2].query(*event) {
                order.push(*i);
            }
        }
    }
    assert_eq!(order.len(), events.len());
    order
}

#[test]
fn the_same_seed_gives_the_same_order() {
    assert_eq!(order(11), order(11));
    assert_ne!(order(11), order(12));
    assert_ne!(order(0), order(1));
}

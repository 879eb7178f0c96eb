//! Captures and graphs of the server's, with the pool at work beside them.

use std::sync::atomic::{AtomicBool, Ordering};

use pinpool::{Device, Pool};

use super::{Gpu, HANG, bridge, filled, kernels, open, pool, round_trip, skip, until};
use crate::support::kernels::Counts;

/// Checks out, copies, grows and trims until it is told to stop. Returns how often, and how many bytes were wrong.
fn busy(device: &Device, pool: &Pool, stop: &AtomicBool) -> (u64, usize) {
    let (stream, memory) =
        (device.stream().expect("a stream"), device.alloc(100_000).expect("device memory"));
    let (mut rounds, mut wrong) = (0, 0);
    // Relaxed: it publishes nothing else.
    while !stop.load(Ordering::Relaxed) {
        wrong += round_trip(pool, &stream, &memory, rounds);
        drop((0..8).map(|_| pool.checkout_timeout(1 << 20, HANG)).collect::<Vec<_>>());
        pool.trim(0);
        rounds += 1;
    }
    (rounds, wrong)
}

/// A graph that uploads from eight buffers and checks each on the device, a hundred times over.
pub fn replay(gpu: &Gpu) {
    const TEST: &str = "a_graph_replays_with_its_buffers_held";
    const LEN: usize = 64 << 10;
    const BUFFERS: u64 = 8;
    const LAUNCHES: u64 = 100;
    let device = open(0);
    let pool = pool(&device);
    let kernels = gpu.kernels().expect("it needs kernels");
    let (stream, counts) = (gpu.raw.stream(), kernels.counts());
    let memory = gpu.raw.alloc(LEN * BUFFERS as usize);
    let held: Vec<_> = (0..BUFFERS).map(|n| filled(&pool, LEN, n)).collect();
    let stop = AtomicBool::new(false);
    let (rounds, wrong) = std::thread::scope(|scope| {
        let other = scope.spawn(|| busy(&device, &pool, &stop));
        gpu.raw.begin_capture(stream);
        for (n, buf) in (0..BUFFERS).zip(&held) {
            let at = memory + n * LEN as u64;
            // So that each replay must copy anew.
            gpu.raw.set_bytes(at, 0xEE, LEN, stream);
            // SAFETY: the buffer is held until the last launch is done.
            unsafe { gpu.raw.upload(at, buf.as_ptr(), LEN, stream) };
            kernels.check(at, LEN, n, counts, stream);
        }
        let executable = gpu.raw.instantiate(gpu.raw.end_capture(stream));
        for launch in 0..LAUNCHES {
            gpu.raw.launch_graph(executable, stream);
            if launch % 10 == 9 {
                gpu.raw.synchronize(stream);
            }
        }
        gpu.raw.destroy_graph(executable);
        stop.store(true, Ordering::Relaxed);
        other.join().expect("the busy thread")
    });
    drop(held);
    let found = kernels.read(counts);
    println!(
        "{TEST}: {LAUNCHES} launches of {BUFFERS} uploads and checks, {found:?}, {rounds} rounds of a pool at work beside it"
    );
    let bytes = LAUNCHES * BUFFERS * LEN as u64;
    assert_eq!(found, Counts { wrong: 0, bytes, launches: LAUNCHES * BUFFERS });
    assert_eq!((wrong, device.lost()), (0, None));
    assert!(rounds > 0);
    pool.check().expect("the pool is whole");
}

/// In global mode unsafe calls of any thread would spoil the capture: the pool makes none of them.
pub fn survives(gpu: &Gpu) {
    const TEST: &str = "a_capture_elsewhere_survives_the_pool";
    const ROUNDS: u64 = 20;
    let device = open(0);
    gpu.raw.enter(0);
    let stream = gpu.raw.stream();
    let pool = pool(&device);
    let (own, other) = (device.stream().expect("a stream"), device.stream().expect("a stream"));
    gpu.raw.begin_capture(stream);
    let stop = AtomicBool::new(false);
    let (rounds, mut wrong) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| busy(&device, &pool, &stop));
        // And on the thread that captures.
        let memory = device.alloc(100_000).expect("device memory");
        let mut wrong = 0;
        for round in 0..ROUNDS {
            wrong += round_trip(&pool, &own, &memory, round);
            other.wait_for(&own).expect("one stream waits for another");
            let growing: Vec<_> = (0..20).map(|_| pool.checkout_timeout(1 << 20, HANG)).collect();
            drop(growing);
            pool.trim(0);
        }
        // Only the reaper polls.
        drop(own.upload(filled(&pool, 1000, 1), &memory).expect("an upload"));
        until("the buffer comes back", || pool.stats().in_flight_bytes == 0);
        stop.store(true, Ordering::Relaxed);
        let (rounds, beside) = beside.join().expect("the busy thread");
        (rounds, wrong + beside)
    });
    let memory = device.alloc(1).expect("device memory");
    wrong += round_trip(&pool, &other, &memory, 1);
    drop((own, other, memory, pool, device));
    // Panics if it is spoiled.
    let graph = gpu.raw.end_capture(stream);
    gpu.raw.destroy(stream);
    gpu.no_violations();
    assert_eq!(wrong, 0);
    println!("{TEST}: {ROUNDS} rounds on the capturing thread, {rounds} beside it, the graph is {graph:#x}");
}

/// The same with captured uploads from buffers that only the graph has.
pub fn keeps(gpu: &Gpu) {
    const TEST: &str = "a_graph_keeps_what_it_was_given";
    const LEN: usize = 64 << 10;
    const BUFFERS: usize = 8;
    const LAUNCHES: u64 = 100;
    let device = open(0);
    let pool = pool(&device);
    let stream = device.stream().expect("a stream");
    let memory: Vec<_> = (0..BUFFERS).map(|_| device.alloc(LEN).expect("device memory")).collect();
    let Some(raw) = bridge::raw_stream(&stream) else {
        return skip(TEST, "raw streams are not switched on");
    };
    let kernels = gpu.kernels().map(|kernels| (kernels.counts(), kernels));
    gpu.raw.enter(0);
    gpu.raw.begin_capture(raw);
    for (n, memory) in memory.iter().enumerate() {
        let (buf, at) = (filled(&pool, LEN, n as u64), bridge::address(memory).expect("switched on"));
        // SAFETY: the graph keeps the source.
        unsafe { gpu.raw.upload(at, buf.as_ptr(), LEN, raw) };
        bridge::hold_captured(&stream, buf).expect("switched on").expect("the graph keeps it");
        if let Some((counts, kernels)) = &kernels {
            kernels.check(at, LEN, n as u64, *counts, raw);
        }
    }
    let executable = gpu.raw.instantiate(gpu.raw.end_capture(raw));
    let mut wrong = 0;
    for launch in 0..LAUNCHES {
        for memory in &memory {
            stream.upload_blocking(&[0xEE; LEN], memory).expect("an upload");
        }
        // Whatever is free is written to.
        drop((0..32).map(|n| filled(&pool, LEN, 1000 + launch * 32 + n)).collect::<Vec<_>>());
        gpu.raw.launch_graph(executable, raw);
        for (n, memory) in memory.iter().enumerate() {
            let landing = pool.checkout_timeout(LEN, HANG).expect("the pool has room");
            let back = stream.download(memory, landing).expect("a download").wait().expect("it lands");
            wrong += kernels::wrong(&back, n as u64);
        }
    }
    let kept = pool.stats().checked_out_bytes;
    assert!(kept >= BUFFERS * LEN, "the graph has none of them: {:?}", pool.stats());
    gpu.raw.destroy_graph(executable);
    until("the graph's buffers come back", || pool.stats().checked_out_bytes == 0);
    let found = kernels.as_ref().map(|(counts, kernels)| kernels.read(*counts));
    println!(
        "{TEST}: {LAUNCHES} launches of {BUFFERS} uploads, {wrong} wrong bytes, by kernels {found:?}, {kept} bytes kept"
    );
    assert_eq!(wrong, 0);
    if let (Some(found), Some(_)) = (found, bridge::address(&memory[0])) {
        let launches = LAUNCHES * BUFFERS as u64;
        assert_eq!(found, Counts { wrong: 0, bytes: launches * LEN as u64, launches });
    }
    pool.check().expect("the pool is whole");
    gpu.no_violations();
}

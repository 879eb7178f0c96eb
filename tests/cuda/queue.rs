//! The copy queue on a GPU: batches, drivers with and without them, and trouble.
//!
//! What every device does is in `contract/queue.rs`. Here is what only a GPU's driver has: the call for many copies in
//! its two forms and its conditions, streams of the server's, and a driver that fails, hangs and dies, which only a
//! double can be made to do.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use pinpool::{
    CopyQueue, Device, DeviceBuffer, Error, ErrorClass, InFlight, PinnedBuf, Pool, QueueOptions, cuda,
};

use crate::support::doubles::gpu::{bytes, filled, on_gpu, on_stand_in, pool, until};
use crate::support::doubles::{self, HANG, StandIn};
use crate::support::skip;

const LEN: usize = 500;
const PIECE: usize = 512;

fn open() -> Device {
    Device::open("cuda:0").unwrap()
}

fn calls(d: &StandIn, name: &str) -> u64 {
    d.report().calls.iter().find(|call| call.0 == name).map_or(0, |call| call.1)
}

fn all_back(pool: &Pool) {
    until("all is back", || {
        let s = pool.stats();
        s.in_flight_bytes + s.checked_out_bytes == 0
    });
    pool.check().unwrap();
}

/// Pushes copies of pieces that lie next to each other, faster than they are submitted.
fn push(queue: &CopyQueue, pool: &Pool, memory: &DeviceBuffer, count: usize) -> Vec<InFlight<PinnedBuf>> {
    let bufs: Vec<_> = (0..count).map(|i| filled(pool, &bytes(i, LEN))).collect();
    let push = |(i, buf)| queue.upload(buf, memory.slice(i * PIECE..i * PIECE + LEN)).unwrap();
    bufs.into_iter().enumerate().map(push).collect()
}

fn arrived(device: &Device, memory: &DeviceBuffer, count: usize) {
    let mut all = vec![0; memory.len()];
    device.stream().unwrap().download_blocking(memory, &mut all).unwrap();
    for i in 0..count {
        assert!(all[i * PIECE..][..LEN] == bytes(i, LEN), "piece {i}");
    }
}

/// Copies pushed while the driver is busy go in batches, where there are any, with one event each.
fn in_batches(test: &'static str, library: Option<&str>, batch: Option<&str>) {
    if let (Some(library), false) = (library, doubles::is_set() || doubles::required()) {
        let Some(library) = doubles::older(library) else { return skip!("no cargo") };
        return doubles::again(test, &[(doubles::PATH, library.to_str().unwrap())]);
    }
    on_gpu(test, |gpu| {
        const COUNT: usize = 700;
        let device = open();
        let (pool, queue) = (pool(&device, 4 << 20), device.copy_queue().unwrap());
        let memory = device.alloc(COUNT * PIECE).unwrap();
        let before =
            gpu.stand_in.as_ref().map(|d| (calls(d, "cuMemcpyHtoDAsync_v2"), calls(d, "cuEventRecord")));
        for (i, flight) in push(&queue, &pool, &memory, COUNT).into_iter().enumerate() {
            assert!(*flight.wait().unwrap() == *bytes(i, LEN));
        }
        arrived(&device, &memory, COUNT);
        if let (Some(d), Some((copies, events))) = (&gpu.stand_in, before) {
            let (copies, events) =
                (calls(d, "cuMemcpyHtoDAsync_v2") - copies, calls(d, "cuEventRecord") - events);
            let batches = batch.map_or(0, |name| calls(d, name));
            match batch {
                // Their number depends on which thread was faster. Copies do not go one by one, and events neither.
                Some(_) => {
                    assert!(batches > 0 && copies < COUNT as u64 / 2, "{batches} batches, {copies} copies")
                }
                None => assert_eq!((calls(d, "cuMemcpyBatchAsync"), copies), (0, COUNT as u64)),
            }
            assert!(events < COUNT as u64 / 2, "{events} events");
        }
        drop(queue);
        all_back(&pool);
    });
}

#[test]
fn copies_go_in_batches() {
    in_batches("copies_go_in_batches", None, Some("cuMemcpyBatchAsync"));
}

#[test]
fn copies_go_in_batches_of_the_newer_form() {
    in_batches("copies_go_in_batches_of_the_newer_form", Some("cuda13"), Some("cuMemcpyBatchAsync_v2"));
}

#[test]
fn copies_go_one_by_one_where_there_are_no_batches() {
    in_batches("copies_go_one_by_one_where_there_are_no_batches", Some("cuda12"), None);
}

/// Threads that have another context current, or none, and one in the middle of a capture: the queue is not in its way.
#[test]
fn captures_and_contexts_of_others_are_left_alone() {
    on_gpu("captures_and_contexts_of_others_are_left_alone", |gpu| {
        let device = open();
        let (pool, queue) = (pool(&device, 2 << 20), device.copy_queue().unwrap());
        let memory = device.alloc(64 * PIECE).unwrap();
        let other = gpu.other_context();
        let raw = gpu.stream();
        gpu.begin_capture(raw, 0);
        for context in [0, other] {
            gpu.current(context);
            for flight in push(&queue, &pool, &memory, 64) {
                drop(flight.wait().unwrap());
            }
            assert_eq!(gpu.made("cuCtxGetCurrent", &[]), context);
        }
        gpu.current(gpu.context);
        // The capture is as it was: `end_capture` would tell.
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        arrived(&device, &memory, 64);
        drop(queue);
        all_back(&pool);
        gpu.ok("cuStreamDestroy_v2", &[raw]);
        gpu.ok("cuCtxDestroy_v2", &[other]);
    });
}

/// A stream of the server's comes after a copy of the queue's, and the queue after the stream's work.
#[test]
fn streams_of_the_server_depend_on_copies() {
    on_gpu("streams_of_the_server_depend_on_copies", |gpu| {
        const LARGE: usize = 300_000;
        let device = open();
        let (pool, queue) = (pool(&device, 4 << 20), device.copy_queue().unwrap());
        let (memory, copy) = (device.alloc(LARGE).unwrap(), device.alloc(LARGE).unwrap());
        let raw = gpu.stream();
        // SAFETY: destroyed when all is done.
        let stream = unsafe { cuda::adopt_stream(&device, raw as *mut c_void) }.unwrap();
        for seed in 0..20 {
            let flight = queue.upload(filled(&pool, &bytes(seed, 100_000)), memory.slice(..100_000)).unwrap();
            stream.wait_for_copy(&flight).unwrap();
            drop(flight);
            // The server's own work, of which the crate is not told.
            gpu.ok(
                "cuMemcpyDtoDAsync_v2",
                &[copy.address() as usize, memory.address() as usize, 100_000, raw],
            );
            queue.wait_for(&stream).unwrap();
            let back = queue.download(copy.slice(..100_000), pool.checkout(100_000).unwrap()).unwrap();
            assert!(*back.wait().unwrap() == *bytes(seed, 100_000), "round {seed}");
        }
        // Not while it is captured: nothing outside comes before what a graph does.
        let flight = queue.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap();
        gpu.begin_capture(raw, 2);
        let refused = stream.wait_for_copy(&flight);
        // It may be complete already.
        assert!(matches!(refused, Ok(()) | Err(Error::Capturing { .. })), "{refused:?}");
        assert!(matches!(queue.wait_for(&stream), Err(Error::Capturing { .. })));
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        drop(flight.wait().unwrap());
        drop((queue, stream));
        all_back(&pool);
        gpu.ok("cuStreamSynchronize", &[raw]);
        gpu.ok("cuStreamDestroy_v2", &[raw]);
    });
}

/// Pieces at even distances on both sides go as rows of rectangles. What the driver refuses as such, since it reaches
/// beyond one registered range or for any other reason, goes in a batch; and after that one by one.
#[test]
fn rows_go_as_rectangles() {
    on_stand_in("rows_go_as_rectangles", |_, d| {
        const ROWS: usize = 200;
        let device = open();
        let (pool, memory) = (pool(&device, 4 << 20), device.alloc(2 * ROWS * PIECE).unwrap());
        let place = |i: usize| memory.slice(2 * i * PIECE..2 * i * PIECE + LEN).unwrap();
        let queue = device.copy_queue().unwrap();
        let whole: Vec<u8> = (0..ROWS).flat_map(|i| bytes(i, PIECE)).collect();
        let host = Arc::new(filled(&pool, &whole));
        // Until some have come together in the queue: which thread is faster differs from run to run.
        let rectangles = |faults: &dyn Fn()| {
            for _ in 0..200 {
                let before = calls(d, "cuMemcpy2DAsync_v2");
                let zeros = vec![0; memory.len()];
                device.stream().unwrap().upload_blocking(&zeros, &memory).unwrap();
                d.hang(true);
                faults();
                let row =
                    |i: usize| queue.upload_part(host.clone(), i * PIECE..i * PIECE + LEN, place(i)).unwrap();
                let sent: Vec<_> = (0..ROWS).map(row).collect();
                d.hang(false);
                sent.into_iter().for_each(|flight| drop(flight.wait().unwrap()));
                let mut all = vec![0; memory.len()];
                device.stream().unwrap().download_blocking(&memory, &mut all).unwrap();
                for (i, piece) in all.chunks(2 * PIECE).enumerate() {
                    assert!(piece[..LEN] == whole[i * PIECE..][..LEN], "row {i}");
                    assert!(piece[LEN..].iter().all(|byte| *byte == 0), "between rows {i} and {}", i + 1);
                }
                if calls(d, "cuMemcpy2DAsync_v2") > before {
                    return;
                }
            }
            panic!("no rectangle");
        };
        rectangles(&|| ());
        // Refused, or taken and said to be refused.
        for after in [false, true] {
            rectangles(&|| d.fail("cuMemcpy2DAsync_v2", 1, 1, after));
            assert!(d.struck() > 0);
            d.calm();
            // And the batch that it goes in, too.
            rectangles(&|| {
                d.fail("cuMemcpy2DAsync_v2", 1, 2, after);
                (1..=50).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 1, after));
            });
            d.calm();
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
        drop((host, queue));
        all_back(&pool);
    });
}

// --- trouble ---------------------------------------------------------------------------------------------------------

/// A batch that the driver refuses goes one by one: only what is refused then has failed.
#[test]
fn a_refused_batch_goes_one_by_one() {
    on_stand_in("a_refused_batch_goes_one_by_one", |_, d| {
        let device = open();
        let (pool, queue) = (pool(&device, 4 << 20), device.copy_queue().unwrap());
        let memory = device.alloc(300 * PIECE).unwrap();
        for after in [false, true] {
            (1..=50).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 1, after));
            for flight in push(&queue, &pool, &memory, 300) {
                drop(flight.wait().unwrap());
            }
            assert!(d.struck() > 0, "a batch was made");
            arrived(&device, &memory, 300);
            d.calm();
        }
        // And one copy of those is refused as well.
        (1..=50).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 2, false));
        d.fail("cuMemcpyHtoDAsync_v2", 77, 2, false);
        let failed: Vec<Error> =
            push(&queue, &pool, &memory, 300).into_iter().filter_map(|flight| flight.wait().err()).collect();
        d.calm();
        assert!(matches!(&*failed, [error] if error.class() == ErrorClass::Transient), "{failed:?}");
        // A dropped one leaves nothing behind either.
        (1..=50).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, 2, false));
        d.fail("cuMemcpyHtoDAsync_v2", 50, 2, false);
        drop(push(&queue, &pool, &memory, 300));
        queue.synchronize().unwrap();
        d.calm();
        all_back(&pool);
        for flight in push(&queue, &pool, &memory, 300) {
            drop(flight.wait().unwrap());
        }
        arrived(&device, &memory, 300);
        assert_eq!(d.report().violations, Vec::<String>::new());
        drop(queue);
        all_back(&pool);
    });
}

/// Each call that a queue makes fails once, with each kind of error, done or not: nothing is lost, and nothing is
/// reported as done that is not.
#[test]
fn every_call_of_a_queue_fails_once() {
    on_stand_in("every_call_of_a_queue_fails_once", |_, d| {
        const COUNT: usize = 150;
        for call in [
            "cuMemcpyBatchAsync",
            "cuMemcpyHtoDAsync_v2",
            "cuMemcpyDtoHAsync_v2",
            "cuEventRecord",
            "cuEventQuery",
            "cuEventCreate",
        ] {
            for (code, after) in [(1, false), (2, false), (2, true), (999, false)] {
                let device = open();
                {
                    let (pool, queue) = (pool(&device, 4 << 20), device.copy_queue().unwrap());
                    let memory = device.alloc(COUNT * PIECE).unwrap();
                    for nth in [1, 2, 3] {
                        d.fail(call, nth, code, after);
                    }
                    let sent: Vec<bool> = push(&queue, &pool, &memory, COUNT)
                        .into_iter()
                        .map(|flight| flight.wait().is_ok())
                        .collect();
                    let mut read = 0;
                    for (i, sent) in sent.iter().enumerate() {
                        let landing = pool.checkout(LEN).unwrap();
                        let back = queue.download(memory.slice(i * PIECE..i * PIECE + LEN), landing).unwrap();
                        if let Ok(back) = back.wait() {
                            read += 1;
                            assert!(!sent || *back == *bytes(i, LEN), "{call} {code}: piece {i}");
                        }
                    }
                    d.calm();
                    assert!(
                        read > COUNT - 10 && sent.iter().filter(|sent| !**sent).count() < 10,
                        "{call} {code}"
                    );
                    drop(queue);
                    all_back(&pool);
                    assert_eq!(pool.stats().quarantined_bytes, 0, "{call} {code}");
                }
                assert_eq!(device.lost(), None);
            }
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// The device dies with copies pushed, in flight, and waited for.
#[test]
fn a_device_dies_under_a_queue() {
    on_stand_in("a_device_dies_under_a_queue", |_, d| {
        let device = open();
        let (pool, queue) = (pool(&device, 4 << 20), device.copy_queue().unwrap());
        let memory = device.alloc(400 * PIECE).unwrap();
        d.hang(true);
        let mut flights = push(&queue, &pool, &memory, 400);
        let last = flights.pop().unwrap();
        let waiting = std::thread::spawn(move || last.wait().unwrap_err());
        std::thread::sleep(Duration::from_millis(20));
        d.kill(0, 700);
        let error = waiting.join().unwrap();
        assert!(error.is_device_lost(), "{error}");
        for flight in flights {
            // Some may have completed before; no copy says so that did not.
            if let Err(error) = flight.wait() {
                assert!(error.is_device_lost(), "{error}");
            }
        }
        until("nothing is in flight", || {
            let s = pool.stats();
            s.in_flight_bytes + s.checked_out_bytes == 0
        });
        let refused = queue.upload(filled(&pool, b"more"), &memory).unwrap_err();
        assert!(
            refused.error.is_device_lost() && refused.buffer.is_some_and(|buf| *buf == *b"more"),
            "{}",
            refused.error
        );
        assert!(queue.synchronize().is_err());
        pool.check().unwrap();
        drop((queue, memory, pool, device));
        // A sticky code says that the context is of no use; the crate gives nothing back to it.
    });
}

/// A hung device: a waiter with a deadline gets the handle back, and a full queue says so.
#[test]
fn a_hung_device_fills_its_queue() {
    on_stand_in("a_hung_device_fills_its_queue", |_, d| {
        let device = open();
        let (pool, queue) = (
            pool(&device, 4 << 20),
            device.copy_queue_with(QueueOptions::new().depth(16).threads(1)).unwrap(),
        );
        let memory = device.alloc(64 * PIECE).unwrap();
        d.hang(true);
        let mut sent: Vec<_> = (0..16)
            .map(|i| {
                queue
                    .try_upload(filled(&pool, &bytes(i, LEN)), memory.slice(i * PIECE..i * PIECE + LEN))
                    .unwrap()
            })
            .collect();
        let refused = queue.try_upload(filled(&pool, b"more"), &memory).unwrap_err();
        assert_eq!(refused.error, Error::QueueFull { depth: 16 });
        assert_eq!(refused.error.class(), ErrorClass::Transient);
        let late = sent.pop().unwrap().wait_timeout(Duration::from_millis(5)).unwrap_err();
        assert!(matches!(late.error, Error::Timeout(_)));
        sent.push(late.buffer.unwrap());
        assert!(matches!(queue.shutdown(Duration::from_millis(5)), Err(Error::Timeout(_))));
        d.hang(false);
        for (i, flight) in sent.into_iter().enumerate() {
            assert!(*flight.wait().unwrap() == *bytes(i, LEN));
        }
        queue.shutdown(HANG).unwrap();
        arrived(&device, &memory, 16);
        drop((queue, refused));
        all_back(&pool);
    });
}

/// In the child of a fork a queue refuses, and may be dropped.
#[test]
fn a_child_leaves_a_queue_alone() {
    on_stand_in("a_child_leaves_a_queue_alone", |_, d| {
        let device = open();
        let (pool, queue) = (pool(&device, 2 << 20), device.copy_queue().unwrap());
        let memory = device.alloc(64 * PIECE).unwrap();
        let flights = push(&queue, &pool, &memory, 64);
        queue.synchronize().unwrap();
        let buf = filled(&pool, &bytes(3, 100));
        // Until the threads have nothing to do and hold no lock.
        std::thread::sleep(Duration::from_millis(300));
        let made = || d.report().calls.iter().map(|call| call.1).sum::<u64>();
        let before = made();
        // SAFETY: the child calls what is under test, and `_exit`.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            let child = std::panic::AssertUnwindSafe(|| {
                let refused = [
                    queue.upload(buf, &memory).is_err_and(|e| e.error == Error::Forked),
                    queue.synchronize() == Err(Error::Forked),
                    queue.shutdown(HANG) == Err(Error::Forked),
                ];
                drop((flights, queue, memory, pool, device));
                if made() != before {
                    50
                } else {
                    refused.iter().position(|ok| !ok).map_or(0, |at| at as i32 + 1)
                }
            });
            let code = std::panic::catch_unwind(child).unwrap_or(99);
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        until("the child ends", || {
            // SAFETY: our child, and a place for its status.
            let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
            ended == pid
        });
        assert!(libc::WIFEXITED(status));
        assert_eq!(libc::WEXITSTATUS(status), 0, "which check failed, counted from 1; 50: a call");
    });
}

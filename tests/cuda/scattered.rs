//! Many short pieces on a GPU: the device ring and its kernels, batches, drivers with and without them, and trouble.
//!
//! What every device does is in `contract`. Here is what only a GPU's driver has: the kernel, the call for many copies in
//! its two forms, streams of the server's, and a driver that fails, hangs and dies, which only a double can be made to do.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::time::Duration;

use pinpool::copier::Transfer;
use pinpool::{Copier, Device, DeviceSlice, Error, ErrorClass, Pool, Unpinned, cuda};

use crate::support::doubles::gpu::{all_back, bytes, calls, on_gpu, on_stand_in, until};
use crate::support::doubles::{self, StandIn};
use crate::support::{in_use, skip};

const PIECE: usize = 512;
/// Of different lengths, so that the rows of a table differ.
fn len(i: usize) -> usize {
    500 - i % 7
}

fn open() -> Device {
    Device::open("cuda:0").unwrap()
}

/// With room for whole chunks.
fn pool(device: &Device, capacity: usize) -> Pool {
    let built = Pool::builder(device).capacity(capacity).extent(1 << 20).region(2 << 20);
    built.unpinned(Unpinned::Allow).build().unwrap()
}

fn copier(pool: &Pool, device: &Device, ring: usize) -> Copier {
    Copier::builder(pool, device).threads(2).chunk(256 << 10).ring(ring).build().unwrap()
}

fn place(memory: &DeviceSlice, i: usize) -> DeviceSlice {
    memory.slice(i * PIECE..i * PIECE + len(i)).unwrap()
}

/// Uploads pieces that lie near each other, by one call.
fn upload(copier: &Copier, memory: &DeviceSlice, count: usize) -> Result<(), Error> {
    let sources: Vec<_> = (0..count).map(|i| bytes(i, len(i))).collect();
    let pieces: Vec<_> = (0..).zip(&sources).map(|(i, bytes)| (&bytes[..], place(memory, i))).collect();
    copier.upload_slices(&pieces)
}

/// Starts an upload of each piece by itself.
fn start(copier: &Copier, memory: &DeviceSlice, count: usize) -> Vec<Transfer<Vec<u8>>> {
    (0..count).map(|i| copier.upload(bytes(i, len(i)), place(memory, i)).unwrap()).collect()
}

fn arrived(device: &Device, memory: &DeviceSlice, count: usize) {
    let mut all = vec![0; memory.len()];
    device.stream().unwrap().download_blocking(memory, &mut all).unwrap();
    for i in 0..count {
        assert!(all[i * PIECE..][..len(i)] == bytes(i, len(i)), "piece {i}");
    }
}

/// The pieces of a call go together: by the kernel, or in batches, with one event each.
fn go_together(test: &'static str, library: Option<&str>, batch: Option<&str>, ring: usize) {
    if let (Some(library), false) = (library, doubles::is_set() || doubles::required()) {
        let Some(library) = doubles::older(library) else { return skip!("no cargo") };
        return doubles::again(test, &[(doubles::PATH, library.to_str().unwrap())]);
    }
    on_gpu(test, |gpu| {
        const COUNT: usize = 2000;
        let device = open();
        let pool = pool(&device, 16 << 20);
        let copier = copier(&pool, &device, ring);
        let memory = device.alloc(COUNT * PIECE).unwrap();
        let counts = |d: &StandIn| {
            [
                calls(d, "cuMemcpyHtoDAsync_v2"),
                calls(d, "cuEventRecord"),
                batch.map_or(0, |name| calls(d, name)),
            ]
        };
        let before = gpu.stand_in.as_ref().map(counts);
        upload(&copier, &memory, COUNT).unwrap();
        arrived(&device, &memory, COUNT);
        let stats = copier.stats();
        assert_eq!(stats.ring_bytes + stats.batch_bytes, (0..COUNT).map(len).sum::<usize>() as u64);
        if let (Some(d), Some(before)) = (&gpu.stand_in, before) {
            let now = counts(d);
            let [copies, events, batches] = [0, 1, 2].map(|i| now[i] - before[i]);
            assert!(stats.chunks < COUNT as u64 / 4, "{stats:?}");
            assert!(events < COUNT as u64 / 2, "{events} events");
            if ring > 0 {
                assert!(stats.ring_bytes > 0 && stats.launches > 0, "{stats:?}");
                assert!(copies < COUNT as u64 / 2, "{copies} copies");
            } else {
                let together = batches > 0 && copies < COUNT as u64 / 2;
                assert_eq!(together, batch.is_some(), "{batches}, {copies}");
                assert!(together || calls(d, "cuMemcpyBatchAsync") == 0);
            }
        }
        drop(copier);
        all_back(&pool);
    });
}

#[test]
fn pieces_go_by_the_kernel() {
    go_together("pieces_go_by_the_kernel", None, Some("cuMemcpyBatchAsync"), 16 << 20);
}

#[test]
fn pieces_go_in_batches() {
    go_together("pieces_go_in_batches", None, Some("cuMemcpyBatchAsync"), 0);
}

#[test]
fn pieces_go_in_batches_of_the_newer_form() {
    go_together("pieces_go_in_batches_of_the_newer_form", Some("cuda13"), Some("cuMemcpyBatchAsync_v2"), 0);
}

#[test]
fn pieces_arrive_where_there_are_no_batches() {
    go_together("pieces_arrive_where_there_are_no_batches", Some("cuda12"), None, 0);
}

/// Threads that have another context current, or none, and one in the middle of a capture: transfers are not in its way.
#[test]
fn transfers_leave_captures_and_contexts_alone() {
    on_gpu("transfers_leave_captures_and_contexts_alone", |gpu| {
        let device = open();
        let pool = pool(&device, 8 << 20);
        let copier = copier(&pool, &device, 8 << 20);
        let memory = device.alloc(64 * PIECE).unwrap();
        let other = gpu.other_context();
        let raw = gpu.stream();
        gpu.begin_capture(raw, 0);
        for context in [0, other] {
            gpu.current(context);
            upload(&copier, &memory, 64).unwrap();
            assert_eq!(gpu.made("cuCtxGetCurrent", &[]), context);
        }
        gpu.current(gpu.context);
        // The capture is as it was: `end_capture` would tell.
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        arrived(&device, &memory, 64);
        drop(copier);
        all_back(&pool);
        gpu.ok("cuStreamDestroy_v2", &[raw]);
        gpu.ok("cuCtxDestroy_v2", &[other]);
    });
}

/// A stream of the server's comes after a transfer, and transfers after the stream's work.
#[test]
fn streams_of_the_server_depend_on_transfers() {
    on_gpu("streams_of_the_server_depend_on_transfers", |gpu| {
        const LARGE: usize = 300_000;
        let device = open();
        let pool = pool(&device, 16 << 20);
        let copier = copier(&pool, &device, 8 << 20);
        let (memory, copy) = (device.alloc(LARGE).unwrap(), device.alloc(LARGE).unwrap());
        let raw = gpu.stream();
        // SAFETY: destroyed when all is done.
        let stream = unsafe { cuda::adopt_stream(&device, raw as *mut c_void, ()) }.unwrap();
        for seed in 0..20 {
            let sent = bytes(seed, 100_000);
            copier.upload(sent.clone(), memory.slice(..100_000)).unwrap().order(&stream).unwrap();
            // The server's own work, of which the crate is not told.
            gpu.ok(
                "cuMemcpyDtoDAsync_v2",
                &[copy.address() as usize, memory.address() as usize, 100_000, raw],
            );
            copier.wait_for(&stream).unwrap();
            let mut back = vec![0; 100_000];
            copier.download_slice(copy.slice(..100_000), &mut back).unwrap();
            assert!(back == sent, "round {seed}");
        }
        // Not while it is captured: nothing outside comes before what a graph does.
        gpu.begin_capture(raw, 2);
        assert!(matches!(copier.wait_for(&stream), Err(Error::Capturing { .. })));
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        drop((copier, stream));
        all_back(&pool);
        gpu.ok("cuStreamSynchronize", &[raw]);
        gpu.ok("cuStreamDestroy_v2", &[raw]);
    });
}

// --- trouble ---------------------------------------------------------------------------------------------------------

/// A batch that the driver refuses goes one by one: only if one is refused then has the chunk failed.
#[test]
fn a_refused_batch_of_pieces_goes_one_by_one() {
    on_stand_in("a_refused_batch_of_pieces_goes_one_by_one", |_, d| {
        let device = open();
        let pool = pool(&device, 8 << 20);
        let copier = copier(&pool, &device, 0);
        let memory = device.alloc(300 * PIECE).unwrap();
        let refuse = |code, after| (1..=50).for_each(|nth| d.fail("cuMemcpyBatchAsync", nth, code, after));
        for after in [false, true] {
            refuse(1, after);
            upload(&copier, &memory, 300).unwrap();
            d.calm();
            arrived(&device, &memory, 300);
        }
        // And one copy of those is refused as well.
        refuse(2, false);
        d.fail("cuMemcpyHtoDAsync_v2", 7, 2, false);
        let failed = upload(&copier, &memory, 300).unwrap_err();
        d.calm();
        assert_eq!(failed.class(), ErrorClass::Transient, "{failed:?}");
        all_back(&pool);
        upload(&copier, &memory, 300).unwrap();
        arrived(&device, &memory, 300);
        assert_eq!(d.report().violations, Vec::<String>::new());
        drop(copier);
        all_back(&pool);
    });
}

/// Each call that pieces make fails once, with each kind of error, done or not: nothing is lost, and nothing is reported
/// as done that is not.
#[test]
fn every_call_of_pieces_fails_once() {
    on_stand_in("every_call_of_pieces_fails_once", |_, d| {
        const COUNT: usize = 150;
        for call in [
            "cuMemcpyBatchAsync",
            "cuMemcpyHtoDAsync_v2",
            "cuLaunchKernel",
            "cuEventRecord",
            "cuEventQuery",
            "cuEventCreate",
        ] {
            for (code, after) in [(1, false), (2, false), (2, true), (999, false)] {
                for ring in [8 << 20, 0] {
                    let device = open();
                    {
                        let pool = pool(&device, 8 << 20);
                        let copier = copier(&pool, &device, ring);
                        let memory = device.alloc(COUNT * PIECE).unwrap();
                        for nth in [1, 2, 3] {
                            d.fail(call, nth, code, after);
                        }
                        let together = upload(&copier, &memory, COUNT / 3).is_ok();
                        let mut sent = vec![together; COUNT / 3];
                        for i in COUNT / 3..COUNT {
                            let one = copier.upload(bytes(i, len(i)), place(&memory, i)).unwrap();
                            sent.push(one.wait().is_ok());
                        }
                        d.calm();
                        let mut all = vec![0; memory.len()];
                        device.stream().unwrap().download_blocking(&memory, &mut all).unwrap();
                        for (i, sent) in sent.iter().enumerate() {
                            let there = all[i * PIECE..][..len(i)] == bytes(i, len(i));
                            assert!(!sent || there, "{call} {code} {ring}: piece {i}");
                        }
                        upload(&copier, &memory, COUNT).unwrap();
                        drop(copier);
                        all_back(&pool);
                        assert_eq!(pool.stats().quarantined_bytes, 0, "{call} {code} {ring}");
                    }
                    assert_eq!(device.lost(), None);
                }
            }
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// The device dies with transfers that wait, that are in flight, and that are waited for.
#[test]
fn a_device_dies_under_transfers() {
    on_stand_in("a_device_dies_under_transfers", |_, d| {
        let device = open();
        let pool = pool(&device, 8 << 20);
        let copier = copier(&pool, &device, 8 << 20);
        let memory = device.alloc(400 * PIECE).unwrap();
        d.hang(true);
        let mut sent = start(&copier, &memory, 400);
        let last = sent.pop().unwrap();
        let waiting = std::thread::spawn(move || last.wait().unwrap_err().error);
        std::thread::sleep(Duration::from_millis(20));
        d.kill(0, 700);
        let error = waiting.join().unwrap();
        assert!(error.is_device_lost(), "{error}");
        for sent in sent {
            // Some may have completed before; no transfer says so that did not.
            if let Err(refused) = sent.wait() {
                assert!(refused.error.is_device_lost(), "{refused:?}");
            }
        }
        until("nothing is in flight", || in_use(&pool) == 0);
        let error = copier.upload(b"more".to_vec(), &memory).unwrap_err().error;
        assert!(error.is_device_lost(), "{error}");
        pool.check().unwrap();
        drop((copier, memory, pool, device));
        // A sticky code says that the context is of no use; the crate gives nothing back to it.
    });
}

/// In the child of a fork transfers are refused, and their handles may be dropped.
#[test]
fn a_child_leaves_transfers_alone() {
    on_stand_in("a_child_leaves_transfers_alone", |_, d| {
        let device = open();
        let pool = pool(&device, 8 << 20);
        let copier = copier(&pool, &device, 8 << 20);
        let memory = device.alloc(64 * PIECE).unwrap();
        let mut sent = start(&copier, &memory, 64);
        let last = sent.pop().unwrap();
        last.wait().unwrap();
        all_back(&pool);
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
                    copier.upload_slice(b"more", &memory).is_err_and(|error| error == Error::Forked),
                    copier
                        .upload(b"more".to_vec(), &memory)
                        .is_err_and(|refused| refused.error == Error::Forked),
                    sent.pop()
                        .is_some_and(|sent| sent.wait().is_err_and(|refused| refused.error == Error::Forked)),
                ];
                drop((sent, copier, memory, pool, device));
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

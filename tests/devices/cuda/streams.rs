//! Contexts and streams that a server made: adopted, given out, told apart, and in trouble.
//!
//! The server is played by raw driver calls (`support/doubles/gpu.rs`). Most tests run on a real GPU as well
//! as on the stand-in; what only a double can be told to do runs there alone. Captures and graphs are in
//! `graphs.rs`.

#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pinpool::{Copier, Device, DeviceSlice, Error, ErrorClass, Pool, Stream, SubmitError, cuda};
use pinpool_sim::cuda::Driver;

use crate::cuda::rig::{adopt, flag, open, round_trip};
use crate::support::doubles::gpu::{
    Gpu, all_back, bytes, calls, filled, on_driver, on_gpu, on_stand_in, pool, until,
};
use crate::support::doubles::{StandIn, gpu_name, simulated_elsewhere};
use crate::support::hand::Machine;
use crate::support::own_process;
use crate::support::process::forked;
use crate::support::value::Value;

/// The largest of which one fits into a pool of [`ROOM`].
const LEN: usize = 100_000;
const ROOM: usize = 128 << 10;

/// Whether two handles are to one stream, as far as the pool knows: then what is ready on one is ready on the
/// other.
fn are_one(pool: &Pool, one: &Stream, two: &Stream, memory: &DeviceSlice) -> bool {
    match two.download(memory, pool.checkout_on(one, memory.len()).unwrap()) {
        Ok(flight) => {
            drop(flight.wait().unwrap());
            true
        }
        Err(SubmitError {
            error: Error::Mismatch { what: "a stream-ready buffer", .. },
            buffer: Some(_),
        }) => false,
        Err(e) => panic!("{e}"),
    }
}

/// A stream costs more from when others can reach it on: each submit asks whether it is captured, and closes
/// what was submitted before, which does not wait for what the server queues afterwards.
#[test]
fn only_streams_that_others_can_reach_are_asked_about() {
    on_stand_in(|gpu, d| {
        let (device, theirs) = (open(), gpu.stream());
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(1000).unwrap());
        let (own, adopted) = (device.stream().unwrap(), adopt(&device, theirs).unwrap());
        let [asked, records] = ["cuStreamIsCapturing", "cuEventRecord"].map(|name| move || calls(d, name));
        let before = asked();
        (0..50).for_each(|seed| round_trip(&pool, &own, &memory, seed));
        assert_eq!(asked(), before);
        (0..50).for_each(|seed| round_trip(&pool, &adopted, &memory, seed));
        // Once for each submit; and once more where the reaper or a waiter polls while the event is being
        // recorded.
        let asked = asked() - before;
        assert!((100..=250).contains(&asked), "{asked}");
        let sent = || own.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap();
        let (before, first) = (records(), sent());
        cuda::raw_stream(&own).unwrap();
        assert!(records() > before, "what was submitted before is closed");
        let (before, second) = (records(), sent());
        assert!(records() > before, "and each submit from now on, at once");
        drop((first.wait().unwrap(), second.wait().unwrap()));
    });
}

/// A thread of a server need not have made a context current. Many that push and pop one take microseconds
/// for each call.
#[test]
fn asking_makes_no_context_current() {
    if simulated_elsewhere() {
        return;
    }
    let machine = Machine::new(1, 1 << 20, 1);
    let (device, d) = (machine.device(0), StandIn::Own(*machine));
    let (pool, stream) = (pool(&device, ROOM), device.stream().unwrap());
    cuda::raw_stream(&stream).unwrap();
    let buf = filled(&pool, &bytes(1, LEN));
    let made = || ["cuEventQuery", "cuCtxPushCurrent_v2"].map(|call| calls(&d, call));
    let [_, before] = made();
    let held = stream.hold(buf).unwrap();
    let [queries, pushes] = made();
    assert!(pushes <= before + 2, "the event is made, and recorded");
    // More often than a question may fail before the stream is given up.
    (0..1200).for_each(|_| assert!(!held.is_done().unwrap()));
    let now = made();
    assert!(now[0] >= queries + 1200 && now[1] == pushes, "{pushes} pushes, and then {now:?}");
    drop(held.wait().unwrap());
}

#[test]
fn a_context_of_the_servers() {
    on_gpu(|gpu| {
        let context = gpu.other_context();
        let (keeper, dropped) = flag();
        // SAFETY: destroyed below, when the keeper is dropped.
        let device = unsafe { cuda::adopt_context(context as *mut c_void, keeper) }.unwrap();
        // A reader of a log or a gauge sees which GPU it is of, and which of its contexts.
        let (another, (keeper, gone)) = (gpu.other_context(), flag());
        // SAFETY: destroyed when the keeper is dropped.
        let beside = unsafe { cuda::adopt_context(another as *mut c_void, keeper) }.unwrap();
        assert!(device.name().starts_with(&format!("{} ", gpu_name(0))) && device.name() != beside.name());
        drop(beside);
        until("its keeper is dropped", gone);
        gpu.ok("cuCtxDestroy_v2", &[another]);
        assert_eq!(cuda::raw_context(&device).unwrap() as usize, context);
        let (primary, foreign) = (open(), gpu.stream());
        {
            // Every context may use pinned memory; the rest belongs to one.
            let pool = Pool::builder(&device).device(&primary).capacity(2 << 20).build().unwrap();
            let memory = device.alloc(LEN).unwrap();
            round_trip(&pool, &device.stream().unwrap(), &memory, 1);
            round_trip(&pool, &primary.stream().unwrap(), &primary.alloc(LEN).unwrap(), 2);
            let refused = primary.stream().unwrap().upload(filled(&pool, &[1; 8]), &memory).unwrap_err();
            assert!(matches!(refused.error, Error::Mismatch { .. }) && refused.buffer.is_some());
            // A stream belongs to its context.
            let wrong = |said| matches!(said, Err(Error::Mismatch { what: "a stream", .. }));
            gpu.current(context);
            let raw = gpu.stream();
            gpu.current(gpu.context);
            assert!(wrong(adopt(&device, foreign)) && wrong(adopt(&primary, raw)));
            round_trip(&pool, &adopt(&device, raw).unwrap(), &memory, 3);
            // Adopted again it is the same device, and the keeper that it has is enough.
            let (second, gone) = flag();
            // SAFETY: as above.
            let again = unsafe { cuda::adopt_context(context as *mut c_void, second) }.unwrap();
            assert!(gone() && !dropped() && again.name() == device.name());
            round_trip(&pool, &again.stream().unwrap(), &memory, 4);
            gpu.current(context);
            gpu.ok("cuStreamDestroy_v2", &[raw]);
            gpu.current(gpu.context);
        }
        // SAFETY: null is refused.
        let error = unsafe { cuda::adopt_context(std::ptr::null_mut(), ()) }.unwrap_err();
        assert!(matches!(error, Error::Argument(_)), "{error}");
        drop(device);
        until("the keeper is dropped", &dropped);
        gpu.ok("cuCtxDestroy_v2", &[context]);
        gpu.ok("cuStreamDestroy_v2", &[foreign]);
    });
}

/// (`tests/faults` has the other calls of sharing, on GPUs that are moved by hand, where no context can be adopted.)
#[test]
fn a_call_that_adopting_a_context_makes_fails_once() {
    on_stand_in(|gpu, d| {
        let faults = ["cuCtxGetDevice", "cuDevicePrimaryCtxGetState"];
        for (call, code) in faults.into_iter().flat_map(|call| [1, 2, 900, 999].map(|code| (call, code))) {
            let (context, struck) = (gpu.other_context(), d.struck());
            let [(first, first_gone), (second, gone)] = [(); 2].map(|()| flag());
            // SAFETY: destroyed below, when no keeper is left.
            let adopt = |keeper| unsafe { cuda::adopt_context(context as *mut c_void, keeper) };
            d.fail(call, 1, code, false);
            assert!(adopt(first).is_err() && first_gone() && d.struck() > struck, "{call} {code}");
            let device = adopt(second).unwrap();
            let (pool, memory) = (pool(&device, 2 << 20), device.alloc(1000).unwrap());
            round_trip(&pool, &device.stream().unwrap(), &memory, 1);
            drop((pool, memory, device));
            until("the keeper is dropped", gone);
            gpu.ok("cuCtxDestroy_v2", &[context]);
        }
        gpu.current(0);
        gpu.ok("cuDevicePrimaryCtxRelease_v2", &[gpu.ordinal(0)]);
        d.no_trace();
    });
}

#[test]
fn devices_that_are_no_gpus_have_no_handles() {
    let host = Device::open("host").unwrap();
    assert!(matches!(adopt(&host, 16), Err(Error::Unsupported(_))));
    assert!(matches!(cuda::raw_context(&host), Err(Error::Unsupported(_))));
    assert!(matches!(cuda::raw_stream(&host.stream().unwrap()), Err(Error::Unsupported(_))));
}

#[test]
fn owners_are_kept_for_as_long_as_they_are_needed_and_a_context_goes_after_its_streams() {
    on_gpu(|gpu| {
        let (context, all) = (gpu.other_context(), Arc::new(Mutex::new(Vec::new())));
        // Says so when it is dropped, after a delay.
        let says = |what, late| {
            let all = all.clone();
            Value::new(Vec::new(), move || {
                std::thread::sleep(Duration::from_millis(late));
                all.lock().unwrap().push(what);
            })
        };
        let said = || all.lock().unwrap().clone();
        // SAFETY: destroyed below, when both keepers are dropped.
        let device = unsafe { cuda::adopt_context(context as *mut c_void, says("context", 0)) }.unwrap();
        gpu.current(context);
        let raw = gpu.stream();
        gpu.current(gpu.context);
        // SAFETY: as above.
        let adopt = |owner| unsafe { cuda::adopt_stream(&device, raw as *mut c_void, owner) }.unwrap();
        let stream = adopt(says("stream", 50));
        drop(adopt(says("again", 0)));
        assert_eq!(said(), ["again"], "the first is enough");
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(LEN).unwrap());
        if let Some(d) = &gpu.stand_in {
            d.hang(true);
        }
        let flight = stream.upload(filled(&pool, &bytes(1, LEN)), &memory).unwrap();
        drop((device, stream, pool, memory));
        if let Some(d) = &gpu.stand_in {
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(said(), ["again"], "needed by what is in flight");
            d.hang(false);
        }
        drop(flight);
        until("both are dropped", || said().len() == 3);
        assert_eq!(said(), ["again", "stream", "context"]);
        gpu.current(context);
        gpu.ok("cuStreamDestroy_v2", &[raw]);
        gpu.current(gpu.context);
        gpu.ok("cuCtxDestroy_v2", &[context]);
    });
}

/// A thread of the crate frees memory at a time of its own: in the middle of a capture, too.
#[test]
fn freeing_memory_gets_into_no_capture() {
    on_stand_in(|gpu, d| {
        let device = open();
        let own = device.stream().unwrap();
        let (raw, raw_own) = (gpu.stream(), cuda::raw_stream(&own).unwrap() as usize);
        let freed = || calls(d, "cuMemFree_v2");
        for (stream, raw) in [(adopt(&device, raw).unwrap(), raw), (own, raw_own)] {
            let memory = device.alloc(LEN).unwrap();
            let before = freed();
            gpu.begin_capture(raw, 1);
            // The thread asks just before the capture begins.
            (1..=10).for_each(|nth| d.fail("cuStreamIsCapturing", nth, 0, false));
            drop(memory);
            until("it is freed", || freed() > before);
            gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
            // Uses up the false answers that are left.
            (1..=10).for_each(|_| drop(cuda::raw_stream(&stream)));
            stream.synchronize().unwrap();
            let leaks = d.report().leaks;
            assert!(!leaks.iter().any(|leak| leak.starts_with("allocations")), "not freed: {leaks:?}");
        }
    });
}

#[test]
fn a_new_stream_under_an_old_handle_is_another() {
    on_gpu(|gpu| {
        let device = open();
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(1000).unwrap());
        if let Some(d) = &gpu.stand_in {
            d.command("reuse true");
        }
        // A driver gives the handle of a destroyed stream again, at once or some streams later.
        for seed in 0..10 {
            let old_raw = gpu.stream();
            let old = adopt(&device, old_raw).unwrap();
            round_trip(&pool, &old, &memory, seed);
            gpu.ok("cuStreamDestroy_v2", &[old_raw]);
            let mut made: Vec<usize> = Vec::new();
            while made.len() < 1000 && made.last() != Some(&old_raw) {
                made.push(gpu.stream());
            }
            println!("a stream has the handle of the one before, after {}", made.len());
            let raw = made.pop().unwrap();
            made.into_iter().for_each(|other| gpu.ok("cuStreamDestroy_v2", &[other]));
            if raw != old_raw {
                // A driver may give the handle to a stream of another test.
                assert!(gpu.stand_in.is_none());
                gpu.ok("cuStreamDestroy_v2", &[raw]);
                continue;
            }
            let new = adopt(&device, raw).unwrap();
            assert!(!are_one(&pool, &old, &new, &memory));
            round_trip(&pool, &new, &memory, seed);
            drop((old, new));
            gpu.ok("cuStreamDestroy_v2", &[raw]);
        }
    });
}

/// What is in flight on a stream is claimed for later work on it only if it is known to be that stream.
#[test]
fn claims_need_streams_that_can_be_told_apart() {
    on_driver(Driver::Cuda12_8, |gpu| claims(gpu, false));
    on_driver(Driver::Cuda11_0, |gpu| claims(gpu, true));
}

/// On an old driver nothing tells two streams apart.
fn claims(gpu: &Gpu, old: bool) {
    let Some(d) = &gpu.stand_in else { return };
    let (device, raw) = (open(), gpu.stream());
    let (pool, memory) = (pool(&device, ROOM), device.alloc(LEN).unwrap());
    let (stream, own) = (adopt(&device, raw).unwrap(), device.stream().unwrap());
    assert_eq!(are_one(&pool, &stream, &adopt(&device, raw).unwrap(), &memory), !old);
    if !old {
        let given = device.stream().unwrap();
        let again = adopt(&device, cuda::raw_stream(&given).unwrap() as usize).unwrap();
        let [null, legacy] = [0, 1].map(|handle| adopt(&device, handle).unwrap());
        round_trip(&pool, &null, &memory, 1);
        assert!(are_one(&pool, &given, &again, &memory) && are_one(&pool, &null, &legacy, &memory));
    }
    // Streams of the crate are always known.
    for (stream, known) in [(&own, true), (&stream, !old)] {
        all_back(&pool);
        d.hang(true);
        drop(stream.upload(filled(&pool, &bytes(1, LEN)), &memory).unwrap());
        match pool.try_checkout_on(stream, LEN) {
            Ok(landing) => assert!(landing.was_claimed() && known),
            Err(error) => assert!(matches!(error, Error::Exhausted(_)) && !known, "{error}"),
        }
        d.hang(false);
    }
    // On a stream that is being captured nothing can be ordered after what is in flight.
    all_back(&pool);
    d.hang(true);
    drop(stream.upload(filled(&pool, &bytes(1, LEN)), &memory).unwrap());
    gpu.begin_capture(raw, 1);
    assert!(matches!(pool.try_checkout_on(&stream, LEN), Err(Error::Exhausted(_))));
    gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
    assert_eq!(pool.try_checkout_on(&stream, LEN).is_ok(), !old);
    d.hang(false);
    all_back(&pool);
    drop((pool, stream, own, memory, device));
    gpu.ok("cuStreamDestroy_v2", &[raw]);
}

#[test]
fn a_stream_that_was_destroyed_too_early_harms_nobody_else() {
    on_stand_in(|gpu, d| {
        let device = open();
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(1000).unwrap());
        let raw = gpu.stream();
        let stream = adopt(&device, raw).unwrap();
        // No event can be recorded for it, and then there is no stream left to record one on. (Enough
        // failures for a thread to be held up in between.)
        (1..=400).for_each(|nth| d.fail("cuEventRecord", nth, 999, false));
        let flight = stream.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap();
        gpu.ok("cuStreamDestroy_v2", &[raw]);
        let error = flight.wait().unwrap_err();
        assert!(error.to_string().contains("400") && error.class() == ErrorClass::Argument, "{error}");
        assert!(pool.stats().quarantined_bytes >= 1000, "{:?}", pool.stats());
        let refused = stream.upload(filled(&pool, &bytes(2, 1000)), &memory).unwrap_err();
        assert!(refused.buffer.is_some_and(|buf| *buf == *bytes(2, 1000)));
        assert!(stream.synchronize().is_err());
        // The device is as well as before.
        assert_eq!(device.lost(), None);
        let memory = device.alloc(1000).unwrap();
        round_trip(&pool, &device.stream().unwrap(), &memory, 3);
        pool.check().unwrap();
        // A handle that names nothing is refused at once.
        assert!(adopt(&device, raw).is_err());
        let broken = d.report().violations;
        assert!(broken.iter().all(|v| v.starts_with("STR-")), "{broken:?}");
    });
}

/// In the child of a fork everything may be dropped, and no driver is called: it is not there. (What a child
/// is refused is in `kept`.)
#[test]
fn a_child_drops_everything_without_a_driver() {
    own_process!();
    on_stand_in(|gpu, d| {
        let ((one, one_gone), (two, two_gone)) = (flag(), flag());
        // SAFETY: kept to the end of the process.
        let other = unsafe { cuda::adopt_context(gpu.other_context() as *mut c_void, one) }.unwrap();
        let (device, raw) = (open(), gpu.stream());
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(1000).unwrap());
        // SAFETY: as above.
        let stream = unsafe { cuda::adopt_stream(&device, raw as *mut c_void, two) }.unwrap();
        let flight = stream.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap();
        let shared = device.stream().unwrap();
        cuda::raw_stream(&shared).unwrap();
        gpu.begin_capture(raw, 1);
        stream.hold_captured(filled(&pool, &bytes(2, 1000))).unwrap();
        gpu.end_capture(raw);
        let landing = pool.checkout_on(&stream, 1000).unwrap();
        let copier = Copier::builder(&pool, &device).build().unwrap();
        let sent = copier.upload(bytes(4, 100), &memory).unwrap();
        until("all has landed", || sent.is_over() && flight.is_done().unwrap());
        // Until the threads have nothing to do and hold no lock, of the stand-in's above all.
        std::thread::sleep(Duration::from_millis(300));
        let made = || d.report().calls.iter().map(|call| call.1).sum::<u64>();
        let before = made();
        let wrong = forked(|| {
            let checks = [
                adopt(&device, raw).err() == Some(Error::Forked),
                cuda::raw_stream(&stream).err() == Some(Error::Forked),
                cuda::raw_context(&device).err() == Some(Error::Forked),
                stream.wait_for(&shared) == Err(Error::Forked),
                copier.upload(b"more".to_vec(), &memory).is_err_and(|e| e.error == Error::Forked),
                sent.wait().is_err_and(|e| e.error == Error::Forked),
            ];
            drop((copier, flight, landing, stream, shared, memory, pool, device, other));
            // A call of the driver, or a keeper that was dropped.
            if made() != before || one_gone() || two_gone() {
                return 50;
            }
            checks.iter().position(|ok| !ok).map_or(0, |at| at as i32 + 1)
        });
        assert_eq!(wrong, Some(0), "which check failed, counted from 1; 50: a call or a keeper");
    });
}

#[test]
fn the_callers_context_and_mode_are_left_alone() {
    on_stand_in(|gpu, d| {
        let device = open();
        // Once with none, once with another context, once with the pool's own.
        let other = gpu.other_context();
        for context in [0, other, gpu.context] {
            gpu.current(context);
            let (pool, stream, memory) =
                (pool(&device, 2 << 20), device.stream().unwrap(), device.alloc(50_000).unwrap());
            round_trip(&pool, &stream, &memory, 1);
            stream.upload_blocking(&bytes(2, 50_000), &memory).unwrap();
            device.stream().unwrap().wait_for(&stream).unwrap();
            // Refused by the driver: put back all the same.
            d.fail("cuMemcpyHtoDAsync_v2", 1, 1, false);
            drop(stream.upload(filled(&pool, &bytes(1, 100)), &memory).unwrap_err());
            assert_eq!(gpu.made("cuCtxGetCurrent", &[]), context);
            for expected in [0, 1] {
                let mut mode = 1 - expected;
                gpu.ok("cuThreadExchangeStreamCaptureMode", &[(&raw mut mode) as usize]);
                assert_eq!(mode, expected, "global, as threads begin; and back");
            }
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// However often it cannot be waited for. (`tests/faults` has copies that are refused, or are said to be.)
#[test]
fn a_blocking_copy_returns_only_when_the_driver_has_let_go() {
    on_stand_in(|_, d| {
        let device = open();
        let (pool, stream, memory) =
            (pool(&device, 2 << 20), device.stream().unwrap(), device.alloc(10_000).unwrap());
        for (round, code) in [1, 2, 900, 999].into_iter().enumerate() {
            (1..4).for_each(|nth| d.fail("cuStreamSynchronize", nth, code, false));
            let before = d.struck();
            let sent = bytes(round, 10_000);
            let mut borrowed = sent.clone();
            stream.upload_blocking(&borrowed, &memory).unwrap();
            // Would be copied, were the copy still to run.
            borrowed.fill(0xEE);
            let landing = pool.checkout(10_000).unwrap();
            assert!(*stream.download(&memory, landing).unwrap().wait().unwrap() == *sent);
            assert_eq!(d.struck(), before + 3, "it is waited for until that succeeds");
        }
        assert_eq!(device.lost(), None);
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

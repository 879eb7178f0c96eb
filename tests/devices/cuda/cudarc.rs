//! cudarc beside the pool: one context, one stream, and copies that are complete when the CPU reads their
//! bytes.
//!
//! On a GPU where there is one, else on the stand-in driver, which cudarc finds as `libcuda.so` on the
//! library path and which runs every copy as late as the rules allow. Each test has a process of its own.

#![cfg(feature = "cudarc")]
#![allow(unsafe_code, reason = "cudarc's unsafe calls")]

use std::sync::{Arc, mpsc};
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use pinpool::cudarc::{self as shared, CudarcStream, SharedSlice};
use pinpool::{Device, Error, InFlight, PinnedBuf, Pool, SubmitError};

use crate::cuda::rig::in_a_child;
use crate::support::doubles::gpu::filled;
use crate::support::doubles::{self, StandIn, gpu_name};
use crate::support::{Random, bytes, variable};

const OLD: u8 = 0xEE;

/// The end of a test in its child: with the simulation, nothing may be left behind and no rule broken.
struct Checked;

impl Drop for Checked {
    fn drop(&mut self) {
        let Some(stand_in) = StandIn::loaded().filter(|_| !std::thread::panicking()) else { return };
        let mut report = stand_in.final_report();
        // cudarc records and destroys events, and frees memory, before its streams have reached them: the
        // driver allows it.
        report.violations.retain(|v| !v.starts_with("EVT-3") && !v.starts_with("EVT-4"));
        report.leaks.retain(|leak| !leak.starts_with("allocations"));
        assert_eq!((report.violations, report.leaks), (vec![], vec![]));
    }
}

/// The rest of a test runs in a child.
macro_rules! beside {
    ($test:ident) => {
        beside!($test, unchecked);
        let _checked = Checked;
    };
    ($test:ident, unchecked) => {
        if in_a_child(concat!("cudarc::", stringify!($test)), false).is_none() {
            return;
        }
    };
}

fn adopted(stream: &Arc<CudaStream>) -> pinpool::Result<CudarcStream> {
    // SAFETY: a stream that is captured here is captured by the thread that copies, or under a lock that it
    // takes to copy.
    unsafe { CudarcStream::new(stream) }
}

/// Memory of `bytes` on a stream, there by now.
fn on_device(stream: &Arc<CudaStream>, bytes: &[u8]) -> CudaSlice<u8> {
    let slice = stream.clone_htod(bytes).unwrap();
    stream.synchronize().unwrap();
    slice
}

fn pool(device: &Device, len: usize) -> Pool {
    Pool::builder(device).capacity(4 * len + (1 << 20)).extent(len + (1 << 20)).build().unwrap()
}

/// Two streams of a context, as cudarc and as the pool have them.
struct Two {
    context: Arc<CudaContext>,
    owner: Arc<CudaStream>,
    other: Arc<CudaStream>,
    on_owner: CudarcStream,
    on_other: CudarcStream,
    pool: Pool,
}

impl Two {
    /// With a pool for buffers of so many bytes.
    fn new(len: usize) -> Self {
        let context = CudaContext::new(0).unwrap();
        let [owner, other] = [(); 2].map(|()| context.new_stream().unwrap());
        let [on_owner, on_other] = [&owner, &other].map(|stream| adopted(stream).unwrap());
        let pool = pool(on_owner.device(), len);
        Self { context, owner, other, on_owner, on_other, pool }
    }

    /// A slice whose bytes are anything.
    fn fresh(&self, len: usize) -> CudaSlice<u8> {
        // SAFETY: what is read of it before it is written is not looked at.
        unsafe { self.owner.alloc::<u8>(len) }.unwrap()
    }
}

/// The buffer of a copy that was refused since nothing would order it.
fn unordered<T: std::fmt::Debug>(said: Result<T, SubmitError<PinnedBuf>>) -> PinnedBuf {
    let refused = said.unwrap_err();
    assert!(matches!(refused.error, Error::Mismatch { what: "a cudarc slice", .. }), "{}", refused.error);
    refused.buffer.unwrap()
}

/// A context and a stream for each way in which cudarc keeps order.
fn ways() -> Vec<(&'static str, Arc<CudaStream>)> {
    let (single, tracked, untracked) =
        (CudaContext::new(0).unwrap(), CudaContext::new(0).unwrap(), CudaContext::new(0).unwrap());
    // SAFETY: nothing in this context is used on more than one stream.
    unsafe { untracked.disable_event_tracking() };
    vec![
        ("the default stream", single.default_stream()),
        ("a stream of its own", tracked.new_stream().unwrap()),
        ("a stream of its own, event tracking off", untracked.new_stream().unwrap()),
    ]
}

#[test]
fn copies_are_in_order_with_what_cudarc_does() {
    const LEN: usize = if cfg!(debug_assertions) { 300_000 } else { 64 << 20 };
    beside!(copies_are_in_order_with_what_cudarc_does);
    for (way, stream) in ways() {
        let shared = adopted(&stream).unwrap();
        let pool = pool(shared.device(), LEN);
        let mut slice = on_device(&stream, &vec![0; LEN]);
        for round in 0..20 {
            let sent = bytes(round, LEN);
            // Dropped at once: the next round's buffer may be the same segment.
            drop(shared.upload_to(filled(&pool, &sent), &mut slice).unwrap());
            // cudarc copies what was uploaded, on the same stream, and it comes back by either way.
            let copied = slice.try_clone().unwrap();
            // (cudarc's own pinned slice is stale here: its event was never recorded.)
            let mut landing = pool.checkout(LEN).unwrap();
            landing.try_resize(LEN, OLD).unwrap();
            let ours = shared.download_from(&copied, landing).unwrap().wait().unwrap();
            assert!(*ours == *sent, "{way}: round {round}, by the pool");
            let landing = pool.checkout_on(&shared, LEN).unwrap();
            let ours = shared.download_from(&copied, landing).unwrap().wait().unwrap();
            assert!(*ours == *sent, "{way}: round {round}, by the pool, stream-ready");
            assert!(stream.clone_dtoh(&slice).unwrap() == sent, "{way}: round {round}, by cudarc");
        }
        // Borrowed buffers are read before the call returns: the next one, which is the same memory, is
        // written at once.
        let one = Pool::builder(shared.device()).capacity(LEN + 8192).build().unwrap();
        for round in 0..5 {
            let sent = bytes(round, LEN);
            let buf = filled(&one, &sent);
            shared.upload_to_blocking(&buf, &mut slice).unwrap();
            drop(buf);
            let mut buf = one.checkout(LEN).unwrap();
            buf.try_resize(LEN, OLD).unwrap();
            assert!(stream.clone_dtoh(&slice).unwrap() == sent, "{way}: round {round}");
            shared.download_from_blocking(&slice, &mut buf).unwrap();
            assert!(*buf == *sent, "{way}: round {round}, back");
        }
        let last = bytes(4, LEN);
        // Parts, and other types.
        let mut floats = stream.clone_htod(&[0_f32; 8]).unwrap();
        let mut buf = pool.checkout(8).unwrap();
        buf.try_extend_from(&[1.5_f32, -2.0]).unwrap();
        shared.upload_to(buf, &mut floats.slice_mut(3..5)).unwrap().wait().unwrap();
        let back = pool.checkout(32).unwrap();
        let back = shared.download_from(&floats.slice(2..6), back).unwrap().wait().unwrap();
        assert_eq!(back.view::<f32>().unwrap(), [0.0, 1.5, -2.0, 0.0], "{way}");
        // Adopted again it is the same stream, of the primary context's device: ready on the one is ready on
        // the other.
        let again = adopted(&stream).unwrap();
        assert_eq!(shared.device().name(), &*gpu_name(0));
        assert_eq!(shared::device(stream.context()).unwrap().name(), &*gpu_name(0));
        let landing = pool.checkout_on(&shared, LEN).unwrap();
        let flight = again.download_from(&slice, landing).unwrap();
        // Dropped while a copy is in flight, all of cudarc's handles among them: freed behind it.
        drop((slice, floats, stream, shared, again));
        assert!(*flight.wait().unwrap() == *last, "{way}: freed before it was read");
    }
}

#[test]
fn what_nothing_would_order_is_refused_with_the_buffer() {
    beside!(what_nothing_would_order_is_refused_with_the_buffer);
    let [default, own, untracked] = ways().try_into().unwrap();
    let context = own.1.context().clone();
    let pool = pool(&shared::device(&context).unwrap(), 4096);
    let filled = || filled(&pool, &[7; 64]);
    // Copies to a new slice of `owner`, from another stream or its own: it is there when its owner reads it.
    let arrives = |by: &CudarcStream, owner: &Arc<CudaStream>, slice: &mut CudaSlice<u8>| {
        by.upload_to(filled(), slice).unwrap().wait().unwrap();
        assert_eq!(owner.clone_dtoh(slice).unwrap(), [7; 64]);
    };
    let refused = |by: &CudarcStream, slice: &mut CudaSlice<u8>| {
        for _ in 0..2 {
            assert_eq!(*unordered(by.upload_to(filled(), slice)), [7; 64]);
        }
        unordered(by.download_from(slice, filled()));
    };
    // Another stream of the same context: cudarc tracks it, or it does not.
    let other = adopted(&context.new_stream().unwrap()).unwrap();
    arrives(&other, &own.1, &mut on_device(&own.1, &[0; 64]));
    refused(&adopted(&default.1).unwrap(), &mut on_device(&untracked.1, &[0; 64]));
    // Made while tracking was off, used while it is on: only its own stream orders it.
    let late = CudaContext::new(0).unwrap();
    // SAFETY: nothing is used on more than one stream meanwhile.
    unsafe { late.disable_event_tracking() };
    let (first, second) = (late.new_stream().unwrap(), late.new_stream().unwrap());
    let mut slice = on_device(&first, &[0; 64]);
    // SAFETY: as above.
    unsafe { late.enable_event_tracking() };
    refused(&adopted(&second).unwrap(), &mut slice);
    arrives(&adopted(&first).unwrap(), &first, &mut slice);
    // A slice of another `CudaContext` for the same context, which has no stream but the default one: what
    // cudarc will do to the slice waits for no event.
    let quiet = CudaContext::new(0).unwrap();
    let mut lone = on_device(&quiet.default_stream(), &[0; 64]);
    refused(&other, &mut lone);
    // Nor if that has another stream: cudarc stops tracking when it is dropped.
    let second = quiet.new_stream().unwrap();
    refused(&other, &mut lone);
    // With a stream of its own the slice stays tracked until it is dropped. The default stream of the shared
    // context is tracked by the pool's stream, and a per-thread default stream is ordered with those of all
    // threads.
    for owner in [second, context.default_stream(), context.per_thread_stream()] {
        arrives(&other, &owner, &mut on_device(&owner, &[0; 64]));
    }
    // Too small, with the buffer; and a landing that is too small.
    let by = adopted(&own.1).unwrap();
    let refused = by.upload_to(filled(), &mut on_device(&own.1, &[0; 8])).unwrap_err();
    assert!(matches!(refused.error, Error::TooSmall { need: 64, have: 8 }) && refused.buffer.is_some());
    let refused = by.download_from(&on_device(&own.1, &[0; 64]), pool.checkout(8).unwrap()).unwrap_err();
    assert!(matches!(refused.error, Error::TooSmall { .. }) && refused.buffer.is_some(), "{}", refused.error);
}

/// Random work of both on two streams sees what came before it in the order of the calls. What cudarc keeps of a slice
/// would not do for that: it makes the events when it allocates and records none, so waiting for these is waiting for
/// nothing; and it keeps the event of the last read alone.
#[test]
fn work_of_both_on_two_streams_is_in_the_order_of_the_calls() {
    beside!(work_of_both_on_two_streams_is_in_the_order_of_the_calls);
    let (len, few) = if doubles::is_set() { (1000, 4000) } else { (16 << 20, 200) };
    let two = &Two::new(4 * len);
    let mut random = Random::new(1);
    // A slice, and the number of the bytes in it. What was read of it, by the pool and by cudarc, with that number.
    let (mut slice, mut holds) = (two.fresh(len), None);
    let mut reads: Vec<(InFlight<PinnedBuf>, _)> = Vec::new();
    let mut copies: Vec<(CudaSlice<u8>, _)> = Vec::new();
    for step in 0..variable("PINPOOL_CUDARC_STEPS", few) as usize {
        let by = if random.one_in(2) { &two.on_owner } else { &two.on_other };
        let is_that = |found: &[u8], held: Option<usize>| held.is_none_or(|seed| *found == *bytes(seed, len));
        let what = random.below(7);
        // What cudarc reads on a second stream meanwhile would have it forget a download (`pinpool::cudarc`).
        if what == 5 || reads.len() + copies.len() > 5 {
            for (read, held) in reads.drain(..) {
                assert!(is_that(&read.wait().unwrap(), held), "read by the pool, {step}");
            }
        }
        if copies.len() > 3 {
            for (copy, held) in copies.drain(..) {
                assert!(is_that(&two.other.clone_dtoh(&copy).unwrap(), held), "by cudarc, {step}");
            }
        }
        match what {
            0 | 1 => {
                drop(by.upload_to(filled(&two.pool, &bytes(step, len)), &mut slice).unwrap());
                holds = Some(step);
            }
            2 => {
                two.owner.memcpy_htod(&bytes(step, len), &mut slice).unwrap();
                holds = Some(step);
            }
            // Also where nothing was written: its bytes are anything, but it must be there.
            3 | 4 => {
                reads.push((by.download_from(&slice, two.pool.checkout(len).unwrap()).unwrap(), holds));
            }
            // (cudarc itself does not wait for a new slice on a second stream.)
            5 if holds.is_some() => {
                // SAFETY: written before it is read.
                let mut copy = unsafe { two.other.alloc::<u8>(len) }.unwrap();
                two.other.memcpy_dtod(&slice, &mut copy).unwrap();
                copies.push((copy, holds));
            }
            6 => {
                // Freed and allocated behind all that: the same memory, as a rule.
                drop(slice);
                (slice, holds) = (two.fresh(len), None);
            }
            _ => {}
        }
    }
}

/// Each call that a copy of another stream's slice makes, failed once: the copy is refused, or works as ever.
#[test]
fn where_a_stream_cannot_be_made_to_wait_the_copy_is_refused() {
    const LEN: usize = 5000;
    const CALLS: [&str; 10] = [
        "cuCtxGetCurrent",
        "cuStreamGetCtx",
        "cuStreamIsCapturing",
        "cuStreamGetId",
        "cuThreadExchangeStreamCaptureMode",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuPointerGetAttributes",
        "cuMemcpyHtoDAsync_v2",
        "cuEventCreate",
    ];
    beside!(where_a_stream_cannot_be_made_to_wait_the_copy_is_refused);
    let Some(d) = StandIn::loaded() else { return };
    let (old, new, mut kept) = (bytes(1, LEN), bytes(2, LEN), None);
    let (mut sent, mut refused) = (0, 0);
    for call in CALLS {
        let met = d.struck();
        let codes = [2, 900, 999].into_iter().flat_map(|code| [(code, false), (code, true)]);
        for (nth, (code, after)) in (1..=12).flat_map(|nth| codes.clone().map(move |code| (nth, code))) {
            let fault = format!("{call} {nth} {code} {after}");
            let creates = call == "cuEventCreate";
            if creates {
                // Events are reused by the same device, so that one makes few. Other calls would fail where
                // an earlier device ends.
                kept = None;
                if after {
                    // Created, and its handle never returned: it stays.
                    continue;
                }
            }
            let two = &*kept.get_or_insert_with(|| Two::new(4 * LEN));
            let Two { context, owner, other, on_owner, on_other, pool } = two;
            let slice = on_device(owner, &old);
            let read = on_owner.download_from(&slice, pool.checkout(LEN).unwrap()).unwrap();
            drop(slice);
            let (mut fresh, buf) = (two.fresh(LEN), filled(pool, &new));
            d.fail(call, nth, code, after);
            let flight = on_other.upload_to(buf, &mut fresh);
            d.calm();
            let _ = context.check_err();
            match flight {
                Ok(flight) => {
                    sent += 1;
                    drop(flight.wait().unwrap());
                    assert!(owner.clone_dtoh(&fresh).unwrap() == new, "{fault}: another's bytes");
                }
                Err(error) => {
                    refused += 1;
                    let may_keep = ["cuMemcpyHtoDAsync_v2", "cuCtxGetCurrent"].contains(&call);
                    assert!(error.buffer.is_some() || may_keep, "{fault}");
                    other.synchronize().unwrap();
                }
            }
            assert!(*read.wait().unwrap() == *old, "{fault}: written before it was read");
        }
        assert!(d.struck() > met, "{call} is not made");
    }
    println!("{} calls failed: {refused} copies refused, {sent} made", d.struck());
    assert!(sent > 0 && refused > 0);
}

/// What cudarc knows of a slice's uses stays as it was where a copy is refused: earlier uses are waited for
/// all the same.
#[test]
fn a_refused_copy_makes_cudarc_forget_nothing() {
    const LEN: usize = 5000;
    beside!(a_refused_copy_makes_cudarc_forget_nothing);
    let Some(d) = StandIn::loaded() else { return };
    let context = CudaContext::new(0).unwrap();
    let [owner, other, third] = [(); 3].map(|()| context.new_stream().unwrap());
    let on_third = adopted(&third).unwrap();
    let pool = pool(on_third.device(), 4 * LEN);
    let (old, new) = (bytes(1, LEN), bytes(2, LEN));
    let (from, mut into) = (on_device(&other, &new), on_device(&other, &new));
    let mut refused = [0; 2];
    for nth in 1..=6 {
        for up in [true, false] {
            let mut slice = on_device(&owner, &old);
            // Used by cudarc on one stream, and not by the crate on another.
            match up {
                true => other.memcpy_dtod(&from, &mut slice).unwrap(),
                false => other.memcpy_dtod(&slice, &mut into).unwrap(),
            }
            let buf = filled(&pool, &old);
            d.fail("cuStreamWaitEvent", nth, 999, false);
            let flight = match up {
                true => on_third.upload_to(buf, &mut slice),
                false => on_third.download_from(&slice, buf),
            };
            d.calm();
            let _ = context.check_err();
            if let Ok(flight) = flight {
                drop(flight.wait().unwrap());
                continue;
            }
            refused[usize::from(up)] += 1;
            if up {
                assert!(owner.clone_dtoh(&slice).unwrap() == new, "the write is not waited for, {nth}");
            } else {
                owner.memcpy_htod(&new, &mut slice).unwrap();
                owner.synchronize().unwrap();
                assert!(other.clone_dtoh(&into).unwrap() == old, "the read is not waited for, {nth}");
            }
        }
    }
    assert!(refused.iter().all(|times| *times > 1), "{refused:?}");
}

/// cudarc's guards wait and record on the stream: what is refused is refused before that. A capture of a
/// stream that has nothing to do with the copy is not spoiled either, also not in global mode.
#[test]
fn a_slice_spoils_no_capture() {
    use cudarc::driver::result;
    use cudarc::driver::sys::CUstreamCaptureMode as Mode;
    beside!(a_slice_spoils_no_capture);
    let Two { context, owner: one, other, on_owner: shared, pool, .. } = &Two::new(1000);
    let (mut slice, neighbour) = (on_device(other, &bytes(1, 1000)), context.new_stream().unwrap());
    let (mut old, mut own) = (bytes(1, 1000), on_device(one, &bytes(3, 1000)));
    for mode in [
        Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ] {
        // The stream that copies; the slice's own, whose events are the capture's from then on; and neither.
        for captured in [one, other, &neighbour] {
            let sent = bytes(2, 1000);
            captured.begin_capture(mode).unwrap();
            if Arc::ptr_eq(captured, &neighbour) {
                // Dropped at once: its memory is used again, and a graph that had the copy would read that.
                drop(shared.upload_to(filled(pool, &sent), &mut slice).unwrap());
                old = sent;
            } else {
                let refused = shared.upload_to(filled(pool, &sent), &mut slice).unwrap_err();
                assert!(matches!(refused.error, Error::Capturing { .. }), "{}", refused.error);
                let refused = shared.download_from(&slice, refused.buffer.unwrap()).unwrap_err();
                assert!(matches!(refused.error, Error::Capturing { .. }), "{}", refused.error);
                assert!(*refused.buffer.unwrap() == *sent);
            }
            if Arc::ptr_eq(captured, one) {
                let refused = shared.upload_to(filled(pool, &[0; 1000]), &mut own).unwrap_err();
                assert!(matches!(refused.error, Error::Capturing { .. }), "{}", refused.error);
            }
            // SAFETY: begun above; no other code has the graph.
            unsafe {
                let graph = result::stream::end_capture(captured.cu_stream()).unwrap();
                result::graph::destroy(graph).unwrap();
            }
            context.check_err().unwrap();
            let landed = shared.download_from(&slice, pool.checkout(1000).unwrap()).unwrap().wait().unwrap();
            assert!(*landed == *old, "{mode:?}");
            // Its event is none of the capture's, so another stream can wait for it.
            assert!(other.clone_dtoh(&own).unwrap() == bytes(3, 1000), "{mode:?}");
        }
    }
}

/// cudarc stores an error and goes on, and orders nothing while one is stored.
#[test]
fn an_error_that_cudarc_has_noted_breaks_no_order() {
    beside!(an_error_that_cudarc_has_noted_breaks_no_order);
    let Two { context, other, on_owner: shared, pool, .. } = &Two::new(1000);
    let filled = || filled(pool, &bytes(2, 1000));
    let mut slice = on_device(other, &bytes(1, 1000));
    let noted = cudarc::driver::DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_FOUND);
    // Before: the stream would not wait for what was done to the slice.
    context.record_err::<()>(Err(noted));
    let refused = shared.upload_to(filled(), &mut slice).unwrap_err();
    assert!(refused.error.to_string().contains("500") && refused.buffer.is_some(), "{}", refused.error);
    context.record_err::<()>(Err(noted));
    let refused = shared.download_from(&slice, refused.buffer.unwrap()).unwrap_err();
    assert!(refused.error.to_string().contains("500") && refused.buffer.is_some(), "{}", refused.error);
    let Some(d) = StandIn::loaded() else { return };
    // After: the slice would not wait for the copy. (The first events are the pool's own, on each stream.)
    d.fail("cuEventRecord", 3, 500, false);
    drop(shared.upload_to(filled(), &mut slice).unwrap());
    assert_eq!(context.check_err().unwrap_err(), noted, "it is noted as ever");
    assert!(other.clone_dtoh(&slice).unwrap() == bytes(2, 1000), "the copy was not waited for");
}

/// A slice of the per-thread default stream does not say of which thread's. Copies on other threads are in
/// order with its uses all the same, and with its end: nothing here waits on the CPU.
#[test]
fn slices_of_per_thread_streams_are_in_order_on_all_threads() {
    const LEN: usize = 70_000;
    beside!(slices_of_per_thread_streams_are_in_order_on_all_threads);
    let context = &CudaContext::new(0).unwrap();
    let device = shared::device(context).unwrap();
    let pool = &pool(&device, 8 * LEN);
    let theirs = context.per_thread_stream();
    // Two threads, which live until the end: see `docs/cuda.md` on threads that end after they have used
    // their own default stream.
    type Slices<T> = (mpsc::Sender<T>, mpsc::Receiver<T>);
    let (to_second, for_second): Slices<(usize, CudaSlice<u8>)> = mpsc::channel();
    let (from_second, back): Slices<CudaSlice<u8>> = mpsc::channel();
    let (to_third, for_third): Slices<CudaSlice<u8>> = mpsc::channel();
    let (from_third, freed): Slices<()> = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            context.bind_to_thread().unwrap();
            for (round, mut slice) in for_second {
                let streams = [context.per_thread_stream(), context.default_stream()];
                let stream = adopted(&streams[round % 2]).unwrap();
                let there = stream.download_from(&slice, pool.checkout(LEN).unwrap()).unwrap();
                drop(stream.upload_to(filled(pool, &bytes(100 + round, LEN)), &mut slice).unwrap());
                assert!(*there.wait().unwrap() == *bytes(round, LEN), "what the other thread has written");
                from_second.send(slice).unwrap();
            }
        });
        scope.spawn(move || {
            context.bind_to_thread().unwrap();
            for slice in for_third {
                drop(slice);
                drop(context.per_thread_stream().clone_htod(&vec![OLD; LEN]).unwrap());
                from_third.send(()).unwrap();
            }
        });
        let stream = adopted(&theirs).unwrap();
        for round in 0..10 {
            to_second.send((round, theirs.clone_htod(&bytes(round, LEN)).unwrap())).unwrap();
            let mut slice = back.recv().unwrap();
            // On this thread's stream, behind the copy of the other thread's.
            assert!(theirs.clone_dtoh(&slice).unwrap() == bytes(100 + round, LEN));
            let third = bytes(200 + round, LEN);
            drop(stream.upload_to(filled(pool, &third), &mut slice).unwrap());
            assert!(theirs.clone_dtoh(&slice).unwrap() == third);
            // Freed on a third thread, while a copy that reads it may be under way.
            let read = stream.download_from(&slice, pool.checkout(LEN).unwrap()).unwrap();
            to_third.send(slice).unwrap();
            freed.recv().unwrap();
            assert!(*read.wait().unwrap() == *third, "read before it was freed and given out again");
        }
        drop((to_second, to_third));
    });
    crate::support::doubles::gpu::all_back(pool);
}

/// Slices that copies use as device memory, of each kind of stream, one thread's own default stream among
/// them.
#[test]
fn slices_are_lent_to_a_copier_and_come_back() {
    const LEN: usize = 70_000;
    beside!(slices_are_lent_to_a_copier_and_come_back);
    let context = CudaContext::new(0).unwrap();
    let device = shared::device(&context).unwrap();
    let pool = pool(&device, LEN);
    let copier = pinpool::Copier::builder(&pool, &device).build().unwrap();
    let work = |stream: Arc<CudaStream>, seed: usize| {
        // Older work of the stream, with memory that the new slices may get.
        drop(on_device(&stream, &vec![OLD; LEN]));
        let take = |n: usize| {
            let slice = stream.clone_htod(&vec![OLD; LEN + n]).unwrap();
            (SharedSlice::new(slice).unwrap(), bytes(seed + n, LEN + n))
        };
        let taken: Vec<_> = (0..5).map(take).collect();
        let pieces: Vec<_> = taken.iter().map(|(slice, sent)| (&sent[..], slice.memory().clone())).collect();
        copier.upload_slices(&pieces).unwrap();
        drop(pieces);
        for (slice, sent) in taken {
            let slice = slice.into_inner().unwrap();
            assert_eq!((slice.len(), slice.stream().cu_stream()), (sent.len(), stream.cu_stream()));
            assert!(stream.clone_dtoh(&slice).unwrap() == sent, "the bytes that the copier has copied");
        }
    };
    work(context.default_stream(), 0);
    let all = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 1..5 {
            let (context, work, all) = (&context, &work, &all);
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                all.wait();
                (0..5).for_each(|round| work(context.per_thread_stream(), 100 * thread + round));
                all.wait();
            });
        }
    });
    work(context.new_stream().unwrap(), 1000);
    // Dropped while a copy is under way, it is freed afterwards.
    let stream = device.stream().unwrap();
    let slice = SharedSlice::new(on_device(&context.default_stream(), &[OLD; 64])).unwrap();
    let buf = filled(&pool, &[7; 64]);
    let flight = stream.upload(buf, slice.memory()).unwrap();
    drop(slice);
    drop(flight.wait().unwrap());
    drop((copier, stream));
    crate::support::doubles::gpu::all_back(&pool);
}

/// A slice of eight times eight bytes that was lent, and a copy to it that does not run yet.
fn lent(stand_in: &StandIn, context: &Arc<CudaContext>) -> (Device, SharedSlice<u8>) {
    let device = shared::device(context).unwrap();
    let lent = SharedSlice::new(on_device(&context.default_stream(), &[OLD; 64])).unwrap();
    stand_in.hang(true);
    let sent = filled(&pool(&device, 64), &[7; 64]);
    drop(device.stream().unwrap().upload(sent, lent.memory()).unwrap());
    (device, lent)
}

/// It comes back when the last copy is complete, and when the last handle is gone, and not before.
#[test]
fn a_slice_comes_back_when_its_last_copy_is_complete() {
    beside!(a_slice_comes_back_when_its_last_copy_is_complete);
    let Some(stand_in) = StandIn::loaded() else { return };
    let context = CudaContext::new(0).unwrap();
    let (_device, lent) = lent(&stand_in, &context);
    let other = lent.memory().slice(8..16).unwrap();
    let back = std::thread::spawn(move || lent.into_inner());
    let waits = |what| {
        std::thread::sleep(Duration::from_millis(200));
        assert!(!back.is_finished(), "{what}");
    };
    waits("the copy has not run");
    stand_in.hang(false);
    waits("there is another handle");
    drop(other);
    let slice = back.join().unwrap().unwrap();
    context.bind_to_thread().unwrap();
    assert!(context.default_stream().clone_dtoh(&slice).unwrap() == [7; 64]);
    // Without bytes there is nothing to copy, and the slice comes back with the error.
    if let Ok(none) = context.default_stream().alloc_zeros::<u8>(0) {
        let refused = SharedSlice::new(none).unwrap_err();
        assert!(refused.error.to_string().contains("nothing to copy") && refused.buffer.is_some());
    }
}

/// It comes back from a lost device, too.
#[test]
fn a_slice_comes_back_from_a_lost_device() {
    // What a lost device leaves behind is checked by the tests of lost devices.
    beside!(a_slice_comes_back_from_a_lost_device, unchecked);
    let Some(stand_in) = StandIn::loaded() else { return };
    let context = CudaContext::new(0).unwrap();
    let late = on_device(&context.default_stream(), &[OLD; 64]);
    let (device, lent) = lent(&stand_in, &context);
    let back = std::thread::spawn(move || lent.into_inner());
    std::thread::sleep(Duration::from_millis(100));
    stand_in.kill(0, 700);
    stand_in.hang(false);
    let _back = back.join().unwrap().unwrap();
    let refused = SharedSlice::new(late).unwrap_err();
    assert!(refused.error.is_device_lost() && refused.buffer.is_some(), "{}", refused.error);
    assert!(device.lost().is_some());
}

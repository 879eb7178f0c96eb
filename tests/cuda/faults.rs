//! Every call that a scenario makes of the driver, made to fail once.
//!
//! It is a server that shares its context, streams and captures with the pool. (What a pool alone calls is in
//! `faults`, on GPUs that are moved by hand.) A run without a fault says which calls there are and how often
//! each is made; then there is one run for each call, each turn of it that is asked for, and each code.
//! Threads make the calls, so how many there are varies with the load of the machine, and a fault that is set
//! for one of the last may find none: that is no failure of the crate's. But each call must have been met at
//! least by the fault for its first turn, else the sweep shows nothing of it.
//!
//! A user whose work ends with an error does it again, on the same device. With one fault in a run, only what
//! is lost fails twice.

#![allow(unsafe_code, reason = "raw handles, and memory by its address")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::ops::Deref;
use std::time::Instant;

use pinpool::{Error, InFlight, Lend, PinnedBuf, Pool, Result, Stream, SubmitError, cuda};
use pinpool_sim::cuda::Driver;

use crate::rig::flag;
use crate::support::doubles::gpu::{Raw, bytes, until};
use crate::support::doubles::{self, HANG, StandIn, on_stand_in};
use crate::support::in_use;

const LEN: usize = 4000;
/// The call, which one of them, the code, and whether it is done all the same.
type Fault<'a> = (&'a str, u64, u32, bool);

/// Does it again after an error.
fn twice<R>(mut work: impl FnMut() -> Result<R>) -> Result<R> {
    work().or_else(|_| work())
}

/// A call of the user's own. Where it fails twice the driver has ended.
fn call(raw: &Raw, name: &str, a: &[usize]) -> Result<()> {
    twice(|| if raw.call(name, a) == 0 { Ok(()) } else { Err(Error::Closed) })
}

fn made(raw: &Raw, name: &str, more: &[usize]) -> Result<usize> {
    let mut word = 0_usize;
    call(raw, name, &[&[(&raw mut word) as usize], more].concat())?;
    Ok(word)
}

/// The error of a refusal, which gives the memory back as it was. (A copy that may have begun keeps its
/// buffer.)
fn refused<T: Deref<Target = [u8]>>(refused: SubmitError<T>, content: &[u8], kept: bool) -> Error {
    let SubmitError { error, buffer } = refused;
    let is_right = buffer.map_or(kept || error.is_device_lost(), |back| *back == *content);
    assert!(is_right, "the memory came back changed, or was kept: {error}");
    error
}

/// What was submitted ends, or is lost with the device: an error that passes ends no wait.
fn ended<B: Lend>(flight: InFlight<B>) -> Result<B> {
    flight.wait_timeout(HANG).map_err(|SubmitError { error, buffer }| {
        assert!(buffer.is_none() && error.is_device_lost(), "a wait ended with {error}");
        error
    })
}

/// Ends the device, or the driver. What a lost device had in flight is leaked, and with it the context: it is
/// never closed.
fn is_final(fault: Option<Fault<'_>>) -> bool {
    fault.is_some_and(|f| [4, 700].contains(&f.2))
}

/// Calls that sharing is about, which the scenario must make.
const OWN: [&str; 9] = [
    "cuCtxGetDevice",
    "cuDevicePrimaryCtxGetState",
    "cuStreamGetCtx",
    "cuStreamGetId",
    "cuStreamIsCapturing",
    "cuStreamGetCaptureInfo_v3",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
];

/// A run on a thread of its own, so that nothing of the driver's state of this thread outlives it.
fn run(stand_in: &StandIn, fault: Option<Fault<'_>>) {
    println!("{fault:?}");
    stand_in.command("reset");
    if let Some((name, nth, code, after)) = fault {
        stand_in.fail(name, nth, code, after);
    }
    let keeps = fault.is_some_and(|f| f.0 == "cuUserObjectRelease");
    let (machine, before) = (stand_in.clone(), doubles::strays().len());
    let user = std::thread::spawn(move || {
        machine.enter();
        share(&Raw(machine), keeps)
    });
    let since = Instant::now();
    while !user.is_finished() {
        // More than a few waits that take as long as they may.
        assert!(since.elapsed() < 5 * HANG, "{fault:?}: it hangs");
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
    let (lost, done) = (is_final(fault), user.join().expect("the user"));
    // What is done again on a lost device says that it is lost. (A server's own call says `Closed`, and
    // without a driver there is no device to open.)
    let is_told =
        |error: &Error| error.is_device_lost() || matches!(error, Error::Closed | Error::Unavailable { .. });
    assert!(done.as_ref().err().is_none_or(|error| lost && is_told(error)), "{fault:?}: {done:?}");
    let report = if lost { stand_in.report() } else { stand_in.report_of_end() };
    assert!(lost || keeps || report.over, "{fault:?}: the device is never closed: {report:?}");
    assert_eq!(report.violations, Vec::<String>::new(), "{fault:?}");
    // The failing call was to give this back itself, or to set the thread up for that.
    let may_leak = match fault.map_or("", |f| f.0) {
        // No call may touch what a lost device had.
        _ if lost => "contexts streams events allocations hosts registrations graphs objects",
        name if name.starts_with("cuCtx") => "streams events allocations hosts registrations",
        "cuUserObjectRelease" => "contexts streams events allocations registrations objects",
        "cuMemFree_v2" => "allocations hosts",
        "cuMemFreeHost" => "hosts",
        "cuMemHostUnregister" => "registrations",
        "cuStreamDestroy_v2" => "streams",
        "cuEventDestroy_v2" => "events",
        "cuDevicePrimaryCtxRelease_v2" => "contexts",
        _ => "",
    };
    let leaks = report.leaks.iter().filter(|leak| !may_leak.contains(leak.split(' ').next().unwrap()));
    assert_eq!(leaks.collect::<Vec<_>>(), Vec::<&String>::new(), "{fault:?}");
    let strays = doubles::strays().split_off(before);
    assert!(strays.is_empty(), "{fault:?}: broken in no machine, or by another test: {strays:?}");
}

/// Which ones of a call that is made that often are to fail.
fn turns(name: &str, count: u64) -> BTreeSet<u64> {
    let few = if OWN.contains(&name) { count.min(5) } else { 1 };
    (1..=few).chain([count / 2]).filter(|nth| (1..=count).contains(nth)).collect()
}

/// With which codes, and whether the call is done all the same.
fn codes(name: &str, nth: u64, count: u64) -> Vec<(u32, bool)> {
    const QUEUES: [&str; 4] = ["cuMemcpy", "cuEventRecord", "cuStreamWaitEvent", "cuGraphRetain"];
    let codes: &[u32] = if OWN.contains(&name) { &[1, 2, 900, 999] } else { &[1, 2, 999] };
    let mut all: Vec<(u32, bool)> = codes.iter().map(|code| (*code, false)).collect();
    if QUEUES.iter().any(|queues| name.starts_with(queues)) {
        all.extend(codes.iter().map(|code| (*code, true)));
    }
    if nth == 1 || OWN.contains(&name) && nth == count / 2 {
        all.extend([(700, false), (4, false)]);
    }
    all
}

#[test]
fn every_call_of_sharing_fails_once() {
    on_stand_in(|stand_in| {
        run(stand_in, None);
        let clean = stand_in.report();
        assert_eq!(clean.leaks, Vec::<String>::new(), "without any fault");
        let calls: BTreeMap<_, _> = clean.calls.into_iter().collect();
        assert!(calls.len() >= 25, "few calls are made: {calls:?}");
        for name in OWN {
            assert!(calls.contains_key(name), "the scenario does not call {name}");
        }
        let (mut runs, mut struck) = (0, 0);
        for (name, &count) in &calls {
            for nth in turns(name, count) {
                for (code, after) in codes(name, nth, count) {
                    let fault = Some((name.as_str(), nth, code, after));
                    // What is lost or kept for ever stays on a machine of its own.
                    let leaves = is_final(fault) || name == "cuUserObjectRelease";
                    let fresh = leaves.then(|| StandIn::gpus(Driver::Cuda12_8));
                    let machine = fresh.as_ref().unwrap_or(stand_in);
                    run(machine, fault);
                    (runs, struck) = (runs + 1, struck + machine.struck());
                    // The last calls of a lost device may come when the run is over.
                    assert!(nth > 1 || machine.struck() > 0 || is_final(fault), "{fault:?} was never met");
                }
            }
        }
        println!("{runs} runs, {struck} calls made to fail");
    });
}

/// Calls of the server's own may be the ones that fail, and are then made again.
fn share(raw: &Raw, keeps: bool) -> Result<()> {
    call(raw, "cuInit", &[0])?;
    let context = made(raw, "cuCtxCreate_v2", &[0, 0])?;
    let theirs = made(raw, "cuStreamCreate", &[1])?;
    let (device, gone) = twice(|| {
        let (keeper, gone) = flag();
        // SAFETY: destroyed when the keeper is dropped.
        Ok((unsafe { cuda::adopt_context(context as *mut c_void, keeper) }?, gone))
    })?;
    twice(|| {
        let pool = Pool::builder(&device).capacity(256 << 10).build()?;
        // SAFETY: destroyed when all work is complete; the thread's own default stream lives as long as the
        // thread.
        let adopt = |stream| unsafe { cuda::adopt_stream(&device, stream as *mut c_void, ()) };
        let (adopted, own, confined) = (adopt(theirs)?, device.stream()?, adopt(2)?);
        use_stream(&pool, &adopted, &own)?;
        use_graph(raw, &pool, &adopted)?;
        use_graph(raw, &pool, &own)?;
        use_stream(&pool, &own, &adopted)?;
        use_stream(&pool, &confined, &own)?;
        use_stream(&pool, &adopted, &confined)?;
        until("all comes back", || in_use(&pool) == 0 || keeps || device.lost().is_some());
        pool.check().unwrap();
        device.lost().map_or(Ok(()), Err)
    })?;
    drop(device);
    until("the context is let go of", || gone() || keeps);
    call(raw, "cuStreamDestroy_v2", &[theirs])?;
    if gone() { call(raw, "cuCtxDestroy_v2", &[context]) } else { Ok(()) }
}

fn filled(pool: &Pool, seed: usize) -> Result<PinnedBuf> {
    let mut buf = pool.checkout_timeout(LEN, HANG)?;
    buf.extend_from_slice(&bytes(seed, LEN));
    Ok(buf)
}

/// Copies, holds and orders on a stream that others can reach.
fn use_stream(pool: &Pool, stream: &Stream, other: &Stream) -> Result<()> {
    let (memory, sent) = (stream.device().alloc(LEN)?, bytes(1, LEN));
    for _ in 0..3 {
        drop(stream.upload(filled(pool, 1)?, &memory).map_err(|error| refused(error, &sent, true))?);
    }
    let held = stream.hold(filled(pool, 2)?).map_err(|error| refused(error, &bytes(2, LEN), true))?;
    assert!(*ended(held)? == *bytes(2, LEN));
    other.wait_for(stream)?;
    let back =
        other.download(&memory, filled(pool, 3)?).map_err(|error| refused(error, &bytes(3, LEN), true))?;
    assert!(*ended(back)? == *sent, "wrong bytes, reported as done");
    stream.synchronize()
}

/// What is begun is ended in any case.
fn use_graph(raw: &Raw, pool: &Pool, stream: &Stream) -> Result<()> {
    let memory = stream.device().alloc(LEN)?;
    let handle = cuda::raw_stream(stream)? as usize;
    call(raw, "cuStreamBeginCapture_v2", &[handle, 1])?;
    let waited = stream.synchronize();
    assert!(waited.is_err(), "waited for a capturing stream");
    // The server's own copy, out of a buffer that the graph keeps.
    let kept = twice(|| {
        let buf = filled(pool, 5)?;
        let from = buf.as_ptr() as usize;
        stream.hold_captured(buf).map_err(|error| refused(error, &bytes(5, LEN), false))?;
        call(raw, "cuMemcpyHtoDAsync_v2", &[memory.address() as usize, from, LEN, handle])
    });
    let mut graph = 0_usize;
    call(raw, "cuStreamEndCapture", &[handle, (&raw mut graph) as usize])?;
    kept?;
    let executable = made(raw, "cuGraphInstantiateWithFlags", &[graph, 0])?;
    call(raw, "cuGraphDestroy", &[graph])?;
    for _ in 0..2 {
        call(raw, "cuGraphLaunch", &[executable, handle])?;
        twice(|| stream.synchronize())?;
    }
    let back = twice(|| ended(stream.download(&memory, filled(pool, 6)?)?))?;
    assert!(*back == *bytes(5, LEN), "wrong bytes after a launch");
    call(raw, "cuGraphExecDestroy", &[executable])
}

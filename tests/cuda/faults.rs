//! Every call that a scenario makes of the driver, made to fail once.
//!
//! There are two scenarios: a user of every kind of host memory, and a server that shares its context, streams and
//! captures with the pool. (What a pool alone calls is in `faults`, on GPUs that are moved by hand.) A run without a fault says which calls there are and how often each is
//! made; then there is one run for each call, each turn of it that is asked for, and each code. Threads make the calls,
//! so how many there are varies with the load of the machine, and a fault that is set for one of the last may find
//! none: that is no failure of the crate's. But each call must have been met at least by the fault for its first turn,
//! else the sweep shows nothing of it.
//!
//! A user tries each thing twice and never believes an error. With one fault in a run, only a lost device fails twice.

#![allow(unsafe_code, reason = "raw handles, and memory by its address")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Deref;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use pinpool::{
    Backing, Device, DeviceSlice, Error, HostAllocFlags, InFlight, Lend, PinnedBuf, Pool, PoolBuilder,
    Registered, Result, Stream, SubmitError, cuda,
};
use pinpool_sim::cuda::Driver;

use crate::rig::flag;
use crate::support::doubles::gpu::{Raw, bytes};
use crate::support::doubles::{self, HANG, StandIn, gpu_name, on_stand_in};

const LEN: usize = 4000;
const PAGE: usize = 64 << 10;

/// The call, which one of them, the code, and whether it is done all the same.
type Fault<'a> = (&'a str, u64, u32, bool);

/// A user of the crate: what went wrong, and whether the device was lost.
#[derive(Default)]
struct User {
    wrong: Vec<String>,
    dead: bool,
    /// A reference to a user object cannot be given back: then the object stays, with what it keeps.
    keeps_objects: bool,
}

impl User {
    fn wrong(&mut self, text: impl Into<String>) {
        self.wrong.push(text.into());
    }

    fn again<R>(&mut self, what: &str, mut call: impl FnMut() -> Result<R>) -> Option<R> {
        let mut last = None;
        for _ in 0..2 {
            match call() {
                Ok(value) => return Some(value),
                Err(error) if error.is_device_lost() => {
                    self.dead = true;
                    return None;
                }
                Err(error) => last = Some(error),
            }
        }
        self.wrong(format!("{what} failed twice: {last:?}"));
        None
    }

    /// The same for a call whose error gives the memory back, as it was.
    fn again_with<T: Deref<Target = [u8]>, R>(
        &mut self,
        what: &str,
        memory: T,
        mut call: impl FnMut(T) -> Result<R, SubmitError<T>>,
    ) -> Option<R> {
        let (at, content) = (memory.as_ptr(), memory.to_vec());
        let mut memory = Some(memory);
        for _ in 0..2 {
            let refused = match call(memory.take()?) {
                Ok(value) => return Some(value),
                Err(refused) => refused,
            };
            self.dead |= refused.error.is_device_lost();
            // After an error from rolling back it would be leaked; but here one call fails at a time.
            match refused.buffer {
                Some(back) if back.as_ptr() != at || *back != *content => {
                    self.wrong(format!("{what}: the memory came back changed"));
                    return None;
                }
                None if !self.dead => {
                    self.wrong(format!("{what}: the memory was kept: {}", refused.error));
                    return None;
                }
                buffer => memory = buffer,
            }
        }
        if !self.dead {
            self.wrong(format!("{what} failed twice"));
        }
        None
    }

    /// The same with a buffer of a pool. The bytes are those of the seed each time, so that it makes no difference
    /// whether a refused copy ran.
    fn submit<R>(
        &mut self,
        pool: &Pool,
        seed: usize,
        mut call: impl FnMut(PinnedBuf) -> Result<R, SubmitError<PinnedBuf>>,
    ) -> Option<R> {
        for _ in 0..2 {
            let mut buf = self.again("checkout", || pool.checkout_timeout(LEN, HANG))?;
            buf.extend_from_slice(&bytes(seed, LEN));
            match call(buf) {
                Ok(value) => return Some(value),
                Err(SubmitError { error, .. }) if error.is_device_lost() => {
                    self.dead = true;
                    return None;
                }
                Err(SubmitError { buffer: Some(buf), .. }) if *buf != *bytes(seed, LEN) => {
                    self.wrong("a buffer that came back was changed");
                }
                Err(_) => {}
            }
        }
        self.wrong("a submit failed twice");
        None
    }

    /// What was submitted ends, or the device is lost.
    fn finish<B: Lend>(&mut self, flight: InFlight<B>) -> Option<B> {
        match flight.wait_timeout(HANG) {
            Ok(buf) => Some(buf),
            Err(SubmitError { error, buffer }) => {
                self.dead |= error.is_device_lost();
                if buffer.is_some() || !error.is_device_lost() {
                    self.wrong(format!("a wait ended with {error}"));
                }
                None
            }
        }
    }

    /// The result of a submission: the value, or nothing where it failed.
    fn outcome<B: Lend, L>(&mut self, sent: Result<InFlight<B>, SubmitError<L>>) -> Option<Option<B>> {
        match sent {
            Ok(flight) => self.finish(flight).map(Some),
            Err(refused) => {
                self.dead |= refused.error.is_device_lost();
                (!self.dead).then_some(None)
            }
        }
    }

    /// A buffer without waiting for other buffers, since this test has them all: it is only there to make the pool grow.
    fn grown(&mut self, pool: &Pool, len: usize) -> Option<PinnedBuf> {
        for _ in 0..4 {
            match pool.try_checkout(len) {
                Ok(buf) => return Some(buf),
                Err(Error::Exhausted(_)) => {}
                Err(error) => self.wrong(format!("growing: {error}")),
            }
            let pinning = self.again("wait_pinned", || pool.wait_pinned(Some(HANG)))?;
            if pinning.error.is_some_and(|e| e.is_device_lost()) {
                self.dead = true;
                return None;
            }
        }
        self.wrong("the pool does not grow");
        None
    }

    /// A call of the user's own.
    fn raw(&mut self, raw: &Raw, name: &str, a: &[usize]) -> Option<()> {
        for _ in 0..2 {
            match raw.call(name, a) {
                0 => return Some(()),
                4 | 700 | 709 => {
                    self.dead = true;
                    return None;
                }
                _ => {}
            }
        }
        self.wrong(format!("{name} failed twice"));
        None
    }

    fn made(&mut self, raw: &Raw, name: &str, more: &[usize]) -> Option<usize> {
        let mut word = 0_usize;
        let mut all = vec![(&raw mut word) as usize];
        all.extend(more);
        self.raw(raw, name, &all)?;
        Some(word)
    }

    /// After a run: what is wrong, by what the user saw and by the report of the machine.
    fn judged(mut self, stand_in: &StandIn, fault: Option<Fault<'_>>) -> Vec<String> {
        let lost = is_final(fault);
        let report = if lost { stand_in.report() } else { stand_in.report_of_end() };
        if !report.over && !lost {
            self.wrong("the device is never closed");
        }
        self.wrong.extend(report.violations.iter().map(|violation| format!("broke {violation}")));
        if lost {
            // After the end of the driver nothing can be opened, and the error says that there is no device.
            self.wrong.retain(|w| !w.starts_with("open failed") && !w.starts_with("adopt_context failed"));
        }
        // The failing call was to give this back itself, or to set the thread up for that.
        let may_leak = match fault.map_or("", |f| f.0) {
            // No call may touch what a lost device had.
            _ if lost => "contexts streams events allocations hosts registrations graphs objects",
            name if name.starts_with("cuCtx") => "streams events allocations hosts registrations",
            "cuUserObjectRelease" => "streams events allocations registrations objects",
            "cuMemFree_v2" => "allocations hosts",
            "cuMemFreeHost" => "hosts",
            "cuMemHostUnregister" => "registrations",
            "cuStreamDestroy_v2" => "streams",
            "cuEventDestroy_v2" => "events",
            "cuDevicePrimaryCtxRelease_v2" => "contexts",
            _ => "",
        };
        for leak in &report.leaks {
            if !leak.split(' ').next().is_some_and(|what| may_leak.contains(what)) {
                self.wrong(format!("leaked {leak}"));
            }
        }
        if self.dead && !lost {
            self.wrong("the device was lost by an error that is not sticky");
        }
        self.wrong
    }
}

/// Whether it ends the device, or the driver. What a lost device had in flight is leaked, and with it the context: it
/// is never closed.
fn is_final(fault: Option<Fault<'_>>) -> bool {
    fault.is_some_and(|f| [4, 700].contains(&f.2))
}

// --- the sweep -------------------------------------------------------------------------------------------------------

struct Sweep {
    scenario: fn(&mut User, &Raw) -> Option<()>,
    /// Calls that the scenario is about, which it must make.
    own: &'static [&'static str],
    /// Whether each turn of these fails, and of others a few with a few codes.
    each_turn: bool,
}

impl Sweep {
    /// A run on a thread of its own, so that nothing of the driver's state of this thread outlives it.
    fn run(&self, stand_in: &StandIn, fault: Option<Fault<'_>>) -> Vec<String> {
        stand_in.reset();
        if let Some((name, nth, code, after)) = fault {
            stand_in.fail(name, nth, code, after);
        }
        let keeps_objects = fault.is_some_and(|f| f.0 == "cuUserObjectRelease");
        let (machine, scenario) = (stand_in.clone(), self.scenario);
        let before = doubles::strays().len();
        let (say, used) = mpsc::channel();
        std::thread::spawn(move || {
            machine.enter();
            let mut user = User { keeps_objects, ..User::default() };
            scenario(&mut user, &Raw(machine));
            // A run that took too long is not listened to.
            let _ = say.send(user);
        });
        // More than a few waits that take as long as they may.
        let mut wrong = match used.recv_timeout(5 * HANG) {
            Ok(user) => user.judged(stand_in, fault),
            Err(RecvTimeoutError::Disconnected) => vec!["it panicked".into()],
            Err(RecvTimeoutError::Timeout) => panic!("{fault:?}: it hangs"),
        };
        let strays = doubles::strays().split_off(before);
        wrong.extend(strays.iter().map(|stray| format!("broke in no machine, or another test did: {stray}")));
        wrong
    }

    /// Which ones of a call that is made that often are to fail.
    fn turns(&self, name: &str, count: u64) -> Vec<u64> {
        let own = self.own.contains(&name);
        let mut turns = match self.each_turn {
            true if own => (1..=count).collect(),
            true => vec![1, count / 2, count],
            false => vec![1, 2, if own { 3 } else { 2 }, count / 2, count],
        };
        turns.retain(|nth| (1..=count).contains(nth));
        turns.sort_unstable();
        turns.dedup();
        turns
    }

    /// With which codes, and whether the call is done all the same.
    fn codes(&self, name: &str, nth: u64, count: u64) -> Vec<(u32, bool)> {
        const QUEUES: [&str; 4] = ["cuMemcpy", "cuEventRecord", "cuStreamWaitEvent", "cuGraphRetain"];
        let own = self.own.contains(&name);
        let queues = !self.each_turn && QUEUES.iter().any(|queues| name.starts_with(queues));
        let codes: &[u32] = match self.each_turn {
            true if own => &[1, 2, 801, 900, 999],
            true => &[1, 2],
            false => &[1, 2, 900, 999],
        };
        let mut all: Vec<(u32, bool)> = codes.iter().map(|code| (*code, false)).collect();
        all.extend(codes.iter().filter(|_| queues).map(|code| (*code, true)));
        if (own || !self.each_turn) && [1, 2, count / 2, count].contains(&nth) {
            all.extend([(700, false), (4, false)]);
        }
        all
    }

    fn all(&self) {
        on_stand_in(|stand_in| self.all_on(stand_in));
    }

    fn all_on(&self, stand_in: &StandIn) {
        assert_eq!(self.run(stand_in, None), Vec::<String>::new(), "without any fault");
        let clean = stand_in.report();
        assert_eq!(clean.leaks, Vec::<String>::new(), "without any fault");
        let calls: BTreeMap<_, _> = clean.calls.into_iter().collect();
        assert!(calls.len() >= 25, "few calls are made: {calls:?}");
        for name in self.own {
            assert!(calls.contains_key(*name), "the scenario does not call {name}");
        }
        let (mut runs, mut struck, mut failures, mut missed) = (0, 0, Vec::new(), Vec::new());
        for (name, &count) in &calls {
            for nth in self.turns(name, count) {
                for (code, after) in self.codes(name, nth, count) {
                    let fault = (name.as_str(), nth, code, after);
                    // What is lost or kept for ever stays on a machine of its own.
                    let leaves = is_final(Some(fault)) || name == "cuUserObjectRelease";
                    let fresh = leaves.then(|| StandIn::gpus(Driver::Cuda12_8));
                    let machine = fresh.as_ref().unwrap_or(stand_in);
                    let wrong = self.run(machine, Some(fault));
                    let met = machine.struck();
                    (runs, struck) = (runs + 1, struck + met);
                    // The last calls of a lost device may come when the run is over.
                    if nth == 1 && met == 0 && !is_final(Some(fault)) {
                        missed.push(format!("{fault:?}"));
                    }
                    failures.extend(wrong.iter().map(|wrong| format!("{fault:?}: {wrong}")));
                    assert!(failures.len() < 20, "{failures:#?}");
                }
            }
        }
        println!("{runs} runs, {struck} calls made to fail");
        assert!(failures.is_empty(), "{failures:#?}");
        assert!(missed.is_empty(), "made, and never made to fail: {missed:#?}");
    }
}

#[test]
fn every_call_of_host_memory_fails_once() {
    const OWN: [&str; 10] = [
        "cuCtxGetLimit",
        "cuCtxSetLimit",
        "cuDeviceGetAttribute",
        "cuMemAllocManaged",
        "cuMemFreeHost",
        "cuMemFree_v2",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer_v2",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
    ];
    Sweep { scenario: host_memory, own: &OWN, each_turn: true }.all();
}

#[test]
fn every_call_of_sharing_fails_once() {
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
    Sweep { scenario: share, own: &OWN, each_turn: false }.all();
}

fn small(device: &Device) -> PoolBuilder {
    Pool::builder(device).capacity(8 * PAGE).initial(4 * PAGE).region(4 * PAGE).extent(2 * PAGE)
}

// --- host memory -----------------------------------------------------------------------------------------------------

/// Pools of every backing, adopted and registered memory.
fn host_memory(u: &mut User, _: &Raw) -> Option<()> {
    let device = u.again("open", || Device::open(&gpu_name(0)))?;
    let stream = u.again("stream", || device.stream())?;
    let memory = u.again("alloc", || device.alloc(LEN))?;
    let limit = u.again("heap limit", || cuda::device_heap_limit(&device))?;
    u.again("set heap limit", || cuda::set_device_heap_limit(&device, limit))?;
    let flags = HostAllocFlags { portable: true, mapped: true, write_combined: true };
    for backing in [Backing::HostAlloc(flags), Backing::Managed, Backing::Registered] {
        let pool = u.again("build", || small(&device).backing(backing).build())?;
        // A checkout asks again for memory that failed to be pinned.
        let mut bufs = Vec::new();
        for i in 0..2 {
            let mut buf = u.grown(&pool, 2 * PAGE - 4096)?;
            buf.extend_from_slice(&bytes(i, LEN));
            bufs.push(buf);
        }
        for buf in &bufs {
            u.again("device_address", || buf.device_address(&device))?;
        }
        for buf in bufs {
            u.outcome(stream.upload(buf, &memory))?;
        }
        pool.trim(0);
        let mut map = MmapMut::map_anon(4 * PAGE).ok()?;
        map.fill(5);
        if pool.stats().pinned_bytes + pool.stats().unpinned_bytes == 0 {
            u.again_with("adopt", map, |m| pool.adopt(m))?;
        }
        drop(u.again("checkout", || pool.checkout_timeout(LEN, HANG))?);
        if let Err(error) = pool.check() {
            u.wrong(error);
        }
        pool.trim(0);
    }
    registered(u, &device, &stream, &memory)
}

/// There and back by way of registered values.
fn registered(u: &mut User, device: &Device, stream: &Stream, memory: &DeviceSlice) -> Option<()> {
    for round in 0..2 {
        let content = bytes(round, LEN);
        let value = u.again_with("register", content.clone(), |v| device.register(v))?;
        let value = u.outcome(stream.upload(value, memory))?;
        let sent = value.is_some();
        let mut target = u.again_with("register", vec![0_u8; LEN], |v| device.register(v))?;
        if round == 1 {
            drop(value);
        } else if value.map(Registered::into_inner).is_some_and(|v| v.is_ok_and(|v| v != content)) {
            u.wrong("a value came back changed");
        }
        target[0] = 1;
        if let Some(back) = u.outcome(stream.download(memory, target))? {
            if sent && *back != *content {
                u.wrong("wrong bytes, reported as done");
            }
            u.again("device_address", || back.device_address(device))?;
        }
    }
    let read = u.again_with("register_read_only", bytes(9, LEN), |v| device.register_read_only(v))?;
    u.outcome(stream.hold(read)).map(drop)
}

// --- sharing ---------------------------------------------------------------------------------------------------------

/// Calls of the server's own may be the ones that fail, and are then made again.
fn share(u: &mut User, raw: &Raw) -> Option<()> {
    u.raw(raw, "cuInit", &[0])?;
    let context = u.made(raw, "cuCtxCreate_v2", &[0, 0])?;
    let theirs = u.made(raw, "cuStreamCreate", &[1])?;
    let mut keeper = None;
    let device = u.again("adopt_context", || {
        let (flag, gone) = flag();
        keeper = Some(gone);
        // SAFETY: destroyed when the keeper is dropped.
        unsafe { cuda::adopt_context(context as *mut c_void, flag) }
    })?;
    let gone = keeper.expect("it is adopted");
    let pool = u.again("build", || Pool::builder(&device).capacity(256 << 10).build())?;
    // SAFETY: destroyed when all work is complete; the thread's own default stream lives as long as the thread.
    let adopt = |stream| unsafe { cuda::adopt_stream(&device, stream as *mut c_void, ()) };
    let adopted = u.again("adopt_stream", || adopt(theirs))?;
    let own = u.again("stream", || device.stream())?;
    use_stream(u, &pool, &device, &adopted, &own)?;
    use_graph(u, raw, &pool, &device, &adopted)?;
    use_graph(u, raw, &pool, &device, &own)?;
    use_stream(u, &pool, &device, &own, &adopted)?;
    let confined = u.again("adopt_stream", || adopt(2))?;
    use_stream(u, &pool, &device, &confined, &own)?;
    use_stream(u, &pool, &device, &adopted, &confined)?;
    let since = Instant::now();
    let waits = |u: &User| !u.keeps_objects && device.lost().is_none() && since.elapsed() < HANG;
    while crate::support::in_use(&pool) > 0 && waits(u) {
        std::thread::sleep(Duration::from_millis(1));
    }
    u.dead |= device.lost().is_some();
    if crate::support::in_use(&pool) > 0 && !u.dead && !u.keeps_objects {
        u.wrong(format!("never comes back: {:?}", pool.stats()));
    }
    if let Err(error) = pool.check() {
        u.wrong(error);
    }
    drop((pool, adopted, own, confined, device));
    while !gone() && !u.dead && !u.keeps_objects {
        if since.elapsed() > HANG {
            u.wrong("the context is kept for ever");
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    u.raw(raw, "cuStreamDestroy_v2", &[theirs])?;
    if gone() {
        u.raw(raw, "cuCtxDestroy_v2", &[context])?;
    }
    Some(())
}

/// Copies, holds and orders on a stream that others can reach.
fn use_stream(u: &mut User, pool: &Pool, device: &Device, stream: &Stream, other: &Stream) -> Option<()> {
    let memory = u.again("alloc", || device.alloc(LEN))?;
    for _ in 0..3 {
        drop(u.submit(pool, 1, |buf| stream.upload(buf, &memory))?);
    }
    let held = u.submit(pool, 2, |buf| stream.hold(buf))?;
    drop(u.finish(held)?);
    u.again("wait_for", || other.wait_for(stream))?;
    let flight = u.submit(pool, 3, |buf| other.download(&memory, buf))?;
    if *u.finish(flight)? != *bytes(1, LEN) {
        u.wrong("wrong bytes, reported as done");
    }
    u.again("synchronize", || stream.synchronize())
}

fn use_graph(u: &mut User, raw: &Raw, pool: &Pool, device: &Device, stream: &Stream) -> Option<()> {
    let memory = u.again("alloc", || device.alloc(LEN))?;
    let handle = u.again("raw_stream", || cuda::raw_stream(stream))? as usize;
    u.raw(raw, "cuStreamBeginCapture_v2", &[handle, 1])?;
    let refused = stream.synchronize();
    u.dead |= refused.as_ref().is_err_and(Error::is_device_lost);
    if refused.is_ok() {
        u.wrong("waited for a capturing stream");
    }
    // The server's own copy, out of a buffer that the graph keeps.
    let mut from = 0;
    u.submit(pool, 5, |buf| {
        from = buf.as_ptr() as usize;
        stream.hold_captured(buf)
    })?;
    u.raw(raw, "cuMemcpyHtoDAsync_v2", &[memory.address() as usize, from, LEN, handle])?;
    let mut graph = 0_usize;
    u.raw(raw, "cuStreamEndCapture", &[handle, (&raw mut graph) as usize])?;
    let executable = u.made(raw, "cuGraphInstantiateWithFlags", &[graph, 0])?;
    u.raw(raw, "cuGraphDestroy", &[graph])?;
    for _ in 0..2 {
        u.raw(raw, "cuGraphLaunch", &[executable, handle])?;
        u.again("synchronize", || stream.synchronize())?;
    }
    let flight = u.submit(pool, 6, |buf| stream.download(&memory, buf))?;
    if *u.finish(flight)? != *bytes(5, LEN) {
        u.wrong("wrong bytes after a launch");
    }
    u.raw(raw, "cuGraphExecDestroy", &[executable])
}

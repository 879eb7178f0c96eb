//! A server that shares its context, streams and captures with the pool, and every driver call failing once meanwhile.
//!
//! The scenario of `driver.rs` has the calls that any user of a GPU makes; here are those that sharing adds. Each run
//! is on a stand-in as just loaded; calls of the server's own may be the ones that fail, and are then made again.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pinpool::{Device, Error, InFlight, Lend, PinnedBuf, Pool, Result, Stream, SubmitError, cuda};

use crate::support::doubles::faults::{self, Fault, Findings};
use crate::support::doubles::gpu::{Raw, bytes};
use crate::support::doubles::{self, HANG, Report, StandIn};

const LEN: usize = 4000;

/// What happened, and what should not have.
#[derive(Default)]
struct Server {
    found: Findings,
    /// A reference to a user object cannot be given back: then the object stays, with what it keeps.
    may_leak: bool,
}

impl Deref for Server {
    type Target = Findings;
    fn deref(&self) -> &Findings {
        &self.found
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Findings {
        &mut self.found
    }
}

struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Server {
    /// The same for what takes a buffer: one that comes back is unharmed, one that does not is replaced.
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

    /// A call of the server's own.
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

    /// Copies, holds and orders on a stream that others can reach.
    fn use_stream(&mut self, pool: &Pool, device: &Device, stream: &Stream, other: &Stream) -> Option<()> {
        let memory = self.again("alloc", || device.alloc(LEN))?;
        for _ in 0..3 {
            drop(self.submit(pool, 1, |buf| stream.upload(buf, &memory))?);
        }
        let held = self.submit(pool, 2, |buf| stream.hold(buf))?;
        drop(self.finish(held)?);
        self.again("wait_for", || other.wait_for(stream))?;
        let flight = self.submit(pool, 3, |buf| other.download(&memory, buf))?;
        if *self.finish(flight)? != *bytes(1, LEN) {
            self.wrong("wrong bytes, reported as done");
        }
        self.again("synchronize", || stream.synchronize())
    }

    fn use_graph(&mut self, raw: &Raw, pool: &Pool, device: &Device, stream: &Stream) -> Option<()> {
        let memory = self.again("alloc", || device.alloc(LEN))?;
        let handle = self.again("raw_stream", || cuda::raw_stream(stream))? as usize;
        self.raw(raw, "cuStreamBeginCapture_v2", &[handle, 1])?;
        let refused = stream.synchronize();
        self.dead |= refused.as_ref().is_err_and(Error::is_device_lost);
        if refused.is_ok() {
            self.wrong("waited for a capturing stream");
        }
        // The server's own copy, out of a buffer that the graph keeps.
        let mut from = 0;
        self.submit(pool, 5, |buf| {
            from = buf.as_ptr() as usize;
            stream.hold_captured(buf)
        })?;
        self.raw(raw, "cuMemcpyHtoDAsync_v2", &[memory.address() as usize, from, LEN, handle])?;
        let mut graph = 0_usize;
        self.raw(raw, "cuStreamEndCapture", &[handle, (&raw mut graph) as usize])?;
        let executable = self.made(raw, "cuGraphInstantiateWithFlags", &[graph, 0])?;
        self.raw(raw, "cuGraphDestroy", &[graph])?;
        for _ in 0..2 {
            self.raw(raw, "cuGraphLaunch", &[executable, handle])?;
            self.again("synchronize", || stream.synchronize())?;
        }
        let flight = self.submit(pool, 6, |buf| stream.download(&memory, buf))?;
        if *self.finish(flight)? != *bytes(5, LEN) {
            self.wrong("wrong bytes after a launch");
        }
        self.raw(raw, "cuGraphExecDestroy", &[executable])
    }

    fn serve(&mut self, raw: &Raw) -> Option<()> {
        self.raw(raw, "cuInit", &[0])?;
        let context = self.made(raw, "cuCtxCreate_v2", &[0, 0])?;
        let theirs = self.made(raw, "cuStreamCreate", &[1])?;
        let gone = Arc::new(AtomicBool::new(false));
        // SAFETY: destroyed when the keeper is dropped.
        let device = self.again("adopt_context", || unsafe {
            cuda::adopt_context(context as *mut c_void, Flag(gone.clone()))
        })?;
        gone.store(false, Ordering::SeqCst);
        let pool = self.again("build", || Pool::builder(&device).capacity(256 << 10).build())?;
        // SAFETY: destroyed when all work is complete.
        let adopted =
            self.again("adopt_stream", || unsafe { cuda::adopt_stream(&device, theirs as *mut c_void, ()) })?;
        let own = self.again("stream", || device.stream())?;
        self.use_stream(&pool, &device, &adopted, &own)?;
        self.use_graph(raw, &pool, &device, &adopted)?;
        self.use_graph(raw, &pool, &device, &own)?;
        self.use_stream(&pool, &device, &own, &adopted)?;
        // SAFETY: this thread's own default stream, which lives as long as the thread.
        let confined =
            self.again("adopt_stream", || unsafe { cuda::adopt_stream(&device, 2 as *mut c_void, ()) })?;
        self.use_stream(&pool, &device, &confined, &own)?;
        self.use_stream(&pool, &device, &adopted, &confined)?;
        let left = || {
            let stats = pool.stats();
            stats.in_flight_bytes + stats.checked_out_bytes
        };
        let since = std::time::Instant::now();
        while left() > 0 && !self.may_leak && device.lost().is_none() && since.elapsed() < HANG {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self.dead |= device.lost().is_some();
        if left() > 0 && !self.dead && !self.may_leak {
            self.wrong(format!("never comes back: {:?}", pool.stats()));
        }
        if let Err(error) = pool.check() {
            self.wrong(error);
        }
        drop((pool, adopted, own, confined, device));
        while !gone.load(Ordering::SeqCst) && !self.dead && !self.may_leak {
            if since.elapsed() > HANG {
                self.wrong("the context is kept for ever");
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self.raw(raw, "cuStreamDestroy_v2", &[theirs])?;
        if gone.load(Ordering::SeqCst) {
            self.raw(raw, "cuCtxDestroy_v2", &[context])?;
        }
        Some(())
    }
}

fn run(stand_in: &StandIn, fault: Option<Fault<'_>>) -> (Vec<String>, Report) {
    let may_leak = fault.is_some_and(|f| f.0 == "cuUserObjectRelease");
    let served = faults::on_a_thread(stand_in, fault, move || {
        let mut server = Server { may_leak, ..Server::default() };
        server.serve(&Raw::open());
        server
    });
    let Some(server) = served else {
        return (vec!["it panicked".into()], stand_in.report());
    };
    let report = if faults::is_final(fault) { stand_in.report() } else { stand_in.final_report() };
    let may_leak = match fault.map_or("", |f| f.0) {
        name if name.starts_with("cuCtx") => "streams events allocations registrations",
        "cuUserObjectRelease" => "streams events allocations registrations objects",
        "cuMemFree_v2" => "allocations",
        "cuMemHostUnregister" => "registrations",
        "cuStreamDestroy_v2" => "streams",
        "cuEventDestroy_v2" => "events",
        _ => "",
    };
    (server.found.judged(&report, fault, may_leak), report)
}

#[test]
fn every_call_of_sharing_fails_once() {
    const TEST: &str = "every_call_of_sharing_fails_once";
    doubles::on_stand_in(TEST, |stand_in| {
        const WANTED: [&str; 9] = [
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
        // What it leaks keeps the device.
        let leaks = |name: &str| name == "cuUserObjectRelease";
        let queues = |name: &str| {
            ["cuMemcpy", "cuEventRecord", "cuStreamWaitEvent", "cuGraphRetain"]
                .iter()
                .any(|q| name.starts_with(q))
        };
        let sweep = faults::Sweep {
            test: TEST,
            turns: &|_, count| vec![1, 2, 3, count / 2, count],
            codes: &|name| {
                let both = [1, 2, 900, 999].into_iter().flat_map(|c| [(c, false), (c, true)]);
                both.filter(|(_, after)| !leaks(name) && (!after || queues(name))).collect()
            },
            apart: &|name, nth, _| match nth {
                _ if leaks(name) => vec![1, 2, 900, 999],
                1 | 2 => vec![700, 4],
                _ => vec![],
            },
            run: &mut |fault| run(stand_in, fault),
        };
        sweep.all(stand_in, &WANTED);
    });
}

//! Streams that a server made or has the handles of, and graphs that keep its buffers. The server's own calls of the
//! driver fail, too, and are made again.

use std::ffi::c_void;

use pinpool::cuda::{adopt_stream, raw_context, raw_stream};
use pinpool::{DeviceError, ErrorClass};

use super::*;
use crate::support::doubles::StandIn;
use crate::support::until;

/// What a server does that shares streams and captures with the pool.
pub const SHARED: &[Topic] = &[shared];

/// Calls that sharing is about, which a clean run must make.
pub const SHARING: [&str; 7] = [
    "cuStreamGetCtx",
    "cuStreamGetId",
    "cuStreamIsCapturing",
    "cuStreamGetCaptureInfo_v3",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
];

fn call(s: &mut Server<'_>, call: &'static str, a: &[usize]) -> Option<()> {
    let driver = StandIn::Own(**s.machine);
    s.again(call, |s| {
        let code = driver.call(call, a);
        let class = if code == 700 { ErrorClass::DeviceLost } else { ErrorClass::Argument };
        let (device, text) = (s.device.name().into(), "of the server's own".into());
        let error = || Error::Device(DeviceError { device, call, code: code.into(), text, class });
        (code == 0).then_some(()).ok_or_else(error)
    })
}

fn made(s: &mut Server<'_>, name: &'static str, more: &[usize]) -> Option<usize> {
    let mut word = 0_usize;
    call(s, name, &[&[(&raw mut word) as usize], more].concat())?;
    Some(word)
}

fn shared(s: &mut Server<'_>) {
    // Only a lost device ends it early.
    let _ = share(s);
}

fn share(s: &mut Server<'_>) -> Option<()> {
    let context = s.again("raw_context", |s| raw_context(&s.device))? as usize;
    call(s, "cuCtxSetCurrent", &[context])?;
    let theirs = made(s, "cuStreamCreate", &[1])?;
    // The server's, and this thread's own default stream.
    for stream in [theirs, 2] {
        // SAFETY: destroyed when all work is complete; the thread's own lives as long as the thread.
        let adopt = |s: &mut Server<'_>| unsafe { adopt_stream(&s.device, stream as *mut c_void, ()) };
        let adopted = s.again("adopt_stream", adopt)?;
        s.streams.push(adopted);
    }
    s.again("raw_stream", |s| raw_stream(&s.streams[1]))?;
    for stream in [1, 3, 4] {
        s.upload_and_drop(stream, stream);
        s.again("wait_for", |s| s.streams[0].wait_for(&s.streams[stream]))?;
        s.synchronize(stream);
        s.download(0, stream);
        s.download_stream_ready(stream, stream);
    }
    for stream in [1, 3] {
        let done = graph(s, stream);
        // The driver gives a graph's buffer back on a thread of its own. No call comes before that has ended.
        until("the driver's thread has ended", || s.machine.command("calling") == "0");
        done?;
    }
    s.streams.truncate(3);
    while s.nudge() {}
    call(s, "cuStreamDestroy_v2", &[theirs])?;
    call(s, "cuCtxSetCurrent", &[0])
}

/// The server's own copy, out of a buffer that the graph keeps.
fn graph(s: &mut Server<'_>, stream: usize) -> Option<()> {
    const SLOT_OF_GRAPHS: usize = 9;
    let (seed, to) = (s.next_seed(), s.slot(SLOT_OF_GRAPHS).ok()?.address() as usize);
    let handle = s.again("raw_stream", |s| raw_stream(&s.streams[stream]))? as usize;
    s.expected[SLOT_OF_GRAPHS] = None;
    call(s, "cuStreamBeginCapture_v2", &[handle, 1])?;
    if s.streams[stream].synchronize().is_ok() {
        s.wrong("waited for a capturing stream");
    }
    let kept = s.again("hold_captured", |s| {
        let mut buf = s.pool.checkout_timeout(SLOT, HANG)?;
        fill(&mut buf, seed, SLOT);
        let from = buf.as_ptr() as usize;
        let held = s.streams[stream].hold_captured(buf).map_err(|SubmitError { error, buffer }| {
            let is_back = buffer.is_some_and(|back| *back == *bytes(seed as usize, SLOT));
            if !is_back && !error.is_device_lost() {
                s.wrong(format!("the buffer came back changed, or was kept: {error}"));
            }
            error
        });
        held.map(|()| from)
    });
    let copied = kept.and_then(|from| call(s, "cuMemcpyHtoDAsync_v2", &[to, from, SLOT, handle]));
    // What is begun is ended in any case.
    let mut graph = 0_usize;
    call(s, "cuStreamEndCapture", &[handle, (&raw mut graph) as usize])?;
    copied?;
    let executable = made(s, "cuGraphInstantiateWithFlags", &[graph, 0])?;
    call(s, "cuGraphDestroy", &[graph])?;
    for _ in 0..2 {
        call(s, "cuGraphLaunch", &[executable, handle])?;
        s.synchronize(stream);
    }
    s.expected[SLOT_OF_GRAPHS] = Some(seed);
    s.download(stream, SLOT_OF_GRAPHS);
    call(s, "cuGraphExecDestroy", &[executable])
}

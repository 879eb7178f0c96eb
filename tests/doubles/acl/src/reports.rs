//! Host functions and callbacks: what a stream has the CPU do in its order.
//!
//! A host function runs on a thread of the library's; a callback on the thread that subscribed to the stream, when that
//! thread processes reports, and later work waits for that. Here both run in whichever call finds out about the stream:
//! `aclrtProcessReport` is one such call, too.

#![allow(non_snake_case)]

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use crate::calls::{call, fails};
use crate::codes::*;
use crate::world::*;

/// As the header has it.
pub type HostFn = unsafe extern "C" fn(*mut c_void);

/// A function and its argument.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    function: HostFn,
    data: usize,
}

/// A thread that processes a stream's reports.
pub struct Subscription {
    pub thread: u64,
    pub stream: usize,
}

thread_local! {
    static RUNNING: Cell<bool> = const { Cell::new(false) };
    /// Calls that a host function made, which are written down when it has returned.
    static MADE: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// The code of a call that a host function makes. `None`: it is made from elsewhere.
pub fn refused(name: &'static str) -> Option<u32> {
    RUNNING.get().then(|| {
        MADE.with_borrow_mut(|made| made.push(name));
        INTERNAL_ERROR
    })
}

impl World {
    /// Runs it. The caller has the world's lock, which a host function must not need.
    pub fn run_host(&mut self, task: Task) {
        RUNNING.set(true);
        // SAFETY: the call that queued it promised that both stay valid until the work was seen complete.
        unsafe { (task.function)(task.data as *mut c_void) };
        RUNNING.set(false);
        for name in MADE.take() {
            self.let_pass("HOST-1", format!("{name} from a host function"));
        }
    }
}

#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
extern "C" fn aclrtLaunchHostFunc(stream: *mut c_void, function: Option<HostFn>, data: *mut c_void) -> u32 {
    const NAME: &str = "aclrtLaunchHostFunc";
    call(NAME, |w| {
        let Some(function) = function else { return w.violate("ARG-1", NAME, INVALID_PARAM) };
        let stream = w.stream_here(NAME, stream as usize)?;
        w.submit(stream, Op::Host(Task { function, data: data as usize }));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtSubscribeReport(thread: u64, stream: *mut c_void) -> u32 {
    const NAME: &str = "aclrtSubscribeReport";
    call(NAME, |w| {
        let stream = w.stream_here(NAME, stream as usize)?;
        if w.subscriptions.iter().any(|s| s.stream == stream) {
            return w.violate("HOST-2", format!("{NAME}: {stream:#x} has a thread"), PARAM_INVALID);
        }
        w.subscriptions.push(Subscription { thread, stream });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtUnSubscribeReport(thread: u64, stream: *mut c_void) -> u32 {
    const NAME: &str = "aclrtUnSubscribeReport";
    call(NAME, |w| {
        let stream = w.stream_here(NAME, stream as usize)?;
        let before = w.subscriptions.len();
        w.subscriptions.retain(|s| (s.thread, s.stream) != (thread, stream));
        if w.subscriptions.len() == before {
            return w.violate("HOST-2", format!("{NAME}: {stream:#x}"), THREAD_SUBSCRIBE);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtLaunchCallback(
    function: Option<HostFn>,
    data: *mut c_void,
    block: c_uint,
    stream: *mut c_void,
) -> u32 {
    const NAME: &str = "aclrtLaunchCallback";
    call(NAME, |w| {
        let Some(function) = function else { return w.violate("ARG-1", NAME, INVALID_PARAM) };
        if block > 1 {
            return w.violate("ARG-2", format!("{NAME}: block type {block}"), INVALID_PARAM);
        }
        let stream = w.stream_here(NAME, stream as usize)?;
        if !w.subscriptions.iter().any(|s| s.stream == stream) {
            return w.violate("HOST-2", format!("{NAME}: {stream:#x} has no thread"), STREAM_NO_CALLBACK);
        }
        w.submit(stream, Op::Host(Task { function, data: data as usize }));
        Ok(())
    })
}

unsafe extern "C" {
    /// The system's thread number, by which subscribers name themselves.
    fn pthread_self() -> u64;
}

/// Runs the callbacks that are due on streams of this thread; waits for one, that many milliseconds or for ever (-1).
#[unsafe(no_mangle)]
extern "C" fn aclrtProcessReport(timeout: c_int) -> u32 {
    const NAME: &str = "aclrtProcessReport";
    let since = Instant::now();
    // SAFETY: always there.
    let this = unsafe { pthread_self() };
    let mut ran = false;
    let mut first = true;
    loop {
        let mut step = |w: &mut World| {
            if timeout == 0 || timeout < -1 {
                return w.violate("ARG-2", format!("{NAME}: a timeout of {timeout} ms"), INVALID_PARAM);
            }
            let streams: Vec<usize> =
                w.subscriptions.iter().filter(|s| s.thread == this).map(|s| s.stream).collect();
            if streams.is_empty() {
                return w.violate("HOST-2", format!("{NAME}: this thread has no stream"), THREAD_SUBSCRIBE);
            }
            for stream in streams {
                let found = w.streams.get(&stream).and_then(|s| {
                    let at = s.queue.iter().position(|op| matches!(op, Op::Host(_)))?;
                    Some(s.done + at as u64 + 1)
                });
                if let Some(upto) = found.filter(|_| !w.hung) {
                    w.run(stream, upto);
                    ran = true;
                }
            }
            Ok(())
        };
        let code = if first {
            call(NAME, step)
        } else {
            world().as_mut().map_or(0, |w| step(w).err().unwrap_or_default())
        };
        first = false;
        if code != 0 || ran {
            return code;
        }
        if u64::try_from(timeout).is_ok_and(|ms| since.elapsed() >= Duration::from_millis(ms)) {
            return fails(NAME, REPORT_TIMEOUT);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

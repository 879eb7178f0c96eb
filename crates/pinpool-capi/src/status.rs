//! What the functions return: a number, and a text for the thread's last error.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pinpool::{Error, ErrorClass};

/// How a call ended: `PINPOOL_OK` or another number, with cause and remedy in `pinpool_last_error`.
pub type pinpool_status = i32;

/// The call has done what it says.
pub const PINPOOL_OK: pinpool_status = 0;
/// The pool or the system has no memory for the request now. The same call may succeed later.
pub const PINPOOL_EXHAUSTED: pinpool_status = 1;
/// An argument makes no sense, or this device cannot do it. The same call fails again.
pub const PINPOOL_INVALID: pinpool_status = 2;
/// The address lies in no block of this pool.
pub const PINPOOL_UNKNOWN: pinpool_status = 3;
/// A capture of the stream into a graph is in the way.
pub const PINPOOL_CAPTURING: pinpool_status = 4;
/// The device cannot be used until the process ends.
pub const PINPOOL_LOST: pinpool_status = 5;
/// The device, or its driver, is not here.
pub const PINPOOL_UNAVAILABLE: pinpool_status = 6;
/// The call was made in the child of a fork. The pool is the parent's.
pub const PINPOOL_FORKED: pinpool_status = 7;
/// A mistake of the library.
pub const PINPOOL_INTERNAL: pinpool_status = 8;
/// The time is over.
pub const PINPOOL_TIMEOUT: pinpool_status = 9;

/// Why a call failed.
#[derive(Debug)]
pub(super) struct Fault {
    status: pinpool_status,
    text: String,
}

impl Fault {
    /// An argument that only this interface has.
    pub(super) fn argument(text: &str) -> Self {
        Self { status: PINPOOL_INVALID, text: text.into() }
    }

    pub(super) fn no_block(address: usize) -> Self {
        let why = "lies in no block of this pool; it was freed, or it is of another allocator";
        Self { status: PINPOOL_UNKNOWN, text: format!("{address:#x} {why}") }
    }

    /// Blocks are out when the pool is closed.
    pub(super) fn open(count: u64) -> Self {
        let remedy = "free them and synchronise their streams, then close the pool again";
        Self { status: PINPOOL_TIMEOUT, text: format!("{count} blocks are out or held; {remedy}") }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Timeout(_) => PINPOOL_TIMEOUT,
            Error::Forked => PINPOOL_FORKED,
            Error::Unavailable { .. } => PINPOOL_UNAVAILABLE,
            Error::Internal(_) => PINPOOL_INTERNAL,
            _ => match error.class() {
                ErrorClass::Transient => PINPOOL_EXHAUSTED,
                ErrorClass::Capture => PINPOOL_CAPTURING,
                ErrorClass::DeviceLost | ErrorClass::DriverShutdown => PINPOOL_LOST,
                _ => PINPOOL_INVALID,
            },
        };
        Self { status, text: error.to_string() }
    }
}

std::thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Makes a call for C: no panic leaves it, and its error becomes the thread's last.
pub(super) fn status(call: impl FnOnce() -> Result<(), Fault>) -> pinpool_status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => PINPOOL_OK,
        Ok(Err(fault)) => {
            remember(fault.text);
            fault.status
        }
        Err(payload) => {
            // Its drop is foreign code, which may panic again.
            std::mem::forget(payload);
            remember("a call from C panicked: it has failed with PINPOOL_INTERNAL".into());
            PINPOOL_INTERNAL
        }
    }
}

fn remember(text: String) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that ends may have no thread-locals: then the text is lost.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// The text of the calling thread's last error: what failed, and what to do. It is valid until the
/// next call that fails on this thread. Empty if none has failed yet.
#[unsafe(no_mangle)]
pub extern "C" fn pinpool_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

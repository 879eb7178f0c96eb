//! A simulated `libcuda`.
//!
//! Captured copies become nodes of a graph; a launch queues them again. User objects are counted, and their destructors
//! called on a thread of the stand-in's own. The legacy default stream is in order with the per-thread default streams,
//! of which each thread has its own. It has no order with other blocking streams: so a test sees whether a program
//! relies on that. Of kernels it knows pinpool's two (`kernels.rs`), by their names. They run in stream order, as late
//! as copies do.
//!
//! Memory that is not registered at all may be copied from and to. Its bytes are taken during the call, and there when
//! the call returns, as the driver manual has it ("API synchronization behavior"). After a sticky error every call that touches the context gives its code, and what was queued never runs.
//!
//! The same sequences are made on a real driver, where there is one, and their codes and effects compared. What
//! differs, or is not tried there, is marked in `tests/devices/cuda/standin/rules.rs`.
//!
//! The library that is loaded is one of CUDA 12.8. [`Driver`] names others, which lack some calls or have more. A
//! machine has two devices with 256 MiB each and a driver of version 12080, unless commands (`control.rs`) say
//! otherwise: `attribute 91 0` makes a system like WSL2, and `attribute 99 0` a machine in confidential-computing mode.

mod batches;
mod calls;
mod graphs;
mod host;
mod kernels;
mod pointers;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::time::Duration;

use crate::common::{Outcome, fails_if};
use crate::world::World;
pub(crate) use graphs::run_due;
pub(crate) use kernels::Launch;

/// Another stream on each thread. (Handles below it are the legacy default stream's.)
pub(crate) const PER_THREAD: usize = 2;

#[derive(Default)]
pub(crate) struct Own {
    pub version: i32,
    /// The per-thread default streams, by context and thread.
    pub per_thread: BTreeMap<(usize, usize), usize>,
    /// Where the devices' attributes differ from a large GPU's.
    pub attributes: BTreeMap<i32, i32>,
    /// What the next registration takes beside its pages.
    pub first_pin: Duration,
    /// Threads that call the destructors of user objects and have not ended.
    pub calling: usize,
    pub graphs: graphs::Graphs,
    pub modules: kernels::Modules,
    pointers: pointers::Pointers,
}

impl Own {
    /// A context is gone, with what it had.
    pub(crate) fn forget(&mut self, context: usize) {
        self.per_thread.retain(|(of, _), _| *of != context);
        self.modules.forget(context);
    }
}

/// The codes, and the driver's words for them.
macro_rules! codes {
    ($($name:ident $code:literal $word:literal;)*) => {
        $(#[allow(dead_code, reason = "some are only given by tests")] pub(crate) const $name: u32 = $code;)*

        /// `None`: there is no such code.
        fn word(code: u32) -> Option<&'static std::ffi::CStr> {
            match code {
                0 => Some(c"CUDA_SUCCESS"),
                $($code => Some($word),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE 1 c"CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY 2 c"CUDA_ERROR_OUT_OF_MEMORY";
    NOT_INITIALIZED 3 c"CUDA_ERROR_NOT_INITIALIZED";
    DEINITIALIZED 4 c"CUDA_ERROR_DEINITIALIZED";
    NO_DEVICE 100 c"CUDA_ERROR_NO_DEVICE";
    INVALID_DEVICE 101 c"CUDA_ERROR_INVALID_DEVICE";
    INVALID_CONTEXT 201 c"CUDA_ERROR_INVALID_CONTEXT";
    UNSUPPORTED_LIMIT 215 c"CUDA_ERROR_UNSUPPORTED_LIMIT";
    INVALID_PTX 218 c"CUDA_ERROR_INVALID_PTX";
    INVALID_HANDLE 400 c"CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND 500 c"CUDA_ERROR_NOT_FOUND";
    NOT_READY 600 c"CUDA_ERROR_NOT_READY";
    ILLEGAL_ADDRESS 700 c"CUDA_ERROR_ILLEGAL_ADDRESS";
    CONTEXT_IS_DESTROYED 709 c"CUDA_ERROR_CONTEXT_IS_DESTROYED";
    ALREADY_REGISTERED 712 c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    NOT_REGISTERED 713 c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    MISALIGNED_ADDRESS 716 c"CUDA_ERROR_MISALIGNED_ADDRESS";
    LAUNCH_FAILED 719 c"CUDA_ERROR_LAUNCH_FAILED";
    NOT_PERMITTED 800 c"CUDA_ERROR_NOT_PERMITTED";
    NOT_SUPPORTED 801 c"CUDA_ERROR_NOT_SUPPORTED";
    SYSTEM_DRIVER_MISMATCH 803 c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    CAPTURE_UNSUPPORTED 900 c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    CAPTURE_INVALIDATED 901 c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    CAPTURE_ISOLATION 905 c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    CAPTURE_IMPLICIT 906 c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    CAPTURED_EVENT 907 c"CUDA_ERROR_CAPTURED_EVENT";
    CAPTURE_WRONG_THREAD 908 c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
}

impl World {
    /// What is refused whatever the call is.
    pub(crate) fn may_call_cuda(&mut self) -> Outcome {
        fails_if(DEINITIALIZED, self.ended)?;
        let needs_init = !matches!(self.call, "cuInit" | "cuDriverGetVersion");
        self.forbid("INIT-1", NOT_INITIALIZED, needs_init && !self.ready)?;
        self.forbid("GRA-1", NOT_PERMITTED, graphs::is_destructor())
    }
}

pub(crate) fn symbol(name: &str) -> Option<*const c_void> {
    let files =
        [calls::symbol, batches::symbol, graphs::symbol, host::symbol, kernels::symbol, pointers::symbol];
    files.into_iter().find_map(|symbol| symbol(name))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    Cuda11_0,
    Cuda12_0,
    Cuda12_8,
}

/// Calls that came with CUDA 12.8 or earlier, and before them those of CUDA 12.0 or 11.3.
const LATER: [&str; 8] = [
    "cuStreamGetId",
    "cuStreamGetCaptureInfo_v2",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
    "cuMemcpyBatchAsync",
    "cuStreamGetCaptureInfo_v3",
    "cuFuncLoad",
];

impl Driver {
    /// The calls that it lacks.
    pub(crate) fn lacks(self) -> &'static [&'static str] {
        match self {
            Self::Cuda11_0 => &LATER,
            Self::Cuda12_0 => &LATER[5..],
            Self::Cuda12_8 => &[],
        }
    }

    /// The entry point with this name, if the driver has it.
    pub fn symbol(self, name: &str) -> Option<*const c_void> {
        symbol(name).filter(|_| !self.lacks().contains(&name))
    }
}

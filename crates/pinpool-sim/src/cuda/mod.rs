//! A simulated `libcuda`.
//!
//! # How it works
//!
//! Device memory is ordinary memory under made-up addresses, filled with 0xA5 when it is allocated; what is allocated
//! in a stream's order has the memory of what the stream is still to free, with its bytes. Contexts, streams and events
//! are numbers that are never used twice, unless a test wants the driver's habit of giving the handle of a destroyed
//! stream to the next one.
//!
//! Captured copies become nodes of a graph; a launch queues them again. User objects are counted, and their destructors
//! called on a thread of the stand-in's own. The legacy default stream is in order with the per-thread default streams,
//! of which each thread has its own. It has no order with other blocking streams: so a test sees whether a program
//! relies on that.
//!
//! Of kernels it knows pinpool's two (`kernels.rs`), by their names. They run in stream order, as late as copies do.
//!
//! The library that is loaded is one of CUDA 12.8. [`Driver`] names others, which lack some calls or have more.
//!
//! # Rules
//!
//! Each violation is written down as one line that starts with the rule's id; `tests/cuda/standin` breaks each on
//! purpose.
//!
//! | id | the program | what the call does |
//! | --- | --- | --- |
//! | INIT-1 | calls before `cuInit` | 3 |
//! | CTX-1 | makes a call that needs a context where none is current (`cuEventQuery` and `cuStreamIsCapturing` need none) | 201 |
//! | CTX-2 | uses a context that does not exist any more | 709 |
//! | CTX-3 | pops where nothing was pushed | 201 |
//! | CTX-4 | releases a primary context more often than it was retained | 201 |
//! | CTX-5 | uses one context's stream or event with another's, or with another one current (but for these two) | 400 |
//! | CTX-6 | destroys a context that is not there, or a primary one (which is released) | 201 |
//! | STR-1 | names a stream that does not exist, or no more | 400 |
//! | STR-2 | destroys a stream that has copies queued (the driver allows it, pinpool does not) | it still runs |
//! | STR-3 | names the per-thread default stream (handle 2), of which each thread has one of its own | the calling thread's |
//! | EVT-1 | names an event that does not exist, or no more | 400 |
//! | EVT-2 | asks about an event that was never recorded | 0: complete |
//! | EVT-3 | records an event again that is not complete | covers the new place only |
//! | EVT-4 | destroys an event that is recorded and not complete | it is destroyed |
//! | MEM-1 | registers memory that overlaps what is registered | 712 |
//! | MEM-2 | unregisters what is not registered, or not from its start | 713, and 1 inside of what is page-locked |
//! | MEM-3 | registers nothing, or past the end of the address space | 1 |
//! | MEM-4 | unregisters memory that a queued copy uses | it is done |
//! | MEM-5 | hands memory to an asynchronous copy that is registered in part | 1 |
//! | MEM-6 | names device memory that is not allocated, or leaves its allocation | 1 |
//! | MEM-7 | frees what is not the start of an allocation | 1 |
//! | MEM-8 | frees memory that a queued copy uses (the driver waits for that) | the copies run first |
//! | HST-1 | frees host memory that `cuMemHostAlloc` did not give, or not from its start, or twice | 1 |
//! | HST-2 | frees host memory that a queued copy uses (the driver waits for that) | the copies run first |
//! | HST-3 | registers memory of the driver's own | 1 |
//! | HST-4 | asks for the device's address of memory that is neither registered nor `cuMemHostAlloc`'s | 1 |
//! | HST-5 | registers memory that is not mapped, or cannot be written to and is not said to be only read | 1 |
//! | HST-6 | has a copy write to memory that was registered as only read | 1 |
//! | HST-7 | passes flags that do not exist | 1 |
//! | HST-8 | registers as only read where the device cannot | 801 |
//! | HST-9 | allocates managed memory on a device that does not share it with a working host (allowed by the driver, not by our contract) | there it is |
//! | CAP-1 | makes an unsafe call while a capture forbids it | 900, and the capture is spoiled |
//! | CAP-2 | synchronises or waits on a capturing stream from outside, or asks for its number | 900, and the capture is spoiled |
//! | CAP-3 | asks about an event that was recorded in a capture | 907 |
//! | CAP-4 | ends a capture on another thread than it was begun on, where that matters | 908 |
//! | PTR-1 | names memory of the device-side heap in a copy | 1 |
//! | PTR-2 | asks for attributes of an address that there are not, or for none | 1 |
//! | HEAP-1 | sets the heap's limit when a module that uses the heap is loaded | 1 |
//! | POOL-1 | has a copy run on memory in stream order before the stream has reached the allocation | it runs |
//! | POOL-2 | names memory in a copy that was freed in stream order | 1 |
//! | POOL-3 | frees in stream order what is not the start of such an allocation, or was freed | 1 |
//! | POOL-4 | frees memory in stream order that a copy uses which is not ordered before | the copy runs first |
//! | POOL-5 | frees memory in stream order by `cuMemFree` before the stream has reached the allocation | it is freed |
//! | CAP-5 | uses the legacy default stream while a blocking stream of its context is captured | 906, and the capture is spoiled |
//! | CAP-6 | makes a capturing stream wait for an event of outside | 905, and the capture is spoiled |
//! | GRA-1 | makes a call from a user object's destructor | 800 |
//! | GRA-2 | makes a user object without destructor, without references, or without the flag that must be given | 1 |
//! | GRA-3 | names a graph, an executable graph or a user object that does not exist, or no more | 1 |
//! | GRA-4 | releases more references than a user object has, or destroys a graph that is being captured | 1 |
//! | BAT-1 | submits a batch of copies to the legacy default stream | 1 |
//! | BAT-2 | has a copy of no bytes in a batch | 1, those before it are queued |
//! | BAT-3 | submits a batch to a stream that is captured | 900, and the capture goes on |
//! | BAT-4 | has a copy in a batch write where another one reads or writes | they run, in no fixed order |
//! | BAT-5 | has a copy in a batch without attributes, or attributes that do not exist | 1 |
//! | BAT-6 | submits batches on one context from two threads at once (drivers then lose the device now and then) | they run |
//! | BAT-7 | names registered memory in a batch by the host's address where the device has another | the context is lost: 700 |
//! | KER-1 | loads a module without pinpool's two kernels | 218 |
//! | KER-2 | names a module or function that does not exist, or no more | 400 |
//! | KER-3 | asks for a function that the module does not have | 500 |
//! | KER-4 | launches a kernel in another shape than pinpool's | 1 |
//! | KER-5 | has a kernel touch what is no device memory of its context, or hands it more runs than it takes | the context is lost when it runs: 700, and 716 for a table that is not aligned |
//! | KER-6 | has a row of a launch meet what another row writes | they run, in no fixed order |
//! | KER-7 | launches on a stream that is captured (the driver makes it a node, pinpool does not) | it is no part of the graph |
//! | KER-8 | unloads a module whose kernel is queued | the kernel runs first |
//! | ARG-1 | passes null where something is written | 1 |
//!
//! Memory that is not registered at all may be copied from and to: that is counted as a *note*, PAGEABLE. Its bytes are
//! taken during the call, and there when the call returns, as the driver manual has it ("API synchronization
//! behavior"). After a sticky error every call that touches the context gives its code, and what was queued never runs.
//!
//! The same sequences are made on a real driver, where there is one, and their codes and effects compared. What
//! differs, or is not tried there, is marked in `tests/cuda/standin/rules.rs`.
//!
//! # What there is
//!
//! Two devices with 256 MiB each and a driver of version 12080, unless commands (`control.rs`) say otherwise:
//! `attribute 91 0` makes a system like WSL2, and `attribute 99 0` a machine in confidential-computing mode.

mod batches;
mod calls;
mod control;
mod graphs;
mod hand;
mod host;
mod kernels;
mod pointers;
mod pools;
mod streams;
mod world;

use std::ffi::c_void;

use crate::common::symbols;
pub use world::Gpus;
pub(crate) use world::{last_report, world};

symbols! {
    calls:
        cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetAttribute cuDeviceGetPCIBusId
        cuGetErrorName cuGetErrorString cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxGetCurrent
        cuCtxSetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuMemHostRegister_v2 cuMemHostUnregister
        cuMemAlloc_v2 cuMemFree_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2
        cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamWaitEvent
        cuThreadExchangeStreamCaptureMode cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery;
    batches:
        cuMemcpyBatchAsync;
    graphs:
        cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamGetCaptureInfo_v2 cuStreamGetCaptureInfo_v3
        cuUserObjectCreate cuUserObjectRelease cuGraphRetainUserObject cuGraphInstantiateWithFlags
        cuGraphLaunch cuGraphExecDestroy cuGraphDestroy;
    host:
        cuMemHostAlloc cuMemFreeHost cuMemAllocManaged cuMemHostGetDevicePointer_v2;
    kernels:
        cuModuleLoadData cuModuleUnload cuModuleGetFunction cuFuncLoad cuLaunchKernel;
    pointers:
        cuPointerGetAttributes cuCtxGetLimit cuCtxSetLimit;
    pools:
        cuMemAllocAsync cuMemFreeAsync;
    streams:
        cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxGetDevice cuDevicePrimaryCtxGetState cuStreamGetCtx cuStreamGetId
        cuCtxGetStreamPriorityRange cuStreamCreateWithPriority cuStreamGetPriority cuStreamIsCapturing
        cuCtxSynchronize cuEventSynchronize;
}

/// Which calls a driver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    Cuda11_0,
    Cuda12_0,
    Cuda12_8,
    Cuda13_0,
}

/// Calls that came with CUDA 12.0 or 11.3, and with 12.8 or earlier.
const SINCE_12_0: [&str; 5] = [
    "cuStreamGetId",
    "cuStreamGetCaptureInfo_v2",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
];
const SINCE_12_8: [&str; 3] = ["cuMemcpyBatchAsync", "cuStreamGetCaptureInfo_v3", "cuFuncLoad"];

impl Driver {
    /// The entry point with this name, if the driver has it.
    pub fn symbol(self, name: &str) -> Option<*const c_void> {
        let lacks = match self {
            Self::Cuda11_0 => &[&SINCE_12_0[..], &SINCE_12_8[..]][..],
            Self::Cuda12_0 => &[&SINCE_12_8[..]],
            Self::Cuda12_8 | Self::Cuda13_0 => &[],
        };
        symbol(name).filter(|_| !lacks.iter().any(|names| names.contains(&name)))
    }
}

impl Gpus {
    /// Two GPUs, in a world that this thread has entered.
    pub fn new() -> Self {
        Self::add()
    }
}

impl Default for Gpus {
    fn default() -> Self {
        Self::new()
    }
}

//! The driver's entry points that the crate calls, looked up one by one.
//!
//! The crate does not use cudarc's bindings: cudarc panics where libcuda or a symbol of it is
//! missing; it takes results from the driver as a Rust enum, so a newer code is undefined
//! behaviour; its own lookup exists in only one of its link modes, which the program chooses; and
//! it needs a newer Rust. Here a missing library or required call is an error with its name, a
//! missing optional call is `None`, and a result is a number. Both crates' handles are the same.
//!
//! # Which library
//!
//! `libcuda.so.1`, as the system's loader finds it. The environment variable `PINPOOL_LIBCUDA`
//! names another one, for systems with the driver in an odd place and for tests; then nothing else
//! is tried. It is read once in a process. A loaded library is never unloaded.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::device::gate::{self, Entry, Refused};
use crate::device::vendor::{Find, Libraries, entry_points, load};
use crate::error::{ErrorClass, Result};

// As in cuda.h.
pub(crate) type CUdevice = c_int;
pub(crate) type CUcontext = *mut c_void;
pub(crate) type CUstream = *mut c_void;
pub(crate) type CUevent = *mut c_void;
pub(crate) type CUdeviceptr = u64;
pub(crate) type CUgraph = *mut c_void;
pub(crate) type CUuserObject = *mut c_void;
pub(crate) type CUmodule = *mut c_void;
pub(crate) type CUfunction = *mut c_void;

/// How the copies of a batch are made: `CUmemcpyAttributes`. A location is a type and a number.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUmemcpyAttributes {
    pub(crate) source_order: c_int,
    pub(crate) source: [c_int; 2],
    pub(crate) target: [c_int; 2],
    pub(crate) flags: c_uint,
}

/// The environment variable that names the library to load in place of `libcuda.so.1`.
const LIBRARY_VARIABLE: &str = "PINPOOL_LIBCUDA";
/// The oldest driver that the calls below are known to work with, as `cuDriverGetVersion` counts.
const OLDEST: c_int = 11_000;
pub(super) const NO_GPU: &str =
    "no GPU is visible to this process: see CUDA_VISIBLE_DEVICES, the container's --gpus, nvidia-smi";

/// What a call returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct CudaCode(pub u32);

impl Refused for CudaCode {
    fn refused() -> Self {
        Self::DEINITIALIZED
    }
}

impl CudaCode {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const DEINITIALIZED: Self = Self(4);
    pub(crate) const NOT_READY: Self = Self(600);

    /// The error's class, by the numbers of cuda.h; any other one concerns the one call only.
    pub(crate) fn class(self) -> ErrorClass {
        match self.0 {
            // Out of memory; device taken by another process; the node's services still starting;
            // too many clients; not ready; a launch that waited too long for a capture to go on.
            2 | 46 | 600 | 802 | 807..=809 | 909 => ErrorClass::Transient,
            // Not initialised, and deinitialised: a process that ends, or the child of a fork.
            3 | 4 => ErrorClass::DriverShutdown,
            900..=908 => ErrorClass::Capture,
            // Memory and link errors of the hardware, a destroyed context, every error that ends a
            // kernel, and the loss of the service between the process and the device.
            214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911 => ErrorClass::DeviceLost,
            _ => ErrorClass::Argument,
        }
    }
}

static LIBRARIES: Libraries<CudaApi> = Libraries::new();

entry_points! {
    CudaApi -> CudaCode;
    required {
    init = "cuInit": fn(c_uint);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut CUdevice, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, CUdevice);
    device_pci_bus_id = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, CUdevice);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(*mut CUcontext, CUdevice);
    primary_release = "cuDevicePrimaryCtxRelease_v2": fn(CUdevice);
    ctx_get = "cuCtxGetCurrent": fn(*mut CUcontext);
    ctx_set = "cuCtxSetCurrent": fn(CUcontext);
    ctx_push = "cuCtxPushCurrent_v2": fn(CUcontext);
    ctx_pop = "cuCtxPopCurrent_v2": fn(*mut CUcontext);
    ctx_get_limit = "cuCtxGetLimit": fn(*mut usize, c_int);
    ctx_set_limit = "cuCtxSetLimit": fn(c_int, usize);
    ctx_get_device = "cuCtxGetDevice": fn(*mut CUdevice);
    primary_state = "cuDevicePrimaryCtxGetState": fn(CUdevice, *mut c_uint, *mut c_int);
    host_register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister": fn(*mut c_void);
    host_alloc = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    host_device_pointer = "cuMemHostGetDevicePointer_v2": fn(*mut CUdeviceptr, *mut c_void, c_uint);
    managed_alloc = "cuMemAllocManaged": fn(*mut CUdeviceptr, usize, c_uint);
    mem_alloc = "cuMemAlloc_v2": fn(*mut CUdeviceptr, usize);
    mem_free = "cuMemFree_v2": fn(CUdeviceptr);
    pointer_attributes = "cuPointerGetAttributes": fn(c_uint, *const c_int, *const *mut c_void, CUdeviceptr);
    stream_create = "cuStreamCreateWithPriority": fn(*mut CUstream, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2": fn(CUstream);
    stream_synchronize = "cuStreamSynchronize": fn(CUstream);
    stream_wait_event = "cuStreamWaitEvent": fn(CUstream, CUevent, c_uint);
    stream_context = "cuStreamGetCtx": fn(CUstream, *mut CUcontext);
    stream_is_capturing = "cuStreamIsCapturing": fn(CUstream, *mut c_uint);
    event_create = "cuEventCreate": fn(*mut CUevent, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(CUevent);
    event_record = "cuEventRecord": fn(CUevent, CUstream);
    event_query = "cuEventQuery": fn(CUevent);
    copy_to_device = "cuMemcpyHtoDAsync_v2": fn(CUdeviceptr, *const c_void, usize, CUstream);
    copy_to_host = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, CUdeviceptr, usize, CUstream);
    copy_on_device = "cuMemcpyDtoDAsync_v2": fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
    error_name = "cuGetErrorName": fn(CudaCode, *mut *const c_char);
    error_string = "cuGetErrorString": fn(CudaCode, *mut *const c_char);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_uint);
    module_load = "cuModuleLoadData": fn(*mut CUmodule, *const c_void);
    module_unload = "cuModuleUnload": fn(CUmodule);
    module_function = "cuModuleGetFunction": fn(*mut CUfunction, CUmodule, *const c_char);
    priority_range = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int);
    launch_kernel = "cuLaunchKernel": fn(
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
        *mut *mut c_void, *mut *mut c_void,
    );
    }
    optional {
    /// 12.8: many copies by one call. Targets, sources, lengths, their number; attributes, the
    /// first copy of each, their number; the place where the call failed; the stream.
    copy_batch = "cuMemcpyBatchAsync": fn(
        *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize,
        *mut CUmemcpyAttributes, *mut usize, usize, *mut usize, CUstream,
    );
    /// 12.4: loads a function whose loading was put off.
    function_load = "cuFuncLoad": fn(CUfunction);
    /// 12.0. A stream's number, which no other stream of the process has or had.
    stream_id = "cuStreamGetId": fn(CUstream, *mut u64);
    /// 11.3, and missing in CUDA 13's header: status, id, graph, dependencies and their number.
    capture_info_v2 = "cuStreamGetCaptureInfo_v2": fn(
        CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut *const c_void, *mut usize,
    );
    /// 12.3: the same, with the dependencies' edges.
    capture_info_v3 = "cuStreamGetCaptureInfo_v3": fn(
        CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut *const c_void, *mut *const c_void, *mut usize,
    );
    /// 11.3, and the two below: an object of graphs, with a callback when no graph keeps it.
    user_object_create = "cuUserObjectCreate": fn(
        *mut CUuserObject, *mut c_void, unsafe extern "C" fn(*mut c_void), c_uint, c_uint,
    );
    user_object_release = "cuUserObjectRelease": fn(CUuserObject, c_uint);
    graph_retain = "cuGraphRetainUserObject": fn(CUgraph, CUuserObject, c_uint, c_uint);
    }
}

/// Installs a simulated driver for the devices from `first` on, for tests. No part of the API.
///
/// # Errors
/// The name of the first required call that `find` does not have.
///
/// # Safety
/// `find` gives functions of the driver's signatures, which stay to the end of the process.
pub unsafe fn install(first: u32, find: Find<'_>) -> std::result::Result<(), &'static str> {
    LIBRARIES.install(first, CudaApi::resolve(find)?);
    Ok(())
}

impl CudaApi {
    /// The initialised driver of the device with this number, where that is known.
    ///
    /// # Errors
    /// As for [opening a device](crate::Error#opening-a-device).
    pub(crate) fn get(device: &str, ordinal: Option<u32>) -> Result<&'static Self> {
        LIBRARIES.get(device, ordinal, Self::load, Self::start)
    }

    fn load() -> std::result::Result<Self, String> {
        let remedy = "install NVIDIA's driver, give the container access to the GPU (--gpus all)";
        let stranger =
            format!("it is no CUDA driver, or one older than CUDA {}; install a newer one", version(OLDEST));
        load(LIBRARY_VARIABLE, vec!["libcuda.so.1".into()], remedy, &stranger, Self::resolve)
    }

    /// Initialises the driver, if it is new enough.
    fn start(&self) -> std::result::Result<(), String> {
        let mut found: c_int = 0;
        // SAFETY: writes a number; may be called before cuInit.
        let code = unsafe { self.driver_version.call(&raw mut found) };
        if code != CudaCode::SUCCESS {
            return Err(format!("cuDriverGetVersion failed with {}", self.explain(code)));
        }
        if found < OLDEST {
            let (found, oldest) = (version(found), version(OLDEST));
            return Err(format!(
                "the driver supports CUDA {found} only, and CUDA {oldest} is needed: install a newer driver"
            ));
        }
        // SAFETY: the call takes no pointers.
        match unsafe { self.init.call(0) } {
            CudaCode::SUCCESS => Ok(()),
            code => Err(format!("cuInit failed with {}", self.explain(code))),
        }
    }

    /// The driver's words for a code.
    pub(crate) fn text(&self, code: CudaCode) -> String {
        if crate::exit::exiting() {
            return gate::ENDING.into();
        }
        type Ask = unsafe extern "C" fn(CudaCode, *mut *const c_char) -> CudaCode;
        let ask = |entry: Entry<Ask>| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: the call sets `text` to null or to a string of the library, which stays
            // loaded.
            unsafe {
                entry.call(code, &raw mut text);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        match (ask(self.error_name), ask(self.error_string)) {
            (Some(name), Some(text)) => format!("{name}: {text}"),
            (Some(name), None) => name,
            _ => "a code that this driver has no name for".into(),
        }
    }

    /// The code, the driver's words, and what to do where it keeps a device from being opened.
    fn explain(&self, code: CudaCode) -> String {
        let remedy = match code.0 {
            34 => {
                "; this is the toolkit's stub, which has no driver behind it: put the driver's libcuda first"
            }
            100 => "; no GPU is visible: see CUDA_VISIBLE_DEVICES, the container's --gpus, nvidia-smi",
            802 => "; is the node's fabric manager running?",
            803 | 804 => {
                "; the kernel module and libcuda do not fit together: reboot, or mount the host's libcuda"
            }
            999 => "; are the kernel modules loaded (nvidia, nvidia_uvm)?",
            _ => "",
        };
        format!("{} ({}){remedy}", code.0, self.text(code))
    }
}

/// A version as CUDA's documentation writes it: 12080 is 12.8.
fn version(number: c_int) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_code_has_its_class() {
        for (class, codes) in [
            (ErrorClass::Argument, &[1, 101, 200, 201, 400, 712, 713, 801, 999, 123_456][..]),
            (ErrorClass::Transient, &[2, 600, 802, 909]),
            (ErrorClass::DeviceLost, &[214, 220, 700, 702, 710, 716, 719]),
            (ErrorClass::Capture, &[900, 901, 905, 907, 908]),
            (ErrorClass::DriverShutdown, &[4]),
        ] {
            codes.iter().for_each(|code| assert_eq!(CudaCode(*code).class(), class, "{code}"));
        }
    }
}

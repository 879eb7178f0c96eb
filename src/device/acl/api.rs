//! The library's entry points that the crate calls, looked up one by one.
//!
//! One table serves every version: the C interface keeps its signatures (those of `acl_rt.h` of
//! January 2022 and of CANN 9.2 are the same). The calls up to the end of 2023 are required, and a
//! missing one is an error with its name. Later calls may be missing. A result is a number, never a
//! Rust enum: newer libraries have other codes and statuses.
//!
//! # Which library
//!
//! `libascendcl.so`, as the system's loader finds it (CANN's `set_env.sh` sets its search path),
//! else in the toolkit that `ASCEND_TOOLKIT_HOME` or `ASCEND_HOME_PATH` names, else where CANN's
//! installers put it. A path in the environment variable `PINPOOL_LIBASCENDCL` is the only one that
//! is tried. The choice is made once, and a loaded library is never unloaded.
//!
//! # Beginning and ending
//!
//! `aclInit` is called here. A second call in a process returns 100002, and that is success.
//! `aclFinalize` is never called: it ends the library for the whole process, at once.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::path::PathBuf;

use super::error::AclCode;
use crate::device::vendor::{Find, Libraries, entry_points, load, named};
use crate::error::Result;

// As in acl_rt.h: all handles are pointers.
pub(super) type AclContext = *mut c_void;
pub(super) type AclStream = *mut c_void;
pub(super) type AclEvent = *mut c_void;

/// The environment variable that names the library to load.
pub(super) const LIBRARY_VARIABLE: &str = "PINPOOL_LIBASCENDCL";
const FILE: &str = "libascendcl.so";
/// The variables of CANN's environment script, and the folders of its installers.
const HOMES: [&str; 2] = ["ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"];
const USUAL: [&str; 4] = [
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/nnae/latest",
    "/usr/local/Ascend/nnrt/latest",
];

static LIBRARIES: Libraries<AclApi> = Libraries::new();

entry_points! {
    AclApi -> AclCode;
    required {
    init = "aclInit": fn(*const c_char);
    set_device = "aclrtSetDevice": fn(i32);
    reset_device = "aclrtResetDevice": fn(i32);
    get_device = "aclrtGetDevice": fn(*mut i32);
    device_count = "aclrtGetDeviceCount": fn(*mut u32);
    run_mode = "aclrtGetRunMode": fn(*mut c_int);
    device_synchronize = "aclrtSynchronizeDevice": fn();
    context_set = "aclrtSetCurrentContext": fn(AclContext);
    context_get = "aclrtGetCurrentContext": fn(*mut AclContext);
    stream_create = "aclrtCreateStream": fn(*mut AclStream);
    stream_destroy = "aclrtDestroyStream": fn(AclStream);
    stream_synchronize = "aclrtSynchronizeStream": fn(AclStream);
    stream_synchronize_timeout = "aclrtSynchronizeStreamWithTimeout": fn(AclStream, i32);
    stream_wait_event = "aclrtStreamWaitEvent": fn(AclStream, AclEvent);
    event_create = "aclrtCreateEventExWithFlag": fn(*mut AclEvent, u32);
    event_destroy = "aclrtDestroyEvent": fn(AclEvent);
    event_record = "aclrtRecordEvent": fn(AclEvent, AclStream);
    event_query = "aclrtQueryEventStatus": fn(AclEvent, *mut c_int);
    host_malloc = "aclrtMallocHost": fn(*mut *mut c_void, usize);
    host_free = "aclrtFreeHost": fn(*mut c_void);
    malloc = "aclrtMalloc": fn(*mut *mut c_void, usize, c_int);
    free = "aclrtFree": fn(*mut c_void);
    copy = "aclrtMemcpy": fn(*mut c_void, usize, *const c_void, usize, c_int);
    copy_async = "aclrtMemcpyAsync": fn(*mut c_void, usize, *const c_void, usize, c_int, AclStream);
    memset = "aclrtMemset": fn(*mut c_void, usize, i32, usize);
    }
    optional {
    /// CANN 8.2, with a driver of 24.1 or later, and the one below.
    host_register = "aclrtHostRegister": fn(*mut c_void, u64, c_int, *mut *mut c_void);
    host_unregister = "aclrtHostUnregister": fn(*mut c_void);
    soc_name = "aclrtGetSocName": fn() -> *const c_char;
    recent_message = "aclGetRecentErrMsg": fn() -> *const c_char;
    }
}

/// The files to try if no library is named.
fn usual() -> Vec<OsString> {
    let homes = HOMES.iter().filter_map(|home| named(home)).chain(USUAL.iter().map(OsString::from));
    let files = homes.map(|home| PathBuf::from(home).join("lib64").join(FILE).into_os_string());
    std::iter::once(FILE.into()).chain(files).collect()
}

/// Installs a simulated library for the devices from `first` on, for tests. No part of the API.
///
/// # Errors
/// The name of the first required call that `find` does not have.
///
/// # Safety
/// `find` gives functions of the driver's signatures, which stay to the end of the process.
pub unsafe fn install(first: u32, find: Find<'_>) -> std::result::Result<(), &'static str> {
    LIBRARIES.install(first, AclApi::resolve(find)?);
    Ok(())
}

impl AclApi {
    /// The initialised library of the device with this number, where that is known.
    ///
    /// # Errors
    /// As for [opening a device](crate::Error#opening-a-device).
    pub(super) fn get(device: &str, ordinal: Option<u32>) -> Result<&'static Self> {
        LIBRARIES.get(device, ordinal, Self::load, Self::start)
    }

    fn load() -> std::result::Result<Self, String> {
        let remedy = "install CANN (toolkit or runtime), source its set_env.sh, set ASCEND_TOOLKIT_HOME";
        let stranger = "it is no AscendCL, or one older than CANN 8.0; install a newer CANN";
        load(LIBRARY_VARIABLE, usual(), remedy, stranger, Self::resolve)
    }

    /// Initialises the library. A call after a success does nothing.
    fn start(&self) -> std::result::Result<(), String> {
        // SAFETY: no configuration is given, which is allowed.
        match unsafe { self.init.call(std::ptr::null()) } {
            AclCode::SUCCESS => {}
            AclCode::REPEAT_INITIALIZE => self.expected(),
            code => {
                let said = self.recent().map_or_else(String::new, |text| format!(": {text}"));
                return Err(format!(
                    "aclInit failed with {} ({}){said}; is the driver loaded (npu-smi info), is a device visible \
                     (ASCEND_RT_VISIBLE_DEVICES, the container's /dev/davinci*), and may this user use it?",
                    code.0,
                    code.name()
                ));
            }
        }
        Ok(())
    }

    /// The library's own message about this thread's last error. Reading removes it.
    pub(super) fn recent(&self) -> Option<String> {
        // SAFETY: the call takes nothing.
        let text = unsafe { self.recent_message?.call() };
        if text.is_null() {
            return None;
        }
        // SAFETY: a string that stays valid until the next such call on this thread.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// The chip's name, such as `Ascend910B4`.
    pub(super) fn soc(&self) -> Option<String> {
        // SAFETY: the call takes nothing.
        let text = unsafe { self.soc_name?.call() };
        // SAFETY: null, or a string that lives as long as the library.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    /// Removes the message of a refusal that is no error here, so that no later error shows it.
    pub(super) fn expected(&self) {
        let _ = self.recent();
    }
}

//! Contexts and streams that the program made.
//!
//! # Contexts
//!
//! Most servers work in the primary context, which is recognised: adopting it opens the device. The
//! crate works in any other context as it is, and never destroys it. The crate's threads make calls
//! until the last buffer that came from it is dropped, and a little longer. So its owner can leave
//! a value with the device, the *keep-alive*, which is dropped after the last call.
//!
//! # Streams
//!
//! A handle does not name one stream for ever: the driver gives the handle of a destroyed stream to
//! a new one. The driver's stream id (`cuStreamGetId`, CUDA 12.0) does, so the crate knows a stream
//! by its id. Without an id, two equal handles are taken for two streams.
//!
//! `CU_STREAM_PER_THREAD` names another stream on every thread: it is confined to the adopting
//! thread. The legacy default stream covers it, which waits for all streams but non-blocking ones
//! (CUDA C++ Programming Guide, "Implicit Synchronization" and "Per-thread Default Stream").

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::api::{CUcontext, CUdevice, CUstream, CudaApi, CudaCode};
use super::{Cuda, CudaCurrent, check, stream};
use crate::device::vendor::name_on;
use crate::device::{AdoptedContext, Confined, StreamHandle};
use crate::error::{Error, Result};
use crate::exit;

/// cuda.h: CU_STREAM_LEGACY, which 0 stands for in the entry points that the crate uses.
pub(crate) const LEGACY: usize = 1;
/// cuda.h: CU_STREAM_PER_THREAD, the last of the handles that stand for a default stream.
pub(crate) const PER_THREAD: usize = 2;
/// cuda.h: CUDA_ERROR_NOT_SUPPORTED.
const NOT_SUPPORTED: CudaCode = CudaCode(801);

/// A driver for a context that the program made.
///
/// # Safety
/// `context` is a CUDA context, and is not destroyed before the driver is let go of.
pub(crate) unsafe fn adopt(context: *mut c_void) -> Result<AdoptedContext> {
    crate::os::watch_forks()?;
    let name: Arc<str> = "cuda".into();
    if context.is_null() {
        return Err(Error::Argument(
            "a null context was to be adopted; pass the one that cuCtxCreate or cuCtxGetCurrent gave".into(),
        ));
    }
    let api = CudaApi::get(&name, None)?;
    let said = |call, code| check(api, &name, call, code);
    let device = {
        // One pass for all of it: the context that is pushed is popped.
        let _pass = exit::pass();
        // SAFETY: the caller promises that it is a context.
        said("cuCtxPushCurrent", unsafe { api.ctx_push.call(context) })?;
        let _current = CudaCurrent::relaxed(api, true);
        let mut device: CUdevice = 0;
        // SAFETY: writes a handle.
        said("cuCtxGetDevice", unsafe { api.ctx_get_device.call(&raw mut device) })?;
        device
    };
    let ordinal = ordinal(api, &name, device)?;
    // Another one, if the program has installed it for this device.
    let api = CudaApi::get(&name, u32::try_from(ordinal).ok())?;
    if is_primary(api, &name, device, context)? {
        return Ok(AdoptedContext::Default(format!("cuda:{ordinal}")));
    }
    let name = name_on(&format!("cuda:{ordinal}"), context as usize);
    Ok(AdoptedContext::Other(Arc::new(Cuda::new(api, name, ordinal, device, context, false))))
}

/// The ordinal of the device with this handle, as [`super::driver`] counts.
fn ordinal(api: &CudaApi, name: &Arc<str>, device: CUdevice) -> Result<c_int> {
    let mut count: c_int = 0;
    // SAFETY: writes a number.
    check(api, name, "cuDeviceGetCount", unsafe { api.device_count.call(&raw mut count) })?;
    for index in 0..count {
        let mut handle: CUdevice = 0;
        // SAFETY: writes a handle.
        check(api, name, "cuDeviceGet", unsafe { api.device_get.call(&raw mut handle, index) })?;
        if handle == device {
            return Ok(index);
        }
    }
    Err(Error::Unavailable {
        device: name.to_string(),
        why: "the context is of a device that cuDeviceGet does not list".into(),
    })
}

fn is_primary(api: &CudaApi, name: &Arc<str>, device: CUdevice, context: CUcontext) -> Result<bool> {
    let (mut flags, mut active): (c_uint, c_int) = (0, 0);
    // SAFETY: writes two numbers.
    let code = unsafe { api.primary_state.call(device, &raw mut flags, &raw mut active) };
    check(api, name, "cuDevicePrimaryCtxGetState", code)?;
    if active == 0 {
        // No further question: retaining the primary context would create it.
        return Ok(false);
    }
    let _relaxed = CudaCurrent::relaxed(api, false);
    let mut primary: CUcontext = std::ptr::null_mut();
    // SAFETY: writes a handle.
    let code = unsafe { api.primary_retain.call(&raw mut primary, device) };
    check(api, name, "cuDevicePrimaryCtxRetain", code)?;
    // SAFETY: retained above. It was active before, so another reference remains.
    let code = unsafe { api.primary_release.call(device) };
    check(api, name, "cuDevicePrimaryCtxRelease", code)?;
    Ok(primary == context)
}

impl Cuda {
    pub(crate) fn raw_context(&self) -> *mut c_void {
        self.context
    }

    /// The handle to use for a stream of this context, after every check that is possible.
    ///
    /// # Errors
    /// [`Error::Mismatch`].
    ///
    /// # Safety
    /// `raw` is a stream that is alive, or one of the special handles.
    pub(crate) unsafe fn recognise(&self, raw: *mut c_void) -> Result<StreamHandle> {
        let handle = match raw as usize {
            0 | LEGACY => StreamHandle(LEGACY as u64),
            other => StreamHandle(other as u64),
        };
        // The special handles mean streams of the context that is current.
        let _current = self.relaxed()?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: a stream that is alive, as the caller promises, and a place for a handle.
        let code = unsafe { self.api.stream_context.call(stream(handle), &raw mut context) };
        self.said("cuStreamGetCtx", code)?;
        if context != self.context {
            return Err(Error::wrong_context(&self.name));
        }
        Ok(handle)
    }

    /// The driver's number for a stream that is not being captured. `None`: it has no numbers.
    pub(crate) fn stream_id(&self, on: StreamHandle) -> Result<Option<u64>> {
        let Some(ask) = self.api.stream_id else { return Ok(None) };
        let _current = self.relaxed()?;
        let mut id = 0_u64;
        // SAFETY: a stream that is alive, and a place for a number.
        match unsafe { ask.call(stream(on), &raw mut id) } {
            NOT_SUPPORTED => Ok(None),
            code => self.said("cuStreamGetId", code).map(|()| Some(id)),
        }
    }

    /// How a stream is confined to the calling thread, if it is.
    pub(crate) fn confined(on: StreamHandle) -> Option<Confined> {
        (on.0 == PER_THREAD as u64).then(|| Confined::here(StreamHandle(LEGACY as u64)))
    }

    pub(crate) fn raw_stream(on: StreamHandle) -> CUstream {
        stream(on)
    }
}

//! Contexts and streams that the program made.
//!
//! # Contexts
//!
//! Most servers work in their device's default context (`aclrtSetDevice`). Where the device is open
//! here, that context is recognised: adopting it opens the device. Elsewhere the crate does not try
//! to find out: setting and resetting the device would tell, and would end it under code that has
//! made a context there without setting it. So the crate works in any other context as it is, and
//! never destroys it. The crate's threads make calls until the last buffer that came from it is
//! dropped, and a little longer. The *keep-alive*, a value of its owner, is dropped after the last
//! call.
//!
//! # Streams
//!
//! The library has no number for a stream that no other stream has or had, so each adoption is a
//! stream of its own. Nor does the library name a stream's context. But an event can only be
//! recorded on a stream of the current context (107003), and recording one does no harm: the crate
//! checks a stream in that way, each by the same event. (A new recording replaces the old one.)

use std::ffi::c_void;
use std::sync::Arc;

use super::api::{AclApi, AclContext};
use super::error::AclCode;
use super::{Acl, AclCurrent, check, current_context, host, on_other_thread, stream};
use crate::device::vendor::name_on;
use crate::device::{AdoptedContext, Driver, StreamHandle};
use crate::error::{Error, Result};
use crate::exit;

/// A driver for a context that the program made.
///
/// # Safety
/// `context` is a context of AscendCL, and is not destroyed before the driver is let go of.
pub(crate) unsafe fn adopt(context: *mut c_void) -> Result<AdoptedContext> {
    crate::os::watch_forks()?;
    let name: Arc<str> = "acl".into();
    if context.is_null() {
        return Err(Error::Argument(
            "a null context was to be adopted; pass the one that aclrtCreateContext or aclrtGetCurrentContext gave".into(),
        ));
    }
    let api = AclApi::get(&name, None)?;
    let (theirs, own) = (context as usize, name.clone());
    // On another thread: one that has no current context is to keep none.
    let (ordinal, on_device) = on_other_thread(&name, move || {
        let _current = AclCurrent::enter(api, &own, theirs as AclContext, exit::pass())?;
        let mut ordinal = -1;
        // SAFETY: writes a number.
        check(api, &own, "aclrtGetDevice", unsafe { api.get_device.call(&raw mut ordinal) })?;
        Ok((ordinal, current_context(api, &own)?.1))
    })?;
    // Another one, if the program has installed it for this device.
    let api = AclApi::get(&name, u32::try_from(ordinal).ok())?;
    let device = format!("acl:{ordinal}");
    if host::is_default(context) {
        return Ok(AdoptedContext::Default(device));
    }
    let name = name_on(&device, theirs);
    Ok(AdoptedContext::Other(Acl::start(api, name, ordinal, theirs, on_device, false)))
}

impl Acl {
    pub(crate) fn raw_context(&self) -> *mut c_void {
        self.context
    }

    /// The handle to use for a stream of this context, after every check that is possible. Null is
    /// the context's default stream.
    ///
    /// # Errors
    /// [`Error::Mismatch`]; else [as every call](Error#every-call).
    ///
    /// # Safety
    /// `raw` is a stream that is alive, or null.
    pub(crate) unsafe fn recognise(&self, raw: *mut c_void) -> Result<StreamHandle> {
        let handle = StreamHandle(raw.expose_provenance() as u64);
        let mut probe = self.probe.lock();
        let event = match *probe {
            Some(event) => event,
            None => *probe.insert(self.create_event()?),
        };
        match self.record(event, handle) {
            Err(Error::Device(error)) if error.code == i64::from(AclCode::STREAM_CONTEXT.0) => {
                Err(Error::wrong_context(&self.name))
            }
            recorded => recorded.map(|()| handle),
        }
    }

    pub(crate) fn raw_stream(on: StreamHandle) -> *mut c_void {
        stream(on)
    }

    /// The facts about the library and the device.
    pub(crate) fn about(&self) -> About {
        About { soc: self.api.soc(), on_device: self.on_device, later: self.api.later() }
    }
}

/// The facts about a device and its library, from [`about`](crate::acl::about): for logs, and for
/// reports about hardware that the crate was never tried on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct About {
    /// The chip (`aclrtGetSocName`).
    pub soc: Option<String>,
    /// Whether the program runs on the device, in RC mode (`aclrtGetRunMode`: ACL_DEVICE).
    pub on_device: bool,
    /// The calls that came after 2023, and whether this library has them.
    pub later: Vec<(&'static str, bool)>,
}

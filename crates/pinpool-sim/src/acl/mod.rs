//! A simulated `libascendcl`.
//!
//! It has the entry points that pinpool calls and those that a server beside it calls. No NPU was at hand: what it
//! knows is from public headers and documentation, of CANN 8.0 to 9.2. There are no captures and models, values written
//! and waited for, batched copies, host functions and callbacks, events between processes, or memory of the virtual
//! address calls.
//!
//! The vendor's library does not protect memory that is freed while it is used, and neither does this one: a queued
//! copy from memory that was freed or unregistered carries 0xDD, one to such memory is discarded, and one from memory
//! that is not page-locked brings the device 0xDB. Nothing of that is an error, which is why each is a violation. (From
//! CANN 8.5 on, and with a driver that can tell, a copy of memory that is not page-locked is no loss: it is done when
//! the call returns. A program that also runs on older versions cannot rely on that.)
//!
//! No violations, but errors: no device at all (207004?), one that does not exist (107001), no more memory (207001),
//! registering where the product cannot (207000), a library that is initialised already (100002), a time that ran out
//! (507046). A bare thread that asks for its context or device gets 107002: there is no other way to ask. Nor can a
//! thread be given no context: null is refused.
//!
//! When the program runs on the device (RC mode), host memory is the device's: it counts as such, starts on a multiple
//! of 16 that is none of 64, cannot be registered, and is copied from and to in any way.
//!
//! After an error that ends a device, every call that touches it gives its code until the device is reset, and what was
//! queued never runs.
//!
//! A machine has two devices with 256 MiB each, on a host, unless commands (`control.rs`) say otherwise. [`Library`]
//! names older ones than today's, which lack some calls.

mod calls;
mod copies;

pub(crate) use calls::{note_error, symbol};

#[derive(Default)]
pub(crate) struct Own {
    /// The library is an older one.
    pub old: bool,
    /// The program runs on the device itself: `ACL_DEVICE`.
    pub on_device: bool,
    /// Each copy is of a whole segment, so that two of them keep the distance that segments have.
    pub whole_segments: bool,
    /// Copies that had not ended when their device was lost, by start and length on both sides: nothing says that they
    /// end then.
    pub late: Vec<[(usize, usize); 2]>,
}

// Error codes, by the names of the public headers without their prefix: the first five are acl's own, the others come
// from the runtime below it.
pub(crate) const INVALID_PARAM: u32 = 100_000;
pub(crate) const UNINITIALIZE: u32 = 100_001;
pub(crate) const REPEAT_INITIALIZE: u32 = 100_002;
pub(crate) const INVALID_FILE: u32 = 100_003;
pub(crate) const REPEAT_FINALIZE: u32 = 100_037;
pub(crate) const PARAM_INVALID: u32 = 107_000;
pub(crate) const INVALID_DEVICE: u32 = 107_001;
pub(crate) const CONTEXT_NULL: u32 = 107_002;
pub(crate) const STREAM_CONTEXT: u32 = 107_003;
pub(crate) const INVALID_HANDLE: u32 = 107_017;
pub(crate) const NOT_SUPPORTED: u32 = 207_000;
pub(crate) const MEMORY_ALLOCATION: u32 = 207_001;
pub(crate) const NO_DEVICE: u32 = 207_004;
pub(crate) const STREAM_SYNC_TIMEOUT: u32 = 507_046;
pub(crate) const DRIVER_INTERNAL: u32 = 507_899;
pub(crate) const ALREADY_REGISTERED: u32 = 507_910;
pub(crate) const NOT_REGISTERED: u32 = 507_911;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    Today,
    /// As of the beginning of 2024 (CANN 8.0): no memory can be registered.
    Of2024,
}

impl Library {
    /// The calls that it lacks.
    pub(crate) fn lacks(self) -> &'static [&'static str] {
        match self {
            Self::Today => &[],
            Self::Of2024 => &["aclrtHostRegister", "aclrtHostUnregister"],
        }
    }
}

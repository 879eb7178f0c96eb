//! The library's error codes: their classes, and texts for them.
//!
//! A code alone decides the class, so that one table says which errors are retried, which concern one call only, and
//! which end a device. Where the documentation leaves open whether a device lives on (a core's exception, a lost
//! heartbeat), it is taken for lost: then nothing that was in flight is used again, and the crate makes no further call
//! there.
//!
//! The library keeps a message for the last error of each thread (`aclGetRecentErrMsg`). A read removes it, and the
//! next error overwrites it. So it is read at once, before any other call on the thread.

use std::ffi::c_int;

use super::names::NAMES;
use crate::amount::Amount;
use crate::device::gate::Refused;
use crate::error::ErrorClass;
use crate::os;

/// What a call returned: `aclError`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct AclCode(pub c_int);

impl Refused for AclCode {
    fn refused() -> Self {
        Self::UNINITIALIZED
    }
}

impl AclCode {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const UNINITIALIZED: Self = Self(100_001);
    /// `aclInit` was called before in this process.
    pub(super) const REPEAT_INITIALIZE: Self = Self(100_002);
    /// Also the answer to an address or size that the device cannot work with.
    pub(super) const PARAM_INVALID: Self = Self(107_000);
    pub(super) const CONTEXT_NULL: Self = Self(107_002);
    /// The stream is of another context.
    pub(super) const STREAM_CONTEXT: Self = Self(107_003);
    pub(super) const NOT_SUPPORTED: Self = Self(207_000);
    pub(super) const MEMORY_ALLOCATION: Self = Self(207_001);
    pub(super) const NO_DEVICE: Self = Self(207_004);
    pub(super) const NO_EVENT_RESOURCE: Self = Self(207_007);
    pub(super) const DRV_INTERNAL: Self = Self(507_899);
    pub(super) const ALREADY_REGISTERED: Self = Self(507_910);

    /// The class of the error. A code that is not listed concerns the one call only.
    pub(super) fn class(self) -> ErrorClass {
        match self.0 {
            // Waits and tasks that timed out; memory of the host and the device, and the device's events, streams,
            // queues and other resources used up; the driver late; work that is not complete.
            107_019
            | 107_020
            | 200_000
            | 207_001
            | 207_005
            | 207_007..=207_012
            | 207_014
            | 207_018
            | 207_020 => ErrorClass::Transient,
            300_000 | 507_002 | 507_004 | 507_006 | 507_012 | 507_046 | 507_047 => ErrorClass::Transient,
            // Not initialised (any more), and no current context: a call that needs one has set it, so the program has
            // finalised the library or reset the device by force.
            100_001 | 107_002 => ErrorClass::DriverShutdown,
            107_024..=107_034 | 107_036 | 107_038 | 107_045 | 507_903 => ErrorClass::Capture,
            // Tasks of the device being aborted; the task scheduler, heartbeats, DMA; timeouts, exceptions and traps of
            // every kind of core; set-up; copies and messages between host and device; memory and links of the
            // hardware; the loss of the device's service.
            107_022 | 107_035 | 507_001 | 507_010 | 507_011 | 507_013..=507_018 | 507_033..=507_036 => {
                ErrorClass::DeviceLost
            }
            507_042..=507_045 | 507_048..=507_057 | 507_901 | 507_914..=507_916 => ErrorClass::DeviceLost,
            _ => ErrorClass::Argument,
        }
    }

    /// The code's name in the library's headers, if it has one there.
    pub(super) fn name(self) -> &'static str {
        let known = NAMES.binary_search_by_key(&self.0, |name| name.0);
        known.map_or("a code that the headers have no name for", |at| NAMES[at].1)
    }
}

/// The limits of host memory, for the message of an allocation that was refused (207001).
pub(super) fn host_memory_limits(wanted: usize) -> String {
    let shown =
        |bytes: Option<u64>, none: &str| bytes.map_or_else(|| none.to_owned(), |n| Amount(n).to_string());
    let available = shown(os::available_memory(), "an unknown amount");
    let memlock = shown(os::memlock_limit(), "unlimited");
    let wanted = Amount(wanted as u64);
    format!(
        "{wanted} of page-locked host memory were asked for; look at the host's memory ({available} available here: \
         MemAvailable, and memory.max of the container), the memlock limit ({memlock}: ulimit -l, LimitMEMLOCK), the \
         container's access to the driver, and the size of a single allocation, since some 200 GB in one piece are known to \
         be refused whatever is free (PoolBuilder::extent makes them smaller)"
    )
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_code_has_its_class() {
        let class = |code| AclCode(code).class();
        for code in
            [100_000, 107_000, 107_001, 107_003, 107_017, 207_000, 207_002, 507_000, 507_899, 507_910, -1, 7]
        {
            assert_eq!(class(code), ErrorClass::Argument, "{code}");
        }
        for code in [207_001, 207_007, 207_008, 207_018, 507_002, 507_006, 507_046, 507_047] {
            assert_eq!(class(code), ErrorClass::Transient, "{code}");
        }
        for code in [507_001, 507_010, 507_013, 507_015, 507_035, 507_053, 507_054, 507_056, 507_901] {
            assert_eq!(class(code), ErrorClass::DeviceLost, "{code}");
        }
        for code in [107_024, 107_027, 107_028, 107_030, 507_903] {
            assert_eq!(class(code), ErrorClass::Capture, "{code}");
        }
        for code in [100_001, 107_002] {
            assert_eq!(class(code), ErrorClass::DriverShutdown, "{code}");
        }
    }

    #[test]
    fn codes_have_their_names() {
        assert!(NAMES.is_sorted_by(|a, b| a.0 < b.0), "looked up by bisection");
        for (code, name) in [
            (100_002, "ACL_ERROR_REPEAT_INITIALIZE"),
            (107_002, "ACL_ERROR_RT_CONTEXT_NULL"),
            (207_001, "ACL_ERROR_RT_MEMORY_ALLOCATION"),
            (507_899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR"),
        ] {
            assert_eq!(AclCode(code).name(), name);
        }
        assert!(AclCode(1).name().contains("no name"));
    }

    #[test]
    fn refused_host_memory_names_its_limits() {
        let text = host_memory_limits(4096);
        for part in ["4 KiB", "memory.max", "ulimit -l", "200 GB", "PoolBuilder::extent"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

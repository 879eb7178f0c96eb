//! The library's error codes: their classes, and texts for them.
//!
//! A code alone decides the class, so that one table says which errors are retried, which concern
//! one call only, and which end a device. Where the documentation leaves open whether a device
//! lives on (a core's exception, a lost heartbeat), it is taken for lost: then nothing that was in
//! flight is used again, and the crate makes no further call there.
//!
//! The library keeps a message for the last error of each thread (`aclGetRecentErrMsg`), which a
//! read removes and the next error overwrites. So it is read at once, before any other call.

use std::ffi::c_int;

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
    pub(super) const DRV_INTERNAL: Self = Self(507_899);
    pub(super) const ALREADY_REGISTERED: Self = Self(507_910);

    /// The class of the error. A code that is not listed concerns the one call only.
    pub(super) fn class(self) -> ErrorClass {
        match self.0 {
            // Waits and tasks that timed out; memory of the host and the device, events, streams,
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
            // Not initialised (any more), and no current context: a call that needs one has set it,
            // so the program has finalised the library or reset the device by force.
            100_001 | 107_002 => ErrorClass::DriverShutdown,
            107_024..=107_034 | 107_036 | 107_038 | 107_045 | 507_903 => ErrorClass::Capture,
            // Tasks of the device being aborted; the task scheduler, heartbeats, DMA; timeouts,
            // exceptions and traps of every kind of core; set-up; copies and messages between host
            // and device; memory and links of the hardware; the loss of the device's service.
            107_022 | 107_035 | 507_001 | 507_010 | 507_011 | 507_013..=507_018 | 507_033..=507_036 => {
                ErrorClass::DeviceLost
            }
            507_042..=507_045 | 507_048..=507_057 | 507_901 | 507_914..=507_916 => ErrorClass::DeviceLost,
            _ => ErrorClass::Argument,
        }
    }

    /// The code's name in the library's headers, for codes that its runtime is known to return.
    pub(super) fn name(self) -> &'static str {
        NAMES.iter().find(|name| name.0 == self.0).map_or("a code that has no name here", |name| name.1)
    }
}

/// As `acl_base_rt.h` and `error_codes/rt_error_codes.h` have them (CANN 8.5 to 9.2). The library
/// has no call that names a code, and its own message may be missing.
#[rustfmt::skip]
const NAMES: &[(c_int, &str)] = &[
    (100_001, "ACL_ERROR_UNINITIALIZE"),
    (100_002, "ACL_ERROR_REPEAT_INITIALIZE"),
    (107_000, "ACL_ERROR_RT_PARAM_INVALID"),
    (107_001, "ACL_ERROR_RT_INVALID_DEVICEID"),
    (107_002, "ACL_ERROR_RT_CONTEXT_NULL"),
    (107_003, "ACL_ERROR_RT_STREAM_CONTEXT"),
    (107_019, "ACL_ERROR_RT_WAIT_TIMEOUT"),
    (107_020, "ACL_ERROR_RT_TASK_TIMEOUT"),
    (107_022, "ACL_ERROR_RT_DEVICE_TASK_ABORT"),
    (207_000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT"),
    (207_001, "ACL_ERROR_RT_MEMORY_ALLOCATION"),
    (207_004, "ACL_ERROR_RT_NO_DEVICE"),
    (207_005, "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL"),
    (207_007, "ACL_ERROR_RT_NO_EVENT_RESOURCE"),
    (207_008, "ACL_ERROR_RT_NO_STREAM_RESOURCE"),
    (207_018, "ACL_ERROR_RT_DEVICE_OOM"),
    (507_000, "ACL_ERROR_RT_INTERNAL_ERROR"),
    (507_001, "ACL_ERROR_RT_TS_ERROR"),
    (507_010, "ACL_ERROR_RT_LOST_HEARTBEAT"),
    (507_013, "ACL_ERROR_RT_SYS_DMA"),
    (507_014, "ACL_ERROR_RT_AICORE_TIMEOUT"),
    (507_015, "ACL_ERROR_RT_AICORE_EXCEPTION"),
    (507_018, "ACL_ERROR_RT_AICPU_EXCEPTION"),
    (507_033, "ACL_ERROR_RT_DEV_SETUP_ERROR"),
    (507_035, "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION"),
    (507_046, "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT"),
    (507_047, "ACL_ERROR_RT_EVENT_SYNC_TIMEOUT"),
    (507_053, "ACL_ERROR_RT_DEVICE_MEM_ERROR"),
    (507_054, "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR"),
    (507_056, "ACL_ERROR_RT_LINK_ERROR"),
    (507_899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR"),
    (507_910, "ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
];

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
        for (class, codes) in [
            (
                ErrorClass::Argument,
                &[100_000, 107_000, 107_003, 207_000, 207_002, 507_000, 507_899, 507_910, -1][..],
            ),
            (
                ErrorClass::Transient,
                &[207_001, 207_007, 207_008, 207_018, 507_002, 507_006, 507_046, 507_047],
            ),
            (
                ErrorClass::DeviceLost,
                &[507_001, 507_010, 507_013, 507_015, 507_035, 507_053, 507_056, 507_901],
            ),
            (ErrorClass::Capture, &[107_024, 107_027, 107_028, 107_030, 507_903]),
            (ErrorClass::DriverShutdown, &[100_001, 107_002]),
        ] {
            codes.iter().for_each(|code| assert_eq!(AclCode(*code).class(), class, "{code}"));
        }
    }
}

//! Error codes, by the names of the public headers without their prefix: the first six are acl's own, the others come
//! from the runtime below it.

pub const INVALID_PARAM: u32 = 100_000;
pub const UNINITIALIZE: u32 = 100_001;
pub const REPEAT_INITIALIZE: u32 = 100_002;
pub const INVALID_FILE: u32 = 100_003;
pub const REPEAT_FINALIZE: u32 = 100_037;

pub const PARAM_INVALID: u32 = 107_000;
pub const INVALID_DEVICE: u32 = 107_001;
pub const CONTEXT_NULL: u32 = 107_002;
pub const STREAM_CONTEXT: u32 = 107_003;
pub const INVALID_HANDLE: u32 = 107_017;
pub const NOT_SUPPORTED: u32 = 207_000;
pub const MEMORY_ALLOCATION: u32 = 207_001;
pub const NO_DEVICE: u32 = 207_004;
pub const NO_STREAM_RESOURCE: u32 = 207_008;
pub const STREAM_SYNC_TIMEOUT: u32 = 507_046;
pub const DRIVER_INTERNAL: u32 = 507_899;
pub const ALREADY_REGISTERED: u32 = 507_910;
pub const NOT_REGISTERED: u32 = 507_911;

/// Codes after which a device is of no use any more: lost heartbeat; timeouts and exceptions of its cores; memory
/// errors; its channel closed.
pub fn is_device_lost(code: u32) -> bool {
    matches!(code, 507_010 | 507_014..=507_018 | 507_034..=507_036 | 507_042..=507_045 | 507_053..=507_057 | 507_901)
}

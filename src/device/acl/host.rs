//! Host memory: allocated by the library, registered with it, and a list of what is page-locked.
//!
//! # Allocating
//!
//! `aclrtMallocHost` promises a start on a multiple of 64 bytes, and not even that in RC mode (the
//! program runs on the device). The pool wants whole pages. So an allocation that does not start on
//! a page is made again with a page more, and so are all later ones, and in RC mode the first.
//!
//! # Registering
//!
//! `aclrtHostRegister` takes whole pages of 4 KiB, and refuses a registered one. Values start and
//! end anywhere: their whole pages are registered, and one on another's page is refused.
//!
//! # What is page-locked
//!
//! Some versions take an asynchronous copy of pageable memory (CANN 7 and 8: "unpredictable errors"
//! when it runs). So this module lists all memory that the crate has page-locked, for all devices
//! of the process, and copies of other memory are never asynchronous.
//!
//! # Freeing
//!
//! `aclrtFreeHost` waits for no work, and has been seen to fail just after an event said that the
//! last copy was complete. So every open device is drained first, by the device's region thread.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::locks::Mutex;

use super::Acl;
use super::api::AclContext;
use super::error::{AclCode, host_memory_limits};
use crate::device::vendor::advise;
use crate::error::{Error, ErrorClass, Result};

/// `aclrtHostRegister` takes pages of this size, with system pages of any size.
pub(super) const REGISTER_PAGE: usize = 4096;
/// How often a failed wait is repeated. The pauses double, and sum to half a second.
const OPEN_TRIES: u32 = 9;
/// acl_rt.h: aclrtHostRegisterType's ACL_HOST_REGISTER_MAPPED; the others are reserved.
pub(super) const REGISTER_MAPPED: c_int = 0;

/// Page-locked memory of this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct LockedMemory {
    pub(super) len: usize,
    /// What the library has locked, `from..to`: the memory, and what lies around it.
    pub(super) from: usize,
    pub(super) to: usize,
    /// The device that it was registered with and the address of its start there, if that device
    /// has an address of its own for it.
    pub(super) device: Option<(i32, u64)>,
}

/// All page-locked memory, by its first byte. No two entries overlap.
pub(super) static LOCKED: Mutex<BTreeMap<usize, LockedMemory>> = Mutex::new(BTreeMap::new());

/// The drivers of devices that are open, to be drained before host memory is freed.
static OPEN_DEVICES: Mutex<Vec<Weak<Acl>>> = Mutex::new(Vec::new());

/// From here on the device is drained before host memory is freed, for as long as it is open.
pub(super) fn opened(driver: &Arc<Acl>) {
    let mut open = OPEN_DEVICES.lock();
    open.retain(|driver| driver.strong_count() > 0);
    open.push(Arc::downgrade(driver));
}

/// From here on no other device's thread drains it. Waits for one that does so now: the lock is held
/// for those calls alone, which need the context.
pub(super) fn closed(driver: &Acl) {
    OPEN_DEVICES.lock().retain(|other| !std::ptr::eq(other.as_ptr(), driver));
    *driver.is_over.lock() = true;
}

fn open_devices() -> Vec<Arc<Acl>> {
    OPEN_DEVICES.lock().iter().filter_map(Weak::upgrade).collect()
}

/// Whether this is the default context of a device that is open.
pub(super) fn is_default(context: AclContext) -> bool {
    open_devices().iter().any(|driver| driver.default && driver.context == context)
}

/// The page-locked memory that all of a range lies in: its first byte, and what it is.
pub(super) fn locked(at: usize, len: usize) -> Option<(usize, LockedMemory)> {
    let all = LOCKED.lock();
    let (&start, &found) = all.range(..=at).next_back()?;
    let left = found.len.checked_sub(at - start)?;
    (len <= left).then_some((start, found))
}

impl Acl {
    pub(super) fn host_malloc(&self, len: usize) -> Result<NonNull<u8>> {
        let _current = self.current()?;
        let mut at = std::ptr::null_mut();
        // SAFETY: writes an address.
        let code = unsafe { self.api.host_malloc.call(&raw mut at, len) };
        self.said("aclrtMallocHost", code).map_err(|error| match code {
            AclCode::MEMORY_ALLOCATION => advise(error, &host_memory_limits(len)),
            _ => error,
        })?;
        let none = || Error::OutOfMemory { wanted: len, text: "aclrtMallocHost gave no address".into() };
        NonNull::new(at.cast()).ok_or_else(none)
    }

    /// What is page-locked from this byte on.
    pub(super) fn host_locked(&self, base: NonNull<u8>) -> Result<LockedMemory> {
        let found = LOCKED.lock().get(&base.as_ptr().addr()).copied();
        found.ok_or_else(|| Error::Unsupported(format!("{}: no page-locked memory starts there", self.name)))
    }

    /// # Safety
    /// Allocated once, freed once, and not in use; at the address that the library gave.
    pub(super) unsafe fn host_free_at(&self, at: NonNull<u8>) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the caller promises: allocated by the library, freed once, unused.
        self.said("aclrtFreeHost", unsafe { self.api.host_free.call(at.as_ptr().cast()) })
    }

    /// Waits until no device of this library has anything to do, but not for a lost one: what was
    /// in flight there is quarantined, and so is never freed.
    pub(super) fn drain_all(&self) -> Result<()> {
        self.drained_in_the_end()?;
        let is_other =
            |other: &&Arc<Self>| std::ptr::eq(other.api, self.api) && other.context != self.context;
        for other in open_devices().iter().filter(is_other).filter(|other| other.lost.get().is_none()) {
            let is_over = other.is_over.lock();
            if *is_over {
                continue;
            }
            // A device that was lost during the wait is no obstacle.
            other
                .drained_in_the_end()
                .or_else(|error| if error.is_device_lost() { Ok(()) } else { Err(error) })?;
        }
        Ok(())
    }

    /// Waits until the device has nothing to do, and tries again after a refusal: memory that is
    /// not freed now is leaked.
    fn drained_in_the_end(&self) -> Result<()> {
        for attempt in 0..OPEN_TRIES {
            match self.drained() {
                Err(error) if matches!(error.class(), ErrorClass::Transient | ErrorClass::Capture) => {
                    std::thread::sleep(Duration::from_millis(1 << attempt));
                }
                end => return end,
            }
        }
        self.drained()
    }
}

/// A refusal to register, with its remedy.
pub(super) fn refused(code: AclCode, error: Error) -> Error {
    let needs = "registering needs an Atlas A2, A3 or 950, a driver of 24.1 or later, a Linux after 5.10, and in containers \
                 more rights; without it copy by way of a pool with Backing::HostAlloc";
    match code {
        AclCode::ALREADY_REGISTERED => advise(
            error,
            "a part of it is registered already, by this crate or another library: register it once and share the value \
             (Arc), or copy by way of a pool's buffer",
        ),
        // This device or driver cannot register memory at all.
        AclCode::NOT_SUPPORTED => Error::Unsupported(format!("{error}; {needs}")),
        AclCode::DRV_INTERNAL | AclCode::PARAM_INVALID => advise(error, needs),
        AclCode::MEMORY_ALLOCATION => advise(error, "the host's memory, or its memlock limit, is used up"),
        _ => error,
    }
}

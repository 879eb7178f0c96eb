//! Host memory: allocated by the library, registered with it, and a list of what is page-locked.
//!
//! # Allocating
//!
//! `aclrtMallocHost` gives page-locked memory on every Ascend device and with every version, so pools take their memory
//! from it by default. It promises a start on a multiple of 64 bytes, and in RC mode (the program runs on the device,
//! whose memory is the host's) not even that. The pool wants whole pages. So an allocation that does not start on a
//! page is made again with a page more, and so are all later ones; in RC mode the first one too. Segments start on
//! multiples of 64, and are 32 bytes and rounding longer than what is asked for: that is the vendor's rule for memory
//! that is cut up (documentation of aclrtMallocHost).
//!
//! # Registering
//!
//! `aclrtHostRegister` takes whole pages of 4 KiB only, and refuses a page that is registered. Values start and end
//! anywhere, so the pages around their ends are registered with them, and a value on a page of another one is refused.
//! There is no registration for reading only, and memory that is mapped read-only is refused.
//!
//! # What is page-locked
//!
//! An asynchronous copy of pageable memory is not refused by every version (CANN 7 and 8: "unpredictable errors" when
//! it runs). So this module lists all memory that the crate has page-locked, for all devices of the process together,
//! and copies of other memory are never asynchronous. Every copy reads the list; it changes with regions and
//! registrations only.
//!
//! # Freeing
//!
//! `aclrtFreeHost` waits for no work, and has been seen to fail just after an event said that the last copy was
//! complete. So every open device is drained first. The device's region thread does that, and it can take as long as
//! the work that is queued there.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::locks::Mutex;

use super::Acl;
use super::api::AclContext;
use super::error::{AclCode, host_memory_limits};
use crate::device::vendor::advise;
use crate::error::{Error, ErrorClass, Result};
use crate::os;

/// `aclrtHostRegister` takes pages of this size, with system pages of any size.
const REGISTER_PAGE: usize = 4096;
/// How often a wait that failed is repeated before memory is freed. The pauses double, and sum to half a second.
const OPEN_TRIES: u32 = 9;
/// acl_rt.h: aclrtHostRegisterType's ACL_HOST_REGISTER_MAPPED; the others are reserved.
const REGISTER_MAPPED: c_int = 0;

/// Page-locked memory of this process.
#[derive(Clone, Copy, Debug)]
struct LockedMemory {
    len: usize,
    /// What the library has locked, `from..to`: the memory, and what lies around it.
    from: usize,
    to: usize,
    /// The device that it was registered with, if that has an address of its own for its start, and the address.
    device: Option<(i32, u64)>,
}

/// All page-locked memory, by its first byte. No two entries overlap.
static LOCKED: Mutex<BTreeMap<usize, LockedMemory>> = Mutex::new(BTreeMap::new());

/// The drivers of devices that are open, to be drained before host memory is freed.
static OPEN_DEVICES: Mutex<Vec<Weak<Acl>>> = Mutex::new(Vec::new());

/// From here on the device is drained before host memory is freed, for as long as it is open.
pub(super) fn opened(driver: &Arc<Acl>) {
    let mut open = OPEN_DEVICES.lock();
    open.retain(|driver| driver.strong_count() > 0);
    open.push(Arc::downgrade(driver));
}

fn open_devices() -> Vec<Arc<Acl>> {
    OPEN_DEVICES.lock().iter().filter_map(Weak::upgrade).collect()
}

/// Whether this is the default context of a device that is open.
pub(super) fn is_default(context: AclContext) -> bool {
    open_devices().iter().any(|driver| driver.default && driver.context == context)
}

/// The page-locked memory that a range lies in: its first byte, and what it is.
fn locked(at: usize, len: usize) -> Option<(usize, LockedMemory)> {
    let all = LOCKED.lock();
    let (&start, &found) = all.range(..=at).next_back()?;
    let left = found.len.checked_sub(at - start)?;
    (len <= left).then_some((start, found))
}

/// Whether a range is page-locked, all of it in one piece.
pub(super) fn is_locked(at: *const u8, len: usize) -> bool {
    locked(at.addr(), len).is_some()
}

impl Acl {
    pub(super) fn host_allocate(&self, len: usize) -> Result<NonNull<u8>> {
        let page = os::page_size();
        // Relaxed, here and below: a thread that reads an old value makes one more call.
        let mut all = if self.pads.load(Ordering::Relaxed) { len.saturating_add(page) } else { len };
        let mut at = self.host_malloc(all)?;
        if all == len && at.as_ptr().addr() % page != 0 {
            self.pads.store(true, Ordering::Relaxed);
            // SAFETY: allocated just now, and not in use.
            unsafe { self.host_free_at(at) }.inspect_err(|_| self.leaked())?;
            all = len.saturating_add(page);
            at = self.host_malloc(all)?;
        }
        let from = at.as_ptr().expose_provenance();
        let front = from.next_multiple_of(page) - from;
        // SAFETY: `front` is less than a page, and where it is not 0 the allocation has a page more than was asked for.
        let base = unsafe { at.add(front) };
        let entry = LockedMemory { len, from, to: from + all, device: None };
        LOCKED.lock().insert(base.as_ptr().addr(), entry);
        Ok(base)
    }

    fn host_malloc(&self, len: usize) -> Result<NonNull<u8>> {
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
    fn host_locked(&self, base: NonNull<u8>) -> Result<LockedMemory> {
        let found = LOCKED.lock().get(&base.as_ptr().addr()).copied();
        found.ok_or_else(|| Error::Unsupported(format!("{}: no page-locked memory starts there", self.name)))
    }

    /// # Safety
    /// Allocated once, freed once, and not in use.
    pub(super) unsafe fn host_free(&self, base: NonNull<u8>) -> Result<()> {
        let found = self.host_locked(base)?;
        self.drain_all()?;
        // Before the call: another thread may be given the same addresses at once.
        LOCKED.lock().remove(&base.as_ptr().addr());
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(found.from)).unwrap_or(base);
        // SAFETY: the caller's promise, and `start` is the address that the library gave.
        unsafe { self.host_free_at(start) }.inspect_err(|_| {
            // The memory stays, and stays page-locked.
            LOCKED.lock().insert(base.as_ptr().addr(), found);
        })
    }

    /// # Safety
    /// As for `host_free`, with the address that the library gave.
    unsafe fn host_free_at(&self, at: NonNull<u8>) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the caller promises that the library allocated it, that it is freed once, and that it is not in use.
        self.said("aclrtFreeHost", unsafe { self.api.host_free.call(at.as_ptr().cast()) })
    }

    /// Waits until no device of this library has anything to do, but not for a lost one: what was in flight there is
    /// quarantined, and so is never freed.
    fn drain_all(&self) -> Result<()> {
        self.drained_in_the_end()?;
        let mut open = open_devices();
        open.retain(|other| std::ptr::eq(other.api, self.api) && other.context != self.context);
        let mut others = open.iter().filter(|other| other.lost.get().is_none());
        others.try_for_each(|other| match other.drained_in_the_end() {
            // The device was lost during the wait.
            Err(error) if error.is_device_lost() => Ok(()),
            drained => drained,
        })
    }

    /// Waits until the device has nothing to do, and tries again after a refusal: memory that is not freed now is
    /// leaked.
    fn drained_in_the_end(&self) -> Result<()> {
        let passing = |error: &Error| matches!(error.class(), ErrorClass::Transient | ErrorClass::Capture);
        for attempt in 0..OPEN_TRIES {
            match self.drained() {
                Err(error) if passing(&error) => std::thread::sleep(Duration::from_millis(1 << attempt)),
                end => return end,
            }
        }
        self.drained()
    }

    /// # Safety
    /// The range is mapped, and stays so until it is unregistered.
    pub(super) unsafe fn host_register(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        let unsupported = |why: String| Err(Error::Unsupported(format!("{}: {why}", self.name)));
        let (Some(register), Some(_)) = (self.api.host_register, self.api.host_unregister) else {
            return unsupported(
                "this libascendcl.so has no aclrtHostRegister (CANN 8.2 and later do), so memory that it did not allocate \
                 cannot be page-locked; copy by way of a pool with Backing::HostAlloc"
                    .into(),
            );
        };
        let start = base.as_ptr().addr();
        let end = start.checked_add(len).filter(|end| *end <= usize::MAX - REGISTER_PAGE);
        let Some(end) = end else { return Err(Error::out_of_range(start, usize::MAX, len)) };
        let (from, to) = (start / REGISTER_PAGE * REGISTER_PAGE, end.next_multiple_of(REGISTER_PAGE));
        if LOCKED.lock().values().any(|found| found.from < to && from < found.to) {
            return unsupported(format!(
                "a page of {REGISTER_PAGE} bytes under this memory is page-locked already, and Ascend registers whole pages, \
                 once: register it once and share the value (Arc), start it on a page of its own, or copy by way of a pool's \
                 buffer"
            ));
        }
        if os::is_writable(from, to - from) == Some(false) {
            return unsupported(
                "this memory cannot be written to, and Ascend registers no memory that its process cannot write: copy by way \
                 of a pool's buffer, or map it privately and for writing"
                    .into(),
            );
        }
        let pages = base.as_ptr().map_addr(|_| from);
        let mut device = std::ptr::null_mut();
        let _current = self.current()?;
        // SAFETY: the caller promises the range; the rest of the pages at both ends is mapped, since a system page is
        // mapped as a whole.
        let code =
            unsafe { register.call(pages.cast(), (to - from) as u64, REGISTER_MAPPED, &raw mut device) };
        self.said("aclrtHostRegister", code).map_err(|error| refused(code, error))?;
        let of_start = device.addr() as u64 + (start - from) as u64;
        let device = (!device.is_null()).then_some((self.ordinal, of_start));
        LOCKED.lock().insert(start, LockedMemory { len, from, to, device });
        Ok(())
    }

    /// # Safety
    /// Registered once, unregistered once, and no copy uses it.
    pub(super) unsafe fn host_unregister(&self, base: NonNull<u8>) -> Result<()> {
        let (found, Some(unregister)) = (self.host_locked(base)?, self.api.host_unregister) else {
            return Err(Error::Unsupported(format!("{} registers no memory", self.name)));
        };
        self.drain_all()?;
        let _current = self.current()?;
        let pages = base.as_ptr().map_addr(|_| found.from);
        // SAFETY: the caller promises that no copy uses it; `pages` is the address that was registered.
        self.said("aclrtHostUnregister", unsafe { unregister.call(pages.cast()) })?;
        // After the call: on an error the pages are still registered. The addresses are given to no other caller before
        // this returns.
        LOCKED.lock().remove(&base.as_ptr().addr());
        Ok(())
    }

    pub(super) fn host_device_address(&self, at: NonNull<u8>) -> Result<u64> {
        let _pass = self.alive()?;
        let address = at.as_ptr().addr();
        match locked(address, 1) {
            Some((start, LockedMemory { device: Some((ordinal, device)), .. }))
                if ordinal == self.ordinal =>
            {
                Ok(device + (address - start) as u64)
            }
            _ => Err(Error::Unsupported(format!(
                "{} has no address of its own for this memory: only what was registered with this very device has \
                 (Device::register, Pool::adopt, Backing::Registered); copy the buffer instead",
                self.name
            ))),
        }
    }
}

/// A refusal to register, with its remedy.
fn refused(code: AclCode, error: Error) -> Error {
    let old = os::kernel().filter(|kernel| *kernel <= (5, 10));
    let kernel = old.map_or_else(String::new, |(major, minor)| {
        format!(
            "; this is Linux {major}.{minor}, and up to 5.10 only memory of aclrtMallocHost can be registered"
        )
    });
    let needs = format!(
        "registering needs an Atlas A2, A3 or 950 and a driver of 24.1 or later, and in containers more rights{kernel}; without \
         it copy by way of a pool with Backing::HostAlloc"
    );
    match code {
        AclCode::ALREADY_REGISTERED => advise(
            error,
            "a part of it is registered already, by this crate or another library: register it once and share the value \
             (Arc), or copy by way of a pool's buffer",
        ),
        // This device or driver cannot register memory at all.
        AclCode::NOT_SUPPORTED => Error::Unsupported(format!("{error}; {needs}")),
        AclCode::DRV_INTERNAL | AclCode::PARAM_INVALID => advise(error, &needs),
        AclCode::MEMORY_ALLOCATION => advise(error, "the host's memory, or its memlock limit, is used up"),
        _ => error,
    }
}

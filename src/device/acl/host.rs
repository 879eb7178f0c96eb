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
//! Newer libraries have `aclrtMallocHostWithCfg`, which gives the memory one address for host and device (VA_FLAG). It
//! is tried first; drivers that do not support it return 207000.
//!
//! # Registering
//!
//! `aclrtHostRegister` takes whole pages of 4 KiB only, and refuses a page that is registered. Values start and end
//! anywhere, so the pages around their ends are registered with them, and a value on a page of another one is refused.
//! There is no registration for reading only, and memory that is mapped read-only is refused.
//!
//! Other values on those pages may be borrowed for a blocking copy, and then a part of the borrowed memory is
//! page-locked. The library looks up one address and takes all bytes of the copy to be of that kind. So such a copy is
//! made in pieces ([`cuts`]).
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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::locks::Mutex;

use super::api::{AclContext, MallocAttribute, MallocConfig};
use super::error::{AclCode, host_memory_limits};
use super::{Acl, advise};
use crate::error::{Error, ErrorClass, Result};
use crate::os;

/// `aclrtHostRegister` takes pages of this size, with system pages of any size.
const REGISTER_PAGE: usize = 4096;
/// How often a wait that failed is repeated before memory is freed. The pauses double, and sum to half a second.
const OPEN_TRIES: u32 = 9;
/// acl_rt.h: aclrtHostRegisterType's ACL_HOST_REGISTER_MAPPED; the others are reserved.
const REGISTER_MAPPED: c_int = 0;
/// acl_rt.h: aclrtMallocAttrType's ACL_RT_MEM_ATTR_VA_FLAG.
const VA_FLAG: c_int = 3;

/// Page-locked memory of this process.
#[derive(Clone, Copy, Debug)]
struct LockedMemory {
    len: usize,
    source: MemorySource,
}

#[derive(Clone, Copy, Debug)]
enum MemorySource {
    /// Allocated by the library, at this address.
    Allocated { at: usize },
    /// Registered, with the pages around it (`from..to`), for device `ordinal`, which sees its start at `device`.
    Registered { from: usize, to: usize, ordinal: i32, device: Option<u64> },
}

/// All page-locked memory, by its first byte. No two entries overlap.
static LOCKED: Mutex<BTreeMap<usize, LockedMemory>> = Mutex::new(BTreeMap::new());

/// The drivers of devices that are open, to be drained before host memory is freed.
static OPEN_DEVICES: Mutex<Vec<Weak<Acl>>> = Mutex::new(Vec::new());

/// What earlier allocations of a device have shown.
#[derive(Debug)]
pub(super) struct Host {
    /// Whether an allocation did not start on a page. All later ones are then made a page longer.
    pads: AtomicBool,
    /// Whether the driver cannot give one address for host and device (VA_FLAG).
    plain: AtomicBool,
}

impl Host {
    pub(super) fn new(on_device: bool) -> Self {
        Self { pads: on_device.into(), plain: false.into() }
    }
}

/// From here on the device is drained before host memory is freed, for as long as it is open.
pub(super) fn opened(driver: &Arc<Acl>) {
    let mut open = OPEN_DEVICES.lock();
    open.retain(|driver| driver.strong_count() > 0);
    open.push(Arc::downgrade(driver));
}

/// Whether this is the default context of a device that is open.
pub(super) fn is_default(context: AclContext) -> bool {
    let open: Vec<Arc<Acl>> = OPEN_DEVICES.lock().iter().filter_map(Weak::upgrade).collect();
    open.iter().any(|driver| driver.default && driver.context == context)
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

/// The places in a range where page-locked memory begins or ends, in bytes from the start, in order.
pub(super) fn cuts(at: *const u8, len: usize) -> Vec<usize> {
    let (at, end) = (at.addr(), at.addr() + len);
    let mut cuts = Vec::new();
    for (&start, found) in LOCKED.lock().range(..end) {
        let (from, to) = match found.source {
            MemorySource::Allocated { .. } => (start, start + found.len),
            MemorySource::Registered { from, to, .. } => (from, to),
        };
        cuts.extend([from, to].into_iter().filter(|edge| (at + 1..end).contains(edge)).map(|edge| edge - at));
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

impl Acl {
    pub(super) fn host_allocate(&self, len: usize) -> Result<NonNull<u8>> {
        let page = os::page_size();
        // Relaxed, here and below: a thread that reads an old value makes one more call.
        if !self.host.pads.load(Ordering::Relaxed) {
            let at = self.host_malloc(len)?;
            if at.as_ptr().addr() % page == 0 {
                LOCKED.lock().insert(
                    at.as_ptr().addr(),
                    LockedMemory {
                        len,
                        source: MemorySource::Allocated { at: at.as_ptr().expose_provenance() },
                    },
                );
                return Ok(at);
            }
            self.host.pads.store(true, Ordering::Relaxed);
            // SAFETY: allocated just now, and not in use.
            unsafe { self.host_free_at(at) }.inspect_err(|_| self.leaked())?;
        }
        let longer = len
            .checked_add(page)
            .ok_or_else(|| Error::OutOfMemory { wanted: len, text: "no allocation can be as long".into() })?;
        let at = self.host_malloc(longer)?;
        let front = at.as_ptr().addr().next_multiple_of(page) - at.as_ptr().addr();
        // SAFETY: `front` is less than a page, and the allocation has a page more than was asked for.
        let base = unsafe { at.add(front) };
        let source = MemorySource::Allocated { at: at.as_ptr().expose_provenance() };
        LOCKED.lock().insert(base.as_ptr().addr(), LockedMemory { len, source });
        Ok(base)
    }

    fn host_malloc(&self, len: usize) -> Result<NonNull<u8>> {
        let _current = self.current()?;
        let mut at = std::ptr::null_mut();
        let with_cfg = self.api.host_malloc_with_cfg.filter(|_| !self.host.plain.load(Ordering::Relaxed));
        let (mut call, mut code) = ("aclrtMallocHostWithCfg", AclCode::NOT_SUPPORTED);
        if let Some(allocate) = with_cfg {
            let mut one_address = MallocAttribute { attr: VA_FLAG, value: [1, 0] };
            let mut config = MallocConfig { attrs: &raw mut one_address, count: 1 };
            // SAFETY: writes an address; the configuration lives until the call returns.
            code = unsafe { allocate.call(&raw mut at, len as u64, &raw mut config) };
        }
        if code == AclCode::NOT_SUPPORTED {
            if with_cfg.is_some() {
                self.api.expected();
            }
            self.host.plain.store(true, Ordering::Relaxed);
            call = "aclrtMallocHost";
            // SAFETY: writes an address.
            code = unsafe { self.api.host_malloc.call(&raw mut at, len) };
        }
        self.said(call, code).map_err(|error| match code {
            AclCode::MEMORY_ALLOCATION => advise(error, &host_memory_limits(len)),
            _ => error,
        })?;
        NonNull::new(at.cast())
            .ok_or_else(|| Error::OutOfMemory { wanted: len, text: format!("{call} gave no address") })
    }

    /// # Safety
    /// Allocated once, freed once, and not in use.
    pub(super) unsafe fn host_free(&self, base: NonNull<u8>) -> Result<()> {
        let found = LOCKED.lock().get(&base.as_ptr().addr()).copied();
        let Some(LockedMemory { source: MemorySource::Allocated { at }, .. }) = found else {
            return Err(Error::Unsupported(format!(
                "{}: no memory of aclrtMallocHost starts there",
                self.name
            )));
        };
        self.drain_all()?;
        // Before the call: another thread may be given the same addresses at once.
        let entry = LOCKED.lock().remove(&base.as_ptr().addr());
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(at)).unwrap_or(base);
        // SAFETY: the caller's promise, and `start` is the address that the library gave.
        let freed = unsafe { self.host_free_at(start) };
        if let (Err(_), Some(entry)) = (&freed, entry) {
            // The memory stays, and stays page-locked.
            LOCKED.lock().insert(base.as_ptr().addr(), entry);
        }
        freed
    }

    /// # Safety
    /// As for `host_free`, with the address that the library gave.
    unsafe fn host_free_at(&self, at: NonNull<u8>) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the caller promises that the library allocated it, that it is freed once, and that it is not in use.
        self.said("aclrtFreeHost", unsafe { self.api.host_free.call(at.as_ptr().cast()) })
    }

    /// Waits until no device of this process has anything to do, but not for a lost one: what was in flight there is
    /// quarantined, and so is never freed.
    fn drain_all(&self) -> Result<()> {
        self.drained_in_the_end()?;
        let open: Vec<Arc<Self>> = OPEN_DEVICES.lock().iter().filter_map(Weak::upgrade).collect();
        let mut others =
            open.iter().filter(|other| other.context != self.context && other.lost.get().is_none());
        others.try_for_each(|other| match other.drained_in_the_end() {
            // The device was lost during the wait.
            Err(error) if error.is_device_lost() => Ok(()),
            drained => drained,
        })
    }

    /// Waits until the device has nothing to do, and tries again after a refusal: memory that is not freed now is
    /// leaked.
    fn drained_in_the_end(&self) -> Result<()> {
        let mut attempt = 0;
        loop {
            match self.drained() {
                Err(error)
                    if matches!(error.class(), ErrorClass::Transient | ErrorClass::Capture)
                        && attempt < OPEN_TRIES =>
                {
                    std::thread::sleep(Duration::from_millis(1 << attempt));
                    attempt += 1;
                }
                end => return end,
            }
        }
    }

    /// # Safety
    /// The range is mapped, and stays so until it is unregistered.
    pub(super) unsafe fn host_register(&self, base: NonNull<u8>, len: usize, read_only: bool) -> Result<()> {
        let (Some(register), Some(_)) = (self.api.host_register, self.api.host_unregister) else {
            return Err(Error::Unsupported(format!(
                "{}: this libascendcl.so has no aclrtHostRegister (CANN 8.2 and later do), so memory that it did not allocate \
                 cannot be page-locked; copy by way of a pool with Backing::HostAlloc",
                self.name
            )));
        };
        let start = base.as_ptr().addr();
        let end = start.checked_add(len).filter(|end| *end <= usize::MAX - REGISTER_PAGE);
        let Some(end) = end else { return Err(Error::out_of_range(start, usize::MAX, len)) };
        let (from, to) = (start / REGISTER_PAGE * REGISTER_PAGE, end.next_multiple_of(REGISTER_PAGE));
        let overlaps = |at: &usize, found: &LockedMemory| match found.source {
            MemorySource::Registered { from: a, to: b, .. } => a < to && from < b,
            MemorySource::Allocated { .. } => *at < to && from < *at + found.len,
        };
        if LOCKED.lock().iter().any(|(at, found)| overlaps(at, found)) {
            return Err(Error::Unsupported(format!(
                "{}: a page of {REGISTER_PAGE} bytes under this memory is page-locked already, and Ascend registers whole pages, \
                 once: register it once and share the value (Arc), start it on a page of its own, or copy by way of a pool's \
                 buffer",
                self.name
            )));
        }
        if os::is_writable(from, to - from) == Some(false) {
            let what = if read_only { "only reads" } else { "can write" };
            return Err(Error::Unsupported(format!(
                "{}: this memory cannot be written to, and Ascend has no registration for memory that a device {what} but its \
                 process cannot: copy by way of a pool's buffer, or map it privately and for writing",
                self.name
            )));
        }
        let pages = base.as_ptr().map_addr(|_| from);
        let mut device = std::ptr::null_mut();
        {
            let _current = self.current()?;
            // SAFETY: the caller promises the range; the rest of the pages at both ends is mapped, since a system page
            // is mapped as a whole.
            let code =
                unsafe { register.call(pages.cast(), (to - from) as u64, REGISTER_MAPPED, &raw mut device) };
            self.said("aclrtHostRegister", code).map_err(|error| refused(code, error))?;
        }
        let device = (!device.is_null()).then(|| device.addr() as u64 + (start - from) as u64);
        let source = MemorySource::Registered { from, to, ordinal: self.ordinal, device };
        LOCKED.lock().insert(start, LockedMemory { len, source });
        Ok(())
    }

    /// # Safety
    /// Registered once, unregistered once, and no copy uses it.
    pub(super) unsafe fn host_unregister(&self, base: NonNull<u8>) -> Result<()> {
        let found = LOCKED.lock().get(&base.as_ptr().addr()).copied();
        let (Some(unregister), Some(LockedMemory { source: MemorySource::Registered { from, .. }, .. })) =
            (self.api.host_unregister, found)
        else {
            return Err(Error::Unsupported(format!("{}: nothing was registered there", self.name)));
        };
        self.drain_all()?;
        {
            let _current = self.current()?;
            let pages = base.as_ptr().map_addr(|_| from);
            // SAFETY: the caller promises that no copy uses it; `pages` is the address that was registered.
            self.said("aclrtHostUnregister", unsafe { unregister.call(pages.cast()) })?;
        }
        // After the call: on an error the pages are still registered. The addresses are given to no other caller before
        // this returns.
        LOCKED.lock().remove(&base.as_ptr().addr());
        Ok(())
    }

    pub(super) fn host_device_address(&self, at: NonNull<u8>) -> Result<u64> {
        let _pass = self.alive()?;
        let address = at.as_ptr().addr();
        match locked(address, 1) {
            Some((
                start,
                LockedMemory {
                    source: MemorySource::Registered { ordinal, device: Some(device), .. }, ..
                },
            )) if ordinal == self.ordinal => Ok(device + (address - start) as u64),
            _ => Err(Error::Unsupported(format!(
                "{} has no address of its own for this memory: only what was registered with this very device has \
                 (Device::register, Pool::adopt, Backing::Registered); copy the buffer instead",
                self.name
            ))),
        }
    }

    /// # Safety
    /// The range can be written, and nothing else uses it.
    pub(super) unsafe fn host_zero(&self, at: NonNull<u8>, len: usize) -> Result<()> {
        // In RC mode page-locked memory is the device's too, and the library writes it. Elsewhere the CPU does.
        if !self.on_device || !is_locked(at.as_ptr(), len) {
            // SAFETY: the caller promises that the range can be written and is not in use.
            unsafe { at.write_bytes(0, len) };
            return Ok(());
        }
        let _current = self.current()?;
        // SAFETY: the caller promises that the range can be written and is not in use.
        self.said("aclrtMemset", unsafe { self.api.memset.call(at.as_ptr().cast(), len, 0, len) })
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

//! The contract's calls ([`Driver`]). Each passes the fault book and the check for a dead device, and checks its
//! arguments. What a call queues is run by the stream ([`super::stream`]).

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(all(test, not(loom)))]
use super::HostConfig;
#[cfg(all(test, not(loom)))]
use super::fault::Hook;
use super::fault::{Call, Failure};
use super::memory::HostPlace;
use super::node::{HostNode, Node};
use super::stream::{HostKernel, Promise, StreamJob, StreamTicket, StreamWork};
use super::unit::HostUnit;
use super::{HostFunction, Refusal};
use crate::device::address::AddressFault;
use crate::device::ending::Ending;
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, Stepped, StreamHandle, Transfer};
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Owned;
use crate::os;

/// Numbers drivers. Each stream has the number of the driver that created it.
static DRIVERS: AtomicU64 = AtomicU64::new(1);

/// One opening of a device, as the rest of the crate sees it. When it is dropped, streams that were not destroyed end
/// without running what they have queued.
pub(crate) struct HostDriver {
    node: Arc<Node>,
    unit: Arc<HostUnit>,
    id: u64,
    /// Dropped when all streams have ended.
    ending: Ending,
}

/// What an armed fault does to a call that goes ahead.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Twist {
    None,
    /// The operation that it queues stalls.
    Stall,
    /// The operation is queued, and the call fails all the same.
    FailAfter,
}

impl HostNode {
    /// A driver of one device, for one opening of it. It ends when that is closed.
    pub(crate) fn driver(&self, ordinal: u32) -> Result<Arc<dyn Driver>> {
        let Some(unit) = self.0.unit(ordinal) else {
            let known = match self.devices() {
                1 => "this node has host:0 only".to_owned(),
                n => format!("this node has host:0 to host:{}", n - 1),
            };
            return Err(Error::UnknownDevice { name: format!("host:{ordinal}"), known });
        };
        let (node, unit) = (Arc::clone(&self.0), Arc::clone(unit));
        let id = DRIVERS.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(HostDriver { node, unit, id, ending: Ending::new() }))
    }
}

#[cfg(all(test, not(loom)))]
impl HostNode {
    /// Calls `hook` before each call of a device of the node.
    pub(crate) fn hook(&self, hook: impl Fn(Call) + Send + Sync + 'static) {
        assert!(self.0.faults.hook.set(Hook(Box::new(hook))).is_ok(), "the node has a hook");
    }

    /// The driver of a device with this name.
    pub(crate) fn named(&self, name: &str) -> Arc<dyn Driver> {
        let config = HostConfig::new();
        let mut unit = HostUnit::new(0, config.capacity(), &config);
        Arc::get_mut(&mut unit).unwrap().name = name.into();
        Arc::new(HostDriver { node: self.0.clone(), unit, id: 0, ending: Ending::new() })
    }
}

impl HostDriver {
    fn error(&self, call: Call, refusal: Refusal) -> Error {
        self.unit.error(call, refusal)
    }

    /// Every call begins with this.
    #[inline]
    fn enter(&self, call: Call) -> Result<Twist> {
        let failure = self.node.faults.on_call(self.unit.ordinal, call);
        // A dead device still gives back what it was given.
        if !matches!(call, Call::Unpin | Call::Free | Call::FreeHost) {
            self.unit.check(call)?;
        }
        match failure {
            None => Ok(Twist::None),
            Some(failure) => self.strike(call, failure),
        }
    }

    #[cold]
    fn strike(&self, call: Call, failure: Failure) -> Result<Twist> {
        let refuse = |class, code| {
            let text = "a fault was armed for this call".to_owned();
            Err(self.error(call, Refusal { class, code, text }))
        };
        match failure {
            Failure::Argument => refuse(ErrorClass::Argument, libc::EINVAL),
            Failure::Capture => refuse(ErrorClass::Capture, libc::EPERM),
            Failure::Stall => Ok(Twist::Stall),
            Failure::RunsAnyway if call.queues() => Ok(Twist::FailAfter),
            Failure::Transient | Failure::RunsAnyway => refuse(ErrorClass::Transient, libc::EAGAIN),
            Failure::DeviceLost => {
                self.unit.kill("a fault was armed for a call, and killed the device");
                Err(self.unit.lost(call))
            }
        }
    }

    /// A call that has queued something ends with this.
    fn leave(&self, call: Call, twist: Twist) -> Result<()> {
        if twist == Twist::FailAfter {
            let text = "a fault was armed for this call, whose operation was queued all the same";
            return Err(self.error(call, Refusal::transient(text)));
        }
        Ok(())
    }

    fn place(&self, call: Call, ptr: DevicePtr, len: usize) -> Result<HostPlace> {
        self.unit.memory.find(ptr.0, len).map_err(|refusal| self.error(call, refusal))
    }

    fn host_address(&self, call: Call, address: usize, len: usize) -> Result<()> {
        // No object is larger than half of the address space, which also keeps the end from wrapping around.
        let fits = isize::try_from(len).is_ok() && address.checked_add(len).is_some();
        if (address == 0 && len > 0) || !fits {
            let text = format!("{len} bytes at host address {address:#x} are no memory");
            return Err(self.error(call, Refusal::fault(text)));
        }
        Ok(())
    }

    /// Checks a transfer, and finds the allocations that it uses.
    fn job(&self, call: Call, transfer: Transfer) -> Result<StreamJob> {
        match transfer {
            Transfer::Upload { src, dst, len } => {
                self.host_address(call, src.addr(), len)?;
                Ok(StreamJob::Upload { src, to: self.place(call, dst, len)?, len })
            }
            Transfer::Download { src, dst, len } => {
                self.host_address(call, dst.addr(), len)?;
                Ok(StreamJob::Download { from: self.place(call, src, len)?, dst, len })
            }
            Transfer::OnDevice { src, dst, len } => {
                let (from, to) = (self.place(call, src, len)?, self.place(call, dst, len)?);
                Ok(StreamJob::OnDevice { from, to, len })
            }
            Transfer::OnHost { src, dst, len } => {
                self.host_address(call, src.addr(), len)?;
                self.host_address(call, dst.addr(), len)?;
                Ok(StreamJob::OnHost { src, dst, len })
            }
        }
    }

    /// Queues a function of the program's. Ranges of device memory are named by their addresses and lengths.
    pub(crate) fn launch(
        &self,
        stream: StreamHandle,
        reads: &[(DevicePtr, usize)],
        writes: &[(DevicePtr, usize)],
        function: Owned<HostFunction>,
    ) -> Result<()> {
        let call = Call::Launch;
        let twist = self.enter(call)?;
        let stream = self.unit.find(call, stream.0)?;
        let find = |ranges: &[(DevicePtr, usize)]| -> Result<Vec<HostPlace>> {
            ranges.iter().map(|(ptr, len)| self.place(call, *ptr, *len)).collect()
        };
        let kernel = HostKernel { reads: find(reads)?, writes: find(writes)?, function };
        self.unit.submit(call, &stream, StreamWork::Launch(kernel), twist == Twist::Stall)?;
        self.leave(call, twist)
    }

    /// Whole pages, as a range of addresses.
    fn pages(&self, call: Call, base: NonNull<u8>, len: usize) -> Result<Range<usize>> {
        let (start, page) = (base.as_ptr().addr(), os::page_size());
        match start.checked_add(len) {
            Some(end) if len > 0 && start % page == 0 && len % page == 0 => Ok(start..end),
            _ => {
                let text = format!("{len} bytes at {start:#x} are not whole pages of {page} bytes");
                Err(self.error(call, Refusal::argument(text)))
            }
        }
    }

    /// The bytes, as a range of addresses.
    fn bytes(&self, call: Call, base: NonNull<u8>, len: usize) -> Result<Range<usize>> {
        self.host_address(call, base.as_ptr().addr(), len)?;
        if len == 0 {
            return Err(self.error(call, Refusal::argument("no bytes")));
        }
        Ok(base.as_ptr().addr()..base.as_ptr().addr() + len)
    }

    /// Enters a range as pinned and locks the pages that it is on.
    fn lock(&self, call: Call, base: NonNull<u8>, range: &Range<usize>) -> Result<()> {
        self.node.enter_pin(self.unit.ordinal, range).map_err(|refusal| self.error(call, refusal))?;
        // Not under the lock of `pins`: this can take seconds.
        let (base, len) = outwards(base, range);
        os::lock(base, len).inspect_err(|_| {
            // It cannot fail: the range was entered above.
            let _ = self.node.leave_pin(self.unit.ordinal, range);
        })
    }

    /// Takes a pinned range out and unlocks the pages that no other range is on. (A range that is pinned on the same
    /// page at this very moment may find it unlocked, which costs it speed at worst.)
    fn unlock(&self, call: Call, base: NonNull<u8>, range: &Range<usize>) -> Result<()> {
        if self.node.uses(range) {
            let text = format!("{range:#x?} is used by a copy that is queued or running");
            return Err(self.error(call, Refusal::argument(text)));
        }
        let own =
            self.node.leave_pin(self.unit.ordinal, range).map_err(|refusal| self.error(call, refusal))?;
        let (first, _) = outwards(base, range);
        // SAFETY: `own` is within the pages that the range is on, which are mapped.
        let start = unsafe { first.add(own.start - first.as_ptr().addr()) };
        if own.is_empty() {
            return Ok(());
        }
        os::unlock(start, own.len()).map_err(|error| self.error(call, Refusal::argument(error.to_string())))
    }

    fn unknown_event<T>(&self, call: Call, event: EventHandle) -> Result<T> {
        Err(self.error(call, Refusal::unknown("event", event.0)))
    }
}

impl Driver for HostDriver {
    fn name(&self) -> &str {
        &self.unit.name
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn ending(&self) -> &Ending {
        &self.ending
    }

    fn takes_ordinary_memory(&self) -> bool {
        true
    }

    fn stepped(&self) -> Option<&dyn Stepped> {
        if self.node.is_stepped() { Some(self) } else { None }
    }

    unsafe fn pin(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        let call = Call::Pin;
        self.enter(call)?;
        let range = self.pages(call, base, len)?;
        self.lock(call, base, &range)
    }

    unsafe fn unpin(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        let call = Call::Unpin;
        self.enter(call)?;
        let range = self.bytes(call, base, len)?;
        self.unlock(call, base, &range)
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, _read_only: bool) -> Result<()> {
        let call = Call::Pin;
        self.enter(call)?;
        let range = self.bytes(call, base, len)?;
        self.lock(call, base, &range)
    }

    fn allocate_host(&self, len: usize, kind: HostKind) -> Result<NonNull<u8>> {
        let call = Call::AllocateHost;
        self.enter(call)?;
        let base = os::map(len, 1)?;
        os::dont_fork(base, len);
        let entered = self.pages(call, base, len).and_then(|range| {
            if let HostKind::Locked(_) = kind {
                self.lock(call, base, &range)?;
            }
            self.node.enter_block(self.unit.ordinal, &range, kind);
            Ok(())
        });
        entered.map(|()| base).inspect_err(|_| {
            // SAFETY: mapped above, and its address was given to no caller.
            let _ = unsafe { os::unmap(base, len) };
        })
    }

    unsafe fn free_host(&self, base: NonNull<u8>, len: usize, kind: HostKind) -> Result<()> {
        let call = Call::FreeHost;
        self.enter(call)?;
        let range = self.pages(call, base, len)?;
        self.node
            .leave_block(self.unit.ordinal, &range, kind)
            .map_err(|refusal| self.error(call, refusal))?;
        if let HostKind::Locked(_) = kind {
            self.unlock(call, base, &range).inspect_err(|_| {
                self.node.enter_block(self.unit.ordinal, &range, kind);
            })?;
        }
        // SAFETY: mapped when it was allocated, and not in use, as the caller promises.
        unsafe { os::unmap(base, len) }
    }

    fn device_address(&self, at: NonNull<u8>) -> Result<u64> {
        let call = Call::DeviceAddress;
        self.enter(call)?;
        let address = at.as_ptr().addr();
        if !self.node.is_pinned(address) {
            let text = format!("{address:#x} is not pinned");
            return Err(self.error(call, Refusal::fault(text)));
        }
        Ok(address as u64)
    }

    fn allocate(&self, len: usize) -> Result<DevicePtr> {
        self.enter(Call::Allocate)?;
        let address = self.unit.memory.allocate(len);
        address.map(DevicePtr).map_err(|refusal| self.error(Call::Allocate, refusal))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.enter(Call::Free)?;
        self.unit.memory.free(ptr.0).map_err(|refusal| self.error(Call::Free, refusal))
    }

    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        self.enter(Call::Examine)?;
        let host = || match usize::try_from(ptr.0) {
            Ok(at) if self.node.has_pinned(at) => AddressFault::Host { registered: true },
            _ if os::is_host_memory(ptr.0) == Some(true) => AddressFault::Host { registered: false },
            _ => AddressFault::Unknown,
        };
        let found = self.unit.memory.examine(ptr.0, len);
        found.map_err(|fault| fault.unwrap_or_else(host).of(&self.unit.name, ptr.0, len))
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        self.enter(Call::CreateStream)?;
        self.unit.create_stream(self.id).map(StreamHandle)
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        if let Err(error) = self.enter(Call::DestroyStream) {
            if error.is_device_lost() {
                let _ = self.unit.destroy_stream(stream.0);
            }
            return Err(error);
        }
        self.unit.destroy_stream(stream.0)
    }

    unsafe fn copy(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        let call = Call::Copy;
        let twist = self.enter(call)?;
        let stream = self.unit.find(call, stream.0)?;
        let work = StreamWork::Copy { job: self.job(call, transfer)?, promise: None };
        self.unit.submit(call, &stream, work, twist == Twist::Stall)?;
        self.leave(call, twist)
    }

    unsafe fn copy_blocking(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        let call = Call::CopyBlocking;
        let twist = self.enter(call)?;
        let stream = self.unit.find(call, stream.0)?;
        let ticket = Arc::new(StreamTicket::default());
        let promise = Some(Promise(Arc::clone(&ticket)));
        let work = StreamWork::Copy { job: self.job(call, transfer)?, promise };
        let position = self.unit.submit(call, &stream, work, twist == Twist::Stall)?;
        self.node.finish(&self.unit, &stream, position, &ticket)?;
        self.leave(call, twist)
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.enter(Call::CreateEvent)?;
        let event = self.unit.events.create();
        event.map(EventHandle).ok_or_else(|| {
            self.error(Call::CreateEvent, Refusal::out_of_memory("the device is out of events"))
        })
    }

    fn destroy_event(&self, event: EventHandle) -> Result<()> {
        if let Err(error) = self.enter(Call::DestroyEvent) {
            if error.is_device_lost() {
                let _ = self.unit.events.destroy(event.0);
            }
            return Err(error);
        }
        if self.unit.events.destroy(event.0) { Ok(()) } else { self.unknown_event(Call::DestroyEvent, event) }
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        let call = Call::Record;
        let twist = self.enter(call)?;
        let stream = self.unit.find(call, stream.0)?;
        let recorded = self.unit.events.record(event.0, |slot, number| {
            let work = StreamWork::Record { slot, number };
            let position = self.unit.submit(call, &stream, work, twist == Twist::Stall)?;
            Ok((Arc::clone(&stream), position))
        });
        match recorded {
            Some(recorded) => recorded.and_then(|()| self.leave(call, twist)),
            None => self.unknown_event(call, event),
        }
    }

    #[inline]
    fn query(&self, event: EventHandle) -> Result<bool> {
        self.enter(Call::Query)?;
        match self.unit.events.query(event.0) {
            Some(complete) => Ok(complete),
            None => self.unknown_event(Call::Query, event),
        }
    }

    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        let call = Call::WaitEvent;
        let twist = self.enter(call)?;
        let stream = self.unit.find(call, stream.0)?;
        match self.unit.events.last(event.0) {
            None => return self.unknown_event(call, event),
            // Never recorded, which counts as complete.
            Some(None) => {}
            Some(Some((on, position))) => {
                self.unit.submit(call, &stream, StreamWork::Wait { on, position }, twist == Twist::Stall)?;
            }
        }
        self.leave(call, twist)
    }
}

/// The pages that a range is on.
fn outwards(base: NonNull<u8>, range: &Range<usize>) -> (NonNull<u8>, usize) {
    let page = os::page_size();
    let front = range.start % page;
    // SAFETY: the result is the start of the page that the first byte is on, which is mapped as that byte is.
    let first = unsafe { base.sub(front) };
    (first, (front + range.len()).next_multiple_of(page))
}

impl Stepped for HostDriver {
    fn step(&self) -> bool {
        self.node.step()
    }
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        self.unit.abandon(self.id);
    }
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostDriver").field(&self.unit.name).finish()
    }
}

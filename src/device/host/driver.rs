//! The contract's calls ([`Driver`]). Each begins with [`HostDriver::enter`], and checks its arguments. What a call
//! queues is run by the stream's thread ([`super::unit`]).

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::fault::{Call, Failure};
use super::memory::Place;
use super::node::{HostNode, Node};
use super::unit::{HostFunction, Kernel, Point, State, Unit, Work, number, owner};
use crate::device::address::AddressFault;
use crate::device::ending::Ending;
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer};
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Owned;
use crate::locks::MutexGuard;
use crate::os;

/// One opening of a device, as the rest of the crate sees it. When it is dropped, streams that were not destroyed end
/// without running what they have queued.
pub(crate) struct HostDriver {
    node: Arc<Node>,
    unit: Arc<Unit>,
    id: u64,
    /// Dropped when all streams have ended.
    ending: Ending,
}

impl HostNode {
    /// A driver of one device, for one opening of it. It ends when that is closed.
    pub(crate) fn driver(&self, ordinal: u32) -> Result<Arc<dyn Driver>> {
        let Some(unit) = self.0.units.get(ordinal as usize) else {
            let known = format!("this node has host:0 to host:{}", self.devices() - 1);
            return Err(Error::UnknownDevice { name: format!("host:{ordinal}"), known });
        };
        Ok(HostDriver::open(&self.0, Arc::clone(unit)))
    }

    /// Calls `hook` before each call of a device of the node.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn hook(&self, hook: impl Fn(Call) + Send + Sync + 'static) {
        assert!(self.0.faults.hook.set(Box::new(hook)).is_ok(), "the node has a hook");
    }

    /// The driver of a device with this name.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn named(&self, name: &str) -> Arc<dyn Driver> {
        HostDriver::open(&self.0, Unit::new(name, 0, &super::HostConfig::new(), 0))
    }
}

impl HostDriver {
    fn open(node: &Arc<Node>, unit: Arc<Unit>) -> Arc<dyn Driver> {
        Arc::new(Self { node: Arc::clone(node), unit, id: number(), ending: Ending::new() })
    }

    /// Every call begins with this: it takes a fault that was armed for the call, refuses the call of a dead device,
    /// and locks the device. A failure that it returns is for the operation that the call queues.
    fn enter(&self, call: Call) -> Result<(MutexGuard<'_, State>, Option<Failure>)> {
        let failure = self.node.faults.on_call(self.unit.ordinal, call);
        let mut state = self.unit.state.lock();
        // A dead device still gives back what it was given.
        if state.dead.is_some() && !matches!(call, Call::Unpin | Call::Free | Call::FreeHost) {
            return Err(self.unit.lost(&mut state, call));
        }
        use Call::{Copy, CopyBlocking, Launch, Record, WaitEvent};
        let queues = matches!(call, Copy | CopyBlocking | Launch | Record | WaitEvent);
        let class = match failure {
            None | Some(Failure::Stall) => return Ok((state, failure)),
            Some(Failure::RunsAnyway) if queues => return Ok((state, failure)),
            Some(Failure::DeviceLost) => {
                self.unit.kill(&mut state, "a fault was armed for a call, and killed the device");
                return Err(self.unit.lost(&mut state, call));
            }
            Some(Failure::Argument) => ErrorClass::Argument,
            Some(Failure::Capture) => ErrorClass::Capture,
            Some(Failure::Transient | Failure::RunsAnyway) => ErrorClass::Transient,
        };
        Err(self.unit.error(call, class, "a fault was armed for this call"))
    }

    fn refuse<T>(&self, call: Call, text: impl Into<Arc<str>>) -> Result<T> {
        Err(self.unit.error(call, ErrorClass::Argument, text))
    }

    fn unknown<T>(&self, call: Call, what: &str, handle: u64) -> Result<T> {
        self.refuse(call, format!("this device has no {what} {handle:#x}, or has destroyed it"))
    }

    /// A call that queues an operation, which `work` makes.
    fn queue(
        &self,
        call: Call,
        stream: StreamHandle,
        work: impl FnOnce(&State) -> Result<Work>,
    ) -> Result<()> {
        let (mut state, failure) = self.enter(call)?;
        let work = work(&state)?;
        let recorded = if let Work::Record(event) = work { Some(event) } else { None };
        let Some(point) = state.submit(stream.0, work, failure == Some(Failure::Stall)) else {
            return self.unknown(call, "stream", stream.0);
        };
        if let Some(event) = recorded {
            self.unit.events.with(event, |last| *last = Some(point.clone()));
        }
        if call == Call::CopyBlocking {
            self.unit.wait(&mut state, call, &point)?;
        }
        if failure == Some(Failure::RunsAnyway) {
            let text = "a fault was armed for this call, whose operation was queued all the same";
            return Err(self.unit.error(call, ErrorClass::Transient, text));
        }
        Ok(())
    }

    /// A call that destroys something, which `destroy` does, or says that it is not there.
    fn destroy(&self, call: Call, handle: u64, destroy: impl FnOnce(&mut State) -> bool) -> Result<()> {
        let entered = self.enter(call).map(drop);
        // A dead device refuses the call, and lets go of the thing all the same.
        let goes = entered.as_ref().map_or_else(Error::is_device_lost, |()| true);
        let gone = goes && destroy(&mut self.unit.state.lock());
        entered?;
        if gone { Ok(()) } else { self.unknown(call, "object", handle) }
    }

    /// Finds the bytes at a device address.
    fn place(&self, state: &State, at: DevicePtr, len: usize) -> Result<Place> {
        let below = state.memory.range(..=at.0).next_back();
        let here = below.map(|(start, block)| (block, (at.0 - start) as usize));
        let fault = match here
            .filter(|(block, offset)| *offset < block.len || (*offset == block.len && len == 0))
        {
            Some((block, offset)) if len <= block.len - offset => {
                return Ok(Place::Device(Arc::clone(block), offset));
            }
            Some((block, offset)) => {
                let over = len - (block.len - offset);
                AddressFault::PastEnd { start: block.address, size: block.len, over }
            }
            None => match owner(at.0).filter(|owner| *owner != self.unit.ordinal) {
                Some(owner) => AddressFault::OtherDevice { device: format!("host:{owner}") },
                None if self.node.has_pinned(at.0 as usize) => AddressFault::Host { registered: true },
                None if os::is_host_memory(at.0) == Some(true) => AddressFault::Host { registered: false },
                None => AddressFault::Unknown,
            },
        };
        Err(fault.of(&self.unit.name, at.0, len))
    }

    /// Checks a copy, and finds the allocations that it uses.
    fn work(&self, state: &State, transfer: Transfer) -> Result<Work> {
        let (host, place) =
            (|at: *const u8| Place::Host(at.cast_mut()), |at, len| self.place(state, at, len));
        Ok(match transfer {
            Transfer::Upload { src, dst, len } => Work::Copy(host(src), place(dst, len)?, len),
            Transfer::Download { src, dst, len } => Work::Copy(place(src, len)?, host(dst), len),
            Transfer::OnDevice { src, dst, len } => Work::Copy(place(src, len)?, place(dst, len)?, len),
            Transfer::OnHost { src, dst, len } => Work::Copy(host(src), host(dst), len),
        })
    }

    /// Queues a function of the program's. Ranges of device memory are named by their addresses and lengths.
    pub(crate) fn launch(
        &self,
        stream: StreamHandle,
        reads: &[(DevicePtr, usize)],
        writes: &[(DevicePtr, usize)],
        function: Owned<HostFunction>,
    ) -> Result<()> {
        self.queue(Call::Launch, stream, |state| {
            let find = |ranges: &[(DevicePtr, usize)]| -> Result<Vec<(Place, usize)>> {
                ranges.iter().map(|(at, len)| Ok((self.place(state, *at, *len)?, *len))).collect()
            };
            Ok(Work::Launch(Kernel { reads: find(reads)?, writes: find(writes)?, function }))
        })
    }

    /// Takes out a range of host memory that no copy uses, and returns the pages of it alone.
    fn leave(
        &self,
        call: Call,
        base: NonNull<u8>,
        len: usize,
        kind: Option<HostKind>,
    ) -> Result<Range<usize>> {
        let range = range(base, len);
        if self.node.uses(&range) {
            return self.refuse(call, format!("{range:#x?} is used by a copy that is queued or running"));
        }
        self.node.leave(&range, (self.unit.ordinal, kind)).or_else(|text| self.refuse(call, text))
    }

    /// Enters a range of host memory, and locks the pages that it is on unless it is managed memory.
    fn lock(&self, call: Call, base: NonNull<u8>, len: usize, kind: Option<HostKind>) -> Result<()> {
        let (range, owner) = (range(base, len), (self.unit.ordinal, kind));
        self.node.enter(&range, owner).or_else(|text| self.refuse(call, text))?;
        if kind == Some(HostKind::Managed) {
            return Ok(());
        }
        let (pages, len) = on_pages(base, &range);
        os::lock(pages, len).inspect_err(|_| {
            // It cannot fail: the range was entered above.
            let _ = self.node.leave(&range, owner);
        })
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

    unsafe fn unpin(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        drop(self.enter(Call::Unpin)?);
        let left = self.leave(Call::Unpin, base, len, None)?;
        // A range that is pinned on the same page at this very moment may find it unlocked, which costs it speed.
        let (pages, len) = on_pages(base, &left);
        os::unlock(pages, len).or_else(|error| self.refuse(Call::Unpin, error.to_string()))
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, _read_only: bool) -> Result<()> {
        drop(self.enter(Call::Pin)?);
        self.lock(Call::Pin, base, len, None)
    }

    fn allocate_host(&self, len: usize, kind: HostKind) -> Result<NonNull<u8>> {
        drop(self.enter(Call::AllocateHost)?);
        let base = os::map(len, 1)?;
        os::dont_fork(base, len);
        self.lock(Call::AllocateHost, base, len, Some(kind)).map(|()| base).inspect_err(|_| {
            // SAFETY: mapped above, and its address was given to no caller.
            let _ = unsafe { os::unmap(base, len) };
        })
    }

    unsafe fn free_host(&self, base: NonNull<u8>, len: usize, kind: HostKind) -> Result<()> {
        drop(self.enter(Call::FreeHost)?);
        self.leave(Call::FreeHost, base, len, Some(kind))?;
        // SAFETY: mapped when it was allocated, and not in use, as the caller promises. Unmapping unlocks it.
        unsafe { os::unmap(base, len) }
    }

    fn device_address(&self, at: NonNull<u8>) -> Result<u64> {
        drop(self.enter(Call::DeviceAddress)?);
        let address = at.addr().get();
        match self.node.has_pinned(address) {
            true => Ok(address as u64),
            false => self.refuse(Call::DeviceAddress, format!("{address:#x} is not pinned")),
        }
    }

    fn allocate(&self, len: usize) -> Result<DevicePtr> {
        let (mut state, _) = self.enter(Call::Allocate)?;
        if len == 0 {
            return self.refuse(Call::Allocate, "0 bytes of device memory were asked for");
        }
        let allocated = self.unit.allocate(&mut state, len).map(DevicePtr);
        allocated.map_err(|text| self.unit.error(Call::Allocate, ErrorClass::Transient, text))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        let (mut state, _) = self.enter(Call::Free)?;
        let Some(block) = state.memory.remove(&ptr.0) else {
            return self.unknown(Call::Free, "memory", ptr.0);
        };
        state.used -= block.len;
        drop(state);
        // The last reference may be that of a queued operation, or this one. Unmapping takes time, so no lock is held.
        drop(block);
        Ok(())
    }

    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        let (state, _) = self.enter(Call::Examine)?;
        self.place(&state, ptr, len).map(drop)
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        let (mut state, _) = self.enter(Call::CreateStream)?;
        self.unit.create(&mut state, self.id).map(StreamHandle)
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        self.destroy(Call::DestroyStream, stream.0, |state| state.destroy(stream.0))
    }

    unsafe fn copy(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        self.queue(Call::Copy, stream, |state| self.work(state, transfer))
    }

    unsafe fn copy_blocking(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        self.queue(Call::CopyBlocking, stream, |state| self.work(state, transfer))
    }

    fn create_event(&self) -> Result<EventHandle> {
        drop(self.enter(Call::CreateEvent)?);
        Ok(EventHandle(self.unit.events.create()))
    }

    fn destroy_event(&self, event: EventHandle) -> Result<()> {
        self.destroy(Call::DestroyEvent, event.0, |_| self.unit.events.destroy(event.0))
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.queue(Call::Record, stream, |_| match self.unit.events.with(event.0, |_| ()) {
            Some(()) => Ok(Work::Record(event.0)),
            None => self.unknown(Call::Record, "event", event.0),
        })
    }

    fn query(&self, event: EventHandle) -> Result<bool> {
        // The device's lock is needed only where the answer is an error.
        if !self.node.faults.is_idle() || self.unit.is_dead.load(Ordering::Relaxed) {
            drop(self.enter(Call::Query)?);
        }
        // An event that was never recorded counts as complete.
        match self.unit.events.with(event.0, |last| last.as_ref().is_none_or(Point::is_over)) {
            Some(is_over) => Ok(is_over),
            None => self.unknown(Call::Query, "event", event.0),
        }
    }

    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.queue(Call::WaitEvent, stream, |_| match self.unit.events.with(event.0, |last| last.clone()) {
            Some(recorded) => Ok(recorded.map_or(Work::Record(0), Work::Wait)),
            None => self.unknown(Call::WaitEvent, "event", event.0),
        })
    }
}

fn range(base: NonNull<u8>, len: usize) -> Range<usize> {
    base.addr().get()..base.addr().get() + len
}

/// The first of the pages that a range of bytes, which begins near `base`, is on, and their length.
fn on_pages(base: NonNull<u8>, range: &Range<usize>) -> (NonNull<u8>, usize) {
    let (page, front) = (os::page_size(), range.start % os::page_size());
    let first = NonNull::new(base.as_ptr().with_addr(range.start - front)).unwrap_or(base);
    (first, (front + range.len()).next_multiple_of(page))
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        self.unit.state.lock().abandon(self.id);
    }
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostDriver").field(&self.unit.name).finish()
    }
}

//! The contract's calls ([`Driver`]). Each begins with [`HostDriver::enter`], and checks its
//! arguments. The stream's thread ([`super::node`]) runs what a call queues.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::{NonNull, with_exposed_provenance};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::Place;
use super::node::{HostFunction, Kernel, Node, State, Work};
use super::{Call, Failure, HostNode};
use crate::device::address::AddressFault;
use crate::device::ending::Ending;
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer, Whose};
use crate::error::{DeviceError, Error, ErrorClass, Result};
use crate::foreign::Owned;
use crate::locks::MutexGuard;
use crate::os;

/// One opening of a device, as the rest of the crate sees it. When it is dropped, streams that were
/// not destroyed end without running what they have queued.
pub(crate) struct HostDriver {
    node: Arc<Node>,
    name: Arc<str>,
    device: usize,
    id: u64,
    ending: Ending,
}

impl HostNode {
    /// A driver of one device, for one opening of it. It ends when that is closed.
    pub(crate) fn driver(&self, ordinal: u32) -> Result<Arc<dyn Driver>> {
        let (devices, name) = (self.devices(), format!("host:{ordinal}"));
        if ordinal >= devices {
            let why = format!("this node has host:0 to host:{}", devices - 1);
            return Err(Error::Unavailable { device: name, why });
        }
        Ok(self.open(ordinal as usize, &name))
    }

    fn open(&self, device: usize, name: &str) -> Arc<dyn Driver> {
        let (node, id) = (Arc::clone(&self.0), self.0.state.lock().number());
        Arc::new(HostDriver { node, name: name.into(), device, id, ending: Ending::new() })
    }

    /// Calls `hook` before each call of a device of the node.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn hook(&self, hook: impl Fn(Call) + Send + Sync + 'static) {
        assert!(self.0.hook.set(Box::new(hook)).is_ok(), "the node has a hook");
        self.0.alert.store(true, Ordering::Relaxed);
    }

    /// A driver of the first device under this name.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn named(&self, name: &str) -> Arc<dyn Driver> {
        self.open(0, name)
    }
}

/// The event behind a handle, which is a reference of its own to it.
fn event(handle: EventHandle) -> ManuallyDrop<Arc<AtomicU64>> {
    // SAFETY: handles come from `create_event`, and the crate uses none that it has destroyed.
    ManuallyDrop::new(unsafe { Arc::from_raw(with_exposed_provenance(handle.0 as usize)) })
}

impl HostDriver {
    /// Every call begins with this: it takes a fault that was armed for it, refuses it on a dead
    /// device, and locks the node. A returned failure is for the queued operation.
    fn enter(&self, call: Call) -> Result<(MutexGuard<'_, State>, Option<Failure>)> {
        #[cfg(all(test, not(loom)))]
        self.node.hook.get().into_iter().for_each(|hook| hook(call));
        let mut state = self.node.state.lock();
        let failure = state.strike(self.device, call);
        if state.units[self.device].dead.is_some() {
            self.node.quiet(&mut state, self.device);
            // A dead device still gives back what it was given.
            if !matches!(call, Call::Unpin | Call::Free | Call::FreeHost) {
                return Err(self.lost(&state, call));
            }
        }
        let class = match failure {
            None | Some(Failure::Stall) => return Ok((state, failure)),
            Some(Failure::RunsAnyway) if call.queues() => return Ok((state, failure)),
            Some(Failure::DeviceLost) => {
                let cause = "a fault was armed for a call, and killed the device";
                self.node.kill(&mut state, self.device, cause);
                return Err(self.lost(&state, call));
            }
            Some(Failure::Argument) => ErrorClass::Argument,
            Some(Failure::Capture) => ErrorClass::Capture,
            Some(Failure::Transient | Failure::RunsAnyway) => ErrorClass::Transient,
        };
        Err(self.error(call, class, "a fault was armed for this call"))
    }

    /// This device's error.
    fn error(&self, call: Call, class: ErrorClass, text: impl Into<Arc<str>>) -> Error {
        let code = match class {
            ErrorClass::Argument => libc::EINVAL,
            ErrorClass::Capture => libc::EPERM,
            ErrorClass::DeviceLost => libc::ENODEV,
            _ => libc::EAGAIN,
        };
        let (device, call, text) = (self.name.clone(), call.name(), text.into());
        Error::Device(DeviceError { device, call, code: i64::from(code), text, class })
    }

    /// The error of a call to a dead device.
    fn lost(&self, state: &State, call: Call) -> Error {
        let cause = state.units[self.device].dead.clone().unwrap_or_default();
        self.error(call, ErrorClass::DeviceLost, cause)
    }

    fn refuse<T>(&self, call: Call, text: impl Into<Arc<str>>) -> Result<T> {
        Err(self.error(call, ErrorClass::Argument, text))
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
        let submitted = state.submit(self.device, stream.0, work, failure == Some(Failure::Stall));
        let Some(number) = submitted else { return self.unknown(call, "stream", stream.0) };
        if call == Call::CopyBlocking {
            self.node.wait(&mut state, number);
            if state.units[self.device].dead.is_some() {
                self.node.quiet(&mut state, self.device);
                return Err(self.lost(&state, call));
            }
        }
        if failure == Some(Failure::RunsAnyway) {
            let text = "a fault was armed for this call, whose operation was queued all the same";
            return Err(self.error(call, ErrorClass::Transient, text));
        }
        Ok(())
    }

    /// A call that destroys something, which `destroy` does. A dead device refuses the call, and
    /// lets go of the thing all the same.
    fn destroy(&self, call: Call, destroy: impl FnOnce(&mut State) -> Result<()>) -> Result<()> {
        let entered = self.enter(call).map(drop);
        let goes = entered.as_ref().map_or_else(Error::is_device_lost, |()| true);
        let destroyed = if goes { destroy(&mut self.node.state.lock()) } else { Ok(()) };
        entered.and(destroyed)
    }

    /// Finds the bytes at a device address.
    fn place(&self, state: &State, at: DevicePtr, len: usize) -> Result<Place> {
        let below = state.memory.range(..=at.0).next_back();
        let here = below.map(|(start, block)| (block, (at.0 - start) as usize));
        let fault =
            match here.filter(|(block, offset)| *offset < block.len || (*offset == block.len && len == 0)) {
                Some((block, _)) if block.device != self.device => {
                    AddressFault::OtherDevice { device: format!("host:{}", block.device) }
                }
                Some((block, offset)) if len <= block.len - offset => {
                    return Ok(Place::Device(Arc::clone(block), offset));
                }
                Some((block, offset)) => {
                    let over = len - (block.len - offset);
                    AddressFault::PastEnd { start: block.address, size: block.len, over }
                }
                None if state.has_pinned(at.0 as usize) => AddressFault::Host { registered: true },
                None if os::is_host_memory(at.0) == Some(true) => AddressFault::Host { registered: false },
                None => AddressFault::Unknown,
            };
        Err(fault.of(&self.name, at.0, len))
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

    /// Queues a function of the program's, with ranges of device memory (addresses and lengths).
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

    /// Enters a range of host memory, and locks its pages unless it is managed memory.
    fn lock(&self, call: Call, base: NonNull<u8>, len: usize, kind: Option<HostKind>) -> Result<()> {
        let (range, owner) = (range(base, len), (self.device, kind));
        let entered = self.node.state.lock().enter(&range, owner);
        entered.or_else(|text| self.refuse(call, text))?;
        if kind == Some(HostKind::Managed) {
            return Ok(());
        }
        let (pages, len) = on_pages(base, len);
        os::lock(pages, len).inspect_err(|_| {
            // Also while a copy uses it: unpinned memory is pinned again while buffers are out.
            self.node.state.lock().ranges.remove(&range.start);
        })
    }
}

impl Driver for HostDriver {
    fn name(&self) -> &str {
        &self.name
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn ending(&self) -> &Ending {
        &self.ending
    }

    unsafe fn unpin(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        let left = self.enter(Call::Unpin)?.0.leave(&range(base, len), (self.device, None));
        left.or_else(|text| self.refuse(Call::Unpin, text))?;
        // A range that is pinned on the same page finds that page unlocked, which costs it speed.
        let (pages, len) = on_pages(base, len);
        os::unlock(pages, len).or_else(|error| self.refuse(Call::Unpin, error.to_string()))
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, _whose: Whose) -> Result<()> {
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
        let left = self.enter(Call::FreeHost)?.0.leave(&range(base, len), (self.device, Some(kind)));
        left.or_else(|text| self.refuse(Call::FreeHost, text))?;
        // SAFETY: mapped when it was allocated; the caller promises that nothing uses it. Unmapping
        // unlocks it.
        unsafe { os::unmap(base, len) }
    }

    fn device_address(&self, at: NonNull<u8>) -> Result<u64> {
        let (state, _) = self.enter(Call::DeviceAddress)?;
        let address = at.addr().get();
        match state.has_pinned(address) {
            true => Ok(address as u64),
            false => self.refuse(Call::DeviceAddress, format!("{address:#x} is not pinned")),
        }
    }

    fn allocate(&self, len: usize) -> Result<DevicePtr> {
        let (mut state, _) = self.enter(Call::Allocate)?;
        if len == 0 {
            return self.refuse(Call::Allocate, "0 bytes of device memory were asked for");
        }
        let allocated = state.allocate(self.device, len).map(DevicePtr);
        allocated.map_err(|text| self.error(Call::Allocate, ErrorClass::Transient, text))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        let (mut state, _) = self.enter(Call::Free)?;
        let Some(block) = state.memory.remove(&ptr.0) else {
            return self.unknown(Call::Free, "memory", ptr.0);
        };
        state.units[block.device].used -= block.len;
        // Unmapping takes time, so no lock is held. A queued operation may have the last one.
        drop(state);
        drop(block);
        Ok(())
    }

    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        let (state, _) = self.enter(Call::Examine)?;
        self.place(&state, ptr, len).map(drop)
    }

    fn create_stream(&self, _urgent: bool) -> Result<StreamHandle> {
        let (mut state, _) = self.enter(Call::CreateStream)?;
        self.node.create(&mut state, self.device, self.id).map(StreamHandle).map_err(|error| {
            let text = format!("no thread for the stream: {error}");
            self.error(Call::CreateStream, ErrorClass::Transient, text)
        })
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        self.destroy(Call::DestroyStream, |state| match state.units[self.device].destroy(stream.0) {
            true => Ok(()),
            false => self.unknown(Call::DestroyStream, "stream", stream.0),
        })
    }

    unsafe fn copy(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        self.queue(Call::Copy, stream, |state| self.work(state, transfer))
    }

    unsafe fn copy_blocking(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        self.queue(Call::CopyBlocking, stream, |state| self.work(state, transfer))
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.enter(Call::CreateEvent)?.0.units[self.device].events += 1;
        // An event that was never recorded counts as complete.
        let event = Arc::into_raw(Arc::new(AtomicU64::new(0)));
        Ok(EventHandle(event.expose_provenance() as u64))
    }

    fn destroy_event(&self, handle: EventHandle) -> Result<()> {
        self.destroy(Call::DestroyEvent, |state| {
            state.units[self.device].events -= 1;
            drop(ManuallyDrop::into_inner(event(handle)));
            Ok(())
        })
    }

    fn record(&self, handle: EventHandle, stream: StreamHandle) -> Result<()> {
        self.queue(Call::Record, stream, |_| Ok(Work::Record(Arc::clone(&event(handle)))))
    }

    fn query(&self, handle: EventHandle) -> Result<bool> {
        if self.node.alert.load(Ordering::Relaxed) {
            drop(self.enter(Call::Query)?);
        }
        // Acquire: pairs with the release in `Node::run`.
        Ok(event(handle).load(Ordering::Acquire) == 0)
    }

    fn wait_event(&self, stream: StreamHandle, handle: EventHandle) -> Result<()> {
        // Relaxed: the number is written under the lock; one that has ended is not waited for.
        self.queue(Call::WaitEvent, stream, |_| Ok(Work::Wait(event(handle).load(Ordering::Relaxed))))
    }
}

fn range(base: NonNull<u8>, len: usize) -> Range<usize> {
    base.addr().get()..base.addr().get() + len
}

/// The first of the pages that bytes are on, and their length.
fn on_pages(base: NonNull<u8>, len: usize) -> (NonNull<u8>, usize) {
    let (page, front) = (os::page_size(), base.addr().get() % os::page_size());
    let first = NonNull::new(base.as_ptr().wrapping_sub(front)).unwrap_or(base);
    (first, (front + len).next_multiple_of(page))
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        self.node.abandon(self.device, self.id);
    }
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostDriver").field(&self.name).finish()
    }
}

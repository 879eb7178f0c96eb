//! The contract's calls ([`Driver`]). Each begins with [`HostDriver::enter`], and checks its
//! arguments. The stream's thread ([`super::node`]) runs what a call queues.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crossbeam::channel::unbounded;

use super::memory::{Block, Place};
use super::node::{HostFunction, Node, Operation, State, Unit};
use super::{Call, Failure, HostNode};
use crate::amount::amount;
use crate::device::memory::AddressFault;
use crate::device::{DevicePtr, Driver, EventHandle, HostKind, StreamHandle, Transfer, Whose};
use crate::error::{DeviceError, Error, ErrorClass, Result};
use crate::foreign::Owned;
use crate::locks::MutexGuard;
use crate::os;

/// The first device address that is given out: the CPU has none as high.
const FIRST_ADDRESS: u64 = 1 << 53;
/// The alignment of allocations' addresses, and the least gap between two.
const GAP: u64 = 4096;

/// One opening of a device, as the rest of the crate sees it.
pub(crate) struct HostDriver {
    node: Arc<Node>,
    name: Arc<str>,
    device: usize,
}

impl HostNode {
    /// A driver of one device, for one opening of it.
    pub(crate) fn driver(&self, ordinal: u32) -> Result<Arc<dyn Driver>> {
        let (devices, name) = (self.devices(), format!("host:{ordinal}"));
        if ordinal >= devices {
            let why = format!("this node has host:0 to host:{}", devices - 1);
            return Err(Error::Unavailable { device: name, why });
        }
        let node = Arc::clone(&self.0);
        Ok(Arc::new(HostDriver { node, name: name.into(), device: ordinal as usize }))
    }

    /// Calls `hook` before each call of a device of the node.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn hook(&self, hook: impl Fn(Call) + Send + Sync + 'static) {
        assert!(self.0.hook.set(Box::new(hook)).is_ok(), "the node has a hook");
    }
}

impl HostDriver {
    /// Every call begins with this: it takes a fault that was armed for it, refuses it on a dead
    /// device, and locks the node. A returned failure is for the queued operation.
    fn enter(&self, call: Call) -> Result<(MutexGuard<'_, State>, Option<Failure>)> {
        #[cfg(all(test, not(loom)))]
        self.node.hook.get().into_iter().for_each(|hook| hook(call));
        let mut state = self.node.state.lock();
        let failure = state.strike(self.device, call);
        let queues =
            matches!(call, Call::Copy | Call::CopyBlocking | Call::Launch | Call::Record | Call::WaitEvent);
        // A dead device takes back what it has given.
        let gives_back = matches!(
            call,
            Call::Unpin | Call::FreeHost | Call::Free | Call::DestroyStream | Call::DestroyEvent
        );
        let dies = failure == Some(Failure::DeviceLost);
        if dies {
            let cause = "a fault was armed for a call, and killed the device";
            self.node.kill(&mut state, self.device, cause);
        }
        if dies || state.units[self.device].dead.is_some() && !gives_back {
            return Err(self.lost(&mut state, call));
        }
        let class = match failure {
            Some(Failure::Argument) => ErrorClass::Argument,
            Some(Failure::Capture) => ErrorClass::Capture,
            Some(Failure::Transient) => ErrorClass::Transient,
            Some(Failure::RunsAnyway) if !queues => ErrorClass::Transient,
            _ => return Ok((state, failure)),
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

    /// The error of a call to a dead device, which touches no host memory any more.
    fn lost(&self, state: &mut MutexGuard<'_, State>, call: Call) -> Error {
        self.node.quiet(state, self.device);
        let cause = state.units[self.device].dead.clone().unwrap_or_default();
        self.error(call, ErrorClass::DeviceLost, cause)
    }

    fn refuse<T>(&self, call: Call, text: impl Into<Arc<str>>) -> Result<T> {
        Err(self.error(call, ErrorClass::Argument, text))
    }

    /// What a handle stands for.
    fn known<T>(&self, call: Call, found: Option<T>) -> Result<T> {
        let unknown = || self.refuse(call, "this device has no such thing, or has it no more");
        found.map_or_else(unknown, Ok)
    }

    /// A call that finds something of the device's.
    fn find<R>(&self, call: Call, find: impl FnOnce(&mut Unit) -> Option<R>) -> Result<R> {
        let (mut state, _) = self.enter(call)?;
        self.known(call, find(&mut state.units[self.device]))
    }

    /// A call that queues an operation, which `make` makes for a number.
    fn queue(
        &self,
        call: Call,
        stream: StreamHandle,
        make: impl FnOnce(&mut State, u64) -> Result<Operation>,
    ) -> Result<()> {
        let (mut state, failure) = self.enter(call)?;
        let thread = self.known(call, state.units[self.device].streams.get(&stream.0))?.clone();
        let number = state.number();
        let mut operation = make(&mut state, number)?;
        operation.stalled = failure == Some(Failure::Stall);
        state.units[self.device].queued.insert(number, operation);
        // The stream's thread takes numbers for as long as the stream is there.
        let _ = thread.send(number);
        if call == Call::CopyBlocking {
            // It ends, or the device dies.
            while state.units[self.device].queued.contains_key(&number) {
                self.node.ended.wait(&mut state);
            }
            if state.units[self.device].dead.is_some() {
                return Err(self.lost(&mut state, call));
            }
        }
        if failure == Some(Failure::RunsAnyway) {
            let text = "a fault was armed for this call, whose operation was queued all the same";
            return Err(self.error(call, ErrorClass::Transient, text));
        }
        Ok(())
    }

    /// Finds the bytes at a device address.
    fn place(&self, state: &State, at: DevicePtr, len: usize) -> Result<Place> {
        let here = |(device, unit): (usize, &Unit)| {
            let (start, block) = unit.memory.range(..=at.0).next_back()?;
            let offset = (at.0 - start) as usize;
            (offset <= block.len).then(|| (device, *start, block.clone(), offset))
        };
        let fault = match state.units.iter().enumerate().find_map(here) {
            Some((other, ..)) if other != self.device => {
                AddressFault::OtherDevice { device: format!("host:{other}") }
            }
            Some((_, start, block, offset)) => match len.checked_sub(block.len - offset) {
                None | Some(0) => return Ok(Place::Device(block, offset)),
                Some(over) => AddressFault::PastEnd { start, size: block.len, over },
            },
            None if state.has_pinned(at.0 as usize) => AddressFault::Host { registered: true },
            None if os::is_host_memory(at.0) == Some(true) => AddressFault::Host { registered: false },
            None => AddressFault::Unknown,
        };
        Err(fault.of(&self.name, at.0, len))
    }

    /// Checks a copy, and finds the allocations that it uses.
    fn transfer(&self, state: &State, transfer: Transfer) -> Result<Operation> {
        let host = |at: *const u8| Place::Host(at.cast_mut());
        let place = |at, len| self.place(state, at, len);
        Ok(match transfer {
            Transfer::Upload { src, dst, len } => Operation::copy(host(src), place(dst, len)?, len),
            Transfer::Download { src, dst, len } => Operation::copy(place(src, len)?, host(dst), len),
            Transfer::OnDevice { src, dst, len } => Operation::copy(place(src, len)?, place(dst, len)?, len),
            Transfer::OnHost { src, dst, len } => Operation::copy(host(src), host(dst), len),
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
        self.queue(Call::Launch, stream, |state, _| {
            let find = |ranges: &[(DevicePtr, usize)]| -> Result<Vec<(Place, usize)>> {
                ranges.iter().map(|(at, len)| Ok((self.place(state, *at, *len)?, *len))).collect()
            };
            Ok(Operation::launch(find(reads)?, find(writes)?, function))
        })
    }

    /// Enters a range of host memory, and locks its pages unless it is managed memory.
    fn pin_range(&self, call: Call, base: NonNull<u8>, len: usize, kind: Option<HostKind>) -> Result<()> {
        let start = base.addr().get();
        let (end, mut state) = (start + len, self.enter(call)?.0);
        if let Some((other, from, to)) = state.pinned(start..end) {
            let other = format!("{from:#x}..{to:#x}, which host:{other} has pinned");
            return self.refuse(call, format!("{start:#x}..{end:#x} overlaps {other}"));
        }
        state.units[self.device].ranges.insert(start, (end, kind));
        drop(state);
        if kind == Some(HostKind::Managed) {
            return Ok(());
        }
        os::lock(base, len).inspect_err(|_| {
            self.node.state.lock().units[self.device].ranges.remove(&start);
        })
    }

    /// Takes a range of host memory out again.
    fn unpin_range(&self, call: Call, base: NonNull<u8>, len: usize, kind: Option<HostKind>) -> Result<()> {
        let start = base.addr().get();
        self.find(call, |unit| {
            unit.ranges.get(&start).filter(|range| **range == (start + len, kind))?;
            unit.ranges.remove(&start).map(drop)
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

    unsafe fn unpin(&self, base: NonNull<u8>, len: usize) -> Result<()> {
        self.unpin_range(Call::Unpin, base, len, None)?;
        // A range that is pinned on the same page finds that page unlocked, which costs it speed.
        os::unlock(base, len).or_else(|error| self.refuse(Call::Unpin, error.to_string()))
    }

    unsafe fn register(&self, base: NonNull<u8>, len: usize, _whose: Whose) -> Result<()> {
        self.pin_range(Call::Pin, base, len, None)
    }

    fn allocate_host(&self, len: usize, kind: HostKind) -> Result<NonNull<u8>> {
        let base = os::map(len, 1)?;
        os::dont_fork(base, len);
        let pinned = self.pin_range(Call::AllocateHost, base, len, Some(kind));
        pinned.map(|()| base).inspect_err(|_| {
            // SAFETY: mapped above, and its address was given to no caller.
            let _ = unsafe { os::unmap(base, len) };
        })
    }

    unsafe fn free_host(&self, base: NonNull<u8>, len: usize, kind: HostKind) -> Result<()> {
        self.unpin_range(Call::FreeHost, base, len, Some(kind))?;
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
        let (capacity, address) = (self.node.capacity, state.addresses.max(FIRST_ADDRESS) + GAP);
        let left = capacity - state.units[self.device].used();
        // Pages are mapped here, and come when they are used.
        let block = (len <= left).then(|| Block::new(len)).flatten();
        let block = block.ok_or_else(|| {
            let [wanted, left, all] = [len, left, capacity].map(amount);
            let text = format!("no {wanted} of device memory: {left} of {all} are left");
            self.error(Call::Allocate, ErrorClass::Transient, text)
        })?;
        state.addresses = (address + len as u64).next_multiple_of(GAP);
        state.units[self.device].memory.insert(address, block);
        Ok(DevicePtr(address))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        // Unmapping takes time: the lock is free by then.
        self.find(Call::Free, |unit| unit.memory.remove(&ptr.0)).map(drop)
    }

    fn examine(&self, ptr: DevicePtr, len: usize) -> Result<()> {
        let (state, _) = self.enter(Call::Examine)?;
        self.place(&state, ptr, len).map(drop)
    }

    fn create_stream(&self, _urgent: bool) -> Result<StreamHandle> {
        let (mut state, _) = self.enter(Call::CreateStream)?;
        let (id, device, node) = (state.created + 1, self.device, Arc::clone(&self.node));
        let (queue, numbers) = unbounded();
        // Detached: the thread ends by itself after its stream, and no thread waits for that.
        let thread = os::thread::spawn(format!("pinpool-host-{id}"), move || node.serve(device, id, numbers));
        if let Err(error) = thread {
            let text = format!("no thread for the stream: {error}");
            return Err(self.error(Call::CreateStream, ErrorClass::Transient, text));
        }
        state.created = id;
        state.units[device].streams.insert(id, queue);
        Ok(StreamHandle(id))
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        self.find(Call::DestroyStream, |unit| unit.streams.remove(&stream.0)).map(drop)
    }

    unsafe fn copy(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        self.queue(Call::Copy, stream, |state, _| self.transfer(state, transfer))
    }

    unsafe fn copy_blocking(&self, stream: StreamHandle, transfer: Transfer) -> Result<()> {
        self.queue(Call::CopyBlocking, stream, |state, _| self.transfer(state, transfer))
    }

    fn create_event(&self) -> Result<EventHandle> {
        let (mut state, _) = self.enter(Call::CreateEvent)?;
        let event = state.number();
        state.units[self.device].events.insert(event, 0);
        Ok(EventHandle(event))
    }

    fn destroy_event(&self, event: EventHandle) -> Result<()> {
        self.find(Call::DestroyEvent, |unit| unit.events.remove(&event.0)).map(drop)
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.queue(Call::Record, stream, |state, number| {
            *self.known(Call::Record, state.units[self.device].events.get_mut(&event.0))? = number;
            Ok(Operation::mark(0))
        })
    }

    fn query(&self, event: EventHandle) -> Result<bool> {
        let is_over = |unit: &mut Unit| Some(!unit.queued.contains_key(unit.events.get(&event.0)?));
        self.find(Call::Query, is_over)
    }

    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.queue(Call::WaitEvent, stream, |state, _| {
            let recorded = self.known(Call::WaitEvent, state.units[self.device].events.get(&event.0))?;
            Ok(Operation::mark(*recorded))
        })
    }
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostDriver").field(&self.name).finish()
    }
}

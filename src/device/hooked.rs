//! A driver around another one, for unit tests: a hook is called before each call that it passes on.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::holds::Last;
use super::host::Call;
use super::{DevicePtr, Driver, EventHandle, HostKind, Stepped, StreamHandle, Transfer};
use crate::device::handle::Device;
use crate::error::{Error, Result};

/// What is not required of a driver it does not pass on, except batches of copies.
pub(crate) struct Hooked<F> {
    inner: Arc<dyn Driver>,
    name: &'static str,
    before: F,
}

impl<F: Fn(Call) + Send + Sync + 'static> Hooked<F> {
    /// A device of its own, under this name.
    pub(crate) fn device(name: &'static str, inner: Arc<dyn Driver>, before: F) -> Result<Device> {
        Device::known(name.into(), Arc::new(Self { inner, name, before }))
    }
}

impl<F> fmt::Debug for Hooked<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").field("name", &self.name).finish_non_exhaustive()
    }
}

macro_rules! pass_on {
    ({ $( $call:ident: fn $name:ident($($arg:ident : $ty:ty),*) -> $ret:ty; )* }
     unsafe { $( $ucall:ident: fn $uname:ident($($uarg:ident : $uty:ty),*) -> $uret:ty; )* }) => {
        $( fn $name(&self, $($arg: $ty),*) -> $ret {
            (self.before)(Call::$call);
            self.inner.$name($($arg),*)
        } )*
        $( unsafe fn $uname(&self, $($uarg: $uty),*) -> $uret {
            (self.before)(Call::$ucall);
            // SAFETY: the caller's word.
            unsafe { self.inner.$uname($($uarg),*) }
        } )*
    };
}

impl<F: Fn(Call) + Send + Sync + 'static> Driver for Hooked<F> {
    fn name(&self) -> &str {
        self.name
    }

    fn family(&self) -> &'static str {
        self.inner.family()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn leave(&self, last: Last) {
        self.inner.leave(last);
    }

    fn stepped(&self) -> Option<&dyn Stepped> {
        self.inner.stepped()
    }

    fn can_use(&self, kind: HostKind) -> Result<()> {
        self.inner.can_use(kind)
    }

    pass_on! {
        {
            AllocateHost: fn allocate_host(len: usize, kind: HostKind) -> Result<NonNull<u8>>;
            DeviceAddress: fn device_address(at: NonNull<u8>) -> Result<u64>;
            Allocate: fn allocate(len: usize) -> Result<DevicePtr>;
            Free: fn free(ptr: DevicePtr) -> Result<()>;
            CreateStream: fn create_stream() -> Result<StreamHandle>;
            DestroyStream: fn destroy_stream(stream: StreamHandle) -> Result<()>;
            CreateEvent: fn create_event() -> Result<EventHandle>;
            DestroyEvent: fn destroy_event(event: EventHandle) -> Result<()>;
            Record: fn record(event: EventHandle, stream: StreamHandle) -> Result<()>;
            Query: fn query(event: EventHandle) -> Result<bool>;
            WaitEvent: fn wait_event(stream: StreamHandle, event: EventHandle) -> Result<()>;
        }
        unsafe {
            Pin: fn pin(base: NonNull<u8>, len: usize) -> Result<()>;
            Unpin: fn unpin(base: NonNull<u8>, len: usize) -> Result<()>;
            Pin: fn register(base: NonNull<u8>, len: usize, read_only: bool) -> Result<()>;
            Unpin: fn unregister(base: NonNull<u8>, len: usize) -> Result<()>;
            FreeHost: fn free_host(base: NonNull<u8>, len: usize, kind: HostKind) -> Result<()>;
            Copy: fn copy(stream: StreamHandle, transfer: Transfer) -> Result<()>;
            Copy: fn copy_many(on: StreamHandle, copies: &[Transfer], failed: &mut dyn FnMut(usize, Error)) -> ();
            CopyBlocking: fn copy_blocking(stream: StreamHandle, transfer: Transfer) -> Result<()>;
        }
    }
}

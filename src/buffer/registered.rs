//! Values of the program whose bytes are copied from where they are: registered with a device, lent
//! like a buffer, and unregistered when nothing uses them any more.
//!
//! The value and its registration are one reference-counted object. Its owners are the
//! [`Registered`] and each entry on a timeline that a copy made. The last owner's drop has the
//! region thread unregister the bytes and then drop the value. What stays registered is leaked.
//!
//! While the program has the [`Registered`] itself, nothing is in flight, and of an `Arc` the
//! timeline has a clone, so the program cannot get exclusive access before the copy is done. So the
//! value may be read through a shared reference and written through an exclusive one.

#![allow(private_interfaces)]

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use stable_deref_trait::StableDeref;

use super::Lend;
use crate::device::Whose;
use crate::device::context::Context as DeviceContext;
use crate::device::handle::Device;
use crate::error::{Error, Result, SubmitError};
use crate::foreign;
use crate::sealed::Key;
use crate::stream::hold::{Resource, Retain};

/// A value whose bytes are page-locked where they are: a mapped file, shared memory, a vector. Made
/// by [`Device::register`].
///
/// It derefs to its bytes, which are copied like those of a [`PinnedBuf`](crate::PinnedBuf): by
/// value, or as an `Arc` for several copies. Every device of the same family may use it.
///
/// After a drop the device's region thread unregisters and drops the value, as soon as the last
/// copy that uses it is complete. (The value's drop must not wait for a buffer of a pool: pools
/// grow on that very thread.) [`into_inner`](Self::into_inner) gives the value back.
///
/// No pool counts it, only [`DeviceStats`](crate::telemetry::DeviceStats). In the child of a fork
/// it is left alone.
///
/// ```
/// use pinpool::Device;
///
/// let device = Device::open("host")?;
/// # // A machine whose memlock limit is used up registers nothing.
/// # if device.register(vec![0; 64]).is_err() { return Ok(()); }
/// let weights = device.register(vec![7; 1 << 16]).map_err(|refused| refused.error)?;
/// let (stream, memory) = (device.stream()?, device.alloc(1 << 16)?);
/// let weights = stream.upload(weights, &memory)?.wait()?; // no staging copy
/// let vector: Vec<u8> = weights.into_inner()?;
/// # assert_eq!(vector, [7; 1 << 16]);
/// # Ok::<(), pinpool::Error>(())
/// ```
pub struct Registered<T: Send + Sync + 'static>(Arc<RegisteredInner<T>>);

/// A registered value. Its drop unregisters.
struct RegisteredInner<T: Send + Sync + 'static> {
    /// In a box: moving a value may assert that nothing else reaches what it points to, and its
    /// bytes are in use. `None` once `into_inner` has taken it, which ended the [`Registered`].
    ///
    /// # Invariant
    /// Accessed through a [`Registered`], as that is borrowed, and by the last owner's drop.
    value: UnsafeCell<Option<Box<T>>>,
    range: RegisteredRange,
    read_only: bool,
    context: Arc<DeviceContext>,
}

/// The bytes that are registered.
#[derive(Clone, Copy)]
struct RegisteredRange {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address. The sender sends the memory behind it along, or keeps it.
unsafe impl Send for RegisteredRange {}

// SAFETY: the value is Send, and so is everything else but the address of its bytes.
unsafe impl<T: Send + Sync + 'static> Send for RegisteredInner<T> {}
// SAFETY: by the invariant of `value`, it is shared like a `&Registered<T>`, which gives out `&T`;
// `T` is Sync.
unsafe impl<T: Send + Sync + 'static> Sync for RegisteredInner<T> {}

impl<T: Send + Sync + 'static> Drop for RegisteredInner<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.get_mut().take() else { return };
        let (context, range) = (self.context.clone(), self.range);
        // In the child of a fork the job is forgotten, and with it the value.
        self.context.worker().send(move || match unregister(&context, range) {
            Ok(()) => foreign::discard(value),
            Err(_) => std::mem::forget(value),
        });
    }
}

/// Unregisters, on the region thread. Nothing uses the bytes any more.
fn unregister(context: &DeviceContext, range: RegisteredRange) -> Result<()> {
    // SAFETY: registered once, unregistered once, and the last copy that used it was seen complete.
    let undone = unsafe { context.driver().unpin(range.base, range.len) };
    match &undone {
        Ok(()) => context.holds().registered.sub(range.len),
        Err(error) => {
            context.holds().leaked(1);
            crate::foreign::error!(
                target: "pinpool::region::leak", device = context.name(), bytes = range.len, %error,
                "a value cannot be unregistered: it is leaked"
            );
        }
    }
    undone
}

impl Device {
    /// Page-locks a value's bytes where they are, so that copies from them, and to them if the
    /// value can be written to, need no staging. Waits for the device's region thread. One call
    /// locks all bytes, since a copy may not cross registrations. CUDA refuses a call for 512 GiB
    /// or more, and Linux 6.11 to 6.13 one for 2 GiB: register parts then.
    ///
    /// The bytes may start anywhere, and stay where and as they are. What can be registered: a
    /// `Vec<u8>`, a `Box<[u8]>`, an `Arc<[u8]>`, `memmap2`'s mappings (with that crate's feature
    /// `stable_deref_trait`), and every other type that derefs to bytes that stay where they are.
    ///
    /// # Errors
    /// The error has the value, unless that may be registered all the same. [`Error::Argument`] for
    /// no bytes; [`Error::Unsupported`] from devices and drivers that register nothing; else [as
    /// every call](Error#every-call). CUDA refuses bytes that are registered already (712), memory
    /// of its own, and memory whose pages cannot be pinned for writing, which
    /// [`register_read_only`](Self::register_read_only) takes: mappings opened for reading, and
    /// shared mappings of files on most disk file systems. Ascend registers whole pages of 4 KiB,
    /// each once, and by either call refuses bytes that cannot be written to.
    pub fn register<T>(&self, value: T) -> Result<Registered<T>, SubmitError<T>>
    where
        T: Deref<Target = [u8]> + StableDeref + Send + Sync + 'static,
    {
        self.register_as(value, false)
    }

    /// Page-locks bytes that devices only read, and that may be mapped for reading only (CUDA:
    /// `CU_MEMHOSTREGISTER_READ_ONLY`, if the device supports it; otherwise the driver may refuse
    /// such mappings). A download into the result is refused. [`register`](Self::register) does not
    /// fall back to this: what its result allows would then depend on the machine.
    ///
    /// # Errors
    /// As for [`register`](Self::register).
    pub fn register_read_only<T>(&self, value: T) -> Result<Registered<T>, SubmitError<T>>
    where
        T: Deref<Target = [u8]> + StableDeref + Send + Sync + 'static,
    {
        self.register_as(value, true)
    }

    fn register_as<T>(&self, value: T, read_only: bool) -> Result<Registered<T>, SubmitError<T>>
    where
        T: Deref<Target = [u8]> + StableDeref + Send + Sync + 'static,
    {
        let value = Box::new(value);
        let bytes: &[u8] = &value;
        let range = RegisteredRange { base: NonNull::from(bytes).cast(), len: bytes.len() };
        let context = self.context().clone();
        let maker = context.clone();
        let register = move || {
            let RegisteredRange { base, len } = { range };
            let whose = if read_only { Whose::ProgramToRead } else { Whose::Program };
            // SAFETY: the value owns the bytes, they stay where they are (`StableDeref`), and it is
            // dropped only after they were unregistered.
            maker.noting(unsafe { maker.driver().register(base, len, whose) })
        };
        let registered = match range.len {
            0 => Err(Error::empty()),
            _ => context.alive().and_then(|()| context.worker().call(register)),
        };
        match registered {
            Ok(()) => {}
            // A call that panicked may have registered the bytes or not.
            Err(error @ Error::Internal(_)) => {
                context.holds().leaked(1);
                std::mem::forget(value);
                return Err(SubmitError { error, buffer: None });
            }
            Err(error) => return Err(SubmitError::refused(error, *value)),
        }
        context.holds().registered.add(range.len);
        let value = UnsafeCell::new(Some(value));
        Ok(Registered(Arc::new(RegisteredInner { value, range, read_only, context })))
    }
}

impl<T: Send + Sync + 'static> Registered<T> {
    /// Whether devices may only read the value.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.0.read_only
    }

    /// The address at which `device` sees the first byte. It is raw, as for
    /// [`PinnedBuf::device_address`](crate::PinnedBuf::device_address).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a device of another family; [`Error::Unsupported`] for one that
    /// cannot map host memory; else [as every call](Error#every-call).
    pub fn device_address(&self, device: &Device) -> Result<u64> {
        let context = device.context();
        self.check_family(context)?;
        context.alive()?;
        context.noting(context.driver().device_address(self.0.range.base))
    }

    /// Unregisters the bytes and gives the value back. Waits for the device's region thread, and
    /// for no copy, since none is in flight.
    ///
    /// # Errors
    /// [As every call](Error#every-call). The value is then leaked: the device may still reach it.
    pub fn into_inner(self) -> Result<T> {
        // SAFETY: by the invariant: `self` owns the value, and nothing is borrowed.
        let value = unsafe { &mut *self.0.value.get() }.take();
        let value = value.ok_or(Error::Internal("a registered value was taken out twice"))?;
        let (context, range) = (self.0.context.clone(), self.0.range);
        match self.0.context.worker().call(move || unregister(&context, range)) {
            Ok(()) => Ok(*value),
            Err(error) => {
                std::mem::forget(value);
                Err(error)
            }
        }
    }

    /// [`Error::Mismatch`], unless the device of this context may use it: registered memory serves
    /// all devices of a family.
    fn check_family(&self, context: &DeviceContext) -> Result<()> {
        if context.driver().family() == self.0.context.driver().family() {
            return Ok(());
        }
        let remedy = "register the value with a device of that family (Device::register)";
        let (of, with) = (self.0.context.name().to_owned(), context.name().to_owned());
        Err(Error::Mismatch { what: "a registered value", of, with, remedy })
    }
}

impl<T> Deref for Registered<T>
where
    T: Deref<Target = [u8]> + StableDeref + Send + Sync + 'static,
{
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: by the invariant no exclusive access exists while `self` is borrowed.
        unsafe { &*self.0.value.get() }.as_deref().map_or(&[], |value| value)
    }
}

impl<T> DerefMut for Registered<T>
where
    T: DerefMut<Target = [u8]> + StableDeref + Send + Sync + 'static,
{
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: by the invariant: `self` is borrowed exclusively, so nothing is in flight.
        unsafe { &mut *self.0.value.get() }.as_deref_mut().map_or(&mut [], |value| value)
    }
}

impl<T> AsRef<[u8]> for Registered<T>
where
    T: Deref<Target = [u8]> + StableDeref + Send + Sync + 'static,
{
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<T: Send + Sync + 'static> fmt::Debug for Registered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("len", &self.0.range.len)
            .field("read_only", &self.0.read_only)
            .finish_non_exhaustive()
    }
}

// Neither counts for a pool. A value that is quarantined is never unregistered and never dropped.
impl<T: Send + Sync + 'static> Retain for RegisteredInner<T> {}
impl<T: Send + Sync + 'static> Retain for Registered<T> {}

impl<T> Lend for Registered<T>
where
    T: Deref<Target = [u8]> + StableDeref + Send + Sync + 'static,
{
    fn lend(&self, _: Key) -> Resource {
        Resource::Object(self.0.clone())
    }
    fn bytes(&self, _: Key) -> &[u8] {
        self
    }
    fn check_serves(&self, context: &DeviceContext, _: Key) -> Result<()> {
        self.check_family(context)
    }
}

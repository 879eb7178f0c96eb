//! Slices of cudarc's that copies of the crate use as device memory, and give back.
//!
//! A [`DeviceSlice`](crate::DeviceSlice) may be copied to on any stream, long after the call that
//! made it. A `CudaSlice` is ordered by its own stream and events alone. So a slice is taken as a
//! whole: nothing else can use it, all work of its context is complete before the first copy, and
//! all copies are complete when it comes back.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::cudarc::driver::{CudaSlice, DevicePtr as _};

use super::{device, said};
use crate::copy::copier::may_wait;
use crate::device::handle::Device;
use crate::error::{Error, Result, SubmitError};
use crate::locks::{Condvar, Mutex};

/// How often a wait looks whether the device was lost.
const LOOK: Duration = Duration::from_millis(50);
/// The number of looks after that: a thread of the crate gives up what is in flight on a lost
/// device.
const LOOKS_AFTER: u32 = 20;

/// A `CudaSlice` as device memory for copies: for a loader that fills a server's own allocations.
///
/// ```no_run
/// # use std::{error::Error, sync::Arc};
/// # fn demo(stream: Arc<cudarc::driver::CudaStream>, copier: pinpool::Copier) -> Result<(), Box<dyn Error>> {
/// use pinpool::cudarc::SharedSlice;
///
/// let weights = stream.alloc_zeros::<f32>(1000)?;
/// let shared = SharedSlice::new(weights)?;
/// copier.upload_slice(&[0; 4000], shared.memory())?;
/// let weights = shared.into_inner()?; // when no copy uses it any more
/// # drop(weights);
/// # Ok(()) }
/// ```
pub struct SharedSlice<T: Send + 'static> {
    memory: crate::DeviceSlice,
    device: Device,
    back: Arc<Back<T>>,
}

/// Where the slice is put when nothing uses it any more.
struct Back<T> {
    slice: Mutex<Option<CudaSlice<T>>>,
    came: Condvar,
}

/// The owner of the memory: dropped when the last handle is gone and the last copy is complete.
struct Owner<T> {
    slice: Option<CudaSlice<T>>,
    back: Arc<Back<T>>,
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        *self.back.slice.lock() = self.slice.take();
        self.back.came.notify_all();
    }
}

impl<T: bytemuck::AnyBitPattern + Send + 'static> SharedSlice<T> {
    /// Takes a slice, after a wait for all work of its context: other streams may still use the
    /// slice, or the memory that a new one was given. So make them at start-up, one after the
    /// other, before other work. No stream of the context is being captured meanwhile.
    ///
    /// # Errors
    /// With the slice: [`Error::Argument`] for a slice without elements; else as for
    /// [`device`](crate::cudarc::device), also while a stream of the context is being captured.
    #[allow(clippy::result_large_err, reason = "the slice comes back")]
    pub fn new(slice: CudaSlice<T>) -> Result<Self, SubmitError<CudaSlice<T>>> {
        let ((device, address, len), slice) = SubmitError::unless(Self::looked_at(&slice), slice)?;
        let back = Arc::new(Back { slice: Mutex::default(), came: Condvar::new() });
        let owner = Owner { slice: Some(slice), back: back.clone() };
        // SAFETY: the owner has the slice, which keeps the memory allocated, and through which
        // alone other code could use it. All work that did is complete. Any bytes are a `T`.
        match unsafe { device.raw_memory(address, len, owner) } {
            Ok(memory) => Ok(Self { memory, device, back }),
            Err(SubmitError { error, buffer }) => {
                drop(buffer);
                Err(SubmitError { error, buffer: back.slice.lock().take() })
            }
        }
    }

    /// The slice's device, address and bytes, when nothing uses it.
    fn looked_at(slice: &CudaSlice<T>) -> Result<(Device, u64, usize)> {
        let stream = slice.stream();
        let device = device(stream.context())?;
        let context = device.context();
        context.alive()?;
        let (address, recorded) = slice.device_ptr(stream);
        drop(recorded);
        said(context, "cuCtxSynchronize", stream.context().synchronize().err())?;
        match slice.num_bytes() {
            0 => Err(Error::empty()),
            len => Ok((device, address, len)),
        }
    }
}

impl<T: Send + 'static> SharedSlice<T> {
    /// The memory, for copies: on any stream of the crate and by any copier of its device.
    #[must_use]
    pub fn memory(&self) -> &crate::DeviceSlice {
        &self.memory
    }

    /// Waits until no other handle to the memory and no copy is left, and gives the slice back.
    /// (Tensors that a loader has given out are such handles.) A `SharedSlice` that is dropped
    /// frees the slice then.
    ///
    /// # Errors
    /// The device's loss, if what was in flight is not given up a second later; the slice is
    /// dropped then. Else [as every wait](Error#waits): the slice is freed when nothing uses it any
    /// more.
    pub fn into_inner(self) -> Result<CudaSlice<T>> {
        crate::os::check_fork()?;
        may_wait()?;
        let Self { memory, device, back } = self;
        drop(memory);
        let mut slice = back.slice.lock();
        let mut looks = LOOKS_AFTER;
        loop {
            if let Some(slice) = slice.take() {
                return Ok(slice);
            }
            if let Some(lost) = device.lost() {
                if looks == 0 {
                    return Err(lost);
                }
                looks -= 1;
            }
            back.came.wait_for(&mut slice, LOOK);
        }
    }
}

impl<T: Send + 'static> fmt::Debug for SharedSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedSlice").field(&self.memory).finish()
    }
}

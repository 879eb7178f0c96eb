//! What can be lent to a device: how a value gets onto a timeline, how it comes back, and how it is
//! let go of before the device is done.

#![allow(private_interfaces)]

use std::sync::Arc;

use super::{BUFFER, PinnedBuf};
use crate::central::Segment;
use crate::device::context::Context as DeviceContext;
use crate::error::{Error, Result};
use crate::freelist::state;
use crate::sealed::Key;
use crate::stream::hold::{Resource, Retain};

/// A value that can be lent to a device and comes back when the device is done: [`PinnedBuf`] and
/// [`Registered`](crate::Registered), an `Arc` of either for one buffer that feeds several copies,
/// and `()` for work without a host buffer, such as a copy within the device. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be lent to a device",
    label = "the device may still use it when this call has returned",
    note = "asynchronous calls take a `PinnedBuf`, a `Registered` value, or an `Arc` of either; a `StreamBuf` becomes a `PinnedBuf` by `wait`; borrowed and plain memory is copied by `Stream::upload_blocking`, `Copier::upload_slice` and `Copier::upload_slices`"
)]
pub trait Lend: Sized + Send + Sync + Unpin {
    /// What is handed to the timeline.
    #[doc(hidden)]
    fn lend(&self, _: Key) -> Resource;
    /// The device is done: gives the value back to its owner. `written`: the number of bytes that
    /// the device wrote. Does nothing for an `Arc`, like `abandon`.
    #[doc(hidden)]
    fn finish(self, written: Option<usize>, _: Key) -> Result<Self> {
        let _ = written;
        Ok(self)
    }
    /// The handle is dropped before the device is done.
    #[doc(hidden)]
    fn abandon(self, _: Key) {}
    /// The written bytes, if the CPU may read them.
    #[doc(hidden)]
    fn bytes(&self, _: Key) -> &[u8];
    /// [`Error::Mismatch`](crate::Error::Mismatch), unless this device may use the value.
    #[doc(hidden)]
    fn check_serves(&self, context: &DeviceContext, _: Key) -> Result<()>;
}

impl Lend for PinnedBuf {
    #[inline]
    fn lend(&self, _: Key) -> Resource {
        Resource::Segment(self.segment.alias())
    }

    fn finish(mut self, written: Option<usize>, _: Key) -> Result<Self> {
        let descriptor = self.segment.descriptor();
        if descriptor.word().state() == state::COMPLETED {
            descriptor.set(state::HOST);
            self.len = written.unwrap_or(self.len);
            return Ok(self);
        }
        // Quarantined: the timeline has given the segment up, and no handle returns it.
        std::mem::forget(self);
        Err(Error::Unsupported(
            "the buffer was quarantined: the device cannot be shown to be done with it".into(),
        ))
    }

    fn abandon(self, _: Key) {
        let segment = self.into_segment();
        let descriptor = segment.descriptor();
        let word = descriptor.word();
        let detached = match word.state() {
            state::FLIGHT => descriptor.compare_exchange(word, state::DETACHED),
            _ => Err(word),
        };
        // The timeline was faster: the device is done, and the segment waits for the handle.
        if detached.is_err_and(|found| found.state() == state::COMPLETED) {
            descriptor.set(state::HOST);
            // SAFETY: completed, so every event that covers it was seen complete; the handle that
            // owned the segment is gone.
            unsafe { segment.release() };
        }
    }

    #[inline]
    fn bytes(&self, _: Key) -> &[u8] {
        self
    }

    #[inline]
    fn check_serves(&self, context: &DeviceContext, _: Key) -> Result<()> {
        self.segment.central().config().check_serves(BUFFER, context)
    }
}

/// A value that the timeline shares: nobody has exclusive access before the copy is done.
impl<B: Lend + Retain + 'static> Lend for Arc<B> {
    fn lend(&self, _: Key) -> Resource {
        Resource::Object(self.clone())
    }
    fn bytes(&self, key: Key) -> &[u8] {
        (**self).bytes(key)
    }
    fn check_serves(&self, context: &DeviceContext, key: Key) -> Result<()> {
        (**self).check_serves(context, key)
    }
}

impl Lend for () {
    fn lend(&self, _: Key) -> Resource {
        Resource::Nothing
    }
    fn bytes(&self, _: Key) -> &[u8] {
        &[]
    }
    fn check_serves(&self, _: &DeviceContext, _: Key) -> Result<()> {
        Ok(())
    }
}

// Where a timeline has quarantined the segment, other holders of the `Arc` may go on reading.
impl Retain for PinnedBuf {
    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) -> bool {
        visit(&self.segment);
        false
    }
}

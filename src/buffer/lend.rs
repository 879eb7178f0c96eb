//! What can be lent to a device: how it goes on a timeline, comes back, or is let go of before the device is done.

use std::sync::Arc;

use super::PinnedBuf;
use crate::device::context::Context as DeviceContext;
use crate::error::{Error, Result};
use crate::freelist::state;
use crate::sealed::Key;
use crate::stream::timeline::{Joint, Quarantined, Resource, Retain};

/// What can be lent to a device and comes back when it is done: [`PinnedBuf`] and [`Registered`](crate::Registered), an
/// `Arc` of either for one buffer that feeds several copies, and `()` where no buffer of ours is involved, as in a copy
/// within the device. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be lent to a device",
    label = "the device may still use it when this call has returned",
    note = "asynchronous calls take a `PinnedBuf`, a `Registered` value, or an `Arc` of either; borrowed and plain memory is copied by `upload_blocking`"
)]
pub trait Lend: sealed::Lend {}

impl Lend for PinnedBuf {}
impl Lend for Arc<PinnedBuf> {}
impl Lend for () {}

pub(crate) mod sealed {
    use super::{DeviceContext, Error, Key, Resource, Result};

    pub trait Lend: Sized + Send + Sync + Unpin {
        /// What goes on the timeline.
        #[doc(hidden)]
        #[allow(private_interfaces)]
        fn lend(&self, _: Key) -> Resource;
        /// The device is done: back to the owner. `written`: bytes that it wrote. Of what the timeline has a share of
        /// its own nothing is to be done, here and below.
        #[doc(hidden)]
        fn finish(self, written: Option<usize>, _: Key) -> Result<Self> {
            let _ = written;
            Ok(self)
        }
        /// The handle is dropped while the device is not done.
        #[doc(hidden)]
        fn abandon(self, _: Key) {}
        /// Written bytes, if the CPU may read them.
        #[doc(hidden)]
        fn bytes(&self, _: Key) -> &[u8];
        /// Start and capacity, to be written by a device; with an error for what cannot be written to.
        #[doc(hidden)]
        fn target(&self, _: Key) -> Result<(*mut u8, usize)> {
            Err(Error::Unsupported("a shared buffer cannot be written to".into()))
        }
        /// Whether this device may use it.
        #[doc(hidden)]
        #[allow(private_interfaces)]
        fn serves(&self, context: &DeviceContext, _: Key) -> bool;
    }
}

impl sealed::Lend for PinnedBuf {
    #[inline]
    #[allow(private_interfaces)]
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
        // Quarantined: it is nobody's any more.
        std::mem::forget(self);
        Err(Error::Unsupported(
            "the buffer was quarantined: nobody can prove that the device is done with it".into(),
        ))
    }

    fn abandon(self, _: Key) {
        let (segment, _) = self.into_parts();
        let descriptor = segment.descriptor();
        let word = descriptor.word();
        let detached = match word.state() {
            state::FLIGHT if cfg!(pinpool_planted = "detach_by_store") => Ok(descriptor.set(state::DETACHED)),
            state::FLIGHT => descriptor.compare_exchange(word, state::DETACHED),
            _ => Err(word),
        };
        // The timeline was faster: the device is done, and the segment waited for us.
        if detached.is_err_and(|found| found.state() == state::COMPLETED) {
            descriptor.set(state::HOST);
            // SAFETY: completed, so every event that covers it was seen complete; the handle owned it and is gone.
            unsafe { segment.release() };
        }
    }

    #[inline]
    fn bytes(&self, _: Key) -> &[u8] {
        self
    }

    #[inline]
    fn target(&self, _: Key) -> Result<(*mut u8, usize)> {
        Ok((self.segment.base().as_ptr(), self.segment.len()))
    }

    #[inline]
    #[allow(private_interfaces)]
    fn serves(&self, context: &DeviceContext, _: Key) -> bool {
        self.segment.central().config().serves.contains(&context.id())
    }
}

impl sealed::Lend for Arc<PinnedBuf> {
    #[allow(private_interfaces)]
    fn lend(&self, _: Key) -> Resource {
        Resource::Object(Box::new(SharedBuf(self.clone())))
    }
    fn bytes(&self, _: Key) -> &[u8] {
        self
    }
    #[allow(private_interfaces)]
    fn serves(&self, context: &DeviceContext, _: Key) -> bool {
        self.segment.central().config().serves.contains(&context.id())
    }
}

impl sealed::Lend for () {
    #[allow(private_interfaces)]
    fn lend(&self, _: Key) -> Resource {
        Resource::Object(Box::new(()))
    }
    fn bytes(&self, _: Key) -> &[u8] {
        &[]
    }
    #[allow(private_interfaces)]
    fn serves(&self, _: &DeviceContext, _: Key) -> bool {
        true
    }
}

#[derive(Debug)]
struct SharedBuf(Arc<PinnedBuf>);

impl Retain for SharedBuf {
    fn descriptor(&self) -> Option<usize> {
        Some(std::ptr::from_ref(self.0.segment.descriptor()).addr())
    }

    fn quarantine(self: Box<Self>) -> Quarantined {
        let segment = self.0.segment.alias();
        let word = segment.descriptor().word();
        // Leaked, so the segment is never returned; whoever still has the Arc may go on reading. The first to lose it
        // books it.
        std::mem::forget(self);
        let first = word.state() == state::HOST
            && segment.descriptor().compare_exchange(word, state::QUARANTINED).is_ok();
        if first { Quarantined::one(segment) } else { Quarantined::default() }
    }
}

/// The parts of a hold over several streams.
pub(crate) fn joint(buf: &PinnedBuf, streams: usize) -> Arc<Joint> {
    Joint::new(buf.segment.alias(), streams as u32)
}

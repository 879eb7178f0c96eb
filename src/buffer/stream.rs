//! Stream-ready buffers: [`StreamBuf`]. A device may still use such a buffer, but only earlier on
//! the stream that it is for.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::PinnedBuf;
use crate::central::Segment;
use crate::error::{Error, Result};
use crate::freelist::state;
use crate::stream::timeline::Timeline;

/// A stream-ready buffer: a device may still use it, but only for work that comes earlier on this
/// very stream, so later work there may use it too. The CPU may not touch it. Made by
/// [`Pool::checkout_on`](crate::Pool::checkout_on).
///
/// A copy on another stream is refused, and the error carries the buffer back. Dropped unused, the
/// buffer goes back to the stream's work in flight, or to the pool.
#[must_use = "a copy of its stream takes it; dropped, it goes back to where it was"]
pub struct StreamBuf {
    timeline: Arc<Timeline>,
    segment: Segment,
    /// Whether it was claimed while in flight. If not, it is host-ready in fact.
    claimed: bool,
}

impl StreamBuf {
    /// From a host-ready buffer, which is ready for any stream.
    pub(crate) fn ready(timeline: Arc<Timeline>, buf: PinnedBuf) -> Self {
        Self { timeline, segment: buf.into_segment(), claimed: false }
    }

    pub(crate) fn claimed(timeline: Arc<Timeline>, segment: Segment) -> Self {
        Self { timeline, segment, claimed: true }
    }

    /// The number of bytes that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.segment.len()
    }

    /// Whether the memory was claimed while it was in flight, and not taken from the free memory.
    #[must_use]
    pub fn was_claimed(&self) -> bool {
        self.claimed
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Takes the segment out of the buffer, which is not dropped.
    pub(crate) fn into_segment(self) -> Segment {
        let mut this = ManuallyDrop::new(self);
        let segment = this.segment.alias();
        // SAFETY: dropped once: `this` is never dropped, and not used any more.
        unsafe { std::ptr::drop_in_place(&raw mut this.timeline) };
        segment
    }

    /// Waits until the earlier work is done, and gives the buffer, host-ready and empty.
    ///
    /// # Errors
    /// [As every wait](Error#waits).
    pub fn wait(self) -> Result<PinnedBuf> {
        crate::os::check_fork()?;
        if let Some(seq) = self.timeline.claimed_until(&self.segment) {
            self.timeline.wait(seq, None)?;
        }
        let alive = self.timeline.context().alive();
        let segment = self.into_segment();
        if segment.descriptor().word().state() != state::HOST {
            // The timeline has quarantined it.
            return Err(alive.err().unwrap_or(Error::Closed));
        }
        // SAFETY: host-ready: fresh, or every event that covers it was seen complete. The buffer
        // owned the segment, and no byte counts as written.
        Ok(unsafe { PinnedBuf::new(segment, 0) })
    }
}

impl Drop for StreamBuf {
    fn drop(&mut self) {
        self.timeline.unclaim(self.segment.alias());
    }
}

impl std::fmt::Debug for StreamBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamBuf")
            .field("capacity", &self.capacity())
            .field("claimed", &self.claimed)
            .finish()
    }
}

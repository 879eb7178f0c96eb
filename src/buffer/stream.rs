//! Stream-ready buffers: a device may still use them, earlier on the very stream that they are for.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::PinnedBuf;
use crate::central::Segment;
use crate::error::{Error, Result};
use crate::stream::timeline::{Resource, Timeline};

/// A stream-ready buffer: a device may still use it, but only earlier on this very stream, so that later work on this
/// stream may use it too. The CPU may not touch it.
///
/// Used on another stream, the call is refused and returns the buffer. Dropped unused, it goes back where it was.
pub struct StreamBuf {
    timeline: Arc<Timeline>,
    kind: Readiness,
    segment: Segment,
}

#[derive(Debug)]
enum Readiness {
    /// A fresh segment: host-ready in fact.
    Fresh,
    /// Claimed while in flight, under this key.
    Claimed(usize),
}

impl StreamBuf {
    /// Host-ready is ready for any stream.
    pub(crate) fn ready(timeline: Arc<Timeline>, buf: PinnedBuf) -> Self {
        Self { timeline, kind: Readiness::Fresh, segment: buf.into_parts().0 }
    }

    pub(crate) fn claimed(timeline: Arc<Timeline>, key: usize, segment: Segment) -> Self {
        Self { timeline, kind: Readiness::Claimed(key), segment }
    }

    /// Bytes that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.segment.len()
    }

    /// Whether the segment was claimed while it was in flight, rather than taken from the free ones.
    #[must_use]
    pub fn was_claimed(&self) -> bool {
        matches!(self.kind, Readiness::Claimed(_))
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// What goes on the timeline, which must be this buffer's own. The buffer is not dropped any more.
    pub(crate) fn into_resource(self) -> (Resource, Segment) {
        let this = ManuallyDrop::new(self);
        // SAFETY: read once; `this` is never dropped.
        let timeline = unsafe { std::ptr::read(&this.timeline) };
        drop(timeline);
        let resource = match this.kind {
            Readiness::Fresh => Resource::Segment(this.segment.alias()),
            Readiness::Claimed(key) => Resource::Claimed(key),
        };
        (resource, this.segment.alias())
    }

    /// Waits until the earlier work is done and gives the buffer, host-ready and empty.
    ///
    /// # Errors
    /// What the stream was lost with.
    pub fn wait(self) -> Result<PinnedBuf> {
        crate::os::check_fork()?;
        if let Readiness::Claimed(key) = self.kind {
            if let Some(seq) = self.timeline.claimed_until(key) {
                self.timeline.wait(seq, None)?;
            }
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: read once; `this` is never dropped.
        let timeline = unsafe { std::ptr::read(&this.timeline) };
        let segment = match this.kind {
            Readiness::Fresh => Some(this.segment.alias()),
            Readiness::Claimed(key) => timeline.resolve_claim(key),
        };
        match segment {
            // SAFETY: host-ready: fresh, or every event that covers it was seen complete. Ours, and nothing is written.
            Some(segment) => Ok(unsafe { PinnedBuf::new(segment, 0) }),
            None => Err(timeline.context().alive().err().unwrap_or(Error::Closed)),
        }
    }
}

impl Drop for StreamBuf {
    fn drop(&mut self) {
        match self.kind {
            // SAFETY: fresh: host-ready, ours, and this is the end of it.
            Readiness::Fresh => unsafe { self.segment.alias().release() },
            Readiness::Claimed(key) => self.timeline.unclaim(key),
        }
    }
}

impl std::fmt::Debug for StreamBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamBuf")
            .field("capacity", &self.capacity())
            .field("claimed", &self.was_claimed())
            .finish()
    }
}

//! Pinned buffers that copies use where they are.
//!
//! A buffer that is in one chunk only is lent to that chunk's copies. A block whose pages are in several chunks is lent
//! once: each chunk has a share of it, and so has the job. It goes back when the last share is dropped.

use std::sync::{Arc, OnceLock};

use crate::buffer::PinnedBuf;
use crate::buffer::sealed::Sealed;
use crate::locks::Mutex;
use crate::sealed::KEY;
use crate::stream::timeline::{Quarantined, Retain, RetainedResource};

/// A lent block. Its drop gives it back: the device is done with it, or never got it.
#[derive(Debug)]
pub(super) struct Block(Mutex<Option<RetainedResource>>);

impl Block {
    pub(super) fn new(retained: RetainedResource) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(retained))))
    }

    /// The device can never be shown to be done with it.
    fn quarantine(&self) -> Quarantined {
        let retained = self.0.lock().take();
        retained.map(RetainedResource::quarantine).unwrap_or_default()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.0.get_mut().take().into_iter().for_each(|retained| _ = retained.complete());
    }
}

/// What a chunk's copies use. Its drop gives it back, and then says so.
#[derive(Debug, Default)]
pub(super) struct Lent {
    pub(super) retained: Vec<RetainedResource>,
    pub(super) blocks: Vec<Arc<Block>>,
    pub(super) back: Arc<OnceLock<()>>,
}

impl Lent {
    /// Lends a buffer of the copier's, which nothing asks for any more.
    pub(super) fn add(&mut self, buf: PinnedBuf) {
        self.retained.push(RetainedResource::of(Sealed::lend(&buf, KEY)));
        Sealed::abandon(buf, KEY);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.retained.drain(..).for_each(|retained| _ = retained.complete());
        self.blocks.clear();
        let _ = self.back.set(());
    }
}

impl Retain for Lent {
    fn quarantine(mut self: Box<Self>) -> Quarantined {
        let blocks: Quarantined = self.blocks.iter().map(|block| block.quarantine()).sum();
        let buffers: Quarantined = self.retained.drain(..).map(RetainedResource::quarantine).sum();
        Quarantined { buffers: blocks.buffers + buffers.buffers, bytes: blocks.bytes + buffers.bytes }
    }

    fn for_each_descriptor(&self, visit: &mut dyn FnMut(usize)) {
        self.retained.iter().for_each(|retained| retained.for_each_descriptor(visit));
    }
}

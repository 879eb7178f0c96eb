//! Pinned blocks that copies use where they are.
//!
//! A block whose pages are in several chunks is lent once: each chunk has a share of it, and so has the job. It goes back
//! when the last share is dropped.

use std::sync::{Arc, OnceLock};

use crate::buffer::PinnedBuf;
use crate::buffer::sealed::Sealed;
use crate::central::Segment;
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

    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.0.lock().iter().for_each(|retained| retained.for_each_segment(visit));
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
#[derive(Debug)]
pub(super) struct Lent {
    blocks: Vec<Arc<Block>>,
    /// The kernel's table, which has a segment of its own.
    table: Option<RetainedResource>,
    pub(super) back: Arc<OnceLock<()>>,
}

impl Lent {
    pub(super) fn new(blocks: &[Arc<Block>]) -> Self {
        Self { blocks: blocks.to_vec(), table: None, back: Arc::default() }
    }

    /// Lends the table, which nothing asks for any more.
    pub(super) fn add(&mut self, table: PinnedBuf) {
        self.table = Some(RetainedResource::of(Sealed::lend(&table, KEY)));
        Sealed::abandon(table, KEY);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.table.take().into_iter().for_each(|table| _ = table.complete());
        self.blocks.clear();
        let _ = self.back.set(());
    }
}

impl Retain for Lent {
    fn quarantine(mut self: Box<Self>) -> Quarantined {
        let blocks = self.blocks.iter().map(|block| block.quarantine());
        blocks.chain(self.table.take().map(RetainedResource::quarantine)).sum()
    }

    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.blocks.iter().for_each(|block| block.for_each_segment(visit));
        self.table.iter().for_each(|table| table.for_each_segment(visit));
    }
}

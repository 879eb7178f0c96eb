//! Pinned blocks that copies use where they are.
//!
//! A block whose pages are in several chunks is lent once: each chunk has a share of it, and so has the job. It goes back
//! when the last share is dropped.

use std::sync::{Arc, OnceLock};

use crate::buffer::Lend;
use crate::buffer::PinnedBuf;
use crate::central::Segment;
use crate::sealed::KEY;
use crate::stream::hold::Retain;

/// What a chunk's copies use. Its drop gives its shares back, and then says so.
pub(super) struct Lent {
    blocks: Vec<Arc<dyn Retain>>,
    pub(super) back: Arc<OnceLock<()>>,
}

impl Lent {
    pub(super) fn new(blocks: &[Arc<dyn Retain>]) -> Self {
        Self { blocks: blocks.to_vec(), back: Arc::default() }
    }

    /// Lends the kernel's table, which has a segment of its own and which nothing asks for any more.
    pub(super) fn add(&mut self, table: PinnedBuf) {
        self.blocks.push(Lend::lend(&table, KEY).shared());
        Lend::abandon(table, KEY);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.blocks.clear();
        let _ = self.back.set(());
    }
}

impl Retain for Lent {
    fn for_each_segment(&self, visit: &mut dyn FnMut(&Segment)) {
        self.blocks.for_each_segment(visit);
    }
}

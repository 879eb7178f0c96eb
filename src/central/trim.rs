//! Which regions are given back to the system: idle ones, the newest first. The region thread unpins
//! them ([`crate::region`]).

use super::{CentralPool, Core};
use crate::region::RegionId;

impl CentralPool {
    /// Gives idle regions back, the newest first, as long as `keep` bytes stay, and returns how
    /// many bytes go. None goes while a request waits or memory is being pinned.
    pub(crate) fn trim(&self, keep: usize) -> usize {
        let mut core = self.lock();
        self.reclaim_all(&mut core);
        if !core.queue.is_empty() || core.growing > 0 {
            return 0;
        }
        let before = core.arena.bytes().total;
        for (id, len) in core.idle_regions() {
            if core.arena.bytes().total - len >= keep {
                core.retire(id);
            }
        }
        before - core.arena.bytes().total
    }
}

impl Core {
    /// The idle regions, the newest first, each with its bytes.
    pub(super) fn idle_regions(&self) -> Vec<(RegionId, usize)> {
        let regions = self.arena.regions().into_iter().rev();
        regions.filter(|(_, region)| region.idle).map(|(id, region)| (id, region.bytes)).collect()
    }

    /// Removes an idle region, and has it unpinned before anything that is pinned from now on.
    pub(super) fn retire(&mut self, id: RegionId) {
        if self.arena.retire(id).is_none() {
            return;
        }
        if let Some(regions) = self.me.upgrade().and_then(|central| central.regions.clone()) {
            regions.remove(id);
        }
    }
}

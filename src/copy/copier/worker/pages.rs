//! What a worker does with a chunk of pages: contiguous pinned memory of a caller's for many places on the device.
//!
//! No CPU moves the bytes. Up: the memory is copied to a slot of the ring, with a table of the places, and the kernel
//! spreads it. Down: the table is copied, the kernel collects the pages in the slot, and a copy takes them to the memory.
//! Where there is no ring, or the pages are long, each is copied by itself.

use super::super::packing::Run;
use super::*;

impl Worker<'_> {
    /// Has pages copied to a slot, or collected in one; or copied one by one.
    pub(super) fn send_pages(&mut self, n: usize, pages: Pages) -> Step {
        let direction = self.owned[n].job.direction;
        let ring = self.engine.spreaders.as_ref().filter(|both| !both[direction as usize].is_slow());
        let wanted = way(pages.stretches.len(), pages.data) == Way::Ring && ring.is_some();
        if self.owned[n].job.is_stopped() {
            return Step::Ended(End::Dropped);
        }
        let rows: usize = pages.stretches.iter().map(|stretch| stretch.rows().count()).sum();
        let slot = if wanted { self.engine.slot() } else { Take::None };
        let slot = match slot {
            Take::Slot(slot) => slot,
            Take::Full if !self.is_slow(direction) => return Step::Same(Stage::Pages(pages)),
            Take::Full | Take::None => {
                return self.send_in_place(n, pages.transfers(direction), pages.lent);
            }
        };
        // The table is in a small segment of its own, which returns by itself.
        let table = match self.engine.segments.pool.try_checkout(rows * ROW) {
            Ok(table) => table,
            Err(_) => {
                self.engine.ring.give(slot);
                return self.send_in_place(n, pages.transfers(direction), pages.lent);
            }
        };
        let at = table_at(pages.data);
        self.owned[n].packed = Packed { data: pages.data, rows, stretches: Vec::new() };
        match direction {
            Direction::Up => self.upload_pages(n, pages, slot, table, at),
            Direction::Down => self.collect_pages(n, pages, slot, table, at),
        }
    }

    fn upload_pages(&mut self, n: usize, pages: Pages, slot: Slot, mut table: PinnedBuf, at: usize) -> Step {
        let Owned { job, chunk, packed, .. } = &self.owned[n];
        if !self.engine.may_send(job, chunk.bytes) {
            self.engine.ring.give(slot);
            return Step::Same(Stage::Pages(pages));
        }
        let host = table.as_mut_ptr();
        // SAFETY: checked out with room for the rows; segments start on a multiple of 64.
        unsafe { write_table(host, &pages.stretches) };
        let Pages { runs, mut lent, .. } = pages;
        let mut transfers: Vec<Transfer> =
            runs.iter().map(|run| transfer(Direction::Up, run.host, slot.at(run.offset), run.len)).collect();
        transfers.push(transfer(Direction::Up, host, slot.at(at), packed.rows * ROW));
        // Lent with the pages, and not asked for any more.
        lent.retained.push(RetainedResource::of(Lend::lend(&table, KEY)));
        Lend::abandon(table, KEY);
        Counters::add(&self.engine.counters.ring, chunk.bytes);
        let kept = Kept::Ring(slot.memory.allocation());
        let (then, done) = self.then_spread(n, Some(slot));
        // SAFETY: blocks and table are lent, and the device memory is the slot's.
        unsafe { self.submit_in_place(n, &transfers, lent, &kept, then, done) }
    }

    fn collect_pages(&mut self, n: usize, pages: Pages, slot: Slot, mut table: PinnedBuf, at: usize) -> Step {
        let Some(both) = &self.engine.spreaders else { return Step::Same(Stage::Pages(pages)) };
        let Owned { memories, packed, .. } = &self.owned[n];
        let (spreader, host) = (&both[Direction::Down as usize], table.as_mut_ptr());
        // SAFETY: as in `upload_pages`.
        unsafe { write_table(host, &pages.stretches) };
        let copy = transfer(Direction::Up, host, slot.at(at), packed.rows * ROW);
        let ring = slot.memory.allocation();
        // SAFETY: within the segment and the slot.
        match unsafe {
            self.engine.submit(spreader.stream(), table, &[copy], &Kept::Ring(ring.clone()), None)
        } {
            Ok(flight) => {
                let done = Done::default();
                spreader.add(Entry {
                    run: run(&slot, packed),
                    memories: memories.clone(),
                    ring,
                    slot: None,
                    done: done.clone(),
                });
                Step::Moved(Stage::CollectingPages { pages, flight, slot, done })
            }
            Err(refusal) => self.refused(n, refusal, Some(slot)),
        }
    }

    pub(super) fn fetch_pages(&mut self, n: usize, pages: Pages, slot: Slot) -> Step {
        let Owned { job, chunk, .. } = &self.owned[n];
        if job.is_stopped() {
            self.engine.ring.give(slot);
            return Step::Ended(End::Dropped);
        }
        if !self.engine.may_send(job, chunk.bytes) {
            return Step::Same(Stage::CollectedPages { pages, slot });
        }
        let Pages { runs, lent, .. } = pages;
        let down = |run: &Run| transfer(Direction::Down, run.host, slot.at(run.offset), run.len);
        let transfers: Vec<Transfer> = runs.iter().map(down).collect();
        Counters::add(&self.engine.counters.ring, chunk.bytes);
        let kept = Kept::Ring(slot.memory.allocation());
        // SAFETY: the blocks are lent, and the device memory is the slot's.
        unsafe { self.submit_in_place(n, &transfers, lent, &kept, Then::Give(slot), None) }
    }
}

//! Windows: ranges of extents that are withheld for a request that waits.
//!
//! A window is a range of pages that a waiting request chose because it is likely to be free soonest: fewest bytes of
//! it are given out, and nothing of it is quarantined. What is free in it, and what comes back to it, is given to no
//! other request. Everything outside of it serves everybody. So the request is served when the last segment that was
//! given out in the window has come back, and a request that fits outside of the window does not wait for it. Where no
//! range is long enough for several buffers of one request, its window has several ranges.
//!
//! ```text
//!   extent  | run | free | run A | free | run B | run C | run | free |
//!   window             |<------------------------->|
//! ```
//!
//! A range is made of whole runs, and of free pages between them and at its edges. A run in a window is *marked*: its
//! class does not take from it, and it is dissolved when all of its segments are back. The free pages of a range are free
//! runs that the set of free runs does not have; they are joined with each other, and never across an edge of the range.
//! So no run is idle when a window ends.

use std::collections::{BTreeMap, VecDeque};

use super::*;

/// In a pool of more runs than these together, a search for a window compares so many ranges at so many places.
const COMPARED: usize = 128;
const PLACES: usize = 4;

/// Names a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WindowId(pub(super) usize);

/// A range of pages of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRange {
    pub(super) extent: u32,
    pub(super) first: u32,
    pub(super) end: u32,
}

impl PageRange {
    /// Whether pages of an extent, from `first` to before `end`, meet the range.
    fn meets(self, extent: u32, first: u32, end: u32) -> bool {
        self.extent == extent && self.first < end && first < self.end
    }
}

/// See the head of this module.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) ranges: Vec<PageRange>,
    /// Pages that the request needs in one piece, and their alignment in pages.
    need: u32,
    align: usize,
    /// Segments in it that are given out.
    pub(super) out: u32,
    /// The pages that the request needs are free.
    complete: bool,
}

/// A run or free pages, as a search for a window sees them.
struct Item {
    first: u32,
    end: u32,
    out: usize,
    /// It may lie in a new window.
    open: bool,
    gap: bool,
}

impl Arena {
    /// Chooses the range that is likely to be free soonest, of at least `need` pages of which the first is aligned to
    /// `align` pages: that with the fewest bytes out, among those that are compared. These are all, or in a large pool some
    /// at a few places, which differ from search to search: a search holds up all threads. `None`: windows, quarantined
    /// segments and the ranges to `avoid` leave no such range.
    pub(crate) fn choose_window(
        &mut self,
        need: usize,
        align: usize,
        avoid: &[PageRange],
    ) -> Option<PageRange> {
        let need = u32::try_from(need).ok()?;
        let mut best = None;
        if self.runs.len() > PLACES * COMPARED {
            for _ in 0..PLACES {
                // A linear congruential generator, by Knuth.
                self.place = self.place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let run = self.runs.get((self.place >> 33) as usize % self.runs.len());
                let Some(&Run { extent, first, .. }) = run else { continue };
                self.compare(extent, first, (need, align), avoid, COMPARED, &mut best);
            }
        }
        if best.is_none() {
            for (extent, _) in &self.extents {
                self.compare(extent as u32, 0, (need, align), avoid, usize::MAX, &mut best);
            }
        }
        best.map(|found| found.1)
    }

    /// Compares `most` ranges of an extent, from the run or the free pages on that begin at a page, with the best one so
    /// far.
    fn compare(
        &self,
        extent: u32,
        from: u32,
        (need, align): (u32, usize),
        avoid: &[PageRange],
        mut most: usize,
        best: &mut Option<(usize, PageRange)>,
    ) {
        let e = &self.extents[extent as usize];
        let base = e.base.as_ptr().addr() / PAGE;
        let (mut items, mut sum, mut at) = (VecDeque::<Item>::new(), 0, from);
        // Alignments are powers of two.
        let mask = !(align - 1);
        while at < e.pages && most > 0 {
            let item = self.item(e, at);
            at = item.end;
            if !item.open || avoid.iter().any(|range| range.meets(extent, item.first, item.end)) {
                items.clear();
                sum = 0;
                continue;
            }
            let (last, end) = (item.gap.then_some(item.first), item.end);
            sum += item.out;
            items.push_back(item);
            // The last page from which on there are as many.
            let Some(start) = end.checked_sub(need) else { continue };
            let start = ((base + start as usize) & mask).checked_sub(base);
            let Some(start) = start.map(|start| start as u32) else { continue };
            while items.front().is_some_and(|item| item.end <= start) {
                sum -= items.pop_front().map_or(0, |item| item.out);
            }
            let Some(head) = items.front().filter(|head| head.first <= start) else { continue };
            most -= 1;
            if best.is_some_and(|best| best.0 < sum) {
                continue;
            }
            // Of free pages at the edges only those that are needed.
            let first = if head.gap { start } else { head.first };
            let begin = ((base + first as usize + align - 1) & mask) - base;
            let end = last.map_or(end, |last| last.max(begin as u32 + need));
            // Of equal ones the last: large segments are taken from the high end.
            let fewer =
                |(least, range): (usize, PageRange)| (sum, end - first) <= (least, range.end - range.first);
            if best.is_none_or(fewer) {
                *best = Some((sum, PageRange { extent, first, end }));
            }
        }
    }

    /// Where the run or the free pages begin that a page lies in. It looks from the high end, where most windows are: of
    /// equal ranges the last is chosen.
    fn item_start(&self, e: &ArenaExtent, page: u32) -> u32 {
        let mut at = e.pages;
        while at > page {
            let entry = e.map[at as usize - 1];
            at -= if entry & FREE != 0 { free_len(entry) } else { self.runs[entry as usize].pages };
        }
        at
    }

    /// The run or the free pages that begin at a page.
    fn item(&self, e: &ArenaExtent, first: u32) -> Item {
        let entry = e.map[first as usize];
        if entry & FREE != 0 {
            let end = first + free_len(entry);
            return Item { first, end, out: 0, open: entry & HELD == 0, gap: true };
        }
        let run = &self.runs[entry as usize];
        let (end, out) = (first + run.pages, Self::out(run).1);
        Item { first, end, out, open: run.window.is_none() && !run.stuck, gap: false }
    }

    /// Notes that a segment was quarantined. Returns the window that it lies in, which can never be free as a whole any
    /// more.
    ///
    /// # Safety
    /// The descriptor is of this arena, and out for good.
    pub(crate) unsafe fn quarantine(&mut self, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
        // SAFETY: this function's contract.
        let number = unsafe { descriptor.as_ref() }.run();
        let run = &mut self.runs[number as usize];
        if !std::mem::replace(&mut run.stuck, true) {
            self.extents[run.extent as usize].stuck.push(number);
        }
        run.window
    }

    // --- withholding -------------------------------------------------------------------------------------------------

    /// Withholds ranges that were chosen just now, for a waiter that needs so many pages in one piece, so aligned. Nothing
    /// in the ranges may be cached.
    pub(crate) fn withhold(&mut self, ranges: Vec<PageRange>, need: usize, align: usize) -> WindowId {
        // Without idle runs every run in a range has a segment out.
        self.release_idle();
        let need = u32::try_from(need).unwrap_or(u32::MAX);
        let window = Window { ranges: ranges.clone(), need, align, out: 0, complete: false };
        let id = WindowId(self.windows.insert(window));
        for PageRange { extent, first, end } in ranges {
            let mut at = self.item_start(&self.extents[extent as usize], first);
            while at < end {
                let entry = self.extents[extent as usize].map[at as usize];
                let next =
                    at + if entry & FREE != 0 { free_len(entry) } else { self.runs[entry as usize].pages };
                let (from, to) = (at.max(first), next.min(end));
                if entry & FREE == 0 {
                    self.mark(entry, id);
                } else if entry & FREE != 0 && from < to {
                    self.remove_free(extent, at, next - at);
                    self.insert_held(id, extent, from, to - from);
                    for (from, to) in [(at, from), (to, next)] {
                        if from < to {
                            self.insert_free(extent, from, to - from);
                        }
                    }
                }
                at = next;
            }
        }
        id
    }

    /// Puts a run into a window.
    fn mark(&mut self, number: u32, id: WindowId) {
        let run = &mut self.runs[number as usize];
        run.window = Some(id);
        self.windows[id.0].out += Self::out(run).0;
        if let Some(class) = run.class {
            self.held_slot_bytes += run.list.len() as usize * class.stride();
            self.watched[class.index()] += Self::out(run).0;
            self.partial[class.index()].remove(&(run.extent, run.first, number));
        }
    }

    /// Ends a window: what is free in it serves everybody. Returns the ranges that it had.
    pub(crate) fn release_window(&mut self, id: WindowId) -> Vec<PageRange> {
        let ranges = self.windows.remove(id.0).ranges;
        for &PageRange { extent, first, end } in &ranges {
            let (mut free, mut at) = (Vec::new(), first);
            while at < end {
                let entry = self.extents[extent as usize].map[at as usize];
                if entry & FREE != 0 {
                    free.push((at, free_len(entry)));
                    at += free_len(entry);
                    continue;
                }
                let run = &mut self.runs[entry as usize];
                run.window = None;
                at += run.pages;
                let Some(class) = run.class else { continue };
                self.held_slot_bytes -= run.list.len() as usize * class.stride();
                self.watched[class.index()] -= Self::out(run).0;
                if !run.list.is_empty() {
                    self.partial[class.index()].insert((run.extent, run.first, entry));
                }
            }
            for (at, pages) in free {
                self.free_pages -= pages as usize;
                self.held_pages -= pages as usize;
                self.give_pages(extent, at, pages, None);
            }
        }
        ranges
    }

    /// Adds a free run in a window.
    pub(super) fn insert_held(&mut self, id: WindowId, extent: u32, first: u32, pages: u32) {
        let map = &mut self.extents[extent as usize].map;
        map[first as usize] = FREE | HELD | pages;
        map[(first + pages - 1) as usize] = FREE | HELD | pages;
        self.free_pages += pages as usize;
        self.held_pages += pages as usize;
        let Window { need, align, .. } = self.windows[id.0];
        let fits = self.aligned_start((pages, extent, first), need, align).is_some();
        self.windows[id.0].complete |= fits;
    }

    /// The range of a window that a page lies in.
    pub(super) fn range_at(&self, id: WindowId, extent: u32, page: u32) -> Option<PageRange> {
        self.windows[id.0].ranges.iter().find(|range| range.meets(extent, page, page + 1)).copied()
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// Whether ranges that a window had can be withheld again: no run that was cut since then crosses their edges.
    pub(crate) fn can_withhold(&self, ranges: &[PageRange]) -> bool {
        ranges.iter().all(|range| {
            let e = &self.extents[range.extent as usize];
            let mut at = self.item_start(e, range.first);
            while at < range.end {
                let item = self.item(e, at);
                let crosses = |edge: u32| item.first < edge && edge < item.end;
                if !item.gap && (crosses(range.first) || crosses(range.end)) {
                    return false;
                }
                at = item.end;
            }
            true
        })
    }

    /// The window that a segment lies in.
    ///
    /// # Safety
    /// The descriptor is of this arena and alive.
    pub(crate) unsafe fn window_of(&self, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
        // SAFETY: alive by this function's contract.
        self.runs[unsafe { descriptor.as_ref() }.run() as usize].window
    }

    /// Number of windows.
    pub(crate) fn window_count(&self) -> usize {
        self.windows.len()
    }

    /// Whether the pages that a window's owner needs are free.
    pub(crate) fn is_complete(&self, id: WindowId) -> bool {
        self.windows[id.0].complete
    }

    /// Segments in a window that are given out.
    pub(crate) fn out_of(&self, id: WindowId) -> u32 {
        self.windows[id.0].out
    }

    /// The ranges of a window.
    pub(crate) fn ranges(&self, id: WindowId) -> &[PageRange] {
        &self.windows[id.0].ranges
    }

    /// The bytes of a window.
    pub(crate) fn bytes_of(&self, id: WindowId) -> usize {
        self.ranges(id).iter().map(|range| (range.end - range.first) as usize * PAGE).sum()
    }

    /// The addresses of the ranges of all windows: of each the first, and that behind the last.
    pub(crate) fn window_addresses(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.windows.iter().flat_map(|(_, window)| &window.ranges).map(|range| {
            let base = self.extents[range.extent as usize].base.as_ptr().addr();
            (base + range.first as usize * PAGE, base + range.end as usize * PAGE)
        })
    }

    /// Ranges that cover whole regions of so many bytes together, those with the smallest part out: when they are free, the
    /// regions can be replaced. `None`: windows and quarantined segments leave too few, or more than `most` would be
    /// needed.
    pub(crate) fn replaceable(&self, bytes: usize, most: usize) -> Option<Vec<PageRange>> {
        let mut regions: BTreeMap<RegionId, (usize, usize, bool)> = BTreeMap::new();
        for (extent, e) in &self.extents {
            let (out, len, blocked) = regions.entry(e.region).or_default();
            let in_extent = self.runs.iter().filter(|(_, run)| run.extent as usize == extent);
            *out += in_extent.map(|(_, run)| Self::out(run).1).sum::<usize>();
            *len += e.pages as usize * PAGE;
            let mut windows = self.windows.iter().flat_map(|(_, window)| &window.ranges);
            *blocked |= !e.stuck.is_empty() || windows.any(|range| range.extent as usize == extent);
        }
        let mut regions: Vec<_> = regions.into_iter().filter(|(_, (.., blocked))| !blocked).collect();
        // As a part of the region.
        regions.sort_by(|(_, a), (_, b)| (a.0 as u128 * b.1 as u128).cmp(&(b.0 as u128 * a.1 as u128)));
        let (mut sum, mut ranges) = (0, Vec::new());
        for (region, (_, len, _)) in regions {
            if sum < bytes {
                sum += len;
                let extents = self.extents.iter().filter(|(_, e)| e.region == region);
                let whole = |(extent, e): (usize, &ArenaExtent)| PageRange {
                    extent: extent as u32,
                    first: 0,
                    end: e.pages,
                };
                ranges.extend(extents.map(whole));
            }
        }
        (sum >= bytes && ranges.len() <= most).then_some(ranges)
    }

    /// Segments of a class that are given out and lie in windows.
    pub(crate) fn watched(&self, class: Class) -> u32 {
        self.watched[class.index()]
    }

    /// Whether a placement could probably be taken outside of windows. `false` is certain, as long as no idle run is
    /// dissolved.
    pub(crate) fn could_take(&self, placement: Placement) -> bool {
        let listed = match placement {
            Placement::Class(class) => !self.partial[class.index()].is_empty(),
            Placement::Pages { .. } => false,
        };
        listed || self.largest_free_pages() >= placement.fresh_pages().0
    }

    /// The pages of the largest free run outside of windows.
    pub(crate) fn largest_free_pages(&self) -> usize {
        self.free.last().map_or(0, |f| f.0 as usize)
    }
}

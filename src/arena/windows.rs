//! Windows: ranges of an extent that are withheld for a request that waits.
//!
//! A window is a range of pages that a waiting request chose because it is likely to be free soonest: fewest bytes of
//! it are given out, and nothing of it is quarantined. What is free in it, and what comes back to it, is given to no
//! other request. Everything outside of it serves everybody. So the request is served when the last segment that was
//! given out in the window has come back, and a request that fits outside of the window does not wait for it.
//!
//! ```text
//!   extent  | run | free | run A ......:.... | free | run B | run C | run | free |
//!   window                              |<------------------------->|
//! ```
//!
//! A window ends where a run ends, or among free pages. It may begin inside a class's run (A above): the segments before
//! the window stay in the run's list, and those in the window, from number `keep` on, go to the list `held`. When all of
//! them are back, the run is shortened. The other runs in the window are dissolved when all of their segments are back.
//! Their pages, and what was free from the beginning, are free runs that the set of free runs does not have; they are
//! joined with each other, and never across an edge of the window. So no run is idle when a window ends.
//!
//! # Choosing
//!
//! The bytes given out are counted for each block of [`BLOCK`] pages. A search slides over the blocks and finds those
//! with the fewest bytes out, among the blocks that meet no window and no quarantined segment. There it looks at the
//! runs one by one. Only if nothing is found that way, all runs of the arena are looked at.

use std::collections::VecDeque;

use super::*;

/// The pages whose bytes out are counted together.
pub(super) const BLOCK: u32 = 256;
pub(super) const BLOCK_BYTES: usize = BLOCK as usize * PAGE;

/// Names a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WindowId(pub(super) usize);

impl WindowId {
    /// A number below that of all windows that there are at the same time.
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

/// A range of pages of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRange {
    pub(super) extent: u32,
    pub(super) first: u32,
    pub(super) end: u32,
}

/// See the head of this module.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) extent: u32,
    pub(super) first: u32,
    pub(super) end: u32,
    /// Pages that the request needs in one piece, and their alignment in pages.
    need: u32,
    align: usize,
    /// Segments in it that are given out.
    pub(super) out: u32,
    /// The pages that the request needs are free.
    complete: bool,
}

/// Runs and free pages, as a search for a window sees them.
#[derive(Clone, Copy, Debug)]
struct Item {
    first: u32,
    end: u32,
    out: usize,
    /// A run of a class that can be divided: its first page, its stride, and its number of segments.
    class: Option<(u32, usize, u32)>,
    gap: bool,
}

impl Arena {
    /// Chooses the range that is likely to be free soonest, of at least `need` pages of which the first is aligned to
    /// `align` pages. `None`: windows and quarantined segments leave no such range.
    pub(crate) fn choose_window(&self, need: usize, align: usize) -> Option<PageRange> {
        let need = u32::try_from(need).ok()?;
        let blocks = (need as usize + align - 1).div_ceil(BLOCK as usize).max(1);
        let mut best: Option<(usize, u32, usize, usize)> = None;
        for (extent, e) in &self.extents {
            let span = blocks.min(e.out.len());
            if e.pages < need {
                continue;
            }
            let (mut out, mut blocked) = (0, 0);
            for at in 0..e.out.len() {
                out += e.out[at];
                blocked += e.blocked[at];
                if at + 1 < span {
                    continue;
                }
                let from = at + 1 - span;
                if blocked == 0 && best.is_none_or(|best| out < best.0) {
                    best = Some((out, extent as u32, from, span));
                }
                out -= e.out[from];
                blocked -= e.blocked[from];
            }
        }
        let near = best.and_then(|(_, extent, from, span)| {
            let (from, to) = (from as u32 * BLOCK, (from + span) as u32 * BLOCK);
            self.choose_in(extent, from, to.min(self.extents[extent as usize].pages), need, align)
        });
        let all = || {
            let extents = self.extents.iter().filter(|(_, e)| e.pages >= need);
            let found =
                extents.filter_map(|(extent, e)| self.choose_in(extent as u32, 0, e.pages, need, align));
            found.min_by_key(|found| found.0)
        };
        near.or_else(all).map(|found| found.1)
    }

    /// The best range among those that end at a run's edge behind `from`, up to the first edge from `to` on, with the
    /// bytes that are out there.
    fn choose_in(
        &self,
        extent: u32,
        from: u32,
        to: u32,
        need: u32,
        align: usize,
    ) -> Option<(usize, PageRange)> {
        let e = &self.extents[extent as usize];
        let base = e.base.as_ptr().addr() / PAGE;
        let before = e.runs.range(..=from).next_back();
        let mut at = match before.map(|(first, number)| (*first, self.runs[*number as usize].pages)) {
            Some((first, pages)) if first + pages > from => first,
            _ => from,
        };
        let (mut items, mut sum): (VecDeque<Item>, usize) = (VecDeque::new(), 0);
        let mut best: Option<(usize, PageRange)> = None;
        while at < to {
            let next = e.runs.range(at..).next().map_or(e.pages, |(first, _)| *first);
            let item = if next > at { self.gap(extent, at, next) } else { self.item(extent, at) };
            let (end, item) = item;
            at = end;
            let Some(item) = item else {
                // Windows and quarantined segments divide what can be chosen.
                items.clear();
                sum = 0;
                continue;
            };
            if items.back().is_some_and(|last| last.end != item.first) {
                items.clear();
                sum = 0;
            }
            sum += item.out;
            items.push_back(item);
            let Some(start) = item.end.checked_sub(need) else { continue };
            let start = ((base + start as usize) / align * align).checked_sub(base);
            let Some(start) = start.map(|start| start as u32) else { continue };
            while items.get(1).is_some_and(|second| second.first <= start) {
                sum -= items.pop_front().map_or(0, |first| first.out);
            }
            let Some(head) = items.front().filter(|head| head.first <= start) else { continue };
            // What stays in service before the window.
            let (first, spared) = match head.class {
                Some((run, stride, count)) => {
                    let keep = ((start - run) as usize * PAGE / stride).min(count as usize);
                    let first = run + (keep * stride).div_ceil(PAGE) as u32;
                    (first.max(head.first), head.out * keep / count.max(1) as usize)
                }
                None if head.gap => (start, 0),
                None => (head.first, 0),
            };
            let out = sum - spared;
            // Of free pages at the end only those that are needed.
            let begin = (base + first as usize).next_multiple_of(align) - base;
            let end = if item.gap { (begin as u32 + need).max(item.first) } else { item.end };
            let less =
                |(least, range): (usize, PageRange)| (out, end - first) < (least, range.end - range.first);
            if best.is_none_or(less) {
                best = Some((out, PageRange { extent, first, end }));
            }
        }
        best
    }

    /// The free pages between two runs, up to the first window there. `None` in a window. The first value is where to
    /// go on.
    fn gap(&self, extent: u32, at: u32, next: u32) -> (u32, Option<Item>) {
        let meets = |w: &&Window| w.extent == extent && w.first < next && w.end > at;
        let windows = self.windows.iter().map(|(_, window)| window);
        let gap = |end| Some(Item { first: at, end, out: 0, class: None, gap: true });
        match windows.filter(meets).min_by_key(|w| w.first) {
            // The part before a window is looked at first.
            Some(window) if window.first > at => (window.first, gap(window.first)),
            Some(window) => (window.end.min(next), None),
            None => (next, gap(next)),
        }
    }

    /// The run at a page.
    fn item(&self, extent: u32, first: u32) -> (u32, Option<Item>) {
        let e = &self.extents[extent as usize];
        let number = e.map[first as usize];
        let run = &self.runs[number as usize];
        let end = first + run.pages;
        let stride = run.class.map_or(0, Class::stride);
        if run.window.is_some() {
            return (end, None);
        }
        let single = Self::is_single(run);
        let segments = if single { u32::from(run.count > 1) } else { run.count };
        let out = (segments - run.list.len()) as usize * stride + run.alone;
        let mut begin = first;
        if e.stuck.contains(&number) {
            let last = (0..run.count).rev().find(|n| Self::is_stuck(self.descriptor(run, *n)));
            match last {
                Some(last) if !single => {
                    begin = first + ((last + 1) as usize * stride).div_ceil(PAGE) as u32;
                    if begin >= end {
                        return (end, None);
                    }
                }
                Some(_) => return (end, None),
                None => {}
            }
        }
        let class = (!single).then_some((first, stride, run.count));
        (end, Some(Item { first: begin, end, out, class, gap: false }))
    }

    pub(super) fn is_stuck(descriptor: NonNull<Descriptor>) -> bool {
        // SAFETY: the descriptors of a run are alive as long as the run, and the caller has the run.
        unsafe { descriptor.as_ref() }.word().state() == state::QUARANTINED
    }

    /// Notes that a segment was quarantined. Returns the window that it lies in, which can never be free as a whole any
    /// more.
    ///
    /// # Safety
    /// The descriptor is of this arena, and out for good.
    pub(crate) unsafe fn quarantine(&mut self, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
        // SAFETY: this function's contract.
        let (number, base) = unsafe { (descriptor.as_ref().run(), descriptor.as_ref().base()) };
        // SAFETY: as above.
        let bytes = unsafe { self.granted(descriptor) };
        let run = &self.runs[number as usize];
        // SAFETY: as above.
        let index = Self::number_of(run, unsafe { descriptor.as_ref() });
        let window = run.window.filter(|_| index >= run.keep as usize);
        let e = &mut self.extents[run.extent as usize];
        if !e.stuck.contains(&number) {
            e.stuck.push(number);
        }
        let at = base.as_ptr().addr() - e.base.as_ptr().addr();
        for block in at / BLOCK_BYTES..(at + bytes).div_ceil(BLOCK_BYTES) {
            e.blocked[block] += 1;
        }
        window
    }

    // --- withholding -------------------------------------------------------------------------------------------------

    /// Withholds a range that was chosen just now, for a waiter that needs so many pages, so aligned. Nothing in the
    /// range may be cached.
    pub(crate) fn withhold(&mut self, range: PageRange, need: usize, align: usize) -> WindowId {
        let PageRange { extent, first, end } = range;
        // Idle runs have no segment out; without them the edges of the range are edges of runs in use, or lie in free
        // runs.
        self.release_idle();
        let (need, out, complete) = (u32::try_from(need).unwrap_or(u32::MAX), 0, false);
        let id = WindowId(self.windows.insert(Window { extent, first, end, need, align, out, complete }));
        self.block(id, true);
        // The free runs.
        self.split_free(extent, first);
        self.split_free(extent, end);
        let e = &self.extents[extent as usize];
        let last = e.runs.range(..first).next_back().map(|(first, number)| (*first, *number));
        let divided = last.filter(|(at, number)| at + self.runs[*number as usize].pages > first);
        let whole: Vec<u32> = e.runs.range(first..end).map(|(_, number)| *number).collect();
        let mut at = divided.map_or(first, |(at, number)| at + self.runs[number as usize].pages);
        while at < end {
            let entry = self.extents[extent as usize].map[at as usize];
            if entry & FREE == 0 {
                at += self.runs[entry as usize].pages;
                continue;
            }
            let pages = free_len(entry);
            self.remove_free(extent, at, pages);
            self.insert_held(id, extent, at, pages);
            at += pages;
        }
        // The runs.
        if let Some((at, number)) = divided {
            let run = &self.runs[number as usize];
            let keep = (first - at) as usize * PAGE / run.class.map_or(1, Class::stride);
            let keep = run.count.min(keep as u32);
            self.enclose(number, id, keep);
        }
        whole.into_iter().for_each(|number| self.enclose(number, id, 0));
        id
    }

    /// Puts a run's segments from number `keep` on into a window.
    fn enclose(&mut self, number: u32, id: WindowId, keep: u32) {
        let run = &mut self.runs[number as usize];
        (run.window, run.keep) = (Some(id), keep);
        self.windows[id.0].out += u32::from(run.alone > 0);
        let Some(class) = run.class else { return };
        let (extent, first) = (run.extent, run.first);
        let mut list = std::mem::replace(&mut run.list, Chain::new());
        let mut kept = Chain::new();
        while let Some(descriptor) = list.pop() {
            // SAFETY: in a run's list, so alive.
            let into = match Self::number_of(run, unsafe { descriptor.as_ref() }) >= keep as usize {
                true => &mut run.held,
                false => &mut kept,
            };
            // SAFETY: alive, free, and just taken off its list.
            unsafe { into.push(descriptor) };
        }
        // The order of the list stays.
        while let Some(descriptor) = kept.pop() {
            // SAFETY: as above.
            unsafe { run.list.push(descriptor) };
        }
        let segments = if Self::is_single(run) { 1 } else { run.count - keep };
        let held = run.held.len();
        let emptied = run.list.is_empty();
        self.held_slot_bytes += held as usize * class.stride();
        self.watched[class.index()] += segments - held;
        self.windows[id.0].out += segments - held;
        if emptied {
            self.partial[class.index()].remove(&(extent, first, number));
        }
        self.cleared(number);
    }

    /// Frees what a run has in a window, if all of it is back.
    pub(super) fn cleared(&mut self, number: u32) {
        let run = &mut self.runs[number as usize];
        let Some(class) = run.class else { return };
        if Self::is_single(run) {
            if run.alone == 0 && run.held.len() == 1 {
                self.dissolve(number);
            }
            return;
        }
        if run.held.len() < run.count - run.keep {
            return;
        }
        let keep = run.keep;
        if keep == 0 {
            return self.dissolve(number);
        }
        let held = run.held.len();
        while run.held.pop().is_some() {}
        (run.window, run.keep) = (None, 0);
        self.held_slot_bytes -= held as usize * class.stride();
        self.free_slot_bytes -= held as usize * class.stride();
        // The segments that are gone are cut until the run is shortened.
        run.count = keep;
        run.cut += held as usize * class.stride();
        self.cut += held as usize * class.stride();
        self.shorten_to(number, class, keep as usize);
        self.idled(number, class);
    }

    /// Ends a window: what is free in it serves everybody.
    pub(crate) fn release_window(&mut self, id: WindowId) {
        self.block(id, false);
        let Window { extent, first, end, .. } = self.windows.remove(id.0);
        let e = &self.extents[extent as usize];
        let runs: Vec<u32> = e
            .runs
            .range(..end)
            .rev()
            .map(|(_, number)| *number)
            .take_while(|number| {
                let run = &self.runs[*number as usize];
                run.first + run.pages > first
            })
            .filter(|number| self.runs[*number as usize].window == Some(id))
            .collect();
        let mut free = Vec::new();
        let last = e.runs.range(..first).next_back();
        let mut at = last.map_or(first, |(at, number)| first.max(at + self.runs[*number as usize].pages));
        while at < end {
            let entry = e.map[at as usize];
            if entry & FREE == 0 {
                at += self.runs[entry as usize].pages;
            } else {
                free.push((at, free_len(entry)));
                at += free_len(entry);
            }
        }
        for (at, pages) in free {
            self.free_pages -= pages as usize;
            self.held_pages -= pages as usize;
            self.give_pages(extent, at, pages);
        }
        for number in runs {
            let run = &mut self.runs[number as usize];
            run.window = None;
            let Some(class) = run.class else { continue };
            let segments = if Self::is_single(run) { 1 } else { run.count - run.keep };
            let held = run.held.len();
            run.keep = 0;
            while let Some(descriptor) = run.held.pop() {
                // SAFETY: alive, free, and just taken off its list.
                unsafe { run.list.push(descriptor) };
            }
            if !run.frayed {
                run.frayed = true;
                self.frayed.insert(number);
            }
            self.held_slot_bytes -= held as usize * class.stride();
            self.watched[class.index()] -= segments - held;
            if !run.list.is_empty() {
                self.partial[class.index()].insert((extent, run.first, number));
            }
        }
    }

    /// Counts a window in the blocks that it meets, or counts it no more.
    fn block(&mut self, id: WindowId, add: bool) {
        let Window { extent, first, end, .. } = self.windows[id.0];
        for block in first / BLOCK..end.div_ceil(BLOCK) {
            let blocked = &mut self.extents[extent as usize].blocked[block as usize];
            *blocked = if add { *blocked + 1 } else { *blocked - 1 };
        }
    }

    /// Divides the free run that has this page inside, if there is one.
    fn split_free(&mut self, extent: u32, page: u32) {
        let last = self.extents[extent as usize].runs.range(..page).next_back();
        let mut at = last.map_or(0, |(at, number)| at + self.runs[*number as usize].pages);
        while at < page {
            let entry = self.extents[extent as usize].map[at as usize];
            let pages = free_len(entry);
            if entry & (FREE | HELD) == FREE && at + pages > page {
                self.remove_free(extent, at, pages);
                self.insert_free(extent, at, page - at);
                self.insert_free(extent, page, at + pages - page);
                return;
            }
            at += pages;
        }
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

    /// The window that a page lies in.
    pub(super) fn window_at(&self, extent: u32, page: u32) -> Option<WindowId> {
        let inside = |w: &Window| w.extent == extent && w.first <= page && page < w.end;
        self.windows.iter().find(|(_, w)| inside(w)).map(|(id, _)| WindowId(id))
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// Number of windows.
    pub(crate) fn window_count(&self) -> usize {
        self.windows.len()
    }

    /// Whether the pages that a window's owner needs are free.
    pub(crate) fn is_complete(&self, id: WindowId) -> bool {
        self.windows[id.0].complete
    }

    /// The bytes of a window.
    pub(crate) fn bytes_of(&self, id: WindowId) -> usize {
        let Window { first, end, .. } = self.windows[id.0];
        (end - first) as usize * PAGE
    }

    /// Segments in a window that are given out.
    pub(crate) fn out_of(&self, id: WindowId) -> u32 {
        self.windows[id.0].out
    }

    /// The addresses of the window of this number, if there is one: the first, and that behind the last.
    pub(crate) fn window_addresses(&self, index: usize) -> Option<(usize, usize)> {
        let Window { extent, first, end, .. } = *self.windows.get(index)?;
        let base = self.extents[extent as usize].base.as_ptr().addr();
        Some((base + first as usize * PAGE, base + end as usize * PAGE))
    }

    /// Whether a range that was a window can be withheld again: runs that were cut since then do not cross its edges.
    pub(crate) fn can_withhold(&self, PageRange { extent, first, end }: PageRange) -> bool {
        let e = &self.extents[extent as usize];
        let across = |page: u32| {
            let run = e.runs.range(..page).next_back().map(|(_, number)| &self.runs[*number as usize]);
            run.filter(|run| run.first + run.pages > page)
        };
        let begins = |run: &Run| {
            let Some(class) = run.class.filter(|_| !Self::is_single(run)) else { return false };
            let before = (first - run.first) as usize * PAGE;
            let keep = (before / class.stride()).min(run.count as usize);
            (keep * class.stride()).div_ceil(PAGE) * PAGE == before
        };
        across(end).is_none() && across(first).is_none_or(begins)
    }

    /// The range of a window, to be withheld again.
    pub(crate) fn range(&self, id: WindowId) -> PageRange {
        let Window { extent, first, end, .. } = self.windows[id.0];
        PageRange { extent, first, end }
    }

    /// Ranges that cover whole regions of so many bytes together, those with the fewest bytes out: when they are free, the
    /// regions can be replaced. `None`: windows and quarantined segments leave too few, or more than `most` would be
    /// needed.
    pub(crate) fn replaceable(&self, bytes: usize, most: usize) -> Option<Vec<PageRange>> {
        let mut regions: BTreeMap<RegionId, (usize, usize, bool)> = BTreeMap::new();
        for (_, e) in &self.extents {
            let (out, len, blocked) = regions.entry(e.region).or_default();
            *out += e.out.iter().sum::<usize>();
            *len += e.pages as usize * PAGE;
            *blocked |= e.blocked.iter().any(|n| *n > 0);
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
    /// dissolved and no run shortened.
    pub(crate) fn could_take(&self, placement: Placement) -> bool {
        let listed = match placement {
            Placement::Class(class) => !self.partial[class.index()].is_empty(),
            Placement::Pages { .. } => false,
        };
        listed || self.largest_free_pages() >= placement.fresh_pages().0
    }

    /// The pages in free runs outside of windows.
    pub(crate) fn free_pages_outside(&self) -> usize {
        self.free_pages - self.held_pages
    }

    /// The pages of the largest free run outside of windows.
    pub(crate) fn largest_free_pages(&self) -> usize {
        self.free.last().map_or(0, |f| f.0 as usize)
    }
}

//! Windows: ranges of extents that are withheld for a request that waits.
//!
//! A window is a range of pages that a waiting request chose because it is likely to be free
//! soonest: the fewest bytes of it are out, and none quarantined. What is free in it or comes back
//! to it is given to no other request; everything else serves everybody. So the request is served
//! when the last segment in the window has come back, and a request that fits outside does not wait
//! for it. Where no range is long enough for several buffers, the window has several ranges.
//!
//! ```text
//!   extent  | run | free | run A | free | run B | run C | run | free |
//!   window             |<------------------------->|
//! ```
//!
//! A range is made of whole runs, and of free pages between them and at its edges. A run in a
//! window is *marked*: its class does not take from it, and it is dissolved when all of its
//! segments are back. The free pages of a range are free runs outside of the set of free runs; they
//! are joined when the window ends. A range for one segment is served when all of its runs are
//! back: if fewer were enough, a shorter range with fewer bytes out would have been chosen.

use super::*;

/// In a pool of more than `PLACES * COMPARED` runs, a search compares `COMPARED` ranges at each of
/// `PLACES` places.
const COMPARED: usize = 64;
const PLACES: usize = 4;

/// Names a window.
pub(crate) type WindowId = usize;

/// A set of classes.
pub(crate) type ClassSet = u128;
const _: () = assert!(CLASSES <= ClassSet::BITS as usize);

/// The set of one class.
pub(crate) fn set_of(class: Class) -> ClassSet {
    1 << class.index()
}

/// A range of pages of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PageRange {
    pub(super) extent: u32,
    pub(super) first: u32,
    pub(super) end: u32,
    /// Where the run or the free pages of the first page begin, while the range is not withheld.
    pub(super) begin: u32,
}

impl PageRange {
    /// Whether pages of an extent, from `first` to before `end`, meet the range.
    pub(super) fn meets(self, extent: u32, first: u32, end: u32) -> bool {
        self.extent == extent && self.first < end && first < self.end
    }
}

/// What is withheld for a request that waits: see the head of this module.
#[derive(Debug)]
pub(crate) struct Window {
    /// The number of the request.
    pub(crate) owner: usize,
    pub(crate) ranges: Vec<PageRange>,
    /// The ranges are whole regions that are to be replaced.
    pub(crate) replaces: bool,
    /// Segments in it that are given out.
    pub(crate) out: u32,
    /// How often the central pool has looked at it since a segment came back to it.
    pub(crate) looks: u32,
    /// The classes that had segments out in the window when it was withheld.
    pub(crate) classes: ClassSet,
}

impl Window {
    pub(crate) fn new(owner: usize, ranges: Vec<PageRange>, replaces: bool) -> Self {
        Self { owner, ranges, replaces, out: 0, looks: 0, classes: 0 }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.ranges.iter().map(|range| (range.end - range.first) as usize * PAGE).sum()
    }
}

/// A run or free pages, as a search for a window sees them.
struct Item {
    first: u32,
    end: u32,
    out: usize,
    /// The item may lie in a new window.
    open: bool,
    /// The run's number. `None`: free pages.
    run: Option<u32>,
}

impl Arena {
    /// Chooses the range of at least `need` pages, the first aligned to `align` pages, that is
    /// likely to be free soonest: with the fewest bytes out among those compared. These are all, or
    /// in a large pool some at a few places that differ each time: a search holds up all threads.
    /// `None`: windows, quarantined segments and the ranges to `avoid` leave no such range.
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

    /// Compares `most` ranges of an extent, from the run or the free pages on that begin at a page,
    /// with the best one so far.
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
        // Alignments are powers of two.
        let mask = !(align - 1);
        // From `head` to before `at` everything may lie in a window, and `sum` bytes of it are out.
        let (mut head, mut at, mut sum) = (from, from, 0);
        while at < e.pages && most > 0 {
            let last = self.item(extent, at);
            at = last.end;
            if !last.open || avoid.iter().any(|range| range.meets(extent, last.first, last.end)) {
                (head, sum) = (at, 0);
                continue;
            }
            sum += last.out;
            // The last page from which on there are as many.
            let Some(start) = last.end.checked_sub(need) else { continue };
            let start = ((base + start as usize) & mask).checked_sub(base);
            let Some(start) = start.map(|start| start as u32).filter(|start| *start >= head) else {
                continue;
            };
            let mut item = self.item(extent, head);
            while item.end <= start {
                sum -= item.out;
                head = item.end;
                item = self.item(extent, head);
            }
            most -= 1;
            if best.is_some_and(|best| best.0 < sum) {
                continue;
            }
            // Free pages at the edges are withheld only where they are needed.
            let first = if item.run.is_none() { start } else { head };
            let aligned = ((base + first as usize + align - 1) & mask) - base;
            let end = if last.run.is_none() { last.first.max(aligned as u32 + need) } else { last.end };
            // Of equal ones the last: large segments are taken from the high end.
            let fewer =
                |(least, range): (usize, PageRange)| (sum, end - first) <= (least, range.end - range.first);
            if best.is_none_or(fewer) {
                *best = Some((sum, PageRange { extent, first, end, begin: head }));
            }
        }
    }

    /// The run or the free pages that begin at a page.
    fn item(&self, extent: u32, first: u32) -> Item {
        let entry = self.extents[extent as usize].map[first as usize];
        if entry & FREE != 0 {
            let end = first + free_len(entry);
            return Item { first, end, out: 0, open: entry & HELD == 0, run: None };
        }
        let run = &self.runs[entry as usize];
        let (end, out) = (first + run.pages, Self::out(run).1);
        Item { first, end, out, open: run.window.is_none() && !run.stuck, run: Some(entry) }
    }

    /// Notes that a segment was quarantined. Returns the window that it lies in, which can never be
    /// free as a whole any more.
    ///
    /// # Safety
    /// The descriptor is of this arena, and never comes back.
    pub(crate) unsafe fn quarantine(&mut self, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
        // SAFETY: this function's contract.
        let number = unsafe { descriptor.as_ref() }.run();
        let run = &mut self.runs[number as usize];
        run.stuck = true;
        self.extents[run.extent as usize].stuck = true;
        run.window
    }

    // --- withholding -----------------------------------------------------------------------------

    /// Withholds a window's ranges, chosen or released just now. Nothing in them is cached.
    pub(crate) fn withhold(&mut self, mut window: Window) -> WindowId {
        (window.out, window.classes) = (0, 0);
        // In this order a release knows where each begins: what it is joined with lies behind.
        window.ranges.sort_unstable();
        let ranges = window.ranges.clone();
        let id = self.windows.insert(window);
        for PageRange { extent, first, end, begin } in ranges {
            let mut at = begin;
            while at < end {
                let Item { end: next, run, .. } = self.item(extent, at);
                if let Some(run) = run {
                    self.mark(run, id);
                } else if next > first {
                    let (from, to) = (at.max(first), next.min(end));
                    self.remove_free(extent, at, next - at);
                    self.insert_held(extent, from, to - from);
                    self.insert_free(extent, at, from - at);
                    self.insert_free(extent, to, next - to);
                }
                at = next;
            }
        }
        id
    }

    /// Puts a run into a window.
    fn mark(&mut self, number: u32, id: WindowId) {
        let (run, window) = (&mut self.runs[number as usize], &mut self.windows[id]);
        run.window = Some(id);
        window.out += Self::out(run).0;
        self.unheld -= Self::listed(run);
        if let Some(class) = run.class {
            window.classes |= set_of(class);
            self.partial[class.index()].remove(&(run.extent, run.first, number));
        }
    }

    /// Ends a window: what is free in it serves everybody.
    pub(crate) fn release_window(&mut self, id: WindowId) -> Window {
        let mut window = self.windows.remove(id);
        for range in &mut window.ranges {
            let (extent, mut at) = (range.extent, range.first);
            while at < range.end {
                let Item { end: next, run, .. } = self.item(extent, at);
                let begin = match run {
                    Some(run) => self.unmark(run),
                    None => self.give_pages(extent, at, next - at),
                };
                if at == range.first {
                    range.begin = begin;
                }
                at = next;
            }
        }
        window
    }

    /// Takes a run out of its window. Returns its first page.
    fn unmark(&mut self, number: u32) -> u32 {
        let run = &mut self.runs[number as usize];
        run.window = None;
        self.unheld += Self::listed(run);
        if let Some(class) = run.class.filter(|_| !run.list.is_empty()) {
            self.partial[class.index()].insert((run.extent, run.first, number));
        }
        run.first
    }

    /// Adds a free run in a window.
    pub(super) fn insert_held(&mut self, extent: u32, first: u32, pages: u32) {
        let map = &mut self.extents[extent as usize].map;
        map[first as usize] = FREE | HELD | pages;
        map[(first + pages - 1) as usize] = FREE | HELD | pages;
    }

    // --- looking ---------------------------------------------------------------------------------

    /// The window that a segment lies in.
    ///
    /// # Safety
    /// The descriptor is of this arena and alive.
    pub(crate) unsafe fn window_of(&self, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
        // SAFETY: alive by this function's contract.
        self.runs[unsafe { descriptor.as_ref() }.run() as usize].window
    }

    /// The addresses of the ranges of all windows: of each the first, and that behind the last.
    pub(crate) fn window_addresses(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.windows.iter().flat_map(|(_, window)| &window.ranges).map(|range| {
            let base = self.extents[range.extent as usize].base.as_ptr().addr();
            (base + range.first as usize * PAGE, base + range.end as usize * PAGE)
        })
    }

    /// Ranges that cover whole regions with the fewest bytes out and `bytes` bytes together: when
    /// the ranges are free, the regions can be replaced. `None`: windows, quarantined segments and
    /// the ranges to `avoid` leave too few, or more than `most` ranges would be needed.
    pub(crate) fn replaceable(
        &self,
        bytes: usize,
        most: usize,
        avoid: &[PageRange],
    ) -> Option<Vec<PageRange>> {
        let region_of = |extent: u32| self.extents[extent as usize].region;
        let mut out = BTreeMap::<RegionId, usize>::new();
        for (_, run) in &self.runs {
            *out.entry(region_of(run.extent)).or_default() += Self::out(run).1;
        }
        let mut regions = self.regions();
        regions.retain(|_, region| !region.stuck);
        // Of the ranges to avoid, the regions may be gone.
        for range in self.windows.iter().flat_map(|(_, window)| &window.ranges).chain(avoid) {
            if let Some(e) = self.extents.get(range.extent as usize) {
                regions.remove(&e.region);
            }
        }
        let mut regions: Vec<_> =
            regions.into_iter().map(|(id, region)| (out.get(&id), id, region.bytes)).collect();
        regions.sort_unstable();
        let (mut sum, mut ranges) = (0, Vec::new());
        for (_, region, len) in regions {
            if sum < bytes {
                sum += len;
                let extents = self.extents.iter().filter(|(_, e)| e.region == region);
                let whole = |(i, e): (usize, &ArenaExtent)| (i as u32, e.pages);
                let whole = extents.map(whole);
                ranges.extend(whole.map(|(extent, end)| PageRange { extent, first: 0, end, begin: 0 }));
            }
        }
        (sum >= bytes && ranges.len() <= most).then_some(ranges)
    }

    /// The classes whose segments may be out in windows.
    pub(crate) fn classes_in_windows(&self) -> ClassSet {
        self.windows.iter().fold(0, |set, (_, window)| set | window.classes)
    }

    /// Whether a placement could probably be taken outside of windows. `false` is certain.
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

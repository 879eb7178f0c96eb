//! The arena: extents, cut into runs, cut into segments.
//!
//! ```text
//!   region  |<------------------------------ pinned at once ------------------------------>|
//!   extent  |<----------- one registration ----------->|<----------------- next ----------->|
//!   run     |  class 64 KiB  | free |  4.5 MiB, alone  |  class 1 KiB | free               |
//!   segment | s | s | s | s |       | s                | ssssssssssss |
//! ```
//!
//! An extent is divided completely into runs of whole [`PAGE`]s. A run is free, or belongs to one size class, or to one
//! segment that is large or aligned. Free runs are always joined with free neighbours, and never across an extent's
//! edge: a copy that crossed two registrations would be refused by the driver. Free runs are kept ordered by size and
//! then address, so a request takes the smallest that fits (best fit) in logarithmic time, however many holes there are.
//!
//! A class takes segments from its run at the lowest address first, which lets the others drain. A run whose segments
//! are all back is dissolved at once if its class has another to take from; a last one is kept, so that a class used
//! by one buffer at a time does not cut a run each time, until [`Arena::release_idle`] needs its pages. Where even that
//! is not enough, [`Arena::shorten_runs`] gives up what lies behind the last used segment of each run: else the first
//! buffer of a class could keep all that a small pool has, and whoever holds it while asking for the next would wait for
//! itself.
//!
//! A small aligned segment leaves much of its last page over; that tail becomes a segment of the largest class that
//! fits, and goes its own way.
//!
//! The tables: 4 bytes a page, 32 bytes a segment ([`Slot`]), some 80 bytes a run, together below 1% of the memory for
//! segments of 4 KiB and more. Nothing is ever written into the pinned memory itself.
//!
//! Everything here happens under the depot's lock. [`Arena::check`] walks every invariant.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ptr::NonNull;

use slab::Slab;

use crate::freelist::{Chain, Slot, state};
use crate::region::RegionId;
use crate::segment::{CLASSES, Class, PAGE, Placement, SEGMENT_ALIGN};

/// Marks a page-map entry as the edge of a free run; the rest is its length in pages.
const FREE: u32 = 1 << 31;

/// Pages in an extent at most: the map's entries need their top bit.
pub(crate) const MAX_EXTENT: usize = (FREE as usize - 1) * PAGE;

/// Aligned segments of up to this many pages give the rest of their last page away.
const TAIL_PAGES: usize = 16;

#[derive(Debug)]
struct Extent {
    base: NonNull<u8>,
    pages: u32,
    region: RegionId,
    pinned: bool,
    /// For the first and the last page of each run: the run's number, or [`FREE`] and its length. Other entries are
    /// stale.
    map: Vec<u32>,
}

#[derive(Debug)]
struct Run {
    extent: u32,
    first: u32,
    pages: u32,
    /// The class of the slots in `list`: the run's, or that of a single segment's tail.
    class: Option<Class>,
    /// Bytes of the single segment that has this run, while it is out; 0 for a class's run.
    alone: usize,
    slots: NonNull<Slot>,
    /// Slots in use as such, and slots in the table: a run that was shortened leaves some over.
    count: u32,
    table: u32,
    /// The free slots that are not cached elsewhere.
    list: Chain,
    /// Bytes that no segment covers.
    cut: usize,
}

/// The bytes of the arena, by what they are to it. Segments in shards and racks count as given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaBytes {
    pub(crate) total: usize,
    pub(crate) unpinned: usize,
    /// In free runs and in free segments of runs.
    pub(crate) free: usize,
    pub(crate) cut: usize,
    pub(crate) largest_free: usize,
}

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Arena {
    extents: Slab<Extent>,
    runs: Slab<Run>,
    /// Free runs: pages, extent, first page.
    free: BTreeSet<(u32, u32, u32)>,
    /// Runs with free slots, by class: extent, first page, run.
    partial: Vec<BTreeSet<(u32, u32, u32)>>,
    /// Runs that are kept though all their segments are back.
    idle: usize,
    total: usize,
    unpinned: usize,
    cut: usize,
    free_pages: usize,
    free_slot_bytes: usize,
    /// Where new slots start, so that a token of a dissolved run fits no later one.
    generation: u64,
}

// SAFETY: the raw pointers are to slot tables that the arena owns (Slot is Sync), and to memory that it only does
// arithmetic on.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            extents: Slab::new(),
            runs: Slab::new(),
            free: BTreeSet::new(),
            partial: (0..CLASSES).map(|_| BTreeSet::new()).collect(),
            idle: 0,
            total: 0,
            unpinned: 0,
            cut: 0,
            free_pages: 0,
            free_slot_bytes: 0,
            generation: 0,
        }
    }

    /// Adds `len` bytes at `base`, both multiples of [`PAGE`], `len` at most [`MAX_EXTENT`].
    ///
    /// # Safety
    /// The memory stays mapped until the extent was taken out by [`Arena::retire`] or the arena is gone, and nobody
    /// else uses it.
    pub(crate) unsafe fn add_extent(
        &mut self,
        region: RegionId,
        base: NonNull<u8>,
        len: usize,
        pinned: bool,
    ) {
        debug_assert!(base.as_ptr().addr() % PAGE == 0 && len % PAGE == 0 && len > 0 && len <= MAX_EXTENT);
        let pages = (len / PAGE) as u32;
        let extent =
            self.extents.insert(Extent { base, pages, region, pinned, map: vec![0; pages as usize] }) as u32;
        self.total += len;
        if !pinned {
            self.unpinned += len;
        }
        self.insert_free(extent, 0, pages);
    }

    /// Takes a region's extents out, if nothing of them is in use: their memory is the caller's again. `None`, too, for a
    /// region that is not here any more: of several who want one gone only the first has it to give away.
    pub(crate) fn retire(&mut self, region: RegionId) -> Option<Vec<(NonNull<u8>, usize, bool)>> {
        self.release_idle();
        let whole = |e: &Extent| e.map[0] == FREE | e.pages;
        if self.extents.iter().any(|(_, e)| e.region == region && !whole(e)) {
            return None;
        }
        let mine: Vec<usize> =
            self.extents.iter().filter(|(_, e)| e.region == region).map(|(i, _)| i).collect();
        if mine.is_empty() {
            return None;
        }
        let out = mine.into_iter().map(|i| {
            let e = self.extents.remove(i);
            let len = e.pages as usize * PAGE;
            self.free.remove(&(e.pages, i as u32, 0));
            self.free_pages -= e.pages as usize;
            self.total -= len;
            if !e.pinned {
                self.unpinned -= len;
            }
            (e.base, len, e.pinned)
        });
        Some(out.collect())
    }

    /// The regions, and how many of their bytes are in free runs.
    pub(crate) fn regions(&self) -> Vec<(RegionId, usize, usize)> {
        let mut list: Vec<(RegionId, usize, usize)> = Vec::new();
        for (i, e) in &self.extents {
            let free =
                self.free.iter().filter(|f| f.1 == i as u32).map(|f| f.0 as usize * PAGE).sum::<usize>();
            let len = e.pages as usize * PAGE;
            match list.iter_mut().find(|r| r.0 == e.region) {
                Some(r) => {
                    r.1 += len;
                    r.2 += free;
                }
                None => list.push((e.region, len, free)),
            }
        }
        list
    }

    pub(crate) fn bytes(&self) -> ArenaBytes {
        ArenaBytes {
            total: self.total,
            unpinned: self.unpinned,
            free: self.free_pages * PAGE + self.free_slot_bytes,
            cut: self.cut,
            largest_free: self.free.last().map_or(0, |f| f.0 as usize * PAGE),
        }
    }

    // --- pages -------------------------------------------------------------------------------------------------------

    fn insert_free(&mut self, extent: u32, first: u32, pages: u32) {
        let map = &mut self.extents[extent as usize].map;
        map[first as usize] = FREE | pages;
        map[(first + pages - 1) as usize] = FREE | pages;
        self.free.insert((pages, extent, first));
        self.free_pages += pages as usize;
    }

    fn remove_free(&mut self, extent: u32, first: u32, pages: u32) {
        self.free.remove(&(pages, extent, first));
        self.free_pages -= pages as usize;
    }

    /// Where in a free run an aligned start lies, if it and `pages` after it fit.
    fn aligned_start(&self, run: (u32, u32, u32), pages: u32, align: usize) -> Option<u32> {
        let (len, extent, first) = run;
        let page = self.extents[extent as usize].base.as_ptr().addr() / PAGE + first as usize;
        let skip = page.next_multiple_of(align) - page;
        (skip + pages as usize <= len as usize).then(|| first + skip as u32)
    }

    /// The smallest free run that fits, cut to size. The rest on both sides stays free.
    fn take_pages(&mut self, pages: usize, align: usize) -> Option<(u32, u32)> {
        let pages = u32::try_from(pages).ok()?;
        let mut fitting = self.free.range((pages, 0, 0)..);
        let (run, start) = if align == 1 {
            let run = *fitting.next()?;
            (run, run.2)
        } else {
            fitting.find_map(|&run| self.aligned_start(run, pages, align).map(|start| (run, start)))?
        };
        let (len, extent, first) = run;
        self.remove_free(extent, first, len);
        if start > first {
            self.insert_free(extent, first, start - first);
        }
        if first + len > start + pages {
            self.insert_free(extent, start + pages, first + len - start - pages);
        }
        Some((extent, start))
    }

    /// Frees pages and joins them with what is free beside them.
    fn give_pages(&mut self, extent: u32, mut first: u32, mut pages: u32) {
        let e = &self.extents[extent as usize];
        if let Some(left) = first.checked_sub(1).map(|p| e.map[p as usize]).filter(|m| m & FREE != 0) {
            let len = left & !FREE;
            let start = first - len;
            self.remove_free(extent, start, len);
            first = start;
            pages += len;
        }
        let e = &self.extents[extent as usize];
        if let Some(right) = e.map.get((first + pages) as usize).copied().filter(|m| m & FREE != 0) {
            let len = right & !FREE;
            self.remove_free(extent, first + pages, len);
            pages += len;
        }
        self.insert_free(extent, first, pages);
    }

    /// Bytes of the regions that have a slot for which `pred` holds.
    pub(crate) fn regions_with(&self, pred: &dyn Fn(&Slot) -> bool) -> usize {
        let mut found: Vec<RegionId> = Vec::new();
        for (_, run) in &self.runs {
            let region = self.extents[run.extent as usize].region;
            // SAFETY: slots of a run are alive as long as it is.
            if !found.contains(&region) && (0..run.count).any(|i| pred(unsafe { self.slot(run, i).as_ref() }))
            {
                found.push(region);
            }
        }
        let extents = self.extents.iter().filter(|(_, e)| found.contains(&e.region));
        extents.map(|(_, e)| e.pages as usize * PAGE).sum()
    }

    // --- runs --------------------------------------------------------------------------------------------------------

    /// Makes a run of `pages` at `first`, with slots at the given offsets. They start out of every list.
    fn make_run(
        &mut self,
        extent: u32,
        first: u32,
        pages: u32,
        slots: &mut dyn ExactSizeIterator<Item = (usize, Option<Class>)>,
    ) -> u32 {
        let base = self.extents[extent as usize].base;
        // SAFETY: `first` is a page of the extent, whose mapping is as long as its map.
        let start = unsafe { base.add(first as usize * PAGE) };
        let entry = self.runs.vacant_entry();
        let number = entry.key() as u32;
        let generation = self.generation;
        let table: Box<[Slot]> = slots
            // SAFETY: offsets are within the run's pages.
            .map(|(offset, class)| Slot::new(unsafe { start.add(offset) }, class, number, generation))
            .collect();
        let count = table.len() as u32;
        // The table is reached by raw pointers from now on, until `drop_table` makes it a box again.
        let slots = NonNull::from(Box::leak(table)).cast();
        entry.insert(Run {
            extent,
            first,
            pages,
            class: None,
            alone: 0,
            slots,
            count,
            table: count,
            list: Chain::new(),
            cut: 0,
        });
        let map = &mut self.extents[extent as usize].map;
        map[first as usize] = number;
        map[(first + pages - 1) as usize] = number;
        number
    }

    fn slot(&self, run: &Run, index: u32) -> NonNull<Slot> {
        debug_assert!(index < run.count);
        // SAFETY: the table has `count` slots.
        unsafe { run.slots.add(index as usize) }
    }

    /// Cuts a fresh run for a class and puts its segments on the run's list, lowest address first. Where no run of the
    /// class's shape is free, the longest one that is, if it holds a segment.
    fn cut_run(&mut self, class: Class) -> Option<u32> {
        let stride = class.stride();
        let longest = self.free.last().map_or(0, |f| f.0);
        let pages = class.shape().pages.min(longest);
        let segments = pages as usize * PAGE / stride;
        if segments == 0 {
            return None;
        }
        let (extent, first) = self.take_pages(pages as usize, 1)?;
        let mut slots = (0..segments).map(|i| (i * stride, Some(class)));
        let number = self.make_run(extent, first, pages, &mut slots);
        let run = &self.runs[number as usize];
        let mut list = Chain::new();
        for i in (0..segments as u32).rev() {
            // SAFETY: new slots, in no list.
            unsafe { list.push(self.slot(run, i)) };
        }
        let used = segments * stride;
        let run = &mut self.runs[number as usize];
        run.class = Some(class);
        run.list = list;
        run.cut = pages as usize * PAGE - used;
        self.cut += run.cut;
        self.free_slot_bytes += used;
        self.idle += 1;
        self.partial[class.index()].insert((extent, first, number));
        Some(number)
    }

    /// Gives a run's pages back. All its slots are on its list, or it is a single segment's and that is back too.
    fn dissolve(&mut self, number: u32) {
        let run = self.runs.remove(number as usize);
        if let Some(class) = run.class {
            self.partial[class.index()].remove(&(run.extent, run.first, number));
            self.free_slot_bytes -= run.list.len() as usize * class.stride();
            if run.alone == 0 && run.list.len() == run.count {
                self.idle -= 1;
            }
        }
        self.cut -= run.cut;
        self.give_pages(run.extent, run.first, run.pages);
        self.drop_table(&run);
        let _ = std::mem::ManuallyDrop::new(run.list);
    }

    /// Frees a run's slots.
    fn drop_table(&mut self, run: &Run) {
        let table = std::ptr::slice_from_raw_parts_mut(run.slots.as_ptr(), run.table as usize);
        // SAFETY: the box leaked in `make_run`, made a box again once; no slot of it is in any list.
        let table = unsafe { Box::from_raw(table) };
        // Generations of a later run at this number start above all of these.
        let highest = table.iter().map(|slot| slot.word().generation()).max();
        self.generation = self.generation.max(highest.map_or(0, |g| g + 1));
    }

    /// Whether all segments of a run are back.
    fn is_idle(run: &Run) -> bool {
        run.alone == 0 && run.list.len() == run.count
    }

    // --- segments ----------------------------------------------------------------------------------------------------

    /// Up to `count` segments of a class, neighbours where possible: from the run at the lowest address, or a new one.
    pub(crate) fn take_batch(&mut self, class: Class, count: u32) -> Chain {
        let number = match self.partial[class.index()].first() {
            Some(&(_, _, number)) => number,
            None => match self.cut_run(class) {
                Some(number) => number,
                None => return Chain::new(),
            },
        };
        self.take_from(number, class, count)
    }

    fn take_from(&mut self, number: u32, class: Class, count: u32) -> Chain {
        let run = &mut self.runs[number as usize];
        if Self::is_idle(run) {
            self.idle -= 1;
        }
        let chain = run.list.split(count);
        self.free_slot_bytes -= chain.len() as usize * class.stride();
        if run.list.is_empty() {
            self.partial[class.index()].remove(&(run.extent, run.first, number));
        }
        chain
    }

    /// One segment for a placement.
    pub(crate) fn take(&mut self, placement: Placement) -> Option<NonNull<Slot>> {
        match placement {
            Placement::Class(class) => self.take_batch(class, 1).pop(),
            Placement::Pages { span, align } => self.take_alone(span, align),
        }
    }

    /// One segment of a class from a run that is in use anyway, so that taking it costs nobody a run.
    pub(crate) fn take_from_partly_used(&mut self, class: Class) -> Option<NonNull<Slot>> {
        let mut runs = self.partial[class.index()].iter();
        let &(_, _, number) = runs.find(|r| !Self::is_idle(&self.runs[r.2 as usize]))?;
        self.take_from(number, class, 1).pop()
    }

    /// A run with one segment, whose last page is shared with a tail where that is worth it.
    fn take_alone(&mut self, span: usize, align: usize) -> Option<NonNull<Slot>> {
        let pages = span.div_ceil(PAGE);
        let own = span.next_multiple_of(SEGMENT_ALIGN);
        let (extent, first) = self.take_pages(pages, align)?;
        let tail = Class::fitting(pages * PAGE - own).filter(|_| pages <= TAIL_PAGES);
        let Some(class) = tail else {
            let number = self.make_run(extent, first, pages as u32, &mut std::iter::once((0, None)));
            let run = &mut self.runs[number as usize];
            run.alone = pages * PAGE;
            return Some(run.slots);
        };
        let number =
            self.make_run(extent, first, pages as u32, &mut [(0, None), (own, Some(class))].into_iter());
        let tail = self.slot(&self.runs[number as usize], 1);
        let run = &mut self.runs[number as usize];
        run.alone = own;
        run.class = Some(class);
        run.cut = pages * PAGE - own - class.stride();
        self.cut += run.cut;
        // SAFETY: a new slot, in no list.
        unsafe { run.list.push(tail) };
        self.free_slot_bytes += class.stride();
        self.partial[class.index()].insert((extent, first, number));
        Some(self.runs[number as usize].slots)
    }

    /// Bytes that a segment was given.
    ///
    /// # Safety
    /// The slot is of this arena and alive.
    pub(crate) unsafe fn granted(&self, slot: NonNull<Slot>) -> usize {
        // SAFETY: alive by the caller's word.
        let slot = unsafe { slot.as_ref() };
        match slot.class() {
            Some(class) => class.stride(),
            None => self.runs[slot.run() as usize].alone,
        }
    }

    /// Whether the segment's memory is really locked.
    ///
    /// # Safety
    /// The slot is of this arena and alive.
    pub(crate) unsafe fn pinned(&self, slot: NonNull<Slot>) -> bool {
        // SAFETY: alive by the caller's word.
        let run = &self.runs[unsafe { slot.as_ref() }.run() as usize];
        self.extents[run.extent as usize].pinned
    }

    /// A segment back to its run. Its word already says free.
    ///
    /// # Safety
    /// The slot is of this arena, alive, free, in no list; it may be gone when this returns.
    pub(crate) unsafe fn give(&mut self, slot: NonNull<Slot>) {
        // SAFETY: alive by the caller's word.
        let (number, class) = unsafe { (slot.as_ref().run(), slot.as_ref().class()) };
        let Some(class) = class else { return self.give_alone(number) };
        let run = &mut self.runs[number as usize];
        // SAFETY: free and in no list by the caller's word.
        unsafe { run.list.push(slot) };
        self.free_slot_bytes += class.stride();
        let (key, first, single) =
            ((run.extent, run.first, number), run.list.len() == 1, Self::is_single(run));
        if first {
            self.partial[class.index()].insert(key);
        }
        if single {
            // A tail came back. Whether its head is out decides what becomes of the run.
            if self.runs[number as usize].alone == 0 {
                self.dissolve(number);
            }
            return;
        }
        if Self::is_idle(&self.runs[number as usize]) {
            self.idle += 1;
            if self.partial[class.index()].len() > 1 {
                self.dissolve(number);
            }
        }
    }

    /// Whether the run is a single segment's with a tail (its first slot has no class).
    fn is_single(run: &Run) -> bool {
        // SAFETY: a run's table has at least one slot and lives as long as the run.
        unsafe { run.slots.as_ref() }.class().is_none()
    }

    /// The single segment of a run is back.
    fn give_alone(&mut self, number: u32) {
        let run = &mut self.runs[number as usize];
        let own = std::mem::take(&mut run.alone);
        if run.count == 1 || run.list.len() == 1 {
            return self.dissolve(number);
        }
        // Its tail is still out: keep the page that the tail is in, and free those before.
        let (extent, first) = (run.extent, run.first);
        let before = (own / PAGE) as u32;
        let tail = run.class.map_or(0, Class::stride);
        run.first += before;
        run.pages -= before;
        let cut = run.pages as usize * PAGE - tail;
        self.cut = self.cut - run.cut + cut;
        run.cut = cut;
        let (start, pages) = (run.first, run.pages);
        let map = &mut self.extents[extent as usize].map;
        map[start as usize] = number;
        map[(start + pages - 1) as usize] = number;
        if before > 0 {
            self.give_pages(extent, first, before);
        }
    }

    /// A chain back to its runs.
    ///
    /// # Safety
    /// As for [`Arena::give`], for each slot.
    pub(crate) unsafe fn give_chain(&mut self, mut chain: Chain) {
        while let Some(slot) = chain.pop() {
            // SAFETY: by the caller's word.
            unsafe { self.give(slot) };
        }
    }

    /// Gives up the runs that are kept only for the next segment of their class. `true` if there were any.
    pub(crate) fn release_idle(&mut self) -> bool {
        if self.idle == 0 {
            return false;
        }
        let idle: Vec<u32> = self
            .partial
            .iter()
            .flatten()
            .map(|r| r.2)
            .filter(|&n| Self::is_idle(&self.runs[n as usize]))
            .collect();
        for number in &idle {
            self.dissolve(*number);
        }
        !idle.is_empty()
    }

    /// Gives up the pages behind the last segment of each run that is in use. `true` if there were any.
    pub(crate) fn shorten_runs(&mut self) -> bool {
        let partial: Vec<(u32, Class)> = Class::all()
            .flat_map(|class| self.partial[class.index()].iter().map(move |r| (r.2, class)))
            .collect();
        partial.into_iter().fold(false, |any, (number, class)| self.shorten(number, class) || any)
    }

    fn shorten(&mut self, number: u32, class: Class) -> bool {
        let stride = class.stride();
        let run = &mut self.runs[number as usize];
        if run.alone > 0 || Self::is_single(run) || Self::is_idle(run) {
            return false;
        }
        let start = self.extents[run.extent as usize].base.as_ptr().addr() + run.first as usize * PAGE;
        let index = |slot: &Slot| (slot.base().as_ptr().addr() - start) / stride;
        let mut free = vec![false; run.count as usize];
        run.list.iter().for_each(|slot| free[index(slot)] = true);
        let used = free.iter().rposition(|free| !free).map_or(0, |last| last + 1);
        let pages = (used * stride).div_ceil(PAGE) as u32;
        if pages >= run.pages {
            return false;
        }
        let keep = pages as usize * PAGE / stride;
        let before = run.list.len() as usize;
        while run.list.pop().is_some() {}
        for at in (0..keep).rev().filter(|&at| free[at]) {
            // SAFETY: within the table; free, and in no list now. The others stay free and are never seen again.
            unsafe { run.list.push(run.slots.add(at)) };
        }
        self.free_slot_bytes -= (before - run.list.len() as usize) * stride;
        self.cut -= run.cut;
        run.cut = pages as usize * PAGE - keep * stride;
        self.cut += run.cut;
        let (extent, first, gone) = (run.extent, run.first, run.pages - pages);
        (run.count, run.pages) = (keep as u32, pages);
        if run.list.is_empty() {
            self.partial[class.index()].remove(&(extent, first, number));
        }
        self.extents[extent as usize].map[(first + pages - 1) as usize] = number;
        self.give_pages(extent, first + pages, gone);
        true
    }

    /// Whether so many of a placement could be served if everything that is not quarantined came back. `false` is
    /// certain; `true` is not, for more than one, since what is aligned or of other classes may be in the way. `stuck`
    /// says what is quarantined, if anything is.
    pub(crate) fn could_serve(
        &self,
        placement: Placement,
        count: usize,
        stuck: Option<&dyn Fn(&Slot) -> bool>,
    ) -> bool {
        let slots = |run: &Run| (0..run.count).map(|i| self.slot(run, i)).collect::<Vec<_>>();
        // SAFETY: slots of a run are alive as long as it is.
        let is_stuck = |slot: &NonNull<Slot>| stuck.is_some_and(|stuck| stuck(unsafe { slot.as_ref() }));
        let (need, align) = placement.fresh_pages();
        let fitting = |page: usize, first: usize, end: usize| match placement {
            Placement::Class(class) => (end - first) * PAGE / class.stride(),
            Placement::Pages { .. } => {
                let start = (page + first).next_multiple_of(align) - page;
                end.checked_sub(start + need).map_or(0, |rest| 1 + rest / need.next_multiple_of(align))
            }
        };
        let mut found = 0;
        for (_, e) in &self.extents {
            let page = e.base.as_ptr().addr() / PAGE;
            let (mut at, mut free_from) = (0, 0);
            while stuck.is_some() && at < e.pages as usize {
                let entry = e.map[at];
                if entry & FREE != 0 {
                    at += (entry & !FREE) as usize;
                    continue;
                }
                let run = &self.runs[entry as usize];
                let slots = slots(run);
                if slots.iter().any(is_stuck) {
                    found += fitting(page, free_from, at);
                    free_from = at + run.pages as usize;
                    if let Placement::Class(class) = placement {
                        // SAFETY: as above.
                        let fits = |s: &&NonNull<Slot>| unsafe { s.as_ref() }.class() == Some(class);
                        found += slots.iter().filter(fits).filter(|s| !is_stuck(s)).count();
                    }
                }
                at += run.pages as usize;
            }
            found += fitting(page, free_from, e.pages as usize);
        }
        found >= count
    }

    /// Whether a placement could be served if so many segments of each class came back from where they are cached. `false`
    /// is certain; `true` is not, since nobody knows of which runs they are.
    pub(crate) fn could_gather(&self, placement: Placement, cached: impl Fn(Class) -> usize) -> bool {
        let (need, align) = placement.fresh_pages();
        if let Placement::Class(class) = placement {
            if cached(class) > 0 {
                return true;
            }
        }
        let cached: Vec<usize> = Class::all().map(cached).collect();
        self.extents.iter().any(|(_, e)| {
            let page = e.base.as_ptr().addr() / PAGE;
            let fits = |from: usize, end: usize| (page + from).next_multiple_of(align) - page + need <= end;
            let (mut at, mut free_from) = (0, 0);
            while at < e.pages as usize {
                let entry = e.map[at];
                if entry & FREE != 0 {
                    at += (entry & !FREE) as usize;
                    continue;
                }
                let run = &self.runs[entry as usize];
                let end = at + run.pages as usize;
                // A single segment that is back has its tail out, or there would be no run.
                let segments = if Self::is_single(run) { 1 } else { run.count as usize };
                let out = segments.saturating_sub(run.list.len() as usize);
                // What of it stays where it is. Of a class's run, as little as possible: the first pages.
                let stays = match run.class {
                    Some(class) if run.alone == 0 => {
                        let out = out.saturating_sub(cached[class.index()]);
                        (out * class.stride()).div_ceil(PAGE).min(run.pages as usize)
                    }
                    _ => run.pages as usize,
                };
                if stays > 0 {
                    if fits(free_from, at) {
                        return true;
                    }
                    free_from = at + stays;
                }
                at = end;
            }
            fits(free_from, e.pages as usize)
        })
    }

    /// Visits every segment that is not in its run, so that it is out or cached, with the bytes that it was given.
    pub(crate) fn for_each_given(&self, mut visit: impl FnMut(&Slot, usize)) {
        let mut here = Vec::new();
        for (_, run) in &self.runs {
            here.clear();
            here.resize(run.count as usize, false);
            let first = run.slots.as_ptr().addr();
            for slot in run.list.iter() {
                here[(std::ptr::from_ref(slot).addr() - first) / size_of::<Slot>()] = true;
            }
            for n in (0..run.count).filter(|n| !here[*n as usize]) {
                // SAFETY: the run's own slot, alive as long as the run.
                let slot = unsafe { self.slot(run, n).as_ref() };
                // A single segment that is back, its tail out, is none any more.
                if slot.class().is_some() || run.alone > 0 {
                    visit(slot, slot.class().map_or(run.alone, Class::stride));
                }
            }
        }
    }

    /// How many segments of each class were cut, and how many of these lie in their run, run by run.
    pub(crate) fn for_each_class(&self, mut visit: impl FnMut(Class, u64, u64)) {
        for (_, run) in &self.runs {
            if let Some(class) = run.class {
                let segments = if Self::is_single(run) { 1 } else { run.count };
                visit(class, segments.into(), run.list.len().into());
            }
        }
    }

    /// Bytes of the tables beside the memory.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn table_bytes(&self) -> usize {
        let maps: usize = self.extents.iter().map(|(_, e)| e.map.len() * size_of::<u32>()).sum();
        let slots: usize = self.runs.iter().map(|(_, r)| r.table as usize * size_of::<Slot>()).sum();
        maps + slots + self.runs.len() * size_of::<Run>()
    }

    /// Walks every invariant. `outside` are the free slots in shards and racks, by address; `visit` sees every slot.
    ///
    /// # Errors
    /// The first violation, in words.
    pub(crate) fn check(
        &self,
        outside: &std::collections::HashSet<usize>,
        mut visit: impl FnMut(&Slot, usize, bool),
    ) -> Result<(), String> {
        let (mut total, mut cut, mut free_slots, mut free_pages, mut idle, mut runs) = (0, 0, 0, 0, 0, 0);
        let mut found_outside = 0;
        for (i, e) in &self.extents {
            let (mut at, mut was_free) = (0u32, false);
            while at < e.pages {
                let entry = e.map[at as usize];
                if entry & FREE != 0 {
                    let pages = entry & !FREE;
                    if was_free {
                        return Err(format!("extent {i}: two free runs meet at page {at}"));
                    }
                    if pages == 0 || at + pages > e.pages || e.map[(at + pages - 1) as usize] != entry {
                        return Err(format!("extent {i}: free run at page {at} has no end"));
                    }
                    if !self.free.contains(&(pages, i as u32, at)) {
                        return Err(format!("extent {i}: free run at page {at} cannot be found"));
                    }
                    free_pages += pages as usize;
                    (at, was_free) = (at + pages, true);
                    continue;
                }
                let run = self
                    .runs
                    .get(entry as usize)
                    .ok_or(format!("extent {i}: no run {entry} at page {at}"))?;
                if (run.extent, run.first) != (i as u32, at) || e.map[(at + run.pages - 1) as usize] != entry
                {
                    return Err(format!("run {entry} is not where the page map says"));
                }
                runs += 1;
                let start = e.base.as_ptr().addr() + at as usize * PAGE;
                let end = start + run.pages as usize * PAGE;
                let mut below = start;
                let mut covered = 0;
                let listed: std::collections::HashSet<usize> =
                    run.list.iter().map(|s| std::ptr::from_ref(s).addr()).collect();
                if listed.len() != run.list.len() as usize {
                    return Err(format!(
                        "run {entry}: its list counts {} but holds {}",
                        run.list.len(),
                        listed.len()
                    ));
                }
                let mut seen = 0;
                for n in 0..run.count {
                    // SAFETY: the run's own slot.
                    let slot = unsafe { self.slot(run, n).as_ref() };
                    let base = slot.base().as_ptr().addr();
                    let bytes = slot.class().map_or(run.alone, Class::stride);
                    let here = std::ptr::from_ref(slot).addr();
                    if slot.run() != entry {
                        return Err(format!("a slot of run {entry} says it is of run {}", slot.run()));
                    }
                    if slot.class().is_none() && run.alone == 0 {
                        continue; // A single segment that is back, its tail out.
                    }
                    if base % SEGMENT_ALIGN != 0 || base < below || base + bytes > end {
                        return Err(format!(
                            "run {entry}: segment {n} overlaps, leaves its run, or is misaligned"
                        ));
                    }
                    below = base + bytes;
                    covered += bytes;
                    let places = usize::from(listed.contains(&here)) + usize::from(outside.contains(&here));
                    seen += usize::from(listed.contains(&here));
                    found_outside += usize::from(outside.contains(&here));
                    let state = slot.word().state();
                    // A segment is free exactly if it stands in a list.
                    if places > 1 || places == 1 && state != state::HOST {
                        let state = state::name(state);
                        return Err(format!(
                            "run {entry}: segment {n} is {state} and stands in {places} lists"
                        ));
                    }
                    visit(slot, bytes, places == 1);
                }
                if seen != listed.len() {
                    return Err(format!("run {entry}: its list holds slots that are not its own"));
                }
                if covered + run.cut != end - start {
                    return Err(format!(
                        "run {entry}: {covered} covered + {} cut != {}",
                        run.cut,
                        end - start
                    ));
                }
                if let Some(class) = run.class {
                    let known = self.partial[class.index()].contains(&(run.extent, run.first, entry));
                    if known == run.list.is_empty() {
                        return Err(format!(
                            "run {entry} has {} free segments, findable: {known}",
                            run.list.len()
                        ));
                    }
                    free_slots += run.list.len() as usize * class.stride();
                }
                idle += usize::from(run.class.is_some() && Self::is_idle(run));
                cut += run.cut;
                (at, was_free) = (at + run.pages, false);
            }
            total += e.pages as usize * PAGE;
        }
        let sums = (total, cut, free_slots, free_pages, idle, runs);
        let kept = (self.total, self.cut, self.free_slot_bytes, self.free_pages, self.idle, self.runs.len());
        if sums != kept {
            return Err(format!(
                "(total, cut, free slots, free pages, idle, runs) are {sums:?}, kept as {kept:?}"
            ));
        }
        if self.free.iter().map(|f| f.0 as usize).sum::<usize>() != free_pages {
            return Err("the free runs that can be found are not those that exist".into());
        }
        if found_outside != outside.len() {
            return Err(format!(
                "{} segments are cached, {found_outside} of them are the arena's",
                outside.len()
            ));
        }
        Ok(())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for (_, run) in std::mem::take(&mut self.runs) {
            self.drop_table(&run);
            let _ = std::mem::ManuallyDrop::new(run.list);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    /// An address range that nobody touches: the arena only does arithmetic on it.
    fn base(page: usize) -> NonNull<u8> {
        NonNull::new(std::ptr::without_provenance_mut(page * PAGE)).unwrap()
    }

    fn arena(extents: &[usize]) -> Arena {
        let mut arena = Arena::new();
        let mut page = 1 << 20;
        for (i, &pages) in extents.iter().enumerate() {
            // SAFETY: nothing dereferences the memory in these tests.
            unsafe { arena.add_extent(RegionId(i as u64), base(page), pages * PAGE, true) };
            page += pages; // The next extent follows at once, so that joining across the edge would show.
        }
        arena
    }

    fn take(arena: &mut Arena, len: usize, align: usize) -> Option<NonNull<Slot>> {
        let slot = arena.take(Placement::of(len, align).unwrap())?;
        Some(slot)
    }

    fn give(arena: &mut Arena, slot: NonNull<Slot>) {
        // SAFETY: the tests give each slot back once.
        unsafe { arena.give(slot) };
    }

    #[test]
    fn memory_can_serve_any_class() {
        let mut arena = arena(&[1024]);
        let all = arena.bytes().free;
        for len in [100, 5000, 70_000, 1 << 20, 3 << 20] {
            let mut held = Vec::new();
            while let Some(slot) = take(&mut arena, len, 64) {
                held.push(slot);
            }
            let used = held.len() * Class::of(len).unwrap().stride();
            assert!(used > all * 3 / 4, "{len}: {used} of {all}");
            arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
            for slot in held {
                give(&mut arena, slot);
            }
            arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
            arena.release_idle();
            assert_eq!(
                arena.bytes(),
                ArenaBytes { total: all, free: all, largest_free: all, ..Default::default() }
            );
        }
    }

    #[test]
    fn an_aligned_segment_gives_its_tail_away() {
        let mut arena = arena(&[64]);
        let head = take(&mut arena, 4096, 4096).unwrap();
        let small = take(&mut arena, 3800, 64).unwrap();
        // SAFETY: both are out.
        let (h, s) = unsafe { (head.as_ref(), small.as_ref()) };
        assert_eq!(h.base().as_ptr().addr() % 4096, 0);
        assert_eq!(h.run(), s.run(), "the small segment lies in the aligned one's last page");
        give(&mut arena, head);
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
        assert_eq!(arena.bytes().free, 63 * PAGE);
        give(&mut arena, small);
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
        assert_eq!(arena.bytes().free, 64 * PAGE);
    }

    #[test]
    fn a_run_gives_up_what_lies_behind_its_last_segment() {
        let mut arena = arena(&[64]);
        let held: Vec<_> = (0..3).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
        assert!(arena.bytes().largest_free < 16 * PAGE);
        give(&mut arena, held[1]);
        assert!(arena.shorten_runs());
        assert_eq!(arena.bytes().largest_free, 60 * PAGE, "three segments need four pages");
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
        assert!(!arena.shorten_runs(), "nothing more to give");
        // What was free before the last is still there, and the run ends like any other.
        assert_eq!(take(&mut arena, 5000, 64), Some(held[1]));
        for slot in held {
            give(&mut arena, slot);
        }
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
        arena.release_idle();
        assert_eq!(arena.bytes().largest_free, 64 * PAGE);
    }

    #[test]
    fn tables_stay_below_one_percent() {
        for len in [4096, 5000, 6000, 10_000, 65_536, 1 << 20] {
            let mut arena = arena(&[(64 << 20) / PAGE]);
            while take(&mut arena, len, 64).is_some() {}
            let share = arena.table_bytes() as f64 / arena.bytes().total as f64;
            println!("tables for segments of {len}: {:.3}%", share * 100.0);
            assert!(share < 0.01, "{len}: {share}");
        }
    }

    #[test]
    fn no_run_crosses_an_extents_edge() {
        let mut arena = arena(&[16, 16]);
        assert!(take(&mut arena, 17 * PAGE, 4096).is_none());
        assert!(take(&mut arena, 15 * PAGE, 4096).is_some());
        assert!(take(&mut arena, 15 * PAGE, 4096).is_some());
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    }

    #[test]
    fn a_region_goes_only_when_nothing_of_it_is_used() {
        let mut arena = arena(&[16, 16]);
        let slot = take(&mut arena, 10 * PAGE, 4096).unwrap();
        assert!(arena.retire(RegionId(0)).is_none());
        assert_eq!(arena.retire(RegionId(1)).unwrap().len(), 1);
        give(&mut arena, slot);
        assert_eq!(arena.retire(RegionId(0)).unwrap(), vec![(base(1 << 20), 16 * PAGE, true)]);
        assert!(arena.retire(RegionId(0)).is_none(), "it is gone");
        assert_eq!(arena.bytes(), ArenaBytes::default());
    }

    #[test]
    fn what_could_be_gathered_is_known() {
        let mut arena = arena(&[64]);
        let large = take(&mut arena, 30 * PAGE - 32, 4096).unwrap();
        let small: Vec<_> = (0..3).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
        let class = Class::of(5000).unwrap();
        let cached = |n: usize| move |c: Class| if c == class { n } else { 0 };
        let pages = |n: usize| Placement::of(n * PAGE - 32, 4096).unwrap();
        assert!(arena.could_gather(pages(34), cached(3)), "behind the large one");
        assert!(!arena.could_gather(pages(35), cached(3)), "it is in the way");
        assert!(arena.could_gather(pages(32), cached(2)), "the last may be the first of the run");
        assert!(!arena.could_gather(pages(33), cached(2)), "and two pages are its own");
        assert!(arena.could_gather(Placement::Class(class), cached(1)));
        small.into_iter().chain([large]).for_each(|slot| give(&mut arena, slot));
    }

    #[test]
    fn what_can_be_served_is_known() {
        let mut arena = arena(&[64]);
        let stuck = take(&mut arena, 4 * PAGE, 4096).unwrap();
        let quarantined = |s: &Slot| s.word().state() == state::QUARANTINED;
        let whole = Placement::of(64 * PAGE - 32, 4096).unwrap();
        assert!(arena.could_serve(whole, 1, Some(&quarantined)));
        // SAFETY: out, and ours.
        unsafe { stuck.as_ref() }.set(state::QUARANTINED);
        assert!(!arena.could_serve(whole, 1, Some(&quarantined)));
        assert!(arena.could_serve(Placement::of(59 * PAGE - 32, 4096).unwrap(), 1, Some(&quarantined)));
        assert!(!arena.could_serve(Placement::of(60 * PAGE - 32, 4096).unwrap(), 1, Some(&quarantined)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// What comes back from where it is cached serves nothing that was said to be out of reach.
        #[test]
        fn what_could_be_gathered_is_never_denied(
            extents in prop::collection::vec(1usize..200, 1..4),
            steps in prop::collection::vec((0u8..10, 1usize..1_000_000, any::<prop::sample::Index>()), 1..100),
            want in 1usize..3_000_000,
            cached in any::<u64>(),
        ) {
            let mut arena = arena(&extents);
            let mut held = Vec::new();
            for (what, len, pick) in steps {
                let len = (len >> (len % 16)).max(1);
                let align = if what == 0 { 4096 } else { 64 };
                if what < 8 || held.is_empty() {
                    held.extend(take(&mut arena, len, align));
                } else {
                    give(&mut arena, held.swap_remove(pick.index(held.len())));
                }
            }
            let placement = Placement::of((want >> (want % 16)).max(1), 64).unwrap();
            let take_any = |arena: &mut Arena| {
                let slot = arena.take(placement);
                let slot = slot.or_else(|| { arena.release_idle(); arena.take(placement) });
                slot.or_else(|| { arena.shorten_runs(); arena.take(placement) })
            };
            // SAFETY: held.
            let class = |slot: &NonNull<Slot>| unsafe { slot.as_ref() }.class();
            if take_any(&mut arena).is_none() {
                let back = |i: usize, slot| cached >> (i % 64) & 1 == 1 && class(slot).is_some();
                let back: Vec<_> = held.iter().enumerate().filter(|(i, s)| back(*i, s)).map(|(_, s)| *s).collect();
                let count = |c: Class| back.iter().filter(|s| class(s) == Some(c)).count();
                let possible = arena.could_gather(placement, count);
                back.iter().for_each(|slot| give(&mut arena, *slot));
                prop_assert!(possible || take_any(&mut arena).is_none());
            }
        }

        #[test]
        fn any_order_of_takes_and_gives_keeps_the_invariants(
            extents in prop::collection::vec(1usize..300, 1..4),
            steps in prop::collection::vec((0u8..11, 1usize..3_000_000, 0u32..22, any::<prop::sample::Index>()), 1..120),
        ) {
            let mut arena = arena(&extents);
            let mut held: Vec<(NonNull<Slot>, usize)> = Vec::new();
            for (what, len, shift, pick) in steps {
                // Lengths over all magnitudes, alignments mostly small.
                let len = (len >> (len % 16)).max(1);
                let align = if what < 5 { 64 } else { 1 << shift };
                match what {
                    0..=6 => {
                        if let Some(slot) = take(&mut arena, len, align) {
                            // SAFETY: just taken.
                            let (start, bytes) = unsafe { (slot.as_ref().base().as_ptr().addr(), arena.granted(slot)) };
                            prop_assert!(start % align == 0 && bytes >= len.next_multiple_of(32) + 32);
                            for &(other, n) in &held {
                                // SAFETY: held.
                                let o = unsafe { other.as_ref() }.base().as_ptr().addr();
                                prop_assert!(start + bytes <= o || o + n <= start);
                            }
                            held.push((slot, bytes));
                        }
                    }
                    7 => { arena.release_idle(); }
                    8 => { arena.shorten_runs(); }
                    _ if !held.is_empty() => {
                        let (slot, _) = held.swap_remove(pick.index(held.len()));
                        give(&mut arena, slot);
                    }
                    _ => {}
                }
                let out: usize = held.iter().map(|h| h.1).sum();
                let b = arena.bytes();
                prop_assert_eq!(b.free + b.cut + out, b.total);
                if let Err(e) = arena.check(&HashSet::new(), |_, _, _| {}) {
                    return Err(TestCaseError::fail(e));
                }
            }
            for (slot, _) in held.drain(..) {
                give(&mut arena, slot);
            }
            arena.release_idle();
            prop_assert_eq!(arena.bytes().free, arena.bytes().total);
            prop_assert_eq!(arena.runs.len(), 0);
            arena.check(&HashSet::new(), |_, _, _| {}).map_err(TestCaseError::fail)?;
        }
    }
}

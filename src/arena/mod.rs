//! The arena: the pool's extents, which it cuts into runs, and these into segments.
//!
//! ```text
//!   region  |<------------------------------ pinned at once ------------------------------>|
//!   extent  |<----------- one registration ----------->|<----------------- next ----------->|
//!   run     |  class 64 KiB  | free |  4.5 MiB, alone  |  class 1 KiB | free               |
//!   segment | s | s | s | s |       | s                | ssssssssssss |
//! ```
//!
//! Runs of whole [`PAGE`]s cover an extent completely. A run is free, or belongs to one size class,
//! or to one segment that is large or aligned (a *single segment*). The arena joins a free run with
//! its free neighbours at once, but never across an extent's edge: a driver refuses a copy that
//! crosses two registrations. Free runs are ordered by size and then address. So a request takes
//! the smallest that fits (best fit) in logarithmic time, however many holes there are. Small
//! segments' runs are cut from the low end of a free run, large segments from its high end, so
//! neither scatters the other.
//!
//! A class takes segments from its run at the lowest address first, so that its others drain. The
//! first run of a class is a page, or what one segment needs. Each further run has as many segments
//! as the class has already, up to its [`Shape`](crate::segment::Shape). So the first buffer of a
//! class does not take a small pool's memory, and a busy class has few runs.
//!
//! A run whose segments are all back is dissolved at once: no class keeps unused memory. What
//! serves a class again and again without a new run is what thread caches hold.
//!
//! The tables take 4 bytes a page, 32 bytes a segment ([`Descriptor`]) and some 80 bytes a run:
//! below 1% of the memory for segments of 4 KiB and more. The arena never touches pinned memory.
//!
//! # Invariants
//!
//! - Segments do not overlap. Each lies inside one run, and each run inside one extent.
//! - Two free runs of an extent are never neighbours.
//! - A segment that is not in its run's list counts as given out, also in a thread or transfer
//!   cache. A run with such a segment is not dissolved, so descriptors outside are alive.
//! - Given out, free and cut bytes are the total, at any time.
//!
//! [`Arena::check`] walks all of them. Read on in `pages` (extents and free runs) and `windows`
//! (runs that are withheld for a waiter). Only the central pool calls the arena, under its lock.

#![allow(unsafe_code)]

mod check;
mod pages;
#[cfg(all(test, not(loom)))]
mod tests;
mod windows;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

use slab::Slab;

use crate::freelist::{Chain, Descriptor, state};
use crate::segment::RegionId;
use crate::segment::{CLASSES, Class, PAGE, Placement, SEGMENT_ALIGN};

pub(crate) use windows::{ClassSet, PageRange, Window, WindowId, set_of};

/// The bit of a page-map entry at a free run's edge. Those below [`HELD`] are its pages.
const FREE: u32 = 1 << 31;
/// The bit of such an entry that says that the free run lies in a window.
const HELD: u32 = 1 << 30;

/// The largest length of an extent, in bytes: a page-map entry has no more bits for it.
pub(crate) const MAX_EXTENT: usize = (HELD as usize - 1) * PAGE;

/// The length of the free run that a page-map entry describes, in pages.
fn free_len(entry: u32) -> u32 {
    entry & (HELD - 1)
}

#[derive(Debug)]
struct ArenaExtent {
    base: NonNull<u8>,
    pages: u32,
    region: RegionId,
    pinned: bool,
    /// For the first and the last page of each run: the run's number, or [`FREE`], perhaps
    /// [`HELD`], and the run's length. Other entries are stale.
    map: Vec<u32>,
    /// A segment in it is quarantined.
    stuck: bool,
}

#[derive(Debug)]
struct Run {
    extent: u32,
    first: u32,
    pages: u32,
    /// `None`: the run is a single segment's, which is out.
    class: Option<Class>,
    descriptors: NonNull<Descriptor>,
    /// Number of descriptors.
    count: u32,
    /// The free descriptors, except those in thread caches and transfer caches.
    list: Chain,
    /// The window that the run belongs to: then what is in its list is given to nobody else.
    window: Option<WindowId>,
    /// The run has a quarantined segment.
    stuck: bool,
}

/// The arena's bytes, by use. Segments in thread and transfer caches count as given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaBytes {
    pub(crate) total: usize,
    /// In free runs, and in the segments of the runs' lists. What lies in windows included.
    pub(crate) free: usize,
    /// The free bytes that lie in windows.
    pub(crate) withheld: usize,
    /// In runs, but covered by no segment.
    pub(crate) cut: usize,
    /// In the largest free run outside of windows.
    pub(crate) largest_free: usize,
}

/// What a region is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionUse {
    pub(crate) bytes: usize,
    /// All of the region is free, and outside of windows.
    pub(crate) idle: bool,
    /// The region has a quarantined segment.
    pub(crate) stuck: bool,
}

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct Arena {
    extents: Slab<ArenaExtent>,
    runs: Slab<Run>,
    /// Free runs outside of windows: pages, extent, first page.
    free: BTreeSet<(u32, u32, u32)>,
    /// Runs outside of windows whose list is not empty, by class: extent, first page, run.
    partial: Vec<BTreeSet<(u32, u32, u32)>>,
    /// What is withheld. The central pool keeps the owners, and counts its looks.
    pub(crate) windows: Slab<Window>,
    /// Where the last search for a window looked: the state of a generator.
    place: u64,
    /// Segments of the runs of each class.
    carved: Vec<u32>,
    total: usize,
    cut: usize,
    /// Bytes of the segments that are given out.
    out: usize,
    /// Free bytes outside of windows: in free runs, and in the runs' lists.
    unheld: usize,
    /// See [`take_peak`](Self::take_peak). A cell, since taking it changes nothing for waiters.
    peak: Cell<usize>,
    /// The generation of new descriptors. It is above those of all dissolved runs, so that a state
    /// word of a dissolved run equals no later one.
    generation: u64,
}

// SAFETY: the raw pointers point to descriptor tables that the arena owns (Descriptor is Sync), and
// to memory that it only does arithmetic on.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            extents: Slab::new(),
            runs: Slab::new(),
            free: BTreeSet::new(),
            partial: (0..CLASSES).map(|_| BTreeSet::new()).collect(),
            windows: Slab::new(),
            place: 0,
            carved: vec![0; CLASSES],
            total: 0,
            cut: 0,
            out: 0,
            unheld: 0,
            peak: Cell::new(0),
            generation: 0,
        }
    }

    /// Bytes of the segments that are given out.
    pub(crate) fn given_out(&self) -> usize {
        self.out
    }

    pub(crate) fn bytes(&self) -> ArenaBytes {
        let free = self.total - self.cut - self.out;
        ArenaBytes {
            total: self.total,
            free,
            withheld: free - self.unheld,
            cut: self.cut,
            largest_free: self.largest_free_pages() * PAGE,
        }
    }

    // --- runs ------------------------------------------------------------------------------------

    /// Makes a run of `pages` pages at page `first`, with descriptors of `count` segments of a
    /// class, or of a single segment. The new descriptors are in no list.
    fn make_run(&mut self, extent: u32, first: u32, pages: u32, class: Option<Class>, count: usize) -> u32 {
        let base = self.extents[extent as usize].base;
        // SAFETY: `first` is a page of the extent, whose mapping is as long as its map.
        let start = unsafe { base.add(first as usize * PAGE) };
        let entry = self.runs.vacant_entry();
        let number = entry.key() as u32;
        let generation = self.generation;
        let stride = class.map_or(pages as usize * PAGE, Class::stride);
        // SAFETY: the offsets are within the run's pages.
        let at = |i: usize| unsafe { start.add(i * stride) };
        let table: Box<[Descriptor]> =
            (0..count).map(|i| Descriptor::new(at(i), class, number, generation)).collect();
        self.cut += pages as usize * PAGE - count * stride;
        // From here on only raw pointers reach the table, until `drop_table` makes it a box again.
        let descriptors = NonNull::from(Box::leak(table)).cast();
        entry.insert(Run {
            extent,
            first,
            pages,
            class,
            descriptors,
            count: count as u32,
            list: Chain::new(),
            window: None,
            stuck: false,
        });
        let e = &mut self.extents[extent as usize];
        e.map[first as usize] = number;
        e.map[(first + pages - 1) as usize] = number;
        number
    }

    fn descriptor(&self, run: &Run, index: u32) -> NonNull<Descriptor> {
        debug_assert!(index < run.count);
        // SAFETY: the table has at least `count` descriptors.
        unsafe { run.descriptors.add(index as usize) }
    }

    /// Cuts a new run for a class and puts its segments into the run's list, lowest address first.
    /// The caller adds the run to the class's set of runs. The run has pages for `segments`
    /// segments, up to the class's shape; or it is the longest free run, if that holds a segment.
    fn cut_run(&mut self, class: Class, segments: usize) -> Option<u32> {
        let (stride, shape) = (class.stride(), class.shape());
        let longest = self.largest_free_pages() as u32;
        let pages = (segments.min(shape.segments as usize) * stride).div_ceil(PAGE) as u32;
        let pages = pages.min(shape.pages).min(longest);
        let segments = pages as usize * PAGE / stride;
        if segments == 0 {
            return None;
        }
        let (extent, first) = self.take_pages(pages as usize, 1, shape.segments == 1)?;
        let number = self.make_run(extent, first, pages, Some(class), segments);
        for i in (0..segments as u32).rev() {
            let run = &mut self.runs[number as usize];
            // SAFETY: a new descriptor of the run's table, in no list.
            unsafe { run.list.push(run.descriptors.add(i as usize)) };
        }
        self.unheld += segments * stride;
        self.carved[class.index()] += segments as u32;
        Some(number)
    }

    /// Frees a run's pages. All its descriptors are in its list.
    fn dissolve(&mut self, number: u32) {
        let run = self.runs.remove(number as usize);
        if let Some(class) = run.class {
            self.partial[class.index()].remove(&(run.extent, run.first, number));
            self.carved[class.index()] -= run.count;
        }
        self.cut -= Self::cut(&run);
        if run.window.is_some() {
            self.insert_held(run.extent, run.first, run.pages);
        } else {
            self.unheld -= Self::listed(&run);
            self.give_pages(run.extent, run.first, run.pages);
        }
        self.drop_table(&run);
    }

    /// Frees a run's descriptors.
    fn drop_table(&mut self, run: &Run) {
        let table = std::ptr::slice_from_raw_parts_mut(run.descriptors.as_ptr(), run.count as usize);
        // SAFETY: `make_run` leaked this box, and a run's table is freed once. No descriptor of it
        // is used again: no cache hands one out, and the run's list is not read any more.
        let table = unsafe { Box::from_raw(table) };
        // The generations of later descriptors start above all of these.
        let highest = table.iter().map(|descriptor| descriptor.word().generation()).max();
        self.generation = self.generation.max(highest.map_or(0, |g| g + 1));
    }

    /// Bytes of each segment of a run.
    fn segment_bytes(run: &Run) -> usize {
        run.class.map_or(run.pages as usize * PAGE, Class::stride)
    }

    /// Bytes of a run that no segment covers.
    fn cut(run: &Run) -> usize {
        run.pages as usize * PAGE - run.count as usize * Self::segment_bytes(run)
    }

    /// Bytes in a run's list.
    fn listed(run: &Run) -> usize {
        run.list.len() as usize * Self::segment_bytes(run)
    }

    /// Segments of a run that are given out, and their bytes.
    fn out(run: &Run) -> (u32, usize) {
        let out = run.count - run.list.len();
        (out, out as usize * Self::segment_bytes(run))
    }

    // --- segments --------------------------------------------------------------------------------

    /// Takes up to `count` segments of a class, neighbours where possible: from the class's run at
    /// the lowest address, or from a new run.
    pub(crate) fn take_batch(&mut self, class: Class, count: u32) -> Chain {
        self.take_listed(class, count, self.carved[class.index()].max(1) as usize)
    }

    /// [`Arena::take_batch`], with the number of segments of a run that is cut for it.
    fn take_listed(&mut self, class: Class, count: u32, segments: usize) -> Chain {
        let known = self.partial[class.index()].first().map(|first| first.2);
        let Some(number) = known.or_else(|| self.cut_run(class, segments)) else { return Chain::new() };
        let run = &mut self.runs[number as usize];
        let chain = run.list.split(count);
        let bytes = chain.len() as usize * class.stride();
        self.unheld -= bytes;
        self.out += bytes;
        match (known, run.list.is_empty()) {
            (Some(_), true) => _ = self.partial[class.index()].pop_first(),
            (None, false) => _ = self.partial[class.index()].insert((run.extent, run.first, number)),
            _ => {}
        }
        chain
    }

    /// Notes how many bytes are given out, for [`take_peak`](Self::take_peak).
    pub(crate) fn note_peak(&self) {
        self.peak.set(self.peak.get().max(self.out));
    }

    /// The most bytes that were [noted](Self::note_peak) since the call before, or ever.
    pub(crate) fn take_peak(&self) -> usize {
        self.peak.replace(self.out)
    }

    /// Takes one segment for a placement. `None`: no free memory fits.
    pub(crate) fn take(&mut self, placement: Placement) -> Option<NonNull<Descriptor>> {
        match placement {
            Placement::Class(class) => self.take_batch(class, 1).pop(),
            Placement::Pages { span, align } => self.take_alone(span, align),
        }
    }

    /// Takes the first of `alike` segments for a placement. A run cut for it has no more.
    pub(crate) fn take_one_of(&mut self, placement: Placement, alike: usize) -> Option<NonNull<Descriptor>> {
        match placement {
            Placement::Class(class) => self.take_listed(class, 1, alike).pop(),
            Placement::Pages { span, align } => self.take_alone(span, align),
        }
    }

    /// Takes a single segment, which has a run of its own.
    fn take_alone(&mut self, span: usize, align: usize) -> Option<NonNull<Descriptor>> {
        let pages = span.div_ceil(PAGE);
        let (extent, first) = self.take_pages(pages, align, true)?;
        let number = self.make_run(extent, first, pages as u32, None, 1);
        self.out += pages * PAGE;
        Some(self.runs[number as usize].descriptors)
    }

    /// Bytes that were given to a segment.
    ///
    /// # Safety
    /// The descriptor is of this arena and alive.
    pub(crate) unsafe fn granted(&self, descriptor: NonNull<Descriptor>) -> usize {
        // SAFETY: alive by this function's contract.
        Self::segment_bytes(&self.runs[unsafe { descriptor.as_ref() }.run() as usize])
    }

    /// Whether the segment's memory is pinned, and not plain memory in its place.
    ///
    /// # Safety
    /// The descriptor is of this arena and alive.
    pub(crate) unsafe fn pinned(&self, descriptor: NonNull<Descriptor>) -> bool {
        // SAFETY: alive by this function's contract.
        let run = &self.runs[unsafe { descriptor.as_ref() }.run() as usize];
        self.extents[run.extent as usize].pinned
    }

    /// Puts a segment, in state HOST already, back into its run. Returns the window it lies in.
    ///
    /// # Safety
    /// The descriptor is of this arena, alive, free and in no list. The caller does not use it
    /// afterwards: it may be freed when this returns.
    pub(crate) unsafe fn give(&mut self, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
        // SAFETY: alive by this function's contract.
        let number = unsafe { descriptor.as_ref() }.run();
        let run = &mut self.runs[number as usize];
        let (window, bytes) = (run.window, Self::segment_bytes(run));
        self.out -= bytes;
        if let Some(id) = window {
            self.windows[id].out -= 1;
            self.windows[id].looks = 0;
        } else {
            self.unheld += bytes;
        }
        // SAFETY: alive, free and in no list by this function's contract.
        unsafe { run.list.push(descriptor) };
        if run.list.len() == run.count {
            self.dissolve(number);
        } else if let Some(class) = run.class.filter(|_| window.is_none() && run.list.len() == 1) {
            self.partial[class.index()].insert((run.extent, run.first, number));
        }
        window
    }

    /// Puts a chain's segments back into their runs. They were cached, so none lies in a window.
    ///
    /// # Safety
    /// As for [`Arena::give`], for each descriptor.
    pub(crate) unsafe fn give_chain(&mut self, mut chain: Chain) {
        while let Some(descriptor) = chain.pop() {
            // SAFETY: this function's contract, and just popped, so in no list.
            let window = unsafe { self.give(descriptor) };
            debug_assert!(window.is_none(), "a segment in a window was cached");
        }
    }

    // --- looking ---------------------------------------------------------------------------------

    /// The descriptor at an address in the run of this number, and the bytes that its segment was
    /// given. `None`: the run has no such descriptor.
    pub(crate) fn descriptor_at(&self, run: u32, address: usize) -> Option<(&Descriptor, usize)> {
        let run = self.runs.get(run as usize)?;
        let index = address.checked_sub(run.descriptors.as_ptr().addr())? / size_of::<Descriptor>();
        if index >= run.count as usize {
            return None;
        }
        // SAFETY: the run's own descriptor, which is alive as long as the run.
        let descriptor = unsafe { self.descriptor(run, index as u32).as_ref() };
        Some((descriptor, Self::segment_bytes(run)))
    }

    /// Visits each class that has runs: the class, the number of its segments, and of free ones.
    pub(crate) fn for_each_class(&self, mut visit: impl FnMut(Class, u64, u64)) {
        for (_, run) in &self.runs {
            if let Some(class) = run.class {
                visit(class, run.count.into(), run.list.len().into());
            }
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for (_, run) in std::mem::take(&mut self.runs) {
            self.drop_table(&run);
        }
    }
}

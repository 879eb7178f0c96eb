//! The arena: the pool's extents, which it cuts into runs, and these into segments.
//!
//! ```text
//!   region  |<------------------------------ pinned at once ------------------------------>|
//!   extent  |<----------- one registration ----------->|<----------------- next ----------->|
//!   run     |  class 64 KiB  | free |  4.5 MiB, alone  |  class 1 KiB | free               |
//!   segment | s | s | s | s |       | s                | ssssssssssss |
//! ```
//!
//! Runs of whole [`PAGE`]s cover an extent completely. A run is free, or belongs to one size class, or to one segment
//! that is large or aligned (a *single segment*). The arena joins a free run with its free neighbours at once, but
//! never across an extent's edge: a driver refuses a copy that crosses two registrations. It keeps free runs ordered by
//! size and then address. So a request takes the smallest run that fits (best fit) in logarithmic time, however many
//! holes there are.
//!
//! A class takes segments from its run at the lowest address first, so that its other runs drain. A run whose segments
//! are all back is *idle*. The arena dissolves it at once if its class has another run to take from. It keeps the last
//! one until [`Arena::release_idle`] needs its pages, so that a class with one buffer at a time does not cut a run for
//! each checkout. Of idle runs that hold a single segment it keeps one in all: many large free runs that only their own
//! class may use would scatter the large segments of other classes. Where even that is not enough,
//! [`Arena::shorten_runs`] frees what lies behind the last used segment of each run. Otherwise the first buffer of a
//! class could keep all the memory of a small pool, and a thread that holds that buffer and asks for another would wait
//! for itself.
//!
//! A small aligned segment needs only a part of its last page. The rest, its *tail*, becomes a segment of the largest
//! class that fits, and is taken and returned like any other segment of that class.
//!
//! The tables take 4 bytes a page, 32 bytes a segment ([`Descriptor`]) and some 80 bytes a run. Together they are below
//! 1% of the memory for segments of 4 KiB and more. The arena never reads or writes the pinned memory itself.
//!
//! # Invariants
//!
//! - Segments do not overlap. Each lies inside one run, and each run inside one extent.
//! - Two free runs of an extent are never neighbours.
//! - A segment that its run's list does not hold counts as given out, also while a thread cache or a transfer cache
//!   holds it. A run is dissolved only when none of its segments is given out, so descriptors outside are alive.
//! - Given out, free and cut bytes are the total, at any time.
//!
//! [`Arena::check`] walks all of them.
//!
//! # Reading order
//!
//! This file (runs and segments), `pages` (extents and free runs), `feasibility` (what could be served if segments came
//! back), `visit` (counting and listing what is out), `check`. Only the central pool calls the arena, and always under
//! its lock.

#![allow(unsafe_code)]

mod check;
mod feasibility;
mod pages;
#[cfg(all(test, not(loom)))]
mod tests;
mod visit;
mod windows;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

use slab::Slab;

use crate::freelist::{Chain, Descriptor, state};
use crate::region::RegionId;
use crate::segment::{CLASSES, Class, PAGE, Placement, SEGMENT_ALIGN};

use windows::Window;
pub(crate) use windows::{PageRange, WindowId};

/// The bit of a page-map entry at the edge of a free run. The bits below [`HELD`] are the run's length in pages.
const FREE: u32 = 1 << 31;
/// The bit of such an entry that says that the free run lies in a window.
const HELD: u32 = 1 << 30;

/// The largest length of an extent, in bytes: a page-map entry has no more bits for it.
pub(crate) const MAX_EXTENT: usize = (HELD as usize - 1) * PAGE;

/// The length of the free run that a page-map entry describes, in pages.
fn free_len(entry: u32) -> u32 {
    entry & (HELD - 1)
}

/// Single segments of up to this many pages have a tail. The tail of a longer one would be less than a sixteenth of it,
/// and is not worth a descriptor.
const TAIL_PAGES: usize = 16;

#[derive(Debug)]
struct ArenaExtent {
    base: NonNull<u8>,
    pages: u32,
    region: RegionId,
    pinned: bool,
    /// For the first and the last page of each run: the run's number, or [`FREE`], perhaps [`HELD`], and the run's
    /// length. Other entries are stale.
    map: Vec<u32>,
    /// The runs in use: the number of each, by its first page.
    runs: BTreeMap<u32, u32>,
    /// Bytes given out, by block ([`windows::BLOCK`] pages).
    out: Vec<usize>,
    /// How many windows and quarantined segments each block meets.
    blocked: Vec<u32>,
    /// The runs that have a quarantined segment.
    stuck: Vec<u32>,
}

#[derive(Debug)]
struct Run {
    extent: u32,
    first: u32,
    pages: u32,
    /// The class of the descriptors in `list`: the run's class, or that of a single segment's tail.
    class: Option<Class>,
    /// Bytes of the single segment that has this run, while it is out; 0 in a class's run.
    alone: usize,
    descriptors: NonNull<Descriptor>,
    /// Number of descriptors in use, and in the table. A run that was shortened uses fewer than its table has.
    count: u32,
    table: u32,
    /// The free descriptors, except those in thread caches and transfer caches, and those in `held`.
    list: Chain,
    /// The free descriptors that lie in the window.
    held: Chain,
    /// The window that the run's descriptors from number `keep` on lie in.
    window: Option<WindowId>,
    keep: u32,
    /// The run is in [`Arena::frayed`].
    frayed: bool,
    /// Bytes that no segment covers.
    cut: usize,
}

/// The bytes of the arena, by use. Segments in thread caches and transfer caches count as given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaBytes {
    pub(crate) total: usize,
    pub(crate) unpinned: usize,
    /// In free runs, and in the segments of the runs' lists. What lies in windows included.
    pub(crate) free: usize,
    /// The free bytes that lie in windows.
    pub(crate) withheld: usize,
    /// In runs, but covered by no segment.
    pub(crate) cut: usize,
    /// In the largest free run outside of windows.
    pub(crate) largest_free: usize,
}

/// See the head of this module.
#[derive(Debug)]
pub(crate) struct Arena {
    extents: Slab<ArenaExtent>,
    runs: Slab<Run>,
    /// Free runs outside of windows: pages, extent, first page.
    free: BTreeSet<(u32, u32, u32)>,
    /// Runs whose list is not empty, by class: extent, first page, run.
    partial: Vec<BTreeSet<(u32, u32, u32)>>,
    /// The idle runs.
    idle: BTreeSet<u32>,
    /// The run of one segment that became idle last. It may be in use since then, or gone, and its number another run's.
    idle_last: Option<u32>,
    /// The runs in which a segment may have come back behind the last used one since [`Arena::shorten_runs`] looked.
    frayed: BTreeSet<u32>,
    windows: Slab<Window>,
    /// Segments that are given out and lie in windows, by class.
    watched: Vec<u32>,
    /// Idle runs are dissolved at once.
    eager: bool,
    /// Something got free outside of windows. The queue sets it back.
    pub(crate) gained: bool,
    total: usize,
    unpinned: usize,
    cut: usize,
    /// Pages in free runs, and of these the pages in windows.
    free_pages: usize,
    held_pages: usize,
    /// Bytes of the segments in the runs' lists, and of these the bytes in windows.
    free_slot_bytes: usize,
    held_slot_bytes: usize,
    /// See [`take_peak`](Self::take_peak). A cell, since whoever takes it changes nothing that a waiter could have.
    peak: Cell<usize>,
    /// The generation of new descriptors. It is above those of all dissolved runs, so that a state word of a dissolved
    /// run equals no later one.
    generation: u64,
}

// SAFETY: the raw pointers point to descriptor tables that the arena owns (Descriptor is Sync), and to memory that it
// only does arithmetic on.
unsafe impl Send for Arena {}

impl Arena {
    pub(crate) fn new() -> Self {
        Self {
            extents: Slab::new(),
            runs: Slab::new(),
            free: BTreeSet::new(),
            partial: (0..CLASSES).map(|_| BTreeSet::new()).collect(),
            idle: BTreeSet::new(),
            idle_last: None,
            frayed: BTreeSet::new(),
            windows: Slab::new(),
            watched: vec![0; CLASSES],
            eager: false,
            gained: false,
            total: 0,
            unpinned: 0,
            cut: 0,
            free_pages: 0,
            held_pages: 0,
            free_slot_bytes: 0,
            held_slot_bytes: 0,
            peak: Cell::new(0),
            generation: 0,
        }
    }

    pub(crate) fn bytes(&self) -> ArenaBytes {
        ArenaBytes {
            total: self.total,
            unpinned: self.unpinned,
            free: self.free_pages * PAGE + self.free_slot_bytes,
            withheld: self.held_pages * PAGE + self.held_slot_bytes,
            cut: self.cut,
            largest_free: self.free.last().map_or(0, |f| f.0 as usize * PAGE),
        }
    }

    // --- runs --------------------------------------------------------------------------------------------------------

    /// Makes a run of `pages` pages at page `first`, with descriptors of segments at the given offsets in bytes. The
    /// new descriptors are in no list.
    fn make_run(
        &mut self,
        extent: u32,
        first: u32,
        pages: u32,
        descriptors: &mut dyn ExactSizeIterator<Item = (usize, Option<Class>)>,
    ) -> u32 {
        let base = self.extents[extent as usize].base;
        // SAFETY: `first` is a page of the extent, whose mapping is as long as its map.
        let start = unsafe { base.add(first as usize * PAGE) };
        let entry = self.runs.vacant_entry();
        let number = entry.key() as u32;
        let generation = self.generation;
        let table: Box<[Descriptor]> = descriptors
            // SAFETY: the offsets are within the run's pages.
            .map(|(offset, class)| Descriptor::new(unsafe { start.add(offset) }, class, number, generation))
            .collect();
        let count = table.len() as u32;
        // From here on only raw pointers reach the table, until `drop_table` makes it a box again.
        let descriptors = NonNull::from(Box::leak(table)).cast();
        entry.insert(Run {
            extent,
            first,
            pages,
            class: None,
            alone: 0,
            descriptors,
            count,
            table: count,
            list: Chain::new(),
            held: Chain::new(),
            window: None,
            keep: 0,
            frayed: false,
            cut: 0,
        });
        let e = &mut self.extents[extent as usize];
        e.map[first as usize] = number;
        e.map[(first + pages - 1) as usize] = number;
        e.runs.insert(first, number);
        number
    }

    fn descriptor(&self, run: &Run, index: u32) -> NonNull<Descriptor> {
        debug_assert!(index < run.count);
        // SAFETY: the table has at least `count` descriptors.
        unsafe { run.descriptors.add(index as usize) }
    }

    /// Cuts a new run for a class and puts its segments into the run's list, lowest address first. The run has the
    /// class's shape, or only the pages for `most` segments. Where no free run is as long, it takes the longest free run,
    /// if that holds a segment.
    fn cut_run(&mut self, class: Class, most: usize) -> Option<u32> {
        let stride = class.stride();
        let longest = self.free.last().map_or(0, |f| f.0);
        let pages = class.pages_of(most).min(class.shape().pages as usize).min(longest as usize) as u32;
        let segments = pages as usize * PAGE / stride;
        if segments == 0 {
            return None;
        }
        let (extent, first) = self.take_pages(pages as usize, 1)?;
        let mut descriptors = (0..segments).map(|i| (i * stride, Some(class)));
        let number = self.make_run(extent, first, pages, &mut descriptors);
        let run = &self.runs[number as usize];
        let mut list = Chain::new();
        for i in (0..segments as u32).rev() {
            // SAFETY: new descriptors, in no list.
            unsafe { list.push(self.descriptor(run, i)) };
        }
        let used = segments * stride;
        let run = &mut self.runs[number as usize];
        run.class = Some(class);
        run.list = list;
        run.cut = pages as usize * PAGE - used;
        self.cut += run.cut;
        self.free_slot_bytes += used;
        self.idle.insert(number);
        self.partial[class.index()].insert((extent, first, number));
        Some(number)
    }

    /// Frees a run's pages. All its descriptors are in its list, except that of a single segment, which is back and in
    /// no list.
    fn dissolve(&mut self, number: u32) {
        let run = self.runs.remove(number as usize);
        if let Some(class) = run.class {
            self.partial[class.index()].remove(&(run.extent, run.first, number));
            let (listed, held) = (run.list.len(), run.held.len());
            self.free_slot_bytes -= (listed + held) as usize * class.stride();
            self.held_slot_bytes -= held as usize * class.stride();
            self.idle.remove(&number);
        }
        if run.frayed {
            self.frayed.remove(&number);
        }
        self.cut -= run.cut;
        self.extents[run.extent as usize].runs.remove(&run.first);
        self.give_pages(run.extent, run.first, run.pages);
        self.drop_table(&run);
        let _ = std::mem::ManuallyDrop::new((run.list, run.held));
    }

    /// Frees a run's descriptors.
    fn drop_table(&mut self, run: &Run) {
        let table = std::ptr::slice_from_raw_parts_mut(run.descriptors.as_ptr(), run.table as usize);
        // SAFETY: `make_run` leaked this box, and a run's table is freed once. No descriptor of it is used again: no
        // cache hands one out, and the run's list is not read any more.
        let table = unsafe { Box::from_raw(table) };
        // The generations of later descriptors start above all of these.
        let highest = table.iter().map(|descriptor| descriptor.word().generation()).max();
        self.generation = self.generation.max(highest.map_or(0, |g| g + 1));
    }

    /// Whether all segments of a run are back, and none of them lies in a window.
    fn is_idle(run: &Run) -> bool {
        run.alone == 0 && run.list.len() == run.count
    }

    /// The bytes of a segment of `bytes` bytes go out (`add`), or come back: counts them in their blocks.
    fn note_out(&mut self, extent: u32, base: NonNull<u8>, bytes: usize, add: bool) {
        let e = &mut self.extents[extent as usize];
        let mut at = base.as_ptr().addr() - e.base.as_ptr().addr();
        let end = at + bytes;
        while at < end {
            let block = at / windows::BLOCK_BYTES;
            let here = ((block + 1) * windows::BLOCK_BYTES).min(end) - at;
            let out = &mut e.out[block];
            *out = if add { *out + here } else { *out - here };
            at += here;
        }
    }

    /// Dissolves idle runs at once from now on, or keeps the last one of each class: while a request waits, no memory
    /// is kept for a class.
    pub(crate) fn set_eager(&mut self, eager: bool) {
        self.eager = eager;
        if eager {
            self.release_idle();
        }
    }

    // --- segments ----------------------------------------------------------------------------------------------------

    /// Takes up to `count` segments of a class, neighbours where possible: from the class's run at the lowest address,
    /// or from a new run.
    pub(crate) fn take_batch(&mut self, class: Class, count: u32) -> Chain {
        let number = match self.partial[class.index()].first() {
            Some(&(_, _, number)) => number,
            None => match self.cut_run(class, usize::MAX) {
                Some(number) => number,
                None => return Chain::new(),
            },
        };
        let chain = self.take_from(number, class, count);
        self.peak.set(self.peak.get().max(self.taken()));
        chain
    }

    /// Bytes that were taken and did not come back.
    fn taken(&self) -> usize {
        self.total - self.cut - self.free_pages * PAGE - self.free_slot_bytes
    }

    /// The most bytes that were taken at a time since the call before, or ever.
    pub(crate) fn take_peak(&self) -> usize {
        self.peak.replace(self.taken())
    }

    /// The most bytes in use since the peak was taken.
    pub(crate) fn peak(&self) -> usize {
        self.peak.get()
    }

    /// Puts the peak back to what it was before segments were taken that nobody got.
    pub(crate) fn set_peak(&self, bytes: usize) {
        self.peak.set(bytes);
    }

    fn take_from(&mut self, number: u32, class: Class, count: u32) -> Chain {
        let run = &mut self.runs[number as usize];
        if Self::is_idle(run) {
            self.idle.remove(&number);
            // What lies behind the last segment that is taken now can be freed later.
            run.frayed = true;
            self.frayed.insert(number);
        }
        let chain = run.list.split(count);
        let extent = run.extent;
        self.free_slot_bytes -= chain.len() as usize * class.stride();
        if run.list.is_empty() {
            self.partial[class.index()].remove(&(extent, run.first, number));
        }
        for descriptor in chain.iter() {
            self.note_out(extent, descriptor.base(), class.stride(), true);
        }
        chain
    }

    /// Takes one segment for a placement. `None`: no free memory fits.
    pub(crate) fn take(&mut self, placement: Placement) -> Option<NonNull<Descriptor>> {
        match placement {
            Placement::Class(class) => self.take_batch(class, 1).pop(),
            Placement::Pages { span, align } => {
                let taken = self.take_alone(span, align);
                self.peak.set(self.peak.get().max(self.taken()));
                taken
            }
        }
    }

    /// [`Arena::take`] for the first of `count` segments of a placement that are taken one after the other: a run that is
    /// cut for them is no longer than they need.
    pub(crate) fn take_tightly(&mut self, placement: Placement, count: usize) -> Option<NonNull<Descriptor>> {
        if let Placement::Class(class) = placement {
            if self.partial[class.index()].is_empty() {
                self.cut_run(class, count)?;
            }
        }
        self.take(placement)
    }

    /// Takes a single segment. Its run has a tail where that is worth a descriptor.
    fn take_alone(&mut self, span: usize, align: usize) -> Option<NonNull<Descriptor>> {
        let pages = span.div_ceil(PAGE);
        let own = span.next_multiple_of(SEGMENT_ALIGN);
        let (extent, first) = self.take_pages(pages, align)?;
        let tail = Class::fitting(pages * PAGE - own).filter(|_| pages <= TAIL_PAGES);
        let Some(class) = tail else {
            let number = self.make_run(extent, first, pages as u32, &mut std::iter::once((0, None)));
            let run = &mut self.runs[number as usize];
            run.alone = pages * PAGE;
            let descriptors = run.descriptors;
            self.note_single(number, true);
            return Some(descriptors);
        };
        let number =
            self.make_run(extent, first, pages as u32, &mut [(0, None), (own, Some(class))].into_iter());
        let tail = self.descriptor(&self.runs[number as usize], 1);
        let run = &mut self.runs[number as usize];
        run.alone = own;
        run.class = Some(class);
        run.cut = pages * PAGE - own - class.stride();
        self.cut += run.cut;
        // SAFETY: a new descriptor, in no list.
        unsafe { run.list.push(tail) };
        self.free_slot_bytes += class.stride();
        self.partial[class.index()].insert((extent, first, number));
        self.note_single(number, true);
        Some(self.runs[number as usize].descriptors)
    }

    /// Counts the single segment of a run as out, or as back.
    fn note_single(&mut self, number: u32, add: bool) {
        let run = &self.runs[number as usize];
        // SAFETY: a run's table has at least one descriptor and lives as long as the run.
        let (extent, bytes, base) = (run.extent, run.alone, unsafe { run.descriptors.as_ref() }.base());
        self.note_out(extent, base, bytes, add);
    }

    /// Bytes that were given to a segment.
    ///
    /// # Safety
    /// The descriptor is of this arena and alive.
    pub(crate) unsafe fn granted(&self, descriptor: NonNull<Descriptor>) -> usize {
        // SAFETY: alive by this function's contract.
        let descriptor = unsafe { descriptor.as_ref() };
        match descriptor.class() {
            Some(class) => class.stride(),
            None => self.runs[descriptor.run() as usize].alone,
        }
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

    /// Puts a segment back into its run. Its state is HOST already. Returns the window that it lies in.
    ///
    /// # Safety
    /// The descriptor is of this arena, alive, free and in no list. The caller does not use it afterwards: it may be
    /// freed when this returns.
    pub(crate) unsafe fn give(&mut self, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
        // SAFETY: alive by this function's contract.
        let (number, class, base) =
            unsafe { (descriptor.as_ref().run(), descriptor.as_ref().class(), descriptor.as_ref().base()) };
        let Some(class) = class else { return self.give_alone(number) };
        self.note_out(self.runs[number as usize].extent, base, class.stride(), false);
        self.free_slot_bytes += class.stride();
        let run = &mut self.runs[number as usize];
        let index = (descriptor.as_ptr().addr() - run.descriptors.as_ptr().addr()) / size_of::<Descriptor>();
        if run.window.is_some() && index >= run.keep as usize {
            // SAFETY: alive, free and in no list by this function's contract.
            unsafe { run.held.push(descriptor) };
            let window = run.window;
            self.held_slot_bytes += class.stride();
            self.watched[class.index()] -= 1;
            if let Some(id) = window {
                self.windows[id.0].out -= 1;
            }
            self.cleared(number);
            return window;
        }
        // SAFETY: as above.
        unsafe { run.list.push(descriptor) };
        self.gained = true;
        if !run.frayed {
            run.frayed = true;
            self.frayed.insert(number);
        }
        let (key, first, single) =
            ((run.extent, run.first, number), run.list.len() == 1, Self::is_single(run));
        if first {
            self.partial[class.index()].insert(key);
        }
        if single {
            // A tail is back. The run stays as long as its single segment is out.
            if self.runs[number as usize].alone == 0 {
                self.dissolve(number);
            }
        } else {
            self.idled(number, class);
        }
        None
    }

    /// Notes that a class's run may have become idle, and dissolves it where no memory is kept for the class.
    fn idled(&mut self, number: u32, class: Class) {
        if Self::is_idle(&self.runs[number as usize]) {
            self.idle.insert(number);
            if self.eager || self.partial[class.index()].len() > 1 {
                self.dissolve(number);
            } else if class.shape().segments == 1 {
                let before = self.idle_last.replace(number).filter(|before| *before != number);
                if let Some(before) = before.filter(|before| self.idle.contains(before)) {
                    self.dissolve(before);
                }
            }
        }
    }

    /// Whether the run is that of a single segment: then its first descriptor has no class.
    fn is_single(run: &Run) -> bool {
        // SAFETY: a run's table has at least one descriptor and lives as long as the run.
        unsafe { run.descriptors.as_ref() }.class().is_none()
    }

    /// Takes back the single segment of a run. Returns the window that it lies in.
    fn give_alone(&mut self, number: u32) -> Option<WindowId> {
        self.note_single(number, false);
        let run = &mut self.runs[number as usize];
        let (own, window) = (std::mem::take(&mut run.alone), run.window);
        if let Some(id) = window {
            self.windows[id.0].out -= 1;
        }
        let run = &mut self.runs[number as usize];
        if run.count == 1 || run.list.len() + run.held.len() == 1 {
            self.dissolve(number);
            return window;
        }
        // The tail is still out: the run keeps the page that the tail is in, and the pages before become free.
        let (extent, first) = (run.extent, run.first);
        let before = (own / PAGE) as u32;
        let tail = run.class.map_or(0, Class::stride);
        run.first += before;
        run.pages -= before;
        let cut = run.pages as usize * PAGE - tail;
        self.cut = self.cut - run.cut + cut;
        run.cut = cut;
        let (start, pages) = (run.first, run.pages);
        let e = &mut self.extents[extent as usize];
        e.map[start as usize] = number;
        e.map[(start + pages - 1) as usize] = number;
        e.runs.remove(&first);
        e.runs.insert(start, number);
        if before > 0 {
            self.give_pages(extent, first, before);
        }
        window
    }

    /// Puts the segments of a chain back into their runs. They were cached, so none of them lies in a window.
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

    /// Dissolves all idle runs. `true` if there were any.
    pub(crate) fn release_idle(&mut self) -> bool {
        let idle = std::mem::take(&mut self.idle);
        idle.iter().for_each(|number| self.dissolve(*number));
        !idle.is_empty()
    }

    /// Frees the pages behind the last segment that is given out, in each run that is not idle. `true` if there were
    /// any. Only the runs in which this may have changed since the last call are looked at.
    pub(crate) fn shorten_runs(&mut self) -> bool {
        let frayed = std::mem::take(&mut self.frayed);
        frayed.into_iter().fold(false, |any, number| {
            let run = &mut self.runs[number as usize];
            run.frayed = false;
            self.shorten(number) || any
        })
    }

    fn shorten(&mut self, number: u32) -> bool {
        let run = &self.runs[number as usize];
        let Some(class) = run.class else { return false };
        if Self::is_single(run) || Self::is_idle(run) || run.window.is_some() {
            return false;
        }
        let mut free = vec![false; run.count as usize];
        run.list.iter().for_each(|descriptor| free[Self::number_of(run, descriptor)] = true);
        let used = free.iter().rposition(|free| !free).map_or(0, |last| last + 1);
        self.shorten_to(number, class, used)
    }

    /// The number of a run's descriptor.
    fn number_of(run: &Run, descriptor: &Descriptor) -> usize {
        std::ptr::from_ref(descriptor).addr().wrapping_sub(run.descriptors.as_ptr().addr())
            / size_of::<Descriptor>()
    }

    /// Frees the pages behind the first `used` segments of a class's run, which are all that are given out. `true` if
    /// there were any.
    fn shorten_to(&mut self, number: u32, class: Class, used: usize) -> bool {
        let stride = class.stride();
        let run = &mut self.runs[number as usize];
        let pages = (used * stride).div_ceil(PAGE) as u32;
        if pages >= run.pages {
            return false;
        }
        let keep = (pages as usize * PAGE / stride).min(run.count as usize);
        let before = run.list.len();
        let mut kept = Chain::new();
        while let Some(descriptor) = run.list.pop() {
            // SAFETY: in a run's list, so alive.
            if Self::number_of(run, unsafe { descriptor.as_ref() }) < keep {
                // SAFETY: alive, free, and just taken off the list. The descriptors beyond `keep` stay in the table,
                // free and in no list, and are not used again.
                unsafe { kept.push(descriptor) };
            }
        }
        // The order of the list stays.
        while let Some(descriptor) = kept.pop() {
            // SAFETY: as above.
            unsafe { run.list.push(descriptor) };
        }
        let lost = before - run.list.len();
        self.free_slot_bytes -= lost as usize * stride;
        self.cut -= run.cut;
        run.cut = pages as usize * PAGE - keep * stride;
        self.cut += run.cut;
        let (extent, first, freed) = (run.extent, run.first, run.pages - pages);
        (run.count, run.pages) = (keep as u32, pages);
        if run.list.is_empty() {
            self.partial[class.index()].remove(&(extent, first, number));
        }
        self.extents[extent as usize].map[(first + pages - 1) as usize] = number;
        self.give_pages(extent, first + pages, freed);
        true
    }

    /// Bytes of the tables that lie beside the pinned memory.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn table_bytes(&self) -> usize {
        let maps: usize = self.extents.iter().map(|(_, e)| e.map.len() * size_of::<u32>()).sum();
        let descriptors: usize =
            self.runs.iter().map(|(_, r)| r.table as usize * size_of::<Descriptor>()).sum();
        maps + descriptors + self.runs.len() * size_of::<Run>()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for (_, run) in std::mem::take(&mut self.runs) {
            self.drop_table(&run);
            let _ = std::mem::ManuallyDrop::new((run.list, run.held));
        }
    }
}

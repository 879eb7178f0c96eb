//! Windows: the ranges of whole runs that are withheld for waiters, and the classes whose returns
//! are looked at because of them. [`crate::arena::windows`] finds the ranges.
//!
//! # Closed classes
//!
//! A return into a thread cache looks at no segment, so it cannot know of windows. Therefore the
//! classes to which a waiter may have a right are *closed*: classes that are waited for, and
//! classes with segments out inside a window. The limit up to which a hit may return a segment of a
//! closed class is 0, so the return takes the slow path. There it looks, inside of the gate and
//! without the lock, whether the class is waited for, or the segment lies in a window: then it goes
//! to the lock, else into the thread cache. Checkouts are never closed: nothing is cached that a
//! waiter has a right to.
//!
//! A class is closed while the owners are shut out and all that was cached is in its runs. A store
//! opens it: each owner lifts its own limit when it next comes by. So a waiter costs other threads
//! one miss for each class, and the returns of closed classes a few nanoseconds.
//!
//! # Windows that do not empty
//!
//! A window to which nothing came back during `1 << moves` looks is given up at the next one, for
//! another if there is one: some thread may keep a buffer in it for ever. `moves` counts how often
//! its waiter has done so: at last a window stays longer than any buffer in it. Its next window may
//! not overlap one that it gave up, until all were tried. A request that no present region can hold
//! has whole regions for a window, others in turn: when all are free, a longer one is pinned in
//! their place.

use std::ptr::NonNull;

use super::growth::least;
use super::queue::{Size, Ticket, bytes, window_pages};
use super::{CentralPool, Core, Want};
use crate::arena::{ClassSet, PageRange, Window, WindowId, set_of};
use crate::freelist::{LISTS, list_of, listed};
use crate::segment::Class;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The most windows at the same time, and the most ranges that they have together. Later waiters
/// have none until one ends.
pub(super) const MOST_WINDOWS: usize = if cfg!(loom) { 2 } else { 8 };
const MOST_RANGES: usize = if cfg!(loom) { 2 } else { 32 };
/// What returns of a class need not look at, and what they compare.
pub(super) const OPEN: u32 = 0;
pub(super) const IN_WINDOWS: u32 = 1;
pub(super) const AWAITED: u32 = 2;

/// What returns look at. Written under the central pool's lock, and read inside of the gate, where
/// no class is closed meanwhile: the cold side closes classes while all owners are shut out. So all
/// accesses are relaxed, and the gate's permits order them.
#[derive(Debug)]
pub(super) struct Closed {
    /// Of each class with a list: [`OPEN`], [`IN_WINDOWS`] or [`AWAITED`].
    classes: [AtomicU32; LISTS + 1],
    /// The addresses of the windows' ranges: of each the first, and that behind the last. Behind
    /// the last there are zeros.
    ranges: [[AtomicU64; 2]; MOST_RANGES],
}

impl Closed {
    pub(super) fn new() -> Self {
        Self { classes: std::array::from_fn(|_| AtomicU32::new(OPEN)), ranges: Default::default() }
    }

    pub(super) fn why(&self, class: Class) -> u32 {
        self.classes[list_of(class)].load(Ordering::Relaxed)
    }

    pub(super) fn holds(&self, address: usize) -> bool {
        let ranges = self.ranges.iter().map(|r| [&r[0], &r[1]].map(|at| at.load(Ordering::Relaxed) as usize));
        ranges.take_while(|range| range[1] > 0).any(|[first, end]| first <= address && address < end)
    }

    pub(super) fn set_classes(&self, [awaited, in_windows]: [ClassSet; 2]) {
        for class in listed() {
            let why = match set_of(class) {
                this if awaited & this != 0 => AWAITED,
                this if in_windows & this != 0 => IN_WINDOWS,
                _ => OPEN,
            };
            self.classes[list_of(class)].store(why, Ordering::Relaxed);
        }
    }

    pub(super) fn set_ranges(&self, mut ranges: impl Iterator<Item = (usize, usize)>) {
        for range in &self.ranges {
            let (first, end) = ranges.next().unwrap_or_default();
            range[0].store(first as u64, Ordering::Relaxed);
            range[1].store(end as u64, Ordering::Relaxed);
        }
    }
}

/// What is known about windows, beside the windows themselves.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// The closed classes: first the awaited ones, then the ones with segments out in windows.
    pub(super) closed: [ClassSet; 2],
    /// A search for this many pages has found no window since the last window ended.
    pub(super) none_for: Option<usize>,
    /// A waiter may find a window, or needs its class closed.
    pub(super) wanted: bool,
    /// The next look is planned.
    pub(super) planned: bool,
    /// Waiters of lower tickets were found waiting by a look.
    pub(super) looked: Ticket,
    /// Requests on the slow path since the last look, where there is no clock.
    pub(super) ticks: u32,
}

impl CentralPool {
    /// Whether no waiter has a right to a segment that comes back, or that is in flight and would
    /// be lent again. Exact inside of the gate. (A waiter that comes now finds a segment lent.)
    pub(crate) fn may_claim(&self, class: Class, base: NonNull<u8>) -> bool {
        match self.closed.why(class) {
            AWAITED => false,
            IN_WINDOWS => !self.closed.holds(base.as_ptr().addr()),
            _ => true,
        }
    }

    /// Whether returns of the class need not take the slow path. Exact inside of the gate.
    pub(super) fn is_open(&self, class: Class) -> bool {
        self.closed.why(class) == OPEN
    }

    /// Chooses windows for the waiters that have none, and at a look other windows in place of ones
    /// that do not empty; closes the classes whose returns must be looked at.
    pub(super) fn arrange(&self, core: &mut Core, look: bool) {
        self.gate.quiesce(&core.table);
        self.reclaim_quiet(core);
        core.grant_waiters();
        if look {
            core.look();
        }
        core.windows.wanted = false;
        core.choose();
        let classes = core.classes_to_close();
        for class in listed().filter(|class| (classes[0] | classes[1]) & set_of(*class) != 0) {
            core.table.quiet().for_each(|mut held| held.close(class));
        }
        self.close_classes(core, classes);
        self.closed.set_ranges(core.arena.window_addresses());
        self.gate.readmit(&core.table);
    }

    pub(super) fn close_classes(&self, core: &mut Core, classes: [ClassSet; 2]) {
        if core.windows.closed != classes {
            core.windows.closed = classes;
            self.closed.set_classes(classes);
        }
    }
}

impl Core {
    /// The windows.
    pub(super) fn windows(&self) -> Vec<WindowId> {
        self.arena.windows.iter().map(|(id, _)| id).collect()
    }

    /// The window of a waiter.
    pub(super) fn window(&self, owner: Ticket) -> Option<WindowId> {
        self.arena.windows.iter().find(|(_, window)| window.owner == owner).map(|(id, _)| id)
    }

    /// The classes to close: the awaited ones, and the ones with segments out in windows.
    pub(super) fn classes_to_close(&self) -> [ClassSet; 2] {
        [self.queue.awaited(), self.arena.classes_in_windows()]
    }

    /// Ends a window. Its owner chooses anew, and a waiter without one may find one.
    pub(super) fn end_window(&mut self, id: WindowId) {
        self.arena.release_window(id);
        self.seek_windows();
    }

    /// Notes that there may be windows, or needs for them, that there were not.
    pub(super) fn seek_windows(&mut self) {
        self.windows.none_for = None;
        self.windows.wanted |= !self.unplaced(1).is_empty();
    }

    /// A segment came back to a window: serves its owner if possible, or replaces the regions.
    pub(super) fn came(&mut self, id: WindowId) {
        let Some(&Window { owner, replaces, out, .. }) = self.arena.windows.get(id) else { return };
        if replaces && out == 0 && self.growing == 0 {
            self.end_window(id);
            self.grow_for(owner);
        } else if !replaces {
            let wants = self.queue.wants(owner);
            if out == 0 || wants.len() > 1 && bytes(wants) <= self.arena.bytes().free {
                self.grant_withheld(id);
            }
        }
    }

    /// Serves the first waiter of the size of a window's owner, which is the owner unless an equal
    /// one came before it, from the window and from what is free outside of windows, together.
    /// `false`: that is not enough.
    fn grant_withheld(&mut self, id: WindowId) -> bool {
        let window = self.arena.release_window(id);
        let size = self.queue.waiting[&window.owner].size;
        let granted = self.grant(self.queue.first(size).unwrap_or(window.owner));
        if granted {
            self.seek_windows();
        } else {
            self.arena.withhold(window);
        }
        granted
    }

    /// Serves what a new request would get, and ends windows to which nothing came back for long.
    fn look(&mut self) {
        // Returns do not look for what got free beside a window and makes a longer range of it.
        while self.windows().into_iter().any(|id| self.grant_withheld(id)) {
            self.grant_waiters();
        }
        for id in self.windows() {
            let window = &mut self.arena.windows[id];
            window.looks += 1;
            let &mut Window { owner, looks, replaces, out, .. } = window;
            let moves = self.queue.waiting[&owner].moves;
            // No regions are chosen to be replaced while others are being pinned.
            let may_move = !replaces || self.growing == 0 && out > 0;
            if may_move && looks > 1 << moves.min(20) {
                if let Some(waiter) = self.queue.waiting.get_mut(&owner) {
                    waiter.moves += 1;
                    waiter.given_up.extend(&self.arena.windows[id].ranges);
                }
                self.end_window(id);
            }
        }
    }

    /// Chooses windows for the waiters that may have one. Nothing is cached.
    fn choose(&mut self) {
        // Regions that got free while others were being pinned.
        self.windows().into_iter().for_each(|id| self.came(id));
        for key in self.unplaced(MOST_WINDOWS) {
            let windows = self.arena.windows.iter();
            let left = MOST_RANGES - windows.map(|(_, window)| window.ranges.len()).sum::<usize>();
            if left == 0 || self.arena.windows.len() >= MOST_WINDOWS {
                break;
            }
            let given_up = &self.queue.waiting[&key].given_up;
            let to_replace = self.ranges_to_replace(key, left, given_up);
            let to_replace = to_replace.or_else(|| self.ranges_to_replace(key, left, &[]));
            let replaces = to_replace.is_some();
            let Some(ranges) = to_replace.or_else(|| self.ranges_of(key, left)) else { continue };
            let id = self.arena.withhold(Window::new(key, ranges, replaces));
            self.came(id);
        }
    }

    /// The first waiters of each size that may choose a window and have none, up to `most` of each,
    /// in their order: not those behind another of the same class.
    fn unplaced(&self, most: usize) -> Vec<Ticket> {
        let mut all = Vec::new();
        for (size, tickets) in &self.queue.sizes {
            let leading = if matches!(size, Size::Class(_)) { 1 } else { usize::MAX };
            let leading = tickets.iter().take(leading);
            all.extend(leading.filter(|ticket| self.window(**ticket).is_none()).take(most));
        }
        all.sort_unstable();
        all
    }

    /// Ranges for a waiter: if possible, none that it has given up.
    fn ranges_of(&mut self, key: Ticket, most: usize) -> Option<Vec<PageRange>> {
        let waiter = self.queue.waiting.get_mut(&key)?;
        let (wants, given_up) = (waiter.wants.clone(), waiter.given_up.clone());
        self.ranges_for(&wants, &given_up, most).or_else(|| {
            self.queue.waiting.get_mut(&key)?.given_up.clear();
            if given_up.is_empty() { None } else { self.ranges_for(&wants, &[], most) }
        })
    }

    /// A range for these wants, or, where none is as long as all of them, ranges for parts of them:
    /// `most` at most. None meets one of those to `avoid`. `None`: there are not as many ranges.
    fn ranges_for(&mut self, wants: &[Want], avoid: &[PageRange], most: usize) -> Option<Vec<PageRange>> {
        let (need, align) = window_pages(wants);
        let none_for = self.windows.none_for;
        if most > 0 && none_for.is_none_or(|none| need < none) {
            if let Some(range) = self.arena.choose_window(need, align, avoid) {
                return Some(vec![range]);
            }
            if avoid.is_empty() {
                // A piece of `all` pages would have the aligned ones in it.
                let all = need.saturating_add(align - 1);
                self.windows.none_for = Some(none_for.map_or(all, |none| none.min(all)));
            }
        }
        let (first, second) = wants.split_at(wants.len() / 2);
        if first.is_empty() {
            return None;
        }
        let mut ranges = self.ranges_for(first, avoid, most)?;
        let avoid = [avoid, &ranges].concat();
        ranges.extend(self.ranges_for(second, &avoid, most - ranges.len())?);
        Some(ranges)
    }

    /// Whole regions that are to be withheld for a waiter, in whose place one can be pinned that
    /// serves it: the present ones never can. None meets one of those to `avoid`.
    fn ranges_to_replace(&self, key: Ticket, most: usize, avoid: &[PageRange]) -> Option<Vec<PageRange>> {
        let waiter = &self.queue.waiting[&key];
        let may = self.config.step > 0 && self.growing == 0 && self.may_try(key);
        if !may || waiter.replaced || !self.outgrow(&waiter.wants) {
            return None;
        }
        let missing = least(&waiter.wants).checked_sub(self.room_beside()).filter(|missing| *missing > 0)?;
        self.arena.replaceable(missing, most, avoid)
    }
}

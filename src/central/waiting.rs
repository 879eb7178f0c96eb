//! Waiting for memory: joining and leaving the queue, serving it, windows and closed classes, and ending waits that nothing can
//! serve any more. [`super::queue`] decides which waiter is next.
//!
//! # The rule
//!
//! A request waits only for bytes of its own window, and nothing that a waiter has a right to passes it by.
//!
//! A waiter has a right to what is free in its window, and to what comes back there. A waiter for one segment of a class
//! has a right to each segment of the class that comes back outside of other windows, too. Everything else serves
//! everybody, from thread caches as always. What is free outside of windows when the lock is let go serves no waiter:
//! the guard of the lock sees to that (`lock`).
//!
//! # Looks
//!
//! Returns do not look at everything that a new request would find: segments that are cached, and pages beside a window
//! that make a longer range of it. So as long as a request waits, the timer looks at the queue every 100 ms, and takes all
//! of these.
//!
//! # Closed classes
//!
//! A return into a thread cache looks at no segment, so it cannot know of windows. Therefore the classes to which a
//! waiter may have a right are *closed*: those that are waited for, and those of which segments are given out inside a
//! window. In each thread cache the limit up to which a hit may return a segment of a closed class is 0. Such a return
//! takes the slow path. There it looks, inside of the gate and without the lock, whether the class is waited for, or the
//! segment's address lies in a window. Then the segment goes to the lock. Else it goes into the thread cache after all.
//! Checkouts are never closed, since nothing is cached that a waiter has a right to.
//!
//! A class is closed while the owners are shut out of their caches and everything that was cached is in its runs. It is
//! opened by a store: each owner lifts its own limit when it next comes by. So a waiter costs other threads one miss for
//! each class when it comes, and the returns of closed classes a few nanoseconds.
//!
//! # Windows that do not empty
//!
//! A window to which nothing came back during `1 << moves` looks is given up at the next one, for another if there is one:
//! some thread may keep a buffer in it for ever. `moves` counts how often its waiter has done so, so that at last a window
//! stays for longer than any buffer in it is kept. The next window may not overlap one that the waiter has given up, until
//! all were tried.
//!
//! A request that no present region can hold waits for regions to be replaced: then whole regions are withheld for it,
//! until all of them are free.
//!
//! While memory for all waiters is being pinned, nothing is closed and no window is chosen.

use std::ptr::NonNull;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::growth::{growth_failure, least};
use super::queue::{Size, Ticket, serves_all, take_all, window_pages};
use super::{CentralPool, Core, Fresh, WaitOutcome, Wake, Want, mode, sum};
use crate::arena::{PageRange, Window, WindowId};
use crate::error::{Error, Result, Shortage, Waited};
use crate::foreign::Task;
use crate::freelist::{Descriptor, listed};
use crate::segment::Class;
use crate::sync::{self, AtomicU64, Ordering};

/// The most windows at the same time, and the most ranges that they have together. Later waiters have none until one ends.
pub(super) const MOST_WINDOWS: usize = if cfg!(loom) { 2 } else { 8 };
const MOST_RANGES: usize = if cfg!(loom) { 2 } else { 32 };
/// The time between two looks. Without a clock: so many requests on the slow path.
const LOOK: Duration = Duration::from_millis(100);
const TICKS: u32 = 64;

/// Why a class is closed: requests wait for it; segments of it are given out in windows.
const AWAITED: u64 = 1;
const WATCHED: u64 = 2;
/// Classes in a word of [`Closed`], which has both bits of each, so that they change together.
const IN_A_WORD: usize = 32;
const WORDS: usize = crate::segment::CLASSES.div_ceil(IN_A_WORD);

/// What returns look at. The words are written under the central pool's lock; they are read inside of the gate, where
/// no bit is set meanwhile: the cold side sets bits while all owners are shut out. So all accesses are relaxed, and the
/// gate's permits order them.
#[derive(Debug, Default)]
pub(super) struct Closed {
    classes: [AtomicU64; WORDS],
    /// The addresses of the windows' ranges: of each the first, and that behind the last.
    ranges: [[AtomicU64; 2]; MOST_RANGES],
}

impl Closed {
    fn holds(&self, address: usize) -> bool {
        let ranges = self.ranges.iter().map(|r| [&r[0], &r[1]].map(|at| at.load(Ordering::Relaxed) as usize));
        // Behind the last range there are zeros.
        ranges.take_while(|range| range[1] > 0).any(|[first, end]| first <= address && address < end)
    }

    fn bits(&self, class: Class) -> u64 {
        let word = self.classes[class.index() / IN_A_WORD].load(Ordering::Relaxed);
        word >> (class.index() % IN_A_WORD * 2) & (AWAITED | WATCHED)
    }

    /// Whether a waiter may have a right to a segment.
    fn meets(&self, class: Class, base: NonNull<u8>) -> bool {
        let bits = self.bits(class);
        bits & AWAITED != 0 || bits & WATCHED != 0 && self.holds(base.as_ptr().addr())
    }

    pub(super) fn set(&self, class: Class, bits: u64) {
        let (word, shift) = (&self.classes[class.index() / IN_A_WORD], class.index() % IN_A_WORD * 2);
        let others = word.load(Ordering::Relaxed) & !((AWAITED | WATCHED) << shift);
        word.store(others | bits << shift, Ordering::Relaxed);
    }

    pub(super) fn set_ranges(&self, mut ranges: impl Iterator<Item = (usize, usize)>) {
        for range in &self.ranges {
            let (first, end) = ranges.next().unwrap_or_default();
            range[0].store(first as u64, Ordering::Relaxed);
            range[1].store(end as u64, Ordering::Relaxed);
        }
    }

    /// The closed classes.
    fn each(&self) -> impl Iterator<Item = Class> + '_ {
        let words = self.classes.iter().enumerate();
        words.flat_map(|(word, bits)| {
            let mut left = bits.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let at = (left != 0).then(|| left.trailing_zeros() / 2)?;
                left &= !((AWAITED | WATCHED) << (at * 2));
                Class::new(word * IN_A_WORD + at as usize)
            })
        })
    }
}

/// What is known about windows, beside the windows themselves.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// A search for so many pages has found no window since the last one ended.
    none_for: Option<usize>,
    /// A waiter may find a window, or needs its class closed.
    wanted: bool,
    /// A look is due: windows that did not empty are given up.
    look: bool,
    /// A waiter came for which no memory was being pinned.
    uncovered: bool,
    /// The next look is planned.
    planned: bool,
    /// Requests on the slow path since the last look, where there is no clock.
    ticks: u32,
}

impl CentralPool {
    /// Adds a request to the queue, and serves it at once if possible. Returns the waiter's key. With `covered`, memory
    /// for the request is being pinned already, so other threads keep their thread caches. `most`: how many requests may
    /// wait at a time, this one included.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::Forked`]; [`Error::Impossible`] or the error of the last growth if nothing can ever
    /// serve the request; [`Error::QueueFull`].
    pub(crate) fn join(&self, wants: Vec<Want>, wake: Wake, covered: bool, most: usize) -> Result<usize> {
        self.refuse_if_shut()?;
        let mut core = self.lock();
        self.refuse_if_shut()?;
        if let Some(error) = self.hopeless(&core, &wants).or_else(|| growth_failure(&core, &wants)) {
            return Err(error);
        }
        if core.queue.len() >= most {
            return Err(Error::QueueFull { limit: most });
        }
        core.stats.waits += 1;
        let (need, several) = (window_pages(&wants).0, wants.len() > 1);
        let key = core.queue.join(wants, wake);
        core.windows.uncovered |= !covered || core.growing == 0;
        let size = core.queue.size(key);
        core.windows.wanted |= match size {
            Size::Class(_) => core.queue.first(size) == Some(key),
            _ => {
                let none = !several && core.windows.none_for.is_some_and(|none| need >= none);
                core.arena.windows.len() < MOST_WINDOWS && !none
            }
        };
        // The unlock serves it, if what came back since the request was tried, or was kept for a class, is not for one
        // that has waited longer.
        drop(core);
        Ok(key)
    }

    /// Whether a waiter may have a right to a segment that comes back. Exact inside of the gate.
    pub(super) fn closes(&self, class: Class, base: NonNull<u8>) -> bool {
        self.closed_classes.meets(class, base)
    }

    /// Whether returns of the class need not take the slow path. Exact inside of the gate.
    pub(super) fn is_open(&self, class: Class) -> bool {
        self.closed_classes.bits(class) == 0
    }

    /// Whether a segment that is in flight may be lent again: no waiter has a right to it when it comes back. (A waiter
    /// that comes at this moment finds it lent.)
    pub(crate) fn may_claim(&self, class: Class, base: NonNull<u8>) -> bool {
        !self.closes(class, base)
    }

    /// Serves the queue, and chooses windows, after a change. Returns the wakes that follow.
    pub(super) fn turn(&self, core: &mut Core) -> Vec<Wake> {
        core.serve();
        // What windows that ended meanwhile had may serve others.
        while self.settle(core) {
            core.serve();
        }
        if core.config.timeless && !core.queue.is_empty() {
            // The next call is the end of the pause.
            core.growth_is_due();
        }
        std::mem::take(&mut core.wakes)
    }

    /// Opens classes, closes others, and chooses windows, as the queue needs it. Whether windows were chosen.
    fn settle(&self, core: &mut Core) -> bool {
        if core.queue.is_empty() {
            let windows = &mut core.windows;
            (windows.uncovered, windows.wanted, windows.look, windows.none_for) = (false, false, false, None);
            self.reopen(core);
            return false;
        }
        if core.growing > 0 && !core.windows.uncovered {
            return false;
        }
        if !core.config.timeless {
            core.plan_look();
        }
        let chosen = core.windows.wanted;
        if chosen {
            self.arrange(core);
        } else {
            self.reopen(core);
        }
        chosen
    }

    /// Without a clock: a request that is not in the queue is a tick. After many of them there is a look, before the
    /// request is tried.
    pub(super) fn tick(&self, core: &mut Core) {
        if core.queue.is_empty() {
            return;
        }
        core.windows.ticks += 1;
        if core.windows.ticks >= TICKS {
            (core.windows.ticks, core.windows.look, core.windows.wanted) = (0, true, true);
            core.wakes = self.turn(core);
        }
    }

    /// Chooses windows for the waiters that have none, and at a look others for those that do not empty; closes the
    /// classes whose returns must be looked at.
    fn arrange(&self, core: &mut Core) {
        self.gate.quiesce(mode::INSPECT, &core.table);
        self.reclaim_quiet(core);
        core.serve();
        if std::mem::take(&mut core.windows.look) {
            core.look();
        }
        core.windows.wanted = false;
        core.choose();
        let closed = &self.closed_classes;
        for class in listed() {
            let bits = core.closes(class);
            if bits != 0 {
                core.table.quiet().for_each(|mut held| held.close(class));
            }
            closed.set(class, bits);
        }
        closed.set_ranges(core.arena.window_addresses());
        self.gate.readmit(mode::INSPECT, &core.table);
    }

    /// Opens the classes that need not be closed any more.
    pub(super) fn reopen(&self, core: &Core) {
        self.closed_classes.each().for_each(|class| {
            let bits = core.closes(class);
            if self.closed_classes.bits(class) != bits {
                self.closed_classes.set(class, bits);
            }
        });
    }

    /// Checks what closed classes, windows and the queue promise. `cached` tells whether segments of a class are cached.
    pub(super) fn check_waiting(
        &self,
        core: &mut Core,
        cached: impl Fn(Class) -> bool,
    ) -> std::result::Result<(), String> {
        let owners = core.owners();
        let unique = owners.windows(2).all(|pair| pair[0] < pair[1]);
        if !unique || owners.iter().any(|owner| !core.queue.waits(*owner)) {
            return Err(format!("windows belong to {owners:?}, some of which do not wait, or have two"));
        }
        for ticket in core.queue.firsts().collect::<Vec<_>>() {
            let wants = core.queue.wants(ticket).to_vec();
            if serves_all(&mut core.arena, &wants) {
                return Err(format!("a request waits that what is free can serve: {wants:?}"));
            }
        }
        if core.growing > 0 && !core.windows.uncovered {
            return Ok(());
        }
        let closed = &self.closed_classes;
        for class in listed() {
            let (bits, needed) = (closed.bits(class), core.closes(class));
            if needed & !bits != 0 {
                return Err(format!("{class:?} is closed as {bits}, and {needed} is needed"));
            }
            if needed & AWAITED != 0 && cached(class) {
                return Err(format!("segments of {class:?} are cached, and a request waits for one"));
            }
        }
        let mut ranges = core.arena.window_addresses();
        match ranges.find(|(first, end)| !closed.holds(*first) || !closed.holds(end - 1)) {
            Some((first, end)) => Err(format!("returns do not find the window at {first:x} to {end:x}")),
            None => Ok(()),
        }
    }

    /// Looks at the queue and the windows after a time.
    pub(super) fn look_later(central: std::sync::Weak<Self>) {
        if cfg!(loom) {
            return;
        }
        crate::timer::after(LOOK, move || {
            let Some(central) = central.upgrade() else { return };
            let mut core = central.lock();
            core.windows.planned = false;
            (core.windows.look, core.windows.wanted) = (true, true);
        });
    }

    /// The outcome of a waiter so far. Any but [`WaitOutcome::Waiting`] ends the wait, and the key. A waiter that still
    /// waits is woken through `waker` from now on, if that is given.
    pub(crate) fn look(&self, key: usize, waker: Option<&Waker>) -> WaitOutcome<Fresh> {
        // In the child of a fork a thread that no longer exists may hold the lock, and no segment comes back any more.
        if crate::os::forked() {
            return WaitOutcome::Failed(Error::Forked);
        }
        let wake = waker.map(|w| Wake::Task(Task::of(w)));
        // The replaced waker is dropped after the unlock: its task may be dropped with it, and buffers with the task.
        let (outcome, replaced) = self.lock().as_is().queue.look(key, wake);
        drop(replaced);
        match outcome {
            WaitOutcome::Waiting => WaitOutcome::Waiting,
            WaitOutcome::Granted(grants) => {
                WaitOutcome::Granted(grants.into_iter().map(|g| self.fresh(g)).collect())
            }
            WaitOutcome::Failed(error) => WaitOutcome::Failed(error),
        }
    }

    /// Whether a waiter still waits. The key stays valid after `false`, until [`CentralPool::look`] or
    /// [`CentralPool::leave`] ends it.
    #[cfg(test)]
    pub(crate) fn waits(&self, key: usize) -> bool {
        self.lock().queue.waits(key)
    }

    /// Ends a wait early. What was granted meanwhile goes back to its runs.
    pub(crate) fn leave(&self, key: usize) {
        if crate::os::forked() {
            return;
        }
        let mut core = self.lock();
        let (outcome, waker) = core.leave(key);
        core.stats.abandoned += u64::from(matches!(outcome, WaitOutcome::Waiting));
        let mut last = None;
        if let WaitOutcome::Granted(grants) = outcome {
            for grant in grants {
                // SAFETY: granted, so out and alive, and no other code has it: the waiter never saw it.
                unsafe { core.put(grant) };
                last = core.came_back(1);
            }
        }
        // The next waiter may be waiting for what this one gives back, or for its place at the head.
        drop(core);
        drop(waker);
        // After the unlock, since it may be the last reference.
        drop(last);
    }

    /// Ends a wait for `len` bytes whose time is over, after a last look that is not bound to the request's window: what
    /// got free beside it may have made a longer range of it. `since` is when the request began.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub(crate) fn give_up(&self, key: usize, len: usize, since: Instant) -> Result<Vec<Fresh>> {
        let late = |shortage: Shortage| {
            let (time, shortage) = (since.elapsed(), Some(Box::new(shortage)));
            Error::Timeout(Waited { time, transfer: None, shortage })
        };
        let mut core = self.lock();
        if core.queue.waits(key) {
            core.window(key).into_iter().for_each(|id| core.displace_window(id));
            core.grant(key);
        }
        let (outcome, waker) = core.leave(key);
        let said = match outcome {
            WaitOutcome::Granted(grants) => Ok(grants),
            WaitOutcome::Failed(error) => Err(error),
            WaitOutcome::Waiting => {
                core.stats.timeouts += 1;
                Err(late(core.shortage(len)))
            }
        };
        drop(core);
        drop(waker);
        said.map(|grants| grants.into_iter().map(|grant| self.fresh(grant)).collect())
    }

    /// Waits on this thread until the waiter is served. `since` is when the request began, and `len` its
    /// bytes, for the error.
    ///
    /// # Errors
    /// The error that ended the wait; [`Error::Timeout`] when the deadline has passed.
    pub(crate) fn wait(
        &self,
        key: usize,
        len: usize,
        deadline: Option<Instant>,
        since: Instant,
    ) -> Result<Vec<Fresh>> {
        loop {
            match self.look(key, None) {
                WaitOutcome::Granted(grants) => return Ok(grants),
                WaitOutcome::Failed(error) => return Err(error),
                WaitOutcome::Waiting => {}
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return self.give_up(key, len, since);
            }
            sync::thread::park_until(deadline);
        }
    }

    /// The first request that has waited for `age` and that no earlier call has told of, if it `may` be told of; and whether
    /// any request waits.
    pub(crate) fn long_wait(
        &self,
        now: Instant,
        age: Duration,
        may: impl FnOnce() -> bool,
    ) -> (Option<LongWait>, bool) {
        let mut core = self.lock();
        let (waiting, growth) =
            (core.queue.len(), core.refusal.as_ref().map(|refusal| refusal.error.clone()));
        let long = core.queue.waits_long(now, age, may).map(|(since, wants)| LongWait {
            waited: now.saturating_duration_since(since),
            bytes: sum(wants.iter().map(|w| w.len)),
            buffers: wants.len(),
            waiting,
            growth,
        });
        (long, waiting > 0)
    }

    /// The error for a request that finds nothing and does not wait.
    pub(crate) fn exhausted(&self, len: usize) -> Error {
        let core = self.lock();
        Error::Exhausted(Box::new(core.shortage(len)))
    }

    /// [`Error::Impossible`] if neither segments that may come back nor memory that may still be pinned can serve these
    /// wants.
    pub(super) fn hopeless(&self, core: &Core, wants: &[Want]) -> Option<Error> {
        let total = sum(wants.iter().map(|w| w.placement.bytes()));
        let error = |len| {
            Some(Error::Impossible { len, quarantined: core.quarantined, capacity: self.config.capacity })
        };
        if total > self.config.capacity.saturating_sub(core.quarantined) {
            return error(sum(wants.iter().map(|w| w.len)));
        }
        // A region that is being pinned, or could still be, may serve them, also one in place of regions that get idle.
        if core.growing > 0 || core.room() + core.leaving >= least(wants) || core.movable() >= least(wants) {
            return None;
        }
        core.never(wants).and_then(|w| error(w.len))
    }

    /// Ends the waits that have become impossible.
    pub(super) fn fail_hopeless(&self, core: &mut Core) {
        core.fail(|core, wants| self.hopeless(core, wants));
    }
}

/// A request that has waited for long, how many wait with it, and why growing failed.
#[derive(Debug)]
pub(crate) struct LongWait {
    pub(crate) waited: Duration,
    pub(crate) bytes: usize,
    pub(crate) buffers: usize,
    pub(crate) waiting: usize,
    pub(crate) growth: Option<Error>,
}

impl Core {
    /// The first want that the extents cannot hold, with those of the same placement, even if every segment that is not
    /// quarantined comes back; of several that the extents cannot hold together, the first.
    pub(super) fn never<'a>(&self, wants: &'a [Want]) -> Option<&'a Want> {
        let together = sum(wants.iter().map(|w| w.placement.bytes()));
        if together > self.arena.bytes().total.saturating_sub(self.quarantined) {
            return wants.first();
        }
        let mut alike: Vec<(&Want, usize)> = Vec::new();
        for want in wants {
            match alike.iter_mut().find(|(first, _)| first.placement == want.placement) {
                Some((_, count)) => *count += 1,
                None => alike.push((want, 1)),
            }
        }
        let never = |(want, count): &(&Want, usize)| !self.arena.could_hold(want.placement, *count);
        alike.into_iter().find(never).map(|(want, _)| want)
    }

    /// Grants waiters what can be granted, and ends waits at the head that can never be served.
    pub(super) fn serve(&mut self) {
        let mut not = Vec::new();
        while !self.queue.is_empty() {
            while let Some(key) = self.queue.next(&self.arena, &not) {
                // What was withheld for a waiter that is served may be what others wait for.
                let (ends, size) = (self.window(key).is_some(), self.queue.size(key));
                match self.grant(key) {
                    true if ends => not.clear(),
                    true => {}
                    false => not.push(size),
                }
            }
            let Some(head) = self.queue.head() else { break };
            if self.growing > 0 || self.grow_for_head() {
                break;
            }
            // With nothing out and nothing being pinned, a wait that cannot be served now never can be. (`never` looks
            // at one placement at a time, and does not know whether buffers of several placements fit together.)
            if self.leaving > 0 || self.anything_out() {
                break;
            }
            not.clear();
            // What is withheld is free, too: it serves the head, or is unpinned for a region that does. (Regions that
            // are withheld to be replaced may have come back while others were being pinned.)
            self.windows().into_iter().for_each(|id| self.displace_window(id));
            if self.grant(head) || self.grow_for_head() {
                continue;
            }
            let len = sum(self.queue.wants(head).iter().map(|w| w.len));
            let (quarantined, capacity) = (self.quarantined, self.config.capacity);
            let impossible = Error::Impossible { len, quarantined, capacity };
            let error = self.refused().map_or(impossible, |refusal| refusal.error.clone());
            self.end(head, WaitOutcome::Failed(error));
        }
    }

    /// Whether any segment can still come back, from thread caches included.
    pub(super) fn anything_out(&self) -> bool {
        let bytes = self.arena.bytes();
        bytes.free + bytes.cut + self.quarantined < bytes.total
    }

    /// Ends every wait for which `verdict` has an error. A verdict is about what is asked for, so of requests of one size
    /// the first stands for all.
    pub(super) fn fail(&mut self, verdict: impl Fn(&Self, &[Want]) -> Option<Error>) {
        for first in self.queue.firsts().collect::<Vec<_>>() {
            let (size, mut next) = (self.queue.size(first), Some(first));
            while let Some(key) = next {
                let Some(error) = verdict(self, self.queue.wants(key)) else { break };
                self.end(key, WaitOutcome::Failed(error));
                next = self.queue.first(size);
            }
        }
    }

    /// Ends a wait, and what was withheld for it.
    fn end(&mut self, key: Ticket, outcome: WaitOutcome) {
        if let Some((size, wake)) = self.queue.finish(key, outcome) {
            self.wakes.extend(wake);
            self.pass_on(key, size);
        }
    }

    /// Takes a waiter out of the queue. Returns its outcome, and a wake to be dropped after the lock is released.
    fn leave(&mut self, key: Ticket) -> (WaitOutcome, Option<Wake>) {
        let Some((size, wake)) = self.queue.remove(key) else { return self.queue.look(key, None) };
        self.pass_on(key, size);
        (WaitOutcome::Waiting, wake)
    }

    /// A waiter of this size has left the queue: of several for the same class the next inherits its window.
    fn pass_on(&mut self, key: Ticket, size: Size) {
        let Some(id) = self.window(key) else { return };
        match self.queue.first(size).filter(|_| matches!(size, Size::Class(_))) {
            Some(heir) => {
                let window = &mut self.arena.windows[id];
                (window.owner, window.looks) = (heir, 0);
            }
            None => self.displace_window(id),
        }
    }

    /// Ends a window. An owner that still waits chooses anew.
    pub(super) fn displace_window(&mut self, id: WindowId) {
        self.arena.release_window(id);
        self.note_ended();
    }

    /// Notes that a window ended: a waiter that has none may find one.
    fn note_ended(&mut self) {
        self.windows.none_for = None;
        let unplaced = self.queue.unplaced(1, |key| self.window(key).is_some()).next();
        self.windows.wanted |= unplaced.is_some();
    }

    /// Notes that there may be windows, or needs for them, that there were not.
    pub(super) fn extended(&mut self) {
        self.windows.none_for = None;
        self.windows.wanted |= !self.queue.is_empty();
    }

    /// The windows.
    fn windows(&self) -> Vec<WindowId> {
        self.arena.windows.iter().map(|(id, _)| id).collect()
    }

    /// The window of a waiter.
    fn window(&self, owner: Ticket) -> Option<WindowId> {
        self.arena.windows.iter().find(|(_, window)| window.owner == owner).map(|(id, _)| id)
    }

    /// The waiters that have a window, in their order.
    fn owners(&self) -> Vec<Ticket> {
        let mut owners: Vec<Ticket> = self.arena.windows.iter().map(|(_, window)| window.owner).collect();
        owners.sort_unstable();
        owners
    }

    // --- granting ----------------------------------------------------------------------------------------------------

    /// Serves a waiter from what is free outside of windows. `false`: that is not enough.
    fn grant(&mut self, key: Ticket) -> bool {
        let Some(grants) = take_all(&mut self.arena, self.queue.wants(key)) else { return false };
        let grants = grants.into_iter().map(|grant| self.took(grant.descriptor, grant.len)).collect();
        self.end(key, WaitOutcome::Granted(grants));
        true
    }

    /// Gives a segment that came back to the oldest waiter of its class, unless it lies in another's window. `false`: it
    /// is still the caller's.
    ///
    /// # Safety
    /// The descriptor is of this class, alive, free, in no list, and owned by the caller.
    pub(super) unsafe fn hand_over(&mut self, descriptor: NonNull<Descriptor>, class: Class) -> bool {
        let Some(key) = self.queue.first(Size::Class(class)) else { return false };
        // SAFETY: this function's contract.
        let lies_in = unsafe { self.arena.window_of(descriptor) };
        if lies_in.is_some() && lies_in != self.window(key) {
            return false;
        }
        let len = self.queue.wants(key)[0].len;
        let grant = self.took(descriptor, len);
        self.end(key, WaitOutcome::Granted(vec![grant]));
        true
    }

    /// A segment came back to a window: serves its owner if that is enough, or has the regions replaced.
    pub(super) fn came(&mut self, id: WindowId) {
        let Some(&Window { owner, replaces, out, .. }) = self.arena.windows.get(id) else { return };
        if replaces && out == 0 && self.growing == 0 {
            self.displace_window(id);
            let wants = self.queue.wants(owner).to_vec();
            if let Some(growth) = self.plan(&wants, true) {
                self.queue.note_replaced(owner);
                self.wakes.push(Wake::Grow(self.me.clone(), growth));
            }
        } else if !replaces {
            let wants = self.queue.wants(owner);
            let several = || sum(wants.iter().map(|w| w.placement.bytes())) <= self.arena.bytes().free;
            if out == 0 || wants.len() > 1 && several() {
                self.grant_withheld(id);
            }
        }
    }

    /// Serves the owner of a window from the window and from what is free outside of windows, together. `false`: that is
    /// not enough.
    fn grant_withheld(&mut self, id: WindowId) -> bool {
        let window = self.arena.release_window(id);
        let granted = self.grant(window.owner);
        if granted {
            self.note_ended();
        } else {
            self.arena.withhold(window);
        }
        granted
    }

    // --- windows -----------------------------------------------------------------------------------------------------

    /// Why a class must be closed.
    fn closes(&self, class: Class) -> u64 {
        let awaited = if self.queue.awaited(class) > 0 { AWAITED } else { 0 };
        awaited | if self.arena.watched(class) > 0 { WATCHED } else { 0 }
    }

    /// Serves what a new request would be served with, and ends the windows to which nothing came back for long.
    fn look(&mut self) {
        // Returns do not look for what got free beside a window and makes a longer range of it.
        while self.windows().into_iter().any(|id| self.grant_withheld(id)) {
            self.serve();
        }
        for id in self.windows() {
            let window = &mut self.arena.windows[id];
            window.looks += 1;
            let Some(waiter) = self.queue.waiting.get_mut(&window.owner).filter(|_| !window.replaces) else {
                continue;
            };
            if window.looks > 1 << waiter.moves.min(20) {
                waiter.moves += 1;
                waiter.given_up.extend(self.arena.release_window(id).ranges);
                self.note_ended();
            }
        }
    }

    /// Chooses windows for the waiters that may have one. Nothing is cached.
    fn choose(&mut self) {
        // Regions that got free while others were being pinned.
        self.windows().into_iter().for_each(|id| self.came(id));
        let mut unplaced: Vec<_> =
            self.queue.unplaced(MOST_WINDOWS, |key| self.window(key).is_some()).collect();
        unplaced.sort_unstable();
        for key in unplaced {
            let windows = self.arena.windows.iter();
            let left = MOST_RANGES - windows.map(|(_, window)| window.ranges.len()).sum::<usize>();
            if left == 0 || self.arena.windows.len() >= MOST_WINDOWS {
                break;
            }
            let to_replace = self.ranges_to_replace(key, left);
            let replaces = to_replace.is_some();
            let Some(ranges) = to_replace.or_else(|| self.ranges_of(key, left)) else { continue };
            let id = self.arena.withhold(Window::new(key, ranges, replaces));
            self.came(id);
        }
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

    /// A range for these wants, or, where none is as long as all of them, ranges for parts of them: `most` at most. None
    /// meets one of those to `avoid`. `None`: there are not as many ranges.
    fn ranges_for(&mut self, wants: &[Want], avoid: &[PageRange], most: usize) -> Option<Vec<PageRange>> {
        let (need, align) = window_pages(wants);
        let none_for = self.windows.none_for;
        if most > 0 && none_for.is_none_or(|none| need < none) {
            if let Some(range) = self.arena.choose_window(need, align, avoid) {
                return Some(vec![range]);
            }
            if avoid.is_empty() {
                // Where so many pages were in one piece, the aligned ones would be among them.
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

    /// Whole regions that are to be withheld for a waiter, in whose place one can be pinned that serves it: the present
    /// ones never can.
    fn ranges_to_replace(&self, key: usize, most: usize) -> Option<Vec<PageRange>> {
        let wants = self.queue.wants(key);
        let may = self.config.step > 0 && self.growing == 0 && self.leaving == 0 && self.refused().is_none();
        if !may || self.queue.replaced(key) || self.never(wants).is_none() {
            return None;
        }
        let missing = least(wants).checked_sub(self.room_beside()).filter(|missing| *missing > 0)?;
        self.arena.replaceable(missing, most)
    }

    /// Bytes that could be pinned now for a request that has no windows: without those that are to be pinned in place of
    /// regions that are withheld, together with the bytes of these regions.
    pub(super) fn room_beside(&self) -> usize {
        let room = self.room();
        if room == 0 {
            return room;
        }
        let replacing = self.arena.windows.iter().filter(|(_, window)| window.replaces);
        let missing =
            replacing.map(|(_, window)| least(self.queue.wants(window.owner)).saturating_sub(window.bytes()));
        room.saturating_sub(sum(missing))
    }

    /// Plans the next look at the windows.
    fn plan_look(&mut self) {
        if !self.windows.planned {
            self.windows.planned = true;
            self.wakes.push(Wake::Look(self.me.clone()));
        }
    }

    /// What there is for a request of `len` bytes that is not served.
    pub(super) fn shortage(&self, len: usize) -> Shortage {
        let bytes = self.arena.bytes();
        Shortage {
            requested: len,
            free: bytes.free,
            largest: bytes.largest_free,
            withheld: bytes.withheld,
            withheld_for: self.withheld_for(),
            capacity: self.config.capacity,
            waiting: self.queue.len(),
            growth: self.refusal.as_ref().map(|refusal| Box::new(refusal.error.clone())),
            ..Shortage::default()
        }
    }

    /// The bytes that the largest request asks for that has a window.
    pub(super) fn withheld_for(&self) -> usize {
        let asked = |key: usize| sum(self.queue.wants(key).iter().map(|w| w.len));
        self.owners().into_iter().map(asked).max().unwrap_or(0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

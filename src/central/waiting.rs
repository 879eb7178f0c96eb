//! Waiting for memory: joining and leaving the queue, serving it, windows and fences, and ending waits that nothing can
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
//! that make a longer range of it. So as long as a request waits, the timer
//! looks at the queue after pauses that double, up to [`MOST_PATIENCE`], and takes all of these.
//!
//! # Fences
//!
//! A return into a thread cache looks at no segment, so it cannot know of windows. Therefore the classes to which a
//! waiter may have a right are *fenced*: those that are waited for, and those of which segments are given out inside a
//! window. In each thread cache the limit up to which a hit may return a segment of a fenced class is 0. Such a return
//! takes the slow path. There it looks at the fence, inside of the gate: if the class is waited for, or the segment's
//! address lies in a window, the segment goes to the lock. Else it goes into the thread cache after all. Checkouts are
//! not fenced, since nothing is cached that a waiter has a right to.
//!
//! A fence is raised while the owners are shut out of their caches and everything that was cached is in its runs. It is
//! lifted by a store: each owner lifts its own limit when it next comes by. So a waiter costs other threads one miss for
//! each class when it comes, and the returns of fenced classes a few nanoseconds.
//!
//! # Windows that do not empty
//!
//! A window to which nothing came back for a while is exchanged for another, if there is one: some thread may keep a
//! buffer in it for ever. So are the windows of a request that has several. Each further exchange for the same request takes twice as long, so that at last a window stays
//! for longer than any buffer in it is kept.
//!
//! A request that no present region can serve waits for regions to be replaced: then whole regions are withheld for it,
//! until all of them are free.
//!
//! While memory for all waiters is being pinned, nothing is fenced and no window is chosen.

use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::growth::{growth_failure, least};
use super::queue::{Size, serves_all, take_all, window_pages};
use super::{CentralPool, Core, Fresh, WaitOutcome, Wake, Want, mode, sum};
use crate::arena::{PageRange, WindowId};
use crate::error::{Error, Result, Shortage, Waited};
use crate::foreign::Task;
use crate::freelist::{LISTS, list_of, listed};
use crate::segment::{Class, Placement};
use crate::sync::{self, AtomicU32, AtomicU64, Ordering};

/// The most windows at the same time. Later waiters have none until one ends.
pub(super) const MOST_WINDOWS: usize = if cfg!(loom) { 2 } else { 32 };
/// The most waiters that are served before the lock is given up for a moment.
const TURNS: usize = if cfg!(loom) { 2 } else { 64 };
/// The time after which windows are first looked at again, and the longest.
const PATIENCE: Duration = Duration::from_millis(50);
const MOST_PATIENCE: Duration = Duration::from_secs(1);
/// Without a clock, windows are looked at again after so many calls on the slow path.
const TICKS: u32 = 64;

/// Bits of a class's fence: requests wait for the class; segments of it are given out in windows.
const AWAITED: u32 = 1;
const WATCHED: u32 = 2;

/// What returns look at. The words are written under the central pool's lock; they are read inside of the gate, where
/// no bit is set meanwhile: the cold side sets bits while all owners are shut out. So all accesses are relaxed, and the
/// gate's permits order them.
#[derive(Debug)]
pub(super) struct Fence {
    classes: [AtomicU32; LISTS],
    /// The addresses of each window: the first, and that behind the last.
    windows: [[AtomicU64; 2]; MOST_WINDOWS],
}

impl Fence {
    pub(super) fn new() -> Self {
        Self {
            classes: std::array::from_fn(|_| AtomicU32::new(0)),
            windows: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
        }
    }

    fn class(&self, class: Class) -> u32 {
        self.classes.get(list_of(class)).map_or(0, |bits| bits.load(Ordering::Relaxed))
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn set(&self, class: Class, bits: u32) {
        self.classes[list_of(class)].store(bits, Ordering::Relaxed);
    }

    fn holds(&self, address: usize) -> bool {
        let address = address as u64;
        let mut windows = self.windows.iter().map(|w| [&w[0], &w[1]].map(|at| at.load(Ordering::Relaxed)));
        windows.any(|[first, end]| first <= address && address < end)
    }

    /// Whether a waiter may have a right to a segment. The last byte tells: a segment that crosses the first edge of a
    /// window lies in it, and none crosses the other.
    fn meets(&self, class: Class, base: NonNull<u8>) -> bool {
        let bits = self.class(class);
        bits & AWAITED != 0 || bits & WATCHED != 0 && self.holds(base.as_ptr().addr() + class.stride() - 1)
    }
}

/// Windows and fences, as far as the queue does not say it.
#[derive(Debug)]
pub(super) struct Windows {
    /// The classes that are fenced.
    fenced: Vec<Class>,
    /// A search for so many pages has found no window since the last one ended.
    none_for: Option<usize>,
    /// A waiter may find a window, or needs a fence.
    wanted: bool,
    /// A window ended: what was free in it may serve others.
    ended: bool,
    /// A waiter came for which no memory was being pinned.
    uncovered: bool,
    /// When windows are looked at next, and whether that is planned.
    patience: Duration,
    planned: bool,
    ticks: u32,
    /// How many segments were out of each window when it was looked at last, and for how many looks, by the window's
    /// number.
    seen: [(u32, u32); MOST_WINDOWS],
}

impl Default for Windows {
    fn default() -> Self {
        Self {
            fenced: Vec::new(),
            none_for: None,
            wanted: false,
            ended: false,
            uncovered: false,
            patience: PATIENCE,
            planned: false,
            ticks: 0,
            seen: [(0, 0); MOST_WINDOWS],
        }
    }
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
        let class = match &wants[..] {
            [Want { placement: Placement::Class(class), .. }] => Some(*class),
            _ => None,
        };
        let key = core.queue.join(wants, wake);
        core.arena.set_eager(true);
        core.windows.uncovered |= !covered || core.growing == 0;
        core.windows.wanted |= match class {
            Some(class) => core.queue.awaited(class) == 1,
            None => {
                let none = !several && core.windows.none_for.is_some_and(|none| need >= none);
                core.arena.window_count() < MOST_WINDOWS && !none
            }
        };
        // What came back since the request was tried, or was kept for a class, is for those first that have waited longer.
        core.serve();
        if !core.pending && core.queue.waits(key) && core.queue.is_first(key) {
            core.grant(key);
        }
        drop(core);
        Ok(key)
    }

    /// Whether a waiter may have a right to a segment that comes back. Exact inside of the gate.
    pub(super) fn fences(&self, class: Class, base: NonNull<u8>) -> bool {
        self.fence.meets(class, base)
    }

    /// Whether returns of the class need not take the slow path. Exact inside of the gate.
    pub(super) fn unfenced(&self, class: Class) -> bool {
        self.fence.class(class) == 0
    }

    /// Whether a segment that is in flight may be lent again: no waiter has a right to it when it comes back. (A waiter
    /// that comes at this moment finds it lent.)
    pub(crate) fn may_claim(&self, class: Class, base: NonNull<u8>) -> bool {
        !self.fence.meets(class, base)
    }

    /// Serves the queue, and chooses windows, after a change. Returns the wakes that follow.
    pub(super) fn turn(&self, core: &mut Core) -> Vec<Wake> {
        loop {
            core.windows.ended = false;
            core.serve();
            self.settle(core);
            if core.pending || !core.windows.ended {
                // At the end: what is due from here on is due for the next call.
                if let Some(pause) = core.pause_of_growth() {
                    core.wakes.push(Wake::Retry(core.me.clone(), pause));
                }
                return std::mem::take(&mut core.wakes);
            }
        }
    }

    /// Lifts fences, raises others, and chooses windows, as the queue needs it.
    fn settle(&self, core: &mut Core) {
        if core.queue.is_empty() {
            core.arena.set_eager(false);
            core.windows.patience = PATIENCE;
            (core.windows.uncovered, core.windows.wanted, core.windows.none_for) = (false, false, None);
            return self.lift(core);
        }
        if core.pending || core.growing > 0 && !core.windows.uncovered {
            return;
        }
        if core.windows.wanted {
            self.arrange(core, &[]);
        } else {
            self.lift(core);
        }
        if !core.timeless {
            core.plan_look();
        } else {
            core.windows.ticks += 1;
            if core.windows.ticks >= TICKS {
                core.windows.ticks = 0;
                self.choose_again(core);
            }
        }
    }

    /// Chooses windows for the waiters that have none, and other windows for those in `again`; fences what returns must
    /// look at.
    fn arrange(&self, core: &mut Core, again: &[usize]) {
        self.gate.quiesce(mode::INSPECT, &core.table);
        self.reclaim_quiet(core);
        core.windows.wanted = false;
        core.serve();
        if core.pending {
            core.windows.wanted = true;
        } else {
            core.exchange(again);
            core.choose();
        }
        for class in listed() {
            let bits = core.fence_of(class);
            if bits == 0 {
                continue;
            }
            core.table.quiet().for_each(|mut held| held.fence(class));
            self.fence.classes[list_of(class)].store(bits, Ordering::Relaxed);
            if !core.windows.fenced.contains(&class) {
                core.windows.fenced.push(class);
            }
        }
        for (id, [first, end]) in self.fence.windows.iter().enumerate() {
            let addresses = core.arena.window_addresses(id).unwrap_or_default();
            first.store(addresses.0 as u64, Ordering::Relaxed);
            end.store(addresses.1 as u64, Ordering::Relaxed);
        }
        self.gate.readmit(mode::INSPECT, &core.table);
        // Fences that are not needed any more.
        self.lift(core);
    }

    /// Lifts the fences that are not needed any more.
    pub(super) fn lift(&self, core: &mut Core) {
        let mut fenced = std::mem::take(&mut core.windows.fenced);
        fenced.retain(|class| {
            let bits = core.fence_of(*class);
            self.fence.classes[list_of(*class)].store(bits, Ordering::Relaxed);
            bits != 0
        });
        core.windows.fenced = fenced;
    }

    /// Checks what the fences and the queue promise. `cached` tells whether segments of a class are cached.
    pub(super) fn check_fences(
        &self,
        core: &Core,
        cached: impl Fn(Class) -> bool,
    ) -> std::result::Result<(), String> {
        if core.pending {
            return Ok(());
        }
        let mut at = None;
        while let Some((key, size, _)) = core.queue.after(at) {
            let wants = core.queue.wants(key);
            if serves_all(&core.arena, wants) {
                return Err(format!("a request waits that what is free can serve: {wants:?}"));
            }
            at = Some((size, u64::MAX));
        }
        if core.growing > 0 && !core.windows.uncovered {
            return Ok(());
        }
        for class in listed() {
            let (bits, needed) = (self.fence.class(class), core.fence_of(class));
            if needed & !bits != 0 {
                return Err(format!("{class:?} is fenced as {bits}, and {needed} is needed"));
            }
            if needed & AWAITED != 0 && cached(class) {
                return Err(format!("segments of {class:?} are cached, and a request waits for one"));
            }
        }
        for (id, words) in self.fence.windows.iter().enumerate() {
            let seen = [&words[0], &words[1]].map(|at| at.load(Ordering::Relaxed) as usize);
            if core.arena.window_addresses(id).is_some_and(|(first, end)| seen != [first, end]) {
                return Err(format!("window {id} is at {seen:x?} for returns, and elsewhere"));
            }
        }
        Ok(())
    }

    /// Looks at the windows again after a time.
    pub(super) fn choose_later(central: std::sync::Weak<Self>, after: Duration) {
        if cfg!(loom) {
            return;
        }
        crate::timer::after(after, move || {
            let Some(central) = central.upgrade() else { return };
            let mut core = central.lock();
            core.windows.planned = false;
            central.choose_again(&mut core);
        });
    }

    /// Serves what a new request would be served with, and exchanges the windows that gave nothing back since the last look
    /// for others.
    fn choose_again(&self, core: &mut Core) {
        // Returns look neither for what is cached nor for what got free beside a window and makes a longer range of it.
        self.reclaim_all(core);
        core.serve();
        while !core.pending && core.grant_any_withheld() {
            core.serve();
        }
        let mut again = Vec::new();
        for key in core.queue.owners() {
            let windows = core.queue.windows(key);
            let out = windows.iter().map(|window| core.arena.out_of(*window)).sum();
            let seen = &mut core.windows.seen[windows[0].index()];
            *seen = if seen.0 == out { (out, seen.1 + 1) } else { (out, 0) };
            if seen.1 >= 1 << core.queue.moves(key).min(20) && !core.queue.replaces(key) {
                again.push(key);
            }
        }
        core.windows.patience = (core.windows.patience * 2).min(MOST_PATIENCE);
        if !again.is_empty() {
            self.arrange(core, &again);
        }
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
        let (outcome, replaced) = self.lock().queue.look(key, wake);
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
        let mut ended = Vec::new();
        // The waker is dropped after the unlock, as in `look`.
        let (outcome, waker) = core.queue.leave(key, &mut ended);
        core.release(&ended);
        core.stats.abandoned += u64::from(matches!(outcome, WaitOutcome::Waiting));
        let mut last = false;
        if let WaitOutcome::Granted(grants) = outcome {
            for grant in grants {
                // SAFETY: granted, so out and alive, and no other code has it: the waiter never saw it.
                unsafe { core.put(grant) };
                last |= core.came_back(1);
            }
        }
        // The next waiter may be waiting for what this one gives back, or for its place at the head.
        drop(core);
        drop(waker);
        if last {
            // SAFETY: this drops the outstanding reference, once: the last segment is back. The caller holds a count of
            // its own.
            unsafe { Arc::decrement_strong_count(self.me.as_ptr()) };
        }
    }

    /// Ends a wait for `len` bytes whose time is over, after a last look that is not bound to the request's window: what
    /// got free beside it may have made a longer range of it. `since` is when the request began.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub(crate) fn give_up(&self, key: usize, len: usize, since: Instant) -> Result<Vec<Fresh>> {
        let late = |shortage| Error::Timeout(Waited::for_memory(since.elapsed(), shortage));
        if crate::os::forked() {
            return Err(late(Shortage { requested: len, ..Shortage::default() }));
        }
        let mut core = self.lock();
        let mut ended = Vec::new();
        if core.queue.keeps_waiting(key) {
            core.displace(key);
            core.grant(key);
        }
        let (outcome, waker) = core.queue.leave(key, &mut ended);
        core.release(&ended);
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
        let (waiting, growth) = (core.queue.len(), core.retry.why.clone());
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
        let shortage = Box::new(core.shortage(len));
        drop(core);
        let growth = shortage.growth.clone();
        Error::Exhausted { len, capacity: self.config.capacity, growth, shortage: Some(shortage) }
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
    /// The first want that cannot be served together with the others of the same placement, even if every segment that
    /// is not quarantined comes back.
    pub(super) fn never<'a>(&self, wants: &'a [Want]) -> Option<&'a Want> {
        let mut alike: Vec<(&Want, usize)> = Vec::new();
        for want in wants {
            match alike.iter_mut().find(|(other, _)| other.placement == want.placement) {
                Some((_, count)) => *count += 1,
                None => alike.push((want, 1)),
            }
        }
        let never = |(want, count): &(&Want, usize)| !self.arena.could_serve(want.placement, *count);
        alike.into_iter().find(never).map(|(want, _)| want)
    }

    /// Grants waiters what can be granted, and ends waits at the head that can never be served. Does not serve more than [`TURNS`] waiters: then `pending` is set.
    pub(super) fn serve(&mut self) {
        self.pending = false;
        let (mut not, mut turns) = (Vec::new(), TURNS);
        if !self.queue.is_empty() {
            // What lies behind the last used segments of runs is free, too.
            self.arena.shorten_runs();
        }
        while !self.queue.is_empty() {
            while let Some((key, size)) = self.queue.next(&self.arena, &not) {
                if turns == 0 {
                    self.pending = true;
                    return;
                }
                turns -= 1;
                // What was withheld for a waiter that is served may be what others wait for.
                let ends = !self.queue.windows(key).is_empty();
                match self.grant(key) {
                    true if ends => not.clear(),
                    true => {}
                    false => not.push(size),
                }
            }
            if self.grant_together() {
                not.clear();
                continue;
            }
            let Some(head) = self.queue.head_key() else { break };
            if self.growing > 0 || self.grow_for_head() {
                break;
            }
            // With nothing out and nothing being pinned, a wait that cannot be served now never can be. (`never` looks
            // at one placement at a time, and does not know whether buffers of several placements fit together.)
            if self.leaving > 0 || self.anything_out() {
                break;
            }
            not.clear();
            if self.grant_withheld(head) {
                continue;
            }
            // What is withheld is free, too: it serves the head, or is unpinned for a region that does. (Regions that
            // are withheld to be replaced may have come back while others were being pinned.)
            self.queue.owners().into_iter().for_each(|owner| self.displace(owner));
            if self.grant(head) {
                continue;
            }
            if self.grow_for_head() {
                break;
            }
            let len = sum(self.queue.wants(head).iter().map(|w| w.len));
            let (quarantined, capacity) = (self.quarantined, self.capacity);
            let impossible = Error::Impossible { len, quarantined, capacity };
            let error = self.growth_failure.clone().unwrap_or(impossible);
            self.end(head, WaitOutcome::Failed(error));
        }
    }

    /// Whether any segment can still come back, from thread caches included.
    pub(super) fn anything_out(&self) -> bool {
        let bytes = self.arena.bytes();
        bytes.free + bytes.cut + self.quarantined < bytes.total
    }

    /// Ends every wait for which `verdict` has an error. A verdict is about what is asked for, so of requests of one size
    /// for a single buffer the first stands for all.
    pub(super) fn fail(&mut self, verdict: impl Fn(&Self, &[Want]) -> Option<Error>) {
        let mut at = None;
        while let Some((key, size, number)) = self.queue.after(at) {
            if let Some(error) = verdict(self, self.queue.wants(key)) {
                self.end(key, WaitOutcome::Failed(error));
            } else if self.queue.wants(key).len() == 1 {
                at = Some((size, u64::MAX));
                continue;
            }
            at = Some((size, number));
        }
    }

    /// Ends a wait, and what was withheld for it.
    fn end(&mut self, key: usize, outcome: WaitOutcome) {
        let mut ended = Vec::new();
        self.queue.finish(key, outcome, &mut ended, &mut self.wakes);
        self.release(&ended);
        // The next waiter of the class may have no window.
        let room = self.arena.window_count() < MOST_WINDOWS && self.windows.none_for.is_none();
        self.windows.wanted |= room && self.queue.any_unplaced();
    }

    /// Ends windows.
    pub(super) fn release(&mut self, windows: &[WindowId]) {
        for window in windows {
            self.windows.seen[window.index()] = (0, 0);
            self.arena.release_window(*window);
        }
        if !windows.is_empty() {
            self.windows.ended = true;
            self.windows.none_for = None;
            self.windows.wanted |= self.queue.any_unplaced();
        }
    }

    /// Notes that there may be windows, or needs for them, that there were not.
    pub(super) fn extended(&mut self) {
        self.windows.none_for = None;
        self.windows.wanted |= !self.queue.is_empty();
    }

    /// Ends what is withheld for a waiter, which chooses anew.
    pub(super) fn displace(&mut self, key: usize) {
        let windows = self.queue.displace(key);
        self.release(&windows);
    }

    // --- granting ----------------------------------------------------------------------------------------------------

    /// Serves a waiter from what is free outside of windows. `false`: that is not enough.
    fn grant(&mut self, key: usize) -> bool {
        let Some(grants) = take_all(&mut self.arena, self.queue.wants(key)) else { return false };
        let grants = grants.into_iter().map(|grant| self.took(grant.descriptor, grant.len)).collect();
        self.end(key, WaitOutcome::Granted(grants));
        true
    }

    /// What got free outside of windows may serve a request for several buffers together with what is withheld for it: the
    /// first such request. (All others are tried when windows are looked at again.)
    fn grant_together(&mut self) -> bool {
        if !std::mem::take(&mut self.arena.gained) || self.arena.window_count() == 0 {
            return false;
        }
        let several = |key: &usize| self.queue.wants(*key).len() > 1 && !self.queue.replaces(*key);
        let Some(key) = self.queue.owners().into_iter().find(several) else { return false };
        let bytes = sum(self.queue.wants(key).iter().map(|w| w.placement.bytes()));
        let granted = bytes <= self.arena.bytes().free && self.grant_withheld(key);
        self.arena.gained = granted;
        granted
    }

    /// Serves one waiter from what is withheld for it and what is free outside of windows together.
    fn grant_any_withheld(&mut self) -> bool {
        self.queue.owners().into_iter().any(|key| !self.queue.replaces(key) && self.grant_withheld(key))
    }

    /// A segment of a class (`None`: one that had a run of its own) came back to a window: serves the waiter if that is
    /// enough.
    pub(super) fn came(&mut self, window: WindowId, class: Option<Class>) {
        let key = self.queue.owner(window);
        if self.queue.replaces(key) {
            return self.replace(key);
        }
        let enough = match self.queue.wants(key) {
            [Want { placement: Placement::Class(wanted), .. }] => class == Some(*wanted),
            [_] => false,
            several => sum(several.iter().map(|w| w.placement.bytes())) <= self.arena.bytes().free,
        };
        if enough || self.arena.is_complete(window) {
            self.grant_withheld(key);
        }
    }

    /// Serves a waiter from what is withheld for it. `false`: that is not enough. Of several waiters for the same class
    /// the next inherits the window.
    fn grant_withheld(&mut self, mut key: usize) -> bool {
        let ids = self.queue.windows(key).to_vec();
        if ids.is_empty() {
            return false;
        }
        let (shape, wanted) = (window_pages(self.queue.wants(key)), self.windows.wanted);
        let ranges: Vec<_> = ids.iter().map(|id| self.arena.range(*id)).collect();
        let before = self.arena.free_pages_outside();
        ids.iter().for_each(|id| self.arena.release_window(*id));
        let _ = self.queue.displace(key);
        let mut any = false;
        let heir = loop {
            let size = self.queue.size(key);
            if !self.grant(key) {
                break Some(key);
            }
            any = true;
            match (size, self.queue.first_key(size)) {
                (Size::Class(_), Some(next)) => key = next,
                _ => break None,
            }
        };
        // In the reverse order, so that each range has the number that it had: returns look them up by it.
        self.arena.release_idle();
        match heir {
            Some(heir) if ranges.iter().all(|range| self.arena.can_withhold(*range)) => {
                let (need, align) = if ids.len() == 1 { shape } else { (usize::MAX, 1) };
                let mut again: Vec<_> =
                    ranges.iter().rev().map(|range| self.arena.withhold(*range, need, align)).collect();
                again.reverse();
                debug_assert_eq!(again, ids);
                self.queue.place(heir, again);
                // All have what they had, so nothing is to be chosen. But a run that the window had divided may have
                // become shorter.
                self.windows.wanted = wanted;
                self.windows.ended |= self.arena.free_pages_outside() > before;
            }
            _ => {
                ids.iter().for_each(|id| self.windows.seen[id.index()] = (0, 0));
                self.windows.ended = true;
                self.windows.none_for = None;
                self.windows.wanted |= self.queue.any_unplaced();
            }
        }
        any
    }

    // --- windows -----------------------------------------------------------------------------------------------------

    /// The fence that a class needs.
    fn fence_of(&self, class: Class) -> u32 {
        let awaited = if self.queue.awaited(class) > 0 { AWAITED } else { 0 };
        awaited | if self.arena.watched(class) > 0 { WATCHED } else { 0 }
    }

    /// Chooses windows for the waiters that may have one. Nothing is cached.
    fn choose(&mut self) {
        for key in self.queue.owners() {
            // Regions that got free while others were being pinned.
            if self.queue.replaces(key) {
                self.replace(key);
            }
        }
        for key in self.queue.unplaced(MOST_WINDOWS) {
            let left = MOST_WINDOWS - self.arena.window_count();
            if left == 0 {
                break;
            }
            if !self.queue.keeps_waiting(key) || !self.queue.windows(key).is_empty() {
                continue;
            }
            let wants = self.queue.wants(key).to_vec();
            if let Some(ranges) = self.ranges_to_replace(key, left) {
                let windows = ranges.iter().map(|range| self.arena.withhold(*range, usize::MAX, 1)).collect();
                self.queue.place(key, windows);
                self.queue.set_replaces(key);
                self.replace(key);
                continue;
            }
            let Some(windows) = self.withhold_for(&wants, left) else { continue };
            let complete = windows.iter().any(|window| self.arena.is_complete(*window));
            self.queue.place(key, windows);
            if wants.len() > 1 || complete {
                self.grant_withheld(key);
            }
        }
    }

    /// Withholds a range for these wants, or, where none is as long as all of them, ranges for parts of them: `most` windows
    /// at most. `None`: there are not as many ranges.
    fn withhold_for(&mut self, wants: &[Want], most: usize) -> Option<Vec<WindowId>> {
        let (need, align) = window_pages(wants);
        let none_for = self.windows.none_for;
        if most > 0 && none_for.is_none_or(|none| need < none) {
            if let Some(range) = self.arena.choose_window(need, align) {
                return Some(vec![self.arena.withhold(range, need, align)]);
            }
            // Where so many pages were in one piece, the aligned ones would be among them.
            let all = need.saturating_add(align - 1);
            self.windows.none_for = Some(none_for.map_or(all, |none| none.min(all)));
        }
        let (first, second) = wants.split_at(wants.len() / 2);
        if first.is_empty() {
            return None;
        }
        let mut windows = self.withhold_for(first, most)?;
        // What is found out beside these windows holds no longer than they.
        let none_for = self.windows.none_for;
        match self.withhold_for(second, most - windows.len()) {
            Some(more) => windows.extend(more),
            None => {
                windows.iter().for_each(|window| self.arena.release_window(*window));
                self.windows.none_for = none_for;
                return None;
            }
        }
        Some(windows)
    }

    /// Whole regions that are to be withheld for a waiter, in whose place one can be pinned that serves it: the present
    /// ones never can.
    fn ranges_to_replace(&self, key: usize, most: usize) -> Option<Vec<PageRange>> {
        let wants = self.queue.wants(key);
        let may = self.step > 0 && self.growing == 0 && self.leaving == 0 && self.growth_failure.is_none();
        if !may || !self.queue.may_replace(key) || self.never(wants).is_none() {
            return None;
        }
        let missing = least(wants).checked_sub(self.room_beside()).filter(|missing| *missing > 0)?;
        self.arena.replaceable(missing, most)
    }

    /// Bytes that could be pinned now for a request that has no windows: without those that are to be pinned in place of
    /// regions that are withheld, together with the bytes of these regions.
    pub(super) fn room_beside(&self) -> usize {
        let room = self.room();
        if room == 0 || self.arena.window_count() == 0 {
            return room;
        }
        let owners = self.queue.owners().into_iter().filter(|key| self.queue.replaces(*key));
        let missing = owners.map(|key| {
            let withheld = sum(self.queue.windows(key).iter().map(|id| self.arena.bytes_of(*id)));
            least(self.queue.wants(key)).saturating_sub(withheld)
        });
        room.saturating_sub(sum(missing))
    }

    /// Has the regions replaced that are withheld for a waiter, if all of them are free.
    fn replace(&mut self, key: usize) {
        if self.growing > 0 || self.queue.windows(key).iter().any(|id| self.arena.out_of(*id) > 0) {
            return;
        }
        self.displace(key);
        let wants = self.queue.wants(key).to_vec();
        if let Some(growth) = self.plan(&wants, true) {
            self.queue.note_replaced(key);
            self.wakes.push(Wake::Grow(self.me.clone(), growth));
        }
    }

    /// Exchanges the windows of waiters, where there are others. Nothing is cached.
    fn exchange(&mut self, keys: &[usize]) {
        for key in keys {
            if !self.queue.keeps_waiting(*key) || self.queue.windows(*key).is_empty() {
                continue;
            }
            let wants = self.queue.wants(*key).to_vec();
            let ((need, align), before) = (window_pages(&wants), self.windows.none_for);
            // The others are chosen beside the present ones. But a single one is withheld after the present one has
            // ended, so that there is room for it among the windows; what this frees is beside the new range.
            let others = if let Some(range) = self.arena.choose_window(need, align) {
                self.displace(*key);
                self.arena.release_idle();
                vec![self.arena.withhold(range, need, align)]
            } else {
                let Some(others) = self.withhold_for(&wants, MOST_WINDOWS - self.arena.window_count()) else {
                    self.windows.none_for = before;
                    continue;
                };
                self.displace(*key);
                others
            };
            self.queue.moved(*key);
            self.queue.place(*key, others);
        }
    }

    /// Plans the next look at the windows.
    fn plan_look(&mut self) {
        if !self.windows.planned {
            self.windows.planned = true;
            self.wakes.push(Wake::Choose(self.me.clone(), self.windows.patience));
        }
    }

    /// What there is for a request of `len` bytes that is not served.
    fn shortage(&self, len: usize) -> Shortage {
        let bytes = self.arena.bytes();
        Shortage {
            requested: len,
            free: bytes.free,
            largest: bytes.largest_free,
            withheld: bytes.withheld,
            withheld_for: self.withheld_for(),
            capacity: self.capacity,
            waiting: self.queue.len(),
            growth: self.retry.why.clone().map(Box::new),
            ..Shortage::default()
        }
    }

    /// The bytes that the largest request asks for that has a window.
    pub(super) fn withheld_for(&self) -> usize {
        let asked = |key: usize| sum(self.queue.wants(key).iter().map(|w| w.len));
        self.queue.owners().into_iter().map(asked).max().unwrap_or(0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

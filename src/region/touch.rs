//! Touching: having the system provide the pages of a region, on several threads, ahead of their registration.
//!
//! Providing pages is what takes the time when memory is pinned, since the system zeroes each of them, and it goes
//! faster with every thread that does it; registering what is there takes a fraction of it, and several registrations
//! at once only wait for each other inside the driver, and make everybody else's calls wait with them. (One H200, 24
//! GiB: eight threads that touch and one that registers, 42 to 44 GB/s, the longest call 1.4 ms for 64 MiB; eight that
//! do both, 38 GB/s at best and 9 at worst, the longest call 12 to 300 ms.) So threads of a region's own touch it in
//! units, in order of the addresses, and the device's worker registers each extent as soon as all of its units have
//! been touched.
//!
//! # Huge pages
//!
//! They make touching several times faster where the system has them at hand, and slower by orders of magnitude where
//! it has to move other memory out of the way first. That cannot be known beforehand, but it is seen at once: with
//! [`HugePages::Auto`] they are asked for until a few units in a row have taken longer than any page size would
//! explain, and what has not been touched by then comes in ordinary pages.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

use crate::os;

/// Bytes that a thread takes at a time: some huge pages, so that nobody waits long for the last one.
const UNIT: usize = 16 << 20;
/// Bytes that the system is asked for in one call: for as long as it lasts nobody in the process can map or unmap
/// anything.
const CALL: usize = 2 << 20;
/// Longer for a unit than ordinary pages take on a slow machine, and less than making room for huge ones does.
const SLOW: Duration = Duration::from_millis(100);
/// Units in a row: a thread may lose its processor for a while.
const SLOW_CALLS: u32 = 4;

/// Whether pinned memory is backed by huge pages (2 MiB on most systems).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HugePages {
    /// As long as they come cheaply. Where the system has to make room for them first, ordinary ones are taken.
    #[default]
    Auto,
    /// Always asked for, whatever they cost. The system may still decline.
    Always,
    /// Never asked for. (A system whose setting is `always` gives them all the same.)
    Never,
}

/// The threads that touch one region. Dropping it stops them, and returns when they have stopped.
#[derive(Debug)]
pub(super) struct Toucher {
    work: Arc<TouchWork>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct TouchWork {
    base: NonNull<u8>,
    len: usize,
    huge: HugePages,
    /// The next unit that nobody has taken. Relaxed: it only says whose turn it is.
    next: AtomicUsize,
    /// Relaxed: whoever sees it late touches a unit too many, which is waited for.
    stop: AtomicBool,
    /// Slow units in a row. Relaxed: a count.
    slow: AtomicU32,
    /// Whether the threads may begin: not before all are there, since a thread's stack is mapped, and mapping waits for
    /// those who touch.
    gate: Mutex<bool>,
    opened: Condvar,
    progress: Mutex<TouchProgress>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct TouchProgress {
    /// All units before this one have been touched.
    upto: usize,
    /// Units beyond it that have been.
    ahead: Vec<usize>,
}

// SAFETY: the address keeps it from being Send; its memory is the region's that is being made, and each unit of it is
// touched by one thread.
unsafe impl Send for TouchWork {}
// SAFETY: as above.
unsafe impl Sync for TouchWork {}

impl Toucher {
    /// Starts touching `len` bytes, on so many threads; with none, or where none can be started, whoever waits does it.
    ///
    /// # Safety
    /// The range is mapped, starts on a page, and is used by nobody else before [`Toucher::wait`] has returned for it.
    /// It stays mapped until this is dropped.
    pub(super) unsafe fn start(
        base: NonNull<u8>,
        len: usize,
        threads: usize,
        huge: HugePages,
        node: Option<u32>,
    ) -> Self {
        match huge {
            HugePages::Auto | HugePages::Always => os::advise_huge(base, len),
            HugePages::Never => false,
        };
        let work = Arc::new(TouchWork {
            base,
            len,
            huge,
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            slow: AtomicU32::new(0),
            gate: Mutex::new(false),
            opened: Condvar::new(),
            progress: Mutex::new(TouchProgress::default()),
            moved: Condvar::new(),
        });
        let mut started = Vec::new();
        // One unit is touched sooner than a thread is started.
        let threads = if work.units() > 1 { threads.min(work.units()) } else { 0 };
        for _ in 0..threads {
            let work = work.clone();
            let thread = os::thread::spawn("pinpool-touch", move || {
                // Memory is zeroed from next to it; elsewhere it only takes longer.
                node.map(os::run_on_node);
                work.wait_for_gate();
                while work.step() {}
            });
            match thread {
                Ok(thread) => started.push(thread),
                Err(error) => {
                    crate::foreign::debug!(target: "pinpool::region", %error, "a thread to touch pages could not be started");
                    break;
                }
            }
        }
        *work.gate.lock() = true;
        work.opened.notify_all();
        Self { work, threads: started }
    }

    /// Returns when the first `end` bytes have been touched. Touches what nobody has begun with.
    pub(super) fn wait(&self, end: usize) {
        let units = end.min(self.work.len).div_ceil(UNIT);
        // Whoever waits helps with what it waits for.
        while self.work.next.load(Ordering::Relaxed) < units && self.work.step() {}
        let mut progress = self.work.progress.lock();
        while progress.upto < units {
            self.work.moved.wait(&mut progress);
        }
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        self.work.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // They do not panic; had one done so, it has stopped too.
            let _ = thread.join();
        }
    }
}

impl TouchWork {
    fn units(&self) -> usize {
        self.len.div_ceil(UNIT)
    }

    fn wait_for_gate(&self) {
        let mut open = self.gate.lock();
        while !*open {
            self.opened.wait(&mut open);
        }
    }

    /// Touches the next unit. `false`: there is none.
    fn step(&self) -> bool {
        if self.stop.load(Ordering::Relaxed) {
            return false;
        }
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        if unit >= self.units() {
            return false;
        }
        let (start, len) = (unit * UNIT, UNIT.min(self.len - unit * UNIT));
        // SAFETY: within the mapping.
        let base = unsafe { self.base.add(start) };
        let guarded = self.huge == HugePages::Auto;
        let plain = guarded && self.slow.load(Ordering::Relaxed) >= SLOW_CALLS;
        if plain {
            os::advise_small(base, len);
        }
        let before = Instant::now();
        touch(base, len);
        let mut gives_up = false;
        if guarded && !plain {
            if before.elapsed() < SLOW {
                self.slow.store(0, Ordering::Relaxed);
            } else {
                gives_up = self.slow.fetch_add(1, Ordering::Relaxed) + 1 == SLOW_CALLS;
            }
        }
        let mut progress = self.progress.lock();
        progress.ahead.push(unit);
        while let Some(at) = progress.ahead.iter().position(|u| *u == progress.upto) {
            progress.ahead.swap_remove(at);
            progress.upto += 1;
        }
        drop(progress);
        self.moved.notify_all();
        // After the unit was counted, which somebody waits for: a subscriber is the caller's code, and may panic.
        if gives_up {
            crate::foreign::info!(
                target: "pinpool::region",
                "huge pages do not come cheaply here: the rest of the region has ordinary ones"
            );
        }
        true
    }
}

/// Has the system provide the pages of a range that nobody uses yet.
fn touch(base: NonNull<u8>, len: usize) {
    for start in (0..len).step_by(CALL) {
        // SAFETY: within the mapping.
        let (base, len) = (unsafe { base.add(start) }, CALL.min(len - start));
        if os::populate(base, len) {
            continue;
        }
        for at in (0..len).step_by(os::page_size()) {
            // SAFETY: a page of the mapping, which nobody else uses yet; fresh pages hold zeros anyway.
            unsafe { base.add(at).write_volatile(0) };
        }
    }
}

#[cfg(all(test, target_os = "linux", not(loom)))]
mod tests {
    use super::*;

    /// Bytes of the range that are in memory.
    fn resident(base: NonNull<u8>, len: usize) -> usize {
        let page = os::page_size();
        let mut pages = vec![0_u8; len / page];
        // SAFETY: mapped by the caller, and the vector has a byte for each page.
        assert_eq!(unsafe { libc::mincore(base.as_ptr().cast(), len, pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|p| **p & 1 == 1).count() * page
    }

    #[test]
    fn everything_waited_for_is_there_on_any_number_of_threads() {
        let page = os::page_size();
        for threads in [0, 1, 3] {
            for (huge, len) in [
                (HugePages::Never, page),
                (HugePages::Auto, UNIT + page),
                (HugePages::Always, 3 * UNIT - page),
            ] {
                let base = os::map(len, 2 << 20).unwrap();
                // SAFETY: mapped just now, unmapped below, after the toucher.
                let toucher = unsafe { Toucher::start(base, len, threads, huge, Some(0)) };
                toucher.wait(page);
                assert!(resident(base, page) == page);
                toucher.wait(len);
                assert_eq!(resident(base, len), len, "{threads} threads, {huge:?}");
                // More than there is is all there is.
                toucher.wait(usize::MAX);
                drop(toucher);
                // SAFETY: nobody uses it.
                unsafe { os::unmap(base, len).unwrap() };
            }
        }
    }

    #[test]
    fn stopping_early_leaves_the_rest_untouched_and_nobody_behind() {
        let len = 64 * UNIT;
        let base = os::map(len, 2 << 20).unwrap();
        // SAFETY: as above.
        let toucher = unsafe { Toucher::start(base, len, 0, HugePages::Never, None) };
        toucher.wait(UNIT);
        drop(toucher);
        assert_eq!(resident(base, len), UNIT);
        // SAFETY: as above.
        let toucher = unsafe { Toucher::start(base, len, 2, HugePages::Never, None) };
        drop(toucher);
        // SAFETY: nobody uses it: the threads are over.
        unsafe { os::unmap(base, len).unwrap() };
    }
}

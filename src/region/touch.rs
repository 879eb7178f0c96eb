//! Touching: several threads have the system provide a region's pages before it is pinned.
//!
//! Providing pages takes most of the time of pinning, since the system zeroes each page, and it
//! goes faster with every thread. Registering pages that are there takes a fraction of that;
//! several registrations at once only wait for each other inside the driver, and make all other
//! calls wait with them. (One H200, 24 GiB: eight threads that touch and one that registers, 42 to
//! 44 GB/s, the longest call 1.4 ms for 64 MiB; eight that do both, 38 GB/s at best and 9 at worst,
//! the longest call 12 to 300 ms.) So threads of its own touch a region in units, in the order of
//! addresses, and the device's region thread registers each extent once all its units were touched.
//!
//! # Huge pages
//!
//! Huge pages make touching several times faster if the system has them, and slower by orders of
//! magnitude if it has to move other memory out of the way first. That is seen at once: with
//! [`HugePages::Auto`] they are asked for until a few units in a row have taken longer than any
//! page size would explain; what was not touched by then gets ordinary pages.

use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};
use crate::os;

/// Bytes that a thread touches at a time: few huge pages, so that no wait for one is long.
const UNIT: usize = 16 << 20;
/// Bytes of pages that one system call asks for. While the call lasts, no thread of the process can
/// map or unmap memory.
const CALL: usize = 2 << 20;
/// A unit that takes this long is *slow*: ordinary pages take less on a slow machine, and making
/// room for huge pages takes more.
const SLOW: Duration = Duration::from_millis(100);
/// Slow units in a row until huge pages are given up. A thread may just lose its processor.
const SLOW_CALLS: u32 = 4;

/// Whether pinned memory is backed by huge pages (2 MiB on most systems). Set by
/// [`PoolBuilder::huge_pages`](crate::PoolBuilder::huge_pages).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HugePages {
    /// Huge pages are asked for as long as they come fast, without the system making room for them
    /// first.
    #[default]
    Auto,
    /// Huge pages are always asked for, however long they take. The system may still decline.
    Always,
    /// Huge pages are never asked for. (A system whose setting is `always` gives them all the
    /// same.)
    Never,
}

/// The threads that touch one region. Dropping it stops them, and returns when they have ended.
pub(super) struct Toucher {
    work: Arc<TouchWork>,
    threads: Vec<JoinHandle<()>>,
}

struct TouchWork {
    base: NonNull<u8>,
    len: usize,
    huge: HugePages,
    progress: Mutex<Progress>,
    /// A unit was touched.
    touched: Condvar,
}

struct Progress {
    /// The next unit that no thread has taken. Past the last one where the threads are to stop.
    next: usize,
    /// For each unit whether it was touched.
    is_touched: Vec<bool>,
    /// Slow units in a row.
    slow: u32,
}

// SAFETY: only the address keeps it from being Send. Its memory belongs to the region that is being
// made, and each unit is touched by one thread.
unsafe impl Send for TouchWork {}
// SAFETY: as above.
unsafe impl Sync for TouchWork {}

impl Toucher {
    /// Starts touching `len` bytes on this many threads. With none, or if none can be started,
    /// [`wait`](Self::wait) touches them.
    ///
    /// # Safety
    /// The range is mapped, starts on a page, and nothing else uses a part of it before
    /// [`Toucher::wait`] has returned for that part. It stays mapped until this is dropped.
    pub(super) unsafe fn start(
        base: NonNull<u8>,
        len: usize,
        threads: usize,
        huge: HugePages,
        node: Option<u32>,
    ) -> Self {
        if huge != HugePages::Never {
            os::advise_huge(base, len);
        }
        let units = len.div_ceil(UNIT);
        let progress = Mutex::new(Progress { next: 0, is_touched: vec![false; units], slow: 0 });
        let work = Arc::new(TouchWork { base, len, huge, progress, touched: Condvar::new() });
        // Touching a single unit takes less time than starting a thread.
        let threads = if units > 1 { threads.min(units) } else { 0 };
        // The threads begin when it is free: starting a thread maps its stack, and mapping waits
        // for threads that touch.
        let starting = work.progress.lock();
        let start = |_| {
            let work = work.clone();
            os::thread::spawn("pinpool-touch", move || {
                // Zeroing memory is faster from the node that has it; elsewhere it works too.
                node.map(os::run_on_node);
                while work.step(units) {}
            })
        };
        let started = (0..threads).map(start).map_while(|thread| {
            thread
                .inspect_err(|error| {
                    crate::foreign::debug!(target: "pinpool::region", %error, "a thread to touch pages could not be started");
                })
                .ok()
        });
        let threads = started.collect();
        drop(starting);
        Self { work, threads }
    }

    /// Returns when the first `end` bytes were touched. Touches units that no thread has.
    pub(super) fn wait(&mut self, end: usize) {
        let units = end.min(self.work.len).div_ceil(UNIT);
        while self.work.step(units) {}
        let mut progress = self.work.progress.lock();
        while progress.is_touched[..units].contains(&false) {
            self.work.touched.wait(&mut progress);
        }
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        self.work.progress.lock().next = usize::MAX;
        for thread in self.threads.drain(..) {
            // The threads do not panic; one that did has ended too.
            let _ = thread.join();
        }
    }
}

impl TouchWork {
    /// Touches the next of the first `units`. `false`: all of these are taken.
    fn step(&self, units: usize) -> bool {
        let guarded = self.huge == HugePages::Auto;
        let mut progress = self.progress.lock();
        let unit = progress.next;
        if unit >= units {
            return false;
        }
        progress.next += 1;
        let plain = guarded && progress.slow >= SLOW_CALLS;
        drop(progress);
        let (start, len) = (unit * UNIT, UNIT.min(self.len - unit * UNIT));
        // SAFETY: within the mapping.
        let base = unsafe { self.base.add(start) };
        if plain {
            os::advise_small(base, len);
        }
        let before = Instant::now();
        touch(base, len);
        let is_slow = before.elapsed() >= SLOW;
        let mut progress = self.progress.lock();
        progress.is_touched[unit] = true;
        if !plain {
            progress.slow = if is_slow { progress.slow + 1 } else { 0 };
        }
        let gives_up = guarded && !plain && progress.slow == SLOW_CALLS;
        drop(progress);
        self.touched.notify_all();
        // After the unit was counted, since a thread may wait for it: the subscriber is the
        // program's code, and may panic or block.
        if gives_up {
            crate::foreign::info!(
                target: "pinpool::region",
                "huge pages do not come cheaply here: the rest of the region has ordinary ones"
            );
        }
        true
    }
}

/// Has the system provide the pages of a range that nothing uses yet.
fn touch(base: NonNull<u8>, len: usize) {
    for start in (0..len).step_by(CALL) {
        // SAFETY: within the mapping.
        let (base, len) = (unsafe { base.add(start) }, CALL.min(len - start));
        if os::populate(base, len) {
            continue;
        }
        for at in (0..len).step_by(os::page_size()) {
            // SAFETY: a page of the mapping, not in use yet; fresh pages hold zeros anyway.
            unsafe { base.add(at).write_volatile(0) };
        }
    }
}

#[cfg(all(test, not(loom)))]
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
        let sizes = [
            (HugePages::Never, page),
            (HugePages::Auto, UNIT + page),
            (HugePages::Always, 3 * UNIT - page),
            // It stops early, and leaves the rest untouched.
            (HugePages::Never, 64 * UNIT),
        ];
        for (threads, (huge, len)) in
            [0, 1, 3].into_iter().flat_map(|threads| sizes.map(|size| (threads, size)))
        {
            let base = os::map(len, 2 << 20).unwrap();
            // SAFETY: mapped just now, unmapped below, after the toucher.
            let mut toucher = unsafe { Toucher::start(base, len, threads, huge, Some(0)) };
            toucher.wait(page);
            assert!(resident(base, page) == page);
            if len > 4 * UNIT {
                drop(toucher);
                assert!(threads > 0 || resident(base, len) == UNIT);
            } else {
                // Beyond the end it waits for all there is.
                toucher.wait(usize::MAX);
                assert_eq!(resident(base, len), len, "{threads} threads, {huge:?}");
                drop(toucher);
            }
            // SAFETY: nothing uses it: the threads have ended.
            unsafe { os::unmap(base, len).unwrap() };
        }
    }
}

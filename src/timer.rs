//! The timer: runs a short piece of work at a time, on a thread of its own.
//!
//! The process has one such thread, while there is work. Work is short and makes no driver's call:
//! it looks at windows again, has a growth tried again, reports a wait that lasts, or wakes a task
//! whose time is up. Wakers and subscribers are the program's code: one that blocks holds up all
//! others. Where the system has no room for the thread, the work is not done.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

type Work = Box<dyn FnOnce() + Send>;

/// The thread ends when nothing was planned for this long.
const IDLE: Duration = Duration::from_secs(10);

struct Timer {
    /// By time, and by a number that tells works of the same time apart.
    planned: BTreeMap<(Instant, u64), Work>,
    next: u64,
    running: bool,
}

static TIMER: Mutex<Timer> = Mutex::new(Timer { planned: BTreeMap::new(), next: 0, running: false });
static CHANGED: Condvar = Condvar::new();

/// Names planned work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planned(Instant, u64);

/// Runs `work` after a time.
pub(crate) fn after(time: Duration, work: impl FnOnce() + Send + 'static) {
    if let Some(at) = Instant::now().checked_add(time) {
        at_time(at, work);
    }
}

/// Runs `work` at a time.
pub(crate) fn at_time(at: Instant, work: impl FnOnce() + Send + 'static) -> Planned {
    let mut timer = TIMER.lock();
    let number = timer.next;
    timer.next += 1;
    let first = timer.planned.first_key_value().is_none_or(|(key, _)| at < key.0);
    timer.planned.insert((at, number), Box::new(work));
    if !timer.running {
        timer.running = crate::os::thread::spawn("pinpool-timer", run).is_ok();
    } else if first {
        CHANGED.notify_one();
    }
    Planned(at, number)
}

/// Drops work that has not begun.
pub(crate) fn cancel(Planned(at, number): Planned) {
    if !crate::os::forked() {
        let work = TIMER.lock().planned.remove(&(at, number));
        // After the unlock.
        drop(work);
    }
}

fn run() {
    crate::sync::enter(crate::sync::Own::Timer);
    let mut timer = TIMER.lock();
    loop {
        let now = Instant::now();
        let time = match timer.planned.first_entry() {
            Some(entry) if entry.key().0 <= now => {
                let work = entry.remove();
                drop(timer);
                work();
                timer = TIMER.lock();
                continue;
            }
            Some(entry) => entry.key().0 - now,
            None => IDLE,
        };
        let timed_out = CHANGED.wait_for(&mut timer, time);
        if timer.planned.is_empty() && timed_out {
            timer.running = false;
            return;
        }
    }
}

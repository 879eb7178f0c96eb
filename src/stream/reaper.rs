//! The reaper: one thread of each device that closes idle sequence numbers, asks the driver about events, completes
//! entries and wakes waiters.
//!
//! The reaper makes no call that can block. While nothing is in flight, it sleeps. A timeline that becomes busy puts
//! itself on the reaper's list, and wakes the reaper only if it sleeps. While anything is in flight, the reaper looks
//! at every listed timeline, and pauses between two rounds for an eighth of the time since it last saw progress, within
//! 50 us and 1 ms. So it sees a completion at most an eighth later than it could, and a long kernel costs next to
//! nothing. A timeline stays listed for [`IDLE_LOOKS`] rounds after its last work, so that a timeline with short pauses
//! does not wake the thread each time.
//!
//! The thread does not end by a panic. A panic in the look at one timeline can only come from a mistake in this crate
//! (foreign code is guarded); it quarantines what is in flight on that timeline, and the reaper goes on with the
//! others.
//!
//! A stepped device is a host device that works only when a test tells it to. It has no reaper thread; the thread that
//! steps the device calls [`Listing::advance`].

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

use super::timeline::Timeline;
use crate::device::context::Context;
use crate::error::{Error, Result};
use crate::foreign;

const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);
/// Rounds without anything in flight before a timeline is taken off the list.
const IDLE_LOOKS: u32 = 16;

#[derive(Debug, Default)]
struct Inbox {
    /// Timelines that have put themselves on the list since the last round.
    listed: Vec<Arc<Timeline>>,
    /// Every timeline of the device, for statistics and for [`Listing::advance`].
    known: Vec<Weak<Timeline>>,
    asleep: bool,
    /// A thread or a task has begun to wait for a sequence number.
    expedite: bool,
    closing: bool,
}

#[derive(Debug, Default)]
struct ReaperShared {
    inbox: Mutex<Inbox>,
    doorbell: Condvar,
}

/// The side of the reaper that timelines hold: they put themselves on its list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listing(Arc<ReaperShared>);

/// The reaper of a device. Once this is dropped, the thread ends as soon as nothing is in flight.
#[derive(Debug)]
pub(crate) struct Reaper {
    listing: Listing,
    context: Arc<Context>,
}

impl Listing {
    /// Adds a timeline to the known ones, for as long as it lives.
    pub(crate) fn know(&self, timeline: &Arc<Timeline>) {
        let mut inbox = self.0.inbox.lock();
        inbox.known.retain(|t| t.strong_count() > 0);
        inbox.known.push(Arc::downgrade(timeline));
    }

    /// All timelines of the device that are alive.
    pub(crate) fn known(&self) -> Vec<Arc<Timeline>> {
        self.0.inbox.lock().known.iter().filter_map(Weak::upgrade).collect()
    }

    /// Lists a timeline that has become busy.
    pub(crate) fn list(&self, timeline: &Arc<Timeline>) {
        let mut inbox = self.0.inbox.lock();
        inbox.listed.push(timeline.clone());
        if inbox.asleep {
            self.0.doorbell.notify_one();
        }
    }

    /// A thread or a task begins to wait for a sequence number: the reaper starts from the shortest pause again.
    pub(crate) fn expedite(&self) {
        let mut inbox = self.0.inbox.lock();
        if !inbox.expedite {
            inbox.expedite = true;
            self.0.doorbell.notify_one();
        }
    }

    /// Looks once at every timeline, on the calling thread: for stepped devices, and for pools that run short. Returns
    /// whether anything completed.
    pub(crate) fn advance(&self) -> bool {
        let mut progress = false;
        for timeline in self.known() {
            progress |= timeline.advance(true);
        }
        // Without a reaper thread nothing else empties the list. The timelines are dropped after the lock is released.
        let mut inbox = self.0.inbox.lock();
        let (idle, busy) = std::mem::take(&mut inbox.listed).into_iter().partition(|t| t.unlist());
        inbox.listed = busy;
        drop(inbox);
        let idle: Vec<Arc<Timeline>> = idle;
        drop(idle);
        progress
    }
}

impl Reaper {
    /// Starts the thread. A stepped device has none.
    pub(crate) fn start(context: &Arc<Context>) -> Result<Self> {
        let listing = Listing::default();
        if context.driver().stepped().is_none() {
            let shared = listing.0.clone();
            let (driver, device) = (context.driver().clone(), context.name());
            crate::os::thread::spawn(format!("pinpool-reap-{device}"), move || {
                crate::sync::enter(crate::sync::Own::Reaper);
                driver.enter_thread();
                drop(driver);
                let mut busy = Vec::new();
                foreign::live("the reaper panicked: it goes on", || run(&shared, &mut busy));
            })
            .map_err(|e| Error::Unavailable {
                device: device.into(),
                why: format!("no thread could be started: {e}"),
            })?;
        }
        Ok(Self { listing, context: context.clone() })
    }

    pub(crate) fn listing(&self) -> &Listing {
        &self.listing
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        // The child of a fork has no reaper thread, and another thread of the parent may have held the lock.
        if crate::os::forked() {
            return;
        }
        if self.context.driver().stepped().is_some() {
            // The last look: what is still in flight after it stays so for good, with its memory.
            self.listing.advance();
        }
        self.listing.0.inbox.lock().closing = true;
        self.listing.0.doorbell.notify_one();
    }
}

/// The thread's work until the device closes. `busy`: the listed timelines, each with the number of rounds in a row
/// that found it idle.
fn run(shared: &ReaperShared, busy: &mut Vec<(Arc<Timeline>, u32)>) {
    let mut progressed = Instant::now();
    loop {
        {
            let mut inbox = shared.inbox.lock();
            while busy.is_empty() && inbox.listed.is_empty() {
                if inbox.closing {
                    return;
                }
                inbox.asleep = true;
                inbox.expedite = false;
                shared.doorbell.wait(&mut inbox);
                inbox.asleep = false;
            }
            if !inbox.listed.is_empty() || std::mem::take(&mut inbox.expedite) {
                progressed = Instant::now();
            }
            busy.extend(inbox.listed.drain(..).map(|t| (t, 0)));
        }
        let mut progress = false;
        for (timeline, idle) in &mut *busy {
            progress |= look(timeline);
            *idle = if timeline.is_idle() { *idle + 1 } else { 0 };
        }
        busy.retain(|(timeline, idle)| *idle < IDLE_LOOKS || !timeline.unlist());
        if progress {
            progressed = Instant::now();
        }
        let pause = (progressed.elapsed() / 8).clamp(SHORTEST_SLEEP, LONGEST_SLEEP);
        let mut inbox = shared.inbox.lock();
        if !inbox.expedite && inbox.listed.is_empty() {
            shared.doorbell.wait_for(&mut inbox, pause);
        }
    }
}

/// Looks at one timeline. Returns whether anything completed.
fn look(timeline: &Arc<Timeline>) -> bool {
    let completed =
        foreign::survive("a look at a stream panicked: what is in flight on it is quarantined", || {
            timeline.advance(false)
        });
    completed.unwrap_or_else(|| {
        // The panic may have left the timeline's state half changed: it is given up as a whole.
        timeline.lose(&Error::Internal("a look at a stream panicked"));
        true
    })
}

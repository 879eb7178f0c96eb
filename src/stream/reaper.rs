//! The reaper: one thread of a device that closes idle sequence numbers, asks, completes, and wakes.
//!
//! It makes no call that can block. While nothing is in flight it sleeps; a timeline that becomes busy puts itself on
//! the list and, only if the reaper sleeps, wakes it. While something is in flight it looks at every listed timeline,
//! after an eighth of the time since it last saw progress, between 50 us and 1 ms: so a completion is seen at most an
//! eighth later than it could be, and a long kernel costs next to nothing.
//! A timeline stays listed for a moment after its last work, so that one which is busy by fits and starts does not wake
//! the thread each time.
//!
//! The thread does not die. A panic in one timeline's look, which only a mistake of the crate's can cause (foreign code
//! is guarded), quarantines what is in flight on that timeline; the thread goes on with the others.
//!
//! A stepped device has no reaper thread; there [`Listing::advance`] is called by whoever drives the device.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

use super::timeline::Timeline;
use crate::device::context::Context;
use crate::error::{Error, Result};
use crate::foreign;

const SHORTEST_SLEEP: Duration = Duration::from_micros(50);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);
/// Looks without anything in flight before a timeline is taken off the list.
const IDLE_LOOKS: u32 = 16;

#[derive(Debug, Default)]
struct Inbox {
    arrived: Vec<Arc<Timeline>>,
    /// Every timeline of the device, for statistics and for whoever drives a stepped device.
    known: Vec<Weak<Timeline>>,
    asleep: bool,
    /// Somebody parked who waits for a sequence number.
    expedite: bool,
    closing: bool,
}

#[derive(Debug, Default)]
struct ReaperShared {
    inbox: Mutex<Inbox>,
    bell: Condvar,
}

/// How timelines reach their reaper.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listing(Arc<ReaperShared>);

/// The reaper of a device. Dropping it lets the thread end once nothing is in flight any more.
#[derive(Debug)]
pub(crate) struct Reaper {
    listing: Listing,
    context: Arc<Context>,
}

impl Listing {
    /// Makes a timeline known for as long as it lives.
    pub(crate) fn know(&self, timeline: &Arc<Timeline>) {
        let mut inbox = self.0.inbox.lock();
        inbox.known.retain(|t| t.strong_count() > 0);
        inbox.known.push(Arc::downgrade(timeline));
    }

    /// All timelines of the device that are alive.
    pub(crate) fn known(&self) -> Vec<Arc<Timeline>> {
        self.0.inbox.lock().known.iter().filter_map(Weak::upgrade).collect()
    }

    /// A timeline has become busy.
    pub(crate) fn list(&self, timeline: &Arc<Timeline>) {
        let mut inbox = self.0.inbox.lock();
        inbox.arrived.push(timeline.clone());
        if inbox.asleep {
            self.0.bell.notify_one();
        }
    }

    /// Somebody parks until a sequence number is complete: look again soon.
    pub(crate) fn expedite(&self, _timeline: &Arc<Timeline>) {
        let mut inbox = self.0.inbox.lock();
        if !inbox.expedite {
            inbox.expedite = true;
            self.0.bell.notify_one();
        }
    }

    /// One look at every timeline, on this thread. For stepped devices, and for pools that run short. Whether anything
    /// completed.
    pub(crate) fn advance(&self) -> bool {
        let mut progress = false;
        for timeline in self.known() {
            progress |= timeline.advance(true);
        }
        // Without a thread nobody else empties the list. What leaves it is dropped after the lock is released.
        let mut inbox = self.0.inbox.lock();
        let (idle, busy) = std::mem::take(&mut inbox.arrived).into_iter().partition(|t| t.unlist());
        inbox.arrived = busy;
        drop(inbox);
        let idle: Vec<Arc<Timeline>> = idle;
        drop(idle);
        progress
    }
}

impl Reaper {
    /// Starts the thread; a stepped device does without.
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
        // In the child of a fork there is no thread to tell, and the lock may have been anyone's.
        if crate::os::forked() {
            return;
        }
        if self.context.driver().stepped().is_some() {
            // The last look: what is still in flight after it stays, with its memory, for good.
            self.listing.advance();
        }
        self.listing.0.inbox.lock().closing = true;
        self.listing.0.bell.notify_one();
    }
}

/// Until the device closes. `busy`: timelines with work in flight, and how often in a row each was found idle.
fn run(shared: &ReaperShared, busy: &mut Vec<(Arc<Timeline>, u32)>) {
    let mut progressed = Instant::now();
    loop {
        {
            let mut inbox = shared.inbox.lock();
            while busy.is_empty() && inbox.arrived.is_empty() {
                if inbox.closing {
                    return;
                }
                inbox.asleep = true;
                inbox.expedite = false;
                shared.bell.wait(&mut inbox);
                inbox.asleep = false;
            }
            if !inbox.arrived.is_empty() || std::mem::take(&mut inbox.expedite) {
                progressed = Instant::now();
            }
            busy.extend(inbox.arrived.drain(..).map(|t| (t, 0)));
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
        if !inbox.expedite && inbox.arrived.is_empty() {
            shared.bell.wait_for(&mut inbox, pause);
        }
    }
}

/// The reaper's look at one timeline. Whether anything completed.
fn look(timeline: &Arc<Timeline>) -> bool {
    let completed =
        foreign::survive("a look at a stream panicked: what is in flight on it is quarantined", || {
            timeline.advance(false)
        });
    completed.unwrap_or_else(|| {
        // What the panic has left half done is not looked at again.
        timeline.lose(&Error::Internal("a look at a stream panicked"));
        true
    })
}

//! An opened device: its driver, its worker, its events, and whether it is lost.
//!
//! Every layer above calls the driver through a [`Context`]. [`Context::noting`] looks at each
//! outcome: it counts errors, and after the first loss of the device every [`Context::alive`]
//! fails. Timelines, allocations and registrations keep the context; [`Holds`] outlives it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::locks::Mutex;
use crossbeam::utils::CachePadded;

use super::worker::{Holds, Worker};
use super::{Driver, EventHandle, Transfer};
use crate::error::{Error, ErrorClass, Result};
use crate::telemetry::counters::{ErrorTally, Histogram};

/// What moves a device that does nothing by itself: a test's function, which makes one piece of the
/// device's outstanding work happen on the calling thread. `false`: none can.
pub(crate) type Hand = Box<dyn Fn() -> bool + Send + Sync>;

pub(crate) struct Context {
    id: u64,
    driver: Arc<dyn Driver>,
    /// What moves the device, where it does nothing by itself.
    hand: Option<Hand>,
    worker: Arc<Worker>,
    /// Events that were seen complete or never recorded, so that they may be recorded.
    events: Mutex<Vec<EventHandle>>,
    /// Events that are not used again: see [`Context::set_aside`].
    aside: Mutex<Vec<EventHandle>>,
    holds: Arc<Holds>,
    /// The errors that the driver answered with.
    pub(crate) errors: ErrorTally,
    /// Times from a submit until it was seen complete, of a sample.
    pub(crate) flights: Mutex<Histogram>,
    /// The counts of streams that have ended: submitted, and completed.
    past: [AtomicU64; 2],
    /// Bytes of the copies that the driver accepted, to the device and from it. On a cache line of
    /// their own: every copy counts here, beside a driver call that costs many times as much.
    copied: CachePadded<[AtomicU64; 2]>,
}

impl Context {
    /// With a hand it is the context of a device that does nothing by itself: it has no threads,
    /// and whoever waits calls the hand.
    pub(crate) fn new(driver: Arc<dyn Driver>, hand: Option<Hand>) -> Result<Arc<Self>> {
        let holds = Holds::new(hand.is_some());
        let worker = Arc::new(Worker::start(&driver, &holds)?);
        static IDS: AtomicU64 = AtomicU64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Self {
            id,
            driver,
            hand,
            worker,
            events: Mutex::default(),
            aside: Mutex::default(),
            holds,
            errors: ErrorTally::default(),
            flights: Mutex::default(),
            past: Default::default(),
            copied: Default::default(),
        }))
    }

    /// A number that no other context has or had.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Whether the device does nothing by itself.
    pub(crate) fn is_by_hand(&self) -> bool {
        self.holds.by_hand
    }

    /// Makes one piece of the outstanding work of a device by hand happen. `false`: none can, or
    /// the device moves by itself.
    pub(crate) fn advance(&self) -> bool {
        self.hand.as_ref().is_some_and(|hand| hand())
    }

    pub(crate) fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    pub(crate) fn name(&self) -> &str {
        self.driver.name()
    }

    /// What keeps the device open.
    pub(crate) fn holds(&self) -> &Arc<Holds> {
        &self.holds
    }

    /// The counts of streams that have ended: submitted, and completed.
    pub(crate) fn past(&self) -> [u64; 2] {
        // Acquire: pairs with the release below: what is read as completed is read as submitted.
        let completed = self.past[1].load(Ordering::Acquire);
        [self.past[0].load(Ordering::Relaxed), completed]
    }

    /// Adds the counts of a stream that ends.
    pub(crate) fn count_past(&self, submitted: u64, completed: u64) {
        self.past[0].fetch_add(submitted, Ordering::Relaxed);
        // Release: pairs with the acquire above, and orders the relaxed addition.
        self.past[1].fetch_add(completed, Ordering::Release);
    }

    /// Bytes of the copies that the driver accepted, to the device and from it.
    pub(crate) fn copied(&self) -> [u64; 2] {
        // Relaxed, here and below: sums, not signals.
        [self.copied[0].load(Ordering::Relaxed), self.copied[1].load(Ordering::Relaxed)]
    }

    /// Counts copies that the driver accepted. Copies that do not cross the link are not counted.
    pub(crate) fn count_copied<'a>(&self, transfers: impl IntoIterator<Item = &'a Transfer>) {
        let mut sums = [0; 2];
        for transfer in transfers {
            match transfer {
                Transfer::Upload { len, .. } => sums[0] += *len as u64,
                Transfer::Download { len, .. } => sums[1] += *len as u64,
                Transfer::OnDevice { .. } | Transfer::OnHost { .. } => {}
            }
        }
        for (counter, sum) in self.copied.iter().zip(sums) {
            if sum > 0 {
                counter.fetch_add(sum, Ordering::Relaxed);
            }
        }
    }

    /// The error that the device was lost with, if it was.
    pub(crate) fn poisoned(&self) -> Option<&Error> {
        self.holds.lost.get()
    }

    /// Whether the driver has shut down: it must not be called then.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.poisoned().is_some_and(|error| error.class() == ErrorClass::DriverShutdown)
    }

    /// An error if the device is lost, and in the child of a fork.
    pub(crate) fn alive(&self) -> Result<()> {
        crate::os::check_fork()?;
        self.poisoned().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Counts the error of a driver call. The first one of class [`ErrorClass::DeviceLost`] or
    /// [`ErrorClass::DriverShutdown`] is what the device is lost with from then on.
    pub(crate) fn noting<R>(&self, result: Result<R>) -> Result<R> {
        if let Err(error) = &result {
            self.errors.note(error);
            if error.is_device_lost() && self.holds.lost.set(error.clone()).is_ok() {
                crate::foreign::error!(target: "pinpool::device::lost", device = self.name(), %error, "the device is lost");
            }
        }
        result
    }

    /// An event that may be recorded.
    pub(crate) fn event(&self) -> Result<EventHandle> {
        // A statement of its own, which ends with the lock: no driver call is made under it.
        let kept = self.events.lock().pop();
        kept.map_or_else(|| self.noting(self.driver.create_event()), Ok)
    }

    /// Takes back an event that was seen complete, or never recorded.
    pub(crate) fn recycle(&self, event: EventHandle) {
        self.events.lock().push(event);
    }

    /// Takes an event of an ended timeline, which was never seen complete, or one that a capture
    /// had. It is not used again, and destroyed when nothing of the device is in use.
    pub(crate) fn set_aside(&self, event: EventHandle) {
        self.aside.lock().push(event);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if crate::os::forked() {
            // Both are the parent's, and end in no child.
            return std::mem::forget((self.driver.clone(), self.worker.clone()));
        }
        let mut events = std::mem::take(self.events.get_mut());
        events.append(self.aside.get_mut());
        if self.is_shut_down() {
            events.clear();
        }
        let (driver, holds) = (self.driver.clone(), self.holds.clone());
        self.worker.send(move || {
            // On a lost device the events are destroyed too, whatever it answers.
            for event in events {
                if let Err(error) = driver.destroy_event(event) {
                    holds.leaked(1);
                    crate::foreign::warn!(target: "pinpool::device::leak", device = driver.name(), %error, "an event is leaked");
                }
            }
            if holds.by_hand {
                holds.end(driver);
            }
        });
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.name()).finish()
    }
}

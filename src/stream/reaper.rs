//! The reaper: one thread of each device that closes idle sequence numbers, asks the driver about events, completes
//! entries and wakes waiters.
//!
//! The reaper makes no call that can block. While nothing is in flight, it sleeps. A timeline that becomes busy puts
//! itself on the reaper's list, and wakes the reaper only if it sleeps. A timeline stays listed for [`IDLE_LOOKS`] looks
//! after its last work, so that a timeline with short pauses does not wake the thread each time.
//!
//! # When a timeline is looked at
//!
//! The list is a queue in the order of the timelines' next looks. Each timeline has one place in it. There is *news* of
//! a timeline when it is listed, makes progress, is idle, or gets a waiter; further work alone is none. The pause before
//! the next look is an eighth of the time since the last news, so the reaper sees a completion at most an eighth later
//! than it could.
//!
//! The pause is 50 us at least. It is 1 ms at most where up to [`BATCH`] timelines are listed, and longer in proportion
//! where more are: so a thousand streams that hang cost a hundredth of a core.
//!
//! A pool that runs short looks at the next [`BATCH`] timelines of the queue, on the thread of the request
//! ([`Listing::glance`]).
//!
//! # Invariants
//!
//! - A timeline that is marked as listed is in the queue, or its thread is about to put it there. So it is looked at
//!   until it is idle.
//! - `due` has exactly one entry for each timeline in `listed`: its next look.
//!
//! # Panics
//!
//! The thread does not end by a panic. A panic in the look at one timeline can only come from a mistake in this crate
//! (foreign code is guarded); it quarantines what is in flight on that timeline, and the reaper goes on with the
//! others.
//!
//! # Stepped devices
//!
//! A stepped device is a host device that works only when a test tells it to. It has no reaper thread; the thread that
//! steps the device calls [`Listing::advance`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

use super::timeline::Timeline;
use crate::device::context::Context;
use crate::error::{Error, Result};
use crate::foreign;

const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// Looks without anything in flight before a timeline is taken off the list.
const IDLE_LOOKS: u32 = 16;
/// Listed timelines from which on the longest pause is longer; and the timelines that a pool looks at, at most.
const BATCH: usize = 64;

/// A listed timeline.
#[derive(Debug)]
struct Listed {
    timeline: Arc<Timeline>,
    /// The number of looks in a row that found it idle.
    idle: u32,
    /// When there was news of it.
    since: Instant,
    next_look: Instant,
}

/// The listed timelines.
#[derive(Debug, Default)]
struct Queue {
    /// By their numbers.
    listed: BTreeMap<u64, Listed>,
    /// The times of their next looks, with their numbers.
    due: BTreeSet<(Instant, u64)>,
    /// The reaper sleeps, since nothing is listed.
    asleep: bool,
    /// The reaper was woken from its pause.
    rung: bool,
    closing: bool,
}

#[derive(Debug, Default)]
struct ReaperShared {
    queue: Mutex<Queue>,
    doorbell: Condvar,
    /// Every timeline of the device by its number, for statistics and for [`Listing::advance`].
    known: Mutex<BTreeMap<u64, Weak<Timeline>>>,
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
        self.0.known.lock().insert(timeline.number(), Arc::downgrade(timeline));
    }

    /// The timeline with this number ends.
    pub(crate) fn forget(&self, number: u64) {
        self.0.known.lock().remove(&number);
    }

    /// All timelines of the device that are alive, by their numbers.
    pub(crate) fn known(&self) -> Vec<Arc<Timeline>> {
        self.0.known.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Lists a timeline that has become busy.
    pub(crate) fn list(&self, timeline: &Arc<Timeline>) {
        let now = Instant::now();
        let mut queue = self.0.queue.lock();
        queue.list(timeline, now);
        if queue.asleep {
            self.0.doorbell.notify_one();
        }
    }

    /// A thread or a task begins to wait for the timeline with this number: the reaper looks at it now, and begins with
    /// the shortest pause again.
    pub(crate) fn expedite(&self, number: u64) {
        let now = Instant::now();
        let mut queue = self.0.queue.lock();
        if queue.expedite(number, now) && !std::mem::replace(&mut queue.rung, true) {
            self.0.doorbell.notify_one();
        }
    }

    /// Looks once at every timeline, on the calling thread: for stepped devices, and for programs that ask for it.
    /// Returns whether anything completed.
    pub(crate) fn advance(&self) -> bool {
        let mut progress = false;
        for timeline in self.known() {
            progress |= timeline.advance(true);
        }
        // Without a reaper thread nothing else empties the list. The timelines are dropped after the lock is released.
        let gone = self.0.queue.lock().remove_idle();
        drop(gone);
        progress
    }

    /// Looks once at the [`BATCH`] timelines whose looks come next, on the calling thread, for a pool that runs short.
    /// These then go to the back, as after a look of the reaper's. Returns whether anything completed.
    pub(crate) fn glance(&self) -> bool {
        let turn = self.0.queue.lock().turn(Instant::now());
        turn.iter().fold(false, |progress, timeline| timeline.advance(true) | progress)
    }
}

impl Queue {
    /// Gives a timeline its place, and another one than before if it was listed.
    fn put(&mut self, listed: Listed) {
        let number = listed.timeline.number();
        self.due.insert((listed.next_look, number));
        if let Some(before) = self.listed.insert(number, listed) {
            debug_assert!(false, "timeline {number} was listed twice");
            self.due.remove(&(before.next_look, number));
        }
    }

    fn take(&mut self, number: u64) -> Option<Listed> {
        let listed = self.listed.remove(&number)?;
        self.due.remove(&(listed.next_look, number));
        Some(listed)
    }

    fn list(&mut self, timeline: &Arc<Timeline>, now: Instant) {
        let next_look = now + SHORTEST_PAUSE;
        self.put(Listed { timeline: timeline.clone(), idle: 0, since: now, next_look });
    }

    /// Whether the timeline is listed.
    fn expedite(&mut self, number: u64, now: Instant) -> bool {
        let Some(listed) = self.take(number) else { return false };
        self.put(Listed { since: now, next_look: now, ..listed });
        true
    }

    /// The pause of a timeline without news since then.
    fn pause(&self, since: Instant, now: Instant) -> Duration {
        let longest = LONGEST_PAUSE * self.listed.len().div_ceil(BATCH).max(1) as u32;
        (now.saturating_duration_since(since) / 8).clamp(SHORTEST_PAUSE, longest)
    }

    /// The timelines whose looks come next, for a pool; they go to the back.
    fn turn(&mut self, now: Instant) -> Vec<Arc<Timeline>> {
        let numbers: Vec<u64> = self.due.iter().take(BATCH).map(|(_, number)| *number).collect();
        let mut look_at = |number| {
            let listed = self.take(number)?;
            let timeline = listed.timeline.clone();
            let next_look = now + self.pause(listed.since, now);
            self.put(Listed { next_look, ..listed });
            Some(timeline)
        };
        numbers.into_iter().filter_map(&mut look_at).collect()
    }

    /// The timelines that are due.
    fn due(&self, now: Instant) -> Vec<Arc<Timeline>> {
        let due = self.due.range(..=(now, u64::MAX));
        due.filter_map(|(_, number)| self.listed.get(number)).map(|listed| listed.timeline.clone()).collect()
    }

    /// Puts a timeline to the place that follows from a look. Returns it if it is off the list.
    fn note(&mut self, number: u64, seen: Look, now: Instant) -> Option<Listed> {
        let mut listed = self.take(number)?;
        listed.idle = if seen.idle { listed.idle + 1 } else { 0 };
        if listed.idle >= IDLE_LOOKS && listed.timeline.unlist() {
            return Some(listed);
        }
        if seen.progress || seen.idle {
            listed.since = now;
        }
        listed.next_look = now + self.pause(listed.since, now);
        self.put(listed);
        None
    }

    /// Takes off the timelines that are idle.
    fn remove_idle(&mut self) -> Vec<Listed> {
        let idle = |listed: &&Listed| listed.timeline.unlist();
        let idle: Vec<u64> =
            self.listed.values().filter(idle).map(|listed| listed.timeline.number()).collect();
        idle.into_iter().filter_map(|number| self.take(number)).collect()
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
                foreign::live("the reaper panicked: it goes on", || run(&shared));
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
        self.listing.0.queue.lock().closing = true;
        self.listing.0.doorbell.notify_one();
    }
}

/// The thread's work until the device closes.
fn run(shared: &ReaperShared) {
    let mut looked = Instant::now();
    while let Some(due) = next_due(shared, looked) {
        let looks: Vec<_> = due.into_iter().map(|timeline| (timeline.number(), look(&timeline))).collect();
        let now = Instant::now();
        let mut queue = shared.queue.lock();
        let gone: Vec<_> =
            looks.into_iter().filter_map(|(number, seen)| queue.note(number, seen, now)).collect();
        drop(queue);
        // After the lock was released: these may be the last references.
        drop(gone);
        looked = now;
    }
}

/// Waits until timelines are due: for [`SHORTEST_PAUSE`] at least after the last looks, so that several are due at
/// once, and for [`LONGEST_PAUSE`] at most, since a timeline that is listed meanwhile wakes nobody. `None`: the device
/// closes, and nothing is in flight.
fn next_due(shared: &ReaperShared, looked: Instant) -> Option<Vec<Arc<Timeline>>> {
    let mut queue = shared.queue.lock();
    loop {
        let Some((next, _)) = queue.due.first().copied() else {
            if queue.closing {
                return None;
            }
            queue.asleep = true;
            shared.doorbell.wait(&mut queue);
            queue.asleep = false;
            continue;
        };
        let (now, until) = (Instant::now(), next.clamp(looked + SHORTEST_PAUSE, looked + LONGEST_PAUSE));
        if std::mem::take(&mut queue.rung) || now >= until {
            return Some(queue.due(now));
        }
        shared.doorbell.wait_until(&mut queue, until);
    }
}

/// What a look at a timeline has found.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// Something completed.
    progress: bool,
    /// Nothing is in flight.
    idle: bool,
}

/// Looks at one timeline.
fn look(timeline: &Arc<Timeline>) -> Look {
    let completed =
        foreign::survive("a look at a stream panicked: what is in flight on it is quarantined", || {
            timeline.advance(false)
        });
    let progress = completed.unwrap_or_else(|| {
        // The panic may have left the timeline's state half changed: it is given up as a whole.
        timeline.lose(&Error::Internal("a look at a stream panicked"));
        true
    });
    Look { progress, idle: timeline.is_idle() }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::handle::Device;
    use crate::device::host::{HostConfig, HostNode};
    use crate::stream::Stream;

    const NOTHING: Look = Look { progress: false, idle: false };

    fn streams(count: usize) -> Vec<Stream> {
        let node = HostNode::new(HostConfig::new().stepped(1)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        (0..count).map(|_| device.stream().unwrap()).collect()
    }

    /// The queue with these, without news since then.
    fn listed(streams: &[Stream], then: Instant) -> Queue {
        let mut queue = Queue::default();
        streams.iter().for_each(|stream| queue.list(stream.timeline(), then));
        queue
    }

    /// Looks at what is due each 50 us for so long, and returns the numbers of the timelines looked at, with the times.
    fn looks(queue: &mut Queue, from: Instant, long: Duration) -> Vec<(Instant, u64)> {
        let mut looks = Vec::new();
        let mut now = from;
        while now < from + long {
            for timeline in queue.due(now) {
                assert!(queue.note(timeline.number(), NOTHING, now).is_none());
                looks.push((now, timeline.number()));
            }
            now += SHORTEST_PAUSE;
        }
        assert!(queue.due.iter().all(|(next, number)| queue.listed[number].next_look == *next));
        assert_eq!(queue.due.len(), queue.listed.len());
        looks
    }

    #[test]
    fn the_pause_grows_with_the_silence_and_news_end_it() {
        let (streams, then) = (streams(1), Instant::now());
        let (number, ms) = (streams[0].number(), Duration::from_millis);
        let mut queue = listed(&streams, then);
        let gaps: Vec<Duration> =
            looks(&mut queue, then, ms(20)).windows(2).map(|w| w[1].0 - w[0].0).collect();
        assert_eq!((gaps[0], gaps[gaps.len() - 1]), (SHORTEST_PAUSE, LONGEST_PAUSE));
        assert!(gaps.windows(2).all(|w| w[0] <= w[1] && w[1] <= 2 * w[0]), "{gaps:?}");
        // What was complete just after a look is seen when an eighth of the time has passed again, or a step later.
        let seen = looks(&mut listed(&streams, then), then, ms(6));
        assert!(seen.windows(2).all(|w| w[1].0 - w[0].0 <= (w[0].0 - then) / 8 + 2 * SHORTEST_PAUSE));
        for news in [Look { progress: true, ..NOTHING }, Look { idle: true, ..NOTHING }] {
            let now = then + ms(30);
            queue.note(number, news, now);
            assert_eq!(queue.listed[&number].next_look, now + SHORTEST_PAUSE);
        }
        // A waiter is served at once, and is news as well.
        let now = then + ms(90);
        assert!(queue.expedite(number, now) && queue.due(now).len() == 1);
        assert_eq!(looks(&mut queue, now, 3 * SHORTEST_PAUSE).len(), 3);
        assert!(!queue.expedite(number + 1, now), "it is not listed");
    }

    #[test]
    fn many_silent_timelines_cost_no_more_looks_than_a_batch() {
        let (streams, then, ms) = (streams(10 * BATCH), Instant::now(), Duration::from_millis);
        let mut queue = listed(&streams, then);
        looks(&mut queue, then, ms(200));
        let looks = looks(&mut queue, then + ms(200), ms(100));
        // Sixty-four in a millisecond, and each of them in its turn.
        assert!(looks.len() <= 100 * BATCH && looks.len() >= 90 * BATCH, "{}", looks.len());
        let numbers: BTreeSet<u64> = looks.iter().map(|(_, number)| *number).collect();
        assert_eq!(numbers.len(), streams.len());
    }

    #[test]
    fn the_turns_of_a_pool_go_around() {
        const STREAMS: usize = 150;
        let (streams, now) = (streams(STREAMS), Instant::now());
        let mut queue = listed(&streams, now);
        let later = now + Duration::from_millis(1);
        let turns: Vec<_> = (0..3).flat_map(|_| queue.turn(later)).collect();
        let numbers: BTreeSet<u64> = turns.iter().map(|timeline| timeline.number()).collect();
        assert_eq!((turns.len(), numbers.len()), (3 * BATCH, STREAMS));
        let mut queue = listed(&streams[..3], now);
        assert_eq!(queue.turn(later).len(), 3, "a short list is taken whole, once");
    }

    #[test]
    fn idle_timelines_leave_the_list_and_not_at_once() {
        let (streams, now) = (streams(1), Instant::now());
        let number = streams[0].number();
        let mut queue = listed(&streams, now);
        let idle = Look { idle: true, ..NOTHING };
        for _ in 1..IDLE_LOOKS {
            assert!(queue.note(number, idle, now).is_none());
        }
        assert!(queue.note(number, NOTHING, now).is_none(), "it has got work");
        for n in 1..=IDLE_LOOKS {
            assert_eq!(queue.note(number, idle, now).is_some(), n == IDLE_LOOKS);
        }
        assert!(queue.listed.is_empty() && queue.due.is_empty());
    }

    #[test]
    fn a_wait_ends_the_pause_of_the_reaper() {
        let streams = streams(1);
        let (number, listing) = (streams[0].number(), Listing::default());
        // Nothing that is not listed can be waited for.
        listing.expedite(number);
        assert!(!listing.0.queue.lock().rung);
        let far = Instant::now() + Duration::from_secs(10);
        *listing.0.queue.lock() = listed(&streams, far);
        let shared = listing.0.clone();
        let pausing = std::thread::spawn(move || next_due(&shared, far).map(|due| due.len()));
        // Whether this comes before the pause or in it.
        listing.expedite(number);
        assert_eq!(pausing.join().unwrap(), Some(1));
        assert!(Instant::now() < far && !listing.0.queue.lock().rung);
    }

    #[test]
    fn a_glance_tells_whether_anything_completed() {
        let streams = streams(2);
        let device = streams[0].device().clone();
        streams.iter().for_each(|stream| drop(stream.hold(()).unwrap()));
        assert!(!device.listing().glance());
        let driver = device.context().driver().clone();
        while driver.stepped().is_some_and(|stepped| stepped.step()) {}
        assert!(device.listing().glance());
        assert!(streams.iter().all(|stream| stream.timeline().is_idle()));
        assert!(!device.listing().glance());
        // Streams that have ended are not known any more.
        assert_eq!(device.listing().0.known.lock().len(), 2);
        device.listing().advance();
        drop(streams);
        assert!(device.listing().0.known.lock().is_empty());
    }
}

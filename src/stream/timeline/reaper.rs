//! The reaper: one thread of each device that closes idle sequence numbers, asks the driver about events, completes
//! entries and wakes waiters.
//!
//! The reaper makes no call that can block. While nothing is in flight, it sleeps. A timeline that becomes busy puts
//! itself on the reaper's list, and wakes the reaper only if it sleeps. A timeline stays listed for [`IDLE_LOOKS`]
//! looks after its last work, so that a timeline with short pauses does not wake the thread each time.
//!
//! # When a timeline is looked at
//!
//! Each listed timeline has a time of its next look. There is *news* of a timeline when it is listed, makes progress,
//! is idle, or gets a waiter; further work alone is none. The pause before the next look is an eighth of the time since
//! the last news, so the reaper sees a completion at most an eighth later than it could.
//!
//! The pause is 50 us at least. It is 1 ms at most where up to [`BATCH`] timelines are listed, and longer in proportion
//! where more are: so a thousand streams that hang cost a hundredth of a core.
//!
//! A pool that runs short looks at the [`BATCH`] timelines whose looks come next, on the thread of the request
//! ([`Listing::glance`]).
//!
//! # Invariants
//!
//! A timeline that is marked as listed is in the queue once, or its thread is about to put it there. So it is looked at
//! until it is idle.
//!
//! # Panics
//!
//! The thread does not end by a panic. A panic in the look at one timeline can only come from a mistake in this crate
//! (foreign code is guarded); it quarantines what is in flight on that timeline, and the reaper goes on with the
//! others.
//!
//! # Devices by hand
//!
//! A device that a test moves by hand ([`Device::by_hand`](crate::Device::by_hand)) has no reaper thread: the thread
//! that moves the device calls [`Listing::advance`].

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Timeline;
use crate::device::context::Context;
use crate::error::{Error, Result};
use crate::foreign;
use crate::locks::{Condvar, Mutex};

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
    listed: Vec<Listed>,
    /// The reaper sleeps, since nothing is listed.
    asleep: bool,
    /// The reaper was woken from its pause.
    rung: bool,
    closing: bool,
}

/// The timelines of a device, and when its reaper looks at which.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    queue: Mutex<Queue>,
    doorbell: Condvar,
    /// The timelines that are alive, for statistics and for [`Listing::advance`].
    known: Mutex<Vec<Weak<Timeline>>>,
}

impl Listing {
    /// Lists a timeline that has become busy.
    pub(super) fn list(&self, timeline: &Arc<Timeline>) {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        queue.listed.push(Listed::new(timeline, now));
        if queue.asleep {
            self.doorbell.notify_one();
        }
    }

    /// A thread or a task begins to wait for the timeline: it is looked at now, and after the shortest pause again.
    pub(super) fn expedite(&self, timeline: &Timeline) {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        let Some(listed) = queue.find(timeline) else { return };
        (listed.since, listed.next_look) = (now, now);
        if !std::mem::replace(&mut queue.rung, true) {
            self.doorbell.notify_one();
        }
    }

    /// Forgets a timeline that ends: no counted reference to it is left.
    pub(super) fn ended(&self) {
        self.known.lock().retain(|timeline| timeline.strong_count() > 0);
    }

    /// Starts the reaper of a device. A device by hand has none.
    pub(crate) fn start(context: &Context) -> Result<Arc<Self>> {
        let listing = Arc::new(Self::default());
        if !context.is_by_hand() {
            let own = listing.clone();
            let (driver, device) = (context.driver().clone(), context.name());
            crate::os::thread::spawn(format!("pinpool-reap-{device}"), move || {
                crate::sync::enter(crate::sync::Own::Reaper);
                driver.enter_thread();
                drop(driver);
                foreign::live("the reaper panicked: it goes on", || run(&own));
            })
            .map_err(|e| Error::Unavailable {
                device: device.into(),
                why: format!("no thread could be started: {e}"),
            })?;
        }
        Ok(listing)
    }

    /// The device closes: its reaper ends as soon as nothing is in flight.
    pub(crate) fn close(&self, context: &Context) {
        // The child of a fork has no reaper, and another thread of the parent may have held the lock.
        if crate::os::forked() {
            return;
        }
        if context.is_by_hand() {
            // The last look: what is still in flight after it stays so for good, with its memory.
            self.advance();
        }
        self.queue.lock().closing = true;
        self.doorbell.notify_one();
    }

    pub(super) fn know(&self, timeline: &Arc<Timeline>) {
        self.known.lock().push(Arc::downgrade(timeline));
    }

    /// All timelines of the device that are alive.
    pub(crate) fn known(&self) -> Vec<Arc<Timeline>> {
        self.known.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Looks once at every timeline, on the calling thread: for devices by hand, and for programs that ask for it.
    /// Returns whether anything completed.
    pub(crate) fn advance(&self) -> bool {
        let mut progress = false;
        for timeline in self.known() {
            progress |= timeline.advance(true);
        }
        // Without a reaper thread nothing else empties the list. The timelines are dropped after the lock is released.
        let mut queue = self.queue.lock();
        let listed = std::mem::take(&mut queue.listed);
        let (idle, busy): (Vec<_>, _) = listed.into_iter().partition(|listed| listed.timeline.unlist());
        queue.listed = busy;
        drop(queue);
        drop(idle);
        progress
    }

    /// Looks once at the [`BATCH`] timelines whose looks come next, on the calling thread, for a pool that runs short.
    /// These then go to the back, as after a look of the reaper's. Returns whether anything completed.
    pub(crate) fn glance(&self) -> bool {
        let turn = self.queue.lock().turn(Instant::now());
        turn.iter().fold(false, |progress, timeline| timeline.advance(true) | progress)
    }
}

impl Listed {
    fn new(timeline: &Arc<Timeline>, now: Instant) -> Self {
        Self { timeline: timeline.clone(), idle: 0, since: now, next_look: now + SHORTEST_PAUSE }
    }

    fn next_look_after(&self, now: Instant, longest: Duration) -> Instant {
        now + (now.saturating_duration_since(self.since) / 8).clamp(SHORTEST_PAUSE, longest)
    }
}

impl Queue {
    fn find(&mut self, timeline: &Timeline) -> Option<&mut Listed> {
        self.listed.iter_mut().find(|listed| std::ptr::eq(Arc::as_ptr(&listed.timeline), timeline))
    }

    /// The longest pause between two looks at one timeline.
    fn longest_pause(&self) -> Duration {
        LONGEST_PAUSE * self.listed.len().div_ceil(BATCH).max(1) as u32
    }

    /// The timelines whose looks come next, for a pool; they go to the back.
    fn turn(&mut self, now: Instant) -> Vec<Arc<Timeline>> {
        let longest = self.longest_pause();
        self.listed.sort_by_key(|listed| listed.next_look);
        let mut look_at = |listed: &mut Listed| {
            listed.next_look = listed.next_look_after(now, longest);
            listed.timeline.clone()
        };
        self.listed.iter_mut().take(BATCH).map(&mut look_at).collect()
    }

    /// The timelines that are due.
    fn due(&self, now: Instant) -> Vec<Arc<Timeline>> {
        let due = self.listed.iter().filter(|listed| listed.next_look <= now);
        due.map(|listed| listed.timeline.clone()).collect()
    }

    /// Notes what a look has found. Takes the timeline off the list if it was idle for long.
    fn note(&mut self, timeline: &Timeline, seen: Look, now: Instant) {
        let longest = self.longest_pause();
        let Some(listed) = self.find(timeline) else { return };
        if seen.progress || seen.idle {
            listed.since = now;
        }
        listed.idle = if seen.idle { listed.idle + 1 } else { 0 };
        listed.next_look = listed.next_look_after(now, longest);
        if listed.idle >= IDLE_LOOKS && timeline.unlist() {
            self.listed.retain(|listed| !std::ptr::eq(Arc::as_ptr(&listed.timeline), timeline));
        }
    }
}

/// The thread's work until the device closes.
fn run(listing: &Listing) {
    let mut looked = Instant::now();
    while let Some(due) = next_due(listing, looked) {
        let looks: Vec<_> = due.iter().map(look).collect();
        let now = Instant::now();
        let mut queue = listing.queue.lock();
        due.iter().zip(looks).for_each(|(timeline, seen)| queue.note(timeline, seen, now));
        drop(queue);
        // `due` is dropped after the lock was released: it may have the last references.
        looked = now;
    }
}

/// Waits until timelines are due: for [`SHORTEST_PAUSE`] at least after the last looks, so that several are due at
/// once, and for [`LONGEST_PAUSE`] at most, since a timeline that is listed meanwhile wakes nobody. `None`: the device
/// closes, and nothing is in flight.
fn next_due(listing: &Listing, looked: Instant) -> Option<Vec<Arc<Timeline>>> {
    let mut queue = listing.queue.lock();
    loop {
        let Some(next) = queue.listed.iter().map(|listed| listed.next_look).min() else {
            if queue.closing {
                return None;
            }
            queue.asleep = true;
            listing.doorbell.wait(&mut queue);
            queue.asleep = false;
            continue;
        };
        let (now, until) = (Instant::now(), next.clamp(looked + SHORTEST_PAUSE, looked + LONGEST_PAUSE));
        if std::mem::take(&mut queue.rung) || now >= until {
            return Some(queue.due(now));
        }
        listing.doorbell.wait_until(&mut queue, until);
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
    use std::collections::BTreeSet;

    use super::*;
    use crate::stream::Stream;
    use crate::stream::timeline::tests::by_hand;

    const NOTHING: Look = Look { progress: false, idle: false };
    const MS: Duration = Duration::from_millis(1);

    /// Streams of a device by hand, and a queue that has had their timelines since then, without news.
    fn listed(count: usize, then: Instant) -> (Vec<Stream>, Queue) {
        let (_, device) = by_hand();
        let streams: Vec<Stream> = (0..count).map(|_| device.stream().unwrap()).collect();
        let listed = streams.iter().map(|stream| Listed::new(stream.timeline(), then)).collect();
        (streams, Queue { listed, ..Queue::default() })
    }

    /// Looks at what is due each 50 us for so long, and returns the numbers of the timelines looked at, with the times.
    fn looks(queue: &mut Queue, from: Instant, long: Duration) -> Vec<(Instant, u64)> {
        let mut looks = Vec::new();
        let mut now = from;
        while now < from + long {
            for timeline in queue.due(now) {
                queue.note(&timeline, NOTHING, now);
                looks.push((now, timeline.number()));
            }
            now += SHORTEST_PAUSE;
        }
        looks
    }

    #[test]
    fn the_pause_grows_with_the_silence_and_news_end_it() {
        let then = Instant::now();
        let (streams, mut queue) = listed(1, then);
        let seen = looks(&mut queue, then, 20 * MS);
        let gaps: Vec<Duration> = seen.windows(2).map(|w| w[1].0 - w[0].0).collect();
        assert_eq!((gaps[0], gaps[gaps.len() - 1]), (SHORTEST_PAUSE, LONGEST_PAUSE));
        assert!(gaps.windows(2).all(|w| w[0] <= w[1] && w[1] <= 2 * w[0]), "{gaps:?}");
        // What was complete just after a look is seen when an eighth of the time has passed again, or a step later.
        let early = seen.windows(2).take_while(|w| w[1].0 < then + 6 * MS);
        assert!(
            early
                .map(|w| (w[1].0 - w[0].0, w[0].0 - then))
                .all(|(gap, at)| gap <= at / 8 + 2 * SHORTEST_PAUSE)
        );
        for news in [Look { progress: true, ..NOTHING }, Look { idle: true, ..NOTHING }] {
            let now = then + 30 * MS;
            queue.note(streams[0].timeline(), news, now);
            assert_eq!(queue.listed[0].next_look, now + SHORTEST_PAUSE);
        }
    }

    #[test]
    fn many_silent_timelines_cost_no_more_looks_than_a_batch() {
        let then = Instant::now();
        let (streams, mut queue) = listed(10 * BATCH, then);
        looks(&mut queue, then, 200 * MS);
        let looks = looks(&mut queue, then + 200 * MS, 100 * MS);
        // Sixty-four in a millisecond, and each of them in its turn.
        assert!(looks.len() <= 100 * BATCH && looks.len() >= 90 * BATCH, "{}", looks.len());
        let numbers: BTreeSet<u64> = looks.iter().map(|(_, number)| *number).collect();
        assert_eq!(numbers.len(), streams.len());
    }

    #[test]
    fn the_turns_of_a_pool_go_around() {
        const STREAMS: usize = 150;
        let now = Instant::now();
        let (_streams, mut queue) = listed(STREAMS, now);
        let turns: Vec<_> = (0..3).flat_map(|_| queue.turn(now + MS)).collect();
        let numbers: BTreeSet<u64> = turns.iter().map(|timeline| timeline.number()).collect();
        assert_eq!((turns.len(), numbers.len()), (3 * BATCH, STREAMS));
        let (_streams, mut queue) = listed(3, now);
        assert_eq!(queue.turn(now + MS).len(), 3, "a short list is taken whole, once");
    }

    #[test]
    fn idle_timelines_leave_the_list_and_not_at_once() {
        let now = Instant::now();
        let (streams, mut queue) = listed(1, now);
        // In the middle it has got work.
        let looks = (1..2 * IDLE_LOOKS).map(|n| Look { idle: n != IDLE_LOOKS, ..NOTHING });
        for look in looks {
            queue.note(streams[0].timeline(), look, now);
            assert_eq!(queue.listed.len(), 1);
        }
        queue.note(streams[0].timeline(), Look { idle: true, ..NOTHING }, now);
        assert!(queue.listed.is_empty());
    }

    #[test]
    fn a_wait_ends_the_pause_of_the_reaper() {
        let far = Instant::now() + Duration::from_secs(10);
        let (streams, queue) = listed(1, far);
        let (timeline, listing) = (streams[0].timeline(), Arc::new(Listing::default()));
        // Nothing that is not listed can be waited for.
        listing.expedite(timeline);
        assert!(!listing.queue.lock().rung);
        *listing.queue.lock() = queue;
        let own = listing.clone();
        let pausing = std::thread::spawn(move || next_due(&own, far).map(|due| due.len()));
        // Whether this comes before the pause or in it.
        listing.expedite(timeline);
        assert_eq!(pausing.join().unwrap(), Some(1));
        let mut queue = listing.queue.lock();
        assert!(!queue.rung);
        // It is news as well.
        let since = queue.listed[0].since;
        assert!(since < far);
        queue.note(timeline, NOTHING, since);
        assert_eq!(queue.listed[0].next_look, since + SHORTEST_PAUSE);
    }

    #[test]
    fn a_glance_tells_whether_anything_completed() {
        let (streams, _) = listed(2, Instant::now());
        let device = streams[0].device().clone();
        streams.iter().for_each(|stream| drop(stream.hold(()).unwrap()));
        assert!(!device.listing().glance());
        device.context().advance();
        assert!(device.listing().glance());
        assert!(streams.iter().all(|stream| stream.timeline().is_idle()));
        assert!(!device.listing().glance());
        // Streams that have ended are not known any more.
        assert_eq!(device.listing().known().len(), 2);
        device.listing().advance();
        drop(streams);
        assert!(device.listing().known.lock().is_empty());
    }
}

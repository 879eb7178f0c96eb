//! The reaper: one thread of each device that closes idle sequence numbers, asks the driver about
//! events, completes entries (in `completion`) and wakes waiters.
//!
//! The reaper makes no call that can block. While nothing is in flight, it sleeps. A timeline that
//! becomes busy puts itself on the reaper's list, and wakes the reaper only if it sleeps. A
//! timeline stays listed for [`IDLE_LOOKS`] looks after its last work, so that a timeline with
//! short pauses does not wake the thread each time.
//!
//! # When a timeline is looked at
//!
//! Each listed timeline has a time of its next look, and the list is in the order of these times.
//! There is *news* of a timeline when it is listed, makes progress, is idle, or gets a waiter;
//! further work alone is none. The pause before the next look is an eighth of the time since the
//! last news, so the reaper sees a completion at most an eighth later than it could.
//!
//! The pause is 50 us at least. It is 1 ms at most where up to [`BATCH`] timelines are listed, and
//! longer in proportion where more are: so a thousand streams that hang cost a hundredth of a core.
//! For the same reason the list is searched only for timelines with news.
//!
//! A pool that runs short looks, on the thread of the request, at timelines that the reaper would
//! look at within the next millisecond, [`BATCH`] at most: at all where no more are listed, and
//! where thousands hang at hardly any. A program that reaps, and who moves a device by hand, looks
//! at all of them ([`Listing::look`]), which takes idle ones off the list at once.
//!
//! # Invariants
//!
//! A timeline that is marked as listed is in the queue once, or its thread is about to put it
//! there. So it is looked at until it is idle.
//!
//! # Panics
//!
//! The thread does not end by a panic. A panic in the look at one timeline can only come from a
//! mistake in this crate (foreign code is guarded); it quarantines what is in flight on that
//! timeline, and the reaper goes on with the others.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Timeline;
use crate::device::context::Context;
use crate::error::{Error, Result};
use crate::foreign;
use crate::locks::{Condvar, Mutex};

const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// Looks without anything in flight before the reaper takes a timeline off the list.
const IDLE_LOOKS: u32 = 16;
/// Listed timelines beyond which the longest pause grows; a pool looks at no more at a time.
const BATCH: usize = 64;

/// A listed timeline.
#[derive(Debug)]
struct Listed {
    timeline: Arc<Timeline>,
    /// When there was news of it.
    since: Instant,
    next_look: Instant,
}

/// The listed timelines.
#[derive(Debug, Default)]
struct Queue {
    /// In the order of their next looks.
    listed: VecDeque<Listed>,
    /// The reaper was woken from its pause.
    rung: bool,
    closing: bool,
}

/// The timelines of a device, and when its reaper looks at which.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    queue: Mutex<Queue>,
    doorbell: Condvar,
    /// The device's timelines, each with the driver's number of its stream if that is known. No
    /// other stream has or had the number.
    known: Mutex<Vec<(Weak<Timeline>, Option<u64>)>>,
}

impl Listing {
    /// Lists a timeline that has become busy.
    pub(super) fn list(&self, timeline: &Arc<Timeline>) {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        queue.plan(Listed { timeline: timeline.clone(), since: now, next_look: now + SHORTEST_PAUSE });
        // The reaper sleeps only while nothing is listed.
        if queue.listed.len() == 1 {
            self.doorbell.notify_one();
        }
    }

    /// A thread or a task begins to wait for the timeline: it is looked at now, and after the
    /// shortest pause again.
    pub(super) fn expedite(&self, timeline: &Timeline) {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        let Some(listed) = queue.remove(timeline) else { return };
        queue.plan(Listed { since: now, next_look: now, ..listed });
        if !std::mem::replace(&mut queue.rung, true) {
            self.doorbell.notify_one();
        }
    }

    /// Starts the reaper of a device. A device by hand has none.
    pub(crate) fn start(context: &Arc<Context>) -> Result<Arc<Self>> {
        let listing = Arc::new(Self::default());
        if !context.is_by_hand() {
            let own = listing.clone();
            // It keeps the device open until it has entered.
            let (entering, device) = (context.clone(), context.name());
            crate::os::thread::spawn(format!("pinpool-reap-{device}"), move || {
                crate::sync::enter(crate::sync::Own::Reaper);
                entering.driver().enter_thread();
                drop(entering);
                foreign::live("the reaper panicked: it goes on", || own.run());
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
        // A fork's child has no reaper, and another thread of the parent may have held the lock.
        if crate::os::forked() {
            return;
        }
        if context.is_by_hand() {
            // The last look: what is still in flight after it stays so, with its memory.
            self.look(true);
        }
        self.queue.lock().closing = true;
        self.doorbell.notify_one();
    }

    /// The timeline of the stream with this number, or a new one.
    pub(crate) fn know(&self, id: Option<u64>, make: impl FnOnce() -> Arc<Timeline>) -> Arc<Timeline> {
        let mut known = self.known.lock();
        let mut same = known.iter().filter(|(_, other)| id.is_some() && *other == id);
        same.find_map(|(timeline, _)| timeline.upgrade()).unwrap_or_else(|| {
            // Only here: a program may adopt the same stream for each of its calls.
            known.retain(|(timeline, _)| timeline.strong_count() > 0);
            let timeline = make();
            known.push((Arc::downgrade(&timeline), id));
            timeline
        })
    }

    /// From here on [`know`](Self::know) gives this timeline for the number.
    pub(crate) fn identify(&self, timeline: &Arc<Timeline>, id: u64) {
        let mut known = self.known.lock();
        let own = known.iter_mut().filter(|(other, _)| std::ptr::eq(other.as_ptr(), &**timeline));
        own.for_each(|(_, number)| *number = Some(id));
    }

    /// All timelines of the device that are alive.
    pub(crate) fn known(&self) -> Vec<Arc<Timeline>> {
        self.known.lock().iter().filter_map(|(timeline, _)| timeline.upgrade()).collect()
    }

    /// Looks once at all listed timelines, on the calling thread: for a program that asks for it,
    /// and a device by hand. Or at those alone whose looks come soon: for a pool that runs short.
    /// Returns whether anything completed.
    pub(crate) fn look(&self, all: bool) -> bool {
        let mut queue = self.queue.lock();
        // Read under the lock: the reaper may have put off looks just before.
        let now = Instant::now();
        let (most, idle_looks) =
            if all { (usize::MAX, 1) } else { (queue.due(now + LONGEST_PAUSE).min(BATCH), IDLE_LOOKS) };
        let mut timelines = queue.take(now, most);
        drop(queue);
        // In an order that no clock decides, so that a run on a device by hand can be repeated.
        timelines.sort_by_key(|timeline| timeline.number());
        self.look_at(&timelines, true, idle_looks)
    }

    /// Looks at timelines. With `now` it closes what is open. Takes timelines off the list that
    /// `idle_looks` looks in a row found idle.
    fn look_at(&self, timelines: &[Arc<Timeline>], now: bool, idle_looks: u32) -> bool {
        let look = |timeline: &Arc<Timeline>| {
            foreign::survive("a look at a stream panicked: what is in flight on it is quarantined", || {
                timeline.advance(now)
            })
            .unwrap_or_else(|| {
                // The panic may have left the timeline half changed: it is given up as a whole.
                timeline.lose(&Error::Internal("a look at a stream panicked"));
                true
            })
        };
        let seen: Vec<bool> = timelines.iter().map(look).collect();
        let (at, mut queue) = (Instant::now(), self.queue.lock());
        for (timeline, progress) in timelines.iter().zip(&seen) {
            queue.note(timeline, *progress, at, idle_looks);
        }
        seen.contains(&true)
    }

    /// The thread's work until the device closes.
    fn run(&self) {
        let mut looked = Instant::now();
        while let Some(due) = self.next_due(looked) {
            self.look_at(&due, false, IDLE_LOOKS);
            looked = Instant::now();
        }
    }

    /// Waits until timelines are due: for [`SHORTEST_PAUSE`] at least after the last looks, so that
    /// several are due at once, and for [`LONGEST_PAUSE`] at most, since a timeline that is listed
    /// meanwhile wakes nobody. `None`: the device closes, and nothing is in flight.
    fn next_due(&self, looked: Instant) -> Option<Vec<Arc<Timeline>>> {
        let mut queue = self.queue.lock();
        loop {
            let Some(next) = queue.listed.front().map(|listed| listed.next_look) else {
                if queue.closing {
                    return None;
                }
                self.doorbell.wait(&mut queue);
                continue;
            };
            let (now, until) = (Instant::now(), next.clamp(looked + SHORTEST_PAUSE, looked + LONGEST_PAUSE));
            if std::mem::take(&mut queue.rung) || now >= until {
                let due = queue.due(now);
                return Some(queue.take(now, due));
            }
            self.doorbell.wait_until(&mut queue, until);
        }
    }
}

impl Queue {
    /// Puts a timeline on the list, where its next look belongs.
    fn plan(&mut self, listed: Listed) {
        let at = self.listed.partition_point(|other| other.next_look <= listed.next_look);
        self.listed.insert(at, listed);
    }

    fn remove(&mut self, timeline: &Timeline) -> Option<Listed> {
        let at = self.listed.iter().position(|listed| std::ptr::eq(&*listed.timeline, timeline))?;
        self.listed.remove(at)
    }

    /// How many timelines are due by then.
    fn due(&self, by: Instant) -> usize {
        self.listed.partition_point(|listed| listed.next_look <= by)
    }

    /// The timelines whose looks come next, at most `most`. Their looks after that are put off.
    fn take(&mut self, now: Instant, most: usize) -> Vec<Arc<Timeline>> {
        let longest = LONGEST_PAUSE * self.listed.len().div_ceil(BATCH).max(1) as u32;
        let taken: Vec<Listed> = self.listed.drain(..most.min(self.listed.len())).collect();
        let put_off = |mut listed: Listed| {
            let pause = now.saturating_duration_since(listed.since) / 8;
            listed.next_look = now + pause.clamp(SHORTEST_PAUSE, longest);
            let timeline = listed.timeline.clone();
            self.plan(listed);
            timeline
        };
        taken.into_iter().map(put_off).collect()
    }

    /// Notes what a look has found, if it is news. Takes the timeline off the list if it was idle
    /// for `idle_looks` looks. (The caller has another reference to it, so it is not dropped under
    /// the lock.)
    fn note(&mut self, timeline: &Timeline, progress: bool, now: Instant, idle_looks: u32) {
        let idle = timeline.count_idle();
        if !progress && idle == 0 {
            return;
        }
        let Some(listed) = self.remove(timeline) else { return };
        if idle < idle_looks || !timeline.unlist() {
            self.plan(Listed { since: now, next_look: now + SHORTEST_PAUSE, ..listed });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::stream::Stream;
    use crate::stream::timeline::tests::by_hand;

    const MS: Duration = Duration::from_millis(1);

    /// Streams of a device by hand, each with a hold in flight, and a queue that has had their
    /// timelines since then.
    fn listed(count: usize, then: Instant) -> (Vec<Stream>, Queue) {
        let (_, device) = by_hand();
        let streams: Vec<Stream> = (0..count).map(|_| device.stream().unwrap()).collect();
        streams.iter().for_each(|stream| drop(stream.hold(()).unwrap()));
        let mut queue = std::mem::take(&mut *device.listing().queue.lock());
        for listed in &mut queue.listed {
            assert_eq!(listed.next_look, listed.since + SHORTEST_PAUSE);
            (listed.since, listed.next_look) = (then, then + SHORTEST_PAUSE);
        }
        (streams, queue)
    }

    /// Looks at what is due each 50 us for `long`, and returns the numbers of the timelines looked
    /// at, with the times.
    fn looks(queue: &mut Queue, from: Instant, long: Duration) -> Vec<(Instant, u64)> {
        let mut looks = Vec::new();
        let mut now = from;
        while now < from + long {
            let due = queue.due(now);
            for timeline in queue.take(now, due) {
                queue.note(&timeline, false, now, IDLE_LOOKS);
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
        // What was complete just after a look is seen when an eighth of the time has passed again,
        // or a step later.
        let mut early = seen.windows(2).take_while(|w| w[1].0 < then + 6 * MS);
        assert!(early.all(|w| w[1].0 - w[0].0 <= (w[0].0 - then) / 8 + 2 * SHORTEST_PAUSE));
        let (timeline, now) = (streams[0].timeline(), then + 30 * MS);
        queue.note(timeline, true, now, IDLE_LOOKS);
        assert_eq!((queue.listed[0].since, queue.listed[0].next_look), (now, now + SHORTEST_PAUSE));
        // An empty timeline is news, too. It stays listed for some looks.
        timeline.lose(&Error::Internal("on purpose"));
        for _ in 1..IDLE_LOOKS {
            queue.note(timeline, false, now + MS, IDLE_LOOKS);
            assert_eq!(queue.listed[0].next_look, now + MS + SHORTEST_PAUSE);
        }
        queue.note(timeline, false, now, IDLE_LOOKS);
        assert!(queue.listed.is_empty());
    }

    /// The ends of the work are seen by a waiter, so no look of the reaper makes progress.
    #[test]
    fn only_idle_looks_in_a_row_end_the_listing() {
        let now = Instant::now();
        let (streams, mut queue) = listed(1, now);
        let (stream, timeline) = (&streams[0], streams[0].timeline());
        for _ in 0..3 {
            queue.note(timeline, false, now, IDLE_LOOKS);
            stream.synchronize().unwrap();
            (1..IDLE_LOOKS).for_each(|_| queue.note(timeline, false, now, IDLE_LOOKS));
            assert_eq!(queue.listed.len(), 1);
            drop(stream.hold(()).unwrap());
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
        // Pools that look on their own come shortly before the reaper, and look at each once.
        let now = queue.listed[0].next_look;
        assert_eq!(queue.due(now - MS), 0);
        let turns = (0..10).flat_map(|_| queue.take(now, queue.due(now + LONGEST_PAUSE).min(BATCH)));
        assert_eq!(turns.map(|timeline| timeline.number()).collect::<BTreeSet<u64>>(), numbers);
        assert_eq!(queue.due(now + LONGEST_PAUSE), 0);
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
        let pausing = std::thread::spawn(move || own.next_due(far).map(|due| due.len()));
        // Whether this comes before the pause or in it. It is news as well.
        listing.expedite(timeline);
        assert_eq!(pausing.join().unwrap(), Some(1));
        let queue = listing.queue.lock();
        assert!(!queue.rung && queue.listed[0].since < far && queue.listed[0].next_look < far);
    }

    #[test]
    fn a_pool_that_runs_short_leaves_idle_timelines_listed_for_a_while() {
        let (_, device) = by_hand();
        let streams: Vec<Stream> = (0..2 * BATCH).map(|_| device.stream().unwrap()).collect();
        let (listing, listed) = (device.listing(), || device.listing().queue.lock().listed.len());
        streams.iter().for_each(|stream| drop(stream.hold(()).unwrap()));
        listing.look(true);
        device.context().advance();
        // As if no time had passed: on a loaded machine it has, and not the same for all of them.
        let now = Instant::now();
        for listed in &mut listing.queue.lock().listed {
            (listed.since, listed.next_look) = (now, now);
        }
        (0..2 * IDLE_LOOKS - 2).for_each(|_| _ = listing.look(false));
        assert_eq!(listed(), 2 * BATCH, "none has been idle for so many looks");
        (0..4).for_each(|_| _ = listing.look(false));
        assert_eq!(listed(), 0);
    }
}

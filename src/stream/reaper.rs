//! The reaper: one thread of each device that closes idle sequence numbers, asks the driver about events, completes
//! entries and wakes waiters.
//!
//! The reaper makes no call that can block. While nothing is in flight, it sleeps. A timeline that becomes busy puts
//! itself on the reaper's list, and wakes the reaper only if it sleeps. A timeline stays listed for [`IDLE_LOOKS`] looks
//! after its last work, so that a timeline with short pauses does not wake the thread each time.
//!
//! # Which timelines are looked at
//!
//! A listed timeline is *fresh* for [`STALE_AFTER`] after it was listed, made progress, or got a waiter; then it is
//! *stale*: a long kernel runs there, or it hangs.
//!
//! - All fresh timelines are looked at in each round. Between two rounds the reaper pauses for an eighth of the time
//!   since it last saw progress, within 50 us and 1 ms. So it sees a completion at most an eighth later than it could.
//! - Of the stale ones, [`STALE_BATCH`] are looked at each millisecond, in turns. So up to that many are looked at as
//!   often as fresh ones with little progress, and a thousand streams that hang cost a hundredth of a core. News of a
//!   stale timeline makes it fresh.
//!
//! A pool that runs short looks at the timelines in the same way, on the thread of the request ([`Listing::glance`]): at
//! the fresh ones and at the next stale ones, a bounded number of each.
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
use std::ops::Bound::{Excluded, Unbounded};
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
/// A timeline without news for this long is stale. An eighth of it is the longest pause.
const STALE_AFTER: Duration = Duration::from_millis(8);
/// The stale timelines that are looked at in one millisecond; and the timelines with waiters that stay fresh.
const STALE_BATCH: usize = 64;

#[derive(Debug, Default)]
struct Inbox {
    /// Timelines that have put themselves on the list since the last round.
    listed: Vec<Arc<Timeline>>,
    /// The numbers of the timelines for which a thread or a task has begun to wait since then.
    expedited: BTreeSet<u64>,
    asleep: bool,
    closing: bool,
}

/// A listed timeline.
#[derive(Debug)]
struct Listed {
    timeline: Arc<Timeline>,
    /// The number of looks in a row that found it idle.
    idle: u32,
    /// When it was listed, made progress or got a waiter.
    fresh_since: Instant,
}

/// The listed timelines. Only the reaper changes these lists; pools read them.
#[derive(Debug, Default)]
struct Rounds {
    fresh: Vec<Listed>,
    /// By their numbers.
    stale: BTreeMap<u64, Listed>,
    /// The places where the next look of a pool begins.
    next_fresh: usize,
    next_stale: u64,
}

#[derive(Debug, Default)]
struct ReaperShared {
    inbox: Mutex<Inbox>,
    doorbell: Condvar,
    rounds: Mutex<Rounds>,
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
        let mut inbox = self.0.inbox.lock();
        inbox.listed.push(timeline.clone());
        if inbox.asleep {
            self.0.doorbell.notify_one();
        }
    }

    /// A thread or a task begins to wait for the timeline with this number: the reaper starts from the shortest pause
    /// again.
    pub(crate) fn expedite(&self, number: u64) {
        let mut inbox = self.0.inbox.lock();
        // While the reaper sleeps nothing is listed but what has woken it.
        if !inbox.asleep && inbox.expedited.insert(number) && inbox.expedited.len() == 1 {
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
        let mut inbox = self.0.inbox.lock();
        let (idle, busy) = std::mem::take(&mut inbox.listed).into_iter().partition(|t| t.unlist());
        inbox.listed = busy;
        drop(inbox);
        let idle: Vec<Arc<Timeline>> = idle;
        drop(idle);
        progress
    }

    /// Looks once at listed timelines, on the calling thread, for a pool that runs short: at those that were listed last,
    /// at fresh ones, and at the next stale ones, [`STALE_BATCH`] of each at most. Returns whether anything completed.
    pub(crate) fn glance(&self) -> bool {
        let mut due: Vec<Arc<Timeline>> = {
            let inbox = self.0.inbox.lock();
            inbox.listed.iter().rev().take(STALE_BATCH).cloned().collect()
        };
        self.0.rounds.lock().next_for_pool(&mut due);
        due.iter().fold(false, |progress, timeline| timeline.advance(true) | progress)
    }
}

impl Rounds {
    /// Fresh timelines and stale ones, a bounded number of each; other ones the next time, where there are more.
    fn next_for_pool(&mut self, due: &mut Vec<Arc<Timeline>>) {
        let count = self.fresh.len().min(STALE_BATCH);
        let from = if self.next_fresh < self.fresh.len() { self.next_fresh } else { 0 };
        let (before, behind) = self.fresh.split_at(from);
        due.extend(behind.iter().chain(before).take(count).map(|listed| listed.timeline.clone()));
        self.next_fresh = from + count;
        let next = next_stale(&self.stale, self.next_stale);
        let mut last = self.next_stale;
        due.extend(next.map(|(number, listed)| {
            last = *number;
            listed.timeline.clone()
        }));
        self.next_stale = last;
    }

    /// Makes a timeline fresh that is stale.
    fn refresh(&mut self, number: u64, now: Instant) {
        if let Some(listed) = self.stale.remove(&number) {
            self.fresh.push(Listed { fresh_since: now, ..listed });
        }
    }
}

/// The next stale timelines after the one with this number, around to that one.
fn next_stale(stale: &BTreeMap<u64, Listed>, after: u64) -> impl Iterator<Item = (&u64, &Listed)> {
    let behind = stale.range((Excluded(after), Unbounded));
    behind.chain(stale.range(..=after)).take(STALE_BATCH)
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
        self.listing.0.inbox.lock().closing = true;
        self.listing.0.doorbell.notify_one();
    }
}

/// The thread's work until the device closes.
fn run(shared: &ReaperShared) {
    let mut progressed = Instant::now();
    let mut stale_due = progressed;
    let mut cursor = 0;
    let mut looks: Vec<(Arc<Timeline>, Look)> = Vec::new();
    loop {
        let (listed, expedited) = {
            let mut inbox = shared.inbox.lock();
            while inbox.listed.is_empty() && shared.rounds.lock().is_empty() {
                if inbox.closing {
                    return;
                }
                inbox.asleep = true;
                inbox.expedited.clear();
                shared.doorbell.wait(&mut inbox);
                inbox.asleep = false;
            }
            (std::mem::take(&mut inbox.listed), std::mem::take(&mut inbox.expedited))
        };
        let now = Instant::now();
        if !listed.is_empty() || !expedited.is_empty() {
            progressed = now;
        }
        {
            let mut rounds = shared.rounds.lock();
            rounds.fresh.extend(listed.into_iter().map(|t| Listed {
                timeline: t,
                idle: 0,
                fresh_since: now,
            }));
            expedited.into_iter().for_each(|number| rounds.refresh(number, now));
            looks.extend(rounds.fresh.iter().map(|listed| (listed.timeline.clone(), Look::default())));
            if now >= stale_due && !rounds.stale.is_empty() {
                stale_due = now + LONGEST_SLEEP;
                let next = next_stale(&rounds.stale, cursor);
                looks.extend(next.map(|(_, listed)| (listed.timeline.clone(), Look::default())));
                cursor = looks.last().map_or(0, |(timeline, _)| timeline.number());
            }
        }
        for (timeline, seen) in &mut looks {
            seen.progress = look(timeline);
            (seen.idle, seen.waited) = timeline.rest();
        }
        if looks.iter().any(|(_, seen)| seen.progress) {
            progressed = Instant::now();
        }
        // Dropped after the lock is released: these may be the last references.
        let gone = shared.rounds.lock().note(&looks, Instant::now());
        drop(gone);
        looks.clear();
        let pause = (progressed.elapsed() / 8).clamp(SHORTEST_SLEEP, LONGEST_SLEEP);
        let mut inbox = shared.inbox.lock();
        if inbox.expedited.is_empty() && inbox.listed.is_empty() {
            shared.doorbell.wait_for(&mut inbox, pause);
        }
    }
}

/// What a look at a timeline has found.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// Something completed.
    progress: bool,
    /// Nothing is in flight.
    idle: bool,
    /// A thread or a task waits.
    waited: bool,
}

impl Rounds {
    fn is_empty(&self) -> bool {
        self.fresh.is_empty() && self.stale.is_empty()
    }

    /// Sorts the timelines by what the looks have found: first at all fresh ones in their order, then at stale ones.
    /// Returns those that are off the list.
    fn note(&mut self, looks: &[(Arc<Timeline>, Look)], now: Instant) -> Vec<Listed> {
        let mut gone = Vec::new();
        let (fresh, stale) = looks.split_at(self.fresh.len().min(looks.len()));
        let mut waited = 0;
        for (listed, (_, seen)) in std::mem::take(&mut self.fresh).into_iter().zip(fresh) {
            let idle = if seen.idle { listed.idle + 1 } else { 0 };
            let fresh_since = if seen.progress { now } else { listed.fresh_since };
            let listed = Listed { idle, fresh_since, ..listed };
            if idle >= IDLE_LOOKS && listed.timeline.unlist() {
                gone.push(listed);
                continue;
            }
            // Idle ones stay until they are off the list, which is soon.
            let is_stale = !seen.idle && now.saturating_duration_since(fresh_since) >= STALE_AFTER;
            waited += usize::from(is_stale && seen.waited);
            if is_stale && !(seen.waited && waited <= STALE_BATCH) {
                self.stale.insert(listed.timeline.number(), listed);
            } else {
                self.fresh.push(listed);
            }
        }
        for (timeline, seen) in stale {
            if seen.progress || seen.idle {
                self.refresh(timeline.number(), now);
            }
        }
        gone
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::device::handle::Device;
    use crate::device::host::{HostConfig, HostNode};
    use crate::stream::Stream;

    fn streams(count: usize) -> Vec<Stream> {
        let node = HostNode::new(HostConfig::new().stepped(1)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        (0..count).map(|_| device.stream().unwrap()).collect()
    }

    fn listed(stream: &Stream, fresh_since: Instant) -> Listed {
        Listed { timeline: stream.timeline().clone(), idle: 0, fresh_since }
    }

    const NOTHING: Look = Look { progress: false, idle: false, waited: false };

    #[test]
    fn stale_timelines_are_looked_at_by_turns() {
        const STREAMS: usize = 150;
        let (streams, now) = (streams(STREAMS), Instant::now());
        let stale: BTreeMap<u64, Listed> = streams.iter().map(|s| (s.number(), listed(s, now))).collect();
        let (mut looks, mut cursor) = (BTreeMap::new(), 0);
        const ROUNDS: usize = 75;
        for _ in 0..ROUNDS {
            let batch: Vec<u64> = next_stale(&stale, cursor).map(|(number, _)| *number).collect();
            assert_eq!(batch.len(), STALE_BATCH);
            cursor = batch[batch.len() - 1];
            batch.iter().for_each(|number| *looks.entry(*number).or_insert(0) += 1);
        }
        let each = ROUNDS * STALE_BATCH / STREAMS;
        assert!(looks.len() == STREAMS && looks.values().all(|n| *n == each), "{looks:?}");
        // A pool's turns go around as well, and a short list is taken whole, once.
        let mut rounds = Rounds { stale, ..Rounds::default() };
        let mut due = Vec::new();
        (0..3).for_each(|_| rounds.next_for_pool(&mut due));
        let numbers: BTreeSet<u64> = due.iter().map(|timeline| timeline.number()).collect();
        assert_eq!((due.len(), numbers.len()), (3 * STALE_BATCH, STREAMS));
        // So do its turns among fresh ones.
        let fresh = streams.iter().take(2 * STALE_BATCH).map(|stream| listed(stream, now)).collect();
        let (mut news, mut due) = (Rounds { fresh, ..Rounds::default() }, Vec::new());
        (0..4).for_each(|_| news.next_for_pool(&mut due));
        let fresh = news.fresh.iter().map(|listed| listed.timeline.number());
        let mut turns = fresh.map(|number| due.iter().filter(|t| t.number() == number).count());
        assert!(turns.all(|n| n == 2), "{due:?}");
        let few = rounds.stale.split_off(&streams[STREAMS - 3].number());
        assert_eq!(next_stale(&few, streams[STREAMS - 2].number()).count(), 3);
    }

    #[test]
    fn silence_makes_a_timeline_stale_and_news_makes_it_fresh() {
        let (streams, then) = (streams(3), Instant::now());
        let mut rounds = Rounds::default();
        rounds.fresh.extend(streams.iter().map(|stream| listed(stream, then)));
        let look = |rounds: &Rounds, seen: [Look; 3]| -> Vec<(Arc<Timeline>, Look)> {
            let all = rounds.fresh.iter().chain(rounds.stale.values());
            all.map(|listed| listed.timeline.clone()).zip(seen).collect()
        };
        let now = then + STALE_AFTER;
        // The first made progress, and a thread waits for the second.
        let seen = [Look { progress: true, ..NOTHING }, Look { waited: true, ..NOTHING }, NOTHING];
        let looks = look(&rounds, seen);
        assert!(rounds.note(&looks, now).is_empty());
        assert_eq!((rounds.fresh.len(), rounds.stale.len()), (2, 1));
        let looks = look(&rounds, [NOTHING; 3]);
        assert!(rounds.note(&looks, now).is_empty());
        assert_eq!((rounds.fresh.len(), rounds.stale.len()), (1, 2), "the wait is over");
        let looks = look(&rounds, [NOTHING, NOTHING, Look { progress: true, ..NOTHING }]);
        rounds.note(&looks, now);
        assert_eq!((rounds.fresh.len(), rounds.stale.len()), (2, 1));
        rounds.refresh(*rounds.stale.keys().next().unwrap(), now);
        let looks = look(&rounds, [NOTHING; 3]);
        rounds.note(&looks, now);
        assert_eq!((rounds.fresh.len(), rounds.stale.len()), (3, 0), "as fresh as a new one");
        // Idle ones leave the list, and not before they were idle for a while.
        for n in 1..=IDLE_LOOKS {
            let looks = look(&rounds, [Look { idle: true, ..NOTHING }; 3]);
            let gone = rounds.note(&looks, now + 2 * STALE_AFTER);
            assert_eq!(gone.len(), if n < IDLE_LOOKS { 0 } else { 3 }, "{n}");
        }
        assert!(rounds.is_empty());
    }

    #[test]
    fn a_bounded_number_of_timelines_stays_fresh_for_waiters() {
        const UNWAITED: usize = 10;
        let (streams, then) = (streams(UNWAITED + STALE_BATCH + 5), Instant::now());
        let mut rounds = Rounds::default();
        rounds.fresh.extend(streams.iter().map(|stream| listed(stream, then)));
        let look = |n| Look { waited: n >= UNWAITED, ..NOTHING };
        let looks: Vec<_> =
            streams.iter().enumerate().map(|(n, s)| (s.timeline().clone(), look(n))).collect();
        rounds.note(&looks, then + STALE_AFTER);
        assert_eq!((rounds.fresh.len(), rounds.stale.len()), (STALE_BATCH, UNWAITED + 5));
    }

    #[test]
    fn a_wait_ends_the_pause_of_the_reaper() {
        let listing = Listing::default();
        let (shared, (locked, is_locked)) = (listing.0.clone(), std::sync::mpsc::channel());
        let pausing = std::thread::spawn(move || {
            let mut inbox = shared.inbox.lock();
            locked.send(()).unwrap();
            let is_over = shared.doorbell.wait_for(&mut inbox, Duration::from_secs(10)).timed_out();
            (is_over, inbox.expedited.clone())
        });
        is_locked.recv().unwrap();
        // This gets the lock only when the other thread pauses.
        listing.expedite(7);
        assert_eq!(pausing.join().unwrap(), (false, BTreeSet::from([7])));
        // While the reaper sleeps, nothing that is listed can be waited for.
        *listing.0.inbox.lock() = Inbox { asleep: true, ..Inbox::default() };
        listing.expedite(7);
        assert!(listing.0.inbox.lock().expedited.is_empty());
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
        assert!(streams.iter().all(|stream| stream.timeline().rest().0));
        assert!(!device.listing().glance());
        // Streams that have ended are not known any more.
        assert_eq!(device.listing().0.known.lock().len(), 2);
        device.listing().advance();
        drop(streams);
        assert!(device.listing().0.known.lock().is_empty());
    }
}

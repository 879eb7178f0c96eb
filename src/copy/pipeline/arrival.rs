//! Seeing chunks arrive, and going on with them.
//!
//! When a chunk has arrived, the next is to be submitted, and its segment is to be drained or filled again. A thread
//! that finds out and wakes another one for that is late by as much as a chunk takes on the wire. So a worker that has
//! nothing to fill or drain *attends* to a chunk on the wire: it looks now and then whether that has arrived, preferably the
//! chunk whose segment is in its own processor's caches, submits what can be submitted, and goes on with the segment
//! itself. While it waits it listens for calls, and leaves the chunk where it was if there is something better to do.
//!
//! Where all workers are busy, or sleep, a direction's *watcher* does it for them, chunk by chunk. It also submits what needs no
//! worker: page-locked memory, downloads, and what a rate held up. As long as workers attend, it stands by and looks every
//! [`STAND_BY`], so that nobody has to wake it when they turn to something else.
//!
//! Nobody attends where the CPU makes the copies: it has better to do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::locks::MutexGuard;

use super::config::Priority;
use super::engine::{Engine, PATIENCE, State, UNWOUND};
use super::job::{Direction, End, Job, Kind, Landed};
use super::wire::{Arrives, Flight, Flying, Wire, place};
use crate::error::{Error, Result};
use crate::foreign;

/// Between two looks at a copy on the wire, or for a call.
pub(super) const PAUSE: Duration = Duration::from_micros(15);
/// For how long a copy is looked at, before it is waited for. Who is woken only when somebody else has found out is late.
const LOOK: Duration = Duration::from_millis(2);
/// For how long a watcher waits for a chunk before it looks whether there is a more urgent one.
const LATE: Duration = Duration::from_millis(10);
/// Turns of [`last_of`], after the first hundred some 1 ms each: where a lost device may keep the value for good, and where nobody
/// keeps it but a thread that has not run since.
const SOON: usize = 200;
pub(super) const SURELY: usize = 5000;
/// Between two looks of a watcher that has nothing to do itself, and for how long it stays about after the wire was busy.
const STAND_BY: Duration = Duration::from_micros(100);
const STAY: Duration = Duration::from_millis(2);

impl Flight {
    /// Unwinding is no arrival, but told like one: by waiting.
    fn is_here(&self) -> bool {
        foreign::survive(UNWOUND, || self.looks_here()).unwrap_or(true)
    }

    fn looks_here(&self) -> bool {
        match self {
            Self::Segment(flight) => flight.is_here(),
            Self::Parts(_, flights) => flights.last().is_none_or(Arrives::is_here),
            Self::InPlace(flights, ..) => flights.last().is_none_or(|flight| flight.is_here()),
            Self::Refused { flights, .. } => flights.iter().all(|flight| flight.is_here()),
        }
    }

    /// Waits for a while. Looks often at first, sleeping in between, where the device makes the copies.
    fn is_here_soon(&self, looks: bool) -> bool {
        let since = Instant::now();
        while looks && since.elapsed() < LOOK {
            if self.is_here() {
                return true;
            }
            std::thread::sleep(PAUSE);
        }
        let is_here = || match self {
            Self::Segment(flight) => flight.is_here_within(LATE),
            Self::Parts(_, flights) => flights.last().is_none_or(|flight| flight.is_here_within(LATE)),
            Self::InPlace(flights, ..) => flights.last().is_none_or(|flight| flight.is_here_within(LATE)),
            Self::Refused { flights, .. } => flights.iter().all(|flight| flight.is_here_within(LATE)),
        };
        foreign::survive(UNWOUND, is_here).unwrap_or(true)
    }
}

impl Flying {
    fn is_urgent(&self) -> bool {
        self.job.priority == Priority::Foreground
    }
}

impl Wire {
    /// Takes the chunk that somebody with time for one should wait for.
    fn next_to_watch(&mut self) -> Option<Flying> {
        let urgent = self.flying.iter().position(Flying::is_urgent);
        self.flying.remove(urgent.unwrap_or(0))
    }

    /// Back to where it was, before all that went later.
    fn flies_on(&mut self, flying: Flying) {
        let at = self.flying.iter().position(|other| other.number > flying.number);
        self.flying.insert(at.unwrap_or(self.flying.len()), flying);
    }
}

/// How attending ended.
#[derive(PartialEq, Eq)]
enum Seen {
    Here,
    Called,
    /// It takes its time.
    Late,
}

impl Engine {
    /// The watcher of one direction: see the module's page.
    pub(super) fn watch(&self, direction: Direction) {
        crate::os::sleep_precisely();
        let mut state = self.state.lock();
        let mut busy = Instant::now();
        // Such a device moves only when it is waited for.
        let stepped = self.device.context().driver().stepped().is_some();
        // Since when the pool has had nothing, as far as we have seen.
        let mut dry: Option<Instant> = None;
        loop {
            dry = if state.share.dry && !state.jobs.is_empty() {
                dry.or_else(|| Some(Instant::now()))
            } else {
                None
            };
            if dry.is_some_and(|since| since.elapsed() >= PATIENCE) {
                dry = None;
                self.look_again(&mut state);
            }
            let events = state.share.events;
            // Before: what is due between then and when it is looked at again would wait for nobody.
            let now = Instant::now();
            self.pump(&mut state, direction);
            // (What is ready and not on the wire waits for the rate.)
            if state.wires[direction as usize].on != [0, 0] {
                busy = Instant::now();
            }
            let attended = state.wires[direction as usize].attended > 0;
            if !attended {
                if let Some(flying) = state.wires[direction as usize].next_to_watch() {
                    if !stepped
                        && !MutexGuard::unlocked(&mut state, || flying.flight.is_here_soon(self.looks))
                    {
                        // There may be one in a hurry by now.
                        state.wires[direction as usize].flies_on(flying);
                        continue;
                    }
                    if let Some((job, landed)) = self.arrive(&mut state, direction, flying) {
                        state.landed.push_back((job, landed));
                        state.share.events += 1;
                        self.call(&state);
                    }
                    continue;
                }
            }
            if self.looks && !state.jobs.is_empty() && (attended || busy.elapsed() < STAY) {
                MutexGuard::unlocked(&mut state, || std::thread::sleep(STAND_BY));
                continue;
            }
            // (A place may be taken by somebody who looks for a segment in vain, and tells nobody.)
            if state.closing && state.jobs.is_empty() && state.wires[direction as usize].flying.is_empty() {
                return;
            }
            if state.share.events != events {
                continue;
            }
            // Looked for again when the rate allows it, if there is anything, and when the pool may have something again.
            let due = state.due.filter(|due| *due > now && !state.jobs.is_empty());
            let live = !state.jobs.is_empty();
            // Without a timer, a thread that finds the pool dry from now on has to say so.
            if state.share.lies_down(live) {
                dry.get_or_insert(now);
            }
            match due.into_iter().chain(dry.map(|since| since + PATIENCE)).min() {
                Some(until) => {
                    self.bells[direction as usize].wait_until(&mut state, until);
                    if due.is_some() {
                        // Workers that copy by themselves have waited for it too.
                        self.call_all(&state);
                    }
                }
                None => self.bells[direction as usize].wait(&mut state),
            }
        }
    }

    /// A worker that has nothing else to do attends to a chunk on the wire. `false`: there is none, or it takes its time.
    pub(super) fn attend(&self, state: &mut MutexGuard<'_, State>) -> bool {
        if !self.looks {
            return false;
        }
        let Some((direction, flying)) = self.nearest(state) else { return false };
        state.wires[direction as usize].attended += 1;
        let seen = self.listen(state, || {
            let since = Instant::now();
            loop {
                if flying.flight.is_here() {
                    return Seen::Here;
                }
                if self.is_called() {
                    return Seen::Called;
                }
                if since.elapsed() > LOOK {
                    return Seen::Late;
                }
                std::thread::sleep(PAUSE);
            }
        });
        state.wires[direction as usize].attended -= 1;
        if seen == Seen::Here {
            self.pass_on(state);
            if let Some((job, landed)) = self.arrive(state, direction, flying) {
                self.drain(state, &job, landed);
            }
            return true;
        }
        // Called since it stopped listening, perhaps.
        let called = seen == Seen::Called || self.is_called();
        self.pass_on(state);
        state.wires[direction as usize].flies_on(flying);
        self.bells[direction as usize].notify_one();
        called
    }

    /// Takes the chunk on the wire that this worker should attend to: the foreground's, or one of its own, or the oldest of
    /// the direction that has more of them.
    fn nearest(&self, state: &mut State) -> Option<(Direction, Flying)> {
        let me = self.worker();
        let first = |which: fn(&Flying, usize) -> bool| {
            Direction::BOTH.into_iter().find_map(|direction| {
                let mut flying = state.wires[direction as usize].flying.iter();
                Some((direction, flying.position(|flying| which(flying, me))?))
            })
        };
        let foreground = first(|flying, _| flying.is_urgent());
        let oldest = || {
            let many = |direction: &Direction| state.wires[*direction as usize].flying.len();
            let direction = Direction::BOTH.into_iter().max_by_key(many)?;
            Some((direction, 0))
        };
        let mine = || first(|flying, me| flying.by == me);
        let (direction, at) = foreground.or_else(mine).or_else(oldest)?;
        Some((direction, state.wires[direction as usize].flying.remove(at)?))
    }

    /// What a worker copies may wait for a place on the wire that nobody else hears of.
    pub(super) fn call_copier(&self, state: &State) {
        if state.jobs.iter().any(|live| live.job.kind == Kind::Direct) {
            self.call(state);
        }
    }

    /// Waits for a chunk on the wire. One that has landed is to be drained.
    fn arrive(
        &self,
        state: &mut MutexGuard<'_, State>,
        direction: Direction,
        flying: Flying,
    ) -> Option<(Arc<Job>, Landed)> {
        let Flying { job, index, wanted, flight, .. } = flying;
        let at = job.plan.range(index).0;
        // A segment, or none any more, if there was one; and how it went.
        let staged = match &flight {
            Flight::InPlace(..) => false,
            Flight::Refused { segment, .. } => segment.is_some(),
            Flight::Segment(_) | Flight::Parts(..) => true,
        };
        let waited = self.outside(state, || {
            Ok(match flight {
                Flight::Segment(flight) => match flight.wait() {
                    Ok(buf) => (Some(Some(buf)), Ok(())),
                    Err(error) => (Some(None), Err(error)),
                },
                Flight::Parts(shared, flights) => {
                    let results: Vec<Result<()>> = flights.into_iter().map(|f| f.wait().map(drop)).collect();
                    (Some(last_of(shared, SOON)), results.into_iter().collect())
                }
                Flight::InPlace(flights, place, start, len) => {
                    let results: Vec<Result<()>> = flights.into_iter().map(|f| f.arrive()).collect();
                    let all: Result<()> = results.into_iter().collect();
                    (None, all.and_then(|()| place.arrived(start, len)))
                }
                Flight::Refused { flights, segment, error } => {
                    flights.into_iter().for_each(|flight| drop(flight.arrive()));
                    (segment.map(|shared| shared.and_then(|shared| last_of(shared, SOON))), Err(error))
                }
            })
        });
        let (segment, result) = waited.unwrap_or_else(|unwound| (staged.then_some(None), Err(unwound)));
        state.wires[direction as usize].on[place(job.priority)] -= 1;
        let idle = state.wires[direction as usize].is_idle();
        // Before anybody is woken, which takes its time.
        self.pump(state, direction);
        // And for whom the pump cannot speak.
        self.call_copier(state);
        if job.kind == Kind::File && result.is_ok() {
            state.windows.tuner.arrived(wanted as usize, segment.is_none(), idle, Instant::now());
        }
        let failed = result.map_err(|error| match error {
            Error::Shrunk { .. } | Error::Read { .. } => error,
            error => job.failed_at(at, error),
        });
        match (direction, failed, segment) {
            (Direction::Down, Ok(()), Some(Some(buf))) if !job.stopped() => {
                let landed = Landed { index, buf };
                if job.kind == Kind::Caller {
                    job.land(landed);
                } else {
                    return Some((job, landed));
                }
            }
            (direction, result, segment) => {
                // Of a download that has stopped nobody drains anything: it waits for no worker.
                let unread = direction == Direction::Down && segment.is_some() && result.is_ok();
                match segment {
                    Some(Some(buf)) if self.worker() > 0 => self.bring_back(state, direction, buf),
                    Some(buf) => self.give_back(state, direction, buf),
                    None => {}
                }
                let end = if unread { End::Dropped } else { result.map(|()| wanted).into() };
                self.end(state, &job, index, end);
            }
        }
        None
    }
}

/// What the timelines have let go of, or are about to: they do so right after they say that a copy is complete. `None`:
/// they do not, and it goes when they do.
pub(super) fn last_of<T>(mut shared: Arc<T>, turns: usize) -> Option<T> {
    for turn in 0..turns {
        match Arc::try_unwrap(shared) {
            Ok(value) => return Some(value),
            Err(still) => shared = still,
        }
        if turn < 100 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Arc::into_inner(shared)
}

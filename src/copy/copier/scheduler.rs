//! Which job the workers turn to, and how they sleep.
//!
//! Jobs wait by priority and direction, and there in the order in which they were started. A worker that looks for work
//! gets the first job of which a chunk can be taken. Of jobs of one priority it gets one in the direction that it asks
//! for, if there is one. Workers ask for both directions by turns, since the link carries both at once. Jobs that may block
//! wait in queues of their own, so that the worker which never blocks finds the others behind them. Where there is no
//! job, a worker that owns no chunk parks. Starting a job wakes as many workers as it is worth.
//!
//! All of it is under one lock. A worker joins the list of sleepers under the lock under which it has seen that there
//! is nothing to do; so a job that starts later finds the worker in the list, and wakes it. A poke, by which a worker
//! looks after the device ring, or for what another one cannot take, is remembered where no worker is in the list.
//! `loom_models` has the models of both.

use std::collections::VecDeque;
use std::time::Instant;

use super::types::{Direction, Priority};
use crate::sync::Mutex;
use crate::sync::thread::{self, Thread};

/// What the scheduler knows of a job.
pub(super) trait Takes {
    /// Whether a chunk of it can be taken. Once `false`, it stays so.
    fn may_take(&self) -> bool;
    fn kind(&self) -> Kind;
}

/// What of a job decides which workers take its chunks, and when.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kind {
    pub(super) priority: Priority,
    pub(super) direction: Direction,
    /// Its work may block the worker that takes a chunk.
    pub(super) may_block: bool,
    /// The worker that takes a chunk brings a segment.
    pub(super) needs_segment: bool,
}

/// How many jobs are looked at for one that needs no segment.
const NEAR: usize = 64;

/// See the module's page. `J`: a job's handle.
#[derive(Debug)]
pub(super) struct Scheduler<J> {
    state: Mutex<SchedulerState<J>>,
}

#[derive(Debug)]
struct SchedulerState<J> {
    /// Of the foreground, then bulk ones; by direction.
    jobs: [[Queues<J>; 2]; 2],
    next_job: u64,
    sleepers: Vec<Sleeper>,
    next_sleeper: u64,
    /// No worker slept when one was to look around: the next one does not park.
    poked: bool,
    closed: bool,
}

#[derive(Debug)]
struct Sleeper {
    number: u64,
    /// It takes chunks of jobs that may block, too.
    may_block: bool,
    thread: Thread,
}

/// Jobs of one priority and direction, each with its number in the order of their starts.
#[derive(Debug)]
struct Queues<J> {
    steady: VecDeque<(u64, J)>,
    /// Jobs that may block.
    blocking: VecDeque<(u64, J)>,
}

impl<J: Takes + Clone> Queues<J> {
    fn new() -> Self {
        Self { steady: VecDeque::new(), blocking: VecDeque::new() }
    }

    /// The first job of which a chunk can be taken, by a worker that may block or may not.
    fn first(&mut self, may_block: bool) -> Option<J> {
        for jobs in [&mut self.steady, &mut self.blocking] {
            while jobs.front().is_some_and(|(_, job)| !job.may_take()) {
                jobs.pop_front();
            }
        }
        let blocking = self.blocking.front().filter(|_| may_block);
        let first = self.steady.front().into_iter().chain(blocking).min_by_key(|(number, _)| *number);
        first.map(|(_, job)| job.clone())
    }
}

impl<J: Takes + Clone> Scheduler<J> {
    pub(super) fn new() -> Self {
        let jobs = [(); 2].map(|()| [Queues::new(), Queues::new()]);
        let (sleepers, next_job, next_sleeper) = (Vec::new(), 0, 0);
        let state = SchedulerState { jobs, next_job, sleepers, next_sleeper, poked: false, closed: false };
        Self { state: Mutex::new(state) }
    }

    /// Starts a job that is worth so many workers.
    pub(super) fn add(&self, job: J, workers: usize) {
        let mut state = self.state.lock();
        let Kind { priority, direction, may_block, .. } = job.kind();
        let rank = usize::from(priority == Priority::Bulk);
        state.next_job += 1;
        let number = state.next_job;
        let queues = &mut state.jobs[rank][direction as usize];
        let jobs = if may_block { &mut queues.blocking } else { &mut queues.steady };
        jobs.push_back((number, job));
        let sleepers: Vec<_> = (0..workers).map_while(|_| state.sleeper(may_block)).collect();
        drop(state);
        sleepers.iter().for_each(|sleeper| sleeper.thread.unpark());
    }

    /// The first job of which a chunk can be taken, by a worker that may block or may not. Of one priority, one in this
    /// direction first.
    pub(super) fn first(&self, direction: Direction, may_block: bool) -> Option<J> {
        self.state.lock().first(direction, may_block)
    }

    /// A job of which a chunk can be taken by a worker for which there is no segment now, if there is one among the first.
    /// It does not block.
    pub(super) fn without_segment(&self, direction: Direction) -> Option<J> {
        let state = self.state.lock();
        let near = |jobs: &[Queues<J>; 2]| {
            let ways = [direction, direction.other()].into_iter();
            ways.flat_map(|way| jobs[way as usize].steady.iter().take(NEAR))
                .find(|(_, job)| job.may_take() && !job.kind().needs_segment)
                .map(|(_, job)| job.clone())
        };
        state.jobs.iter().find_map(near)
    }

    /// Whether there is a chunk to be taken, now or when a segment is free, by a worker that may block or may not.
    pub(super) fn has_work(&self, may_block: bool) -> bool {
        self.state.lock().has_work(may_block)
    }

    /// Has one worker look around once more before it parks, though no job has started: a worker that sleeps, or else the
    /// next that would.
    pub(super) fn poke(&self) {
        let mut state = self.state.lock();
        let only_blocking = !state.has_work(false);
        let sleeper = state.sleeper(only_blocking);
        state.poked |= sleeper.is_none();
        drop(state);
        sleeper.into_iter().for_each(|sleeper| sleeper.thread.unpark());
    }

    /// Parks this thread until there may be work for it, or until the deadline. `false`: there is none, and none is to
    /// come.
    pub(super) fn park(&self, deadline: Option<Instant>, may_block: bool) -> bool {
        let mut state = self.state.lock();
        if state.has_work(may_block) || std::mem::take(&mut state.poked) {
            return true;
        }
        if state.closed {
            return false;
        }
        state.next_sleeper += 1;
        let number = state.next_sleeper;
        state.sleepers.push(Sleeper { number, may_block, thread: thread::current() });
        drop(state);
        thread::park_until(deadline);
        self.state.lock().sleepers.retain(|other| other.number != number);
        true
    }

    /// No further job is started. Workers end when there is nothing left to do.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let sleepers = std::mem::take(&mut state.sleepers);
        drop(state);
        sleepers.iter().for_each(|sleeper| sleeper.thread.unpark());
    }
}

impl<J: Takes + Clone> SchedulerState<J> {
    fn first(&mut self, direction: Direction, may_block: bool) -> Option<J> {
        for jobs in &mut self.jobs {
            for way in [direction, direction.other()] {
                if let Some(job) = jobs[way as usize].first(may_block) {
                    return Some(job);
                }
            }
        }
        None
    }

    fn has_work(&mut self, may_block: bool) -> bool {
        self.first(Direction::Up, may_block).is_some()
    }

    /// Takes the worker out that fell asleep last: one that may block, or any.
    fn sleeper(&mut self, may_block: bool) -> Option<Sleeper> {
        let at = self.sleepers.iter().rposition(|sleeper| sleeper.may_block || !may_block)?;
        Some(self.sleepers.remove(at))
    }
}

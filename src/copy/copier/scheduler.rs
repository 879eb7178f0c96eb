//! Which job the workers turn to, and how they sleep.
//!
//! Jobs wait by priority, direction and [`Kind`], and there in the order in which they were started. A worker that
//! looks for work gets the first job of the kinds that it takes of which a chunk can be taken. Of jobs of one priority
//! it gets one in the direction that it asks for, if there is one. Workers alternate between the directions, since the
//! link carries both at once. Where there is no job, a worker that owns no chunk parks. Starting a job wakes as many
//! workers as it is worth.
//!
//! All of it is under one lock, under which those of jobs are taken. A worker joins the list of sleepers under the lock
//! under which it has seen that there is nothing to do; so a job that starts later finds the worker in the list, and
//! wakes it. A poke, by which a worker looks after the device ring, or for what another one cannot take, is remembered
//! where no worker is in the list. `loom_models` has the models of both.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::job::Job;
use super::types::{Direction, Kind, Priority};
use crate::sync::Mutex;
use crate::sync::thread::{self, Thread};

/// See the module's page.
#[derive(Default)]
pub(super) struct Scheduler {
    state: Mutex<SchedulerState>,
}

#[derive(Default)]
struct SchedulerState {
    /// Of the foreground, then bulk ones; by direction.
    jobs: [[Queues; 2]; 2],
    next_job: u64,
    sleepers: Vec<Sleeper>,
    next_sleeper: u64,
    /// No worker slept when one was to look around: the next one does not park.
    poked: bool,
    closed: bool,
}

struct Sleeper {
    number: u64,
    /// It takes chunks of this kind, and of lesser ones.
    most: Kind,
    thread: Thread,
}

/// Jobs of one priority and direction by kind, each with its number in the order of their starts.
#[derive(Default)]
struct Queues([VecDeque<(u64, Arc<Job>)>; 3]);

impl Queues {
    /// The first job of which a chunk can be taken, of this kind or a lesser one. Of a job of which none can be taken,
    /// none ever can.
    fn first(&mut self, most: Kind) -> Option<Arc<Job>> {
        let kinds = &mut self.0[..=most as usize];
        for jobs in &mut *kinds {
            while jobs.front().is_some_and(|(_, job)| !job.may_take()) {
                jobs.pop_front();
            }
        }
        let first = kinds.iter().filter_map(VecDeque::front).min_by_key(|(number, _)| *number);
        first.map(|(_, job)| job.clone())
    }
}

impl Scheduler {
    /// Starts a job that is worth so many workers.
    pub(super) fn add(&self, job: Arc<Job>, workers: usize) {
        let (rank, kind) = (usize::from(job.priority == Priority::Bulk), job.kind);
        let mut state = self.state.lock();
        state.next_job += 1;
        let number = state.next_job;
        state.jobs[rank][job.direction as usize].0[kind as usize].push_back((number, job));
        let sleepers: Vec<_> = (0..workers).map_while(|_| state.sleeper(kind)).collect();
        drop(state);
        sleepers.iter().for_each(|sleeper| sleeper.thread.unpark());
    }

    /// The first job of which a chunk can be taken, of this kind or a lesser one. Of one priority, one in this
    /// direction first.
    pub(super) fn first(&self, direction: Direction, most: Kind) -> Option<Arc<Job>> {
        self.state.lock().first(direction, most)
    }

    /// Whether there is a chunk of this kind, or a lesser one, to be taken, now or when a segment is free.
    pub(super) fn has_work(&self, most: Kind) -> bool {
        self.state.lock().has_work(most)
    }

    /// Has one worker look around once more before it parks, though no job has started: a worker that sleeps, or else
    /// the next that would.
    pub(super) fn poke(&self) {
        let mut state = self.state.lock();
        let kind = if state.has_work(Kind::Staged) { Kind::Staged } else { Kind::Blocking };
        let sleeper = state.sleeper(kind);
        state.poked |= sleeper.is_none();
        drop(state);
        sleeper.into_iter().for_each(|sleeper| sleeper.thread.unpark());
    }

    /// Parks this thread until there may be work for it, or until the deadline. `false`: there is none, and none is to
    /// come.
    pub(super) fn park(&self, deadline: Option<Instant>, most: Kind) -> bool {
        let mut state = self.state.lock();
        if state.has_work(most) || std::mem::take(&mut state.poked) {
            return true;
        }
        if state.closed {
            return false;
        }
        state.next_sleeper += 1;
        let number = state.next_sleeper;
        state.sleepers.push(Sleeper { number, most, thread: thread::current() });
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

impl SchedulerState {
    fn first(&mut self, direction: Direction, most: Kind) -> Option<Arc<Job>> {
        for jobs in &mut self.jobs {
            for way in [direction, direction.other()] {
                if let Some(job) = jobs[way as usize].first(most) {
                    return Some(job);
                }
            }
        }
        None
    }

    fn has_work(&mut self, most: Kind) -> bool {
        self.first(Direction::Up, most).is_some()
    }

    /// Takes the worker out that fell asleep last, of those that take chunks of this kind.
    fn sleeper(&mut self, kind: Kind) -> Option<Sleeper> {
        let at = self.sleepers.iter().rposition(|sleeper| sleeper.most >= kind)?;
        Some(self.sleepers.remove(at))
    }
}

//! Which job the workers turn to, and how they sleep.
//!
//! Jobs wait by priority, direction and [`Kind`], in the order of their starts. Workers alternate
//! between the directions, since the link carries both at once. A worker without chunk and job
//! parks. Starting a job wakes as many workers as it is worth.
//!
//! One lock covers all of it; jobs' locks are taken under it. A worker joins the sleepers under the
//! same lock under which it saw nothing to do, so a job that starts later finds it there and wakes
//! it. `loom_models` has the models.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::job::Job;
use super::types::{Direction, Kind, Priority};
use crate::sync::Mutex;
use crate::sync::thread::{self, Thread};

#[derive(Default)]
pub(super) struct Scheduler {
    state: Mutex<SchedulerState>,
}

/// Jobs, each with its number in the order of their starts.
type Queue = VecDeque<(u64, Arc<Job>)>;

#[derive(Default)]
struct SchedulerState {
    /// Of the foreground, then bulk ones; by direction, and there by kind.
    jobs: [[[Queue; 3]; 2]; 2],
    /// Each with a number of its own, and the kind up to which it takes chunks.
    sleepers: Vec<(u64, Kind, Thread)>,
    next_number: u64,
    closed: bool,
}

impl Scheduler {
    /// Queues a job and wakes up to `workers` workers for it.
    pub(super) fn add(&self, job: Arc<Job>, workers: usize) {
        let kind = job.kind;
        let rank = match job.of.priority {
            Priority::Foreground => 0,
            Priority::Bulk => 1,
        };
        let mut state = self.state.lock();
        let number = state.number();
        state.jobs[rank][job.of.direction as usize][kind as usize].push_back((number, job));
        let sleepers: Vec<_> = (0..workers).map_while(|_| state.sleeper(kind)).collect();
        drop(state);
        sleepers.iter().for_each(Thread::unpark);
    }

    /// The first job of at most the kind `most` that has a chunk to take: by priority, and then in
    /// this direction first.
    pub(super) fn first(&self, direction: Direction, most: Kind) -> Option<Arc<Job>> {
        self.state.lock().first(direction, most)
    }

    /// Wakes a sleeping worker, to look for work and after the ring. One that is awake looks by
    /// itself before it sleeps.
    pub(super) fn poke(&self) {
        let mut state = self.state.lock();
        let mut has = |kind| state.first(Direction::Up, kind).is_some();
        let kind = if !has(Kind::Staged) && has(Kind::Blocking) { Kind::Blocking } else { Kind::Staged };
        let sleeper = state.sleeper(kind);
        drop(state);
        sleeper.iter().for_each(Thread::unpark);
    }

    /// Parks this thread until there may be work for it, or until the deadline. `false`: there is
    /// none, and none is to come.
    pub(super) fn park(&self, deadline: Option<Instant>, most: Kind) -> bool {
        let mut state = self.state.lock();
        if state.first(Direction::Up, most).is_some() {
            return true;
        }
        if state.closed {
            return false;
        }
        let number = state.number();
        state.sleepers.push((number, most, thread::current()));
        drop(state);
        thread::park_until(deadline);
        self.state.lock().sleepers.retain(|(other, ..)| *other != number);
        true
    }

    /// No further job is started. Workers end when there is nothing left to do.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let sleepers = std::mem::take(&mut state.sleepers);
        drop(state);
        sleepers.iter().for_each(|(.., thread)| thread.unpark());
    }
}

impl SchedulerState {
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn first(&mut self, direction: Direction, most: Kind) -> Option<Arc<Job>> {
        for directions in &mut self.jobs {
            for way in [direction, direction.other()] {
                let kinds = &mut directions[way as usize][..=most as usize];
                for jobs in &mut *kinds {
                    // A job that has no chunk to take now never has one again.
                    while jobs.front().is_some_and(|(_, job)| !job.may_take()) {
                        jobs.pop_front();
                    }
                }
                let first = kinds.iter().filter_map(VecDeque::front).min_by_key(|(number, _)| *number);
                if let Some((_, job)) = first {
                    return Some(job.clone());
                }
            }
        }
        None
    }

    /// Takes out the worker that fell asleep last among those for chunks of this kind.
    fn sleeper(&mut self, kind: Kind) -> Option<Thread> {
        let at = self.sleepers.iter().rposition(|(_, most, _)| *most >= kind)?;
        Some(self.sleepers.remove(at).2)
    }
}

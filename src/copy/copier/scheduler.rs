//! Which job the workers turn to, and how they sleep.
//!
//! Jobs wait in the order in which they were started. A worker that looks for work gets the first job of which a chunk
//! can be taken. Where there is none, a worker that owns no chunk parks. Starting a job wakes as many workers as
//! it is worth.
//!
//! All of it is under one lock. A worker joins the list of sleepers under the lock under which it has seen that there
//! is nothing to do; so a job that starts later finds the worker in the list, and wakes it. A poke, by which a worker
//! looks after the device ring, is remembered where no worker is in the list. `loom_models` has the models of both.

use std::collections::VecDeque;
use std::time::Instant;

use crate::sync::Mutex;
use crate::sync::thread::{self, Thread};

/// What the scheduler knows of a job.
pub(super) trait Takes {
    /// Whether a chunk of it can be taken. Once `false`, it stays so.
    fn may_take(&self) -> bool;
}

/// See the module's page. `J`: a job's handle.
#[derive(Debug)]
pub(super) struct Scheduler<J> {
    state: Mutex<SchedulerState<J>>,
}

#[derive(Debug)]
struct SchedulerState<J> {
    jobs: VecDeque<J>,
    sleepers: Vec<(u64, Thread)>,
    next_sleeper: u64,
    /// No worker slept when one was to look around: the next one does not park.
    poked: bool,
    closed: bool,
}

/// How a worker's sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Yes,
    /// The deadline has passed.
    Late,
    /// There is no work, and there will be none.
    Closed,
}

impl<J: Takes + Clone> Scheduler<J> {
    pub(super) fn new() -> Self {
        let state = SchedulerState {
            jobs: VecDeque::new(),
            sleepers: Vec::new(),
            next_sleeper: 0,
            poked: false,
            closed: false,
        };
        Self { state: Mutex::new(state) }
    }

    /// Starts a job that is worth so many workers.
    pub(super) fn add(&self, job: J, workers: usize) {
        let mut state = self.state.lock();
        state.jobs.push_back(job);
        let awake = state.sleepers.len().saturating_sub(workers);
        let sleepers = state.sleepers.split_off(awake);
        drop(state);
        sleepers.iter().for_each(|(_, thread)| thread.unpark());
    }

    /// The first job of which a chunk can be taken.
    pub(super) fn first(&self) -> Option<J> {
        self.state.lock().first()
    }

    /// Whether there is a chunk to be taken, now or when a segment is free.
    pub(super) fn has_work(&self) -> bool {
        self.state.lock().first().is_some()
    }

    /// Has one worker look around once more before it parks, though no job has started: a worker that sleeps, or else the
    /// next that would.
    pub(super) fn poke(&self) {
        let mut state = self.state.lock();
        let sleeper = state.sleepers.pop();
        state.poked |= sleeper.is_none();
        drop(state);
        sleeper.into_iter().for_each(|(_, thread)| thread.unpark());
    }

    /// Parks this thread until there may be work, or until the deadline.
    pub(super) fn park(&self, deadline: Option<Instant>) -> Woken {
        let mut state = self.state.lock();
        if state.first().is_some() || std::mem::take(&mut state.poked) {
            return Woken::Yes;
        }
        if state.closed {
            return Woken::Closed;
        }
        state.next_sleeper += 1;
        let number = state.next_sleeper;
        state.sleepers.push((number, thread::current()));
        drop(state);
        thread::park_until(deadline);
        let mut state = self.state.lock();
        let before = state.sleepers.len();
        state.sleepers.retain(|(other, _)| *other != number);
        if state.sleepers.len() < before { Woken::Late } else { Woken::Yes }
    }

    /// No further job is started. Workers end when there is nothing left to do.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let sleepers = std::mem::take(&mut state.sleepers);
        drop(state);
        sleepers.iter().for_each(|(_, thread)| thread.unpark());
    }
}

impl<J: Takes + Clone> SchedulerState<J> {
    fn first(&mut self) -> Option<J> {
        while let Some(job) = self.jobs.front() {
            if job.may_take() {
                return Some(job.clone());
            }
            self.jobs.pop_front();
        }
        None
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use std::sync::Arc;

    use super::*;
    use crate::sync::{AtomicU64, Ordering, model};

    /// A job of so many chunks.
    #[derive(Clone)]
    struct Counted(Arc<AtomicU64>);

    impl Takes for Counted {
        fn may_take(&self) -> bool {
            self.0.load(Ordering::SeqCst) > 0
        }
    }

    impl Counted {
        fn take(&self) -> bool {
            let take = |left: u64| left.checked_sub(1);
            self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
        }
    }

    fn work(scheduler: &Scheduler<Counted>) -> u64 {
        let mut taken = 0;
        loop {
            while let Some(job) = scheduler.first() {
                taken += u64::from(job.take());
            }
            if scheduler.park(None) == Woken::Closed {
                return taken;
            }
        }
    }

    /// Every chunk is taken, and no worker sleeps for good: loom tells of a thread that does.
    #[test]
    fn loom_copier_workers_find_all_chunks() {
        model("copier: two workers, two jobs, and the end", 3, || {
            let scheduler = Arc::new(Scheduler::new());
            let workers: Vec<_> = (0..2)
                .map(|_| {
                    let scheduler = scheduler.clone();
                    loom::thread::spawn(move || work(&scheduler))
                })
                .collect();
            for chunks in [2, 1] {
                scheduler.add(Counted(Arc::new(AtomicU64::new(chunks))), 1);
            }
            scheduler.close();
            let taken: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
            assert_eq!(taken, 3);
        });
    }

    /// What was made before a poke is seen by a worker, also by one that looked for it before and parks only now.
    #[test]
    fn loom_copier_a_poked_worker_looks_again() {
        model("copier: a worker parks, another thread pokes", 3, || {
            let (scheduler, made) = (Arc::new(Scheduler::<Counted>::new()), Arc::new(AtomicU64::new(0)));
            let worker = {
                let (scheduler, made) = (scheduler.clone(), made.clone());
                loom::thread::spawn(move || {
                    while made.load(Ordering::SeqCst) == 0 {
                        let _ = scheduler.park(None);
                    }
                })
            };
            made.store(1, Ordering::SeqCst);
            scheduler.poke();
            worker.join().unwrap();
        });
    }

    /// A worker that sleeps is woken by a job that starts later.
    #[test]
    fn loom_copier_a_sleeper_is_woken() {
        model("copier: a worker sleeps, a job starts", 3, || {
            let scheduler = Arc::new(Scheduler::new());
            let worker = {
                let scheduler = scheduler.clone();
                loom::thread::spawn(move || {
                    let mut taken = 0;
                    while taken < 1 {
                        match scheduler.first() {
                            Some(job) => taken += u64::from(Counted::take(&job)),
                            None => _ = scheduler.park(None),
                        }
                    }
                })
            };
            scheduler.add(Counted(Arc::new(AtomicU64::new(1))), 2);
            worker.join().unwrap();
        });
    }
}

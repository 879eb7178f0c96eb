//! Loom models of copiers: every chunk is taken, and no worker sleeps through a job that starts; a caller that waits
//! for a job is woken, and what it has lent is touched by no worker any more.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::task::{Wake, Waker};

use super::chunk::{Chunk, Cursor, Cut, Ramp};
use super::job::{End, Job, Plan, Start};
use super::scheduler::Scheduler;
use super::types::{Direction, Kind, Priority};
use crate::error::Result;
use crate::sync::{AtomicU64, Ordering, UnsafeCell, model, step, thread};

/// What a thread of a copier does. Returns the number of chunks that it has taken.
fn serve(scheduler: &Scheduler) -> u64 {
    let mut taken = 0;
    loop {
        while let Some(job) = scheduler.first(Direction::Up, Kind::Blocking) {
            taken += u64::from(job.take(None).is_some());
        }
        if !scheduler.park(None, Kind::Blocking) {
            return taken;
        }
    }
}

/// Every chunk is taken, and no worker sleeps for good: loom tells of a thread that does.
#[test]
fn loom_copier_workers_find_all_chunks() {
    model("copier: two workers, two jobs, and the end", 3, || {
        let scheduler = Arc::new(Scheduler::default());
        let workers = [(); 2].map(|()| {
            let scheduler = scheduler.clone();
            loom::thread::spawn(move || serve(&scheduler))
        });
        for chunks in [2, 1] {
            scheduler.add(job(chunks), 1);
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
        let (scheduler, made) = (Arc::new(Scheduler::default()), Arc::new(AtomicU64::new(0)));
        let worker = {
            let (scheduler, made) = (scheduler.clone(), made.clone());
            loom::thread::spawn(move || {
                while made.load(Ordering::SeqCst) == 0 {
                    let _ = scheduler.park(None, Kind::Blocking);
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
        let scheduler = Arc::new(Scheduler::default());
        let worker = {
            let scheduler = scheduler.clone();
            loom::thread::spawn(move || {
                let mut taken = 0;
                while taken < 1 {
                    match scheduler.first(Direction::Up, Kind::Blocking) {
                        Some(job) => taken += u64::from(job.take(None).is_some()),
                        None => _ = scheduler.park(None, Kind::Blocking),
                    }
                }
            })
        };
        scheduler.add(job(1), 2);
        worker.join().unwrap();
    });
}

/// Two chunks of memory that a caller lends. A chunk has a cell, which each access goes to.
struct Memory([UnsafeCell<u32>; 2]);

// SAFETY: the cells are loom's, which checks each access.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Self([UnsafeCell::new(0), UnsafeCell::new(0)]))
    }

    /// What the caller does with its memory when it has it back.
    fn reuse(&self) {
        for cell in &self.0 {
            // SAFETY: loom fails the model if a worker is at it.
            cell.with_mut(|cell| unsafe { *cell += 1 });
        }
    }
}

impl Plan for Memory {
    fn next(&self, cursor: &mut Cursor, _most: usize) -> Chunk {
        let end = Cut { piece: cursor.at.piece + 1, from: 0 };
        cursor.cut_off(end, 1, Vec::new())
    }

    fn drain(&self, chunk: &Chunk, _bytes: &[u8]) -> Result<()> {
        // SAFETY: loom fails the model if another thread is at it.
        self.0[chunk.index].with_mut(|cell| unsafe { *cell += 1 });
        Ok(())
    }
}

fn begin(total: u64) -> Start {
    let (direction, priority) = (Direction::Down, Priority::Bulk);
    let (named, memories) = (None, Vec::new());
    let ramp = Ramp { most: 1, least: 1, hands: 1 };
    Start { direction, priority, total, named, memories, timeout: None, ramp }
}

fn job(chunks: u64) -> Arc<Job> {
    Job::new(begin(chunks), Memory::new())
}

/// A job of two chunks, and a worker that takes what it finds of it.
fn start(memory: &Arc<Memory>) -> (Arc<Job>, loom::thread::JoinHandle<()>) {
    let job = Job::new(begin(2), memory.clone());
    let worker = job.clone();
    let worker = loom::thread::spawn(move || {
        while let Some(chunk) = worker.take(None) {
            step();
            // SAFETY: the chunk was taken and has not ended.
            let said = unsafe { worker.plan() }.drain(&chunk, &[]);
            step();
            worker.end(&chunk, said.into());
        }
    });
    (job, worker)
}

/// A caller that lends memory has it back when its job is over, and is woken then.
#[test]
fn loom_copier_lent_memory_comes_back() {
    model("copier: a caller lends memory", 3, || {
        let memory = Memory::new();
        let (job, worker) = start(&memory);
        // With a wake-up missed it sleeps for good, which loom tells.
        job.wait(None, |progress| progress.over);
        memory.reuse();
        assert!(job.outcome().is_some_and(|outcome| outcome.is_ok()));
        worker.join().unwrap();
    });
}

/// A caller that cancels a job has its memory back when the job is over.
#[test]
fn loom_copier_cancelled_leaves_memory() {
    model("copier: a caller cancels", 3, || {
        let memory = Memory::new();
        let (job, worker) = start(&memory);
        step();
        job.cancel();
        job.wait(None, |progress| progress.over);
        memory.reuse();
        assert!(job.outcome().is_some());
        worker.join().unwrap();
    });
}

/// A task that waits until a job is over, on a thread of its own.
fn await_end(job: &Job) {
    struct Unparks(thread::Thread);
    impl Wake for Unparks {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unparks(thread::current())));
    while !job.is_over() {
        job.wake_landed(&waker, u64::MAX);
        if !job.is_over() {
            thread::park_until(None);
        }
    }
}

/// Each of the tasks that wait for a job is woken.
#[test]
fn loom_copier_all_tasks_are_woken() {
    model("copier: two tasks wait for a job", 3, || {
        let memory = Memory::new();
        let (job, worker) = start(&memory);
        let other = job.clone();
        let other = loom::thread::spawn(move || await_end(&other));
        // With a wake-up missed it sleeps for good, which loom tells.
        await_end(&job);
        memory.reuse();
        other.join().unwrap();
        worker.join().unwrap();
    });
}

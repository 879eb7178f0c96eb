//! Loom models of copiers: every chunk is taken, and no worker sleeps through a job that starts; a
//! caller that waits for a job is woken, and what it has lent is touched by no worker any more.
//! Loom reports a thread that is never woken.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::task::{Wake, Waker};

use super::chunk::{Chunk, Cursor, Cut, Ramp};
use super::job::{END, Job, Plan, Start};
use super::scheduler::Scheduler;
use super::types::{Direction, Kind, Priority};
use crate::error::Result;
use crate::sync::{UnsafeCell, model, step, thread};

/// A thread of a copier, which takes at least `least` chunks. Returns how many it has taken.
fn worker(scheduler: &Arc<Scheduler>, least: u64) -> loom::thread::JoinHandle<u64> {
    let scheduler = scheduler.clone();
    loom::thread::spawn(move || {
        let (mut taken, mut goes_on) = (0, true);
        while goes_on {
            while let Some(job) = scheduler.first(Direction::Up, Kind::Blocking) {
                taken += u64::from(job.take(None).is_some());
            }
            goes_on = taken < least && scheduler.park(None, Kind::Blocking);
        }
        taken
    })
}

#[test]
fn loom_copier_workers_find_all_chunks() {
    model("copier: two workers, two jobs, and the end", 3, || {
        let scheduler = Arc::new(Scheduler::default());
        let workers = [(); 2].map(|()| worker(&scheduler, u64::MAX));
        for chunks in [2, 1] {
            scheduler.add(job(chunks, &Memory::new()), 1);
        }
        scheduler.close();
        let taken: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        assert_eq!(taken, 3);
    });
}

/// A worker that sleeps is woken by a job that starts later.
#[test]
fn loom_copier_a_sleeper_is_woken() {
    model("copier: a worker sleeps, a job starts", 3, || {
        let scheduler = Arc::new(Scheduler::default());
        let worker = worker(&scheduler, 1);
        scheduler.add(job(1, &Memory::new()), 2);
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

fn job(total: u64, memory: &Arc<Memory>) -> Arc<Job> {
    let (direction, priority) = (Direction::Down, Priority::Bulk);
    let (name, trace, memories, timeout) = (None, None, Arc::new(()), None);
    let ramp = Ramp { most: 1, least: 1, hands: 1 };
    Job::new(Start { direction, priority, total, name, trace, memories, timeout, ramp }, memory.clone())
}

/// A caller lends two chunks of memory to a job, and a worker takes the chunks that it finds. The
/// caller has the memory back when it has waited for the end.
fn lent(name: &'static str, wait: fn(&Arc<Job>)) {
    model(name, 3, move || {
        let memory = Memory::new();
        let job = job(2, &memory);
        let own = job.clone();
        let worker = loom::thread::spawn(move || {
            while let Some(chunk) = own.take(None) {
                step();
                // SAFETY: the chunk was taken and has not ended.
                let said = unsafe { own.plan() }.drain(&chunk, &[]);
                step();
                own.end(&chunk, said.into());
            }
        });
        wait(&job);
        memory.reuse();
        assert!(job.outcome().is_some());
        worker.join().unwrap();
    });
}

#[test]
fn loom_copier_lent_memory_comes_back() {
    lent("copier: a caller lends memory", |job| {
        job.wait(None, END);
        assert!(job.outcome().is_some_and(|outcome| outcome.is_ok()));
    });
}

/// A caller that cancels a job has its memory back when the job is over.
#[test]
fn loom_copier_cancelled_leaves_memory() {
    lent("copier: a caller cancels", |job| {
        step();
        job.cancel();
        job.wait(None, END);
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
    while !job.poll(&waker, END - 1) {
        thread::park_until(None);
    }
}

/// Each of the tasks that wait for a job is woken.
#[test]
fn loom_copier_all_tasks_are_woken() {
    lent("copier: two tasks wait for a job", |job| {
        let other = job.clone();
        let other = loom::thread::spawn(move || await_end(&other));
        await_end(job);
        other.join().unwrap();
    });
}

//! Loom models of copiers: every chunk is taken, and no worker sleeps through a job that starts; a caller that waits
//! for a job is woken, and what it has lent is touched by no worker any more; every copy is seen complete once.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use super::chunk::{Chunk, Cursor, Cut, Ramp};
use super::flights::Flights;
use super::job::{End, Job, Plan, Start};
use super::scheduler::{Kind, Scheduler, Takes};
use super::types::{Direction, Priority};
use crate::error::Result;
use crate::sync::{AtomicBool, AtomicU64, Ordering, UnsafeCell, model, step};

/// A job of so many chunks.
#[derive(Clone)]
struct Counted(Arc<AtomicU64>);

impl Takes for Counted {
    fn may_take(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }

    fn kind(&self) -> Kind {
        Kind::default()
    }
}

impl Counted {
    fn new(chunks: u64) -> Self {
        Self(Arc::new(AtomicU64::new(chunks)))
    }

    fn take(&self) -> bool {
        let take = |left: u64| left.checked_sub(1);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }
}

/// What a thread of a copier does. Returns the number of chunks that it has taken.
fn serve(scheduler: &Scheduler<Counted>) -> u64 {
    let mut taken = 0;
    loop {
        while let Some(job) = scheduler.first(Direction::Up, true) {
            taken += u64::from(job.take());
        }
        if !scheduler.park(None, true) {
            return taken;
        }
    }
}

/// Every chunk is taken, and no worker sleeps for good: loom tells of a thread that does.
#[test]
fn loom_copier_workers_find_all_chunks() {
    model("copier: two workers, two jobs, and the end", 3, || {
        let scheduler = Arc::new(Scheduler::new());
        let workers = [(); 2].map(|()| {
            let scheduler = scheduler.clone();
            loom::thread::spawn(move || serve(&scheduler))
        });
        for chunks in [2, 1] {
            scheduler.add(Counted::new(chunks), 1);
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
                    let _ = scheduler.park(None, true);
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
                    match scheduler.first(Direction::Up, true) {
                        Some(job) => taken += u64::from(Counted::take(&job)),
                        None => _ = scheduler.park(None, true),
                    }
                }
            })
        };
        scheduler.add(Counted::new(1), 2);
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
        cursor.cut_off(end, 1)
    }

    fn drain(&self, chunk: &Chunk, _bytes: &[u8]) -> Result<()> {
        // SAFETY: loom fails the model if another thread is at it.
        self.0[chunk.index].with_mut(|cell| unsafe { *cell += 1 });
        Ok(())
    }
}

fn begin(total: u64) -> Start {
    let (direction, priority) = (Direction::Down, Priority::Bulk);
    let (name, memories) = (None, Vec::new());
    let ramp = Ramp { most: 1, least: 1, hands: 1 };
    Start { direction, priority, total, name, memories, trace: None, timeout: None, ramp }
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
        job.wait(None, Job::is_over);
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
        job.wait(None, Job::is_over);
        memory.reuse();
        assert!(job.outcome().is_some());
        worker.join().unwrap();
    });
}

/// Copies that threads submit and ask about.
struct Air {
    flights: Flights<usize>,
    complete: [AtomicBool; 2],
    /// Copies that were submitted and not seen complete, and how often each one was seen. No part of the protocol, so
    /// not loom's.
    aloft: AtomicUsize,
    seen: [AtomicUsize; 2],
}

impl Air {
    fn new(depth: usize) -> Arc<Self> {
        let complete = [AtomicBool::new(false), AtomicBool::new(false)];
        Arc::new(Self { flights: Flights::new(), complete, aloft: 0.into(), seen: [0.into(), 0.into()] })
    }

    /// What `Engine::land` does.
    fn land(&self) -> bool {
        step();
        let Some(mut asking) = self.flights.ask() else { return false };
        let before = asking.left.len();
        asking.left.retain(|copy| {
            step();
            let complete = self.complete[*copy].load(Ordering::Relaxed);
            if complete {
                self.seen[*copy].fetch_add(1, Ordering::Relaxed);
                self.aloft.fetch_sub(1, Ordering::Relaxed);
                self.flights.release();
            }
            !complete
        });
        asking.left.len() < before
    }

    /// What a worker does that has filled a segment. Whether there was room.
    fn send(&self, copy: usize, depth: usize) -> bool {
        step();
        let room = self.flights.reserve(depth) || self.land() && self.flights.reserve(depth);
        if room {
            assert!(
                self.aloft.fetch_add(1, Ordering::Relaxed) < depth,
                "more copies in flight than the depth"
            );
            step();
            self.flights.sent(copy);
        }
        room
    }
}

/// Two threads submit a copy each, where there is room, and ask about all copies. Each copy is seen complete once, and
/// no more are in flight than there may be.
#[test]
fn loom_copier_copies_are_seen() {
    for depth in [1, 2] {
        model("copier: two threads submit, and see what is complete", 3, move || {
            let air = Air::new(depth);
            let other = {
                let air = air.clone();
                loom::thread::spawn(move || {
                    let sent = air.send(1, depth);
                    air.land();
                    sent
                })
            };
            let mut sent = [air.send(0, depth), false];
            air.complete[0].store(true, Ordering::Relaxed);
            air.land();
            sent[1] = other.join().unwrap();
            air.complete[1].store(true, Ordering::Relaxed);
            air.land();
            for (sent, seen) in sent.into_iter().zip(&air.seen) {
                assert_eq!(usize::from(sent), seen.load(Ordering::Relaxed), "a copy was not seen, or twice");
            }
            assert!(sent[0] || sent[1]);
        });
    }
}

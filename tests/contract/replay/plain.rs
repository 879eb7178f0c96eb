//! The plain pool, which is what many servers have: a list of buffers under a lock, and a handle that returns its
//! buffer when it is dropped. It knows nothing of copies in flight.
//!
//! Its bytes are relaxed atomics, so that its race is a defined one: the bytes read are wrong, the test is not. Its
//! [`Engine`] is a thread that runs each copy only when `lag` more were submitted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::{Random, SLOTS, WORDS, word};

type Cells = [AtomicU64; WORDS];

/// Room for a message.
pub struct Words(Box<Cells>);

impl Words {
    fn new() -> Self {
        Self(Box::new(std::array::from_fn(|_| AtomicU64::new(0))))
    }

    pub fn write(&self, seq: u64, n: usize) {
        self.0[..n].iter().zip(0..).for_each(|(cell, i)| cell.store(word(seq, i), RELAXED));
    }

    pub fn is(&self, seq: u64, n: usize) -> bool {
        self.0[..n].iter().zip(0..).all(|(cell, i)| cell.load(RELAXED) == word(seq, i))
    }

    fn copy(&self, to: &Self, n: usize) {
        self.0.iter().zip(&*to.0).take(n).for_each(|(from, to)| to.store(from.load(RELAXED), RELAXED));
    }
}

/// A device's memory.
pub fn memory() -> Vec<Arc<Words>> {
    (0..SLOTS).map(|_| Arc::new(Words::new())).collect()
}

const RELAXED: Ordering = Ordering::Relaxed;

#[derive(Default)]
pub struct Pool {
    free: Mutex<Vec<Arc<Words>>>,
    checkouts: AtomicU64,
}

pub struct Buf<'a> {
    pub words: Arc<Words>,
    pool: &'a Pool,
}

impl Pool {
    pub fn checkout(&self) -> Buf<'_> {
        self.checkouts.fetch_add(1, RELAXED);
        let words = self.free.lock().unwrap().pop();
        Buf { words: words.unwrap_or_else(|| Arc::new(Words::new())), pool: self }
    }
}

impl Drop for Buf<'_> {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap().push(self.words.clone());
    }
}

enum Job {
    Copy(Arc<Words>, Arc<Words>, usize),
    Sync(SyncSender<()>),
}

/// A stream: copies in order, each only when `lag` more have been submitted or a caller waits.
pub struct Engine {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    pub fn new(lag: usize) -> Self {
        let (jobs, queue) = channel();
        let thread = std::thread::spawn(move || serve(&queue, lag));
        Self { jobs: Some(jobs), thread: Some(thread) }
    }

    fn send(&self, job: Job) {
        self.jobs.as_ref().unwrap().send(job).unwrap();
    }

    /// Submits a copy of that many words.
    pub fn copy(&self, from: &Arc<Words>, to: &Arc<Words>, n: usize) {
        self.send(Job::Copy(from.clone(), to.clone(), n));
    }

    pub fn synchronize(&self) {
        let (tell, told) = sync_channel(1);
        self.send(Job::Sync(tell));
        told.recv().unwrap();
    }
}

fn serve(queue: &Receiver<Job>, lag: usize) {
    let mut late = VecDeque::new();
    let run = |(from, to, n): (Arc<Words>, Arc<Words>, usize)| from.copy(&to, n);
    for job in queue {
        match job {
            Job::Copy(from, to, n) => {
                late.push_back((from, to, n));
                if late.len() > lag {
                    late.pop_front().into_iter().for_each(run);
                }
            }
            Job::Sync(tell) => {
                late.drain(..).for_each(run);
                tell.send(()).unwrap();
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.jobs = None;
        self.thread.take().map(JoinHandle::join);
    }
}

/// Runs rounds against a plain pool until it has handed out that many buffers. Returns checkouts and corruptions.
pub fn run(target: u64, round: impl Fn(&Pool, &mut Random, u64) -> u64) -> (u64, u64) {
    let pool = Pool::default();
    let mut random = Random(1);
    let (mut wrong, mut seq) = (0, 1);
    while pool.checkouts.load(RELAXED) < target {
        wrong += round(&pool, &mut random, seq);
        seq += 10_000;
    }
    (pool.checkouts.load(RELAXED), wrong)
}

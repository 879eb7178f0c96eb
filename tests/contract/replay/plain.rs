//! The plain pool, which is what many servers have: a list of buffers under a lock, and a handle that returns its
//! buffer when it is dropped. It knows nothing of copies in flight.
//!
//! Its bytes are relaxed atomics, so that its race is a defined one: the bytes read are wrong, the test is not. On the
//! host its [`Engine`] is a thread that runs each copy only when `lag` more were submitted; on a GPU (`gpu.rs`) or an
//! Ascend device (`npu.rs`) it is a stream of the driver's.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::worker::Site;
use super::{Random, WORDS, message, word};

pub type Cells = [AtomicU64; WORDS];

/// Device memory that is not the host's.
pub trait Remote: Send + Sync {
    fn write(&self, words: &[u64]);
    fn read(&self, words: &mut [u64]);
    /// Its address on the device.
    #[cfg_attr(
        not(any(feature = "acl", feature = "cuda")),
        allow(dead_code, reason = "only a GPU's memory has one")
    )]
    fn at(&self) -> u64;
}

/// Room for a message.
pub enum Words {
    Host(Box<Cells>),
    #[cfg_attr(not(any(feature = "acl", feature = "cuda")), allow(dead_code, reason = "for GPUs"))]
    Pinned(&'static Cells),
    #[cfg_attr(not(any(feature = "acl", feature = "cuda")), allow(dead_code, reason = "for GPUs"))]
    Device(Box<dyn Remote>),
}

impl Words {
    pub fn new() -> Self {
        Self::Host(Box::new(std::array::from_fn(|_| AtomicU64::new(0))))
    }

    pub fn cells(&self) -> Option<&Cells> {
        match self {
            Self::Host(cells) => Some(cells),
            Self::Pinned(cells) => Some(cells),
            Self::Device(_) => None,
        }
    }

    pub fn write(&self, seq: u64, n: usize) {
        match self {
            Self::Device(memory) => memory.write(&message(seq, n)[..n]),
            _ => {
                self.cells().into_iter().flatten().zip(0..n).for_each(|(c, i)| c.store(word(seq, i), RELAXED))
            }
        }
    }

    pub fn is(&self, seq: u64, n: usize) -> bool {
        let mut words = [0; WORDS];
        match self {
            Self::Device(memory) => memory.read(&mut words[..n]),
            _ => self.cells().into_iter().flatten().zip(&mut words).for_each(|(c, w)| *w = c.load(RELAXED)),
        }
        words[..n] == message(seq, n)[..n]
    }

    fn copy(&self, to: &Self, n: usize) {
        let (from, to) = (self.cells().expect("on the host"), to.cells().expect("on the host"));
        from.iter().zip(to).take(n).for_each(|(from, to)| to.store(from.load(RELAXED), RELAXED));
    }
}

const RELAXED: Ordering = Ordering::Relaxed;

pub struct Pool<'a> {
    site: &'a dyn Site,
    free: Mutex<Vec<Arc<Words>>>,
    checkouts: AtomicU64,
}

pub struct Buf<'a> {
    pub words: Arc<Words>,
    pool: &'a Pool<'a>,
}

impl Pool<'_> {
    pub fn checkout(&self) -> Buf<'_> {
        self.checkouts.fetch_add(1, RELAXED);
        let words = self.free.lock().unwrap().pop();
        Buf { words: words.unwrap_or_else(|| Arc::new(self.site.buffer())), pool: self }
    }
}

impl Drop for Buf<'_> {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap().push(self.words.clone());
    }
}

/// A stream.
pub trait Engine: Sync {
    /// Submits a copy of that many words.
    fn copy(&self, from: &Arc<Words>, to: &Arc<Words>, n: usize);
    fn synchronize(&self);
}

enum Job {
    Copy(Arc<Words>, Arc<Words>, usize),
    Sync(SyncSender<()>),
}

/// Copies in order, each only when `lag` more have been submitted or a caller waits.
pub struct Late {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Late {
    pub fn new(lag: usize) -> Self {
        let (jobs, queue) = channel();
        let thread = std::thread::spawn(move || serve(&queue, lag));
        Self { jobs: Some(jobs), thread: Some(thread) }
    }

    fn send(&self, job: Job) {
        self.jobs.as_ref().unwrap().send(job).unwrap();
    }
}

impl Engine for Late {
    fn copy(&self, from: &Arc<Words>, to: &Arc<Words>, n: usize) {
        self.send(Job::Copy(from.clone(), to.clone(), n));
    }

    fn synchronize(&self) {
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

impl Drop for Late {
    fn drop(&mut self) {
        self.jobs = None;
        self.thread.take().map(JoinHandle::join);
    }
}

/// Runs rounds against a plain pool until it has handed out that many buffers. Returns checkouts and corruptions.
pub fn run(site: &dyn Site, target: u64, round: impl Fn(&Pool<'_>, &mut Random, u64) -> u64) -> (u64, u64) {
    let pool = Pool { site, free: Mutex::default(), checkouts: AtomicU64::new(0) };
    let mut random = Random(1);
    let (mut wrong, mut seq) = (0, 1);
    while pool.checkouts.load(RELAXED) < target {
        wrong += round(&pool, &mut random, seq);
        seq += 10_000;
    }
    (pool.checkouts.load(RELAXED), wrong)
}

//! One transfer: what is to be moved, how far it has come, and how it ended.
//!
//! A chunk is *begun* when somebody takes its index, and *ended* when its bytes have arrived or are known not to. A job is
//! over when no chunk is left to begin and none is under way; so whoever is told that it is over knows that nobody touches
//! its source, its sink or the caller's memory any more. After the first error, or when it is cancelled, no further chunk
//! begins.
//!
//! The engine's lock is taken before a job's, never the other way round.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

use super::arrival::{SURELY, last_of};
use super::config::Priority;
use super::file::FileSource;
use super::plan::Plan;
use super::source::ours::Token;
use super::source::{Sink, Source};
use super::trace::Trace;
use super::wire::InPlace;
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::foreign::{Owned, Task};

/// How a chunk ended.
#[derive(Debug)]
pub(super) enum End {
    /// So many bytes of it have arrived.
    Arrived(u64),
    Failed(Error),
    /// It was let go, since its transfer had stopped.
    Dropped,
}

impl From<Result<u64>> for End {
    fn from(result: Result<u64>) -> Self {
        result.map_or_else(Self::Failed, Self::Arrived)
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Up,
    Down,
}

impl Direction {
    pub(super) const BOTH: [Self; 2] = [Self::Up, Self::Down];

    pub(super) fn other(self) -> Self {
        match self {
            Self::Up => Self::Down,
            Self::Down => Self::Up,
        }
    }
}

/// What fills or drains the chunks, without what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The pipeline's workers.
    Workers,
    /// The same, from a file.
    File,
    InPlace,
    /// Memory that the device takes as it is: workers call the driver, and wait.
    Direct,
    /// The caller.
    Caller,
}

/// What fills or drains the chunks.
pub(super) enum Body {
    /// Threads of the pipeline read it.
    Source(Arc<dyn Source>),
    File(Arc<FileSource>),
    /// Page-locked as it is.
    InPlace(Arc<dyn InPlace>),
    /// The caller fills the chunks, in order.
    Fed,
    /// Threads of the pipeline write it.
    Sink(Arc<dyn Sink>),
    /// The caller drains the chunks, in order.
    Pulled,
}

impl Body {
    fn kind(&self, staged: bool) -> Kind {
        match self {
            Self::Source(source) if !staged && source.memory(Token).is_some() => Kind::Direct,
            Self::Sink(sink) if !staged && sink.place(Token).is_some() => Kind::Direct,
            Self::Source(_) | Self::Sink(_) => Kind::Workers,
            // Read in any case, and no measure of how fast reading is.
            Self::File(file) if file.is_tapped() => Kind::Workers,
            Self::File(_) => Kind::File,
            Self::InPlace(_) => Kind::InPlace,
            Self::Fed | Self::Pulled => Kind::Caller,
        }
    }
}

/// How far a transfer has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
    /// Since the transfer was started, until now or until it was over.
    pub elapsed: Duration,
    /// Everything of the source (or of the sink) before this offset has arrived.
    pub landed_to: u64,
    /// Whether it is over, one way or another.
    pub over: bool,
}

impl Progress {
    /// Of several transfers together.
    #[cfg(feature = "safetensors")]
    pub(crate) fn of(done: u64, total: u64, elapsed: Duration, landed_to: u64, over: bool) -> Self {
        Self { done, total, elapsed, landed_to, over }
    }

    /// Bytes a second, on average.
    #[must_use]
    pub fn rate(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.done as f64 / seconds } else { 0.0 }
    }

    /// How long the rest takes, if it goes on like this. `None` before anything has arrived.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        let left = self.total.saturating_sub(self.done) as f64;
        let rate = self.rate();
        (rate > 0.0).then(|| Duration::try_from_secs_f64(left / rate).unwrap_or(Duration::MAX))
    }
}

/// See the module's page.
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) direction: Direction,
    pub(super) priority: Priority,
    pub(super) plan: Plan,
    /// Of the source or sink, for errors.
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Set to nothing when the job is over, before that is told. Each reader or writer has a share of it, whose end
    /// [`finish`](Self::finish) waits for.
    body: Mutex<Option<Arc<Owned<Body>>>>,
    run: Mutex<Run>,
    /// Whoever waits for a part of it waits here, and whoever waits for its end there.
    bell: Condvar,
    end: Condvar,
    since: Instant,
    /// How far it had come when it was over, for those who do not keep it.
    pub(super) last: Arc<OnceLock<Progress>>,
}

/// A chunk that has landed in a segment and waits for its caller.
pub(super) struct Landed {
    pub(super) index: usize,
    pub(super) buf: PinnedBuf,
}

struct Run {
    /// Index of the next chunk to begin, and one past the last.
    next: usize,
    limit: usize,
    /// Begun, and given back untouched.
    returned: Vec<usize>,
    /// Begun and not ended.
    active: usize,
    done: u64,
    /// The first chunk that has not arrived, and those after it that have.
    missing: usize,
    early: BTreeSet<usize>,
    /// The error that lies first in the source, and where.
    error: Option<(u64, Error)>,
    cancelled: bool,
    /// A feed that may still begin chunks, or a puller that holds one.
    open: bool,
    /// Somebody was told that it is over, and finishes it.
    finishing: bool,
    trace: Option<Trace>,
    over: Option<(Result<()>, Duration)>,
    landed: BTreeMap<usize, Landed>,
    /// Who is to be told of whatever happens. (To clone a waker is to run the caller's code, which is not done under a lock.)
    wakers: Vec<(u64, Arc<Task>)>,
    next_waker: u64,
}

impl Run {
    fn stopped(&self) -> bool {
        self.error.is_some() || self.cancelled
    }

    /// Whether it is over, told once.
    fn is_over(&mut self) -> bool {
        let all = self.next >= self.limit && self.returned.is_empty();
        let over = self.active == 0 && !self.open && (self.stopped() || all);
        over && !std::mem::replace(&mut self.finishing, true)
    }
}

impl Job {
    pub(super) fn new(
        id: u64,
        direction: Direction,
        priority: Priority,
        plan: Plan,
        name: String,
        body: Body,
        staged: bool,
    ) -> Arc<Self> {
        let kind = body.kind(staged);
        let open = kind == Kind::Caller;
        let run = Run {
            next: 0,
            limit: plan.count(),
            returned: Vec::new(),
            active: 0,
            done: 0,
            missing: 0,
            early: BTreeSet::new(),
            error: None,
            cancelled: false,
            open,
            finishing: false,
            trace: None,
            over: None,
            landed: BTreeMap::new(),
            wakers: Vec::new(),
            next_waker: 0,
        };
        let (body, run) = (Mutex::new(Some(Arc::new(Owned::new(body)))), Mutex::new(run));
        let since = Instant::now();
        let (bell, end) = (Condvar::new(), Condvar::new());
        let last = Arc::default();
        Arc::new(Self { id, direction, priority, plan, name, kind, body, run, bell, end, since, last })
    }

    /// The span that ends with it. Before it is started.
    pub(super) fn traced(self: Arc<Self>, trace: Trace) -> Arc<Self> {
        self.run.lock().trace = Some(trace);
        self
    }

    /// What it reads or writes, until it is over. Dropped by the last user: not to be asked for under the engine's lock.
    pub(super) fn body(&self) -> Option<Arc<Owned<Body>>> {
        self.body.lock().clone()
    }

    // --- chunks ------------------------------------------------------------------------------------------------------

    /// Whether a chunk can begin.
    pub(super) fn has_next(&self) -> bool {
        let run = self.run.lock();
        !run.stopped() && (run.next < run.limit || !run.returned.is_empty())
    }

    /// Begins up to `most` chunks that follow each other: the first, and how many.
    pub(super) fn begin(&self, most: usize) -> Option<(usize, usize)> {
        let mut run = self.run.lock();
        if run.stopped() {
            return None;
        }
        if let Some(index) = run.returned.pop() {
            run.active += 1;
            return Some((index, 1));
        }
        if run.next >= run.limit {
            return None;
        }
        let count = most.min(run.limit - run.next);
        let first = run.next;
        run.next += count;
        run.active += count;
        Some((first, count))
    }

    /// Gives chunks back that were begun, and not touched: they begin again. `true`: see [`end`](Self::end).
    #[must_use]
    pub(super) fn unbegin(&self, first: usize, count: usize) -> bool {
        let mut run = self.run.lock();
        run.active -= count;
        run.returned.extend((first..first + count).rev());
        run.is_over()
    }

    /// Gives the last chunk back that was begun, untouched, by the only one who begins any: it was never begun.
    pub(super) fn retract(&self, index: usize) {
        let mut run = self.run.lock();
        debug_assert_eq!(index + 1, run.next, "the last one");
        run.active -= 1;
        run.next = index;
    }

    /// How many chunks were not begun yet, those given back left out.
    pub(super) fn untouched(&self) -> usize {
        let run = self.run.lock();
        if run.returned.is_empty() { run.limit - run.next } else { 0 }
    }

    /// How many chunks were begun and have not ended.
    pub(super) fn active(&self) -> usize {
        self.run.lock().active
    }

    /// Whether what is under way need not be finished.
    pub(super) fn stopped(&self) -> bool {
        self.run.lock().stopped()
    }

    /// Ends a chunk: its bytes have arrived, or not. `true`: the job is over, and is to be [finished](Self::finish).
    #[must_use]
    pub(super) fn end(&self, index: usize, end: End) -> bool {
        let (over, wakers) = {
            let mut run = self.run.lock();
            run.active -= 1;
            match end {
                End::Arrived(bytes) => {
                    run.done += bytes;
                    run.early.insert(index);
                    while run.early.first() == Some(&run.missing) {
                        run.early.pop_first();
                        run.missing += 1;
                    }
                }
                End::Failed(error) => {
                    let at = self.plan.range(index).0;
                    if run.error.as_ref().is_none_or(|(other, _)| at < *other) {
                        run.error = Some((at, error));
                    }
                }
                // Without a cause of its own, it cannot count as arrived.
                End::Dropped => run.cancelled |= run.error.is_none(),
            }
            (run.is_over(), run.wakers.iter().map(|w| w.1.clone()).collect::<Vec<_>>())
        };
        if !over {
            // Who waits for a part of it.
            self.bell.notify_all();
            wakers.into_iter().for_each(Task::wake_shared);
        }
        over
    }

    /// A feed or puller goes: it begins no more, and holds nothing. As for [`end`](Self::end).
    #[must_use]
    pub(super) fn close(&self) -> bool {
        let mut run = self.run.lock();
        run.open = false;
        run.limit = run.next;
        run.is_over()
    }

    /// Begins no more chunks. As for [`end`](Self::end).
    #[must_use]
    pub(super) fn cancel(&self) -> bool {
        let over = {
            let mut run = self.run.lock();
            if !run.finishing {
                run.cancelled = true;
            }
            run.is_over()
        };
        self.bell.notify_all();
        over
    }

    /// Lets the source or sink go, and tells everybody. Once, by whoever was told that it is over.
    pub(super) fn finish(&self) {
        // A worker that only looks at it may still have a share, for a moment.
        let body = self.body.lock().take();
        drop(body.map(|body| last_of(body, SURELY)));
        let (result, done, trace) = {
            let mut run = self.run.lock();
            let complete = run.missing >= run.limit;
            let result = match (&run.error, run.cancelled && !complete) {
                (Some((_, error)), _) => Err(error.clone()),
                (None, true) => Err(self.was_cancelled(run.done)),
                (None, false) => Ok(()),
            };
            (result, run.done, run.trace.take())
        };
        let elapsed = self.since.elapsed();
        if let Some(trace) = trace {
            trace.end(&result, done, elapsed);
        }
        let (landed, wakers) = {
            let mut run = self.run.lock();
            run.over = Some((result, elapsed));
            (std::mem::take(&mut run.landed), std::mem::take(&mut run.wakers))
        };
        // Once: there is nothing in it yet.
        _ = self.last.set(self.progress());
        drop(landed);
        self.bell.notify_all();
        self.end.notify_all();
        wakers.into_iter().for_each(|(_, task)| task.wake_shared());
    }

    fn was_cancelled(&self, done: u64) -> Error {
        Error::Cancelled { what: self.name.clone(), done, total: self.plan.wanted() }
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    pub(super) fn progress(&self) -> Progress {
        if crate::os::forked() {
            return Progress { total: self.plan.wanted(), over: true, ..Progress::default() };
        }
        let run = self.run.lock();
        let landed_to = self.plan.landed_before(run.missing);
        Progress {
            done: run.done,
            total: self.plan.wanted(),
            elapsed: run.over.as_ref().map_or_else(|| self.since.elapsed(), |over| over.1),
            landed_to,
            over: run.over.is_some(),
        }
    }

    /// How it ended, if it has. For the child of a fork it has, and so here and below nothing is waited for.
    pub(super) fn outcome(&self) -> Option<Result<()>> {
        if let Err(error) = crate::os::check_fork() {
            return Some(Err(error));
        }
        self.run.lock().over.as_ref().map(|over| over.0.clone())
    }

    /// Waits until it is over, or the deadline. Whether that was in time.
    pub(super) fn wait_over(&self, deadline: Option<Instant>) -> bool {
        if crate::os::forked() {
            return true;
        }
        let mut run = self.run.lock();
        while run.over.is_none() {
            match deadline {
                None => self.end.wait(&mut run),
                Some(deadline) if self.end.wait_until(&mut run, deadline).timed_out() => {
                    return run.over.is_some();
                }
                Some(_) => {}
            }
        }
        true
    }

    /// Waits until `enough`, or until it is over, or the deadline. Whether that was in time.
    pub(super) fn wait(&self, deadline: Option<Instant>, enough: impl Fn(&Progress) -> bool) -> bool {
        loop {
            let progress = self.progress();
            if progress.over || enough(&progress) {
                return true;
            }
            let mut run = self.run.lock();
            // Looked at again under the lock: what came in between has rung already.
            if run.over.is_some() || run.done != progress.done {
                continue;
            }
            match deadline {
                None => self.bell.wait(&mut run),
                Some(deadline) => {
                    if self.bell.wait_until(&mut run, deadline).timed_out() {
                        return false;
                    }
                }
            }
        }
    }

    /// Leaves a waker, in place of the one left before, unless the job is over: then how it ended.
    pub(super) fn wake_later(&self, key: &mut Option<u64>, waker: &Waker) -> Option<Result<()>> {
        if let Err(error) = crate::os::check_fork() {
            return Some(Err(error));
        }
        // Before the lock: to clone a waker is foreign code.
        let waker = Arc::new(Task::of(waker));
        let old = {
            let mut run = self.run.lock();
            if let Some(over) = &run.over {
                return Some(over.0.clone());
            }
            let known = key.and_then(|key| run.wakers.iter().position(|w| w.0 == key));
            match known {
                Some(place) => Some(std::mem::replace(&mut run.wakers[place].1, waker)),
                None => {
                    run.next_waker += 1;
                    let id = run.next_waker;
                    run.wakers.push((id, waker));
                    *key = Some(id);
                    None
                }
            }
        };
        drop(old);
        None
    }

    /// Takes the waker back.
    pub(super) fn forget_waker(&self, key: &mut Option<u64>) {
        let Some(key) = key.take() else { return };
        let waker = {
            let mut run = self.run.lock();
            let place = run.wakers.iter().position(|w| w.0 == key);
            place.map(|place| run.wakers.swap_remove(place))
        };
        drop(waker);
    }

    /// Why it begins no more chunks.
    pub(super) fn stopped_with(&self) -> Error {
        let run = self.run.lock();
        match &run.error {
            Some((_, error)) => error.clone(),
            None => self.was_cancelled(run.done),
        }
    }

    // --- for who drains by itself ------------------------------------------------------------------------------------

    /// A chunk has landed for the caller.
    pub(super) fn land(&self, landed: Landed) {
        self.run.lock().landed.insert(landed.index, landed);
        self.bell.notify_all();
    }

    /// The chunk of that index, when it has landed. `None`: it never will.
    pub(super) fn take_landed(&self, index: usize) -> Option<Landed> {
        if crate::os::forked() {
            return None;
        }
        let mut run = self.run.lock();
        loop {
            if let Some(landed) = run.landed.remove(&index) {
                return Some(landed);
            }
            if run.stopped() || run.over.is_some() || index >= run.limit {
                return None;
            }
            self.bell.wait(&mut run);
        }
    }

    /// Those that nobody takes any more.
    pub(super) fn drain_landed(&self) -> BTreeMap<usize, Landed> {
        std::mem::take(&mut self.run.lock().landed)
    }
}

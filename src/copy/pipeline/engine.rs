//! The engine of a pipeline: its state, its threads, and the order of its transfers.
//!
//! All state is under one lock, which is held for a few list operations at a time: chunks are large, so a few thousand
//! of them a second are the most that there is. Nothing else is done under it: no driver call, no reading, no copying,
//! no code of the caller's, and nothing goes back to the pool, which may wake somebody.
//!
//! *Threads.* The workers ([`super::workers`]) do what takes the CPU, for the foreground first: they drain what has
//! landed, which frees segments, and fill chunks; and one that has nothing of that to do looks after a chunk on the
//! wire, and goes on with it ([`super::arrival`]). A watcher for each direction does what no worker has time for. All
//! of them start with the first transfer and sleep while there is nothing to do; they hold the engine, and end when the
//! last handle to the pipeline and its transfers is gone and nothing is under way.
//!
//! Who wakes whom: [`super::waking`].
//!
//! *Segments*: [`super::segments`].
//!
//! *Order.* Transfers that use the same device memory, one of them writing it, take effect in the order in which they
//! were started: the later one begins when the earlier one is over.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex, MutexGuard};

use super::config::{Priority, Settings};
use super::job::{Direction, End, Job, Kind, Landed};
use super::share::Share;
use super::stats::Counters;
use super::window::{LULL, Windows};
use super::wire::{Ready, Wire, place};
use crate::buffer::PinnedBuf;
use crate::device::handle::Device;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::foreign::{self, Task};
use crate::pool::Pool;
use crate::stream::Stream;

/// How long a thread that has no segment at all waits in the pool's queue before it looks whether its transfer was
/// cancelled, or whether there is something else to do.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

/// For how long the foreground tries to get the lock past those who wait for it.
const HASTE: Duration = Duration::from_millis(1);

thread_local! {
    /// Whether this is a thread of a pipeline.
    static OURS: Cell<bool> = const { Cell::new(false) };
    /// Where the segments are that this thread has filled last.
    static MINE: Cell<[usize; 2]> = const { Cell::new([0; 2]) };
}

/// An error on a thread of a pipeline or of the library's, where a waker, a source or a sink is about to wait for what
/// that very thread does.
pub(crate) fn may_wait() -> Result<()> {
    let whose = match crate::sync::own() {
        Some(_) => "on the thread that finds out what is done, in a waker",
        None if OURS.get() => "on a pipeline's own thread, in a waker, a source or a sink",
        None => return Ok(()),
    };
    let what = format!("a wait for a transfer {whose}; wake a task or thread of your own, and wait there");
    Err(Error::Unsupported(what))
}

/// The streams of one direction.
pub(super) struct Streams {
    pub(super) bulk: Vec<Stream>,
    pub(super) foreground: Stream,
}

/// See the module's page.
pub(super) struct Engine {
    pub(super) pool: Pool,
    pub(super) device: Device,
    pub(super) settings: Settings,
    pub(super) streams: [Streams; 2],
    pub(super) counters: Counters,
    pub(super) state: Mutex<State>,
    /// Workers sleep here.
    pub(super) work: Condvar,
    /// Calls for workers that are awake. Added to under the lock; who takes one has been called, and looks for work
    /// under the lock. Relaxed throughout: everything else is seen through the lock.
    pub(super) calls: AtomicUsize,
    /// The watcher of each direction sleeps here.
    pub(super) bells: [Condvar; 2],
    /// Callers who wait for a segment to fill by themselves.
    pub(super) room: Condvar,
    /// The wire's watchers look often at the end of a copy. Not where the CPU makes the copies: it has better to do.
    pub(super) looks: bool,
    /// Who waits for copies that are not ours, or made on their own thread, by direction. Relaxed: nothing else is seen
    /// through it, and who looks a moment too early sends one chunk more.
    urgent: [AtomicUsize; 2],
    /// For windows, which may outlive it.
    pub(super) own: Weak<Self>,
}

/// Somebody waits for a copy of his own.
pub(super) struct Urgent<'a>(&'a AtomicUsize);

impl Drop for Urgent<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A transfer that is not over.
pub(super) struct Live {
    pub(super) job: Arc<Job>,
    /// Earlier transfers that it has to wait for.
    pub(super) behind: Vec<u64>,
}

pub(super) struct State {
    /// In the order in which they were started.
    pub(super) jobs: VecDeque<Live>,
    next_job: u64,
    /// Which segments are in use, and who asks for one.
    pub(super) share: Share<PinnedBuf>,
    pub(super) windows: Windows,
    pub(super) wires: [Wire; 2],
    /// Downloads to be drained.
    pub(super) landed: VecDeque<(Arc<Job>, Landed)>,
    /// Bulk bytes a second at most, and when the next chunk may go.
    pub(super) rate: Option<u64>,
    pub(super) due: Option<Instant>,
    /// Workers that wait to be called and do not sleep.
    pub(super) awake: usize,
    /// Workers still to be woken by those that were.
    pub(super) asleep: usize,
    /// The way is clear again: a worker is to submit what may go now.
    pub(super) clear: bool,
    started: bool,
    watched: [bool; 2],
    pub(super) closing: bool,
    /// Tasks that wait for a segment.
    pub(super) wakers: Vec<(u64, Task)>,
}

/// Said where a call outside the lock has panicked.
pub(super) const UNWOUND: &str = "a call on a pipeline's thread panicked: its transfer fails";

impl Engine {
    pub(super) fn new(pool: Pool, device: Device, settings: Settings) -> Result<Arc<Self>> {
        let streams = || {
            let bulk = (0..settings.streams).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
            Ok::<_, Error>(Streams { bulk, foreground: device.stream()? })
        };
        let streams = [streams()?, streams()?];
        let state = State {
            jobs: VecDeque::new(),
            next_job: 0,
            share: Share::new(),
            windows: Windows::default(),
            wires: [Wire::default(), Wire::default()],
            landed: VecDeque::new(),
            rate: settings.rate,
            due: None,
            awake: 0,
            asleep: 0,
            clear: false,
            started: false,
            watched: [false, false],
            closing: false,
            wakers: Vec::new(),
        };
        let counters = Counters::default();
        let state = Mutex::new(state);
        let bells = [Condvar::new(), Condvar::new()];
        let (work, room) = (Condvar::new(), Condvar::new());
        Ok(Arc::new_cyclic(|own| {
            let own = own.clone();
            let looks = device.context().driver().holds_pages();
            let calls = AtomicUsize::new(0);
            let urgent = [AtomicUsize::new(0), AtomicUsize::new(0)];
            Self {
                pool,
                device,
                settings,
                streams,
                counters,
                state,
                work,
                calls,
                bells,
                room,
                looks,
                urgent,
                own,
            }
        }))
    }

    // --- transfers ---------------------------------------------------------------------------------------------------

    /// Starts a transfer, whose job `make` makes of its number.
    pub(super) fn start(self: &Arc<Self>, make: impl FnOnce(u64) -> Arc<Job>) -> Result<Arc<Job>> {
        crate::os::check_fork()?;
        self.device.context().alive()?;
        let id = {
            let mut state = self.state.lock();
            state.next_job += 1;
            state.next_job
        };
        // Under no lock: it asks the caller's subscriber for a span.
        let job = make(id);
        let mut state = self.state.lock();
        if let Some((started, error)) = self.run_threads(&mut state, job.direction)? {
            MutexGuard::unlocked(&mut state, || {
                crate::foreign::warn!(target: "pinpool::pipeline", %error, started, "fewer threads than asked for");
            });
        }
        let behind = state.jobs.iter().filter(|live| conflict(&live.job, &job)).map(|live| live.job.id);
        let behind = behind.collect();
        state.share.events += 1;
        state.hurries(job.priority);
        state.jobs.push_back(Live { job: job.clone(), behind });
        let busy = matches!(job.kind, Kind::Workers | Kind::File | Kind::Direct);
        let hands = if busy { self.settings.threads.min(job.plan.count()) } else { 0 };
        self.call_some(&mut state, hands);
        drop(state);
        // First who begins a download.
        self.bells[job.direction as usize].notify_one();
        while self.rouse() {}
        Ok(job)
    }

    /// Starts them, unless they run. How many workers there are, and why, where they are fewer than there should be.
    fn run_threads(
        self: &Arc<Self>,
        state: &mut State,
        direction: Direction,
    ) -> Result<Option<(usize, std::io::Error)>> {
        let spawn = |name: String, run: fn(&Self, usize), which: usize| {
            let engine = self.clone();
            crate::os::thread::spawn(name, move || {
                OURS.set(true);
                foreign::live("a pipeline's thread panicked: it goes on", || {
                    engine.device.context().driver().enter_thread();
                    run(&engine, which);
                });
            })
        };
        let refused = |error: std::io::Error| Error::Unavailable {
            device: self.device.name().into(),
            why: format!("no thread could be started for the pipeline: {error}"),
        };
        if !state.watched[direction as usize] {
            let watch = |engine: &Self, which: usize| engine.watch(Direction::BOTH[which]);
            spawn(format!("pinpool-wire-{}", direction as usize), watch, direction as usize)
                .map_err(refused)?;
            state.watched[direction as usize] = true;
        }
        if !state.started {
            for number in 0..self.settings.threads {
                let work = |engine: &Self, number: usize| {
                    engine.begin_work(number);
                    engine.work();
                };
                match spawn(format!("pinpool-pipe-{number}"), work, number) {
                    Ok(_) => state.started = true,
                    // Fewer will do.
                    Err(error) if number > 0 => return Ok(Some((number, error))),
                    Err(error) => return Err(refused(error)),
                }
            }
        }
        Ok(None)
    }

    /// The lock for somebody in a hurry. Who parks for it stands behind all workers that were woken for a transfer,
    /// each of which takes its time to come (on an H200's host 0.3 to 1 ms in all, seen where a load followed another);
    /// and between any two of them it is free.
    fn hasty_lock(&self) -> MutexGuard<'_, State> {
        let since = Instant::now();
        while since.elapsed() < HASTE {
            if let Some(state) = self.state.try_lock() {
                return state;
            }
            std::thread::yield_now();
        }
        self.state.lock()
    }

    /// Whether a transfer under way has to be over before this memory is read or written. Asked on behalf of the
    /// foreground.
    pub(super) fn is_in_use(&self, memory: &DeviceSlice, direction: Direction) -> bool {
        let (start, end) = (memory.address(), memory.address() + memory.len() as u64);
        let mut state = self.hasty_lock();
        state.hurries(Priority::Foreground);
        state.jobs.iter().any(|live| {
            let bounds = live.job.plan.bounds();
            let writes = direction == Direction::Up || live.job.direction == Direction::Up;
            // By its bounds alone: where that is wrong, the ordinary way finds out.
            writes && bounds.0 < end && start < bounds.1
        })
    }

    /// Somebody waits for a copy of his own: until it is over, bulk chunks go one by one. What is on the wire already
    /// he waits for, and for nothing that comes after it: a device with several streams takes them by turns.
    pub(super) fn hurry(&self, direction: Direction) -> Urgent<'_> {
        let urgent = &self.urgent[direction as usize];
        urgent.fetch_add(1, Ordering::Relaxed);
        Urgent(urgent)
    }

    /// The same for both directions, until [`way_given`](Self::way_given).
    pub(super) fn give_way(&self) {
        self.urgent.iter().for_each(|urgent| _ = urgent.fetch_add(1, Ordering::Relaxed));
        if !crate::os::forked() {
            self.hasty_lock().hurries(Priority::Foreground);
        }
    }

    pub(super) fn way_given(&self) {
        self.urgent.iter().for_each(|urgent| _ = urgent.fetch_sub(1, Ordering::Relaxed));
        if crate::os::forked() {
            return;
        }
        let mut state = self.hasty_lock();
        state.hurries(Priority::Foreground);
        if !state.jobs.is_empty() {
            // What went one by one need not wait for the next arrival, nor this thread for the driver.
            state.clear = true;
            state.share.events += 1;
            self.call(&state);
        }
    }

    /// Whether the foreground waits for a copy in this direction.
    pub(super) fn is_urgent(&self, state: &State, direction: Direction) -> bool {
        self.urgent[direction as usize].load(Ordering::Relaxed) > 0
            || state.wires[direction as usize].on[place(Priority::Foreground)] > 0
    }

    /// Cancels a transfer. What is under way ends by itself.
    pub(super) fn cancel(&self, job: &Arc<Job>) {
        if crate::os::forked() {
            return;
        }
        let mut state = self.state.lock();
        if job.cancel() {
            self.finish(&mut state, job);
        } else {
            self.sweep(&mut state, job);
        }
    }

    /// A feed or puller lets go of its transfer.
    pub(super) fn close_job(&self, job: &Arc<Job>) {
        if crate::os::forked() {
            return;
        }
        let mut state = self.state.lock();
        for (index, landed) in job.drain_landed() {
            self.give_back(&mut state, Direction::Down, Some(landed.buf));
            self.end(&mut state, job, index, End::Dropped);
        }
        if job.close() {
            self.finish(&mut state, job);
        }
    }

    /// Takes filled chunks of a stopped transfer from the wire's queue, and what has landed from its caller and the
    /// workers.
    fn sweep(&self, state: &mut MutexGuard<'_, State>, job: &Arc<Job>) {
        let mut gone = Vec::new();
        for queue in &mut state.wires[Direction::Up as usize].ready {
            let (theirs, others) = std::mem::take(queue).into_iter().partition(|r| Arc::ptr_eq(&r.job, job));
            *queue = others;
            let theirs: VecDeque<Ready> = theirs;
            gone.extend(theirs);
        }
        for ready in gone {
            self.discard(state, ready);
        }
        let (landed, others) =
            std::mem::take(&mut state.landed).into_iter().partition(|l| Arc::ptr_eq(&l.0, job));
        state.landed = others;
        let landed: VecDeque<(Arc<Job>, Landed)> = landed;
        let of_workers = landed.into_iter().map(|(_, landed)| (landed.index, landed));
        for (index, landed) in of_workers.chain(job.drain_landed()) {
            self.give_back(state, Direction::Down, Some(landed.buf));
            self.end(state, job, index, End::Dropped);
        }
    }

    /// Does without the lock what calls the driver or code that is not ours. Should it unwind, that is an error: the
    /// thread has in hand what must be given back.
    pub(super) fn outside<T>(
        &self,
        state: &mut MutexGuard<'_, State>,
        call: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        MutexGuard::unlocked(state, || foreign::survive(UNWOUND, call)).unwrap_or_else(|| Err(self.unwound()))
    }

    /// Drops a value without the lock.
    pub(super) fn drop_outside<T>(state: &mut MutexGuard<'_, State>, value: T) {
        MutexGuard::unlocked(state, || foreign::survive(UNWOUND, || drop(value)));
    }

    /// What a transfer fails with where a call has unwound.
    pub(super) fn unwound(&self) -> Error {
        let why = "a call on a pipeline's thread panicked; the panic's message is on standard error".into();
        Error::Unavailable { device: self.device.name().into(), why }
    }

    /// Ends a chunk, and the transfer with it if it was the last.
    pub(super) fn end(
        &self,
        state: &mut MutexGuard<'_, State>,
        job: &Arc<Job>,
        index: usize,
        end: impl Into<End>,
    ) {
        let end = end.into();
        let failed = !matches!(end, End::Arrived(_));
        // Wakers are the caller's code.
        let over = MutexGuard::unlocked(state, || job.end(index, end));
        if over {
            // Before the source is let go, which is the caller's code: see `bring_back`.
            self.call(state);
            self.finish(state, job);
        } else if failed {
            self.sweep(state, job);
            // Who waits for a segment of this transfer hears that there is none any more.
            self.made_room(state);
        }
    }

    /// Ends a transfer of which nobody has begun the next chunk.
    pub(super) fn fail(&self, state: &mut MutexGuard<'_, State>, job: &Arc<Job>, error: Error) {
        if let Some((index, _)) = job.begin(1) {
            self.end(state, job, index, Err(error));
        }
    }

    /// A transfer is over.
    pub(super) fn finish(&self, state: &mut MutexGuard<'_, State>, job: &Arc<Job>) {
        state.jobs.retain(|live| live.job.id != job.id);
        for live in &mut state.jobs {
            live.behind.retain(|id| *id != job.id);
        }
        let stash = if state.jobs.is_empty() { std::mem::take(&mut state.share.stash) } else { Vec::new() };
        state.share.dry = false;
        state.share.events += 1;
        let wakers = std::mem::take(&mut state.wakers);
        // The pool has its segments back before anybody hears of the end.
        MutexGuard::unlocked(state, || {
            _ = foreign::survive(UNWOUND, || drop(stash));
            _ = foreign::survive(UNWOUND, || job.finish());
            wakers.into_iter().for_each(|(_, task)| task.wake());
        });
        // With nothing left to do nobody is woken, and who is awake still hears of the next transfer if that comes
        // soon.
        if !state.jobs.is_empty() || state.closing {
            self.call_all(state);
            self.bells.iter().for_each(|bell| _ = bell.notify_one());
        }
        self.room.notify_all();
    }

    /// No handle is left.
    pub(super) fn close(&self) {
        if crate::os::forked() {
            return;
        }
        {
            let mut state = self.state.lock();
            state.closing = true;
            state.share.events += 1;
            self.call_all(&state);
        }
        self.bells.iter().for_each(|bell| _ = bell.notify_one());
    }
}

impl State {
    /// A transfer of this priority is about.
    fn hurries(&mut self, priority: Priority) {
        if priority == Priority::Foreground {
            self.windows.hurry = Some(Instant::now());
        }
    }

    /// Whether the rate allows the next chunk now.
    pub(super) fn in_time(&self) -> bool {
        self.due.is_none_or(|due| due <= Instant::now())
    }

    /// Whether nobody has been in a hurry for a while.
    pub(super) fn is_calm(&self) -> bool {
        self.windows.hurry.is_none_or(|hurry| hurry.elapsed() > LULL)
    }

    /// Whether windows would hold up nobody but files that come in bulk.
    pub(super) fn may_have_windows(&self) -> bool {
        let bulk = |live: &Live| live.job.priority == Priority::Bulk && live.job.kind == Kind::File;
        self.is_calm() && self.jobs.iter().all(bulk)
    }

    /// Bytes of the pool that are in use or kept for it, and those of windows.
    pub(super) fn held(&self, segment: usize) -> usize {
        (self.share.out[0] + self.share.out[1] + self.share.stash.len()) * segment + self.windows.bytes
    }

    /// A segment that is not in use: one that this thread has filled before, whose lines its processor may still have,
    /// or else the one that came back last.
    pub(super) fn take_near(&mut self) -> Option<PinnedBuf> {
        let mine = MINE.get();
        let ours = self.share.stash.iter().rposition(|buf| mine.contains(&buf.as_ptr().addr()));
        let buf = match ours {
            Some(at) => Some(self.share.stash.remove(at)),
            None => self.share.stash.pop(),
        };
        if let Some(buf) = &buf {
            let at = buf.as_ptr().addr();
            if mine[0] != at {
                MINE.set([at, mine[0]]);
            }
        }
        buf
    }

    /// Segments that are kept and not in use.
    pub(super) fn take_stash(&mut self) -> Vec<PinnedBuf> {
        std::mem::take(&mut self.share.stash)
    }

    /// Whether no segment of the pool is in use.
    pub(super) fn has_none(&self) -> bool {
        self.share.out == [0, 0] && self.windows.bytes == 0
    }

    /// Whether no earlier transfer is in the way of this one.
    pub(super) fn may_begin(&self, id: u64) -> bool {
        self.jobs.iter().any(|live| live.job.id == id && live.behind.is_empty())
    }

    /// Counts a segment that its user gets from the pool by itself, if there is no other.
    pub(super) fn take_seat(&mut self, direction: Direction) -> bool {
        let none = self.has_none() && self.share.stash.is_empty();
        if none {
            self.share.out[direction as usize] += 1;
        }
        none
    }
}

/// Whether the second transfer has to wait for the first.
fn conflict(first: &Job, second: &Job) -> bool {
    let writes = first.direction == Direction::Up || second.direction == Direction::Up;
    writes && overlap(first, second)
}

fn overlap(first: &Job, second: &Job) -> bool {
    let ranges = |job: &Job| -> Vec<(u64, u64)> {
        let pieces = job.plan.pieces().iter();
        let mut ranges: Vec<(u64, u64)> =
            pieces.map(|p| (p.device.address(), p.device.address() + p.device.len() as u64)).collect();
        ranges.sort_unstable();
        ranges
    };
    let (a, b) = (first.plan.bounds(), second.plan.bounds());
    if a.1 <= b.0 || b.1 <= a.0 {
        return false;
    }
    let (a, b) = (ranges(first), ranges(second));
    let (mut i, mut j) = (0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        if x.0 < y.1 && y.0 < x.1 {
            return true;
        }
        if x.1 <= y.1 { i += 1 } else { j += 1 }
    }
    false
}

#[cfg(all(test, target_os = "linux", not(loom)))]
mod tests {
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    use crate::locks::Mutex;

    use crate::host::{HostConfig, HostNode};
    use crate::pipeline::{Pipeline, Staging};
    use crate::{Device, Pool, Unpinned};

    /// One test with a pipeline at a time.
    static ALONE: Mutex<()> = Mutex::new(());

    /// How often each of our threads has gone to sleep so far. (No other tests of this program have a pipeline.)
    fn sleeps() -> BTreeMap<String, u64> {
        let mut sleeps = BTreeMap::new();
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
            if ["pinpool-pipe", "pinpool-wire"].iter().any(|name| read("comm").starts_with(name)) {
                let status = read("status");
                let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
                let count = line.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
                sleeps.insert(task.file_name().to_string_lossy().into_owned(), count);
            }
        }
        sleeps
    }

    #[test]
    fn who_still_looks_around_hears_of_the_next_transfer_and_of_the_end() {
        let _alone = ALONE.lock();
        let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(8 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let builder = Pipeline::builder(&pool, &device).threads(3).chunk(64 << 10).staging(Staging::Always);
        // Nobody sleeps as long as this test takes.
        let pipeline = builder.patience(Duration::from_secs(3600)).build().unwrap();
        let memory = device.alloc(1 << 20).unwrap();
        for round in 0..20_u8 {
            pipeline.upload_slice(&vec![round; 1 << 20], &memory).unwrap();
            assert!(pipeline.download_vec(&memory).unwrap().iter().all(|byte| *byte == round));
        }
        drop(pipeline);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !sleeps().is_empty() {
            assert!(Instant::now() < deadline, "they stay: {:?}", sleeps());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn an_idle_pipeline_sleeps_and_its_threads_end_with_it() {
        let _alone = ALONE.lock();
        let node = HostNode::new(HostConfig::new().memory(64 << 20)).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let pipeline = Pipeline::builder(&pool, &device).threads(3).build().unwrap();
        assert!(sleeps().is_empty(), "none before the first transfer");
        let memory = device.alloc(1 << 20).unwrap();
        pipeline.upload_slice(&vec![1; 1 << 20], &memory).unwrap();
        pipeline.download_vec(&memory).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        // A thread has its name when it has begun, which may be later than what others have done for it.
        let mut before = sleeps();
        while before.len() < 5 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
            before = sleeps();
        }
        assert_eq!(before.len(), 5, "three workers and two watchers: {before:?}");
        // They go to sleep, and then nothing wakes them.
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = sleeps();
            if std::mem::replace(&mut before, now.clone()) == now {
                break;
            }
            assert!(Instant::now() < deadline, "they never rest: {before:?}");
        }
        drop(pipeline);
        while !sleeps().is_empty() {
            assert!(Instant::now() < deadline, "they stay: {:?}", sleeps());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

//! Streams: queues of operations, and what runs them.
//!
//! A stream is a queue under a lock and a count of the operations that have ended. Its runner (its own thread, or
//! [`step`](super::node::Node::step) on a node without threads) takes the first operation out, runs it with the queue
//! unlocked, and then counts it. Each operation has a position in its stream. An event that was recorded stands for the
//! position of its recording, so a stream *waits for an event* by waiting until another stream's count has reached a
//! position. It leaves a reference to itself with the other stream, which wakes it. Waits cannot form a circle, since
//! an operation waits only for one that was submitted before it.
//!
//! *Stopping.* A copy is cut into parts of at most 1 MiB. Each part runs under the stream's `running` lock, after a
//! check that the device is alive. [`StreamDevice::kill`] first changes the device's state, then takes each stream's
//! `running` lock once. After that no stream touches memory any more, and the wait is at most the time of one part.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::foreign::{self, Owned};
use crate::locks::{Condvar, Mutex, MutexGuard};

use super::HostFunction;
use super::memory::{HostPlace, STRIPE};

/// Bytes that a copy moves between two checks that its device is alive.
const PART: usize = STRIPE;
/// Bytes of the buffer through which a copy within the device goes: large enough for full speed, small enough for the
/// L2 cache.
const BOUNCE: usize = 256 << 10;

/// What a stream needs of its device. Streams are below devices, which have a table of them.
pub(super) trait StreamDevice: Debug + Send + Sync {
    fn is_alive(&self) -> bool;

    /// Whether all of the device's streams stop before their next operation.
    fn is_hung(&self) -> bool;

    /// Kills the device.
    fn kill(&self, cause: &str);

    /// Notes that the turn of an event's recording has come.
    fn record(&self, slot: u32, number: u64);

    /// Takes a stream that has nothing more to run out of the table.
    fn forget(&self, stream: u64);
}

/// A copy, its device ranges checked.
#[derive(Debug)]
pub(super) enum StreamJob {
    Upload { src: *const u8, to: HostPlace, len: usize },
    Download { from: HostPlace, dst: *mut u8, len: usize },
    OnDevice { from: HostPlace, to: HostPlace, len: usize },
    OnHost { src: *const u8, dst: *mut u8, len: usize },
}

// SAFETY: the submitter promised the host memory for any thread that runs the job (`Driver::copy`).
unsafe impl Send for StreamJob {}

/// Why a copy stopped before its end.
enum Stopped {
    /// The device died.
    Dead,
    /// The copy uses device memory that was freed.
    Freed,
}

impl StreamJob {
    /// The host addresses that the copy uses.
    fn host_ranges(&self) -> [Range<usize>; 2] {
        match *self {
            Self::Upload { src, len, .. } => [src.addr()..src.addr() + len, 0..0],
            Self::Download { dst, len, .. } => [dst.addr()..dst.addr() + len, 0..0],
            Self::OnDevice { .. } => [0..0, 0..0],
            Self::OnHost { src, dst, len } => [src.addr()..src.addr() + len, dst.addr()..dst.addr() + len],
        }
    }

    fn uses_freed_memory(&self) -> bool {
        match self {
            Self::Upload { to: place, .. } | Self::Download { from: place, .. } => place.is_freed(),
            Self::OnDevice { from, to, .. } => from.is_freed() || to.is_freed(),
            Self::OnHost { .. } => false,
        }
    }

    fn run(
        &self,
        stream: &HostStream,
        unit: &dyn StreamDevice,
        scratch: &mut Scratch,
    ) -> Result<(), Stopped> {
        if self.uses_freed_memory() {
            return Err(Stopped::Freed);
        }
        match *self {
            Self::Upload { src, ref to, len } => parts(len, PART, false, stream, unit, |at, n| {
                // SAFETY: `at + n <= len`. The submitter promised (`Driver::copy`) that the source is valid and
                // unwritten until an event after this operation is complete, and no such event completes before the
                // operation has ended. A device that dies says so only when it touches no memory any more (see the
                // module's page).
                unsafe { to.write(at, src.add(at), n) }
            }),
            Self::Download { ref from, dst, len } => parts(len, PART, false, stream, unit, |at, n| {
                // SAFETY: as above, for a target that nothing else touches.
                unsafe { from.read(at, dst.add(at), n) }
            }),
            Self::OnDevice { ref from, ref to, len } => {
                let bounce = scratch.bounce();
                // Back to front where the front of the target is the end of the source, as memmove does.
                parts(len, bounce.len(), from.runs_into(to), stream, unit, |at, n| {
                    // SAFETY: only this runner uses the buffer, and it has at least n bytes.
                    unsafe { from.read(at, bounce.as_mut_ptr(), n) };
                    // SAFETY: as above, and the bytes were just written.
                    unsafe { to.write(at, bounce.as_ptr(), n) };
                })
            }
            Self::OnHost { src, dst, len } => parts(len, PART, false, stream, unit, |at, n| {
                // SAFETY: as for uploads and downloads; source and target are two buffers.
                unsafe { dst.add(at).copy_from_nonoverlapping(src.add(at), n) }
            }),
        }
    }
}

/// Calls `copy(offset, length)` for the parts of `len` bytes, while the device lives.
fn parts(
    len: usize,
    most: usize,
    backward: bool,
    stream: &HostStream,
    unit: &dyn StreamDevice,
    mut copy: impl FnMut(usize, usize),
) -> Result<(), Stopped> {
    let mut done = 0;
    while done < len {
        let n = most.min(len - done);
        let at = if backward { len - done - n } else { done };
        let _running = stream.running.lock();
        if !unit.is_alive() {
            return Err(Stopped::Dead);
        }
        copy(at, n);
        done += n;
    }
    Ok(())
}

/// A function of the program's, and the device memory whose bytes it gets, its ranges checked.
#[derive(Debug)]
pub(super) struct HostKernel {
    pub(super) reads: Vec<HostPlace>,
    pub(super) writes: Vec<HostPlace>,
    pub(super) function: Owned<HostFunction>,
}

impl HostKernel {
    /// Calls the function with copies of the bytes, and writes back those that it may write. So the function never
    /// shares memory with a copy of another stream, and it runs under no lock: not under `running` either, so that a
    /// device can be killed while the function waits for something.
    fn run(self, stream: &HostStream, unit: &dyn StreamDevice) -> Result<(), Stopped> {
        let Self { reads, writes, function } = self;
        if reads.iter().chain(&writes).any(HostPlace::is_freed) {
            return Err(Stopped::Freed);
        }
        let fetch = |places: &[HostPlace]| -> Result<Vec<Vec<u8>>, Stopped> {
            let fetch_one = |place: &HostPlace| {
                let mut bytes = vec![0; place.len()];
                parts(bytes.len(), PART, false, stream, unit, |at, n| {
                    // SAFETY: `at + n` is at most the length of the vector, which nothing else uses.
                    unsafe { place.read(at, bytes.as_mut_ptr().add(at), n) }
                })
                .map(|()| bytes)
            };
            places.iter().map(fetch_one).collect()
        };
        let (read, mut written) = (fetch(&reads)?, fetch(&writes)?);
        let returned =
            foreign::call("a host function on a stream panicked: the device memory stays as it was", || {
                let read: Vec<&[u8]> = read.iter().map(Vec::as_slice).collect();
                let mut written: Vec<&mut [u8]> = written.iter_mut().map(Vec::as_mut_slice).collect();
                function.into_inner()(&read, &mut written);
            });
        if returned.is_none() {
            return Ok(());
        }
        writes.iter().zip(&written).try_for_each(|(place, bytes)| {
            parts(bytes.len(), PART, false, stream, unit, |at, n| {
                // SAFETY: `at + n` is at most the length of the vector, which nothing writes any more.
                unsafe { place.write(at, bytes.as_ptr().add(at), n) }
            })
        })
    }
}

/// What the runner of a stream keeps between operations.
#[derive(Debug, Default)]
pub(super) struct Scratch(Vec<u8>);

impl Scratch {
    fn bounce(&mut self) -> &mut [u8] {
        if self.0.is_empty() {
            self.0 = vec![0; BOUNCE];
        }
        &mut self.0
    }
}

/// How a blocking copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyOutcome {
    /// It has run.
    Done,
    /// It will not run, or has stopped midway.
    Lost,
}

/// The caller's half of a blocking copy: `copy_blocking` waits here.
#[derive(Debug, Default)]
pub(super) struct StreamTicket {
    outcome: Mutex<Option<CopyOutcome>>,
    resolved: Condvar,
}

impl StreamTicket {
    pub(super) fn outcome(&self) -> Option<CopyOutcome> {
        *self.outcome.lock()
    }

    pub(super) fn wait(&self) -> CopyOutcome {
        let mut outcome = self.outcome.lock();
        loop {
            match *outcome {
                Some(outcome) => return outcome,
                None => self.resolved.wait(&mut outcome),
            }
        }
    }

    fn resolve(&self, how: CopyOutcome) {
        self.outcome.lock().get_or_insert(how);
        self.resolved.notify_all();
    }
}

/// The operation's half of a [`StreamTicket`]: an operation that is dropped without having run wakes the waiter too.
#[derive(Debug)]
pub(super) struct Promise(pub(super) Arc<StreamTicket>);

impl Drop for Promise {
    fn drop(&mut self) {
        self.0.resolve(CopyOutcome::Lost);
    }
}

/// What an operation does. `Record` has an event's slot in the event table, and the number of this recording of it.
#[derive(Debug)]
pub(super) enum StreamWork {
    Copy { job: StreamJob, promise: Option<Promise> },
    Launch(HostKernel),
    Record { slot: u32, number: u64 },
    Wait { on: Arc<HostStream>, position: u64 },
}

#[derive(Debug)]
pub(super) struct Operation {
    position: u64,
    /// Whether this operation, and all that follow it, wait until the stream is resumed.
    stalled: bool,
    work: StreamWork,
}

/// Whether a stream takes operations, and whether it runs those it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEnd {
    /// It takes and runs them.
    Open,
    /// Destroyed: it takes none, runs those it has, and ends.
    Destroyed,
    /// Its driver was dropped: nothing runs any more.
    Abandoned,
    /// Its device died: nothing runs any more.
    Dead,
}

/// What a stream can do next.
#[derive(Debug)]
pub(super) enum StreamNext {
    /// Run its first operation.
    Ready,
    /// Nothing: the queue is empty.
    Empty,
    /// Nothing until it is resumed.
    Held,
    /// Nothing until that stream has come to that position.
    Behind(Arc<HostStream>, u64),
    /// Nothing ever.
    Over,
}

#[derive(Debug)]
pub(super) struct StreamQueue {
    operations: VecDeque<Operation>,
    submitted: u64,
    /// The host addresses that the operation being run uses.
    busy: Option<[Range<usize>; 2]>,
    hung: bool,
    destroyed: bool,
    end: StreamEnd,
    /// Streams to wake when a position is reached.
    followers: Vec<(u64, Weak<HostStream>)>,
}

/// One stream.
#[derive(Debug)]
pub(super) struct HostStream {
    /// Its handle.
    pub(super) id: u64,
    /// Which driver object made it.
    pub(super) owner: u64,
    queue: Mutex<StreamQueue>,
    /// The stream's thread sleeps here.
    wake: Condvar,
    /// Position of the last operation that has ended; all before it have ended too.
    over: AtomicU64,
    /// Held while a part of a copy runs.
    running: Mutex<()>,
}

impl HostStream {
    pub(super) fn new(id: u64, owner: u64) -> Arc<Self> {
        let queue = StreamQueue {
            operations: VecDeque::new(),
            submitted: 0,
            busy: None,
            hung: false,
            destroyed: false,
            end: StreamEnd::Open,
            followers: Vec::new(),
        };
        Arc::new(Self {
            id,
            owner,
            queue: Mutex::new(queue),
            wake: Condvar::new(),
            over: AtomicU64::new(0),
            running: Mutex::new(()),
        })
    }

    /// Whether everything up to `position` has ended. Its effects are then visible to the caller.
    fn has_reached(&self, position: u64) -> bool {
        // Acquire: pairs with the release in `run_first`.
        self.over.load(Ordering::Acquire) >= position
    }

    /// Queues an operation and returns its position, or why the stream takes none.
    pub(super) fn submit(&self, work: StreamWork, stalled: bool) -> Result<u64, StreamEnd> {
        let mut queue = self.queue.lock();
        if queue.end != StreamEnd::Open {
            let end = queue.end;
            // The lock is released before the operation is dropped, which may wake a waiter.
            drop(queue);
            return Err(end);
        }
        queue.submitted += 1;
        let position = queue.submitted;
        queue.operations.push_back(Operation { position, stalled, work });
        drop(queue);
        self.wake.notify_one();
        Ok(position)
    }

    /// Takes an operation that has not begun out of the queue, and drops it. The caller makes sure that no thread runs
    /// the stream meanwhile.
    pub(super) fn withdraw(&self, position: u64) {
        let mut queue = self.queue.lock();
        let found = queue.operations.iter().position(|operation| operation.position == position);
        let withdrawn = found.and_then(|index| queue.operations.remove(index));
        drop(queue);
        drop(withdrawn);
    }

    /// Destroys the stream: it takes no further operations, and those queued still run. `None`: it was destroyed
    /// before. Otherwise, whether nothing is left to run.
    pub(super) fn destroy(&self) -> Option<bool> {
        let mut queue = self.queue.lock();
        if std::mem::replace(&mut queue.destroyed, true) {
            return None;
        }
        if queue.end == StreamEnd::Open {
            queue.end = StreamEnd::Destroyed;
        }
        let idle = queue.operations.is_empty() && queue.busy.is_none();
        let ended = idle || queue.end != StreamEnd::Destroyed;
        drop(queue);
        self.wake.notify_one();
        Some(ended)
    }

    pub(super) fn is_destroyed(&self) -> bool {
        self.queue.lock().destroyed
    }

    /// Ends the stream at once and drops what is queued.
    pub(super) fn end(&self, end: StreamEnd) {
        let mut queue = self.queue.lock();
        queue.end = end;
        let dropped = std::mem::take(&mut queue.operations);
        drop(queue);
        // Not under the lock: this wakes the waiters for the operations.
        drop(dropped);
        self.wake.notify_one();
    }

    /// Waits until the part of a copy that is under way has ended. No further part begins if the device died before.
    pub(super) fn resolve(&self) {
        drop(self.running.lock());
    }

    /// Holds the stream, or lets it and its stalled operations go on.
    pub(super) fn hold(&self, hung: bool) {
        let mut queue = self.queue.lock();
        queue.hung = hung;
        if !hung {
            for operation in &mut queue.operations {
                operation.stalled = false;
            }
        }
        drop(queue);
        self.wake.notify_one();
    }

    /// The number of operations that have not ended.
    pub(super) fn queued(&self) -> usize {
        let queue = self.queue.lock();
        queue.operations.len() + usize::from(queue.busy.is_some())
    }

    /// Whether an operation that has not ended uses any of these host addresses.
    pub(super) fn uses(&self, range: &Range<usize>) -> bool {
        let overlaps = |used: &[Range<usize>; 2]| {
            used.iter().any(|used| !used.is_empty() && used.start < range.end && range.start < used.end)
        };
        let queue = self.queue.lock();
        queue.busy.as_ref().is_some_and(overlaps)
            || queue.operations.iter().any(|operation| match &operation.work {
                StreamWork::Copy { job, .. } => overlaps(&job.host_ranges()),
                _ => false,
            })
    }

    fn next(&self, queue: &StreamQueue, unit: &dyn StreamDevice) -> StreamNext {
        match queue.end {
            StreamEnd::Abandoned | StreamEnd::Dead => return StreamNext::Over,
            StreamEnd::Open | StreamEnd::Destroyed => {}
        }
        let Some(first) = queue.operations.front() else {
            return if queue.end == StreamEnd::Open { StreamNext::Empty } else { StreamNext::Over };
        };
        if unit.is_hung() || queue.hung || first.stalled {
            return StreamNext::Held;
        }
        match &first.work {
            StreamWork::Wait { on, position } if !on.has_reached(*position) => {
                StreamNext::Behind(Arc::clone(on), *position)
            }
            _ => StreamNext::Ready,
        }
    }

    /// Whether the stream's next operation could run.
    pub(super) fn is_runnable(&self, unit: &dyn StreamDevice) -> bool {
        matches!(self.next(&self.queue.lock(), unit), StreamNext::Ready)
    }

    /// Runs the next operation if it may run. For nodes without threads; the caller makes sure that one thread at a
    /// time runs a stream.
    pub(super) fn step(&self, unit: &dyn StreamDevice, scratch: &mut Scratch) -> StreamNext {
        let mut queue = self.queue.lock();
        let next = self.next(&queue, unit);
        if matches!(next, StreamNext::Ready) {
            self.run_first(&mut queue, unit, scratch);
        }
        next
    }

    /// Runs the first operation, with the queue unlocked meanwhile.
    fn run_first(
        &self,
        queue: &mut MutexGuard<'_, StreamQueue>,
        unit: &dyn StreamDevice,
        scratch: &mut Scratch,
    ) {
        let Some(Operation { position, work, .. }) = queue.operations.pop_front() else { return };
        let mut job = None;
        let ran = match work {
            StreamWork::Copy { job: copy, promise } => {
                queue.busy = Some(copy.host_ranges());
                let ran = MutexGuard::unlocked(queue, || copy.run(self, unit, scratch));
                job = Some((copy, promise));
                ran
            }
            StreamWork::Launch(kernel) => {
                queue.busy = Some([0..0, 0..0]);
                MutexGuard::unlocked(queue, || kernel.run(self, unit))
            }
            StreamWork::Record { slot, number } => {
                unit.record(slot, number);
                Ok(())
            }
            StreamWork::Wait { .. } => Ok(()),
        };
        queue.busy = None;
        if let Err(stopped) = ran {
            // The operation does not count as ended, so nothing behind it can look complete.
            return MutexGuard::unlocked(queue, || {
                if matches!(stopped, Stopped::Freed) {
                    unit.kill("a queued operation was to use device memory that had been freed");
                }
                drop(job);
            });
        }
        // Release: pairs with the acquire in `has_reached`. A thread that sees the position sees everything up to it.
        self.over.store(position, Ordering::Release);
        let mut woken = Vec::new();
        queue.followers.retain(|(awaited, follower)| {
            let reached = *awaited <= position;
            if reached {
                woken.push(Weak::clone(follower));
            }
            !reached
        });
        let ended = queue.end == StreamEnd::Destroyed && queue.operations.is_empty();
        if woken.is_empty() && job.is_none() && !ended {
            return;
        }
        MutexGuard::unlocked(queue, || {
            if let Some((job, promise)) = job {
                // The job may have the last reference to device memory: it is freed before the waiter is woken.
                drop(job);
                if let Some(promise) = promise {
                    promise.0.resolve(CopyOutcome::Done);
                }
            }
            for follower in woken.iter().filter_map(Weak::upgrade) {
                // The lock is taken once, so the follower either looks later or sleeps already: no wake is lost.
                drop(follower.queue.lock());
                follower.wake.notify_one();
            }
            if ended {
                unit.forget(self.id);
            }
        });
    }

    /// Makes this stream wake `follower` when it comes to `position`.
    fn follow(&self, position: u64, follower: &Arc<Self>) {
        let mut queue = self.queue.lock();
        // Under the lock, since `over` changes under it.
        if !self.has_reached(position) {
            queue.followers.push((position, Arc::downgrade(follower)));
        }
    }
}

/// Random delays before copies and host functions.
#[derive(Debug)]
pub(super) struct Delays {
    pub(super) max: Duration,
    pub(super) random: Random,
}

/// A stream's thread: runs what is queued, and sleeps when nothing can run.
pub(super) fn serve(unit: &dyn StreamDevice, stream: &Arc<HostStream>, mut delays: Option<Delays>) {
    let mut scratch = Scratch::default();
    // The positions of the last operation that was delayed, and of the last wait that the other stream knows of.
    let (mut delayed, mut following) = (0, 0);
    let mut queue = stream.queue.lock();
    loop {
        let position = queue.operations.front().map_or(0, |first| first.position);
        match stream.next(&queue, unit) {
            StreamNext::Over => return,
            StreamNext::Empty | StreamNext::Held => stream.wake.wait(&mut queue),
            StreamNext::Behind(on, awaited) => {
                if following == position {
                    stream.wake.wait(&mut queue);
                } else {
                    following = position;
                    MutexGuard::unlocked(&mut queue, || on.follow(awaited, stream));
                }
            }
            StreamNext::Ready => {
                let moves_bytes = queue.operations.front().is_some_and(|first| {
                    matches!(first.work, StreamWork::Copy { .. } | StreamWork::Launch(_))
                });
                match &mut delays {
                    Some(delays) if moves_bytes && delayed != position => {
                        delayed = position;
                        // The loop looks again after that: the device may have been hung or killed meanwhile.
                        delay(stream, &mut queue, delays);
                    }
                    _ => stream.run_first(&mut queue, unit, &mut scratch),
                }
            }
        }
    }
}

fn delay(stream: &HostStream, queue: &mut MutexGuard<'_, StreamQueue>, delays: &mut Delays) {
    let max = u64::try_from(delays.max.as_nanos()).unwrap_or(u64::MAX);
    if max == 0 {
        return MutexGuard::unlocked(queue, std::thread::yield_now);
    }
    let until = Instant::now() + Duration::from_nanos(delays.random.below(max.saturating_add(1)));
    while matches!(queue.end, StreamEnd::Open | StreamEnd::Destroyed) {
        if stream.wake.wait_until(queue, until) {
            return;
        }
    }
}

/// A small generator of random numbers (xorshift), for which equal seeds give equal numbers.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        // Spread, so that neighbouring seeds do not begin alike. Never 0, since xorshift stays at 0.
        let spread = (seed ^ (seed >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self((spread ^ (spread >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, or 0 if that is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        // The high bits are the better ones, and multiplying spreads them over the bound.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

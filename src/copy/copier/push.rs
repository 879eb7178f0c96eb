//! Pushes: one small piece by each of many threads, combined into chunks.
//!
//! A thread has a *lane*, which it may share with others. A lane has an open chunk: a segment that takes the bytes of its
//! pushes, one behind the other. A push copies its bytes there, under the lane's lock, and is done: no driver call, and
//! no other lock. All pushes of a chunk are one job.
//!
//! The job starts when its chunk is opened. The worker that takes it closes the chunk, in [`Work::cut`], and owns it from
//! then on. Workers take such a job only when its copy can go at once. So a push goes at once where nothing is in
//! flight; and while as many copies are in flight as may be, chunks grow, which is what combines pushes. A chunk that is
//! full stays with its job, and the lane opens another one.
//!
//! The worker that has a pushed chunk in flight looks for the next one. So a job that starts wakes a worker only where
//! none has: see [`Going::wakes`]. A worker that turns to a source that may block wakes another for what is left. A thread
//! that waits for its push while no worker has one moves the chunk itself. No push counts on such a thread.
//!
//! Locks: a job's is taken before its lane's, and the scheduler's before a job's.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Counter, AtomicUsize};
use std::time::{Duration, Instant};

use super::config::{Priority, Settings};
use super::engine::Engine;
use super::job::{Body, Chunk, Cursor, Cut, Direction, Job, Memories, Needs, Plan, Work};
use super::layout::{Layout, Stretch};
use super::packing::{Brought, Content, Packing};
use super::pieces::{LEAST, Values, finish};
use super::segments::usable;
use super::transfer::Transfer;
use super::{Copier, may_wait};
use crate::buffer::PinnedBuf;
use crate::copy::DeviceRange;
use crate::device::DevicePtr;
use crate::device::memory::{Allocation, DeviceSlice};
use crate::error::{Error, Result};
use crate::locks;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Lanes at most, for each priority.
const MOST_LANES: usize = 64;
/// For how long a push that has no segment waits for its lane before it asks for one again.
const AGAIN: Duration = Duration::from_millis(1);
/// Stretches that a chunk has room for at first.
const FIRST: usize = 64;

std::thread_local! {
    /// Numbers threads, so that neighbours have different lanes.
    static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// This thread's number.
fn number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            // Relaxed: only to be different.
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

/// The chunks of a lane, and the jobs whose chunks they are. `C`: a chunk.
#[repr(align(128))]
pub(super) struct Lane<C> {
    state: Mutex<LaneState<C>>,
}

struct LaneState<C> {
    /// Chunks that no worker has taken, each under its job's number. The last one is open.
    chunks: Vec<(u64, C)>,
    /// Jobs that are not over, in the order in which they were started.
    jobs: Vec<(u64, Arc<Job>)>,
}

impl<C> Lane<C> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(LaneState { chunks: Vec::new(), jobs: Vec::new() }) }
    }

    /// Calls `put` with the open chunk. `None`: there is none.
    #[inline]
    pub(super) fn put<R>(&self, put: impl FnOnce(&mut C) -> R) -> Option<R> {
        let mut state = self.state.lock();
        state.chunks.last_mut().map(|(_, chunk)| put(chunk))
    }

    /// Opens a chunk, for a job that is about to start.
    pub(super) fn open(&self, number: u64, chunk: C, job: Arc<Job>) {
        let mut state = self.state.lock();
        state.chunks.push((number, chunk));
        state.jobs.push((number, job));
    }

    /// Takes a job's chunk out: nothing is put into it any more. Called under the job's lock.
    pub(super) fn close(&self, number: u64) -> Option<C> {
        let mut state = self.state.lock();
        let place = state.chunks.iter().position(|(other, _)| *other == number)?;
        Some(state.chunks.remove(place).1)
    }

    /// A job is over. Its chunk, if no worker has taken it.
    pub(super) fn over(&self, number: u64) -> Option<C> {
        let mut state = self.state.lock();
        let job = state.jobs.iter().position(|(other, _)| *other == number);
        let job = job.map(|place| state.jobs.remove(place));
        let chunk = state.chunks.iter().position(|(other, _)| *other == number);
        let chunk = chunk.map(|place| state.chunks.remove(place).1);
        drop(state);
        drop(job);
        chunk
    }

    /// A job that is under way: the one that was started first.
    pub(super) fn first(&self) -> Option<Arc<Job>> {
        let jobs: Vec<Arc<Job>> = self.state.lock().jobs.iter().map(|(_, job)| job.clone()).collect();
        // Behind the lock, which is taken under the jobs' own.
        jobs.into_iter().find(|job| !job.is_over())
    }

    fn clear(&self) {
        let mut state = self.state.lock();
        let left = (std::mem::take(&mut state.chunks), std::mem::take(&mut state.jobs));
        drop(state);
        drop(left);
    }
}

/// What the handles of a chunk's pushes share. A handle costs each push no atomic operation on what other lanes use.
#[derive(Clone)]
struct Shared {
    /// `None` on a copier without threads, where nothing moves a chunk whose copier and handles are gone.
    copier: Option<Arc<Copier>>,
    job: Arc<Job>,
    work: Arc<Pushed>,
}

/// A chunk that takes pushes.
pub(super) struct Filling {
    segment: PinnedBuf,
    /// Whether the segment counts: see [`super::segments`].
    counts: bool,
    layout: Layout,
    stretches: Vec<Stretch>,
    memories: Vec<Arc<Allocation>>,
    /// The numbers of these.
    known: HashSet<u64>,
    bytes: usize,
    pushes: usize,
    shared: Shared,
}

/// What came of a push into the open chunk.
enum Put {
    Done(Shared),
    Full,
}

impl Filling {
    fn put(&mut self, bytes: &[u8], memory: &DeviceSlice) -> Put {
        let number = memory.allocation_number();
        let is_last = self.memories.last().is_some_and(|last| Arc::as_ptr(last).addr() as u64 == number);
        let (mut layout, data) = (self.layout, self.layout.data());
        let part = match layout.put(number, memory.address(), bytes.len()) {
            Some(part) if part.len == bytes.len() => part,
            _ => return Put::Full,
        };
        self.layout = layout;
        // SAFETY: the layout keeps to the segment's capacity, and the segment is borrowed exclusively. The caller's bytes
        // are elsewhere.
        unsafe {
            let base = self.segment.as_mut_ptr();
            base.add(data).write_bytes(0, part.offset - data);
            base.add(part.offset).copy_from_nonoverlapping(bytes.as_ptr(), part.len);
        }
        match self.stretches.last_mut() {
            Some(last) if part.joins => last.len += part.len,
            _ => self.stretches.push(Stretch {
                place: DevicePtr(memory.address()),
                offset: part.offset,
                len: part.len,
            }),
        }
        if !is_last && self.known.insert(number) {
            self.memories.push(memory.allocation());
        }
        self.bytes += bytes.len();
        self.pushes += 1;
        Put::Done(self.shared.clone())
    }
}

/// Chunks of pushes that are under way.
pub(super) struct Going {
    /// By priority.
    taken: [AtomicU64; 2],
    /// How many of them callers have at most, which look for no other jobs.
    callers: AtomicU64,
}

impl Going {
    pub(super) fn new() -> Self {
        Self { taken: [AtomicU64::new(0), AtomicU64::new(0)], callers: AtomicU64::new(0) }
    }

    /// A worker or a caller has taken a chunk. Relaxed, here and below: see [`wakes`](Self::wakes).
    pub(super) fn begin(&self, priority: Priority) {
        self.taken[priority as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end(&self, priority: Priority) {
        self.taken[priority as usize].fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn count(&self, priority: Priority) -> u64 {
        self.taken[priority as usize].load(Ordering::Relaxed)
    }

    /// Runs what may take a chunk for a caller that waits for it, and moves the chunk to its end.
    pub(super) fn by_caller(&self, run: impl FnOnce()) {
        self.callers.fetch_add(1, Ordering::Relaxed);
        run();
        self.callers.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many workers a job of pushes wakes: one, unless a worker has a chunk of pushes. Asked when the job has its place
    /// in the scheduler, under the scheduler's lock. Under that lock a worker looks for jobs after its chunk's end, before it
    /// sleeps; if it then turns to a call that may block, it wakes another one for what is left. A caller that has ended a
    /// chunk looks under that lock, too, and wakes a worker. And a worker that was woken for a caller's job has looked at
    /// that job before it sleeps again, so a job that comes later finds the caller counted. So no ordering but the lock's
    /// is needed.
    pub(super) fn wakes(&self) -> usize {
        let taken = self.count(Priority::Bulk) + self.count(Priority::Foreground);
        usize::from(taken <= self.callers.load(Ordering::Relaxed))
    }
}

/// How many lanes there are, and how many chunks workers have at most, where there are so many segments. So many lanes
/// that threads rarely share one: they would wait for each other's bytes to be copied, at four threads a lane for most of
/// their time. Workers have enough chunks for the depth, or three quarters of the segments where these are few.
fn shares(segments: usize, depth: usize) -> (usize, usize) {
    let usable = usable(segments, Priority::Bulk).saturating_sub(1);
    let lanes = usable.saturating_sub(depth).max(segments / 4).clamp(1, MOST_LANES);
    (lanes, usable.saturating_sub(lanes).clamp(1, depth))
}

/// The lanes of a copier.
pub(super) struct Pushes {
    /// Of bulk pushes, and of the foreground's.
    lanes: [Box<[Lane<Filling>]>; 2],
    pub(super) going: Going,
    /// How many chunks of a priority workers have at most. So many that each lane has a segment beside them: without one
    /// to fill, pushes would wait, and not be combined.
    pub(super) most: u64,
    next: Counter,
    /// Bytes of a segment that are used.
    chunk: usize,
}

impl Pushes {
    pub(super) fn new(settings: &Settings) -> Arc<Self> {
        let (lanes, most) = shares(settings.segments, settings.depth);
        let lanes = || (0..lanes).map(|_| Lane::new()).collect();
        Arc::new(Self {
            lanes: [lanes(), lanes()],
            going: Going::new(),
            most: most as u64,
            next: Counter::new(0),
            chunk: settings.chunk,
        })
    }

    /// Bytes of a push that is combined with others, at most. A worker waits for the push that it meets in a lane.
    fn longest(&self) -> usize {
        LEAST.min(self.chunk / 2)
    }

    /// Drops what is in the lanes.
    pub(super) fn clear(&self) {
        self.lanes.iter().flatten().for_each(Lane::clear);
    }

    /// A job is over.
    fn over(&self, engine: &Engine, place: Place) {
        match self.lanes[place.priority as usize][place.lane].over(place.number) {
            None => self.going.end(place.priority),
            // It has failed before a worker took it.
            Some(Filling { segment, counts, .. }) => give(engine, segment, counts),
        }
    }
}

fn give(engine: &Engine, segment: PinnedBuf, counts: bool) {
    if counts { engine.give(segment) } else { drop(segment) }
}

/// Where a job's chunk is.
#[derive(Clone, Copy)]
struct Place {
    priority: Priority,
    lane: usize,
    number: u64,
}

/// What the workers see of a chunk of pushes.
struct Pushed {
    pushes: Arc<Pushes>,
    place: Place,
    /// The chunk, when it is closed, until it is prepared.
    closed: locks::Mutex<Option<Filling>>,
}

impl Work for Pushed {
    fn is_shared(&self) -> bool {
        true
    }

    fn needs(&self, _: &Cursor) -> Needs {
        Needs::Nothing
    }

    fn cut(&self, cursor: &mut Cursor, _: Option<usize>) -> Chunk {
        let Place { priority, lane, number } = self.place;
        let filling = self.pushes.lanes[priority as usize][lane].close(number);
        let bytes = filling.as_ref().map_or(0, |filling| filling.bytes);
        *self.closed.lock() = filling;
        self.pushes.going.begin(priority);
        cursor.left = bytes as u64;
        finish(cursor, Cut { piece: 1, from: 0 }, bytes, Some(usize::MAX))
    }

    fn prepare(&self, _: &Chunk, _: &mut Packing<'_>, _: &Job) -> Result<Content> {
        let closed = self.closed.lock().take();
        let Some(filling) = closed else { return Err(Error::Internal("a chunk of pushes is not there")) };
        let Filling { segment, counts, stretches, memories, pushes, shared, .. } = filling;
        // Here, without a lock: the copier's last handle may be among it.
        drop(shared);
        let memories = Some(Arc::new(Memories(memories)));
        Ok(Content::Brought(Brought { segment, stretches, counts, pushes, memories }))
    }
}

impl Values for Pushed {
    type Back = ();

    unsafe fn take(&self) -> Result<()> {
        Ok(())
    }
}

impl Copier {
    /// Copies a small piece of borrowed memory to the front of `dst`. The bytes are free when this returns, a fraction of
    /// a microsecond later. Pieces that are pushed while others are in flight, by this thread or by others, go to the
    /// device together; where nothing is in flight a piece goes at once.
    ///
    /// The handle tells when the pieces that go together have arrived. Its [`cancel`](Transfer::cancel) does nothing,
    /// since these may be others' too. Pushes are ordered with nothing: where two write the same bytes, either wins, byte
    /// by byte, unless the first one's handle was waited for. [`wait_for`](Self::wait_for) orders those that follow
    /// behind a stream.
    ///
    /// Waits while all segments are under way. Pieces of more than 256 KiB (or half a [chunk](Self::chunk)) are not
    /// combined with others: they go as by [`upload_pieces`](Self::upload_pieces).
    ///
    /// ```
    /// # use pinpool::{Copier, Device, Pool, Unpinned};
    /// # let device = Device::open("host")?;
    /// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
    /// let copier = Copier::builder(&pool, &device).build()?;
    /// let cache = device.alloc(1 << 20)?;
    /// std::thread::scope(|scope| {
    ///     for n in 0..4_u8 {
    ///         let (copier, place) = (&copier, cache.slice(usize::from(n) * 4096..));
    ///         scope.spawn(move || copier.push(&[n; 4096], place)?.wait().map_err(pinpool::Error::from));
    ///     }
    /// });
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::TooSmall`], [`Error::WrongDevice`], a bad range, [`Error::Forked`], a lost device; what
    /// the pool says; on a thread of the crate, which must not wait, as for [`try_push`](Self::try_push).
    pub fn push(&self, bytes: &[u8], dst: impl DeviceRange) -> Result<Transfer> {
        self.push_if(bytes, dst, true)
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// [`Error::Exhausted`] while all segments are under way; [`Error::Unsupported`] for a piece that is too long to be
    /// combined with others; else as for [`push`](Self::push).
    pub fn try_push(&self, bytes: &[u8], dst: impl DeviceRange) -> Result<Transfer> {
        self.push_if(bytes, dst, false)
    }

    fn push_if(&self, bytes: &[u8], dst: impl DeviceRange, waits: bool) -> Result<Transfer> {
        // No clone of what the caller keeps: threads that push to one allocation would all change its count.
        let memory = self.own_ref(&dst)?;
        let engine = self.engine();
        engine.device.context().alive()?;
        match bytes.len() {
            0 => return Err(Error::Empty),
            need if need > memory.len() => return Err(Error::TooSmall { need, have: memory.len() }),
            len if len > engine.pushes.longest() => return self.push_long(bytes, memory, waits),
            _ => {}
        }
        let lanes = &engine.pushes.lanes[self.priority as usize];
        let place = number() % lanes.len();
        let lane = &lanes[place];
        let mut segment = None;
        loop {
            match lane.put(|open| open.put(bytes, memory)).unwrap_or(Put::Full) {
                Put::Done(shared) => {
                    // Another thread has opened a chunk meanwhile.
                    segment.into_iter().for_each(|(segment, counts)| give(engine, segment, counts));
                    return Ok(self.pushed(shared));
                }
                Put::Full => match segment.take() {
                    Some((segment, counts)) => return self.open(segment, counts, place, bytes, memory),
                    None => segment = Some(self.push_segment(lane, waits)?),
                },
            }
        }
    }

    fn pushed(&self, shared: Shared) -> Transfer {
        let Shared { copier, job, work } = shared;
        Transfer::shared(copier.unwrap_or_else(|| Arc::new(self.clone())), job, work)
    }

    fn push_long(&self, bytes: &[u8], memory: &DeviceSlice, waits: bool) -> Result<Transfer> {
        if waits {
            return self.upload_pieces(&[(bytes, memory.clone())]);
        }
        Err(Error::Unsupported(format!(
            "a push of {} bytes that does not wait; at most {} are combined with others: push fewer at a time, or call \
             `upload_pieces`",
            bytes.len(),
            self.engine().pushes.longest()
        )))
    }

    /// A segment for a lane's next chunk, and whether it counts.
    fn push_segment(&self, lane: &Lane<Filling>, waits: bool) -> Result<(PinnedBuf, bool)> {
        let (engine, segments) = (self.engine(), &self.engine().segments);
        loop {
            if let Some(segment) = segments.take_more(self.priority)? {
                return Ok((segment, true));
            }
            let waits = waits && may_wait().is_ok();
            match lane.first() {
                // Other lanes' chunks may end before, or the pool may have room.
                Some(job) if waits => _ = engine.wait(&job, Instant::now().checked_add(AGAIN), Job::is_over),
                Some(_) => return Err(segments.exhausted()),
                // As a feed's first segment: the lane waits in the pool's queue, since it has none of its own to wait for.
                None if waits => return Ok((segments.pool.wait_for_copier(segments.full(), None)?, false)),
                None => return Ok((segments.pool.try_checkout(segments.full())?, false)),
            }
        }
    }

    /// Opens a chunk with a first push in it.
    fn open(
        &self,
        segment: PinnedBuf,
        counts: bool,
        lane: usize,
        bytes: &[u8],
        memory: &DeviceSlice,
    ) -> Result<Transfer> {
        let (engine, priority) = (self.engine(), self.priority);
        let pushes = engine.pushes.clone();
        // Relaxed: only to be different.
        let place = Place { priority, lane, number: pushes.next.fetch_add(1, Ordering::Relaxed) };
        let work = Arc::new(Pushed { pushes, place, closed: locks::Mutex::default() });
        // Until the chunk is closed its first push stands for all of them.
        let plan = Plan {
            direction: Direction::Up,
            priority,
            total: bytes.len() as u64,
            name: None,
            memories: Vec::new(),
            spans: Vec::new(),
            fed: false,
            trace: None,
            timeout: None,
        };
        let job = self.job(plan, Body::Owned(work.clone()));
        let weak = Arc::downgrade(engine);
        job.hold(
            false,
            Box::new(move || {
                if let Some(engine) = weak.upgrade() {
                    engine.pushes.over(&engine, place);
                }
            }),
        );
        let copier = (engine.settings.threads > 0).then(|| Arc::new(self.clone()));
        let shared = Shared { copier, job: job.clone(), work };
        let mut filling = Filling {
            segment,
            counts,
            layout: Layout::new(engine.pushes.chunk),
            stretches: Vec::with_capacity(FIRST),
            memories: Vec::new(),
            known: HashSet::new(),
            bytes: 0,
            pushes: 0,
            shared: shared.clone(),
        };
        // It fits: `longest`.
        filling.put(bytes, memory);
        engine.pushes.lanes[priority as usize][lane].open(place.number, filling, job.clone());
        engine.start(&job, 0).inspect_err(|error| job.fail(error.clone()))?;
        Ok(self.pushed(shared))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Each of sixteen threads has a lane where a copier has the default share; and there is always a lane, a chunk for
    /// the workers, and a segment for both.
    #[test]
    fn lanes_and_chunks_share_the_segments() {
        assert_eq!(
            [1, 3, 7, 28, 56].map(|segments| shares(segments, 8)),
            [(1, 1), (1, 1), (1, 4), (16, 8), (40, 8)]
        );
        for segments in 1..300 {
            for depth in 1..40 {
                let (lanes, most) = shares(segments, depth);
                assert!(lanes >= 1 && (1..=depth).contains(&most), "{segments}, {depth}");
                assert!(lanes + most <= segments.max(2), "{segments}, {depth}: {lanes} lanes, {most} chunks");
            }
        }
    }
}

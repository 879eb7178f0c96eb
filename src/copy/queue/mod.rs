//! The copy queue: many threads push small copies, a few submit them in batches.
//!
//! A small copy costs the caller of the driver microseconds, and sixteen callers at once wait for each other: together
//! they get no more copies than one of them, 0.38 million a second, measured. Pushed to a queue a copy costs its caller
//! the time to put it into a list, and the driver is called once for all that has come in from all threads
//! (`cuMemcpyBatchAsync` where there is one).
//!
//! One thread submits some 1.3 to 2 million copies a second in long batches, all of its time being the driver's. Where
//! there are processors enough the queue has a second and a third thread with streams of their own, which are used, and
//! awake, only while the first has more than it can submit.
//!
//! # Files
//!
//! [`lane`]: where copies are pushed to, and where their handles find out; [`line`]: how these do. [`flow`]: the copies
//! of one direction, how they are submitted and how they land. [`bell`]: who submits, and who wakes whom. [`overlap`]:
//! what must not share a batch. Here: what users see, and the queue's thread.

mod bell;
mod flow;
mod lane;
mod line;
#[cfg(all(test, loom))]
mod loom_models;
mod overlap;

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::bell::Bell;
use self::flow::Flow;
use self::line::Line;
use super::{DeviceRange, Landing, range};
use crate::buffer::{InFlight, Lend};
use crate::device::Transfer;
use crate::device::handle::Device;
use crate::device::memory::{DeviceSlice, bounds};
use crate::error::{Error, Result, SubmitError};
use crate::foreign;
use crate::sealed::KEY;
use crate::stream::Stream;
use crate::stream::awaited::{Place, Range};
use crate::stream::timeline::Resource;
use crate::sync::{Own, yield_now};

/// Copies that may be outstanding in a lane, unless somebody asks for another depth.
const DEPTH: usize = 1024;
/// Lanes of a direction at most.
const LANES: usize = 64;
/// On machines with fewer processors one thread submits, or two. (The driver takes 1.3 to 2 million copies of 4 KiB a
/// second from one thread in long batches, and a fifth to a third more from three; from four no more.)
const FEW: usize = 8;
const MANY: usize = 12;
/// Copies of so many bytes bring the link to its speed from one stream, or two: the device takes turns between streams,
/// which costs more than a second thread gains. (64 KiB in batches of 64 by 1, 2, 3 threads: up 0.92, 0.95, 0.94, down
/// 0.96, 0.93, 0.94 of the link.)
const LONG: usize = 32 << 10;
const LONG_UP: usize = 2;
const LONG_DOWN: usize = 1;
/// Threads of a queue at most.
const THREADS: usize = 8;
/// Copies that a thread pushes to one flow under load before it turns to another.
const STAY: usize = 64;
/// Between two looks of a queue's thread that is about to end, and may not yet.
const ENDING: Duration = Duration::from_millis(1);
/// How long a queue's thread looks for copies before it sleeps.
const LINGER: Duration = Duration::from_micros(100);

std::thread_local! {
    /// Numbers threads, so that neighbours have different lanes.
    static NUMBER: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
    /// Counts this thread's copies while there is load.
    static TURN: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// This thread's number.
fn number() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            // Relaxed: only to be different.
            number.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        }
        number.get()
    })
}

/// Many threads' small copies, submitted in batches by a few: [`Device::copy_queue`]. Cloning gives another handle to
/// the same queue.
///
/// [`upload`](Self::upload) and [`download`](Self::download) take what they touch, as those of a [`Stream`] do, push
/// the copy, and return at once; the handle that they give can be waited for, awaited, asked, or dropped. A push costs
/// a fraction of a microsecond, whatever other threads do. A copy that is pushed while the queue is idle is submitted
/// at once, by the thread that pushes it.
///
/// # Ordering
/// **There is none but through handles.** Two copies of one queue may happen in any order or at once, also those of one
/// thread, and of two uploads to the same bytes either may win. To have something happen after a copy, wait for its
/// handle, or make a stream wait: [`Stream::wait_for_copy`]. To have copies happen after the work of a stream, make the
/// queue wait: [`wait_for`](Self::wait_for).
///
/// # How much can be outstanding
/// Each pushing thread has a lane for each direction (and for each of the queue's submitting threads), which it may
/// have to share with others once more threads than there are lanes (twice as many as processors, 4 to 64) have pushed
/// to any queue of the process. A lane takes as many copies that are not complete as the queue is [deep](QueueOptions).
/// A push to a full lane waits; [`try_upload`](Self::try_upload) and [`try_download`](Self::try_download) return
/// [`Error::QueueFull`] instead. So a task that must not block uses these, and awaits an older handle on that error.
///
/// # Errors
/// What can be refused is refused by the push, which gives the buffer back. A copy that the driver refuses later fails
/// alone, whatever batch it was in: its handle says so, and its buffer returns by itself when the device is known to be
/// done with it. When the device is lost, so is all that is in flight, as on a stream.
///
/// # The end
/// Dropping the last handle waits for nothing: what was pushed is submitted, and then the queue's thread ends.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// let device = Device::open("auto")?;
/// let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// let (queue, cache) = (device.copy_queue()?, device.alloc(64 << 10)?);
///
/// let mut sent = Vec::new();
/// for block in 0..16 {
///     let mut buf = pool.checkout(4096)?;
///     buf.try_resize(4096, block)?;
///     sent.push(queue.upload(buf, cache.slice(usize::from(block) * 4096..).and_then(|rest| rest.slice(..4096)))?);
/// }
/// // Work submitted to this stream from here on finds the last block there.
/// let stream = device.stream()?;
/// stream.wait_for_copy(&sent[15])?;
/// for copy in sent {
///     drop(copy.wait()?);
/// }
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct CopyQueue(Arc<Inner>);

/// How a copy queue is set up: [`Device::copy_queue_with`].
///
/// ```
/// use pinpool::QueueOptions;
///
/// # let device = pinpool::Device::open("host")?;
/// let queue = device.copy_queue_with(QueueOptions::new().depth(256).threads(1))?;
/// # drop(queue);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    depth: usize,
    threads: Option<usize>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl QueueOptions {
    /// The defaults, as [`Device::copy_queue`] uses them.
    #[must_use]
    pub fn new() -> Self {
        Self { depth: DEPTH, threads: None }
    }

    /// How many copies that are not complete a lane takes before a push has to wait. Default: 1024; at least 1.
    #[must_use]
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// How many threads submit at most, 1 to 8. Default: 1 on machines with less than 8 processors, 2 with less than
    /// 12, else 3. Each but the first is awake only while there are more copies than those before it can submit. A
    /// stepped device has none.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }
}

/// A [`CopyQueue`]'s counts: [`CopyQueue::stats`]. Each is right by itself; together they are of one moment only while
/// no thread pushes.
///
/// ```
/// # let device = pinpool::Device::open("host")?;
/// let queue = device.copy_queue()?;
/// let stats = queue.stats();
/// println!("{} copies in {} batches, {} outstanding", stats.copies, stats.batches, stats.outstanding);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStats {
    /// Copies that were submitted.
    pub copies: u64,
    /// Batches that they were submitted in, those of one copy included.
    pub batches: u64,
    /// Copies that were pushed and are not complete. Those that were lost with the device stay here.
    pub outstanding: u64,
}

struct Inner {
    up: Way,
    down: Way,
    /// Of the threads.
    bells: Vec<Arc<Bell>>,
}

/// A direction: a flow for each of the queue's threads, and how many of these long copies are spread over.
struct Way(Vec<Side>, usize);

/// A flow, as it is pushed to.
struct Side {
    stream: Stream,
    flow: Arc<Flow>,
    lines: Box<[Arc<Line>]>,
}

impl Device {
    /// A queue for many small copies. Makes two streams and a thread, or two or three times as many of each (from 8 and
    /// from 12 processors on): make it at start-up, and share it.
    ///
    /// # Errors
    /// What the driver says, the device's loss; [`Error::Unavailable`] where no thread can be started.
    pub fn copy_queue(&self) -> Result<CopyQueue> {
        self.copy_queue_with(QueueOptions::new())
    }

    /// The same for a queue that is not as by default.
    ///
    /// # Errors
    /// As for [`copy_queue`](Self::copy_queue).
    pub fn copy_queue_with(&self, options: QueueOptions) -> Result<CopyQueue> {
        let QueueOptions { depth, threads } = options;
        let context = self.context();
        let is_stepped = context.driver().stepped().is_some();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let lanes = (processors * 2).clamp(4, LANES);
        let threads = match threads {
            _ if is_stepped => 1,
            Some(threads) => threads.clamp(1, THREADS),
            None if processors < FEW => 1,
            None if processors < MANY => 2,
            None => 3,
        };
        let bells: Vec<_> = (0..threads).map(|_| Arc::new(Bell::asleep())).collect();
        let way = |writes| -> Result<Way> {
            let side = |bell: &Arc<Bell>| -> Result<Side> {
                let stream = self.stream()?;
                let flow =
                    Flow::new(stream.timeline().clone(), lanes, depth.max(1) as u64, writes, bell.clone());
                let line = |lane| Arc::new(Line { flow: flow.clone(), lane });
                Ok(Side { lines: (0..lanes as u32).map(line).collect(), stream, flow })
            };
            let sides = bells.iter().map(side).collect::<Result<_>>()?;
            Ok(Way(sides, if writes { LONG_UP } else { LONG_DOWN }))
        };
        let inner = Inner { up: way(true)?, down: way(false)?, bells: bells.clone() };
        if is_stepped {
            return Ok(CopyQueue(Arc::new(inner)));
        }
        for ((up, down), bell) in inner.up.0.iter().zip(&inner.down.0).zip(&bells) {
            let flows = [up.flow.clone(), down.flow.clone()];
            let (device, bell) = (self.clone(), bell.clone());
            // Where the second cannot be started the first ends when `inner` is dropped.
            let name = format!("pinpool-send-{}", self.name());
            crate::os::thread::spawn(name, move || {
                foreign::live("a copy queue's thread panicked: it goes on", || serve(&device, &flows, &bell))
            })
            .map_err(|e| Error::Unavailable {
                device: self.name().into(),
                why: format!("no thread could be started: {e}"),
            })?;
        }
        Ok(CopyQueue(Arc::new(inner)))
    }
}

/// A thread of the queue's: submits what is pushed, and while nothing is, looks for what is done.
fn serve(device: &Device, flows: &[Arc<Flow>; 2], bell: &Bell) {
    crate::sync::enter(Own::Submitter);
    device.context().driver().enter_thread();
    bell.introduce(crate::sync::thread::current());
    let filled = || flows.iter().any(|flow| flow.is_filled());
    let mut idle: Option<Instant> = None;
    while !crate::os::forked() {
        let mut submitted = false;
        for flow in flows.iter().filter(|flow| flow.is_filled()) {
            submitted |= flow.submit();
        }
        if submitted {
            idle = None;
            continue;
        }
        if bell.is_closing() {
            if flows.iter().all(|flow| flow.is_over()) {
                return;
            }
            // Somebody submits just now, and may leave some of it. Nobody rings then: the thread is awake.
            crate::sync::thread::park_until(Some(Instant::now() + ENDING));
            continue;
        }
        flows.iter().for_each(|flow| flow.relax());
        if idle.get_or_insert_with(Instant::now).elapsed() < LINGER {
            for flow in flows.iter().filter(|flow| flow.is_flying()) {
                flow.look();
            }
            std::hint::spin_loop();
            yield_now();
            continue;
        }
        bell.sleep(|| !filled());
        idle = None;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if crate::os::forked() {
            // There is no thread, and what waits or is pushed is the parent's.
            return self.sides().for_each(|side| std::mem::forget(side.flow.clone()));
        }
        self.bells.iter().for_each(|bell| bell.close());
    }
}

impl Inner {
    fn sides(&self) -> impl Iterator<Item = &Side> {
        self.up.0.iter().chain(&self.down.0)
    }
}

/// Whether a push waits for room.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    Wait,
    None,
}

/// Whether this thread may wait for copies: those that find out what is done may not, be it for good or, in a waker,
/// just now.
fn may_wait() -> bool {
    !crate::sync::finds_out() && crate::sync::own() != Some(Own::Submitter)
}

impl Way {
    /// The flows for copies of so many bytes: one at least.
    fn of(&self, len: usize) -> &[Side] {
        if len < LONG { &self.0[..] } else { &self.0[..self.0.len().min(self.1)] }
    }

    /// Where this thread pushes its next copy, of so many bytes: the first flow, until more comes in there than goes
    /// out.
    fn side(&self, len: usize) -> &Side {
        let sides = self.of(len);
        if sides.len() == 1 || !sides[0].flow.is_pressed() {
            return &sides[0];
        }
        // Not one here and one there: batches are to find neighbours.
        let turn = TURN.with(|turn| turn.replace(turn.get().wrapping_add(1)));
        &sides[(number() + turn / STAY) % sides.len()]
    }
}

impl Side {
    fn line(&self) -> &Arc<Line> {
        // There are 4 at least.
        &self.lines[number() % self.lines.len()]
    }

    /// Pushes one copy, and gives its place and what `give` left with the caller. `give` is called when nothing can be
    /// refused any more.
    fn push<R>(
        &self,
        patience: Patience,
        transfer: Transfer,
        memory: DeviceSlice,
        give: impl FnOnce() -> (Resource, R),
    ) -> Result<(Place, R)> {
        let line = self.line();
        let (lane, flow) = (line.lane(), &line.flow);
        let entry = loop {
            match lane.enter(flow.depth()) {
                Ok(entry) => break entry,
                Err(Error::QueueFull { .. }) if patience == Patience::Wait && may_wait() => {
                    let last = lane.room_after(flow.depth());
                    // Whether that one failed is its own handle's affair.
                    let lost = flow.wait(lane, &Range::whole(last), None);
                    lost?;
                }
                Err(error) => return Err(error),
            }
        };
        let (resource, left) = give();
        let quiet = !matches!(resource, Resource::Segment(_));
        let number = line.submit(entry, transfer, resource, memory.into_allocation());
        Ok((Place { line: line.clone(), range: Range { first: number, last: number }, quiet }, left))
    }

    /// Device memory of this queue's device, and there for its stream.
    fn own(&self, range: impl DeviceRange) -> Result<DeviceSlice> {
        let slice = range::Sealed::resolve(range, KEY)?;
        let timeline = self.flow.timeline();
        crate::os::check_fork()?;
        if !slice.is_of(timeline.context()) {
            return Err(Error::WrongDevice { device: self.stream.device().name().into() });
        }
        timeline.context().alive()?;
        slice.admit(timeline.stream())?;
        Ok(slice)
    }
}

impl CopyQueue {
    /// The device that the queue belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.0.up.0[0].stream.device()
    }

    /// Pushes a copy of all that was written to `src` into `dst`, which must be at least as long. Waits only while the
    /// lane is full.
    ///
    /// # Errors
    /// With the buffer: [`Error::Empty`], [`Error::TooSmall`], [`Error::WrongDevice`], a bad range,
    /// [`Error::QueueClosed`], a lost device. In a waker, which must not wait, also [`Error::QueueFull`].
    pub fn upload<B: Lend>(&self, src: B, dst: impl DeviceRange) -> Result<InFlight<B>, SubmitError<B>> {
        self.push_upload(Patience::Wait, src, .., dst)
    }

    /// Pushes a copy of a part of what was written to `src`.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload), and [`Error::OutOfRange`].
    pub fn upload_part<B: Lend>(
        &self,
        src: B,
        part: impl RangeBounds<usize>,
        dst: impl DeviceRange,
    ) -> Result<InFlight<B>, SubmitError<B>> {
        self.push_upload(Patience::Wait, src, part, dst)
    }

    /// The same as [`upload`](Self::upload) without ever waiting.
    ///
    /// # Errors
    /// As there, and [`Error::QueueFull`].
    pub fn try_upload<B: Lend>(&self, src: B, dst: impl DeviceRange) -> Result<InFlight<B>, SubmitError<B>> {
        self.push_upload(Patience::None, src, .., dst)
    }

    fn push_upload<B: Lend>(
        &self,
        patience: Patience,
        src: B,
        part: impl RangeBounds<usize>,
        dst: impl DeviceRange,
    ) -> Result<InFlight<B>, SubmitError<B>> {
        // Asked once: a value of the caller's may answer otherwise the next time.
        let all = src.bytes(KEY);
        let side = self.0.up.side(all.len());
        let pushed = (|| {
            let dst = side.own(dst)?;
            if !src.serves(side.flow.timeline().context(), KEY) {
                return Err(Error::WrongDevice { device: self.device().name().into() });
            }
            let (start, end) = bounds(part, all.len())?;
            if end - start > dst.len() {
                return Err(Error::TooSmall { need: end - start, have: dst.len() });
            }
            let bytes = &all[start..end];
            let transfer = Transfer::Upload { src: bytes.as_ptr(), dst: dst.ptr(), len: bytes.len() };
            side.push(patience, transfer, dst, || (src.lend(KEY), ()))
        })();
        match pushed {
            Ok((place, ())) => Ok(InFlight::queued(place, src, None)),
            Err(error) => Err(SubmitError::refused(error, src)),
        }
    }

    /// Pushes a copy of `src` into `landing`, which must be at least as long. When the copy is complete, the buffer's
    /// length is the slice's. (A [`Registered`](crate::Registered) value keeps its length.) Waits only while the lane
    /// is full.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload); [`Error::WrongStream`] for a [`StreamBuf`](crate::StreamBuf), which is ready on
    /// its own stream only.
    pub fn download<L: Landing>(
        &self,
        src: impl DeviceRange,
        landing: L,
    ) -> Result<InFlight<L::Landed>, SubmitError<L>> {
        self.push_download(Patience::Wait, src, landing)
    }

    /// The same without ever waiting.
    ///
    /// # Errors
    /// As for [`download`](Self::download), and [`Error::QueueFull`].
    pub fn try_download<L: Landing>(
        &self,
        src: impl DeviceRange,
        landing: L,
    ) -> Result<InFlight<L::Landed>, SubmitError<L>> {
        self.push_download(Patience::None, src, landing)
    }

    fn push_download<L: Landing>(
        &self,
        patience: Patience,
        src: impl DeviceRange,
        mut landing: L,
    ) -> Result<InFlight<L::Landed>, SubmitError<L>> {
        let src = range::Sealed::resolve(src, KEY);
        let side = self.0.down.side(src.as_ref().map_or(0, DeviceSlice::len));
        let checked = side.own(src).and_then(|src| {
            let (target, capacity) = landing.target(&side.stream, KEY)?;
            if src.len() > capacity {
                return Err(Error::TooSmall { need: src.len(), have: capacity });
            }
            Ok((src, target))
        });
        let (src, target) = match checked {
            Ok(checked) => checked,
            Err(error) => return Err(SubmitError::refused(error, landing)),
        };
        let len = src.len();
        let transfer = Transfer::Download { src: src.ptr(), dst: target, len };
        // Taken out when nothing can be refused any more.
        let mut landing = Some(landing);
        let pushed =
            side.push(patience, transfer, src, || match landing.take().map(|landing| landing.lend(KEY)) {
                Some((resource, half)) => (resource, Some(half)),
                None => (Resource::Object(Box::new(())), None),
            });
        match pushed {
            Ok((place, Some(half))) => Ok(InFlight::queued(place, L::Landed::from(half), Some(len))),
            Ok((_, None)) => Err(SubmitError { error: Error::QueueClosed, buffer: None }),
            Err(error) => Err(SubmitError { error, buffer: landing }),
        }
    }

    /// What is pushed from now on happens only after everything submitted to `stream` so far. The caller does not wait;
    /// but all copies of the queue do, those of other threads too. The stream must be of the queue's device.
    ///
    /// # Errors
    /// As for [`Stream::wait_for`].
    pub fn wait_for(&self, stream: &Stream) -> Result<()> {
        self.0.sides().try_for_each(|side| side.stream.wait_for(stream))
    }

    /// Waits until everything that was pushed before this call, by whatever thread, is done. What became of it, the
    /// handles tell.
    ///
    /// # Errors
    /// What the device was lost with.
    pub fn synchronize(&self) -> Result<()> {
        self.finish(None, false)
    }

    /// What the queue has done so far, in both directions together.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        let mut stats = QueueStats::default();
        // In the child of a fork the locks may be anyone's.
        for flow in self.0.sides().map(|side| &side.flow).filter(|_| !crate::os::forked()) {
            let (batches, copies) = flow.submitted();
            stats.batches += batches;
            stats.copies += copies;
            stats.outstanding += flow.lanes().map(|lane| lane.outstanding()).sum::<u64>();
        }
        stats
    }

    /// Takes no more copies, and waits until all that were pushed are done. Whatever becomes of that, they are
    /// submitted.
    ///
    /// # Errors
    /// [`Error::Timeout`]: some are still under way. What the device was lost with.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        let since = Instant::now();
        self.finish(since.checked_add(timeout), true).map_err(|error| error.waited(since))
    }

    fn finish(&self, deadline: Option<Instant>, close: bool) -> Result<()> {
        crate::os::check_fork()?;
        let mut pushed = Vec::new();
        for flow in self.0.sides().map(|side| &side.flow) {
            pushed.extend(flow.lanes().map(|lane| {
                let last = if close { lane.close() } else { lane.pushed() };
                (flow, lane, last)
            }));
        }
        for (flow, lane, last) in pushed {
            flow.wait(lane, &Range::whole(last), deadline)?;
        }
        Ok(())
    }
}

impl fmt::Debug for CopyQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let depth = self.0.up.0[0].flow.depth();
        f.debug_struct("CopyQueue")
            .field("device", &self.device().name())
            .field("depth", &depth)
            .finish_non_exhaustive()
    }
}

//! A load under way, for any number of threads and tasks.
//!
//! The tensors of a load have places, from 0 on, in the order in which they come out. What is known of their arrival is one
//! number: how many have come out. A tensor is made when it is taken, of its [`Part`], which never changes.
//!
//! A [`Driver`] polls the transfers in that order. Whoever waits takes it, polls it without a lock, and puts it back. The
//! driver's waker wakes all tasks that wait; one that found the driver taken is woken when it is put back. A thread that
//! waits is a task that parks.
//!
//! # Invariants
//!
//! - The last tensor of a file comes out only when the transfer is over and the file was found unchanged. An error
//!   takes the place of a tensor, and ends the load.
//! - A call that waits for all of its load (`load`, `Checkpoint::tensor`) returns only when nothing of its transfers is
//!   under way: its `Driver` waits when it is dropped.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::thread::{self, Thread};

use parking_lot::Mutex;
use pinpool::copier::{Canceller, Copier, CopyRange, FileSource, Progress, Transfer, may_wait};
use pinpool::{Error, Result};

use super::Files;
use super::header::Tensor;
use super::load::{DeviceTensor, not_there};

/// A load under way, for tasks on any runtime and for threads. A clone is another handle to the same load: many threads and
/// tasks share it, and each waits for the tensors that it needs by name ([`take`](Self::take)) while others are copied.
///
/// **The drop of the last handle cancels the rest**; tensors that have come out stay. An error comes in the place of the
/// first tensor that cannot be loaded, and ends the load: each handle gives it, once, and then `None`. When the last
/// tensor comes out, the copier has given back all memory that it used for the load.
///
/// [`Loader`](super::Loader) has an example.
///
/// # Errors
/// [`Error::Tensor`] with the name of the first tensor that is not on the device, how many are, and the cause
/// ([`Error::Read`] with file and offset, [`Error::Transfer`] with the error of the pool or the device);
/// [`Error::Cancelled`]; [`Error::Timeout`] after the copier's deadline
/// ([`Copier::with_timeout`](pinpool::Copier::with_timeout)), when the tensors that have arrived by then have come out;
/// [`Error::Malformed`] in the place of the last tensor of a file that was written to meanwhile, whose other tensors may
/// then be wrong; [`Error::Unsupported`] for a wait on a thread that must not (in a waker, a source or a sink), which
/// ends nothing; [`Error::Forked`].
#[must_use = "dropping it cancels the load"]
pub struct Load {
    shared: Arc<Shared>,
    /// Whether this handle's iteration has given the error. Relaxed: the error itself is read under the lock.
    told: AtomicBool,
}

impl Clone for Load {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), told: AtomicBool::new(false) }
    }
}

struct Shared {
    copier: Copier,
    files: Arc<Files>,
    parts: Vec<Part>,
    cancellers: Vec<Canceller>,
    state: Mutex<State>,
    /// The driver's waker.
    waker: Waker,
}

#[derive(Default)]
struct State {
    /// `None` while a thread has it.
    driver: Option<Driver>,
    /// How many tensors have come out.
    out: usize,
    /// Which were taken: all before `next`, and as many as `taken` says in all.
    is_taken: Vec<bool>,
    next: usize,
    taken: usize,
    /// How far the load had come when it ended, and the error that it ended with.
    over: Option<Progress>,
    error: Option<Error>,
    /// Tasks that wait: those that the driver wakes, and those that found it taken.
    tasks: Vec<Waker>,
    missed: Vec<Waker>,
}

impl State {
    /// Takes the tensor at a place, or the next that nobody has taken, if it has come out, and gives its place. An inner
    /// `None`: it was taken before.
    #[inline]
    fn found(&mut self, wanted: Option<usize>) -> Option<Option<usize>> {
        while self.next < self.out && self.is_taken[self.next] {
            self.next += 1;
        }
        let place = wanted.unwrap_or(self.next);
        if place >= self.out {
            return None;
        }
        let is_taken = std::mem::replace(&mut self.is_taken[place], true);
        self.taken += usize::from(!is_taken);
        Some((!is_taken).then_some(place))
    }
}

/// It does not keep the load, which has it.
struct WakesTasks(Weak<Shared>);

impl Wake for WakesTasks {
    fn wake(self: Arc<Self>) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.state.lock();
        let mut tasks = std::mem::take(&mut state.tasks);
        tasks.append(&mut state.missed);
        drop(state);
        wake_all(tasks);
    }
}

/// Wakes tasks, under no lock: wakers are code of the program's. One that panics keeps none of the others asleep.
fn wake_all(tasks: Vec<Waker>) {
    for task in tasks {
        // The drop of what it panics with may panic too, so that is leaked.
        let _ = catch_unwind(AssertUnwindSafe(|| task.wake())).map_err(std::mem::forget);
    }
}

/// The waker of a thread that waits.
struct Unparks(Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static THREAD: Waker = Arc::new(Unparks(thread::current())).into();
}

impl Shared {
    /// The place of a tensor.
    fn place(&self, name: &str) -> Option<usize> {
        let (shard, tensor) = self.files.place(name)?;
        let mut parts = self.parts.iter().filter(|part| part.number == shard);
        parts.find_map(|part| Some(part.first + part.chosen.binary_search(&tensor).ok()?))
    }

    /// The tensor at a place.
    #[inline]
    fn tensor(&self, place: usize) -> Result<DeviceTensor> {
        let part = &self.parts[self.parts.partition_point(|part| part.first <= place) - 1];
        let index = part.chosen[place - part.first];
        let tensor = Tensor { table: self.files.headers[part.number as usize].0.clone(), index };
        let Range { start, end } = tensor.range();
        let range = part.ranges.partition_point(|range| range.at <= start).checked_sub(1);
        let slice = range.filter(|_| start < end).map(|range| {
            let CopyRange { at, device, .. } = &part.ranges[range];
            device.slice((start - at) as usize..(end - at) as usize)
        });
        Ok(DeviceTensor { tensor, slice: slice.transpose()? })
    }

    fn progress(&self, over: bool) -> Progress {
        let (mut all, mut whole) = (Progress::default(), true);
        for progress in self.cancellers.iter().map(Canceller::progress) {
            all.total += progress.total;
            all.done += progress.done;
            whole = whole && progress.done == progress.total;
            all.landed_to += if whole { progress.total } else { 0 };
            all.elapsed = all.elapsed.max(progress.elapsed);
        }
        all.over = over;
        all
    }

    /// Looks for a tensor without waiting. An outer `None`: it is to be waited for. Inlined, since each function that a
    /// tensor is passed through by memory costs more than finding it.
    #[inline]
    fn now(&self, wanted: Option<usize>) -> Option<Option<Result<DeviceTensor>>> {
        // There a lock may have been taken for ever.
        if pinpool::forked() {
            return Some(Some(Err(Error::Forked)));
        }
        let mut state = self.state.lock();
        match state.found(wanted) {
            Some(place) => {
                drop(state);
                Some(place.map(|place| self.tensor(place)))
            }
            None => state.over.map(|_| state.error.clone().map(Err)),
        }
    }

    fn poll(&self, cx: &Context<'_>, wanted: Option<usize>) -> Poll<Option<Result<DeviceTensor>>> {
        loop {
            if let Some(found) = self.now(wanted) {
                return Poll::Ready(found);
            }
            // Outside of the lock: cloning a waker is code of the program's.
            let task = cx.waker().clone();
            let mut state = self.state.lock();
            if state.over.is_some() || wanted.unwrap_or(state.next) < state.out {
                continue;
            }
            let driver = state.driver.take();
            let list = if driver.is_some() { &mut state.tasks } else { &mut state.missed };
            if !list.iter().any(|other| other.will_wake(&task)) {
                list.push(task);
            }
            drop(state);
            let Some(driver) = driver else { return Poll::Pending };
            if !self.advance(driver) {
                return Poll::Pending;
            }
        }
    }

    /// Polls the driver, which was taken, and puts it back. Whether anything has come of it.
    fn advance(&self, mut driver: Driver) -> bool {
        let polled = driver.advance(&self.files, &self.parts, &mut Context::from_waker(&self.waker));
        let over = driver.transfers.is_empty().then(|| self.progress(true));
        let mut state = self.state.lock();
        let mut woken = std::mem::take(&mut state.missed);
        if polled.is_ready() {
            // Whoever waits looks.
            woken.append(&mut state.tasks);
        }
        if let Poll::Ready(Err(error)) = &polled {
            state.error = Some(error.clone());
        }
        (state.out, state.over, state.driver) = (driver.out, over, Some(driver));
        drop(state);
        wake_all(woken);
        polled.is_ready()
    }

    /// Blocks the thread until a tensor is found: [`poll`](Self::poll) for threads.
    #[inline]
    fn wait(&self, wanted: Option<usize>) -> Option<Result<DeviceTensor>> {
        self.now(wanted).unwrap_or_else(|| self.park(wanted))
    }

    /// Polls and parks by turns until the tensor is found. A stepped device, which wakes nobody, is stepped in between.
    #[cold]
    fn park(&self, wanted: Option<usize>) -> Option<Result<DeviceTensor>> {
        THREAD.with(|waker| {
            loop {
                if let Poll::Ready(found) = self.poll(&Context::from_waker(waker), wanted) {
                    return found;
                }
                if let Err(error) = may_wait() {
                    return Some(Err(error));
                }
                match self.copier.step() {
                    true => thread::yield_now(),
                    false => thread::park(),
                }
            }
        })
    }
}

impl Load {
    pub(super) fn new(copier: Copier, files: Arc<Files>, parts: Vec<Part>, driver: Driver) -> Self {
        let transfers = driver.transfers.iter().flatten();
        let cancellers = transfers.map(Transfer::canceller).collect();
        let count = parts.last().map_or(0, Part::end);
        let shared = Arc::new_cyclic(|shared| Shared {
            copier,
            files,
            parts,
            cancellers,
            state: Mutex::new(State {
                driver: Some(driver),
                is_taken: vec![false; count],
                ..State::default()
            }),
            waker: Waker::from(Arc::new(WakesTasks(shared.clone()))),
        });
        if count == 0 {
            shared.state.lock().over = Some(shared.progress(true));
        }
        Self { shared, told: AtomicBool::new(false) }
    }

    /// What an iteration gives: the load's error once. (A thread that must not wait may be told so again and again.)
    #[inline]
    fn tell(&self, next: Option<Result<DeviceTensor>>) -> Option<Result<DeviceTensor>> {
        let ends = matches!(&next, Some(Err(error)) if !matches!(error, Error::Unsupported(_)));
        next.filter(|_| !ends || !self.told.swap(true, Ordering::Relaxed))
    }

    /// The next tensor that nobody has taken, for a task, which is not blocked. `None`: there are no more.
    ///
    /// # Errors
    /// See [`Load`].
    pub async fn next_tensor(&self) -> Option<Result<DeviceTensor>> {
        self.tell(poll_fn(|cx| self.shared.poll(cx, None)).await)
    }

    /// An iterator over the tensors that nobody has taken, which waits for each, and blocks its thread meanwhile. Dropped,
    /// it leaves the load as it is.
    pub fn blocking(&self) -> impl Iterator<Item = Result<DeviceTensor>> {
        std::iter::from_fn(|| self.tell(self.shared.wait(None)))
    }

    /// Takes a tensor, and waits until it is on the device. `None`: the load has none of this name, or it was taken.
    ///
    /// # Errors
    /// Of a tensor that is not on the device when the load ends: what the load has ended with (see [`Load`]), for each of
    /// them.
    pub fn take(&self, name: &str) -> Result<Option<DeviceTensor>> {
        self.shared.place(name).and_then(|place| self.shared.wait(Some(place))).transpose()
    }

    /// The same for a task, which is not blocked, on any runtime. A future that is dropped has taken nothing.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub async fn take_async(&self, name: &str) -> Result<Option<DeviceTensor>> {
        let Some(place) = self.shared.place(name) else { return Ok(None) };
        poll_fn(|cx| self.shared.poll(cx, Some(place))).await.transpose()
    }

    /// The number of tensors that can still be taken: 0 behind an error, but for those that had come out before.
    #[must_use]
    pub fn left(&self) -> usize {
        if pinpool::forked() {
            return 0;
        }
        let state = self.shared.state.lock();
        let all = if state.over.is_some() { state.out } else { state.is_taken.len() };
        all - state.taken
    }

    /// How far the load has come, in bytes of tensors over all files. `landed_to` counts them as if the files lay one
    /// behind the other. It is over when all tensors have come out, or with an error. Waits for no thread that waits for a
    /// tensor.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let now = self.shared.progress(false);
        if pinpool::forked() { now } else { self.shared.state.lock().over.unwrap_or(now) }
    }

    /// Cancels the load: no further chunk is begun. Tensors that are on the device still come out, and then
    /// [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.shared.cancellers.iter().for_each(Canceller::cancel);
    }
}

// Its state is whole at any time: no code of the program's runs while the driver is taken.
impl UnwindSafe for Load {}
impl RefUnwindSafe for Load {}

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Load").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

/// What is loaded of one file by one transfer.
pub(super) struct Part {
    /// The file's.
    pub(super) number: u32,
    /// The place of its first tensor in the load.
    pub(super) first: usize,
    /// Which of the file's tensors, in its order.
    pub(super) chosen: Vec<u32>,
    /// Where they go, in their order. A range has one tensor or several, and none is in two.
    pub(super) ranges: Vec<CopyRange>,
}

impl Part {
    /// The place behind its last tensor.
    pub(super) fn end(&self) -> usize {
        self.first + self.chosen.len()
    }
}

/// Brings out the tensors of a load, in its order.
pub(super) struct Driver {
    /// Those of the last parts of the load. `None` for a part whose tensors have no bytes.
    pub(super) transfers: VecDeque<Option<Transfer<FileSource>>>,
    /// Tensors that have come out.
    out: usize,
    /// Its end waits until nothing of it is under way.
    waits: bool,
}

impl Driver {
    /// A load of nothing yet.
    pub(super) fn new(waits: bool) -> Self {
        Self { transfers: VecDeque::new(), out: 0, waits }
    }

    /// Brings out the tensors that are on the device, at least one. The last tensor of a file comes out when the file's
    /// transfer is over, since the caller need not call again to learn of an error.
    fn advance(&mut self, files: &Files, parts: &[Part], cx: &mut Context<'_>) -> Poll<Result<()>> {
        let place = parts.len() - self.transfers.len();
        let (Some(part), Some(transfer)) = (parts.get(place), self.transfers.front_mut()) else {
            return Poll::Ready(Err(Error::Closed));
        };
        let table = &files.headers[part.number as usize].0;
        let end = |tensor: u32| table.entries[tensor as usize].to;
        let next = part.chosen[self.out - part.first];
        if let Some(transfer) = transfer {
            let _ = ready!(transfer.poll_landed(cx, end(next)));
            let landed_to = transfer.progress().landed_to;
            let landed = part.chosen.partition_point(|tensor| end(*tensor) <= landed_to);
            let landed = part.first + landed.min(part.chosen.len() - 1);
            if landed > self.out {
                self.out = landed;
                return Poll::Ready(Ok(()));
            }
            // It is over, or about to be: all of its copies are complete, or it has failed.
            let over = ready!(Pin::new(transfer).poll(cx)).map(drop).map_err(|refused| refused.error);
            // Checked after the last byte was read.
            if let Err(cause) = over.and_then(|()| files.shards[part.number as usize].unchanged()) {
                self.end();
                return Poll::Ready(Err(match cause {
                    // Those are of the load or of the file, and not of a tensor.
                    Error::Cancelled { .. } | Error::Timeout(_) | Error::Malformed { .. } | Error::Forked => {
                        cause
                    }
                    _ => not_there(table.name(next), self.out, parts.last().map_or(0, Part::end), cause),
                }));
            }
        }
        self.out = part.end();
        self.transfers.pop_front();
        Poll::Ready(Ok(()))
    }

    /// Cancels the transfers that are left, and drops them, or waits for each until the device is done with it.
    fn end(&mut self) {
        let transfers: Vec<_> = self.transfers.drain(..).flatten().collect();
        transfers.iter().for_each(Transfer::cancel);
        for transfer in transfers.into_iter().filter(|_| self.waits) {
            let _ = transfer.wait();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.end();
    }
}

//! A load under way, for any number of threads and tasks.
//!
//! The tensors of a load have places, from 0 on, in the order in which they come out. What is known of their arrival is
//! one number: how many have come out. Whoever needs one that has not waits for the transfer of the first part that has
//! some left, and then raises the number to what that transfer has brought ([`Shared::advance`]). A tensor is made when
//! it is taken, of its [`Part`], which never changes.
//!
//! # Invariants
//!
//! - The last tensor of a file comes out only when the transfer is over and the file was found unchanged. An error
//!   takes the place of a tensor, and ends the load.
//! - A call that waits for all of its load (`load`, `Checkpoint::tensor`) returns only when nothing of its transfers is
//!   under way: its `Shared` waits when it is dropped.

use std::future::poll_fn;
use std::ops::Range;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use pinpool::copier::{CopyRange, FileSource, Progress, Transfer, may_wait};
use pinpool::{Error, Result};

use super::Files;
use super::header::Tensor;
use super::load::{DeviceTensor, not_there};

/// A load under way, for tasks on any runtime and for threads. A clone is another handle to the same load: many threads
/// and tasks share it, and each waits for the tensors that it needs by name ([`take`](Self::take)) while others are
/// copied.
///
/// **The drop of the last handle cancels the rest**; tensors that have come out stay. An error comes in the place of
/// the first tensor that cannot be loaded, and ends the load: each handle gives it, once, and then `None`. When the
/// last tensor comes out, the copier has given back all memory that it used for the load.
///
/// [`Loader`](super::Loader) has an example.
///
/// # Errors
/// [`Error::Tensor`] with the name of the first tensor that is not on the device, how many are, and the cause
/// ([`Error::Read`] with file and offset, [`Error::Transfer`] with the error of the pool or the device);
/// [`Error::Cancelled`]; [`Error::Timeout`] after the copier's deadline
/// ([`Copier::with_timeout`](pinpool::Copier::with_timeout)), when the tensors that have arrived by then have come out;
/// [`Error::Malformed`] in the place of the last tensor of a file that was written to meanwhile, whose other tensors
/// may then be wrong; [`Error::Unsupported`] for a wait on a thread that must not (in a waker, a source or a sink),
/// which ends nothing; [`Error::Forked`].
#[must_use = "dropping it cancels the load"]
pub struct Load {
    shared: Arc<Shared>,
    /// Whether this handle's iteration has given the error.
    told: AtomicBool,
}

impl Clone for Load {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), told: AtomicBool::new(false) }
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
    /// `None`: its tensors have no bytes.
    pub(super) transfer: Option<Transfer<FileSource>>,
    /// How the transfer ended, and whether the file is what was opened, looked up once.
    pub(super) verdict: OnceLock<Result<()>>,
}

impl Part {
    /// The place behind its last tensor.
    pub(super) fn end(&self) -> usize {
        self.first + self.chosen.len()
    }
}

/// What the handles of a load share. Its drop cancels what is left of the load.
pub(super) struct Shared {
    files: Arc<Files>,
    pub(super) parts: Vec<Part>,
    /// Whether the drop waits until nothing is under way.
    waits: bool,
    /// How many tensors have come out.
    out: AtomicUsize,
    /// Which were taken: all before `next`, and `taken` in all.
    is_taken: Vec<AtomicBool>,
    next: AtomicUsize,
    taken: AtomicUsize,
    /// The error that the load ended with, and how far it had come.
    failed: OnceLock<(Progress, Error)>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.cancel();
        for transfer in self.transfers().filter(|_| self.waits) {
            let _ = transfer.wait_landed(u64::MAX);
        }
    }
}

impl Shared {
    /// A load of nothing yet.
    pub(super) fn new(files: Arc<Files>, waits: bool) -> Self {
        Self {
            files,
            parts: Vec::new(),
            waits,
            out: AtomicUsize::new(0),
            is_taken: Vec::new(),
            next: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            failed: OnceLock::new(),
        }
    }

    fn transfers(&self) -> impl Iterator<Item = &Transfer<FileSource>> {
        self.parts.iter().filter_map(|part| part.transfer.as_ref())
    }

    fn cancel(&self) {
        self.transfers().for_each(Transfer::cancel);
    }

    /// Tensors that have come out. Acquire: pairs with the release in `advance`, so their bytes are on the device.
    fn out(&self) -> usize {
        self.out.load(Ordering::Acquire)
    }

    /// The place of a tensor.
    fn place(&self, name: &str) -> Option<usize> {
        let (shard, tensor) = self.files.place(name)?;
        let mut parts = self.parts.iter().filter(|part| part.number == shard);
        parts.find_map(|part| Some(part.first + part.chosen.binary_search(&tensor).ok()?))
    }

    /// The tensor at a place.
    #[inline]
    fn tensor(&self, place: usize) -> Result<DeviceTensor> {
        let part = &self.parts[self.parts.partition_point(|part| part.end() <= place)];
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

    fn progress(&self) -> Progress {
        let (mut all, mut whole) = (Progress::default(), true);
        for progress in self.transfers().map(Transfer::progress) {
            all.total += progress.total;
            all.done += progress.done;
            whole = whole && progress.done == progress.total;
            all.landed_to += if whole { progress.total } else { 0 };
            all.elapsed = all.elapsed.max(progress.elapsed);
        }
        all.over = self.out() == self.is_taken.len();
        all
    }

    /// Takes the tensor at a place, or the next that nobody has taken, if it is one of the first `out`, and gives its
    /// place. An inner `None`: it was taken before.
    #[inline]
    fn found(&self, wanted: Option<usize>, out: usize) -> Option<Option<usize>> {
        loop {
            let place = wanted.unwrap_or_else(|| self.next.load(Ordering::Relaxed));
            if place >= out {
                return None;
            }
            let is_mine = !self.is_taken[place].swap(true, Ordering::Relaxed);
            if wanted.is_none() {
                // Another thread may have set it further: what is passed again was taken.
                self.next.store(place + 1, Ordering::Relaxed);
            }
            if is_mine {
                self.taken.fetch_add(1, Ordering::Relaxed);
            }
            if is_mine || wanted.is_some() {
                return Some(is_mine.then_some(place));
            }
        }
    }

    /// Looks for a tensor without waiting. An outer `None`: it is to be waited for. Inlined, since each function that a
    /// tensor is passed through by memory costs more than finding it.
    #[inline]
    fn now(&self, wanted: Option<usize>) -> Option<Option<Result<DeviceTensor>>> {
        if pinpool::forked() {
            return Some(Some(Err(Error::Forked)));
        }
        // In this order: after the error nothing more comes out.
        let (failed, out) = (self.failed.get(), self.out());
        match (self.found(wanted, out), failed) {
            (Some(place), _) => Some(place.map(|place| self.tensor(place))),
            (None, Some((_, error))) => Some(Some(Err(error.clone()))),
            (None, None) => (out == self.is_taken.len()).then_some(None),
        }
    }

    /// Brings out tensors: all that `wait` finds on the device when it has waited for the wanted one, or for the next,
    /// or for the end of its transfer. `false`: it has not waited.
    fn advance(&self, wanted: Option<usize>, wait: impl FnOnce(&Transfer<FileSource>, u64) -> bool) -> bool {
        let out = self.out();
        let Some(part) = self.parts.get(self.parts.partition_point(|part| part.end() <= out)) else {
            return true;
        };
        if let Some(transfer) = &part.transfer {
            let table = &self.files.headers[part.number as usize].0;
            let end = |tensor: u32| table.entries[tensor as usize].to;
            // The last one comes out when the transfer is over: the caller need not call again to learn of an error.
            let last = part.end() - 1;
            let place = wanted.unwrap_or(out).clamp(out, last);
            if !wait(transfer, if place == last { u64::MAX } else { end(part.chosen[place - part.first]) }) {
                return false;
            }
            let landed_to = transfer.progress().landed_to;
            let landed = part.chosen.partition_point(|tensor| end(*tensor) <= landed_to);
            let out = last.min(part.first + landed);
            // Release: pairs with `out`.
            self.out.fetch_max(out, Ordering::Release);
            let Some(outcome) = transfer.outcome().filter(|_| place >= out) else { return true };
            // Checked after the last byte was read.
            let unchanged = |()| self.files.shards[part.number as usize].unchanged();
            if let Err(cause) = part.verdict.get_or_init(|| outcome.and_then(unchanged)) {
                let name = table.name(part.chosen[out - part.first]);
                self.fail(name, out, cause.clone());
                return true;
            }
        }
        // Release: pairs with `out`.
        self.out.fetch_max(part.end(), Ordering::Release);
        true
    }

    /// Ends the load with an error in the place of a tensor, and cancels the rest.
    fn fail(&self, name: &str, out: usize, cause: Error) {
        let error = match cause {
            // Those are of the load or of the file, and not of a tensor.
            Error::Cancelled { .. } | Error::Timeout(_) | Error::Malformed { .. } | Error::Forked => cause,
            _ => not_there(name, out, self.is_taken.len(), cause),
        };
        let mut progress = self.progress();
        progress.over = true;
        if self.failed.set((progress, error)).is_ok() {
            self.cancel();
        }
    }

    fn poll(&self, cx: &mut Context<'_>, wanted: Option<usize>) -> Poll<Option<Result<DeviceTensor>>> {
        loop {
            if let Some(found) = self.now(wanted) {
                return Poll::Ready(found);
            }
            if !self.advance(wanted, |transfer, to| transfer.poll_landed(cx, to).is_ready()) {
                return Poll::Pending;
            }
        }
    }

    /// Blocks the thread until a tensor is found: [`poll`](Self::poll) for threads.
    #[inline]
    fn wait(&self, wanted: Option<usize>) -> Option<Result<DeviceTensor>> {
        loop {
            if let Some(found) = self.now(wanted) {
                return found;
            }
            if let Err(error) = self.block(wanted) {
                return Some(Err(error));
            }
        }
    }

    #[cold]
    fn block(&self, wanted: Option<usize>) -> Result<()> {
        // A thread that must not wait has only looked.
        let has_waited = |transfer: &Transfer<_>, to| transfer.wait_landed(to) || transfer.is_over();
        if self.advance(wanted, has_waited) { Ok(()) } else { may_wait() }
    }
}

impl Load {
    pub(super) fn new(mut shared: Shared) -> Self {
        let count = shared.parts.last().map_or(0, Part::end);
        shared.is_taken.resize_with(count, AtomicBool::default);
        Self { shared: shared.into(), told: AtomicBool::new(false) }
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

    /// An iterator over the tensors that nobody has taken, which waits for each, and blocks its thread meanwhile.
    /// Dropped, it leaves the load as it is.
    pub fn blocking(&self) -> impl Iterator<Item = Result<DeviceTensor>> {
        std::iter::from_fn(|| self.tell(self.shared.wait(None)))
    }

    /// Takes a tensor, and waits until it is on the device. `None`: the load has none of this name, or it was taken.
    ///
    /// # Errors
    /// Of a tensor that is not on the device when the load ends: what the load has ended with (see [`Load`]), for each
    /// of them.
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
        let Shared { failed, is_taken, taken, .. } = &*self.shared;
        let all = if failed.get().is_some() { self.shared.out() } else { is_taken.len() };
        // A tensor may come out and be taken between the two reads.
        all.saturating_sub(taken.load(Ordering::Relaxed))
    }

    /// How far the load has come, in bytes of tensors over all files. `landed_to` counts them as if the files lay one
    /// behind the other. It is over when all tensors have come out, or with an error. Waits for no thread that waits
    /// for a tensor.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.shared.failed.get().map_or_else(|| self.shared.progress(), |(progress, _)| *progress)
    }

    /// Cancels the load: no further chunk is begun. Tensors that are on the device still come out, and then
    /// [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.shared.cancel();
    }
}

// Its state is whole at any time: it consists of numbers, and of what is written once.
impl UnwindSafe for Load {}
impl RefUnwindSafe for Load {}

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Load").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

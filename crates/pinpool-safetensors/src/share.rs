//! A load under way, for any number of threads and tasks.
//!
//! A load's tensors have places, from 0 on, in the order in which they come out. The transfer of
//! its [`Part`] tells whether one is there, and a flag who takes it.
//!
//! Invariants: the last tensor of a file comes out only when the transfer is over and the file was
//! found unchanged; a call that waits for all of its load returns only when nothing of its
//! transfers is under way, since the drop of its `Shared` waits.

use std::future::poll_fn;
use std::ops::Range;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use pinpool::copier::{CopyRange, FileSource, Progress, Transfer, may_wait};
use pinpool::{Error, Result};

use super::Files;
use super::header::Tensor;
use super::load::{DeviceTensor, not_there};

/// A load under way, for tasks on any runtime and for threads. A clone is another handle to the
/// same load: many threads and tasks share it, and each waits for the tensors that it needs by name
/// ([`take`](Self::take)) while others are copied.
///
/// **The drop of the last handle cancels the rest**; tensors that have come out stay. An error
/// comes in the place of each tensor that is not there: once to the iterations of all handles
/// ([`next_tensor`](Self::next_tensor), [`blocking`](Self::blocking)), which then go on, and to
/// each [`take`](Self::take) of it. So a file that fails ends no other's load. When the last tensor
/// comes out, the copier has given back its memory. [`Loader`](super::Loader) has an example.
///
/// # Errors
/// [`Error::Tensor`] with the tensor's name, how many are on the device, and the cause. Those that
/// end the load or a file come bare: [`Error::Cancelled`]; [`Error::Timeout`] after the copier's
/// deadline, behind the tensors that have arrived by then; [`Error::Malformed`] in the place of the
/// last tensor of a file that was written to, whose other tensors may be wrong. On a thread that
/// must not wait [`Error::Unsupported`] comes, which ends nothing. Else [as every
/// transfer](Error#transfers).
#[derive(Clone)]
#[must_use = "dropping it cancels the load"]
pub struct Load(pub(super) Arc<Shared>);

/// What is loaded of one file by one transfer.
pub(super) struct Part {
    /// The file's.
    pub(super) number: u32,
    /// The place of its first tensor in the load.
    pub(super) first: usize,
    /// Which of the file's tensors, in its order.
    pub(super) chosen: Vec<Tensor>,
    /// Where they go, in their order. A range has one tensor or several, and none is in two.
    pub(super) ranges: Vec<CopyRange>,
    /// `None`: its tensors have no bytes.
    pub(super) transfer: Option<Transfer<FileSource>>,
    /// All before this offset of the file have landed; the transfer may know of more.
    pub(super) landed_to: AtomicU64,
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
    pub(super) files: Arc<Files>,
    pub(super) parts: Vec<Part>,
    /// Whether the drop waits until nothing is under way.
    pub(super) waits: bool,
    /// Which tensors were taken.
    pub(super) is_taken: Vec<AtomicBool>,
    /// Each tensor before it was taken, or an iteration has given the error in its place.
    pub(super) next: AtomicUsize,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.transfers().for_each(Transfer::cancel);
        for transfer in self.transfers().filter(|_| self.waits) {
            let _ = transfer.wait_landed(u64::MAX);
        }
    }
}

impl Shared {
    fn transfers(&self) -> impl Iterator<Item = &Transfer<FileSource>> {
        self.parts.iter().filter_map(|part| part.transfer.as_ref())
    }

    /// The place of a tensor.
    fn place(&self, name: &str) -> Option<usize> {
        let (shard, tensor) = self.files.place(name)?;
        let mut parts = self.parts.iter().filter(|part| part.number == shard);
        parts.find_map(|part| {
            Some(part.first + part.chosen.binary_search_by_key(&tensor, |other| other.index).ok()?)
        })
    }

    /// Takes the wanted tensor, or the next that nobody has taken, when `wait` has waited until
    /// enough of its transfer has landed. An inner `None`: it was taken, or all were. An outer
    /// `None`: `wait` has not waited. Inlined: passing a tensor through memory costs more than
    /// finding it.
    #[inline]
    fn get(
        &self,
        wanted: Option<usize>,
        mut wait: impl FnMut(&Transfer<FileSource>, u64) -> bool,
    ) -> Option<Option<Result<DeviceTensor>>> {
        // Whether an iteration has passed all places before this one. From now on it has.
        let is_passed = |end: usize| wanted.is_none() && self.next.fetch_max(end, Ordering::Relaxed) >= end;
        loop {
            if pinpool::forked() {
                return Some((!is_passed(self.is_taken.len())).then_some(Err(Error::Forked)));
            }
            let is_free = |place: &usize| !self.is_taken[*place].load(Ordering::Relaxed);
            let mut places = match wanted {
                Some(place) => place..place + 1,
                None => self.next.load(Ordering::Relaxed)..self.is_taken.len(),
            };
            let Some(place) = places.find(is_free) else { return Some(None) };
            if wanted.is_none() {
                self.next.fetch_max(place, Ordering::Relaxed);
            }
            let part = &self.parts[self.parts.partition_point(|part| part.end() <= place)];
            let tensor = &part.chosen[place - part.first];
            let Range { start, end } = tensor.range();
            // Acquire: pairs with the release in `arrives`, so the bytes are on the device.
            let is_there = place + 1 < part.end() && part.landed_to.load(Ordering::Acquire) >= end;
            let arrived = if is_there { Ok(()) } else { self.arrives(part, place, &mut wait)? };
            match arrived {
                Ok(()) => {}
                Err(_) if is_passed(place + 1) => continue,
                Err(error) => return Some(Some(Err(error))),
            }
            // Another thread may have taken it meanwhile.
            if !self.is_taken[place].swap(true, Ordering::Relaxed) {
                let range = part.ranges.partition_point(|range| range.at <= start).checked_sub(1);
                let slice = range.filter(|_| start < end).map(|range| {
                    let CopyRange { at, device, .. } = &part.ranges[range];
                    device.slice((start - at) as usize..(end - at) as usize)
                });
                return Some(Some(
                    slice.transpose().map(|slice| DeviceTensor { tensor: tensor.clone(), slice }),
                ));
            }
        }
    }

    /// Waits for the tensor at a place of a part. `None`: `wait` has not waited.
    #[cold]
    fn arrives(
        &self,
        part: &Part,
        place: usize,
        wait: &mut dyn FnMut(&Transfer<FileSource>, u64) -> bool,
    ) -> Option<Result<()>> {
        let Some(transfer) = &part.transfer else { return Some(Ok(())) };
        let tensor = &part.chosen[place - part.first];
        let Range { end, .. } = tensor.range();
        // The last one comes out when the transfer is over: the caller need not call again to learn
        // of an error.
        let is_last = place + 1 == part.end();
        if !wait(transfer, if is_last { u64::MAX } else { end }) {
            return None;
        }
        let landed_to = transfer.progress().landed_to;
        // Release: pairs with the acquire in `get`.
        part.landed_to.fetch_max(landed_to, Ordering::Release);
        if !is_last && landed_to >= end {
            return Some(Ok(()));
        }
        let outcome = transfer.outcome()?;
        // Checked after the last byte was read.
        let verdict = part.verdict.get_or_init(|| outcome.and_then(|()| self.files.unchanged(part.number)));
        Some(verdict.clone().map_err(|cause| match cause {
            // Those are of the load or of the file, and not of a tensor.
            Error::Cancelled { .. } | Error::Timeout(_) | Error::Malformed { .. } | Error::Forked => cause,
            _ => {
                let landed = part.chosen.partition_point(|tensor| tensor.range().end <= landed_to);
                not_there(tensor.name(), part.first + landed, self.is_taken.len(), cause)
            }
        }))
    }

    /// Blocks the thread until a tensor is found.
    #[inline]
    fn wait(&self, wanted: Option<usize>) -> Option<Result<DeviceTensor>> {
        // A thread that must not wait has only looked.
        let found = self.get(wanted, |transfer, to| transfer.wait_landed(to) || transfer.is_over());
        found.unwrap_or_else(|| may_wait().err().map(Err))
    }

    /// The same for a task.
    async fn wait_async(&self, wanted: Option<usize>) -> Option<Result<DeviceTensor>> {
        poll_fn(|cx| {
            let found = self.get(wanted, |transfer, to| transfer.poll_landed(cx, to).is_ready());
            found.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

impl Load {
    /// The next tensor that nobody has taken, or the error in its place, for a task, which is not
    /// blocked. `None`: there are no more.
    ///
    /// # Errors
    /// See [`Load`]. The next call goes on; behind [`Error::Forked`] there are no more.
    pub async fn next_tensor(&self) -> Option<Result<DeviceTensor>> {
        self.0.wait_async(None).await
    }

    /// [`next_tensor`](Self::next_tensor) for a thread, which blocks for each item. The iterator
    /// ends with [`Error::Unsupported`]. Dropped, it leaves the load as it is.
    pub fn blocking(&self) -> impl Iterator<Item = Result<DeviceTensor>> {
        let mut may_wait = true;
        std::iter::from_fn(move || {
            let next = if may_wait { self.0.wait(None) } else { None };
            may_wait = !matches!(next, Some(Err(Error::Unsupported(_))));
            next
        })
    }

    /// Takes a tensor, and waits until it is on the device. `None`: the load has none of this name,
    /// or it was taken.
    ///
    /// # Errors
    /// See [`Load`].
    pub fn take(&self, name: &str) -> Result<Option<DeviceTensor>> {
        self.0.place(name).and_then(|place| self.0.wait(Some(place))).transpose()
    }

    /// [`take`](Self::take) for a task, on any runtime. A dropped future has taken nothing.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub async fn take_async(&self, name: &str) -> Result<Option<DeviceTensor>> {
        let Some(place) = self.0.place(name) else { return Ok(None) };
        self.0.wait_async(Some(place)).await.transpose()
    }

    /// The number of tensors that nobody has taken, and for which no iteration has given an error.
    pub fn left(&self) -> usize {
        let rest = self.0.is_taken.iter().skip(self.0.next.load(Ordering::Relaxed));
        rest.filter(|is_taken| !is_taken.load(Ordering::Relaxed)).count()
    }

    /// How far the load has come, in bytes of tensors over all files, which `landed_to` counts one
    /// behind the other. Over when all transfers are. Waits for no waiting thread.
    pub fn progress(&self) -> Progress {
        let mut all = Progress::default();
        all.over = true;
        for progress in self.0.transfers().map(Transfer::progress) {
            if all.landed_to == all.total && progress.done == progress.total {
                all.landed_to += progress.total;
            }
            all.total += progress.total;
            all.done += progress.done;
            all.elapsed = all.elapsed.max(progress.elapsed);
            all.over &= progress.over;
        }
        all
    }

    /// Cancels the load: no further chunk is begun. Tensors that are on the device still come out,
    /// and then [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.0.transfers().for_each(Transfer::cancel);
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

//! Gather and scatter: thousands of small pieces by one call, with one completion.
//!
//! A call is looked at once (`survey.rs`) and split by [`plan`], which is arithmetic. Segments of the pool are filled
//! or emptied by several threads (`staging.rs`), and the copies go through the [queue](crate::CopyQueue), so that they
//! travel in batches. While one segment is on the wire the next one is filled.
//!
//! What is not pinned is always staged, so its bytes are borrowed only for the length of the call that touches them: a
//! gather has read them when it returns, a scatter has written them. What is pinned (`pinned.rs`) is lent to the queue
//! in groups (`pushing.rs`), and comes back by the call's handle (`handle.rs`); or it is packed too, where that is
//! faster.

mod handle;
mod pinned;
pub mod plan;
mod pushing;
mod staging;
mod survey;

pub use self::handle::Gathered;
use self::plan::{Limits, Plan};
use self::staging::{Parts, Staging, Target, Targets};
use self::survey::{Pieces, Survey};
use super::queue::{CopyQueue, may_wait};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::pool::Pool;

/// Bytes of a staging segment at most, and of those that several threads share a shorter gather in at least. (Each copy
/// costs the link some 2 us between it and the next: with 1 MiB plain loops reach 0.84 of it, with 2 MiB 0.88, and 4
/// MiB crowd each other out of the caches on the way back.)
const SEGMENT: usize = 2 << 20;
const SHARED: usize = 512 << 10;
/// Pinned neighbours that are shorter are staged: a copy of their own costs as much as the CPU takes for so many bytes.
const STAGE_BELOW: usize = 2 << 10;
/// Bytes of the first and of the last segments where several threads are at it. At the start the wire, or the threads,
/// wait for the first ones, and at the end there is nothing to be done beside the last ones: with segments of full
/// length at both ends a gather of 256 MiB takes a tenth longer.
const FIRST: usize = 256 << 10;
/// What a piece may lose to its place in a segment.
const SLACK: usize = 64;

impl CopyQueue {
    /// Copies many pieces of host memory, pinned or not, to device memory. The calling thread, with helpers of the
    /// queue where there is much to do ([`QueueOptions::packers`](crate::QueueOptions::packers)), packs them into
    /// segments of `pool` of 2 MiB at most, while earlier segments are in flight; pieces that are neighbours on the
    /// device become one copy. Each thread uses two segments at most at a time; the call waits where these are in
    /// flight, or where the pool or the queue has no room. When this returns, all bytes have been read, and the last of
    /// them are in flight: the handle tells when they are on the device.
    ///
    /// Each piece's device memory must be as long as the piece at least; what is beyond stays as it is. Where two
    /// pieces overlap there, either may win. Pieces of no bytes are left out.
    ///
    /// # Errors
    /// Before anything is copied: [`Error::TooSmall`](crate::Error::TooSmall),
    /// [`Error::WrongDevice`](crate::Error::WrongDevice). Later what a checkout or the queue says; then some of the
    /// pieces may have been copied, and all segments return by themselves.
    pub fn gather(&self, pool: &Pool, pieces: &[(&[u8], DeviceSlice)]) -> Result<Gathered> {
        let all = Slices(pieces);
        let survey = self.survey(pool, &all, |_| Ok(()))?;
        let bytes = |i: usize| pieces[i].0;
        let places = self.stage_all(pool, &all, &survey, None, |parts, hands| {
            Staging::new(self, pool, &all, parts).pack(hands, &bytes)
        })?;
        Ok(Gathered::new(places, Vec::new(), None))
    }

    /// The same, and waits until all of it is there.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather), and what the copies failed with;
    /// [`Error::Unsupported`](crate::Error::Unsupported) in a waker, which must not wait.
    pub fn gather_blocking(&self, pool: &Pool, pieces: &[(&[u8], DeviceSlice)]) -> Result<()> {
        if !may_wait() {
            // Before anything is on its way.
            let why = "a wait for copies in a waker; wake a task or thread of your own, and wait there";
            return Err(Error::Unsupported(why.into()));
        }
        self.gather(pool, pieces)?.wait().map(drop)
    }

    /// Copies many ranges of device memory to borrowed memory, pinned or not, each as many bytes as its target has, and
    /// returns when all of it is there: by way of segments of `pool`, neighbours on the device by one copy, those that
    /// have landed being emptied by the calling thread and helpers, as in a gather, while the next ones are on the
    /// wire.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather). After an error the targets' contents are undefined.
    pub fn scatter_blocking(&self, pool: &Pool, pieces: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        // Each is borrowed exclusively, for the whole call.
        let targets: Vec<Target> = pieces.iter_mut().map(|(_, target)| Target::of(target)).collect();
        let all = Borrowed { pieces, targets: &targets };
        let survey = self.survey(pool, &all, |_| Ok(()))?;
        let place = |i: usize| Ok(targets[i]);
        self.stage_all(pool, &all, &survey, None, |parts, hands| {
            // SAFETY: borrowed, see above; the slices are not touched by way of `all` before this returns.
            let targets = unsafe { Targets::new(&place) };
            Staging::new(self, pool, &all, parts).unpack(hands, &targets)
        })
    }

    /// Helpers that are worth it for so many bytes that are staged, and the limits of their segments.
    fn share_of(&self, pool: &Pool, staged: usize) -> (usize, Limits) {
        // A waker, which must not wait, must not have others wait for what its thread does.
        let hands = if may_wait() { staging::hands(staged, self.helpers()) } else { 0 };
        // Several for each thread, so that the wire has something soon, and all end at about the same time.
        let part = if hands > 0 { staged / (hands + 1) / 4 } else { SEGMENT };
        let segment = part.clamp(SHARED, SEGMENT).min(pool.longest() / 2).max(1);
        (hands, Limits { segment, stage_below: STAGE_BELOW })
    }

    /// Has `run` stage all of a call's pieces, with so many helpers: in groups that are planned as they are packed, or
    /// by a plan of the whole, where long pieces are shared by several threads. `order`: that of the device, where it
    /// is known.
    fn stage_all<R>(
        &self,
        pool: &Pool,
        pieces: &dyn Pieces,
        survey: &Survey,
        order: Option<Vec<usize>>,
        run: impl FnOnce(Parts<'_>, usize) -> R,
    ) -> R {
        let (hands, limits) = self.share_of(pool, survey.bytes);
        if survey.longest.saturating_add(SLACK) > limits.segment {
            return run(Parts::planned(&Plan::new(&pieces.all(false), limits).segments), hands);
        }
        let order =
            if survey.in_order { None } else { order.or_else(|| Some(plan::order(&pieces.all(false)))) };
        run(Parts::cut(pieces, survey, order, limits, hands + 1), hands)
    }
}

/// The pieces of a gather.
struct Slices<'a>(&'a [(&'a [u8], DeviceSlice)]);

impl Pieces for Slices<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn len(&self, i: usize) -> usize {
        self.0[i].0.len()
    }

    fn memory(&self, i: usize) -> &DeviceSlice {
        &self.0[i].1
    }
}

/// The pieces of a scatter.
struct Borrowed<'a, 'b> {
    pieces: &'a [(DeviceSlice, &'b mut [u8])],
    targets: &'a [Target],
}

impl Pieces for Borrowed<'_, '_> {
    fn count(&self) -> usize {
        self.targets.len()
    }

    fn len(&self, i: usize) -> usize {
        self.targets[i].len
    }

    fn memory(&self, i: usize) -> &DeviceSlice {
        &self.pieces[i].0
    }
}

//! Gather and scatter: thousands of small pieces by one call, with one completion.
//!
//! A call is split by [`plan`], which is arithmetic. Segments of the pool are filled or emptied by several threads
//! (`staging.rs`), and the copies go through the [queue](crate::CopyQueue), so that they travel in batches. While one segment
//! is on the wire the next one is filled.
//!
//! What is not pinned is always staged, so its bytes are borrowed only for the length of the call that touches them: a
//! gather has read them when it returns, a scatter has written them. What is pinned (`pinned.rs`) is lent to the queue in groups
//! (`pushing.rs`), and comes back by the call's handle (`handle.rs`); or it is packed too, where that is faster.

mod handle;
mod pinned;
pub mod plan;
mod pushing;
mod staging;

use std::borrow::Cow;

pub use self::handle::Gathered;
use self::plan::{Limits, Piece, Plan};
use self::staging::{Parts, Staging, Targets};
use super::queue::CopyQueue;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::pool::Pool;

/// Bytes of a staging segment at most, and of those that several threads share a shorter gather in at least. (Each copy costs
/// the link some 2 us between it and the next: with 1 MiB plain loops reach 0.84 of it, with 2 MiB 0.88, and 4 MiB crowd each
/// other out of the caches on the way back.)
const SEGMENT: usize = 2 << 20;
const SHARED: usize = 512 << 10;
/// Pinned neighbours that are shorter are staged: a copy of their own costs as much as the CPU takes for so many bytes.
const STAGE_BELOW: usize = 2 << 10;
/// Bytes of the first and of the last segments where several threads are at it. At the start the wire, or the threads, wait for
/// the first ones, and at the end there is nothing to be done beside the last ones: with segments of full length at both ends
/// a gather of 256 MiB takes a tenth longer.
const FIRST: usize = 256 << 10;
/// What a piece may lose to its place in a segment.
const SLACK: usize = 64;

impl CopyQueue {
    /// Copies many pieces of host memory, pinned or not, to device memory. The calling thread, with helpers of the queue's
    /// where there is much to do ([`QueueOptions::packers`](crate::QueueOptions::packers)), packs them into segments of `pool`
    /// of 2 MiB at most, those that are neighbours on the device into one copy, while earlier segments are on the wire. Each
    /// thread uses three segments at most at a time; the call waits where these are on the wire, or where the pool or the
    /// queue has no room. When this returns all bytes have been read, and the last of them are on their way: the handle says
    /// when they are there.
    ///
    /// Each piece's device memory must be as long as the piece at least; what is beyond stays as it is. Where two pieces
    /// overlap there, either may win. Pieces of no bytes are left out.
    ///
    /// # Errors
    /// Before anything is copied: [`Error::TooSmall`], [`Error::WrongDevice`]. Later what a checkout or the queue says;
    /// then some of the pieces may have been copied, and all segments return by themselves.
    pub fn gather(&self, pool: &Pool, pieces: &[(&[u8], DeviceSlice)]) -> Result<Gathered> {
        let sizes = pieces.iter().map(|(bytes, target)| (bytes.len(), target, false));
        let call = self.checked(pool, sizes)?;
        let bytes: Vec<&[u8]> = pieces.iter().map(|(bytes, _)| *bytes).collect();
        let places =
            call.staged(|parts| Staging::new(self, pool, &call.memories, parts).pack(call.hands, &bytes))?;
        Ok(Gathered::new(places, Vec::new(), None))
    }

    /// The same, and waits until all of it is there.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather), and what the copies failed with.
    pub fn gather_blocking(&self, pool: &Pool, pieces: &[(&[u8], DeviceSlice)]) -> Result<()> {
        self.gather(pool, pieces)?.wait().map(drop)
    }

    /// Copies many ranges of device memory to borrowed memory, pinned or not, each as many bytes as its target has, and
    /// returns when all of it is there: by way of segments of `pool`, neighbours on the device by one copy, those that have
    /// landed being emptied by the calling thread and helpers, as in a gather, while the next ones are on the wire.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather). After an error the targets' contents are undefined.
    pub fn scatter_blocking(&self, pool: &Pool, pieces: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        let (sources, targets): (Vec<&DeviceSlice>, Vec<&mut [u8]>) =
            pieces.iter_mut().map(|(source, target)| (&*source, &mut **target)).unzip();
        let sizes = sources.iter().zip(&targets).map(|(source, target)| (target.len(), *source, false));
        let call = self.checked(pool, sizes)?;
        let targets = Targets::new(targets.into_iter());
        call.staged(|parts| Staging::new(self, pool, &call.memories, parts).unpack(call.hands, &targets))
    }

    /// Helpers that are worth it for so many bytes that are staged, and the limits of their segments.
    fn share_of(&self, pool: &Pool, staged: usize) -> (usize, Limits) {
        let hands = staging::hands(staged, self.helpers());
        // Several for each thread, so that the wire has something soon, and all end at about the same time.
        let part = if hands > 0 { staged / (hands + 1) / 4 } else { SEGMENT };
        let segment = part.clamp(SHARED, SEGMENT).min(pool.longest() / 2).max(1);
        (hands, Limits { segment, stage_below: STAGE_BELOW })
    }

    /// Checks the pieces (bytes, device memory, whether in place), and decides how they are staged.
    fn checked<'a>(
        &self,
        pool: &Pool,
        pieces: impl Iterator<Item = (usize, &'a DeviceSlice, bool)>,
    ) -> Result<Call<'a>> {
        let context = self.device().context();
        let wrong = || Error::WrongDevice { device: self.device().name().into() };
        if !pool.serves(context) {
            return Err(wrong());
        }
        let most = pieces.size_hint().0;
        let (mut checked, mut memories) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let (mut staged, mut total, mut longest) = (0_usize, 0_usize, 0);
        for (len, memory, in_place) in pieces {
            if !memory.is_of(context) {
                return Err(wrong());
            }
            if len > memory.len() {
                return Err(Error::TooSmall { need: len, have: memory.len() });
            }
            if !in_place || len < STAGE_BELOW {
                staged = staged.saturating_add(len);
            }
            total = total.saturating_add(len);
            longest = longest.max(len);
            let (device, number) = (memory.address(), memory.allocation_number());
            checked.push(Piece { device, memory: number, len, in_place });
            memories.push(memory);
        }
        let (hands, limits) = self.share_of(pool, staged);
        Ok(Call { pieces: checked, memories, limits, bytes: total, longest, hands, order: None })
    }
}

/// A call's pieces, checked.
struct Call<'a> {
    pieces: Vec<Piece>,
    memories: Vec<&'a DeviceSlice>,
    limits: Limits,
    bytes: usize,
    /// Bytes of the longest piece.
    longest: usize,
    /// Helpers that are worth it.
    hands: usize,
    /// That of the device, once it is known.
    order: Option<Vec<usize>>,
}

impl Call<'_> {
    /// Has everything staged: in groups that are planned as they are packed, or by a plan of the whole, where long pieces are
    /// shared by several threads.
    fn staged<R>(&self, run: impl FnOnce(Parts<'_>) -> R) -> R {
        let Self { pieces, limits, .. } = self;
        if self.longest.saturating_add(SLACK) > limits.segment {
            return run(Parts::Segments(&Plan::new(pieces, *limits).segments));
        }
        let order = self.order.as_ref().map_or_else(|| Cow::Owned(plan::order(pieces)), Cow::Borrowed);
        let threads = self.hands + 1;
        let groups = plan::groups(pieces, &order, |before, left| {
            if self.hands == 0 {
                return limits.segment;
            }
            // Round by round twice as long, and at the end half of what is left for each thread.
            let part = (FIRST + before / threads).min((left / threads / 2).max(FIRST));
            part.min(limits.segment)
        });
        let room = |i: &usize| pieces[*i].len + SLACK;
        let longest = if groups.len() > 1 {
            limits.segment
        } else {
            order.iter().map(room).sum::<usize>().min(limits.segment)
        };
        run(Parts::Groups { pieces, order: &order, groups, longest, limits: *limits })
    }
}

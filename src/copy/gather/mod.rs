//! Gather and scatter: thousands of small pieces by one call, with one completion.
//!
//! A call is split by [`plan`], which is arithmetic. Segments of the pool are filled or emptied by several threads
//! (`staging.rs`), and the copies go through the [queue](crate::CopyQueue), so that they travel in batches. While one segment
//! is on the wire the next one is filled.
//!
//! What is not pinned is always staged, so its bytes are borrowed only for the length of the call that touches them: a
//! gather has read them when it returns, a scatter has written them. What is pinned is lent to the queue piece by piece
//! (`pushing.rs`), and comes back; or it is packed too, where that is faster.

pub mod plan;
mod pushing;
mod staging;

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use self::plan::{Limits, Piece, Plan};
use self::pushing::push_each;
use self::staging::{Parts, Staging, Targets};
use super::Landing;
use super::queue::CopyQueue;
use crate::buffer::{InFlight, Lend};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::pool::Pool;
use crate::stream::awaited::Place;
use crate::stream::timeline::WaitKey;

/// Bytes of a staging segment at most, and of those that several threads share a shorter gather in at least. (Each copy costs
/// the link some 2 us between it and the next: with 1 MiB plain loops reach 0.84 of it, with 2 MiB 0.88, and 4 MiB crowd each
/// other out of the caches on the way back.)
const SEGMENT: usize = 2 << 20;
const SHARED: usize = 512 << 10;
/// Pinned neighbours that are shorter are staged: a copy of their own costs as much as the CPU takes for so many bytes.
const STAGE_BELOW: usize = 2 << 10;
/// Pinned neighbours on the device that are shorter are all packed where so many threads can do it: eight bring pieces of
/// 16 KiB at 0.75 to 0.88 of the link's rate, and batches of them from where they are come at 0.5 to 0.8, by whatever number of
/// threads (those of 64 KiB at 0.95 and more).
const PACK_BELOW: usize = 32 << 10;
const PACK_WITH: usize = 6;
/// Bytes of the first and of the last segments where several threads are at it. At the start the wire, or the threads, wait for
/// the first ones, and at the end there is nothing to be done beside the last ones: with segments of full length at both ends
/// a gather of 256 MiB takes a tenth longer.
const FIRST: usize = 256 << 10;
/// What a piece may lose to its place in a segment.
const SLACK: usize = 64;

/// Many copies under way, as one: what [`CopyQueue::gather`] and its like give. Wait for it, await it, ask, or drop it:
/// then what it has returns by itself when the device is done.
///
/// An error is that of one of the copies; the others happen all the same.
#[must_use = "dropping it is fine: what it has returns by itself; say so with `drop`"]
pub struct Gathered<B: Lend = ()> {
    /// In the order of the call's pieces.
    values: Vec<Value<B>>,
    /// Of what was staged.
    places: Vec<Place>,
    /// How many of the places, and then of the values, are known to be done, and who is to be woken by the next.
    done: usize,
    waker: Option<WaitKey>,
}

enum Value<B: Lend> {
    /// On its way.
    Flight(InFlight<B>),
    /// Done with.
    Back(B),
}

impl<B: Lend> Gathered<B> {
    /// Whether all of it is done. Never waits.
    ///
    /// # Errors
    /// What one of the copies failed with, or all were lost with.
    pub fn is_done(&self) -> Result<bool> {
        for place in &self.places {
            if !place.poll_done()? {
                return Ok(false);
            }
        }
        for value in &self.values {
            if let Value::Flight(flight) = value {
                if !flight.is_done()? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Waits until all of it is done, and gives the buffers back, in the order of the call's pieces, host-ready.
    ///
    /// # Errors
    /// As for [`is_done`](Self::is_done). What is done with returns by itself then.
    pub fn wait(mut self) -> Result<Vec<B>> {
        let no_deadline: Option<Instant> = None;
        self.places.iter().try_for_each(|place| place.wait(no_deadline))?;
        let wait = |value| match value {
            Value::Flight(flight) => flight.wait(),
            Value::Back(value) => Ok(value),
        };
        std::mem::take(&mut self.values).into_iter().map(wait).collect()
    }
}

impl<B: Lend> Future for Gathered<B> {
    type Output = Result<Vec<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        // One after the other: whichever is the first that is not done has the waker.
        while let Some(place) = this.places.get(this.done) {
            match place.wake_later(&mut this.waker, cx.waker()) {
                Ok(true) => this.done += 1,
                Ok(false) => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        while let Some(value) = this.values.get_mut(this.done - this.places.len()) {
            if let Value::Flight(flight) = value {
                match Pin::new(flight).poll(cx) {
                    Poll::Ready(Ok(back)) => *value = Value::Back(back),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Pending,
                }
            }
            this.done += 1;
        }
        let back = |value| if let Value::Back(value) = value { Some(value) } else { None };
        Poll::Ready(Ok(std::mem::take(&mut this.values).into_iter().filter_map(back).collect()))
    }
}

impl<B: Lend> Drop for Gathered<B> {
    fn drop(&mut self) {
        if let Some(place) = self.places.get(self.done) {
            place.line.forget_waker(&mut self.waker);
        }
    }
}

impl<B: Lend> fmt::Debug for Gathered<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (values, staged) = (self.values.len(), self.places.len());
        f.debug_struct("Gathered").field("values", &values).field("staged", &staged).finish_non_exhaustive()
    }
}

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
        Ok(Gathered { values: Vec::new(), places, done: 0, waker: None })
    }

    /// The same, and waits until all of it is there.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather), and what the copies failed with.
    pub fn gather_blocking(&self, pool: &Pool, pieces: &[(&[u8], DeviceSlice)]) -> Result<()> {
        self.gather(pool, pieces)?.wait().map(drop)
    }

    /// Copies many buffers to device memory, by the way that is fastest for what they are. The buffers are lent until the handle
    /// gives them back.
    ///
    /// - Those whose places follow at even distances on both sides, in the order of the call, as blocks of a cache: from where
    ///   they are, as rows of rectangles.
    /// - Shorter ones than 2 KiB that are neighbours on the device: packed into segments of `pool`.
    /// - Shorter ones than 32 KiB, nearly all of them neighbours on the device, 12 MiB together at least: packed by several
    ///   threads as in [`gather`](Self::gather), where the queue has six packers or more and the pool has a segment to spare.
    /// - All others from where they are, in batches; of thousands several threads push a part each.
    ///
    /// To have pinned pieces stay where they are in any case, [push](Self::upload) them; to have them packed in any case, pass
    /// their bytes to [`gather`](Self::gather).
    ///
    /// # Errors
    /// With the buffers that have not been pushed, in their order: [`Error::Empty`] for a buffer without bytes; as for
    /// [`gather`](Self::gather). Those that were pushed return by themselves.
    #[allow(clippy::type_complexity, reason = "the pieces come back")]
    pub fn gather_pinned<B: Lend>(
        &self,
        pool: &Pool,
        pieces: Vec<(B, DeviceSlice)>,
    ) -> Result<Gathered<B>, SubmitError<Vec<(B, DeviceSlice)>>> {
        // What was staged; and for each piece whether it stays in place, unless that is the same for all.
        let staged = (|| {
            let bytes: Vec<&[u8]> = pieces.iter().map(|(buf, _)| buf.bytes()).collect();
            if bytes.iter().any(|bytes| bytes.is_empty()) {
                return Err(Error::Empty);
            }
            if !pieces.iter().all(|(buf, _)| buf.serves(self.device().context())) {
                return Err(Error::WrongDevice { device: self.device().name().into() });
            }
            let sizes = bytes.iter().zip(&pieces).map(|(bytes, (_, target))| (bytes.len(), target, true));
            let mut call = self.checked(pool, sizes)?;
            if call.shortest < STAGE_BELOW && has_room(pool, call.limits.segment.min(call.bytes)) {
                let plan = Plan::new(&call.pieces, call.limits);
                let mut in_place = vec![false; pieces.len()];
                plan.in_place.iter().for_each(|copy| in_place[copy.piece] = true);
                let parts = Parts::Segments(&plan.segments);
                let places = Staging::new(self, pool, &call.memories, parts).pack(call.hands, &bytes)?;
                return Ok((places, Stay::Some(in_place)));
            }
            if are_rows(&call.pieces, &bytes) || !self.can_pack(pool, &mut call) {
                return Ok((Vec::new(), Stay::All));
            }
            call.pieces.iter_mut().for_each(|piece| piece.in_place = false);
            (call.hands, call.limits) = self.share_of(pool, call.bytes);
            let pack =
                |parts: Parts<'_>| Staging::new(self, pool, &call.memories, parts).pack(call.hands, &bytes);
            call.staged(pack).map(|places| (places, Stay::None))
        })();
        let (places, stay) = match staged {
            Ok(staged) => staged,
            Err(error) => return Err(SubmitError::refused(error, pieces)),
        };
        let in_place = match stay {
            Stay::None => {
                let values = pieces.into_iter().map(|(buf, _)| Value::Back(buf)).collect();
                return Ok(Gathered { values, places, done: 0, waker: None });
            }
            Stay::All => vec![true; pieces.len()],
            Stay::Some(in_place) => in_place,
        };
        let push = |((buf, target), in_place): ((B, DeviceSlice), bool)| {
            if !in_place {
                return Ok(Value::Back(buf));
            }
            self.upload(buf, &target)
                .map(Value::Flight)
                .map_err(|SubmitError { error, buffer }| (error, buffer.map(|buf| ((buf, target), in_place))))
        };
        match push_each(self, pieces.into_iter().zip(in_place).collect(), push) {
            Ok(values) => Ok(Gathered { values, places, done: 0, waker: None }),
            Err((error, back)) => {
                Err(SubmitError { error, buffer: Some(back.into_iter().map(|(piece, _)| piece).collect()) })
            }
        }
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

    /// Copies many ranges of device memory into buffers, in batches, or as rows where places follow at even distances; of
    /// thousands several threads push a part each. When all have landed the handle gives the buffers back, each as long as its
    /// range. (Where helpers are free and short ranges are neighbours on the device,
    /// [`scatter_blocking`](Self::scatter_blocking) into the buffers' bytes may be faster.)
    ///
    /// # Errors
    /// With the pieces that have not been pushed, in their order: as for [`download`](Self::download). Those that were
    /// pushed return by themselves.
    #[allow(clippy::type_complexity, reason = "the pieces come back")]
    pub fn scatter_pinned<L: Landing>(
        &self,
        pieces: Vec<(DeviceSlice, L)>,
    ) -> Result<Gathered<L::Landed>, SubmitError<Vec<(DeviceSlice, L)>>> {
        let push = |(source, landing): (DeviceSlice, L)| {
            self.download(&source, landing)
                .map(Value::Flight)
                .map_err(|SubmitError { error, buffer }| (error, buffer.map(|landing| (source, landing))))
        };
        match push_each(self, pieces, push) {
            Ok(values) => Ok(Gathered { values, places: Vec::new(), done: 0, waker: None }),
            Err((error, back)) => Err(SubmitError { error, buffer: Some(back) }),
        }
    }

    /// Whether all of a call's pinned pieces had better be packed: they are short, and neighbours on the device, so that few
    /// copies remain; and there are threads enough to pack faster than the driver takes so many, and segments.
    fn can_pack(&self, pool: &Pool, call: &mut Call<'_>) -> bool {
        let (hands, limits) = self.share_of(pool, call.bytes);
        if hands + 1 < PACK_WITH || call.longest >= PACK_BELOW || !has_room(pool, limits.segment) {
            return false;
        }
        let order = plan::order(&call.pieces);
        let meet = |pair: &[usize]| {
            let (a, b) = (&call.pieces[pair[0]], &call.pieces[pair[1]]);
            a.memory == b.memory && a.device.checked_add(a.len as u64) == Some(b.device)
        };
        let neighbours = order.windows(2).filter(|pair| meet(pair)).count();
        let packs = neighbours >= order.len() / 4 * 3;
        call.order = Some(order);
        packs
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
        let (mut staged, mut total, mut longest, mut shortest) = (0_usize, 0_usize, 0, usize::MAX);
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
            (longest, shortest) = (longest.max(len), shortest.min(len));
            let (device, number) = (memory.address(), memory.allocation_number());
            checked.push(Piece { device, memory: number, len, in_place });
            memories.push(memory);
        }
        let (hands, limits) = self.share_of(pool, staged);
        Ok(Call { pieces: checked, memories, limits, bytes: total, longest, shortest, hands, order: None })
    }
}

/// Which of a call's pinned pieces stay where they are.
enum Stay {
    None,
    All,
    Some(Vec<bool>),
}

/// Whether the pool has a segment of so many bytes now. The pinned pieces of a call may be all that it has: then there is
/// nothing to wait for.
fn has_room(pool: &Pool, bytes: usize) -> bool {
    pool.try_checkout(bytes).is_ok()
}

/// Whether pinned pieces, in their order, are mostly rows of rectangles, which the driver copies at full speed from where they
/// are.
fn are_rows(pieces: &[Piece], bytes: &[&[u8]]) -> bool {
    let far = |i: usize| {
        let (host, next) = (bytes[i].as_ptr().addr(), bytes[i + 1].as_ptr().addr());
        let (there, then) = (pieces[i].device, pieces[i + 1].device);
        (next.wrapping_sub(host), then.wrapping_sub(there), host < next && there < then)
    };
    let even = |i: &usize| {
        bytes[*i].len() == bytes[i + 1].len()
            && bytes[*i].len() == bytes[i + 2].len()
            && far(*i).2
            && far(*i) == far(i + 1)
    };
    (0..pieces.len().saturating_sub(2)).filter(even).count() >= pieces.len() / 4 * 3
}

/// A call's pieces, checked.
struct Call<'a> {
    pieces: Vec<Piece>,
    memories: Vec<&'a DeviceSlice>,
    limits: Limits,
    bytes: usize,
    /// Bytes of the longest piece and of the shortest.
    longest: usize,
    shortest: usize,
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

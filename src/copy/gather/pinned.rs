//! Pinned pieces by one call: from where they are, or packed, whichever is faster for what they are.
//!
//! One look at all pieces ([`Survey`]) checks them and says how long they are, and whether they follow each other on the
//! device or on both sides; by that the way is chosen, before anything is copied. Both directions choose by the same rule.

use super::handle::{Gathered, Part};
use super::plan::{self, Limits, Plan};
use super::pushing::{self, Piece};
use super::staging::{Parts, Staging, Targets};
use super::{Call, STAGE_BELOW};
use crate::buffer::Lend;
use crate::copy::Landing;
use crate::copy::queue::{CopyQueue, may_wait};
use crate::device::Transfer;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::pool::Pool;
use crate::stream::awaited::Place;
use crate::stream::timeline::Lent;

/// Pinned neighbours on the device that are shorter are all packed where so many threads can do it: eight bring pieces of
/// 16 KiB at 0.75 to 0.88 of the link's rate, and batches of them from where they are come at 0.5 to 0.8, by whatever number of
/// threads (those of 64 KiB at 0.95 and more).
const PACK_BELOW: usize = 32 << 10;
const PACK_WITH: usize = 6;
/// Those that are neighbours in another order than the call's are packed if they are shorter: to sort them takes a thread some
/// 50 ns for each, which is a tenth of what the wire takes for longer ones, and more than packing gains.
const SORT_BELOW: usize = 12 << 10;

impl CopyQueue {
    /// Copies many buffers to device memory, by the way that is fastest for what they are. The buffers are lent until the handle
    /// gives them back.
    ///
    /// - Those whose places follow at even distances on both sides, in the order of the call, as blocks of a cache: from where
    ///   they are, as rows of rectangles.
    /// - Shorter ones than 2 KiB that are neighbours on the device: packed into segments of `pool`.
    /// - Shorter ones than 32 KiB, nearly all of them neighbours on the device in the order of the call (shorter ones than 12 KiB
    ///   in any order), 12 MiB together at least: packed by several threads as in [`gather`](Self::gather), where the queue has
    ///   six packers or more and the pool has a segment to spare. Then this returns when all bytes have been read.
    /// - All others from where they are, in groups of some 64 that are submitted and come back together; of thousands several
    ///   threads push a part each.
    ///
    /// To have pinned pieces stay where they are in any case, [push](Self::upload) them; to have them packed in any case, pass
    /// their bytes to [`gather`](Self::gather).
    ///
    /// # Errors
    /// Before anything is copied, with all buffers: [`Error::Empty`] for a buffer without bytes; as for
    /// [`gather`](Self::gather). Later with the buffers that have not been pushed, in their order; those that were pushed return
    /// by themselves.
    #[allow(clippy::type_complexity, reason = "the pieces come back")]
    pub fn gather_pinned<B: Lend>(
        &self,
        pool: &Pool,
        pieces: Vec<(B, DeviceSlice)>,
    ) -> Result<Gathered<B>, SubmitError<Vec<(B, DeviceSlice)>>> {
        let (places, stay) = match self.stage_up(pool, &pieces) {
            Ok(staged) => staged,
            Err(error) => return Err(SubmitError::refused(error, pieces)),
        };
        let pieces = pieces.into_iter().map(|(buf, memory)| Up { buf, memory }).collect();
        self.push_rest(places, stay, pieces, |piece| Some(piece.buf)).map_err(|(error, back)| {
            let back = back.into_iter().map(|Up { buf, memory }| (buf, memory)).collect();
            SubmitError { error, buffer: Some(back) }
        })
    }

    /// Copies many ranges of device memory into buffers, by the way that is fastest for what they are. When all have landed the
    /// handle gives the buffers back, each as long as its range.
    ///
    /// The ways are those of [`gather_pinned`](Self::gather_pinned), chosen by the same rule. Where ranges come by way of
    /// segments of `pool` this returns when those have landed and their bytes are in the buffers; a waker, which must not
    /// wait, has all of them come to where they belong.
    ///
    /// # Errors
    /// Before anything is copied, with all buffers: as for [`download`](Self::download); [`Error::WrongDevice`] for the pool.
    /// Later with the pieces that have not been pushed, in their order, or with all of them after a failure of what came by way
    /// of segments: what was written to these buffers before is undefined then. Those that were pushed return by themselves.
    #[allow(clippy::type_complexity, reason = "the pieces come back")]
    pub fn scatter_pinned<L: Landing>(
        &self,
        pool: &Pool,
        mut pieces: Vec<(DeviceSlice, L)>,
    ) -> Result<Gathered<L::Landed>, SubmitError<Vec<(DeviceSlice, L)>>> {
        let (places, stay) = match self.stage_down(pool, &mut pieces) {
            Ok(staged) => staged,
            Err(error) => return Err(SubmitError::refused(error, pieces)),
        };
        let pieces = pieces.into_iter().map(|(memory, landing)| Down { memory, landing }).collect();
        let filled = |Down { memory, landing }: Down<L>| {
            // SAFETY: staged: so many bytes were moved to where it is written to.
            unsafe { landing.filled(memory.len()) }.map(L::Landed::from)
        };
        self.push_rest(places, stay, pieces, filled).map_err(|(error, back)| {
            let back = back.into_iter().map(|Down { memory, landing }| (memory, landing)).collect();
            SubmitError { error, buffer: Some(back) }
        })
    }

    /// Chooses the way of pieces to the device, and has those packed that are not to be copied from where they are.
    fn stage_up<B: Lend>(&self, pool: &Pool, pieces: &[(B, DeviceSlice)]) -> Result<(Vec<Place>, Stay)> {
        let context = self.device().context();
        let wrong = || Error::WrongDevice { device: self.device().name().into() };
        let mut survey = Survey::default();
        for (buf, memory) in pieces {
            let bytes = buf.bytes();
            if bytes.is_empty() {
                return Err(Error::Empty);
            }
            if !buf.serves(context) || !memory.is_of(context) {
                return Err(wrong());
            }
            if bytes.len() > memory.len() {
                return Err(Error::TooSmall { need: bytes.len(), have: memory.len() });
            }
            survey.add(bytes.as_ptr().addr(), bytes.len(), memory);
        }
        if !pool.serves(context) {
            return Err(wrong());
        }
        let described = || {
            let sizes = pieces.iter().map(|(buf, memory)| (buf.bytes().len(), memory, true));
            self.checked(pool, sizes)
        };
        self.staged(pool, &survey, described, |call, parts| {
            let bytes: Vec<&[u8]> = pieces.iter().map(|(buf, _)| buf.bytes()).collect();
            Staging::new(self, pool, &call.memories, parts).pack(call.hands, &bytes)
        })
    }

    /// The same for pieces from the device.
    fn stage_down<L: Landing>(
        &self,
        pool: &Pool,
        pieces: &mut [(DeviceSlice, L)],
    ) -> Result<(Vec<Place>, Stay)> {
        let context = self.device().context();
        let wrong = || Error::WrongDevice { device: self.device().name().into() };
        let mut survey = Survey::default();
        let mut targets = Vec::with_capacity(pieces.len());
        for (memory, landing) in pieces.iter_mut() {
            if !memory.is_of(context) {
                return Err(wrong());
            }
            let (target, capacity) = landing.target(self.stream())?;
            if memory.len() > capacity {
                return Err(Error::TooSmall { need: memory.len(), have: capacity });
            }
            survey.add(target.addr(), memory.len(), memory);
            targets.push((target, memory.len()));
        }
        if !pool.serves(context) {
            return Err(wrong());
        }
        if !may_wait() {
            return Ok((Vec::new(), Stay::All));
        }
        let pieces = &*pieces;
        let described = || {
            let sizes = pieces.iter().map(|(memory, _)| (memory.len(), memory, true));
            self.checked(pool, sizes)
        };
        self.staged(pool, &survey, described, |call, parts| {
            // SAFETY: the call has the buffers, each of which says that it may be written to there, and nobody else touches
            // them before this returns.
            let targets = unsafe { Targets::at(targets) };
            Staging::new(self, pool, &call.memories, parts).unpack(call.hands, &targets).map(|()| Vec::new())
        })
    }

    /// Chooses the way by a survey, and has `run` stage what is not to stay in place.
    fn staged<'a>(
        &self,
        pool: &Pool,
        survey: &Survey,
        described: impl Fn() -> Result<Call<'a>>,
        run: impl FnOnce(&Call<'a>, Parts<'_>) -> Result<Vec<Place>>,
    ) -> Result<(Vec<Place>, Stay)> {
        if survey.count > 0 && survey.shortest < STAGE_BELOW {
            let call = described()?;
            if has_room(pool, call.limits.segment.min(call.bytes)) {
                let plan = Plan::new(&call.pieces, call.limits);
                let mut in_place = vec![false; survey.count];
                plan.in_place.iter().for_each(|copy| in_place[copy.piece] = true);
                let places = run(&call, Parts::Segments(&plan.segments))?;
                return Ok((places, Stay::Some(in_place)));
            }
        }
        let (hands, limits) = self.share_of(pool, survey.bytes);
        if !self.may_pack(pool, survey, hands, limits) {
            return Ok((Vec::new(), Stay::All));
        }
        let mut call = described()?;
        if !survey.are_neighbours() {
            let order = plan::order(&call.pieces);
            if !plan::are_neighbours(&call.pieces, &order) {
                return Ok((Vec::new(), Stay::All));
            }
            call.order = Some(order);
        }
        call.pieces.iter_mut().for_each(|piece| piece.in_place = false);
        (call.hands, call.limits) = (hands, limits);
        call.staged(|parts| run(&call, parts)).map(|places| (places, Stay::None))
    }

    /// Whether all of a call's pinned pieces may be faster packed: they are short, there are threads enough to pack them faster
    /// than the driver takes so many copies, and segments; and they are neighbours on the device, so that few copies remain, or
    /// sorting them would soon tell.
    fn may_pack(&self, pool: &Pool, survey: &Survey, hands: usize, limits: Limits) -> bool {
        hands + 1 >= PACK_WITH
            && survey.longest < PACK_BELOW
            && !survey.are_rows()
            && (survey.are_neighbours() || survey.longest < SORT_BELOW)
            && has_room(pool, limits.segment)
    }

    /// Pushes the pieces that stay in place. With an error those come back that were to be pushed and were not.
    fn push_rest<P: Piece>(
        &self,
        places: Vec<Place>,
        stay: Stay,
        pieces: Vec<P>,
        staged: impl Fn(P) -> Option<P::Value>,
    ) -> Result<Gathered<P::Value>, (Error, Vec<P>)> {
        let (back, order, left) = match stay {
            Stay::None => (pieces.into_iter().filter_map(staged).collect(), None, Vec::new()),
            Stay::All => (Vec::new(), None, pieces),
            Stay::Some(in_place) => {
                let (mut back, mut left) = (Vec::new(), Vec::new());
                let (mut order, mut later) = (Vec::with_capacity(pieces.len()), Vec::new());
                for (i, (piece, in_place)) in pieces.into_iter().zip(in_place).enumerate() {
                    if in_place {
                        left.push(piece);
                        later.push(i);
                    } else {
                        back.extend(staged(piece));
                        order.push(i);
                    }
                }
                order.extend(later);
                (back, Some(order), left)
            }
        };
        let mut parts = Vec::new();
        if !back.is_empty() {
            parts.push(Part::Back(back));
        }
        if !left.is_empty() {
            parts.extend(pushing::push_all(self, left)?.into_iter().map(Part::Flight));
        }
        Ok(Gathered::new(places, parts, order))
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

/// What pieces have in common, in the order of the call.
#[derive(Debug)]
struct Survey {
    count: usize,
    bytes: usize,
    longest: usize,
    shortest: usize,
    /// Pieces that begin on the device where the one before ends, in the same memory.
    neighbours: usize,
    /// Pieces that are as long as the two before, and follow at the same distance on both sides.
    even: usize,
    /// Of the one before: where it is on the host and on the device, in which memory, and its bytes; and how far it is from the
    /// one before it.
    last: (usize, u64, u64, usize),
    distance: Option<(usize, u64)>,
}

impl Default for Survey {
    fn default() -> Self {
        Self {
            count: 0,
            bytes: 0,
            longest: 0,
            shortest: usize::MAX,
            neighbours: 0,
            even: 0,
            last: (0, 0, 0, 0),
            distance: None,
        }
    }
}

impl Survey {
    fn add(&mut self, host: usize, len: usize, memory: &DeviceSlice) {
        let (device, number) = (memory.address(), memory.allocation_number());
        let (host_before, device_before, number_before, len_before) = self.last;
        if self.count > 0 {
            let meet =
                number == number_before && device_before.checked_add(len_before as u64) == Some(device);
            self.neighbours += usize::from(meet);
            let behind = len == len_before && host > host_before && device > device_before;
            let distance = behind.then(|| (host - host_before, device - device_before));
            self.even += usize::from(distance.is_some() && distance == self.distance);
            self.distance = distance;
        }
        self.last = (host, device, number, len);
        self.count += 1;
        self.bytes = self.bytes.saturating_add(len);
        (self.longest, self.shortest) = (self.longest.max(len), self.shortest.min(len));
    }

    /// Whether they follow each other on the device, or nearly all do, so that few copies remain of them.
    fn are_neighbours(&self) -> bool {
        self.neighbours >= self.count / 4 * 3
    }

    /// Whether they are mostly rows of rectangles, which the driver copies at full speed from where they are.
    fn are_rows(&self) -> bool {
        self.even >= self.count / 4 * 3
    }
}

/// A piece to the device.
struct Up<B: Lend> {
    buf: B,
    memory: DeviceSlice,
}

impl<B: Lend> Piece for Up<B> {
    type Value = B;

    fn transfer(&mut self, _: &CopyQueue) -> Result<Transfer> {
        // What is borrowed here and what was looked at before may be two answers of a value of the caller's own.
        let bytes = self.buf.bytes();
        if bytes.is_empty() {
            return Err(Error::Empty);
        }
        if bytes.len() > self.memory.len() {
            return Err(Error::TooSmall { need: bytes.len(), have: self.memory.len() });
        }
        Ok(Transfer::Upload { src: bytes.as_ptr(), dst: self.memory.ptr(), len: bytes.len() })
    }

    fn memory(&self) -> &DeviceSlice {
        &self.memory
    }

    fn lend(self) -> (Lent, B, Option<usize>, DeviceSlice) {
        (self.buf.lend(), self.buf, None, self.memory)
    }
}

/// A piece from the device.
struct Down<L: Landing> {
    memory: DeviceSlice,
    landing: L,
}

impl<L: Landing> Piece for Down<L> {
    type Value = L::Landed;

    fn transfer(&mut self, queue: &CopyQueue) -> Result<Transfer> {
        let (target, capacity) = self.landing.target(queue.stream())?;
        if self.memory.len() > capacity {
            return Err(Error::TooSmall { need: self.memory.len(), have: capacity });
        }
        Ok(Transfer::Download { src: self.memory.ptr(), dst: target, len: self.memory.len() })
    }

    fn memory(&self) -> &DeviceSlice {
        &self.memory
    }

    fn lend(self) -> (Lent, L::Landed, Option<usize>, DeviceSlice) {
        let len = self.memory.len();
        let (lent, half) = self.landing.lend();
        (lent, L::Landed::from(half), Some(len), self.memory)
    }
}

//! Pinned pieces by one call: from where they are, or packed, whichever is faster for what they are.
//!
//! One look at all pieces (`survey.rs`) checks them and says how long they are, and whether they follow each other on
//! the device; by that the way is chosen, before anything is copied. Both directions choose by the same rule.

use std::marker::PhantomData;

use super::handle::{Gathered, Part};
use super::plan::{self, Plan};
use super::pushing::{self, Piece};
use super::staging::{Parts, Staging, Target, Targets};
use super::survey::{Pieces, Survey};
use super::{SLACK, STAGE_BELOW};
use crate::buffer::Lend;
use crate::copy::Landing;
use crate::copy::queue::{CopyQueue, may_wait};
use crate::device::Transfer;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result, SubmitError};
use crate::pool::Pool;
use crate::sealed::KEY;
use crate::stream::Stream;
use crate::stream::awaited::Place;
use crate::stream::timeline::Resource;

/// Pinned neighbours on the device that are shorter are all packed where so many threads can do it: eight bring pieces
/// of 16 KiB at 0.75 to 0.88 of the link's rate, and batches of them from where they are come at 0.5 to 0.8, by
/// whatever number of threads (those of 64 KiB at 0.95 and more).
const PACK_BELOW: usize = 32 << 10;
const PACK_WITH: usize = 6;
/// Those that are neighbours in another order than the call's are packed if they are shorter: to sort them takes a
/// thread some 50 ns for each, which is a tenth of what the wire takes for longer ones, and more than packing gains.
const SORT_BELOW: usize = 12 << 10;

impl CopyQueue {
    /// Copies many buffers to device memory, by the way that is fastest for what they are. The buffers are lent until
    /// the handle gives them back.
    ///
    /// - Where any is shorter than 2 KiB: those of them that are neighbours on the device, packed into segments of
    ///   `pool` if it has one to spare, and all others from where they are. Else:
    /// - Those whose places follow at even distances on both sides, in the order of the call, as blocks of a cache:
    ///   from where they are, as rows of rectangles.
    /// - Shorter ones than 32 KiB, nearly all of them neighbours on the device in the order of the call (shorter ones
    ///   than 12 KiB in any order), 12 MiB together at least: packed by several threads as in [`gather`](Self::gather),
    ///   where the queue has six packers or more and the pool has a segment to spare. Then this returns when all bytes
    ///   have been read.
    /// - All others from where they are, in groups of some 64 that are submitted and come back together, of thousands
    ///   by all of the queue's threads.
    ///
    /// To have pinned pieces stay where they are in any case, [push](Self::upload) them; to have them packed in any
    /// case, pass their bytes to [`gather`](Self::gather).
    ///
    /// # Errors
    /// Before anything is copied, with all buffers: [`Error::Empty`] for a buffer without bytes; as for
    /// [`gather`](Self::gather). Later with the buffers that have not been pushed, in their order; those that were
    /// pushed return by themselves.
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

    /// Copies many ranges of device memory into buffers, by the way that is fastest for what they are. When all have
    /// landed the handle gives the buffers back, each as long as its range.
    ///
    /// The ways are those of [`gather_pinned`](Self::gather_pinned), chosen by the same rule. Where ranges come by way
    /// of segments of `pool` this returns when those have landed and their bytes are in the buffers; a waker, which
    /// must not wait, has all of them come to where they belong.
    ///
    /// # Errors
    /// Before anything is copied, with all buffers: as for [`download`](Self::download); [`Error::WrongDevice`] for the
    /// pool. Later with the pieces that have not been pushed, in their order, or with all of them after a failure of
    /// what came by way of segments: what was written to these buffers before is undefined then. Those that were pushed
    /// return by themselves.
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
            unsafe { landing.filled(memory.len(), KEY) }.map(L::Landed::from)
        };
        self.push_rest(places, stay, pieces, filled).map_err(|(error, back)| {
            let back = back.into_iter().map(|Down { memory, landing }| (memory, landing)).collect();
            SubmitError { error, buffer: Some(back) }
        })
    }

    /// Chooses the way of pieces to the device, and has those packed that are not to be copied from where they are.
    fn stage_up<B: Lend>(&self, pool: &Pool, pieces: &[(B, DeviceSlice)]) -> Result<(Vec<Place>, Stay)> {
        let context = self.device().context();
        let all = Buffers { pieces, lens: pieces.iter().map(|(buf, _)| buf.bytes(KEY).len()).collect() };
        let survey = self.survey(pool, &all, |i| {
            if all.len(i) == 0 {
                return Err(Error::Empty);
            }
            let serves = pieces[i].0.serves(context, KEY);
            if serves { Ok(()) } else { Err(Error::WrongDevice { device: self.device().name().into() }) }
        })?;
        if !may_wait() {
            return Ok((Vec::new(), Stay::All));
        }
        let bytes = |i: usize| pieces[i].0.bytes(KEY);
        let host = |i: usize| bytes(i).as_ptr().addr();
        self.stage_some(pool, &all, &survey, host, |parts, hands| {
            Staging::new(self, pool, &all, parts).pack(hands, &bytes)
        })
    }

    /// The same for pieces from the device.
    fn stage_down<L: Landing>(
        &self,
        pool: &Pool,
        pieces: &mut [(DeviceSlice, L)],
    ) -> Result<(Vec<Place>, Stay)> {
        let all = Landings { first: pieces.as_mut_ptr(), count: pieces.len(), borrowed: PhantomData };
        // SAFETY: each piece's target is asked for by one thread at a time: by this one, and while several are at it,
        // by who has the group that the piece is in, which is in no other.
        let target = |i: usize| unsafe { all.target(i, self.stream()) };
        let survey = self.survey(pool, &all, |i| {
            // SAFETY: nobody else asks.
            let (need, capacity) = (all.len(i), unsafe { all.room(i, self.stream()) }?);
            if need > capacity { Err(Error::TooSmall { need, have: capacity }) } else { Ok(()) }
        })?;
        if !may_wait() {
            return Ok((Vec::new(), Stay::All));
        }
        let host = |i: usize| target(i).map_or(0, |target| target.at.addr());
        self.stage_some(pool, &all, &survey, host, |parts, hands| {
            // What is planned as a whole may have a piece in two segments: all are asked for here.
            let asked: Vec<Target> = if parts.are_cut() {
                Vec::new()
            } else {
                (0..all.count()).map(target).collect::<Result<_>>()?
            };
            let place = |i: usize| asked.get(i).map_or_else(|| target(i), |target| Ok(*target));
            // SAFETY: the call has the buffers, each of which says that it may be written to there, and nobody else
            // touches them before this returns.
            let targets = unsafe { Targets::new(&place) };
            Staging::new(self, pool, &all, parts).unpack(hands, &targets).map(|()| Vec::new())
        })
    }

    /// Chooses the way by a survey, and has `run` stage what is not to stay in place, with so many helpers. `host`:
    /// where a piece is there.
    fn stage_some(
        &self,
        pool: &Pool,
        pieces: &dyn Pieces,
        survey: &Survey,
        host: impl FnMut(usize) -> usize,
        run: impl FnOnce(Parts<'_>, usize) -> Result<Vec<Place>>,
    ) -> Result<(Vec<Place>, Stay)> {
        if survey.count > 0 && survey.shortest < STAGE_BELOW {
            let (hands, limits) = self.share_of(pool, survey.short_bytes);
            let plan = Plan::new(&pieces.all(true), limits);
            let parts = Parts::planned(&plan.segments);
            let first = (!plan.segments.is_empty()).then(|| pool.try_checkout(parts.longest()));
            // The pinned pieces of a call may be all that the pool has: then there is nothing to wait for.
            let parts = match first {
                Some(Ok(first)) => Some(parts.with(first)),
                Some(Err(_)) => None,
                None => Some(parts),
            };
            if let Some(parts) = parts {
                let mut in_place = vec![false; survey.count];
                plan.in_place.iter().for_each(|copy| in_place[copy.piece] = true);
                let places = run(parts, hands)?;
                return Ok((places, Stay::Some(in_place)));
            }
        }
        let (hands, limits) = self.share_of(pool, survey.bytes);
        // Threads enough to pack faster than the driver takes so many copies; few copies that remain, or what sorting
        // will tell.
        let may_pack = hands + 1 >= PACK_WITH
            && survey.longest < PACK_BELOW
            && survey.longest + SLACK <= limits.segment
            && (survey.are_neighbours() || survey.longest < SORT_BELOW)
            && !pieces.are_rows(host);
        if !may_pack {
            return Ok((Vec::new(), Stay::All));
        }
        let Ok(first) = pool.try_checkout(limits.segment) else { return Ok((Vec::new(), Stay::All)) };
        let mut order = None;
        if !survey.are_neighbours() {
            let all = pieces.all(false);
            let sorted = plan::order(&all);
            if !plan::are_neighbours(&all, &sorted) {
                return Ok((Vec::new(), Stay::All));
            }
            order = Some(sorted);
        }
        let run = |parts: Parts<'_>, hands| run(parts.with(first), hands);
        self.stage_all(pool, pieces, survey, order, run).map(|places| (places, Stay::None))
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

/// The pieces of a gather.
struct Buffers<'a, B> {
    pieces: &'a [(B, DeviceSlice)],
    /// Asked for once: a value of the caller's own may give another answer each time.
    lens: Vec<usize>,
}

impl<B: Lend> Pieces for Buffers<'_, B> {
    fn count(&self) -> usize {
        self.lens.len()
    }

    fn len(&self, i: usize) -> usize {
        self.lens[i]
    }

    fn memory(&self, i: usize) -> &DeviceSlice {
        &self.pieces[i].1
    }
}

/// The pieces of a scatter, whose landings several threads ask where they are, each for other ones.
struct Landings<'a, L> {
    first: *mut (DeviceSlice, L),
    count: usize,
    borrowed: PhantomData<&'a mut [(DeviceSlice, L)]>,
}

// SAFETY: what is shared of a piece is its device memory, which is `Sync`; its landing is one thread's at a time, by
// the word of who asks for it, and may be another thread's, being `Send`.
unsafe impl<L: Landing> Sync for Landings<'_, L> {}

impl<L: Landing> Landings<'_, L> {
    /// # Safety
    /// No other thread asks for the same piece's meanwhile.
    unsafe fn target(&self, i: usize, stream: &Stream) -> Result<Target> {
        assert!(i < self.count, "within the list");
        // SAFETY: within the list, and this thread's alone, by the caller's word.
        let landing = unsafe { &mut (*self.first.add(i)).1 };
        landing.target(stream, KEY).map(|(at, len)| Target { at, len })
    }

    /// Bytes that fit there.
    ///
    /// # Safety
    /// As for [`target`](Self::target).
    unsafe fn room(&self, i: usize, stream: &Stream) -> Result<usize> {
        assert!(i < self.count, "within the list");
        // SAFETY: as above.
        let landing = unsafe { &mut (*self.first.add(i)).1 };
        landing.room(stream, KEY)
    }
}

impl<L: Landing> Pieces for Landings<'_, L> {
    fn count(&self) -> usize {
        self.count
    }

    fn len(&self, i: usize) -> usize {
        self.memory(i).len()
    }

    fn memory(&self, i: usize) -> &DeviceSlice {
        assert!(i < self.count, "within the list");
        // SAFETY: within the list; while we are borrowed nobody has this half of a piece exclusively.
        unsafe { &(*self.first.add(i)).0 }
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
        let bytes = self.buf.bytes(KEY);
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

    fn lend(self) -> (Resource, B, Option<usize>, DeviceSlice) {
        (self.buf.lend(KEY), self.buf, None, self.memory)
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
        let (target, capacity) = self.landing.target(queue.stream(), KEY)?;
        if self.memory.len() > capacity {
            return Err(Error::TooSmall { need: self.memory.len(), have: capacity });
        }
        Ok(Transfer::Download { src: self.memory.ptr(), dst: target, len: self.memory.len() })
    }

    fn memory(&self) -> &DeviceSlice {
        &self.memory
    }

    fn lend(self) -> (Resource, L::Landed, Option<usize>, DeviceSlice) {
        let len = self.memory.len();
        let (resource, half) = self.landing.lend(KEY);
        (resource, L::Landed::from(half), Some(len), self.memory)
    }
}

//! Gather and scatter: thousands of small pieces by one call, with one completion.
//!
//! A call is split by [`plan`], which is arithmetic; here its parts are done: segments of the pool are filled or emptied by
//! the calling thread, and the copies go through the [queue](crate::CopyQueue), so that they travel in batches. While one
//! segment is on the wire the next one is filled.
//!
//! What is not pinned is always staged, so its bytes are borrowed only for the length of the call that touches them: a
//! gather has read them when it returns, a scatter has written them. What is pinned is lent to the queue piece by piece,
//! and comes back.

pub mod plan;

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use self::plan::{Limits, Piece, Plan, Segment};
use super::Landing;
use super::queue::CopyQueue;
use crate::buffer::sealed::Lend as _;
use crate::buffer::{InFlight, Lend, PinnedBuf};
use crate::device::memory::DeviceSlice;
use crate::device::{DevicePtr, Transfer};
use crate::error::{Error, Result, SubmitError};
use crate::pool::Pool;
use crate::stream::awaited::Place;
use crate::stream::timeline::WaitKey;

/// Bytes of a staging segment at most. (Copies of 2 MiB are within a twentieth of the fastest; longer ones only leave the link
/// idle for longer while the first is filled.)
const SEGMENT: usize = 2 << 20;
/// Pinned neighbours that are shorter are staged: a copy of their own costs as much as the CPU takes for so many bytes.
const STAGE_BELOW: usize = 2 << 10;
/// Segments of a scatter that are on the wire while one is emptied.
const AHEAD: usize = 3;

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
    /// Copies many pieces of host memory, pinned or not, to device memory. The calling thread packs them into segments of
    /// `pool`, those that are neighbours on the device into one copy, while earlier segments are on the wire; it waits
    /// where the pool or the queue has no room. When this returns all bytes have been read, and the last of them are on
    /// their way: the handle says when they are there.
    ///
    /// Each piece's device memory must be as long as the piece at least; what is beyond stays as it is. Where two pieces
    /// overlap there, either may win. Pieces of no bytes are left out.
    ///
    /// # Errors
    /// Before anything is copied: [`Error::TooSmall`], [`Error::WrongDevice`]. Later what a checkout or the queue says;
    /// then some of the pieces may have been copied, and all segments return by themselves.
    pub fn gather(&self, pool: &Pool, pieces: &[(&[u8], DeviceSlice)]) -> Result<Gathered> {
        let sizes = pieces.iter().map(|(bytes, target)| (bytes.len(), target, false));
        let (plan, memories) = self.planned(pool, sizes)?;
        let mut places = Vec::new();
        for segment in &plan.segments {
            let buf = pool.checkout(segment.len)?;
            let bytes = |piece: usize| pieces[piece].0;
            places.extend(self.send(filled(buf, segment, bytes)?, segment, &memories)?);
        }
        Ok(Gathered { values: Vec::new(), places, done: 0, waker: None })
    }

    /// The same, and waits until all of it is there.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather), and what the copies failed with.
    pub fn gather_blocking(&self, pool: &Pool, pieces: &[(&[u8], DeviceSlice)]) -> Result<()> {
        self.gather(pool, pieces)?.wait().map(drop)
    }

    /// Copies many buffers to device memory: large ones from where they are, in batches; neighbours of less than 2 KiB by
    /// way of a segment of `pool`, which is faster. The buffers are lent until the handle gives them back.
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
        let planned = (|| {
            if pieces.iter().any(|(buf, _)| buf.bytes().is_empty()) {
                return Err(Error::Empty);
            }
            if !pieces.iter().all(|(buf, _)| buf.serves(self.device().context())) {
                return Err(Error::WrongDevice { device: self.device().name().into() });
            }
            let sizes = pieces.iter().map(|(buf, target)| (buf.bytes().len(), target, true));
            let (plan, memories) = self.planned(pool, sizes)?;
            let mut places = Vec::new();
            for segment in &plan.segments {
                let buf = pool.checkout(segment.len)?;
                let bytes = |piece: usize| pieces[piece].0.bytes();
                places.extend(self.send(filled(buf, segment, bytes)?, segment, &memories)?);
            }
            Ok((plan, places))
        })();
        let (plan, places) = match planned {
            Ok(planned) => planned,
            Err(error) => return Err(SubmitError::refused(error, pieces)),
        };
        let mut in_place = vec![false; pieces.len()];
        plan.in_place.iter().for_each(|copy| in_place[copy.piece] = true);
        let mut values = Vec::with_capacity(pieces.len());
        let mut left = pieces.into_iter().zip(in_place);
        while let Some(((buf, target), in_place)) = left.next() {
            if !in_place {
                values.push(Value::Back(buf));
                continue;
            }
            match self.upload(buf, &target) {
                Ok(flight) => values.push(Value::Flight(flight)),
                Err(SubmitError { error, buffer }) => {
                    let rest =
                        buffer.map(|buf| (buf, target)).into_iter().chain(left.map(|(piece, _)| piece));
                    return Err(SubmitError { error, buffer: Some(rest.collect()) });
                }
            }
        }
        Ok(Gathered { values, places, done: 0, waker: None })
    }

    /// Copies many ranges of device memory to borrowed memory, pinned or not, each as many bytes as its target has, and
    /// returns when all of it is there: by way of segments of `pool`, neighbours on the device by one copy, those that have
    /// landed being emptied by the calling thread while the next ones are on the wire.
    ///
    /// # Errors
    /// As for [`gather`](Self::gather). After an error the targets' contents are undefined.
    pub fn scatter_blocking(&self, pool: &Pool, pieces: &mut [(DeviceSlice, &mut [u8])]) -> Result<()> {
        let (sources, mut targets): (Vec<&DeviceSlice>, Vec<&mut [u8]>) =
            pieces.iter_mut().map(|(source, target)| (&*source, &mut **target)).unzip();
        let sizes = sources.iter().zip(&targets).map(|(source, target)| (target.len(), *source, false));
        let (plan, memories) = self.planned(pool, sizes)?;
        let mut under_way: VecDeque<(&Segment, Arc<PinnedBuf>, Vec<Place>)> = VecDeque::new();
        let mut empty = |(segment, buf, places): (&Segment, Arc<PinnedBuf>, Vec<Place>)| -> Result<()> {
            places.iter().try_for_each(|place| place.wait(None))?;
            for step in &segment.moves {
                // SAFETY: within the segment, where the copies, which are done, have written each byte of a move.
                let bytes = unsafe { std::slice::from_raw_parts(buf.as_ptr().add(step.at), step.len) };
                targets[step.piece][step.from..step.from + step.len].copy_from_slice(bytes);
            }
            Ok(())
        };
        for segment in &plan.segments {
            if under_way.len() >= AHEAD {
                if let Some(first) = under_way.pop_front() {
                    empty(first)?;
                }
            }
            let buf = match pool.try_checkout(segment.len) {
                // Its own segments are in the way: one of them first.
                Err(Error::Exhausted { .. }) if !under_way.is_empty() => {
                    while let Some(first) = under_way.pop_front() {
                        empty(first)?;
                    }
                    pool.checkout(segment.len)?
                }
                Err(Error::Exhausted { .. }) => pool.checkout(segment.len)?,
                other => other?,
            };
            let buf = Arc::new(buf);
            let copies: Vec<_> = segment
                .copies
                .iter()
                .map(|copy| {
                    // SAFETY: within the segment.
                    let dst = unsafe { buf.as_ptr().cast_mut().add(copy.at) };
                    let src = DevicePtr(copy.device);
                    (Transfer::Download { src, dst, len: copy.len }, memories[copy.piece])
                })
                .collect();
            // Nobody but the device touches the memory until the copies are done: the buffer is ours alone, as each of
            // its shares is.
            let places = self.push_all(&copies, || buf.lend())?;
            under_way.push_back((segment, buf, places));
        }
        under_way.into_iter().try_for_each(empty)
    }

    /// Copies many ranges of device memory into buffers, in batches. When all have landed the handle gives the buffers
    /// back, each as long as its range.
    ///
    /// # Errors
    /// With the pieces that have not been pushed, in their order: as for [`download`](Self::download). Those that were
    /// pushed return by themselves.
    #[allow(clippy::type_complexity, reason = "the pieces come back")]
    pub fn scatter_pinned<L: Landing>(
        &self,
        pieces: Vec<(DeviceSlice, L)>,
    ) -> Result<Gathered<L::Landed>, SubmitError<Vec<(DeviceSlice, L)>>> {
        let mut values = Vec::with_capacity(pieces.len());
        let mut left = pieces.into_iter();
        while let Some((source, landing)) = left.next() {
            match self.download(&source, landing) {
                Ok(flight) => values.push(Value::Flight(flight)),
                Err(SubmitError { error, buffer }) => {
                    let rest = buffer.map(|landing| (source, landing)).into_iter().chain(left);
                    return Err(SubmitError { error, buffer: Some(rest.collect()) });
                }
            }
        }
        Ok(Gathered { values, places: Vec::new(), done: 0, waker: None })
    }

    /// Checks the pieces (bytes, device memory, whether in place) and plans for them.
    fn planned<'a>(
        &self,
        pool: &Pool,
        pieces: impl Iterator<Item = (usize, &'a DeviceSlice, bool)>,
    ) -> Result<(Plan, Vec<&'a DeviceSlice>)> {
        let (mut planned, mut memories) = (Vec::new(), Vec::new());
        for (len, memory, in_place) in pieces {
            if !memory.is_of(self.device().context()) {
                return Err(Error::WrongDevice { device: self.device().name().into() });
            }
            if len > memory.len() {
                return Err(Error::TooSmall { need: len, have: memory.len() });
            }
            planned.push(Piece {
                device: memory.address(),
                memory: memory.allocation_number(),
                len,
                in_place,
            });
            memories.push(memory);
        }
        let limits = Limits { segment: SEGMENT.min(pool.longest() / 2).max(1), stage_below: STAGE_BELOW };
        Ok((Plan::new(&planned, limits), memories))
    }

    /// Pushes a segment that is filled.
    fn send(&self, buf: PinnedBuf, segment: &Segment, memories: &[&DeviceSlice]) -> Result<Vec<Place>> {
        let buf = Arc::new(buf);
        let copies: Vec<_> = segment
            .copies
            .iter()
            .map(|copy| {
                let bytes = &buf[copy.at..copy.at + copy.len];
                let dst = DevicePtr(copy.device);
                (Transfer::Upload { src: bytes.as_ptr(), dst, len: copy.len }, memories[copy.piece])
            })
            .collect();
        self.push_all(&copies, || buf.lend())
    }
}

/// A segment with its moves made. What lies between them is zero.
fn filled<'a>(mut buf: PinnedBuf, segment: &Segment, bytes: impl Fn(usize) -> &'a [u8]) -> Result<PinnedBuf> {
    for step in &segment.moves {
        buf.try_resize(step.at, 0)?;
        buf.try_extend_from_slice(&bytes(step.piece)[step.from..step.from + step.len])?;
    }
    Ok(buf)
}

//! The handle of many copies as one, and what it keeps: the buffers that are lent, group by group.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::buffer::Lend;
use crate::error::Result;
use crate::sealed::KEY;
use crate::stream::awaited::Place;
use crate::stream::timeline::WaitKey;

/// Many copies under way, as one: what [`CopyQueue::gather`](crate::CopyQueue::gather) and its like give. Wait for it,
/// await it, ask, or drop it: then what it has returns by itself when the device is done.
///
/// An error is that of one of the copies; the others happen all the same.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (queue, memory) = (device.copy_queue()?, device.alloc(64)?);
/// let pieces = [(&b"hello"[..], memory.slice(..5)?), (&b"world"[..], memory.slice(32..37)?)];
/// let gathered = queue.gather(&pool, &pieces)?; // `pieces` has been read
/// gathered.wait()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[must_use = "dropping it is fine: what it has returns by itself; say so with `drop`"]
pub struct Gathered<B: Lend = ()> {
    /// Of what was staged.
    places: Vec<Place>,
    parts: Vec<Part<B>>,
    /// Which piece of the call each value is, part after part; none: they are in order.
    order: Option<Vec<usize>>,
    /// How many of the places, and then of the parts, are known to be done, and who is to be woken by the next.
    done: usize,
    waker: Option<WaitKey>,
}

/// Buffers whose copies land together.
pub(super) enum Part<B: Lend> {
    /// On their way.
    Flight(Flights<B>),
    /// Done with.
    Back(Vec<B>),
}

/// Buffers of a group that is under way.
pub(super) struct Flights<B: Lend> {
    // In this order: buffers are let go of before anybody stops asking.
    values: Lending<B>,
    place: Place,
}

/// Buffers that are lent: dropped, they return when the device is done.
pub(super) struct Lending<B: Lend> {
    values: Vec<B>,
    /// Bytes that the device writes to each; none where it reads.
    written: Vec<usize>,
}

impl<B: Lend> Lending<B> {
    /// Room for so many.
    pub(super) fn with_capacity(count: usize) -> Self {
        Self { values: Vec::with_capacity(count), written: Vec::new() }
    }

    /// `written`: by the device, if it writes; the same for all of them, or for none.
    pub(super) fn push(&mut self, value: B, written: Option<usize>) {
        self.values.push(value);
        self.written.extend(written);
    }

    pub(super) fn placed(self, place: Place) -> Flights<B> {
        Flights { values: self, place }
    }

    /// The device is done with them.
    fn finish(&mut self) -> Result<Vec<B>> {
        let mut back = Vec::with_capacity(self.values.len());
        let mut left = std::mem::take(&mut self.values).into_iter();
        while let Some(value) = left.next() {
            match value.finish(self.written.get(back.len()).copied(), KEY) {
                Ok(value) => back.push(value),
                Err(error) => {
                    // They return as if nobody had waited.
                    self.values = left.collect();
                    return Err(error);
                }
            }
        }
        Ok(back)
    }
}

impl<B: Lend> Drop for Lending<B> {
    fn drop(&mut self) {
        self.values.drain(..).for_each(|value| value.abandon(KEY));
    }
}

impl<B: Lend> Part<B> {
    fn wait(self) -> Result<Vec<B>> {
        match self {
            Self::Back(values) => Ok(values),
            Self::Flight(Flights { mut values, place }) => {
                let no_deadline: Option<Instant> = None;
                place.wait(no_deadline)?;
                values.finish()
            }
        }
    }
}

impl<B: Lend> Gathered<B> {
    pub(super) fn new(places: Vec<Place>, parts: Vec<Part<B>>, order: Option<Vec<usize>>) -> Self {
        Self { places, parts, order, done: 0, waker: None }
    }

    /// Whether all of it is done. Never waits.
    ///
    /// # Errors
    /// What one of the copies failed with, or all were lost with.
    pub fn is_done(&self) -> Result<bool> {
        crate::os::check_fork()?;
        let flights = self.parts.iter().filter_map(|part| match part {
            Part::Flight(flights) => Some(&flights.place),
            Part::Back(_) => None,
        });
        for place in self.places.iter().chain(flights) {
            if !place.poll_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until all of it is done, and gives the buffers back, in the order of the call's pieces, host-ready.
    ///
    /// # Errors
    /// As for [`is_done`](Self::is_done). What is done with returns by itself then.
    pub fn wait(mut self) -> Result<Vec<B>> {
        crate::os::check_fork()?;
        self.forget_waker();
        let no_deadline: Option<Instant> = None;
        self.places.iter().try_for_each(|place| place.wait(no_deadline))?;
        let mut back = Vec::new();
        // Part by part: while one comes back the later ones are on the wire.
        for part in std::mem::take(&mut self.parts) {
            join(&mut back, part.wait()?);
        }
        Ok(in_order(back, self.order.take()))
    }
}

/// Appends a part's buffers.
fn join<B>(all: &mut Vec<B>, part: Vec<B>) {
    if all.is_empty() {
        *all = part;
    } else {
        all.extend(part);
    }
}

/// Brings what came part after part into the order of the call's pieces.
fn in_order<B>(values: Vec<B>, order: Option<Vec<usize>>) -> Vec<B> {
    let Some(order) = order else { return values };
    let mut sorted: Vec<(usize, B)> = order.into_iter().zip(values).collect();
    sorted.sort_unstable_by_key(|(piece, _)| *piece);
    sorted.into_iter().map(|(_, value)| value).collect()
}

impl<B: Lend> Future for Gathered<B> {
    type Output = Result<Vec<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = crate::os::check_fork() {
            return Poll::Ready(Err(error));
        }
        let this = &mut *self;
        // One after the other: whichever is the first that is not done has the waker.
        while let Some(place) = this.places.get(this.done) {
            match place.wake_later(&mut this.waker, cx.waker()) {
                Ok(true) => this.done += 1,
                Ok(false) => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        while let Some(part) = this.parts.get_mut(this.done - this.places.len()) {
            if let Part::Flight(flights) = part {
                match flights.place.wake_later(&mut this.waker, cx.waker()) {
                    Ok(true) => (),
                    Ok(false) => return Poll::Pending,
                    Err(error) => return Poll::Ready(Err(error)),
                }
                match flights.values.finish() {
                    Ok(values) => *part = Part::Back(values),
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
            this.done += 1;
        }
        let mut back = Vec::new();
        for part in std::mem::take(&mut this.parts) {
            if let Part::Back(values) = part {
                join(&mut back, values);
            }
        }
        Poll::Ready(Ok(in_order(back, this.order.take())))
    }
}

impl<B: Lend> Gathered<B> {
    fn forget_waker(&mut self) {
        let flight = || match self.parts.get(self.done - self.places.len()) {
            Some(Part::Flight(flights)) => Some(&flights.place),
            _ => None,
        };
        if let Some(place) = self.places.get(self.done).or_else(flight) {
            place.line.forget_waker(&mut self.waker);
        }
    }
}

impl<B: Lend> Drop for Gathered<B> {
    fn drop(&mut self) {
        self.forget_waker();
    }
}

impl<B: Lend> fmt::Debug for Gathered<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |part: &Part<B>| match part {
            Part::Flight(flights) => flights.values.values.len(),
            Part::Back(values) => values.len(),
        };
        let values = self.parts.iter().map(count).sum::<usize>();
        f.debug_struct("Gathered")
            .field("values", &values)
            .field("staged", &self.places.len())
            .finish_non_exhaustive()
    }
}

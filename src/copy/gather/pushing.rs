//! Pushing: pieces that stay where they are go to the queue in groups, by the calling thread.
//!
//! A group's copies are described, put down as in flight and handed to a lane together, which takes some 0.1 us a
//! piece: less than all of the queue's threads need to submit them. (More pushing threads bring no more to the device
//! and less from it: they wait for room in their lanes, and ask the driver what is done, which keeps those up that
//! submit. Measured with 16 KiB by 1, 2 and 4 threads on an H200.) Of thousands each of the queue's threads gets a
//! group by turns; where places are at even distances, some hundred neighbours, to go as rows of one rectangle. They
//! alone submit then: a thread that pushed, and called the driver for the streams of all of them by turns, would get a
//! tenth of the rate.

use super::handle::{Flights, Lending};
use crate::buffer::Lend;
use crate::copy::queue::CopyQueue;
use crate::device::Transfer;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::stream::timeline::Resource;

/// Neighbours that are looked at together; rows go to one of the queue's threads before the next has its turn.
const PART: usize = 256;
/// Pieces that are worth it to keep all of the queue's threads busy.
pub(super) const MANY: usize = 1024;

/// A piece that stays where it is.
pub(super) trait Piece {
    /// What comes back of it.
    type Value: Lend;

    /// Its copy, if it can be made.
    fn transfer(&mut self, queue: &CopyQueue) -> Result<Transfer>;

    fn memory(&self) -> &DeviceSlice;

    /// What goes to the queue, and what comes back; with the bytes that the device writes to it, if it does.
    fn lend(self) -> (Resource, Self::Value, Option<usize>, DeviceSlice);
}

/// Pushes all pieces, and gives what is under way, in the order of the pieces; or with an error the pieces that were
/// not pushed, in their order. What was pushed then returns by itself.
#[allow(clippy::type_complexity, reason = "the pieces come back")]
pub(super) fn push_all<P: Piece>(
    queue: &CopyQueue,
    pieces: Vec<P>,
) -> Result<Vec<Flights<P::Value>>, (Error, Vec<P>)> {
    let many = pieces.len() >= MANY;
    let mut done = Done { flights: Vec::new(), names: Vec::with_capacity(pieces.len()), turn: 0 };
    let mut left = pieces.into_iter();
    loop {
        let part: Vec<P> = left.by_ref().take(PART).collect();
        if part.is_empty() {
            return Ok(done.flights);
        }
        if let Err((error, mut back)) = done.push(queue, part, many) {
            back.extend(left);
            return Err((error, back));
        }
    }
}

/// What was pushed.
struct Done<V: Lend> {
    flights: Vec<Flights<V>>,
    /// Names of device memory that nobody needs any more. They are let go of when everything is pushed: then the copies
    /// are on the wire, which need not wait for it.
    names: Vec<DeviceSlice>,
    /// Of the queue's threads.
    turn: usize,
}

impl<V: Lend> Done<V> {
    /// Pushes pieces, or gives back those that were not pushed.
    fn push<P: Piece<Value = V>>(
        &mut self,
        queue: &CopyQueue,
        mut part: Vec<P>,
        many: bool,
    ) -> Result<(), (Error, Vec<P>)> {
        let mut transfers = Vec::with_capacity(part.len());
        let mut refused = None;
        for piece in &mut part {
            match piece.transfer(queue) {
                Ok(transfer) => transfers.push(transfer),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        let rows = are_rows(&transfers);
        self.turn += 1;
        let (mut left, mut transfers) = (part.into_iter(), &transfers[..]);
        while !transfers.is_empty() {
            let group = &transfers[..queue.group(transfers)];
            let memories = allocations(left.as_slice().iter().take(group.len()).map(P::memory));
            let mut lending = Lending::with_capacity(0);
            self.turn += usize::from(!rows);
            let turn = many.then_some(self.turn);
            let pushed = queue.push_group(group, memories, turn, |count| {
                // It is kept for long, and there may be little room at a time.
                lending = Lending::with_capacity(count);
                let lend = |piece: P| {
                    let (resource, value, written, name) = piece.lend();
                    lending.push(value, written);
                    self.names.push(name);
                    resource
                };
                left.by_ref().take(count).map(lend).collect()
            });
            match pushed {
                Ok((place, count)) => {
                    self.flights.push(lending.placed(place));
                    transfers = &transfers[count..];
                }
                Err(error) => return Err((error, left.collect())),
            }
        }
        refused.map_or(Ok(()), |error| Err((error, left.collect())))
    }
}

/// Whether copies are mostly at even distances on both sides.
fn are_rows(transfers: &[Transfer]) -> bool {
    let even = |three: &&[Transfer]| {
        let distance = three[0].distance(&three[1]);
        distance.is_some() && distance == three[1].distance(&three[2])
    };
    transfers.len() > 2 && transfers.windows(3).filter(even).count() >= transfers.len() / 4 * 3
}

/// One name for each allocation that these are in, as far as neighbours show it.
fn allocations<'a>(names: impl Iterator<Item = &'a DeviceSlice>) -> Vec<DeviceSlice> {
    let mut found: Vec<DeviceSlice> = Vec::new();
    for name in names {
        let number = name.allocation_number();
        // The latest few: more often than not it is one of these.
        if !found.iter().rev().take(4).any(|other| other.allocation_number() == number) {
            found.push(name.clone());
        }
    }
    found
}

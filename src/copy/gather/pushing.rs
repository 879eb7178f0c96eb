//! Pushing: pieces that stay where they are go to the queue in groups, by several threads.
//!
//! To make a copy's description, to put its buffer down as in flight, and to take it back, costs a look at each buffer, which
//! is in nobody's caches: for thousands of short ones as long as the link takes, if one thread does it. So the caller's helpers
//! push too, each so many neighbours at a time: then their copies are neighbours in a lane, and where their places are at even
//! distances go as rows of one rectangle. The parts go to the queue's threads by turns, so that all of them submit.

use std::vec::IntoIter;

use parking_lot::Mutex;

use super::handle::{Flights, Lending};
use crate::buffer::Lend;
use crate::copy::queue::CopyQueue;
use crate::device::Transfer;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::stream::timeline::Lent;

/// Neighbours that a thread pushes before it takes more.
const PART: usize = 256;
/// Pieces that are worth a thread, and threads that push one call's at most: with these the queue's submitters are behind.
const WORTH: usize = 1024;
const MOST: usize = 4;

/// A piece that stays where it is.
pub(super) trait Piece: Send {
    /// What comes back of it.
    type Value: Lend;

    /// Its copy, if it can be made.
    fn transfer(&mut self, queue: &CopyQueue) -> Result<Transfer>;

    fn memory(&self) -> &DeviceSlice;

    /// What goes to the queue, and what comes back; with the bytes that the device writes to it, if it does.
    fn lend(self) -> (Lent, Self::Value, Option<usize>, DeviceSlice);
}

/// Pieces, and what became of them, by the numbers of their parts.
struct State<P: Piece> {
    left: IntoIter<P>,
    parts: usize,
    pushed: Vec<(usize, Vec<Flights<P::Value>>)>,
    /// Names of device memory that nobody needs any more. They are dropped by the caller alone, while the copies are on the
    /// wire: many count on the same memory, and threads that changed its count by turns would keep each other waiting.
    names: Vec<Vec<DeviceSlice>>,
    refused: Vec<(usize, Vec<P>)>,
    error: Option<Error>,
}

/// Pushes all pieces, and gives what is under way, in the order of the pieces; or with an error the pieces that were not pushed,
/// in their order.
pub(super) fn push_all<P: Piece>(
    queue: &CopyQueue,
    pieces: Vec<P>,
) -> Result<Vec<Flights<P::Value>>, (Error, Vec<P>)> {
    let count = pieces.len();
    let hands = (count / WORTH).saturating_sub(1).min(MOST - 1).min(queue.helpers());
    let state = Mutex::new(State {
        left: pieces.into_iter(),
        parts: 0,
        pushed: Vec::new(),
        names: Vec::new(),
        refused: Vec::new(),
        error: None,
    });
    let part = || {
        let (number, part) = {
            let mut state = state.lock();
            if state.error.is_some() {
                return false;
            }
            let part: Vec<P> = state.left.by_ref().take(PART).collect();
            state.parts += 1;
            (state.parts, part)
        };
        let is_last = part.len() < PART;
        let mut done = Part { flights: Vec::new(), names: Vec::with_capacity(part.len()) };
        let refused = done.push(queue, part, (count >= WORTH).then_some(number));
        let mut state = state.lock();
        state.pushed.push((number, done.flights));
        state.names.push(done.names);
        let Err((error, back)) = refused else { return !is_last };
        state.refused.push((number, back));
        state.error.get_or_insert(error);
        false
    };
    let all = || while part() {};
    let shared = queue.share(hands, &all, all);
    let State { left, mut pushed, names, mut refused, error, .. } = state.into_inner();
    drop(names);
    if let Some(error) = shared.err().or(error) {
        refused.sort_by_key(|(number, _)| *number);
        let back = refused.into_iter().flat_map(|(_, pieces)| pieces).chain(left).collect();
        // What was pushed returns by itself.
        return Err((error, back));
    }
    pushed.sort_by_key(|(number, _)| *number);
    Ok(pushed.into_iter().flat_map(|(_, flights)| flights).collect())
}

/// What a thread has made of its part.
struct Part<V: Lend> {
    flights: Vec<Flights<V>>,
    names: Vec<DeviceSlice>,
}

impl<V: Lend> Part<V> {
    /// Pushes pieces, or gives back those that were not pushed.
    fn push<P: Piece<Value = V>>(
        &mut self,
        queue: &CopyQueue,
        mut part: Vec<P>,
        turn: Option<usize>,
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
        if let Some(first) = transfers.first().filter(|_| turn.is_some()) {
            queue.wake(first);
        }
        let (mut left, mut transfers) = (part.into_iter(), &transfers[..]);
        while !transfers.is_empty() {
            let (group, later) = transfers.split_at(queue.group(transfers));
            transfers = later;
            let memories = allocations(left.as_slice().iter().take(group.len()).map(P::memory));
            let mut lending = Lending::with_capacity(group.len());
            let pushed = queue.push_group(group, memories, turn, || {
                let lend = |piece: P| {
                    let (lent, value, written, name) = piece.lend();
                    lending.push(value, written);
                    self.names.push(name);
                    lent
                };
                left.by_ref().take(group.len()).map(lend).collect()
            });
            match pushed {
                Ok(place) => self.flights.push(lending.placed(place)),
                Err(error) => return Err((error, left.collect())),
            }
        }
        refused.map_or(Ok(()), |error| Err((error, left.collect())))
    }
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

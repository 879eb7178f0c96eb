//! Pushing: pieces that stay where they are are pushed to the queue one by one, by several threads.
//!
//! A push takes its caller a fraction of a microsecond, which is nothing for one copy, and for thousands of short ones as long
//! as the link takes. So the caller's helpers push too, each so many neighbours at a time: then their copies are neighbours in
//! a lane, and where their places are at even distances go as rows of one rectangle.

use std::vec::IntoIter;

use parking_lot::Mutex;

use crate::copy::queue::CopyQueue;
use crate::error::Error;

/// Neighbours that a thread pushes before it takes more.
const PART: usize = 256;
/// Pieces that are worth a thread, and threads that push one call's at most: with these the queue's submitters are behind.
const WORTH: usize = 1024;
const MOST: usize = 4;

/// Pieces, and what became of them, by the numbers of their parts.
struct State<P, V> {
    left: IntoIter<P>,
    parts: usize,
    pushed: Vec<(usize, Vec<V>)>,
    refused: Vec<(usize, Vec<P>)>,
    error: Option<Error>,
}

/// Pushes each piece, and gives what `push` gave, in the order of the pieces; or with an error the pieces that were not pushed,
/// in their order. `push` gives back a piece that it did not push.
pub(super) fn push_each<P: Send, V: Send>(
    queue: &CopyQueue,
    pieces: Vec<P>,
    push: impl Fn(P) -> Result<V, (Error, Option<P>)> + Sync,
) -> Result<Vec<V>, (Error, Vec<P>)> {
    let hands = (pieces.len() / WORTH).saturating_sub(1).min(MOST - 1).min(queue.helpers());
    let count = pieces.len();
    let state = Mutex::new(State {
        left: pieces.into_iter(),
        parts: 0,
        pushed: Vec::new(),
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
        let (mut pushed, mut left, mut refused) = (Vec::with_capacity(part.len()), part.into_iter(), None);
        let is_last = left.len() < PART;
        while let Some(piece) = left.next() {
            match push(piece) {
                Ok(value) => pushed.push(value),
                Err((error, back)) => {
                    refused = Some((error, back.into_iter().chain(left).collect()));
                    break;
                }
            }
        }
        let mut state = state.lock();
        state.pushed.push((number, pushed));
        let Some((error, back)) = refused else { return !is_last };
        state.refused.push((number, back));
        state.error.get_or_insert(error);
        false
    };
    let all = || while part() {};
    let shared = queue.share(hands, &all, all);
    let State { left, mut pushed, mut refused, error, .. } = state.into_inner();
    if let Some(error) = shared.err().or(error) {
        refused.sort_by_key(|(number, _)| *number);
        let back = refused.into_iter().flat_map(|(_, pieces)| pieces).chain(left).collect();
        // What was pushed returns by itself.
        return Err((error, back));
    }
    pushed.sort_by_key(|(number, _)| *number);
    let mut values = Vec::with_capacity(count);
    pushed.into_iter().for_each(|(_, part)| values.extend(part));
    Ok(values)
}

//! The same question as in [`crate::copy::overlap`], for copies that come from many lanes.

use super::lane::Piece;
use crate::copy::overlap::{clear_front, written};

/// A place to sort in, kept from batch to batch.
#[derive(Debug, Default)]
pub(super) struct Overlap {
    /// Start, end, and place in the batch.
    spans: Vec<(u64, u64, u32)>,
    /// The same for stretches of neighbours in the batch that each begin behind the end of the one before.
    rises: Vec<(u64, u64, u32)>,
}

/// Stretches that are worth a try.
const MANY: usize = 32;

impl Overlap {
    /// How many copies from the batch's front have nothing in common with each other.
    pub(super) fn first_in_the_way(&mut self, pieces: &[Piece]) -> usize {
        self.spans.clear();
        self.rises.clear();
        let mut end = 0;
        for (at, piece) in pieces.iter().enumerate() {
            let Some((start, len)) = written(&piece.transfer) else { continue };
            let rises = start >= end;
            end = start.saturating_add(len as u64);
            self.spans.push((start, end, at as u32));
            match self.rises.last_mut() {
                Some(rise) if rises => rise.1 = end,
                _ => self.rises.push((start, end, 0)),
            }
        }
        // Each lane mostly writes front to back, and somewhere else than the others: then the few stretches are compared.
        let stretches = self.rises.len();
        if stretches == 1 || stretches <= MANY && clear_front(&mut self.rises, stretches) == stretches {
            return pieces.len();
        }
        clear_front(&mut self.spans, pieces.len())
    }
}

//! By which way a chunk goes: in one copy through the device ring, and by a kernel that spreads or
//! collects its stretches; or by a copy for each stretch, in batches.
//!
//! On an H200, short copies in a batch reach a fifth of the link's speed with 4 KiB each, and all
//! of it with 64 KiB. One copy to the device ring and a kernel that spreads the bytes reach 0.9
//! from 1 KiB on, but some 20 us later, which is more than a few copies take.

use super::chunk::Chunk;
use super::engine::Engine;
use super::types::{Direction, Kind};

/// Stretches of this average length are copied at full speed by themselves.
const LONG: usize = 48 << 10;
/// The copies that take no longer in one batch than a kernel. More of them would prolong the end of
/// a call: submitting takes some microseconds a copy.
const FEW: usize = 8;

/// Whether a chunk goes by the ring. `segment` is the room of its segment, in bytes; a chunk in
/// place has none. (One that finds no free slot may go without all the same.)
pub(super) fn is_by_ring(
    chunk: &Chunk,
    segment: Option<usize>,
    direction: Direction,
    kind: Kind,
    engine: &Engine,
) -> bool {
    // A call of the program that writes bytes from the ring may wait for transfers that need the
    // part of the ring that this worker has.
    let may_hold_up = direction == Direction::Down && kind == Kind::Blocking;
    if may_hold_up || engine.is_slow(direction) {
        return false;
    }
    let stretches = chunk.stretches.iter().map(|each| each.count).sum();
    let is_scattered = stretches > FEW && chunk.data / stretches < LONG;
    let copies = if segment.is_some() { 1 } else { chunk.parts.len() };
    let slot = engine.settings.segment;
    let room = segment.map_or(slot, |segment| segment.min(slot));
    is_scattered && copies < stretches && chunk.table_at() + chunk.table_len() <= room
}

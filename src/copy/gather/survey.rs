//! One look at a call's pieces, before anything is copied: whether they can be, and what decides by which way they go.
//!
//! The link moves 16 KiB in 0.3 us, so what one thread does for each piece before the first copy begins shows in the whole. So
//! this reads what lies in the list itself and nothing that a piece refers to: not its bytes, nor where they are, which for
//! pinned buffers is written elsewhere. That is looked up by who fills the segments, or pushes the copies.

use super::STAGE_BELOW;
use super::plan::Piece;
use super::pushing::MANY;
use crate::copy::queue::CopyQueue;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::pool::Pool;

/// Windows of three pieces that tell whether all are rows.
const SAMPLES: usize = 256;

/// A call's pieces, by number.
pub(super) trait Pieces: Sync {
    fn count(&self) -> usize;
    /// Bytes.
    fn len(&self, i: usize) -> usize;
    fn memory(&self, i: usize) -> &DeviceSlice;
}

impl dyn Pieces + '_ {
    /// As a plan sees it.
    pub(super) fn get(&self, i: usize, in_place: bool) -> Piece {
        let memory = self.memory(i);
        Piece { device: memory.address(), memory: memory.allocation_number(), len: self.len(i), in_place }
    }

    pub(super) fn all(&self, in_place: bool) -> Vec<Piece> {
        (0..self.count()).map(|i| self.get(i, in_place)).collect()
    }

    /// Whether they are mostly rows of rectangles, which the driver copies at full speed from where they are: equally long, and
    /// at even distances on both sides, in the order of the call. `host`: where a piece is there.
    pub(super) fn are_rows(&self, mut host: impl FnMut(usize) -> usize) -> bool {
        let windows = self.count().saturating_sub(2);
        let step = (windows / SAMPLES).max(1);
        let mut even = |i: usize| {
            let [a, b, c] = [i, i + 1, i + 2].map(|i| {
                let piece = self.get(i, true);
                (host(i) as u64, piece.device, piece.len)
            });
            let far = |a: (u64, u64, usize), b: (u64, u64, usize)| {
                (a.0 < b.0 && a.1 < b.1 && a.2 == b.2).then(|| (b.0 - a.0, b.1 - a.1))
            };
            far(a, b).is_some() && far(a, b) == far(b, c)
        };
        let seen = (0..windows).step_by(step).count();
        seen > 0 && (0..windows).step_by(step).filter(|i| even(*i)).count() >= seen - seen / 4
    }
}

/// What pieces have in common.
#[derive(Debug)]
pub(super) struct Survey {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// Of those that are short enough to be staged, pinned or not.
    pub(super) short_bytes: usize,
    pub(super) longest: usize,
    pub(super) shortest: usize,
    /// Whether they come in the order of the device.
    pub(super) in_order: bool,
    /// Pieces that begin on the device where the one before ends, in the same memory.
    neighbours: usize,
}

impl Survey {
    /// Whether they follow each other on the device, or nearly all do, so that few copies remain of them.
    pub(super) fn are_neighbours(&self) -> bool {
        self.in_order && self.neighbours >= self.count / 4 * 3
    }
}

impl CopyQueue {
    /// Looks at the pieces: device memory of this device's, and long enough for them. `check` looks at what else there is to
    /// be refused.
    pub(super) fn survey(
        &self,
        pool: &Pool,
        pieces: &dyn Pieces,
        mut check: impl FnMut(usize) -> Result<()>,
    ) -> Result<Survey> {
        crate::os::check_fork()?;
        let context = self.device().context();
        let wrong = || Error::WrongDevice { device: self.device().name().into() };
        if !pool.serves(context) {
            return Err(wrong());
        }
        if pieces.count() >= MANY {
            self.wake();
        }
        let mut found = Survey {
            count: pieces.count(),
            bytes: 0,
            short_bytes: 0,
            longest: 0,
            shortest: usize::MAX,
            in_order: true,
            neighbours: 0,
        };
        let mut before: Option<(u64, u64, usize)> = None;
        for i in 0..pieces.count() {
            check(i)?;
            let (memory, len) = (pieces.memory(i), pieces.len(i));
            if !memory.is_of(context) {
                return Err(wrong());
            }
            if len > memory.len() {
                return Err(Error::TooSmall { need: len, have: memory.len() });
            }
            let place = (memory.allocation_number(), memory.address());
            if let Some((number, device, bytes)) = before {
                found.in_order &= (number, device) <= place;
                found.neighbours += usize::from((number, device.wrapping_add(bytes as u64)) == place);
            }
            before = Some((place.0, place.1, len));
            found.bytes = found.bytes.saturating_add(len);
            if len < STAGE_BELOW {
                found.short_bytes = found.short_bytes.saturating_add(len);
            }
            (found.longest, found.shortest) = (found.longest.max(len), found.shortest.min(len));
        }
        Ok(found)
    }
}

//! Groups: copies of one call that are pushed, submitted and done together.
//!
//! A copy by itself takes its caller and the queue a lock, a number, a handle, a count on its device memory, a look
//! whether it is done: together as long as the driver takes for it. Of thousands that one call brings nobody asks for
//! one alone. So they go in groups that are as long as a batch is: one entry in a lane, with as many numbers as it has
//! copies (what is outstanding, and which copy failed, is counted as ever), and one place for all of them.
//!
//! ```text
//!   queue of a lane   [ 41 ][ 42 ][ 43 ... 106 ][ 107 ... 170 ]
//!   batches           [ 41 .. 42 ][  43 .. 106  ][  107 .. 170  ]
//! ```
//!
//! A group is in one batch, so its copies must not be in each other's way: [`CopyQueue::group`] cuts a list
//! accordingly. What each copy was lent is lent by itself, goes in flight by its own word, and is settled or
//! quarantined by it, as for any other copy.

use std::sync::Arc;

use super::flow::{ENOUGH, Flow, MOST, MOST_BYTES};
use super::lane::Group;
use super::{CopyQueue, Side, Way, may_wait, overlap};
use crate::device::Transfer;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::stream::awaited::{Place, Range};
use crate::stream::timeline::Resource;

impl CopyQueue {
    fn way(&self, transfer: &Transfer) -> &Way {
        if matches!(transfer, Transfer::Download { .. }) { &self.0.down } else { &self.0.up }
    }

    /// How many copies from the front of a list, all of one direction, make a group: 1 at least, unless there are none.
    pub(in crate::copy) fn group(&self, transfers: &[Transfer]) -> usize {
        let Some(first) = transfers.first() else { return 0 };
        let depth = self.way(first).0[0].flow.depth();
        let most = MOST.min(usize::try_from(depth).unwrap_or(MOST)).max(1);
        // As a batch is cut.
        let (mut count, mut bytes) = (0, 0_usize);
        for transfer in transfers.iter().take(most) {
            if bytes >= MOST_BYTES || count >= ENOUGH.0 && bytes >= ENOUGH.1 {
                break;
            }
            bytes = bytes.saturating_add(transfer.len());
            count += 1;
        }
        overlap::first_in_the_way(&transfers[..count], &mut Vec::new()).max(1)
    }

    /// The queue's threads are to be awake, since many copies are about to be pushed. Waking one takes as long as a
    /// look at thousands of pieces.
    pub(in crate::copy) fn wake(&self) {
        self.0.up.0.iter().for_each(|side| side.flow.wake());
    }

    /// Pushes what [`group`](Self::group) says is one, or so many from its front as there is room for, where others
    /// keep the lane full: the rest is for the next call. `memories` are the allocations that it is in, at the queue's
    /// device. `turn`: which of the queue's threads submits it, and it alone; or none, and it goes as a copy by itself
    /// would. `lend` is called, with how many copies are pushed, when nothing can be refused any more.
    pub(in crate::copy) fn push_group(
        &self,
        transfers: &[Transfer],
        memories: Vec<DeviceSlice>,
        turn: Option<usize>,
        lend: impl FnOnce(usize) -> Vec<Resource>,
    ) -> Result<(Place, usize)> {
        let Some(first) = transfers.first() else { return Err(Error::Empty) };
        let (way, longest) = (self.way(first), transfers.iter().map(Transfer::len).max().unwrap_or(0));
        let side = match turn {
            Some(turn) => {
                let sides = way.of(longest);
                &sides[turn % sides.len()]
            }
            None => way.side(longest, transfers.len()),
        };
        let timeline = side.flow.timeline();
        crate::os::check_fork()?;
        timeline.context().alive()?;
        memories.iter().try_for_each(|memory| memory.admit(timeline.stream()))?;
        side.push_group(transfers, memories, turn.is_some(), lend)
    }
}

impl Side {
    fn push_group(
        &self,
        transfers: &[Transfer],
        memories: Vec<DeviceSlice>,
        more: bool,
        lend: impl FnOnce(usize) -> Vec<Resource>,
    ) -> Result<(Place, usize)> {
        let line = self.line();
        let (lane, flow): (_, &Arc<Flow>) = (line.lane(), &line.flow);
        let memories = memories.into_iter().map(DeviceSlice::into_allocation).collect();
        let (mut least, mut rest) = (transfers.len() as u64, transfers.to_vec());
        let mut entry = loop {
            let error = match lane.enter(flow.depth()) {
                Ok(entry) if entry.room() >= least => break entry,
                // Unlocked, whatever comes next.
                Ok(_) => Error::QueueFull { depth: usize::try_from(flow.depth()).unwrap_or(usize::MAX) },
                Err(error) => error,
            };
            if !(matches!(error, Error::QueueFull { .. }) && may_wait()) {
                return Err(error);
            }
            // Whether one of those failed is its own handle's affair.
            flow.wait(lane, &Range::whole(lane.room_after(flow.depth(), least)), None)?;
            // Others who need less may have taken some of it meanwhile, and would for ever: what there is has to do.
            least = 1;
        };
        let count = rest.len().min(usize::try_from(entry.room()).unwrap_or(usize::MAX));
        rest.truncate(count);
        let group = Group { transfers: rest, resource: lend(count), memories };
        let range = entry.push_group(flow.filled(), line.lane, group).ok_or(Error::Empty)?;
        drop(entry);
        if more {
            flow.urge()
        } else {
            flow.rouse()
        }
        // Its handle leaves by itself, whatever was lent.
        Ok((Place { line: line.clone(), range, quiet: true }, count))
    }
}

//! Which copies of a batch are in each other's way: those that write to the same device memory.
//!
//! The driver copies the parts of a batch in any order, or at once, so two that write the same bytes must not share one.
//! Asking for each pair would take longer than the copies; sorted by where they start, neighbours are enough.

use crate::device::{DevicePtr, Transfer};

/// How many copies from a list's front write to nothing that another of them writes to.
pub(super) fn first_in_the_way(transfers: &[Transfer], spans: &mut Vec<(u64, u64, u32)>) -> usize {
    let mut end = 0;
    let rises = transfers.iter().filter_map(written).all(|(start, len)| {
        let behind = start >= end;
        end = start.saturating_add(len as u64);
        behind
    });
    if rises {
        return transfers.len();
    }
    spans.clear();
    spans.extend(transfers.iter().enumerate().filter_map(|(at, transfer)| {
        let (start, len) = written(transfer)?;
        Some((start, start.saturating_add(len as u64), at as u32))
    }));
    clear_front(spans, transfers.len())
}

/// Where on the device a copy writes, and how much.
fn written(transfer: &Transfer) -> Option<(u64, usize)> {
    match *transfer {
        Transfer::Upload { dst: DevicePtr(start), len, .. }
        | Transfer::OnDevice { dst: DevicePtr(start), len, .. } => Some((start, len)),
        _ => None,
    }
}

/// The same for spans, of which each is some copy's out of `count`: start, end, and place in the list.
fn clear_front(spans: &mut Vec<(u64, u64, u32)>, count: usize) -> usize {
    spans.sort_unstable();
    let mut keep = count;
    loop {
        let mut shorter = keep;
        // The span that reaches furthest so far.
        let mut reach = (0, 0);
        for &(start, end, at) in spans.iter() {
            if start < reach.0 {
                shorter = shorter.min(at.max(reach.1) as usize);
            }
            if end > reach.0 {
                reach = (end, at);
            }
        }
        if shorter == keep {
            return keep;
        }
        // Without those, others may reach furthest, and be in the way of one that is left.
        keep = shorter;
        spans.retain(|&(_, _, at)| (at as usize) < keep);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::clear_front;

    fn naive(spans: &[(u64, u64, u32)]) -> usize {
        let meet = |a: &(u64, u64, u32), b: &(u64, u64, u32)| a.0 < b.1 && b.0 < a.1;
        (0..spans.len())
            .find(|&i| spans[..i].iter().any(|other| meet(other, &spans[i])))
            .unwrap_or(spans.len())
    }

    proptest! {
        /// As many as looking at every pair finds.
        #[test]
        fn finds_what_pairs_find(ranges in prop::collection::vec((0_u64..200, 1_u64..40), 0..24)) {
            let spans: Vec<_> =
                ranges.iter().enumerate().map(|(at, &(start, len))| (start, start + len, at as u32)).collect();
            prop_assert_eq!(clear_front(&mut spans.clone(), spans.len()), naive(&spans));
        }
    }

    #[test]
    fn neighbours_are_no_overlap_and_equals_are() {
        assert_eq!(clear_front(&mut vec![(10, 20, 0), (0, 10, 1), (20, 21, 2)], 3), 3);
        assert_eq!(clear_front(&mut vec![(0, 4, 0), (0, 4, 1), (0, 4, 2)], 3), 1);
        // One that reaches over all others hides what they have in common.
        assert_eq!(clear_front(&mut vec![(10, 12, 0), (11, 13, 1), (0, 100, 2)], 3), 1);
    }
}

//! Which copies of a batch are in each other's way: those that write to the same device memory.
//!
//! The driver copies the parts of a batch in any order, or at once, so two that write the same bytes must not share one.

use std::collections::BTreeMap;

use crate::device::{DevicePtr, Transfer};

/// How many copies from a list's front write to nothing that another of them writes to.
pub(super) fn first_in_the_way(transfers: &[Transfer]) -> usize {
    let mut end = 0;
    let rises = transfers.iter().filter_map(written).all(|(start, len)| {
        let behind = start >= end;
        end = start.saturating_add(len as u64);
        behind
    });
    if rises {
        return transfers.len();
    }
    // Where each starts and ends. No two of them meet, so the last one that starts before an end reaches furthest.
    let mut before: BTreeMap<u64, u64> = BTreeMap::new();
    let meets = |transfer: &Transfer| {
        let Some((start, len)) = written(transfer) else { return false };
        let end = start.saturating_add(len as u64);
        let last = before.range(..end).next_back();
        let meets = last.is_some_and(|(_, reach)| *reach > start);
        before.insert(start, end);
        meets
    };
    transfers.iter().position(meets).unwrap_or(transfers.len())
}

/// Where on the device a copy writes, and how much.
fn written(transfer: &Transfer) -> Option<(u64, usize)> {
    match *transfer {
        Transfer::Upload { dst: DevicePtr(start), len, .. }
        | Transfer::OnDevice { dst: DevicePtr(start), len, .. } => Some((start, len)),
        _ => None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(spans: &[(u64, usize)]) -> usize {
        let src = std::ptr::null();
        let upload = |&(start, len): &(u64, usize)| Transfer::Upload { src, dst: DevicePtr(start), len };
        first_in_the_way(&spans.iter().map(upload).collect::<Vec<_>>())
    }

    fn naive(spans: &[(u64, usize)]) -> usize {
        let meet = |a: &(u64, usize), b: &(u64, usize)| a.0 < b.0 + b.1 as u64 && b.0 < a.0 + a.1 as u64;
        (0..spans.len())
            .find(|&i| spans[..i].iter().any(|other| meet(other, &spans[i])))
            .unwrap_or(spans.len())
    }

    proptest! {
        /// As many as looking at every pair finds.
        #[test]
        fn finds_what_pairs_find(spans in prop::collection::vec((0_u64..200, 1_usize..40), 0..24)) {
            prop_assert_eq!(found(&spans), naive(&spans));
        }
    }

    #[test]
    fn neighbours_are_no_overlap_and_equals_are() {
        assert_eq!(found(&[(10, 10), (0, 10), (20, 1)]), 3);
        assert_eq!(found(&[(0, 4), (0, 4), (0, 4)]), 1);
        // One that reaches over all others hides what they have in common.
        assert_eq!(found(&[(10, 2), (11, 2), (0, 100)]), 1);
    }
}

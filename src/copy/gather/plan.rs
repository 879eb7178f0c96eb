//! How many small pieces become few large copies: arithmetic only, which touches no memory and knows no device.
//!
//! Each piece is a range of device memory and as many bytes on the host, in place (pinned, where a device can reach them) or
//! not. What is not in place is *staged*: copied by the CPU to or from a segment. Pieces that lie next to each other on the
//! device lie next to each other in the segment as well, so that one copy moves them all; this is also the reason to stage
//! pieces that are in place, if they are small, since a copy costs more than moving so few bytes.
//!
//! ```text
//!   pieces on the device   [a][b]....[c]..[d...]       a, b, c staged, d in place
//!   a segment              [a][b]-[c]
//!   copies                 a+b, c, d
//! ```
//!
//! A plan for thousands of pieces takes as long as a good part of the copies. So it can be made in *groups*: neighbours in the
//! order of the device that fill a segment, each planned by whoever packs it, while the segments before are on the wire.

/// Where a stretch of a segment begins that is no neighbour of the one before.
const ALIGN: usize = 64;

/// One piece, as the plan sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it starts on the device.
    pub device: u64,
    /// Which allocation that is in, by any number: no copy goes from one into another.
    pub memory: u64,
    /// Bytes. A piece of none is left out.
    pub len: usize,
    /// Whether a device can reach its bytes on the host where they are.
    pub in_place: bool,
}

/// What a plan has to keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a segment at most. (0 counts as 1.)
    pub segment: usize,
    /// Pieces in place that are shorter are staged, if they have a neighbour that is.
    pub stage_below: usize,
}

/// The CPU's part: `len` bytes of a piece, from `from` on, belong at `at` in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Which piece.
    pub piece: usize,
    /// Offset in the piece.
    pub from: usize,
    /// Offset in the segment.
    pub at: usize,
    /// Bytes.
    pub len: usize,
}

/// The device's part: `len` bytes between offset `at` of a segment, or of a piece in place, and `device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// A piece whose device memory this lies in, from its start on.
    pub piece: usize,
    /// Offset in the segment; 0 for a piece in place.
    pub at: usize,
    /// Where on the device.
    pub device: u64,
    /// Bytes.
    pub len: usize,
}

/// A segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Bytes.
    pub len: usize,
    /// In the order of their offsets in the segment.
    pub moves: Vec<Move>,
    /// The same.
    pub copies: Vec<Copy>,
}

/// What is to be done: each byte of each piece is in one copy, and if it is staged in one move.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In the order in which they are to be used.
    pub segments: Vec<Segment>,
    /// Pieces that are copied from or to where they are, whole.
    pub in_place: Vec<Copy>,
}

/// The pieces that have bytes, by place on the device. Stable, so that a plan does not depend on anything but its input.
#[must_use]
pub fn order(pieces: &[Piece]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pieces.len()).filter(|&i| pieces[i].len > 0).collect();
    let place = |i: usize| (pieces[i].memory, pieces[i].device);
    // Most are in order already.
    if !order.is_sorted_by_key(|&i| place(i)) {
        order.sort_by_key(|&i| place(i));
    }
    order
}

/// Whether most pieces of an order begin where the one before ends.
pub(super) fn are_neighbours(pieces: &[Piece], order: &[usize]) -> bool {
    let meet = |pair: &&[usize]| {
        let (a, b) = (&pieces[pair[0]], &pieces[pair[1]]);
        a.memory == b.memory && a.device.checked_add(a.len as u64) == Some(b.device)
    };
    order.windows(2).filter(meet).count() >= order.len() / 4 * 3
}

/// The next group of an order: the pieces from its front that fit into a segment of so many bytes whatever the gaps, or one
/// that is longer. Gives those that have bytes, with their names, and how many of the order that is in all.
#[must_use]
pub fn group(order: impl Iterator<Item = (usize, Piece)>, segment: usize) -> (Vec<(usize, Piece)>, usize) {
    let (mut group, mut filled, mut count) = (Vec::new(), 0_usize, 0);
    for (name, piece) in order {
        if piece.len > 0 {
            let room = piece.len.saturating_add(ALIGN - 1);
            if !group.is_empty() && filled.saturating_add(room) > segment {
                break;
            }
            filled = filled.saturating_add(room);
            group.push((name, piece));
        }
        count += 1;
    }
    (group, count)
}

impl Plan {
    /// Plans for these pieces. Their device memory may overlap; then nobody knows who wins. One that would leave the
    /// address space is cut off there.
    #[must_use]
    pub fn new(pieces: &[Piece], limits: Limits) -> Self {
        Self::of(pieces, &order(pieces), limits)
    }

    /// Plans for some of these pieces, named in the order that [`order`] gives.
    #[must_use]
    pub fn of(pieces: &[Piece], order: &[usize], limits: Limits) -> Self {
        let mut plan = Self::default();
        let end = |piece: &Piece| piece.device.checked_add(piece.len as u64);
        let small = |piece: &Piece| !piece.in_place || piece.len < limits.stage_below;
        let meet = |a: usize, b: usize| {
            let (a, b) = (&pieces[a], &pieces[b]);
            small(a) && small(b) && a.memory == b.memory && end(a) == Some(b.device)
        };
        for (n, &i) in order.iter().enumerate() {
            let before = n > 0 && meet(order[n - 1], i);
            let after = order.get(n + 1).is_some_and(|&next| meet(i, next));
            if pieces[i].in_place && !(before || after) {
                let Piece { device, len, .. } = pieces[i];
                plan.in_place.push(Copy { piece: i, at: 0, device, len });
            } else {
                plan.stage(i, pieces, limits.segment.max(1));
            }
        }
        plan
    }

    /// Appends a piece to the segments.
    fn stage(&mut self, index: usize, pieces: &[Piece], most: usize) {
        let piece = &pieces[index];
        let mut from = 0;
        while from < piece.len {
            let Some(device) = piece.device.checked_add(from as u64) else { return };
            let next = |copy: &Copy| {
                pieces[copy.piece].memory == piece.memory
                    && copy.device.checked_add(copy.len as u64) == Some(device)
            };
            let goes_on = |segment: &Segment| segment.copies.last().is_some_and(next);
            let room = self.segments.last().and_then(|segment| {
                let at = if goes_on(segment) {
                    segment.len
                } else {
                    segment.len.checked_next_multiple_of(ALIGN)?
                };
                (at < most).then_some(at)
            });
            let at = room.unwrap_or_else(|| {
                self.segments.push(Segment::default());
                0
            });
            let Some(segment) = self.segments.last_mut() else { return };
            let len = (piece.len - from).min(most - at);
            match segment.copies.last_mut() {
                Some(copy) if at == segment.len && next(copy) => {
                    copy.len += len;
                }
                _ => segment.copies.push(Copy { piece: index, at, device, len }),
            }
            segment.moves.push(Move { piece: index, from, at, len });
            segment.len = at + len;
            from += len;
        }
    }

    /// Copies that the device makes.
    #[must_use]
    pub fn copies(&self) -> usize {
        self.in_place.len() + self.segments.iter().map(|segment| segment.copies.len()).sum::<usize>()
    }

    /// Whether the plan does what it is to do for these pieces: for tests.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self, pieces: &[Piece], limits: Limits) -> Result<(), String> {
        // Of each piece: offset, bytes, and where on the device a copy puts them.
        let mut covered: Vec<Vec<(usize, usize)>> = vec![Vec::new(); pieces.len()];
        for copy in &self.in_place {
            let Piece { device, len, in_place, .. } = pieces[copy.piece];
            if !in_place || (copy.device, copy.len, copy.at) != (device, len, 0) {
                return Err(format!("{copy:?} is not the piece {:?}", pieces[copy.piece]));
            }
            covered[copy.piece].push((0, len));
        }
        for segment in &self.segments {
            if segment.len > limits.segment.max(1) || segment.len == 0 {
                return Err(format!("a segment of {} bytes", segment.len));
            }
            let mut copies = segment.copies.iter().copied();
            let mut copy = copies.next().ok_or("a segment without copies")?;
            let mut reached = 0;
            let mut copied = 0;
            for step in &segment.moves {
                if step.at < reached || step.len == 0 || step.at + step.len > segment.len {
                    return Err(format!("{step:?} overlaps another or leaves its segment"));
                }
                reached = step.at + step.len;
                if copied == copy.len {
                    copy = copies.next().ok_or_else(|| format!("{step:?} is in no copy"))?;
                    copied = 0;
                }
                let piece = pieces[step.piece];
                if copy.at + copied != step.at || copied + step.len > copy.len {
                    return Err(format!("{step:?} is not where {copy:?} has it"));
                }
                if pieces[copy.piece].memory != piece.memory
                    || copy.device + copied as u64 != piece.device + step.from as u64
                {
                    return Err(format!("{copy:?} puts {step:?} elsewhere"));
                }
                copied += step.len;
                covered[step.piece].push((step.from, step.len));
            }
            if reached != segment.len || copied != copy.len || copies.next().is_some() {
                return Err("a segment's copies are not its moves".into());
            }
        }
        for (piece, parts) in pieces.iter().zip(&mut covered) {
            parts.sort_unstable();
            let end = parts.iter().try_fold(0, |end, (from, len)| (*from == end).then_some(end + len));
            if end != Some(piece.len) {
                return Err(format!("{piece:?} is covered by {parts:?}"));
            }
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::{Limits, Piece, Plan, group, order};

    fn piece(device: u64, len: usize, in_place: bool) -> Piece {
        Piece { device, memory: device / 10_100, len, in_place }
    }

    proptest! {
        /// Each byte is copied once, to its place, whatever the pieces.
        #[test]
        fn plans_cover_each_byte_once(
            pieces in prop::collection::vec((0_u64..3000, 0_usize..300, any::<bool>()), 0..40),
            rows in prop::collection::vec((1_usize..200, any::<bool>()), 0..40),
            segment in 1_usize..2000,
            stage_below in 0_usize..300,
        ) {
            let mut all: Vec<Piece> = pieces.into_iter().map(|(d, l, i)| piece(d, l, i)).collect();
            // Neighbours, which chance hardly makes.
            let mut at = 10_000;
            for (len, in_place) in rows {
                all.push(piece(at, len, in_place));
                at += len as u64;
            }
            let limits = Limits { segment, stage_below };
            let plan = Plan::new(&all, limits);
            prop_assert_eq!(plan.check(&all, limits), Ok(()));
            // And group by group, each of which fits, whatever the lengths of segments.
            let (order, mut whole, mut next, mut most) = (order(&all), Plan::default(), 0, segment / 4 + 1);
            while next < order.len() {
                let (group, count) = group(order[next..].iter().map(|&i| (i, all[i])), most);
                prop_assert!(!group.is_empty() && group.len() == count, "of pieces that have bytes");
                let part = Plan::of(&all, &order[next..next + count], Limits { segment: most, stage_below });
                prop_assert!(part.segments.len() <= 1 || count == 1, "{:?}", group);
                whole.segments.extend(part.segments);
                whole.in_place.extend(part.in_place);
                next += count;
                most = (most * 2).min(segment);
            }
            prop_assert_eq!(whole.check(&all, limits), Ok(()));
        }
    }

    #[test]
    fn neighbours_are_one_copy_and_large_pieces_stay_in_place() {
        let limits = Limits { segment: 4096, stage_below: 100 };
        let row: Vec<Piece> = (0..20).map(|i| piece(1000 + i * 50, 50, true)).collect();
        let plan = Plan::new(&row, limits);
        assert_eq!((plan.segments.len(), plan.copies()), (1, 1));
        // Alone, or large: where they are.
        let apart = [piece(0, 50, true), piece(60, 50, true), piece(110, 2000, true)];
        let plan = Plan::new(&apart, limits);
        assert_eq!((plan.segments.len(), plan.in_place.len()), (0, 3));
        // Not in place: staged in any case, through as many segments as it takes.
        let long = [piece(0, 10_000, false)];
        let plan = Plan::new(&long, limits);
        assert_eq!((plan.segments.len(), plan.copies()), (3, 3));
        plan.check(&long, limits).unwrap();
    }

    #[test]
    fn a_wrong_plan_is_told() {
        let pieces = [piece(0, 100, false), piece(100, 100, false)];
        let limits = Limits { segment: 4096, stage_below: 0 };
        let plan = Plan::new(&pieces, limits);
        plan.check(&pieces, limits).unwrap();
        let mut wrong = plan.clone();
        wrong.segments[0].copies[0].device += 1;
        assert!(wrong.check(&pieces, limits).is_err());
        let mut wrong = plan.clone();
        wrong.segments[0].moves.pop();
        assert!(wrong.check(&pieces, limits).is_err());
        let mut wrong = plan;
        wrong.segments.clear();
        assert!(wrong.check(&pieces, limits).is_err());
    }
}

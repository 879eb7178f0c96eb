//! The plan of a gather: any pieces, any limits.
//!
//! Each byte of each piece must be moved and copied once, to its own place ([`Plan::check`] looks at every byte),
//! within segments that keep to the limit, also if the plan is made group by group. And staged neighbours must share a
//! copy.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pinpool::gather::plan::{Limits, Piece, Plan, group, order};

#[derive(Arbitrary, Debug)]
struct One {
    /// Random places are rarely neighbours, so the input may ask for the neighbour of the piece before.
    follows: bool,
    gap: u16,
    memory: u8,
    len: u16,
    in_place: bool,
}

#[derive(Arbitrary, Debug)]
struct Input {
    start: u64,
    pieces: Vec<One>,
    segment: u16,
    stage_below: u16,
}

fuzz_target!(|input: Input| {
    let Input { start, pieces, segment, stage_below } = input;
    // Real device memory ends far below the end of the address space.
    let mut at = start % (1 << 57);
    let mut memory = 0;
    let pieces: Vec<Piece> = pieces
        .into_iter()
        .take(512)
        .map(|One { follows, gap, memory: of, len, in_place }| {
            if !follows {
                at += u64::from(gap);
                memory = u64::from(of % 4);
            }
            let piece = Piece { device: at, memory, len: usize::from(len), in_place };
            at += u64::from(len);
            piece
        })
        .collect();
    let limits = Limits { segment: usize::from(segment), stage_below: usize::from(stage_below) };
    let plan = Plan::new(&pieces, limits);
    if let Err(wrong) = plan.check(&pieces, limits) {
        panic!("{wrong}\n{pieces:?}\n{limits:?}\n{plan:?}");
    }
    let (order, mut whole) = (order(&pieces), Plan::default());
    let mut left = &order[..];
    while !left.is_empty() {
        let (group, count) = group(left.iter().map(|&i| (i, pieces[i])), limits.segment);
        assert!(count > 0, "nothing of {left:?}");
        let names: Vec<usize> = group.iter().map(|(i, _)| *i).collect();
        let part = Plan::of(&pieces, &names, limits);
        assert!(part.segments.len() <= 1 || group.len() == 1, "{group:?} is more than a segment");
        whole.segments.extend(part.segments);
        whole.in_place.extend(part.in_place);
        left = &left[count..];
    }
    if let Err(wrong) = whole.check(&pieces, limits) {
        panic!("in groups: {wrong}\n{pieces:?}\n{limits:?}\n{whole:?}");
    }
    // At most one copy for each filled piece, and one for each cut at the end of a segment.
    let filled = pieces.iter().filter(|piece| piece.len > 0).count();
    assert!(plan.copies() <= filled + plan.segments.len(), "{} copies of {filled} pieces", plan.copies());
});

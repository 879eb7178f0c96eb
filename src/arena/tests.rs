//! Tests of the arena, many of them property tests. The arena only does arithmetic on addresses, so no memory is
//! mapped.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

/// The address of a page. No thread accesses the memory there: the arena only does arithmetic on it.
fn base(page: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::without_provenance_mut(page * PAGE)).unwrap()
}

fn arena(extents: &[usize]) -> Arena {
    let mut arena = Arena::new();
    let mut page = 1 << 20;
    for (i, &pages) in extents.iter().enumerate() {
        // SAFETY: nothing dereferences the memory in these tests.
        unsafe { arena.add_extent(RegionId(i as u64), base(page), pages * PAGE, true) };
        page += pages; // The next extent follows at once, so that a test would see runs joined across the edge.
    }
    arena
}

fn take(arena: &mut Arena, len: usize, align: usize) -> Option<NonNull<Descriptor>> {
    let descriptor = arena.take(Placement::of(len, align).unwrap())?;
    Some(descriptor)
}

fn give(arena: &mut Arena, descriptor: NonNull<Descriptor>) {
    // SAFETY: each test returns each descriptor once.
    unsafe { arena.give(descriptor) };
}

#[test]
fn memory_can_serve_any_class() {
    let mut arena = arena(&[1024]);
    let all = arena.bytes().free;
    for len in [100, 5000, 70_000, 1 << 20, 3 << 20] {
        let mut held = Vec::new();
        while let Some(descriptor) = take(&mut arena, len, 64) {
            held.push(descriptor);
        }
        let used = held.len() * Class::of(len).unwrap().stride();
        assert!(used > all * 3 / 4, "{len}: {used} of {all}");
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
        for descriptor in held {
            give(&mut arena, descriptor);
        }
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
        arena.release_idle();
        assert_eq!(
            arena.bytes(),
            ArenaBytes { total: all, free: all, largest_free: all, ..Default::default() }
        );
    }
}

#[test]
fn an_aligned_segment_gives_its_tail_away() {
    let mut arena = arena(&[64]);
    let head = take(&mut arena, 4096, 4096).unwrap();
    let small = take(&mut arena, 3800, 64).unwrap();
    // SAFETY: both are out, so alive.
    let (h, s) = unsafe { (head.as_ref(), small.as_ref()) };
    assert_eq!(h.base().as_ptr().addr() % 4096, 0);
    assert_eq!(h.run(), s.run(), "the small segment lies in the aligned one's last page");
    give(&mut arena, head);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    assert_eq!(arena.bytes().free, 63 * PAGE);
    give(&mut arena, small);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    assert_eq!(arena.bytes().free, 64 * PAGE);
}

#[test]
fn a_run_gives_up_what_lies_behind_its_last_segment() {
    let mut arena = arena(&[64]);
    let held: Vec<_> = (0..3).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
    assert!(arena.bytes().largest_free < 16 * PAGE);
    give(&mut arena, held[1]);
    assert!(arena.shorten_runs());
    assert_eq!(arena.bytes().largest_free, 60 * PAGE, "three segments need four pages");
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    assert!(!arena.shorten_runs(), "nothing more to free");
    // The free segment before the last used one is still there, and the run is dissolved like any other.
    assert_eq!(take(&mut arena, 5000, 64), Some(held[1]));
    for descriptor in held {
        give(&mut arena, descriptor);
    }
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    arena.release_idle();
    assert_eq!(arena.bytes().largest_free, 64 * PAGE);
}

#[test]
fn tables_stay_below_one_percent() {
    for len in [4096, 5000, 6000, 10_000, 65_536, 1 << 20] {
        let mut arena = arena(&[(64 << 20) / PAGE]);
        while take(&mut arena, len, 64).is_some() {}
        let share = arena.table_bytes() as f64 / arena.bytes().total as f64;
        println!("tables for segments of {len}: {:.3}%", share * 100.0);
        assert!(share < 0.01, "{len}: {share}");
    }
}

#[test]
fn no_run_crosses_an_extents_edge() {
    let mut arena = arena(&[16, 16]);
    assert!(take(&mut arena, 17 * PAGE, 4096).is_none());
    assert!(take(&mut arena, 15 * PAGE, 4096).is_some());
    assert!(take(&mut arena, 15 * PAGE, 4096).is_some());
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

#[test]
fn a_region_goes_only_when_nothing_of_it_is_used() {
    let mut arena = arena(&[16, 16]);
    let descriptor = take(&mut arena, 10 * PAGE, 4096).unwrap();
    assert!(arena.retire(RegionId(0)).is_none());
    assert_eq!(arena.retire(RegionId(1)).unwrap().len(), 1);
    give(&mut arena, descriptor);
    assert_eq!(arena.retire(RegionId(0)).unwrap(), vec![(base(1 << 20), 16 * PAGE, true)]);
    assert!(arena.retire(RegionId(0)).is_none(), "it was removed already");
    assert_eq!(arena.bytes(), ArenaBytes::default());
}

#[test]
fn what_could_be_gathered_is_known() {
    let mut arena = arena(&[64]);
    let large = take(&mut arena, 30 * PAGE - 32, 4096).unwrap();
    let small: Vec<_> = (0..3).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
    let class = Class::of(5000).unwrap();
    let cached = |n: usize| move |c: Class| if c == class { n } else { 0 };
    let pages = |n: usize| Placement::of(n * PAGE - 32, 4096).unwrap();
    assert!(arena.could_reclaim(pages(34), cached(3)), "34 pages lie behind the large segment");
    assert!(!arena.could_reclaim(pages(35), cached(3)), "the large segment is in the way");
    assert!(arena.could_reclaim(pages(32), cached(2)), "the third small segment may be the first of its run");
    assert!(!arena.could_reclaim(pages(33), cached(2)), "and then needs two pages");
    assert!(arena.could_reclaim(Placement::Class(class), cached(1)));
    small.into_iter().chain([large]).for_each(|descriptor| give(&mut arena, descriptor));
}

#[test]
fn what_can_be_served_is_known() {
    let mut arena = arena(&[64]);
    let stuck = take(&mut arena, 4 * PAGE, 4096).unwrap();
    let quarantined = |s: &Descriptor| s.word().state() == state::QUARANTINED;
    let whole = Placement::of(64 * PAGE - 32, 4096).unwrap();
    assert!(arena.could_serve(whole, 1, Some(&quarantined)));
    // SAFETY: out, so alive.
    unsafe { stuck.as_ref() }.set(state::QUARANTINED);
    assert!(!arena.could_serve(whole, 1, Some(&quarantined)));
    assert!(arena.could_serve(Placement::of(59 * PAGE - 32, 4096).unwrap(), 1, Some(&quarantined)));
    assert!(!arena.could_serve(Placement::of(60 * PAGE - 32, 4096).unwrap(), 1, Some(&quarantined)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Where `could_reclaim` says `false`, returning the cached segments does not help the request.
    #[test]
    fn what_could_be_gathered_is_never_denied(
        extents in prop::collection::vec(1usize..200, 1..4),
        steps in prop::collection::vec((0u8..10, 1usize..1_000_000, any::<prop::sample::Index>()), 1..100),
        want in 1usize..3_000_000,
        cached in any::<u64>(),
    ) {
        let mut arena = arena(&extents);
        let mut held = Vec::new();
        for (what, len, pick) in steps {
            let len = (len >> (len % 16)).max(1);
            let align = if what == 0 { 4096 } else { 64 };
            if what < 8 || held.is_empty() {
                held.extend(take(&mut arena, len, align));
            } else {
                give(&mut arena, held.swap_remove(pick.index(held.len())));
            }
        }
        let placement = Placement::of((want >> (want % 16)).max(1), 64).unwrap();
        let take_any = |arena: &mut Arena| {
            let descriptor = arena.take(placement);
            let descriptor = descriptor.or_else(|| { arena.release_idle(); arena.take(placement) });
            descriptor.or_else(|| { arena.shorten_runs(); arena.take(placement) })
        };
        // SAFETY: out, so alive.
        let class = |descriptor: &NonNull<Descriptor>| unsafe { descriptor.as_ref() }.class();
        if take_any(&mut arena).is_none() {
            let back = |i: usize, descriptor| cached >> (i % 64) & 1 == 1 && class(descriptor).is_some();
            let back: Vec<_> = held.iter().enumerate().filter(|(i, s)| back(*i, s)).map(|(_, s)| *s).collect();
            let count = |c: Class| back.iter().filter(|s| class(s) == Some(c)).count();
            let possible = arena.could_reclaim(placement, count);
            back.iter().for_each(|descriptor| give(&mut arena, *descriptor));
            prop_assert!(possible || take_any(&mut arena).is_none());
        }
    }

    #[test]
    fn any_order_of_takes_and_gives_keeps_the_invariants(
        extents in prop::collection::vec(1usize..300, 1..4),
        steps in prop::collection::vec((0u8..11, 1usize..3_000_000, 0u32..22, any::<prop::sample::Index>()), 1..120),
    ) {
        let mut arena = arena(&extents);
        let mut held: Vec<(NonNull<Descriptor>, usize)> = Vec::new();
        for (what, len, shift, pick) in steps {
            // Lengths over all magnitudes, alignments mostly small.
            let len = (len >> (len % 16)).max(1);
            let align = if what < 5 { 64 } else { 1 << shift };
            match what {
                0..=6 => {
                    if let Some(descriptor) = take(&mut arena, len, align) {
                        // SAFETY: just taken, so alive.
                        let (base, bytes) = unsafe { (descriptor.as_ref().base(), arena.granted(descriptor)) };
                        let start = base.as_ptr().addr();
                        prop_assert!(start % align == 0 && bytes >= len.next_multiple_of(32) + 32);
                        for &(other, n) in &held {
                            // SAFETY: out, so alive.
                            let o = unsafe { other.as_ref() }.base().as_ptr().addr();
                            prop_assert!(start + bytes <= o || o + n <= start);
                        }
                        held.push((descriptor, bytes));
                    }
                }
                7 => { arena.release_idle(); }
                8 => { arena.shorten_runs(); }
                _ if !held.is_empty() => {
                    let (descriptor, _) = held.swap_remove(pick.index(held.len()));
                    give(&mut arena, descriptor);
                }
                _ => {}
            }
            let out: usize = held.iter().map(|h| h.1).sum();
            let b = arena.bytes();
            prop_assert_eq!(b.free + b.cut + out, b.total);
            if let Err(e) = arena.check(&HashSet::new(), |_, _, _| {}) {
                return Err(TestCaseError::fail(e));
            }
        }
        for (descriptor, _) in held.drain(..) {
            give(&mut arena, descriptor);
        }
        arena.release_idle();
        prop_assert_eq!(arena.bytes().free, arena.bytes().total);
        prop_assert_eq!(arena.runs.len(), 0);
        arena.check(&HashSet::new(), |_, _, _| {}).map_err(TestCaseError::fail)?;
    }
}

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
    let _ = unsafe { arena.give(descriptor) };
}

fn quarantine(arena: &mut Arena, descriptor: NonNull<Descriptor>) -> Option<WindowId> {
    // SAFETY: out, so alive, and the test does not return it.
    unsafe {
        descriptor.as_ref().set(state::QUARANTINED);
        arena.quarantine(descriptor)
    }
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

/// A class with one buffer at a time has its run again, and large segments of other classes find the rest in one piece.
#[test]
fn of_idle_runs_with_one_segment_one_is_kept() {
    let mut arena = arena(&[1024]);
    let lens = [1 << 20, 300 << 10, 2 << 20, 400 << 10];
    let held = lens.map(|len| take(&mut arena, len, 64).unwrap());
    held.into_iter().for_each(|descriptor| give(&mut arena, descriptor));
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    let kept =
        arena.idle.iter().map(|number| arena.runs[*number as usize].class.unwrap()).collect::<Vec<_>>();
    assert_eq!(kept, [Class::of(400 << 10).unwrap()]);
    let pages: u32 = arena.free.iter().map(|(pages, ..)| *pages).sum();
    assert_eq!(pages + kept[0].shape().pages, 1024);
    // The one that is kept serves its class, and is not lost when another class's takes its place.
    for len in [400 << 10, 1 << 20, 1 << 20, 100, 300 << 10] {
        let descriptor = take(&mut arena, len, 64).unwrap();
        give(&mut arena, descriptor);
        assert!(arena.idle.len() <= 2, "{:?}", arena.idle);
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    }
    arena.release_idle();
    assert_eq!(arena.bytes().largest_free, 1024 * PAGE);
}

/// A class keeps the run that became idle last, unless it has another run to take from, or memory is kept for no class.
#[test]
fn idle_runs_are_kept_for_their_class_or_dissolved() {
    let mut arena = arena(&[1024]);
    let held = [(); 2].map(|()| take(&mut arena, 5000, 64).unwrap());
    assert_eq!(arena.runs.len(), 2);
    give(&mut arena, held[0]);
    assert_eq!((arena.runs.len(), arena.idle.len()), (2, 1));
    give(&mut arena, held[1]);
    assert_eq!((arena.runs.len(), arena.idle.len()), (1, 1), "the class has another run to take from");
    arena.set_eager(true);
    assert_eq!((arena.runs.len(), arena.idle.len()), (0, 0));
    let held = take(&mut arena, 5000, 64).unwrap();
    give(&mut arena, held);
    assert_eq!((arena.runs.len(), arena.idle.len()), (0, 0));
    arena.set_eager(false);
    let held = take(&mut arena, 5000, 64).unwrap();
    give(&mut arena, held);
    assert_eq!((arena.runs.len(), arena.idle.len()), (1, 1));
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

#[test]
fn a_new_run_has_new_generations() {
    let mut arena = arena(&[64]);
    let mut before = None;
    for _ in 0..3 {
        let descriptor = take(&mut arena, 5000, 64).unwrap();
        // SAFETY: out, so alive.
        let (first, word) = unsafe { (descriptor.as_ref().word(), descriptor.as_ref().depart()) };
        assert!(Some(first.generation()) > before, "a word of a dissolved run would come again");
        before = Some(word.generation());
        // SAFETY: as above.
        unsafe { descriptor.as_ref() }.set(state::HOST);
        give(&mut arena, descriptor);
        assert!(arena.release_idle());
    }
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
fn a_quarantined_segment_keeps_its_run() {
    let pages = |n: usize| Placement::of(n * PAGE - 32, 4096).unwrap();
    let mut arena = arena(&[64]);
    let stuck = take(&mut arena, 4 * PAGE, 4096).unwrap();
    assert!(arena.could_hold(pages(64), 1));
    quarantine(&mut arena, stuck);
    assert!(
        !arena.could_hold(pages(64), 1) && arena.could_hold(pages(59), 1) && !arena.could_hold(pages(60), 1)
    );
    // A run as long as the arena: of its class a segment is left, and of others none.
    let mut arena = self::arena(&[1]);
    let held: Vec<_> = std::iter::from_fn(|| take(&mut arena, 1000, 64)).collect();
    let class = |len| Placement::Class(Class::of(len).unwrap());
    held[1..].iter().for_each(|segment| _ = quarantine(&mut arena, *segment));
    assert!(arena.could_hold(class(1000), 1) && !arena.could_hold(class(2000), 1));
    quarantine(&mut arena, held[0]);
    assert!(!arena.could_hold(class(1000), 1));
}

/// The first run of a class is a page, or what one segment needs, and each further one doubles what the class has.
#[test]
fn runs_double_up_to_their_shape() {
    for len in [100, 2000, 4096, 40_000, 300_000] {
        let mut arena = arena(&[1024]);
        let (class, mut lengths) = (Class::of(len).unwrap(), Vec::new());
        let (first, longest) = (class.stride().div_ceil(PAGE) as u32, class.shape().pages);
        while lengths.last() != Some(&longest) {
            take(&mut arena, len, 64).unwrap();
            lengths.extend(arena.runs.iter().skip(lengths.len()).map(|(_, run)| run.pages));
            assert!(lengths.len() < 12, "{len}: {lengths:?} of {longest}");
        }
        assert_eq!(lengths[0], first, "{len}");
        assert!(lengths.windows(2).all(|pair| pair[0] <= pair[1] && pair[1] <= 2 * pair[0]), "{lengths:?}");
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    }
}

#[test]
fn small_runs_and_large_segments_have_an_end_each() {
    let mut arena = arena(&[256]);
    let at = |segment: NonNull<Descriptor>| {
        // SAFETY: out, so alive.
        (unsafe { segment.as_ref() }.base().as_ptr().addr() / PAGE) - (1 << 20)
    };
    assert_eq!(at(take(&mut arena, 100, 64).unwrap()), 0);
    assert_eq!(at(take(&mut arena, 10 * PAGE - 32, 4096).unwrap()), 246);
    assert_eq!(at(take(&mut arena, 300_000, 64).unwrap()), 246 - 81);
    assert_eq!(at(take(&mut arena, 5000, 64).unwrap()), 1);
    assert_eq!(at(take(&mut arena, 3 * PAGE, 16 * PAGE).unwrap()), 160);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

/// What `check` says of an arena after `spoil` has changed it. The arena has 64 pages: a run of a class with four of
/// its segments out and three free, then a free run, and behind it an aligned segment.
fn violation(spoil: impl FnOnce(&mut Arena, &mut HashSet<usize>)) -> String {
    let mut arena = arena(&[64]);
    for _ in 0..4 {
        take(&mut arena, 500, 64).unwrap();
    }
    take(&mut arena, 4096, 4096).unwrap();
    let mut outside = HashSet::new();
    arena.check(&outside, |_, _, _| {}).unwrap();
    spoil(&mut arena, &mut outside);
    arena.check(&outside, |_, _, _| {}).expect_err("a violation goes unnoticed")
}

/// The runs of `violation`, by their numbers.
const OF_CLASS: usize = 0;
const SINGLE: usize = 1;

/// Puts other values into a descriptor of a run.
fn replace(arena: &mut Arena, run: usize, at: usize, with: impl FnOnce(&Descriptor) -> Descriptor) {
    // SAFETY: the run has that many descriptors, and no other code uses them meanwhile.
    unsafe {
        let place = arena.runs[run].descriptors.add(at);
        place.write(with(place.as_ref()));
    }
}

fn moved(descriptor: &Descriptor, by: isize, run: u32) -> Descriptor {
    let base = NonNull::new(descriptor.base().as_ptr().wrapping_offset(by)).unwrap();
    Descriptor::new(base, descriptor.class(), run, 0)
}

#[test]
fn check_sees_wrong_free_runs() {
    // The run of two pages is the last.
    let (free, pages) = (1, 61);
    let says = violation(|arena, _| {
        arena.remove_free(0, free, pages);
        arena.insert_free(0, free, 5);
        arena.insert_free(0, free + 5, pages - 5);
    });
    assert_eq!(says, "extent 0: two free runs meet at page 6");
    let no_end = "extent 0: the free run at page 1 has no valid last page";
    assert_eq!(violation(|arena, _| arena.extents[0].map[free as usize] = FREE), no_end);
    assert_eq!(violation(|arena, _| arena.extents[0].map[free as usize] = FREE | (pages + 9)), no_end);
    assert_eq!(violation(|arena, _| arena.extents[0].map[61] = FREE | 1), no_end);
    let says = violation(|arena, _| assert!(arena.free.remove(&(pages, 0, free))));
    assert!(says.ends_with("withheld: false; in the set of free runs: false"), "{says}");
    let says = violation(|arena, _| assert!(arena.free.insert((1, 0, 62))));
    assert_eq!(says, "the set of free runs has others than the page maps");
}

#[test]
fn check_sees_wrong_runs() {
    let says = violation(|arena, _| arena.extents[0].map[0] = 77);
    assert_eq!(says, "extent 0: no run 77 at page 0");
    let elsewhere = |run: usize| format!("run {run} is not where the page map says");
    assert_eq!(violation(|arena, _| arena.extents[0].map[0] = SINGLE as u32), elsewhere(SINGLE));
    assert_eq!(violation(|arena, _| arena.extents[0].map[63] = OF_CLASS as u32), elsewhere(SINGLE));
    assert_eq!(violation(|arena, _| arena.runs[OF_CLASS].extent = 1), elsewhere(OF_CLASS));
    let says = violation(|arena, _| {
        let class = arena.runs[OF_CLASS].class.unwrap();
        arena.partial[class.index()].clear();
    });
    assert!(says.starts_with("run 0 has ") && says.ends_with("in the set of its class: false"), "{says}");
    let says = violation(|arena, _| while arena.runs[OF_CLASS].list.pop().is_some() {});
    assert_eq!(says, "run 0 has 0 free segments; in the set of its class: true");
    let says = violation(|arena, _| arena.runs[OF_CLASS].cut += 32);
    assert!(says.starts_with("run 0: ") && says.ends_with(" are not 4096"), "{says}");
    let says = violation(|arena, _| assert!(arena.idle.insert(OF_CLASS as u32)));
    assert!(says.starts_with("run 0 is in a wrong set: idle false, "), "{says}");
}

#[test]
fn check_sees_wrong_windows() {
    let in_window = |spoil: fn(&mut Arena, WindowId)| {
        violation(|arena, outside| {
            let id = arena.withhold(vec![PageRange { extent: 0, first: 0, end: 40 }], 40, 1);
            arena.check(outside, |_, _, _| {}).unwrap();
            spoil(arena, id);
        })
    };
    let sums: [fn(&mut Arena, WindowId); 4] = [
        |arena, id| arena.windows[id.0].out += 1,
        |arena, _| arena.held_pages += 1,
        |arena, _| arena.held_slot_bytes += 64,
        |arena, _| arena.watched[0] += 1,
    ];
    for spoil in sums {
        let says = in_window(spoil);
        assert!(says.starts_with("the sums are "), "{says}");
    }
    let says = in_window(|arena, _| arena.runs[OF_CLASS].window = None);
    assert!(says.starts_with("run 0 is in None, and its pages are in Some"), "{says}");
    let says = in_window(|arena, id| arena.windows[id.0].ranges[0].end = 0);
    assert!(says.starts_with("a window leaves its extent: "), "{says}");
    let says = in_window(|arena, id| {
        let twice = arena.windows[id.0].ranges[0];
        arena.windows[id.0].ranges.push(twice);
    });
    assert!(says.starts_with("windows overlap: "), "{says}");
    let says = in_window(|arena, id| arena.windows[id.0].ranges[0].end = 30);
    assert_eq!(says, "extent 0: the free run at page 1 leaves its window");
    // The window's edge lies in the single segment's run.
    let says = violation(|arena, _| {
        let id = arena.withhold(vec![PageRange { extent: 0, first: 62, end: 64 }], 2, 1);
        arena.windows[id.0].ranges[0].end = 63;
    });
    assert!(says.starts_with("run 1 is in Some"), "{says}");
    // A segment in the window is cached.
    let says = violation(|arena, outside| {
        let cached = arena.descriptor(&arena.runs[OF_CLASS], 0);
        assert!(outside.insert(cached.addr().get()));
        arena.withhold(vec![PageRange { extent: 0, first: 0, end: 40 }], 40, 1);
    });
    assert_eq!(says, "run 0: segment 0 is in a window, and is cached");
}

#[test]
fn check_sees_wrong_segments() {
    let says = violation(|arena, _| replace(arena, OF_CLASS, 2, |d| moved(d, 0, 9)));
    assert_eq!(says, "a descriptor of run 0 says that it belongs to run 9");
    let misplaced =
        |run: usize, n: usize| format!("run {run}: segment {n} overlaps, leaves its run, or is misaligned");
    for by in [32, -64, 64] {
        // Further up it overlaps the next segment.
        let seen_at = if by == 64 { 2 } else { 1 };
        let says = violation(|arena, _| replace(arena, OF_CLASS, 1, |d| moved(d, by, 0)));
        assert_eq!(says, misplaced(OF_CLASS, seen_at), "{by}");
    }
    let says = violation(|arena, _| {
        let last = arena.runs[OF_CLASS].count as usize - 1;
        replace(arena, OF_CLASS, last, |d| moved(d, PAGE as isize, 0));
    });
    assert!(says.ends_with("overlaps, leaves its run, or is misaligned"), "{says}");
    // The descriptor stays in the list of its run.
    let says = violation(|arena, outside| {
        outside.insert(std::ptr::from_ref(arena.runs[OF_CLASS].list.iter().next().unwrap()).addr());
    });
    assert_eq!(says, "run 0: segment 4 is free or checked out and is in 2 lists");
    let says = violation(|arena, _| {
        arena.runs[OF_CLASS].list.iter().next().unwrap().set(state::FLIGHT);
    });
    assert_eq!(says, "run 0: segment 4 is in flight and is in 1 lists");
    let says = violation(|_, outside| assert!(outside.insert(1)));
    assert_eq!(says, "1 segments are cached, and 0 of them belong to the arena");
}

#[test]
fn check_sees_wrong_lists() {
    // The second descriptor of the list becomes its end.
    let says = violation(|arena, _| {
        let second = NonNull::from(arena.runs[OF_CLASS].list.iter().nth(1).unwrap());
        // SAFETY: it is alive. That it is in a list is what is to be noticed.
        unsafe { Chain::new().push(second) };
    });
    assert!(says == "run 0: its list counts 3 segments but holds 2", "{says}");
    let says = violation(|arena, _| {
        let stray = arena.descriptor(&arena.runs[SINGLE], 0);
        // SAFETY: it is alive. That it is in the list of another run is what is to be noticed.
        unsafe { arena.runs[OF_CLASS].list.push(stray) };
    });
    assert_eq!(says, "run 0: its list holds descriptors that are not its own");
}

#[test]
fn check_sees_wrong_sums() {
    let counts: [fn(&mut Arena); 6] = [
        |arena| arena.total += PAGE,
        |arena| arena.cut += 32,
        |arena| arena.free_slot_bytes += 32,
        |arena| arena.free_pages += 1,
        |arena| arena.carved[0] += 1,
        |arena| {
            // A run without pages and descriptors, of which no page map knows.
            let descriptors = NonNull::dangling();
            let (class, list) = (None, Chain::new());
            let run = Run {
                extent: 0,
                first: 0,
                pages: 0,
                class,
                descriptors,
                count: 0,
                list,
                window: None,
                stuck: false,
                cut: 0,
            };
            arena.runs.insert(run);
        },
    ];
    for count in counts {
        let says = violation(|arena, _| count(arena));
        assert!(says.starts_with("the sums are "), "{says}");
    }
}

#[test]
fn a_descriptor_is_found_by_its_address() {
    let mut arena = arena(&[256]);
    for (len, align) in [(5000, 64), (4096, 4096), (3800, 64), (300_000, 64)] {
        let segment = take(&mut arena, len, align).unwrap();
        // SAFETY: out, so alive.
        let (run, granted) = unsafe { (segment.as_ref().run(), arena.granted(segment)) };
        let at = segment.addr().get();
        let (found, bytes) = arena.descriptor_at(run, at).unwrap();
        assert_eq!((NonNull::from(found), bytes), (segment, granted));
        let table = arena.runs[run as usize].descriptors.as_ptr().addr();
        let behind = table + arena.runs[run as usize].count as usize * size_of::<Descriptor>();
        assert!(arena.descriptor_at(run, behind).is_none() && arena.descriptor_at(run, table - 1).is_none());
    }
    assert!(arena.descriptor_at(999, 0).is_none());
}

#[test]
fn classes_are_counted_by_their_runs() {
    let mut arena = arena(&[256]);
    let small = take(&mut arena, 5000, 64).unwrap();
    let _single = take(&mut arena, 4096, 4096).unwrap();
    let mut seen = Vec::new();
    arena.for_each_class(|class, segments, listed| seen.push((class, segments, listed)));
    // SAFETY: out, so alive.
    let run = &arena.runs[unsafe { small.as_ref() }.run() as usize];
    let count = u64::from(run.count);
    assert_eq!(seen, [(Class::of(5000).unwrap(), count, count - 1)]);
}

#[test]
fn regions_are_told_apart() {
    let mut arena = arena(&[16, 16]);
    // SAFETY: nothing dereferences the memory in these tests.
    unsafe { arena.add_extent(RegionId(1), base(1 << 21), 8 * PAGE, false) };
    let first = take(&mut arena, 10 * PAGE, 4096).unwrap();
    let second = take(&mut arena, 12 * PAGE, 4096).unwrap();
    assert_eq!(
        arena.regions(),
        [(RegionId(0), 16 * PAGE, 5 * PAGE), (RegionId(1), 24 * PAGE, 11 * PAGE)],
        "eleven and thirteen pages are in use"
    );
    assert_eq!((arena.bytes().total, arena.bytes().unpinned), (40 * PAGE, 8 * PAGE));
    // SAFETY: both are out, so alive.
    assert!(unsafe { arena.pinned(first) && arena.pinned(second) });
    assert_eq!(arena.stuck_regions(), 0);
    let plain = take(&mut arena, 7 * PAGE, 4096).unwrap();
    // SAFETY: out, so alive.
    assert!(!unsafe { arena.pinned(plain) }, "the smallest run that fits is that of the plain memory");
    give(&mut arena, plain);
    assert!(arena.retire(RegionId(1)).is_none());
    give(&mut arena, second);
    let gone = arena.retire(RegionId(1)).unwrap();
    assert_eq!(gone, [(base((1 << 20) + 16), 16 * PAGE, true), (base(1 << 21), 8 * PAGE, false)]);
    let left = arena.bytes();
    assert_eq!((left.total, left.unpinned, left.largest_free), (16 * PAGE, 0, 5 * PAGE));
    quarantine(&mut arena, first);
    assert_eq!(arena.stuck_regions(), 16 * PAGE);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// What `could_hold` says is exact once all segments that are not quarantined are back.
    #[test]
    fn what_can_be_served_is_served(
        extents in prop::collection::vec(1usize..100, 1..3),
        steps in prop::collection::vec((0u8..10, 1usize..200_000, any::<prop::sample::Index>()), 1..40),
        (want, shift) in (1usize..400_000, 0u32..18),
        stuck in any::<[u64; 3]>(),
    ) {
        let mut arena = arena(&extents);
        let mut held = Vec::new();
        for (what, len, pick) in steps {
            let len = (len >> (len % 8)).max(1);
            let align = if what == 0 { 4096 } else { 64 };
            if what < 8 || held.is_empty() {
                held.extend(take(&mut arena, len, align));
            } else {
                give(&mut arena, held.swap_remove(pick.index(held.len())));
            }
        }
        let placement = Placement::of((want >> (want % 4)).max(1), 1 << shift).unwrap();
        let is_stuck = |i: usize| stuck.iter().all(|bits| bits >> (i % 64) & 1 == 1);
        let (lost, back): (Vec<_>, Vec<_>) = (0..held.len()).partition(|i| is_stuck(*i));
        for i in &lost {
            quarantine(&mut arena, held[*i]);
        }
        let known = arena.could_hold(placement, 1);
        back.iter().for_each(|i| give(&mut arena, held[*i]));
        let served = arena.take(placement);
        let served = served.or_else(|| { arena.release_idle(); arena.take(placement) });
        prop_assert_eq!(known, served.is_some());
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

// --- windows ---------------------------------------------------------------------------------------------------------

/// Withholds the range that is likely to be free soonest.
fn withhold(arena: &mut Arena, pages: usize) -> Option<WindowId> {
    let range = arena.choose_window(pages, 1, &[])?;
    Some(arena.withhold(vec![range], pages, 1))
}

#[test]
fn the_range_with_the_fewest_bytes_out_is_chosen() {
    let mut arena = arena(&[1024]);
    // Two large segments, with a small one and free pages between them.
    let large = [(); 2].map(|()| take(&mut arena, 300 * PAGE, 4096).unwrap());
    let small = take(&mut arena, 4096, 4096).unwrap();
    let window = withhold(&mut arena, 422).unwrap();
    let (first, end) = arena.window_addresses().next().unwrap();
    assert_eq!((end - base(1 << 20).as_ptr().addr()) / PAGE, 422);
    // SAFETY: out, so alive.
    let holds =
        |s: &NonNull<Descriptor>| (first..end).contains(&unsafe { s.as_ref() }.base().as_ptr().addr());
    assert_eq!((holds(&large[0]), holds(&large[1]), holds(&small)), (false, false, true));
    assert_eq!((arena.out_of(window), arena.is_complete(window)), (1, false));
    assert!((420 * PAGE..422 * PAGE).contains(&arena.bytes().withheld));
    assert!(take(&mut arena, 100, 64).is_none(), "the pages outside are all in use");
    // SAFETY: out, and returned once.
    assert_eq!(unsafe { arena.give(small) }, Some(window));
    assert!(arena.is_complete(window) && take(&mut arena, 100, 64).is_none());
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    arena.release_window(window);
    assert!(take(&mut arena, 422 * PAGE - 32, 4096).is_some());
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

#[test]
fn of_free_pages_at_its_end_a_window_has_those_that_are_needed() {
    let mut arena = arena(&[1024]);
    let large = take(&mut arena, 512 * PAGE - 32, 4096).unwrap();
    let window = withhold(&mut arena, 640).unwrap();
    let (first, end) = arena.window_addresses().next().unwrap();
    assert_eq!((first, end - first), (base((1 << 20) + 384).as_ptr().addr(), 640 * PAGE));
    assert_eq!((arena.bytes().withheld, arena.bytes().largest_free), (128 * PAGE, 384 * PAGE));
    // SAFETY: out, and returned once.
    assert_eq!(unsafe { arena.give(large) }, Some(window));
    assert!(arena.is_complete(window));
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

/// A range of the first extent.
fn range(first: u32, end: u32) -> PageRange {
    PageRange { extent: 0, first, end }
}

#[test]
fn quarantined_segments_divide_an_extent() {
    let mut arena = arena(&[64]);
    // From the high end.
    let held = [5, 10, 7].map(|n| take(&mut arena, n * PAGE - 32, 4096).unwrap());
    assert_eq!(arena.choose_window(64, 1, &[]), Some(range(0, 64)));
    quarantine(&mut arena, held[1]);
    assert_eq!(arena.choose_window(49, 1, &[]), Some(range(0, 49)));
    assert_eq!(arena.choose_window(50, 1, &[]), None);
}

#[test]
fn a_large_pool_is_searched_at_some_places_and_wholly_where_these_have_no_window() {
    let mut arena = arena(&[2048]);
    let held: Vec<_> = (0..2048).map(|_| take(&mut arena, PAGE - 32, 4096).unwrap()).collect();
    let found: BTreeSet<_> = (0..16).map(|_| arena.choose_window(2, 1, &[]).unwrap().first).collect();
    assert!(found.len() > 8, "{found:?}");
    assert_eq!(arena.choose_window(2, 1, &[range(0, 1000), range(1002, 2048)]), Some(range(1000, 1002)));
    for descriptor in held {
        // SAFETY: it is out, so alive.
        let first = arena.runs[unsafe { descriptor.as_ref() }.run() as usize].first;
        if !(1000..1002).contains(&first) {
            quarantine(&mut arena, descriptor);
        }
    }
    assert_eq!(arena.choose_window(2, 1, &[]), Some(range(1000, 1002)));
    assert_eq!(arena.choose_window(3, 1, &[]), None);
}

#[test]
fn regions_with_the_smallest_part_out_are_replaced_first() {
    // Three regions with an extent each, the last of which has a quarantined segment. Segments are given the shortest free
    // run that has room for them.
    let replaced = |out: [usize; 2], pages: usize, most: usize| {
        let mut arena = arena(&[16, 64, 15]);
        let [last, first, second] =
            [15, out[0], out[1]].map(|n| take(&mut arena, n * PAGE - 32, 4096).unwrap());
        quarantine(&mut arena, last);
        // SAFETY: they are out, so alive.
        let extents = [last, first, second].map(|s| arena.runs[unsafe { s.as_ref() }.run() as usize].extent);
        assert_eq!(extents, [2, 0, 1]);
        let ranges = arena.replaceable(pages * PAGE, most)?;
        assert!(ranges.iter().all(|range| range.first == 0 && range.end == [16, 64][range.extent as usize]));
        Some(ranges.iter().map(|range| range.extent).collect::<Vec<_>>())
    };
    assert_eq!(replaced([14, 20], 10, 1), Some(vec![1]));
    assert_eq!(replaced([14, 20], 64, 1), Some(vec![1]));
    assert_eq!(replaced([14, 20], 65, 2), Some(vec![1, 0]));
    assert_eq!(replaced([4, 30], 10, 1), Some(vec![0]));
    assert_eq!(replaced([4, 30], 17, 2), Some(vec![0, 1]));
    assert_eq!(replaced([4, 30], 17, 1), None, "two would be needed");
    assert_eq!(replaced([4, 30], 81, 3), None, "the quarantined segment's region stays");
}

#[test]
fn windows_do_not_meet_each_other_nor_what_is_stuck() {
    let mut arena = arena(&[64]);
    let held = [(); 4].map(|()| take(&mut arena, 16 * PAGE - 32, 4096).unwrap());
    assert!(quarantine(&mut arena, held[1]).is_none());
    assert!(arena.choose_window(33, 1, &[]).is_none());
    let first = withhold(&mut arena, 32).unwrap();
    assert_eq!(arena.out_of(first), 2);
    let second = withhold(&mut arena, 16).unwrap();
    assert_eq!(arena.out_of(second), 1);
    assert!(arena.choose_window(1, 1, &[]).is_none());
    assert_eq!(quarantine(&mut arena, held[0]), Some(second));
    give(&mut arena, held[2]);
    give(&mut arena, held[3]);
    assert!(arena.is_complete(first) && !arena.is_complete(second));
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    arena.release_window(second);
    arena.release_window(first);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    assert!(take(&mut arena, 32 * PAGE - 32, 4096).is_some());
}

/// The fewest bytes out that a range of at least `need` pages may have, of which the first is aligned: tries all ranges of
/// whole runs and free pages.
fn fewest_out(arena: &Arena, need: usize, align: usize) -> Option<usize> {
    let mut fewest = None;
    for (_, e) in &arena.extents {
        let page = e.base.as_ptr().addr() / PAGE;
        // Of each page: its bytes out, whether it may lie in a window, and whether a range may begin or end there.
        let mut pages: Vec<(usize, bool, bool)> = Vec::new();
        while pages.len() < e.pages as usize {
            let entry = e.map[pages.len()];
            if entry & FREE != 0 {
                let part = (0, entry & HELD == 0, true);
                pages.extend(std::iter::repeat_n(part, free_len(entry) as usize));
            } else {
                let run = &arena.runs[entry as usize];
                let open = run.window.is_none() && !run.stuck;
                pages.push((Arena::out(run).1, open, true));
                pages.extend(std::iter::repeat_n((0, open, false), run.pages as usize - 1));
            }
        }
        for first in (0..pages.len()).filter(|at| pages[*at].2) {
            let aligned = (page + first).next_multiple_of(align) - page;
            let mut sum = 0;
            for end in first + 1..=pages.len() {
                let (out, open, _) = pages[end - 1];
                sum += out;
                if !open {
                    break;
                }
                let ends = end == pages.len() || pages[end].2;
                if ends && aligned + need <= end && fewest.is_none_or(|fewest| sum < fewest) {
                    fewest = Some(sum);
                }
            }
        }
    }
    fewest
}

/// The bytes out of the runs in a range.
fn out_in(arena: &Arena, range: PageRange) -> usize {
    let inside = |run: &Run| run.extent == range.extent && (range.first..range.end).contains(&run.first);
    arena.runs.iter().filter(|(_, run)| inside(run)).map(|(_, run)| Arena::out(run).1).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// The search, which slides, finds no worse range than trying all of them one by one.
    #[test]
    fn the_best_window_is_chosen(
        extents in prop::collection::vec(1usize..400, 1..3),
        steps in prop::collection::vec((0u8..16, 1usize..2_000_000, 0u32..15, any::<prop::sample::Index>()), 1..120),
        needs in prop::collection::vec((1usize..900, 0u32..6), 1..12),
    ) {
        let mut arena = arena(&extents);
        let mut held: Vec<NonNull<Descriptor>> = Vec::new();
        for (what, len, shift, pick) in steps {
            let len = (len >> (len % 10)).max(1);
            match what {
                0..=9 => held.extend(take(&mut arena, len, if what < 7 { 64 } else { 1 << shift })),
                10..=13 if !held.is_empty() => give(&mut arena, held.swap_remove(pick.index(held.len()))),
                14 if !held.is_empty() && shift < 3 => {
                    let descriptor = held.swap_remove(pick.index(held.len()));
                    if let Some(window) = quarantine(&mut arena, descriptor) {
                        arena.release_window(window);
                    }
                }
                15 if shift < 5 => { withhold(&mut arena, len.div_ceil(PAGE)); }
                _ => {}
            }
        }
        for (need, shift) in needs {
            let need = (need >> shift).max(1);
            let align = 1 << (shift % 4);
            let found = arena.choose_window(need, align, &[]);
            prop_assert_eq!(found.map(|range| out_in(&arena, range)), fewest_out(&arena, need, align));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Segments inside of windows are given to no one, windows never meet, and a window whose segments are all back
    /// has the pages that it was chosen for.
    #[test]
    fn windows_keep_the_invariants(
        extents in prop::collection::vec(1usize..700, 1..3),
        steps in prop::collection::vec((0u8..16, 1usize..2_000_000, 0u32..15, any::<prop::sample::Index>()), 1..120),
    ) {
        let mut arena = arena(&extents);
        let mut held: Vec<NonNull<Descriptor>> = Vec::new();
        let mut windows: Vec<(WindowId, usize, usize)> = Vec::new();
        for (what, len, shift, pick) in steps {
            let len = (len >> (len % 16)).max(1);
            match what {
                0..=7 => {
                    if let Some(descriptor) = take(&mut arena, len, if what < 5 { 64 } else { 1 << shift }) {
                        // SAFETY: out, so alive.
                        let at = unsafe { descriptor.as_ref() }.base().as_ptr().addr();
                        for (first, end) in arena.window_addresses() {
                            prop_assert!(at < first || at >= end, "taken from a window");
                        }
                        held.push(descriptor);
                    }
                }
                8 | 9 if windows.len() < 4 => {
                    let (pages, align) = (len.div_ceil(PAGE), if what == 8 { 1 } else { 1 << (shift % 5) });
                    if let Some(range) = arena.choose_window(pages, align, &[]) {
                        windows.push((arena.withhold(vec![range], pages, align), pages, align));
                    }
                }
                10 if !windows.is_empty() => {
                    let (id, _, _) = windows.swap_remove(pick.index(windows.len()));
                    let (was, can) = (arena.release_window(id), shift % 2 == 0);
                    arena.release_idle();
                    if can {
                        prop_assert!(arena.can_withhold(&was));
                        windows.push((arena.withhold(was, 1, 1), 1, 1));
                    }
                }
                11 => { arena.set_eager(shift % 2 == 0); }
                12 if !held.is_empty() && shift == 0 => {
                    let descriptor = held.swap_remove(pick.index(held.len()));
                    if let Some(id) = quarantine(&mut arena, descriptor) {
                        arena.release_window(id);
                        windows.retain(|window| window.0 != id);
                    }
                }
                _ if !held.is_empty() => {
                    let descriptor = held.swap_remove(pick.index(held.len()));
                    give(&mut arena, descriptor);
                }
                _ => {}
            }
            arena.check(&HashSet::new(), |_, _, _| {}).map_err(TestCaseError::fail)?;
            for (id, pages, align) in &windows {
                if arena.out_of(*id) == 0 {
                    prop_assert!(arena.is_complete(*id), "{} pages, aligned to {}", pages, align);
                }
            }
        }
        for descriptor in held.drain(..) {
            give(&mut arena, descriptor);
        }
        for (id, pages, align) in windows {
            prop_assert!(arena.is_complete(id));
            arena.release_window(id);
            arena.release_idle();
            let placement = Placement::Pages { span: pages * PAGE, align };
            let taken = arena.take(placement);
            prop_assert!(taken.is_some());
            give(&mut arena, taken.unwrap());
        }
        arena.check(&HashSet::new(), |_, _, _| {}).map_err(TestCaseError::fail)?;
    }
}

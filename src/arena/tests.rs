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
    let segments = Class::of(5000).unwrap().shape().segments as usize;
    let held: Vec<_> = (0..=segments).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
    assert_eq!(arena.runs.len(), 2);
    let (last, first) = held.split_last().unwrap();
    first.iter().for_each(|descriptor| give(&mut arena, *descriptor));
    assert_eq!((arena.runs.len(), arena.idle.len()), (1, 0), "the class has another run to take from");
    give(&mut arena, *last);
    assert_eq!((arena.runs.len(), arena.idle.len()), (1, 1));
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
fn a_tail_may_fill_most_of_its_page() {
    let mut arena = arena(&[4]);
    let before = take(&mut arena, 2 * PAGE - 32, 4096).unwrap();
    // One page, of which the single segment has the first bytes.
    let head = take(&mut arena, 100, 4096).unwrap();
    let class = Class::fitting(PAGE - 192).unwrap();
    let tail = take(&mut arena, class.stride() - 32, 64).unwrap();
    // SAFETY: both are out, so alive.
    assert_eq!(unsafe { head.as_ref() }.run(), unsafe { tail.as_ref() }.run());
    give(&mut arena, head);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    assert_eq!(arena.bytes().largest_free, PAGE, "the tail keeps the page");
    give(&mut arena, tail);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    assert_eq!(arena.bytes().largest_free, 2 * PAGE);
    give(&mut arena, before);
    assert_eq!(arena.bytes().largest_free, 4 * PAGE);
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
    assert!(!arena.could_reclaim(Placement::Class(Class::of(150_000).unwrap()), cached(3)));
    small.into_iter().chain([large]).for_each(|descriptor| give(&mut arena, descriptor));
    // A cached segment serves its class, also where it leaves no page free.
    let mut arena = self::arena(&[4]);
    while take(&mut arena, 5000, 64).is_some() {}
    assert!(arena.could_reclaim(Placement::Class(class), cached(1)));
    assert!(!arena.could_reclaim(Placement::Class(class), cached(0)));
    // What is out may lie behind a free run.
    let mut arena = self::arena(&[24]);
    let before = take(&mut arena, 10 * PAGE - 32, 4096).unwrap();
    let behind = take(&mut arena, 8 * PAGE - 32, 4096).unwrap();
    give(&mut arena, before);
    assert!(arena.could_reclaim(pages(10), cached(0)) && !arena.could_reclaim(pages(11), cached(0)));
    give(&mut arena, behind);
    // The pages of a single segment that is out stay, although its tail is free.
    let mut arena = self::arena(&[8]);
    let single = take(&mut arena, 7 * PAGE, 4096).unwrap();
    assert!(!arena.could_reclaim(pages(1), cached(0)));
    give(&mut arena, single);
    assert!(arena.could_reclaim(pages(8), cached(0)));
    // Pages are aligned by their addresses: of this extent page 29 is.
    let arena = self::arena(&[3, 40]);
    let aligned = |n: usize| Placement::of(n * PAGE - 32, 32 * PAGE).unwrap();
    assert!(arena.could_reclaim(aligned(11), cached(0)) && !arena.could_reclaim(aligned(12), cached(0)));
    // What is free lies before a window, and between the window and a segment that is out.
    let mut arena = self::arena(&[64]);
    let [before, _behind] = [40, 24].map(|n| take(&mut arena, n * PAGE - 32, 4096).unwrap());
    give(&mut arena, before);
    arena.withhold(PageRange { extent: 0, first: 5, end: 15 }, 10, 1);
    assert!(arena.could_reclaim(pages(25), cached(0)) && !arena.could_reclaim(pages(26), cached(0)));
}

#[test]
fn what_can_be_served_is_known() {
    let mut arena = arena(&[64]);
    let stuck = take(&mut arena, 4 * PAGE, 4096).unwrap();
    let whole = Placement::of(64 * PAGE - 32, 4096).unwrap();
    assert!(arena.could_serve(whole, 1));
    quarantine(&mut arena, stuck);
    assert!(!arena.could_serve(whole, 1));
    assert!(arena.could_serve(Placement::of(59 * PAGE - 32, 4096).unwrap(), 1));
    assert!(!arena.could_serve(Placement::of(60 * PAGE - 32, 4096).unwrap(), 1));
}

/// What `check` says of an arena after `spoil` has changed it. The arena has 64 pages: a run of a class with four of
/// its segments out and two or more free, then an aligned segment with a tail, and behind them a free run.
fn violation(spoil: impl FnOnce(&mut Arena, &mut HashSet<usize>)) -> String {
    let mut arena = arena(&[64]);
    for _ in 0..4 {
        take(&mut arena, 2000, 64).unwrap();
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
    let (single, free) = (16, 18);
    let says = violation(|arena, _| {
        arena.remove_free(0, free, 64 - free);
        arena.insert_free(0, free, 5);
        arena.insert_free(0, free + 5, 64 - free - 5);
    });
    assert_eq!(says, "extent 0: two free runs meet at page 23");
    let no_end = "extent 0: the free run at page 18 has no valid last page";
    assert_eq!(violation(|arena, _| arena.extents[0].map[free as usize] = FREE), no_end);
    assert_eq!(violation(|arena, _| arena.extents[0].map[free as usize] = FREE | (64 - free + 1)), no_end);
    assert_eq!(violation(|arena, _| arena.extents[0].map[63] = FREE | 1), no_end);
    let says = violation(|arena, _| assert!(arena.free.remove(&(64 - free, 0, free))));
    assert!(says.ends_with("withheld: false; in the set of free runs: false"), "{says}");
    let says = violation(|arena, _| assert!(arena.free.insert((1, 0, single))));
    assert_eq!(says, "the set of free runs has others than the page maps");
}

#[test]
fn check_sees_wrong_runs() {
    let says = violation(|arena, _| arena.extents[0].map[0] = 77);
    assert_eq!(says, "extent 0: no run 77 at page 0");
    let elsewhere = |run: usize| format!("run {run} is not where the page map says");
    assert_eq!(violation(|arena, _| arena.extents[0].map[0] = SINGLE as u32), elsewhere(SINGLE));
    assert_eq!(violation(|arena, _| arena.extents[0].map[15] = SINGLE as u32), elsewhere(OF_CLASS));
    assert_eq!(violation(|arena, _| arena.runs[OF_CLASS].extent = 1), elsewhere(OF_CLASS));
    let says = violation(|arena, _| {
        let class = arena.runs[OF_CLASS].class.unwrap();
        arena.partial[class.index()].clear();
    });
    assert!(says.starts_with("run 0 has ") && says.ends_with("in the set of its class: false"), "{says}");
    let says = violation(|arena, _| while arena.runs[OF_CLASS].list.pop().is_some() {});
    assert_eq!(says, "run 0 has 0 free segments; in the set of its class: true");
    let says = violation(|arena, _| arena.runs[OF_CLASS].cut += 32);
    assert!(says.starts_with("run 0: ") && says.ends_with(" are not 65536"), "{says}");
    let wrong_set: [fn(&mut Arena); 3] = [
        |arena| assert!(arena.idle.insert(OF_CLASS as u32)),
        |arena| assert!(arena.frayed.remove(&(OF_CLASS as u32))),
        |arena| arena.runs[OF_CLASS].frayed = false,
    ];
    for spoil in wrong_set {
        let says = violation(|arena, _| spoil(arena));
        assert!(says.starts_with("run 0 is in a wrong set: idle false, "), "{says}");
    }
    let wrong_extent: [fn(&mut Arena); 2] = [
        |arena| arena.extents[0].out[0] += 64,
        |arena| assert_eq!(arena.extents[0].runs.insert(63, 5), None),
    ];
    for spoil in wrong_extent {
        let says = violation(|arena, _| spoil(arena));
        assert!(says.starts_with("extent 0 has 2 runs, counted as "), "{says}");
    }
}

#[test]
fn check_sees_wrong_windows() {
    // The window begins in the class's run, behind a segment that is free. Of its segments three are out, and the aligned
    // one behind them.
    let in_window = |spoil: fn(&mut Arena, WindowId)| {
        violation(|arena, outside| {
            let before = arena.descriptor(&arena.runs[OF_CLASS], 0);
            give(arena, before);
            let (extent, first, end) = (0, 1, 64);
            let id = arena.withhold(PageRange { extent, first, end }, 63, 1);
            assert!(arena.runs[OF_CLASS].held.len() > 1 && !arena.runs[OF_CLASS].list.is_empty());
            arena.check(outside, |_, _, _| {}).unwrap();
            spoil(arena, id);
        })
    };
    let says = in_window(|arena, id| arena.windows[id.0].out += 1);
    assert_eq!(says, "window 0 has 4 segments out, counted as 5");
    // One that lies in the window is in the list of those before it, and the other way round.
    let wrong_list = "run 0: a segment is in the wrong list for its window";
    let says = in_window(|arena, _| {
        let run = &mut arena.runs[OF_CLASS];
        let descriptor = run.held.pop().unwrap();
        // SAFETY: alive, free, and just taken off its list.
        unsafe { run.list.push(descriptor) };
    });
    assert_eq!(says, wrong_list);
    let says = in_window(|arena, _| {
        let run = &mut arena.runs[OF_CLASS];
        let descriptor = run.list.pop().unwrap();
        // SAFETY: as above.
        unsafe { run.held.push(descriptor) };
    });
    assert_eq!(says, wrong_list);
    let says = violation(|arena, _| arena.extents[0].blocked[0] += 1);
    assert!(
        says.starts_with("extent 0 has [(0, 0)] windows, and ") && says.ends_with("counted as [1]"),
        "{says}"
    );
    // The state comes first, and the count then.
    let mut arena = arena(&[64]);
    let stuck = take(&mut arena, 5000, 64).unwrap();
    // SAFETY: out, so alive.
    unsafe { stuck.as_ref().set(state::QUARANTINED) };
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
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
    assert!(says.starts_with("run 0: its lists count ") && says.ends_with(" segments but hold 2"), "{says}");
    let says = violation(|arena, _| {
        let stray = arena.descriptor(&arena.runs[SINGLE], 0);
        // SAFETY: it is alive. That it is in the list of another run is what is to be noticed.
        unsafe { arena.runs[OF_CLASS].list.push(stray) };
    });
    assert_eq!(says, "run 0: its list holds descriptors that are not its own");
}

#[test]
fn check_sees_wrong_sums() {
    let counts: [fn(&mut Arena); 5] = [
        |arena| arena.total += PAGE,
        |arena| arena.cut += 32,
        |arena| arena.free_slot_bytes += 32,
        |arena| arena.free_pages += 1,
        |arena| {
            // A run without pages and descriptors, of which no page map knows.
            let descriptors = NonNull::dangling();
            let (class, list) = (None, Chain::new());
            let run = Run {
                extent: 0,
                first: 0,
                pages: 0,
                class,
                alone: 0,
                descriptors,
                count: 0,
                table: 0,
                list,
                held: Chain::new(),
                window: None,
                keep: 0,
                frayed: false,
                cut: 0,
            };
            arena.runs.insert(run);
        },
    ];
    for count in counts {
        let says = violation(|arena, _| count(arena));
        assert!(
            says.starts_with("(total, cut, bytes of free segments, free pages, idle, runs) are "),
            "{says}"
        );
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
    let single = take(&mut arena, 4096, 4096).unwrap();
    let mut seen = Vec::new();
    arena.for_each_class(|class, segments, listed| seen.push((class, segments, listed)));
    // SAFETY: out, so alive.
    let run = &arena.runs[unsafe { small.as_ref() }.run() as usize];
    let count = u64::from(run.count);
    // SAFETY: as above.
    let tail = arena.runs[unsafe { single.as_ref() }.run() as usize].class.unwrap();
    assert_eq!(seen, [(Class::of(5000).unwrap(), count, count - 1), (tail, 1, 1)]);
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

#[test]
fn how_many_can_be_served_is_known() {
    // The second extent begins three pages behind a multiple of 64.
    let arena = arena(&[3, 64]);
    let class = Class::of(5000).unwrap();
    let fit = |pages: usize| pages * PAGE / class.stride();
    let most = fit(3) + fit(64);
    assert!(arena.could_serve(Placement::Class(class), most));
    assert!(!arena.could_serve(Placement::Class(class), most + 1));
    // 16 pages, aligned to 16: at pages 16, 32 and 48 of the address space behind the multiple, and not at 64.
    let aligned = Placement::of(16 * PAGE - 32, 16 * PAGE).unwrap();
    assert!(arena.could_serve(aligned, 3));
    assert!(!arena.could_serve(aligned, 4));
}

#[test]
fn a_quarantined_segment_blocks_no_more_than_it_must() {
    let pages = |n: usize| Placement::of(n * PAGE - 32, 4096).unwrap();
    let serves = |arena: &Arena, placement| arena.could_serve(placement, 1);
    // The first and the third segment of a run stay out, and the run ends behind them.
    let mut arena = arena(&[64]);
    let held: Vec<_> = (0..4).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
    for n in [0, 2] {
        quarantine(&mut arena, held[n]);
    }
    assert!(serves(&arena, pages(60)), "three segments need four pages");
    assert!(!serves(&arena, pages(61)));
    give(&mut arena, held[1]);
    give(&mut arena, held[3]);
    assert!(arena.shorten_runs() && arena.take(pages(60)).is_some());
    // The second segment stays out alone.
    let mut arena = self::arena(&[64]);
    let held: Vec<_> = (0..3).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
    quarantine(&mut arena, held[1]);
    assert!(serves(&arena, pages(61)) && !serves(&arena, pages(62)), "two segments need three pages");
    // A single segment stays out, behind a free run, and its tail is free.
    let mut arena = self::arena(&[24]);
    let before = take(&mut arena, 10 * PAGE - 32, 4096).unwrap();
    let single = take(&mut arena, 7 * PAGE, 4096).unwrap();
    give(&mut arena, before);
    quarantine(&mut arena, single);
    assert!(serves(&arena, pages(10)) && !serves(&arena, pages(11)));
    // A run as long as the arena: of its class a segment is left, and of others none.
    let mut arena = self::arena(&[4]);
    let held: Vec<_> = (0..3).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
    for n in [0, 2] {
        quarantine(&mut arena, held[n]);
    }
    let class = |len| Placement::Class(Class::of(len).unwrap());
    assert!(serves(&arena, class(5000)) && !serves(&arena, class(2000)));
    assert!(!arena.could_serve(class(5000), 2));
    quarantine(&mut arena, held[1]);
    assert!(!serves(&arena, class(5000)));
    // A tail stays out, and the pages before it come back with the single segment.
    let mut arena = self::arena(&[8]);
    let single = take(&mut arena, 7 * PAGE, 4096).unwrap();
    let tail = take(&mut arena, 3800, 64).unwrap();
    quarantine(&mut arena, tail);
    assert!(serves(&arena, pages(7)));
    assert!(!serves(&arena, pages(8)));
    give(&mut arena, single);
    assert!(arena.take(pages(7)).is_some());
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

    /// For one segment, what `could_serve` says is exact once all segments that are not quarantined are back.
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
        let known = arena.could_serve(placement, 1);
        back.iter().for_each(|i| give(&mut arena, held[*i]));
        let served = arena.take(placement);
        let served = served.or_else(|| { arena.release_idle(); arena.take(placement) });
        let served = served.or_else(|| { arena.shorten_runs(); arena.take(placement) });
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

// --- windows ---------------------------------------------------------------------------------------------------------

/// Withholds the range that is likely to be free soonest.
fn withhold(arena: &mut Arena, pages: usize) -> Option<WindowId> {
    let range = arena.choose_window(pages, 1)?;
    Some(arena.withhold(range, pages, 1))
}

#[test]
fn the_range_with_the_fewest_bytes_out_is_chosen() {
    let mut arena = arena(&[1024]);
    // Two large segments, with a small one and free pages between them.
    let large = [(); 2].map(|()| take(&mut arena, 300 * PAGE, 4096).unwrap());
    let small = take(&mut arena, 4096, 4096).unwrap();
    let window = withhold(&mut arena, 422).unwrap();
    let (first, end) = arena.window_addresses(0).unwrap();
    assert_eq!((end - base(1 << 20).as_ptr().addr()) / PAGE, 1024);
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
    let (first, end) = arena.window_addresses(0).unwrap();
    assert_eq!((first, end - first), (base(1 << 20).as_ptr().addr(), 640 * PAGE));
    assert_eq!((arena.bytes().withheld, arena.bytes().largest_free), (128 * PAGE, 384 * PAGE));
    // SAFETY: out, and returned once.
    assert_eq!(unsafe { arena.give(large) }, Some(window));
    assert!(arena.is_complete(window));
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

#[test]
fn a_window_begins_within_a_run() {
    let mut arena = arena(&[64]);
    let held: Vec<_> = std::iter::from_fn(|| take(&mut arena, 4096, 64)).collect();
    let window = withhold(&mut arena, 3).unwrap();
    // SAFETY: out, so alive.
    let at = |s: &NonNull<Descriptor>| unsafe { s.as_ref() }.base().as_ptr().addr();
    let (first, _) = arena.window_addresses(0).unwrap();
    let (before, inside): (Vec<NonNull<Descriptor>>, Vec<_>) =
        held.iter().partition(|s| at(s) + 4160 <= first);
    assert_eq!((inside.len(), arena.out_of(window)), (3, 3));
    // What is before the window serves others.
    give(&mut arena, before[7]);
    assert!(take(&mut arena, 4096, 64).is_some() && take(&mut arena, 4096, 64).is_none());
    for segment in inside {
        assert!(!arena.is_complete(window));
        give(&mut arena, segment);
        assert!(take(&mut arena, 4096, 64).is_none());
        arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
    }
    assert!(arena.is_complete(window));
    arena.release_window(window);
    assert!(take(&mut arena, 3 * PAGE - 32, 4096).is_some());
}

/// A range of the first extent.
fn range(first: u32, end: u32) -> PageRange {
    PageRange { extent: 0, first, end }
}

#[test]
fn a_range_is_withheld_again_unless_a_run_crosses_its_edges() {
    let mut arena = arena(&[64]);
    let held = take(&mut arena, 3 * PAGE - 32, 4096).unwrap();
    assert!(arena.can_withhold(range(3, 32)) && arena.can_withhold(range(0, 3)));
    assert!(!arena.can_withhold(range(2, 32)) && !arena.can_withhold(range(0, 2)));
    // A run of a class may be divided where a segment begins, or behind what its last segment leaves of a page.
    let segment = take(&mut arena, 5000, 64).unwrap();
    // SAFETY: out, so alive.
    let run = &arena.runs[unsafe { segment.as_ref() }.run() as usize];
    let end = 3 + run.pages;
    assert!(run.first == 3 && run.count > 6);
    assert!(arena.can_withhold(range(3, end)) && !arena.can_withhold(range(3, end - 1)));
    let may: Vec<u32> = (0..8).filter(|page| arena.can_withhold(range(3 + page, 64))).collect();
    let stride = Class::of(5000).unwrap().stride() as u32;
    let begins: Vec<u32> = (0..6).map(|segments: u32| (segments * stride).div_ceil(PAGE as u32)).collect();
    assert_eq!(may, begins);
    give(&mut arena, held);
    let window = arena.withhold(range(0, 3), 3, 1);
    assert_eq!((arena.bytes_of(window), arena.range(window)), (3 * PAGE, range(0, 3)));
    let window = arena.withhold(range(32, 64), 32, 1);
    assert_eq!(arena.bytes_of(window), 32 * PAGE);
}

#[test]
fn quarantined_segments_divide_an_extent() {
    let mut arena = arena(&[64]);
    let held = [5, 10, 7].map(|n| take(&mut arena, n * PAGE - 32, 4096).unwrap());
    assert_eq!(arena.choose_window(64, 1), Some(range(0, 64)));
    quarantine(&mut arena, held[1]);
    assert_eq!(arena.choose_window(49, 1), Some(range(15, 64)));
    assert_eq!(arena.choose_window(50, 1), None);
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
fn a_run_may_be_shortened_once_its_window_is_gone() {
    let mut arena = arena(&[64]);
    let held: Vec<_> = (0..3).map(|_| take(&mut arena, 5000, 64).unwrap()).collect();
    assert!(arena.shorten_runs() && !arena.shorten_runs());
    let window = withhold(&mut arena, 64).unwrap();
    give(&mut arena, held[2]);
    assert!(!arena.shorten_runs());
    arena.release_window(window);
    assert_eq!(arena.bytes().largest_free, 60 * PAGE);
    assert!(arena.shorten_runs());
    assert_eq!(arena.bytes().largest_free, 61 * PAGE, "two segments need three pages");
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

#[test]
fn a_window_begins_behind_the_last_quarantined_segment_of_a_run() {
    let mut arena = arena(&[64]);
    let held = [(); 5].map(|()| take(&mut arena, 5000, 64).unwrap());
    quarantine(&mut arena, held[1]);
    quarantine(&mut arena, held[3]);
    // Four segments need six pages.
    assert_eq!(arena.choose_window(58, 1), Some(range(6, 64)));
    assert_eq!(arena.choose_window(59, 1), None);
}

#[test]
fn windows_do_not_meet_each_other_nor_what_is_stuck() {
    let mut arena = arena(&[64]);
    let held = [(); 4].map(|()| take(&mut arena, 16 * PAGE - 32, 4096).unwrap());
    assert!(quarantine(&mut arena, held[1]).is_none());
    assert!(arena.choose_window(33, 1).is_none());
    let first = withhold(&mut arena, 32).unwrap();
    assert_eq!(arena.out_of(first), 2);
    let second = withhold(&mut arena, 16).unwrap();
    assert_eq!(arena.out_of(second), 1);
    assert!(arena.choose_window(1, 1).is_none());
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

/// What a search for a window may choose from: a run, what follows in a run behind its last quarantined segment, or free
/// pages, each with the bytes that are out. Of a run of a class also its first page, its stride, and its number of segments.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    end: usize,
    out: usize,
    class: Option<(usize, usize, usize)>,
    gap: bool,
}

/// The parts of an extent that begin in these pages, in rows that windows and quarantined segments divide.
fn parts(arena: &Arena, extent: usize, from: usize, to: usize) -> Vec<Vec<Part>> {
    let e = &arena.extents[extent];
    let (mut out, mut stuck) = (vec![0; arena.runs.capacity()], vec![None; arena.runs.capacity()]);
    arena
        .check(&HashSet::new(), |segment, bytes, free| {
            let run = segment.run() as usize;
            out[run] += if free { 0 } else { bytes };
            if segment.word().state() == state::QUARANTINED {
                let end = segment.base().as_ptr().addr() + bytes;
                stuck[run] = stuck[run].max(Some(end));
            }
        })
        .unwrap();
    let in_window = |page: usize| {
        let mut windows = arena.windows.iter().map(|(_, w)| w);
        windows.any(|w| w.extent as usize == extent && (w.first as usize..w.end as usize).contains(&page))
    };
    let mut rows = vec![Vec::new()];
    let mut page = 0;
    while page < to {
        let run = e.runs.get(&(page as u32)).map(|number| (*number as usize, &arena.runs[*number as usize]));
        let Some((number, run)) = run else {
            let first = page;
            page += 1;
            if in_window(first) {
                rows.push(Vec::new());
                continue;
            }
            while page < e.pages as usize && !e.runs.contains_key(&(page as u32)) && !in_window(page) {
                page += 1;
            }
            if page > from {
                let first = first.max(from);
                rows.last_mut().unwrap().push(Part { first, end: page, out: 0, class: None, gap: true });
            }
            continue;
        };
        let (start, end) = (page, page + run.pages as usize);
        page = end;
        if end <= from {
            continue;
        }
        let is_single = Arena::is_single(run);
        let first = match stuck[number] {
            None => start,
            Some(_) if is_single => end,
            Some(behind) => (behind - e.base.as_ptr().addr()).div_ceil(PAGE),
        };
        if first > start {
            rows.push(Vec::new());
        }
        if run.window.is_some() || first >= end {
            rows.push(Vec::new());
            continue;
        }
        let class = run.class.filter(|_| !is_single);
        let class = class.map(|class| (start, class.stride(), run.count as usize));
        rows.last_mut().unwrap().push(Part { first, end, out: out[number], class, gap: false });
    }
    rows
}

/// The range of these pages of an extent that a search should find, with the bytes out there: tried one by one.
fn best_of(
    arena: &Arena,
    extent: usize,
    pages: std::ops::Range<usize>,
    need: usize,
    align: usize,
) -> Option<(usize, PageRange)> {
    let page = arena.extents[extent].base.as_ptr().addr() / PAGE;
    let mut best: Option<(usize, usize, PageRange)> = None;
    for row in parts(arena, extent, pages.start, pages.end) {
        for (number, last) in row.iter().enumerate() {
            let aligned = |start: &usize| (page + start) % align == 0;
            let may = |start: &usize| last.end - start >= need && aligned(start);
            let Some(start) = (row[0].first..last.end).rev().find(may) else { continue };
            let head = row.iter().rposition(|part| part.first <= start).unwrap();
            let all: usize = row[head..=number].iter().map(|part| part.out).sum();
            let (first, spared) = match row[head] {
                Part { class: Some((run, stride, count)), first, out, .. } => {
                    let keep = ((start - run) * PAGE / stride).min(count);
                    (first.max(run + (keep * stride).div_ceil(PAGE)), out * keep / count)
                }
                Part { gap: true, .. } => (start, 0),
                Part { first, .. } => (first, 0),
            };
            let begin = (first..).find(aligned).unwrap();
            let end = if last.gap { last.first.max(begin + need) } else { last.end };
            let found = (all - spared, end - first);
            if best.is_none_or(|best| found < (best.0, best.1)) {
                let [extent, first, end] = [extent, first, end].map(|number| number as u32);
                best = Some((found.0, found.1, PageRange { extent, first, end }));
            }
        }
    }
    best.map(|(out, _, range)| (out, range))
}

/// The range that `choose_window` should find: among the blocks with the fewest bytes out, otherwise anywhere.
fn best_window(arena: &Arena, need: usize, align: usize) -> Option<PageRange> {
    let blocks = (need + align - 1).div_ceil(windows::BLOCK as usize);
    let mut near: Option<(usize, usize, std::ops::Range<usize>)> = None;
    for (extent, e) in arena.extents.iter().filter(|(_, e)| e.pages as usize >= need) {
        let span = blocks.min(e.out.len());
        for from in 0..=e.out.len() - span {
            let out = e.out[from..from + span].iter().sum();
            let open = e.blocked[from..from + span].iter().all(|blocked| *blocked == 0);
            if open && near.as_ref().is_none_or(|near| out < near.0) {
                let pages = [from, from + span].map(|block| block * windows::BLOCK as usize);
                near = Some((out, extent, pages[0]..pages[1].min(e.pages as usize)));
            }
        }
    }
    let near = near.and_then(|(_, extent, pages)| best_of(arena, extent, pages, need, align));
    let all = || {
        let each = arena.extents.iter().filter(|(_, e)| e.pages as usize >= need);
        let each = each.filter_map(|(extent, e)| best_of(arena, extent, 0..e.pages as usize, need, align));
        each.min_by_key(|found| found.0)
    };
    near.or_else(all).map(|found| found.1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// The search, which slides, finds what trying all ranges one by one finds.
    #[test]
    fn the_best_window_is_chosen(
        extents in prop::collection::vec(1usize..1500, 1..3),
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
            prop_assert_eq!(arena.choose_window(need, align), best_window(&arena, need, align));
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
                        for (id, _, _) in &windows {
                            let (first, end) = arena.window_addresses(id.index()).unwrap();
                            prop_assert!(at < first || at >= end, "taken from a window");
                        }
                        held.push(descriptor);
                    }
                }
                8 | 9 if windows.len() < 4 => {
                    let (pages, align) = (len.div_ceil(PAGE), if what == 8 { 1 } else { 1 << (shift % 5) });
                    if let Some(range) = arena.choose_window(pages, align) {
                        windows.push((arena.withhold(range, pages, align), pages, align));
                    }
                }
                10 if !windows.is_empty() => {
                    let (id, _, _) = windows.swap_remove(pick.index(windows.len()));
                    let (was, can) = (arena.range(id), shift % 2 == 0);
                    arena.release_window(id);
                    arena.release_idle();
                    if can {
                        prop_assert!(arena.can_withhold(was));
                        windows.push((arena.withhold(was, 1, 1), 1, 1));
                    }
                }
                11 => { arena.set_eager(shift % 2 == 0); arena.shorten_runs(); }
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
            let mut ranges: Vec<_> =
                windows.iter().map(|w| arena.window_addresses(w.0.index()).unwrap()).collect();
            ranges.sort_unstable();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
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

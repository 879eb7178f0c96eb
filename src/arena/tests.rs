//! Tests of the arena. It only does arithmetic on addresses, so no memory is mapped.

use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

/// The address of a page. No thread accesses it: the arena only does arithmetic on it.
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
    }
}

#[test]
fn tables_stay_below_one_percent() {
    for len in [4096, 5000, 6000, 10_000, 65_536, 1 << 20] {
        let mut arena = arena(&[(64 << 20) / PAGE]);
        while take(&mut arena, len, 64).is_some() {}
        let runs = arena.runs.iter();
        let runs = runs.map(|(_, r)| size_of::<Run>() + r.count as usize * size_of::<Descriptor>());
        let tables = runs.sum::<usize>() + arena.extents[0].map.len() * size_of::<u32>();
        assert!(tables * 100 < arena.bytes().total, "{len}: {tables}");
    }
}

/// A class's first run is a page, or what one segment needs; each further run doubles the class.
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

/// The runs of [`violation`], by their numbers.
const OF_CLASS: usize = 0;
const SINGLE: usize = 1;

/// Puts another descriptor in the place of one of the first run.
fn replace(arena: &mut Arena, at: usize, by: isize, run: u32) {
    // SAFETY: the run has that many descriptors, and no other code uses them meanwhile.
    unsafe {
        let place = arena.runs[OF_CLASS].descriptors.add(at);
        let base = NonNull::new(place.as_ref().base().as_ptr().wrapping_offset(by)).unwrap();
        place.write(Descriptor::new(base, place.as_ref().class(), run, 0));
    }
}

/// A change of the arena and of what is cached that `check` must notice.
type Spoil = fn(&mut Arena, &mut HashSet<usize>);

/// What `check` says of an arena after `spoil` has changed it. The arena has 64 pages: a run of a
/// class with four of its segments out and three free, then a free run, and behind it an aligned
/// segment. With `window`, the first 40 pages are withheld.
fn violation(window: bool, spoil: Spoil) -> String {
    let mut arena = arena(&[64]);
    for _ in 0..4 {
        take(&mut arena, 500, 64).unwrap();
    }
    take(&mut arena, 4096, 4096).unwrap();
    let mut outside = HashSet::new();
    if window {
        withhold_ranges(&mut arena, vec![range(0, 40)]);
    }
    arena.check(&outside, |_, _, _| {}).unwrap();
    spoil(&mut arena, &mut outside);
    arena.check(&outside, |_, _, _| {}).expect_err("a violation goes unnoticed")
}

fn listed(arena: &Arena, at: usize) -> &Descriptor {
    arena.runs[OF_CLASS].list.iter().nth(at).unwrap()
}

#[test]
fn check_sees_what_is_wrong() {
    let no_end = "extent 0: the free run at page 1 has no valid last page";
    let sums = "the sums are ";
    let cases: [(&str, Spoil); 20] = [
        (no_end, |arena, _| arena.extents[0].map[61] = FREE | 1),
        ("extent 0: the free run at page 0 has no valid last page", |arena, _| {
            arena.extents[0].map[0] = FREE
        }),
        ("extent 0: two free runs meet at page 6", |arena, _| {
            arena.remove_free(0, 1, 61);
            arena.insert_free(0, 1, 5);
            arena.insert_free(0, 6, 56);
        }),
        (
            "extent 0: the free run at page 1 is in None; withheld: false; in the set of free runs: false",
            |arena, _| {
                assert!(arena.free.remove(&(61, 0, 1)));
            },
        ),
        ("the set of free runs has others than the page maps", |arena, _| {
            assert!(arena.free.insert((1, 0, 62)));
        }),
        ("extent 0: no run 77 at page 0", |arena, _| arena.extents[0].map[0] = 77),
        ("run 1 is not where the page map says", |arena, _| arena.extents[0].map[0] = SINGLE as u32),
        ("run 0 has 3 free segments; in the set of its class: false", |arena, _| {
            arena.partial.iter_mut().for_each(BTreeSet::clear);
        }),
        ("run 0 has 0 free segments; in the set of its class: true", |arena, _| {
            while arena.runs[OF_CLASS].list.pop().is_some() {}
        }),
        ("a descriptor of run 0 says that it belongs to run 9", |arena, _| replace(arena, 2, 0, 9)),
        ("run 0: segment 2 overlaps, leaves its run, or is misaligned", |arena, _| replace(arena, 1, 64, 0)),
        ("run 0: segment 6 overlaps, leaves its run, or is misaligned", |arena, _| {
            replace(arena, 6, PAGE as isize, 0);
        }),
        ("run 0: segment 4 is free or checked out and is in 2 lists", |arena, outside| {
            outside.insert(std::ptr::from_ref(listed(arena, 0)).addr());
        }),
        ("run 0: segment 4 is in flight and is in 1 lists", |arena, _| {
            _ = listed(arena, 0).set(state::FLIGHT)
        }),
        ("1 segments are cached, and 0 of them belong to the arena", |_, outside| {
            assert!(outside.insert(1));
        }),
        ("run 0: its list counts 3 segments but holds 2", |arena, _| {
            // SAFETY: it is alive. That it is in a list is what is to be noticed.
            unsafe { Chain::new().push(NonNull::from(listed(arena, 1))) };
        }),
        ("run 0: its list holds descriptors that are not its own", |arena, _| {
            let stray = arena.descriptor(&arena.runs[SINGLE], 0);
            // SAFETY: it is alive. That it is in the list of another run is what is to be noticed.
            unsafe { arena.runs[OF_CLASS].list.push(stray) };
        }),
        ("run 0 is not in use", |arena, _| {
            for out in (0..4).map(|n| arena.descriptor(&arena.runs[OF_CLASS], n)).collect::<Vec<_>>() {
                // SAFETY: it is alive, and in no list.
                unsafe { arena.runs[OF_CLASS].list.push(out) };
            }
        }),
        (sums, |arena, _| arena.total += PAGE),
        (sums, |arena, _| arena.cut += 32),
    ];
    let counts: [Spoil; 3] =
        [|arena, _| arena.out += 32, |arena, _| arena.unheld += 32, |arena, _| arena.carved[0] += 1];
    for (says, spoil) in cases.into_iter().chain(counts.map(|spoil| (sums, spoil))) {
        let said = violation(false, spoil);
        assert!(said.starts_with(says), "{said}, and not {says}");
    }
    let of_windows: [(&str, Spoil); 8] = [
        (sums, |arena, _| arena.windows[0].out += 1),
        ("run 0 has segments out in a window, which does not know its class", |arena, _| {
            arena.windows[0].classes = 0;
        }),
        ("run 0 is in None, and its pages are in Some", |arena, _| arena.runs[OF_CLASS].window = None),
        ("a window leaves its extent: ", |arena, _| arena.windows[0].ranges[0].end = 0),
        ("windows overlap: ", |arena, _| arena.windows[0].ranges.push(range(0, 40))),
        ("extent 0: the free run at page 1 leaves its window", |arena, _| {
            arena.windows[0].ranges[0].end = 30;
        }),
        // A window's edge lies in the single segment's run.
        ("run 1 is in Some", |arena, _| {
            let id = withhold_ranges(arena, vec![range(62, 64)]);
            arena.windows[id].ranges[0].end = 63;
        }),
        ("run 0: segment 0 is in a window, and is cached", |arena, outside| {
            assert!(outside.insert(arena.runs[OF_CLASS].descriptors.addr().get()));
        }),
    ];
    for (says, spoil) in of_windows {
        let said = violation(true, spoil);
        assert!(said.starts_with(says), "{said}, and not {says}");
    }
}

#[test]
fn regions_are_told_apart() {
    let mut arena = arena(&[16, 16]);
    // SAFETY: nothing dereferences the memory in these tests.
    unsafe { arena.add_extent(RegionId(1), base(1 << 21), 8 * PAGE, false) };
    let first = take(&mut arena, 10 * PAGE, 4096).unwrap();
    let second = take(&mut arena, 12 * PAGE, 4096).unwrap();
    let known = |arena: &Arena| -> Vec<_> {
        let known = arena.regions().into_iter();
        known.map(|(id, region)| (id.0, region.bytes / PAGE, region.idle, region.stuck)).collect()
    };
    assert_eq!(known(&arena), [(0, 16, false, false), (1, 24, false, false)]);
    assert_eq!((arena.bytes().total, arena.unpinned()), (40 * PAGE, 8 * PAGE));
    // SAFETY: both are out, so alive.
    assert!(unsafe { arena.pinned(first) && arena.pinned(second) });
    let plain = take(&mut arena, 7 * PAGE, 4096).unwrap();
    // SAFETY: out, so alive.
    assert!(!unsafe { arena.pinned(plain) }, "the smallest run that fits is that of the plain memory");
    give(&mut arena, plain);
    assert!(arena.retire(RegionId(1)).is_none());
    give(&mut arena, second);
    assert_eq!(known(&arena)[1], (1, 24, true, false));
    assert_eq!(arena.retire(RegionId(1)), Some(24 * PAGE));
    let left = arena.bytes();
    assert_eq!((left.total, arena.unpinned(), left.largest_free), (16 * PAGE, 0, 5 * PAGE));
    quarantine(&mut arena, first);
    assert_eq!(known(&arena), [(0, 16, false, true)]);
    arena.check(&HashSet::new(), |_, _, _| {}).unwrap();
}

// --- windows -------------------------------------------------------------------------------------

fn withhold_ranges(arena: &mut Arena, ranges: Vec<PageRange>) -> WindowId {
    arena.withhold(Window::new(0, ranges, false))
}

/// A range of the first extent.
fn range(first: u32, end: u32) -> PageRange {
    PageRange { extent: 0, first, end, begin: first }
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
fn regions_with_the_fewest_bytes_out_are_replaced_first() {
    // Three regions with an extent each. The last one has a quarantined segment. Segments are
    // given the shortest free run that has room for them.
    let replaced = |out: [usize; 2], pages: usize, most: usize| {
        let mut arena = arena(&[16, 64, 15]);
        let [last, ..] = [15, out[0], out[1]].map(|n| take(&mut arena, n * PAGE - 32, 4096).unwrap());
        quarantine(&mut arena, last);
        let ranges = arena.replaceable(pages * PAGE, most, &[])?;
        assert!(ranges.iter().all(|range| range.first == 0 && range.end == [16, 64][range.extent as usize]));
        Some(ranges.iter().map(|range| range.extent).collect::<Vec<_>>())
    };
    assert_eq!(replaced([14, 20], 10, 1), Some(vec![0]));
    assert_eq!(replaced([14, 10], 10, 1), Some(vec![1]));
    assert_eq!(replaced([14, 20], 65, 2), Some(vec![0, 1]));
    assert_eq!(replaced([14, 20], 17, 1), None, "two would be needed");
    assert_eq!(replaced([14, 20], 81, 3), None, "the quarantined segment's region stays");
}

/// What `fits` says is what there is room for.
#[test]
fn so_many_fit_as_can_be_taken() {
    for (len, align) in [(100, 64), (5000, 64), (300_000, 64), (10 * PAGE, 4096), (3 * PAGE, 16 * PAGE)] {
        let mut arena = arena(&[70, 33, 128]);
        let fits = arena.fits(Placement::of(len, align).unwrap());
        let taken = std::iter::from_fn(|| take(&mut arena, len, align)).count();
        assert!(taken <= fits && fits - taken <= fits / 8, "{len}: {taken} of {fits}");
        assert!(align == 64 || taken == fits, "{len}: {taken} of {fits}");
    }
}

/// The fewest bytes out that a range of at least `need` pages with an aligned first page may have:
/// tries all ranges of whole runs and free pages.
fn fewest_out(arena: &Arena, need: usize, align: usize) -> Option<usize> {
    let mut fewest = None;
    for (_, e) in &arena.extents {
        let page = e.base.as_ptr().addr() / PAGE;
        // Of each page: bytes out, whether a window may have it, and whether a range may end there.
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
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Segments are as long and as aligned as asked for, and do not overlap. Those inside of
    /// windows are given to no one, and windows never meet. The search for a window finds no worse
    /// range than trying all, and one whose segments are back has its pages.
    #[test]
    fn any_order_of_takes_gives_and_windows_keeps_the_invariants(
        extents in prop::collection::vec(1usize..400, 1..3),
        steps in prop::collection::vec((0u8..16, 1usize..2_000_000, 0u32..15, any::<prop::sample::Index>()), 1..120),
    ) {
        let mut arena = arena(&extents);
        let mut held: Vec<NonNull<Descriptor>> = Vec::new();
        let mut lost = Vec::new();
        let mut windows: Vec<(WindowId, usize, usize)> = Vec::new();
        // SAFETY: they are out, so alive.
        let place = |arena: &Arena, segment: NonNull<Descriptor>| unsafe {
            (segment.as_ref().base().addr().get(), arena.granted(segment))
        };
        for (what, len, shift, pick) in steps {
            let len = (len >> (len % 16)).max(1);
            match what {
                0..=7 => {
                    let align = if what < 5 { 64 } else { 1 << shift };
                    if let Some(descriptor) = take(&mut arena, len, align) {
                        let (at, bytes) = place(&arena, descriptor);
                        prop_assert!(at % align == 0 && bytes >= len.next_multiple_of(32) + 32);
                        for other in held.iter().chain(&lost) {
                            let (other, length) = place(&arena, *other);
                            prop_assert!(at + bytes <= other || other + length <= at, "segments overlap");
                        }
                        for (first, end) in arena.window_addresses() {
                            prop_assert!(at < first || at >= end, "taken from a window");
                        }
                        held.push(descriptor);
                    }
                }
                8 | 9 if windows.len() < 4 => {
                    let (pages, align) = (len.div_ceil(PAGE), if what == 8 { 1 } else { 1 << (shift % 5) });
                    let found = arena.choose_window(pages, align, &[]);
                    prop_assert_eq!(found.map(|range| out_in(&arena, range)), fewest_out(&arena, pages, align));
                    if let Some(range) = found {
                        windows.push((withhold_ranges(&mut arena, vec![range]), pages, align));
                    }
                }
                10 if !windows.is_empty() => {
                    let window = windows.swap_remove(pick.index(windows.len()));
                    let was = arena.release_window(window.0);
                    if shift % 2 == 0 {
                        windows.push((arena.withhold(was), window.1, window.2));
                    }
                }
                12 if !held.is_empty() && shift == 0 => {
                    let descriptor = held.swap_remove(pick.index(held.len()));
                    if let Some(id) = quarantine(&mut arena, descriptor) {
                        arena.release_window(id);
                        windows.retain(|window| window.0 != id);
                    }
                    lost.push(descriptor);
                }
                _ if !held.is_empty() => {
                    let descriptor = held.swap_remove(pick.index(held.len()));
                    give(&mut arena, descriptor);
                }
                _ => {}
            }
            arena.check(&HashSet::new(), |_, _, _| {}).map_err(TestCaseError::fail)?;
            let out: usize = held.iter().chain(&lost).map(|segment| place(&arena, *segment).1).sum();
            let bytes = arena.bytes();
            prop_assert_eq!(bytes.free + bytes.cut + out, bytes.total);
        }
        for descriptor in held.drain(..) {
            give(&mut arena, descriptor);
        }
        for (id, pages, align) in windows {
            prop_assert_eq!(arena.windows[id].out, 0);
            arena.release_window(id);
            let placement = Placement::Pages { span: pages * PAGE, align };
            let taken = arena.take(placement);
            prop_assert!(taken.is_some());
            give(&mut arena, taken.unwrap());
        }
        prop_assert!(!lost.is_empty() || arena.runs.is_empty());
        arena.check(&HashSet::new(), |_, _, _| {}).map_err(TestCaseError::fail)?;
    }
}

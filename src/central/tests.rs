//! What the central pool decides under its lock: whether a request may wait, what is pinned for it,
//! what is withheld for it, and what a check notices. All on an arena without memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::windows::MOST_WINDOWS;
use super::*;
use crate::arena::set_of;
use crate::freelist::cache::HeldCache;
use crate::freelist::list_of;
use crate::region::Owner;
use crate::segment::{PAGE, RegionId};
use crate::sync::thread;
use crate::telemetry::counters::ClassStats;
use crate::telemetry::ledger::{CheckoutSite, Tag};

const MIB: usize = 1 << 20;
const STRIDE: usize = 4096 + 64;
/// What a thread caches: half of it are two segments of 8 KiB.
const CACHE: usize = 4 * (8192 + 64);

/// A request for `pages` whole pages.
fn pages(pages: usize) -> Want {
    let len = pages * PAGE - 32;
    Want { len, placement: Placement::of(len, PAGE).unwrap() }
}

fn small(len: usize) -> Want {
    Want { len, placement: Placement::of(len, 64).unwrap() }
}

/// The class of 4 KiB.
fn class() -> Class {
    Class::of(4096).unwrap()
}

/// Adds a region of `pages` pages, which is one extent.
fn add(central: &CentralPool, region: usize, pages: usize) {
    let base = NonNull::new(std::ptr::without_provenance_mut((region + 1) << 22)).unwrap();
    // SAFETY: the arena only does arithmetic on it.
    unsafe { central.add_extent(RegionId(region as u64), base, pages * PAGE, true) };
}

/// A central pool with extents of these lengths in pages, each a region, and no room for more.
fn pool(extents: &[usize]) -> Arc<CentralPool> {
    caching(extents, CACHE, 0)
}

/// [`pool`], with this many bytes for a thread cache and for the transfer cache of a class.
fn caching(extents: &[usize], thread_cache: usize, transfer_cache: usize) -> Arc<CentralPool> {
    let config = CentralConfig {
        capacity: extents.iter().sum::<usize>() * PAGE,
        thread_cache,
        transfer_cache,
        largest: 4 * MIB - 32,
        step: 0,
        by_hand: true,
        devices: Vec::new(),
        track: false,
    };
    let central = CentralPool::new(config, None);
    (0..).zip(extents).for_each(|(region, pages)| add(&central, region, *pages));
    central
}

fn got(central: &CentralPool, len: usize) -> Fresh {
    let got = central.try_take(&[small(len)], ReclaimLevel::Idle).unwrap();
    got.expect("the memory should be enough").remove(0)
}

fn release(fresh: Fresh) {
    // SAFETY: the test owns it, and nothing uses it.
    unsafe { fresh.into_segment().release() };
}

/// The bytes of the region that is planned for these wants.
fn plan(core: &mut Core, wants: &[Want], may_move: bool) -> Option<usize> {
    core.plan(wants, may_move).then(|| std::mem::take(&mut core.planned))
}

/// A segment that was taken past the thread cache.
type Taken = NonNull<Descriptor>;

fn out(central: &CentralPool, want: Want) -> Taken {
    let mut core = central.core.lock();
    let descriptor = core.arena.take(want.placement).unwrap();
    core.took(descriptor, 0).into_segment().into_descriptor()
}

/// Returns it past the thread cache.
fn back(central: &CentralPool, taken: Taken) {
    // SAFETY: out, and returned once.
    let _ = unsafe { central.lock().put(taken, 0) };
}

fn base(taken: Taken) -> NonNull<u8> {
    // SAFETY: out, so alive.
    unsafe { taken.as_ref() }.base()
}

fn join(central: &CentralPool, wants: &[Want]) -> usize {
    central.join(wants.to_vec(), Wake::Thread(thread::current()), usize::MAX).unwrap()
}

fn waits(central: &CentralPool, key: usize) -> bool {
    central.core.lock().queue.waiting.contains_key(&key)
}

/// The segments that a waiter was granted.
fn granted(central: &CentralPool, key: usize) -> Vec<Segment> {
    let Some(Ok(fresh)) = central.look(key, None) else { panic!("it was not served") };
    fresh.into_iter().map(Fresh::into_segment).collect()
}

/// The addresses of the ranges that are withheld.
fn windows(central: &CentralPool) -> Vec<(usize, usize)> {
    central.core.lock().arena.window_addresses().collect()
}

fn has_window(central: &CentralPool, key: usize) -> bool {
    central.core.lock().arena.windows.iter().any(|(_, window)| window.owner == key)
}

// --- growth --------------------------------------------------------------------------------------

#[test]
fn a_wait_is_hopeless_if_nothing_can_end_it() {
    let need = 300 * PAGE;
    // The regions, the capacity, whether the pool grows, what is being pinned, what is quarantined;
    // and whether a wait for the whole of a region is hopeless, and one for 300 pages.
    let cases = [
        (1, 8 * MIB, 0, 0, 0, [false, false], "there is room"),
        (1, MIB, 0, 0, 0, [false, true], "the pool does not grow"),
        (1, 8 * MIB, 0, 0, 7 * MIB + PAGE, [true, true], "too little is not quarantined"),
        (0, need, 0, 0, 0, [false, false], "there is just enough room"),
        (0, need - PAGE, 0, 0, 0, [false, true], "there is a page too little"),
        (0, need, 0, 1, 0, [false, false], "what is being pinned may serve it"),
        (1, need, 1, 0, 0, [false, false], "the region may make way for another"),
    ];
    for (regions, capacity, step, growing, quarantined, hopeless, why) in cases {
        let central = pool(&vec![256; regions]);
        let mut core = central.core.lock();
        (core.config.capacity, core.config.step) = (capacity, step);
        (core.growing, core.quarantined) = (growing, quarantined);
        let found = [256, 300].map(|n| core.hopeless(&[pages(n)]).is_some());
        assert_eq!(found, hopeless, "{why}");
    }
    let central = pool(&[256, 256]);
    let core = central.core.lock();
    assert_eq!(
        [2, 3].map(|n| core.outgrow(&vec![pages(160); n])),
        [false, true],
        "they have to fit together"
    );
}

#[test]
fn a_plan_is_as_long_as_a_step_or_as_what_is_asked_for() {
    let central = pool(&[256]);
    // Before an aligned segment pages may be lost.
    let aligned = Want { len: PAGE, placement: Placement::Pages { span: 3 * PAGE, align: 8 } };
    // The pages of an extent, of the room and of a step; what is asked for; what is planned.
    let cases: [([usize; 3], &[Want], Option<usize>); 9] = [
        ([1024, 768, 2], &[small(100)], Some(2)),
        ([1024, 768, 2], &[pages(3)], Some(3)),
        ([1024, 768, 2], &[aligned], Some(3 + 7)),
        // What does not fit into one extent begins in the next.
        ([100, 768, 2], &[pages(60), pages(40)], Some(100)),
        ([100, 768, 2], &[pages(60), pages(60), pages(60)], Some(260)),
        // Never more than the capacity has room for.
        ([100, 150, 2], &[pages(60), pages(60)], Some(150)),
        ([100, 150, 1000], &[pages(1)], Some(150)),
        ([100, 150, 1000], &[pages(151)], None),
        ([100, 150, 0], &[pages(1)], None),
    ];
    for ([extent, room, step], wants, planned) in cases {
        let mut core = central.core.lock();
        core.config.largest = extent * PAGE - 32;
        (core.config.capacity, core.config.step) = (MIB + room * PAGE + 1, step * PAGE);
        assert_eq!(plan(&mut core, wants, false).map(|bytes| bytes / PAGE), planned, "{wants:?}");
        core.growing = 0;
        drop(core);
        assert_eq!(central.may_grow(wants), planned.is_some(), "{wants:?}");
    }
}

/// A growth that was refused is tried again for each request that is shorter.
#[test]
fn a_request_gets_no_error_of_a_growth_for_a_longer_one() {
    let (central, transient) = (pool(&[]), Error::Timeout(Duration::ZERO.into()));
    (central.core.lock().config.capacity, central.core.lock().config.step) = (MIB, 2 * PAGE);
    central.grow_by(200 * PAGE);
    let [large, small] = [200, 1].map(|n| join(&central, &[pages(n)]));
    central.grown(200 * PAGE, Some(&transient));
    assert!(waits(&central, small) && central.core.lock().growing == 2 * PAGE, "a step is tried");
    central.grown(2 * PAGE, Some(&transient));
    assert!(waits(&central, small) && central.core.lock().growing == PAGE, "and the page that is needed");
    central.grown(PAGE, Some(&transient));
    for key in [large, small] {
        assert!(matches!(central.look(key, None), Some(Err(Error::Timeout(_)))));
    }
}

#[test]
fn a_refused_growth_is_tried_again_at_half_the_length_and_after_pauses_that_double() {
    let central = pool(&[256]);
    let mut core = central.core.lock();
    (core.config.capacity, core.config.step) = (4 * MIB, 700 * PAGE);
    core.queue.join(vec![pages(300)], Wake::Thread(thread::current()));
    let planned = |core: &mut Core| {
        assert_eq!(core.grow_for_queue(), core.planned > 0);
        core.planned = 0;
        std::mem::take(&mut core.growing) / PAGE
    };
    let transient = Error::Timeout(Duration::ZERO.into());
    for pages in [700, 350, 300] {
        assert_eq!(planned(&mut core), pages);
        core.refuse(transient.clone(), pages * PAGE);
    }
    for looks in [1, 2, 4, 8, 8] {
        assert_eq!((planned(&mut core), core.refusal.as_ref().unwrap().looks), (0, looks));
        core.refusal.as_mut().unwrap().looks = 0;
        assert_eq!(planned(&mut core), 300);
        core.refuse(transient.clone(), 300 * PAGE);
    }
    core.refuse(Error::empty(), 300 * PAGE);
    core.refusal.as_mut().unwrap().looks = 0;
    assert_eq!(planned(&mut core), 0, "a refusal that does not pass");
    assert_eq!([256, 300].map(|n| core.hopeless(&[pages(n)])), [None, Some(Error::empty())]);
}

#[test]
fn idle_regions_make_way_newest_first() {
    let central = pool(&[256; 4]);
    let mut core = central.core.lock();
    core.config.step = 1;
    let held = [(); 4].map(|()| core.arena.take(pages(256).placement).unwrap());
    // SAFETY: each is out, and returned once.
    held[..3].iter().for_each(|segment| _ = unsafe { core.arena.give(*segment) });
    assert!(plan(&mut core, &[pages(512)], false).is_none(), "no region may be removed");
    core.growing = PAGE;
    assert!(plan(&mut core, &[pages(512)], true).is_none(), "another region is being pinned");
    core.growing = 0;
    assert!(plan(&mut core, &[pages(256)], true).is_none(), "the present regions serve it");
    assert!(plan(&mut core, &[pages(1024)], true).is_none(), "it would not help");
    assert_eq!(plan(&mut core, &[pages(512)], true), Some(2 * MIB));
    let left: Vec<_> = core.arena.regions().keys().map(|id| id.0).collect();
    assert_eq!((core.growing, left), (2 * MIB, vec![0, 3]), "region 3 is in use");
}

/// Regions that are withheld to be replaced may come back while other memory is being pinned, and
/// be all that there is when that is done.
#[test]
fn regions_to_replace_that_came_back_while_others_were_pinned_are_replaced() {
    for extent in [true, false] {
        let central = pool(&[256, 256]);
        let held = [256, 256].map(|n| out(&central, pages(n)));
        central.core.lock().config.capacity += if extent { 16 * PAGE } else { 0 };
        (central.core.lock().config.step, central.core.lock().growing) = (16 * PAGE, PAGE);
        let key = join(&central, &[pages(300)]);
        assert_eq!(windows(&central).len(), 0, "others are being pinned");
        central.grown(PAGE, None);
        assert_eq!(windows(&central).len(), 2, "both regions are withheld");
        central.core.lock().growing = 16 * PAGE;
        held.iter().for_each(|grant| back(&central, *grant));
        if extent {
            add(&central, 9, 16);
        } else {
            central.grown(16 * PAGE, None);
        }
        assert!(waits(&central, key));
        let core = central.core.lock();
        assert!(core.growing >= 300 * PAGE && !core.arena.regions().contains_key(&RegionId(0)));
    }
}

/// Between a region's last extent and the end of the growth nothing is withheld in vain.
#[test]
fn no_region_is_to_be_replaced_in_a_pool_that_does_not_grow() {
    let central = pool(&[256]);
    let _held = out(&central, pages(1));
    (central.core.lock().config.capacity, central.core.lock().growing) = (300 * PAGE, 16 * PAGE);
    let key = join(&central, &[pages(300)]);
    add(&central, 9, 16);
    assert!(waits(&central, key) && windows(&central).is_empty());
    central.grown(0, None);
    assert!(matches!(central.look(key, None), Some(Err(Error::Impossible { .. }))));
}

/// A request that no region holds has whole regions for a window. Others that get idle before these
/// make way for it all the same, and so do more than a window can have.
#[test]
fn idle_regions_make_way_for_the_head_whatever_is_withheld_for_it() {
    // The regions, the pages of each that stay out, and how many regions get free.
    for (regions, kept, free) in [(4, 2, 2), (40, 1, 39)] {
        let central = pool(&vec![64; regions]);
        let rests: Vec<_> = (0..kept).map(|_| [1, 63].map(|n| out(&central, pages(n)))[1]).collect();
        let held: Vec<_> = (0..free).map(|_| out(&central, pages(64))).collect();
        rests.iter().for_each(|rest| back(&central, *rest));
        central.core.lock().config.step = PAGE;
        let key = join(&central, &[pages(64 * free)]);
        assert_eq!(has_window(&central, key), kept == 2, "those of which least is out");
        held.iter().for_each(|taken| back(&central, *taken));
        let core = central.core.lock();
        assert_eq!((core.growing, core.arena.bytes().total), (64 * free * PAGE, 64 * kept * PAGE));
    }
}

/// Regions that are withheld to be replaced may have a buffer that stays out, while others get free
/// that would do: alone with the room that there is, or together with one that was withheld.
#[test]
fn regions_to_replace_that_do_not_empty_are_exchanged() {
    // The pages of each region that are out when the request comes, and that stay out, and the
    // room.
    for (before, after, room) in [(&[1, 2][..], &[1, 0][..], 64), (&[1, 2, 3, 4], &[1, 0, 0, 4], 0)] {
        let central = pool(&vec![64; before.len()]);
        let fill = |left: usize| [out(&central, pages(left)), out(&central, pages(64 - left))];
        let held: Vec<_> = before.iter().map(|left| fill(*left)).collect();
        held.iter().for_each(|[_, rest]| back(&central, *rest));
        central.core.lock().config.capacity += room * PAGE;
        central.core.lock().config.step = PAGE;
        let key = join(&central, &[pages(128)]);
        assert!(has_window(&central, key));
        for (at, _) in after.iter().enumerate().filter(|(_, left)| **left == 0) {
            back(&central, held[at][0]);
        }
        let look = || (0..64).for_each(|_| central.tick(&mut central.lock()));
        (0..8).for_each(|_| look());
        assert_eq!(central.core.lock().growing, 128 * PAGE, "{before:?}");
    }
}

/// Regions that are withheld to be replaced stay so while other memory is being pinned, and when
/// they are free.
#[test]
fn regions_to_replace_are_not_given_up_when_they_are_free() {
    let central = pool(&[256; 5]);
    let held = [(); 5].map(|()| out(&central, pages(256)));
    central.core.lock().config.step = PAGE;
    let [_head, key] = [256, 300].map(|n| join(&central, &[pages(n)]));
    let lies_in_its_window = |taken: &Taken| {
        let core = central.core.lock();
        // SAFETY: out, so alive.
        let id = unsafe { core.arena.window_of(*taken) };
        id.is_some_and(|id| core.arena.windows[id].owner == key)
    };
    let its = || held.iter().copied().filter(lies_in_its_window).collect::<Vec<_>>();
    let look = || (0..64).for_each(|_| central.tick(&mut central.lock()));
    let before = its();
    central.core.lock().growing = PAGE;
    (0..4).for_each(|_| look());
    assert_eq!((its(), before.len()), (before.clone(), 2), "others are being pinned");
    before.iter().for_each(|taken| back(&central, *taken));
    (0..4).for_each(|_| look());
    central.core.lock().growing = 0;
    look();
    assert_eq!(central.core.lock().growing, 300 * PAGE);
}

// --- windows -------------------------------------------------------------------------------------

#[test]
fn returns_look_at_closed_classes_until_the_waiter_is_gone() {
    let central = pool(&[256, 256]);
    // The first extent is filled.
    let [first, second, third, _] = [(); 4].map(|()| out(&central, small(4096)));
    while base(out(&central, pages(1))).addr().get() < 2 << 22 {}
    let inside = out(&central, small(4096));
    let kept = |descriptor| {
        let mut held = central.gate.enter(central.cache().unwrap()).unwrap();
        // SAFETY: out, and no waiter has a right to it.
        unsafe { held.put(descriptor, 4096, list_of(class())) }
    };
    // SAFETY: as above. The class has its room from here on.
    assert!(unsafe { central.keep(class(), first, 4096) });
    let key = join(&central, &[pages(256)]);
    assert_eq!(windows(&central)[0].0, base(inside).addr().get());
    assert_eq!([second, inside].map(|s| central.may_claim(class(), base(s))), [true, false]);
    assert!(central.may_claim(Class::of(100).unwrap(), base(inside)), "no segment of this class is out");
    central.leave(key);
    assert!(central.may_claim(class(), base(inside)));
    assert!(!kept(second), "the owner has not come by since");
    // SAFETY: as above.
    assert!(unsafe { central.keep(class(), second, 4096) } && kept(third));
}

#[test]
fn a_request_without_a_window_keeps_no_other_from_one() {
    let central = pool(&[256]);
    let _held: Vec<_> = (0..256).map(|_| out(&central, pages(1))).collect();
    let [first, second] = [200, 100].map(|n| join(&central, &[pages(n)]));
    assert_eq!(windows(&central).len(), 1, "only 56 pages are left");
    // A request for a class needs its class closed, although it finds no window.
    let [_, third] = [pages(50), small(100_000)].map(|want| join(&central, &[want]));
    assert_eq!((windows(&central).len(), has_window(&central, third)), (2, false));
    central.check(|_, _| ()).unwrap();
    central.leave(first);
    assert!(windows(&central).len() > 2 && has_window(&central, second));
    // The number of windows is bounded.
    let central = pool(&[40]);
    let _held: Vec<_> = (0..40).map(|_| out(&central, pages(1))).collect();
    let keys = [(); 40].map(|()| join(&central, &[pages(1)]));
    assert_eq!(windows(&central).len(), MOST_WINDOWS);
    central.leave(keys[0]);
    assert_eq!(windows(&central).len(), MOST_WINDOWS);
    // Waiters that can have no window do not count.
    let central = pool(&[256, 128]);
    let _held: Vec<_> = [256].into_iter().chain([1; 128]).map(|n| out(&central, pages(n))).collect();
    (0..=MOST_WINDOWS).for_each(|_| _ = join(&central, &[pages(256)]));
    assert_eq!(windows(&central).len(), 1);
    assert!(has_window(&central, join(&central, &[pages(2)])));
}

#[test]
fn a_window_that_does_not_empty_is_exchanged_and_less_often_each_time() {
    let central = pool(&[256, 256]);
    let held = [(); 2].map(|()| out(&central, pages(256)));
    let key = join(&central, &[pages(256)]);
    let look = || {
        (0..64).for_each(|_| central.tick(&mut central.lock()));
        central.check(|_, _| ()).unwrap();
        windows(&central)[0].0 >> 22
    };
    assert_eq!(windows(&central)[0].0 >> 22, 2);
    assert_eq!([(); 10].map(|()| look()), [2, 1, 1, 1, 2, 2, 2, 2, 2, 1]);
    let first = base(held[0]);
    back(&central, held[0]);
    assert_eq!(granted(&central, key)[0].base(), first);
}

#[test]
fn several_buffers_are_served_from_all_windows_and_all_runs() {
    let central = pool(&[4; MOST_WINDOWS + 1]);
    let held = [(); MOST_WINDOWS + 1].map(|()| out(&central, pages(4)));
    let key = join(&central, &[pages(3), pages(3)]);
    let ranges = windows(&central);
    assert_eq!(ranges.len(), 2, "a range for each");
    let is_inside = |at: usize| ranges.iter().any(|range| range.0 == at);
    let inside: Vec<_> = held.into_iter().filter(|grant| is_inside(base(*grant).addr().get())).collect();
    back(&central, inside[0]);
    assert!(waits(&central, key));
    back(&central, inside[1]);
    assert_eq!(granted(&central, key).len(), 2);
    // A part of the window, and what is free beside it.
    let central = pool(&[6, 3]);
    let held = [(); 9].map(|()| out(&central, pages(1)));
    let key = join(&central, &[pages(3), pages(3)]);
    let is_inside = |taken: &Taken| windows(&central)[0].0 >> 22 == base(*taken).addr().get() >> 22;
    let (mut inside, beside): (Vec<_>, Vec<_>) = held.into_iter().partition(is_inside);
    inside.sort_by_key(|taken| base(*taken));
    assert_eq!(inside.len(), 6);
    beside.into_iter().chain(inside.into_iter().take(3)).for_each(|taken| back(&central, taken));
    assert_eq!(granted(&central, key).len(), 2);
    // A window has no more ranges than returns look at.
    for (n, ranges) in [(32, 32), (33, 0)] {
        let central = pool(&[4; 33]);
        let _held = [(); 33].map(|()| out(&central, pages(4)));
        join(&central, &vec![pages(3); n]);
        assert_eq!(windows(&central).len(), ranges);
    }
    // Segments of runs, without a free page, and outside of the window.
    let central = pool(&[2, 2]);
    let held = [(); 6].map(|()| out(&central, small(1000)));
    let _rest = out(&central, pages(2));
    let key = join(&central, &[small(1000); 2]);
    let (first, end) = windows(&central)[0];
    let beside = held.into_iter().filter(|grant| !(first..end).contains(&base(*grant).addr().get()));
    beside.take(2).for_each(|grant| back(&central, grant));
    assert_eq!(granted(&central, key).len(), 2);
    // One that does not find enough keeps no other from what comes back.
    let central = pool(&[64, 64]);
    let held = [(); 2].map(|()| out(&central, pages(64)));
    let keys = [3, 2].map(|n| join(&central, &vec![pages(20); n]));
    back(&central, held[1]);
    assert_eq!(keys.map(|key| waits(&central, key)).iter().filter(|waits| **waits).count(), 1);
    central.check(|_, _| ()).unwrap();
}

#[test]
fn equal_requests_are_served_in_their_order_whichever_window_empties_first() {
    for wants in [vec![pages(3); 2], vec![pages(6)]] {
        let central = pool(&[6, 6]);
        let held = [(); 12].map(|()| out(&central, pages(1)));
        let keys = [(); 2].map(|()| join(&central, &wants));
        let (first, end) = windows(&central)[1];
        let inside = held.into_iter().filter(|taken| (first..end).contains(&base(*taken).addr().get()));
        inside.for_each(|taken| back(&central, taken));
        assert_eq!(granted(&central, keys[0]).len(), wants.len());
        assert!(waits(&central, keys[1]));
        central.check(|_, _| ()).unwrap();
    }
}

#[test]
fn what_a_leaving_waiter_was_granted_may_be_the_last_segment_of_a_closed_pool() {
    let central = pool(&[16]);
    let held = out(&central, pages(16));
    let key = join(&central, &[pages(16)]);
    back(&central, held);
    central.close();
    central.leave(key);
    let weak = Arc::downgrade(&central);
    drop(central);
    assert_eq!(weak.strong_count(), 0);
}

// --- caches --------------------------------------------------------------------------------------

#[test]
fn several_classes_have_a_part_of_a_thread_cache_and_one_alone_has_all() {
    let central = caching(&[1024], 128 * MIB, 0);
    let room = |len| {
        release(got(&central, len));
        CacheTable::mine(central.cache().unwrap()).room(Class::of(len).unwrap())
    };
    // Half of the bytes, and half of an eighth of them.
    assert_eq!([MIB, MIB / 2].map(room), [63, 15]);
}

#[test]
fn what_is_cached_is_reclaimed_where_that_may_serve_the_request() {
    let central = pool(&[256]);
    let other = central.begin_lease().unwrap();
    let cached = central.core.lock().arena.take(small(4096).placement).unwrap();
    put(&mut CacheTable::mine(&other), class(), cached);
    let _held: Vec<_> = (0..254).map(|_| out(&central, pages(1))).collect();
    let state = || (other.cached(class()), central.snapshot().stats.reclaims);
    let take = |want, level| central.try_take(&[want], level).unwrap().map(|mut all| all.remove(0));
    // It is too little, and nothing is cached of that class.
    assert!(take(small(8192), ReclaimLevel::All).is_none() && state() == (1, 0));
    let fresh = take(small(4096), ReclaimLevel::Idle).unwrap();
    assert_eq!(state(), (0, 1));
    central.transfers[list_of(class())].exceed(fresh.into_segment().into_descriptor());
    assert!(take(pages(1), ReclaimLevel::Idle).is_some());
}

#[test]
fn a_thread_that_ends_leaves_nothing_cached() {
    let central = pool(&[256]);
    let other = central.clone();
    std::thread::spawn(move || release(got(&other, 4096))).join().unwrap();
    assert_eq!((central.snapshot().takes, central.snapshot().cached), (1, 0));
}

// --- counts --------------------------------------------------------------------------------------

#[test]
fn the_census_counts_each_class_that_was_used() {
    let central = cached();
    let (_small, _large) = (out(&central, small(1000)), out(&central, pages(200)));
    let (_, classes) = central.snapshot_by_class();
    let counts = |c: &ClassStats| [c.cached, c.out, c.checkouts, c.returns];
    let counts: Vec<_> = classes.iter().map(counts).collect();
    assert_eq!(counts, [[0, 1, 1, 0], [1, 1, 2, 1], [0, 1, 1, 0]]);
    assert_ne!(central.number(), pool(&[]).number());
}

#[test]
fn an_entry_of_the_ledger_can_begin_anew() {
    let central = pool(&[256]);
    let site = |name| CheckoutSite { tag: Tag { name: Some(name), long_lived: false }, site: None };
    let (mut fresh, other) = (got(&central, 4096), got(&central, 4096));
    CentralPool::enter(&mut fresh, site("first"));
    for fresh in [&fresh, &other] {
        central.enter_again(fresh.segment(), site("second"));
    }
    let names = central.out_for(Duration::ZERO).into_iter().map(|out| out.entry?.origin.tag.name);
    assert_eq!(names.collect::<Vec<_>>(), [Some("second")]);
    release(fresh);
    release(other);
}

#[test]
fn what_is_given_back_at_once_was_never_in_use() {
    let central = pool(&[64]);
    assert!(central.try_take(&[pages(60), pages(10)], ReclaimLevel::All).unwrap().is_none());
    assert_eq!(central.take_peak(), 0);
    let held = out(&central, pages(10));
    let key = join(&central, &[pages(50), pages(10)]);
    assert_eq!([central.take_peak(), central.take_peak()], [10 * PAGE; 2]);
    back(&central, held);
    drop(granted(&central, key));
    assert_eq!(central.take_peak(), 60 * PAGE);
}

#[test]
fn a_thread_keeps_nothing_of_pools_that_are_gone_once_it_uses_another() {
    let caches = [(); 3].map(|()| {
        let central = pool(&[256]);
        release(got(&central, 4096));
        central.close();
        let core = central.core.lock();
        core.table.caches().next().map(Arc::downgrade).unwrap()
    });
    assert_eq!(caches.map(|cache| cache.strong_count()), [0, 0, 1]);
}

// --- checks --------------------------------------------------------------------------------------

/// A central pool with one segment out, and one cached by this thread.
fn cached() -> Arc<CentralPool> {
    let central = pool(&[256]);
    let (_out, back) = (got(&central, 4096), got(&central, 4096));
    release(back);
    assert_eq!((central.cache().unwrap().cached(class()), class().stride()), (1, STRIDE));
    central.check(|_, _| ()).unwrap();
    central
}

fn violation(central: &CentralPool) -> String {
    central.check(|_, _| ()).expect_err("a violation goes unnoticed")
}

/// Puts a segment into a list, which is given room and where the segment may be already.
fn put(held: &mut HeldCache<'_>, class: Class, descriptor: Taken) {
    let mut chain = held.revoke(class);
    held.grant(class, 100);
    // SAFETY: it is alive. If it is in a list too, that is to be noticed.
    unsafe { chain.push(descriptor) };
    assert!(held.fill(class, chain).is_empty());
}

#[test]
fn a_check_sees_what_is_cached_in_the_wrong_place_or_beyond_its_bound() {
    let take = |central: &CentralPool| central.core.lock().arena.take(small(4096).placement).unwrap();
    let central = cached();
    let (mut held, wrong) = (CacheTable::mine(central.cache().unwrap()), Class::of(8192).unwrap());
    put(&mut held, wrong, take(&central));
    assert!(violation(&central).ends_with(" is cached twice or under a wrong class"));
    // The cache is put in order again, since it is emptied when this thread ends.
    let taken = held.drain(wrong, 1).pop().unwrap();
    put(&mut held, class(), taken);
    (2..CACHE / STRIDE).for_each(|_| put(&mut held, class(), take(&central)));
    central.check(|_, _| ()).unwrap();
    put(&mut held, class(), take(&central));
    assert!(violation(&central).ends_with(&format!(" bytes of at most {CACHE}")));
    // A transfer cache has its quota to the nearest segment.
    let central = caching(&[256], CACHE, STRIDE);
    let exceed = || central.transfers[list_of(class())].exceed(take(&central));
    exceed();
    central.check(|_, _| ()).unwrap();
    exceed();
    assert!(violation(&central).starts_with("the transfer cache of "));
}

#[test]
fn a_check_sees_wrong_counts() {
    let central = cached();
    assert_eq!(central.unlisted_bytes(), (0, true));
    central.in_one(|central| assert!(!central.unlisted_bytes().1, "a change is under way"));
    let miscount = |takes: u64| central.core.lock().classes.count_on(class(), takes, 0);
    miscount(1);
    assert_eq!(violation(&central), "3 takes less 1 returns are not the 1 segments that are out");
    miscount(u64::MAX);
    central.core.lock().left = Some(2);
    assert_eq!(violation(&central), "Some(2) segments are counted as outstanding, 1 are");
}

#[test]
fn a_check_sees_what_returns_are_not_told() {
    let central = cached();
    let large = join(&central, &[pages(256)]);
    central.check(|_, _| ()).unwrap();
    central.core.lock().config.by_hand = false;
    assert!(violation(&central).ends_with("a request waits and no look is planned"));
    central.core.lock().config.by_hand = true;
    // The window has the segment that is out, and its class is closed for that.
    let (closed, this) = (&central.closed, set_of(class()));
    closed.set_classes([0, 0]);
    assert!(violation(&central).ends_with("closed by 0, and 1 is needed"));
    closed.set_classes([0, this]);
    central.check(|_, _| ()).unwrap();
    let next = join(&central, &[small(4096)]);
    closed.set_classes([0, this]);
    assert!(violation(&central).ends_with("closed by 1, and 2 is needed"));
    closed.set_classes([this, this]);
    central.check(|_, _| ()).unwrap();
    // A window that returns do not know, and one whose owner does not wait.
    closed.set_ranges(std::iter::empty());
    assert!(violation(&central).starts_with("returns do not find the window at "));
    closed.set_ranges(windows(&central).into_iter());
    central.check(|_, _| ()).unwrap();
    central.core.lock().arena.windows[0].owner = 77;
    assert_eq!(violation(&central), "request 77 has a window and does not wait, or has two");
    central.core.lock().arena.windows[0].owner = large;
    central.leave(large);
    central.check(|_, _| ()).unwrap();
    assert_eq!(granted(&central, next).len(), 1, "it is served with what the first was to have");
}

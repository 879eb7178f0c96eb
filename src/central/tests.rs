//! What the central pool decides under its lock: whether a request may wait, and what is pinned for it. All on an arena
//! whose memory is not touched; what counts as pinned is changed by hand.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::growth::{Refusal, least};
use super::*;
use crate::freelist::{list_of, state};
use crate::region::Owner;
use crate::segment::PAGE;
use crate::segment::RegionId;
use crate::sync::thread;
use crate::telemetry::ledger::CheckoutSite;

pub(super) const MIB: usize = 1 << 20;

/// What a thread caches in [`central`]: half of it are two segments of 8 KiB.
pub(super) const CACHE: usize = 4 * (8192 + 64);

/// A request for so many whole pages.
pub(super) fn pages(pages: usize) -> Want {
    let len = pages * PAGE - 32;
    Want { len, placement: Placement::of(len, PAGE).unwrap() }
}

pub(super) fn small(len: usize) -> Want {
    Want { len, placement: Placement::of(len, 64).unwrap() }
}

/// Where a region begins.
fn base(region: u64) -> NonNull<u8> {
    NonNull::new(std::ptr::without_provenance_mut((region as usize + 1) << 22)).unwrap()
}

/// Adds a region of so many bytes, which is one extent, to the central pool.
pub(super) fn add(central: &CentralPool, region: u64, bytes: usize) {
    // SAFETY: the arena only does arithmetic on it.
    unsafe { central.add_extent(RegionId(region), base(region), bytes, true) };
}

/// A central pool with extents of so many pages, each of which is a region.
pub(super) fn with_extents(config: CentralConfig, extents: &[usize]) -> Arc<CentralPool> {
    let central = CentralPool::new(config, None);
    (0..).zip(extents).for_each(|(region, pages)| add(&central, region, pages * PAGE));
    central
}

/// A central pool with 1 MiB.
pub(super) fn central(transfer_cache: usize) -> Arc<CentralPool> {
    let config = CentralConfig {
        capacity: MIB,
        thread_cache: CACHE,
        transfer_cache,
        largest: MIB - 32,
        step: 0,
        by_hand: true,
        serves: Vec::new(),
        track: false,
    };
    with_extents(config, &[MIB / PAGE])
}

/// A central pool with regions of 1 MiB each, which may hold `capacity` bytes and grows by two pages.
fn with_regions(regions: usize, capacity: usize) -> Arc<CentralPool> {
    let (largest, step) = (4 * MIB - 32, 2 * PAGE);
    let config = CentralConfig { capacity, largest, step, ..central(0).config.clone() };
    with_extents(config, &vec![256; regions])
}

fn join(core: &mut Core, want: Want) -> queue::Ticket {
    core.queue.join(vec![want], Wake::Thread(thread::current()))
}

/// A growth that failed for good.
fn refusal() -> Option<Refusal> {
    Some(Refusal::new(Error::empty(), 0))
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Argument(text) if text.contains("nothing to copy"))
}

pub(super) fn got(central: &CentralPool, len: usize) -> Fresh {
    let got = central.try_take(&[small(len)], ReclaimLevel::Idle).unwrap();
    got.expect("the memory should be enough").remove(0)
}

pub(super) fn release(fresh: Fresh) {
    // SAFETY: the test owns it, and nothing uses it.
    unsafe { fresh.into_segment().release() };
}

// --- whether a request may wait --------------------------------------------------------------------------------------

#[test]
fn a_wait_is_hopeless_if_nothing_can_end_it() {
    let long = [pages(300)];
    let need = 300 * PAGE;
    assert_eq!(least(&long), need);
    // The regions, the capacity, whether the pool grows, what is being pinned, what leaves, what is quarantined; and
    // whether a wait for the whole of a region is hopeless, and one for 300 pages.
    let cases = [
        (1, 8 * MIB, 0, 0, 0, 0, [false, false], "there is room"),
        (1, MIB, 0, 0, 0, 0, [false, true], "the pool does not grow"),
        (1, 8 * MIB, 0, 0, 0, 7 * MIB + PAGE, [true, true], "too little is not quarantined"),
        (0, need, 0, 0, 0, 0, [false, false], "there is just enough room"),
        (0, need - PAGE, 0, 0, 0, 0, [false, true], "there is a page too little"),
        (0, need, 0, 0, need, 0, [false, false], "what leaves makes room"),
        (1, need, 0, 0, PAGE, 0, [false, true], "what leaves makes too little room"),
        (0, need, 0, 1, 0, 0, [false, false], "what is being pinned may serve it"),
        (1, need, 0, 0, 0, 0, [false, true], "the pool does not grow, so the region stays"),
        (1, need, 1, 0, 0, 0, [false, false], "the region may make way for another"),
        (1, need - PAGE, 1, 0, 0, 0, [false, true], "what the region leaves is too little"),
    ];
    for (regions, capacity, step, growing, leaving, quarantined, hopeless, why) in cases {
        let central = with_regions(regions, capacity);
        let mut core = central.core.lock();
        (core.config.step, core.growing) = (step, growing);
        (core.leaving, core.quarantined) = (leaving, quarantined);
        let found = [pages(256), long[0]].map(|want| core.hopeless(&[want]).is_some());
        assert_eq!(found, hopeless, "{why}");
    }
}

#[test]
fn the_head_waits_as_long_as_anything_can_come() {
    let central = with_regions(1, MIB);
    let mut core = central.core.lock();
    core.config.step = 0;
    let head = pages(300);
    let key = join(&mut core, head);
    let waits = |core: &mut Core, growing, leaving| {
        (core.growing, core.leaving) = (growing, leaving);
        core.serve();
        core.queue.waits(key)
    };
    assert!(waits(&mut core, PAGE, 0) && waits(&mut core, 0, PAGE));
    let out = core.arena.take(small(5000).placement).unwrap();
    assert!(core.arena.bytes().cut > 0, "a part of the run has no segment");
    assert!(waits(&mut core, 0, 0) && core.wakes.is_empty());
    // SAFETY: it is out, and returned once.
    unsafe { core.arena.give(out) };
    assert!(!waits(&mut core, 0, 0));
    let (outcome, _) = core.queue.look(key, None);
    let Some(Err(Error::Impossible { len, .. })) = outcome else { panic!("{outcome:?}") };
    assert_eq!(len, head.len);
    assert_eq!(core.wakes.len(), 1);
    // What is quarantined does not come back. The error has the reason, where a growth has failed.
    let out = core.arena.take(small(5000).placement).unwrap();
    // SAFETY: it is out, so alive.
    core.quarantined = unsafe { core.arena.granted(out) };
    let key = join(&mut core, head);
    core.refusal = refusal();
    core.serve();
    assert!(matches!(core.queue.look(key, None).0, Some(Err(error)) if is_refusal(&error)));
}

// --- what is pinned --------------------------------------------------------------------------------------------------

#[test]
fn room_is_what_is_neither_held_nor_planned() {
    let central = with_regions(2, 8 * MIB + PAGE - 1);
    let mut core = central.core.lock();
    assert_eq!((core.room(), core.movable()), (6 * MIB, 8 * MIB), "whole pages");
    (core.growing, core.leaving) = (MIB, PAGE);
    assert_eq!((core.room(), core.movable()), (5 * MIB - PAGE, 7 * MIB));
    let stuck = core.arena.take(pages(256).placement).unwrap();
    // SAFETY: it is out, so alive.
    unsafe {
        stuck.as_ref().set(state::QUARANTINED);
        assert!(core.arena.quarantine(stuck).is_none());
    }
    core.quarantined = MIB;
    assert_eq!(core.movable(), 6 * MIB, "a region with a quarantined segment stays");
    (core.config.step, core.config.capacity) = (0, MIB);
    assert_eq!(core.room(), 0);
    assert_eq!(core.movable(), 0, "a pool that does not grow exchanges no region");
}

#[test]
fn a_plan_is_as_long_as_a_step_or_as_what_is_asked_for() {
    let central = with_regions(1, 4 * MIB);
    let mut core = central.core.lock();
    // Before an aligned segment pages may be lost.
    let aligned = Want { len: PAGE, placement: Placement::Pages { span: 3 * PAGE, align: 8 } };
    // The pages of an extent, of the room and of a step; what is asked for; the pages that are planned.
    let cases: [([usize; 3], &[Want], Option<usize>); 11] = [
        ([1024, 768, 2], &[small(100)], Some(2)),
        ([1024, 768, 2], &[pages(2)], Some(2)),
        ([1024, 768, 2], &[pages(3)], Some(3)),
        ([1024, 768, 2], &[aligned], Some(3 + 7)),
        // What does not fit into one extent begins in the next.
        ([100, 768, 2], &[pages(60), pages(40)], Some(100)),
        ([100, 768, 2], &[pages(60), pages(41)], Some(141)),
        ([100, 768, 2], &[pages(60), pages(60), pages(60)], Some(260)),
        // Never more than the capacity has room for.
        ([100, 150, 2], &[pages(60), pages(60)], Some(150)),
        ([100, 150, 1000], &[pages(1)], Some(150)),
        ([100, 150, 1000], &[pages(151)], None),
        ([100, 150, 0], &[pages(1)], None),
    ];
    for ([extent, room, step], wants, planned) in cases {
        core.config.largest = extent * PAGE - 32;
        (core.config.capacity, core.config.step) = (MIB + room * PAGE, step * PAGE);
        let growth = core.plan(wants, false);
        if let Some(growth) = &growth {
            assert_eq!((growth.going.len(), growth.bytes), (0, core.growing));
        }
        assert_eq!(growth.map(|growth| growth.bytes / PAGE), planned, "{wants:?}");
        core.growing = 0;
    }
    assert_eq!(core.stats.growths, 9);
}

/// A growth that was refused is followed by shorter ones, down to what is needed, and then by one after each pause.
#[test]
fn a_refused_growth_is_tried_again_at_half_the_length() {
    let transient = Error::Timeout(Duration::ZERO.into());
    let central = with_regions(1, 4 * MIB);
    let mut core = central.core.lock();
    core.config.step = 700 * PAGE;
    join(&mut core, pages(300));
    // What was refused, in pages, whether a pause has passed since, and what is planned then.
    let cases = [
        (None, false, 700),
        (Some(700), false, 350),
        (Some(350), false, 300),
        (Some(300), false, 0),
        (Some(300), true, 300),
    ];
    for (refused, is_due, planned) in cases {
        core.refusal = refused.map(|pages| Refusal::new(transient.clone(), pages * PAGE));
        if is_due {
            core.growth_is_due();
        }
        assert_eq!(core.grow_for_head(), planned > 0);
        assert_eq!(std::mem::take(&mut core.growing), planned * PAGE);
    }
    core.refusal = refusal();
    core.growth_is_due();
    assert!(!core.grow_for_head(), "a refusal that does not pass");
    assert!(core.hopeless(&[pages(300)]).is_some_and(|error| is_refusal(&error)));
    assert!(core.hopeless(&[pages(256)]).is_none(), "the present region serves it");
}

/// A growth that was refused is tried again for each request that is shorter, waiting or not.
#[test]
fn a_request_gets_no_error_of_a_growth_for_a_longer_one() {
    let transient = Error::Timeout(Duration::ZERO.into());
    let config = CentralConfig { by_hand: false, step: 2 * PAGE, ..central(0).config.clone() };
    let central = with_extents(config, &[]);
    central.plan_bytes(200 * PAGE);
    let join = |n| central.join(vec![pages(n)], Wake::Thread(thread::current()), usize::MAX).unwrap();
    let [large, small] = [200, 1].map(join);
    central.grown(200 * PAGE, Some(&transient));
    assert!(central.waits(small) && central.core.lock().growing > 0, "a page is tried");
    // It is refused down to the one page.
    loop {
        let refused = central.core.lock().growing;
        if refused == 0 {
            break;
        }
        central.grown(refused, Some(&transient));
    }
    for key in [large, small] {
        assert!(matches!(central.look(key, None), Some(Err(Error::Timeout(_)))));
    }
    // What is there can serve the first one, and only growing the next, which comes after the refusal.
    let central = with_extents(central.config.clone(), &[16; 3]);
    let _out = [(); 3].map(|()| central.core.lock().arena.take(pages(16).placement).unwrap());
    let join = |wants| central.join(wants, Wake::Thread(thread::current()), usize::MAX);
    let first = join(vec![pages(12); 3]).unwrap();
    central.core.lock().growing = 0;
    central.grown(36 * PAGE, Some(&transient));
    let next = join(vec![pages(20)]).unwrap();
    assert!(central.waits(first) && central.waits(next) && central.core.lock().growing >= 20 * PAGE);
}

#[test]
fn idle_regions_make_way_newest_first() {
    let going = |growth: &queue::Growth| -> Vec<u64> { growth.going.iter().map(|(id, _)| id.0).collect() };
    let long = [pages(512)];
    // Two regions have to go, of three; or one, where there is room for half of it.
    for (regions, gone) in [(3, vec![2, 1]), (2, vec![1])] {
        let central = with_regions(regions, 3 * MIB);
        let mut core = central.core.lock();
        assert!(core.plan(&long, false).is_none(), "no region may be removed");
        core.growing = PAGE;
        assert!(core.plan(&long, true).is_none(), "another region is being pinned");
        core.growing = 0;
        let growth = core.plan(&long, true).unwrap();
        assert_eq!((going(&growth), growth.bytes), (gone, 2 * MIB));
        assert_eq!((core.growing, core.leaving), (2 * MIB, growth.going.len() * MIB));
        assert_eq!(core.arena.bytes().total, MIB);
    }
    // A region in use stays, and none goes where that does not help.
    let central = with_regions(3, 3 * MIB);
    let mut core = central.core.lock();
    let held: Vec<_> = (0..3).map(|_| core.arena.take(pages(256).placement).unwrap()).collect();
    // SAFETY: out, and returned once.
    unsafe { core.arena.give(held[0]) };
    assert!(core.plan(&[pages(256)], true).is_none(), "the present regions serve it");
    assert!(core.plan(&long, true).is_none());
    assert_eq!((core.arena.bytes().total, core.leaving, core.growing), (3 * MIB, 0, 0));
    // SAFETY: as above.
    unsafe { core.arena.give(held[2]) };
    assert_eq!(going(&core.plan(&long, true).unwrap()), [2, 0]);
    // Four idle regions of 256 pages hold four buffers of 129 pages and not five, which one region in their place
    // holds.
    let central = with_regions(4, 4 * MIB);
    let mut core = central.lock();
    assert!(core.plan(&[pages(129); 4], true).is_none());
    assert!(core.plan(&[pages(129); 5], true).is_some());
}

/// Regions are exchanged once for each waiter, and room is used all the same.
#[test]
fn a_region_is_planned_for_a_head_that_needs_one() {
    let central = with_regions(1, 2 * MIB - PAGE);
    let mut core = central.core.lock();
    let key = join(&mut core, pages(512));
    assert!(!core.grow_for_head());
    // What is free counts, since idle regions may be exchanged.
    core.config.capacity = 2 * MIB;
    assert!(core.grow_for_head(), "region 0 makes way");
    assert_eq!((core.growing, core.leaving), (2 * MIB, MIB));
    assert!(core.queue.replaced(key));
    (core.growing, core.leaving) = (0, 0);
    // SAFETY: the arena only does arithmetic on it.
    unsafe { core.arena.add_extent(RegionId(7), base(7), MIB, true) };
    assert!(!core.grow_for_head());
    core.config.capacity = 3 * MIB;
    assert!(core.grow_for_head());
}

// --- reclaiming ------------------------------------------------------------------------------------------------------

/// A central pool with 1 MiB, all of which a thread may cache. Of the segments of `len` bytes this thread has cached
/// one, and the others are out.
fn all_out_but_one(len: usize, by_hand: bool) -> (Arc<CentralPool>, Vec<Fresh>) {
    let config = CentralConfig { thread_cache: 4 * MIB, by_hand, ..central(0).config.clone() };
    let central = with_extents(config, &[256]);
    let mut out = Vec::new();
    while let Some(fresh) = central.try_take(&[small(len)], ReclaimLevel::All).unwrap() {
        out.extend(fresh);
    }
    assert_eq!(central.core.lock().stats.reclaims, 0, "there was nothing to reclaim");
    release(out.pop().unwrap());
    assert_eq!(cached(&central, len), 1);
    (central, out)
}

/// Segments of the class of `len` that this thread has cached.
fn cached(central: &CentralPool, len: usize) -> u64 {
    central.cache().unwrap().cached(Class::of(len).unwrap())
}

/// Whether another thread gets a segment.
fn elsewhere(central: &CentralPool, want: Want, level: ReclaimLevel) -> bool {
    std::thread::scope(|scope| {
        scope.spawn(|| central.try_take(&[want], level).unwrap().is_some()).join().unwrap()
    })
}

#[test]
fn what_idle_threads_have_cached_is_reclaimed_where_that_may_help() {
    const LEN: usize = 100_000;
    let (central, _out) = all_out_but_one(LEN, true);
    let now = || (cached(&central, LEN), central.core.lock().stats.reclaims);
    assert!(!elsewhere(&central, pages(60), ReclaimLevel::All), "that is more than could get free");
    assert_eq!(now(), (1, 0));
    assert!(elsewhere(&central, small(LEN), ReclaimLevel::Idle));
    assert_eq!(now(), (0, 1));
    let caches = central.core.lock().table.caches().count();
    assert_eq!(caches, 1, "the caches of threads that ended are gone");
}

/// What idle threads have cached stays theirs where it would take the caches of busy threads to serve the request.
#[test]
fn idle_threads_keep_what_helps_only_with_the_caches_of_busy_ones() {
    const LEN: usize = 100_000;
    let (central, mut out) = all_out_but_one(LEN, false);
    let central = &*central;
    let mut all = || out.pop().unwrap();
    let idle = all();
    (0..2).for_each(|_| release(all()));
    // This thread is the busy one: it works between two looks at it, however late the second one comes.
    let asks_later = |want| {
        std::thread::sleep(Duration::from_millis(2));
        release(got(central, LEN));
        elsewhere(central, want, ReclaimLevel::Idle)
    };
    let all_cached = || {
        let core = central.core.lock();
        let class = Class::of(LEN).unwrap();
        (core.table.caches().map(|cache| cache.cached(class)).sum::<u64>(), core.stats.reclaims)
    };
    std::thread::scope(|scope| {
        // Dropped at the end, by a panic too: then the idle thread ends.
        let (_end, ends) = std::sync::mpsc::channel::<()>();
        let (idles, begun) = std::sync::mpsc::channel();
        scope.spawn(move || {
            release(idle);
            idles.send(()).unwrap();
            ends.recv().unwrap_err();
        });
        begun.recv().unwrap();
        // The first look notes the counts.
        assert!(!elsewhere(central, pages(60), ReclaimLevel::Idle));
        assert!(!asks_later(pages(60)));
        assert_eq!((cached(central, LEN), all_cached()), (3, (4, 0)));
        asks_later(pages(20));
        assert_eq!((cached(central, LEN), all_cached()), (3, (3, 1)), "this alone may help");
    });
}

#[test]
fn what_is_in_transfer_caches_serves_every_request() {
    let central = central(MIB);
    let (class, cache) = (Class::of(4096).unwrap(), central.cache().unwrap());
    let transfer = || {
        let mut core = central.core.lock();
        let mut held = CacheTable::mine(cache);
        if held.room(class) == 0 {
            held.grant(class, 2);
        }
        (0..2).for_each(|_| assert!(held.fill(class, core.arena.take_batch(class, 1)).is_empty()));
        assert_eq!(held.offload(class, 2, &central.transfers[list_of(class)]), 2);
        assert!(!cache.any_cached());
    };
    transfer();
    release(central.refill(class, 4096).unwrap());
    assert_eq!(central.trim(MIB), 0);
    assert_eq!(central.core.lock().arena.bytes().free, MIB);
    transfer();
    assert_eq!(central.trim(0), MIB, "although no thread has anything");
    add(&central, 1, MIB);
    transfer();
    let before = central.core.lock().stats.reclaims;
    let takes = |want| central.try_take(&[want], ReclaimLevel::Idle).unwrap().is_some();
    assert!(takes(pages(256)) && !takes(small(100)));
    assert_eq!(central.core.lock().stats.reclaims, before + 1, "there was nothing the second time");
}

#[test]
fn a_thread_keeps_nothing_of_pools_that_are_gone_once_it_uses_another() {
    let caches = [(); 3].map(|()| {
        let central = central(0);
        release(got(&central, 4096));
        central.close();
        let core = central.core.lock();
        core.table.caches().next().map(Arc::downgrade).unwrap()
    });
    assert_eq!(caches.map(|cache| cache.strong_count()), [0, 0, 1]);
}

/// How many segments of each size a thread's cache has room for.
#[test]
fn a_class_alone_has_half_of_a_threads_cache_and_several_share_an_eighth() {
    const CACHE: usize = 64 * MIB;
    let mut config = central(0).config.clone();
    (config.capacity, config.thread_cache, config.largest) = (1024 * MIB, CACHE, 512 * MIB);
    let central = CentralPool::new(config, None);
    let cache = central.cache().unwrap();
    let class = |len: usize| Class::of(len).unwrap();
    let fit = |bytes: usize, len: usize| (bytes / class(len).stride()) as u32;
    let room = |len: usize| central.room(&mut central.core.lock(), cache, class(len));
    let now = |len: usize| central.gate.enter(cache).unwrap().room(class(len));
    let bytes = |len: usize, room: u32| class(len).stride() * room as usize;
    // Alone, a class has half of the bytes, and its room stays as it is.
    let (large, medium, small) = (2 * MIB, 100_000, 5000);
    let half = fit(CACHE / 2, large);
    assert_eq!([room(large), room(large)], [half, half]);
    // Several share an eighth, for which the large class makes room.
    let shared = CACHE / 8;
    let first = fit(shared / 2, medium);
    assert_eq!((room(medium), now(large)), (first, 0));
    assert_eq!((room(small), now(large), now(medium)), (64, 0, first), "64 segments at most");
    // Half of what is left, two at least, until two do not fit.
    let mut left = shared - bytes(medium, first) - bytes(small, 64);
    let more = [150_000, 200_000, 250_000, 300_000];
    for len in more {
        let granted = fit(left / 2, len).max(2);
        assert_eq!(room(len), granted);
        left -= bytes(len, granted);
    }
    let last = 900_000;
    assert!(left < bytes(last, 2));
    // The class that has the most room beyond two segments loses it, and the others keep theirs.
    let kept = more.map(now);
    assert_eq!((room(last), now(medium)), (fit((left + bytes(medium, first)) / 2, last).max(2), 0));
    assert_eq!((more.map(now), now(small)), (kept, 64));
    // A class that a request waits for gets no room.
    join(&mut central.core.lock(), central.place(small, 64).unwrap());
    assert_eq!((room(small), room(last) > 0), (0, true));
}

// --- the census ------------------------------------------------------------------------------------------------------

/// A report has the recorded checkouts and the quarantined segments, each once.
#[test]
fn what_is_recorded_or_quarantined_is_listed() {
    let central = central(0);
    let [mut entered, mut both, lost] = [4096, 300_000, 5000].map(|len| got(&central, len));
    for fresh in [&mut entered, &mut both] {
        CentralPool::enter(fresh, CheckoutSite::default());
    }
    assert!(central.out_for(Duration::from_secs(3600)).is_empty());
    let expected = [
        (&entered, state::HOST, true),
        (&lost, state::QUARANTINED, false),
        (&both, state::QUARANTINED, true),
    ]
    .map(|(fresh, state, is_entered)| {
        let segment = fresh.segment();
        (segment.name(), state, segment.granted(), is_entered)
    });
    for fresh in [both, lost] {
        let segment = fresh.into_segment();
        segment.descriptor().set(state::QUARANTINED);
        segment.quarantine();
    }
    let listed = || {
        let mut out = central.out_for(Duration::ZERO);
        out.sort_by_key(|out| (out.state, out.granted));
        let part = |out: &OutSegment| (out.descriptor, out.state, out.granted, out.entry.is_some());
        out.iter().map(part).collect::<Vec<_>>()
    };
    assert_eq!(listed(), expected);
    release(entered);
    assert_eq!(listed(), expected[1..]);
}

#[test]
fn snapshots_count_what_there_is() {
    let central = central(0);
    assert!(central.snapshot_by_class().1.is_empty(), "no class was used");
    release(got(&central, 5000));
    assert!(central.trim(0) > 0);
    let [class] = central.snapshot_by_class().1[..] else { panic!("a class was used") };
    let stride = Class::of(5000).map(Class::stride);
    assert_eq!((class.stride, class.checkouts, class.returns, class.free), (stride, 1, 1, 0));
    add(&central, 1, MIB);
    let mut segment = got(&central, 5000).into_segment();
    segment.rebook(700);
    let (snapshot, classes) = central.snapshot_by_class();
    assert_eq!((segment.len(), snapshot.requested, snapshot.out), (700, 700, segment.granted()));
    let [class] = classes[..] else { panic!("{classes:?}") };
    assert_eq!((class.out, class.free), (1, 0));
    // Calls under way may have been counted on one side only.
    assert!(snapshot.cut > 0);
    let large = Class::of(MIB).unwrap();
    for (takes, puts, out) in [(2, 0, snapshot.total - snapshot.cut), (0, 4, 0)] {
        central.core.lock().classes.count_on(large, takes, puts);
        let snapshot = central.snapshot();
        assert_eq!((snapshot.out, snapshot.free), (out, snapshot.total - snapshot.cut - out));
    }
    // Checks are told of a change in several steps while it is under way.
    assert_eq!(central.unlisted_bytes(), (0, true));
    assert_eq!(central.in_one(CentralPool::unlisted_bytes), (0, false));
}

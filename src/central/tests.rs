//! What the central pool decides under its lock: whether a request may wait, and what is pinned for it. All on an arena
//! whose memory is not touched; what counts as pinned is changed by hand.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::growth::{Refusal, growth_failure, least};
use super::transfer::tests::central;
use super::*;
use crate::freelist::{list_of, state};
use crate::segment::PAGE;
use crate::segment::RegionId;
use crate::sync::thread;
use crate::telemetry::ledger::CheckoutSite;

const MIB: usize = 1 << 20;

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

/// A central pool with regions of 1 MiB each, which may hold `capacity` bytes.
fn with_regions(regions: usize, capacity: usize) -> Arc<CentralPool> {
    let config = CentralConfig { capacity: 8 * MIB, ..central(0).config.clone() };
    let central = with_extents(config, &vec![256; regions]);
    {
        let mut core = central.core.lock();
        (core.capacity, core.extent, core.step) = (capacity, 4 * MIB, 2 * PAGE);
    }
    central
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
        (0, need - PAGE, 0, 0, PAGE, 0, [false, true], "what leaves takes room until it has left"),
        (0, MIB, 0, 0, need, 0, [false, false], "what leaves makes room"),
        (0, MIB, 0, 0, need - PAGE, 0, [false, true], "what leaves makes too little room"),
        (0, MIB, 0, 1, 0, 0, [false, false], "what is being pinned may serve it"),
        (1, need, 0, 0, 0, 0, [false, true], "the region stays for good where the pool does not grow"),
        (1, need, 1, 0, 0, 0, [false, false], "the region may make way for another"),
        (1, need - PAGE, 1, 0, 0, 0, [false, true], "what the region leaves is too little"),
    ];
    for (regions, capacity, step, growing, leaving, quarantined, hopeless, why) in cases {
        let central = with_regions(regions, capacity);
        let mut core = central.core.lock();
        (core.step, core.growing, core.leaving, core.quarantined) = (step, growing, leaving, quarantined);
        let found = [pages(256), long[0]].map(|want| central.hopeless(&core, &[want]).is_some());
        assert_eq!(found, hopeless, "{why}");
    }
}

#[test]
fn a_failed_growth_ends_waits_that_need_another() {
    let central = with_regions(1, MIB);
    let (fits, long) = ([pages(256)], [pages(300)]);
    let mut core = central.core.lock();
    assert!(growth_failure(&core, &long).is_none());
    core.refusal = refusal();
    assert!(growth_failure(&core, &long).is_some_and(|error| is_refusal(&error)));
    assert!(growth_failure(&core, &fits).is_none(), "the present region serves it");
    core.growing = PAGE;
    assert!(growth_failure(&core, &long).is_none(), "the next growth is under way");
    // Also of those that wait, and though segments may come back.
    core.capacity = 4 * MIB;
    assert!(core.arena.take(pages(1).placement).is_some());
    let key = join(&mut core, long[0]);
    drop(core);
    central.grown(PAGE, Some(&Error::empty()));
    assert!(matches!(central.look(key, None), WaitOutcome::Failed(error) if is_refusal(&error)));
}

#[test]
fn what_is_out_can_come_back() {
    let central = with_regions(1, MIB);
    let mut core = central.core.lock();
    assert!(!core.anything_out());
    let first = core.arena.take(small(5000).placement).unwrap();
    assert!(core.arena.bytes().cut > 0, "a part of the run has no segment");
    assert!(core.anything_out());
    // SAFETY: it is out, so alive.
    core.quarantined = unsafe { core.arena.granted(first) };
    assert!(!core.anything_out());
    core.arena.take(small(5000).placement).unwrap();
    assert!(core.anything_out());
}

#[test]
fn the_head_waits_as_long_as_anything_can_come() {
    let central = with_regions(1, MIB);
    let mut core = central.core.lock();
    core.step = 0;
    let head = pages(300);
    let key = join(&mut core, head);
    let waits = |core: &mut Core, growing, leaving| {
        (core.growing, core.leaving) = (growing, leaving);
        core.serve();
        core.queue.waits(key)
    };
    assert!(waits(&mut core, PAGE, 0) && waits(&mut core, 0, PAGE));
    let out = core.arena.take(pages(1).placement).unwrap();
    assert!(waits(&mut core, 0, 0) && core.wakes.is_empty());
    // SAFETY: it is out, and returned once.
    unsafe { core.arena.give(out) };
    assert!(!waits(&mut core, 0, 0));
    let (outcome, _) = core.queue.look(key, None);
    assert!(
        matches!(outcome, WaitOutcome::Failed(Error::Impossible { len, .. }) if len == head.len),
        "{outcome:?}"
    );
    assert_eq!(core.wakes.len(), 1);
    // With the reason, where a growth has failed.
    let key = join(&mut core, head);
    core.refusal = refusal();
    core.serve();
    assert!(matches!(core.queue.look(key, None).0, WaitOutcome::Failed(error) if is_refusal(&error)));
}

#[test]
fn room_is_what_is_neither_held_nor_planned() {
    let central = with_regions(2, 8 * MIB);
    let mut core = central.core.lock();
    assert_eq!((core.room(), core.movable()), (6 * MIB, 8 * MIB));
    (core.growing, core.leaving) = (MIB, PAGE);
    assert_eq!((core.room(), core.movable()), (5 * MIB - PAGE, 7 * MIB));
    core.capacity += PAGE - 1;
    assert_eq!((core.room(), core.movable()), (5 * MIB - PAGE, 7 * MIB), "whole pages");
    core.capacity -= PAGE - 1;
    let stuck = core.arena.take(pages(256).placement).unwrap();
    // SAFETY: it is out, so alive.
    unsafe {
        stuck.as_ref().set(state::QUARANTINED);
        assert!(core.arena.quarantine(stuck).is_none());
    }
    core.quarantined = MIB;
    assert_eq!(
        (core.room(), core.movable()),
        (5 * MIB - PAGE, 6 * MIB),
        "a region with a quarantined segment stays"
    );
    core.step = 0;
    assert_eq!(core.movable(), 0, "a pool that does not grow exchanges no region");
    core.capacity = MIB;
    assert_eq!(core.room(), 0);
}

#[test]
fn a_plan_is_as_long_as_a_step_or_as_what_is_asked_for() {
    let central = with_regions(1, 4 * MIB);
    let mut core = central.core.lock();
    let planned = |core: &mut Core, wants: &[Want]| {
        let growth = core.plan(wants, false)?;
        assert!(growth.going.is_empty() && core.growing == growth.bytes);
        core.growing = 0;
        Some(growth.bytes / PAGE)
    };
    assert_eq!(planned(&mut core, &[small(100)]), Some(2), "a step");
    assert_eq!(core.stats.growths, 1);
    assert_eq!(planned(&mut core, &[pages(2)]), Some(2));
    assert_eq!(planned(&mut core, &[pages(3)]), Some(3));
    // Before an aligned segment pages may be lost.
    let aligned = Want { len: PAGE, placement: Placement::Pages { span: 3 * PAGE, align: 8 } };
    assert_eq!(planned(&mut core, &[aligned]), Some(3 + 7));
    // Extents of 100 pages: what does not fit into one begins in the next.
    core.extent = 100 * PAGE;
    assert_eq!(planned(&mut core, &[pages(60), pages(40)]), Some(100));
    assert_eq!(planned(&mut core, &[pages(60), pages(41)]), Some(141));
    assert_eq!(planned(&mut core, &[pages(60), pages(60), pages(60)]), Some(260));
    // Never more than the capacity has room for.
    core.capacity = MIB + 150 * PAGE;
    assert_eq!(planned(&mut core, &[pages(60), pages(60)]), Some(150));
    core.step = 1000 * PAGE;
    assert_eq!(planned(&mut core, &[pages(1)]), Some(150));
    assert_eq!(planned(&mut core, &[pages(150)]), Some(150));
    assert_eq!(planned(&mut core, &[pages(151)]), None);
    core.step = 0;
    assert_eq!(planned(&mut core, &[pages(1)]), None, "this pool does not grow");
}

#[test]
fn nothing_is_planned_while_memory_is_being_pinned() {
    let central = with_regions(1, 64 * MIB);
    let grows = |growing, extents| {
        central.core.lock().growing = growing;
        assert!(central.grow(&[pages(300)], extents));
        let mut core = central.core.lock();
        assert_eq!((std::mem::take(&mut core.growing), core.stats.growths), (growing, 0));
    };
    grows(PAGE, central.extents());
    // Memory has come since the request was tried.
    assert_eq!(central.extents(), 1);
    grows(0, 0);
    add(&central, 1, PAGE);
    grows(0, 1);
}

/// A growth that was refused is followed by shorter ones, down to what is needed, and then by one after each pause.
#[test]
fn a_refused_growth_is_tried_again_at_half_the_length() {
    let transient = Error::Timeout(Duration::ZERO.into());
    let central = with_regions(1, 4 * MIB);
    let planned = |central: &CentralPool| {
        let growth = |wake: &Wake| if let Wake::Grow(_, growth) = wake { growth.bytes / PAGE } else { 0 };
        let mut core = central.core.lock();
        core.grow_for_head();
        let bytes = core.wakes.iter().map(growth).sum::<usize>();
        core.wakes.clear();
        core.growing = 0;
        bytes
    };
    let refuse = |pages: usize| {
        central.core.lock().refusal = Some(Refusal::new(transient.clone(), pages * PAGE));
    };
    join(&mut central.core.lock(), pages(300));
    central.core.lock().step = 700 * PAGE;
    assert_eq!(planned(&central), 700);
    refuse(700);
    assert_eq!(planned(&central), 350);
    refuse(350);
    assert_eq!(planned(&central), 300, "what is needed");
    refuse(300);
    assert_eq!(planned(&central), 0, "a pause comes first");
    central.core.lock().growth_is_due();
    assert_eq!([(); 2].map(|()| planned(&central)), [300, 0], "once after each pause");
    central.core.lock().refusal = refusal();
    central.core.lock().growth_is_due();
    assert_eq!(planned(&central), 0, "a refusal that does not pass");
}

#[test]
fn idle_regions_make_way_newest_first() {
    let going = |growth: &queue::Growth| growth.going.iter().map(|(id, _)| id.0).collect::<Vec<_>>();
    let long = [pages(512)];
    // Two regions have to go, of three; or one, where there is room for half of it.
    for (regions, gone) in [(3, vec![2, 1]), (2, vec![1])] {
        let central = with_regions(regions, 3 * MIB);
        let mut core = central.core.lock();
        assert!(core.plan(&long, false).is_none(), "no region may be removed");
        core.growing = PAGE;
        assert!(core.plan(&long, true).is_none(), "another region is being pinned");
        core.growing = 0;
        assert!(core.never(&[pages(256)]).is_none(), "the present regions serve it");
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
    // Four idle regions of 256 pages hold four buffers of 129 pages and not five, which one region in their place holds.
    let central = with_regions(4, 4 * MIB);
    let mut core = central.lock();
    assert!(core.plan(&[pages(129); 4], true).is_none() && core.plan(&[pages(129); 5], true).is_some());
}

#[test]
fn a_region_is_planned_for_a_head_that_needs_one() {
    let central = with_regions(1, 3 * MIB);
    let mut core = central.core.lock();
    assert!(!core.grow_for_head(), "no request waits");
    let key = join(&mut core, pages(512));
    core.refusal = refusal();
    assert!(!core.grow_for_head());
    core.refusal = None;
    // What is free counts, since idle regions may be exchanged.
    core.capacity = 2 * MIB - PAGE;
    assert!(!core.grow_for_head());
    core.capacity = 2 * MIB;
    assert!(core.grow_for_head(), "region 0 makes way");
    assert!(matches!(&core.wakes[..], [Wake::Grow(..)]));
    assert_eq!((core.growing, core.leaving), (2 * MIB, MIB));
    assert!(core.queue.replaced(key));
    // Regions are exchanged once for each waiter, and room is used all the same.
    (core.growing, core.leaving) = (0, 0);
    // SAFETY: the arena only does arithmetic on it.
    unsafe { core.arena.add_extent(RegionId(7), base(7), MIB, true) };
    assert!(!core.grow_for_head());
    core.capacity = 3 * MIB;
    assert!(core.grow_for_head());
    let _ = core.queue.remove(key);
    (core.growing, core.step) = (0, 0);
    let key = join(&mut core, pages(100));
    assert!(!core.grow_for_head(), "this pool does not grow");
    let _ = core.queue.remove(key);
}

/// A central pool with 1 MiB, all of which a thread may cache. Of the segments of `len` bytes this thread has cached one,
/// and the others are out.
fn all_out_but_one(len: usize, timeless: bool) -> (Arc<CentralPool>, Vec<Fresh>) {
    let config = CentralConfig { thread_cache: 4 * MIB, timeless, ..central(0).config.clone() };
    let central = with_extents(config, &[256]);
    let mut out = Vec::new();
    while let Some(fresh) = central.try_take(small(len), ReclaimLevel::All).unwrap() {
        out.push(fresh);
    }
    assert_eq!(central.core.lock().stats.reclaims, 0, "there was nothing to reclaim");
    release(out.pop().unwrap());
    assert_eq!(cached(&central, len), 1);
    (central, out)
}

pub(super) fn got(central: &CentralPool, len: usize) -> Fresh {
    central.try_take(small(len), ReclaimLevel::Idle).unwrap().expect("the memory should be enough")
}

pub(super) fn release(fresh: Fresh) {
    // SAFETY: the test owns it, and nothing uses it.
    unsafe { fresh.into_segment().release() };
}

/// Segments of the class of `len` that this thread has cached.
fn cached(central: &CentralPool, len: usize) -> u64 {
    central.cache().unwrap().cached(Class::of(len).unwrap())
}

/// What `f` finds on another thread.
fn elsewhere(f: impl FnOnce() -> bool + Send) -> bool {
    std::thread::scope(|scope| scope.spawn(f).join().unwrap())
}

#[test]
fn what_idle_threads_have_cached_is_reclaimed_where_that_may_help() {
    let (central, _out) = all_out_but_one(100_000, true);
    let takes = |want, level| central.try_take(want, level).unwrap().is_some();
    assert!(!elsewhere(|| takes(pages(60), ReclaimLevel::All)), "that is more than could get free");
    assert_eq!((cached(&central, 100_000), central.core.lock().stats.reclaims), (1, 0));
    assert!(elsewhere(|| takes(small(100_000), ReclaimLevel::Idle)));
    assert_eq!((cached(&central, 100_000), central.core.lock().stats.reclaims), (0, 1));
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
    let asks = |want| elsewhere(|| central.try_take(want, ReclaimLevel::Idle).unwrap().is_some());
    // This thread is the busy one: it works between two looks at it, however late the second one comes.
    let asks_later = |want| {
        std::thread::sleep(Duration::from_millis(2));
        release(got(central, LEN));
        asks(want)
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
        assert!(!asks(pages(60)), "the first look notes the counts");
        assert!(!asks_later(pages(60)));
        assert_eq!((cached(central, LEN), all_cached()), (3, (4, 0)));
        asks_later(pages(20));
        assert_eq!((cached(central, LEN), all_cached()), (3, (3, 1)), "this alone may help");
    });
}

/// What busy threads have cached is theirs, unless the request can be served in no other way.
#[test]
fn what_busy_threads_have_cached_is_reclaimed_by_levels() {
    use ReclaimLevel::{All, Idle};
    type Takes<'a> = &'a (dyn Fn(&CentralPool, ReclaimLevel) -> bool + Sync);
    const LEN: usize = 300_000;
    let one = |want| move |central: &CentralPool, level| central.try_take(want, level).unwrap().is_some();
    let several = |central: &CentralPool, level| central.try_take_all(&[pages(70)], level).unwrap().is_some();
    // A request for the same class, another one, and one for several buffers.
    let requests: [Takes<'_>; 3] = [&one(small(LEN)), &one(pages(70)), &several];
    for takes in requests {
        let (central, _out) = all_out_but_one(LEN, false);
        assert!(!elsewhere(|| takes(&central, Idle)));
        assert_eq!(cached(&central, LEN), 1);
        // This thread works between the looks at it, however late the second one comes.
        release(got(&central, LEN));
        assert!(elsewhere(|| takes(&central, All)));
        assert_eq!(cached(&central, LEN), 0);
    }
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
        assert!(held.offload(class, 2, &central.transfers[list_of(class)]) == 2 && !cache.any_cached());
    };
    let reclaims = || central.core.lock().stats.reclaims;
    transfer();
    release(central.refill(class, 4096).unwrap());
    assert!(central.core.lock().arena.bytes().free < MIB);
    assert_eq!(central.trim(MIB), 0);
    assert_eq!(central.core.lock().arena.bytes().free, MIB);
    transfer();
    assert_eq!(central.trim(0), MIB, "although no thread has anything");
    add(&central, 1, MIB);
    transfer();
    let before = reclaims();
    assert!(central.try_take(pages(256), ReclaimLevel::Idle).unwrap().is_some());
    assert_eq!(reclaims(), before + 1);
    assert!(central.try_take(small(100), ReclaimLevel::Idle).unwrap().is_none());
    assert_eq!(reclaims(), before + 1, "there was nothing");
}

/// A buffer that is dropped behind its thread's leases goes to its run.
#[test]
fn a_thread_that_ends_leaves_nothing_cached() {
    struct Last(std::cell::Cell<Option<Fresh>>);
    impl Drop for Last {
        fn drop(&mut self) {
            self.0.take().into_iter().for_each(release);
        }
    }
    std::thread_local! {
        static LAST: Last = const { Last(std::cell::Cell::new(None)) };
    }
    let central = central(0);
    for _ in 0..2 {
        let other = central.clone();
        let thread = std::thread::spawn(move || {
            // What was used first is destroyed last.
            LAST.with(|_| ());
            let (cached, last) = (got(&other, 4096), got(&other, 4096));
            release(cached);
            assert!(other.cache().unwrap().any_cached());
            LAST.with(|place| place.0.set(Some(last)));
        });
        thread.join().unwrap();
        let snapshot = central.snapshot();
        assert_eq!((snapshot.out, snapshot.cached), (0, 0));
        central.check(|_, _| ()).unwrap();
    }
    assert_eq!(central.core.lock().table.caches().count(), 0);
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

/// A report has the recorded checkouts and the quarantined segments, each once.
#[test]
fn what_is_recorded_or_quarantined_is_listed() {
    let central = central(0);
    let [mut entered, mut both, lost, _other] = [4096, 300_000, 5000, 5000].map(|len| got(&central, len));
    let listed = || {
        let mut out = central.out_for(Duration::ZERO);
        out.sort_by_key(|out| (out.state, out.granted));
        let part = |out: &OutSegment| (out.descriptor, out.state, out.granted, out.entry.is_some());
        out.iter().map(part).collect::<Vec<_>>()
    };
    let as_listed = |fresh: &Fresh, state, is_entered| {
        let segment = fresh.segment();
        (std::ptr::from_ref(segment.descriptor()).addr(), state, segment.granted(), is_entered)
    };
    assert!(listed().is_empty());
    for fresh in [&mut entered, &mut both] {
        CentralPool::enter(fresh, CheckoutSite::default());
    }
    assert_eq!(listed(), [&entered, &both].map(|fresh| as_listed(fresh, state::HOST, true)));
    assert!(central.out_for(Duration::from_secs(3600)).is_empty());
    let all = [
        as_listed(&entered, state::HOST, true),
        as_listed(&lost, state::QUARANTINED, false),
        as_listed(&both, state::QUARANTINED, true),
    ];
    for fresh in [both, lost] {
        let segment = fresh.into_segment();
        segment.descriptor().set(state::QUARANTINED);
        segment.quarantine();
    }
    assert_eq!(listed(), all);
    release(entered);
    assert_eq!(listed(), all[1..]);
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

#[test]
fn memory_of_the_caller_may_take_all_the_room_there_is() {
    let device = crate::Device::open("host").unwrap();
    let builder = crate::Pool::builder(&device).capacity(MIB).initial(0).unpinned(crate::Unpinned::Allow);
    let pool = builder.build().unwrap();
    let [all, more] = [MIB, PAGE].map(|len| memmap2::MmapMut::map_anon(len).unwrap());
    assert_eq!(pool.adopt(all).unwrap().len, MIB);
    let error = pool.adopt(more).unwrap_err().error;
    let Error::Exhausted(shortage) = &error else { panic!("{error}") };
    assert_eq!((shortage.requested, shortage.capacity), (PAGE, MIB));
    assert!(error.to_string().contains("; 0 bytes are left for memory to adopt; trim the pool"), "{error}");
}

#[test]
fn growth_is_possible_with_room_and_after_no_failure() {
    let central = with_regions(1, 3 * MIB);
    let may_grow = |growing: usize, refusal: Option<Refusal>, step: usize, needed: usize| {
        let mut core = central.core.lock();
        (core.growing, core.refusal, core.step) = (growing, refusal, step);
        drop(core);
        central.may_grow(&[pages(needed)])
    };
    assert!(may_grow(0, None, PAGE, 512) && !may_grow(0, None, PAGE, 513));
    assert!(!may_grow(0, None, 0, 1), "this pool does not grow");
    assert!(!may_grow(0, refusal(), PAGE, 1));
    // What is planned counts at once.
    assert!(
        may_grow(MIB, None, PAGE, 256)
            && !may_grow(MIB, None, PAGE, 257)
            && !may_grow(2 * MIB, None, PAGE, 1)
    );
}

/// How many segments of each size a thread's cache has room for.
#[test]
fn a_class_alone_has_half_of_a_threads_cache_and_several_share_an_eighth() {
    const CACHE: usize = 64 * MIB;
    let config = CentralConfig {
        capacity: 1024 * MIB,
        thread_cache: CACHE,
        largest: 512 * MIB,
        ..central(0).config.clone()
    };
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
    let key = join(&mut central.core.lock(), central.place(small, 64).unwrap());
    assert_eq!((room(small), room(last) > 0), (0, true));
    let _ = central.core.lock().queue.remove(key);
}

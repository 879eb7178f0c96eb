//! What the central pool decides under its lock: whether a request may wait, and what is pinned for it. All on an arena
//! whose memory is not touched; what counts as pinned is changed by hand.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::growth::growth_failure;
use super::growth::least;
use super::transfer::tests::central;
use super::*;
use crate::freelist::{list_of, state};
use crate::region::RegionId;
use crate::segment::PAGE;
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

/// A central pool with extents of so many pages, each of which is a region.
pub(super) fn with_extents(config: CentralConfig, extents: &[usize]) -> Arc<CentralPool> {
    let central = CentralPool::new(config, None);
    for (i, pages) in extents.iter().enumerate() {
        let base = NonNull::new(std::ptr::without_provenance_mut((i + 1) << 22)).unwrap();
        // SAFETY: the arena only does arithmetic on it.
        unsafe { central.add_extent(RegionId(i as u64), base, pages * PAGE, true) };
    }
    central
}

/// A central pool with regions of 1 MiB each, which may hold `capacity` bytes. Its region 0 is the helper's.
fn with_regions(regions: usize, capacity: usize) -> Arc<CentralPool> {
    let central = with_extents(central(0).config.clone(), &vec![256; regions]);
    {
        let mut core = central.core.lock();
        (core.capacity, core.extent, core.step) = (capacity, 4 * MIB, 2 * PAGE);
    }
    central
}

#[test]
fn a_wait_is_hopeless_if_nothing_can_end_it() {
    let central = with_regions(1, MIB);
    let fits = [pages(256)];
    let (long, least) = ([pages(300)], least(&[pages(300)]));
    assert_eq!(least, 300 * PAGE);
    let mut core = central.core.lock();
    core.step = 0;
    let hopeless = |core: &Core, wants: &[Want]| central.hopeless(core, wants).is_some();
    assert!(!hopeless(&core, &fits), "the whole pool");
    assert!(hopeless(&core, &long), "more than the pool may hold");
    core.quarantined = PAGE;
    assert!(hopeless(&core, &fits), "a part of the whole is quarantined");
    core.quarantined = 0;
    drop(core);

    // A pool that may hold more than it does.
    let config = CentralConfig { capacity: 4 * MIB, ..central.config.clone() };
    let central = CentralPool::new(config, None);
    let mut core = central.core.lock();
    core.step = 0;
    let hopeless = |core: &Core| central.hopeless(core, &long).is_some();
    core.capacity = least;
    assert!(!hopeless(&core), "there is just enough room");
    core.capacity = least - PAGE;
    assert!(hopeless(&core));
    core.leaving = PAGE;
    assert!(hopeless(&core), "what leaves takes room until it has left");
    core.capacity = MIB;
    core.leaving = least;
    assert!(!hopeless(&core), "what leaves makes room");
    core.leaving = least - PAGE;
    assert!(hopeless(&core));
    core.leaving = 0;
    core.growing = 1;
    assert!(!hopeless(&core), "what is being pinned may serve it");
    core.growing = 0;
    // SAFETY: the arena only does arithmetic on it.
    unsafe {
        let base = NonNull::new(std::ptr::without_provenance_mut(MIB)).unwrap();
        core.arena.add_extent(RegionId(0), base, MIB, true);
    }
    core.capacity = least;
    assert!(hopeless(&core), "the region stays for good where the pool does not grow");
    core.step = 1;
    assert!(!hopeless(&core), "the region may make way for another");
    core.capacity = least - PAGE;
    assert!(hopeless(&core));
}

#[test]
fn a_failed_growth_ends_waits_that_need_another() {
    let central = with_regions(1, MIB);
    let (fits, long) = ([pages(256)], [pages(300)]);
    let mut core = central.core.lock();
    assert!(growth_failure(&core, &long).is_none());
    core.growth_failure = Some(Error::empty());
    assert!(matches!(
        growth_failure(&core, &long),
        Some(Error::Argument(text)) if text.contains("nothing to copy")
    ));
    assert!(growth_failure(&core, &fits).is_none(), "the present region serves it");
    core.growing = PAGE;
    assert!(growth_failure(&core, &long).is_none(), "the next growth is under way");
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
    let key = core.queue.join(vec![head], Wake::Thread(thread::current()));
    core.growing = PAGE;
    core.serve();
    assert!(core.queue.waits(key));
    (core.growing, core.leaving) = (0, PAGE);
    core.serve();
    assert!(core.queue.waits(key));
    core.leaving = 0;
    let out = core.arena.take(pages(1).placement).unwrap();
    core.serve();
    assert!(core.queue.waits(key) && core.wakes.is_empty());
    // SAFETY: it is out, and returned once.
    unsafe { core.arena.give(out) };
    core.serve();
    let (outcome, _) = core.queue.look(key, None);
    assert!(
        matches!(outcome, WaitOutcome::Failed(Error::Impossible { len, .. }) if len == head.len),
        "{outcome:?}"
    );
    assert_eq!(core.wakes.len(), 1);
    // With the reason, where a growth has failed.
    let key = core.queue.join(vec![head], Wake::Thread(thread::current()));
    core.growth_failure = Some(Error::empty());
    core.serve();
    assert!(matches!(
        core.queue.look(key, None).0,
        WaitOutcome::Failed(Error::Argument(text)) if text.contains("nothing to copy")
    ));
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
    core.growth_failure = Some(Error::empty());
    let planned = |core: &mut Core, wants: &[Want]| {
        let growth = core.plan(wants, false)?;
        assert!(growth.going.is_empty() && core.growing == growth.bytes);
        core.growing = 0;
        Some(growth.bytes / PAGE)
    };
    assert_eq!(planned(&mut core, &[small(100)]), Some(2), "a step");
    assert!(core.growth_failure.is_none() && core.stats.growths == 1);
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
    central.core.lock().growing = PAGE;
    assert!(central.grow(&[pages(300)], central.extents()), "it waits for that");
    {
        let mut core = central.core.lock();
        assert_eq!((core.growing, core.stats.growths), (PAGE, 0));
        core.growing = 0;
    }
    // Memory has come since the request was tried.
    assert_eq!(central.extents(), 1);
    assert!(central.grow(&[pages(300)], 0));
    let base = NonNull::new(std::ptr::without_provenance_mut(9 * MIB)).unwrap();
    // SAFETY: the arena only does arithmetic on it.
    unsafe { central.add_extent(RegionId(1), base, PAGE, true) };
    assert!(central.grow(&[pages(300)], 1));
    let core = central.core.lock();
    assert_eq!((core.growing, core.stats.growths), (0, 0));
}

#[test]
fn idle_regions_make_way_newest_first() {
    let going = |growth: &super::queue::Growth| growth.going.iter().map(|(id, _)| id.0).collect::<Vec<_>>();
    let long = [pages(512)];
    // Two regions have to go, of three.
    let central = with_regions(3, 3 * MIB);
    let mut core = central.core.lock();
    assert!(core.plan(&long, false).is_none(), "no region may be removed");
    core.growing = PAGE;
    assert!(core.plan(&long, true).is_none(), "another region is being pinned");
    core.growing = 0;
    assert!(core.plan(&[pages(256)], true).is_none(), "the present regions serve it");
    let growth = core.plan(&long, true).unwrap();
    assert_eq!((going(&growth), growth.bytes), (vec![2, 1], 2 * MIB));
    assert_eq!((core.growing, core.leaving, core.arena.bytes().total), (2 * MIB, 2 * MIB, MIB));
    drop(core);
    // With room for half of it, one has to go.
    let central = with_regions(2, 3 * MIB);
    let mut core = central.core.lock();
    let growth = core.plan(&long, true).unwrap();
    assert_eq!((going(&growth), growth.bytes, core.leaving), (vec![1], 2 * MIB, MIB));
    drop(core);
    // A region in use stays, and none goes where that does not help.
    let central = with_regions(3, 3 * MIB);
    let mut core = central.core.lock();
    let held: Vec<_> = (0..3).map(|_| core.arena.take(pages(256).placement).unwrap()).collect();
    // SAFETY: out, and returned once.
    unsafe { core.arena.give(held[0]) };
    assert!(core.plan(&long, true).is_none());
    assert_eq!((core.arena.bytes().total, core.leaving, core.growing), (3 * MIB, 0, 0));
    // SAFETY: as above.
    unsafe { core.arena.give(held[2]) };
    assert_eq!(going(&core.plan(&long, true).unwrap()), [2, 0]);
}

#[test]
fn a_region_is_planned_for_a_head_that_needs_one() {
    let central = with_regions(1, 3 * MIB);
    let mut core = central.core.lock();
    assert!(!core.grow_for_head(), "no request waits");
    let key = core.queue.join(vec![pages(512)], Wake::Thread(thread::current()));
    core.growth_failure = Some(Error::empty());
    assert!(!core.grow_for_head());
    core.growth_failure = None;
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
    let base = NonNull::new(std::ptr::without_provenance_mut(MIB)).unwrap();
    // SAFETY: the arena only does arithmetic on it.
    unsafe { core.arena.add_extent(RegionId(7), base, MIB, true) };
    assert!(!core.grow_for_head());
    core.capacity = 3 * MIB;
    assert!(core.grow_for_head());
    let _ = core.queue.remove(key);
    core.growing = 0;
    let key = core.queue.join(vec![pages(100)], Wake::Thread(thread::current()));
    core.step = 0;
    assert!(!core.grow_for_head(), "this pool does not grow");
    let _ = core.queue.remove(key);
}

#[test]
fn classes_are_listed_once_they_were_used() {
    let central = central(0);
    assert!(central.snapshot_by_class().1.is_empty());
    let fresh = got(&central, 100_000);
    let counts = |central: &CentralPool| {
        let (_, classes) = central.snapshot_by_class();
        classes.iter().map(|c| (c.stride, c.checkouts, c.returns, c.out, c.free > 0)).collect::<Vec<_>>()
    };
    let class = Class::of(100_000).map(Class::stride);
    assert_eq!(counts(&central), [(class, 1, 0, 1, false)]);
    release(fresh);
    assert_eq!(counts(&central), [(class, 1, 1, 0, false)], "it has no memory any more");
}

/// A central pool with 1 MiB, all of which a thread may cache. Of the segments of `len` bytes this thread has cached one,
/// and the others are out.
fn all_out_but_one(len: usize, timeless: bool) -> (Arc<CentralPool>, Vec<Fresh>) {
    let config = CentralConfig { thread_cache: 4 * MIB, timeless, ..central(0).config.clone() };
    let central = with_extents(config, &[256]);
    let mut out = Vec::new();
    while let Take::Got(fresh) = central.try_take(small(len), ReclaimLevel::All).unwrap() {
        out.push(fresh);
    }
    assert_eq!(central.core.lock().stats.reclaims, 0, "there was nothing to reclaim");
    release(out.pop().unwrap());
    assert_eq!(cached(&central, len), 1);
    (central, out)
}

pub(super) fn got(central: &CentralPool, len: usize) -> Fresh {
    match central.try_take(small(len), ReclaimLevel::Idle).unwrap() {
        Take::Got(fresh) => fresh,
        Take::Empty => panic!("the memory should be enough"),
    }
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
    let takes = |want, level| matches!(central.try_take(want, level).unwrap(), Take::Got(_));
    assert!(!elsewhere(|| takes(pages(60), ReclaimLevel::All)), "that is more than could get free");
    assert_eq!((cached(&central, 100_000), central.core.lock().stats.reclaims), (1, 0));
    assert!(elsewhere(|| takes(small(100_000), ReclaimLevel::Idle)));
    assert_eq!((cached(&central, 100_000), central.core.lock().stats.reclaims), (0, 1));
}

#[test]
fn all_that_busy_threads_have_cached_is_for_requests_of_the_last_level() {
    const LEN: usize = 300_000;
    for several in [false, true] {
        let (central, _out) = all_out_but_one(LEN, false);
        let takes = |level| match several {
            false => matches!(central.try_take(pages(70), level).unwrap(), Take::Got(_)),
            true => central.try_take_all(&[pages(70)], level).unwrap().is_some(),
        };
        assert!(!elsewhere(|| takes(ReclaimLevel::Half)));
        assert_eq!(cached(&central, LEN), 1);
        // This thread works between the looks at it, however late the second one comes.
        release(got(&central, LEN));
        assert!(elsewhere(|| takes(ReclaimLevel::All)));
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
    assert_eq!(central.region_use(), [(RegionId(0), MIB, MIB)]);
    transfer();
    assert_eq!(central.region_use(), [(RegionId(0), MIB, MIB)], "although no thread has anything");
    transfer();
    let before = reclaims();
    assert!(matches!(central.try_take(pages(256), ReclaimLevel::Idle).unwrap(), Take::Got(_)));
    assert_eq!(reclaims(), before + 1);
    assert!(matches!(central.try_take(small(100), ReclaimLevel::Idle).unwrap(), Take::Empty));
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
    let address = |fresh: &Fresh| std::ptr::from_ref(fresh.segment().descriptor()).addr();
    let listed = || {
        let mut out = central.out_for(Duration::ZERO);
        out.sort_by_key(|out| (out.state, out.granted));
        out.into_iter()
            .map(|out| (out.descriptor, out.state, out.granted, out.entry.is_some()))
            .collect::<Vec<_>>()
    };
    assert!(listed().is_empty());
    for fresh in [&mut entered, &mut both] {
        CentralPool::enter(fresh, CheckoutSite::default());
    }
    let [at, at_both, at_lost] = [&entered, &both, &lost].map(address);
    let granted = [&entered, &both, &lost].map(|fresh| fresh.segment().granted());
    assert_eq!(listed(), [(at, state::HOST, granted[0], true), (at_both, state::HOST, granted[1], true)]);
    assert!(central.out_for(Duration::from_secs(3600)).is_empty());
    for fresh in [both, lost] {
        let segment = fresh.into_segment();
        segment.descriptor().set(state::QUARANTINED);
        segment.quarantine();
    }
    let quarantined = state::QUARANTINED;
    let [first, second, third] = listed()[..] else { panic!("{:?}", listed()) };
    assert_eq!(first, (at, state::HOST, granted[0], true));
    assert_eq!(second, (at_lost, quarantined, granted[2], false));
    assert_eq!(third, (at_both, quarantined, granted[1], true));
    release(entered);
    assert_eq!(listed().len(), 2);
}

#[test]
fn snapshots_count_what_there_is() {
    let central = central(0);
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
fn a_failed_growth_ends_waits_though_segments_may_come_back() {
    let config = CentralConfig { capacity: 4 * MIB, ..central(0).config.clone() };
    let central = with_extents(config, &[256]);
    {
        let mut core = central.core.lock();
        (core.extent, core.step, core.growing) = (4 * MIB, 2 * PAGE, MIB);
        assert!(core.arena.take(pages(1).placement).is_some());
    }
    let key = central.join(vec![pages(300)], Wake::Thread(thread::current()), true, usize::MAX).unwrap();
    assert!(central.waits(key));
    central.grown(MIB, Some(&Error::empty()));
    assert!(matches!(
        central.look(key, None),
        WaitOutcome::Failed(Error::Argument(text)) if text.contains("nothing to copy")
    ));
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
    assert!(central.may_grow(&[pages(512)]) && !central.may_grow(&[pages(513)]));
    central.core.lock().step = 0;
    assert!(!central.may_grow(&[pages(1)]), "this pool does not grow");
    central.core.lock().step = PAGE;
    central.core.lock().growth_failure = Some(Error::empty());
    assert!(!central.may_grow(&[pages(1)]));
    // What is planned counts at once.
    central.core.lock().growth_failure = None;
    central.plan_bytes(MIB);
    assert!(central.may_grow(&[pages(256)]) && !central.may_grow(&[pages(257)]));
    central.plan_bytes(MIB);
    assert!(!central.may_grow(&[pages(1)]));
    central.core.lock().growing = 0;
}

#[test]
fn a_pool_grows_when_requests_that_are_served_late_lose_much_time() {
    let helpers = with_regions(1, MIB);
    let config = CentralConfig { timeless: false, ..helpers.config.clone() };
    let central = CentralPool::new(config, None);
    {
        let mut core = central.core.lock();
        (core.capacity, core.extent, core.step) = (8 * MIB, 4 * MIB, 2 * PAGE);
    }
    let zero = Instant::now();
    let ms = |ms: u64| zero + Duration::from_millis(ms);
    // So many requests one behind the other, each of which lost so many milliseconds.
    let late = |from: u64, requests: u64, lost: u64| {
        for i in 0..requests {
            central.served_late(&[small(100)], ms(from + i * lost), ms(from + (i + 1) * lost));
        }
    };
    let growths = || central.core.lock().stats.growths;
    let pinned = || central.core.lock().growing = 0;
    late(0, 6, 3);
    assert_eq!(growths(), 0);
    late(50, 1, 2);
    assert_eq!((growths(), central.core.lock().growing), (1, 2 * PAGE));
    late(52, 20, 2);
    assert_eq!(growths(), 1, "that is being pinned");
    pinned();
    late(92, 1, 1);
    assert_eq!(growths(), 2, "it was not enough");
    // A growth begins the window anew, and so does a request that comes after it.
    pinned();
    late(93, 19, 1);
    late(200, 19, 1);
    late(290, 1, 1);
    assert_eq!(growths(), 3);
    pinned();
    late(300, 19, 1);
    assert!(central.core.lock().plan(&[small(100)], false).is_some());
    pinned();
    late(320, 19, 1);
    assert_eq!(growths(), 4);
    // One request is not enough, however long it takes.
    late(500, 1, 1000);
    late(1501, 1, 15);
    assert_eq!(growths(), 4);
    central.core.lock().growth_failure = Some(Error::empty());
    late(2000, 30, 1);
    assert_eq!(growths(), 4, "the last growth failed");
    central.core.lock().growth_failure = None;
    central.core.lock().capacity = 0;
    late(2031, 1, 1);
    assert_eq!(growths(), 4, "there is no room");
    central.core.lock().capacity = 8 * MIB;
    late(2032, 1, 1);
    assert_eq!(growths(), 5);
    pinned();
    // A window lasts 100 ms.
    late(3000, 19, 1);
    late(3099, 1, 1);
    assert_eq!(growths(), 6);
    helpers.core.lock().capacity = 8 * MIB;
    (0..100).for_each(|_| helpers.served_late(&[small(100)], ms(0), ms(1)));
    assert_eq!(helpers.core.lock().stats.growths, 0, "without a clock nothing is late");
}

/// What busy threads have cached is theirs, unless the request can be served in no other way.
#[test]
fn a_pool_that_may_grow_leaves_busy_caches_alone() {
    let (central, _out) = all_out_but_one(100_000, false);
    let takes = |level| matches!(central.try_take(small(100_000), level).unwrap(), Take::Got(_));
    assert!(!elsewhere(|| takes(ReclaimLevel::Idle)));
    assert_eq!(cached(&central, 100_000), 1);
    assert!(elsewhere(|| takes(ReclaimLevel::Half)));
    assert_eq!(cached(&central, 100_000), 0);
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
    let key = central
        .core
        .lock()
        .queue
        .join(vec![central.place(small, 64).unwrap()], Wake::Thread(thread::current()));
    assert_eq!((room(small), room(last) > 0), (0, true));
    let _ = central.core.lock().queue.remove(key);
}

/// Four idle regions of 256 pages hold four buffers of 129 pages and not five, which one region in their place holds.
#[test]
fn regions_make_way_for_buffers_that_fit_into_them_one_by_one_only() {
    let central = with_regions(4, 4 * MIB);
    let mut core = central.lock();
    assert!(core.never(&[pages(129); 4]).is_none() && core.plan(&[pages(129); 4], true).is_none());
    assert!(core.never(&[pages(129); 5]).is_some() && core.plan(&[pages(129); 5], true).is_some());
}

use std::sync::Arc;

use super::super::growth::Refusal;
use super::super::tests::{central, got, pages, release, small, with_extents};
use super::super::{CentralConfig, ReclaimLevel, Segment};
use super::*;
use crate::freelist::list_of;
use crate::region::Owner;
use crate::segment::PAGE;
use crate::segment::RegionId;
use crate::sync::thread;

/// A central pool that does not grow, of extents of so many pages, each of which is a region.
fn pool(extents: &[usize], by_hand: bool) -> Arc<CentralPool> {
    let (capacity, largest) = (extents.iter().sum::<usize>() * PAGE, (4 << 20) - 32);
    let config = central(0).config.clone();
    with_extents(CentralConfig { capacity, largest, by_hand, ..config }, extents)
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
    unsafe { central.lock().put(taken, 0) };
}

/// A request on the slow path that changes nothing.
fn tick(central: &CentralPool) {
    drop(central.lock_to_take());
}

fn join(central: &CentralPool, wants: &[Want]) -> usize {
    central.join(wants.to_vec(), Wake::Thread(thread::current()), usize::MAX).unwrap()
}

/// The segments that a waiter was granted.
fn granted(central: &CentralPool, key: usize) -> Vec<Segment> {
    let Some(Ok(fresh)) = central.look(key, None) else { panic!("it was not served") };
    fresh.into_iter().map(Fresh::into_segment).collect()
}

fn base(taken: &Taken) -> NonNull<u8> {
    // SAFETY: out, so alive.
    unsafe { taken.as_ref() }.base()
}

/// Number of ranges that are withheld.
fn windows(central: &CentralPool) -> usize {
    central.core.lock().arena.window_addresses().count()
}

/// The address of the only window.
fn window(central: &CentralPool) -> (usize, usize) {
    assert_eq!(windows(central), 1);
    window_addresses(central, 0)
}

fn window_addresses(central: &CentralPool, id: usize) -> (usize, usize) {
    central.core.lock().arena.window_addresses().nth(id).unwrap()
}

fn at(taken: &Taken) -> usize {
    base(taken).addr().get()
}

#[test]
fn a_segment_outside_of_all_windows_may_be_cached() {
    let central = pool(&[256, 256], true);
    let class = Class::of(5000).unwrap();
    let beside = out(&central, small(5000));
    let _rest = out(&central, pages(254));
    let inside = out(&central, small(5000));
    let key = join(&central, &[pages(256)]);
    assert_eq!(window(&central).0, base(&inside).addr().get());
    assert_eq!([&beside, &inside].map(|s| central.closes(class, base(s))), [false, true]);
    assert!(!central.closes(Class::of(100).unwrap(), base(&inside)), "no segment of this class is out");
    central.leave(key);
    assert!(!central.closes(class, base(&inside)));
}

#[test]
fn a_fence_is_raised_for_a_waiter_and_lifted_at_the_next_return() {
    let central = central(0);
    let class = Class::of(4096).unwrap();
    let [first, second, third] = [(); 3].map(|()| got(&central, 4096).into_segment().into_descriptor());
    let kept = |descriptor| {
        let mut held = central.gate.enter(central.cache().unwrap()).unwrap();
        // SAFETY: out, and no waiter has a right to it.
        unsafe { held.put(descriptor, 4096, list_of(class)) }
    };
    assert!(kept(first), "nothing is fenced");
    let key = join(&central, &[pages(256)]);
    central.leave(key);
    assert!(!kept(second), "the owner has not come by since");
    // SAFETY: as above.
    assert!(unsafe { central.keep(class, second, 4096) } && kept(third));
}

#[test]
fn a_request_has_a_window_when_no_more_memory_is_being_pinned() {
    let central = pool(&[16], true);
    let _held = out(&central, pages(16));
    central.core.lock().growing = PAGE;
    join(&central, &[small(2000)]);
    assert_eq!(windows(&central), 0);
    central.check(|_, _| ()).unwrap();
    central.grown(PAGE, None);
    assert_eq!(windows(&central), 1);
    central.check(|_, _| ()).unwrap();
    central.closed_classes.set_classes([0, 0]);
    assert!(central.check(|_, _| ()).is_err());
}

#[test]
fn a_request_without_a_window_keeps_no_other_from_one() {
    let central = pool(&[256], true);
    let _held: Vec<_> = (0..256).map(|_| out(&central, pages(1))).collect();
    let first = join(&central, &[pages(200)]);
    let second = join(&central, &[pages(100)]);
    assert_eq!(windows(&central), 1, "only 56 pages are left");
    join(&central, &[pages(50)]);
    // A request for a class needs its fence, although it finds no window.
    join(&central, &[small(100_000)]);
    assert_eq!(windows(&central), 2);
    central.check(|_, _| ()).unwrap();
    central.leave(first);
    assert!(windows(&central) > 2 && central.core.lock().window(second).is_some());

    // There are only so many windows.
    let central = pool(&[40], true);
    let _held: Vec<_> = (0..40).map(|_| out(&central, pages(1))).collect();
    let keys = [(); 40].map(|()| join(&central, &[pages(1)]));
    assert_eq!(windows(&central), MOST_WINDOWS);
    central.leave(keys[0]);
    assert_eq!(windows(&central), MOST_WINDOWS);
}

#[test]
fn a_window_that_does_not_empty_is_exchanged_and_less_often_each_time() {
    let central = pool(&[256, 256], true);
    let held = [(); 2].map(|()| out(&central, pages(256)));
    let key = join(&central, &[pages(256)]);
    let look = || {
        (0..TICKS).for_each(|_| tick(&central));
        central.check(|_, _| ()).unwrap();
        window(&central).0 >> 22
    };
    let first = base(&held[0]);
    assert_eq!(window(&central).0 >> 22, 2);
    assert_eq!([(); 10].map(|()| look()), [2, 1, 1, 1, 2, 2, 2, 2, 2, 1]);
    back(&central, held[0]);
    assert_eq!(granted(&central, key)[0].base(), first);
}

#[test]
fn the_next_look_at_windows_is_planned_once_and_by_the_clock() {
    let central = pool(&[16], false);
    let _held = out(&central, pages(16));
    central.turn(&mut central.core.lock());
    assert!(!central.core.lock().windows.planned, "nothing waits");
    let key = central.core.lock().queue.join(vec![pages(16)], Wake::Thread(thread::current()));
    let turn = |core: &mut Core| central.turn(core).len();
    assert_eq!([(); 2].map(|()| turn(&mut central.core.lock())), [1, 0]);
    // The timer looks, on its own thread.
    CentralPool::look_later(central.me.clone());
    let end = Instant::now() + Duration::from_secs(20);
    while central.core.lock().queue.waiting[&key].moves == 0 {
        assert!(Instant::now() < end, "no look is made");
        std::thread::sleep(Duration::from_millis(1));
    }
    central.leave(key);
}

#[test]
fn a_waiter_has_its_rights_back_at_the_first_look_that_still_finds_memory_being_pinned() {
    let central = pool(&[6], true);
    let mut held: Vec<_> = [(); 2].map(|()| got(&central, 8192)).into();
    central.plan_bytes(1 << 20);
    let key = join(&central, &[small(8192)]);
    release(held.pop().unwrap());
    assert!(central.waits(key), "what is being pinned may serve it");
    (0..TICKS).for_each(|_| tick(&central));
    drop(granted(&central, key));
    central.check(|_, _| ()).unwrap();
    // While one waits from look to look, the class is closed. The next to find the queue empty begins anew.
    let keys = [(); 2].map(|()| join(&central, &[small(8192)]));
    (0..TICKS).for_each(|_| tick(&central));
    central.check(|_, _| ()).unwrap();
    release(held.pop().unwrap());
    assert_eq!(keys.map(|key| central.waits(key)), [false, true]);
    central.leave(keys[1]);
    assert!(central.closed_classes.classes() == [0; 2] && !central.core.lock().windows.overdue);
    drop(granted(&central, keys[0]));
    central.core.lock().windows.overdue = true;
    assert_eq!(central.check(|_, _| ()).unwrap_err(), "no request waits, and one is overdue");
}

#[test]
fn what_a_leaving_waiter_was_granted_is_the_next_ones_of_its_class() {
    let central = pool(&[3], true);
    // This thread's cache has room for the class.
    let used = got(&central, 8192);
    central.plan_bytes(1 << 20);
    let [first, next] = [(); 2].map(|()| join(&central, &[small(8192)]));
    let base = NonNull::new(std::ptr::without_provenance_mut(9 << 22)).unwrap();
    // SAFETY: the arena only does arithmetic on it.
    unsafe { central.add_extent(RegionId(9), base, 3 * PAGE, true) };
    assert_eq!([first, next].map(|key| central.waits(key)), [false, true]);
    central.leave(first);
    drop(granted(&central, next));
    release(used);
}

#[test]
fn what_a_leaving_waiter_was_granted_may_be_the_last_segment_of_a_closed_pool() {
    let central = pool(&[16], true);
    let held = out(&central, pages(16));
    let key = join(&central, &[pages(16)]);
    back(&central, held);
    central.close();
    central.leave(key);
    let weak = Arc::downgrade(&central);
    drop(central);
    assert_eq!(weak.strong_count(), 0);
}

#[test]
fn equal_buffers_of_a_request_have_to_fit_together() {
    let central = pool(&[256, 256], true);
    let mut core = central.core.lock();
    assert!(core.never(&[pages(200); 2]).is_none() && core.never(&[pages(200); 3]).is_some());
    // Requests for several buffers of one size are not alike: each has a verdict of its own.
    let mut join = |n: usize| core.queue.join(vec![pages(100); n], Wake::Thread(thread::current()));
    let keys = [1, 4, 6].map(&mut join);
    (core.windows.wanted, core.windows.none_for) = (true, Some(1));
    core.fail_hopeless();
    assert_eq!(keys.map(|key| core.queue.waits(key)), [true, true, false]);
    assert!(core.windows.wanted, "a look at the windows that is due stays due");
}

#[test]
fn regions_are_withheld_to_be_replaced_when_nothing_else_is_being_pinned() {
    let central = pool(&[256, 256, 1], true);
    let _held = [256, 256, 1].map(|n| out(&central, pages(n)));
    central.core.lock().config.step = PAGE;
    central.core.lock().growing = PAGE;
    let key = join(&central, &[pages(300)]);
    assert_eq!(windows(&central), 0, "no region serves it, and others are being pinned");
    let mut core = central.core.lock();
    let ranges = |core: &Core| core.ranges_to_replace(key, MOST_WINDOWS).map(|ranges| ranges.len());
    core.growing = 0;
    assert_eq!(ranges(&core), Some(2));
    let preventions: [fn(&mut Core); 5] = [
        |core| core.config.step = 0,
        |core| core.growing = PAGE,
        |core| core.leaving = PAGE,
        |core| core.refusal = Some(Refusal::new(Error::empty(), 0)),
        |core| core.config.capacity += 300 * PAGE,
    ];
    for prevent in preventions {
        let before = (core.config.clone(), core.growing, core.leaving, core.refusal.take());
        prevent(&mut core);
        assert_eq!(ranges(&core), None);
        (core.config, core.growing, core.leaving, core.refusal) = before;
    }
}

/// Regions that are withheld to be replaced may come back while other memory is being pinned, and be all that there is
/// when that is done.
#[test]
fn regions_to_replace_that_came_back_while_others_were_pinned_are_replaced() {
    for extent in [true, false] {
        let central = pool(&[256, 256], true);
        let held = [256, 256].map(|n| out(&central, pages(n)));
        let step = 16 * PAGE;
        central.core.lock().config.capacity += if extent { step } else { 0 };
        (central.core.lock().config.step, central.core.lock().growing) = (step, PAGE);
        let key = join(&central, &[pages(300)]);
        central.grown(PAGE, None);
        assert_eq!(windows(&central), 2, "both regions are withheld");
        central.core.lock().growing = step;
        held.iter().for_each(|grant| back(&central, *grant));
        if extent {
            let base = NonNull::new(std::ptr::without_provenance_mut(9 << 22)).unwrap();
            // SAFETY: the arena only does arithmetic on it.
            unsafe { central.add_extent(RegionId(9), base, step, true) };
        } else {
            central.grown(step, None);
        }
        assert!(central.waits(key));
        let core = central.core.lock();
        assert!(core.growing >= 300 * PAGE && core.leaving >= 512 * PAGE);
    }
}

#[test]
fn several_buffers_are_served_from_all_windows_and_all_runs() {
    let central = pool(&[4; MOST_WINDOWS + 1], true);
    let held: Vec<_> = (0..=MOST_WINDOWS).map(|_| out(&central, pages(4))).collect();
    let key = join(&central, &[pages(3), pages(3)]);
    assert_eq!(windows(&central), 2, "a range for each");
    let ranges = [0, 1].map(|id| window_addresses(&central, id).0);
    let inside: Vec<_> = held.into_iter().filter(|grant| ranges.contains(&at(grant))).collect();
    back(&central, inside[0]);
    assert!(central.waits(key));
    back(&central, inside[1]);
    assert_eq!(granted(&central, key).len(), 2);

    // Segments of runs, without a free page, and outside of the window.
    let central = pool(&[2, 2], true);
    let held: Vec<_> = (0..6).map(|_| out(&central, small(1000))).collect();
    let _rest = out(&central, pages(2));
    let key = join(&central, &[small(1000); 2]);
    let (first, end) = window(&central);
    let beside = held.into_iter().filter(|grant| !(first..end).contains(&at(grant)));
    beside.take(2).for_each(|grant| back(&central, grant));
    assert_eq!(granted(&central, key).len(), 2);
}

#[test]
fn the_next_of_a_class_inherits_the_window() {
    let central = pool(&[2, 256], true);
    let _rest = [256, 1].map(|n| out(&central, pages(n)));
    let held = [(); 3].map(|()| out(&central, small(1000)));
    let keys = [(); 3].map(|()| join(&central, &[small(1000)]));
    let at = window(&central);
    for (key, grant) in keys.into_iter().zip(held) {
        assert!(central.waits(key) && window(&central) == at);
        back(&central, grant);
        assert!(!central.waits(key));
    }
    assert_eq!(windows(&central), 0);
}

#[test]
fn a_request_for_several_buffers_keeps_no_other_of_its_size_waiting() {
    let central = pool(&[64, 64], true);
    let held = [(); 2].map(|()| out(&central, pages(64)));
    let keys = [3, 2].map(|n| join(&central, &vec![pages(20); n]));
    // 44 pages are free where neither has a window.
    let (first, end) = window_addresses(&central, 1);
    assert!(central.core.lock().window(keys[0]).is_some() && first < end);
    back(&central, held[1]);
    assert_eq!(keys.map(|key| central.waits(key)).iter().filter(|waits| **waits).count(), 1);
    central.check(|_, _| ()).unwrap();
}

#[test]
fn what_is_given_back_at_once_was_never_in_use() {
    let central = pool(&[64], true);
    let got = central.try_take(&[pages(60), pages(10)], ReclaimLevel::All).unwrap();
    assert!(got.is_none());
    assert_eq!(central.take_peak(), 0);
    let held = out(&central, pages(10));
    assert_eq!(central.take_peak(), 10 * PAGE);
    let key = join(&central, &[pages(50), pages(10)]);
    assert_eq!(central.take_peak(), 10 * PAGE);
    back(&central, held);
    drop(granted(&central, key));
    assert_eq!(central.take_peak(), 60 * PAGE);
}

#[test]
fn a_small_request_behind_many_that_can_have_no_window_has_one() {
    for large in [MOST_WINDOWS, MOST_WINDOWS + 1] {
        let central = pool(&[256, 128], true);
        let _kept = out(&central, pages(256));
        let _rest: Vec<_> = (0..128).map(|_| out(&central, pages(1))).collect();
        (0..large).for_each(|_| _ = join(&central, &[pages(256)]));
        assert_eq!(windows(&central), 1);
        let small = join(&central, &[pages(2)]);
        assert!(central.core.lock().window(small).is_some(), "{large} large ones");
    }
}

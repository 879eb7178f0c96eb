//! A thread cache's lists and its gate, on one thread.

use std::time::Instant;

use super::super::CacheTable;
use super::*;

/// A gate whose owners execute a fence of their own (`fenced`) or not, and a thread cache of it that this thread
/// leases.
fn leased(fenced: bool) -> (Box<Gate>, CacheTable, Arc<ThreadCache>) {
    let gate = Box::new(Gate::new(!fenced));
    let mut table = CacheTable::default();
    let cache = table.lease(&gate);
    (gate, table, cache)
}

/// So many segments, by the numbers of their runs.
fn segments(count: u32) -> Vec<Descriptor> {
    (0..count).map(|run| Descriptor::new(NonNull::dangling(), Class::new(3), run, 0)).collect()
}

fn chain(segments: &[Descriptor]) -> Chain {
    let mut chain = Chain::new();
    // SAFETY: alive, and in no list.
    segments.iter().rev().for_each(|segment| unsafe { chain.push(NonNull::from(segment)) });
    chain
}

fn runs(chain: &Chain) -> Vec<u32> {
    chain.iter().map(Descriptor::run).collect()
}

#[test]
fn a_room_bounds_a_list_and_takes_along_what_is_in_it() {
    let (segments, class) = (segments(6), Class::new(3).unwrap());
    let (_gate, _table, cache) = leased(false);
    let mut held = CacheTable::mine(&cache);
    assert!(!cache.any_cached());
    assert_eq!(runs(&held.fill(class, chain(&segments))), [0, 1, 2, 3, 4, 5], "there is no room yet");
    held.grant(class, 4);
    assert_eq!((held.room(class), cache.cached(class)), (4, 0));
    assert_eq!(runs(&held.fill(class, chain(&segments))), [4, 5]);
    assert!(cache.any_cached());
    let mut seen = Vec::new();
    held.for_each(class, |descriptor| seen.push(descriptor.run()));
    assert_eq!(seen, [0, 1, 2, 3]);
    assert_eq!(runs(&held.drain(class, 1)), [3]);
    assert_eq!(runs(&held.revoke(class)), [0, 1, 2]);
    assert_eq!((held.room(class), held.rooms(), cache.any_cached()), (0, 0, false));
    assert_eq!(held.fill(class, chain(&segments)).len(), 6, "there is no room any more");
    held.grant(class, 5);
    assert_eq!(held.rooms(), 5 * class.stride());
    assert_eq!(runs(&held.fill(class, chain(&segments))), [5]);
    assert_eq!(held.revoke(class).len(), 5);
    assert_eq!(cache.count(class), (0, 0), "nothing was checked out");
}

#[test]
fn what_moves_without_a_checkout_is_not_counted_as_one() {
    let (segments, class) = (segments(6), Class::new(3).unwrap());
    let (_gate, _table, cache) = leased(false);
    let mut held = CacheTable::mine(&cache);
    held.grant(class, 6);
    assert!(held.fill(class, chain(&segments)).is_empty());
    let none = TransferCache::new(0, class.stride());
    assert_eq!(held.offload(class, 2, &none), 0, "the class has no quota");
    let transfer = TransferCache::new(4 * class.stride(), class.stride());
    assert_eq!((held.offload(class, 3, &transfer), held.offload(class, 3, &transfer)), (3, 1));
    assert_eq!((cache.count(class), cache.cached(class)), ((0, 0), 2));
    let before = cache.tally();
    let taken = held.take(class, 100).unwrap();
    assert_ne!(cache.tally(), before);
    assert_eq!((cache.count(class), cache.cached(class), cache.requested()), ((1, 0), 1, 100));
    let rest = held.revoke(class);
    held.grant(class, 4);
    assert!(held.fill(class, rest).is_empty());
    held.take_batch(class, &transfer);
    assert_eq!((cache.cached(class), transfer.count()), (3, 2), "half of the room");
    held.take_batch(class, &transfer);
    assert_eq!((cache.cached(class), transfer.count()), (4, 1), "there is room for one of two");
    assert_eq!(cache.count(class), (1, 0));
    // SAFETY: it is alive and out, and its list is that of the class.
    assert!(!unsafe { held.put(taken, 100, 3) });
    let _ = held.drain(class, 1);
    let before = cache.tally();
    // SAFETY: as above.
    assert!(unsafe { held.put(taken, 60, 3) });
    assert_ne!(cache.tally(), before);
    assert_eq!(cache.count(class), (1, 1));
    assert_eq!(cache.requested(), 40);
    // Of a closed class only the slow path puts segments into the list.
    let taken = held.take(class, 100).unwrap();
    held.close(class);
    // SAFETY: as above.
    assert!(!unsafe { held.put(taken, 100, 3) });
    held.open(class);
    // SAFETY: as above.
    assert!(unsafe { held.put(taken, 100, 3) });
    let _ = held.drain(class, u32::MAX);
}

#[test]
fn a_thread_that_has_done_nothing_for_a_while_is_idle() {
    let (segments, class) = (segments(1), Class::new(3).unwrap());
    let (_gate, mut table, cache) = leased(false);
    let mut held = CacheTable::mine(&cache);
    held.grant(class, 1);
    assert!(held.fill(class, chain(&segments)).is_empty());
    let zero = Instant::now();
    let mut idle = |micros| table.idle(Some(zero + std::time::Duration::from_micros(micros))).len();
    assert_eq!([0, 999, 1000].map(&mut idle), [0, 0, 1], "the first look only notes what was counted");
    // It works again.
    let taken = held.take(class, 100).unwrap();
    // SAFETY: it is alive and out, and its list is that of the class.
    assert!(unsafe { held.put(taken, 100, 3) });
    assert_eq!([5000, 5999, 6000].map(&mut idle), [0, 0, 1]);
    assert_eq!(table.idle(None).len(), 1);
    assert!(!held.drain(class, 1).is_empty());
    assert_eq!(table.idle(None).len(), 0, "it has nothing");
}

#[test]
fn owners_come_in_where_the_cold_side_is_not() {
    for fenced in [false, true] {
        if !fenced && !crate::sync::asymmetric() {
            continue;
        }
        let (gate, table, cache) = leased(fenced);
        let (other, _, of_other) = leased(fenced);
        // For good, whatever the cold side does.
        let base = if fenced { mode::FENCED } else { 0 };
        let mode = |gate: &Gate| gate.mode.load(Ordering::Relaxed);
        let enters = |cache: &ThreadCache| gate.enter(cache).is_some();
        assert!(enters(&cache) && !enters(&of_other));
        assert_eq!(gate.enter_by_permit(&cache).is_some(), !fenced);
        assert_eq!((mode(&gate), gate.mode(), mode(&other)), (base, 0, base));
        gate.quiesce(mode::CLOSED, &table);
        assert!(!enters(&cache) && gate.mode() == mode::CLOSED);
        gate.quiesce(mode::INSPECT, &table);
        gate.readmit(mode::INSPECT, &table);
        assert!(!enters(&cache), "another bit is left");
        let mut worked = 0;
        gate.revoke(std::slice::from_ref(&cache), |_| worked += 1);
        assert!(!enters(&cache) && worked == 1 && gate.mode() == mode::CLOSED);
        gate.readmit(mode::CLOSED, &table);
        assert!(enters(&cache));
        gate.revoke(std::slice::from_ref(&cache), |_| {
            assert!(!enters(&cache));
            assert_eq!(gate.mode(), if fenced { mode::INSPECT } else { 0 });
        });
        assert!(enters(&cache));
        assert_eq!(mode(&gate), base);
    }
}

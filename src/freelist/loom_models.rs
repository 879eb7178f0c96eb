//! Loom models of the parts without a lock: racks, and shards with the gate that keeps their owners out.
//!
//! Each model ends by looking for every segment: it must be in exactly one place. Besides, each segment has a cell that
//! whoever takes the segment writes to, as the owner of a buffer would; loom fails the model where two owners of a
//! segment, one after the other, are not ordered.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as StdAtomicU64, Ordering as StdOrdering};

use loom::thread::spawn;

use super::shard::Put;
use super::*;
use crate::sync::{Mutex, Ordering, UnsafeCell, model, model_refused, step};

/// Segments outside of any list, numbered by what their slots have as the run.
struct Segments {
    slots: Vec<Slot>,
    memory: Vec<UnsafeCell<u32>>,
}

// SAFETY: the cells are loom's, which checks each access.
unsafe impl Sync for Segments {}

impl Segments {
    fn new(count: u32) -> Arc<Self> {
        let slot = |i| Slot::new(NonNull::dangling(), Some(class()), i, 0);
        Arc::new(Self {
            slots: (0..count).map(slot).collect(),
            memory: (0..count).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn at(&self, i: usize) -> NonNull<Slot> {
        NonNull::from(&self.slots[i])
    }

    /// A chain of these.
    fn chain(&self, numbers: &[usize]) -> Chain {
        let mut chain = Chain::new();
        for &i in numbers {
            // SAFETY: the caller has them, so they are in no list.
            unsafe { chain.push(self.at(i)) };
        }
        chain
    }

    /// Uses a segment's memory, which must be ours. Its number.
    fn write(&self, slot: NonNull<Slot>) -> usize {
        // SAFETY: alive: the slots live as long as `self`.
        let number = unsafe { slot.as_ref() }.run() as usize;
        // SAFETY: loom fails the model if anyone else is at it.
        self.memory[number].with_mut(|p| unsafe { *p += 1 });
        number
    }

    /// Takes a batch down and uses each of its segments. Their numbers.
    fn take_down(&self, rack: &Rack, hint: usize) -> Vec<usize> {
        let mut found = Vec::new();
        rack.take(hint, |batch| {
            let slots = batch.iter().map(|slot| NonNull::new(slot.load(Ordering::Relaxed)).unwrap());
            found.extend(slots.map(|slot| self.write(slot)));
        });
        found
    }

    /// A batch of these.
    fn batch<'a>(&'a self, numbers: &'a [usize]) -> impl ExactSizeIterator<Item = *mut Slot> + 'a {
        numbers.iter().map(|&i| self.at(i).as_ptr())
    }

    /// Takes a chain apart, using each segment. Their numbers.
    fn unlink(&self, mut chain: Chain) -> Vec<usize> {
        let count = chain.len();
        let numbers: Vec<usize> = std::iter::from_fn(|| chain.pop()).map(|slot| self.write(slot)).collect();
        assert_eq!(numbers.len(), count as usize, "a chain is as long as it says");
        numbers
    }
}

fn class() -> Class {
    listed().next().unwrap()
}

#[test]
fn loom_rack_hands_over() {
    model("rack: two give, one takes", 3, || {
        let segments = Segments::new(3);
        let rack = Arc::new(Rack::new());
        let give = |numbers: &'static [usize]| {
            let (segments, rack) = (segments.clone(), rack.clone());
            spawn(move || {
                for &i in numbers {
                    segments.write(segments.at(i));
                }
                step();
                assert!(rack.put(0, segments.batch(numbers), |_| true), "there are hooks for all");
            })
        };
        let givers = [give(&[0, 1]), give(&[2])];
        let mut found = Vec::new();
        for _ in 0..2 {
            step();
            found.extend(segments.take_down(&rack, 1));
        }
        for giver in givers {
            giver.join().unwrap();
        }
        assert_eq!(rack.count(), 3 - found.len());
        found.extend(segments.unlink(rack.strip().0));
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2]);
    });
}

#[test]
fn loom_rack_recycles() {
    model("rack: two take and put back", 3, || {
        let segments = Segments::new(3);
        let rack = Arc::new(Rack::new());
        assert!(rack.put(0, segments.batch(&[0, 1]), |_| true));
        assert!(rack.put(0, segments.batch(&[2]), |_| true));
        // Takes a batch, turns it round and puts it back; keeps it where all hooks looked taken. Both begin at the same
        // hook, or they would never meet.
        let turn = || {
            let (segments, rack) = (segments.clone(), rack.clone());
            move || {
                let mut kept = Vec::new();
                for _ in 0..2 {
                    step();
                    let mut numbers = segments.take_down(&rack, 0);
                    numbers.reverse();
                    step();
                    if !numbers.is_empty() && !rack.put(0, segments.batch(&numbers), |_| true) {
                        kept.extend(numbers.iter().map(|&i| segments.write(segments.at(i))));
                    }
                }
                kept
            }
        };
        let other = spawn(turn());
        let mut found = turn()();
        found.extend(other.join().unwrap());
        found.extend(segments.unlink(rack.strip().0));
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2]);
    });
}

#[test]
fn loom_rack_books() {
    model("rack: one takes and puts back, another takes away what empty hooks have booked", 3, || {
        // What is booked. Not the model's own: only to be summed up.
        static SUM: StdAtomicU64 = StdAtomicU64::new(0);
        let book = |n: u32| {
            SUM.fetch_add(n.into(), StdOrdering::Relaxed);
            true
        };
        SUM.store(0, StdOrdering::Relaxed);
        let segments = Segments::new(2);
        let rack = Arc::new(Rack::new());
        assert!(rack.put(0, segments.batch(&[0, 1]), book));
        let other = spawn({
            let (segments, rack) = (segments.clone(), rack.clone());
            move || {
                let numbers = segments.take_down(&rack, 0);
                step();
                assert!(rack.put(0, segments.batch(&numbers[1..]), book), "nobody else hangs anything up");
                numbers[0]
            }
        });
        step();
        SUM.fetch_sub(rack.unbook_idle().into(), StdOrdering::Relaxed);
        let mut found = vec![other.join().unwrap()];
        let booked = SUM.load(StdOrdering::Relaxed);
        assert_eq!(rack.booked(), Some(booked), "what hangs is booked, and what is booked is known");
        let (chain, stripped) = rack.strip();
        assert_eq!(u64::from(stripped), booked);
        found.extend(segments.unlink(chain));
        found.sort_unstable();
        assert_eq!(found, [0, 1]);
    });
}

/// A gate, its shards, and the list that shards are filled from and drained to.
struct Store {
    gate: Gate,
    cold: Mutex<(Roster, Vec<usize>)>,
    segments: Arc<Segments>,
}

impl Store {
    fn new(count: u32) -> Arc<Self> {
        Self::with(Gate::new(true), count)
    }

    /// Of a machine without the asymmetric fence.
    fn fenced(count: u32) -> Arc<Self> {
        Self::with(Gate::new(false), count)
    }

    fn with(gate: Gate, count: u32) -> Arc<Self> {
        Arc::new(Self {
            gate,
            cold: Mutex::new((Roster::default(), Vec::new())),
            segments: Segments::new(count),
        })
    }

    /// A shard with these segments.
    fn lease(&self, numbers: &[usize]) -> Arc<Shard> {
        let shard = self.cold.lock().0.lease(&self.gate);
        let mut held = self.gate.enter(&shard).unwrap();
        held.set_limit(class(), 2);
        assert!(held.fill(class(), self.segments.chain(numbers)).is_empty());
        drop(held);
        shard
    }

    /// The owner's: a segment from its shard, or under the lock.
    fn take(&self, shard: &Shard) -> Option<NonNull<Slot>> {
        step();
        let hit = self.gate.enter(shard).and_then(|mut held| held.take(class(), 1));
        let slot = hit.or_else(|| self.cold.lock().1.pop().map(|i| self.segments.at(i)));
        if let Some(slot) = slot {
            self.segments.write(slot);
        }
        slot
    }

    /// The owner's: a segment back to its shard, or under the lock.
    fn put(&self, shard: &Shard, slot: NonNull<Slot>) {
        let number = self.segments.write(slot);
        step();
        if let Some(mut held) = self.gate.enter(shard) {
            // SAFETY: ours, and in no list.
            if let Put::Kept = unsafe { held.put(slot, 1, list_of(class())) } {
                return;
            }
        }
        self.cold.lock().1.push(number);
    }

    /// The cold side's: everything that shards have goes to the list.
    fn take_back(&self) {
        step();
        let mut cold = self.cold.lock();
        let (roster, list) = &mut *cold;
        self.gate.quiesce(mode::INSPECT, roster);
        for mut held in roster.quiet() {
            held.drain_all(|_, chain| list.extend(self.segments.unlink(chain)));
        }
        self.gate.open(mode::INSPECT, roster);
    }

    /// The cold side's: one segment of one shard goes to the list, and other owners are not disturbed.
    fn take_one_back(&self, shard: &Arc<Shard>) {
        step();
        let mut cold = self.cold.lock();
        let (roster, list) = &mut *cold;
        self.gate.hush(std::slice::from_ref(shard), roster, |mut held| {
            list.extend(self.segments.unlink(held.drain(class(), 1)));
        });
    }

    /// Where every segment is, when all is quiet.
    fn all(&self) -> Vec<usize> {
        self.take_back();
        let mut all = self.cold.lock().1.clone();
        all.sort_unstable();
        all
    }
}

/// One owner, from whom everything is taken back twice.
fn taken_back(store: &Arc<Store>) {
    let shard = store.lease(&[0, 1]);
    let owner = spawn({
        let (store, shard) = (store.clone(), shard.clone());
        move || {
            for _ in 0..2 {
                if let Some(slot) = store.take(&shard) {
                    store.put(&shard, slot);
                }
            }
        }
    });
    store.take_back();
    store.take_back();
    owner.join().unwrap();
    let count = shard.count(class());
    assert!(count.takes <= 2 && count.puts <= 2);
    assert_eq!(store.all(), [0, 1]);
}

/// Two owners, of whom one is hushed.
fn hushed(store: &Arc<Store>) {
    let shards = [store.lease(&[0, 1]), store.lease(&[2])];
    let owners = shards.clone().map(|shard| {
        let store = store.clone();
        spawn(move || {
            let one = store.take(&shard);
            one.into_iter().for_each(|slot| store.put(&shard, slot));
        })
    });
    store.take_one_back(&shards[0]);
    for owner in owners {
        owner.join().unwrap();
    }
    assert_eq!(store.all(), [0, 1, 2]);
}

/// An owner that has fenced by the system's call alone, which is refused when everything is taken back for the first time.
/// The owner takes no lock, since it cannot be seen to be blocked here, but comes again until it has met the fence.
#[test]
fn loom_shard_refused() {
    let run = |take_back: fn(&Store, &Arc<Shard>)| {
        move || {
            let store = Store::new(2);
            let shard = store.lease(&[0, 1]);
            let owner = spawn({
                let (store, shard) = (store.clone(), shard.clone());
                move || {
                    let mut left = Vec::new();
                    for _ in 0..2 {
                        step();
                        let slot = store.gate.enter(&shard).and_then(|mut held| held.take(class(), 1));
                        let Some(slot) = slot else { continue };
                        let number = store.segments.write(slot);
                        step();
                        // SAFETY: ours, and in no list.
                        let put = store
                            .gate
                            .enter(&shard)
                            .map(|mut held| unsafe { held.put(slot, 1, list_of(class())) });
                        if !matches!(put, Some(Put::Kept)) {
                            left.push(number);
                        }
                    }
                    while !shard.has_met() {
                        drop(store.gate.enter(&shard));
                        loom::thread::yield_now();
                    }
                    left
                }
            });
            take_back(&store, &shard);
            take_back(&store, &shard);
            let mut all = owner.join().unwrap();
            all.extend(store.all());
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        }
    };
    model_refused("shard: one owner, the call is refused", 3, run(|store, _| store.take_back()));
    model_refused("shard: the same, one shard hushed", 3, run(|store, shard| store.take_one_back(shard)));
}

#[test]
fn loom_shard_taken_back() {
    model("shard: one owner, taken back twice", 3, || taken_back(&Store::new(2)));
}

#[test]
fn loom_fenced_shard_taken_back() {
    model("shard: the same where owners fence for themselves", 3, || taken_back(&Store::fenced(2)));
}

#[test]
fn loom_shard_hushed() {
    model("shard: two owners, one of them hushed", 3, || hushed(&Store::new(3)));
}

#[test]
fn loom_fenced_shard_hushed() {
    model("shard: the same where owners fence for themselves", 3, || hushed(&Store::fenced(3)));
}

#[test]
fn loom_shards_taken_back() {
    model("shard: two owners, taken back", 2, || {
        let store = Store::new(3);
        let owner = |numbers: &'static [usize]| {
            let shard = store.lease(numbers);
            let store = store.clone();
            spawn(move || {
                let one = store.take(&shard);
                let two = store.take(&shard);
                for slot in [one, two].into_iter().flatten() {
                    store.put(&shard, slot);
                }
            })
        };
        let owners = [owner(&[0, 1]), owner(&[2])];
        store.take_back();
        for owner in owners {
            owner.join().unwrap();
        }
        assert_eq!(store.all(), [0, 1, 2]);
    });
}

//! Loom models of the parts without a lock: transfer caches, and thread caches with the gate that keeps their owners
//! out.
//!
//! Each model ends by looking for every segment: it must be in exactly one place. Besides, each segment has a cell that
//! whoever takes the segment writes to, as the owner of a buffer would; loom fails the model where two owners of a
//! segment, one after the other, are not ordered.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as StdAtomicU64, Ordering as StdOrdering};

use loom::thread::spawn;

use super::cache::Put;
use super::*;
use crate::sync::{Mutex, Ordering, UnsafeCell, model, model_refused, step};

/// Segments outside of any list, numbered by what their descriptors have as the run.
struct Segments {
    descriptors: Vec<Descriptor>,
    memory: Vec<UnsafeCell<u32>>,
}

// SAFETY: the cells are loom's, which checks each access.
unsafe impl Sync for Segments {}

impl Segments {
    fn new(count: u32) -> Arc<Self> {
        let descriptor = |i| Descriptor::new(NonNull::dangling(), Some(class()), i, 0);
        Arc::new(Self {
            descriptors: (0..count).map(descriptor).collect(),
            memory: (0..count).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn at(&self, i: usize) -> NonNull<Descriptor> {
        NonNull::from(&self.descriptors[i])
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
    fn write(&self, descriptor: NonNull<Descriptor>) -> usize {
        // SAFETY: alive: the descriptors live as long as `self`.
        let number = unsafe { descriptor.as_ref() }.run() as usize;
        // SAFETY: loom fails the model if anyone else is at it.
        self.memory[number].with_mut(|p| unsafe { *p += 1 });
        number
    }

    /// Takes a batch down and uses each of its segments. Their numbers.
    fn take_down(&self, transfer: &TransferCache, hint: usize) -> Vec<usize> {
        let mut found = Vec::new();
        transfer.take(hint, |batch| {
            let descriptors =
                batch.iter().map(|descriptor| NonNull::new(descriptor.load(Ordering::Relaxed)).unwrap());
            found.extend(descriptors.map(|descriptor| self.write(descriptor)));
        });
        found
    }

    /// A batch of these.
    fn batch<'a>(&'a self, numbers: &'a [usize]) -> impl ExactSizeIterator<Item = *mut Descriptor> + 'a {
        numbers.iter().map(|&i| self.at(i).as_ptr())
    }

    /// Takes a chain apart, using each segment. Their numbers.
    fn unlink(&self, mut chain: Chain) -> Vec<usize> {
        let count = chain.len();
        let numbers: Vec<usize> =
            std::iter::from_fn(|| chain.pop()).map(|descriptor| self.write(descriptor)).collect();
        assert_eq!(numbers.len(), count as usize, "a chain is as long as it says");
        numbers
    }
}

fn class() -> Class {
    listed().next().unwrap()
}

#[test]
fn loom_rack_hands_over() {
    model("transfer cache: two give, one takes", 3, || {
        let segments = Segments::new(3);
        let transfer = Arc::new(TransferCache::new());
        let give = |numbers: &'static [usize]| {
            let (segments, transfer) = (segments.clone(), transfer.clone());
            spawn(move || {
                for &i in numbers {
                    segments.write(segments.at(i));
                }
                step();
                assert!(transfer.put(0, segments.batch(numbers), |_| true), "there are slots for all");
            })
        };
        let givers = [give(&[0, 1]), give(&[2])];
        let mut found = Vec::new();
        for _ in 0..2 {
            step();
            found.extend(segments.take_down(&transfer, 1));
        }
        for giver in givers {
            giver.join().unwrap();
        }
        assert_eq!(transfer.count(), 3 - found.len());
        found.extend(segments.unlink(transfer.drain().0));
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2]);
    });
}

#[test]
fn loom_rack_recycles() {
    model("transfer cache: two take and put back", 3, || {
        let segments = Segments::new(3);
        let transfer = Arc::new(TransferCache::new());
        assert!(transfer.put(0, segments.batch(&[0, 1]), |_| true));
        assert!(transfer.put(0, segments.batch(&[2]), |_| true));
        // Takes a batch, turns it round and puts it back; keeps it where all slots looked taken. Both begin at the same
        // slot, or they would never meet.
        let turn = || {
            let (segments, transfer) = (segments.clone(), transfer.clone());
            move || {
                let mut kept = Vec::new();
                for _ in 0..2 {
                    step();
                    let mut numbers = segments.take_down(&transfer, 0);
                    numbers.reverse();
                    step();
                    if !numbers.is_empty() && !transfer.put(0, segments.batch(&numbers), |_| true) {
                        kept.extend(numbers.iter().map(|&i| segments.write(segments.at(i))));
                    }
                }
                kept
            }
        };
        let other = spawn(turn());
        let mut found = turn()();
        found.extend(other.join().unwrap());
        found.extend(segments.unlink(transfer.drain().0));
        found.sort_unstable();
        assert_eq!(found, [0, 1, 2]);
    });
}

#[test]
fn loom_rack_books() {
    model(
        "transfer cache: one takes and puts back, another takes away what empty slots have reserved",
        3,
        || {
            // What is reserved. Not the model's own: only to be summed up.
            static SUM: StdAtomicU64 = StdAtomicU64::new(0);
            let reserve = |n: u32| {
                SUM.fetch_add(n.into(), StdOrdering::Relaxed);
                true
            };
            SUM.store(0, StdOrdering::Relaxed);
            let segments = Segments::new(2);
            let transfer = Arc::new(TransferCache::new());
            assert!(transfer.put(0, segments.batch(&[0, 1]), reserve));
            let other = spawn({
                let (segments, transfer) = (segments.clone(), transfer.clone());
                move || {
                    let numbers = segments.take_down(&transfer, 0);
                    step();
                    assert!(
                        transfer.put(0, segments.batch(&numbers[1..]), reserve),
                        "nobody else hangs anything up"
                    );
                    numbers[0]
                }
            });
            step();
            SUM.fetch_sub(transfer.unreserve_idle().into(), StdOrdering::Relaxed);
            let mut found = vec![other.join().unwrap()];
            let reserved = SUM.load(StdOrdering::Relaxed);
            assert_eq!(
                transfer.reserved(),
                Some(reserved),
                "what hangs is reserved, and what is reserved is known"
            );
            let (chain, stripped) = transfer.drain();
            assert_eq!(u64::from(stripped), reserved);
            found.extend(segments.unlink(chain));
            found.sort_unstable();
            assert_eq!(found, [0, 1]);
        },
    );
}

/// A gate, its thread caches, and the list that thread caches are filled from and drained to.
struct Store {
    gate: Gate,
    cold: Mutex<(CacheTable, Vec<usize>)>,
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
            cold: Mutex::new((CacheTable::default(), Vec::new())),
            segments: Segments::new(count),
        })
    }

    /// A thread cache with these segments.
    fn lease(&self, numbers: &[usize]) -> Arc<ThreadCache> {
        let cache = self.cold.lock().0.lease(&self.gate);
        let mut held = self.gate.enter(&cache).unwrap();
        held.set_limit(class(), 2);
        assert!(held.fill(class(), self.segments.chain(numbers)).is_empty());
        drop(held);
        cache
    }

    /// The owner's: a segment from its thread cache, or under the lock.
    fn take(&self, cache: &ThreadCache) -> Option<NonNull<Descriptor>> {
        step();
        let hit = self.gate.enter(cache).and_then(|mut held| held.take(class(), 1));
        let descriptor = hit.or_else(|| self.cold.lock().1.pop().map(|i| self.segments.at(i)));
        if let Some(descriptor) = descriptor {
            self.segments.write(descriptor);
        }
        descriptor
    }

    /// The owner's: a segment back to its thread cache, or under the lock.
    fn put(&self, cache: &ThreadCache, descriptor: NonNull<Descriptor>) {
        let number = self.segments.write(descriptor);
        step();
        if let Some(mut held) = self.gate.enter(cache) {
            // SAFETY: ours, and in no list.
            if let Put::Kept = unsafe { held.put(descriptor, 1, list_of(class())) } {
                return;
            }
        }
        self.cold.lock().1.push(number);
    }

    /// The cold side's: everything that thread caches have goes to the list.
    fn take_back(&self) {
        step();
        let mut cold = self.cold.lock();
        let (table, list) = &mut *cold;
        self.gate.quiesce(mode::INSPECT, table);
        for mut held in table.quiet() {
            held.drain_all(|_, chain| list.extend(self.segments.unlink(chain)));
        }
        self.gate.readmit(mode::INSPECT, table);
    }

    /// The cold side's: one segment of one thread cache goes to the list, and other owners are not disturbed.
    fn take_one_back(&self, cache: &Arc<ThreadCache>) {
        step();
        let mut cold = self.cold.lock();
        let (table, list) = &mut *cold;
        self.gate.revoke(std::slice::from_ref(cache), table, |mut held| {
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
    let cache = store.lease(&[0, 1]);
    let owner = spawn({
        let (store, cache) = (store.clone(), cache.clone());
        move || {
            for _ in 0..2 {
                if let Some(descriptor) = store.take(&cache) {
                    store.put(&cache, descriptor);
                }
            }
        }
    });
    store.take_back();
    store.take_back();
    owner.join().unwrap();
    let count = cache.count(class());
    assert!(count.takes <= 2 && count.puts <= 2);
    assert_eq!(store.all(), [0, 1]);
}

/// Two owners, of whom one is hushed.
fn revoked(store: &Arc<Store>) {
    let caches = [store.lease(&[0, 1]), store.lease(&[2])];
    let owners = caches.clone().map(|cache| {
        let store = store.clone();
        spawn(move || {
            let one = store.take(&cache);
            one.into_iter().for_each(|descriptor| store.put(&cache, descriptor));
        })
    });
    store.take_one_back(&caches[0]);
    for owner in owners {
        owner.join().unwrap();
    }
    assert_eq!(store.all(), [0, 1, 2]);
}

/// An owner that has fenced by the system's call alone, which is refused when everything is taken back for the first
/// time. The owner takes no lock, since it cannot be seen to be blocked here, but comes again until it has met the
/// fence.
#[test]
fn loom_shard_refused() {
    let run = |take_back: fn(&Store, &Arc<ThreadCache>)| {
        move || {
            let store = Store::new(2);
            let cache = store.lease(&[0, 1]);
            let owner = spawn({
                let (store, cache) = (store.clone(), cache.clone());
                move || {
                    let mut left = Vec::new();
                    for _ in 0..2 {
                        step();
                        let descriptor = store.gate.enter(&cache).and_then(|mut held| held.take(class(), 1));
                        let Some(descriptor) = descriptor else { continue };
                        let number = store.segments.write(descriptor);
                        step();
                        // SAFETY: ours, and in no list.
                        let put = store
                            .gate
                            .enter(&cache)
                            .map(|mut held| unsafe { held.put(descriptor, 1, list_of(class())) });
                        if !matches!(put, Some(Put::Kept)) {
                            left.push(number);
                        }
                    }
                    while !cache.has_seen_fenced() {
                        drop(store.gate.enter(&cache));
                        loom::thread::yield_now();
                    }
                    left
                }
            });
            take_back(&store, &cache);
            take_back(&store, &cache);
            let mut all = owner.join().unwrap();
            all.extend(store.all());
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        }
    };
    model_refused("thread cache: one owner, the call is refused", 3, run(|store, _| store.take_back()));
    model_refused(
        "thread cache: the same, one thread cache hushed",
        3,
        run(|store, cache| store.take_one_back(cache)),
    );
}

#[test]
fn loom_shard_taken_back() {
    model("thread cache: one owner, taken back twice", 3, || taken_back(&Store::new(2)));
}

#[test]
fn loom_fenced_shard_taken_back() {
    model("thread cache: the same where owners fence for themselves", 3, || taken_back(&Store::fenced(2)));
}

#[test]
fn loom_shard_hushed() {
    model("thread cache: two owners, one of them hushed", 3, || revoked(&Store::new(3)));
}

#[test]
fn loom_fenced_shard_hushed() {
    model("thread cache: the same where owners fence for themselves", 3, || revoked(&Store::fenced(3)));
}

#[test]
fn loom_shards_taken_back() {
    model("thread cache: two owners, taken back", 2, || {
        let store = Store::new(3);
        let owner = |numbers: &'static [usize]| {
            let cache = store.lease(numbers);
            let store = store.clone();
            spawn(move || {
                let one = store.take(&cache);
                let two = store.take(&cache);
                for descriptor in [one, two].into_iter().flatten() {
                    store.put(&cache, descriptor);
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

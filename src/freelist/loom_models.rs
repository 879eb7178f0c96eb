//! Loom models of thread caches with the gate that keeps their owners out.
//!
//! At its end each model looks for every segment: each must be in exactly one place. Besides, each
//! segment has a cell. The thread that takes the segment writes to the cell, as the owner of a
//! buffer would. Loom fails the model where two such writes are not ordered.

use std::ptr::NonNull;
use std::sync::Arc;

use loom::thread::spawn;

use super::*;
use crate::sync::{Mutex, UnsafeCell, model, model_fenced, step};

/// Segments outside of any list. The field `run` of their descriptors holds their number.
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

    /// A chain of the segments with these numbers.
    fn chain(&self, numbers: &[usize]) -> Chain {
        let mut chain = Chain::new();
        for &i in numbers {
            // SAFETY: the caller owns them, so they are in no list.
            unsafe { chain.push(self.at(i)) };
        }
        chain
    }

    /// Writes to the memory of a segment that this thread owns. Returns the segment's number.
    fn write(&self, descriptor: NonNull<Descriptor>) -> usize {
        // SAFETY: alive, since the descriptors live as long as `self`.
        let number = unsafe { descriptor.as_ref() }.run() as usize;
        // SAFETY: loom fails the model if another thread accesses the cell at the same time.
        self.memory[number].with_mut(|p| unsafe { *p += 1 });
        number
    }

    /// Takes a chain apart and writes to each segment. Returns their numbers.
    fn unlink(&self, mut chain: Chain) -> Vec<usize> {
        let count = chain.len();
        let numbers: Vec<usize> =
            std::iter::from_fn(|| chain.pop()).map(|descriptor| self.write(descriptor)).collect();
        assert_eq!(numbers.len(), count as usize, "a chain counts its segments");
        numbers
    }
}

fn class() -> Class {
    listed().next().unwrap()
}

/// A gate, its thread caches, and the list, under the lock, for filling and draining.
struct Store {
    gate: Gate,
    cold: Mutex<(CacheTable, Vec<usize>)>,
    segments: Arc<Segments>,
}

impl Store {
    fn new(count: u32) -> Arc<Self> {
        Arc::new(Self {
            gate: Gate::new(crate::sync::asymmetric()),
            cold: Mutex::new((CacheTable::default(), Vec::new())),
            segments: Segments::new(count),
        })
    }

    /// Leases a thread cache that holds the segments with these numbers.
    fn lease(&self, numbers: &[usize]) -> Arc<ThreadCache> {
        let cache = self.cold.lock().0.lease(&self.gate);
        let mut held = self.gate.enter(&cache).unwrap();
        held.grant(class(), 2);
        assert!(held.fill(class(), self.segments.chain(numbers)).is_empty());
        drop(held);
        cache
    }

    /// For the owner: takes a segment from its thread cache, or from the list under the lock.
    fn take(&self, cache: &ThreadCache) -> Option<NonNull<Descriptor>> {
        step();
        let hit = self.gate.enter(cache).and_then(|mut held| held.take(class(), 1));
        let descriptor = hit.or_else(|| self.cold.lock().1.pop().map(|i| self.segments.at(i)));
        if let Some(descriptor) = descriptor {
            self.segments.write(descriptor);
        }
        descriptor
    }

    /// For the owner: returns a segment to its thread cache, or to the list under the lock.
    fn put(&self, cache: &ThreadCache, descriptor: NonNull<Descriptor>) {
        let number = self.segments.write(descriptor);
        step();
        if let Some(mut held) = self.gate.enter(cache) {
            // SAFETY: the owner has taken it, and it is in no list.
            if unsafe { held.put(descriptor, 1, list_of(class())) } {
                return;
            }
        }
        self.cold.lock().1.push(number);
    }

    /// For the cold side: moves everything that thread caches hold to the list.
    fn reclaim(&self) {
        step();
        let mut cold = self.cold.lock();
        let (table, list) = &mut *cold;
        self.gate.quiesce(table);
        for mut held in table.quiet() {
            held.drain_all(|_, chain| list.extend(self.segments.unlink(chain)));
        }
        self.gate.readmit(table);
    }

    /// For the cold side: moves one segment of one cache to the list. The other owners go on.
    fn reclaim_one(&self, cache: &Arc<ThreadCache>) {
        step();
        let mut cold = self.cold.lock();
        let list = &mut cold.1;
        self.gate.revoke(std::slice::from_ref(cache), |mut held| {
            list.extend(self.segments.unlink(held.drain(class(), 1)));
        });
    }

    /// All segments' numbers, reclaimed from the caches. The caller has joined the owners, none of
    /// which the cold side has kept out.
    fn all(&self) -> Vec<usize> {
        assert!(self.cold.lock().0.caches().all(|cache| self.gate.enter(cache).is_some()), "it is kept out");
        self.reclaim();
        let mut all = self.cold.lock().1.clone();
        all.sort_unstable();
        all
    }
}

/// One owner, whose thread cache is reclaimed twice.
fn reclaimed(store: &Arc<Store>) {
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
    store.reclaim();
    store.reclaim();
    owner.join().unwrap();
    let (takes, puts) = cache.count(class());
    assert!(takes <= 2 && puts <= 2);
    assert_eq!(store.all(), [0, 1]);
}

/// Two owners. The permit of one is revoked.
fn revoked(store: &Arc<Store>) {
    let caches = [store.lease(&[0, 1]), store.lease(&[2])];
    let owners = caches.clone().map(|cache| {
        let store = store.clone();
        spawn(move || {
            let one = store.take(&cache);
            one.into_iter().for_each(|descriptor| store.put(&cache, descriptor));
        })
    });
    store.reclaim_one(&caches[0]);
    for owner in owners {
        owner.join().unwrap();
    }
    assert_eq!(store.all(), [0, 1, 2]);
}

/// Runs a model in both modes: with the asymmetric fence, and where owners fence for themselves.
fn in_both_modes(name: &'static str, segments: u32, run: fn(&Arc<Store>)) {
    model(name, 3, move || run(&Store::new(segments)));
    model_fenced(name, 3, move || run(&Store::new(segments)));
}

#[test]
fn loom_cache_reclaimed() {
    in_both_modes("thread cache: one owner, reclaimed twice", 2, reclaimed);
}

#[test]
fn loom_cache_revoked() {
    in_both_modes("thread cache: two owners, the permit of one is revoked", 3, revoked);
}

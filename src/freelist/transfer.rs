//! Transfer caches: through them thread caches pass batches of free segments to each other.
//!
//! A thread that returns more than it takes fills its thread cache, and one that takes more than it
//! returns empties its own. Between them each class has a transfer cache: a few stacks of free
//! segments, each with a lock that is held while a batch of addresses is copied. What it has no
//! room for goes back to its runs.
//!
//! 16 threads that pass on segments of 1 MiB would take a single lock four million times a second,
//! more than it can serve. So threads begin at different stacks, and skip one that is locked.
//!
//! No lock is taken under this one. Owners of thread caches take it inside the [`super::Gate`]
//! only. So a cold side that has shut all owners out finds each cached segment in exactly one list.

use std::ptr::NonNull;

use super::descriptor::{Chain, Descriptor};
use crate::sync::{AtomicU32, Mutex, MutexGuard, Ordering};

/// Stacks in a transfer cache. (One in models, which show the protocol of one.)
const STACKS: usize = if cfg!(loom) { 1 } else { 4 };

/// A stack holds no more than this many batches of the size of the one that comes. There are few,
/// because other classes cannot use the memory in them until it is reclaimed.
const MOST_BATCHES: usize = 2;

/// The least number of segments that a quota must have room for. With fewer of them, threads of one
/// class would often find none.
const LEAST_SEGMENTS: usize = if cfg!(loom) { 1 } else { 4 };

/// The transfer cache of one class.
#[derive(Debug)]
pub(crate) struct TransferCache([Stack; STACKS]);

/// A part of a transfer cache. On two cache lines: processors fetch neighbours in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Stack {
    /// The number of segments that the stack's part of the quota has room for.
    most: usize,
    /// The number of segments here, for threads without the lock. Only the holder writes it.
    count: AtomicU32,
    segments: Mutex<Segments>,
}

#[derive(Debug, Default)]
struct Segments(Vec<NonNull<Descriptor>>);

// SAFETY: a transfer cache owns its segments' descriptors, and descriptors are Send.
unsafe impl Send for Segments {}

impl Stack {
    /// Runs `change` on the segments, and notes how many are left.
    fn with(
        &self,
        mut segments: MutexGuard<'_, Segments>,
        change: impl FnOnce(&mut Vec<NonNull<Descriptor>>),
    ) {
        change(&mut segments.0);
        // Release: pairs with the acquire in `count`.
        self.count.store(segments.0.len() as u32, Ordering::Release);
    }

    fn count(&self) -> usize {
        // Acquire: pairs with the release in `with`.
        self.count.load(Ordering::Acquire) as usize
    }
}

impl TransferCache {
    /// For a class of this stride, whose transfer cache may hold `quota` bytes, to the nearest
    /// segment. (Strides are above a power of two, and quotas are mostly one: eight batches must
    /// fit where eight powers would.)
    pub(crate) fn new(quota: usize, stride: usize) -> Self {
        let all = Some((quota + stride / 2) / stride).filter(|all| *all >= LEAST_SEGMENTS).unwrap_or(0);
        Self(std::array::from_fn(|at| Stack {
            most: all / STACKS + usize::from(at < all % STACKS),
            count: AtomicU32::new(0),
            segments: Mutex::new(Segments::default()),
        }))
    }

    /// The stacks in a thread's order of looking, from one on that differs between threads.
    fn stacks(&self, first: usize) -> impl Iterator<Item = &Stack> {
        (0..STACKS).map(move |at| &self.0[first.wrapping_add(at) % STACKS])
    }

    /// Takes over a batch's first segments, as many as there is room for. Returns their number.
    pub(crate) fn put(
        &self,
        first: usize,
        mut batch: impl ExactSizeIterator<Item = NonNull<Descriptor>>,
    ) -> usize {
        let len = batch.len();
        for stack in self.stacks(first) {
            let most = stack.most.min(MOST_BATCHES * len);
            if batch.len() == 0 || stack.count() >= most {
                continue;
            }
            if let Some(segments) = stack.segments.try_lock() {
                stack.with(segments, |segments| {
                    let room = most.saturating_sub(segments.len());
                    segments.extend(batch.by_ref().take(room));
                });
            }
        }
        len - batch.len()
    }

    /// Gives up to `most` segments to `sink`.
    pub(super) fn take(&self, first: usize, mut most: usize, mut sink: impl FnMut(NonNull<Descriptor>)) {
        for stack in self.stacks(first) {
            if most == 0 || stack.count() == 0 {
                continue;
            }
            if let Some(segments) = stack.segments.try_lock() {
                stack.with(segments, |segments| {
                    let stay = segments.len().saturating_sub(most);
                    most -= segments.len() - stay;
                    segments.drain(stay..).for_each(&mut sink);
                });
            }
        }
    }

    /// Takes all segments as one chain.
    pub(crate) fn drain(&self) -> Chain {
        let mut chain = Chain::new();
        for stack in self.0.iter().filter(|stack| stack.count() > 0) {
            stack.with(stack.segments.lock(), |segments| {
                // SAFETY: alive, free and in no other list while in a transfer cache; taken out
                // here.
                segments.drain(..).for_each(|descriptor| unsafe { chain.push(descriptor) });
            });
        }
        chain
    }

    /// Segments that are here. Exact while no thread moves a batch. A caller that finds none sees
    /// where those went that were here.
    pub(crate) fn count(&self) -> usize {
        self.0.iter().map(Stack::count).sum()
    }

    /// Visits every descriptor. For `check()`: under the lock, with all owners shut out.
    pub(crate) fn for_each(&self, mut visit: impl FnMut(&Descriptor)) {
        for stack in &self.0 {
            // SAFETY: a segment in a transfer cache is alive.
            stack.segments.lock().0.iter().for_each(|descriptor| visit(unsafe { descriptor.as_ref() }));
        }
    }

    /// Adds a segment, though there may be no room: for a check to see.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn exceed(&self, descriptor: NonNull<Descriptor>) {
        self.0[0].with(self.0[0].segments.lock(), |segments| segments.push(descriptor));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_class_keeps_its_quota_and_eight_batches() {
        let puts = |quota: usize, batch: usize| {
            let transfer = TransferCache::new(quota, 64);
            let batch = || vec![NonNull::dangling(); batch].into_iter();
            let put =
                std::iter::from_fn(|| Some(transfer.put(0, batch())).filter(|put| *put > 0)).sum::<usize>();
            assert_eq!(transfer.count(), put);
            let mut taken = 0;
            transfer.take(0, put, |_| taken += 1);
            assert_eq!((taken, transfer.count()), (put, 0));
            put
        };
        // Nothing, where fewer than four segments fit. What is missing may be half a segment.
        assert_eq!([puts(0, 1), puts(223, 1), puts(224, 1)], [0, 0, 4]);
        assert_eq!([puts(9 * 64, 1), puts(19 * 64, 3), puts(200 * 64, 32)], [8, 19, 200]);
        assert_eq!(puts(1 << 30, 32), 256);
    }
}

//! Events: a table in which a query takes no lock.
//!
//! A query is the most frequent call, from any thread, so it is a few atomic loads: an event's handle contains its
//! slot's number, slots never move, and a slot counts its recordings. Each recording gets the next number, and puts an
//! operation into a stream; that operation stores the number as completed when its turn comes. The event is complete
//! when the number completed is the number recorded, that is, when its *last* recording is complete. So an event that
//! is recorded again on another stream does not read as complete when only its first recording is.
//!
//! A handle also contains its slot's generation, so a destroyed event's handle names nothing for good: a slot whose
//! generations are used up is not used again. And it contains a number of its device, so that a handle is not mistaken
//! for one of another device.
//!
//! Recording and destroying take the slot's lock, since two recordings of one event must agree on which is the last.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::locks::Mutex;

use super::stream::HostStream;

/// Slots of the first chunk; each chunk has twice as many as the one before.
const FIRST_CHUNK: u32 = 64;
const CHUNKS: usize = 18;
const INDEX_BITS: u32 = 24;
const GENERATION_BITS: u32 = 24;
/// Chunks double from 64 slots, so this is what 18 of them hold; below 2^24.
const EVENT_SLOTS: u32 = FIRST_CHUNK * ((1 << CHUNKS) - 1);
const GENERATIONS: u32 = 1 << GENERATION_BITS;
const _: () = assert!(EVENT_SLOTS <= 1 << INDEX_BITS);

/// The place of a recording: its stream, and its position there.
pub(super) type Recorded = (Arc<HostStream>, u64);

#[derive(Debug, Default)]
struct Slot {
    /// The generation of the event that has the slot; 0: no event has it.
    generation: AtomicU32,
    /// Number of the last recording. It counts on across generations, so that the late completion of a destroyed event
    /// does not complete the next event in the slot.
    recorded: AtomicU64,
    /// The largest number of a recording whose turn has come.
    completed: AtomicU64,
    last: Mutex<Option<Recorded>>,
}

impl Slot {
    fn complete(&self, number: u64) {
        let mut seen = self.completed.load(Ordering::Relaxed);
        // By hand, since the thread sanitizer does not know that `fetch_max` is atomic.
        while seen < number {
            // Release: pairs with the acquire in `query`, which then sees everything that the stream did before.
            match self.completed.compare_exchange_weak(seen, number, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }
}

#[derive(Debug, Default)]
struct Free {
    /// Slots that are free again, each with the generation of its next event.
    slots: Vec<(u32, u32)>,
    /// The number of slots that were ever used.
    made: u32,
}

/// One device's events.
#[derive(Debug)]
pub(super) struct HostEvents {
    tag: u64,
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    free: Mutex<Free>,
    live: AtomicUsize,
}

impl HostEvents {
    /// `tag` tells this device's handles from those of other devices.
    pub(super) fn new(tag: u16) -> Self {
        Self {
            tag: u64::from(tag),
            chunks: [const { OnceLock::new() }; CHUNKS],
            free: Mutex::default(),
            live: AtomicUsize::new(0),
        }
    }

    pub(super) fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    fn slot(&self, index: u32) -> Option<&Slot> {
        let (chunk, at, _) = place(index)?;
        self.chunks.get(chunk)?.get()?.get(at)
    }

    /// The slot that the handle names, if its event exists.
    fn find(&self, handle: u64) -> Option<(u32, &Slot)> {
        let (tag, index, generation) = unpack(handle);
        let slot = self.slot(index)?;
        let exists =
            tag == self.tag && generation != 0 && slot.generation.load(Ordering::Acquire) == generation;
        exists.then_some((index, slot))
    }

    /// A new event. `None`: there are too many.
    pub(super) fn create(&self) -> Option<u64> {
        let (index, generation) = {
            let mut free = self.free.lock();
            match free.slots.pop() {
                Some(next) => next,
                None if free.made < EVENT_SLOTS => {
                    let index = free.made;
                    let (chunk, _, size) = place(index)?;
                    self.chunks.get(chunk)?.get_or_init(|| (0..size).map(|_| Slot::default()).collect());
                    free.made += 1;
                    (index, 1)
                }
                None => return None,
            }
        };
        let slot = self.slot(index)?;
        // A recording of the slot's last event may still be in a queue. The new event does not wait for it.
        slot.complete(slot.recorded.load(Ordering::Relaxed));
        slot.generation.store(generation, Ordering::Release);
        self.live.fetch_add(1, Ordering::Relaxed);
        Some(pack(self.tag, index, generation))
    }

    /// `false`: there is no such event.
    pub(super) fn destroy(&self, handle: u64) -> bool {
        let Some((index, slot)) = self.find(handle) else { return false };
        let (_, _, generation) = unpack(handle);
        let mut last = slot.last.lock();
        if slot.generation.compare_exchange(generation, 0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        let stream = last.take();
        drop(last);
        drop(stream);
        self.live.fetch_sub(1, Ordering::Relaxed);
        if generation + 1 < GENERATIONS {
            self.free.lock().slots.push((index, generation + 1));
        }
        true
    }

    /// Records the event: `enqueue` gets the slot and the recording's number, and says where it was queued.
    /// `None`: there is no such event.
    pub(super) fn record<E>(
        &self,
        handle: u64,
        enqueue: impl FnOnce(u32, u64) -> Result<Recorded, E>,
    ) -> Option<Result<(), E>> {
        let (index, slot) = self.find(handle)?;
        let (_, _, generation) = unpack(handle);
        let mut last = slot.last.lock();
        if slot.generation.load(Ordering::Relaxed) != generation {
            return None;
        }
        // Counted before it is queued, or the event could still read as complete right after; uncounted if refused.
        let number = slot.recorded.load(Ordering::Relaxed) + 1;
        slot.recorded.store(number, Ordering::Release);
        Some(match enqueue(index, number) {
            Ok(recorded) => {
                *last = Some(recorded);
                Ok(())
            }
            Err(error) => {
                slot.recorded.store(number - 1, Ordering::Release);
                Err(error)
            }
        })
    }

    /// Notes that the turn of a recording has come.
    pub(super) fn complete(&self, index: u32, number: u64) {
        if let Some(slot) = self.slot(index) {
            slot.complete(number);
        }
    }

    /// Whether the event's last recording is complete. `None`: there is no such event.
    #[inline]
    pub(super) fn query(&self, handle: u64) -> Option<bool> {
        let (_, slot) = self.find(handle)?;
        // In this order: a recording in between makes a complete event look incomplete, never the reverse.
        let completed = slot.completed.load(Ordering::Acquire);
        Some(completed >= slot.recorded.load(Ordering::Acquire))
    }

    /// Where the event was recorded last, if it ever was. `None`: there is no such event.
    pub(super) fn last(&self, handle: u64) -> Option<Option<Recorded>> {
        let (_, slot) = self.find(handle)?;
        Some(slot.last.lock().clone())
    }
}

/// The chunk of a slot, its place in the chunk, and the chunk's size.
fn place(index: u32) -> Option<(usize, usize, u32)> {
    let shifted = index.checked_add(FIRST_CHUNK)?;
    let chunk = shifted.ilog2() - FIRST_CHUNK.ilog2();
    let size = FIRST_CHUNK << chunk;
    Some((chunk as usize, (shifted - size) as usize, size))
}

fn pack(tag: u64, index: u32, generation: u32) -> u64 {
    tag << (INDEX_BITS + GENERATION_BITS) | u64::from(generation) << INDEX_BITS | u64::from(index)
}

/// Tag, index, generation.
fn unpack(handle: u64) -> (u64, u32, u32) {
    let index = handle & ((1 << INDEX_BITS) - 1);
    let generation = handle >> INDEX_BITS & ((1 << GENERATION_BITS) - 1);
    (handle >> (INDEX_BITS + GENERATION_BITS), index as u32, generation as u32)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_have_distinct_places() {
        let mut next = (0, 0);
        for index in 0..2000 {
            let (chunk, at, size) = place(index).unwrap();
            if (chunk, at) != next {
                assert_eq!((chunk, at), (next.0 + 1, 0));
            }
            assert!(at < size as usize);
            next = (chunk, at + 1);
        }
        assert_eq!(place(EVENT_SLOTS - 1).unwrap().0, CHUNKS - 1);
        assert_eq!(place(EVENT_SLOTS).unwrap().0, CHUNKS);
    }

    #[test]
    fn handles_are_never_used_again() {
        let events = HostEvents::new(3);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..1000 {
            let event = events.create().unwrap();
            assert!(seen.insert(event));
            assert_eq!(events.query(event), Some(true));
            assert!(events.destroy(event));
            assert!(!events.destroy(event));
            assert_eq!(events.query(event), None);
        }
        assert_eq!(events.live(), 0);
        assert_eq!(HostEvents::new(4).query(*seen.iter().next().unwrap()), None);
    }

    #[test]
    fn a_slot_without_generations_is_retired() {
        let events = HostEvents::new(1);
        let first = events.create().unwrap();
        assert!(events.destroy(first));
        events.free.lock().slots[0].1 = GENERATIONS - 1;
        let last = events.create().unwrap();
        assert!(events.destroy(last));
        assert_ne!(unpack(events.create().unwrap()).1, 0);
    }

    #[test]
    fn only_the_last_recording_counts() {
        let events = HostEvents::new(1);
        let event = events.create().unwrap();
        let stream = HostStream::new(1, 1);
        let mut numbers = Vec::new();
        for position in 1..3 {
            let queued = events.record(event, |_, number| {
                numbers.push(number);
                Ok::<_, ()>((Arc::clone(&stream), position))
            });
            assert_eq!(queued, Some(Ok(())));
        }
        assert_eq!(events.query(event), Some(false));
        let (_, index, _) = unpack(event);
        events.complete(index, numbers[0]);
        assert_eq!(events.query(event), Some(false));
        events.complete(index, numbers[1]);
        assert_eq!(events.query(event), Some(true));
        events.complete(index, numbers[0]);
        assert_eq!(events.query(event), Some(true));
        assert_eq!(events.last(event).unwrap().unwrap().1, 2);
    }
}

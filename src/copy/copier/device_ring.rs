//! The device ring: device memory through which chunks pass to be spread or collected.
//!
//! The ring is a list of slots of a segment's size, allocated when a chunk first needs one and
//! freed when none has for a while. If the device has too little memory, a shorter one is tried,
//! and then chunks go without for a while. `route` says which chunks go through it.

use std::time::{Duration, Instant};

use crate::device::DevicePtr;
use crate::device::handle::Device;
use crate::device::memory::DeviceSlice;
use crate::error::Result;
use crate::locks::Mutex;

/// The ring is freed after it was unused for this time.
pub(super) const IDLE: Duration = Duration::from_secs(2);
/// After the device has refused the memory, it is asked again after this time.
const RETRY: Duration = Duration::from_secs(1);
/// The fewest slots that are worth it: one is copied to while the kernel works on another.
const FEWEST: usize = 2;

/// A part of the ring that one chunk has.
pub(super) struct Slot {
    pub(super) memory: DeviceSlice,
}

impl Slot {
    pub(super) fn at(&self, offset: usize) -> DevicePtr {
        DevicePtr(self.memory.ptr().0 + offset as u64)
    }
}

/// What came of asking for a slot: one, or all are in use, or there is no ring.
pub(super) enum Take {
    Slot(Slot),
    Full,
    None,
}

pub(super) struct Ring {
    /// Bytes of a slot, and slots at most.
    slot: usize,
    most: usize,
    state: Mutex<RingState>,
}

#[derive(Default)]
struct RingState {
    free: Vec<Slot>,
    /// Slots that there are. Each keeps the ring's memory.
    slots: usize,
    /// A thread is allocating the ring.
    allocating: bool,
    retry: Option<Instant>,
    used: Option<Instant>,
}

impl Ring {
    /// A ring of at most `bytes`. Nothing is allocated yet.
    pub(super) fn new(slot: usize, bytes: usize) -> Self {
        let slot = slot.next_multiple_of(256);
        Self { slot, most: bytes / slot, state: Mutex::default() }
    }

    /// A free slot, if any. Workers free the ring: each calls [`rest`](Self::rest) before it parks.
    pub(super) fn take(&self, device: &Device) -> Take {
        if self.most < FEWEST {
            return Take::None;
        }
        let mut state = self.state.lock();
        if let Some(slot) = state.free.pop() {
            return Take::Slot(slot);
        }
        if state.slots > 0 {
            return Take::Full;
        }
        // A chunk does without meanwhile: allocating may wait for a region to be pinned.
        if state.allocating || state.retry.is_some_and(|retry| Instant::now() < retry) {
            return Take::None;
        }
        state.allocating = true;
        drop(state);
        let allocated = self.allocate(device);
        let mut state = self.state.lock();
        state.allocating = false;
        match allocated {
            Ok(slots) => {
                (state.slots, state.free) = (slots.len(), slots);
                state.free.pop().map_or(Take::None, Take::Slot)
            }
            Err(error) => {
                state.retry = Instant::now().checked_add(RETRY);
                drop(state);
                crate::foreign::warn!(
                    target: "pinpool::copier", device = device.name(), %error,
                    "no device memory for the ring: pieces are copied in batches instead, at a lower rate"
                );
                Take::None
            }
        }
    }

    fn allocate(&self, device: &Device) -> Result<Vec<Slot>> {
        let mut count = self.most;
        let memory = loop {
            match device.alloc(count * self.slot) {
                Err(error) if !error.is_device_lost() && count / 2 >= FEWEST => count /= 2,
                got => break got?,
            }
        };
        let slot = |at| memory.slice(at..at + self.slot).map(|memory| Slot { memory });
        (0..count * self.slot).step_by(self.slot).map(slot).collect()
    }

    /// Takes back a slot that nothing uses any more; or, `is_lost`, forgets one that a copy or a
    /// kernel may use for ever. Where none is left, the next chunk allocates another ring.
    pub(super) fn give(&self, slot: Slot, is_lost: bool) {
        let mut state = self.state.lock();
        if is_lost {
            state.slots -= 1;
            std::mem::forget(slot);
            return;
        }
        state.used = Some(Instant::now());
        state.free.push(slot);
    }

    /// Frees the ring if it was unused for [`IDLE`]. Returns the time to the next look.
    pub(super) fn rest(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let idle = state.used.map_or(Duration::ZERO, |used| used.elapsed());
        if state.free.len() < state.slots || state.slots > 0 && idle < IDLE {
            return Some(IDLE.saturating_sub(idle).max(Duration::from_millis(1)));
        }
        state.slots = 0;
        let freed = std::mem::take(&mut state.free);
        drop(state);
        drop(freed);
        None
    }

    /// Bytes of device memory that it has.
    pub(super) fn len(&self) -> usize {
        self.state.lock().slots * self.slot
    }
}

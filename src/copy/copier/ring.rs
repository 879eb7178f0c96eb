//! The device ring: device memory that chunks pass through when their bytes are spread or collected there.
//!
//! The ring is a list of slots of a chunk's size. It is allocated when a chunk first needs a slot, and freed when no
//! chunk has needed one for a while. If the device has too little memory for it, a shorter one is tried, and then
//! chunks go without for a while.

use std::time::{Duration, Instant};

use crate::device::DevicePtr;
use crate::device::handle::Device;
use crate::device::memory::DeviceSlice;
use crate::error::Result;
use crate::locks::Mutex;

/// The ring is freed after it was unused for so long.
pub(super) const IDLE: Duration = Duration::from_secs(2);
/// After the device has refused the memory, it is asked again when so much time has passed.
const RETRY: Duration = Duration::from_secs(1);
/// The fewest slots that are worth it: one is copied to while the kernel works on another.
const FEWEST: usize = 2;

/// A part of the ring that one chunk has.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) memory: DeviceSlice,
}

impl Slot {
    pub(super) fn at(&self, offset: usize) -> DevicePtr {
        DevicePtr(self.memory.ptr().0 + offset as u64)
    }
}

/// What came of asking for a slot.
#[derive(Debug)]
pub(super) enum Take {
    Slot(Slot),
    /// All are in use.
    Full,
    /// There is no ring.
    None,
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct Ring {
    /// Bytes of a slot, and slots at most.
    slot: usize,
    most: usize,
    state: Mutex<RingState>,
}

#[derive(Debug, Default)]
struct RingState {
    memory: Option<DeviceSlice>,
    free: Vec<Slot>,
    slots: usize,
    /// A thread is allocating the ring.
    allocating: bool,
    retry: Option<Instant>,
    used: Option<Instant>,
    refused: u64,
}

impl Ring {
    /// A ring of at most `bytes`. Nothing is allocated yet.
    pub(super) fn new(slot: usize, bytes: usize) -> Self {
        let slot = slot.next_multiple_of(256);
        Self { slot, most: bytes / slot, state: Mutex::default() }
    }

    /// A slot, if one is free. The worker whose call allocates the ring frees it: it looks by [`rest`](Self::rest)
    /// before it parks, and when that is due.
    pub(super) fn take(&self, device: &Device) -> Take {
        if self.most < FEWEST {
            return Take::None;
        }
        let mut state = self.state.lock();
        if let Some(slot) = state.free.pop() {
            return Take::Slot(slot);
        }
        if state.memory.is_some() {
            return Take::Full;
        }
        // A chunk that comes while the memory is allocated does without: the call may wait for a region to be pinned.
        if state.allocating || state.retry.is_some_and(|retry| Instant::now() < retry) {
            return Take::None;
        }
        state.allocating = true;
        drop(state);
        let allocated = self.allocate(device);
        let mut state = self.state.lock();
        state.allocating = false;
        match allocated {
            Ok((memory, mut slots)) => {
                let first = slots.pop();
                (state.slots, state.free, state.memory) = (slots.len() + 1, slots, Some(memory));
                first.map_or(Take::None, Take::Slot)
            }
            Err(error) => {
                state.refused += 1;
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

    fn allocate(&self, device: &Device) -> Result<(DeviceSlice, Vec<Slot>)> {
        let mut count = self.most;
        loop {
            match device.alloc(count * self.slot) {
                Ok(memory) => {
                    let slot = |index: usize| {
                        let range = index * self.slot..(index + 1) * self.slot;
                        memory.slice(range).map(|memory| Slot { memory })
                    };
                    let slots = (0..count).map(slot).collect::<Result<_>>()?;
                    return Ok((memory, slots));
                }
                Err(error) if error.is_device_lost() || count / 2 < FEWEST => return Err(error),
                Err(_) => count /= 2,
            }
        }
    }

    /// Takes a slot back that no copy and no kernel uses any more.
    pub(super) fn give(&self, slot: Slot) {
        let mut state = self.state.lock();
        state.used = Some(Instant::now());
        state.free.push(slot);
    }

    /// Takes a slot back, or loses it, when what used it has ended so.
    pub(super) fn ended(&self, slot: Slot, said: &Result<()>) {
        if said.is_ok() { self.give(slot) } else { self.lose(slot) }
    }

    /// A slot that is never given back: a copy or kernel may use it for good.
    pub(super) fn lose(&self, slot: Slot) {
        let mut state = self.state.lock();
        state.slots -= 1;
        std::mem::forget(slot);
        if state.slots == 0 {
            // No slot is left. The next chunk allocates another ring.
            let memory = state.memory.take();
            drop(state);
            drop(memory);
        }
    }

    /// Frees the ring if all slots are free, and have been for [`IDLE`]. Gives the time until another look is due.
    pub(super) fn rest(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        state.memory.as_ref()?;
        let idle = state.used.map_or(Duration::ZERO, |used| used.elapsed());
        if state.free.len() < state.slots || idle < IDLE {
            return Some(IDLE.saturating_sub(idle).max(Duration::from_millis(1)));
        }
        let freed = (state.memory.take(), std::mem::take(&mut state.free));
        drop(state);
        drop(freed);
        None
    }

    /// Bytes of device memory that it has, and how often it was refused.
    pub(super) fn stats(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.memory.as_ref().map_or(0, |memory| memory.len()), state.refused)
    }
}

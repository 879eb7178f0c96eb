//! The machine: devices with streams and memory, the streams' threads, how a device dies.
//!
//! All that a node has is in its [`State`], under one lock; what a device has is in its [`Unit`]. A
//! stream is a channel to a thread, which runs operations in their order. Each has a number, under
//! which [`Unit::queued`] has it until it has ended. An event is the number of its last recording,
//! and complete when that is not queued any more. An operation that waits for an event waits for
//! that number: an earlier one, so no circle can form.
//!
//! Operations run without the lock. [`Node::kill`] notes the cause of death, takes what has not
//! begun out of `queued`, and waits until no copy is in it: from then on the device touches no host
//! memory. Each call that answers that the device is dead waits for the same: its caller may free
//! at once what copies used. A host function is not waited for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender};

use super::memory::{Block, Place, copy};
use super::{Call, Failure, Fault, HostConfig};
use crate::device::HostKind;
use crate::foreign::{self, Owned};
use crate::locks::{Condvar, Mutex, MutexGuard};

/// A function of the program's, which gets the bytes that it reads and those that it writes.
pub(crate) type HostFunction = Box<dyn FnOnce(&[&[u8]], &mut [&mut [u8]]) + Send>;

/// What a stream does. Without `work` it is a mark, for events.
#[derive(Default)]
pub(super) struct Operation {
    /// It does not begin before the operation of this number has ended.
    after: u64,
    work: Option<Box<dyn FnOnce() + Send>>,
    is_copy: bool,
    begun: bool,
    /// It does not begin until the device is resumed.
    pub(super) stalled: bool,
}

impl Operation {
    pub(super) fn mark(after: u64) -> Self {
        Self { after, ..Self::default() }
    }

    pub(super) fn copy(from: Place, to: Place, len: usize) -> Self {
        // SAFETY: the places were checked at submission. The submitter promised (`Driver::copy`)
        // that host memory is valid and unused until an event after this operation is complete, and
        // no such event completes before the operation has ended. A dying device says so only when
        // it touches no memory.
        let work = move || unsafe { copy(&from, &to, len) };
        Self { work: Some(Box::new(work)), is_copy: true, ..Self::default() }
    }

    /// Calls a host function with copies of the bytes, and writes back those that it may write. So
    /// the function never shares memory with a copy of another stream.
    pub(super) fn launch(
        reads: Vec<(Place, usize)>,
        writes: Vec<(Place, usize)>,
        function: Owned<HostFunction>,
    ) -> Self {
        let fetch = |(place, len): &(Place, usize)| -> Vec<u8> {
            let mut bytes = vec![0; *len];
            // SAFETY: the place was checked with this length, which the unused vector has, too.
            unsafe { copy(place, &Place::Host(bytes.as_mut_ptr()), *len) };
            bytes
        };
        let work = move || {
            let read: Vec<_> = reads.iter().map(fetch).collect();
            let mut written: Vec<_> = writes.iter().map(fetch).collect();
            let panicked = "a host function on a stream panicked: the device memory stays as it was";
            let returned = foreign::call(panicked, || {
                let read: Vec<&[u8]> = read.iter().map(Vec::as_slice).collect();
                let mut written: Vec<&mut [u8]> = written.iter_mut().map(Vec::as_mut_slice).collect();
                function.into_inner()(&read, &mut written);
            });
            if returned.is_some() {
                for ((place, len), bytes) in writes.iter().zip(&mut written) {
                    // SAFETY: as above, and nothing writes the vector any more.
                    unsafe { copy(&Place::Host(bytes.as_mut_ptr()), place, *len) };
                }
            }
        };
        Self { work: Some(Box::new(work)), ..Self::default() }
    }
}

/// One device.
#[derive(Default)]
pub(super) struct Unit {
    /// Why the device died, if it did.
    pub(super) dead: Option<String>,
    pub(super) hung: bool,
    /// The way of operations' numbers to each stream's thread, which ends when the stream was
    /// destroyed.
    pub(super) streams: BTreeMap<u64, Sender<u64>>,
    /// Events, with the numbers of their last recordings.
    pub(super) events: BTreeMap<u64, u64>,
    /// What is queued or running.
    pub(super) queued: BTreeMap<u64, Operation>,
    /// Allocations, by their addresses.
    pub(super) memory: BTreeMap<u64, Arc<Block>>,
    /// Host memory that the device has pinned or allocated, by its start: the end, and the kind if
    /// the device has allocated it.
    pub(super) ranges: BTreeMap<usize, (usize, Option<HostKind>)>,
}

impl Unit {
    /// Bytes of device memory that are allocated.
    pub(super) fn used(&self) -> usize {
        self.memory.values().map(|block| block.len).sum()
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) units: Vec<Unit>,
    /// The last number given to an event or an operation.
    last: u64,
    /// The last number given to a stream: a count, since its delays follow from it.
    pub(super) created: u64,
    /// The end of the device addresses given out so far.
    pub(super) addresses: u64,
    /// Faults that have not struck.
    pub(super) armed: Vec<Fault>,
    pub(super) trace: Option<Vec<Call>>,
}

impl State {
    /// A number that no event or operation has or had, and not 0.
    pub(super) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Counts the call, and takes the fault that strikes it: the first armed that is due.
    pub(super) fn strike(&mut self, device: usize, call: Call) -> Option<Failure> {
        self.trace.iter_mut().for_each(|trace| trace.push(call));
        let is_of = |fault: &Fault| (fault.device as usize, fault.call) == (device, call);
        let due = self.armed.iter().position(|fault| is_of(fault) && fault.nth == 0);
        let failure = due.map(|at| self.armed.remove(at).failure);
        let others = self.armed.iter_mut().filter(|fault| is_of(fault));
        others.for_each(|fault| fault.nth = fault.nth.saturating_sub(1));
        failure
    }

    /// A range of host memory that a device has pinned or allocated and that overlaps this one: the
    /// device, and the range.
    pub(super) fn pinned(&self, range: Range<usize>) -> Option<(usize, usize, usize)> {
        self.units.iter().enumerate().find_map(|(device, unit)| {
            let (from, (to, _)) = unit.ranges.range(..range.end).next_back()?;
            (*to > range.start).then_some((device, *from, *to))
        })
    }

    /// Whether a device has pinned or allocated the host memory at this address.
    pub(super) fn has_pinned(&self, address: usize) -> bool {
        self.pinned(address..address.saturating_add(1)).is_some()
    }
}

/// What the devices of a node share.
pub(super) struct Node {
    pub(super) state: Mutex<State>,
    /// An operation has ended, or is not to run any more.
    pub(super) ended: Condvar,
    /// A device was resumed, or operations are not to run any more.
    pub(super) resumed: Condvar,
    /// Bytes of memory of each device.
    pub(super) capacity: usize,
    /// The longest delay before a copy, and the seed of the delays.
    late: Option<(Duration, u64)>,
    /// What a unit test does before each call.
    #[cfg(all(test, not(loom)))]
    pub(super) hook: std::sync::OnceLock<Box<dyn Fn(Call) + Send + Sync>>,
}

impl Node {
    pub(super) fn new(config: &HostConfig) -> Arc<Self> {
        let units = (0..config.devices).map(|_| Unit::default()).collect();
        Arc::new(Self {
            state: Mutex::new(State { units, ..State::default() }),
            ended: Condvar::new(),
            resumed: Condvar::new(),
            capacity: config.capacity(),
            late: config.late,
            #[cfg(all(test, not(loom)))]
            hook: std::sync::OnceLock::new(),
        })
    }

    /// Waits until no copy of a dead device runs any more.
    pub(super) fn quiet(&self, state: &mut MutexGuard<'_, State>, device: usize) {
        while state.units[device].queued.values().any(|running| running.is_copy) {
            self.ended.wait(state);
        }
    }

    /// Kills a device. When this returns, no copy of it touches host memory any more, and none will.
    pub(super) fn kill(&self, state: &mut MutexGuard<'_, State>, device: usize, cause: &str) {
        let unit = &mut state.units[device];
        if unit.dead.is_none() {
            unit.dead = Some(cause.to_owned());
            let queued = unit.queued.len();
            unit.queued.retain(|_, operation| operation.begun);
            self.ended.notify_all();
            self.resumed.notify_all();
            let device = format!("host:{device}");
            foreign::debug!(target: "pinpool::device", device, cause, queued, "host device died");
        }
        self.quiet(state, device);
    }

    /// What a stream's thread does until the stream was destroyed.
    pub(super) fn serve(&self, device: usize, stream: u64, numbers: Receiver<u64>) {
        let mut late = self.late.map(|(max, seed)| (max, seed.wrapping_add(stream)));
        numbers.iter().for_each(|number| self.run(device, number, late.as_mut()));
    }

    /// Runs an operation when its turn has come, unless it was dropped by then.
    fn run(&self, device: usize, number: u64, mut late: Option<&mut (Duration, u64)>) {
        let mut state = self.state.lock();
        let work = loop {
            let Unit { hung, queued, .. } = &mut state.units[device];
            let Some(Operation { after, work, stalled, .. }) = queued.get(&number) else { return };
            if *hung || *stalled {
                self.resumed.wait(&mut state);
            } else if queued.contains_key(after) {
                self.ended.wait(&mut state);
            } else if let Some((max, seed)) = late.take_if(|_| work.is_some()) {
                // A device that dies ends the delay, since its streams' threads may have to end.
                self.resumed.wait_for(&mut state, random(seed, *max));
                MutexGuard::unlocked(&mut state, std::thread::yield_now);
            } else if let Some(operation) = queued.get_mut(&number) {
                operation.begun = true;
                break operation.work.take();
            }
        };
        drop(state);
        work.into_iter().for_each(|work| work());
        self.state.lock().units[device].queued.remove(&number);
        self.ended.notify_all();
    }
}

/// A random time up to `max`, and the next seed (of a linear congruential generator).
fn random(seed: &mut u64, max: Duration) -> Duration {
    *seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    max.mul_f64((*seed >> 11) as f64 / (1_u64 << 53) as f64)
}

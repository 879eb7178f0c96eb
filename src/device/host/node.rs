//! The machine: devices with streams and memory, the streams' threads, how a device dies.
//!
//! All that a node has is in its [`State`], under one lock. A stream is a channel to a thread,
//! which runs operations in their order. Each has a number, under which [`State::queued`] has it
//! until it has ended. An event is one atomic number: that of its last recording until the stream
//! has come there, and 0 from then on, so asking about it is one load. A stream that waits for an
//! event waits for that number to leave `queued`: an earlier one, so no circle can form.
//!
//! Bytes are moved without the lock, in parts of 1 MiB at most; before each part the thread looks,
//! under the lock, whether the device is alive. [`Node::kill`] notes the cause of death, takes what
//! has not begun out of `queued`, and waits until no copy of the device is in it: from then on none
//! touches host memory. Each call that answers that the device is dead waits for the same: its
//! caller may free at once what copies used. A host function is called without the lock and not
//! waited for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, unbounded};

use super::memory::{Block, Place, copy_part};
use super::{Call, Failure, Fault, HostConfig};
use crate::amount::amount;
use crate::device::HostKind;
use crate::foreign::{self, Owned};
use crate::locks::{Condvar, Mutex, MutexGuard};

/// The first device address that is given out: the CPU has none as high.
const FIRST_ADDRESS: u64 = 1 << 53;
/// The alignment of allocations' addresses, and the least gap between two.
const GAP: u64 = 4096;
/// The longest allocation. (Linux gives a process no more addresses.)
const LONGEST: usize = 1 << 47;

/// A function of the program's, which gets the bytes that it reads and those that it writes.
pub(crate) type HostFunction = Box<dyn FnOnce(&[&[u8]], &mut [&mut [u8]]) + Send>;

/// A host function, and the places and lengths of the bytes that it gets.
pub(super) struct Kernel {
    pub(super) reads: Vec<(Place, usize)>,
    pub(super) writes: Vec<(Place, usize)>,
    pub(super) function: Owned<HostFunction>,
}

pub(super) enum Work {
    /// From, to, and bytes.
    Copy(Place, Place, usize),
    Launch(Kernel),
    Record(Arc<AtomicU64>),
    /// Waits until the operation with this number has ended.
    Wait(u64),
}

/// An operation that is queued or running.
struct Queued {
    device: usize,
    stream: u64,
    /// The host memory that a copy uses.
    host: Vec<Range<usize>>,
    /// `None`: the stream's thread has taken it, and runs it.
    work: Option<Work>,
}

pub(super) struct Stream {
    /// The number of the driver that made it.
    owner: u64,
    /// `None`: it was destroyed. The thread runs what it has, and ends.
    queue: Option<Sender<u64>>,
    /// Operations from this number on do not run until the stream is resumed.
    pub(super) held: Option<u64>,
}

/// One device.
#[derive(Default)]
pub(super) struct Unit {
    /// Why the device died, if it did.
    pub(super) dead: Option<String>,
    pub(super) hung: bool,
    /// Streams in the order of creation. One that was destroyed is here until its thread has ended.
    pub(super) streams: BTreeMap<u64, Stream>,
    /// Streams made so far, and those that were not destroyed when their driver was dropped.
    created: u64,
    pub(super) left: usize,
    /// The number of events that were not destroyed.
    pub(super) events: usize,
    /// Bytes of device memory, and those that are allocated.
    capacity: usize,
    pub(super) used: usize,
}

impl Unit {
    /// The streams that were not destroyed.
    pub(super) fn open(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.streams.values_mut().filter(|stream| stream.queue.is_some())
    }

    /// Destroys a stream. What is queued still runs on a live device. `false`: no such stream.
    pub(super) fn destroy(&mut self, id: u64) -> bool {
        self.streams.get_mut(&id).and_then(|stream| stream.queue.take()).is_some()
    }
}

/// A device, and the kind of the memory if the device has allocated it.
type Owner = (usize, Option<HostKind>);

#[derive(Default)]
pub(super) struct State {
    pub(super) units: Vec<Unit>,
    pub(super) memory: BTreeMap<u64, Arc<Block>>,
    /// The end of the addresses given out so far.
    addresses: u64,
    /// Host memory that devices have pinned or allocated, by its start: the end, and whose it is.
    pub(super) ranges: BTreeMap<usize, (usize, Owner)>,
    /// The last number given to a stream, a driver or an operation.
    last: u64,
    queued: BTreeMap<u64, Queued>,
    /// Faults that have not struck.
    pub(super) armed: Vec<Fault>,
    pub(super) trace: Option<Vec<Call>>,
}

impl State {
    /// A number that nothing of the node has or had.
    pub(super) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Counts the call, and takes the fault that strikes it: the first armed that is due.
    pub(super) fn strike(&mut self, device: usize, call: Call) -> Option<Failure> {
        self.trace.iter_mut().for_each(|trace| trace.push(call));
        let mut strikes = None;
        self.armed.retain_mut(|fault| {
            if (fault.device as usize, fault.call) != (device, call) {
                return true;
            }
            if fault.nth == 0 && strikes.is_none() {
                strikes = Some(fault.failure);
                return false;
            }
            fault.nth = fault.nth.saturating_sub(1);
            true
        });
        strikes
    }

    /// Enters a range of host memory, or says why it is refused.
    pub(super) fn enter(&mut self, range: &Range<usize>, owner: Owner) -> Result<(), String> {
        match self.ranges.range(..range.end).next_back() {
            Some((start, (end, (other, _)))) if *end > range.start => {
                Err(format!("{range:#x?} overlaps {start:#x}..{end:#x}, which host:{other} has pinned"))
            }
            _ => Ok(_ = self.ranges.insert(range.start, (range.end, owner))),
        }
    }

    /// Takes a range out again that no copy uses, or says why not.
    pub(super) fn leave(&mut self, range: &Range<usize>, owner: Owner) -> Result<(), String> {
        let overlaps = |used: &Range<usize>| used.start < range.end && range.start < used.end;
        if self.queued.values().any(|work| work.host.iter().any(overlaps)) {
            return Err(format!("{range:#x?} is used by a copy that is queued or running"));
        }
        if self.ranges.get(&range.start) != Some(&(range.end, owner)) {
            return Err(format!("{range:#x?} is not what host:{} has pinned or allocated", owner.0));
        }
        Ok(_ = self.ranges.remove(&range.start))
    }

    /// Whether a device has pinned or allocated the host memory at this address.
    pub(super) fn has_pinned(&self, address: usize) -> bool {
        self.ranges.range(..=address).next_back().is_some_and(|(_, (end, _))| address < *end)
    }

    /// Allocates device memory, or says why not.
    pub(super) fn allocate(&mut self, device: usize, len: usize) -> Result<u64, String> {
        let unit = &mut self.units[device];
        let left = unit.capacity - unit.used;
        let [wanted, left_over, all] = [len, left, unit.capacity].map(amount);
        if len > left {
            return Err(format!("out of device memory: {wanted} wanted, {left_over} of {all} left"));
        }
        let address = self.addresses.max(FIRST_ADDRESS) + GAP;
        // Pages are mapped here, and come when they are used.
        let block = if len <= LONGEST { Block::new(device, address, len) } else { None };
        let block = block.ok_or_else(|| format!("the system has no {wanted} for device memory"))?;
        unit.used += len;
        self.addresses = (address + len as u64).next_multiple_of(GAP);
        self.memory.insert(address, block);
        Ok(address)
    }

    /// Queues an operation. `None`: there is no such stream.
    pub(super) fn submit(&mut self, device: usize, id: u64, work: Work, stalls: bool) -> Option<u64> {
        let number = self.number();
        let stream = self.units[device].streams.get_mut(&id)?;
        let queue = stream.queue.as_ref()?;
        if stalls {
            stream.held.get_or_insert(number);
        }
        let mut host = Vec::new();
        match &work {
            Work::Record(event) => event.store(number, Ordering::Relaxed),
            Work::Copy(from, to, len) => {
                host.extend([from, to].into_iter().filter_map(|side| side.host(*len)))
            }
            Work::Launch(_) | Work::Wait(_) => {}
        }
        self.queued.insert(number, Queued { device, stream: id, host, work: Some(work) });
        // It does not fail: the thread has not ended.
        queue.send(number).ok()?;
        Some(number)
    }

    /// The number of a device's operations that are queued or running.
    pub(super) fn queued(&self, device: usize) -> usize {
        self.queued.values().filter(|work| work.device == device).count()
    }
}

/// What the devices of a node share.
pub(super) struct Node {
    pub(super) state: Mutex<State>,
    /// An operation has ended, or is not to run any more.
    ended: Condvar,
    /// A device or a stream was resumed, or operations are not to run any more.
    pub(super) resumed: Condvar,
    /// Whether asking about an event takes more than a look: a fault was armed, a trace was begun,
    /// or a device is dead. Relaxed: who sets it synchronises with other threads' calls itself.
    pub(super) alert: AtomicBool,
    /// The longest delay before a copy, and the seed of the delays.
    late: Option<(Duration, u64)>,
    /// What a unit test does before each call.
    #[cfg(all(test, not(loom)))]
    pub(super) hook: std::sync::OnceLock<Box<dyn Fn(Call) + Send + Sync>>,
}

impl Node {
    pub(super) fn new(config: &HostConfig) -> Arc<Self> {
        let capacity = config.capacity();
        let units = (0..config.devices).map(|_| Unit { capacity, ..Unit::default() }).collect();
        Arc::new(Self {
            state: Mutex::new(State { units, ..State::default() }),
            ended: Condvar::new(),
            resumed: Condvar::new(),
            alert: AtomicBool::new(false),
            // A delay of more than a day never ends in practice, and an `Instant` has room for it.
            late: config.late.map(|(max, seed)| (max.min(Duration::from_secs(1 << 32)), seed)),
            #[cfg(all(test, not(loom)))]
            hook: std::sync::OnceLock::new(),
        })
    }

    /// Waits until an operation has ended, or the device has died.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, number: u64) {
        while state.queued.contains_key(&number) {
            self.ended.wait(state);
        }
    }

    /// Waits until no copy of a dead device touches memory any more.
    pub(super) fn quiet(&self, state: &mut MutexGuard<'_, State>, device: usize) {
        while state.queued.values().any(|work| work.device == device && !work.host.is_empty()) {
            self.ended.wait(state);
        }
    }

    /// Drops operations that have not begun.
    fn clear(&self, state: &mut State, of: impl Fn(&Queued) -> bool) {
        state.queued.retain(|_, work| work.work.is_none() || !of(work));
        self.ended.notify_all();
        self.resumed.notify_all();
    }

    /// Kills a device. When this returns, no copy of it touches memory any more, and none will.
    pub(super) fn kill(&self, state: &mut MutexGuard<'_, State>, device: usize, cause: &str) {
        let dropped = state.queued(device);
        if state.units[device].dead.is_none() {
            state.units[device].dead = Some(cause.to_owned());
            self.alert.store(true, Ordering::Relaxed);
            self.clear(state, |work| work.device == device);
            let device = format!("host:{device}");
            foreign::debug!(target: "pinpool::device", device, cause, dropped, "host device died");
        }
        self.quiet(state, device);
    }

    /// Destroys the streams of a driver that is dropped, and forgets what they have queued.
    pub(super) fn abandon(&self, device: usize, owner: u64) {
        let mut state = self.state.lock();
        let unit = &mut state.units[device];
        for stream in unit.streams.values_mut().filter(|stream| stream.owner == owner) {
            unit.left += usize::from(stream.queue.take().is_some());
        }
        let own: Vec<u64> =
            unit.streams.iter().filter(|(_, it)| it.owner == owner).map(|(id, _)| *id).collect();
        self.clear(&mut state, |work| own.contains(&work.stream));
    }

    /// Makes a stream and starts its thread.
    pub(super) fn create(
        self: &Arc<Self>,
        state: &mut State,
        device: usize,
        owner: u64,
    ) -> std::io::Result<u64> {
        let (id, node, (queue, works)) = (state.number(), Arc::clone(self), unbounded());
        let unit = &mut state.units[device];
        unit.created += 1;
        let nth = (device as u64) << 32 | unit.created;
        let mut late = self.late.map(|(max, seed)| (max, seed.wrapping_add(nth)));
        // Detached: the thread ends by itself after its stream, and no thread waits for that.
        crate::os::thread::spawn(format!("pinpool-host-{id}"), move || {
            for number in works {
                node.run(device, id, number, &mut late);
            }
            node.state.lock().units[device].streams.remove(&id);
        })?;
        unit.streams.insert(id, Stream { owner, queue: Some(queue), held: None });
        Ok(id)
    }

    /// Runs an operation when its turn has come, unless it was dropped by then.
    fn run(&self, device: usize, id: u64, number: u64, late: &mut Option<(Duration, u64)>) {
        let (mut delay, mut until) = (late.as_mut(), None);
        let mut state = self.state.lock();
        loop {
            let Some(work) = state.queued.get(&number).and_then(|queued| queued.work.as_ref()) else {
                return;
            };
            let (unit, moves) = (&state.units[device], matches!(work, Work::Copy(..) | Work::Launch(_)));
            let held = unit.streams.get(&id).and_then(|stream| stream.held);
            if unit.hung || held.is_some_and(|held| held <= number) {
                self.resumed.wait(&mut state);
            } else if matches!(work, Work::Wait(other) if state.queued.contains_key(other)) {
                self.ended.wait(&mut state);
            } else if let Some((max, seed)) = delay.take().filter(|_| moves) {
                // After the delay the loop looks again: the device may be hung or dead by then.
                until = Some(Instant::now() + random(seed, *max));
                MutexGuard::unlocked(&mut state, std::thread::yield_now);
            } else if let Some(until) = until.filter(|until| Instant::now() < *until) {
                self.resumed.wait_until(&mut state, until);
            } else {
                break;
            }
        }
        let State { queued, memory, .. } = &mut *state;
        let Some(work) = queued.get_mut(&number).and_then(|queued| queued.work.take()) else { return };
        let is_freed =
            |place: &Place| matches!(place, Place::Device(block, _) if !memory.contains_key(&block.address));
        let freed = match &work {
            Work::Copy(from, to, _) => is_freed(from) || is_freed(to),
            Work::Launch(kernel) => {
                kernel.reads.iter().chain(&kernel.writes).any(|(place, _)| is_freed(place))
            }
            Work::Record(_) | Work::Wait(_) => false,
        };
        if freed {
            queued.remove(&number);
            let cause = "a queued operation was to use device memory that had been freed";
            return self.kill(&mut state, device, cause);
        }
        match work {
            // SAFETY: the places were checked at submission. The submitter promised
            // (`Driver::copy`) that host memory is valid and unused until an event after this
            // operation is complete, and no such event completes before the operation has ended. A
            // dying device says so only when it touches no memory.
            Work::Copy(from, to, len) => unsafe { self.copy(&mut state, device, &from, &to, len) },
            Work::Launch(kernel) => self.call(&mut state, device, kernel),
            // Release: pairs with the acquire in `HostDriver::query`: who asks sees all effects of
            // what came before. An event that was recorded again has another number by now.
            Work::Record(event) => {
                _ = event.compare_exchange(number, 0, Ordering::Release, Ordering::Relaxed);
            }
            Work::Wait(_) => {}
        }
        state.queued.remove(&number);
        self.ended.notify_all();
    }

    /// Copies while the device lives.
    ///
    /// # Safety
    /// As for [`copy_part`], but `len` may be 0.
    unsafe fn copy(
        &self,
        state: &mut MutexGuard<'_, State>,
        device: usize,
        from: &Place,
        to: &Place,
        len: usize,
    ) {
        let mut at = 0;
        while at < len && state.units[device].dead.is_none() {
            // SAFETY: the caller's promise, and `at < len`.
            at += MutexGuard::unlocked(state, || unsafe { copy_part(from, to, at, len) });
        }
    }

    /// Calls a host function with copies of the bytes, and writes back those that it may write. So
    /// the function never shares memory with a copy of another stream.
    fn call(&self, state: &mut MutexGuard<'_, State>, device: usize, kernel: Kernel) {
        let Kernel { reads, writes, function } = kernel;
        let mut fetch = |places: &[(Place, usize)]| -> Vec<Vec<u8>> {
            let fetch_one = |(place, len): &(Place, usize)| {
                let mut bytes = vec![0; *len];
                let to = Place::Host(bytes.as_mut_ptr());
                // SAFETY: the place was checked with this length, which the unused vector has, too.
                unsafe { self.copy(state, device, place, &to, *len) };
                bytes
            };
            places.iter().map(fetch_one).collect()
        };
        let (read, mut written) = (fetch(&reads), fetch(&writes));
        if state.units[device].dead.is_some() {
            return;
        }
        let returned = MutexGuard::unlocked(state, || {
            let panicked = "a host function on a stream panicked: the device memory stays as it was";
            foreign::call(panicked, || {
                let read: Vec<&[u8]> = read.iter().map(Vec::as_slice).collect();
                let mut written: Vec<&mut [u8]> = written.iter_mut().map(Vec::as_mut_slice).collect();
                function.into_inner()(&read, &mut written);
            })
        });
        if returned.is_some() {
            for ((place, len), bytes) in writes.iter().zip(&mut written) {
                // SAFETY: as above, and nothing writes the vector any more.
                unsafe { self.copy(state, device, &Place::Host(bytes.as_mut_ptr()), place, *len) };
            }
        }
    }
}

/// A random time up to `max`, and the next seed (splitmix64).
fn random(seed: &mut u64, max: Duration) -> Duration {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    max.mul_f64(((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64)
}

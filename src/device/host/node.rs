//! Nodes: several devices, what they share, and [`HostNode`], the handle by which tests step, fail and hang them.

#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use crate::locks::{Condvar, Mutex};

use super::fault::{Call, Failure, Fault, FaultBook};
use super::stream::{CopyOutcome, HostStream, Random, Scratch, StreamNext, StreamTicket};
use super::unit::HostUnit;
use super::{HostConfig, Refusal};
use crate::device::HostKind;
use crate::error::Result;

/// How a node without threads is stepped: by one thread at a time, so that operations run one at a time. The turn to do
/// so is no lock, since an operation may be a function of the program's, which may call the crate.
#[derive(Debug)]
struct Stepper {
    random: Mutex<Random>,
    /// The thread whose turn it is.
    thread: Mutex<Option<ThreadId>>,
    over: Condvar,
}

impl Stepper {
    /// Waits for the turn. `None`: this thread has it, and is running a host function.
    fn turn(&self) -> Option<Turn<'_>> {
        let this = std::thread::current().id();
        let mut thread = self.thread.lock();
        while let Some(other) = *thread {
            if other == this {
                return None;
            }
            self.over.wait(&mut thread);
        }
        *thread = Some(this);
        Some(Turn(self))
    }
}

/// The turn to step a node, until this is dropped.
struct Turn<'a>(&'a Stepper);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.thread.lock() = None;
        self.0.over.notify_one();
    }
}

/// What the devices of a node share.
#[derive(Debug)]
pub(super) struct Node {
    units: Vec<Arc<HostUnit>>,
    pub(super) faults: FaultBook,
    /// Pinned ranges by their start: end, and the device that pinned them.
    pins: Mutex<BTreeMap<usize, (usize, u32)>>,
    /// Host memory that devices allocated, by its start: end, the device, the kind.
    blocks: Mutex<BTreeMap<usize, (usize, u32, HostKind)>>,
    /// `None`: the node has threads.
    stepper: Option<Stepper>,
}

impl Node {
    fn new(config: &HostConfig) -> Arc<Self> {
        let capacity = config.capacity();
        let units = (0..config.devices).map(|ordinal| HostUnit::new(ordinal, capacity, config));
        let stepper = config.stepped.map(|seed| Stepper {
            random: Mutex::new(Random::new(seed)),
            thread: Mutex::default(),
            over: Condvar::new(),
        });
        Arc::new(Self {
            units: units.collect(),
            faults: FaultBook::default(),
            pins: Mutex::default(),
            blocks: Mutex::default(),
            stepper,
        })
    }

    pub(super) fn unit(&self, ordinal: u32) -> Option<&Arc<HostUnit>> {
        self.units.get(ordinal as usize)
    }

    fn units(&self) -> impl Iterator<Item = &Arc<HostUnit>> {
        self.units.iter()
    }

    pub(super) fn is_stepped(&self) -> bool {
        self.stepper.is_some()
    }

    /// Runs one operation of a device and stream of the seed's choice.
    pub(super) fn step(&self) -> bool {
        let Some(stepper) = &self.stepper else { return false };
        let Some(_turn) = stepper.turn() else { return false };
        let mut ready: Vec<_> = self.units().map(|unit| (&**unit, unit.runnable())).collect();
        ready.retain(|(_, streams)| !streams.is_empty());
        if ready.is_empty() {
            return false;
        }
        let choose = |of: usize| stepper.random.lock().below(of as u64) as usize;
        let (unit, streams) = &ready[choose(ready.len())];
        let stream = &streams[choose(streams.len())];
        matches!(stream.step(*unit, &mut Scratch::default()), StreamNext::Ready)
    }

    fn step_stream(&self, ordinal: u32, nth: usize) -> bool {
        let (Some(stepper), Some(unit)) = (&self.stepper, self.unit(ordinal)) else { return false };
        let Some(_turn) = stepper.turn() else { return false };
        let runnable = unit.runnable();
        runnable
            .get(nth)
            .is_some_and(|stream| matches!(stream.step(&**unit, &mut Scratch::default()), StreamNext::Ready))
    }

    /// Waits for an operation of the stream. On a stepped node it runs everything that must come before it.
    pub(super) fn finish(
        &self,
        unit: &HostUnit,
        stream: &Arc<HostStream>,
        position: u64,
        ticket: &StreamTicket,
    ) -> Result<()> {
        let outcome = match &self.stepper {
            None => ticket.wait(),
            Some(stepper) => {
                let (turn, mut scratch) = (stepper.turn(), Scratch::default());
                let mut step = |stream: &HostStream| match &turn {
                    Some(_) if crate::foreign::may_call() => stream.step(unit, &mut scratch),
                    // The caller puts foreign code off while its memory is lent. Here no other thread makes the copy, so
                    // nothing is lent before its turn, and a host function may run.
                    Some(_) => crate::foreign::lifted(|| stream.step(unit, &mut scratch)),
                    // The host function that made this call has not returned.
                    None => StreamNext::Held,
                };
                let mut next = Arc::clone(stream);
                loop {
                    if let Some(outcome) = ticket.outcome() {
                        break outcome;
                    }
                    next = match step(&next) {
                        StreamNext::Ready => Arc::clone(stream),
                        // A circle is impossible: an operation waits only for one that was submitted earlier.
                        StreamNext::Behind(other, _) => other,
                        StreamNext::Empty | StreamNext::Held | StreamNext::Over => {
                            stream.withdraw(position);
                            // The withdrawal has resolved the ticket, unless it was resolved already.
                            break ticket.wait();
                        }
                    };
                }
            }
        };
        match outcome {
            CopyOutcome::Done => Ok(()),
            CopyOutcome::Lost if !unit.is_alive() => Err(unit.lost(Call::CopyBlocking)),
            CopyOutcome::Lost => {
                let text = "the stream is hung, stalled, in the midst of a host function, or waits for one that is; the copy was taken out of \
                            its queue";
                Err(unit.error(Call::CopyBlocking, Refusal::transient(text)))
            }
        }
    }

    /// Enters a pinned range, or says why it is refused.
    pub(super) fn enter_pin(&self, ordinal: u32, range: &Range<usize>) -> Result<(), Refusal> {
        let mut pins = self.pins.lock();
        if let Some((start, (end, owner))) = pins.range(..range.end).next_back() {
            if *end > range.start {
                let text =
                    format!("{range:#x?} overlaps {start:#x}..{end:#x}, which host:{owner} has pinned");
                return Err(Refusal::argument(text));
            }
        }
        pins.insert(range.start, (range.end, ordinal));
        Ok(())
    }

    /// Takes a pinned range out again. Returns the pages that it was on and that no other pinned range is on.
    pub(super) fn leave_pin(&self, ordinal: u32, range: &Range<usize>) -> Result<Range<usize>, Refusal> {
        let mut pins = self.pins.lock();
        if pins.get(&range.start) != Some(&(range.end, ordinal)) {
            return Err(Refusal::argument(format!("{range:#x?} is not what host:{ordinal} has pinned")));
        }
        pins.remove(&range.start);
        let page = crate::os::page_size();
        let (mut start, mut end) = (range.start / page * page, range.end.next_multiple_of(page));
        if pins.range(..range.start).next_back().is_some_and(|(_, pin)| pin.0 > start) {
            start += page;
        }
        if pins.range(range.end..end).next().is_some() {
            end -= page;
        }
        Ok(start..end.max(start))
    }

    /// Whether this address is in a pinned range.
    pub(super) fn is_pinned(&self, address: usize) -> bool {
        let pins = self.pins.lock();
        pins.range(..=address).next_back().is_some_and(|(_, pin)| address < pin.0)
    }

    /// Enters host memory that a device allocated.
    pub(super) fn enter_block(&self, ordinal: u32, range: &Range<usize>, kind: HostKind) {
        self.blocks.lock().insert(range.start, (range.end, ordinal, kind));
    }

    /// Takes host memory that a device allocated out again.
    pub(super) fn leave_block(
        &self,
        ordinal: u32,
        range: &Range<usize>,
        kind: HostKind,
    ) -> Result<(), Refusal> {
        let mut blocks = self.blocks.lock();
        if blocks.get(&range.start) != Some(&(range.end, ordinal, kind)) {
            return Err(Refusal::argument(format!("{range:#x?} is not what host:{ordinal} has allocated")));
        }
        blocks.remove(&range.start);
        Ok(())
    }

    /// Whether any device of the node has pinned the memory at this address.
    pub(super) fn has_pinned(&self, address: usize) -> bool {
        self.pins.lock().range(..=address).next_back().is_some_and(|(_, (end, _))| address < *end)
    }

    /// Whether any queued copy of the node uses these host addresses.
    pub(super) fn uses(&self, range: &Range<usize>) -> bool {
        self.units().any(|unit| unit.uses(range))
    }

    fn allocated(&self, ordinal: u32) -> usize {
        let blocks = self.blocks.lock();
        blocks.iter().filter(|(_, block)| block.1 == ordinal).map(|(start, block)| block.0 - start).sum()
    }

    fn pinned(&self, ordinal: u32) -> usize {
        self.pins.lock().iter().filter(|(_, pin)| pin.1 == ordinal).map(|(start, pin)| pin.0 - start).sum()
    }
}

/// What a host device has that was not given back: see [`HostNode::live`].
///
/// ```
/// # use pinpool::Device;
/// # use pinpool::host::{HostConfig, HostNode};
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// let memory = device.alloc(100)?;
/// let usage = node.live(0);
/// assert_eq!((usage.allocations, usage.allocated_bytes, usage.streams), (1, 100, 0));
/// # drop(memory);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostUsage {
    /// The number of streams created and not destroyed.
    pub streams: usize,
    /// The number of events created and not destroyed.
    pub events: usize,
    /// The number of allocations of device memory.
    pub allocations: usize,
    /// The bytes of these allocations.
    pub allocated_bytes: usize,
    /// Bytes of host memory that the device has pinned.
    pub pinned_bytes: usize,
    /// Bytes of host memory that the device has allocated itself. Those that are page-locked count as pinned, too.
    pub host_bytes: usize,
    /// The number of operations queued or running.
    pub queued: usize,
}

/// A machine with host devices. Clones are the same machine.
///
/// The [module's page](crate::host) says what its devices do. All methods may be called from any thread. In the child of a
/// fork they do nothing, and report nothing.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// use pinpool::host::{HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new().stepped(7))?;
/// let device = Device::on(&node, 0)?;
/// # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory, mut buffer) = (device.stream()?, device.alloc(4)?, pool.checkout(4)?);
/// # buffer.extend_from_slice(b"data");
/// let copy = stream.upload(buffer, memory.slice(..)?)?;
/// assert_eq!(node.queued(0), 1, "nothing runs by itself");
/// assert!(node.step(), "the copy ran");
/// # copy.wait()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct HostNode(pub(super) Arc<Node>);

impl HostNode {
    /// A new node.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if the configuration makes no sense;
    /// [`Error::Forked`](crate::Error::Forked).
    pub fn new(config: HostConfig) -> Result<Self> {
        crate::os::watch_forks()?;
        config.check()?;
        Ok(Self(Node::new(&config)))
    }

    /// The node behind `Device::open("host")`: one device, with threads. The first call makes it.
    #[must_use]
    pub fn system() -> Self {
        static SYSTEM: OnceLock<HostNode> = OnceLock::new();
        let new = || Self(Node::new(&HostConfig::new()));
        if crate::os::watch_forks().is_err() {
            // In the child of a fork none is put there: the fork may have copied the cell while another thread of the
            // parent was filling it.
            return SYSTEM.get().cloned().unwrap_or_else(new);
        }
        SYSTEM.get_or_init(new).clone()
    }

    /// The node, but not in the child of a fork, where its locks may be held by threads that do not exist there.
    fn here(&self) -> Option<&Arc<Node>> {
        Some(&self.0).filter(|_| !crate::os::forked())
    }

    fn unit(&self, device: u32) -> Option<&Arc<HostUnit>> {
        self.here()?.unit(device)
    }

    /// The number of devices.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.0.units.len() as u32
    }

    /// Runs one operation, of a device and stream chosen by the seed. `false`: no operation can run, or the node has
    /// threads.
    pub fn step(&self) -> bool {
        self.here().is_some_and(|node| node.step())
    }

    /// Runs the next operation of one stream. Only the streams whose next operation can run are counted, from 0 in the
    /// order in which they were created; `nth` names one of them. `false`: there is no such stream, or the node has
    /// threads.
    ///
    /// This is for tests that choose the order themselves. With `nth` below [`runnable`](Self::runnable), an operation
    /// runs.
    pub fn step_stream(&self, device: u32, nth: usize) -> bool {
        self.here().is_some_and(|node| node.step_stream(device, nth))
    }

    /// The number of the device's operations that are queued or running.
    #[must_use]
    pub fn queued(&self, device: u32) -> usize {
        self.unit(device).map_or(0, |unit| unit.queued())
    }

    /// The number of the device's streams whose next operation can run.
    #[must_use]
    pub fn runnable(&self, device: u32) -> usize {
        self.unit(device).map_or(0, |unit| unit.runnable().len())
    }

    /// Arms a fault. It strikes once. Of several that are due for one call, the first armed strikes, and the others
    /// strike later calls.
    pub fn fail(&self, fault: Fault) {
        if let Some(node) = self.here() {
            node.faults.arm(Some(fault.device), Some(fault.call), fault.nth, fault.failure);
        }
    }

    /// Makes the `nth` call from now fail, of any kind and to any device of the node; 0 is the next call.
    pub fn fail_any(&self, nth: u64, failure: Failure) {
        if let Some(node) = self.here() {
            node.faults.arm(None, None, nth, failure);
        }
    }

    /// Disarms all faults that have not struck, and says how many there were.
    pub fn clear_faults(&self) -> usize {
        self.here().map_or(0, |node| node.faults.disarm())
    }

    /// Begins to record calls to the node's devices, and forgets those recorded before. The record grows until
    /// [`stop_trace`](Self::stop_trace).
    pub fn start_trace(&self) {
        if let Some(node) = self.here() {
            node.faults.start_trace();
        }
    }

    /// The calls recorded so far, in order, those that failed included.
    #[must_use]
    pub fn trace(&self) -> Vec<Call> {
        self.here().map_or_else(Vec::new, |node| node.faults.trace())
    }

    /// Ends recording and returns what was recorded.
    pub fn stop_trace(&self) -> Vec<Call> {
        self.here().map_or_else(Vec::new, |node| node.faults.stop_trace())
    }

    /// The number of calls recorded since [`start_trace`](Self::start_trace).
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.here().map_or(0, |node| node.faults.calls())
    }

    /// Kills the device for good. When this returns, its copies do not touch host memory any more. The call waits for
    /// the part of a copy that is under way, 1 MiB at most per stream.
    pub fn kill(&self, device: u32) {
        if let Some(unit) = self.unit(device) {
            unit.kill("the device was killed");
        }
    }

    /// Keeps the device's queued operations from running, on all its streams and those made later. Operations that are
    /// running come to their end.
    pub fn hang(&self, device: u32) {
        if let Some(unit) = self.unit(device) {
            unit.hang();
        }
    }

    /// Lets everything on the device run again: it undoes [`hang`](Self::hang), [`hang_stream`](Self::hang_stream) and
    /// [`Failure::Stall`].
    pub fn resume(&self, device: u32) {
        if let Some(unit) = self.unit(device) {
            unit.resume();
        }
    }

    /// Keeps one stream's operations from running. Streams that were not destroyed are counted from 0 in the order in
    /// which they were created. `false`: there is no such stream.
    pub fn hang_stream(&self, device: u32, nth: usize) -> bool {
        self.hold_stream(device, nth, true)
    }

    /// Undoes [`hang_stream`](Self::hang_stream) and [`Failure::Stall`] for one stream, counted in the same way.
    /// `false`: there is no such stream.
    pub fn resume_stream(&self, device: u32, nth: usize) -> bool {
        self.hold_stream(device, nth, false)
    }

    fn hold_stream(&self, device: u32, nth: usize, hung: bool) -> bool {
        let stream = self.unit(device).and_then(|unit| unit.nth_stream(nth));
        stream.inspect(|stream| stream.hold(hung)).is_some()
    }

    /// What the device has that was not given back, for tests that look for leaks.
    #[must_use]
    pub fn live(&self, device: u32) -> HostUsage {
        let Some(unit) = self.unit(device) else { return HostUsage::default() };
        let (allocations, allocated_bytes) = unit.memory.usage();
        HostUsage {
            streams: unit.open_streams(),
            events: unit.events.live(),
            allocations,
            allocated_bytes,
            pinned_bytes: self.0.pinned(device),
            host_bytes: self.0.allocated(device),
            queued: unit.queued(),
        }
    }
}

#[cfg(all(test, not(loom)))]
impl HostNode {
    /// Weak references to the device's streams, which their threads keep.
    pub(super) fn watch_streams(&self, device: u32) -> Vec<std::sync::Weak<HostStream>> {
        self.unit(device).map_or_else(Vec::new, |unit| unit.streams().iter().map(Arc::downgrade).collect())
    }
}

impl fmt::Debug for HostNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.units().map(|unit| &unit.name);
        f.debug_tuple("HostNode").field(&names.collect::<Vec<_>>()).finish()
    }
}

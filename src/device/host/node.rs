//! Nodes: several devices, the host memory that they have pinned, and [`HostNode`], the handle by which tests hang them
//! and make them fail.

#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::HostConfig;
use super::fault::{Armed, Book, Call, Failure, Fault, FaultBook};
use super::unit::{State, Unit};
use crate::device::HostKind;
use crate::error::Result;
use crate::locks::Mutex;

/// What the devices of a node share.
pub(super) struct Node {
    pub(super) units: Vec<Arc<Unit>>,
    pub(super) faults: FaultBook,
    /// Host memory that devices have pinned or allocated, by its start: the end, and whose it is.
    ranges: Mutex<BTreeMap<usize, (usize, Owner)>>,
}

/// A device, and the kind of the memory if the device has allocated it.
type Owner = (u32, Option<HostKind>);

impl Node {
    fn new(config: &HostConfig) -> Arc<Self> {
        let (capacity, faults, ranges) = (config.capacity(), FaultBook::default(), Mutex::default());
        let unit = |ordinal| Unit::new(&format!("host:{ordinal}"), ordinal, config, capacity);
        Arc::new(Self { units: (0..config.devices).map(unit).collect(), faults, ranges })
    }

    /// Enters a range of host memory, or says why it is refused.
    pub(super) fn enter(&self, range: &Range<usize>, owner: Owner) -> Result<(), String> {
        let mut ranges = self.ranges.lock();
        match ranges.range(..range.end).next_back() {
            Some((start, (end, (other, _)))) if *end > range.start => {
                Err(format!("{range:#x?} overlaps {start:#x}..{end:#x}, which host:{other} has pinned"))
            }
            _ => Ok(_ = ranges.insert(range.start, (range.end, owner))),
        }
    }

    /// Takes a range out again. Returns the pages that it was on and that no other range is on.
    pub(super) fn leave(&self, range: &Range<usize>, owner: Owner) -> Result<Range<usize>, String> {
        let mut ranges = self.ranges.lock();
        if ranges.get(&range.start) != Some(&(range.end, owner)) {
            return Err(format!("{range:#x?} is not what host:{} has pinned or allocated", owner.0));
        }
        ranges.remove(&range.start);
        let page = crate::os::page_size();
        let (mut start, mut end) = (range.start / page * page, range.end.next_multiple_of(page));
        if ranges.range(..range.start).next_back().is_some_and(|(_, (other, _))| *other > start) {
            start += page;
        }
        if ranges.range(range.end..end).next().is_some() {
            end -= page;
        }
        Ok(start..end.max(start))
    }

    /// Whether a copy of any device of the node, queued or running, uses any of this host memory.
    pub(super) fn uses(&self, range: &Range<usize>) -> bool {
        self.units.iter().any(|unit| unit.state.lock().uses(range))
    }

    /// Whether any device of the node has pinned or allocated the host memory at this address.
    pub(super) fn has_pinned(&self, address: usize) -> bool {
        self.ranges.lock().range(..=address).next_back().is_some_and(|(_, (end, _))| address < *end)
    }
}

/// What a host device has that was not given back: see [`HostNode::live`].
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
/// The [module's page](crate::host) says what its devices do. All methods may be called from any thread. In the child
/// of a fork they do nothing, and report nothing.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// use pinpool::host::{HostConfig, HostNode};
///
/// let node = HostNode::new(HostConfig::new())?;
/// let device = Device::on(&node, 0)?;
/// # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory, mut buffer) = (device.stream()?, device.alloc(4)?, pool.checkout(4)?);
/// # buffer.extend_from_slice(b"data");
/// node.hang(0);
/// let copy = stream.upload(buffer, memory.slice(..)?)?;
/// assert!(!copy.is_done()? && node.live(0).queued > 0, "nothing runs on a hung device");
/// node.resume(0);
/// copy.wait()?;
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

    /// The node behind `Device::open("host")`: one device, without delays. The first call makes it.
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

    /// Looks at the faults and the trace or changes them. In the child of a fork it does nothing: locks may be held
    /// there by threads that do not exist.
    fn book<R: Default>(&self, change: impl FnOnce(&mut Book) -> R) -> R {
        if crate::os::forked() { R::default() } else { self.0.faults.change(change) }
    }

    /// Looks at a device or changes it. `None` in the child of a fork, and if there is no such device.
    fn on<R>(&self, device: u32, change: impl FnOnce(&mut State) -> R) -> Option<R> {
        let unit = self.0.units.get(device as usize).filter(|_| !crate::os::forked())?;
        Some(change(&mut unit.state.lock()))
    }

    /// The number of devices.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.0.units.len() as u32
    }

    /// The number of the device's operations that are queued or running.
    #[must_use]
    pub fn queued(&self, device: u32) -> usize {
        self.on(device, |state| state.queued()).unwrap_or_default()
    }

    /// Arms a fault. It strikes once. Of several that are due for one call, the first armed strikes, and the others
    /// strike later calls.
    pub fn fail(&self, fault: Fault) {
        let Fault { device, call, nth: left, failure } = fault;
        self.book(|book| book.armed.push(Armed { target: Some((device, call)), left, failure }));
    }

    /// Makes the `nth` call from now fail, of any kind and to any device of the node; 0 is the next call.
    pub fn fail_any(&self, nth: u64, failure: Failure) {
        self.book(|book| book.armed.push(Armed { target: None, left: nth, failure }));
    }

    /// Disarms all faults that have not struck, and says how many there were.
    pub fn clear_faults(&self) -> usize {
        self.book(|book| book.armed.drain(..).count())
    }

    /// Begins to record calls to the node's devices, and forgets those recorded before. The record grows until
    /// [`stop_trace`](Self::stop_trace).
    pub fn start_trace(&self) {
        self.book(|book| book.trace = Some(Vec::new()));
    }

    /// The calls recorded so far, in order, those that failed included.
    #[must_use]
    pub fn trace(&self) -> Vec<Call> {
        self.book(|book| book.trace.clone()).unwrap_or_default()
    }

    /// Ends recording and returns what was recorded.
    pub fn stop_trace(&self) -> Vec<Call> {
        self.book(|book| book.trace.take()).unwrap_or_default()
    }

    /// Kills the device for good. When this returns, its copies do not touch host memory any more. The call waits for
    /// the parts of copies that are under way, 1 MiB at most per stream.
    pub fn kill(&self, device: u32) {
        if let Some(unit) = self.0.units.get(device as usize).filter(|_| !crate::os::forked()) {
            unit.kill(&mut unit.state.lock(), "the device was killed");
        }
    }

    /// Keeps the device's queued operations from running, on all its streams and those made later. Operations that are
    /// running come to their end.
    pub fn hang(&self, device: u32) {
        self.on(device, |state| state.hung = true);
    }

    /// Lets everything on the device run again: it undoes [`hang`](Self::hang), [`hang_stream`](Self::hang_stream) and
    /// [`Failure::Stall`].
    pub fn resume(&self, device: u32) {
        self.on(device, |state| {
            state.hung = false;
            state.streams.values_mut().for_each(|stream| stream.hold(None));
        });
    }

    /// Keeps one stream's operations from running. Streams that were not destroyed are counted from 0 in the order in
    /// which they were created. `false`: there is no such stream.
    pub fn hang_stream(&self, device: u32, nth: usize) -> bool {
        self.hold(device, nth, Some(0))
    }

    /// Undoes [`hang_stream`](Self::hang_stream) and [`Failure::Stall`] for one stream, counted in the same way.
    /// `false`: there is no such stream.
    pub fn resume_stream(&self, device: u32, nth: usize) -> bool {
        self.hold(device, nth, None)
    }

    fn hold(&self, device: u32, nth: usize, held: Option<u64>) -> bool {
        let hold =
            |state: &mut State| state.open().filter(|s| s.owner.is_some()).nth(nth).map(|s| s.hold(held));
        self.on(device, hold).flatten().is_some()
    }

    /// What the device has that was not given back, for tests that look for leaks.
    #[must_use]
    pub fn live(&self, device: u32) -> HostUsage {
        let mut usage = self.on(device, |state| HostUsage {
            streams: state.open().count(),
            events: self.0.units.get(device as usize).map_or(0, |unit| unit.events.count()),
            allocations: state.memory.len(),
            allocated_bytes: state.used,
            queued: state.queued(),
            ..HostUsage::default()
        });
        if let Some(usage) = &mut usage {
            for (start, (end, (_, kind))) in self.0.ranges.lock().iter().filter(|(_, (_, at))| at.0 == device)
            {
                usage.pinned_bytes += if *kind == Some(HostKind::Managed) { 0 } else { end - start };
                usage.host_bytes += if kind.is_some() { end - start } else { 0 };
            }
        }
        usage.unwrap_or_default()
    }
}

impl fmt::Debug for HostNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.units.iter().map(|unit| &unit.name);
        f.debug_tuple("HostNode").field(&names.collect::<Vec<_>>()).finish()
    }
}

//! A simulated machine of either vendor: devices, contexts, streams, events, memory, and what is queued.
//!
//! What the two do differently is asked by [`Vendor`] where it is one line, and in the vendors' folders where it is
//! more.

use std::alloc::Layout;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::common::{Outcome, Vendor, fails_if};
use crate::{acl, cuda};

pub struct Device {
    pub memory: usize,
    pub numa_node: i32,
    /// The context that all threads share: CUDA's primary one, Ascend's default one.
    pub primary: Option<usize>,
    /// How often it is retained (Ascend: set), over how often it was released (reset).
    pub uses: usize,
    /// The error that ended the whole device, if one did.
    pub dead: Option<u32>,
}

pub struct Context {
    pub device: usize,
    /// The sticky error, if there was one.
    pub dead: Option<u32>,
    /// The legacy default stream, made on first use.
    pub default_stream: Option<usize>,
}

/// One side of a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    Host(usize),
    Device(usize),
}

impl Place {
    pub fn address(self) -> usize {
        let (Self::Host(at) | Self::Device(at)) = self;
        at
    }

    /// Whether this side of a copy of `n` bytes meets the `len` bytes at `other`.
    pub fn meets(self, n: usize, other: Self, len: usize) -> bool {
        matches!(self, Self::Host(_)) == matches!(other, Self::Host(_))
            && overlaps(self.address(), n, other.address(), len)
    }
}

#[derive(Clone, Debug)]
pub enum Op {
    Copy {
        src: Place,
        dst: Place,
        len: usize,
    },
    /// A copy whose bytes were there when it was submitted.
    Staged {
        bytes: Vec<u8>,
        dst: Place,
    },
    /// Waits until the other stream has run up to this place.
    Wait {
        stream: usize,
        upto: u64,
    },
    Record,
    Kernel(cuda::Launch),
    /// Memory in stream order begins, and ends.
    Allocate(usize),
    Free(usize),
    /// A launch of a graph is complete: these user objects lose a reference.
    Launched(Vec<usize>),
}

pub struct Capture {
    pub mode: u32,
    pub thread: usize,
    pub spoiled: bool,
    pub graph: usize,
    pub id: u64,
}

#[derive(Default)]
pub struct Stream {
    pub context: usize,
    /// Unlike its handle, never another's.
    pub id: u64,
    /// In order with the legacy default stream.
    pub blocking: bool,
    pub priority: i32,
    pub queue: VecDeque<Op>,
    /// Operations run so far, and submitted so far.
    pub done: u64,
    pub submitted: u64,
    /// Operations from this place on run only for a call that synchronises.
    pub held: Option<u64>,
    pub capture: Option<Capture>,
    pub destroyed: bool,
    /// Starts of the library's host memory that it used since a call waited for it.
    pub used: BTreeSet<usize>,
}

impl Stream {
    /// How many copies and kernels are queued.
    pub fn work(&self) -> usize {
        self.queue
            .iter()
            .filter(|op| matches!(op, Op::Copy { .. } | Op::Staged { .. } | Op::Kernel(_)))
            .count()
    }
}

pub struct Event {
    pub context: usize,
    pub flags: u32,
    /// Where it was recorded last: the stream, and the operations that it covers.
    pub recorded: Option<(usize, u64)>,
    pub seen: bool,
    pub captured: bool,
    /// How often a query still says "not ready", whatever is done.
    patience: u32,
}

/// Device memory.
pub struct Block {
    pub device: usize,
    /// The context that it ends with; 0: none.
    pub context: usize,
    pub bytes: Vec<u8>,
    pub kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Plain,
    Managed,
    /// By `cuMemMap`.
    Mapped,
    /// In stream order: whether its stream has reached it.
    Pool {
        born: bool,
    },
    /// To be freed in stream order: no call knows it any more.
    Dying,
}

/// Host memory that the library has allocated.
pub struct Host {
    pub device: usize,
    /// As of [`Block`].
    pub context: usize,
    pub len: usize,
    pub managed: bool,
    /// What the system allocated.
    block: (usize, Layout),
}

pub struct Registered {
    pub len: usize,
    pub read_only: bool,
    /// The device's address of it, where that is another one.
    pub mapped: usize,
}

#[derive(Clone, Debug)]
pub struct Fault {
    pub call: String,
    /// Fails when this comes to zero.
    pub left: u64,
    /// 0: the call succeeds. With `after` what it queues is held, with all that follows on its stream; without, it
    /// does nothing.
    pub code: u32,
    /// The call does its work and fails afterwards.
    pub after: bool,
}

/// A machine: see the page of the crate.
#[derive(Default)]
pub struct World {
    pub vendor: Vendor,
    pub number: usize,
    /// Commands that are made again after a reset: what the machine is.
    pub setup: Vec<String>,
    pub violations: Vec<String>,
    pub counts: BTreeMap<&'static str, u64>,
    /// How often a call was made with these flags.
    pub flags: BTreeMap<(&'static str, u32), u64>,
    /// The names of calls in their order, while that is asked for.
    pub trace: Option<Vec<&'static str>>,
    pub faults: Vec<Fault>,
    /// Calls that were made to fail.
    pub struck: u64,
    /// Nothing runs while it is set.
    pub hung: bool,
    /// Queries run nothing: work runs step by step (`control.rs`), or when a call that synchronises needs it. Copies
    /// of memory that is not page-locked are as late as others, and what is registered need only be mapped in some way.
    pub by_hand: bool,
    /// Whether new streams get the handles of destroyed ones.
    pub reuse: bool,
    /// What contexts had left when they were destroyed.
    pub left: BTreeMap<&'static str, usize>,
    /// The call under way.
    pub call: &'static str,
    pub ready: bool,
    pub ended: bool,
    /// What the call under way queues is held.
    pub stalls: bool,
    pub devices: Vec<Device>,
    pub contexts: BTreeMap<usize, Context>,
    pub streams: BTreeMap<usize, Stream>,
    pub events: BTreeMap<usize, Event>,
    pub blocks: BTreeMap<usize, Block>,
    pub hosts: BTreeMap<usize, Host>,
    pub registered: BTreeMap<usize, Registered>,
    /// How often devices were retained or set, and contexts of Ascend made.
    pub opened: u64,
    pub cuda: cuda::Own,
    pub acl: acl::Own,
    next: usize,
    next_address: usize,
    random: u64,
    streams_made: u64,
    hosts_made: usize,
}

/// What is in memory that was allocated and not written to, and what a copy reads where memory was freed under it.
pub const FRESH: u8 = 0xA5;
pub const GONE: u8 = 0xDD;
/// How much each device of a new world has.
const MEMORY: usize = 256 << 20;
const PAGE: usize = 4096;

impl World {
    pub fn new(vendor: Vendor, number: usize) -> Self {
        let mut world = Self {
            vendor,
            number,
            ready: vendor == Vendor::Cuda && number > 0,
            // Handles, and addresses, are apart from each other, from those of other worlds, and from what any call
            // could take for another argument.
            next: (number << 32) + 0x5eed_0000,
            next_address: vendor.base() + (number << 40),
            random: 0x9e37_79b9_7f4a_7c15,
            ..Self::default()
        };
        world.cuda.version = 12_080;
        world.have_devices(2, MEMORY);
        world
    }

    /// Everything as when the world was made; but no handle, number or address is used twice, and handles from before
    /// name nothing any more.
    pub fn reset(&mut self) {
        let Self { vendor, number, next, next_address, streams_made, .. } = *self;
        let setup = std::mem::take(&mut self.setup);
        *self = Self { next, next_address, streams_made, ..Self::new(vendor, number) };
        for command in &setup {
            self.command(command);
        }
        self.setup = setup;
    }

    /// So many devices with so many bytes of memory each.
    pub fn have_devices(&mut self, count: usize, memory: usize) {
        let device = |_| Device { memory, numa_node: -1, primary: None, uses: 0, dead: None };
        self.devices = (0..count).map(device).collect();
    }

    // --- calls ---------------------------------------------------------------------------------------------------

    pub fn count(&mut self, name: &'static str) {
        self.call = name;
        *self.counts.entry(name).or_default() += 1;
        self.trace.iter_mut().for_each(|trace| trace.push(name));
    }

    /// Whether a call is to fail: the code, and whether it does its work all the same.
    pub fn strike(&mut self, name: &str) -> Option<(u32, bool)> {
        let mut due = None;
        for fault in self.faults.iter_mut().filter(|f| f.left > 0 && f.call == name) {
            fault.left -= 1;
            if fault.left == 0 {
                due = Some((fault.code, fault.after));
            }
        }
        self.struck += u64::from(due.is_some());
        due
    }

    /// The call under way breaks a rule, and fails.
    pub fn broken<T>(&mut self, rule: &str, code: u32) -> Outcome<T> {
        self.let_pass(rule);
        Err(code)
    }

    /// The call breaks a rule, and fails, if that is so.
    pub fn forbid(&mut self, rule: &str, code: u32, is_so: bool) -> Outcome {
        if is_so { self.broken(rule, code) } else { Ok(()) }
    }

    /// What the call names. It breaks a rule, and fails, if there is no such thing.
    pub fn must<T>(&mut self, rule: &str, code: u32, found: Option<T>) -> Outcome<T> {
        found.map_or_else(|| self.broken(rule, code), Ok)
    }

    /// The call breaks a rule that the library does not see to.
    pub fn let_pass(&mut self, rule: &str) {
        self.violations.push(format!("{rule} {}", self.call));
    }

    pub fn let_pass_if(&mut self, rule: &str, is_so: bool) {
        if is_so {
            self.let_pass(rule);
        }
    }

    /// Writes a result, if there is a place for it.
    ///
    /// # Safety
    /// `to` is null or valid for a write.
    pub unsafe fn give<T>(&mut self, to: *mut T, value: T) -> Outcome {
        let code = self.vendor.either(cuda::INVALID_VALUE, acl::INVALID_PARAM);
        self.forbid("ARG-1", code, to.is_null())?;
        // SAFETY: the caller's promise.
        unsafe { to.write(value) };
        Ok(())
    }

    pub fn fresh(&mut self) -> usize {
        self.next += 16;
        self.next
    }

    /// Addresses that nothing else has or had, `offset` bytes behind the start of a page.
    pub fn made_up(&mut self, len: usize, offset: usize) -> usize {
        let at = self.next_address.next_multiple_of(PAGE) + offset;
        // Room between two, so that leaving one never means reaching the next.
        self.next_address = at + len.next_multiple_of(PAGE) + PAGE;
        at
    }

    pub fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    pub fn seed(&mut self, seed: u64) {
        self.random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    }

    // --- devices and contexts --------------------------------------------------------------------------------------

    /// The device of this world that a driver's number names: all devices are counted, or those of this world.
    pub fn device(&mut self, device: i32) -> Outcome<usize> {
        let of = |device: usize| match device < crate::common::DEVICES {
            true => Some(device),
            false => device.checked_sub(self.number * crate::common::DEVICES),
        };
        let found = usize::try_from(device).ok().and_then(of);
        found
            .filter(|at| *at < self.devices.len())
            .ok_or(self.vendor.either(cuda::INVALID_DEVICE, acl::INVALID_DEVICE))
    }

    /// The driver's number for a device of this world.
    pub fn ordinal(&self, device: usize) -> i32 {
        (self.number * crate::common::DEVICES + device) as i32
    }

    /// How many devices are counted: in a process that has worlds of its own, and for a thread that is in none of them,
    /// up to the last one's last.
    pub fn device_count(&self) -> usize {
        match self.vendor.own_worlds() {
            count if count > 0 && self.number == 0 => (count + 1) * crate::common::DEVICES,
            _ => self.number * crate::common::DEVICES + self.devices.len(),
        }
    }

    pub fn add_context(&mut self, device: usize) -> usize {
        let context = self.fresh();
        self.contexts.insert(context, Context { device, dead: None, default_stream: None });
        context
    }

    /// Uses the context of a device that all threads share.
    pub fn retain(&mut self, device: usize) -> usize {
        self.opened += 1;
        self.devices[device].uses += 1;
        let context = self.devices[device].primary.unwrap_or_else(|| self.add_context(device));
        self.devices[device].primary = Some(context);
        context
    }

    /// Ends such a use. The context's handle, if that was the last one.
    pub fn release(&mut self, device: usize) -> Outcome<Option<usize>> {
        let uses = self.devices[device].uses.checked_sub(1);
        let uses = self.must("CTX-4", self.vendor.no_context(), uses)?;
        let of = &mut self.devices[device];
        of.uses = uses;
        Ok(if uses == 0 { of.primary.take() } else { None })
    }

    /// Destroys a context that a program has made.
    pub fn destroy_context(&mut self, context: usize) -> Outcome {
        let is_shared = self.devices.iter().any(|device| device.primary == Some(context));
        let is_there = self.contexts.contains_key(&context);
        self.forbid("CTX-6", self.vendor.no_context(), is_shared || !is_there)?;
        self.end_context(context);
        Ok(())
    }

    /// Destroys a context, and what it has with it. Nothing of that runs any more; an Ascend device runs it first.
    pub fn end_context(&mut self, context: usize) {
        if self.vendor == Vendor::Acl {
            self.streams_of(|of| of == context).into_iter().for_each(|stream| self.run(stream, u64::MAX));
        }
        for (what, count) in self.owned(Some(context)) {
            *self.left.entry(what).or_default() += count;
        }
        self.contexts.remove(&context);
        self.cuda.forget(context);
        self.streams.retain(|_, s| s.context != context);
        self.events.retain(|_, e| e.context != context);
        self.blocks.retain(|_, b| b.context != context);
        // (The memory stays: a late copy may still read it.)
        self.hosts.retain(|_, h| h.context != context);
    }

    /// What a context has, or all of them together.
    pub fn owned(&self, of: Option<usize>) -> [(&'static str, usize); 5] {
        let is = |context: usize| of.is_none_or(|of| of == context);
        let defaults = self.contexts.values().filter_map(|c| c.default_stream);
        let defaults: BTreeSet<usize> = defaults.chain(self.cuda.per_thread.values().copied()).collect();
        let there =
            |(handle, s): &(&usize, &Stream)| is(s.context) && !s.destroyed && !defaults.contains(handle);
        [
            ("streams", self.streams.iter().filter(there).count()),
            ("events", self.events.values().filter(|e| is(e.context)).count()),
            ("allocations", self.blocks.values().filter(|b| is(b.context)).count()),
            ("hosts", self.hosts.values().filter(|h| is(h.context)).count()),
            ("modules", self.cuda.modules.count(is)),
        ]
    }

    /// The current context, which must be alive.
    pub fn current(&mut self) -> Outcome<usize> {
        match self.vendor.current() {
            0 => self.broken("CTX-1", self.vendor.no_context()),
            context => self.alive(context),
        }
    }

    pub fn alive(&mut self, context: usize) -> Outcome<usize> {
        let Some(Context { device, dead, .. }) = self.contexts.get(&context) else {
            return self.broken("CTX-2", self.vendor.either(cuda::CONTEXT_IS_DESTROYED, acl::CONTEXT_NULL));
        };
        dead.or(self.devices[*device].dead).map_or(Ok(context), Err)
    }

    /// The current context's device.
    pub fn current_device(&mut self) -> Outcome<usize> {
        let context = self.current()?;
        Ok(self.contexts[&context].device)
    }

    /// The context of a stream or an event.
    pub fn context_of(&self, handle: usize) -> Option<usize> {
        let stream = self.streams.get(&handle).map(|stream| stream.context);
        stream.or_else(|| self.events.get(&handle).map(|event| event.context))
    }

    /// A sticky error of a context, or of an Ascend device: from here on calls there only return it, and nothing there
    /// runs any more.
    pub fn kill(&mut self, context: usize, code: u32) {
        let Some(device) = self.contexts.get(&context).map(|c| c.device) else { return };
        if self.vendor == Vendor::Acl {
            self.devices[device].dead.get_or_insert(code);
        }
        let mut lost = Vec::new();
        for (handle, of) in &mut self.contexts {
            if *handle == context || self.vendor == Vendor::Acl && of.device == device {
                of.dead.get_or_insert(code);
                lost.push(*handle);
            }
        }
        let mut launched = Vec::new();
        for stream in self.streams.values_mut().filter(|s| lost.contains(&s.context)) {
            launched.extend(stream.queue.drain(..).filter_map(|op| match op {
                Op::Launched(objects) => Some(objects),
                _ => None,
            }));
            stream.done = stream.submitted;
            // No call can wait for it any more.
            stream.used.clear();
        }
        launched.into_iter().for_each(|objects| self.let_go(&objects));
    }

    // --- streams -------------------------------------------------------------------------------------------------

    pub fn create_stream(&mut self, context: usize, blocking: bool) -> usize {
        let mut destroyed = self.streams.iter().filter(|(_, s)| s.destroyed && s.queue.is_empty());
        let old = destroyed.next_back().filter(|_| self.reuse).map(|(handle, s)| (*handle, s.submitted));
        // Events that were recorded on the stream before, if there was one, are complete.
        let (handle, done) = old.unwrap_or_else(|| (self.fresh(), 0));
        self.streams_made += 1;
        let id = ((self.number as u64) << 32) + self.streams_made;
        let made = Stream { context, id, blocking, done, submitted: done, ..Stream::default() };
        self.streams.insert(handle, made);
        handle
    }

    /// The handle that one stands for in the current context: that of a default stream, made on first use.
    pub fn resolved(&mut self, handle: usize) -> usize {
        let context = self.vendor.current();
        let last = if self.vendor == Vendor::Cuda { cuda::PER_THREAD } else { 0 };
        if handle > last || !self.contexts.contains_key(&context) {
            return handle;
        }
        if handle == cuda::PER_THREAD {
            let key = (context, crate::common::thread());
            let own = self.cuda.per_thread.get(&key).copied();
            let own = own.unwrap_or_else(|| self.create_stream(context, true));
            self.cuda.per_thread.insert(key, own);
            return own;
        }
        let default = self.contexts[&context].default_stream;
        let default = default.unwrap_or_else(|| self.create_stream(context, true));
        self.contexts.entry(context).and_modify(|c| c.default_stream = Some(default));
        default
    }

    /// A stream of the current context.
    pub fn stream(&mut self, handle: usize) -> Outcome<&mut Stream> {
        let current = self.current()?;
        let handle = self.resolved(handle);
        let context = self.any_stream(handle)?.context;
        self.forbid("CTX-5", self.vendor.other_context(), context != current)?;
        self.streams.get_mut(&handle).ok_or(self.vendor.no_handle())
    }

    /// A stream of any context, which need not be current: the handle is no default stream's.
    pub fn any_stream(&mut self, handle: usize) -> Outcome<&mut Stream> {
        let context = self.streams.get(&handle).filter(|s| !s.destroyed).map(|s| s.context);
        let context = self.must("STR-1", self.vendor.no_handle(), context)?;
        self.alive(context)?;
        self.streams.get_mut(&handle).ok_or(self.vendor.no_handle())
    }

    /// The streams whose contexts are such, by their handles.
    pub fn streams_of(&self, is: impl Fn(usize) -> bool) -> Vec<usize> {
        self.streams.iter().filter(|(_, s)| is(s.context)).map(|(handle, _)| *handle).collect()
    }

    pub fn destroy_stream(&mut self, handle: usize) -> Outcome {
        let stream = self.stream(handle)?;
        stream.destroyed = true;
        let work = stream.work();
        self.let_pass_if("STR-2", work > 0);
        // It stays, for events that were recorded on it.
        self.drain(handle);
        Ok(())
    }

    // --- what is queued ------------------------------------------------------------------------------------------

    /// Queues an operation, or makes it a node of the graph that is being captured.
    pub fn submit(&mut self, handle: usize, op: Op) -> Outcome<u64> {
        if self.vendor == Vendor::Cuda {
            self.not_implicit(handle)?;
            self.order_implicitly(handle)?;
        }
        let places = if let Op::Copy { src, dst, .. } = op { vec![src, dst] } else { Vec::new() };
        let hosts = places.into_iter().filter(|place| matches!(place, Place::Host(_)));
        let used: Vec<usize> =
            hosts.filter_map(|at| self.host(at.address(), 1).map(|(start, _)| start)).collect();
        let stalls = self.stalls;
        let stream = self.stream(handle)?;
        if let Some(Capture { spoiled, graph, .. }) = stream.capture {
            fails_if(cuda::CAPTURE_INVALIDATED, spoiled)?;
            self.add_node(graph, op);
            return Ok(0);
        }
        if stalls {
            stream.held.get_or_insert(stream.submitted);
        }
        stream.used.extend(used);
        stream.queue.push_back(op);
        stream.submitted += 1;
        let submitted = stream.submitted;
        self.stalls = false;
        Ok(submitted)
    }

    /// Runs a stream's operations up to a place.
    pub fn run(&mut self, handle: usize, upto: u64) {
        loop {
            let Some(stream) = self.streams.get_mut(&handle).filter(|s| s.done < upto) else { return };
            let Some(op) = stream.queue.pop_front() else { return };
            match op {
                // What is waited for was submitted before, so this ends.
                Op::Wait { stream, upto } => self.run(stream, upto),
                Op::Record => {}
                Op::Launched(objects) => self.let_go(&objects),
                Op::Copy { src, dst, len } => {
                    self.check_born(src, len);
                    self.check_born(dst, len);
                    let bytes = self.bytes(src, len);
                    self.write(dst, &bytes);
                }
                Op::Staged { bytes, dst } => {
                    self.check_born(dst, bytes.len());
                    self.write(dst, &bytes);
                }
                Op::Kernel(launch) => self.run_kernel(&launch),
                Op::Allocate(at) => self.be(at, Kind::Pool { born: true }),
                // What is ordered before that has run by now.
                Op::Free(at) => self.free_block("POOL-4", at),
            }
            // A kernel may have ended its context, and with it all that is queued.
            if let Some(stream) = self.streams.get_mut(&handle).filter(|s| s.done < s.submitted) {
                stream.done += 1;
            }
        }
    }

    /// Runs all of a stream for a call that waits for that.
    pub fn drain(&mut self, handle: usize) {
        let handle = self.resolved(handle);
        self.run(handle, u64::MAX);
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.used.clear();
        }
    }

    /// The last operation of each stream that uses such memory, and its stream. `uses` is told whether the operation
    /// writes there.
    pub fn users(&self, uses: impl Fn(Place, usize, bool) -> bool) -> Vec<(usize, u64)> {
        let is_user = |op: &Op| match op {
            Op::Copy { src, dst, len } => uses(*src, *len, false) || uses(*dst, *len, true),
            Op::Staged { bytes, dst } => uses(*dst, bytes.len(), true),
            Op::Kernel(launch) => self.kernel_uses(launch, &uses),
            _ => false,
        };
        let last = |s: &Stream| s.queue.iter().rposition(is_user).map(|at| s.done + at as u64 + 1);
        self.streams.iter().filter_map(|(handle, s)| last(s).map(|upto| (*handle, upto))).collect()
    }

    /// Memory is taken back: what is queued there uses it no more. A GPU's driver waits for that; the Ascend library
    /// does not. `rule` is broken if there is any.
    pub fn take_back(&mut self, rule: &str, at: Place, len: usize) -> bool {
        let users = self.users(|place, n, _| place.meets(n, at, len));
        if users.is_empty() {
            return false;
        }
        if self.vendor == Vendor::Cuda {
            users.iter().for_each(|(stream, upto)| self.run(*stream, *upto));
        }
        self.let_pass(rule);
        true
    }

    /// Whether host memory can be reached by copies that run now: an Ascend device loses what was freed or unregistered.
    fn reaches(&self, at: usize, len: usize) -> bool {
        self.vendor == Vendor::Cuda || self.is_locked(at, len)
    }

    /// The bytes there now.
    pub fn bytes(&self, src: Place, len: usize) -> Vec<u8> {
        let mut bytes = vec![GONE; len];
        match src {
            // SAFETY: the call that submitted it promised that the range stays valid until the copy was seen complete.
            Place::Host(from) if self.reaches(from, len) => unsafe {
                std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), len);
            },
            Place::Host(_) => {}
            Place::Device(at) => {
                if let Some((_, block, offset)) = self.block(at, len) {
                    bytes.copy_from_slice(&block.bytes[offset..offset + len]);
                }
            }
        }
        bytes
    }

    pub fn write(&mut self, dst: Place, bytes: &[u8]) {
        let len = bytes.len();
        match dst {
            // SAFETY: as above.
            Place::Host(to) if self.reaches(to, len) => unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, len);
            },
            Place::Host(_) => {}
            Place::Device(at) => {
                let Some((start, _, offset)) = self.block(at, len) else { return };
                if let Some(block) = self.blocks.get_mut(&start) {
                    block.bytes[offset..offset + len].copy_from_slice(bytes);
                }
            }
        }
    }

    // --- events --------------------------------------------------------------------------------------------------

    pub fn create_event(&mut self, context: usize, flags: u32) -> usize {
        let handle = self.fresh();
        let event = Event { context, flags, recorded: None, seen: false, captured: false, patience: 0 };
        self.events.insert(handle, event);
        handle
    }

    /// An event of any context, which need not be current.
    pub fn any_event(&mut self, handle: usize) -> Outcome<&mut Event> {
        let context = self.events.get(&handle).map(|event| event.context);
        let context = self.must("EVT-1", self.vendor.no_handle(), context)?;
        self.alive(context)?;
        self.events.get_mut(&handle).ok_or(self.vendor.no_handle())
    }

    /// Whether it is recorded and not complete. A later place on its stream may have been seen instead.
    fn is_pending(&self, event: usize) -> bool {
        let at = self.events.get(&event).filter(|e| !e.seen).and_then(|e| e.recorded);
        at.is_some_and(|(stream, upto)| self.streams.get(&stream).is_some_and(|s| s.done < upto))
    }

    pub fn record(&mut self, event: usize, stream: usize) -> Outcome {
        let of = self.any_event(event)?.context;
        let Stream { context, capture, .. } = self.stream(stream)?;
        let (context, captured) = (*context, capture.is_some());
        // Streams of a device record events of all its contexts, if it is an Ascend device.
        let device = |context: usize| self.contexts[&context].device;
        let fits = of == context || self.vendor == Vendor::Acl && device(of) == device(context);
        self.forbid("CTX-5", self.vendor.other_context(), !fits)?;
        self.let_pass_if("EVT-3", self.is_pending(event));
        let upto = self.submit(stream, Op::Record)?;
        let (patience, stream) = ((self.random() % 3) as u32, self.resolved(stream));
        let event = self.any_event(event)?;
        (event.recorded, event.seen, event.captured) = (Some((stream, upto)), false, captured);
        event.patience = patience;
        Ok(())
    }

    /// Whether it is complete. What it covers runs when it is.
    pub fn query(&mut self, handle: usize) -> Outcome<bool> {
        let Event { recorded, seen, captured, patience, .. } = *self.any_event(handle)?;
        self.forbid("CAP-3", cuda::CAPTURED_EVENT, captured)?;
        let Some((stream, upto)) = recorded else {
            self.let_pass("EVT-2");
            return Ok(true);
        };
        if seen {
            return Ok(true);
        }
        let is_done = self.streams.get(&stream).is_none_or(|s| s.done >= upto);
        if self.hung || (self.by_hand || patience > 0) && !is_done {
            self.any_event(handle)?.patience = patience.saturating_sub(1);
            return Ok(false);
        }
        self.run(stream, upto);
        self.any_event(handle)?.seen = true;
        Ok(true)
    }

    pub fn destroy_event(&mut self, handle: usize) -> Outcome {
        self.let_pass_if("EVT-4", self.is_pending(handle));
        self.events.remove(&handle);
        Ok(())
    }

    // --- memory --------------------------------------------------------------------------------------------------

    /// Device memory of a context, or of none: it is filled with 0xA5.
    pub fn allocate(&mut self, device: usize, context: usize, len: usize, offset: usize) -> Outcome<usize> {
        fails_if(self.vendor.no_memory(), !self.fits(device, len))?;
        let at = self.made_up(len, offset);
        self.blocks.insert(at, Block { device, context, bytes: vec![FRESH; len], kind: Kind::Plain });
        Ok(at)
    }

    /// Whether a device has so much memory left. Where the program runs on the device, host memory is part of it.
    pub fn fits(&self, device: usize, len: usize) -> bool {
        let blocks: usize = self.blocks.values().filter(|b| b.device == device).map(|b| b.bytes.len()).sum();
        let hosts: usize = self.hosts.values().filter(|h| h.device == device).map(|h| h.len).sum();
        let used = blocks + if self.acl.on_device { hosts } else { 0 };
        used.checked_add(len).is_some_and(|sum| sum <= self.devices[device].memory)
    }

    /// Frees device memory, if it is there. `rule` is broken if something queued uses it.
    pub fn free_block(&mut self, rule: &str, at: usize) {
        let Some(len) = self.blocks.get(&at).map(|block| block.bytes.len()) else { return };
        self.take_back(rule, Place::Device(at), len);
        self.blocks.remove(&at);
    }

    pub fn be(&mut self, at: usize, kind: Kind) {
        if let Some(block) = self.blocks.get_mut(&at) {
            block.kind = kind;
        }
    }

    /// The allocation of device memory that has these bytes: its start, and where in it they begin.
    pub fn block(&self, at: usize, len: usize) -> Option<(usize, &Block, usize)> {
        let (start, block) = self.blocks.range(..=at).next_back()?;
        (at.checked_add(len)? <= start + block.bytes.len()).then_some((*start, block, at - start))
    }

    /// Host memory of the library's own: real memory, filled with 0xA5, so many bytes behind the start of a page, by
    /// turns.
    pub fn allocate_host(
        &mut self,
        host: (usize, usize, bool),
        len: usize,
        offsets: [usize; 2],
    ) -> Outcome<usize> {
        let whole = len.checked_add(PAGE).ok_or(self.vendor.no_memory())?;
        let layout = Layout::from_size_align(whole, PAGE).map_err(|_| self.vendor.no_memory())?;
        // SAFETY: not of size zero.
        let block = unsafe { std::alloc::alloc(layout) };
        fails_if(self.vendor.no_memory(), block.is_null())?;
        // SAFETY: as long as that.
        unsafe { block.write_bytes(FRESH, whole) };
        self.hosts_made += 1;
        let at = block as usize + offsets[self.hosts_made % 2];
        let (device, context, managed) = host;
        self.hosts.insert(at, Host { device, context, len, managed, block: (block as usize, layout) });
        Ok(at)
    }

    pub fn free_host(&mut self, at: usize) {
        self.streams.values_mut().for_each(|stream| _ = stream.used.remove(&at));
        if let Some(Host { block: (block, layout), .. }) = self.hosts.remove(&at) {
            // SAFETY: allocated with that layout, and freed once.
            unsafe { std::alloc::dealloc(block as *mut u8, layout) };
        }
    }

    /// The library's host memory that has these bytes: its start, and what it is.
    pub fn host(&self, at: usize, len: usize) -> Option<(usize, &Host)> {
        let (start, host) = self.hosts.range(..=at).next_back()?;
        (at.checked_add(len)? <= start + host.len).then_some((*start, host))
    }

    /// The registration that has these bytes.
    pub fn registration(&self, at: usize, len: usize) -> Option<(usize, &Registered)> {
        let (start, of) = self.registered.range(..=at).next_back()?;
        (at.checked_add(len)? <= start + of.len).then_some((*start, of))
    }

    /// Whether it is page-locked, all of it in one piece.
    pub fn is_locked(&self, at: usize, len: usize) -> bool {
        self.host(at, len).is_some() || self.registration(at, len).is_some()
    }

    /// Whether a part of it is registered, and whether a part is the library's own.
    pub fn is_registered_in_part(&self, at: usize, len: usize) -> bool {
        self.registered.iter().any(|(start, r)| overlaps(at, len, *start, r.len))
    }

    pub fn is_allocated_in_part(&self, at: usize, len: usize) -> bool {
        self.hosts.iter().any(|(start, h)| overlaps(at, len, *start, h.len))
    }

    /// Unregisters what is registered from there. `code`: nothing is.
    pub fn unregister(&mut self, start: usize, code: u32) -> Outcome {
        let len = self.must("MEM-2", code, self.registered.get(&start).map(|r| r.len))?;
        self.take_back("MEM-4", Place::Host(start), len);
        self.registered.remove(&start);
        Ok(())
    }
}

pub fn overlaps(start: usize, len: usize, other: usize, other_len: usize) -> bool {
    start < other + other_len && other < start + len
}

/// Whether it is something, and ends within the address space.
pub fn is_range(start: usize, len: usize) -> bool {
    start != 0 && len != 0 && start.checked_add(len).is_some()
}

/// Whether all of it is mapped for reading, and for writing if that is asked for.
pub fn is_mapped(start: usize, len: usize, written: bool) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut at = start;
    for line in maps.lines() {
        let mut words = line.split(' ');
        let (range, mode) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let parse = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        let (from, to) = range.split_once('-').map_or((0, 0), |(a, b)| (parse(a), parse(b)));
        if (from..to).contains(&at) && mode.starts_with('r') && (!written || mode[1..].starts_with('w')) {
            at = to;
        }
    }
    at >= start + len
}

/// Whether all of it is mapped in any way: quick, and less than `is_mapped` says.
pub fn is_there(start: usize, len: usize) -> bool {
    unsafe extern "C" {
        fn getpagesize() -> std::ffi::c_int;
        fn msync(start: usize, len: usize, flags: std::ffi::c_int) -> std::ffi::c_int;
    }
    const MS_ASYNC: std::ffi::c_int = 1;
    // SAFETY: asked that way, Linux only looks whether the pages are mapped.
    unsafe {
        let first = start - start % getpagesize() as usize;
        msync(first, start + len - first, MS_ASYNC) == 0
    }
}

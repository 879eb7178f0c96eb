//! What there is: devices, contexts, streams, events, memory; what is queued; what was broken.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::graphs::Graphs;

pub const INVALID_VALUE: u32 = 1;
pub const OUT_OF_MEMORY: u32 = 2;
pub const NOT_INITIALIZED: u32 = 3;
pub const DEINITIALIZED: u32 = 4;
pub const NO_DEVICE: u32 = 100;
pub const INVALID_DEVICE: u32 = 101;
pub const INVALID_CONTEXT: u32 = 201;
pub const UNSUPPORTED_LIMIT: u32 = 215;
pub const INVALID_PTX: u32 = 218;
pub const INVALID_HANDLE: u32 = 400;
pub const NOT_FOUND: u32 = 500;
pub const NOT_READY: u32 = 600;
pub const ILLEGAL_ADDRESS: u32 = 700;
pub const CONTEXT_IS_DESTROYED: u32 = 709;
pub const ALREADY_REGISTERED: u32 = 712;
pub const NOT_REGISTERED: u32 = 713;
pub const MISALIGNED_ADDRESS: u32 = 716;
pub const NOT_PERMITTED: u32 = 800;
pub const CAPTURE_UNSUPPORTED: u32 = 900;
pub const CAPTURE_INVALIDATED: u32 = 901;
pub const CAPTURE_ISOLATION: u32 = 905;
pub const CAPTURE_IMPLICIT: u32 = 906;
pub const CAPTURED_EVENT: u32 = 907;
pub const CAPTURE_WRONG_THREAD: u32 = 908;

/// Codes after which a context is of no use any more.
pub fn is_device_lost(code: u32) -> bool {
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810)
}

/// A call's outcome: a code other than zero is the error.
pub type Outcome<T = ()> = Result<T, u32>;

thread_local! {
    /// The contexts pushed on this thread, the current one last.
    pub static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// Its capture mode: 0 global, 1 thread-local, 2 relaxed.
    pub static MODE: Cell<u32> = const { Cell::new(0) };
    /// A number for the thread.
    static THREAD: Cell<usize> = const { Cell::new(0) };
}

pub struct Device {
    pub memory: usize,
    pub numa_node: i32,
    /// Its primary context and how often it is retained.
    pub primary: Option<(usize, usize)>,
}

pub struct Context {
    pub device: usize,
    /// The sticky error, if there was one.
    pub dead: Option<u32>,
}

pub struct Block {
    pub context: usize,
    pub len: usize,
    /// Shared with what was allocated in stream order where this was freed in the same order.
    pub bytes: Arc<Mutex<Vec<u8>>>,
    pub kind: Kind,
}

/// How device memory was allocated.
pub enum Kind {
    Plain,
    Managed,
    /// By `cuMemMap`.
    Mapped,
    /// In stream order: whether its stream has reached it, and whether it is to be freed.
    Pool {
        born: bool,
        dying: bool,
    },
}

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Host(usize),
    Device(u64),
}

#[derive(Clone, Debug)]
pub enum Op {
    Copy {
        src: Place,
        dst: Place,
        len: usize,
    },
    /// Waits until the other stream has run up to this place.
    /// A copy whose source was read when it was submitted.
    Staged {
        bytes: Vec<u8>,
        dst: Place,
    },
    Wait {
        stream: usize,
        upto: u64,
    },
    Record,
    Kernel(crate::kernels::Launch),
    /// Memory in stream order begins, and ends.
    Allocate(u64),
    Free(u64),
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
    pub capture: Option<Capture>,
    pub destroyed: bool,
}

pub struct Event {
    pub context: usize,
    /// Where it was recorded last: the stream, and the operations that it covers.
    pub recorded: Option<(usize, u64)>,
    pub seen: bool,
    pub captured: bool,
    /// How often a query still says "not ready", whatever is done.
    patience: u32,
}

/// A call that is to fail.
pub struct Fault {
    pub call: String,
    /// Fails when this comes to zero.
    pub left: u64,
    pub code: u32,
    /// The call does its work and fails afterwards.
    pub after: bool,
}

#[derive(Default)]
pub struct World {
    pub ready: bool,
    pub ended: bool,
    pub version: i32,
    pub devices: Vec<Device>,
    pub contexts: BTreeMap<usize, Context>,
    pub streams: BTreeMap<usize, Stream>,
    pub events: BTreeMap<usize, Event>,
    pub blocks: BTreeMap<u64, Block>,
    /// The legacy default stream of each context that has used it.
    pub legacy: BTreeMap<usize, usize>,
    /// The per-thread default streams, by context and thread.
    pub per_thread: BTreeMap<(usize, usize), usize>,
    pub graphs: Graphs,
    /// Whether new streams get the handles of destroyed ones.
    pub reuse: bool,
    pub stream_ids: u64,
    /// Registered host memory: start and length.
    pub registered: BTreeMap<usize, usize>,
    pub pointers: crate::pointers::Pointers,
    pub modules: crate::kernels::Modules,
    /// Host memory that the driver knows more about.
    pub hosts: crate::host::Hosts,
    pub violations: Vec<String>,
    pub notes: HashMap<&'static str, u64>,
    pub counts: BTreeMap<&'static str, u64>,
    pub faults: Vec<Fault>,
    /// What contexts had left when they were destroyed.
    pub left: BTreeMap<&'static str, usize>,
    /// How often a context was retained.
    pub retains: u64,
    /// Calls that were made to fail.
    pub struck: u64,
    /// Nothing runs while it is set.
    pub hung: bool,
    next: usize,
    next_address: u64,
    random: u64,
    configured: bool,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// The world, made on first use.
pub fn world() -> MutexGuard<'static, Option<World>> {
    let mut guard = WORLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let world = guard.get_or_insert_with(World::default);
    if !world.configured {
        world.configure();
    }
    guard
}

/// The world if no thread has it locked: for when the process ends and other threads do not go on.
pub fn idle_world() -> Option<MutexGuard<'static, Option<World>>> {
    WORLD.try_lock().ok()
}

/// The calling thread's number.
pub fn thread() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);
    if THREAD.get() == 0 {
        THREAD.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    }
    THREAD.get()
}

pub fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Memory that only the world's own lock orders.
fn locked(bytes: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    bytes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub fn overlaps(start: usize, len: usize, other: usize, other_len: usize) -> bool {
    start < other + other_len && other < start + len
}

impl World {
    fn configure(&mut self) {
        self.configured = true;
        self.version =
            number("PINPOOL_STANDIN_VERSION", if cfg!(feature = "cuda13") { 13_000 } else { 12_080 }) as i32;
        let memory = number("PINPOOL_STANDIN_MEMORY", 256 << 20) as usize;
        let devices = number("PINPOOL_STANDIN_DEVICES", 2);
        let nodes = std::env::var("PINPOOL_STANDIN_NUMA").unwrap_or_default();
        let mut nodes = nodes.split(',').map(|node| node.parse().unwrap_or(-1));
        let device = |_| Device { memory, numa_node: nodes.next().unwrap_or(-1), primary: None };
        self.devices = (0..devices).map(device).collect();
        // Apart from each other and from what any call could take for another argument.
        self.next = self.next.max(0x5eed_0000);
        self.next_address = self.next_address.max(0x7f00_0000_0000_0000);
        self.random = 0x9e37_79b9_7f4a_7c15;
        for pair in std::env::var("PINPOOL_STANDIN_ATTRIBUTES").unwrap_or_default().split(',') {
            if let Some((Ok(attribute), Ok(value))) =
                pair.split_once(':').map(|(attribute, value)| (attribute.parse(), value.parse()))
            {
                self.hosts.set_attribute(attribute, value);
            }
        }
        if let Ok(fault) = std::env::var("PINPOOL_STANDIN_FAIL") {
            let parts: Vec<&str> = fault.split(':').collect();
            if let [call, nth, code] = parts[..] {
                let (left, code) = (nth.parse().unwrap_or(1), code.parse().unwrap_or(1));
                self.faults.push(Fault { call: call.into(), left, code, after: false });
            }
        }
    }

    /// As when it was loaded; but no handle is ever used twice.
    pub fn reset(&mut self) {
        let (next, next_address, stream_ids) = (self.next, self.next_address, self.stream_ids);
        *self = Self { next, next_address, stream_ids, ..Self::default() };
        self.configure();
    }

    pub fn violate<T>(&mut self, id: &str, text: impl std::fmt::Display, code: u32) -> Outcome<T> {
        self.violations.push(format!("{id} {text}"));
        Err(code)
    }

    pub fn note(&mut self, what: &'static str) {
        *self.notes.entry(what).or_default() += 1;
    }

    pub fn fresh(&mut self) -> usize {
        self.next += 16;
        self.next
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    // --- contexts ------------------------------------------------------------------------------------------------

    pub fn device(&mut self, device: i32) -> Outcome<usize> {
        match usize::try_from(device) {
            Ok(device) if device < self.devices.len() => Ok(device),
            _ => Err(INVALID_DEVICE),
        }
    }

    /// What a device says about itself.
    pub fn attribute(&self, device: usize, attribute: i32) -> Outcome<i32> {
        match attribute {
            // CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID; -1: none is known.
            134 => Ok(self.devices[device].numa_node),
            // CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED.
            115 => Ok(1),
            _ => self.hosts.attribute(attribute).ok_or(INVALID_VALUE),
        }
    }

    pub fn retain(&mut self, device: usize) -> usize {
        self.retains += 1;
        if let Some((context, count)) = &mut self.devices[device].primary {
            *count += 1;
            return *context;
        }
        let context = self.fresh();
        self.contexts.insert(context, Context { device, dead: None });
        self.devices[device].primary = Some((context, 1));
        context
    }

    pub fn release(&mut self, device: usize) -> Outcome {
        match &mut self.devices[device].primary {
            None => {
                return self.violate("CTX-4", format!("device {device} is not retained"), INVALID_CONTEXT);
            }
            Some((_, count)) if *count > 1 => *count -= 1,
            Some((context, _)) => {
                let context = *context;
                self.devices[device].primary = None;
                self.end_context(context);
            }
        }
        Ok(())
    }

    /// A context of the device that is not its primary one.
    pub fn other_context(&mut self, device: usize) -> usize {
        let context = self.fresh();
        self.contexts.insert(context, Context { device, dead: None });
        context
    }

    pub fn end_context(&mut self, context: usize) {
        self.contexts.remove(&context);
        for (what, count) in self.owned(Some(context)) {
            *self.left.entry(what).or_default() += count;
        }
        // What the context had is destroyed with it; nothing of that runs any more.
        self.legacy.remove(&context);
        self.per_thread.retain(|(of, _), _| *of != context);
        self.streams.retain(|_, s| s.context != context);
        self.events.retain(|_, e| e.context != context);
        self.blocks.retain(|_, b| b.context != context);
        self.hosts.forget(context);
        self.modules.forget(context);
    }

    /// What a context has, or all of them together.
    pub fn owned(&self, of: Option<usize>) -> [(&'static str, usize); 5] {
        let is = |context: usize| of.is_none_or(|of| of == context);
        let legacy =
            |handle: &usize| self.legacy.values().chain(self.per_thread.values()).any(|h| h == handle);
        let there = |(handle, s): &(&usize, &Stream)| is(s.context) && !s.destroyed && !legacy(handle);
        let streams = self.streams.iter().filter(there).count();
        let events = self.events.values().filter(|e| is(e.context)).count();
        let blocks = self.blocks.values().filter(|b| is(b.context)).count();
        let (hosts, modules) = (self.hosts.count(is), self.modules.count(is));
        [
            ("streams", streams),
            ("events", events),
            ("allocations", blocks),
            ("hosts", hosts),
            ("modules", modules),
        ]
    }

    /// The current context, which must be alive.
    pub fn current(&mut self, call: &str) -> Outcome<usize> {
        let Some(context) = STACK.with_borrow(|stack| stack.last().copied()).filter(|c| *c != 0) else {
            return self.violate("CTX-1", format!("{call}: no context is current"), INVALID_CONTEXT);
        };
        self.alive(call, context)
    }

    fn alive(&mut self, call: &str, context: usize) -> Outcome<usize> {
        match self.contexts.get(&context) {
            None => {
                self.violate("CTX-2", format!("{call}: context {context:#x} is gone"), CONTEXT_IS_DESTROYED)
            }
            Some(Context { dead: Some(code), .. }) => Err(*code),
            Some(_) => Ok(context),
        }
    }

    /// A sticky error: from here on the context's calls only return it, and nothing there runs any more.
    pub fn kill(&mut self, context: usize, code: u32) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.dead.get_or_insert(code);
        }
        let mut launched = Vec::new();
        for stream in self.streams.values_mut().filter(|s| s.context == context) {
            launched.extend(stream.queue.drain(..).filter_map(|op| match op {
                Op::Launched(objects) => Some(objects),
                _ => None,
            }));
            stream.done = stream.submitted;
        }
        launched.into_iter().for_each(|objects| self.let_go(&objects));
    }

    // --- captures ------------------------------------------------------------------------------------------------

    /// A call that a capture may forbid to this thread.
    pub fn unsafe_call(&mut self, call: &str) -> Outcome {
        let (mode, thread) = (MODE.get(), thread());
        let forbids = |capture: &Capture| match (mode, capture.mode) {
            (2, _) | (_, 2) => false,
            (0, 0) => true,
            _ => capture.thread == thread,
        };
        let mut spoiled = None;
        for (handle, stream) in &mut self.streams {
            if let Some(capture) = stream.capture.as_mut().filter(|c| forbids(c)) {
                capture.spoiled = true;
                spoiled = Some(*handle);
            }
        }
        match spoiled {
            Some(stream) => self.violate(
                "CAP-1",
                format!("{call} during the capture of {stream:#x}"),
                CAPTURE_UNSUPPORTED,
            ),
            None => Ok(()),
        }
    }

    // --- streams -------------------------------------------------------------------------------------------------

    /// A stream of the current context.
    pub fn stream(&mut self, call: &str, handle: usize) -> Outcome<&mut Stream> {
        let current = self.current(call)?;
        let handle = self.resolved(handle);
        if self.any_stream(call, handle)?.context != current {
            let text = format!("{call}: stream {handle:#x} of another context");
            return self.violate("CTX-5", text, INVALID_HANDLE);
        }
        self.streams.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// A stream of any context, which need not be current: the handle is no default stream's.
    pub fn any_stream(&mut self, call: &str, handle: usize) -> Outcome<&mut Stream> {
        let Some(context) = self.streams.get(&handle).filter(|s| !s.destroyed).map(|s| s.context) else {
            return self.violate("STR-1", format!("{call}: no stream {handle:#x}"), INVALID_HANDLE);
        };
        self.alive(call, context)?;
        self.streams.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// An event that exists.
    pub fn event(&mut self, call: &str, handle: usize) -> Outcome<&mut Event> {
        let current = self.current(call)?;
        if self.any_event(call, handle)?.context != current {
            let text = format!("{call}: event {handle:#x} of another context");
            return self.violate("CTX-5", text, INVALID_HANDLE);
        }
        self.events.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// An event of any context, which need not be current.
    fn any_event(&mut self, call: &str, handle: usize) -> Outcome<&mut Event> {
        let Some(context) = self.events.get(&handle).map(|event| event.context) else {
            return self.violate("EVT-1", format!("{call}: no event {handle:#x}"), INVALID_HANDLE);
        };
        self.alive(call, context)?;
        self.events.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    pub fn create_stream(&mut self, context: usize, blocking: bool) -> usize {
        let old = self.reusable();
        let handle = old.unwrap_or_else(|| self.fresh());
        // Events that were recorded on the stream before, if there was one, are complete.
        let submitted = old.and_then(|old| self.streams.get(&old)).map_or(0, |s| s.submitted);
        self.stream_ids += 1;
        let stream = Stream {
            context,
            id: self.stream_ids,
            blocking,
            priority: 0,
            queue: VecDeque::new(),
            done: submitted,
            submitted,
            capture: None,
            destroyed: false,
        };
        self.streams.insert(handle, stream);
        handle
    }

    pub fn create_event(&mut self, context: usize) -> usize {
        let handle = self.fresh();
        let event = Event { context, recorded: None, seen: false, captured: false, patience: 0 };
        self.events.insert(handle, event);
        handle
    }

    /// Queues an operation, or makes it a node of the graph that is being captured.
    pub fn submit(&mut self, call: &str, handle: usize, op: Op) -> Outcome<u64> {
        self.not_implicit(call, handle)?;
        self.order_implicitly(call, handle)?;
        let stream = self.stream(call, handle)?;
        if let Some(capture) = &stream.capture {
            if capture.spoiled {
                return Err(CAPTURE_INVALIDATED);
            }
            let graph = capture.graph;
            self.add_node(graph, op);
            return Ok(0);
        }
        stream.queue.push_back(op);
        stream.submitted += 1;
        Ok(stream.submitted)
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
                Op::Copy { src, dst, len } => self.copy(src, dst, len),
                Op::Staged { bytes, dst } => {
                    if let Place::Device(at) = dst {
                        self.check_born(at, bytes.len());
                    }
                    self.write(dst, &bytes);
                }
                Op::Kernel(launch) => self.run_kernel(&launch),
                Op::Allocate(at) => self.run_allocate(at),
                Op::Free(at) => self.run_free(at),
            }
            // A kernel may have ended its context, and with it all that is queued.
            if let Some(stream) = self.streams.get_mut(&handle).filter(|s| s.done < s.submitted) {
                stream.done += 1;
            }
        }
    }

    /// Runs everything that uses such memory.
    pub fn run_users(&mut self, uses: impl Fn(&Place, usize) -> bool) -> bool {
        let users = |s: &Stream| {
            let last = s.queue.iter().rposition(|op| match op {
                Op::Copy { src, dst, len } => uses(src, *len) || uses(dst, *len),
                Op::Staged { bytes, dst } => uses(dst, bytes.len()),
                Op::Kernel(launch) => self.kernel_uses(launch, &uses),
                _ => false,
            });
            last.map(|at| s.done + at as u64 + 1)
        };
        let found: Vec<_> =
            self.streams.iter().filter_map(|(h, s)| users(s).map(|upto| (*h, upto))).collect();
        for (handle, upto) in &found {
            self.run(*handle, *upto);
        }
        !found.is_empty()
    }

    fn copy(&mut self, src: Place, dst: Place, len: usize) {
        // The ranges were checked when the copy was submitted, and memory in use is not freed before its copies ran.
        for place in [src, dst] {
            if let Place::Device(at) = place {
                self.check_born(at, len);
            }
        }
        let bytes = self.bytes(src, len);
        self.write(dst, &bytes);
    }

    /// What is there now.
    pub fn bytes(&self, src: Place, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match src {
            // SAFETY: the call that submitted it promised that the range stays valid until the copy was seen complete.
            Place::Host(from) => unsafe {
                std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), len);
            },
            Place::Device(at) => {
                if let Some((block, offset)) = self.block(at, len) {
                    bytes.copy_from_slice(&locked(&block.bytes)[offset..offset + len]);
                }
            }
        }
        bytes
    }

    pub fn write(&mut self, dst: Place, bytes: &[u8]) {
        let len = bytes.len();
        match dst {
            // SAFETY: as above.
            Place::Host(to) => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, len) },
            Place::Device(at) => {
                if let Some((block, offset)) = self.block(at, len) {
                    locked(&block.bytes)[offset..offset + len].copy_from_slice(bytes);
                }
            }
        }
    }

    /// Whether it is host memory that is not page-locked.
    pub fn is_pageable(&self, place: Place, len: usize) -> bool {
        let Place::Host(at) = place else { return false };
        let within = |(s, l): (&usize, &usize)| at >= *s && at + len <= s + l;
        !self.registered.iter().any(within) && !self.hosts.has(at, len)
    }

    // --- events --------------------------------------------------------------------------------------------------

    pub fn record(&mut self, event: usize, stream: usize) -> Outcome {
        let call = "cuEventRecord";
        let stream = self.resolved(stream);
        let (context, was) = {
            let event = self.event(call, event)?;
            (event.context, event.recorded.filter(|_| !event.seen))
        };
        if self.stream(call, stream)?.context != context {
            return self.violate(
                "CTX-5",
                format!("{call}: {event:#x} and {stream:#x} of two contexts"),
                INVALID_HANDLE,
            );
        }
        // Complete is enough: a later place on its stream may have been seen instead.
        let pending = |(on, upto): &(usize, u64)| self.streams.get(on).is_some_and(|s| s.done < *upto);
        if let Some((on, _)) = was.filter(pending) {
            let _: Outcome = self.violate("EVT-3", format!("{event:#x} is still recorded on {on:#x}"), 0);
        }
        let captured = self.stream(call, stream)?.capture.is_some();
        let upto = self.submit(call, stream, Op::Record)?;
        let patience = (self.random() % 3) as u32;
        let event = self.event(call, event)?;
        (event.recorded, event.seen, event.captured) = (Some((stream, upto)), false, captured);
        event.patience = patience;
        Ok(())
    }

    pub fn query(&mut self, handle: usize) -> Outcome {
        let hung = self.hung;
        let event = self.any_event("cuEventQuery", handle)?;
        if event.captured {
            return self.violate("CAP-3", format!("{handle:#x} was recorded in a capture"), CAPTURED_EVENT);
        }
        let Some((stream, upto)) = event.recorded else {
            let _: Outcome = self.violate("EVT-2", format!("{handle:#x} was never recorded"), 0);
            return Ok(());
        };
        if !event.seen {
            if hung {
                return Err(NOT_READY);
            }
            if self.is_slow(stream, upto) {
                return Err(NOT_READY);
            }
            let event = self.any_event("cuEventQuery", handle)?;
            if event.patience > 0 {
                event.patience -= 1;
                return Err(NOT_READY);
            }
            self.run(stream, upto);
            self.any_event("cuEventQuery", handle)?.seen = true;
        }
        Ok(())
    }

    pub fn destroy_event(&mut self, handle: usize) -> Outcome {
        let event = self.event("cuEventDestroy", handle)?;
        let recorded = event.recorded.filter(|_| !event.seen);
        let pending = |(stream, upto)| self.streams.get(&stream).is_some_and(|s| s.done < upto);
        if recorded.is_some_and(pending) {
            let _: Outcome = self.violate("EVT-4", format!("{handle:#x} is not complete"), 0);
        }
        self.events.remove(&handle);
        Ok(())
    }

    pub fn destroy_stream(&mut self, handle: usize) -> Outcome {
        let stream = self.stream("cuStreamDestroy", handle)?;
        stream.destroyed = true;
        let copies = stream
            .queue
            .iter()
            .filter(|op| matches!(op, Op::Copy { .. } | Op::Staged { .. } | Op::Kernel(_)))
            .count();
        let upto = stream.submitted;
        if copies > 0 {
            let _: Outcome = self.violate("STR-2", format!("{handle:#x} has {copies} copies queued"), 0);
        }
        self.run(handle, upto);
        // It stays, for events that were recorded on it.
        Ok(())
    }

    // --- memory --------------------------------------------------------------------------------------------------

    pub fn register(&mut self, start: usize, len: usize) -> Outcome {
        if start == 0 || len == 0 || start.checked_add(len).is_none() {
            return self.violate("MEM-3", format!("{len} bytes at {start:#x}"), INVALID_VALUE);
        }
        if let Some((other, other_len)) = self.registered.iter().find(|(s, l)| overlaps(start, len, **s, **l))
        {
            let text = format!("{len} bytes at {start:#x} overlap {other_len} at {other:#x}");
            return self.violate("MEM-1", text, ALREADY_REGISTERED);
        }
        self.registered.insert(start, len);
        Ok(())
    }

    pub fn unregister(&mut self, start: usize) -> Outcome {
        let Some(len) = self.registered.get(&start).copied() else {
            // Page-locked, and not the start of a registration: the driver knows it.
            let known = !self.is_pageable(Place::Host(start), 1);
            let code = if known { INVALID_VALUE } else { NOT_REGISTERED };
            return self.violate("MEM-2", format!("{start:#x} is not registered"), code);
        };
        let used =
            self.run_users(|place, n| matches!(place, Place::Host(at) if overlaps(*at, n, start, len)));
        if used {
            let _: Outcome = self.violate("MEM-4", format!("{start:#x} is used by a queued copy"), 0);
        }
        self.registered.remove(&start);
        self.hosts.read_only.remove(&start);
        Ok(())
    }

    pub fn allocate(&mut self, context: usize, len: usize) -> Outcome<u64> {
        let device = self.contexts[&context].device;
        let used: usize = self.blocks.values().filter(|b| b.context == context).map(|b| b.len).sum();
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        if used.checked_add(len).is_none_or(|sum| sum > self.devices[device].memory) {
            return Err(OUT_OF_MEMORY);
        }
        let at = self.address(len);
        let bytes = Arc::new(Mutex::new(vec![0xA5; len]));
        self.blocks.insert(at, Block { context, len, bytes, kind: Kind::Plain });
        Ok(at)
    }

    /// Addresses that nothing else has or had.
    pub fn address(&mut self, len: usize) -> u64 {
        let at = self.next_address;
        // Room between two, so that leaving one never means reaching the next.
        self.next_address += (len as u64).next_multiple_of(4096) + 4096;
        at
    }

    pub fn be(&mut self, at: u64, kind: Kind) {
        if let Some(block) = self.blocks.get_mut(&at) {
            block.kind = kind;
        }
    }

    pub fn free(&mut self, at: u64) -> Outcome {
        let Some(len) = self.blocks.get(&at).map(|b| b.len as u64) else {
            return self.violate("MEM-7", format!("{at:#x} is no allocation"), INVALID_VALUE);
        };
        if self.run_users(|place, _| matches!(place, Place::Device(p) if (at..at + len).contains(p))) {
            let _: Outcome = self.violate("MEM-8", format!("{at:#x} is used by a queued copy"), 0);
        }
        if self.blocks.get(&at).is_some_and(|b| matches!(b.kind, Kind::Pool { born: false, .. })) {
            let _: Outcome = self.violate("POOL-5", format!("{at:#x} is not there yet"), 0);
        }
        self.blocks.remove(&at);
        Ok(())
    }

    pub fn block(&self, at: u64, len: usize) -> Option<(&Block, usize)> {
        let (start, block) = self.blocks.range(..=at).next_back()?;
        let offset = (at - start) as usize;
        (offset.checked_add(len)? <= block.len).then_some((block, offset))
    }

    /// Checks both sides of a copy that is about to be submitted.
    pub fn check(&mut self, call: &str, place: Place, len: usize) -> Outcome {
        match place {
            Place::Device(at) => {
                let context = self.current(call)?;
                self.check_heap(call, at)?;
                self.check_dying(call, at, len)?;
                match self.block(at, len).map(|(block, _)| block.context) {
                    Some(of) if of == context => Ok(()),
                    Some(_) => {
                        self.violate("CTX-5", format!("{call}: {at:#x} of another context"), INVALID_VALUE)
                    }
                    None => self.violate("MEM-6", format!("{call}: {len} bytes at {at:#x}"), INVALID_VALUE),
                }
            }
            Place::Host(at) => {
                let within = |(s, l): (&usize, &usize)| at >= *s && at + len <= s + l;
                if at == 0 {
                    return self.violate("MEM-6", format!("{call}: a null pointer"), INVALID_VALUE);
                }
                if self.registered.iter().any(within) || self.hosts.has(at, len) {
                    return Ok(());
                }
                if self.registered.iter().any(|(s, l)| overlaps(at, len, *s, *l)) {
                    let text = format!("{call}: {len} bytes at {at:#x} are registered in part");
                    return self.violate("MEM-5", text, INVALID_VALUE);
                }
                self.note("PAGEABLE");
                Ok(())
            }
        }
    }
}

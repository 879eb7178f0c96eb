//! What there is: devices, contexts, streams, events, memory; what is queued; what was broken.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::graphs::Graphs;
use crate::common::{Common, locked, worlds};
pub use crate::common::{Outcome, overlaps, thread};

/// The codes, and the driver's words for them.
macro_rules! codes {
    ($($name:ident $code:literal $word:literal;)*) => {
        $(#[allow(dead_code, reason = "some are only given by tests")] pub const $name: u32 = $code;)*

        /// `None`: there is no such code.
        pub fn word(code: u32) -> Option<&'static std::ffi::CStr> {
            match code {
                0 => Some(c"CUDA_SUCCESS"),
                $($code => Some($word),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE 1 c"CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY 2 c"CUDA_ERROR_OUT_OF_MEMORY";
    NOT_INITIALIZED 3 c"CUDA_ERROR_NOT_INITIALIZED";
    DEINITIALIZED 4 c"CUDA_ERROR_DEINITIALIZED";
    NO_DEVICE 100 c"CUDA_ERROR_NO_DEVICE";
    INVALID_DEVICE 101 c"CUDA_ERROR_INVALID_DEVICE";
    INVALID_CONTEXT 201 c"CUDA_ERROR_INVALID_CONTEXT";
    UNSUPPORTED_LIMIT 215 c"CUDA_ERROR_UNSUPPORTED_LIMIT";
    INVALID_PTX 218 c"CUDA_ERROR_INVALID_PTX";
    INVALID_HANDLE 400 c"CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND 500 c"CUDA_ERROR_NOT_FOUND";
    NOT_READY 600 c"CUDA_ERROR_NOT_READY";
    ILLEGAL_ADDRESS 700 c"CUDA_ERROR_ILLEGAL_ADDRESS";
    CONTEXT_IS_DESTROYED 709 c"CUDA_ERROR_CONTEXT_IS_DESTROYED";
    ALREADY_REGISTERED 712 c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    NOT_REGISTERED 713 c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    MISALIGNED_ADDRESS 716 c"CUDA_ERROR_MISALIGNED_ADDRESS";
    LAUNCH_FAILED 719 c"CUDA_ERROR_LAUNCH_FAILED";
    NOT_PERMITTED 800 c"CUDA_ERROR_NOT_PERMITTED";
    NOT_SUPPORTED 801 c"CUDA_ERROR_NOT_SUPPORTED";
    SYSTEM_DRIVER_MISMATCH 803 c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    CAPTURE_UNSUPPORTED 900 c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    CAPTURE_INVALIDATED 901 c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    CAPTURE_ISOLATION 905 c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    CAPTURE_IMPLICIT 906 c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    CAPTURED_EVENT 907 c"CUDA_ERROR_CAPTURED_EVENT";
    CAPTURE_WRONG_THREAD 908 c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
}

/// Codes after which a context is of no use any more.
pub fn is_device_lost(code: u32) -> bool {
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810)
}

thread_local! {
    /// The contexts pushed on this thread, the current one last.
    pub static STACK: RefCell<Stack> = const { RefCell::new(Stack { contexts: [0; 64], len: 0 }) };
    /// Its capture mode: 0 global, 1 thread-local, 2 relaxed.
    pub static MODE: Cell<u32> = const { Cell::new(0) };
}

/// Contexts of a thread. It has no destructor, since threads call the driver when they end, too.
pub struct Stack {
    contexts: [usize; 64],
    len: usize,
}

impl Stack {
    pub fn last(&self) -> Option<&usize> {
        self.contexts[..self.len].last()
    }

    pub fn push(&mut self, context: usize) {
        self.contexts[self.len] = context;
        self.len += 1;
    }

    pub fn pop(&mut self) -> Option<usize> {
        let last = self.last().copied()?;
        self.len -= 1;
        Some(last)
    }

    pub fn clear(&mut self) {
        self.len = 0;
    }
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
    /// A copy whose source was read when it was submitted.
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
    Kernel(super::kernels::Launch),
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
    /// Operations from this place on run only for a call that synchronises.
    pub held: Option<u64>,
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

/// A machine: see the page of the crate.
pub struct World {
    pub common: Common,
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
    /// Registered host memory: start and length.
    pub registered: BTreeMap<usize, usize>,
    pub pointers: super::pointers::Pointers,
    pub modules: super::kernels::Modules,
    /// Host memory that the driver knows more about.
    pub hosts: super::host::Hosts,
    /// How often a context was retained.
    pub retains: u64,
    /// What the next registration takes beside its pages.
    pub first_pin: Duration,
    /// What the call under way queues is held.
    pub stalls: bool,
}

/// Where made-up device addresses begin.
const BASE: u64 = 0x7f00_0000_0000_0000;

worlds!(
    Gpus,
    BASE,
    STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0)),
    STACK.with_borrow_mut(Stack::clear)
);

/// The first of these ranges that meets what another one writes, where no order is promised.
pub fn meeting(
    mut written: Vec<(u64, usize)>,
    read: impl Iterator<Item = (u64, usize)>,
) -> Option<(u64, usize)> {
    written.sort_unstable();
    let twice = written.windows(2).find(|w| w[0].0 + w[0].1 as u64 > w[1].0).map(|w| w[1]);
    // Apart from each other, those that are written end in the order in which they begin.
    let meets = |(at, len): &(u64, usize)| {
        let before = written.partition_point(|(start, _)| *start < at + *len as u64);
        before > 0 && written[before - 1].0 + written[before - 1].1 as u64 > *at
    };
    twice.or_else(|| read.into_iter().find(meets))
}

impl World {
    fn new(number: usize) -> Self {
        Self {
            common: Common::new(number, BASE),
            ready: number > 0,
            ended: false,
            version: 12_080,
            devices: Vec::new(),
            contexts: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            blocks: BTreeMap::new(),
            legacy: BTreeMap::new(),
            per_thread: BTreeMap::new(),
            graphs: Graphs::default(),
            registered: BTreeMap::new(),
            pointers: Default::default(),
            modules: Default::default(),
            hosts: Default::default(),
            retains: 0,
            first_pin: Duration::ZERO,
            stalls: false,
        }
    }

    /// So many devices with so many bytes of memory each.
    pub fn have_devices(&mut self, count: usize, memory: usize) {
        self.devices = (0..count).map(|_| Device { memory, numa_node: -1, primary: None }).collect();
    }

    // --- contexts ------------------------------------------------------------------------------------------------

    pub fn device(&mut self, device: i32) -> Outcome<usize> {
        self.common.device(device).filter(|at| *at < self.devices.len()).ok_or(INVALID_DEVICE)
    }

    /// What a device says about itself.
    pub fn attribute(&self, device: usize, attribute: i32) -> Outcome<i32> {
        match attribute {
            // CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID; -1: none is known.
            134 => Ok(self.devices[device].numa_node),
            // CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, which cudarc asks for.
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
        let context = self.add_context(device);
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

    /// A new context of a device.
    pub fn add_context(&mut self, device: usize) -> usize {
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
        self.ids += 1;
        let stream = Stream {
            context,
            id: self.ids,
            blocking,
            priority: 0,
            queue: VecDeque::new(),
            done: submitted,
            submitted,
            held: None,
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
        let submitted = stream.submitted;
        if std::mem::take(&mut self.stalls) {
            self.stream(call, handle)?.held.get_or_insert(submitted - 1);
        }
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

    /// The streams of a device, or of all, whose next operation can run.
    pub fn runnable(&self, device: Option<usize>) -> Vec<usize> {
        let is_held = |stream: &Stream| stream.held.is_some_and(|held| stream.done >= held);
        let can_run = |stream: &Stream| match stream.queue.front().filter(|_| !is_held(stream)) {
            Some(Op::Wait { stream, upto }) => self.streams.get(stream).is_none_or(|s| s.done >= *upto),
            first => first.is_some(),
        };
        let of = |context: &usize| device.is_none_or(|device| self.contexts[context].device == device);
        let streams = self.streams.iter().filter(|(_, s)| !self.common.hung && of(&s.context) && can_run(s));
        streams.map(|(handle, _)| *handle).collect()
    }

    /// Runs the next operation of one of these streams. `false`: there is none.
    pub fn step(&mut self, runnable: &[usize]) -> bool {
        if runnable.is_empty() {
            return false;
        }
        let handle = runnable[(self.random() % runnable.len() as u64) as usize];
        let upto = self.streams[&handle].done + 1;
        self.run(handle, upto);
        true
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
            let text = format!("{call}: {event:#x} and {stream:#x} of two contexts");
            return self.violate("CTX-5", text, INVALID_HANDLE);
        }
        // Complete is enough: a later place on its stream may have been seen instead.
        let pending = |(on, upto): &(usize, u64)| self.streams.get(on).is_some_and(|s| s.done < *upto);
        if let Some((on, _)) = was.filter(pending) {
            self.let_pass("EVT-3", format!("{event:#x} is still recorded on {on:#x}"));
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
            self.let_pass("EVT-2", format!("{handle:#x} was never recorded"));
            return Ok(());
        };
        if !event.seen {
            let is_done = self.streams.get(&stream).is_none_or(|s| s.done >= upto);
            if hung || (self.common.by_hand && !is_done) {
                return Err(NOT_READY);
            }
            let event = self.any_event("cuEventQuery", handle)?;
            if event.patience > 0 && !is_done {
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
            self.let_pass("EVT-4", format!("{handle:#x} is not complete"));
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
            self.let_pass("STR-2", format!("{handle:#x} has {copies} copies queued"));
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
            self.let_pass("MEM-4", format!("{start:#x} is used by a queued copy"));
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
        let at = self.address(len, 0);
        let bytes = Arc::new(Mutex::new(vec![0xA5; len]));
        self.blocks.insert(at, Block { context, len, bytes, kind: Kind::Plain });
        Ok(at)
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
            self.let_pass("MEM-8", format!("{at:#x} is used by a queued copy"));
        }
        if self.blocks.get(&at).is_some_and(|b| matches!(b.kind, Kind::Pool { born: false, .. })) {
            self.let_pass("POOL-5", format!("{at:#x} is not there yet"));
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
                if at == 0 {
                    return self.violate("MEM-6", format!("{call}: a null pointer"), INVALID_VALUE);
                }
                if !self.is_pageable(place, len) {
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

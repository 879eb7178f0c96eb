//! What there is: devices, contexts, streams, events, memory; what is queued; what was broken.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard};

use crate::codes::*;
use crate::events::Event;
use crate::host::Hosts;

/// A call's outcome: a code other than zero is the error.
pub type Outcome<T = ()> = Result<T, u32>;

thread_local! {
    /// The thread's current context; 0: none.
    pub static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// A number for the thread.
    static THREAD: Cell<usize> = const { Cell::new(0) };
}

pub struct Device {
    pub memory: usize,
    /// How often it is set, over how often it was reset.
    pub sets: usize,
    /// The default context, which all threads share that set the device.
    pub default: Option<usize>,
    /// The error that ended it, if one did.
    pub dead: Option<u32>,
}

pub struct Context {
    pub device: usize,
    /// Made by `aclrtCreateContext`.
    pub explicit: bool,
    /// The stream that null stands for, made on first use.
    pub default_stream: Option<usize>,
}

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Host(usize),
    Device(usize),
}

#[derive(Clone, Copy, Debug)]
pub enum Op {
    Copy {
        src: Place,
        dst: Place,
        len: usize,
    },
    Set {
        dst: Place,
        value: u8,
        len: usize,
    },
    /// What becomes of a copy from or to memory that is not page-locked.
    Garbage {
        dst: Place,
        len: usize,
    },
    /// Waits until the other stream has run up to this place.
    Wait {
        stream: usize,
        upto: u64,
    },
    Record,
}

pub struct Stream {
    pub context: usize,
    pub queue: VecDeque<Op>,
    /// Operations run so far, and submitted so far.
    pub done: u64,
    pub submitted: u64,
    pub destroyed: bool,
    /// Starts of blocks of host memory that it used since a call waited for it.
    pub used: BTreeSet<usize>,
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
    /// How often it was initialised, over how often that was taken back.
    pub ready: u64,
    /// It was finalised and not initialised again.
    pub ended: bool,
    /// The program runs on the device itself: `ACL_DEVICE`.
    pub on_device: bool,
    pub devices: Vec<Device>,
    pub contexts: BTreeMap<usize, Context>,
    pub streams: BTreeMap<usize, Stream>,
    pub events: BTreeMap<usize, Event>,
    /// Device memory: its device and its bytes.
    pub blocks: BTreeMap<usize, (usize, Vec<u8>)>,
    pub hosts: Hosts,
    /// Whether new streams get the handles of destroyed ones.
    pub reuse: bool,
    /// Each copy is of a whole segment, so that two of them keep the distance that segments have.
    pub whole_segments: bool,
    /// Per device.
    pub event_limit: usize,
    pub stream_limit: usize,
    pub violations: Vec<String>,
    pub notes: BTreeMap<&'static str, u64>,
    pub counts: BTreeMap<&'static str, u64>,
    /// The call that came last.
    pub last: &'static str,
    pub faults: Vec<Fault>,
    /// Copies that had not ended when their device was lost, by start and length on both sides: nothing says that they
    /// end then.
    pub late: Vec<[(usize, usize); 2]>,
    /// What contexts had left when they were destroyed.
    pub left: BTreeMap<&'static str, usize>,
    /// How often devices were set and contexts made.
    pub opened: u64,
    /// Calls that were made to fail.
    pub struck: u64,
    /// Nothing runs while it is set.
    pub hung: bool,
    next: usize,
    next_address: usize,
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
        // Relaxed: only that no two are the same counts.
        THREAD.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    }
    THREAD.get()
}

pub fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

pub fn overlaps(start: usize, len: usize, other: usize, other_len: usize) -> bool {
    start < other + other_len && other < start + len
}

impl World {
    fn configure(&mut self) {
        self.configured = true;
        self.on_device = number("PINPOOL_STANDIN_RC", 0) != 0;
        self.whole_segments = number("PINPOOL_STANDIN_SEGMENTS", 0) != 0;
        self.event_limit = number("PINPOOL_STANDIN_EVENTS", 65_536) as usize;
        self.stream_limit = number("PINPOOL_STANDIN_STREAMS", 1_984) as usize;
        let memory = number("PINPOOL_STANDIN_MEMORY", 256 << 20) as usize;
        let device = |_| Device { memory, sets: 0, default: None, dead: None };
        self.devices = (0..number("PINPOOL_STANDIN_DEVICES", 2)).map(device).collect();
        self.hosts.configure();
        // Apart from each other and from what any call could take for another argument; and no CPU can read there.
        self.next = self.next.max(0x5eed_0000);
        self.next_address = self.next_address.max(0x0d00_0000_0000_0000);
        self.random = 0x9e37_79b9_7f4a_7c15;
        if let Ok(fault) = std::env::var("PINPOOL_STANDIN_FAIL") {
            let parts: Vec<&str> = fault.split(':').collect();
            if let [call, nth, code] = parts[..] {
                let (left, code) = (nth.parse().unwrap_or(1), code.parse().unwrap_or(INTERNAL_ERROR));
                self.faults.push(Fault { call: call.into(), left, code, after: false });
            }
        }
    }

    /// As when it was loaded; but no handle or device address is ever used twice.
    pub fn reset(&mut self) {
        let (next, next_address) = (self.next, self.next_address);
        *self = Self { next, next_address, ..Self::default() };
        self.configure();
    }

    pub fn violate<T>(&mut self, id: &str, text: impl std::fmt::Display, code: u32) -> Outcome<T> {
        self.violations.push(format!("{id} {text}"));
        Err(code)
    }

    /// A violation that the library lets pass.
    pub fn let_pass(&mut self, id: &str, text: impl std::fmt::Display) {
        let _: Outcome = self.violate(id, text, 0);
    }

    pub fn note(&mut self, what: &'static str) {
        *self.notes.entry(what).or_default() += 1;
    }

    pub fn fresh(&mut self) -> usize {
        self.next += 16;
        self.next
    }

    /// Device addresses that nothing else has or had, on a multiple of 64 and, every other one, of no more.
    pub fn address(&mut self, len: usize) -> usize {
        // Room between two, so that leaving one never means reaching the next.
        self.next_address += 4096 + 64;
        let at = self.next_address;
        self.next_address += len.next_multiple_of(4096);
        at
    }

    pub fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    // --- devices and contexts ------------------------------------------------------------------------------------

    pub fn device(&mut self, device: i32) -> Outcome<usize> {
        match usize::try_from(device) {
            Ok(device) if device < self.devices.len() => Ok(device),
            _ => Err(INVALID_DEVICE),
        }
    }

    /// The current context, which must be alive, as must its device.
    pub fn current(&mut self, call: &str) -> Outcome<usize> {
        let context = CURRENT.get();
        if context == 0 {
            return self.violate("CTX-1", format!("{call}: no context is current"), CONTEXT_NULL);
        }
        let Some(device) = self.contexts.get(&context).map(|c| c.device) else {
            return self.violate("CTX-2", format!("{call}: context {context:#x} is gone"), CONTEXT_NULL);
        };
        self.alive(device)?;
        Ok(context)
    }

    /// The current context's device.
    pub fn current_device(&mut self, call: &str) -> Outcome<usize> {
        let context = self.current(call)?;
        Ok(self.contexts[&context].device)
    }

    pub fn alive(&self, device: usize) -> Outcome {
        self.devices[device].dead.map_or(Ok(()), Err)
    }

    pub fn device_of(&self, context: usize) -> Option<usize> {
        self.contexts.get(&context).map(|c| c.device)
    }

    /// Destroys a context, with its streams and events: what is queued there runs first.
    pub fn end_context(&mut self, context: usize) {
        let streams: Vec<usize> =
            self.streams.iter().filter(|(_, s)| s.context == context).map(|(h, _)| *h).collect();
        streams.into_iter().for_each(|stream| self.run(stream, u64::MAX));
        for (what, count) in self.owned(Some(context)) {
            *self.left.entry(what).or_default() += count;
        }
        self.contexts.remove(&context);
        self.streams.retain(|_, s| s.context != context);
        self.events.retain(|_, e| e.context != context);
    }

    /// What a context has, or all of them together.
    pub fn owned(&self, of: Option<usize>) -> [(&'static str, usize); 2] {
        let is = |context: usize| of.is_none_or(|of| of == context);
        let default = |handle: &usize| self.contexts.values().any(|c| c.default_stream == Some(*handle));
        let there = |(handle, s): &(&usize, &Stream)| is(s.context) && !s.destroyed && !default(handle);
        let streams = self.streams.iter().filter(there).count();
        let events = self.events.values().filter(|e| is(e.context)).count();
        [("streams", streams), ("events", events)]
    }

    /// An error that ends a device: from here on calls only return it, and nothing there runs any more.
    pub fn kill(&mut self, device: usize, code: u32) {
        let Some(dead) = self.devices.get_mut(device).map(|d| &mut d.dead) else { return };
        dead.get_or_insert(code);
        let contexts = &self.contexts;
        let of = |s: &&mut Stream| contexts.get(&s.context).is_some_and(|c| c.device == device);
        for stream in self.streams.values_mut().filter(of) {
            stream.queue.clear();
            stream.done = stream.submitted;
            // No call can wait for it any more.
            stream.used.clear();
        }
    }

    // --- what is queued ------------------------------------------------------------------------------------------

    /// Queues an operation on a stream that was looked up.
    pub fn submit(&mut self, stream: usize, op: Op) -> u64 {
        let Some(stream) = self.streams.get_mut(&stream) else { return 0 };
        let sides = match op {
            Op::Copy { src, dst, .. } => [Some(src), Some(dst)],
            Op::Set { dst, .. } => [Some(dst), None],
            _ => [None, None],
        };
        for place in sides.into_iter().flatten() {
            if let Place::Host(at) = place {
                stream.used.extend(self.hosts.allocation(at, 1).map(|(start, _)| start));
            }
        }
        stream.queue.push_back(op);
        stream.submitted += 1;
        stream.submitted
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
                Op::Copy { src, dst, len } => self.copy(src, dst, len),
                Op::Set { dst, value, len } => self.write(dst, &vec![value; len]),
                Op::Garbage { dst: dst @ Place::Device(_), len } => self.write(dst, &vec![GARBAGE; len]),
                // The memory may be freed by now: then the bytes are discarded.
                Op::Garbage { .. } => {}
            }
            if let Some(stream) = self.streams.get_mut(&handle) {
                stream.done += 1;
            }
        }
    }

    /// Runs all of a stream for a call that waits for that.
    pub fn drain(&mut self, handle: usize) {
        self.run(handle, u64::MAX);
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.used.clear();
        }
    }

    /// Whether a queued operation reads (`reads`) or writes such memory.
    pub fn is_used(&self, reads: bool, uses: impl Fn(&Place, usize) -> bool) -> bool {
        self.streams.values().flat_map(|s| &s.queue).any(|op| match op {
            Op::Copy { src, dst, len } => uses(dst, *len) || (reads && uses(src, *len)),
            Op::Set { dst, len, .. } | Op::Garbage { dst, len } => uses(dst, *len),
            _ => false,
        })
    }

    pub fn copy(&mut self, src: Place, dst: Place, len: usize) {
        let bytes = self.bytes(src, len);
        self.write(dst, &bytes);
    }

    /// The bytes there now. Freed memory reads as [`GONE`].
    fn bytes(&mut self, src: Place, len: usize) -> Vec<u8> {
        let mut bytes = vec![GONE; len];
        match src {
            // SAFETY: page-locked memory that was not freed or unregistered, of that length.
            Place::Host(from) if self.hosts.is_locked(from, len) => unsafe {
                std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), len);
            },
            Place::Host(_) => {}
            Place::Device(at) => {
                if let Some((block, offset)) = self.block(at, len) {
                    bytes.copy_from_slice(&block[offset..offset + len]);
                }
            }
        }
        bytes
    }

    pub fn write(&mut self, dst: Place, bytes: &[u8]) {
        let len = bytes.len();
        match dst {
            // SAFETY: as above.
            Place::Host(to) if self.hosts.is_locked(to, len) => unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, len);
            },
            Place::Host(_) => {}
            Place::Device(at) => {
                if let Some((block, offset)) = self.block(at, len) {
                    block[offset..offset + len].copy_from_slice(bytes);
                }
            }
        }
    }

    /// The allocation of device memory that has these bytes.
    pub fn block(&mut self, at: usize, len: usize) -> Option<(&mut Vec<u8>, usize)> {
        let (start, (_, bytes)) = self.blocks.range_mut(..=at).next_back()?;
        let offset = at - start;
        (offset.checked_add(len)? <= bytes.len()).then_some((bytes, offset))
    }
}

/// What is in memory that was allocated and not written to.
pub const FRESH: u8 = 0xA5;
/// What the device gets from memory that is not page-locked.
pub const GARBAGE: u8 = 0xDB;
/// What a copy reads where memory was freed under it.
pub const GONE: u8 = 0xDD;

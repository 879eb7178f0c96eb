//! What there is: devices, contexts, streams, events, memory; what is queued; what was broken.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Display;
use std::sync::Mutex;

use super::Library;
use super::codes::*;
use super::events::Event;
use super::host::Hosts;
use crate::common::{Common, locked, worlds};
pub use crate::common::{Outcome, overlaps, thread};

thread_local! {
    /// The thread's current context; 0: none.
    pub static CURRENT: Cell<usize> = const { Cell::new(0) };
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

/// A machine: see the page of the crate.
pub struct World {
    pub common: Common,
    pub library: Library,
    /// It was initialised.
    pub ready: bool,
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
    /// Each copy is of a whole segment, so that two of them keep the distance that segments have.
    pub whole_segments: bool,
    /// Per device.
    pub stream_limit: usize,
    /// The call that came last.
    pub last: &'static str,
    /// Copies that had not ended when their device was lost, by start and length on both sides: nothing says that they
    /// end then.
    pub late: Vec<[(usize, usize); 2]>,
    /// How often devices were set and contexts made.
    pub opened: u64,
}

/// Where made-up device addresses begin: no CPU can read there.
const BASE: u64 = 0x0d00_0000_0000_0000;

worlds!(Npus, BASE, CURRENT.get(), {
    CURRENT.set(0);
    super::calls::forget();
});

/// The worlds of host memory that was allocated and not freed, by its start: a call that frees it names nothing else.
static HOSTS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// The number of the world of allocated host memory, by its start.
pub fn of_host(start: usize) -> usize {
    locked(&HOSTS).get(&start).copied().unwrap_or_else(here)
}

/// Notes in which world memory was allocated that begins there; `None`: that it is freed.
pub fn note_host(start: usize, number: Option<usize>) {
    match number {
        Some(number) => drop(locked(&HOSTS).insert(start, number)),
        None => drop(locked(&HOSTS).remove(&start)),
    }
}

impl World {
    fn new(number: usize) -> Self {
        Self {
            common: Common::new(number, BASE),
            library: Library::Today,
            ready: false,
            ended: false,
            on_device: false,
            devices: Vec::new(),
            contexts: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            blocks: BTreeMap::new(),
            hosts: Hosts::usual(),
            whole_segments: false,
            stream_limit: 1_984,
            last: "",
            late: Vec::new(),
            opened: 0,
        }
    }

    /// So many devices with so many bytes of memory each.
    pub fn have_devices(&mut self, count: usize, memory: usize) {
        self.devices = (0..count).map(|_| Device { memory, sets: 0, default: None, dead: None }).collect();
    }

    pub fn violate<T>(&mut self, id: &str, text: impl Display, code: u32) -> Outcome<T> {
        self.let_pass(id, text);
        Err(code)
    }

    /// A violation that the library lets pass.
    pub fn let_pass(&mut self, id: &str, text: impl Display) {
        let text = format!("{}: {text}", self.last);
        self.common.let_pass(id, text);
    }

    /// Whether the library is an older one.
    pub fn is_old(&self) -> bool {
        self.library != Library::Today
    }

    /// Device addresses that nothing else has or had, on a multiple of 64 and, every other one, of no more.
    pub fn made_up(&mut self, len: usize) -> usize {
        let offset = if self.random().is_multiple_of(2) { 64 } else { 0 };
        self.address(len, offset) as usize
    }

    // --- devices and contexts ------------------------------------------------------------------------------------

    pub fn device(&mut self, device: i32) -> Outcome<usize> {
        self.common.device(device).filter(|at| *at < self.devices.len()).ok_or(INVALID_DEVICE)
    }

    /// The current context, which must be alive, as must its device.
    pub fn current(&mut self) -> Outcome<usize> {
        let context = CURRENT.get();
        if context == 0 {
            return self.violate("CTX-1", "no context is current", CONTEXT_NULL);
        }
        let Some(device) = self.contexts.get(&context).map(|c| c.device) else {
            return self.violate("CTX-2", format!("context {context:#x} is gone"), CONTEXT_NULL);
        };
        self.alive(device)?;
        Ok(context)
    }

    /// The current context's device.
    pub fn current_device(&mut self) -> Outcome<usize> {
        let context = self.current()?;
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
        if let Op::Copy { src, dst, .. } = op {
            for place in [src, dst] {
                if let Place::Host(at) = place {
                    stream.used.extend(self.hosts.allocation(at, 1).map(|(start, _)| start));
                }
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
            Op::Garbage { dst, len } => uses(dst, *len),
            _ => false,
        })
    }

    pub fn copy(&mut self, src: Place, dst: Place, len: usize) {
        let bytes = self.bytes(src, len);
        self.write(dst, &bytes);
    }

    /// The bytes there now. Freed memory reads as [`GONE`].
    pub fn bytes(&mut self, src: Place, len: usize) -> Vec<u8> {
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

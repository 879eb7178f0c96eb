//! One device of a node: its streams, events and memory, and how it dies.
//!
//! [`HostUnit::kill`] keeps an order, because a caller that reads that the device is dead may free at once what copies
//! were using. First the state changes, and no further part of a copy begins. Then `kill` waits for each part that is
//! under way. Then it empties the queues, which wakes the waiters for operations. Only then do calls answer that the
//! device is dead; a call in between waits, no longer than a copy of 1 MiB takes.

#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use crate::locks::Mutex;

use super::event::HostEvents;
use super::fault::Call;
use super::memory::HostMemory;
use super::stream::{self, Delays, HostStream, Random, StreamDevice, StreamEnd, StreamWork};
use super::{HostConfig, Refusal};
use crate::error::{DeviceError, Error, ErrorClass, Result};

const ALIVE: u8 = 0;
const DYING: u8 = 1;
const DEAD: u8 = 2;

/// Numbers streams across all nodes, so that a handle of another device is never taken for one of this device.
static STREAMS: AtomicU64 = AtomicU64::new(1);
/// Numbers devices across all nodes, for their events.
static UNITS: AtomicU64 = AtomicU64::new(1);
/// Numbers threads.
static THREADS: AtomicU64 = AtomicU64::new(0);

/// One device.
#[derive(Debug)]
pub(super) struct HostUnit {
    pub(super) name: Arc<str>,
    pub(super) ordinal: u32,
    pub(super) memory: HostMemory,
    pub(super) events: HostEvents,
    threaded: bool,
    /// The longest delay before a copy and the seed of the delays.
    late: Option<(std::time::Duration, u64)>,
    state: AtomicU8,
    /// Held while the device dies.
    dying: Mutex<()>,
    /// Why it died.
    cause: Mutex<Arc<str>>,
    hung: AtomicBool,
    /// In the order of creation. A destroyed stream stays here until its queue is empty.
    streams: Mutex<BTreeMap<u64, Arc<HostStream>>>,
    /// The number of streams created and not destroyed.
    open: AtomicUsize,
    /// The number of streams ever created.
    created: AtomicU64,
}

impl HostUnit {
    pub(super) fn new(ordinal: u32, capacity: usize, config: &HostConfig) -> Arc<Self> {
        Arc::new(Self {
            name: format!("host:{ordinal}").into(),
            ordinal,
            memory: HostMemory::new(ordinal, capacity),
            // Tags repeat after 65,535 devices. Two devices with one tag only fail to refuse each other's events.
            events: HostEvents::new((UNITS.fetch_add(1, Ordering::Relaxed) % 0xffff + 1) as u16),
            threaded: config.stepped.is_none(),
            late: config.late,
            state: AtomicU8::new(ALIVE),
            dying: Mutex::new(()),
            cause: Mutex::new(Arc::from("")),
            hung: AtomicBool::new(false),
            streams: Mutex::default(),
            open: AtomicUsize::new(0),
            created: AtomicU64::new(0),
        })
    }

    /// This device's error.
    pub(super) fn error(&self, call: Call, refusal: Refusal) -> Error {
        let Refusal { class, code, text } = refusal;
        let device = Arc::clone(&self.name);
        Error::Device(DeviceError {
            device,
            call: call.name(),
            code: i64::from(code),
            text: text.into(),
            class,
        })
    }

    #[inline]
    pub(super) fn is_alive(&self) -> bool {
        self.state.load(Ordering::Acquire) == ALIVE
    }

    /// Refuses the call if the device is dead.
    #[inline]
    pub(super) fn check(&self, call: Call) -> Result<()> {
        if self.is_alive() { Ok(()) } else { Err(self.lost(call)) }
    }

    /// The error of a call to a dead device. Returns when no copy touches memory any more.
    #[cold]
    pub(super) fn lost(&self, call: Call) -> Error {
        drop(self.dying.lock());
        let cause = self.cause.lock().clone();
        self.error(
            call,
            Refusal { class: ErrorClass::DeviceLost, code: libc::ENODEV, text: cause.to_string() },
        )
    }

    /// Kills the device. When this returns, no copy of it touches memory any more, and none will.
    pub(super) fn kill(&self, cause: &str) {
        let _dying = self.dying.lock();
        if self.state.load(Ordering::Relaxed) == DEAD {
            return;
        }
        *self.cause.lock() = cause.into();
        self.state.store(DYING, Ordering::SeqCst);
        // A stream that is being created is in the table by now, or `create_stream` sees the state before it enters it.
        let streams = self.streams();
        for stream in &streams {
            stream.resolve();
        }
        let mut dropped = 0;
        for stream in &streams {
            dropped += stream.queued();
            stream.end(StreamEnd::Dead);
        }
        self.streams.lock().retain(|_, stream| !stream.is_destroyed());
        self.state.store(DEAD, Ordering::SeqCst);
        crate::foreign::debug!(target: "pinpool::device", device = self.name.to_string(), cause, dropped, "host device died");
    }

    /// Stops all streams before their next operation.
    pub(super) fn hang(&self) {
        self.hung.store(true, Ordering::Release);
        crate::foreign::debug!(target: "pinpool::device", device = self.name.to_string(), "host device hangs");
    }

    /// Lets all streams go on: those of a hung device, hung streams, and stalled operations.
    pub(super) fn resume(&self) {
        self.hung.store(false, Ordering::Release);
        for stream in self.streams() {
            stream.hold(false);
        }
    }

    /// All streams in the table, oldest first.
    pub(super) fn streams(&self) -> Vec<Arc<HostStream>> {
        self.streams.lock().values().cloned().collect()
    }

    /// The `nth` of the streams that were not destroyed.
    pub(super) fn nth_stream(&self, nth: usize) -> Option<Arc<HostStream>> {
        self.streams.lock().values().filter(|stream| !stream.is_destroyed()).nth(nth).cloned()
    }

    /// The streams whose next operation could run.
    pub(super) fn runnable(&self) -> Vec<Arc<HostStream>> {
        let mut streams = self.streams();
        streams.retain(|stream| stream.is_runnable(self));
        streams
    }

    pub(super) fn queued(&self) -> usize {
        self.streams.lock().values().map(|stream| stream.queued()).sum()
    }

    pub(super) fn uses(&self, range: &Range<usize>) -> bool {
        self.streams.lock().values().any(|stream| stream.uses(range))
    }

    /// The number of streams created and not destroyed.
    pub(super) fn open_streams(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    pub(super) fn create_stream(self: &Arc<Self>, owner: u64) -> Result<u64> {
        let stream = HostStream::new(STREAMS.fetch_add(1, Ordering::Relaxed), owner);
        {
            let mut streams = self.streams.lock();
            if self.is_alive() {
                streams.insert(stream.id, Arc::clone(&stream));
            } else {
                drop(streams);
                return Err(self.lost(Call::CreateStream));
            }
        }
        let nth = self.created.fetch_add(1, Ordering::Relaxed);
        let spawned = if self.threaded { self.spawn(&stream, nth) } else { Ok(()) };
        if let Err(error) = spawned {
            self.forget(stream.id);
            let text = format!("no thread for the stream: {error}");
            return Err(self.error(Call::CreateStream, Refusal::transient(text)));
        }
        self.open.fetch_add(1, Ordering::Relaxed);
        Ok(stream.id)
    }

    fn spawn(self: &Arc<Self>, stream: &Arc<HostStream>, nth: u64) -> std::io::Result<()> {
        let delays = self.late.map(|(max, seed)| {
            let seed = seed.wrapping_add(nth).wrapping_add(u64::from(self.ordinal) << 32);
            Delays { max, random: Random::new(seed) }
        });
        let (unit, stream) = (Arc::clone(self), Arc::clone(stream));
        let name = format!("pinpool-host-{}", THREADS.fetch_add(1, Ordering::Relaxed));
        // Detached: the thread ends by itself after its stream, and no thread waits for that.
        crate::os::thread::spawn(name, move || stream::serve(&*unit, &stream, delays)).map(drop)
    }

    /// The stream of this handle.
    pub(super) fn find(&self, call: Call, handle: u64) -> Result<Arc<HostStream>> {
        let stream = self.streams.lock().get(&handle).cloned();
        stream.ok_or_else(|| self.error(call, Refusal::unknown("stream", handle)))
    }

    /// Queues an operation.
    pub(super) fn submit(
        &self,
        call: Call,
        stream: &HostStream,
        work: StreamWork,
        stalled: bool,
    ) -> Result<u64> {
        stream.submit(work, stalled).map_err(|end| match end {
            StreamEnd::Dead => self.lost(call),
            _ => self.error(call, Refusal::unknown("stream", stream.id)),
        })
    }

    /// Destroys a stream. What is queued still runs, unless the device is dead.
    pub(super) fn destroy_stream(&self, handle: u64) -> Result<()> {
        let call = Call::DestroyStream;
        let stream = self.find(call, handle)?;
        match stream.destroy() {
            None => return Err(self.error(call, Refusal::unknown("stream", handle))),
            Some(true) => self.forget(handle),
            // The runner of its last operation forgets it.
            Some(false) => {}
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the streams that a driver has left, since no caller can ask about their queued work any more.
    pub(super) fn abandon(&self, owner: u64) {
        let mut left = Vec::new();
        self.streams.lock().retain(|_, stream| {
            let theirs = stream.owner == owner;
            if theirs {
                left.push(Arc::clone(stream));
            }
            !theirs
        });
        for stream in left {
            stream.end(StreamEnd::Abandoned);
        }
    }
}

impl StreamDevice for HostUnit {
    fn is_alive(&self) -> bool {
        self.is_alive()
    }

    fn is_hung(&self) -> bool {
        self.hung.load(Ordering::Acquire)
    }

    fn kill(&self, cause: &str) {
        self.kill(cause);
    }

    fn record(&self, slot: u32, number: u64) {
        self.events.complete(slot, number);
    }

    fn forget(&self, stream: u64) {
        // A statement of its own: the stream is dropped after the lock is released.
        let removed = self.streams.lock().remove(&stream);
        drop(removed);
    }
}

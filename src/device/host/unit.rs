//! One device: its streams with their threads, its events, and how it dies.
//!
//! All that a device has is in its [`State`], under one lock. A stream is a queue of operations and a count of those
//! that have ended, so each operation has a *position* ([`Point`]). The stream's thread runs the operation at the
//! front, which stays in the queue meanwhile, and then counts it. Recording an event queues an operation that does
//! nothing, and notes its position. The event is complete when the stream's count has reached that position. A stream
//! that waits for an event waits for another stream's count in the same way. No circle can form, since an operation
//! waits only for one that was submitted before it.
//!
//! Bytes are moved without the lock, in parts of 1 MiB at most. [`State::copying`] counts the parts under way, and
//! before each part its thread looks, under the lock, whether the device is alive. So [`Unit::kill`] notes the cause of
//! death, drops what is queued and waits until that count is 0: from then on no copy touches host memory. Each call
//! that answers that the device is dead waits for the same, because its caller may free at once what copies were using.
//! A host function is called without the lock and is not counted, so that a device can be killed while one waits.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slab::Slab;

use super::HostConfig;
use super::fault::Call;
use super::memory::{Block, Place, copy_part};
use crate::amount::amount;
use crate::error::{DeviceError, Error, ErrorClass, Result};
use crate::foreign::{self, Owned};
use crate::locks::{Condvar, Mutex, MutexGuard};

/// Bits of a device address below the device's number, which counts from 1 here.
const SPACE_BITS: u32 = 53;
/// The alignment of allocations' addresses, and the least gap between two.
const GAP: u64 = 4096;

/// A number that no stream, event or driver of any node has or had.
pub(super) fn number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

/// The device of a node that gave out an address, if one may have.
pub(super) fn owner(address: u64) -> Option<u32> {
    let owner = u32::try_from(address >> SPACE_BITS).ok()?.checked_sub(1)?;
    (owner < super::MAX_DEVICES).then_some(owner)
}

/// A function of the program's, which gets the bytes that it reads and those that it writes.
pub(crate) type HostFunction = Box<dyn FnOnce(&[&[u8]], &mut [&mut [u8]]) + Send>;

/// A host function, and the places and lengths of the bytes that it gets.
pub(super) struct Kernel {
    pub(super) reads: Vec<(Place, usize)>,
    pub(super) writes: Vec<(Place, usize)>,
    pub(super) function: Owned<HostFunction>,
}

/// How far a stream is, and who sleeps until it goes on.
#[derive(Default)]
pub(super) struct Progress {
    /// The number of operations that have ended. It changes under the device's lock, and is read without it too.
    over: AtomicU64,
    /// The stream's thread sleeps here until there is work for it.
    thread: Condvar,
    /// Threads that wait for the stream to come to a position sleep here.
    followers: Condvar,
}

/// The position of an operation in a stream.
#[derive(Clone)]
pub(super) struct Point(Arc<Progress>, u64);

impl Point {
    /// Whether the operation has ended.
    pub(super) fn is_over(&self) -> bool {
        // Acquire: pairs with the release in `Unit::run`, so that the caller sees all effects of the operation.
        self.0.over.load(Ordering::Acquire) >= self.1
    }
}

/// Bits of an event's handle that are its place in the table. The others are a number that no event has or had.
const EVENT_BITS: u32 = 24;

/// A device's events, each with its handle and the position of its last recording. They have a lock of their own, which
/// is taken last: events are asked about often, and no stream's thread waits for that.
#[derive(Default)]
pub(super) struct Events(Mutex<Slab<(u64, Option<Point>)>>);

impl Events {
    pub(super) fn create(&self) -> u64 {
        let mut all = self.0.lock();
        let entry = all.vacant_entry();
        let handle = number() << EVENT_BITS | entry.key() as u64;
        entry.insert((handle, None));
        handle
    }

    /// Where an event is in the table, if it is there.
    fn place(handle: u64) -> usize {
        (handle & ((1 << EVENT_BITS) - 1)) as usize
    }

    /// What `use_it` makes of an event's last recording. `None`: there is no such event.
    pub(super) fn with<R>(&self, handle: u64, use_it: impl FnOnce(&mut Option<Point>) -> R) -> Option<R> {
        let mut all = self.0.lock();
        let event = all.get_mut(Self::place(handle));
        event.filter(|event| event.0 == handle).map(|event| use_it(&mut event.1))
    }

    /// `false`: there is no such event.
    pub(super) fn destroy(&self, handle: u64) -> bool {
        let mut all = self.0.lock();
        let is_there = all.get(Self::place(handle)).is_some_and(|event| event.0 == handle);
        is_there && all.try_remove(Self::place(handle)).is_some()
    }

    pub(super) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

pub(super) enum Work {
    /// From, to, and bytes.
    Copy(Place, Place, usize),
    Launch(Kernel),
    /// An event, or 0.
    Record(u64),
    Wait(Point),
}

impl Work {
    /// The host memory that it uses: ranges of addresses, of which those of no bytes mean nothing.
    fn on_host(&self) -> [Range<usize>; 2] {
        let range = |place: &Place, len| match place {
            Place::Host(start) => start.addr()..start.addr().saturating_add(len),
            Place::Device(..) => 0..0,
        };
        match self {
            Self::Copy(from, to, len) => [range(from, *len), range(to, *len)],
            _ => Default::default(),
        }
    }
}

#[derive(Default)]
pub(super) struct Stream {
    /// The number of the driver that made it. `None`: that was dropped, and the stream runs nothing more.
    pub(super) owner: Option<u64>,
    progress: Arc<Progress>,
    /// `None`, at the front: the stream's thread has taken it, and runs it.
    queue: VecDeque<Option<Work>>,
    /// The host memory that the operation taken out of the queue uses, until it has ended.
    running: [Range<usize>; 2],
    /// Operations from this position on do not run until the stream is resumed.
    held: Option<u64>,
    /// It takes nothing more, runs what it has, and ends.
    destroyed: bool,
}

#[derive(Default)]
pub(super) struct State {
    /// Why the device died, if it did.
    pub(super) dead: Option<String>,
    pub(super) hung: bool,
    /// Parts of copies that are under way.
    pub(super) copying: usize,
    /// Streams in the order of creation. One that was destroyed is here until it has run out.
    pub(super) streams: BTreeMap<u64, Stream>,
    pub(super) memory: BTreeMap<u64, Arc<Block>>,
    /// Bytes of device memory allocated.
    pub(super) used: usize,
    /// Addresses given out so far, and streams made so far.
    addresses: u64,
    created: u64,
}

/// What a stream's thread does next.
enum Next {
    /// Run the operation at this position, which moves bytes or does not.
    Run {
        position: u64,
        moves: bool,
    },
    /// Sleep until there is something to do.
    Sleep,
    /// Sleep until another stream has gone on.
    Follow(Arc<Progress>),
    End,
}

impl Stream {
    /// Holds operations from this position on, or lets all go on.
    pub(super) fn hold(&mut self, held: Option<u64>) {
        self.held = held;
        self.progress.thread.notify_one();
    }
}

impl State {
    /// The streams that were not destroyed.
    pub(super) fn open(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.streams.values_mut().filter(|stream| !stream.destroyed)
    }

    pub(super) fn queued(&self) -> usize {
        self.streams.values().map(|stream| stream.queue.len()).sum()
    }

    /// Whether a copy that is queued or running uses any of this host memory.
    pub(super) fn uses(&self, range: &Range<usize>) -> bool {
        let overlaps = |used: [Range<usize>; 2]| {
            used.iter().any(|used| !used.is_empty() && used.start < range.end && range.start < used.end)
        };
        // A dead device's copy uses nothing when no part of one is under way.
        let moves = self.dead.is_none() || self.copying > 0;
        self.streams.values().any(|stream| {
            moves && overlaps(stream.running.clone())
                || stream.queue.iter().flatten().any(|work| overlaps(work.on_host()))
        })
    }

    /// Queues an operation. `None`: there is no such stream.
    pub(super) fn submit(&mut self, id: u64, work: Work, stalled: bool) -> Option<Point> {
        let stream =
            self.streams.get_mut(&id).filter(|stream| !stream.destroyed && stream.owner.is_some())?;
        let position = stream.progress.over.load(Ordering::Relaxed) + stream.queue.len() as u64 + 1;
        let point = Point(Arc::clone(&stream.progress), position);
        if stalled {
            stream.held.get_or_insert(position);
        }
        stream.queue.push_back(Some(work));
        stream.progress.thread.notify_one();
        Some(point)
    }

    /// Destroys a stream. What is queued still runs, unless the device is dead. `false`: there is no such stream.
    pub(super) fn destroy(&mut self, id: u64) -> bool {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.destroyed) else { return false };
        stream.destroyed = true;
        if stream.queue.is_empty() {
            self.remove(id);
        }
        true
    }

    fn remove(&mut self, id: u64) {
        if let Some(stream) = self.streams.remove(&id) {
            stream.progress.thread.notify_one();
            stream.progress.followers.notify_all();
        }
    }

    /// Ends the streams of a driver that is dropped, and forgets what they have queued. They stay here as leaks.
    pub(super) fn abandon(&mut self, owner: u64) {
        for stream in self.streams.values_mut().filter(|stream| stream.owner == Some(owner)) {
            stream.owner = None;
            stream.queue.clear();
        }
        self.wake();
        self.streams.retain(|_, stream| stream.owner.is_some() || !stream.destroyed);
    }

    /// Makes all streams' threads look again, and those that wait for streams.
    pub(super) fn wake(&self) {
        for stream in self.streams.values() {
            stream.progress.thread.notify_one();
            stream.progress.followers.notify_all();
        }
    }

    fn next(&self, id: u64) -> Next {
        let stream = self.streams.get(&id).filter(|_| self.dead.is_none());
        let Some(stream) = stream.filter(|stream| stream.owner.is_some()) else { return Next::End };
        let position = stream.progress.over.load(Ordering::Relaxed) + 1;
        match stream.queue.front() {
            None => Next::Sleep,
            _ if self.hung || stream.held.is_some_and(|held| held <= position) => Next::Sleep,
            Some(Some(Work::Wait(point))) if !point.is_over() => Next::Follow(Arc::clone(&point.0)),
            Some(work) => {
                Next::Run { position, moves: matches!(work, Some(Work::Copy(..) | Work::Launch(_))) }
            }
        }
    }

    fn is_freed(&self, place: &Place) -> bool {
        matches!(place, Place::Device(block, _) if !self.memory.contains_key(&block.address))
    }
}

/// One device.
pub(super) struct Unit {
    pub(super) name: Arc<str>,
    pub(super) ordinal: u32,
    pub(super) capacity: usize,
    /// The longest delay before a copy, and the seed of the delays.
    late: Option<(Duration, u64)>,
    pub(super) state: Mutex<State>,
    pub(super) events: Events,
    /// Whether the state names a cause of death. Relaxed: who reads `false` finds what has ended, and nothing else.
    pub(super) is_dead: AtomicBool,
    /// No part of a copy is under way any more.
    quiet: Condvar,
}

impl Unit {
    pub(super) fn new(name: &str, ordinal: u32, config: &HostConfig, capacity: usize) -> Arc<Self> {
        // A delay of more than a day never ends in practice, and an `Instant` has room for it.
        let late = config.late.map(|(max, seed)| (max.min(Duration::from_secs(1 << 32)), seed));
        Arc::new(Self {
            name: Arc::from(name),
            ordinal,
            capacity,
            late,
            state: Mutex::default(),
            events: Events::default(),
            is_dead: AtomicBool::new(false),
            quiet: Condvar::new(),
        })
    }

    /// This device's error.
    pub(super) fn error(&self, call: Call, class: ErrorClass, text: impl Into<Arc<str>>) -> Error {
        let code = match class {
            ErrorClass::Argument => libc::EINVAL,
            ErrorClass::Capture => libc::EPERM,
            ErrorClass::DeviceLost => libc::ENODEV,
            _ => libc::EAGAIN,
        };
        let (device, call, text) = (self.name.clone(), call.name(), text.into());
        Error::Device(DeviceError { device, call, code: i64::from(code), text, class })
    }

    /// The error of a call to a dead device. Returns when no copy touches memory any more.
    #[cold]
    pub(super) fn lost(&self, state: &mut MutexGuard<'_, State>, call: Call) -> Error {
        while state.copying > 0 {
            self.quiet.wait(state);
        }
        self.error(call, ErrorClass::DeviceLost, state.dead.clone().unwrap_or_default())
    }

    /// Waits until an operation has ended, or until the device has died.
    pub(super) fn wait(&self, state: &mut MutexGuard<'_, State>, call: Call, point: &Point) -> Result<()> {
        while state.dead.is_none() {
            if point.is_over() {
                return Ok(());
            }
            point.0.followers.wait(state);
        }
        Err(self.lost(state, call))
    }

    /// Kills the device. When this returns, no copy of it touches memory any more, and none will.
    pub(super) fn kill(&self, state: &mut MutexGuard<'_, State>, cause: &str) {
        if state.dead.is_none() {
            state.dead = Some(cause.to_owned());
            self.is_dead.store(true, Ordering::Relaxed);
            let dropped = state.queued();
            state.wake();
            state.streams.retain(|_, stream| !stream.destroyed);
            state.streams.values_mut().for_each(|stream| stream.queue.clear());
            foreign::debug!(target: "pinpool::device", device = self.name.to_string(), cause, dropped, "host device died");
        }
        while state.copying > 0 {
            self.quiet.wait(state);
        }
    }

    /// Allocates device memory, or says why not.
    pub(super) fn allocate(&self, state: &mut State, len: usize) -> Result<u64, String> {
        let left = self.capacity - state.used;
        let [wanted, left_over, all] = [len, left, self.capacity].map(amount);
        if len > left {
            return Err(format!("out of device memory: {wanted} wanted, {left_over} of {all} left"));
        }
        let offset = state.addresses + GAP;
        let end = (len as u64).checked_next_multiple_of(GAP).and_then(|len| offset.checked_add(len));
        let address = ((u64::from(self.ordinal) + 1) << SPACE_BITS) + offset;
        // Pages are mapped here, and come when they are used.
        let block = end.filter(|end| end >> SPACE_BITS == 0).and_then(|_| Block::new(address, len));
        let block = block.ok_or_else(|| format!("the system has no {wanted} for device memory"))?;
        (state.addresses, state.used) = (end.unwrap_or(offset), state.used + len);
        state.memory.insert(address, block);
        Ok(address)
    }

    /// Makes a stream and starts its thread.
    pub(super) fn create(self: &Arc<Self>, state: &mut State, owner: u64) -> Result<u64> {
        let (id, progress, unit) = (number(), Arc::<Progress>::default(), Arc::clone(self));
        state.created += 1;
        let nth = u64::from(self.ordinal) << 32 | state.created;
        let late = self.late.map(|(max, seed)| (max, seed.wrapping_add(nth)));
        let stream = Stream { owner: Some(owner), progress: Arc::clone(&progress), ..Stream::default() };
        // Detached: the thread ends by itself after its stream, and no thread waits for that.
        let spawned = crate::os::thread::spawn(format!("pinpool-host-{id}"), move || {
            unit.serve(id, &progress, late);
        });
        spawned.map_err(|error| {
            let text = format!("no thread for the stream: {error}");
            self.error(Call::CreateStream, ErrorClass::Transient, text)
        })?;
        // The thread waits for the lock, and finds the stream.
        state.streams.insert(id, stream);
        Ok(id)
    }

    /// A stream's thread.
    fn serve(&self, id: u64, progress: &Progress, mut late: Option<(Duration, u64)>) {
        let (mut state, mut delayed) = (self.state.lock(), 0);
        loop {
            match (state.next(id), &mut late) {
                (Next::Run { position, moves: true }, Some((max, seed))) if position != delayed => {
                    // After the delay the loop looks again: the device may have been hung or killed meanwhile.
                    delayed = position;
                    if max.is_zero() {
                        MutexGuard::unlocked(&mut state, std::thread::yield_now);
                        continue;
                    }
                    let until = Instant::now() + random(seed, *max);
                    while !matches!(state.next(id), Next::End) {
                        if progress.thread.wait_until(&mut state, until) {
                            break;
                        }
                    }
                }
                (Next::Run { .. }, _) => self.run(&mut state, id),
                (Next::Sleep, _) => progress.thread.wait(&mut state),
                (Next::Follow(other), _) => other.followers.wait(&mut state),
                (Next::End, _) => return,
            }
        }
    }

    /// Runs the operation at the front of a stream's queue.
    fn run(&self, state: &mut MutexGuard<'_, State>, id: u64) {
        let work = state.streams.get_mut(&id).and_then(|stream| {
            let work = stream.queue.front_mut()?.take()?;
            stream.running = work.on_host();
            Some(work)
        });
        let freed = match &work {
            Some(Work::Copy(from, to, _)) => state.is_freed(from) || state.is_freed(to),
            Some(Work::Launch(kernel)) => {
                kernel.reads.iter().chain(&kernel.writes).any(|(place, _)| state.is_freed(place))
            }
            _ => false,
        };
        match work {
            _ if freed => self.kill(state, "a queued operation was to use device memory that had been freed"),
            // SAFETY: the places were checked when this was submitted. The submitter promised (`Driver::copy`) that
            // host memory is valid and not in use until an event after this operation is complete, and no such event
            // completes before the operation has ended. A device that dies says so only when it touches no memory.
            Some(Work::Copy(from, to, len)) => unsafe { self.copy(state, &from, &to, len) },
            Some(Work::Launch(kernel)) => self.call(state, kernel),
            _ => {}
        }
        let Some(stream) = state.streams.get_mut(&id) else { return };
        stream.running = Default::default();
        // Nothing is there to take out of a stream that was abandoned, or of a device that died.
        if stream.queue.pop_front().is_some() {
            // Release: pairs with the acquire in `Point::is_over`.
            stream.progress.over.fetch_add(1, Ordering::Release);
            stream.progress.followers.notify_all();
        }
        if stream.destroyed && stream.queue.is_empty() {
            state.remove(id);
        }
    }

    /// Copies while the device lives.
    ///
    /// # Safety
    /// As for [`copy_part`], but `len` may be 0.
    unsafe fn copy(&self, state: &mut MutexGuard<'_, State>, from: &Place, to: &Place, len: usize) {
        let mut at = 0;
        while at < len && state.dead.is_none() {
            state.copying += 1;
            // SAFETY: the caller's promise, and `at < len`.
            at += MutexGuard::unlocked(state, || unsafe { copy_part(from, to, at, len) });
            state.copying -= 1;
            if state.copying == 0 {
                self.quiet.notify_all();
            }
        }
    }

    /// Calls a host function with copies of the bytes, and writes back those that it may write. So the function never
    /// shares memory with a copy of another stream.
    fn call(&self, state: &mut MutexGuard<'_, State>, kernel: Kernel) {
        let Kernel { reads, writes, function } = kernel;
        let mut fetch = |places: &[(Place, usize)]| -> Vec<Vec<u8>> {
            let fetch_one = |(place, len): &(Place, usize)| {
                let mut bytes = vec![0; *len];
                let to = Place::Host(bytes.as_mut_ptr());
                // SAFETY: the place was checked with this length; the vector has that length, and is not used yet.
                unsafe { self.copy(state, place, &to, *len) };
                bytes
            };
            places.iter().map(fetch_one).collect()
        };
        let (read, mut written) = (fetch(&reads), fetch(&writes));
        if state.dead.is_some() {
            return MutexGuard::unlocked(state, || drop((read, written)));
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
                unsafe { self.copy(state, &Place::Host(bytes.as_mut_ptr()), place, *len) };
            }
        }
        // Giving large vectors back takes time.
        MutexGuard::unlocked(state, || drop((read, written)));
    }
}

/// A random time up to `max`, and the next seed (splitmix64).
fn random(seed: &mut u64, max: Duration) -> Duration {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    max.mul_f64(((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64)
}

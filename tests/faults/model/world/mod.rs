//! The pool under test beside a plain model of it.
//!
//! The model knows nothing of thread caches, runs and timelines. It knows which addresses are handed out, what was
//! written where, and which copies were submitted; and since the devices move by hand it can find out which
//! copies have really run: a copy to the device has run when its bytes are there, a copy to the host when the memory
//! says so. From that follows all that is asserted:
//!
//! - a buffer that is handed out overlaps no other that is handed out, and no copy that has not run, unless it
//!   was claimed on that copy's own stream;
//! - what arrives in device memory is what was written before the copy was submitted, however late the copy ran;
//! - what a buffer holds is what its owner wrote or what the device sent, and nothing else;
//! - what a dead device still used is never handed out again;
//! - no waiter is woken in vain or forgotten, and equal requests are served in their order;
//! - and when everything is done, everything is back.

mod checkout;
mod checks;
mod copies;
mod devices;
mod flights;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pinpool::{
    Device, DeviceSlice, Error, InFlight, PinnedBuf, Pool, Request, Result, Shortage, Stream, StreamBuf,
    SubmitError, Unpinned,
};

use crate::model::ops::{DEVICES, End, Op, STREAMS, Setup, Size, Use, Who};
use crate::model::tally::Tally;
use crate::support::hand::{Failure, Machine};

const KIB: usize = 1 << 10;
/// What fresh device memory holds in the simulation. No byte of a pattern is like it.
const BLANK: u8 = 0xA5;
/// Regions of device memory that are kept for downloads.
const REGIONS: usize = 16;

/// The bytes that stand for a number: unlike those of any other number, at any length, and never blank.
fn pattern(id: u64, len: usize) -> Vec<u8> {
    let mut x = id.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let block: Vec<u8> = (0..61)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8 & 0x7F
        })
        .collect();
    let mut bytes = block.repeat(len.div_ceil(block.len()));
    bytes.truncate(len);
    bytes
}

/// Bytes that a segment for `len` bytes spans at least.
fn span(len: usize) -> usize {
    len.next_multiple_of(32) + 32
}

type Range = (usize, usize);

fn range(buf: &PinnedBuf) -> Range {
    (buf.as_ptr() as usize, span(buf.capacity()))
}

fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// A host-ready buffer, by itself or shared, and the bytes in it.
struct Held<B> {
    buf: B,
    bytes: Vec<u8>,
}

/// Device memory with known contents, once its upload has run.
struct Region {
    memory: DeviceSlice,
    lane: usize,
    copy: u64,
    bytes: Vec<u8>,
}

/// Where a copy's effect can be seen.
enum Seen {
    Device(DeviceSlice),
    /// The target, and what it held before.
    Host(usize, Vec<u8>),
}

/// A copy that was submitted and is not known to have run.
struct Copy {
    id: u64,
    lane: usize,
    /// The host memory that it uses.
    host: Range,
    seen: Seen,
    /// What is there when it has run.
    brings: Vec<u8>,
    /// Its device is dead: it never will run.
    dead: bool,
}

/// Work that is submitted to a stream from a certain copy on runs after these copies of another stream.
struct Behind {
    lane: usize,
    from: u64,
    after: Vec<u64>,
}

/// Addresses, and the bytes from there.
type Gone = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// A handle to something in flight.
struct Flight {
    handle: InFlight<PinnedBuf>,
    trip: Trip,
    flag: Option<Arc<Flag>>,
}

/// What is known of a buffer in flight.
struct Trip {
    lane: usize,
    /// Not known for a claimed segment.
    range: Option<Range>,
    capacity: usize,
    /// What it holds when it returns.
    bytes: Vec<u8>,
    /// Copies that must have run when this is done.
    after: Vec<u64>,
}

impl Trip {
    fn of(buf: &PinnedBuf, lane: usize, bytes: Vec<u8>) -> Self {
        Self { lane, range: Some(range(buf)), capacity: buf.capacity(), bytes, after: Vec::new() }
    }
}

/// A buffer in flight whose handle was dropped.
struct Hold {
    range: Range,
    after: Vec<u64>,
    lane: usize,
}

#[derive(Default)]
pub struct Flag(AtomicBool);

impl Flag {
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
        crate::support::panicking::panic_if_asked();
    }
}

struct Waiting {
    future: Pin<Box<dyn Future<Output = Result<Vec<PinnedBuf>>>>>,
    flag: Arc<Flag>,
    sizes: Vec<Size>,
}

impl Waiting {
    fn poll(&mut self) -> Poll<Result<Vec<PinnedBuf>>> {
        let waker = Waker::from(self.flag.clone());
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }

    fn woken(&self) -> bool {
        self.flag.is_set()
    }
}

struct Lane {
    stream: Stream,
    device: usize,
    /// Among the device's streams.
    nth: usize,
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs the jobs it is given, and idles with what it caches. It ends when the sender is
/// dropped.
fn helper(machine: &Machine) -> (mpsc::Sender<Job>, std::thread::JoinHandle<()>) {
    let (jobs, queue) = mpsc::channel::<Job>();
    let machine = machine.clone();
    let thread = std::thread::spawn(move || {
        machine.enter();
        queue.into_iter().for_each(|job| job());
    });
    (jobs, thread)
}

/// Has a job done by such a thread.
fn done_by<R: Send + 'static>(jobs: &mpsc::Sender<Job>, job: impl FnOnce() -> R + Send + 'static) -> R {
    let (tell, told) = mpsc::channel();
    jobs.send(Box::new(move || drop(tell.send(job())))).expect("the helper lives");
    told.recv().expect("the helper's job panicked")
}

pub struct World<'t> {
    tally: &'t mut Tally,
    setup: Setup,
    machine: &'t Machine,
    helper: (mpsc::Sender<Job>, std::thread::JoinHandle<()>),
    pool: Option<Pool>,
    devices: Vec<Device>,
    lanes: Vec<Lane>,
    bufs: Vec<Held<PinnedBuf>>,
    shared: Vec<Held<Arc<PinnedBuf>>>,
    flights: Vec<Flight>,
    holds: Vec<Hold>,
    copies: Vec<Copy>,
    regions: Vec<Region>,
    behind: Vec<Behind>,
    /// Regions that were unpinned since the last look, with the bytes in them.
    gone: Gone,
    waiting: Vec<Waiting>,
    /// Addresses that must never be seen again.
    graves: Vec<Range>,
    next: u64,
    /// The call that is to fail, and how.
    armed: Option<(&'static str, Failure)>,
    dead: [bool; DEVICES],
    /// Whether any fault struck or any device died: then errors need no other reason.
    trouble: bool,
    /// Whether something may be quarantined.
    may_lose: bool,
    closed: bool,
}

impl<'t> World<'t> {
    pub fn new(setup: &Setup, tally: &'t mut Tally, machine: &'t Machine) -> Self {
        machine.renew(setup.seed);
        let devices: Vec<Device> = (0..DEVICES).map(|device| machine.device(device)).collect();
        let gone = Gone::default();
        let log = gone.clone();
        let pool = Pool::builder(&devices[0])
            .before_unpin(move |region| {
                // SAFETY: mapped until this returns, and this thread is the only one.
                let bytes = unsafe { std::slice::from_raw_parts(region.base.as_ptr(), region.len) };
                log.lock().unwrap().push((region.base.as_ptr() as usize, bytes.to_vec()));
            })
            .device(&devices[1])
            .capacity(setup.capacity * KIB)
            .region(setup.region * KIB)
            .extent(setup.extent * KIB)
            .initial(setup.initial * KIB)
            .thread_cache(setup.cache * KIB)
            .unpinned(Unpinned::Allow)
            .pin_threads(1)
            .build()
            .unwrap();
        let lane = |at: usize| {
            let (device, nth) = (at / STREAMS, at % STREAMS);
            Lane { stream: devices[device].stream().unwrap(), device, nth }
        };
        let lanes = (0..DEVICES * STREAMS).map(lane).collect();
        Self {
            tally,
            setup: setup.clone(),
            machine,
            helper: helper(machine),
            pool: Some(pool),
            devices,
            lanes,
            bufs: Vec::new(),
            shared: Vec::new(),
            flights: Vec::new(),
            holds: Vec::new(),
            copies: Vec::new(),
            regions: Vec::new(),
            behind: Vec::new(),
            gone,
            waiting: Vec::new(),
            graves: Vec::new(),
            next: 0,
            armed: None,
            dead: [false; DEVICES],
            trouble: false,
            may_lose: false,
            closed: false,
        }
    }

    fn pool(&self) -> Pool {
        self.pool.clone().expect("the pool is there")
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Does something on one of the threads.
    fn on<R: Send + 'static>(&self, who: Who, job: impl FnOnce() -> R + Send + 'static) -> R {
        match who {
            Who::Main => job(),
            Who::Helper => done_by(&self.helper.0, job),
            Who::Fresh => {
                let (jobs, thread) = helper(self.machine);
                let done = done_by(&jobs, job);
                drop(jobs);
                thread.join().expect("the thread ends");
                done
            }
        }
    }

    /// Whether an error of a device needs no explanation.
    fn tolerant(&self) -> bool {
        self.trouble || self.armed.is_some()
    }

    // --- the oracle --------------------------------------------------------------------------------------------------

    /// Whether a copy has run. Anything between what was there and what it brings is a corruption.
    fn has_run(&self, at: usize) -> bool {
        let Copy { id, seen, brings, dead, .. } = &self.copies[at];
        if *dead {
            return false;
        }
        let (now, before) = match seen {
            Seen::Device(slice) => (self.machine.read(slice), vec![BLANK; slice.len()]),
            Seen::Host(address, before) => {
                // Since the last look its buffer may have returned, and its region been unpinned.
                let gone = self.gone.lock().unwrap().iter().find_map(|(base, bytes)| {
                    bytes.get(address.checked_sub(*base)?..)?.get(..before.len()).map(<[u8]>::to_vec)
                });
                if let Some(then) = gone {
                    assert!(then == *brings, "a region has gone under copy {id}");
                    return true;
                }
                // SAFETY: the copy is in flight, so its target is mapped; it was filled before it was submitted, and
                // the device moves on this thread only, so no copy writes there now.
                let now = unsafe { std::slice::from_raw_parts(*address as *const u8, before.len()) };
                (now.to_vec(), before.clone())
            }
        };
        assert!(now == before || now == *brings, "copy {id} brought bytes that were never sent");
        now == *brings
    }

    /// Takes out the copies that have run. Their bytes were verified by that.
    fn sweep(&mut self) {
        // A fault that kills may have struck in the middle of an operation.
        if self.armed.is_some_and(|(_, failure)| failure == Failure::DeviceLost) {
            self.bury_lost();
        }
        let mut at = 0;
        while at < self.copies.len() {
            if !self.has_run(at) {
                at += 1;
                continue;
            }
            let Copy { id, lane, host, .. } = self.copies.remove(at);
            let mut earlier = self.copies.iter().filter(|copy| copy.id < id && !copy.dead);
            if earlier.clone().any(|copy| copy.lane != lane) {
                self.tally.note("streams overtook each other");
            }
            let behind = earlier.find(|copy| copy.lane == lane).map(|copy| (copy.id, copy.host));
            assert_eq!(behind, None, "copy {id} of {host:x?} ran before an earlier one of its stream");
            let waits = self.behind.iter().filter(|b| b.lane == lane && b.from <= id && !b.after.is_empty());
            for Behind { after, .. } in waits {
                self.tally.note("copy ran after another stream's");
                let early = self.copies.iter().find(|copy| after.contains(&copy.id) && !copy.dead);
                assert_eq!(early.map(|copy| copy.id), None, "copy {id} was to run after it");
            }
        }
        self.gone.lock().unwrap().clear();
    }

    fn have_run(&self, ids: &[u64]) -> bool {
        !self.copies.iter().any(|c| ids.contains(&c.id))
    }

    /// Copies on this lane that have not run.
    fn outstanding(&self, lane: usize) -> Vec<u64> {
        self.copies.iter().filter(|c| c.lane == lane).map(|c| c.id).collect()
    }

    fn owned(&self) -> Vec<Range> {
        let bufs = self.bufs.iter().map(|live| range(&live.buf));
        let shared = self.shared.iter().map(|shared| range(&shared.buf));
        let flights = self.flights.iter().filter_map(|flight| flight.trip.range);
        bufs.chain(shared).chain(flights).collect()
    }

    /// No buffer has this memory, and no device will ever touch it.
    fn assert_free(&mut self, range: Range) {
        self.sweep();
        let out = self.owned().into_iter().find(|other| overlap(range, *other));
        assert_eq!(out, None, "{range:x?} was handed out while this was handed out already");
        let grave = self.graves.iter().find(|grave| overlap(range, **grave));
        assert_eq!(grave, None, "{range:x?} was handed out though this was lost with its device");
        let copy = self.copies.iter().find(|copy| overlap(range, copy.host));
        let copy = copy.map(|copy| (copy.id, copy.host, copy.dead));
        assert_eq!(copy, None, "{range:x?} was handed out before a copy has run, or after it was lost");
        for hold in self.holds.iter().filter(|h| overlap(range, h.range)) {
            assert!(self.have_run(&hold.after), "{range:x?} was handed out before its hold was over");
        }
        self.holds.retain(|h| !overlap(range, h.range));
    }

    /// Bytes asked for by all buffers that are out.
    fn requested(&self) -> usize {
        let bufs = self.bufs.iter().map(|live| live.buf.capacity());
        let shared = self.shared.iter().map(|shared| shared.buf.capacity());
        bufs.chain(shared).chain(self.flights.iter().map(|flight| flight.trip.capacity)).sum()
    }

    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Checkout(size, waits, who) => self.checkout(*size, *waits, *who),
            Op::Many(sizes, waits) => self.many(sizes, *waits),
            Op::Join(sizes) => self.join(sizes),
            Op::Queue(size, count) => {
                self.take_all(*size, |_, _| {});
                (0..*count).for_each(|_| self.join(&[*size]));
            }
            Op::PollWaiting => self.poll_waiting(),
            Op::Cancel(at) => self.cancel(*at),
            Op::Drop(at, who) => {
                if let Some(live) = self.take_buf(*at) {
                    self.on(*who, move || drop(live));
                }
            }
            Op::Upload(at, lane, keep) => self.upload(*at, *lane, *keep),
            Op::Download(at, lane, region, keep) => self.download(*at, *lane, *region, *keep),
            Op::Share(at, lane, other) => self.share(*at, *lane, *other),
            Op::DropShared(at) => self.drop_shared(*at),
            Op::Hold(at, lane, keep) => self.hold(*at, *lane, *keep),
            Op::Claim(lane, size, usage) => self.claim(*lane, *size, *usage),
            Op::Crowd(lane, size, usages) => self.crowd(*lane, *size, usages),
            Op::Wait(at) => self.wait(*at),
            Op::IsDone(at) => self.is_done(*at),
            Op::Await(at) => self.poll_flight(*at),
            Op::DropFlight(at) => {
                if let Some(flight) = self.take_flight(*at) {
                    self.dropped(&flight.trip);
                }
            }
            Op::Step(device, nth, times) => {
                (0..*times).for_each(|_| _ = self.machine.step_runnable(*device, *nth));
            }
            Op::Reap(device) => _ = self.devices[*device].reap(),
            Op::Drain => self.drain(),
            Op::Trim(keep) => self.trim(keep * KIB),
            Op::Hang(at) => {
                let lane = &self.lanes[self.lane(*at)];
                assert!(self.machine.hold(lane.device, lane.nth));
            }
            Op::Resume(at) => {
                let lane = &self.lanes[self.lane(*at)];
                self.machine.resume(lane.device, Some(lane.nth));
            }
            Op::Sync(at) => self.synchronize(self.lane(*at)),
            Op::WaitFor(waiter, other) => self.wait_for(self.lane(*waiter), self.lane(*other)),
            Op::Kill(device) => self.kill(*device),
            Op::Fault(call, nth, failure, ops) => self.fault(call, *nth, *failure, ops),
        }
    }
}

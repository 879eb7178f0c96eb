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
mod hands;

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::BufMut;
use pinpool::telemetry::ClassStats;
use pinpool::{
    Device, DeviceSlice, Error, InFlight, PinnedBuf, Pool, Request, Result, Shortage, Stream, StreamBuf,
    SubmitError, Unpinned,
};

use crate::ops::{DEVICES, End, Keep, Op, Patience, Setup, Size, Use, Who};
use crate::support::hand::{Failure, Machine};
use crate::tally::Tally;

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
    /// What may be there when it has run.
    allowed: Vec<Vec<u8>>,
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

enum Handle {
    Own(InFlight<PinnedBuf>),
    Shared(InFlight<Arc<PinnedBuf>>),
    Nothing(InFlight<()>),
}

/// A handle to something in flight.
struct Flight {
    handle: Handle,
    trip: Trip,
    flag: Option<Arc<Flag>>,
}

/// What is known of a buffer in flight.
struct Trip {
    lane: usize,
    /// Not known for a claimed segment.
    range: Option<Range>,
    capacity: usize,
    /// What it may hold when it returns.
    allowed: Vec<Vec<u8>>,
    /// Copies that must have run when this is done.
    after: Vec<u64>,
}

impl Trip {
    fn of(buf: &PinnedBuf, lane: usize, allowed: Vec<Vec<u8>>) -> Self {
        Self { lane, range: Some(range(buf)), capacity: buf.capacity(), allowed, after: Vec::new() }
    }
}

/// A buffer in flight whose handle was dropped.
struct Hold {
    range: Range,
    after: Vec<u64>,
    lane: usize,
}

#[derive(Default)]
struct Flag(AtomicBool);

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
        self.flag.0.load(Ordering::SeqCst)
    }
}

struct Lane {
    stream: Stream,
    device: usize,
    /// Among the device's streams.
    nth: usize,
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs the jobs it is given, and idles with what it caches.
struct Helper(Option<(mpsc::Sender<Job>, std::thread::JoinHandle<()>)>);

impl Helper {
    fn new(machine: &Machine) -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let machine = machine.clone();
        let thread = std::thread::spawn(move || {
            machine.enter();
            queue.into_iter().for_each(|job| job());
        });
        Self(Some((jobs, thread)))
    }

    fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (tell, told) = mpsc::channel();
        let job: Job = Box::new(move || drop(tell.send(job())));
        let sent = self.0.as_ref().map(|(jobs, _)| jobs.send(job));
        assert!(matches!(sent, Some(Ok(()))), "the helper lives");
        told.recv().expect("the helper's job panicked")
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if let Some((jobs, thread)) = self.0.take() {
            drop(jobs);
            let _ = thread.join();
        }
    }
}

/// The devices that cases run on, one after another.
pub fn machine() -> Machine {
    Machine::new(DEVICES, 256 << 20, 0)
}

pub struct World<'t> {
    tally: &'t mut Tally,
    setup: Setup,
    machine: &'t Machine,
    helper: Helper,
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
    /// Device memory that outlives its device.
    ruins: [Option<DeviceSlice>; DEVICES],
    waiting: Vec<Waiting>,
    /// Addresses that must never be seen again.
    graves: Vec<Range>,
    /// Lengths of buffers whose handles were dropped in flight, and which may not be back yet.
    detached: Vec<usize>,
    /// Leaked buffers: range and length.
    forgotten: Vec<(Range, usize)>,
    next: u64,
    /// The call that is to fail, and how.
    armed: Option<(&'static str, Failure)>,
    dead: [bool; DEVICES],
    /// Whether any fault struck or any device died: then errors need no other reason.
    trouble: bool,
    /// Whether something may be quarantined.
    may_lose: bool,
    closed: bool,
    seen: pinpool::PoolStats,
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
        let mut lanes = Vec::new();
        for (device, &count) in setup.lanes.iter().enumerate() {
            for nth in 0..count {
                lanes.push(Lane { stream: devices[device].stream().unwrap(), device, nth });
            }
        }
        let seen = pool.stats();
        Self {
            tally,
            setup: setup.clone(),
            machine,
            helper: Helper::new(machine),
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
            ruins: Default::default(),
            waiting: Vec::new(),
            graves: Vec::new(),
            detached: Vec::new(),
            forgotten: Vec::new(),
            next: 0,
            armed: None,
            dead: [false; DEVICES],
            trouble: false,
            may_lose: false,
            closed: false,
            seen,
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
            Who::Helper => self.helper.run(job),
            Who::Fresh => Helper::new(self.machine).run(job),
        }
    }

    /// Whether an error of a device needs no explanation.
    fn tolerant(&self) -> bool {
        self.trouble || self.armed.is_some()
    }

    // --- the oracle --------------------------------------------------------------------------------------------------

    /// Whether a copy has run. Anything between what was there and what it brings is a corruption.
    fn has_run(&self, at: usize) -> bool {
        let Copy { id, seen, allowed, dead, .. } = &self.copies[at];
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
                    assert!(allowed.contains(&then), "a region has gone under copy {id}");
                    return true;
                }
                // SAFETY: the copy is in flight, so its target is mapped; it was filled before it was submitted, and
                // the device moves on this thread only, so no copy writes there now.
                let now = unsafe { std::slice::from_raw_parts(*address as *const u8, before.len()) };
                (now.to_vec(), before.clone())
            }
        };
        if allowed.contains(&now) {
            return true;
        }
        assert!(now == before, "copy {id} brought bytes that were never sent");
        false
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
            self.tally.note("copy arrived and was verified");
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
        let own = self.flights.iter().filter(|f| matches!(f.handle, Handle::Own(_)));
        let flights = own.filter_map(|f| f.trip.range);
        bufs.chain(shared).chain(flights).chain(self.forgotten.iter().map(|f| f.0)).collect()
    }

    /// No buffer has this memory, and no device will ever touch it.
    fn assert_free(&mut self, range: Range) {
        self.sweep();
        for other in self.owned() {
            assert!(
                !overlap(range, other),
                "{range:x?} was handed out while {other:x?} was handed out already"
            );
        }
        for grave in &self.graves {
            assert!(
                !overlap(range, *grave),
                "{range:x?} was handed out though {grave:x?} was lost with its device"
            );
        }
        for copy in &self.copies {
            assert!(
                !overlap(range, copy.host),
                "{range:x?} was handed out before copy {} of {:x?} has run (dead: {})",
                copy.id,
                copy.host,
                copy.dead
            );
        }
        let held = self.holds.iter().filter(|h| overlap(range, h.range));
        for hold in held {
            assert!(self.have_run(&hold.after), "{range:x?} was handed out before its hold was over");
        }
        self.holds.retain(|h| !overlap(range, h.range));
    }

    /// Bytes asked for by all buffers that are out.
    fn requested(&self) -> usize {
        let bufs: usize = self.bufs.iter().map(|b| b.buf.capacity()).sum();
        let own = |f: &&Flight| matches!(f.handle, Handle::Own(_));
        let flights: usize = self.flights.iter().filter(own).map(|f| f.trip.capacity).sum();
        let forgotten: usize = self.forgotten.iter().map(|f| f.1).sum();
        // A shared buffer counts once, however many handles it has.
        let arcs = self.shared.iter().map(|s| (range(&s.buf).0, s.buf.capacity()));
        let in_flight = self.flights.iter().filter(|f| matches!(f.handle, Handle::Shared(_)));
        let shared: BTreeSet<_> =
            arcs.chain(in_flight.filter_map(|f| f.trip.range.map(|r| (r.0, f.trip.capacity)))).collect();
        bufs + flights + forgotten + shared.iter().map(|s| s.1).sum::<usize>()
    }

    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Checkout(size, patience, who) => self.checkout(*size, *patience, *who),
            Op::Many(sizes, patience) => self.many(sizes, *patience),
            Op::Join(sizes) => self.join(sizes),
            Op::PollWaiting => self.poll_waiting(),
            Op::Cancel(at) => self.cancel(*at),
            Op::Write(at, kind) => self.write(*at, *kind),
            Op::Drop(at, who) => self.drop_buf(*at, *who),
            Op::ForgetBuf(at) => self.forget_buf(*at),
            Op::Upload(at, lane, part, keep, orphan) => self.upload(*at, *lane, *part, *keep, *orphan),
            Op::Download(at, lane, region, keep) => self.download(*at, *lane, *region, *keep),
            Op::Share(at, lane, other, keep) => self.share(*at, *lane, *other, *keep),
            Op::DropShared(at) => self.drop_shared(*at),
            Op::Hold(at, lane, keep) => self.hold(*at, *lane, *keep),
            Op::Claim(lane, size, usage) => self.claim(*lane, *size, *usage),
            Op::Crowd(lane, size, usages) => self.crowd(*lane, *size, usages),
            Op::OnDevice(lane, region) => self.on_device(*lane, *region),
            Op::Wait(at) => self.wait(*at),
            Op::IsDone(at) => self.is_done(*at),
            Op::Await(at) => self.poll_flight(*at),
            Op::DropFlight(at) => {
                if let Some(flight) = self.take_flight(*at) {
                    self.let_go(flight);
                }
            }
            Op::Step(device, nth, times) => {
                for _ in 0..*times {
                    if self.machine.step_runnable(*device, *nth) {
                        self.tally.note("stream stepped");
                    }
                }
            }
            Op::StepAny(times) => {
                for _ in 0..*times {
                    self.machine.step();
                }
            }
            Op::Reap(device) => {
                self.devices[*device].reap();
            }
            Op::Drain => self.drain(),
            Op::Trim(keep) => {
                self.sweep();
                let before = self.pool().stats();
                let gone = self.pool().trim(keep * KIB);
                let after = self.pool().stats();
                let held = |s: pinpool::PoolStats| s.pinned_bytes + s.unpinned_bytes;
                assert_eq!(held(before) - held(after), gone);
                if gone > 0 {
                    self.tally.note("trim");
                }
            }
            Op::Hang(at) => {
                let lane = &self.lanes[self.lane(*at)];
                assert!(self.machine.hold(lane.device, lane.nth));
                self.tally.note("stream hung");
            }
            Op::Resume(at) => {
                let lane = &self.lanes[self.lane(*at)];
                self.machine.resume(lane.device, Some(lane.nth));
                self.tally.note("stream resumed");
            }
            Op::Sync(at) => {
                let lane = self.lane(*at);
                self.sweep();
                let after = self.outstanding(lane);
                match self.lanes[lane].stream.clone().synchronize() {
                    Ok(()) => {
                        self.sweep();
                        assert!(self.have_run(&after), "synchronized before everything has run");
                        self.tally.note("synchronized");
                    }
                    Err(Error::Timeout(_)) => {}
                    Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
                }
            }
            Op::WaitFor(waiter, other) => self.wait_for(self.lane(*waiter), self.lane(*other)),
            Op::Blocking(at) => self.blocking(*at),
            Op::NewStream(device) => match self.devices[*device].stream() {
                Ok(stream) => drop(stream),
                Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
            },
            Op::DropRegion(at) => {
                if !self.regions.is_empty() {
                    self.regions.swap_remove(at % self.regions.len());
                }
            }
            Op::Kill(device) => self.kill(*device),
            Op::Fault(call, nth, failure, ops) => self.fault(call, *nth, *failure, ops),
        }
    }

    fn blocking(&mut self, at: usize) {
        let lane = self.lane(at);
        let (stream, device) = (self.lanes[lane].stream.clone(), self.lanes[lane].device);
        if self.dead[device] {
            return;
        }
        let Ok(memory) = self.devices[device].alloc(4096) else { return assert!(self.tolerant()) };
        let id = self.id();
        let (sent, mut back) = (pattern(id, 4096), vec![0; 4096]);
        let result = stream
            .upload_blocking(&sent, &memory)
            .and_then(|()| stream.download_blocking(&memory, &mut back));
        match result {
            Ok(()) => {
                assert!(sent == back, "a blocking copy brought wrong bytes");
                self.tally.note("blocking copy");
            }
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }
}

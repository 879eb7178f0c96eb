//! The pool under test beside a plain model of it.
//!
//! The model knows nothing of shards, runs and timelines. It knows which addresses are in whose hands, what was written
//! where, and which copies were submitted; and since the device is stepped it can find out which copies have really
//! run: a copy to the device has run when its bytes are there (looked at over a stream of its own, which moves nothing
//! else), a copy to the host when the memory says so. From that follows all that is asserted:
//!
//! - a buffer that is handed out overlaps nothing that is in anybody's hands, and no copy that has not run, unless it
//!   was claimed on that copy's own stream;
//! - what arrives in device memory is what was written before the copy was submitted, however late the copy ran;
//! - what a buffer holds is what its owner wrote or what the device sent, and nothing else;
//! - what a dead device had not let go of is never handed out again;
//! - nobody is woken in vain or not at all, and equal requests are served in their order;
//! - and when everything is done, everything is back.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::BufMut;
use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::telemetry::ClassStats;
use pinpool::{
    Checkout, CheckoutMany, Device, DeviceBuffer, DeviceSlice, Error, HostBuf, InFlight, PinnedBuf, Pool,
    Request, Result, Stream, StreamBuf, SubmitError, Token, Unpinned,
};

use crate::ops::{DEVICES, End, Keep, Misuse, Op, Patience, Setup, Size, Use, Who};
use crate::tally::Tally;

const KIB: usize = 1 << 10;
const RESERVE: &str = "urgent";
/// What fresh device memory is made to hold. No byte of a pattern is like it.
const BLANK: u8 = 0;
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
            (x >> 32) as u8 | 0x80
        })
        .collect();
    let mut bytes = block.repeat(len.div_ceil(block.len()));
    bytes.truncate(len);
    bytes
}

/// Bytes that a segment for so many spans at least.
fn span(len: usize) -> usize {
    len.next_multiple_of(32) + 32
}

type Range = (usize, usize);

fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// A host-ready buffer, filled with the pattern of its number.
struct Live {
    buf: PinnedBuf,
    bytes: Vec<u8>,
}

impl Live {
    fn range(&self) -> Range {
        (self.buf.as_ptr() as usize, span(self.buf.capacity()))
    }
}

struct Shared {
    buf: Arc<PinnedBuf>,
    bytes: Vec<u8>,
}

/// Device memory with known contents, once its upload has run.
struct Region {
    memory: DeviceBuffer,
    device: usize,
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
    device: usize,
    lane: usize,
    /// The host memory that it uses.
    host: Range,
    seen: Seen,
    /// What may be there when it has run.
    allowed: Vec<Vec<u8>>,
    /// Its device is dead: it never will.
    dead: bool,
}

/// What is submitted to a stream from a certain copy on runs after these copies of another.
struct Behind {
    lane: usize,
    from: u64,
    after: Vec<u64>,
}

/// Addresses, and the bytes from there.
type Gone = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// What the buffer will hold when it comes back.
#[derive(Clone)]
enum Expect {
    Same(Vec<u8>),
    OneOf(Vec<Vec<u8>>),
}

enum Handle {
    Own(InFlight<PinnedBuf>),
    Shared(InFlight<Arc<PinnedBuf>>),
    Nothing(InFlight<()>),
}

/// A handle to something in flight.
struct Flight {
    handle: Handle,
    /// Not known for a claimed segment.
    range: Option<Range>,
    capacity: usize,
    expect: Expect,
    /// Copies that must have run when this is done.
    after: Vec<u64>,
    flag: Option<Arc<Flag>>,
}

/// A hold whose handle was dropped.
struct Hold {
    range: Range,
    after: Vec<u64>,
    lanes: Vec<usize>,
}

#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

enum Pending {
    One(Checkout),
    Many(CheckoutMany),
}

struct Waiting {
    future: Pending,
    flag: Arc<Flag>,
    sizes: Vec<Size>,
}

impl Waiting {
    fn poll(&mut self) -> Poll<Result<Vec<PinnedBuf>>> {
        let waker = Waker::from(self.flag.clone());
        let mut cx = Context::from_waker(&waker);
        match &mut self.future {
            Pending::One(f) => Pin::new(f).poll(&mut cx).map_ok(|buf| vec![buf]),
            Pending::Many(f) => Pin::new(f).poll(&mut cx),
        }
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

/// A thread that does what it is told, and idles with what it caches.
struct Helper {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Helper {
    fn new() -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread = std::thread::spawn(move || queue.into_iter().for_each(|job| job()));
        Self { jobs: Some(jobs), thread: Some(thread) }
    }

    fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (tell, told) = mpsc::channel();
        let job: Job = Box::new(move || drop(tell.send(job())));
        self.jobs.as_ref().expect("not ended").send(job).expect("the helper lives");
        told.recv().expect("the helper's job panicked")
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub struct World<'t> {
    tally: &'t mut Tally,
    setup: Setup,
    node: HostNode,
    helper: Helper,
    pool: Option<Pool>,
    /// A pool that serves the first device only, for what is foreign.
    other: Option<Pool>,
    devices: Vec<Device>,
    probes: Vec<Stream>,
    lanes: Vec<Lane>,
    bufs: Vec<Live>,
    shared: Vec<Shared>,
    flights: Vec<Flight>,
    holds: Vec<Hold>,
    copies: Vec<Copy>,
    regions: Vec<Region>,
    behind: Vec<Behind>,
    /// Regions that have gone since the last look, with what was in them.
    gone: Gone,
    /// Device memory that outlives its device.
    ruins: [Option<DeviceBuffer>; DEVICES],
    tokens: Vec<(Token, Range, usize, Vec<u8>)>,
    stale: Vec<Token>,
    waiting: Vec<Waiting>,
    /// Addresses that must never be seen again.
    graves: Vec<Range>,
    /// Lengths of what was given up while in flight and may not be back yet.
    detached: Vec<usize>,
    /// Forgotten buffers: range and length.
    forgotten: Vec<(Range, usize)>,
    next: u64,
    armed: Option<Fault>,
    dead: [bool; DEVICES],
    /// Whether any fault struck or any device died: then errors need no other reason.
    trouble: bool,
    /// Whether something may be quarantined.
    may_lose: bool,
    closed: bool,
    seen: pinpool::PoolStats,
}

impl<'t> World<'t> {
    pub fn new(setup: &Setup, tally: &'t mut Tally) -> Self {
        let config = HostConfig::new().devices(DEVICES as u32).memory(256 << 20).stepped(setup.seed);
        let node = HostNode::new(config).unwrap();
        let devices: Vec<Device> = (0..DEVICES).map(|d| Device::on(&node, d as u32).unwrap()).collect();
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
            .reserve(RESERVE, setup.reserve * KIB)
            .unpinned(Unpinned::Allow)
            .pin_threads(1)
            .build()
            .unwrap();
        let other = Pool::builder(&devices[0]).capacity(64 * KIB).unpinned(Unpinned::Allow).build().unwrap();
        let mut lanes = Vec::new();
        for (device, &count) in setup.lanes.iter().enumerate() {
            for nth in 0..count {
                lanes.push(Lane { stream: devices[device].stream().unwrap(), device, nth });
            }
        }
        let probes = devices.iter().map(|d| d.stream().unwrap()).collect();
        let seen = pool.stats();
        Self {
            tally,
            setup: setup.clone(),
            node,
            helper: Helper::new(),
            pool: Some(pool),
            other: Some(other),
            devices,
            probes,
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
            tokens: Vec::new(),
            stale: Vec::new(),
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

    /// Whether an error of a device needs no explanation.
    fn tolerant(&self) -> bool {
        self.trouble || self.armed.is_some()
    }

    // --- the oracle --------------------------------------------------------------------------------------------------

    /// Does something without the armed fault in the way.
    fn calmly<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        let left = self.node.clear_faults();
        let result = f(self);
        if let (Some(fault), true) = (self.armed, left > 0) {
            self.node.fail(fault);
        }
        result
    }

    /// Whether the armed fault has struck.
    fn struck(&mut self) -> bool {
        let left = self.node.clear_faults();
        if let (Some(fault), true) = (self.armed, left > 0) {
            self.node.fail(fault);
        }
        self.armed.is_some() && left == 0
    }

    /// What device memory holds now, without moving any stream of the case.
    fn peek(&mut self, device: usize, slice: &DeviceSlice) -> Vec<u8> {
        let mut bytes = vec![0; slice.len()];
        let probe = self.probes[device].clone();
        self.calmly(|_| probe.download_blocking(slice, &mut bytes)).expect("the device is alive");
        bytes
    }

    /// Whether a copy has run. Anything between what was there and what it brings is a corruption.
    fn has_run(&mut self, at: usize) -> bool {
        let copy = &self.copies[at];
        if copy.dead {
            return false;
        }
        let (id, allowed) = (copy.id, copy.allowed.clone());
        let (now, before) = match &copy.seen {
            Seen::Device(slice) => {
                let (device, slice) = (copy.device, slice.clone());
                let len = slice.len();
                (self.peek(device, &slice), vec![BLANK; len])
            }
            Seen::Host(address, before) => {
                // Since the last look its buffer may have come back, and its region gone.
                let gone = self.gone.lock().unwrap().iter().find_map(|(base, bytes)| {
                    bytes.get(address.checked_sub(*base)?..)?.get(..before.len()).map(<[u8]>::to_vec)
                });
                if let Some(then) = gone {
                    assert!(allowed.contains(&then), "a region has gone under copy {id}");
                    return true;
                }
                // SAFETY: the copy is in flight, so its target is mapped; it was filled before it was submitted, and
                // the stepped device runs on this thread only, so nobody writes there now.
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
        if let Some(Fault { device, failure: Failure::Sticky, .. }) = self.armed {
            if self.devices[device as usize].lost().is_some() {
                self.buried(device as usize);
            }
        }
        let mut at = 0;
        while at < self.copies.len() {
            if self.has_run(at) {
                let gone = self.copies.remove(at);
                self.tally.note("copy arrived and was verified");
                let overtaken = self.copies.iter().any(|c| c.id < gone.id && c.lane != gone.lane && !c.dead);
                if overtaken {
                    self.tally.note("streams overtook each other");
                }
                let behind = self.copies.iter().find(|c| c.id < gone.id && c.lane == gone.lane && !c.dead);
                let behind = behind.map(|c| (c.id, c.host, matches!(c.seen, Seen::Host(..))));
                assert!(
                    behind.is_none(),
                    "copy {} of {:x?} ran before an earlier one of its stream: {behind:x?}",
                    gone.id,
                    gone.host
                );
                for Behind { lane, from, after } in &self.behind {
                    if *lane == gone.lane && *from <= gone.id && !after.is_empty() {
                        self.tally.note("copy ran after another stream's");
                        let early =
                            self.copies.iter().find(|c| after.contains(&c.id) && !c.dead).map(|c| c.id);
                        assert_eq!(
                            early, None,
                            "copy {} ran though its stream was to wait for that",
                            gone.id
                        );
                    }
                }
            } else {
                at += 1;
            }
        }
        self.gone.lock().unwrap().clear();
    }

    fn have_run(&self, ids: &[u64]) -> bool {
        !self.copies.iter().any(|c| ids.contains(&c.id))
    }

    /// Copies on these lanes that have not run.
    fn outstanding(&self, lanes: &[usize]) -> Vec<u64> {
        self.copies.iter().filter(|c| lanes.contains(&c.lane)).map(|c| c.id).collect()
    }

    fn owned(&self) -> Vec<Range> {
        let bufs = self.bufs.iter().map(Live::range);
        let shared = self.shared.iter().map(|s| (s.buf.as_ptr() as usize, span(s.buf.capacity())));
        let flights =
            self.flights.iter().filter(|f| matches!(f.handle, Handle::Own(_))).filter_map(|f| f.range);
        let tokens = self.tokens.iter().map(|t| t.1);
        bufs.chain(shared).chain(flights).chain(tokens).chain(self.forgotten.iter().map(|f| f.0)).collect()
    }

    /// Nobody has this memory, and no device will ever touch it.
    fn assert_free(&mut self, range: Range) {
        self.sweep();
        for other in self.owned() {
            assert!(
                !overlap(range, other),
                "{range:x?} was handed out while {other:x?} is in somebody's hands"
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

    // --- checking out ------------------------------------------------------------------------------------------------

    fn request(size: Size) -> Request<'static> {
        let request = Request::new(size.len).align(size.align);
        if size.reserve { request.reserve(RESERVE) } else { request }
    }

    fn largest(&self, size: Size) -> usize {
        let all = self.setup.capacity - self.setup.reserve;
        let capacity = if size.reserve { self.setup.reserve } else { all };
        self.setup.extent.min(capacity) * KIB - 32
    }

    fn is_bad(&self, size: Size) -> bool {
        size.len == 0
            || !size.align.is_power_of_two()
            || size.align > 2 << 20
            || size.len > self.largest(Size { reserve: false, ..size }).max(self.largest(size))
    }

    /// A new buffer: looks at it from all sides, and fills it.
    fn admit(&mut self, buf: PinnedBuf, size: Size) {
        assert_eq!((buf.capacity(), buf.len()), (size.len, 0), "another buffer than was asked for");
        let address = buf.as_ptr() as usize;
        assert_eq!(address % size.align.max(64), 0, "misaligned");
        self.assert_free((address, span(size.len)));
        let id = self.id();
        let bytes = pattern(id, size.len);
        let mut buf = buf;
        buf.extend_from_slice(&bytes);
        self.bufs.push(Live { buf, bytes });
    }

    /// A refusal must have its reason.
    fn refused(&mut self, sizes: &[Size], error: &Error) {
        match error {
            Error::ZeroLength => assert!(sizes.iter().any(|s| s.len == 0)),
            Error::BadAlignment { .. } => {
                assert!(sizes.iter().any(|s| !s.align.is_power_of_two() || s.align > 2 << 20));
            }
            Error::TooLong { .. } => assert!(sizes.iter().any(|s| s.len > self.largest(*s))),
            Error::Config(_) => assert!(sizes.iter().any(|s| s.reserve != sizes[0].reserve)),
            Error::Exhausted { .. } => self.tally.note("checkout refused: exhausted"),
            Error::Timeout(_) => {}
            Error::Impossible { .. } => {
                // No region of the pool need be longer than this.
                let piece = self.setup.region.min(self.setup.extent) * KIB;
                let long = sizes.iter().any(|s| span(s.len) > piece);
                let aligned = sizes.iter().any(|s| s.align > 4096);
                let reason = self.trouble || sizes.len() > 1 || long || aligned;
                assert!(reason, "impossible without a reason: {error}");
                self.tally.note("checkout refused: impossible");
            }
            Error::Closed => assert!(self.closed),
            Error::Device(_) => {
                assert!(self.tolerant(), "no fault, and yet: {error}");
                self.tally.note("growing failed");
            }
            _ => panic!("unexpected: {error}"),
        }
        if sizes.iter().any(|s| self.is_bad(*s)) {
            self.tally.note("checkout refused: bad request");
        }
    }

    fn checkout(&mut self, size: Size, patience: Patience, who: Who) {
        let pool = self.pool();
        let full = pool.stats().free_bytes;
        let job = move || {
            let request = Self::request(size);
            match patience {
                Patience::Try => pool.try_checkout(request),
                Patience::Forever => pool.checkout(request),
                Patience::Timeout => pool.checkout_timeout(request, Duration::from_secs(3600)),
            }
        };
        let result = match who {
            Who::Main => job(),
            Who::Helper => self.helper.run(job),
            Who::Fresh => std::thread::spawn(job).join().unwrap(),
        };
        match result {
            Ok(buf) => {
                assert!(!self.is_bad(size), "a bad request was served: {size:?}");
                self.tally.note("checkout");
                if who != Who::Main {
                    self.tally.note("checkout on another thread");
                }
                if size.reserve && full <= self.setup.reserve * KIB {
                    self.tally.note("checkout from the reserve while the pool is full");
                }
                self.admit(buf, size);
            }
            Err(error) => self.refused(&[size], &error),
        }
    }

    fn many(&mut self, sizes: &[Size], patience: Patience) {
        let requests: Vec<_> = sizes.iter().map(|s| Self::request(*s)).collect();
        let timeout = match patience {
            Patience::Try => Some(Duration::ZERO),
            Patience::Forever => None,
            Patience::Timeout => Some(Duration::from_secs(3600)),
        };
        match self.pool().checkout_many(&requests, timeout) {
            Ok(bufs) => {
                assert_eq!(bufs.len(), sizes.len());
                self.tally.note("checkout of several");
                for (buf, size) in bufs.into_iter().zip(sizes) {
                    self.admit(buf, *size);
                }
            }
            Err(error) => {
                self.tally.note("checkout of several refused");
                self.refused(sizes, &error);
            }
        }
    }

    fn or_unpinned(&mut self, size: Size) {
        if size.len > 64 << 20 {
            return; // Plain memory could be had.
        }
        match self.pool().checkout_or_unpinned(Self::request(size)) {
            Ok(HostBuf::Pinned(buf)) => self.admit(buf, size),
            Ok(HostBuf::Unpinned(buf)) => {
                assert_eq!((buf.capacity(), buf.len()), (size.len, 0));
                self.tally.note("fallback to plain memory");
            }
            Err(error) => self.refused(&[size], &error),
        }
    }

    // --- waiting -----------------------------------------------------------------------------------------------------

    fn join(&mut self, sizes: &[Size]) {
        if self.waiting.len() >= 8 {
            return;
        }
        let requests: Vec<_> = sizes.iter().map(|s| Self::request(*s)).collect();
        let future = match &requests[..] {
            [request] => Pending::One(self.pool().checkout_async(*request)),
            _ => Pending::Many(self.pool().checkout_many_async(&requests)),
        };
        let mut waiting = Waiting { future, flag: Arc::default(), sizes: sizes.to_vec() };
        match waiting.poll() {
            Poll::Pending => self.waiting.push(waiting),
            Poll::Ready(result) => {
                self.tally.note("future ready at once");
                self.served(sizes, result);
            }
        }
    }

    fn served(&mut self, sizes: &[Size], result: Result<Vec<PinnedBuf>>) {
        match result {
            Ok(bufs) => {
                assert_eq!(bufs.len(), sizes.len());
                for (buf, size) in bufs.into_iter().zip(sizes) {
                    self.admit(buf, *size);
                }
            }
            Err(error) => {
                if error == Error::Closed {
                    self.tally.note("waiter ended by a shutdown");
                }
                self.refused(sizes, &error);
            }
        }
    }

    fn poll_waiting(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            if !self.waiting[at].woken() {
                at += 1;
                continue;
            }
            let mut waiting = self.waiting.remove(at);
            let Poll::Ready(result) = waiting.poll() else { panic!("woken in vain") };
            self.tally.note("future woken");
            self.served(&waiting.sizes.clone(), result);
        }
    }

    fn cancel(&mut self, at: usize) {
        if self.waiting.is_empty() {
            return;
        }
        let waiting = self.waiting.remove(at % self.waiting.len());
        self.tally.note(if waiting.woken() {
            "future cancelled after it was granted"
        } else {
            "future cancelled while waiting"
        });
        drop(waiting);
    }

    /// Who was not woken must still wait, and equal requests are served in their order.
    fn check_waiting(&mut self) {
        for at in 0..self.waiting.len() {
            if self.waiting[at].woken() {
                let sizes = self.waiting[at].sizes.clone();
                let earlier = self.waiting[..at].iter().find(|w| !w.woken() && w.sizes == sizes);
                assert!(earlier.is_none(), "an equal request was served before an earlier one");
                if self.waiting[..at].iter().any(|w| w.sizes == sizes) {
                    self.tally.note("later waiter served after an equal one");
                }
            } else {
                let poll = self.waiting[at].poll();
                assert!(poll.is_pending(), "ready, but not woken: {:?}", poll.map(|r| r.map(|b| b.len())));
            }
        }
        if let Some(pool) = &self.pool {
            let waiting = self.waiting.iter().filter(|w| !w.woken()).count();
            assert_eq!(pool.stats().waiting, waiting, "others wait than those who wait");
        }
    }

    // --- copies ------------------------------------------------------------------------------------------------------

    fn take_buf(&mut self, at: usize) -> Option<Live> {
        (!self.bufs.is_empty()).then(|| self.bufs.swap_remove(at % self.bufs.len()))
    }

    /// A buffer whose bytes can be told from blank memory, which a download may have brought.
    fn take_sendable(&mut self, at: usize) -> Option<Live> {
        let mut live = self.take_buf(at)?;
        if live.bytes.contains(&BLANK) {
            let id = self.id();
            live.bytes = pattern(id, live.bytes.len());
            live.buf.copy_from_slice(&live.bytes);
        }
        Some(live)
    }

    fn lane(&self, at: usize) -> usize {
        at % self.lanes.len()
    }

    /// Blank device memory.
    fn memory(&mut self, device: usize, len: usize) -> Option<DeviceBuffer> {
        if self.dead[device] {
            return None;
        }
        let (handle, probe) = (self.devices[device].clone(), self.probes[device].clone());
        self.calmly(|world| {
            let memory = handle.alloc(len).ok();
            let blank = memory.as_ref().map(|m| probe.upload_blocking(&vec![BLANK; len], m));
            if let Some(Err(error)) = blank {
                // Only a device that died by a fault a moment ago does that.
                assert!(error.is_sticky() && world.tolerant(), "{error}");
                return None;
            }
            memory
        })
    }

    fn keep_region(&mut self, region: Region) {
        if self.regions.len() >= REGIONS {
            self.regions.remove(0);
        }
        self.regions.push(region);
    }

    /// An error of a submit.
    fn submit_error(&mut self, error: &Error) {
        assert!(self.tolerant(), "no fault, and yet: {error}");
        assert!(matches!(error, Error::Device(_)), "unexpected: {error}");
    }

    /// Whether a submit that failed is queued all the same.
    fn runs_anyway(&mut self, device: usize) -> bool {
        let armed = self.armed;
        armed.is_some_and(|f| {
            f.call == Call::Copy && f.failure == Failure::RunsAnyway && f.device == device as u32
        }) && self.struck()
    }

    fn upload(&mut self, at: usize, lane: usize, part: Option<(u8, u8)>, keep: Keep, orphan: bool) {
        let lane = self.lane(lane);
        let device = self.lanes[lane].device;
        let Some(Live { buf, bytes }) = self.take_sendable(at) else { return };
        let (start, end) = match part {
            None => (0, bytes.len()),
            Some((a, b)) => {
                let start = bytes.len() * usize::from(a.min(b)) / 256;
                let end = bytes.len() * (usize::from(a.max(b)) + 1) / 256;
                (start, end.max(start + 1).min(bytes.len()))
            }
        };
        if start >= end {
            return self.bufs.push(Live { buf, bytes });
        }
        let Some(memory) = self.memory(device, end - start) else {
            let buf = self.upload_to_ruins(buf, lane);
            return self.bufs.push(Live { buf, bytes });
        };
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let (capacity, id) = (buf.capacity(), self.id());
        let sent = bytes[start..end].to_vec();
        let stream = self.lanes[lane].stream.clone();
        let result = match part {
            None => stream.upload(buf, &memory),
            Some(_) => stream.upload_part(buf, start..end, memory.slice(..)),
        };
        let queued = result.is_ok() || self.runs_anyway(device);
        if queued {
            self.tally.note(if part.is_some() { "upload of a part" } else { "upload" });
            if orphan {
                self.tally.note("device memory dropped under a copy");
            } else {
                let slice = memory.slice(..).unwrap();
                self.copies.push(Copy {
                    id,
                    device,
                    lane,
                    host: range,
                    seen: Seen::Device(slice),
                    allowed: vec![sent.clone()],
                    dead: false,
                });
                self.keep_region(Region { memory, device, lane, copy: id, bytes: sent });
            }
        }
        match result {
            Ok(flight) => {
                let flight = Flight {
                    handle: Handle::Own(flight),
                    range: Some(range),
                    capacity,
                    expect: Expect::Same(bytes),
                    after: if orphan { Vec::new() } else { vec![id] },
                    flag: None,
                };
                self.keep(flight, keep, &[lane]);
            }
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(!queued, "queued, and yet the buffer came back");
                self.submit_error(&error);
                self.tally.note("upload refused, buffer back");
                self.bufs.push(Live { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                if queued {
                    self.tally.note("upload that failed but runs");
                }
                self.detached.push(capacity);
                self.bury_if_dead(device, range);
            }
        }
    }

    /// A dead device takes nothing, and the buffer is ours as it was.
    fn upload_to_ruins(&mut self, buf: PinnedBuf, lane: usize) -> PinnedBuf {
        let device = self.lanes[lane].device;
        let Some(memory) = self.ruins[device].as_ref().filter(|m| m.len() >= buf.len()) else { return buf };
        if self.devices[device].lost().is_none() {
            return buf; // Nobody has noticed yet.
        }
        match self.lanes[lane].stream.upload(buf, memory) {
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(error.is_sticky(), "{error}");
                self.tally.note("upload refused, buffer back");
                buf
            }
            other => panic!("the device is dead, and yet: {other:?}"),
        }
    }

    /// Something that was submitted to a device that died by it.
    fn bury_if_dead(&mut self, device: usize, range: Range) {
        if self.devices[device].lost().is_some() {
            self.graves.push(range);
        }
    }

    fn keep(&mut self, flight: Flight, keep: Keep, lanes: &[usize]) {
        match keep {
            Keep::Keep => self.flights.push(flight),
            Keep::Drop => self.let_go(flight, lanes),
            Keep::Forget => {
                let Flight { handle, range, capacity, .. } = flight;
                // A claimed segment's address is not known.
                if let Some(range) = range {
                    self.forgotten.push((range, capacity));
                } else {
                    self.forgotten.push(((0, 0), capacity));
                }
                self.tally.note("in flight: forgotten");
                std::mem::forget(handle);
            }
        }
    }

    fn let_go(&mut self, flight: Flight, lanes: &[usize]) {
        self.tally.note("in flight: dropped");
        if !matches!(flight.handle, Handle::Nothing(_)) {
            self.detached.push(flight.capacity);
        }
        // A shared buffer is in other hands too; its copies stand for it.
        if let (Handle::Own(_), Some(range)) = (&flight.handle, flight.range) {
            self.holds.push(Hold { range, after: flight.after.clone(), lanes: lanes.to_vec() });
        }
        drop(flight);
    }

    fn download(&mut self, at: usize, lane: usize, region: usize, keep: Keep) {
        let lane = self.lane(lane);
        let device = self.lanes[lane].device;
        let Some((slice, allowed)) = self.source(device, lane, region) else { return };
        let Some(fits) = self.bufs.iter().position(|b| b.buf.capacity() >= slice.len()) else { return };
        let fit = (0..self.bufs.len()).map(|i| (i + at) % self.bufs.len());
        let at = { fit }.find(|&i| self.bufs[i].buf.capacity() >= slice.len()).unwrap_or(fits);
        let Live { mut buf, mut bytes } = self.bufs.swap_remove(at);
        while buf.len() < slice.len() || allowed.contains(&buf[..slice.len()].to_vec()) {
            // So that what is there before the copy is known, and not by chance what the copy brings.
            let id = self.id();
            bytes = pattern(id, slice.len());
            buf.clear();
            buf.extend_from_slice(&bytes);
        }
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let (capacity, id) = (buf.capacity(), self.id());
        let before = bytes[..slice.len()].to_vec();
        let result = self.lanes[lane].stream.clone().download(slice, buf);
        let queued = result.is_ok() || self.runs_anyway(device);
        if queued {
            self.tally.note("download");
            let seen = Seen::Host(range.0, before);
            let allowed = allowed.clone();
            self.copies.push(Copy { id, device, lane, host: range, seen, allowed, dead: false });
        }
        match result {
            Ok(flight) => {
                let flight = Flight {
                    handle: Handle::Own(flight),
                    range: Some(range),
                    capacity,
                    expect: Expect::OneOf(allowed),
                    after: vec![id],
                    flag: None,
                };
                self.keep(flight, keep, &[lane]);
            }
            Err(SubmitError { error, buffer: Some(buf) }) => {
                assert!(!queued, "queued, and yet the buffer came back");
                self.submit_error(&error);
                self.bufs.push(Live { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                self.detached.push(capacity);
                self.bury_if_dead(device, range);
            }
        }
    }

    /// Device memory to download from, and what it may hold when a copy on that lane reads it.
    fn source(&mut self, device: usize, lane: usize, region: usize) -> Option<(DeviceSlice, Vec<Vec<u8>>)> {
        self.sweep_if_alive(device);
        let there: Vec<usize> =
            (0..self.regions.len()).filter(|&r| self.regions[r].device == device).collect();
        let region = &self.regions[*there.get(region % there.len().max(1))?];
        let ordered = region.lane == lane || !self.copies.iter().any(|c| c.id == region.copy);
        let mut allowed = vec![region.bytes.clone()];
        if !ordered {
            allowed.push(vec![BLANK; region.bytes.len()]);
        }
        Some((region.memory.slice(..).unwrap(), allowed))
    }

    fn sweep_if_alive(&mut self, device: usize) {
        if !self.dead[device] {
            self.sweep();
        }
    }

    fn share(&mut self, at: usize, lane: usize, other: usize, keep: Keep) {
        let Some(Live { buf, bytes }) = self.take_sendable(at) else { return };
        if bytes.is_empty() {
            return self.bufs.push(Live { buf, bytes });
        }
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let capacity = buf.capacity();
        let buf = Arc::new(buf);
        for lane in [self.lane(lane), self.lane(other)] {
            let device = self.lanes[lane].device;
            let Some(memory) = self.memory(device, bytes.len()) else { continue };
            let id = self.id();
            let result = self.lanes[lane].stream.clone().upload(buf.clone(), &memory);
            if result.is_ok() || self.runs_anyway(device) {
                self.tally.note("upload shared by two streams");
                let seen = Seen::Device(memory.slice(..).unwrap());
                let allowed = vec![bytes.clone()];
                self.copies.push(Copy { id, device, lane, host: range, seen, allowed, dead: false });
                self.keep_region(Region { memory, device, lane, copy: id, bytes: bytes.clone() });
            }
            match result {
                Ok(flight) => {
                    let flight = Flight {
                        handle: Handle::Shared(flight),
                        range: Some(range),
                        capacity,
                        expect: Expect::Same(bytes.clone()),
                        after: vec![id],
                        flag: None,
                    };
                    // Forgetting it would keep a count for ever, and the model with it.
                    let keep = if keep == Keep::Forget { Keep::Drop } else { keep };
                    self.keep(flight, keep, &[lane]);
                }
                Err(SubmitError { error, .. }) => self.submit_error(&error),
            }
        }
        self.shared.push(Shared { buf, bytes });
    }

    fn drop_shared(&mut self, at: usize) {
        if self.shared.is_empty() {
            return;
        }
        let shared = self.shared.swap_remove(at % self.shared.len());
        self.detached.push(shared.buf.capacity());
    }

    fn hold(&mut self, at: usize, lanes: &[usize], keep: Keep) {
        let Some(Live { buf, bytes }) = self.take_buf(at) else { return };
        self.sweep();
        let range = (buf.as_ptr() as usize, span(buf.capacity()));
        let capacity = buf.capacity();
        let after = self.outstanding(lanes);
        let streams: Vec<Stream> = lanes.iter().map(|&l| self.lanes[l].stream.clone()).collect();
        let result = match &streams[..] {
            [stream] => stream.hold(buf),
            _ => Stream::hold_on_all(&streams.iter().collect::<Vec<_>>(), buf),
        };
        match result {
            Ok(flight) => {
                let several = lanes.len() > 1;
                self.tally.note(if several { "hold on several streams" } else { "hold on one stream" });
                let handle = Handle::Own(flight);
                let expect = Expect::Same(bytes);
                let flight = Flight { handle, range: Some(range), capacity, expect, after, flag: None };
                self.keep(flight, keep, lanes);
            }
            Err(SubmitError { error, buffer: Some(buf) }) => {
                if !lanes.is_empty() {
                    self.submit_error(&error);
                }
                self.bufs.push(Live { buf, bytes });
            }
            Err(SubmitError { error, buffer: None }) => {
                self.submit_error(&error);
                self.graves.push(range);
                self.may_lose = true;
            }
        }
    }

    fn claim(&mut self, lane: usize, size: Size, usage: Use) {
        let lane = self.lane(lane);
        let stream = self.lanes[lane].stream.clone();
        let buf = match self.pool().try_checkout_on(&stream, Self::request(size)) {
            Ok(buf) => buf,
            Err(error) => return self.refused(&[size], &error),
        };
        assert_eq!(buf.capacity(), size.len);
        self.tally.note(if buf.was_claimed() { "claim" } else { "stream-ready but free" });
        match usage {
            Use::Drop => self.unclaim(buf),
            Use::Wait => {
                let claimed = buf.was_claimed();
                match buf.wait() {
                    Ok(buf) => {
                        if claimed {
                            self.tally.note("claim waited for");
                        }
                        self.admit(buf, size);
                    }
                    // It went back where it was.
                    Err(Error::Timeout(_)) => self.detached.push(size.len),
                    Err(error) => {
                        self.submit_error(&error);
                        self.detached.push(size.len);
                    }
                }
            }
            Use::OtherStream => {
                let other = (lane + 1) % self.lanes.len();
                let device = self.lanes[other].device;
                let Some(memory) = self.memory(device, 1) else { return self.unclaim(buf) };
                match self.lanes[other].stream.clone().download(&memory, buf) {
                    Err(SubmitError { error: Error::WrongStream, buffer: Some(buf) }) => {
                        self.tally.note("refused: wrong stream");
                        self.unclaim(buf);
                    }
                    wrong => panic!("used on another stream: {wrong:?}"),
                }
            }
            Use::Land(keep) => self.land(lane, buf, keep),
        }
    }

    fn crowd(&mut self, lane: usize, size: Size, usages: &[Use]) {
        for at in 0..64 {
            let before = self.bufs.len();
            self.checkout(size, Patience::Try, Who::Main);
            if self.bufs.len() == before {
                break;
            }
            self.upload(before, lane + at % 3 / 2, None, Keep::Drop, at % 5 == 4);
        }
        for usage in usages {
            self.check();
            self.claim(lane, size, *usage);
        }
    }

    fn unclaim(&mut self, buf: StreamBuf) {
        if buf.was_claimed() {
            self.tally.note("claim dropped unused");
            self.detached.push(buf.capacity());
        }
        drop(buf);
    }

    /// Downloads into a stream-ready buffer.
    fn land(&mut self, lane: usize, buf: StreamBuf, keep: Keep) {
        let device = self.lanes[lane].device;
        let source = self.source(device, lane, usize::from(buf.was_claimed()));
        let Some((slice, allowed)) = source.filter(|s| s.0.len() <= buf.capacity()) else {
            return self.unclaim(buf);
        };
        let (capacity, claimed) = (buf.capacity(), buf.was_claimed());
        match self.lanes[lane].stream.clone().download(slice, buf) {
            Ok(flight) => {
                if claimed {
                    self.tally.note("claim used");
                    // Which segment it was is not known, so of the downloads to segments that were given up on this
                    // stream one may be overwritten before anybody has seen it.
                    let kept: Vec<Range> = self.flights.iter().filter_map(|f| f.range).collect();
                    self.copies.retain(|c| {
                        let given_up = !kept.iter().any(|range| overlap(*range, c.host));
                        c.lane != lane || c.dead || matches!(c.seen, Seen::Device(_)) || !given_up
                    });
                }
                let handle = Handle::Own(flight);
                let expect = Expect::OneOf(allowed);
                let after = self.outstanding(&[lane]);
                let flight = Flight { handle, range: None, capacity, expect, after, flag: None };
                self.keep(flight, keep, &[lane]);
            }
            Err(SubmitError { error, buffer }) => {
                self.submit_error(&error);
                match buffer {
                    Some(buf) => self.unclaim(buf),
                    None => self.detached.push(capacity),
                }
            }
        }
    }

    fn on_device(&mut self, lane: usize, region: usize) {
        let lane = self.lane(lane);
        let device = self.lanes[lane].device;
        let Some((slice, _)) = self.source(device, lane, region) else { return };
        let Some(memory) = self.memory(device, slice.len()) else { return };
        match self.lanes[lane].stream.clone().copy(slice, memory) {
            Ok(flight) => {
                self.tally.note("copy within the device");
                let after = self.outstanding(&[lane]);
                let (handle, expect) = (Handle::Nothing(flight), Expect::Same(Vec::new()));
                self.flights.push(Flight { handle, range: None, capacity: 0, expect, after, flag: None });
            }
            Err(error) => self.submit_error(&error),
        }
    }

    // --- in flight ---------------------------------------------------------------------------------------------------

    fn take_flight(&mut self, at: usize) -> Option<Flight> {
        (!self.flights.is_empty()).then(|| self.flights.swap_remove(at % self.flights.len()))
    }

    /// A buffer is back: everything that it waited for has run, and it holds what it should.
    fn back(&mut self, buf: PinnedBuf, flight: (Option<Range>, usize, Expect, Vec<u64>)) {
        let (range, capacity, expect, after) = flight;
        self.sweep();
        assert!(
            self.pool.is_none() || self.have_run(&after),
            "a buffer came back before its copies have run"
        );
        let found = (buf.as_ptr() as usize, span(buf.capacity()));
        assert_eq!(buf.capacity(), capacity);
        match range {
            Some(range) => assert_eq!(range, found, "another buffer came back"),
            // Claimed: host-ready now, so nothing of an earlier owner may be left.
            None => self.assert_free(found),
        }
        let bytes = buf.to_vec();
        match expect {
            Expect::Same(same) => assert!(bytes == same, "the bytes of a buffer changed in flight"),
            Expect::OneOf(allowed) => assert!(allowed.contains(&bytes), "a download brought wrong bytes"),
        }
        self.bufs.push(Live { buf, bytes });
    }

    /// A wait has ended with an error.
    fn lost(&mut self, range: Option<Range>, capacity: usize, error: &Error, own: bool) {
        if let Error::Timeout(_) = error {
            self.tally.note("in flight: wait timed out");
        } else {
            assert!(self.tolerant(), "no fault, and yet: {error}");
            self.tally.note("in flight: wait ended by a loss");
            if own {
                self.graves.extend(range);
            }
        }
        self.detached.push(capacity);
    }

    fn wait(&mut self, at: usize) {
        let Some(Flight { handle, range, capacity, expect, after, .. }) = self.take_flight(at) else {
            return;
        };
        // A wait that fails gives the buffer up, so it stands for a drop.
        let hold = range.map(|range| Hold { range, after: after.clone(), lanes: Vec::new() });
        match handle {
            Handle::Own(flight) => match flight.wait() {
                Ok(buf) => {
                    self.tally.note("in flight: waited for");
                    self.back(buf, (range, capacity, expect, after));
                }
                Err(error) => {
                    self.holds.extend(hold);
                    self.lost(range, capacity, &error, true);
                }
            },
            Handle::Shared(flight) => match flight.wait() {
                Ok(buf) => {
                    self.sweep();
                    assert!(self.pool.is_none() || self.have_run(&after));
                    drop(buf);
                }
                Err(error) => self.lost(range, capacity, &error, false),
            },
            Handle::Nothing(flight) => match flight.wait() {
                Ok(()) => {
                    self.sweep();
                    assert!(self.pool.is_none() || self.have_run(&after));
                }
                Err(error) => self.lost(None, 0, &error, false),
            },
        }
    }

    fn wait_for(&mut self, waiter: usize, other: usize) {
        self.sweep();
        let after = self.outstanding(&[other]);
        let result = self.lanes[waiter].stream.wait_for(&self.lanes[other].stream);
        if self.lanes[waiter].device != self.lanes[other].device {
            assert!(matches!(result, Err(Error::WrongDevice { .. })), "{result:?}");
            self.tally.note("refused: wrong device");
            return;
        }
        match result {
            Ok(()) => {
                let (busy, from) = (!after.is_empty(), self.id());
                self.tally.note(if busy {
                    "stream waited for a busy one"
                } else {
                    "stream waited for an idle one"
                });
                self.behind.push(Behind { lane: waiter, from, after });
            }
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }

    fn is_done(&mut self, at: usize) {
        if self.flights.is_empty() {
            return;
        }
        let at = at % self.flights.len();
        let done = match &self.flights[at].handle {
            Handle::Own(f) => f.is_done(),
            Handle::Shared(f) => f.is_done(),
            Handle::Nothing(f) => f.is_done(),
        };
        match done {
            Ok(true) => {
                self.sweep();
                let after = self.flights[at].after.clone();
                assert!(self.pool.is_none() || self.have_run(&after), "said to be done before it was");
                self.tally.note("in flight: asked, done");
            }
            Ok(false) => self.tally.note("in flight: asked, not done"),
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }

    fn poll_flight(&mut self, at: usize) {
        let Some(mut flight) = self.take_flight(at) else { return };
        let flag = flight.flag.get_or_insert_with(Arc::default).clone();
        let woken = flag.0.swap(false, Ordering::SeqCst);
        let waker = Waker::from(flag);
        let mut cx = Context::from_waker(&waker);
        let Handle::Own(handle) = &mut flight.handle else { return self.flights.push(flight) };
        match Pin::new(handle).poll(&mut cx) {
            Poll::Pending => {
                assert!(!woken || matches!(flight.expect, Expect::Same(_)), "woken in vain");
                self.tally.note("in flight: awaited, pending");
                self.flights.push(flight);
            }
            Poll::Ready(result) => {
                let Flight { handle, range, capacity, expect, after, .. } = flight;
                drop(handle);
                match result {
                    Ok(buf) => {
                        self.tally.note("in flight: awaited, ready");
                        self.back(buf, (range, capacity, expect, after));
                    }
                    Err(error) => self.lost(range, capacity, &error, true),
                }
            }
        }
    }

    // --- the rest ----------------------------------------------------------------------------------------------------

    fn write(&mut self, at: usize, kind: u8) {
        if self.bufs.is_empty() {
            return;
        }
        let (at, id) = (at % self.bufs.len(), self.id());
        let live = &mut self.bufs[at];
        let capacity = live.buf.capacity();
        let len = (capacity * usize::from(kind) / 255).max(1);
        live.bytes = pattern(id, len);
        live.buf.clear();
        match kind % 4 {
            0 => live.buf.put_slice(&live.bytes),
            1 => std::io::Write::write_all(&mut live.buf, &live.bytes).unwrap(),
            2 => {
                live.buf.try_resize(len, 1).unwrap();
                live.buf.view_mut::<u8>().unwrap().copy_from_slice(&live.bytes);
            }
            _ => {
                let spare = live.buf.spare_capacity_mut();
                assert_eq!(spare.len(), capacity);
                for (to, from) in spare.iter_mut().zip(&live.bytes) {
                    to.write(*from);
                }
                // SAFETY: within the capacity, and written just now.
                unsafe { live.buf.set_len(len) };
            }
        }
        let have = live.buf.remaining();
        let need = have + 1;
        let refused = live.buf.try_extend_from_slice(&vec![0; need]);
        assert_eq!(refused, Err(Error::TooSmall { need, have }));
    }

    fn drop_buf(&mut self, at: usize, who: Who) {
        let Some(live) = self.take_buf(at) else { return };
        match who {
            Who::Main => drop(live),
            Who::Helper => self.helper.run(move || drop(live)),
            Who::Fresh => std::thread::spawn(move || drop(live)).join().unwrap(),
        }
        if who != Who::Main {
            self.tally.note("return on another thread");
        }
    }

    fn forget_buf(&mut self, at: usize) {
        let Some(live) = self.take_buf(at) else { return };
        self.forgotten.push((live.range(), live.buf.capacity()));
        self.tally.note("buffer forgotten");
        std::mem::forget(live.buf);
    }

    fn token(&mut self, at: usize) {
        let Some(Live { buf, bytes }) = self.take_buf(at) else { return };
        let (range, capacity) = ((buf.as_ptr() as usize, span(buf.capacity())), buf.capacity());
        let token = Token::from_raw(buf.into_token().to_raw());
        self.tokens.push((token, range, capacity, bytes));
    }

    fn redeem(&mut self, at: usize) {
        if self.tokens.is_empty() {
            return;
        }
        let (token, range, capacity, bytes) = self.tokens.swap_remove(at % self.tokens.len());
        let buf = self.pool().redeem(token).expect("redeemed once");
        assert_eq!((buf.as_ptr() as usize, buf.capacity()), (range.0, capacity));
        self.tally.note("token redeemed");
        self.stale.push(token);
        self.bufs.push(Live { buf, bytes });
    }

    fn misuse(&mut self, misuse: Misuse, at: usize) {
        let lane = self.lane(at);
        let (stream, device) = (self.lanes[lane].stream.clone(), self.lanes[lane].device);
        if self.dead.iter().any(|d| *d) {
            return;
        }
        let far = (device + 1) % DEVICES;
        let refuse = |result: Result<InFlight<PinnedBuf>, SubmitError<PinnedBuf>>| match result {
            Err(SubmitError { error, buffer: Some(buf) }) => (error, buf),
            Err(SubmitError { error, buffer: None }) => panic!("the buffer was lost: {error}"),
            Ok(_) => panic!("a misuse was accepted"),
        };
        match misuse {
            Misuse::Empty | Misuse::Range | Misuse::Small | Misuse::Memory => {
                let Some(Live { mut buf, mut bytes }) = self.take_buf(at) else { return };
                if buf.len() < 2 {
                    return self.bufs.push(Live { buf, bytes });
                }
                let on = if misuse == Misuse::Memory { far } else { device };
                let Some(memory) = self.memory(on, buf.len()) else {
                    return self.bufs.push(Live { buf, bytes });
                };
                let len = buf.len();
                let (error, buf) = match misuse {
                    Misuse::Empty => {
                        bytes.clear();
                        buf.clear();
                        refuse(stream.upload(buf, &memory))
                    }
                    Misuse::Range => refuse(stream.upload_part(buf, 1..len + 1, &memory)),
                    Misuse::Small => refuse(stream.upload(buf, memory.slice(1..))),
                    _ => refuse(stream.upload(buf, &memory)),
                };
                match (misuse, &error) {
                    (Misuse::Empty, Error::Empty) => self.tally.note("refused: empty"),
                    (Misuse::Range, Error::OutOfRange { .. }) => self.tally.note("refused: out of range"),
                    (Misuse::Small, Error::TooSmall { .. }) => self.tally.note("refused: too small"),
                    (Misuse::Memory, Error::WrongDevice { .. }) => self.tally.note("refused: wrong device"),
                    _ => assert!(self.tolerant(), "{misuse:?} was refused with {error}"),
                }
                self.bufs.push(Live { buf, bytes });
            }
            Misuse::Pool => {
                let Some(other) = self.other.clone() else { return };
                let Ok(mut buf) = other.try_checkout(64) else { return };
                buf.extend_from_slice(&[1; 64]);
                let Some(stranger) = self.lanes.iter().find(|l| l.device == 1).map(|l| l.stream.clone())
                else {
                    return;
                };
                let Some(memory) = self.memory(1, 64) else { return };
                let (error, buf) = refuse(stranger.upload(buf, &memory));
                assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
                let (error, _) = refuse(stranger.hold(buf));
                assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
                self.tally.note("refused: wrong device");
            }
            Misuse::Claim => {
                let (Some(other), Some(lane)) = (&self.other, self.lanes.iter().find(|l| l.device == 1))
                else {
                    return;
                };
                let result = other.try_checkout_on(&lane.stream, 64);
                assert!(matches!(result, Err(Error::WrongDevice { .. })), "{result:?}");
                self.tally.note("refused: wrong device");
            }
            Misuse::Token => {
                let Some(other) = self.other.clone() else { return };
                let pool = self.pool();
                if let Ok(buf) = other.try_checkout(64) {
                    let token = buf.into_token();
                    assert!(matches!(pool.redeem(token), Err(Error::StaleToken)));
                    other.redeem(token).expect("its own pool takes it");
                    self.tally.note("refused: foreign token");
                }
                for &(token, ..) in &self.tokens {
                    assert!(matches!(other.redeem(token), Err(Error::StaleToken)));
                    let [depot, key, nonce] = token.to_raw();
                    let guess = Token::from_raw([depot, key, nonce.wrapping_add(1 << 40)]);
                    assert!(matches!(pool.redeem(guess), Err(Error::StaleToken)));
                }
                for &token in &self.stale {
                    assert!(matches!(pool.redeem(token), Err(Error::StaleToken)));
                    self.tally.note("refused: stale token");
                }
            }
        }
    }

    /// The device is gone: what has not run never will.
    fn buried(&mut self, device: usize) {
        if std::mem::replace(&mut self.dead[device], true) {
            return;
        }
        (self.trouble, self.may_lose) = (true, true);
        for copy in self.copies.iter_mut().filter(|c| c.device == device) {
            copy.dead = true;
            self.graves.push(copy.host);
            self.tally.note("copy lost with its device");
        }
        if let Some(region) = self.regions.iter().find(|r| r.device == device) {
            self.ruins[device] = Some(region.memory.clone());
        }
        self.regions.retain(|r| r.device != device);
        self.tally.note("poison");
    }

    fn kill(&mut self, device: usize) {
        if self.dead[device] {
            return;
        }
        self.sweep();
        self.tally.note("device killed");
        self.node.kill(device as u32);
        self.buried(device);
    }

    fn fault(&mut self, device: usize, call: Call, nth: u64, failure: Failure, ops: &[Op]) {
        if self.dead[device] || self.armed.is_some() {
            return;
        }
        self.sweep();
        let fault = Fault { device: device as u32, call, nth, failure };
        self.armed = Some(fault);
        self.node.fail(fault);
        for op in ops {
            self.apply(op);
        }
        let struck = self.node.clear_faults() == 0;
        self.armed = None;
        if struck {
            self.tally.fault(call, failure);
            self.trouble = true;
            let marks = matches!(call, Call::Record | Call::CreateEvent | Call::Query);
            self.may_lose |= failure == Failure::Argument && marks;
            if failure == Failure::Sticky {
                self.buried(device);
            }
        }
    }

    fn reap_all(&self) {
        for device in &self.devices {
            device.reap();
        }
    }

    /// Everything that can move moves, and everything that is done comes back.
    fn drain(&mut self) {
        for device in 0..DEVICES {
            self.node.resume(device as u32);
        }
        for _ in 0..3 {
            self.reap_all();
            while self.node.step() {}
        }
        self.reap_all();
        self.sweep();
        let waits = self.copies.iter().find(|c| !c.dead);
        assert!(waits.is_none(), "a copy never ran");
        if let Some(pool) = self.pool.clone() {
            // What came back may have gone to those who wait.
            self.detached.clear();
            let stats = pool.stats();
            assert_eq!((stats.in_flight_bytes, stats.claimed_bytes), (0, 0), "still in flight: {stats:?}");
            if stats.quarantined_bytes == 0 && !self.waiting.iter().any(Waiting::woken) {
                assert_eq!(stats.requested_bytes, self.requested(), "requested bytes: {stats:?}");
            }
        }
        self.holds.retain(|h| h.lanes.iter().any(|&l| self.dead[self.lanes[l].device]));
        self.tally.note("everything drained");
    }

    /// Bytes asked for by all that is in our hands.
    fn requested(&self) -> usize {
        let bufs: usize = self.bufs.iter().map(|b| b.buf.capacity()).sum();
        let own = |f: &&Flight| matches!(f.handle, Handle::Own(_));
        let flights: usize = self.flights.iter().filter(own).map(|f| f.capacity).sum();
        let tokens: usize = self.tokens.iter().map(|t| t.2).sum();
        let forgotten: usize = self.forgotten.iter().map(|f| f.1).sum();
        // A shared buffer counts once, whoever has it.
        let arcs = self.shared.iter().map(|s| (s.buf.as_ptr() as usize, s.buf.capacity()));
        let in_flight = self.flights.iter().filter(|f| matches!(f.handle, Handle::Shared(_)));
        let shared: BTreeSet<_> =
            arcs.chain(in_flight.filter_map(|f| f.range.map(|r| (r.0, f.capacity)))).collect();
        bufs + flights + tokens + forgotten + shared.iter().map(|s| s.1).sum::<usize>()
    }

    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Checkout(size, patience, who) => self.checkout(*size, *patience, *who),
            Op::Many(sizes, patience) => self.many(sizes, *patience),
            Op::OrUnpinned(size) => self.or_unpinned(*size),
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
            Op::Hold(at, lane, keep) => self.hold(*at, &[self.lane(*lane)], *keep),
            Op::HoldAll(at, mask, keep) => {
                let lanes: Vec<usize> = (0..self.lanes.len()).filter(|l| mask >> l & 1 != 0).collect();
                if lanes.len() != 1 {
                    self.hold(*at, &lanes, *keep);
                }
            }
            Op::Claim(lane, size, usage) => self.claim(*lane, *size, *usage),
            Op::Crowd(lane, size, usages) => self.crowd(*lane, *size, usages),
            Op::OnDevice(lane, region) => self.on_device(*lane, *region),
            Op::Wait(at) => self.wait(*at),
            Op::IsDone(at) => self.is_done(*at),
            Op::Await(at) => self.poll_flight(*at),
            Op::DropFlight(at) => {
                if let Some(flight) = self.take_flight(*at) {
                    let lanes: Vec<usize> = (0..self.lanes.len()).collect();
                    self.let_go(flight, &lanes);
                }
            }
            Op::Step(device, nth, times) => {
                for _ in 0..*times {
                    let runnable = self.node.runnable(*device as u32);
                    if runnable > 0 && self.node.step_stream(*device as u32, nth % runnable) {
                        self.tally.note("stream stepped");
                    }
                }
            }
            Op::StepAny(times) => {
                for _ in 0..*times {
                    self.node.step();
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
            Op::Token(at) => self.token(*at),
            Op::Redeem(at) => self.redeem(*at),
            Op::Hang(at) => {
                let lane = &self.lanes[self.lane(*at)];
                assert!(self.node.hang_stream(lane.device as u32, lane.nth));
                self.tally.note("stream hung");
            }
            Op::Resume(at) => {
                let lane = &self.lanes[self.lane(*at)];
                assert!(self.node.resume_stream(lane.device as u32, lane.nth));
                self.tally.note("stream resumed");
            }
            Op::Sync(at) => {
                let lane = self.lane(*at);
                self.sweep();
                let after = self.outstanding(&[lane]);
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
            Op::Misuse(misuse, at) => self.misuse(*misuse, *at),
            Op::Kill(device) => self.kill(*device),
            Op::Fault(device, call, nth, failure, ops) => self.fault(*device, *call, *nth, *failure, ops),
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
            // The stream is hung or stalled: the copy was taken back.
            Err(Error::Device(e)) if e.class == pinpool::ErrorClass::Moment => {}
            Err(error) => assert!(self.tolerant(), "no fault, and yet: {error}"),
        }
    }

    /// Everything that must hold after every step.
    pub fn check(&mut self) {
        self.sweep();
        for live in &self.bufs {
            assert!(*live.buf == *live.bytes, "a host-ready buffer was written to");
        }
        for shared in &self.shared {
            assert!(**shared.buf == *shared.bytes, "a shared buffer was written to");
        }
        let mut owned = self.owned();
        owned.sort_unstable();
        for pair in owned.windows(2).filter(|p| p[0].1 > 0) {
            assert!(!overlap(pair[0], pair[1]), "{:x?} overlap", pair);
        }
        for (device, handle) in self.devices.iter().enumerate() {
            assert!(
                handle.lost().is_none() || self.dead[device],
                "lost without a reason: {:?}",
                handle.lost()
            );
        }
        let Some(pool) = self.pool.clone() else { return };
        let census = pool.check().unwrap();
        let s = pool.stats();
        let parts =
            s.free_bytes + s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes + s.cut_bytes;
        assert_eq!(parts, s.pinned_bytes + s.unpinned_bytes, "{s:?}");
        assert!(s.pinned_bytes + s.unpinned_bytes <= s.capacity_bytes, "{s:?}");
        assert_eq!(s.capacity_bytes, self.setup.capacity * KIB);
        assert_eq!(
            (census.checked_out, census.in_flight, census.claimed, census.quarantined),
            (s.checked_out_bytes, s.in_flight_bytes, s.claimed_bytes, s.quarantined_bytes),
        );
        let regions: usize = pool.regions().iter().map(|r| r.len).sum();
        assert_eq!(regions, s.pinned_bytes + s.unpinned_bytes);
        self.check_snapshot(&pool, s);
        // Exact but for what is on its way back, and for what was granted to a future that nobody has looked at.
        let (least, unknown) = (self.requested(), self.detached.iter().sum::<usize>());
        assert!(s.requested_bytes >= least, "{} requested, {least} in our hands: {s:?}", s.requested_bytes);
        if !self.waiting.iter().any(Waiting::woken) && !self.may_lose {
            assert!(s.requested_bytes <= least + unknown, "{} + {unknown} in our hands: {s:?}", least);
        }
        let used = s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes;
        let needed: usize = owned.iter().map(|r| r.1).sum();
        assert!(used >= needed && used >= s.requested_bytes, "{needed} bytes are needed: {s:?}");
        assert!(self.may_lose || s.quarantined_bytes == 0, "quarantined without a reason: {s:?}");
        self.check_waiting();
        self.count(s);
    }

    /// The long form of the statistics says what the short one does, in parts that are the whole.
    fn check_snapshot(&self, pool: &Pool, s: pinpool::PoolStats) {
        let all = pool.snapshot();
        assert_eq!(all.pool, s, "nobody moves");
        let sum = |part: fn(&ClassStats) -> u64| all.classes.iter().map(part).sum::<u64>();
        assert_eq!(sum(|c| c.out_bytes as u64), s.granted_bytes as u64, "{all:#?}");
        assert_eq!((sum(|c| c.checkouts), sum(|c| c.returns)), (s.checkouts, s.returns), "{all:#?}");
        assert_eq!(sum(|c| c.out), s.checkouts - s.returns, "{all:#?}");
        assert_eq!(s.granted_bytes, s.requested_bytes + s.rounding_bytes, "{s:?}");
        let streams = all.devices.iter().flat_map(|device| &device.streams);
        let flying: usize = streams.map(|stream| stream.in_flight_bytes).sum();
        let other = self.other.as_ref().map_or(0, |other| other.stats().in_flight_bytes);
        // Without what several streams hold together, and with what is the other pool's.
        assert!(flying <= s.in_flight_bytes + other, "{flying}: {all:#?}");
        for device in &all.devices {
            assert!(device.completed <= device.submitted, "{device:?}");
        }
    }

    /// Counts the transitions that only the statistics show.
    fn count(&mut self, s: pinpool::PoolStats) {
        let was = std::mem::replace(&mut self.seen, s);
        self.tally.add("miss", s.misses - was.misses);
        self.tally.add("take-back", s.collects - was.collects);
        self.tally.add("wait", s.waits - was.waits);
        self.tally.add("timeout", s.timeouts - was.timeouts);
        let held = |s: &pinpool::PoolStats| s.pinned_bytes + s.unpinned_bytes;
        self.tally.add("grow", u64::from(held(&s) > held(&was)));
        self.tally.add("unpinned growth", u64::from(s.unpinned_bytes > was.unpinned_bytes));
        self.tally.add("quarantine", u64::from(s.quarantined_bytes > was.quarantined_bytes));
    }

    // --- the end -----------------------------------------------------------------------------------------------------

    /// Ends the case, and asks for everything back.
    pub fn end(mut self) {
        match self.setup.end {
            End::Quiet => {}
            End::DropPool => self.drop_pool(),
            End::Shutdown => self.shutdown(),
        }
        self.waiting.clear();
        for at in 0..self.tokens.len() {
            if let (Some(pool), token) = (&self.pool, self.tokens[at].0) {
                drop(pool.redeem(token).unwrap());
            }
        }
        let lost_tokens = self.pool.is_none() && !self.tokens.is_empty();
        self.tokens.clear();
        self.bufs.clear();
        self.shared.clear();
        self.flights.clear();
        self.drain();
        // What the devices hold now is what was sent, however late it went.
        for at in 0..self.regions.len() {
            let (device, slice) = (self.regions[at].device, self.regions[at].memory.slice(..).unwrap());
            if !self.dead[device] {
                // Submitted with an error and not queued, or lost, are not in the list.
                assert!(self.peek(device, &slice) == self.regions[at].bytes, "wrong bytes arrived");
            }
        }
        self.regions.clear();
        self.ruins = Default::default();
        let stuck = lost_tokens || !self.forgotten.is_empty() || self.may_lose;
        let quiet = !stuck && self.setup.end == End::Quiet;
        if let (Some(pool), true) = (self.pool.clone(), quiet) {
            let s = pool.stats();
            assert_eq!((s.checked_out_bytes, s.requested_bytes, s.checkouts - s.returns), (0, 0, 0), "{s:?}");
            pool.trim(0);
            let s = pool.stats();
            let reserve = self.setup.reserve * KIB;
            assert_eq!(s.pinned_bytes + s.unpinned_bytes, reserve, "all that is idle goes: {s:?}");
            if !self.trouble {
                // With everything back, the longest request can be served.
                let most = self.setup.extent.min(self.setup.capacity - self.setup.reserve) * KIB;
                drop(pool.checkout(most - 4096.min(most / 2)).unwrap());
            }
            self.tally.note("ended quietly");
        }
        self.pool = None;
        self.other = None;
        self.lanes.clear();
        self.probes.clear();
        self.copies.clear();
        self.helper = Helper::new();
        if let Some(failure) = self.setup.closing {
            self.node.fail(Fault { device: 0, call: Call::DestroyEvent, nth: 0, failure });
            self.trouble = true;
        }
        self.devices.clear();
        if let (0, Some(failure)) = (self.node.clear_faults(), self.setup.closing) {
            self.tally.fault(Call::DestroyEvent, failure);
        }
        if !stuck && !self.trouble {
            for device in 0..DEVICES {
                let left = self.node.live(device as u32);
                assert_eq!(left, pinpool::host::HostUsage::default(), "host:{device} has kept something");
            }
        }
    }

    fn drop_pool(&mut self) {
        self.poll_waiting();
        // A future holds the pool.
        self.waiting.clear();
        self.sweep();
        let out = !self.bufs.is_empty() || !self.flights.is_empty();
        self.pool = None;
        // From here on host memory goes with the last buffer in it: only what arrives in device memory can be seen.
        self.copies.retain(|c| matches!(c.seen, Seen::Device(_)));
        if out {
            self.tally.note("pool dropped while buffers were out");
        }
        for at in 0..self.bufs.len().min(3) {
            self.check();
            self.upload(at, at, None, Keep::Keep, false);
            self.tally.note("buffer used after its pool");
        }
        while !self.flights.is_empty() {
            self.wait(0);
            self.check();
        }
    }

    fn shutdown(&mut self) {
        self.sweep();
        let down = self.pool().shutdown(Duration::from_secs(3600));
        self.closed = true;
        self.sweep();
        self.poll_waiting();
        assert!(self.waiting.is_empty(), "a shutdown left somebody waiting");
        let ours = !self.bufs.is_empty() || !self.shared.is_empty() || !self.tokens.is_empty();
        assert!(!(down.drained && ours), "drained, and yet something is out");
        assert_eq!(down.drained, down.outstanding == 0);
        self.tally.note(if down.drained {
            "shut down and drained"
        } else {
            "shut down while buffers were out"
        });
        let size = Size { len: 64, align: 64, reserve: false };
        self.checkout(size, Patience::Try, Who::Main);
        self.checkout(size, Patience::Forever, Who::Fresh);
        assert!(self.bufs.iter().all(|b| *b.buf == *b.bytes));
        let bufs = self.bufs.len();
        self.join(&[size]);
        assert_eq!(self.bufs.len(), bufs, "a closed pool served somebody");
    }
}

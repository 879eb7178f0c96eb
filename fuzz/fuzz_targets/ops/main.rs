//! Any sequence of operations, on a simulated GPU that the input steps, stalls, fails and loses.
//!
//! There are no threads, so an input determines the whole run: the order in which copies are executed, which driver
//! call fails and when, and what is dropped, forgotten or waited for.
//!
//! # What is checked
//!
//! A plain model tracks the owner of each buffer. After each operation:
//!
//! - [`Pool::check`] finds no violated invariant, and what the model holds is counted as checked out or in flight;
//! - no new buffer overlaps one that the model holds, nor one whose copy was submitted after the device last moved;
//! - a new buffer is aligned, has the length asked for, and is empty;
//! - a refusal says what is withheld, and for how large a request that waits.
//!
//! Each buffer is filled with bytes of its own, and the model knows the bytes of each stream's piece of device memory,
//! in stream order. So if a segment is reused too early, a late copy reads the next owner's bytes, or overwrites them,
//! and a comparison fails: of a buffer before it is returned, of a complete download, or of the device's memory at the
//! end. Where the input says so, the program's code (`foreign`: a subscriber, wakers) panics or calls the pool
//! meanwhile, and all of this must still hold. At the end everything that is not quarantined or forgotten is free
//! again, and then the memory serves any request that is not too long for the pool.
#![no_main]

#[path = "../bytes/mod.rs"]
mod bytes;
#[path = "../foreign/mod.rs"]
mod foreign;
#[path = "../../../tests/support/hand.rs"]
#[allow(dead_code)]
mod hand;
mod input;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use pinpool::{
    Checkout, Device, DeviceSlice, Error, InFlight, PinnedBuf, Pool, Stream, StreamBuf, SubmitError, Unpinned,
};

use bytes::{compare, fresh, known, unmap};
use hand::{CALLS, Failure, Machine};
use input::{Op, Setup};

/// The most operations of one input, so that it takes a few milliseconds.
const OPS: usize = 80;
/// Bytes of device memory for each stream.
const LANE: usize = 2048;
/// The most bytes of a buffer that are written and copied.
const WRITTEN: usize = 192;
const PAGE: usize = 4096;

/// The GPU, for one input after another.
static MACHINE: LazyLock<Machine> = LazyLock::new(|| Machine::new(1, 1 << 20, 0));

/// A buffer that the model holds, and the bytes in it.
struct Owned {
    buf: PinnedBuf,
    bytes: Vec<u8>,
    range: (usize, usize),
}

enum Flying {
    /// The bytes of the buffer when the copy is complete: the uploaded ones, or those of the device's memory.
    Pinned(InFlight<PinnedBuf>, Vec<Option<u8>>, (usize, usize)),
    Shared(InFlight<Arc<PinnedBuf>>, Vec<u8>),
    Unit(InFlight<()>),
}

struct Lane {
    stream: Stream,
    memory: DeviceSlice,
    /// The bytes of the memory after all submitted work. `None`: unknown.
    holds: Vec<Option<u8>>,
}

struct World {
    device: Device,
    pool: Pool,
    lanes: Vec<Lane>,
    owned: Vec<Owned>,
    shared: Vec<(Arc<PinnedBuf>, Vec<u8>, (usize, usize))>,
    ready: Vec<(StreamBuf, usize, bool)>,
    flying: Vec<Flying>,
    asked: Vec<(Checkout<Vec<PinnedBuf>>, Vec<(usize, usize)>)>,
    /// Buffers whose handles were dropped or forgotten in flight since the device last moved.
    detached: Vec<(usize, usize)>,
    forgotten: usize,
    faults: bool,
    next: u32,
}

fn span(len: usize) -> usize {
    len.next_multiple_of(32) + 32
}

fn range(buf: &PinnedBuf) -> (usize, usize) {
    let start = buf.as_ptr().addr();
    (start, start + span(buf.capacity()))
}

fn pick<T>(list: &mut Vec<T>, at: u8) -> Option<T> {
    if list.is_empty() { None } else { Some(list.swap_remove(usize::from(at) % list.len())) }
}

impl World {
    fn new(setup: Setup) -> Self {
        MACHINE.renew(setup.seed.into());
        let device = MACHINE.device(0);
        let capacity = (usize::from(setup.pages) + 1) * PAGE;
        let part = |n: u8| (capacity * (usize::from(n) + 1) / 256).max(PAGE);
        let pool = Pool::builder(&device)
            .capacity(capacity)
            .extent(part(setup.extent))
            .region(part(setup.region))
            .thread_cache(part(setup.cache))
            .pin_threads(1)
            .unpinned(Unpinned::Allow)
            .initial(part(setup.initial) / 2)
            .build()
            .expect("a sane configuration");
        foreign::behave(setup.mood, &pool);
        let count = if setup.lanes { 2 } else { 1 };
        let lanes = (0..count).map(|_| Lane {
            stream: device.stream().expect("nothing fails yet"),
            memory: device.alloc(LANE).expect("nothing fails yet"),
            holds: vec![None; LANE],
        });
        let lanes = lanes.collect();
        Self {
            device,
            pool,
            lanes,
            owned: Vec::new(),
            shared: Vec::new(),
            ready: Vec::new(),
            flying: Vec::new(),
            asked: Vec::new(),
            detached: Vec::new(),
            forgotten: 0,
            faults: false,
            next: 0,
        }
    }

    fn lane(&self, lane: bool) -> usize {
        usize::from(lane) % self.lanes.len()
    }

    /// The device may move from here on: copies without a handle may complete.
    fn moves(&mut self) {
        self.detached.clear();
    }

    fn held(&self) -> impl Iterator<Item = (usize, usize)> {
        let flying = self.flying.iter().filter_map(|f| match f {
            Flying::Pinned(_, _, range) => Some(*range),
            _ => None,
        });
        let owned = self.owned.iter().map(|o| o.range);
        let shared = self.shared.iter().map(|s| s.2);
        owned.chain(shared).chain(flying)
    }

    /// A new buffer: checked, and filled with bytes that no other buffer has.
    fn welcome(&mut self, mut buf: PinnedBuf, len: usize, align: usize) {
        let range = range(&buf);
        assert_eq!((buf.capacity(), buf.len()), (len, 0));
        assert_eq!(range.0 % align.max(64), 0, "{len} bytes at {align}");
        for other in self.held().chain(self.detached.iter().copied()) {
            assert!(range.1 <= other.0 || other.1 <= range.0, "{range:x?} overlaps {other:x?}");
        }
        let bytes = self.fresh(len);
        buf.try_extend_from_slice(&bytes).expect("it fits");
        self.owned.push(Owned { buf, bytes, range });
    }

    /// Bytes that no other buffer has.
    fn fresh(&mut self, len: usize) -> Vec<u8> {
        self.next += 1;
        fresh(self.next, len.min(WRITTEN))
    }

    /// A buffer whose copy is complete: checks its bytes.
    fn downloaded(&mut self, buf: PinnedBuf, expected: &[Option<u8>], at: (usize, usize)) {
        compare(&buf, expected, "a buffer that came back");
        assert_eq!(range(&buf), at);
        let bytes = buf.to_vec();
        self.owned.push(Owned { buf, bytes, range: at });
    }

    fn refused(error: &Error) {
        let known = matches!(
            error,
            Error::Exhausted(_)
                | Error::TooLong { .. }
                | Error::Timeout(_)
                | Error::Impossible { .. }
                | Error::Closed
                | Error::OutOfMemory { .. }
                | Error::MemLock { .. }
                | Error::Argument(_)
                | Error::Device(_)
        );
        assert!(known, "{error:?}");
        let shortage = match error {
            Error::Exhausted(shortage) => Some(&**shortage),
            Error::Timeout(waited) => waited.shortage.as_deref(),
            _ => None,
        };
        if let Some(shortage) = shortage {
            // What is withheld is withheld for a request that waits.
            assert!(shortage.withheld <= shortage.free, "{shortage:?}");
            assert!(shortage.withheld == 0 || shortage.withheld_for > 0, "{shortage:?}");
        }
    }

    fn submitted(
        &mut self,
        result: Result<InFlight<PinnedBuf>, SubmitError<PinnedBuf>>,
        sent: Vec<u8>,
        expected: Vec<Option<u8>>,
        range: (usize, usize),
        keep: bool,
    ) -> bool {
        match result {
            Ok(flight) if keep => self.flying.push(Flying::Pinned(flight, expected, range)),
            Ok(flight) => {
                drop(flight);
                self.detached.push(range);
            }
            Err(SubmitError { buffer: Some(buf), .. }) => {
                compare(&buf, &known(&sent), "a refused buffer");
                self.owned.push(Owned { buf, bytes: sent, range });
                return false;
            }
            Err(SubmitError { .. }) => return false,
        }
        true
    }

    /// Records the bytes that a copy leaves in the device's memory, or that they are unknown.
    fn written(&mut self, lane: usize, offset: usize, bytes: &[u8], sure: bool) {
        for (to, byte) in self.lanes[lane].holds[offset..].iter_mut().zip(bytes) {
            *to = sure.then_some(*byte);
        }
    }

    fn finish(&mut self, flying: Flying) {
        self.moves();
        match flying {
            Flying::Pinned(flight, expected, range) => {
                if let Ok(buf) = flight.wait() {
                    self.downloaded(buf, &expected, range);
                }
            }
            Flying::Shared(flight, bytes) => {
                if let Ok(buf) = flight.wait() {
                    assert_eq!(**buf, *bytes);
                }
            }
            Flying::Unit(flight) => drop(flight.wait()),
        }
    }

    fn poll_asked(&mut self, at: usize) {
        let (future, wants) = &mut self.asked[at];
        if let Poll::Ready(result) = foreign::poll(|cx| Pin::new(future).poll(cx)) {
            let wants = std::mem::take(wants);
            drop(self.asked.swap_remove(at));
            match result {
                Ok(bufs) => {
                    assert_eq!(bufs.len(), wants.len());
                    bufs.into_iter().zip(wants).for_each(|(b, (len, align))| self.welcome(b, len, align));
                }
                Err(error) => Self::refused(&error),
            }
        }
    }

    fn fail(&mut self, call: &str, nth: u8, failure: u8) {
        self.faults = true;
        MACHINE.fault(call, u64::from(nth) + 1, Failure::ALL[usize::from(failure) % Failure::ALL.len()]);
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Checkout { size } => {
                let (request, len, align) = size.request();
                match self.pool.try_checkout(request) {
                    Ok(buf) => self.welcome(buf, len, align),
                    Err(error) => Self::refused(&error),
                }
            }
            Op::CheckoutWaiting { size } => {
                let (request, len, align) = size.request();
                self.moves();
                match self.pool.checkout(request) {
                    Ok(buf) => self.welcome(buf, len, align),
                    Err(error) => Self::refused(&error),
                }
            }
            Op::CheckoutMany { sizes } => {
                let wants = sizes.map(|s| s.request());
                self.moves();
                match self.pool.checkout_many(&wants.map(|w| w.0), Some(Duration::ZERO)) {
                    Ok(bufs) => {
                        assert_eq!(bufs.len(), wants.len());
                        bufs.into_iter()
                            .zip(wants)
                            .for_each(|(b, (_, len, align))| self.welcome(b, len, align));
                    }
                    Err(error) => Self::refused(&error),
                }
            }
            Op::CheckoutOn { lane, size } => {
                let (request, len, _) = size.request();
                let lane = self.lane(lane);
                match self.pool.try_checkout_on(&self.lanes[lane].stream, request) {
                    Ok(buf) => {
                        assert_eq!(buf.capacity(), len);
                        self.ready.push((buf, len, lane == 1));
                    }
                    Err(error) => Self::refused(&error),
                }
            }
            Op::Ask { sizes, two } => {
                let wants = sizes.map(|s| s.request());
                let wants = if two { &wants[..] } else { &wants[..1] };
                let requests: Vec<_> = wants.iter().map(|w| w.0).collect();
                let future = self.pool.checkout_many_async(&requests);
                self.asked.push((future, wants.iter().map(|w| (w.1, w.2)).collect()));
                self.poll_asked(self.asked.len() - 1);
            }
            Op::PollAsked { at } => {
                if !self.asked.is_empty() {
                    self.poll_asked(usize::from(at) % self.asked.len());
                }
            }
            Op::DropAsked { at } => drop(pick(&mut self.asked, at)),
            Op::Return { at } => {
                if let Some(Owned { buf, bytes, .. }) = pick(&mut self.owned, at) {
                    assert_eq!(*buf, *bytes, "a buffer that the model holds has changed");
                }
            }
            Op::Write { at } => {
                if let Some(mut owned) = pick(&mut self.owned, at) {
                    assert_eq!(*owned.buf, *owned.bytes, "a buffer that the model holds has changed");
                    owned.buf.clear();
                    owned.bytes = self.fresh(owned.buf.capacity());
                    owned.buf.try_extend_from_slice(&owned.bytes).expect("it fits");
                    self.owned.push(owned);
                }
            }
            Op::Share { at } => {
                if let Some(Owned { buf, bytes, range }) = pick(&mut self.owned, at) {
                    self.shared.push((Arc::new(buf), bytes, range));
                }
            }
            Op::DropShared { at } => {
                if let Some((buf, bytes, range)) = pick(&mut self.shared, at) {
                    assert_eq!(**buf, *bytes, "a shared buffer has changed");
                    if Arc::into_inner(buf).is_none() {
                        self.detached.push(range);
                    }
                }
            }
            Op::Forget { at, what } => {
                let before = self.forgotten;
                self.forgotten += 1;
                match what % 16 {
                    0 => pick(&mut self.owned, at).map(|o| std::mem::forget(o.buf)),
                    1 => pick(&mut self.ready, at).map(std::mem::forget),
                    2 => pick(&mut self.flying, at).map(std::mem::forget),
                    _ => None,
                }
                .unwrap_or_else(|| self.forgotten = before);
            }
            Op::Upload { at, lane, offset, keep } => {
                if let Some(Owned { buf, bytes, range }) = pick(&mut self.owned, at) {
                    let lane = self.lane(lane);
                    let offset = usize::from(offset) * 7;
                    let target = self.lanes[lane].memory.slice(offset..);
                    let result = self.lanes[lane].stream.upload(buf, target);
                    let given_back = matches!(&result, Err(SubmitError { buffer: Some(_), .. }));
                    let sure = self.submitted(result, bytes.clone(), known(&bytes), range, keep);
                    if !given_back {
                        self.written(lane, offset, &bytes, sure);
                    }
                }
            }
            Op::UploadShared { at, lane, offset, keep } => {
                if self.shared.is_empty() {
                    return;
                }
                let (buf, bytes, _) = &self.shared[usize::from(at) % self.shared.len()];
                let (buf, bytes) = (buf.clone(), bytes.clone());
                let lane = self.lane(lane);
                let offset = usize::from(offset) * 7;
                let target = self.lanes[lane].memory.slice(offset..);
                let sure = match self.lanes[lane].stream.upload(buf, target) {
                    Ok(flight) => {
                        if keep {
                            self.flying.push(Flying::Shared(flight, bytes.clone()));
                        }
                        true
                    }
                    Err(SubmitError { buffer: Some(_), .. }) => return,
                    Err(_) => false,
                };
                self.written(lane, offset, &bytes, sure);
            }
            Op::UploadBlocking { lane, offset, len } => {
                self.moves();
                let lane = self.lane(lane);
                let offset = usize::from(offset) * 7;
                let bytes = self.fresh(usize::from(len));
                let target = self.lanes[lane].memory.slice(offset..);
                let sure = self.lanes[lane].stream.upload_blocking(&bytes, target).is_ok();
                self.written(lane, offset, &bytes, sure);
            }
            Op::Download { at, lane, offset, len, keep } => {
                if let Some(Owned { buf, bytes, range }) = pick(&mut self.owned, at) {
                    let lane = self.lane(lane);
                    let start = usize::from(offset) * 7;
                    let len = (usize::from(len) % WRITTEN).clamp(1, buf.capacity());
                    let expected = self.lanes[lane].holds[start..start + len].to_vec();
                    let source = self.lanes[lane].memory.slice(start..start + len);
                    let result = self.lanes[lane].stream.download(source, buf);
                    self.submitted(result, bytes, expected, range, keep);
                }
            }
            Op::DownloadReady { at, lane, offset, len, keep } => {
                if let Some((buf, capacity, on)) = pick(&mut self.ready, at) {
                    let lane = self.lane(lane);
                    let start = usize::from(offset) * 7;
                    let len = (usize::from(len) % WRITTEN).clamp(1, capacity);
                    let expected = self.lanes[lane].holds[start..start + len].to_vec();
                    let source = self.lanes[lane].memory.slice(start..start + len);
                    match self.lanes[lane].stream.download(source, buf) {
                        // The buffer's address shows only when its download is complete, so the handle is waited for or
                        // dropped.
                        Ok(flight) if keep => {
                            self.moves();
                            if let Ok(buf) = flight.wait() {
                                assert!(on == (lane == 1), "used on another stream");
                                let range = range(&buf);
                                self.downloaded(buf, &expected, range);
                            }
                        }
                        Ok(flight) => drop(flight),
                        Err(SubmitError { buffer: Some(buf), .. }) => self.ready.push((buf, capacity, on)),
                        Err(_) => {}
                    }
                }
            }
            Op::WaitReady { at } => {
                if let Some((buf, len, _)) = pick(&mut self.ready, at) {
                    self.moves();
                    if let Ok(buf) = buf.wait() {
                        self.welcome(buf, len, 64);
                    }
                }
            }
            Op::DropReady { at } => drop(pick(&mut self.ready, at)),
            Op::OnDevice { lane, from, to, len } => {
                let lane = self.lane(lane);
                let len = usize::from(len).max(1);
                let (from, to) = (usize::from(from) * 3, LANE / 2 + usize::from(to) * 3);
                let Lane { stream, memory, holds } = &mut self.lanes[lane];
                let result = stream.copy(memory.slice(from..from + len), memory.slice(to..to + len));
                for i in 0..len {
                    holds[to + i] = if result.is_ok() { holds[from + i] } else { None };
                }
                self.flying.extend(result.ok().map(Flying::Unit));
            }
            Op::Hold { at, lane, keep } => {
                if let Some(Owned { buf, bytes, range }) = pick(&mut self.owned, at) {
                    let lane = self.lane(lane);
                    let result = self.lanes[lane].stream.hold(buf);
                    self.submitted(result, bytes.clone(), known(&bytes), range, keep);
                }
            }
            Op::Wait { at } => {
                if let Some(flying) = pick(&mut self.flying, at) {
                    self.finish(flying);
                }
            }
            Op::PollFlight { at } => match pick(&mut self.flying, at) {
                Some(Flying::Pinned(mut flight, expected, range)) => {
                    match foreign::poll(|cx| Pin::new(&mut flight).poll(cx)) {
                        Poll::Ready(Ok(buf)) => self.downloaded(buf, &expected, range),
                        Poll::Ready(Err(_)) => {}
                        Poll::Pending => self.flying.push(Flying::Pinned(flight, expected, range)),
                    }
                }
                other => self.flying.extend(other),
            },
            Op::IsDone { at } => {
                if !self.flying.is_empty() {
                    let at = usize::from(at) % self.flying.len();
                    let _ = match &self.flying[at] {
                        Flying::Pinned(flight, ..) => flight.is_done(),
                        Flying::Shared(flight, _) => flight.is_done(),
                        Flying::Unit(flight) => flight.is_done(),
                    };
                }
            }
            // No call has asked whether its copy is complete, so it is not among the detached buffers.
            Op::DropFlight { at } => drop(pick(&mut self.flying, at)),
            Op::Synchronize { lane } => {
                self.moves();
                let lane = self.lane(lane);
                let _ = self.lanes[lane].stream.synchronize();
            }
            Op::WaitFor { lane } => {
                let (one, other) = (self.lane(lane), self.lane(!lane));
                let _ = self.lanes[one].stream.wait_for(&self.lanes[other].stream);
            }
            Op::Step { count } => {
                self.moves();
                for _ in 0..count % 32 {
                    MACHINE.step();
                }
            }
            Op::StepStream { nth } => {
                self.moves();
                MACHINE.step_runnable(0, usize::from(nth % 2));
            }
            Op::Reap => {
                self.device.reap();
            }
            Op::Stall { nth } => {
                MACHINE.hold(0, usize::from(nth % 2));
            }
            Op::Resume => MACHINE.resume(0, None),
            Op::Fail { call, nth, failure } => {
                self.fail(CALLS[usize::from(call) % CALLS.len()], nth % 16, failure);
            }
            Op::FailAny { nth, failure } => self.fail("", nth % 128, failure),
            Op::Kill { sure } => {
                if sure == 99 {
                    self.faults = true;
                    self.moves();
                    MACHINE.kill(0);
                }
            }
            Op::Trim { keep } => {
                let before = self.pool.stats();
                let freed = self.pool.trim(usize::from(keep) * PAGE);
                let after = self.pool.stats();
                let held = |s: pinpool::PoolStats| s.pinned_bytes + s.unpinned_bytes;
                assert_eq!(held(before) - freed, held(after));
            }
            Op::Close { sure } => {
                if sure == 99 {
                    self.moves();
                    let _ = self.pool.shutdown(Duration::ZERO);
                }
            }
        }
    }

    fn check(&self) {
        let found = self.pool.check().unwrap_or_else(|e| panic!("{e}"));
        let stats = self.pool.stats();
        let parts = stats.free_bytes
            + stats.checked_out_bytes
            + stats.in_flight_bytes
            + stats.quarantined_bytes
            + stats.cut_bytes;
        assert_eq!(parts, stats.pinned_bytes + stats.unpinned_bytes, "{stats:?}");
        let owned = self.owned.iter().map(|o| o.range.1 - o.range.0).sum::<usize>();
        assert!(found.checked_out_bytes >= owned, "{found:?}, and the model holds {owned} bytes");
        let held: usize = self.held().map(|r| r.1 - r.0).sum();
        assert!(
            found.checked_out_bytes + found.in_flight_bytes + found.quarantined_bytes >= held,
            "{found:?}, held {held}"
        );
    }

    fn wait_for_idle(&self) {
        for _ in 0..200 {
            while MACHINE.step() {}
            if !self.device.reap() && MACHINE.queued(0) == 0 && self.pool.stats().in_flight_bytes == 0 {
                return;
            }
        }
    }

    fn end(mut self) {
        MACHINE.calm();
        MACHINE.resume(0, None);
        self.moves();
        for (mut future, _) in self.asked.drain(..) {
            let _ = foreign::poll(|cx| Pin::new(&mut future).poll(cx));
        }
        for flying in std::mem::take(&mut self.flying) {
            self.finish(flying);
        }
        self.wait_for_idle();
        for Lane { stream, memory, holds } in &self.lanes {
            let mut bytes = vec![0; LANE];
            if stream.download_blocking(memory, &mut bytes).is_ok() {
                compare(&bytes, holds, "device memory");
            }
        }
        for Owned { buf, bytes, .. } in self.owned.drain(..) {
            assert_eq!(*buf, *bytes, "a buffer that the model holds has changed");
        }
        for (buf, bytes, _) in self.shared.drain(..) {
            assert_eq!(**buf, *bytes, "a shared buffer has changed");
        }
        self.ready.clear();
        self.wait_for_idle();
        self.check();
        let stats = self.pool.stats();
        if self.forgotten == 0 {
            let left = (stats.checked_out_bytes, stats.in_flight_bytes, stats.requested_bytes);
            let quarantined = if stats.quarantined_bytes == 0 { 0 } else { stats.requested_bytes };
            assert_eq!(left, (0, 0, quarantined), "{stats:?}");
        }
        assert_eq!(stats.waiting, 0);
        if !self.faults {
            assert_eq!(stats.quarantined_bytes, 0, "{stats:?}");
            // Memory that was cut for one class, or pinned in one shape, serves any other.
            let len = 1 << (self.next % 21) | self.next as usize;
            let served = self.pool.try_checkout(len);
            let too_long = matches!(served, Err(Error::TooLong { .. } | Error::Closed));
            assert!(
                served.is_ok() || too_long || self.forgotten > 0,
                "{len} bytes: {:?}, {stats:?}",
                served.err()
            );
        }
        let down = self.pool.shutdown(Duration::ZERO);
        assert!(
            down.drained || self.forgotten > 0 || stats.quarantined_bytes > 0,
            "{down:?} after {stats:?}"
        );
        let Self { device, pool, lanes, forgotten, faults, .. } = self;
        let regions = pool.regions();
        drop((pool, lanes, device));
        if down.outstanding > 0 {
            unmap(&regions);
        }
        // What was forgotten is kept, and after a fault something may be.
        let (wrong, may_keep) = (MACHINE.wrong(), forgotten > 0 || faults);
        let is_wrong = |line: &&str| !may_keep || !line.starts_with("leak");
        assert_eq!(wrong.lines().find(is_wrong), None, "a rule was broken, or something was kept");
    }
}

fuzz_target!(|input: (Setup, Vec<Op>)| {
    let (setup, mut ops) = input;
    ops.truncate(OPS);
    let mut world = World::new(setup);
    for op in ops {
        world.apply(op);
        world.check();
    }
    foreign::rest();
    world.end();
});

//! The public face: building a pool, checking out, trimming, shutting down.
//!
//! # How it works
//!
//! This module puts the mechanisms of those below it in order: none of them calls upward. A
//! checkout goes through these steps, and ends with the first that finds memory:
//!
//! 1. *Hit*: a segment of the thread cache, or of a transfer cache.
//! 2. *Try*: what the central pool ([`crate::central`]) finds, but nothing of what other active
//!    threads have cached.
//! 3. *Claim* (stream-ready requests only): a segment that is in flight on that very stream.
//! 4. *Reap*: ask the streams what is complete, and try again.
//! 5. *Reclaim*: where the pool can grow no more, take back everything that threads have cached.
//! 6. *Grow*: have the region thread pin another region, up to the capacity. A request that may not
//!    wait for it takes back what threads have cached.
//! 7. *Wait*: join the queue, as a thread or as a task.
//!
//! # Invariants
//!
//! - No clock is read and no shared counter written before the slow path (`checkout_slow`).
//! - `PoolInner` goes with the last handle; its drop closes the central pool and waits for nothing.
//!   Buffers keep the central pool alive.
//!
//! To be read in this order: `request`; this file, with step 1 in `checkout_with`, step 3 in
//! `checkout_on_with`, the others in `begin` and `take_or_wait`; `future` (the checkout of a task),
//! `build`, `memory` (regions, trimming), `shutdown`, `stats`.

mod build;
mod future;
mod memory;
mod request;
mod shutdown;
mod stats;

use std::fmt;
use std::panic::Location;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::buffer::{PinnedBuf, StreamBuf};
use crate::central::{self, CentralPool, Fresh, ReclaimLevel, Wake, Want};
use crate::config::PoolBuilder;
use crate::device::handle::Device;
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Task;
use crate::freelist::{Descriptor, list_of};
use crate::region::Regions;
use crate::segment::Placement;
use crate::stream::Stream;
use crate::telemetry::counters::ErrorTally;
use crate::telemetry::ledger::CheckoutSite;
use crate::telemetry::stuck;

use build::Name;
pub use future::Checkout;
pub use request::Request;
pub use shutdown::Shutdown;
pub use stats::PoolStats;

/// A pool of page-locked memory. A clone is another handle, and any thread may use it.
///
/// When the last handle is dropped the pool closes without waiting: buffers that are out stay
/// usable, and their memory is unpinned when the last of them has come back.
#[derive(Clone)]
pub struct Pool(Arc<PoolInner>);

struct PoolInner {
    /// The first field, since a hit reads it.
    central: Arc<CentralPool>,
    regions: Arc<Regions>,
    devices: Vec<Device>,
    name: Name,
    /// Requests that the thread's own cache did not serve.
    misses: AtomicU64,
    /// Checkouts that no cache served: the ledger samples by this count.
    slow: AtomicU64,
    errors: ErrorTally,
    /// Checkouts that ended with `Exhausted`, `QueueFull` and `Impossible`.
    refused: [AtomicU64; 3],
    /// The most requests that may wait.
    max_waiting: usize,
    /// When the last report on stuck buffers was made.
    reported: crate::locks::Mutex<Option<Instant>>,
    /// A look at the waits is planned.
    watched: AtomicBool,
}

impl Pool {
    /// Starts setting up a pool that serves `device`.
    pub fn builder(device: &Device) -> PoolBuilder {
        PoolBuilder::new(device)
    }

    // Always inlined: a hit takes less time than returning a buffer through memory, where it is
    // written in words and read in wider moves, which the processor cannot forward.

    /// Checks out a host-ready buffer with room for `len` bytes, none of which counts as written.
    /// Waits until the pool has one. [`try_checkout`](Self::try_checkout) does not wait,
    /// [`checkout_timeout`](Self::checkout_timeout) has a deadline, and
    /// [`checkout_async`](Self::checkout_async) is for tasks.
    ///
    /// Waiting requests are served in their order. One that free memory cannot serve has a range
    /// withheld for it, its *window*; others are served from the rest meanwhile.
    ///
    /// A thread that keeps a buffer while it waits for another can wait for ever: other threads may
    /// do the same, or the other may be withheld for a large request that waits for the kept one. A
    /// program that needs several buffers takes them together, with
    /// [`checkout_many`](Self::checkout_many), or waits with a deadline and gives back what it has.
    ///
    /// # Errors
    /// [As every checkout](Error#checkouts).
    #[inline(always)]
    #[track_caller]
    pub fn checkout(&self, request: impl Into<Request>) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), true, None)
    }

    /// Checks out a host-ready buffer if the pool has one now. Else the pool starts to grow, so
    /// that a later try may succeed. [`PoolBuilder::thread_cache`] says what other threads lose.
    ///
    /// # Errors
    /// [As every checkout](Error#checkouts), and [`Error::Exhausted`].
    #[inline(always)]
    #[track_caller]
    pub fn try_checkout(&self, request: impl Into<Request>) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), false, None)
    }

    /// A checkout for a copier, which waits or tries again later ([`Wait::Retry`]). A refusal is
    /// not counted, and [`PoolBuilder::max_waiting`] is for the program's requests alone.
    #[track_caller]
    pub(crate) fn for_copier(&self, request: Request, wait: Wait<'_>) -> Result<PinnedBuf> {
        let site = Location::caller();
        if let Some(buf) = self.hit(request) {
            return Ok(buf);
        }
        match self.take_or_wait(&[request], wait, usize::MAX) {
            Ok(granted) => self.entered(granted, &[request], site).pop().ok_or(Error::Closed),
            Err(error @ Error::Exhausted(_)) => Err(error.of_pool(self.name())),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Checks out a host-ready buffer, and waits for at most `timeout`.
    ///
    /// # Errors
    /// [As every checkout](Error#checkouts).
    #[inline]
    #[track_caller]
    pub fn checkout_timeout(&self, request: impl Into<Request>, timeout: Duration) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), true, Some(timeout))
    }

    /// The hit and the slow path both end with a pointer in a register, and the result is made of
    /// it once: else the slow path's result would pass through memory. For the same reason the slow
    /// path gets its wait in registers, not as a [`Wait`] that each hit would write.
    #[inline(always)]
    #[track_caller]
    #[allow(unsafe_code)]
    fn checkout_with(&self, request: Request, waits: bool, timeout: Option<Duration>) -> Result<PinnedBuf> {
        // Loaded once: a hit's acquire would have it loaded again for the return.
        let central = &*self.0.central;
        let (descriptor, len_and_list) = match Self::hit_descriptor(central, request) {
            Some(hit) => hit,
            None => {
                let origin = CheckoutSite { tag: request.tag, site: Some(Location::caller()) };
                let descriptor = self.checkout_slow(request.len, request.align, origin, waits, timeout)?;
                // SAFETY: `checkout_slow` has taken it just now, so it is alive.
                (descriptor, central::pack(request.len, unsafe { descriptor.as_ref() }.list()))
            }
        };
        // SAFETY: taken from this central pool just now, for this request; it was packed with its own list.
        Ok(unsafe { Fresh::of_packed(central, descriptor, len_and_list) }.into())
    }

    /// Step 1 of the module's page: a segment of this thread's cache, and its length and list.
    #[inline(always)]
    fn hit_descriptor(central: &CentralPool, request: Request) -> Option<(NonNull<Descriptor>, u64)> {
        let class = request.cached_class()?;
        Some((central.hit(class, request.len)?, central::pack(request.len, list_of(class))))
    }

    /// Step 1 as a buffer.
    #[allow(unsafe_code)]
    fn hit(&self, request: Request) -> Option<PinnedBuf> {
        let (descriptor, len_and_list) = Self::hit_descriptor(&self.0.central, request)?;
        // SAFETY: it was taken from this central pool just now, and it was packed with its own list.
        Some(unsafe { Fresh::of_packed(&self.0.central, descriptor, len_and_list) }.into())
    }

    /// Step 1 where the thread cache has none: a batch of a transfer cache, which costs less than
    /// all that follows.
    fn refill(&self, request: Request) -> Option<Fresh> {
        let fresh = self.0.central.refill(request.cached_class()?, request.len)?;
        self.missed();
        Some(fresh)
    }

    /// A checkout that the thread cache did not serve. It gets the request in parts: whole, it
    /// would be written to memory before each hit.
    #[cold]
    #[inline(never)]
    fn checkout_slow(
        &self,
        len: usize,
        align: usize,
        origin: CheckoutSite,
        waits: bool,
        timeout: Option<Duration>,
    ) -> Result<NonNull<Descriptor>> {
        let CheckoutSite { tag, site } = origin;
        let request = Request { len, align, tag };
        if let Some(fresh) = self.refill(request) {
            return Ok(fresh.into_segment().into_descriptor());
        }
        let wait = if waits { Wait::Thread(timeout) } else { Wait::None };
        let mut bufs = self.acquire(&[request], wait, site.unwrap_or(Location::caller()))?;
        bufs.pop().map(|buf| buf.into_segment().into_descriptor()).ok_or(Error::ZeroLength)
    }

    /// Checks out a host-ready buffer for a task, on any runtime. The request joins the queue when
    /// the future is first polled. [`Checkout::timeout`] gives it a deadline.
    ///
    /// # Errors
    /// Of the future: [as every checkout](Error#checkouts).
    #[must_use = "nothing happens until it is awaited"]
    #[track_caller]
    pub fn checkout_async(&self, request: impl Into<Request>) -> Checkout {
        Checkout::new(self, vec![request.into()], Location::caller())
    }

    /// Checks out several buffers together, in the order of the requests, or none, so that no two
    /// callers wait for each other's half. Waits for at most `timeout`; `None`: for ever.
    ///
    /// # Errors
    /// [As every checkout](Error#checkouts).
    #[track_caller]
    pub fn checkout_many(&self, requests: &[Request], timeout: Option<Duration>) -> Result<Vec<PinnedBuf>> {
        self.acquire(requests, Wait::Thread(timeout), Location::caller())
    }

    /// [`checkout_many`](Self::checkout_many) for a task. [`Checkout::timeout`] gives it a
    /// deadline.
    ///
    /// # Errors
    /// Of the future: [as every checkout](Error#checkouts).
    #[must_use = "nothing happens until it is awaited"]
    #[track_caller]
    pub fn checkout_many_async(&self, requests: impl AsRef<[Request]>) -> Checkout<Vec<PinnedBuf>> {
        Checkout::new(self, requests.as_ref().to_vec(), Location::caller())
    }

    /// Checks out a host-ready buffer whose `len` bytes are written already, all zero, by the CPU,
    /// or by `aclrtMemset` where a program runs on the device itself (Ascend in RC mode). Waits
    /// like [`checkout`](Self::checkout).
    ///
    /// # Errors
    /// [As every checkout](Error#checkouts), and [every call](Error#every-call).
    #[allow(unsafe_code)]
    pub fn checkout_zeroed(&self, request: impl Into<Request>) -> Result<PinnedBuf> {
        let mut buf = self.checkout(request)?;
        // The first device that is not lost: a lost one writes no zeros.
        let alive = self.0.devices.iter().find(|device| device.lost().is_none());
        let context = alive.unwrap_or(&self.0.devices[0]).context();
        let (at, len) = (NonNull::from(buf.spare_capacity_mut()).cast(), buf.capacity());
        // SAFETY: all of the buffer's own bytes, which nothing else uses.
        context.noting(unsafe { context.driver().zero(at, len) })?;
        // SAFETY: just written.
        unsafe { buf.set_len(len) };
        Ok(buf)
    }

    /// Checks out a stream-ready buffer for `stream`: one that is free, or one that is in flight on
    /// that very stream alone. Work submitted to the stream later may use it; the CPU may not.
    ///
    /// Waits like [`checkout`](Self::checkout), but less often: a segment in flight on the stream
    /// is taken at once, unless a waiting request has a right to it. The call blocks the thread. A
    /// task calls [`try_checkout_on`](Self::try_checkout_on), and then awaits
    /// [`checkout_async`](Self::checkout_async): a download takes a [`PinnedBuf`] as well.
    ///
    /// # Errors
    /// [As every checkout](Error#checkouts), and [`Error::Mismatch`] for a stream of a device that
    /// the pool does not serve.
    #[track_caller]
    pub fn checkout_on(&self, stream: &Stream, request: impl Into<Request>) -> Result<StreamBuf> {
        self.checkout_on_with(stream, request.into(), Wait::Thread(None), Location::caller())
    }

    /// [`checkout_on`](Self::checkout_on) without waiting.
    ///
    /// # Errors
    /// As for [`checkout_on`](Self::checkout_on), and [`Error::Exhausted`], also where segments are
    /// in flight on the stream but another request waits for memory.
    #[track_caller]
    pub fn try_checkout_on(&self, stream: &Stream, request: impl Into<Request>) -> Result<StreamBuf> {
        self.checkout_on_with(stream, request.into(), Wait::None, Location::caller())
    }

    fn checkout_on_with(
        &self,
        stream: &Stream,
        request: Request,
        wait: Wait<'_>,
        site: &'static Location<'static>,
    ) -> Result<StreamBuf> {
        let timeline = stream.timeline();
        self.check_serves(timeline.context())?;
        let ready = |buf: PinnedBuf| StreamBuf::ready(timeline.clone(), buf);
        if let Some(buf) = self.hit(request) {
            return Ok(ready(buf));
        }
        let wants = self.wants(&[request]).map_err(|error| self.failed(error))?;
        let granted = self.0.central.try_take(&wants, ReclaimLevel::Idle);
        if let Some(granted) = granted.map_err(|error| self.failed(error))? {
            self.missed();
            let mut bufs = self.entered(granted, &[request], site);
            return bufs.pop().map(ready).ok_or(Error::ZeroLength);
        }
        // (A claim is not entered in the ledger unless the segment was before.)
        if let (Placement::Class(class), false) = (wants[0].placement, request.tag.long_lived) {
            // A claim takes a segment that is about to come back, but none that is a waiter's.
            if let Some(segment) = timeline.claim(&self.0.central, class, request.len) {
                self.missed();
                self.0.central.enter_again(&segment, CheckoutSite { tag: request.tag, site: Some(site) });
                return Ok(StreamBuf::claimed(timeline.clone(), segment));
            }
        }
        let bufs = self.acquire(&[request], wait, site)?;
        bufs.into_iter().next().map(ready).ok_or(Error::ZeroLength)
    }

    /// Steps 2 to 7: buffers for requests that are made together, or for none of them.
    fn acquire(
        &self,
        requests: &[Request],
        wait: Wait<'_>,
        site: &'static Location<'static>,
    ) -> Result<Vec<PinnedBuf>> {
        match self.take_or_wait(requests, wait, self.0.max_waiting) {
            Ok(granted) => Ok(self.entered(granted, requests, site)),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// [`Pool::acquire`] without making buffers of the segments, and without counting errors. At
    /// most `max_waiting` requests may wait, this one included.
    fn take_or_wait(&self, requests: &[Request], wait: Wait<'_>, max_waiting: usize) -> Result<Vec<Fresh>> {
        // The deadline counts from here, and so does the wait that a timeout tells, which is never
        // less than was asked for.
        let since = Instant::now();
        let len = central::sum(requests.iter().map(|request| request.len));
        let (wait, deadline) = match wait {
            // A thread of this crate would wait for itself: it pins memory, or completes entries.
            Wait::Thread(_) if crate::sync::own().is_some() => (Wait::None, None),
            Wait::Thread(timeout) => (wait, timeout.and_then(|timeout| since.checked_add(timeout))),
            _ => (wait, None),
        };
        let key = match self.begin(requests, wait, max_waiting)? {
            Begun::Granted(granted) => return Ok(granted),
            Begun::Waits(key) => key,
        };
        let span =
            crate::foreign::span!(DEBUG, target: "pinpool::pool", "wait", pool = self.name(), bytes = len);
        let _entered = span.enter();
        if self.is_by_hand() {
            return self.wait_by_hand(key, len, since);
        }
        self.reap();
        self.0.central.wait(key, len, deadline, since)
    }

    /// Steps 2 and 4 to 6 of the module's page, for threads and tasks, and the way into the queue.
    fn begin(&self, requests: &[Request], wait: Wait<'_>, max_waiting: usize) -> Result<Begun> {
        let wants = self.wants(requests)?;
        if wants.is_empty() {
            return Ok(Begun::Granted(Vec::new()));
        }
        self.missed();
        let central = &self.0.central;
        let take = |level| central.try_take(&wants, level);
        let mut got = take(ReclaimLevel::Idle)?;
        // Memory is short, so what is complete comes back now.
        if got.is_none() && self.reap() {
            got = take(ReclaimLevel::Idle)?;
        }
        // The pool can grow no more, so the caches of active threads are reclaimed too.
        if got.is_none() && !central.may_grow(&wants) {
            got = take(ReclaimLevel::All)?;
        }
        if let Some(got) = got {
            return Ok(Begun::Granted(got));
        }
        let growing = central.grow(&wants);
        let wake = match wait {
            Wait::Thread(_) => Wake::Thread(crate::sync::thread::current()),
            Wait::Task(waker) => Wake::Task(Task::of(waker)),
            // The growth is for later requests. This one may not wait for it.
            Wait::None | Wait::Retry => {
                let later = growing && matches!(wait, Wait::Retry);
                let got = take(if later { ReclaimLevel::Idle } else { ReclaimLevel::All })?;
                let short = || central.exhausted(central::sum(wants.iter().map(|want| want.len)));
                return got.map(Begun::Granted).ok_or_else(short);
            }
        };
        let key = central.join(wants, wake, max_waiting)?;
        self.watch_waits();
        Ok(Begun::Waits(key))
    }

    /// What requests that are made together want of the central pool. Checks them.
    fn wants(&self, requests: &[Request]) -> Result<Vec<Want>> {
        requests.iter().map(|r| self.0.central.place(r.len, r.align)).collect()
    }

    /// Counts a miss: once for each request, however often that is tried.
    fn missed(&self) {
        self.0.misses.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the devices do nothing by themselves (in tests).
    fn is_by_hand(&self) -> bool {
        self.0.devices[0].context().is_by_hand()
    }

    /// Makes buffers of what was granted on the slow path. The ledger gets long-lived
    /// buffers and a sample of the others, or, where checkouts are tracked, all.
    fn entered(
        &self,
        mut granted: Vec<Fresh>,
        requests: &[Request],
        site: &'static Location<'static>,
    ) -> Vec<PinnedBuf> {
        // Relaxed: only the number matters. The misses are not used for this count: where two kinds
        // of request take turns, the same residues would always come here.
        let nth = self.0.slow.fetch_add(1, Ordering::Relaxed);
        for (fresh, Request { tag, .. }) in granted.iter_mut().zip(requests) {
            if tag.is_entered(nth, self.0.central.config().track) {
                CentralPool::enter(fresh, CheckoutSite { tag: *tag, site: Some(site) });
            }
        }
        granted.into_iter().map(PinnedBuf::from).collect()
    }

    /// The error to report of a checkout: it is counted, and gets the pool's name where it tells of
    /// a shortage. A timeout makes a report on stuck buffers.
    fn failed(&self, error: Error) -> Error {
        let error = match error {
            // When the process ends, what is in flight is quarantined, and no wait may help a
            // request. (Another device of the pool may have been lost before.)
            Error::Impossible { .. } if crate::exit::exiting() => {
                let mut lost = self.0.devices.iter().filter_map(Device::lost);
                lost.find(|lost| lost.class() == ErrorClass::DriverShutdown).unwrap_or(error)
            }
            error => error,
        };
        self.0.errors.note(&error);
        let reason = match &error {
            Error::Exhausted(_) => Some(0),
            Error::QueueFull { .. } => Some(1),
            Error::Impossible { .. } => Some(2),
            _ => None,
        };
        if let Some(reason) = reason {
            self.0.refused[reason].fetch_add(1, Ordering::Relaxed);
        }
        if let Error::Timeout(waited) = &error {
            if self.may_report() {
                stuck::report(self.name(), waited.time, None, &self.0.central, &self.0.devices);
            }
        }
        error.of_pool(self.name())
    }

    /// Whether a wait may be reported now, by the caller: one in [`stuck::REPORT_INTERVAL`].
    fn may_report(&self) -> bool {
        let (mut reported, now) = (self.0.reported.lock(), Instant::now());
        let may = reported.is_none_or(|last| now.duration_since(last) >= stuck::REPORT_INTERVAL);
        if may {
            *reported = Some(now);
        }
        may
    }

    /// Closes the open sequence numbers of the devices' streams and asks what is complete: of the
    /// streams that the reaper would look at soon. Whether anything came back.
    pub(crate) fn reap(&self) -> bool {
        // Nothing else looks at the streams of a device by hand.
        let all = self.is_by_hand();
        self.0.devices.iter().fold(false, |any, device| device.listing().look(all) | any)
    }

    /// Moves devices by hand one step, and takes back what is complete. Whether anything changed.
    fn advance(&self) -> bool {
        let moved = self.0.devices.iter().any(|d| d.context().advance());
        self.reap() | moved
    }

    /// Waits where nothing moves by itself: moves the devices for as long as that changes anything.
    fn wait_by_hand(&self, key: usize, len: usize, since: Instant) -> Result<Vec<Fresh>> {
        loop {
            if let Some(outcome) = self.0.central.look(key, None) {
                return outcome;
            }
            if !self.advance() {
                return self.0.central.give_up(key, len, since);
            }
        }
    }

    /// Has the timer report long waits. Every request that has joined a queue calls it.
    fn watch_waits(&self) {
        // Relaxed: the planned look clears this and then locks the queue, which this caller joined.
        if self.is_by_hand() || self.0.watched.swap(true, Ordering::Relaxed) {
            return;
        }
        let pool = self.downgrade();
        crate::timer::after(stuck::LONG_WAIT, move || {
            let Some(pool) = pool.upgrade() else { return };
            pool.0.watched.store(false, Ordering::Relaxed);
            let central = pool.central();
            let Some(long) = central.longest_wait() else { return };
            if long.waited >= stuck::LONG_WAIT && pool.may_report() {
                stuck::report(pool.name(), long.waited, Some(&long), central, pool.devices());
            }
            pool.watch_waits();
        });
    }

    /// The pool's name in events, statistics and reports. No two pools of a process have the same
    /// name at the same time: see [`PoolBuilder::name`].
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name.0
    }

    pub(crate) fn downgrade(&self) -> WeakPool {
        WeakPool(Arc::downgrade(&self.0))
    }

    /// What there is for a request that is not served, as its error. Does not try.
    pub(crate) fn shortage(&self, request: Request) -> Error {
        let short = |_| self.0.central.exhausted(request.len).of_pool(self.name());
        self.wants(&[request]).map_or_else(|error| error, short)
    }

    /// [`Error::Mismatch`], unless the pool serves the device of this context.
    pub(crate) fn check_serves(&self, context: &crate::device::context::Context) -> Result<()> {
        self.0.central.config().check_serves("a pool", context)
    }

    pub(crate) fn central(&self) -> &Arc<CentralPool> {
        &self.0.central
    }

    /// The devices that the pool serves.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// Bytes that the pool may hold, and the longest buffer that it can ever serve.
    pub(crate) fn room(&self) -> (usize, usize) {
        let config = self.0.central.config();
        (config.capacity, config.largest)
    }
}

/// How a request waits that cannot be granted at once.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait<'a> {
    /// Not at all: it is granted now or refused.
    None,
    /// As `None`, for a caller that tries again later: while memory is being pinned, it leaves busy
    /// threads their caches.
    Retry,
    /// On the calling thread, for at most this time.
    Thread(Option<Duration>),
    /// In the queue, for the task that this wakes.
    Task(&'a Waker),
}

/// What a request came to without waiting.
enum Begun {
    Granted(Vec<Fresh>),
    /// The request waits in the central pool's queue, under this key.
    Waits(usize),
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        self.central.close();
    }
}

/// A handle that does not keep the pool open.
#[derive(Clone, Debug)]
pub(crate) struct WeakPool(Weak<PoolInner>);

impl WeakPool {
    pub(crate) fn upgrade(&self) -> Option<Pool> {
        self.0.upgrade().map(Pool)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("name", &self.name())
            .field("devices", &self.0.devices)
            .field("stats", &self.stats())
            .finish()
    }
}

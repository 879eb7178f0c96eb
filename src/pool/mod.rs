//! The public face: building a pool, checking out, trimming, shutting down.
//!
//! The pool owns no mechanism. It puts those of the other modules in order, so that none of them calls upward:
//!
//! 1. try: a hit, or what the central pool can find ([`crate::central`]) without taking from threads at work what they
//!    cache;
//! 2. ask: let the streams say what is done, since buffers may be ready to come back;
//! 3. claim, for a stream-ready request: take over a segment in flight on that very stream;
//! 4. grow: have the worker pin another region, up to the capacity; where that is reached, take back all that is
//!    cached;
//! 5. wait: join the queue, as a thread or as a task.
//!
//! | module | what is in it |
//! | --- | --- |
//! | `build` | making the pool, and what keeps its devices open |
//! | `request` | what is asked for |
//! | `waiting`, `future` | steps 4 and 5 for a thread, and for a task |
//! | `memory` | pinning, regions, trimming, the end |
//! | `stats` | numbers, and the check |

mod build;
mod future;
mod memory;
mod name;
mod request;
mod stats;
mod waiting;

use std::fmt;
use std::panic::Location;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::buffer::{HostBuf, PinnedBuf, StreamBuf, Token, UnpinnedBuf};
use crate::central::{CentralPool, Fresh, ReclaimLevel, Segment, Take, Want};
use crate::config::PoolBuilder;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::freelist::Descriptor;
use crate::region::Regions;
use crate::segment::{Class, Placement, SEGMENT_ALIGN};
use crate::stream::Stream;
use crate::telemetry::counters::ErrorTally;
use crate::telemetry::ledger::{CheckoutSite, SAMPLE};
use crate::telemetry::stuck;

pub use future::{Checkout, CheckoutMany};
use name::Name;
pub use request::Request;
pub use stats::{Census, PoolStats, Shutdown};
use waiting::WaitLimit;

/// A pool of page-locked memory. Cloning gives another handle to the same pool.
///
/// When the last handle is dropped the pool closes without waiting: buffers that are out stay usable, and the memory
/// goes when the last of them is back.
#[derive(Clone)]
pub struct Pool(Arc<PoolInner>);

struct PoolInner {
    /// What a hit needs, first.
    main: Store,
    /// Where the devices hang on several NUMA nodes: a store for each of the nodes but the first device's, and the
    /// contexts of the devices there.
    nodes: Vec<(Vec<u64>, Store)>,
    reserves: Vec<(String, Store)>,
    devices: Vec<Device>,
    name: Name,
    misses: AtomicU64,
    /// Of the misses, those that nothing cached could serve.
    slow: AtomicU64,
    fallbacks: AtomicU64,
    fallback_bytes: AtomicU64,
    errors: ErrorTally,
    /// When the last report on what is stuck was made.
    reported: crate::locks::Mutex<Option<Instant>>,
}

/// A central pool and the regions that feed it. The reserves have one each, since bytes that only some may take must
/// not be in anybody's cache.
#[derive(Clone)]
struct Store {
    central: Arc<CentralPool>,
    regions: Arc<Regions>,
}

impl Pool {
    /// Starts setting up a pool that serves `device`.
    pub fn builder(device: &Device) -> PoolBuilder {
        PoolBuilder::new(device)
    }

    // --- checking out ------------------------------------------------------------------------------------------------
    //
    // Inlined always: a hit is shorter than what a call costs that returns a buffer through memory, where it is written
    // in words and read back in wider moves, which the processor cannot forward.

    /// A host-ready buffer. Waits, if need be for ever, until the pool has one: see
    /// [`try_checkout`](Self::try_checkout), [`checkout_timeout`](Self::checkout_timeout) and
    /// [`checkout_async`](Self::checkout_async) for the other ways.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::TooLong`], [`Error::BadAlignment`], [`Error::Config`] for an unknown reserve;
    /// [`Error::Closed`], [`Error::Forked`]; [`Error::Impossible`], and what made growing fail, when no wait can help;
    /// [`Error::Exhausted`] in place of a wait on a thread of this crate, and in a waker or where an owner is dropped
    /// that was left with it, whatever thread that is on.
    #[inline(always)]
    #[track_caller]
    pub fn checkout<'a>(&self, request: impl Into<Request<'a>>) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), || WaitLimit::Forever)
    }

    /// A host-ready buffer, if there is one. Where there is none, growing is started, so that a later try may succeed.
    /// As long as the pool can grow, what threads at work keep for themselves does not count: see
    /// [`PoolBuilder::thread_cache`].
    ///
    /// # Errors
    /// As for [`checkout`](Self::checkout), and [`Error::Exhausted`].
    #[inline(always)]
    #[track_caller]
    pub fn try_checkout<'a>(&self, request: impl Into<Request<'a>>) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), || WaitLimit::None)
    }

    /// A host-ready buffer, waiting for at most so long.
    ///
    /// # Errors
    /// As for [`checkout`](Self::checkout), and [`Error::Timeout`].
    #[inline]
    #[track_caller]
    pub fn checkout_timeout<'a>(
        &self,
        request: impl Into<Request<'a>>,
        timeout: Duration,
    ) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), || WaitLimit::For(timeout))
    }

    /// The ways join with what fits registers, and the result is made once, behind them: were it written by the slow
    /// path too, it would be in memory, put there in words and moved on in wider pieces, for which the processor has to
    /// wait.
    #[inline(always)]
    #[track_caller]
    #[allow(unsafe_code)]
    fn checkout_with(&self, request: Request<'_>, patience: impl FnOnce() -> WaitLimit) -> Result<PinnedBuf> {
        let fresh = match self.hit_with(request, CentralPool::hit) {
            Some(fresh) => fresh,
            None => {
                let mut error = Error::Closed;
                let Request { len, align, reserve, near, tag } = request;
                let origin = CheckoutSite { tag, site: Some(Location::caller()) };
                match self.checkout_slow(len, align, reserve, near, origin, patience(), &mut error) {
                    // SAFETY: returned just now, for this request.
                    Some(parts) => unsafe { Fresh::from_parts(parts, len) },
                    None => return Err(error),
                }
            }
        };
        Ok(fresh.into())
    }

    /// A host-ready buffer, for a task. Any runtime will do. Dropping the future leaves no trace.
    #[must_use = "nothing happens until it is awaited"]
    #[track_caller]
    pub fn checkout_async<'a>(&self, request: impl Into<Request<'a>>) -> Checkout {
        Checkout(self.checkout_many_async([request.into()]))
    }

    /// Several buffers together, or none: nobody holds half of what it needs while it waits for the other half.
    ///
    /// # Errors
    /// As for [`checkout_timeout`](Self::checkout_timeout); all requests must name the same reserve or none.
    #[track_caller]
    pub fn checkout_many(
        &self,
        requests: &[Request<'_>],
        timeout: Option<Duration>,
    ) -> Result<Vec<PinnedBuf>> {
        let patience = timeout.map_or(WaitLimit::Forever, WaitLimit::For);
        self.acquire(requests, patience, Location::caller())
    }

    /// The same for a task.
    #[must_use = "nothing happens until it is awaited"]
    #[track_caller]
    pub fn checkout_many_async<'a>(&self, requests: impl AsRef<[Request<'a>]>) -> CheckoutMany {
        let requests = requests.as_ref();
        // What borrows the caller's string is looked up now; the future owns the rest.
        let plan = self.plan(requests).map(|e| (e.first, e.store.central.number(), e.wants));
        let tags = requests.iter().map(|r| r.tag).collect();
        let site = Location::caller();
        CheckoutMany { pool: self.clone(), plan: Some(plan), waiting: None, first: None, tags, site }
    }

    /// A host-ready buffer whose bytes are there already, all of them zero, and its length with them. Waits like
    /// [`checkout`](Self::checkout). The CPU writes the zeros; where a program runs on the device itself (Ascend in RC
    /// mode) `aclrtMemset` does.
    ///
    /// # Errors
    /// As for [`checkout`](Self::checkout); what the driver says, where it writes them.
    pub fn checkout_zeroed<'a>(&self, request: impl Into<Request<'a>>) -> Result<PinnedBuf> {
        let request = request.into();
        let buf = self.checkout(request)?;
        // The first that lives: zeros are the same whoever writes them, and a lost one writes none.
        let alive = self.0.devices.iter().find(|device| device.lost().is_none());
        buf.zeroed(alive.unwrap_or(&self.0.devices[0]).context(), request.len)
    }

    /// A buffer, pinned if there is one at once, else plain memory, which says so by its type and is counted. Plain
    /// memory has no alignment to rely on, whatever was asked for.
    ///
    /// # Errors
    /// As for [`try_checkout`](Self::try_checkout) but [`Error::Exhausted`]; [`Error::OutOfMemory`].
    #[track_caller]
    pub fn checkout_or_unpinned<'a>(&self, request: impl Into<Request<'a>>) -> Result<HostBuf> {
        let request = request.into();
        match self.try_checkout(request) {
            Ok(buf) => Ok(HostBuf::Pinned(buf)),
            Err(error @ (Error::Exhausted { .. } | Error::Impossible { .. })) => {
                let buf = UnpinnedBuf::new(request.len)?;
                self.0.fallback_bytes.fetch_add(request.len as u64, Ordering::Relaxed);
                if self.0.fallbacks.fetch_add(1, Ordering::Relaxed) == 0 {
                    crate::foreign::warn!(
                        target: "pinpool::pool::fallback", pool = self.name(), bytes = request.len, %error,
                        "the pool is short: plain memory is given out; further ones are counted, and logged as debug"
                    );
                } else {
                    crate::foreign::debug!(
                        target: "pinpool::pool::fallback", pool = self.name(), bytes = request.len, %error,
                        "the pool is short: plain memory is given out"
                    );
                }
                Ok(HostBuf::Unpinned(buf))
            }
            Err(error) => Err(error),
        }
    }

    /// A stream-ready buffer for `stream`: free, or in flight on that very stream alone. Waits like
    /// [`checkout`](Self::checkout), but for less, since what is in flight on that stream can be had at once; unless a
    /// request waits for memory: what is in flight is on its way to that one, and this request waits behind it.
    ///
    /// It blocks the thread. A task asks [`try_checkout_on`](Self::try_checkout_on) first, and then awaits
    /// [`checkout_async`](Self::checkout_async): a download completes in a [`PinnedBuf`] as well.
    ///
    /// # Errors
    /// As for [`checkout`](Self::checkout), and [`Error::WrongDevice`] for a stream of a device that the pool does not
    /// serve.
    #[track_caller]
    pub fn checkout_on<'a>(&self, stream: &Stream, request: impl Into<Request<'a>>) -> Result<StreamBuf> {
        self.checkout_on_with(stream, request.into(), WaitLimit::Forever, Location::caller())
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// As for [`checkout_on`](Self::checkout_on), and [`Error::Exhausted`], also where only what a waiting request is
    /// to get is in flight on the stream.
    #[track_caller]
    pub fn try_checkout_on<'a>(&self, stream: &Stream, request: impl Into<Request<'a>>) -> Result<StreamBuf> {
        self.checkout_on_with(stream, request.into(), WaitLimit::None, Location::caller())
    }

    fn checkout_on_with(
        &self,
        stream: &Stream,
        request: Request<'_>,
        patience: WaitLimit,
        site: &'static Location<'static>,
    ) -> Result<StreamBuf> {
        let timeline = stream.timeline();
        let own = (timeline.context().id(), stream.device().name());
        let request = Request { near: request.near.or(Some(own)), ..request };
        if !self.0.main.central.config().serves.contains(&timeline.context().id()) {
            return Err(Error::WrongDevice { device: stream.device().name().into() });
        }
        let ready = |buf: PinnedBuf| StreamBuf::ready(timeline.clone(), buf);
        if let Some(fresh) = self.hit_with(request, CentralPool::hit) {
            return Ok(ready(fresh.into()));
        }
        let plan = self.plan(&[request])?;
        if let Some(mut granted) = self.try_plan(&plan, ReclaimLevel::Idle)? {
            self.missed();
            let mut bufs = self.entered(std::mem::take(&mut granted), [request.tag], site);
            return bufs.pop().map(ready).ok_or(Error::ZeroLength);
        }
        if let Placement::Class(class) = plan.wants[0].placement {
            let stores = std::iter::once(plan.store).chain(plan.first.is_some().then_some(&self.0.main));
            // A claim takes what is about to come back, and a waiter waits for just that: while there is one, this
            // request joins the queue behind it.
            for central in stores.map(|store| &store.central).filter(|central| !central.awaited()) {
                if let Some((key, mut segment)) = timeline.claim(central, class) {
                    self.missed();
                    // Both names of the segment, ours and the claim's, are to carry the new length.
                    timeline.rebook_claim(key, request.len);
                    segment.relabel(request.len);
                    central.enter_again(&segment, CheckoutSite { tag: request.tag, site: Some(site) });
                    return Ok(StreamBuf::claimed(timeline.clone(), key, segment));
                }
            }
        }
        let bufs = self.acquire(&[request], patience, site)?;
        bufs.into_iter().next().map(ready).ok_or(Error::ZeroLength)
    }

    /// Takes back a buffer that went out as a token.
    ///
    /// # Errors
    /// [`Error::StaleToken`] for one of another pool, one redeemed before, or one made up: [`Token`] says what that
    /// rests on; [`Error::Forked`].
    pub fn redeem(&self, token: Token) -> Result<PinnedBuf> {
        crate::os::check_fork()?;
        // The secret tells the stores apart.
        self.stores().find_map(|s| PinnedBuf::redeem(&s.central, token)).ok_or(Error::StaleToken)
    }

    /// By way of `hit` only: in this thread's thread cache, or in a transfer cache.
    #[inline(always)]
    fn hit_with(
        &self,
        request: Request<'_>,
        hit: impl FnOnce(&CentralPool, Class, usize) -> Option<Fresh>,
    ) -> Option<Fresh> {
        if request.align > SEGMENT_ALIGN || !request.align.is_power_of_two() || request.reserve.is_some() {
            return None;
        }
        let class = Class::of(request.len)?;
        let store = match request.near {
            None => &self.0.main,
            Some((near, _)) => self.near(near)?,
        };
        hit(&store.central, class, request.len)
    }

    /// The store on the node of a device. `None`: the pool does not serve it.
    fn near(&self, context: u64) -> Option<&Store> {
        let other = self.0.nodes.iter().find(|node| node.0.contains(&context)).map(|node| &node.1);
        let main = || self.0.main.central.config().serves.contains(&context).then_some(&self.0.main);
        other.or_else(main)
    }

    /// Everything else. Takes the request in parts: whole, it would be written to memory before each hit.
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments, reason = "see above")]
    fn checkout_slow(
        &self,
        len: usize,
        align: usize,
        reserve: Option<&str>,
        near: Option<(u64, &str)>,
        origin: CheckoutSite,
        patience: WaitLimit,
        error: &mut Error,
    ) -> Option<(NonNull<CentralPool>, NonNull<Descriptor>)> {
        let CheckoutSite { tag, site } = origin;
        let request = Request { len, align, reserve, near, tag };
        // What another thread has left on a transfer cache costs little, and less than all that follows.
        if let Some(fresh) = self.hit_with(request, CentralPool::refill) {
            self.missed();
            return Some(fresh.into_segment().into_parts());
        }
        match self.acquire(&[request], patience, site.unwrap_or(Location::caller())) {
            Ok(mut bufs) => bufs.pop().map(PinnedBuf::into_segment).map(Segment::into_parts),
            Err(why) => {
                *error = why;
                None
            }
        }
    }

    /// Checks requests, and finds where they may be served from.
    fn plan(&self, requests: &[Request<'_>]) -> Result<RequestPlan<'_>> {
        let reserve = requests.first().and_then(|r| r.reserve);
        if requests.iter().any(|r| r.reserve != reserve) {
            return Err(Error::Config(
                "buffers that are asked for together must name the same reserve".into(),
            ));
        }
        let place =
            |s: &Store| requests.iter().map(|r| s.central.place(r.len, r.align)).collect::<Result<Vec<_>>>();
        let near = requests.first().and_then(|r| r.near);
        if requests.iter().any(|r| r.near != near) {
            return Err(Error::Config(
                "buffers that are asked for together must be near the same device".into(),
            ));
        }
        let main = &self.0.main;
        let store = match near {
            None => main,
            Some((near, name)) => {
                self.near(near).ok_or_else(|| Error::WrongDevice { device: name.into() })?
            }
        };
        let Some(name) = reserve else { return Ok(RequestPlan { first: None, store, wants: place(store)? }) };
        let known = self.0.reserves.iter().find(|r| r.0 == name);
        let (_, store) = known.ok_or_else(|| Error::Config(format!("the pool has no reserve {name:?}")))?;
        match (place(main), place(store)) {
            (first, Ok(wants)) => Ok(RequestPlan { first: first.ok(), store, wants }),
            // Larger than the reserve: then it is like any other request.
            (Ok(wants), Err(_)) => Ok(RequestPlan { first: None, store: main, wants }),
            (Err(error), Err(_)) => Err(error),
        }
    }

    /// Everything that can be had without waiting for anybody: from the pool proper, all that is cached included, and
    /// then from the reserve.
    fn try_plan(&self, plan: &RequestPlan<'_>, level: ReclaimLevel) -> Result<Option<Vec<Fresh>>> {
        let first = plan.first.iter().map(|wants| (&self.0.main, wants, ReclaimLevel::All));
        for (store, wants, level) in first.chain([(plan.store, &plan.wants, level)]) {
            let granted = self.try_all(store, wants, level)?;
            if granted.is_some() {
                return Ok(granted);
            }
        }
        Ok(None)
    }

    /// The same, and if there is nothing: asks the streams what is done, and has the memory grow.
    fn try_hard(&self, plan: &RequestPlan<'_>) -> Result<Obtained> {
        self.missed();
        if let Some(got) = self.try_plan(plan, ReclaimLevel::Idle)? {
            return Ok(Obtained::Granted(got));
        }
        // Memory is short: whatever is done must come back now.
        if self.reap() {
            if let Some(got) = self.try_plan(plan, ReclaimLevel::Idle)? {
                return Ok(Obtained::Granted(got));
            }
        }
        // Where no more can be had of the system, what other threads cache and use, too.
        if !plan.store.central.may_grow(&plan.wants) {
            if let Some(got) = self.try_plan(plan, ReclaimLevel::All)? {
                return Ok(Obtained::Granted(got));
            }
        }
        if let Some(wants) = &plan.first {
            self.0.main.central.grow(wants);
        }
        let growing = plan.store.central.grow(&plan.wants);
        // On a stepped device growing is over already.
        if self.stepped() {
            if let Some(got) = self.try_plan(plan, ReclaimLevel::Idle)? {
                return Ok(Obtained::Granted(got));
            }
        }
        Ok(Obtained::Nothing { growing })
    }

    /// Counts a request, however often it is tried.
    fn missed(&self) {
        self.0.misses.fetch_add(1, Ordering::Relaxed);
    }

    fn stepped(&self) -> bool {
        self.0.devices[0].context().driver().stepped().is_some()
    }

    fn try_all(&self, store: &Store, wants: &[Want], level: ReclaimLevel) -> Result<Option<Vec<Fresh>>> {
        match wants {
            [want] => Ok(match store.central.try_take(*want, level)? {
                Take::Got(fresh) => Some(vec![fresh]),
                Take::Empty => None,
            }),
            _ => store.central.try_take_all(wants, level),
        }
    }

    fn acquire(
        &self,
        requests: &[Request<'_>],
        patience: WaitLimit,
        site: &'static Location<'static>,
    ) -> Result<Vec<PinnedBuf>> {
        // The deadline counts from here, and so does what a timeout says was waited: that is never less than was asked
        // for.
        let since = Instant::now();
        match self.acquire_all(requests, patience, since) {
            Ok(granted) => Ok(self.entered(granted, requests.iter().map(|r| r.tag), site)),
            Err(error) => {
                self.failed(&error);
                Err(error)
            }
        }
    }

    /// Makes buffers of what was granted on the slow path, and enters some of them in the ledger, or all.
    fn entered(
        &self,
        mut granted: Vec<Fresh>,
        tags: impl IntoIterator<Item = Option<&'static str>>,
        site: &'static Location<'static>,
    ) -> Vec<PinnedBuf> {
        // Relaxed: any one of so many will do. Misses are not counted for it: others than these are among them, and
        // where the two kinds take turns always the same numbers would come here.
        let sampled = self.0.slow.fetch_add(1, Ordering::Relaxed) % SAMPLE == 0;
        for (fresh, tag) in granted.iter_mut().zip(tags) {
            if sampled || fresh.segment().central().tracks() {
                CentralPool::enter(fresh, CheckoutSite { tag, site: Some(site) });
            }
        }
        granted.into_iter().map(PinnedBuf::from).collect()
    }

    /// A checkout ended with an error.
    fn failed(&self, error: &Error) {
        self.0.errors.note(error);
        if let Error::Timeout(waited) = error {
            let mut reported = self.0.reported.lock();
            let now = Instant::now();
            if reported.is_none_or(|last| now.duration_since(last) >= stuck::REPORT_INTERVAL) {
                *reported = Some(now);
                drop(reported);
                stuck::report(self.name(), *waited, self.centrals(), &self.0.devices);
            }
        }
    }

    /// Closes what is open on the devices' streams and asks what is done. Whether anything came back.
    pub(crate) fn reap(&self) -> bool {
        self.0.devices.iter().fold(false, |any, d| d.reap() | any)
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// What the pool is called in events, statistics and reports, which no other pool of the process is at the same
    /// time: see [`PoolBuilder::name`].
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn downgrade(&self) -> WeakPool {
        WeakPool(Arc::downgrade(&self.0))
    }

    /// Whether a device can reach the pool's memory.
    pub(crate) fn serves(&self, context: &crate::device::context::Context) -> bool {
        self.0.main.central.config().serves.contains(&context.id())
    }

    /// The longest request that the pool proper could ever serve, in bytes.
    pub(crate) fn longest(&self) -> usize {
        self.0.main.central.config().largest
    }

    /// The central pools of all stores.
    pub(crate) fn centrals(&self) -> impl Iterator<Item = &Arc<CentralPool>> {
        self.stores().map(|store| &store.central)
    }

    fn stores(&self) -> impl Iterator<Item = &Store> {
        self.growing().chain(self.0.reserves.iter().map(|r| &r.1))
    }

    /// The pool proper, on each of its nodes.
    fn growing(&self) -> impl Iterator<Item = &Store> {
        std::iter::once(&self.0.main).chain(self.0.nodes.iter().map(|node| &node.1))
    }

    /// The devices that the pool serves.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// Bytes that the pool proper may hold, reserves left out, and the longest buffer that it can ever serve.
    pub(crate) fn room(&self) -> (usize, usize) {
        let capacity = self.growing().map(|s| s.central.config().capacity).sum();
        (capacity, self.0.main.central.config().largest)
    }
}

/// What was found without waiting.
enum Obtained {
    Granted(Vec<Fresh>),
    Nothing {
        /// Whether memory for the request is on its way.
        growing: bool,
    },
}

/// An request plan that a future keeps: wants for the pool proper, the number of the central pool to wait at, wants for
/// that.
type OwnedPlan = (Option<Vec<Want>>, u64, Vec<Want>);

/// What is asked for, and of whom.
struct RequestPlan<'a> {
    /// For a request that names a reserve: the pool proper is asked first, since the reserve is for when it has
    /// nothing.
    first: Option<Vec<Want>>,
    /// Where the request waits.
    store: &'a Store,
    wants: Vec<Want>,
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        self.main.central.close();
        self.nodes.iter().for_each(|n| n.1.central.close());
        self.reserves.iter().for_each(|r| r.1.central.close());
    }
}

/// A pool that is not kept open.
#[derive(Clone)]
pub(crate) struct WeakPool(Weak<PoolInner>);

impl WeakPool {
    pub(crate) fn upgrade(&self) -> Option<Pool> {
        self.0.upgrade().map(Pool)
    }
}

impl fmt::Debug for WeakPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakPool").finish_non_exhaustive()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("devices", &self.0.devices).field("stats", &self.stats()).finish()
    }
}

//! The public face: building a pool, checking out, trimming, shutting down.
//!
//! The pool owns no mechanism. It puts those of the other modules in order, so that none of them calls upward:
//!
//! 1. try: a hit, or what the depot can find ([`crate::depot`]);
//! 2. ask: let the streams say what is done, since buffers may be ready to come back;
//! 3. claim, for a stream-ready request: take over a segment in flight on that very stream;
//! 4. grow: have the worker pin another region, up to the capacity;
//! 5. wait: join the queue, as a thread or as a task.

use std::fmt;
use std::future::Future;
use std::ops::DerefMut;
use std::panic::Location;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use stable_deref_trait::StableDeref;

use crate::buffer::{HostBuf, PinnedBuf, StreamBuf, Token, UnpinnedBuf};
use crate::config::{Plan, PoolBuilder};
use crate::depot::{self, Depot, DepotConfig, DepotSnapshot, Fresh, Outcome, Segment, Take, Wake, Want};
use crate::error::{Error, RegisterError, Result};
use crate::freelist::{Slot, state};
use crate::region::{Pinning, RegionInfo, RegionOptions, Regions};
use crate::runtime::Device;
use crate::segment::{Class, Placement, SEGMENT_ALIGN};
use crate::stream::Stream;
use crate::telemetry::counters::{ErrorCounts, ErrorTally};
use crate::telemetry::ledger::{Origin, SAMPLE};
use crate::telemetry::stuck;

/// What is asked for. A plain length is a request too: `pool.checkout(4096)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    len: usize,
    align: usize,
    reserve: Option<&'a str>,
    /// The context of the device that it is to be near, and its name.
    near: Option<(u64, &'a str)>,
    tag: Option<&'static str>,
}

impl<'a> Request<'a> {
    /// A buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { len, align: SEGMENT_ALIGN, reserve: None, near: None, tag: None }
    }

    /// Starting on a multiple of `align` bytes: a power of two of at most 2 MiB. (Every buffer starts on one of 64.) Memory
    /// that the driver allocates starts on a page only, so of each extent there as much may be lost in front.
    #[must_use]
    pub fn align(mut self, align: usize) -> Self {
        self.align = align;
        self
    }

    /// Bytes that this request takes of a pool's capacity, rounding included. To size a pool for several buffers,
    /// multiply, and add a page (4 KiB) for each: segments come in runs of whole pages.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::TooLong`] on overflow, [`Error::BadAlignment`].
    pub fn segment_bytes(&self) -> Result<usize> {
        Placement::of(self.len, self.align).map(Placement::bytes)
    }

    /// From the reserve of this name, if the pool proper has nothing free. Reserves lie near the pool's first device.
    #[must_use]
    pub fn reserve(mut self, name: &'a str) -> Self {
        self.reserve = Some(name);
        self
    }

    /// From memory on the NUMA node of this device, one of the pool's. It makes a difference where the pool's devices hang
    /// on several nodes; see [`PoolBuilder::device`]. A device that the pool does not serve is [`Error::WrongDevice`]. A request that names a reserve too comes from the reserve's node.
    #[must_use]
    pub fn near(mut self, device: &'a Device) -> Self {
        self.near = Some((device.context().id(), device.name()));
        self
    }
}

impl Request<'_> {
    /// What the buffer is for, as [`Pool::stuck`] shall say it. Kept where the checkout is
    /// [entered](PoolBuilder::track_checkouts), and costs nothing elsewhere.
    #[must_use]
    pub fn tag(mut self, tag: &'static str) -> Self {
        self.tag = Some(tag);
        self
    }
}

impl From<usize> for Request<'_> {
    #[inline(always)]
    fn from(len: usize) -> Self {
        Self { len, align: SEGMENT_ALIGN, reserve: None, near: None, tag: None }
    }
}

/// A pool of page-locked memory. Cloning gives another handle to the same pool.
///
/// When the last handle is dropped the pool closes without waiting: buffers that are out stay usable, and the memory
/// goes when the last of them is back.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    /// What a hit needs, first.
    main: Store,
    /// Where the devices hang on several NUMA nodes: a store for each of the nodes but the first device's, and the contexts
    /// of the devices there.
    nodes: Vec<(Vec<u64>, Store)>,
    reserves: Vec<(String, Store)>,
    devices: Vec<Device>,
    name: String,
    misses: AtomicU64,
    /// Of the misses, those that nothing cached could serve.
    slow: AtomicU64,
    fallbacks: AtomicU64,
    fallback_bytes: AtomicU64,
    errors: ErrorTally,
    /// When the last report on what is stuck was made.
    reported: parking_lot::Mutex<Option<Instant>>,
}

/// A depot and the regions that feed it. The reserves have one each, since bytes that only some may take must not be in
/// anybody's cache.
#[derive(Clone)]
struct Store {
    depot: Arc<Depot>,
    regions: Arc<Regions>,
}

/// A pool's bytes and counts at one moment.
///
/// `free_bytes + checked_out_bytes + in_flight_bytes + quarantined_bytes + cut_bytes = pinned_bytes + unpinned_bytes`,
/// always; each part is exact when nobody moves, and otherwise off by no more than the calls under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Locked bytes.
    pub pinned_bytes: usize,
    /// Bytes that the pool serves and that are not locked: the system refused to, or it is managed memory.
    pub unpinned_bytes: usize,
    /// Bytes that can be checked out.
    pub free_bytes: usize,
    /// Of the free bytes, those that threads keep for their next checkouts.
    pub cached_bytes: usize,
    /// Bytes of buffers in somebody's hands, rounding included.
    pub checked_out_bytes: usize,
    /// Bytes that a device may still use. A buffer shared by `Arc` is not among them: it counts as checked out until the
    /// last that has it is gone, a device included.
    pub in_flight_bytes: usize,
    /// Of the bytes in flight, those claimed for stream-ready reuse.
    pub claimed_bytes: usize,
    /// Bytes never to be reused.
    pub quarantined_bytes: usize,
    /// Bytes between segments that no segment covers.
    pub cut_bytes: usize,
    /// Bytes asked for by all that is checked out, in flight or quarantined.
    pub requested_bytes: usize,
    /// Bytes given to these: the sum of the three.
    pub granted_bytes: usize,
    /// The difference: bytes lost to rounding, which are within the three. (What is lost between segments is
    /// [`cut_bytes`](Self::cut_bytes).)
    pub rounding_bytes: usize,
    /// The longest free range in one piece, not counting what threads keep.
    pub largest_free_bytes: usize,
    /// The cap on pinned and unpinned bytes.
    pub capacity_bytes: usize,
    /// Segments given out since the pool was built.
    pub checkouts: u64,
    /// Segments that came back.
    pub returns: u64,
    /// Requests that the caller's own cache could not serve, successful or not.
    pub misses: u64,
    /// Times that what threads keep was taken back.
    pub collects: u64,
    /// Regions asked of the system because a request found nothing, those that came only in part or not at all among them.
    pub growths: u64,
    /// Times that pinning ended early.
    pub growth_failures: u64,
    /// Requests that had to wait.
    pub waits: u64,
    /// Waits given up.
    pub timeouts: u64,
    /// Requests waiting now.
    pub waiting: usize,
    /// Plain buffers given out because the pool was short.
    pub unpinned_fallbacks: u64,
    /// Their bytes.
    pub unpinned_fallback_bytes: u64,
    /// Checkouts that ended with an error, by what it means. [`Error::Exhausted`] and [`Error::Timeout`] are matters of the
    /// moment; one that then falls back to plain memory is among them.
    pub errors: ErrorCounts,
}

/// How [`Pool::shutdown`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Whether everything came back.
    pub drained: bool,
    /// Segments that are still out or in flight. Their memory stays for as long as they do.
    pub outstanding: u64,
    /// Bytes never to be reused; their memory stays for good.
    pub quarantined_bytes: usize,
}

/// What [`Pool::check`] found, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Census {
    /// Bytes of free segments in runs, shards and racks (free runs are not cut into segments).
    pub free: usize,
    /// Bytes checked out, or landed and waiting for their handle.
    pub checked_out: usize,
    /// Bytes in flight.
    pub in_flight: usize,
    /// Of these, claimed.
    pub claimed: usize,
    /// Bytes quarantined.
    pub quarantined: usize,
}

impl Pool {
    /// Starts setting up a pool that serves `device`.
    pub fn builder(device: &Device) -> PoolBuilder {
        PoolBuilder::new(device)
    }

    // --- checking out ------------------------------------------------------------------------------------------------
    //
    // Inlined always: a hit is shorter than what a call costs that returns a buffer through memory, where it is written in
    // words and read back in wider moves, which the processor cannot forward.

    /// A host-ready buffer. Waits, if need be for ever, until the pool has one: see
    /// [`try_checkout`](Self::try_checkout), [`checkout_timeout`](Self::checkout_timeout) and
    /// [`checkout_async`](Self::checkout_async) for the other ways.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::TooLong`], [`Error::BadAlignment`], [`Error::Config`] for an unknown reserve;
    /// [`Error::Closed`], [`Error::Forked`]; [`Error::Impossible`], and what made growing fail, when no wait can help;
    /// [`Error::Exhausted`] in place of a wait on a thread of this crate (in a waker, or where an owner is dropped that was
    /// left with it).
    #[inline(always)]
    #[track_caller]
    pub fn checkout<'a>(&self, request: impl Into<Request<'a>>) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), || Patience::Forever)
    }

    /// A host-ready buffer, if there is one. Where there is none, growing is started, so that a later try may succeed.
    ///
    /// # Errors
    /// As for [`checkout`](Self::checkout), and [`Error::Exhausted`].
    #[inline(always)]
    #[track_caller]
    pub fn try_checkout<'a>(&self, request: impl Into<Request<'a>>) -> Result<PinnedBuf> {
        self.checkout_with(request.into(), || Patience::None)
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
        self.checkout_with(request.into(), || Patience::until(timeout))
    }

    /// The ways join with what fits registers, and the result is made once, behind them: were it written by the slow path
    /// too, it would be in memory, put there in words and moved on in wider pieces, for which the processor has to wait.
    #[inline(always)]
    #[track_caller]
    #[allow(unsafe_code)]
    fn checkout_with(&self, request: Request<'_>, patience: impl FnOnce() -> Patience) -> Result<PinnedBuf> {
        let fresh = match self.hit_with(request, Depot::hit) {
            Some(fresh) => fresh,
            None => {
                let mut error = Error::Closed;
                let Request { len, align, reserve, near, tag } = request;
                let origin = Origin { tag, site: Some(Location::caller()) };
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
        let patience = timeout.map_or(Patience::Forever, Patience::until);
        self.acquire(requests, patience, Location::caller())
    }

    /// The same for a task.
    #[must_use = "nothing happens until it is awaited"]
    #[track_caller]
    pub fn checkout_many_async<'a>(&self, requests: impl AsRef<[Request<'a>]>) -> CheckoutMany {
        let requests = requests.as_ref();
        // What borrows the caller's string is looked up now; the future owns the rest.
        let errand = self.errand(requests).map(|e| (e.first, e.store.depot.number(), e.wants));
        let tags = requests.iter().map(|r| r.tag).collect();
        let site = Location::caller();
        CheckoutMany { pool: self.clone(), errand: Some(errand), waiting: None, first: None, tags, site }
    }

    /// A host-ready buffer whose bytes are there already, all of them zero, and its length with them. Waits like
    /// [`checkout`](Self::checkout). The CPU writes the zeros; where a program runs on the device itself (Ascend in RC mode)
    /// `aclrtMemset` does.
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

    /// A buffer, pinned if there is one at once, else plain memory, which says so by its type and is counted. Plain memory
    /// has no alignment to rely on, whatever was asked for.
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
                    tracing::warn!(
                        target: "pinpool::pool::fallback", pool = self.name(), bytes = request.len, %error,
                        "the pool is short: plain memory is given out; further ones are counted, and logged as debug"
                    );
                } else {
                    tracing::debug!(
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
    /// [`checkout`](Self::checkout), but for less, since what is in flight on that stream can be had at once.
    ///
    /// It blocks the thread. A task asks [`try_checkout_on`](Self::try_checkout_on) first, and then awaits
    /// [`checkout_async`](Self::checkout_async): a download lands in a [`PinnedBuf`] as well.
    ///
    /// # Errors
    /// As for [`checkout`](Self::checkout), and [`Error::WrongDevice`] for a stream of a device that the pool does not
    /// serve.
    #[track_caller]
    pub fn checkout_on<'a>(&self, stream: &Stream, request: impl Into<Request<'a>>) -> Result<StreamBuf> {
        self.checkout_on_with(stream, request.into(), Patience::Forever, Location::caller())
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// As for [`checkout_on`](Self::checkout_on), and [`Error::Exhausted`].
    #[track_caller]
    pub fn try_checkout_on<'a>(&self, stream: &Stream, request: impl Into<Request<'a>>) -> Result<StreamBuf> {
        self.checkout_on_with(stream, request.into(), Patience::None, Location::caller())
    }

    fn checkout_on_with(
        &self,
        stream: &Stream,
        request: Request<'_>,
        patience: Patience,
        site: &'static Location<'static>,
    ) -> Result<StreamBuf> {
        let timeline = stream.timeline();
        let own = (timeline.context().id(), stream.device().name());
        let request = Request { near: request.near.or(Some(own)), ..request };
        if !self.0.main.depot.config().serves.contains(&timeline.context().id()) {
            return Err(Error::WrongDevice { device: stream.device().name().into() });
        }
        let ready = |buf: PinnedBuf| StreamBuf::ready(timeline.clone(), buf);
        if let Some(fresh) = self.hit_with(request, Depot::hit) {
            return Ok(ready(fresh.into()));
        }
        let errand = self.errand(&[request])?;
        if let Some(mut granted) = self.try_errand(&errand)? {
            self.missed();
            let mut bufs = self.entered(std::mem::take(&mut granted), [request.tag], site);
            return bufs.pop().map(ready).ok_or(Error::ZeroLength);
        }
        if let Placement::Class(class) = errand.wants[0].placement {
            let stores = std::iter::once(errand.store).chain(errand.first.is_some().then_some(&self.0.main));
            for depot in stores.map(|store| &store.depot) {
                if let Some((key, mut segment)) = timeline.claim(depot, class) {
                    self.missed();
                    // Both names of the segment, ours and the claim's, are to carry the new length.
                    timeline.rebook_claim(key, request.len);
                    segment.relabel(request.len);
                    depot.enter_again(&segment, Origin { tag: request.tag, site: Some(site) });
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
    /// [`Error::StaleToken`] for one of another pool, one redeemed before, or one made up.
    pub fn redeem(&self, token: Token) -> Result<PinnedBuf> {
        let store = self.stores().find(|s| s.depot.number() == token.pool && !s.depot.forked());
        store.and_then(|s| PinnedBuf::redeem(&s.depot, token)).ok_or(Error::StaleToken)
    }

    /// By way of `hit` only: in this thread's shard, or in a rack.
    #[inline(always)]
    fn hit_with(
        &self,
        request: Request<'_>,
        hit: impl FnOnce(&Depot, Class, usize) -> Option<Fresh>,
    ) -> Option<Fresh> {
        if request.align > SEGMENT_ALIGN || !request.align.is_power_of_two() || request.reserve.is_some() {
            return None;
        }
        let class = Class::of(request.len)?;
        let store = match request.near {
            None => &self.0.main,
            Some((near, _)) => self.near(near)?,
        };
        hit(&store.depot, class, request.len)
    }

    /// The store on the node of a device. `None`: the pool does not serve it.
    fn near(&self, context: u64) -> Option<&Store> {
        let other = self.0.nodes.iter().find(|node| node.0.contains(&context)).map(|node| &node.1);
        let main = || self.0.main.depot.config().serves.contains(&context).then_some(&self.0.main);
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
        origin: Origin,
        patience: Patience,
        error: &mut Error,
    ) -> Option<(NonNull<Depot>, NonNull<Slot>)> {
        let Origin { tag, site } = origin;
        let request = Request { len, align, reserve, near, tag };
        // What another thread has left on a rack costs little, and less than all that follows.
        if let Some(fresh) = self.hit_with(request, Depot::refill) {
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
    fn errand(&self, requests: &[Request<'_>]) -> Result<Errand<'_>> {
        let reserve = requests.first().and_then(|r| r.reserve);
        if requests.iter().any(|r| r.reserve != reserve) {
            return Err(Error::Config(
                "buffers that are asked for together must name the same reserve".into(),
            ));
        }
        let place =
            |s: &Store| requests.iter().map(|r| s.depot.place(r.len, r.align)).collect::<Result<Vec<_>>>();
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
        let Some(name) = reserve else { return Ok(Errand { first: None, store, wants: place(store)? }) };
        let known = self.0.reserves.iter().find(|r| r.0 == name);
        let (_, store) = known.ok_or_else(|| Error::Config(format!("the pool has no reserve {name:?}")))?;
        match (place(main), place(store)) {
            (first, Ok(wants)) => Ok(Errand { first: first.ok(), store, wants }),
            // Larger than the reserve: then it is like any other request.
            (Ok(wants), Err(_)) => Ok(Errand { first: None, store: main, wants }),
            (Err(error), Err(_)) => Err(error),
        }
    }

    /// Everything that can be had without waiting for anybody: from the pool proper, then from the reserve.
    fn try_errand(&self, errand: &Errand<'_>) -> Result<Option<Vec<Fresh>>> {
        let both =
            errand.first.iter().map(|wants| (&self.0.main, wants)).chain([(errand.store, &errand.wants)]);
        for (store, wants) in both {
            let granted = self.try_all(store, wants)?;
            if granted.is_some() {
                return Ok(granted);
            }
        }
        Ok(None)
    }

    /// The same, and if there is nothing: asks the streams what is done, and has the memory grow.
    fn try_hard(&self, errand: &Errand<'_>) -> Result<Found> {
        self.missed();
        if let Some(got) = self.try_errand(errand)? {
            return Ok(Found::Granted(got));
        }
        // Memory is short: whatever is done must come back now.
        if self.reap() {
            if let Some(got) = self.try_errand(errand)? {
                return Ok(Found::Granted(got));
            }
        }
        if let Some(wants) = &errand.first {
            self.0.main.depot.grow(wants);
        }
        let growing = errand.store.depot.grow(&errand.wants);
        // On a stepped device growing is over already.
        if self.stepped() {
            if let Some(got) = self.try_errand(errand)? {
                return Ok(Found::Granted(got));
            }
        }
        Ok(Found::Nothing { growing })
    }

    /// Counts a request, however often it is tried.
    fn missed(&self) {
        self.0.misses.fetch_add(1, Ordering::Relaxed);
    }

    fn stepped(&self) -> bool {
        self.0.devices[0].context().driver().stepped().is_some()
    }

    fn try_all(&self, store: &Store, wants: &[Want]) -> Result<Option<Vec<Fresh>>> {
        match wants {
            [want] => Ok(match store.depot.try_take(*want)? {
                Take::Got(fresh) => Some(vec![fresh]),
                Take::Empty => None,
            }),
            _ => store.depot.try_take_all(wants),
        }
    }

    fn acquire(
        &self,
        requests: &[Request<'_>],
        patience: Patience,
        site: &'static Location<'static>,
    ) -> Result<Vec<PinnedBuf>> {
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
        // Relaxed: any one of so many will do. Misses are not counted for it: others than these are among them, and where
        // the two kinds take turns always the same numbers would come here.
        let sampled = self.0.slow.fetch_add(1, Ordering::Relaxed) % SAMPLE == 0;
        for (fresh, tag) in granted.iter_mut().zip(tags) {
            if sampled || fresh.segment().depot().tracks() {
                Depot::enter(fresh, Origin { tag, site: Some(site) });
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
            if reported.is_none_or(|last| now.duration_since(last) >= stuck::PAUSE) {
                *reported = Some(now);
                drop(reported);
                stuck::report(self.name(), *waited, self.depots(), &self.0.devices);
            }
        }
    }

    fn acquire_all(
        &self,
        requests: &[Request<'_>],
        patience: Patience,
        since: Instant,
    ) -> Result<Vec<Fresh>> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let errand = self.errand(requests)?;
        let growing = match self.try_hard(&errand)? {
            Found::Granted(granted) => return Ok(granted),
            Found::Nothing { growing } => growing,
        };
        let depot = &errand.store.depot;
        let len = depot::sum(errand.wants.iter().map(|w| w.len));
        // A thread of ours would wait for itself: it pins, or finds out what is done.
        let patience = if crate::sync::own().is_some() { Patience::None } else { patience };
        let deadline = match patience {
            Patience::None => return Err(depot.exhausted(len)),
            Patience::Until(deadline) => Some(deadline),
            Patience::Forever => None,
        };
        let span = tracing::debug_span!(target: "pinpool::pool", "wait", pool = self.name(), bytes = len);
        let _entered = span.enter();
        let key = depot.join(errand.wants, Wake::Thread(crate::sync::thread::current()), growing)?;
        if self.stepped() {
            return self.wait_stepped(errand.store, key, since);
        }
        self.reap();
        if let Some(granted) = errand.first.and_then(|first| self.wait_grown(depot, key, &first, deadline)) {
            return Ok(granted);
        }
        depot.wait(key, deadline, since)
    }

    /// Waiting for a reserve while memory for the pool proper is on its way: the first that has something. `None`: the
    /// wait is over, or the reserve's alone from here on.
    fn wait_grown(
        &self,
        depot: &Depot,
        key: usize,
        first: &[Want],
        deadline: Option<Instant>,
    ) -> Option<Vec<Fresh>> {
        let waker = Waker::from(Arc::new(Unparks(crate::sync::thread::current())));
        loop {
            let (grown, over) = self.take_grown(first, &waker);
            if grown.is_some() {
                depot.leave(key, false);
                return grown;
            }
            if over || !depot.waits(key) || deadline.is_some_and(|d| Instant::now() >= d) {
                return None;
            }
            crate::sync::thread::park_until(deadline);
        }
    }

    /// What the pool proper has got meanwhile for a request that waits for a reserve, and whether it gets no more. If it
    /// does, the waker hears of it.
    fn take_grown(&self, first: &[Want], waker: &Waker) -> (Option<Vec<Fresh>>, bool) {
        let main = &self.0.main;
        // Asked first: what comes between the two is not overlooked.
        let over = main.regions.poll(waker).is_some();
        let granted = self.try_all(main, first).ok().flatten();
        (granted, over)
    }

    /// Waiting where nothing moves by itself: this thread moves the devices.
    fn wait_stepped(&self, store: &Store, key: usize, since: Instant) -> Result<Vec<Fresh>> {
        loop {
            match store.depot.look(key, None) {
                Outcome::Granted(granted) => return Ok(granted),
                Outcome::Failed(error) => return Err(error),
                Outcome::Waiting => {}
            }
            let moved =
                self.0.devices.iter().any(|d| d.context().driver().stepped().is_some_and(|s| s.step()));
            if !self.reap() && !moved {
                store.depot.leave(key, true);
                return Err(Error::Timeout(since.elapsed()));
            }
        }
    }

    /// Closes what is open on the devices' streams and asks what is done. Whether anything came back.
    pub(crate) fn reap(&self) -> bool {
        self.0.devices.iter().fold(false, |any, d| d.reap() | any)
    }

    // --- the memory --------------------------------------------------------------------------------------------------

    /// How far pinning has come.
    #[must_use]
    pub fn pinning(&self) -> Pinning {
        let mut sum = Pinning::default();
        for Pinning { wanted, ready, made, busy, longest_call, error } in
            self.growing().map(|s| s.regions.pinning())
        {
            sum.wanted += wanted;
            sum.ready += ready;
            sum.made += made;
            sum.busy += busy;
            sum.longest_call = sum.longest_call.max(longest_call);
            sum.error = sum.error.or(error);
        }
        sum
    }

    /// Waits until nothing is being pinned any more.
    ///
    /// # Errors
    /// [`Error::Timeout`]. That pinning ended early is in the result, not an error.
    pub fn wait_pinned(&self, timeout: Option<Duration>) -> Result<Pinning> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        for store in self.growing() {
            store.regions.wait(deadline, |_| false)?;
        }
        Ok(self.pinning())
    }

    /// The same for a task.
    pub async fn pinned(&self) -> Pinning {
        for store in self.growing() {
            std::future::poll_fn(|cx| store.regions.poll(cx.waker()).map_or(Poll::Pending, Poll::Ready))
                .await;
        }
        self.pinning()
    }

    /// The regions there are, reserves included, for those who register them elsewhere too.
    /// [`PoolBuilder::before_unpin`] says when one goes.
    #[must_use]
    pub fn regions(&self) -> Vec<RegionInfo> {
        self.stores().flat_map(|s| s.regions.list()).collect()
    }

    /// Lets the pool have memory of the caller's, to cut up and to overwrite: pinned where it is, it is a region like any
    /// other from here on. It is taken by value, since it is the pool's alone until it goes: a `Vec<u8>`, a `Box<[u8]>`, a
    /// writable mapping of a file or of shared memory (`memmap2::MmapMut` with that crate's feature `stable_deref_trait`).
    ///
    /// Its address and its contents stay as they are until a segment of it is handed out. The pool uses the whole pages
    /// inside of it. It counts against the capacity: leave room for it with
    /// [`initial`](crate::PoolBuilder::initial). Like every region it goes when it is idle and [trimmed](Self::trim), or makes
    /// way for another, or with the pool: then it is unpinned and the value is dropped, on the device's worker thread. It
    /// is never part of a reserve, and where the pool's devices hang on several NUMA nodes it counts to the first one's
    /// share, wherever it lies. Forked children see it, unlike regions of the pool's own, as the system lets them.
    ///
    /// Waits until all of it is pinned, one call for each [extent](crate::PoolBuilder::extent) with room for others in
    /// between: at the system's speed of pinning, some seconds for tens of gigabytes.
    ///
    /// # Errors
    /// With the memory, unpinned and as it was: [`Error::NoWholePage`], [`Error::OverCapacity`], [`Error::Closed`],
    /// [`Error::Forked`], and what the driver says: CUDA refuses memory that is registered already or is its own, and
    /// shared mappings of files on file systems whose pages it cannot pin for writing.
    pub fn adopt<T>(&self, memory: T) -> Result<RegionInfo, RegisterError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        let span = tracing::info_span!(target: "pinpool::pool", "adopt", pool = self.name());
        let _entered = span.enter();
        self.0.main.depot.adopt(memory)
    }

    /// Gives idle regions back to the system, the last to come first, as long as at least `keep` bytes stay. Returns
    /// how many bytes went. Regions with anything in use stay, and so do reserves, which `keep` does not count.
    pub fn trim(&self, keep: usize) -> usize {
        if self.0.main.depot.forked() {
            return 0;
        }
        let mut regions = Vec::new();
        for store in self.growing() {
            // Asked first: one that is being pinned now is not idle, even if it is complete by the time it is looked at.
            let made = store.regions.made();
            let complete = store.depot.region_use().into_iter().filter(|r| made.contains(&r.0));
            regions.extend(complete.map(|(id, len, free)| (store, id, len, free)));
        }
        regions.sort_unstable_by_key(|r| std::cmp::Reverse(r.1));
        let mut total: usize = regions.iter().map(|r| r.2).sum();
        let mut gone = 0;
        for (store, id, len, free) in regions {
            if free == len && total - len >= keep && store.depot.retire(id).is_some() {
                store.regions.remove(id);
                store.depot.left(len);
                total -= len;
                gone += len;
            }
        }
        gone
    }

    // --- the end -----------------------------------------------------------------------------------------------------

    /// Closes the pool and waits until everything has come back, but not longer than `timeout`. What is still out then
    /// keeps its memory; it is logged, and counted in the result. Checkouts fail from the start with [`Error::Closed`].
    /// In the child of a fork it returns at once.
    ///
    /// Free memory stays pinned until [`trim(0)`](Self::trim), or until the last handle to the pool is dropped
    /// and the device's worker thread has unpinned it. The call blocks the thread.
    pub fn shutdown(&self, timeout: Duration) -> Shutdown {
        let span = tracing::info_span!(target: "pinpool::pool", "shutdown", pool = self.name());
        let _entered = span.enter();
        let deadline = Instant::now().checked_add(timeout);
        // In the child of a fork nothing is left to be waited for, nor to be asked.
        if self.0.main.depot.forked() {
            return Shutdown { drained: false, outstanding: 0, quarantined_bytes: 0 };
        }
        self.stores().for_each(|s| s.depot.close());
        let outstanding = || self.stores().map(|s| s.depot.outstanding()).sum::<u64>();
        let quarantined = || {
            self.stores()
                .map(|s| s.depot.snapshot())
                .fold((0, 0), |(n, b), s| (n + s.quarantined_segments, b + s.quarantined))
        };
        loop {
            let moved = self.reap()
                | self.0.devices.iter().any(|d| d.context().driver().stepped().is_some_and(|s| s.step()));
            let (left, (stuck, quarantined_bytes)) = (outstanding(), quarantined());
            let late = deadline.is_some_and(|d| Instant::now() >= d);
            let stepped = self.0.devices.iter().all(|d| d.context().driver().stepped().is_some());
            if left <= stuck || late || (stepped && !moved) {
                if left > 0 {
                    tracing::error!(
                        target: "pinpool::pool::outstanding", pool = self.name(), outstanding = left, quarantined_bytes,
                        "the pool was shut down with buffers still out: their memory is kept"
                    );
                }
                return Shutdown { drained: left == 0, outstanding: left, quarantined_bytes };
            }
            if !moved {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    // --- looking -----------------------------------------------------------------------------------------------------

    /// What the pool is called in events, statistics and reports: see [`PoolBuilder::name`].
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn downgrade(&self) -> WeakPool {
        WeakPool(Arc::downgrade(&self.0))
    }

    /// Whether a device can reach the pool's memory.
    pub(crate) fn serves(&self, context: &crate::device::context::Context) -> bool {
        self.0.main.depot.config().serves.contains(&context.id())
    }

    /// The longest request that the pool proper could ever serve, in bytes.
    pub(crate) fn longest(&self) -> usize {
        self.0.main.depot.config().largest
    }

    /// The depots of all stores.
    pub(crate) fn depots(&self) -> impl Iterator<Item = &Arc<Depot>> {
        self.stores().map(|store| &store.depot)
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
        let capacity = self.growing().map(|s| s.depot.config().capacity).sum();
        (capacity, self.0.main.depot.config().largest)
    }

    /// Bytes and counts, reserves included. Costs a few microseconds, and nothing to those who check out.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.stats_of(|depot| depot.snapshot())
    }

    /// The same of snapshots of the depots that the caller takes, one of each.
    pub(crate) fn stats_of(&self, mut snapshot: impl FnMut(&Depot) -> DepotSnapshot) -> PoolStats {
        let mut stats = PoolStats {
            misses: self.0.misses.load(Ordering::Relaxed),
            unpinned_fallbacks: self.0.fallbacks.load(Ordering::Relaxed),
            unpinned_fallback_bytes: self.0.fallback_bytes.load(Ordering::Relaxed),
            errors: self.0.errors.read(),
            ..PoolStats::default()
        };
        for store in self.stores().filter(|s| !s.depot.forked()) {
            let (in_flight, claimed, _) = self.flight(store);
            let s = snapshot(&store.depot);
            let in_flight = in_flight.min(s.out);
            stats.pinned_bytes += s.total - s.unpinned;
            stats.unpinned_bytes += s.unpinned;
            stats.free_bytes += s.free;
            stats.cached_bytes += s.cached;
            stats.checked_out_bytes += s.out - in_flight;
            stats.in_flight_bytes += in_flight;
            stats.claimed_bytes += claimed.min(in_flight);
            stats.quarantined_bytes += s.quarantined;
            stats.cut_bytes += s.cut;
            stats.requested_bytes += s.requested;
            stats.largest_free_bytes = stats.largest_free_bytes.max(s.largest_free);
            stats.capacity_bytes += store.depot.config().capacity;
            stats.checkouts += s.takes;
            stats.returns += s.puts;
            stats.collects += s.stats.collects;
            stats.growths += s.stats.growths;
            stats.growth_failures += s.stats.growth_failures;
            stats.waits += s.stats.waits;
            stats.timeouts += s.stats.timeouts;
            stats.waiting += s.waiting;
        }
        stats.granted_bytes = stats.checked_out_bytes + stats.in_flight_bytes + stats.quarantined_bytes;
        stats.rounding_bytes = stats.granted_bytes.saturating_sub(stats.requested_bytes);
        stats
    }

    /// Bytes in flight, how many of these are claimed, and a number that changes when anything is submitted or lands. No
    /// number: something is half-way.
    fn flight(&self, store: &Store) -> (usize, usize, Option<u64>) {
        let mut sum = (store.depot.joint_bytes(), 0, Some(0));
        for timeline in self.0.devices.iter().flat_map(|d| d.listing().known()) {
            let (flight, moves) = timeline.flight(store.depot.number());
            let moves = sum.2.zip(moves).map(|(a, b): (u64, u64)| a + b);
            sum = (sum.0 + flight.bytes, sum.1 + flight.claimed, moves);
        }
        sum
    }

    /// Walks every invariant of the pool: segments inside their extents, aligned, spanning what the rule asks, none
    /// overlapping, each in one state and in as many lists as that state allows, and the accounting. For tests, fuzzing
    /// and trouble: takes milliseconds, and keeps everyone out of their shards meanwhile. The sums are compared only if
    /// nobody moves.
    ///
    /// # Errors
    /// The first violation, in words.
    pub fn check(&self) -> Result<Census, String> {
        let mut all = Census::default();
        for store in self.stores() {
            if store.depot.forked() {
                return Err("forked".into());
            }
            let before = store.depot.snapshot();
            let (in_flight, claimed, moves) = self.flight(store);
            let mut census = Census::default();
            store.depot.check(|state, bytes| match state {
                None => census.free += bytes,
                Some(state::HOST | state::LANDED) => census.checked_out += bytes,
                Some(state::FLIGHT | state::DETACHED) => census.in_flight += bytes,
                Some(state::CLAIMED) => {
                    census.in_flight += bytes;
                    census.claimed += bytes;
                }
                _ => census.quarantined += bytes,
            })?;
            let s = store.depot.snapshot();
            if s == before && moves.is_some() && (in_flight, claimed, moves) == self.flight(store) {
                let sum = s.free + s.out + s.quarantined + s.cut;
                if sum != s.total {
                    return Err(format!("the parts sum to {sum} of {}: {s:?}", s.total));
                }
                let counted = (s.out, s.quarantined, in_flight, claimed);
                let found = (
                    census.checked_out + census.in_flight,
                    census.quarantined,
                    census.in_flight,
                    census.claimed,
                );
                if counted != found {
                    return Err(format!(
                        "(out, quarantined, in flight, claimed) are {found:?}, counted as {counted:?}"
                    ));
                }
                if s.total > store.depot.config().capacity {
                    return Err(format!(
                        "{} bytes are held of at most {}",
                        s.total,
                        store.depot.config().capacity
                    ));
                }
            }
            all.free += census.free;
            all.checked_out += census.checked_out;
            all.in_flight += census.in_flight;
            all.claimed += census.claimed;
            all.quarantined += census.quarantined;
        }
        Ok(all)
    }
}

/// What was found without waiting.
enum Found {
    Granted(Vec<Fresh>),
    Nothing {
        /// Whether memory for the request is on its way.
        growing: bool,
    },
}

/// An errand that a future keeps: wants for the pool proper, the number of the depot to wait at, wants for that.
type KeptErrand = (Option<Vec<Want>>, u64, Vec<Want>);

/// What is asked for, and of whom.
struct Errand<'a> {
    /// For a request that names a reserve: the pool proper is asked first, since the reserve is for when it has nothing.
    first: Option<Vec<Want>>,
    /// Where the request waits.
    store: &'a Store,
    wants: Vec<Want>,
}

/// Wakes a thread.
struct Unparks(crate::sync::thread::Thread);

impl std::task::Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// How long to wait.
#[derive(Clone, Copy, Debug)]
enum Patience {
    None,
    Until(Instant),
    Forever,
}

impl Patience {
    fn until(timeout: Duration) -> Self {
        Instant::now().checked_add(timeout).map_or(Self::Forever, Self::Until)
    }
}

impl Store {
    fn new(devices: &[Device], plan: &Plan, capacity: usize, step: usize, regions: Arc<Regions>) -> Self {
        let config = DepotConfig {
            capacity,
            thread_cache: plan.thread_cache.min(capacity),
            shared_cache: plan.shared_cache,
            largest: plan.options.extent.min(capacity) - 32,
            step,
            timeless: devices[0].context().driver().stepped().is_some(),
            serves: devices.iter().map(|d| d.context().id()).collect(),
            track: plan.track,
        };
        Self { depot: Depot::new(config, Some(regions.clone())), regions }
    }

    /// Starts with so many bytes and waits for the first of them.
    fn start(&self, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.depot.plan_bytes(bytes);
        self.depot.pin(bytes);
        let pinning = self.regions.wait(None, |p| p.ready > 0)?;
        match pinning.error {
            Some(error) if pinning.ready == 0 => Err(error),
            _ => Ok(()),
        }
    }
}

impl PoolBuilder {
    /// Builds the pool. Returns when its first extent is usable; the rest of what it starts with follows.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that make no sense; what made pinning fail, [`Error::MemLock`] above all.
    pub fn build(mut self) -> Result<Pool> {
        let plan = self.plan()?;
        self.devices[0].context().alive()?;
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = || format!("pool-{}", NUMBERS.fetch_add(1, Ordering::Relaxed));
        let name = self.name.take().unwrap_or_else(number);
        let span =
            tracing::info_span!(target: "pinpool::pool", "build", pool = name, capacity = self.capacity);
        let _entered = span.enter();
        // One call for all stores: whoever registered a region elsewhere does not care whose it is.
        let before = self.before_unpin.take().map(Arc::new);
        let numbers = Arc::new(AtomicU64::new(0));
        let nodes = self.nodes();
        // Pinned by the worker of a device on the node; by another's when all of those are lost.
        let regions = |(node, devices): &(Option<u32>, Vec<usize>)| {
            let before = before.clone();
            let call =
                before.map(|b| Box::new(move |info: &RegionInfo| b(info)) as crate::region::BeforeUnpin);
            let options = RegionOptions { node: *node, ..plan.options };
            let others =
                self.devices.iter().enumerate().filter(|(n, _)| !devices.contains(n)).map(|(n, _)| n);
            let others = devices[1..].iter().copied().chain(others);
            let others = others.map(|n| Arc::downgrade(self.devices[n].context())).collect();
            let first = self.devices[devices[0]].context().clone();
            Regions::new(first, others, options, call, numbers.clone())
        };
        let proper = |node| Store::new(&self.devices, &plan, plan.capacity, plan.region, regions(node));
        let main = proper(&nodes[0]);
        let others = nodes[1..].iter().map(|node| {
            let contexts = node.1.iter().map(|number| self.devices[*number].context().id()).collect();
            (contexts, proper(node))
        });
        let others: Vec<(Vec<u64>, Store)> = others.collect();
        let page = crate::os::page_size().max(crate::segment::PAGE);
        let reserves = self.reserves.iter().map(|(name, bytes)| {
            let bytes = bytes.next_multiple_of(page);
            (name.clone(), Store::new(&self.devices, &plan, bytes, 0, regions(&nodes[0])), bytes)
        });
        let reserves: Vec<(String, Store, usize)> = reserves.collect();
        let sizes: Vec<usize> = reserves.iter().map(|r| r.2).collect();
        // From here on dropping the pool cleans up.
        let pool = Pool(Arc::new(Inner {
            main,
            nodes: others,
            reserves: reserves.into_iter().map(|(name, store, _)| (name, store)).collect(),
            devices: std::mem::take(&mut self.devices),
            name,
            misses: AtomicU64::new(0),
            slow: AtomicU64::new(0),
            fallbacks: AtomicU64::new(0),
            fallback_bytes: AtomicU64::new(0),
            errors: ErrorTally::default(),
            reported: parking_lot::Mutex::new(None),
        }));
        for store in pool.growing() {
            store.start(plan.initial)?;
        }
        for ((_, store), bytes) in pool.0.reserves.iter().zip(sizes) {
            store.start(bytes)?;
            // A reserve that is not there when it is needed is none.
            if let Some(error) = store.regions.wait(None, |_| false)?.error {
                return Err(error);
            }
        }
        Ok(pool)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.main.depot.close();
        self.nodes.iter().for_each(|n| n.1.depot.close());
        self.reserves.iter().for_each(|r| r.1.depot.close());
    }
}

/// A pool that is not kept open.
#[derive(Clone)]
pub(crate) struct WeakPool(Weak<Inner>);

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

/// The future of [`Pool::checkout_async`].
#[derive(Debug)]
#[must_use = "nothing happens until it is awaited"]
pub struct Checkout(CheckoutMany);

impl Future for Checkout {
    type Output = Result<PinnedBuf>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let bufs = std::task::ready!(Pin::new(&mut self.0).poll(cx));
        Poll::Ready(bufs.and_then(|mut bufs| bufs.pop().ok_or(Error::ZeroLength)))
    }
}

/// The future of [`Pool::checkout_many_async`]. Dropped before it is ready, it leaves the queue, and what it was granted
/// meanwhile goes back.
#[must_use = "nothing happens until it is awaited"]
pub struct CheckoutMany {
    pool: Pool,
    errand: Option<Result<KeptErrand>>,
    waiting: Option<(Arc<Depot>, usize)>,
    /// Wants for the pool proper, while memory for it is on its way.
    first: Option<Vec<Want>>,
    tags: Vec<Option<&'static str>>,
    site: &'static Location<'static>,
}

impl CheckoutMany {
    fn start(&mut self, cx: &Context<'_>) -> Result<Option<Vec<Fresh>>> {
        let Some(errand) = self.errand.take() else { return Ok(None) };
        let (first, number, wants) = errand?;
        if wants.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let pool = self.pool.clone();
        let Some(store) = pool.stores().find(|s| s.depot.number() == number) else {
            return Err(Error::Closed);
        };
        let errand = Errand { first, store, wants };
        let growing = match pool.try_hard(&errand)? {
            Found::Granted(granted) => return Ok(Some(granted)),
            Found::Nothing { growing } => growing,
        };
        let depot = store.depot.clone();
        let key = depot.join(errand.wants, Wake::Task(cx.waker().clone()), growing)?;
        self.waiting = Some((depot, key));
        self.first = errand.first;
        Ok(None)
    }
}

impl Future for CheckoutMany {
    type Output = Result<Vec<PinnedBuf>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let granted = std::task::ready!(self.poll_granted(cx));
        let pool = &self.pool;
        Poll::Ready(match granted {
            Ok(granted) => Ok(pool.entered(granted, self.tags.iter().copied(), self.site)),
            Err(error) => {
                pool.failed(&error);
                Err(error)
            }
        })
    }
}

impl CheckoutMany {
    fn poll_granted(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<Fresh>>> {
        if let Some(granted) = self.start(cx).transpose() {
            return Poll::Ready(granted);
        }
        let Some((depot, key)) = self.waiting.take() else {
            return Poll::Ready(Err(Error::Config("a checkout was polled after it was ready".into())));
        };
        match depot.look(key, Some(cx.waker())) {
            Outcome::Waiting => {
                self.waiting = Some((depot.clone(), key));
                let Some(first) = self.first.take() else { return Poll::Pending };
                let (grown, over) = self.pool.take_grown(&first, cx.waker());
                if let Some(granted) = grown {
                    self.waiting = None;
                    depot.leave(key, false);
                    return Poll::Ready(Ok(granted));
                }
                self.first = (!over).then_some(first);
                Poll::Pending
            }
            Outcome::Granted(granted) => Poll::Ready(Ok(granted)),
            Outcome::Failed(error) => Poll::Ready(Err(error)),
        }
    }
}

impl Drop for CheckoutMany {
    fn drop(&mut self) {
        if let Some((depot, key)) = self.waiting.take() {
            depot.leave(key, false);
        }
    }
}

impl fmt::Debug for CheckoutMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckoutMany").field("waiting", &self.waiting.is_some()).finish_non_exhaustive()
    }
}

//! Where pinned memory comes from: regions, made and given back as a whole.
//!
//! # How a region is made
//!
//! A region is mapped as a whole, starting on a multiple of 2 MiB, preferably in the memory next to its device, and
//! pinned extent by extent. Several threads touch its pages in order of their addresses ([`touch`]); touching takes
//! most of the time, since the system zeroes the pages. One call of the device's driver pins each extent as soon as its
//! pages are there, and the pool serves from an extent as soon as it is pinned. An extent that fails is rolled back
//! together with the rest of the region, and is never handed out as if it were pinned. Whether it is handed out
//! unpinned, and said to be so, is the configuration's choice ([`Unpinned`]).
//!
//! # Memory that went unpinned
//!
//! The refusal that [`Unpinned::Allow`] goes on after may pass. So the region thread tries to pin such extents where they
//! are again, after a pause that doubles, until it is told that this never works. Buffers may be out meanwhile: pinning
//! changes neither address nor contents. (Not on a device without threads, where each call is the program's.)
//!
//! # Pauses
//!
//! A driver that pins memory holds locks that every call of every process needs sooner or later. So extents are small
//! enough for one call to take milliseconds, and between two calls there is a pause in proportion to the call, in which
//! other callers get those locks.
//!
//! # Several devices
//!
//! Memory that one device has pinned serves all devices of its family. So the first device pins. When it is lost, the
//! next one that is not lost takes over. Memory that a lost device has pinned stays its own.
//!
//! # Invariants
//!
//! - Pinning, unpinning, allocating and freeing happen on the device's region thread only. What is pinned or allocated
//!   is one job for each extent.
//! - A region is given back only when no buffer and no thread can reach it any more. If its driver cannot unpin it, its
//!   mapping stays for good, since the device may still reach it.
//! - Each region knows where it came from ([`source`]) and is given back there, by the device that made it.
//! - No driver call and no code of the program runs under this module's lock.
//!
//! # Files, in the order to read them
//!
//! This file: the public types, and the regions that the pool maps itself. [`touch`]: the threads that touch pages.
//! [`source`]: memory that the driver allocates, and how every region goes back. [`adopted`]: memory that the program
//! gives. `central::growth` asks for regions, `pool` lists and trims them; this module calls `device` and `os`.

#![allow(unsafe_code)]

mod adopted;
mod source;
mod touch;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

use crate::device::context::Context;
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::{self, Task};
use crate::os;
pub(crate) use adopted::Adoptee;
pub use source::Backing;
use source::{RegionSource, Supply};
pub use touch::HugePages;
use touch::Toucher;

/// The pause between two calls that pin or unpin is the first call's time, divided by this.
const ROOM: u32 = 32;
/// After a call that is shorter there is no pause: no other caller has waited long.
const SHORT_CALL: Duration = Duration::from_micros(200);

/// The pause before memory that went unpinned is tried again, at first and at most.
const AGAIN: Duration = Duration::from_millis(100);
const MOST_AGAIN: Duration = Duration::from_secs(60);

/// Regions that the pool maps itself start on a multiple of this, so that huge pages can back them.
const REGION_ALIGN: usize = 2 << 20;

/// A region's number in its pool, never used twice. In a [`RegionInfo`].
///
/// # Examples
///
/// ```
/// # use pinpool::{Device, Pool, RegionId, RegionInfo, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// use std::collections::HashMap;
///
/// // What the program has registered with its network card, by region.
/// let registered: HashMap<RegionId, RegionInfo> = pool.regions().into_iter().map(|r| (r.id, r)).collect();
/// # assert_eq!(registered.len(), pool.regions().len());
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub(crate) u64);

/// What a pool does when the system refuses to lock pages. Set by
/// [`PoolBuilder::unpinned`](crate::PoolBuilder::unpinned). (Managed memory is never locked, and not refused for that:
/// see [`Backing::Managed`].)
///
/// # Examples
///
/// ```
/// use pinpool::{Device, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// // For a laptop or a test: no error under a small memlock limit, and a number that tells.
/// let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// if pool.stats().unpinned_bytes > 0 {
///     eprintln!("copies are slower: raise the memlock limit");
/// }
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unpinned {
    /// An error.
    #[default]
    Refuse,
    /// The pool goes on with memory that is not locked, and says so: in the statistics (`unpinned_bytes`) and in a
    /// warning. It tries to lock that memory again after pauses, from 0.1 seconds to a minute. (Not on a stepped device.)
    Allow,
}

/// One region, for a program that registers it elsewhere too (RDMA, io_uring). Listed by
/// [`Pool::regions`](crate::Pool::regions), and given to
/// [`PoolBuilder::before_unpin`](crate::PoolBuilder::before_unpin) before the region goes.
///
/// # Examples
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// let pool = Pool::builder(&device)
///     .capacity(1 << 20)
///     .unpinned(Unpinned::Allow)
///     .before_unpin(|region| println!("deregister {:?}", region.id))
///     .build()?;
/// for region in pool.regions() {
///     println!("register {} bytes at {:?}", region.len, region.base);
/// }
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionInfo {
    /// The number of the region in its pool.
    pub id: RegionId,
    /// The first byte: on a multiple of 2 MiB if the pool mapped the region itself, otherwise of the page size.
    pub base: NonNull<u8>,
    /// Bytes that the pool serves from: a multiple of the page size.
    pub len: usize,
    /// The part of these bytes that is page-locked.
    pub pinned: usize,
    /// The NUMA node that the pool was [told](crate::PoolBuilder::numa_node) to use, or that its first device is on. The
    /// region's pages come from that node as long as it has any. `None`: neither is known, or the pool did not map the
    /// region itself.
    pub node: Option<u32>,
}

// SAFETY: the address is information only; dereferencing it is unsafe code elsewhere.
unsafe impl Send for RegionInfo {}
// SAFETY: as above.
unsafe impl Sync for RegionInfo {}

/// How regions are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionOptions {
    /// The most bytes that one call pins.
    pub(crate) extent: usize,
    /// The number of threads that touch pages.
    pub(crate) threads: usize,
    pub(crate) unpinned: Unpinned,
    pub(crate) huge: HugePages,
    /// The NUMA node to take pages from.
    pub(crate) node: Option<u32>,
    /// Where the memory comes from, if the program has said so.
    pub(crate) backing: Option<Backing>,
    /// Whether the limits of control groups are looked at first.
    pub(crate) check_cgroups: bool,
}

/// The program's function that is called before a region is unpinned.
pub(crate) type BeforeUnpin = Box<dyn Fn(&RegionInfo) + Send + Sync>;

/// How far pinning has come. From [`Pool::pinning`](crate::Pool::pinning) and
/// [`Pool::wait_pinned`](crate::Pool::wait_pinned).
///
/// # Examples
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let pinning = pool.wait_pinned(None)?;
/// println!("{} of {} bytes, in {:?}", pinning.ready, pinning.wanted, pinning.busy);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// Bytes that were asked of the system so far, in regions that exist or are being made.
    pub wanted: usize,
    /// Bytes that the pool can serve from.
    pub ready: usize,
    /// Bytes that came since the pool was built, including those that were given back since, and those that could not
    /// be pinned.
    pub made: usize,
    /// The time spent on making these: calls that pinned or allocated, and waiting for pages to be touched. The pauses
    /// between two calls do not count.
    pub busy: Duration,
    /// The longest single call that pinned: how long other users of the driver may have had to wait.
    pub longest_call: Duration,
    /// Why the last attempt ended early, if it did.
    pub error: Option<Error>,
}

impl Pinning {
    /// Bytes per second of the time spent in pinning, without the pauses (`made / busy`). `None` before any were made.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<f64> {
        (!self.busy.is_zero()).then(|| self.made as f64 / self.busy.as_secs_f64())
    }
}

#[derive(Debug)]
struct Extent {
    offset: usize,
    len: usize,
    /// Changed, and read for unpinning, on the region thread only, so that relaxed accesses do: a region may go while an
    /// extent of it is being pinned.
    pinned: Arc<AtomicBool>,
}

impl Extent {
    fn new(offset: usize, len: usize, pinned: bool) -> Self {
        Self { offset, len, pinned: Arc::new(AtomicBool::new(pinned)) }
    }

    fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }
}

/// An extent that went unpinned and is to be pinned where it is.
struct UnpinnedExtent {
    offset: usize,
    start: NonNull<u8>,
    len: usize,
    /// The mark of the extent.
    pinned: Arc<AtomicBool>,
    /// The program's value holds the memory.
    is_adopted: bool,
}

#[derive(Debug)]
struct Region {
    id: RegionId,
    base: NonNull<u8>,
    len: usize,
    extents: Vec<Extent>,
    node: Option<u32>,
    /// Of the bytes counted in [`Pinning::ready`], those of this region.
    ready: usize,
    /// Whether no more extents are added. The pool need not serve from the last one yet.
    whole: bool,
    source: RegionSource,
    /// The device that made the region, and that is to undo it.
    context: Arc<Context>,
}

// SAFETY: a region owns its memory.
unsafe impl Send for Region {}

/// A region that is being made.
struct Making {
    context: Arc<Context>,
    id: RegionId,
    base: NonNull<u8>,
    len: usize,
    /// Bytes of extents that are done.
    offset: usize,
    toucher: Toucher,
    /// When the last call that pinned ended, and how long it took.
    last: Option<(Instant, Duration)>,
    serve: Box<dyn FnMut(RegionId, NonNull<u8>, usize, bool) -> bool + Send>,
    done: Box<dyn FnOnce(usize, Option<Error>) + Send>,
    /// From the request until the region is whole or its making has ended early.
    span: crate::foreign::Span,
}

// SAFETY: only the address keeps it from being Send, and the mapping is the region's.
unsafe impl Send for Making {}

impl Region {
    fn info(&self) -> RegionInfo {
        let pinned = self.extents.iter().filter(|e| e.is_pinned()).map(|e| e.len).sum();
        let len = self.extents.iter().map(|e| e.len).sum();
        RegionInfo { id: self.id, base: self.base, len, pinned, node: self.node }
    }

    /// The first extent from an offset on that went unpinned and that the driver may pin where it is.
    fn unpinned(&self, from: usize) -> Option<UnpinnedExtent> {
        let open = match self.source {
            RegionSource::Mapped => true,
            RegionSource::Driver { .. } => false,
            // The caller's thread hands its extents over.
            RegionSource::AdoptedRegion(_) => self.whole,
        };
        let extent = self.extents.iter().find(|e| open && !e.is_pinned() && e.offset >= from)?;
        // SAFETY: within the region.
        let start = unsafe { self.base.add(extent.offset) };
        let Extent { offset, len, ref pinned } = *extent;
        let is_adopted = matches!(self.source, RegionSource::AdoptedRegion(_));
        Some(UnpinnedExtent { offset, start, len, pinned: pinned.clone(), is_adopted })
    }
}

#[derive(Default)]
struct RegionProgress {
    regions: Vec<Region>,
    pinning: Pinning,
    /// Attempts at making memory that are under way.
    busy: usize,
    /// The last attempt that has ended did so early.
    failed: bool,
    /// Memory that went unpinned is to be tried again.
    again: bool,
    wakers: Vec<Task>,
}

/// The regions of a pool.
pub(crate) struct Regions {
    /// The device that makes regions while it is not lost.
    context: Arc<Context>,
    /// The devices that take its place when it is lost. The pool keeps them open while it grows; these references are
    /// weak, so that memory that never comes back does not keep them open for good.
    others: Vec<Weak<Context>>,
    options: RegionOptions,
    before_unpin: Option<Arc<BeforeUnpin>>,
    /// The last number given to a region.
    numbers: AtomicU64,
    progress: Mutex<RegionProgress>,
    changed: Condvar,
    /// Gets the first byte of an extent that was pinned after all.
    pinned_after_all: OnceLock<Box<dyn Fn(NonNull<u8>) + Send + Sync>>,
}

impl std::fmt::Debug for Regions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Regions")
            .field("device", &self.context.name())
            .field("options", &self.options)
            .finish()
    }
}

impl Regions {
    pub(crate) fn new(
        context: Arc<Context>,
        others: Vec<Weak<Context>>,
        options: RegionOptions,
        before_unpin: Option<BeforeUnpin>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context,
            others,
            options,
            before_unpin: before_unpin.map(Arc::new),
            numbers: AtomicU64::new(0),
            progress: Mutex::new(RegionProgress::default()),
            changed: Condvar::new(),
            pinned_after_all: OnceLock::new(),
        })
    }

    /// Has `call` told of each extent that is pinned after it was handed over unpinned.
    pub(crate) fn on_pinned_after_all(&self, call: impl Fn(NonNull<u8>) + Send + Sync + 'static) {
        let _ = self.pinned_after_all.set(Box::new(call));
    }

    /// The first device that is not lost.
    fn living(&self) -> Option<Arc<Context>> {
        let others = self.others.iter().filter_map(Weak::upgrade);
        std::iter::once(self.context.clone()).chain(others).find(|context| context.poisoned().is_none())
    }

    /// The device to ask for memory. If all are lost, the first one, whose error says so.
    fn context(&self) -> Arc<Context> {
        self.living().unwrap_or_else(|| self.context.clone())
    }

    /// Whether memory of the driver's own takes the place of a mapping that could not be pinned with this error.
    fn allocates_after(&self, context: &Context, error: Option<&Error>) -> bool {
        matches!(error, Some(Error::Unsupported(_))) && self.kind(context).is_some()
    }

    /// Whether another device takes over after this error.
    fn goes_on_after(&self, error: Option<&Error>) -> bool {
        // A mistake in this crate has the same class, but says nothing about the device, and would be made again.
        let lost = |e: &&Error| e.class() == ErrorClass::DeviceLost && !matches!(e, Error::Internal(_));
        let Some((error, next)) = error.filter(lost).zip(self.living()) else {
            return false;
        };
        crate::foreign::warn!(
            target: "pinpool::region", device = next.name(), %error, "another device pins in place of a lost one"
        );
        true
    }

    /// Maps and pins `len` bytes on the device's region thread. Hands each extent to `serve` as soon as it is usable,
    /// until `serve` returns `false`. `done` gets the number of bytes that came, and if it is less than `len`, why.
    ///
    /// Each extent is a job of its own, so that another job waits for one extent at most.
    pub(crate) fn pin(
        self: &Arc<Self>,
        len: usize,
        serve: impl FnMut(RegionId, NonNull<u8>, usize, bool) -> bool + Send + 'static,
        done: impl FnOnce(usize, Option<Error>) + Send + 'static,
    ) {
        {
            let mut progress = self.progress.lock();
            progress.busy += 1;
            progress.pinning.wanted += len;
            progress.pinning.error = None;
        }
        let (regions, context) = (self.clone(), self.context());
        let device = context.clone();
        let span = crate::foreign::span!(INFO, target: "pinpool::region", "grow", device = context.name(), bytes = len);
        let kind = self.kind(&context);
        device.worker().send(move || {
            // What a stepped device does must not depend on the machine.
            let check = regions.options.check_cgroups && !context.worker().is_inline();
            let room = if check { os::refuse_over_cgroups(len) } else { Ok(()) };
            if let (Some(kind), Ok(())) = (kind, &room) {
                let (serve, done) = (Box::new(serve), Box::new(done));
                return regions.supply(Supply { context, len, came: 0, kind, last: None, serve, done, span });
            }
            match room.and_then(|()| regions.map(len, &context)) {
                Ok((id, base)) => {
                    let RegionOptions { threads, huge, node, .. } = regions.options;
                    // A device without threads of its own gets none here either.
                    let threads = if context.worker().is_inline() { 0 } else { threads };
                    // SAFETY: mapped just now; extents are used after `wait` has returned for them, and the rest is
                    // unmapped by `finish`, after the toucher was dropped.
                    let toucher = unsafe { Toucher::start(base, len, threads, huge, node) };
                    let (serve, done) = (Box::new(serve), Box::new(done));
                    let making =
                        Making { context, id, base, len, offset: 0, toucher, last: None, serve, done, span };
                    regions.go_on(making);
                }
                Err(error) => {
                    regions.ended(len, Some(&error), || done(0, Some(error.clone())));
                }
            }
        });
    }

    /// Maps memory for a region that is being made.
    fn map(&self, len: usize, context: &Arc<Context>) -> Result<(RegionId, NonNull<u8>)> {
        let base = os::map(len, REGION_ALIGN)?;
        // Where the system refuses, the pool works all the same.
        os::dont_fork(base, len);
        // Before any page is touched.
        if let Some(node) = self.options.node.filter(|node| !os::prefer_node(base, len, *node)) {
            crate::foreign::debug!(
                target: "pinpool::region", device = context.name(), node,
                "the system does not let memory be taken from this node"
            );
        }
        // Relaxed: the numbers are only to differ.
        let id = RegionId(self.numbers.fetch_add(1, Ordering::Relaxed) + 1);
        let mut progress = self.progress.lock();
        progress.regions.push(Region {
            id,
            base,
            len,
            extents: Vec::new(),
            node: self.options.node,
            ready: 0,
            whole: false,
            source: RegionSource::Mapped,
            context: context.clone(),
        });
        Ok((id, base))
    }

    /// Pins the next extent, and leaves the rest to another job; without a region thread, pins all.
    fn go_on(self: &Arc<Self>, mut making: Making) {
        loop {
            let verdict = self.pin_next(&mut making);
            if !matches!(verdict, Ok(true)) {
                return self.finish(making, verdict.err());
            }
            if !making.context.worker().is_inline() {
                break;
            }
        }
        let (regions, context) = (self.clone(), making.context.clone());
        context.worker().send(move || regions.go_on(making));
    }

    /// Pins one extent and hands it over. Returns whether there is more to do.
    fn pin_next(self: &Arc<Self>, making: &mut Making) -> Result<bool> {
        let context = making.context.clone();
        let extent = self.options.extent.min(making.len - making.offset);
        let grow = making.span.clone();
        let _grow = grow.enter();
        let span = crate::foreign::span!(INFO,
            target: "pinpool::region", parent: &grow, "pin", device = context.name(), bytes = extent
        );
        let _entered = span.enter();
        // SAFETY: within the mapping.
        let start = unsafe { making.base.add(making.offset) };
        leave_room(making.last);
        let before = Instant::now();
        making.toucher.wait(making.offset + extent);
        let call = Instant::now();
        // Foreign code is put off until the extent is listed.
        let deferral = foreign::defer();
        // SAFETY: the extent is mapped, and stays mapped until `let_go` has unpinned it.
        let pinned = unsafe { context.driver().pin(start, extent) };
        let (took, longest) = (before.elapsed(), call.elapsed());
        making.last = Some((Instant::now(), longest));
        let pinned = match context.noting(pinned) {
            Ok(()) => true,
            Err(e) if self.options.unpinned == Unpinned::Allow && e.class() == ErrorClass::Transient => {
                crate::foreign::warn!(
                    target: "pinpool::region::unpinned", device = context.name(), bytes = extent, error = %e,
                    "memory is not pinned: copies from it are slower and may block"
                );
                false
            }
            Err(e) => return Err(e),
        };
        {
            let mut progress = self.progress.lock();
            if let Some(region) = progress.regions.iter_mut().find(|r| r.id == making.id) {
                region.extents.push(Extent::new(making.offset, extent, pinned));
                // Before the last extent is handed over: a thread that gets it may give it back, and trim, at once.
                region.whole = making.offset + extent == making.len;
            }
        }
        drop(deferral);
        making.offset += extent;
        let go_on = (making.serve)(making.id, start, extent, pinned);
        if !pinned {
            self.pin_again_after(AGAIN);
        }
        {
            // `ready` is what can be checked out, so it is raised after `serve`. The region may have been removed
            // already.
            let mut progress = self.progress.lock();
            let RegionProgress { regions, pinning, .. } = &mut *progress;
            if let Some(region) = regions.iter_mut().find(|r| r.id == making.id) {
                region.ready += extent;
                pinning.ready += extent;
            }
            pinning.busy += took;
            pinning.made += extent;
            pinning.longest_call = pinning.longest_call.max(longest);
        }
        self.wake();
        Ok(go_on && making.offset < making.len)
    }

    /// Has the region threads try memory that went unpinned again after a pause.
    fn pin_again_after(self: &Arc<Self>, pause: Duration) {
        if self.context.worker().is_inline() || std::mem::replace(&mut self.progress.lock().again, true) {
            return;
        }
        let regions = Arc::downgrade(self);
        crate::timer::after(pause, move || {
            let Some(regions) = regions.upgrade() else { return };
            let some: Vec<_> = {
                let mut progress = regions.progress.lock();
                progress.again = false;
                let unpinned = progress.regions.iter().filter(|region| region.unpinned(0).is_some());
                unpinned.map(|region| (region.id, region.context.clone())).collect()
            };
            for (id, context) in some {
                let regions = regions.clone();
                // By the device that is to unpin it.
                context.clone().worker().send(move || regions.pin_again(id, &context, pause, 0, None));
            }
        });
    }

    /// Pins the next extent of a region that went unpinned, and leaves the rest to another job. On the region thread that
    /// is to unpin them. `last`: when the last call that pinned ended, and how long it took.
    fn pin_again(
        self: &Arc<Self>,
        id: RegionId,
        context: &Arc<Context>,
        pause: Duration,
        from: usize,
        last: Option<(Instant, Duration)>,
    ) {
        let next = {
            let progress = self.progress.lock();
            progress.regions.iter().find(|region| region.id == id).and_then(|region| region.unpinned(from))
        };
        let Some(UnpinnedExtent { offset, start, len, pinned: is_pinned, is_adopted }) = next else { return };
        leave_room(last);
        let (driver, call) = (context.driver(), Instant::now());
        // By the call that the region's end undoes. SAFETY: mapped: a region goes by a later job of this thread.
        let pinned =
            unsafe { if is_adopted { driver.register(start, len, false) } else { driver.pin(start, len) } };
        match pinned {
            // Counted once, when the extent was made.
            Err(error) if error.class() == ErrorClass::Transient => {
                return self.pin_again_after((pause * 2).min(MOST_AGAIN));
            }
            pinned => {
                if context.noting(pinned).is_err() {
                    return;
                }
            }
        }
        let last = (Instant::now(), call.elapsed());
        // Whether or not the region goes by now: the job that unpins it comes later, and looks.
        is_pinned.store(true, Ordering::Relaxed);
        {
            let mut progress = self.progress.lock();
            progress.pinning.longest_call = progress.pinning.longest_call.max(last.1);
        }
        self.pinned_after_all.get().into_iter().for_each(|call| call(start));
        crate::foreign::info!(
            target: "pinpool::region::unpinned", device = context.name(), bytes = len,
            "memory that was not pinned is pinned after all"
        );
        let (regions, device) = (self.clone(), context.clone());
        context.worker().send(move || regions.pin_again(id, &device, pause, offset + len, Some(last)));
    }

    /// No more extents: unmaps the rest of the mapping. The extents that are done stay.
    fn finish(self: &Arc<Self>, making: Making, error: Option<Error>) {
        let Making { context, id, base, len, offset, toucher, serve, done, .. } = making;
        // The toucher's threads end before any of it is unmapped.
        drop(toucher);
        {
            let mut progress = self.progress.lock();
            if let Some(region) = progress.regions.iter_mut().find(|r| r.id == id) {
                region.len = offset;
                region.whole = true;
            }
            if offset == 0 {
                progress.regions.retain(|r| r.id != id);
            }
        }
        if offset < len {
            // SAFETY: the failed extent and the rest: mapped, not pinned, never handed out.
            let unmapped = unsafe { os::unmap(base.add(offset), len - offset) };
            leaked(&context, unmapped);
        }
        if self.goes_on_after(error.as_ref()) || self.allocates_after(&context, error.as_ref()) {
            // The next attempt is counted first, so that a waiter never sees that nothing is being made.
            self.pin(len - offset, serve, move |came, error| done(offset + came, error));
            return self.ended(len - offset, None, || ());
        }
        self.ended(len - offset, error.as_ref(), || done(offset, error.clone()));
    }

    /// Ends one job. `done` is called before a thread can see that nothing is being pinned: if it then asks for more, the
    /// pool knows that this has ended.
    fn ended(&self, missing: usize, error: Option<&Error>, done: impl FnOnce()) {
        {
            let mut progress = self.progress.lock();
            progress.pinning.wanted -= missing;
            match error {
                // Who waits has it tried again and again.
                Some(error) if std::mem::replace(&mut progress.failed, true) => {
                    crate::foreign::debug!(target: "pinpool::region::ended", device = self.context.name(), missing, %error, "pinning ended early again");
                    progress.pinning.error = Some(error.clone());
                }
                Some(error) => {
                    crate::foreign::warn!(target: "pinpool::region::ended", device = self.context.name(), missing, %error, "pinning ended early");
                    progress.pinning.error = Some(error.clone());
                }
                None => progress.failed &= missing > 0,
            }
        }
        done();
        self.progress.lock().busy -= 1;
        self.wake();
    }

    fn wake(&self) {
        let wakers = std::mem::take(&mut self.progress.lock().wakers);
        self.changed.notify_all();
        wakers.into_iter().for_each(Task::wake);
    }

    /// How far pinning has come.
    pub(crate) fn pinning(&self) -> Pinning {
        // In the child of a fork another thread of the parent may hold the lock, and no region is made any more.
        if crate::os::forked() {
            return Pinning::default();
        }
        self.progress.lock().pinning.clone()
    }

    /// Whether these regions keep the device of this context open.
    pub(crate) fn keep(&self, context: u64) -> bool {
        self.context.id() == context || self.progress.lock().regions.iter().any(|r| r.context.id() == context)
    }

    /// Waits until nothing is being pinned, or until `enough` returns `true`.
    pub(crate) fn wait(
        &self,
        deadline: Option<Instant>,
        enough: impl Fn(&Pinning) -> bool,
    ) -> Result<Pinning> {
        crate::os::check_fork()?;
        let since = Instant::now();
        let mut progress = self.progress.lock();
        if progress.busy > 0 && crate::sync::own() == Some(crate::sync::Own::Worker) {
            // The thread would wait for itself.
            return Err(Error::Unsupported(
                "a wait for memory on the thread that pins it; wait on a thread of your own".into(),
            ));
        }
        while progress.busy > 0 && !enough(&progress.pinning) {
            match deadline {
                Some(deadline) => {
                    if self.changed.wait_until(&mut progress, deadline).timed_out() {
                        return Err(Error::Timeout(since.elapsed().into()));
                    }
                }
                None => self.changed.wait(&mut progress),
            }
        }
        Ok(progress.pinning.clone())
    }

    /// [`wait`](Self::wait) for a task. `None`: its waker was left.
    pub(crate) fn poll(&self, waker: &Waker) -> Option<Pinning> {
        if crate::os::forked() {
            return Some(Pinning::default());
        }
        // Before the lock: cloning a waker is foreign code.
        let task = Task::of(waker);
        let mut progress = self.progress.lock();
        if progress.busy == 0 {
            return Some(progress.pinning.clone());
        }
        if !progress.wakers.iter().any(|known| known.will_wake(waker)) {
            progress.wakers.push(task);
        }
        None
    }

    /// All regions with memory that is done.
    pub(crate) fn list(&self) -> Vec<RegionInfo> {
        if crate::os::forked() {
            return Vec::new();
        }
        self.progress.lock().regions.iter().map(Region::info).filter(|r| r.len > 0).collect()
    }

    /// The regions to which the worker adds no more extents, each with its bytes. If the pool serves from as many bytes
    /// of a region, it serves from all of it; otherwise the last extent is still being handed over.
    pub(crate) fn made(&self) -> Vec<(RegionId, usize)> {
        let progress = self.progress.lock();
        progress.regions.iter().filter(|r| r.whole).map(|r| (r.id, r.info().len)).collect()
    }

    /// Unpins and unmaps a region that is whole and that nothing can reach any more.
    pub(crate) fn remove(&self, id: RegionId) {
        let mut progress = self.progress.lock();
        if let Some(at) = progress.regions.iter().position(|r| r.id == id) {
            let region = progress.regions.remove(at);
            let len = region.info().len;
            progress.pinning.wanted -= len;
            progress.pinning.ready -= region.ready;
            drop(progress);
            self.let_go(region);
        }
    }

    fn let_go(&self, region: Region) {
        let (context, before) = (region.context.clone(), self.before_unpin.clone());
        region.context.clone().worker().send(move || {
            if let Some(before) = before {
                let info = region.info();
                _ = foreign::call("before_unpin panicked: the region goes all the same", || before(&info));
            }
            region.go(&context);
        });
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        let regions = std::mem::take(&mut self.progress.get_mut().regions);
        if crate::os::forked() {
            // The drop of an adopted value is the program's code, and may do anything.
            return std::mem::forget(regions);
        }
        for region in regions {
            self.let_go(region);
        }
    }
}

/// Pauses before a call that pins or unpins. `last`: when the last such call ended, and how long it took.
fn leave_room(last: Option<(Instant, Duration)>) {
    if let Some((over, took)) = last.filter(|(_, took)| *took > SHORT_CALL) {
        std::thread::sleep((took / ROOM).saturating_sub(over.elapsed()));
    }
}

fn leaked(context: &Context, unmapped: Result<()>) {
    if let Err(error) = unmapped {
        crate::foreign::error!(target: "pinpool::region::leak", device = context.name(), %error, "a mapping is leaked");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::{Backing, Pinning, ROOM, Unpinned};
    use crate::device::HostAllocFlags;
    use crate::device::hooked::Hooked;
    use crate::device::host::{Call, HostConfig, HostNode};
    use crate::locks::Mutex;
    use crate::pool::Pool;

    /// The pauses between the calls count in no way of getting memory.
    #[test]
    fn the_time_spent_in_pinning_has_no_pauses() {
        const CALL: Duration = Duration::from_millis(96);
        const LEN: usize = 3 << 16;
        let node = HostNode::new(HostConfig::new()).unwrap();
        let calls = Arc::new(Mutex::new(0));
        let count = calls.clone();
        let before = move |call| {
            if matches!(call, Call::Pin | Call::AllocateHost) {
                *count.lock() += 1;
                std::thread::sleep(CALL);
            }
        };
        let device = Hooked::device("pins slowly", node.driver(0).unwrap(), before).unwrap();
        let builder = || Pool::builder(&device).capacity(LEN).extent(1 << 16).unpinned(Unpinned::Allow);
        let made = |backing| {
            let pool = builder().initial(LEN).backing(backing).build().unwrap();
            pool.wait_pinned(None).unwrap()
        };
        let adopted = || {
            let pool = builder().capacity(2 * LEN).initial(0).build().unwrap();
            pool.adopt(vec![0; LEN + 4096]).map(drop).map_err(|refused| refused.error).unwrap();
            pool.pinning()
        };
        let ways: [(&str, &dyn Fn() -> Pinning); 3] = [
            ("mapped", &|| made(Backing::Registered)),
            ("the driver's", &|| made(Backing::HostAlloc(HostAllocFlags::default()))),
            ("adopted", &adopted),
        ];
        for (way, make) in ways {
            *calls.lock() = 0;
            let since = Instant::now();
            let pinning = make();
            let (all, calls) = (since.elapsed(), *calls.lock());
            assert!(calls >= 3 && pinning.busy >= CALL * calls, "{way}: {calls} calls, {pinning:?}");
            // Between three extents at least.
            let pauses = CALL / ROOM * 2;
            assert!(pinning.busy + pauses <= all, "{way}: {pauses:?} of pauses, {all:?} in all, {pinning:?}");
            assert!(
                pinning.longest_call >= CALL && pinning.bytes_per_second().is_some(),
                "{way}: {pinning:?}"
            );
        }
    }

    #[test]
    fn memory_that_is_pinned_while_its_region_goes_stays_mapped_where_it_cannot_be_unpinned() {
        use std::sync::atomic::{AtomicU64, Ordering};
        use std::sync::mpsc;

        use crate::device::host::{Failure, Fault};

        const LEN: usize = 1 << 16;
        let node = HostNode::new(HostConfig::new()).unwrap();
        let (begun, has_begun) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let (hook, pins) = (Mutex::new((begun, may_go)), AtomicU64::new(0));
        let before = move |call| {
            if matches!(call, Call::Pin) && pins.fetch_add(1, Ordering::Relaxed) == 1 {
                let hook = hook.lock();
                hook.0.send(()).unwrap();
                hook.1.recv().unwrap();
            }
        };
        let device = Hooked::device("again", node.driver(0).unwrap(), before).unwrap();
        node.fail(Fault { device: 0, call: Call::Pin, nth: 0, failure: Failure::Transient });
        let builder = || Pool::builder(&device).capacity(LEN).extent(LEN).initial(LEN);
        let pool = builder().unpinned(Unpinned::Allow).build().unwrap();
        pool.wait_pinned(None).unwrap();
        let base = pool.regions()[0].base.as_ptr().addr();
        // The region goes while it is being pinned again.
        has_begun.recv().unwrap();
        assert_eq!(pool.trim(0), LEN);
        node.fail(Fault { device: 0, call: Call::Unpin, nth: 0, failure: Failure::Transient });
        go.send(()).unwrap();
        drop(pool);
        // Its jobs come after those of the first pool.
        builder().build().unwrap().wait_pinned(None).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_mapped = maps.lines().any(|line| {
            let (first, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [first, end] = [first, end].map(|at| usize::from_str_radix(at, 16).unwrap());
            (first..end).contains(&base)
        });
        assert!(is_mapped, "the device has it pinned");
    }
}

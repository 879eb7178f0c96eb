//! Where regions come from and how they go back: the pool's own mappings, and memory that the driver allocates.
//!
//! A mapping is made in one piece and pinned extent by extent, by the module above; that is by far the fastest way.
//! Memory from the driver comes in separate allocations: each extent is one, and becomes a region of its own. Drivers
//! promise no alignment, and hand out small allocations from shared pages. So an allocation that does not start on a
//! page is made again with one page more, and its whole pages are used.
//!
//! Freeing happens on the region thread, like everything that can synchronise a device. Memory that cannot be freed is
//! leaked and logged, since the device may still reach it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{AGAIN, Extent, REGION_ALIGN, Region, RegionId, Regions, Unpinned, leaked, leave_room};
use crate::device::context::Context;
use crate::device::{Driver, HostAllocFlags, HostKind};
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Owned;
use crate::os;
use crate::segment::PAGE;

/// Where a pool gets its memory from. Set by [`PoolBuilder::backing`](crate::PoolBuilder::backing).
///
/// # Examples
///
/// ```
/// use pinpool::{Backing, Device, HostAllocFlags, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let flags = HostAllocFlags::default();
/// let pool = Pool::builder(&device)
///     .capacity(1 << 20)
///     .backing(Backing::HostAlloc(flags))
///     .unpinned(Unpinned::Allow)
///     .build()?;
/// # drop(pool.checkout(1000)?);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backing {
    /// Mappings of the pool's own, touched by several threads and registered with the device (CUDA:
    /// `cuMemHostRegister`). This is several times faster than memory that drivers allocate, and other users of the
    /// driver wait less meanwhile.
    ///
    /// Where the system cannot register memory (machines in confidential-computing mode), a pool with this backing is
    /// refused, and one whose backing is not set takes [`HostAlloc`](Self::HostAlloc).
    ///
    /// Ascend: `aclrtHostRegister`, which newer libraries, drivers and devices have. On an Ascend device this backing
    /// has to be set explicitly; where the call is missing, building the pool returns an error that says so.
    #[default]
    Registered,
    /// Page-locked memory that the driver allocates, with one call and one region for each
    /// [extent](crate::PoolBuilder::extent). (CUDA: `cuMemHostAlloc`. Ascend: `aclrtMallocHost`, which ignores the
    /// flags.) Huge pages and threads that touch pages have no part in it.
    HostAlloc(HostAllocFlags),
    /// Managed memory (CUDA: `cuMemAllocManaged` with `CU_MEM_ATTACH_GLOBAL`), one call and one region for each extent.
    ///
    /// Its pages move to the processor or device that touches them, so they are **not page-locked**: they count as
    /// unpinned bytes, and [`PinnedBuf::is_pinned`](crate::PinnedBuf::is_pinned) is `false`. [`Unpinned::Refuse`], the
    /// default, does not forbid managed memory, since it was asked for by name. It works only on devices that let the
    /// host use it while they work (CUDA: `CONCURRENT_MANAGED_ACCESS`; no Ascend device); for others, building the pool
    /// returns an error that says so.
    Managed,
}

impl Backing {
    /// The backing where the program has named none.
    pub(crate) fn usual(driver: &dyn Driver) -> Self {
        match driver.allocates() {
            true => Self::HostAlloc(HostAllocFlags::default()),
            false => Self::default(),
        }
    }

    /// What the driver is to allocate; `None` for the pool's own mappings.
    pub(crate) fn kind(self) -> Option<HostKind> {
        match self {
            Self::Registered => None,
            Self::HostAlloc(flags) => Some(HostKind::Locked(flags)),
            Self::Managed => Some(HostKind::Managed),
        }
    }
}

/// Where a region came from.
pub(super) enum RegionSource {
    /// A mapping of the pool's: the region's base and length.
    Mapped,
    /// One allocation of the driver's, in which the region lies.
    Driver { base: NonNull<u8>, len: usize, kind: HostKind },
    /// A value of the program's, owned by the region.
    AdoptedRegion(#[expect(dead_code, reason = "owned, until it is dropped")] Owned<Box<dyn Send>>),
}

impl std::fmt::Debug for RegionSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mapped => f.write_str("Mapped"),
            Self::Driver { kind, .. } => f.debug_tuple("Driver").field(kind).finish(),
            Self::AdoptedRegion(_) => f.write_str("Adopted"),
        }
    }
}

/// Memory that is being allocated by the driver, extent by extent.
pub(super) struct Supply {
    pub(super) context: Arc<Context>,
    pub(super) len: usize,
    /// Bytes of extents that are done.
    pub(super) came: usize,
    pub(super) kind: HostKind,
    /// When the last call that allocated ended, and how long it took.
    pub(super) last: Option<(Instant, Duration)>,
    pub(super) serve: Box<dyn FnMut(RegionId, NonNull<u8>, usize, bool) -> bool + Send>,
    pub(super) done: Box<dyn FnOnce(usize, Option<Error>) + Send>,
    /// From the request until all memory has come or the attempt has ended early.
    pub(super) span: crate::foreign::Span,
}

/// The unit in which the pool can use memory, in bytes.
pub(super) fn page() -> usize {
    os::page_size().max(PAGE)
}

impl Regions {
    /// What the driver is to allocate now; `None` for the pool's own mappings.
    pub(super) fn kind(&self, context: &Context) -> Option<HostKind> {
        self.options.backing.unwrap_or_else(|| Backing::usual(&**context.driver())).kind()
    }

    /// Each region that is made for the pool starts on a multiple of this. (An adopted region starts on a page.)
    pub(crate) fn aligned(&self) -> usize {
        if self.kind(&self.context).is_some() { page() } else { REGION_ALIGN }
    }

    /// Has the driver allocate the next extent, and leaves the rest to another job; without a region thread, all.
    pub(super) fn supply(self: &Arc<Self>, mut supply: Supply) {
        loop {
            let verdict = self.supply_next(&mut supply);
            if !matches!(verdict, Ok(true)) {
                let (error, missing) = (verdict.err(), supply.len - supply.came);
                if self.goes_on_after(error.as_ref()) {
                    supply.context = self.context();
                    break;
                }
                return self.ended(missing, error.as_ref(), || (supply.done)(supply.came, error.clone()));
            }
            if !supply.context.worker().is_inline() {
                break;
            }
        }
        let (regions, context) = (self.clone(), supply.context.clone());
        context.worker().send(move || regions.supply(supply));
    }

    /// Allocates one extent, makes it a region, and hands it over. Returns whether there is more to do.
    fn supply_next(self: &Arc<Self>, supply: &mut Supply) -> Result<bool> {
        let len = self.options.extent.min(supply.len - supply.came);
        let grow = supply.span.clone();
        let _grow = grow.enter();
        let span = crate::foreign::span!(INFO,
            target: "pinpool::region", parent: &grow, "allocate", device = supply.context.name(), bytes = len
        );
        let _entered = span.enter();
        leave_room(supply.last);
        let before = Instant::now();
        let (base, source, pinned) = self.allocate(&supply.context, len, supply.kind)?;
        let took = before.elapsed();
        supply.last = Some((Instant::now(), took));
        // Relaxed: the numbers are only to differ.
        let id = RegionId(self.numbers.fetch_add(1, Ordering::Relaxed) + 1);
        let extents = vec![Extent::new(0, len, pinned)];
        self.progress.lock().regions.push(Region {
            id,
            base,
            len,
            extents,
            node: None,
            ready: 0,
            whole: true,
            source,
            context: supply.context.clone(),
        });
        supply.came += len;
        let go_on = (supply.serve)(id, base, len, pinned);
        self.is_whole(id);
        if !pinned && matches!(supply.kind, HostKind::Locked(_)) {
            self.pin_again_after(AGAIN);
        }
        {
            let mut progress = self.progress.lock();
            progress.pinning.busy += took;
            progress.pinning.made += len;
            progress.pinning.longest_call = progress.pinning.longest_call.max(took);
        }
        self.wake();
        Ok(go_on && supply.came < supply.len)
    }

    /// Notes that all of a region was handed over. `ready` is what can be checked out, so it is raised after that. The
    /// region may have been removed already.
    pub(super) fn is_whole(&self, id: RegionId) {
        let mut progress = self.progress.lock();
        let progress = &mut *progress;
        if let Some(region) = progress.regions.iter_mut().find(|r| r.id == id) {
            region.ready = region.info().len;
            region.whole = true;
            progress.pinning.ready += region.ready;
        }
    }

    /// Allocates one extent: its first byte, what it is a part of, and whether it is pinned.
    fn allocate(
        &self,
        context: &Context,
        len: usize,
        kind: HostKind,
    ) -> Result<(NonNull<u8>, RegionSource, bool)> {
        let ask = |len| context.noting(context.driver().allocate_host(len, kind));
        let locked = matches!(kind, HostKind::Locked(_));
        // An allocation that does not start on a page is made again with one page more.
        let asked = ask(len).and_then(|base| {
            if base.as_ptr().addr() % page() == 0 {
                return Ok((base, len));
            }
            free(context, base, len, kind);
            ask(len + page()).map(|base| (base, len + page()))
        });
        let (allocated, whole) = match asked {
            Ok(allocated) => allocated,
            Err(e)
                if locked
                    && self.options.unpinned == Unpinned::Allow
                    && e.class() == ErrorClass::Transient =>
            {
                crate::foreign::warn!(
                    target: "pinpool::region::unpinned", device = context.name(), bytes = len, error = %e,
                    "the driver gives no pinned memory, plain memory takes its place: copies from it are slower and may block"
                );
                let base = os::map(len, REGION_ALIGN)?;
                os::dont_fork(base, len);
                return Ok((base, RegionSource::Mapped, false));
            }
            Err(e) => return Err(e),
        };
        let front = allocated.as_ptr().addr().next_multiple_of(page()) - allocated.as_ptr().addr();
        // SAFETY: less than a page, and if it is not 0, the allocation has one page more than the extent.
        let base = unsafe { allocated.add(front) };
        Ok((base, RegionSource::Driver { base: allocated, len: whole, kind }, locked))
    }

    /// Whether the memory at this address is the driver's managed memory.
    pub(crate) fn is_managed(&self, at: NonNull<u8>) -> bool {
        let at = at.as_ptr().addr();
        let managed = |r: &Region| matches!(r.source, RegionSource::Driver { kind: HostKind::Managed, .. });
        let has = |r: &Region| (r.base.as_ptr().addr()..r.base.as_ptr().addr() + r.len).contains(&at);
        self.progress.lock().regions.iter().any(|r| has(r) && managed(r))
    }
}

impl Region {
    /// Gives the region back to where it came from, on the region thread. Nothing can reach it any more.
    pub(super) fn go(self, context: &Context) {
        if let RegionSource::Driver { base, len, kind } = self.source {
            return free(context, base, len, kind);
        }
        let mut stuck = false;
        let mut last = None;
        for extent in &self.extents {
            // SAFETY: within the region.
            let start = unsafe { self.base.add(extent.offset) };
            if extent.is_pinned() {
                leave_room(last);
                let (driver, call) = (context.driver(), Instant::now());
                let unpinned = match self.source {
                    // SAFETY: registered once, unregistered once, and nothing can reach it any more.
                    RegionSource::AdoptedRegion(_) => unsafe { driver.unregister(start, extent.len) },
                    // SAFETY: pinned once, unpinned once, and nothing can reach it any more.
                    _ => unsafe { driver.unpin(start, extent.len) },
                };
                last = Some((Instant::now(), call.elapsed()));
                if let Err(error) = unpinned {
                    context.holds().leaked(1);
                    crate::foreign::error!(
                        target: "pinpool::region::leak", device = context.name(), bytes = extent.len, %error,
                        "memory cannot be unpinned: it is leaked"
                    );
                    stuck = true;
                    continue;
                }
            }
            // One extent after the other: while memory is unmapped, no thread of the process can map any.
            if matches!(self.source, RegionSource::Mapped) {
                // SAFETY: mapped by the pool, and nothing can reach it any more.
                leaked(context, unsafe { os::unmap(start, extent.len) });
            }
        }
        if stuck {
            return std::mem::forget(self.source);
        }
        drop(self.source);
    }
}

/// Frees an allocation of the driver's that nothing can reach any more.
fn free(context: &Context, base: NonNull<u8>, len: usize, kind: HostKind) {
    // SAFETY: allocated once, freed once, and nothing uses it.
    if let Err(error) = unsafe { context.driver().free_host(base, len, kind) } {
        context.holds().leaked(1);
        crate::foreign::error!(
            target: "pinpool::region::leak", device = context.name(), bytes = len, %error,
            "memory that the driver allocated cannot be freed: it is leaked"
        );
    }
}

//! Where regions come from and how they go back: the pool's own mappings, and memory that the driver allocates.
//!
//! A mapping is made in one piece and pinned extent by extent, which the module above does, since it is by far the
//! fastest way. Memory from the driver has no mapping in common: each extent is an allocation and becomes a region of
//! its own. Drivers promise no alignment, and hand small allocations out of shared pages, so an allocation that does
//! not start on a page is made again with a page more, of which the whole pages are used.
//!
//! Freeing happens on the worker, like everything that can synchronise a device. What cannot be freed is leaked and
//! logged: the device may still reach it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Extent, REGION_ALIGN, Region, RegionId, Regions, Unpinned, leaked, leave_room};
use crate::device::context::Context;
use crate::device::{HostAllocFlags, HostKind};
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::Owned;
use crate::os;
use crate::segment::PAGE;

/// Where a pool gets its memory from. Set by [`PoolBuilder::backing`](crate::PoolBuilder::backing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backing {
    /// Mappings of the pool's own, touched by several threads and registered with the device (CUDA:
    /// `cuMemHostRegister`). Several times faster to get than what drivers allocate, and other users of the driver wait
    /// less meanwhile.
    ///
    /// Ascend: `aclrtHostRegister`, which newer libraries, drivers and devices have; there it is to be asked for by
    /// name, and where it is missing building the pool is an error that says so.
    #[default]
    Registered,
    /// Page-locked memory that the driver allocates (CUDA: `cuMemHostAlloc`; Ascend: `aclrtMallocHost`, which knows
    /// none of the flags and gives what it gives), one call and one region for each
    /// [extent](crate::PoolBuilder::extent). Huge pages and threads that touch pages have no part in it.
    HostAlloc(HostAllocFlags),
    /// Managed memory (CUDA: `cuMemAllocManaged` with `CU_MEM_ATTACH_GLOBAL`), one call and one region for each extent.
    ///
    /// Its pages move to who touches them, so they are **not page-locked**: it counts as unpinned bytes, and
    /// [`PinnedBuf::is_pinned`](crate::PinnedBuf::is_pinned) is `false`. [`Unpinned::Refuse`], the default, does not
    /// forbid it, since it was asked for by name. Only on devices that let the host use it while they work (CUDA:
    /// `CONCURRENT_MANAGED_ACCESS`; no Ascend device); elsewhere building the pool is an error that says so.
    Managed,
}

impl Backing {
    /// What the driver is to allocate, if it is.
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
    /// A mapping of ours: the region's base and length.
    Mapped,
    /// One allocation of the driver's, which the region lies in.
    Driver { base: NonNull<u8>, len: usize, kind: HostKind },
    /// The caller's, owned by us.
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
    /// Bytes that have come so far.
    pub(super) came: usize,
    pub(super) kind: HostKind,
    /// When the last call was over, and how long it took.
    pub(super) last: Option<(Instant, Duration)>,
    pub(super) serve: Box<dyn FnMut(RegionId, NonNull<u8>, usize, bool) -> bool + Send>,
    pub(super) done: Box<dyn FnOnce(usize, Option<Error>) + Send>,
    /// From being asked for until all of it came, or no more does.
    pub(super) span: crate::foreign::Span,
}

/// The unit in which the pool can use memory.
pub(super) fn page() -> usize {
    os::page_size().max(PAGE)
}

impl Regions {
    /// What each region starts on a multiple of.
    pub(crate) fn aligned(&self) -> usize {
        if self.options.backing.kind().is_some() { page() } else { REGION_ALIGN }
    }

    /// Has the driver allocate the next extents, each in a job of its own.
    pub(super) fn supply(self: &Arc<Self>, mut supply: Supply) {
        loop {
            let verdict = self.supply_next(&mut supply);
            if !matches!(verdict, Ok(true)) {
                let (error, missing) = (verdict.err(), supply.len - supply.came);
                if self.goes_on_after(error.as_ref()) {
                    supply.context = self.context();
                    break;
                }
                self.ended(missing, error.as_ref());
                return (supply.done)(supply.came, error);
            }
            if !supply.context.worker().is_inline() {
                break;
            }
        }
        let (regions, context) = (self.clone(), supply.context.clone());
        context.worker().send(move || regions.supply(supply));
    }

    /// Allocates one extent, makes it a region, and hands it over. Whether there is more to do.
    fn supply_next(&self, supply: &mut Supply) -> Result<bool> {
        let len = self.options.extent.min(supply.len - supply.came);
        let span = crate::foreign::span!(INFO,
            target: "pinpool::region", parent: &supply.span, "allocate", device = supply.context.name(), bytes = len
        );
        let _entered = span.enter();
        leave_room(supply.last);
        let before = Instant::now();
        let (base, source, pinned) = self.allocate(&supply.context, len, supply.kind)?;
        let took = before.elapsed();
        supply.last = Some((Instant::now(), took));
        // Relaxed: only different, not in any order with anything else.
        let id = RegionId(self.numbers.fetch_add(1, Ordering::Relaxed) + 1);
        let extents = vec![Extent { offset: 0, len, pinned }];
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
        {
            let mut progress = self.progress.lock();
            progress.pinning.busy += took;
            progress.pinning.made += len;
            progress.pinning.longest_call = progress.pinning.longest_call.max(took);
        }
        self.wake();
        Ok(go_on && supply.came < supply.len)
    }

    /// A region was handed over as a whole. Ready is what can be checked out, so it is counted after it can; the region
    /// may be gone again already.
    pub(super) fn is_whole(&self, id: RegionId) {
        let mut progress = self.progress.lock();
        let progress = &mut *progress;
        if let Some(region) = progress.regions.iter_mut().find(|r| r.id == id) {
            region.ready = region.info().len;
            region.whole = true;
            progress.pinning.ready += region.ready;
        }
    }

    /// One extent: its first byte, what it is a part of, and whether it is pinned.
    fn allocate(
        &self,
        context: &Context,
        len: usize,
        kind: HostKind,
    ) -> Result<(NonNull<u8>, RegionSource, bool)> {
        let ask = |len| context.noting(context.driver().allocate_host(len, kind));
        let locked = matches!(kind, HostKind::Locked(_));
        // One that does not start on a page is made again with a page more.
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
        // SAFETY: less than a page, and where it is not 0 the allocation has a page more than the extent.
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
    /// Gives the region back to where it came from. On the worker; nobody can reach it any more.
    pub(super) fn go(self, context: &Context) {
        if let RegionSource::Driver { base, len, kind } = self.source {
            return free(context, base, len, kind);
        }
        let mut stuck = false;
        let mut last = None;
        for extent in &self.extents {
            // SAFETY: within the region.
            let start = unsafe { self.base.add(extent.offset) };
            if extent.pinned {
                leave_room(last);
                let call = Instant::now();
                // SAFETY: pinned once, unpinned once, and nobody can reach it any more.
                let unpinned = unsafe { context.driver().unpin(start, extent.len) };
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
            // One after the other: while a mapping goes, nobody in the process can map anything.
            if matches!(self.source, RegionSource::Mapped) {
                // SAFETY: ours, and nobody can reach it any more.
                leaked(context, unsafe { os::unmap(start, extent.len) });
            }
        }
        if stuck {
            return std::mem::forget(self.source);
        }
        drop(self.source);
    }
}

/// Frees an allocation of the driver's that nobody can reach.
fn free(context: &Context, base: NonNull<u8>, len: usize, kind: HostKind) {
    // SAFETY: allocated once, freed once, and nobody uses it.
    if let Err(error) = unsafe { context.driver().free_host(base, len, kind) } {
        context.holds().leaked(1);
        crate::foreign::error!(
            target: "pinpool::region::leak", device = context.name(), bytes = len, %error,
            "memory of the driver's cannot be freed: it is leaked"
        );
    }
}

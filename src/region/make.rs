//! How regions are made and given back: one loop for memory that the pool maps and for memory that the driver allocates.
//!
//! The loop goes extent by extent, and each extent is a job of its own on the region thread, so that another job waits
//! for one extent at most. A mapping is made in one piece, touched by several threads ([`touch`](super::touch)) and
//! pinned extent by extent; that is by far the fastest way. Memory from the driver comes in separate allocations: each
//! extent is one, and becomes a region of its own. Drivers promise no alignment, and hand out small allocations from
//! shared pages. So an allocation that does not start on a page is made again with one page more, and its whole pages
//! are used.
//!
//! Freeing happens on the region thread, like everything that can synchronise a device. Memory that cannot be freed is
//! leaked and logged, since the device may still reach it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::touch::Toucher;
use super::{
    Extent, REGION_ALIGN, Region, RegionId, RegionInfo, RegionOptions, RegionProgress, Regions, Unpinned,
};
use crate::device::HostKind;
use crate::device::context::Context;
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::{self, Owned, Span};
use crate::os;
use crate::segment::PAGE;

/// The pause between two calls that pin or unpin is the first call's time, divided by this.
pub(super) const ROOM: u32 = 32;
/// After a call that is shorter there is no pause: no other caller has waited long.
const SHORT_CALL: Duration = Duration::from_micros(200);

/// The pause before memory that went unpinned is tried again, at first and at most.
const AGAIN: Duration = Duration::from_millis(100);
const MOST_AGAIN: Duration = Duration::from_secs(60);

/// Where a region came from.
pub(super) enum RegionSource {
    /// A mapping of the pool's: the region's base and length.
    Mapped,
    /// One allocation of the driver's, in which the region lies.
    Driver { base: NonNull<u8>, len: usize, kind: HostKind },
    /// A value of the program's, owned by the region.
    Adopted(#[expect(dead_code, reason = "owned, until it is dropped")] Owned<Box<dyn Send>>),
}

/// Gets each extent: its region, its first byte, its length, and whether it is pinned. `false`: no more are wanted.
type Serve = Box<dyn FnMut(RegionId, NonNull<u8>, usize, bool) -> bool + Send>;

/// Gets the number of bytes that came, and if they are fewer than were asked for, why.
type Done = Box<dyn FnOnce(usize, Option<Error>) + Send>;

/// Memory that is being made.
struct Making {
    context: Arc<Context>,
    supply: Supply,
    len: usize,
    /// Bytes of extents that are done.
    came: usize,
    serve: Serve,
    done: Done,
    /// From the request until all memory has come or the making has ended early.
    span: Span,
}

/// Where memory that is being made comes from.
enum Supply {
    /// A mapping, which is a region already.
    Mapped { id: RegionId, base: NonNull<u8>, toucher: Toucher },
    /// Allocations of the driver's.
    Driver(HostKind),
}

// SAFETY: only the address keeps it from being Send, and the mapping is the region's.
unsafe impl Send for Making {}

/// The unit in which the pool can use memory, in bytes.
pub(super) fn page() -> usize {
    os::page_size().max(PAGE)
}

impl Regions {
    /// Makes `len` bytes on the device's region thread. Hands each extent to `serve` as soon as it is usable, until
    /// `serve` returns `false`. `done` gets the number of bytes that came, and if it is less than `len`, why.
    pub(crate) fn pin(
        self: &Arc<Self>,
        len: usize,
        serve: impl FnMut(RegionId, NonNull<u8>, usize, bool) -> bool + Send + 'static,
        done: impl FnOnce(usize, Option<Error>) + Send + 'static,
    ) {
        self.begin(len);
        self.progress.lock().pinning.error = None;
        let (regions, context) = (self.clone(), self.context());
        let span =
            foreign::span!(INFO, target: "pinpool::region", "grow", device = context.name(), bytes = len);
        context.clone().worker().send(move || match regions.supply(len, &context) {
            Ok(supply) => {
                let (serve, done) = (Box::new(serve), Box::new(done));
                regions.go_on(Making { context, supply, len, came: 0, serve, done, span });
            }
            Err(error) => regions.ended(len, Some(&error), || done(0, Some(error.clone()))),
        });
    }

    /// Where so many bytes come from. Maps them, unless the driver allocates them.
    fn supply(&self, len: usize, context: &Arc<Context>) -> Result<Supply> {
        // What a stepped device does must not depend on the machine, and it gets no threads, as it has none of its own.
        let is_inline = context.worker().is_inline();
        if self.options.check_cgroups && !is_inline {
            os::refuse_over_cgroups(len)?;
        }
        if let Some(kind) = self.kind(context) {
            return Ok(Supply::Driver(kind));
        }
        let RegionOptions { threads, huge, node, .. } = self.options;
        let base = map(len)?;
        // Before any page is touched.
        if let Some(node) = node.filter(|node| !os::prefer_node(base, len, *node)) {
            foreign::debug!(
                target: "pinpool::region", device = context.name(), node,
                "the system does not let memory be taken from this node"
            );
        }
        // SAFETY: mapped just now; extents are used after `wait` has returned for them, and the rest is unmapped by
        // `finish`, after the toucher was dropped.
        let toucher = unsafe { Toucher::start(base, len, if is_inline { 0 } else { threads }, huge, node) };
        let id = self.add(base, len, Vec::new(), RegionSource::Mapped, node, context).id;
        Ok(Supply::Mapped { id, base, toucher })
    }

    /// Adds a region, whose pages are asked of `node`. Extents may follow.
    pub(super) fn add(
        &self,
        base: NonNull<u8>,
        len: usize,
        extents: Vec<Extent>,
        source: RegionSource,
        node: Option<u32>,
        context: &Arc<Context>,
    ) -> RegionInfo {
        let mut progress = self.progress.lock();
        progress.last_id += 1;
        let id = RegionId(progress.last_id);
        let context = context.clone();
        let region = Region { id, base, len, extents, node, ready: 0, whole: false, source, context };
        let info = region.info();
        progress.regions.push(region);
        info
    }

    /// Makes the next extent, and leaves the rest to another job; without a region thread, makes all.
    fn go_on(self: &Arc<Self>, mut making: Making) {
        loop {
            let verdict = self.make_next(&mut making);
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

    /// Makes one extent and hands it over. Returns whether there is more to do.
    fn make_next(self: &Arc<Self>, making: &mut Making) -> Result<bool> {
        let context = making.context.clone();
        let len = self.options.extent.min(making.len - making.came);
        let grow = making.span.clone();
        let _grow = grow.enter();
        let span = match making.supply {
            Supply::Mapped { .. } => foreign::span!(INFO,
                target: "pinpool::region", parent: &grow, "pin", device = context.name(), bytes = len
            ),
            Supply::Driver(_) => foreign::span!(INFO,
                target: "pinpool::region", parent: &grow, "allocate", device = context.name(), bytes = len
            ),
        };
        let _entered = span.enter();
        let before = Instant::now();
        if let Supply::Mapped { toucher, .. } = &mut making.supply {
            toucher.wait(making.came + len);
        }
        let touching = before.elapsed();
        // Foreign code is put off until the extent is listed.
        let deferral = foreign::defer();
        let (id, start, pinned, took) = match &mut making.supply {
            Supply::Mapped { id, base, .. } => {
                // SAFETY: within the mapping.
                let start = unsafe { base.add(making.came) };
                // SAFETY: the extent is mapped, and stays mapped until the region's end has unpinned it.
                let (pinned, took) = unsafe { self.pin_extent(&context, start, len, false) };
                (*id, start, pinned?, took)
            }
            Supply::Driver(kind) => {
                let (allocated, took) = paced(|| self.allocate(&context, len, *kind));
                let (start, source, pinned) = allocated?;
                (self.add(start, len, Vec::new(), source, None, &context).id, start, pinned, took)
            }
        };
        {
            let mut progress = self.progress.lock();
            if let Some(region) = progress.regions.iter_mut().find(|r| r.id == id) {
                let offset = start.as_ptr().addr() - region.base.as_ptr().addr();
                region.extents.push(Extent::new(offset, len, pinned));
                // Before the last extent is handed over: a thread that gets it may give it back, and trim, at once.
                region.whole = offset + len == region.len;
            }
        }
        drop(deferral);
        making.came += len;
        let go_on = (making.serve)(id, start, len, pinned);
        self.served(id, len, touching + took, took);
        self.wake();
        Ok(go_on && making.came < making.len)
    }

    /// Notes that bytes of a region were handed over. `ready` is what can be checked out, so it is raised after that. The
    /// region may have been removed already.
    pub(super) fn served(self: &Arc<Self>, id: RegionId, len: usize, busy: Duration, longest: Duration) {
        let mut progress = self.progress.lock();
        let RegionProgress { regions, pinning, .. } = &mut *progress;
        let region = regions.iter_mut().find(|r| r.id == id);
        let again = region.is_some_and(|region| {
            region.ready += len;
            region.whole |= region.ready == region.len;
            pinning.ready += len;
            region.unpinned().is_some()
        });
        pinning.busy += busy;
        pinning.made += len;
        pinning.longest_call = pinning.longest_call.max(longest);
        drop(progress);
        if again {
            self.pin_again_after(AGAIN);
        }
    }

    /// Pins memory where it is, by the call that [`unpin`] undoes. Returns whether it is pinned, and how long the call
    /// took. With [`Unpinned::Allow`] memory that is not pinned is no error.
    ///
    /// # Safety
    /// The memory is whole pages that nobody has pinned, and stays until it was unpinned.
    pub(super) unsafe fn pin_extent(
        &self,
        context: &Context,
        start: NonNull<u8>,
        len: usize,
        is_adopted: bool,
    ) -> (Result<bool>, Duration) {
        // SAFETY: this function's contract.
        let (pinned, took) = paced(|| unsafe { pin(context, start, len, is_adopted) });
        let pinned = match context.noting(pinned) {
            Err(e) if self.options.unpinned == Unpinned::Allow && e.class() == ErrorClass::Transient => {
                foreign::warn!(
                    target: "pinpool::region::unpinned", device = context.name(), bytes = len, error = %e,
                    "memory is not pinned: copies from it are slower and may block"
                );
                Ok(false)
            }
            pinned => pinned.map(|()| true),
        };
        (pinned, took)
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
                foreign::warn!(
                    target: "pinpool::region::unpinned", device = context.name(), bytes = len, error = %e,
                    "the driver gives no pinned memory, plain memory takes its place: copies from it are slower and may block"
                );
                return Ok((map(len)?, RegionSource::Mapped, false));
            }
            Err(e) => return Err(e),
        };
        let front = allocated.as_ptr().addr().next_multiple_of(page()) - allocated.as_ptr().addr();
        // SAFETY: less than a page, and if it is not 0, the allocation has one page more than the extent.
        let base = unsafe { allocated.add(front) };
        Ok((base, RegionSource::Driver { base: allocated, len: whole, kind }, locked))
    }

    /// No more extents: unmaps the rest of a mapping. The extents that are done stay.
    fn finish(self: &Arc<Self>, making: Making, error: Option<Error>) {
        let Making { context, supply, len, came, serve, done, .. } = making;
        let is_mapping = matches!(supply, Supply::Mapped { .. });
        if let Supply::Mapped { id, base, toucher } = supply {
            // The toucher's threads end before any of it is unmapped.
            drop(toucher);
            {
                let mut progress = self.progress.lock();
                if let Some(region) = progress.regions.iter_mut().find(|r| r.id == id) {
                    region.len = came;
                    region.whole = true;
                }
                if came == 0 {
                    progress.regions.retain(|r| r.id != id);
                }
            }
            if came < len {
                // SAFETY: the failed extent and the rest: mapped, not pinned, never handed out.
                unmap(&context, unsafe { base.add(came) }, len - came);
            }
        }
        // Memory of the driver's own takes the place of a mapping that cannot be pinned.
        let allocates =
            is_mapping && matches!(error, Some(Error::Unsupported(_))) && self.kind(&context).is_some();
        if self.goes_on_after(error.as_ref()) || allocates {
            // The next attempt is counted first, so that a waiter never sees that nothing is being made.
            self.pin(len - came, serve, move |more, error| done(came + more, error));
            return self.ended(len - came, None, || ());
        }
        self.ended(len - came, error.as_ref(), || done(came, error.clone()));
    }

    /// Has the region threads try memory that went unpinned again after a pause.
    fn pin_again_after(self: &Arc<Self>, pause: Duration) {
        if self.context.worker().is_inline() || std::mem::replace(&mut self.progress.lock().again, true) {
            return;
        }
        let regions = Arc::downgrade(self);
        crate::timer::after(pause, move || {
            let Some(regions) = regions.upgrade() else { return };
            let contexts: BTreeMap<u64, Arc<Context>> = {
                let mut progress = regions.progress.lock();
                progress.again = false;
                let unpinned = progress.regions.iter().filter(|region| region.unpinned().is_some());
                unpinned.map(|region| (region.context.id(), region.context.clone())).collect()
            };
            for context in contexts.into_values() {
                let regions = regions.clone();
                // By the device that is to unpin it.
                context.clone().worker().send(move || regions.pin_again(&context, pause, None));
            }
        });
    }

    /// Pins one extent of a device's that went unpinned, and leaves the others to other jobs. Regions up to `refused` have
    /// been tried: the driver may pin that one later.
    fn pin_again(self: &Arc<Self>, context: &Arc<Context>, pause: Duration, refused: Option<RegionId>) {
        let next = {
            let progress = self.progress.lock();
            // In the order of their numbers.
            let of_device = progress.regions.iter().filter(|region| region.context.id() == context.id());
            let mut left = of_device.filter(|region| Some(region.id) > refused);
            left.find_map(|region| Some((region.id, region.unpinned()?)))
        };
        let Some((id, (start, Extent { len, pinned: mark, .. }, is_adopted))) = next else {
            if refused.is_some() {
                self.pin_again_after((pause * 2).min(MOST_AGAIN));
            }
            return;
        };
        let (regions, device) = (self.clone(), context.clone());
        let go_on = move |refused| {
            device.clone().worker().send(move || regions.pin_again(&device, pause, refused));
        };
        // SAFETY: it is mapped: a region goes by a later job of this thread, which looks at the mark.
        let (pinned, took) = paced(|| unsafe { pin(context, start, len, is_adopted) });
        match pinned {
            // Counted once, when the extent was made.
            Err(error) if error.class() == ErrorClass::Transient => {
                return go_on(Some(id));
            }
            pinned => {
                if let Err(error) = context.noting(pinned) {
                    foreign::warn!(
                        target: "pinpool::region::unpinned", device = context.name(), bytes = len, %error,
                        "memory that is not pinned cannot be: it is not tried again"
                    );
                    self.give_up(id, start);
                    return go_on(refused);
                }
            }
        }
        mark.store(true, Ordering::Relaxed);
        {
            let mut progress = self.progress.lock();
            progress.pinning.longest_call = progress.pinning.longest_call.max(took);
        }
        self.pinned_after_all.get().into_iter().for_each(|call| call(start));
        foreign::info!(
            target: "pinpool::region::unpinned", device = context.name(), bytes = len,
            "memory that was not pinned is pinned after all"
        );
        go_on(refused);
    }

    /// Has the extent of a region that starts there not tried again.
    fn give_up(&self, id: RegionId, start: NonNull<u8>) {
        let mut progress = self.progress.lock();
        let Some(region) = progress.regions.iter_mut().find(|region| region.id == id) else { return };
        let offset = start.as_ptr().addr() - region.base.as_ptr().addr();
        let extents = region.extents.iter_mut().filter(|extent| extent.offset == offset);
        extents.for_each(|extent| extent.hopeless = true);
    }
}

impl Region {
    /// The first extent that went unpinned and that the driver may yet pin where it is, with its first byte, and whether the
    /// program's value holds it.
    pub(super) fn unpinned(&self) -> Option<(NonNull<u8>, Extent, bool)> {
        let is_open = match self.source {
            RegionSource::Mapped => true,
            RegionSource::Driver { .. } => false,
            // The caller's thread hands its extents over.
            RegionSource::Adopted(_) => self.whole,
        };
        let extent = self.extents.iter().find(|extent| is_open && !extent.hopeless && !extent.is_pinned())?;
        // SAFETY: within the region.
        Some((unsafe { self.base.add(extent.offset) }, extent.clone(), self.is_adopted()))
    }

    fn is_adopted(&self) -> bool {
        matches!(self.source, RegionSource::Adopted(_))
    }

    /// Gives the region back to where it came from, on the region thread. Nothing can reach it any more.
    pub(super) fn go(self, context: &Context) {
        if let RegionSource::Driver { base, len, kind } = self.source {
            return free(context, base, len, kind);
        }
        let mut clean = true;
        for extent in &self.extents {
            // SAFETY: within the region.
            let start = unsafe { self.base.add(extent.offset) };
            // SAFETY: pinned once, unpinned once, and nothing can reach it any more.
            if extent.is_pinned() && !unsafe { unpin(context, start, extent.len, self.is_adopted()) } {
                clean = false;
            } else if matches!(self.source, RegionSource::Mapped) {
                // One extent after the other: while memory is unmapped, no thread of the process can map any.
                unmap(context, start, extent.len);
            }
        }
        if !clean {
            std::mem::forget(self.source);
        }
    }
}

thread_local! {
    /// When the last call that pinned or unpinned on this thread ended, and how long it took.
    static LAST: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// Makes a call that pins or unpins, after a pause in which other callers get the driver's locks. Returns how long the
/// call took.
fn paced<R>(call: impl FnOnce() -> R) -> (R, Duration) {
    if let Some((over, took)) = LAST.get().filter(|(_, took)| *took > SHORT_CALL) {
        std::thread::sleep((took / ROOM).saturating_sub(over.elapsed()));
    }
    let before = Instant::now();
    let result = call();
    let took = before.elapsed();
    LAST.set(Some((Instant::now(), took)));
    (result, took)
}

/// # Safety
/// As for [`Regions::pin_extent`].
unsafe fn pin(context: &Context, start: NonNull<u8>, len: usize, is_adopted: bool) -> Result<()> {
    let driver = context.driver();
    // SAFETY: this function's contract.
    unsafe { if is_adopted { driver.register(start, len, false) } else { driver.pin(start, len) } }
}

/// Unpins an extent. Returns whether it is unpinned; one that is not is leaked.
///
/// # Safety
/// [`pin`] has pinned it, and nothing can reach it any more.
pub(super) unsafe fn unpin(context: &Context, start: NonNull<u8>, len: usize, is_adopted: bool) -> bool {
    let driver = context.driver();
    let (unpinned, _) = paced(|| {
        // SAFETY: this function's contract.
        unsafe { if is_adopted { driver.unregister(start, len) } else { driver.unpin(start, len) } }
    });
    if let Err(error) = &unpinned {
        context.holds().leaked(1);
        foreign::error!(
            target: "pinpool::region::leak", device = context.name(), bytes = len, %error,
            "memory cannot be unpinned: it is leaked"
        );
    }
    unpinned.is_ok()
}

/// Maps memory for a region.
fn map(len: usize) -> Result<NonNull<u8>> {
    let base = os::map(len, REGION_ALIGN)?;
    // Where the system refuses, the pool works all the same.
    os::dont_fork(base, len);
    Ok(base)
}

/// Unmaps a part of a mapping that nothing uses any more.
fn unmap(context: &Context, start: NonNull<u8>, len: usize) {
    // SAFETY: mapped by the pool, not pinned, and nothing can reach it any more.
    if let Err(error) = unsafe { os::unmap(start, len) } {
        foreign::error!(target: "pinpool::region::leak", device = context.name(), %error, "a mapping is leaked");
    }
}

/// Frees an allocation of the driver's that nothing can reach any more.
fn free(context: &Context, base: NonNull<u8>, len: usize, kind: HostKind) {
    // SAFETY: allocated once, freed once, and nothing uses it.
    if let Err(error) = unsafe { context.driver().free_host(base, len, kind) } {
        context.holds().leaked(1);
        foreign::error!(
            target: "pinpool::region::leak", device = context.name(), bytes = len, %error,
            "memory that the driver allocated cannot be freed: it is leaked"
        );
    }
}

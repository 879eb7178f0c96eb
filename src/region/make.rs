//! How regions are made and given back: one loop for memory that the pool maps and for memory that
//! the driver allocates.
//!
//! The loop goes extent by extent, each a job of its own on the region thread, so that other jobs
//! wait for one extent at most. A mapping is made in one piece, touched by several threads
//! ([`touch`](super::touch)) and pinned extent by extent: by far the fastest way. Memory from the
//! driver comes in separate allocations: each extent is one, and a region of its own. Drivers
//! promise no alignment, and hand out small allocations from shared pages. So an allocation that
//! does not start on a page is made again with one page more, and its whole pages are used.
//!
//! Freeing happens on the region thread, like everything that can synchronise a device. Memory that
//! cannot be freed is leaked and logged, since the device may still reach it.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::touch::Toucher;
use super::{
    BeforeUnpin, Extent, Owner, Pinned, REGION_ALIGN, Region, RegionId, RegionInfo, RegionOptions, Regions,
    Unpinned,
};
use crate::device::context::Context;
use crate::device::{HostKind, Whose};
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
    /// A mapping of the pool's.
    Mapped,
    /// One allocation of the driver's, in which the region lies.
    Driver { base: NonNull<u8>, len: usize, kind: HostKind },
    /// A value of the program's, which the region owns once all of it is pinned.
    Adopted(#[expect(dead_code, reason = "owned, until it is dropped")] Option<Owned<Box<dyn Send>>>),
}

/// Memory that is being made.
struct Making {
    context: Arc<Context>,
    supply: Supply,
    len: usize,
    /// Bytes of extents that are done.
    came: usize,
    owner: Arc<dyn Owner>,
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
    /// Makes `len` bytes on the device's region thread. Hands each extent to `owner` as soon as it
    /// is usable, as long as it wants more, and tells it at the end what did not come, and why.
    pub(crate) fn pin(self: &Arc<Self>, len: usize, owner: Arc<dyn Owner>) {
        self.begin(len);
        self.progress.lock().pinning.error = None;
        let (regions, context) = (self.clone(), self.context());
        let span =
            foreign::span!(INFO, target: "pinpool::region", "grow", device = context.name(), bytes = len);
        context.clone().worker().send(move || match regions.supply(len, &context) {
            Ok(supply) => regions.go_on(Making { context, supply, len, came: 0, owner, span }),
            Err(error) => regions.ended(len, Some(&error), Some(&owner)),
        });
    }

    /// Where so many bytes come from. Maps them, unless the driver allocates them.
    fn supply(&self, len: usize, context: &Arc<Context>) -> Result<Supply> {
        if self.options.check_cgroups {
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
        // SAFETY: mapped just now; extents are used after `wait` has returned for them, and the
        // rest is unmapped by `finish`, after the toucher was dropped.
        let toucher = unsafe { Toucher::start(base, len, threads, huge, node) };
        let region = Region::new(base, RegionSource::Mapped, context);
        let id = self.add(Region { node, ..region }).id;
        Ok(Supply::Mapped { id, base, toucher })
    }

    /// Lists a region. Extents may follow.
    pub(super) fn add(&self, mut region: Region) -> RegionInfo {
        let mut progress = self.progress.lock();
        progress.last_id += 1;
        region.id = RegionId(progress.last_id);
        let info = region.info();
        progress.regions.push(region);
        info
    }

    /// Makes the next extent, and leaves the rest to another job.
    fn go_on(self: &Arc<Self>, mut making: Making) {
        let verdict = self.make_next(&mut making);
        if !matches!(verdict, Ok(true)) {
            return self.finish(making, verdict.err());
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
                // SAFETY: the extent is mapped until the region's end has unpinned it.
                let (pinned, took) = unsafe { self.pin_extent(&context, start, len, false) };
                let extent = Extent { offset: making.came, len, pinned: pinned? };
                self.progress.lock().region(*id).into_iter().for_each(|region| region.extents.push(extent));
                (*id, start, extent.pinned, took)
            }
            Supply::Driver(kind) => {
                let (allocated, took) = paced(|| self.allocate(&context, len, *kind));
                let (start, source, pinned) = allocated?;
                let mut region = Region::new(start, source, &context);
                region.extents.push(Extent { offset: 0, len, pinned });
                (self.add(region).id, start, pinned, took)
            }
        };
        drop(deferral);
        making.came += len;
        let extent = Extent { offset: 0, len, pinned };
        let go_on = self.hand_over(id, start, extent, [touching + took, took], &making.owner);
        Ok(go_on && making.came < making.len)
    }

    /// Hands an extent over of a region that is listed, once. `times` are the time spent on making
    /// it, and that of the call that pinned it. Returns whether more is wanted.
    pub(super) fn hand_over(
        self: &Arc<Self>,
        id: RegionId,
        start: NonNull<u8>,
        extent: Extent,
        times: [Duration; 2],
        owner: &Arc<dyn Owner>,
    ) -> bool {
        let Extent { len, pinned, .. } = extent;
        // SAFETY: within a region that is listed, which goes when the owner has it removed.
        let go_on = unsafe { owner.add_extent(id, start, len, pinned == Pinned::Yes) };
        let mut progress = self.progress.lock();
        let mut again = false;
        // `ready` is what can be checked out. The region may have been removed already.
        if let Some(region) = progress.region(id) {
            region.ready += len;
            again = region.unpinned().next().is_some();
            progress.pinning.ready += len;
        }
        let pinning = &mut progress.pinning;
        pinning.busy += times[0];
        pinning.made += len;
        pinning.longest_call = pinning.longest_call.max(times[1]);
        drop(progress);
        if again {
            self.pin_again_after(AGAIN, Arc::downgrade(owner));
        }
        self.changed.notify_all();
        go_on
    }

    /// Pins memory where it is; [`unpin`] undoes it. Returns also how long the call took.
    ///
    /// # Safety
    /// The memory is whole pages that nobody has pinned, and stays until it was unpinned.
    pub(super) unsafe fn pin_extent(
        &self,
        context: &Context,
        start: NonNull<u8>,
        len: usize,
        is_adopted: bool,
    ) -> (Result<Pinned>, Duration) {
        // SAFETY: this function's contract.
        let (pinned, took) = paced(|| unsafe { pin(context, start, len, is_adopted) });
        let pinned = match context.noting(pinned) {
            Err(error) if self.goes_on_unpinned(context, len, &error) => Ok(Pinned::NotYet),
            pinned => pinned.map(|()| Pinned::Yes),
        };
        (pinned, took)
    }

    /// Whether memory that was refused with this error is used unpinned.
    fn goes_on_unpinned(&self, context: &Context, len: usize, error: &Error) -> bool {
        let goes_on = self.options.unpinned == Unpinned::Allow && error.class() == ErrorClass::Transient;
        if goes_on {
            foreign::warn!(
                target: "pinpool::region::unpinned", device = context.name(), bytes = len, %error,
                "memory is not pinned: copies from it are slower and may block"
            );
        }
        goes_on
    }

    /// Allocates one extent: its first byte, what it is a part of, and whether it is pinned.
    fn allocate(
        &self,
        context: &Context,
        len: usize,
        kind: HostKind,
    ) -> Result<(NonNull<u8>, RegionSource, Pinned)> {
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
            // Plain memory takes its place.
            Err(error) if locked && self.goes_on_unpinned(context, len, &error) => {
                return Ok((map(len)?, RegionSource::Mapped, Pinned::NotYet));
            }
            asked => asked?,
        };
        let front = allocated.as_ptr().addr().next_multiple_of(page()) - allocated.as_ptr().addr();
        // SAFETY: less than a page; unless it is 0, the allocation has a page more than the extent.
        let base = unsafe { allocated.add(front) };
        let pinned = if locked { Pinned::Yes } else { Pinned::Never };
        Ok((base, RegionSource::Driver { base: allocated, len: whole, kind }, pinned))
    }

    /// No more extents: unmaps the rest of a mapping. The extents that are done stay.
    fn finish(self: &Arc<Self>, making: Making, error: Option<Error>) {
        let Making { context, supply, len, came, owner, .. } = making;
        // Memory of the driver's own takes the place of a mapping that cannot be pinned.
        let allocates = matches!(supply, Supply::Mapped { .. })
            && matches!(error, Some(Error::Unsupported(_)))
            && self.kind(&context).is_some();
        if let Supply::Mapped { id, base, toucher } = supply {
            // The toucher's threads end before any of it is unmapped.
            drop(toucher);
            if came == 0 {
                self.progress.lock().regions.retain(|region| region.id != id);
            }
            if came < len {
                // SAFETY: the failed extent and the rest: mapped, not pinned, never handed out.
                unmap(&context, unsafe { base.add(came) }, len - came);
            }
        }
        if self.goes_on_after(error.as_ref()) || allocates {
            // The next attempt is counted first: no waiter sees that nothing is being made.
            self.pin(len - came, owner);
            return self.ended(len - came, None, None);
        }
        self.ended(len - came, error.as_ref(), Some(&owner));
    }

    /// Has memory that went unpinned pinned after a pause.
    fn pin_again_after(self: &Arc<Self>, pause: Duration, owner: Weak<dyn Owner>) {
        if self.context.is_by_hand() || std::mem::replace(&mut self.progress.lock().again, true) {
            return;
        }
        let regions = Arc::downgrade(self);
        crate::timer::after(pause, move || {
            if let Some(regions) = regions.upgrade() {
                regions.progress.lock().again = false;
                regions.pin_again(pause, 0, owner);
            }
        });
    }

    /// Tries the extents that went unpinned again, each in a job, behind those already `refused`.
    fn pin_again(self: &Arc<Self>, pause: Duration, refused: usize, owner: Weak<dyn Owner>) {
        let of = |region: &Region| -> Vec<(Arc<Context>, RegionId, Extent)> {
            region.unpinned().map(|extent| (region.context.clone(), region.id, *extent)).collect()
        };
        let found = self.progress.lock().staying().flat_map(|region| of(region)).nth(refused);
        let Some((context, id, extent)) = found else {
            if refused > 0 {
                self.pin_again_after((pause * 2).min(MOST_AGAIN), owner);
            }
            return;
        };
        let regions = self.clone();
        // By the device that is to unpin it.
        context.clone().worker().send(move || {
            let is_refused = !regions.try_again(&context, id, extent, &owner);
            regions.pin_again(pause, refused + usize::from(is_refused), owner);
        });
    }

    /// Pins an extent that is still unpinned. `false`: it was refused, and may be pinned later.
    fn try_again(&self, context: &Context, id: RegionId, extent: Extent, owner: &Weak<dyn Owner>) -> bool {
        let known = self.progress.lock().region(id).and_then(|region| {
            let is_unpinned = region.unpinned().any(|other| other.offset == extent.offset);
            is_unpinned.then(|| (region.at(extent.offset), region.is_adopted()))
        });
        // Else its region goes, or another job has pinned it.
        let Some((start, is_adopted)) = known else { return true };
        // SAFETY: it is mapped: its region goes by a later job of this thread.
        let (result, took) = paced(|| unsafe { pin(context, start, extent.len, is_adopted) });
        let (device, bytes) = (context.name(), extent.len);
        let pinned = match result {
            // It was counted when the extent was made.
            Err(error) if error.class() == ErrorClass::Transient => return false,
            result => match context.noting(result) {
                Ok(()) => Pinned::Yes,
                Err(error) => {
                    foreign::warn!(
                        target: "pinpool::region::unpinned", device, bytes, %error,
                        "memory that is not pinned cannot be: it is not tried again"
                    );
                    Pinned::Never
                }
            },
        };
        {
            let mut progress = self.progress.lock();
            progress.pinning.longest_call = progress.pinning.longest_call.max(took);
            // Also of a region that goes meanwhile.
            let region = progress.regions.iter_mut().find(|region| region.id == id);
            let extents = region.into_iter().flat_map(|region| &mut region.extents);
            extents.filter(|other| other.offset == extent.offset).for_each(|extent| extent.pinned = pinned);
        }
        if pinned == Pinned::Yes {
            owner.upgrade().into_iter().for_each(|owner| owner.pinned_after_all(start));
            foreign::info!(
                target: "pinpool::region::unpinned", device, bytes,
                "memory that was not pinned is pinned after all"
            );
        }
        true
    }
}

impl Region {
    /// The extents that went unpinned and that the driver may yet pin where they are.
    fn unpinned(&self) -> impl Iterator<Item = &Extent> {
        // Those of the program's value are handed over by the thread that gives it.
        let is_open = !self.is_adopted() || self.ready == self.len();
        self.extents.iter().filter(move |extent| is_open && extent.pinned == Pinned::NotYet)
    }

    fn is_adopted(&self) -> bool {
        matches!(self.source, RegionSource::Adopted(_))
    }

    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: callers pass offsets of the region's extents.
        unsafe { self.base.add(offset) }
    }

    /// Gives back the region, which nothing can reach any more, on the region thread.
    pub(super) fn go(self, before_unpin: Option<&BeforeUnpin>) {
        if let Some(before) = before_unpin {
            let info = self.info();
            _ = foreign::call("before_unpin panicked: the region goes all the same", || before(&info));
        }
        match self.source {
            RegionSource::Driver { base, len, kind } => free(&self.context, base, len, kind),
            _ if self.undo() => {}
            source => std::mem::forget(source),
        }
    }

    /// Unpins the region's extents, and unmaps them if the pool mapped them. `false`: one stays
    /// pinned, and the memory must stay too.
    pub(super) fn undo(&self) -> bool {
        let mut clean = true;
        for extent in &self.extents {
            let start = self.at(extent.offset);
            // SAFETY: pinned once, unpinned once, and nothing can reach it any more.
            if extent.pinned == Pinned::Yes && !unsafe { unpin(&self.context, start, extent.len) } {
                clean = false;
            } else if matches!(self.source, RegionSource::Mapped) {
                // One extent after the other: no thread can map memory while some is unmapped.
                unmap(&self.context, start, extent.len);
            }
        }
        clean
    }
}

thread_local! {
    /// When the last call that pinned or unpinned on this thread ended, and how long it took.
    static LAST: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// Makes a call that pins or unpins, after a pause in which other callers get the driver's locks.
/// Returns how long the call took.
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
    let whose = if is_adopted { Whose::Program } else { Whose::Crate };
    // SAFETY: this function's contract.
    unsafe { context.driver().register(start, len, whose) }
}

/// Unpins an extent. Returns whether it is unpinned; one that is not is leaked.
///
/// # Safety
/// [`pin`] has pinned it, and nothing can reach it any more.
unsafe fn unpin(context: &Context, start: NonNull<u8>, len: usize) -> bool {
    let driver = context.driver();
    // SAFETY: this function's contract.
    let (unpinned, _) = paced(|| unsafe { driver.unpin(start, len) });
    if let Err(error) = &unpinned {
        leak(context, len, error, "memory cannot be unpinned");
    }
    unpinned.is_ok()
}

/// Counts and logs memory that stays.
fn leak(context: &Context, len: usize, error: &Error, why: &str) {
    context.holds().leaked(1);
    let device = context.name();
    foreign::error!(target: "pinpool::region::leak", device, bytes = len, %error, "{why}: it is leaked");
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
        leak(context, len, &error, "memory that the driver allocated cannot be freed");
    }
}

//! How regions are made and given back: one loop for memory that the pool maps and for memory that
//! the driver allocates.
//!
//! The loop goes extent by extent, each a job of its own on the region thread, so that other jobs
//! wait for one extent at most. A mapping is made in one piece, touched by several threads
//! ([`touch`](super::touch)) and pinned extent by extent: by far the fastest way. Memory from the
//! driver comes in separate allocations: each extent is one, and a region of its own.
//!
//! Freeing happens on the region thread, like everything that can synchronise a device. Memory that
//! cannot be freed is leaked and logged, since the device may still reach it.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::touch::Toucher;
use super::{BeforeUnpin, Extent, Owner, Pinned, REGION_ALIGN, RegionId, RegionOptions, Regions, Unpinned};
use crate::device::context::Context;
use crate::device::{HostKind, Whose};
use crate::error::{Error, ErrorClass, Result};
use crate::foreign::{self, Owned, Span};
use crate::os;
use crate::segment::PAGE;

/// The pause after a call that pins or unpins is the call's time, divided by this.
pub(super) const ROOM: u32 = 32;
/// After a call that is shorter there is no pause: no other caller has waited long.
const SHORT_CALL: Duration = Duration::from_micros(200);

/// The pause before memory that went unpinned is tried again, at first and at most.
const AGAIN: Duration = Duration::from_millis(100);
const MOST_AGAIN: Duration = Duration::from_secs(60);

/// Where an extent came from.
pub(super) enum Source {
    /// A part of a mapping of the pool's.
    Mapped,
    /// One allocation of the driver's, in which the extent lies.
    Driver { base: NonNull<u8>, len: usize, kind: HostKind },
    /// A value of the program's. The region's first extent owns it, once all of them are pinned.
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
    /// A mapping, which becomes one region.
    Mapped { id: RegionId, base: NonNull<u8>, toucher: Toucher },
    /// Allocations of the driver's.
    Driver(HostKind),
}

// SAFETY: only the address keeps it from being Send, and the mapping is its own.
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

    /// Where `len` bytes come from. Maps them, unless the driver allocates them.
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
        Ok(Supply::Mapped { id: self.next_id(), base, toucher })
    }

    /// The number of a new region.
    pub(super) fn next_id(&self) -> RegionId {
        let mut progress = self.progress.lock();
        progress.last_id += 1;
        RegionId(progress.last_id)
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
                target: "pinpool::region", "pin", device = context.name(), bytes = len
            ),
            Supply::Driver(_) => foreign::span!(INFO,
                target: "pinpool::region", "allocate", device = context.name(), bytes = len
            ),
        };
        let _entered = span.enter();
        // Foreign code is put off until the extent is listed.
        let deferral = foreign::defer();
        let extent = match &mut making.supply {
            Supply::Mapped { id, base, toucher } => {
                let before = Instant::now();
                toucher.wait(making.came + len);
                let touching = before.elapsed();
                // SAFETY: within the mapping.
                let base = unsafe { base.add(making.came) };
                let mut extent = Extent::new(*id, base, len, Source::Mapped, &context);
                extent.node = self.options.node;
                // SAFETY: the extent is mapped until its end has unpinned it.
                unsafe { self.pin_extent(&mut extent)? };
                extent.times[0] += touching;
                extent
            }
            Supply::Driver(kind) => self.allocate(&context, len, *kind)?,
        };
        let (id, base) = (extent.region, extent.base);
        self.progress.lock().regions.entry(id).or_default().push(extent);
        drop(deferral);
        making.came += len;
        Ok(self.hand_over(id, base, &making.owner) && making.came < making.len)
    }

    /// Hands the extent over that begins here in a listed region, once. Returns whether more is
    /// wanted.
    pub(super) fn hand_over(
        self: &Arc<Self>,
        id: RegionId,
        base: NonNull<u8>,
        owner: &Arc<dyn Owner>,
    ) -> bool {
        let mut progress = self.progress.lock();
        let Some(&mut Extent { len, pinned, times, .. }) = progress.extent(id, base) else { return false };
        drop(progress);
        // SAFETY: it is listed, and goes when the owner has its region removed.
        let go_on = unsafe { owner.add_extent(id, base, len, pinned == Pinned::Yes) };
        let mut progress = self.progress.lock();
        // `ready` is what can be checked out. The region may have been removed already.
        if let Some(extent) = progress.extent(id, base).filter(|extent| !extent.is_going) {
            extent.is_ready = true;
            progress.pinning.ready += len;
        }
        let pinning = &mut progress.pinning;
        pinning.busy += times[0];
        pinning.made += len;
        pinning.longest_call = pinning.longest_call.max(times[1]);
        drop(progress);
        if pinned == Pinned::NotYet {
            self.pin_again_after(AGAIN, Arc::downgrade(owner));
        }
        self.changed.notify_all();
        go_on
    }

    /// Pins an extent where it is; [`Extent::undo`] undoes it.
    ///
    /// # Safety
    /// As for [`Extent::pin`].
    pub(super) unsafe fn pin_extent(&self, extent: &mut Extent) -> Result<()> {
        // SAFETY: this function's contract.
        let (pinned, took) = paced(|| unsafe { extent.pin() });
        extent.times = [took; 2];
        match extent.context.noting(pinned) {
            Ok(()) => extent.pinned = Pinned::Yes,
            Err(error) if self.goes_on_unpinned(&extent.context, extent.len, &error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
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

    /// Allocates one extent, which is a region of its own.
    fn allocate(&self, context: &Arc<Context>, len: usize, kind: HostKind) -> Result<Extent> {
        let ask = |len| context.noting(context.driver().allocate_host(len, kind));
        let locked = matches!(kind, HostKind::Locked(_));
        let (asked, took) = paced(|| {
            let base = ask(len)?;
            if base.as_ptr().addr() % page() == 0 {
                return Ok((base, len));
            }
            // Drivers promise no alignment, and hand out small allocations from shared pages. One
            // that does not start on a page is made again with one page more, for its whole pages.
            free(context, base, len, kind);
            let whole = len + page();
            ask(whole).map(|base| (base, whole))
        });
        let (base, source, pinned) = match asked {
            Ok((allocated, whole)) => {
                let front = allocated.as_ptr().addr().next_multiple_of(page()) - allocated.as_ptr().addr();
                debug_assert!(front + len <= whole, "the extent lies in what was allocated");
                // SAFETY: less than a page; unless it is 0, there is a page more than the extent.
                let base = unsafe { allocated.add(front) };
                let pinned = if locked { Pinned::Yes } else { Pinned::Never };
                (base, Source::Driver { base: allocated, len: whole, kind }, pinned)
            }
            // Plain memory takes its place.
            Err(error) if locked && self.goes_on_unpinned(context, len, &error) => {
                (map(len)?, Source::Mapped, Pinned::NotYet)
            }
            Err(error) => return Err(error),
        };
        let extent = Extent::new(self.next_id(), base, len, source, context);
        Ok(Extent { pinned, times: [took; 2], ..extent })
    }

    /// No more extents: unmaps the rest of a mapping. The extents that are done stay.
    fn finish(self: &Arc<Self>, making: Making, error: Option<Error>) {
        let Making { context, supply, len, came, owner, .. } = making;
        // Memory of the driver's own takes the place of a mapping that cannot be pinned.
        let allocates = matches!(supply, Supply::Mapped { .. })
            && matches!(error, Some(Error::Unsupported(_)))
            && self.kind(&context).is_some();
        if let Supply::Mapped { base, toucher, .. } = supply {
            // The toucher's threads end before any of it is unmapped.
            drop(toucher);
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
        let found = self.progress.lock().unpinned().nth(refused).map(Extent::part);
        let Some(part) = found else {
            if refused > 0 {
                self.pin_again_after((pause * 2).min(MOST_AGAIN), owner);
            }
            return;
        };
        let regions = self.clone();
        // By the device that is to unpin it.
        part.context.clone().worker().send(move || {
            let is_refused = !regions.try_again(&part, &owner);
            regions.pin_again(pause, refused + usize::from(is_refused), owner);
        });
    }

    /// Pins the extent that `part` is a [part](Extent::part) of, if it is still unpinned. `false`:
    /// it was refused, and may be pinned later.
    fn try_again(&self, part: &Extent, owner: &Weak<dyn Owner>) -> bool {
        let &Extent { region, base, len, ref context, .. } = part;
        let is_open = |e: &&mut Extent| !e.is_going && e.pinned == Pinned::NotYet;
        // Else its region goes, or another job has pinned it.
        if self.progress.lock().extent(region, base).filter(is_open).is_none() {
            return true;
        }
        // SAFETY: it is mapped: its region goes by a later job of this thread.
        let (result, took) = paced(|| unsafe { part.pin() });
        let device = context.name();
        let pinned = match result {
            // It was counted when the extent was made.
            Err(error) if error.class() == ErrorClass::Transient => return false,
            result => match context.noting(result) {
                Ok(()) => Pinned::Yes,
                Err(error) => {
                    foreign::warn!(
                        target: "pinpool::region::unpinned", device, bytes = len, %error,
                        "memory that is not pinned cannot be: it is not tried again"
                    );
                    Pinned::Never
                }
            },
        };
        let mut progress = self.progress.lock();
        progress.pinning.longest_call = progress.pinning.longest_call.max(took);
        // Also of a region that goes meanwhile.
        progress.extent(region, base).into_iter().for_each(|extent| extent.pinned = pinned);
        drop(progress);
        if pinned == Pinned::Yes {
            owner.upgrade().into_iter().for_each(|owner| owner.pinned_after_all(base));
            foreign::info!(
                target: "pinpool::region::unpinned", device, bytes = len,
                "memory that was not pinned is pinned after all"
            );
        }
        true
    }
}

impl Extent {
    /// A second value of this extent that does not keep an adopted value, for a call on another
    /// thread.
    fn part(&self) -> Self {
        let source =
            if matches!(self.source, Source::Adopted(_)) { Source::Adopted(None) } else { Source::Mapped };
        Self::new(self.region, self.base, self.len, source, &self.context)
    }

    /// Pins the memory where it is.
    ///
    /// # Safety
    /// The memory is whole pages that nobody has pinned, and stays until it was unpinned.
    unsafe fn pin(&self) -> Result<()> {
        let whose = match self.source {
            Source::Adopted(_) => Whose::Program,
            _ => Whose::Crate,
        };
        // SAFETY: this function's contract.
        unsafe { self.context.driver().register(self.base, self.len, whose) }
    }

    /// Unpins the memory. Returns whether it is unpinned; if not, it is leaked.
    ///
    /// # Safety
    /// It is [pinned](Self::pin), and nothing can reach it any more.
    unsafe fn unpin(&self) -> bool {
        let (context, len) = (&self.context, self.len);
        // SAFETY: this function's contract.
        let (unpinned, _) = paced(|| unsafe { context.driver().unpin(self.base, len) });
        if let Err(error) = &unpinned {
            leak(context, len, error, "memory cannot be unpinned");
        }
        unpinned.is_ok()
    }

    /// Unpins the extent, which nothing can reach any more, and unmaps or frees it if it is the
    /// pool's. `false`: it stays pinned, and the memory must stay too.
    fn undo(&self) -> bool {
        if let Source::Driver { base, len, kind } = self.source {
            free(&self.context, base, len, kind);
            return true;
        }
        // SAFETY: pinned once, unpinned once, and nothing can reach it any more.
        if self.pinned == Pinned::Yes && !unsafe { self.unpin() } {
            return false;
        }
        if matches!(self.source, Source::Mapped) {
            unmap(&self.context, self.base, self.len);
        }
        true
    }
}

/// Gives back a region, which nothing can reach any more, on the region thread.
pub(super) fn give_back(extents: Vec<Extent>, before_unpin: Option<&BeforeUnpin>) {
    if let Some(before) = before_unpin {
        let region = super::info(&extents);
        _ = foreign::call("before_unpin panicked: the region goes all the same", || before(&region));
    }
    if !undo(&extents) {
        extents.into_iter().for_each(|extent| std::mem::forget(extent.source));
    }
}

/// [Undoes](Extent::undo) a region's extents, one after the other, since no thread can map memory
/// while some is unmapped. `false`: a part stays pinned, and an adopted value must stay too.
pub(super) fn undo(extents: &[Extent]) -> bool {
    let undo = |extent: &Extent| {
        // After a panic the device may have the extent or not.
        foreign::survive("giving memory back panicked: it is leaked", || extent.undo()).unwrap_or_else(|| {
            extent.context.holds().leaked(1);
            false
        })
    };
    extents.iter().fold(true, |clean, extent| undo(extent) & clean)
}

thread_local! {
    /// When the last call that pinned or unpinned on this thread ended, and how long it took.
    static LAST: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// Makes a call that pins or unpins, after a pause in which other callers get the driver's locks:
/// time that has passed since the last call counts. Returns how long the call took.
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

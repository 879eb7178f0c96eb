//! Where pinned memory comes from: regions, made and given back as a whole.
//!
//! # How a region is made
//!
//! | a region is | while |
//! | --- | --- |
//! | asked for | its bytes count as wanted, and none of it is listed |
//! | being made | extents are pinned one by one, and the pool serves from each as soon as it is pinned |
//! | done | no more extents come |
//! | going | nothing can reach it, and a job that unpins it is on its way |
//!
//! A region is mapped as a whole, starting on a multiple of 2 MiB, preferably in the memory next to
//! its device. Several threads touch its pages in the order of addresses ([`touch`]), which takes
//! most of the time: the system zeroes the pages. One driver call pins each extent as soon as its
//! pages are there. An extent that fails is given back with the rest of the region, or handed out
//! unpinned and said to be so, as configured ([`Unpinned`]).
//!
//! Memory that the driver allocates comes in one region for each extent. Adopted memory is listed
//! when all of it is pinned ([`adopted`]).
//!
//! # Memory that went unpinned
//!
//! The refusal that [`Unpinned::Allow`] goes on after may pass. So the region thread tries to pin
//! such extents where they are again, after a pause that doubles. Buffers may be out meanwhile:
//! pinning changes neither address nor contents. (A device without threads does not try again.)
//!
//! # Pauses
//!
//! A driver that pins memory holds locks that every call of every process needs sooner or later. So
//! extents are small enough for one call to take milliseconds, and between two calls there is a
//! pause in proportion to the call, in which other callers get those locks.
//!
//! # Several devices
//!
//! Memory that one device has pinned serves all devices of its family. So the first device pins;
//! when it is lost, the next live one takes over. Memory that a lost device has pinned stays its
//! own.
//!
//! # Invariants
//!
//! - Pinning, unpinning, allocating and freeing happen on the device's region thread only. What is
//!   pinned or allocated is one job for each extent.
//! - A region is given back by the device that made it, when nothing can reach it any more. If its
//!   driver cannot unpin it, its mapping stays, since the device may still reach it.
//! - No driver call and no code of the program runs under this module's lock.
//!
//! This file has the public types and a pool's regions; [`make`] how they come and go; [`touch`]
//! the threads that touch pages; [`adopted`] memory that the program gives. `central::growth` asks
//! for regions, `pool` lists and trims them; this module calls `device` and `os`.

#![allow(unsafe_code)]

mod adopted;
mod make;
mod touch;

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::locks::{Condvar, Mutex};

use crate::device::context::Context;
use crate::device::{Driver, HostAllocFlags, HostKind};
use crate::error::{Error, ErrorClass, Result};
pub(crate) use crate::segment::RegionId;
pub(crate) use adopted::Adoptee;
use make::{Source, page};
pub use touch::HugePages;

/// Regions that the pool maps itself start on a multiple of this, so that huge pages can back them.
const REGION_ALIGN: usize = 2 << 20;

/// Where a pool gets its memory from. Set by [`PoolBuilder::backing`](crate::PoolBuilder::backing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backing {
    /// Mappings of the pool's own, touched by several threads and registered with the device (CUDA:
    /// `cuMemHostRegister`). This is several times faster than memory that drivers allocate, and
    /// other users of the driver wait less meanwhile.
    ///
    /// Where the system cannot register memory (machines in confidential-computing mode), a pool
    /// with this backing is refused, and one whose backing is not set takes
    /// [`HostAlloc`](Self::HostAlloc).
    ///
    /// Ascend: `aclrtHostRegister`, which newer libraries, drivers and devices have. There this
    /// backing has to be set explicitly, and where the call is missing, building the pool fails.
    #[default]
    Registered,
    /// Page-locked memory that the driver allocates, with one call and one region for each
    /// [extent](crate::PoolBuilder::extent). (CUDA: `cuMemHostAlloc`. Ascend: `aclrtMallocHost`,
    /// which ignores the flags.) Huge pages and threads that touch pages have no part in it.
    HostAlloc(HostAllocFlags),
    /// Managed memory (CUDA: `cuMemAllocManaged`, `CU_MEM_ATTACH_GLOBAL`), with one call and one
    /// region for each extent.
    ///
    /// Its pages move to the processor or device that touches them, so they are **not
    /// page-locked**: they count as unpinned bytes, and
    /// [`PinnedBuf::is_pinned`](crate::PinnedBuf::is_pinned) is `false`. [`Unpinned::Refuse`] does
    /// not forbid managed memory, since it was asked for by name. Building the pool fails for
    /// devices that do not let the host use it while they work (CUDA: `CONCURRENT_MANAGED_ACCESS`;
    /// every Ascend device).
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

/// What a pool does when the system refuses to lock pages. Set by
/// [`PoolBuilder::unpinned`](crate::PoolBuilder::unpinned). (Managed memory is never locked, and
/// not refused for that: see [`Backing::Managed`].)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unpinned {
    /// An error.
    #[default]
    Refuse,
    /// The pool goes on with memory that is not locked, and says so in its statistics
    /// (`unpinned_bytes`) and a warning. It tries to lock that memory again after pauses from 0.1
    /// seconds to a minute.
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
    /// The region's number in its pool, never used twice.
    pub id: u64,
    /// The first byte: on a multiple of 2 MiB if the pool mapped the region, else on a page.
    pub base: NonNull<u8>,
    /// Bytes that the pool serves from: a multiple of the page size.
    pub len: usize,
    /// The part of these bytes that is page-locked.
    pub pinned: usize,
    /// The NUMA node that the pool was [told](crate::PoolBuilder::numa_node) to use, or that its
    /// first device is on. The region's pages come from that node as long as it has any. `None`:
    /// neither is known, or the pool did not map the region itself.
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

/// What regions are made for: a central pool.
pub(crate) trait Owner: Send + Sync {
    /// Serves from an extent. `false`: no more is wanted.
    ///
    /// # Safety
    /// The extent is handed over once, and stays until [`Regions::remove`] or the end of the
    /// [`Regions`].
    unsafe fn add_extent(&self, region: RegionId, base: NonNull<u8>, len: usize, pinned: bool) -> bool;

    /// An extent is pinned that was handed over unpinned.
    fn pinned_after_all(&self, base: NonNull<u8>);

    /// Nothing more is being made. `missing` of the bytes that were asked for have not come,
    /// because of `error`.
    fn grown(&self, missing: usize, error: Option<&Error>);
}

/// The program's function that is called before a region is unpinned.
pub(crate) type BeforeUnpin = Box<dyn Fn(&RegionInfo) + Send + Sync>;

/// How far pinning has come. From [`Pool::pinning`](crate::Pool::pinning) and
/// [`Pool::wait_pinned`](crate::Pool::wait_pinned).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// Bytes that were asked of the system so far, in regions that exist or are being made.
    pub wanted: usize,
    /// Bytes that the pool can serve from.
    pub ready: usize,
    /// Bytes that came since the pool was built. Bytes that were given back since and bytes that
    /// could not be pinned are included.
    pub made: usize,
    /// The time spent on making them: calls that pinned or allocated, and waiting for pages to be
    /// touched. The pauses between two calls do not count.
    pub busy: Duration,
    /// The longest single call that pinned: other users of the driver may have waited for it.
    pub longest_call: Duration,
    /// Why the last attempt ended early, if it did.
    pub error: Option<Error>,
}

impl Pinning {
    /// Bytes per second of pinning, without the pauses (`made / busy`). `None` before any.
    #[must_use]
    pub fn bytes_per_second(&self) -> Option<f64> {
        (!self.busy.is_zero()).then(|| self.made as f64 / self.busy.as_secs_f64())
    }
}

/// Memory that one call has pinned, or was to pin. The extents of a region are neighbours in memory
/// and have one context.
struct Extent {
    region: RegionId,
    base: NonNull<u8>,
    len: usize,
    pinned: Pinned,
    node: Option<u32>,
    source: Source,
    /// The device that made the extent, and that is to undo it.
    context: Arc<Context>,
    /// The time spent on making the extent, and the time of the call that pinned it.
    times: [Duration; 2],
    /// The extent was handed over, and its bytes count in [`Pinning::ready`].
    is_ready: bool,
    /// The region thread has been told to give the extent back, and has not begun to.
    is_going: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pinned {
    Yes,
    /// The driver may pin it later.
    NotYet,
    Never,
}

// SAFETY: only the addresses keep it from being Send. What a call does to the memory is done on the
// region thread, and an adopted value is Send.
unsafe impl Send for Extent {}

impl Extent {
    /// One that is not pinned yet.
    fn new(region: RegionId, base: NonNull<u8>, len: usize, source: Source, context: &Arc<Context>) -> Self {
        let (context, pinned, node, times) = (context.clone(), Pinned::NotYet, None, Default::default());
        Self { region, base, len, pinned, node, source, context, times, is_ready: false, is_going: false }
    }
}

/// The region of `extents`, which are all that it has, at least one.
fn info(extents: &[Extent]) -> RegionInfo {
    let &Extent { region: id, base, node, .. } = &extents[0];
    let pinned = extents.iter().filter(|extent| extent.pinned == Pinned::Yes);
    let [len, pinned] = [extents.iter().map(|e| e.len).sum(), pinned.map(|e| e.len).sum()];
    RegionInfo { id: id.0, base, len, pinned, node }
}

#[derive(Default)]
struct RegionProgress {
    /// All that came and was not given back, by regions, each in the order of addresses.
    regions: BTreeMap<RegionId, Vec<Extent>>,
    /// The last number given to a region.
    last_id: u64,
    pinning: Pinning,
    /// Attempts at making memory that are under way.
    busy: usize,
    /// The last attempt that has ended did so early.
    failed: bool,
    /// Memory that went unpinned is to be tried again.
    again: bool,
}

impl RegionProgress {
    /// The extent of a region that begins here.
    fn extent(&mut self, id: RegionId, base: NonNull<u8>) -> Option<&mut Extent> {
        self.regions.get_mut(&id)?.iter_mut().rev().find(|extent| extent.base == base)
    }

    /// The extents that went unpinned and that their drivers may yet pin where they are.
    fn unpinned(&self) -> impl Iterator<Item = &Extent> {
        // The owner learns how an extent is when that is handed over.
        self.extents().filter(|e| e.is_ready && !e.is_going && e.pinned == Pinned::NotYet)
    }

    fn extents(&self) -> impl Iterator<Item = &Extent> {
        self.regions.values().flatten()
    }
}

/// The regions of a pool.
pub(crate) struct Regions {
    /// The device that makes regions while it is not lost.
    context: Arc<Context>,
    /// The devices that take its place when it is lost. The pool keeps them open while it grows;
    /// these references are weak, so that memory that never comes back does not keep them open.
    others: Vec<Weak<Context>>,
    options: RegionOptions,
    before_unpin: Option<Arc<BeforeUnpin>>,
    progress: Mutex<RegionProgress>,
    changed: Condvar,
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
            progress: Mutex::new(RegionProgress::default()),
            changed: Condvar::new(),
        })
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

    /// What the driver is to allocate now; `None` for the pool's own mappings.
    fn kind(&self, context: &Context) -> Option<HostKind> {
        self.options.backing.unwrap_or_else(|| Backing::usual(&**context.driver())).kind()
    }

    /// Each region made for the pool starts on a multiple of this; an adopted one, on a page.
    pub(crate) fn aligned(&self) -> usize {
        if self.kind(&self.context).is_some() { page() } else { REGION_ALIGN }
    }

    /// Whether the memory at this address is the driver's managed memory.
    pub(crate) fn is_managed(&self, at: NonNull<u8>) -> bool {
        let managed = |e: &Extent| matches!(e.source, Source::Driver { kind: HostKind::Managed, .. });
        let has = |e: &Extent| at.addr().get().wrapping_sub(e.base.addr().get()) < e.len;
        self.progress.lock().extents().any(|e| has(e) && managed(e))
    }

    /// Whether another device takes over after this error.
    fn goes_on_after(&self, error: Option<&Error>) -> bool {
        // A mistake in this crate has the same class, but is not the device's.
        let lost = |e: &&Error| e.class() == ErrorClass::DeviceLost && !matches!(e, Error::Internal(_));
        let Some((error, next)) = error.filter(lost).zip(self.living()) else {
            return false;
        };
        crate::foreign::warn!(
            target: "pinpool::region", device = next.name(), %error, "another device pins in place of a lost one"
        );
        true
    }

    /// Begins to make memory. [`Regions::ended`] ends it.
    fn begin(&self, len: usize) {
        let mut progress = self.progress.lock();
        progress.busy += 1;
        progress.pinning.wanted += len;
    }

    /// Ends what [`Regions::begin`] began. The owner is told before a thread can see that nothing
    /// is being pinned: if that thread then asks for more, the owner knows that this has ended. It
    /// is not told where another attempt goes on.
    fn ended(&self, missing: usize, error: Option<&Error>, owner: Option<&Arc<dyn Owner>>) {
        {
            let mut progress = self.progress.lock();
            progress.pinning.wanted -= missing;
            if let Some(error) = error {
                progress.pinning.error = Some(error.clone());
                let device = self.context.name();
                // Where a request waits, what was refused is tried again and again.
                if std::mem::replace(&mut progress.failed, true) {
                    crate::foreign::debug!(target: "pinpool::region::ended", device, missing, %error, "pinning ended early again");
                } else {
                    crate::foreign::warn!(target: "pinpool::region::ended", device, missing, %error, "pinning ended early");
                }
            } else if missing == 0 {
                progress.failed = false;
            }
        }
        owner.into_iter().for_each(|owner| owner.grown(missing, error));
        self.progress.lock().busy -= 1;
        self.changed.notify_all();
    }

    /// How far pinning has come.
    pub(crate) fn pinning(&self) -> Pinning {
        // In a fork's child a missing thread may hold the lock, and no region is made.
        if crate::os::forked() {
            return Pinning::default();
        }
        self.progress.lock().pinning.clone()
    }

    /// Whether these regions keep the device of this context open.
    pub(crate) fn keep(&self, context: u64) -> bool {
        self.context.id() == context || self.progress.lock().extents().any(|e| e.context.id() == context)
    }

    /// Waits until nothing is being pinned, or until the pool can serve from `enough` bytes.
    pub(crate) fn wait(&self, deadline: Option<Instant>, enough: usize) -> Result<Pinning> {
        crate::os::check_fork()?;
        let since = Instant::now();
        let mut progress = self.progress.lock();
        if progress.busy > 0 && crate::sync::own() == Some(crate::sync::Own::Worker) {
            // The thread would wait for itself.
            return Err(Error::Unsupported(
                "a wait for memory on the thread that pins it; wait on a thread of your own".into(),
            ));
        }
        while progress.busy > 0 && progress.pinning.ready < enough {
            match deadline {
                Some(deadline) if self.changed.wait_until(&mut progress, deadline) => {
                    return Err(Error::Timeout(since.elapsed().into()));
                }
                Some(_) => {}
                None => self.changed.wait(&mut progress),
            }
        }
        Ok(progress.pinning.clone())
    }

    /// All regions with memory that is done.
    pub(crate) fn list(&self) -> Vec<RegionInfo> {
        if crate::os::forked() {
            return Vec::new();
        }
        let progress = self.progress.lock();
        progress
            .regions
            .values()
            .filter(|extents| !extents[0].is_going)
            .map(|extents| info(extents))
            .collect()
    }

    /// Has a region given back to which no extents are added any more, and that nothing can reach.
    pub(crate) fn remove(self: &Arc<Self>, id: RegionId) {
        let mut progress = self.progress.lock();
        let RegionProgress { regions, pinning, .. } = &mut *progress;
        let Some(extents) = regions.get_mut(&id) else { return };
        for extent in &mut *extents {
            extent.is_going = true;
            pinning.wanted -= extent.len;
            pinning.ready -= if extent.is_ready { extent.len } else { 0 };
        }
        let (context, regions) = (extents[0].context.clone(), Arc::downgrade(self));
        drop(progress);
        // The region stays in the list until then, so that the thread finds what it has pinned
        // meanwhile. Where the pool is gone by then, its end has given the region back.
        context.worker().send(move || {
            let Some(regions) = regions.upgrade() else { return };
            let extents = regions.progress.lock().regions.remove(&id);
            extents.into_iter().for_each(|extents| make::give_back(extents, regions.before_unpin.as_deref()));
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
        for extents in regions.into_values() {
            let (context, before) = (extents[0].context.clone(), self.before_unpin.clone());
            context.worker().send(move || make::give_back(extents, before.as_deref()));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::Unpinned;
    use super::make::ROOM;
    use crate::device::handle::Device;
    use crate::device::host::{Call, HostConfig, HostNode};
    use crate::locks::Mutex;
    use crate::pool::Pool;

    /// The pauses between the calls do not count, whichever way the memory comes.
    #[test]
    fn the_time_spent_in_pinning_has_no_pauses() {
        const CALL: Duration = Duration::from_millis(96);
        const LEN: usize = 3 << 16;
        for adopts in [false, true] {
            let node = HostNode::new(HostConfig::new()).unwrap();
            node.hook(|call| {
                if matches!(call, Call::Pin) {
                    std::thread::sleep(CALL);
                }
            });
            let device = Device::on(&node, 0).unwrap();
            let since = Instant::now();
            let builder = Pool::builder(&device).capacity(2 * LEN).extent(1 << 16).unpinned(Unpinned::Allow);
            let pool = builder.initial(if adopts { 0 } else { LEN }).build().unwrap();
            if adopts {
                pool.adopt(vec![0; LEN + 4096]).map(drop).map_err(|refused| refused.error).unwrap();
            }
            let pinning = pool.wait_pinned(None).unwrap();
            // Three calls, and between them a pause each.
            assert!(pinning.busy >= CALL * 3 && pinning.longest_call >= CALL, "{pinning:?}");
            assert!(pinning.busy + CALL / ROOM * 2 <= since.elapsed(), "{pinning:?}");
            assert!(pinning.ready >= LEN, "{pinning:?}");
            assert_eq!(pinning.bytes_per_second(), Some(pinning.ready as f64 / pinning.busy.as_secs_f64()));
        }
    }

    #[test]
    fn an_adoption_that_panics_unpins_what_it_has_pinned_before() {
        const EXTENT: usize = 1 << 16;
        let node = HostNode::new(HostConfig::new()).unwrap();
        let pins = Mutex::new(0);
        node.hook(move |call| {
            if matches!(call, Call::Pin) {
                *pins.lock() += 1;
                assert!(*pins.lock() < 3, "the third extent panics");
            }
        });
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(3 * EXTENT).extent(EXTENT).initial(0).build().unwrap();
        let refused = pool.adopt(vec![0; 3 * EXTENT + 4095]).unwrap_err();
        assert!(refused.buffer.is_none(), "the device may have the third one pinned");
        assert_eq!(node.live(0).pinned_bytes, 0);
    }

    #[test]
    fn an_adopted_value_stays_where_unpinning_it_panics() {
        const LEN: usize = 1 << 16;
        struct Adopted(Vec<u8>, #[expect(dead_code, reason = "its count tells of the drop")] Arc<()>);
        impl std::ops::Deref for Adopted {
            type Target = [u8];
            fn deref(&self) -> &[u8] {
                &self.0
            }
        }
        impl std::ops::DerefMut for Adopted {
            fn deref_mut(&mut self) -> &mut [u8] {
                &mut self.0
            }
        }
        // SAFETY: the bytes are a vector's.
        unsafe impl stable_deref_trait::StableDeref for Adopted {}

        let node = HostNode::new(HostConfig::new()).unwrap();
        node.hook(|call| assert!(!matches!(call, Call::Unpin), "unpinning panics"));
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(LEN).initial(0).build().unwrap();
        let is_alive = Arc::new(());
        let adopted = pool.adopt(Adopted(vec![0; LEN + 4095], is_alive.clone()));
        adopted.map(drop).map_err(|refused| refused.error).unwrap();
        assert_eq!(pool.trim(0), LEN);
        // A job that comes behind.
        drop(device.alloc(1).unwrap());
        assert_eq!(Arc::strong_count(&is_alive), 2, "the device has it pinned");
        drop(pool);
        let closed = device.close(Duration::from_secs(10)).unwrap_err();
        assert!(closed.is_closed() && closed.held_by().leaked == 1, "{closed}");
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
        node.hook(move |call| {
            if matches!(call, Call::Pin) && pins.fetch_add(1, Ordering::Relaxed) == 1 {
                let hook = hook.lock();
                hook.0.send(()).unwrap();
                hook.1.recv().unwrap();
            }
        });
        let device = Device::on(&node, 0).unwrap();
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

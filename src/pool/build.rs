//! Making a pool: its stores, its first memory, and the entry by which its devices know that the pool keeps them open.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::name::Name;
use super::{Pool, PoolInner, Store, WeakPool};
use crate::central::{CentralConfig, CentralPool};
use crate::config::{PoolBuilder, PoolPlan};
use crate::device::handle::Device;
use crate::device::holds::{HeldPool, Tenant};
use crate::error::Result;
use crate::region::{RegionInfo, RegionOptions, Regions};
use crate::telemetry::counters::{ErrorTally, RefusedTally};

impl Store {
    fn new(devices: &[Device], plan: &PoolPlan, capacity: usize, step: usize, regions: Arc<Regions>) -> Self {
        let config = CentralConfig {
            capacity,
            thread_cache: plan.thread_cache.min(capacity),
            shared_cache: plan.shared_cache,
            largest: plan.options.extent.min(capacity) - 32,
            step,
            timeless: devices[0].context().driver().stepped().is_some(),
            serves: devices.iter().map(|d| (d.context().id(), d.name().into())).collect(),
            track: plan.track,
        };
        let central = CentralPool::new(config, Some(regions.clone()));
        let weak = Arc::downgrade(&central);
        regions.on_pinned_after_all(move |base| {
            weak.upgrade().into_iter().for_each(|central| central.pinned_after_all(base));
        });
        Self { central, regions }
    }

    /// Has `bytes` pinned, and waits until the first extent of them is.
    fn start(&self, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.central.plan_bytes(bytes);
        self.central.pin(bytes);
        let pinning = self.regions.wait(None, |p| p.ready > 0)?;
        match pinning.error {
            Some(error) if pinning.ready == 0 => Err(error),
            _ => Ok(()),
        }
    }
}

impl PoolBuilder {
    /// Builds the pool. Returns when its first extent is pinned; the rest of the [`initial`](Self::initial) bytes is
    /// pinned in the background.
    ///
    /// Install a sandbox (seccomp) that refuses the system call `membarrier` before the first pool is built, or have it
    /// allow that call. The pool notices a later refusal, and then needs each thread that uses it to make another call
    /// to it, or to block. If one does neither for 10 seconds, the pool aborts the process, with the reason on stderr.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for settings that make no sense; the error of the pinning, most often
    /// [`Error::MemLock`](crate::Error::MemLock); a lost device's [`Error::Device`](crate::Error::Device);
    /// [`Error::Forked`](crate::Error::Forked).
    pub fn build(mut self) -> Result<Pool> {
        crate::os::check_fork()?;
        let plan = self.plan()?;
        self.devices[0].context().alive()?;
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = || format!("pool-{}", NUMBERS.fetch_add(1, Ordering::Relaxed));
        let name = Name::take(&self.name.take().unwrap_or_else(number));
        let span = crate::foreign::span!(
            INFO, target: "pinpool::pool", "build", pool = &*name, capacity = self.capacity
        );
        let _entered = span.enter();
        // One callback for all stores: a region is registered elsewhere whichever store it is of.
        let before = self.before_unpin.take().map(Arc::new);
        let numbers = Arc::new(AtomicU64::new(0));
        let nodes = self.nodes();
        // The region thread of a device on the node pins; that of another device does when all of those are lost.
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
        let growing = |node| Store::new(&self.devices, &plan, plan.capacity, plan.region, regions(node));
        let main = growing(&nodes[0]);
        let others = nodes[1..].iter().map(|node| {
            let contexts = node.1.iter().map(|number| self.devices[*number].context().id()).collect();
            (contexts, growing(node))
        });
        let others: Vec<(Vec<u64>, Store)> = others.collect();
        let page = crate::os::page_size().max(crate::segment::PAGE);
        let reserves = self.reserves.iter().map(|(name, bytes)| {
            let bytes = bytes.next_multiple_of(page);
            (name.clone(), Store::new(&self.devices, &plan, bytes, 0, regions(&nodes[0])), bytes)
        });
        let reserves: Vec<(String, Store, usize)> = reserves.collect();
        let sizes: Vec<usize> = reserves.iter().map(|r| r.2).collect();
        // From here on, the drop of the pool cleans up.
        let pool = Pool(Arc::new(PoolInner {
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
            refused: RefusedTally::default(),
            max_waiting: self.max_waiting,
            reported: crate::locks::Mutex::new(None),
            watched: AtomicBool::new(false),
        }));
        let tenant: Arc<dyn Tenant> = Arc::new(pool.resident());
        pool.0.devices.iter().for_each(|device| device.enter(tenant.clone()));
        for store in pool.growing() {
            store.start(plan.initial)?;
        }
        for ((_, store), bytes) in pool.0.reserves.iter().zip(sizes) {
            store.start(bytes)?;
            // A reserve is pinned whole before the pool is built: it must be there when it is needed.
            if let Some(error) = store.regions.wait(None, |_| false)?.error {
                return Err(error);
            }
        }
        Ok(pool)
    }
}

impl Pool {
    fn resident(&self) -> Resident {
        Resident {
            name: self.name().to_owned(),
            pool: self.downgrade(),
            centrals: self.centrals().map(Arc::downgrade).collect(),
        }
    }
}

/// What a pool enters with its devices. As long as it has handles it keeps all of its devices open, and after that
/// those that pinned memory which is still out.
struct Resident {
    name: String,
    pool: WeakPool,
    centrals: Vec<Weak<CentralPool>>,
}

impl Tenant for Resident {
    fn holds(&self, context: u64) -> Option<HeldPool> {
        let open = self.pool.0.strong_count() > 0;
        let centrals = self.centrals.iter().filter_map(Weak::upgrade);
        let name = self.name.clone();
        let mut held =
            HeldPool { name, open, shut_down: false, buffers: 0, quarantined: 0, quarantined_bytes: 0 };
        for central in centrals.filter(|central| open || central.keeps(context)) {
            held.shut_down |= open && central.closed();
            held.buffers = held.buffers.saturating_add(central.outstanding());
            let snapshot = central.snapshot();
            held.quarantined += snapshot.quarantined_segments;
            held.quarantined_bytes += snapshot.quarantined;
        }
        // A pool without handles and buffers keeps nothing open: the region thread has been told to unpin its memory.
        (open || held.buffers > 0).then_some(held)
    }

    fn is_gone(&self) -> bool {
        self.centrals.iter().all(|central| central.strong_count() == 0)
    }
}

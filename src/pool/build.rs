//! Making a pool: its stores, its first memory, and how its devices know that it keeps them open.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::name::Name;
use super::{Pool, PoolInner, Store, WeakPool};
use crate::central::{CentralConfig, CentralPool};
use crate::config::{PoolBuilder, PoolPlan};
use crate::device::handle::Device;
use crate::device::holds::{HeldPool, Tenant};
use crate::error::Result;
use crate::region::{RegionInfo, RegionOptions, Regions};
use crate::telemetry::counters::ErrorTally;

impl Store {
    fn new(devices: &[Device], plan: &PoolPlan, capacity: usize, step: usize, regions: Arc<Regions>) -> Self {
        let config = CentralConfig {
            capacity,
            thread_cache: plan.thread_cache.min(capacity),
            shared_cache: plan.shared_cache,
            largest: plan.options.extent.min(capacity) - 32,
            step,
            timeless: devices[0].context().driver().stepped().is_some(),
            serves: devices.iter().map(|d| d.context().id()).collect(),
            track: plan.track,
        };
        Self { central: CentralPool::new(config, Some(regions.clone())), regions }
    }

    /// Starts with so many bytes and waits for the first of them.
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
    /// Builds the pool. Returns when its first extent is usable; the rest of what it starts with follows.
    ///
    /// A process that puts up a sandbox (seccomp) which refuses the system call `membarrier` does so before its first
    /// pool, or lets it grant that. The pool notices a later refusal; it aborts the process, with the reason on stderr,
    /// where a thread that uses the pool neither comes by nor blocks for 10 seconds after that.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for settings that make no sense; what made pinning fail,
    /// [`Error::MemLock`](crate::Error::MemLock) above all; [`Error::Forked`](crate::Error::Forked).
    pub fn build(mut self) -> Result<Pool> {
        crate::os::check_fork()?;
        let plan = self.plan()?;
        self.devices[0].context().alive()?;
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = || format!("pool-{}", NUMBERS.fetch_add(1, Ordering::Relaxed));
        let name = Name::take(&self.name.take().unwrap_or_else(number));
        let span = crate::foreign::span!(INFO, target: "pinpool::pool", "build", pool = &*name, capacity = self.capacity);
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
            reported: crate::locks::Mutex::new(None),
        }));
        let tenant: Arc<dyn Tenant> = Arc::new(pool.resident());
        pool.0.devices.iter().for_each(|device| device.enter(tenant.clone()));
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

impl Pool {
    fn resident(&self) -> Resident {
        Resident {
            name: self.name().to_owned(),
            pool: self.downgrade(),
            centrals: self.centrals().map(Arc::downgrade).collect(),
        }
    }
}

/// A pool as what keeps its devices open: by its handles all of them, after these by its memory those that made that.
struct Resident {
    name: String,
    pool: WeakPool,
    centrals: Vec<Weak<CentralPool>>,
}

impl Tenant for Resident {
    fn holds(&self, context: u64) -> Option<HeldPool> {
        let open = self.pool.0.strong_count() > 0;
        let centrals = self.centrals.iter().filter_map(Weak::upgrade);
        let mut held =
            HeldPool { name: self.name.clone(), open, buffers: 0, quarantined: 0, quarantined_bytes: 0 };
        for central in centrals.filter(|central| open || central.keeps(context)) {
            held.buffers = held.buffers.saturating_add(central.outstanding());
            let snapshot = central.snapshot();
            held.quarantined += snapshot.quarantined_segments;
            held.quarantined_bytes += snapshot.quarantined;
        }
        // With neither, the worker has been told.
        (open || held.buffers > 0).then_some(held)
    }

    fn is_gone(&self) -> bool {
        self.centrals.iter().all(|central| central.strong_count() == 0)
    }
}

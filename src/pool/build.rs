//! Making a pool: its name, its central pool, its first memory, and what its devices know of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::{Pool, PoolInner};
use crate::amount::amount;
use crate::arena::MAX_EXTENT;
use crate::central::{CentralConfig, CentralPool};
use crate::config::PoolBuilder;
use crate::error::{Error, Result};
use crate::escape::clean;
use crate::locks::Mutex;
use crate::region::{Backing, RegionOptions, Regions};
use crate::segment::PAGE;
use crate::telemetry::counters::ErrorTally;

impl PoolBuilder {
    /// Builds the pool. Returns when its first extent is pinned; the rest of the
    /// [`initial`](Self::initial) bytes is pinned in the background.
    ///
    /// Install a sandbox (seccomp) that refuses `membarrier` before the first pool is built, or set
    /// `PINPOOL_FENCES=1` in the environment: pools then execute a fence for each checkout and
    /// return. A pool that meets a refusal later aborts the process, with the reason on stderr.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for settings that make no sense; the error of
    /// the pinning, most often [`Error::MemLock`](crate::Error::MemLock); else [as every
    /// call](crate::Error#every-call).
    pub fn build(mut self) -> Result<Pool> {
        self.devices[0].context().alive()?;
        let (config, options, initial) = self.plan()?;
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = || format!("pool-{}", NUMBERS.fetch_add(1, Ordering::Relaxed));
        let name = Name::take(&self.name.take().unwrap_or_else(number));
        let span = crate::foreign::span!(
            INFO, target: "pinpool::pool", "build", pool = &*name.0, capacity = self.capacity
        );
        let _entered = span.enter();
        // The region thread of the first device pins; another device's does when the first is lost.
        let others = self.devices[1..].iter().map(|d| Arc::downgrade(d.context())).collect();
        let first = self.devices[0].context().clone();
        let regions = Regions::new(first, others, options, self.before_unpin.take());
        let central = CentralPool::new(config, Some(regions.clone()));
        // From here on, the drop of the pool cleans up.
        let pool = Pool(Arc::new(PoolInner {
            central,
            regions,
            devices: std::mem::take(&mut self.devices),
            name,
            misses: AtomicU64::new(0),
            slow: AtomicU64::new(0),
            errors: ErrorTally::default(),
            refused: Default::default(),
            max_waiting: self.max_waiting,
            reported: Mutex::new(None),
            watched: AtomicBool::new(false),
        }));
        pool.0.devices.iter().for_each(|device| device.serves(pool.central()));
        if initial > 0 {
            pool.0.central.grow_by(initial);
            let pinning = pool.0.regions.wait(None, 1)?;
            if let Some(error) = pinning.error.filter(|_| pinning.ready == 0) {
                return Err(error);
            }
        }
        Ok(pool)
    }

    /// The checked settings for the central pool and for its regions, and the bytes to start with.
    fn plan(&self) -> Result<(CentralConfig, RegionOptions, usize)> {
        let page = crate::os::page_size().max(PAGE);
        let down = |bytes: usize| bytes / page * page;
        let wrong = |text: String| Err(Error::Argument(text));
        let capacity = down(self.capacity);
        if capacity == 0 {
            let (capacity, page) = (amount(self.capacity), amount(page));
            return wrong(format!("a capacity of {capacity} is less than one page ({page})"));
        }
        let region = down(self.region.unwrap_or((capacity / 8).clamp(256 << 20, 1 << 30))).min(capacity);
        let longest = self.devices.iter().map(|d| d.context().driver().longest_pin()).min();
        let extent =
            down(self.extent.unwrap_or(256 << 20).min(longest.unwrap_or(usize::MAX))).min(MAX_EXTENT);
        if region == 0 || extent == 0 {
            return wrong(format!("regions and extents need at least one page ({})", amount(page)));
        }
        let initial = match self.initial {
            Some(bytes) if down(bytes) > capacity => {
                let (bytes, more, capacity) = (amount(bytes), amount(bytes - capacity), amount(capacity));
                return wrong(format!(
                    "{bytes} to start with are {more} more than the capacity of {capacity}"
                ));
            }
            Some(bytes) => down(bytes),
            None => region,
        };
        let threads = self
            .pin_threads
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8));
        if threads == 0 {
            return wrong("pinning needs at least one thread".into());
        }
        let family = self.devices[0].context().driver().family();
        if let Some(other) = self.devices.iter().find(|d| d.context().driver().family() != family) {
            let (first, other) = (self.devices[0].name(), other.name());
            return wrong(format!("{first} and {other} cannot share pinned memory"));
        }
        let backing = self.backing.unwrap_or_else(|| Backing::usual(&**self.devices[0].context().driver()));
        if let Some(kind) = backing.kind() {
            self.devices.iter().try_for_each(|d| d.context().driver().can_use(kind))?;
        }
        // On devices by hand a pool has no threads, and must not depend on the machine.
        let by_hand = self.devices[0].context().is_by_hand();
        let thread_cache = if self.track { Some(0) } else { self.thread_cache };
        let thread_cache = thread_cache.unwrap_or((capacity / 32).clamp(256 << 10, 64 << 20));
        let config = CentralConfig {
            capacity,
            thread_cache: thread_cache.min(capacity),
            transfer_cache: thread_cache.saturating_mul(2).min(capacity / 16),
            largest: extent.min(capacity) - 32,
            step: region,
            by_hand,
            devices: self.devices.iter().map(|d| (d.context().id(), d.name().into())).collect(),
            track: self.track,
        };
        let options = RegionOptions {
            extent,
            threads: if by_hand { 0 } else { threads },
            unpinned: self.unpinned,
            huge: self.huge_pages,
            node: self.numa_node.or_else(|| self.devices[0].numa_node()),
            backing: self.backing,
            check_cgroups: self.check_cgroups && !by_hand,
        };
        Ok((config, options, initial))
    }
}

/// Characters of a name at most.
const LONGEST_POOL_NAME: usize = 100;
/// A sampler keeps a pool alive while it looks, for some microseconds. So a build tries this many
/// times, with pauses of this length, for the name of a pool that was dropped just now.
const TRIES: u32 = 10;
const TRY_PAUSE: Duration = Duration::from_micros(500);

/// The names that are in use: gauges, counters and reports tell pools apart by their names alone.
static TAKEN: Mutex<BTreeSet<Arc<str>>> = Mutex::new(BTreeSet::new());

/// A name that no other pool of the process has, until it is dropped.
#[derive(Debug)]
pub(super) struct Name(pub(super) Arc<str>);

impl Name {
    /// Takes `wanted`, or `wanted` with a number behind it if another pool has that name.
    fn take(wanted: &str) -> Self {
        let wanted = clean(wanted, LONGEST_POOL_NAME);
        let mut name: Arc<str> = (&*wanted).into();
        for attempt in 1.. {
            if TAKEN.lock().insert(name.clone()) {
                break;
            }
            match attempt {
                ..TRIES => std::thread::sleep(TRY_PAUSE),
                _ => name = format!("{wanted}#{}", attempt - TRIES + 2).into(),
            }
        }
        Self(name)
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // In a child of a fork the names are the parent's, and a missing thread may have the lock.
        if !crate::os::forked() {
            TAKEN.lock().remove(&self.0);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_printable() {
        assert_eq!(&*Name::take("a\u{1b}[2J\nb\u{202e}").0, "a\\u{1b}[2J\\nb\\u{202e}");
        assert_eq!(Name::take(&"x".repeat(1 << 20)).0.chars().count(), LONGEST_POOL_NAME + 3);
    }
}

//! The pool's memory and its end: how far pinning has come, regions, memory of the caller's, trimming, shutting down.

use std::ops::DerefMut;
use std::task::Poll;
use std::time::{Duration, Instant};

use stable_deref_trait::StableDeref;

use super::{Pool, Shutdown};
use crate::error::{RegisterError, Result};
use crate::region::{Pinning, RegionInfo};

impl Pool {
    // --- the memory --------------------------------------------------------------------------------------------------

    /// How far pinning has come.
    #[must_use]
    pub fn pinning(&self) -> Pinning {
        let mut sum = Pinning::default();
        for Pinning { wanted, ready, made, busy, longest_call, error } in
            self.growing().map(|s| s.regions.pinning())
        {
            sum.wanted += wanted;
            sum.ready += ready;
            sum.made += made;
            sum.busy += busy;
            sum.longest_call = sum.longest_call.max(longest_call);
            sum.error = sum.error.or(error);
        }
        sum
    }

    /// Waits until nothing is being pinned any more.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout), [`Error::Forked`](crate::Error::Forked). That pinning ended early is
    /// in the result, not an error.
    pub fn wait_pinned(&self, timeout: Option<Duration>) -> Result<Pinning> {
        let since = Instant::now();
        let deadline = timeout.and_then(|t| since.checked_add(t));
        for store in self.growing() {
            store.regions.wait(deadline, |_| false).map_err(|error| error.waited(since))?;
        }
        Ok(self.pinning())
    }

    /// The same for a task. (In the child of a fork: nothing, at once.)
    pub async fn pinned(&self) -> Pinning {
        for store in self.growing() {
            std::future::poll_fn(|cx| store.regions.poll(cx.waker()).map_or(Poll::Pending, Poll::Ready))
                .await;
        }
        self.pinning()
    }

    /// The regions there are, reserves included, for those who register them elsewhere too.
    /// [`PoolBuilder::before_unpin`](crate::PoolBuilder::before_unpin) says when one goes.
    #[must_use]
    pub fn regions(&self) -> Vec<RegionInfo> {
        self.stores().flat_map(|s| s.regions.list()).collect()
    }

    /// Lets the pool have memory of the caller's, to cut up and to overwrite: pinned where it is, it is a region like
    /// any other from here on. It is taken by value, since it is the pool's alone until it goes: a `Vec<u8>`, a
    /// `Box<[u8]>`, a writable mapping of a file or of shared memory (`memmap2::MmapMut` with that crate's feature
    /// `stable_deref_trait`).
    ///
    /// Its address and its contents stay as they are until a segment of it is handed out. The pool uses the whole pages
    /// inside of it. It counts against the capacity: leave room for it with
    /// [`initial`](crate::PoolBuilder::initial). Like every region it goes when it is idle and [trimmed](Self::trim),
    /// or makes way
    /// for another, or with the pool: then it is unpinned and the value is dropped, on the device's worker thread. It
    /// is never part of a reserve, and where the pool's devices hang on several NUMA nodes it counts to the first one's
    /// share, wherever it lies. Forked children see it, unlike regions of the pool's own, as the system lets them.
    ///
    /// Waits until all of it is pinned, one call for each [extent](crate::PoolBuilder::extent) with room for others in
    /// between: at the system's speed of pinning, some seconds for tens of gigabytes.
    ///
    /// # Errors
    /// With the memory, unpinned and as it was: [`Error::NoWholePage`](crate::Error::NoWholePage),
    /// [`Error::OverCapacity`](crate::Error::OverCapacity), [`Error::Closed`](crate::Error::Closed),
    /// [`Error::Forked`](crate::Error::Forked), and what the driver says: CUDA refuses memory that is registered
    /// already or is its own, and
    /// shared mappings of files on file systems whose pages it cannot pin for writing.
    pub fn adopt<T>(&self, memory: T) -> Result<RegionInfo, RegisterError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        if let Err(error) = crate::os::check_fork() {
            return Err(RegisterError { error, memory: Some(memory) });
        }
        let span = crate::foreign::span!(INFO, target: "pinpool::pool", "adopt", pool = self.name());
        let _entered = span.enter();
        self.0.main.central.adopt(memory)
    }

    /// Gives idle regions back to the system, the last to come first, as long as at least `keep` bytes stay. Returns
    /// how many bytes went. Regions with anything in use stay, and so do reserves, which `keep` does not count.
    pub fn trim(&self, keep: usize) -> usize {
        if crate::os::forked() {
            return 0;
        }
        let mut regions = Vec::new();
        for store in self.growing() {
            // One that the worker still adds to, or whose last extent is not served from yet, must stay.
            let made = store.regions.made();
            let complete =
                store.central.region_use().into_iter().filter(|(id, len, _)| made.contains(&(*id, *len)));
            regions.extend(complete.map(|(id, len, free)| (store, id, len, free)));
        }
        regions.sort_unstable_by_key(|r| std::cmp::Reverse(r.1));
        let mut total: usize = regions.iter().map(|r| r.2).sum();
        let mut gone = 0;
        for (store, id, len, free) in regions {
            if free == len && total - len >= keep && store.central.retire(id).is_some() {
                store.regions.remove(id);
                store.central.left(len);
                total -= len;
                gone += len;
            }
        }
        gone
    }

    // --- the end -----------------------------------------------------------------------------------------------------

    /// Closes the pool and waits until everything has come back, but not longer than `timeout`. What is still out then
    /// keeps its memory; it is logged, and counted in the result. Checkouts fail from the start with
    /// [`Error::Closed`](crate::Error::Closed).
    /// In the child of a fork it returns at once.
    ///
    /// Free memory stays pinned until [`trim(0)`](Self::trim), or until the last handle to the pool is dropped
    /// and the device's worker thread has unpinned it, which [`Device::close`](crate::Device::close) waits for. The
    /// call blocks the thread.
    pub fn shutdown(&self, timeout: Duration) -> Shutdown {
        // Nothing is left to be waited for, nor to be asked.
        if crate::os::forked() {
            return Shutdown { drained: false, outstanding: 0, quarantined_bytes: 0 };
        }
        let span = crate::foreign::span!(INFO, target: "pinpool::pool", "shutdown", pool = self.name());
        let _entered = span.enter();
        let deadline = Instant::now().checked_add(timeout);
        self.stores().for_each(|s| s.central.close());
        let outstanding = || self.stores().map(|s| s.central.outstanding()).sum::<u64>();
        let quarantined = || {
            self.stores()
                .map(|s| s.central.snapshot())
                .fold((0, 0), |(n, b), s| (n + s.quarantined_segments, b + s.quarantined))
        };
        loop {
            let moved = self.reap()
                | self.0.devices.iter().any(|d| d.context().driver().stepped().is_some_and(|s| s.step()));
            let (left, (stuck, quarantined_bytes)) = (outstanding(), quarantined());
            let late = deadline.is_some_and(|d| Instant::now() >= d);
            let stepped = self.0.devices.iter().all(|d| d.context().driver().stepped().is_some());
            if left <= stuck || late || (stepped && !moved) {
                if left > 0 {
                    crate::foreign::error!(
                        target: "pinpool::pool::outstanding", pool = self.name(), outstanding = left, quarantined_bytes,
                        "the pool was shut down with buffers still out: their memory is kept"
                    );
                }
                return Shutdown { drained: left == 0, outstanding: left, quarantined_bytes };
            }
            if !moved {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

//! The pool's memory: how far pinning has come, regions, adopting, trimming.

use std::ops::DerefMut;
use std::time::{Duration, Instant};

use stable_deref_trait::StableDeref;

use super::Pool;
use crate::error::{Result, SubmitError};
use crate::region::{Pinning, RegionInfo};

impl Pool {
    /// How far pinning has come.
    #[must_use]
    pub fn pinning(&self) -> Pinning {
        self.0.regions.pinning()
    }

    /// Waits until nothing is being pinned, for at most `timeout`; `None`: for ever. If pinning
    /// ended early, the result says why ([`Pinning::error`]); the call succeeds all the same.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout); [`Error::Unsupported`](crate::Error::Unsupported)
    /// on the region thread, which would wait for itself.
    pub fn wait_pinned(&self, timeout: Option<Duration>) -> Result<Pinning> {
        let since = Instant::now();
        let deadline = timeout.and_then(|t| since.checked_add(t));
        self.0.regions.wait(deadline, usize::MAX).map_err(|error| error.waited(since))
    }

    /// The pool's regions, for a program that registers them elsewhere (RDMA).
    /// [`PoolBuilder::before_unpin`](crate::PoolBuilder::before_unpin) is called before one goes.
    #[must_use]
    pub fn regions(&self) -> Vec<RegionInfo> {
        self.0.regions.list()
    }

    /// Makes memory of the caller a region of the pool: it is pinned where it is, and from then on
    /// the pool's buffers overwrite it. It may be a `Vec<u8>`, a `Box<[u8]>`, a writable mapping
    /// (`memmap2::MmapMut` with that crate's feature `stable_deref_trait`). The pool uses its whole
    /// pages. Their contents stay until a segment of them is checked out.
    ///
    /// It counts against the capacity: leave room with [`initial`](crate::PoolBuilder::initial).
    /// Children of a fork see it unless the system keeps it from them. The region goes like any
    /// other, when it is [trimmed](Self::trim), makes way for another region, or with the pool:
    /// then the device's region thread unpins it and drops the value.
    ///
    /// The call blocks until all of the memory is pinned: some seconds for tens of gigabytes, one
    /// driver call for each [extent](crate::PoolBuilder::extent).
    ///
    /// ```
    /// use pinpool::{Device, Pool, Unpinned};
    ///
    /// let device = Device::open("host")?;
    /// let builder = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow);
    /// let pool = builder.initial(0).build()?; // all of the capacity is left for adopted memory
    /// let region = pool.adopt(vec![0_u8; 1 << 20])?;
    /// assert!(region.len <= 1 << 20); // whole pages
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    /// With the memory, unpinned and as it was: [`Error::Argument`](crate::Error::Argument) without
    /// a whole page, [`Error::Exhausted`](crate::Error::Exhausted),
    /// [`Error::Impossible`](crate::Error::Impossible) for more than the capacity less what is
    /// quarantined, [`Error::Closed`](crate::Error::Closed), and as for
    /// [`Device::register`](crate::Device::register).
    pub fn adopt<T>(&self, memory: T) -> Result<RegionInfo, SubmitError<T>>
    where
        T: DerefMut<Target = [u8]> + StableDeref + Send + 'static,
    {
        if let Err(error) = crate::os::check_fork() {
            return Err(SubmitError { error, buffer: Some(memory) });
        }
        let span = crate::foreign::span!(INFO, target: "pinpool::pool", "adopt", pool = self.name());
        let _entered = span.enter();
        let adopted = self.0.central.adopt(memory);
        adopted.map_err(|refused| SubmitError { error: refused.error.of_pool(self.name()), ..refused })
    }

    /// Gives idle regions back to the system, the newest first, and keeps at least `keep` bytes.
    /// Returns how many bytes are given back; the region thread unpins them after this call
    /// returns. A region with a segment in use stays, and every region while a request waits or
    /// memory is being pinned. Thread caches are emptied first.
    pub fn trim(&self, keep: usize) -> usize {
        if crate::os::forked() {
            return 0;
        }
        self.0.central.trim(keep)
    }
}

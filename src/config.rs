//! How a pool is set up, checked once when it is built.

use crate::arena::MAX_EXTENT;
use crate::device::HostAllocFlags;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::region::{Backing, BeforeUnpin, HugePages, RegionInfo, RegionOptions, Unpinned};
use crate::segment::PAGE;

/// Sets up a [`Pool`](crate::Pool). Sizes are bytes.
#[must_use = "nothing happens until `build`"]
pub struct PoolBuilder {
    pub(crate) devices: Vec<Device>,
    pub(crate) capacity: usize,
    pub(crate) initial: Option<usize>,
    pub(crate) region: Option<usize>,
    pub(crate) extent: Option<usize>,
    pub(crate) thread_cache: Option<usize>,
    pub(crate) unpinned: Unpinned,
    pub(crate) backing: Option<Backing>,
    pub(crate) huge_pages: HugePages,
    pub(crate) pin_threads: Option<usize>,
    pub(crate) reserves: Vec<(String, usize)>,
    pub(crate) before_unpin: Option<BeforeUnpin>,
    pub(crate) name: Option<String>,
    pub(crate) track: bool,
}

/// Everything decided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolPlan {
    /// For the pool proper, reserves taken off; for each of the nodes.
    pub(crate) capacity: usize,
    pub(crate) initial: usize,
    pub(crate) region: usize,
    pub(crate) thread_cache: usize,
    pub(crate) shared_cache: usize,
    pub(crate) track: bool,
    pub(crate) options: RegionOptions,
}

impl PoolBuilder {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            devices: vec![device.clone()],
            capacity: 256 << 20,
            initial: None,
            region: None,
            extent: None,
            thread_cache: None,
            unpinned: Unpinned::default(),
            backing: None,
            huge_pages: HugePages::default(),
            pin_threads: None,
            reserves: Vec::new(),
            before_unpin: None,
            name: None,
            track: false,
        }
    }

    /// One more device that the pool serves. All must be of one family, and every buffer serves all of them.
    ///
    /// Where the devices hang on several NUMA nodes, each node has an equal share of the capacity, in regions of its
    /// own, and [`Request::near`](crate::Request::near) names the device whose node a buffer is to come from; without
    /// it buffers come from the first device's.
    pub fn device(mut self, device: &Device) -> Self {
        // Once each: what is in flight is summed up over the devices.
        if self.devices.iter().all(|d| d.context().id() != device.context().id()) {
            self.devices.push(device.clone());
        }
        self
    }

    /// Bytes that the pool may hold at most, reserves included; rounded down to whole pages. Default: 256 MiB.
    pub fn capacity(mut self, bytes: usize) -> Self {
        self.capacity = bytes;
        self
    }

    /// Bytes to start with: [`build`](Self::build) returns when the first extent of them is pinned, the rest follows in
    /// the background. Default: one region.
    pub fn initial(mut self, bytes: usize) -> Self {
        self.initial = Some(bytes);
        self
    }

    /// Bytes to grow by. Default: an eighth of the capacity, at least 256 MiB and at most 1 GiB; all of the capacity
    /// where that is less.
    ///
    /// A buffer lies in one region and takes a little more than its length (see
    /// [`Request::segment_bytes`](crate::Request::segment_bytes)), so a region of 2 MiB holds one buffer of 1 MiB, not
    /// two. Regions should be many times as large as most buffers, or a little larger than what is to fit.
    pub fn region(mut self, bytes: usize) -> Self {
        self.region = Some(bytes);
        self
    }

    /// Bytes pinned by one call at most, and so the largest segment that there can be. Default: 256 MiB, for which the
    /// call takes a few milliseconds; other users of the driver may have to wait for so long. What the system or the
    /// driver cannot pin in one call is cut smaller: on CUDA 256 GiB are the most, and 1 GiB on Linux 6.11 to 6.13; on
    /// Ascend 128 GiB.
    pub fn extent(mut self, bytes: usize) -> Self {
        self.extent = Some(bytes);
        self
    }

    /// Bytes that one thread may keep for itself at most, so that its next checkouts cost nothing. Four times as much
    /// may lie between threads, in batches that who returns leaves for who takes; so `n` threads and what is between
    /// them keep `n + 4` times this at most, whichever way buffers flow. All of it is within reach of a request that
    /// finds nothing else: first what lies between threads and what those keep who have been idle for a millisecond; of
    /// a thread at work half of what it has of the very class; and everything, once the pool can grow no more or
    /// anybody waits. A thread that ends leaves its part to the pool. A size class gets an eighth of it and 64 segments
    /// at most; segments of up to a quarter are kept by twos at least, and larger ones not at all. So much for each
    /// node where there are several, and for each reserve. Default: a 32nd of the capacity, at least 256 KiB and at
    /// most 64 MiB.
    pub fn thread_cache(mut self, bytes: usize) -> Self {
        self.thread_cache = Some(bytes);
        self
    }

    /// What to do when the system refuses to lock pages. Default: an error.
    pub fn unpinned(mut self, policy: Unpinned) -> Self {
        self.unpinned = policy;
        self
    }

    /// Where the memory comes from. Default: [`Backing::Registered`], the fastest; on Ascend [`Backing::HostAlloc`],
    /// which all devices have there. What is [adopted](crate::Pool::adopt) comes on top of it.
    pub fn backing(mut self, backing: Backing) -> Self {
        self.backing = Some(backing);
        self
    }

    /// Whether the memory is backed by huge pages, which make pinning several times faster where the system has them at
    /// hand. Default: [`HugePages::Auto`].
    pub fn huge_pages(mut self, huge: HugePages) -> Self {
        self.huge_pages = huge;
        self
    }

    /// Threads that touch pages while a region is made, beside the one that pins what was touched. They end with the
    /// region's making. Default: as many as there are cores, at most 8.
    pub fn pin_threads(mut self, threads: usize) -> Self {
        self.pin_threads = Some(threads);
        self
    }

    /// Bytes, of the capacity, that only requests which name `name` may take; rounded up to whole pages. Pinned when
    /// the pool is built. A reserve never grows: for a buffer of 1 MiB it needs 1 MiB and a page.
    pub fn reserve(mut self, name: impl Into<String>, bytes: usize) -> Self {
        self.reserves.push((name.into(), bytes));
        self
    }

    /// Called before a region is unpinned, on the device's worker thread, for those who registered it elsewhere too. It
    /// must not call the pool.
    pub fn before_unpin(mut self, call: impl Fn(&RegionInfo) + Send + Sync + 'static) -> Self {
        self.before_unpin = Some(Box::new(call));
        self
    }

    /// What the pool is called in events, statistics and reports. Default: `pool-N`, where N counts the process's
    /// pools.
    ///
    /// There it is told from all others: while a pool of this name lives, the next one is called `name#2`, and so on,
    /// and [`Pool::name`](crate::Pool::name) says so. A name is free again once the last handle to its pool is dropped,
    /// so a pool that is built anew goes on with its metrics. Of a longer name the first 100 characters count, and what
    /// is no printable character is written out (`\u{1b}`).
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether every checkout is entered in a ledger, with its time, its [tag](crate::Request::tag) and the place in
    /// the program that asked for it, for [`Pool::stuck`](crate::Pool::stuck) and for the histogram of holding.
    /// Default: no.
    ///
    /// It is for finding leaks, and costs what the pool is otherwise built to avoid: threads keep nothing for
    /// themselves ([`thread_cache`](Self::thread_cache) counts as 0, and every checkout as a miss), each checkout and
    /// each return takes the pool's lock and reads the clock, so that the two together take up to a microsecond and not
    /// some nanoseconds, and an entry takes about 100 bytes for as long as its buffer is out.
    pub fn track_checkouts(mut self, track: bool) -> Self {
        self.track = track;
        self
    }

    pub(crate) fn plan(&self) -> Result<PoolPlan> {
        let page = crate::os::page_size().max(PAGE);
        let down = |bytes: usize| bytes / page * page;
        let up = |bytes: usize| bytes.checked_next_multiple_of(page).unwrap_or(usize::MAX);
        let wrong = |text: String| Err(Error::Config(text));
        let capacity = down(self.capacity);
        if capacity == 0 {
            return wrong(format!("a capacity of {} bytes is less than one page ({page})", self.capacity));
        }
        let mut left = capacity;
        for (i, (name, bytes)) in self.reserves.iter().enumerate() {
            if *bytes == 0 {
                return wrong(format!("reserve {name:?} has no bytes"));
            }
            if self.reserves[..i].iter().any(|r| r.0 == *name) {
                return wrong(format!("reserve {name:?} is set twice"));
            }
            left = match left.checked_sub(up(*bytes)) {
                Some(left) if left > 0 => left,
                _ => return wrong(format!("the reserves leave nothing of the capacity of {capacity} bytes")),
            };
        }
        let nodes = self.nodes().len();
        let share = down(left / nodes);
        if share == 0 {
            return wrong(format!("a capacity of {left} bytes does not go round among {nodes} NUMA nodes"));
        }
        let region = down(self.region.unwrap_or((left / 8).clamp(256 << 20, 1 << 30))).min(share);
        let longest = self.devices.iter().map(|d| d.context().driver().longest_pin()).min();
        let extent =
            down(self.extent.unwrap_or(256 << 20).min(longest.unwrap_or(usize::MAX))).min(MAX_EXTENT);
        if region == 0 || extent == 0 {
            return wrong(format!("regions and extents need at least one page ({page})"));
        }
        let initial = match self.initial {
            Some(bytes) if down(bytes) > left => {
                return wrong(format!("{bytes} bytes to start with are more than the capacity of {left}"));
            }
            // Each node has its part, if only a page.
            Some(bytes) => up(down(bytes).div_ceil(nodes)).min(share),
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
            return wrong(format!(
                "{} and {} cannot share pinned memory",
                self.devices[0].name(),
                other.name()
            ));
        }
        let allocates = self.devices[0].context().driver().allocates();
        let backing = self.backing.unwrap_or(match allocates {
            true => Backing::HostAlloc(HostAllocFlags::default()),
            false => Backing::default(),
        });
        if let Some(kind) = backing.kind() {
            self.devices.iter().try_for_each(|d| d.context().driver().can_use(kind))?;
        }
        let thread_cache = if self.track { Some(0) } else { self.thread_cache };
        let thread_cache = thread_cache.unwrap_or((capacity / 32).clamp(256 << 10, 64 << 20));
        Ok(PoolPlan {
            capacity: share,
            initial,
            region,
            thread_cache,
            shared_cache: thread_cache.saturating_mul(4),
            track: self.track,
            options: RegionOptions {
                extent,
                threads,
                unpinned: self.unpinned,
                huge: self.huge_pages,
                node: None,
                backing,
            },
        })
    }

    /// The NUMA nodes that the devices hang on, and which devices (by number) hang on each; the first device's comes
    /// first. A device that does not know its node counts to the first's.
    pub(crate) fn nodes(&self) -> Vec<(Option<u32>, Vec<usize>)> {
        let mut nodes: Vec<(Option<u32>, Vec<usize>)> = Vec::new();
        for (number, device) in self.devices.iter().enumerate() {
            let node = device.context().driver().numa_node();
            let known = nodes.iter().position(|n| n.0 == node || node.is_none());
            match known {
                Some(at) => nodes[at].1.push(number),
                None => nodes.push((node, vec![number])),
            }
        }
        nodes
    }
}

impl std::fmt::Debug for PoolBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolBuilder")
            .field("devices", &self.devices)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

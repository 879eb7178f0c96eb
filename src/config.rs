//! How a pool is set up. `pool::build` checks the settings and fills in the defaults.

use crate::device::handle::Device;
use crate::region::{Backing, BeforeUnpin, HugePages, RegionInfo, Unpinned};

/// Sets up a [`Pool`](crate::Pool): see [`Pool::builder`](crate::Pool::builder). Sizes are bytes.
/// [`build`](Self::build) checks the settings.
///
/// ```
/// use pinpool::{Device, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let pool = Pool::builder(&device)
///     .name("weights")
///     .capacity(64 << 20) // at most
///     .initial(16 << 20) // at the start; the rest when requests need it
///     .unpinned(Unpinned::Allow) // go on where the memlock limit is too low
///     .build()?;
/// assert_eq!(pool.name(), "weights");
/// # Ok::<(), pinpool::Error>(())
/// ```
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
    pub(crate) numa_node: Option<u32>,
    pub(crate) before_unpin: Option<BeforeUnpin>,
    pub(crate) name: Option<String>,
    pub(crate) track: bool,
    pub(crate) check_cgroups: bool,
    pub(crate) max_waiting: usize,
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
            numa_node: None,
            before_unpin: None,
            name: None,
            track: false,
            check_cgroups: true,
            max_waiting: usize::MAX,
        }
    }

    /// Adds a device that the pool serves. All devices must be of one family (all CUDA, all Ascend,
    /// or the host), and every buffer serves all of them. The memory lies near the first device,
    /// unless [`numa_node`](Self::numa_node) says otherwise.
    pub fn device(mut self, device: &Device) -> Self {
        // Each device once: bytes in flight are summed over the devices.
        if self.devices.iter().all(|d| d.context().id() != device.context().id()) {
            self.devices.push(device.clone());
        }
        self
    }

    /// The bytes that the pool may hold at most, rounded down to whole pages. Default: 256 MiB.
    pub fn capacity(mut self, bytes: usize) -> Self {
        self.capacity = bytes;
        self
    }

    /// The bytes to start with. [`build`](Self::build) returns when the first extent is pinned; the
    /// rest follows in the background. 0 pins nothing before the first checkout. Default: one
    /// [region](Self::region).
    pub fn initial(mut self, bytes: usize) -> Self {
        self.initial = Some(bytes);
        self
    }

    /// The bytes of a region, by which the pool grows. Default: an eighth of the capacity, at least
    /// 256 MiB and at most 1 GiB; all of the capacity where that is less.
    ///
    /// A buffer lies in one region and takes a little more than its length
    /// ([`Request::segment_bytes`](crate::Request::segment_bytes)): a region of 2 MiB holds one
    /// buffer of 1 MiB, not two. A longer request has a region of its own length pinned.
    pub fn region(mut self, bytes: usize) -> Self {
        self.region = Some(bytes);
        self
    }

    /// The most bytes pinned by one driver call, and so the largest segment: this setting and the
    /// capacity bound the largest buffer. Default: 256 MiB, which take a few milliseconds to pin,
    /// while other users of the driver wait. An extent is smaller where less can be pinned in one
    /// call: CUDA pins at most 256 GiB, and 1 GiB on Linux 6.11 to 6.13; Ascend 128 GiB.
    pub fn extent(mut self, bytes: usize) -> Self {
        self.extent = Some(bytes);
        self
    }

    /// The most bytes that a thread may cache. A checkout from it takes no lock, and a return goes
    /// to the returning thread's. 0 switches the caches off. Default: a 32nd of the capacity, 256
    /// KiB to 64 MiB. A thread that ends leaves its cache to the pool.
    ///
    /// - **Between threads**, each size class keeps twice as many bytes at most, but no more than a
    ///   16th of the capacity and 256 segments. So `n` threads that pass buffers of `c` sizes to
    ///   each other keep `n + 2 c` times this setting at most.
    /// - **Within a cache**, a size class has room for half of the bytes left at a thread's first
    ///   use of it, for 64 segments at most. A class without room for two takes room from others,
    ///   or is not cached.
    /// - **A request that finds nothing else** takes what lies between threads or is in caches idle
    ///   for a millisecond, and everything if it may not wait for growth
    ///   ([`try_checkout`](crate::Pool::try_checkout)), if the pool cannot grow, or if one waits.
    pub fn thread_cache(mut self, bytes: usize) -> Self {
        self.thread_cache = Some(bytes);
        self
    }

    /// What to do when the system refuses to lock pages. Default: [`Unpinned::Refuse`], an error.
    pub fn unpinned(mut self, policy: Unpinned) -> Self {
        self.unpinned = policy;
        self
    }

    /// Where the memory comes from. Default: [`Backing::Registered`], the fastest to pin;
    /// [`Backing::HostAlloc`] on Ascend, and, with one warning, where the system cannot register
    /// memory.
    pub fn backing(mut self, backing: Backing) -> Self {
        self.backing = Some(backing);
        self
    }

    /// Whether the memory is backed by huge pages, which make pinning several times faster where
    /// the system has them free. Default: [`HugePages::Auto`].
    pub fn huge_pages(mut self, huge: HugePages) -> Self {
        self.huge_pages = huge;
        self
    }

    /// The number of threads that touch pages while a region is made, beside the one that pins.
    /// They end when the region is complete. Default: the number of cores, at most 8.
    pub fn pin_threads(mut self, threads: usize) -> Self {
        self.pin_threads = Some(threads);
        self
    }

    /// The NUMA node that the pool's memory is to lie on. A server with devices on several nodes
    /// has a pool for each. Default: the node of the first device ([`Device::numa_node`]).
    ///
    /// Pages come from that node as long as it has any, and then from others; [`RegionInfo::node`]
    /// says from which. It has no effect for a node that the system lacks, and for memory of the
    /// driver or the program.
    pub fn numa_node(mut self, node: u32) -> Self {
        self.numa_node = Some(node);
        self
    }

    /// The most requests that may wait for memory, so that a server under more load than it can
    /// serve refuses clients at once. One more gets [`Error::QueueFull`](crate::Error::QueueFull),
    /// whether it is blocking or async, for one buffer or several. 0: no request waits. Default: no
    /// bound. A copier's own waits count, and are not refused.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.max_waiting = requests;
        self
    }

    /// Whether the pool looks at the memory limits of this process's control groups before it makes
    /// a region. Default: yes.
    ///
    /// Past such a limit, which is how containers bound memory, no call fails: the kernel ends a
    /// process of the group. So a region that the groups would not carry is refused with
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), which names the group; for a waiting
    /// request a smaller one is tried. Page cache counts as room, swap does not: where the group
    /// may swap, `false` lets the pool try. Keep the sum of all pools' capacities below the limit.
    pub fn check_cgroups(mut self, check: bool) -> Self {
        self.check_cgroups = check;
        self
    }

    /// `call` runs before a region is unpinned, on the region thread, for a program that registered
    /// it elsewhere ([`Pool::regions`](crate::Pool::regions)). It must not call the pool.
    pub fn before_unpin(mut self, call: impl Fn(&RegionInfo) + Send + Sync + 'static) -> Self {
        self.before_unpin = Some(Box::new(call));
        self
    }

    /// The pool's name in events, statistics and reports. Default: `pool-N`, N counting pools.
    ///
    /// While a pool of this name is open, the next one is `name#2`, and so on:
    /// [`Pool::name`](crate::Pool::name) returns the name in use. A pool that is built anew
    /// continues the metrics of the one before. A name is cut after 100 characters, and unprintable
    /// ones are escaped.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether the pool records every checkout, and not a sample: its time, its
    /// [tag](crate::Request::tag) and its call site, for [`Pool::stuck`](crate::Pool::stuck) and
    /// the histogram of holding times. Default: no.
    ///
    /// Tracking is for finding leaks: threads cache nothing, and a checkout and a return together
    /// take up to a microsecond. A record takes about 100 bytes while its buffer is out.
    pub fn track_checkouts(mut self, track: bool) -> Self {
        self.track = track;
        self
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

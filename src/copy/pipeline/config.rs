//! How a pipeline is set up.

use std::num::NonZero;
use std::time::Duration;

use super::Pipeline;
use super::stores::Stores;
use crate::device::handle::Device;
use crate::error::{Error, Result};
use crate::pool::{Pool, Request};
use crate::segment::PAGE;

/// Bytes that go through one segment where nothing else is said.
const CHUNK: usize = 4 << 20;
/// Chunks on the wire where nothing else is said: while the foreground is about, and else. Finding out that a chunk has
/// arrived takes about as long as the next one is on the wire, so that with two the wire runs dry now and then.
const DEPTH: usize = 2;
const DEEP: usize = 6;
/// Chunks that are filled and wait for the wire, or have landed and wait for a thread, where nothing else is said.
const WAITING: usize = 2;
/// The least that the chunk is made smaller to by itself.
const LEAST_CHUNK: usize = 64 << 10;
/// Bytes of segments that a pipeline uses at most where nothing else is said.
const SHARE: usize = 256 << 20;
/// How long workers look around before they sleep, where there are cores for it.
const PATIENCE: Duration = Duration::from_millis(1);
/// With so many threads memory that was touched is written through the caches: then there are threads enough for that,
/// and the segments are read from the caches sooner.
const MANY: usize = 12;
/// Threads, streams and chunks on the wire at most.
const MOST: usize = 1 << 16;
/// Threads where nothing else is said, if there are as many cores.
const THREADS: usize = 8;

/// Which transfers go first: [`Pipeline::with_priority`].
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (weights, bulk) = (device.alloc(4096)?, Pipeline::builder(&pool, &device).build()?);
/// use pinpool::pipeline::Priority;
///
/// let foreground = bulk.with_priority(Priority::Foreground); // the same pipeline
/// foreground.upload_slice(&[1; 4096], &weights)?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Loads of much data: in the order in which they were started, with at most [`depth`](PipelineBuilder::depth)
    /// chunks in flight in each direction (windows of files apart: see there).
    #[default]
    Bulk,
    /// Requests whose latency counts: before all bulk transfers, on a stream of their own, with segments kept for them.
    /// The rate limit does not hold for them.
    Foreground,
}

/// Whether bytes go through page-locked segments: [`PipelineBuilder::staging`].
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// use pinpool::pipeline::Staging;
///
/// // On the host device too, to test what a GPU does.
/// let pipeline = Pipeline::builder(&pool, &device).staging(Staging::Always).build()?;
/// # drop(pipeline);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Staging {
    /// Where the device needs it to be fast: GPUs do; the host device takes ordinary memory as it is.
    #[default]
    Auto,
    /// Always.
    Always,
}

/// Sets up a [`Pipeline`]: [`Pipeline::builder`]. Sizes are bytes.
///
/// ```
/// # use pinpool::{Device, Pool, Unpinned, pipeline::Pipeline};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// let pipeline = Pipeline::builder(&pool, &device).share(16 << 20).chunk(1 << 20).rate(2 << 30).build()?;
/// assert_eq!(pipeline.chunk(), 1 << 20);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing happens until `build`"]
pub struct PipelineBuilder {
    pool: Pool,
    device: Device,
    threads: Option<usize>,
    chunk: Option<usize>,
    share: Option<usize>,
    streams: Option<usize>,
    depth: Option<usize>,
    rate: Option<u64>,
    priority: Priority,
    stores: Option<Stores>,
    patience: Option<Duration>,
    staging: Staging,
}

/// Everything decided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) threads: usize,
    /// A multiple of a page.
    pub(super) chunk: usize,
    /// Of the pool, for one chunk.
    pub(super) segment: usize,
    /// Segments at most.
    pub(super) segments: usize,
    /// Of these, in use for the bulk transfers of one direction at most.
    pub(super) rotation: usize,
    pub(super) share: usize,
    pub(super) streams: usize,
    /// Bulk chunks on the wire in each direction: while the foreground is about, and else.
    pub(super) depth: usize,
    pub(super) deep: usize,
    pub(super) rate: Option<u64>,
    /// How bytes are put into segments, out of them into memory, and into memory that nobody has touched yet.
    pub(super) fills: Stores,
    pub(super) drains: Stores,
    pub(super) touches: Stores,
    /// Ordinary memory goes through segments.
    pub(super) staged: bool,
    /// How long a worker looks for work before it sleeps.
    pub(super) patience: Duration,
}

impl PipelineBuilder {
    pub(super) fn new(pool: &Pool, device: &Device) -> Self {
        Self {
            pool: pool.clone(),
            device: device.clone(),
            threads: None,
            chunk: None,
            share: None,
            streams: None,
            depth: None,
            rate: None,
            priority: Priority::Bulk,
            stores: None,
            patience: None,
            staging: Staging::Auto,
        }
    }

    /// Threads that fill and drain segments, and look after the copies meanwhile. They start with the first transfer,
    /// and sleep when there is nothing to do. (One more for each direction that is used looks after the copies when all
    /// of them are busy; it sleeps most of the time.) Default: as many as there are cores, at most 8, which keep a link
    /// of 55 GB/s busy where each core moves 7 GB/s or more; where they are slower, give more (on one machine 0.78 of
    /// the link with 8, 0.94 with 16).
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Bytes that go through one segment, rounded up to whole pages of 4 KiB. Default: 4 MiB, less where the share or
    /// the pool's extents are small. The segments in rotation (as many as there are threads, and
    /// [`depth`](Self::depth), and two) should stay in the processor's caches, from which the device is served. A
    /// foreground request may have to wait for the chunk that is in flight. Transfers that would leave threads idle are
    /// cut smaller.
    pub fn chunk(mut self, bytes: usize) -> Self {
        self.chunk = Some(bytes);
        self
    }

    /// Bytes of the pool that the pipeline uses at most, registered windows of files included. The rest of the pool is
    /// free for other uses at any time. Default: half of the pool's capacity, at most 256 MiB. One segment is used in
    /// any case, also where a [`chunk`](Self::chunk) needs more than the share; small blocking calls in the foreground
    /// (256 KiB and less) take their memory besides.
    pub fn share(mut self, bytes: usize) -> Self {
        self.share = Some(bytes);
        self
    }

    /// Streams of the pipeline's own in each direction, on which chunks are submitted in turn: two uploads or eight
    /// downloads at a time while there is no foreground work, else one. Default: as many as there are chunks in flight
    /// ([`depth`](Self::depth)). With fewer the device has more to do on a stream when one of its chunks is complete,
    /// and does that first: copies on other streams wait, on an H200 for 20 ms beside one stream that is never empty.
    #[doc(hidden)]
    pub fn streams(mut self, streams: usize) -> Self {
        self.streams = Some(streams);
        self
    }

    /// Bulk chunks in each direction that are in flight at most. A foreground copy may have to wait until as many are
    /// copied. Default: 2 while there are foreground transfers now and then (of this pipeline, the last at most 100 ms
    /// ago), and 6 while there are none, which keeps the link busier. A depth that is given here holds at all times.
    /// Windows of the page cache ([`Reading`](super::Reading)) do not count: without foreground work such a window, 64
    /// MiB at most, is copied at once, and a copy that comes then waits for it.
    pub fn depth(mut self, chunks: usize) -> Self {
        self.depth = Some(chunks);
        self
    }

    /// Bytes a second that bulk transfers move at most, both directions together. Default: no limit. It can be changed
    /// later: [`Pipeline::set_rate`].
    pub fn rate(mut self, bytes_per_second: u64) -> Self {
        self.rate = Some(bytes_per_second);
        self
    }

    /// The priority of transfers started by the pipeline's handle; [`Pipeline::with_priority`] gives others. Default:
    /// [`Priority::Bulk`].
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// How bytes in memory are put into segments, and from segments into memory. Default: into segments through the
    /// processor's caches, out of them past these with fewer than 12 threads, and into new memory always past them.
    #[doc(hidden)]
    pub fn stores(mut self, stores: Stores) -> Self {
        self.stores = Some(stores);
        self
    }

    /// For how long a thread of the pipeline that runs out of work during a transfer looks around, every 15 us, before
    /// it sleeps: until there is work, of that transfer or of the next. Waking a thread takes as long as copying a
    /// chunk, so this is speed for a little processor time. Default: 1 ms where the machine has cores for it (at least
    /// three more than [`threads`](Self::threads)), elsewhere none.
    #[doc(hidden)]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Whether bytes in memory go through segments. Default: [`Staging::Auto`].
    pub fn staging(mut self, staging: Staging) -> Self {
        self.staging = staging;
        self
    }

    /// Builds the pipeline: makes its streams, and starts no thread yet.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that make no sense; [`Error::WrongDevice`] for a device that the pool does not
    /// serve; what the driver says.
    pub fn build(self) -> Result<Pipeline> {
        let settings = self.settings()?;
        Pipeline::start(self.pool, self.device, settings, self.priority)
    }

    fn settings(&self) -> Result<Settings> {
        let wrong = |text: String| Err(Error::Config(text));
        if self.pool.devices().iter().all(|d| d.context().id() != self.device.context().id()) {
            return Err(Error::WrongDevice { device: self.device.name().into() });
        }
        for (what, value) in [
            ("threads", self.threads.unwrap_or(1)),
            ("streams", self.streams.unwrap_or(1)),
            ("depth", self.depth.unwrap_or(1)),
            ("chunk", self.chunk.unwrap_or(1)),
        ] {
            if value == 0 {
                return wrong(format!("a pipeline with {what} of 0; it needs at least 1"));
            }
        }
        for (what, value) in [("threads", self.threads), ("streams", self.streams), ("depth", self.depth)] {
            if let Some(value) = value.filter(|value| *value > MOST) {
                return wrong(format!("a pipeline with {what} of {value}; at most {MOST} make sense"));
            }
        }
        if self.rate == Some(0) {
            return wrong("a rate of 0 bytes a second would never end; leave it out for no limit".into());
        }
        let (capacity, largest) = self.pool.room();
        let share = self.share.unwrap_or_else(|| (capacity / 2).min(SHARE));
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = self.threads.unwrap_or_else(|| cores.min(THREADS));
        let (depth, deep) = self.depth.map_or((DEPTH, DEEP), |depth| (depth, depth));
        // Before the data there may be a part of a page that a file's offset starts in, and behind it the rest of one.
        let need = |chunk: usize| Request::new(chunk + 2 * PAGE).align(PAGE).segment_bytes();
        let fits = |chunk: usize, share: usize| {
            chunk + 2 * PAGE <= largest && need(chunk).is_ok_and(|bytes| bytes + PAGE <= share)
        };
        let chunk = match self.chunk {
            Some(bytes) => match bytes.checked_next_multiple_of(PAGE) {
                Some(chunk) if chunk < usize::MAX / 2 => chunk,
                _ => return wrong(format!("a chunk of {bytes} bytes; at most a few gigabytes make sense")),
            },
            None => {
                // Each thread has one, some are on the wire.
                let wanted = share / (threads + deep + 1);
                let mut chunk = CHUNK;
                while chunk > LEAST_CHUNK && (!fits(chunk, wanted)) {
                    chunk /= 2;
                }
                while chunk > PAGE && !fits(chunk, share) {
                    chunk /= 2;
                }
                chunk
            }
        };
        if !fits(chunk, share.max(self.share.map_or(capacity, |s| s))) {
            return wrong(format!(
                "a chunk of {chunk} bytes takes {} of the pool, and neither fits a share of {share} bytes of a pool of \
                 {capacity} bytes with buffers of at most {largest}; make the chunk smaller or the pool or its extents larger",
                need(chunk).map_or_else(|_| "more than there is".into(), |bytes| format!("{bytes} bytes")),
            ));
        }
        let segment = need(chunk)? + PAGE;
        let segments = (share / segment).max(1);
        // More would only push each other out of the caches.
        let rotation = threads + deep + WAITING;
        Ok(Settings {
            threads,
            chunk,
            segment,
            segments,
            rotation,
            share,
            streams: self.streams.unwrap_or(deep),
            depth,
            deep,
            rate: self.rate,
            fills: self.stores.unwrap_or(Stores::Cached),
            drains: self.stores.unwrap_or(if threads < MANY { Stores::Streaming } else { Stores::Cached }),
            touches: self.stores.unwrap_or(Stores::Streaming),
            patience: self.patience.unwrap_or(if cores > threads + 2 { PATIENCE } else { Duration::ZERO }),
            staged: self.staging == Staging::Always
                || !self.device.context().driver().takes_ordinary_memory(),
        })
    }
}

//! Small copies through the copy queue, beside the same copies that the threads submit themselves.
//!
//! # Files
//!
//! This file has the options and helpers of all parts; read it first. Then one file for each part: `rate.rs`,
//! `lone.rs`, `pieces.rs` (scattered pieces), `gather.rs` (gather, packing, pinned pieces, rows) and `sweep.rs` (the
//! driver at best). `../driver` calls the driver, `../measure` has rounds, gates and options.
//!
//! # Rate (`--only rate`)
//!
//! Threads upload 4 KiB again and again, each to a range of its own. A thread submits a burst, waits until the burst's
//! copies are complete, and begins again, as a server's worker does for a request. Meanwhile the other threads submit
//! their bursts.
//!
//! | contender | a copy is |
//! | --- | --- |
//! | `bare` | `cuMemcpyHtoDAsync` on the thread's own stream; the burst ends with an event, which is polled |
//! | `batch_1`, `_2`, `_3` | 1 to 3 threads with a stream each: `cuMemcpyBatchAsync` of 256 copies, lists prepared |
//! | `stream` | `Stream::upload` on the thread's own stream, of a buffer that the thread keeps |
//! | `queue` | `CopyQueue::upload` of a buffer that the thread keeps; the thread waits for one handle after the other |
//! | `queue_fresh` | `checkout`, `CopyQueue::upload`, drop of the handle; the thread waits for the burst's last copy |
//!
//! *rate* is copies a second of all threads together, by wall time. *call* is the time that a thread spends in its
//! calls (for `queue_fresh` including checkout and drop), divided by copies: the cost of submitting to the caller.
//!
//! # A lone copy (`--only lone`)
//!
//! One thread, one copy of 4 KiB at a time, from before the call until `wait` returns: through the idle queue, and on a
//! stream. Once back to back, once with 2 ms of sleep before each.
//!
//! # Scattered pieces (`--only scatter`)
//!
//! Pieces of 16 and 64 KiB between random places of pinned buffers and random places of device memory, in both
//! directions, submitted by 1 and by 4 threads, and by one call (`0 threads`), over the pinned peak: the best of five
//! copies of 64 MiB in the same direction. All bytes are compared after each measurement. Beside it the best of bare
//! batches by 1, 2 and 3 threads with a stream each: on a machine where the driver itself misses the gate, a missed
//! gate is no fault of the queue.
//!
//! # Gather (`--only gather`)
//!
//! 16,384 pieces of 16 KiB of pageable memory, in no order, to neighbouring places of device memory, and back to where
//! they were: `CopyQueue::gather` and `scatter_blocking`, by one caller with the queue's helpers, and by 4 and 8
//! callers with a part of the pieces each, against the same peak. `--only pinned`: the same pieces in pinned buffers,
//! by one caller: by the calls for pinned pieces, which choose the way, and packed. `--only packing`: packing alone,
//! without the device, which bounds what threads can reach.
//!
//! # Rows (`--only rows`)
//!
//! Pinned pieces of 4 and 16 KiB at even distances on both sides, as a cache's blocks are, by one call each way.
//!
//! # The driver at best (`--sweep`)
//!
//! Bare batches of 32 to 256 pieces by one thread and by two, with one stream each and with two: the measurements
//! behind the queue's choice of batches.
//!
//! # Running it
//!
//! `cargo bench --bench queue`, or the executable by itself; `--quick`, `--rounds`, `--threads 1,16`, `--burst`,
//! `--submitters`, `--packers` and `--depth` (of the queue), `--pieces 16,64` (KiB), `--pushers`, `--callers` and
//! `--count` set these. Without a GPU the pool's contenders run alone, on the host device, which only shows that they
//! run.
#![allow(missing_docs, unsafe_code)]

#[path = "../driver/mod.rs"]
mod driver;
mod gather;
mod lone;
#[path = "../measure/mod.rs"]
mod measure;
mod pieces;
mod rate;
mod sweep;

use std::time::{Duration, Instant};

use measure::{flag, number, wanted};
use pinpool::{CopyQueue, Device, PinnedBuf, Pool, QueueOptions, Unpinned};

const PIECE: usize = 4 << 10;

fn pool(device: &Device, capacity: usize) -> Pool {
    let builder = Pool::builder(device).capacity(capacity).initial(capacity);
    // On the host device the figures do not depend on locked pages.
    let builder = if device.name().starts_with("host") { builder.unpinned(Unpinned::Allow) } else { builder };
    let pool = builder.build().expect("memory for a pool");
    let pinning = pool.wait_pinned(None).expect("pinning ends");
    assert!(pinning.error.is_none(), "{pinning:?}");
    pool
}

fn queue(device: &Device) -> CopyQueue {
    let mut options = QueueOptions::new();
    if let n @ 1.. = number("submitters", 0) {
        options = options.threads(n);
    }
    if let n @ 1.. = number("packers", 0) {
        options = options.packers(n);
    }
    if let n @ 1.. = number("depth", 0) {
        options = options.depth(n);
    }
    device.copy_queue_with(options).expect("a queue")
}

fn checkout(pool: &Pool, len: usize, seed: usize) -> PinnedBuf {
    let mut buf = pool.checkout(len).expect("room in the pool");
    buf.try_resize(len, seed as u8).expect("as long as that");
    buf
}

/// Random numbers, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    /// 0 to `count`, in any order.
    fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// GB/s of the best of five large copies.
fn peak(
    pool: &Pool,
    stream: &pinpool::Stream,
    memory: &pinpool::DeviceBuffer,
    len: usize,
    upload: bool,
) -> f64 {
    let mut buf = checkout(pool, len, 5);
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let since = Instant::now();
        let flight = if upload {
            stream.upload(buf, memory.slice(..len))
        } else {
            stream.download(memory.slice(..len), buf)
        };
        buf = flight.expect("a copy").wait().expect("the device works");
        best = best.min(since.elapsed());
    }
    len as f64 / best.as_nanos() as f64
}

fn main() {
    let driver = driver::find();
    let device = Device::open(if driver.is_some() { "cuda:0" } else { "host" }).expect("a device");
    if wanted("rate") {
        rate::rate(driver, &device);
    }
    if wanted("lone") {
        lone::lone(&device);
    }
    if wanted("scatter") {
        pieces::scatter(driver.filter(|driver| driver.can_batch()), &device);
    }
    if wanted("gather") {
        gather::gather(&device);
    }
    if wanted("packing") {
        gather::packing(&device);
    }
    if wanted("pinned") {
        gather::pinned(&device);
    }
    if wanted("rows") {
        gather::rows(&device);
    }
    // Not a contender: it runs only with its option.
    if let Some(driver) = driver.filter(|driver| flag("sweep") && driver.can_batch()) {
        sweep::sweep(driver);
    }
    measure::used();
}

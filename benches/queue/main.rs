//! Small copies through the copy queue, beside the same copies that the threads submit themselves.
//!
//! # Files
//!
//! This file has the options and helpers of all parts; read it first. Then one file for each part: `rate.rs`,
//! `lone.rs`, `pieces.rs` (scattered pieces) and `sweep.rs` (the driver at best). `../driver` calls the driver,
//! `../measure` has rounds, gates and options.
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
//! directions, submitted one by one by 1 and by 4 threads, over the pinned peak: the best of five copies of 64 MiB in
//! the same direction. All bytes are compared after each measurement. Beside it the best of bare batches by 1, 2 and 3
//! threads with a stream each: on a machine where the driver itself misses the gate, a missed gate is no fault of the
//! queue. (`copier` has the same pieces by one call.)
//!
//! # The driver at best (`--sweep`)
//!
//! Bare batches of 32 to 256 pieces by one thread and by two, with one stream each and with two: the measurements
//! behind the queue's choice of batches.
//!
//! # Running it
//!
//! `cargo bench --bench queue`, or the executable by itself; `--quick`, `--rounds`, `--threads 1,16`, `--burst`,
//! `--submitters` and `--depth` (of the queue), `--pieces 16,64` (KiB) and `--pushers` set these. Without a GPU the
//! pool's contenders run alone, on the host device, which only shows that they run.
#![allow(missing_docs, unsafe_code)]

#[path = "../driver/batches.rs"]
mod batches;
#[path = "../driver/mod.rs"]
mod driver;
mod lone;
#[path = "../measure/mod.rs"]
mod measure;
mod pieces;
mod rate;
#[path = "../measure/small.rs"]
mod small;
mod sweep;

use measure::{flag, number, wanted};
use pinpool::{CopyQueue, Device, QueueOptions};
use small::{Random, checkout, peak, pool};

const PIECE: usize = 4 << 10;

fn queue(device: &Device) -> CopyQueue {
    let mut options = QueueOptions::new();
    if let n @ 1.. = number("submitters", 0) {
        options = options.threads(n);
    }
    if let n @ 1.. = number("depth", 0) {
        options = options.depth(n);
    }
    device.copy_queue_with(options).expect("a queue")
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
    // Not a contender: it runs only with its option.
    if let Some(driver) = driver.filter(|driver| flag("sweep") && driver.can_batch()) {
        sweep::sweep(driver);
    }
    measure::used();
}

//! Thousands of pieces by one call of a copier, beside packing alone.
//!
//! # Files
//!
//! This file has the options of all parts; read it first. `pieces.rs`: pieces that are neighbours on the device.
//! `../driver` calls the driver, `../measure` has rounds, gates and options.
//!
//! Each figure is over the pinned peak, measured just before: the best of five copies of 64 MiB in the same direction.
//! All bytes are compared after each measurement.
//!
//! # Pageable pieces (`--only pageable`)
//!
//! 16,384 pieces of 16 KiB of pageable memory, in no order, to neighbouring places of device memory, and back to where
//! they were: `Copier::upload_slices` and `download_slices`, by one caller with the copier's threads, and by 4 and 8
//! callers with a part of the pieces each. Beside it the figure over packing alone, by as many threads as pack for one
//! caller.
//!
//! # Packing (`--only packing`)
//!
//! Packing alone, without the device: a bound of what threads can reach.
//!
//! # A lone copy (`--only lone`)
//!
//! One thread, one copy of 4 KiB at a time, from before the call until it is complete; once back to back, once with 2 ms of
//! sleep before each. By an idle copier: borrowed bytes (`slice`, and from the device `slice_down`). Beside them a pinned
//! buffer on a stream, which comes back (`stream`), and borrowed bytes by the
//! stream's blocking calls (`blocking`, `down`).
//!
//! # Running it
//!
//! `cargo bench --bench copier`, or the executable by itself. `--threads`, `--chunk` (KiB) and `--ringless` set the
//! copier; `--quick`, `--rounds`, `--callers`, `--count` and `--packing 1,8` (threads) what is measured. With `--ringless`
//! no device ring is used, and pieces go in batches. Without a GPU all of it runs on the host device, which only shows
//! that it runs.
#![allow(missing_docs, unsafe_code)]

#[path = "../driver/mod.rs"]
mod driver;
mod lone;
#[path = "../measure/mod.rs"]
mod measure;
mod pieces;
#[path = "../measure/small.rs"]
mod small;

use measure::{flag, number, wanted};
use pinpool::{Copier, CopierBuilder, Device, DeviceSlice, Pool, Stream};
use small::{peak, pool};

/// Bytes of the copies that give the peak.
const WHOLE: usize = 64 << 20;
/// Bytes of the pool beside what the pieces and the peak take: for the copier's segments.
const SEGMENTS: usize = 256 << 20;

/// A copier as the options say.
fn builder(pool: &Pool, device: &Device) -> CopierBuilder {
    let mut builder = Copier::builder(pool, device);
    if let n @ 1.. = number("threads", 0) {
        builder = builder.threads(n);
    }
    if let kib @ 1.. = number("chunk", 0) {
        builder = builder.chunk(kib << 10);
    }
    if flag("ringless") {
        builder = builder.ring(0);
    }
    builder
}

/// What all turns of a part use.
struct Setup {
    pool: Pool,
    copier: Copier,
    stream: Stream,
    memory: DeviceSlice,
}

impl Setup {
    /// With room for so many bytes of pieces on the device.
    fn new(device: &Device, memory: usize) -> Self {
        let pool = pool(device, WHOLE + SEGMENTS);
        Self {
            copier: builder(&pool, device).share(SEGMENTS / 2).build().expect("a copier"),
            pool,
            stream: device.stream().expect("a stream"),
            memory: device.alloc(memory.max(WHOLE)).expect("device memory"),
        }
    }

    fn peak(&self, upload: bool) -> f64 {
        peak(&self.pool, &self.stream, &self.memory, WHOLE, upload)
    }

    /// Bytes by each way since it was built, for the reader of the figures.
    fn say_ways(&self) {
        let stats = self.copier.stats();
        println!(
            "{} MiB by the ring ({} launches of {} chunks), {} in batches",
            stats.ring_bytes >> 20,
            stats.launches,
            stats.launched_chunks,
            stats.batch_bytes >> 20
        );
    }
}

fn main() {
    let driver = driver::find();
    let device = Device::open(if driver.is_some() { "cuda:0" } else { "host" }).expect("a device");
    if wanted("pageable") {
        pieces::pageable(&device);
    }
    if wanted("packing") {
        pieces::packing(&device);
    }
    if wanted("lone") {
        lone::lone(&device);
    }
    measure::used();
}

//! The driver at best: bare batches of many sizes.
//!
//! The lists of pieces at random places are prepared before; one thread or several call `cuMemcpyBatchAsync` on one
//! stream or on two in turn, with as many copies outstanding as in the queue.

use crate::batches::{TOTAL, best};
use crate::driver::{Driver, Pinned};
use crate::measure::numbers;
use crate::{PIECE, Random};

pub fn sweep(driver: &'static Driver) {
    driver.enter();
    let (source, target) = (Pinned::new(driver, TOTAL), driver.allocate(TOTAL));
    let at = |offset| {
        // SAFETY: within the memory.
        unsafe { source.memory.at(offset) as u64 }
    };
    println!("\nbare batches: GB/s, and ns of the calling thread's a piece");
    for kib in numbers("pieces", &[4, 16]) {
        let len = (kib << 10).max(PIECE);
        let count = TOTAL / len;
        let mut random = Random(7);
        let host: Vec<u64> = random.order(count).into_iter().map(|i| at(i * len)).collect();
        let far: Vec<u64> = random.order(count).into_iter().map(|i| target.0 + (i * len) as u64).collect();
        for upload in [true, false] {
            for threads in numbers("batchers", &[1, 2]) {
                for streams in [1, 2] {
                    for batch in numbers("batches", &[32, 64, 128, 256]) {
                        let way = if upload { "up" } else { "down" };
                        let (to, from) = if upload { (&far, &host) } else { (&host, &far) };
                        let (rate, call) = best(driver, to, from, len, batch, threads, streams);
                        println!(
                            "{kib} KiB {way}, {threads} threads with {streams} streams, batches of {batch}: \
                             {rate:.1} GB/s, {call:.0} ns"
                        );
                        println!(
                            "@ sweep_{way}_{kib}k_{streams}_streams_{batch}_mb_per_s {threads} {:.0}",
                            rate * 1e3
                        );
                    }
                }
            }
        }
    }
}

//! A checkout for which there is no segment of its class yet, so that a run must be cut; beside the cost of mapping
//! memory from the system.

use std::time::{Duration, Instant};

use crate::segment::Class;

use super::Contender;
use super::stores::pool;

pub fn contenders() -> Vec<Contender> {
    let pool = pool(1 << 30);
    let lengths: Vec<usize> =
        Class::all().map(|class| class.stride() - 32).filter(|len| *len <= 256 << 10).collect();
    let cut = move |_: usize, iters: u64| {
        let mut taken = Duration::ZERO;
        for at in 0..iters {
            if at % lengths.len() as u64 == 0 {
                // Every cached segment goes back to its run, and runs without segments in use are dissolved.
                pool.trim(usize::MAX);
            }
            let since = Instant::now();
            let buf = pool.checkout(lengths[(at % lengths.len() as u64) as usize]).expect("there is room");
            taken += since.elapsed();
            drop(buf);
        }
        taken
    };
    let map = |_: usize, iters: u64| {
        let mut taken = Duration::ZERO;
        for _ in 0..iters {
            let since = Instant::now();
            let mut map = memmap2::MmapMut::map_anon(256 << 10).expect("memory");
            map[0] = 1;
            taken += since.elapsed();
        }
        taken
    };
    vec![Contender::new("mmap_and_touch", map), Contender::new("pinpool_cut", cut)]
}

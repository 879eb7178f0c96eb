//! Pools, buffers, an order by chance, and the peak that copies of small pieces are compared with.

use std::time::{Duration, Instant};

use pinpool::{Device, DeviceSlice, PinnedBuf, Pool, PoolBuilder, Stream, Unpinned};

/// A pool that has all of its memory from the beginning.
pub fn pool(device: &Device, capacity: usize) -> Pool {
    pinned(device, Pool::builder(device).capacity(capacity).initial(capacity))
}

/// Builds a pool, and waits until its memory is pinned.
pub fn pinned(device: &Device, builder: PoolBuilder) -> Pool {
    // On the host device the figures do not depend on locked pages.
    let builder = if device.name().starts_with("host") { builder.unpinned(Unpinned::Allow) } else { builder };
    let pool = builder.build().expect("memory for a pool");
    let pinning = pool.wait_pinned(None).expect("pinning ends");
    assert!(pinning.error.is_none(), "{pinning:?}");
    pool
}

pub fn checkout(pool: &Pool, len: usize, seed: usize) -> PinnedBuf {
    let mut buf = pool.checkout(len).expect("room in the pool");
    buf.try_resize(len, seed as u8).expect("as long as that");
    buf
}

/// Random numbers, the same in each run.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 16) % bound as u64) as usize
    }

    /// 0 to `count`, in any order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// GB/s of the best of five large copies.
pub fn peak(pool: &Pool, stream: &Stream, memory: &DeviceSlice, len: usize, upload: bool) -> f64 {
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

//! The contenders: the pool, the gate's measure, and other ways to get a buffer.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::utils::CachePadded;
use parking_lot::Mutex;
use pinpool::{Device, PinnedBuf, Pool};

use super::measure::small;

/// The plain figure's one size.
pub const PLAIN: &[usize] = &[64 << 10];
/// Metadata, token ids, and blocks of caches.
pub const MIXED: &[usize] = &[200, 1 << 10, 3000, 4 << 10, 16 << 10, 20_000, 32 << 10, 64 << 10];
/// Buffers that each thread keeps in the groups with live buffers.
pub const LIVE: usize = 64;

/// A source of buffers.
pub trait Store: Sync {
    /// A thread's own state.
    type Local;
    type Buf;
    fn local(&self) -> Self::Local;
    /// A buffer of the size at this index, one byte of it written.
    fn take(&self, local: &mut Self::Local, size: usize) -> Self::Buf;
    fn give(&self, local: &mut Self::Local, buf: Self::Buf);
}

/// Writes one byte by a store that the compiler cannot remove.
///
/// # Safety
/// The start of a buffer of at least one byte that the caller owns.
#[inline(always)]
pub unsafe fn touch(start: *mut u8) {
    // SAFETY: the caller's word.
    unsafe { start.write_volatile(1) };
}

pub struct Pinpool {
    pool: Pool,
    /// As many as the most sizes, so that looking one up needs no check.
    lens: [usize; 8],
}

impl Pinpool {
    pub fn new(pool: Pool, sizes: &[usize]) -> Self {
        Self { pool, lens: std::array::from_fn(|i| sizes[i % sizes.len()]) }
    }
}

impl Store for Pinpool {
    type Local = ();
    type Buf = PinnedBuf;
    fn local(&self) {}
    #[inline(always)]
    fn take(&self, (): &mut (), size: usize) -> PinnedBuf {
        checkout(&self.pool, self.lens[size % 8])
    }
    #[inline(always)]
    fn give(&self, (): &mut (), buf: PinnedBuf) {
        drop(buf);
    }
}

/// The gate's measure: the least that bookkeeping by atomic increments costs, in a word that no other thread uses.
pub struct TwoFetchAdds;

impl Store for TwoFetchAdds {
    type Local = Box<CachePadded<AtomicU64>>;
    type Buf = ();
    fn local(&self) -> Self::Local {
        black_box(Box::default())
    }
    #[inline(always)]
    fn take(&self, local: &mut Self::Local, _: usize) {
        local.fetch_add(1, Ordering::Relaxed);
    }
    #[inline(always)]
    fn give(&self, local: &mut Self::Local, (): ()) {
        local.fetch_add(1, Ordering::Relaxed);
    }
}

/// A block of an allocator.
pub struct Block(NonNull<u8>, Layout);

// SAFETY: a block is owned memory.
unsafe impl Send for Block {}

/// glibc's allocator.
pub struct Malloc {
    pub sizes: &'static [usize],
}

impl Malloc {
    fn block(&self, size: usize) -> Block {
        let layout = Layout::from_size_align(self.sizes[size], 16).expect("sizes are sane");
        // SAFETY: no size is 0.
        Block(NonNull::new(unsafe { System.alloc(layout) }).expect("memory"), layout)
    }
}

impl Store for Malloc {
    type Local = ();
    type Buf = Block;
    fn local(&self) {}
    #[inline(always)]
    fn take(&self, (): &mut (), size: usize) -> Block {
        let block = self.block(size);
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(block.0.as_ptr()) };
        block
    }
    #[inline(always)]
    fn give(&self, (): &mut (), Block(start, layout): Block) {
        // SAFETY: allocated in `take` with this layout.
        unsafe { System.dealloc(start.as_ptr(), layout) }
    }
}

/// Blocks of each size for a pool made by hand. They are never freed: the bench ends with its process.
pub fn stock(sizes: &'static [usize], count: usize) -> Vec<Vec<(usize, Block)>> {
    let system = Malloc { sizes };
    (0..sizes.len()).map(|size| (0..count).map(|_| (size, system.block(size))).collect()).collect()
}

pub struct Stacks(Vec<Mutex<Vec<(usize, Block)>>>);

impl Stacks {
    pub fn new(sizes: &'static [usize], count: usize) -> Self {
        Self(stock(sizes, count).into_iter().map(Mutex::new).collect())
    }
}

impl Store for Stacks {
    type Local = ();
    type Buf = (usize, Block);
    fn local(&self) {}
    #[inline(always)]
    fn take(&self, (): &mut (), size: usize) -> Self::Buf {
        let buf = self.0[size].lock().pop().expect("the stack holds more than all threads take");
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(buf.1.0.as_ptr()) };
        buf
    }
    #[inline(always)]
    fn give(&self, (): &mut (), buf: Self::Buf) {
        self.0[buf.0].lock().push(buf);
    }
}

/// A stack for each size that no other thread can reach: the only bookkeeping is a length, and nothing is looked up.
pub struct Bare {
    pub sizes: &'static [usize],
    pub each: usize,
}

impl Store for Bare {
    type Local = Vec<Vec<(usize, Block)>>;
    type Buf = (usize, Block);
    fn local(&self) -> Self::Local {
        stock(self.sizes, self.each)
    }
    #[inline(always)]
    fn take(&self, local: &mut Self::Local, size: usize) -> Self::Buf {
        let buf = local[size].pop().expect("the stack holds more than a thread takes");
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(buf.1.0.as_ptr()) };
        buf
    }
    #[inline(always)]
    fn give(&self, local: &mut Self::Local, buf: Self::Buf) {
        local[buf.0].push(buf);
    }
}

pub fn pool(capacity: usize) -> Pool {
    // Under a low memlock limit the cost is the same: no operation here depends on whether pages are locked.
    small::pool(&Device::open("host").expect("the host device is always there"), capacity)
}

/// A buffer of the pool's, one byte of it written.
#[inline(always)]
pub fn checkout(pool: &Pool, len: usize) -> PinnedBuf {
    let mut buf = pool.checkout(len).expect("the pool is large enough");
    // SAFETY: just checked out, and no length is 0.
    unsafe { touch(buf.as_mut_ptr()) };
    buf
}

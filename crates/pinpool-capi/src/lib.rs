//! The C interface of pinpool: a pool that programs in C, C++ and Python use as an allocator.
//!
//! The header is `pinpool.h` beside the manifest; `cbindgen` makes it of the sources, a test
//! compares the two, and it documents every function. `cargo cinstall -p pinpool-capi` (of cargo-c)
//! installs both, with a file for pkg-config; `cargo build` makes the library alone. A shared
//! library of a program's own with more functions says `pub use pinpool_capi::*;`.
//!
//! ```c
//! pinpool_options options = {.size = sizeof options, .device = "cuda:0", .capacity = 1ull << 30};
//! pinpool_pool *pool;
//! if (pinpool_open(&options, &pool)) { fprintf(stderr, "%s\n", pinpool_last_error()); return 1; }
//! void *block;
//! pinpool_alloc(pool, 1 << 20, 0, 0, &block);                          // pinned, 64-byte aligned
//! cuMemcpyHtoDAsync(memory, block, 1 << 20, stream);
//! pinpool_hold(pool, block, stream);                                   // not reused before the copy is complete
//! pinpool_free(pool, block);
//! pinpool_close(pool, 1000);
//! ```
//!
//! There is no handle of a block: it is known by the addresses inside it, so that an allocator of a
//! framework, which is asked about addresses alone, needs no table. Every function that can fail
//! returns a number, and [`pinpool_last_error`] has the text. A panic becomes [`PINPOOL_INTERNAL`].
//! All functions may be called on all threads at once, but for [`pinpool_close`].

// How it works: `blocks` finds blocks by their addresses. A hold gives a reference to the block's
// buffer to the stream's timeline, or to the graph that the stream is being captured into. `status`
// makes the calls: numbers, texts, panics.

#![allow(unsafe_code)]
#![allow(non_camel_case_types, reason = "the names are those of C")]

mod blocks;
mod status;

use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

pub use status::*;

use self::blocks::{Block, Blocks};
use self::status::{Fault, status};
use pinpool::{Backing, Device, Error, HostAllocFlags, Pool, Request, Stream, SubmitError, Unpinned};

/// The interface's version. It changes when a program with an older header could go wrong.
pub const PINPOOL_ABI_VERSION: u32 = 1;

/// A pool of pinned memory.
pub struct pinpool_pool {
    pool: Pool,
    devices: Vec<Device>,
    blocks: Blocks,
}

/// How a pool is opened. Fields that are 0 have their defaults.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pinpool_options {
    /// `sizeof(pinpool_options)`: later versions have more fields.
    pub size: usize,
    /// The devices that use the pool, with commas: `"cuda:0"`, `"cuda:0,cuda:1"`, `"acl:0"`,
    /// `"host"`, or `"auto"`, like null. The memory is near the first.
    pub device: *const c_char,
    /// The cap on the pool's bytes. 0: 256 MiB.
    pub capacity: u64,
    /// The bytes to start with: `pinpool_open` returns when the first are pinned. 0: an eighth of
    /// the capacity, between 256 MiB and 1 GiB. The pool grows as it is used.
    pub initial: u64,
    /// Not 0: serve memory that is not pinned where the system refuses. 0: that is an error.
    pub allow_unpinned: u32,
    /// The pool's name in logs and metrics. Null: a number.
    pub name: *const c_char,
    /// The longest block to be served. The pool grows by pieces of that size, rounded up. 0: a
    /// little less than 256 MiB, and than the capacity.
    pub largest: u64,
    /// The bytes that a thread may keep for its next allocations, which take no lock then. 0: a
    /// 32nd of the capacity, between 256 KiB and 64 MiB.
    pub thread_cache: u64,
    /// `PINPOOL_BACKING_REGISTERED`, `PINPOOL_BACKING_HOST_ALLOC`, or 0: what the device does best.
    pub backing: u64,
}

/// Memory of the system, registered with the device (`cuMemHostRegister`): pins fastest.
pub const PINPOOL_BACKING_REGISTERED: u64 = 1;
/// Memory that the device's driver allocates (CUDA: `cuMemHostAlloc`; Ascend: `aclrtMallocHost`).
pub const PINPOOL_BACKING_HOST_ALLOC: u64 = 2;

/// A pool's numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pinpool_stats {
    /// Set by the caller: `sizeof(pinpool_stats)`.
    pub size: usize,
    /// Bytes that are page-locked.
    pub pinned_bytes: u64,
    /// Blocks that are allocated and not freed.
    pub blocks: u64,
    /// Bytes of these blocks and of those that are held for a stream or a graph, rounding included.
    pub block_bytes: u64,
    /// The lengths that were asked for, of the blocks that are allocated and not freed.
    pub requested_bytes: u64,
    /// Blocks allocated since the pool was opened.
    pub allocations: u64,
    /// Blocks freed since then.
    pub frees: u64,
    /// Holds taken since then.
    pub holds: u64,
}

/// `PINPOOL_ABI_VERSION` of the library. A program compares it with its header's.
#[unsafe(no_mangle)]
pub extern "C" fn pinpool_abi_version() -> u32 {
    PINPOOL_ABI_VERSION
}

/// The version of the library, as text.
#[unsafe(no_mangle)]
pub extern "C" fn pinpool_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Opens the devices and builds a pool.
///
/// `PINPOOL_UNAVAILABLE` without the device or its driver; `PINPOOL_INVALID` for options that make
/// no sense; `PINPOOL_EXHAUSTED` where the memory cannot be pinned. Then `*pool` is null.
///
/// # Safety
/// `options` is null (defaults), or its texts end with a zero byte. `pool` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_open(
    options: *const pinpool_options,
    pool: *mut *mut pinpool_pool,
) -> pinpool_status {
    status(|| {
        // SAFETY: the caller's promise.
        let pool = unsafe { given(pool, "pinpool_open: the place for the pool is null") }?;
        pool.write(std::ptr::null_mut());
        // SAFETY: all fields are numbers and pointers, which may be zero.
        let mut set: pinpool_options = unsafe { std::mem::zeroed() };
        if !options.is_null() {
            // SAFETY: the caller promises so many bytes, of which both sides know these.
            unsafe {
                let size = size_of_known(options, "options: set .size to sizeof(pinpool_options)")?;
                (&raw mut set).cast::<u8>().copy_from_nonoverlapping(options.cast(), size);
            }
        }
        let options = set;
        // SAFETY: the texts are the caller's, which live during the call.
        let (names, name) =
            unsafe { (text(options.device, "device")?.unwrap_or("auto"), text(options.name, "name")?) };
        let devices =
            names.split(',').map(|name| Device::open(name.trim())).collect::<Result<Vec<_>, _>>()?;
        let mut builder = devices[1..].iter().fold(Pool::builder(&devices[0]), |b, device| b.device(device));
        if options.capacity > 0 {
            builder = builder.capacity(bytes(options.capacity)?);
        }
        if options.initial > 0 {
            builder = builder.initial(bytes(options.initial)?);
        }
        if options.thread_cache > 0 {
            builder = builder.thread_cache(bytes(options.thread_cache)?);
        }
        if options.largest > 0 {
            let segment = Request::new(bytes(options.largest)?).segment_bytes()?;
            builder = builder.extent(segment).region(segment);
        }
        if options.allow_unpinned != 0 {
            builder = builder.unpinned(Unpinned::Allow);
        }
        builder = match options.backing {
            0 => builder,
            PINPOOL_BACKING_REGISTERED => builder.backing(Backing::Registered),
            PINPOOL_BACKING_HOST_ALLOC => builder.backing(Backing::HostAlloc(HostAllocFlags::default())),
            _ => return Err(Fault::argument("options: .backing is 0 or a PINPOOL_BACKING_ number")),
        };
        if let Some(name) = name {
            builder = builder.name(name);
        }
        let opened = Box::new(pinpool_pool { pool: builder.build()?, devices, blocks: Blocks::default() });
        pool.write(Box::into_raw(opened));
        Ok(())
    })
}

/// Closes a pool when every block is freed and no hold is under way, for which it waits
/// `timeout_ms` at most. The pool allocates nothing from the first call on. After `PINPOOL_TIMEOUT`
/// it still exists: free blocks, and call again. After `PINPOOL_OK` it does not. Null is closed.
///
/// A program that ends need not close its pools.
///
/// # Safety
/// `pool` is null or a pool that is not closed, and no other call that names it is under way or
/// follows one that has returned `PINPOOL_OK`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_close(pool: *mut pinpool_pool, timeout_ms: u64) -> pinpool_status {
    status(|| {
        if pool.is_null() {
            return Ok(());
        }
        // SAFETY: the caller promises a pool.
        let shutdown = unsafe { known(pool) }?.pool.shutdown(Duration::from_millis(timeout_ms));
        if !shutdown.drained {
            return Err(Fault::open(shutdown.outstanding));
        }
        // SAFETY: made by `pinpool_open`, and no other call uses it.
        drop(unsafe { Box::from_raw(pool) });
        Ok(())
    })
}

/// Allocates a block of at least `bytes` bytes, which starts at a multiple of `align` (a power of
/// two of at most 2 MiB; 0: 64). Its content is undefined. Where the pool has none, the call waits
/// for at most `timeout_ms` milliseconds until it has grown or a block has come back: 0 does not
/// wait for either, `UINT64_MAX` waits without a limit. 0 bytes are one.
///
/// `PINPOOL_EXHAUSTED`, or `PINPOOL_TIMEOUT` after a wait; `PINPOOL_INVALID` for a length or an
/// alignment that no block of this pool can have. Then `*block` is null.
///
/// # Safety
/// `pool` is a pool. `block` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_alloc(
    pool: *mut pinpool_pool,
    bytes: usize,
    align: usize,
    timeout_ms: u64,
    block: *mut *mut c_void,
) -> pinpool_status {
    status(|| {
        // SAFETY: the caller's promise.
        let block = unsafe { given(block, "pinpool_alloc: the place for the block is null") }?;
        block.write(std::ptr::null_mut());
        // SAFETY: the caller promises a pool.
        let opened = unsafe { known(pool) }?;
        let request = Request::new(bytes.max(1)).align(if align > 0 { align } else { 64 });
        let mut buf = match timeout_ms {
            0 => opened.pool.try_checkout(request),
            u64::MAX => opened.pool.checkout(request),
            limit => opened.pool.checkout_timeout(request, Duration::from_millis(limit)),
        }?;
        let start = buf.as_mut_ptr();
        opened.blocks.enter(start.addr(), Block { buf: Arc::new(buf), len: bytes });
        block.write(start.cast());
        Ok(())
    })
}

/// Frees a block. Its memory is allocated again when every hold on it is over; the call does not
/// wait for that. Null is freed.
///
/// `PINPOOL_UNKNOWN` if no block starts there.
///
/// # Safety
/// `pool` is a pool. Nothing uses the block any more, but for the work that a hold on it covers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_free(pool: *mut pinpool_pool, block: *mut c_void) -> pinpool_status {
    status(|| {
        if block.is_null() {
            return Ok(());
        }
        // SAFETY: the caller promises a pool.
        let opened = unsafe { known(pool) }?;
        opened.blocks.remove(block.addr()).map(drop)
    })
}

/// Keeps the block that `address` lies in, freed or not, until everything queued on a stream by now
/// is complete; if the stream is being captured, for as long as the graph and what is made from it
/// exist. The stream is a raw `CUstream` (or `aclrtStream`) of the pool's first device. A block may
/// be held many times.
///
/// Many holds share an event, which is recorded up to a millisecond later. So a hold may also wait
/// for work that is queued meanwhile.
///
/// `PINPOOL_UNKNOWN` if the address lies in no block. After an error nothing more is kept than
/// before: free the block when the stream is known to be done with it.
///
/// # Safety
/// `pool` is a pool. `stream` is a stream, and exists until `pinpool_forget_stream` has returned
/// `PINPOOL_OK` and its work is complete. It neither enters nor leaves a capture during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_hold(
    pool: *mut pinpool_pool,
    address: *const c_void,
    stream: *mut c_void,
) -> pinpool_status {
    // SAFETY: the caller's promises; without a name it is the first device.
    unsafe { pinpool_hold_on(pool, address, std::ptr::null(), stream) }
}

/// Like `pinpool_hold`, for a stream of the pool's device with that name (`"cuda:1"`).
///
/// # Safety
/// As for `pinpool_hold`. `device` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_hold_on(
    pool: *mut pinpool_pool,
    address: *const c_void,
    device: *const c_char,
    stream: *mut c_void,
) -> pinpool_status {
    status(|| {
        // SAFETY: the caller's promises.
        let (opened, device) = unsafe { (known(pool)?, text(device, "device")?) };
        let buf = opened.blocks.with(address.addr(), |_, block| block.buf.clone())?;
        let is_it = |opened: &Device| device.is_none_or(|name| opened.name() == name);
        let none = || Fault::argument("the device is none of those of the pool");
        let index = opened.devices.iter().position(is_it).ok_or_else(none)?;
        // SAFETY: the caller's promise.
        let adopt = || unsafe { adopt(&opened.devices[index], stream) };
        // A known handle may be another stream by now: holds on the former are over, as the caller
        // promises, and this one's event is recorded on what has the handle.
        let stream = opened.blocks.stream(index, stream.addr(), adopt)?;
        match stream.hold_patiently(buf) {
            // With a look at the stream now and then, whatever it says of this hold.
            Ok(held) => _ = opened.blocks.held().then(|| held.is_done()),
            Err(SubmitError { error: Error::Capturing { .. }, buffer: Some(buf), .. }) => {
                stream.hold_captured(buf).map_err(|refused| refused.error)?;
                opened.blocks.held();
            }
            Err(refused) => return Err(refused.error.into()),
        }
        Ok(())
    })
}

/// To be called before a stream is destroyed that blocks were held for: then the holds on it have
/// their events, and the pool names the stream no more. The call waits for nothing.
///
/// An error if an event cannot be recorded: call again. `PINPOOL_CAPTURING` during a capture.
///
/// # Safety
/// As for `pinpool_hold`. No other thread holds blocks for the stream meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_forget_stream(
    pool: *mut pinpool_pool,
    stream: *mut c_void,
) -> pinpool_status {
    status(|| {
        // SAFETY: the caller promises a pool.
        Ok(unsafe { known(pool) }?.blocks.forget(stream.addr())?)
    })
}

/// The start and the length of the block that `address` lies in. Null where one is not asked for.
///
/// `PINPOOL_UNKNOWN` if it lies in none.
///
/// # Safety
/// `pool` is a pool. `start` and `bytes` are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_find(
    pool: *mut pinpool_pool,
    address: *const c_void,
    start: *mut *mut c_void,
    bytes: *mut usize,
) -> pinpool_status {
    status(|| {
        // SAFETY: the caller promises a pool.
        let blocks = &unsafe { known(pool) }?.blocks;
        let (at, len) = blocks.with(address.addr(), |start, block| (start, block.len))?;
        // SAFETY: null or the caller's.
        let (start, bytes) = unsafe { (given(start, ""), given(bytes, "")) };
        // The block's start has the provenance of the address inside it.
        start.into_iter().for_each(|start| _ = start.write(address.cast_mut().with_addr(at)));
        bytes.into_iter().for_each(|bytes| _ = bytes.write(len));
        Ok(())
    })
}

/// Whether no hold on the block is under way: 1, so that the CPU may write to it again, or 0.
///
/// `PINPOOL_UNKNOWN` if the address lies in no block.
///
/// # Safety
/// `pool` is a pool. `idle` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_is_idle(
    pool: *mut pinpool_pool,
    address: *const c_void,
    idle: *mut u32,
) -> pinpool_status {
    status(|| {
        // SAFETY: the caller's promise.
        let idle = unsafe { given(idle, "pinpool_is_idle: the place for the answer is null") }?;
        // SAFETY: the caller promises a pool.
        let opened = unsafe { known(pool) }?;
        // The devices' threads end holds from time to time: this looks now.
        opened.devices.iter().for_each(|device| _ = device.reap());
        let alone = opened.blocks.with(address.addr(), |_, block| Arc::get_mut(&mut block.buf).is_some());
        idle.write(alone?.into());
        Ok(())
    })
}

/// Unpins whole regions that no block uses. `bytes`, unless null, is how much.
///
/// # Safety
/// `pool` is a pool. `bytes` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_trim(pool: *mut pinpool_pool, bytes: *mut u64) -> pinpool_status {
    status(|| {
        // SAFETY: the caller promises a pool.
        let trimmed = unsafe { known(pool) }?.pool.trim(0);
        // SAFETY: null or the caller's.
        unsafe { given(bytes, "") }.into_iter().for_each(|bytes| _ = bytes.write(trimmed as u64));
        Ok(())
    })
}

/// Reads a pool's numbers.
///
/// # Safety
/// `pool` is a pool. `stats` can be written, and its size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_get_stats(
    pool: *mut pinpool_pool,
    stats: *mut pinpool_stats,
) -> pinpool_status {
    status(|| {
        // SAFETY: the caller's promise.
        let stats =
            unsafe { given(stats, "pinpool_get_stats: the place for the numbers is null") }?.as_mut_ptr();
        // SAFETY: the caller promises a size, and so many bytes.
        let size = unsafe { size_of_known(stats, "stats: set .size to sizeof(pinpool_stats)") }?;
        // SAFETY: the caller promises a pool.
        let opened = unsafe { known(pool) }?;
        let (of_pool, counts) = (opened.pool.stats(), opened.blocks.counts());
        let numbers = pinpool_stats {
            size,
            pinned_bytes: of_pool.pinned_bytes as u64,
            // Each block is freed in the part that it was entered in.
            blocks: counts.allocations - counts.frees,
            block_bytes: of_pool.granted_bytes as u64,
            requested_bytes: counts.requested,
            allocations: counts.allocations,
            frees: counts.frees,
            holds: counts.holds,
        };
        // SAFETY: the caller promises so many bytes, of which both sides know these.
        unsafe { stats.cast::<u8>().copy_from_nonoverlapping((&raw const numbers).cast(), size) };
        Ok(())
    })
}

/// A place that the call writes to; null is refused.
///
/// # Safety
/// `place` is null or can be written during the call.
unsafe fn given<'a, T>(place: *mut T, refusal: &str) -> Result<&'a mut MaybeUninit<T>, Fault> {
    // SAFETY: the caller's promise.
    unsafe { place.cast::<MaybeUninit<T>>().as_mut() }.ok_or_else(|| Fault::argument(refusal))
}

/// # Safety
/// `pool` is null or a pool, which is not closed during the call.
unsafe fn known<'a>(pool: *mut pinpool_pool) -> Result<&'a pinpool_pool, Fault> {
    // In the child of a fork another thread may have had a lock of the pool's, and is not there.
    if pinpool::forked() {
        return Err(Error::Forked.into());
    }
    // SAFETY: the caller's promise.
    unsafe { pool.as_ref() }.ok_or_else(|| Fault::argument("the pool is null; pinpool_open makes one"))
}

/// # Safety
/// `text` is null, or ends with a zero byte and lives as long as the result.
unsafe fn text<'a>(text: *const c_char, what: &'static str) -> Result<Option<&'a str>, Fault> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let read = unsafe { CStr::from_ptr(text) }.to_str();
    read.map(Some).map_err(|_| Error::Argument(format!("the option `{what}` is not UTF-8")).into())
}

/// The size of a structure whose first field is its size: that of the caller's header, which may be
/// older than the library and not newer.
///
/// # Safety
/// The first field can be read.
unsafe fn size_of_known<T>(of: *const T, remedy: &str) -> Result<usize, Fault> {
    // SAFETY: the caller's promise.
    let size = unsafe { of.cast::<usize>().read() };
    // All fields are words, or begin where a word does.
    let is_known = size > size_of::<usize>() && size <= size_of::<T>() && size % size_of::<usize>() == 0;
    if is_known { Ok(size) } else { Err(Fault::argument(remedy)) }
}

fn bytes(amount: u64) -> Result<usize, Fault> {
    usize::try_from(amount).map_err(|_| Fault::argument("more bytes than this system can address"))
}

/// A stream of the program's, of whichever vendor the device is.
///
/// # Safety
/// As for [`pinpool_hold`].
unsafe fn adopt(device: &Device, stream: *mut c_void) -> Result<Stream, Error> {
    match device.name().split(':').next() {
        // SAFETY: the caller's promise.
        #[cfg(feature = "cuda")]
        Some("cuda") => unsafe { pinpool::cuda::adopt_stream(device, stream, ()) },
        // SAFETY: the caller's promise.
        #[cfg(feature = "acl")]
        Some("acl") => unsafe { pinpool::acl::adopt_stream(device, stream, ()) },
        _ => {
            let (name, _) = (device.name(), stream);
            Err(Error::Unsupported(format!("{name} has no streams that a program in C could name")))
        }
    }
}

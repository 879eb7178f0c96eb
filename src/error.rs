//! All errors of the crate, in one type.
//!
//! A caller needs to know first what it may still do. [`Error::class`] says that, and is the one place in the crate
//! where errors are classified. Every message names the cause and the remedy.
//!
//! Text from a file, a driver or the system is kept in the fields as it was. In the message it is escaped and cut to a
//! bounded length ([`crate::escape`]): each field of text goes through `shown`. A test makes every variant with hostile
//! text and checks that.
//!
//! This module knows no others but `escape` and `amount`; every module may use it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::amount::{Beside, amount, beside};
use crate::escape::text as shown;

/// A result whose error is this crate's [`Error`], unless another is named.
///
/// ```
/// fn staging_pool(device: &pinpool::Device) -> pinpool::Result<pinpool::Pool> {
///     pinpool::Pool::builder(device).unpinned(pinpool::Unpinned::Allow).build()
/// }
/// # assert!(staging_pool(&pinpool::Device::open("host")?).is_ok());
/// # Ok::<(), pinpool::Error>(())
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What an error means for what the caller may do next: [`Error::class`].
///
/// ```
/// use pinpool::{Error, ErrorClass};
///
/// fn advice(error: &Error) -> &'static str {
///     match error.class() {
///         ErrorClass::Transient => "try again later",
///         ErrorClass::DeviceLost | ErrorClass::DriverShutdown => "restart the process",
///         ErrorClass::Closed | ErrorClass::Cancelled => "nothing: the program ended it",
///         _ => "change the call",
///     }
/// }
/// assert_eq!(advice(&Error::ZeroLength), "change the call");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// This call cannot succeed as it was made. Nothing was lost and nothing else is affected. The same call fails
    /// again. In a server the mistake is mostly its own and not its client's: look at the variant before the client is
    /// told so ([`Error::TooLong`], for a length that the client chose).
    Argument,
    /// The stream is being captured into a graph, and the call cannot be part of it. Only this call is affected. It may
    /// succeed outside the capture.
    Capture,
    /// A condition that may pass: out of memory, not ready, timed out. The same call may succeed later.
    Transient,
    /// The program has shut the pool down ([`Pool::shutdown`](crate::Pool::shutdown)). No call of that pool's succeeds
    /// any more, and nothing is wrong with this one.
    Closed,
    /// The program has cancelled this transfer. Nothing is wrong, and the same transfer may be started again.
    Cancelled,
    /// The device (or the stream, after [`Error::Internal`]) cannot be used until the process ends. Everything in
    /// flight there is quarantined, and later calls fail at once.
    DeviceLost,
    /// The driver is shutting down, since the process ends. Memory is leaked and not touched.
    DriverShutdown,
}

/// A driver call that failed. Part of [`Error::Device`].
///
/// ```
/// use pinpool::Error;
///
/// fn code(error: &Error) -> Option<(&str, i64)> {
///     match error {
///         Error::Device(failed) => Some((failed.call, failed.code)),
///         Error::Transfer { cause, .. } => code(cause),
///         _ => None,
///     }
/// }
/// # assert!(code(&Error::Closed).is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// The device, as [`Device::open`](crate::Device::open) names it.
    pub device: Arc<str>,
    /// The driver call that failed.
    pub call: &'static str,
    /// The driver's number for the error (an `errno` for the host device).
    pub code: i64,
    /// The driver's or the system's text for the error.
    pub text: Arc<str>,
    /// What the error means.
    pub class: ErrorClass,
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, call, code, text, class } = self;
        write!(f, "{}: {call} failed with {code} ({})", shown(device), shown(text))?;
        match class {
            ErrorClass::Argument | ErrorClass::Closed | ErrorClass::Cancelled => Ok(()),
            ErrorClass::Capture => write!(f, "; the stream is being captured, submit outside the capture"),
            ErrorClass::Transient => write!(f, "; the call may succeed later"),
            ErrorClass::DeviceLost => {
                write!(f, "; the device is lost until the process ends, open another one")
            }
            ErrorClass::DriverShutdown => write!(f, "; the driver is shutting down"),
        }
    }
}

/// Why an address names no memory that a device's copies can use. Part of [`Error::BadAddress`].
///
/// ```
/// use pinpool::{AddressFault, Error};
///
/// fn over(error: &Error) -> Option<usize> {
///     match error {
///         Error::BadAddress { fault: AddressFault::PastEnd { over, .. }, .. } => Some(*over),
///         _ => None,
///     }
/// }
/// # assert!(over(&Error::Closed).is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressFault {
    /// The address is zero. Remedy: allocate first.
    #[error("it is null")]
    Null,
    /// It is memory of the host. Remedy: name it as the host's side of a copy, in a buffer of a pool or to a blocking
    /// copy.
    #[error(
        "that is {}; it is the host's side of a copy: use a buffer of a pool, or the blocking copies, which take \
         borrowed memory", if *.registered { "page-locked host memory" } else { "ordinary host memory" }
    )]
    Host {
        /// Whether the driver knows it as page-locked memory.
        registered: bool,
    },
    /// It is memory of another device of the family. Copies between devices are not made, with or without peer access.
    /// Remedy: a stream of that device, or a copy through the host.
    #[error("that is memory of {}; copy on a stream of that device, or through the host", shown(device))]
    OtherDevice {
        /// The device whose memory it is.
        device: String,
    },
    /// It is memory of the same GPU that was allocated in another context than the device's. Remedy: allocate it in the
    /// device's own context, which is the primary one.
    #[error(
        "another context of the GPU allocated it, and only with peer access between the two could it be used here; \
         allocate it in the device's own context, which is the primary one, like the runtime API's and the frameworks'"
    )]
    OtherContext,
    /// The range ends behind the allocation in which it starts. Remedy: a shorter range.
    #[error(
        "the allocation there starts at {start:#x} and has {size} bytes, and the range leaves it by {over}"
    )]
    PastEnd {
        /// Address of the allocation's first byte.
        start: u64,
        /// Length of the allocation in bytes.
        size: usize,
        /// How many bytes of the range lie past its end.
        over: usize,
    },
    /// The driver knows of no memory there: it was freed, or a kernel allocated it by `malloc` or `new` (the
    /// device-side heap), which no copy call accepts. Remedy: have a kernel copy it to memory of `cudaMalloc`,
    /// `cuMemAlloc` or [`Device::alloc`](crate::Device::alloc), and name that.
    #[error(
        "the driver knows no memory there; either a kernel's own malloc or new gave it (the device-side heap, which \
         no copy call accepts: have a kernel copy it to memory of cudaMalloc, cuMemAlloc or `Device::alloc`, and name \
         that), or it was freed"
    )]
    Unknown,
}

/// Every error of the crate. The documentation of each variant names the cause and the remedy, and so does its message.
/// [`class`](Self::class) says what an error means for the caller.
///
/// ```
/// use pinpool::{Device, Error, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let all = pool.checkout(900 << 10)?;
/// match pool.try_checkout(900 << 10) {
///     Err(error @ Error::Exhausted { .. }) => assert!(error.is_retryable(), "when `all` has come back"),
///     other => panic!("{other:?}"),
/// }
/// # drop(all);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, or device memory, of length zero was asked for. Remedy: ask for at least one byte.
    #[error("0 bytes were asked for; ask for at least 1")]
    ZeroLength,
    /// The length is more than any segment of this pool can have. A segment takes 32 bytes more of the pool than it
    /// gives. Remedy: a larger [capacity](crate::PoolBuilder::capacity), larger
    /// [extents](crate::PoolBuilder::extent), or several buffers.
    #[error(
        "{} are more than one segment can hold ({}; it needs 32 bytes more than it holds); raise the capacity, \
         configure larger extents, or split the request", beside(*len, *largest), beside(*largest, *len)
    )]
    TooLong {
        /// Bytes asked for.
        len: usize,
        /// The largest length that the pool's capacity and extents can ever serve.
        largest: usize,
    },
    /// The alignment is not a power of two, or larger than is served. Remedy: a power of two of at most `largest`.
    #[error("{align} is no alignment: it must be a power of two of at most {largest}")]
    BadAlignment {
        /// Alignment asked for, in bytes.
        align: usize,
        /// The largest alignment served, in bytes.
        largest: usize,
    },
    /// A setting, or a combination of arguments, makes no sense. The text names it, and says which values do.
    #[error("{}", shown(.0))]
    Config(String),
    /// No device has this name. Remedy: one of the names in `known`.
    #[error("unknown device \"{}\"; {}", shown(name), shown(known))]
    UnknownDevice {
        /// The name that was asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The device has a valid name, but cannot be used here: a driver or a device is missing, or a thread could not be
    /// started. `why` has the cause and the remedy; `pinpool doctor --device NAME` tells more.
    #[error("device {} is not available: {}", shown(device), shown(why))]
    Unavailable {
        /// The device.
        device: String,
        /// The cause and the remedy.
        why: String,
    },
    /// This platform, this device or this thread cannot do it; the text says why, and what to do instead.
    #[error("unsupported: {}", shown(.0))]
    Unsupported(String),
    /// The memlock limit of the process does not allow the pages to be locked. Remedy: a higher limit (`ulimit -l`,
    /// `LimitMEMLOCK=infinity`, `--ulimit memlock=-1`, `CAP_IPC_LOCK`), or
    /// [`Unpinned::Allow`](crate::Unpinned::Allow).
    #[error(
        "locking {} was refused: the memlock limit is {}; raise it (ulimit -l, LimitMEMLOCK=infinity, --ulimit \
         memlock=-1, CAP_IPC_LOCK) or allow unpinned memory in the configuration",
        amount(*wanted), shown(limit)
    )]
    MemLock {
        /// Bytes that were to be locked.
        wanted: usize,
        /// The limit, as text (an amount, or "unlimited").
        limit: String,
    },
    /// The system has no memory for a region, a plain buffer, or a file's header. Remedy: free memory, or raise the
    /// limit that the text names.
    #[error("the system refused {}: {}", amount(*wanted), shown(text))]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// The system's text.
        text: String,
    },
    /// The pool has no free segment for this request now, and the call does not wait. Remedy: wait, let buffers return,
    /// or raise the capacity. [`Pool::stuck`](crate::Pool::stuck) lists what is out.
    #[error(
        "the pool has no room for {} now (capacity {}{}); wait, return buffers, or raise the capacity{}",
        beside(*len, *capacity), beside(*capacity, *len), .shortage.as_ref().map_or_else(String::new, |s| format!("; {s}")),
        .growth.as_ref().map_or_else(String::new, |e| format!("; growing failed: {e}"))
    )]
    Exhausted {
        /// Bytes asked for.
        len: usize,
        /// Bytes that the pool may hold.
        capacity: usize,
        /// Why the pool did not grow, where it tried last and failed.
        growth: Option<Box<Error>>,
        /// The pool, and what there was in it.
        shortage: Option<Box<Shortage>>,
    },
    /// As many requests wait for the pool's memory as it allows to wait
    /// ([`PoolBuilder::max_waiting`](crate::PoolBuilder::max_waiting)), so this one did not join them. Remedy: answer
    /// the client that the server is busy, try again later, or raise the bound or the capacity.
    #[error(
        "{limit} requests wait for the pool's memory, as many as PoolBuilder::max_waiting allows; try again later, or \
         raise that or the capacity"
    )]
    QueueFull {
        /// The most requests that may wait at a time.
        limit: usize,
    },
    /// Memory that was to be adopted has no whole page in it. Remedy: a larger piece, or one that starts on a page.
    #[error(
        "{} of memory to adopt have no whole page of {} in them; give a larger piece, or one that starts on a page",
        beside(*len, *page), beside(*page, *len)
    )]
    NoWholePage {
        /// Bytes to adopt.
        len: usize,
        /// Bytes of a page.
        page: usize,
    },
    /// Memory that was to be adopted is more than the capacity has left. Remedy: [trim](crate::Pool::trim) the pool, or
    /// raise the capacity.
    #[error(
        "{} of memory to adopt are more than the {} that the capacity of {} has left; trim the pool, or raise the \
         capacity", beside(*len, *room), beside(*room, *len), amount(*capacity)
    )]
    OverCapacity {
        /// Bytes to adopt.
        len: usize,
        /// Bytes that the pool could still take, in whole pages.
        room: usize,
        /// Bytes that the pool may hold.
        capacity: usize,
    },
    /// A mistake in this crate, noticed by the crate itself; the text says where. What was in flight there is
    /// quarantined. Remedy: a report, with the lines of the log before it.
    #[error(
        "a mistake in pinpool: {0}; what was in flight there is quarantined; report it with the log's lines before it"
    )]
    Internal(&'static str),
    /// The deadline passed before the wait was over. The field has the time waited, and where a pool was waited for,
    /// what there was in the pool; of a copier's transfer ([`Copier::with_timeout`](crate::Copier::with_timeout)) how far it
    /// had come, and what it waited for. The time is no less than the call was told to
    /// wait, except on a [stepped](crate::host) device, where a wait ends as soon as nothing can move any more. Remedy:
    /// a later deadline; where a pool was waited for, the same as for [`Exhausted`](Self::Exhausted).
    #[error("timed out after {0}")]
    Timeout(Waited),
    /// Waiting cannot help, whatever comes back: the capacity is too small for what was asked for together, or
    /// quarantined bytes are in the way. Remedy: a larger capacity, or less at once.
    #[error(
        "no amount of waiting makes room for {} within a capacity of {}{}; raise the capacity, or ask for less at once",
        beside(*len, *capacity), beside(*capacity, *len), of_which_quarantined(*quarantined)
    )]
    Impossible {
        /// Bytes asked for.
        len: usize,
        /// Bytes that are never used again.
        quarantined: usize,
        /// Bytes that the pool may hold.
        capacity: usize,
    },
    /// The pool is shut down, by [`Pool::shutdown`](crate::Pool::shutdown) or since its last handle was dropped.
    /// Remedy: another pool.
    #[error("the pool is shut down; build another one")]
    Closed,
    /// This process is the child of a fork, and its parent had begun to open a device before. Nothing of this crate can
    /// be used here, devices that the child would open itself included. Remedy: fork before the first device is opened,
    /// or start a program ([`std::process::Command`]).
    #[error(
        "this process was forked from one that had opened a device, and can use none: fork before the first device is \
         opened, or start another program"
    )]
    Forked,
    /// A buffer's pool does not serve this device, or device memory, a stream or a registered value is another
    /// device's. Copies between devices are not made, with or without peer access. Remedy: `remedy`, which depends on
    /// what it is.
    #[error(
        "{what} of {} cannot be used with {}: {remedy}",
        if of == device { format!("another opening of {}", shown(of)) } else { shown(of).to_string() }, shown(device)
    )]
    WrongDevice {
        /// The device that was to use it.
        device: String,
        /// What cannot be used there: a pool or a buffer of one, device memory, a stream, or a registered value.
        what: &'static str,
        /// The device that it belongs to; for a pool, the devices that it serves, with commas.
        of: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The stream belongs to another context than the device works in. Remedy: adopt it with the device of its own
    /// context (`adopt_context` in the modules `cuda` and `acl` gives it).
    #[error(
        "the stream belongs to another context than the one that {} works in; adopt the stream with the device of its \
         own context (adopt_context in the module cuda or acl gives it)",
        shown(device)
    )]
    WrongContext {
        /// The device that the stream was to be adopted for.
        device: String,
    },
    /// The stream is CUDA's per-thread default stream of another thread. On this thread the handle stands for another
    /// stream. Remedy: submit on the thread that adopted the stream, or adopt this thread's own.
    #[error(
        "the stream of {} is the per-thread default stream of another thread; submit on the thread that adopted it, or \
         adopt this thread's own",
        shown(device)
    )]
    WrongThread {
        /// The stream's device.
        device: String,
    },
    /// The stream is being captured into a graph, and this call cannot be part of one. Nothing was submitted, and the
    /// capture is as it was. Remedy: `remedy`, which depends on the call.
    #[error(
        "{what} was refused: the stream is being captured into a graph, where it would spoil the capture, or happen \
         again with every launch; {remedy}"
    )]
    Capturing {
        /// What was refused.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A buffer was to be kept with the graph that is being captured, and the stream is in no capture. Remedy:
    /// [`hold`](crate::Stream::hold), or begin the capture first.
    #[error(
        "hold_captured needs a stream that is being captured into a graph, and this one is not; use hold where nothing \
         is captured"
    )]
    NotCapturing,
    /// A slice of cudarc was used on another stream than its own, where cudarc keeps no order between the two: its
    /// event tracking is off, or was when the slice was made. Remedy: the slice's own stream.
    #[error(
        "the slice belongs to another stream, and cudarc does not keep the order between the two on {} (event \
         tracking is off, or was when the slice was made; there is no stream but the default one; the slice is the \
         default stream's of another CudaContext, or a per-thread default stream's): nothing would order the slice's \
         next use, or its end, after the copy; copy on the slice's own stream",
        shown(device)
    )]
    Unordered {
        /// The device that the slice is on.
        device: String,
    },
    /// A stream-ready buffer was used on another stream than the one that it was checked out on. Remedy: that stream,
    /// or wait for the buffer first.
    #[error(
        "a stream-ready buffer can be used only on the stream it was checked out on; wait for it to use it elsewhere"
    )]
    WrongStream,
    /// A raw address names no memory that this device's copies can use. [`AddressFault`] has the cause and the remedy.
    #[error("{len} bytes at address {address:#x} cannot be used as memory of {}: {fault}", shown(device))]
    BadAddress {
        /// The device that was to use it.
        device: String,
        /// First byte.
        address: u64,
        /// Length in bytes.
        len: usize,
        /// What is wrong with it.
        fault: AddressFault,
    },
    /// There is nothing to copy: the range is empty, or a list has no entries. Remedy: name some bytes.
    #[error("nothing to copy: the range, or the list, is empty; name at least one byte")]
    Empty,
    /// No byte of the buffer was written yet, so there is nothing to copy from it: a buffer has the bytes that were
    /// written to it, and none at first. Remedy: write to it first (`extend_from_slice`, [`std::io::Write`],
    /// `bytes::BufMut`), or say how many bytes were written by other means
    /// ([`set_len`](crate::PinnedBuf::set_len), [`assume_written`](crate::PinnedBuf::assume_written) after a kernel).
    #[error(
        "no byte of the buffer was written yet, so there is nothing to copy; write to it first (extend_from_slice, Write, \
         BufMut), or say what was written by other means (set_len, or assume_written after a kernel)"
    )]
    Unwritten,
    /// A range does not lie within the thing that it is a range of. Remedy: a range within `0..len`.
    #[error(
        "range {start}..{end} {} {len} bytes", if start > end { "ends before it begins, in" } else { "is outside of" }
    )]
    OutOfRange {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// Length of the whole.
        len: usize,
    },
    /// The target is smaller than what was to be copied or written. Remedy: a larger target, or a part of the source.
    #[error("{need} bytes do not fit into {have}")]
    TooSmall {
        /// Bytes needed.
        need: usize,
        /// Bytes that the target has.
        have: usize,
    },
    /// The bytes cannot be viewed as that type: their number is no multiple of its size, or their address of its
    /// alignment. The text says which. Remedy: another length, or [`Request::align`](crate::Request::align).
    #[error("the bytes cannot be viewed as this type: {}", shown(.0))]
    View(String),
    /// The source of a transfer could not be read. Of a transfer that had begun, the bytes before
    /// [`Progress::landed_to`](crate::copier::Progress::landed_to) are on the device; which others are is not known.
    /// Remedy: `text` and `kind` have the system's reason; then start again. Where the process or the system has too many
    /// open files, the kind is [`QuotaExceeded`](std::io::ErrorKind::QuotaExceeded), and the class
    /// [`ErrorClass::Transient`].
    #[error("{} cannot be read at offset {offset}: {}", shown(what), shown(text))]
    Read {
        /// The file, or the name of another source.
        what: String,
        /// The offset that was read, in bytes.
        offset: u64,
        /// The system's kind of error.
        kind: std::io::ErrorKind,
        /// The system's text.
        text: String,
    },
    /// The source of a transfer ends before the length that it had at first: a file was cut off meanwhile. Remedy: load
    /// it again while no process writes to it.
    #[error(
        "{} ends at byte {end}, not at {len}: it has become shorter since its length was taken; load it again while no \
         process writes to it",
        shown(what)
    )]
    Shrunk {
        /// The file, or the name of another source.
        what: String,
        /// Bytes that it has.
        end: u64,
        /// Bytes that it had, or reported.
        len: u64,
    },
    /// The target of a transfer could not be written; what it has of this transfer is incomplete. Remedy: make room
    /// where `kind` says that there is none, and write it again.
    #[error("{} cannot be written at offset {offset}: {}{}", shown(what), shown(text), advice(*kind))]
    Write {
        /// The file, or the name of another target.
        what: String,
        /// The offset that was written, in bytes.
        offset: u64,
        /// The system's kind of error.
        kind: std::io::ErrorKind,
        /// The system's text.
        text: String,
    },
    /// A file is not as it describes itself: its header does not agree with what follows, or an index not with its
    /// files. Or it was written to since it was opened. Remedy: `why` names it; mostly, get the file again from where
    /// it can be trusted.
    #[error(
        "{} is refused: {}{}", shown(what),
        .tensor.as_ref().map_or_else(String::new, |name| format!("tensor \"{}\" ", shown(name))), shown(why)
    )]
    Malformed {
        /// The file.
        what: String,
        /// The tensor that the fault is in, where it is in one: its name as messages show it, escaped and cut to 200
        /// characters.
        tensor: Option<Box<str>>,
        /// The cause and the remedy.
        why: String,
    },
    /// One of many pieces, buffers or blocks of a call cannot be copied, so nothing was copied. `cause` has the cause, its
    /// remedy and its class.
    #[error("piece {piece} ({memory} bytes of device memory): {cause}")]
    Piece {
        /// Its number in the call, from 0.
        piece: usize,
        /// Bytes of the device memory that was named for it.
        memory: usize,
        /// What is wrong with it.
        cause: Box<Error>,
    },
    /// A chunk of a transfer failed on its way to or from the device. `cause` has the cause, its remedy and its class.
    #[error("the transfer of {} failed at offset {offset}: {cause}", shown(what))]
    Transfer {
        /// The file, or the name of another source or target.
        what: String,
        /// The offset where the chunk starts, in bytes.
        offset: u64,
        /// The error of the chunk.
        cause: Box<Error>,
    },
    /// A tensor of a checkpoint is not on the device, since a transfer failed, and the load has ended. The tensors that
    /// come out before it are on the device, in the memory that the caller gave for them too; no tensor behind it can be
    /// relied on. `cause` has the cause, its remedy and its class.
    #[error(
        "tensor \"{}\" is not on the device ({landed} of {total} tensors are, those before it): {cause}",
        shown(tensor)
    )]
    Tensor {
        /// The tensor: its name as messages show it, escaped and cut to 200 characters.
        tensor: Box<str>,
        /// Tensors of the load that are on the device: those before this one, in the order of the load.
        landed: usize,
        /// Tensors that were to be loaded.
        total: usize,
        /// The error of the transfer, with the file and the offset.
        cause: Box<Error>,
    },
    /// The transfer was cancelled before its end, and its target is incomplete. Remedy: start it again.
    #[error(
        "the transfer of {} was cancelled after {} of {}; start it again for all of it",
        shown(what), Beside(*done, *total), Beside(*total, *done)
    )]
    Cancelled {
        /// The file, or the name of another source or target.
        what: String,
        /// Bytes whose copies were complete.
        done: u64,
        /// Bytes that were to be moved.
        total: u64,
    },
    /// A driver call failed. [`DeviceError::class`] says whether the device can still be used.
    #[error("{0}")]
    Device(DeviceError),
}

/// Why a pool did not serve a request: what there was at that moment.
///
/// ```
/// # use pinpool::{Device, Error, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let most = pool.checkout(900_000)?;
/// let Err(Error::Exhausted { shortage: Some(shortage), .. }) = pool.try_checkout(500_000) else { panic!() };
/// assert_eq!((shortage.requested, shortage.pool.as_str()), (500_000, pool.name()));
/// assert!(shortage.largest < 500_000 && shortage.withheld == 0);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// The pool's name.
    pub pool: String,
    /// Bytes asked for.
    pub requested: usize,
    /// Free bytes: those that are withheld included, those that other threads have cached not.
    pub free: usize,
    /// The longest range of free memory that is not withheld, in bytes.
    pub largest: usize,
    /// The free bytes that are withheld for requests that wait, and the bytes that the largest of these requests asks
    /// for.
    pub withheld: usize,
    /// See [`withheld`](Self::withheld).
    pub withheld_for: usize,
    /// Bytes that the pool may hold.
    pub capacity: usize,
    /// Requests that wait, this one not counted.
    pub waiting: usize,
    /// Why the pool did not grow, where it tried last and failed.
    pub growth: Option<Box<Error>>,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, requested, free, largest, withheld, withheld_for, waiting, .. } = self;
        let (asked, free, largest) = (amount(*requested), amount(*free), amount(*largest));
        write!(f, "pool {}: {asked} asked for, {free} free, {largest} in one piece", shown(pool))?;
        if *withheld > 0 {
            let (withheld, asked) = (amount(*withheld), amount(*withheld_for));
            write!(f, ", {withheld} withheld for a request of {asked} that waits")?;
        }
        match waiting {
            0 => Ok(()),
            1 => write!(f, ", 1 other request waits"),
            n => write!(f, ", {n} other requests wait"),
        }
    }
}

/// How long a call waited in vain, and for what: the field of [`Error::Timeout`]. It can be used like the [`Duration`].
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waited {
    /// The time waited.
    pub time: Duration,
    /// Of a transfer: which one, how far it had come, and what it waited for, as a text.
    pub transfer: Option<Box<str>>,
    /// Where a pool was waited for: the pool, and what there was in it.
    pub shortage: Option<Box<Shortage>>,
}

impl Waited {
    pub(crate) fn for_memory(time: Duration, shortage: Shortage) -> Self {
        Self { time, transfer: None, shortage: Some(Box::new(shortage)) }
    }
}

impl From<Duration> for Waited {
    fn from(time: Duration) -> Self {
        Self { time, transfer: None, shortage: None }
    }
}

impl std::ops::Deref for Waited {
    type Target = Duration;
    fn deref(&self) -> &Duration {
        &self.time
    }
}

impl PartialEq<Duration> for Waited {
    fn eq(&self, other: &Duration) -> bool {
        self.time == *other
    }
}

impl PartialOrd<Duration> for Waited {
    fn partial_cmp(&self, other: &Duration) -> Option<std::cmp::Ordering> {
        self.time.partial_cmp(other)
    }
}

impl PartialEq<Waited> for Duration {
    fn eq(&self, other: &Waited) -> bool {
        *self == other.time
    }
}

impl PartialOrd<Waited> for Duration {
    fn partial_cmp(&self, other: &Waited) -> Option<std::cmp::Ordering> {
        self.partial_cmp(&other.time)
    }
}

impl fmt::Debug for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.time)?;
        if let Some(transfer) = &self.transfer {
            write!(f, ": {}", shown(transfer))?;
        }
        let Some(shortage) = &self.shortage else { return Ok(()) };
        write!(f, " (capacity {}; {shortage}", amount(shortage.capacity))?;
        if let Some(growth) = &shortage.growth {
            write!(f, "; growing failed: {growth}")?;
        }
        write!(f, "); wait longer, return buffers, or raise the capacity")
    }
}

impl Error {
    /// The same error, with the pool's name where the error tells of a shortage.
    pub(crate) fn of_pool(mut self, name: &str) -> Self {
        let shortage = match &mut self {
            Self::Exhausted { shortage, .. } | Self::Timeout(Waited { shortage, .. }) => shortage,
            _ => return self,
        };
        if let Some(shortage) = shortage {
            shortage.pool = name.to_owned();
        }
        self
    }

    /// [`WrongDevice`](Self::WrongDevice) of a pool, or a buffer of one, that serves the devices `of`.
    #[cold]
    pub(crate) fn wrong_pool(what: &'static str, of: String, device: &str) -> Self {
        let remedy = "name that device to the pool too (PoolBuilder::device), or use a pool that serves it";
        Self::WrongDevice { device: device.to_owned(), what, of, remedy }
    }

    /// [`WrongDevice`](Self::WrongDevice) of device memory.
    #[cold]
    pub(crate) fn wrong_memory(of: &str, device: &str) -> Self {
        let remedy =
            "copy on a stream or a copier of the memory's own device; between devices, by way of the host";
        Self::WrongDevice { device: device.to_owned(), what: "device memory", of: of.to_owned(), remedy }
    }

    /// [`WrongDevice`](Self::WrongDevice) of a stream.
    #[cold]
    pub(crate) fn wrong_stream(of: &str, device: &str) -> Self {
        let remedy =
            "only streams and transfers of one device are ordered behind each other; wait on the host";
        Self::WrongDevice { device: device.to_owned(), what: "a stream", of: of.to_owned(), remedy }
    }

    /// [`WrongDevice`](Self::WrongDevice) of a registered value.
    #[cold]
    pub(crate) fn wrong_family(of: &str, device: &str) -> Self {
        let remedy = "register the value with a device of that family (Device::register)";
        Self::WrongDevice { device: device.to_owned(), what: "a registered value", of: of.to_owned(), remedy }
    }

    /// [`TooSmall`](Self::TooSmall), unless so many bytes fit.
    #[inline]
    pub(crate) fn unless_fits(need: usize, have: usize) -> Result<()> {
        if need <= have { Ok(()) } else { Err(Self::TooSmall { need, have }) }
    }

    /// The same error, of one of many pieces, with the length of its device memory.
    #[cold]
    pub(crate) fn of_piece(self, piece: usize, memory: usize) -> Self {
        // The device is lost for all of them.
        if self.class() != ErrorClass::Argument {
            return self;
        }
        Self::Piece { piece, memory, cause: self.into() }
    }

    /// [`Unavailable`](Self::Unavailable) because of an error that may begin with the device's name.
    #[cfg(any(feature = "acl", feature = "cuda"))]
    pub(crate) fn unavailable(device: &str, why: &Self) -> Self {
        let why = crate::escape::unnamed(&why.to_string(), device).to_owned();
        Self::Unavailable { device: device.to_owned(), why }
    }

    /// The same error, in which a timeout tells the time since the whole call began: the last of several waits knows
    /// its own alone, which began later than the time that the deadline counts from.
    pub(crate) fn waited(self, since: Instant) -> Self {
        match self {
            Self::Timeout(waited) => Self::Timeout(Waited { time: since.elapsed(), ..waited }),
            other => other,
        }
    }

    /// What the error means for what the caller may do next. The one place where errors are classified.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Device(e) => e.class,
            Self::Transfer { cause, .. } | Self::Tensor { cause, .. } | Self::Piece { cause, .. } => {
                cause.class()
            }
            Self::Capturing { .. } => ErrorClass::Capture,
            Self::Closed => ErrorClass::Closed,
            Self::Cancelled { .. } => ErrorClass::Cancelled,
            Self::Internal(_) => ErrorClass::DeviceLost,
            Self::Exhausted { .. }
            | Self::QueueFull { .. }
            | Self::OverCapacity { .. }
            | Self::Timeout(_)
            | Self::OutOfMemory { .. }
            | Self::MemLock { .. } => ErrorClass::Transient,
            // Too many files are open.
            Self::Read { kind: std::io::ErrorKind::QuotaExceeded, .. } => ErrorClass::Transient,
            _ => ErrorClass::Argument,
        }
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.class() == ErrorClass::Transient
    }

    /// Whether the device cannot be used until the process ends.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        matches!(self.class(), ErrorClass::DeviceLost | ErrorClass::DriverShutdown)
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        let kind = match error {
            Error::Timeout(_) => std::io::ErrorKind::TimedOut,
            Error::OutOfMemory { .. } | Error::MemLock { .. } | Error::Exhausted { .. } => {
                std::io::ErrorKind::OutOfMemory
            }
            Error::Unsupported(_) => std::io::ErrorKind::Unsupported,
            Error::TooSmall { .. } => std::io::ErrorKind::WriteZero,
            _ => std::io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

/// The error of a submit, with the buffer where the driver was not called yet. (Of
/// [`InFlight::wait_timeout`](crate::InFlight::wait_timeout): the error, and after a timeout the handle.)
///
/// With `buffer: None` the driver was called, and its answer leaves open whether the device still uses the buffer. The
/// segment returns to the pool by itself once a later event on that stream is seen complete.
///
/// ```
/// # use pinpool::{Device, Error, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory) = (device.stream()?, device.alloc(4096)?);
/// let empty = pool.checkout(4096)?; // nothing is written to it
/// let refused = stream.upload(empty, &memory).expect_err("there is nothing to copy");
/// assert_eq!(refused.error, Error::Unwritten);
/// let mut buf = refused.buffer.expect("the driver was not called");
/// buf.extend_from_slice(b"hello");
/// stream.upload(buf, &memory)?.wait()?; // `?` makes an `Error` of it, and drops the buffer
/// # Ok::<(), pinpool::Error>(())
/// ```
pub struct SubmitError<B> {
    /// The error.
    pub error: Error,
    /// The buffer, if the device cannot be using it.
    pub buffer: Option<B>,
}

impl<B> SubmitError<B> {
    pub(crate) fn refused(error: Error, buffer: B) -> Self {
        Self { error, buffer: Some(buffer) }
    }

    /// What was found before a call begins, and the buffer; or the refusal, with the buffer.
    #[inline]
    pub(crate) fn unless<T>(found: Result<T>, buffer: B) -> Result<(T, B), Self> {
        match found {
            Ok(found) => Ok((found, buffer)),
            Err(error) => Err(Self::refused(error, buffer)),
        }
    }
}

impl<B> fmt::Debug for SubmitError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubmitError")
            .field("error", &self.error)
            .field("buffer", &self.buffer.is_some())
            .finish()
    }
}

impl<B> fmt::Display for SubmitError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for SubmitError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<B> From<SubmitError<B>> for Error {
    fn from(e: SubmitError<B>) -> Self {
        e.error
    }
}

/// The error of [`Pool::adopt`](crate::Pool::adopt) and [`Device::register`](crate::Device::register), with the
/// caller's memory as it was.
///
/// ```
/// # use pinpool::{Device, Error, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// let refused = pool.adopt(vec![7_u8; 100]).expect_err("100 bytes have no whole page");
/// assert!(matches!(refused.error, Error::NoWholePage { .. }));
/// assert_eq!(refused.memory.expect("it was not registered").len(), 100);
/// # Ok::<(), pinpool::Error>(())
/// ```
pub struct RegisterError<T> {
    /// The error.
    pub error: Error,
    /// The memory. `None` only where a part of it was registered and the driver refused to undo that: then it is
    /// leaked, since the device may still reach it, and the log says so.
    pub memory: Option<T>,
}

impl<T> fmt::Debug for RegisterError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisterError")
            .field("error", &self.error)
            .field("memory", &self.memory.is_some())
            .finish()
    }
}

impl<T> fmt::Display for RegisterError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for RegisterError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<T> From<RegisterError<T>> for Error {
    fn from(e: RegisterError<T>) -> Self {
        e.error
    }
}

fn of_which_quarantined(bytes: usize) -> String {
    if bytes == 0 { String::new() } else { format!(", of which {} are quarantined", amount(bytes)) }
}

/// The remedy where a target could not be written. The target may be a file that was complete before and still is, so
/// the message does not say to remove anything.
fn advice(kind: std::io::ErrorKind) -> &'static str {
    use std::io::ErrorKind;
    match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "; what it has of this is incomplete, make room and write it again"
        }
        _ => "; what it has of this is incomplete",
    }
}

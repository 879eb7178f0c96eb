//! What can go wrong, in one type.
//!
//! Whoever handles an error asks one question first: *what may I still do?* [`Error::class`] answers it, and it is
//! the one place in the crate where errors are told apart. Every message names the cause and what to do about it.
//!
//! What a file, a driver or the system said is in the fields as it was said. In the message it is escaped and has an
//! end ([`crate::escape`]): each field of text goes through `shown`, which a test holds every variant to.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::escape::text as shown;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What an error means for what comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// This call was wrong; nothing was lost and nothing else is affected. Calling again unchanged fails again.
    Argument,
    /// The stream is being captured into a graph and the call cannot be part of it. Only this call is affected.
    Capture,
    /// A matter of the moment: out of memory, not ready, timed out. The same call may succeed later.
    Transient,
    /// The device (or the stream, after [`Error::Internal`]) is gone for good. Everything in flight there is
    /// quarantined, and later calls fail at once.
    DeviceLost,
    /// The driver is shutting down under us. Memory is leaked rather than touched.
    Shutdown,
}

/// What a device's driver said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// The device, as [`Device::open`](crate::Device::open) names it.
    pub device: Arc<str>,
    /// The driver call that failed.
    pub call: &'static str,
    /// The driver's number for the error (an `errno` for the host device).
    pub code: i64,
    /// What the driver or the system calls it.
    pub text: Arc<str>,
    /// What it means.
    pub class: ErrorClass,
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, call, code, text, class } = self;
        write!(f, "{}: {call} failed with {code} ({})", shown(device), shown(text))?;
        match class {
            ErrorClass::Argument => Ok(()),
            ErrorClass::Capture => write!(f, "; the stream is being captured, submit outside the capture"),
            ErrorClass::Transient => write!(f, "; the call may succeed later"),
            ErrorClass::DeviceLost => {
                write!(f, "; the device is lost until the process ends, open another one")
            }
            ErrorClass::Shutdown => write!(f, "; the driver is shutting down"),
        }
    }
}

/// Why an address names no memory that a device's copies can use. Part of [`Error::BadAddress`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressFault {
    /// The address is zero.
    #[error("it is null")]
    Null,
    /// Memory of the host.
    #[error(
        "that is {}; it is the host's side of a copy: use a buffer of a pool, or the blocking copies, which take borrowed \
         memory", if *.registered { "page-locked host memory" } else { "ordinary host memory" }
    )]
    Host {
        /// Whether the driver knows it, as memory that is page-locked.
        registered: bool,
    },
    /// Memory of another device of the family. Copies between devices are not made, with or without peer access.
    #[error("that is memory of {}; copy on a stream of that device, or through the host", shown(device))]
    OtherDevice {
        /// The device whose memory it is.
        device: String,
    },
    /// Memory of the same GPU that another context allocated than the one that the device works in.
    #[error(
        "another context of the GPU allocated it, and only with peer access between the two could it be used here; allocate it \
         in the device's own context, which is the primary one, like the runtime API's and the frameworks'"
    )]
    OtherContext,
    /// The range leaves the allocation in which it starts.
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
    /// The driver knows of no memory there.
    #[error(
        "the driver knows no memory there; either a kernel's own malloc or new gave it (the device-side heap, which no copy \
         call accepts: have a kernel copy it to memory of cudaMalloc, cuMemAlloc or `Device::alloc`, and name that), or it \
         was freed"
    )]
    Unknown,
}

/// What went wrong. See [`Error::class`] for what it means.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A length of zero was asked for.
    #[error("a segment of 0 bytes was asked for; ask for at least 1")]
    ZeroLength,
    /// The length is beyond what any segment can have.
    #[error(
        "{len} bytes are more than one segment can hold ({largest}); raise the capacity, configure larger extents, or split \
         the request"
    )]
    TooLong {
        /// Bytes asked for.
        len: usize,
        /// The largest length that the pool's capacity and extents can ever serve.
        largest: usize,
    },
    /// The alignment is not a power of two, or beyond what regions guarantee.
    #[error("{align} is no alignment: it must be a power of two of at most {largest}")]
    BadAlignment {
        /// Alignment asked for, in bytes.
        align: usize,
        /// The largest alignment served, in bytes.
        largest: usize,
    },
    /// A setting makes no sense; the text names it and says which values do.
    #[error("{}", shown(.0))]
    Config(String),
    /// No device has this name.
    #[error("unknown device \"{}\"; {}", shown(name), shown(known))]
    UnknownDevice {
        /// What was asked for.
        name: String,
        /// Which names there are.
        known: String,
    },
    /// The device exists by name, but cannot be used here.
    #[error("device {} is not available: {}", shown(device), shown(why))]
    Unavailable {
        /// The device.
        device: String,
        /// The cause and the remedy.
        why: String,
    },
    /// This platform or device cannot do it.
    #[error("unsupported: {}", shown(.0))]
    Unsupported(String),
    /// The memlock limit refuses to lock the pages.
    #[error(
        "locking {wanted} bytes was refused: the memlock limit is {}; raise it (ulimit -l, LimitMEMLOCK=infinity, \
         --ulimit memlock=-1, CAP_IPC_LOCK) or allow unpinned memory in the configuration",
        shown(limit)
    )]
    MemLock {
        /// Bytes that were to be locked.
        wanted: usize,
        /// The limit, as text (bytes, or "unlimited").
        limit: String,
    },
    /// The system has no memory for a region.
    #[error("the system refused {wanted} bytes: {}", shown(text))]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// What the system said.
        text: String,
    },
    /// The pool has no free segment for this request now, and was not to wait.
    #[error(
        "the pool has no room for {len} bytes now ({capacity} bytes of capacity); wait, return buffers, or raise the \
         capacity{}", .growth.as_ref().map_or_else(String::new, |e| format!("; growing failed: {e}"))
    )]
    Exhausted {
        /// Bytes asked for.
        len: usize,
        /// Bytes that the pool proper may hold, or the reserve.
        capacity: usize,
        /// Why the pool could not grow, where that was tried and failed last.
        growth: Option<Box<Error>>,
    },
    /// Memory that was to be adopted has no whole page in it.
    #[error(
        "{len} bytes of memory to adopt have no whole page of {page} bytes in them; give a larger piece, or one that starts on a page"
    )]
    NoWholePage {
        /// Bytes to adopt.
        len: usize,
        /// Bytes of a page.
        page: usize,
    },
    /// Memory that was to be adopted is more than the capacity has left.
    #[error(
        "{len} bytes of memory to adopt are more than the {room} that the capacity of {capacity} bytes has left; trim the pool, \
         or raise the capacity"
    )]
    OverCapacity {
        /// Bytes to adopt.
        len: usize,
        /// Bytes that the pool proper could still take, in whole pages.
        room: usize,
        /// Bytes that the pool proper may hold.
        capacity: usize,
    },
    /// So many copies of the calling thread's wait in the queue or are in flight that it takes no more now, and was not
    /// to wait.
    #[error(
        "the copy queue has {depth} copies of this thread's (or of one that shares its lane) outstanding already; wait for one of them, or configure a deeper queue"
    )]
    QueueFull {
        /// Copies that may be outstanding in a lane.
        depth: usize,
    },
    /// The copy queue was shut down.
    #[error("the copy queue is shut down; make another one by Device::copy_queue")]
    QueueClosed,
    /// A mistake in this crate, which it has noticed: the text says where. What was in flight there is quarantined.
    #[error(
        "a mistake in pinpool: {0}; what was in flight there is quarantined; report it with the log's lines before it"
    )]
    Internal(&'static str),
    /// The deadline passed first. How long the call waited: no less than it was told to, but on a
    /// [stepped](crate::host) device, where a wait ends as soon as nothing can move any more.
    #[error("timed out after {0:?}")]
    Timeout(Duration),
    /// Waiting cannot help, whatever comes back: the capacity is too small for what was asked for together, or what is
    /// quarantined is in the way.
    #[error(
        "no amount of waiting makes room for {len} bytes within a capacity of {capacity} bytes, of which {quarantined} are \
         quarantined; raise the capacity, or ask for less at once"
    )]
    Impossible {
        /// Bytes asked for.
        len: usize,
        /// Bytes that are never to be reused.
        quarantined: usize,
        /// Bytes that the pool proper may hold, or the reserve.
        capacity: usize,
    },
    /// The pool was shut down.
    #[error("the pool is shut down")]
    Closed,
    /// This is the child of a fork, and its parent had begun to open a device by then: nothing of this crate can be
    /// used here, what the child would open itself included. Fork before the first device is opened, or start a program
    /// ([`std::process::Command`]).
    #[error(
        "this process was forked from one that had opened a device, and can use none: fork before the first device is opened, \
         or start another program"
    )]
    Forked,
    /// The buffer belongs to a pool that does not serve this device, or the device memory or stream is another
    /// device's. (Copies between devices are not made, with or without peer access.)
    #[error(
        "{} is another device: name it to Pool::builder where it is to use a pool's buffers, and use device memory and \
         streams with those of the same device only",
        shown(device)
    )]
    WrongDevice {
        /// The device that was to use it.
        device: String,
    },
    /// A stream of another context than the device's.
    #[error(
        "the stream belongs to another context than the one that {} works in; adopt the stream with the device of its \
         own context (adopt_context in the module cuda or acl gives it)",
        shown(device)
    )]
    WrongContext {
        /// The device that the stream was to be adopted for.
        device: String,
    },
    /// The stream is being captured into a graph, and this call can be no part of one. Nothing was submitted, and the
    /// capture is as it was.
    #[error(
        "{what} was refused: the stream is being captured into a graph, where it would spoil the capture, or happen again with \
         every launch; {remedy}"
    )]
    Capturing {
        /// What was refused.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A call that makes something a part of the graph being captured, on a stream that is in no capture.
    #[error("{what} needs a stream that is being captured into a graph, and this one is not; {remedy}")]
    NotCapturing {
        /// What was refused.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A slice of cudarc's on another stream than its own, where cudarc does not keep track of what is done to it.
    #[error(
        "the slice belongs to another stream, and cudarc does not keep the order between the two on {} (event tracking is \
         off, or was when the slice was made; there is no stream but the default one; the slice is the default stream's of \
         another CudaContext, or a per-thread default stream's): nothing would order the slice's next use, or its end, after \
         the copy; copy on the slice's own stream",
        shown(device)
    )]
    Unordered {
        /// The device that the slice is on.
        device: String,
    },
    /// A stream-ready buffer was used on another stream than the one it is ready on.
    #[error(
        "a stream-ready buffer can be used only on the stream it was checked out on; wait for it to use it elsewhere"
    )]
    WrongStream,
    /// A raw address that names no memory which this device's copies can use.
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
    /// A token that names no segment checked out of this pool.
    #[error(
        "the token names no segment that is checked out of this pool: it is stale, foreign or was redeemed before"
    )]
    StaleToken,
    /// Nothing has been written to the buffer that was to be sent.
    #[error("nothing to copy: the range is empty")]
    Empty,
    /// A range that leaves what it is a range of.
    #[error("range {start}..{end} is outside of {len} bytes")]
    OutOfRange {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// Length of the whole.
        len: usize,
    },
    /// The target is smaller than what was to be copied or written.
    #[error("{need} bytes do not fit into {have}")]
    TooSmall {
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// The bytes cannot be viewed as that type.
    #[error("the bytes cannot be viewed as this type: {}", shown(.0))]
    View(String),
    /// The source of a transfer could not be read. If it had begun, only what `Progress::landed_to` says is on the
    /// device.
    #[error("{} cannot be read at offset {offset}: {}", shown(what), shown(text))]
    Read {
        /// The file, or what else was read.
        what: String,
        /// Where it was read.
        offset: u64,
        /// What the system calls the error.
        kind: std::io::ErrorKind,
        /// What the system says.
        text: String,
    },
    /// The source of a transfer ends before it should.
    #[error(
        "{} ends at byte {end}, not at {len}: it has become shorter since its length was taken; load it again when nobody \
         writes to it",
        shown(what)
    )]
    Shrunk {
        /// The file, or what else was read.
        what: String,
        /// Bytes that it has.
        end: u64,
        /// Bytes that it had, or said that it had.
        len: u64,
    },
    /// The target of a transfer could not be written.
    #[error("{} cannot be written at offset {offset}: {}{}", shown(what), shown(text), advice(*kind))]
    Write {
        /// The file, or what else was written.
        what: String,
        /// Where it was written.
        offset: u64,
        /// What the system calls the error.
        kind: std::io::ErrorKind,
        /// What the system says.
        text: String,
    },
    /// A file that is not what it says it is: a header that lies about what follows it, or an index about its files.
    /// Nothing of it was loaded.
    #[error(
        "{} is refused: {}{}", shown(what),
        .tensor.as_ref().map_or_else(String::new, |name| format!("tensor \"{}\" ", shown(name))), shown(why)
    )]
    Malformed {
        /// The file.
        what: String,
        /// The tensor that the lie is about, where it is about one: its name as messages show it, escaped and with at
        /// most 200 characters.
        tensor: Option<Box<str>>,
        /// What is wrong, and what to do about it.
        why: String,
    },
    /// A chunk of a transfer failed on its way to or from the device.
    #[error("the transfer of {} failed at offset {offset}: {cause}", shown(what))]
    Transfer {
        /// The file, or what else was moved.
        what: String,
        /// Where the chunk starts.
        offset: u64,
        /// What happened.
        cause: Box<Error>,
    },
    /// The transfer was cancelled before its end; what it was to fill is incomplete.
    #[error(
        "the transfer of {} was cancelled after {done} of {total} bytes; start it again for all of them",
        shown(what)
    )]
    Cancelled {
        /// The file, or what else was moved.
        what: String,
        /// Bytes that had arrived.
        done: u64,
        /// Bytes that were to be moved.
        total: u64,
    },
    /// A driver call failed.
    #[error("{0}")]
    Device(DeviceError),
}

impl Error {
    /// The same error, in which a timeout tells the time since the whole call began: the last of several waits knows
    /// its own alone, which began later than the time that the deadline counts from.
    pub(crate) fn waited(self, since: Instant) -> Self {
        match self {
            Self::Timeout(_) => Self::Timeout(since.elapsed()),
            other => other,
        }
    }

    /// What the error means for what comes next. The one place where errors are told apart.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Device(e) => e.class,
            Self::Transfer { cause, .. } => cause.class(),
            Self::Capturing { .. } => ErrorClass::Capture,
            Self::Internal(_) => ErrorClass::DeviceLost,
            Self::Exhausted { .. }
            | Self::OverCapacity { .. }
            | Self::QueueFull { .. }
            | Self::Timeout(_)
            | Self::OutOfMemory { .. }
            | Self::MemLock { .. } => ErrorClass::Transient,
            _ => ErrorClass::Argument,
        }
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.class() == ErrorClass::Transient
    }

    /// Whether the device is gone for good.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        matches!(self.class(), ErrorClass::DeviceLost | ErrorClass::Shutdown)
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

/// A refused submit: the error, and the buffer when nothing had been handed to the driver yet. (From
/// [`InFlight::wait_timeout`](crate::InFlight::wait_timeout): the error, and after a
/// timeout the handle.)
///
/// With `buffer: None` the driver was called and its answer leaves open whether the device still uses the buffer:
/// the segment goes back to the pool by itself once a later event on that stream is seen complete.
pub struct SubmitError<B> {
    /// What went wrong.
    pub error: Error,
    /// The buffer, if the device cannot be using it.
    pub buffer: Option<B>,
}

impl<B> SubmitError<B> {
    pub(crate) fn refused(error: Error, buffer: B) -> Self {
        Self { error, buffer: Some(buffer) }
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

/// Memory of the caller's was not registered, by [`Pool::adopt`](crate::Pool::adopt) or
/// [`Device::register`](crate::Device::register): the error, and the memory as it was.
pub struct RegisterError<T> {
    /// What went wrong.
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

/// What to do about something that could not be written. It may be a file that was complete before and still is, so
/// nobody is told to remove anything.
fn advice(kind: std::io::ErrorKind) -> &'static str {
    use std::io::ErrorKind;
    match kind {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "; what it has of this is incomplete, make room and write it again"
        }
        _ => "; what it has of this is incomplete",
    }
}

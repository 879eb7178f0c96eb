//! All errors of the crate, in one type.
//!
//! A message names the cause, whose it is, how much, and the remedy. Text from a file, a driver or
//! the system is kept in the fields as it was; the message has it through `shown`, escaped and cut
//! to a bounded length ([`crate::escape`]). A test checks this for every variant.

use std::fmt;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::amount::{Amount, amount};
use crate::escape::text as shown;

/// A result whose error is this crate's [`Error`], unless another is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What an error means for what the caller may do next: [`Error::class`].
///
/// An HTTP server answers [`Transient`](Self::Transient), [`Closed`](Self::Closed) and
/// [`DriverShutdown`](Self::DriverShutdown) by 503, [`Cancelled`](Self::Cancelled) by 499 and the
/// others by 500. Where the length was its client's, it answers [`Error::ZeroLength`] by 400 and
/// [`Error::TooLong`] by 413.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// This call cannot succeed as it was made, and nothing else is affected. The mistake is mostly
    /// the server's own and not its client's.
    Argument,
    /// The stream is being captured into a graph: the call may succeed outside of the capture.
    Capture,
    /// A condition that may pass: the same call may succeed later.
    Transient,
    /// The program has [shut the pool down](crate::Pool::shutdown): further calls fail so.
    Closed,
    /// The program has cancelled this transfer, which may be started again.
    Cancelled,
    /// The device (or the stream, after [`Error::Internal`]) cannot be used until the process ends.
    /// Everything in flight there is quarantined, and later calls fail at once.
    DeviceLost,
    /// The driver is shutting down, since the process ends. Memory is leaked and not touched.
    DriverShutdown,
}

impl ErrorClass {
    /// The class in one word, as metrics and spans have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Argument => "argument",
            Self::Capture => "capture",
            Self::Transient => "transient",
            Self::Closed => "closed",
            Self::Cancelled => "cancelled",
            Self::DeviceLost => "device_lost",
            Self::DriverShutdown => "driver_shutdown",
        }
    }
}

/// A driver call that failed: [`Error::Device`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {call} failed with {code} ({}){}", shown(device), shown(text), outlook(*class))]
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

/// Every error of the crate. The message names the cause and the remedy.
///
/// ```
/// use pinpool::{Device, Error, ErrorClass, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let all = pool.checkout(900 << 10)?;
/// match pool.try_checkout(500_000) {
///     Err(Error::Exhausted(shortage)) => assert!(shortage.largest < 500_000, "{shortage}"),
///     Err(error) if error.class() == ErrorClass::DeviceLost => panic!("restart the process: {error}"),
///     other => drop(other?),
/// }
/// # drop(all);
/// # Ok::<(), pinpool::Error>(())
/// ```
///
/// The message of each has the remedy. A server answers by [`class`](Self::class): the page of
/// [`ErrorClass`] has the HTTP statuses.
///
/// The sections below have what many calls share; a call names only what is particular to it.
///
/// # Every call
/// [`Forked`](Self::Forked) in a child whose parent had opened a device; [`Device`](Self::Device)
/// with what the driver says; after a loss, the error with which the stream or device was lost.
///
/// # Opening a device
/// [`Unavailable`](Self::Unavailable) for a name or number that no device has, and without a usable
/// driver or device.
///
/// # Devices of one family
/// The modules `cuda`, `acl`, `host` and `cudarc` refuse another family's devices and streams as
/// [`Unsupported`](Self::Unsupported).
///
/// # Checkouts
/// - [`ZeroLength`](Self::ZeroLength), [`TooLong`](Self::TooLong), [`Closed`](Self::Closed), and
///   [`Argument`](Self::Argument) for an alignment.
/// - [`Impossible`](Self::Impossible), or the error that made growing fail, if no wait can help.
/// - [`QueueFull`](Self::QueueFull) and, at a deadline, [`Timeout`](Self::Timeout).
/// - [`Exhausted`](Self::Exhausted) in place of a wait that could never end: on a thread of the
///   crate, in a waker, and in the drop of a value that was given to the crate.
///
/// # Copies
/// A stream refuses a copy before the driver is called, and gives the buffer back:
/// [`Argument`](Self::Argument) for an empty range and for one that leaves the memory,
/// [`TooSmall`](Self::TooSmall), [`Mismatch`](Self::Mismatch) for memory, a pool or a thread that
/// is not the stream's, [`Unsupported`](Self::Unsupported) for a target that was registered for
/// reading only, [`Capturing`](Self::Capturing), a lost device. After an error of the driver the
/// buffer returns to its pool by itself, when the device is known to be done ([`SubmitError`]).
///
/// # Waits
/// The error with which the stream was lost; a buffer is then quarantined.
/// [`Capturing`](Self::Capturing) if completion cannot be known before a capture of the stream
/// ends. [`Unsupported`](Self::Unsupported) for a quarantined buffer, and where a wait could never
/// end: in a waker, and for a transfer on any thread of the crate, as in a source or a sink.
///
/// # Transfers
/// - Before anything is copied, with what was given: as for [copies](#copies); where a call names
///   many, inside of a [`Piece`](Self::Piece).
/// - Later: [`Read`](Self::Read), [`Write`](Self::Write), and what the pool or the device said,
///   inside of [`Transfer`](Self::Transfer) where a source, a sink or a slice is copied.
/// - [`Timeout`](Self::Timeout) after the [copier's deadline](crate::Copier::with_timeout),
///   [`Cancelled`](Self::Cancelled) after a cancel that came in time.
/// - [`Unsupported`](Self::Unsupported) as for [waits](#waits); a transfer that was begun goes on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer, or device memory, of length zero was asked for.
    #[error("0 bytes were asked for; ask for at least 1")]
    ZeroLength,
    /// An argument or a setting is refused. The text names it, and says which values do.
    #[error("{}", shown(.0))]
    Argument(String),
    /// No segment of this pool can be so long. A segment takes 32 bytes more of the pool than it
    /// gives. See [`PoolBuilder::capacity`](crate::PoolBuilder::capacity) and
    /// [`extent`](crate::PoolBuilder::extent).
    #[error(
        "{} are more than one segment can hold ({}; it needs 32 bytes more than it holds); raise the capacity, \
         configure larger extents, or split the request", amount(*len), amount(*largest)
    )]
    TooLong {
        /// Bytes asked for.
        len: usize,
        /// The largest length that the pool's capacity and extents can ever serve.
        largest: usize,
    },
    /// The target is smaller than what was to be copied or written.
    #[error("{need} bytes do not fit into {have}")]
    TooSmall {
        /// Bytes needed.
        need: usize,
        /// Bytes that the target has.
        have: usize,
    },
    /// Something was used with another device, context, thread or stream. No copy crosses devices.
    #[error(
        "{what} of {} cannot be used with {}: {remedy}",
        if of == with { format!("another opening of {}", shown(of)).into() } else { shown(of) }, shown(with)
    )]
    Mismatch {
        /// What cannot be used there.
        what: &'static str,
        /// Whose it is; for a pool, the devices that it serves, with commas.
        of: String,
        /// What it was to be used with.
        with: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The stream is being captured into a graph. Nothing was submitted: the capture is as it was.
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
    /// No device has this name, or a driver, a device or a thread is missing.
    /// `pinpool doctor --device NAME` tells more.
    #[error("device {} is not available: {}", shown(device), shown(why))]
    Unavailable {
        /// The device.
        device: String,
        /// The cause and the remedy.
        why: String,
    },
    /// This platform, device or thread cannot do it; the text says why, and what to do instead.
    #[error("unsupported: {}", shown(.0))]
    Unsupported(String),
    /// The memlock limit refuses the pages: raise it. See also
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
    /// The system has no memory for a region, a plain buffer, or a file's header: free some, or
    /// choose a smaller capacity.
    #[error("the system refused {}: {}", amount(*wanted), shown(text))]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// The system's text.
        text: String,
    },
    /// The pool has no room now. [`Pool::stuck`](crate::Pool::stuck) lists what is out.
    #[error("no room now in the {_0}; {}, or raise the capacity", remedy(_0))]
    Exhausted(Box<Shortage>),
    /// [`PoolBuilder::max_waiting`](crate::PoolBuilder::max_waiting) requests wait for the pool's
    /// memory, so this one did not join them. A server answers that it is busy.
    #[error(
        "{limit} requests wait for the pool's memory, as many as PoolBuilder::max_waiting allows; try again later, or \
         raise that or the capacity"
    )]
    QueueFull {
        /// The most requests that may wait at a time.
        limit: usize,
    },
    /// The deadline passed before the wait was over.
    #[error("timed out after {0}")]
    Timeout(Waited),
    /// Waiting cannot help: the capacity is too small, or quarantined bytes are in the way. Raise
    /// the capacity, or ask for less.
    #[error(
        "no amount of waiting makes room for {} within a capacity of {}{}; raise the capacity, or ask for less at once",
        amount(*len), amount(*capacity), of_which_quarantined(*quarantined)
    )]
    Impossible {
        /// Bytes asked for.
        len: usize,
        /// Bytes that are never used again.
        quarantined: usize,
        /// Bytes that the pool may hold.
        capacity: usize,
    },
    /// The pool was [shut down](crate::Pool::shutdown), or its last handle was dropped.
    #[error("the pool is shut down; build another one")]
    Closed,
    /// The transfer was cancelled before its end, and its target is incomplete.
    #[error(
        "the transfer of {} was cancelled after {} of {}; start it again for all of it",
        shown(what), Amount(*done), Amount(*total)
    )]
    Cancelled {
        /// The file, or the name of another source or target.
        what: String,
        /// Bytes whose copies were complete.
        done: u64,
        /// Bytes that were to be moved.
        total: u64,
    },
    /// In a fork's child whose parent had begun to open a device nothing of this crate can be used.
    #[error(
        "this process was forked from one that had opened a device, and can use none: fork before the first device is \
         opened, or start another program"
    )]
    Forked,
    /// The source of a transfer could not be read, or has become shorter
    /// ([`UnexpectedEof`](ErrorKind::UnexpectedEof)). The bytes before
    /// [`Progress::landed_to`](crate::copier::Progress::landed_to) have arrived. With too many
    /// files open, the kind is [`QuotaExceeded`](ErrorKind::QuotaExceeded): transient.
    #[error("{} cannot be read at offset {offset}: {}", shown(what), shown(text))]
    Read {
        /// The file, or the name of another source.
        what: String,
        /// The offset that was read, in bytes.
        offset: u64,
        /// The system's kind of error.
        kind: ErrorKind,
        /// The system's text.
        text: String,
    },
    /// The target of a transfer could not be written; what it has of this transfer is incomplete.
    #[error(
        "{} cannot be written at offset {offset}: {}; what it has of this is incomplete, make room or mend the cause, \
         and write it again",
        shown(what),
        shown(text)
    )]
    Write {
        /// The file, or the name of another target.
        what: String,
        /// The offset that was written, in bytes.
        offset: u64,
        /// The system's kind of error.
        kind: ErrorKind,
        /// The system's text.
        text: String,
    },
    /// A file contradicts itself, or was written to since it was opened. Get it again.
    #[error(
        "{} is refused: {}{}", shown(what),
        .tensor.as_ref().map_or_else(String::new, |name| format!("tensor \"{}\" ", shown(name))), shown(why)
    )]
    Malformed {
        /// The file.
        what: String,
        /// The tensor that the fault is in, if any: its name, escaped and cut to 200 characters.
        tensor: Option<Box<str>>,
        /// The cause and the remedy.
        why: String,
    },
    /// One of many pieces, buffers or blocks of a call cannot be copied, so nothing was copied.
    #[error("piece {piece} ({memory} bytes of device memory): {cause}")]
    Piece {
        /// The piece's number in the call, from 0.
        piece: usize,
        /// Bytes of the device memory that was named for the piece.
        memory: usize,
        /// What is wrong with the piece.
        cause: Box<Error>,
    },
    /// A chunk of a transfer failed on its way to or from the device.
    #[error("the transfer of {} failed at offset {offset}: {cause}", shown(what))]
    Transfer {
        /// The file, or the name of another source or target.
        what: String,
        /// The offset where the chunk starts, in bytes.
        offset: u64,
        /// The error of the chunk.
        cause: Box<Error>,
    },
    /// A transfer failed: this tensor is not on the device, and those behind it in the load may not
    /// be.
    #[error(
        "tensor \"{}\" is not on the device ({landed} of {total} tensors are, those before it): {cause}",
        shown(tensor)
    )]
    Tensor {
        /// The tensor's name, escaped and cut to 200 characters.
        tensor: Box<str>,
        /// Tensors that are on the device: those before this one, in the order of the load.
        landed: usize,
        /// Tensors that were to be loaded.
        total: usize,
        /// The error of the transfer, with the file and the offset.
        cause: Box<Error>,
    },
    /// A driver call failed. [`DeviceError::class`] says whether the device can still be used.
    #[error("{0}")]
    Device(DeviceError),
    /// A mistake in this crate; the text says where. What was in flight there is quarantined.
    /// Report it, and restart the process.
    #[error(
        "a mistake in pinpool: {0}; what was in flight there is quarantined; report it with the log's lines before it"
    )]
    Internal(&'static str),
}

/// Why a pool did not serve a request: what there was at that moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// The pool's name.
    pub pool: String,
    /// Bytes asked for.
    pub requested: usize,
    /// Free bytes, withheld ones included, without the bytes that other threads have cached.
    pub free: usize,
    /// The longest range of free memory that is not withheld, in bytes.
    pub largest: usize,
    /// The free bytes that are withheld for waiting requests.
    pub withheld: usize,
    /// The bytes of the largest request that they are withheld for.
    pub withheld_for: usize,
    /// Bytes that the pool may hold.
    pub capacity: usize,
    /// Requests that wait, this one not counted.
    pub waiting: usize,
    /// Why the pool did not grow, where it tried last and failed.
    pub growth: Option<Box<Error>>,
    /// The bytes that the capacity has left for more memory, where memory was to be adopted.
    pub room: Option<usize>,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [asked, free, largest] = [self.requested, self.free, self.largest].map(amount);
        let (pool, capacity) = (shown(&self.pool), amount(self.capacity));
        write!(
            f,
            "pool {pool}: {asked} asked for, {free} free, {largest} in one piece, capacity {capacity}"
        )?;
        if self.withheld > 0 {
            let [withheld, asked] = [self.withheld, self.withheld_for].map(amount);
            write!(f, ", {withheld} withheld for a request of {asked} that waits")?;
        }
        match self.waiting {
            0 => {}
            1 => write!(f, ", 1 other request waits")?,
            n => write!(f, ", {n} other requests wait")?,
        }
        self.growth.iter().try_for_each(|error| write!(f, "; growing failed: {error}"))
    }
}

/// How long a call waited in vain, and for what: the field of [`Error::Timeout`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waited {
    /// The time waited: no less than the call was told to wait.
    pub time: Duration,
    /// The transfer that timed out, how far it had come, and what it waited for, as a text.
    pub transfer: Option<Box<str>>,
    /// The pool that was waited for, if any, and what there was in it.
    pub shortage: Option<Box<Shortage>>,
}

impl From<Duration> for Waited {
    fn from(time: Duration) -> Self {
        Self { time, transfer: None, shortage: None }
    }
}

impl fmt::Display for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.time)?;
        if let Some(transfer) = &self.transfer {
            write!(f, ": {}", shown(transfer))?;
        }
        let Some(shortage) = &self.shortage else { return Ok(()) };
        write!(f, " ({shortage}); wait longer, return buffers, or raise the capacity")
    }
}

impl Error {
    #[cold]
    pub(crate) fn empty() -> Self {
        Self::Argument("nothing to copy: the range, or the list, is empty; name at least one byte".into())
    }

    #[cold]
    pub(crate) fn out_of_range(start: usize, end: usize, len: usize) -> Self {
        let wrong = if start > end { "ends before it begins, in" } else { "is outside of" };
        Self::Argument(format!("range {start}..{end} {wrong} {len} bytes"))
    }

    #[cold]
    pub(crate) fn wrong_memory(of: &str, with: &str) -> Self {
        let remedy =
            "copy by a stream or a copier of the memory's device; between devices, by way of the host";
        Self::Mismatch { what: "device memory", of: of.into(), with: with.into(), remedy }
    }

    #[cold]
    pub(crate) fn wrong_stream(of: &str, with: &str) -> Self {
        let remedy = "only streams and transfers of one device are ordered; wait on the host";
        Self::Mismatch { what: "a stream", of: of.into(), with: with.into(), remedy }
    }

    #[cold]
    #[cfg(any(feature = "acl", feature = "cuda"))]
    pub(crate) fn wrong_context(with: &str) -> Self {
        let remedy = "adopt it with the device of its own context (adopt_context of the module cuda or acl)";
        Self::Mismatch { what: "a stream", of: "another context".into(), with: with.into(), remedy }
    }

    /// [`TooSmall`](Self::TooSmall), unless `need` bytes fit into `have`.
    #[inline]
    pub(crate) fn unless_fits(need: usize, have: usize) -> Result<()> {
        if need <= have { Ok(()) } else { Err(Self::TooSmall { need, have }) }
    }

    /// This error as that of one of many pieces, with the length of the piece's device memory.
    #[cold]
    pub(crate) fn of_piece(self, piece: usize, memory: usize) -> Self {
        // The device is lost for all of them.
        if self.class() != ErrorClass::Argument {
            return self;
        }
        Self::Piece { piece, memory, cause: self.into() }
    }

    /// This error as that of the chunk of a transfer that begins at `offset`.
    #[cold]
    pub(crate) fn of_transfer(self, what: &str, offset: u64) -> Self {
        Self::Transfer { what: what.into(), offset, cause: self.into() }
    }

    /// Adds the pool's name where the error tells of a shortage.
    pub(crate) fn of_pool(mut self, name: &str) -> Self {
        let shortage = match &mut self {
            Self::Exhausted(shortage) => Some(shortage),
            Self::Timeout(waited) => waited.shortage.as_mut(),
            _ => None,
        };
        if let Some(shortage) = shortage {
            shortage.pool = name.to_owned();
        }
        self
    }

    /// [`Unavailable`](Self::Unavailable) for an error that may begin with the device's name.
    #[cfg(any(feature = "acl", feature = "cuda"))]
    pub(crate) fn unavailable(device: &str, why: &Self) -> Self {
        let why = crate::escape::unnamed(&why.to_string(), device).to_owned();
        Self::Unavailable { device: device.to_owned(), why }
    }

    /// Sets a timeout's time since the whole call began: the last wait knows its own alone.
    pub(crate) fn waited(mut self, since: Instant) -> Self {
        if let Self::Timeout(waited) = &mut self {
            waited.time = since.elapsed();
        }
        self
    }

    /// What the error means for what the caller may do next.
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
            Self::Exhausted(_)
            | Self::QueueFull { .. }
            | Self::Timeout(_)
            | Self::OutOfMemory { .. }
            | Self::MemLock { .. } => ErrorClass::Transient,
            // Too many files are open.
            Self::Read { kind: ErrorKind::QuotaExceeded, .. } => ErrorClass::Transient,
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
            Error::Timeout(_) => ErrorKind::TimedOut,
            Error::OutOfMemory { .. } | Error::MemLock { .. } | Error::Exhausted(_) => ErrorKind::OutOfMemory,
            Error::Unsupported(_) => ErrorKind::Unsupported,
            Error::TooSmall { .. } => ErrorKind::WriteZero,
            _ => ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

/// The error of a call that was given a buffer or memory, and what it was given, if the device
/// cannot be using it. (Of [`InFlight::wait_timeout`](crate::InFlight::wait_timeout): the handle,
/// after a timeout or in a capture.)
///
/// `buffer: None`: the driver was called and may still use the buffer. A pool's segment returns by
/// itself once a later event on that stream is seen complete. Memory to be registered is leaked.
///
/// ```
/// # use pinpool::{Device, Error, Pool, Unpinned};
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
/// # let (stream, memory) = (device.stream()?, device.alloc(4096)?);
/// let empty = pool.checkout(4096)?; // nothing is written to it
/// let refused = stream.upload(empty, &memory).expect_err("there is nothing to copy");
/// let mut buf = refused.buffer.expect("the driver was not called");
/// buf.extend_from_slice(b"hello");
/// stream.upload(buf, &memory)?.wait()?; // `?` makes an `Error` of it, and drops the buffer
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct SubmitError<B> {
    /// The error.
    #[source]
    pub error: Error,
    /// The buffer or the memory, if the device cannot be using it.
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
        let Self { error, buffer } = self;
        f.debug_struct("SubmitError").field("error", error).field("buffer", &buffer.is_some()).finish()
    }
}

impl<B> From<SubmitError<B>> for Error {
    fn from(e: SubmitError<B>) -> Self {
        e.error
    }
}

fn outlook(class: ErrorClass) -> &'static str {
    match class {
        ErrorClass::Argument | ErrorClass::Closed | ErrorClass::Cancelled => "",
        ErrorClass::Capture => "; the stream is being captured, submit outside the capture",
        ErrorClass::Transient => "; the call may succeed later",
        ErrorClass::DeviceLost => "; the device is lost until the process ends, open another one",
        ErrorClass::DriverShutdown => "; the driver is shutting down",
    }
}

fn remedy(shortage: &Shortage) -> String {
    match shortage.room {
        None => "wait, return buffers".into(),
        Some(room) => format!("{} are left for memory to adopt; trim the pool", amount(room)),
    }
}

fn of_which_quarantined(bytes: usize) -> String {
    if bytes == 0 { String::new() } else { format!(", of which {} are quarantined", amount(bytes)) }
}

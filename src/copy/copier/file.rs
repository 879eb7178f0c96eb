//! Files as sources and sinks.
//!
//! [`Reading`] says which bytes are read past the page cache, straight into a segment, so that
//! loading a model does not push everything else out of memory. Ordinary reads bring the rest. No
//! file is read through a map: the process would die if it became shorter.

use std::any::Any;
use std::borrow::Cow;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::source::{Fill, Sink, Source, leaves, length, read_error, shrunk, write_error};
use super::types::Counters;
use crate::buffer::PinnedBuf;
#[allow(unused_imports, reason = "named in the pages")]
use crate::error::{Error, Result};
use crate::escape::text;
use crate::os::file::{Cached, appends, cached, is_direct, read_at, reopen_direct};
use crate::segment::PAGE;

/// Of a partly cached chunk, stretches of this length are read from the cache if they are there.
const STRETCH: usize = 256 << 10;

/// How a file is read: [`FileSource::reading`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reading {
    /// Bytes in the page cache are read from there; the rest is read once, past the cache, which
    /// stays as it is. Linux tells what is cached to processes that own the file or may write to
    /// it; else this is [`Buffered`](Self::Buffered).
    #[default]
    Auto,
    /// Bytes are read in the ordinary way, through the page cache, which has them afterwards.
    Buffered,
    /// Bytes are read past the page cache (`O_DIRECT`), or as `Buffered` where that is refused.
    Direct,
}

/// A file, or a part of one, as the source of an upload. A [`CopyRange`](super::CopyRange) and
/// errors have the file's own offsets. A source that wraps one counts from the first byte of its
/// [range](Self::range).
///
/// # Files that change meanwhile
/// The length is taken when the source is made; what is appended later is not read. A file that is
/// replaced by a rename over its name is read as it was. One that has become shorter is an
/// [`Error::Read`]. Anything else goes unnoticed: of a file that is written to in place meanwhile,
/// the device gets old bytes here and new ones there. Where another process may write, compare
/// checksums, or [`Metadata::modified`] before and after, as the crate `pinpool-safetensors` does.
#[derive(Debug)]
pub struct FileSource {
    file: Arc<File>,
    /// For reading past the cache, if that can be had.
    direct: OnceLock<Option<File>>,
    name: String,
    /// Bytes that the file had when it was opened.
    whole: u64,
    range: Range<u64>,
    reading: Reading,
}

impl FileSource {
    /// Opens a file. A named pipe is not waited for.
    ///
    /// # Errors
    /// [`Error::Read`] at offset 0 with what the system says; and as for [`new`](Self::new).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display().to_string();
        // Before it is opened: opening a named pipe would wait for a writer.
        Self::whole(&name, std::fs::metadata(path))?;
        let file = File::open(path).map_err(|error| read_error(&name, 0, &error))?;
        Self::new(file, name)
    }

    /// All of a file that is open for reading; `name` is for errors. It is opened without
    /// `O_DIRECT`, which reads whole blocks only: [`reading`](Self::reading) says what is read past
    /// the page cache.
    ///
    /// # Errors
    /// [`Error::Read`] at offset 0 for a folder, for `O_DIRECT`, and where the length cannot be
    /// had. Pipes, sockets and devices have none: they are for
    /// [`Copier::upload_read`](super::Copier::upload_read). (A regular file may be empty.)
    pub fn new(file: impl Into<Arc<File>>, name: impl Into<String>) -> Result<Self> {
        let (file, name) = (file.into(), name.into());
        let whole = Self::whole(&name, file.metadata())?;
        if is_direct(&file) {
            let text = "it was opened with O_DIRECT; open it without, and say Reading::Direct";
            return Err(read_error(&name, 0, &io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        Ok(Self { file, direct: OnceLock::new(), name, whole, range: 0..whole, reading: Reading::Auto })
    }

    /// Bytes that a file has.
    fn whole(name: &str, metadata: io::Result<Metadata>) -> Result<u64> {
        let metadata = metadata.map_err(|error| read_error(name, 0, &error))?;
        let (kind, text) = match metadata.len() {
            _ if metadata.is_dir() => (io::ErrorKind::IsADirectory, "it is a folder; name a file in it"),
            0 if !metadata.is_file() => {
                (io::ErrorKind::InvalidInput, "it is no regular file and has no length; use upload_read")
            }
            len => return Ok(len),
        };
        Err(read_error(name, 0, &io::Error::new(kind, text)))
    }

    /// Uploads only this range of the file. A [`CopyRange`](super::CopyRange) must lie within it.
    /// Called again it names another range, anywhere in the file.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range that leaves the file as it was opened.
    pub fn range(mut self, range: Range<u64>) -> Result<Self> {
        if range.start > range.end || range.end > self.whole {
            return Err(leaves(range.start, range.end, self.whole));
        }
        self.range = range;
        Ok(self)
    }

    /// How the file is read. Default: [`Reading::Auto`].
    #[must_use]
    pub fn reading(mut self, reading: Reading) -> Self {
        self.reading = reading;
        self
    }

    /// Bytes of the range, which is the whole file unless a part was named.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether the range is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The open file, as a number that sources of the same one have in common.
    pub(super) fn identity(&self) -> usize {
        Arc::as_ptr(&self.file).addr()
    }

    /// Reads `len` bytes from `at` on into an empty buffer with room for two pages more. The buffer
    /// begins with the page of `at`, so that any page can be read straight to its place.
    pub(super) fn read(&self, at: u64, len: usize, buf: &mut PinnedBuf, counters: &Counters) -> Result<()> {
        let lead = (at % PAGE as u64) as usize;
        let (start, end) = (at - lead as u64, lead + len);
        while buf.len() < end {
            let (is_cached, until) = self.stretch(start, buf.len(), end);
            let is_direct = is_cached == Some(false) || self.reading == Reading::Direct;
            let (before, direct) =
                (buf.len(), || reopen_direct(&self.file).map_err(|error| self.not_direct(&error)).ok());
            if let Some(direct) = if is_direct { self.direct.get_or_init(direct) } else { &None } {
                read_on(direct, start, until, PAGE, buf).unwrap_or_else(|error| self.not_direct(&error));
            }
            // What is left, which is all of it or what the other way could not read.
            let between = buf.len();
            let said = read_on(&self.file, start, until, 1, buf);
            // The bytes before `at` are nobody's.
            let [before, between, have] = [before, between, buf.len()].map(|have| have.max(lead) as u64);
            let mut stats = counters.lock();
            stats.direct_bytes += between - before;
            *match is_cached {
                Some(true) => &mut stats.cached_bytes,
                _ => &mut stats.buffered_bytes,
            } += have - between;
            drop(stats);
            let there = start + have;
            said.map_err(|error| read_error(&self.name, there, &error))?;
            if buf.len() < until {
                // Where it ends now, which may be far before this.
                let end = self.file.metadata().map_or(there, |m| m.len().min(there));
                return Err(shrunk(self.name.clone(), end, self.range.end));
            }
        }
        Ok(())
    }

    /// How far bytes are read in one way, from `have` on: whether the page cache has them, if that
    /// counts and is told. `start` is the file's offset of the buffer's first byte.
    fn stretch(&self, start: u64, have: usize, end: usize) -> (Option<bool>, usize) {
        let ask = |from: usize, to: usize| cached(&self.file, start + from as u64, to - from);
        let told = if self.reading == Reading::Auto { ask(have, end) } else { None };
        if told != Some(Cached::Part) {
            return (told.map(|told| told == Cached::All), end);
        }
        let next = |from: usize| ((from / STRETCH + 1) * STRETCH).min(end);
        let is_cached = |from: usize| ask(from, next(from)) == Some(Cached::All);
        let (first, mut until) = (is_cached(have), next(have));
        while until < end && is_cached(until) == first {
            until = next(until);
        }
        (Some(first), until)
    }

    /// Reading past the cache was refused: ordinary reads take its place.
    fn not_direct(&self, error: &io::Error) {
        let file = &*text(&self.name);
        crate::foreign::debug!(target: "pinpool::copier", file, %error, "not read past the page cache");
    }
}

impl Source for FileSource {
    fn len(&self) -> u64 {
        Self::len(self)
    }

    fn name(&self) -> Cow<'_, str> {
        (&*self.name).into()
    }

    /// Reads in the ordinary way, never behind the range; `offset` counts from its first byte. (A
    /// copier that is given the file itself reads it as [`reading`](Self::reading) says.)
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        let first = self.range.start.saturating_add(offset);
        loop {
            let at = first.saturating_add(into.filled() as u64);
            let left = usize::try_from(self.range.end.saturating_sub(at)).unwrap_or(usize::MAX);
            let most = into.remaining().min(left);
            if most == 0 {
                return Ok(());
            }
            match read_at(&self.file, &mut into.spare()[..most], at)? {
                0 => return Ok(()),
                // SAFETY: the kernel has just put `read` bytes at the front.
                read => unsafe { into.advance(read) },
            }
        }
    }
}

/// The file, of a source that is one.
pub(super) fn file_of(source: &impl Source) -> Option<&FileSource> {
    (source as &dyn Any).downcast_ref()
}

/// The offsets of a source: of a file its own.
pub(super) fn bounds(source: &impl Source) -> Result<Range<u64>> {
    match file_of(source) {
        Some(file) => Ok(file.range.clone()),
        None => length(source).map(|len| 0..len),
    }
}

/// Reads until the buffer has `until` bytes, the file ends or an error comes. The buffer's first
/// byte is the file's at `start`. Each read begins and ends on a multiple of `unit`.
fn read_on(file: &File, start: u64, until: usize, unit: usize, buf: &mut PinnedBuf) -> io::Result<()> {
    while buf.len() < until && buf.len() % unit == 0 {
        let have = buf.len();
        let left = until - have;
        let spare = &mut buf.spare_capacity_mut()[..left.next_multiple_of(unit)];
        let read = read_at(file, spare, start + have as u64)?.min(left);
        if read == 0 {
            break;
        }
        // SAFETY: the kernel has just put `read` bytes at the front of the spare capacity.
        unsafe { buf.set_len(have + read) };
    }
    Ok(())
}

/// A file as the sink of a download, from an offset on. Pipes and sockets have no offsets: they are
/// for [`Copier::download_write`](super::Copier::download_write).
///
/// At the end of a download any process that reads the file finds all bytes. They are in the page
/// cache and not yet on the disk. File systems that look for room only later (NFS, some quotas)
/// report to [`sync`](Self::sync) that there is none.
#[derive(Debug)]
pub struct FileSink {
    file: Arc<File>,
    name: String,
    start: u64,
}

impl FileSink {
    /// Makes a file, or empties the one that there is.
    ///
    /// # Errors
    /// [`Error::Write`] at offset 0 with what the system says.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let file = File::create(path).map_err(|error| write_error(&name, 0, &error))?;
        Ok(Self::new(file, name))
    }

    /// A file that is open for writing; `name` is for errors. A download to one that was opened for
    /// appending, where the system puts all bytes at the end (pwrite(2), "BUGS"), ends with
    /// [`Error::Write`] before a byte is written.
    pub fn new(file: impl Into<Arc<File>>, name: impl Into<String>) -> Self {
        Self { file: file.into(), name: name.into(), start: 0 }
    }

    /// Where in the file the first byte goes. Default: its start. Errors tell the file's offsets.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Self {
        self.start = offset;
        self
    }

    /// Waits until all that was written to the file is on the disk (fsync(2)). A new file survives
    /// a crash only if its folder is synced, too.
    ///
    /// # Errors
    /// [`Error::Write`] at the sink's start. Then any byte may be missing, and trying again does
    /// not tell (fsync(2), "NOTES"): write all of it again.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|error| write_error(&self.name, self.start, &error))
    }

    /// What the system says, with the remedy where it lies in how the file was opened.
    fn refused(&self, error: io::Error) -> io::Error {
        let text = match error.kind() {
            io::ErrorKind::InvalidInput if is_direct(&self.file) => {
                "it was opened with O_DIRECT, and takes whole blocks only; open it without O_DIRECT"
            }
            io::ErrorKind::NotSeekable => {
                "it is a pipe or a socket, which has no offsets; use download_write"
            }
            _ if error.raw_os_error() == Some(libc::EBADF) => "it is not open for writing",
            _ => return error,
        };
        io::Error::new(error.kind(), text)
    }
}

impl Sink for FileSink {
    fn name(&self) -> Cow<'_, str> {
        (&*self.name).into()
    }

    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = |at: u64| at.checked_add(bytes.len() as u64).filter(|end| i64::try_from(*end).is_ok());
        let text = match self.start.checked_add(offset).filter(|at| end(*at).is_some()) {
            None => "no file has such an offset",
            // Asked each time, which costs nothing beside the writing: any process that shares the
            // open file can change it.
            Some(_) if appends(&self.file) => {
                "it was opened for appending, where offsets do not count; open it for writing"
            }
            Some(at) => return self.file.write_all_at(bytes, at).map_err(|error| self.refused(error)),
        };
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }
}

/// Where a sink's bytes lie in what is written, for errors: those of a file at its own offsets.
pub(super) fn lies_at(sink: &impl Sink, offset: u64) -> u64 {
    let file: Option<&FileSink> = (sink as &dyn Any).downcast_ref();
    file.map_or(offset, |file| file.start.saturating_add(offset))
}

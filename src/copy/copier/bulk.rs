//! The calls for sources, files and sinks.

use std::ptr::NonNull;

use super::Copier;
use super::file::FileSource;
use super::job::Job;
use super::pieces::{Borrowed, Piece as Place, Survey};
use super::ranges::{Blob, FromFile, FromSource, Piece, Ranges, Storage, ToSink};
use super::source::{self, Sink, Source};
use super::transfer::Transfer;
use super::types::Direction;
use crate::copy::DeviceRange;
#[allow(unused_imports, reason = "named in the pages")]
use crate::error::{Error, Result, SubmitError};

/// Shorter vectors are not worth huge pages.
const HUGE: usize = 4 << 20;

impl Copier {
    // --- to the device -----------------------------------------------------------------------------------------------

    /// Copies all of a source to the front of `dst`. Goes on by itself: see [`Transfer`].
    ///
    /// # Errors
    /// With the source: [`Error::Argument`], [`Error::TooSmall`], [`Error::Mismatch`], a bad range, a lost device.
    pub fn upload<S: Source>(&self, source: S, dst: impl DeviceRange) -> Result<Transfer<S>, SubmitError<S>> {
        let target = source::length(&source).and_then(|len| self.target(dst, len));
        let (device, source) = SubmitError::unless(target, source)?;
        self.upload_ranges(source, vec![Piece { at: 0, device }])
    }

    /// Copies ranges of a source to where each belongs.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload), and [`Error::Argument`] for a piece that leaves the source.
    pub fn upload_ranges<S: Source>(
        &self,
        source: S,
        pieces: Vec<Piece>,
    ) -> Result<Transfer<S>, SubmitError<S>> {
        self.run_ranges(Direction::Up, FromSource(source), pieces)
    }

    /// Copies a file, or the range of it that the source names, to the front of `dst`. [`FileSource`] says what becomes
    /// of a file that changes meanwhile.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload).
    #[allow(clippy::result_large_err, reason = "the error carries the source back")]
    pub fn upload_file(
        &self,
        source: FileSource,
        dst: impl DeviceRange,
    ) -> Result<Transfer<FileSource>, SubmitError<FileSource>> {
        let (device, source) = SubmitError::unless(self.target(dst, source.len()), source)?;
        let at = source.start();
        self.upload_file_ranges(source, vec![Piece { at, device }])
    }

    /// Copies ranges of a file, by the file's offsets, to where each belongs. A file of a thousand tensors is one
    /// transfer, read in the file's order; [`Transfer::wait_landed`] tells when the first of them can be used. Ranges
    /// that follow each other on both sides are copied as one.
    ///
    /// # Errors
    /// As for [`upload_ranges`](Self::upload_ranges).
    #[allow(clippy::result_large_err, reason = "the error carries the source back")]
    pub fn upload_file_ranges(
        &self,
        source: FileSource,
        pieces: Vec<Piece>,
    ) -> Result<Transfer<FileSource>, SubmitError<FileSource>> {
        let file = FromFile(source, self.engine().counters.clone());
        self.run_ranges(Direction::Up, file, pieces)
    }

    // --- from the device ---------------------------------------------------------------------------------------------

    /// Copies device memory into a new vector, on huge pages where the system has them: touching memory for the first
    /// time is what takes longest.
    ///
    /// # Errors
    /// As for [`download_slice`](Self::download_slice); [`Error::OutOfMemory`].
    pub fn download_vec(&self, src: impl DeviceRange) -> Result<Vec<u8>> {
        let src = self.own(src)?;
        self.may_block()?;
        let (engine, len) = (self.engine(), src.len());
        let survey = Survey::one(engine, &src, len)?;
        let mut vec = new_vec(len)?;
        let piece = Place::new(vec.as_mut_ptr(), len, &src);
        // SAFETY: the vector's memory, which nothing else uses before the call returns.
        let plan = unsafe { Borrowed::new(1, |_| piece) };
        let start = self.begin(Direction::Down, survey, Some("a new vector".into()));
        // SAFETY: lent until the job is over, which is what the call waits for.
        let job = unsafe { self.lend(start, &plan, Job::is_over) }?;
        // A wait that ended in the child of a fork, before the job did, has written nothing here.
        job.outcome().unwrap_or(Err(Error::Forked))?;
        // SAFETY: the capacity is that much, and the transfer, which has ended well, has written every byte.
        unsafe { vec.set_len(len) };
        Ok(vec)
    }

    /// Copies device memory to a sink. Goes on by itself: see [`Transfer`].
    ///
    /// # Errors
    /// With the sink: [`Error::Mismatch`], a bad range, a lost device.
    pub fn download<S: Sink>(&self, src: impl DeviceRange, sink: S) -> Result<Transfer<S>, SubmitError<S>> {
        let (device, sink) = SubmitError::unless(self.own(src), sink)?;
        self.download_ranges(vec![Piece { at: 0, device }], sink)
    }

    /// Copies ranges of device memory to where in the sink each belongs.
    ///
    /// # Errors
    /// As for [`download`](Self::download).
    pub fn download_ranges<S: Sink>(
        &self,
        pieces: Vec<Piece>,
        sink: S,
    ) -> Result<Transfer<S>, SubmitError<S>> {
        self.run_ranges(Direction::Down, ToSink(sink), pieces)
    }

    /// Starts a job of a source, file or sink.
    fn run_ranges<S: Storage>(
        &self,
        direction: Direction,
        storage: S,
        pieces: Vec<Piece>,
    ) -> Result<Transfer<S::Value>, SubmitError<S::Value>> {
        let mut survey = Survey::default();
        let looked = self.alive().and_then(|()| {
            let ranges = Ranges::new(self.engine(), storage.name(), pieces, &mut survey)?;
            let ranges = ranges.within(storage.bounds()?)?;
            self.workers.start().map(|()| ranges)
        });
        match looked {
            Ok(ranges) => {
                let start = self.begin(direction, survey, Some(ranges.name.clone()));
                Ok(self.run(start, Blob::new(storage, ranges)))
            }
            Err(error) => Err(SubmitError::refused(error, storage.into_value())),
        }
    }
}

/// Memory for a vector of so many bytes, asked for on huge pages, and not touched yet.
fn new_vec(len: usize) -> Result<Vec<u8>> {
    let mut vec: Vec<u8> = Vec::new();
    vec.try_reserve_exact(len).map_err(|e| Error::OutOfMemory { wanted: len, text: e.to_string() })?;
    let (start, page) = (vec.as_mut_ptr(), crate::os::page_size());
    let front = start.align_offset(page);
    if let Some(first) = NonNull::new(start.wrapping_add(front)).filter(|_| len >= HUGE && front < len) {
        crate::os::advise_huge(first, (len - front) / page * page);
    }
    Ok(vec)
}

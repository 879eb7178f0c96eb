//! The calls for sources, files and sinks.

use std::borrow::Cow;
use std::sync::Arc;

use super::Copier;
use super::file::bounds;
use super::job::{Plan, Values};
use super::pieces::Survey;
use super::ranges::{CopyRange, CopyRanges, Ranges, Reads, Writes};
use super::source::{self, Sink, Source};
use super::transfer::Transfer;
use super::types::Direction;
#[allow(unused_imports, reason = "named in the pages")]
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;

impl Copier {
    /// Copies a source to the device: all of it to the front of a [`DeviceRange`](crate::DeviceRange), or ranges of it,
    /// each to its place. Goes on by itself: see [`Transfer`].
    ///
    /// A file of a thousand tensors is one transfer, read in the file's order; [`Transfer::wait_landed`] tells when the
    /// first of them can be used. Ranges that follow each other on both sides are copied as one. The page of
    /// [`FileSource`](super::FileSource) says what becomes of a file that changes meanwhile.
    ///
    /// # Errors
    /// With the source: [`Error::Argument`] for a source without bytes, no range, or a range that leaves the source;
    /// [`Error::TooSmall`], [`Error::Mismatch`], a bad range, a lost device.
    #[allow(clippy::result_large_err, reason = "the error carries the source back")]
    pub fn upload<S: Source>(
        &self,
        source: S,
        places: impl CopyRanges,
    ) -> Result<Transfer<S>, SubmitError<S>> {
        let looked = self.alive().and_then(|()| {
            let bounds = bounds(&source)?;
            let name = source::name("the source", || source.name().into_owned());
            let (survey, ranges) =
                self.survey_ranges(name, places.list(self.device().context(), Some(bounds.clone()), KEY)?)?;
            Ok((survey, ranges.within(bounds)?))
        });
        let ((survey, ranges), source) = SubmitError::unless(looked, source)?;
        let name = ranges.name.clone();
        let plan = Reads::new(source, ranges, self.engine().counters.clone());
        Ok(self.run_named(Direction::Up, survey, name, plan))
    }

    /// Copies device memory to a sink: a [`DeviceRange`](crate::DeviceRange) to its start, or ranges, each to its
    /// offset. Goes on by itself: see [`Transfer`].
    ///
    /// ```
    /// # use pinpool::{Copier, Device, Pool, Unpinned};
    /// # let device = Device::open("host")?;
    /// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
    /// # let (copier, memory) = (Copier::builder(&pool, &device).build()?, device.alloc(1 << 20)?);
    /// # copier.upload(vec![7; 1 << 20], &memory)?.wait()?;
    /// let bytes = copier.download(&memory, Vec::new())?.wait()?;
    /// assert_eq!(bytes, vec![7; 1 << 20]);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    ///
    /// # Errors
    /// With the sink: [`Error::Argument`] for no range; [`Error::Mismatch`], a bad range, a lost device;
    /// [`Error::OutOfMemory`] for a vector.
    pub fn download<S: Sink>(&self, places: impl CopyRanges, sink: S) -> Result<Transfer<S>, SubmitError<S>> {
        let looked = self.alive().and_then(|()| {
            let name = source::name("the target", || sink.name().into_owned());
            self.survey_ranges(name, places.list(self.device().context(), None, KEY)?)
        });
        let ((survey, ranges), sink) = SubmitError::unless(looked, sink)?;
        let name = ranges.name.clone();
        let plan = Writes::new(sink, ranges)?;
        Ok(self.run_named(Direction::Down, survey, name, plan))
    }

    fn survey_ranges(&self, name: Cow<'static, str>, ranges: Vec<CopyRange>) -> Result<(Survey, Ranges)> {
        let mut survey = Survey::default();
        let ranges = Ranges::new(self.engine(), name, ranges, &mut survey)?;
        self.workers.start().map(|()| (survey, ranges))
    }

    fn run_named<T>(
        &self,
        direction: Direction,
        survey: Survey,
        name: Cow<'static, str>,
        plan: impl Plan + Values<Back = T> + 'static,
    ) -> Transfer<T> {
        let named = self.named(direction, survey.bytes, name);
        self.run(self.begin(direction, survey, Some(named)), Arc::new(plan))
    }
}

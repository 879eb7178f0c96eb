//! Copies between two buffers of pools, in a stream's order.
//!
//! For data that the CPU moves after one copy of the device's and before another, while no thread waits: out of
//! a landing buffer into the buffer that feeds the next copy, say.

use std::ops::RangeBounds;

use super::{Landing, OUTSIDE, written};
use crate::buffer::{InFlight, Lend};
use crate::device::Transfer;
use crate::device::memory::bounds;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;
use crate::stream::Stream;

impl Stream {
    /// Copies all that was written to `src` into `landing`, which must be at least as long, in this stream's order:
    /// after what was submitted to it before, and before what is submitted to it later. Both buffers come back in
    /// flight, each by its own handle, and the target's length is then the number of bytes copied.
    ///
    /// Returns when the copy was submitted. The CPU does the work: on a GPU a host function of the stream
    /// (`cuLaunchHostFunc`), which holds the stream up for some 30 us and while it copies, because the driver's own
    /// copies between host memory keep the caller until the stream has come to them (CUDA driver API, "API
    /// synchronization behavior": "fully synchronous with respect to the host").
    ///
    /// # Errors
    /// With both buffers: [`Error::Unwritten`], [`Error::TooSmall`], [`Error::WrongDevice`], [`Error::Capturing`], a lost
    /// device; [`Error::WrongStream`] for a [`StreamBuf`](crate::StreamBuf) of another stream. With `buffer: None` as
    /// for [`upload`](Self::upload).
    #[allow(clippy::type_complexity, reason = "two handles, or both buffers back")]
    pub fn copy_host<B: Lend, L: Landing>(
        &self,
        src: B,
        landing: L,
    ) -> Result<(InFlight<B>, InFlight<L::Landed>), SubmitError<(B, L)>> {
        self.copy_host_part(src, .., landing)
    }

    /// Copies a part of what was written to `src`.
    ///
    /// # Errors
    /// As for [`copy_host`](Self::copy_host), and [`Error::OutOfRange`], [`Error::Empty`].
    #[allow(clippy::type_complexity, reason = "two handles, or both buffers back")]
    pub fn copy_host_part<B: Lend, L: Landing>(
        &self,
        src: B,
        part: impl RangeBounds<usize>,
        mut landing: L,
    ) -> Result<(InFlight<B>, InFlight<L::Landed>), SubmitError<(B, L)>> {
        let checked = (|| {
            self.may_use(&src)?;
            let all = written(&src)?;
            let (start, end) = bounds(part, all.len())?;
            let (dst, capacity) = landing.target(self, KEY)?;
            let len = end - start;
            Error::unless_fits(len, capacity)?;
            self.timeline().usable()?;
            self.timeline().not_capturing("a copy between host buffers", OUTSIDE)?;
            Ok((Transfer::OnHost { src: all[start..end].as_ptr(), dst, len }, len))
        })();
        let ((transfer, len), (src, landing)) = SubmitError::unless(checked, (src, landing))?;
        let (source, mut sent) = match self.begin_from(src, None) {
            Ok(sent) => sent,
            Err(SubmitError { error, buffer }) => {
                return Err(SubmitError { error, buffer: buffer.map(|src| (src, landing)) });
            }
        };
        let unsent = |error| SubmitError { error, buffer: None };
        // After an error the source, entered before the stream was lost, is quarantined with it.
        let (submission, mut landed) = self.begin_into(landing, None, len).map_err(unsent)?;
        // SAFETY: the two entries keep source and target, which are two buffers, until a mark after this call is seen
        // complete.
        let result = unsafe { self.driver_copy(transfer) };
        // Under one tick or two: both are covered by a mark after the copy.
        sent.submitted(source.commit());
        landed.submitted(submission.commit());
        result.map(|()| (sent, landed)).map_err(unsent)
    }
}

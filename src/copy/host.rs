//! Copies between two buffers of pools, in a stream's order: out of a landing buffer into the buffer that feeds the
//! next copy, say.

use super::{Landing, OUTSIDE, written};
use crate::buffer::{InFlight, Lend};
use crate::device::Transfer;
use crate::error::{Error, Result, SubmitError};
use crate::sealed::KEY;
use crate::stream::Stream;

impl Stream {
    /// Copies all that was written to `src` into `landing`, which must be at least as long, in this stream's order:
    /// after what was submitted to it before, and before what is submitted to it later. Both buffers come back in
    /// flight, each by its own handle, and the target's length is then the number of bytes copied.
    ///
    /// **On an accelerator the call waits** until what was submitted to the stream before is complete, and then the
    /// calling thread copies: so do the drivers' own copies between host memory (CUDA driver API, "API synchronization
    /// behavior": "fully synchronous with respect to the host"). On a host device it returns when the copy is queued.
    ///
    /// # Errors
    /// With both buffers: [`Error::Argument`], [`Error::TooSmall`], [`Error::Mismatch`], [`Error::Capturing`], a lost
    /// device; [`Error::Mismatch`] for a [`StreamBuf`](crate::StreamBuf) of another stream. With `buffer: None` as
    /// for [`upload`](Self::upload).
    #[allow(clippy::type_complexity, reason = "two handles, or both buffers back")]
    pub fn copy_host<B: Lend, L: Landing>(
        &self,
        src: B,
        mut landing: L,
    ) -> Result<(InFlight<B>, InFlight<L::Landed>), SubmitError<(B, L)>> {
        let checked = (|| {
            self.may_use(&src)?;
            let bytes = written(&src)?;
            let (dst, capacity) = landing.target(self, KEY)?;
            let len = bytes.len();
            Error::unless_fits(len, capacity)?;
            self.timeline().usable()?;
            self.timeline().not_capturing("a copy between host buffers", OUTSIDE)?;
            Ok((Transfer::OnHost { src: bytes.as_ptr(), dst, len }, len))
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

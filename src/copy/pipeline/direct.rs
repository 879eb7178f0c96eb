//! Copies of ordinary memory by a device that takes it as it is.
//!
//! On the host device, whose copies are the CPU's own, staging would be a second copy of the same kind. There workers call
//! the driver's blocking copy for each chunk, on the pipeline's streams, and wait. That call returns only when the device
//! has let go, on an error too, so that borrowed memory may be named in it.

use super::job::Body;
use super::plan::{Chunk, Parts};
use super::source::ours::Token;
use crate::device::Transfer;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Copies a chunk, and returns when it has arrived.
pub(super) fn copy(stream: &Stream, chunk: &Chunk, body: Option<&Body>) -> Result<()> {
    let start = usize::try_from(chunk.at).map_err(|_| Error::Closed)?;
    match body {
        Some(Body::Source(source)) => {
            let bytes = source.memory(Token).ok_or(Error::Closed)?;
            let part = |offset: usize, to: &DeviceSlice| {
                let (from, len) = (start + offset, to.len());
                let out = Error::OutOfRange { start: from, end: from + len, len: bytes.len() };
                stream.upload_blocking(bytes.get(from..from + len).ok_or(out)?, to)
            };
            match &chunk.parts {
                Parts::Whole(to) => part(0, to),
                Parts::Several(parts) => parts.iter().try_for_each(|p| part(p.offset, &p.device)),
            }
        }
        Some(Body::Sink(sink)) => {
            let place = sink.place(Token).ok_or(Error::Closed)?;
            let Parts::Whole(from) = &chunk.parts else { return Err(Error::Closed) };
            let len = from.len();
            if start > place.len || len > place.len - start {
                return Err(Error::TooSmall { need: start + len, have: place.len });
            }
            stream.may_block()?;
            from.admit(stream.timeline().stream())?;
            // SAFETY: within the place.
            let dst = unsafe { place.start.add(start) };
            let transfer = Transfer::Download { src: from.ptr(), dst, len };
            // SAFETY: the place is the transfer's alone until it is over, which is after this chunk; the call returns when
            // the device has let go; the device memory is kept by the plan.
            unsafe { stream.driver_copy_blocking(transfer) }?;
            sink.placed(len, Token);
            Ok(())
        }
        _ => Err(Error::Closed),
    }
}

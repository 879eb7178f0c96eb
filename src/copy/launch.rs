//! Functions of the program's in the order of a host device's stream.

use std::sync::Arc;

use crate::buffer::InFlight;
use crate::device::DevicePtr;
use crate::device::host::{HostDriver, HostFunction};
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::foreign::Owned;
use crate::stream::Stream;
use crate::stream::hold::Resource;

/// Runs a function of the program's on a stream of a host device, in stream order, with the bytes
/// of device memory: what a kernel is to a GPU. The [module's page](crate::host) has an example.
///
/// The function gets the bytes of `reads` and of `writes`, in the order of the lists. The call
/// returns when it is queued. It runs once, on a thread of the crate. The handle tells when it has
/// run, and may be dropped. The device memory stays allocated until then.
///
/// - **Bytes.** Both lists are copies, taken when the function's turn has come; those of `writes`
///   are written back as a whole when it has returned. Of memory that another stream writes
///   meanwhile, either's bytes may stay. Where ranges of `writes` overlap, the later one wins.
/// - **Panics** are caught, and reported by an event of the target `pinpool::foreign`. The device
///   memory stays as it was, the handle says that the function is over, and the stream goes on.
/// - **A device that dies** drops functions that have not begun, and what a running one writes.
/// - **Waiting.** The function may block, call the pool, and wait for other streams than its own.
///
/// # Errors
/// As for [copies](Error#copies) and for [devices of one family](Error#devices-of-one-family). The
/// function is dropped then; after an error of the device it may run all the same.
pub fn launch<F>(
    stream: &Stream,
    reads: &[DeviceSlice],
    writes: &[DeviceSlice],
    function: F,
) -> Result<InFlight<()>>
where
    F: FnOnce(&[&[u8]], &mut [&mut [u8]]) + Send + 'static,
{
    let function: Owned<HostFunction> = Owned::new(Box::new(function));
    let own = |slices: &[DeviceSlice]| -> Result<Vec<DeviceSlice>> {
        slices.iter().map(|slice| stream.own(slice)).collect()
    };
    let (reads, writes) = (own(reads)?, own(writes)?);
    let (timeline, context) = (stream.timeline(), stream.timeline().context());
    let Some(driver) = context.driver().as_any().downcast_ref::<HostDriver>() else {
        return Err(Error::Unsupported(format!(
            "a host function on a stream of {}: only streams of host devices run them; launch a kernel there",
            context.name()
        )));
    };
    let memory: Vec<_> = reads.iter().chain(&writes).map(DeviceSlice::allocation).collect();
    let submission = timeline.begin(Resource::Nothing, Some(Arc::new(memory)))?;
    let ranges = |slices: &[DeviceSlice]| -> Vec<(DevicePtr, usize)> {
        slices.iter().map(|slice| (slice.ptr(), slice.len())).collect()
    };
    let queued = driver.launch(timeline.stream(), &ranges(&reads), &ranges(&writes), function);
    let queued = context.noting(queued);
    let ticket = stream.ticket(submission.commit());
    queued.map(|()| InFlight::new(ticket, (), None))
}

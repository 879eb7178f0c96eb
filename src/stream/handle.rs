//! The public [`Stream`]: a timeline, and the device that it keeps open.

use std::fmt;
use std::sync::Arc;

use super::hold::Resource;
use super::timeline::Timeline;
use crate::device::handle::Device;
use crate::device::{Confined, StreamHandle};
use crate::error::{Error, Result};
use crate::foreign::KeepAlive;

/// An ordered queue of a device. Work on one stream happens in the order of its submission; streams
/// are independent of each other. A clone is another handle to the same stream.
///
/// Copies are submitted by [`upload`](Self::upload), [`download`](Self::download),
/// [`copy`](Self::copy) and their other forms. The driver is called before such a call returns, so
/// what the program submits to the stream afterwards comes after the copy.
///
/// Dropping the last handle does not wait: what is in flight stays in flight, and its segments
/// return as always.
///
/// # Examples
///
/// ```
/// use pinpool::{Device, Pool, Unpinned};
///
/// let device = Device::open("host")?;
/// let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build()?;
/// let (loads, work) = (device.stream()?, device.stream()?);
/// let weights = device.alloc(4)?;
/// let mut buf = pool.checkout(4)?;
/// buf.extend_from_slice(b"abcd");
/// drop(loads.upload(buf, &weights)?); // the segment returns when the copy is done
/// work.wait_for(&loads)?; // what is submitted to `work` from now on sees the weights
/// work.synchronize()?;
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Clone)]
pub struct Stream {
    timeline: Arc<Timeline>,
    /// Keeps the device open, and with it the reaper.
    device: Device,
}

impl Device {
    /// A new stream, owned by the crate. The call can be slow: make streams at start-up.
    ///
    /// # Errors
    /// [As every call](Error#every-call).
    pub fn stream(&self) -> Result<Stream> {
        self.make_stream(false)
    }

    /// A stream whose kernels are scheduled before those of ordinary streams.
    pub(crate) fn urgent_stream(&self) -> Result<Stream> {
        self.make_stream(true)
    }

    fn make_stream(&self, urgent: bool) -> Result<Stream> {
        let context = self.context().clone();
        context.alive()?;
        let maker = context.clone();
        let handle = context.worker().call(move || maker.noting(maker.driver().create_stream(urgent)))?;
        let make = || Timeline::new(context, handle, true, true, None, self.listing().clone());
        Ok(Stream { timeline: self.listing().know(None, make), device: self.clone() })
    }
}

impl Stream {
    /// A stream that the program made. By the contract of the caller it is alive for as long as
    /// anything is in flight on it. `id` is the driver's number of the stream: the same number
    /// gives the same timeline; without one each call gives another. `keep_alive` keeps the stream
    /// alive. With `confined` only the calling thread submits to it.
    pub(crate) fn adopted(
        device: &Device,
        handle: StreamHandle,
        id: Option<u64>,
        keep_alive: Option<KeepAlive>,
        confined: Option<Confined>,
    ) -> Self {
        let (context, listing) = (device.context().clone(), device.listing());
        let make = || Timeline::new(context, handle, false, id.is_some(), confined, listing.clone());
        let timeline = listing.know(id, make);
        if let Some(keep_alive) = keep_alive {
            timeline.keep(keep_alive);
        }
        Self { timeline, device: device.clone() }
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// The stream's number in statistics, events and reports: no other stream of the
    /// process has or had it.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.timeline.number()
    }

    /// The device that the stream belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Makes all work that is submitted to this stream from now on start only after everything that
    /// was submitted to `other` so far. The caller does not wait. Both must be streams of one
    /// device.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for streams of different devices; [`Error::Capturing`] if either is
    /// being captured into a graph; else [as every call](Error#every-call).
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.follow(&other.timeline)
    }

    /// [`wait_for`](Self::wait_for) with the other stream's timeline.
    pub(crate) fn follow(&self, other: &Arc<Timeline>) -> Result<()> {
        if !Arc::ptr_eq(self.timeline.context(), other.context()) {
            return Err(Error::wrong_stream(other.context().name(), self.device.name()));
        }
        self.timeline.usable()?;
        // The driver would spoil the capture, or draw the stream that is not captured into it.
        for timeline in [&self.timeline, other] {
            timeline.not_capturing(
                "making one stream wait for another",
                "order them outside the capture, or by events of your own inside of it",
            )?;
        }
        other.wait_here(self.timeline.stream())
    }

    /// Waits until everything that was submitted to the stream so far is complete. (A task awaits
    /// `stream.hold(())?`.)
    ///
    /// # Errors
    /// [As every wait](Error#waits).
    pub fn synchronize(&self) -> Result<()> {
        self.timeline.not_capturing("waiting for the stream", "end the capture first")?;
        let nothing = self.timeline.begin(Resource::Nothing, None)?;
        self.timeline.wait(nothing.commit(), None)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device.name()).finish_non_exhaustive()
    }
}

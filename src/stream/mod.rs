//! Streams: ordered queues of a device, and what is in flight on them.
//!
//! [`timeline`] says how it is known that a copy is done, [`reaper`] who finds out. [`awaited`] is what handles wait
//! for where that is no sequence number of a timeline.

pub(crate) mod awaited;
#[cfg(all(test, loom))]
pub(crate) mod loom_models;
mod memory;
pub(crate) mod reaper;
pub(crate) mod timeline;

use std::fmt;
use std::sync::Arc;

use crate::device::handle::Device;
use crate::device::{StreamHandle, ending::KeepAlive};
use crate::error::{Error, Result};
use timeline::Timeline;

/// An ordered queue of a device. What is submitted to one stream happens in that order; streams are independent of each
/// other. Cloning gives another handle to the same stream.
///
/// Dropping the last handle does not wait: what is in flight stays in flight and returns as always.
#[derive(Clone)]
pub struct Stream {
    timeline: Arc<Timeline>,
    /// Keeps the reaper awake for this stream.
    device: Device,
}

impl Stream {
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let context = device.context().clone();
        context.alive()?;
        let maker = context.clone();
        let handle = context.worker().call(move || maker.noting(maker.driver().create_stream()))?;
        let timeline = Timeline::new(context, handle, device.listing().clone());
        Ok(Self { timeline, device: device.clone() })
    }

    /// A stream that others made, and are alive by their word for as long as anything is in flight on it. `id` is the
    /// driver's number for it: the same number gives the same timeline. Without one each call gives another.
    /// `keep_alive`: what keeps it alive.
    pub(crate) fn adopted(
        device: &Device,
        handle: StreamHandle,
        id: Option<u64>,
        keep_alive: Option<KeepAlive>,
    ) -> Self {
        let make = || {
            let context = device.context().clone();
            Timeline::adopted(context, handle, id.is_some(), device.listing().clone())
        };
        let timeline = match id {
            Some(id) => device.known_stream(id, make),
            None => make(),
        };
        if let Some(keep_alive) = keep_alive {
            timeline.keep(keep_alive);
        }
        Self { timeline, device: device.clone() }
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// A number that no other stream of this process has or had: its name in statistics, events and reports.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.timeline.number()
    }

    /// The device that the stream belongs to.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What is submitted to this stream from now on starts only after everything submitted to `other` so far. The
    /// caller does not wait. Both must be streams of one device.
    ///
    /// # Errors
    /// [`Error::WrongDevice`]; [`Error::Capturing`] where either is being captured into a graph; what the driver says;
    /// what either stream was lost with.
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.follow(&other.timeline)
    }

    /// The same for a stream by its timeline.
    pub(crate) fn follow(&self, other: &Arc<Timeline>) -> Result<()> {
        if !Arc::ptr_eq(self.timeline.context(), other.context()) {
            return Err(Error::WrongDevice { device: self.device.name().into() });
        }
        self.timeline.usable()?;
        // Either way the driver would spoil the capture, or make the other stream a part of it behind everybody's back.
        for timeline in [&self.timeline, other] {
            timeline.not_capturing(
                "making one stream wait for another",
                "order them outside the capture, or by events of your own inside of it",
            )?;
        }
        other.wait_here(self.timeline.stream())
    }

    /// Waits until everything submitted so far is done. (A task awaits `stream.hold(())?`.)
    ///
    /// # Errors
    /// [`Error::Capturing`]; what the stream was lost with.
    pub fn synchronize(&self) -> Result<()> {
        self.timeline.not_capturing("waiting for the stream", "end the capture first")?;
        let seq = self.timeline.checkpoint()?;
        self.timeline.wait(seq, None)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device.name()).finish_non_exhaustive()
    }
}

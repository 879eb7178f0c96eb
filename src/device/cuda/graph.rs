//! Graphs that keep what their copies use.
//!
//! A copy that was captured reads its buffer whenever the graph is launched, so the buffer is needed for as long as the
//! graph, its executable forms and their launches are there. The driver counts these itself for *user objects*
//! (`cuUserObjectCreate`, CUDA 11.3): a reference that a graph has goes over to what is made from it, and when the last
//! is gone a callback comes, from a thread of the driver's. Nothing may be called from there, so all it does is to run
//! [`GraphEnd`], which hands things to a thread of ours.
//!
//! The graph is given a reference of its own (not ours, by `CU_GRAPH_USER_OBJECT_MOVE`), and ours is given back in any
//! case: so nothing is released twice where the driver reports an error for what it has done.

use std::ffi::{c_uint, c_void};

use super::api::{CUgraph, CUuserObject};
use super::{Cuda, stream};
use crate::device::{GraphEnd, StreamHandle};
use crate::error::{Error, Result};
use crate::foreign;

/// cuda.h: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, which must be given: nobody can wait for the destructor.
const NO_DESTRUCTOR_SYNC: c_uint = 1;
/// cuda.h: CU_STREAM_CAPTURE_STATUS_ACTIVE.
const ACTIVE: c_uint = 1;

/// A capture that goes on.
pub(super) struct Capture {
    pub(super) id: u64,
    graph: CUgraph,
}

/// The driver's callback: the last graph is gone.
unsafe extern "C" fn gone(object: *mut c_void) {
    // SAFETY: made by `keep` out of such a box, and called once.
    let gone = unsafe { Box::from_raw(object.cast::<GraphEnd>()) };
    // Unwinding into the driver would be undefined. It only sends, so there is nothing to be said about a panic.
    _ = foreign::survive("telling that a graph is gone panicked: its buffers are leaked", gone);
}

impl Cuda {
    /// The capture that a stream is in, if it is in one that is not spoiled.
    pub(super) fn capture(&self, on: StreamHandle) -> Result<Option<Capture>> {
        let (mut status, mut id): (c_uint, u64) = (0, 0);
        let mut graph: CUgraph = std::ptr::null_mut();
        let (mut nodes, mut edges): (*const c_void, *const c_void) = (std::ptr::null(), std::ptr::null());
        let mut count = 0_usize;
        let _current = self.current()?;
        let (v2, v3) = (self.api.capture_info_v2, self.api.capture_info_v3);
        // All that can be asked for is asked for: leaving out the edges makes the call fail where there are some.
        if let Some(ask) = v3 {
            // SAFETY: a stream that is alive, and places for all of it. The lists are the driver's, and not looked at.
            let code = unsafe {
                ask(
                    stream(on),
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    &raw mut nodes,
                    &raw mut edges,
                    &raw mut count,
                )
            };
            self.said("cuStreamGetCaptureInfo_v3", code)?;
        } else if let Some(ask) = v2 {
            // SAFETY: as above.
            let code = unsafe {
                ask(stream(on), &raw mut status, &raw mut id, &raw mut graph, &raw mut nodes, &raw mut count)
            };
            self.said("cuStreamGetCaptureInfo_v2", code)?;
        } else {
            return Err(too_old());
        }
        Ok((status == ACTIVE).then_some(Capture { id, graph }))
    }

    /// See [`crate::device::Driver::keep_with_graph`].
    pub(super) fn keep(&self, on: StreamHandle, call: GraphEnd) -> Result<Option<u64>> {
        let (Some(create), Some(release), Some(retain)) =
            (self.api.user_object_create, self.api.user_object_release, self.api.graph_retain)
        else {
            return Err(too_old());
        };
        let Some(capture) = self.capture(on)? else { return Ok(None) };
        let _current = self.relaxed()?;
        let mut object: CUuserObject = std::ptr::null_mut();
        let boxed = Box::into_raw(Box::new(call));
        // SAFETY: `gone` takes such a box, once.
        let code = unsafe { create(&raw mut object, boxed.cast(), gone, 1, NO_DESTRUCTOR_SYNC) };
        self.said("cuUserObjectCreate", code).inspect_err(|_| {
            // SAFETY: there is no object, so nobody else will take the box.
            drop(unsafe { Box::from_raw(boxed) });
        })?;
        // SAFETY: the graph of a capture that goes on may be given references, says cuStreamGetCaptureInfo.
        let retained = self.said("cuGraphRetainUserObject", unsafe { retain(capture.graph, object, 1, 0) });
        // SAFETY: the reference that it was made with. Where the graph has none, the callback comes now.
        let released = self.said("cuUserObjectRelease", unsafe { release(object, 1) });
        if let Err(error) = released {
            crate::foreign::warn!(
                target: "pinpool::device::leak", device = &*self.name, %error,
                "a reference to a graph's buffer is leaked, and with it the buffer"
            );
        }
        retained.map(|()| Some(capture.id))
    }
}

fn too_old() -> Error {
    Error::Unsupported(
        "buffers can be tied to a graph from CUDA 11.3 on (cuUserObjectCreate, cuStreamGetCaptureInfo_v2), and this driver \
         is older; install a newer one, or keep the buffers yourself for as long as the graph and copy outside the capture"
            .into(),
    )
}

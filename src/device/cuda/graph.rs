//! Graphs that keep the buffers that they use.
//!
//! A captured kernel or copy uses its buffer with each launch, so the buffer is needed for as long
//! as the graph, its executable forms and their launches exist. The driver counts these for *user
//! objects* (`cuUserObjectCreate`, CUDA 11.3): everything that is made from a graph inherits its
//! reference, and after the last release the driver calls back, on a thread of its own. No driver
//! call is allowed there, so the callback only runs [`GraphEnd`], which sends the buffers on.
//!
//! The graph gets a reference of its own (not the crate's, as by `CU_GRAPH_USER_OBJECT_MOVE`), and
//! the crate releases its reference in any case. So nothing is released twice where the driver
//! reports an error for a call that it has carried out.

use std::ffi::{c_uint, c_void};

use super::api::{CUgraph, CUuserObject};
use super::{Cuda, stream};
use crate::device::{GraphEnd, StreamHandle};
use crate::error::{Error, Result};
use crate::foreign;

/// cuda.h: CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, required: nobody can wait for the destructor.
const NO_DESTRUCTOR_SYNC: c_uint = 1;
/// cuda.h: CU_STREAM_CAPTURE_STATUS_ACTIVE.
const ACTIVE: c_uint = 1;

/// The driver's callback: the last graph that kept the object was destroyed.
unsafe extern "C" fn graph_ended(object: *mut c_void) {
    // SAFETY: `keep` made the object out of such a box, and the driver calls this once.
    let ended = unsafe { Box::from_raw(object.cast::<GraphEnd>()) };
    // Unwinding into the driver is undefined behaviour. After a panic it needs no answer.
    _ = foreign::survive("the end of a graph could not be reported: its buffers are leaked", ended);
}

impl Cuda {
    /// The graph of the active capture that a stream is in. A spoiled capture is not active.
    fn captured_graph(&self, on: StreamHandle) -> Result<Option<CUgraph>> {
        let (mut status, mut id): (c_uint, u64) = (0, 0);
        let mut graph: CUgraph = std::ptr::null_mut();
        let (mut nodes, mut edges): (*const c_void, *const c_void) = (std::ptr::null(), std::ptr::null());
        let mut count = 0_usize;
        let _current = self.current()?;
        let (v2, v3) = (self.api.capture_info_v2, self.api.capture_info_v3);
        // Every argument is given: without a place for edges the call fails where there are any.
        if let Some(ask) = v3 {
            // SAFETY: a stream that is alive, and places for all results. The lists stay the
            // driver's, and are not read.
            let code = unsafe {
                ask.call(
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
                ask.call(
                    stream(on),
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    &raw mut nodes,
                    &raw mut count,
                )
            };
            self.said("cuStreamGetCaptureInfo_v2", code)?;
        } else {
            return Err(too_old());
        }
        Ok((status == ACTIVE).then_some(graph))
    }

    /// See [`crate::device::Driver::keep_with_graph`].
    pub(super) fn keep(&self, on: StreamHandle, call: GraphEnd) -> Result<bool> {
        let (Some(create), Some(release), Some(retain)) =
            (self.api.user_object_create, self.api.user_object_release, self.api.graph_retain)
        else {
            return Err(too_old());
        };
        let Some(graph) = self.captured_graph(on)? else { return Ok(false) };
        let _current = self.relaxed()?;
        let mut object: CUuserObject = std::ptr::null_mut();
        let boxed = Box::into_raw(Box::new(call));
        // SAFETY: `graph_ended` takes such a box, once.
        let code = unsafe { create.call(&raw mut object, boxed.cast(), graph_ended, 1, NO_DESTRUCTOR_SYNC) };
        self.said("cuUserObjectCreate", code).inspect_err(|_| {
            // SAFETY: there is no object, so the callback never takes the box.
            drop(unsafe { Box::from_raw(boxed) });
        })?;
        // SAFETY: an active capture's graph may get references (manual on cuStreamGetCaptureInfo).
        let retained = self.said("cuGraphRetainUserObject", unsafe { retain.call(graph, object, 1, 0) });
        // SAFETY: the reference of the creation. Where the graph has none, the callback comes now.
        let released = self.said("cuUserObjectRelease", unsafe { release.call(object, 1) });
        if let Err(error) = released {
            crate::foreign::warn!(
                target: "pinpool::device::leak", device = &*self.name, %error,
                "a reference to a graph's buffer is leaked, and with it the buffer"
            );
        }
        retained.map(|()| true)
    }
}

fn too_old() -> Error {
    Error::Unsupported(
        "buffers can be tied to a graph from CUDA 11.3 on (cuUserObjectCreate, cuStreamGetCaptureInfo_v2), and this driver \
         is older; install a newer one, or keep the buffers yourself for as long as the graph"
            .into(),
    )
}

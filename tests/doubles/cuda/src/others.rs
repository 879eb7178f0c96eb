//! Calls that pinpool does not make, and a program that shares a context with it does: waiting for a context or an
//! event.

#![allow(non_snake_case)]

use std::ffi::c_void;

use crate::calls::call;
use crate::world::*;

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> u32 {
    const NAME: &str = "cuCtxSynchronize";
    call(NAME, |w| {
        let context = w.current(NAME)?;
        w.unsafe_call(NAME)?;
        let streams: Vec<usize> =
            w.streams.iter().filter(|(_, s)| s.context == context).map(|(handle, _)| *handle).collect();
        streams.into_iter().for_each(|stream| w.run(stream, u64::MAX));
        Ok(())
    })
}

/// An event that was never recorded counts as complete, as for `cuEventQuery`.
#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: *mut c_void) -> u32 {
    const NAME: &str = "cuEventSynchronize";
    call(NAME, |w| {
        w.unsafe_call(NAME)?;
        let event = w.event(NAME, event as usize)?;
        if event.captured {
            return w.violate("CAP-3", format!("{NAME}: recorded in a capture"), CAPTURED_EVENT);
        }
        if let Some((stream, upto)) = event.recorded {
            event.seen = true;
            w.run(stream, upto);
        }
        Ok(())
    })
}

//! Calls that pinpool does not make, and a program that shares a context with it does: waiting for a context or an
//! event.

use super::calls::entries;
use super::world::*;

entries! {
    fn cuCtxSynchronize() in here(), |w, name| {
        let context = w.current(name)?;
        w.unsafe_call(name)?;
        let streams: Vec<usize> =
            w.streams.iter().filter(|(_, s)| s.context == context).map(|(handle, _)| *handle).collect();
        streams.into_iter().for_each(|stream| w.run(stream, u64::MAX));
        Ok(())
    }

    /// An event that was never recorded counts as complete, as for `cuEventQuery`.
    fn cuEventSynchronize(event: usize) in of(event), |w, name| {
        w.unsafe_call(name)?;
        let event = w.event(name, event)?;
        if event.captured {
            return w.violate("CAP-3", format!("{name}: recorded in a capture"), CAPTURED_EVENT);
        }
        if let Some((stream, upto)) = event.recorded {
            event.seen = true;
            w.run(stream, upto);
        }
        Ok(())
    }
}

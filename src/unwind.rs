//! What may be used after a caught panic: every handle.
//!
//! A panic leaves nothing of the crate broken. Locks are not poisoned, what a call holds goes back
//! as its frames are left, and the program's code runs under none of the locks
//! ([`crate::foreign`]). So a server may catch the panic of a request and go on with the pool, the
//! device and the buffers. The compiler cannot see this: it finds locks, and functions and values
//! of the program's, inside of the handles. So the list is written down, in one place.
//!
//! A value of the program's that a handle gives back decides for itself.

use std::panic::{RefUnwindSafe, UnwindSafe};

use crate::buffer::{InFlight, Lend, PinnedBuf, Registered, StreamBuf};
use crate::copy::copier::{Copier, CopierBuilder, FileSink, FileSource, Transfer};
use crate::device::handle::Device;
use crate::device::host::HostNode;
use crate::device::memory::DeviceSlice;
use crate::pool::{Checkout, Pool};
use crate::stream::Stream;
use crate::telemetry::Sampler;

macro_rules! go_on {
    ($($handle:ty),* $(,)?) => {
        $(
            impl UnwindSafe for $handle {}
            impl RefUnwindSafe for $handle {}
        )*
    };
}

go_on!(Device, Stream, Pool, Copier, Sampler, HostNode);
go_on!(PinnedBuf, StreamBuf, DeviceSlice);
go_on!(Checkout, Checkout<Vec<PinnedBuf>>);
go_on!(CopierBuilder, FileSource, FileSink);

impl<T: UnwindSafe> UnwindSafe for Transfer<T> {}
impl<T: RefUnwindSafe> RefUnwindSafe for Transfer<T> {}
impl<B: Lend + UnwindSafe> UnwindSafe for InFlight<B> {}
impl<B: Lend + RefUnwindSafe> RefUnwindSafe for InFlight<B> {}
// Shared with a device, and with other handles.
impl<T: RefUnwindSafe + Send + Sync + 'static> UnwindSafe for Registered<T> {}
impl<T: RefUnwindSafe + Send + Sync + 'static> RefUnwindSafe for Registered<T> {}

//! Devices and pools.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pinpool::{Error, Unpinned};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::Buffer;
use crate::fault::{Fault, check_fork, seconds};
use crate::wait::{LOOK, wait};

/// An opened device.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Device(pinpool::Device);

#[pymethods]
impl Device {
    #[new]
    #[pyo3(signature = (name = "auto"))]
    fn new(py: Python<'_>, name: &str) -> Result<Self, Fault> {
        Ok(Self(py.detach(|| pinpool::Device::open(name))?))
    }

    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    fn __repr__(&self) -> String {
        format!("pinpool.Device('{}')", self.0.name())
    }
}

/// A device, or the name of one that is to be opened.
#[derive(FromPyObject)]
enum Named<'py> {
    Device(Bound<'py, Device>),
    Name(String),
}

/// One region of a pool's memory.
#[pyclass(frozen, get_all, module = "pinpool")]
pub(crate) struct Region {
    id: u64,
    address: usize,
    len: usize,
    pinned: usize,
    node: Option<u32>,
}

/// A pool of pinned memory.
#[pyclass(frozen, weakref, module = "pinpool")]
pub(crate) struct Pool(pub(crate) pinpool::Pool);

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (device, capacity = 256 << 20, *, initial = None, allow_unpinned = false, name = None))]
    fn new(
        py: Python<'_>,
        device: Named<'_>,
        capacity: usize,
        initial: Option<usize>,
        allow_unpinned: bool,
        name: Option<String>,
    ) -> Result<Self, Fault> {
        let opened = match device {
            Named::Device(device) => device.get().0.clone(),
            Named::Name(name) => Device::new(py, &name)?.0,
        };
        let mut builder = pinpool::Pool::builder(&opened).capacity(capacity);
        if let Some(bytes) = initial {
            builder = builder.initial(bytes);
        }
        if allow_unpinned {
            builder = builder.unpinned(Unpinned::Allow);
        }
        if let Some(name) = name {
            builder = builder.name(name);
        }
        Ok(Self(py.detach(|| builder.build())?))
    }

    /// A hit keeps the interpreter's lock. A wait is a task's, which keeps its place in the queue
    /// while it looks for signals.
    #[pyo3(signature = (nbytes, timeout = None, *, zeroed = true))]
    fn checkout(
        &self,
        py: Python<'_>,
        nbytes: usize,
        timeout: Option<f64>,
        zeroed: bool,
    ) -> Result<Buffer, Fault> {
        if timeout == Some(0.0) {
            return Ok(Buffer::new(self.0.try_checkout(nbytes)?, &self.0.devices()[0], zeroed));
        }
        let mut checkout = self.0.checkout_async(nbytes);
        if let Some(limit) = timeout {
            checkout = checkout.timeout(seconds(limit)?);
        }
        let buf = match Pin::new(&mut checkout).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => done,
            // The checkout has its own deadline, and its error the state of the pool.
            Poll::Pending => wait(py, &mut checkout, None)?
                .unwrap_or(Err(Error::Internal("a wait without a deadline has passed it"))),
        };
        Ok(Buffer::new(buf?, &self.0.devices()[0], zeroed))
    }

    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>, Fault> {
        check_fork()?;
        let (stats, dict) = (self.0.stats(), PyDict::new(py));
        macro_rules! all {
            ($($name:ident)*) => { $(dict.set_item(stringify!($name), stats.$name)?;)* };
        }
        all!(pinned_bytes unpinned_bytes free_bytes cached_bytes checked_out_bytes in_flight_bytes);
        all!(quarantined_bytes cut_bytes requested_bytes granted_bytes rounding_bytes largest_free_bytes);
        all!(capacity_bytes checkouts returns misses reclaims growths growth_failures waits timeouts);
        all!(abandoned waiting exhausted queue_full impossible);
        Ok(dict)
    }

    fn regions(&self) -> Result<Vec<Region>, Fault> {
        check_fork()?;
        let region = |info: pinpool::RegionInfo| Region {
            id: info.id,
            address: info.base.as_ptr().expose_provenance(),
            len: info.len,
            pinned: info.pinned,
            node: info.node,
        };
        Ok(self.0.regions().into_iter().map(region).collect())
    }

    #[pyo3(signature = (keep = 0))]
    fn trim(&self, py: Python<'_>, keep: usize) -> Result<usize, Fault> {
        check_fork()?;
        Ok(py.detach(|| self.0.trim(keep)))
    }

    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    #[getter]
    fn capacity(&self) -> usize {
        self.0.stats().capacity_bytes
    }

    /// Waits in slices, between which it looks for signals.
    #[pyo3(signature = (timeout = Some(0.0)))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> Result<bool, Fault> {
        check_fork()?;
        let limit = timeout.map(seconds).transpose()?;
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            let done = py.detach(|| self.0.shutdown(left.min(LOOK)));
            if done.drained || left <= LOOK {
                py.detach(|| self.0.trim(0));
                return Ok(done.drained);
            }
            py.check_signals()?;
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> Result<(), Fault> {
        self.close(py, Some(0.0)).map(drop)
    }

    fn __repr__(&self) -> String {
        format!("<pinpool.Pool '{}' of {} bytes>", self.name(), self.capacity())
    }
}

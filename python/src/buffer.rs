//! Buffers: memory that the CPU may use, or that a device may still be using, and never both.
//!
//! A buffer counts its views (memoryviews, numpy's arrays and DLPack tensors). While there is one,
//! the memory cannot go back, since each view keeps the buffer alive and [`Buffer::release`] is
//! refused. A hold says that a stream may use the memory; from then on there are no new views,
//! until every hold is over.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pinpool::{Device, Error, InFlight, PinnedBuf, Stream, SubmitError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::dlpack;
use crate::fault::{Fault, check_fork, seconds};
use crate::wait::{LOOK, wait};

const RELEASED: Fault = Fault::State("the buffer was released; check out another one");
const HELD: Fault =
    Fault::State("a stream may still use the buffer, which it is held for; call wait() first");
const WAITED_FOR: Fault = Fault::State("another thread waits for the buffer; use it when that has returned");
const VIEWED: Fault =
    Fault::State("memoryviews, arrays or tensors of the buffer exist; delete or release them first");
const VIEWED_IN_HOLD: Fault = Fault::State(
    "memoryviews, arrays or tensors of the buffer exist, by which the CPU could reach it during the copy: delete them \
     before hold(). The memory is held all the same",
);

/// How often a buffer is looked at that a graph keeps, or that another thread lets go of at this
/// moment.
const LET_GO: Duration = Duration::from_micros(200);

/// A buffer of pinned memory.
#[pyclass(frozen, weakref, module = "pinpool")]
pub(crate) struct Buffer {
    inner: Mutex<Inner>,
    device: Device,
    /// The first byte.
    address: usize,
    capacity: usize,
}

struct Inner {
    state: State,
    /// The length of views.
    len: usize,
    /// The views that exist.
    views: usize,
    /// Whether the memory is to be zeroed before anybody learns where it is.
    stale: bool,
}

enum State {
    /// The CPU may use it.
    Host(PinnedBuf),
    /// Streams may use it. The last reference gives it back.
    Held(Arc<PinnedBuf>, Vec<InFlight<Arc<PinnedBuf>>>),
    /// A thread waits for the holds, which it has.
    Waited,
    Released,
}

impl Buffer {
    pub(crate) fn new(mut buf: PinnedBuf, device: &Device, zeroed: bool) -> Self {
        let (address, capacity) = (buf.as_mut_ptr().expose_provenance(), buf.capacity());
        let inner = Inner { state: State::Host(buf), len: capacity, views: 0, stale: zeroed };
        Self { inner: Mutex::new(inner), device: device.clone(), address, capacity }
    }

    /// Counts a view, and gives what it sees: its first byte and length. The CPU may use the memory
    /// for as long as the view exists.
    pub(crate) fn view(&self) -> Result<(*mut c_void, usize), Fault> {
        check_fork()?;
        let mut inner = self.inner.lock();
        inner.settle();
        let start = match &mut inner.state {
            State::Host(buf) => buf.as_mut_ptr(),
            State::Held(..) => return Err(HELD),
            State::Waited => return Err(WAITED_FOR),
            State::Released => return Err(RELEASED),
        };
        inner.clean()?;
        inner.views += 1;
        Ok((start.cast(), inner.len))
    }

    /// A view is gone.
    pub(crate) fn unview(&self) {
        self.inner.lock().views -= 1;
    }

    pub(crate) fn is_pinned(&self) -> Result<bool, Fault> {
        check_fork()?;
        match &self.inner.lock().state {
            State::Host(buf) => Ok(buf.is_pinned()),
            State::Held(buf, _) => Ok(buf.is_pinned()),
            State::Waited => Err(WAITED_FOR),
            State::Released => Err(RELEASED),
        }
    }
}

impl Inner {
    /// Zeroes memory that was not touched yet: what an earlier user left there is nobody's to read.
    fn clean(&mut self) -> Result<(), Fault> {
        if let State::Host(buf) = &mut self.state {
            if std::mem::take(&mut self.stale) {
                buf.try_resize(buf.capacity(), 0)?;
            }
        }
        Ok(())
    }

    /// Makes the buffer the CPU's again if every hold is over. Does not wait.
    fn settle(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Released) {
            State::Held(buf, mut holds) => {
                // One that failed stays, so that a wait tells why.
                holds.retain(|hold| !matches!(hold.is_done(), Ok(true)));
                match holds.is_empty() {
                    true => Arc::try_unwrap(buf).map_or_else(|buf| State::Held(buf, holds), State::Host),
                    false => State::Held(buf, holds),
                }
            }
            state => state,
        };
    }

    /// Holds the memory for a stream.
    fn hold(&mut self, stream: &Stream) -> Result<(), Fault> {
        // Later it would be zeroed over what the device has written.
        self.clean()?;
        self.state = match std::mem::replace(&mut self.state, State::Released) {
            State::Host(buf) => State::Held(Arc::new(buf), Vec::new()),
            state => state,
        };
        let State::Held(buf, holds) = &mut self.state else {
            return Err(if matches!(self.state, State::Waited) { WAITED_FOR } else { RELEASED });
        };
        match stream.hold(buf.clone()) {
            Ok(hold) => {
                holds.retain(|hold| !matches!(hold.is_done(), Ok(true)));
                holds.push(hold);
            }
            // Then the graph keeps it.
            Err(SubmitError { error: Error::Capturing { .. }, buffer: Some(buf), .. }) => {
                stream.hold_captured(buf)?;
            }
            Err(refused) => return Err(refused.into()),
        }
        if self.views > 0 { Err(VIEWED_IN_HOLD) } else { Ok(()) }
    }
}

#[pymethods]
impl Buffer {
    fn __len__(&self) -> usize {
        self.inner.lock().len
    }

    #[getter]
    fn capacity(&self) -> usize {
        self.capacity
    }

    /// Who knows the address can have a device write there. So it is zeroed before, and not over
    /// what was written.
    #[getter]
    fn address(&self) -> Result<usize, Fault> {
        check_fork()?;
        let mut inner = self.inner.lock();
        inner.clean()?;
        if matches!(inner.state, State::Released) { Err(RELEASED) } else { Ok(self.address) }
    }

    #[getter]
    fn pinned(&self) -> Result<bool, Fault> {
        self.is_pinned()
    }

    /// Whether the CPU may use the buffer now.
    #[getter]
    fn ready(&self) -> Result<bool, Fault> {
        check_fork()?;
        let mut inner = self.inner.lock();
        inner.settle();
        match inner.state {
            State::Host(_) => Ok(true),
            State::Released => Err(RELEASED),
            _ => Ok(false),
        }
    }

    fn resize(&self, nbytes: usize) -> Result<(), Fault> {
        let mut inner = self.inner.lock();
        if inner.views > 0 {
            return Err(VIEWED);
        }
        if nbytes > self.capacity {
            return Err(Error::TooSmall { need: nbytes, have: self.capacity }.into());
        }
        inner.len = nbytes;
        Ok(())
    }

    fn release(&self) -> Result<(), Fault> {
        let mut inner = self.inner.lock();
        if inner.views > 0 {
            return Err(VIEWED);
        }
        let state = match &inner.state {
            State::Waited => return Err(WAITED_FOR),
            _ => std::mem::replace(&mut inner.state, State::Released),
        };
        drop(inner);
        drop(state);
        Ok(())
    }

    /// The driver may make the call wait, for code of Python's even. So the interpreter's lock is
    /// given away first.
    fn hold(&self, py: Python<'_>, stream: usize) -> Result<(), Fault> {
        check_fork()?;
        py.detach(|| {
            let stream = adopt(&self.device, stream)?;
            self.inner.lock().hold(&stream)
        })
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> Result<(), Fault> {
        check_fork()?;
        let since = Instant::now();
        let limit = timeout.map(seconds).transpose()?;
        let deadline = limit.and_then(|limit| since.checked_add(limit));
        let taken = {
            let mut inner = self.inner.lock();
            inner.settle();
            std::mem::replace(&mut inner.state, State::Waited)
        };
        let (state, result) = match taken {
            State::Held(buf, holds) => wait_for(py, buf, holds, deadline),
            State::Host(buf) => (State::Host(buf), Ok(true)),
            State::Waited => (State::Waited, Err(WAITED_FOR)),
            State::Released => (State::Released, Err(RELEASED)),
        };
        // The thread that waits has the state, and puts it back itself.
        if !matches!(state, State::Waited) {
            self.inner.lock().state = state;
        }
        if result? { Ok(()) } else { Err(Error::Timeout(since.elapsed().into()).into()) }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) -> Result<(), Fault> {
        self.release()
    }

    fn __repr__(&self) -> String {
        format!("<pinpool.Buffer of {} bytes at {:#x}>", self.inner.lock().len, self.address)
    }

    /// # Safety
    /// The interpreter's: `view` can be written.
    unsafe fn __getbuffer__(this: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (start, len) = this.get().view()?;
        // SAFETY: the interpreter's structure. The memory is the buffer's until the view is counted
        // off, and nothing of Rust's reads or writes it meanwhile. The view has a reference to the
        // buffer.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, this.as_ptr(), start, len as ffi::Py_ssize_t, 0, flags) };
        if filled == 0 {
            return Ok(());
        }
        this.get().unview();
        Err(PyErr::fetch(this.py()))
    }

    /// # Safety
    /// The interpreter's: called once for each view that was given out.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.unview();
    }

    /// As torch says of its own pinned memory: kDLCUDAHost, or kDLCPU.
    fn __dlpack_device__(&self) -> Result<(c_int, c_int), Fault> {
        let of_cuda = self.device.name().starts_with("cuda") && self.is_pinned()?;
        Ok((if of_cuda { dlpack::CUDA_HOST } else { dlpack::CPU }, 0))
    }

    /// The tensor says kDLCPU, which every library takes, unless kDLCUDAHost is asked for.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        this: Bound<'_, Self>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(c_int, c_int)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        // No stream is at work on memory that the CPU may use.
        let _ = stream;
        let own = this.get().__dlpack_device__()?;
        let device = dl_device.unwrap_or((dlpack::CPU, 0));
        if copy == Some(true) || (device != own && device != (dlpack::CPU, 0)) {
            let text = "the buffer is exported where it is: without a copy, as memory of the CPU";
            return Err(Fault::State(text).into());
        }
        if max_version.is_none_or(|version| version.0 < 1) {
            let text =
                "the buffer is exported by DLPack 1.0 or later; use a newer version of the library that asks";
            return Err(Fault::State(text).into());
        }
        dlpack::capsule(&this, device.0)
    }
}

/// Waits for holds, and then until the last other reference is gone. Whether that was before the
/// deadline.
fn wait_for(
    py: Python<'_>,
    mut buf: Arc<PinnedBuf>,
    mut holds: Vec<InFlight<Arc<PinnedBuf>>>,
    deadline: Option<Instant>,
) -> (State, Result<bool, Fault>) {
    while let Some(hold) = holds.last_mut() {
        match wait(py, hold, deadline) {
            Ok(Some(Ok(_))) => drop(holds.pop()),
            Ok(Some(Err(error))) => return (State::Held(buf, holds), Err(error.into())),
            Ok(None) => return (State::Held(buf, holds), Ok(false)),
            Err(raised) => return (State::Held(buf, holds), Err(raised.into())),
        }
    }
    let mut looked = Instant::now();
    loop {
        buf = match Arc::try_unwrap(buf) {
            Ok(buf) => return (State::Host(buf), Ok(true)),
            Err(shared) => shared,
        };
        let now = Instant::now();
        if deadline.is_some_and(|deadline| deadline <= now) {
            return (State::Held(buf, holds), Ok(false));
        }
        py.detach(|| std::thread::sleep(LET_GO));
        if now.duration_since(looked) >= LOOK {
            looked = now;
            if let Err(raised) = py.check_signals() {
                return (State::Held(buf, holds), Err(raised.into()));
            }
        }
    }
}

/// A stream of the program's, by its handle.
pub(crate) fn adopt(device: &Device, handle: usize) -> Result<Stream, Error> {
    let stream = std::ptr::with_exposed_provenance_mut::<c_void>(handle);
    match device.name().split(':').next() {
        // SAFETY: the page of `hold` asks for a stream of the device that exists until its work is
        // complete.
        Some("cuda") => unsafe { pinpool::cuda::adopt_stream(device, stream, ()) },
        // SAFETY: as above.
        Some("acl") => unsafe { pinpool::acl::adopt_stream(device, stream, ()) },
        _ => Err(Error::Unsupported(format!("{} has no streams that Python could name", device.name()))),
    }
}

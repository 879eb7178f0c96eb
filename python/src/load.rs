//! Checkpoints in the safetensors format, to device memory. `lib/pinpool/safetensors.py` makes tensors
//! of what lands here.

#![allow(unsafe_code)]

use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use pinpool::Error;
use pinpool_safetensors::{Tensor, windows};
use pyo3::prelude::*;

use crate::buffer::adopt;
use crate::fault::{Fault, check_fork};
use crate::pool::Pool;
use crate::wait::wait;

/// The alignment of tensors in their block, for which `windows` makes room: no element of any type
/// is longer.
const ALIGN: usize = 256;

/// Copies through a pool, by threads that start with the first load.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Copier(pinpool::Copier);

#[pymethods]
impl Copier {
    /// `share`: the bytes of the pool that loads may use, half of it unless given. `threads` read
    /// files, by default one for each processor, at most 8.
    #[new]
    #[pyo3(signature = (pool, share = None, threads = None))]
    fn new(py: Python<'_>, pool: &Pool, share: Option<usize>, threads: Option<usize>) -> Result<Self, Fault> {
        check_fork()?;
        let mut builder = pinpool::Copier::builder(&pool.0, &pool.0.devices()[0]);
        if let Some(bytes) = share {
            builder = builder.share(bytes);
        }
        if let Some(threads) = threads {
            builder = builder.threads(threads);
        }
        Ok(Self(py.detach(|| builder.build())?))
    }

    /// The name of its device.
    #[getter]
    fn device(&self) -> &str {
        self.0.device().name()
    }
}

/// What is opened: a file, an index or a folder, or a list of files.
#[derive(FromPyObject)]
enum Named {
    One(PathBuf),
    Files(Vec<PathBuf>),
}

/// Files whose headers were read.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Checkpoint(pinpool_safetensors::Checkpoint);

#[pymethods]
impl Checkpoint {
    #[new]
    fn new(py: Python<'_>, path: Named) -> Result<Self, Fault> {
        let opened = py.detach(|| match path {
            Named::One(path) => pinpool_safetensors::Checkpoint::open(path),
            Named::Files(paths) => pinpool_safetensors::Checkpoint::open_files(&paths),
        });
        Ok(Self(opened?))
    }

    /// The names, in the order in which the tensors lie in the files.
    fn names(&self) -> Vec<String> {
        self.0.tensors().map(|tensor| tensor.name().to_owned()).collect()
    }

    /// The metadata of each file that has it, as JSON.
    fn metadata(&self) -> Vec<&str> {
        self.0.metadata().collect()
    }

    /// Type, shape and offsets of a tensor, its file, and where in it the tensor starts.
    #[allow(clippy::type_complexity)]
    fn describe(&self, name: &str) -> Option<(String, Vec<usize>, (u64, u64), OsString, u64)> {
        let tensor = self.0.get(name)?;
        let (dtype, offsets) = (format!("{:?}", tensor.dtype()), tensor.data_offsets());
        let offsets = (offsets.start, offsets.end);
        Some((dtype, tensor.shape().to_vec(), offsets, tensor.file().into(), tensor.range().start))
    }

    /// The descriptor of the open file that has a tensor.
    fn fileno(&self, name: &str) -> Result<Option<i32>, Fault> {
        Ok(self.0.file(name)?.map(AsRawFd::as_raw_fd))
    }

    /// Splits tensors, whole or some of their rows, in their order into windows of at most so many
    /// bytes, or of one larger tensor.
    fn windows(&self, plan: Vec<(String, Option<(usize, usize)>)>, bytes: u64) -> Result<Vec<Window>, Fault> {
        let chosen = plan.iter().map(|(name, rows)| {
            let no_tensor = || Error::Argument(format!("the checkpoint has no tensor \"{name:.200}\""));
            let tensor = self.0.get(name).ok_or_else(no_tensor)?;
            rows.map_or(Ok(tensor.clone()), |(start, stop)| tensor.rows(start..stop))
        });
        let chosen = chosen.collect::<Result<Vec<_>, _>>()?;
        let window = |tensors| Window { checkpoint: self.0.clone(), tensors };
        Ok(windows(chosen, bytes).map(window).collect())
    }
}

/// Tensors that are loaded together.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Window {
    checkpoint: pinpool_safetensors::Checkpoint,
    tensors: Vec<Tensor>,
}

#[pymethods]
impl Window {
    fn names(&self) -> Vec<&str> {
        self.tensors.iter().map(Tensor::name).collect()
    }

    /// The device memory that a load of it takes, at least one byte.
    #[getter]
    fn nbytes(&self) -> usize {
        let tensors = self.tensors.iter();
        let total: usize = tensors.map(|tensor| (tensor.bytes() as usize).next_multiple_of(ALIGN)).sum();
        total.max(ALIGN)
    }

    /// Starts a load to device memory of at least so many bytes, at an address on the alignment,
    /// which `owner` keeps. `behind` is a stream whose work of until now may still use that memory.
    /// The interpreter's lock is given away meanwhile.
    fn load(
        &self,
        py: Python<'_>,
        copier: &Copier,
        address: u64,
        owner: Py<PyAny>,
        behind: usize,
    ) -> Result<Load, Fault> {
        check_fork()?;
        let (copier, bytes, kept) = (&copier.0, self.nbytes(), Arc::new(Mutex::new(Some(owner))));
        let owner = Owner(kept.clone());
        let started = py.detach(|| {
            copier.wait_for(&adopt(copier.device(), behind)?)?;
            // SAFETY: the owner keeps the memory until it is dropped, when no copy uses it any
            // more. Nobody else has it before its tensors have landed.
            let memory = unsafe { copier.device().raw_memory(address, bytes, owner) };
            let (memory, mut used) = (memory.map_err(|refused| refused.error)?, 0_usize);
            let block = |bytes: usize| {
                let start = used;
                used = (start + bytes).next_multiple_of(ALIGN);
                memory.slice(start..start + bytes)
            };
            let tensors = self.tensors.iter().cloned();
            self.checkpoint.loader(copier).only(tensors).align(ALIGN).memory(block).start()
        });
        Ok(Load { load: Mutex::new(Some(started?)), left: self.tensors.len().into(), kept })
    }
}

/// The object that keeps a load's memory, until the load or the memory's last handle lets go of it.
type Kept = Arc<Mutex<Option<Py<PyAny>>>>;

/// Lets go of what keeps the memory when no handle to it is left.
struct Owner(Kept);

impl Drop for Owner {
    /// On the device's region thread, which must not wait for the interpreter: a thread that has its
    /// lock may wait for memory that the region thread pins.
    fn drop(&mut self) {
        static DROPPED: OnceLock<Sender<Py<PyAny>>> = OnceLock::new();
        if let Some(object) = self.0.lock().take() {
            let refused = DROPPED.get_or_init(dropping).send(object);
            std::mem::forget(refused);
        }
    }
}

/// Starts a thread that drops objects of Python's, and may wait for the interpreter. Without one
/// they are never freed.
fn dropping() -> Sender<Py<PyAny>> {
    let (sender, objects) = channel::<Py<PyAny>>();
    let drop_all = move || {
        for object in objects {
            let mut object = Some(object);
            Python::try_attach(|_| drop(object.take()));
            std::mem::forget(object);
        }
    };
    // Where no thread can be started, the channel is closed.
    _ = std::thread::Builder::new().name("pinpool-python".into()).spawn(drop_all);
    sender
}

/// A load under way.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Load {
    load: Mutex<Option<pinpool_safetensors::Load>>,
    /// The tensors that are to be taken.
    left: AtomicUsize,
    kept: Kept,
}

#[pymethods]
impl Load {
    /// Takes a tensor, and waits until it has landed. Its address, 0 for one without elements;
    /// `None` if it was taken, or the load is closed.
    fn take(&self, py: Python<'_>, name: &str) -> Result<Option<u64>, Fault> {
        let Some(load) = self.load.lock().clone() else { return Ok(None) };
        let mut take = Box::pin(load.take_async(name));
        let Some(tensor) = wait(py, &mut take, None)?.transpose()?.flatten() else { return Ok(None) };
        // When the last one comes out, all transfers are over, and no copy uses the memory. The
        // program's tensors keep it now, and nothing else: else it would be freed some time after
        // the last of them, by a thread that waits for the interpreter.
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 && load.progress().over {
            let kept = self.kept.lock().take();
            drop(kept);
        }
        Ok(Some(tensor.slice().map_or(0, |slice| slice.address())))
    }

    /// Ends the load: what has not landed is cancelled.
    fn close(&self, py: Python<'_>) {
        let load = self.load.lock().take();
        py.detach(|| drop(load));
    }
}

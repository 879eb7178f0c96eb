//! Checkpoints in the safetensors format, to device memory. `lib/pinpool/safetensors.py` makes tensors
//! of what lands here.

#![allow(unsafe_code)]

use std::collections::HashSet;
use std::path::PathBuf;

use parking_lot::Mutex;
use pinpool::{Copier, DeviceSlice, Error};
use pinpool_safetensors::Tensor;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::buffer::adopt;
use crate::fault::{Fault, check_fork};
use crate::pool::Pool;
use crate::wait::wait;

/// The alignment of tensors in their blocks: no element of any type is longer.
const ALIGN: usize = 64;

/// A file, an index or a folder, whose headers were read.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Checkpoint(pinpool_safetensors::Checkpoint);

#[pymethods]
impl Checkpoint {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> Result<Self, Fault> {
        Ok(Self(py.detach(|| pinpool_safetensors::Checkpoint::open(path))?))
    }

    /// The names, in the order in which the tensors lie in the files.
    fn names(&self) -> Vec<String> {
        self.0.tensors().map(|tensor| tensor.name().to_owned()).collect()
    }

    /// The metadata of each file that has it, as JSON.
    fn metadata(&self) -> Vec<&str> {
        self.0.metadata().collect()
    }

    /// Type, shape and bytes of a tensor.
    fn describe(&self, name: &str) -> Option<(String, Vec<usize>, u64)> {
        let tensor = self.0.get(name)?;
        Some((format!("{:?}", tensor.dtype()), tensor.shape().to_vec(), tensor.bytes()))
    }

    /// Starts a load. `memory` is called with a number of bytes, and gives an address of device
    /// memory and the object that keeps it; without it the memory is the load's own. `behind` is a
    /// stream whose work of until now may still use that memory. The interpreter's lock is given
    /// away: a thread of the crate's may wait for it to drop the memory of an earlier load.
    #[pyo3(signature = (pool, names = None, memory = None, behind = None))]
    fn load(
        &self,
        py: Python<'_>,
        pool: &Pool,
        names: Option<HashSet<String>>,
        memory: Option<Py<PyAny>>,
        behind: Option<usize>,
    ) -> Result<Load, Fault> {
        check_fork()?;
        let device = &pool.0.devices()[0];
        let mut raised = None;
        let started = py.detach(|| {
            let copier = Copier::builder(&pool.0, device).build()?;
            let chosen = |tensor: &Tensor| names.as_ref().is_none_or(|names| names.contains(tensor.name()));
            let mut loader = self.0.loader(&copier).align(ALIGN).filter(chosen);
            if let Some(memory) = &memory {
                loader = loader.memory(|bytes| {
                    let (address, owner) =
                        Python::attach(|py| given(memory.bind(py), bytes)).map_err(|error| {
                            raised = Some(error);
                            Error::Argument("the program gave no memory for the load".into())
                        })?;
                    if let Some(stream) = behind {
                        copier.wait_for(&adopt(device, stream)?)?;
                    }
                    // SAFETY: the owner keeps the memory until it is dropped, when no copy uses it
                    // any more. Nobody else has it before its tensors have landed.
                    Ok(unsafe { device.raw_memory(address, bytes, owner) }?)
                });
            }
            let load = loader.start()?;
            Ok::<_, Error>(Load { load: Mutex::new(Some(load)), copier: copier.clone() })
        });
        match raised {
            Some(error) => Err(error.into()),
            None => Ok(started?),
        }
    }
}

/// What keeps memory of Python's.
struct Owner(Option<Py<PyAny>>);

impl Drop for Owner {
    /// On a thread of the crate's, for which nobody waits with the interpreter's lock held. Without
    /// an interpreter the memory is never freed.
    fn drop(&mut self) {
        Python::try_attach(|_| drop(self.0.take()));
        std::mem::forget(self.0.take());
    }
}

/// The address of memory that Python gives, and its owner.
fn given(memory: &Bound<'_, PyAny>, bytes: usize) -> PyResult<(u64, Owner)> {
    let (address, owner) = memory.call1((bytes,))?.extract::<(u64, Py<PyAny>)>()?;
    Ok((address, Owner(Some(owner))))
}

/// A load under way: an iterator of the tensors that have landed.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Load {
    load: Mutex<Option<pinpool_safetensors::Load>>,
    copier: Copier,
}

#[pymethods]
impl Load {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<Landed>, Fault> {
        let Some(load) = self.load.lock().clone() else {
            return Ok(None);
        };
        let mut next = Box::pin(load.next_tensor());
        let Some(tensor) = wait(py, &mut next, None)?.flatten().transpose()? else {
            return Ok(None);
        };
        let (name, slice) = (tensor.name().to_owned(), tensor.slice().cloned());
        let address = slice.as_ref().map_or(0, DeviceSlice::address);
        Ok(Some(Landed { name, address, slice, copier: self.copier.clone() }))
    }

    /// Ends the load: what has not landed is cancelled.
    fn close(&self, py: Python<'_>) {
        let load = self.load.lock().take();
        py.detach(|| drop(load));
    }
}

/// A tensor that has landed.
#[pyclass(frozen, module = "pinpool")]
pub(crate) struct Landed {
    #[pyo3(get)]
    name: String,
    /// 0 for a tensor without elements.
    #[pyo3(get)]
    address: u64,
    slice: Option<DeviceSlice>,
    copier: Copier,
}

#[pymethods]
impl Landed {
    /// Its bytes.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyByteArray>> {
        check_fork()?;
        let Some(slice) = &self.slice else {
            return Ok(PyByteArray::new(py, &[]));
        };
        PyByteArray::new_with(py, slice.len(), |to| {
            py.detach(|| self.copier.download_slice(slice, to)).map_err(|error| Fault::from(error).into())
        })
    }
}

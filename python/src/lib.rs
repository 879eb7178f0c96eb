//! The native half of the Python package `pinpool`: devices, pools and buffers, for Python 3.11 and
//! later.
//!
//! Importing it starts no thread and opens no device. Two rules hold in every file:
//!
//! - **The interpreter's lock.** What takes microseconds at most keeps it: giving it away and
//!   taking it again costs more than a checkout. What may wait gives it away, and looks for signals
//!   every [`wait::LOOK`], so that Ctrl-C ends the wait.
//! - **Other locks.** A buffer's lock is taken with the interpreter's held or not. So nothing of
//!   Python's is called under it: that could let another thread run, which would wait for the
//!   buffer's lock with the interpreter's held. Errors become exceptions after it is released.

mod buffer;
mod cli;
mod dlpack;
mod fault;
mod load;
mod pool;
mod wait;

// The functions of the C interface, which this library exports: `pinpool.torch` finds them in it.
use pinpool_capi as _;
use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<pool::Device>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<pool::Region>()?;
    module.add_class::<load::Copier>()?;
    module.add_class::<load::Checkpoint>()?;
    module.add_class::<load::Window>()?;
    module.add_class::<load::Load>()?;
    module.add_class::<buffer::Buffer>()?;
    module.add_function(wrap_pyfunction!(cli::command, module)?)
}

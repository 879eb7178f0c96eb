//! Bytes spread over device memory, and collected there, by kernels of the crate's own.
//!
//! A copy to or from one contiguous place on the device runs at the link's speed, copies of many
//! small pieces do not. So pieces travel packed, and a kernel moves them to or from their places.
//!
//! The kernels are `kernels.cu`; `kernels.ptx` is made of that and is a part of this crate, so that
//! neither building nor running needs a toolkit: the driver compiles it for the GPU. `.ci/ptx`
//! checks that the one is made of the other. The PTX is of version 6.0 for GPUs from Volta (sm_70)
//! on. Where the driver refuses it, the crate does without kernels.
//!
//! # Loading
//!
//! Loading a module or a function allocates device memory, and may wait for the kernels of others.
//! A launch does neither: [`load_spread`](crate::device::Driver::load_spread) loads both. Drivers
//! from CUDA 11.7 on may put that off: `cuModuleGetFunction` loads, from 12.4 on `cuFuncLoad`.
//!
//! The module is unloaded with the driver object. The context may live on, adopted or retained by
//! another library, and each opening of the device would leave a module there.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_uint, c_void};
use std::ptr::null_mut;

use super::api::{CUcontext, CUfunction, CUmodule, CudaApi, CudaCode};
use super::{Cuda, CudaCurrent, stream};
use crate::device::{SPREAD_RUNS, SpreadRun, SpreadWay, StreamHandle};
use crate::error::{Error, ErrorClass, Result};

/// The source of the kernels, as a string of C's.
const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");

/// Of a launch. On an H200 16 blocks reach the link's speed with pieces of 1 KiB and more, and 4 or
/// 64 blocks slow other kernels more.
const BLOCKS: c_uint = 16;
/// Of a block; the kernels are compiled for no more.
const THREADS: c_uint = 512;

/// The parameter of both kernels.
#[repr(C)]
struct Runs {
    run: [SpreadRun; SPREAD_RUNS],
    count: u32,
}

/// Both kernels, loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    module: CUmodule,
    spread: CUfunction,
    collect: CUfunction,
}

// SAFETY: handles, which mean the same on every thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Unloads the module. May block.
    pub(super) fn unload(self, api: &CudaApi, context: CUcontext) {
        // SAFETY: the retained primary context, or an adopted one that is still alive.
        if unsafe { api.ctx_push.call(context) } != CudaCode::SUCCESS {
            return;
        }
        let _current = CudaCurrent::relaxed(api, true);
        // After an error the module goes with its context. SAFETY: loaded once in this context,
        // unloaded once; no launch is under way, since every stream was destroyed.
        unsafe { api.module_unload.call(self.module) };
    }
}

impl Cuda {
    /// As [`load_spread`](crate::device::Driver::load_spread).
    pub(super) fn load_kernels(&self) -> Result<()> {
        // Not inside of the lock: the calls of the driver may block.
        if self.kernels.get().is_none() {
            let loaded = self.try_load().map_err(|error| match error.class() {
                ErrorClass::DeviceLost | ErrorClass::DriverShutdown => error,
                _ => Error::Unsupported(format!(
                    "{} does without kernels that spread bytes: {error}",
                    self.name
                )),
            });
            // Only the region thread loads, so the cell is still empty.
            let _ = self.kernels.set(loaded);
        }
        self.kernels().map(drop)
    }

    fn kernels(&self) -> Result<Kernels> {
        match self.kernels.get() {
            Some(loaded) => loaded.clone(),
            None => Err(Error::Unsupported(format!("{} has not loaded its kernels", self.name))),
        }
    }

    fn try_load(&self) -> Result<Kernels> {
        let api = self.api;
        let _current = self.relaxed()?;
        let mut module: CUmodule = null_mut();
        // SAFETY: writes a handle; the image is a string that ends with a zero.
        self.said("cuModuleLoadData", unsafe { api.module_load.call(&raw mut module, PTX.as_ptr().cast()) })?;
        let functions = self
            .function(module, c"pinpool_spread")
            .and_then(|spread| Ok((spread, self.function(module, c"pinpool_collect")?)));
        match functions {
            Ok((spread, collect)) => Ok(Kernels { module, spread, collect }),
            Err(error) => {
                // SAFETY: loaded above, and not used. After an error it goes with its context.
                unsafe { api.module_unload.call(module) };
                Err(error)
            }
        }
    }

    /// A function of the module, loaded by now. The context is current.
    fn function(&self, module: CUmodule, name: &CStr) -> Result<CUfunction> {
        let mut function: CUfunction = null_mut();
        // SAFETY: writes a handle; a module that is loaded, and a string.
        self.said("cuModuleGetFunction", unsafe {
            self.api.module_function.call(&raw mut function, module, name.as_ptr())
        })?;
        if let Some(load) = self.api.function_load {
            // SAFETY: the function from above.
            self.said("cuFuncLoad", unsafe { load.call(function) })?;
        }
        Ok(function)
    }

    /// As [`spread`](crate::device::Driver::spread).
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn launch(
        &self,
        handle: StreamHandle,
        way: SpreadWay,
        runs: &[SpreadRun],
    ) -> Result<()> {
        let kernels = self.kernels()?;
        let none = SpreadRun { packed: super::DevicePtr(0), table: super::DevicePtr(0), rows: 0 };
        let mut list = Runs { run: [none; SPREAD_RUNS], count: 0 };
        // Runs without rows are left out: their tables need not be there.
        for run in runs.iter().filter(|run| run.rows > 0) {
            let Some(place) = list.run.get_mut(list.count as usize) else {
                return Err(Error::Unsupported(format!(
                    "a kernel takes {SPREAD_RUNS} runs at most, not {}",
                    runs.len()
                )));
            };
            *place = *run;
            list.count += 1;
        }
        if list.count == 0 {
            return Ok(());
        }
        let function = match way {
            SpreadWay::Spread => kernels.spread,
            SpreadWay::Collect => kernels.collect,
        };
        let mut parameters = [(&raw mut list).cast::<c_void>()];
        let _current = self.relaxed()?;
        // SAFETY: a function of this context with one parameter, which is read before the call
        // returns; the caller promises the memory that it names.
        let code = unsafe {
            self.api.launch_kernel.call(
                function,
                BLOCKS,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream(handle),
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        self.said("cuLaunchKernel", code)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;
    use crate::device::SpreadRow;

    /// kernels.cu has the same structures.
    #[test]
    fn parameters_are_laid_out_as_the_kernels_read_them() {
        assert_eq!(
            (size_of::<SpreadRow>(), offset_of!(SpreadRow, offset), offset_of!(SpreadRow, len)),
            (16, 8, 12)
        );
        assert_eq!(
            (size_of::<SpreadRun>(), offset_of!(SpreadRun, table), offset_of!(SpreadRun, rows)),
            (24, 8, 16)
        );
        assert_eq!((align_of::<Runs>(), offset_of!(Runs, count)), (8, 768));
        for name in ["pinpool_spread", "pinpool_collect"] {
            let parameter = format!(".param .align 8 .b8 {name}_param_0[{}]", size_of::<Runs>());
            assert!(PTX.contains(&parameter), "{parameter}");
        }
        assert!(
            PTX.contains(".version 6.0\n.target sm_70\n")
                && PTX.contains(&format!(".maxntid {THREADS}, 1, 1"))
        );
    }
}

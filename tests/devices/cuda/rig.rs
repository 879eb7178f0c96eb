//! What the tests of GPUs share.

#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pinpool::{Device, DeviceSlice, Error, Pool, PoolBuilder, Stream, cuda};

use crate::support::doubles::gpu::{bytes, filled};
use crate::support::doubles::{self, HANG, gpu_name};
use crate::support::skip;
use crate::support::value::Value;

pub const PAGE: usize = 64 << 10;

/// Pools of four extents that start with two.
pub fn small(device: &Device) -> PoolBuilder {
    Pool::builder(device).capacity(8 * PAGE).initial(4 * PAGE).region(4 * PAGE).extent(2 * PAGE)
}

pub fn open() -> Device {
    Device::open(&gpu_name(0)).unwrap()
}

pub fn both() -> (Device, Device) {
    (open(), Device::open(&gpu_name(1)).unwrap())
}

pub fn adopt(device: &Device, stream: usize) -> Result<Stream, Error> {
    // SAFETY: tests keep their streams until all work is complete, or see to it that nothing depends on that.
    unsafe { cuda::adopt_stream(device, stream as *mut c_void, ()) }
}

pub fn round_trip(pool: &Pool, stream: &Stream, memory: &DeviceSlice, seed: usize) {
    let sent = bytes(seed, memory.len());
    drop(stream.upload(filled(pool, &sent), memory).unwrap());
    let landing = pool.checkout_timeout(memory.len(), HANG).unwrap();
    assert!(*stream.download(memory, landing).unwrap().wait().unwrap() == *sent);
}

/// A value, and whether it was dropped.
pub fn flag() -> (Value, impl Fn() -> bool + Clone) {
    let (value, dropped) = Value::watched(Vec::new());
    (value, move || dropped.load(Ordering::SeqCst) > 0)
}

/// What the child of [`in_a_child`] runs on: `real` or `stand-in`.
const KIND: &str = "PINPOOL_HARDWARE";

/// Runs a test of this executable in a child, in which it passes: on the machine's own driver, or else on the
/// simulation. In the child: whether it is the machine's own. `None`: this is the parent.
pub fn in_a_child(test: &str, needs_kernels: bool) -> Option<bool> {
    if let Ok(kind) = std::env::var(KIND) {
        return Some(kind == "real");
    }
    // Longer than any test takes.
    let passes = |environment: &[_]| doubles::passes(test, environment, Duration::from_secs(560));
    let why = match doubles::real_driver() {
        Ok((_, text)) => {
            println!("{test}: on {text}");
            // Kernels are loaded when their module is: the driver's other way is at their first launch, which
            // may wait for whatever runs.
            passes(&[(KIND, "real"), ("CUDA_MODULE_LOADING", "EAGER")]);
            return None;
        }
        Err(why) => why,
    };
    assert!(!doubles::required(), "{test}: PINPOOL_REQUIRE names a GPU: {why}");
    match doubles::named_or_built().filter(|_| !needs_kernels) {
        Some(built) => {
            // By the name that cudarc looks for.
            let folder = tempfile::tempdir().unwrap();
            let library = folder.path().join("libcuda.so");
            std::os::unix::fs::symlink(built, &library).unwrap();
            let [folder, library] = [folder.path(), &library].map(|path| path.to_str().unwrap());
            passes(&[(KIND, "stand-in"), ("LD_LIBRARY_PATH", folder), (doubles::PATH, library)]);
        }
        None => skip!("{why}, and it needs a GPU or a built simulation"),
    }
    None
}

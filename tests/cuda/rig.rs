//! What the tests of GPUs share.

#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use pinpool::{Device, DeviceSlice, Error, Pool, Stream, cuda};

use crate::support::doubles::gpu::{bytes, filled};
use crate::support::doubles::{self, HANG, StandIn, gpu_name};
use crate::support::skip;

pub fn open() -> Device {
    Device::open(&gpu_name(0)).unwrap()
}

/// Both GPUs of a machine.
pub fn both() -> (Device, Device) {
    (open(), Device::open(&gpu_name(1)).unwrap())
}

pub fn adopt(device: &Device, stream: usize) -> Result<Stream, Error> {
    // SAFETY: tests keep their streams until all work is complete, or see to it that nothing depends on that.
    unsafe { cuda::adopt_stream(device, stream as *mut c_void, ()) }
}

/// There and back.
pub fn round_trip(pool: &Pool, stream: &Stream, memory: &DeviceSlice, seed: usize) {
    let sent = bytes(seed, memory.len());
    drop(stream.upload(filled(pool, &sent), memory).unwrap());
    let landing = pool.checkout_timeout(memory.len(), HANG).unwrap();
    assert!(*stream.download(memory, landing).unwrap().wait().unwrap() == *sent);
}

/// With everything closed, no rule was broken and nothing is left.
pub fn is_clean(stand_in: &StandIn) {
    let report = stand_in.final_report();
    assert_eq!((report.violations, report.leaks), (vec![], vec![]));
}

/// The ids of the rules that were broken so far.
pub fn broken(stand_in: &StandIn) -> Vec<String> {
    let first = |line: String| line.split(' ').next().unwrap_or_default().to_owned();
    stand_in.report().violations.into_iter().map(first).collect()
}

/// Sets a flag when it is dropped.
pub struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        // Release: the reader that sees the flag, by the acquire in `flag`, sees what came before the drop.
        self.0.store(true, Ordering::Release);
    }
}

/// A flag, and whether it was dropped.
pub fn flag() -> (Flag, impl Fn() -> bool + Clone) {
    let flag = Arc::new(AtomicBool::new(false));
    // Acquire: pairs with the release in the flag's drop.
    (Flag(flag.clone()), move || flag.load(Ordering::Acquire))
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
            let [folder, library] = named(&built);
            passes(&[(KIND, "stand-in"), ("LD_LIBRARY_PATH", &folder), (doubles::PATH, &library)]);
        }
        None => skip!("{why}, and it needs a GPU or a built simulation"),
    }
    None
}

/// The simulation by the name that cudarc looks for: the folder, and the file.
fn named(built: &Path) -> [String; 2] {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cudarc");
    std::fs::create_dir_all(&folder).unwrap();
    // Renamed into place at once: another process may be using what is there.
    static MADE: AtomicU32 = AtomicU32::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let mine = folder.join(format!("new.{}.{number}", std::process::id()));
    std::os::unix::fs::symlink(built, &mine).unwrap();
    std::fs::rename(&mine, folder.join("libcuda.so")).unwrap();
    [folder.clone(), folder.join("libcuda.so")].map(|path| path.to_str().unwrap().into())
}

//! What the tests of GPUs share.

#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pinpool::{Device, DeviceSlice, Error, Pool, Stream, cuda};

use crate::record;
use crate::support::doubles::gpu::{bytes, filled};
use crate::support::doubles::{self, HANG, StandIn, gpu_name};

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

/// Runs a test of this executable in a process of its own, in which it passes.
pub fn passes_in_a_child(test: &str, environment: &[(&str, &str)], limit: Duration) {
    let child = doubles::child(test, environment, limit);
    crate::support::process::forward(&child.stdout, &child.stderr);
    let passed = child.status.is_some_and(|status| status.success());
    assert!(passed, "{test}: the child {}: {}", child.how(), child.last_words());
    assert!(child.stdout.contains("1 passed"), "{test} did not run");
}

/// The number of the first check that failed, counted from 1; 0 if all hold.
pub fn first_wrong(checks: &[bool]) -> i32 {
    checks.iter().position(|ok| !ok).map_or(0, |at| at as i32 + 1)
}

/// What was logged for one target since `record` began: the fields of each event.
pub fn logged(target: &str) -> Vec<String> {
    record::events(target)
        .iter()
        .map(|event| format!("{} {:?}", event.field("message"), event.fields))
        .collect()
}

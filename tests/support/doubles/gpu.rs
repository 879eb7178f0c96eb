//! A GPU as a server in another language uses it: raw driver calls, on the real driver or on the stand-in.
//!
//! What is tested with it was written to run on both: where `PINPOOL_REQUIRE` names a GPU, on the machine's own driver,
//! one test at a time; otherwise on simulated GPUs of its own, whose rules must then not have been broken.

use std::sync::{Mutex, MutexGuard};

use pinpool::{Device, PinnedBuf, Pool, Stream, Unpinned};
use pinpool_sim::cuda::Driver;

use crate::support::in_use;
pub use crate::support::{bytes, until};

use super::{HANG, StandIn, gpu_name, required};

/// The driver's handles and numbers, all of the size of a register.
type Word = usize;

/// The first GPU, whose primary context is current on this thread.
pub struct Gpu {
    driver: StandIn,
    /// The same, where it is no real one.
    pub stand_in: Option<StandIn>,
    pub context: Word,
    _alone: Option<MutexGuard<'static, ()>>,
}

/// Runs the body of a test on a real GPU or on a simulated one, and checks afterwards that no rule was broken.
pub fn on_gpu(body: impl FnOnce(&Gpu)) {
    let gpu = if required() { Gpu::open(None) } else { Gpu::simulated(Driver::Cuda12_8) };
    body(&gpu);
    gpu.close();
}

/// Runs the body of a test on a simulated GPU whose driver has the calls of that version, and checks afterwards.
pub fn on_driver(driver: Driver, body: impl FnOnce(&Gpu)) {
    if super::simulated_elsewhere() {
        return;
    }
    let gpu = Gpu::simulated(driver);
    body(&gpu);
    gpu.close();
}

/// The same as [`on_gpu`], on a simulated one only: for what only such a one can be made to do. No check afterwards.
pub fn on_stand_in(body: impl FnOnce(&Gpu, &StandIn)) {
    if super::simulated_elsewhere() {
        return;
    }
    let gpu = Gpu::simulated(Driver::Cuda12_8);
    let stand_in = gpu.stand_in.clone().expect("it is simulated");
    body(&gpu, &stand_in);
}

/// Calls of a driver, whose handles are numbers.
impl StandIn {
    /// The driver that this process loads, or its environment names; initialised.
    pub fn of_this_process() -> Self {
        let path = super::named(super::PATH).unwrap_or_else(|| "libcuda.so.1".into());
        let driver = Self::any(&path).expect("the driver can be loaded");
        driver.ok("cuInit", &[0]);
        driver
    }

    /// A call that must succeed.
    #[track_caller]
    pub fn ok(&self, name: &str, a: &[Word]) {
        let code = self.call(name, a);
        assert!(code == 0, "{name} failed with {code}");
    }

    /// The same for one that writes a word to its first argument.
    #[track_caller]
    pub fn made(&self, name: &str, more: &[Word]) -> Word {
        let mut word: Word = 0;
        self.ok(name, &[&[(&raw mut word) as Word], more].concat());
        word
    }

    /// Makes a context current on this thread.
    pub fn current(&self, context: Word) {
        self.ok("cuCtxSetCurrent", &[context]);
    }

    /// A stream that the legacy default stream does not wait for.
    pub fn stream(&self) -> Word {
        self.made("cuStreamCreate", &[1])
    }

    pub fn synchronize(&self, stream: Word) {
        self.ok("cuStreamSynchronize", &[stream]);
    }

    pub fn memory(&self, len: usize) -> Word {
        self.made("cuMemAlloc_v2", &[len])
    }
}

impl std::ops::Deref for Gpu {
    type Target = StandIn;

    fn deref(&self) -> &StandIn {
        &self.driver
    }
}

impl Gpu {
    fn simulated(driver: Driver) -> Self {
        Self::open(Some(StandIn::gpus(driver)))
    }

    /// The first of a machine, or that of the driver which this process loads, one test at a time.
    fn open(stand_in: Option<StandIn>) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let driver = stand_in.clone().unwrap_or_else(StandIn::of_this_process);
        let alone =
            stand_in.is_none().then(|| ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        let mut gpu = Self { driver, stand_in, context: 0, _alone: alone };
        assert_eq!(gpu.call("cuInit", &[0]), 0);
        gpu.context = gpu.made("cuDevicePrimaryCtxRetain", &[gpu.ordinal(0)]);
        gpu.current(gpu.context);
        gpu
    }

    /// The driver's number for the first device, the second and so on.
    pub fn ordinal(&self, device: usize) -> Word {
        gpu_name(device).trim_start_matches("cuda:").parse().unwrap()
    }

    /// Everything of the test is dropped.
    fn close(&self) {
        self.current(0);
        assert_eq!(self.call("cuDevicePrimaryCtxRelease_v2", &[self.ordinal(0)]), 0);
        if let Some(stand_in) = &self.stand_in {
            stand_in.no_trace();
        }
    }

    /// A context beside the primary one. The current one stays what it was.
    pub fn other_context(&self) -> Word {
        let made = self.made("cuCtxCreate_v2", &[0, self.ordinal(0)]);
        let mut popped: Word = 0;
        self.ok("cuCtxPopCurrent_v2", &[(&raw mut popped) as Word]);
        made
    }

    pub fn upload(&self, to: Word, from: *const u8, len: usize, stream: Word) {
        self.ok("cuMemcpyHtoDAsync_v2", &[to, from as Word, len, stream]);
    }

    /// What is in device memory, in order with what was submitted to the stream.
    pub fn read(&self, from: Word, len: usize, stream: Word) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ok("cuMemcpyDtoHAsync_v2", &[bytes.as_mut_ptr() as Word, from, len, stream]);
        self.synchronize(stream);
        bytes
    }

    /// In a mode: 0 global, 1 of this thread, 2 relaxed.
    pub fn begin_capture(&self, stream: Word, mode: usize) {
        self.ok("cuStreamBeginCapture_v2", &[stream, mode]);
    }

    /// The graph. The capture was not spoiled.
    pub fn end_capture(&self, stream: Word) -> Word {
        let mut graph: Word = 0;
        self.ok("cuStreamEndCapture", &[stream, (&raw mut graph) as Word]);
        graph
    }

    pub fn launch(&self, executable: Word, stream: Word) {
        self.ok("cuGraphLaunch", &[executable, stream]);
        self.synchronize(stream);
    }
}

/// A pool with room for that many bytes.
pub fn pool(device: &Device, capacity: usize) -> Pool {
    let built = Pool::builder(device).capacity(capacity).extent(128 << 10).region(256 << 10);
    built.unpinned(Unpinned::Allow).build().unwrap()
}

pub fn filled(pool: &Pool, bytes: &[u8]) -> PinnedBuf {
    let mut buf = pool.checkout_timeout(bytes.len(), HANG).unwrap();
    buf.extend_from_slice(bytes);
    buf
}

/// Up and down again, and compared.
pub fn round_trip(pool: &Pool, stream: &Stream, sent: &[u8]) {
    let memory = stream.device().alloc(sent.len()).unwrap();
    drop(stream.upload(filled(pool, sent), &memory).unwrap());
    let landing = pool.checkout_timeout(sent.len(), HANG).unwrap();
    assert!(*stream.download(&memory, landing).unwrap().wait().unwrap() == *sent, "{} bytes", sent.len());
}

/// How often a function of the driver was called.
pub fn calls(stand_in: &StandIn, name: &str) -> u64 {
    stand_in.report().calls.iter().find(|call| call.0 == name).map_or(0, |call| call.1)
}

/// Waits until no buffer of a pool is in use, and checks the pool.
pub fn all_back(pool: &Pool) {
    until("all is back", || in_use(pool) == 0);
    pool.check().unwrap();
}

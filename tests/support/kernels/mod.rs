//! Kernels for tests on a real GPU, and the plain driver calls to run them, beside pinpool and not through it.
//!
//! The kernels are PTX written by hand, which the driver itself assembles when it loads them: no compiler and no
//! toolkit is needed. The one that matters checks *on the device* that each byte of a buffer is the one that the host
//! meant to send, so that a copy that read too late or from the wrong place is seen on the device. [`fill`] and
//! [`wrong`] compute the same pattern on the host.
//!
//! Calls that are not expected to fail panic with their name and the driver's word for the code.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(unsafe_code, reason = "calling the driver")]

use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use crate::support::doubles::{StandIn, gpu};

/// The kernels' sources. The device's heap has a module of its own: loading it fixes the heap's size.
const PATTERN: &str = include_str!("pattern.ptx");
const SPIN: &str = include_str!("spin.ptx");
pub const POKE: &str = include_str!("poke.ptx");
pub const HEAP: &str = include_str!("heap.ptx");

const THREADS: u32 = 256;

/// Eight bytes of the pattern.
fn word(seed: u64, index: u64) -> u64 {
    let v = seed.wrapping_add(index).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    v ^ (v >> 29)
}

/// Writes the pattern of a seed.
pub fn fill(bytes: &mut [u8], seed: u64) {
    let mut words = bytes.chunks_exact_mut(8);
    let mut index = 0;
    for chunk in &mut words {
        chunk.copy_from_slice(&word(seed, index).to_le_bytes());
        index += 1;
    }
    let rest = words.into_remainder();
    rest.copy_from_slice(&word(seed, index).to_le_bytes()[..rest.len()]);
}

/// How many bytes are not those of the pattern.
pub fn wrong(bytes: &[u8], seed: u64) -> usize {
    let of = |bytes: &[u8], index| -> usize {
        let expected = word(seed, index).to_le_bytes();
        if *bytes == expected[..bytes.len()] {
            return 0;
        }
        bytes.iter().zip(expected).filter(|(a, b)| **a != *b).count()
    };
    bytes.chunks(8).enumerate().map(|(index, chunk)| of(chunk, index as u64)).sum()
}

/// What `check_pattern` adds up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub wrong: u64,
    pub bytes: u64,
    pub launches: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.wrong += other.wrong;
        self.bytes += other.bytes;
        self.launches += other.launches;
    }
}

/// A driver, called directly. Handles are numbers.
pub struct Raw(gpu::Raw);

impl Raw {
    /// The library at a path, which pinpool has loaded too or is about to.
    pub fn new(path: &Path) -> Self {
        Self::of(StandIn::any(path, "sim_cuda").expect("it was loaded before"))
    }

    /// The same of a simulated driver.
    pub fn of(library: StandIn) -> Self {
        let raw = Self(gpu::Raw(library));
        raw.ask("cuInit", &[0]);
        raw
    }

    /// The stand-in, if the library is it.
    pub fn stand_in(&self) -> &StandIn {
        &self.0.0
    }

    /// A call that must succeed.
    #[track_caller]
    fn ask(&self, call: &str, words: &[usize]) {
        let code = self.0.call(call, words);
        assert!(code == 0, "{call} failed with {code} ({})", self.name(code));
    }

    /// The same for one that writes a word to its first argument.
    #[track_caller]
    fn make(&self, call: &str, more: &[usize]) -> usize {
        let mut made = 0_usize;
        self.ask(call, &[&[(&raw mut made) as usize], more].concat());
        made
    }

    /// The driver's word for a code.
    pub fn name(&self, code: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        self.0.call("cuGetErrorName", &[code as usize, (&raw mut text) as usize]);
        // SAFETY: null, or a string that lives as long as the library.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        text.unwrap_or_else(|| "no name".into())
    }

    pub fn devices(&self) -> usize {
        // It writes an int.
        self.make("cuDeviceGetCount", &[]) & 0xFFFF_FFFF
    }

    /// Retains a GPU's primary context and makes it current here.
    pub fn enter(&self, device: usize) -> usize {
        let context = self.make("cuDevicePrimaryCtxRetain", &[device]);
        self.set_current(context);
        context
    }

    pub fn set_current(&self, context: usize) {
        self.ask("cuCtxSetCurrent", &[context]);
    }

    /// The context that is current here.
    pub fn current(&self) -> usize {
        self.make("cuCtxGetCurrent", &[])
    }

    pub fn release(&self, device: usize) {
        self.ask("cuDevicePrimaryCtxRelease_v2", &[device]);
    }

    pub fn alloc(&self, len: usize) -> u64 {
        self.make("cuMemAlloc_v2", &[len]) as u64
    }

    pub fn free(&self, address: u64) {
        self.ask("cuMemFree_v2", &[address as usize]);
    }

    /// A stream that is not ordered with the legacy default stream.
    pub fn stream(&self) -> usize {
        self.make("cuStreamCreate", &[1])
    }

    pub fn destroy(&self, stream: usize) {
        self.ask("cuStreamDestroy_v2", &[stream]);
    }

    pub fn synchronize(&self, stream: usize) {
        self.ask("cuStreamSynchronize", &[stream]);
    }

    /// The code of waiting for a stream.
    pub fn synchronized(&self, stream: usize) -> u32 {
        self.0.call("cuStreamSynchronize", &[stream])
    }

    /// Registers host memory with the driver, for every context.
    pub fn register(&self, at: *mut u8, len: usize) {
        self.ask("cuMemHostRegister_v2", &[at as usize, len, 1]);
    }

    pub fn unregister(&self, at: *mut u8) {
        self.ask("cuMemHostUnregister", &[at as usize]);
    }

    /// Copies from the device and waits.
    pub fn read(&self, from: u64, to: &mut [u8]) {
        self.ask("cuMemcpyDtoH_v2", &[to.as_mut_ptr() as usize, from as usize, to.len()]);
    }

    pub fn set_bytes(&self, at: u64, byte: u8, len: usize, stream: usize) {
        self.ask("cuMemsetD8Async", &[at as usize, byte as usize, len, stream]);
    }

    /// Loads a module into the current context.
    pub fn module(&self, source: &str) -> usize {
        let source = CString::new(source).expect("text without zeros");
        self.make("cuModuleLoadData", &[source.as_ptr() as usize])
    }

    pub fn kernel(&self, module: usize, name: &CStr) -> usize {
        self.make("cuModuleGetFunction", &[module, name.as_ptr() as usize])
    }

    /// Launches a kernel whose parameters are all words.
    pub fn launch(&self, kernel: usize, blocks: u32, threads: u32, stream: usize, words: &[u64]) {
        let mut parameters: Vec<usize> = words.iter().map(|word| std::ptr::from_ref(word) as usize).collect();
        let (blocks, threads, at) = (blocks as usize, threads as usize, parameters.as_mut_ptr() as usize);
        // The parameters are read during the call.
        self.ask("cuLaunchKernel", &[kernel, blocks, 1, 1, threads, 1, 1, 0, stream, at, 0]);
    }
}

/// The kernels of one context, which is current wherever they are used.
pub struct Kernels<'a> {
    raw: &'a Raw,
    check: usize,
    fill: usize,
    spin: usize,
}

impl<'a> Kernels<'a> {
    pub fn load(raw: &'a Raw) -> Self {
        let pattern = raw.module(PATTERN);
        Self {
            raw,
            check: raw.kernel(pattern, c"check_pattern"),
            fill: raw.kernel(pattern, c"fill_pattern"),
            spin: raw.kernel(raw.module(SPIN), c"spin"),
        }
    }

    fn blocks(len: usize) -> u32 {
        (len / (4 * THREADS as usize)).clamp(1, 128) as u32
    }

    /// Compares memory with the pattern and adds to the counts at `counts`.
    pub fn check(&self, at: u64, len: usize, seed: u64, counts: u64, stream: usize) {
        self.raw.launch(self.check, Self::blocks(len), THREADS, stream, &[at, len as u64, seed, counts]);
    }

    pub fn fill(&self, at: u64, len: usize, seed: u64, stream: usize) {
        self.raw.launch(self.fill, Self::blocks(len), THREADS, stream, &[at, len as u64, seed]);
    }

    /// Keeps a stream busy.
    pub fn spin(&self, nanoseconds: u64, stream: usize) {
        self.raw.launch(self.spin, 1, 1, stream, &[nanoseconds]);
    }

    /// Room for counts, all zero.
    pub fn counts(&self) -> u64 {
        let at = self.raw.alloc(size_of::<[u64; 3]>());
        // The legacy default stream, and waited for: zero before any kernel adds.
        self.raw.set_bytes(at, 0, size_of::<[u64; 3]>(), 0);
        self.raw.synchronize(0);
        at
    }

    /// The counts, when all kernels that add to them are complete.
    pub fn read(&self, counts: u64) -> Counts {
        let mut bytes = [0; size_of::<[u64; 3]>()];
        self.raw.read(counts, &mut bytes);
        let word = |n: usize| u64::from_le_bytes(bytes[8 * n..8 * n + 8].try_into().expect("eight bytes"));
        Counts { wrong: word(0), bytes: word(1), launches: word(2) }
    }
}

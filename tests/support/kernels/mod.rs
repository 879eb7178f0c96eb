//! Kernels for tests on a real GPU, and the plain driver calls to run them, beside pinpool and not through it.
//!
//! The kernels are PTX written by hand, which the driver itself assembles when it loads them: no compiler and no
//! toolkit is needed. The one that matters checks *on the device* that each byte of a buffer is the one that the host
//! meant to send, so that a copy that read too late or from the wrong place is seen on the device. [`fill`] and
//! [`wrong`] compute the same pattern on the host.
//!
//! Calls that are not expected to fail panic with their name and the code.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(unsafe_code, reason = "calling the driver")]

use std::ffi::{CStr, CString, c_char};

use crate::support::doubles::StandIn;

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
#[derive(Debug, PartialEq, Eq)]
pub struct Counts {
    pub wrong: u64,
    pub bytes: u64,
    pub launches: u64,
}

impl StandIn {
    /// The driver's word for a code.
    pub fn word(&self, code: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        self.call("cuGetErrorName", &[code as usize, (&raw mut text) as usize]);
        // SAFETY: null, or a string that lives as long as the library.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        text.unwrap_or_else(|| "no name".into())
    }

    /// Retains a GPU's primary context and makes it current here.
    pub fn retain(&self, device: usize) -> usize {
        let context = self.made("cuDevicePrimaryCtxRetain", &[device]);
        self.current(context);
        context
    }

    /// Copies from the device and waits.
    pub fn fetch(&self, from: usize, to: &mut [u8]) {
        self.ok("cuMemcpyDtoH_v2", &[to.as_mut_ptr() as usize, from, to.len()]);
    }

    /// A kernel of a module, which is loaded into the current context.
    pub fn kernel(&self, source: &str, name: &CStr) -> usize {
        let source = CString::new(source).expect("text without zeros");
        let module = self.made("cuModuleLoadData", &[source.as_ptr() as usize]);
        self.made("cuModuleGetFunction", &[module, name.as_ptr() as usize])
    }

    /// Launches a kernel whose parameters are all words.
    pub fn start(&self, kernel: usize, blocks: u32, threads: u32, stream: usize, words: &[u64]) {
        let mut parameters: Vec<usize> = words.iter().map(|word| std::ptr::from_ref(word) as usize).collect();
        let (blocks, threads, at) = (blocks as usize, threads as usize, parameters.as_mut_ptr() as usize);
        // The parameters are read during the call.
        self.ok("cuLaunchKernel", &[kernel, blocks, 1, 1, threads, 1, 1, 0, stream, at, 0]);
    }
}

/// The kernels of one context, which is current wherever they are used.
pub struct Kernels<'a> {
    raw: &'a StandIn,
    check: usize,
    spin: usize,
}

impl<'a> Kernels<'a> {
    pub fn load(raw: &'a StandIn) -> Self {
        let [check, spin] =
            [(PATTERN, c"check_pattern"), (SPIN, c"spin")].map(|(text, name)| raw.kernel(text, name));
        Self { raw, check, spin }
    }

    fn blocks(len: usize) -> u32 {
        (len / (4 * THREADS as usize)).clamp(1, 128) as u32
    }

    /// Compares memory with the pattern and adds to the counts at `counts`.
    pub fn check(&self, at: u64, len: usize, seed: u64, counts: u64, stream: usize) {
        self.raw.start(self.check, Self::blocks(len), THREADS, stream, &[at, len as u64, seed, counts]);
    }

    /// Keeps a stream busy.
    pub fn spin(&self, nanoseconds: u64, stream: usize) {
        self.raw.start(self.spin, 1, 1, stream, &[nanoseconds]);
    }

    /// Room for counts, all zero.
    pub fn counts(&self) -> u64 {
        let at = self.raw.memory(size_of::<[u64; 3]>());
        // The legacy default stream, and waited for: zero before any kernel adds.
        self.raw.ok("cuMemsetD8Async", &[at, 0, size_of::<[u64; 3]>(), 0]);
        self.raw.synchronize(0);
        at as u64
    }

    /// The counts, when all kernels that add to them are complete.
    pub fn read(&self, counts: u64) -> Counts {
        let mut bytes = [0; size_of::<[u64; 3]>()];
        self.raw.fetch(counts as usize, &mut bytes);
        let word = |n: usize| u64::from_le_bytes(bytes[8 * n..8 * n + 8].try_into().expect("eight bytes"));
        Counts { wrong: word(0), bytes: word(1), launches: word(2) }
    }
}

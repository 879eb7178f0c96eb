//! What only a GPU can show: kernels that check what arrives, graphs that replay, faults that end a context,
//! two GPUs at once, and processes that end in the middle of it all.
//!
//! Each test has a process of its own, so that a broken context, a setting of the whole process or a crash
//! stays with its test and is reported. Where there is no GPU, those that need no kernels run on the
//! simulated driver; the others are skipped and say so, which fails while `PINPOOL_REQUIRE` names a GPU.
//! `PINPOOL_HARDWARE_CHECKOUTS` says how many checkouts the longest test makes (20,000; the full run is
//! 1,000,000).
//!
//! pinpool is used through its public face, and the driver beside it by plain calls
//! (`tests/support/kernels`).

#![allow(unsafe_code, reason = "calling the driver")]

mod churn;
mod exit;
mod pointers;
mod poison;
mod runtime;
mod short;
mod two;

use std::path::Path;

use pinpool::{Device, DeviceSlice, PinnedBuf, Pool, Result, Stream, cuda};

use crate::rig::in_a_child;
use crate::support::doubles::gpu::{Raw, until};
use crate::support::doubles::{self, HANG, StandIn};
use crate::support::kernels::{self, Kernels};

/// The driver that a test has, beside pinpool.
pub struct Gpu {
    /// The same library that pinpool has loaded.
    pub raw: Raw,
    /// Not the stand-in.
    pub real: bool,
}

impl Gpu {
    /// The kernels, loaded into the first GPU's context, which is current here from now on. `None`: no real
    /// GPU.
    fn kernels(&self) -> Option<Kernels<'_>> {
        self.kernels_of(0)
    }

    fn kernels_of(&self, device: usize) -> Option<Kernels<'_>> {
        self.real.then(|| {
            self.raw.enter(device);
            Kernels::load(&self.raw)
        })
    }

    /// The stand-in, which the test can control. `None`: a real GPU.
    fn stand_in(&self) -> Option<&StandIn> {
        (!self.real).then_some(&self.raw.0)
    }

    /// Checks at the end of a test that the stand-in saw none of its rules broken.
    fn no_violations(&self) {
        if let Some(stand_in) = self.stand_in() {
            assert_eq!(stand_in.report().violations, Vec::<String>::new());
        }
    }
}

/// What a test needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// A driver, be it the stand-in.
    Driver,
    /// Kernels, so a GPU.
    Kernels,
}

/// Runs the body of a test in a child.
fn on_gpu(test: &str, needs: Needs, body: impl FnOnce(&Gpu)) {
    let Some(real) = in_a_child(test, needs == Needs::Kernels) else { return };
    let named = std::env::var_os(doubles::PATH).filter(|path| !path.is_empty());
    let path = named.unwrap_or_else(|| "libcuda.so.1".into());
    body(&Gpu { raw: Raw::at(Path::new(&path)), real });
}

/// A checked-out buffer with the pattern of a seed.
fn filled(pool: &Pool, len: usize, seed: u64) -> PinnedBuf {
    let mut buf = pool.checkout_timeout(len, HANG).expect("the pool has room");
    // SAFETY: the segment is mapped memory of this function alone, and all of `len` is written before it
    // counts as such.
    unsafe {
        let room = std::slice::from_raw_parts_mut(buf.as_mut_ptr(), len);
        kernels::fill(room, seed);
        buf.set_len(len);
    }
    buf
}

/// There and back; how many bytes were wrong.
fn round_trip(pool: &Pool, stream: &Stream, memory: &DeviceSlice, seed: u64) -> usize {
    drop(stream.upload(filled(pool, memory.len(), seed), memory).expect("an upload"));
    let landing = pool.checkout_timeout(memory.len(), HANG).expect("the pool has room");
    let back = stream.download(memory, landing).expect("a download").wait().expect("it lands");
    kernels::wrong(&back, seed)
}

/// The driver's handle of a stream.
fn raw_stream(stream: &Stream) -> usize {
    cuda::raw_stream(stream).expect("a stream of a GPU") as usize
}

/// Memory of the test's own, which stays allocated until all that uses it is complete.
fn raw_memory(device: &Device, address: u64, len: usize) -> Result<DeviceSlice> {
    // SAFETY: the tests keep it, or see to it that a copy to it is refused.
    unsafe { device.raw_memory(address, len, ()) }.map_err(|refused| refused.error)
}

fn open(ordinal: usize) -> Device {
    Device::open(&format!("cuda:{ordinal}")).expect("the GPU can be opened")
}

/// A pool that fits beside others.
fn pool(device: &Device) -> Pool {
    let built = Pool::builder(device).capacity(64 << 20).initial(8 << 20).region(16 << 20).extent(4 << 20);
    built.build().expect("a pool")
}

macro_rules! tests {
    ($($(#[$doc:meta])* $name:ident ($needs:ident) $body:path;)*) => {
        $($(#[$doc])* #[test] fn $name() {
            on_gpu(stringify!($name), Needs::$needs, $body);
        })*
    };
}

tests! {
    every_byte_is_checked_while_the_host_refills (Kernels) churn::sixteen_threads;
    memory_of_the_devices_heap_is_refused (Kernels) pointers::heap;
    an_illegal_address_poisons_and_nothing_hangs (Driver) poison::illegal_address;
    the_runtime_api_works_beside_the_pool (Kernels) runtime::beside;
    one_pool_for_two_gpus (Kernels) two::both;
    a_dead_gpu_leaves_the_other_serving (Driver) two::one_dies;
    a_process_may_end_while_the_pool_grows (Driver) exit::growing;
    a_process_may_end_in_every_way (Driver) exit::ways;
}

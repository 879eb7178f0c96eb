//! What only a GPU can show: kernels that check what arrives, graphs that replay, faults that end a context,
//! two GPUs at once, and processes that end in the middle of it all.
//!
//! Each test has a process of its own, so that a broken context, a setting of the whole process or a crash
//! stays with its test and is reported. Where there is no GPU they are skipped and say so, which fails while
//! `PINPOOL_REQUIRE` names one.
//!
//! pinpool is used through its public face, and the driver beside it by plain calls
//! (`tests/support/kernels`).

#![allow(unsafe_code, reason = "calling the driver")]

mod churn;
mod poison;
mod runtime;
mod two;

use pinpool::{Device, DeviceSlice, PinnedBuf, Pool, Result, Stream, cuda};

use crate::cuda::rig::{in_a_child, round_trip};
use crate::support::doubles::gpu::until;
use crate::support::doubles::{self, HANG, StandIn};
use crate::support::exits;
use crate::support::kernels::{self, Kernels};

/// Runs the body of a test in a child, with the driver that pinpool loads there.
fn on_gpu(test: &str, body: impl FnOnce(&StandIn)) {
    if in_a_child(test, true).is_some() {
        body(&StandIn::of_this_process());
    }
}

/// The kernels, loaded into a GPU's context, which is current here from now on.
fn kernels_of(raw: &StandIn, device: usize) -> Kernels<'_> {
    raw.retain(device);
    Kernels::load(raw)
}

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
    ($($name:ident $body:path;)*) => {
        $(#[test] fn $name() {
            on_gpu(stringify!($name), $body);
        })*
    };
}

tests! {
    every_byte_is_checked_while_the_host_refills churn::sixteen_threads;
    an_illegal_address_poisons_and_nothing_hangs poison::illegal_address;
    the_runtime_api_works_beside_the_pool runtime::beside;
    one_pool_for_two_gpus two::both;
    a_dead_gpu_leaves_the_other_serving two::one_dies;
    thousands_of_very_short_copies_leave_the_device_alive churn::thousands;
}

/// In each way in which a program can end: `tests/support/exits.rs` says how often and under which command.
/// (`kept` has them on the simulated driver.)
#[test]
fn a_process_may_end_in_every_way() {
    const TEST: &str = "a_process_may_end_in_every_way";
    if in_a_child(TEST, true).is_some() {
        exits::all(TEST, "cuda:0", &[]);
    }
}

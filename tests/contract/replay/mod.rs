//! The field's early-reuse bugs, replayed.
//!
//! Six ways in which servers lost or mixed up bytes because a pinned buffer was used again, or read, while a copy was
//! still under way. Each is run against a plain pool that takes a buffer back when its handle is dropped, with a copy
//! engine that is as late as real ones may be, and against pinpool on devices that are just as late. The plain pool is
//! seen to corrupt; pinpool must not get a single byte wrong, nor lose a buffer.
//!
//! The scenarios (`scenarios.rs`) are written once and run on the host devices (`host.rs`), on a simulated Ascend device
//! (`npu.rs`), and on a GPU (`gpu.rs`): the first one of the machine, or simulated ones, whose copies are as late as the
//! rules allow. On a real GPU a kernel now and then keeps a stream from copying.
//!
//! `PINPOOL_REPLAY=full` runs at least 1,700,000 checkouts in each scenario, 10,200,000 in all, on the host devices and
//! as many on a real GPU; otherwise a small part.

#![allow(unsafe_code, reason = "calling the driver of a real GPU")]

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod gpu;
mod host;
#[cfg(all(feature = "acl", target_os = "linux"))]
mod npu;
mod plain;
mod scenarios;
mod worker;

/// Words of a slot of device memory, which is what the longest buffer has: 512 bytes.
const WORDS: usize = 64;
const BYTES: usize = WORDS * 8;
/// Slots that a worker has, and transfers of a round.
const SLOTS: usize = 64;

fn full() -> bool {
    std::env::var("PINPOOL_REPLAY").is_ok_and(|v| v == "full")
}

/// Word `i` of the message with this number. (The mixing of splitmix64.)
fn word(seq: u64, i: usize) -> u64 {
    let mut x = seq.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i as u64);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn message(seq: u64, n: usize) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (i, place) in words[..n].iter_mut().enumerate() {
        *place = word(seq, i);
    }
    words
}

/// Keeps a value to the process's end, in a place where a search for leaks does not find it.
#[cfg(feature = "cuda")]
fn kept<T: Send + Sync + 'static>(value: T) -> &'static T {
    static KEPT: std::sync::Mutex<Vec<&'static (dyn std::any::Any + Send + Sync)>> =
        std::sync::Mutex::new(Vec::new());
    let value: &'static T = Box::leak(Box::new(value));
    KEPT.lock().unwrap().push(value);
    value
}

/// A small generator of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        word(self.0, 7) % n
    }

    /// Words of a message.
    fn len(&mut self) -> usize {
        8 + self.below(WORDS as u64 - 7) as usize
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

macro_rules! scenarios {
    ($($name:ident)*) => {
        mod on_host_devices {
            $(#[test] fn $name() {
                super::scenarios::$name(&super::host::Host);
            })*
        }

        #[cfg(all(feature = "cuda", target_os = "linux"))]
        mod on_a_gpu {
            $(#[test] fn $name() {
                super::gpu::on_gpu(concat!("on_a_gpu::", stringify!($name)), super::scenarios::$name);
            })*
        }

        #[cfg(all(feature = "acl", target_os = "linux"))]
        mod on_an_npu {
            $(#[test] fn $name() {
                super::npu::on_npu(super::scenarios::$name);
            })*
        }
    };
}

scenarios! {
    source_overwritten_before_the_copy_reads
    returned_on_drop_while_in_flight
    download_read_at_once
    two_streams_with_one_shared_buffer
    aborted_half_way
    error_reported_as_done
}

//! The field's early-reuse bugs, replayed.
//!
//! Six ways in which servers lost or mixed up bytes because a pinned buffer was used again, or read, while a
//! copy was still under way. Each is run against pinpool on devices whose copies are as late as real ones may
//! be; pinpool must not get a single byte wrong, nor lose a buffer.
//!
//! The scenarios (`scenarios.rs`) are written once and run on the host devices (`host.rs`), on simulated
//! Ascend devices and on a GPU (`gpu.rs`): the first one of the machine, or simulated ones (`simulated.rs`),
//! whose copies are as late as the rules allow. On a real GPU a kernel now and then keeps a stream from
//! copying.
//!
//! `PINPOOL_REPLAY=full` runs at least 1,700,000 checkouts in each scenario, 10,200,000 in all, on the host
//! devices and as many on a real GPU; otherwise a small part.

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[allow(unsafe_code, reason = "calling the driver of a real GPU")]
mod gpu;
mod host;
mod scenarios;
#[cfg(all(any(feature = "acl", feature = "cuda"), target_os = "linux"))]
mod simulated;
mod worker;

/// Words of a slot of device memory, which is what the longest buffer has: 512 bytes.
const WORDS: usize = 64;
const BYTES: usize = WORDS * 8;
/// Slots that a worker has, and transfers of a round.
const SLOTS: usize = 64;

/// Checkouts of a scenario: when everything is run, and otherwise.
fn checkouts(full: u64, usual: u64) -> u64 {
    if std::env::var("PINPOOL_REPLAY").is_ok_and(|v| v == "full") { full } else { usual }
}

/// Word `i` of the message with this number. (The mixing of splitmix64.)
fn word(seq: u64, i: usize) -> u64 {
    let mut x = seq.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i as u64);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn message(seq: u64, n: usize) -> Vec<u64> {
    (0..n).map(|i| word(seq, i)).collect()
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

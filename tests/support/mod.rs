//! What the executables of tests/ share: see tests/README.md.

#![allow(dead_code, unused_imports, unused_macros, reason = "each executable uses a part of it")]

pub mod doubles;
pub mod exits;
pub mod kernels;
pub mod library;
pub mod panicking;
pub mod process;
pub mod rig;
pub mod skip;

pub(crate) use process::own_process;
pub(crate) use skip::skip;

/// Bytes of a pool that are checked out or in flight, at one moment: between two looks a buffer may go from one sum to
/// the other.
pub fn in_use(pool: &pinpool::Pool) -> usize {
    let stats = pool.stats();
    stats.checked_out_bytes + stats.in_flight_bytes
}

/// Bytes that depend on their place and on the seed.
pub fn bytes(seed: usize, len: usize) -> Vec<u8> {
    let at = |i: usize| (i.wrapping_mul(31) ^ i >> 8).wrapping_add(seed.wrapping_mul(97)) as u8;
    // What follows the first 64 KiB is the same again.
    let mut made: Vec<u8> = (0..len.min(1 << 16)).map(at).collect();
    while made.len() < len {
        let more = made.len().min(len - made.len());
        made.extend_from_within(..more);
    }
    made
}

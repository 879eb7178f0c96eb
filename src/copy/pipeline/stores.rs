//! Copying between memory and segments: by the library's `memcpy`, or by stores that go past the caches.
//!
//! What is copied here is read again by the device and by nobody else, or was just written by it. Stores past the caches
//! ("non-temporal") spare the read of each line that an ordinary store makes first, which pays where the memory itself is
//! the limit, that is with many threads; with few, one thread's rate is lower (on the H200 machine 8.6 against 10.6 GB/s
//! for one thread, 57 against 51 for sixteen).

use std::mem::MaybeUninit;

/// How bytes are put into their place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stores {
    /// By `memcpy`, through the caches.
    #[default]
    Cached,
    /// Past the caches, where the processor can (x86_64); elsewhere as [`Cached`](Self::Cached).
    Streaming,
}

/// Shorter copies are made the ordinary way.
#[cfg(target_arch = "x86_64")]
const SHORT: usize = 4096;

/// Copies `from` to `to`, which is as long: all of it is initialised then.
pub(super) fn copy(from: &[u8], to: &mut [MaybeUninit<u8>], stores: Stores) {
    assert_eq!(from.len(), to.len(), "as long");
    #[cfg(target_arch = "x86_64")]
    if stores == Stores::Streaming && from.len() >= SHORT {
        return stream(from, to);
    }
    let _ = stores;
    // SAFETY: as long, and an exclusive borrow overlaps no other.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast(), from.len()) };
}

#[cfg(target_arch = "x86_64")]
fn stream(from: &[u8], to: &mut [MaybeUninit<u8>]) {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_NTA, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };
    const LINE: usize = 64;
    /// Bytes ahead that are fetched.
    const AHEAD: usize = 1024;

    let front = to.as_ptr().align_offset(LINE).min(from.len());
    let lines = (from.len() - front) / LINE;
    let (middle, end) = (front, front + lines * LINE);
    copy(&from[..front], &mut to[..front], Stores::Cached);
    let (src, dst) = (from[middle..end].as_ptr(), to[middle..end].as_mut_ptr().cast::<u8>());
    let mut at = 0;
    while at < lines * LINE {
        // SAFETY: SSE2 is a part of x86_64. Within the two ranges, of which the target starts on a line and is borrowed
        // exclusively; a prefetch reads nothing, wherever it points.
        unsafe {
            _mm_prefetch::<_MM_HINT_NTA>(src.wrapping_add(at + AHEAD).cast());
            let line: [__m128i; 4] = std::array::from_fn(|i| _mm_loadu_si128(src.add(at + 16 * i).cast()));
            for (i, part) in line.into_iter().enumerate() {
                _mm_stream_si128(dst.add(at + 16 * i).cast(), part);
            }
        }
        at += LINE;
    }
    // SAFETY: a fence; these stores are ordered with nothing else without it, the release of a lock included.
    unsafe { _mm_sfence() };
    copy(&from[end..], &mut to[end..], Stores::Cached);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn both_ways_copy_every_byte_and_no_other() {
        let from: Vec<u8> = (0..20_000_u32).map(|i| (i % 251) as u8).collect();
        for stores in [Stores::Cached, Stores::Streaming] {
            for (start, len) in [(0, 0), (0, 1), (3, 4096), (1, 4097), (63, 8191), (64, 16_384), (17, 19_000)]
            {
                let mut to = vec![MaybeUninit::new(255_u8); 20_000];
                copy(&from[start..start + len], &mut to[7..7 + len], stores);
                // SAFETY: initialised from the start.
                let to: Vec<u8> = to.iter().map(|b| unsafe { b.assume_init() }).collect();
                assert!(to[7..7 + len] == from[start..start + len], "{stores:?} {start} {len}");
                assert!(to[..7].iter().chain(&to[7 + len..]).all(|b| *b == 255), "{stores:?} {start} {len}");
            }
        }
    }
}

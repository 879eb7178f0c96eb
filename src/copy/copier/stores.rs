//! Copies between memory and segments: by `memcpy`, or by stores past the caches. Prefetching.
//!
//! *Into segments*, which the device reads next: through the caches, from which the device is
//! served. On an H200 machine eight threads reach 0.76 of the link's speed past them, and 0.92
//! through them, while the segments in use fit there.
//!
//! *Out of segments*: past the caches. An ordinary store reads each line first, and with few
//! threads the memory is the limit then. Processors without AVX2 copy through the caches.

use std::mem::MaybeUninit;

/// Shorter copies go through the caches.
#[cfg(target_arch = "x86_64")]
const SHORT: usize = 4096;

/// Copies `from` to `to`, which is as long: all of it is initialised then.
pub(super) fn copy(from: &[u8], to: &mut [MaybeUninit<u8>]) {
    assert_eq!(from.len(), to.len(), "as long");
    // SAFETY: as long, and an exclusive borrow overlaps no other.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast(), from.len()) };
}

/// Copies like [`copy`], past the caches where the processor can (x86_64 with AVX2).
pub(super) fn stream(from: &[u8], to: &mut [MaybeUninit<u8>]) {
    #[cfg(target_arch = "x86_64")]
    if from.len() >= SHORT && from.len() == to.len() && std::arch::is_x86_feature_detected!("avx2") {
        let front = to.as_ptr().align_offset(LINE).min(from.len());
        let end = front + (from.len() - front) / LINE * LINE;
        copy(&from[..front], &mut to[..front]);
        // SAFETY: the processor has it; whole lines, and the target starts on one.
        unsafe {
            lines(&from[front..end], &mut to[front..end]);
            // Such stores are ordered with nothing else without it, the release of a lock included.
            std::arch::x86_64::_mm_sfence();
        }
        return copy(&from[end..], &mut to[end..]);
    }
    copy(from, to);
}

/// Has the processor fetch the line at an address, which may be any, into its caches.
#[inline]
pub(super) fn fetch(at: *const u8) {
    // SAFETY: SSE is a part of x86_64; a prefetch reads nothing, wherever it points.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    let _ = at;
}

/// Lines of the processor's caches.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// # Safety
/// The processor has AVX2. Both are as long, whole lines, and `to` starts on one.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn lines(from: &[u8], to: &mut [MaybeUninit<u8>]) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};

    let (src, dst) = (from.as_ptr(), to.as_mut_ptr().cast::<u8>());
    for at in (0..from.len()).step_by(LINE) {
        // SAFETY: within the two, which do not overlap, since one is borrowed exclusively; the
        // target's halves of a line start on multiples of 32.
        unsafe {
            let halves: [__m256i; 2] =
                std::array::from_fn(|i| _mm256_loadu_si256(src.add(at + 32 * i).cast()));
            for (i, half) in halves.into_iter().enumerate() {
                _mm256_stream_si256(dst.add(at + 32 * i).cast(), half);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn both_ways_copy_every_byte_and_no_other() {
        let from: Vec<u8> = (0..20_000_u32).map(|i| (i % 251) as u8).collect();
        for (name, way) in [("copy", copy as fn(&[u8], &mut [MaybeUninit<u8>])), ("stream", stream)] {
            for (start, len) in [(0, 0), (0, 1), (3, 4096), (1, 4097), (63, 8191), (64, 16_384), (17, 19_000)]
            {
                let mut to = vec![MaybeUninit::new(255_u8); 20_000];
                way(&from[start..start + len], &mut to[7..7 + len]);
                // SAFETY: initialised from the start.
                let to: Vec<u8> = to.iter().map(|b| unsafe { b.assume_init() }).collect();
                assert!(to[7..7 + len] == from[start..start + len], "{name} {start} {len}");
                assert!(to[..7].iter().chain(&to[7 + len..]).all(|b| *b == 255), "{name} {start} {len}");
            }
        }
    }
}

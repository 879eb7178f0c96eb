//! The bytes that a model sends and expects, and what it leaves mapped.

use pinpool::RegionInfo;

/// Bytes unlike those of any other number.
pub fn fresh(number: u32, len: usize) -> Vec<u8> {
    let mut x = number.wrapping_mul(0x9E37_79B9);
    let mut byte = || {
        x = x.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
        (x >> 24) as u8
    };
    (0..len).map(|_| byte()).collect()
}

/// `None` stands for a byte that is not known.
pub fn known(bytes: &[u8]) -> Vec<Option<u8>> {
    bytes.iter().copied().map(Some).collect()
}

pub fn compare(bytes: &[u8], expected: &[Option<u8>], what: &str) {
    assert_eq!(bytes.len(), expected.len(), "{what}: length");
    for (i, (byte, expected)) in bytes.iter().zip(expected).enumerate() {
        assert!(expected.is_none_or(|e| e == *byte), "{what}: byte {i} is {byte}, not {expected:?}");
    }
}

/// Unmaps what a pool that is gone keeps mapped, as it must, for segments that never come back. Millions of inputs would
/// fill the machine's memory.
pub fn unmap(regions: &[RegionInfo]) {
    for region in regions {
        // SAFETY: the pool never unmaps this mapping, and no handle of it is left, so no code uses it any more.
        unsafe { libc::munmap(region.base.as_ptr().cast(), region.len) };
    }
}

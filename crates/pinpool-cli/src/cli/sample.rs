//! Bytes to copy, and a temporary file of them for a command line that names no file.
//!
//! The file has no name, so the system removes it when the process ends, even by a kill.

use std::fs::File;
use std::io::{self, Write};

/// Bytes written at a time.
const BLOCK: usize = 1 << 20;

/// A file of `len` bytes that do not repeat, so that a chunk in the wrong place changes a checksum.
pub fn make(len: u64) -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    while at < len {
        fill(&mut block, at);
        let part = (len - at).min(BLOCK as u64);
        file.write_all(&block[..part as usize])?;
        at += part;
    }
    Ok(file)
}

/// Fills `bytes` from a sequence that does not repeat, from its byte `from`, a multiple of eight.
pub fn fill(bytes: &mut [u8], from: u64) {
    for (count, word) in (from / 8..).zip(bytes.chunks_mut(8)) {
        // Multiples of an odd number repeat after 2^64 of them. This one, near the golden section
        // of 2^64, sets the upper bits of small multiples as well.
        let number = count.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&number.to_le_bytes()[..word.len()]);
    }
}

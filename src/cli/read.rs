//! Reading a file straight into a pinned buffer, without an intermediate copy and without zeroing it first.
//!
//! The standard library reads at an offset into initialised slices only, and a fresh buffer is not initialised. So this
//! is the one place in the command that makes a system call by hand.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use pinpool::PinnedBuf;

/// Appends the file's bytes from `offset` on until `buf` is full or the file ends. How many came is what the length of
/// `buf` grew by.
pub fn fill(buf: &mut PinnedBuf, file: &File, mut offset: u64) -> io::Result<()> {
    while buf.remaining() > 0 {
        let at = i64::try_from(offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let (len, spare) = (buf.len(), buf.spare_capacity_mut());
        // SAFETY: the kernel writes at most `spare.len()` bytes to memory that is borrowed mutably meanwhile.
        let read = unsafe { libc::pread64(file.as_raw_fd(), spare.as_mut_ptr().cast(), spare.len(), at) };
        match usize::try_from(read) {
            Ok(0) => break,
            Ok(read) => {
                // SAFETY: within the spare capacity, and the kernel has just initialised that many bytes of it.
                unsafe { buf.set_len(len + read) };
                offset += read as u64;
            }
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

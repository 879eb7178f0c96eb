//! The system calls on files: reading at an offset into uninitialised memory, reading only what the page cache has,
//! and reading past the page cache.
//!
//! *What the cache has.* `preadv2` with `RWF_NOWAIT` reads bytes that are in the page cache, and stops before bytes
//! that the disk would have to deliver. So reading and asking are one call, and the answer cannot be outdated when it
//! is used.
//!
//! *Past the cache.* A file is opened a second time with `O_DIRECT`, through the descriptor that exists already, so
//! that it is the same file whatever its name means by now. If a file system refuses that, there is no second
//! descriptor, and the file is read through the cache. A file that the program opened with `O_DIRECT` is opened again
//! without it, in the same way.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;

/// The result of [`read_cached`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cached {
    /// This many bytes were read; 0: the file ends here.
    Read(usize),
    /// The next byte is not in the page cache.
    Missing,
    /// The file system does not tell.
    Unknown,
}

#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(not(target_os = "linux"))]
pub(crate) use other::*;

#[cfg(target_os = "linux")]
mod linux {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    use super::{Cached, File, MaybeUninit, io};

    fn position(at: u64) -> io::Result<i64> {
        i64::try_from(at).map_err(|_| io::ErrorKind::FileTooLarge.into())
    }

    /// Reads at an offset. Returns how many bytes at the front of `into` were read; 0: the file ends before them.
    pub(crate) fn read_at(file: &File, into: &mut [MaybeUninit<u8>], at: u64) -> io::Result<usize> {
        let at = position(at)?;
        loop {
            // SAFETY: the kernel writes at most `into.len()` bytes to memory that is borrowed mutably meanwhile.
            let read = unsafe { libc::pread64(file.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), at) };
            match usize::try_from(read) {
                Ok(read) => return Ok(read),
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }

    /// Reads at an offset, only what the page cache has.
    pub(crate) fn read_cached(file: &File, into: &mut [MaybeUninit<u8>], at: u64) -> io::Result<Cached> {
        let at = position(at)?;
        let part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        loop {
            // SAFETY: one part, which lives for the call; the kernel writes at most its length to memory that is
            // borrowed mutably meanwhile.
            let read = unsafe { libc::preadv2(file.as_raw_fd(), &raw const part, 1, at, libc::RWF_NOWAIT) };
            if let Ok(read) = usize::try_from(read) {
                return Ok(Cached::Read(read));
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => return Ok(Cached::Missing),
                // The file system, the kernel or a sandbox does not support the call.
                Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPERM) => {
                    return Ok(Cached::Unknown);
                }
                _ => return Err(error),
            }
        }
    }

    /// Writes all bytes at an offset.
    pub(crate) fn write_all_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
    }

    /// The flags with which the file was opened, or that it was given since; 0 if the system does not tell.
    fn flags(file: &File) -> libc::c_int {
        // SAFETY: asks for a number; the descriptor is open as long as the file is borrowed.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) }.max(0)
    }

    /// Whether every write goes to the end of the file, whatever its offset (open(2), pwrite(2): `O_APPEND`).
    pub(crate) fn appends(file: &File) -> bool {
        flags(file) & libc::O_APPEND != 0
    }

    /// Whether the file is read and written past the page cache: `O_DIRECT`.
    pub(crate) fn is_direct(file: &File) -> bool {
        flags(file) & libc::O_DIRECT != 0
    }

    /// The same file, opened for reading through the page cache, whatever way it was opened.
    pub(crate) fn reopen(file: &File) -> io::Result<File> {
        same(file, std::fs::OpenOptions::new().read(true))
    }

    /// Opens the same file once more, by the calling thread's own table of files. A thread that has left the process's
    /// table (unshare(2): `CLONE_FILES`) has other files under the same numbers.
    fn same(file: &File, options: &std::fs::OpenOptions) -> io::Result<File> {
        let other = options.open(format!("/proc/thread-self/fd/{}", file.as_raw_fd()))?;
        let (it, is) = (file.metadata()?, other.metadata()?);
        match (it.dev(), it.ino()) == (is.dev(), is.ino()) {
            true => Ok(other),
            false => Err(io::Error::other("another file was found under its number")),
        }
    }

    /// The same file, opened for reading past the page cache. Reads through it start and end on whole pages, in the
    /// file and in memory.
    pub(crate) fn reopen_direct(file: &File) -> io::Result<File> {
        same(file, std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT))
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    use super::{Cached, File, MaybeUninit, io};

    pub(crate) fn read_at(_: &File, _: &mut [MaybeUninit<u8>], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn read_cached(_: &File, _: &mut [MaybeUninit<u8>], _: u64) -> io::Result<Cached> {
        Ok(Cached::Unknown)
    }

    pub(crate) fn write_all_at(_: &File, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn appends(_: &File) -> bool {
        false
    }

    pub(crate) fn is_direct(_: &File) -> bool {
        false
    }

    pub(crate) fn reopen(_: &File) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn reopen_direct(_: &File) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(all(test, target_os = "linux", not(loom)))]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;

    fn text(read: &[MaybeUninit<u8>]) -> &[u8] {
        // SAFETY: the tests pass what was just read.
        unsafe { std::slice::from_raw_parts(read.as_ptr().cast(), read.len()) }
    }

    #[test]
    fn reads_at_offsets_up_to_the_end() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello, world").unwrap();
        let mut into = [MaybeUninit::uninit(); 8];
        assert_eq!(read_at(&file, &mut into, 7).unwrap(), 5);
        assert_eq!(text(&into[..5]), b"world");
        assert_eq!(read_at(&file, &mut into, 12).unwrap(), 0);
        assert!(read_at(&file, &mut into, u64::MAX).is_err());
        match read_cached(&file, &mut into, 7).unwrap() {
            Cached::Read(read) => assert_eq!(text(&into[..read]), &b"world"[..read]),
            Cached::Missing | Cached::Unknown => {}
        }
    }

    #[test]
    fn a_file_is_opened_again() {
        let mut file = tempfile::tempfile().unwrap();
        assert!(!is_direct(&file) && !appends(&file));
        file.write_all(&[7; 3 * 4096]).unwrap();
        // Some file systems refuse this; others read the same bytes.
        if let Ok(direct) = reopen_direct(&file) {
            assert_eq!(direct.metadata().unwrap().len(), 3 * 4096);
            assert!(is_direct(&direct) && !is_direct(&reopen(&direct).unwrap()));
        }
    }

    #[test]
    fn a_thread_with_files_of_its_own_opens_its_own_again() {
        let [mut mine, mut other] = [0, 1].map(|_| tempfile::tempfile().unwrap());
        mine.write_all(b"mine").unwrap();
        other.write_all(b"another").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                use std::os::fd::FromRawFd;
                // SAFETY: this thread's table is a copy from here on. In it the number of the other file is given to
                // this file too, and to no other.
                let file = unsafe {
                    assert_eq!(libc::unshare(libc::CLONE_FILES), 0);
                    assert_eq!(libc::dup2(mine.as_raw_fd(), other.as_raw_fd()), other.as_raw_fd());
                    std::mem::ManuallyDrop::new(File::from_raw_fd(other.as_raw_fd()))
                };
                assert_eq!(reopen(&file).unwrap().metadata().unwrap().len(), 4);
            });
        });
    }
}

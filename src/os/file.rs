//! The system calls on files: reading at an offset, through the page cache and past it.
//!
//! *What the cache has.* `cachestat` (Linux 6.5) counts the cached pages of a range, and `mincore`
//! marks them in a mapping that nobody touches, without another effect. A read that does not wait
//! (`preadv2` with `RWF_NOWAIT`) is no question: the kernel starts to read ahead. The kernel tells
//! only who owns the file, who may write to it, or root. To others `mincore` calls every page
//! cached, so only the owner and root ask it.
//!
//! *Past the cache.* A file is opened a second time with `O_DIRECT`, through the descriptor that
//! exists already, so that it is the same file whatever its name means by now. If a file system
//! refuses that, there is no second descriptor, and the file is read through the cache.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

/// How much of a range the page cache has: [`cached`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cached {
    All,
    Part,
    Nothing,
}

/// Reads at an offset. Returns the bytes read at the front of `into`; 0: the file ends before.
pub(crate) fn read_at(file: &File, into: &mut [MaybeUninit<u8>], at: u64) -> io::Result<usize> {
    let at = i64::try_from(at).map_err(|_| io::ErrorKind::FileTooLarge)?;
    loop {
        // SAFETY: the kernel writes at most `into.len()` bytes to memory borrowed mutably.
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

/// How much of `len` bytes of a file from `at` on the page cache has. `None`: it is not told.
pub(crate) fn cached(file: &File, at: u64, len: usize) -> Option<Cached> {
    let page = crate::os::page_size() as u64;
    let end = at.checked_add(len as u64).filter(|end| *end > at && i64::try_from(*end).is_ok())?;
    let (first, last) = (at / page, (end - 1) / page);
    // An overlay has no pages of its own: they are the file's below, which is what is mapped.
    let counted = if is_overlay(file) { None } else { cachestat(file, at, len as u64) };
    let cached = counted.or_else(|| if is_own(file) { mincore(file, first, last) } else { None })?;
    Some(match cached {
        0 => Cached::Nothing,
        cached if cached > last - first => Cached::All,
        _ => Cached::Part,
    })
}

/// Whether the file is this user's, or this user is root.
fn is_own(file: &File) -> bool {
    // SAFETY: asks for a number.
    let user = unsafe { libc::geteuid() };
    user == 0 || file.metadata().is_ok_and(|metadata| metadata.uid() == user)
}

fn is_overlay(file: &File) -> bool {
    let mut told = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the kernel writes the struct, for which all zeros are valid too.
    let told = unsafe {
        libc::fstatfs(file.as_raw_fd(), told.as_mut_ptr());
        told.assume_init()
    };
    told.f_type as u64 == libc::OVERLAYFS_SUPER_MAGIC as u64
}

/// Pages of a range that the page cache has. `None`: the kernel or a sandbox does not have the
/// call, the file system does not support it, or the process may not know.
fn cachestat(file: &File, at: u64, len: u64) -> Option<u64> {
    /// The call's number, on all architectures that number new calls alike.
    const CACHESTAT: libc::c_long = 451;
    if cfg!(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"))) {
        return None;
    }
    // The kernel's `cachestat_range`, and `cachestat`, which begins with the cached pages.
    let (range, mut counts) = ([at, len], [0_u64; 5]);
    // SAFETY: the kernel reads the range and writes the counts.
    let said = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0 as libc::c_uint)
    };
    (said == 0).then_some(counts[0])
}

/// Cached pages from `first` to `last`, by `mincore`. `None`: the file cannot be mapped.
fn mincore(file: &File, first: u64, last: u64) -> Option<u64> {
    let page = crate::os::page_size();
    let at = i64::try_from(first * page as u64).ok()?;
    let mut marks = vec![0_u8; (last - first + 1) as usize];
    let len = marks.len() * page;
    // SAFETY: a mapping of its own, untouched and unmapped below, with a mark for each page.
    let said = unsafe {
        let (shared, read) = (libc::MAP_SHARED, libc::PROT_READ);
        let map = libc::mmap64(std::ptr::null_mut(), len, read, shared, file.as_raw_fd(), at);
        if map == libc::MAP_FAILED {
            return None;
        }
        let said = libc::mincore(map, len, marks.as_mut_ptr());
        libc::munmap(map, len);
        said
    };
    (said == 0).then(|| marks.iter().filter(|mark| **mark & 1 == 1).count() as u64)
}

/// The flags that the file was opened with, or was given since; 0: it is not told.
fn flags(file: &File) -> libc::c_int {
    // SAFETY: asks for a number; the descriptor is open as long as the file is borrowed.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) }.max(0)
}

/// Whether every write goes to the file's end (open(2), pwrite(2): `O_APPEND`).
pub(crate) fn appends(file: &File) -> bool {
    flags(file) & libc::O_APPEND != 0
}

/// Whether the file is read and written past the page cache: `O_DIRECT`.
pub(crate) fn is_direct(file: &File) -> bool {
    flags(file) & libc::O_DIRECT != 0
}

/// Opens the same file once more, by the calling thread's own table of files. A thread that has
/// left the process's table (unshare(2): `CLONE_FILES`) has other files under the same numbers.
fn same(file: &File, options: &std::fs::OpenOptions) -> io::Result<File> {
    options.open(format!("/proc/thread-self/fd/{}", file.as_raw_fd()))
}

/// Opens a file again for reads past the page cache, which are of whole pages in file and memory.
pub(crate) fn reopen_direct(file: &File) -> io::Result<File> {
    same(file, std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn both_questions_have_one_answer_and_no_effect() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(&vec![7; 300 * 4096 + 5]).unwrap();
        let ask = |first: u64, last: u64| {
            let asked = mincore(&file, first, last);
            let counted = cachestat(&file, first * 4096, (last - first + 1) * 4096);
            assert!(counted.is_none() || counted == asked, "{counted:?} {asked:?}");
            asked
        };
        assert_eq!((ask(0, 300), ask(7, 7)), (Some(301), Some(1)));
        assert_eq!(cached(&file, 5, 300 * 4096), Some(Cached::All));
        assert_eq!(cached(&file, 300 * 4096, 3 * 4096), Some(Cached::Part), "it ends before");
        assert_eq!((cached(&file, 400 * 4096, 1), cached(&file, 0, 0)), (Some(Cached::Nothing), None));
        assert_eq!(cached(&file, u64::MAX, 1), None);
        file.sync_all().unwrap();
        // SAFETY: advice about a file that is open.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        if ask(0, 300) != Some(0) {
            // A file system in memory.
            return;
        }
        for _ in 0..3 {
            assert_eq!(cached(&file, 0, 300 * 4096), Some(Cached::Nothing));
            assert_eq!(ask(0, 300), Some(0), "what was asked for is not read ahead");
        }
        assert_eq!(read_at(&file, &mut [MaybeUninit::uninit(); 8], 200 * 4096).unwrap(), 8);
        assert_eq!(cached(&file, 0, 300 * 4096), Some(Cached::Part));
    }

    #[test]
    fn a_thread_with_files_of_its_own_opens_its_own_again() {
        let [mut mine, mut other] = [0, 1].map(|_| tempfile::tempfile().unwrap());
        mine.write_all(b"mine").unwrap();
        other.write_all(b"another").unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                use std::os::fd::FromRawFd;
                // SAFETY: this thread's table is a copy from here on. In it the number of the other
                // file is given to this file too, and to no other.
                let file = unsafe {
                    assert_eq!(libc::unshare(libc::CLONE_FILES), 0);
                    assert_eq!(libc::dup2(mine.as_raw_fd(), other.as_raw_fd()), other.as_raw_fd());
                    std::mem::ManuallyDrop::new(File::from_raw_fd(other.as_raw_fd()))
                };
                let own = same(&file, std::fs::OpenOptions::new().read(true)).unwrap();
                assert_eq!(own.metadata().unwrap().len(), 4);
            });
        });
    }
}

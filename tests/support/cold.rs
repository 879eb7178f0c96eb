//! Files that are not in the page cache, and what is read of them from the disk.

#![allow(unsafe_code, reason = "system calls")]

use std::fs::File;
use std::os::fd::AsRawFd;

const PAGE: usize = 4096;

/// Writes a file's bytes to the disk and drops them from the page cache. Whether the cache has none of them then, and
/// the file system reads past the cache: else nothing can be said about cold files there.
pub fn chill(file: &File) -> bool {
    file.sync_all().unwrap();
    // SAFETY: advice about a file that is open.
    assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
    cached_pages(file) == 0
}

/// Has the kernel read what is asked for by this descriptor, and no more.
#[allow(dead_code, reason = "one executable uses it")]
pub fn read_nothing_ahead(file: &File) {
    // SAFETY: advice about a file that is open.
    assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) }, 0);
}

/// Pages of a file that the page cache has.
pub fn cached_pages(file: &File) -> usize {
    let len = file.metadata().unwrap().len() as usize;
    let mut pages = vec![0_u8; len.div_ceil(PAGE)];
    // SAFETY: a mapping of its own, which is never touched and is unmapped here. The list has an entry for each page.
    unsafe {
        let map =
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(map, libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, len, pages.as_mut_ptr()), 0);
        assert_eq!(libc::munmap(map, len), 0);
    }
    pages.iter().filter(|page| **page & 1 == 1).count()
}

/// Bytes that this process has had read from disks so far.
pub fn read_bytes() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.expect("the kernel counts it").parse().unwrap()
}

/// Whether reading a cold file of this length counts all of it, and the file system reads past the cache.
pub fn counts(file: &File, path: &std::path::Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    let direct = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    if direct.is_err() || !chill(file) {
        return false;
    }
    let before = read_bytes();
    std::io::copy(&mut File::open(path).unwrap(), &mut std::io::sink()).unwrap();
    read_bytes() - before >= file.metadata().unwrap().len() && chill(file)
}

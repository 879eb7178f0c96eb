//! Calls that a loaded library of an older version lacks.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// An entry of the table that the linker makes for the loader: `Elf64_Dyn`.
#[repr(C)]
struct Entry {
    tag: usize,
    value: usize,
}

const STRINGS: usize = 5;
const LENGTH: usize = 10;

unsafe extern "C" {
    /// The first entry; the last one's tag is zero.
    static _DYNAMIC: Entry;
    /// Where this library lies in memory.
    static __ehdr_start: u8;
}

/// Takes calls out of the names by which this library's entry points are found: each gets another first letter.
pub fn hide(calls: &[&str]) {
    if calls.is_empty() {
        return;
    }
    let (mut entry, base) = (&raw const _DYNAMIC, (&raw const __ehdr_start).addr());
    let (mut start, mut len) = (0, 0);
    // SAFETY: entries follow each other up to the one with a tag of zero.
    while let Entry { tag: tag @ 1.., value } = unsafe { entry.read() } {
        match tag {
            // Some loaders leave a distance here, and others make it an address.
            STRINGS => start = if value < base { base + value } else { value },
            LENGTH => len = value,
            _ => {}
        }
        // SAFETY: this one was not the last.
        entry = unsafe { entry.add(1) };
    }
    // SAFETY: the table of names is as long as that, and nothing changes it but this function.
    let names = unsafe { std::slice::from_raw_parts(start as *const u8, len) }.to_vec();
    // The pages cannot be written to but by way of this file.
    let memory = File::options().write(true).open("/proc/self/mem").expect("this process's memory");
    for call in calls {
        let name = format!("\0{call}\0");
        if let Some(at) = names.windows(name.len()).position(|part| part == name.as_bytes()) {
            memory.write_at(b"-", (start + at + 1) as u64).expect("a name can be changed");
        }
    }
}

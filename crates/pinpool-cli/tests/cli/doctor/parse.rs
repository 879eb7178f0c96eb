//! The doctor's parsing of the kernel's files, on lines of the kernel's own and on nonsense. Its files are compiled a second
//! time here, since a run of the command for each of thousands of texts would take minutes.

#[allow(dead_code, reason = "only its parsing is tried here")]
#[path = "../../../../../src/os/cgroup.rs"]
mod groups;
#[path = "../../../src/cli/doctor/parse.rs"]
mod parser;

use proptest::prelude::*;

use groups::{group, stat};
use parser::*;

/// Whole lines of the files that are parsed here.
const SEEDS: [&str; 8] = [
    "MemAvailable:   23791564 kB",
    "Node 0 MemFree:        115120 kB",
    "Max locked memory         8388608              unlimited            bytes     ",
    "CapEff:\t000001fffeffffff",
    "0-3,8,10-11",
    "always [madvise] never",
    "4:cpu,memory:/a/b:c",
    "32.0 GT/s PCIe",
];

fn all(text: &str) {
    for key in ["MemAvailable", "MemFree"] {
        _ = (field(text, key), kib(text, key), stat(text, key));
    }
    limit(text, "Max locked memory");
    for bit in [0, 14, 63, 64, u32::MAX] {
        capability(text, bit);
    }
    for name in ["memory", ""] {
        _ = group(text, name);
    }
    _ = (ranges(text), choice(text), transfers(text));
}

proptest! {
    #[test]
    fn nothing_panics(text in any::<String>()) {
        all(&text);
    }

    #[test]
    fn nor_does_anything_that_nearly_fits(seed in 0..SEEDS.len(), at in any::<prop::sample::Index>(),
                                          end in any::<prop::sample::Index>(), with in any::<String>()) {
        let seed = SEEDS[seed];
        let (a, b) = (at.index(seed.len()), end.index(seed.len()));
        all(&format!("{}{with}{}", &seed[..a.min(b)], &seed[a.max(b)..]));
    }
}

#[test]
fn the_kernels_own_lines_are_read() {
    assert_eq!(kib(SEEDS[0], "MemAvailable"), Some(23_791_564 << 10));
    assert_eq!(kib(SEEDS[1], "MemFree"), Some(115_120 << 10));
    assert_eq!(kib("MemFree: 3", "MemFree"), None);
    assert_eq!(stat("file 3\ninactive_file 4096\n", "inactive_file"), Some(4096));
    assert_eq!(limit(SEEDS[2], "Max locked memory"), Some((Some(8 << 20), None)));
    assert_eq!(limit(SEEDS[2], "Max address space"), None);
    assert_eq!((capability(SEEDS[3], 14), capability(SEEDS[3], 24)), (Some(true), Some(false)));
    assert_eq!(ranges(SEEDS[4]), [0..=3, 8..=8, 10..=11]);
    assert_eq!(ranges("\n"), []);
    assert_eq!(choice(SEEDS[5]), Some("madvise"));
    assert_eq!(group(SEEDS[6], "memory"), Some("/a/b:c".into()));
    assert_eq!(group("1:name=x:/\n0::/u", ""), Some("/u".into()));
    assert_eq!((transfers(SEEDS[7]), transfers("Unknown")), (Some(32.0), None));
}

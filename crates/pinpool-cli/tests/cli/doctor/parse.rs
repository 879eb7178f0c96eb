//! The doctor's parsing of the kernel's files, on nonsense: it never panics.

#[allow(dead_code, reason = "only its parsing is tried here")]
#[path = "../../../../../src/os/cgroup.rs"]
mod groups;

use proptest::prelude::*;

use crate::cli::doctor::parse::*;
use groups::{group, stat};

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

proptest! {
    /// Any text, and a text that nearly fits.
    #[test]
    fn nothing_panics(seed in 0..SEEDS.len(), at in any::<prop::sample::Index>(),
                      end in any::<prop::sample::Index>(), with in any::<String>()) {
        let seed = SEEDS[seed];
        let (a, b) = (at.index(seed.len()), end.index(seed.len()));
        for text in [&with, &format!("{}{with}{}", &seed[..a.min(b)], &seed[a.max(b)..])] {
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
    }
}

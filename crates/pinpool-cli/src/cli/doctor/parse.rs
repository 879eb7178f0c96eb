//! Parsing the text that the kernel writes in `/proc` and `/sys`.
//!
//! Each function takes a text and returns `None`, or fewer values, for one that is not as expected:
//! sandboxes and old kernels leave lines out, which must not hide all others. (The crate
//! `procfs-core` returns an error for the whole of `meminfo`, `limits` or `status`.) No function
//! panics on any input, which the property tests in `tests/cli/doctor/parse.rs` try.

use std::ops::RangeInclusive;

/// The value in a line `key: value`. A NUMA node's own file has `Node 0 ` in front of the key.
pub fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let value = |line: &'a str| {
        let line = line.trim_start();
        let after = line.strip_prefix("Node ").and_then(|rest| Some(rest.split_once(' ')?.1.trim_start()));
        Some(after.unwrap_or(line).strip_prefix(key)?.strip_prefix(':')?.trim())
    };
    text.lines().find_map(value)
}

/// The bytes in a line `key: number kB`.
pub fn kib(text: &str, key: &str) -> Option<u64> {
    field(text, key)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The soft and the hard limit of a name in `/proc/self/limits`. `None` inside the pair: unlimited.
pub fn limit(text: &str, name: &str) -> Option<(Option<u64>, Option<u64>)> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut values = line.split_ascii_whitespace().map(|word| match word {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    });
    Some((values.next()??, values.next()??))
}

/// Whether a process has a capability, from its `/proc/self/status`.
pub fn capability(status: &str, bit: u32) -> Option<bool> {
    let set = u64::from_str_radix(field(status, "CapEff")?, 16).ok()?;
    Some(set.checked_shr(bit)? & 1 == 1)
}

/// The numbers in a list such as `0-3,8`.
pub fn ranges(text: &str) -> Vec<RangeInclusive<u32>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.trim().split(',').filter_map(range).collect()
}

/// The chosen word of a list such as `always [madvise] never`.
pub fn choice(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

/// 10^9 transfers a second on one lane, from a text such as `32.0 GT/s PCIe`. `None` for `Unknown`.
pub fn transfers(text: &str) -> Option<f64> {
    let number: f64 = text.trim().split_once(' ')?.0.parse().ok()?;
    (number.is_finite() && number > 0.0).then_some(number)
}

//! Parsing the text that the kernel writes in `/proc` and `/sys`.
//!
//! Each function takes a text and returns `None`, or fewer values, for a text that is not as expected: sandboxes and
//! old kernels leave lines out, and one missing line must not hide all others. (The crate `procfs-core` returns an
//! error for the whole of `meminfo`, `limits` or `status` if one field is missing, and does not decode the paths of
//! `mountinfo`.) No function panics on any input, which the property tests below try.

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

/// The number in a line `key number`, as in a control group's `memory.stat`.
pub fn stat(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
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

/// Free memory of a zone: how many blocks there are of one page, of two, of four, and so on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    pub node: u32,
    pub blocks: Vec<u64>,
}

impl Zone {
    /// Bytes in blocks of at least `size` bytes. Both sizes are powers of two.
    pub fn bytes_in(&self, size: u64, page: u64) -> u64 {
        let block =
            |order: usize| u32::try_from(order).ok().and_then(|o| page.checked_mul(1_u64.checked_shl(o)?));
        let bytes = self.blocks.iter().enumerate().filter_map(|(order, count)| {
            let block = block(order).filter(|&bytes| bytes >= size)?;
            Some(block.saturating_mul(*count))
        });
        bytes.fold(0, u64::saturating_add)
    }
}

/// The zones of `/proc/buddyinfo`: `Node 0, zone   Normal      4      2 ...`.
pub fn zones(text: &str) -> Vec<Zone> {
    let zone = |line: &str| {
        let (node, rest) = line.trim().strip_prefix("Node")?.split_once(',')?;
        let blocks = rest.split_ascii_whitespace().skip(2).map_while(|word| word.parse().ok()).collect();
        Some(Zone { node: node.trim().parse().ok()?, blocks })
    };
    text.lines().filter_map(zone).collect()
}

/// The first mount of a file system `kind` that has `option` among the file system's options: the folder inside the
/// file system that is mounted, and the mount point. A line of `/proc/self/mountinfo`: `36 35 98:0 /root /point rw
/// shared:1 - kind source options`.
pub fn mount(text: &str, kind: &str, option: &str) -> Option<(String, String)> {
    text.lines().find_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let (mut front, mut back) = (front.split(' ').skip(3), back.split(' '));
        let wanted = back.next()? == kind
            && (option.is_empty() || back.nth(1).unwrap_or_default().split(',').any(|word| word == option));
        if wanted { Some((unescape(front.next()?), unescape(front.next()?))) } else { None }
    })
}

/// Decodes a path, in which the kernel writes white space and backslashes as three octal digits behind a backslash.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(code.unwrap_or(b'\\'));
        bytes.extend_from_slice(&part.as_bytes()[if code.is_some() { 3 } else { 0 }..]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The path of this process's group in the hierarchy of a controller; `""` stands for the unified hierarchy.
pub fn group(text: &str, controller: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        controllers.split(',').any(|name| name == controller).then(|| path.to_owned())
    })
}

/// The kernel's version, as major and minor number.
pub fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The first word that is a version, such as `580.159.03` in `NVRM version: NVIDIA UNIX x86_64 Kernel Module
/// 580.159.03 Tue` and `25.0.rc1` in `Version=25.0.rc1`.
pub fn version(text: &str) -> Option<&str> {
    let mut words = text.split(|c: char| c.is_ascii_whitespace() || c == '=');
    words.find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'))
}

/// 10^9 transfers a second on one lane, from a text such as `32.0 GT/s PCIe`. `None` for `Unknown`.
pub fn transfers(text: &str) -> Option<f64> {
    let number: f64 = text.trim().split_once(' ')?.0.parse().ok()?;
    (number.is_finite() && number > 0.0).then_some(number)
}

/// The size of a page, from the list of numbers that the kernel hands a program at its start (`/proc/self/auxv`).
pub fn page_size(auxv: &[u8]) -> Option<u64> {
    const AT_PAGESZ: usize = 6;
    const WORD: usize = size_of::<usize>();
    let words = |pair: &[u8]| {
        let (key, value) = pair.split_at(WORD);
        Some((usize::from_ne_bytes(key.try_into().ok()?), usize::from_ne_bytes(value.try_into().ok()?)))
    };
    let (_, size) = auxv.chunks_exact(2 * WORD).filter_map(words).find(|(key, _)| *key == AT_PAGESZ)?;
    size.is_power_of_two().then_some(size as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Whole lines of the files that are parsed here.
    const SEEDS: [&str; 12] = [
        "MemAvailable:   23791564 kB",
        "Node 0 MemFree:        115120 kB",
        "Max locked memory         8388608              unlimited            bytes     ",
        "CapEff:\t000001fffeffffff",
        "0-3,8,10-11",
        "always [madvise] never",
        "Node 0, zone   Normal   4751   6161   3395   1567   3120   3650",
        "36 35 98:0 /mnt\\0401 /mnt2 rw,noatime master:1 - cgroup cgroup rw,memory",
        "4:cpu,memory:/a/b:c",
        "6.12.3-generic",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue",
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
        for zone in zones(text) {
            _ = (zone.bytes_in(1 << 21, 4096), zone.bytes_in(1 << 63, 1 << 63));
        }
        for name in ["memory", ""] {
            _ = (mount(text, "cgroup", name), group(text, name));
        }
        _ = (ranges(text), choice(text), release(text), version(text), transfers(text));
        page_size(text.as_bytes());
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

        #[test]
        fn limits_are_read_back(soft in any::<Option<u64>>(), hard in any::<Option<u64>>()) {
            let word = |value: Option<u64>| value.map_or_else(|| "unlimited".into(), |v| v.to_string());
            let text = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max locked memory         {:<20} {:<20} bytes     \n", word(soft), word(hard));
            prop_assert_eq!(limit(&text, "Max locked memory"), Some((soft, hard)));
            prop_assert_eq!(limit(&text, "Max address space"), None);
        }

        #[test]
        fn capabilities_are_bits(set in any::<u64>(), bit in 0..64_u32) {
            prop_assert_eq!(capability(&format!("CapEff:\t{set:016x}"), bit), Some(set >> bit & 1 == 1));
        }

        #[test]
        fn paths_are_unescaped(path in "[a-z \t\n\\\\/é]{1,40}") {
            let special = |c: char| if " \t\n\\".contains(c) { format!("\\{:03o}", c as u32) } else { c.into() };
            let escaped: String = path.chars().map(special).collect();
            let text = format!("36 35 98:0 / {escaped} rw - cgroup2 cgroup rw");
            prop_assert_eq!(mount(&text, "cgroup2", ""), Some(("/".to_owned(), path)));
        }

        #[test]
        fn blocks_add_up(blocks in prop::collection::vec(0..1_000_000_u64, 0..14), order in 0..14_u32) {
            let words: Vec<String> = blocks.iter().map(u64::to_string).collect();
            let zones = zones(&format!("Node 3, zone   Normal {}", words.join(" ")));
            prop_assert_eq!((zones.len(), zones[0].node), (1, 3));
            let pages: u64 = (order..).zip(blocks.iter().skip(order as usize)).map(|(o, n)| n << o).sum();
            prop_assert_eq!(zones[0].bytes_in(4096 << order, 4096), pages * 4096);
        }
    }

    #[test]
    fn the_kernels_own_lines_are_read() {
        assert_eq!(kib(SEEDS[0], "MemAvailable"), Some(23_791_564 << 10));
        assert_eq!(kib(SEEDS[1], "MemFree"), Some(115_120 << 10));
        assert_eq!(kib("MemFree: 3", "MemFree"), None);
        assert_eq!(stat("file 3\ninactive_file 4096\n", "inactive_file"), Some(4096));
        assert_eq!(limit(SEEDS[2], "Max locked memory"), Some((Some(8 << 20), None)));
        assert_eq!((capability(SEEDS[3], 14), capability(SEEDS[3], 24)), (Some(true), Some(false)));
        assert_eq!(ranges(SEEDS[4]), [0..=3, 8..=8, 10..=11]);
        assert_eq!(ranges("\n"), []);
        assert_eq!(choice(SEEDS[5]), Some("madvise"));
        assert_eq!(mount(SEEDS[7], "cgroup", "memory"), Some(("/mnt 1".into(), "/mnt2".into())));
        assert_eq!((mount(SEEDS[7], "cgroup", "cpu"), mount(SEEDS[7], "cgroup2", "")), (None, None));
        assert_eq!(group(SEEDS[8], "memory"), Some("/a/b:c".into()));
        assert_eq!(group("1:name=x:/\n0::/u", ""), Some("/u".into()));
        assert_eq!(release(SEEDS[9]), Some((6, 12)));
        assert_eq!(version(SEEDS[10]), Some("580.159.03"));
        assert_eq!(version("Version=25.0.rc1\nx=7"), Some("25.0.rc1"));
        assert_eq!((transfers(SEEDS[11]), transfers("Unknown")), (Some(32.0), None));
        let words: Vec<u8> = [3_usize, 1, 6, 65_536, 0, 0].iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(page_size(&words), Some(65_536));
        assert_eq!(page_size(&words[..20]), None);
    }
}

//! Huge pages: whether regions get them, how many are reserved for other programs, and how much free memory is
//! unbroken.
//!
//! Regions ask for transparent huge pages, which make pinning several times faster (on one H200 machine 7.3 instead of
//! 2.5 GB/s with one thread). Regions never come from a hugetlb pool, so the memory of such a pool is lost to them. If
//! free memory is in small pieces, the kernel moves other pages to make room, which is slower than using small pages;
//! the pool notices that and continues with small pages.

use super::environment::Environment;
use super::{Case, Verdict, numa, parse};
use crate::cli::amount::Amount;

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Bytes of a huge page: 2 MiB, unless the system has another size.
fn huge(case: &Case) -> u64 {
    let said = case.system.number(&format!("{THP}/hpage_pmd_size"));
    said.filter(|size| size.is_power_of_two()).unwrap_or(2 << 20)
}

/// The chosen word of a file with a setting of transparent huge pages.
fn chosen(case: &Case, file: &str) -> Option<String> {
    parse::choice(&case.system.text(&format!("{THP}/{file}"))).map(str::to_owned)
}

/// The setting that holds for huge pages of this size: `always`, `madvise` or `never`. `None`: not shown.
fn mode(case: &Case) -> Option<String> {
    let whole = chosen(case, "enabled")?;
    // Since Linux 6.8 each size has a setting of its own, which may refer to the one for all sizes (Documentation:
    // Transparent Hugepage Support).
    let own = chosen(case, &format!("hugepages-{}kB/enabled", huge(case) >> 10));
    own.filter(|own| own != "inherit").or(Some(whole))
}

/// Whether regions get huge pages.
pub fn huge_pages(case: &Case) -> Verdict {
    let Some(mode) = mode(case) else {
        return Verdict::unseen(&format!("{THP}/enabled"));
    };
    if mode == "never" {
        let (file, which) = if chosen(case, "enabled").as_deref() == Some("never") {
            ("enabled".to_owned(), String::new())
        } else {
            (format!("hugepages-{}kB/enabled", huge(case) >> 10), format!(" of {}", Amount(huge(case))))
        };
        let mut fix = fixes![Kernel: "echo madvise | sudo tee {THP}/{file}"];
        fix.extend(Environment::boot("to keep it: transparent_hugepage=madvise"));
        let found = format!("transparent huge pages{which} are off (never): pinning is several times slower");
        return Verdict::warn(found, fix);
    }
    if parse::field(&case.system.text("/proc/self/status"), "THP_enabled") == Some("0") {
        return Verdict::warn(
            format!("{mode}, but switched off for this process and its children (PR_SET_THP_DISABLE)"),
            fixes![Here: "find what started the process: it, or a parent, called prctl(PR_SET_THP_DISABLE, 1)"],
        );
    }
    let defrag = chosen(case, "defrag").map_or_else(String::new, |word| format!(", defrag {word}"));
    Verdict::ok(format!("transparent, of {}: {mode}{defrag}", Amount(huge(case))))
}

/// The huge pages that are reserved for other programs.
pub fn hugetlb(case: &Case) -> Verdict {
    // By node, or for the whole machine if the system shows no nodes.
    let nodes = case.system.numbered("/sys/devices/system/node", "node");
    let by_node = |node| (format!("node {node}: "), format!("/sys/devices/system/node/node{node}/hugepages"));
    let mut folders: Vec<(String, String)> = nodes.into_iter().map(by_node).collect();
    if folders.is_empty() {
        folders.push((String::new(), "/sys/kernel/mm/hugepages".into()));
    }
    if !folders.iter().any(|(_, dir)| case.system.exists(dir)) {
        return Verdict::unseen("/sys/kernel/mm/hugepages");
    }
    let mut parts = Vec::new();
    let (mut idle, mut fix) = (0_u64, Vec::new());
    for (on, dir) in folders {
        for name in case.system.list(&dir) {
            let kib = name.strip_prefix("hugepages-").and_then(|n| n.strip_suffix("kB")?.parse::<u64>().ok());
            let Some(bytes) = kib.and_then(|kib| kib.checked_mul(1024)) else { continue };
            let count = |file: &str| case.system.number(&format!("{dir}/{name}/{file}")).unwrap_or(0);
            let (all, free) = (count("nr_hugepages"), count("free_hugepages"));
            if all == 0 {
                continue;
            }
            parts.push(format!("{on}{all} of {}, {free} of them free", Amount(bytes)));
            idle = idle.saturating_add(bytes.saturating_mul(free));
            let used = all.saturating_sub(free);
            fix.extend(fixes![Kernel: "echo {used} | sudo tee {dir}/{name}/nr_hugepages"]);
        }
    }
    if parts.is_empty() {
        return Verdict::ok("none reserved");
    }
    let found = format!("{}; pools do not use them", parts.join("; "));
    let available = parse::kib(&case.system.text("/proc/meminfo"), "MemAvailable").unwrap_or(u64::MAX);
    // They were reserved for a reason, so there is a warning only if memory is short without them.
    if idle > 0 && available / 5 * 4 < case.capacity {
        let found = format!("{found}, and the {} that are idle are missing for the pool", Amount(idle));
        return Verdict::warn(found, fix);
    }
    Verdict::ok(found)
}

/// Free memory in pieces that are large enough for huge pages: on the device's node if it is known, else on all nodes.
/// Page cache counts with it, since the kernel drops that and makes huge pages of it where it can. `tried`: bytes of
/// the trial that came on huge pages, which proves more than the files do.
pub fn fragmentation(case: &Case, tried: Option<u64>) -> Verdict {
    let zones = parse::zones(&case.system.text("/proc/buddyinfo"));
    if zones.is_empty() {
        return Verdict::unseen("/proc/buddyinfo");
    }
    // Of the first mapping, which is the program's.
    let page = parse::kib(&case.system.text("/proc/self/smaps"), "KernelPageSize").unwrap_or(4096);
    let node = numa::device_node(case).filter(|node| zones.iter().any(|zone| zone.node == *node));
    let here = || zones.iter().filter(|zone| node.is_none_or(|node| zone.node == node));
    let bytes_in = |size| here().map(|zone| zone.bytes_in(size, page)).fold(0, u64::saturating_add);
    let (free, whole) = (bytes_in(page), bytes_in(huge(case)));
    let on = node.map_or_else(String::new, |node| format!(" on node {node}"));
    let mut found =
        format!("{} of {} free{on} in pieces of {} or more", Amount(whole), Amount(free), Amount(huge(case)));
    if whole >= case.capacity {
        return Verdict::ok(found);
    }
    let cache = numa::page_cache(case, node).unwrap_or(0);
    if cache > 0 {
        found += &format!(", and {} of page cache, which gives way", Amount(cache));
    }
    if whole.saturating_add(cache) >= case.capacity {
        return Verdict::ok(found);
    }
    // All but what lies at the trial's edges.
    if let Some(got) = tried.filter(|got| case.trial().is_some_and(|trial| *got > 0 && *got >= trial / 2)) {
        return Verdict::ok(format!("{found}; the trial got {} on huge pages all the same", Amount(got)));
    }
    if mode(case).as_deref() == Some("never") {
        return Verdict::ok(format!("{found}; huge pages are off anyway"));
    }
    let fix = fixes![Kernel: "echo 1 | sudo tee /proc/sys/vm/compact_memory, before the server starts"];
    let why = "a part of it may come in small pages, which are pinned several times slower";
    Verdict::warn(format!("{found}, the pool wants {}: {why}", Amount(case.capacity)), fix)
}

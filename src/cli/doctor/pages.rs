//! Huge pages: whether regions get them, whether a hugetlb pool holds them, and whether free memory is in one piece.
//!
//! Regions ask for transparent huge pages, which make pinning several times faster (on one H200 machine 7.3 instead of
//! 2.5 GB/s with one thread). They are never taken from a hugetlb pool, so such a pool is memory that regions cannot
//! have. Where free memory is in small pieces the kernel moves other pages out of the way first, which is slower than
//! small pages are; the pool notices that and goes on with small ones.

use super::place::Place;
use super::report::size;
use super::{Case, Verdict, numa, parse};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Bytes of a huge page: 2 MiB, where the system does not say otherwise.
fn huge(case: &Case) -> u64 {
    let said = case.system.number(&format!("{THP}/hpage_pmd_size"));
    said.filter(|size| size.is_power_of_two()).unwrap_or(2 << 20)
}

/// The settings that count for pages of this size: `always`, `madvise` or `never`. `None`: not shown.
fn mode(case: &Case) -> Option<String> {
    let chosen = |file: &str| case.system.read(file).as_deref().and_then(parse::choice).map(str::to_owned);
    let whole = chosen(&format!("{THP}/enabled"))?;
    // Since Linux 6.8 each size has its own, which may refer to the whole (Documentation: Transparent Hugepage
    // Support).
    match chosen(&format!("{THP}/hugepages-{}kB/enabled", huge(case) >> 10)).as_deref() {
        None | Some("inherit") => Some(whole),
        Some(own) => Some(own.to_owned()),
    }
}

/// Whether regions get huge pages.
pub fn huge_pages(case: &Case) -> Verdict {
    let Some(mode) = mode(case) else {
        return Verdict::unseen(&format!("{THP}/enabled"));
    };
    let chosen = |file: &str| parse::choice(&case.system.text(&format!("{THP}/{file}"))).map(str::to_owned);
    if mode == "never" {
        let (file, which) = if chosen("enabled").as_deref() == Some("never") {
            ("enabled".to_owned(), String::new())
        } else {
            (format!("hugepages-{}kB/enabled", huge(case) >> 10), format!(" of {}", size(huge(case))))
        };
        let mut fix = fixes![Kernel: "echo madvise | sudo tee {THP}/{file}"];
        fix.extend(Place::boot("to keep it: transparent_hugepage=madvise"));
        let found = format!("transparent huge pages{which} are off (never): pinning is several times slower");
        return Verdict::warn(found, fix);
    }
    if parse::field(&case.system.text("/proc/self/status"), "THP_enabled") == Some("0") {
        return Verdict::warn(
            format!("{mode}, but switched off for this process and its children (PR_SET_THP_DISABLE)"),
            fixes![Here: "find what started the process: it, or a parent, called prctl(PR_SET_THP_DISABLE, 1)"],
        );
    }
    let defrag = chosen("defrag").map_or_else(String::new, |word| format!(", defrag {word}"));
    Verdict::ok(format!("transparent, of {}: {mode}{defrag}", size(huge(case))))
}

/// Pools of huge pages that others reserved.
pub fn hugetlb(case: &Case) -> Verdict {
    // By node where there are nodes, else of the whole machine.
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
            parts.push(format!("{on}{all} of {}, {free} of them free", size(bytes)));
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
    // They were reserved for a reason, so they are in the way only where memory is short without them.
    if idle > 0 && available / 5 * 4 < case.capacity {
        let found = format!("{found}, and the {} that are idle are missing for the pool", size(idle));
        return Verdict::warn(found, fix);
    }
    Verdict::ok(found)
}

/// Free memory in pieces that are large enough for huge pages, next to the device where that is known.
pub fn fragmentation(case: &Case) -> Verdict {
    let zones = parse::zones(&case.system.text("/proc/buddyinfo"));
    if zones.is_empty() {
        return Verdict::unseen("/proc/buddyinfo");
    }
    let page = case.system.bytes("/proc/self/auxv").as_deref().and_then(parse::page_size).unwrap_or(4096);
    let node = numa::device_node(case).filter(|node| zones.iter().any(|zone| zone.node == *node));
    let here = || zones.iter().filter(|zone| node.is_none_or(|node| zone.node == node));
    let bytes_in = |size| here().map(|zone| zone.bytes_in(size, page)).fold(0, u64::saturating_add);
    let (free, whole) = (bytes_in(page), bytes_in(huge(case)));
    let on = node.map_or_else(String::new, |node| format!(" on node {node}"));
    let found =
        format!("{} of {} free{on} in pieces of {} or more", size(whole), size(free), size(huge(case)));
    if whole >= case.capacity {
        return Verdict::ok(found);
    }
    if mode(case).as_deref() == Some("never") {
        return Verdict::ok(format!("{found}; huge pages are off anyway"));
    }
    let mut fix = Vec::new();
    if free < case.capacity {
        // The rest of what is available is files that are kept in case they are read again.
        fix = fixes![Kernel: "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches, then the next line"];
    }
    fix.extend(fixes![Kernel: "echo 1 | sudo tee /proc/sys/vm/compact_memory, before the server starts"]);
    let why = "a part of it comes in small pages, and is pinned several times slower";
    Verdict::warn(format!("{found}, the pool wants {}: {why}", size(case.capacity)), fix)
}

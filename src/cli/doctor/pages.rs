//! Huge pages: whether regions get them, who else holds them, and whether there are any in one piece.
//!
//! Regions ask for transparent huge pages, which make pinning several times faster (on one H200 machine 7.3 instead of
//! 2.5 GB/s with one thread). They are never taken from a hugetlb pool, so such a pool is memory that regions cannot have.
//! Where free memory is in small pieces the kernel moves other pages out of the way first, which is slower than small
//! pages are; the pool notices that and goes on with small ones.

use super::place::{By, Place};
use super::report::size;
use super::{Case, Check, numa, parse};

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
    // Since Linux 6.8 each size has its own, which may refer to the whole (Documentation: Transparent Hugepage Support).
    match chosen(&format!("{THP}/hugepages-{}kB/enabled", huge(case) >> 10)).as_deref() {
        None | Some("inherit") => Some(whole),
        Some(own) => Some(own.to_owned()),
    }
}

/// Whether regions get huge pages.
pub fn huge_pages(case: &Case) -> Check {
    const NAME: &str = "huge-pages";
    let Some(mode) = mode(case) else {
        return Check::unseen(NAME, &format!("{THP}/enabled"));
    };
    let status = case.system.read("/proc/self/status").unwrap_or_default();
    let enabled = case.system.read(&format!("{THP}/enabled")).unwrap_or_default();
    if mode == "never" {
        let (file, found) = if parse::choice(&enabled) == Some("never") {
            ("enabled".to_owned(), "transparent huge pages are off (never)".to_owned())
        } else {
            let own = format!("hugepages-{}kB/enabled", huge(case) >> 10);
            (own, format!("transparent huge pages of {} are off (never)", size(huge(case))))
        };
        return Check::warn(
            NAME,
            format!("{found}: pinning is several times slower"),
            case.remedies(&[
                (By::Kernel, format!("echo madvise | sudo tee {THP}/{file}")),
                (By::Kernel, Place::boot("to keep it: transparent_hugepage=madvise")),
            ]),
        );
    }
    if parse::field(&status, "THP_enabled") == Some("0") {
        return Check::warn(
            NAME,
            format!("{mode}, but switched off for this process and its children (PR_SET_THP_DISABLE)"),
            vec![
                "find what started the process: it, or a parent, called prctl(PR_SET_THP_DISABLE, 1)".into(),
            ],
        );
    }
    let defrag = case.system.read(&format!("{THP}/defrag")).unwrap_or_default();
    let defrag = parse::choice(&defrag).map_or_else(String::new, |word| format!(", defrag {word}"));
    Check::ok(NAME, format!("transparent, of {}: {mode}{defrag}", size(huge(case))))
}

/// Pools of huge pages that others reserved.
pub fn hugetlb(case: &Case) -> Check {
    const NAME: &str = "hugetlb";
    // By node where there are nodes, else of the whole machine.
    let nodes = case.system.numbered("/sys/devices/system/node", "node");
    let by_node: Vec<(Option<u32>, String)> = match nodes.as_slice() {
        [] => vec![(None, "/sys/kernel/mm/hugepages".into())],
        nodes => nodes
            .iter()
            .map(|node| (Some(*node), format!("/sys/devices/system/node/node{node}/hugepages")))
            .collect(),
    };
    if !by_node.iter().any(|(_, dir)| case.system.exists(dir)) {
        return Check::unseen(NAME, "/sys/kernel/mm/hugepages");
    }
    let mut parts = Vec::new();
    let (mut idle, mut fix) = (0_u64, Vec::new());
    for (node, dir) in by_node {
        for name in case.system.list(&dir) {
            let kib = name.strip_prefix("hugepages-").and_then(|n| n.strip_suffix("kB")?.parse::<u64>().ok());
            let Some(bytes) = kib.and_then(|kib| kib.checked_mul(1024)) else { continue };
            let count = |file: &str| case.system.number(&format!("{dir}/{name}/{file}")).unwrap_or(0);
            let (all, free) = (count("nr_hugepages"), count("free_hugepages"));
            if all == 0 {
                continue;
            }
            let on = node.map_or_else(String::new, |node| format!("node {node}: "));
            parts.push(format!("{on}{all} of {}, {free} of them free", size(bytes)));
            idle = idle.saturating_add(bytes.saturating_mul(free));
            fix.push((
                By::Kernel,
                format!("echo {} | sudo tee {dir}/{name}/nr_hugepages", all - free.min(all)),
            ));
        }
    }
    if parts.is_empty() {
        return Check::ok(NAME, "none reserved");
    }
    let found = format!("{}; pools do not use them", parts.join("; "));
    let text = case.system.read("/proc/meminfo").unwrap_or_default();
    let available = parse::kib(&text, "MemAvailable").unwrap_or(u64::MAX);
    // Whoever reserved them has a reason, so they are in the way only where memory is short without them.
    if idle > 0 && available / 5 * 4 < case.capacity {
        let found = format!("{found}, and the {} that are idle are missing for the pool", size(idle));
        return Check::warn(NAME, found, case.remedies(&fix));
    }
    Check::ok(NAME, found)
}

/// Free memory in pieces that are large enough for huge pages, next to the device where that is known.
pub fn fragmentation(case: &Case) -> Check {
    const NAME: &str = "fragmentation";
    let zones = parse::zones(&case.system.read("/proc/buddyinfo").unwrap_or_default());
    if zones.is_empty() {
        return Check::unseen(NAME, "/proc/buddyinfo");
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
        return Check::ok(NAME, found);
    }
    if mode(case).as_deref() == Some("never") {
        return Check::ok(NAME, format!("{found}; huge pages are off anyway"));
    }
    let mut fix = Vec::new();
    if free < case.capacity {
        // The rest of what is available is files that are kept in case they are read again.
        fix.push((By::Kernel, "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches, then the next line".into()));
    }
    fix.push((By::Kernel, "echo 1 | sudo tee /proc/sys/vm/compact_memory, before the server starts".into()));
    Check::warn(
        NAME,
        format!(
            "{found}, the pool wants {}: a part of it comes in small pages, and is pinned several times slower",
            size(case.capacity)
        ),
        case.remedies(&fix),
    )
}

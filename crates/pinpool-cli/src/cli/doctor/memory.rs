//! Memory that a pool can have: of the machine, of the control groups, in huge pages, and next to the device.

use pinpool::cgroup::{ControlGroup, ControlGroups};

use super::environment::{boot, sysctl};
use super::parse::{field, kib};
use super::{Amount, Case, Fixes, Unseen, Verdict, parse, probe};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";
const NODES: &str = "/sys/devices/system/node";

/// Compares the machine's available memory with the capacity.
pub fn memory(case: &Case) -> Result<Verdict, Unseen> {
    let text = case.system.text("/proc/meminfo");
    let kib = |key: &str| kib(&text, key);
    let count = |key: &str| field(&text, key).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    let unseen = || Unseen("/proc/meminfo".into());
    let total = kib("MemTotal").ok_or_else(unseen)?;
    let available = kib("MemAvailable").or_else(|| kib("MemFree")).ok_or_else(unseen)?;
    let wants = Amount(case.capacity);
    let mut found = format!("{} available of {}", Amount(available), Amount(total));
    let locked = kib("Mlocked").unwrap_or(0);
    if locked > total / 16 {
        found += &format!(", {} locked by mlock already", Amount(locked));
    }
    // In mode 2 the kernel refuses mappings beyond a limit (Documentation/mm/overcommit-accounting).
    let strict = case.system.number("/proc/sys/vm/overcommit_memory") == Some(2);
    if let (true, Some(limit), Some(used)) = (strict, kib("CommitLimit"), kib("Committed_AS")) {
        let left = limit.saturating_sub(used);
        found += &format!(", {} left to promise (vm.overcommit_memory is 2)", Amount(left));
        if left < case.capacity {
            let mut fix = sysctl("vm.overcommit_memory", 0);
            fix.extend(fixes![Pool: "a capacity below {}", Amount(left)]);
            return Ok(Verdict::fail(format!("{found}; the pool wants {wants}"), fix));
        }
    }
    let mut fix = fixes![Pool: "a capacity of {} or less", Amount(available / 5 * 4)];
    let reserved = count("HugePages_Free");
    let idle = reserved.saturating_mul(kib("Hugepagesize").unwrap_or(0));
    if idle > 0 {
        found += &format!(", {} reserved for hugetlb pages and idle", Amount(idle));
        // Only idle huge pages can be given back, so the recommended number is not zero.
        let rest = count("HugePages_Total").saturating_sub(reserved);
        fix.extend(fixes![
            Kernel: "give idle hugetlb pages back, which pools do not use: sudo sysctl -w vm.nr_hugepages={rest}"
        ]);
    }
    Ok(if available < case.capacity {
        let found = format!("{found}; the pool wants {wants}, and pinned memory is never swapped out");
        Verdict::fail(found, fix)
    } else if available / 5 * 4 < case.capacity {
        let why = "leaves little for files and others, and the kernel may end processes";
        Verdict::warn(format!("{found}; a pool of {wants} {why}"), fix)
    } else {
        Verdict::ok(found)
    })
}

/// Compares the limits of control groups with the capacity, at every level from this process's up to the mount.
///
/// Pages of a region are charged to the group of the process that touches them, and pinned pages cannot be reclaimed.
/// So pinning does not fail at a limit: the kernel ends a process of the group (cgroup v2 guide on `memory.max`), or
/// slows the whole group down while it is above `memory.high`.
pub fn cgroup(case: &Case) -> Result<Verdict, Unseen> {
    case.system.read("/proc/self/cgroup")?;
    let Some(all) = ControlGroups::read(case.system.root()) else {
        return Ok(Verdict::ok("no group counts memory here"));
    };
    let ControlGroups { version, point, groups } = &all;
    if groups.is_empty() {
        // A mount point without these files is the root of all groups, which has no limit.
        return match case.system.list(point).is_empty() {
            true => Err(Unseen(point.clone())),
            false => Ok(Verdict::ok(format!("no group counts memory here (cgroup v{version})"))),
        };
    }
    let wants = case.capacity;
    let tightest = |limit: fn(&ControlGroup) -> Option<u64>| {
        let left = |group: &ControlGroup| group.left(limit(group));
        groups.iter().filter_map(|group| Some((left(group)?, group))).min_by_key(|(left, _)| *left)
    };
    let hard = tightest(|group| group.max);
    let soft = tightest(|group| group.high).filter(|(left, _)| *left < wants);
    let said = |left: u64, group: &ControlGroup, file: &str, limit: Option<u64>| {
        format!("{} left of {} ({file} of {})", Amount(left), Amount(limit.unwrap_or(0)), group.path)
    };
    let (left, group, is_hard) = match (hard, soft) {
        (Some((left, group)), _) if left / 5 * 4 < wants => (left, group, true),
        (_, Some((left, group))) => (left, group, false),
        (Some((left, group)), None) => {
            return Ok(Verdict::ok(said(left, group, all.limit_file(), group.max)));
        }
        (None, None) => {
            return Ok(Verdict::ok(format!("no limit (cgroup v{version}, {} levels seen)", groups.len())));
        }
    };
    // The limit to recommend: use and capacity and a quarter of the capacity, in whole steps.
    let step = if wants >= 1 << 30 { 1 << 30 } else { 64 << 20 };
    let bytes = group.used.saturating_add(wants.saturating_add(wants / 4));
    let bytes = bytes.div_ceil(step).saturating_mul(step);
    let (file, property, limit) = match is_hard {
        true => (all.limit_file(), "MemoryMax", group.max),
        false => ("memory.high", "MemoryHigh", group.high),
    };
    let name = group.path.rsplit('/').next().unwrap_or_default();
    // systemd rewrites the limits of its own groups, so it must be told; the limits of other groups are plain files.
    let mut fix = if [".service", ".slice", ".scope"].iter().any(|kind| name.ends_with(kind)) {
        fixes![Shell: "sudo systemctl set-property {name} {property}={bytes}"]
    } else {
        fixes![Shell: "echo {bytes} | sudo tee {}/{file}", group.path.trim_end_matches('/')]
    };
    fix.extend(if is_hard {
        fixes![
            Docker: "--memory={bytes} (or docker update --memory={bytes} --memory-swap={bytes})";
            Kubernetes: "resources.limits.memory: {}Mi in the container's description", bytes.div_ceil(1 << 20);
        ]
    } else {
        fixes![
            Docker: "echo {bytes} into {file} of its group, on the host";
            Kubernetes: "resources.requests.memory the same as limits.memory, with which no {file} is set";
        ]
    });
    fix.extend(fixes![Pool: "a capacity of {} or less", Amount(left / 5 * 4)]);
    let (found, wants) = (said(left, group, file, limit), Amount(wants));
    Ok(if !is_hard {
        let why = "above it the kernel slows the whole group down, since pinned memory cannot be reclaimed";
        Verdict::warn(format!("{found}; the pool wants {wants}, and {why}"), fix)
    } else if left < case.capacity {
        let why = "and the kernel ends a process of the group that exceeds it";
        Verdict::fail(format!("{found}; the pool wants {wants}, {why}"), fix)
    } else {
        Verdict::warn(format!("{found}; a pool of {wants} leaves little for the rest"), fix)
    })
}

/// Bytes of a huge page: 2 MiB, unless the system has another size.
fn huge(case: &Case) -> u64 {
    let said = case.system.number(&format!("{THP}/hpage_pmd_size"));
    said.filter(|size| size.is_power_of_two()).unwrap_or(2 << 20)
}

/// The chosen word of a file with a setting of transparent huge pages.
fn chosen(case: &Case, file: &str) -> Option<String> {
    parse::choice(&case.system.text(&format!("{THP}/{file}"))).map(str::to_owned)
}

/// The setting that holds for huge pages, `always`, `madvise` or `never`, and its file. `None`: not shown.
fn mode(case: &Case) -> Option<(String, String)> {
    let whole = chosen(case, "enabled")?;
    // Since Linux 6.8 each size has a setting of its own, which may refer to the one for all sizes (Documentation:
    // Transparent Hugepage Support).
    let file = format!("hugepages-{}kB/enabled", huge(case) >> 10);
    let own = chosen(case, &file).filter(|own| own != "inherit" && (own != "never" || whole != "never"));
    Some(own.map_or((whole, "enabled".into()), |own| (own, file)))
}

/// Whether regions get transparent huge pages, for which they ask: these make pinning several times faster (on one H200
/// machine 7.3 instead of 2.5 GB/s with one thread).
pub fn huge_pages(case: &Case) -> Result<Verdict, Unseen> {
    let (mode, file) = mode(case).ok_or_else(|| Unseen(format!("{THP}/enabled")))?;
    let size = Amount(huge(case));
    if mode == "never" {
        let mut fix = fixes![Kernel: "echo madvise | sudo tee {THP}/{file}"];
        fix.extend(boot("to keep it: transparent_hugepage=madvise"));
        let which = if file == "enabled" { String::new() } else { format!(" of {size}") };
        let found = format!("transparent huge pages{which} are off (never): pinning is several times slower");
        return Ok(Verdict::warn(found, fix));
    }
    if field(&case.system.text("/proc/self/status"), "THP_enabled") == Some("0") {
        let found =
            format!("{mode}, but switched off for this process and its children (PR_SET_THP_DISABLE)");
        let fix = fixes![Here: "find what started the process: it, or a parent, called prctl(PR_SET_THP_DISABLE, 1)"];
        return Ok(Verdict::warn(found, fix));
    }
    let defrag = chosen(case, "defrag").map_or_else(String::new, |word| format!(", defrag {word}"));
    Ok(Verdict::ok(format!("transparent, of {size}: {mode}{defrag}")))
}

/// The huge pages that are reserved for other programs: regions never come from a hugetlb pool, so its memory is lost to
/// them.
pub fn hugetlb(case: &Case) -> Result<Verdict, Unseen> {
    const WHOLE: &str = "/sys/kernel/mm/hugepages";
    // By node, or for the whole machine if the system shows no nodes.
    let nodes = case.system.numbered(NODES, "node").into_iter();
    let mut folders: Vec<(String, String)> =
        nodes.map(|node| (format!("node {node}: "), format!("{NODES}/node{node}/hugepages"))).collect();
    if folders.is_empty() {
        folders.push((String::new(), WHOLE.into()));
    }
    if !folders.iter().any(|(_, dir)| case.system.exists(dir)) {
        return Err(Unseen(WHOLE.into()));
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
            fix.extend(fixes![
                Kernel: "echo {} | sudo tee {dir}/{name}/nr_hugepages", all.saturating_sub(free)
            ]);
        }
    }
    if parts.is_empty() {
        return Ok(Verdict::ok("none reserved"));
    }
    let found = format!("{}; pools do not use them", parts.join("; "));
    let available = kib(&case.system.text("/proc/meminfo"), "MemAvailable").unwrap_or(u64::MAX);
    // They were reserved for a reason, so there is a warning only if memory is short without them.
    if idle == 0 || available / 5 * 4 >= case.capacity {
        return Ok(Verdict::ok(found));
    }
    let idle = Amount(idle);
    Ok(Verdict::warn(format!("{found}, and the {idle} that are idle are missing for the pool"), fix))
}

/// Free memory in pieces that are large enough for huge pages: on the device's node if it is known, else on all nodes.
/// Where there is little, the kernel moves other pages to make room, which is slower than using small pages; the pool
/// notices that and continues with small pages. Page cache counts with it, since the kernel drops that and makes huge
/// pages of it where it can. `tried`: bytes of the trial that came on huge pages, which proves more than the files do.
pub fn fragmentation(case: &Case, tried: Option<u64>) -> Result<Verdict, Unseen> {
    let zones = parse::zones(&case.system.text("/proc/buddyinfo"));
    if zones.is_empty() {
        return Err(Unseen("/proc/buddyinfo".into()));
    }
    // Of the first mapping, which is the program's.
    let page = kib(&case.system.text("/proc/self/smaps"), "KernelPageSize").unwrap_or(4096);
    let node = device_node(case).filter(|node| zones.iter().any(|zone| zone.node == *node));
    let here = || zones.iter().filter(|zone| node.is_none_or(|node| zone.node == node));
    let bytes_in = |size| here().map(|zone| zone.bytes_in(size, page)).fold(0, u64::saturating_add);
    let (free, whole) = (bytes_in(page), bytes_in(huge(case)));
    let on = node.map_or_else(String::new, |node| format!(" on node {node}"));
    let mut found =
        format!("{} of {} free{on} in pieces of {} or more", Amount(whole), Amount(free), Amount(huge(case)));
    if whole >= case.capacity {
        return Ok(Verdict::ok(found));
    }
    let cache = page_cache(case, node).unwrap_or(0);
    if cache > 0 {
        found += &format!(", and {} of page cache, which gives way", Amount(cache));
    }
    if whole.saturating_add(cache) >= case.capacity {
        return Ok(Verdict::ok(found));
    }
    // All but what lies at the trial's edges.
    let all = |got: &u64| *got > 0 && probe::trial(case).is_some_and(|trial| *got >= trial / 2);
    if let Some(got) = tried.filter(all) {
        return Ok(Verdict::ok(format!("{found}; the trial got {} on huge pages all the same", Amount(got))));
    }
    if mode(case).is_some_and(|(mode, _)| mode == "never") {
        return Ok(Verdict::ok(format!("{found}; huge pages are off anyway")));
    }
    let why = "a part of it may come in small pages, which are pinned several times slower";
    let fix = fixes![Kernel: "echo 1 | sudo tee /proc/sys/vm/compact_memory, before the server starts"];
    Ok(Verdict::warn(format!("{found}, the pool wants {}: {why}", Amount(case.capacity)), fix))
}

/// The node of the device.
fn device_node(case: &Case) -> Option<u32> {
    // The open device's driver is trusted more than the system's files.
    if let Some(node) = case.device.as_ref().ok().and_then(pinpool::Device::numa_node) {
        return Some(node);
    }
    // (The file has -1 for an unknown node, which does not parse as a `u32`.)
    case.system.word(&format!("/sys/bus/pci/devices/{}/numa_node", case.address()?))?.parse().ok()
}

/// Bytes of page cache that give way to who asks for memory: of a node what was not used lately, of the whole machine
/// what the kernel counts as available.
fn page_cache(case: &Case, node: Option<u32>) -> Option<u64> {
    if let Some(node) = node {
        return kib(&case.system.text(&format!("{NODES}/node{node}/meminfo")), "Inactive(file)");
    }
    let text = case.system.text("/proc/meminfo");
    Some(kib(&text, "MemAvailable")?.saturating_sub(kib(&text, "MemFree")?))
}

/// Bytes that a node can provide: free memory, and page cache that was not used lately.
fn room(case: &Case, node: u32) -> Option<u64> {
    let free = kib(&case.system.text(&format!("{NODES}/node{node}/meminfo")), "MemFree")?;
    Some(free.saturating_add(page_cache(case, Some(node)).unwrap_or(0)))
}

/// Whether this process can use memory and processors next to the device.
///
/// Regions come from the node that their device is attached to, as long as that node has memory. Memory of another node
/// is copied over the link between the processors, which other traffic uses as well. A cpuset can forbid a process a
/// node's memory, and its processors, on which the pool's threads touch the pages.
pub fn numa(case: &Case) -> Result<Verdict, Unseen> {
    let nodes = case.system.numbered(NODES, "node");
    let told = |node: &u32| {
        let room = room(case, *node).map(|bytes| Amount(bytes).to_string());
        format!("node {node}: {}", room.as_deref().unwrap_or("unknown"))
    };
    match nodes.as_slice() {
        [] => return Err(Unseen(NODES.into())),
        [node] => return Ok(Verdict::ok(format!("one node ({} free)", told(node)))),
        _ => {}
    }
    let mut found = format!("free on {}", nodes.iter().map(told).collect::<Vec<_>>().join(", "));
    let Some(address) = case.address() else { return Ok(Verdict::ok(found)) };
    let Some(node) = device_node(case) else {
        let found = format!("{found}; {address}: the system does not say which node it is on");
        return Ok(Verdict::warn(
            found,
            fixes![
                Kernel: "have the firmware or the hypervisor show the topology; a node that is known otherwise is set by: \
                         echo NODE | sudo tee /sys/bus/pci/devices/{address}/numa_node"
            ],
        ));
    };
    found += &format!("; {address} is on node {node}");
    let status = case.system.text("/proc/self/status");
    let allowed = |key: &str| field(&status, key).map(parse::ranges);
    let mut fix = Vec::new();
    if allowed("Mems_allowed_list").is_some_and(|nodes| !nodes.iter().any(|range| range.contains(&node))) {
        found += ", whose memory this process may not use";
        let (unit, docker) = (format!("AllowedMemoryNodes={node}"), format!("--cpuset-mems={node}"));
        fix.extend(cpuset(&unit, &docker, &format!("--membind={node}")));
    } else if let Some(room) = room(case, node).filter(|room| *room < case.capacity) {
        let (room, wants) = (Amount(room), Amount(case.capacity));
        found += &format!(", which has {room} for a pool of {wants}: the rest comes from farther away");
        fix.extend(fixes![Pool: "a capacity of {room} or less, or free memory on node {node}"]);
    }
    let theirs = parse::ranges(&case.system.text(&format!("{NODES}/node{node}/cpulist")));
    let shared = |mine: &std::ops::RangeInclusive<u32>| {
        theirs.iter().any(|range| mine.start() <= range.end() && range.start() <= mine.end())
    };
    if !theirs.is_empty() && allowed("Cpus_allowed_list").is_some_and(|mine| !mine.iter().any(shared)) {
        found += &format!("; this process may run on none of the processors of node {node}");
        let which = |option: &str| format!("{option} with the node's processors");
        let (unit, docker) = (which("AllowedCPUs="), which("--cpuset-cpus="));
        fix.extend(cpuset(&unit, &docker, &format!("--cpunodebind={node}")));
    }
    Ok(if fix.is_empty() { Verdict::ok(found) } else { Verdict::warn(found, fix) })
}

/// The remedies that allow a process a node's memory or processors.
fn cpuset(systemd: &str, docker: &str, numactl: &str) -> Fixes {
    fixes![
        Systemd: "{systemd} under [Service], then restart it";
        Shell: "start the server with numactl {numactl}";
        Docker: "{docker}";
        Kubernetes: "--topology-manager-policy=single-numa-node for the nodes' kubelets";
    ]
}

//! Memory that a pool can have: the machine's, control groups', huge pages, near the device.

use std::ops::RangeInclusive;

use pinpool::cgroup::{ControlGroup, ControlGroups};

use super::parse::{field, kib};
use super::{Amount, Case, Unseen, Verdict, parse};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Compares the machine's available memory with the capacity.
pub fn memory(case: &Case) -> Result<Verdict, Unseen> {
    let text = case.system.text("/proc/meminfo");
    let kib = |key: &str| kib(&text, key);
    let unseen = || Unseen("/proc/meminfo".into());
    let total = kib("MemTotal").ok_or_else(unseen)?;
    let available = kib("MemAvailable").ok_or_else(unseen)?;
    let wants = Amount(case.capacity);
    let found = format!("{} available of {}", Amount(available), Amount(total));
    let fix = fixes![Pool: "a capacity of {} or less", Amount(available / 5 * 4)];
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

/// Compares the tightest limit of the control groups, up to the mount, with the capacity.
///
/// Pages of a region are charged to the group of the process that touches them, and pinned pages
/// cannot be reclaimed: at `memory.max` the kernel ends a process of the group (cgroup v2 guide),
/// and above `memory.high` it slows the whole group down.
pub fn cgroup(case: &Case) -> Result<Verdict, Unseen> {
    case.system.read("/proc/self/cgroup")?;
    let Some(all) = ControlGroups::read(&case.system.root) else {
        return Ok(Verdict::ok("no group counts memory here"));
    };
    // A mount point without limits is the root. A group that is not mounted may have any limit.
    if all.groups.is_empty() && !case.system.lists(&all.point) {
        return Err(Unseen(all.point));
    }
    let limits = all.groups.iter().flat_map(|group| {
        let limit = |file, limit: Option<u64>| Some((group.left(limit)?, limit?, file, group));
        [limit(all.limit_file(), group.max), limit("memory.high", group.high)]
    });
    // One that the pool exceeds before one that it does not, and one at which the kernel ends
    // processes before the other.
    let order = |(left, _, file, _): &(u64, u64, &str, &ControlGroup)| {
        (*left >= case.capacity, *file == "memory.high", *left)
    };
    let Some((left, limit, file, group)) = limits.flatten().min_by_key(order) else {
        return Ok(Verdict::ok(format!("no limit (cgroup v{})", all.version)));
    };
    let (path, wants) = (&group.path, Amount(case.capacity));
    let found = format!("{} left of {} ({file} of {path})", Amount(left), Amount(limit));
    // The limit to recommend: use and capacity and a quarter of the capacity, in whole steps.
    let step = if case.capacity >= 1 << 30 { 1 << 30 } else { 64 << 20 };
    let bytes = group.used.saturating_add(case.capacity.saturating_add(case.capacity / 4));
    let bytes = bytes.div_ceil(step).saturating_mul(step);
    let is_high = file == "memory.high";
    let property = if is_high { "MemoryHigh" } else { "MemoryMax" };
    let (path, name) = (path.trim_end_matches('/'), path.rsplit('/').next().unwrap_or_default());
    let fix = fixes![
        // systemd rewrites the limits of its own groups, so it must be told.
        Shell: "echo {bytes} | sudo tee {path}/{file}; for a unit of systemd: sudo systemctl set-property {name} \
                {property}={bytes}";
        Docker: "--memory={bytes} (or docker update --memory={bytes} --memory-swap={bytes})";
        Kubernetes: "resources.limits.memory: {}Mi in the container's description", bytes.div_ceil(1 << 20);
        Pool: "a capacity of {} or less", Amount(left / 5 * 4);
    ];
    Ok(if is_high && left < case.capacity {
        let why = "above it the kernel slows the whole group down, since pinned memory cannot be reclaimed";
        Verdict::warn(format!("{found}; the pool wants {wants}, and {why}"), fix)
    } else if left < case.capacity {
        let why = "and the kernel ends a process of the group that exceeds it";
        Verdict::fail(format!("{found}; the pool wants {wants}, {why}"), fix)
    } else if !is_high && left / 5 * 4 < case.capacity {
        Verdict::warn(format!("{found}; a pool of {wants} leaves little for the rest"), fix)
    } else {
        Verdict::ok(found)
    })
}

/// Whether regions get transparent huge pages, for which they ask: these make pinning several times
/// faster (on one H200 machine 7.3 instead of 2.5 GB/s with one thread).
pub fn huge_pages(case: &Case) -> Result<Verdict, Unseen> {
    let file = format!("{THP}/enabled");
    let text = case.system.read(&file)?;
    let mode = parse::choice(&text).ok_or_else(|| Unseen(file.clone()))?;
    if mode != "never" {
        return Ok(Verdict::ok(format!("transparent: {mode}")));
    }
    let fix = fixes![
        Kernel: "echo madvise | sudo tee {file}; to keep it: transparent_hugepage=madvise on the kernel command line"
    ];
    Ok(Verdict::warn("transparent huge pages are off (never): pinning is several times slower", fix))
}

/// Whether this process can use memory and processors next to the device.
///
/// Regions come from the node of their device, as long as it has memory. Memory of another node is
/// copied over the link between the processors, which other traffic uses as well. A cpuset can
/// forbid a process a node's memory, and its processors, on which pages are touched.
pub fn numa(case: &Case) -> Result<Verdict, Unseen> {
    let (Some(device), Some(address)) = (case.accelerator(), case.address()) else {
        return Ok(Verdict::ok("no accelerator to be next to"));
    };
    // (The file has -1 for an unknown node, which does not parse as a `u32`.)
    let file = || case.system.word(&format!("/sys/bus/pci/devices/{address}/numa_node"))?.parse().ok();
    let Some(node) = device.numa_node().or_else(file) else {
        return Ok(Verdict::ok(format!("{address}: the system does not say which node it is on")));
    };
    let dir = format!("/sys/devices/system/node/node{node}");
    let status = case.system.text("/proc/self/status");
    let away = |key: &str, theirs: &[RangeInclusive<u32>]| {
        let shared = |mine: RangeInclusive<u32>| {
            theirs.iter().any(|range| mine.start() <= range.end() && range.start() <= mine.end())
        };
        let mine = field(&status, key).map(parse::ranges);
        !theirs.is_empty() && mine.is_some_and(|mine| !mine.into_iter().any(shared))
    };
    let cpus = case.system.word(&format!("{dir}/cpulist")).unwrap_or_default();
    let processors = parse::ranges(&cpus);
    let found = format!("{address} is on node {node}");
    let forbidden = match (away("Mems_allowed_list", &[node..=node]), away("Cpus_allowed_list", &processors))
    {
        (true, true) => "memory and processors",
        (true, false) => "memory",
        (false, true) => "processors",
        (false, false) => {
            // Free memory, and page cache that was not used lately.
            let text = case.system.text(&format!("{dir}/meminfo"));
            let room = kib(&text, "MemFree")
                .map(|free| free.saturating_add(kib(&text, "Inactive(file)").unwrap_or(0)));
            let Some(room) = room.filter(|room| *room < case.capacity) else { return Ok(Verdict::ok(found)) };
            let (room, wants) = (Amount(room), Amount(case.capacity));
            let fix = fixes![Pool: "a capacity of {room} or less, or free memory on node {node}"];
            let why = format!("which has {room} for a pool of {wants}: the rest comes from farther away");
            return Ok(Verdict::warn(format!("{found}, {why}"), fix));
        }
    };
    let fix = fixes![
        Systemd: "AllowedMemoryNodes={node} and AllowedCPUs={cpus} under [Service], then restart it";
        Shell: "start the server with numactl --membind={node} --cpunodebind={node}";
        Docker: "--cpuset-mems={node} --cpuset-cpus={cpus}";
        Kubernetes: "--topology-manager-policy=single-numa-node for the nodes' kubelets";
    ];
    Ok(Verdict::warn(format!("{found}, whose {forbidden} this process may not use"), fix))
}

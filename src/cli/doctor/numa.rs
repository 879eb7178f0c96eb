//! NUMA: whether there is memory next to the device, and whether this process may use it.
//!
//! Regions come from the node that their device hangs on, as long as that node has memory; what comes from farther away
//! is copied over the link between the processors, which others use as well. A cpuset can keep a process from a node's
//! memory and from its processors, whose threads touch the pages.

use super::place::By;
use super::report::size;
use super::{Case, Check, parse};

const NODES: &str = "/sys/devices/system/node";

/// The node of the first device whose node is known.
pub fn device_node(case: &Case) -> Option<u32> {
    // What the driver of the open device says counts before what the system says.
    let opened = case.device.as_ref().ok().and_then(pinpool::Device::numa_node);
    opened.or_else(|| case.addresses().iter().find_map(|address| node_of(case, address)))
}

/// The node that the system has for a device. (-1, where the firmware does not say, is no number here.)
fn node_of(case: &Case, address: &str) -> Option<u32> {
    case.system.word(&format!("/sys/bus/pci/devices/{address}/numa_node"))?.parse().ok()
}

/// Bytes that a node could give: free, or held for files that were not used lately.
fn room(case: &Case, node: u32) -> Option<u64> {
    let text = case.system.read(&format!("{NODES}/node{node}/meminfo"))?;
    Some(parse::kib(&text, "MemFree")?.saturating_add(parse::kib(&text, "Inactive(file)").unwrap_or(0)))
}

/// Memory next to each device.
pub fn numa(case: &Case) -> Check {
    const NAME: &str = "numa";
    let nodes = case.system.numbered(NODES, "node");
    if nodes.is_empty() {
        return Check::unseen(NAME, NODES);
    }
    let told = |node: u32| match room(case, node) {
        Some(room) => format!("node {node}: {}", size(room)),
        None => format!("node {node}: unknown"),
    };
    if let [node] = nodes.as_slice() {
        return Check::ok(NAME, format!("one node ({} free)", told(*node)));
    }
    let overview = nodes.iter().map(|node| told(*node)).collect::<Vec<_>>().join(", ");
    let status = case.system.read("/proc/self/status").unwrap_or_default();
    let allowed = |key: &str, number: u32| {
        parse::field(&status, key)
            .is_none_or(|list| parse::ranges(list).iter().any(|range| range.contains(&number)))
    };
    let mut found = vec![format!("free on {overview}")];
    let mut fix = Vec::new();
    let addresses = case.addresses();
    for address in &addresses {
        // The opened device is the only one there then.
        let known = if case.opened() { device_node(case) } else { node_of(case, address) };
        let Some(node) = known else {
            found.push(format!("{address}: the system does not say which node it is on"));
            fix.push((
                By::Kernel,
                format!(
                    "have the firmware or the hypervisor show the topology; who knows the node can set it: echo NODE | \
                     sudo tee /sys/bus/pci/devices/{address}/numa_node"
                ),
            ));
            continue;
        };
        if !allowed("Mems_allowed_list", node) {
            found.push(format!("{address} is on node {node}, whose memory this process may not use"));
            fix.extend(cpuset(node, "mems"));
        } else if let Some(room) = room(case, node).filter(|room| *room < case.capacity) {
            found.push(format!(
                "{address} is on node {node}, which has {} for a pool of {}: the rest comes from farther away",
                size(room),
                size(case.capacity)
            ));
            fix.push((
                By::Pool,
                format!("a capacity of {} or less, or free memory on node {node}", size(room)),
            ));
        } else {
            found.push(format!("{address} is on node {node}"));
        }
        let cpus = case.system.read(&format!("{NODES}/node{node}/cpulist")).unwrap_or_default();
        let mine = parse::field(&status, "Cpus_allowed_list").map(parse::ranges);
        let theirs = parse::ranges(&cpus);
        let apart = |mine: &[std::ops::RangeInclusive<u32>]| {
            !theirs.is_empty()
                && !mine.iter().any(|a| theirs.iter().any(|b| a.start() <= b.end() && b.start() <= a.end()))
        };
        if mine.is_some_and(|mine| apart(&mine)) {
            found.push(format!("this process may run on none of the processors of node {node}"));
            fix.extend(cpuset(node, "cpus"));
        }
    }
    fix.dedup();
    let found = found.join("; ");
    if fix.is_empty() { Check::ok(NAME, found) } else { Check::warn(NAME, found, case.remedies(&fix)) }
}

/// How a process gets to use a node: its memory (`mems`) or its processors (`cpus`).
fn cpuset(node: u32, what: &str) -> Vec<(By, String)> {
    let (systemd, docker, shell) = match what {
        "mems" => (format!("AllowedMemoryNodes={node}"), format!("--cpuset-mems={node}"), "--membind"),
        _ => (
            "AllowedCPUs= with the node's processors".into(),
            "--cpuset-cpus= with the node's processors".into(),
            "--cpunodebind",
        ),
    };
    vec![
        (By::Systemd, format!("{systemd} under [Service], then restart it")),
        (By::Shell, format!("start the server with numactl {shell}={node}")),
        (By::Docker, docker),
        (By::Kubernetes, "--topology-manager-policy=single-numa-node for the nodes' kubelets".into()),
    ]
}

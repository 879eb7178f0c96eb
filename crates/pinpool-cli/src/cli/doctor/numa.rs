//! NUMA: whether there is memory next to the device, and whether this process may use it.
//!
//! Regions come from the node that their device is attached to, as long as that node has memory. Memory of another node
//! is copied over the link between the processors, which other traffic uses as well. A cpuset can forbid a process a
//! node's memory, and its processors, on which the pool's threads touch the pages.

use super::{Case, Fixes, Verdict, parse};
use crate::cli::amount::Amount;

const NODE_DIR: &str = "/sys/devices/system/node";

/// The node of the device; of several, of the first one whose node is known.
pub fn device_node(case: &Case) -> Option<u32> {
    // The open device's driver is trusted more than the system's files.
    let opened = case.device.as_ref().ok().and_then(pinpool::Device::numa_node);
    opened.or_else(|| case.addresses().iter().find_map(|address| node_of(case, address)))
}

/// The node of a device by the system's files. (They have -1 for an unknown node, which does not parse as a `u32`.)
fn node_of(case: &Case, address: &str) -> Option<u32> {
    case.system.word(&format!("/sys/bus/pci/devices/{address}/numa_node"))?.parse().ok()
}

/// Bytes that a node can provide: free memory, and page cache that was not used lately.
fn room(case: &Case, node: u32) -> Option<u64> {
    let text = case.system.read(&format!("{NODE_DIR}/node{node}/meminfo"))?;
    Some(parse::kib(&text, "MemFree")?.saturating_add(page_cache(case, Some(node)).unwrap_or(0)))
}

/// Bytes of page cache that give way to who asks for memory: of a node what was not used lately, of the whole machine
/// what the kernel counts as available.
pub fn page_cache(case: &Case, node: Option<u32>) -> Option<u64> {
    if let Some(node) = node {
        return parse::kib(&case.system.text(&format!("{NODE_DIR}/node{node}/meminfo")), "Inactive(file)");
    }
    let text = case.system.text("/proc/meminfo");
    Some(parse::kib(&text, "MemAvailable")?.saturating_sub(parse::kib(&text, "MemFree")?))
}

/// Whether this process can use memory and processors next to each device.
pub fn numa(case: &Case) -> Verdict {
    let nodes = case.system.numbered(NODE_DIR, "node");
    let told = |node: &u32| {
        let room = room(case, *node).map(|bytes| Amount(bytes).to_string());
        format!("node {node}: {}", room.as_deref().unwrap_or("unknown"))
    };
    match nodes.as_slice() {
        [] => return Verdict::unseen(NODE_DIR),
        [node] => return Verdict::ok(format!("one node ({} free)", told(node))),
        _ => {}
    }
    let status = case.system.text("/proc/self/status");
    let allowed = |key: &str| parse::field(&status, key).map(parse::ranges);
    let (memory, processors) = (allowed("Mems_allowed_list"), allowed("Cpus_allowed_list"));
    let mut found = vec![format!("free on {}", nodes.iter().map(told).collect::<Vec<_>>().join(", "))];
    let mut fix = Vec::new();
    for address in &case.addresses() {
        // With an open device, its address is the only one in the list.
        let known = if case.opened() { device_node(case) } else { node_of(case, address) };
        let Some(node) = known else {
            found.push(format!("{address}: the system does not say which node it is on"));
            fix.extend(fixes![
                Kernel: "have the firmware or the hypervisor show the topology; a node that is known otherwise is set by: \
                         echo NODE | sudo tee /sys/bus/pci/devices/{address}/numa_node"
            ]);
            continue;
        };
        let is = format!("{address} is on node {node}");
        if memory.as_ref().is_some_and(|nodes| !nodes.iter().any(|range| range.contains(&node))) {
            found.push(format!("{is}, whose memory this process may not use"));
            let docker = format!("--cpuset-mems={node}");
            fix.extend(cpuset(&format!("AllowedMemoryNodes={node}"), &docker, &format!("--membind={node}")));
        } else if let Some(room) = room(case, node).filter(|room| *room < case.capacity) {
            let (room, wants) = (Amount(room), Amount(case.capacity));
            found.push(format!(
                "{is}, which has {room} for a pool of {wants}: the rest comes from farther away"
            ));
            fix.extend(fixes![Pool: "a capacity of {room} or less, or free memory on node {node}"]);
        } else {
            found.push(is);
        }
        let theirs = parse::ranges(&case.system.text(&format!("{NODE_DIR}/node{node}/cpulist")));
        let shared = |mine: &std::ops::RangeInclusive<u32>| {
            theirs.iter().any(|range| mine.start() <= range.end() && range.start() <= mine.end())
        };
        if !theirs.is_empty() && processors.as_ref().is_some_and(|mine| !mine.iter().any(shared)) {
            found.push(format!("this process may run on none of the processors of node {node}"));
            let docker = "--cpuset-cpus= with the node's processors";
            let systemd = "AllowedCPUs= with the node's processors";
            fix.extend(cpuset(systemd, docker, &format!("--cpunodebind={node}")));
        }
    }
    fix.dedup();
    let found = found.join("; ");
    if fix.is_empty() { Verdict::ok(found) } else { Verdict::warn(found, fix) }
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

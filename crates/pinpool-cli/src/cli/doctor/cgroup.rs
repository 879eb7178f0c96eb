//! The memory limits of control groups, at every level from this process's up to the mount.
//!
//! Pages of a region are charged to the group of the process that touches them, and pinned pages cannot be reclaimed.
//! So pinning does not fail at a limit: the kernel ends a process of the group (cgroup v2 guide on `memory.max`), or
//! slows the whole group down while it is above `memory.high`. The tightest limit may be at any level above the
//! process's own. A container's mounts decide which levels it sees.

use super::{Case, Fixes, Verdict};
use crate::cli::amount::Amount;
use pinpool::cgroup::{ControlGroup, ControlGroups};

/// Compares the groups' limits with the capacity.
pub fn cgroup(case: &Case) -> Verdict {
    if case.system.read("/proc/self/cgroup").is_none() {
        return Verdict::unseen("/proc/self/cgroup");
    }
    let Some(all) = ControlGroups::read(case.system.root()) else {
        return Verdict::ok("no group counts memory here");
    };
    let ControlGroups { version, point, groups } = &all;
    if groups.is_empty() {
        // A mount point without these files is the root of all groups, which has no limit.
        return if case.system.list(point).is_empty() {
            Verdict::unseen(point)
        } else {
            Verdict::ok(format!("no group counts memory here (cgroup v{version})"))
        };
    }
    let tightest = |limit: fn(&ControlGroup) -> Option<u64>| {
        let left = |group: &ControlGroup| group.left(limit(group));
        groups.iter().filter_map(|group| Some((left(group)?, group))).min_by_key(|(left, _)| *left)
    };
    let hard = tightest(|group| group.max);
    let soft = tightest(|group| group.high);
    let file = all.limit_file();
    let said = |left: u64, group: &ControlGroup, file: &str, limit: Option<u64>| {
        format!("{} left of {} ({file} of {})", Amount(left), Amount(limit.unwrap_or(0)), group.path)
    };
    // The limit to recommend: use and capacity and a quarter of the capacity, in whole steps.
    let step = if case.capacity >= 1 << 30 { 1 << 30 } else { 64 << 20_u64 };
    let needed = case.capacity.saturating_add(case.capacity / 4);
    let enough = |group: &ControlGroup| group.used.saturating_add(needed).div_ceil(step).saturating_mul(step);
    let wants = Amount(case.capacity);
    if let Some((left, group)) = hard.filter(|(left, _)| left / 5 * 4 < case.capacity) {
        let bytes = enough(group);
        let mut fix = set(group, "MemoryMax", file, bytes);
        fix.extend(fixes![
            Docker: "--memory={bytes} (or docker update --memory={bytes} --memory-swap={bytes})";
            Kubernetes: "resources.limits.memory: {}Mi in the container's description", bytes.div_ceil(1 << 20);
            Pool: "a capacity of {} or less", Amount(left / 5 * 4);
        ]);
        let found = said(left, group, file, group.max);
        return if left < case.capacity {
            let why = "and the kernel ends a process of the group that exceeds it";
            Verdict::fail(format!("{found}; the pool wants {wants}, {why}"), fix)
        } else {
            Verdict::warn(format!("{found}; a pool of {wants} leaves little for the rest"), fix)
        };
    }
    if let Some((left, group)) = soft.filter(|(left, _)| *left < case.capacity) {
        let (bytes, file) = (enough(group), "memory.high");
        let mut fix = set(group, "MemoryHigh", file, bytes);
        fix.extend(fixes![
            Docker: "echo {bytes} into {file} of its group, on the host";
            Kubernetes: "resources.requests.memory the same as limits.memory, with which no {file} is set";
            Pool: "a capacity of {} or less", Amount(left / 5 * 4);
        ]);
        let found = said(left, group, file, group.high);
        let why = "above it the kernel slows the whole group down, since pinned memory cannot be reclaimed";
        return Verdict::warn(format!("{found}; the pool wants {wants}, and {why}"), fix);
    }
    Verdict::ok(match hard {
        Some((left, group)) => said(left, group, file, group.max),
        None => format!("no limit (cgroup v{version}, {} levels seen)", groups.len()),
    })
}

/// The remedy that raises a limit on the machine itself. systemd rewrites the limits of its own groups, so it must be
/// told; the limits of other groups are plain files.
fn set(group: &ControlGroup, property: &str, file: &str, bytes: u64) -> Fixes {
    let name = group.path.rsplit('/').next().unwrap_or_default();
    if [".service", ".slice", ".scope"].iter().any(|kind| name.ends_with(kind)) {
        return fixes![Shell: "sudo systemctl set-property {name} {property}={bytes}"];
    }
    fixes![Shell: "echo {bytes} | sudo tee {}/{file}", group.path.trim_end_matches('/')]
}

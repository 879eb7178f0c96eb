//! What the kernel and the driver bound per call, whatever the limits of the process.

use super::place::{By, Place};
use super::{Case, Check, Maker, parse};

/// The kernel's version, where it matters for pinning.
pub fn version(case: &Case) -> Check {
    const NAME: &str = "kernel";
    let Some(release) = case.system.word("/proc/sys/kernel/osrelease") else {
        return Check::unseen(NAME, "/proc/sys/kernel/osrelease");
    };
    let newer = |version: &str| case.remedies(&[(By::Kernel, format!("Linux {version} or later"))]);
    match parse::release(&release) {
        // Seen by TensorRT-LLM (its issue 17773), on any one registration, whoever makes it.
        Some((6, 11..=13)) if case.maker == Some(Maker::Nvidia) => Check::warn(
            NAME,
            format!(
                "Linux {release}: one registration with CUDA fails from 2 GiB on; pools register 1 GiB at a time here, \
                 other libraries may not"
            ),
            newer("6.14"),
        ),
        Some(version) if version < (4, 14) => Check::warn(
            NAME,
            format!("Linux {release}: no expedited membarrier, so that checkouts are slower"),
            newer("4.14"),
        ),
        Some(version) if version < (5, 14) => Check::ok(
            NAME,
            format!("Linux {release} (regions are touched page by page: MADV_POPULATE_WRITE came with 5.14)"),
        ),
        Some(_) if case.maker == Some(Maker::Nvidia) && case.capacity >= 512 << 30 => Check::ok(
            NAME,
            // NVIDIA/open-gpu-kernel-modules, issue 1234.
            format!(
                "Linux {release} (the driver registers less than 512 GiB a call; pools register much less at a time)"
            ),
        ),
        _ => Check::ok(NAME, format!("Linux {release}")),
    }
}

/// The number of mappings that a process may have. A region is one, and its advice can split it.
pub fn mappings(case: &Case) -> Check {
    const NAME: &str = "mappings";
    let Some(most) = case.system.number("/proc/sys/vm/max_map_count") else {
        return Check::unseen(NAME, "/proc/sys/vm/max_map_count");
    };
    // The smallest regions of a large pool are 256 MiB; each end can be a mapping of its own.
    let wanted = 3 * case.capacity.div_ceil(256 << 20);
    let used =
        case.system.bytes("/proc/self/maps").map_or(0, |maps| maps.iter().filter(|b| **b == b'\n').count());
    let used = used as u64;
    let fix = || case.remedies(&[(By::Kernel, Place::sysctl("vm.max_map_count", 262_144.max(4 * wanted)))]);
    // Servers map libraries, models and thread stacks by the thousands.
    const OTHERS: u64 = 8192;
    if most < used + wanted {
        let found =
            format!("vm.max_map_count is {most}: too few for the pool's {wanted} beside the {used} in use");
        Check::fail(NAME, found, fix())
    } else if most < used + wanted + OTHERS {
        let found =
            format!("vm.max_map_count is {most}: few for a server, of which the pool takes up to {wanted}");
        Check::warn(NAME, found, fix())
    } else {
        Check::ok(NAME, format!("vm.max_map_count is {most}, the pool takes up to {wanted}"))
    }
}

//! What the version of the kernel and its settings mean for pinning, whatever the limits of the process: bounds of one
//! call, missing system calls, the number of mappings.

use pinpool::family::Kernel;

use super::environment::Environment;
use super::{Case, Verdict, parse};

/// Kernel versions that matter for every device; those that matter for one vendor are in the vendor's row.
const KERNELS: [Kernel; 2] = [
    Kernel {
        versions: (0, 0)..(4, 14),
        capacity: 0,
        what: "no expedited membarrier, so that checkouts are slower",
        helps: Some("4.14"),
    },
    Kernel {
        versions: (4, 14)..(5, 14),
        capacity: 0,
        what: "regions are touched page by page, since MADV_POPULATE_WRITE came with 5.14",
        helps: None,
    },
];

/// The kernel's version, and what it means for pinning.
pub fn version(case: &Case) -> Verdict {
    let Some(release) = case.system.word("/proc/sys/kernel/osrelease") else {
        return Verdict::unseen("/proc/sys/kernel/osrelease");
    };
    let mut verdict = Verdict::ok(format!("Linux {release}"));
    let version = parse::release(&release);
    let vendors = case.vendor().map_or(&[][..], |vendor| vendor.kernels);
    let is_in = |kernel: &Kernel| version.is_some_and(|version| kernel.versions.contains(&version));
    for kernel in
        vendors.iter().chain(&KERNELS).filter(|kernel| is_in(kernel) && case.capacity >= kernel.capacity)
    {
        let found = format!("{}: {}", verdict.found, kernel.what);
        verdict = match kernel.helps {
            Some(later) => return Verdict::warn(found, fixes![Kernel: "Linux {later} or later"]),
            None => Verdict::ok(found),
        };
    }
    verdict
}

/// The number of mappings that a process may have. A region is one mapping, which `madvise` may split.
pub fn mappings(case: &Case) -> Verdict {
    let Some(most) = case.system.number("/proc/sys/vm/max_map_count") else {
        return Verdict::unseen("/proc/sys/vm/max_map_count");
    };
    // The smallest regions of a large pool are 256 MiB; each end can be a mapping of its own.
    let wanted = 3 * case.capacity.div_ceil(256 << 20);
    let used = case.system.text("/proc/self/maps").lines().count() as u64;
    let fix = Environment::sysctl("vm.max_map_count", 262_144.max(4 * wanted));
    // A server has thousands of mappings of its own: libraries, models, thread stacks.
    const OTHERS: u64 = 8192;
    let found = format!("vm.max_map_count is {most}");
    if most < used + wanted {
        Verdict::fail(format!("{found}: too few for the pool's {wanted} beside the {used} in use"), fix)
    } else if most < used + wanted + OTHERS {
        Verdict::warn(format!("{found}: few for a server, of which the pool takes up to {wanted}"), fix)
    } else {
        Verdict::ok(format!("{found}, the pool takes up to {wanted}"))
    }
}

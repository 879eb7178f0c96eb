//! Limits of this process and of the kernel: memory that may be locked, address space and mappings, and what the
//! kernel's version means for pinning.

use pinpool::family::Kernel;

use super::environment::sysctl;
use super::{Amount, Case, Unseen, Verdict, parse};

/// CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// How much memory this process may lock.
///
/// `mlock` counts the memory that a process has locked against RLIMIT_MEMLOCK, unless the process has CAP_IPC_LOCK in
/// the machine's initial user namespace (`mm/mlock.c`: `capable(CAP_IPC_LOCK)`; a capability inside a rootless
/// container does not count). So the limit holds for the host device. A vendor's driver may pin without counting; then
/// the limit holds only for programs that register the same memory elsewhere, since RDMA and io_uring do count.
pub fn memlock(case: &Case) -> Result<Verdict, Unseen> {
    let limits = case.system.read("/proc/self/limits")?;
    let status = case.system.read("/proc/self/status")?;
    let unseen = || Unseen("the limit in /proc/self/limits".into());
    let (soft, hard) = parse::limit(&limits, "Max locked memory").ok_or_else(unseen)?;
    let Some(soft) = soft else { return Ok(Verdict::ok("unlimited")) };
    let capable = parse::capability(&status, IPC_LOCK) == Some(true);
    if capable && !inner_user(case) {
        return Ok(Verdict::ok(format!("{}, which CAP_IPC_LOCK sets aside", Amount(soft))));
    }
    let locked = parse::kib(&status, "VmLck").unwrap_or(0);
    if soft.saturating_sub(locked) >= case.capacity {
        return Ok(Verdict::ok(format!("{}, enough for the pool", Amount(soft))));
    }
    let why = match capable {
        true => "CAP_IPC_LOCK does not count inside a user namespace",
        false => "there is no CAP_IPC_LOCK to exceed it",
    };
    let found = format!("at most {}, the pool wants {}; {why}", Amount(soft), Amount(case.capacity));
    let kib = case.capacity.saturating_add(locked).div_ceil(1024);
    // A process may raise its own soft limit up to the hard one, so a command before the server's start is enough.
    let mut fix = match hard {
        Some(hard) if hard < kib.saturating_mul(1024) => fixes![
            Shell: "sudo prlimit --memlock=unlimited:unlimited --pid $$, then start the server from there; for logins: \
                    * - memlock unlimited in /etc/security/limits.conf"
        ],
        _ => fixes![Start: "ulimit -l {kib}, then start the server from there"],
    };
    fix.extend(fixes![
        Systemd: "LimitMEMLOCK=infinity under [Service] (sudo systemctl edit UNIT), then restart it";
        Docker: "--ulimit memlock=-1:-1 (or --cap-add IPC_LOCK, not for rootless containers)";
        Kubernetes: "securityContext.capabilities.add: [\"IPC_LOCK\"] in the container's description (pods have no ulimits); \
                     or on the nodes LimitMEMLOCK=infinity under [Service] of containerd.service, then restart it";
    ]);
    match case.vendor() {
        Some(vendor) if case.opened() && !vendor.counts_locked => {
            let (name, others) = (vendor.name, "RDMA, NIXL and io_uring do when they register it");
            let found = format!("{found}; the {name} driver does not count what it pins, but {others}");
            Ok(Verdict::warn(found, fix))
        }
        _ => Ok(Verdict::fail(found, fix)),
    }
}

/// Whether this process is in a user namespace other than the initial one, where capabilities allow less.
fn inner_user(case: &Case) -> bool {
    let map = case.system.text("/proc/self/uid_map");
    let words: Vec<&str> = map.split_ascii_whitespace().collect();
    // The initial namespace maps all numbers to themselves, in one line; rootless containers have other lines. A file
    // that cannot be read is taken for that of the initial namespace.
    !words.is_empty() && words != ["0", "0", "4294967295"]
}

/// How much address space this process may map. Both limits count a region's mapping (getrlimit(2): RLIMIT_AS, and
/// RLIMIT_DATA since Linux 4.7).
pub fn address_space(case: &Case) -> Result<Verdict, Unseen> {
    let limits = case.system.read("/proc/self/limits")?;
    let status = case.system.text("/proc/self/status");
    let mut bound: Vec<String> = Vec::new();
    let mut least = u64::MAX;
    for (name, used, option) in
        [("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d")]
    {
        let Some((Some(soft), _)) = parse::limit(&limits, name) else { continue };
        let left = soft.saturating_sub(parse::kib(&status, used).unwrap_or(0));
        least = least.min(left);
        bound.push(format!("{option} is {}, {} of it left", Amount(soft), Amount(left)));
    }
    if bound.is_empty() {
        return Ok(Verdict::ok("unlimited"));
    }
    let found = format!("{} (the pool wants {})", bound.join("; "), Amount(case.capacity));
    let fix = fixes![
        Systemd: "LimitAS=infinity and LimitDATA=infinity under [Service], then restart it";
        Shell: "ulimit -v unlimited; ulimit -d unlimited, then start the server from there";
        Docker: "--ulimit data=-1:-1; an address space limit comes from the image's own start script";
        Kubernetes: "drop ulimit -v and -d from the image's start script (pods set neither)";
    ];
    Ok(match case.vendor().and_then(|vendor| vendor.address_space) {
        _ if least < case.capacity => Verdict::fail(found, fix),
        Some(why) => Verdict::warn(format!("{found}; {why}"), fix),
        None => Verdict::ok(found),
    })
}

/// Kernel versions that matter for every device; those that matter for one vendor are in the vendor's row.
const OLD: Kernel = Kernel {
    versions: (0, 0)..(4, 14),
    capacity: 0,
    what: "no expedited membarrier, so that checkouts are slower",
    helps: Some("4.14"),
};

/// The kernel's version, and what it means for pinning.
pub fn kernel(case: &Case) -> Result<Verdict, Unseen> {
    let text = case.system.read("/proc/sys/kernel/osrelease")?;
    let mut found = format!("Linux {}", text.trim());
    let Some(version) = parse::release(&text) else { return Ok(Verdict::ok(found)) };
    let all = case.vendor().map_or(&[][..], |vendor| vendor.kernels).iter().chain([&OLD]);
    for kernel in all.filter(|kernel| kernel.versions.contains(&version) && case.capacity >= kernel.capacity)
    {
        found = format!("{found}: {}", kernel.what);
        if let Some(later) = kernel.helps {
            return Ok(Verdict::warn(found, fixes![Kernel: "Linux {later} or later"]));
        }
    }
    Ok(Verdict::ok(found))
}

/// The number of mappings that a process may have. A region is one mapping, which `madvise` may split.
pub fn mappings(case: &Case) -> Result<Verdict, Unseen> {
    /// A server has thousands of mappings of its own: libraries, models, thread stacks.
    const OTHERS: u64 = 8192;
    let file = "/proc/sys/vm/max_map_count";
    let most = case.system.number(file).ok_or_else(|| Unseen(file.into()))?;
    // The smallest regions of a large pool are 256 MiB; each end can be a mapping of its own.
    let wanted = 3 * case.capacity.div_ceil(256 << 20);
    let used = case.system.text("/proc/self/maps").lines().count() as u64;
    let fix = sysctl("vm.max_map_count", 262_144.max(4 * wanted));
    let found = format!("vm.max_map_count is {most}");
    Ok(if most < used + wanted {
        Verdict::fail(format!("{found}: too few for the pool's {wanted} beside the {used} in use"), fix)
    } else if most < used + wanted + OTHERS {
        Verdict::warn(format!("{found}: few for a server, of which the pool takes up to {wanted}"), fix)
    } else {
        Verdict::ok(format!("{found}, the pool takes up to {wanted}"))
    })
}

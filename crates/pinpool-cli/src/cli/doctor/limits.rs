//! The limits of this process: how much memory it may lock, and how much address space it may map.
//!
//! # The memlock limit
//!
//! `mlock` counts the memory that a process has locked against RLIMIT_MEMLOCK, unless the process has CAP_IPC_LOCK in
//! the machine's initial user namespace (`mm/mlock.c`: `capable(CAP_IPC_LOCK)`; a capability inside a rootless
//! container does not count). So the limit holds for the host device. A vendor's driver may pin without counting; then
//! the limit holds only for programs that register the same memory elsewhere, since RDMA and io_uring do count.

use super::{Case, Verdict, parse};
use crate::cli::amount::Amount;

/// CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// How much memory this process may lock.
pub fn memlock(case: &Case) -> Verdict {
    let (Some(limits), Some(status)) =
        (case.system.read("/proc/self/limits"), case.system.read("/proc/self/status"))
    else {
        return Verdict::unseen("/proc/self/limits and /proc/self/status");
    };
    let Some((soft, hard)) = parse::limit(&limits, "Max locked memory") else {
        return Verdict::unseen("the limit in /proc/self/limits");
    };
    let Some(soft) = soft else { return Verdict::ok("unlimited") };
    let capable = parse::capability(&status, IPC_LOCK) == Some(true);
    if capable && !inner_user(case) {
        return Verdict::ok(format!("{}, which CAP_IPC_LOCK sets aside", Amount(soft)));
    }
    let locked = parse::kib(&status, "VmLck").unwrap_or(0);
    if soft.saturating_sub(locked) >= case.capacity {
        return Verdict::ok(format!("{}, enough for the pool", Amount(soft)));
    }
    let why = if capable {
        "CAP_IPC_LOCK does not count inside a user namespace"
    } else {
        "there is no CAP_IPC_LOCK to exceed it"
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
            let found = format!(
                "{found}; the {} driver does not count what it pins, but RDMA, NIXL and io_uring do when they register it",
                vendor.name
            );
            Verdict::warn(found, fix)
        }
        _ => Verdict::fail(found, fix),
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
pub fn address_space(case: &Case) -> Verdict {
    let Some(limits) = case.system.read("/proc/self/limits") else {
        return Verdict::unseen("/proc/self/limits");
    };
    let status = case.system.text("/proc/self/status");
    let mut bound: Vec<String> = Vec::new();
    let mut too_small = false;
    for (name, used, option) in
        [("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d")]
    {
        let Some((Some(soft), _)) = parse::limit(&limits, name) else { continue };
        let left = soft.saturating_sub(parse::kib(&status, used).unwrap_or(0));
        too_small |= left < case.capacity;
        bound.push(format!("{option} is {}, {} of it left", Amount(soft), Amount(left)));
    }
    if bound.is_empty() {
        return Verdict::ok("unlimited");
    }
    let found = format!("{} (the pool wants {})", bound.join("; "), Amount(case.capacity));
    let fix = fixes![
        Systemd: "LimitAS=infinity and LimitDATA=infinity under [Service], then restart it";
        Shell: "ulimit -v unlimited; ulimit -d unlimited, then start the server from there";
        Docker: "--ulimit data=-1:-1; an address space limit comes from the image's own start script";
        Kubernetes: "drop ulimit -v and -d from the image's start script (pods set neither)";
    ];
    match case.vendor().and_then(|vendor| vendor.address_space) {
        _ if too_small => Verdict::fail(found, fix),
        Some(why) => Verdict::warn(format!("{found}; {why}"), fix),
        None => Verdict::ok(found),
    }
}

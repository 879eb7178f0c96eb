//! The limits of this process: how much memory it may lock, and how much address space it may have.
//!
//! # The memlock limit
//!
//! `mlock` counts what a process has locked against RLIMIT_MEMLOCK, unless it has CAP_IPC_LOCK in the machine's own user
//! namespace (`mm/mlock.c`: `capable(CAP_IPC_LOCK)`; a capability inside a rootless container does not count). So the
//! limit binds on the host device. NVIDIA's driver pins without counting (`os_lock_user_pages` of its open kernel
//! modules), so there the limit binds only those who register the same memory elsewhere: RDMA and io_uring do count.

use super::place::By;
use super::report::size;
use super::{Case, Check, Maker, parse};

/// CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// How much may be locked.
pub fn memlock(case: &Case) -> Check {
    const NAME: &str = "memlock";
    let (Some(limits), Some(status)) =
        (case.system.read("/proc/self/limits"), case.system.read("/proc/self/status"))
    else {
        return Check::unseen(NAME, "/proc/self/limits and /proc/self/status");
    };
    let Some(limit) = parse::limit(&limits, "Max locked memory") else {
        return Check::unseen(NAME, "the limit in /proc/self/limits");
    };
    let Some(soft) = limit.soft else { return Check::ok(NAME, "unlimited") };
    let capable = parse::capability(&status, IPC_LOCK) == Some(true);
    if capable && !inner_user(case) {
        return Check::ok(NAME, format!("{}, which CAP_IPC_LOCK sets aside", size(soft)));
    }
    let locked = parse::kib(&status, "VmLck").unwrap_or(0);
    let left = soft.saturating_sub(locked);
    let why = if capable {
        "CAP_IPC_LOCK does not count inside a user namespace"
    } else {
        "there is no CAP_IPC_LOCK to exceed it"
    };
    if left >= case.capacity {
        return Check::ok(NAME, format!("{}, enough for the pool", size(soft)));
    }
    let mut found = format!("at most {}, the pool wants {}; {why}", size(soft), size(case.capacity));
    let kib = case.capacity.saturating_add(locked).div_ceil(1024);
    // Up to the hard limit anyone may raise it, wherever the server starts.
    let start = match limit.hard {
        Some(hard) if hard < kib.saturating_mul(1024) => (
            By::Shell,
            "sudo prlimit --memlock=unlimited:unlimited --pid $$, then start the server from there; for logins: \
             * - memlock unlimited in /etc/security/limits.conf"
                .into(),
        ),
        _ => (By::Start, format!("ulimit -l {kib}, then start the server from there")),
    };
    let fix = case.remedies(&[
        start,
        (By::Systemd, "LimitMEMLOCK=infinity under [Service] (sudo systemctl edit UNIT), then restart it".into()),
        (By::Docker, "--ulimit memlock=-1:-1 (or --cap-add IPC_LOCK, not for rootless containers)".into()),
        (
            By::Kubernetes,
            "securityContext.capabilities.add: [\"IPC_LOCK\"] in the container's description (pods have no ulimits); or \
             on the nodes LimitMEMLOCK=infinity under [Service] of containerd.service, then restart it"
                .into(),
        ),
    ]);
    if case.maker == Some(Maker::Nvidia) && case.opened() {
        found += "; NVIDIA's driver does not count what it pins, but RDMA, NIXL and io_uring do when they register it";
        return Check::warn(NAME, found, fix);
    }
    Check::fail(NAME, found, fix)
}

/// Whether this process is in a user namespace of its own, where capabilities reach less far.
fn inner_user(case: &Case) -> bool {
    let map = case.system.read("/proc/self/uid_map").unwrap_or_default();
    let words: Vec<&str> = map.split_ascii_whitespace().collect();
    // The machine's own maps all numbers to themselves, in one line; rootless containers have one or several others. What
    // cannot be read is taken for the machine's.
    !words.is_empty() && words != ["0", "0", "4294967295"]
}

/// How much can be mapped. Both limits count what a region maps (getrlimit(2): RLIMIT_AS; RLIMIT_DATA since Linux 4.7).
pub fn address_space(case: &Case) -> Check {
    const NAME: &str = "address-space";
    let Some(limits) = case.system.read("/proc/self/limits") else {
        return Check::unseen(NAME, "/proc/self/limits");
    };
    let status = case.system.read("/proc/self/status").unwrap_or_default();
    let mut bound: Vec<String> = Vec::new();
    let mut too_small = false;
    for (name, used, option) in
        [("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d")]
    {
        let Some(soft) = parse::limit(&limits, name).and_then(|limit| limit.soft) else { continue };
        let left = soft.saturating_sub(parse::kib(&status, used).unwrap_or(0));
        too_small |= left < case.capacity;
        bound.push(format!("{option} is {}, {} of it left", size(soft), size(left)));
    }
    if bound.is_empty() {
        return Check::ok(NAME, "unlimited");
    }
    let found = format!("{} (the pool wants {})", bound.join("; "), size(case.capacity));
    let fix = case.remedies(&[
        (By::Systemd, "LimitAS=infinity and LimitDATA=infinity under [Service], then restart it".into()),
        (By::Shell, "ulimit -v unlimited; ulimit -d unlimited, then start the server from there".into()),
        (
            By::Docker,
            "--ulimit data=-1:-1; an address space limit comes from the image's own start script".into(),
        ),
        (By::Kubernetes, "drop ulimit -v and -d from the image's start script (pods set neither)".into()),
    ]);
    match case.maker {
        _ if too_small => Check::fail(NAME, found, fix),
        Some(Maker::Nvidia) => {
            let found = format!(
                "{found}; CUDA reserves addresses for all memory of the machine and its GPUs at its start"
            );
            Check::warn(NAME, found, fix)
        }
        _ => Check::ok(NAME, found),
    }
}

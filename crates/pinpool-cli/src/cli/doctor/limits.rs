//! How much memory this process may lock.

use super::{Amount, Case, Unseen, Verdict, parse};

/// CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// Compares the memlock limit with the capacity.
///
/// `mlock` counts a process's locked memory against RLIMIT_MEMLOCK, unless it has CAP_IPC_LOCK in
/// the initial user namespace (`mm/mlock.c`: `capable(CAP_IPC_LOCK)`; one of a rootless container
/// does not count). So the limit holds for the host device. NVIDIA's driver pins without counting;
/// then it holds only for programs that register the memory for RDMA or io_uring, which count.
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
    // A process may raise its own soft limit: a command before the server's start is enough.
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
    if case.accelerator().is_some_and(|device| device.name().starts_with("cuda")) {
        let others = "RDMA, NIXL and io_uring do when they register it";
        let found = format!("{found}; the NVIDIA driver does not count what it pins, but {others}");
        return Ok(Verdict::warn(found, fix));
    }
    Ok(Verdict::fail(found, fix))
}

/// Whether this process is in another user namespace, where capabilities allow less.
fn inner_user(case: &Case) -> bool {
    let map = case.system.text("/proc/self/uid_map");
    let words: Vec<&str> = map.split_ascii_whitespace().collect();
    // The initial namespace maps all numbers to themselves, in one line; rootless containers have
    // other lines. A file that cannot be read is taken for that of the initial namespace.
    !words.is_empty() && words != ["0", "0", "4294967295"]
}

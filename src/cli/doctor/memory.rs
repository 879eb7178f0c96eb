//! Memory that is there for the pool: on the whole machine, past what others locked or reserved.

use super::place::{By, Place};
use super::report::size;
use super::{Case, Check, parse};

/// The machine's memory against the capacity.
pub fn memory(case: &Case) -> Check {
    const NAME: &str = "memory";
    let text = case.system.read("/proc/meminfo").unwrap_or_default();
    let kib = |key: &str| parse::kib(&text, key);
    let (Some(total), Some(available)) = (kib("MemTotal"), kib("MemAvailable").or_else(|| kib("MemFree")))
    else {
        return Check::unseen(NAME, "/proc/meminfo");
    };
    let mut found = format!("{} available of {}", size(available), size(total));
    let locked = kib("Mlocked").unwrap_or(0);
    if locked > total / 16 {
        found += &format!(", {} locked by mlock already", size(locked));
    }
    let reserved = parse::field(&text, "HugePages_Free").and_then(|n| n.parse::<u64>().ok());
    let idle = reserved.unwrap_or(0).saturating_mul(kib("Hugepagesize").unwrap_or(0));
    if idle > 0 {
        found += &format!(", {} reserved for hugetlb pages and idle", size(idle));
    }
    // With mode 2 the kernel refuses to map what it could not back (Documentation/mm/overcommit-accounting).
    let strict = case.system.number("/proc/sys/vm/overcommit_memory") == Some(2);
    if let (true, Some(limit), Some(used)) = (strict, kib("CommitLimit"), kib("Committed_AS")) {
        let left = limit.saturating_sub(used);
        found += &format!(", {} left to promise (vm.overcommit_memory is 2)", size(left));
        if left < case.capacity {
            return Check::fail(
                NAME,
                format!("{found}; the pool wants {}", size(case.capacity)),
                case.remedies(&[
                    (By::Kernel, Place::sysctl("vm.overcommit_memory", 0)),
                    (By::Pool, format!("a capacity below {}", size(left))),
                ]),
            );
        }
    }
    let mut fix = vec![(By::Pool, format!("a capacity of {} or less", size(available / 5 * 4)))];
    if idle > 0 {
        // Only the idle ones can be given back, which is why this does not go to zero.
        let all = parse::field(&text, "HugePages_Total").and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        let rest = all.saturating_sub(reserved.unwrap_or(0));
        fix.push((
            By::Kernel,
            format!(
                "give idle hugetlb pages back, which pools do not use: sudo sysctl -w vm.nr_hugepages={rest}"
            ),
        ));
    }
    if available < case.capacity {
        let found = format!(
            "{found}; the pool wants {}, and pinned memory is never swapped out",
            size(case.capacity)
        );
        Check::fail(NAME, found, case.remedies(&fix))
    } else if available / 5 * 4 < case.capacity {
        let found = format!(
            "{found}; a pool of {} leaves little for files and others, and the kernel may end processes",
            size(case.capacity)
        );
        Check::warn(NAME, found, case.remedies(&fix))
    } else {
        Check::ok(NAME, found)
    }
}

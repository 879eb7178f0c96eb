//! The machine's memory that a pool can have, without what other programs locked or reserved.

use super::environment::Environment;
use super::{Case, Verdict, parse};
use crate::cli::amount::Amount;

/// Compares the machine's available memory with the capacity.
pub fn memory(case: &Case) -> Verdict {
    let text = case.system.text("/proc/meminfo");
    let kib = |key: &str| parse::kib(&text, key);
    let count = |key: &str| parse::field(&text, key).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    let (Some(total), Some(available)) = (kib("MemTotal"), kib("MemAvailable").or_else(|| kib("MemFree")))
    else {
        return Verdict::unseen("/proc/meminfo");
    };
    let wants = Amount(case.capacity);
    let mut found = format!("{} available of {}", Amount(available), Amount(total));
    let locked = kib("Mlocked").unwrap_or(0);
    if locked > total / 16 {
        found += &format!(", {} locked by mlock already", Amount(locked));
    }
    let reserved = count("HugePages_Free");
    let idle = reserved.saturating_mul(kib("Hugepagesize").unwrap_or(0));
    if idle > 0 {
        found += &format!(", {} reserved for hugetlb pages and idle", Amount(idle));
    }
    // In mode 2 the kernel refuses mappings beyond a limit (Documentation/mm/overcommit-accounting).
    let strict = case.system.number("/proc/sys/vm/overcommit_memory") == Some(2);
    if let (true, Some(limit), Some(used)) = (strict, kib("CommitLimit"), kib("Committed_AS")) {
        let left = limit.saturating_sub(used);
        found += &format!(", {} left to promise (vm.overcommit_memory is 2)", Amount(left));
        if left < case.capacity {
            let mut fix = Environment::sysctl("vm.overcommit_memory", 0);
            fix.extend(fixes![Pool: "a capacity below {}", Amount(left)]);
            return Verdict::fail(format!("{found}; the pool wants {wants}"), fix);
        }
    }
    let mut fix = fixes![Pool: "a capacity of {} or less", Amount(available / 5 * 4)];
    if idle > 0 {
        // Only idle huge pages can be given back, so the recommended number is not zero.
        let rest = count("HugePages_Total").saturating_sub(reserved);
        fix.extend(fixes![
            Kernel: "give idle hugetlb pages back, which pools do not use: sudo sysctl -w vm.nr_hugepages={rest}"
        ]);
    }
    if available < case.capacity {
        let found = format!("{found}; the pool wants {wants}, and pinned memory is never swapped out");
        Verdict::fail(found, fix)
    } else if available / 5 * 4 < case.capacity {
        let why = "leaves little for files and others, and the kernel may end processes";
        Verdict::warn(format!("{found}; a pool of {wants} {why}"), fix)
    } else {
        Verdict::ok(found)
    }
}

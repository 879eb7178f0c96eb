//! The IOMMU, which stands between devices and memory.
//!
//! An IOMMU that translates has a table entry for every page that is pinned for a device, and a flush for every entry
//! that is removed. So pinning and unpinning are slower, copies between devices may go through the processor, and a
//! device may exhaust its translation look-aside buffer. An IOMMU that passes addresses through, or none, costs
//! nothing.

use super::environment::Environment;
use super::{Case, Verdict};

/// Whether the IOMMU translates the accelerators' addresses.
pub fn iommu(case: &Case) -> Verdict {
    if !case.system.exists("/sys/class") {
        return Verdict::unseen("/sys/class/iommu");
    }
    let units = case.system.list("/sys/class/iommu");
    if units.is_empty() {
        return Verdict::ok("none shows here");
    }
    let found =
        format!("{} ({} units)", units[0].trim_end_matches(|c: char| c.is_ascii_digit()), units.len());
    let addresses = case.addresses();
    if addresses.is_empty() {
        return Verdict::ok(format!("{found}; no accelerator behind it"));
    }
    let line = case.system.text("/proc/cmdline");
    let asked = |word: &str| line.split_ascii_whitespace().any(|w| w == word);
    let passes = asked("iommu=pt") || asked("iommu.passthrough=1");
    let (mut translated, mut known) = (Vec::new(), true);
    for address in &addresses {
        let group = case.system.link(&format!("/sys/bus/pci/devices/{address}/iommu_group"));
        let kind =
            group.and_then(|group| case.system.word(&format!("/sys/kernel/iommu_groups/{group}/type")));
        match kind.as_deref() {
            // The words are listed in Documentation/ABI/testing/sysfs-kernel-iommu_groups.
            Some("identity") => {}
            Some(kind @ ("DMA" | "DMA-FQ")) => {
                let strict = if kind == "DMA" { ", flushing at once" } else { "" };
                translated.push(format!("{address} is translated ({kind}{strict})"));
            }
            _ => known = false,
        }
    }
    if translated.is_empty() {
        let how = match known {
            true => "passes the accelerators through",
            false if passes => "passes through, by the kernel's command line",
            false => "what it does to the accelerators does not show",
        };
        return Verdict::ok(format!("{found}: {how}"));
    }
    let words = if units[0].starts_with("smmu") { "iommu.passthrough=1" } else { "iommu=pt" };
    let found = format!("{found}: {}; pinning and unpinning are slower", translated.join(", "));
    Verdict::warn(found, Environment::boot(words))
}

//! What lies between a device and memory: its PCIe link, with the speed that it should reach, and the IOMMU.

use std::fs;
use std::path::Path;

use super::environment::boot;
use super::{Case, Unseen, Verdict, parse};

/// The share of a link's data rate that large copies reach: packet headers and acknowledgements take the rest. 55.5 of
/// 63.0 GB/s on an H200 with PCIe 5.0 x16.
const PAYLOAD: f64 = 0.88;

/// For each PCIe generation: 10^9 transfers a second on one lane, the generation's name, and the share of the bits that
/// is data (PCI Express Base Specification): 8 of 10 bits, later 128 of 130 bits, then 236 of the 256 bytes of a flit.
const PCIE_GENERATIONS: [(f64, &str, f64); 6] = [
    (2.5, "1.0", 8.0 / 10.0),
    (5.0, "2.0", 8.0 / 10.0),
    (8.0, "3.0", 128.0 / 130.0),
    (16.0, "4.0", 128.0 / 130.0),
    (32.0, "5.0", 128.0 / 130.0),
    (64.0, "6.0", 236.0 / 256.0),
];

/// 10^9 transfers a second on one lane, and lanes.
type Rate = (f64, u64);

/// The link of a PCI device or bridge to what is above it.
pub struct Link {
    address: String,
    now: Rate,
    most: Rate,
}

impl Link {
    fn read(dir: &Path) -> Option<Self> {
        let text = |file: String| fs::read_to_string(dir.join(file)).ok();
        let rate = |which: &str| {
            let speed = text(format!("{which}_link_speed")).and_then(|text| parse::transfers(&text));
            let width = text(format!("{which}_link_width")).and_then(|text| text.trim().parse().ok());
            // A bridge without anything in its slot has a width of 0; 255 is "unknown".
            (speed, width.filter(|width| (1..=32).contains(width)))
        };
        let ((Some(speed), Some(width)), most) = (rate("current"), rate("max")) else { return None };
        let address = dir.file_name()?.to_str()?.to_owned();
        Some(Self { address, now: (speed, width), most: (most.0.unwrap_or(speed), most.1.unwrap_or(width)) })
    }

    /// The links from a device up to the root, the device's own first. Empty: the system shows none. An idle GPU slows
    /// its link down to save power, so they are read right after copies.
    pub fn path(case: &Case) -> Vec<Self> {
        let Some(address) = case.address() else { return Vec::new() };
        let device = case.system.at(&format!("/sys/bus/pci/devices/{address}")).canonicalize();
        // Folders are nested like the bridges. The first folder that is not a PCI device ends the path. The downward
        // ports of a root or a switch show the link below them a second time, which does not change the slowest.
        let pci =
            |dir: &&Path| dir.file_name().is_some_and(|n| n.to_string_lossy().matches(':').count() == 2);
        let dirs = device.iter().flat_map(|device| device.ancestors().take_while(pci));
        dirs.filter_map(Self::read).collect()
    }
}

fn generation((speed, _): Rate) -> &'static (f64, &'static str, f64) {
    PCIE_GENERATIONS.iter().find(|(most, ..)| speed <= *most).unwrap_or(&PCIE_GENERATIONS[5])
}

/// GB/s of 10^9 bytes that large copies reach in one direction.
fn gb_per_s(rate: Rate) -> f64 {
    rate.0 * rate.1 as f64 / 8.0 * generation(rate).2 * PAYLOAD
}

fn words(rate: Rate) -> String {
    format!("PCIe {} x{}", generation(rate).1, rate.1)
}

fn slowest(links: &[Link]) -> Option<&Link> {
    links.iter().min_by(|a, b| gb_per_s(a.now).total_cmp(&gb_per_s(b.now)))
}

/// GB/s that large copies should reach: those of the slowest link.
pub fn expected(links: &[Link]) -> Option<f64> {
    slowest(links).map(|link| gb_per_s(link.now))
}

/// Whether the link runs at its full speed and width. Called right after copies.
pub fn link(case: &Case, links: &[Link]) -> Verdict {
    let Some(address) = case.address() else { return Verdict::ok("no accelerator, no link") };
    let (Some(own), Some(slowest)) = (links.first(), slowest(links)) else {
        let why = "the system shows no PCIe link (virtual machines often hide it)";
        return Verdict::ok(format!("{address}: {why}"));
    };
    let found = format!("{address}: {}, {:.1} GB/s for large copies", words(own.now), gb_per_s(own.now));
    let less = format!("{found}; it can do {}", words(own.most));
    let (found, fix) = if own.now.1 < own.most.1 {
        let fix = "seat the card again, use a slot with all lanes, and look for bifurcation in the firmware's settings";
        (less, fix)
    } else if own.now.0 < own.most.0 && case.opened() {
        // Only if there were copies before: the link of an idle device is slow on purpose.
        let fix = "set the slot's speed to auto in the firmware's settings, or use a faster slot; for errors of the \
                   link: sudo dmesg | grep -i aer";
        (less, fix)
    } else if gb_per_s(slowest.now) < gb_per_s(own.now) * 0.99 {
        let bridge = format!("a bridge above it, {}, has only {}", slowest.address, words(slowest.now));
        let fix = "use a slot whose bridges have the device's lanes and speed (lspci -tv shows the way)";
        (format!("{found}; {bridge}"), fix)
    } else {
        return Verdict::ok(found);
    };
    Verdict::warn(found, fixes![Kernel: "{fix}"])
}

/// Whether the IOMMU translates the accelerator's addresses.
///
/// An IOMMU that translates has a table entry for every page that is pinned for a device, and a flush for every entry
/// that is removed. So pinning and unpinning are slower, copies between devices may go through the processor, and a
/// device may exhaust its translation look-aside buffer. An IOMMU that passes addresses through, or none, costs
/// nothing.
pub fn iommu(case: &Case) -> Result<Verdict, Unseen> {
    if !case.system.exists("/sys/class") {
        return Err(Unseen("/sys/class/iommu".into()));
    }
    let units = case.system.list("/sys/class/iommu");
    let Some(first) = units.first() else { return Ok(Verdict::ok("none shows here")) };
    let found = format!("{} ({} units)", first.trim_end_matches(|c: char| c.is_ascii_digit()), units.len());
    let Some(address) = case.address() else {
        return Ok(Verdict::ok(format!("{found}; no accelerator behind it")));
    };
    let group = case.system.link(&format!("/sys/bus/pci/devices/{address}/iommu_group")).unwrap_or_default();
    let kind = case.system.word(&format!("/sys/kernel/iommu_groups/{group}/type"));
    let line = case.system.text("/proc/cmdline");
    let passes = |word: &str| ["iommu=pt", "iommu.passthrough=1"].contains(&word);
    // The words are listed in Documentation/ABI/testing/sysfs-kernel-iommu_groups.
    let how = match kind.as_deref() {
        Some(kind @ ("DMA" | "DMA-FQ")) => {
            let strict = if kind == "DMA" { ", flushing at once" } else { "" };
            let how = format!("{address} is translated ({kind}{strict}); pinning and unpinning are slower");
            let words = if first.starts_with("smmu") { "iommu.passthrough=1" } else { "iommu=pt" };
            return Ok(Verdict::warn(format!("{found}: {how}"), boot(words)));
        }
        Some("identity") => "passes the accelerators through",
        _ if line.split_ascii_whitespace().any(passes) => "passes through, by the kernel's command line",
        _ => "what it does to the accelerators does not show",
    };
    Ok(Verdict::ok(format!("{found}: {how}")))
}

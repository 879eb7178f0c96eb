//! The PCIe link of a device, and the speed that copies over it should reach.
//!
//! `/sys` has the speed and the width of each link from the device up to the root; the slowest of them counts. An idle
//! GPU slows its link down to save power, so the link is read right after the trial's copies.

use super::system::System;
use super::{Case, Verdict, parse};

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

/// A link, read at its lower end.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    address: String,
    speed: f64,
    width: u64,
    most_speed: f64,
    most_width: u64,
}

impl Link {
    fn read(system: &System, dir: &str) -> Option<Self> {
        let speed = |file: &str| parse::transfers(&system.word(&format!("{dir}/{file}"))?);
        // A bridge without anything in its slot has a width of 0; 255 is "unknown".
        let width = |file: &str| system.number(&format!("{dir}/{file}")).filter(|w| (1..=32).contains(w));
        let address = dir.rsplit('/').next()?.to_owned();
        let (now, lanes) = (speed("current_link_speed")?, width("current_link_width")?);
        let most_speed = speed("max_link_speed").unwrap_or(now);
        let most_width = width("max_link_width").unwrap_or(lanes);
        Some(Self { address, speed: now, width: lanes, most_speed, most_width })
    }

    fn generation(&self) -> &'static (f64, &'static str, f64) {
        PCIE_GENERATIONS.iter().find(|(speed, ..)| self.speed <= *speed).unwrap_or(&PCIE_GENERATIONS[5])
    }

    /// GB/s of 10^9 bytes that large copies reach in one direction.
    fn gb_per_s(&self) -> f64 {
        self.speed * self.width as f64 / 8.0 * self.generation().2 * PAYLOAD
    }

    fn words(&self) -> String {
        format!("PCIe {} x{}", self.generation().1, self.width)
    }
}

/// The links from a device up to the root, the device's own first. Empty: the system shows none.
pub fn path(system: &System, address: &str) -> Vec<Link> {
    let Some(device) = system.real(&format!("/sys/bus/pci/devices/{address}")) else { return Vec::new() };
    let mut links = Vec::new();
    let mut dir = device.as_str();
    // Folders are nested like the bridges. The first folder that is not a PCI device ends the path.
    while let Some(name) = dir.rsplit('/').next().filter(|name| name.matches(':').count() == 2) {
        // A bridge's folder describes the link above it, so each link of the path is read once, at its lower end. The
        // downward ports of a root or a switch show the same link a second time, which does not change the slowest.
        links.extend(Link::read(system, dir));
        dir = dir[..dir.len() - name.len()].trim_end_matches('/');
    }
    links
}

/// GB/s that large copies should reach: those of the slowest link.
pub fn expected(links: &[Link]) -> Option<f64> {
    links.iter().map(Link::gb_per_s).min_by(f64::total_cmp)
}

/// Whether the link runs at its full speed and width. Called right after copies.
pub fn link(case: &Case, links: &[Link]) -> Verdict {
    let addresses = case.addresses();
    let Some(address) = addresses.first() else {
        return Verdict::ok("no accelerator, no link");
    };
    let Some(own) = links.first() else {
        return Verdict::ok(format!(
            "{address}: the system shows no PCIe link (virtual machines often hide it)"
        ));
    };
    let found = format!("{address}: {}, {:.1} GB/s for large copies", own.words(), own.gb_per_s());
    let full = Link { speed: own.most_speed, width: own.most_width, ..own.clone() };
    let less = || format!("{found}; it can do {}", full.words());
    let slowest = links.iter().min_by(|a, b| a.gb_per_s().total_cmp(&b.gb_per_s())).unwrap_or(own);
    let (found, fix) = if own.width < full.width {
        let fix = "seat the card again, use a slot with all lanes, and look for bifurcation in the firmware's settings";
        (less(), fix)
    } else if own.speed < full.speed && case.opened() {
        // Only if there were copies before: the link of an idle device is slow on purpose.
        let fix = "set the slot's speed to auto in the firmware's settings, or use a faster slot; for errors of the \
                   link: sudo dmesg | grep -i aer";
        (less(), fix)
    } else if slowest.gb_per_s() < own.gb_per_s() * 0.99 {
        let found = format!("{found}; a bridge above it, {}, has only {}", slowest.address, slowest.words());
        (found, "use a slot whose bridges have the device's lanes and speed (lspci -tv shows the way)")
    } else {
        return Verdict::ok(found);
    };
    Verdict::warn(found, fixes![Kernel: "{fix}"])
}

//! The PCIe link of a device, with the speed that it should reach.

use super::{Case, Verdict, parse};

/// The share of a link's data rate that large copies reach: packet headers and acknowledgements
/// take the rest. 55.5 of 63.0 GB/s on an H200 with 32 GT/s on 16 lanes.
const PAYLOAD: f64 = 0.88;

/// 10^9 transfers a second on one lane, and lanes.
#[derive(Clone, Copy)]
struct Rate(f64, u64);

impl Rate {
    /// The device's current or most rate. `None`: the system shows none.
    fn read(case: &Case, address: &str, which: &str) -> Option<Self> {
        let word = |file| case.system.word(&format!("/sys/bus/pci/devices/{address}/{which}_{file}"));
        let speed = parse::transfers(&word("link_speed")?)?;
        let width = word("link_width")?.parse().ok()?;
        // 0 and 255 stand for what is not known.
        (1..=32).contains(&width).then_some(Self(speed, width))
    }

    /// GB/s of 10^9 bytes that large copies reach in one direction.
    fn gb_per_s(self) -> f64 {
        // The share of the bits that is data (PCI Express Base Specification).
        let data = match self.0 {
            ..=5.0 => 8.0 / 10.0,
            ..=32.0 => 128.0 / 130.0,
            _ => 236.0 / 256.0,
        };
        self.0 * self.1 as f64 / 8.0 * data * PAYLOAD
    }
}

/// Whether the link runs as fast as the device can, and GB/s that large copies should reach. An
/// idle GPU slows its link down to save power, so this looks right after copies.
pub fn link(case: &Case) -> (Verdict, Option<f64>) {
    let Some(address) = case.address() else { return (Verdict::ok("no accelerator, no link"), None) };
    let Some(now) = Rate::read(case, &address, "current") else {
        let why = "the system shows no PCIe link (virtual machines often hide it)";
        return (Verdict::ok(format!("{address}: {why}")), None);
    };
    let (most, speed) = (Rate::read(case, &address, "max").unwrap_or(now), now.gb_per_s());
    let found = format!("{address}: {} GT/s x{}, {speed:.1} GB/s for large copies", now.0, now.1);
    if speed >= most.gb_per_s() * 0.99 {
        return (Verdict::ok(found), Some(speed));
    }
    let fix = fixes![
        Kernel: "seat the card again, or use a slot with all lanes and full speed; look in the firmware's settings for \
                 bifurcation and the slot's speed; sudo dmesg | grep -i aer shows errors of links"
    ];
    let found = format!("{found}; it can do {} GT/s x{}", most.0, most.1);
    (Verdict::warn(found, fix), Some(speed))
}

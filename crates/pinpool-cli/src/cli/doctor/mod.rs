//! `pinpool doctor`: what on this machine stands in the way of pinning and copying, and how to correct it.
//!
//! A check looks at one thing. It reports what it found, whether that is good, and if not the exact remedy. Most checks
//! only read the system's files, below a root that tests replace. The last ones try: a device is opened, a little
//! memory is pinned and copied both ways through a real pool, every byte is compared, and the speed is compared with
//! what this machine should reach.
//!
//! A check is a function from the [`Case`] to a [`Verdict`]. [`run`] makes the case, runs the checks of [`CHECKS`] in
//! order, prints what they found, and then tries ([`probe::probe`]). The files, in the order in which to read them:
//!
//! | file | what is in it |
//! | --- | --- |
//! | this file | the types, the list of checks, the command itself |
//! | `system.rs` | reading files below the root |
//! | `parse.rs` | the formats of the kernel's files |
//! | `environment.rs` | machine, container or WSL, and which remedies apply there |
//! | `limits.rs`, `memory.rs`, `cgroup.rs`, `pages.rs`, `numa.rs`, `kernel.rs`, `iommu.rs` | checks, by topic |
//! | `driver.rs` | checks of the accelerator's driver, by the vendor's row of [`pinpool::family`] |
//! | `link.rs` | the PCIe link: its check, and the speed that it should reach |
//! | `probe.rs` | the trial: opening, pinning, copying |
//! | `report.rs` | the text and the JSON object |
//!
//! What always holds:
//!
//! - *Fail* means that a pool of the given capacity cannot be made, or that bytes were wrong. *Warn* means that the
//!   pool may be slow, small or fragile, or that something could not be read.
//! - A file never refutes what a trial proved: if the device opens, a missing file of the driver is no failure.
//! - All checks are always listed, under names that stay, so that scripts can rely on them.
//! - The trial takes a part of the memory that is left, so that the kernel never ends a process because of it.

/// Makes a list of remedies: for each, where it is applied ([`By`]), and a format string.
macro_rules! fixes {
    ($($by:ident: $text:literal $(, $value:expr)*);+ $(;)?) => {
        vec![$((pinpool::family::By::$by, format!($text $(, $value)*))),+]
    };
}

mod cgroup;
mod driver;
mod environment;
mod iommu;
mod kernel;
mod limits;
mod link;
mod memory;
mod numa;
mod pages;
mod parse;
mod probe;
mod report;
mod system;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use pinpool::family::{By, FAMILIES, Family, Remedies, Vendor};
use pinpool::{Device, Error};

use super::args::{BackingArg, DoctorArgs};
use super::escape::text;
use super::{CliError, EXIT_FAILED, exit};
use environment::Environment;
use serde_json::json;
use system::System;

/// How a check ended, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Ok,
    Warn,
    Fail,
}

/// Remedies, each with where it is applied.
type Fixes = Vec<(By, String)>;

/// A vendor's remedies.
fn of_vendor(all: Remedies) -> Fixes {
    all.iter().map(|(by, text)| (*by, (*text).to_owned())).collect()
}

/// What a check found, and the remedies.
#[derive(Debug)]
struct Verdict {
    status: Status,
    found: String,
    fix: Fixes,
}

impl Verdict {
    fn ok(found: impl Into<String>) -> Self {
        Self { status: Status::Ok, found: found.into(), fix: Vec::new() }
    }

    fn warn(found: impl Into<String>, fix: Fixes) -> Self {
        Self { status: Status::Warn, found: found.into(), fix }
    }

    fn fail(found: impl Into<String>, fix: Fixes) -> Self {
        Self { status: Status::Fail, found: found.into(), fix }
    }

    /// The verdict about files that cannot be read.
    fn unseen(files: &str) -> Self {
        let fix = fixes![Here: "mount /proc and /sys, and let this user read {files}"];
        Self::warn(format!("unknown: {files} cannot be read"), fix)
    }
}

/// A verdict as it is printed.
#[derive(Debug)]
struct Check {
    name: &'static str,
    status: Status,
    found: String,
    /// Each line is a remedy of its own.
    fix: Vec<String>,
}

impl Check {
    /// The verdict with the remedies that can be applied in this environment. Texts of the system's files and of the
    /// driver are escaped and cut to a bounded length.
    fn new(environment: &Environment, name: &'static str, verdict: Verdict) -> Self {
        let fix = environment.remedies(&verdict.fix).iter().map(|line| text(line).to_string()).collect();
        Self { name, status: verdict.status, found: text(&verdict.found).to_string(), fix }
    }
}

/// What the checks examine.
struct Case<'a> {
    system: &'a System,
    environment: Environment,
    /// The device's name on the command line.
    spec: &'a str,
    device: Result<Device, Error>,
    /// The capacity of the server's pool, in bytes.
    capacity: u64,
    /// Bytes to pin and copy for a trial, as asked for.
    asked: u64,
    /// The memory that is left, in bytes. `None`: unknown.
    left: Option<u64>,
    /// Where the trial's page-locked memory comes from.
    backing: Option<BackingArg>,
    /// The accelerator's family, if one was named on the command line, was opened, or shows on this machine.
    family: Option<&'static Family>,
}

impl Case<'_> {
    /// Bytes to pin and copy: what was asked for, cut to a part of what is left. `None`: too little is left.
    fn trial(&self) -> Option<u64> {
        let most = self.left.map_or(u64::MAX, |left| (left / (2 * TRIALS_TAKEN)) & !(LEAST_TRIAL - 1));
        Some(self.asked.min(most)).filter(|trial| *trial >= LEAST_TRIAL)
    }

    fn vendor(&self) -> Option<&'static Vendor> {
        self.family?.vendor.as_ref()
    }

    /// Whether the device is open and is an accelerator.
    fn opened(&self) -> bool {
        self.device.as_ref().is_ok_and(|device| accelerator(device.name()).is_some())
    }

    /// PCI addresses: the opened device's, or those of all the vendor's accelerators that the system shows.
    fn addresses(&self) -> Vec<String> {
        match self.device.as_ref().ok().and_then(Device::pci_address) {
            Some(address) => vec![address],
            None => self.vendor().map_or_else(Vec::new, |vendor| accelerators(self.system, vendor)),
        }
    }
}

/// A check.
type CheckFn = fn(&Case) -> Verdict;

/// The checks that only read files, each with the name that it is listed under.
const CHECKS: [(&str, CheckFn); 15] = [
    ("container", environment::container),
    ("wsl", environment::wsl),
    ("memlock", limits::memlock),
    ("address-space", limits::address_space),
    ("memory", memory::memory),
    ("cgroup", cgroup::cgroup),
    ("huge-pages", pages::huge_pages),
    ("hugetlb", pages::hugetlb),
    ("numa", numa::numa),
    ("kernel", kernel::version),
    ("mappings", kernel::mappings),
    ("iommu", iommu::iommu),
    ("driver", driver::module),
    ("device-files", driver::files),
    ("library", driver::library),
];

/// Bytes to pin and copy by default: few, and enough to reach full speed.
const USUAL_TRIAL: u64 = 64 << 20;
/// The timeout of each step of the trial: longer than a step takes on a device that works.
const PATIENCE: Duration = Duration::from_secs(20);
/// The smallest trial: less does not show a speed.
const LEAST_TRIAL: u64 = 1 << 20;
/// All memory that the trial uses, in sizes of it: the pool, a copy of its bytes, and on the host device the device's
/// memory and another copy. It is half of what is left at most.
const TRIALS_TAKEN: u64 = 4;

/// Speeds in GB/s of 10^9 bytes. `None`: not measured.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    pin: Option<f64>,
    touch: Option<f64>,
    upload: Option<f64>,
    download: Option<f64>,
    expected: Option<f64>,
}

/// The result of all checks.
struct Findings {
    device: String,
    capacity: u64,
    checks: Vec<Check>,
    measured: Measured,
}

impl Findings {
    fn worst(&self) -> Status {
        self.checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok)
    }
}

/// Bytes of memory that are left: what the system has available or what this process's control groups still allow,
/// whichever is less. `None`: unknown.
pub fn left() -> Option<u64> {
    left_of(&System::new(Path::new("/")))
}

fn left_of(system: &System) -> Option<u64> {
    pinpool::cgroup::available(system.root()).into_iter().flatten().min()
}

/// Bytes of memory of this process's own, and bytes that it has read from disks. Zeros: unknown.
pub fn taken() -> [u64; 2] {
    let system = System::new(Path::new("/"));
    let io = system.text("/proc/self/io");
    let read = io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok());
    [parse::kib(&system.text("/proc/self/status"), "RssAnon").unwrap_or(0), read.unwrap_or(0)]
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> ExitCode {
    if args.device != "auto" && Family::of(&args.device).is_none() {
        let why = format!("--device: {:?} is no device: {}", args.device, Family::names());
        return exit(args.json.then(|| json!({})), "", Err(CliError::Usage(why)));
    }
    let system = System::new(args.root.as_deref().unwrap_or(Path::new("/")));
    let (spec, capacity) = (args.device.as_str(), args.capacity as u64);
    let asked = args.pin.map_or(capacity.min(USUAL_TRIAL), |bytes| bytes as u64).max(LEAST_TRIAL);
    let device = Device::open(spec);
    let family = accelerator(spec).or_else(|| accelerator(device.as_ref().map_or("", Device::name)));
    let family = family.or_else(|| if spec == "auto" { shown(&system) } else { None });
    let (environment, left, backing) = (Environment::of(&system), left_of(&system), args.backing);
    let case = Case { system: &system, environment, spec, device, capacity, asked, left, backing, family };
    let name = case.device.as_ref().map_or(spec, Device::name).to_owned();
    let checks = CHECKS.map(|(name, check)| Check::new(&case.environment, name, check(&case))).into();
    let mut findings = Findings { device: name, capacity, checks, measured: Measured::default() };
    // Before the trial: whatever ends the process in it, this much is known.
    let begun = if args.json { Ok(()) } else { report::print_head(&findings) };
    findings.measured = probe::probe(&case, &mut findings.checks);
    let Case { device, environment, .. } = case;
    // A shorter timeout: a device that did not answer in the trial will not answer now.
    if let Some(Err(error)) = device.ok().map(|device| device.close(PATIENCE / 4)) {
        let verdict = Verdict::warn(error.to_string(), fixes![Here: "see the checks that failed above"]);
        findings.checks.push(Check::new(&environment, "close", verdict));
    }
    let printed = if args.json { report::print_json(&findings) } else { report::print_rest(&findings) };
    match begun.and(printed) {
        Ok(()) if findings.worst() == Status::Fail => ExitCode::from(EXIT_FAILED),
        written => exit(None, "", written),
    }
}

/// The family of the device `name`, if it is an accelerator.
fn accelerator(name: &str) -> Option<&'static Family> {
    Family::of(name).map(|(family, _)| family).filter(|family| family.vendor.is_some())
}

/// The family of an accelerator that shows on this machine, even if it cannot be opened.
fn shown(system: &System) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| {
        family.vendor.as_ref().is_some_and(|vendor| {
            vendor.signs.iter().any(|path| system.exists(path)) || !accelerators(system, vendor).is_empty()
        })
    })
}

/// The PCI addresses of all accelerators of a vendor.
fn accelerators(system: &System, vendor: &Vendor) -> Vec<String> {
    let (number, classes) = vendor.pci;
    let mut found = system.list("/sys/bus/pci/devices");
    found.retain(|address| {
        let read = |file| system.word(&format!("/sys/bus/pci/devices/{address}/{file}")).unwrap_or_default();
        read("vendor") == number && classes.iter().any(|class| read("class").starts_with(class))
    });
    found
}

//! `pinpool doctor`: what on this machine stands in the way of pinning and copying, and how to put it right.
//!
//! Each check looks at one thing and says what it found, whether that is well, and if not the exact remedy. First come
//! those that only read the system's files, below a root that tests replace ([`system`]); then a device is opened, a
//! little memory is pinned and copied both ways through a real pool, every byte is compared, and the speed is set
//! beside what this machine should give ([`probe`]).
//!
//! - *Fail*: a pool of the given capacity cannot be had, or gives wrong bytes.
//! - *Warn*: the pool can be slow, small or fragile, or the check could not read what it needs.
//!
//! A trial counts for more than a file. Where the device opens, a missing file of its driver is no failure.
//!
//! All checks are always listed, under names that stay, so that scripts can rely on them. A check is a function from
//! the [`Case`] to a [`Verdict`]. The questions about a vendor's driver are data, in that vendor's row of
//! [`pinpool::family`].
//!
//! # Files
//!
//! | file | what is in it |
//! | --- | --- |
//! | this one | the list of checks, and what they work on |
//! | `system`, `parse` | files below the root, and what the kernel writes in them |
//! | `place` | where the process runs (machine, container, WSL), and which remedies apply there |
//! | `limits`, `cgroup`, `memory`, `pages`, `numa`, `kernel`, `iommu`, `driver` | checks that only read, by topic |
//! | `probe`, `link` | the trial, and the speed of the PCIe link |
//! | `report` | the output: text, or JSON |

/// Remedies: where each is applied ([`By`]), and a format string.
macro_rules! fixes {
    ($($by:ident: $text:literal $(, $value:expr)*);+ $(;)?) => {
        vec![$((pinpool::family::By::$by, format!($text $(, $value)*))),+]
    };
}

mod cgroup;
mod driver;
mod iommu;
mod kernel;
mod limits;
mod link;
mod memory;
mod numa;
mod pages;
mod parse;
mod place;
mod probe;
mod report;
mod system;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use pinpool::family::{By, FAMILIES, Family, Remedies, Vendor};
use pinpool::{Device, Error};

use super::args::Doctor;
use super::escape::text;
use super::{EXIT_FAILED, Failure, exit};
use place::Place;
pub use report::size;
use system::System;

/// How a check ended, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Ok,
    Warn,
    Fail,
}

/// Remedies, each with the place where it is applied.
type Fixes = Vec<(By, String)>;

/// A vendor's remedies.
fn of_vendor(all: Remedies) -> Fixes {
    all.iter().map(|(by, text)| (*by, (*text).to_owned())).collect()
}

/// What a check found, and what is to be done about it.
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

    /// The verdict of a check whose files cannot be read.
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
    /// The verdict with those of its remedies that can be applied here. Text of the system's files and of the driver is
    /// escaped, and cut to a bounded length.
    fn new(place: &Place, name: &'static str, verdict: Verdict) -> Self {
        let fix = place.remedies(&verdict.fix).iter().map(|line| text(line).to_string()).collect();
        Self { name, status: verdict.status, found: text(&verdict.found).to_string(), fix }
    }
}

/// What is to be examined.
struct Case<'a> {
    system: &'a System,
    place: Place,
    /// The device's name on the command line.
    spec: &'a str,
    device: Result<Device, Error>,
    /// Bytes that the server's pool is to have.
    capacity: u64,
    /// Bytes to pin and copy for a trial.
    trial: u64,
    /// How long a step may take. A device that works takes less for any of them.
    patience: Duration,
    /// The family of the accelerator that was named, that was opened, or of which there are signs.
    family: Option<&'static Family>,
}

impl Case<'_> {
    fn vendor(&self) -> Option<&'static Vendor> {
        self.family?.vendor.as_ref()
    }

    /// Whether the accelerator works: the device is open, and is one.
    fn opened(&self) -> bool {
        self.device.as_ref().is_ok_and(|device| accelerator(device.name()).is_some())
    }

    /// The accelerators' places on the PCI bus: the opened device's, or those of the vendor's that the system shows.
    fn addresses(&self) -> Vec<String> {
        match self.device.as_ref().ok().and_then(Device::pci_address) {
            Some(address) => vec![address],
            None => self.vendor().map_or_else(Vec::new, |vendor| accelerators(self.system, vendor)),
        }
    }
}

/// A check.
type Look = fn(&Case) -> Verdict;

/// The checks that only read files, under the names that they are listed by.
const CHECKS: [(&str, Look); 16] = [
    ("container", place::container),
    ("wsl", place::wsl),
    ("memlock", limits::memlock),
    ("address-space", limits::address_space),
    ("memory", memory::memory),
    ("cgroup", cgroup::cgroup),
    ("huge-pages", pages::huge_pages),
    ("hugetlb", pages::hugetlb),
    ("fragmentation", pages::fragmentation),
    ("numa", numa::numa),
    ("kernel", kernel::version),
    ("mappings", kernel::mappings),
    ("iommu", iommu::iommu),
    ("driver", driver::module),
    ("device-files", driver::files),
    ("library", driver::library),
];

/// Bytes to pin and copy, unless `--pin` says otherwise: few, and enough to reach full speed.
const TRIAL: u64 = 64 << 20;
/// The fewest bytes of a trial: with fewer a speed means nothing.
const LEAST_TRIAL: u64 = 1 << 20;

/// GB/s of 10^9 bytes; what was not measured is missing.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    pin: Option<f64>,
    touch: Option<f64>,
    upload: Option<f64>,
    download: Option<f64>,
    expected: Option<f64>,
}

/// Everything that the doctor found.
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

/// Bytes that the system has available, and that this process's control groups leave it, where they say so.
pub fn available() -> [Option<u64>; 2] {
    let system = System::new(Path::new("/"));
    [parse::kib(&system.text("/proc/meminfo"), "MemAvailable"), cgroup::left(&system)]
}

/// Runs the command.
pub fn run(args: &Doctor) -> ExitCode {
    if args.device != "auto" && Family::of(&args.device).is_none() {
        let why = format!("--device: {:?} is no device: {}", args.device, Family::names());
        return exit(Err(Failure::Usage(why)));
    }
    let system = System::new(args.root.as_deref().unwrap_or(Path::new("/")));
    let findings = examine(&system, args);
    match report::print(&findings, args.json) {
        Ok(()) if findings.worst() == Status::Fail => ExitCode::from(EXIT_FAILED),
        written => exit(written),
    }
}

fn examine(system: &System, args: &Doctor) -> Findings {
    let (spec, capacity) = (args.device.as_str(), args.capacity as u64);
    let trial = args.pin.map_or(capacity.min(TRIAL), |bytes| bytes as u64).max(LEAST_TRIAL);
    let device = Device::open(spec);
    let family = accelerator(spec).or_else(|| accelerator(device.as_ref().map_or("", Device::name)));
    let family = family.or_else(|| if spec == "auto" { shown(system) } else { None });
    let (place, patience) = (Place::of(system), Duration::from_secs(20));
    let case = Case { system, place, spec, device, capacity, trial, patience, family };
    let mut checks: Vec<Check> =
        CHECKS.map(|(name, check)| Check::new(&case.place, name, check(&case))).into();
    let measured = probe::probe(&case, &mut checks);
    let Case { device, place, .. } = case;
    let name = device.as_ref().map_or(spec, Device::name).to_owned();
    // A device that did not answer before gets less time now.
    if let Some(Err(error)) = device.ok().map(|device| device.close(patience / 4)) {
        let verdict = Verdict::warn(error.to_string(), fixes![Here: "see the checks that failed above"]);
        checks.push(Check::new(&place, "close", verdict));
    }
    Findings { device: name, capacity, checks, measured }
}

/// The family of a device that is an accelerator.
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

/// The places on the PCI bus of all accelerators of a vendor.
fn accelerators(system: &System, vendor: &Vendor) -> Vec<String> {
    let (number, classes) = vendor.pci;
    let mut found = system.list("/sys/bus/pci/devices");
    found.retain(|address| {
        let read = |file| system.word(&format!("/sys/bus/pci/devices/{address}/{file}")).unwrap_or_default();
        read("vendor") == number && classes.iter().any(|class| read("class").starts_with(class))
    });
    found
}

//! `pinpool doctor`: what on this machine stands in the way of pinning and copying, and how to put it right.
//!
//! Each check looks at one thing and says what it found, whether that is well, and if not the exact remedy. First come
//! those that only read the system's files, below a root that tests replace ([`system`]); then a device is opened, a little
//! memory is pinned and copied both ways through a real pool, every byte is compared, and the speed is set beside what
//! this machine should give ([`probe`]).
//!
//! *Fail* means that a pool of the given capacity cannot be had, or gives wrong bytes; *warn* that it can be slow, small
//! or fragile; and that something could not be looked at. What was proved by trying is never refuted by a file: where the
//! device opens, a driver's file that is missing is no failure.
//!
//! All checks are always listed, under names that stay, so that scripts can rely on them. A check is a function from the
//! [`Case`] to a [`Check`]; files are by topic.

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

use pinpool::{Device, Error};

use super::args::Doctor;
use super::escape::text;
use super::{EXIT_FAILED, EXIT_USAGE, say};
use place::{By, Place};
pub use report::size;
use system::System;

/// How a check ended, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    Ok,
    Warn,
    Fail,
}

/// What was looked at, and what is to be done.
#[derive(Clone, Debug)]
pub struct Check {
    name: &'static str,
    status: Status,
    found: String,
    /// Each line is a remedy of its own.
    fix: Vec<String>,
}

impl Check {
    /// All checks are made here: what the system's files and the driver had to say is escaped, and has an end.
    fn new(name: &'static str, status: Status, found: &str, fix: &[String]) -> Self {
        let fix = fix.iter().map(|line| text(line).to_string()).collect();
        Self { name, status, found: text(found).to_string(), fix }
    }

    fn ok(name: &'static str, found: impl AsRef<str>) -> Self {
        Self::new(name, Status::Ok, found.as_ref(), &[])
    }

    fn warn(name: &'static str, found: impl AsRef<str>, fix: Vec<String>) -> Self {
        Self::new(name, Status::Warn, found.as_ref(), &fix)
    }

    fn fail(name: &'static str, found: impl AsRef<str>, fix: Vec<String>) -> Self {
        Self::new(name, Status::Fail, found.as_ref(), &fix)
    }

    /// Something that the system does not show.
    fn unseen(name: &'static str, files: &str) -> Self {
        let fix = format!("mount /proc and /sys, and let this user read {files}");
        Self::warn(name, format!("unknown: {files} cannot be read"), vec![fix])
    }
}

/// Who made the accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Nvidia,
    Huawei,
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
    /// Longer than any step of it takes on a device that works.
    patience: Duration,
    /// The accelerator's maker, where one was asked for, was opened, or shows.
    maker: Option<Maker>,
}

impl Case<'_> {
    /// Whether the accelerator works: the device is open, and is one.
    fn opened(&self) -> bool {
        self.device.as_ref().is_ok_and(|device| maker_of(device.name()).is_some())
    }

    /// How bad it is when something of the accelerator's is missing: it was asked for by name, or `auto` found it, or it
    /// is not needed as it turned out.
    fn missing(&self) -> Status {
        if maker_of(self.spec).is_some() && !self.opened() { Status::Fail } else { Status::Warn }
    }

    /// The accelerators' places on the PCI bus: the opened device's, or those of the maker's that the system shows.
    fn addresses(&self) -> Vec<String> {
        if let Some(address) = self.device.as_ref().ok().and_then(Device::pci_address) {
            return vec![address];
        }
        self.maker.map_or_else(Vec::new, |maker| accelerators(self.system, maker))
    }

    fn remedies(&self, all: &[(By, String)]) -> Vec<String> {
        self.place.remedies(all)
    }
}

/// Bytes to pin and copy, where nothing else is asked for: few, and enough to reach full speed.
const TRIAL: u64 = 64 << 20;
/// Less says nothing.
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

/// All that was found out.
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
    let meminfo = system.read("/proc/meminfo").unwrap_or_default();
    [parse::kib(&meminfo, "MemAvailable"), cgroup::left(&system)]
}

/// Runs the command.
pub fn run(args: &Doctor) -> ExitCode {
    if !named(&args.device) {
        say(&format!(
            "error: --device: {:?} is no device: they are named auto, host, host:N, cuda:N or acl:N",
            args.device
        ));
        return ExitCode::from(EXIT_USAGE);
    }
    let system = System::new(args.root.as_deref().unwrap_or(Path::new("/")));
    let findings = examine(&system, args);
    let written = report::print(&findings, args.json);
    if findings.worst() == Status::Fail || !written { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS }
}

fn examine(system: &System, args: &Doctor) -> Findings {
    let (spec, capacity) = (args.device.as_str(), args.capacity as u64);
    let trial = args.pin.map_or(capacity.min(TRIAL), |bytes| bytes as u64).max(LEAST_TRIAL);
    let device = Device::open(spec);
    let maker = maker_of(spec).or_else(|| maker_of(device.as_ref().map_or("", Device::name)));
    let maker = match maker {
        None if spec == "auto" => shown(system),
        maker => maker,
    };
    let case = Case {
        system,
        place: Place::of(system),
        spec,
        device,
        capacity,
        trial,
        patience: Duration::from_secs(20),
        maker,
    };
    let mut checks = vec![
        place::container(&case),
        place::wsl(&case),
        limits::memlock(&case),
        limits::address_space(&case),
        memory::memory(&case),
        cgroup::cgroup(&case),
        pages::huge_pages(&case),
        pages::hugetlb(&case),
        pages::fragmentation(&case),
        numa::numa(&case),
        kernel::version(&case),
        kernel::mappings(&case),
        iommu::iommu(&case),
        driver::module(&case),
        driver::files(&case),
        driver::library(&case),
    ];
    let measured = probe::probe(&case, &mut checks);
    let Case { device, patience, .. } = case;
    let name = device.as_ref().map_or_else(|_| spec.to_owned(), |device| device.name().to_owned());
    // One that did not answer before is not waited for as long again.
    if let Some(Err(error)) = device.ok().map(|device| device.close(patience / 4)) {
        checks.push(Check::warn("close", error.to_string(), vec!["see the checks that failed above".into()]));
    }
    Findings { device: name, capacity, checks, measured }
}

/// Whether a device can have this name at all.
fn named(spec: &str) -> bool {
    match spec.split_once(':') {
        Some((family, number)) => matches!(family, "host" | "cuda" | "acl") && number.parse::<u32>().is_ok(),
        None => matches!(spec, "auto" | "host" | "cuda" | "acl"),
    }
}

fn maker_of(name: &str) -> Option<Maker> {
    match name.split(':').next() {
        Some("cuda") => Some(Maker::Nvidia),
        Some("acl") => Some(Maker::Huawei),
        _ => None,
    }
}

/// The maker of an accelerator that shows on this machine, even if nobody can open it.
fn shown(system: &System) -> Option<Maker> {
    let any = |paths: &[&str]| paths.iter().any(|path| system.exists(path));
    let nvidia = any(&["/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"]);
    if nvidia || !accelerators(system, Maker::Nvidia).is_empty() {
        return Some(Maker::Nvidia);
    }
    let huawei = any(&["/dev/davinci_manager"]) || !accelerators(system, Maker::Huawei).is_empty();
    huawei.then_some(Maker::Huawei)
}

/// The places on the PCI bus of all accelerators of a maker.
fn accelerators(system: &System, maker: Maker) -> Vec<String> {
    // Vendors by the PCI SIG's numbers. Classes: 03 is a display controller, 12 a processing accelerator.
    let (vendor, classes): (_, &[&str]) = match maker {
        Maker::Nvidia => ("0x10de", &["0x03", "0x12"]),
        Maker::Huawei => ("0x19e5", &["0x12"]),
    };
    let mut found = system.list("/sys/bus/pci/devices");
    found.retain(|address| {
        let is = |file: &str, starts: &[&str]| {
            let value = system.word(&format!("/sys/bus/pci/devices/{address}/{file}")).unwrap_or_default();
            starts.iter().any(|start| value.starts_with(start))
        };
        is("vendor", &[vendor]) && is("class", classes)
    });
    found
}

//! `pinpool doctor`: what on this machine stands in the way of pinning and copying, and how to correct it.
//!
//! A check looks at one thing. It is a function from the [`Case`] to a [`Verdict`]: what it found, whether that is
//! good, and if not the exact remedy. [`run`] makes the case, runs the checks of [`CHECKS`], which only read the
//! system's files below a root that tests replace, and prints what they found. The last checks try
//! ([`probe::probe`]): a device is opened, a little memory is pinned and copied both ways through a real pool, every
//! byte is compared, and the speed is compared with what this machine should reach.
//!
//! `limits.rs`, `memory.rs`, `driver.rs` and `link.rs` have the checks by topic, `environment.rs` which remedies apply
//! where, and `system.rs` and `parse.rs` read the kernel's files. What always holds:
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

mod driver;
mod environment;
mod limits;
mod link;
mod memory;
mod parse;
mod probe;
mod system;

use std::path::Path;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use pinpool::family::{By, FAMILIES, Family, Remedies, Vendor};
use pinpool::{Device, Error};
use serde_json::{Value, json};
use textwrap::{Options, WordSplitter::NoHyphenation};

use super::amount::Amount;
use super::args::{BackingArg, DoctorArgs};
use super::escape::text;
use super::{CliError, EXIT_FAILED, Result, exit, json_line, print};
use environment::Environment;
use system::System;

/// How a check ended, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    Ok,
    Warn,
    Fail,
}

impl Status {
    fn look(self) -> (&'static str, AnsiColor) {
        match self {
            Self::Ok => ("ok", AnsiColor::Green),
            Self::Warn => ("warn", AnsiColor::Yellow),
            Self::Fail => ("fail", AnsiColor::Red),
        }
    }
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
}

/// Files without which a check has no verdict, and that cannot be read.
struct Unseen(String);

/// What the checks examine.
struct Case<'a> {
    system: &'a System,
    environment: Environment,
    /// The device's name on the command line.
    spec: &'a str,
    device: Result<Device, Error>,
    /// The capacity of the server's pool, in bytes.
    capacity: u64,
    /// Bytes to pin and copy for a trial, where they were named.
    pin: Option<u64>,
    /// The memory that is left, in bytes. `None`: unknown.
    left: Option<u64>,
    /// Where the trial's page-locked memory comes from.
    backing: Option<BackingArg>,
    /// The vendor of the accelerator that was named on the command line, was opened, or shows on this machine.
    family: Option<(&'static Family, &'static Vendor)>,
}

impl Case<'_> {
    fn vendor(&self) -> Option<&'static Vendor> {
        self.family.map(|(_, vendor)| vendor)
    }

    /// Whether the device is open and is an accelerator.
    fn opened(&self) -> bool {
        self.device.as_ref().is_ok_and(|device| accelerator(device.name()).is_some())
    }

    /// The PCI address of the opened device, or of the vendor's first accelerator that the system shows.
    fn address(&self) -> Option<String> {
        let opened = self.device.as_ref().ok().and_then(Device::pci_address);
        opened.or_else(|| accelerators(self.system, self.vendor()?).into_iter().next())
    }
}

/// The family and the vendor of the device `name`, if it is an accelerator.
fn accelerator(name: &str) -> Option<(&'static Family, &'static Vendor)> {
    Family::of(name).and_then(|(family, _)| Some((family, family.vendor.as_ref()?)))
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

type CheckFn = fn(&Case) -> Result<Verdict, Unseen>;

/// The checks that only read files, each with the name that it is listed under.
const CHECKS: [(&str, CheckFn); 15] = [
    ("container", environment::container),
    ("wsl", environment::wsl),
    ("memlock", limits::memlock),
    ("address-space", limits::address_space),
    ("memory", memory::memory),
    ("cgroup", memory::cgroup),
    ("huge-pages", memory::huge_pages),
    ("hugetlb", memory::hugetlb),
    ("numa", memory::numa),
    ("kernel", limits::kernel),
    ("mappings", limits::mappings),
    ("iommu", link::iommu),
    ("driver", driver::module),
    ("device-files", driver::files),
    ("library", driver::library),
];

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
    /// driver become one line, and are escaped and cut to a bounded length.
    fn new(environment: &Environment, name: &'static str, verdict: Result<Verdict, Unseen>) -> Self {
        let Verdict { status, found, fix } = verdict.unwrap_or_else(|Unseen(files)| {
            let fix = fixes![Here: "mount /proc and /sys, and let this user read {files}"];
            Verdict::warn(format!("unknown: {files} cannot be read"), fix)
        });
        let fix = environment.remedies(&fix).iter().map(|line| text(line).into_owned()).collect();
        let found = found.split_whitespace().collect::<Vec<_>>().join(" ");
        Self { name, status, found: text(&found).into_owned(), fix }
    }

    fn json(&self) -> Value {
        let fix = (!self.fix.is_empty()).then(|| self.fix.join("\n"));
        json!({ "name": self.name, "status": self.status.look().0, "found": self.found, "fix": fix })
    }

    /// Findings are wrapped; remedies are not, so that they can be copied.
    fn lines(&self) -> String {
        /// Columns of a check's name, and of a line of findings.
        const NAME: usize = "fragmentation".len();
        const COLUMNS: usize = 110;
        let (word, color) = self.status.look();
        let style = Style::new().fg_color(Some(color.into())).bold();
        let indent = " ".repeat(NAME + 8);
        let options = Options::new(COLUMNS).initial_indent(&indent).subsequent_indent(&indent);
        let found = textwrap::fill(&self.found, options.break_words(false).word_splitter(NoHyphenation));
        let mut text = format!("{style}{word:<4}{style:#}  {:<NAME$}  {}\n", self.name, found.trim_start());
        for fix in &self.fix {
            text += &format!("{indent}fix: {fix}\n");
        }
        text
    }
}

/// Speeds of the trial in GB/s of 10^9 bytes, and its bytes on huge pages. `None`: not measured, or not shown.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    pin: Option<f64>,
    touch: Option<f64>,
    upload: Option<f64>,
    download: Option<f64>,
    expected: Option<f64>,
    huge: Option<u64>,
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
    let read = parse::field(&io, "read_bytes").and_then(|bytes| bytes.parse().ok());
    [parse::kib(&system.text("/proc/self/status"), "RssAnon").unwrap_or(0), read.unwrap_or(0)]
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> ExitCode {
    let (spec, json) = (args.device.name.as_str(), args.device.json);
    if spec != "auto" && Family::of(spec).is_none() {
        let why = format!("--device: {spec:?} is no device: {}", Family::names());
        return exit(json.then(|| json!({})), "", Err(CliError::Usage(why)));
    }
    let system = System::new(args.root.as_deref().unwrap_or(Path::new("/")));
    let device = Device::open(spec);
    // An accelerator that shows on this machine, even if it cannot be opened.
    let shows = |vendor: &Vendor| {
        vendor.signs.iter().any(|path| system.exists(path)) || !accelerators(&system, vendor).is_empty()
    };
    let shown = || {
        let mut all = FAMILIES.iter().filter_map(|family| Some((family, family.vendor.as_ref()?)));
        if spec == "auto" { all.find(|(_, vendor)| shows(vendor)) } else { None }
    };
    let opened = || accelerator(device.as_ref().map_or("", Device::name));
    let case = Case {
        system: &system,
        environment: Environment::of(&system),
        spec,
        family: accelerator(spec).or_else(opened).or_else(shown),
        device,
        capacity: args.capacity as u64,
        pin: args.pin.map(|bytes| bytes as u64),
        left: left_of(&system),
        backing: args.device.backing,
    };
    let name = case.device.as_ref().map_or(spec, Device::name).to_owned();
    let mut checks: Vec<Check> =
        CHECKS.map(|(name, check)| Check::new(&case.environment, name, check(&case))).into();
    let lines = |checks: &[Check]| checks.iter().map(Check::lines).collect::<String>();
    let write = |text: &str| print(&mut anstream::stdout(), text);
    // Before the trial: whatever ends the process in it, this much is known.
    let head = || format!("device {name}, a pool of {}\n\n{}", Amount(case.capacity), lines(&checks));
    let begun = if json { Ok(()) } else { write(&head()) };
    let measured = probe::probe(&case, &mut checks);
    if let Ok(device) = case.device {
        // A shorter timeout: a device that did not answer in the trial will not answer now.
        if let Err(error) = device.close(probe::PATIENCE / 4) {
            let verdict = Verdict::warn(error.to_string(), fixes![Here: "see the checks that failed above"]);
            checks.push(Check::new(&case.environment, "close", Ok(verdict)));
        }
    }
    let worst = checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok);
    let printed = if json {
        write(&(json_line(&object(&name, case.capacity, worst, &checks, &measured)) + "\n"))
    } else {
        let count = |status| checks.iter().filter(|check| check.status == status).count();
        let [ok, warn, fail] = [Status::Ok, Status::Warn, Status::Fail].map(count);
        let tried = lines(&checks[CHECKS.len()..]);
        write(&format!("{tried}\n{ok} ok, {warn} to look at, {fail} failed\n"))
    };
    match begun.and(printed) {
        Ok(()) if worst == Status::Fail => ExitCode::from(EXIT_FAILED),
        written => exit(None, "", written),
    }
}

fn object(device: &str, capacity: u64, worst: Status, checks: &[Check], measured: &Measured) -> Value {
    json!({
        "device": device,
        "capacity_bytes": capacity,
        "status": worst.look().0,
        "checks": checks.iter().map(Check::json).collect::<Vec<_>>(),
        "measured": {
            "pin_gb_per_s": measured.pin,
            "touch_gb_per_s": measured.touch,
            "upload_gb_per_s": measured.upload,
            "download_gb_per_s": measured.download,
            "expected_gb_per_s": measured.expected,
        },
    })
}

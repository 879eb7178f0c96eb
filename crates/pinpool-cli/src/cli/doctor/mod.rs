//! `pinpool doctor`: what stands in the way of pinning and copying, and its cure.
//!
//! A check looks at one thing. It is a function from the [`Case`] to a [`Verdict`]: what it found,
//! whether that is good, and if not the exact remedy. [`run`] makes the case, runs the checks of
//! [`CHECKS`], which only read the system's files below a root that tests replace, and prints what
//! they found. The last checks try ([`probe::probe`]): a device is opened, which says what is wrong
//! with a driver, a little memory is pinned and copied both ways through a real pool, every byte is
//! compared, and the speed with what the device's link should reach.
//!
//! `limits.rs`, `memory.rs` and `link.rs` have the checks by topic, `environment.rs` which remedies
//! apply where, and `system.rs` and `parse.rs` read the kernel's files. What always holds:
//!
//! - *Fail* means that a pool of the given capacity cannot be made, or that bytes were wrong.
//!   *Warn* means that the pool may be slow, small or fragile, or that something could not be read.
//! - All checks are always listed, under names that stay, so that scripts can rely on them.
//! - The trial takes a part of the memory left, so that the kernel ends no process over it.

/// Makes a list of remedies, each with its place ([`By`](environment::By)) and format string.
macro_rules! fixes {
    ($($by:ident: $text:literal $(, $value:expr)*);+ $(;)?) => {
        vec![$(($crate::cli::doctor::environment::By::$by, format!($text $(, $value)*))),+]
    };
}

mod environment;
mod limits;
mod link;
mod memory;
pub mod parse;
mod probe;
mod system;

use std::path::Path;

use pinpool::{Backing, Device};
use serde_json::{Value, json};

use super::amount::Amount;
use super::args::DoctorArgs;
use super::escape::text;
use super::{CliError, EXIT_FAILED, Result, exit, json_line, open_device, print};
use environment::{Environment, Fixes};
use system::System;

/// How a check ended, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    Ok,
    Warn,
    Fail,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
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

/// A file without which a check has no verdict, and that cannot be read.
struct Unseen(String);

/// What the checks examine.
struct Case<'a> {
    system: &'a System,
    environment: Environment,
    /// The device's name on the command line.
    spec: &'a str,
    device: Result<Device>,
    /// The capacity of the server's pool, in bytes.
    capacity: u64,
    /// Bytes to pin and copy for a trial, where they were named.
    pin: Option<u64>,
    /// The memory that is left, in bytes. `None`: unknown.
    left: Option<u64>,
    /// Where the trial's page-locked memory comes from.
    backing: Option<Backing>,
}

impl Case<'_> {
    /// The opened device, if it is an accelerator.
    fn accelerator(&self) -> Option<&Device> {
        self.device.as_ref().ok().filter(|device| !device.name().starts_with("host"))
    }

    /// The PCI address of the opened device.
    fn address(&self) -> Option<String> {
        self.accelerator()?.pci_address()
    }
}

type CheckFn = fn(&Case) -> Result<Verdict, Unseen>;

/// The checks that only read files, each with the name that it is listed under.
const CHECKS: [(&str, CheckFn); 5] = [
    ("memlock", limits::memlock),
    ("memory", memory::memory),
    ("cgroup", memory::cgroup),
    ("huge-pages", memory::huge_pages),
    ("numa", memory::numa),
];

/// The verdicts so far, printed as they come unless they are for an object at the end.
struct Report<'a> {
    environment: &'a Environment,
    json: bool,
    checks: Vec<(Status, Value)>,
    printed: Result<()>,
}

impl Report<'_> {
    /// Adds the verdict with the remedies for this environment. Texts of the system's files and of
    /// the driver become one line, escaped and cut to a bounded length.
    fn add(&mut self, name: &str, verdict: Result<Verdict, Unseen>) {
        let Verdict { status, found, fix } = verdict.unwrap_or_else(|Unseen(file)| {
            let fix = fixes![Here: "mount /proc and /sys, and let this user read {file}"];
            Verdict::warn(format!("unknown: {file} cannot be read"), fix)
        });
        let fix: Vec<String> =
            self.environment.remedies(&fix).iter().map(|line| text(line).into_owned()).collect();
        let found = found.split_whitespace().collect::<Vec<_>>().join(" ");
        let (word, found) = (status.word(), text(&found));
        let mut lines = format!("{word:<4}  {name:<10}  {found}\n");
        lines.extend(fix.iter().map(|fix| format!("{:18}fix: {fix}\n", "")));
        self.print(&lines);
        let fix = (!fix.is_empty()).then(|| fix.join("\n"));
        self.checks.push((status, json!({ "name": name, "status": word, "found": found, "fix": fix })));
    }

    /// Prints a text for people. After an error nothing more is printed.
    fn print(&mut self, text: &str) {
        if !self.json && self.printed.is_ok() {
            self.printed = print(text);
        }
    }
}

/// Speeds of the trial in GB/s of 10^9 bytes. `None`: not measured, or not shown.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    pin: Option<f64>,
    upload: Option<f64>,
    download: Option<f64>,
    expected: Option<f64>,
}

/// Bytes of memory that are left: what the system has available or what this process's control
/// groups still allow, whichever is less. `None`: unknown.
pub fn left() -> Option<u64> {
    left_of(&System::new(Path::new("/")))
}

fn left_of(system: &System) -> Option<u64> {
    pinpool::cgroup::available(&system.root).into_iter().flatten().min()
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> u8 {
    let (spec, json) = (args.device.name.as_str(), args.device.json);
    let system = System::new(args.root.as_deref().unwrap_or(Path::new("/")));
    let device = match open_device(spec) {
        Err(error @ CliError::Usage(_)) => return exit(json.then(|| json!({})), "", Err(error)),
        device => device,
    };
    let case = Case {
        system: &system,
        environment: Environment::of(&system),
        spec,
        device,
        capacity: args.capacity as u64,
        pin: args.pin.map(|bytes| bytes as u64),
        left: left_of(&system),
        backing: args.device.backing,
    };
    let name = case.device.as_ref().map_or(spec, Device::name).to_owned();
    let environment = &case.environment;
    let mut report = Report { environment, json, checks: Vec::new(), printed: Ok(()) };
    let place = environment.container.map_or_else(String::new, |name| format!(", in {name}"));
    report.print(&format!("device {name}, a pool of {}{place}\n\n", Amount(case.capacity)));
    for (name, check) in CHECKS {
        report.add(name, check(&case));
    }
    let measured = probe::probe(&case, &mut report);
    if let Ok(device) = case.device {
        // A shorter timeout: a device that did not answer in the trial will not answer now.
        if let Err(error) = device.close(probe::PATIENCE / 4) {
            let fix = fixes![Here: "see the checks that failed above"];
            report.add("close", Ok(Verdict::warn(error.to_string(), fix)));
        }
    }
    let worst = report.checks.iter().map(|(status, _)| *status).max().unwrap_or(Status::Ok);
    let count = |status| report.checks.iter().filter(|check| check.0 == status).count();
    let [ok, warn, fail] = [Status::Ok, Status::Warn, Status::Fail].map(count);
    report.print(&format!("\n{ok} ok, {warn} to look at, {fail} failed\n"));
    let object = json!({
        "device": name,
        "capacity_bytes": case.capacity,
        "status": worst.word(),
        "checks": report.checks.into_iter().map(|(_, check)| check).collect::<Vec<_>>(),
        "measured": {
            "pin_gb_per_s": measured.pin,
            "upload_gb_per_s": measured.upload,
            "download_gb_per_s": measured.download,
            "expected_gb_per_s": measured.expected,
        },
    });
    match report.printed.and_then(|()| if json { print(&(json_line(&object) + "\n")) } else { Ok(()) }) {
        Ok(()) if worst == Status::Fail => EXIT_FAILED,
        written => exit(None, "", written),
    }
}

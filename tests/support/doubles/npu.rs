//! An Ascend device as a test through pinpool has it: the stand-in libascendcl in a process of its own, in each of the
//! ways in which libraries and devices differ, or the machine's own library where `PINPOOL_REQUIRE` names an Ascend
//! device.

use std::path::{Path, PathBuf};

use super::super::process;
use super::ascendcl::{self, PATH};
use super::{Report, StandIn};
use crate::support::skip;

/// A library and a machine.
#[derive(Clone, Copy)]
pub struct Way {
    pub name: &'static str,
    /// The stand-in's feature: which calls it lacks.
    feature: &'static str,
    pub environment: &'static [(&'static str, &'static str)],
}

/// What there is today, on a host.
pub const TODAY: Way = Way { name: "today's library", feature: "", environment: &[] };
/// The same on the device itself.
pub const ON_DEVICE: Way =
    Way { name: "on the device (RC mode)", feature: "", environment: &[("PINPOOL_STANDIN_RC", "1")] };
/// Libraries of the end and of the beginning of 2022.
pub const LATE_2022: Way = Way { name: "the library of late 2022", feature: "acl2022", environment: &[] };
pub const EARLY_2022: Way = Way { name: "the library of early 2022", feature: "acl5", environment: &[] };
/// The same on a chip that has few events.
pub const SMALL_2022: Way = Way {
    name: "the library of early 2022 on a small chip",
    environment: &[("PINPOOL_STANDIN_SOC", "Ascend310P3"), ("PINPOOL_STANDIN_EVENTS", "1023")],
    ..EARLY_2022
};

pub const ON_DEVICE_2022: Way =
    Way { name: "the library of late 2022 on the device", environment: ON_DEVICE.environment, ..LATE_2022 };

pub const WAYS: [Way; 5] = [TODAY, ON_DEVICE, LATE_2022, EARLY_2022, ON_DEVICE_2022];

/// Whether `PINPOOL_REQUIRE` names an Ascend device: then the machine's own library is to be used.
pub fn required() -> bool {
    std::env::var("PINPOOL_REQUIRE").is_ok_and(|names| names.split(',').any(|n| n.trim().starts_with("acl")))
}

/// Whether this process is a child that was started with a library.
pub fn is_set() -> bool {
    std::env::var_os(PATH).is_some_and(|path| !path.is_empty())
}

/// The stand-in of this process. `None`: it uses something else.
pub fn stand_in() -> Option<StandIn> {
    StandIn::load(Path::new(&std::env::var_os(PATH)?))
}

impl Way {
    /// The library, built on first use. `None`: there is no cargo to build it with, or no source.
    pub fn library(self) -> Option<PathBuf> {
        match self.feature {
            "" => ascendcl::named_or_built(),
            feature => ascendcl::older(feature),
        }
    }

    /// Runs this very test again in a process of its own, with more in its environment.
    pub fn again(self, test: &str, environment: &[(&str, &str)]) {
        let Some(library) = self.library() else {
            skip!("there is no cargo to build the stand-in libascendcl with");
            return;
        };
        println!("{test}: {}", self.name);
        let mut command = process::command(test);
        command.env(PATH, library).envs(self.environment.iter().copied()).envs(environment.iter().copied());
        let output = command.output().expect("this executable can be started again");
        process::passed(test, &format!("with {}", self.name), &output);
    }
}

/// Runs the body of a test in a process of its own for each of the ways, and checks afterwards that no rule was broken
/// and nothing is left.
pub fn on_each(test: &str, ways: &[Way], body: impl FnOnce(&StandIn)) {
    if !is_set() {
        return ways.iter().for_each(|way| way.again(test, &[]));
    }
    let Some(stand_in) = stand_in() else {
        skip!("the library that is named is no stand-in");
        return;
    };
    body(&stand_in);
    no_trace(&stand_in);
}

/// Everything of the test is dropped: no rule was broken, and nothing is left.
pub fn no_trace(stand_in: &StandIn) -> Report {
    let report = stand_in.final_report();
    assert!(report.over, "a device is still open: {report:?}");
    assert_eq!((&report.violations, &report.leaks), (&Vec::new(), &Vec::new()));
    assert_eq!(report.calls.iter().find(|c| c.0.starts_with("aclFinalize")), None, "the library was ended");
    report
}

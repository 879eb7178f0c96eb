//! An Ascend device as a test through pinpool has it: a simulated machine of its own in each of the ways in which
//! libraries and devices differ, or the machine's own library where `PINPOOL_REQUIRE` names an Ascend device.

use std::path::Path;

use pinpool_sim::acl::Library;

use super::{Report, StandIn};

/// The variable that pinpool reads.
pub const PATH: &str = "PINPOOL_LIBASCENDCL";
/// A file that the report is written to when a process ends that has loaded the simulation by its path.
pub const REPORT: &str = "PINPOOL_SIM_REPORT";

/// A library and a machine.
#[derive(Clone, Copy)]
pub struct Way {
    pub name: &'static str,
    library: Library,
    /// What makes the machine differ, as commands.
    commands: &'static [&'static str],
}

/// What there is today, on a host.
pub const TODAY: Way = Way { name: "today's library", library: Library::Today, commands: &[] };
/// The same on the device itself.
pub const ON_DEVICE: Way =
    Way { name: "on the device (RC mode)", library: Library::Today, commands: &["rc true"] };
/// The library of the beginning of 2024, on a host and on the device.
pub const OF_2024: Way = Way { name: "the library of 2024", library: Library::Of2024, commands: &[] };
pub const ON_DEVICE_2024: Way =
    Way { name: "the library of 2024 on the device", commands: ON_DEVICE.commands, ..OF_2024 };

pub const WAYS: [Way; 4] = [TODAY, ON_DEVICE, OF_2024, ON_DEVICE_2024];

/// Whether `PINPOOL_REQUIRE` names an Ascend device: then the machine's own library is to be used.
pub fn required() -> bool {
    super::required_device("acl")
}

/// The report of a process that had [`REPORT`] set and has ended. `None`: there is none.
pub fn report_of(path: &Path) -> Option<Report> {
    std::fs::read_to_string(path).ok().map(|text| Report::parse(&text))
}

impl Way {
    /// The commands that make a machine such a one: a value of [`SETUP`](super::SETUP).
    pub fn setup(self) -> String {
        self.commands.join(";")
    }

    /// A machine of this test's own.
    pub fn machine(self) -> StandIn {
        let machine = StandIn::npus(self.library);
        self.commands.iter().for_each(|command| drop(machine.command(&format!("setup {command}"))));
        machine
    }
}

/// Runs the body of a test in each of the ways, and checks afterwards that no rule was broken and nothing is left.
pub fn on_each(ways: &[Way], body: impl Fn(&StandIn)) {
    for way in ways {
        println!("{}", way.name);
        let machine = way.machine();
        body(&machine);
        machine.no_trace();
    }
}

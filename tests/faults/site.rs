//! What the server runs on.

use pinpool::host::{self, Call, Fault, HostNode};

use super::{Failure, Machine};

/// A device that can be told to fail, to hang and to go on.
pub enum Site {
    /// A host device, with threads.
    Host(HostNode),
    /// A simulated GPU, which is moved by hand.
    Hand(Machine),
}

impl Site {
    pub fn has_threads(&self) -> bool {
        matches!(self, Self::Host(_))
    }

    /// Makes a device that does nothing by itself do one operation. `false`: there is none.
    pub fn step(&self) -> bool {
        matches!(self, Self::Hand(machine) if machine.step())
    }

    pub fn hang(&self) {
        match self {
            Self::Host(node) => node.hang(0),
            Self::Hand(machine) => machine.hang(true),
        }
    }

    /// Nothing hangs or is stalled any more.
    pub fn resume(&self) {
        match self {
            Self::Host(node) => node.resume(0),
            Self::Hand(machine) => {
                machine.hang(false);
                machine.resume(0, None);
            }
        }
    }

    /// No call is to fail any more. Whether one still was.
    pub fn calm(&self) -> bool {
        match self {
            Self::Host(node) => node.clear_faults() > 0,
            Self::Hand(machine) => {
                let armed = machine.is_armed();
                machine.calm();
                armed
            }
        }
    }
}

/// Makes a call of a host device fail: which one of them is counted from 0.
pub fn fail(node: &HostNode, call: Call, nth: u64, failure: Failure) {
    let failure = match failure {
        Failure::Argument => host::Failure::Argument,
        Failure::Transient => host::Failure::Transient,
        Failure::DeviceLost => host::Failure::DeviceLost,
        Failure::Capture => host::Failure::Capture,
        Failure::RunsAnyway => host::Failure::RunsAnyway,
        Failure::Stall => host::Failure::Stall,
    };
    node.fail(Fault { device: 0, call, nth, failure });
}

//! The families of devices, one row each: what a device's name begins with, how a device is opened, and what
//! `pinpool doctor` asks about the vendor's driver.
//!
//! [`Device::open`](crate::Device::open) and the doctor read this table and name no vendor themselves. A row is there
//! whether or not the vendor's feature is on: a build without it still knows the name, says what is missing, and
//! examines the driver. `docs/adding-a-device.md` says what a new vendor needs.
//!
//! The `pinpool` command reads the rows; they are no part of the public interface.

use std::path::PathBuf;
use std::sync::Arc;

use super::Driver;
use super::host::HostNode;
use crate::error::{Error, Result};

// Plain data, which the command needs without the vendor's feature too.
#[path = "acl/doctor.rs"]
mod acl_doctor;
#[path = "cuda/doctor.rs"]
mod cuda_doctor;

/// Opens the device of this number.
type Open = fn(u32) -> Result<Arc<dyn Driver>>;

/// One family of devices.
#[derive(Debug)]
pub struct Family {
    /// What the names of its devices begin with: `cuda` for `cuda:0`.
    pub name: &'static str,
    /// `None`: the vendor's feature is off.
    open: Option<Open>,
    /// `None`: there is no driver to examine.
    pub vendor: Option<Vendor>,
}

/// `Some` of a function, or `None` where the feature that it belongs to is off.
macro_rules! with_feature {
    ($feature:literal, $function:path) => {{
        #[cfg(feature = $feature)]
        let function = Some($function as _);
        #[cfg(not(feature = $feature))]
        let function = None;
        function
    }};
}

/// All families, in the order in which `auto` tries them. The last one opens everywhere.
pub static FAMILIES: [Family; 3] = [
    Family {
        name: "cuda",
        open: with_feature!("cuda", super::cuda::driver),
        vendor: Some(cuda_doctor::VENDOR),
    },
    Family {
        name: "acl",
        open: with_feature!("acl", super::acl::driver),
        vendor: Some(Vendor {
            candidates: with_feature!("acl", super::acl::library_candidates),
            ..acl_doctor::VENDOR
        }),
    },
    Family { name: "host", open: Some(|ordinal| HostNode::system().driver(ordinal)), vendor: None },
];

impl Family {
    /// The family of the device with this name, and the device's number. `None`: no device can have that name. (`auto`
    /// is no device's name.)
    pub fn of(name: &str) -> Option<(&'static Self, u32)> {
        let (family, ordinal) = match name.split_once(':') {
            Some((family, ordinal)) => (family, ordinal.parse().ok()?),
            None => (name, 0),
        };
        Some((FAMILIES.iter().find(|row| row.name == family)?, ordinal))
    }

    /// The names that a device can have, in words.
    pub fn names() -> String {
        let names = FAMILIES.iter().rev().map(|row| format!(", {0} or {0}:N", row.name));
        format!("a device is named auto{}", names.collect::<String>())
    }

    fn driver(&self, ordinal: u32) -> Result<Arc<dyn Driver>> {
        let name = self.name;
        let open = self.open.ok_or_else(|| Error::Unavailable {
            device: format!("{name}:{ordinal}"),
            why: format!("this build of pinpool has no support for {name}; use `host` or `auto`"),
        })?;
        open(ordinal)
    }
}

/// The driver behind a name.
pub(crate) fn driver(name: &str) -> Result<Arc<dyn Driver>> {
    match Family::of(name) {
        Some((family, ordinal)) => family.driver(ordinal),
        None if name == "auto" => first(),
        None => Err(Error::UnknownDevice { name: name.into(), known: Family::names() }),
    }
}

/// The first device of those that can be opened here.
fn first() -> Result<Arc<dyn Driver>> {
    let mut why = None;
    for family in FAMILIES.iter().filter(|family| family.open.is_some()) {
        let name = family.name;
        for ordinal in 0.. {
            match family.driver(ordinal) {
                Ok(driver) => {
                    crate::foreign::info!(target: "pinpool::device", "auto: taking {name}:{ordinal}");
                    return Ok(driver);
                }
                // This one is taken, or broken: another may not be.
                Err(error @ Error::Device(_)) => {
                    crate::foreign::info!(target: "pinpool::device", %error, "auto: {name}:{ordinal} cannot be opened");
                }
                Err(error) => {
                    crate::foreign::info!(target: "pinpool::device", %error, "auto: there is no {name} device to take");
                    why = Some(error);
                    break;
                }
            }
        }
    }
    Err(why.unwrap_or_else(|| Error::Unsupported("this build of pinpool has no devices".into())))
}

/// Where a remedy is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// In the shell that starts the server, on a machine without containers.
    Shell,
    /// In the shell or script that starts the server, in a container as well.
    Start,
    /// In the service's unit.
    Systemd,
    /// On the command line of `docker run`, and of `podman run` where the list has no [`By::Podman`].
    Docker,
    /// On the command line of `podman run`.
    Podman,
    /// In the pod's description, or the cluster's.
    Kubernetes,
    /// In the kernel, which containers share with their host.
    Kernel,
    /// On the host of a container.
    Host,
    /// By the pool's configuration, wherever it is.
    Pool,
    /// Here: what to look at, or to try.
    Here,
}

/// Remedies, each with the place where it is applied. The doctor shows those that fit.
pub type Remedies = &'static [(By, &'static str)];

/// A vendor's driver as `pinpool doctor` examines it: data, which the doctor's checks work through.
#[derive(Clone, Copy, Debug)]
pub struct Vendor {
    /// As in "NVIDIA driver".
    pub name: &'static str,
    /// The vendor's number on the PCI bus, and what the classes of its accelerators begin with: 0x03 for a display
    /// controller, 0x12 for a processing accelerator.
    pub pci: (&'static str, &'static [&'static str]),
    /// Files of which each one shows that there is an accelerator.
    pub signs: &'static [&'static str],
    /// The file in place of all others where Windows has the driver.
    pub wsl: Option<&'static str>,

    /// Files that have the version of the driver's part in the kernel, as their first word of digits and dots.
    pub versions: &'static [&'static str],
    /// What it means that there is none of them.
    pub absent: &'static str,
    /// The kernel's name for that part, where another one can hold the card.
    pub module: Option<&'static str>,
    /// How to install the driver.
    pub install: Remedies,

    /// The files in `/dev` that all devices share. Opening one has no effect on a device.
    pub control: &'static [&'static str],
    /// What the names of the others begin with, before a device's number.
    pub numbered: &'static str,
    /// Where files in `/dev` are missing.
    pub files_missing: Remedies,
    /// Where one of them cannot be opened.
    pub files_closed: Remedies,

    /// The library that is loaded at run time.
    pub library: &'static str,
    /// The environment variable that names another one.
    pub variable: &'static str,
    /// Paths where the vendor's toolkit puts the library, besides the loader's folders.
    pub candidates: Option<fn() -> Vec<PathBuf>>,
    /// Where no library is found.
    pub library_missing: Remedies,

    /// Where there is no device of the number that was asked for.
    pub unknown_device: Remedies,
    /// Whether the driver counts what it pins against the memlock limit.
    pub counts_locked: bool,
    /// Why a limit of the address space binds before the pool's capacity is reached.
    pub address_space: Option<&'static str>,
    /// Kernels with which something is different.
    pub kernels: &'static [Kernel],
}

/// Something that is different with some kernels.
#[derive(Debug)]
pub struct Kernel {
    /// Major and minor number of the first, and of the first that is no longer concerned.
    pub versions: std::ops::Range<(u32, u32)>,
    /// Only pools of so many bytes or more are concerned.
    pub capacity: u64,
    /// What is different.
    pub what: &'static str,
    /// The version that helps. `None`: nothing needs to be done.
    pub helps: Option<&'static str>,
}

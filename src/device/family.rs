//! The families of devices, one row each: what a device's name begins with, and how a device is opened.
//!
//! [`Device::open`](crate::Device::open) reads this table and names no vendor itself. A row is there whether or not the
//! vendor's feature is on: a build without it still knows the name, and says what is missing. `docs/adding-a-device.md`
//! says what a new vendor needs.

use std::sync::Arc;

use super::Driver;
use super::host::HostNode;
use crate::error::{Error, Result};

/// Opens the device of this number.
type Open = fn(u32) -> Result<Arc<dyn Driver>>;

/// One family of devices.
struct Family {
    /// What the names of its devices begin with: `cuda` for `cuda:0`.
    name: &'static str,
    /// `None`: the vendor's feature is off.
    open: Option<Open>,
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
static FAMILIES: [Family; 3] = [
    Family { name: "cuda", open: with_feature!("cuda", super::cuda::driver) },
    Family { name: "acl", open: with_feature!("acl", super::acl::driver) },
    Family { name: "host", open: Some(|ordinal| HostNode::system().driver(ordinal)) },
];

impl Family {
    /// The family of the device with this name, and the device's number. `None`: no device can have that name. (`auto`
    /// is no device's name.)
    fn of(name: &str) -> Option<(&'static Self, u32)> {
        let (family, ordinal) = match name.split_once(':') {
            Some((family, ordinal)) => (family, ordinal.parse().ok()?),
            None => (name, 0),
        };
        Some((FAMILIES.iter().find(|row| row.name == family)?, ordinal))
    }

    /// The names that a device can have, in words.
    fn names() -> String {
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

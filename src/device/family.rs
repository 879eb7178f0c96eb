//! The families of devices: what a device's name begins with, and how a device is opened.
//!
//! [`Device::open`](crate::Device::open) asks here and names no vendor itself. A build without a
//! vendor's feature knows the name, and says what is missing. See `docs/adding-a-device.md`.

use std::sync::Arc;

use super::Driver;
use super::host::HostNode;
use crate::error::{Error, Result};

/// What the names of devices begin with (`cuda` for `cuda:0`), in the order in which `auto` tries
/// the families. The last one opens everywhere.
const FAMILIES: [&str; 3] = ["cuda", "acl", "host"];

/// Opens the device of a family with this number.
fn open(family: &str, ordinal: u32) -> Result<Arc<dyn Driver>> {
    match family {
        #[cfg(feature = "cuda")]
        "cuda" => super::cuda::driver(ordinal),
        #[cfg(feature = "acl")]
        "acl" => super::acl::driver(ordinal),
        "host" => HostNode::system().driver(ordinal),
        _ => Err(Error::Unavailable {
            device: format!("{family}:{ordinal}"),
            why: format!("this build of pinpool has no support for {family}; use `host` or `auto`"),
        }),
    }
}

/// The driver behind a name.
pub(crate) fn driver(name: &str) -> Result<Arc<dyn Driver>> {
    let (family, ordinal) = match name.split_once(':') {
        _ if name == "auto" => return first(),
        Some((family, ordinal)) => (family, ordinal.parse().ok()),
        None => (name, Some(0)),
    };
    if let Some(ordinal) = ordinal.filter(|_| FAMILIES.contains(&family)) {
        return open(family, ordinal);
    }
    let names: String = FAMILIES.iter().rev().map(|family| format!(", {family} or {family}:N")).collect();
    Err(Error::Unavailable { device: name.into(), why: format!("a device is named auto{names}") })
}

/// The first device of those that can be opened here.
fn first() -> Result<Arc<dyn Driver>> {
    let mut why = Error::Unsupported("this build of pinpool has no devices".into());
    for family in FAMILIES {
        for ordinal in 0.. {
            match open(family, ordinal) {
                Ok(driver) => {
                    crate::foreign::info!(target: "pinpool::device", "auto: taking {family}:{ordinal}");
                    return Ok(driver);
                }
                Err(error) => {
                    crate::foreign::info!(target: "pinpool::device", %error, "auto: {family}:{ordinal} is not taken");
                    // This one is taken, or broken: another may not be.
                    if !matches!(error, Error::Device(_)) {
                        why = error;
                        break;
                    }
                }
            }
        }
    }
    Err(why)
}

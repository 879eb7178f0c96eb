//! The accelerator's driver: its kernel module, its files in `/dev`, and its library, as described by the vendor's row
//! of [`pinpool::family`].
//!
//! A container shares the kernel module with its host and has the other two only if they are mounted into it, so each
//! has a check of its own. If the device opens, the driver works; a missing part is then mentioned and is no failure.

use std::env;
use std::path::PathBuf;

use pinpool::family::Vendor;

use super::{Case, Fixes, Unseen, Verdict, accelerator, accelerators, of_vendor, parse};

/// What is missing of a driver, and the remedy.
type Missing = (String, Fixes);

/// Runs `look` for the vendor, if there is an accelerator to look for. A missing part is a failure if the device was
/// asked for by name, a warning with `auto`, and only mentioned if the device opened.
fn examine(case: &Case, look: impl Fn(&Vendor) -> Result<String, Missing>) -> Result<Verdict, Unseen> {
    let Some(vendor) = case.vendor() else {
        return Ok(Verdict::ok("not needed: no accelerator was asked for, and none shows"));
    };
    Ok(match look(vendor) {
        Ok(found) => Verdict::ok(found),
        Err((found, _)) if case.opened() => Verdict::ok(format!("{found}; the device opens all the same")),
        Err((found, fix)) if accelerator(case.spec).is_some() => Verdict::fail(found, fix),
        Err((found, fix)) => Verdict::warn(found, fix),
    })
}

/// The file by which WSL shows the driver of Windows, if it is there.
fn of_windows(case: &Case, vendor: &Vendor) -> Option<&'static str> {
    vendor.wsl.filter(|file| case.environment.wsl && case.system.exists(file))
}

/// The driver's kernel module. Whether the library fits it, opening the device tells.
pub fn module(case: &Case) -> Result<Verdict, Unseen> {
    examine(case, |vendor| {
        if let Some(file) = of_windows(case, vendor) {
            return Ok(format!("that of Windows, by {file}"));
        }
        let version = |file: &&str| parse::version(&case.system.text(file)).map(str::to_owned);
        match vendor.versions.iter().find_map(version) {
            Some(version) => Ok(format!("{} driver {version}", vendor.name)),
            None => Err(holder(case, vendor).unwrap_or((vendor.absent.into(), of_vendor(vendor.install)))),
        }
    })
}

/// Another driver that is bound to the card, if there is one, and the remedy.
fn holder(case: &Case, vendor: &Vendor) -> Option<Missing> {
    let module = vendor.module?;
    let (address, holder) = accelerators(case.system, vendor).into_iter().find_map(|address| {
        let holder = case.system.link(&format!("/sys/bus/pci/devices/{address}/driver"))?;
        (holder != module).then_some((address, holder))
    })?;
    Some(if holder == "vfio-pci" {
        let drivers = "/sys/bus/pci/drivers";
        let fix = fixes![Kernel: "echo {address} | sudo tee {drivers}/{holder}/unbind; echo {address} | sudo tee \
                                  {drivers}/{module}/bind"];
        (format!("{address} is set aside for virtual machines ({holder})"), fix)
    } else {
        let fix = fixes![Kernel: "install the {} driver, keep the other away (echo blacklist {holder} | sudo tee \
                                  /etc/modprobe.d/blacklist-{holder}.conf; sudo update-initramfs -u, or sudo dracut -f) \
                                  and restart", vendor.name];
        (format!("{address} is driven by {holder}, not by the {} driver", vendor.name), fix)
    })
}

/// The driver's files in `/dev`.
pub fn files(case: &Case) -> Result<Verdict, Unseen> {
    examine(case, |vendor| {
        if let Some(file) = of_windows(case, vendor) {
            return Ok(file.into());
        }
        let prefix = format!("/dev/{}", vendor.numbered);
        let devices = case.system.numbered("/dev", vendor.numbered);
        let mut files: Vec<String> = vendor.control.iter().map(|name| format!("/dev/{name}")).collect();
        let mut missing: Vec<String> =
            files.iter().filter(|file| !case.system.exists(file)).cloned().collect();
        missing.extend(devices.is_empty().then(|| format!("{prefix}N")));
        if !missing.is_empty() {
            return Err((format!("missing: {}", missing.join(", ")), of_vendor(vendor.files_missing)));
        }
        // A container's device filter makes opening fail, though the file is there.
        for file in &files {
            let opened = std::fs::OpenOptions::new().read(true).write(true).open(case.system.at(file));
            if let Err(error) = opened {
                return Err((format!("{file} cannot be opened: {error}"), of_vendor(vendor.files_closed)));
            }
        }
        files.extend(devices.iter().map(|number| format!("{prefix}{number}")));
        Ok(files.join(", "))
    })
}

/// Folders that the dynamic loader searches, behind those of `LD_LIBRARY_PATH`.
const LOADER_DIRS: [&str; 8] = [
    "/usr/lib/wsl/lib",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
];

/// The driver's library, which the crate loads at run time.
pub fn library(case: &Case) -> Result<Verdict, Unseen> {
    examine(case, |vendor| {
        let (name, variable) = (vendor.library, vendor.variable);
        if let Some(path) = env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from) {
            let found = format!("{}, which {variable} names", path.display());
            // The loader searches for a name without a folder.
            return if path.exists() || path.components().count() == 1 {
                Ok(found)
            } else {
                Err((format!("{found}, is not there"), fixes![Pool: "correct or unset {variable}"]))
            };
        }
        let toolkit = vendor.candidates.map_or_else(Vec::new, |candidates| candidates());
        let toolkit = toolkit.iter().filter_map(|file| file.parent()?.to_str());
        let named = env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let dirs = named.split(':').chain(LOADER_DIRS).chain(toolkit).filter(|dir| !dir.is_empty());
        if let Some(file) = dirs.map(|dir| format!("{dir}/{name}")).find(|file| case.system.exists(file)) {
            return Ok(file);
        }
        // The loader's cache is a binary file that contains the names as text.
        if case.system.text("/etc/ld.so.cache").contains(name) {
            return Ok(format!("{name}, by /etc/ld.so.cache"));
        }
        Err((format!("{name} is in no folder that the loader searches"), of_vendor(vendor.library_missing)))
    })
}

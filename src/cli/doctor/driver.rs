//! The accelerator's driver: the kernel's part of it, its files in `/dev`, and its library.
//!
//! A container has the kernel's part from its host, whether it wants or not, and the other two only if it is given them;
//! so each is looked at by itself. The proof that all of it works is that the device opens. Where it does, what is
//! missing here is only mentioned.

use std::env;
use std::path::PathBuf;

use super::place::{By, Kind};
use super::{Case, Check, Maker, Status, accelerators, parse};

/// NVIDIA's driver 450 is the first for CUDA 11.0 (CUDA Toolkit release notes, table of driver versions).
const OLDEST: u32 = 450;

/// For those who need none of this.
fn not_needed(name: &'static str) -> Check {
    Check::ok(name, "not needed: no accelerator was asked for, and none shows")
}

/// Something is missing: how bad that is depends on what the device is for, and on whether it opened.
fn lacking(case: &Case, name: &'static str, found: String, fix: &[(By, String)]) -> Check {
    if case.opened() {
        return Check::ok(name, format!("{found}; the device opens all the same"));
    }
    let fix = case.remedies(fix);
    match case.missing() {
        Status::Fail => Check::fail(name, found, fix),
        _ => Check::warn(name, found, fix),
    }
}

/// The kernel's part of the driver.
pub fn module(case: &Case) -> Check {
    const NAME: &str = "driver";
    match case.maker {
        None => not_needed(NAME),
        Some(Maker::Nvidia) => nvidia(case, NAME),
        Some(Maker::Huawei) => {
            // The driver's package leaves its version there.
            let info = case.system.read("/usr/local/Ascend/driver/version.info").unwrap_or_default();
            let version = info.lines().find_map(|line| line.strip_prefix("Version="));
            match version {
                Some(version) => Check::ok(NAME, format!("Ascend driver {}", version.trim())),
                None => lacking(
                    case,
                    NAME,
                    "/usr/local/Ascend/driver/version.info cannot be read: no Ascend driver shows".into(),
                    &[
                        (
                            By::Shell,
                            "install the Ascend driver and firmware for this card, then restart".into(),
                        ),
                        (By::Docker, "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro".into()),
                        (
                            By::Kubernetes,
                            "mount the node's /usr/local/Ascend/driver as a hostPath volume".into(),
                        ),
                    ],
                ),
            }
        }
    }
}

fn nvidia(case: &Case, name: &'static str) -> Check {
    if case.place.wsl && case.system.exists("/dev/dxg") {
        return Check::ok(name, "that of Windows, by /dev/dxg");
    }
    let install = |found: String| {
        let fix = if case.place.kind == Kind::Machine {
            (By::Shell, "install NVIDIA's driver (on Ubuntu: sudo ubuntu-drivers install), then restart")
        } else {
            (
                By::Kernel,
                "install NVIDIA's driver (in a cluster by the GPU operator); containers use their host's",
            )
        };
        lacking(case, name, found, &[(fix.0, fix.1.into())])
    };
    let text = case.system.read("/proc/driver/nvidia/version");
    let version = text.as_deref().and_then(|text| parse::version(text.lines().next()?)).map(str::to_owned);
    let Some(version) = version.or_else(|| case.system.word("/sys/module/nvidia/version")) else {
        // Something else may have the card.
        let holders: Vec<(String, String)> = accelerators(case.system, Maker::Nvidia)
            .into_iter()
            .filter_map(|address| {
                let holder = case.system.link(&format!("/sys/bus/pci/devices/{address}/driver"))?;
                (holder != "nvidia").then_some((address, holder))
            })
            .collect();
        return match holders.first() {
            Some((address, holder)) if holder == "vfio-pci" => lacking(
                case,
                name,
                format!("{address} is set aside for virtual machines (vfio-pci)"),
                &[(
                    By::Kernel,
                    format!(
                        "echo {address} | sudo tee /sys/bus/pci/drivers/vfio-pci/unbind; echo {address} | sudo tee \
                         /sys/bus/pci/drivers/nvidia/bind"
                    ),
                )],
            ),
            Some((address, holder)) => lacking(
                case,
                name,
                format!("{address} is driven by {holder}, not by NVIDIA's driver"),
                &[(
                    By::Kernel,
                    format!(
                        "install NVIDIA's driver, keep the other away (echo blacklist {holder} | sudo tee \
                         /etc/modprobe.d/blacklist-{holder}.conf; sudo update-initramfs -u, or sudo dracut -f) and restart"
                    ),
                )],
            ),
            None => install("NVIDIA's kernel module is not loaded".into()),
        };
    };
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok()).unwrap_or(OLDEST);
    if major < OLDEST {
        return install(format!(
            "NVIDIA's driver {version}; CUDA 11.0, which pools need, came with {OLDEST}"
        ));
    }
    // A package that was updated under a running system: the library's file carries the version in its name.
    let library = loader_dirs()
        .iter()
        // CUDA's packages for newer libraries on older drivers put theirs into such a folder.
        .filter(|dir| !dir.contains("compat"))
        .find_map(|dir| case.system.link(&format!("{dir}/libcuda.so.1")))
        .and_then(|file| Some(file.strip_prefix("libcuda.so.")?.to_owned()))
        // Some systems have the interface's number there (1.1), not the driver's.
        .filter(|library| library.split('.').next().is_some_and(|major| major.len() > 2));
    match library.filter(|library| *library != version && !version.starts_with(&format!("{library}."))) {
        Some(library) => lacking(
            case,
            name,
            format!("the kernel's part is {version}, the library {library}"),
            &[
                (By::Shell, "restart, so that both are of the version that was installed last".into()),
                (
                    By::Docker,
                    "take libcuda out of the image; the NVIDIA container toolkit brings the host's".into(),
                ),
                (
                    By::Kubernetes,
                    "take libcuda out of the image; the NVIDIA container toolkit brings the node's".into(),
                ),
            ],
        ),
        None => Check::ok(name, format!("NVIDIA's, {version}")),
    }
}

/// The driver's files in `/dev`.
pub fn files(case: &Case) -> Check {
    const NAME: &str = "device-files";
    let Some(maker) = case.maker else { return not_needed(NAME) };
    let (all, prefix): (&[&str], _) = match maker {
        // /dev/nvidia0 and so on; nvidia-uvm is what CUDA itself needs.
        Maker::Nvidia => (&["nvidiactl", "nvidia-uvm"], "nvidia"),
        Maker::Huawei => (&["davinci_manager", "devmm_svm", "hisi_hdc"], "davinci"),
    };
    if maker == Maker::Nvidia && case.place.wsl && case.system.exists("/dev/dxg") {
        return Check::ok(NAME, "/dev/dxg");
    }
    let devices: Vec<String> =
        case.system.numbered("/dev", prefix).iter().map(|n| format!("/dev/{prefix}{n}")).collect();
    let mut missing: Vec<String> =
        all.iter().map(|name| format!("/dev/{name}")).filter(|path| !case.system.exists(path)).collect();
    let only_uvm = missing == ["/dev/nvidia-uvm"] && !devices.is_empty();
    if devices.is_empty() {
        missing.push(format!("/dev/{prefix}N"));
    }
    if !missing.is_empty() {
        let found = format!("missing: {}", missing.join(", "));
        return match maker {
            Maker::Nvidia => {
                let shell = if only_uvm {
                    "sudo nvidia-modprobe -u -c=0 (loads nvidia-uvm and makes its file)".into()
                } else {
                    "sudo nvidia-modprobe -c=0 && sudo nvidia-modprobe -u -c=0".into()
                };
                lacking(case, NAME, found, &[(By::Shell, shell), gpus(case), nvidia_pod()])
            }
            Maker::Huawei => lacking(
                case,
                NAME,
                found,
                &[
                    (By::Shell, "install the Ascend driver and firmware, then restart (npu-smi info shows the cards)".into()),
                    (
                        By::Docker,
                        "--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device \
                         /dev/hisi_hdc"
                            .into(),
                    ),
                    (By::Kubernetes, "resources.limits with the card's huawei.com/... resource (Ascend device plugin)".into()),
                ],
            ),
        };
    }
    // These two can be opened without any effect on a GPU; what a container's device filter forbids shows here.
    let closed = all.iter().find_map(|name| {
        let path = format!("/dev/{name}");
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(case.system.at(&path));
        opened.err().map(|error| format!("{path} cannot be opened: {error}"))
    });
    match (closed, maker) {
        (Some(found), Maker::Nvidia) => lacking(
            case,
            NAME,
            found,
            &[
                (By::Shell, "sudo chmod 0666 /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*".into()),
                gpus(case),
                nvidia_pod(),
            ],
        ),
        (Some(found), Maker::Huawei) => lacking(
            case,
            NAME,
            found,
            &[
                (
                    By::Shell,
                    "add the server's user to the driver's group: sudo usermod -aG HwHiAiUser USER".into(),
                ),
                (By::Docker, "--device for each of these files, not -v".into()),
                (
                    By::Kubernetes,
                    "resources.limits with the card's huawei.com/... resource (Ascend device plugin)".into(),
                ),
            ],
        ),
        (None, _) => {
            let all = all.iter().map(|name| format!("/dev/{name}")).chain(devices);
            Check::ok(NAME, all.collect::<Vec<_>>().join(", "))
        }
    }
}

/// How a container gets NVIDIA's files.
fn gpus(case: &Case) -> (By, String) {
    let text = if case.place.kind == Kind::Podman {
        "--device nvidia.com/gpu=all (once before: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml)"
    } else {
        "--gpus all (needs the NVIDIA container toolkit), or --device /dev/nvidiactl --device /dev/nvidia-uvm --device \
         /dev/nvidia0 with the driver's libraries mounted"
    };
    (By::Docker, text.into())
}

fn nvidia_pod() -> (By, String) {
    (
        By::Kubernetes,
        "resources.limits: nvidia.com/gpu: 1 in the container's description (NVIDIA device plugin)".into(),
    )
}

/// Where loaders look, the environment's folders first.
fn loader_dirs() -> Vec<String> {
    const USUAL: [&str; 8] = [
        "/usr/lib/wsl/lib",
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/lib64",
    ];
    let named = env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let named = named.split(':').filter(|dir| !dir.is_empty()).map(str::to_owned).collect::<Vec<_>>();
    named.into_iter().chain(USUAL.map(str::to_owned)).collect()
}

/// Where CANN puts its library: the folders that the library itself looks into.
fn cann_dirs() -> Vec<String> {
    #[cfg(feature = "acl")]
    let files = pinpool::acl::library_candidates();
    // Without it no such device can be opened, wherever the library is.
    #[cfg(not(feature = "acl"))]
    let files: Vec<PathBuf> = Vec::new();
    let dirs = files.iter().filter_map(|file| file.parent()).filter(|dir| !dir.as_os_str().is_empty());
    dirs.map(|dir| dir.display().to_string()).collect()
}

/// The library that is loaded at run time.
pub fn library(case: &Case) -> Check {
    const NAME: &str = "library";
    let (name, variable) = match case.maker {
        None => return not_needed(NAME),
        Some(Maker::Nvidia) => ("libcuda.so.1", "PINPOOL_LIBCUDA"),
        Some(Maker::Huawei) => ("libascendcl.so", "PINPOOL_LIBASCENDCL"),
    };
    if let Some(path) = env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from) {
        // A name without a folder is looked for by the loader.
        return if path.exists() || path.components().count() == 1 {
            Check::ok(NAME, format!("{}, which {variable} names", path.display()))
        } else {
            let found = format!("{}, which {variable} names, is not there", path.display());
            lacking(case, NAME, found, &[(By::Pool, format!("correct or unset {variable}"))])
        };
    }
    let mut dirs = loader_dirs();
    if case.maker == Some(Maker::Huawei) {
        dirs.extend(cann_dirs());
    }
    let found = dirs.into_iter().find(|dir| case.system.exists(&format!("{dir}/{name}")));
    if let Some(dir) = found {
        // The toolkit's stub has every symbol, and no driver behind it.
        if dir.trim_end_matches('/').ends_with("/stubs") {
            let found = format!("{dir}/{name} comes first, a stub that is only for linking");
            let fix = (By::Pool, format!("take {dir} out of LD_LIBRARY_PATH"));
            return lacking(case, NAME, found, &[fix]);
        }
        return Check::ok(NAME, format!("{dir}/{name}"));
    }
    // The loader's cache is binary, with the names as they are.
    let cache = case.system.bytes("/etc/ld.so.cache").unwrap_or_default();
    if cache.windows(name.len()).any(|window| window == name.as_bytes()) {
        return Check::ok(NAME, format!("{name}, by /etc/ld.so.cache"));
    }
    let remedies = match case.maker {
        Some(Maker::Huawei) => vec![
            (By::Shell, "source /usr/local/Ascend/ascend-toolkit/set_env.sh before the server starts".into()),
            (
                By::Systemd,
                "Environment=LD_LIBRARY_PATH=... with the folder of CANN that has it (lib64)".into(),
            ),
            (By::Docker, "an image with CANN, and source its set_env.sh in the start script".into()),
            (By::Kubernetes, "an image with CANN, and source its set_env.sh in the start script".into()),
        ],
        _ => vec![
            (By::Shell, "install NVIDIA's driver; where it is installed, sudo ldconfig".into()),
            (
                By::Docker,
                "--gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility, which mount the host's".into(),
            ),
            (
                By::Kubernetes,
                "resources.limits: nvidia.com/gpu: 1, and NVIDIA_DRIVER_CAPABILITIES=compute,utility in env"
                    .into(),
            ),
            (By::Pool, format!("or name it by the environment variable {variable}")),
        ],
    };
    lacking(case, NAME, format!("{name} is in no folder of the loader's"), &remedies)
}

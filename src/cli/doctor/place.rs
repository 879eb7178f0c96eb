//! What kind of place this is: a machine, a container, a guest of Windows. That decides who can put something right,
//! and how: so every remedy is written down for each place, and only those that fit are shown.

use super::system::System;
use super::{Case, Check, parse};

/// CAP_SYS_NICE.
const SYS_NICE: u32 = 23;

/// Where the process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub kind: Kind,
    /// Windows Subsystem for Linux, below whatever else it is.
    pub wsl: bool,
    /// The systemd unit that the process belongs to, if it is a service.
    pub unit: Option<String>,
    /// What gave it away.
    signs: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No container.
    Machine,
    Docker,
    Podman,
    Kubernetes,
    /// A container of another make, or one that does not say.
    Container,
}

/// Where a remedy is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// In the shell that starts the server, on a machine of one's own.
    Shell,
    /// In the shell or script that starts the server, in a container as well.
    Start,
    /// In the service's unit.
    Systemd,
    /// On the command line of `docker run` and `podman run`.
    Docker,
    /// In the pod's description, or the cluster's.
    Kubernetes,
    /// In the kernel, which containers share with their host.
    Kernel,
    /// By the pool's configuration, wherever it is.
    Pool,
}

impl Place {
    pub fn of(system: &System) -> Self {
        let groups = system.read("/proc/self/cgroup").unwrap_or_default();
        let release = system.word("/proc/sys/kernel/osrelease").unwrap_or_default().to_ascii_lowercase();
        let mut signs = Vec::new();
        let mut sign = |found: bool, text: &str| {
            if found {
                signs.push(text.to_owned());
            }
            found
        };
        // Stronger signs first; kubelets run their containers by other tools, which leave theirs as well.
        let kubernetes =
            sign(std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(), "KUBERNETES_SERVICE_HOST")
                | sign(system.exists("/var/run/secrets/kubernetes.io"), "/var/run/secrets/kubernetes.io")
                | sign(groups.contains("kubepods"), "kubepods in /proc/self/cgroup");
        let podman = sign(system.exists("/run/.containerenv"), "/run/.containerenv")
            | sign(groups.contains("libpod"), "libpod in /proc/self/cgroup");
        let docker = sign(system.exists("/.dockerenv"), "/.dockerenv")
            | sign(groups.contains("docker"), "docker in /proc/self/cgroup");
        // systemd's own way of saying it, which nspawn, LXC and others follow.
        let manager = system.word("/run/systemd/container").filter(|name| !name.is_empty() && name != "wsl");
        let other = sign(manager.is_some(), "/run/systemd/container")
            | sign(groups.contains("lxc"), "lxc in /proc/self/cgroup");
        let kind = match () {
            () if kubernetes => Kind::Kubernetes,
            () if podman => Kind::Podman,
            () if docker => Kind::Docker,
            () if other => Kind::Container,
            () => Kind::Machine,
        };
        let unit = groups.lines().filter_map(|line| line.rsplit('/').next()).find_map(|name| {
            // A user's whole session is a service too, which is not the server's.
            (name.ends_with(".service") && !name.starts_with("user@")).then(|| name.to_owned())
        });
        Self { kind, wsl: release.contains("microsoft"), unit, signs }
    }

    fn applies(&self, by: By) -> bool {
        let contained = self.kind != Kind::Machine;
        match by {
            By::Shell => !contained,
            By::Systemd => !contained && !self.wsl,
            By::Docker => matches!(self.kind, Kind::Docker | Kind::Podman | Kind::Container),
            By::Kubernetes => matches!(self.kind, Kind::Kubernetes | Kind::Container),
            By::Start | By::Kernel | By::Pool => true,
        }
    }

    /// The remedies that can be applied here, each with where that is done.
    pub fn remedies(&self, all: &[(By, String)]) -> Vec<String> {
        let fitting = all.iter().filter(|(by, _)| self.applies(*by));
        fitting.map(|(by, text)| format!("{}: {text}", self.label(*by))).collect()
    }

    fn label(&self, by: By) -> String {
        match by {
            By::Shell | By::Start => "shell".into(),
            By::Systemd => match &self.unit {
                Some(unit) => format!("systemd, in {unit}"),
                None => "systemd, in the server's unit".into(),
            },
            By::Docker if self.kind == Kind::Podman => "podman run".into(),
            By::Docker => "docker run".into(),
            By::Kubernetes => "kubernetes".into(),
            By::Kernel if self.wsl => "in WSL".into(),
            By::Kernel if self.kind == Kind::Machine => "system".into(),
            By::Kernel => "on the container's host".into(),
            By::Pool => "pool".into(),
        }
    }

    /// A setting of the kernel's, now and for every start.
    pub fn sysctl(name: &str, value: impl std::fmt::Display) -> String {
        format!(
            "sudo sysctl -w {name}={value}; to keep it: {name} = {value} in /etc/sysctl.d/90-pinpool.conf"
        )
    }

    /// A word on the kernel's command line.
    pub fn boot(words: &str) -> String {
        format!(
            "{words} on the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub or grub2-mkconfig, and reboot)"
        )
    }
}

/// Containers by themselves cost nothing. What their filter of system calls forbids can.
pub fn container(case: &Case) -> Check {
    const NAME: &str = "container";
    let place = &case.place;
    let kind = match place.kind {
        Kind::Machine => return Check::ok(NAME, "none"),
        Kind::Docker => "docker",
        Kind::Podman => "podman",
        Kind::Kubernetes => "kubernetes",
        Kind::Container => "a container",
    };
    let found = format!("{kind} (by {})", place.signs.join(", "));
    let status = case.system.read("/proc/self/status").unwrap_or_default();
    let filtered = parse::field(&status, "Seccomp") == Some("2");
    let nodes = case.system.numbered("/sys/devices/system/node", "node").len();
    // Without one node among several to choose, mbind is not missed.
    if filtered && nodes > 1 && parse::capability(&status, SYS_NICE) == Some(false) {
        let found = format!(
            "{found}; system calls are filtered and CAP_SYS_NICE is missing: the usual filter forbids mbind then, and \
             pools cannot take their memory from next to the device"
        );
        return Check::warn(
            NAME,
            found,
            place.remedies(&[
                (By::Docker, "--cap-add SYS_NICE".into()),
                (
                    By::Kubernetes,
                    "securityContext.capabilities.add: [\"SYS_NICE\"] in the container's description".into(),
                ),
            ]),
        );
    }
    Check::ok(NAME, found)
}

/// NVIDIA's "CUDA on WSL User Guide" lists it under its limitations: pinned memory is scarce there. How scarce nobody
/// says, so the doctor's own pinning is what counts.
pub fn wsl(case: &Case) -> Check {
    const NAME: &str = "wsl";
    if !case.place.wsl {
        return Check::ok(NAME, "no");
    }
    Check::warn(
        NAME,
        "Windows Subsystem for Linux: Windows bounds how much memory can be pinned for a GPU, often far below the memory \
         that Linux shows",
        case.place.remedies(&[
            (By::Pool, "keep the capacity small, and allow unpinned memory if it must start anyway".into()),
            (
                By::Kernel,
                "raise memory= under [wsl2] in %UserProfile%\\.wslconfig on Windows, then run wsl --shutdown"
                    .into(),
            ),
        ]),
    )
}

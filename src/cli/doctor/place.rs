//! Where the process runs: on a machine, in a container, or in Windows' subsystem for Linux. A remedy depends on it. So
//! each remedy is written for each place, and the doctor shows those that fit.

use pinpool::family::By;

use super::system::System;
use super::{Case, Fixes, Verdict, parse};

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
    /// The files and variables that show the kind, strongest first.
    signs: Vec<&'static str>,
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

impl Place {
    pub fn of(system: &System) -> Self {
        let groups = system.read("/proc/self/cgroup").unwrap_or_default();
        let release = system.word("/proc/sys/kernel/osrelease").unwrap_or_default().to_ascii_lowercase();
        let manager = system.word("/run/systemd/container").filter(|name| !name.is_empty() && name != "wsl");
        let named = |name: &str| groups.contains(name);
        // Stronger signs first. Kubernetes runs its containers by other tools, which leave their signs as well.
        let signs = [
            (
                Kind::Kubernetes,
                std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(),
                "KUBERNETES_SERVICE_HOST",
            ),
            (
                Kind::Kubernetes,
                system.exists("/var/run/secrets/kubernetes.io"),
                "/var/run/secrets/kubernetes.io",
            ),
            (Kind::Kubernetes, named("kubepods"), "kubepods in /proc/self/cgroup"),
            (Kind::Podman, system.exists("/run/.containerenv"), "/run/.containerenv"),
            (Kind::Podman, named("libpod"), "libpod in /proc/self/cgroup"),
            (Kind::Docker, system.exists("/.dockerenv"), "/.dockerenv"),
            (Kind::Docker, named("docker"), "docker in /proc/self/cgroup"),
            // The file by which systemd's interface for containers names the manager: nspawn, LXC and others write it.
            (Kind::Container, manager.is_some(), "/run/systemd/container"),
            (Kind::Container, named("lxc"), "lxc in /proc/self/cgroup"),
        ];
        let signs: Vec<_> = signs.into_iter().filter(|(_, found, _)| *found).collect();
        let kind = signs.first().map_or(Kind::Machine, |(kind, ..)| *kind);
        let signs = signs.into_iter().map(|(_, _, sign)| sign).collect();
        let unit = groups.lines().filter_map(|line| line.rsplit('/').next()).find_map(|name| {
            // `user@N.service` is a user's whole session, and not the server's unit.
            (name.ends_with(".service") && !name.starts_with("user@")).then(|| name.to_owned())
        });
        Self { kind, wsl: release.contains("microsoft"), unit, signs }
    }

    /// Whether a remedy can be applied here, of a list that may have one for podman.
    fn applies(&self, by: By, podman: bool) -> bool {
        use Kind::{Container, Docker, Kubernetes, Machine, Podman};
        match by {
            By::Shell => self.kind == Machine,
            By::Systemd => self.kind == Machine && !self.wsl,
            By::Docker => matches!(self.kind, Docker | Container) || self.kind == Podman && !podman,
            By::Podman => self.kind == Podman,
            By::Kubernetes => matches!(self.kind, Kubernetes | Container),
            By::Host => self.kind != Machine,
            By::Start | By::Kernel | By::Pool | By::Here => true,
        }
    }

    /// The remedies that can be applied here, each with where that is done.
    pub fn remedies(&self, all: &[(By, String)]) -> Vec<String> {
        let podman = all.iter().any(|(by, _)| *by == By::Podman);
        let fitting = all.iter().filter(|(by, _)| self.applies(*by, podman));
        fitting.map(|(by, text)| format!("{}{text}", self.label(*by))).collect()
    }

    fn label(&self, by: By) -> String {
        let place = match by {
            By::Here => return String::new(),
            By::Shell | By::Start => "shell",
            By::Systemd => {
                return format!("systemd, in {}: ", self.unit.as_deref().unwrap_or("the server's unit"));
            }
            By::Docker | By::Podman if self.kind == Kind::Podman => "podman run",
            By::Docker | By::Podman => "docker run",
            By::Kubernetes => "kubernetes",
            By::Kernel | By::Host if self.wsl => "in WSL",
            By::Kernel if self.kind == Kind::Machine => "system",
            By::Kernel | By::Host => "on the container's host",
            By::Pool => "pool",
        };
        format!("{place}: ")
    }

    /// A setting of the kernel's, now and for every start.
    pub fn sysctl(name: &str, value: u64) -> Fixes {
        fixes![Kernel: "sudo sysctl -w {name}={value}; to keep it: {name} = {value} in /etc/sysctl.d/90-pinpool.conf"]
    }

    /// A word on the kernel's command line.
    pub fn boot(words: &str) -> Fixes {
        fixes![
            Kernel: "{words} on the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub or \
                     grub2-mkconfig, and reboot)"
        ]
    }
}

/// Containers by themselves cost nothing. What their filter of system calls forbids can.
pub fn container(case: &Case) -> Verdict {
    let place = &case.place;
    let kind = match place.kind {
        Kind::Machine => return Verdict::ok("none"),
        Kind::Docker => "docker",
        Kind::Podman => "podman",
        Kind::Kubernetes => "kubernetes",
        Kind::Container => "a container",
    };
    let found = format!("{kind} (by {})", place.signs.join(", "));
    let status = case.system.text("/proc/self/status");
    let filtered = parse::field(&status, "Seccomp") == Some("2");
    let nodes = case.system.numbered("/sys/devices/system/node", "node").len();
    // Without one node among several to choose, mbind is not missed.
    if filtered && nodes > 1 && parse::capability(&status, SYS_NICE) == Some(false) {
        let why = "system calls are filtered and CAP_SYS_NICE is missing: the usual filter forbids mbind then, and pools \
                   cannot take their memory from next to the device";
        let fix = fixes![
            Docker: "--cap-add SYS_NICE";
            Kubernetes: "securityContext.capabilities.add: [\"SYS_NICE\"] in the container's description";
        ];
        return Verdict::warn(format!("{found}; {why}"), fix);
    }
    Verdict::ok(found)
}

/// NVIDIA's "CUDA on WSL User Guide" lists it under its limitations: pinned memory is scarce there. The guide does not
/// say how scarce, so the doctor's own pinning is what counts.
pub fn wsl(case: &Case) -> Verdict {
    if !case.place.wsl {
        return Verdict::ok("no");
    }
    Verdict::warn(
        "Windows Subsystem for Linux: Windows bounds how much memory can be pinned for a GPU, often far below the memory \
         that Linux shows",
        fixes![
            Pool: "keep the capacity small, and allow unpinned memory if it must start anyway";
            Kernel: "raise memory= under [wsl2] in %UserProfile%\\.wslconfig on Windows, then run wsl --shutdown";
        ],
    )
}

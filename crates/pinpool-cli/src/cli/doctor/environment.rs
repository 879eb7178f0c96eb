//! The environment of this process: a machine, a container, or Windows Subsystem for Linux. A remedy depends on it:
//! checks list their remedies for all environments, and [`Environment::remedies`] selects those that apply here.

use pinpool::family::By;

use super::system::System;
use super::{Case, Fixes, Verdict, parse};

/// CAP_SYS_NICE.
const SYS_NICE: u32 = 23;

/// Where the process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    pub kind: EnvironmentKind,
    /// Whether the kernel is that of Windows Subsystem for Linux; a container may run on it.
    pub wsl: bool,
    /// The systemd unit that the process belongs to, if it is a service.
    pub unit: Option<String>,
    /// The signs by which the environment was recognised.
    signs: Vec<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnvironmentKind {
    /// No container.
    Machine,
    Docker,
    Podman,
    Kubernetes,
    /// A container of another or an unknown kind.
    Container,
}
use EnvironmentKind::{Container, Docker, Kubernetes, Machine, Podman};

impl Environment {
    pub fn of(system: &System) -> Self {
        let groups = system.read("/proc/self/cgroup").unwrap_or_default();
        let release = system.word("/proc/sys/kernel/osrelease").unwrap_or_default().to_ascii_lowercase();
        let manager = system.word("/run/systemd/container").filter(|name| !name.is_empty() && name != "wsl");
        let named = |name: &str| groups.contains(name);
        let pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let secrets = "/var/run/secrets/kubernetes.io";
        // Stronger signs first: a kubelet starts its containers by other tools, which leave their signs as well.
        let signs = [
            (Kubernetes, pod, "KUBERNETES_SERVICE_HOST"),
            (Kubernetes, system.exists(secrets), secrets),
            (Kubernetes, named("kubepods"), "kubepods in /proc/self/cgroup"),
            (Podman, system.exists("/run/.containerenv"), "/run/.containerenv"),
            (Podman, named("libpod"), "libpod in /proc/self/cgroup"),
            (Docker, system.exists("/.dockerenv"), "/.dockerenv"),
            (Docker, named("docker"), "docker in /proc/self/cgroup"),
            // systemd's convention, which nspawn, LXC and others follow.
            (Container, manager.is_some(), "/run/systemd/container"),
            (Container, named("lxc"), "lxc in /proc/self/cgroup"),
        ];
        let signs: Vec<_> = signs.into_iter().filter(|(_, found, _)| *found).collect();
        let kind = signs.first().map_or(Machine, |(kind, ..)| *kind);
        let signs = signs.into_iter().map(|(_, _, sign)| sign).collect();
        let unit = groups.lines().filter_map(|line| line.rsplit('/').next()).find_map(|name| {
            // A login session is a service as well, but not the server's.
            (name.ends_with(".service") && !name.starts_with("user@")).then(|| name.to_owned())
        });
        Self { kind, wsl: release.contains("microsoft"), unit, signs }
    }

    /// Whether a remedy can be applied here. `podman`: the list has a remedy for podman, so docker's is not shown
    /// there.
    fn applies(&self, by: By, podman: bool) -> bool {
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

    /// The remedies that can be applied here, each behind the name of where it is applied.
    pub fn remedies(&self, all: &[(By, String)]) -> Vec<String> {
        let podman = all.iter().any(|(by, _)| *by == By::Podman);
        let fitting = all.iter().filter(|(by, _)| self.applies(*by, podman));
        fitting.map(|(by, text)| format!("{}{text}", self.label(*by))).collect()
    }

    fn label(&self, by: By) -> String {
        let place = match by {
            By::Here => return String::new(),
            By::Shell | By::Start => "shell",
            By::Systemd => &format!("systemd, in {}", self.unit.as_deref().unwrap_or("the server's unit")),
            By::Docker | By::Podman if self.kind == Podman => "podman run",
            By::Docker | By::Podman => "docker run",
            By::Kubernetes => "kubernetes",
            By::Kernel | By::Host if self.wsl => "in WSL",
            By::Kernel if self.kind == Machine => "system",
            By::Kernel | By::Host => "on the container's host",
            By::Pool => "pool",
        };
        format!("{place}: ")
    }

    /// The remedy that changes a kernel setting, now and for every start.
    pub fn sysctl(name: &str, value: u64) -> Fixes {
        fixes![Kernel: "sudo sysctl -w {name}={value}; to keep it: {name} = {value} in /etc/sysctl.d/90-pinpool.conf"]
    }

    /// The remedy that adds words to the kernel's command line.
    pub fn boot(words: &str) -> Fixes {
        fixes![
            Kernel: "{words} on the kernel command line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub or \
                     grub2-mkconfig, and reboot)"
        ]
    }
}

/// A container costs nothing by itself. What its system call filter forbids may.
pub fn container(case: &Case) -> Verdict {
    let place = &case.environment;
    let kind = match place.kind {
        Machine => return Verdict::ok("none"),
        Docker => "docker",
        Podman => "podman",
        Kubernetes => "kubernetes",
        Container => "a container",
    };
    let found = format!("{kind} (by {})", place.signs.join(", "));
    let status = case.system.text("/proc/self/status");
    let filtered = parse::field(&status, "Seccomp") == Some("2");
    let nodes = case.system.numbered("/sys/devices/system/node", "node").len();
    // With a single node there is nothing to choose by mbind.
    if filtered && nodes > 1 && parse::capability(&status, SYS_NICE) == Some(false) {
        let why = "system calls are filtered and CAP_SYS_NICE is missing: the usual filter forbids mbind then, and \
                   pools cannot take their memory from next to the device";
        let fix = fixes![
            Docker: "--cap-add SYS_NICE";
            Kubernetes: "securityContext.capabilities.add: [\"SYS_NICE\"] in the container's description";
        ];
        return Verdict::warn(format!("{found}; {why}"), fix);
    }
    Verdict::ok(found)
}

/// Windows Subsystem for Linux, where pinned memory is scarce (NVIDIA's "CUDA on WSL User Guide", under its
/// limitations). The guide has no figure, so the trial decides.
pub fn wsl(case: &Case) -> Verdict {
    if !case.environment.wsl {
        return Verdict::ok("no");
    }
    Verdict::warn(
        "Windows Subsystem for Linux: Windows bounds how much memory can be pinned for a GPU, often far below the \
         memory that Linux shows",
        fixes![
            Pool: "keep the capacity small, and allow unpinned memory if it must start anyway";
            Kernel: "raise memory= under [wsl2] in %UserProfile%\\.wslconfig on Windows, then run wsl --shutdown";
        ],
    )
}

//! The environment of this process: a machine, a container, or Windows Subsystem for Linux. A remedy depends on it:
//! checks list their remedies for all environments, and [`Environment::remedies`] selects those that apply here.

use pinpool::family::By;

use super::system::System;
use super::{Case, Fixes, Unseen, Verdict, parse};

/// CAP_SYS_NICE.
const SYS_NICE: u32 = 23;

/// Where the process runs.
pub struct Environment {
    kind: EnvironmentKind,
    /// Whether the kernel is that of Windows Subsystem for Linux; a container may run on it.
    pub wsl: bool,
    /// The systemd unit that the process belongs to, if it is a service.
    unit: Option<String>,
    /// The signs by which the environment was recognised.
    signs: Vec<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum EnvironmentKind {
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
        let groups = system.text("/proc/self/cgroup");
        let release = system.text("/proc/sys/kernel/osrelease").to_ascii_lowercase();
        let manager = system.word("/run/systemd/container").filter(|name| !name.is_empty() && name != "wsl");
        let named = |name: &str| groups.contains(name);
        let pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let secrets = "/var/run/secrets/kubernetes.io";
        // Stronger signs first: a kubelet starts its containers by other tools, which leave their signs as well.
        let mut signs = vec![
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
        signs.retain(|(_, found, _)| *found);
        let unit = groups.lines().filter_map(|line| line.rsplit('/').next()).find(|name| {
            // A login session is a service as well, but not the server's.
            name.ends_with(".service") && !name.starts_with("user@")
        });
        Self {
            kind: signs.first().map_or(Machine, |(kind, ..)| *kind),
            wsl: release.contains("microsoft"),
            unit: unit.map(str::to_owned),
            signs: signs.into_iter().map(|(.., sign)| sign).collect(),
        }
    }

    /// The remedies that can be applied here, each behind the name of where it is applied.
    pub fn remedies(&self, all: &[(By, String)]) -> Vec<String> {
        // Docker's remedy is podman's too, unless there is one of podman's own.
        let podman = all.iter().any(|(by, _)| *by == By::Podman);
        let place = |by: By| match self.place(by) {
            Some(_) if by == By::Docker && self.kind == Podman && podman => None,
            place => place,
        };
        all.iter().filter_map(|(by, text)| Some(place(*by)? + text)).collect()
    }

    /// Where a remedy is applied. `None`: not here.
    fn place(&self, by: By) -> Option<String> {
        let kind = self.kind;
        let host = if kind == Machine { "system" } else { "on the container's host" };
        let host = if self.wsl { "in WSL" } else { host };
        let (applies, place) = match by {
            By::Here => return Some(String::new()),
            By::Shell => (kind == Machine, "shell"),
            By::Start => (true, "shell"),
            By::Systemd => {
                let unit = self.unit.as_deref().unwrap_or("the server's unit");
                return (kind == Machine && !self.wsl).then(|| format!("systemd, in {unit}: "));
            }
            By::Docker if kind == Podman => (true, "podman run"),
            By::Docker => (matches!(kind, Docker | Container), "docker run"),
            By::Podman => (kind == Podman, "podman run"),
            By::Kubernetes => (matches!(kind, Kubernetes | Container), "kubernetes"),
            By::Kernel => (true, host),
            By::Host => (kind != Machine, host),
            By::Pool => (true, "pool"),
        };
        applies.then(|| format!("{place}: "))
    }
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

/// A container costs nothing by itself. What its system call filter forbids may.
pub fn container(case: &Case) -> Result<Verdict, Unseen> {
    let place = &case.environment;
    let kind = match place.kind {
        Machine => return Ok(Verdict::ok("none")),
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
    if !filtered || nodes < 2 || parse::capability(&status, SYS_NICE) != Some(false) {
        return Ok(Verdict::ok(found));
    }
    let why = "system calls are filtered and CAP_SYS_NICE is missing: the usual filter forbids mbind then, and pools \
               cannot take their memory from next to the device";
    let fix = fixes![
        Docker: "--cap-add SYS_NICE";
        Kubernetes: "securityContext.capabilities.add: [\"SYS_NICE\"] in the container's description";
    ];
    Ok(Verdict::warn(format!("{found}; {why}"), fix))
}

/// Windows Subsystem for Linux, where pinned memory is scarce (NVIDIA's "CUDA on WSL User Guide", under its
/// limitations). The guide has no figure, so the trial decides.
pub fn wsl(case: &Case) -> Result<Verdict, Unseen> {
    if !case.environment.wsl {
        return Ok(Verdict::ok("no"));
    }
    let found = "Windows Subsystem for Linux: Windows bounds how much memory can be pinned for a GPU, often far below \
                 the memory that Linux shows";
    let fix = fixes![
        Pool: "keep the capacity small, and allow unpinned memory if it must start anyway";
        Kernel: "raise memory= under [wsl2] in %UserProfile%\\.wslconfig on Windows, then run wsl --shutdown";
    ];
    Ok(Verdict::warn(found, fix))
}

//! The environment of this process: a machine or a container. Checks list their remedies for all
//! environments, and [`Environment::remedies`] selects those that apply here.

use super::system::System;

/// Where a remedy is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// In the shell that starts the server, on a machine without containers.
    Shell,
    /// In the shell or script that starts the server, in a container as well.
    Start,
    /// In the service's unit.
    Systemd,
    /// On the command line of `docker run` or `podman run`.
    Docker,
    /// In the pod's description, or the cluster's.
    Kubernetes,
    /// In the kernel, which containers share with their host.
    Kernel,
    /// By the pool's configuration, wherever it is.
    Pool,
    /// Here: what to look at, or to try.
    Here,
}

/// Remedies, each with where it is applied.
pub type Fixes = Vec<(By, String)>;

/// Where the process runs.
pub struct Environment {
    /// `docker`, `podman`, `kubernetes`, or `container` for another kind. `None`: no container.
    pub container: Option<&'static str>,
}

impl Environment {
    pub fn of(system: &System) -> Self {
        let groups = system.text("/proc/self/cgroup");
        let manager = system.word("/run/systemd/container").filter(|name| !name.is_empty() && name != "wsl");
        let named = |name: &str| groups.contains(name);
        let pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
            || system.exists("/var/run/secrets/kubernetes.io")
            || named("kubepods");
        // Stronger signs first: a kubelet starts containers by tools with signs of their own.
        let signs = [
            ("kubernetes", pod),
            ("podman", system.exists("/run/.containerenv") || named("libpod")),
            ("docker", system.exists("/.dockerenv") || named("docker")),
            // systemd's convention, which nspawn, LXC and others follow.
            ("container", manager.is_some() || named("lxc")),
        ];
        Self { container: signs.into_iter().find(|(_, found)| *found).map(|(name, _)| name) }
    }

    /// The remedies that can be applied here, each behind the name of where it is applied.
    pub fn remedies(&self, all: &[(By, String)]) -> Vec<String> {
        all.iter().filter_map(|(by, text)| Some(self.place(*by)?.to_owned() + text)).collect()
    }

    /// Where a remedy is applied. `None`: not here.
    fn place(&self, by: By) -> Option<&'static str> {
        Some(match (by, self.container) {
            (By::Here, _) => "",
            (By::Start, _) | (By::Shell, None) => "shell: ",
            (By::Systemd, None) => "systemd, in the server's unit: ",
            (By::Docker, Some("podman")) => "podman run: ",
            (By::Docker, Some("docker" | "container")) => "docker run: ",
            (By::Kubernetes, Some("kubernetes" | "container")) => "kubernetes: ",
            (By::Kernel, None) => "system: ",
            (By::Kernel, Some(_)) => "on the container's host: ",
            (By::Pool, _) => "pool: ",
            _ => return None,
        })
    }
}

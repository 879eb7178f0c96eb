//! Folders that look like machines to the doctor.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

/// A machine with nothing wrong, until a test breaks it: 64 GiB on one node, no container, no accelerator, no limits.
pub struct Machine(tempfile::TempDir);

/// Lines of `/proc/self/status`, with these capabilities.
pub fn status(capabilities: u64) -> String {
    format!(
        "Name:\tpinpool\nVmSize:\t   20000 kB\nVmLck:\t       0 kB\nVmData:\t    9000 kB\nCapEff:\t{capabilities:016x}\n\
         Seccomp:\t0\nTHP_enabled:\t1\nCpus_allowed_list:\t0-15\nMems_allowed_list:\t0-1\n"
    )
}

/// Bytes as `/proc/meminfo` has them.
pub fn meminfo(available: u64) -> String {
    format!(
        "MemTotal:       67108864 kB\nMemFree:        {0:>8} kB\nMemAvailable:   {0:>8} kB\nMlocked:               0 kB\n\
         CommitLimit:    33554432 kB\nCommitted_AS:    1000000 kB\nHugePages_Total:       0\nHugePages_Free:        0\n\
         Hugepagesize:       2048 kB\n",
        available >> 10
    )
}

pub const GIB: u64 = 1 << 30;
pub const THP: &str = "/sys/kernel/mm/transparent_hugepage";
/// Where the stand-in driver says that its first device is, and the bridge above it.
pub const GPU: &str = "ffff:ff:00.7";
pub const BUS: &str = "/sys/devices/pci0000:64/0000:64:01.0";

impl Machine {
    pub fn healthy() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        machine
            .memlock("unlimited")
            .file("/proc/self/status", &status(0))
            .file("/proc/self/uid_map", "         0          0 4294967295\n")
            .file("/proc/self/cgroup", "0::/user.slice/session-1.scope\n")
            .file("/proc/meminfo", &meminfo(60 * GIB))
            .file("/proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
            .file(&format!("{THP}/enabled"), "always [madvise] never\n")
            .group("/sys/fs/cgroup/user.slice", &[("memory.max", "max"), ("memory.high", "max")])
            .node(0, 60 * GIB, "0-15");
        machine
    }

    pub fn root(&self) -> &Path {
        self.0.path()
    }

    fn path(&self, path: &str) -> std::path::PathBuf {
        self.0.path().join(path.trim_start_matches('/'))
    }

    pub fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// A limit of locked memory, and a hard one behind a slash.
    pub fn memlock(&self, value: &str) -> &Self {
        let (soft, hard) = value.split_once('/').unwrap_or((value, value));
        let line = format!("{:<26}{soft:<21}{hard:<21}bytes\n", "Max locked memory");
        self.file("/proc/self/limits", &line)
    }

    /// What the doctor says about locking 256 MiB.
    #[track_caller]
    pub fn locks(&self, expected: &str) {
        self.host("256MiB").is("memlock", expected);
    }

    pub fn without(&self, path: &str) -> &Self {
        let path = self.path(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        self
    }

    /// A control group, in which next to nothing is in use.
    pub fn group(&self, dir: &str, files: &[(&str, &str)]) -> &Self {
        self.file(&format!("{dir}/memory.current"), "1048576\n");
        for (name, text) in files {
            self.file(&format!("{dir}/{name}"), &format!("{text}\n"));
        }
        self
    }

    /// A NUMA node with memory and processors.
    pub fn node(&self, node: u32, free: u64, cpus: &str) -> &Self {
        let dir = format!("/sys/devices/system/node/node{node}");
        let text = format!(
            "Node {node} MemTotal:       67108864 kB\nNode {node} MemFree:        {} kB\n\
             Node {node} Inactive(file):        0 kB\n",
            free >> 10
        );
        self.file(&format!("{dir}/meminfo"), &text).file(&format!("{dir}/cpulist"), &format!("{cpus}\n"))
    }

    /// The stand-in driver's device on the PCI bus, below a bridge.
    pub fn pci(&self, node: i32) -> &Self {
        self.file(&format!("{BUS}/{GPU}/numa_node"), &format!("{node}\n"));
        let link = self.path(&format!("/sys/bus/pci/devices/{GPU}"));
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        // It may be there already.
        let _ = symlink(self.path(&format!("{BUS}/{GPU}")), link);
        self
    }

    /// The doctor, for this machine.
    pub fn doctor(&self, device: &str, capacity: &str) -> Command {
        // Little is pinned for real: that goes well wherever tests run, and soon.
        self.trial(device, capacity, "1MiB")
    }

    /// The same with a trial of so many bytes.
    pub fn trial(&self, device: &str, capacity: &str, pin: &str) -> Command {
        let mut command = doctor();
        command.args(["--device", device, "--capacity", capacity, "--pin", pin, "--root"]).arg(self.0.path());
        command
    }

    /// What the doctor says about this machine as a host.
    pub fn host(&self, capacity: &str) -> Findings {
        findings(&mut self.doctor("host", capacity))
    }

    /// What the doctor says about this machine's GPU, which does not open.
    pub fn gpu(&self, capacity: &str) -> Findings {
        // A library that is none, so that a real GPU does not answer instead.
        let none = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        findings(self.doctor("cuda:0", capacity).env("PINPOOL_LIBCUDA", none))
    }
}

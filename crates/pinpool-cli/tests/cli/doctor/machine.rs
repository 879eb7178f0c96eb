//! Folders that look like machines to the doctor.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

/// A machine with nothing wrong, until a test breaks it: the folder `healthy`, copied. It has 64 GiB
/// on one node, no container, no accelerator and no limits.
pub struct Machine(tempfile::TempDir);

pub const THP: &str = "/sys/kernel/mm/transparent_hugepage";
/// Where the stand-in driver says that its first device is, and the bridge above it.
pub const GPU: &str = "ffff:ff:00.7";
pub const BUS: &str = "/sys/devices/pci0000:64/0000:64:01.0";

impl Machine {
    pub fn healthy() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let healthy = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/doctor/healthy/.");
        assert!(Command::new("cp").args(["-r", healthy]).arg(machine.root()).status().unwrap().success());
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

    /// Another value in the line of a file that begins so.
    pub fn set(&self, path: &str, key: &str, value: &str) -> &Self {
        let text = fs::read_to_string(self.path(path)).unwrap();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap();
        self.file(path, &text.replace(line, &format!("{key} {value}")))
    }

    pub fn status(&self, key: &str, value: &str) -> &Self {
        self.set("/proc/self/status", key, value)
    }

    /// Bytes of memory that are available.
    pub fn available(&self, bytes: u64) -> &Self {
        self.set("/proc/meminfo", "MemAvailable:", &format!("{} kB", bytes >> 10))
    }

    /// A limit of locked memory, and a hard one behind a slash.
    pub fn memlock(&self, value: &str) -> &Self {
        let (soft, hard) = value.split_once('/').unwrap_or((value, value));
        self.set("/proc/self/limits", "Max locked memory", &format!("{soft} {hard} bytes"))
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

//! Memory: the machine's, the control groups', huge pages and NUMA.

#[cfg(feature = "cuda")]
use super::machine::{GIB, GPU, status};
use super::machine::{Machine, THP, meminfo};
use super::{Findings, doctor, findings};

const V1: &str = "4:cpu,cpuacct:/\n3:memory:/docker/1234\n0::/\n";

#[test]
fn the_machines_memory_is_compared_with_the_capacity() {
    let machine = Machine::healthy();
    machine.host("40GiB").is("memory", "ok: 60 GiB available of 64 GiB");
    machine.host("50GiB").is("memory", "warn: little for => a capacity of 48 GiB or less");
    machine.host("61GiB").is("memory", "fail: wants 61 GiB => a capacity of 48 GiB or less");
}

#[test]
fn every_level_of_the_unified_hierarchy_can_bind() {
    let machine = Machine::healthy();
    machine.host("4GiB").is("cgroup", "ok: no limit (cgroup v2)");
    let (outer, inner) = ("/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/user.slice/session-1.scope");
    machine.group(outer, &[("memory.max", "2147483648")]).group(inner, &[("memory.max", "8589934592")]);
    machine.host("4GiB").is(
        "cgroup",
        "fail: 2 GiB (memory.max of /sys/fs/cgroup/user.slice) & ends a process => \
         sudo systemctl set-property user.slice MemoryMax=6442450944 & !docker",
    );
    machine.host("1GiB").is("cgroup", "ok: memory.max of /sys/fs/cgroup/user.slice)");
    machine.group(outer, &[("memory.max", "max")]).group(inner, &[("memory.max", "4294967296")]);
    machine.host("6GiB").is("cgroup", "fail: session-1.scope");
    machine.host("3500MiB").is("cgroup", "warn: little for the rest => a capacity of 3.2 GiB or less");
    // In use, but only by files that give way.
    machine.file(&format!("{inner}/memory.current"), "4026531840\n");
    machine.host("2GiB").is("cgroup", "fail: 256 MiB left");
    machine.file(&format!("{inner}/memory.stat"), "anon 1\nfile 3758096384\ninactive_file 3758096384\n");
    machine.host("2GiB").is("cgroup", "ok: 3.8 GiB left");
}

#[test]
fn a_high_mark_slows_down() {
    let machine = Machine::healthy();
    machine.group("/sys/fs/cgroup/user.slice", &[("memory.high", "1073741824")]);
    machine
        .host("4GiB")
        .is("cgroup", "warn: memory.high of /sys/fs/cgroup/user.slice & slows => MemoryHigh=");
    machine.host("512MiB").is("cgroup", "ok");
    // A group that the administrator made, and no service manager.
    machine.file("/proc/self/cgroup", "0::/mine/inner\n");
    machine.group("/sys/fs/cgroup/mine", &[("memory.high", "1073741824")]);
    machine.host("4GiB").is("cgroup", "warn: => echo 6442450944 | sudo tee /sys/fs/cgroup/mine/memory.high");
    machine.group("/sys/fs/cgroup/mine/inner", &[("memory.max", "1073741824")]);
    machine
        .host("4GiB")
        .is("cgroup", "fail: => echo 6442450944 | sudo tee /sys/fs/cgroup/mine/inner/memory.max");
}

#[test]
fn in_containers_the_limit_is_the_containers_flag() {
    let machine = Machine::healthy();
    // With a namespace of its own, a container sees its group as the root.
    machine
        .file("/proc/self/cgroup", "0::/\n")
        .file("/.dockerenv", "")
        .group("/sys/fs/cgroup", &[("memory.max", "1073741824")]);
    machine.host("4GiB").is("cgroup", "fail: 1 GiB => docker run: --memory=6442450944 & !sudo tee");
    machine.without("/.dockerenv").file("/var/run/secrets/kubernetes.io/token", "");
    machine.host("4GiB").is("cgroup", "fail: => kubernetes: resources.limits.memory: 6144Mi");
    // Of a process outside of its namespace's root the kernel writes this.
    machine.file("/proc/self/cgroup", "0::/../other\n");
    machine.host("4GiB").is("cgroup", "fail: 1 GiB");
}

#[test]
fn version_1_is_read_at_every_level_too() {
    let machine = Machine::healthy();
    let files = [("memory.limit_in_bytes", "2147483648"), ("memory.usage_in_bytes", "1048576")];
    // A container without a namespace: the mount shows its group only.
    machine.file("/proc/self/cgroup", V1).group("/sys/fs/cgroup/memory", &files);
    machine.host("4GiB").is("cgroup", "fail: memory.limit_in_bytes of /sys/fs/cgroup/memory)");
    // The host: the whole tree. No limit is a large number.
    let none = [("memory.limit_in_bytes", "9223372036854771712"), files[1]];
    machine.group("/sys/fs/cgroup/memory", &none).group("/sys/fs/cgroup/memory/docker/1234", &files);
    machine.host("4GiB").is("cgroup", "fail: of /sys/fs/cgroup/memory/docker/1234)");
    machine.group("/sys/fs/cgroup/memory/docker/1234", &none);
    machine.host("4GiB").is("cgroup", "ok: no limit (cgroup v1)");
    machine.group("/sys/fs/cgroup/memory/docker", &files);
    machine.host("4GiB").is("cgroup", "fail: of /sys/fs/cgroup/memory/docker)");
}

#[test]
fn without_a_controller_no_group_counts() {
    let machine = Machine::healthy();
    // The root of all groups has no limit, and so no such files.
    machine.without("/sys/fs/cgroup").file("/sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
    machine.host("4GiB").is("cgroup", "ok: no limit");
    // A hierarchy of its own, without any controller, beside none that counts memory.
    machine.file("/proc/self/cgroup", "1:name=systemd:/\n");
    machine.host("4GiB").is("cgroup", "ok: no group counts memory");
    // What is not mounted can have any limit.
    machine.without("/sys/fs/cgroup").file("/proc/self/cgroup", "0::/\n");
    machine.host("4GiB").is("cgroup", "warn: /sys/fs/cgroup cannot be read");
}

#[test]
fn huge_pages_that_are_off() {
    let machine = Machine::healthy();
    machine.host("1MiB").is("huge-pages", "ok: transparent: madvise");
    let set = |file: &str, text: &str| machine.file(&format!("{THP}/{file}"), text);
    set("enabled", "[always] madvise never\n");
    machine.host("1MiB").is("huge-pages", "ok: always");
    set("enabled", "always madvise [never]\n");
    machine.host("1MiB").is(
        "huge-pages",
        "warn: off => echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled & \
         transparent_hugepage=madvise on the kernel command line",
    );
}

/// The doctor for this machine as a host, with this trial.
fn trial(machine: &Machine, pin: &str, capacity: &str) -> Findings {
    let mut command = doctor();
    command.args(["--device", "host", "--capacity", capacity, "--pin", pin, "--root"]);
    findings(command.arg(machine.root()))
}

/// A trial is never the reason that the kernel ends a process: it is cut to a part of what is left.
#[test]
fn the_trial_takes_a_part_of_what_is_left() {
    const MIB: u64 = 1 << 20;
    let machine = Machine::healthy();
    let is = |pin: &str, words: &[&str]| {
        let found = trial(&machine, pin, "1MiB");
        // (Whether this process may pin as much is another question.)
        let check = found.check("pin")["found"].as_str().unwrap().to_owned();
        assert!(words.iter().all(|word| check.contains(word)), "{words:?}: {check}");
    };
    let outer = "/sys/fs/cgroup/user.slice";
    is("24MiB", &["24 MiB"]);
    // The trial takes four times its size, and half of what is left at most. 1 MiB is in use.
    machine.group(outer, &[("memory.max", &(65 * MIB).to_string())]);
    is("24MiB", &["8 MiB", "24 MiB asked for", "64 MiB of memory are left"]);
    is("2MiB", &["2 MiB"]);
    machine.group(outer, &[("memory.max", "max"), ("memory.high", &(33 * MIB).to_string())]);
    is("24MiB", &["4 MiB", "32 MiB of memory are left"]);
    machine.group(outer, &[("memory.high", "max")]).file("/proc/meminfo", &meminfo(64 * MIB));
    is("24MiB", &["8 MiB", "64 MiB of memory are left"]);
    // Version 1.
    let machine = Machine::healthy();
    machine.file("/proc/self/cgroup", V1);
    let limit = |bytes: u64| {
        let files = [("memory.limit_in_bytes", &*bytes.to_string()), ("memory.usage_in_bytes", "1048576")];
        machine.group("/sys/fs/cgroup/memory", &files);
        trial(&machine, "24MiB", "1MiB")
    };
    let found = limit(65 * MIB);
    let pin = found.check("pin")["found"].as_str().unwrap();
    assert!(pin.contains("24 MiB asked for") && pin.contains("64 MiB of memory are left"), "{pin}");
    // So little that nothing is tried.
    let found = limit(5 * MIB);
    found.is("pin", "warn: not tried & 4 MiB of memory are left => cgroup");
    found.is("copy", "warn: not tried").is("device", "ok");
}

/// A machine of two nodes, and the doctor's findings about the stand-in driver's GPU on one of them.
#[cfg(feature = "cuda")]
struct TwoNodes(Machine, std::path::PathBuf);

#[cfg(feature = "cuda")]
impl TwoNodes {
    fn new() -> Option<Self> {
        let machine = Machine::healthy();
        machine.node(0, 40 * GIB, "0-7").node(1, 2 * GIB, "8-15");
        Some(Self(machine, crate::simulation()?))
    }

    fn gpu(&self, node: i32, capacity: &str) -> Findings {
        self.0.pci(GPU, node);
        findings(self.0.doctor("cuda:0", capacity).env(crate::doubles::PATH, &self.1))
    }
}

#[cfg(feature = "cuda")]
#[test]
fn memory_next_to_the_device() {
    let Some(nodes) = TwoNodes::new() else { return };
    nodes.gpu(0, "4GiB").is("numa", "ok: ffff:ff:00.7 is on node 0");
    nodes.gpu(1, "4GiB").is("numa", "warn: on node 1, which has 2 GiB => a capacity of 2 GiB or less");
    nodes.gpu(1, "1GiB").is("numa", "ok: on node 1");
    nodes.gpu(-1, "1GiB").is("numa", "ok: does not say");
    // More memory than there are numbers for bytes.
    let most = u64::MAX >> 10;
    let text = format!("Node 0 MemFree: {most} kB\nNode 0 Inactive(file): {most} kB\n");
    nodes.0.file("/sys/devices/system/node/node0/meminfo", &text);
    nodes.gpu(0, "1GiB").is("numa", "ok");
    // The host device is nowhere.
    nodes.0.host("4GiB").is("numa", "ok: no accelerator");
}

#[cfg(feature = "cuda")]
#[test]
fn a_cpuset_keeps_from_the_devices_node() {
    let Some(nodes) = TwoNodes::new() else { return };
    let machine = &nodes.0;
    let with = |mems: &str, cpus: &str| {
        let text = status(0)
            .replace("Mems_allowed_list:\t0-1", &format!("Mems_allowed_list:\t{mems}"))
            .replace("Cpus_allowed_list:\t0-15", &format!("Cpus_allowed_list:\t{cpus}"));
        machine.file("/proc/self/status", &text);
    };
    with("0", "0-15");
    nodes.gpu(1, "1GiB").is(
        "numa",
        "warn: whose memory this process may not use => AllowedMemoryNodes=1 & numactl --membind=1",
    );
    machine.file("/.dockerenv", "");
    nodes.gpu(1, "1GiB").is("numa", "warn: => --cpuset-mems=1");
    with("0-1", "0-3,6");
    nodes.gpu(1, "1GiB").is("numa", "warn: whose processors this process may not use => --cpuset-cpus=8-15");
    with("0", "0-3,6");
    nodes.gpu(1, "1GiB").is("numa", "warn: whose memory and processors this");
    with("0-1", "0-3,8");
    nodes.gpu(1, "1GiB").is("numa", "ok");
}

//! Memory: the machine's, the control groups', huge pages and NUMA.

use super::*;

const V1: &str = "4:cpu,cpuacct:/\n3:memory:/docker/1234\n0::/\n";
const SLICE: &str = "/sys/fs/cgroup/user.slice";
const SCOPE: &str = "/sys/fs/cgroup/user.slice/session-1.scope";

#[test]
fn the_machines_memory_and_huge_pages() {
    let machine = Machine::healthy();
    machine.host("40GiB").is("memory", "ok: 60 GiB available of 64 GiB").is("huge-pages", "ok: madvise");
    machine.host("50GiB").is("memory", "warn: little for => a capacity of 48 GiB or less");
    machine.host("61GiB").is("memory", "fail: wants 61 GiB => a capacity of 48 GiB or less");
    machine.file(&format!("{THP}/enabled"), "always madvise [never]\n");
    machine.host("1MiB").is(
        "huge-pages",
        "warn: off => echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled & \
         transparent_hugepage=madvise on the kernel command line",
    );
}

#[test]
fn every_level_of_the_unified_hierarchy_can_bind() {
    let machine = Machine::healthy();
    machine.host("4GiB").is("cgroup", "ok: no limit (cgroup v2)");
    machine.group(SLICE, &[("memory.max", "2147483648")]).group(SCOPE, &[("memory.max", "8589934592")]);
    machine.host("4GiB").is(
        "cgroup",
        "fail: 2 GiB (memory.max of /sys/fs/cgroup/user.slice) & ends a process => \
         sudo systemctl set-property user.slice MemoryMax=6442450944 & !docker",
    );
    machine.host("1GiB").is("cgroup", "ok: memory.max of /sys/fs/cgroup/user.slice)");
    machine.group(SLICE, &[("memory.max", "max")]).group(SCOPE, &[("memory.max", "4294967296")]);
    machine.host("6GiB").is("cgroup", "fail: session-1.scope");
    machine.host("3500MiB").is("cgroup", "warn: little for the rest => a capacity of 3.2 GiB or less");
    // In use, but only by files that give way.
    machine.file(&format!("{SCOPE}/memory.current"), "4026531840\n");
    machine.host("2GiB").is("cgroup", "fail: 256 MiB left");
    machine.file(&format!("{SCOPE}/memory.stat"), "anon 1\nfile 3758096384\ninactive_file 3758096384\n");
    machine.host("2GiB").is("cgroup", "ok: 3.8 GiB left");
    // In a container the limit is the container's flag.
    machine.file("/var/run/secrets/kubernetes.io/token", "");
    machine.host("4GiB").is("cgroup", "fail: => kubernetes: resources.limits.memory: 6144Mi & !sudo tee");
    // A high mark slows down.
    let machine = Machine::healthy();
    machine.group(SLICE, &[("memory.high", "1073741824")]);
    machine.host("512MiB").is("cgroup", "ok");
    let told = "warn: memory.high of /sys/fs/cgroup/user.slice & slows => MemoryHigh=6442450944 & \
                echo 6442450944 | sudo tee /sys/fs/cgroup/user.slice/memory.high";
    machine.host("4GiB").is("cgroup", told);
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

/// A trial is never the reason that the kernel ends a process: it is cut to a part of what is left.
#[test]
fn the_trial_takes_a_part_of_what_is_left() {
    const MIB: u64 = 1 << 20;
    let machine = Machine::healthy();
    let is = |pin: &str, words: &[&str]| {
        let found = findings(&mut machine.trial("host", "1MiB", pin));
        // (Whether this process may pin as much is another question.)
        let check = found.check("pin")["found"].as_str().unwrap().to_owned();
        assert!(words.iter().all(|word| check.contains(word)), "{words:?}: {check}");
        found
    };
    is("24MiB", &["24 MiB"]);
    // The trial takes four times its size, and half of what is left at most. 1 MiB is in use.
    machine.group(SLICE, &[("memory.max", &(65 * MIB).to_string())]);
    is("24MiB", &["8 MiB", "24 MiB asked for", "64 MiB of memory are left"]);
    is("2MiB", &["2 MiB"]);
    machine.group(SLICE, &[("memory.max", "max"), ("memory.high", &(33 * MIB).to_string())]);
    is("24MiB", &["4 MiB", "32 MiB of memory are left"]);
    machine.group(SLICE, &[("memory.high", "max")]).available(64 * MIB);
    is("24MiB", &["8 MiB", "64 MiB of memory are left"]);
    // Version 1: so little that nothing is tried.
    machine.file("/proc/self/cgroup", V1);
    let files = [("memory.limit_in_bytes", &*(5 * MIB).to_string()), ("memory.usage_in_bytes", "1048576")];
    machine.group("/sys/fs/cgroup/memory", &files);
    let found = is("24MiB", &["4 MiB of memory are left"]);
    found.is("pin", "warn: not tried => cgroup").is("copy", "warn: not tried").is("device", "ok");
}

/// The doctor's findings about the stand-in driver's GPU on one of two nodes.
#[cfg(feature = "cuda")]
#[test]
fn memory_and_processors_next_to_the_device() {
    let Some(library) = simulation() else { return };
    let machine = Machine::healthy();
    machine.node(0, 40 << 30, "0-7").node(1, 2 << 30, "8-15");
    let gpu = |node: i32, capacity: &str, told: &str| {
        machine.pci(node);
        let mut command = machine.doctor("cuda:0", capacity);
        findings(command.env(doubles::PATH, &library)).is("numa", told);
    };
    gpu(0, "4GiB", "ok: ffff:ff:00.7 is on node 0");
    gpu(1, "4GiB", "warn: on node 1, which has 2 GiB => a capacity of 2 GiB or less");
    gpu(1, "1GiB", "ok: on node 1");
    gpu(-1, "1GiB", "ok: does not say");
    // More memory than there are numbers for bytes.
    let most = u64::MAX >> 10;
    let text = format!("Node 0 MemFree: {most} kB\nNode 0 Inactive(file): {most} kB\n");
    machine.file("/sys/devices/system/node/node0/meminfo", &text);
    gpu(0, "1GiB", "ok");
    // The host device is nowhere.
    machine.host("4GiB").is("numa", "ok: no accelerator");
    // A cpuset keeps from the device's node.
    for (mems, cpus, told) in [
        (
            "0",
            "0-15",
            "warn: whose memory this process may not use => AllowedMemoryNodes=1 & numactl --membind=1",
        ),
        ("0-1", "0-3,6", "warn: whose processors this process may not use => AllowedCPUs=8-15"),
        ("0-1", "0-3,8", "ok"),
    ] {
        machine.status("Mems_allowed_list:", mems).status("Cpus_allowed_list:", cpus);
        gpu(1, "1GiB", told);
    }
}

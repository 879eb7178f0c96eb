//! Memory: the machine's, the control groups', huge pages and NUMA.

use super::machine::{GIB, GPU, Machine, THP, meminfo, status};
use super::{Findings, doctor, findings};

const V1: &str = "4:cpu,cpuacct:/\n3:memory:/docker/1234\n0::/\n";

#[test]
fn the_machines_memory_is_compared_with_the_capacity() {
    let machine = Machine::healthy();
    machine.host("40GiB").is("memory", "ok", &["60 GiB available of 64 GiB"], &[]);
    machine.host("50GiB").is("memory", "warn", &["little for"], &["a capacity of 48 GiB or less"]);
    machine.host("61GiB").is("memory", "fail", &["wants 61 GiB"], &["a capacity of 48 GiB or less"]);
    // Reserved and idle: named, and how to have it back without what is in use.
    let reserved = meminfo(8 * GIB)
        .replace("HugePages_Total:       0", "HugePages_Total:   16384")
        .replace("HugePages_Free:        0", "HugePages_Free:    16000")
        .replace("Mlocked:               0", "Mlocked:         8388608");
    machine.file("/proc/meminfo", &reserved);
    machine.host("16GiB").is(
        "memory",
        "fail",
        &["31.2 GiB reserved for hugetlb pages", "8 GiB locked"],
        &["vm.nr_hugepages=384"],
    );
    // Without MemAvailable, as before Linux 3.14.
    machine.file("/proc/meminfo", "MemTotal: 1048576 kB\nMemFree: 524288 kB\n");
    machine.host("1GiB").is("memory", "fail", &["512 MiB available"], &[]);
}

#[test]
fn strict_overcommit_counts_promises() {
    let machine = Machine::healthy();
    machine.host("40GiB").is("memory", "ok", &[], &[]);
    machine.file("/proc/sys/vm/overcommit_memory", "2\n");
    machine.host("40GiB").is(
        "memory",
        "fail",
        &["31.0 GiB left to promise"],
        &["sudo sysctl -w vm.overcommit_memory=0"],
    );
    machine.host("20GiB").is("memory", "ok", &["vm.overcommit_memory is 2"], &[]);
}

#[test]
fn every_level_of_the_unified_hierarchy_can_bind() {
    let machine = Machine::healthy();
    machine.host("4GiB").is("cgroup", "ok", &["no limit", "v2"], &[]);
    let (outer, inner) = ("/sys/fs/cgroup/user.slice", "/sys/fs/cgroup/user.slice/session-1.scope");
    machine.group(outer, &[("memory.max", "2147483648")]).group(inner, &[("memory.max", "8589934592")]);
    machine
        .host("4GiB")
        .is(
            "cgroup",
            "fail",
            &["2 GiB (memory.max of /sys/fs/cgroup/user.slice)", "ends a process"],
            &["sudo systemctl set-property user.slice MemoryMax=6442450944"],
        )
        .spares("cgroup", "docker");
    machine.host("1GiB").is("cgroup", "ok", &["memory.max of /sys/fs/cgroup/user.slice)"], &[]);
    machine.group(outer, &[("memory.max", "max")]).group(inner, &[("memory.max", "4294967296")]);
    machine.host("6GiB").is("cgroup", "fail", &["session-1.scope"], &[]);
    machine.host("3500MiB").is(
        "cgroup",
        "warn",
        &["little for the rest"],
        &["a capacity of 3.2 GiB or less"],
    );
    // In use, but only by files that give way.
    machine.file(&format!("{inner}/memory.current"), "4026531840\n");
    machine.host("2GiB").is("cgroup", "fail", &["256 MiB left"], &[]);
    machine.file(&format!("{inner}/memory.stat"), "anon 1\nfile 3758096384\ninactive_file 3758096384\n");
    machine.host("2GiB").is("cgroup", "ok", &["3.8 GiB left"], &[]);
}

#[test]
fn a_high_mark_slows_down() {
    let machine = Machine::healthy();
    machine.group("/sys/fs/cgroup/user.slice", &[("memory.high", "1073741824")]);
    machine.host("4GiB").is(
        "cgroup",
        "warn",
        &["memory.high of /sys/fs/cgroup/user.slice", "slows"],
        &["MemoryHigh="],
    );
    machine.host("512MiB").is("cgroup", "ok", &[], &[]);
    // A group that the administrator made, and no service manager.
    machine.file("/proc/self/cgroup", "0::/mine/inner\n");
    machine.group("/sys/fs/cgroup/mine", &[("memory.high", "1073741824")]);
    machine.host("4GiB").is(
        "cgroup",
        "warn",
        &[],
        &["echo 6442450944 | sudo tee /sys/fs/cgroup/mine/memory.high"],
    );
    machine.group("/sys/fs/cgroup/mine/inner", &[("memory.max", "1073741824")]);
    machine.host("4GiB").is(
        "cgroup",
        "fail",
        &[],
        &["echo 6442450944 | sudo tee /sys/fs/cgroup/mine/inner/memory.max"],
    );
}

#[test]
fn in_containers_the_limit_is_the_containers_flag() {
    let machine = Machine::healthy();
    // With a namespace of its own, a container sees its group as the root.
    machine
        .file("/proc/self/cgroup", "0::/\n")
        .file("/.dockerenv", "")
        .group("/sys/fs/cgroup", &[("memory.max", "1073741824")]);
    machine
        .host("4GiB")
        .is("cgroup", "fail", &["1 GiB"], &["docker run: --memory=6442450944"])
        .spares("cgroup", "sudo tee");
    machine.without("/.dockerenv").file("/var/run/secrets/kubernetes.io/token", "");
    machine.host("4GiB").is("cgroup", "fail", &[], &["kubernetes: resources.limits.memory: 6144Mi"]);
    // Of a process outside of its namespace's root the kernel writes this.
    machine.file("/proc/self/cgroup", "0::/../other\n");
    machine.host("4GiB").is("cgroup", "fail", &["1 GiB"], &[]);
}

#[test]
fn version_1_is_found_by_its_mount() {
    let machine = Machine::healthy();
    let mount = |root: &str, point: &str| {
        format!(
            "30 20 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
             31 20 0:27 {root} {point} rw,nosuid master:5 - cgroup cgroup rw,memory\n"
        )
    };
    let files = [("memory.limit_in_bytes", "2147483648"), ("memory.usage_in_bytes", "1048576")];
    // A container without a namespace: the mount shows its group only.
    machine
        .file("/proc/self/cgroup", V1)
        .file("/proc/self/mountinfo", &mount("/docker/1234", "/sys/fs/cgroup/memory"));
    machine.group("/sys/fs/cgroup/memory", &files);
    machine.host("4GiB").is("cgroup", "fail", &["memory.limit_in_bytes of /sys/fs/cgroup/memory)"], &[]);
    // The host: the whole tree, in an odd place. No limit is a large number.
    machine.file("/proc/self/mountinfo", &mount("/", "/odd\\040place"));
    machine.group("/odd place/docker/1234", &files);
    machine.host("4GiB").is("cgroup", "fail", &["of /odd place/docker/1234)"], &[]);
    machine.group("/odd place/docker/1234", &[("memory.limit_in_bytes", "9223372036854771712"), files[1]]);
    machine.host("4GiB").is("cgroup", "ok", &["no limit", "v1"], &[]);
    machine.group("/odd place/docker", &files);
    machine.host("4GiB").is("cgroup", "fail", &["of /odd place/docker)"], &[]);
}

#[test]
fn without_a_controller_no_group_counts() {
    let machine = Machine::healthy();
    // The root of all groups has no limit, and so no such files.
    machine.without("/sys/fs/cgroup").file("/sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
    machine.host("4GiB").is("cgroup", "ok", &["no group counts memory"], &[]);
    // A hierarchy of its own, without any controller, beside none that counts memory.
    machine.file("/proc/self/cgroup", "1:name=systemd:/\n");
    machine.host("4GiB").is("cgroup", "ok", &["no group counts memory"], &[]);
    // What is not mounted can have any limit.
    machine.without("/sys/fs/cgroup").file("/proc/self/cgroup", "0::/\n");
    machine.host("4GiB").is("cgroup", "warn", &["/sys/fs/cgroup cannot be read"], &[]);
}

#[test]
fn huge_pages_that_are_off() {
    let machine = Machine::healthy();
    machine.host("1MiB").is("huge-pages", "ok", &["2 MiB: madvise, defrag madvise"], &[]);
    let set = |file: &str, text: &str| machine.file(&format!("{THP}/{file}"), text);
    set("enabled", "[always] madvise never\n");
    machine.host("1MiB").is("huge-pages", "ok", &["always"], &[]);
    set("enabled", "always madvise [never]\n");
    machine.host("1MiB").is(
        "huge-pages",
        "warn",
        &["off"],
        &[
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            "transparent_hugepage=madvise on the kernel command line",
        ],
    );
    // The size's own setting counts before the whole's.
    set("hugepages-2048kB/enabled", "always inherit [madvise] never\n");
    machine.host("1MiB").is("huge-pages", "ok", &["madvise"], &[]);
    set("enabled", "always [madvise] never\n");
    set("hugepages-2048kB/enabled", "always [inherit] madvise never\n");
    machine.host("1MiB").is("huge-pages", "ok", &["2 MiB: madvise, defrag"], &[]);
    set("enabled", "always madvise [never]\n");
    machine.host("1MiB").is("huge-pages", "warn", &["are off"], &["transparent_hugepage/enabled"]);
    set("enabled", "always [madvise] never\n");
    set("hugepages-2048kB/enabled", "always inherit madvise [never]\n");
    machine.host("1MiB").is("huge-pages", "warn", &["of 2 MiB are off"], &["hugepages-2048kB/enabled"]);
    set("hugepages-2048kB/enabled", "always [inherit] madvise never\n");
    machine.file("/proc/self/status", &status(0).replace("THP_enabled:\t1", "THP_enabled:\t0"));
    machine.host("1MiB").is("huge-pages", "warn", &["PR_SET_THP_DISABLE"], &["prctl"]);
}

#[test]
fn idle_hugetlb_pools_are_in_the_way_only_where_memory_is_short() {
    let machine = Machine::healthy();
    machine.host("1MiB").is("hugetlb", "ok", &["none"], &[]);
    machine.hugetlb(0, 2048, 4096, 4000).hugetlb(0, 1_048_576, 4, 0);
    machine.host("1GiB").is(
        "hugetlb",
        "ok",
        &["node 0: 4096 of 2 MiB, 4000 of them free", "4 of 1 GiB"],
        &[],
    );
    machine.file("/proc/meminfo", &meminfo(GIB));
    machine.host("1GiB").is(
        "hugetlb",
        "warn",
        &["7.8 GiB that are idle"],
        &["echo 96 | sudo tee /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"],
    );
}

#[test]
fn free_memory_in_pieces() {
    let machine = Machine::healthy();
    machine.host("8GiB").is("fragmentation", "ok", &["in pieces of 2 MiB"], &[]);
    // 4 GiB, all in single pages.
    machine.file("/proc/buddyinfo", "Node 0, zone Normal 1048576 0 0 0 0 0 0 0 0 0 0\n");
    machine
        .host("1GiB")
        .is(
            "fragmentation",
            "warn",
            &["0 bytes of 4 GiB free"],
            &["echo 1 | sudo tee /proc/sys/vm/compact_memory"],
        )
        .spares("fragmentation", "drop_caches");
    machine.host("8GiB").is("fragmentation", "warn", &["may"], &["compact_memory"]);
    // One block of 2 MiB is of order 9, or of order 5 where a page has 64 KiB.
    machine.file("/proc/buddyinfo", "Node 0, zone Normal 0 0 0 0 0 512 0 0 0 0 0\n");
    machine.host("1GiB").is("fragmentation", "warn", &["0 bytes of 64 MiB"], &[]);
    machine.file("/proc/self/smaps", "5500-5600 r-xp 0 00:00 1\nSize: 64 kB\nKernelPageSize:       64 kB\n");
    machine.host("1GiB").is("fragmentation", "ok", &["1 GiB of 1 GiB"], &[]);
    machine.file(&format!("{THP}/enabled"), "always madvise [never]\n");
    machine.host("2GiB").is("fragmentation", "ok", &["off anyway"], &[]);
}

/// The kernel drops page cache for whoever asks, and makes huge pages of it where it can.
#[test]
fn page_cache_is_room_for_huge_pages() {
    let machine = Machine::healthy();
    machine.file("/proc/buddyinfo", "Node 0, zone Normal 1048576 0 0 0 0 0 0 0 0 0 0\n");
    let cached = meminfo(12 * GIB).replace("MemFree:        12582912", "MemFree:         4194304");
    machine.file("/proc/meminfo", &cached);
    machine.host("7GiB").is("fragmentation", "ok", &["0 bytes of 4 GiB free", "8 GiB of page cache"], &[]);
    machine.host("9GiB").is("fragmentation", "warn", &["8 GiB of page cache"], &[]);
    // By node, where the device is on one.
    let machine = two_nodes();
    machine.file("/proc/meminfo", &cached).file(
        "/proc/buddyinfo",
        "Node 0, zone Normal 1048576 0 0 0 0 0 0 0 0 0 0\nNode 1, zone Normal 1048576 0 0 0 0 0 0 0 0 0 0\n",
    );
    machine.gpu("1GiB").is("fragmentation", "warn", &["free on node 0"], &[]);
    let node = "Node 0 MemFree: 4194304 kB\nNode 0 Inactive(file): 2097152 kB\n";
    machine.file("/sys/devices/system/node/node0/meminfo", node);
    machine.gpu("1GiB").is("fragmentation", "ok", &["2 GiB of page cache"], &[]);
}

/// What this very run was given counts for more than what the files let expect.
#[test]
fn pages_that_the_trial_got_as_huge_ones_are_no_sign_of_fragmentation() {
    let machine = Machine::healthy();
    machine.file("/proc/buddyinfo", "Node 0, zone Normal 1048576 0 0 0 0 0 0 0 0 0 0\n");
    let found = trial(&machine, "16MiB", "1GiB");
    let pin = found.check("pin")["found"].as_str().unwrap();
    // Where the system gives huge pages at all. (Its files are this machine's, whatever the root.)
    if pin.contains(", 16 MiB of it on huge pages") || pin.contains(", 14 MiB of it on huge pages") {
        found.is("fragmentation", "ok", &["huge pages"], &[]);
    } else {
        found.is("fragmentation", "warn", &["may"], &[]);
    }
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
    machine.file("/proc/self/cgroup", V1).file(
        "/proc/self/mountinfo",
        "31 20 0:27 /docker/1234 /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n",
    );
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
    found.is("pin", "warn", &["not tried", "4 MiB of memory are left"], &["cgroup"]);
    found.is("copy", "warn", &["not tried"], &[]).is("device", "ok", &[], &[]);
}

fn two_nodes() -> Machine {
    let machine = Machine::healthy();
    machine.node(0, 40 * GIB, "0-7").node(1, 2 * GIB, "8-15").nvidia();
    machine
}

#[test]
fn memory_next_to_the_device() {
    let machine = two_nodes();
    machine.gpu("4GiB").is(
        "numa",
        "ok",
        &["node 0: 40 GiB, node 1: 2 GiB", "0000:65:00.0 is on node 0"],
        &[],
    );
    machine.pci(GPU, "0x10de", "0x030200", 1);
    machine.gpu("4GiB").is("numa", "warn", &["on node 1, which has 2 GiB"], &["a capacity of 2 GiB or less"]);
    machine.gpu("1GiB").is("numa", "ok", &["on node 1"], &[]);
    machine.pci(GPU, "0x10de", "0x030200", -1);
    machine.gpu("1GiB").is(
        "numa",
        "warn",
        &["does not say"],
        &["sudo tee /sys/bus/pci/devices/0000:65:00.0/numa_node"],
    );
    // The host device is nowhere.
    machine.host("4GiB").is("numa", "ok", &["node 1: 2 GiB"], &[]);
}

#[test]
fn fragmentation_is_that_of_the_devices_node() {
    let machine = two_nodes();
    machine.pci(GPU, "0x10de", "0x030200", 1);
    let zones =
        "Node 0, zone Normal 0 0 0 0 0 0 0 0 0 0 15000\nNode 1, zone Normal 500000 0 0 0 0 0 0 0 0 0 0\n";
    machine.file("/proc/buddyinfo", zones);
    machine.gpu("1GiB").is("fragmentation", "warn", &["free on node 1"], &[]);
    machine.pci(GPU, "0x10de", "0x030200", 0);
    machine.gpu("1GiB").is("fragmentation", "ok", &["free on node 0"], &[]);
}

#[test]
fn a_cpuset_keeps_from_the_devices_node() {
    let machine = two_nodes();
    machine.pci(GPU, "0x10de", "0x030200", 1);
    let with = |mems: &str, cpus: &str| {
        let text = status(0)
            .replace("Mems_allowed_list:\t0-1", &format!("Mems_allowed_list:\t{mems}"))
            .replace("Cpus_allowed_list:\t0-15", &format!("Cpus_allowed_list:\t{cpus}"));
        machine.file("/proc/self/status", &text);
    };
    with("0", "0-15");
    machine.gpu("1GiB").is(
        "numa",
        "warn",
        &["may not use"],
        &["AllowedMemoryNodes=1", "numactl --membind=1"],
    );
    machine.file("/.dockerenv", "");
    machine.gpu("1GiB").is("numa", "warn", &[], &["--cpuset-mems=1"]);
    with("0-1", "0-3,6");
    machine.gpu("1GiB").is("numa", "warn", &["none of the processors of node 1"], &["--cpuset-cpus="]);
    with("0-1", "0-3,8");
    machine.gpu("1GiB").is("numa", "ok", &[], &[]);
}

#[test]
fn a_filter_of_system_calls_can_forbid_placement() {
    let machine = two_nodes();
    machine
        .file("/.dockerenv", "")
        .file("/proc/self/status", &status(0).replace("Seccomp:\t0", "Seccomp:\t2"));
    machine.host("1MiB").is("container", "warn", &["mbind"], &["--cap-add SYS_NICE"]);
    machine.file("/proc/self/status", &status(1 << 23).replace("Seccomp:\t0", "Seccomp:\t2"));
    machine.host("1MiB").is("container", "ok", &[], &[]);
    // With one node there is nothing to choose.
    let machine = Machine::healthy();
    machine
        .file("/.dockerenv", "")
        .file("/proc/self/status", &status(0).replace("Seccomp:\t0", "Seccomp:\t2"));
    machine.host("1MiB").is("container", "ok", &[], &[]);
}

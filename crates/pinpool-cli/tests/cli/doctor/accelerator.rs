//! Accelerators: the driver, its files and library, the IOMMU, WSL; and a GPU of the stand-in driver on a fabricated
//! bus.

use super::findings;
use super::machine::{GPU, Machine};
use crate::support::skip;

#[test]
fn a_gpu_that_is_well_but_for_its_library() {
    let machine = Machine::healthy();
    machine.nvidia();
    machine
        .gpu("1MiB")
        .is("driver", "ok", &["580.159.03"], &[])
        .is("device-files", "ok", &["/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0"], &[])
        .is("library", "ok", &["Cargo.toml"], &[])
        .is("numa", "ok", &[], &[])
        .is(
            "device",
            "fail",
            &[if cfg!(feature = "cuda") { "could not be loaded" } else { "no support" }],
            &[],
        );
}

#[test]
fn the_kernels_part_of_the_driver() {
    let machine = Machine::healthy();
    machine.nvidia().without("/proc/driver/nvidia");
    machine.gpu("1MiB").is("driver", "fail", &["not loaded"], &["install NVIDIA's driver"]);
    // Known by its module only.
    machine.file("/sys/module/nvidia/version", "570.86\n").without("/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    machine.gpu("1MiB").is("driver", "ok", &["570.86"], &[]);
    machine.without("/sys/module");
    // Another driver has the card.
    let driver = format!("/sys/devices/pci0000:64/0000:64:01.0/{GPU}/driver");
    machine.link(&driver, "../../../../bus/pci/drivers/nouveau");
    machine.gpu("1MiB").is("driver", "fail", &["driven by nouveau"], &["blacklist nouveau"]);
    machine.without_link(&driver).link(&driver, "../../../../bus/pci/drivers/vfio-pci");
    machine.gpu("1MiB").is("driver", "fail", &["vfio-pci"], &["drivers/vfio-pci/unbind"]);
    machine.file("/.dockerenv", "").without_link(&driver);
    machine.gpu("1MiB").is("driver", "fail", &[], &["on the container's host: install NVIDIA's driver"]);
}

#[test]
fn the_drivers_files() {
    let machine = Machine::healthy();
    machine.nvidia().without("/dev/nvidia-uvm");
    machine
        .gpu("1MiB")
        .is("device-files", "fail", &["missing: /dev/nvidia-uvm"], &["sudo nvidia-modprobe -u -c=0"])
        .spares("device-files", "docker");
    machine.without("/dev/nvidia0");
    machine.gpu("1MiB").is("device-files", "fail", &["/dev/nvidiaN"], &["sudo nvidia-modprobe -c=0"]);
    machine.file("/.dockerenv", "");
    machine.gpu("1MiB").is("device-files", "fail", &[], &["--gpus all", "--device /dev/nvidia-uvm"]);
    machine.without("/.dockerenv").file("/run/.containerenv", "");
    machine.gpu("1MiB").is(
        "device-files",
        "fail",
        &[],
        &["--device nvidia.com/gpu=all", "nvidia-ctk cdi generate"],
    );
    machine.file("/var/run/secrets/kubernetes.io/token", "");
    machine.gpu("1MiB").is("device-files", "fail", &[], &["resources.limits: nvidia.com/gpu: 1"]);

    // There, and not to be opened: a socket is no device.
    let machine = Machine::healthy();
    machine.nvidia().without("/dev/nvidiactl");
    let _socket = std::os::unix::net::UnixListener::bind(machine.root().join("dev/nvidiactl")).unwrap();
    machine.gpu("1MiB").is("device-files", "fail", &["/dev/nvidiactl cannot be opened"], &["chmod 0666"]);
}

#[test]
fn the_library_is_where_loaders_look() {
    // Only without a GPU of this machine's own, which would open all the same.
    if pinpool::Device::open("cuda:0").is_ok() {
        skip!("this machine's own GPU opens");
        return;
    }
    let machine = Machine::healthy();
    machine.nvidia();
    let look = || findings(&mut machine.doctor("cuda:0", "1MiB"));
    look().is("library", "ok", &["/usr/lib/x86_64-linux-gnu/libcuda.so.1"], &[]);
    machine.without_link("/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    look().is("library", "fail", &["no folder"], &["sudo ldconfig"]);
    machine.file("/etc/ld.so.cache", "\0ld.so\0libc.so.6\0libcuda.so.1\0/opt/libcuda.so.1\0");
    look().is("library", "ok", &["/etc/ld.so.cache"], &[]);
    machine.without("/etc/ld.so.cache").file("/.dockerenv", "");
    look().is("library", "fail", &[], &["NVIDIA_DRIVER_CAPABILITIES=compute,utility"]);
    machine.file("/opt/lib/libcuda.so.1", "");
    let path = |path: &str| findings(machine.doctor("cuda:0", "1MiB").env("LD_LIBRARY_PATH", path));
    path("/nowhere::/opt/lib").is("library", "ok", &["/opt/lib/libcuda.so.1"], &[]);
    let named = |file: &str| findings(machine.doctor("cuda:0", "1MiB").env("PINPOOL_LIBCUDA", file));
    named("/nowhere/libcuda.so").is("library", "fail", &["/nowhere/libcuda.so"], &["PINPOOL_LIBCUDA"]);
    named("libcuda-of-the-loader.so").is("library", "ok", &[], &[]);
}

#[test]
fn an_accelerator_that_auto_cannot_open_is_a_warning() {
    if pinpool::Device::open("cuda:0").is_ok() {
        skip!("this machine's own GPU opens");
        return;
    }
    let machine = Machine::healthy();
    machine.nvidia().without("/proc/driver/nvidia").without("/dev/nvidia-uvm");
    let found = findings(&mut machine.doctor("auto", "1MiB"));
    found
        .is("driver", "warn", &["not loaded"], &[])
        .is("device-files", "warn", &["/dev/nvidia-uvm"], &[])
        .is("device", "warn", &["host:0, though", "cuda:0"], &["driver above"]);
    // Asked for as the host, none of it matters.
    machine.host("1MiB").is("driver", "ok", &["not needed"], &[]).is("device", "ok", &[], &[]);
    // An audio function of the same maker is no accelerator.
    let machine = Machine::healthy();
    machine.pci(GPU, "0x10de", "0x040300", 0);
    findings(&mut machine.doctor("auto", "1MiB")).is("driver", "ok", &["not needed"], &[]);
}

#[test]
fn ascend_has_files_of_its_own() {
    let machine = Machine::healthy();
    let look = |device: &str| findings(&mut machine.doctor(device, "1MiB"));
    look("acl:0")
        .is("driver", "fail", &["version.info"], &["Ascend driver"])
        .is(
            "device-files",
            "fail",
            &["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/davinciN"],
            &[],
        )
        .is("library", "fail", &["libascendcl.so"], &["set_env.sh"]);
    machine.file("/.dockerenv", "");
    look("acl:0").is("device-files", "fail", &[], &["--device /dev/davinci0", "--device /dev/hisi_hdc"]);
    for name in ["davinci_manager", "devmm_svm", "hisi_hdc", "davinci0", "davinci1"] {
        machine.file(&format!("/dev/{name}"), "");
    }
    machine.file("/usr/local/Ascend/driver/version.info", "Version=25.0.rc1\nascendhal_version=7\n");
    machine.file("/usr/lib64/libascendcl.so", "");
    look("acl:0")
        .is("driver", "ok", &["25.0.rc1"], &[])
        .is("device-files", "ok", &["/dev/davinci0, /dev/davinci1"], &[])
        .is("library", "ok", &["/usr/lib64/libascendcl.so"], &[]);
    // Where CANN is, whether its script was sourced or not.
    machine.without("/usr/lib64/libascendcl.so").file("/usr/local/Ascend/cann/lib64/libascendcl.so", "");
    look("acl:0").is("library", "ok", &["/usr/local/Ascend/cann/lib64/libascendcl.so"], &[]);
    machine.file("/opt/cann/lib64/libascendcl.so", "");
    let mut command = machine.doctor("acl:0", "1MiB");
    findings(command.env("ASCEND_TOOLKIT_HOME", "/opt/cann")).is("library", "ok", &["/opt/cann/lib64"], &[]);
}

/// On whatever machine the doctor runs, each thing that it finds missing has a remedy.
#[test]
fn every_vendor_has_remedies_for_every_place() {
    use pinpool::family::{By, FAMILIES};
    for vendor in FAMILIES.iter().filter_map(|family| family.vendor.as_ref()) {
        let lists = [
            vendor.install,
            vendor.files_missing,
            vendor.files_closed,
            vendor.library_missing,
            vendor.unknown_device,
        ];
        for list in lists {
            let has = |places: &[By]| list.iter().any(|(by, _)| places.contains(by));
            let everywhere = has(&[By::Kernel, By::Pool, By::Start, By::Here]);
            assert!(everywhere || has(&[By::Shell]), "on a machine: {list:?}");
            assert!(everywhere || has(&[By::Docker, By::Host]), "in Docker: {list:?}");
            assert!(everywhere || has(&[By::Kubernetes, By::Host]), "in a pod: {list:?}");
        }
    }
}

#[test]
fn what_the_iommu_does() {
    let machine = Machine::healthy();
    machine.host("1MiB").is("iommu", "ok", &["none"], &[]);
    machine.nvidia().folder("/sys/devices/virtual/iommu/dmar0").folder("/sys/devices/virtual/iommu/dmar1");
    machine
        .link("/sys/class/iommu/dmar0", "../../devices/virtual/iommu/dmar0")
        .link("/sys/class/iommu/dmar1", "../../devices/virtual/iommu/dmar1");
    machine.host("1MiB").is("iommu", "ok", &["dmar (2 units)", "no accelerator"], &[]);
    machine.gpu("1MiB").is("iommu", "ok", &["does not show"], &[]);
    machine.file("/proc/cmdline", "root=/dev/sda1 intel_iommu=on iommu=pt\n");
    machine.gpu("1MiB").is("iommu", "ok", &["command line"], &[]);
    let group = format!("/sys/devices/pci0000:64/0000:64:01.0/{GPU}/iommu_group");
    machine.link(&group, "../../../../kernel/iommu_groups/42");
    let kind = |kind: &str| machine.file("/sys/kernel/iommu_groups/42/type", &format!("{kind}\n"));
    kind("identity");
    machine.gpu("1MiB").is("iommu", "ok", &["passes the accelerators through"], &[]);
    kind("DMA-FQ");
    machine.gpu("1MiB").is(
        "iommu",
        "warn",
        &["translated (DMA-FQ)"],
        &["iommu=pt on the kernel command line"],
    );
    kind("DMA");
    machine.gpu("1MiB").is("iommu", "warn", &["flushing at once"], &[]);
    machine.without_link("/sys/class/iommu/dmar0").without_link("/sys/class/iommu/dmar1");
    machine.link("/sys/class/iommu/smmu3.0x1", "../../devices/virtual/iommu/dmar0");
    machine.gpu("1MiB").is("iommu", "warn", &["smmu"], &["iommu.passthrough=1"]);
}

#[test]
fn windows_below() {
    let machine = Machine::healthy();
    machine.file("/proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n").file("/dev/dxg", "");
    machine
        .gpu("1MiB")
        .is("wsl", "warn", &["Windows"], &[".wslconfig", "wsl --shutdown"])
        .is("driver", "ok", &["/dev/dxg"], &[])
        .is("device-files", "ok", &["/dev/dxg"], &[])
        .is("container", "ok", &["none"], &[]);
    // Which systemd calls a container of its own.
    machine.file("/run/systemd/container", "wsl\n");
    machine.gpu("1MiB").is("container", "ok", &["none"], &[]);
}

/// The stand-in driver's GPU, on a fabricated bus: the speed expected of its link, and the doctor's words about it.
#[cfg(feature = "cuda")]
#[test]
fn what_a_link_should_give_on_a_gpu() {
    use crate::doubles;
    // Where the stand-in says that its first device is.
    const ADDRESS: &str = "ffff:ff:00.7";
    let Some(library) = doubles::library() else {
        skip!("there is no cargo to build the stand-in libcuda with");
        return;
    };
    let machine = Machine::healthy();
    let (bridge, device) =
        ("/sys/devices/pci0000:64/0000:64:01.0", format!("/sys/devices/pci0000:64/0000:64:01.0/{ADDRESS}"));
    machine.pci(ADDRESS, "0x10de", "0x030200", 0);
    let look = || findings(machine.doctor("cuda:0", "1MiB").env(doubles::PATH, &library));
    let link = |dir: &str, speed: &str, width: &str| {
        machine
            .file(&format!("{dir}/current_link_speed"), &format!("{speed}\n"))
            .file(&format!("{dir}/current_link_width"), &format!("{width}\n"));
    };
    let expected = |value: &serde_json::Value| value["measured"]["expected_gb_per_s"].as_f64();

    let found = look();
    found.is("link", "ok", &["shows no PCIe link"], &[]).is("device", "ok", &["cuda:0 at ffff:ff:00.7"], &[]);
    // What was proved by trying is not refuted by a file.
    found.is("driver", "ok", &["opens all the same"], &[]).is("device-files", "ok", &["all the same"], &[]);
    found.is("copy", "ok", &["every byte came back"], &[]);
    assert_eq!(expected(&found.0), None);

    link(&device, "32.0 GT/s PCIe", "16");
    machine
        .file(&format!("{device}/max_link_speed"), "32.0 GT/s PCIe\n")
        .file(&format!("{device}/max_link_width"), "16\n");
    let found = look();
    found.is("link", "ok", &["PCIe 5.0 x16", "55.5 GB/s"], &[]);
    // 32 GT/s on 16 lanes, of 130 bits 128, of those 88%.
    assert!((expected(&found.0).unwrap() - 55.45).abs() < 0.01, "{}", found.0);

    link(&device, "32.0 GT/s PCIe", "8");
    look().is("link", "warn", &["PCIe 5.0 x8", "can do PCIe 5.0 x16"], &["bifurcation"]);
    link(&device, "2.5 GT/s PCIe", "16");
    let found = look();
    found.is("link", "warn", &["PCIe 1.0 x16", "can do PCIe 5.0"], &["aer"]);
    assert!((expected(&found.0).unwrap() - 3.52).abs() < 0.01, "{}", found.0);
    link(&device, "32.0 GT/s PCIe", "16");
    link(bridge, "16.0 GT/s PCIe", "8");
    let found = look();
    found.is("link", "warn", &["0000:64:01.0, has only PCIe 4.0 x8"], &["bridges"]);
    assert!((expected(&found.0).unwrap() - 13.86).abs() < 0.01, "{}", found.0);
    for (speed, width) in [("Unknown", "16"), ("32.0 GT/s PCIe", "0"), ("32.0 GT/s PCIe", "255")] {
        link(bridge, speed, width);
        look().is("link", "ok", &["PCIe 5.0 x16"], &[]);
        link(&device, speed, width);
        look().is("link", "ok", &["shows no PCIe link"], &[]);
        link(&device, "32.0 GT/s PCIe", "16");
    }
    // More than any processor copies: the doctor says so.
    machine.without(&format!("{bridge}/current_link_speed"));
    link(&device, "64.0 GT/s PCIe", "32");
    look().is("copy", "warn", &["its link should give 207.7 GB/s"], &["numa"]);

    // The limit of locked memory does not count what NVIDIA's driver pins.
    machine.file("/proc/self/limits", &super::machine::limits("65536", "unlimited", "unlimited"));
    look().is("memlock", "warn", &["does not count", "RDMA"], &[]);
}

#[cfg(feature = "cuda")]
#[test]
fn a_device_that_fails_is_told() {
    use crate::doubles;
    let Some(library) = doubles::library() else {
        skip!("there is no cargo to build the stand-in libcuda with");
        return;
    };
    let machine = Machine::healthy();
    for call in ["cuStreamCreate", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuMemHostRegister_v2"] {
        let mut command = machine.doctor("cuda:0", "1MiB");
        // CUDA_ERROR_ILLEGAL_ADDRESS, after which the device is lost.
        command.env(doubles::PATH, &library).env("PINPOOL_STANDIN_FAIL", format!("{call}:1:700"));
        let found = findings(&mut command);
        let checks = found.0["checks"].as_array().unwrap();
        let failed: Vec<_> = checks.iter().filter(|check| check["status"] == "fail").collect();
        let name = if call == "cuMemHostRegister_v2" { "pin" } else { "copy" };
        assert!(failed.len() == 1 && failed[0]["name"] == name, "{call}: {failed:?}");
        assert!(failed[0]["found"].as_str().unwrap().contains(call.trim_end_matches("_v2")), "{failed:?}");
    }
}

/// What the first registration of a device costs, however few bytes it has, is not the speed of pinning.
#[cfg(feature = "cuda")]
#[test]
fn the_first_registrations_own_cost_is_not_the_speed_of_pinning() {
    use crate::doubles;
    let Some(library) = doubles::library() else {
        skip!("there is no cargo to build the stand-in libcuda with");
        return;
    };
    let machine = Machine::healthy();
    let mut command = super::doctor();
    command.args(["--device", "cuda:0", "--capacity", "64MiB", "--pin", "64MiB", "--root"]);
    command.arg(machine.root()).env(doubles::PATH, &library).env("PINPOOL_STANDIN_FIRST_PIN_MS", "5000");
    let found = findings(&mut command);
    let speed = found.0["measured"]["pin_gb_per_s"].as_f64().unwrap();
    assert!(speed > 0.064 / 5.0, "{}", found.0);
}

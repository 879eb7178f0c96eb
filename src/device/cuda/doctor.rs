//! What the doctor asks about NVIDIA's driver.

use super::By::{Docker, Host, Kubernetes, Podman, Pool, Shell};
use super::{Kernel, Vendor};

const NEEDS_POD: &str =
    "resources.limits: nvidia.com/gpu: 1 in the container's description (NVIDIA device plugin)";
const NEEDS_GPUS: &str = "--gpus all (needs the NVIDIA container toolkit), or --device /dev/nvidiactl --device \
                          /dev/nvidia-uvm --device /dev/nvidia0 with the driver's libraries mounted";
const NEEDS_CDI: &str = "--device nvidia.com/gpu=all (once before: sudo nvidia-ctk cdi generate \
                         --output=/etc/cdi/nvidia.yaml)";

pub(super) const VENDOR: Vendor = Vendor {
    name: "NVIDIA",
    pci: ("0x10de", &["0x03", "0x12"]),
    signs: &["/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"],
    wsl: Some("/dev/dxg"),

    versions: &["/proc/driver/nvidia/version", "/sys/module/nvidia/version"],
    absent: "NVIDIA's kernel module is not loaded",
    module: Some("nvidia"),
    install: &[
        (Shell, "install NVIDIA's driver (on Ubuntu: sudo ubuntu-drivers install), then restart"),
        (Host, "install NVIDIA's driver (in a cluster by the GPU operator); containers use their host's"),
    ],

    // nvidia-uvm is what CUDA itself needs.
    control: &["nvidiactl", "nvidia-uvm"],
    numbered: "nvidia",
    files_missing: &[
        (
            Shell,
            "sudo nvidia-modprobe -c=0 && sudo nvidia-modprobe -u -c=0 (makes the files, and loads nvidia-uvm)",
        ),
        (Docker, NEEDS_GPUS),
        (Podman, NEEDS_CDI),
        (Kubernetes, NEEDS_POD),
    ],
    files_closed: &[
        (Shell, "sudo chmod 0666 /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*"),
        (Docker, NEEDS_GPUS),
        (Podman, NEEDS_CDI),
        (Kubernetes, NEEDS_POD),
    ],

    library: "libcuda.so.1",
    variable: "PINPOOL_LIBCUDA",
    candidates: None,
    library_missing: &[
        (Shell, "install NVIDIA's driver; where it is installed, sudo ldconfig"),
        (Docker, "--gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility, which mount the host's"),
        (
            Kubernetes,
            "resources.limits: nvidia.com/gpu: 1, and NVIDIA_DRIVER_CAPABILITIES=compute,utility in env",
        ),
        (Pool, "or name it by the environment variable PINPOOL_LIBCUDA"),
    ],

    unknown_device: &[
        (Shell, "check CUDA_VISIBLE_DEVICES, and nvidia-smi -L for what there is"),
        (Docker, "check --gpus, CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES"),
        (Kubernetes, "raise nvidia.com/gpu in resources.limits"),
    ],
    // `os_lock_user_pages` of its open kernel modules.
    counts_locked: false,
    address_space: Some("CUDA reserves addresses for all memory of the machine and its GPUs at its start"),
    kernels: &[
        // Seen by TensorRT-LLM (its issue 17773), on any one registration, whatever program makes it.
        Kernel {
            versions: (6, 11)..(6, 14),
            capacity: 0,
            what: "one registration with CUDA fails from 2 GiB on; pools register 1 GiB at a time here, other libraries \
                   may not",
            helps: Some("6.14"),
        },
        // NVIDIA/open-gpu-kernel-modules, issue 1234.
        Kernel {
            versions: (0, 0)..(u32::MAX, 0),
            capacity: 512 << 30,
            what: "the driver registers less than 512 GiB a call; pools register much less at a time",
            helps: None,
        },
    ],
};

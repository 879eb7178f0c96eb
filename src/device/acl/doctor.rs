//! What the doctor asks about the Ascend driver and CANN.

use super::By::{Docker, Kubernetes, Shell, Systemd};
use super::Vendor;

const NEEDS_POD: &str = "resources.limits with the card's huawei.com/... resource (Ascend device plugin)";
const NEEDS_CANN: &str = "an image with CANN, and source its set_env.sh in the start script";

pub(super) const VENDOR: Vendor = Vendor {
    name: "Ascend",
    pci: ("0x19e5", &["0x12"]),
    signs: &["/dev/davinci_manager"],
    wsl: None,

    // The driver's package leaves its version there.
    versions: &["/usr/local/Ascend/driver/version.info"],
    absent: "/usr/local/Ascend/driver/version.info cannot be read: no Ascend driver shows",
    module: None,
    install: &[
        (Shell, "install the Ascend driver and firmware for this card, then restart"),
        (Docker, "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"),
        (Kubernetes, "mount the node's /usr/local/Ascend/driver as a hostPath volume"),
    ],

    control: &["davinci_manager", "devmm_svm", "hisi_hdc"],
    numbered: "davinci",
    files_missing: &[
        (Shell, "install the Ascend driver and firmware, then restart (npu-smi info shows the cards)"),
        (
            Docker,
            "--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc",
        ),
        (Kubernetes, NEEDS_POD),
    ],
    files_closed: &[
        (Shell, "add the server's user to the driver's group: sudo usermod -aG HwHiAiUser USER"),
        (Docker, "--device for each of these files, not -v"),
        (Kubernetes, NEEDS_POD),
    ],

    library: "libascendcl.so",
    variable: "PINPOOL_LIBASCENDCL",
    candidates: None,
    library_missing: &[
        (Shell, "source /usr/local/Ascend/ascend-toolkit/set_env.sh before the server starts"),
        (Systemd, "Environment=LD_LIBRARY_PATH=... with the folder of CANN that has it (lib64)"),
        (Docker, NEEDS_CANN),
        (Kubernetes, NEEDS_CANN),
    ],

    unknown_device: &[
        (Shell, "check ASCEND_RT_VISIBLE_DEVICES, and npu-smi info for what there is"),
        (Docker, "check --device /dev/davinciN, and ASCEND_RT_VISIBLE_DEVICES"),
        (Kubernetes, "raise the card's huawei.com/... in resources.limits"),
    ],
    counts_locked: true,
    address_space: None,
    kernels: &[],
};

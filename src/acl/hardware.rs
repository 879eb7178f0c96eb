//! For users with Ascend hardware: how to run the contract's suite on it, and what to send back.
//!
//! This crate has never run on an Ascend device. Its code for them follows the documentation and the headers of CANN,
//! 2022 to 2026. Its tests run it over a stand-in `libascendcl.so` (`tests/doubles/acl`), which reports every rule of
//! those pages that is broken. A rule that was misread is wrong in both. So the first runs on real devices are worth a
//! great deal, even if they fail.
//!
//! # Before
//!
//! CANN's environment is set (`source .../set_env.sh`), `npu-smi info` lists a device, the user may use it (group
//! `HwHiAiUser`), and `ulimit -l` is unlimited or some GB. The runs need a clone of this repository and Rust 1.88 or
//! later (for the tests), or executables from another machine that has both (`cargo test --no-run` prints their paths;
//! they find the library at run time). The device should have nothing else to do: the suite makes streams, events and
//! some hundred MB of allocations, and nothing that needs a reset.
//!
//! # The runs
//!
//! They go from the smallest to the largest. No run depends on an earlier one, so go on if one fails.
//!
//! ```sh
//! # 1. Does it open, and what is there?
//! PINPOOL_REQUIRE=acl:0 cargo test --test acl -- --nocapture what_the_device_says
//! # 2. A file to the device and back, every byte compared.
//! cargo run --release --features cli -- -vv load --device acl:0 --verify --json
//! # 3. The contract that every device keeps.
//! PINPOOL_REQUIRE=acl:0 cargo test --test contract -- --nocapture the_contract_holds_on_ascend
//! # 4. Where there are two devices.
//! PINPOOL_REQUIRE=acl:0,acl:1 cargo test --test contract -- --nocapture the_contract_holds_on_ascend
//! ```
//!
//! With `PINPOOL_REQUIRE` naming an Ascend device the tests use the machine's own library, and a device that cannot be
//! opened is a failure. `PINPOOL_LIBASCENDCL` names the library where it is in an odd place.
//!
//! # What to send back
//!
//! Send everything that the four runs wrote, also where they passed; the output of `npu-smi info`, `uname -r` and
//! `ulimit -l`; the version of CANN and of the driver (`/usr/local/Ascend/driver/version.info`); and whether the runs
//! were in a container. These questions are most in doubt, and so of most interest:
//!
//! - Is an event of `aclrtCreateEventExWithFlag` (flags 1 and 2) really recorded again and again, and seen complete? It
//!   shows in run 3: "a stream keeps its order", "many threads".
//! - Does memory of `aclrtMallocHost` serve every device of the process? It shows in run 4.
//! - Does `aclrtHostRegister` take mapped files, shared memory and vectors here? It shows in run 3: "registered
//!   values", "mapped files and shared memory".
//! - What does `aclrtMallocHost` align its memory to? It shows in run 1.
//! - Which number does `aclrtPointerGetAttributes` give for a device where some are hidden
//!   (`ASCEND_RT_VISIBLE_DEVICES`)? It shows in run 3: "memory by its address".
//! - Does `aclGetRecentErrMsg` return the message of the call that failed? It shows in any error's text.
//! - Does the process end after all devices are closed? Then the runs end by themselves.
//!
//! A hang is a result too: send the stacks of all threads (`gdb -p PID -batch -ex 'thread apply all bt'`).

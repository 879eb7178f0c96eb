//! For users with Ascend hardware: how to run the contract's suite on it, and what to send back.
//!
//! This crate has never met an Ascend device. Its code for them follows the documentation and the headers of CANN, 2022 to
//! 2026; its tests run it over a stand-in `libascendcl.so` (`tests/doubles/acl`), which writes down every rule of those pages
//! that is broken. A stand-in may share what we misread. So the first runs on real devices are worth a great deal, whatever
//! comes of them.
//!
//! # Before
//!
//! CANN's environment is set (`source .../set_env.sh`), `npu-smi info` lists a device, the user may use it (group
//! `HwHiAiUser`), and `ulimit -l` is unlimited or some GB. A clone of this repository and Rust 1.88 or later (for the tests) are needed, or
//! a machine with these that builds for yours (`cargo test --no-run` prints the executables' paths; they find the library at
//! run time). The device should have nothing else to do: the suite makes streams, events and some hundred MB of
//! allocations, and nothing that needs a reset.
//!
//! # The runs
//!
//! From the smallest to the largest; each stands for itself, so go on if one fails.
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
//! With `PINPOOL_REQUIRE` naming an Ascend device the machine's own library is used, and a device that cannot be opened is a
//! failure. `PINPOOL_LIBASCENDCL` names the library where it is in an odd place.
//!
//! # What to send back
//!
//! Everything the four runs wrote, also where all went well; `npu-smi info`, `uname -r`, `ulimit -l`, the version of CANN and
//! of the driver (`/usr/local/Ascend/driver/version.info`), whether it was in a container. What is most in doubt, and so of
//! most interest:
//!
//! | question | where it shows |
//! | --- | --- |
//! | Is an event of `aclrtCreateEventExWithFlag` (flags 1 and 2) really recorded again and again, and seen complete? | run 3: "a stream keeps its order", "many threads" |
//! | Does memory of `aclrtMallocHost` serve every device of the process? | run 4 |
//! | Does `aclrtHostRegister` take mapped files, shared memory and vectors here? | run 3: "registered values", "mapped files and shared memory" |
//! | What does `aclrtMallocHost` align its memory to? | run 1 |
//! | Which number does `aclrtPointerGetAttributes` give for a device where some are hidden (`ASCEND_RT_VISIBLE_DEVICES`)? | run 3: "memory by its address" |
//! | Is what a failing call said in `aclGetRecentErrMsg`? | any error's text |
//! | Does the library let go of the process when all devices are closed? | the runs end by themselves |
//!
//! A hang is a result too: the stacks of all threads (`gdb -p PID -batch -ex 'thread apply all bt'`) say most about it.

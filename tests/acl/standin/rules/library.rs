//! The library's states, and arguments that are none.

use crate::support::doubles::ascendcl::{made, says};

rules! {
    LIBRARY:

    init_1_nothing_before_init (bare) |a| {
        // The runtime does not look, and so the call is made.
        assert_eq!(made!(a, "aclrtGetDeviceCount") & 0xFFFF_FFFF, 2);
        a.broken(&["INIT-1"]);
        says!(a, 0, "aclInit", 0);
        made!(a, "aclrtGetDeviceCount");
        // Other code in the process has initialised it already: an error that is none.
        says!(a, 100_002, "aclInit", 0);
        a.broken(&["INIT-1"]);
        assert_eq!(a.stand_in.report().notes, ["REPEATED-INIT 1"]);
        says!(a, 100_003, "aclInit", c"/no/such/file.json".as_ptr());
    }

    init_2_the_library_is_not_ended (ready) |a| {
        says!(a, 0, "aclFinalize");
        a.broken(&["INIT-2"]);
        // However often it was initialised; and it can be again.
        says!(a, 0, "aclInit", 0);
        says!(a, 0, "aclrtSetDevice", 0);
        a.broken(&["INIT-2"]);
    }

    init_3_nothing_after_the_end (ready) |a| {
        let stream = a.stream();
        let mut left = 9_u64;
        says!(a, 100_002, "aclInit", 0);
        says!(a, 0, "aclFinalizeReference", &raw mut left);
        assert_eq!(left, 1);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        // The last of the users that initialised it: each of them may end it once.
        says!(a, 0, "aclFinalizeReference", 0);
        says!(a, 100_001, "aclrtSynchronizeStream", stream);
        a.broken(&["INIT-3"]);
        assert_eq!(a.stand_in.report().leaks, ["streams 1"]);
    }

    init_4_an_end_for_each_beginning (bare) |a| {
        says!(a, 100_037, "aclFinalize");
        says!(a, 0, "aclInit", 0);
        says!(a, 0, "aclFinalize");
        says!(a, 100_037, "aclFinalize");
        says!(a, 100_037, "aclFinalizeReference", 0);
        a.broken(&["INIT-4", "INIT-2", "INIT-4", "INIT-4"]);
    }

    arg_1_results_need_a_place (ready) |a| {
        says!(a, 100_000, "aclrtMalloc", 0, 64, 0);
        says!(a, 100_000, "aclrtMallocHost", 0, 64);
        says!(a, 100_000, "aclrtGetDeviceCount", 0);
        says!(a, 100_000, "aclrtCreateStream", 0);
        says!(a, 100_000, "aclrtSetCurrentContext", 0);
        says!(a, 100_000, "aclrtDestroyStream", 0);
        says!(a, 100_000, "aclrtDestroyEvent", 0);
        says!(a, 100_000, "aclrtFreeHost", 0);
        let memory = a.memory(64);
        says!(a, 100_000, "aclrtMemcpy", memory, 64, 0, 64, 1);
        says!(a, 100_000, "aclrtMemset", 0, 64, 0, 64);
        a.broken(&["ARG-1"; 10]);
        // Nothing was made on the way.
        assert_eq!(a.stand_in.report().leaks, ["devices 1", "allocations 1"]);
    }

    arg_2_only_what_there_is (ready) |a| {
        let mut at = 0_usize;
        says!(a, 100_000, "aclrtMalloc", &raw mut at, 64, 8);
        says!(a, 100_000, "aclrtMalloc", &raw mut at, 0, 0);
        says!(a, 100_000, "aclrtMallocHost", &raw mut at, 0);
        says!(a, 100_000, "aclrtCreateStreamWithConfig", &raw mut at, 0, 0x40);
        says!(a, 100_000, "aclrtCreateEventWithFlag", &raw mut at, 0x40);
        says!(a, 100_000, "aclrtCreateEventExWithFlag", &raw mut at, 0x10);
        says!(a, 107_000, "aclrtSynchronizeStreamWithTimeout", a.stream(), 0);
        says!(a, 107_000, "aclrtSynchronizeEventWithTimeout", a.event(), -2_i32);
        a.broken(&["ARG-2"; 8]);
        // No mistakes: what the machine lacks.
        says!(a, 107_001, "aclrtSetDevice", 2);
        says!(a, 107_001, "aclrtSetDevice", -1_i32);
        a.broken(&["ARG-2"; 8]);
    }
}

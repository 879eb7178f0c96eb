//! Where the simulation and real drivers are known to differ, and what is not tried on a real one.

/// The call of a whole sequence that is not tried.
pub const ALL_OF_IT: &str = "all of it";

/// One step of one rule.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// The test in `tests/cuda/standin`.
    pub rule: &'static str,
    /// Which of its steps, from 1. 0 is all of the sequence ([`ALL_OF_IT`]), for one that only the stand-in can make.
    pub step: usize,
    pub call: &'static str,
    pub on_driver: OnDriver,
    pub why: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDriver {
    /// The code, and the first driver that was seen to give it. `None`: read from the manual, not seen yet.
    Says(u32, Option<&'static str>),
    /// It would be undefined behaviour there.
    NotTried,
}

const fn not_tried(rule: &'static str, step: usize, call: &'static str, why: &'static str) -> Listed {
    Listed { rule, step, call, on_driver: OnDriver::NotTried, why }
}

const CALLBACK: &str = "a call from the driver's own callback: undefined there, and it may never come back";
const CAPTURING: &str = "a graph that is still being captured belongs to the capture: undefined there";
const MEETING: &str = "threads that write the same bytes without order: undefined there";
const UNLOADING: &str = "a module is unloaded while its kernel may run: undefined there";
const LOSES: &str = "drivers lose the device now and then";
const OVERLAP: &str = "copies of a batch that are in each other's way: undefined there";
const STALE: &str = "a handle of something destroyed: undefined there";
const OTHER_CURRENT: &str = "a stream or event carries its context, so another one may be current";
const UVA: &str = "addresses are one space for all devices, so a stream may copy to another one's memory";

pub const LISTED: &[Listed] = &[
    not_tried("ctx_2_a_context_that_is_gone", 3, "cuCtxPushCurrent_v2", STALE),
    Listed {
        rule: "ctx_5_contexts_are_not_mixed",
        step: 3,
        call: "cuMemcpyHtoDAsync_v2",
        on_driver: OnDriver::Says(0, Some("580.159.04")),
        why: UVA,
    },
    Listed {
        rule: "ctx_5_contexts_are_not_mixed",
        step: 4,
        call: "cuStreamSynchronize",
        on_driver: OnDriver::Says(0, Some("580.159.04")),
        why: OTHER_CURRENT,
    },
    not_tried("str_1_a_stream_that_is_gone", 2, "cuStreamDestroy_v2", STALE),
    not_tried("str_1_a_stream_that_is_gone", 3, "cuStreamSynchronize", STALE),
    not_tried("evt_1_an_event_that_is_gone", 2, "cuEventQuery", STALE),
    not_tried("evt_1_an_event_that_is_gone", 3, "cuEventDestroy_v2", STALE),
    not_tried("ctx_6_only_contexts_of_ones_own_are_destroyed", 7, "cuCtxDestroy_v2", STALE),
    not_tried("bat_4_no_copy_writes_where_another_one_does", 1, "cuMemcpyBatchAsync", OVERLAP),
    not_tried("bat_6_one_call_at_a_time", 0, ALL_OF_IT, LOSES),
    not_tried("gra_1_destructors_call_nothing", 0, ALL_OF_IT, CALLBACK),
    not_tried("gra_3_graphs_that_are_gone", 2, "cuGraphDestroy", STALE),
    not_tried("gra_3_graphs_that_are_gone", 3, "cuGraphRetainUserObject", STALE),
    not_tried("gra_3_graphs_that_are_gone", 5, "cuGraphExecDestroy", STALE),
    not_tried("gra_3_graphs_that_are_gone", 6, "cuGraphLaunch", STALE),
    not_tried("gra_3_graphs_that_are_gone", 8, "cuUserObjectRelease", STALE),
    Listed {
        rule: "gra_4_references_are_counted",
        step: 1,
        call: "cuUserObjectRelease",
        on_driver: OnDriver::Says(0, Some("580.159.04")),
        why: "more references than there are: the driver does not look",
    },
    not_tried("gra_4_references_are_counted", 5, "cuGraphDestroy", CAPTURING),
    not_tried("ker_2_modules_and_functions_that_are_gone", 4, "cuModuleUnload", STALE),
    not_tried("ker_2_modules_and_functions_that_are_gone", 5, "cuModuleGetFunction", STALE),
    not_tried("ker_2_modules_and_functions_that_are_gone", 6, "cuLaunchKernel", STALE),
    not_tried("ker_6_no_row_meets_what_another_one_writes", 0, ALL_OF_IT, MEETING),
    not_tried("ker_8_a_module_whose_kernel_is_queued", 0, ALL_OF_IT, UNLOADING),
];

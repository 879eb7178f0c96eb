//! Devices, and which context is current.

use crate::support::doubles::ascendcl::{PROGRESS, made, says};

rules! {
    CONTEXTS:

    dev_1_a_device_is_reset_last (ready) |a| {
        let (stream, _event) = (a.stream(), a.event());
        says!(a, 0, "aclrtResetDevice", 0);
        a.broken(&["DEV-1"]);
        assert_eq!(a.stand_in.report().leaks, ["streams 1", "events 1"]);
        // Its default context was destroyed, and what was in it.
        says!(a, 107_002, "aclrtSynchronizeStream", stream);
        a.broken(&["DEV-1", "CTX-2"]);
        assert!(a.stand_in.report().over);
    }

    dev_2_a_reset_for_each_set (ready) |a| {
        says!(a, 0, "aclrtSetDevice", 0);
        says!(a, 0, "aclrtResetDevice", 0);
        // Set once more than reset: still there.
        a.stream();
        says!(a, 0, "aclrtDestroyStream", a.stream());
        says!(a, 0, "aclrtResetDeviceForce", 0);
        says!(a, 107_002, "aclrtResetDevice", 0);
        a.broken(&["DEV-1", "DEV-2"]);
    }

    ctx_1_a_context_must_be_current (ready) |a| {
        let (memory, host, event) = (a.memory(64), a.host(64).at, a.event());
        let stream = a.stream();
        says!(a, 0, "aclrtRecordEvent", event, stream);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut at, mut device) = (0_usize, 0_i32);
                // To ask is no mistake.
                says!(a, 107_002, "aclrtGetCurrentContext", &raw mut at);
                says!(a, 107_002, "aclrtGetDevice", &raw mut device);
                a.broken(&[]);
                says!(a, 107_002, "aclrtMalloc", &raw mut at, 1, 0);
                says!(a, 107_002, "aclrtMallocHost", &raw mut at, 1);
                says!(a, 107_002, "aclrtCreateStream", &raw mut at);
                says!(a, 107_002, "aclrtCreateEvent", &raw mut at);
                assert_eq!(a.upload(memory, host, 64, stream), 107_002);
                says!(a, 107_002, "aclrtRecordEvent", event, stream);
                says!(a, 107_002, "aclrtSynchronizeStream", stream);
                says!(a, 107_002, "aclrtSynchronizeDevice");
                a.broken(&["CTX-1"; 8]);
                // These need none.
                a.wait(event);
                says!(a, 0, "aclrtSynchronizeEvent", event);
                says!(a, 0, "aclrtDestroyEvent", event);
                says!(a, 0, "aclrtFree", memory);
                says!(a, 0, "aclrtFreeHost", host);
                a.broken(&["CTX-1"; 8]);
            });
        });
    }

    ctx_2_a_context_that_is_gone (ready) |a| {
        let default = a.current();
        let own = made!(a, "aclrtCreateContext", 1);
        assert_eq!(a.current(), own, "making one makes it current");
        assert_eq!(made!(a, "aclrtGetDevice") & 0xFFFF_FFFF, 1);
        says!(a, 0, "aclrtDestroyContext", own);
        let mut at = 0_usize;
        says!(a, 107_002, "aclrtMalloc", &raw mut at, 1, 0);
        says!(a, 107_002, "aclrtSetCurrentContext", own);
        a.broken(&["CTX-2", "CTX-2"]);
        says!(a, 0, "aclrtSetCurrentContext", default);
        a.memory(1);
        assert_ne!(made!(a, "aclrtCreateContext", 1), own, "a number is never used twice");
    }

    ctx_3_streams_are_used_in_their_context (ready) |a| {
        let (default, stream, event) = (a.current(), a.stream(), a.event());
        let (memory, host) = (a.memory(64), a.host(256));
        made!(a, "aclrtCreateContext", 0);
        assert_eq!(a.upload(memory, host.at, 64, stream), 107_003);
        says!(a, 107_003, "aclrtRecordEvent", event, stream);
        says!(a, 107_003, "aclrtStreamWaitEvent", stream, event);
        says!(a, 107_003, "aclrtMemsetAsync", memory, 64, 0, 64, stream);
        says!(a, 107_003, "aclrtDestroyStream", stream);
        a.broken(&["CTX-3"; 5]);
        // These take any.
        says!(a, 0, "aclrtSynchronizeStream", stream);
        let mut status = 0_u32;
        says!(a, 0, "aclrtStreamQuery", stream, &raw mut status);
        // Null is the current context's, and so never a wrong one.
        assert_eq!(a.upload(memory, host.at, 64, 0), 0);
        says!(a, 0, "aclrtRecordEvent", event, 0);
        says!(a, 0, "aclrtSetCurrentContext", default);
        says!(a, 0, "aclrtDestroyStream", stream);
        a.broken(&["CTX-3"; 5]);
    }

    ctx_4_only_contexts_that_were_made_are_destroyed (ready) |a| {
        let default = a.current();
        says!(a, 107_002, "aclrtDestroyContext", default);
        let own = made!(a, "aclrtCreateContext", 0);
        says!(a, 0, "aclrtDestroyContext", own);
        says!(a, 107_002, "aclrtDestroyContext", own);
        a.broken(&["CTX-4", "CTX-4"]);
    }

    ctx_5_events_stay_on_their_device (ready) |a| {
        let event = a.event();
        says!(a, 0, "aclrtSetDevice", 1);
        let stream = a.stream();
        says!(a, 107_000, "aclrtRecordEvent", event, stream);
        a.broken(&["CTX-5"]);
        // Waiting for one is what connects two devices.
        let theirs = a.event();
        says!(a, 0, "aclrtRecordEvent", theirs, stream);
        says!(a, 0, "aclrtSetDevice", 0);
        says!(a, 0, "aclrtStreamWaitEvent", a.stream(), theirs);
        // Of one device, and made in another context of it.
        made!(a, "aclrtCreateContext", 0);
        says!(a, 0, "aclrtRecordEvent", event, a.stream());
        made!(a, "aclrtCreateEventExWithFlag", PROGRESS);
        a.broken(&["CTX-5"]);
    }

    ctx_6_memory_stays_on_its_device (ready) |a| {
        let (memory, host) = (a.memory(64), a.host(256));
        says!(a, 0, "aclrtSetDevice", 1);
        let stream = a.stream();
        assert_eq!(a.upload(memory, host.at, 64, stream), 107_000);
        assert_eq!(a.download(host.at, memory, 64, stream), 107_000);
        a.broken(&["CTX-6", "CTX-6"]);
        // Page-locked host memory is every device's.
        assert_eq!(a.upload(a.memory(64), host.at, 64, stream), 0);
        a.broken(&["CTX-6", "CTX-6"]);
    }
}

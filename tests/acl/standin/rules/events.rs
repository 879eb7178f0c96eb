//! Events of the three kinds.

use crate::support::doubles::ascendcl::{PROGRESS, SYNC, made, says};

/// The old status of an event: 0 is complete.
macro_rules! old_status {
    ($acl:expr, $name:literal, $event:expr) => {{
        let mut status = 7_u32;
        says!($acl, 0, $name, $event, &raw mut status);
        status
    }};
}

rules! {
    EVENTS:

    evt_1_an_event_that_is_gone (ready) |a| {
        let event = a.event();
        says!(a, 0, "aclrtDestroyEvent", event);
        says!(a, 107_017, "aclrtDestroyEvent", event);
        let mut status = 0_u32;
        says!(a, 107_017, "aclrtQueryEventStatus", event, &raw mut status);
        says!(a, 107_017, "aclrtSynchronizeEvent", event);
        a.broken(&["EVT-1"; 3]);
    }

    evt_2_an_event_never_recorded (ready) |a| {
        let (newer, older) = (a.event(), made!(a, "aclrtCreateEvent"));
        // Complete, which reads as if a copy were done; and not, which may never end.
        assert!(a.is_complete(newer));
        assert!(!a.is_complete(older));
        assert_eq!(old_status!(a, "aclrtQueryEvent", older), 1);
        says!(a, 0, "aclrtSynchronizeEvent", newer);
        says!(a, 0, "aclrtStreamWaitEvent", a.stream(), newer);
        a.broken(&["EVT-2"; 5]);
    }

    evt_3_an_event_recorded_again_too_early (ready) |a| {
        let (stream, event) = (a.stream(), a.event());
        says!(a, 0, "aclrtRecordEvent", event, stream);
        a.wait(event);
        // Seen complete: that is what recording again is for.
        says!(a, 0, "aclrtRecordEvent", event, stream);
        a.broken(&[]);
        says!(a, 0, "aclrtRecordEvent", event, stream);
        a.broken(&["EVT-3"]);
    }

    evt_4_an_event_destroyed_too_early (ready) |a| {
        let (stream, event, memory, host) = (a.stream(), a.event(), a.memory(64), a.host(256));
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtRecordEvent", event, stream);
        says!(a, 0, "aclrtDestroyEvent", event);
        a.broken(&["EVT-4"]);
        says!(a, 0, "aclrtSynchronizeStream", stream);
    }

    evt_5_streams_wait_for_events_made_for_it (ready) |a| {
        let stream = a.stream();
        let alone = made!(a, "aclrtCreateEventExWithFlag", PROGRESS);
        let flagged = made!(a, "aclrtCreateEventWithFlag", PROGRESS);
        says!(a, 0, "aclrtRecordEvent", alone, stream);
        says!(a, 0, "aclrtRecordEvent", flagged, stream);
        says!(a, 207_000, "aclrtStreamWaitEvent", stream, alone);
        says!(a, 207_000, "aclrtStreamWaitEvent", stream, flagged);
        says!(a, 207_000, "aclrtResetEvent", flagged, stream);
        a.broken(&["EVT-5"; 3]);
        // What they are for.
        a.wait(alone);
        a.wait(flagged);
        let older = made!(a, "aclrtCreateEvent");
        says!(a, 0, "aclrtRecordEvent", older, stream);
        says!(a, 0, "aclrtStreamWaitEvent", a.stream(), older);
        a.broken(&["EVT-5"; 3]);
    }

    evt_6_only_some_events_are_reset (ready) |a| {
        let stream = a.stream();
        let sync = made!(a, "aclrtCreateEventWithFlag", SYNC);
        says!(a, 0, "aclrtRecordEvent", sync, stream);
        a.wait(sync);
        says!(a, 0, "aclrtResetEvent", sync, stream);
        a.broken(&[]);
        says!(a, 207_000, "aclrtResetEvent", a.event(), stream);
        let older = made!(a, "aclrtCreateEvent");
        says!(a, 0, "aclrtRecordEvent", older, stream);
        says!(a, 0, "aclrtResetEvent", older, stream);
        a.broken(&["EVT-6", "EVT-6"]);
        // Undefined: here it is never complete.
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert!((0..10).all(|_| !a.is_complete(older)));
        says!(a, 0, "aclrtRecordEvent", older, stream);
        a.wait(older);
    }

    evt_7_new_events_have_no_old_status (ready) |a| {
        let (stream, event, older) = (a.stream(), a.event(), made!(a, "aclrtCreateEvent"));
        let mut status = 0_u32;
        says!(a, 0, "aclrtRecordEvent", event, stream);
        says!(a, 207_000, "aclrtQueryEvent", event, &raw mut status);
        says!(a, 207_000, "aclrtQueryEventWaitStatus", event, &raw mut status);
        a.broken(&["EVT-7", "EVT-7"]);
        // An event of both kinds has both statuses.
        says!(a, 0, "aclrtRecordEvent", older, stream);
        while old_status!(a, "aclrtQueryEvent", older) == 1 {}
        assert_eq!(old_status!(a, "aclrtQueryEvent", older), 0);
        assert_eq!(old_status!(a, "aclrtQueryEventStatus", older), 1);
        assert_eq!(old_status!(a, "aclrtQueryEventWaitStatus", older), 0);
        assert_eq!(a.stand_in.report().notes, [""; 0]);
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(old_status!(a, "aclrtQueryEvent", older), 0));
        });
        assert_eq!(a.stand_in.report().notes, ["QUERIED-ELSEWHERE 1"]);
        a.broken(&["EVT-7", "EVT-7"]);
    }

    evt_8_events_are_limited (ready) |a| {
        a.limit(2, 100);
        let stream = a.stream();
        let older = [(); 3].map(|()| made!(a, "aclrtCreateEvent"));
        says!(a, 0, "aclrtRecordEvent", older[0], stream);
        // It has its resource already.
        a.wait(older[0]);
        says!(a, 0, "aclrtRecordEvent", older[0], stream);
        says!(a, 0, "aclrtRecordEvent", older[1], stream);
        says!(a, 207_007, "aclrtRecordEvent", older[2], stream);
        a.broken(&["EVT-8"]);
        // Where creating takes the resource, creating fails, which is no violation.
        let mut at = 0_usize;
        says!(a, 207_007, "aclrtCreateEventWithFlag", &raw mut at, SYNC);
        assert_eq!(made!(a, "aclrtGetEventAvailNum") & 0xFFFF_FFFF, 0);
        // Neither events that no stream can wait for, nor those of the newer kind.
        made!(a, "aclrtCreateEventWithFlag", PROGRESS);
        let newer = a.event();
        says!(a, 0, "aclrtRecordEvent", newer, stream);
        // Another device has its own.
        says!(a, 0, "aclrtSetDevice", 1);
        made!(a, "aclrtCreateEventWithFlag", SYNC);
        says!(a, 0, "aclrtSetDevice", 0);
        a.wait(older[1]);
        says!(a, 0, "aclrtDestroyEvent", older[1]);
        says!(a, 0, "aclrtRecordEvent", older[2], stream);
        a.broken(&["EVT-8"]);
    }
}

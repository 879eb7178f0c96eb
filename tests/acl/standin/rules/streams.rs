//! Streams, and what they have the CPU do.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::doubles::ascendcl::{Acl, acl, made, says};

/// Counts its calls in its argument.
unsafe extern "C" fn count(data: *mut c_void) {
    // SAFETY: each test gives it a counter that outlives the stream. Relaxed: on the thread that looks, too.
    unsafe { &*data.cast::<AtomicUsize>() }.fetch_add(1, Ordering::Relaxed);
}

/// Makes a call, which must not be.
unsafe extern "C" fn calls(data: *mut c_void) {
    // SAFETY: each test gives it the library, which outlives the stream.
    let acl = unsafe { &*data.cast::<Acl>() };
    assert_eq!(acl!(acl, "aclrtSynchronizeDevice"), 507_000);
}

unsafe extern "C" {
    fn pthread_self() -> usize;
}

rules! {
    STREAMS:

    str_1_a_stream_that_is_gone (ready) |a| {
        let stream = a.stream();
        says!(a, 0, "aclrtDestroyStream", stream);
        says!(a, 107_017, "aclrtDestroyStream", stream);
        says!(a, 107_017, "aclrtSynchronizeStream", stream);
        says!(a, 107_017, "aclrtRecordEvent", a.event(), stream);
        a.broken(&["STR-1"; 3]);
    }

    str_2_a_stream_with_work (ready) |a| {
        let (stream, memory, mut host) = (a.stream(), a.memory(64), a.host(256));
        host.fill(7);
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtDestroyStream", stream);
        a.broken(&["STR-2"]);
        assert_eq!(a.read(memory, 64), [7; 64]);
        // A forced destruction runs none of it.
        let stream = a.stream();
        says!(a, 0, "aclrtMemsetAsync", memory, 64, 9, 64, stream);
        says!(a, 0, "aclrtDestroyStreamForce", stream);
        assert_eq!(a.read(memory, 64), [7; 64]);
        a.broken(&["STR-2", "STR-2"]);
        // Events alone are not work that a call waits for.
        let stream = a.stream();
        says!(a, 0, "aclrtRecordEvent", a.event(), stream);
        says!(a, 0, "aclrtDestroyStream", stream);
        a.broken(&["STR-2", "STR-2"]);
    }

    str_3_a_stream_that_waits_for_a_model (ready) |a| {
        made!(a, "aclrtCreateStreamWithConfig", 0, 3);
        a.broken(&[]);
        made!(a, "aclrtCreateStreamWithConfig", 0, 4);
        made!(a, "aclrtCreateStreamWithConfig", 0, 0x20);
        a.broken(&["STR-3", "STR-3"]);
    }

    host_1_no_calls_from_host_functions (ready) |a| {
        let (stream, ran) = (a.stream(), AtomicUsize::new(0));
        let count = count as *const c_void;
        says!(a, 0, "aclrtLaunchHostFunc", stream, count, &raw const ran);
        assert_eq!(ran.load(Ordering::Relaxed), 0, "it is in the stream's order");
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert_eq!(ran.load(Ordering::Relaxed), 1);
        a.broken(&[]);
        says!(a, 0, "aclrtLaunchHostFunc", stream, calls as *const c_void, &raw const *a);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        a.broken(&["HOST-1"]);
    }

    host_2_callbacks_need_a_thread (ready) |a| {
        let (stream, ran) = (a.stream(), AtomicUsize::new(0));
        let count = count as *const c_void;
        // SAFETY: always there.
        let this = unsafe { pthread_self() };
        says!(a, 107_015, "aclrtLaunchCallback", count, &raw const ran, 0, stream);
        says!(a, 107_012, "aclrtProcessReport", 1);
        says!(a, 107_012, "aclrtUnSubscribeReport", this, stream);
        a.broken(&["HOST-2"; 3]);
        says!(a, 0, "aclrtSubscribeReport", this, stream);
        says!(a, 107_000, "aclrtSubscribeReport", this, stream);
        a.broken(&["HOST-2"; 4]);
        says!(a, 507_012, "aclrtProcessReport", 1);
        says!(a, 0, "aclrtLaunchCallback", count, &raw const ran, 1, stream);
        says!(a, 0, "aclrtProcessReport", 1);
        assert_eq!(ran.load(Ordering::Relaxed), 1);
        says!(a, 0, "aclrtUnSubscribeReport", this, stream);
        a.broken(&["HOST-2"; 4]);
    }
}

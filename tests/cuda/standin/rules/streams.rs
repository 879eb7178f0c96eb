//! Rules of the stand-in about contexts, captures and graphs.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::standin::probe::Driver;

/// A destructor: counts in what it is given, if anything.
unsafe extern "C" fn counts(gone: *mut c_void) {
    // SAFETY: the tests' word: null, or a counter that outlives this.
    if let Some(gone) = unsafe { gone.cast::<AtomicUsize>().as_ref() } {
        gone.fetch_add(1, Ordering::SeqCst);
    }
}

impl Driver {
    /// A graph of what is captured meanwhile.
    fn graph(&self, body: impl FnOnce(usize)) -> usize {
        let (stream, mut graph) = (self.stream(), 0_usize);
        assert_eq!(call!(self, "cuStreamBeginCapture_v2", stream, 2), 0);
        body(stream);
        assert_eq!(call!(self, "cuStreamEndCapture", stream, &raw mut graph), 0);
        graph
    }
}

rules! {
    STREAMS:

    ctx_6_only_contexts_of_ones_own_are_destroyed (ready) |d| {
        if !d.has_devices(2) {
            return;
        }
        let primary = made!(d, "cuCtxGetCurrent");
        says!(d, 201, "cuCtxDestroy_v2", primary);
        // A new one is current at once, and of the device named.
        let context = made!(d, "cuCtxCreate_v2", 0, 1);
        assert_eq!(made!(d, "cuCtxGetCurrent"), context);
        let (mut device, mut flags, mut active) = (0_i32, 9_u32, 9_i32);
        says!(d, 0, "cuCtxGetDevice", &raw mut device);
        says!(d, 0, "cuDevicePrimaryCtxGetState", 1, &raw mut flags, &raw mut active);
        assert_eq!((device as usize, active), (d.ordinal(1), 0), "it is not the primary one");
        says!(d, 0, "cuDevicePrimaryCtxGetState", 0, &raw mut flags, &raw mut active);
        assert_eq!(active, 1);
        let (stream, mut of) = (d.stream(), 0_usize);
        says!(d, 0, "cuStreamGetCtx", stream, &raw mut of);
        assert_eq!(of, context);
        says!(d, 0, "cuCtxDestroy_v2", context);
        assert_eq!(made!(d, "cuCtxGetCurrent"), primary);
        says!(d, 201, "cuCtxDestroy_v2", context);
        d.broken(&["CTX-6", "CTX-6"]);
    }

    str_3_each_thread_has_a_default_stream_of_its_own (ready) |d| {
        let context = made!(d, "cuCtxGetCurrent");
        let id = |handle: usize| {
            let mut id = 0_u64;
            says!(d, 0, "cuStreamGetId", handle, &raw mut id);
            id
        };
        let (event, memory, bytes) = (d.event(), d.memory(64), [1; 64]);
        let (mine, legacy) = (id(2), id(1));
        let theirs = std::thread::scope(|scope| {
            let on_another = scope.spawn(|| {
                says!(d, 0, "cuCtxPushCurrent_v2", context);
                d.uploads(0, memory, &bytes, 2);
                says!(d, 0, "cuEventRecord", event, 2);
                assert_eq!(id(2), id(2));
                id(2)
            });
            on_another.join().expect("the thread's checks")
        });
        assert!(mine != theirs && mine != legacy && theirs != legacy);
        assert_eq!(id(2), mine, "it stays the thread's own");
        // The event completes on any thread, after its stream's thread has ended.
        says!(d, 0, "cuEventSynchronize", event);
        // A capture of this thread's stream is none of another thread's.
        says!(d, 0, "cuStreamBeginCapture_v2", 2, 2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut status = 9_u32;
                says!(d, 0, "cuCtxPushCurrent_v2", context);
                says!(d, 0, "cuStreamIsCapturing", 2, &raw mut status);
                assert_eq!(status, 0);
            });
        });
        let (mut status, mut graph) = (9_u32, 0_usize);
        says!(d, 0, "cuStreamIsCapturing", 2, &raw mut status);
        assert_eq!(status, 1);
        says!(d, 0, "cuStreamEndCapture", 2, &raw mut graph);
        d.broken(&[]);
    }

    cap_5_the_legacy_stream_waits_for_blocking_ones (ready) |d| {
        let (blocking, other, memory, bytes) = (made!(d, "cuStreamCreate", 0), d.stream(), d.memory(64), [1; 64]);
        let mut status = 9_u32;
        says!(d, 0, "cuStreamBeginCapture_v2", other, 2);
        d.uploads(0, memory, &bytes, 0);
        says!(d, 0, "cuStreamSynchronize", 1);
        says!(d, 0, "cuStreamBeginCapture_v2", blocking, 2);
        says!(d, 906, "cuStreamIsCapturing", 0, &raw mut status);
        d.broken(&[]);
        d.uploads(906, memory, &bytes, 1);
        says!(d, 0, "cuStreamIsCapturing", blocking, &raw mut status);
        assert_eq!(status, 2, "spoiled");
        says!(d, 0, "cuStreamIsCapturing", other, &raw mut status);
        assert_eq!(status, 1);
        says!(d, 906, "cuStreamBeginCapture_v2", 0, 2);
        d.broken(&["CAP-5", "CAP-5"]);
    }

    cap_6_a_capture_waits_for_nothing_of_outside (ready) |d| {
        let (stream, other, event) = (d.stream(), d.stream(), d.event());
        says!(d, 0, "cuEventRecord", event, other);
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 2);
        says!(d, 905, "cuStreamWaitEvent", stream, event, 0);
        d.broken(&["CAP-6"]);
    }

    gra_1_destructors_call_nothing (ready) |d| {
        static CALL: AtomicUsize = AtomicUsize::new(0);
        static ANSWER: AtomicU32 = AtomicU32::new(0);
        unsafe extern "C" fn destroy(_: *mut c_void) {
            let mut count = 0;
            // SAFETY: the address of that very function.
            let ask = unsafe {
                std::mem::transmute::<usize, unsafe extern "C" fn(*mut i32) -> u32>(CALL.load(Ordering::SeqCst))
            };
            // SAFETY: a place for a number.
            ANSWER.store(unsafe { ask(&raw mut count) }, Ordering::SeqCst);
        }
        // SAFETY: its type.
        let count = unsafe { d.stand_in.get::<unsafe extern "C" fn(*mut i32) -> u32>("cuDeviceGetCount") };
        CALL.store(count as usize, Ordering::SeqCst);
        let object = made!(d, "cuUserObjectCreate", 0, destroy as *const (), 1, 1);
        says!(d, 0, "cuUserObjectRelease", object, 1);
        while ANSWER.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(ANSWER.load(Ordering::SeqCst), 800);
        d.broken(&["GRA-1"]);
    }

    gra_2_user_objects_are_made_whole (ready) |d| {
        let mut object = 0_usize;
        says!(d, 1, "cuUserObjectCreate", &raw mut object, 0, 0, 1, 1);
        says!(d, 1, "cuUserObjectCreate", &raw mut object, 0, counts as *const (), 0, 1);
        says!(d, 1, "cuUserObjectCreate", &raw mut object, 0, counts as *const (), 1, 0);
        d.broken(&["GRA-2", "GRA-2", "GRA-2"]);
    }

    gra_3_graphs_that_are_gone (ready) |d| {
        let (graph, object) = (d.graph(|_| ()), made!(d, "cuUserObjectCreate", 0, counts as *const (), 1, 1));
        let executable = made!(d, "cuGraphInstantiateWithFlags", graph, 0);
        says!(d, 0, "cuGraphDestroy", graph);
        says!(d, 1, "cuGraphDestroy", graph);
        says!(d, 1, "cuGraphRetainUserObject", graph, object, 1, 0);
        says!(d, 0, "cuGraphExecDestroy", executable);
        says!(d, 1, "cuGraphExecDestroy", executable);
        says!(d, 1, "cuGraphLaunch", executable, d.stream());
        says!(d, 0, "cuUserObjectRelease", object, 1);
        says!(d, 1, "cuUserObjectRelease", object, 1);
        d.broken(&["GRA-3"; 5]);
    }

    gra_4_references_are_counted (ready) |d| {
        let object = made!(d, "cuUserObjectCreate", 0, counts as *const (), 2, 1);
        says!(d, 1, "cuUserObjectRelease", object, 3);
        says!(d, 0, "cuUserObjectRelease", object, 2);
        let stream = d.stream();
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 2);
        let (mut status, mut graph) = (0_u32, 0_usize);
        let out = (&raw mut status, &raw mut graph);
        says!(d, 0, "cuStreamGetCaptureInfo_v3", stream, out.0, 0, out.1, 0, 0, 0);
        says!(d, 1, "cuGraphDestroy", graph);
        d.broken(&["GRA-4", "GRA-4"]);
    }
}

//! The stand-in libcuda keeps its rules about contexts, streams, graphs, addresses and memory in stream order: each is
//! broken on purpose, and its id is seen. The other rules are in `standin.rs`, which also tries them on a real driver.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "calling the stand-in")]

mod doubles;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use doubles::StandIn;

/// One test at a time has the stand-in, as if just loaded.
struct Driver {
    stand_in: StandIn,
    _alone: MutexGuard<'static, ()>,
}

/// Calls an entry point whose arguments are all numbers of the size of a pointer, or are passed like one.
macro_rules! call {
    ($driver:expr, $name:literal $(, $argument:expr)*) => {{
        // SAFETY: on the machines that pinpool supports integer and pointer arguments are passed alike, each in a
        // register of its own, and what the tests point at is valid.
        unsafe {
            let function = $driver.stand_in.get::<unsafe extern "C" fn($(word!($argument)),*) -> u32>($name);
            function($($argument as usize),*)
        }
    }};
}

/// A word for each argument.
macro_rules! word {
    ($argument:expr) => {
        usize
    };
}

/// The same for a call that writes one word to its first argument.
macro_rules! made {
    ($driver:expr, $name:literal $(, $argument:expr)*) => {{
        let mut made = 0_usize;
        assert_eq!(call!($driver, $name, &raw mut made $(, $argument)*), 0, $name);
        made
    }};
}

const PAGE: usize = 4096;

/// A destructor: counts in what it is given, if anything.
unsafe extern "C" fn counts(gone: *mut c_void) {
    // SAFETY: the tests' word: null, or a counter that outlives this.
    if let Some(gone) = unsafe { gone.cast::<AtomicUsize>().as_ref() } {
        gone.fetch_add(1, Ordering::SeqCst);
    }
}

impl Driver {
    /// `None`: nothing to build it with.
    fn bare() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let Some(library) = doubles::library() else {
            println!("skipped: there is no cargo to build the stand-in with");
            return None;
        };
        let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let stand_in = StandIn::load(library).expect("it is the stand-in");
        stand_in.reset();
        Some(Self { stand_in, _alone: alone })
    }

    /// Initialised, and device 0's primary context current.
    fn ready() -> Option<Self> {
        let driver = Self::bare()?;
        assert_eq!(call!(driver, "cuInit", 0), 0);
        driver.current(0);
        Some(driver)
    }

    fn current(&self, device: usize) -> usize {
        let context = made!(self, "cuDevicePrimaryCtxRetain", device);
        assert_eq!(call!(self, "cuCtxSetCurrent", context), 0);
        context
    }

    fn stream(&self) -> usize {
        made!(self, "cuStreamCreate", 1)
    }

    fn event(&self) -> usize {
        made!(self, "cuEventCreate", 2)
    }

    fn memory(&self, len: usize) -> usize {
        made!(self, "cuMemAlloc_v2", len)
    }

    fn register(&self, bytes: &mut [u8]) -> u32 {
        call!(self, "cuMemHostRegister_v2", bytes.as_mut_ptr(), bytes.len(), 1)
    }

    fn upload(&self, to: usize, bytes: &[u8], stream: usize) -> u32 {
        call!(self, "cuMemcpyHtoDAsync_v2", to, bytes.as_ptr(), bytes.len(), stream)
    }

    fn download(&self, bytes: &mut [u8], from: usize, stream: usize) -> u32 {
        call!(self, "cuMemcpyDtoHAsync_v2", bytes.as_mut_ptr(), from, bytes.len(), stream)
    }

    /// Status, number and graph of a stream's capture.
    fn capture(&self, stream: usize) -> (u32, u64, usize) {
        let (mut status, mut id, mut graph) = (0_u32, 0_u64, 0_usize);
        // SAFETY: its type; null where nothing is wanted.
        unsafe {
            type Ask =
                unsafe extern "C" fn(usize, *mut u32, *mut u64, *mut usize, usize, usize, usize) -> u32;
            let ask = self.stand_in.get::<Ask>("cuStreamGetCaptureInfo_v3");
            assert_eq!(ask(stream, &raw mut status, &raw mut id, &raw mut graph, 0, 0, 0), 0);
        }
        (status, id, graph)
    }

    /// A graph of what is captured meanwhile.
    fn graph(&self, body: impl FnOnce(usize)) -> usize {
        let (stream, mut graph) = (self.stream(), 0_usize);
        assert_eq!(call!(self, "cuStreamBeginCapture_v2", stream, 2), 0);
        body(stream);
        assert_eq!(call!(self, "cuStreamEndCapture", stream, &raw mut graph), 0);
        graph
    }

    /// Exactly these rules were broken, in this order.
    fn broken(&self, ids: &[&str]) {
        let found = self.stand_in.report().violations;
        let found: Vec<&str> = found.iter().filter_map(|v| v.split(' ').next()).collect();
        assert_eq!(found, ids);
    }
}

/// A test that has a driver, or is skipped.
macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident ($make:ident) |$driver:ident| $body:block)*) => {
        $($(#[$doc])* #[test] fn $name() {
            let Some($driver) = Driver::$make() else { return };
            $body
        })*
    };
}

rules! {

    ctx_6_only_contexts_of_ones_own_are_destroyed (ready) |d| {
        let primary = made!(d, "cuCtxGetCurrent");
        assert_eq!(call!(d, "cuCtxDestroy_v2", primary), 201);
        // A new one is current at once, and of the device named.
        let context = made!(d, "cuCtxCreate_v2", 0, 1);
        assert_eq!(made!(d, "cuCtxGetCurrent"), context);
        let (mut device, mut flags, mut active) = (0_i32, 9_u32, 9_i32);
        assert_eq!(call!(d, "cuCtxGetDevice", &raw mut device), 0);
        assert_eq!(call!(d, "cuDevicePrimaryCtxGetState", 1, &raw mut flags, &raw mut active), 0);
        assert_eq!((device, active), (1, 0), "it is not the primary one");
        assert_eq!(call!(d, "cuDevicePrimaryCtxGetState", 0, &raw mut flags, &raw mut active), 0);
        assert_eq!(active, 1);
        let (stream, mut of) = (d.stream(), 0_usize);
        assert_eq!(call!(d, "cuStreamGetCtx", stream, &raw mut of), 0);
        assert_eq!(of, context);
        assert_eq!(call!(d, "cuCtxDestroy_v2", context), 0);
        assert_eq!(made!(d, "cuCtxGetCurrent"), primary);
        assert_eq!(call!(d, "cuCtxDestroy_v2", context), 201);
        d.broken(&["CTX-6", "CTX-6"]);
    }

    cap_5_the_legacy_stream_waits_for_blocking_ones (ready) |d| {
        let (blocking, other, memory, bytes) = (made!(d, "cuStreamCreate", 0), d.stream(), d.memory(64), [1; 64]);
        let mut status = 9_u32;
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", other, 2), 0);
        assert_eq!(d.upload(memory, &bytes, 0), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", 1), 0);
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", blocking, 2), 0);
        assert_eq!(call!(d, "cuStreamIsCapturing", 0, &raw mut status), 906);
        d.broken(&[]);
        assert_eq!(d.upload(memory, &bytes, 1), 906);
        assert_eq!(call!(d, "cuStreamIsCapturing", blocking, &raw mut status), 0);
        assert_eq!(status, 2, "spoiled");
        assert_eq!(call!(d, "cuStreamIsCapturing", other, &raw mut status), 0);
        assert_eq!(status, 1);
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", 0, 2), 900);
        d.broken(&["CAP-5"]);
    }

    cap_6_a_capture_waits_for_nothing_of_outside (ready) |d| {
        let (stream, other, event) = (d.stream(), d.stream(), d.event());
        assert_eq!(call!(d, "cuEventRecord", event, other), 0);
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", stream, 2), 0);
        assert_eq!(call!(d, "cuStreamWaitEvent", stream, event, 0), 905);
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
        let count = unsafe { *d.stand_in.get::<unsafe extern "C" fn(*mut i32) -> u32>("cuDeviceGetCount") };
        CALL.store(count as usize, Ordering::SeqCst);
        let object = made!(d, "cuUserObjectCreate", 0, destroy as *const (), 1, 1);
        assert_eq!(call!(d, "cuUserObjectRelease", object, 1), 0);
        while ANSWER.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(ANSWER.load(Ordering::SeqCst), 800);
        d.broken(&["GRA-1"]);
    }

    gra_2_user_objects_are_made_whole (ready) |d| {
        let mut object = 0_usize;
        assert_eq!(call!(d, "cuUserObjectCreate", &raw mut object, 0, 0, 1, 1), 1);
        assert_eq!(call!(d, "cuUserObjectCreate", &raw mut object, 0, counts as *const (), 0, 1), 1);
        assert_eq!(call!(d, "cuUserObjectCreate", &raw mut object, 0, counts as *const (), 1, 0), 1);
        d.broken(&["GRA-2", "GRA-2", "GRA-2"]);
    }

    gra_3_graphs_that_are_gone (ready) |d| {
        let (graph, object) = (d.graph(|_| ()), made!(d, "cuUserObjectCreate", 0, counts as *const (), 1, 1));
        let executable = made!(d, "cuGraphInstantiateWithFlags", graph, 0);
        assert_eq!(call!(d, "cuGraphDestroy", graph), 0);
        assert_eq!(call!(d, "cuGraphDestroy", graph), 1);
        assert_eq!(call!(d, "cuGraphRetainUserObject", graph, object, 1, 0), 1);
        assert_eq!(call!(d, "cuGraphExecDestroy", executable), 0);
        assert_eq!(call!(d, "cuGraphExecDestroy", executable), 1);
        assert_eq!(call!(d, "cuGraphLaunch", executable, d.stream()), 1);
        assert_eq!(call!(d, "cuUserObjectRelease", object, 1), 0);
        assert_eq!(call!(d, "cuUserObjectRelease", object, 1), 1);
        d.broken(&["GRA-3"; 5]);
    }

    gra_4_references_are_counted (ready) |d| {
        let object = made!(d, "cuUserObjectCreate", 0, counts as *const (), 2, 1);
        assert_eq!(call!(d, "cuUserObjectRelease", object, 3), 1);
        assert_eq!(call!(d, "cuUserObjectRelease", object, 2), 0);
        let stream = d.stream();
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", stream, 2), 0);
        let (_, _, graph) = d.capture(stream);
        assert_eq!(call!(d, "cuGraphDestroy", graph), 1);
        d.broken(&["GRA-4", "GRA-4"]);
    }

    a_graph_copies_when_it_is_launched_and_keeps_what_it_was_given (ready) |d| {
        let (stream, memory) = (d.stream(), d.memory(64));
        let (mut sent, mut back, gone) = ([1; 64], [0; 64], AtomicUsize::new(0));
        let graph = d.graph(|captured| {
            assert_eq!(d.upload(memory, &sent, captured), 0);
            let (status, id, graph) = d.capture(captured);
            assert!(status == 1 && id > 0);
            let object = made!(d, "cuUserObjectCreate", &raw const gone, counts as *const (), 1, 1);
            // A reference of its own, and then ours as well.
            assert_eq!(call!(d, "cuGraphRetainUserObject", graph, object, 1, 0), 0);
            assert_eq!(call!(d, "cuGraphRetainUserObject", graph, object, 1, 1), 0);
        });
        let executable = made!(d, "cuGraphInstantiateWithFlags", graph, 0);
        assert_eq!(call!(d, "cuGraphDestroy", graph), 0);
        for round in 2..5 {
            sent.fill(round);
            assert_eq!(call!(d, "cuGraphLaunch", executable, stream), 0);
            assert_eq!(d.download(&mut back, memory, stream), 0);
            assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
            assert_eq!(back, [round; 64]);
        }
        // Launched, not run yet, and nobody else has it.
        assert_eq!(call!(d, "cuGraphLaunch", executable, stream), 0);
        assert_eq!(call!(d, "cuGraphExecDestroy", executable), 0);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(gone.load(Ordering::SeqCst), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        while gone.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(gone.load(Ordering::SeqCst), 1);
        d.broken(&[]);
        assert_eq!(d.stand_in.report().leaks, ["contexts 1", "streams 2", "allocations 1"]);
    }

    streams_have_numbers_and_handles_come_again (ready) |d| {
        let id = |stream: usize| {
            let mut id = 0_u64;
            assert_eq!(call!(d, "cuStreamGetId", stream, &raw mut id), 0);
            id
        };
        let (one, two) = (d.stream(), d.stream());
        let first = id(one);
        assert!(first != id(two) && id(0) == id(1) && id(0) != first);
        assert_eq!(call!(d, "cuStreamDestroy_v2", one), 0);
        assert_ne!(d.stream(), one);
        d.stand_in.reuse(true);
        let again = d.stream();
        assert!(again == one && id(again) != first);
        d.broken(&[]);
    }

}

// --- memory of others, memory in stream order, host functions ---------------------------------------------------------

/// What `cuPointerGetAttributes` writes: context, type, managed, ordinal, start, size, pool.
#[derive(Debug, Default, PartialEq)]
struct Attributes {
    context: usize,
    kind: u32,
    managed: u32,
    ordinal: i32,
    start: u64,
    size: usize,
    pool: usize,
}

impl Driver {
    fn attributes(&self, address: usize) -> Attributes {
        // The range is left as it was where there is none.
        let mut found = Attributes { start: 7, size: 7, ..Attributes::default() };
        let names = [1, 2, 8, 9, 11, 12, 17];
        let places: [*mut u8; 7] = [
            (&raw mut found.context).cast(),
            (&raw mut found.kind).cast(),
            (&raw mut found.managed).cast(),
            (&raw mut found.ordinal).cast(),
            (&raw mut found.start).cast(),
            (&raw mut found.size).cast(),
            (&raw mut found.pool).cast(),
        ];
        assert_eq!(call!(self, "cuPointerGetAttributes", 7, names.as_ptr(), places.as_ptr(), address), 0);
        found
    }

    fn pooled(&self, len: usize, stream: usize) -> usize {
        made!(self, "cuMemAllocAsync", len, stream)
    }

    fn device_malloc(&self, len: usize) -> usize {
        // SAFETY: `pointers.rs` has the signature, here and below.
        unsafe {
            self.stand_in.get::<extern "C" fn(usize, usize) -> u64>("standin_device_malloc")(0, len) as usize
        }
    }

    fn special(&self, device: usize, kind: u32, len: usize) -> usize {
        // SAFETY: as above.
        unsafe {
            self.stand_in.get::<extern "C" fn(usize, u32, usize) -> u64>("standin_memory")(device, kind, len)
                as usize
        }
    }
}

/// What attributes say where nothing is known.
fn unknown() -> Attributes {
    Attributes { ordinal: -2, start: 7, size: 7, ..Attributes::default() }
}

rules! {
    attributes_say_what_an_address_is (ready) |d| {
        let context = made!(d, "cuCtxGetCurrent");
        let (stream, memory, mut host) = (d.stream(), d.memory(1000), vec![0; PAGE]);
        assert_eq!(d.attributes(host.as_ptr() as usize), unknown());
        assert_eq!(d.register(&mut host), 0);
        let start = host.as_ptr() as u64;
        let pinned = Attributes { context, kind: 1, start, size: PAGE, ..Attributes::default() };
        assert_eq!(d.attributes(host.as_ptr() as usize + 9), pinned);
        let plain = Attributes { context, kind: 2, start: memory as u64, size: 1000, ..Attributes::default() };
        assert_eq!(d.attributes(memory + 999), plain);
        assert_eq!(d.attributes(memory + 1000), unknown());
        // Of no context: a pool's, and mapped ranges.
        let pooled = d.pooled(64, stream);
        let found = d.attributes(pooled + 1);
        assert_eq!((found.context, found.kind, found.start, found.size), (0, 2, pooled as u64, 64));
        assert_ne!(found.pool, 0);
        assert_eq!(call!(d, "cuMemFreeAsync", pooled, stream), 0);
        assert_eq!(d.attributes(pooled), unknown(), "from the call on");
        let mapped = d.special(0, 2, 64);
        assert_eq!((d.attributes(mapped).context, d.attributes(mapped).kind), (0, 2));
        assert_eq!(d.attributes(d.special(0, 1, 64)).managed, 1);
        let foreign = d.attributes(d.special(0, 0, 64)).context;
        assert!(foreign != 0 && foreign != context);
        assert_eq!(d.attributes(d.device_malloc(64)), unknown());
        assert_eq!(call!(d, "cuMemFree_v2", memory), 0);
        assert_eq!(d.attributes(memory), unknown());
        d.current(1);
        assert_eq!(d.attributes(d.memory(8)).ordinal, 1);
        d.broken(&[]);
    }

    ptr_1_the_device_heap_is_not_copied (ready) |d| {
        let (stream, bytes, mut back) = (d.stream(), [1; 64], [0; 64]);
        let heap = d.device_malloc(64);
        assert_eq!(d.upload(heap, &bytes, stream), 1);
        assert_eq!(d.download(&mut back[..1], heap + 63, stream), 1);
        d.broken(&["PTR-1", "PTR-1"]);
    }

    ptr_2_attributes_need_names_and_places (ready) |d| {
        let (names, mut value) = ([99], 0_usize);
        let place = [&raw mut value];
        assert_eq!(call!(d, "cuPointerGetAttributes", 1, names.as_ptr(), place.as_ptr(), 64), 1);
        assert_eq!(call!(d, "cuPointerGetAttributes", 1, 0, place.as_ptr(), 64), 1);
        d.broken(&["PTR-2", "PTR-2"]);
    }

    heap_1_the_heaps_limit_comes_first (ready) |d| {
        assert_eq!(made!(d, "cuCtxGetLimit", 2), 8 << 20);
        assert_eq!(call!(d, "cuCtxSetLimit", 2, 64 << 20), 0);
        assert_eq!(made!(d, "cuCtxGetLimit", 2), 64 << 20);
        d.device_malloc(64);
        assert_eq!(call!(d, "cuCtxSetLimit", 2, 16 << 20), 1);
        assert_eq!(made!(d, "cuCtxGetLimit", 2), 64 << 20);
        d.broken(&["HEAP-1"]);
        // Another device has a heap of its own.
        d.current(1);
        assert_eq!(call!(d, "cuCtxSetLimit", 2, 16 << 20), 0);
    }

    pool_1_memory_begins_in_its_streams_order (ready) |d| {
        let (home, other, event, bytes) = (d.stream(), d.stream(), d.event(), [1; 64]);
        // Behind an event of its stream it is there.
        let memory = d.pooled(64, home);
        assert_eq!(call!(d, "cuEventRecord", event, home), 0);
        assert_eq!(call!(d, "cuStreamWaitEvent", other, event, 0), 0);
        assert_eq!(d.upload(memory, &bytes, other), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", other), 0);
        d.broken(&[]);
        let memory = d.pooled(64, home);
        assert_eq!(d.upload(memory, &bytes, other), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", other), 0);
        d.broken(&["POOL-1"]);
    }

    pool_2_memory_ends_with_the_call_that_frees_it (ready) |d| {
        let (stream, bytes) = (d.stream(), [1; 64]);
        let memory = d.pooled(64, stream);
        assert_eq!(call!(d, "cuMemFreeAsync", memory, stream), 0);
        assert_eq!(d.upload(memory, &bytes, stream), 1);
        d.broken(&["POOL-2"]);
    }

    pool_3_only_what_was_allocated_so_is_freed_so (ready) |d| {
        let (stream, plain) = (d.stream(), d.memory(64));
        let memory = d.pooled(64, stream);
        assert_eq!(call!(d, "cuMemFreeAsync", memory + 1, stream), 1);
        assert_eq!(call!(d, "cuMemFreeAsync", plain, stream), 1);
        assert_eq!(call!(d, "cuMemFreeAsync", memory, stream), 0);
        assert_eq!(call!(d, "cuMemFreeAsync", memory, stream), 1);
        d.broken(&["POOL-3"; 3]);
        // It goes when the stream comes to it.
        assert_eq!(d.stand_in.report().leaks, ["contexts 1", "streams 1", "allocations 2"]);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        assert_eq!(d.stand_in.report().leaks, ["contexts 1", "streams 1", "allocations 1"]);
    }

    pool_4_memory_freed_under_another_streams_copy (ready) |d| {
        let (home, other, bytes) = (d.stream(), d.stream(), [1; 64]);
        let memory = d.pooled(64, home);
        assert_eq!(call!(d, "cuStreamSynchronize", home), 0);
        assert_eq!(d.upload(memory, &bytes, other), 0);
        assert_eq!(call!(d, "cuMemFreeAsync", memory, home), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", home), 0);
        d.broken(&["POOL-4"]);
    }

    host_1_host_functions_make_no_calls (ready) |d| {
        static ASKED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        extern "C" fn asks(query: *mut std::ffi::c_void) {
            // SAFETY: the test passes the address of the call.
            let query: extern "C" fn(usize) -> u32 = unsafe { std::mem::transmute(query) };
            ASKED.store(query(0), std::sync::atomic::Ordering::Relaxed);
        }
        let stream = d.stream();
        // SAFETY: as for all of them.
        let query = unsafe { *d.stand_in.get::<extern "C" fn(usize) -> u32>("cuEventQuery") };
        let function: extern "C" fn(*mut std::ffi::c_void) = asks;
        assert_eq!(call!(d, "cuLaunchHostFunc", stream, function, query), 0);
        assert_eq!(ASKED.load(std::sync::atomic::Ordering::Relaxed), 0, "in the stream's order, which is late");
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        assert_eq!(ASKED.load(std::sync::atomic::Ordering::Relaxed), 800);
        d.broken(&["HOST-1"]);
    }

    a_device_says_whether_it_has_pools (ready) |d| {
        let mut value = 0_i32;
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 115, 0), 0);
        assert_eq!(value, 1);
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 115, 7), 101);
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 9999, 0), 1);
    }
}

//! The stand-in libcuda keeps its rules: each is broken on purpose, and its id is seen.
//!
//! A double shares its author's misreadings, so what it does is written down here call by call, without pinpool in
//! between: the same calls can be tried on a real driver. The last tests show that copies are late and that a call which
//! is told to fail does.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "calling the stand-in")]

mod doubles;

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

    /// Asks until it is ready, and says how often it was not.
    fn wait(&self, event: usize) -> usize {
        for asked in 0..100 {
            match call!(self, "cuEventQuery", event) {
                0 => return asked,
                600 => {}
                code => panic!("cuEventQuery failed with {code}"),
            }
        }
        panic!("never ready");
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
    init_1_nothing_before_init (bare) |d| {
        let mut count = 0;
        assert_eq!(call!(d, "cuDeviceGetCount", &raw mut count), 3);
        d.broken(&["INIT-1"]);
        assert_eq!(call!(d, "cuInit", 0), 0);
        assert_eq!(made!(d, "cuDeviceGetCount"), 2);
        assert_eq!(call!(d, "cuDeviceGet", &raw mut count, 2), 101);
        assert_eq!(made!(d, "cuDriverGetVersion"), 12_080);
    }

    ctx_1_a_context_must_be_current (ready) |d| {
        call!(d, "cuCtxSetCurrent", 0);
        let mut at = 0_usize;
        assert_eq!(call!(d, "cuMemAlloc_v2", &raw mut at, 1), 201);
        // And on the thread that calls, not on another one.
        d.current(0);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| call!(d, "cuMemAlloc_v2", &raw mut at, 1));
            assert_eq!(other.join().unwrap(), 201);
        });
        d.broken(&["CTX-1", "CTX-1"]);
        d.memory(1);
    }

    ctx_2_a_context_that_is_gone (ready) |d| {
        let context = made!(d, "cuCtxGetCurrent");
        assert_eq!(call!(d, "cuDevicePrimaryCtxRelease_v2", 0), 0);
        let mut at = 0_usize;
        assert_eq!(call!(d, "cuMemAlloc_v2", &raw mut at, 1), 709);
        assert_eq!(call!(d, "cuCtxPushCurrent_v2", context), 709);
        d.broken(&["CTX-2", "CTX-2"]);
        assert_ne!(d.current(0), context, "a number is never used twice");
    }

    ctx_3_pops_and_pushes_match (ready) |d| {
        let context = made!(d, "cuCtxGetCurrent");
        assert_eq!(call!(d, "cuCtxPushCurrent_v2", context), 0);
        assert_eq!(made!(d, "cuCtxPopCurrent_v2"), context);
        assert_eq!(made!(d, "cuCtxPopCurrent_v2"), context);
        let mut popped = 0_usize;
        assert_eq!(call!(d, "cuCtxPopCurrent_v2", &raw mut popped), 201);
        d.broken(&["CTX-3"]);
    }

    ctx_4_a_release_for_each_retain (ready) |d| {
        assert_eq!(call!(d, "cuDevicePrimaryCtxRelease_v2", 0), 0);
        assert_eq!(call!(d, "cuDevicePrimaryCtxRelease_v2", 0), 201);
        d.broken(&["CTX-4"]);
    }

    ctx_5_contexts_are_not_mixed (ready) |d| {
        let (stream, event, memory) = (d.stream(), d.event(), d.memory(64));
        d.current(1);
        assert_eq!(call!(d, "cuEventRecord", event, d.stream()), 400);
        assert_eq!(call!(d, "cuEventRecord", d.event(), stream), 400);
        assert_eq!(d.upload(memory, &[0; 64], d.stream()), 1);
        d.broken(&["CTX-5", "CTX-5", "CTX-5"]);
    }

    str_1_a_stream_that_is_gone (ready) |d| {
        let stream = d.stream();
        assert_eq!(call!(d, "cuStreamDestroy_v2", stream), 0);
        assert_eq!(call!(d, "cuStreamDestroy_v2", stream), 400);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 400);
        d.broken(&["STR-1", "STR-1"]);
    }

    str_2_a_stream_with_work (ready) |d| {
        let (stream, memory, bytes) = (d.stream(), d.memory(64), [7; 64]);
        assert_eq!(d.upload(memory, &bytes, stream), 0);
        assert_eq!(call!(d, "cuStreamDestroy_v2", stream), 0);
        d.broken(&["STR-2"]);
    }

    evt_1_an_event_that_is_gone (ready) |d| {
        let event = d.event();
        assert_eq!(call!(d, "cuEventDestroy_v2", event), 0);
        assert_eq!(call!(d, "cuEventQuery", event), 400);
        assert_eq!(call!(d, "cuEventDestroy_v2", event), 400);
        d.broken(&["EVT-1", "EVT-1"]);
    }

    evt_2_an_event_never_recorded_asks_as_complete (ready) |d| {
        assert_eq!(call!(d, "cuEventQuery", d.event()), 0);
        d.broken(&["EVT-2"]);
    }

    evt_3_an_event_recorded_again_too_early (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        d.wait(event);
        // Seen complete: that is what recording again is for.
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        d.broken(&[]);
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        d.broken(&["EVT-3"]);
    }

    evt_4_an_event_destroyed_too_early (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        assert_eq!(call!(d, "cuEventDestroy_v2", event), 0);
        d.broken(&["EVT-4"]);
    }

    mem_1_registrations_do_not_overlap (ready) |d| {
        let mut bytes = vec![0; 4 * PAGE];
        assert_eq!(d.register(&mut bytes[PAGE..3 * PAGE]), 0);
        assert_eq!(d.register(&mut bytes[..PAGE]), 0);
        assert_eq!(d.register(&mut bytes[2 * PAGE..]), 712);
        assert_eq!(d.register(&mut bytes), 712);
        d.broken(&["MEM-1", "MEM-1"]);
    }

    mem_2_only_what_is_registered_is_unregistered (ready) |d| {
        let mut bytes = vec![0; 2 * PAGE];
        assert_eq!(d.register(&mut bytes), 0);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes[PAGE..].as_ptr()), 713);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_ptr()), 0);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_ptr()), 713);
        d.broken(&["MEM-2", "MEM-2"]);
    }

    mem_3_nothing_is_not_registered (ready) |d| {
        assert_eq!(call!(d, "cuMemHostRegister_v2", 0, 4096, 1), 1);
        assert_eq!(call!(d, "cuMemHostRegister_v2", 4096, 0, 1), 1);
        assert_eq!(call!(d, "cuMemHostRegister_v2", 4096, usize::MAX, 1), 1);
        d.broken(&["MEM-3", "MEM-3", "MEM-3"]);
    }

    mem_4_memory_unregistered_too_early (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(PAGE), vec![1; PAGE]);
        assert_eq!(d.register(&mut bytes), 0);
        assert_eq!(d.upload(memory, &bytes, stream), 0);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_ptr()), 0);
        d.broken(&["MEM-4"]);
    }

    mem_5_memory_registered_in_part (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(2 * PAGE), vec![1; 2 * PAGE]);
        assert_eq!(d.register(&mut bytes[..PAGE]), 0);
        assert_eq!(d.upload(memory, &bytes, stream), 1);
        d.broken(&["MEM-5"]);
        // Registered not at all is another matter: slow, allowed and counted.
        assert_eq!(d.upload(memory, &bytes[PAGE..], stream), 0);
        assert_eq!(d.stand_in.report().notes, ["PAGEABLE 1"]);
        call!(d, "cuStreamSynchronize", stream);
    }

    mem_6_device_memory_has_an_end (ready) |d| {
        let (stream, memory, bytes) = (d.stream(), d.memory(PAGE), vec![1; PAGE]);
        assert_eq!(d.upload(memory + 1, &bytes, stream), 1);
        assert_eq!(d.upload(memory - 1, &bytes, stream), 1);
        assert_eq!(d.upload(0, &bytes, stream), 1);
        assert_eq!(call!(d, "cuMemcpyHtoDAsync_v2", memory, 0, 8, stream), 1);
        assert_eq!(call!(d, "cuMemcpyDtoDAsync_v2", memory, memory + 8, PAGE, stream), 1);
        d.broken(&["MEM-6"; 5]);
    }

    mem_7_only_allocations_are_freed (ready) |d| {
        let memory = d.memory(PAGE);
        assert_eq!(call!(d, "cuMemFree_v2", memory + 8), 1);
        assert_eq!(call!(d, "cuMemFree_v2", memory), 0);
        assert_eq!(call!(d, "cuMemFree_v2", memory), 1);
        d.broken(&["MEM-7", "MEM-7"]);
    }

    mem_8_memory_freed_too_early (ready) |d| {
        let (stream, memory, bytes) = (d.stream(), d.memory(PAGE), vec![1; PAGE]);
        assert_eq!(d.upload(memory, &bytes, stream), 0);
        assert_eq!(call!(d, "cuMemFree_v2", memory), 0);
        d.broken(&["MEM-8"]);
    }

    hst_1_host_memory_is_freed_from_its_start_and_once (ready) |d| {
        let (locked, managed) = (made!(d, "cuMemHostAlloc", PAGE, 0), made!(d, "cuMemAllocManaged", PAGE, 1));
        for wrong in [locked + 64, managed, locked + PAGE] {
            assert_eq!(call!(d, "cuMemFreeHost", wrong), 1);
        }
        assert_eq!(call!(d, "cuMemFreeHost", locked), 0);
        assert_eq!(call!(d, "cuMemFreeHost", locked), 1);
        d.broken(&["HST-1"; 4]);
        assert_eq!(call!(d, "cuMemFree_v2", managed), 0);
        assert_eq!(call!(d, "cuMemFree_v2", managed), 1);
        assert_eq!(made!(d, "cuMemHostAlloc", 0, 0), 0, "nothing, and no error");
        let mut at = 0_usize;
        assert_eq!(call!(d, "cuMemAllocManaged", &raw mut at, 0, 1), 1);
    }

    hst_2_host_memory_freed_too_early (ready) |d| {
        let (stream, memory) = (d.stream(), d.memory(PAGE));
        let locked = made!(d, "cuMemHostAlloc", PAGE, 1);
        assert_eq!(call!(d, "cuMemcpyHtoDAsync_v2", memory, locked, PAGE, stream), 0);
        assert_eq!(call!(d, "cuMemFreeHost", locked), 0);
        let managed = made!(d, "cuMemAllocManaged", PAGE, 1);
        assert_eq!(call!(d, "cuMemcpyHtoDAsync_v2", memory, managed, PAGE, stream), 0);
        assert_eq!(call!(d, "cuMemFree_v2", managed), 0);
        d.broken(&["HST-2", "HST-2"]);
        // They ran first.
        let mut back = vec![0; PAGE];
        assert_eq!(d.download(&mut back, memory, stream), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        assert_eq!(back, [0xA5; PAGE]);
    }

    hst_3_the_drivers_own_memory_is_not_registered (ready) |d| {
        let (locked, managed) = (made!(d, "cuMemHostAlloc", PAGE, 7), made!(d, "cuMemAllocManaged", PAGE, 1));
        assert_eq!(call!(d, "cuMemHostRegister_v2", locked, PAGE, 1), 1);
        assert_eq!(call!(d, "cuMemHostRegister_v2", managed + 100, 10, 1), 1);
        d.broken(&["HST-3", "HST-3"]);
        assert_eq!(call!(d, "cuMemHostUnregister", locked), 713);
    }

    hst_4_only_known_host_memory_has_an_address_on_the_device (ready) |d| {
        let mut bytes = vec![0; 2 * PAGE];
        assert_eq!(d.register(&mut bytes[100..200]), 0);
        let (start, host) = (bytes.as_ptr() as usize, made!(d, "cuMemHostAlloc", PAGE, 0));
        for at in [start + 100, start + 199, host, host + PAGE - 1] {
            assert_eq!(made!(d, "cuMemHostGetDevicePointer_v2", at, 0), at);
        }
        let (managed, mut address) = (made!(d, "cuMemAllocManaged", PAGE, 1), 0_usize);
        for at in [start + 99, start + 200, managed, d.memory(64)] {
            assert_eq!(call!(d, "cuMemHostGetDevicePointer_v2", &raw mut address, at, 0), 1);
        }
        d.broken(&["HST-4"; 4]);
        d.stand_in.attribute(19, 0);
        assert_eq!(call!(d, "cuMemHostGetDevicePointer_v2", &raw mut address, host, 0), 1);
        d.broken(&["HST-4"; 4]);
    }

    hst_5_memory_that_is_registered_is_mapped (ready) |d| {
        let map = memmap2::MmapMut::map_anon(4 * PAGE).unwrap();
        let start = map.as_ptr() as usize;
        let map = map.make_read_only().unwrap();
        assert_eq!(call!(d, "cuMemHostRegister_v2", start, PAGE, 1), 1);
        assert_eq!(call!(d, "cuMemHostRegister_v2", start, PAGE, 9), 0);
        assert_eq!(call!(d, "cuMemHostUnregister", start), 0);
        drop(map);
        assert_eq!(call!(d, "cuMemHostRegister_v2", PAGE, PAGE, 9), 1, "where nothing is ever mapped");
        d.broken(&["HST-5", "HST-5"]);
    }

    hst_6_what_is_only_read_is_not_written_to (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(64), vec![0; 64]);
        assert_eq!(call!(d, "cuMemHostRegister_v2", bytes.as_mut_ptr(), 64, 9), 0);
        assert_eq!(d.upload(memory, &bytes, stream), 0);
        assert_eq!(d.download(&mut bytes, memory, stream), 1);
        d.broken(&["HST-6"]);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_ptr()), 0);
        assert_eq!(d.register(&mut bytes), 0);
        assert_eq!(d.download(&mut bytes, memory, stream), 0, "registered anew, as anything else");
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
    }

    hst_7_flags_that_do_not_exist (ready) |d| {
        let (mut at, bytes) = (0_usize, vec![0_u8; 64]);
        assert_eq!(call!(d, "cuMemHostRegister_v2", bytes.as_ptr(), 64, 64), 1);
        assert_eq!(call!(d, "cuMemHostAlloc", &raw mut at, PAGE, 8), 1);
        assert_eq!(call!(d, "cuMemAllocManaged", &raw mut at, PAGE, 0), 1);
        d.broken(&["HST-7", "HST-7", "HST-7"]);
    }

    hst_8_only_read_where_the_device_can (ready) |d| {
        let mut bytes = vec![0; 64];
        let mut value = 7_i32;
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 113, 0), 0);
        assert_eq!(value, 1);
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 99_999, 0), 1, "one that there is not");
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 113, 9), 101);
        d.stand_in.attribute(113, 0);
        assert_eq!(call!(d, "cuMemHostRegister_v2", bytes.as_ptr(), 64, 9), 801);
        d.broken(&["HST-8"]);
        assert_eq!(d.register(&mut bytes), 0);
    }

    hst_9_managed_memory_where_the_host_may_use_it (ready) |d| {
        let managed = made!(d, "cuMemAllocManaged", PAGE, 1);
        d.stand_in.attribute(89, 0);
        made!(d, "cuMemAllocManaged", PAGE, 1);
        d.broken(&["HST-9"]);
        let _ = managed;
    }

    cap_1_captures_forbid_unsafe_calls (ready) |d| {
        let (stream, other, event) = (d.stream(), d.stream(), d.event());
        assert_eq!(call!(d, "cuEventRecord", event, other), 0);
        // Global: to every thread.
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", stream, 0), 0);
        let context = made!(d, "cuCtxGetCurrent");
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                call!(d, "cuCtxSetCurrent", context);
                call!(d, "cuEventQuery", event)
            });
            assert_eq!(asks.join().unwrap(), 900);
        });
        let mut graph = 0_usize;
        assert_eq!(call!(d, "cuStreamEndCapture", stream, &raw mut graph), 901, "it is spoiled");
        d.broken(&["CAP-1"]);
        // But for those that say that they have nothing to do with it.
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", stream, 0), 0);
        let mut mode = 2_u32;
        assert_eq!(call!(d, "cuThreadExchangeStreamCaptureMode", &raw mut mode), 0);
        d.wait(event);
        assert_eq!(call!(d, "cuThreadExchangeStreamCaptureMode", &raw mut mode), 0);
        assert_eq!(mode, 2);
        assert_eq!(call!(d, "cuStreamEndCapture", stream, &raw mut graph), 0);
        d.broken(&["CAP-1"]);
    }

    cap_2_nothing_waits_for_a_capture (ready) |d| {
        let stream = d.stream();
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", stream, 2), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 900);
        d.broken(&["CAP-2"]);
    }

    cap_3_an_event_of_a_capture_is_not_asked (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", stream, 2), 0);
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        assert_eq!(call!(d, "cuEventQuery", event), 907);
        d.broken(&["CAP-3"]);
    }

    cap_4_a_capture_ends_where_it_began (ready) |d| {
        let (stream, context) = (d.stream(), made!(d, "cuCtxGetCurrent"));
        assert_eq!(call!(d, "cuStreamBeginCapture_v2", stream, 1), 0);
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| {
                let mut graph = 0_usize;
                call!(d, "cuCtxSetCurrent", context);
                call!(d, "cuStreamEndCapture", stream, &raw mut graph)
            });
            assert_eq!(ends.join().unwrap(), 908);
        });
        d.broken(&["CAP-4"]);
    }

    arg_1_results_need_a_place (ready) |d| {
        assert_eq!(call!(d, "cuMemAlloc_v2", 0, 64), 1);
        assert_eq!(call!(d, "cuDeviceGetCount", 0), 1);
        d.broken(&["ARG-1", "ARG-1"]);
    }

    copies_are_as_late_as_they_may_be (ready) |d| {
        let (stream, other, event) = (d.stream(), d.stream(), d.event());
        let (memory, mut bytes, mut back) = (d.memory(64), vec![1; 64], vec![0; 64]);
        assert_eq!(d.upload(memory, &bytes, stream), 0);
        // Too early: the copy reads what is there when it runs.
        bytes.fill(2);
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        assert_eq!(call!(d, "cuStreamWaitEvent", other, event, 0), 0);
        assert_eq!(d.download(&mut back, memory, other), 0);
        assert_eq!(back, [0; 64], "nobody has asked yet");
        assert_eq!(call!(d, "cuStreamSynchronize", other), 0);
        assert_eq!(back, [2; 64]);
        d.broken(&[]);
    }

    a_query_says_no_first_and_only_covers_what_came_before (ready) |d| {
        let (stream, memory, bytes, mut back) = (d.stream(), d.memory(64), vec![1; 64], vec![0; 64]);
        let mut refused = 0;
        for _ in 0..20 {
            let event = d.event();
            assert_eq!(d.upload(memory, &bytes, stream), 0);
            assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
            assert_eq!(d.download(&mut back, memory, stream), 0);
            refused += d.wait(event);
            assert_eq!(back, [0; 64], "what came after the event is still to come");
            call!(d, "cuStreamSynchronize", stream);
            assert_eq!(back, [1; 64]);
            back.fill(0);
        }
        assert!(refused > 0);
        d.broken(&[]);
    }

    while_it_hangs_nothing_is_ready (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        d.stand_in.hang(true);
        for _ in 0..100 {
            assert_eq!(call!(d, "cuEventQuery", event), 600);
        }
        d.stand_in.hang(false);
        d.wait(event);
    }

    a_sticky_error_stays_and_ends_all_copies (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        let (memory, mut back) = (d.memory(64), vec![0; 64]);
        assert_eq!(d.download(&mut back, memory, stream), 0);
        assert_eq!(call!(d, "cuEventRecord", event, stream), 0);
        d.stand_in.kill(0, 700);
        assert_eq!(call!(d, "cuEventQuery", event), 700);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 700);
        assert_eq!(call!(d, "cuMemFree_v2", memory), 700);
        assert_eq!(back, [0; 64]);
        // The other GPU has nothing to do with it.
        d.current(1);
        assert_eq!(call!(d, "cuStreamSynchronize", d.stream()), 0);
    }

    a_call_fails_once_when_told_to (ready) |d| {
        d.stand_in.fail("standin_nothing", 2, 2, false);
        let codes = [(); 4].map(|()| call!(d, "standin_nothing"));
        assert_eq!((codes, d.stand_in.struck()), ([0, 2, 0, 0], 1));
        // Afterwards: it was done all the same.
        d.stand_in.fail("cuMemAlloc_v2", 1, 2, true);
        let mut at = 0_usize;
        assert_eq!(call!(d, "cuMemAlloc_v2", &raw mut at, 64), 2);
        assert_eq!(call!(d, "cuMemFree_v2", at), 0);
        // The driver's end is for good.
        d.stand_in.fail("cuEventCreate", 1, 4, false);
        assert_eq!(call!(d, "cuEventCreate", &raw mut at, 2), 4);
        assert_eq!(call!(d, "cuInit", 0), 4);
    }

    what_is_left_is_reported (ready) |d| {
        let (stream, _event, memory) = (d.stream(), d.event(), d.memory(64));
        let mut bytes = vec![0; PAGE];
        assert_eq!(d.register(&mut bytes), 0);
        let host = made!(d, "cuMemHostAlloc", PAGE, 0);
        let all = ["contexts 1", "streams 1", "events 1", "allocations 1", "hosts 1", "registrations 1"];
        assert_eq!(d.stand_in.report().leaks, all);
        call!(d, "cuMemFreeHost", host);
        call!(d, "cuStreamDestroy_v2", stream);
        call!(d, "cuMemFree_v2", memory);
        call!(d, "cuMemHostUnregister", bytes.as_ptr());
        assert_eq!(d.stand_in.report().leaks, ["contexts 1", "events 1"]);
    }
}

//! The simulated libcuda keeps its rules: each is broken on purpose, and its id is seen.
//!
//! A double shares its author's misreadings, so what it does is written down here call by call, without pinpool in
//! between, and the same calls are made on a real driver where there is one; see `probe/mod.rs`. What calls do that no
//! code shows is in `hardware/effects.rs`.

#![allow(unsafe_code, reason = "calling a driver")]

#[macro_use]
mod probe;
/// Blocks of rules by topic.
mod rules {
    pub mod batches;
    pub mod host;
    pub mod kernels;
    pub mod pointers;
    pub mod streams;
}

use std::collections::BTreeSet;
use std::path::Path;

use probe::listed::{LISTED, Listed};
use probe::{PAGE, Rule};

use crate::support::{doubles, skip};

rules! {
    PLAIN:

    init_1_nothing_before_init (bare) |d| {
        let mut count = 0;
        says!(d, 3, "cuDeviceGetCount", &raw mut count);
        d.broken(&["INIT-1"]);
        says!(d, 0, "cuInit", 0);
        // It writes an int.
        let devices = made!(d, "cuDeviceGetCount") & 0xFFFF_FFFF;
        says!(d, 101, "cuDeviceGet", &raw mut count, devices);
        says!(d, 101, "cuDeviceGet", &raw mut count, -1_i32);
        let version = made!(d, "cuDriverGetVersion");
        assert!(!d.is_stand_in() || (devices, version) == (d.ordinal(2), 12_080));
    }

    ctx_1_a_context_must_be_current (ready) |d| {
        says!(d, 0, "cuCtxSetCurrent", 0);
        let mut at = 0_usize;
        says!(d, 201, "cuMemAlloc_v2", &raw mut at, 1);
        // And on the thread that calls, not on another one.
        d.current(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                d.enter();
                says!(d, 201, "cuMemAlloc_v2", &raw mut at, 1)
            });
        });
        d.broken(&["CTX-1", "CTX-1"]);
        d.memory(1);
        // What a handle says of itself needs none.
        let (stream, event, mut capturing) = (d.stream(), d.event(), 7_u32);
        says!(d, 0, "cuEventRecord", event, stream);
        says!(d, 0, "cuStreamSynchronize", stream);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                says!(d, 0, "cuStreamIsCapturing", stream, &raw mut capturing);
                says!(d, 0, "cuEventQuery", event);
            });
        });
        assert_eq!(capturing, 0);
    }

    ctx_2_a_context_that_is_gone (ready) |d| {
        let context = made!(d, "cuCtxGetCurrent");
        says!(d, 0, "cuDevicePrimaryCtxRelease_v2", 0);
        let mut at = 0_usize;
        // Still current, and known to be destroyed.
        says!(d, 709, "cuMemAlloc_v2", &raw mut at, 1);
        says!(d, 709, "cuCtxPushCurrent_v2", context);
        d.broken(&["CTX-2", "CTX-2"]);
        let again = d.current(0);
        assert!(!d.is_stand_in() || again != context, "a number is never used twice");
        d.memory(1);
    }

    ctx_3_pops_and_pushes_match (ready) |d| {
        let context = made!(d, "cuCtxGetCurrent");
        says!(d, 0, "cuCtxPushCurrent_v2", context);
        assert_eq!(made!(d, "cuCtxPopCurrent_v2"), context);
        assert_eq!(made!(d, "cuCtxPopCurrent_v2"), context);
        let mut popped = 0_usize;
        says!(d, 201, "cuCtxPopCurrent_v2", &raw mut popped);
        d.broken(&["CTX-3"]);
    }

    ctx_4_a_release_for_each_retain (ready) |d| {
        says!(d, 0, "cuDevicePrimaryCtxRelease_v2", 0);
        says!(d, 201, "cuDevicePrimaryCtxRelease_v2", 0);
        d.broken(&["CTX-4"]);
    }

    ctx_5_contexts_are_not_mixed (ready) |d| {
        if !d.has_devices(2) {
            return;
        }
        let (stream, event, memory) = (d.stream(), d.event(), d.memory(64));
        d.current(1);
        let (other, bytes, mut capturing) = (d.stream(), [0; 64], 0_u32);
        says!(d, 400, "cuEventRecord", event, other);
        says!(d, 400, "cuEventRecord", d.event(), stream);
        d.uploads(1, memory, &bytes, other);
        says!(d, 400, "cuStreamSynchronize", stream);
        says!(d, 0, "cuEventQuery", event);
        says!(d, 0, "cuStreamIsCapturing", stream, &raw mut capturing);
        d.broken(&["CTX-5", "CTX-5", "CTX-5", "CTX-5", "EVT-2"]);
        d.finish(other);
    }

    str_1_a_stream_that_is_gone (ready) |d| {
        let stream = d.stream();
        says!(d, 0, "cuStreamDestroy_v2", stream);
        says!(d, 400, "cuStreamDestroy_v2", stream);
        says!(d, 400, "cuStreamSynchronize", stream);
        d.broken(&["STR-1", "STR-1"]);
    }

    str_2_a_stream_with_work (ready) |d| {
        let (stream, memory, bytes) = (d.stream(), d.memory(64), [7; 64]);
        d.uploads(0, memory, &bytes, stream);
        says!(d, 0, "cuStreamDestroy_v2", stream);
        d.broken(&["STR-2"]);
    }

    evt_1_an_event_that_is_gone (ready) |d| {
        let event = d.event();
        says!(d, 0, "cuEventDestroy_v2", event);
        says!(d, 400, "cuEventQuery", event);
        says!(d, 400, "cuEventDestroy_v2", event);
        d.broken(&["EVT-1", "EVT-1"]);
    }

    evt_2_an_event_never_recorded_asks_as_complete (ready) |d| {
        says!(d, 0, "cuEventQuery", d.event());
        d.broken(&["EVT-2"]);
    }

    evt_3_an_event_recorded_again_too_early (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        says!(d, 0, "cuEventRecord", event, stream);
        d.wait(event);
        // Seen complete: only then is it recorded again.
        says!(d, 0, "cuEventRecord", event, stream);
        d.broken(&[]);
        says!(d, 0, "cuEventRecord", event, stream);
        d.broken(&["EVT-3"]);
    }

    evt_4_an_event_destroyed_too_early (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        says!(d, 0, "cuEventRecord", event, stream);
        says!(d, 0, "cuEventDestroy_v2", event);
        d.broken(&["EVT-4"]);
    }

    mem_1_registrations_do_not_overlap (ready) |d| {
        let mut bytes = d.pages(4, 0);
        d.registers(0, &mut bytes[PAGE..3 * PAGE]);
        d.registers(0, &mut bytes[..PAGE]);
        d.registers(712, &mut bytes[2 * PAGE..]);
        d.registers(712, &mut bytes);
        d.broken(&["MEM-1", "MEM-1"]);
    }

    mem_2_only_what_is_registered_is_unregistered (ready) |d| {
        let mut bytes = d.pages(2, 0);
        d.registers(0, &mut bytes);
        says!(d, 1, "cuMemHostUnregister", bytes[PAGE..].as_ptr());
        says!(d, 0, "cuMemHostUnregister", bytes.as_ptr());
        says!(d, 713, "cuMemHostUnregister", bytes.as_ptr());
        d.broken(&["MEM-2", "MEM-2"]);
    }

    mem_3_nothing_is_not_registered (ready) |d| {
        says!(d, 1, "cuMemHostRegister_v2", 0, 4096, 1);
        says!(d, 1, "cuMemHostRegister_v2", 4096, 0, 1);
        says!(d, 1, "cuMemHostRegister_v2", 4096, usize::MAX, 1);
        d.broken(&["MEM-3", "MEM-3", "MEM-3"]);
    }

    mem_4_memory_unregistered_too_early (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(PAGE), d.pages(1, 1));
        d.registers(0, &mut bytes);
        d.uploads(0, memory, &bytes, stream);
        says!(d, 0, "cuMemHostUnregister", bytes.as_ptr());
        d.broken(&["MEM-4"]);
        d.finish(stream);
    }

    mem_5_memory_registered_in_part (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(2 * PAGE), d.pages(2, 1));
        d.registers(0, &mut bytes[..PAGE]);
        d.uploads(1, memory, &bytes, stream);
        d.broken(&["MEM-5"]);
        // Memory that is not registered at all is another matter: slow, allowed and counted.
        d.uploads(0, memory, &bytes[PAGE..], stream);
        assert!(!d.is_stand_in() || d.stand_in.report().notes == ["PAGEABLE 1"]);
        d.finish(stream);
    }

    mem_6_device_memory_has_an_end (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(PAGE), d.pages(1, 1));
        d.uploads(1, memory + 1, &bytes, stream);
        d.downloads(1, &mut bytes, memory + 1, stream);
        d.uploads(1, memory - 1, &bytes, stream);
        d.uploads(1, 0, &bytes, stream);
        says!(d, 1, "cuMemcpyHtoDAsync_v2", memory, 0, 8, stream);
        says!(d, 1, "cuMemcpyDtoDAsync_v2", memory, memory + 8, PAGE, stream);
        d.broken(&["MEM-6"; 6]);
        d.finish(stream);
    }

    mem_7_only_allocations_are_freed (ready) |d| {
        let memory = d.memory(PAGE);
        says!(d, 1, "cuMemFree_v2", memory + 8);
        says!(d, 0, "cuMemFree_v2", memory);
        says!(d, 1, "cuMemFree_v2", memory);
        d.broken(&["MEM-7", "MEM-7"]);
    }

    mem_8_memory_freed_too_early (ready) |d| {
        let (stream, memory, bytes) = (d.stream(), d.memory(PAGE), d.pages(1, 1));
        d.uploads(0, memory, &bytes, stream);
        says!(d, 0, "cuMemFree_v2", memory);
        d.broken(&["MEM-8"]);
        d.finish(stream);
    }

    cap_1_captures_forbid_unsafe_calls (ready) |d| {
        let (stream, other, event) = (d.stream(), d.stream(), d.event());
        says!(d, 0, "cuEventRecord", event, other);
        // Global mode: every thread is bound.
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 0);
        let context = made!(d, "cuCtxGetCurrent");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                says!(d, 0, "cuCtxSetCurrent", context);
                says!(d, 900, "cuEventQuery", event);
            });
        });
        let mut graph = 0_usize;
        // It is spoiled.
        says!(d, 901, "cuStreamEndCapture", stream, &raw mut graph);
        d.broken(&["CAP-1"]);
        // Except calls that say that they have nothing to do with it.
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 0);
        let mut mode = 2_u32;
        says!(d, 0, "cuThreadExchangeStreamCaptureMode", &raw mut mode);
        d.wait(event);
        says!(d, 0, "cuThreadExchangeStreamCaptureMode", &raw mut mode);
        assert_eq!(mode, 2);
        says!(d, 0, "cuStreamEndCapture", stream, &raw mut graph);
        d.broken(&["CAP-1"]);
    }

    /// Each forbidden call by itself, on the thread that captures.
    cap_1_each_unsafe_call_spoils (ready) |d| {
        let (stream, other, memory) = (d.stream(), d.stream(), d.memory(PAGE));
        let (mut bytes, mut fresh) = (d.pages(1, 0), d.pages(1, 0));
        d.registers(0, &mut bytes);
        let (mut graph, mut at) = (0_usize, 0_usize);
        for call in 0..5 {
            says!(d, 0, "cuStreamBeginCapture_v2", stream, 0);
            match call {
                0 => says!(d, 900, "cuMemAlloc_v2", &raw mut at, PAGE),
                1 => says!(d, 900, "cuMemFree_v2", memory),
                2 => d.registers(900, &mut fresh),
                3 => says!(d, 900, "cuMemHostUnregister", bytes.as_ptr()),
                _ => says!(d, 900, "cuStreamSynchronize", other),
            }
            says!(d, 901, "cuStreamEndCapture", stream, &raw mut graph);
        }
        d.broken(&["CAP-1"; 5]);
    }

    /// What may be called during a capture, on the thread that captures and on others.
    cap_1_other_calls_leave_a_capture_alone (ready) |d| {
        let (stream, other, third) = (d.stream(), d.stream(), d.stream());
        let (event, memory, mut bytes) = (d.event(), d.memory(PAGE), d.pages(1, 0));
        d.registers(0, &mut bytes);
        let context = made!(d, "cuCtxGetCurrent");
        let calls = || {
            let (mut made, mut popped) = (0_usize, 0_usize);
            says!(d, 0, "cuCtxGetCurrent", &raw mut made);
            says!(d, 0, "cuCtxPushCurrent_v2", context);
            says!(d, 0, "cuEventCreate", &raw mut made, 2);
            says!(d, 0, "cuEventDestroy_v2", made);
            says!(d, 0, "cuStreamCreate", &raw mut made, 1);
            says!(d, 0, "cuStreamDestroy_v2", made);
            d.uploads(0, memory, &bytes, other);
            says!(d, 0, "cuMemcpyDtoHAsync_v2", bytes.as_ptr(), memory, PAGE, other);
            says!(d, 0, "cuEventRecord", event, other);
            says!(d, 0, "cuStreamWaitEvent", third, event, 0);
            says!(d, 0, "cuCtxPopCurrent_v2", &raw mut popped);
        };
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 0);
        calls();
        std::thread::scope(|scope| {
            scope.spawn(calls);
        });
        let mut graph = 0_usize;
        says!(d, 0, "cuStreamEndCapture", stream, &raw mut graph);
        d.finish(third);
    }

    cap_2_nothing_waits_for_a_capture (ready) |d| {
        let (stream, mut graph) = (d.stream(), 0_usize);
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 2);
        says!(d, 900, "cuStreamSynchronize", stream);
        d.broken(&["CAP-2"]);
        says!(d, 901, "cuStreamEndCapture", stream, &raw mut graph);
        let mut id = 0_u64;
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 2);
        says!(d, 900, "cuStreamGetId", stream, &raw mut id);
        d.broken(&["CAP-2", "CAP-2"]);
        says!(d, 901, "cuStreamEndCapture", stream, &raw mut graph);
    }

    cap_3_an_event_of_a_capture_is_not_asked (ready) |d| {
        let (stream, event) = (d.stream(), d.event());
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 2);
        says!(d, 0, "cuEventRecord", event, stream);
        says!(d, 907, "cuEventQuery", event);
        d.broken(&["CAP-3"]);
    }

    cap_4_a_capture_ends_where_it_began (ready) |d| {
        let (stream, context) = (d.stream(), made!(d, "cuCtxGetCurrent"));
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut graph = 0_usize;
                says!(d, 0, "cuCtxSetCurrent", context);
                says!(d, 908, "cuStreamEndCapture", stream, &raw mut graph);
            });
        });
        d.broken(&["CAP-4"]);
    }

    arg_1_results_need_a_place (ready) |d| {
        says!(d, 1, "cuMemAlloc_v2", 0, 64);
        says!(d, 1, "cuDeviceGetCount", 0);
        d.broken(&["ARG-1", "ARG-1"]);
    }
}

behaviour! {
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

/// Every rule there is: each block's list.
const ALL: &[&[Rule]] = &[
    PLAIN,
    rules::batches::BATCHES,
    rules::host::HOST,
    rules::kernels::KERNELS,
    rules::pointers::POINTERS,
    rules::streams::STREAMS,
];

fn rules() -> Vec<&'static Rule> {
    ALL.iter().copied().flatten().collect()
}

/// Every rule on the machine's own driver.
#[test]
fn the_rules_on_the_real_driver() {
    const TEST: &str = "the_rules_on_the_real_driver";
    let rules = rules();
    if probe::tried_as_child(&rules) {
        return;
    }
    let (library, text) = match doubles::real_driver() {
        Ok(found) => found,
        Err(why) => {
            skip!("{why}");
            assert!(!doubles::required(), "PINPOOL_REQUIRE names a GPU, and there is none: {why}");
            return;
        }
    };
    let (mut wrong, short) = probe::try_all(&rules, TEST, &library, &[]);
    if short > 0 && doubles::required_device("cuda:1") {
        wrong.push(format!("{short} rules lack a GPU, and PINPOOL_REQUIRE names cuda:1"));
    }
    for Listed { rule, step, call, on_driver, why } in LISTED {
        println!("listed: {rule} step {step}, {call}: {on_driver:?}: {why}");
    }
    println!("{TEST}: {} rules, {short} without enough GPUs; {text}", rules.len());
    assert!(wrong.is_empty(), "{} rules are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The same with the simulation in the driver's place, for one rule: what is made to differ is told, and so is what is
/// listed and does not differ.
#[test]
fn the_comparison_sees_what_differs() {
    const TEST: &str = "the_comparison_sees_what_differs";
    let mut rules = rules();
    rules.retain(|rule| rule.name.starts_with("mem_4"));
    if probe::tried_as_child(&rules) {
        return;
    }
    let Some(library) = doubles::named_or_built() else {
        skip!("the simulated libcuda is not beside the executable");
        return;
    };
    let said =
        |environment: &[(&str, &str)]| probe::try_all(&rules, TEST, &library, environment).0.join("\n");
    // As it is nothing differs.
    assert_eq!(said(&[]), "");
    let unlisted = said(&[(probe::KNOWN, "99:none:0")]);
    assert!(unlisted.contains("no such step") && unlisted.contains("mem_4"), "{unlisted}");
    // With a code of its own, or without.
    let fault = (doubles::SETUP, "fail cuMemHostUnregister 1 713 false");
    for (known, faults, expected) in [
        (None, true, "713 (CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED): a difference that is not listed"),
        (Some("3:cuMemHostUnregister:713"), true, ""),
        (Some("3:cuMemHostUnregister:not tried"), true, ""),
        (Some("3:cuMemHostUnregister:712"), true, "not as the list says"),
        (Some("3:cuMemFree_v2:713"), true, "the list has cuMemFree_v2 there"),
        (Some("3:cuMemHostUnregister:713"), false, "it is listed, and the driver does not differ"),
    ] {
        let known = known.map(|known| (probe::KNOWN, known));
        let environment: Vec<_> = known.into_iter().chain(faults.then_some(fault)).collect();
        let said = said(&environment);
        assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{expected}: {said}");
    }
    // A death at a step is told.
    let died = said(&[(probe::DIES, "2")]);
    assert!(died.contains("signal: 6") && died.contains("step 2, cuMemcpyHtoDAsync_v2"), "{died}");
}

/// The page of the simulation has these rules.
#[test]
fn the_page_of_the_simulation_has_these_rules() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/pinpool-sim/src/cuda/mod.rs");
    let Ok(page) = std::fs::read_to_string(&page) else {
        skip!("{} is not here", page.display());
        return;
    };
    let rows = page.lines().filter_map(|line| line.strip_prefix("//! | "));
    let of_page: BTreeSet<&str> =
        rows.filter_map(|row| row.split(' ').next()).filter(|id| id.contains('-') && *id != "---").collect();
    let tested: BTreeSet<String> = rules().iter().map(|rule| probe::id(rule.name)).collect();
    assert_eq!(of_page, tested.iter().map(String::as_str).collect(), "rules of the page, and tests");
}

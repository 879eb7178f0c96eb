//! GPUs through the simulated driver: opening, contexts, and the driver's end.
//!
//! What any device must do is in `contract`. Here is what only CUDA has, and what only a simulation can be
//! made to do.

use pinpool::{Device, Error};

use crate::cuda::rig::{open, round_trip};
use crate::record;
use crate::support::doubles::gpu::{self, bytes, filled, pool};
use crate::support::doubles::{self, gpu_name, on_stand_in};

#[test]
fn opening_fails_with_the_cause_and_the_remedy() {
    const TEST: &str = "opening_fails_with_the_cause_and_the_remedy";
    if let (Ok(expected), Ok(taken)) = (std::env::var("EXPECTED"), std::env::var("TAKEN")) {
        let error = Device::open(&gpu_name(0)).unwrap_err();
        for part in expected.split('|') {
            assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
        }
        // What failed once may succeed later, and then `auto` takes it; what is missing stays so. And it says
        // why.
        record::record();
        assert_eq!(Device::open("auto").unwrap().name(), taken);
        let reason = match &*taken {
            "host:0" => expected.split('|').next().unwrap().to_owned(),
            taken => format!("auto: taking {taken}"),
        };
        let said = format!("{:?}", record::events("pinpool::device"));
        assert!(said.contains(&reason), "{said}");
        assert!(taken != "cuda:1" || said.contains("cuda:0 is not taken"), "{said}");
        return;
    }
    let refused = |call: &str, nth: u64, code: u32| format!("fail {call} {nth} {code} false");
    let retain = |nth| refused("cuDevicePrimaryCtxRetain", nth, 46);
    let setups = [
        ("version 10020".into(), "supports CUDA 10.2 only|newer driver", "host:0"),
        ("devices 0 0".into(), "cuInit failed with 100 (CUDA_ERROR_NO_DEVICE|CUDA_VISIBLE_DEVICES", "host:0"),
        (refused("cuInit", 1, 803), "cuInit failed with 803|do not fit together", "cuda:0"),
        (refused("cuInit", 1, 123_456), "cuInit failed with 123456|no name for", "cuda:0"),
        (refused("cuDevicePrimaryCtxRetain", 1, 2), "OUT_OF_MEMORY|may succeed later", "cuda:0"),
        // Taken by another process, as a GPU in exclusive mode is: `auto` takes the next one.
        (format!("{};{}", retain(1), retain(2)), "cuDevicePrimaryCtxRetain failed with 46", "cuda:1"),
    ];
    let libraries = [
        ("/nowhere/libcuda.so.1", "/nowhere/libcuda.so.1 could not be loaded (cannot open|PINPOOL_LIBCUDA"),
        ("libm.so.6", "libm.so.6 lacks cuInit|11.0"),
    ];
    let libraries = libraries.map(|(path, expected)| (doubles::PATH, path.to_owned(), expected, "host:0"));
    let setups = setups.map(|(setup, expected, taken)| (doubles::SETUP, setup, expected, taken));
    for (name, value, expected, taken) in libraries.into_iter().chain(setups) {
        println!("{name}={value}");
        doubles::again(TEST, &[(name, &value), ("EXPECTED", expected), ("TAKEN", taken)]);
    }
}

#[test]
fn gpus_that_there_are_not_are_told_and_none_is_asked_for_in_turn() {
    // In a child, which loads the simulation.
    if !doubles::is_set() {
        return doubles::again("gpus_that_there_are_not_are_told_and_none_is_asked_for_in_turn", &[]);
    }
    on_stand_in(|d| {
        for name in ["cuda:2", "cuda:4294967295", "cuda:", "cuda:-1", "cuda:x", "cuda:0:0", "auto:0"] {
            let error = Device::open(name).unwrap_err();
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            assert!(error.to_string().contains("cuda:0 to cuda:1") || !name.contains(['2', '4']), "{error}");
        }
        for name in ["cuda", "auto"] {
            assert_eq!(Device::open(name).unwrap().name(), &*gpu_name(0));
        }
        // Where they cannot be counted there is no last one.
        (1..=9).for_each(|nth| d.fail("cuDeviceGetCount", nth, 999, false));
        let error = Device::open(&gpu_name(0)).unwrap_err();
        let told = matches!(&error, Error::Unavailable { why, .. } if why.contains("cuDeviceGetCount"));
        assert!(told, "{error}");
        assert!(!Device::open("auto").unwrap().name().starts_with("cuda"));
        assert_eq!(d.struck(), 2, "no call asks for the next one");
    });
}

#[test]
fn the_callers_context_and_mode_are_left_alone() {
    gpu::on_stand_in(|gpu, d| {
        let device = open();
        // Once with none, once with another context, once with the pool's own.
        let other = gpu.other_context();
        for context in [0, other, gpu.context] {
            gpu.current(context);
            let (pool, stream, memory) =
                (pool(&device, 2 << 20), device.stream().unwrap(), device.alloc(50_000).unwrap());
            round_trip(&pool, &stream, &memory, 1);
            stream.upload_blocking(&bytes(2, 50_000), &memory).unwrap();
            device.stream().unwrap().wait_for(&stream).unwrap();
            // Refused by the driver: put back all the same.
            d.fail("cuMemcpyHtoDAsync_v2", 1, 1, false);
            drop(stream.upload(filled(&pool, &bytes(1, 100)), &memory).unwrap_err());
            assert_eq!(gpu.made("cuCtxGetCurrent", &[]), context);
            for expected in [0, 1] {
                let mut mode = 1 - expected;
                gpu.ok("cuThreadExchangeStreamCaptureMode", &[(&raw mut mode) as usize]);
                assert_eq!(mode, expected, "global, as threads begin; and back");
            }
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// However often it cannot be waited for. (`tests/faults` has copies that are refused, or are said to be.)
#[test]
fn a_blocking_copy_returns_only_when_the_driver_has_let_go() {
    on_stand_in(|d| {
        let device = open();
        let (pool, stream, memory) =
            (pool(&device, 2 << 20), device.stream().unwrap(), device.alloc(10_000).unwrap());
        for (round, code) in [1, 2, 900, 999].into_iter().enumerate() {
            (1..4).for_each(|nth| d.fail("cuStreamSynchronize", nth, code, false));
            let before = d.struck();
            let sent = bytes(round, 10_000);
            let mut borrowed = sent.clone();
            stream.upload_blocking(&borrowed, &memory).unwrap();
            // Would be copied, were the copy still to run.
            borrowed.fill(0xEE);
            let landing = pool.checkout(10_000).unwrap();
            assert!(*stream.download(&memory, landing).unwrap().wait().unwrap() == *sent);
            assert_eq!(d.struck(), before + 3, "it is waited for until that succeeds");
        }
        assert_eq!(device.lost(), None);
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

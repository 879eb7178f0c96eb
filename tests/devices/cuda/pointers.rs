//! Device memory that others allocated, on the simulated driver: what only CUDA has, and what only a
//! simulation can be made to do.
//!
//! What any device must do with it is in `contract`, and each driver call fails once in `tests/faults`. The
//! limit of the device-side heap is in `kept`, and in `hardware` on a real GPU.

#![allow(unsafe_code, reason = "calling the stand-in, and memory by its address")]

use pinpool::Error;

use crate::cuda::rig::both;
use crate::support::doubles::StandIn;
use crate::support::doubles::gpu;

/// What a command gives: memory of the device's heap (`malloc 0 LEN`), of another context (`memory 0 0 LEN`),
/// managed (1) or mapped (2).
fn made(d: &StandIn, command: &str) -> u64 {
    d.command(command).parse().unwrap()
}

#[test]
fn an_address_that_copies_cannot_use_is_told_what_it_is() {
    gpu::on_stand_in(|gpu, d| {
        let (device, _other) = both();
        let (stream, memory, pooled) = (device.stream().unwrap(), gpu.memory(1000) as u64, gpu.stream());
        let says = |at: u64, len: usize, words: &str| {
            // SAFETY: refused.
            let refusal = unsafe { device.raw_memory(at, len, "owner") }.unwrap_err();
            assert_eq!(refusal.buffer, Some("owner"), "the owner comes back");
            let Error::Argument(text) = &refusal.error else { panic!("{}", refusal.error) };
            let name = device.name();
            let what = format!("{len} bytes at address {at:#x} cannot be used as memory of {name}");
            for word in words.split('|').chain([&*what]) {
                assert!(text.contains(word), "{word:?} is not in: {text}");
            }
        };
        says(made(d, "memory 0 0 64"), 64, "another context|peer access|primary");
        // Known to no allocator: what was freed, what never was, and the end of everything.
        let unknown = "malloc|no copy call accepts|cudaMalloc|Device::alloc|was freed";
        gpu.ok("cuMemFree_v2", &[memory as usize]);
        says(memory, 1, unknown);
        let freed = gpu.made("cuMemAllocAsync", &[64, pooled]);
        gpu.ok("cuMemFreeAsync", &[freed, pooled]);
        says(freed as u64, 64, unknown);
        says(u64::MAX, 1, unknown);
        // Memory of other kinds is memory all the same.
        let ordered = gpu.made("cuMemAllocAsync", &[64, pooled]) as u64;
        gpu.ok("cuStreamSynchronize", &[pooled]);
        for at in [ordered, made(d, "memory 0 1 64"), made(d, "memory 0 2 64")] {
            // SAFETY: no code frees it, and only this thread uses it.
            let memory = unsafe { device.raw_memory(at, 64, ()) }.unwrap();
            let mut back = [0; 64];
            stream.upload_blocking(&[9; 64], &memory).unwrap();
            stream.download_blocking(&memory, &mut back).unwrap();
            assert!(back == [9; 64]);
        }
        // SAFETY: as above. Managed memory that another GPU's context has made.
        drop(unsafe { device.raw_memory(made(d, "memory 1 1 64"), 64, ()) }.unwrap());
        assert_eq!(d.report().violations, Vec::<String>::new());
        assert_eq!(device.lost(), None);
    });
}

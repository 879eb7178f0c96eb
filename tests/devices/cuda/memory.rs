//! Where pinned memory comes from, and device memory that others allocated, on GPUs through the simulated driver: what
//! only CUDA has.
//!
//! What any device must do with such memory is in `contract`; every call fails once in `tests/faults`. That drivers know
//! nothing of the device-side heap's memory is seen by the scripts of the rules, on real ones.

#![allow(unsafe_code, reason = "values whose bytes stay where they are, and memory by its address")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::MmapMut;
use pinpool::{Backing, Device, Error, ErrorClass, HostAllocFlags, Pool, Request, cuda};

use crate::cuda::rig::{PAGE, both, flag, open, small};
use crate::support::doubles::gpu::{self, bytes, calls, filled, until};
use crate::support::doubles::{HANG, StandIn, on_stand_in};
use crate::support::value::Value;

const ALLOCATED: Backing =
    Backing::HostAlloc(HostAllocFlags { portable: false, mapped: false, write_combined: false });

/// How often each of them was dropped, in all.
fn gone(dropped: &[Arc<AtomicUsize>]) -> usize {
    dropped.iter().map(|dropped| dropped.load(Ordering::SeqCst)).sum()
}

#[test]
fn a_driver_that_has_ended_is_not_called_for_memory() {
    on_stand_in(|d| {
        let device = open();
        let pools = [Backing::Registered, ALLOCATED, Backing::Managed].map(|backing| {
            let pool = small(&device).backing(backing).build().unwrap();
            pool.wait_pinned(Some(HANG)).unwrap();
            pool
        });
        let [(adopted, a), (one, b), (two, c)] =
            [4 * PAGE, 100, 100].map(|len| Value::watched(bytes(1, len)));
        pools[0].adopt(adopted).unwrap();
        let (one, two) = (device.register(one).unwrap(), device.register(two).unwrap());
        let (plain, (owner, owner_gone)) = (device.alloc(64).unwrap(), flag());
        // SAFETY: `plain` outlives every use, of which there is none.
        let raw = unsafe { device.raw_memory(plain.address(), 64, owner) }.unwrap();
        // It ends under a flight, which is told and waits for nothing.
        let (stream, memory) = (device.stream().unwrap(), device.alloc(PAGE).unwrap());
        d.hang(true);
        let flight = stream.upload(filled(&pools[2], &bytes(1, PAGE)), &memory).unwrap();
        d.fail("cuEventQuery", 1, 4, false);
        let error = flight.wait_timeout(HANG).unwrap_err().error;
        assert_eq!(error.class(), ErrorClass::DriverShutdown, "{error}");
        assert_eq!(device.alloc(1).unwrap_err().class(), ErrorClass::DriverShutdown);
        assert!(device.lost().is_some());
        let freed = || ["cuMemHostUnregister", "cuMemFreeHost", "cuMemFree_v2"].map(|name| calls(d, name));
        let before = freed();
        drop((one, pools, plain, raw, stream, memory));
        // The worker comes to this last.
        assert!(two.into_inner().is_err_and(|e| e.class() == ErrorClass::DriverShutdown));
        until("the owner goes", owner_gone);
        assert_eq!(freed(), before, "the driver may be gone, library and all");
        assert_eq!(gone(&[a, b, c]), 0, "the driver may still reach them: they are leaked");
    });
}

#[test]
fn a_refused_registration_says_why_and_gives_the_value_back() {
    on_stand_in(|d| {
        let (device, other) = both();
        // Twice the same bytes, for another GPU too: they are registered for that already.
        let value: Arc<[u8]> = bytes(1, 10_000).into();
        let first = device.register(value.clone()).unwrap();
        for device in [&device, &other] {
            let refused = device.register(value.clone()).unwrap_err();
            let said = refused.error.to_string();
            assert!(said.contains("712") && said.contains("register it once") && refused.buffer.is_some());
            assert_eq!(refused.error.class(), ErrorClass::Argument);
        }
        assert_eq!((device.stats().registered_bytes, other.stats().registered_bytes), (10_000, 0));
        let (stream, memory) = (other.stream().unwrap(), other.alloc(10_000).unwrap());
        drop(stream.upload(first, &memory).unwrap().wait().unwrap().into_inner().unwrap());
        let again = device.register(value).unwrap();
        assert!(*again == *bytes(1, 10_000));
        // Cannot be written to.
        let map = MmapMut::map_anon(PAGE).unwrap().make_read_only().unwrap();
        let refused = device.register(map).unwrap_err();
        assert!(refused.error.to_string().contains("register_read_only"), "{}", refused.error);
        let map = device.register_read_only(refused.buffer.unwrap()).unwrap().into_inner().unwrap();
        // Where the device has no such thing, what can be written to is registered like anything else.
        d.attribute(113, 0);
        let fallback = device.register_read_only(bytes(2, 100)).unwrap();
        assert!(fallback.is_read_only());
        let refused = device.register_read_only(map).unwrap_err();
        assert!(refused.error.to_string().contains("not mapped") && refused.buffer.is_some());
        assert_eq!(d.broken(), ["MEM-1", "MEM-1", "HST-5", "HST-5"], "the flag is not passed");
        // Registered memory serves the devices of its family.
        let host = Device::open("host").unwrap();
        let value = host.register(bytes(3, 10_000)).unwrap();
        assert!(matches!(value.device_address(&other), Err(Error::Mismatch { .. })));
        let refused = stream.upload(value, &memory).unwrap_err();
        assert!(matches!(refused.error, Error::Mismatch { .. }), "{}", refused.error);
        assert!(refused.buffer.unwrap().into_inner().unwrap() == bytes(3, 10_000));
        drop((again, fallback, stream, memory, device, other));
        assert_eq!(d.final_report().leaks, Vec::<String>::new());
    });
}

#[test]
fn what_cannot_be_unpinned_is_leaked_and_not_dropped() {
    on_stand_in(|d| {
        let device = open();
        let [(dropped, a), (kept, b), (adopted, c)] =
            [PAGE, PAGE, 6 * PAGE].map(|len| Value::watched(bytes(1, len)));
        let (dropped, kept) = (device.register(dropped).unwrap(), device.register(kept).unwrap());
        let refuse = |name| d.fail(name, 1, 999, false);
        let struck = |count| until("it is made to fail", || d.struck() == count);
        refuse("cuMemHostUnregister");
        drop(dropped);
        struck(1);
        refuse("cuMemHostUnregister");
        let error = kept.into_inner().err().unwrap();
        assert!(error.to_string().contains("cuMemHostUnregister failed with 999"), "{error}");
        assert_eq!(device.stats().registered_bytes, 2 * PAGE, "they are still counted");
        let pool = small(&device).initial(0).build().unwrap();
        let info = pool.adopt(adopted).unwrap();
        refuse("cuMemHostUnregister");
        assert_eq!(pool.trim(0), info.len);
        struck(3);
        // And the driver's own memory likewise.
        let allocated = small(&device).backing(ALLOCATED).build().unwrap();
        allocated.wait_pinned(Some(HANG)).unwrap();
        assert_eq!(calls(d, "cuMemHostAlloc"), 3, "the second does not start on a page");
        refuse("cuMemFreeHost");
        allocated.trim(0);
        struck(4);
        drop(filled(&allocated, b"goes on"));
        // Later calls of the worker are done, and so are these: it does one thing at a time.
        drop(device.register(bytes(3, 100)).unwrap().into_inner().unwrap());
        assert_eq!(gone(&[a, b, c]), 0);
        // So is what was being adopted, where a part is refused and another cannot be unpinned again.
        let (refused, e) = Value::watched(bytes(1, 6 * PAGE));
        d.fail("cuMemHostRegister_v2", 3, 1, false);
        d.fail("cuMemHostUnregister", 2, 999, false);
        assert!(pool.adopt(refused).unwrap_err().buffer.is_none());
        pool.adopt(MmapMut::map_anon(8 * PAGE).unwrap()).unwrap();
        drop(filled(&pool, b"served"));
        pool.check().unwrap();
        drop((pool, allocated, device));
        assert_eq!(d.final_report().leaks, ["hosts 1", "registrations 4"]);
        assert_eq!(gone(&[e]), 0);
    });
}

#[test]
fn a_value_in_flight_on_a_lost_device_is_never_dropped() {
    on_stand_in(|d| {
        let device = open();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(PAGE).unwrap());
        let [(owned, a), (shared, b), (idle, c)] = [1, 2, 3].map(|i| Value::watched(bytes(i, PAGE)));
        let [owned, shared, idle] = [owned, shared, idle].map(|w| device.register(w).unwrap());
        d.hang(true);
        let waited = stream.upload(owned, &memory).unwrap();
        let shared = Arc::new(shared);
        drop(stream.upload(shared.clone(), &memory).unwrap());
        d.kill(0, 700);
        assert!(waited.wait().unwrap_err().is_device_lost());
        d.hang(false);
        // Reading it is the owner's right.
        assert!(**shared == *bytes(2, PAGE));
        let refused = stream.upload(idle, &memory).unwrap_err();
        assert!(refused.error.is_device_lost());
        // Nor can the lost device register or unregister anything.
        assert!(device.register(bytes(4, 100)).unwrap_err().error.is_device_lost());
        assert!(refused.buffer.unwrap().into_inner().is_err());
        drop((shared, stream, memory));
        assert_eq!(gone(&[a, b, c]), 0);
    });
}

/// What no extent is sure to have room for is refused at once, instead of pinning all of the capacity in
/// search of it.
#[test]
fn what_the_driver_allocates_starts_on_a_page_only() {
    on_stand_in(|d| {
        const MIB: usize = 1 << 20;
        let device = open();
        let largest = 2 * MIB + 4096 - 32;
        for backing in [Backing::Registered, ALLOCATED, Backing::Managed] {
            for (len, fits) in [(MIB, true), (largest, true), (largest + 1, false), (7 * MIB / 2, false)] {
                let builder = Pool::builder(&device).capacity(64 * MIB).region(4 * MIB).extent(4 * MIB);
                let pool = builder.initial(0).backing(backing).build().unwrap();
                let got = pool.checkout_timeout(Request::new(len).align(2 * MIB), HANG);
                if fits || backing == Backing::Registered {
                    assert_eq!(got.unwrap().as_ptr().addr() % (2 * MIB), 0);
                } else {
                    assert_eq!(got.unwrap_err(), Error::TooLong { len, largest }, "{backing:?}");
                    assert_eq!(pool.pinning().wanted, 0);
                }
                // A region or two, at any rate.
                assert!(pool.pinning().wanted <= 12 * MIB, "{:?}", pool.pinning());
                drop(pool.checkout_timeout(7 * MIB / 2, HANG).unwrap());
            }
        }
        drop(device);
        d.no_trace();
    });
}

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
        // What a kernel's `malloc` gives, whose heap then keeps its limit.
        says(made(d, "malloc 0 64"), 64, unknown);
        let late = cuda::set_device_heap_limit(&device, 1 << 30).unwrap_err().to_string();
        assert!(late.contains("module"), "{late}");
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
        assert_eq!(d.broken(), ["HEAP-1"]);
        assert_eq!(device.lost(), None);
    });
}

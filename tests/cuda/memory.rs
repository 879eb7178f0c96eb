//! Where pinned memory comes from, on GPUs through the simulated driver: what only CUDA has.
//!
//! What any device must do with such memory is in `contract/memory.rs`; every call fails once in `faults.rs`.

#![allow(unsafe_code, reason = "values whose bytes stay where they are, and memory by its address")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::MmapMut;
use pinpool::{
    Backing, Device, Error, ErrorClass, HostAllocFlags, Pool, PoolBuilder, Request, SubmitError, Unpinned,
};

use crate::rig::{both, broken, flag, is_clean, open};
use crate::support::doubles::gpu::{bytes, filled, until};
use crate::support::doubles::{HANG, Report, gpu_name, on_stand_in};
use crate::support::value::Value;

const PAGE: usize = 64 << 10;

/// Pools of four extents that start with two.
fn small(device: &Device) -> PoolBuilder {
    Pool::builder(device).capacity(8 * PAGE).initial(4 * PAGE).region(4 * PAGE).extent(2 * PAGE)
}

fn allocating(flags: HostAllocFlags) -> Backing {
    Backing::HostAlloc(flags)
}

fn calls(report: &Report, name: &str) -> u64 {
    report.calls.iter().find(|c| c.0 == name).map_or(0, |c| c.1)
}

/// A value, and how often it was dropped.
fn watched(bytes: Vec<u8>) -> (Value, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = dropped.clone();
    (Value::new(bytes, move || _ = count.fetch_add(1, Ordering::SeqCst)), dropped)
}

#[test]
fn no_pinned_memory_is_an_error_or_plain_memory_that_says_so() {
    on_stand_in(|d| {
        let device = open();
        let builder = || small(&device).backing(allocating(HostAllocFlags::default()));
        // What the driver allocates is pinned as far as the device is concerned: no copy is staged.
        let (stream, memory) = (device.stream().unwrap(), device.alloc(PAGE).unwrap());
        let pool = builder().build().unwrap();
        drop(stream.upload(filled(&pool, &bytes(1, PAGE)), &memory).unwrap().wait().unwrap());
        assert_eq!(d.report().notes, Vec::<String>::new());
        drop((pool, stream, memory));
        // Memory that is not pinned has no address on the device.
        d.fail("cuMemHostRegister_v2", 1, 2, false);
        let plain = small(&device).initial(2 * PAGE).unpinned(Unpinned::Allow).build().unwrap();
        let buf = filled(&plain, b"plain");
        let error = buf.device_address(&device).unwrap_err();
        assert!(!buf.is_pinned() && error.to_string().contains("not pinned"), "{error}");
        assert_eq!(broken(d), ["HST-4"]);
        drop((buf, plain));
        let struck = d.struck();
        // Every other allocation of the simulation's starts within a page, and is made again with a page more.
        d.fail("cuMemHostAlloc", 3, 2, false);
        let pool = builder().unpinned(Unpinned::Allow).build().unwrap();
        let pinning = pool.wait_pinned(Some(HANG)).unwrap();
        assert_eq!((pinning.ready, pinning.error, d.struck() - struck), (4 * PAGE, None, 1));
        assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (2 * PAGE, 2 * PAGE));
        drop(pool);
        // Managed memory was asked for by name: nothing takes its place.
        d.fail("cuMemAllocManaged", 1, 2, false);
        let managed = small(&device).backing(Backing::Managed).unpinned(Unpinned::Allow).build();
        assert_eq!(managed.unwrap_err().class(), ErrorClass::Transient);
        d.attribute(89, 0);
        let error = small(&device).backing(Backing::Managed).build().unwrap_err();
        for part in [&*gpu_name(0), "CONCURRENT_MANAGED_ACCESS", "Backing::HostAlloc"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        drop(device);
        assert_eq!(d.final_report().leaks, Vec::<String>::new());
    });
}

#[test]
fn a_driver_that_has_ended_is_not_called_for_memory() {
    on_stand_in(|d| {
        let device = open();
        let registered = small(&device).build().unwrap();
        let allocated = small(&device).backing(allocating(HostAllocFlags::default())).build().unwrap();
        let managed = small(&device).backing(Backing::Managed).build().unwrap();
        for pool in [&registered, &allocated, &managed] {
            pool.wait_pinned(Some(HANG)).unwrap();
        }
        let (adopted, adopted_gone) = watched(bytes(1, 4 * PAGE));
        registered.adopt(adopted).unwrap();
        let ((one, one_gone), (two, two_gone)) = (watched(bytes(2, 100)), watched(bytes(3, 100)));
        let (one, two) = (device.register(one).unwrap(), device.register(two).unwrap());
        let (plain, (owner, owner_gone)) = (device.alloc(64).unwrap(), flag());
        // SAFETY: `plain` outlives every use, of which there is none.
        let raw = unsafe { device.raw_memory(plain.address(), 64, owner) }.unwrap();
        // It ends under a flight, which is told and waits for nothing.
        let (stream, memory) = (device.stream().unwrap(), device.alloc(PAGE).unwrap());
        d.hang(true);
        let flight = stream.upload(filled(&managed, &bytes(1, PAGE)), &memory).unwrap();
        d.fail("cuEventQuery", 1, 4, false);
        let error = flight.wait_timeout(HANG).unwrap_err().error;
        assert_eq!(error.class(), ErrorClass::DriverShutdown, "{error}");
        assert_eq!(device.alloc(1).unwrap_err().class(), ErrorClass::DriverShutdown);
        assert!(device.lost().is_some());
        let before = d.report();
        drop((one, registered, allocated, managed, plain, raw, stream, memory));
        // The worker comes to this last.
        assert!(two.into_inner().is_err_and(|e| e.class() == ErrorClass::DriverShutdown));
        let after = d.report();
        let of = |report: &Report| {
            ["cuMemHostUnregister", "cuMemFreeHost", "cuMemFree_v2"].map(|name| calls(report, name))
        };
        assert_eq!(of(&after), of(&before), "the driver may be gone, library and all");
        // The driver may still reach it: it is leaked.
        let gone = [&adopted_gone, &one_gone, &two_gone].map(|gone| gone.load(Ordering::SeqCst));
        assert_eq!(gone, [0; 3]);
        until("the owner goes", owner_gone);
        assert_eq!(calls(&d.report(), "cuMemFree_v2"), calls(&before, "cuMemFree_v2"));
    });
}

#[test]
fn a_refused_registration_says_why_and_gives_the_value_back() {
    on_stand_in(|d| {
        let device = open();
        let refusal = |refused: SubmitError<Arc<[u8]>>, code: &str, remedy: &str| {
            let said = refused.error.to_string();
            assert!(said.contains(code) && said.contains(remedy), "{said}");
            assert_eq!(refused.error.class(), ErrorClass::Argument);
            refused.buffer.expect("the value comes back")
        };
        // Twice the same bytes.
        let value: Arc<[u8]> = bytes(1, 10_000).into();
        let first = device.register(value.clone()).unwrap();
        let value = refusal(device.register(value).unwrap_err(), "712", "register it once");
        assert_eq!(device.registered_bytes(), 10_000);
        // Not even for another GPU: it is registered for that already.
        let other = both().1;
        let value = refusal(other.register(value).unwrap_err(), "712", "register it once");
        assert_eq!(other.registered_bytes(), 0);
        let (stream, memory) = (other.stream().unwrap(), other.alloc(10_000).unwrap());
        let first = stream.upload(first, &memory).unwrap().wait().unwrap();
        drop(first.into_inner().unwrap());
        let again = device.register(value).unwrap();
        assert!(*again == *bytes(1, 10_000));
        assert_eq!(broken(d), ["MEM-1", "MEM-1"]);
        // Cannot be written to.
        let map = MmapMut::map_anon(PAGE).unwrap().make_read_only().unwrap();
        let refused = device.register(map).unwrap_err();
        assert!(refused.error.to_string().contains("register_read_only"), "{}", refused.error);
        let map = refused.buffer.unwrap();
        let registered = device.register_read_only(map).unwrap();
        let map = registered.into_inner().unwrap();
        assert_eq!(broken(d)[2..], ["HST-5"]);
        // Where the device has no such thing, what can be written to is registered like anything else.
        d.attribute(113, 0);
        let fallback = device.register_read_only(bytes(2, 100)).unwrap();
        assert!(fallback.is_read_only());
        let refused = device.register_read_only(map).unwrap_err();
        assert!(refused.error.to_string().contains("not mapped") && refused.buffer.is_some());
        assert_eq!(broken(d)[3..], ["HST-5"], "the flag is not passed");
        // Not supported at all.
        d.fail("cuMemHostRegister_v2", 1, 801, false);
        let refused = device.register(bytes(3, 100)).unwrap_err();
        assert!(refused.error.to_string().contains("Backing::HostAlloc"), "{}", refused.error);
        assert!(refused.buffer.unwrap() == bytes(3, 100));
        drop((again, fallback, stream, memory, device, other));
        assert_eq!(d.final_report().leaks, Vec::<String>::new());
    });
}

/// Registered memory serves the devices of its family.
#[test]
fn a_value_that_is_registered_with_a_device_of_another_family_is_refused() {
    on_stand_in(|_| {
        let device = open();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(4096).unwrap());
        let host = Device::open("host").unwrap();
        let value = host.register(vec![1_u8; 4096]).unwrap();
        assert!(matches!(value.device_address(&device), Err(Error::Mismatch { .. })));
        let refused = stream.upload(value, &memory).unwrap_err();
        assert!(matches!(refused.error, Error::Mismatch { .. }), "{}", refused.error);
        let refused = stream.upload(Arc::new(refused.buffer.unwrap()), &memory).unwrap_err();
        assert!(matches!(refused.error, Error::Mismatch { .. }), "{}", refused.error);
        let value = Arc::into_inner(refused.buffer.unwrap()).unwrap();
        assert_eq!(value.into_inner().unwrap(), [1; 4096]);
    });
}

#[test]
fn what_cannot_be_unregistered_is_leaked_and_not_dropped() {
    on_stand_in(|d| {
        let device = open();
        let (kept, dropped) = watched(bytes(1, PAGE));
        let value = device.register(kept).unwrap();
        d.fail("cuMemHostUnregister", 1, 999, false);
        drop(value);
        let (kept, also) = watched(bytes(2, PAGE));
        let value = device.register(kept).unwrap();
        until("the first was tried", || d.struck() == 1);
        d.fail("cuMemHostUnregister", 1, 999, false);
        let error = value.into_inner().err().unwrap();
        assert!(error.to_string().contains("cuMemHostUnregister failed with 999"), "{error}");
        // Later calls of the worker are done, and so are these: it does one thing at a time.
        drop(device.register(bytes(3, 100)).unwrap().into_inner().unwrap());
        assert_eq!((dropped.load(Ordering::SeqCst), also.load(Ordering::SeqCst)), (0, 0));
        assert_eq!(device.registered_bytes(), 2 * PAGE, "they are still counted");
        drop(device);
        assert_eq!(d.final_report().leaks, ["registrations 2"]);
    });
}

#[test]
fn a_value_in_flight_on_a_lost_device_is_never_dropped() {
    on_stand_in(|d| {
        let device = open();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(PAGE).unwrap());
        let [(owned, a), (shared, b), (idle, c)] = [1, 2, 3].map(|i| watched(bytes(i, PAGE)));
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
        let idle = refused.buffer.unwrap();
        assert!(device.register(bytes(4, 100)).unwrap_err().error.is_device_lost());
        // Nor can the lost device unregister anything.
        assert!(idle.into_inner().is_err());
        drop((shared, stream, memory));
        let all = [a, b, c].map(|dropped| dropped.load(Ordering::SeqCst));
        assert_eq!(all, [0; 3]);
    });
}

#[test]
fn adopting_is_rolled_back_when_a_part_fails() {
    on_stand_in(|d| {
        let device = open();
        let pool = small(&device).initial(0).build().unwrap();
        for (nth, code) in [(1, 1), (2, 2), (3, 999)] {
            let mut map = MmapMut::map_anon(6 * PAGE).unwrap();
            map.fill(nth as u8);
            let at = map.as_ptr();
            d.fail("cuMemHostRegister_v2", nth, code, false);
            let refused = pool.adopt(map).unwrap_err();
            // The program's memory may be any: 1 speaks of the argument there.
            let class = if code == 2 { ErrorClass::Transient } else { ErrorClass::Argument };
            assert_eq!(refused.error.class(), class, "{}", refused.error);
            assert!(refused.error.to_string().contains(&format!("failed with {code}")), "{}", refused.error);
            let map = refused.buffer.unwrap();
            assert!(map.as_ptr() == at && map.iter().all(|b| *b == nth as u8));
            // No part of it is registered, so all of it can be.
            let value = device.register(map).unwrap();
            value.into_inner().unwrap();
            assert_eq!((pool.regions(), pool.pinning().wanted), (vec![], 0));
            pool.check().unwrap();
        }
        // Memory that is registered already.
        let value: Arc<[u8]> = bytes(1, 100).into();
        let _kept = device.register(value.clone()).unwrap();
        assert_eq!(d.report().violations, Vec::<String>::new());
        // Not even the rollback works: then the memory is leaked, since the device may still reach it.
        let (kept, dropped) = watched(bytes(1, 6 * PAGE));
        d.fail("cuMemHostRegister_v2", 3, 1, false);
        d.fail("cuMemHostUnregister", 2, 999, false);
        let refused = pool.adopt(kept).unwrap_err();
        assert!(refused.buffer.is_none());
        assert_eq!(dropped.load(Ordering::SeqCst), 0);
        // The pool is as before.
        pool.adopt(MmapMut::map_anon(8 * PAGE).unwrap()).unwrap();
        drop(filled(&pool, b"served"));
        pool.check().unwrap();
        drop((pool, _kept, device));
        assert_eq!(d.final_report().leaks, ["registrations 1"]);
    });
}

#[test]
fn an_adopted_region_that_cannot_be_unpinned_is_leaked() {
    on_stand_in(|d| {
        let device = open();
        let pool = small(&device).initial(0).build().unwrap();
        let (kept, dropped) = watched(bytes(1, 6 * PAGE));
        let info = pool.adopt(kept).unwrap();
        d.fail("cuMemHostUnregister", 1, 999, false);
        assert_eq!(pool.trim(0), info.len);
        // The worker has done it when it has done a later call.
        drop(device.alloc(1).unwrap());
        assert_eq!((dropped.load(Ordering::SeqCst), d.struck()), (0, 1));
        // And the driver's own memory likewise.
        let allocated = small(&device).backing(allocating(HostAllocFlags::default())).build().unwrap();
        allocated.wait_pinned(Some(HANG)).unwrap();
        d.fail("cuMemFreeHost", 1, 999, false);
        allocated.trim(0);
        drop(device.alloc(1).unwrap());
        drop(filled(&allocated, b"goes on"));
        drop((pool, allocated, device));
        assert_eq!(d.final_report().leaks, ["hosts 1", "registrations 1"]);
    });
}

/// The driver knows what it has allocated itself as well as what was registered.
#[test]
fn a_pools_own_memory_is_told_from_ordinary_memory() {
    on_stand_in(|d| {
        let device = open();
        for backing in [Backing::Registered, allocating(HostAllocFlags::default())] {
            let pool = small(&device).backing(backing).build().unwrap();
            let buf = filled(&pool, b"host memory");
            // SAFETY: refused.
            let refusal = unsafe { device.raw_memory(buf.as_ptr() as u64, buf.len(), ()) }.unwrap_err();
            let told = refusal.error.to_string();
            assert!(told.contains("that is page-locked host memory"), "{backing:?}: {told}");
        }
        let pool = small(&device).backing(Backing::Managed).build().unwrap();
        let buf = filled(&pool, b"managed memory");
        // SAFETY: the buffer outlives it, and nothing is copied.
        drop(unsafe { device.raw_memory(buf.as_ptr() as u64, buf.len(), ()) }.unwrap());
        drop((buf, pool, device));
        is_clean(d);
    });
}

/// What no extent is sure to have room for is refused at once, instead of pinning all of the capacity in search of it.
#[test]
fn what_the_driver_allocates_starts_on_a_page_only() {
    on_stand_in(|d| {
        const MIB: usize = 1 << 20;
        let device = open();
        let largest = 2 * MIB + 4096 - 32;
        for backing in [Backing::Registered, allocating(HostAllocFlags::default()), Backing::Managed] {
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
        is_clean(d);
    });
}

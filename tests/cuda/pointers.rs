//! Device memory that others allocated, and the device-side heap, on the simulated driver: what only CUDA has, and what
//! only a simulation can be made to do.
//!
//! What any device must do with all of these is in `contract`, and each driver call fails once in `faults.rs`.

#![allow(unsafe_code, reason = "calling the stand-in, and memory by its address")]

use std::sync::{Arc, Mutex};

use pinpool::cuda::{device_heap_limit, set_device_heap_limit};
use pinpool::{Device, DeviceSlice, Error, ErrorClass, Pool, Stream};

use crate::rig::{both, is_clean, open};
use crate::support::doubles::gpu::{self, all_back, bytes, calls, filled, until};
use crate::support::doubles::{HANG, StandIn, gpu_name, on_stand_in};

/// Memory of the device-side heap, of which a kernel has got so many bytes.
fn device_malloc(d: &StandIn, len: usize) -> u64 {
    d.command(&format!("malloc 0 {len}")).parse().unwrap()
}

/// Memory of another context (0), managed (1), or mapped (2).
fn special(d: &StandIn, device: usize, kind: u32, len: usize) -> u64 {
    d.command(&format!("memory {device} {kind} {len}")).parse().unwrap()
}

fn pool(device: &Device) -> Pool {
    Pool::builder(device).capacity(2 << 20).build().unwrap()
}

fn fetch(pool: &Pool, stream: &Stream, memory: impl Into<DeviceSlice>) -> Vec<u8> {
    let memory = memory.into();
    let landing = pool.checkout_timeout(memory.len(), HANG).unwrap();
    stream.download(memory, landing).unwrap().wait().unwrap().to_vec()
}

/// The text for a refused address.
fn refused(device: &Device, at: u64, length: usize) -> String {
    // SAFETY: refused.
    let refusal = unsafe { device.raw_memory(at, length, "owner".to_owned()) }.unwrap_err();
    assert_eq!(refusal.buffer.as_deref(), Some("owner"), "the owner comes back");
    let text = refusal.error.to_string();
    assert_eq!(refusal.error.class(), ErrorClass::Argument);
    assert!(matches!(refusal.error, Error::Argument(_)), "{text}");
    let what = format!("{length} bytes at address {at:#x} cannot be used as memory of {}", device.name());
    assert!(text.contains(&what), "{text}");
    text
}

#[test]
fn an_address_that_copies_cannot_use_is_told_what_it_is() {
    gpu::on_stand_in(|gpu, d| {
        let (device, other) = both();
        let (pool, stream, far) = (pool(&device), device.stream().unwrap(), other.alloc(64).unwrap());
        let says = |at, len, words: &[&str]| {
            let text = refused(&device, at, len);
            for word in words {
                assert!(text.contains(word), "{word:?} is not in: {text}");
            }
        };
        let plain = Box::new([0_u8; 64]);
        says(plain.as_ptr() as u64, 64, &["ordinary host memory", "blocking copies"]);
        let local = [0_u8; 64];
        says(local.as_ptr() as u64, 64, &["ordinary"]);
        let pinned = pool.checkout(64).unwrap();
        says(pinned.as_ptr() as u64, 64, &["page-locked host memory", "buffer of a pool"]);
        says(far.address(), 64, &[&format!("that is memory of {}", gpu_name(1))]);
        says(special(d, 0, 0, 64), 64, &["another context", "peer access", "primary"]);
        let memory = gpu.memory(1000) as u64;
        let start = format!("starts at {memory:#x}");
        says(memory, 1001, &[&start, "1000 bytes", "leaves it by 1"]);
        says(memory + 999, 41, &[&start, "leaves it by 40"]);
        says(memory + 1, usize::MAX, &[&format!("leaves it by {}", usize::MAX - 999)]);
        // Known to no allocator: the heap of kernels, what was freed, what never was, and the end of everything.
        let both = ["malloc", "no copy call accepts", "cudaMalloc", "Device::alloc", "was freed"];
        says(device_malloc(d, 64), 16, &both);
        gpu.ok("cuMemFree_v2", &[memory as usize]);
        says(memory, 1, &both);
        let pooled = gpu.stream();
        let freed = gpu.made("cuMemAllocAsync", &[64, pooled]);
        gpu.ok("cuMemFreeAsync", &[freed, pooled]);
        says(freed as u64, 64, &both);
        says(u64::MAX, 1, &both);
        says(0, 64, &["null"]);
        // SAFETY: refused.
        let empty = unsafe { device.raw_memory(far.address(), 0, ()) }.unwrap_err().error;
        assert!(
            matches!(
                &empty,
                Error::Argument(text) if text.contains("nothing to copy")
            ),
            "{empty}"
        );
        // Memory of other kinds is memory all the same.
        let managed = special(d, 1, 1, 64);
        for at in [
            managed,
            special(d, 0, 1, 64),
            special(d, 0, 2, 64),
            gpu.made("cuMemAllocAsync", &[64, pooled]) as u64,
        ] {
            // SAFETY: no code frees it, and only this thread uses it.
            let memory = unsafe { device.raw_memory(at, 64, ()) }.unwrap();
            gpu.ok("cuStreamSynchronize", &[pooled]);
            if at != managed {
                stream.upload_blocking(&[9; 64], &memory).unwrap();
                assert!(fetch(&pool, &stream, &memory) == [9; 64]);
            }
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
        assert_eq!(device.lost(), None);
    });
}

#[test]
fn what_the_driver_says_of_an_address_comes_with_the_owner() {
    on_stand_in(|d| {
        let device = open();
        let memory = device.alloc(64).unwrap();
        for (name, code, class) in [
            ("cuPointerGetAttributes", 999, ErrorClass::Argument),
            ("cuCtxGetCurrent", 2, ErrorClass::Transient),
            ("cuPointerGetAttributes", 700, ErrorClass::DeviceLost),
        ] {
            d.fail(name, 1, code, false);
            // SAFETY: refused.
            let refusal = unsafe { device.raw_memory(memory.address(), 64, "owner".to_owned()) }.unwrap_err();
            assert_eq!((refusal.error.class(), refusal.buffer.as_deref()), (class, Some("owner")));
            assert!(matches!(&refusal.error, Error::Device(e) if e.call == name), "{}", refusal.error);
        }
        // The last error lost the device, and the driver is asked about addresses no more.
        let asked = calls(d, "cuPointerGetAttributes");
        // SAFETY: refused.
        let refusal = unsafe { device.raw_memory(memory.address(), 64, ()) }.unwrap_err();
        assert!(refusal.error.is_device_lost() && device.lost().is_some());
        assert_eq!(calls(d, "cuPointerGetAttributes"), asked);
    });
}

/// Records on which thread it is dropped, and may panic then.
struct Owner {
    gone: Arc<Mutex<Option<String>>>,
    panics: bool,
}

impl Drop for Owner {
    fn drop(&mut self) {
        *self.gone.lock().unwrap() = Some(std::thread::current().name().unwrap_or_default().into());
        assert!(!self.panics, "as this owner does");
    }
}

#[test]
fn an_owner_goes_on_the_worker_when_the_last_copy_is_done() {
    on_stand_in(|d| {
        let device = open();
        let (pool, stream, memory) = (pool(&device), device.stream().unwrap(), device.alloc(1000).unwrap());
        for panics in [true, false] {
            let gone = Arc::new(Mutex::new(None));
            let owner = Owner { gone: gone.clone(), panics };
            // SAFETY: `memory` lives to the end, and one stream uses it.
            let raw = unsafe { device.raw_memory(memory.address(), 1000, owner) }.unwrap();
            d.hang(true);
            drop(stream.upload(filled(&pool, &bytes(1, 1000)), &raw).unwrap());
            drop(stream.copy(raw.slice(..10), raw.slice(10..20)).unwrap());
            drop(raw);
            // Not yet, whatever else the worker does meanwhile.
            drop(device.alloc(1).unwrap());
            device.reap();
            assert_eq!(*gone.lock().unwrap(), None);
            d.hang(false);
            until("the owner goes", || gone.lock().unwrap().is_some());
            assert_eq!(gone.lock().unwrap().as_deref(), Some(&*format!("pinpool-{}", gpu_name(0))));
        }
        // Refused, the owner is the caller's again, to be dropped where that is.
        let gone = Arc::new(Mutex::new(None));
        // SAFETY: refused.
        let refusal =
            unsafe { device.raw_memory(7, 7, Owner { gone: gone.clone(), panics: false }) }.unwrap_err();
        assert_eq!(*gone.lock().unwrap(), None);
        drop(refusal);
        assert!(gone.lock().unwrap().is_some());
        drop((pool, stream, memory, device));
        is_clean(d);
    });
}

#[test]
fn an_owner_may_use_the_device_when_it_goes() {
    struct Last(Option<(Device, Stream, DeviceSlice)>, Arc<Mutex<bool>>);
    impl Drop for Last {
        fn drop(&mut self) {
            // Calls for the worker, made on the worker; and the last handle to everything is dropped here.
            let (device, stream, memory) = self.0.take().unwrap();
            stream.upload_blocking(&[5; 64], &memory).unwrap();
            drop(device.alloc(64).unwrap());
            *self.1.lock().unwrap() = true;
        }
    }
    on_stand_in(|d| {
        let device = open();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(64).unwrap());
        let (at, done) = (memory.address(), Arc::new(Mutex::new(false)));
        let owner = Last(Some((device.clone(), stream, memory)), done.clone());
        // SAFETY: the owner has the memory.
        drop(unsafe { device.raw_memory(at, 64, owner) }.unwrap());
        drop(device);
        until("the owner is done", || *done.lock().unwrap());
        is_clean(d);
    });
}

/// Where the wait fails nothing is copied, and both buffers return by themselves.
#[test]
fn a_copy_between_host_memory_that_fails_gives_both_buffers_back() {
    on_stand_in(|d| {
        let device = open();
        let (pool, stream) = (pool(&device), device.stream().unwrap());
        let pair = || (filled(&pool, &bytes(3, 1000)), pool.checkout(1000).unwrap());
        for after in [false, true] {
            d.fail("cuStreamSynchronize", 1, 1, after);
            let (from, to) = pair();
            let refusal = stream.copy_host(from, to).unwrap_err();
            assert!(refusal.buffer.is_none() && refusal.error.to_string().contains("cuStreamSynchronize"));
        }
        all_back(&pool);
        // The device dies first: both are quarantined, and the caller gets the error.
        d.fail("cuStreamSynchronize", 1, 700, false);
        let (from, to) = pair();
        let refusal = stream.copy_host(from, to).unwrap_err();
        assert!(refusal.buffer.is_none() && refusal.error.is_device_lost(), "{}", refusal.error);
        until("both are quarantined", || pool.stats().quarantined_bytes >= 2000);
        assert_eq!(pool.stats().in_flight_bytes, 0, "{:?}", pool.stats());
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

#[test]
fn the_heaps_limit_is_set_before_it_is_used() {
    on_stand_in(|d| {
        let (device, other) = both();
        set_device_heap_limit(&device, 64 << 20).unwrap();
        assert_eq!((device_heap_limit(&device), device_heap_limit(&other)), (Ok(64 << 20), Ok(8 << 20)));
        device_malloc(d, 64);
        let error = set_device_heap_limit(&device, 1 << 30).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Argument(_)), "{text}");
        for word in [&*gpu_name(0), "cuCtxSetLimit", "1073741824", "before any such module is loaded"] {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
        assert_eq!(device_heap_limit(&device), Ok(64 << 20));
        set_device_heap_limit(&other, 16 << 20).unwrap();
        // Other errors are what they are.
        d.fail("cuCtxSetLimit", 1, 2, false);
        assert!(set_device_heap_limit(&other, 1 << 40).unwrap_err().is_retryable());
        d.fail("cuCtxGetLimit", 1, 700, false);
        assert!(device_heap_limit(&other).unwrap_err().is_device_lost());
        assert!(set_device_heap_limit(&other, 1).unwrap_err().is_device_lost() && other.lost().is_some());
        assert_eq!(device.lost(), None);
        let broken = d.report().violations;
        assert!(broken.len() == 1 && broken[0].starts_with("HEAP-1"), "{broken:?}");
    });
}

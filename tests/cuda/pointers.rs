//! Device memory that others allocated, copies between host memory, and the device-side heap, on the stand-in driver: what
//! only CUDA has, and what only a double can be made to do.
//!
//! What any device must do with all of these is in `contract`, and each driver call fails once in `driver.rs`. Each
//! test runs in a child of its own, which loads the stand-in; see `support/doubles`.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "calling the stand-in, and memory by its address")]

use std::sync::{Arc, Mutex};

use pinpool::cuda::{device_heap_limit, set_device_heap_limit};
use pinpool::{Device, DeviceSlice, Error, ErrorClass, Pool, Stream};

use crate::support::doubles::gpu::{bytes, filled, until};
use crate::support::doubles::{self, HANG, StandIn};

/// Runs the body of a test in a child, on a stand-in that is as just loaded.
fn on_stand_in(test: &str, environment: &[(&str, &str)], body: impl FnOnce(&Driver)) {
    doubles::on_stand_in_with(test, environment, |stand_in| body(&Driver(stand_in)));
}

/// The stand-in, with calls that the test makes itself, as another user of the driver in the same process would.
struct Driver(StandIn);

impl Driver {
    /// At most four arguments of the size of a pointer.
    fn call(&self, name: &str, arguments: [usize; 4]) -> u32 {
        let [a, b, c, d] = arguments;
        // SAFETY: integer and pointer arguments are passed alike, in registers, where one too many does no harm; what
        // the tests point at is valid.
        unsafe { self.0.get::<unsafe extern "C" fn(usize, usize, usize, usize) -> u32>(name)(a, b, c, d) }
    }

    /// For a call that writes a word to its first argument.
    fn made(&self, name: &str, b: usize, c: usize) -> usize {
        let mut word = 0_usize;
        assert_eq!(self.call(name, [(&raw mut word) as usize, b, c, 0]), 0, "{name}");
        word
    }

    /// The primary context of a GPU, current on this thread, as the runtime API has it.
    fn runtime(&self, device: usize) -> usize {
        let context = self.made("cuDevicePrimaryCtxRetain", device, 0);
        assert_eq!(self.call("cuCtxSetCurrent", [context, 0, 0, 0]), 0);
        context
    }

    fn device_malloc(&self, len: usize) -> u64 {
        // SAFETY: `pointers.rs` of the stand-in has the signature, here and below.
        unsafe { self.0.get::<extern "C" fn(usize, usize) -> u64>("standin_device_malloc")(0, len) }
    }

    fn special(&self, device: usize, kind: u32, len: usize) -> u64 {
        // SAFETY: as above.
        unsafe { self.0.get::<extern "C" fn(usize, u32, usize) -> u64>("standin_memory")(device, kind, len) }
    }

    fn calls(&self, name: &str) -> u64 {
        self.0.report().calls.iter().find(|c| c.0 == name).map_or(0, |c| c.1)
    }

    /// Nothing was broken, and with everything closed nothing is left.
    fn clean(&self) {
        let report = self.0.final_report();
        assert_eq!((report.violations, report.leaks), (vec![], vec![]));
    }
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
    on_stand_in("an_address_that_copies_cannot_use_is_told_what_it_is", &[], |d| {
        let (device, other) = (Device::open("cuda:0").unwrap(), Device::open("cuda:1").unwrap());
        let (pool, stream, far) = (pool(&device), device.stream().unwrap(), other.alloc(64).unwrap());
        d.runtime(0);
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
        says(far.address(), 64, &["that is memory of cuda:1"]);
        says(d.special(0, 0, 64), 64, &["another context", "peer access", "primary"]);
        let memory = d.made("cuMemAlloc_v2", 1000, 0) as u64;
        let start = format!("starts at {memory:#x}");
        says(memory, 1001, &[&start, "1000 bytes", "leaves it by 1"]);
        says(memory + 999, 41, &[&start, "leaves it by 40"]);
        says(memory + 1, usize::MAX, &[&format!("leaves it by {}", usize::MAX - 999)]);
        // Known to no allocator: the heap of kernels, what was freed, what never was, and the end of everything.
        let both = ["malloc", "no copy call accepts", "cudaMalloc", "Device::alloc", "was freed"];
        says(d.device_malloc(64), 16, &both);
        assert_eq!(d.call("cuMemFree_v2", [memory as usize, 0, 0, 0]), 0);
        says(memory, 1, &both);
        let pooled = d.made("cuStreamCreate", 1, 0);
        let freed = d.made("cuMemAllocAsync", 64, pooled);
        assert_eq!(d.call("cuMemFreeAsync", [freed, pooled, 0, 0]), 0);
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
        let managed = d.special(1, 1, 64);
        for at in
            [managed, d.special(0, 1, 64), d.special(0, 2, 64), d.made("cuMemAllocAsync", 64, pooled) as u64]
        {
            // SAFETY: no code frees it, and only this thread uses it.
            let memory = unsafe { device.raw_memory(at, 64, ()) }.unwrap();
            assert_eq!(d.call("cuStreamSynchronize", [pooled, 0, 0, 0]), 0);
            if at != managed {
                stream.upload_blocking(&[9; 64], &memory).unwrap();
                assert!(fetch(&pool, &stream, &memory) == [9; 64]);
            }
        }
        assert_eq!(d.0.report().violations, Vec::<String>::new());
        assert_eq!(device.lost(), None);
    });
}

#[test]
fn what_the_driver_says_of_an_address_comes_with_the_owner() {
    on_stand_in("what_the_driver_says_of_an_address_comes_with_the_owner", &[], |d| {
        let device = Device::open("cuda:0").unwrap();
        let memory = device.alloc(64).unwrap();
        for (name, code, class) in [
            ("cuPointerGetAttributes", 999, ErrorClass::Argument),
            ("cuCtxGetCurrent", 2, ErrorClass::Transient),
            ("cuPointerGetAttributes", 700, ErrorClass::DeviceLost),
        ] {
            d.0.fail(name, 1, code, false);
            // SAFETY: refused.
            let refusal = unsafe { device.raw_memory(memory.address(), 64, "owner".to_owned()) }.unwrap_err();
            assert_eq!((refusal.error.class(), refusal.buffer.as_deref()), (class, Some("owner")));
            assert!(matches!(&refusal.error, Error::Device(e) if e.call == name), "{}", refusal.error);
        }
        // The last error lost the device, and the driver is asked about addresses no more.
        let asked = d.calls("cuPointerGetAttributes");
        // SAFETY: refused.
        let refusal = unsafe { device.raw_memory(memory.address(), 64, ()) }.unwrap_err();
        assert!(refusal.error.is_device_lost() && device.lost().is_some());
        assert_eq!(d.calls("cuPointerGetAttributes"), asked);
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
    on_stand_in("an_owner_goes_on_the_worker_when_the_last_copy_is_done", &[], |d| {
        let device = Device::open("cuda:0").unwrap();
        let (pool, stream, memory) = (pool(&device), device.stream().unwrap(), device.alloc(1000).unwrap());
        for panics in [true, false] {
            let gone = Arc::new(Mutex::new(None));
            let owner = Owner { gone: gone.clone(), panics };
            // SAFETY: `memory` lives to the end, and one stream uses it.
            let raw = unsafe { device.raw_memory(memory.address(), 1000, owner) }.unwrap();
            d.0.hang(true);
            drop(stream.upload(filled(&pool, &bytes(1, 1000)), &raw).unwrap());
            drop(stream.copy(raw.slice(..10), raw.slice(10..20)).unwrap());
            drop(raw);
            // Not yet, whatever else the worker does meanwhile.
            drop(device.alloc(1).unwrap());
            device.reap();
            assert_eq!(*gone.lock().unwrap(), None);
            d.0.hang(false);
            until("the owner goes", || gone.lock().unwrap().is_some());
            assert_eq!(gone.lock().unwrap().as_deref(), Some("pinpool-cuda:0"));
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
        d.clean();
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
    on_stand_in("an_owner_may_use_the_device_when_it_goes", &[], |d| {
        let device = Device::open("cuda:0").unwrap();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(64).unwrap());
        let (at, done) = (memory.address(), Arc::new(Mutex::new(false)));
        let owner = Last(Some((device.clone(), stream, memory)), done.clone());
        // SAFETY: the owner has the memory.
        drop(unsafe { device.raw_memory(at, 64, owner) }.unwrap());
        drop(device);
        until("the owner is done", || *done.lock().unwrap());
        d.clean();
    });
}

#[test]
fn users_of_the_runtime_api_share_the_context() {
    on_stand_in("users_of_the_runtime_api_share_the_context", &[], |d| {
        let device = Device::open("cuda:0").unwrap();
        let (pool, stream) = (pool(&device), device.stream().unwrap());
        let ours = device.alloc(1000).unwrap();
        drop(stream.upload(filled(&pool, &bytes(1, 1000)), &ours).unwrap().wait().unwrap());
        // What `cudaMalloc`, `cudaStreamCreate` and `cudaMemcpyAsync` do.
        let context = d.runtime(0);
        let (theirs, their_stream) = (d.made("cuMemAlloc_v2", 1000, 0), d.made("cuStreamCreate", 0, 0));
        let their_copy = |to: usize, from: usize| {
            assert_eq!(d.call("cuMemcpyDtoDAsync_v2", [to, from, 1000, their_stream]), 0);
        };
        let their_sync = || assert_eq!(d.call("cuStreamSynchronize", [their_stream, 0, 0, 0]), 0);
        // Their memory in copies of the crate, once their work on it is complete: only waiting orders their stream and
        // the crate's.
        // SAFETY: freed at the end, and all work is waited for on either side.
        let raw = unsafe { device.raw_memory(theirs as u64, 1000, ()) }.unwrap();
        drop(stream.upload(filled(&pool, &bytes(2, 1000)), &raw).unwrap().wait().unwrap());
        // The crate's memory in their copies, by its address; and their memory read by the crate.
        their_copy(ours.address() as usize, theirs);
        their_sync();
        assert!(fetch(&pool, &stream, &ours) == bytes(2, 1000));
        // A buffer of the pool is pinned for them as well.
        let buf = filled(&pool, &bytes(3, 1000));
        assert_eq!(d.call("cuMemcpyHtoDAsync_v2", [theirs, buf.as_ptr() as usize, 1000, their_stream]), 0);
        their_sync();
        assert!(fetch(&pool, &stream, &raw) == bytes(3, 1000));
        assert_eq!(d.0.report().notes, Vec::<String>::new(), "nothing was copied from pageable memory");
        // Their thread is as it was, and so is their context when the crate's device is closed.
        assert_eq!(d.made("cuCtxGetCurrent", 0, 0), context);
        drop((raw, buf, ours, pool, stream, device));
        until("we are gone", || d.calls("cuDevicePrimaryCtxRelease_v2") == 1);
        assert_eq!(d.call("cuMemFree_v2", [theirs, 0, 0, 0]), 0);
        assert_eq!(d.call("cuStreamDestroy_v2", [their_stream, 0, 0, 0]), 0);
        assert_eq!(d.call("cuDevicePrimaryCtxRelease_v2", [0; 4]), 0);
        d.clean();
    });
}

#[test]
fn copies_between_host_memory_wait_for_the_stream() {
    on_stand_in("copies_between_host_memory_wait_for_the_stream", &[], |d| {
        let device = Device::open("cuda:0").unwrap();
        let (pool, stream, memory) = (pool(&device), device.stream().unwrap(), device.alloc(1000).unwrap());
        d.0.hang(true);
        drop(stream.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap());
        let first = stream.download(&memory, pool.checkout(1000).unwrap()).unwrap();
        let (from, to) = (filled(&pool, &bytes(2, 1000)), pool.checkout(2000).unwrap());
        let copies = std::thread::spawn({
            let stream = stream.clone();
            move || stream.copy_host(from, to).unwrap()
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!copies.is_finished(), "the stream has not come to it");
        d.0.hang(false);
        let (from, to) = copies.join().unwrap();
        let to = to.wait().unwrap();
        assert!(*to == bytes(2, 1000), "with the length of what was copied");
        assert!(
            first.is_done().unwrap() && *first.wait().unwrap() == bytes(1, 1000),
            "in the stream's order"
        );
        assert!(*from.wait().unwrap() == bytes(2, 1000));
        // Where the wait fails nothing is copied, and both buffers return by themselves.
        for after in [false, true] {
            d.0.fail("cuStreamSynchronize", 1, 1, after);
            let (from, to) = (filled(&pool, &bytes(3, 1000)), pool.checkout(1000).unwrap());
            let refusal = stream.copy_host(from, to).unwrap_err();
            assert!(refusal.buffer.is_none() && refusal.error.to_string().contains("cuStreamSynchronize"));
        }
        drop(to);
        until("all is back", || (pool.stats().in_flight_bytes, pool.stats().checked_out_bytes) == (0, 0));
        pool.check().unwrap();
        // The device dies first: both are quarantined, and the caller gets the error.
        d.0.fail("cuStreamSynchronize", 1, 700, false);
        let (from, to) = (filled(&pool, &bytes(4, 1000)), pool.checkout(1000).unwrap());
        let refusal = stream.copy_host(from, to).unwrap_err();
        assert!(refusal.buffer.is_none() && refusal.error.is_device_lost(), "{}", refusal.error);
        until("both are quarantined", || pool.stats().quarantined_bytes >= 2000);
        assert_eq!(pool.stats().in_flight_bytes, 0, "{:?}", pool.stats());
        assert_eq!(d.0.report().violations, Vec::<String>::new());
    });
}

#[test]
fn a_driver_that_has_ended_is_not_called_for_memory() {
    on_stand_in("a_driver_that_has_ended_is_not_called_for_memory", &[], |d| {
        let device = Device::open("cuda:0").unwrap();
        let (stream, plain) = (device.stream().unwrap(), device.alloc(64).unwrap());
        let gone = Arc::new(Mutex::new(None));
        // SAFETY: `plain` outlives every use, of which there is none.
        let raw =
            unsafe { device.raw_memory(plain.address(), 64, Owner { gone: gone.clone(), panics: false }) };
        stream.synchronize().unwrap();
        d.0.fail("cuPointerGetAttributes", 1, 4, false);
        // SAFETY: refused.
        let refusal = unsafe { device.raw_memory(plain.address(), 64, ()) }.unwrap_err();
        assert_eq!(refusal.error.class(), ErrorClass::DriverShutdown);
        drop((plain, raw));
        // The owner is dropped last, and by then the other has had its turn.
        until("the owner goes", || gone.lock().unwrap().is_some());
        assert_eq!(d.calls("cuMemFree_v2"), 0);
        drop((stream, device));
    });
}

#[test]
fn the_heaps_limit_is_set_before_it_is_used() {
    on_stand_in("the_heaps_limit_is_set_before_it_is_used", &[], |d| {
        let (device, other) = (Device::open("cuda:0").unwrap(), Device::open("cuda:1").unwrap());
        assert_eq!(device_heap_limit(&device), Ok(8 << 20));
        set_device_heap_limit(&device, 64 << 20).unwrap();
        assert_eq!((device_heap_limit(&device), device_heap_limit(&other)), (Ok(64 << 20), Ok(8 << 20)));
        d.device_malloc(64);
        let error = set_device_heap_limit(&device, 1 << 30).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Argument(_)), "{text}");
        for word in ["cuda:0", "cuCtxSetLimit", "1073741824", "before any such module is loaded"] {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
        assert_eq!(device_heap_limit(&device), Ok(64 << 20));
        set_device_heap_limit(&other, 16 << 20).unwrap();
        // Other errors are what they are.
        d.0.fail("cuCtxSetLimit", 1, 2, false);
        assert!(set_device_heap_limit(&other, 1 << 40).unwrap_err().is_retryable());
        d.0.fail("cuCtxGetLimit", 1, 700, false);
        assert!(device_heap_limit(&other).unwrap_err().is_device_lost());
        assert!(set_device_heap_limit(&other, 1).unwrap_err().is_device_lost() && other.lost().is_some());
        assert_eq!(device.lost(), None);
        let host = Device::open("host").unwrap();
        for error in [device_heap_limit(&host).unwrap_err(), set_device_heap_limit(&host, 1).unwrap_err()] {
            assert!(matches!(&error, Error::Unsupported(text) if text.contains("host:0")), "{error}");
        }
        let broken = d.0.report().violations;
        assert!(broken.len() == 1 && broken[0].starts_with("HEAP-1"), "{broken:?}");
    });
}

#[test]
fn a_capture_elsewhere_survives_all_of_it() {
    on_stand_in("a_capture_elsewhere_survives_all_of_it", &[], |d| {
        let device = Device::open("cuda:0").unwrap();
        d.runtime(0);
        let (pool, other) = (pool(&device), device.stream().unwrap());
        let captured = d.made("cuStreamCreate", 1, 0);
        // In global mode: unsafe calls of any thread would spoil it, this thread's among them.
        assert_eq!(d.call("cuStreamBeginCapture_v2", [captured, 0, 0, 0]), 0);
        set_device_heap_limit(&device, device_heap_limit(&device).unwrap()).unwrap();
        for round in 0..10 {
            let memory = device.alloc(1000).unwrap();
            drop(other.upload(filled(&pool, &bytes(round, 1000)), &memory).unwrap());
            let (at, owner) = (memory.address(), memory.clone());
            drop(memory);
            // SAFETY: the owner keeps it, and the other stream uses it in order.
            let raw = unsafe { device.raw_memory(at, 1000, owner) }.unwrap();
            assert!(fetch(&pool, &other, &raw) == bytes(round, 1000));
            let (from, to) = (filled(&pool, &bytes(round, 500)), pool.checkout(500).unwrap());
            let (_, to) = other.copy_host(from, to).unwrap();
            assert!(*to.wait().unwrap() == bytes(round, 500));
        }
        drop((pool, other, device));
        until("we are gone", || d.calls("cuDevicePrimaryCtxRelease_v2") == 1);
        let mut graph = 0_usize;
        let ended = d.call("cuStreamEndCapture", [captured, (&raw mut graph) as usize, 0, 0]);
        assert_eq!(ended, 0, "it is spoiled");
        assert_eq!(d.call("cuGraphDestroy", [graph, 0, 0, 0]), 0);
        assert_eq!(d.call("cuStreamDestroy_v2", [captured, 0, 0, 0]), 0);
        assert_eq!(d.call("cuDevicePrimaryCtxRelease_v2", [0; 4]), 0);
        d.clean();
    });
}

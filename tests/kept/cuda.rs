//! What only CUDA has.

use std::ffi::c_void;

use pinpool::cuda::{adopt_context, adopt_stream, device_heap_limit, raw_context, set_device_heap_limit};
use pinpool::{PoolBuilder, SubmitError};

use super::*;

const PAGE: usize = 64 << 10;

fn open() -> Device {
    Device::open(&gpu_name(0)).unwrap()
}

/// A pool of two extents.
fn allocated(device: &Device, flags: HostAllocFlags) -> PoolBuilder {
    let sizes = Pool::builder(device).capacity(4 * PAGE).region(4 * PAGE).extent(2 * PAGE);
    sizes.backing(Backing::HostAlloc(flags))
}

/// `cudaHostAllocPortable`, `cudaHostAllocMapped` and `cudaHostAllocWriteCombined` (1, 2 and 4) in any mix. No flag at all
/// is `cudaMallocHost`.
#[test]
fn every_mix_of_flags_reaches_cuda_host_alloc() {
    on_stand_in(|stand_in| {
        let device = open();
        let stream = device.stream().unwrap();
        for bits in 0..8 {
            let mix =
                HostAllocFlags { portable: bits & 1 > 0, mapped: bits & 2 > 0, write_combined: bits & 4 > 0 };
            let before = flags(stand_in, "cuMemHostAlloc");
            let pool = allocated(&device, mix).build().unwrap();
            assert_eq!(pool.wait_pinned(Some(HANG)).unwrap().ready, 4 * PAGE);
            assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (4 * PAGE, 0));
            let mut after = flags(stand_in, "cuMemHostAlloc");
            after.retain(|told| !before.contains(told));
            assert!(after.len() == 1 && after[0].0 == format!("cuMemHostAlloc {bits}"), "{bits}: {after:?}");
            assert!(after[0].1 >= 2, "a call for each extent: {after:?}");
            assert!(filled(&pool, b"pinned").is_pinned());
            round_trip(&pool, &stream, &bytes(bits, PAGE));
            assert!(pool.shutdown(HANG).drained);
        }
        drop((stream, device));
        stand_in.no_trace();
        assert_eq!(calls(stand_in, "cuMemHostAlloc"), calls(stand_in, "cuMemFreeHost"));
        assert_eq!(calls(stand_in, "cuMemHostRegister_v2"), 0);
    });
}

/// `cudaHostAllocMapped` is accepted where the device cannot map host memory: the failure is deferred to the question
/// for the address, since other contexts may map the memory.
#[test]
fn memory_that_cannot_be_mapped_fails_when_its_address_is_asked_for() {
    on_stand_in(|stand_in| {
        const CAN_MAP_HOST_MEMORY: i32 = 19;
        let device = open();
        stand_in.attribute(CAN_MAP_HOST_MEMORY, 0);
        let mapped = HostAllocFlags { mapped: true, portable: true, ..HostAllocFlags::default() };
        for builder in [allocated(&device, mapped), Pool::builder(&device).capacity(4 * PAGE)] {
            let pool = builder.build().unwrap();
            let buf = filled(&pool, b"not mapped");
            assert!(buf.is_pinned());
            let error = buf.device_address(&device).unwrap_err();
            assert!(
                matches!(&error, Error::Unsupported(text) if text.contains("CAN_MAP_HOST_MEMORY")),
                "{error}"
            );
            round_trip(&pool, &device.stream().unwrap(), &bytes(1, 1000));
            stand_in.attribute(CAN_MAP_HOST_MEMORY, 1);
            assert_eq!(buf.device_address(&device).unwrap(), buf.as_ptr().addr() as u64);
            stand_in.attribute(CAN_MAP_HOST_MEMORY, 0);
        }
        let value = device.register(bytes(2, 1000)).unwrap();
        assert!(matches!(value.device_address(&device), Err(Error::Unsupported(_))));
        drop((value, device));
        stand_in.no_trace();
    });
}

#[test]
fn managed_memory_is_a_backing() {
    on_every_device(|on| {
        let managed = || Pool::builder(&on.device).capacity(4 * PAGE).backing(Backing::Managed).build();
        if on.is_npu() {
            assert!(managed().is_err_and(|error| on.lacks(&error)));
            return;
        }
        let pool = managed().unwrap();
        pool.wait_pinned(Some(HANG)).unwrap();
        assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (0, 4 * PAGE));
        let buf = filled(&pool, b"managed");
        // One address for both sides, and pages that move.
        assert_eq!(buf.device_address(&on.device).unwrap(), buf.as_ptr().addr() as u64);
        assert!(!buf.is_pinned());
        round_trip(&pool, &on.stream(), &bytes(1, PAGE));
        if let (true, Some(stand_in)) = (on.is_gpu(), on.stand_in()) {
            const ATTACH_GLOBAL: &str = "cuMemAllocManaged 1";
            let told = flags(stand_in, "cuMemAllocManaged");
            assert!(matches!(&told[..], [(flags, _)] if flags == ATTACH_GLOBAL), "{told:?}");
            const CONCURRENT_MANAGED_ACCESS: i32 = 89;
            stand_in.attribute(CONCURRENT_MANAGED_ACCESS, 0);
            assert!(matches!(managed(), Err(Error::Unsupported(_))));
        }
    });
}

#[test]
fn the_device_heap_has_a_limit_and_its_pointers_are_refused() {
    on_stand_in(|stand_in| {
        let device = open();
        let pool = Pool::builder(&device).capacity(1 << 20).build().unwrap();
        assert_eq!(device_heap_limit(&device), Ok(8 << 20));
        set_device_heap_limit(&device, 64 << 20).unwrap();
        assert_eq!(device_heap_limit(&device), Ok(64 << 20));
        // What `malloc` in a kernel gives. SAFETY: `pointers.rs` of the stand-in has the signature.
        let malloc = |device: usize, len: usize| {
            stand_in.command(&format!("malloc {device} {len}")).parse::<u64>().unwrap()
        };
        let at = malloc(0, 4096);
        // SAFETY: refused.
        let refused = unsafe { device.raw_memory(at, 64, "owner") }.unwrap_err();
        assert_eq!(refused.buffer, Some("owner"));
        let told = refused.error.to_string();
        assert!(matches!(refused.error, Error::Argument(_)), "{told}");
        assert!(told.contains(&format!("{at:#x}")) && told.contains("knows no memory there"), "{told}");
        // The module that uses the heap is loaded by now: the limit stays.
        let error = set_device_heap_limit(&device, 1 << 30).unwrap_err();
        assert!(matches!(error, Error::Argument(_)), "{error}");
        assert_eq!(device_heap_limit(&device), Ok(64 << 20));
        round_trip(&pool, &device.stream().unwrap(), &bytes(1, 1000));
        let host = Device::open("host").unwrap();
        assert!(matches!(device_heap_limit(&host), Err(Error::Unsupported(_))));
    });
}

/// The runtime API works in the primary context, which the driver API names.
#[test]
fn users_of_the_driver_and_of_the_runtime_api_share_one_primary_context() {
    on_each_gpu(|gpu| {
        // The runtime's user was first: its context is current here.
        let device = open();
        assert_eq!(raw_context(&device).unwrap() as usize, gpu.context);
        // A user of the driver API hands over the same context: it is the same device.
        // SAFETY: the context is there until the test ends.
        let same = unsafe { adopt_context(gpu.context as *mut c_void, ()) }.unwrap();
        assert_eq!(same.name(), device.name());
        let pool = Pool::builder(&device).capacity(1 << 20).build().unwrap();
        let (ours, stream) = (device.alloc(1000).unwrap(), same.stream().unwrap());
        // `cudaMalloc` and `cudaMemcpyAsync` beside the crate: each side uses the memory of the other.
        let (theirs, their_stream) = (gpu.memory(1000), gpu.stream());
        // SAFETY: freed at the end, and both sides wait for their work.
        let raw = unsafe { device.raw_memory(theirs as u64, 1000, ()) }.unwrap();
        let buf = stream.upload(filled(&pool, &bytes(1, 1000)), &raw).unwrap().wait().unwrap();
        assert!(gpu.read(theirs, 1000, their_stream) == bytes(1, 1000));
        gpu.upload(ours.address() as usize, buf.as_ptr(), 1000, their_stream);
        gpu.ok("cuStreamSynchronize", &[their_stream]);
        let back = stream.download(&ours, pool.checkout(1000).unwrap()).unwrap().wait().unwrap();
        assert!(*back == *buf);
        // Their stream may carry the crate's copies, in order with theirs.
        // SAFETY: destroyed at the end.
        let adopted = unsafe { adopt_stream(&device, their_stream as *mut c_void, ()) }.unwrap();
        round_trip(&pool, &adopted, &bytes(2, 1000));
        // A context of one's own is another device, whose memory is refused.
        let other = gpu.other_context();
        // SAFETY: destroyed at the end.
        let apart = unsafe { adopt_context(other as *mut c_void, ()) }.unwrap();
        assert_ne!(apart.name(), device.name());
        let far = apart.alloc(1000).unwrap();
        // SAFETY: refused.
        let refused = unsafe { device.raw_memory(far.address(), 1000, ()) }.unwrap_err();
        assert!(refused.error.to_string().contains("another context of the GPU allocated it"));
        // The crate leaves the thread's context alone, also when it closes its device.
        assert_eq!(gpu.made("cuCtxGetCurrent", &[]), gpu.context);
        drop((far, raw, ours, buf, back, pool, stream, adopted, same));
        apart.close(HANG).unwrap();
        device.close(HANG).unwrap();
        assert_eq!(gpu.made("cuCtxGetCurrent", &[]), gpu.context);
        gpu.ok("cuCtxDestroy_v2", &[other]);
        gpu.ok("cuMemFree_v2", &[theirs]);
        gpu.ok("cuStreamDestroy_v2", &[their_stream]);
    });
}

#[test]
fn each_thread_has_its_own_default_stream() {
    on_each_gpu(|gpu| {
        const PER_THREAD: usize = 2;
        let device = open();
        // SAFETY: the driver completes what is in flight when a thread ends.
        let own = || unsafe { adopt_stream(&device, PER_THREAD as *mut c_void, ()) }.unwrap();
        let pool = Pool::builder(&device).capacity(1 << 20).build().unwrap();
        let (mine, memory) = (own(), device.alloc(1000).unwrap());
        drop(mine.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap());
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                gpu.current(gpu.context);
                let theirs = own();
                assert_ne!(theirs.number(), mine.number());
                round_trip(&pool, &theirs, &bytes(2, 1000));
                // This thread cannot submit to the other's.
                let refused = mine.upload(filled(&pool, &bytes(3, 1000)), &memory).unwrap_err();
                assert!(
                    matches!(refused.error, Error::Mismatch { what: "the per-thread default stream", .. }),
                    "{}",
                    refused.error
                );
                assert!(*refused.buffer.unwrap() == *bytes(3, 1000));
                theirs.synchronize().unwrap();
            });
            thread.join().unwrap();
        });
        let back = mine.download(&memory, pool.checkout(1000).unwrap()).unwrap().wait().unwrap();
        assert!(*back == *bytes(1, 1000));
    });
}

/// On each GPU, with a pool that has room for one buffer, and a stream of the server's own by its handle and as adopted.
fn with_a_server(body: impl Fn(&Gpu, &Pool, usize, &Stream)) {
    on_each_gpu(|gpu| {
        let device = open();
        let pool = Pool::builder(&device).capacity(PAGE).build().unwrap();
        let raw = gpu.stream();
        // SAFETY: destroyed below, when all work on it is complete.
        let stream = unsafe { adopt_stream(&device, raw as *mut c_void, ()) }.unwrap();
        body(gpu, &pool, raw, &stream);
        drop((stream, pool));
        gpu.ok("cuStreamDestroy_v2", &[raw]);
    });
}

/// While it is set, nothing runs on a simulated GPU.
fn hang(gpu: &Gpu, hung: bool) {
    gpu.stand_in.iter().for_each(|stand_in| stand_in.hang(hung));
}

/// Kernels and copies of the server's own on a stream of its own, which the crate does not know of.
#[test]
fn a_hold_keeps_a_buffer_for_the_servers_own_work() {
    with_a_server(|gpu, pool, raw, stream| {
        const LEN: usize = 50_000;
        let (theirs, sent) = (gpu.memory(LEN), bytes(1, LEN));
        let buf = filled(pool, &sent);
        hang(gpu, true);
        gpu.upload(theirs, buf.as_ptr(), LEN, raw);
        let held = stream.hold(buf).unwrap();
        let is_held = gpu.stand_in.is_some();
        assert!(!is_held || !held.is_done().unwrap());
        drop(held);
        assert!(!is_held || pool.try_checkout(LEN).is_err(), "the device still reads it");
        hang(gpu, false);
        // Whoever gets the memory next overwrites it.
        drop(filled(pool, &bytes(2, LEN)));
        assert!(gpu.read(theirs, LEN, raw) == sent);
        gpu.ok("cuMemFree_v2", &[theirs]);
    });
}

#[test]
fn patient_holds_share_an_event_and_end_no_earlier_than_others() {
    with_a_server(|gpu, pool, raw, stream| {
        const LEN: usize = 50_000;
        let theirs = gpu.memory(LEN);
        let records = || gpu.stand_in.as_ref().map_or(0, |stand_in| calls(stand_in, "cuEventRecord"));
        let sent = bytes(1, LEN);
        let buf = Arc::new(filled(pool, &sent));
        hang(gpu, true);
        // A copy of the program's, and many holds behind it, all of whose handles but one are dropped.
        gpu.upload(theirs, buf.as_ptr(), LEN, raw);
        let before = records();
        for _ in 0..160 {
            drop(stream.hold_patiently(buf.clone()).unwrap());
        }
        let held = stream.hold_patiently(buf).unwrap();
        // One event for sixteen holds, and those of threads that find some due.
        assert!(records() - before < 160 / 2, "{} events", records() - before);
        stream.record_holds().unwrap();
        let is_held = || !held.is_done().unwrap() && pool.try_checkout(LEN).is_err();
        assert!(gpu.stand_in.is_none() || is_held(), "the device still reads it");
        hang(gpu, false);
        drop(held);
        until("all holds are over", || pool.try_checkout(LEN).is_ok());
        // Whoever gets the memory next overwrites it.
        drop(filled(pool, &bytes(2, LEN)));
        assert!(gpu.read(theirs, LEN, raw) == sent);
        // While the stream is captured, the buffer comes back.
        gpu.begin_capture(raw, 1);
        let refused = stream.hold_patiently(filled(pool, &sent)).unwrap_err();
        assert!(matches!(refused.error, Error::Capturing { .. }), "{}", refused.error);
        assert!(refused.buffer.is_some_and(|buf| *buf == *sent));
        assert!(matches!(stream.record_holds(), Err(Error::Capturing { .. })));
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        stream.record_holds().unwrap();
        gpu.ok("cuMemFree_v2", &[theirs]);
    });
}

#[test]
fn a_graph_keeps_what_is_held_for_it() {
    with_a_server(|gpu, pool, raw, stream| {
        const LEN: usize = 50_000;
        let memory = stream.device().alloc(LEN).unwrap();
        let sent = bytes(1, LEN);
        let back = |refused: SubmitError<_>, is: fn(&Error) -> bool| {
            assert!(is(&refused.error), "{}", refused.error);
            refused.buffer.expect("the buffer comes back")
        };
        let refused = stream.hold_captured(filled(pool, &sent)).unwrap_err();
        let buf = back(refused, |error| matches!(error, Error::Argument(_) | Error::Unsupported(_)));
        gpu.begin_capture(raw, 1);
        // Copies and holds that belong to no graph are refused, and do not spoil the capture.
        let capturing = |error: &Error| matches!(error, Error::Capturing { .. });
        let buf = back(stream.upload(buf, &memory).unwrap_err(), capturing);
        let buf = back(stream.hold(buf).unwrap_err(), capturing);
        let kept = match stream.hold_captured(buf) {
            Ok(()) => true,
            Err(refused) => {
                // Drivers before CUDA 11.3 have no owners of graphs.
                let buf = back(refused, |error| matches!(error, Error::Unsupported(_)));
                assert!(*buf == *sent);
                false
            }
        };
        let lets_it = gpu.stand_in.as_ref().is_none_or(|stand_in| stand_in.has("cuUserObjectCreate"));
        assert_eq!(kept, lets_it);
        let graph = gpu.end_capture(raw);
        let is_kept = || pool.try_checkout(LEN).is_err();
        assert_eq!(is_kept(), kept);
        let executable = gpu.made("cuGraphInstantiateWithFlags", &[graph, 0]);
        gpu.ok("cuGraphDestroy", &[graph]);
        gpu.launch(executable, raw);
        assert_eq!(is_kept(), kept, "the executable graph has it");
        gpu.ok("cuGraphExecDestroy", &[executable]);
        until("the graph lets go", || !is_kept());
        round_trip(pool, stream, &sent[..LEN / 4]);
    });
}

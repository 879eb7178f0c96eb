//! Captures and graphs: what is refused on a capturing stream, what survives one elsewhere, and buffers that
//! a graph keeps.
//!
//! As in `streams.rs` the server is played by raw driver calls, and most tests run on a real GPU too.

#![allow(unsafe_code, reason = "raw handles")]

use std::sync::Arc;

use pinpool::{Copier, Device, Error, ErrorClass, Stream, SubmitError, cuda};

use crate::cuda::rig::{self, open, round_trip};
use crate::support::doubles::gpu::{all_back, bytes, calls, filled, on_gpu, on_stand_in, pool, until};
use crate::support::doubles::{HANG, gpu_name};

const LEN: usize = 10_000;

fn adopt(device: &Device, stream: usize) -> Stream {
    rig::adopt(device, stream).unwrap()
}

fn is_capturing<T>(result: Result<T, Error>) {
    let Err(error) = result else { panic!("not refused") };
    assert!(matches!(error, Error::Capturing { .. }) && error.class() == ErrorClass::Capture, "{error}");
    assert!(error.to_string().contains("captur"), "{error}");
}

/// A refusal that names what was refused and gives the buffer back as it was.
fn refused<T, B>(result: Result<T, SubmitError<B>>) -> B {
    let Err(SubmitError { error, buffer: Some(buf) }) = result else { panic!("not refused with the buffer") };
    is_capturing(Err::<(), _>(error));
    buf
}

#[test]
fn what_cannot_be_captured_is_refused_before_the_driver_hears_of_it() {
    on_gpu(|gpu| {
        let device = open();
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(LEN).unwrap());
        let (adopted, other) = (gpu.stream(), device.stream().unwrap());
        let shared = device.stream().unwrap();
        let raw_shared = cuda::raw_stream(&shared).unwrap() as usize;
        for (stream, raw) in [(&adopt(&device, adopted), adopted), (&shared, raw_shared)] {
            for mode in [0, 1, 2] {
                let sent = bytes(mode, LEN);
                let before = stream.upload(filled(&pool, &sent), &memory).unwrap();
                gpu.begin_capture(raw, mode);
                let buf = refused(stream.upload(filled(&pool, &sent), &memory));
                let buf = refused(stream.download(&memory, buf));
                let buf = refused(stream.hold(buf));
                assert!(*buf == *sent);
                let buf = refused(stream.upload(Arc::new(buf), &memory));
                assert_eq!(Arc::strong_count(&buf), 1);
                drop(refused(stream.download(&memory, pool.checkout_on(stream, LEN).unwrap())));
                is_capturing(stream.copy(&memory, &memory).map(drop));
                is_capturing(stream.wait_for(&other));
                is_capturing(other.wait_for(stream));
                is_capturing(stream.synchronize());
                is_capturing(stream.upload_blocking(&sent, &memory));
                is_capturing(stream.download_blocking(&memory, &mut [0; LEN]));
                // What was submitted before goes on, and returns.
                assert!(*before.wait().unwrap() == *sent);
                // Other streams have nothing to do with it.
                round_trip(&pool, &other, &memory, mode);
                gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
                round_trip(&pool, stream, &memory, mode + 10);
            }
        }
        // A stream may be adopted while it is captured, which is no part of the capture. It is not recognised
        // later.
        let late = gpu.stream();
        gpu.begin_capture(late, 0);
        let stream = adopt(&device, late);
        refused(stream.upload(filled(&pool, &bytes(1, LEN)), &memory));
        stream.hold_captured(filled(&pool, &bytes(2, LEN))).unwrap();
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(late)]);
        round_trip(&pool, &stream, &memory, 3);
        let numbers = [&stream, &adopt(&device, late), &adopt(&device, late)].map(Stream::number);
        assert!(numbers[0] != numbers[1] && numbers[1] == numbers[2]);
        drop((stream, shared, other));
        all_back(&pool);
        gpu.ok("cuStreamDestroy_v2", &[late]);
        gpu.ok("cuStreamDestroy_v2", &[adopted]);
    });
}

#[test]
fn a_global_capture_survives_the_pool() {
    on_gpu(|gpu| {
        let device = open();
        let (captured, foreign) = (gpu.stream(), gpu.stream());
        let (from, to) = (gpu.memory(64), gpu.memory(64));
        gpu.begin_capture(captured, 0);
        gpu.ok("cuMemcpyDtoDAsync_v2", &[to, from, 64, captured]);
        let name = gpu_name(0);
        let work = |seed: usize| {
            let device = Device::open(&name).unwrap();
            let pool = pool(&device, 2 << 20);
            // Copying and reaping, on a stream of the crate and an adopted one.
            let (own, adopted) = (device.stream().unwrap(), adopt(&device, foreign));
            let memory = device.alloc(LEN).unwrap();
            for round in 0..10 {
                round_trip(&pool, &own, &memory, seed + round);
                adopted.wait_for(&own).unwrap();
                round_trip(&pool, &adopted, &memory, seed + round);
                drop(own.upload(filled(&pool, &bytes(1, LEN)), &memory).unwrap());
            }
            own.upload_blocking(&bytes(7, LEN), &memory).unwrap();
            own.download_blocking(&memory, &mut [0; LEN]).unwrap();
            cuda::raw_stream(&own).unwrap();
            own.synchronize().unwrap();
            // Pieces, with kernels that are loaded now, and waiting for a stream that is captured.
            let copier = Copier::builder(&pool, &device).ring(1 << 20).build().unwrap();
            let pieces = (0..64).map(|i| (&[7_u8; 99][..], memory.slice(i * 100..i * 100 + 99).unwrap()));
            copier.upload_slices(&pieces.collect::<Vec<_>>()).unwrap();
            assert!(gpu.stand_in.is_none() || copier.stats().launches > 0, "{:?}", copier.stats());
            is_capturing(copier.wait_for(&adopt(&device, captured)));
            drop(copier);
            // Memory by its address, copies between host memory, and the heap's limit.
            // SAFETY: the owner keeps it, and the stream uses it in order.
            let raw = unsafe { device.raw_memory(memory.address(), LEN, memory.clone()) }.unwrap();
            round_trip(&pool, &own, &raw, seed + 50);
            let (from, to) = (filled(&pool, &bytes(seed, 500)), pool.checkout(500).unwrap());
            drop(own.copy_host(from, to).unwrap().1.wait().unwrap());
            cuda::set_device_heap_limit(&device, cuda::device_heap_limit(&device).unwrap()).unwrap();
            // Growing, up to the capacity, and trimming.
            drop((0..14).map(|_| filled(&pool, &bytes(1, 100_000))).collect::<Vec<_>>());
            until("the reaper sees it", || pool.stats().in_flight_bytes == 0);
            assert!(pool.trim(0) > 0);
            assert!(pool.shutdown(HANG).drained);
        };
        // On the thread that captures and on others.
        work(0);
        std::thread::scope(|scope| {
            let work = &work;
            (1..=2).for_each(|thread| drop(scope.spawn(move || work(thread * 100))));
        });
        // Everything that was opened here ends meanwhile as well.
        drop(device);
        let graph = gpu.end_capture(captured);
        let executable = gpu.made("cuGraphInstantiateWithFlags", &[graph, 0]);
        let sent = bytes(9, 64);
        gpu.upload(from, sent.as_ptr(), 64, captured);
        gpu.launch(executable, captured);
        assert_eq!(gpu.read(to, 64, captured), sent);
        gpu.ok("cuGraphExecDestroy", &[executable]);
        gpu.ok("cuGraphDestroy", &[graph]);
        [from, to].iter().for_each(|memory| gpu.ok("cuMemFree_v2", &[*memory]));
        [captured, foreign].iter().for_each(|stream| gpu.ok("cuStreamDestroy_v2", &[*stream]));
    });
}

/// The legacy default stream comes after everything on blocking streams, so using it while one is captured
/// spoils that.
#[test]
fn the_legacy_stream_is_left_alone_while_a_blocking_stream_is_captured() {
    on_gpu(|gpu| {
        let device = open();
        let blocking = gpu.made("cuStreamCreate", &[0]);
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(LEN).unwrap());
        let legacy = adopt(&device, 0);
        round_trip(&pool, &legacy, &memory, 1);
        let before = legacy.upload(filled(&pool, &bytes(2, LEN)), &memory).unwrap();
        gpu.begin_capture(blocking, 1);
        let refusal = legacy.upload(filled(&pool, &bytes(3, LEN)), &memory).unwrap_err();
        assert_eq!(refusal.error.class(), ErrorClass::Capture, "{}", refusal.error);
        assert!(refusal.buffer.is_some_and(|buf| *buf == *bytes(3, LEN)));
        assert_eq!(legacy.synchronize().unwrap_err().class(), ErrorClass::Capture);
        assert!(*before.wait().unwrap() == *bytes(2, LEN));
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(blocking)]);
        round_trip(&pool, &legacy, &memory, 4);
        // No event can be recorded there meanwhile, perhaps by the very thread that would wait for it.
        if let Some(d) = &gpu.stand_in {
            let buf = filled(&pool, &bytes(5, LEN));
            (1..=900).for_each(|nth| d.fail("cuEventRecord", nth, 999, false));
            let flight = legacy.upload(buf, &memory).unwrap();
            gpu.begin_capture(blocking, 1);
            let flight = refused(flight.wait_timeout(HANG));
            gpu.ok("cuGraphDestroy", &[gpu.end_capture(blocking)]);
            assert!(*flight.wait().unwrap() == *bytes(5, LEN));
            d.calm();
            round_trip(&pool, &legacy, &memory, 6);
        }
        gpu.ok("cuStreamDestroy_v2", &[blocking]);
    });
}

#[test]
fn a_spoiled_capture_takes_nothing() {
    on_stand_in(|gpu, _| {
        let (device, raw) = (open(), gpu.stream());
        let (pool, stream) = (pool(&device, 2 << 20), adopt(&device, raw));
        gpu.begin_capture(raw, 0);
        gpu.call("cuStreamSynchronize", &[raw]);
        let spoiled = stream.hold_captured(filled(&pool, &bytes(1, LEN))).unwrap_err();
        assert!(matches!(spoiled.error, Error::Capturing { .. }) && spoiled.buffer.is_some());
        assert!(spoiled.error.to_string().contains("spoiled"), "{}", spoiled.error);
    });
}

/// A thread of the crate makes up for an event that failed: it asks whether the stream is being captured just
/// before a capture begins, and the event it then records becomes part of the capture.
#[test]
fn a_mark_that_got_into_a_capture_is_made_again() {
    on_stand_in(|gpu, d| {
        let device = open();
        let raw = gpu.stream();
        let (pool, stream, memory) =
            (pool(&device, 2 << 20), adopt(&device, raw), device.alloc(LEN).unwrap());
        let sent = bytes(1, LEN);
        let buf = filled(&pool, &sent);
        // The thread asks, and is told no; and has to ask again for as long as this thread may be held up
        // before it captures.
        (1..=900).for_each(|nth| d.fail("cuEventRecord", nth, 999, false));
        (1..=1500).for_each(|nth| d.fail("cuStreamIsCapturing", nth, 0, false));
        let flight = stream.upload(buf, &memory).unwrap();
        gpu.begin_capture(raw, 1);
        until("an event of the capture was asked about", || {
            d.report().violations.iter().any(|v| v.starts_with("CAP-3"))
        });
        assert!(!flight.is_done().unwrap());
        // And a wait would be for the capture's end, which this thread may have to bring about.
        until("the lies are over", || calls(d, "cuStreamIsCapturing") >= 1600);
        is_capturing(stream.synchronize());
        let flight = refused(flight.wait_timeout(HANG));
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        assert!(*flight.wait().unwrap() == *sent);
        round_trip(&pool, &stream, &memory, 2);
        assert_eq!(device.lost(), None);
        assert!(d.report().violations.iter().all(|v| v.starts_with("CAP-3")), "{:?}", d.report().violations);
    });
}

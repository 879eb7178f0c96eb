//! Captures and graphs: what is refused on a capturing stream, what survives one elsewhere, and buffers that a graph
//! keeps.
//!
//! As in `streams.rs` the server is played by raw driver calls, and most tests run on a real GPU too.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "raw handles")]

use std::ffi::c_void;
use std::sync::Arc;

use pinpool::{Device, DeviceBuffer, Error, ErrorClass, PinnedBuf, Pool, Stream, SubmitError, cuda};

use crate::support::doubles::gpu::{Gpu, bytes, filled, on_gpu, on_stand_in, pool, until};
use crate::support::doubles::{self, HANG};
use crate::support::skip;

const LEN: usize = 10_000;

fn open() -> Device {
    Device::open("cuda:0").unwrap()
}

fn adopt(device: &Device, stream: usize) -> Stream {
    // SAFETY: tests keep their streams until all work on them is complete.
    unsafe { cuda::adopt_stream(device, stream as *mut c_void) }.unwrap()
}

fn round_trip(pool: &Pool, stream: &Stream, memory: &DeviceBuffer, seed: usize) {
    let sent = bytes(seed, memory.len());
    drop(stream.upload(filled(pool, &sent), memory).unwrap());
    let landing = pool.checkout_timeout(memory.len(), HANG).unwrap();
    assert!(*stream.download(memory, landing).unwrap().wait().unwrap() == *sent);
}

/// A refusal that names what was refused and gives the buffer back as it was.
fn refused<T>(result: Result<T, SubmitError<PinnedBuf>>, sent: &[u8]) -> PinnedBuf {
    match result {
        Err(SubmitError { error, buffer: Some(buf) }) => {
            is_capturing(Err::<(), _>(error));
            assert!(*buf == *sent);
            buf
        }
        Err(e) => panic!("without the buffer: {e}"),
        Ok(_) => panic!("not refused"),
    }
}

fn is_capturing<T>(result: Result<T, Error>) {
    let Err(error) = result else { panic!("not refused") };
    assert!(matches!(error, Error::Capturing { .. }) && error.class() == ErrorClass::Capture, "{error}");
    assert!(error.to_string().contains("captur"), "{error}");
}

#[test]
fn what_cannot_be_captured_is_refused_before_the_driver_hears_of_it() {
    on_gpu("what_cannot_be_captured_is_refused_before_the_driver_hears_of_it", |gpu| {
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
                let mut buf = filled(&pool, &sent);
                buf = refused(stream.upload(buf, &memory), &sent);
                buf = refused(stream.download(&memory, buf), &sent);
                buf = refused(stream.hold(buf), &sent);
                buf = refused(Stream::hold_on_all(&[&other, stream], buf), &sent);
                let shared = Arc::new(buf);
                assert!(stream.upload(shared.clone(), &memory).is_err_and(|e| e.buffer.is_some()));
                assert_eq!(Arc::strong_count(&shared), 1);
                let landing = pool.checkout_on(stream, LEN).unwrap();
                let back = stream.download(&memory, landing).unwrap_err();
                assert!(matches!(back.error, Error::Capturing { .. }) && back.buffer.is_some());
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
        // A stream may be adopted while it is captured, which is no part of the capture. It is not recognised later.
        let late = gpu.stream();
        gpu.begin_capture(late, 0);
        let stream = adopt(&device, late);
        refused(stream.upload(filled(&pool, &bytes(1, LEN)), &memory), &bytes(1, LEN));
        drop(stream.hold_captured(filled(&pool, &bytes(2, LEN))).unwrap());
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(late)]);
        round_trip(&pool, &stream, &memory, 3);
        let numbers = [&stream, &adopt(&device, late), &adopt(&device, late)].map(Stream::number);
        assert!(numbers[0] != numbers[1] && numbers[1] == numbers[2]);
        // And nothing is captured where nothing is captured.
        for (stream, what) in [(&stream, "adopted"), (&other, "of ours")] {
            let refusal = stream.upload_captured(filled(&pool, &bytes(1, LEN)), &memory).unwrap_err();
            assert!(
                matches!(refusal.error, Error::NotCapturing { .. }) && refusal.buffer.is_some(),
                "{what}: {}",
                refusal.error
            );
            let refusal = stream.hold_captured(filled(&pool, &bytes(1, LEN))).unwrap_err();
            assert!(matches!(refusal.error, Error::NotCapturing { .. }), "{what}: {}", refusal.error);
        }
        drop((stream, shared, other));
        until("all is back", || {
            let s = pool.stats();
            s.in_flight_bytes + s.checked_out_bytes == 0
        });
        pool.check().unwrap();
        gpu.ok("cuStreamDestroy_v2", &[late]);
        gpu.ok("cuStreamDestroy_v2", &[adopted]);
    });
}

#[test]
fn a_global_capture_survives_the_pool() {
    on_gpu("a_global_capture_survives_the_pool", |gpu| {
        let device = open();
        let (captured, foreign) = (gpu.stream(), gpu.stream());
        let (from, to) = (gpu.memory(64), gpu.memory(64));
        gpu.begin_capture(captured, 0);
        gpu.ok("cuMemcpyDtoDAsync_v2", &[to, from, 64, captured]);
        let work = |seed: usize| {
            let device = open();
            let pool = pool(&device, 2 << 20);
            // Copying and reaping, on a stream of the crate, an adopted one, and a new one each.
            let (own, adopted) = (device.stream().unwrap(), adopt(&device, foreign));
            let memory = device.alloc(LEN).unwrap();
            for round in 0..10 {
                round_trip(&pool, &own, &memory, seed + round);
                adopted.wait_for(&own).unwrap();
                round_trip(&pool, &adopted, &memory, seed + round);
                drop(own.upload(filled(&pool, &bytes(1, LEN)), &memory).unwrap());
            }
            let mut back = vec![0; LEN];
            own.upload_blocking(&bytes(7, LEN), &memory).unwrap();
            own.download_blocking(&memory, &mut back).unwrap();
            assert!(back == bytes(7, LEN));
            cuda::raw_stream(&own).unwrap();
            own.synchronize().unwrap();
            // Growing, up to the capacity, and trimming.
            drop((0..14).map(|_| filled(&pool, &bytes(1, 100_000))).collect::<Vec<_>>());
            until("the reaper sees it", || pool.stats().in_flight_bytes == 0);
            assert!(pool.trim(0) > 0);
            assert!(pool.shutdown(HANG).drained);
        };
        // On the thread that captures and on others.
        work(0);
        std::thread::scope(|scope| {
            for thread in 1..=2 {
                scope.spawn(move || work(thread * 100));
            }
        });
        // Everything that was opened here ends meanwhile as well.
        drop(device);
        let graph = gpu.end_capture(captured);
        let executable = gpu.made("cuGraphInstantiateWithFlags", &[graph, 0]);
        let sent = bytes(9, 64);
        gpu.upload(from, sent.as_ptr(), 64, captured);
        gpu.ok("cuStreamSynchronize", &[captured]);
        gpu.launch(executable, captured);
        assert_eq!(gpu.read(to, 64, captured), sent);
        gpu.ok("cuGraphExecDestroy", &[executable]);
        gpu.ok("cuGraphDestroy", &[graph]);
        gpu.ok("cuMemFree_v2", &[from]);
        gpu.ok("cuMemFree_v2", &[to]);
        gpu.ok("cuStreamDestroy_v2", &[captured]);
        gpu.ok("cuStreamDestroy_v2", &[foreign]);
    });
}

/// The legacy default stream comes after everything on blocking streams, so using it while one is captured spoils that.
#[test]
fn the_legacy_stream_is_left_alone_while_a_blocking_stream_is_captured() {
    on_gpu("the_legacy_stream_is_left_alone_while_a_blocking_stream_is_captured", |gpu| {
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
        gpu.ok("cuStreamDestroy_v2", &[blocking]);
    });
}

/// Captures an upload, a copy back and a hold, replays the graph with new bytes each time, and destroys its parts in
/// one of several orders.
fn replays(gpu: &Gpu, device: &Device, raw: usize, stream: &Stream, order: usize) {
    let pool = pool(device, 2 << 20);
    let memory = device.alloc(LEN).unwrap();
    gpu.begin_capture(raw, 1);
    let mut input = stream.upload_captured(filled(&pool, &bytes(0, LEN)), &memory).unwrap();
    let landing = pool.checkout(LEN).unwrap();
    let mut output = stream.download_captured(&memory, landing).unwrap();
    let held = stream.hold_captured(Arc::new(filled(&pool, &bytes(77, 100)))).unwrap();
    let graph = gpu.end_capture(raw);
    // The graph keeps the buffer, and everything that it is a copy for.
    drop(memory);
    let out = pool.stats().checked_out_bytes;
    assert!(out >= 2 * LEN);
    let executable = gpu.made("cuGraphInstantiateWithFlags", &[graph, 0]);
    for seed in 1..5 {
        let sent = bytes(seed, LEN);
        // SAFETY: no launch is under way.
        let buf = unsafe { input.get_mut() };
        buf.clear();
        buf.extend_from_slice(&sent);
        assert_eq!(buf.as_ptr(), input.as_ptr().cast_const());
        gpu.launch(executable, raw);
        // SAFETY: the launch was waited for, and has written all of it.
        let buf = unsafe {
            output.get_mut().assume_written(LEN);
            output.get()
        };
        assert!(**buf == *sent, "replay {seed}");
    }
    assert!(input.is_kept() && output.is_kept() && held.is_kept());
    let input = input.reclaim().unwrap_err();
    pool.check().unwrap();
    match order {
        0 => {
            gpu.ok("cuGraphDestroy", &[graph]);
            // The executable graph keeps them on.
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(input.is_kept() && output.is_kept());
            gpu.launch(executable, raw);
            gpu.ok("cuGraphExecDestroy", &[executable]);
            until("the graph lets go", || !(input.is_kept() || output.is_kept() || held.is_kept()));
            let (input, output) = (input.reclaim().unwrap(), output.reclaim().unwrap());
            assert!(*input == *bytes(4, LEN) && *output == *bytes(4, LEN));
            assert!(**held.reclaim().unwrap() == *bytes(77, 100));
        }
        1 => {
            drop((input, output, held));
            assert_eq!(pool.stats().checked_out_bytes, out, "kept without handles");
            gpu.launch(executable, raw);
            gpu.ok("cuGraphExecDestroy", &[executable]);
            gpu.ok("cuGraphDestroy", &[graph]);
        }
        _ => {
            // A launch in flight keeps them, too.
            gpu.ok("cuGraphLaunch", &[executable, raw]);
            gpu.ok("cuGraphExecDestroy", &[executable]);
            gpu.ok("cuGraphDestroy", &[graph]);
            if gpu.stand_in.is_some() {
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(input.is_kept(), "the launch has not run");
            }
            gpu.ok("cuStreamSynchronize", &[raw]);
            drop((output, held, input));
        }
    }
    until("all is back", || pool.stats().checked_out_bytes == 0);
    pool.check().unwrap();
}

#[test]
fn a_graph_keeps_the_buffers_that_it_reads() {
    const TEST: &str = "a_graph_keeps_the_buffers_that_it_reads";
    on_gpu(TEST, |gpu| {
        let device = open();
        let raw = gpu.stream();
        let own = device.stream().unwrap();
        for order in 0..3 {
            replays(gpu, &device, raw, &adopt(&device, raw), order);
            replays(gpu, &device, cuda::raw_stream(&own).unwrap() as usize, &own, order);
        }
        drop(own);
        gpu.ok("cuStreamDestroy_v2", &[raw]);
    });
    // And with a driver that has the older form of the question only.
    if let Some(library) =
        (!doubles::is_set() && !doubles::required()).then(|| doubles::older("cuda12")).flatten()
    {
        doubles::again(TEST, &[(doubles::PATH, library.to_str().unwrap())]);
    }
}

#[test]
fn an_old_driver_cannot_tie_buffers_to_graphs_and_says_so() {
    const TEST: &str = "an_old_driver_cannot_tie_buffers_to_graphs_and_says_so";
    if !doubles::is_set() {
        let Some(library) = doubles::older("cuda11") else { return skip!("no cargo") };
        return doubles::again(TEST, &[(doubles::PATH, library.to_str().unwrap())]);
    }
    on_stand_in(TEST, |gpu, _| {
        let device = open();
        let raw = gpu.stream();
        let (pool, stream, memory) =
            (pool(&device, 2 << 20), adopt(&device, raw), device.alloc(LEN).unwrap());
        gpu.begin_capture(raw, 0);
        let refusal = stream.upload_captured(filled(&pool, &bytes(1, LEN)), &memory).unwrap_err();
        assert!(matches!(&refusal.error, Error::Unsupported(text) if text.contains("11.3")));
        assert!(refusal.buffer.is_some_and(|buf| *buf == *bytes(1, LEN)));
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
    });
}

#[test]
fn what_a_graph_is_not_given_comes_back() {
    on_stand_in("what_a_graph_is_not_given_comes_back", |gpu, d| {
        let device = open();
        let raw = gpu.stream();
        let (pool, stream, memory) =
            (pool(&device, 2 << 20), adopt(&device, raw), device.alloc(LEN).unwrap());
        let refusals = [
            ("cuStreamGetCaptureInfo_v3", true),
            ("cuUserObjectCreate", true),
            ("cuGraphRetainUserObject", true),
            // Perhaps a part of the graph all the same: the buffer stays with the graph.
            ("cuMemcpyHtoDAsync_v2", false),
        ];
        for (call, back) in refusals {
            gpu.begin_capture(raw, 1);
            d.fail(call, 1, 1, false);
            let refusal = stream.upload_captured(filled(&pool, &bytes(1, LEN)), &memory).unwrap_err();
            assert!(refusal.error.to_string().contains("failed with 1"), "{}", refusal.error);
            assert_eq!(refusal.buffer.is_some(), back, "{call}");
            drop(refusal);
            let kept = pool.stats().checked_out_bytes > 0;
            assert_eq!(kept, !back, "{call}");
            gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
            until("it is back", || pool.stats().checked_out_bytes == 0);
        }
        // A spoiled capture takes nothing.
        gpu.begin_capture(raw, 0);
        gpu.call("cuStreamSynchronize", &[raw]);
        let spoiled = stream.upload_captured(filled(&pool, &bytes(1, LEN)), &memory).unwrap_err();
        assert!(matches!(spoiled.error, Error::Capturing { .. }) && spoiled.buffer.is_some());
        assert!(spoiled.error.to_string().contains("spoiled"), "{}", spoiled.error);
        drop(spoiled);
        let mut graph = 0_usize;
        assert_eq!(gpu.call("cuStreamEndCapture", &[raw, (&raw mut graph) as usize]), 901);
        // Wrong calls get their usual errors.
        gpu.begin_capture(raw, 1);
        let small = device.alloc(10).unwrap();
        let refusal = stream.upload_captured(filled(&pool, &bytes(1, LEN)), &small).unwrap_err();
        assert!(matches!(refusal.error, Error::TooSmall { .. }) && refusal.buffer.is_some());
        drop(refusal);
        let refusal = stream.upload_captured(pool.checkout(8).unwrap(), &small).unwrap_err();
        assert!(matches!(refusal.error, Error::Unwritten) && refusal.buffer.is_some());
        drop(refusal);
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        until("it is back", || pool.stats().checked_out_bytes == 0);
        assert_eq!(d.report().leaks.iter().filter(|l| l.starts_with("objects")).count(), 0);
    });
}

/// Bytes all of which are registered, by the first question, and that are more again from a later question on.
struct Grows {
    bytes: Vec<u8>,
    asked: std::sync::atomic::AtomicUsize,
    steady: usize,
    /// Counts those that are not dropped.
    _alive: Arc<()>,
}

impl std::ops::Deref for Grows {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let asked = self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if (1..self.steady).contains(&asked) { &self.bytes[..1000] } else { &self.bytes }
    }
}

// SAFETY: the bytes are on the heap, and none are added.
unsafe impl pinpool::StableDeref for Grows {}

#[test]
fn what_grows_meanwhile_is_launched_no_further_than_its_place() {
    on_stand_in("what_grows_meanwhile_is_launched_no_further_than_its_place", |gpu, _| {
        let device = open();
        let raw = gpu.stream();
        let (pool, stream, memory) =
            (pool(&device, 2 << 20), adopt(&device, raw), device.alloc(LEN).unwrap());
        let (mut captured, alive) = (0, Arc::new(()));
        for steady in 0..20 {
            drop(stream.upload(filled(&pool, &[9; LEN]), &memory).unwrap().wait().unwrap());
            let grows = Grows { bytes: vec![5; 4096], asked: 0.into(), steady, _alive: alive.clone() };
            let src = device.register(grows).unwrap();
            gpu.begin_capture(raw, 1);
            // Taken as it was, or refused.
            let sent = stream.upload_captured(src, memory.slice(..1000).unwrap());
            let graph = gpu.end_capture(raw);
            if let Ok(input) = sent {
                captured += 1;
                let executable = gpu.made("cuGraphInstantiateWithFlags", &[graph, 0]);
                gpu.launch(executable, raw);
                let back = stream.download(&memory, pool.checkout(LEN).unwrap()).unwrap().wait().unwrap();
                assert!(back[..1000].iter().all(|byte| *byte == 5), "asked {steady} times");
                assert!(back[1000..].iter().all(|byte| *byte == 9), "beyond its place, asked {steady} times");
                gpu.ok("cuGraphExecDestroy", &[executable]);
                drop(input);
            }
            gpu.ok("cuGraphDestroy", &[graph]);
        }
        assert!(captured > 0);
        until("all are unregistered and dropped", || Arc::strong_count(&alive) == 1);
    });
}

/// A thread of the crate makes up for an event that failed: it asks whether the stream is being captured just before a
/// capture begins, and the event it then records becomes part of the capture.
#[test]
fn a_mark_that_got_into_a_capture_is_made_again() {
    on_stand_in("a_mark_that_got_into_a_capture_is_made_again", |gpu, d| {
        let device = open();
        let raw = gpu.stream();
        let (pool, stream, memory) =
            (pool(&device, 2 << 20), adopt(&device, raw), device.alloc(LEN).unwrap());
        let sent = bytes(1, LEN);
        let buf = filled(&pool, &sent);
        // The thread asks, and is told no; and has to ask again for as long as this thread may be held up before it
        // captures.
        (1..=900).for_each(|nth| d.fail("cuEventRecord", nth, 999, false));
        (1..=1500).for_each(|nth| d.fail("cuStreamIsCapturing", nth, 0, false));
        let flight = stream.upload(buf, &memory).unwrap();
        gpu.begin_capture(raw, 1);
        until("an event of the capture was asked about", || {
            d.report().violations.iter().any(|v| v.starts_with("CAP-3"))
        });
        assert!(!flight.is_done().unwrap());
        // And a wait would be for the capture's end, which this thread may have to bring about.
        until("the lies are over", || {
            d.report().calls.iter().any(|c| c.0 == "cuStreamIsCapturing" && c.1 >= 1600)
        });
        is_capturing(stream.synchronize());
        let flight = match flight.wait_timeout(HANG) {
            Err(SubmitError { error: Error::Capturing { .. }, buffer: Some(flight) }) => flight,
            other => panic!("{other:?}"),
        };
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        assert!(*flight.wait().unwrap() == *sent);
        round_trip(&pool, &stream, &memory, 2);
        assert_eq!(device.lost(), None);
        assert!(d.report().violations.iter().all(|v| v.starts_with("CAP-3")), "{:?}", d.report().violations);
    });
}

/// Memory in the order of a stream that has not come to it yet: other streams would have to wait, and one that is being
/// captured cannot, nor can a graph, which runs on any stream at any time.
#[test]
fn memory_that_is_not_there_yet_spoils_no_capture_and_gets_into_no_graph() {
    on_stand_in("memory_that_is_not_there_yet_spoils_no_capture_and_gets_into_no_graph", |gpu, d| {
        let device = open();
        let raw = gpu.stream();
        let (pool, stream, home) = (pool(&device, 2 << 20), adopt(&device, raw), device.stream().unwrap());
        let sent = bytes(1, LEN);
        d.hang(true);
        // Of another stream, and of the very stream, whose graph may be launched on others.
        for memory in [home.alloc(LEN).unwrap(), stream.alloc(LEN).unwrap()] {
            gpu.begin_capture(raw, 1);
            is_capturing(stream.upload_blocking(&sent, &memory));
            is_capturing(stream.download_blocking(&memory, &mut [0; LEN]));
            let buf = refused(stream.upload_captured(filled(&pool, &sent), &memory), &sent);
            drop(refused(stream.download_captured(&memory, buf), &sent));
            gpu.ok("cuGraphDestroy", &[gpu.end_capture(raw)]);
        }
        d.hang(false);
        for memory in [home.alloc(LEN).unwrap(), stream.alloc(LEN).unwrap()] {
            home.synchronize().unwrap();
            stream.synchronize().unwrap();
            gpu.begin_capture(raw, 1);
            drop(stream.upload_captured(filled(&pool, &sent), &memory).unwrap());
            let graph = gpu.end_capture(raw);
            let executable = gpu.made("cuGraphInstantiateWithFlags", &[graph, 0]);
            gpu.launch(executable, raw);
            gpu.ok("cuGraphExecDestroy", &[executable]);
            gpu.ok("cuGraphDestroy", &[graph]);
            let landed = home.download(&memory, pool.checkout(LEN).unwrap()).unwrap().wait().unwrap();
            assert!(*landed == *sent);
        }
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// On the legacy default stream no event can be recorded while a blocking stream is captured, perhaps by the very
/// thread that would wait for it.
#[test]
fn waiting_on_the_legacy_stream_beside_a_capture_is_refused() {
    on_stand_in("waiting_on_the_legacy_stream_beside_a_capture_is_refused", |gpu, d| {
        let device = open();
        let blocking = gpu.made("cuStreamCreate", &[0]);
        let (pool, stream, memory) = (pool(&device, 2 << 20), adopt(&device, 0), device.alloc(LEN).unwrap());
        let sent = bytes(1, LEN);
        let buf = filled(&pool, &sent);
        (1..=900).for_each(|nth| d.fail("cuEventRecord", nth, 999, false));
        let flight = stream.upload(buf, &memory).unwrap();
        gpu.begin_capture(blocking, 1);
        let flight = match flight.wait_timeout(HANG) {
            Err(SubmitError { error: Error::Capturing { .. }, buffer: Some(flight) }) => flight,
            other => panic!("{other:?}"),
        };
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(blocking)]);
        assert!(*flight.wait().unwrap() == *sent);
        round_trip(&pool, &stream, &memory, 2);
        gpu.ok("cuStreamDestroy_v2", &[blocking]);
    });
}

//! CUDA's per-thread default stream: one handle, which is another stream on each thread.
//!
//! A stream of it is the thread's that adopted it. Other threads may wait for what is in flight on it, and no
//! more.

use pinpool::{Copier, Device, Error, ErrorClass, Stream, cuda};

use crate::cuda::rig::{adopt, open, round_trip};
use crate::support::doubles::gpu::{all_back, bytes, calls, filled, on_gpu, pool, until};
use crate::support::doubles::{HANG, StandIn};

const LEN: usize = 20_000;
/// CU_STREAM_PER_THREAD.
const RAW: usize = 2;
/// CUDA_ERROR_UNKNOWN.
const UNKNOWN: u32 = 999;

fn own(device: &Device) -> Stream {
    adopt(device, RAW).unwrap()
}

fn elsewhere<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn is_of_another_thread<T>(said: Result<T, Error>) -> bool {
    said.is_err_and(|error| {
        matches!(&error, Error::Mismatch { of, with, .. } if of == "another thread" && with.starts_with("cuda:"))
            && error.class() == ErrorClass::Argument
            && error.to_string().contains("adopt this thread's own")
    })
}

#[test]
fn another_thread_is_refused_and_loses_nothing() {
    on_gpu(|gpu| {
        let device = open();
        let (pool, stream, memory) = (pool(&device, 2 << 20), own(&device), device.alloc(LEN).unwrap());
        let copier = Copier::builder(&pool, &device).build().unwrap();
        let sent = bytes(3, LEN);
        let flight = stream.upload(filled(&pool, &sent), &memory).unwrap();
        elsewhere(|| {
            gpu.current(gpu.context);
            let mine = device.stream().unwrap();
            let buf = || filled(&pool, &sent);
            for refused in [
                stream.upload(buf(), &memory).unwrap_err(),
                stream.download(&memory, buf()).unwrap_err(),
                stream.hold(buf()).unwrap_err(),
            ] {
                assert!(*refused.buffer.unwrap() == *sent && is_of_another_thread::<()>(Err(refused.error)));
            }
            for said in [
                stream.upload_blocking(&sent, &memory),
                stream.download_blocking(&memory, &mut vec![0; LEN]),
                stream.copy(&memory, &memory).map(drop),
                stream.wait_for(&mine),
                mine.wait_for(&stream),
                stream.synchronize(),
                cuda::raw_stream(&stream).map(drop),
                copier.wait_for(&stream),
            ] {
                assert!(is_of_another_thread(said));
            }
            let up = copier.upload_pages(vec![(buf(), memory.slice(..).unwrap())]).unwrap();
            // If it is over, there is nothing to order.
            let said = up.order(&stream);
            assert!(said.is_ok() || is_of_another_thread(said));
            drop(up.wait().unwrap());
            // What is in flight it can wait for.
            assert!(*flight.wait().unwrap() == *sent);
        });
        copier.wait_for(&stream).unwrap();
        round_trip(&pool, &stream, &memory, 4);
        // In order with streams of the crate, both ways.
        let other = device.stream().unwrap();
        drop(stream.upload(filled(&pool, &bytes(5, LEN)), &memory).unwrap());
        other.wait_for(&stream).unwrap();
        let landing = pool.checkout_timeout(LEN, HANG).unwrap();
        assert!(*other.download(&memory, landing).unwrap().wait().unwrap() == *bytes(5, LEN));
        stream.wait_for(&other).unwrap();
        // A capture of one thread's stream is no other thread's.
        gpu.begin_capture(RAW, 1);
        let refused = stream.upload(filled(&pool, &bytes(1, LEN)), &memory).unwrap_err();
        assert!(matches!(refused.error, Error::Capturing { .. }), "{}", refused.error);
        elsewhere(|| {
            gpu.current(gpu.context);
            round_trip(&pool, &own(&device), &memory, 2);
        });
        gpu.ok("cuGraphDestroy", &[gpu.end_capture(RAW)]);
        round_trip(&pool, &stream, &memory, 3);
        drop((copier, stream, refused));
        all_back(&pool);
    });
}

/// On the simulation some events cannot be recorded on their own thread. The reaper records these, on the stream that
/// covers it: the buffer does not return before the copy has read it.
#[test]
fn a_thread_ends_with_copies_in_flight() {
    on_gpu(|gpu| {
        let device = open();
        let (pool, memory) = (pool(&device, 2 << 20), device.alloc(LEN).unwrap());
        for seed in 0..20 {
            let failing = gpu.stand_in.as_ref().filter(|_| seed % 2 == 0);
            let recorded = || failing.map_or(0, |d| calls(d, "cuEventRecord"));
            failing.into_iter().for_each(|d| d.hang(true));
            let before = recorded();
            let (stream, flight) = elsewhere(|| {
                gpu.current(gpu.context);
                let stream = own(&device);
                failing.into_iter().for_each(|d| d.fail("cuEventRecord", 1, UNKNOWN, seed % 4 == 0));
                let flight = stream.upload(filled(&pool, &bytes(seed, LEN)), &memory).unwrap();
                failing.into_iter().for_each(StandIn::calm);
                (stream, flight)
            });
            if let Some(d) = failing {
                until("the reaper has recorded an event", || {
                    device.reap();
                    recorded() > before + 1
                });
                (0..100).for_each(|_| _ = device.reap());
                assert_eq!(flight.is_done(), Ok(false), "nothing has run");
                d.hang(false);
                assert!(*flight.wait_timeout(HANG).unwrap() == *bytes(seed, LEN));
            } else {
                drop(flight);
            }
            all_back(&pool);
            let mut back = vec![0; LEN];
            device.stream().unwrap().download_blocking(&memory, &mut back).unwrap();
            assert!(back == bytes(seed, LEN));
            // The thread is gone, and its stream has none.
            assert!(is_of_another_thread(stream.synchronize()));
        }
    });
}

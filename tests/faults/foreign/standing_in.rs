//! Misdeeds while a GPU's driver misbehaves, too: on a simulated GPU, each in a process of its own.

use std::panic::panic_any;
use std::time::Duration;

use pinpool::{Copier, Device, Pool, Unpinned};

use super::hostile::{Bomb, Call, Turn};
use crate::support::doubles::{self, gpu_name};
use crate::support::own_process;

fn panics_at_events(turn: &Turn) {
    turn.act(|heard| {
        if heard.call == Call::Event && heard.target().starts_with("pinpool") {
            panic_any(Bomb(1));
        }
    });
}

/// A blocking copy into borrowed memory, whose wait the driver refuses at first. The subscriber panics at the event
/// that reports this; the borrow must not end before the copy is complete.
#[test]
fn a_subscriber_panics_before_borrowed_memory_has_come_back() {
    own_process!();
    doubles::on_stand_in(|stand_in| {
        let turn = Turn::take();
        let device = Device::open(&gpu_name(0)).unwrap();
        let pool = Pool::builder(&device)
            .capacity(1 << 20)
            .thread_cache(0)
            .unpinned(Unpinned::Allow)
            .build()
            .unwrap();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(4096).unwrap());
        stream.upload_blocking(&[0xaa; 4096], &memory).unwrap();
        let mut buf = pool.checkout(4096).unwrap();
        buf.try_resize(4096, 0).unwrap();
        panics_at_events(&turn);
        // CUDA_ERROR_OUT_OF_MEMORY, once.
        stand_in.fail("cuStreamSynchronize", 1, 2, false);
        stream.download_blocking(&memory, &mut buf[..]).unwrap();
        turn.quiet();
        assert!(buf.iter().all(|byte| *byte == 0xaa), "the borrow ended before the copy had landed");
        drop(buf);
        let mut other = pool.checkout(4096).unwrap();
        other.try_resize(4096, 0x11).unwrap();
        stream.synchronize().unwrap();
        assert!(other.iter().all(|byte| *byte == 0x11), "a later buffer holds {:#x}", other[0]);
    });
}

/// The driver refuses a batch, and the subscriber panics at the event that reports this: copies that were never made
/// must not read as complete.
#[test]
fn a_subscriber_panics_inside_the_submission_of_a_batch() {
    own_process!();
    doubles::on_stand_in(|stand_in| {
        let turn = Turn::take();
        let device = Device::open(&gpu_name(0)).unwrap();
        let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let (stream, memory) = (device.stream().unwrap(), device.alloc(64).unwrap());
        stream.upload_blocking(&[0xaa; 64], &memory).unwrap();
        let mut others: Vec<_> = (0..60).map(|_| pool.checkout(64).unwrap()).collect();
        others.iter_mut().for_each(|buf| buf.extend_from_slice(&[b'S'; 64]));
        drop(others);
        let copier = Copier::builder(&pool, &device).threads(2).ring(0).build().unwrap();
        panics_at_events(&turn);
        stand_in.hang(true);
        for call in ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"] {
            stand_in.fail(call, 1, 2, false);
        }
        let download = |_| vec![(memory.slice(..).unwrap(), pool.checkout(64).unwrap())];
        let download = |n| copier.download_pages(download(n)).unwrap();
        let flights: Vec<_> = (0..40).map(download).collect();
        std::thread::sleep(Duration::from_millis(200));
        stand_in.hang(false);
        for (at, flight) in flights.into_iter().enumerate() {
            let landed =
                flight.wait_timeout(doubles::HANG).unwrap_or_else(|e| panic!("copy {at}: {}", e.error));
            let landed = landed.unwrap_or_else(|e| panic!("copy {at}: {}", e.error)).remove(0);
            assert!(landed.iter().all(|byte| *byte == 0xaa), "copy {at} \"landed\" with {:?}", &landed[..8]);
        }
        turn.quiet();
    });
}

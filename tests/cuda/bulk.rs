//! A copier's transfers of slices, sources and files on a GPU, or on the stand-in driver: bytes copied there come back
//! unchanged, and files arrive whole or with an error.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "the doubles call a driver")]

use crate::support::downloaded;
use pinpool::copier::{FileSink, FileSource, Priority, Reading};
use pinpool::{Copier, Device, Error, Pool, Unpinned};

use crate::support::doubles::StandIn;
use crate::support::doubles::gpu::{on_gpu, on_stand_in, until};
use crate::support::rig::pattern;

const LEN: usize = (6 << 20) + 4321;

fn open() -> (Device, Pool, Copier) {
    let device = Device::open("cuda:0").unwrap();
    let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let copier = Copier::builder(&pool, &device).threads(3).chunk(256 << 10).share(6 << 20).build().unwrap();
    (device, pool, copier)
}

fn all_is_back(device: &Device, pool: &Pool) {
    until("all is back", || {
        device.reap();
        let stats = pool.stats();
        stats.checked_out_bytes + stats.in_flight_bytes == 0 && device.registered_bytes() == 0
    });
    assert_eq!(pool.stats().quarantined_bytes, 0);
    pool.check().unwrap();
}

#[test]
fn what_goes_there_comes_back() {
    on_gpu("what_goes_there_comes_back", |_| {
        let (device, pool, copier) = open();
        let memory = device.alloc(LEN).unwrap();
        let sent = pattern(LEN, 1);
        copier.upload_slice(&sent, &memory).unwrap();
        assert!(downloaded(&copier, &memory) == sent);
        let first = copier.with_priority(Priority::Foreground);
        first.upload_slice(&sent[..100_000], memory.slice(7..)).unwrap();
        let mut back = vec![0; 100_000];
        first.download_slice(memory.slice(7..100_007), &mut back).unwrap();
        assert!(back == sent[..100_000]);
        let mut buf = pool.checkout(1 << 20).unwrap();
        buf.extend_from_slice(&sent[..1 << 20]);
        copier.upload_pages(vec![(buf, memory.slice(..1 << 20).unwrap())]).unwrap().wait().unwrap();
        assert!(downloaded(&copier, memory.slice(..1 << 20)) == sent[..1 << 20]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        copier.upload(sent.clone(), &memory).unwrap().wait().unwrap();
        copier.download(&memory, FileSink::create(&path).unwrap()).unwrap().wait().unwrap();
        assert!(std::fs::read(&path).unwrap() == sent);
        drop(memory);
        all_is_back(&device, &pool);
    });
}

#[test]
fn many_threads_both_ways_at_once() {
    on_gpu("many_threads_both_ways_at_once", |_| {
        let (device, pool, copier) = open();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (device, pool, copier) = (&device, &pool, &copier);
                scope.spawn(move || {
                    let memory = device.alloc(1 << 20).unwrap();
                    let token = device.alloc(1000).unwrap();
                    let first = copier.with_priority(Priority::Foreground);
                    let stream = device.stream().unwrap();
                    for round in 0..20_u64 {
                        let sent = pattern(1 << 20, 100 * thread + round);
                        let load = copier.upload(sent.clone(), &memory).unwrap();
                        first.upload_slice(&sent[..1000], &token).unwrap();
                        if round % 5 == 4 {
                            load.cancel();
                            let outcome = load.wait().map_err(|failed| failed.error);
                            assert!(matches!(outcome, Ok(_) | Err(Error::Cancelled { .. })), "{outcome:?}");
                        } else if round % 2 == 0 {
                            load.wait().unwrap();
                            assert!(downloaded(copier, &memory) == sent);
                        } else {
                            load.wait().unwrap();
                            let mut back = vec![0; 1 << 20];
                            copier.download_slice(&memory, &mut back).unwrap();
                            assert!(back == sent);
                        }
                        assert!(downloaded(&first, &token) == sent[..1000]);
                        let mut own = pool.checkout(1000).unwrap();
                        own.extend_from_slice(&sent[1000..2000]);
                        stream.upload(own, &token).unwrap().wait().unwrap();
                        assert!(downloaded(&first, &token) == sent[1000..2000]);
                    }
                });
            }
        });
        drop(copier);
        all_is_back(&device, &pool);
    });
}

#[test]
fn files_are_copied_from_the_page_cache_in_every_way() {
    on_gpu("files_are_copied_from_the_page_cache_in_every_way", |_| {
        let (device, pool, copier) = open();
        let memory = device.alloc(LEN).unwrap();
        let sent = pattern(LEN, 2);
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR"))
            .or_else(|_| tempfile::NamedTempFile::new())
            .unwrap();
        std::fs::write(file.path(), &sent).unwrap();
        for reading in [Reading::Auto, Reading::Buffered, Reading::Direct] {
            for range in [0..LEN, 4097..LEN - 5] {
                let source = FileSource::open(file.path()).unwrap().reading(reading);
                let source = source.range(range.start as u64..range.end as u64).unwrap();
                copier.upload_slice(&vec![0; LEN], &memory).unwrap();
                copier.upload(source, &memory).unwrap().wait().unwrap();
                let back = downloaded(&copier, memory.slice(..range.len()));
                assert!(back == sent[range], "{reading:?}");
            }
        }
        let stats = copier.stats();
        // Each file system differs in what may be asked of it.
        let read = stats.cached_bytes + stats.direct_bytes + stats.buffered_bytes;
        assert_eq!(read, 3 * (2 * LEN - 4097 - 5) as u64, "{stats:?}");
        all_is_back(&device, &pool);
    });
}

#[test]
fn whatever_call_fails_a_load_is_right_or_an_error_and_leaves_nothing() {
    on_stand_in(
        "whatever_call_fails_a_load_is_right_or_an_error_and_leaves_nothing",
        |_, stand_in: &StandIn| {
            const CALLS: [&str; 3] = ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery"];
            let (device, pool, copier) = open();
            let memory = device.alloc(LEN).unwrap();
            let sent = pattern(LEN, 8);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &sent).unwrap();
            let load = || {
                let source = FileSource::open(file.path()).unwrap();
                let loaded = copier.upload(source, &memory).unwrap().wait();
                loaded.map(drop).map_err(|failed| failed.error)
            };
            let mut failed = 0;
            for call in CALLS {
                for nth in [1, 4, 11, 17] {
                    // Out of memory, once.
                    stand_in.fail(call, nth, 2, false);
                    let loaded = load();
                    stand_in.calm();
                    match loaded {
                        Ok(()) => assert!(downloaded(&copier, &memory) == sent, "{call} {nth}"),
                        Err(Error::Transfer { .. }) => failed += 1,
                        Err(other) => panic!("{call} {nth}: {other}"),
                    }
                    all_is_back(&device, &pool);
                }
            }
            assert!(failed > 0, "copies that are refused are errors");
            load().unwrap();
            assert!(downloaded(&copier, &memory) == sent);
            all_is_back(&device, &pool);
        },
    );
}

#[test]
fn loads_aborted_anywhere_leave_nothing() {
    on_gpu("loads_aborted_anywhere_leave_nothing", |_| {
        let (device, pool, copier) = open();
        let memory = device.alloc(LEN).unwrap();
        let sent = pattern(LEN, 4);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &sent).unwrap();
        for round in 0..40 {
            let source = FileSource::open(file.path()).unwrap();
            let load = copier.upload(source, &memory).unwrap();
            while load.progress().done < round * LEN as u64 / 40 && !load.is_over() {
                std::thread::yield_now();
            }
            load.cancel();
            if round % 2 == 0 {
                drop(load);
                continue;
            }
            match load.wait().map_err(|failed| failed.error) {
                Ok(_) | Err(Error::Cancelled { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        all_is_back(&device, &pool);
        copier.upload_slice(&sent, &memory).unwrap();
        assert!(downloaded(&copier, &memory) == sent);
    });
}

#[test]
fn a_file_that_becomes_shorter_is_an_error_and_no_death() {
    on_gpu("a_file_that_becomes_shorter_is_an_error_and_no_death", |_| {
        let (device, pool, copier) = open();
        let len = 16 << 20;
        let memory = device.alloc(len).unwrap();
        let sent = pattern(len, 5);
        let mut cut = 0;
        for round in 0..40_u64 {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &sent).unwrap();
            let source = FileSource::open(file.path()).unwrap();
            let load = copier.upload(source, &memory).unwrap();
            while load.progress().done < round * len as u64 / 50 && !load.is_over() {
                std::hint::spin_loop();
            }
            file.as_file().set_len(1_234_567).unwrap();
            let _ = load.wait_landed(u64::MAX);
            let right = load.progress().landed_to.min(len as u64) as usize;
            match load.wait().map_err(|failed| failed.error) {
                Ok(_) => assert_eq!(right, len),
                Err(Error::Read { offset, kind: std::io::ErrorKind::UnexpectedEof, .. }) => {
                    assert_eq!(offset, 1_234_567);
                    cut += 1;
                }
                Err(other) => panic!("{other}"),
            }
            if right > 0 {
                assert!(downloaded(&copier, memory.slice(..right)) == sent[..right], "{round}");
            }
        }
        println!("{cut} of 40 were cut off; {:?}", copier.stats());
        assert!(cut > 0);
        all_is_back(&device, &pool);
    });
}

//! The copy pipeline on a GPU, or on the stand-in driver: bytes copied there come back unchanged, and files are copied
//! from where the page cache has them.

#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(unsafe_code, reason = "the doubles call a driver")]

use std::time::Duration;

use pinpool::pipeline::{FileSink, FileSource, Pipeline, Priority, Reading};
use pinpool::{Device, Error, Pool, Unpinned};

use crate::support::doubles::StandIn;
use crate::support::doubles::gpu::{on_gpu, on_stand_in, on_stand_in_leaking, until};
use crate::support::rig::pattern;
use crate::support::skip;

const LEN: usize = (6 << 20) + 4321;

fn open() -> (Device, Pool, Pipeline) {
    let device = Device::open("cuda:0").unwrap();
    let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let pipeline =
        Pipeline::builder(&pool, &device).threads(3).chunk(256 << 10).share(6 << 20).build().unwrap();
    (device, pool, pipeline)
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
        let (device, pool, pipeline) = open();
        let memory = device.alloc(LEN).unwrap();
        let sent = pattern(LEN, 1);
        pipeline.upload_slice(&sent, &memory).unwrap();
        assert!(pipeline.download_vec(&memory).unwrap() == sent);
        let first = pipeline.with_priority(Priority::Foreground);
        first.upload_slice(&sent[..100_000], memory.slice(7..)).unwrap();
        let mut back = vec![0; 100_000];
        first.download_slice(memory.slice(7..100_007), &mut back).unwrap();
        assert!(back == sent[..100_000]);
        let mut buf = pool.checkout(1 << 20).unwrap();
        buf.extend_from_slice(&sent[..1 << 20]);
        pipeline.upload_pinned(buf, &memory).unwrap().wait().unwrap();
        assert!(pipeline.download_vec(memory.slice(..1 << 20)).unwrap() == sent[..1 << 20]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        pipeline.upload(sent.clone(), &memory).unwrap().wait().unwrap();
        pipeline.download(&memory, FileSink::create(&path).unwrap()).unwrap().wait().unwrap();
        assert!(std::fs::read(&path).unwrap() == sent);
        drop(memory);
        all_is_back(&device, &pool);
    });
}

#[test]
fn many_threads_both_ways_at_once() {
    on_gpu("many_threads_both_ways_at_once", |_| {
        let (device, pool, pipeline) = open();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (device, pool, pipeline) = (&device, &pool, &pipeline);
                scope.spawn(move || {
                    let memory = device.alloc(1 << 20).unwrap();
                    let token = device.alloc(1000).unwrap();
                    let first = pipeline.with_priority(Priority::Foreground);
                    let stream = device.stream().unwrap();
                    for round in 0..20_u64 {
                        let sent = pattern(1 << 20, 100 * thread + round);
                        let load = pipeline.upload(sent.clone(), &memory).unwrap();
                        first.upload_slice(&sent[..1000], &token).unwrap();
                        if round % 5 == 4 {
                            load.cancel();
                            let outcome = load.wait().map_err(|failed| failed.error);
                            assert!(matches!(outcome, Ok(_) | Err(Error::Cancelled { .. })), "{outcome:?}");
                        } else if round % 2 == 0 {
                            // Before the load is over: it comes behind it.
                            assert!(pipeline.download_vec(&memory).unwrap() == sent);
                        } else {
                            load.wait().unwrap();
                            let mut back = vec![0; 1 << 20];
                            pipeline.download_slice(&memory, &mut back).unwrap();
                            assert!(back == sent);
                        }
                        assert!(first.download_vec(&token).unwrap() == sent[..1000]);
                        let mut own = pool.checkout(1000).unwrap();
                        own.extend_from_slice(&sent[1000..2000]);
                        let way = pipeline.give_way();
                        stream.upload(own, &token).unwrap().wait().unwrap();
                        drop(way);
                        assert!(first.download_vec(&token).unwrap() == sent[1000..2000]);
                    }
                });
            }
        });
        drop(pipeline);
        all_is_back(&device, &pool);
    });
}

#[test]
fn files_are_copied_from_the_page_cache_in_every_way() {
    on_gpu("files_are_copied_from_the_page_cache_in_every_way", |_| {
        let (device, pool, pipeline) = open();
        let memory = device.alloc(LEN).unwrap();
        let sent = pattern(LEN, 2);
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR"))
            .or_else(|_| tempfile::NamedTempFile::new())
            .unwrap();
        std::fs::write(file.path(), &sent).unwrap();
        for reading in [Reading::Auto, Reading::Buffered, Reading::Direct, Reading::Mapped] {
            for range in [0..LEN, 4097..LEN - 5] {
                let source = FileSource::open(file.path()).unwrap().reading(reading);
                let source = source.range(range.start as u64..range.end as u64).unwrap();
                pipeline.upload_slice(&vec![0; LEN], &memory).unwrap();
                pipeline.upload_file(source, &memory).unwrap().wait().unwrap();
                let back = pipeline.download_vec(memory.slice(..range.len())).unwrap();
                assert!(back == sent[range], "{reading:?}");
            }
        }
        let stats = pipeline.stats();
        // Each file system differs in what may be asked of it; the cache of this file was just written.
        assert!(stats.window_bytes > 0 || stats.windows_refused > 0 || stats.cached_bytes == 0, "{stats:?}");
        println!("{stats:?}");
        all_is_back(&device, &pool);
    });
}

#[test]
fn windows_that_are_refused_are_read_and_counted() {
    on_stand_in("windows_that_are_refused_are_read_and_counted", |_, stand_in: &StandIn| {
        let (device, pool, pipeline) = open();
        let memory = device.alloc(LEN).unwrap();
        let sent = pattern(LEN, 3);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &sent).unwrap();
        for nth in [1, 2, 3] {
            let before = pipeline.stats();
            stand_in.fail("cuMemHostRegister_v2", nth, 2, false);
            let source = FileSource::open(file.path()).unwrap().reading(Reading::Mapped);
            pipeline.upload_file(source, &memory).unwrap().wait().unwrap();
            stand_in.calm();
            let after = pipeline.stats();
            assert_eq!(after.windows_refused, before.windows_refused + 1, "{after:?}");
            let moved = |s: &pinpool::pipeline::PipelineStats| {
                s.window_bytes + s.cached_bytes + s.direct_bytes + s.buffered_bytes
            };
            assert_eq!(moved(&after) - moved(&before), LEN as u64);
            // Another thread may have had a window meanwhile; the first of several comes before the refused one.
            assert!(after.window_bytes > before.window_bytes || nth == 1, "{after:?}");
            assert!(pipeline.download_vec(&memory).unwrap() == sent);
        }
        all_is_back(&device, &pool);
    });
}

#[test]
fn whatever_call_fails_a_load_from_windows_is_right_or_an_error_and_leaves_nothing() {
    on_stand_in(
        "whatever_call_fails_a_load_from_windows_is_right_or_an_error_and_leaves_nothing",
        |_, stand_in: &StandIn| {
            const CALLS: [&str; 4] =
                ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery", "cuMemHostRegister_v2"];
            let (device, pool, pipeline) = open();
            let memory = device.alloc(LEN).unwrap();
            let sent = pattern(LEN, 8);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &sent).unwrap();
            let load = || {
                let source = FileSource::open(file.path()).unwrap().reading(Reading::Mapped);
                let loaded = pipeline.upload_file(source, &memory).unwrap().wait();
                loaded.map(drop).map_err(|failed| failed.error)
            };
            let mut failed = 0;
            for call in CALLS {
                for nth in [1, 4, 11, 17] {
                    // The calls before it are windows of this load: out of memory, once.
                    stand_in.fail(call, nth, 2, false);
                    let loaded = load();
                    stand_in.calm();
                    match loaded {
                        Ok(()) => assert!(pipeline.download_vec(&memory).unwrap() == sent, "{call} {nth}"),
                        Err(Error::Transfer { .. }) => failed += 1,
                        Err(other) => panic!("{call} {nth}: {other}"),
                    }
                    all_is_back(&device, &pool);
                }
            }
            assert!(failed > 0, "copies that are refused are errors");
            load().unwrap();
            assert!(pipeline.download_vec(&memory).unwrap() == sent);
            all_is_back(&device, &pool);
        },
    );
}

/// On purpose, since the device may still reach the value: it is leaked, and its registration.
#[test]
fn a_window_that_cannot_be_unregistered_is_leaked_and_the_load_none_the_worse() {
    on_stand_in_leaking(
        "a_window_that_cannot_be_unregistered_is_leaked_and_the_load_none_the_worse",
        |_, stand_in: &StandIn| {
            let (device, pool, pipeline) = open();
            let memory = device.alloc(LEN).unwrap();
            let sent = pattern(LEN, 9);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &sent).unwrap();
            stand_in.fail("cuMemHostUnregister", 1, 2, false);
            let source = FileSource::open(file.path()).unwrap().reading(Reading::Mapped);
            pipeline.upload_file(source, &memory).unwrap().wait().unwrap();
            until("the others are gone", || {
                let registered = device.registered_bytes();
                registered > 0 && registered < 2 << 20
            });
            stand_in.calm();
            assert!(pipeline.download_vec(&memory).unwrap() == sent);
            until("all else is back", || {
                device.reap();
                let stats = pool.stats();
                stats.checked_out_bytes + stats.in_flight_bytes == 0
            });
            pool.check().unwrap();
        },
    );
}

#[test]
fn loads_from_windows_aborted_anywhere_leave_nothing() {
    on_gpu("loads_from_windows_aborted_anywhere_leave_nothing", |_| {
        let (device, pool, pipeline) = open();
        let memory = device.alloc(LEN).unwrap();
        let sent = pattern(LEN, 4);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &sent).unwrap();
        for round in 0..40 {
            let source = FileSource::open(file.path()).unwrap().reading(Reading::Mapped);
            let load = pipeline.upload_file(source, &memory).unwrap();
            while load.progress().done < round * LEN as u64 / 40 && !load.is_over() {
                std::thread::yield_now();
            }
            if round % 2 == 0 {
                drop(load);
                continue;
            }
            load.cancel();
            match load.wait().map_err(|failed| failed.error) {
                Ok(_) | Err(Error::Cancelled { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        all_is_back(&device, &pool);
        pipeline.upload_slice(&sent, &memory).unwrap();
        assert!(pipeline.download_vec(&memory).unwrap() == sent);
    });
}

#[test]
fn windows_come_in_batches_within_the_share_and_go_when_the_load_is_over() {
    on_gpu("windows_come_in_batches_within_the_share_and_go_when_the_load_is_over", |_| {
        let (device, pool, pipeline) = open();
        let len = 25 << 20;
        let memory = device.alloc(len).unwrap();
        let sent = pattern(len, 6);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &sent).unwrap();
        let source = FileSource::open(file.path()).unwrap().reading(Reading::Mapped);
        let load = pipeline.upload_file(source, &memory).unwrap();
        let mut most = 0;
        while !load.is_over() {
            most = most.max(device.registered_bytes());
            std::thread::yield_now();
        }
        load.wait().unwrap();
        let stats = pipeline.stats();
        if stats.windows_refused == 0 {
            assert!(stats.window_bytes >= (len - (2 << 20)) as u64, "{stats:?}");
            assert!(most > 0, "several batches were there to be seen");
        }
        assert!(most <= pipeline.share(), "{most}");
        until("none is registered", || device.registered_bytes() == 0);
        assert!(pipeline.download_vec(&memory).unwrap() == sent);
        all_is_back(&device, &pool);
    });
}

#[test]
fn there_are_no_windows_while_others_are_about() {
    on_gpu("there_are_no_windows_while_others_are_about", |_| {
        let (device, pool, pipeline) = open();
        let memory = device.alloc(LEN).unwrap();
        let other = device.alloc(1000).unwrap();
        let sent = pattern(LEN, 7);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &sent).unwrap();
        let load = || {
            let before = pipeline.stats();
            let source = FileSource::open(file.path()).unwrap().reading(Reading::Mapped);
            pipeline.upload_file(source, &memory).unwrap().wait().unwrap();
            let after = pipeline.stats();
            after.window_bytes + after.windows_refused - before.window_bytes - before.windows_refused
        };
        for priority in [Priority::Bulk, Priority::Foreground] {
            let feed = pipeline.with_priority(priority).feed(&other).unwrap();
            assert_eq!(load(), 0, "{priority:?}");
            drop(feed);
        }
        // However long the way is given.
        let way = pipeline.give_way();
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(load(), 0, "way was given");
        drop(way);
        // No foreground transfer is active any more, after a while.
        until("windows again", || load() > 0);
        assert!(pipeline.download_vec(&memory).unwrap() == sent);
        all_is_back(&device, &pool);
    });
}

/// Not on the stand-in, whose copies are the CPU's: it would crash, as any program that reads such a mapping.
#[test]
fn a_mapped_file_that_becomes_shorter_is_an_error_and_no_death() {
    on_gpu("a_mapped_file_that_becomes_shorter_is_an_error_and_no_death", |gpu| {
        if gpu.stand_in.is_some() {
            return skip!("the stand-in's device is the CPU");
        }
        let (device, pool, pipeline) = open();
        let len = 64 << 20;
        let memory = device.alloc(len).unwrap();
        let sent = pattern(len, 5);
        let mut cut = 0;
        for round in 0..60_u64 {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &sent).unwrap();
            let source = FileSource::open(file.path()).unwrap().reading(Reading::Mapped);
            let load = pipeline.upload_file(source, &memory).unwrap();
            while load.progress().done < round * len as u64 / 80 && !load.is_over() {
                std::hint::spin_loop();
            }
            file.as_file().set_len(1_234_567).unwrap();
            let _ = load.wait_landed(u64::MAX);
            let right = load.progress().landed_to.min(len as u64) as usize;
            match load.wait().map_err(|failed| failed.error) {
                Ok(_) => assert_eq!(right, len),
                Err(Error::Shrunk { end, .. }) => {
                    assert_eq!(end, 1_234_567);
                    cut += 1;
                }
                Err(other) => panic!("{other}"),
            }
            if right > 0 {
                assert!(pipeline.download_vec(memory.slice(..right)).unwrap() == sent[..right], "{round}");
            }
        }
        println!("{cut} of 60 were cut off; {:?}", pipeline.stats());
        assert!(cut > 0);
        all_is_back(&device, &pool);
    });
}

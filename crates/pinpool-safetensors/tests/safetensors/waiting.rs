//! Loads that wait: what their other handles see meanwhile, how a deadline ends them, and what a dropped one leaves.

use std::future::Future;
use std::time::{Duration, Instant};

use pinpool::Error;
use pinpool_safetensors::{Checkpoint, Load};

use super::{Folder, HANG, Made, Rig, arrived, block_on, made, shards, until};

const SOON: Duration = Duration::from_millis(30);
const COUNT: usize = 24;

/// A checkpoint of two files, of 3 MiB.
fn checkpoint(folder: &Folder) -> (Vec<Made>, Checkpoint) {
    let tensors = (0..COUNT).map(|n| made(&format!("t{n:02}"), "U8", &[128 << 10], n as u64));
    let tensors: Vec<Made> = tensors.collect();
    let (_, checkpoint) = shards(folder, &tensors, COUNT / 2);
    (tensors, checkpoint)
}

#[test]
fn a_deadline_ends_a_load_that_finds_no_memory_however_it_is_waited_for() {
    let (rig, folder) = (Rig::late(), Folder::new());
    let copier = rig.copier();
    let (tensors, checkpoint) = checkpoint(&folder);
    let all = rig.emptied();
    let soon = copier.with_timeout(SOON);
    let loader = || checkpoint.loader(&soon);
    let since = Instant::now();
    let ends = [
        loader().load().map(drop).unwrap_err(),
        loader().start().unwrap().blocking().next().unwrap().map(drop).unwrap_err(),
        block_on(loader().start().unwrap().next_tensor()).unwrap().map(drop).unwrap_err(),
        loader().start().unwrap().take("t00").map(drop).unwrap_err(),
        block_on(loader().start().unwrap().take_async("t23")).map(drop).unwrap_err(),
    ];
    assert!(since.elapsed() >= SOON * 5);
    for error in ends {
        let text = error.to_string();
        assert!(error.is_retryable() && matches!(error, Error::Timeout(_)), "{text}");
        for word in
            ["0 bytes of 1.5 MiB (1572864 bytes) of ", "1.safetensors", "a segment of the pool", " free"]
        {
            assert!(text.contains(word), "{text:?} lacks {word:?}");
        }
    }
    drop(all);
    rig.all_is_back();
    let loaded = checkpoint.loader(&copier.with_timeout(HANG)).load().unwrap();
    arrived(&copier, &loaded, &tensors);
    rig.all_is_back();
}

/// Both files are under way from the start: the second one's copies go on no more than the first one's.
#[test]
fn a_load_that_is_dropped_is_cancelled() {
    let (rig, folder) = (Rig::plain(), Folder::new());
    // A load would take half a minute.
    let copier = rig.builder().rate(100 << 10).build().unwrap();
    let (_, checkpoint) = checkpoint(&folder);
    let gone: [fn(Load); 4] = [
        drop,
        |loading| {
            // A task that has waited, and does no more.
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(std::pin::pin!(loading.take_async("t23")).poll(&mut cx).is_pending());
        },
        |loading| drop(loading.clone()),
        |loading| drop(block_on(loading.next_tensor()).unwrap().unwrap()),
    ];
    for gone in gone {
        let loading = checkpoint.loader(&copier).start().unwrap();
        gone(loading);
        // The chunks that are under way, up to a dozen, take their time at this rate.
        until("it goes on", || {
            let stats = rig.pool.stats();
            stats.checked_out_bytes + stats.in_flight_bytes == 0
        });
        rig.all_is_back();
    }
}

#[test]
fn how_far_a_load_is_can_be_seen_while_threads_wait_for_it() {
    let (rig, folder) = (Rig::plain(), Folder::new());
    let copier = rig.builder().rate(1 << 20).build().unwrap();
    let (_, checkpoint) = checkpoint(&folder);
    let load = checkpoint.loader(&copier).start().unwrap();
    let other = load.clone();
    let waits = std::thread::spawn(move || other.take("t23").unwrap().unwrap().shape()[0]);
    let mut seen = Vec::new();
    until("nothing moves", || {
        let progress = load.progress();
        assert!(!progress.over && progress.total == 3 << 20 && progress.landed_to <= progress.done);
        if seen.last() != Some(&progress.done) {
            seen.push(progress.done);
        }
        seen.len() > 3
    });
    assert!(seen.is_sorted() && load.left() == COUNT, "{seen:?}");
    assert_eq!(waits.join().unwrap(), 128 << 10);
    let progress = load.progress();
    assert_eq!((progress.done, progress.landed_to), (3 << 20, 3 << 20));
    assert!(progress.over && progress.elapsed > Duration::ZERO);
    drop(load);
    rig.all_is_back();
}

/// Each wants its own tensors, in its own order; some give up.
#[test]
fn tasks_and_threads_share_a_load() {
    let (rig, folder) = (Rig::late(), Folder::new());
    let (tensors, checkpoint) = checkpoint(&folder);
    let copiers = [rig.builder().rate(64 << 20).build().unwrap(), rig.copier()];
    for copier in copiers.iter().cycle().take(20) {
        let load = checkpoint.loader(copier).start().unwrap();
        std::thread::scope(|scope| {
            for user in 0..6 {
                let (load, tensors) = (&load, &tensors);
                scope.spawn(move || {
                    for n in (0..COUNT).filter(|n| n % 6 == user).rev() {
                        let name = &tensors[n].name;
                        if user % 3 == 0 {
                            assert!(load.take(name).unwrap().is_some());
                            continue;
                        }
                        if user % 3 == 1 {
                            // Polled, and dropped.
                            let mut polled = std::pin::pin!(load.take_async(name));
                            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                            if let std::task::Poll::Ready(taken) = polled.as_mut().poll(&mut cx) {
                                assert!(taken.unwrap().is_some());
                                continue;
                            }
                        }
                        assert!(block_on(load.take_async(name)).unwrap().is_some(), "{name}");
                        assert!(block_on(load.take_async(name)).unwrap().is_none(), "it comes out once");
                    }
                });
            }
        });
        assert_eq!(load.left(), 0);
        drop(load);
    }
    rig.all_is_back();
}

/// A task whose waker panics sleeps on, and the others do not.
#[test]
fn a_waker_that_panics_keeps_no_other_task_asleep() {
    struct Panics;
    impl std::task::Wake for Panics {
        fn wake(self: std::sync::Arc<Self>) {
            panic!("a waker");
        }
    }
    let (rig, folder) = (Rig::plain(), Folder::new());
    let copier = rig.builder().rate(2 << 20).build().unwrap();
    let (_, checkpoint) = checkpoint(&folder);
    let load = checkpoint.loader(&copier).start().unwrap();
    let waker = std::sync::Arc::new(Panics).into();
    let mut asleep = std::pin::pin!(load.take_async("t22"));
    assert!(asleep.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    assert!(block_on(load.take_async("t23")).unwrap().is_some());
    assert!(block_on(asleep).unwrap().is_some());
    assert_eq!(load.left(), COUNT - 2);
    rig.all_is_back();
}

/// Some take what comes next, others wait for tensors by name: each tensor comes out once, and the last wait ends.
#[test]
fn waits_by_name_and_iterations_share_a_load() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let (rig, folder) = (Rig::late(), Folder::new());
    let (tensors, checkpoint) = checkpoint(&folder);
    let copiers = [rig.builder().rate(64 << 20).build().unwrap(), rig.copier()];
    for copier in copiers.iter().cycle().take(20) {
        let (load, taken) = (checkpoint.loader(copier).start().unwrap(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for user in 0..6 {
                let (load, tensors, taken) = (&load, &tensors, &taken);
                scope.spawn(move || {
                    let count = match user % 3 {
                        0 => load.blocking().map(Result::unwrap).count(),
                        1 => std::iter::from_fn(|| block_on(load.next_tensor()).map(Result::unwrap)).count(),
                        _ => {
                            let names = tensors.iter().rev().step_by(3).map(|made| &made.name);
                            names.filter_map(|name| block_on(load.take_async(name)).unwrap()).count()
                        }
                    };
                    taken.fetch_add(count, Ordering::Relaxed);
                });
            }
        });
        assert_eq!((taken.into_inner(), load.left()), (COUNT, 0));
        assert!(load.progress().over && load.blocking().next().is_none());
    }
    rig.all_is_back();
}

/// A device that is moved by hand runs only what a thread tells it to, so one that waits for a tensor does.
#[cfg(feature = "cuda")]
#[test]
fn a_thread_that_waits_moves_a_device_by_hand() {
    let machine = super::support::hand::Machine::new(1, 64 << 20, 3);
    let (folder, device) = (Folder::new(), machine.device(0));
    let (tensors, checkpoint) = checkpoint(&folder);
    let pool = pinpool::Pool::builder(&device).capacity(16 << 20).build().unwrap();
    let copier = pinpool::Copier::builder(&pool, &device).chunk(64 << 10).share(1 << 20).build().unwrap();
    let loaded = checkpoint.loader(&copier).load().unwrap();
    arrived(&copier, &loaded, &tensors);
    let load = checkpoint.loader(&copier).start().unwrap();
    assert_eq!(load.take("t23").unwrap().unwrap().name(), "t23");
    assert_eq!(load.blocking().map(Result::unwrap).count(), COUNT - 1);
}

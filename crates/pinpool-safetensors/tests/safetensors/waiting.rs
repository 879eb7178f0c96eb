//! Loads that wait: what their other handles see meanwhile, how a deadline ends them, and what a dropped one leaves.

use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pinpool::Error;
use pinpool_safetensors::{Checkpoint, DeviceTensor, Load};

use super::support::{in_use, waker};
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
        let words = ["0 bytes of 1.5 MiB (1572864 bytes) of ", ".safetensors", "a segment of the pool"];
        assert!(words.iter().all(|word| text.contains(word)), "{text:?} lacks one of {words:?}");
    }
    drop(all);
    rig.all_is_back();
    let loaded = checkpoint.loader(&copier.with_timeout(HANG)).load().unwrap();
    arrived(&copier, &loaded, &tensors);
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
            let mut cx = Context::from_waker(Waker::noop());
            assert!(pin!(loading.take_async("t23")).poll(&mut cx).is_pending());
        },
        |loading| drop(loading.clone()),
        |loading| drop(block_on(loading.next_tensor()).unwrap().unwrap()),
    ];
    for gone in gone {
        let loading = checkpoint.loader(&copier).start().unwrap();
        gone(loading);
        // The chunks that are under way, up to a dozen, take their time at this rate.
        until("it goes on", || in_use(&rig.pool) == 0);
        rig.all_is_back();
    }
}

/// A task whose waker panics sleeps on, and the others do not.
#[test]
fn a_waker_that_panics_keeps_no_other_task_asleep() {
    let (rig, folder) = (Rig::plain(), Folder::new());
    let copier = rig.builder().rate(2 << 20).build().unwrap();
    let (_, checkpoint) = checkpoint(&folder);
    let load = checkpoint.loader(&copier).start().unwrap();
    let waker = waker(|| panic!("a waker"));
    let mut asleep = pin!(load.take_async("t22"));
    assert!(asleep.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert!(block_on(load.take_async("t23")).unwrap().is_some());
    assert!(block_on(asleep).unwrap().is_some());
    assert_eq!(load.left(), COUNT - 2);
    rig.all_is_back();
}

/// A waker that goes through a load gets what is there, is told once that it must not wait, and comes to an end.
#[test]
fn an_iteration_ends_on_a_thread_that_must_not_wait() {
    let (rig, folder) = (Rig::plain(), Folder::new());
    let copier = rig.builder().rate(1 << 20).build().unwrap();
    let (_, checkpoint) = checkpoint(&folder);
    let load = checkpoint.loader(&copier).start().unwrap();
    let (sender, told) = channel();
    let own = load.clone();
    let waker = waker(move || sender.send(own.blocking().collect::<Vec<_>>()).unwrap());
    let mut first = Box::pin(load.take_async("t01"));
    assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let got = told.recv_timeout(HANG).unwrap();
    let (last, good) = got.split_last().unwrap();
    assert!(matches!(last, Err(Error::Unsupported(_))) && good.iter().all(Result::is_ok), "{got:?}");
    assert!(load.left() == COUNT - good.len() && good.len() < COUNT);
    drop((first, waker, got));
    drop(load);
    rig.all_is_back();
}

/// Some take what comes next, others wait for tensors by name, and some give up: each tensor comes out once, with its own
/// bytes, and the last wait ends.
#[test]
fn waits_by_name_and_iterations_share_a_load() {
    let (rig, folder) = (Rig::late(), Folder::new());
    let (tensors, checkpoint) = checkpoint(&folder);
    let copiers = [rig.builder().rate(64 << 20).build().unwrap(), rig.copier()];
    for copier in copiers.iter().cycle().take(10) {
        let load = checkpoint.loader(copier).start().unwrap();
        assert!(load.take("no such tensor").unwrap().is_none());
        let by_name = |user: usize| tensors.iter().rev().skip(user).step_by(2).map(|made| &*made.name);
        let use_it = |user: usize| -> Vec<DeviceTensor> {
            match user {
                0 => load.blocking().map(Result::unwrap).collect(),
                1 => std::iter::from_fn(|| block_on(load.next_tensor()).map(Result::unwrap)).collect(),
                2 | 3 => by_name(user).filter_map(|name| load.take(name).unwrap()).collect(),
                _ => by_name(user)
                    .filter_map(|name| {
                        // Polled, and dropped.
                        let mut cx = Context::from_waker(Waker::noop());
                        match pin!(load.take_async(name)).poll(&mut cx) {
                            Poll::Ready(taken) => taken.unwrap(),
                            Poll::Pending => block_on(load.take_async(name)).unwrap(),
                        }
                    })
                    .collect(),
            }
        };
        let mut got: Vec<DeviceTensor> = std::thread::scope(|scope| {
            let users: Vec<_> = (0..6).map(|user| scope.spawn(move || use_it(user))).collect();
            users.into_iter().flat_map(|user| user.join().unwrap()).collect()
        });
        got.sort_by(|a, b| a.name().cmp(b.name()));
        arrived(&rig.copier(), &got, &tensors);
        assert!(load.left() == 0 && load.progress().over && load.blocking().next().is_none());
    }
}

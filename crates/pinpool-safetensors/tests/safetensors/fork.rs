//! A load, seen from the child of a fork: every call there is told, nothing hangs, and nothing that is dropped there does
//! anything.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use pinpool::{Error, Result};
use pinpool_safetensors::{Checkpoint, DeviceTensor, Load};

use super::support::own_process;
use super::support::process::forked;
use super::{Folder, Rig, file, made};

fn is_forked<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Forked))
}

#[test]
fn a_child_is_told_by_every_load() {
    own_process!();
    let folder = Folder::new();
    let path = folder.put("a.safetensors", file(&[made("a", "U8", &[300_000], 1)]));
    let rig = Rig::plain();
    let copier = rig.copier();
    let checkpoint = Checkpoint::open(&path).unwrap();
    rig.node.hang(0);
    let load = || checkpoint.loader(&copier).start().unwrap();
    let (loading, dropped, shared) = (Cell::new(Some(load())), Cell::new(Some(load())), load());
    type Case<'a> = (&'a str, Box<dyn Fn() -> bool + 'a>);
    let cases: [Case<'_>; 5] = [
        (
            "a load",
            Box::new(|| {
                let loading = loading.take().unwrap();
                loading.blocking().next().is_some_and(is_forked)
                    && loading.blocking().next().is_none()
                    && loading.left() == 0
            }),
        ),
        (
            "a load, by a task",
            Box::new(|| {
                let loading = loading.take().unwrap();
                let next = pin!(loading.next_tensor()).poll(&mut Context::from_waker(Waker::noop()));
                matches!(next, Poll::Ready(Some(Err(Error::Forked))))
            }),
        ),
        (
            "a load that is dropped",
            Box::new(|| {
                loading.take().unwrap().cancel();
                drop(dropped.take());
                true
            }),
        ),
        ("a shared load", Box::new(|| is_forked(shared.take("a")))),
        ("a new load", Box::new(|| is_forked(checkpoint.loader(&copier).start()))),
    ];
    for (what, case) in &cases {
        assert_eq!(forked(|| i32::from(!case())), Some(0), "{what}; None: it hangs");
    }
    drop(cases);
    rig.node.resume(0);
    assert!(shared.take("a").unwrap().is_some(), "the parent's goes on");
}

/// What the types are, for programs that share them between threads and catch panics.
#[test]
fn all_handles_may_be_sent_shared_and_used_after_a_caught_panic() {
    fn is<T: Send + Sync + std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    is::<(Checkpoint, DeviceTensor, Load)>();
}

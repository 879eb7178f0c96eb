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
    let next = |load: &Load| pin!(load.next_tensor()).poll(&mut Context::from_waker(Waker::noop()));
    let cases: [(&str, &dyn Fn() -> bool); 5] = [
        ("a load", &|| shared.blocking().map(is_forked).eq([true]) && shared.blocking().next().is_none()),
        ("a load, by a task", &|| {
            let first = next(&shared);
            let is_told = matches!(first, Poll::Ready(Some(Err(Error::Forked))));
            is_told && matches!(next(&shared), Poll::Ready(None))
        }),
        ("a load that is dropped", &|| {
            loading.take().unwrap().cancel();
            drop(dropped.take());
            true
        }),
        ("a load by name", &|| is_forked(shared.take("a"))),
        ("a new load", &|| is_forked(checkpoint.loader(&copier).start())),
    ];
    for (what, case) in &cases {
        assert_eq!(forked(|| i32::from(!case())), Some(0), "{what}; None: it hangs");
    }
    rig.node.resume(0);
    assert!(shared.take("a").unwrap().is_some(), "the parent's goes on");
}

/// What the types are, for programs that share them between threads and catch panics.
#[test]
fn all_handles_may_be_sent_shared_and_used_after_a_caught_panic() {
    fn is<T: Send + Sync + std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    is::<(Checkpoint, DeviceTensor, Load)>();
}

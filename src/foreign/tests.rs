//! When foreign code runs, and what its panics cost.

use std::cell::Cell;
use std::panic::panic_any;
use std::sync::Mutex as StdMutex;
use std::time::Duration;

use super::*;
use crate::locks::{Condvar, Mutex, MutexGuard};

/// A payload whose drop panics with another one, this many times.
struct Bomb(u32);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 {
            panic_any(Bomb(self.0 - 1));
        }
    }
}

/// What was called, in order.
#[derive(Clone, Default)]
struct Calls(Arc<StdMutex<Vec<&'static str>>>);

impl Calls {
    fn note(&self, name: &'static str) {
        self.0.lock().unwrap().push(name);
    }

    fn all(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }

    /// A task whose waker notes that it was woken, and then calls `then`.
    fn task(&self, name: &'static str, then: impl Fn() + Send + Sync + 'static) -> Task {
        struct Runs<F>(Calls, &'static str, F);
        impl<F: Fn() + Send + Sync + 'static> std::task::Wake for Runs<F> {
            fn wake(self: Arc<Self>) {
                self.0.note(self.1);
                (self.2)();
            }
        }
        Task::of(&Arc::new(Runs(self.clone(), name, then)).into())
    }

    fn value(&self, name: &'static str) -> Dropped {
        Dropped(self.clone(), name)
    }

    fn tell(&self, name: &'static str) {
        let calls = self.clone();
        tell(move || calls.note(name));
    }
}

struct Dropped(Calls, &'static str);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.note(self.1);
    }
}

#[test]
fn what_comes_up_under_locks_runs_after_the_last() {
    let calls = Calls::default();
    let (outer, inner) = (Mutex::new(()), Mutex::new(()));
    let (first, second) = (calls.task("wake", || ()), calls.task("another wake", || ()));
    {
        let _outer = outer.lock();
        {
            let _inner = inner.lock();
            first.wake();
            calls.tell("event");
            discard(calls.value("drop"));
        }
        drop(Owned::new(calls.value("owned")));
        second.clone().wake();
        assert!(calls.all().is_empty(), "one lock is held still");
    }
    assert_eq!(calls.all(), ["wake", "another wake", "event", "drop", "owned"]);
    // Without a lock at once.
    calls.tell("now");
    assert_eq!(calls.all().last(), Some(&"now"));
}

/// Foreign code runs while a lock is given up for a moment or by a wait on a condition, unless the
/// thread has a second lock.
#[test]
fn a_lock_that_is_given_up_lets_foreign_code_run() {
    let calls = Calls::default();
    let (other, lock, news) = (Mutex::new(()), Mutex::new(()), Condvar::new());
    let mut guard = lock.lock();
    calls.tell("before");
    MutexGuard::unlocked(&mut guard, || {
        calls.tell("meanwhile");
        assert_eq!(calls.all(), ["before", "meanwhile"]);
    });
    calls.tell("before the wait");
    assert!(!news.wait_for(&mut guard, Duration::from_secs(60)), "it ended for no reason");
    assert_eq!(calls.all().pop(), Some("before the wait"));
    assert!(news.wait_for(&mut guard, Duration::from_millis(1)));
    drop(guard);
    let held = other.lock();
    let mut guard = lock.lock();
    calls.tell("under another lock");
    assert!(news.wait_for(&mut guard, Duration::from_millis(1)));
    drop(guard);
    assert_eq!(calls.all().len(), 3);
    drop(held);
    assert_eq!(calls.all().pop(), Some("under another lock"));
}

/// A subscriber may run tasks of its own until they are done, and so may the drop of a value.
#[test]
fn a_wake_waits_for_no_event_and_for_no_drop() {
    let calls = Calls::default();
    let own = calls.clone();
    tell(move || {
        own.task("woken by a subscriber", || ()).wake();
        own.tell("an event within");
        own.note("the end of the subscriber");
    });
    assert_eq!(calls.all(), ["woken by a subscriber", "the end of the subscriber", "an event within"]);

    struct Wakes(Calls);
    impl Drop for Wakes {
        fn drop(&mut self) {
            let (lock, task) = (Mutex::new(()), self.0.task("woken by a drop", || ()));
            let guard = lock.lock();
            task.wake();
            drop(guard);
            self.0.note("the end of the drop");
        }
    }
    let calls = Calls::default();
    let (lock, task) = (Mutex::new(()), calls.task("put off behind them", || ()));
    {
        let _guard = lock.lock();
        calls.tell("event");
        discard(Wakes(calls.clone()));
        task.wake();
    }
    assert_eq!(calls.all(), ["put off behind them", "event", "woken by a drop", "the end of the drop"]);
}

/// A guard that unwinding drops ends its deferral, and what was put off runs even then.
#[test]
fn unwinding_ends_deferrals() {
    let (calls, lives, lock) = (Calls::default(), Cell::new(0), Mutex::new(()));
    live("on purpose", || {
        lives.set(lives.get() + 1);
        let _guard = lock.lock();
        calls.tell("put off");
        match lives.get() {
            1 => panic!("on purpose"),
            2 => panic_any(Bomb(2)),
            _ => {}
        }
    });
    assert_eq!(calls.all(), ["put off"; 3]);
    // Whatever the payload is, and however its drop panics: what comes after it runs all the same.
    let bad = [0, 1, 7].map(|times| calls.task("woken", move || panic_any(Bomb(times))));
    let guard = lock.lock();
    bad.into_iter().for_each(Task::wake);
    tell(|| panic_any(Bomb(1)));
    calls.tell("the last");
    drop(guard);
    assert_eq!(calls.all()[3..], ["woken", "woken", "woken", "the last"]);
    assert_eq!((call("on purpose", || panic_any(Bomb(3))), call("not at all", || 7)), (None::<()>, Some(7)));
    assert!(may_call(), "no deferral is left");
}

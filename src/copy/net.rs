//! What happens where something unwinds on a thread of ours: it is caught, and the thread goes on.
//!
//! All that is not ours is called through guards of its own, so nothing should get here. Should it all the same, a thread that
//! were gone would leave behind it whatever was given to it: copies that are never submitted, transfers that are never over, and
//! callers that wait for them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Between two lives of a thread: one that unwinds again at once is not to take a processor for itself.
const PAUSE: Duration = Duration::from_millis(1);

/// `None`: the call has unwound. What it panicked with is forgotten, since dropping that could panic as well.
pub(super) fn survive<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).map_err(std::mem::forget).ok()
}

/// A thread's life, lived again where it has unwound, until it ends by itself. Says so once.
pub(super) fn live(what: &str, life: impl Fn()) {
    let mut is_said = false;
    while survive(&life).is_none() {
        if !std::mem::replace(&mut is_said, true) {
            _ = survive(|| {
                tracing::error!(
                    target: "pinpool::copy",
                    thread = what,
                    "a thread of the library's panicked, and goes on; please report the message on standard error"
                );
            });
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;
    use std::panic::panic_any;

    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("on purpose, when what it panicked with is dropped");
        }
    }

    #[test]
    fn a_thread_that_unwinds_lives_on_until_it_ends_by_itself() {
        let lives = Cell::new(0);
        live("a test's", || {
            lives.set(lives.get() + 1);
            match lives.get() {
                1 => panic!("on purpose"),
                2 => panic_any(Bomb),
                _ => {}
            }
        });
        assert_eq!(lives.get(), 3);
        assert!(survive(|| panic_any(Bomb)).is_none());
        assert_eq!(survive(|| 7), Some(7));
    }
}

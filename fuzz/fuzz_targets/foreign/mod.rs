//! The program's code that misbehaves, where an input says so: a subscriber and wakers that panic, with payloads whose
//! drop panics, or that call the pool.
//!
//! They unwind without calling the panic hook, which libFuzzer would take for a crash. A target calls [`behave`] before
//! an operation and [`rest`] at the end; `ops` and `copier` do.

use std::cell::{Cell, RefCell};
use std::panic::resume_unwind;
use std::sync::{Arc, Once};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use pinpool::Pool;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A panic's payload whose drop panics as well, this many times.
struct Bomb(u8);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 {
            resume_unwind(Box::new(Bomb(self.0 - 1)));
        }
    }
}

std::thread_local! {
    /// What the next call does; 0: every call is well-behaved.
    static MOOD: Cell<u32> = const { Cell::new(0) };
    static POOL: RefCell<Option<Pool>> = const { RefCell::new(None) };
}

/// One call of the program's code.
fn call() {
    let mood = MOOD.get();
    // A second panic during the first one's unwinding (of a waker that is dropped by its own panic) would abort any
    // program.
    if mood == 0 || std::thread::panicking() {
        return;
    }
    let next = mood.wrapping_mul(0x9E37_79B9).rotate_left(7) | 1;
    MOOD.set(next);
    match next >> 1 & 7 {
        0 | 1 => resume_unwind(Box::new("on purpose")),
        2 => resume_unwind(Box::new(Bomb((next >> 8) as u8 % 4))),
        kind => {
            let pool = POOL.with(|pool| pool.try_borrow().ok().and_then(|pool| pool.clone()));
            let Some(pool) = pool else { return };
            // The pool's calls below must not misbehave again.
            MOOD.set(0);
            match kind {
                3 => _ = pool.stats(),
                4 => drop(pool.snapshot()),
                5 => drop(pool.stuck(Duration::ZERO)),
                6 => _ = pool.check(),
                _ => drop(pool.regions()),
            }
            MOOD.set(next);
        }
    }
}

/// Sets how the program's code behaves until the next call of this function.
pub fn behave(mood: u8, pool: &Pool) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Calls).expect("there is no other"));
    // In half of all inputs it is well-behaved.
    MOOD.set(if mood % 2 == 0 { 0 } else { u32::from(mood) << 8 | 1 });
    POOL.with(|own| *own.borrow_mut() = Some(pool.clone()));
}

/// Makes the program's code well-behaved again, and lets go of its handle of the pool.
pub fn rest() {
    MOOD.set(0);
    POOL.with(|own| own.borrow_mut().take());
}

/// Polls a future with a waker of the program's.
pub fn poll<R>(run: impl FnOnce(&mut Context<'_>) -> R) -> R {
    let waker = waker();
    let result = run(&mut Context::from_waker(&waker));
    // The waker that is dropped here is not inside a call of the crate, so its drop is well-behaved.
    let mood = MOOD.replace(0);
    drop(waker);
    MOOD.set(mood);
    result
}

fn waker() -> Waker {
    struct Wakes;
    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            call();
        }
    }
    impl Drop for Wakes {
        fn drop(&mut self) {
            call();
        }
    }
    Arc::new(Wakes).into()
}

struct Calls;

impl Subscriber for Calls {
    fn enabled(&self, what: &Metadata<'_>) -> bool {
        what.target().starts_with("pinpool")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        call();
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {
        call();
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        call();
    }
    fn enter(&self, _: &Id) {
        call();
    }
    fn exit(&self, _: &Id) {
        call();
    }
    fn try_close(&self, _: Id) -> bool {
        call();
        true
    }
}

//! A subscriber that panics whenever the crate calls it, for sweeps over failing calls: installed where the environment
//! asks for it, by `PINPOOL_SUBSCRIBER=panics`.

use std::panic::panic_any;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A payload whose own drop panics.
struct Bomb(bool);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 {
            panic_any(Bomb(false));
        }
    }
}

struct Panics(AtomicU64);

impl Panics {
    /// Every call but some of those for spans, so that there are some to be entered.
    fn call(&self, one_in: u64) {
        if self.0.fetch_add(1, Ordering::Relaxed) % one_in == 0 {
            panic_any(Bomb(true));
        }
    }
}

impl Subscriber for Panics {
    fn enabled(&self, what: &Metadata<'_>) -> bool {
        what.target().starts_with("pinpool")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        self.call(3);
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {
        self.call(1);
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        self.call(1);
    }
    fn enter(&self, _: &Id) {
        self.call(2);
    }
    fn exit(&self, _: &Id) {
        self.call(2);
    }
    fn try_close(&self, _: Id) -> bool {
        self.call(1);
        true
    }
}

static ASKED: AtomicBool = AtomicBool::new(false);

/// For foreign code that is no subscriber: panics where the environment asks for a panicking subscriber.
#[allow(dead_code, reason = "wakers of one test do")]
pub fn panic_if_asked() {
    if ASKED.load(Ordering::Relaxed) {
        panic_any(Bomb(true));
    }
}

/// Once in a process, at the start of a test.
pub fn install_if_asked() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var("PINPOOL_SUBSCRIBER").as_deref() != Ok("panics") {
            return;
        }
        ASKED.store(true, Ordering::Relaxed);
        tracing::subscriber::set_global_default(Panics(AtomicU64::new(0))).expect("there is no other");
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.payload().is::<Bomb>() {
                before(info);
            }
        }));
        println!("under a subscriber that panics");
    });
}

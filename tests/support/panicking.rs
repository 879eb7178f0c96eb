//! A subscriber that does what a test says: panic, for one, at each call or at some. A process has one.
//!
//! Sweeps over failing calls run under one that panics where the environment asks for it, by
//! `PINPOOL_SUBSCRIBER=panics`.

use std::panic::panic_any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A payload of a panic whose own drop panics, with another such payload, as many times as the number says.
pub struct Bomb(pub u32);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 {
            panic_any(Bomb(self.0 - 1));
        }
    }
}

/// What the subscriber was called for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Event,
    NewSpan,
    Enter,
    Exit,
    Close,
    Record,
}

type Act = Arc<dyn Fn(Call, Option<&Metadata<'_>>) + Send + Sync>;
static ACT: RwLock<Option<Act>> = RwLock::new(None);

/// From here on the subscriber does this. Spans that exist already are called for without what they are.
pub fn act(act: impl Fn(Call, Option<&Metadata<'_>>) + Send + Sync + 'static) {
    *ACT.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(act));
}

pub fn quiet() {
    *ACT.write().unwrap_or_else(PoisonError::into_inner) = None;
}

struct Subscribed;

fn does(call: Call, what: Option<&Metadata<'_>>) {
    let act = ACT.read().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(act) = act {
        act(call, what);
    }
}

impl Subscriber for Subscribed {
    fn enabled(&self, what: &Metadata<'_>) -> bool {
        what.target().starts_with("pinpool")
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        does(Call::NewSpan, Some(span.metadata()));
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {
        does(Call::Record, None);
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        does(Call::Event, Some(event.metadata()));
    }
    fn enter(&self, _: &Id) {
        does(Call::Enter, None);
    }
    fn exit(&self, _: &Id) {
        does(Call::Exit, None);
    }
    fn try_close(&self, _: Id) -> bool {
        does(Call::Close, None);
        true
    }
}

/// Once in a process. Panics on purpose print nothing from then on, however many they are.
pub fn install() {
    tracing::subscriber::set_global_default(Subscribed).expect("there is no other");
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<Bomb>() {
            before(info);
        }
    }));
}

static ASKED: AtomicBool = AtomicBool::new(false);

/// For foreign code that is no subscriber: panics where the environment asks for a panicking subscriber.
pub fn panic_if_asked() {
    if ASKED.load(Ordering::Relaxed) {
        panic_any(Bomb(1));
    }
}

/// At the start of a test.
pub fn install_if_asked() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var("PINPOOL_SUBSCRIBER").as_deref() != Ok("panics") {
            return;
        }
        ASKED.store(true, Ordering::Relaxed);
        install();
        let calls = AtomicU64::new(0);
        // Every call but some of those for spans, so that there are some to be entered.
        act(move |call, _| {
            let one_in = match call {
                Call::NewSpan => 3,
                Call::Enter | Call::Exit => 2,
                Call::Event | Call::Close | Call::Record => 1,
            };
            if calls.fetch_add(1, Ordering::Relaxed) % one_in == 0 {
                panic_any(Bomb(1));
            }
        });
        println!("under a subscriber that panics");
    });
}

//! Foreign code that misbehaves.

use std::panic::panic_any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Wake, Waker};

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
pub struct Heard<'a> {
    pub call: Call,
    /// Not known for spans that exist already.
    pub what: Option<&'a Metadata<'a>>,
}

impl Heard<'_> {
    pub fn target(&self) -> &str {
        self.what.map_or("", |what| what.target())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Event,
    NewSpan,
    Enter,
    Exit,
    Close,
    Record,
}

type Act = Arc<dyn Fn(&Heard<'_>) + Send + Sync>;
static ACT: RwLock<Option<Act>> = RwLock::new(None);

/// The subscriber of this process: does what the running test asks for.
struct Subscribed;

impl Subscribed {
    fn does(call: Call, what: Option<&Metadata<'_>>) {
        let act = ACT.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(act) = act {
            act(&Heard { call, what });
        }
    }
}

impl Subscriber for Subscribed {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Self::does(Call::NewSpan, Some(span.metadata()));
        Id::from_u64(IDS.fetch_add(1, Ordering::Relaxed))
    }
    fn record(&self, _: &Id, _: &Record<'_>) {
        Self::does(Call::Record, None);
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        Self::does(Call::Event, Some(event.metadata()));
    }
    fn enter(&self, _: &Id) {
        Self::does(Call::Enter, None);
    }
    fn exit(&self, _: &Id) {
        Self::does(Call::Exit, None);
    }
    fn try_close(&self, _: Id) -> bool {
        Self::does(Call::Close, None);
        true
    }
}

/// A test's turn with the subscriber, of which a process has one.
pub struct Turn(());

impl Turn {
    pub fn take() -> Self {
        tracing::subscriber::set_global_default(Subscribed).expect("there is no other");
        // Panics on purpose print nothing, however many they are.
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let quiet = info.payload().is::<Bomb>() || info.payload().is::<Quiet>();
            if !quiet {
                before(info);
            }
        }));
        Self(())
    }

    pub fn act(&self, act: impl Fn(&Heard<'_>) + Send + Sync + 'static) {
        self::act(act);
    }

    pub fn quiet(&self) {
        self::quiet();
    }
}

/// From here on the subscriber does this, within a turn.
pub fn act(act: impl Fn(&Heard<'_>) + Send + Sync + 'static) {
    *ACT.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(act));
}

pub fn quiet() {
    *ACT.write().unwrap_or_else(PoisonError::into_inner) = None;
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.quiet();
    }
}

/// An ordinary payload, of a panic that is on purpose.
pub struct Quiet;

/// A waker that runs this.
pub fn waker(run: impl Fn() + Send + Sync + 'static) -> Waker {
    struct Runs<F>(F);
    impl<F: Fn() + Send + Sync + 'static> Wake for Runs<F> {
        fn wake(self: Arc<Self>) {
            (self.0)();
        }
    }
    Arc::new(Runs(run)).into()
}

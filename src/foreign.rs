//! Foreign code: code that this crate calls and that is not part of it.
//!
//! A program embeds the pool, so the pool's calls run code of the program: `tracing` subscribers
//! and `metrics` recorders, wakers, the drop of values that were lent or registered, sources and
//! sinks, host functions, callbacks. Any of it may panic (also with a payload whose drop panics),
//! block, or call back into the pool. No invariant of the crate rests on it.
//!
//! # The rule
//!
//! 1. Foreign code runs under no lock of the crate, nor between the driver's acceptance of work and
//!    the timeline's entry for it, nor on a thread that has lent borrowed memory to a device.
//! 2. Each call of it goes through this module, which catches a panic, drops the payload, logs what
//!    follows, and returns to its caller. So foreign code never unwinds through a frame of the
//!    crate. The exception is what a caller gives a call for its own duration, on its own thread: a
//!    reader, a writer, a closure. The drops in such a call put its state in order.
//! 3. The crate's own threads go on after a panic that reaches the top of their loop.
//!
//! # How the rule is kept
//!
//! - A [`Deferral`] marks a section without foreign code: each guard of a lock (`locks`), each
//!   submission of a timeline and each blocking copy of borrowed memory has one. They nest.
//! - Events, wakes and drops that come up there are queued on the thread, and run when its last
//!   deferral ends. Wakes come first, then the others in order.
//! - Foreign code that returns a value to the crate (a source's bytes, a recorder's handle) cannot
//!   be put off. [`call`] asserts in debug builds that no deferral is active.
//! - Wakes are made by a loop: a wake that comes up while this thread runs a waker waits for its
//!   turn. So wakers that poll their tasks at once need no stack for each. Events take turns in the
//!   same way. But a wake waits for no event and no drop: a subscriber may run tasks of its own.
//! - [`Owned`] holds a value of the program's. Its drop, anywhere, goes through this module.
//! - Clippy denies the macros and methods that call foreign code (`tracing`'s, `Waker::wake`,
//!   `catch_unwind`) outside of this module, and locks without a deferral outside of `locks`
//!   (`clippy.toml`). `.ci/layers` looks for `tracing::event!` and `tracing::span!`.
//!
//! Unparking a thread is the standard library's code, and is not deferred.
//!
//! Under loom foreign code runs at once: a model's threads share the thread-locals of one thread.
//!
//! To be read from top to bottom: deferrals and queues, calls, events and spans.

// The lint's exception: this module calls foreign code for all others.
#![allow(clippy::disallowed_macros, clippy::disallowed_methods)]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};

const WAKER_PANICKED: &str = "a waker panicked: its task may not be polled again";
const DROP_PANICKED: &str = "dropping a value of the caller's panicked: what it had not freed yet is leaked";

struct ThreadState {
    /// The number of deferrals of this thread that have not ended.
    deferrals: Cell<usize>,
    /// Whether a frame further out on this thread is running wakers.
    waking: Cell<bool>,
    /// Whether a frame further out on this thread runs other foreign code that can be put off.
    running: Cell<bool>,
    /// What was put off, in order. The queues have no destructor, so that the thread's last
    /// destructors can use them; they are empty whenever no deferral is active and nothing runs.
    wakes: DeferredQueue,
    others: DeferredQueue,
}

/// Each of these catches its panics.
type DeferredQueue = RefCell<ManuallyDrop<VecDeque<Box<dyn FnOnce()>>>>;

const fn queue() -> DeferredQueue {
    RefCell::new(ManuallyDrop::new(VecDeque::new()))
}

/// Frees an empty queue's memory, since the queue has no destructor.
fn shrink(queue: &DeferredQueue) {
    drop(ManuallyDrop::into_inner(queue.replace(ManuallyDrop::new(VecDeque::new()))));
}

impl ThreadState {
    /// Whether any work was put off.
    #[inline]
    fn has_any(&self) -> bool {
        !self.wakes.borrow().is_empty() || !self.others.borrow().is_empty()
    }
}

std::thread_local! {
    static STATE: ThreadState = const {
        ThreadState {
            deferrals: Cell::new(0),
            waking: Cell::new(false),
            running: Cell::new(false),
            wakes: queue(),
            others: queue(),
        }
    };
}

/// While this lives, its thread puts foreign code off. See the module's page.
#[derive(Debug)]
#[must_use = "foreign code is put off for as long as this lives"]
pub(crate) struct Deferral {
    /// Keeps it on its thread.
    _thread: PhantomData<*const ()>,
}

/// Puts foreign code off on this thread until the deferral is dropped.
#[inline]
pub(crate) fn defer() -> Deferral {
    if cfg!(not(loom)) {
        STATE.with(|state| state.deferrals.set(state.deferrals.get() + 1));
    }
    Deferral { _thread: PhantomData }
}

impl Drop for Deferral {
    #[inline]
    fn drop(&mut self) {
        if cfg!(not(loom)) {
            STATE.with(|state| {
                let left = state.deferrals.get() - 1;
                state.deferrals.set(left);
                if left == 0 && state.has_any() {
                    run_deferred(state);
                }
            });
        }
    }
}

/// Runs `inside` as if the innermost deferral had ended, and starts that again afterwards: for a
/// lock that is released for a moment. Without another deferral, what was put off runs first.
pub(crate) fn lifted<R>(inside: impl FnOnce() -> R) -> R {
    struct Again;
    impl Drop for Again {
        fn drop(&mut self) {
            std::mem::forget(defer());
        }
    }
    // Ends the deferral of the caller's guard. `Again` starts it again, also on unwinding.
    drop(Deferral { _thread: PhantomData });
    let _again = Again;
    inside()
}

/// Whether work was put off that would run if the innermost deferral ended.
pub(crate) fn is_work_due() -> bool {
    STATE.with(|state| {
        let (wakes, others) = (!state.wakes.borrow().is_empty(), !state.others.borrow().is_empty());
        state.deferrals.get() == 1 && !state.waking.get() && (wakes || others && !state.running.get())
    })
}

/// Runs what was put off: all wakes, then one of the others, and so on.
#[cold]
fn run_deferred(state: &ThreadState) {
    // If wakers run already, the frame further out that runs them goes on with the queue.
    while !state.waking.get() {
        state.waking.set(true);
        loop {
            // A statement of its own, here and below, ends the borrow: what runs may put more off.
            let next = state.wakes.borrow_mut().pop_front();
            let Some(wake) = next else { break };
            wake();
        }
        shrink(&state.wakes);
        state.waking.set(false);
        if state.running.get() {
            // As above.
            return;
        }
        let next = state.others.borrow_mut().pop_front();
        let Some(work) = next else { break };
        state.running.set(true);
        work();
        state.running.set(false);
    }
    if !state.waking.get() {
        shrink(&state.others);
    }
}

/// Runs unawaited foreign code: now, or later if it is put off or a frame further out runs such.
fn later(queue: fn(&ThreadState) -> &DeferredQueue, work: impl FnOnce() + 'static) {
    if cfg!(loom) {
        return work();
    }
    STATE.with(|state| {
        queue(state).borrow_mut().push_back(Box::new(work));
        if state.deferrals.get() == 0 {
            run_deferred(state);
        }
    });
}

// --- calls ---------------------------------------------------------------------------------------

/// Catches a panic of `run`. The payload is dropped here, and its drop may panic too.
fn guard<R>(run: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(run)).map_err(dispose).ok()
}

fn dispose(payload: Box<dyn Any + Send>) {
    if let Err(next) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        // Dropping this one may panic in turn, without end: it is leaked.
        std::mem::forget(next);
    }
}

/// Calls foreign code. `None`: it panicked. Then `panicked` is logged, which says what did so, and
/// what follows.
pub(crate) fn call<R>(panicked: &'static str, run: impl FnOnce() -> R) -> Option<R> {
    debug_assert!(may_call(), "foreign code is called where it must be put off");
    survive(panicked, run)
}

/// Runs code of the crate's own at the top of one of its threads, or where it must not unwind. That
/// code may use deferrals; when it has panicked, none of them is active.
pub(crate) fn survive<R>(panicked: &'static str, run: impl FnOnce() -> R) -> Option<R> {
    let result = guard(run);
    if result.is_none() {
        crate::foreign::error!(target: "pinpool::foreign", "{panicked}");
    }
    result
}

/// Runs a thread of the crate's: `run`, again after each panic. Only the first one is logged.
pub(crate) fn live(panicked: &'static str, mut run: impl FnMut()) {
    /// The pause between two attempts: code that panics again at once must not use up a processor.
    const RETRY_PAUSE: std::time::Duration = std::time::Duration::from_millis(1);
    let mut ended = survive(panicked, &mut run);
    while ended.is_none() {
        std::thread::sleep(RETRY_PAUSE);
        ended = guard(&mut run);
    }
}

/// A waiting task: its waker, or nothing if cloning the waker panicked.
#[derive(Clone, Debug)]
pub(crate) struct Task(Option<Arc<Owned<Waker>>>);

impl Task {
    /// Clones the waker. Must not be called where foreign code must be put off.
    pub(crate) fn of(waker: &Waker) -> Self {
        let waker = call("cloning a waker panicked: its task is not woken", || waker.clone());
        Self(waker.map(|waker| Arc::new(Owned::new(waker))))
    }

    /// Whether a wake of this task is one of the other, too.
    pub(crate) fn will_wake(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(waker), Some(other)) => waker.will_wake(other),
            (_, other) => other.is_none(),
        }
    }

    pub(crate) fn wake(self) {
        let Some(waker) = self.0 else { return };
        later(|state| &state.wakes, move || _ = call(WAKER_PANICKED, || waker.wake_by_ref()));
    }
}

/// Drops a value of the program's: now; or later, if this thread puts foreign code off.
pub(crate) fn discard<T: Send + 'static>(value: T) {
    if !std::mem::needs_drop::<T>() {
        return;
    }
    // Unlike a wake, a drop waits for no turn: the caller may rely on the value's being dropped.
    when_allowed(move || _ = call(DROP_PANICKED, || release(value)));
}

/// Drops a value of the program's; or leaks it, if the process ends: its drop may call a driver.
fn release<T>(value: T) {
    match crate::exit::pass() {
        Some(_pass) => drop(value),
        None => std::mem::forget(value),
    }
}

/// Runs a job that may call foreign code, unawaited: now, or later if this thread defers that.
pub(crate) fn when_allowed(job: impl FnOnce() + 'static) {
    if may_call() { job() } else { later(|state| &state.others, job) }
}

/// A value of the program's. Its drop, anywhere, is foreign code: see [`discard`].
pub(crate) struct Owned<T: Send + 'static>(ManuallyDrop<T>);

/// What keeps an adopted context or stream alive.
pub(crate) type KeepAlive = Owned<Box<dyn Any + Send + Sync>>;

impl<T: Send + 'static> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }

    /// Gives the value back to the program.
    #[allow(unsafe_code)]
    pub(crate) fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once: `this` is never dropped.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl<T: Send + 'static> Drop for Owned<T> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: taken once: nothing uses it after this.
        discard(unsafe { ManuallyDrop::take(&mut self.0) });
    }
}

impl<T: Send + 'static> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send + 'static> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owned")
    }
}

// --- events and spans ----------------------------------------------------------------------------

/// Whether events of a level may have a listener. Calls no subscriber. From the process's exit on
/// there are no events: what follows then is no news, and the subscriber may have ended.
#[inline]
pub(crate) fn listens(level: tracing::Level) -> bool {
    level <= STATIC_MAX_LEVEL && level <= LevelFilter::current() && !crate::exit::exiting()
}

/// Sends an event to the subscriber, now or later. The event owns its fields.
pub(crate) fn tell(event: impl FnOnce() + 'static) {
    // The panic hook has reported a panic. An event of it would go to the same subscriber.
    later(|state| &state.others, move || _ = guard(event));
}

/// Sends an event with borrowed fields now. Not to be called where foreign code is put off.
pub(crate) fn tell_now(event: impl FnOnce()) {
    debug_assert!(may_call(), "foreign code is called where it must be put off");
    _ = guard(event);
}

/// `event!(LEVEL, target: "…", field = value, %field, field, "message")`: like `tracing`'s. The
/// fields' values are taken at once; the subscriber gets them when foreign code may run.
macro_rules! event {
    (@ $level:ident $target:literal [$($kept:tt)*] % $name:ident, $($rest:tt)+) => {
        $crate::foreign::event!(@ $level $target [$($kept)* ($name, tracing::field::display($name.to_string()))] $($rest)+)
    };
    (@ $level:ident $target:literal [$($kept:tt)*] $name:ident = $value:expr, $($rest:tt)+) => {
        $crate::foreign::event!(@ $level $target [$($kept)* ($name, $value.to_owned())] $($rest)+)
    };
    (@ $level:ident $target:literal [$($kept:tt)*] $name:ident, $($rest:tt)+) => {
        $crate::foreign::event!(@ $level $target [$($kept)* ($name, $name.to_owned())] $($rest)+)
    };
    (@ $level:ident $target:literal [$(($name:ident, $kept:expr))*] $message:literal $(, $arg:expr)* $(,)?) => {
        if $crate::foreign::listens(tracing::Level::$level) {
            let kept = ($($kept,)*);
            let message = format!($message $(, $arg)*);
            $crate::foreign::tell(move || {
                let ($($name,)*) = kept;
                tracing::event!(target: $target, tracing::Level::$level, $($name,)* "{message}");
            });
        }
    };
    ($level:ident, target: $target:literal, $($rest:tt)+) => {
        $crate::foreign::event!(@ $level $target [] $($rest)+)
    };
}
macro_rules! error { ($($event:tt)+) => { $crate::foreign::event!(ERROR, $($event)+) } }
macro_rules! warning { ($($event:tt)+) => { $crate::foreign::event!(WARN, $($event)+) } }
macro_rules! info { ($($event:tt)+) => { $crate::foreign::event!(INFO, $($event)+) } }
macro_rules! debug { ($($event:tt)+) => { $crate::foreign::event!(DEBUG, $($event)+) } }

/// `span!(LEVEL, target: "…", "name", field = value)`: makes a [`Span`] at once.
macro_rules! span {
    ($level:ident, target: $target:literal, $($rest:tt)+) => {
        $crate::foreign::Span::make(tracing::Level::$level, || {
            tracing::span!(target: $target, tracing::Level::$level, $($rest)+)
        })
    };
}

pub(crate) use {debug, error, event, info, span, warning as warn};

/// A span of `tracing`'s. If the subscriber panics in a use of it, only that call is lost.
#[derive(Clone)]
pub(crate) struct Span(Option<Arc<Owned<tracing::Span>>>);

impl Span {
    /// For [`span!`].
    pub(crate) fn make(level: tracing::Level, make: impl FnOnce() -> tracing::Span) -> Self {
        if !listens(level) || !may_call() {
            return Self(None);
        }
        Self(guard(make).filter(|span| !span.is_none()).map(|span| Arc::new(Owned::new(span))))
    }

    /// Enters the span on this thread until the guard is dropped.
    pub(crate) fn enter(&self) -> Entered<'_> {
        Entered(self.0.as_ref().filter(|_| may_call()).and_then(|span| guard(|| span.enter())))
    }

    /// Sets fields of the span.
    pub(crate) fn record(&self, fill: impl FnOnce(&tracing::Span)) {
        if let Some(span) = self.0.as_ref().filter(|_| may_call()) {
            _ = guard(|| fill(span));
        }
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Span").field(&self.0.is_some()).finish()
    }
}

/// An entered span.
pub(crate) struct Entered<'a>(Option<tracing::span::Entered<'a>>);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(entered) = self.0.take() {
            debug_assert!(may_call(), "a span ends where foreign code must be put off");
            _ = guard(|| drop(entered));
        }
    }
}

/// Whether foreign code may run at once: no deferral is active on this thread.
pub(crate) fn may_call() -> bool {
    cfg!(loom) || STATE.with(|state| state.deferrals.get() == 0)
}

#[cfg(all(test, not(loom)))]
mod tests;

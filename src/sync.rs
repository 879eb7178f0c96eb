//! The primitives that the lock-free parts are built from: std's, or loom's under `--cfg loom`.
//!
//! # The asymmetric fence
//!
//! A checkout and a return must not pay for a full fence (20 cycles and more). Yet they need its
//! order against the rare thread that reclaims a thread cache: the owner stores *busy* and then
//! loads *permit*, the cold side stores *permit* and then loads *busy*, and at least one must see
//! the other's store (Dekker's pattern, which needs store-load order on both sides). The rare side
//! pays for both: [`light`] on the frequent side is a compiler fence, and [`heavy`] on the rare
//! side is `membarrier(PRIVATE_EXPEDITED)`, a full fence on every core that runs a thread of the
//! process.
//!
//! There are two modes, since some environments lack that call:
//!
//! | mode | when | the frequent side | the rare side |
//! | --- | --- | --- | --- |
//! | membarrier | the kernel registered it | compiler fence | the call |
//! | fences | kernels without the call, `PINPOOL_FENCES=1` | `fence(SeqCst)` | `fence(SeqCst)` |
//!
//! Only the first mode exercises the pairing of `light` with the system call.
//! `tests/core/threads.rs` runs that on real threads. Models follow the first mode's code, with
//! fences in place of the call; some models follow the second mode's (`model_fenced`).
//! ThreadSanitizer does not model fences. It needs none here: what orders the two sides' accesses
//! to the memory are releases and acquires, and the fences only keep both from going on at once.
//!
//! A sandbox (seccomp) that is installed after a pool was built can refuse the call. Then nothing
//! is known of owners, which have executed no fence, and the process ends, with the reason on
//! stderr. A program with such a sandbox sets `PINPOOL_FENCES=1`, for the second mode.
//!
//! Loom runs a model's threads in turn on one thread of the system, so thread-locals and parking
//! are loom's, too. What is no part of a protocol stays std's (`Arc`, counters), unseen by loom.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

/// An `UnsafeCell` whose accesses loom can check.
#[cfg(all(test, loom))]
pub(crate) use loom::cell::UnsafeCell;

/// A mutex: parking_lot's with a deferral of foreign code, or loom's with that interface.
#[cfg(not(loom))]
pub(crate) use crate::locks::{Mutex, MutexGuard};

/// Loom's mutex as parking_lot's. Locking a dropped one panics (a model keeps a `Weak` to it).
#[cfg(loom)]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    inner: loom::sync::Mutex<T>,
    dropped: std::sync::atomic::AtomicBool,
}

/// Loom's guard.
#[cfg(loom)]
pub(crate) type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { inner: loom::sync::Mutex::new(value), dropped: false.into() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Checked after locking, where loom has had its chance to run other threads first.
        assert!(!self.dropped.load(Ordering::Relaxed), "locked after it was dropped");
        guard
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.inner.try_lock().ok()?;
        assert!(!self.dropped.load(Ordering::Relaxed), "locked after it was dropped");
        Some(guard)
    }
}

#[cfg(loom)]
impl<T> Drop for Mutex<T> {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

/// Thread-locals: std's, or loom's, which each thread of a model has for itself.
#[cfg(not(loom))]
pub(crate) use std::thread_local;
#[cfg(loom)]
macro_rules! model_local {
    ($(static $name:ident: $type:ty = const $init:block;)*) => {
        loom::thread_local! { $(static $name: $type = $init;)* }
    };
}
#[cfg(loom)]
pub(crate) use model_local as thread_local;

/// Parking and unparking threads.
pub(crate) mod thread {
    #[cfg(not(loom))]
    pub(crate) use std::thread::{Thread, current};

    use std::time::Instant;

    /// A parked thread's handle. Loom's own would also wake a thread that is blocked on a lock.
    #[cfg(loom)]
    #[derive(Clone, Debug)]
    pub(crate) struct Thread(std::sync::Arc<loom::sync::Notify>);

    #[cfg(loom)]
    impl Thread {
        pub(crate) fn unpark(&self) {
            self.0.notify();
        }
    }

    #[cfg(loom)]
    loom::thread_local! {
        static CURRENT: Thread = Thread(std::sync::Arc::new(loom::sync::Notify::new()));
    }

    /// This thread's handle.
    #[cfg(loom)]
    pub(crate) fn current() -> Thread {
        CURRENT.with(Clone::clone)
    }

    /// Parks this thread until it is unparked or the deadline passes; may return earlier.
    pub(crate) fn park_until(deadline: Option<Instant>) {
        #[cfg(loom)]
        {
            let _ = deadline;
            current().0.wait();
        }
        #[cfg(not(loom))]
        match deadline {
            Some(deadline) => std::thread::park_timeout(deadline.saturating_duration_since(Instant::now())),
            None => std::thread::park(),
        }
    }
}

/// Lets another thread run while this thread waits for it.
pub(crate) fn yield_now() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

/// Whether this process fences with a system call, so that [`light`] may be a compiler fence. A
/// pool asks this when it is built. After `false` its owners execute fences.
#[cfg(not(loom))]
pub(crate) fn asymmetric() -> bool {
    static REGISTERED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    let register = || {
        let fences = std::env::var_os("PINPOOL_FENCES").is_some_and(|value| value == "1");
        !fences && crate::os::barrier::membarrier_register()
    };
    // The call is tried each time: a sandbox may have been installed since the last time.
    *REGISTERED.get_or_init(register) && crate::os::barrier::membarrier()
}

/// Models follow the code that uses the call, with fences on both sides in its place.
#[cfg(loom)]
pub(crate) fn asymmetric() -> bool {
    !THREAD_FENCED.get()
}

/// The frequent side's fence where [`asymmetric`] holds: a compiler fence, except in models. Pairs
/// with [`heavy`].
#[inline(always)]
pub(crate) fn light() {
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

/// The rare side's fence. Pairs with [`light`] (through the system call), or, with `both`, with a
/// full fence on the frequent side. Ends the process if the call is refused.
pub(crate) fn heavy(both: bool) {
    fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    if !both && !crate::os::barrier::membarrier() {
        crate::os::barrier::die(
            "the system call membarrier is refused, although it was granted when the pool was built: a buffer could \
             get two owners. Install the sandbox before the first pool is built, let it grant membarrier, or set \
             PINPOOL_FENCES=1.",
        );
    }
    #[cfg(loom)]
    let _ = both;
}

/// The crate's own threads on which a wait could be for the thread itself. Foreign code (wakers,
/// drops of owned values) runs on them too, and must not wait for what that thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Own {
    /// The region thread.
    Worker,
    /// The reaper: finds out what is complete.
    Reaper,
    /// A thread that moves the chunks of a copier.
    Copier,
    Timer,
}

std::thread_local! {
    static OWN: std::cell::Cell<Option<Own>> = const { std::cell::Cell::new(None) };
}

/// Notes that this thread is one of the crate's own until it ends.
pub(crate) fn enter(own: Own) {
    OWN.set(Some(own));
}

/// Which kind of [`Own`] thread this is, if any: the reaper while it does the reaper's work.
pub(crate) fn own() -> Option<Own> {
    OWN.get().or_else(|| LANDING.with(std::cell::Cell::get).then_some(Own::Reaper))
}

/// Whether this thread does the reaper's work now: it must not wait for a completion.
pub(crate) fn finds_out() -> bool {
    OWN.get() == Some(Own::Reaper) || LANDING.with(std::cell::Cell::get)
}

// Whether this thread does what follows from a completion. In models: loom's.
thread_local! {
    static LANDING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs what follows from a completion, or from knowing that there will be none: returns of
/// segments, wakes, drops. Foreign code that runs meanwhile could wait for ever for another
/// completion, which this thread has yet to deliver. [`finds_out`] lets such waits be refused.
pub(crate) fn landing<R>(run: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            LANDING.with(|landing| landing.set(self.0));
        }
    }
    let _before = Before(LANDING.with(|landing| landing.replace(true)));
    run()
}

/// A point where the threads of a model may overtake each other: put before each step of a model.
///
/// Loom remembers only the last access to each atomic, so a thread that loads a word and then
/// changes it hides an earlier load of another thread. All these points change one word, so loom
/// tries every order of the steps. The access is relaxed: it synchronises nothing.
#[cfg(all(test, loom))]
pub(crate) fn step() {
    loom::lazy_static! {
        static ref CROSSING: AtomicU32 = AtomicU32::new(0);
    }
    CROSSING.fetch_add(1, Ordering::Relaxed);
}

#[cfg(loom)]
std::thread_local! {
    /// The running model is of a machine without the call.
    static THREAD_FENCED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// [`model`] for a machine without the asymmetric fence. (All threads of a model run on this one.)
#[cfg(all(test, loom))]
pub(crate) fn model_fenced(name: &'static str, preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    THREAD_FENCED.set(true);
    model(name, preemptions, run);
    THREAD_FENCED.set(false);
}

/// Runs a loom model: every interleaving with at most `preemptions` switches away from a thread
/// that could go on (`LOOM_MAX_PREEMPTIONS` overrides that). Prints the number of executions.
///
/// A model that fails ends the process with the reason and status 101. What it leaves behind can be
/// neither used nor dropped outside of loom: unwinding would hide the reason by an abort.
#[cfg(all(test, loom))]
pub(crate) fn model(name: &'static str, preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    use std::cell::Cell;
    use std::io::Write;
    use std::sync::Once;

    std::thread_local! {
        static RUNNING: Cell<Option<(&'static str, u64)>> = const { Cell::new(None) };
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let Some((name, runs)) = RUNNING.get() else { return before(info) };
            // Not by `eprintln!`: the test harness would capture that.
            let _ = writeln!(std::io::stderr(), "\nloom model \"{name}\" FAILED in execution {runs}: {info}");
            std::process::exit(101);
        }));
    });

    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.max_branches = 20_000;
    let since = std::time::Instant::now();
    RUNNING.set(Some((name, 0)));
    builder.check(move || {
        RUNNING.set(RUNNING.get().map(|(name, runs)| (name, runs + 1)));
        run();
    });
    let runs = RUNNING.take().map_or(0, |(_, runs)| runs);
    let bound = builder.preemption_bound.unwrap_or_default();
    println!(
        "loom model \"{name}\": {runs} executions of at most {bound} preemptions, {:.1?}",
        since.elapsed()
    );
}

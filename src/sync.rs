//! The primitives that the lock-free parts are built from: std's, or loom's under `--cfg loom`.
//!
//! # The asymmetric fence
//!
//! A checkout and a return must not pay for a full fence (20 cycles and more), yet they need one against the rare
//! thread that takes a shard back: the owner stores *busy* and then loads *mode*, the other side stores *mode* and then
//! loads *busy*, and at least one of them must see the other (Dekker's pattern, which needs store-load order on both
//! sides). So the price is moved: [`light`] on the frequent side is a compiler fence, and [`heavy`] on the rare side is
//! `membarrier(PRIVATE_EXPEDITED)`, which runs a full fence on every core that runs a thread of this process.
//!
//! There are three modes, because not every environment has, or understands, that call:
//!
//! | mode | when | `light` | `heavy` |
//! | --- | --- | --- | --- |
//! | membarrier | the kernel registered it | compiler fence | the call |
//! | fences | loom (which models only fences as sequentially consistent), and kernels without the call | `fence(SeqCst)` | `fence(SeqCst)` |
//! | read-modify-write | `--cfg pinpool_rmw`: sanitizers, which do not model fences | see `freelist::shard` | see there |
//!
//! What only the first mode exercises is the pairing of `light` with the system call; `tests/core/threads.rs` runs it on
//! threads. Models go the first mode's way, with fences in place of the call, and some of them the second's
//! ([`model_fenced`]).
//!
//! # When the call is refused later
//!
//! A sandbox that is put up after the first pool was built (seccomp) can refuse a call that was granted before. Pools that are
//! built from then on find that out at once, and are of the second mode. A pool that was built before finds out when it
//! works on thread caches for the first time ([`heavy`] says `false`), and goes over to the second mode for good, where that is
//! sound. Owners of that pool's caches have paid for no fence so far, so each of them must be known to have seen that its
//! permit is gone, and what it wrote must be visible. That is known of
//!
//! - a cache that no thread leases: leases begin and end under the pool's lock, which is held;
//! - the cache of the very thread that asks;
//! - an owner that has come to its cache since, found its permit gone, and has fenced (`freelist::shard`, `Gate::enter`);
//! - an owner that is blocked in the kernel, by the kernel's own word ([`is_blocked`](crate::os::barrier::is_blocked)).
//!
//! All others are waited for, and come under one of the last two sooner or later, unless they compute without a system call.
//! After [`PATIENCE`], or where `/proc` does not tell, nothing is left that is sound: the process is aborted, with the reason on
//! stderr. (No other call will do in its place: a change of protection interrupts other processors no more on all of them, and
//! a sandbox that refuses this call may refuse any.) What other pools find out makes no difference: each goes over by itself.
//!
//! # Under loom
//!
//! Loom runs its threads by turns on one thread of the system, so thread-locals are loom's too, and so is parking. What
//! is no part of a protocol stays std's (`Arc`, counters of names): loom sees neither a race nor an ordering there.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

/// An `UnsafeCell` whose accesses loom can check.
#[cfg(all(test, loom))]
pub(crate) use loom::cell::UnsafeCell;

/// A mutex whose lock is just `lock()`: parking_lot's with a deferral of foreign code, or loom's in its clothes.
#[cfg(not(loom))]
pub(crate) use crate::locks::{Mutex, MutexGuard};

/// Loom's mutex with parking_lot's interface. Locking it after it was dropped fails, as far as the memory is still there
/// (a model keeps a `Weak` to that end).
#[cfg(loom)]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    inner: loom::sync::Mutex<T>,
    gone: std::sync::atomic::AtomicBool,
}

/// Loom's guard.
#[cfg(loom)]
pub(crate) type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { inner: loom::sync::Mutex::new(value), gone: false.into() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Looked at inside, where loom has had its chance to let others go first.
        assert!(!self.gone.load(Ordering::Relaxed), "locked after it was dropped");
        guard
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.inner.try_lock().ok()?;
        assert!(!self.gone.load(Ordering::Relaxed), "locked after it was dropped");
        Some(guard)
    }
}

#[cfg(loom)]
impl<T> Drop for Mutex<T> {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

/// Thread-locals: std's, or loom's, which are each model thread's own.
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

/// Parking threads.
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

    /// Parks this thread until it is unparked, the deadline passes, or for no reason at all.
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

/// Lets another thread run while this one waits for it.
pub(crate) fn yield_now() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

/// Whether this process fences with a system call, so that [`light`] may be a compiler fence. Asked when a pool is built; a
/// pool that was told `false` keeps `FENCED` set for good.
pub(crate) fn asymmetric() -> bool {
    // Models have fences on both sides in place of the call, and go the way that has it.
    #[cfg(all(test, loom))]
    {
        !FENCED.get()
    }
    #[cfg(all(any(loom, pinpool_rmw), not(all(test, loom))))]
    {
        cfg!(loom)
    }
    #[cfg(not(any(loom, pinpool_rmw)))]
    {
        static REGISTERED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        // Tried each time: a sandbox may have been put up since.
        *REGISTERED.get_or_init(crate::os::barrier::membarrier_register) && crate::os::barrier::membarrier()
    }
}

/// The frequent side's fence where [`asymmetric`] holds: orders the compiler only, but in models.
#[inline(always)]
pub(crate) fn light() {
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(loom, not(test), not(pinpool_planted = "shard_no_fence")))]
    fence(Ordering::SeqCst);
    #[cfg(all(loom, test, not(pinpool_planted = "shard_no_fence")))]
    if !REFUSED.get() {
        fence(Ordering::SeqCst);
    }
}

/// The rare side's fence. Pairs with [`light`] (through the system call), or, with `both`, with a full fence. `false`: the
/// call is refused, and nothing is known of threads that have only [`light`].
#[must_use = "owners may not have fenced"]
pub(crate) fn heavy(both: bool) -> bool {
    fence(Ordering::SeqCst);
    #[cfg(all(test, loom))]
    {
        both || !REFUSED.get()
    }
    #[cfg(all(any(loom, pinpool_rmw), not(all(test, loom))))]
    {
        let _ = both;
        true
    }
    #[cfg(not(any(loom, pinpool_rmw)))]
    {
        both || crate::os::barrier::membarrier()
    }
}

/// For how long owners are waited for where the call is refused: see the page.
pub(crate) const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

/// The number of this thread, for [`is_known`]. (Loom's threads are all of one number.)
pub(crate) fn thread_number() -> u32 {
    if cfg!(loom) { 0 } else { crate::os::barrier::thread_number() }
}

/// Whether what a thread with this number has written is visible here, and what was written here to it: it is this one, or
/// blocked in the kernel. (In models, where there is no kernel, of none.)
pub(crate) fn is_known(thread: u32) -> bool {
    !cfg!(loom) && (thread == thread_number() || crate::os::barrier::is_blocked(thread))
}

/// Waits a little for other threads to do something.
pub(crate) fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    // Asleep, and so blocked, should they wait for this one to be.
    #[cfg(not(loom))]
    std::thread::sleep(std::time::Duration::from_micros(100));
}

/// Which of the crate's own threads this is. Code of the caller's runs there too (wakers, owners that are dropped), and must
/// not wait for what only that very thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Own {
    /// Pins, allocates, drops what others own.
    Worker,
    /// Finds out what is done.
    Reaper,
    /// Submits what is pushed to a copy queue.
    Submitter,
}

std::thread_local! {
    static OWN: std::cell::Cell<Option<Own>> = const { std::cell::Cell::new(None) };
}

/// This thread is one of the crate's own, for good.
pub(crate) fn enter(own: Own) {
    OWN.set(Some(own));
}

/// Whether, and which. Any thread is as the reaper while it does what that one does.
pub(crate) fn own() -> Option<Own> {
    OWN.get().or_else(|| LANDING.with(std::cell::Cell::get).then_some(Own::Reaper))
}

/// Whether this thread finds out what is done, for good or just now, and so must not wait for that.
pub(crate) fn finds_out() -> bool {
    OWN.get() == Some(Own::Reaper) || LANDING.with(std::cell::Cell::get)
}

// Whether this thread does for others what follows from what it has found out. In models threads take turns on one.
thread_local! {
    static LANDING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Does what follows from having found out what is done, or that it never will be: others' code runs meanwhile, on whatever
/// thread that is, which may be about to wake more of them, and may have what whoever waits would wait for.
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
/// To find out which orders matter, loom remembers the last access to each atomic only. A thread that loads a word and
/// then changes it hides an earlier load of another thread that way, and the order with that load last is never tried.
/// These points are all on one word that everyone changes, so every order of the steps is tried; the order relaxes
/// nothing and synchronises nothing.
#[cfg(all(test, loom))]
pub(crate) fn step() {
    loom::lazy_static! {
        static ref CROSSING: AtomicU32 = AtomicU32::new(0);
    }
    CROSSING.fetch_add(1, Ordering::Relaxed);
}

#[cfg(all(test, loom))]
std::thread_local! {
    /// The model that runs is one of a machine without the call.
    static FENCED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// The model that runs is one of a machine that refuses the call after it was granted.
    static REFUSED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The same as [`model`] for a machine that refuses the call when it is first made.
#[cfg(all(test, loom))]
pub(crate) fn model_refused(name: &'static str, preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    REFUSED.set(true);
    model(name, preemptions, run);
    REFUSED.set(false);
}

/// The same as [`model`] for a machine without the asymmetric fence. (Loom's threads are all on this one.)
#[cfg(all(test, loom))]
pub(crate) fn model_fenced(name: &'static str, preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    FENCED.set(true);
    model(name, preemptions, run);
    FENCED.set(false);
}

/// Runs a loom model: every interleaving with at most `preemptions` switches away from a thread that could have gone on
/// (`LOOM_MAX_PREEMPTIONS` overrides that), and says how many there were.
///
/// A model that fails ends the process, with the reason and status 101: what the model left behind can be neither used
/// nor dropped outside of loom, so unwinding would only end in an abort that hides the reason.
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
            // Not by `eprintln!`: the harness would keep that to itself.
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

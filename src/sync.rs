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
//! What only the first mode exercises is the pairing of `light` with the system call; `tests/threads.rs` runs it on
//! threads.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

/// An `UnsafeCell` whose accesses loom can check.
#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;

/// An `UnsafeCell` with loom's interface.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Gives out the pointer for reading.
    #[inline(always)]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Gives out the pointer for writing.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// A mutex whose lock is just `lock()`: parking_lot's, or loom's in its clothes.
#[cfg(not(loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard};

/// Loom's mutex with parking_lot's interface.
#[cfg(loom)]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

/// Loom's guard.
#[cfg(loom)]
pub(crate) type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

#[cfg(loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Parking threads.
pub(crate) mod thread {
    #[cfg(loom)]
    pub(crate) use loom::thread::{Thread, current};
    #[cfg(not(loom))]
    pub(crate) use std::thread::{Thread, current};

    use std::time::Instant;

    /// Parks this thread until it is unparked, the deadline passes, or for no reason at all.
    pub(crate) fn park_until(deadline: Option<Instant>) {
        #[cfg(loom)]
        {
            let _ = deadline;
            loom::thread::park();
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

/// Whether this process fences with a system call, so that [`light`] may be a compiler fence. Asked once, when a pool
/// is built; a pool that was told `false` keeps `FENCED` set for good.
pub(crate) fn asymmetric() -> bool {
    #[cfg(any(loom, pinpool_rmw))]
    {
        false
    }
    #[cfg(not(any(loom, pinpool_rmw)))]
    {
        static REGISTERED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *REGISTERED.get_or_init(crate::os::membarrier_register)
    }
}

/// The frequent side's fence where [`asymmetric`] holds: orders the compiler only.
#[inline(always)]
pub(crate) fn light() {
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// The rare side's fence. Pairs with [`light`] (through the system call) or with a full fence.
pub(crate) fn heavy() {
    fence(Ordering::SeqCst);
    #[cfg(not(any(loom, pinpool_rmw)))]
    if asymmetric() && !crate::os::membarrier() {
        // Registered, and refused all the same: a sandbox was put up in between. Owners keep out only of what they see,
        // and without the call there is no way to make them see it.
        tracing::error!(
            target: "pinpool::pool",
            "membarrier was refused after it had been granted: put up sandboxes before the first pool is built"
        );
    }
}

/// Wakes a task. Wakers are the caller's code, which may panic: whoever wakes has others to wake, and more to do.
pub(crate) fn wake_task(waker: std::task::Waker) {
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| waker.wake())).is_err() {
        tracing::error!(target: "pinpool::pool", "a waker panicked");
    }
}

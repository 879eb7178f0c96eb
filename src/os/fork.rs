//! What a fork does.
//!
//! The child of a fork has one thread. A lock that another thread of the parent held at that moment
//! stays locked in the child for ever: the crate's locks, the driver's, and those that libraries
//! have for the whole process (parking_lot has one table of parked threads for all its locks). The
//! child has none of the crate's threads, and pinned pages are kept out of it. So a child that was
//! forked after its process had begun to open a device can use nothing of this crate.
//!
//! # The rule
//!
//! The child's thread runs the program's code, so two kinds of functions ask [`forked`] first:
//!
//! 1. *Public calls* that could lock, wait or reach a driver return [`Error::Forked`], or what
//!    there is without a lock. The check is in the function that all paths begin with.
//! 2. *Drops* of values that a program can hold, and of what these own at last, leave everything as
//!    it is. A device's context leaks its driver and region thread, so their drops do not ask.
//!
//! What is called from these alone does not ask, nor does a thread of the crate. In debug builds
//! [`crate::locks`] asserts that no lock is taken in a child, which finds a missing check. A
//! program that forks inside of code that the crate calls (a reader, a waker) must not return from
//! it in the child.
//!
//! # How the child knows
//!
//! The child learns it from a handler of the system's (`pthread_atfork`). A fork that has begun
//! when another thread installs the handler does not call it, and may copy locks that the thread
//! takes next. So that thread first notes the process's number, and a child that is about to open a
//! device compares it with its own.
//!
//! A child of a process that had opened nothing is a process like any other. `Command::spawn` is
//! not affected either: its child runs no code of the crate's before it becomes another program.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::error::{Error, Result};

/// Whether this is such a child. Relaxed: written by a child's only thread.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The process that began to open a device, or 0. Written before anything is locked for one.
static OPENER: AtomicU32 = AtomicU32::new(0);

/// The function that the child calls to empty the thread-locals by which a checkout finds its
/// thread cache. A hit does not ask [`forked`], so in the child it must find no cache.
static EMPTIES: OnceLock<fn()> = OnceLock::new();

/// Whether this process is the child of a fork that can use nothing of the crate: its parent had
/// begun to open a device by then. All calls there return [`Error::Forked`].
#[inline]
#[must_use]
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// [`Error::Forked`] in a child that must not use the crate.
#[inline]
pub(crate) fn check_fork() -> Result<()> {
    if forked() { Err(Error::Forked) } else { Ok(()) }
}

/// Makes later children know that they are. Called before anything is locked for a device.
///
/// # Errors
/// [`Error::Forked`] in such a child; the system's error if it has no memory for a handler.
pub(crate) fn watch_forks() -> Result<()> {
    static FORK_WATCHED: AtomicBool = AtomicBool::new(false);
    check_fork()?;
    let own = std::process::id();
    // SeqCst: no lock that this thread takes afterwards is in a child's memory without this number.
    if OPENER.compare_exchange(0, own, Ordering::SeqCst, Ordering::SeqCst).is_err_and(|opener| opener != own)
    {
        // The fork had begun before the handler was installed.
        FORKED.store(true, Ordering::Relaxed);
        return Err(Error::Forked);
    }
    // Acquire: pairs with the release below. Several threads may make the call at once, harmlessly.
    // They do not wait for each other: a child that is forked meanwhile would wait for ever.
    if !FORK_WATCHED.load(Ordering::Acquire) {
        install()?;
        FORK_WATCHED.store(true, Ordering::Release);
    }
    Ok(())
}

/// Makes the child of a fork call `empty`, which may do only what a signal handler may do.
pub(crate) fn empty_in_child(empty: fn()) {
    // It is always the same function.
    let _ = EMPTIES.set(empty);
}

fn install() -> Result<()> {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
        // An atomic load, which a signal handler may do.
        if let Some(empty) = EMPTIES.get() {
            empty();
        }
    }
    // SAFETY: the function lives as long as the process, and is fit for a signal handler.
    match unsafe { libc::pthread_atfork(None, None, Some(in_child)) } {
        0 => Ok(()),
        code => {
            Err(Error::OutOfMemory { wanted: 0, text: std::io::Error::from_raw_os_error(code).to_string() })
        }
    }
}

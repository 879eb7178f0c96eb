//! What a fork does.
//!
//! The child of a fork has one thread, and whatever lock another thread of the parent held at that moment stays locked
//! in it for ever: ours, those of the driver, and those that libraries keep for the whole process (parking_lot has one
//! table of parked threads for all its locks). It has none of our threads, and pinned pages are kept out of it. So a
//! child that was forked after its process had begun to open a device can use nothing of this crate, and says so: every
//! call that could lock, wait or reach a driver asks [`forked`] first, and answers [`Error::Forked`]. What is dropped
//! there is left as it is.
//!
//! A child of a process that had opened nothing is a process like any other. `Command::spawn` is not affected either:
//! its child runs no code of ours before it becomes another program.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Whether this is the child of a process that had begun to open a device. Relaxed: written by a child's only thread.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Empties what a hit looks at without asking [`forked`].
static EMPTIES: OnceLock<fn()> = OnceLock::new();

/// Whether nothing of the crate may be touched.
#[inline]
pub(crate) fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// [`Error::Forked`] where nothing of the crate may be touched.
#[inline]
pub(crate) fn check_fork() -> Result<()> {
    if forked() { Err(Error::Forked) } else { Ok(()) }
}

/// Has children know from here on that they are. Called before anything is locked or started for a device.
///
/// # Errors
/// [`Error::Forked`] in such a child; the system's, where it has no memory for a handler.
pub(crate) fn watch_forks() -> Result<()> {
    static FORK_WATCHED: AtomicBool = AtomicBool::new(false);
    check_fork()?;
    // Acquire: pairs with the release below. Several threads may come to the call at once, which does no harm; waiting
    // for each other would, since a child that is forked meanwhile would wait for ever.
    if !FORK_WATCHED.load(Ordering::Acquire) {
        install()?;
        FORK_WATCHED.store(true, Ordering::Release);
    }
    Ok(())
}

/// Has `empty` called in the child of a fork, once that knows that it is one. It may do only what a signal handler may.
pub(crate) fn empty_in_child(empty: fn()) {
    // Always the same one.
    let _ = EMPTIES.set(empty);
}

#[cfg(target_os = "linux")]
fn install() -> Result<()> {
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
        // Reading what was set is one atomic load.
        if let Some(empty) = EMPTIES.get() {
            empty();
        }
    }
    // SAFETY: the function lives as long as the process, and does what a signal handler may.
    match unsafe { libc::pthread_atfork(None, None, Some(in_child)) } {
        0 => Ok(()),
        code => {
            Err(Error::OutOfMemory { wanted: 0, text: std::io::Error::from_raw_os_error(code).to_string() })
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn install() -> Result<()> {
    Ok(())
}

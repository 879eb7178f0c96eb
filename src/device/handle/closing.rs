//! Closing a device: waiting until all that it has in its driver was given back, and saying what is in the way.
//!
//! Nothing is closed by force. A device is open for as long as anything needs it, and each thing gives back its own
//! when it is dropped, on the device's worker thread. So closing is to drop one handle and to wait: for the other
//! handles, for what came from the device, for the worker, and for the last call. What is waited for is the end of the
//! driver itself ([`crate::device::holds`]); the rest is looked at only to say what is in the way, and whether it can
//! go at all.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Device, DeviceInner};
use crate::device::holds::{HeldPool, Holds};
use crate::error::Error;
use crate::stream::reaper::Listing;

/// Between two looks at whether what is in the way can go at all.
const CLOSE_POLL: Duration = Duration::from_millis(20);
/// Longer than anybody waits.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// What keeps a device open, or could not be given back: see [`Device::close`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct HeldBy {
    /// Handles to the device: each [`Device`], and those in every [`Stream`](crate::Stream), [`Pool`](crate::Pool),
    /// [`CopyQueue`](crate::CopyQueue) and pipeline.
    pub handles: usize,
    /// Streams, ours and adopted ones.
    pub streams: usize,
    /// Of these, streams on which something is in flight.
    pub busy_streams: usize,
    /// Pools that are open or whose buffers have not all come back.
    pub pools: Vec<HeldPool>,
    /// Bytes of device memory that somebody has a handle to, or that is kept for good, since nobody can prove that the
    /// device is done with it. Memory of others ([`Device::raw_memory`]) counts.
    pub memory_bytes: usize,
    /// Bytes of values that are registered ([`Device::register`](crate::Device::register)), or that could not be
    /// unregistered.
    pub registered_bytes: usize,
    /// Jobs of the device's worker thread that are still to be done: it frees, unpins and destroys, one after the
    /// other.
    pub jobs: usize,
    /// Things that the driver did not take back, or that may not be given back since the device may still use them.
    /// Each of them was logged.
    pub leaked: u64,
    /// What the device was lost with, if it was. What it had is leaked where its driver does not say that it has let
    /// go.
    pub lost: Option<Error>,
    /// Whether this is the child of a fork, where nothing of the device is.
    pub forked: bool,
}

impl HeldBy {
    /// Whether nothing is left but what somebody is giving back just now.
    fn is_calls_alone(&self) -> bool {
        self.handles == 0
            && self.busy_streams == 0
            && self.pools.is_empty()
            && self.memory_bytes + self.registered_bytes == 0
    }

    /// Whether all that is left is what never comes back.
    fn is_hopeless(&self, has_quarantined: bool) -> bool {
        let never: u64 = self.pools.iter().map(|pool| pool.quarantined).sum();
        let moves = self.handles > 0
            || self.busy_streams > 0
            || self.jobs > 0
            || self.pools.iter().any(|pool| pool.open || pool.buffers > pool.quarantined)
            || (self.memory_bytes + self.registered_bytes > 0 && !has_quarantined);
        !moves && (never > 0 || has_quarantined)
    }
}

/// In one line, without the device's name.
impl fmt::Display for HeldBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        let mut part = |there: bool, text: String| {
            if there {
                parts.push(text);
            }
        };
        part(self.forked, "this is a child of the process that opened it".into());
        if let Some(error) = &self.lost {
            part(true, format!("it was lost, and what it had may be leaked ({error})"));
        }
        part(self.leaked > 0, format!("{} things could not be given back (the log names each)", self.leaked));
        for HeldPool { name, open, buffers, quarantined, quarantined_bytes } in &self.pools {
            let open = if *open { "open, " } else { "" };
            let never = match quarantined {
                0 => String::new(),
                n => {
                    format!(", {n} of them quarantined with {quarantined_bytes} bytes, which never come back")
                }
            };
            part(true, format!("the pool {name} ({open}{buffers} buffers out{never})"));
        }
        part(
            self.streams > 0,
            format!("{} streams, {} of them with work in flight", self.streams, self.busy_streams),
        );
        part(self.memory_bytes > 0, format!("{} bytes of device memory", self.memory_bytes));
        part(self.registered_bytes > 0, format!("{} bytes of registered values", self.registered_bytes));
        part(self.handles > 0, format!("{} handles to it in all", self.handles));
        part(self.jobs > 0, format!("{} jobs of its worker thread", self.jobs));
        if parts.is_empty() {
            // What was in the way has gone while it was looked at, or is about to.
            parts.push("its last calls".into());
        }
        f.write_str(&parts.join("; "))
    }
}

/// A device that is not closed, or whose driver has not got everything back. Dropping this changes nothing: the device
/// closes by itself when what keeps it open is gone.
pub struct CloseError(Box<Unclosed>);

struct Unclosed {
    watch: HeldWatch,
    held: HeldBy,
    /// Whether the last call was made.
    ended: bool,
}

impl CloseError {
    /// The device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.0.watch.name
    }

    /// What was in the way when the wait ended.
    #[must_use]
    pub fn held_by(&self) -> &HeldBy {
        &self.0.held
    }

    /// Whether the device was let go of all the same: nothing keeps it open and no call follows, but something was
    /// leaked.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.ended
    }

    /// Goes on waiting, as [`Device::close`] does. It keeps nothing open.
    ///
    /// # Errors
    /// As for [`Device::close`].
    pub fn wait(self, timeout: Duration) -> Result<(), Self> {
        self.0.watch.wait(timeout)
    }
}

impl fmt::Debug for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unclosed { watch, held, ended } = &*self.0;
        f.debug_struct("CloseError")
            .field("device", &watch.name)
            .field("held_by", held)
            .field("is_closed", ended)
            .finish()
    }
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unclosed { watch, held, ended } = &*self.0;
        if *ended {
            write!(f, "{} is closed, but not everything was given back: {held}", watch.name)
        } else {
            write!(f, "{} is still open: {held}; drop what came from it, or wait longer", watch.name)
        }
    }
}

impl std::error::Error for CloseError {}

/// What there is to be known about a device without keeping it open.
struct HeldWatch {
    name: String,
    context: u64,
    holds: Arc<Holds>,
    device: Weak<DeviceInner>,
    listing: Listing,
    /// It does nothing by itself.
    stepped: bool,
}

impl HeldWatch {
    fn held_by(&self) -> HeldBy {
        if crate::os::forked() {
            return HeldBy { forked: true, ..HeldBy::default() };
        }
        // What is held for a moment here may be the last to go, which only sends a job.
        let streams = self.listing.known();
        HeldBy {
            handles: self.device.strong_count(),
            streams: streams.len(),
            busy_streams: streams.iter().filter(|timeline| !timeline.is_idle()).count(),
            pools: self.holds.pools(self.context),
            memory_bytes: self.holds.memory(),
            registered_bytes: self.holds.registered(),
            jobs: self.holds.jobs(),
            leaked: self.holds.leaks(),
            lost: self.holds.lost().cloned(),
            forked: false,
        }
    }

    fn failed(self, held: HeldBy, ended: bool) -> CloseError {
        CloseError(Box::new(Unclosed { watch: self, held, ended }))
    }

    fn wait(self, timeout: Duration) -> Result<(), CloseError> {
        if crate::os::forked() {
            let held = self.held_by();
            return Err(self.failed(held, false));
        }
        let now = Instant::now();
        // Our own threads are among what is waited for.
        let waits = crate::sync::own().is_none();
        let end = if waits { now.checked_add(timeout).unwrap_or(now + FOREVER) } else { now };
        let mut deadline = if self.stepped { now } else { end };
        loop {
            if self.holds.wait(deadline.min(Instant::now() + CLOSE_POLL)) {
                // The job that let go of it may not be over, but made its last call.
                let held = HeldBy { jobs: 0, ..self.held_by() };
                if held.leaked == 0 && held.lost.is_none() {
                    return Ok(());
                }
                return Err(self.failed(held, true));
            }
            let held = self.held_by();
            if self.stepped {
                // Nobody else moves it, but whoever is at its last calls goes on.
                deadline = if held.is_calls_alone() { end } else { now };
            }
            let late = Instant::now() >= deadline;
            if late || held.is_hopeless(self.holds.has_quarantined()) {
                // It may have ended while it was looked at.
                if self.holds.wait(now) {
                    continue;
                }
                return Err(self.failed(held, false));
            }
        }
    }
}

impl Device {
    /// Drops this handle and waits, for at most so long, until everything that the device had in its driver was given
    /// back and the device let go of: memory freed and unpinned, values unregistered, streams and events destroyed, and
    /// the context given up (`cuDevicePrimaryCtxRelease`, `aclrtResetDevice`). It is how a server ends that wants its
    /// driver to be left in order, before `main` returns and the driver's own exit handlers run.
    ///
    /// **Nothing is closed by force.** A device is open for as long as anything needs it: other handles, pools,
    /// buffers, device memory, copies in flight. So stop what submits, [shut the pools down](crate::Pool::shutdown),
    /// drop all that came from the device, and call this last; whatever other threads drop meanwhile is waited for.
    /// What is left when the time is over is told by the error, which can be [waited on](CloseError::wait) further and
    /// keeps nothing open.
    ///
    /// What never comes back is not waited for: when only quarantined buffers are left, and memory that a stream was
    /// lost with, the call returns at once.
    ///
    /// Several threads may close one device, each by a handle of its own: each waits for the others' to be dropped,
    /// which they are at the beginning of their call. [`Device::open`] opens the device again, at any time: where it is
    /// still open it gives another handle to it, which then is one more to wait for. The call blocks the thread; on
    /// threads of this crate's, and in a waker or where an owner is dropped that was left with it, it does not wait,
    /// and on a [stepped](crate::host) device, which is moved before, only for calls that somebody is making.
    ///
    /// # Ordering
    /// After `Ok` this crate makes no call for this opening of the device, and every call that it made has returned.
    /// All that our threads did for it *happens before* this returns: owners and values that were left with buffers,
    /// streams and memory have been dropped. (The threads themselves may be about to end.)
    ///
    /// # Errors
    /// [`CloseError`] says what is in the way:
    /// - after the time is over, or where nothing is left but what never comes back, what keeps the device open;
    /// - where the device was let go of ([`CloseError::is_closed`]), what could not be given back, or that the device
    ///   was lost. Waiting longer changes nothing;
    /// - in the child of a fork, that it is one, at once: what is there is the parent's.
    pub fn close(self, timeout: Duration) -> Result<(), CloseError> {
        let context = self.context();
        let watch = HeldWatch {
            name: self.name().to_owned(),
            context: context.id(),
            holds: context.holds().clone(),
            device: Arc::downgrade(&self.0),
            listing: self.listing().clone(),
            stepped: context.driver().stepped().is_some(),
        };
        if crate::os::forked() {
            return watch.wait(timeout);
        }
        let span = crate::foreign::span!(INFO, target: "pinpool::device", "close", device = self.name());
        let _entered = span.enter();
        let until = Instant::now().checked_add(timeout);
        if let Some(stepped) = context.driver().stepped() {
            // When its last handle is gone nobody looks at it any more. (Looking records marks, which are steps too.)
            while (self.reap() | stepped.step()) && until.is_none_or(|until| Instant::now() < until) {}
        }
        drop(self);
        let closed = watch.wait(timeout);
        match &closed {
            Ok(()) => crate::foreign::debug!(target: "pinpool::device", "closed"),
            Err(error) => crate::foreign::warn!(
                target: "pinpool::device::unclosed", device = error.device(), %error, "a device was not closed"
            ),
        }
        closed
    }
}

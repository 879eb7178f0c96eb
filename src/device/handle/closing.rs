//! Closing a device: [`Device::close`].
//!
//! Each thing gives back its own when it is dropped, on the device's region thread. So `close`
//! drops one handle and waits for the end of the driver itself ([`crate::device::worker`]). The
//! counts are looked at only for the report, and to find out whether waiting can help at all.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Device, DeviceInner};
use crate::amount::amount;
use crate::central::CentralPool;
use crate::device::worker::Holds;
use crate::error::Error;
use crate::locks::Mutex;
use crate::stream::timeline::reaper::Listing;

/// The time between two looks at whether waiting can help at all.
const CLOSE_POLL: Duration = Duration::from_millis(20);

/// What keeps a device open, or could not be given back: see [`Device::close`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct HeldBy {
    /// The number of handles to the device: each [`Device`], and those in every
    /// [`Stream`](crate::Stream), [`Pool`](crate::Pool) and [`Copier`](crate::Copier).
    pub handles: usize,
    /// The number of streams, adopted ones and a copier's own included.
    pub streams: usize,
    /// The number of streams on which something is in flight.
    pub busy_streams: usize,
    /// The number of buffers that are checked out or in flight and whose memory the device pinned,
    /// also quarantined ones. [`Pool::stuck`](crate::Pool::stuck) tells of each.
    pub buffers: u64,
    /// The number of quarantined buffers: they never come back.
    pub quarantined: u64,
    /// The bytes of the quarantined buffers.
    pub quarantined_bytes: usize,
    /// Bytes of device memory that has a handle, or that the device cannot be shown to be done
    /// with. The memory of [`Device::raw_memory`] counts.
    pub memory_bytes: usize,
    /// Bytes of values that are, or stay, registered ([`Device::register`]).
    pub registered_bytes: usize,
    /// The number of jobs that the device's region thread has still to do.
    pub jobs: usize,
    /// Things that the driver did not take back or the device may still use. Each was logged.
    pub leaked: u64,
    /// The error that the device was lost with, if it was.
    pub lost: Option<Error>,
    /// Whether this is the child of a fork, where nothing of the device exists.
    pub forked: bool,
}

impl fmt::Display for HeldBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = self.lost.as_ref().map(ToString::to_string).unwrap_or_default();
        let (never, busy) = (amount(self.quarantined_bytes), self.busy_streams);
        let (memory, registered) = (amount(self.memory_bytes), amount(self.registered_bytes));
        let parts = [
            (self.forked, "this is a child of the process that opened it".into()),
            (self.lost.is_some(), format!("it was lost, and what it had may be leaked ({lost})")),
            (self.leaked > 0, format!("{} things could not be given back (the log names each)", self.leaked)),
            (self.buffers > 0, format!("{} buffers out", self.buffers)),
            (
                self.quarantined > 0,
                format!("{} quarantined buffers with {never}, which never come back", self.quarantined),
            ),
            (self.streams > 0, format!("{} streams, {busy} of them with work in flight", self.streams)),
            (self.memory_bytes > 0, format!("{memory} of device memory")),
            (self.registered_bytes > 0, format!("{registered} of registered values")),
            (self.handles > 0, format!("{} handles to it in all", self.handles)),
            (self.jobs > 0, format!("{} jobs of its worker thread", self.jobs)),
        ];
        let said: Vec<_> = parts.into_iter().filter_map(|(is_so, text)| is_so.then_some(text)).collect();
        // Where nothing was seen, what was in the way has ended during the look, or is about to.
        f.write_str(&if said.is_empty() { "its last calls".into() } else { said.join("; ") })
    }
}

/// A device that is not closed, or whose driver did not get everything back: the error of
/// [`Device::close`]. It keeps nothing open, and dropping it changes nothing: the device closes by
/// itself when everything that keeps it open has ended.
pub struct CloseError(Box<Closing>);

/// A close that is under way, or is over. It keeps nothing open.
struct Closing {
    name: String,
    context: u64,
    holds: Arc<Holds>,
    device: Weak<DeviceInner>,
    pools: Arc<Mutex<Vec<Weak<CentralPool>>>>,
    listing: Arc<Listing>,
    /// What was in the way at the last look.
    held: HeldBy,
    /// Whether the last driver call was made.
    ended: bool,
}

impl CloseError {
    /// The device's name.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.0.name
    }

    /// What was in the way when the wait ended.
    #[must_use]
    pub fn held_by(&self) -> &HeldBy {
        &self.0.held
    }

    /// Whether the device was let go of all the same: nothing keeps it open and no call follows,
    /// but something was leaked.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.ended
    }

    /// Goes on waiting, as [`Device::close`] does, for at most `timeout`.
    ///
    /// # Errors
    /// As for [`Device::close`].
    pub fn wait(self, timeout: Duration) -> Result<(), Self> {
        self.0.wait(timeout)
    }
}

impl fmt::Debug for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("CloseError");
        shown.field("device", &self.device()).field("held_by", self.held_by());
        shown.field("is_closed", &self.is_closed()).finish()
    }
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, held) = (self.device(), self.held_by());
        if self.is_closed() {
            return write!(f, "{name} is closed, but not everything was given back: {held}");
        }
        let remedy = match self.0.is_hopeless() {
            _ if held.forked => "only that process can close it",
            true => "this never comes back: waiting changes nothing, it stays until the process ends",
            false => "drop what came from it, or wait longer",
        };
        write!(f, "{name} is still open: {held}; {remedy}")
    }
}

impl std::error::Error for CloseError {}

impl Closing {
    fn look(&mut self) {
        // A reference that is held for a moment here may be the last: its drop only sends a job.
        let streams = self.listing.known();
        let pools: Vec<_> = self.pools.lock().iter().filter_map(Weak::upgrade).collect();
        self.held = HeldBy {
            handles: self.device.strong_count(),
            streams: streams.len(),
            busy_streams: streams.iter().filter(|timeline| !timeline.is_idle()).count(),
            memory_bytes: self.holds.memory.get(),
            registered_bytes: self.holds.registered.get(),
            jobs: self.holds.jobs.get(),
            leaked: self.holds.leaks.get() as u64,
            lost: self.holds.lost.get().cloned(),
            ..HeldBy::default()
        };
        for pool in pools.iter().filter(|pool| pool.keeps(self.context)) {
            self.held.buffers += pool.outstanding();
            let snapshot = pool.snapshot();
            self.held.quarantined += snapshot.quarantined_segments;
            self.held.quarantined_bytes += snapshot.quarantined;
        }
    }

    /// Whether all that is left is what never comes back.
    fn is_hopeless(&self) -> bool {
        let (held, has_quarantined) = (&self.held, self.holds.has_quarantined());
        (held.quarantined > 0 || has_quarantined)
            && held.handles + held.busy_streams + held.jobs == 0
            && held.buffers <= held.quarantined
            && (has_quarantined || held.memory_bytes + held.registered_bytes == 0)
    }

    fn wait(mut self: Box<Self>, timeout: Duration) -> Result<(), CloseError> {
        if crate::os::forked() {
            self.held = HeldBy { forked: true, ..HeldBy::default() };
            return Err(CloseError(self));
        }
        // The crate's own threads do not wait: they are among what is waited for. A device by hand
        // is moved by no thread any more.
        let now = Instant::now();
        let may_wait = crate::sync::own().is_none() && !self.holds.by_hand;
        let end = if may_wait { now.checked_add(timeout) } else { Some(now) };
        loop {
            let poll = Instant::now() + CLOSE_POLL;
            self.ended = self.holds.wait(end.map_or(poll, |end| end.min(poll)));
            self.look();
            if self.ended {
                let is_clean = self.held.leaked == 0 && self.held.lost.is_none();
                return if is_clean { Ok(()) } else { Err(CloseError(self)) };
            }
            // The device may have ended during the look.
            let is_late = end.is_some_and(|end| Instant::now() >= end);
            if (is_late || self.is_hopeless()) && !self.holds.wait(now) {
                return Err(CloseError(self));
            }
        }
    }
}

impl Device {
    /// Drops this handle and waits, for at most `timeout`, until the driver has everything back and
    /// the device was let go of: memory freed and unpinned, values unregistered, streams and events
    /// destroyed, and the context released (`cuDevicePrimaryCtxRelease`, `aclrtResetDevice`). A
    /// server calls this before `main` returns and the driver's own exit handlers run.
    ///
    /// **Nothing is closed by force.** A device is open for as long as anything needs it: other
    /// handles, pools, buffers, device memory, copies in flight. So stop what submits, [shut the
    /// pools down](crate::Pool::shutdown), drop everything that came from the device, and call this
    /// last. When nothing is left but what never comes back (quarantined buffers, memory that a
    /// stream was lost with), the call returns at once: that keeps the device open for ever.
    ///
    /// The call blocks: a task makes it on another thread (`spawn_blocking`). It does not wait on
    /// threads of this crate, in a waker, and in the drop of an owner that was left with the crate.
    ///
    /// # Ordering
    /// After `Ok` every call of this crate for this opening of the device has returned, and none
    /// follows. Owners and values that were left with buffers, streams and memory have been
    /// dropped: what the crate's threads did for the device *happens before* this returns.
    ///
    /// # Errors
    /// [`CloseError`] says what keeps the device open, or, where it was let go of
    /// ([`CloseError::is_closed`]), what could not be given back or that the device was lost. In
    /// the child of a fork it comes at once: everything there belongs to the parent.
    pub fn close(self, timeout: Duration) -> Result<(), CloseError> {
        let context = self.context();
        let closing = Box::new(Closing {
            name: self.name().to_owned(),
            context: context.id(),
            holds: context.holds().clone(),
            device: Arc::downgrade(&self.0),
            pools: self.0.pools.clone(),
            listing: self.listing().clone(),
            held: HeldBy::default(),
            ended: false,
        });
        if crate::os::forked() {
            return closing.wait(timeout);
        }
        let span = crate::foreign::span!(INFO, target: "pinpool::device", "close", device = self.name());
        let _entered = span.enter();
        let until = Instant::now().checked_add(timeout);
        if context.is_by_hand() {
            // No thread moves the device any more. (`reap` records events, which are work too.)
            while (self.reap() | context.advance()) && until.is_none_or(|until| Instant::now() < until) {}
        }
        drop(self);
        let closed = closing.wait(timeout);
        match &closed {
            Ok(()) => crate::foreign::debug!(target: "pinpool::device", "closed"),
            Err(error) => crate::foreign::warn!(
                target: "pinpool::device::unclosed", device = error.device(), %error, "a device was not closed"
            ),
        }
        closed
    }
}

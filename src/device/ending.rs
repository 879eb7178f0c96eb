//! How a driver's last reference ends, where the driver has a device to let go of and may keep something for others:
//! the same on every accelerator.
//!
//! Letting go may take the whole device down for this process, which takes time, and dropping never blocks; and it may
//! change what is current on the thread. So the call is made on a thread of its own. What waits for the end hears of it
//! after that call.

use std::sync::{Arc, OnceLock};

use super::holds::Last;
pub(crate) use crate::foreign::KeepAlive;
use crate::os;

/// What a driver drops when it ends.
#[derive(Debug)]
pub(super) struct Ending {
    /// What keeps a context of the server's alive, if it said so.
    keep_alive: OnceLock<KeepAlive>,
    /// Behind the keeper, which may make a call.
    last: OnceLock<Last>,
}

impl Ending {
    pub(super) fn new() -> Self {
        Self { keep_alive: OnceLock::new(), last: OnceLock::new() }
    }

    /// The first that is left: a later one says the same about the same context, and is not needed.
    pub(super) fn keep(&self, keep_alive: KeepAlive) {
        let _ = self.keep_alive.set(keep_alive);
    }

    pub(super) fn leave(&self, last: Last) {
        let _ = self.last.set(last);
    }

    /// Something of the device's stays for good.
    pub(super) fn leaked(&self) {
        self.last.get().into_iter().for_each(Last::leaked);
    }

    /// Makes the last call: `let_go` says whether the device was let go of. On this thread, or on one of its own; where
    /// none can be started the device stays.
    pub(super) fn end(&mut self, device: &str, here: bool, let_go: impl FnOnce() -> bool + Send + 'static) {
        let last = Arc::new(self.last.take());
        let goes = last.clone();
        let end = move || {
            if !let_go() {
                goes.iter().for_each(Last::leaked);
            }
        };
        if here {
            return end();
        }
        if let Err(error) = crate::os::thread::spawn(format!("pinpool-end-{device}"), end) {
            last.iter().for_each(Last::leaked);
            crate::foreign::warn!(target: "pinpool::device::leak", device, %error, "a device is not let go of");
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if os::forked() {
            // The parent's.
            std::mem::forget((self.keep_alive.take(), self.last.take()));
        }
    }
}

//! The end of a driver: it lets go of the device, and then drops what it keeps for others.
//!
//! The call that lets go of a device may take the whole device down for this process, which takes time, and it may
//! change the context that is current on the thread. A drop must do neither. So the call is made on a thread of its
//! own. [`Last`] is dropped after that call, and a thread that waits in [`Device::close`](crate::Device::close) wakes
//! then.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::holds::Last;
pub(crate) use crate::foreign::KeepAlive;

/// What a driver drops when it ends.
#[derive(Debug)]
pub(crate) struct Ending {
    /// What keeps an adopted context alive, if the program gave something.
    keep_alive: OnceLock<KeepAlive>,
    /// Set for a device that has no threads: the last calls are made on the thread that drops the driver.
    here: AtomicBool,
    /// The field after `keep_alive`, and so dropped after it: the drop of `keep_alive` may make a driver call.
    last: OnceLock<Last>,
}

impl Ending {
    pub(crate) fn new() -> Self {
        Self { keep_alive: OnceLock::new(), here: AtomicBool::new(false), last: OnceLock::new() }
    }

    /// Lets the last calls be made on whichever thread drops the driver.
    pub(crate) fn be_here(&self) {
        self.here.store(true, Ordering::Relaxed);
    }

    /// Keeps the first of these. A later one is for the same context, and is not needed.
    pub(super) fn keep(&self, keep_alive: KeepAlive) {
        let _ = self.keep_alive.set(keep_alive);
    }

    pub(super) fn leave(&self, last: Last) {
        let _ = self.last.set(last);
    }

    /// Notes that something of the device's stays for good.
    pub(super) fn leaked(&self) {
        self.last.get().into_iter().for_each(Last::leaked);
    }

    /// Makes the last calls: `let_go` says whether the device was let go of. With `here` it runs on this thread, else
    /// on one of its own. Where no thread can be started the device is leaked. What keeps an adopted context alive is
    /// dropped behind the calls.
    pub(super) fn end(&mut self, device: &str, here: bool, let_go: impl FnOnce() -> bool + Send + 'static) {
        let last = Arc::new(self.last.take());
        let (kept, goes) = (self.keep_alive.take(), last.clone());
        let end = move || {
            if !let_go() {
                goes.iter().for_each(Last::leaked);
            }
            drop(kept);
        };
        if here || *self.here.get_mut() {
            return end();
        }
        if let Err(error) = crate::os::thread::spawn(format!("pinpool-end-{device}"), end) {
            last.iter().for_each(Last::leaked);
            crate::foreign::warn!(target: "pinpool::device::leak", device, %error, "a device is not let go of");
        }
    }
}

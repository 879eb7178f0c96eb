//! The check of all that a central pool promises, for [`Pool::check`](crate::Pool::check).
//!
//! The check holds the lock and shuts all owners out of their thread caches, so nothing moves. It
//! first collects what thread caches and transfer caches hold, each descriptor once. The arena's
//! own check must then find that exactly these segments, and the segments that are out, are
//! missing from their runs' lists. And as many segments must be out as takes exceed returns.

use std::collections::HashSet;

use super::{CentralPool, Core};
use crate::freelist::{Descriptor, listed};
use crate::segment::{CLASSES, Class};

impl CentralPool {
    /// Checks every invariant while all owners are shut out. `visit` sees each segment's state
    /// (`None`: free) and bytes.
    ///
    /// # Errors
    /// The first violation, in words.
    pub(crate) fn check(&self, mut visit: impl FnMut(Option<u16>, usize)) -> std::result::Result<(), String> {
        let mut core = self.lock();
        self.gate.quiesce(&core.table);
        let result = self.check_quiet(core.as_is(), &mut visit);
        self.gate.readmit(&core.table);
        drop(core);
        result
    }

    fn check_quiet(
        &self,
        core: &mut Core,
        visit: &mut dyn FnMut(Option<u16>, usize),
    ) -> std::result::Result<(), String> {
        let mut outside = HashSet::new();
        let mut twice = None;
        let mut classes = [false; CLASSES];
        let mut note = |class: Class, descriptor: &Descriptor| {
            classes[class.index()] = true;
            if descriptor.class() != Some(class) || !outside.insert(std::ptr::from_ref(descriptor).addr()) {
                twice = Some(format!("a segment of {class:?} is cached twice or under a wrong class"));
            }
        };
        for held in core.table.quiet() {
            let mut bytes = 0;
            for class in Class::all() {
                held.for_each(class, |descriptor| {
                    note(class, descriptor);
                    bytes += class.stride();
                });
            }
            if bytes > self.config.thread_cache {
                return Err(format!(
                    "a thread cache holds {bytes} bytes of at most {}",
                    self.config.thread_cache
                ));
            }
        }
        for (class, transfer) in listed().zip(&self.transfers) {
            transfer.for_each(|descriptor| note(class, descriptor));
            let (bytes, quota) = (transfer.count() * class.stride(), self.config.transfer_cache);
            // To the nearest segment.
            if bytes > quota + class.stride() / 2 {
                return Err(format!(
                    "the transfer cache of {class:?} holds {bytes} bytes of at most {quota}"
                ));
            }
        }
        if let Some(error) = twice {
            return Err(error);
        }
        let mut out = 0u64;
        core.arena.check(&outside, |descriptor, bytes, free| {
            out += u64::from(!free);
            visit((!free).then(|| descriptor.word().state()), bytes);
        })?;
        let (takes, puts, _) = core.tally().sums();
        if takes.wrapping_sub(puts) != out {
            return Err(format!("{takes} takes less {puts} returns are not the {out} segments that are out"));
        }
        if core.left.is_some_and(|n| n != out) {
            return Err(format!("{:?} segments are counted as outstanding, {out} are", core.left));
        }
        self.check_waiting(core, |class| classes[class.index()])?;
        Ok(())
    }
}

//! The check of every invariant of a central pool, for [`Pool::check`](crate::Pool::check) and the tests.
//!
//! The check holds the lock and shuts all owners out of their thread caches, so nothing moves. It first collects what
//! thread caches and transfer caches hold, each descriptor once. Then the arena's own check must find that exactly
//! these segments, and those that are out, are missing from their runs' lists. And as many segments must be out as
//! takes exceed returns.

use std::collections::HashSet;

use super::{CentralPool, Core, mode};
use crate::freelist::{Descriptor, listed};
use crate::segment::Class;
use crate::sync::{MutexGuard, Ordering};

impl CentralPool {
    /// Checks every invariant while all owners are shut out. `visit` sees each segment's state (`None`: free) and
    /// bytes.
    ///
    /// # Errors
    /// The first violation, in words.
    pub(crate) fn check(&self, mut visit: impl FnMut(Option<u16>, usize)) -> std::result::Result<(), String> {
        let core = self.core.lock();
        self.gate.quiesce(mode::INSPECT, &core.table);
        let result = self.check_quiet(&core, &mut visit);
        self.gate.readmit(mode::INSPECT, &core.table);
        drop(core);
        result
    }

    fn check_quiet(
        &self,
        core: &MutexGuard<'_, Core>,
        visit: &mut dyn FnMut(Option<u16>, usize),
    ) -> std::result::Result<(), String> {
        let mut outside = HashSet::new();
        let mut twice = None;
        let mut note = |class: Class, descriptor: &Descriptor| {
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
        let mut reserved = 0;
        for (class, transfer) in listed().zip(&self.transfers) {
            transfer.for_each(|descriptor| note(class, descriptor));
            let Some(segments) = transfer.reserved() else {
                return Err(format!(
                    "a slot of the transfer cache of {class:?} holds more segments than it has reserved"
                ));
            };
            reserved += segments * class.stride() as u64;
        }
        let reservations = self.reservations.bytes.load(Ordering::Relaxed);
        if reservations != reserved || reservations > self.config.shared_cache as u64 {
            let bound = self.config.shared_cache;
            return Err(format!(
                "transfer caches have reserved {reserved} bytes, counted as {reservations} of at most {bound}"
            ));
        }
        if let Some(error) = twice {
            return Err(error);
        }
        let mut out = 0u64;
        core.arena.check(&outside, |descriptor, bytes, free| {
            out += u64::from(!free);
            visit((!free).then(|| descriptor.word().state()), bytes);
        })?;
        let (takes, puts) = core.counted();
        if takes.wrapping_sub(puts) != out {
            return Err(format!("{takes} takes less {puts} returns are not the {out} segments that are out"));
        }
        if core.outstanding.is_some_and(|n| n != out) {
            return Err(format!("{:?} segments are counted as outstanding, {out} are", core.outstanding));
        }
        if self.gate.mode() & mode::WAITING != 0 && (core.queue.is_empty() || !outside.is_empty()) {
            return Err(format!(
                "the central pool is in waiting mode with {} waiting and {} segments cached",
                core.queue.len(),
                outside.len()
            ));
        }
        Ok(())
    }
}

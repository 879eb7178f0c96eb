//! The check of every invariant: what [`Pool::check`](crate::Pool::check) and the tests walk.
//!
//! All owners are kept out of their thread caches meanwhile, and under the lock nothing else moves. So what thread
//! caches and transfer caches cache is put down first, each descriptor once; the arena's own check then finds each of
//! them outside of its run, and nothing else but what is out; and what is out is as many as were taken and are not
//! back.

use std::collections::HashSet;

use super::{CentralPool, Core, mode};
use crate::freelist::{Descriptor, listed};
use crate::segment::Class;
use crate::sync::{MutexGuard, Ordering};

impl CentralPool {
    /// Walks every invariant while everyone is kept out; `visit` sees each segment's state (`None`: free) and bytes.
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
                    "a thread cache caches {bytes} bytes of at most {}",
                    self.config.thread_cache
                ));
            }
        }
        let mut reserved = 0;
        for (class, transfer) in listed().zip(&self.transfers) {
            transfer.for_each(|descriptor| note(class, descriptor));
            let Some(segments) = transfer.reserved() else {
                return Err(format!(
                    "a transfer cache of {class:?} has more on a slot than that has reserved"
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
            return Err(format!("{:?} are said to be outstanding, {out} are", core.outstanding));
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

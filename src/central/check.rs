//! The check of every invariant: what [`Pool::check`](crate::Pool::check) and the tests walk.
//!
//! All owners are kept out of their shards meanwhile, and under the lock nothing else moves. So what shards and racks
//! cache is put down first, each slot once; the arena's own check then finds each of them outside of its run, and
//! nothing else but what is out; and what is out is as many as were taken and are not back.

use std::collections::HashSet;

use super::{CentralPool, Core, mode};
use crate::freelist::{Slot, listed};
use crate::segment::Class;
use crate::sync::{MutexGuard, Ordering};

impl CentralPool {
    /// Walks every invariant while everyone is kept out; `visit` sees each segment's state (`None`: free) and bytes.
    ///
    /// # Errors
    /// The first violation, in words.
    pub(crate) fn check(&self, mut visit: impl FnMut(Option<u16>, usize)) -> std::result::Result<(), String> {
        let core = self.core.lock();
        self.gate.quiesce(mode::INSPECT, &core.roster);
        let result = self.check_quiet(&core, &mut visit);
        self.gate.open(mode::INSPECT, &core.roster);
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
        let mut note = |class: Class, slot: &Slot| {
            if slot.class() != Some(class) || !outside.insert(std::ptr::from_ref(slot).addr()) {
                twice = Some(format!("a segment of {class:?} is cached twice or under a wrong class"));
            }
        };
        for held in core.roster.quiet() {
            let mut bytes = 0;
            for class in Class::all() {
                held.for_each(class, |slot| {
                    note(class, slot);
                    bytes += class.stride();
                });
            }
            if bytes > self.config.thread_cache {
                return Err(format!("a shard caches {bytes} bytes of at most {}", self.config.thread_cache));
            }
        }
        let mut booked = 0;
        for (class, rack) in listed().zip(&self.racks) {
            rack.for_each(|slot| note(class, slot));
            let Some(segments) = rack.booked() else {
                return Err(format!("a rack of {class:?} has more on a hook than that has booked"));
            };
            booked += segments * class.stride() as u64;
        }
        let racked = self.racked.bytes.load(Ordering::Relaxed);
        if racked != booked || racked > self.config.shared_cache as u64 {
            let bound = self.config.shared_cache;
            return Err(format!("racks have booked {booked} bytes, counted as {racked} of at most {bound}"));
        }
        if let Some(error) = twice {
            return Err(error);
        }
        let mut out = 0u64;
        core.arena.check(&outside, |slot, bytes, free| {
            out += u64::from(!free);
            visit((!free).then(|| slot.word().state()), bytes);
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

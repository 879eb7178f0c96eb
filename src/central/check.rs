//! The check of every invariant of a central pool, for [`Pool::check`](crate::Pool::check) and the tests.
//!
//! The check holds the lock and shuts all owners out of their thread caches, so nothing moves. It first collects what
//! thread caches and transfer caches hold, each descriptor once. Then the arena's own check must find that exactly
//! these segments, and those that are out, are missing from their runs' lists. And as many segments must be out as
//! takes exceed returns.

use std::collections::HashSet;

use super::{CentralPool, Core, mode};
use crate::freelist::{Descriptor, listed};
use crate::segment::{CLASSES, Class};

impl CentralPool {
    /// Checks every invariant while all owners are shut out. `visit` sees each segment's state (`None`: free) and
    /// bytes.
    ///
    /// # Errors
    /// The first violation, in words.
    pub(crate) fn check(&self, mut visit: impl FnMut(Option<u16>, usize)) -> std::result::Result<(), String> {
        let mut core = self.lock();
        self.gate.quiesce(mode::INSPECT, &core.table);
        let result = self.check_quiet(core.as_is(), &mut visit);
        self.gate.readmit(mode::INSPECT, &core.table);
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::ptr::NonNull;
    use std::sync::Arc;

    use super::*;
    use crate::arena::set_of;
    use crate::central::Wake;
    use crate::central::tests::{CACHE, MIB, central, got, release};
    use crate::freelist::cache::HeldCache;
    use crate::freelist::{CacheTable, Chain, list_of};
    use crate::segment::Placement;
    use crate::sync::thread;

    const STRIDE: usize = 4096 + 64;

    /// The class of the segments that [`cached`] has left in this thread's cache.
    fn class() -> Class {
        Class::of(4096).unwrap()
    }

    /// A central pool with one segment out, and one cached by this thread.
    fn cached() -> Arc<CentralPool> {
        let central = central(0);
        let (_out, back) = (got(&central, 4096), got(&central, 4096));
        release(back);
        assert_eq!((central.cache().unwrap().cached(class()), class().stride()), (1, STRIDE));
        central.check(|_, _| ()).unwrap();
        central
    }

    fn violation(central: &CentralPool) -> String {
        central.check(|_, _| ()).expect_err("a violation goes unnoticed")
    }

    /// Gives a class room for more segments than a thread cache may hold.
    fn make_room(held: &mut HeldCache<'_>, class: Class) {
        let chain = held.revoke(class);
        held.grant(class, 100);
        assert!(held.fill(class, chain).is_empty());
    }

    /// Puts a segment into a list that has room, where it may be already.
    fn put(held: &mut HeldCache<'_>, class: Class, descriptor: NonNull<Descriptor>) {
        let mut chain = Chain::new();
        // SAFETY: it is alive, and this chain is its only one. If it is in a list too, that is to be noticed.
        unsafe { chain.push(descriptor) };
        assert!(held.fill(class, chain).is_empty());
    }

    #[test]
    fn a_check_sees_what_is_cached_in_the_wrong_place() {
        for wrong in [false, true] {
            let central = cached();
            let mut held = CacheTable::mine(central.cache().unwrap());
            let list = if wrong { Class::of(8192).unwrap() } else { class() };
            make_room(&mut held, list);
            let descriptor = if wrong {
                central.core.lock().arena.take(Placement::Class(class())).unwrap()
            } else {
                let taken = held.drain(class(), 1).pop().unwrap();
                put(&mut held, list, taken);
                taken
            };
            put(&mut held, list, descriptor);
            let says = violation(&central);
            assert!(says.ends_with(" is cached twice or under a wrong class"), "{says}");
            // The cache is put in order again, since it is emptied when this thread ends.
            let _ = held.drain(list, 1).pop();
        }
    }

    #[test]
    fn a_check_sees_a_thread_cache_above_its_bound() {
        let central = cached();
        let mut held = CacheTable::mine(central.cache().unwrap());
        make_room(&mut held, class());
        let mut fill = || {
            let taken = central.core.lock().arena.take(Placement::Class(class())).unwrap();
            put(&mut held, class(), taken);
        };
        let most = CACHE / STRIDE;
        (1..most).for_each(|_| fill());
        central.check(|_, _| ()).unwrap();
        fill();
        let bytes = (most + 1) * STRIDE;
        assert_eq!(violation(&central), format!("a thread cache holds {bytes} bytes of at most {CACHE}"));
    }

    #[test]
    fn a_check_sees_a_transfer_cache_above_its_quota() {
        const QUOTA: usize = 10 * STRIDE;
        let central = central(QUOTA);
        let class = class();
        let put = |count: u32| {
            let mut core = central.core.lock();
            let mut take = || core.arena.take(Placement::Class(class)).unwrap();
            (0..count).for_each(|_| central.transfers[list_of(class)].exceed(take()));
        };
        (0..3).for_each(|_| put(3));
        central.check(|_, _| ()).unwrap();
        put(3);
        let says = violation(&central);
        let bytes = 12 * STRIDE;
        assert_eq!(says, format!("the transfer cache of {class:?} holds {bytes} bytes of at most {QUOTA}"));
    }

    #[test]
    fn a_check_sees_wrong_counts() {
        let central = cached();
        let miscount = |takes: u64| central.core.lock().classes.count_on(class(), takes, 0);
        miscount(1);
        assert_eq!(violation(&central), "3 takes less 1 returns are not the 1 segments that are out");
        miscount(u64::MAX);
        central.core.lock().left = Some(2);
        assert_eq!(violation(&central), "Some(2) segments are counted as outstanding, 1 are");
        central.core.lock().left = Some(1);
        central.check(|_, _| ()).unwrap();
    }

    #[test]
    fn a_check_sees_what_returns_are_not_told() {
        let central = cached();
        let wants = vec![central.place(MIB - 32, 64).unwrap()];
        let wake = || Wake::Thread(thread::current());
        let large = central.join(wants, wake(), usize::MAX).unwrap();
        central.check(|_, _| ()).unwrap();
        central.core.lock().config.by_hand = false;
        assert_eq!(violation(&central), "a request waits, and no look is planned");
        central.core.lock().config.by_hand = true;
        // The window has the segment that is out, and its class is closed for that.
        let (closed, this) = (&central.closed_classes, set_of(class()));
        closed.set_classes([0, 0]);
        assert_eq!(
            violation(&central),
            format!("the closed classes are [0, 0], and [0, {this:x}] are needed")
        );
        closed.set_classes([0, this]);
        central.check(|_, _| ()).unwrap();
        let small = central.join(vec![central.place(4096, 64).unwrap()], wake(), usize::MAX).unwrap();
        central.check(|_, _| ()).unwrap();
        closed.set_classes([0, this]);
        assert!(violation(&central).ends_with(&format!("[{this:x}, {this:x}] are needed")));
        closed.set_classes([this, this]);
        central.check(|_, _| ()).unwrap();
        // A window of which returns do not know, and one whose owner does not wait.
        closed.set_ranges(std::iter::empty());
        assert!(violation(&central).starts_with("returns do not find the window at "));
        closed.set_ranges(central.core.lock().arena.window_addresses());
        central.check(|_, _| ()).unwrap();
        central.core.lock().arena.windows[0].owner = 77;
        assert_eq!(violation(&central), "request 77 has a window and does not wait, or has two");
        central.core.lock().arena.windows[0].owner = large;
        central.leave(large);
        central.check(|_, _| ()).unwrap();
        assert!(!central.waits(small), "it is served with what the first was to have");
        let Some(Ok(grants)) = central.look(small, None) else { panic!() };
        assert_eq!(grants.len(), 1);
    }
}

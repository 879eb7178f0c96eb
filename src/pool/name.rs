//! Names of pools: one each, at any moment.
//!
//! Gauges, counters and reports are told apart by the pool's name alone, whichever sampler sends them, so two pools of one name
//! would overwrite each other's. The process has a list of the names that are in use; the second of a name gets a number.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::escape::clean;
use crate::os::forks;

/// Characters of a name.
const LONGEST: usize = 100;
/// A sampler that is looking at a pool keeps it for some microseconds: so many times a build waits as long for the name of one
/// that was dropped just now.
const LOOKS: u32 = 10;
const LOOK: Duration = Duration::from_micros(500);

/// A name that no other pool has, until it is dropped.
#[derive(Debug)]
pub(super) struct Name {
    name: Arc<str>,
    /// The child of a fork has a list of its own.
    forks: u32,
}

/// The names that are in use.
struct Names {
    forks: u32,
    taken: Mutex<BTreeSet<Arc<str>>>,
}

impl Names {
    /// This process's. The child of a fork begins another list: the parent's may have been copied while it was locked. (The old
    /// one stays where it is, a few names for each generation.)
    fn get() -> &'static Self {
        static NAMES: AtomicPtr<Names> = AtomicPtr::new(std::ptr::null_mut());
        let forks = forks();
        // Acquire, here and below: the list that the other thread's release published is complete.
        let mut known = NAMES.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or what a box was made into below, which is never freed.
            match unsafe { known.as_ref() } {
                Some(names) if names.forks == forks => return names,
                _ => {}
            }
            let fresh = Box::into_raw(Box::new(Self { forks, taken: Mutex::default() }));
            match NAMES.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => known = fresh,
                Err(other) => {
                    // SAFETY: made just above, and given to nobody.
                    drop(unsafe { Box::from_raw(fresh) });
                    known = other;
                }
            }
        }
    }
}

impl Name {
    /// This name, or with a number behind it if a pool has it.
    pub(super) fn take(wanted: &str) -> Self {
        let (wanted, names) = (clean(wanted, LONGEST), Names::get());
        let take = |name: &str| {
            let name: Arc<str> = name.into();
            let new = names.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
            new.then(|| Self { name, forks: names.forks })
        };
        for look in 0..=LOOKS {
            if let Some(name) = take(&wanted) {
                return name;
            }
            if look < LOOKS {
                std::thread::sleep(LOOK);
            }
        }
        let mut number = 2_u64;
        loop {
            if let Some(name) = take(&format!("{wanted}#{number}")) {
                return name;
            }
            number += 1;
        }
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.name
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let names = Names::get();
        if names.forks == self.forks {
            names.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_pool_has_a_name_of_its_own_and_leaves_it_to_the_next() {
        let (first, second) = (Name::take("twins"), Name::take("twins"));
        assert_eq!((&*first, &*second), ("twins", "twins#2"));
        assert_eq!(&*Name::take("twins#2"), "twins#2#2");
        drop(first);
        assert_eq!(&*Name::take("twins"), "twins");
        drop(second);
        let again = Name::take("twins");
        assert_eq!((&*again, &*Name::take("twins")), ("twins", "twins#2"));
    }

    #[test]
    fn names_are_short_and_printable() {
        assert_eq!(&*Name::take("a\u{1b}[2J\nb\u{202e}"), "a\\u{1b}[2J\\nb\\u{202e}");
        assert_eq!(Name::take(&"x".repeat(1 << 20)).chars().count(), LONGEST + 3);
    }
}

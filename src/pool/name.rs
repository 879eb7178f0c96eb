//! Names of pools: no two pools of the process have the same name at the same time.
//!
//! Gauges, counters and reports are told apart by the pool's name alone, whichever sampler sends them, so two pools of
//! one name would overwrite each other's. The process has a list of the names in use; the second pool of a name gets a
//! number behind it.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::escape::clean;
use crate::locks::Mutex;
use crate::os;

/// Characters of a name at most.
const LONGEST_POOL_NAME: usize = 100;
/// A sampler that looks at a pool keeps it alive for some microseconds. So a build tries this many times more, after
/// pauses of this length, for the name of a pool that was dropped just now.
const RETRIES: u32 = 10;
const RETRY_PAUSE: Duration = Duration::from_micros(500);

/// The names that are in use.
static TAKEN: Mutex<BTreeSet<Arc<str>>> = Mutex::new(BTreeSet::new());

/// A name that no other pool has, until it is dropped.
#[derive(Debug)]
pub(super) struct Name(Arc<str>);

impl Name {
    /// This name, or this name with a number behind it if another pool has it.
    pub(super) fn take(wanted: &str) -> Self {
        let wanted: Arc<str> = clean(wanted, LONGEST_POOL_NAME).into();
        for _ in 0..RETRIES {
            if TAKEN.lock().insert(wanted.clone()) {
                return Self(wanted);
            }
            std::thread::sleep(RETRY_PAUSE);
        }
        let mut taken = TAKEN.lock();
        let numbered = (2_u64..).map(|number| format!("{wanted}#{number}").into());
        let mut free = std::iter::once(wanted.clone()).chain(numbered).filter(|name| !taken.contains(name));
        // There is always a free one.
        let name = free.next().unwrap_or(wanted);
        taken.insert(name.clone());
        Self(name)
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        // In the child of a fork the lock may be held by a thread that is not there, and the names are the parent's.
        if !os::forked() {
            TAKEN.lock().remove(&self.0);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_printable() {
        assert_eq!(&*Name::take("a\u{1b}[2J\nb\u{202e}"), "a\\u{1b}[2J\\nb\\u{202e}");
        assert_eq!(Name::take(&"x".repeat(1 << 20)).chars().count(), LONGEST_POOL_NAME + 3);
    }
}

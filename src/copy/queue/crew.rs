//! Helpers: a few threads that lend a hand with what another thread is at and waits for.
//!
//! Packing thousands of pieces is copying, which one thread does at a fraction of the link's speed. So a queue has a
//! crew: whoever has much to pack offers the work to it, does it too, and goes on when all who came to help are gone.
//! The work is borrowed for so long, and no longer.
//!
//! ```text
//!   caller    offer(work, 3) ... own part ... withdraw, wait until nobody is at it
//!   helper      look for an offer, count itself in | work | count itself out | look | sleep
//! ```
//!
//! A helper counts itself in under the lock, where it finds the offer, and out when the work has returned. The caller
//! takes its offer back under the same lock, waits until the count is 0, and only then lets the work go. So a helper
//! that comes late finds nothing, and one that came in time is waited for. Nobody waits for help: if all helpers are
//! busy, or none can be started, the caller does everything.
//!
//! Helpers are started when they are first needed, sleep while there is nothing to do, and end with the queue. How many
//! there are is bounded, however many threads ask for help.

// The work is the crate's own: a panic of it is a mistake, and goes on to the caller as if that had made it.
#![allow(clippy::disallowed_methods)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use slab::Slab;

use crate::sync::{Mutex, thread};

/// Work that anyone may do, several at once. Erased: the offer says how long it is there.
type Work = *const (dyn Fn() + Sync);

#[derive(Debug)]
struct Offer {
    work: Work,
    /// How many more may come.
    wanted: usize,
    /// How many are at it.
    busy: usize,
    caller: thread::Thread,
    /// What the work panicked with, if it did.
    panicked: Option<Panic>,
}

/// Kept apart for the sake of `Debug`.
struct Panic(Box<dyn Any + Send>);

impl std::fmt::Debug for Panic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Panic")
    }
}

// SAFETY: the work is `Sync`, so it may be run on any thread; that it is there when it is run is the offer's affair.
unsafe impl Send for Offer {}

#[derive(Debug, Default)]
struct State {
    offers: Slab<Offer>,
    /// Helpers that have nothing to do, by a number of theirs.
    asleep: Vec<(usize, thread::Thread)>,
    /// Helpers that were started.
    helpers: usize,
    /// Numbers that were given out: none twice, though a helper may not have come to be.
    numbers: usize,
    closing: bool,
}

/// What helpers know of their crew.
#[derive(Debug, Default)]
pub(super) struct Shared(Mutex<State>);

/// See the module's page.
#[derive(Debug)]
pub(in crate::copy) struct Crew {
    shared: Arc<Shared>,
    most: usize,
}

impl Crew {
    /// Of so many helpers at most.
    pub(super) fn new(most: usize) -> Self {
        Self { shared: Arc::default(), most }
    }

    #[cfg(all(test, loom))]
    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// How many helpers there can be.
    pub(in crate::copy) fn most(&self) -> usize {
        self.most
    }

    /// Does `own`, with up to `hands` helpers at `work` meanwhile, which is to return when nothing is left to do.
    /// `start` starts another helper, whose thread calls [`Shared::serve`]; `false`: it cannot.
    ///
    /// If the work panics on a helper, so does this, when nobody is at it any more.
    pub(super) fn share<R>(
        &self,
        hands: usize,
        work: &(dyn Fn() + Sync),
        start: impl FnMut(Arc<Shared>, usize) -> bool,
        own: impl FnOnce() -> R,
    ) -> R {
        if hands.min(self.most) == 0 {
            return own();
        }
        let offered = Offered { shared: &self.shared, key: self.offer(hands.min(self.most), work, start) };
        let done = own();
        if let Some(Panic(panic)) = offered.withdraw() {
            resume_unwind(panic);
        }
        done
    }

    fn offer(
        &self,
        wanted: usize,
        work: &(dyn Fn() + Sync),
        mut start: impl FnMut(Arc<Shared>, usize) -> bool,
    ) -> usize {
        // SAFETY: only the lifetime changes. It is called by helpers that are counted in the offer, and `Offered` is
        // not gone, nor has `share` returned, before the offer is taken back and the count is 0.
        let work: Work = unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work)
        };
        let (key, woken, started) = {
            let mut state = self.shared.0.lock();
            let offer = Offer { work, wanted, busy: 0, caller: thread::current(), panicked: None };
            let key = state.offers.insert(offer);
            let left = state.asleep.len() - wanted.min(state.asleep.len());
            let woken = state.asleep.split_off(left);
            let more = (wanted - woken.len()).min(self.most - state.helpers);
            let first = state.numbers;
            state.helpers += more;
            state.numbers += more;
            (key, woken, first..first + more)
        };
        woken.into_iter().for_each(|(_, helper)| helper.unpark());
        for number in started {
            if !start(self.shared.clone(), number) {
                self.shared.0.lock().helpers -= 1;
            }
        }
        key
    }

    /// No more offers: helpers end.
    pub(super) fn close(&self) {
        let asleep = {
            let mut state = self.shared.0.lock();
            state.closing = true;
            std::mem::take(&mut state.asleep)
        };
        asleep.into_iter().for_each(|(_, helper)| helper.unpark());
    }
}

/// An offer. Dropped, it is taken back.
struct Offered<'a> {
    shared: &'a Shared,
    key: usize,
}

impl Offered<'_> {
    /// Takes it back, and waits until nobody is at it.
    fn withdraw(self) -> Option<Panic> {
        let (shared, key) = (self.shared, self.key);
        std::mem::forget(self);
        shared.withdraw(key)
    }
}

impl Drop for Offered<'_> {
    fn drop(&mut self) {
        // Unwinding: what the helpers panicked with is of no interest any more.
        std::mem::forget(self.shared.withdraw(self.key));
    }
}

impl Shared {
    fn withdraw(&self, key: usize) -> Option<Panic> {
        loop {
            {
                let mut state = self.0.lock();
                state.offers[key].wanted = 0;
                if state.offers[key].busy == 0 {
                    return state.offers.remove(key).panicked;
                }
            }
            // Whoever is last wakes us; and so may others, for reasons of theirs.
            thread::park_until(None);
        }
    }

    /// A helper's life.
    pub(super) fn serve(&self, number: usize) {
        loop {
            let Some((key, work)) = self.next(number) else { return };
            // SAFETY: counted in, so the offer is there, and the work with it. It may be run on any thread.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*work)() }));
            let mut state = self.0.lock();
            let Some(offer) = state.offers.get_mut(key) else { continue };
            offer.busy -= 1;
            if let Err(panic) = done {
                // What another one panicked with is forgotten, since dropping that could panic as well.
                std::mem::forget(offer.panicked.replace(Panic(panic)));
            }
            let last = (offer.busy == 0).then(|| offer.caller.clone());
            drop(state);
            if let Some(caller) = last {
                caller.unpark();
            }
        }
    }

    /// Sleeps until there is something to do. `None`: there will be nothing.
    fn next(&self, number: usize) -> Option<(usize, Work)> {
        loop {
            {
                let mut state = self.0.lock();
                // Whoever woke us took us off; not so if we woke for no reason.
                state.asleep.retain(|(other, _)| *other != number);
                if let Some((key, offer)) = state.offers.iter_mut().find(|(_, offer)| offer.wanted > 0) {
                    offer.wanted -= 1;
                    offer.busy += 1;
                    return Some((key, offer.work));
                }
                if state.closing {
                    return None;
                }
                // Under the lock, so that no offer comes in between.
                state.asleep.push((number, thread::current()));
            }
            thread::park_until(None);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn started(shared: Arc<Shared>, number: usize) -> bool {
        std::thread::spawn(move || shared.serve(number));
        true
    }

    /// Many callers at once, each with its own work on its own stack: all of it is done once, whoever helps.
    #[test]
    fn borrowed_work_is_done_once_and_let_go() {
        let crew = Crew::new(3);
        let (helpers, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for caller in 0..4 {
                let (crew, helpers, most) = (&crew, &helpers, &most);
                scope.spawn(move || {
                    for round in 0..200 {
                        let parts: Vec<AtomicUsize> = (0..50).map(|_| AtomicUsize::new(0)).collect();
                        let next = AtomicUsize::new(0);
                        let part = || {
                            parts.get(next.fetch_add(1, Ordering::Relaxed)).map(|part| {
                                part.fetch_add(1, Ordering::Relaxed);
                                std::thread::yield_now();
                            })
                        };
                        let work = || {
                            most.fetch_max(helpers.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                            while part().is_some() {}
                            helpers.fetch_sub(1, Ordering::Relaxed);
                        };
                        crew.share(round % 5, &work, started, || while part().is_some() {});
                        assert!(
                            parts.iter().all(|part| part.load(Ordering::Relaxed) == 1),
                            "caller {caller}, round {round}"
                        );
                    }
                });
            }
        });
        assert!((1..=3).contains(&most.load(Ordering::Relaxed)), "{most:?} helpers at once");
        crew.close();
    }

    #[test]
    fn a_panic_of_a_helper_is_the_callers() {
        let crew = Crew::new(1);
        let came = AtomicUsize::new(0);
        let work = || {
            came.fetch_add(1, Ordering::Relaxed);
            resume_unwind(Box::new("as asked"));
        };
        let own = || {
            while came.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
        };
        let shared = catch_unwind(AssertUnwindSafe(|| crew.share(1, &work, started, own)));
        assert_eq!(shared.unwrap_err().downcast_ref(), Some(&"as asked"));
        // The helper is there as before.
        let done = AtomicUsize::new(0);
        let more = || {
            done.fetch_add(1, Ordering::Relaxed);
        };
        crew.share(
            1,
            &more,
            |_, _| false,
            || {
                while done.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
            },
        );
        crew.close();
    }

    /// Otherwise one of two with the same number would be taken off the list with the other, and sleep for ever.
    #[test]
    fn no_two_helpers_have_the_same_number() {
        let crew = Crew::new(3);
        let (numbers, refused) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
        let start = |shared: Arc<Shared>, number: usize| {
            // The first of each two cannot be started.
            if refused.fetch_add(1, Ordering::Relaxed) % 2 == 0 {
                return false;
            }
            numbers.lock().push(number);
            started(shared, number)
        };
        for _ in 0..3 {
            crew.share(3, &|| (), start, || ());
        }
        let mut numbers = numbers.lock().clone();
        assert_eq!(numbers.len(), 3, "as many helpers as there can be");
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 3);
        crew.close();
    }

    #[test]
    fn without_helpers_the_caller_does_it() {
        for (crew, hands) in [(Crew::new(0), 5), (Crew::new(2), 0), (Crew::new(2), 2)] {
            assert_eq!(crew.share(hands, &|| (), |_, _| false, || 7), 7);
        }
    }
}

//! Loom models of the central pool: leases, reclaiming, transfer caches, closing, waiting.
//!
//! Each model has a central pool like a real one, over addresses that no thread accesses. In place
//! of its memory each segment has a cell, and the thread that has the segment out writes to it. A
//! thread leases, uses and gives up its thread cache through loom's thread-locals, in the way of
//! real threads. `sync::Mutex` fails a model that locks a freed central pool.

use std::sync::Arc;
use std::task::{Wake as TaskWake, Waker};
use std::time::Duration;
use std::time::Instant;

use loom::thread::{JoinHandle, spawn};

use super::*;
use crate::freelist::list_of;
use crate::region::Owner;
use crate::segment::PAGE;
use crate::segment::RegionId;
use crate::sync::{UnsafeCell, model, model_fenced, step, thread};
use crate::telemetry::ledger::CheckoutSite;

/// A length of the first class that thread caches have lists for.
const LEN: usize = 1300;
/// The number of segments of that class in a page.
const ALL: usize = 3;
/// Bytes of a thread cache with room for two segments of a class. (A batch is then one.)
const TWO: usize = 2 * 2 * 1344;

/// A central pool, and the memory of its segments.
#[derive(Clone)]
struct Store {
    central: Arc<CentralPool>,
    memory: Arc<Memory>,
}

struct Memory([UnsafeCell<u32>; 2 * ALL]);

// SAFETY: the cells are loom's, which checks each access.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

/// A segment that is out, in the way of a `PinnedBuf`.
struct Out {
    segment: Segment,
    memory: Arc<Memory>,
}

impl Store {
    /// A store with `pages` pages, each an extent. By hand every owner is idle; with a clock none
    /// gets so.
    fn new(pages: usize, transfer_cache: usize, by_hand: bool) -> Self {
        let config = CentralConfig {
            capacity: pages * PAGE,
            thread_cache: TWO,
            transfer_cache,
            largest: PAGE,
            step: 0,
            by_hand,
            devices: Vec::new(),
            track: false,
        };
        let central = CentralPool::new(config, None);
        for page in 1..=pages {
            let base = NonNull::new(std::ptr::without_provenance_mut(page * PAGE)).unwrap();
            // SAFETY: the arena only does arithmetic on it.
            unsafe { central.add_extent(RegionId(0), base, PAGE, true) };
        }
        Self { central, memory: Arc::new(Memory(std::array::from_fn(|_| UnsafeCell::new(0)))) }
    }

    /// With one page and transfer caches.
    fn of_a_page() -> Self {
        Self::new(1, PAGE, true)
    }

    fn want(&self) -> Want {
        self.central.place(LEN, 64).unwrap()
    }

    fn class(&self) -> Class {
        let Placement::Class(class) = self.want().placement else { unreachable!() };
        class
    }

    fn out(&self, fresh: Fresh) -> Out {
        Out { segment: fresh.into_segment(), memory: self.memory.clone() }.written()
    }

    /// A checkout: a hit, or any free segment.
    fn take(&self) -> Option<Out> {
        step();
        let class = self.class();
        if let Some(descriptor) = self.central.hit(class, LEN) {
            // SAFETY: taken just now, of this class.
            let fresh = unsafe { Fresh::of_packed(&self.central, descriptor, pack(LEN, list_of(class))) };
            return Some(self.out(fresh));
        }
        match self.central.try_take(&[self.want()], ReclaimLevel::All) {
            Ok(fresh) => fresh?.pop().map(|fresh| self.out(fresh)),
            Err(Error::Closed) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// `N` checkouts.
    fn take_all<const N: usize>(&self) -> [Out; N] {
        std::array::from_fn(|_| self.take().expect("there is room"))
    }

    /// A thread that takes a segment, if there is one, and returns it.
    fn user(&self) -> JoinHandle<()> {
        let store = self.clone();
        worker(move || store.take().into_iter().for_each(Out::put))
    }

    /// Joins the queue for these wants.
    fn join(&self, wants: Vec<Want>) -> Result<usize> {
        step();
        self.central.join(wants, Wake::Thread(thread::current()), usize::MAX)
    }

    /// Waits as a task does, after it has joined the queue.
    fn wait_as_task(&self, key: usize) -> Result<Vec<Out>> {
        let waker = task(thread::current());
        loop {
            step();
            match self.central.look(key, Some(&waker)) {
                Some(Ok(grants)) => return Ok(grants.into_iter().map(|g| self.out(g)).collect()),
                Some(Err(error)) => return Err(error),
                None => thread::park_until(None),
            }
        }
    }

    /// Ends this thread's leases and closes the central pool, with all segments back. Checks that
    /// every segment is accounted for and that the outstanding reference was dropped once.
    fn finish(self) {
        thread_caches::end();
        self.central.close();
        assert_eq!(self.central.outstanding(), 0);
        self.central.check(|_, _| ()).unwrap();
        assert_eq!(self.central.snapshot().out, 0);
        assert_eq!(Arc::strong_count(&self.central), 1, "the outstanding reference was dropped once");
    }
}

impl Out {
    /// Writes to the memory.
    fn written(self) -> Self {
        let at = self.segment.base().addr().get();
        let first = (at / PAGE - 1) * ALL;
        // A segment without a class is a page.
        let numbers = match self.segment.class() {
            Some(class) => first + at % PAGE / class.stride()..first + at % PAGE / class.stride() + 1,
            None => first..first + ALL,
        };
        for number in numbers {
            // SAFETY: loom fails the model if another thread accesses the cell at the same time.
            self.memory.0[number].with_mut(|p| unsafe { *p += 1 });
        }
        self
    }

    fn put(self) {
        step();
        // SAFETY: `self` owns the segment, and nothing uses it.
        unsafe { self.written().segment.release() }
    }
}

/// Spawns a thread that ends its leases before it can be joined.
fn worker<T: 'static>(run: impl FnOnce() -> T + 'static) -> JoinHandle<T> {
    spawn(move || {
        let value = run();
        step();
        thread_caches::end();
        value
    })
}

fn task(thread: thread::Thread) -> Waker {
    struct Task(thread::Thread);
    impl TaskWake for Task {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    Arc::new(Task(thread)).into()
}

// --- threads that end ----------------------------------------------------------------------------

#[test]
fn loom_exit_against_reclaim() {
    model("exit: a thread ends while its thread cache is reclaimed", 4, || {
        let store = Store::of_a_page();
        let other = store.user();
        step();
        store.central.trim(usize::MAX);
        other.join().unwrap();
        store.finish();
    });
}

// --- transfer caches -----------------------------------------------------------------------------

/// Moves a segment of this thread's cache to the transfer cache, as a thread with a full list does,
/// unless another thread has its lock. Returns the number of segments that were moved.
fn offload(store: &Store) -> u32 {
    step();
    let class = store.class();
    let mut held = store.central.gate.enter(store.central.cache().unwrap()).unwrap();
    held.offload(class, 1, &store.central.transfers[list_of(class)])
}

#[test]
fn loom_transfer_passes_on() {
    model("transfer caches: one leaves a segment while another takes one", 3, || {
        let store = Store::of_a_page();
        let [one, two] = [store.take().unwrap(), store.take().unwrap()];
        one.put();
        assert_eq!(offload(&store), 1, "there is room for two");
        let leaver = worker({
            let store = store.clone();
            move || {
                two.put();
                offload(&store);
            }
        });
        // A third segment was never taken, but the transfer cache comes before the runs.
        let got = store.take().unwrap();
        leaver.join().unwrap();
        store.central.check(|_, _| ()).unwrap();
        got.put();
        store.finish();
    });
}

// --- closing -------------------------------------------------------------------------------------

#[test]
fn loom_close_counts() {
    model("close: two return while the pool closes", 3, close_counts);
}

#[test]
fn loom_fenced_close_counts() {
    model_fenced("close: the same where owners fence for themselves", 2, close_counts);
}

fn close_counts() {
    let store = Store::of_a_page();
    let held = store.take();
    let users = [(); 2].map(|()| store.user());
    step();
    store.central.close();
    held.into_iter().for_each(Out::put);
    for user in users {
        user.join().unwrap();
    }
    store.finish();
}

/// A thread that returns more segments than its cache can hold: the rest goes elsewhere.
fn overflow(store: &Store) -> JoinHandle<()> {
    let outs = store.take_all::<ALL>();
    worker(move || outs.into_iter().for_each(Out::put))
}

#[test]
fn loom_close_frees_under_returns() {
    model("close: a thread cache overflows, and its thread ends, while the pool is dropped", 4, || {
        let store = Store::new(1, 0, true);
        let other = overflow(&store);
        let freed = Arc::downgrade(&store.central);
        step();
        store.central.close();
        drop(store);
        other.join().unwrap();
        assert_eq!(freed.strong_count(), 0, "the last return frees the central pool");
    });
}

#[test]
fn loom_check_finds_everything() {
    model("check: the overflow of a thread cache while everything is counted", 3, || {
        let store = Store::new(1, 0, true);
        let other = overflow(&store);
        step();
        store.central.check(|_, _| ()).unwrap();
        other.join().unwrap();
        store.finish();
    });
}

// --- counting ------------------------------------------------------------------------------------

#[test]
fn loom_sums_hold() {
    model("sums: a look while two take and return", 2, || {
        let store = Store::of_a_page();
        let users = [0, 1].map(|_| {
            let store = store.clone();
            worker(move || (0..2).for_each(|_| store.take().into_iter().for_each(Out::put)))
        });
        step();
        let (s, classes) = store.central.snapshot_by_class();
        assert_eq!(s.free + s.out + s.quarantined + s.cut, s.total, "the parts sum to the whole: {s:?}");
        let out: u64 = classes.iter().map(|class| class.out).sum();
        let bytes: usize = classes.iter().map(|class| class.out_bytes).sum();
        assert_eq!(bytes, s.out + s.quarantined, "the classes' bytes sum to the whole: {s:?}, {classes:?}");
        let sums = classes.iter().fold((0, 0), |(t, p), c| (t + c.checkouts, p + c.returns));
        assert_eq!(sums, (s.takes, s.puts), "the classes' counts sum to the whole");
        assert_eq!(s.takes - s.puts, out, "takes less returns are out: {s:?}, {classes:?}");
        assert!(s.takes <= 4 && s.puts <= 4, "{s:?}");
        for user in users {
            user.join().unwrap();
        }
        let s = store.central.snapshot();
        assert_eq!((s.takes, s.puts, s.out, s.requested), (4, 4, 0, 0), "exact with no call under way");
        store.finish();
    });
}

#[test]
fn loom_ledger_closes() {
    model("ledger: an entered segment returns on another thread, while the ledger is looked at", 3, || {
        let store = Store::of_a_page();
        let mut fresh =
            store.central.try_take(&[store.want()], ReclaimLevel::All).unwrap().unwrap().remove(0);
        CentralPool::enter(&mut fresh, CheckoutSite::default());
        let out = store.out(fresh);
        let descriptor = out.segment.name();
        let other = worker(move || out.put());
        step();
        let found = store.central.out_for(Duration::ZERO);
        // A segment that is out has its entry, but not between the entry's end and its return.
        assert!(found.iter().all(|one| one.descriptor == descriptor), "{found:?}");
        other.join().unwrap();
        assert_eq!(store.central.histograms().1.count(), 1, "the time of the checkout was counted once");
        assert!(store.central.out_for(Duration::ZERO).is_empty());
        store.finish();
    });
}

// --- waiting -------------------------------------------------------------------------------------

#[test]
fn loom_wait_is_woken() {
    model("wait: a hit returns while another begins to wait", 4, || {
        let store = Store::of_a_page();
        let held = store.take_all::<2>();
        let other = store.user();
        let key = store.join(vec![store.want()]).unwrap();
        let grants = store.central.wait(key, LEN, None, Instant::now()).unwrap();
        grants.into_iter().for_each(|grant| store.out(grant).put());
        other.join().unwrap();
        held.into_iter().for_each(Out::put);
        store.finish();
    });
}

#[test]
fn loom_wait_cancelled() {
    model("wait: the first gives up while its grant is on the way to it", 3, || {
        let store = Store::of_a_page();
        let [one, two, three] = store.take_all();
        let first = store.join(vec![store.want()]).unwrap();
        let second = store.join(vec![store.want()]).unwrap();
        let canceller = worker({
            let store = store.clone();
            move || {
                step();
                store.central.leave(first);
            }
        });
        let giver = worker(move || one.put());
        let got = store.wait_as_task(second).unwrap();
        canceller.join().unwrap();
        giver.join().unwrap();
        got.into_iter().chain([two, three]).for_each(Out::put);
        store.finish();
    });
}

#[test]
fn loom_wait_in_order() {
    model("wait: first come, first served", 3, || {
        let store = Store::of_a_page();
        let [one, two, three] = store.take_all();
        // The first waiter needs two segments, the second one.
        let first = store.join(vec![store.want(); 2]).unwrap();
        let second = store.join(vec![store.want()]).unwrap();
        let givers = [one, two].map(|out| {
            let store = store.clone();
            worker(move || {
                out.put();
                assert!(store.take().is_none(), "a checkout took a segment that a waiter waits for");
            })
        });
        step();
        if let Some(Ok(_)) = store.central.look(second, None) {
            panic!("the second waiter was served, and there is not enough for both");
        }
        for giver in givers {
            giver.join().unwrap();
        }
        let Some(Ok(grants)) = store.central.look(first, None) else {
            panic!("the first waiter was not served")
        };
        three.put();
        let Some(Ok(last)) = store.central.look(second, None) else {
            panic!("the second waiter was not served")
        };
        grants.into_iter().chain(last).for_each(|grant| store.out(grant).put());
        store.finish();
    });
}

#[test]
fn loom_wait_for_a_window() {
    // Three preemptions take half an hour.
    model("wait: two return inside of a window, the waiter one of them, and one beside it", 2, || {
        let store = Store::new(2, 0, false);
        // The window is the first page, where two segments are out and one is cached.
        let [one, two, three, beyond] = store.take_all();
        three.put();
        let others = [
            worker(move || one.put()),
            worker({
                let store = store.clone();
                move || {
                    beyond.put();
                    let again = store.take().expect("there is room outside of any window");
                    again.put();
                }
            }),
        ];
        let key = store.join(vec![store.central.place(PAGE - 32, 64).unwrap()]).unwrap();
        // Not to this thread's cache, where it would be for as long as the thread waits.
        two.put();
        // It writes to the whole page.
        store.wait_as_task(key).unwrap().into_iter().for_each(Out::put);
        for other in others {
            other.join().unwrap();
        }
        store.finish();
    });
}

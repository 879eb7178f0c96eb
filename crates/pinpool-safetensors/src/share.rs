//! A load under way, for any number of threads and tasks.
//!
//! A load gives its tensors out in its own order, by one [`Driver`]. So of the threads that wait one takes the driver, and
//! asks for one tensor after the other, without a lock; the others wait until a tensor has come out. The driver is put
//! back after each tensor: the next thread goes on. Tensors that come out for others wait in `arrived`.
//!
//! A task takes the driver only for as long as a poll of it takes. The driver's waker is then one that wakes all tasks that
//! wait. A task that found the driver taken is woken when it is put back, since nothing has polled for it.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::{Condvar, Mutex};
use pinpool::copier::{Progress, may_wait};
use pinpool::{Error, Result};

use super::Files;
use super::load::{DeviceTensor, Driver, Watch};

/// A load under way. A task gets the next tensor by [`next_tensor`](Self::next_tensor), on any runtime, a thread by the
/// iterator [`blocking`](Self::blocking), which waits. A clone is another handle to the same load: many threads and tasks
/// share it, and each waits for the tensors that it needs by name ([`take`](Self::take)) while others are being copied.
///
/// **The drop of the last handle cancels the rest**; tensors that have come out stay. An error comes in the place of the
/// first tensor that cannot be loaded, and ends the load: each handle gives it, once, and then `None`. The load has ended when the last tensor comes out: the copier
/// has then given back all memory that it used for it, and no further call is needed.
///
/// ```
/// # use pinpool::{Copier, Device, Pool, Unpinned};
/// # use pinpool_safetensors::Checkpoint;
/// # let path = std::env::temp_dir().join(format!("pinpool-shared-{}.safetensors", std::process::id()));
/// # let header = br#"{"h.0.w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
/// # let device = Device::open("host")?;
/// # let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
/// # let copier = Copier::builder(&pool, &device).build()?;
/// let load = Checkpoint::open(&path)?.loader(&copier).first("h.0.").start()?;
/// let other = load.clone();
/// let layer = std::thread::spawn(move || other.take("h.0.w"));
/// assert_eq!(layer.join().unwrap()?.map(|tensor| tensor.shape().to_vec()), Some(vec![4]));
/// assert!(load.take("h.0.w")?.is_none(), "a tensor comes out once");
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Tensor`] with the name of the first tensor that is not on the device, how many are, and the cause
/// ([`Error::Read`] and [`Error::Read`] with file and offset, [`Error::Transfer`] with the error of the pool or the
/// device); [`Error::Cancelled`]; [`Error::Timeout`] after the copier's deadline
/// ([`Copier::with_timeout`](pinpool::Copier::with_timeout)), when the tensors that have arrived by then have come out;
/// [`Error::Malformed`] in the place of the last tensor of a file that was written to meanwhile, whose other tensors may
/// then be wrong; [`Error::Unsupported`] for a wait on a thread that must not (in a waker, a source or a sink), which
/// ends nothing; [`Error::Forked`].
#[must_use = "dropping it cancels the load"]
pub struct Load {
    shared: Arc<Shared>,
    /// Whether this handle's iteration has given the error. Relaxed: the error itself is read under the lock.
    told: AtomicBool,
}

impl Clone for Load {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), told: AtomicBool::new(false) }
    }
}

/// What a wait is for.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// The tensor at this place in the load's order.
    Place(usize),
    /// The next that nobody has taken, for the handle that has this mark.
    Next(&'a AtomicBool),
}

impl Wanted<'_> {
    /// Whether the handle's iteration has given the load's error before. It has from now on.
    fn is_told(self) -> bool {
        matches!(self, Self::Next(told) if told.swap(true, Ordering::Relaxed))
    }

    /// What there is to say in the child of a fork, where a lock may have been taken for ever: the error, once for a
    /// handle's iteration. `None`: this is no such child.
    fn forked(self) -> Option<Option<Result<DeviceTensor>>> {
        pinpool::forked().then(|| (!self.is_told()).then_some(Err(Error::Forked)))
    }
}

struct Shared {
    files: Arc<Files>,
    /// For each part of the load its file's number, how many tensors come before it, and which of the file's it has.
    parts: Vec<(u32, usize, Arc<Vec<u32>>)>,
    /// Tensors of the whole load.
    count: usize,
    watch: Watch,
    state: Mutex<State>,
    /// A tensor has come out, or the driver was put back.
    moved: Condvar,
    /// The driver's waker, for tasks.
    waker: Waker,
}

struct State {
    /// `None` while a thread has it.
    driver: Option<Driver>,
    /// How many tensors have come out of it, in the order of the load.
    out: usize,
    /// Those of them that nobody has taken, by their places in that order.
    arrived: BTreeMap<usize, DeviceTensor>,
    /// How far the load had come when it ended, and the error that it ended with.
    over: Option<Progress>,
    error: Option<Error>,
    /// Tasks that wait: those that the driver wakes, and those that found it taken.
    tasks: Vec<Arc<Waker>>,
    missed: Vec<Arc<Waker>>,
}

impl State {
    /// The tensor that is wanted. An outer `None`: it is to be waited for.
    fn found(&mut self, wanted: Wanted<'_>) -> Option<Option<Result<DeviceTensor>>> {
        let Wanted::Place(place) = wanted else {
            if let Some((_, tensor)) = self.arrived.pop_first() {
                return Some(Some(Ok(tensor)));
            }
            if let Some(tensor) = self.driver.as_mut().and_then(Driver::landed) {
                self.out += 1;
                return Some(Some(tensor));
            }
            self.over?;
            return Some(self.error.clone().filter(|_| !wanted.is_told()).map(Err));
        };
        if place < self.out {
            return Some(self.arrived.remove(&place).map(Ok));
        }
        self.over.map(|_| self.error.clone().map(Err))
    }
}

/// It does not keep the load, which has it.
struct WakesTasks(Weak<Shared>);

impl Wake for WakesTasks {
    fn wake(self: Arc<Self>) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut state = shared.state.lock();
        let tasks = [std::mem::take(&mut state.tasks), std::mem::take(&mut state.missed)];
        drop(state);
        wake_all(tasks.into_iter().flatten());
    }
}

/// Wakes tasks, under no lock: wakers are code of the program's. One that panics keeps none of the others asleep.
fn wake_all(tasks: impl Iterator<Item = Arc<Waker>>) {
    for task in tasks {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(move || task.wake_by_ref())) {
            // Its drop may panic too, so it is leaked.
            std::mem::forget(payload);
        }
    }
}

/// The driver, while a thread has it. Its drop puts it back, also when the thread panics.
struct Turn<'a> {
    shared: &'a Shared,
    driver: Option<Driver>,
    /// What it has given, if it has.
    next: Option<Result<DeviceTensor>>,
}

impl Turn<'_> {
    /// Waits for the next tensor, or with `cx` has the task wait for it. Whether it has come.
    fn advance(mut self, cx: Option<&mut Context<'_>>) -> bool {
        let polled = self.driver.as_mut().map_or(Poll::Ready(None), |driver| driver.advance(cx));
        self.next = match polled {
            Poll::Ready(next) => Some(next.unwrap_or(Err(Error::Closed))),
            Poll::Pending => None,
        };
        self.next.is_some()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let has_ended = self.driver.as_ref().is_none_or(|driver| driver.parts.is_empty());
        let over = has_ended.then(|| self.shared.watch.progress());
        let mut state = self.shared.state.lock();
        let mut woken = std::mem::take(&mut state.missed);
        if let Some(next) = self.next.take() {
            // Whoever waits looks.
            woken.append(&mut state.tasks);
            match next {
                Ok(tensor) => {
                    let place = state.out;
                    state.arrived.insert(place, tensor);
                    state.out += 1;
                }
                Err(error) => state.error = Some(error),
            }
        }
        state.over = over.map(ended);
        state.driver = self.driver.take();
        drop(state);
        self.shared.moved.notify_all();
        wake_all(woken.into_iter());
    }
}

fn ended(mut progress: Progress) -> Progress {
    progress.over = true;
    progress
}

impl Shared {
    /// The place of a tensor in the load's order.
    fn place(&self, name: &str) -> Option<usize> {
        let (shard, tensor) = self.files.place(name)?;
        let mut parts = self.parts.iter().filter(|(number, ..)| *number == shard);
        parts.find_map(|(_, first, chosen)| Some(first + chosen.binary_search(&tensor).ok()?))
    }

    fn wait(&self, wanted: Wanted<'_>) -> Option<Result<DeviceTensor>> {
        if let Some(forked) = wanted.forked() {
            return forked;
        }
        loop {
            let mut state = self.state.lock();
            if let Some(found) = state.found(wanted) {
                return found;
            }
            if let Err(error) = may_wait() {
                return Some(Err(error));
            }
            let Some(driver) = state.driver.take() else {
                self.moved.wait(&mut state);
                continue;
            };
            drop(state);
            Turn { shared: self, driver: Some(driver), next: None }.advance(None);
        }
    }

    fn poll(&self, cx: &Context<'_>, wanted: Wanted<'_>) -> Poll<Option<Result<DeviceTensor>>> {
        if let Some(forked) = wanted.forked() {
            return Poll::Ready(forked);
        }
        if let Some(found) = self.state.lock().found(wanted) {
            return Poll::Ready(found);
        }
        // Outside of the lock: cloning a waker is code of the program's.
        let task = Arc::new(cx.waker().clone());
        loop {
            let mut state = self.state.lock();
            if let Some(found) = state.found(wanted) {
                return Poll::Ready(found);
            }
            let driver = state.driver.take();
            let list = if driver.is_some() { &mut state.tasks } else { &mut state.missed };
            if !list.iter().any(|other| other.will_wake(cx.waker())) {
                list.push(task.clone());
            }
            drop(state);
            let Some(driver) = driver else { return Poll::Pending };
            let turn = Turn { shared: self, driver: Some(driver), next: None };
            if !turn.advance(Some(&mut Context::from_waker(&self.waker))) {
                return Poll::Pending;
            }
        }
    }
}

impl Load {
    pub(super) fn new(files: Arc<Files>, driver: Driver) -> Self {
        let parts = driver.parts.iter().map(|part| (part.shard, part.first, part.chosen.clone())).collect();
        let (count, watch) = (driver.count, driver.watch.clone());
        let state = State {
            over: driver.parts.is_empty().then(|| ended(watch.progress())),
            driver: Some(driver),
            out: 0,
            arrived: BTreeMap::new(),
            error: None,
            tasks: Vec::new(),
            missed: Vec::new(),
        };
        let shared = Arc::new_cyclic(|shared| Shared {
            files,
            parts,
            count,
            watch,
            state: Mutex::new(state),
            moved: Condvar::new(),
            waker: Waker::from(Arc::new(WakesTasks(shared.clone()))),
        });
        Self { shared, told: AtomicBool::new(false) }
    }

    /// The next tensor that nobody has taken, for a task, which is not blocked. `None`: there are no more.
    ///
    /// # Errors
    /// See [`Load`].
    pub async fn next_tensor(&self) -> Option<Result<DeviceTensor>> {
        poll_fn(|cx| self.shared.poll(cx, Wanted::Next(&self.told))).await
    }

    /// An iterator over the tensors that nobody has taken, which waits for each, and blocks its thread meanwhile. Dropped,
    /// it leaves the load as it is.
    pub fn blocking(&self) -> impl Iterator<Item = Result<DeviceTensor>> {
        std::iter::from_fn(|| self.shared.wait(Wanted::Next(&self.told)))
    }

    /// Takes a tensor, and waits until it is on the device. `None`: the load has none of this name, or it was taken.
    ///
    /// # Errors
    /// Of a tensor that is not on the device when the load ends: what the load has ended with (see [`Load`]), for each of
    /// them.
    pub fn take(&self, name: &str) -> Result<Option<DeviceTensor>> {
        self.shared.place(name).and_then(|place| self.shared.wait(Wanted::Place(place))).transpose()
    }

    /// The same for a task, which is not blocked, on any runtime. A future that is dropped has taken nothing.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub async fn take_async(&self, name: &str) -> Result<Option<DeviceTensor>> {
        let Some(place) = self.shared.place(name) else { return Ok(None) };
        poll_fn(|cx| self.shared.poll(cx, Wanted::Place(place))).await.transpose()
    }

    /// The number of tensors that can still be taken: 0 behind an error, but for those that had come out before.
    #[must_use]
    pub fn left(&self) -> usize {
        if pinpool::forked() {
            return 0;
        }
        let state = self.shared.state.lock();
        state.arrived.len() + if state.over.is_some() { 0 } else { self.shared.count - state.out }
    }

    /// How far the load has come, in bytes of tensors over all files. `landed_to` counts them as if the files lay one
    /// behind the other. It is over when all tensors have come out, or with an error. Waits for no thread that waits for a
    /// tensor.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let mut progress = self.shared.watch.progress();
        if !pinpool::forked() {
            let over = self.shared.state.lock().over;
            (progress.over, progress.elapsed) = (false, self.shared.watch.since.elapsed());
            progress = over.unwrap_or(progress);
        }
        progress
    }

    /// Cancels the load: no further chunk is begun. Tensors that are on the device still come out, and then
    /// [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.shared.watch.cancel();
    }
}

// Its state is whole at any time: a turn puts the driver back, also when the thread panics.
impl UnwindSafe for Load {}
impl RefUnwindSafe for Load {}

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Load").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

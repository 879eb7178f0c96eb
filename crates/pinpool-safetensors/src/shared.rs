//! A load whose tensors several threads and tasks wait for, by name.
//!
//! A load gives its tensors out in its own order, to one thread at a time. So of the threads that wait one takes the
//! load, and asks for one tensor after the other, without a lock; the others wait until a tensor has come out. The load
//! is put back after each tensor: the next thread goes on.
//!
//! A task takes the load only for as long as a poll of it takes. The load's waker is then one that wakes all tasks that
//! wait. A task that found the load taken is woken when the load is put back, since nothing has polled for it.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::{Condvar, Mutex};
use pinpool::copier::{Progress, may_wait};
use pinpool::{Error, Result};

use super::load::{Loading, Watch};
use super::tensor::DeviceTensor;

/// A load for many threads and tasks: [`Loading::share`]. Each waits for the tensors that it needs, by name, while the
/// others are being copied. A clone is another handle to the same load. Dropping the last one cancels the rest.
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
/// let load = Checkpoint::open(&path)?.loader(&copier).first("h.0.").start()?.share();
/// let other = load.clone();
/// let layer = std::thread::spawn(move || other.take("h.0.w"));
/// assert_eq!(layer.join().unwrap()?.map(|tensor| tensor.shape().to_vec()), Some(vec![4]));
/// assert!(load.take("h.0.w")?.is_none(), "a tensor comes out once");
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct SharedLoad(Arc<Shared>);

struct Shared {
    state: Mutex<SharedState>,
    /// A tensor has come out, or the load was put back.
    moved: Condvar,
    watch: Watch,
}

struct SharedState {
    /// `None` while a thread has it.
    loading: Option<Loading>,
    /// Those that were not taken: on the device, or not yet.
    tensors: HashMap<Box<str>, Option<DeviceTensor>>,
    /// What the load ended with.
    ended: Option<Error>,
    /// Tasks that wait: those that the load wakes, and those that found it taken.
    tasks: Vec<Arc<Waker>>,
    missed: Vec<Arc<Waker>>,
}

impl SharedState {
    /// What there is of a tensor. `None`: it is to be waited for.
    fn found(&mut self, name: &str) -> Option<Result<Option<DeviceTensor>>> {
        match self.tensors.get(name) {
            None => Some(Ok(None)),
            Some(Some(_)) => Some(Ok(self.tensors.remove(name).flatten())),
            Some(None) => self.ended.clone().map(Err),
        }
    }
}

/// The load's waker, for tasks. It does not keep the load, which has it.
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

impl SharedLoad {
    pub(super) fn new(loading: Loading, watch: Watch) -> Self {
        let tensors = loading.tensors().map(|tensor| (tensor.name().into(), None)).collect();
        let state = SharedState {
            loading: Some(loading),
            tensors,
            ended: None,
            tasks: Vec::new(),
            missed: Vec::new(),
        };
        Self(Arc::new(Shared { state: Mutex::new(state), moved: Condvar::new(), watch }))
    }

    /// Takes a tensor, and waits until it is on the device. `None`: the load has none of this name, or it was taken.
    ///
    /// # Errors
    /// Of a tensor that is not on the device when the load ends: what the load has ended with (see [`Loading`]), for
    /// each of them. [`Error::Unsupported`] where it would have to wait on a thread that must not (in a waker, a source
    /// or a sink); [`Error::Forked`].
    pub fn take(&self, name: &str) -> Result<Option<DeviceTensor>> {
        check_fork()?;
        loop {
            let mut state = self.0.state.lock();
            if let Some(found) = state.found(name) {
                return found;
            }
            may_wait()?;
            let Some(loading) = state.loading.take() else {
                self.0.moved.wait(&mut state);
                continue;
            };
            drop(state);
            let mut turn = Turn { shared: &self.0, loading: Some(loading) };
            let next = turn.loading.as_mut().and_then(Loading::next_blocking);
            turn.put(next);
        }
    }

    /// The same for a task, which is not blocked, on any runtime. A future that is dropped has taken nothing.
    ///
    /// # Errors
    /// As for [`take`](Self::take), but for [`Error::Unsupported`].
    pub async fn take_async(&self, name: &str) -> Result<Option<DeviceTensor>> {
        poll_fn(|cx| self.poll_take(cx, name)).await
    }

    fn poll_take(&self, cx: &Context<'_>, name: &str) -> Poll<Result<Option<DeviceTensor>>> {
        check_fork()?;
        // Before the lock: cloning a waker is code of the program's.
        let task = Arc::new(cx.waker().clone());
        let waker = Waker::from(Arc::new(WakesTasks(Arc::downgrade(&self.0))));
        loop {
            let mut state = self.0.state.lock();
            if let Some(found) = state.found(name) {
                return Poll::Ready(found);
            }
            let loading = state.loading.take();
            let list = if loading.is_some() { &mut state.tasks } else { &mut state.missed };
            if !list.iter().any(|other| other.will_wake(cx.waker())) {
                list.push(task.clone());
            }
            drop(state);
            let Some(loading) = loading else { return Poll::Pending };
            let mut turn = Turn { shared: &self.0, loading: Some(loading) };
            let polled = turn.loading.as_mut().map_or(Poll::Ready(None), |loading| {
                pin!(loading.next_tensor()).poll(&mut Context::from_waker(&waker))
            });
            match polled {
                Poll::Ready(next) => turn.put(next),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// The number of tensors that were not taken.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.state.lock().tensors.len()
    }

    /// How far the load has come, as [`Loading::progress`] says it. It is over when all of its transfers are, whether or
    /// not their tensors have come out. Waits for no thread that waits for a tensor.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.0.watch.progress()
    }

    /// Cancels the load, as [`Loading::cancel`] does.
    pub fn cancel(&self) {
        self.0.watch.cancel();
    }
}

/// To be called before the lock, which a thread of the parent may have had when it forked.
fn check_fork() -> Result<()> {
    if pinpool::forked() { Err(Error::Forked) } else { Ok(()) }
}

/// The load, while a thread has it. Its drop puts the load back, also when the thread panics.
struct Turn<'a> {
    shared: &'a Shared,
    loading: Option<Loading>,
}

impl Turn<'_> {
    /// The load has given a tensor, or has ended: whoever waits looks.
    fn put(self, next: Option<Result<DeviceTensor>>) {
        let mut state = self.shared.state.lock();
        match next {
            Some(Ok(tensor)) => {
                // The places of tensors that were taken are the takers'.
                if let Some(place) = state.tensors.get_mut(tensor.name()) {
                    *place = Some(tensor);
                }
            }
            Some(Err(error)) => state.ended = Some(error),
            None => state.ended = Some(Error::Closed),
        }
        let tasks = std::mem::take(&mut state.tasks);
        state.missed.extend(tasks);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.loading = self.loading.take();
        let missed = std::mem::take(&mut state.missed);
        drop(state);
        self.shared.moved.notify_all();
        wake_all(missed.into_iter());
    }
}

impl std::fmt::Debug for SharedLoad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedLoad").field("left", &self.left()).finish_non_exhaustive()
    }
}

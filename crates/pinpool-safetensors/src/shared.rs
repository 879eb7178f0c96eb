//! A load whose tensors several threads wait for, by name.
//!
//! A load gives its tensors out in its own order, to one thread at a time. So of the threads that wait one takes the
//! load, and asks for one tensor after the other, without a lock; the others wait until a tensor has come out. The load
//! is put back after each tensor: the next thread goes on.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use pinpool::copier::{Progress, may_wait};
use pinpool::{Error, Result};

use super::load::{Loading, Watch};
use super::tensor::DeviceTensor;

/// A load for many threads: [`Loading::share`]. Each waits for the tensors that it needs, by name, while the others are
/// being copied. A clone is another handle to the same load. Dropping the last one cancels the rest.
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
}

impl SharedLoad {
    pub(super) fn new(loading: Loading, watch: Watch) -> Self {
        let tensors = loading.tensors().map(|tensor| (tensor.name().into(), None)).collect();
        let state = SharedState { loading: Some(loading), tensors, ended: None };
        Self(Arc::new(Shared { state: Mutex::new(state), moved: Condvar::new(), watch }))
    }

    /// Takes a tensor, and waits until it is on the device. `None`: the load has none of this name, or it was taken.
    ///
    /// # Errors
    /// Of a tensor that is not on the device when the load ends: what the load has ended with (see [`Loading`]), for
    /// each of them. [`Error::Unsupported`] where it would have to wait on a thread that must not (in a waker, a source
    /// or a sink); [`Error::Forked`].
    pub fn take(&self, name: &str) -> Result<Option<DeviceTensor>> {
        // Before the lock, which a thread of the parent may have had when it forked.
        if pinpool::forked() {
            return Err(Error::Forked);
        }
        let mut state = self.0.state.lock();
        loop {
            match state.tensors.get(name) {
                None => return Ok(None),
                Some(Some(_)) => return Ok(state.tensors.remove(name).flatten()),
                Some(None) => {}
            }
            if let Some(error) = &state.ended {
                return Err(error.clone());
            }
            may_wait()?;
            let Some(loading) = state.loading.take() else {
                self.0.moved.wait(&mut state);
                continue;
            };
            drop(state);
            let mut turn = Turn { shared: &self.0, loading: Some(loading) };
            let next = turn.loading.as_mut().and_then(Loading::next_blocking);
            state = self.0.state.lock();
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
            drop(state);
            drop(turn);
            state = self.0.state.lock();
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

/// The load, while a thread has it. Its drop puts the load back, also when the thread panics.
struct Turn<'a> {
    shared: &'a Shared,
    loading: Option<Loading>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.shared.state.lock().loading = self.loading.take();
        self.shared.moved.notify_all();
    }
}

impl std::fmt::Debug for SharedLoad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedLoad").field("left", &self.left()).finish_non_exhaustive()
    }
}

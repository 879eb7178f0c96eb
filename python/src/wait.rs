//! Waits that other Python threads do not notice, and that Ctrl-C ends.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

/// How long a signal may wait for a waiting thread to look.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Rung by the thread that completes what is waited for. Calls nothing of Python's.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    rings: Condvar,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rung.lock() = true;
        self.rings.notify_one();
    }
}

impl Bell {
    /// Waits until it is rung, until a deadline, or until signals are to be looked for.
    fn wait(&self, deadline: Option<Instant>) {
        let look = Instant::now() + LOOK;
        let until = deadline.map_or(look, |deadline| deadline.min(look));
        let mut rung = self.rung.lock();
        while !*rung && !self.rings.wait_until(&mut rung, until).timed_out() {}
        *rung = false;
    }
}

/// Waits for a future without the interpreter's lock. `None`: the deadline has passed.
///
/// # Errors
/// A signal handler's exception, such as `KeyboardInterrupt`.
pub(crate) fn wait<F>(
    py: Python<'_>,
    future: &mut F,
    deadline: Option<Instant>,
) -> PyResult<Option<F::Output>>
where
    F: Future<Output: Send> + Send + Unpin,
{
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    loop {
        let polled = py.detach(|| {
            let polled = Pin::new(&mut *future).poll(&mut Context::from_waker(&waker));
            if polled.is_pending() {
                bell.wait(deadline);
            }
            polled
        });
        if let Poll::Ready(output) = polled {
            return Ok(Some(output));
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Ok(None);
        }
    }
}

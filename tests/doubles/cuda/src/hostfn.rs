//! Host functions: what a stream has the CPU do in its order.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;

use crate::calls::call;
use crate::world::*;

/// As cuda.h has it.
pub type HostFn = unsafe extern "C" fn(*mut c_void);

/// A host function and its argument.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    function: HostFn,
    data: usize,
}

thread_local! {
    static RUNNING: Cell<bool> = const { Cell::new(false) };
    /// Calls that a host function made, which are written down when it has returned.
    static MADE: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// The code of a call that a host function makes. `None`: it is made from elsewhere.
pub fn refused(name: &'static str) -> Option<u32> {
    RUNNING.get().then(|| {
        MADE.with_borrow_mut(|made| made.push(name));
        NOT_PERMITTED
    })
}

impl World {
    /// Runs it. The caller has the world's lock, which a host function must not need.
    pub fn run_host(&mut self, task: Task) {
        RUNNING.set(true);
        // SAFETY: the call that queued it promised that both stay valid until the work was seen complete.
        unsafe { (task.function)(task.data as *mut c_void) };
        RUNNING.set(false);
        for name in MADE.take() {
            let _: Outcome = self.violate("HOST-1", format!("{name} from a host function"), NOT_PERMITTED);
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(stream: *mut c_void, function: Option<HostFn>, data: *mut c_void) -> u32 {
    const NAME: &str = "cuLaunchHostFunc";
    call(NAME, |w| {
        let Some(function) = function else { return w.violate("ARG-1", NAME, INVALID_VALUE) };
        let task = Task { function, data: data as usize };
        w.submit(NAME, stream as usize, Op::Host(task)).map(drop)
    })
}

//! The barrier that all threads of the process execute.
//!
//! `membarrier` with the private expedited command interrupts every core that runs a thread of this
//! process and makes it execute a full fence. The process registers for it first. The kernel
//! documents no failure after that, but a sandbox that is set up later may refuse the call.

use libc::{
    MEMBARRIER_CMD_PRIVATE_EXPEDITED as BARRIER, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED as REGISTER,
};

/// Registers this process for [`membarrier`]. `false`: the kernel or a sandbox refuses.
pub(crate) fn membarrier_register() -> bool {
    // One call now, to find out about a sandbox that allows the registration and not the barrier.
    command(REGISTER) && membarrier()
}

/// Executes a full fence on every core that runs a thread of this process. To be called only after
/// [`membarrier_register`] has returned `true`. `false`: no fence, since a later sandbox refuses
/// the call.
pub(crate) fn membarrier() -> bool {
    command(BARRIER)
}

fn command(command: libc::c_int) -> bool {
    // SAFETY: membarrier takes numbers only and changes no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, libc::c_long::from(command), 0, 0) == 0 }
}

/// Ends the process with a reason on stderr: for a state in which going on is unsound.
pub(crate) fn die(why: &str) -> ! {
    let text = format!("pinpool: {why}\n");
    // Not by std's handle, since another thread may hold its lock.
    // SAFETY: a string and its length. A failure to write it makes no difference.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    std::process::abort()
}

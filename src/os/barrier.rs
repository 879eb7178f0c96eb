//! The barrier that all threads of the process execute.
//!
//! `membarrier` with the private expedited command interrupts every core that runs a thread of this process and makes
//! it execute a full fence. The process registers for it first. The kernel documents no failure after that, but a
//! sandbox that is set up later may refuse the call.

#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(not(target_os = "linux"))]
pub(crate) use other::*;

#[cfg(target_os = "linux")]
mod linux {
    use libc::c_long;

    fn command(command: c_long) -> c_long {
        // SAFETY: membarrier takes numbers only and changes no memory.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0 as c_long, 0 as c_long) }
    }

    /// Registers this process for [`membarrier`]. `false`: the kernel does not have it, or a sandbox forbids it.
    pub(crate) fn membarrier_register() -> bool {
        const REGISTER: c_long = libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED as c_long;
        const USE: c_long = libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED as c_long;
        let known = command(libc::MEMBARRIER_CMD_QUERY as c_long);
        if known < 0 || known & (REGISTER | USE) != (REGISTER | USE) || command(REGISTER) != 0 {
            return false;
        }
        // One call now, to find out about a sandbox that allows the registration and not the barrier.
        command(USE) == 0
    }

    /// Executes a full fence on every core that runs a thread of this process. To be called only after
    /// [`membarrier_register`] has returned `true`.
    ///
    /// `true`: done. `false`: a sandbox that was set up since then refuses the call. (The kernel documents no failure
    /// after registration.)
    pub(crate) fn membarrier() -> bool {
        command(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED as c_long) == 0
    }

    /// Ends the process and writes the reason to stderr: for a state in which going on would be unsound.
    pub(crate) fn die(why: &str) -> ! {
        let text = format!("pinpool: {why}\n");
        // Not by std's handle, since another thread may hold its lock.
        // SAFETY: a string and its length. A failure to write it makes no difference.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
        std::process::abort()
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    pub(crate) fn membarrier_register() -> bool {
        false
    }

    pub(crate) fn membarrier() -> bool {
        false
    }

    pub(crate) fn die(why: &str) -> ! {
        eprintln!("pinpool: {why}");
        std::process::abort()
    }
}

#[cfg(all(test, target_os = "linux", not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_barrier_works_once_registered() {
        if membarrier_register() {
            assert!(membarrier());
            assert!(membarrier_register(), "registering twice is harmless");
        }
    }
}

//! The barrier that all threads of the process execute, and what replaces it.
//!
//! `membarrier` with the private expedited command interrupts every core that runs a thread of this process and makes
//! it execute a full fence. The process registers for it first. The kernel documents no failure after that, but a
//! sandbox that is set up later may refuse the call. What then replaces the barrier is [`is_blocked`].

#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(not(target_os = "linux"))]
pub(crate) use other::*;

#[cfg(target_os = "linux")]
mod linux {
    use std::fs;

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

    /// The system's number of this thread. The number may be given to another thread after this one has ended.
    pub(crate) fn thread_number() -> u32 {
        // SAFETY: the call takes nothing and cannot fail.
        u32::try_from(unsafe { libc::syscall(libc::SYS_gettid) }).unwrap_or_default()
    }

    /// Whether a thread of this process is certain to be blocked in the kernel at some moment of this call. Then all
    /// that the thread has written before is visible to the caller, and the thread sees all that the caller has written
    /// before.
    ///
    /// The kernel tells which system call a thread is blocked in (`/proc/self/task/N/syscall`). It looks that up only
    /// for a thread that it has found off its processor, under the lock of that processor's run queue
    /// (`wait_task_inactive`). The thread had to take that lock to leave the processor, and has to take it to come
    /// back. For any other thread the kernel says "running". `false` also if the kernel does not tell, or the thread
    /// has ended. (For the calling thread the kernel tells the call that asks.)
    pub(crate) fn is_blocked(thread: u32) -> bool {
        let call = fs::read_to_string(format!("/proc/self/task/{thread}/syscall"));
        call.is_ok_and(|call| call.starts_with(|first: char| first == '-' || first.is_ascii_digit()))
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

    pub(crate) fn thread_number() -> u32 {
        0
    }

    pub(crate) fn is_blocked(_thread: u32) -> bool {
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
    fn tells_who_is_blocked() {
        assert!(!is_blocked(u32::MAX), "there is none of that number");
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            tell.send(thread_number()).unwrap();
            ends.recv().unwrap_err();
        });
        let number = told.recv().unwrap();
        // A thread that computes is not blocked.
        let (stop, computes) =
            (std::sync::atomic::AtomicBool::new(false), std::sync::atomic::AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                computes.store(thread_number(), std::sync::atomic::Ordering::Relaxed);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let computing = || computes.load(std::sync::atomic::Ordering::Relaxed);
            while computing() == 0 {
                std::thread::yield_now();
            }
            let looks = (0..100).map(|_| is_blocked(computing()));
            let blocked = looks.filter(|blocked| *blocked).count();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(blocked, 0);
        });
        let since = std::time::Instant::now();
        // A kernel may lack this file; then no thread is found blocked.
        let tells = std::path::Path::new("/proc/self/syscall").exists();
        while tells && !is_blocked(number) {
            assert!(since.elapsed() < std::time::Duration::from_secs(20), "it sleeps");
            std::thread::yield_now();
        }
        drop(end);
        other.join().unwrap();
    }

    #[test]
    fn the_barrier_works_once_registered() {
        if membarrier_register() {
            assert!(membarrier());
            assert!(membarrier_register(), "registering twice is harmless");
        }
    }
}

//! What calls, tests and both vendors share: how a call finds its world and what it begins with, and the handle of a
//! test to a world of its own.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::world::World;
use crate::{acl, cuda};

/// A call's outcome: a code other than zero is the error.
pub type Outcome<T = ()> = Result<T, u32>;

/// The error, though no rule is broken, if that is so.
pub fn fails_if(code: u32, is_so: bool) -> Outcome {
    if is_so { Err(code) } else { Ok(()) }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vendor {
    #[default]
    Cuda,
    Acl,
}

/// The bits of a handle that are its world's number begin here, and those of a device address there.
const HANDLE_BITS: u32 = 32;
const ADDRESS_BITS: u32 = 40;
/// Worlds have numbers of so many bits.
const NUMBER_BITS: u32 = 16;
/// How many devices a world can have: world N has the devices from N times this on.
pub const DEVICES: usize = 16;

impl Vendor {
    /// Where made-up device addresses begin: no CPU can read there.
    pub fn base(self) -> usize {
        self.either(0x7f00_0000_0000_0000, 0x0d00_0000_0000_0000)
    }

    /// What differs between the two: an error's code, mostly.
    pub fn either<T>(self, cuda: T, acl: T) -> T {
        match self {
            Self::Cuda => cuda,
            Self::Acl => acl,
        }
    }

    /// The codes for a handle that names nothing, and where there is no more memory.
    pub fn no_handle(self) -> u32 {
        self.either(cuda::INVALID_HANDLE, acl::INVALID_HANDLE)
    }

    pub fn no_memory(self) -> u32 {
        self.either(cuda::OUT_OF_MEMORY, acl::MEMORY_ALLOCATION)
    }

    /// The code where no such context is there, and for a stream or an event of another one.
    pub fn no_context(self) -> u32 {
        self.either(cuda::INVALID_CONTEXT, acl::CONTEXT_NULL)
    }

    pub fn other_context(self) -> u32 {
        self.either(cuda::INVALID_HANDLE, acl::STREAM_CONTEXT)
    }

    /// The code of a call while the library takes itself down.
    fn ended(self) -> u32 {
        self.either(cuda::DEINITIALIZED, acl::UNINITIALIZE)
    }

    /// Whether a context is of no use any more after an error with this code; of Ascend, the device.
    pub fn loses(self, code: u32) -> bool {
        match self {
            Self::Cuda => matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810),
            // Lost heartbeat; timeouts and exceptions of its cores; memory errors; its channel closed.
            Self::Acl => matches!(
                code,
                507_010 | 507_014..=507_018 | 507_034..=507_036 | 507_042..=507_045 | 507_053..=507_057 | 507_901
            ),
        }
    }

    /// The number of the world that a handle, or an address of device memory, is of. 0 for what is neither.
    fn number_of(self, what: usize) -> usize {
        let bits = if what >= self.base() { ADDRESS_BITS } else { HANDLE_BITS };
        what >> bits & ((1 << NUMBER_BITS) - 1)
    }

    /// The number of the world in which the calling thread is.
    pub fn here(self) -> usize {
        match self.number_of(self.current()) {
            0 => ENTERED.with(|entered| entered[self as usize].get()),
            number => number,
        }
    }

    /// Calls of this thread that name nothing are made to the world with that number from now on.
    pub fn enter(self, number: usize) {
        ENTERED.with(|entered| entered[self as usize].set(number));
        self.stack(Stack::clear);
    }

    /// The calling thread's current context; 0: none.
    pub fn current(self) -> usize {
        self.stack(|stack| stack.last())
    }

    pub fn stack<R>(self, body: impl FnOnce(&mut Stack) -> R) -> R {
        STACKS.with(|stacks| body(&mut stacks[self as usize].borrow_mut()))
    }

    /// The world with this number, or that of a loaded library.
    pub fn world(self, number: usize) -> MutexGuard<'static, World> {
        let mut worlds = self.worlds();
        let at = if number < worlds.len() { number } else { 0 };
        let world = worlds.get(at).copied().unwrap_or_else(|| self.add(&mut worlds));
        drop(worlds);
        locked(world)
    }

    fn worlds(self) -> MutexGuard<'static, Vec<&'static Mutex<World>>> {
        locked(&WORLDS[self as usize])
    }

    /// Worlds stay to the end of the process: threads of the program may name them as late.
    fn add(self, worlds: &mut Vec<&'static Mutex<World>>) -> &'static Mutex<World> {
        assert!(worlds.len() < 1 << NUMBER_BITS, "too many worlds");
        let mut world = World::new(self, worlds.len());
        if worlds.is_empty() {
            setup().iter().for_each(|command| _ = world.command(&format!("setup {command}")));
        }
        let made: &'static _ = Box::leak(Box::new(Mutex::new(world)));
        worlds.push(made);
        made
    }

    /// The number of worlds beside that of a loaded library.
    pub fn own_worlds(self) -> usize {
        self.worlds().len().saturating_sub(1)
    }

    /// The report of a loaded library when the process ends and other threads do not go on. `None`: one of them has
    /// a lock. (In the child of a fork a thread that is missing may have it for ever.)
    pub fn last_report(self) -> Option<String> {
        let worlds = WORLDS[self as usize].try_lock().ok()?;
        let Some(world) = worlds.first() else { return Some(String::new()) };
        Some(world.try_lock().ok()?.report())
    }
}

static WORLDS: [Mutex<Vec<&'static Mutex<World>>>; 2] = [const { Mutex::new(Vec::new()) }; 2];

thread_local! {
    /// The world of calls that name nothing, where no context is current.
    static ENTERED: [Cell<usize>; 2] = const { [const { Cell::new(0) }; 2] };
    static STACKS: [RefCell<Stack>; 2] = const { [const { RefCell::new(Stack { contexts: [0; 64], len: 0 }) }; 2] };
}

/// The contexts pushed on a thread, the current one last. It has no destructor, since threads call the driver when they
/// end, too.
pub struct Stack {
    contexts: [usize; 64],
    len: usize,
}

impl Stack {
    pub fn last(&self) -> usize {
        self.contexts[..self.len].last().copied().unwrap_or(0)
    }

    pub fn push(&mut self, context: usize) {
        self.contexts[self.len] = context;
        self.len += 1;
    }

    pub fn pop(&mut self) -> Option<usize> {
        let last = self.last();
        self.len = self.len.checked_sub(1)?;
        Some(last)
    }

    /// Puts a context in the place of the current one.
    pub fn set(&mut self, context: usize) {
        let _ = self.pop();
        if context != 0 {
            self.push(context);
        }
    }

    fn clear(&mut self) {
        self.len = 0;
    }
}

/// What a call names, by which its world is found.
pub enum At {
    /// Nothing: its world is the calling thread's.
    Here,
    /// A handle, or device memory.
    Of(usize),
    /// A device, by the vendor's number for it.
    On(i32),
}

impl At {
    fn number(&self, vendor: Vendor) -> usize {
        let named = match self {
            Self::Here => 0,
            Self::Of(what) => vendor.number_of(*what),
            Self::On(device) => usize::try_from(*device).map_or(0, |device| device / DEVICES),
        };
        if named == 0 { vendor.here() } else { named }
    }
}

/// Counts a call in the world that it names, fails it if a test asked for that, and else makes it.
pub fn call(vendor: Vendor, name: &'static str, at: At, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    let Some(_inside) = crate::end::Inside::begin(name) else { return vendor.ended() };
    let number = at.number(vendor);
    let code = made(&mut vendor.world(number), name, &at, body);
    returns(vendor, number, name, code)
}

/// What every call ends with, without the world's lock.
fn returns(vendor: Vendor, number: usize, name: &str, code: u32) -> u32 {
    match vendor {
        Vendor::Cuda => cuda::run_due(number),
        Vendor::Acl => acl::note_error(name, code),
    }
    code
}

fn made(world: &mut World, name: &'static str, at: &At, body: impl FnOnce(&mut World) -> Outcome) -> u32 {
    world.count(name);
    let may_call = match world.vendor {
        Vendor::Cuda => world.may_call_cuda(),
        Vendor::Acl => world.may_call_acl(),
    };
    if let Err(code) = may_call {
        return code;
    }
    let Some((code, after)) = world.strike(name) else { return body(world).err().unwrap_or_default() };
    if after {
        world.stalls = code == 0;
        let made = body(world).err().unwrap_or_default();
        world.stalls = false;
        if code == 0 {
            return made;
        }
    }
    if world.vendor.loses(code) {
        let named = if let At::Of(handle) = at { world.context_of(*handle) } else { None };
        let current = Some(world.vendor.current()).filter(|context| *context != 0);
        if let Some(context) = named.or(current).or_else(|| world.contexts.keys().next().copied()) {
            world.kill(context, code);
        }
    }
    world.ended |= world.vendor == Vendor::Cuda && code == cuda::DEINITIALIZED;
    code
}

/// A call that waits for what is queued. While the machine hangs it waits without the world's lock, so that other
/// threads may go on, at most so many milliseconds (negative: for ever) before it gives that code; it counts as one call.
///
/// `check` is made once; `go_on` finds what is waited for and, unless the machine hangs, runs it.
pub fn waiting_call(
    vendor: Vendor,
    name: &'static str,
    at: At,
    timeout: (i32, u32),
    check: impl FnOnce(&mut World) -> Outcome,
    mut go_on: impl FnMut(&mut World) -> Outcome,
) -> u32 {
    let (number, since, mut waits) = (at.number(vendor), std::time::Instant::now(), false);
    let code = call(vendor, name, at, |w| {
        check(w)?;
        waits = w.hung;
        go_on(w)
    });
    if !waits || code != 0 {
        return code;
    }
    loop {
        std::thread::sleep(std::time::Duration::from_millis(1));
        let mut world = vendor.world(number);
        if !world.hung {
            let code = go_on(&mut world).err().unwrap_or_default();
            drop(world);
            return returns(vendor, number, name, code);
        }
        if u128::try_from(timeout.0).is_ok_and(|limit| since.elapsed().as_millis() >= limit) {
            return returns(vendor, number, name, timeout.1);
        }
    }
}

/// The commands that say what the machine of a loaded library is: those of the variable `PINPOOL_SIM`, with semicolons
/// between them.
pub fn setup() -> Vec<String> {
    let text = std::env::var("PINPOOL_SIM").unwrap_or_default();
    text.split(';').filter(|command| !command.is_empty()).map(str::to_owned).collect()
}

/// What panics leave is whole: each call changes a world in its own steps.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn thread() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);
    thread_local! {
        // Relaxed: only that no two are the same counts.
        static THREAD: usize = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    THREAD.with(|number| *number)
}

/// A machine with two devices, in a world of its own: for one test.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub(crate) vendor: Vendor,
    number: usize,
    lacks: &'static [&'static str],
}

impl Machine {
    /// Two GPUs with a driver of that version, in a world that this thread has entered.
    pub fn gpus(driver: cuda::Driver) -> Self {
        Self::new(Vendor::Cuda, driver.lacks())
    }

    /// Two Ascend devices with that library, in a world that this thread has entered.
    pub fn npus(library: acl::Library) -> Self {
        let made = Self::new(Vendor::Acl, library.lacks());
        made.command(&format!("setup library {library:?}"));
        made
    }

    fn new(vendor: Vendor, lacks: &'static [&'static str]) -> Self {
        // For threads that have entered no world.
        vendor.world(0).ready = true;
        let mut worlds = vendor.worlds();
        let number = worlds.len();
        vendor.add(&mut worlds);
        drop(worlds);
        vendor.enter(number);
        Self { vendor, number, lacks }
    }

    /// The entry point with this name, if the machine's library has it.
    pub fn symbol(self, name: &str) -> Option<*const c_void> {
        let found = match self.vendor {
            Vendor::Cuda => cuda::symbol(name),
            Vendor::Acl => acl::symbol(name),
        };
        found.filter(|_| !self.lacks.contains(&name))
    }

    /// What the names of its devices begin with.
    pub fn family(self) -> &'static str {
        self.vendor.either("cuda", "acl")
    }

    /// Calls of this thread that name nothing and have no current context are made to this world from now on.
    pub fn enter(self) {
        self.vendor.enter(self.number);
    }

    /// The vendor's number for the device that is the first, the second and so on in this world.
    pub fn ordinal(self, device: usize) -> u32 {
        (self.number * DEVICES + device) as u32
    }

    /// Rules that threads which are in no world have broken, whichever test they are of. None of a loaded library's.
    pub fn strays() -> Vec<String> {
        let with_worlds = [Vendor::Cuda, Vendor::Acl].into_iter().filter(|vendor| vendor.own_worlds() > 0);
        with_worlds.flat_map(|vendor| vendor.world(0).violations.clone()).collect()
    }

    /// Sends a command: see `control.rs`.
    pub fn command(self, text: &str) -> String {
        self.world().command(text)
    }

    pub(crate) fn world(self) -> MutexGuard<'static, World> {
        self.vendor.world(self.number)
    }
}

/// Declares a vendor's entry points: the arguments of its header, with handles as numbers; what the call names; and
/// what it does in that world. With them, how one is found by its name; behind `also` stand those of other shapes.
macro_rules! entries {
    ($vendor:ident, $symbol:ident, also [$($other:ident)*]; $($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) in $at:expr, |$w:ident| $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                #[allow(unused_imports, reason = "not every call needs them")]
                use $crate::common::At::*;
                // SAFETY: the caller's promise, as the header has it: what is read or written is there, or null.
                #[allow(unused_unsafe, reason = "not every call has pointers")]
                $crate::common::call($crate::common::Vendor::$vendor, stringify!($name), $at, |$w| unsafe { $body })
            }
        )*

        /// The entry point of this file with this name.
        pub fn $symbol(name: &str) -> Option<*const std::ffi::c_void> {
            match name {
                $(stringify!($name) => Some($name as *const std::ffi::c_void),)*
                $(stringify!($other) => Some($other as *const std::ffi::c_void),)*
                _ => None,
            }
        }
    };
}

pub(crate) use entries;

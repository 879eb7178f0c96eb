//! What the worlds of all vendors have: numbers for handles, calls that are to fail, counts, and what was broken.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A call's outcome: a code other than zero is the error.
pub type Outcome<T = ()> = Result<T, u32>;

/// A call that is to fail.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Its name; empty: any call.
    pub call: String,
    /// Fails when this comes to zero.
    pub left: u64,
    /// 0, on CUDA: the call succeeds. With `after` what it queues is held, with all that follows on its stream;
    /// without, it does nothing.
    pub code: u32,
    /// The call does its work and fails afterwards.
    pub after: bool,
}

/// The bits of a handle that are its world's number begin here, and those of a device address there.
const HANDLE_BITS: u32 = 32;
const ADDRESS_BITS: u32 = 40;
/// Worlds have numbers of so many bits.
const NUMBER_BITS: u32 = 16;
/// How many devices a world can have: world N has the devices from N times this on.
pub const DEVICES: usize = 16;

pub struct Common {
    pub number: usize,
    /// Commands that are made again after a reset: what the machine is.
    pub setup: Vec<String>,
    pub violations: Vec<String>,
    pub notes: BTreeMap<&'static str, u64>,
    pub counts: BTreeMap<&'static str, u64>,
    /// The names of calls in their order, while that is asked for.
    pub trace: Option<Vec<&'static str>>,
    pub faults: Vec<Fault>,
    /// Calls that were made to fail.
    pub struck: u64,
    /// Nothing runs while it is set.
    pub hung: bool,
    /// Queries run nothing: work runs step by step (`cuda/hand.rs`), and as far as a call that synchronises needs.
    /// Copies of memory that is not page-locked are as late as others, and what is registered need only be mapped in
    /// some way.
    pub by_hand: bool,
    /// Whether new streams get the handles of destroyed ones.
    pub reuse: bool,
    /// What contexts had left when they were destroyed.
    pub left: BTreeMap<&'static str, usize>,
    /// Numbers given so far that are never given again.
    pub ids: u64,
    next: usize,
    next_address: u64,
    random: u64,
}

impl Common {
    /// Handles, and addresses from `base` on, are apart from each other, from those of other worlds, and from what any
    /// call could take for another argument.
    pub fn new(number: usize, base: u64) -> Self {
        Self {
            number,
            setup: Vec::new(),
            violations: Vec::new(),
            notes: BTreeMap::new(),
            counts: BTreeMap::new(),
            trace: None,
            faults: Vec::new(),
            struck: 0,
            hung: false,
            by_hand: false,
            reuse: false,
            left: BTreeMap::new(),
            ids: (number as u64) << HANDLE_BITS,
            next: (number << HANDLE_BITS) + 0x5eed_0000,
            next_address: base + ((number as u64) << ADDRESS_BITS),
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// As when it was made; but no handle, number or device address is ever used twice.
    pub fn reset(&mut self) {
        let Self { number, ids, next, next_address, .. } = *self;
        let setup = std::mem::take(&mut self.setup);
        *self = Self { setup, ids, next, next_address, ..Self::new(number, 0) };
    }

    pub fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
        self.trace.iter_mut().for_each(|trace| trace.push(name));
    }

    /// Whether a call is to fail: the code, and whether it does its work all the same.
    pub fn strike(&mut self, name: &str) -> Option<(u32, bool)> {
        let mut due = None;
        for fault in self.faults.iter_mut().filter(|f| f.left > 0 && (f.call == name || f.call.is_empty())) {
            fault.left -= 1;
            if fault.left == 0 {
                due = Some((fault.code, fault.after));
            }
        }
        self.struck += u64::from(due.is_some());
        due
    }

    pub fn violate<T>(&mut self, id: &str, text: impl std::fmt::Display, code: u32) -> Outcome<T> {
        self.violations.push(format!("{id} {text}"));
        Err(code)
    }

    /// A violation that the library lets pass.
    pub fn let_pass(&mut self, id: &str, text: impl std::fmt::Display) {
        self.violations.push(format!("{id} {text}"));
    }

    pub fn note(&mut self, what: &'static str) {
        *self.notes.entry(what).or_default() += 1;
    }

    /// How often a call was made.
    pub fn made(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    pub fn fresh(&mut self) -> usize {
        self.next += 16;
        self.next
    }

    /// Addresses that nothing else has or had, `offset` bytes behind the start of a page.
    pub fn address(&mut self, len: usize, offset: u64) -> u64 {
        let at = self.next_address.next_multiple_of(4096) + offset;
        // Room between two, so that leaving one never means reaching the next.
        self.next_address = at + (len as u64).next_multiple_of(4096) + 4096;
        at
    }

    pub fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// The driver's number for a device of this world.
    pub fn ordinal(&self, device: usize) -> i32 {
        (self.number * DEVICES + device) as i32
    }

    /// The device of this world that a driver's number names: all devices are counted, or those of this world.
    pub fn device(&self, device: i32) -> Option<usize> {
        let device = usize::try_from(device).ok()?;
        if device < DEVICES { Some(device) } else { device.checked_sub(self.number * DEVICES) }
    }

    /// The lines of a report that every vendor's has. `there`: what is there of each kind that is to be given back.
    pub fn report(&self, there: impl Iterator<Item = (&'static str, usize)>, over: bool) -> String {
        let mut all = crate::end::late();
        for violation in &self.violations {
            let _ = writeln!(all, "violation {violation}");
        }
        for (what, count) in there {
            let count = count + self.left.get(what).copied().unwrap_or(0);
            if count > 0 {
                let _ = writeln!(all, "leak {what} {count}");
            }
        }
        if over {
            all.push_str("over\n");
        }
        for (what, count) in &self.notes {
            let _ = writeln!(all, "note {what} {count}");
        }
        for (name, count) in &self.counts {
            let _ = writeln!(all, "call {name} {count}");
        }
        all
    }

    /// What tests ask of any world. `None`: it is none of these.
    pub fn command(&mut self, words: &[&str]) -> Option<String> {
        let on = |word: &str| word == "true";
        match words {
            // Makes the nth call of that name from now on fail once with a code: before it has done anything, or, with
            // `after`, when all is done. Codes after which a device, its context or the library is of no use have that
            // effect.
            ["fail", call, nth, code, after] => {
                let (left, code) = (nth.parse().ok()?, code.parse().ok()?);
                self.faults.push(Fault { call: (*call).into(), left, code, after: on(after) });
            }
            // No call is to fail any more.
            ["calm"] => self.faults.clear(),
            // Whether the machine was set up by that command.
            ["is", command @ ..] => return Some(self.setup.contains(&command.join(" ")).to_string()),
            // Writes down the names of calls from now on. `traced` gives them and ends that.
            ["trace"] => self.trace = Some(Vec::new()),
            ["traced"] => return Some(self.trace.take().unwrap_or_default().join(" ")),
            // How many calls were made to fail so far.
            ["struck"] => return Some(self.struck.to_string()),
            // While it is set nothing runs: queries say "not ready", and a call that synchronises waits.
            ["hang", hung] => self.hung = on(hung),
            // Queries run nothing from now on, and the order of steps follows from the seed.
            ["by-hand", seed] => {
                self.by_hand = true;
                self.random = seed.parse::<u64>().ok()?.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            }
            // While it is set, new streams get the handles of destroyed ones, as a driver's do.
            ["reuse", reuse] => self.reuse = on(reuse),
            _ => return None,
        }
        Some(String::new())
    }
}

/// The worlds of one vendor, by their numbers.
pub struct Worlds<W: 'static>(Mutex<Vec<&'static Mutex<W>>>);

impl<W> Worlds<W> {
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// A new world. Worlds stay to the end of the process: threads of the program may name them as late.
    pub fn add(&self, make: impl Fn(usize) -> W) -> usize {
        let mut worlds = locked(&self.0);
        if worlds.is_empty() {
            worlds.push(Box::leak(Box::new(Mutex::new(make(0)))));
        }
        let number = worlds.len();
        assert!(number < 1 << NUMBER_BITS, "too many worlds");
        worlds.push(Box::leak(Box::new(Mutex::new(make(number)))));
        number
    }

    /// What world 0 has to report, as far as a call has made it. `None`: a thread has it locked.
    pub fn last_report(&self, report: impl Fn(&W) -> String) -> Option<String> {
        let Some(world) = locked(&self.0).first().copied() else { return Some(String::new()) };
        Some(report(&*world.try_lock().ok()?))
    }

    /// The number of worlds beside that of a loaded library.
    pub fn count(&self) -> usize {
        locked(&self.0).len().saturating_sub(1)
    }

    /// The world with this number, or that of a loaded library.
    pub fn get(&self, number: usize, make: impl Fn(usize) -> W) -> &'static Mutex<W> {
        let mut worlds = locked(&self.0);
        if worlds.is_empty() {
            worlds.push(Box::leak(Box::new(Mutex::new(make(0)))));
        }
        let at = if number < worlds.len() { number } else { 0 };
        worlds[at]
    }
}

/// The number of the world that a handle, or an address of device memory from `base` on, is of. 0 for what is neither.
pub fn number_of(what: usize, base: u64) -> usize {
    let bits = if what as u64 >= base { ADDRESS_BITS } else { HANDLE_BITS };
    what >> bits & ((1 << NUMBER_BITS) - 1)
}

/// What panics leave is whole: each call changes a world in its own steps.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calling thread's number.
pub fn thread() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);
    thread_local! {
        // Relaxed: only that no two are the same counts.
        static THREAD: usize = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    THREAD.with(|number| *number)
}

/// The commands that say what the machine of a loaded library is: those of the variable `PINPOOL_SIM`, with semicolons
/// between them.
pub fn setup() -> Vec<String> {
    let text = std::env::var("PINPOOL_SIM").unwrap_or_default();
    text.split(';').filter(|command| !command.is_empty()).map(str::to_owned).collect()
}

pub fn overlaps(start: usize, len: usize, other: usize, other_len: usize) -> bool {
    start < other + other_len && other < start + len
}

/// Whether all of it is mapped for reading, and for writing if that is asked for.
pub fn is_mapped(start: usize, len: usize, written: bool) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut at = start;
    for line in maps.lines() {
        let mut words = line.split(' ');
        let (range, mode) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let parse = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        let (from, to) = range.split_once('-').map_or((0, 0), |(a, b)| (parse(a), parse(b)));
        if (from..to).contains(&at) && mode.starts_with('r') && (!written || mode[1..].starts_with('w')) {
            at = to;
        }
    }
    at >= start + len
}

/// Whether all of it is mapped in any way: quick, and less than `is_mapped` says.
pub fn is_there(start: usize, len: usize) -> bool {
    unsafe extern "C" {
        fn getpagesize() -> std::ffi::c_int;
        fn msync(start: usize, len: usize, flags: std::ffi::c_int) -> std::ffi::c_int;
    }
    const MS_ASYNC: std::ffi::c_int = 1;
    // SAFETY: asked that way, Linux only looks whether the pages are mapped.
    unsafe {
        let first = start - start % getpagesize() as usize;
        msync(first, start + len - first, MS_ASYNC) == 0
    }
}

/// Declares a driver's entry points, and how one is found by its name.
macro_rules! symbols {
    ($($module:ident: $($name:ident)*;)*) => {
        /// The entry point with this name. `None`: there is none.
        pub fn symbol(name: &str) -> Option<*const std::ffi::c_void> {
            match name {
                $($(stringify!($name) => Some($module::$name as *const std::ffi::c_void),)*)*
                _ => None,
            }
        }
    };
}

/// Declares entry points of a vendor: the arguments of its header, with handles as numbers; the world in which the call
/// is made; and what it does there.
macro_rules! entries {
    ($vendor:ident; $($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) in $number:expr, |$w:ident, $text:ident| $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            let $text = stringify!($name);
            // SAFETY: the caller's promise, as the header has it: what is read or written is there, or null.
            #[allow(unused_unsafe, unused_variables, reason = "not every call has pointers")]
            $crate::$vendor::calls::call($text, $number, |$w| unsafe { $body })
        }
    )*};
}

/// How a vendor's calls find their world, and how tests make one. `World` has `new`, `have_devices`, `report` and
/// `own`, which answers commands that no other vendor has; `$base` is where made-up device addresses begin, `$current`
/// the calling thread's current context, or 0, and `$leave` leaves that.
macro_rules! worlds {
    ($machines:ident, $base:expr, $current:expr, $leave:expr) => {
        static WORLDS: $crate::common::Worlds<World> = $crate::common::Worlds::new();

        thread_local! {
            /// The world of calls that name nothing, where no context is current.
            pub static DEFAULT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
        }

        /// The number of the world of a handle, or of device memory: for null and what has no world, that of the
        /// calling thread.
        pub fn of(what: usize) -> usize {
            match $crate::common::number_of(what, $base) {
                0 => here(),
                number => number,
            }
        }

        /// The number of the world in which the calling thread is.
        pub fn here() -> usize {
            match $crate::common::number_of($current, $base) {
                0 => DEFAULT.get(),
                number => number,
            }
        }

        /// The number of the world of a device, by the vendor's number for it.
        pub fn on(device: i32) -> usize {
            match usize::try_from(device).map_or(0, |device| device / $crate::common::DEVICES) {
                0 => here(),
                number => number,
            }
        }

        /// The world with this number.
        pub fn world(number: usize) -> std::sync::MutexGuard<'static, World> {
            $crate::common::locked(WORLDS.get(number, World::made))
        }

        /// The report of a loaded library when the process ends and other threads do not go on. `None`: one of them has
        /// the lock.
        pub fn last_report() -> Option<String> {
            WORLDS.last_report(World::report)
        }

        /// How many devices are counted: in a process that has worlds of its own, and for a thread that is in none of
        /// them, up to the last one's last.
        pub fn devices(of: &World) -> usize {
            match WORLDS.count() {
                count if count > 0 && of.number == 0 => (count + 1) * $crate::common::DEVICES,
                _ => of.number * $crate::common::DEVICES + of.devices.len(),
            }
        }

        /// A world of this vendor's devices, for one test.
        #[derive(Clone, Copy, Debug)]
        pub struct $machines {
            pub(super) number: usize,
        }

        impl $machines {
            /// Two devices, in a world that this thread has entered.
            pub(super) fn add() -> Self {
                let made = Self { number: WORLDS.add(World::made) };
                // For threads that have entered no world.
                world(0).ready = true;
                made.enter();
                made
            }

            /// Calls of this thread that name nothing and have no current context are made to this world from now on.
            pub fn enter(self) {
                DEFAULT.set(self.number);
                $leave;
            }

            /// The vendor's number for the device that is the first, the second and so on in this world.
            pub fn ordinal(self, device: usize) -> u32 {
                (self.number * $crate::common::DEVICES + device) as u32
            }

            /// Rules that threads which are in no world have broken, whichever test they are of. None of a loaded
            /// library's.
            pub fn strays() -> Vec<String> {
                if WORLDS.count() > 0 { world(0).violations.clone() } else { Vec::new() }
            }

            /// Sends a command: see `common.rs` and the vendor's `control.rs`.
            pub fn command(self, text: &str) -> String {
                world(self.number).command(text)
            }
        }

        impl World {
            fn made(number: usize) -> Self {
                let mut world = Self::new(number);
                world.have_devices(2, 256 << 20);
                if number == 0 {
                    for command in $crate::common::setup() {
                        world.command(&format!("setup {command}"));
                    }
                }
                world
            }

            /// Answers a command of a test: words with spaces between them.
            ///
            /// # Panics
            /// There is no such command.
            pub fn command(&mut self, text: &str) -> String {
                let words: Vec<&str> = text.split(' ').collect();
                if let Some(answer) = self.common.command(&words) {
                    return answer;
                }
                let number =
                    |word: &str| word.parse::<usize>().unwrap_or_else(|_| panic!("{text}: a number"));
                match words[..] {
                    // A command that is made again after a reset.
                    ["setup", ..] => {
                        let command = &text["setup ".len()..];
                        let answer = self.command(command);
                        self.setup.push(command.to_owned());
                        return answer;
                    }
                    // Everything as when the world was made; handles from before name nothing any more. Of what threads
                    // have of their own, only the calling thread's part is reset.
                    ["reset"] => {
                        let mut new = Self::new(self.number);
                        new.have_devices(2, 256 << 20);
                        std::mem::swap(&mut new.common, &mut self.common);
                        new.common.reset();
                        *self = new;
                        $leave;
                        for command in self.setup.clone() {
                            self.command(&command);
                        }
                    }
                    ["report"] => return self.report(),
                    // So many devices with so many bytes of memory each.
                    ["devices", count, memory] => self.have_devices(number(count), number(memory)),
                    _ => return self.own(text, &words, &number),
                }
                String::new()
            }
        }

        impl std::ops::Deref for World {
            type Target = $crate::common::Common;

            fn deref(&self) -> &Self::Target {
                &self.common
            }
        }

        impl std::ops::DerefMut for World {
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.common
            }
        }
    };
}

pub(crate) use {entries, symbols, worlds};

//! The same driver calls on the stand-in and on a real driver, and what the two say, side by side.
//!
//! A rule of the simulation is a sequence of plain calls. Each call that matters is a *step*, made by [`says!`]: it names
//! the code that the simulation gives. On the simulation another code fails at once. On a real driver the sequence goes
//! on, so that one run tells everything; what is known to differ is in one list, `listed.rs`. A difference that is not
//! listed fails, and so does one that is listed and is not there any more.
//!
//! What is no step is either the same on both, such as handles that are made on the way ([`made!`]: where that fails
//! the rule cannot be tried, which is told), or is the simulation's alone and asked behind [`Driver::is_stand_in`].
//!
//! On a real driver each rule has a process of its own, which tells each step before it is made. Where it dies or hangs,
//! that step is to be listed as not tried if that is how drivers are.

#![allow(unsafe_code, reason = "calling a driver")]

pub mod listed;

use std::ffi::{CStr, OsStr, c_char};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use listed::{LISTED, OnDriver};

use crate::support::doubles::{self, HANG, StandIn, gpu_name};
use pinpool_sim::cuda::Driver as Version;

/// Which rule the child tries, on which library; and for the test of the comparison, the step at which it is to die, and
/// a list of its own: `step:call:code`.
pub const RULE: &str = "PINPOOL_PROBE_RULE";
pub const LIBRARY: &str = "PINPOOL_PROBE_LIBRARY";
pub const DIES: &str = "PINPOOL_PROBE_DIES";
pub const KNOWN: &str = "PINPOOL_PROBE_KNOWN";
/// What a rule says that cannot go on.
const SHORT: &str = "GPUs that it needs:";
/// Longer than a rule takes, the driver's start included.
const LIMIT: Duration = Duration::from_secs(120);

pub const PAGE: usize = 4096;

/// A sequence that breaks a rule.
pub struct Rule {
    /// The test's name, which begins with the rule's id: `ctx_5_contexts_are_not_mixed`.
    pub name: &'static str,
    /// Whether a context is to be current when it starts.
    pub ready: bool,
    pub body: fn(&Driver),
}

/// The id that a test's name begins with: `CTX-5`.
pub fn id(name: &str) -> String {
    let mut parts = name.split('_');
    let (family, number) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    format!("{}-{number}", family.to_uppercase())
}

/// Calls an entry point whose arguments are numbers and pointers.
macro_rules! call {
    ($driver:expr, $name:literal $(, $argument:expr)*) => {
        $crate::support::doubles::gpu::Raw($driver.stand_in.clone()).call($name, &[$($argument as usize),*])
    };
}

/// The same for a call that writes one word to its first argument, and must succeed wherever it is made.
macro_rules! made {
    ($driver:expr, $name:literal $(, $argument:expr)*) => {{
        let mut made = 0_usize;
        assert_eq!(call!($driver, $name, &raw mut made $(, $argument)*), 0, $name);
        made
    }};
}

/// A step: the stand-in gives this code.
macro_rules! says {
    ($driver:expr, $code:expr, $name:literal $(, $argument:expr)*) => {
        $driver.step($name, $code, || call!($driver, $name $(, $argument)*))
    };
}

/// Rules: a test on the stand-in for each, and a list of them by the name given, which goes into the list of lists that
/// is tried on the real driver.
macro_rules! rules {
    ($list:ident: $($(#[$doc:meta])* $name:ident ($make:ident) |$driver:ident| $body:block)*) => {
        /// Rules of one topic.
        pub const $list: &[$crate::standin::probe::Rule] = &[$($crate::standin::probe::Rule {
            name: stringify!($name),
            ready: matches!(stringify!($make).as_bytes(), b"ready"),
            body: |$driver| $body,
        }),*];
        $($(#[$doc])* #[test] fn $name() {
            if $crate::support::doubles::simulated_elsewhere() {
                return;
            }
            let rule = $list.iter().find(|rule| rule.name == stringify!($name)).expect("it is in the list");
            (rule.body)(&$crate::standin::probe::Driver::$make());
        })*
    };
}

/// How the double itself behaves, where a driver is not to be compared: tests on the stand-in only.
macro_rules! behaviour {
    ($($(#[$doc:meta])* $name:ident ($make:ident) |$driver:ident| $body:block)*) => {
        $($(#[$doc])* #[test] fn $name() {
            if $crate::support::doubles::simulated_elsewhere() {
                return;
            }
            let $driver = $crate::standin::probe::Driver::$make();
            $body
        })*
    };
}

/// A driver that rules are tried on.
pub struct Driver {
    /// The library, which may be a real driver: then none of `standin_*` is there.
    pub stand_in: StandIn,
    real: bool,
    rule: &'static str,
    steps: AtomicUsize,
    /// What differs from what is listed.
    wrong: Mutex<Vec<String>>,
    /// There are not enough devices for all of the rule.
    short: AtomicBool,
}

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; PAGE]);

/// Memory that begins and ends with a page, so that a driver that counts in pages sees what the test means.
pub struct Pages(Vec<Page>);

impl std::ops::Deref for Pages {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: a page is its bytes and nothing else.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAGE) }
    }
}

impl std::ops::DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * PAGE) }
    }
}

impl Driver {
    fn new(stand_in: StandIn, real: bool, rule: &'static str) -> Self {
        let (steps, wrong, short) = (AtomicUsize::new(0), Mutex::default(), AtomicBool::new(false));
        Self { stand_in, real, rule, steps, wrong, short }
    }

    /// A simulated one that is not initialised.
    pub fn bare() -> Self {
        let stand_in = StandIn::loaded().unwrap_or_else(|| StandIn::gpus(Version::Cuda12_8));
        stand_in.command("bare");
        Self::new(stand_in, false, "")
    }

    /// Initialised, and device 0's primary context current.
    pub fn ready() -> Self {
        let driver = Self::bare();
        driver.start();
        driver
    }

    /// A library that is compared with what the stand-in says.
    fn real(library: &OsStr, rule: &Rule) -> Self {
        let stand_in = StandIn::any(Path::new(library), "sim_cuda").expect("it was loaded before");
        let driver = Self::new(stand_in, true, rule.name);
        if rule.ready {
            driver.start();
        }
        driver
    }

    fn start(&self) {
        assert_eq!(call!(self, "cuInit", 0), 0, "cuInit");
        self.current(0);
    }

    /// Calls of this thread are made to the same machine.
    pub fn enter(&self) {
        self.stand_in.enter();
    }

    /// The driver's number for the first device, the second and so on.
    pub fn ordinal(&self, device: usize) -> usize {
        let name = gpu_name(device);
        name.trim_start_matches("cuda:").parse().expect("a number")
    }

    /// Whether its answers beside the codes are the stand-in's own.
    pub fn is_stand_in(&self) -> bool {
        !self.real
    }

    /// Whether there are that many devices. If not, the rule ends here, and that is written down.
    pub fn has_devices(&self, count: usize) -> bool {
        // Both write an int.
        let there = made!(self, "cuDeviceGetCount") & 0xFFFF_FFFF;
        if there < count {
            self.short.store(true, Ordering::Relaxed);
            tell(&format!("{}: {SHORT} {count}, and there are {there}", self.rule));
        }
        there >= count
    }

    /// Makes a call and sees what it says.
    ///
    /// # Panics
    /// On the stand-in, when it says something else.
    pub fn step(&self, call: &str, expected: u32, make: impl FnOnce() -> u32) {
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        if !self.real {
            assert_eq!(make(), expected, "step {step}: {call}");
            return;
        }
        let text = format!("{} step {step}, {call}: the simulation says {expected}", self.rule);
        let known = self.known(|at| at == step);
        if let Some((there, _)) = known.as_ref().filter(|(there, _)| there != call) {
            self.wrong.lock().unwrap().push(format!("{text}: the list has {there} there"));
        }
        if matches!(known, Some((_, None))) {
            return tell(&format!("{text}, the driver is not asked"));
        }
        tell(&text);
        if std::env::var(DIES).is_ok_and(|dies| dies == step.to_string()) {
            std::process::abort();
        }
        let code = make();
        let text = format!("{text}, the driver {code} ({})", self.name_of(code));
        tell(&text);
        let wrong = match known.and_then(|(_, code)| code) {
            None if code != expected => "a difference that is not listed",
            Some(_) if code == expected => "it is listed, and the driver does not differ",
            Some(known) if code != known => "it differs, and not as the list says",
            _ => return,
        };
        self.wrong.lock().unwrap().push(format!("{text}: {wrong}"));
    }

    /// The first step of this rule that is listed, of those asked for: its call, and the driver's code. `None`: it is not
    /// tried.
    fn known(&self, is: impl Fn(usize) -> bool) -> Option<(String, Option<u32>)> {
        if let Ok(text) = std::env::var(KNOWN) {
            let parts: Vec<&str> = text.split(':').collect();
            let [step, call, code] = parts[..] else { panic!("{KNOWN}={text}") };
            return is(step.parse().unwrap()).then(|| (call.to_owned(), code.parse().ok()));
        }
        let listed = LISTED.iter().find(|l| l.rule == self.rule && is(l.step))?;
        let code = match listed.on_driver {
            OnDriver::Says(code, _) => Some(code),
            OnDriver::NotTried => None,
        };
        Some((listed.call.to_owned(), code))
    }

    /// # Panics
    /// With what differs from the list.
    fn judge(&self) {
        let (steps, short) = (self.steps.load(Ordering::Relaxed), self.short.load(Ordering::Relaxed));
        let mut wrong = self.wrong.lock().unwrap().clone();
        if let Some((call, _)) = self.known(|step| step > steps).filter(|_| !short) {
            wrong.push(format!("{}: {call} is listed, and there is no such step", self.rule));
        }
        assert!(wrong.is_empty() && (steps > 0 || short), "{}", wrong.join("\n"));
    }

    /// The driver's word for a code.
    fn name_of(&self, code: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: writes null or a string that lives as long as the library.
        unsafe {
            let name =
                self.stand_in.get::<unsafe extern "C" fn(u32, *mut *const c_char) -> u32>("cuGetErrorName");
            name(code, &raw mut text);
            if text.is_null() {
                "no name".into()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        }
    }

    pub fn current(&self, device: usize) -> usize {
        let context = made!(self, "cuDevicePrimaryCtxRetain", device);
        assert_eq!(call!(self, "cuCtxSetCurrent", context), 0, "cuCtxSetCurrent");
        context
    }

    pub fn stream(&self) -> usize {
        made!(self, "cuStreamCreate", 1)
    }

    pub fn event(&self) -> usize {
        made!(self, "cuEventCreate", 2)
    }

    pub fn memory(&self, len: usize) -> usize {
        made!(self, "cuMemAlloc_v2", len)
    }

    /// That many pages, all of the same byte.
    pub fn pages(&self, count: usize, byte: u8) -> Pages {
        Pages(vec![Page([byte; PAGE]); count])
    }

    pub fn register(&self, bytes: &mut [u8]) -> u32 {
        call!(self, "cuMemHostRegister_v2", bytes.as_mut_ptr(), bytes.len(), 1)
    }

    pub fn upload(&self, to: usize, bytes: &[u8], stream: usize) -> u32 {
        call!(self, "cuMemcpyHtoDAsync_v2", to, bytes.as_ptr(), bytes.len(), stream)
    }

    pub fn download(&self, bytes: &mut [u8], from: usize, stream: usize) -> u32 {
        call!(self, "cuMemcpyDtoHAsync_v2", bytes.as_mut_ptr(), from, bytes.len(), stream)
    }

    /// A step that registers.
    pub fn registers(&self, code: u32, bytes: &mut [u8]) {
        self.step("cuMemHostRegister_v2", code, || self.register(bytes));
    }

    /// A step that copies to the device.
    pub fn uploads(&self, code: u32, to: usize, bytes: &[u8], stream: usize) {
        self.step("cuMemcpyHtoDAsync_v2", code, || self.upload(to, bytes, stream));
    }

    /// A step that copies to the host.
    pub fn downloads(&self, code: u32, bytes: &mut [u8], from: usize, stream: usize) {
        self.step("cuMemcpyDtoHAsync_v2", code, || self.download(bytes, from, stream));
    }

    /// Waits before the memory of a copy is freed. Its code does not matter: the stream may be the one that was
    /// misused.
    pub fn finish(&self, stream: usize) {
        if self.real {
            call!(self, "cuStreamSynchronize", stream);
        }
    }

    /// Polls until it is ready, and returns how often it was not.
    pub fn wait(&self, event: usize) -> usize {
        let since = Instant::now();
        for asked in 0.. {
            match call!(self, "cuEventQuery", event) {
                0 => return asked,
                600 => assert!(since.elapsed() < HANG, "never ready"),
                code => panic!("cuEventQuery failed with {code}"),
            }
        }
        unreachable!("it asks until it returns")
    }

    /// Checks that exactly these rules were broken, in this order. Only the stand-in can tell.
    pub fn broken(&self, ids: &[&str]) {
        if self.real {
            return;
        }
        let found = self.stand_in.report().violations;
        let found: Vec<&str> = found.iter().filter_map(|v| v.split(' ').next()).collect();
        assert_eq!(found, ids);
    }
}

/// A line for the reader, whatever the test harness captures.
fn tell(text: &str) {
    use std::io::Write;
    // Where no process reads it nothing is lost.
    let _ = writeln!(std::io::stdout().lock(), "\n{text}");
}

/// In a child: tries the rule that it is told. Not in one: does nothing and says so.
pub fn tried_as_child(rules: &[&Rule]) -> bool {
    let (Ok(name), Some(library)) = (std::env::var(RULE), std::env::var_os(LIBRARY)) else { return false };
    let rule = rules.iter().find(|rule| rule.name == name).expect("the parent has the same rules");
    let driver = Driver::real(&library, rule);
    (rule.body)(&driver);
    driver.judge();
    true
}

/// Tries the rules on a library, each in a child that runs `test`. What went wrong, and how many rules lack devices.
pub fn try_all(
    rules: &[&'static Rule],
    test: &str,
    library: &Path,
    environment: &[(&str, &str)],
) -> (Vec<String>, usize) {
    let (mut wrong, mut short) = (Vec::new(), 0);
    let untried = |rule: &Rule| LISTED.iter().any(|l| (l.rule, l.step) == (rule.name, 0));
    for rule in rules.iter().filter(|rule| !untried(rule)) {
        let mut all = vec![(RULE, rule.name), (LIBRARY, library.to_str().expect("a path in UTF-8"))];
        all.extend(environment);
        let child = doubles::child(test, &all, LIMIT);
        println!("{}", child.stdout);
        short += usize::from(child.stdout.contains(SHORT));
        if !child.status.is_some_and(|status| status.success()) || !child.stdout.contains("1 passed") {
            wrong.push(format!("{}: the child {}: {}", rule.name, child.how(), child.last_words()));
        }
    }
    (wrong, short)
}

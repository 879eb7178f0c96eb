//! The same driver calls on the stand-in and on a real driver, and what the two say, side by side.
//!
//! A rule of the stand-in is a sequence of plain calls. Each call that matters is a *step*, made by [`says!`]: it names
//! the code that the stand-in gives. On the stand-in another code fails at once. On a real driver the codes are written
//! down and the sequence goes on, so that one run tells everything; at the end each step is compared, and what is known
//! to differ is in one list, `listed.rs`. A difference that is not listed fails, and so does one that is listed and is
//! not there any more.
//!
//! What is no step is either the same on both, such as handles that are made on the way ([`made!`]: where that fails
//! the rule cannot be tried, which is told), or is the stand-in's alone and asked behind [`Driver::is_stand_in`].
//!
//! On a real driver each rule has a process of its own. Where one dies or hangs, the step that it was at is told, which
//! is to be listed as not tried if that is how drivers are. The child talks to its parent by lines on its standard
//! output that begin with [`MARK`].

#![allow(unsafe_code, reason = "calling a driver")]

pub mod judge;
pub mod listed;

use std::ffi::{CStr, OsStr, c_char};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use judge::{Got, Row};
use listed::{LISTED, OnDriver};

use crate::support::doubles::{self, HANG, StandIn, gpu_name};
use pinpool_sim::cuda::Driver as Version;

/// What a child's lines for its parent begin with.
const MARK: &str = "probe";
/// Which rule the child tries, on which library; and the step at which it is to die, for the test of the comparison.
pub const RULE: &str = "PINPOOL_PROBE_RULE";
pub const LIBRARY: &str = "PINPOOL_PROBE_LIBRARY";
pub const DIES: &str = "PINPOOL_PROBE_DIES";
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
            let rule = $list.iter().find(|rule| rule.name == stringify!($name)).expect("it is in the list");
            (rule.body)(&$crate::standin::probe::Driver::$make());
        })*
    };
}

/// How the double itself behaves, where a driver is not to be compared: tests on the stand-in only.
macro_rules! behaviour {
    ($($(#[$doc:meta])* $name:ident ($make:ident) |$driver:ident| $body:block)*) => {
        $($(#[$doc])* #[test] fn $name() {
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
    /// A simulated one that is not initialised.
    pub fn bare() -> Self {
        let stand_in = StandIn::loaded().unwrap_or_else(|| StandIn::gpus(Version::Cuda12_8));
        stand_in.command("bare");
        Self { stand_in, real: false, rule: "", steps: AtomicUsize::new(0) }
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
        let driver = Self { stand_in, real: true, rule: rule.name, steps: AtomicUsize::new(0) };
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
            tell(&["short", &format!("it needs {count} GPUs and there are {there}")]);
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
        let (step_text, expected) = (step.to_string(), expected.to_string());
        let listed = LISTED.iter().find(|l| (l.rule, l.step) == (self.rule, step));
        if listed.is_some_and(|l| l.on_driver == OnDriver::NotTried) {
            return tell(&["not", &step_text, call, &expected]);
        }
        tell(&["begin", &step_text, call, &expected]);
        if std::env::var(DIES).is_ok_and(|dies| dies == step_text) {
            std::process::abort();
        }
        let code = make();
        tell(&["says", &step_text, call, &expected, &code.to_string(), &self.name_of(code)]);
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

/// A line for the parent.
fn tell(parts: &[&str]) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    // At the start of a line, whatever the test harness has written. Where no process reads it nothing is lost.
    let _ = writeln!(out, "\n{MARK}\t{}", parts.join("\t"));
    let _ = out.flush();
}

/// In a child: tries the rule that it is told. Not in one: does nothing and says so.
pub fn tried_as_child(rules: &[&Rule]) -> bool {
    let (Ok(name), Some(library)) = (std::env::var(RULE), std::env::var_os(LIBRARY)) else { return false };
    let rule = rules.iter().find(|rule| rule.name == name).expect("the parent has the same rules");
    (rule.body)(&Driver::real(&library, rule));
    tell(&["done"]);
    true
}

/// Tries the rules on a library, each in a child that runs `test`. What each step said, and what went wrong beside.
pub fn try_all(
    rules: &[&'static Rule],
    test: &str,
    library: &Path,
    environment: &[(&str, &str)],
) -> (Vec<Row>, Vec<String>) {
    let (mut rows, mut wrong) = (Vec::new(), Vec::new());
    for rule in rules {
        if LISTED.iter().any(|l| (l.rule, l.step, l.on_driver) == (rule.name, 0, OnDriver::NotTried)) {
            let call = listed::ALL_OF_IT.into();
            rows.push(Row { rule: rule.name, step: 0, call, stand_in: 0, got: Got::NotTried });
            continue;
        }
        let mut all = vec![(RULE, rule.name), (LIBRARY, library.to_str().expect("a path in UTF-8"))];
        all.extend(environment);
        let child = doubles::child(test, &all, LIMIT);
        let (found, at, done) = judge::read(rule.name, &child.stdout);
        if !done || found.is_empty() {
            let at = at.map_or("beside its steps".into(), |step| format!("at step {step}"));
            wrong.push(format!("{}: the child {} {at}: {}", rule.name, child.how(), child.last_words()));
        }
        rows.extend(found);
    }
    (rows, wrong)
}

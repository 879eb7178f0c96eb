//! Simulated drivers in tests: `crates/pinpool-sim`, whose page has how they work.
//!
//! A test has a simulated machine of its own, whose entry points pinpool gets in this very process: tests beside it do
//! not see it. [`StandIn`] is that machine. What a process does as a whole (loading the driver's library, a fork, an exit)
//! runs in a child that loads the simulation by its path, as a library: cargo builds it beside the executable.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(unsafe_code, reason = "loading a library and calling it")]

pub mod gpu;
pub mod npu;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::panicking;
pub use super::process::{child, ended, passes};
use crate::support::skip;
use libloading::Library;
use pinpool_sim::{Machine, acl, cuda};

/// The variable that pinpool reads.
pub const PATH: &str = "PINPOOL_LIBCUDA";
/// The variable that sets up the machine of a library which a child loads: commands with semicolons between them.
pub const SETUP: &str = "PINPOOL_SIM";
pub use crate::support::HANG;

/// Whether `PINPOOL_REQUIRE` names a GPU: then the machine's own driver is to be used.
pub fn required() -> bool {
    required_device("cuda")
}

/// Whether `PINPOOL_REQUIRE` names this device, or one of this family.
pub fn required_device(device: &str) -> bool {
    std::env::var("PINPOOL_REQUIRE")
        .is_ok_and(|all| all.split(',').any(|name| name.trim().starts_with(device)))
}

/// In a process that is to use the machine's own driver there are no simulated GPUs beside it, since a context that is
/// adopted does not say of which driver it is. There this thread's test runs in a process of its own, and is over.
pub fn simulated_elsewhere() -> bool {
    if !required() {
        return false;
    }
    let thread = std::thread::current();
    match thread.name().filter(|test| *test != "main") {
        Some(test) => passes(test, &[("PINPOOL_REQUIRE", "")], 20 * HANG),
        None => skip!("it uses simulated GPUs, and the thread does not say which test it is"),
    }
    true
}

/// The simulation as a library: the one that `PINPOOL_TEST_SIM` names (empty: none), else the one beside this
/// executable.
pub fn library() -> Option<PathBuf> {
    let beside = || Some(std::env::current_exe().ok()?.parent()?.join("libpinpool_sim.so"));
    let path = std::env::var_os("PINPOOL_TEST_SIM").map(PathBuf::from).or_else(beside);
    path.filter(|path| path.exists())
}

/// The same, as text. `None`, and said: it is not there.
pub fn simulation() -> Option<String> {
    let library = library();
    if library.is_none() {
        skip!("the simulation is not beside the executable");
    }
    library.map(|path| path.into_os_string().into_string().expect("a path in UTF-8"))
}

/// Runs this very test again in a process of its own that loads the stand-in, with more in its environment.
pub fn again(test: &str, environment: &[(&str, &str)]) {
    let Some(library) = simulation() else { return };
    passes(test, &[&[(PATH, &*library)], environment].concat(), 20 * HANG);
}

/// Runs the body of a test on two simulated GPUs of its own.
pub fn on_stand_in(body: impl FnOnce(&StandIn)) {
    panicking::install_if_asked();
    if !simulated_elsewhere() {
        body(&StandIn::gpus(cuda::Driver::Cuda12_8));
    }
}

/// The library that the environment names by a variable.
pub fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The stand-in that the environment names, or the one beside this executable.
pub fn named_or_built() -> Option<PathBuf> {
    named(PATH).or_else(library)
}

/// Whether this process is the child that [`again`] started, or its environment names a library to load.
pub fn is_set() -> bool {
    named(PATH).is_some()
}

/// The machine's own driver, ready for use, with a line that says which it is. `Err`: there is none, and why.
pub fn real_driver() -> Result<(PathBuf, String), String> {
    let path = named(PATH).unwrap_or_else(|| "libcuda.so.1".into());
    let library = StandIn::any(&path)?;
    if library.has("sim_cuda") {
        return Err(format!("{} is the stand-in", path.display()));
    }
    let (mut devices, mut version) = (0_i32, 0_i32);
    let places = [0, (&raw mut devices).expose_provenance(), (&raw mut version).expose_provenance()];
    for (name, place) in ["cuInit", "cuDeviceGetCount", "cuDriverGetVersion"].into_iter().zip(places) {
        match library.call(name, &[place]) {
            0 => {}
            code => return Err(format!("{name} of {} gave {code}", path.display())),
        }
    }
    if devices == 0 {
        return Err("no GPU is visible".into());
    }
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let module = module.lines().next().unwrap_or("no /proc/driver/nvidia/version").trim().to_owned();
    let text = format!("{}: CUDA {version}, {devices} device(s), {module}", path.display());
    Ok((path, text))
}

#[derive(Debug, Default)]
pub struct Report {
    /// `ID text`.
    pub violations: Vec<String>,
    /// `what count`.
    pub leaks: Vec<String>,
    /// Name and count.
    pub calls: Vec<(String, u64)>,
    /// Name and flags of calls that take flags, and how often a call was made with them, where the double reports it.
    pub flags: Vec<(String, u64)>,
    /// Every context that was retained was released, or was to be.
    pub over: bool,
    /// The last call that was made.
    pub last: Option<String>,
}

impl Report {
    /// From the lines that `control.rs` describes.
    pub fn parse(text: &str) -> Self {
        let mut report = Self::default();
        for line in text.lines() {
            report.over |= line == "over";
            match line.split_once(' ') {
                Some(("violation", text)) => report.violations.push(text.into()),
                Some(("last", text)) => report.last = Some(text.into()),
                Some(("leak", text)) => report.leaks.push(text.into()),
                Some((what @ ("call" | "flags"), text)) => {
                    if let Some((name, count)) = text.rsplit_once(' ') {
                        let counts = if what == "call" { &mut report.calls } else { &mut report.flags };
                        counts.push((name.into(), count.parse().unwrap_or(0)));
                    }
                }
                _ => {}
            }
        }
        report
    }
}

impl Report {
    /// Everything of the test is dropped: no rule was broken, nothing is left, and no library was ended.
    pub fn no_trace(&self) {
        assert!(self.over, "a device is still open: {self:?}");
        assert_eq!((&self.violations, &self.leaks), (&Vec::new(), &Vec::new()));
        assert_eq!(self.calls.iter().find(|call| call.0.starts_with("aclFinalize")), None);
    }
}

/// Fails where threads that are in no machine have broken a rule, whichever test they are of: the crate's own threads among
/// them, where no context is current. A process that loads the simulation has no such threads.
pub fn no_strays() {
    let strays = Machine::strays();
    assert!(strays.is_empty(), "broken in no machine, maybe by another test of this process: {strays:?}");
}

/// The ids of the rules that the simulation's page lists for a vendor, by its column: 2 is CUDA, 3 is Ascend. `None`: its
/// sources are not here.
pub fn rules(column: usize) -> Option<BTreeSet<String>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/pinpool-sim/src/rules.rs");
    let page = std::fs::read_to_string(page).ok()?;
    let rows = page.lines().filter_map(|line| line.strip_prefix("//! | ")).skip(2);
    let cells = rows.map(|row| row.trim_end_matches(" |").split(" | ").collect::<Vec<_>>());
    Some(cells.filter(|row| row[column] != "-").map(|row| row[0].to_owned()).collect())
}

/// A simulated machine: of this thread's test, or that of the library which this process has loaded.
#[derive(Clone)]
pub enum StandIn {
    Own(Machine),
    Loaded(Arc<Library>),
}

thread_local! {
    /// The machine that was made on this thread last.
    static LATEST: RefCell<Option<StandIn>> = const { RefCell::new(None) };
}

/// The name of a device of this thread's test: of its own machine, or as the driver of this process counts.
fn name(family: &str, device: usize) -> String {
    let own = LATEST.with_borrow(|latest| match latest {
        Some(StandIn::Own(machine)) if machine.family() == family => Some(machine.ordinal(device)),
        _ => None,
    });
    format!("{family}:{}", own.unwrap_or(device as u32))
}

pub fn gpu_name(device: usize) -> String {
    name("cuda", device)
}

pub fn npu_name(device: usize) -> String {
    name("acl", device)
}

impl StandIn {
    /// A machine with two GPUs, whose driver has the calls of that version.
    pub fn gpus(driver: cuda::Driver) -> Self {
        let machine = Machine::gpus(driver);
        #[cfg(feature = "cuda")]
        // SAFETY: the simulation's functions have the driver's signatures.
        unsafe { pinpool::cuda::install(machine.ordinal(0), &|name| machine.symbol(name)) }.unwrap();
        Self::Own(machine).latest()
    }

    /// A machine with two Ascend devices, and that library.
    pub fn npus(library: acl::Library) -> Self {
        let machine = Machine::npus(library);
        #[cfg(feature = "acl")]
        // SAFETY: the simulation's functions have the library's signatures.
        unsafe { pinpool::acl::install(machine.ordinal(0), &|name| machine.symbol(name)) }.unwrap();
        Self::Own(machine).latest()
    }

    fn latest(self) -> Self {
        LATEST.set(Some(self.clone()));
        self
    }

    /// The libcuda that this process has loaded, which its environment names. `None`: none is named, or a real one.
    pub fn loaded() -> Option<Self> {
        let library = Self::any(&named(PATH)?).expect("the library can be loaded");
        library.has("sim_cuda").then_some(library)
    }

    /// Calls of this thread that name nothing and have no current context are made to this machine from now on.
    pub fn enter(&self) {
        if let Self::Own(machine) = self {
            machine.enter();
        }
        self.clone().latest();
    }

    /// Any library, a real driver among them: for what both have.
    pub fn any(path: &Path) -> Result<Self, String> {
        // SAFETY: the simulation has no initialisers that ask for anything; a real driver's have no preconditions.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|error| format!("{} cannot be loaded: {error}", path.display()))?;
        Ok(Self::Loaded(Arc::new(library)))
    }

    fn find(&self, name: &str) -> Option<*const std::ffi::c_void> {
        match self {
            Self::Own(machine) => machine.symbol(name),
            Self::Loaded(library) => {
                // SAFETY: only looked up.
                unsafe { library.get::<*const _>(name.as_bytes()) }.ok().map(|at| *at)
            }
        }
    }

    /// Whether it has an entry point.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// An entry point of the given type.
    ///
    /// # Safety
    /// The type is the function's.
    pub unsafe fn get<T: Copy>(&self, name: &str) -> T {
        let at = self.find(name).unwrap_or_else(|| panic!("there is no {name}"));
        assert_eq!(size_of::<T>(), size_of_val(&at));
        // SAFETY: the caller's promise: both are pointers to the function.
        unsafe { std::mem::transmute_copy(&at) }
    }

    /// A call whose arguments are numbers and pointers.
    pub fn call(&self, name: &str, a: &[usize]) -> u32 {
        assert!(a.len() <= 11, "{name}");
        let mut all = [0; 11];
        all[..a.len()].copy_from_slice(a);
        let [a, b, c, d, e, f, g, h, i, j, k] = all;
        type U = usize;
        type Call = unsafe extern "C" fn(U, U, U, U, U, U, U, U, U, U, U) -> u32;
        // SAFETY: on the machines that pinpool supports integer and pointer arguments are passed alike, a call ignores
        // further ones, and what the tests point at is valid.
        unsafe { self.get::<Call>(name)(a, b, c, d, e, f, g, h, i, j, k) }
    }

    /// Sends a command, which the simulation's `control.rs` describes, and returns the answer.
    pub fn command(&self, text: &str) -> String {
        match self {
            Self::Own(machine) => machine.command(text),
            Self::Loaded(_) => {
                type Ask = unsafe extern "C" fn(*const std::ffi::c_char, *mut u8, usize) -> usize;
                // SAFETY: the simulation has this signature.
                let ask = unsafe { self.get::<Ask>("sim_cuda") };
                let text = CString::new(text).expect("a command without zeros");
                let mut answer = vec![0; 1 << 20];
                // SAFETY: a string, and room for that many bytes.
                let len = unsafe { ask(text.as_ptr(), answer.as_mut_ptr(), answer.len()) };
                answer.truncate(len);
                String::from_utf8_lossy(&answer).into_owned()
            }
        }
    }

    /// Whether the machine was set up by that command.
    pub fn is(&self, command: &str) -> bool {
        self.command(&format!("is {command}")) == "true"
    }

    pub fn fail(&self, name: &str, nth: u64, code: u32, after: bool) {
        self.command(&format!("fail {name} {nth} {code} {after}"));
    }

    /// No call is to fail any more.
    pub fn calm(&self) {
        self.command("calm");
    }

    pub fn struck(&self) -> u64 {
        self.command("struck").parse().unwrap()
    }

    pub fn kill(&self, device: usize, code: u32) {
        self.command(&format!("kill {device} {code}"));
    }

    pub fn hang(&self, hung: bool) {
        self.command(&format!("hang {hung}"));
    }

    /// Gives the devices another value of an attribute, until the next reset.
    pub fn attribute(&self, attribute: i32, value: i32) {
        self.command(&format!("attribute {attribute} {value}"));
    }

    pub fn report(&self) -> Report {
        Report::parse(&self.command("report"))
    }

    /// The ids of the rules that were broken so far.
    pub fn broken(&self) -> Vec<String> {
        let first = |line: String| line.split(' ').next().unwrap_or_default().to_owned();
        self.report().violations.into_iter().map(first).collect()
    }

    /// The report when everything that was opened is closed, or when it is not in all that time: pools and devices end
    /// on threads of their own. Fails where threads that are in no machine have broken rules.
    pub fn final_report(&self) -> Report {
        let since = Instant::now();
        let mut report = self.report();
        while !report.over && since.elapsed() <= HANG {
            std::thread::sleep(Duration::from_millis(2));
            report = self.report();
        }
        no_strays();
        report
    }

    /// Checks that report, when everything of the test is dropped.
    pub fn no_trace(&self) {
        self.final_report().no_trace();
    }
}

//! Building, loading and steering the stand-in libcuda of `tests/doubles/cuda`, whose page has its rules.
//!
//! The library is built by cargo into a folder of its own when a test needs it first. pinpool reads which library to
//! load once in a process, from the environment; so what is tested through pinpool runs in a child: the same test of
//! the same executable, started again with `PINPOOL_LIBCUDA` set. Without cargo at run time (an executable that was
//! carried to another machine) such tests are skipped and say so.
//!
//! The stand-in libascendcl of `tests/doubles/acl` is built and steered in the same way; what is its own is in
//! `ascendcl.rs`.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(unsafe_code, reason = "loading a library and calling it")]

pub mod ascendcl;
pub mod faults;
pub mod gpu;
pub mod npu;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{panicking, process};
use crate::support::skip;
use libloading::{Library, Symbol};

/// The variable that pinpool reads.
pub const PATH: &str = "PINPOOL_LIBCUDA";
/// Longer than anything takes here: what has not happened by then hangs.
pub const HANG: Duration = Duration::from_secs(20);

/// Whether `PINPOOL_REQUIRE` names a GPU: then the machine's own driver is to be used.
pub fn required() -> bool {
    std::env::var("PINPOOL_REQUIRE").is_ok_and(|names| names.split(',').any(|n| n.trim().starts_with("cuda")))
}

/// Whether `PINPOOL_REQUIRE` names this very device.
pub fn required_device(device: &str) -> bool {
    std::env::var("PINPOOL_REQUIRE").is_ok_and(|names| names.split(',').any(|n| n.trim() == device))
}

/// The library, built on first use. `None`: there is no cargo to build it with, or no source.
pub fn library() -> Option<PathBuf> {
    build(&CUDA, "")
}

/// The library as an older driver, which lacks some calls: by the name of the double's feature.
pub fn older(feature: &str) -> Option<PathBuf> {
    build(&CUDA, feature)
}

/// Where a stand-in's source is, where it is built, and what it is called then.
struct Double {
    source: &'static str,
    target: &'static str,
    library: &'static str,
}

const CUDA: Double =
    Double { source: "tests/doubles/cuda", target: "doubles", library: "libcuda_standin.so" };

/// The library with a feature, built on first use in this process.
fn build(double: &Double, feature: &str) -> Option<PathBuf> {
    static BUILT: Mutex<BTreeMap<(&str, String), Option<PathBuf>>> = Mutex::new(BTreeMap::new());
    // Other tests that need one wait meanwhile: cargo would make them wait, too.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (double.source, feature.to_owned());
    built.entry(key).or_insert_with(|| build_now(double, feature)).clone()
}

fn build_now(double: &Double, feature: &str) -> Option<PathBuf> {
    // Set by `cargo test`, not in an executable that is run by itself.
    let cargo = std::env::var_os("CARGO")?;
    // Not in the package that is published.
    let manifest = crate::support::root().join(double.source).join("Cargo.toml");
    if !manifest.exists() {
        return None;
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(double.target).join(feature);
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked", "--offline", "--manifest-path"]);
    command.arg(manifest);
    command.arg("--target-dir").arg(&target);
    if !feature.is_empty() {
        command.arg("--features").arg(feature);
    }
    // What the crate under test is built with (sanitizers, coverage, another target) is not for the double.
    for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_BUILD_RUSTFLAGS"] {
        command.env_remove(name);
    }
    let output = command.output().expect("cargo cannot be started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the stand-in cannot be built: {said}");
    Some(target.join("debug").join(double.library))
}

/// Runs this very test again in a process of its own that loads the stand-in, with more in its environment.
pub fn again(test: &str, environment: &[(&str, &str)]) {
    let Some(library) = named_or_built() else {
        skip!("there is no cargo to build the stand-in libcuda with; {PATH} can name a built one");
        return;
    };
    again_with(test, PATH, &library, environment);
}

/// Runs the body of a test in a child, on a stand-in that is as just loaded.
pub fn on_stand_in(test: &str, body: impl FnOnce(&StandIn)) {
    on_stand_in_with(test, &[], |stand_in| body(&stand_in));
}

/// The same with more in the child's environment.
pub fn on_stand_in_with(test: &str, environment: &[(&str, &str)], body: impl FnOnce(StandIn)) {
    if !is_set() {
        return again(test, environment);
    }
    panicking::install_if_asked();
    match StandIn::of_this_process() {
        Some(stand_in) => body(stand_in),
        None => skip!("the library that is named is no stand-in"),
    }
}

/// The same with that library under that name.
fn again_with(test: &str, name: &str, library: &Path, environment: &[(&str, &str)]) {
    let mut command = process::command(test);
    command.env(name, library).envs(environment.iter().copied());
    let output = command.output().expect("this executable can be started again");
    process::passed(test, "with the stand-in", &output);
}

/// How a child ended.
pub struct Ended {
    /// `None`: it took too long, and was ended.
    pub status: Option<ExitStatus>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Words that follow "the child" in a sentence.
    pub fn how(&self) -> String {
        match self.status {
            Some(status) => format!("ended with {status}"),
            None => "hung and was ended".into(),
        }
    }

    /// Its last output, for a message: errors first, since a panic is printed there.
    pub fn last_words(&self) -> String {
        let of = |text: &str| {
            let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
            lines[lines.len().saturating_sub(8)..].join(" | ")
        };
        if self.stderr.trim().is_empty() { of(&self.stdout) } else { of(&self.stderr) }
    }
}

/// Runs a test of this very executable in a process of its own, with more in its environment, for at most `limit`. Its
/// end is returned, not judged.
pub fn child(test: &str, environment: &[(&str, &str)], limit: Duration) -> Ended {
    let mut command = process::command(test);
    ended(command.envs(environment.iter().copied()), limit)
}

/// The same for any command.
pub fn ended(command: &mut Command, limit: Duration) -> Ended {
    // Its last output is to be the reason.
    command.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("this executable can be started again");
    // Read on threads, so that neither pipe fills up.
    fn all(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read before an error counts.
            let _ = pipe.expect("it is piped").read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }
    let (stdout, stderr) = (all(child.stdout.take()), all(child.stderr.take()));
    let since = Instant::now();
    let status = loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) => break Some(status),
            None if since.elapsed() > limit => {
                // One that has just ended needs none.
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let text = |thread: std::thread::JoinHandle<String>| thread.join().expect("reading does not panic");
    Ended { status, stdout: text(stdout), stderr: text(stderr) }
}

/// The stand-in that the environment names, or the one that is built.
pub fn named_or_built() -> Option<PathBuf> {
    let named = std::env::var_os(PATH).filter(|path| !path.is_empty()).map(PathBuf::from);
    named.or_else(library)
}

/// Whether this process is the child that [`again`] started, or its environment names a library to load.
pub fn is_set() -> bool {
    std::env::var_os(PATH).is_some_and(|path| !path.is_empty())
}

/// The machine's own driver, ready for use, with a line that says which it is. `Err`: there is none, and why.
pub fn real_driver() -> Result<(PathBuf, String), String> {
    let named = std::env::var_os(PATH).filter(|path| !path.is_empty());
    let path = PathBuf::from(named.unwrap_or_else(|| "libcuda.so.1".into()));
    let library = StandIn::any(&path)?;
    if library.has("standin_reset") {
        return Err(format!("{} is the stand-in", path.display()));
    }
    type Ask = unsafe extern "C" fn(*mut i32) -> u32;
    let (mut devices, mut version) = (0, 0);
    // SAFETY: cuda.h has the signatures.
    let codes = unsafe {
        [
            ("cuInit", library.get::<unsafe extern "C" fn(u32) -> u32>("cuInit")(0)),
            ("cuDeviceGetCount", library.get::<Ask>("cuDeviceGetCount")(&raw mut devices)),
            ("cuDriverGetVersion", library.get::<Ask>("cuDriverGetVersion")(&raw mut version)),
        ]
    };
    if let Some((name, code)) = codes.into_iter().find(|(_, code)| *code != 0) {
        return Err(format!("{name} of {} gave {code}", path.display()));
    }
    if devices == 0 {
        return Err("no GPU is visible".into());
    }
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let module = module.lines().next().unwrap_or("no /proc/driver/nvidia/version").trim().to_owned();
    let text = format!("{}: CUDA {version}, {devices} device(s), {module}", path.display());
    Ok((path, text))
}

/// A loaded stand-in. Loading it twice gives the same one, and it is the one that pinpool has loaded.
pub struct StandIn(Library);

/// The report of the stand-in.
#[derive(Debug, Default)]
pub struct Report {
    /// `ID text`.
    pub violations: Vec<String>,
    /// `what count`.
    pub leaks: Vec<String>,
    pub notes: Vec<String>,
    /// Name and count.
    pub calls: Vec<(String, u64)>,
    /// Name and flags of calls that take flags, and how often a call was made with them, where the double reports it.
    pub flags: Vec<(String, u64)>,
    /// Every context that was retained was released, or was to be.
    pub over: bool,
    /// The last call that was made, where the double reports it.
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
                Some(("note", text)) => report.notes.push(text.into()),
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

impl StandIn {
    /// The one that this process uses. `None`: the library that was named is something else, a real driver.
    pub fn of_this_process() -> Option<Self> {
        Self::load(Path::new(&std::env::var_os(PATH)?))
    }

    pub fn load(path: &Path) -> Option<Self> {
        let library = Self::any(path).expect("the library can be loaded");
        library.has("standin_reset").then_some(library)
    }

    /// Any library, a real driver among them: for what both have.
    pub fn any(path: &Path) -> Result<Self, String> {
        // SAFETY: the stand-in has no initialisers; a real driver's have no preconditions.
        let library = unsafe { Library::new(path) };
        Ok(Self(library.map_err(|error| format!("{} cannot be loaded: {error}", path.display()))?))
    }

    /// Whether it has an entry point.
    pub fn has(&self, name: &str) -> bool {
        // SAFETY: only looked up.
        unsafe { self.0.get::<extern "C" fn()>(name.as_bytes()) }.is_ok()
    }

    /// An entry point of the given type.
    ///
    /// # Safety
    /// The type is the function's.
    pub unsafe fn get<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: the caller's promise.
        unsafe { self.0.get(name.as_bytes()) }.unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    pub fn reset(&self) {
        // SAFETY: `control.rs` has the signatures, here and below.
        unsafe { self.get::<extern "C" fn()>("standin_reset")() }
    }

    pub fn fail(&self, name: &str, nth: u64, code: u32, after: bool) {
        let name = CString::new(name).expect("a name without zeros");
        // SAFETY: as above.
        unsafe {
            let call =
                self.get::<unsafe extern "C" fn(*const std::ffi::c_char, u64, u32, bool)>("standin_fail");
            call(name.as_ptr(), nth, code, after);
        }
    }

    /// No call is to fail any more.
    pub fn calm(&self) {
        // SAFETY: as above.
        unsafe { self.get::<extern "C" fn()>("standin_calm")() }
    }

    pub fn struck(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.get::<extern "C" fn() -> u64>("standin_struck")() }
    }

    pub fn kill(&self, device: usize, code: u32) {
        // SAFETY: as above.
        unsafe { self.get::<extern "C" fn(usize, u32)>("standin_kill")(device, code) }
    }

    pub fn hang(&self, hung: bool) {
        // SAFETY: as above.
        unsafe { self.get::<extern "C" fn(bool)>("standin_hang")(hung) }
    }

    pub fn reuse(&self, reuse: bool) {
        // SAFETY: as above.
        unsafe { self.get::<extern "C" fn(bool)>("standin_reuse")(reuse) }
    }

    /// Makes kernels start that long after their launch.
    pub fn kernel_delay(&self, delay: Duration) {
        let delay = delay.as_micros() as u64;
        // SAFETY: `kernels.rs` has the signature.
        unsafe { self.get::<extern "C" fn(u64)>("standin_kernel_delay")(delay) }
    }

    /// Gives the devices another value of an attribute, until the next reset.
    pub fn attribute(&self, attribute: i32, value: i32) {
        // SAFETY: `host.rs` has the signature.
        unsafe { self.get::<extern "C" fn(i32, i32)>("standin_attribute")(attribute, value) }
    }

    pub fn report(&self) -> Report {
        // SAFETY: as above.
        let ask = unsafe { self.get::<unsafe extern "C" fn(*mut u8, usize) -> usize>("standin_report") };
        let mut text = vec![0; 64 << 10];
        loop {
            // SAFETY: `text` has that room.
            let len = unsafe { ask(text.as_mut_ptr(), text.len()) };
            if len <= text.len() {
                text.truncate(len);
                return Report::parse(&String::from_utf8_lossy(&text));
            }
            // It is as long as all that was broken, and may have grown by the next call.
            text.resize(2 * len, 0);
        }
    }

    /// The report when everything that was opened is closed, or when it is not in all that time: pools and devices end
    /// on threads of their own.
    pub fn final_report(&self) -> Report {
        let since = Instant::now();
        loop {
            let report = self.report();
            if report.over || since.elapsed() > HANG {
                return report;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

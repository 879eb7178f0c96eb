//! Building, loading and steering the stand-in libcuda of `tests/doubles/cuda`, whose page has its rules.
//!
//! The library is built by cargo into a folder of its own when a test needs it first. pinpool reads which library to
//! load once in a process, from the environment; so what is tested through pinpool runs in a child: the same test of the
//! same executable, started again with `PINPOOL_LIBCUDA` set. Without cargo at run time (an executable that was carried
//! to another machine) such tests are skipped and say so.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(unsafe_code, reason = "loading a library and calling it")]

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};

/// What pinpool looks at.
pub const PATH: &str = "PINPOOL_LIBCUDA";
/// Longer than anything takes here: what has not happened by then hangs.
pub const HANG: Duration = Duration::from_secs(20);

/// Whether `PINPOOL_REQUIRE` names a GPU: then the machine's own driver is to be used.
pub fn required() -> bool {
    std::env::var("PINPOOL_REQUIRE").is_ok_and(|names| names.split(',').any(|n| n.trim().starts_with("cuda")))
}

/// The library, built on first use. `None`: there is no cargo to build it with, or no source.
pub fn library() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(build).as_deref()
}

fn build() -> Option<PathBuf> {
    // Set by `cargo test`, not in an executable that is run by itself.
    let cargo = std::env::var_os("CARGO")?;
    // Not in the package that is published.
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles/cuda/Cargo.toml");
    if !manifest.exists() {
        return None;
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doubles");
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked", "--offline", "--manifest-path"]);
    command.arg(manifest);
    command.arg("--target-dir").arg(&target);
    // What the crate under test is built with (sanitizers, coverage, another target) is not for the double.
    for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_BUILD_RUSTFLAGS"] {
        command.env_remove(name);
    }
    let output = command.output().expect("cargo cannot be started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the stand-in cannot be built: {said}");
    Some(target.join("debug").join("libcuda_standin.so"))
}

/// Runs this very test again in a process of its own that loads the stand-in, with more in its environment.
pub fn again(test: &str, environment: &[(&str, &str)]) {
    let named = std::env::var_os(PATH).map(PathBuf::from);
    let Some(library) = named.or_else(|| library().map(Path::to_owned)) else {
        println!(
            "{test}: skipped, there is no cargo to build the stand-in libcuda with; {PATH} can name a built one"
        );
        return;
    };
    let mut command = Command::new(std::env::current_exe().expect("this executable has a path"));
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(PATH, library);
    command.envs(environment.iter().copied());
    let output = command.output().expect("this executable can be started again");
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} failed with the stand-in: {}", output.status);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{test} did not run");
}

/// Whether this process is the child that [`again`] started, or was told by hand which library to load.
pub fn is_set() -> bool {
    std::env::var_os(PATH).is_some_and(|path| !path.is_empty())
}

/// A loaded stand-in. Loading it twice gives the same one, and it is the one that pinpool has loaded.
pub struct StandIn(Library);

/// What the stand-in wrote down.
#[derive(Debug, Default)]
pub struct Report {
    /// `ID text`.
    pub violations: Vec<String>,
    /// `what count`.
    pub leaks: Vec<String>,
    pub notes: Vec<String>,
    /// Name and count.
    pub calls: Vec<(String, u64)>,
    /// Every context that was retained was released, or was to be.
    pub over: bool,
}

impl StandIn {
    /// The one that this process uses. `None`: the library that was named is something else, a real driver.
    pub fn of_this_process() -> Option<Self> {
        Self::load(Path::new(&std::env::var_os(PATH)?))
    }

    pub fn load(path: &Path) -> Option<Self> {
        // SAFETY: the stand-in has no initialisers; a real driver's have no preconditions.
        let library = unsafe { Library::new(path) }.expect("the library can be loaded");
        // SAFETY: only looked up.
        let is_one = unsafe { library.get::<extern "C" fn()>(b"standin_reset") }.is_ok();
        is_one.then_some(Self(library))
    }

    /// An entry point of the given type.
    ///
    /// # Safety
    /// The type is the function's.
    pub unsafe fn get<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: the caller's word.
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

    /// Gives the devices another value of an attribute, until the next reset.
    pub fn attribute(&self, attribute: i32, value: i32) {
        // SAFETY: `host.rs` has the signature.
        unsafe { self.get::<extern "C" fn(i32, i32)>("standin_attribute")(attribute, value) }
    }

    pub fn report(&self) -> Report {
        let mut text = vec![0; 1 << 20];
        // SAFETY: as above; `text` has that room.
        let len = unsafe {
            self.get::<unsafe extern "C" fn(*mut u8, usize) -> usize>("standin_report")(
                text.as_mut_ptr(),
                text.len(),
            )
        };
        text.truncate(len);
        let mut report = Report::default();
        for line in String::from_utf8_lossy(&text).lines() {
            report.over |= line == "over";
            match line.split_once(' ') {
                Some(("violation", text)) => report.violations.push(text.into()),
                Some(("leak", text)) => report.leaks.push(text.into()),
                Some(("note", text)) => report.notes.push(text.into()),
                Some(("call", text)) => {
                    if let Some((name, count)) = text.split_once(' ') {
                        report.calls.push((name.into(), count.parse().unwrap_or(0)));
                    }
                }
                _ => {}
            }
        }
        report
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

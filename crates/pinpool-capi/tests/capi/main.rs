//! The C interface: a program in C on the host device and on a simulated driver, under valgrind where there is one; and
//! the header, which is as the sources say.

#![cfg(target_os = "linux")]

#[path = "../../../../tests/support/mod.rs"]
mod support;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::skip;

const HERE: &str = env!("CARGO_MANIFEST_DIR");
const NAME: &str = "libpinpool_capi.so";
/// The built library, where it is not beside this executable.
const LIBRARY: &str = "PINPOOL_TEST_CAPI";

/// The library, which cargo builds with this executable.
fn library() -> Option<PathBuf> {
    let named = std::env::var_os(LIBRARY).filter(|path| !path.is_empty()).map(PathBuf::from);
    named.or_else(|| Some(std::env::current_exe().ok()?.with_file_name(NAME)).filter(|path| path.exists()))
}

/// Compiles the program, links it, and runs it: under another command, if one is named, with these arguments.
/// Says why, where that cannot be done.
fn run(under: &[&str], arguments: &[&str], driver: Option<&Path>) {
    let source = Path::new(HERE).join("tests/capi/program.c");
    let Some(library) = library().filter(|_| source.exists()) else {
        return skip!(
            "{} is not here, or {NAME} not beside this executable; {LIBRARY} can name it",
            source.display()
        );
    };
    // Tests run at the same time, and each removes its program.
    let name = format!("capi-{}-{}-{}", std::process::id(), under.len(), arguments.len());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut compile = Command::new("cc");
    compile
        .args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program);
    // A program runs some thirty times as long under valgrind.
    compile.args((!under.is_empty()).then_some("-DROUNDS=300"));
    compile.arg(source).arg("-I").arg(HERE).arg(&library).args(["-lpthread", "-ldl"]);
    let done = match compile.output() {
        Err(error) => return skip!("there is no C compiler: {error}"),
        Ok(done) => done,
    };
    assert!(done.status.success(), "it does not compile: {}", String::from_utf8_lossy(&done.stderr));
    let all: Vec<&OsStr> = under.iter().map(OsStr::new).chain([program.as_os_str()]).collect();
    let mut command = Command::new(all[0]);
    command.args(&all[1..]).args(arguments).env("LD_LIBRARY_PATH", library.parent().unwrap());
    command.envs(driver.map(|driver| (support::doubles::PATH, driver)));
    let done = command.output();
    let _ = std::fs::remove_file(&program);
    let done = done.unwrap();
    let (out, said) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && out.contains("all of it"), "{}: {out}{said}", done.status);
}

#[test]
fn a_program_in_c_on_the_host() {
    run(&[], &[], None);
}

#[cfg(feature = "cuda")]
#[test]
fn a_program_in_c_on_a_gpu() {
    match support::doubles::named_or_built() {
        Some(driver) => run(&[], &["cuda"], Some(&driver)),
        None => skip!("the simulation is not beside the executable"),
    }
}

#[test]
fn a_program_in_c_under_valgrind() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skip!("valgrind is not here");
    }
    let leaks = ["--leak-check=full", "--errors-for-leak-kinds=definite"];
    run(&["valgrind", "--quiet", "--error-exitcode=9", leaks[0], leaks[1]], &[], None);
}

/// The header is what cbindgen makes of the sources. `PINPOOL_BLESS=1` writes it.
#[test]
fn the_header_is_current() {
    let folder = Path::new(HERE);
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_src(folder.join("src/lib.rs")).with_config(config);
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let at = folder.join("pinpool.h");
    if std::env::var_os("PINPOOL_BLESS").is_some() {
        std::fs::write(&at, &made).unwrap();
    }
    let found = std::fs::read_to_string(&at).unwrap_or_default();
    assert!(found == made, "pinpool.h is not current: PINPOOL_BLESS=1 cargo test -p pinpool-capi");
}

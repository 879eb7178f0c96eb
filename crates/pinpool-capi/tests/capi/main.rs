//! The C interface: a program in C on the host device and on a simulated driver, under valgrind where there is one; and
//! the header, which is as the sources say.

#![cfg(target_os = "linux")]

#[path = "../../../../tests/support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

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

/// The program, compiled with these flags and linked; `None` (said) where that cannot be done.
fn program(flags: &[&str]) -> Option<(PathBuf, PathBuf)> {
    let source = Path::new(HERE).join("tests/capi/program.c");
    if !source.exists() {
        skip!("{} is not here", source.display());
        return None;
    }
    let Some(library) = library() else {
        skip!("{NAME} is not beside this executable; {LIBRARY} can name it");
        return None;
    };
    let folder = library.parent()?.to_path_buf();
    // Tests run at the same time, and each removes its program.
    static PROGRAMS: AtomicU32 = AtomicU32::new(0);
    let number = PROGRAMS.fetch_add(1, Ordering::Relaxed);
    let to =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("capi-program-{}-{number}", std::process::id()));
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&to);
    compile.arg(source).arg("-I").arg(HERE);
    compile.arg(&library).args(["-lpthread", "-ldl"]).args(flags);
    match compile.output() {
        Err(error) => {
            skip!("there is no C compiler: {error}");
            None
        }
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success(), "the program does not compile: {said}");
            Some((to, folder))
        }
    }
}

/// Runs the program, under another command if one is named.
fn run(under: &[&str], arguments: &[&str], driver: Option<&Path>) -> Result<(), String> {
    // A program runs some thirty times as long under valgrind.
    let flags: &[&str] = if under.is_empty() { &[] } else { &["-DROUNDS=300"] };
    let Some((program, folder)) = program(flags) else { return Ok(()) };
    let mut command = match under {
        [] => Command::new(&program),
        [tool, options @ ..] => {
            let mut command = Command::new(tool);
            command.args(options).arg(&program);
            command
        }
    };
    command.args(arguments).env("LD_LIBRARY_PATH", folder);
    if let Some(driver) = driver {
        command.env(support::doubles::PATH, driver);
    }
    let done = command.output().map_err(|error| format!("{under:?}: {error}"));
    let _ = std::fs::remove_file(program);
    let done = done?;
    let (out, said) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && out.contains("all of it"), "{}: {out}{said}", done.status);
    Ok(())
}

#[test]
fn a_program_in_c_on_the_host() {
    run(&[], &[], None).unwrap();
}

#[cfg(feature = "cuda")]
#[test]
fn a_program_in_c_on_a_gpu() {
    match support::doubles::named_or_built() {
        Some(driver) => run(&[], &["cuda"], Some(&driver)).unwrap(),
        None => skip!("the simulation is not beside the executable"),
    }
}

#[test]
fn a_program_in_c_under_valgrind() {
    let options = [
        "valgrind",
        "--quiet",
        "--error-exitcode=9",
        "--leak-check=full",
        "--errors-for-leak-kinds=definite",
    ];
    if Command::new("valgrind").arg("--version").output().is_err() {
        skip!("valgrind is not here");
        return;
    }
    run(&options, &[], None).unwrap();
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

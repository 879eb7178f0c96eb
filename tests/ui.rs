//! What the types rule out. Each misuse in `ui/fail` has a twin of the same name in `ui/pass` that compiles and differs
//! by one line (the test sees to that too), so that a test fails to compile for the one reason that it is about.
//!
//! The `.stderr` files are the words of one version of the compiler ([`WORDS_OF`]); with another one only the twins are
//! tested. After a change of the compiler or of a signature that an error quotes, `TRYBUILD=overwrite` writes them anew.

use std::collections::BTreeSet;
use std::path::Path;

/// The compiler that the `.stderr` files are from.
const WORDS_OF: &str = "rustc 1.95.";

fn names(folder: &str) -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui").join(folder);
    let files =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    files.filter(|name| name.ends_with(".rs")).collect()
}

/// The lines of one file that the other has not, blank ones and comments aside.
fn lines(folder: &str, name: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui").join(folder).join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let code = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("//"));
    code.map(str::to_owned).collect()
}

#[test]
fn every_misuse_has_a_twin_one_line_apart() {
    let all = names("fail");
    assert_eq!(all, names("pass"));
    assert!(all.len() >= 14);
    for name in all {
        let (fail, pass) = (lines("fail", &name), lines("pass", &name));
        let longer = fail.len().max(pass.len());
        // Equal but for one line, which is changed, added or left out.
        let front = fail.iter().zip(&pass).take_while(|(a, b)| a == b).count();
        let back = fail.iter().rev().zip(pass.iter().rev()).take_while(|(a, b)| a == b).count();
        assert!(front + back + 1 >= longer && fail != pass, "{name}: more than one line apart");
    }
}

#[test]
fn misuses_do_not_compile() {
    let t = trybuild::TestCases::new();
    t.pass("tests/ui/pass/*.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = std::process::Command::new(rustc).arg("--version").output().unwrap().stdout;
    let version = String::from_utf8_lossy(&version);
    if version.starts_with(WORDS_OF) {
        t.compile_fail("tests/ui/fail/*.rs");
    } else {
        println!(
            "the misuses are skipped: their errors are written down as {WORDS_OF}x has them, this is {version}"
        );
    }
}

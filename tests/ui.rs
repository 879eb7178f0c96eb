//! What the types rule out, on the compiler that runs the tests and on any other.
//!
//! Each misuse in `ui/fail` says at the line of each of its errors which it is (`//~ E0382`), and has a twin of the
//! same name in `ui/pass` that compiles and differs by one line. So a misuse fails to compile for the one reason that
//! it is about, and no word of the compiler's prose matters, which changes with each version.
//!
//! Cargo is asked for the library that this test was built with, which is there already. With
//! `PINPOOL_UI_RUSTC=/path/to/rustc` that compiler is tested, which checks the library by itself first: the development
//! dependencies may need a newer one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Where an error begins, and which one it is.
type Errors = BTreeSet<(u64, String)>;

const MARK: &str = "//~ ";

fn path(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui").join(folder).join(name)
}

fn names(folder: &str) -> BTreeSet<String> {
    let files = std::fs::read_dir(path(folder, "")).unwrap();
    files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
}

/// The lines of one file, marks, blank lines and comments left out.
fn lines(folder: &str, name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(path(folder, name)).unwrap();
    let code = text.lines().map(|line| line.split(MARK).next().unwrap_or_default().trim());
    code.filter(|line| !line.is_empty() && !line.starts_with("//")).map(str::to_owned).collect()
}

/// The errors that a file says it has.
fn expected(name: &str) -> Errors {
    let text = std::fs::read_to_string(path("fail", name)).unwrap();
    let marked = (1..).zip(text.lines()).filter_map(|(at, line)| Some((at, line.split_once(MARK)?.1)));
    marked.flat_map(|(at, codes)| codes.split_whitespace().map(move |code| (at, code.to_owned()))).collect()
}

/// The compiler under test, and the arguments by which it finds the library.
struct Compiler {
    rustc: PathBuf,
    library: Vec<String>,
    out: PathBuf,
}

impl Compiler {
    fn under_test() -> Self {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ui");
        let rustc = match std::env::var_os("PINPOOL_UI_RUSTC") {
            Some(rustc) => {
                cargo.env("RUSTC", &rustc).args(["check", "--lib", "--target-dir"]).arg(out.join("target"));
                rustc
            }
            None => {
                cargo.args(["test", "--no-run", "--test", env!("CARGO_CRATE_NAME")]);
                // A wrong guess here means no more than that the library and what it depends on are built once more.
                // All features are those of the whole workspace, as README's command has them: the dependencies of the
                // other packages add features to those of this one.
                match FEATURES.iter().all(|(_, on)| *on) {
                    true => cargo.args(["--workspace", "--all-features"]),
                    false => cargo.args(["--no-default-features", "--features", &features()]),
                };
                cargo.args((!cfg!(debug_assertions)).then_some("--release"));
                cargo.arg("--target-dir").args(Path::new(env!("CARGO_TARGET_TMPDIR")).parent());
                std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())
            }
        };
        cargo.args(["--quiet", "--locked", "--offline", "--message-format", "json-render-diagnostics"]);
        let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("there is a cargo");
        assert!(built.status.success(), "{cargo:?}:\n{}", String::from_utf8_lossy(&built.stderr));
        let mut folders = BTreeSet::new();
        let mut library = None;
        for line in String::from_utf8(built.stdout).unwrap().lines() {
            let message: Value = serde_json::from_str(line).unwrap();
            let files = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
            for file in files.filter(|file| [".rlib", ".rmeta", ".so"].iter().any(|end| file.ends_with(end)))
            {
                folders.extend(Path::new(file).parent().map(Path::to_owned));
                if message["target"]["name"] == "pinpool" && message["target"]["kind"][0] == "lib" {
                    library = Some(format!("--extern=pinpool={file}"));
                }
            }
        }
        let library =
            library.into_iter().chain(folders.iter().map(|f| format!("-Ldependency={}", f.display())));
        Self { rustc: rustc.into(), library: library.collect(), out }
    }

    /// The errors in a file, and what the compiler said.
    fn errors(&self, folder: &str, name: &str) -> (Errors, String) {
        let out = self.out.join(folder);
        std::fs::create_dir_all(&out).unwrap();
        let mut rustc = Command::new(&self.rustc);
        rustc.args(["--edition=2024", "--crate-type=bin", "--emit=metadata", "--error-format=json"]);
        let said = rustc.args(&self.library).arg("--out-dir").arg(out).arg(path(folder, name)).output();
        let said = said.unwrap_or_else(|error| panic!("{rustc:?}: {error}"));
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        let (mut errors, mut prose) = (Errors::new(), String::new());
        for message in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap_or_default()) {
            prose += message["rendered"].as_str().unwrap_or_default();
            // (The last message, which counts the others, is an error without a place.)
            let place =
                message["spans"].as_array().into_iter().flatten().find(|span| span["is_primary"] == true);
            if let Some(place) = place.filter(|_| message["level"] == "error") {
                let code = message["code"]["code"].as_str().unwrap_or("no code");
                errors.insert((place["line_start"].as_u64().unwrap_or(0), code.to_owned()));
            }
        }
        if said.status.success() != errors.is_empty() {
            errors.insert((0, format!("{}:\n{text}", said.status)));
        }
        (errors, prose)
    }
}

/// The features that this test was built with, so that Cargo finds the same library.
fn features() -> String {
    FEATURES.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect::<Vec<_>>().join(",")
}

/// All features of the crate, and whether this test was built with them.
const FEATURES: [(&str, bool); 5] = [
    ("acl", cfg!(feature = "acl")),
    ("cuda", cfg!(feature = "cuda")),
    ("cudarc", cfg!(feature = "cudarc")),
    ("default", cfg!(feature = "default")),
    ("metrics", cfg!(feature = "metrics")),
];

/// A feature that `FEATURES` lacks makes `misuses_do_not_compile` build the library a second time.
#[test]
fn every_feature_is_known() {
    let manifest = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).unwrap();
    let section = manifest.split_once("\n[features]\n").unwrap().1.split("\n[").next().unwrap();
    let names = section.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()));
    let named: BTreeSet<&str> = names.filter_map(|line| Some(line.split_once(" = ")?.0)).collect();
    assert_eq!(named, BTreeSet::from(FEATURES.map(|(name, _)| name)));
}

#[test]
fn every_misuse_has_a_twin_one_line_apart() {
    let all = names("fail");
    assert_eq!(all, names("pass"));
    assert!(all.len() >= 19);
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
    let compiler = Compiler::under_test();
    let wrong = |folder: &str| -> String {
        let judge = |name: String| {
            let expected = if folder == "pass" { Errors::new() } else { expected(&name) };
            let (found, prose) = compiler.errors(folder, &name);
            let right = found == expected && (folder == "pass" || !expected.is_empty());
            println!("{folder}/{name}: {}", if right { "as it says" } else { "WRONG" });
            (!right).then(|| format!("\n{folder}/{name}: {expected:?} expected, {found:?} found\n{prose}"))
        };
        names(folder).into_iter().filter_map(judge).collect()
    };
    // Both folders at a time. The names are the same: see `every_misuse_has_a_twin_one_line_apart`.
    let (fail, pass) = std::thread::scope(|scope| {
        let fail = scope.spawn(|| wrong("fail"));
        let pass = wrong("pass");
        (fail.join(), pass)
    });
    let wrong = fail.unwrap() + &pass;
    assert!(wrong.is_empty(), "{wrong}");
}

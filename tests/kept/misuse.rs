//! What the types rule out, on the compiler that runs the tests and on any other.
//!
//! Each misuse in `misuses` says at the line of its error which it is (`//~ E0382`), and what a program writes in
//! its place (`//= ...`), if anything. With all misuses replaced a file compiles. So a misuse fails to
//! compile for the one reason that it is about, and no word of the compiler's prose matters, which changes
//! with each version. A file has errors of one kind: a compiler that has found errors of types looks for no
//! wrong owner.
//!
//! Cargo is asked for the library that this test was built with, which is there already. With
//! `PINPOOL_MISUSE_RUSTC=/path/to/rustc` that compiler is tested, which checks the library by itself first: the
//! development dependencies may need a newer one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Where an error begins, and which one it is.
type Errors = BTreeSet<(u64, String)>;

const MISUSE: &str = "//~ ";
const TWIN: &str = "//= ";

/// The misuses of a file by their lines, and the file with the twin of each in its place.
fn read(file: &Path) -> (Errors, String) {
    let text = std::fs::read_to_string(file).unwrap();
    let marked =
        (1..).zip(text.lines()).filter_map(|(at, line)| Some((at, line.split_once(MISUSE)?.1.into())));
    let right =
        text.lines().map(|line| if line.contains(MISUSE) { String::new() } else { line.replace(TWIN, "") });
    (marked.collect(), right.collect::<Vec<_>>().join("\n"))
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
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("misuses");
        let rustc = match std::env::var_os("PINPOOL_MISUSE_RUSTC") {
            Some(rustc) => {
                cargo.env("RUSTC", &rustc).args(["check", "--lib", "--target-dir"]).arg(out.join("target"));
                rustc
            }
            None => {
                cargo.args(["test", "--no-run", "--test", env!("CARGO_CRATE_NAME")]);
                // As README's command builds it. Where this test was built in another way, that library is built once
                // more.
                cargo.args(["--workspace", "--all-features"]);
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
        let library = library.collect();
        std::fs::create_dir_all(&out).unwrap();
        Self { rustc: rustc.into(), library, out }
    }

    /// The errors in a file, and what the compiler said.
    fn errors(&self, file: &Path) -> (Errors, String) {
        let mut rustc = Command::new(&self.rustc);
        rustc.args(["--edition=2024", "--crate-type=lib", "--emit=metadata", "--error-format=json"]);
        let said = rustc.args(&self.library).arg("--out-dir").arg(&self.out).arg(file).output();
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

#[test]
fn misuses_do_not_compile() {
    let compiler = Compiler::under_test();
    for (name, misuses) in [("types.rs", 11), ("owners.rs", 7), ("results.rs", 2)] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kept/misuses").join(name);
        let (expected, right) = read(&file);
        assert_eq!(expected.len(), misuses, "misuses in {name}");
        let (found, prose) = compiler.errors(&file);
        assert_eq!(found, expected, "{name}:\n{prose}");
        let twin = compiler.out.join(name);
        std::fs::write(&twin, right).unwrap();
        let (found, prose) = compiler.errors(&twin);
        assert_eq!(found, Errors::new(), "{name} with the twins:\n{prose}");
    }
}

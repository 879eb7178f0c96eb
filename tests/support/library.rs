//! Shared libraries that are examples of the crate, built by the tests that load them.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The library of the example with this name, built with the features of this test. A variable of the environment can
/// name a built one. `None`: there is no cargo to build it with.
pub fn library(example: &str, named: &str) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(named).filter(|path| !path.is_empty()) {
        return Some(named.into());
    }
    let cargo = std::env::var_os("CARGO")?;
    let here = std::env::current_exe().ok()?;
    // target/PROFILE/deps/this
    let profile = here.parent()?.parent()?;
    let mut command = Command::new(cargo);
    command.args([
        "build",
        "--quiet",
        "--locked",
        "--offline",
        "--example",
        example,
        "--no-default-features",
    ]);
    let features = [
        // With `default` cargo test has built the same library already, as an example.
        ("default", cfg!(feature = "default")),
        ("acl", cfg!(feature = "acl")),
        ("capi", cfg!(feature = "capi")),
        ("cuda", cfg!(feature = "cuda")),
        ("cudarc", cfg!(feature = "cudarc")),
        ("metrics", cfg!(feature = "metrics")),
        ("safetensors", cfg!(feature = "safetensors")),
        ("cli", cfg!(feature = "cli")),
    ];
    let features: Vec<_> = features.into_iter().filter_map(|(name, has)| has.then_some(name)).collect();
    command.arg("--features").arg(features.join(","));
    if profile.ends_with("release") {
        command.arg("--release");
    }
    command.arg("--target-dir").arg(profile.parent()?).current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = command.stdin(Stdio::null()).output().expect("cargo cannot be started");
    assert!(
        output.status.success(),
        "the library cannot be built: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Some(profile.join(format!("examples/lib{example}.so")))
}

//! What the command was asked for, and keeps.

#[test]
fn the_commands_are_there() {
    for name in ["doctor", "bench", "load", "top"] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pinpool"));
        let output = command.args([name, "--help"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains(&format!("pinpool {name}")), "{name}: {text}");
    }
}

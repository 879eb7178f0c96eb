//! The `pinpool` command. `load` moves files to a device and back through a pool, `bench` measures how fast that can
//! be, `doctor` looks for what stands in its way, and `top` shows the pools of a running process.
//!
//! This file reads the command line, and the module `cli` does the rest. The exit status is 0 when all was moved (and
//! verified, if asked) or measured. It is 1 for a mismatch, a device or a disk that fails, memory that cannot be had or
//! a result that cannot be written. It is 2 for a command line that cannot be obeyed, with one line on stderr that says
//! why. Nothing here panics when a pipe closes: what cannot be printed is not printed, and the exit status still tells.

#[cfg(target_os = "linux")]
mod cli;

#[cfg(not(target_os = "linux"))]
fn main() -> std::process::ExitCode {
    eprintln!("error: pinpool needs Linux");
    std::process::ExitCode::from(2)
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    use clap::Parser;

    match cli::args::Args::try_parse() {
        Ok(args) => cli::run(&args),
        Err(error) => cli::refuse(&error),
    }
}

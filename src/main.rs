//! The `pinpool` command: moves files to a device and back through a pool, to see that it works here, measures how fast that
//! can be, looks for what stands in its way, and shows the pools of a running process.
//!
//! This file reads the command line and turns what happened into an exit status: 0 when all was moved (and verified, if
//! asked) or measured, 1 for a mismatch, a device or a disk that fails, memory that cannot be had or a result that cannot be
//! written, 2 for a command line that cannot be obeyed, with one line on stderr that says why. [`cli::load`],
//! [`cli::bench`], the doctor and `top` do the work. Nothing here panics when a pipe closes: what cannot be printed is not
//! printed, and the exit status still tells.

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

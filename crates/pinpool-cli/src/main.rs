//! The `pinpool` command. `load` moves files to a device and back through a pool, `bench` measures
//! the link to a device, `doctor` looks for what stands in the way of pinning and copying, and
//! `top` shows the pools of a running process.
//!
//! This file parses the command line; the folder `cli` does the work. The exit status is 0 when
//! everything was moved (and verified, if asked) or measured, 1 for a mismatch, a device or a disk
//! that fails, memory that cannot be had or a result that cannot be written, and 2 for a command
//! line that cannot be obeyed. A line on stderr says why. A closed pipe causes no panic: the output
//! is dropped, and the exit status stays.

mod cli;

use clap::Parser;

fn main() -> std::process::ExitCode {
    match cli::args::Args::try_parse() {
        Ok(args) => cli::run(&args),
        Err(error) => cli::refuse(&error),
    }
}

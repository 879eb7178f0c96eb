//! The `pinpool` command: what its commands share, and a file or folder for each of them.
//!
//! | module | what is in it |
//! | --- | --- |
//! | `args` | the command line |
//! | `load`, `bench` | the commands of these names |
//! | `sample` | bytes to move, and the file of them that `load` makes where none is named |
//! | `spread` | work spread over several threads |
//! | `doctor` | `pinpool doctor` |
//! | `top` | `pinpool top` |
//! | here | the way from a result to an exit status, lines on stdout and stderr, threads and rates |
//!
//! `main.rs` calls [`run`]. The command uses the library's public face alone.

pub mod args;
pub mod bench;
mod doctor;
// A file of the library that is no part of the library's public face, so it is compiled here once more.
#[path = "../escape.rs"]
mod escape;
pub mod load;
mod sample;
mod spread;
mod top;

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use pinpool::{Device, Error};

/// A mismatch; a device or a disk that fails; memory that cannot be had; a result that cannot be written.
pub const EXIT_FAILED: u8 = 1;
/// A command line that cannot be obeyed.
pub const EXIT_USAGE: u8 = 2;

/// Why the command ends early.
#[derive(Debug)]
pub enum Failure {
    /// The command line cannot be obeyed.
    Usage(String),
    /// The work could not be done.
    Failed(String),
    /// What came back is not what went out.
    Mismatch(String),
}

impl Failure {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => EXIT_USAGE,
            Self::Failed(_) | Self::Mismatch(_) => EXIT_FAILED,
        }
    }
}

/// The cause in one line, with its line breaks made spaces. ([`say`] escapes it.)
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(text) | Self::Failed(text) | Self::Mismatch(text)) = self;
        // Without a list of the words: a cause may be long, and the command may end for want of memory.
        for (number, word) in text.split_whitespace().enumerate() {
            let space = if number > 0 { " " } else { "" };
            write!(f, "{space}{word}")?;
        }
        Ok(())
    }
}

/// Does what the command line says.
pub fn run(args: &args::Args) -> ExitCode {
    log_to_stderr(args.verbose);
    match &args.command {
        args::Command::Load(args) => exit(load::run(args)),
        args::Command::Doctor(args) => doctor::run(args),
        args::Command::Bench(args) => exit(bench::run(args)),
        args::Command::Top(args) => exit(top::run(args)),
    }
}

/// Prints help and version as clap does. A fault of the command line is reported in one line on stderr.
pub fn refuse(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A pipe that its reader has closed is no failure.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
        }
        _ => {
            let text = error.render().to_string();
            // The first paragraph has the cause; usage and hints follow after an empty line.
            let cause: Vec<&str> = text.lines().take_while(|l| !l.trim().is_empty()).map(str::trim).collect();
            say(&format!("{} (see --help)", cause.join(" ")));
        }
    }
    ExitCode::from(EXIT_USAGE)
}

/// Opens the device that the command line names. For a device that is not there the command line is wrong (exit status
/// 2). A device that is there and fails is a failure (exit status 1).
fn open_device(spec: &str) -> Result<Device, Failure> {
    Device::open(spec).map_err(|error| {
        let text = format!("--device: {error}");
        match error {
            Error::UnknownDevice { .. } | Error::Unavailable { .. } | Error::Unsupported(_) => {
                Failure::Usage(text)
            }
            _ => Failure::Failed(text),
        }
    })
}

/// The exit status of a command, which says what went wrong.
fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            say(&format!("error: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Prints a result. A closed pipe is no failure: its reader wants no more, and the exit status still tells.
fn print(out: &mut impl Write, text: &str) -> Result<(), Failure> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::Failed(format!("the result cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// The number of threads that the command line names. Without one: the number of cores, at most eight.
fn threads(named: Option<u16>) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8);
    named.map_or_else(cores, usize::from)
}

/// GB/s of 10^9 bytes. `None` if no time has passed.
fn rate(bytes: u64, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| bytes as f64 / time.as_secs_f64() / 1e9)
}

/// An empty vector with room for so many bytes, or an error: a refused allocation would end the process.
fn room(len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    let refused =
        |e: std::collections::TryReserveError| Error::OutOfMemory { wanted: len, text: e.to_string() };
    bytes.try_reserve_exact(len).map_err(refused)?;
    Ok(bytes)
}

/// How long [`close`] waits for a device. Nothing of the command is in flight any more by then.
const CLOSING: Duration = Duration::from_secs(10);

/// Ends with a device: after this the library makes no call for it, and its driver may end as it likes.
fn close(device: Device) -> Result<(), Failure> {
    device.close(CLOSING).map_err(|error| Failure::Failed(error.to_string()))
}

/// Prints a line on stderr, escaped, since text of files and servers may be in it. A closed stderr is no failure.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{}", escape::text(line));
}

/// An object for programs, in one line. What is beyond ASCII is escaped as JSON does it, since a terminal may be what
/// reads it.
fn json_line(value: &serde_json::Value) -> String {
    let mut line = String::new();
    for character in value.to_string().chars() {
        if character.is_ascii() && character != '\u{7f}' {
            line.push(character);
        } else {
            let mut units = [0; 2];
            line.extend(character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    line
}

/// Has the library's log printed: its errors always, more on demand. Its warning about memory that is not pinned comes
/// once per extent, so at first sight the command says that itself, in one line.
fn log_to_stderr(verbose: u8) {
    let level = match verbose {
        0 => tracing::Level::ERROR,
        1 => tracing::Level::INFO,
        _ => tracing::Level::DEBUG,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
}

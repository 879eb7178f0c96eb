//! The `pinpool` command behind its `main`: a module for each subcommand, and what they share.
//!
//! `args.rs` has the command line; `amount.rs` and `escape.rs` make amounts of memory and texts
//! from outside fit to be shown; `sample.rs` and `spread.rs` are bytes to copy that do not repeat,
//! and work spread over threads. A subcommand ends with `Ok` or a [`CliError`], and only [`exit`]
//! turns that into an exit status, and with `--json` into the object's `error`. Text from files,
//! drivers and servers is escaped before it is printed, so that it cannot steer a terminal.

mod amount;
pub mod args;
pub mod bench;
pub mod doctor;
mod escape;
pub mod load;
mod sample;
mod spread;
pub mod top;

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use clap::error::ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
use console::Term;
use pinpool::{Backing, Device, Error, Pool, PoolBuilder};
use serde_json::{Value, json};

/// A mismatch, a failing device or disk, memory that is not to be had, an unwritable result.
const EXIT_FAILED: u8 = 1;
/// A command line that cannot be obeyed.
const EXIT_USAGE: u8 = 2;

/// Why the command ends early.
#[derive(Debug)]
pub enum CliError {
    /// The command line cannot be obeyed.
    Usage(String),
    /// The work could not be done.
    Failed(String),
    /// What came back is not what went out.
    Mismatch(String),
}

/// What a part of a subcommand ends with.
type Result<T, E = CliError> = std::result::Result<T, E>;

/// The text in one line. ([`say`] escapes it.)
impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(text) | Self::Failed(text) | Self::Mismatch(text)) = self;
        f.write_str(&text.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

/// Runs the subcommand that the command line names.
pub fn run(args: &args::Args) -> u8 {
    log_to_stderr(args.verbose);
    match &args.command {
        args::Command::Load(args) => load::run(args),
        args::Command::Doctor(args) => doctor::run(args),
        args::Command::Bench(args) => bench::run(args),
        args::Command::Top(args) => exit(None, "", top::run(args)),
    }
}

/// Prints help and version to stdout; an error is a line on stderr and, with `--json`, an object.
pub fn refuse(error: &clap::Error, json: bool) -> u8 {
    if matches!(error.kind(), DisplayHelp | DisplayHelpOnMissingArgumentOrSubcommand | DisplayVersion) {
        // The error is ignored: a closed pipe needs no more of the help.
        let _ = error.print();
        return if error.use_stderr() { EXIT_USAGE } else { 0 };
    }
    let text = error.render().to_string();
    // The first paragraph has the cause; usage and hints follow after an empty line.
    let cause: Vec<&str> = text.lines().take_while(|l| !l.trim().is_empty()).map(str::trim).collect();
    let cause = cause.join(" ");
    let cause = format!("{} (see --help)", cause.strip_prefix("error: ").unwrap_or(&cause));
    exit(json.then(|| json!({})), "", Err(CliError::Usage(cause)))
}

/// Opens the device that the command line names. A name that no device can have is an error of the
/// command line; a device that is missing or fails is not.
fn open_device(spec: &str) -> Result<Device> {
    let (family, number) = spec.split_once(':').unwrap_or((spec, "0"));
    let is_name = ["acl", "cuda", "host"].contains(&family) && number.parse::<u32>().is_ok();
    Device::open(spec).map_err(|error| match is_name || spec == "auto" {
        true => CliError::Failed(error.to_string()),
        false => CliError::Usage(format!("--device: {error}")),
    })
}

/// The builder of a pool, with the backing that the command line names.
fn pool(device: &Device, backing: Option<Backing>) -> PoolBuilder {
    backing.into_iter().fold(Pool::builder(device), PoolBuilder::backing)
}

/// A subcommand's exit status. Prints its text, its object with the error or null, the error.
fn exit(object: Option<Value>, text: &str, result: Result<()>) -> u8 {
    let mut text = text.to_owned();
    if let Some(mut object) = object {
        object["error"] = result.as_ref().err().map(CliError::to_string).into();
        text += &(json_line(&object) + "\n");
    }
    // Printed also after an error, which goes before one of printing.
    match result.and(print(&text)) {
        Ok(()) => 0,
        Err(failure) => {
            say(&format!("error: {failure}"));
            if let CliError::Usage(_) = failure { EXIT_USAGE } else { EXIT_FAILED }
        }
    }
}

/// Prints a result. A closed pipe is no error: the exit status has the outcome.
fn print(text: &str) -> Result<()> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("the result cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// The number of threads on the command line; without one, the number of cores, at most eight.
fn threads(named: Option<u16>) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8);
    named.map_or_else(cores, usize::from)
}

/// The library's error, without the name of the device in front of it: the text around it has that.
fn of_device(device: &Device, error: &Error) -> String {
    escape::unnamed(&error.to_string(), device.name()).to_owned()
}

/// Shows on a terminal how far the command is, in place of what this showed before.
fn progress(text: &str) {
    let term = Term::stderr();
    if term.is_term() {
        let text: String = text.chars().take(usize::from(term.size().1).saturating_sub(1)).collect();
        // The terminal's error is ignored: what the command ends with is told elsewhere.
        let _ = term.clear_line().and_then(|()| term.write_str(&text));
    }
}

/// GB/s of 10^9 bytes. `None`: `time` is zero.
fn rate(bytes: u64, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| bytes as f64 / time.as_secs_f64() / 1e9)
}

/// `len` zeros. A refused allocation is an error here; in `vec!` it would end the process.
fn zeros(len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|e| Error::OutOfMemory { wanted: len, text: e.to_string() })?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Closes a device. The library makes no more driver call for it: the driver may shut down.
fn close(device: Device) -> Result<()> {
    // None of the command's copies is in flight any more.
    device.close(Duration::from_secs(10)).map_err(|error| CliError::Failed(error.to_string()))
}

/// Prints a line on stderr, escaped: it may have outside text. A closed stderr is ignored.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{}", escape::text(line));
}

/// A JSON value in one line, for a terminal: characters beyond ASCII, and DEL, are escaped.
fn json_line(value: &Value) -> String {
    let shown = |c: char| match c {
        '\0'..'\u{7f}' => c.to_string(),
        _ => c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
    };
    value.to_string().chars().map(shown).collect()
}

/// Prints the library's log on stderr: errors always, more with `-v`. Warnings stay out by default:
/// that about unpinned memory comes once per extent, and the command says it itself.
fn log_to_stderr(verbose: u8) {
    const LEVELS: [tracing::Level; 3] = [tracing::Level::ERROR, tracing::Level::INFO, tracing::Level::DEBUG];
    // The error is ignored: a program that has a subscriber of its own keeps it.
    let _ = tracing_subscriber::fmt()
        .with_max_level(LEVELS[usize::from(verbose.min(2))])
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .try_init();
}

//! The doctor's output: a text with a line for each check, or one JSON object, made from the same findings.
//!
//! The text is aligned, and each remedy has a line of its own, so that it can be copied. `anstream` decides whether the
//! terminal gets colours, and honours `NO_COLOR`.

use anstyle::{AnsiColor, Style};
use serde_json::{Value, json};
use textwrap::{Options, WordSplitter::NoHyphenation};

use super::{CHECKS, Check, Findings, Status};
use crate::cli::amount::Amount;
use crate::cli::{self, json_line};

impl Status {
    fn look(self) -> (&'static str, Style) {
        let (word, color) = match self {
            Self::Ok => ("ok", AnsiColor::Green),
            Self::Warn => ("warn", AnsiColor::Yellow),
            Self::Fail => ("fail", AnsiColor::Red),
        };
        (word, Style::new().fg_color(Some(color.into())).bold())
    }
}

/// Columns of a check's name.
const NAME: usize = "fragmentation".len();

/// Prints what needs no trial: the device, and the checks that only read files.
pub fn print_head(findings: &Findings) -> cli::Result<()> {
    let Findings { device, capacity, checks, .. } = findings;
    write(&format!("device {device}, a pool of {}\n\n{}", Amount(*capacity), lines(checks)))
}

/// Prints the checks that [`print_head`] left out, and the sum of all.
pub fn print_rest(findings: &Findings) -> cli::Result<()> {
    let count = |status| findings.checks.iter().filter(|check| check.status == status).count();
    let [ok, warn, fail] = [Status::Ok, Status::Warn, Status::Fail].map(count);
    let tried = lines(&findings.checks[CHECKS.len()..]);
    write(&format!("{tried}\n{ok} ok, {warn} to look at, {fail} failed\n"))
}

/// Prints the findings as one JSON object.
pub fn print_json(findings: &Findings) -> cli::Result<()> {
    write(&format!("{}\n", json_line(&json(findings))))
}

fn write(text: &str) -> cli::Result<()> {
    cli::print(&mut anstream::stdout(), text)
}

fn json(findings: &Findings) -> Value {
    let check = |check: &Check| {
        json!({
            "name": check.name,
            "status": check.status.look().0,
            "found": check.found,
            "fix": if check.fix.is_empty() { Value::Null } else { check.fix.join("\n").into() },
        })
    };
    json!({
        "device": findings.device,
        "capacity_bytes": findings.capacity,
        "status": findings.worst().look().0,
        "checks": findings.checks.iter().map(check).collect::<Vec<_>>(),
        "measured": {
            "pin_gb_per_s": findings.measured.pin,
            "touch_gb_per_s": findings.measured.touch,
            "upload_gb_per_s": findings.measured.upload,
            "download_gb_per_s": findings.measured.download,
            "expected_gb_per_s": findings.measured.expected,
        },
    })
}

fn lines(checks: &[Check]) -> String {
    let mut text = String::new();
    for check in checks {
        let (word, style) = check.status.look();
        text += &format!("{style}{word:<4}{style:#}  {:<NAME$}  ", check.name);
        // Findings are wrapped; remedies are not, so that they can be copied.
        text += &wrapped(&check.found, NAME + 8);
        for fix in &check.fix {
            text += &format!("{:>indent$}  fix: {fix}\n", "", indent = NAME + 6);
        }
    }
    text
}

/// The most columns of a line of findings.
const COLUMNS: usize = 110;

/// The text in lines of whole words, all but the first indented.
fn wrapped(text: &str, indent: usize) -> String {
    let indent = " ".repeat(indent);
    let options = Options::new(COLUMNS).initial_indent(&indent).subsequent_indent(&indent).break_words(false);
    format!("{}\n", textwrap::fill(text, options.word_splitter(NoHyphenation)).trim_start())
}

/// A speed as text.
pub fn speed(gb_per_s: f64) -> String {
    format!("{gb_per_s:.1} GB/s")
}

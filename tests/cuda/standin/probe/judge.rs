//! What a child's lines say, and what is wrong with it.

use std::fmt;

use super::MARK;
use super::listed::{Listed, OnDriver};

/// What a driver did at a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Got {
    /// The code and the driver's word for it.
    Code(u32, String),
    /// It is listed as not to be tried.
    NotTried,
    /// The rule stopped there: why.
    Short(String),
}

/// One step of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The test's name.
    pub rule: &'static str,
    /// From 1.
    pub step: usize,
    pub call: String,
    /// The stand-in's code.
    pub stand_in: u32,
    pub got: Got,
}

impl Row {
    pub fn same(&self) -> bool {
        matches!(&self.got, Got::Code(code, _) if *code == self.stand_in)
    }
}

/// The rows in a child's output; at which step it stopped in the middle; and whether it came to its end.
pub fn read(rule: &'static str, output: &str) -> (Vec<Row>, Option<usize>, bool) {
    let (mut rows, mut at, mut done) = (Vec::new(), None, false);
    for line in output.lines() {
        // The test harness may have written in front of it.
        let Some((_, line)) = line.split_once(MARK) else { continue };
        let parts: Vec<&str> = line.trim_start_matches('\t').split('\t').collect();
        let number = |n: usize| parts.get(n).and_then(|part| part.parse::<u32>().ok()).unwrap_or(u32::MAX);
        let text = |n: usize| parts.get(n).copied().unwrap_or_default().to_owned();
        let step = number(1) as usize;
        let row = |got| Row { rule, step, call: text(2), stand_in: number(3), got };
        match parts[0] {
            "begin" => at = Some(step),
            "says" => {
                at = None;
                rows.push(row(Got::Code(number(4), text(5))));
            }
            "not" => rows.push(row(Got::NotTried)),
            "short" => {
                let got = Got::Short(text(1));
                rows.push(Row { rule, step: 0, call: String::new(), stand_in: 0, got });
            }
            "done" => done = true,
            _ => {}
        }
    }
    (rows, at, done)
}

/// What is wrong: a difference that is not listed, and a listed difference that was not seen.
pub fn judge(rows: &[Row], listed: &[Listed]) -> Vec<String> {
    let mut wrong = Vec::new();
    for row in rows {
        let known = listed.iter().find(|l| (l.rule, l.step) == (row.rule, row.step));
        if let Some(known) = known.filter(|k| (k.call, k.stand_in) != (&*row.call, row.stand_in)) {
            wrong.push(format!(
                "{row}: the list has step {} as {} with {}",
                known.step, known.call, known.stand_in
            ));
            continue;
        }
        let what = match (&row.got, known.map(|k| k.on_driver)) {
            (Got::Short(_), _) | (Got::NotTried, Some(OnDriver::NotTried)) => continue,
            (Got::NotTried, _) => "it was not tried, and the list does not say so",
            (Got::Code(..), None) if row.same() => continue,
            (Got::Code(..), None) => "a difference that is not listed",
            (Got::Code(code, _), Some(OnDriver::Says(known, _))) if *code == known => continue,
            (Got::Code(..), Some(_)) if row.same() => "it is listed, and the driver does not differ",
            (Got::Code(..), Some(_)) => "it differs, and not as the list says",
        };
        wrong.push(format!("{row}: {what}"));
    }
    for known in listed {
        let of_rule = || rows.iter().filter(|row| row.rule == known.rule);
        let stopped = of_rule().any(|row| matches!(row.got, Got::Short(_)));
        if !stopped && !of_rule().any(|row| row.step == known.step) {
            wrong
                .push(format!("{} step {}: it is listed, and there is no such step", known.rule, known.step));
        }
    }
    wrong
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, step, call, stand_in, got } = self;
        write!(f, "{rule} step {step}, {call}: the stand-in says {stand_in}, the driver ")?;
        match got {
            Got::Code(code, name) => write!(f, "{code} ({name})"),
            Got::NotTried => write!(f, "was not asked"),
            Got::Short(why) => write!(f, "was not asked: {why}"),
        }
    }
}

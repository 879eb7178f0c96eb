//! Code that the benches share. This file has arguments, memory limits, figures by rounds, gates, and processor time;
//! `link.rs` beside it has the bare link and the speed of memory, for the benches of bulk copies; `small.rs` has pools,
//! buffers and random numbers.
//!
//! Two figures are compared within a round, never across rounds: contenders take short turns, each round gives a ratio,
//! and the benches print the median of the rounds' ratios with their quartiles. What else the machine does (changes of
//! the processor's clock, other users) then affects all contenders of a round alike.
#![allow(dead_code, reason = "each bench uses a part of it")]

pub mod link;
pub mod small;

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

// --- arguments

/// The value of `--name VALUE` or `--name=VALUE`.
pub fn option(name: &str) -> Option<String> {
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let Some(rest) = arg.strip_prefix("--").and_then(|arg| arg.strip_prefix(name)) else { continue };
        match rest.strip_prefix('=') {
            Some(value) => return Some(value.into()),
            None if rest.is_empty() => return args.next(),
            None => {}
        }
    }
    None
}

/// Whether `--name` was given.
pub fn flag(name: &str) -> bool {
    std::env::args().skip(1).any(|arg| arg.strip_prefix("--") == Some(name))
}

pub fn number(name: &str, default: usize) -> usize {
    option(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("--{name} {text:?} is not a whole number"))
    })
}

/// Numbers between commas.
pub fn numbers(name: &str, default: &[usize]) -> Vec<usize> {
    option(name).map_or(default.into(), |text| {
        let parse = |part: &str| part.trim().parse();
        text.split(',')
            .map(|part| parse(part).unwrap_or_else(|_| panic!("--{name} {text:?} is not like 1,2,4")))
            .collect()
    })
}

/// Whether a part of the bench was asked for: `--only A,B`, or all of them.
pub fn wanted(part: &str) -> bool {
    option("only").is_none_or(|list| list.split(',').any(|name| name.trim() == part))
}

/// `--quick`, or `PINPOOL_BENCH_QUICK` as for the other benches.
pub fn quick() -> bool {
    flag("quick") || std::env::var("PINPOOL_BENCH_QUICK").is_ok_and(|value| value != "0")
}

// --- memory

/// The most memory that a bench uses unless an option asks for more, however much the machine has.
pub const MEMORY: usize = 4 << 30;

/// Prints the memory that a bench is going to use, page cache included. Panics if it is above [`MEMORY`] and no option
/// asked for that.
pub fn plan(asked: bool, parts: &[(&str, usize)]) {
    let mib = |bytes: usize| bytes >> 20;
    let all = parts.iter().map(|part| part.1).sum();
    let list: Vec<String> = parts.iter().map(|(what, bytes)| format!("{what} {}", mib(*bytes))).collect();
    println!("memory: {} MiB in all: {}", mib(all), list.join(", "));
    assert!(asked || all <= MEMORY, "more than {} MiB, and no option asks for that much", mib(MEMORY));
}

/// Prints the most memory that the process had, pinned memory included, page cache not.
pub fn used() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    if let Some(kib) = most.and_then(|kib| kib.trim().parse::<usize>().ok()) {
        println!("memory: {} MiB at most", kib >> 10);
    }
}

// --- figures

/// The value at a quantile.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n => sorted[((n - 1) as f64 * q).round() as usize],
    }
}

/// The quartiles of some values.
#[derive(Clone, Copy)]
pub struct Spread {
    pub low: f64,
    pub mid: f64,
    pub high: f64,
}

impl Spread {
    pub fn of(values: &[f64]) -> Self {
        let [low, mid, high] = [0.25, 0.5, 0.75].map(|q| quantile(values, q));
        Self { low, mid, high }
    }
}

/// One figure per contender and round.
#[derive(Clone, Default)]
pub struct Rounds(Vec<Vec<f64>>);

impl Rounds {
    pub fn new(contenders: usize) -> Self {
        Self(vec![Vec::new(); contenders])
    }

    pub fn add(&mut self, contender: usize, value: f64) {
        self.0[contender].push(value);
    }

    pub fn values(&self, contender: usize) -> &[f64] {
        &self.0[contender]
    }

    pub fn spread(&self, contender: usize) -> Spread {
        Spread::of(&self.0[contender])
    }

    /// The rounds' ratios of one contender to another.
    pub fn ratio(&self, contender: usize, to: usize) -> Spread {
        let ratios: Vec<f64> = self.0[contender].iter().zip(&self.0[to]).map(|(a, b)| a / b).collect();
        Spread::of(&ratios)
    }
}

static JUDGE: AtomicBool = AtomicBool::new(false);

/// From here on gates are judged, since the device is a real one.
pub fn judge() {
    // Relaxed: set and read by the main thread.
    JUDGE.store(true, Ordering::Relaxed);
}

/// Prints a gate and the measured figure; lower is better.
pub fn at_most(what: impl Display, measured: Spread, gate: f64, aim: Option<f64>) {
    verdict(what, measured, gate, aim, "at most", |value, bound| value <= bound);
}

/// The same where higher is better.
pub fn at_least(what: impl Display, measured: Spread, gate: f64, aim: Option<f64>) {
    verdict(what, measured, gate, aim, "at least", |value, bound| value >= bound);
}

fn verdict(
    what: impl Display,
    Spread { low, mid, high }: Spread,
    gate: f64,
    aim: Option<f64>,
    word: &str,
    holds: impl Fn(f64, f64) -> bool,
) {
    let says = match aim {
        _ if !JUDGE.load(Ordering::Relaxed) => "not judged here",
        _ if !holds(mid, gate) => "MISSED",
        Some(aim) if holds(mid, aim) => "holds, and the aim",
        _ => "holds",
    };
    let aim = aim.map(|aim| format!(", aim {aim}")).unwrap_or_default();
    println!("gate: {what}: {mid:.3} (quartiles {low:.3} to {high:.3}), {word} {gate}{aim}: {says}");
}

/// Prints a ratio beside the gates that is not a gate itself.
pub fn beside(what: impl Display, Spread { low, mid, high }: Spread) {
    println!("{what}: {mid:.3} (quartiles {low:.3} to {high:.3})");
}

/// Prints a line for scripts: name, threads, median, quartiles. The name has the unit if it is not ns an operation.
pub fn line(name: impl Display, threads: usize, Spread { low, mid, high }: Spread) {
    println!("@ {name} {threads} {mid:.1} {low:.1} {high:.1}");
}

// --- time

/// Keeps the processor busy for `time`.
pub fn spin(time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Processor time of this process's running threads with names that start with `prefix` (all, if it is empty).
///
/// In nanoseconds from `schedstat` if the kernel keeps that, else in the clock ticks of `stat` (mostly 10 ms).
pub fn processor_time(prefix: &str) -> Duration {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Duration::ZERO };
    tasks.flatten().filter_map(|task| of_task(&task.path(), prefix)).sum()
}

fn of_task(task: &std::path::Path, prefix: &str) -> Option<Duration> {
    let read = |file: &str| std::fs::read_to_string(task.join(file)).ok();
    // The kernel cuts names off after 15 bytes.
    if !read("comm")?.trim_end().starts_with(prefix.get(..15).unwrap_or(prefix)) {
        return None;
    }
    let precise = read("schedstat").and_then(|text| text.split(' ').next()?.trim().parse::<u64>().ok());
    // Kernels without the accounting have the file, with zeros in it.
    let precise = precise.filter(|&nanos| nanos > 0);
    if let Some(nanos) = precise {
        return Some(Duration::from_nanos(nanos));
    }
    // The name, in parentheses, may contain spaces, so fields are counted from behind it: user and system time are the
    // 12th and the 13th.
    let text = read("stat")?;
    let mut fields = text.rsplit(')').next()?.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let ticks = ticks()? + ticks()?;
    // SAFETY: asks for a number.
    let hertz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    Some(Duration::from_nanos(ticks * 1_000_000_000 / hertz))
}

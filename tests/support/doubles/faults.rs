//! Every call that a scenario makes of the stand-in, made to fail once.
//!
//! A run without a fault says which calls there are and how often each is made; then there is one run for each call,
//! each turn of it that is asked for, and each code. Threads make the calls, so how many there are varies with the load
//! of the machine, and a fault that is set for one of the last may find none: that is no failure of the crate's. But
//! each call must have been met at least by the fault for its first turn, else the sweep shows nothing of it.

use std::collections::BTreeMap;

use pinpool::Error;

use super::{Report, StandIn, again};

/// The call, which one of them, the code, and whether it is done all the same.
pub type Fault<'a> = (&'a str, u64, u32, bool);

/// Runs the scenario. Returns what is wrong with it.
pub type Run<'a> = &'a mut dyn FnMut(Option<Fault<'_>>) -> (Vec<String>, Report);

/// The parameters of a sweep.
pub struct Sweep<'a> {
    /// The test, which is started again for each fault that needs a process of its own.
    pub test: &'a str,
    /// Of a call that is made that often: which ones are to fail.
    pub turns: &'a dyn Fn(&str, u64) -> Vec<u64>,
    /// With which codes, and whether the call is done all the same.
    pub codes: &'a dyn Fn(&str) -> Vec<(u32, bool)>,
    /// Codes that end the device, or leave threads and memory behind, or leak a buffer and with it the device: each in
    /// a process of its own.
    pub apart: &'a dyn Fn(&str, u64, u64) -> Vec<u32>,
    pub run: Run<'a>,
}

/// What a scenario found wrong, and whether the device was lost.
#[derive(Default)]
pub struct Findings {
    pub wrong: Vec<String>,
    pub dead: bool,
}

impl Findings {
    pub fn wrong(&mut self, text: impl Into<String>) {
        self.wrong.push(text.into());
    }

    /// Tries twice. With one fault in a run, only a lost device fails twice.
    pub fn again<R>(&mut self, what: &str, mut call: impl FnMut() -> Result<R, Error>) -> Option<R> {
        let mut last = None;
        for _ in 0..2 {
            match call() {
                Ok(value) => return Some(value),
                Err(error) if error.is_device_lost() => {
                    self.dead = true;
                    return None;
                }
                Err(error) => last = Some(error),
            }
        }
        self.wrong(format!("{what} failed twice: {last:?}"));
        None
    }

    /// After a run: what is wrong, by what the scenario saw and by the stand-in's report. `may_leak` has the kinds of
    /// things that the fault lets be left.
    pub fn judged(mut self, report: &Report, fault: Option<Fault<'_>>, may_leak: &str) -> Vec<String> {
        for violation in &report.violations {
            self.wrong(format!("broke {violation}"));
        }
        let lost = is_final(fault);
        if lost {
            // After the end of the driver nothing can be opened, and the error says that there is no device.
            self.wrong.retain(|w| !w.starts_with("open failed") && !w.starts_with("adopt_context failed"));
        }
        // No call may touch what a lost device had.
        const ALL: &str = "contexts streams events allocations hosts registrations graphs objects";
        let may_leak = if lost { ALL } else { may_leak };
        for leak in &report.leaks {
            if !leak.split(' ').next().is_some_and(|what| may_leak.contains(what)) {
                self.wrong(format!("leaked {leak}"));
            }
        }
        if self.dead && !lost {
            self.wrong("the device was lost by an error that is not sticky");
        }
        self.wrong
    }
}

/// Whether it ends the device, or the driver. What a lost device had in flight is leaked, and with it the context: it
/// is never closed.
pub fn is_final(fault: Option<Fault<'_>>) -> bool {
    fault.is_some_and(|f| [4, 700].contains(&f.2))
}

/// On a stand-in as just loaded, with this fault to come: a scenario's run, on a thread of its own, so that nothing of
/// the driver's state of this thread outlives it. `None`: it panicked.
pub fn on_a_thread<T: Send + 'static>(
    stand_in: &StandIn,
    fault: Option<Fault<'_>>,
    scenario: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    stand_in.reset();
    if let Some((name, nth, code, after)) = fault {
        stand_in.fail(name, nth, code, after);
    }
    std::thread::spawn(scenario).join().ok()
}

/// The fault that a process of its own was started for.
fn named() -> Option<(String, u64, u32)> {
    let fault = std::env::var("FAULT").ok()?;
    let parts: Vec<&str> = fault.split(':').collect();
    let [name, nth, code] = parts[..] else { panic!("{fault}") };
    Some((name.into(), nth.parse().unwrap(), code.parse().unwrap()))
}

impl Sweep<'_> {
    /// All of it. Each of `wanted` must be among the calls. In a process that was started for one fault: that one
    /// alone.
    pub fn all(self, stand_in: &StandIn, wanted: &[&str]) {
        if let Some((name, nth, code)) = named() {
            let fault = (name.as_str(), nth, code, false);
            return assert_eq!((self.run)(Some(fault)).0, Vec::<String>::new(), "{fault:?}");
        }
        let (wrong, clean) = (self.run)(None);
        assert_eq!((wrong, clean.leaks), (vec![], vec![]), "without any fault");
        let calls: BTreeMap<_, _> = clean.calls.into_iter().collect();
        println!("{calls:?}");
        for name in wanted {
            assert!(calls.contains_key(*name), "the scenario does not call {name}");
        }
        let (mut runs, mut struck, mut failures, mut missed) = (0, 0, Vec::new(), Vec::new());
        for (name, &count) in &calls {
            let mut turns = (self.turns)(name, count);
            turns.retain(|nth| *nth > 0 && *nth <= count);
            turns.sort_unstable();
            turns.dedup();
            for nth in turns {
                for (code, after) in (self.codes)(name) {
                    let (wrong, _) = (self.run)(Some((name, nth, code, after)));
                    let met = stand_in.struck();
                    (runs, struck) = (runs + 1, struck + met);
                    if nth == 1 && met == 0 {
                        missed.push(format!("{name} {code} {after}"));
                    }
                    failures.extend(wrong.iter().map(|w| format!("{name} {nth} {code} {after}: {w}")));
                    assert!(failures.len() < 20, "{failures:#?}");
                }
                for code in (self.apart)(name, nth, count) {
                    again(self.test, &[("FAULT", &format!("{name}:{nth}:{code}"))]);
                }
            }
        }
        println!("{runs} runs, {struck} calls made to fail");
        assert!(failures.is_empty(), "{failures:#?}");
        assert!(missed.is_empty(), "made, and never made to fail: {missed:#?}");
    }
}

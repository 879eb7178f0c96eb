//! Every device call fails once, in every way, and nothing is lost.
//!
//! One scenario uses everything that the pool has. It is run once without faults, and the calls that it makes to the
//! device are recorded. Then it is run again for each of these calls and each kind of failure, with exactly that call
//! failing. The scenario deals with errors as a careful server would: it tries again where that makes sense, goes on
//! without where it does not, and never believes an error.
//!
//! After each run: nothing panicked or hung, `check()` finds every byte, nothing is checked out or in flight, bytes are
//! quarantined only if the device was lost, what was reported as complete holds the right bytes, and when pool, streams
//! and device are dropped the device has everything back (but for what the failing call itself was to give back).
//!
//! That is on a simulated GPU that is moved by hand, so the replay is exact: the same calls in the
//! same order up to the one that fails. Beside threads, calls of the host device fail at random in
//! `foreign`. On such GPUs, too, the pool runs against a plain model of it (`model`).

#![allow(unsafe_code, reason = "memory by its address")]

mod audit;
mod foreign;
mod memory;
mod model;
mod scenario;
mod server;
mod sharing;
#[path = "../support/mod.rs"]
mod support;

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pinpool::{
    Device, DeviceSlice, Error, InFlight, Landing, Lend, PinnedBuf, Pool, Request, Result, Stream,
    SubmitError,
};

use audit::leftovers;
use memory::{COMPARED, OTHERS};
use scenario::{OWN, Topic, scenario};
use server::{Report, Server};
use sharing::{SHARED, SHARING};
use support::hand::{self, Failure, Machine};
use support::{HANG, bytes, panicking, process};

/// Bytes of the pieces of device memory that copies go to.
const SLOT: usize = 2 << 10;
const SLOTS: usize = 24;
/// A length of which few fit into the pool.
const BIG: usize = 100 << 10;
const CAPACITY: usize = 960 << 10;

/// Nothing hangs or is stalled any more.
fn resume(machine: &Machine) {
    machine.hang(false);
    machine.resume(0, None);
}

fn fill(buf: &mut PinnedBuf, seed: u64, len: usize) {
    buf.clear();
    buf.extend_from_slice(&bytes(seed as usize, len));
}

/// What a clean run must have done beside all that it tries twice, so that each of it can fail.
const EVERYTHING: [&str; 8] = [
    "device memory dropped in use",
    "hold",
    "growth",
    "claim",
    "download into a claimed buffer",
    "await several",
    "await",
    "trim",
];

/// A call by its name, and how it fails.
type Failed = (&'static str, Failure);

/// One run with one failing call. Returns what went wrong, if anything did.
fn run(machine: &Machine, device: Device, topics: &[Topic], failed: Option<Failed>) -> (Report, Vec<String>) {
    let done = catch_unwind(AssertUnwindSafe(|| scenario(machine, device, topics)));
    let struck = machine.calm() == 0;
    let Ok(mut report) = done else { return (Report::default(), vec!["a panic".into()]) };
    report.struck = struck;
    let mut wrong = std::mem::take(&mut report.wrong);
    let failed = failed.filter(|_| struck);
    wrong.extend(leftovers(machine, failed, &report));
    let device_lost = failed.is_some_and(|f| f.1 == Failure::DeviceLost);
    if report.quarantined > 0 && !device_lost {
        wrong.push(format!("{} bytes are quarantined without a reason", report.quarantined));
    }
    if report.lost && !device_lost {
        wrong.push("the device counts as lost without a reason".into());
    }
    (report, wrong)
}

/// The names of the calls in a trace, each with its number among those of its name.
fn numbered(trace: &str) -> Vec<(&str, u64)> {
    let mut counts = std::collections::BTreeMap::new();
    let number = |name| {
        let count: &mut u64 = counts.entry(name).or_default();
        *count += 1;
        (name, *count)
    };
    trace.split(' ').map(number).collect()
}

/// Runs topics by hand, with each call failing once, in every way; or one of so many of these cases.
fn sweep(topics: &[Topic], does: &[&str], makes: &[&str], one_in: usize) {
    panicking::install_if_asked();
    let machine = Machine::new(1, 4 << 20, 11);
    let run = |failed: Option<(&'static str, u64, Failure)>| {
        machine.renew(11);
        let device = machine.device(0);
        machine.command("trace");
        if let Some((call, nth, failure)) = failed {
            machine.fault(call, nth, failure);
        }
        let (report, wrong) = run(&machine, device, topics, failed.map(|(call, _, failure)| (call, failure)));
        (report, wrong, machine.command("traced"))
    };
    let (report, wrong, trace) = run(None);
    assert_eq!(wrong, Vec::<String>::new(), "without a fault");
    for what in does {
        assert!(report.done.contains(what), "a clean run does not do this: {what}");
    }
    let trace: &'static str = trace.leak();
    let calls = numbered(trace);
    for call in makes {
        assert!(calls.contains(&(call, 1)), "a clean run does not call {call}");
    }
    // The same finding of several calls is told once.
    let mut findings = std::collections::BTreeMap::new();
    for (way, failure) in Failure::ALL.into_iter().enumerate() {
        let (mut failed, mut all) = (0, 0);
        // Each call fails in some of the ways, if not all cases are run.
        for (at, &(call, nth)) in calls.iter().enumerate().skip(way % one_in).step_by(one_in) {
            let queueing = [Failure::RunsAnyway, Failure::Stall].contains(&failure);
            // Calls around every other one, for its context and its thread's mode.
            let around = call.starts_with("cuCtx") || call.starts_with("cuThread");
            if queueing && !hand::queues(call) || around && nth > 6 {
                continue;
            }
            all += 1;
            let (_, mut wrong, replayed) = run(Some((call, nth, failure)));
            if replayed.split(' ').take(at + 1).eq(trace.split(' ').take(at + 1)) {
                failed += 1;
            } else {
                wrong.push("the replay took another way before the fault".into());
            }
            findings.extend(wrong.into_iter().map(|text| (format!("{failure:?} of {call}: {text}"), nth)));
        }
        println!("{failure:?}: {failed} of {all} calls failed once");
        assert!(failed == all && all > 0);
    }
    assert!(findings.is_empty(), "with the number of the call: {findings:#?}");
}

#[test]
fn each_call_fails_once() {
    sweep(OWN, &EVERYTHING, &[&hand::CALLS[..], &["cuPointerGetAttributes"]].concat(), 1);
}

#[test]
fn each_call_for_other_memory_fails_once() {
    const CALLS: [&str; 7] = [
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemAllocManaged",
        "cuMemFree_v2",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemHostGetDevicePointer_v2",
    ];
    sweep(OTHERS, &COMPARED, &CALLS, 1);
}

#[test]
fn each_call_of_sharing_fails_once() {
    sweep(SHARED, &["cuGraphExecDestroy", "cuStreamDestroy_v2"], &SHARING, 1);
}

/// A third of the cases again, while the subscriber panics at every call.
#[test]
fn each_call_fails_once_under_a_subscriber_that_panics() {
    const TEST: &str = "each_call_fails_once_under_a_subscriber_that_panics";
    if std::env::var_os("PINPOOL_SUBSCRIBER").is_none() {
        return process::passes(TEST, &[("PINPOOL_SUBSCRIBER", "panics")], 20 * HANG);
    }
    sweep(OWN, &EVERYTHING, &[], 3);
}

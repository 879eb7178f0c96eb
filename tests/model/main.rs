//! The pool against a plain model of it, on simulated GPUs that move by hand.
//!
//! Random sequences of operations (`ops`), with faults, hung streams and dying devices, run against the pool and the
//! model (`world`); after every step everything that must hold is asserted. The run is deterministic: such a device has no
//! threads, and the sequences follow from a seed. Transitions that random sequences take only by luck are scripted
//! (`scripted`): every call of the driver failing in every way, among others. At the end the run prints how
//! often each transition was taken, and fails if one never was.
//!
//! Beside it, with threads and a clock, requests of all forms that wait (`liveness`).
//!
//! With `PINPOOL_SUBSCRIBER=panics` a subscriber panics meanwhile, and every waker once it has noted its call.
//!
//! `PINPOOL_CASES=N` runs N times as many cases, `PINPOOL_SEED=N` others, and `PINPOOL_SHRINK=N`
//! tries N times to make a failing case smaller.

#![allow(unsafe_code, reason = "the model looks at memory in flight; PinnedBuf::set_len is unsafe")]

mod liveness;
mod ops;
mod scripted;
#[path = "../support/mod.rs"]
mod support;
mod tally;
mod world;

use std::cell::RefCell;

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use ops::{Op, Setup};
use support::hand::Machine;
use support::panicking;
use tally::Tally;
use world::{World, machine};

/// Cases in an ordinary run.
const CASES: u32 = 224;

fn run(setup: &Setup, ops: &[Op], tally: &mut Tally, machine: &Machine) {
    let mut world = World::new(setup, tally, machine);
    for op in ops {
        world.apply(op);
        world.check();
    }
    world.end();
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |v| v.parse().unwrap_or_else(|e| panic!("{name}={v}: {e}")))
}

#[test]
fn the_pool_behaves_like_its_model() {
    panicking::install_if_asked();
    // Three parts at once, each on a thread of its own.
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let parts =
            [scope.spawn(scripted_cases), scope.spawn(|| random_cases(0)), scope.spawn(|| random_cases(1))];
        for part in parts {
            tally.add_all(part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    let missing = tally.report(scripted::faults());
    assert!(missing.is_empty(), "never taken: {missing:#?}");
}

fn scripted_cases() -> Tally {
    let (mut tally, machine) = (Tally::default(), machine());
    for (name, setup, ops) in scripted::all() {
        println!("scripted: {name}");
        run(&setup, &ops, &mut tally, &machine);
    }
    tally
}

/// Half of the random cases.
fn random_cases(half: u8) -> Tally {
    let (tally, machine) = (RefCell::new(Tally::default()), machine());
    let cases = CASES / 2 * variable("PINPOOL_CASES", 1) as u32;
    let shrink = variable("PINPOOL_SHRINK", 400) as u32;
    let config = Config { cases, failure_persistence: None, max_shrink_iters: shrink, ..Config::default() };
    let mut seed = [0x50; 32];
    seed[..8].copy_from_slice(&variable("PINPOOL_SEED", 2).to_le_bytes());
    seed[8] = half;
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let result = TestRunner::new_with_rng(config, rng).run(&ops::case(), |(setup, ops)| {
        run(&setup, &ops, &mut tally.borrow_mut(), &machine);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    tally.into_inner()
}

//! The pool against a plain model of it, on simulated GPUs that move by hand.
//!
//! Random sequences of operations (`ops`), with faults, hung streams and dying devices, run against the pool
//! and the model (`world`); after every step everything that must hold is asserted. The run is deterministic:
//! such a device has no threads, and the sequences follow from a seed. (Every call of the driver failing in
//! every way is beside it.) The run fails if one of the transitions that it must take never was taken.
//!
//! Beside it, with threads and a clock, whether a request starves (`liveness`).
//!
//! With `PINPOOL_SUBSCRIBER=panics` a subscriber panics meanwhile, and every waker once it has noted its call.

#![allow(unsafe_code, reason = "the model looks at memory in flight")]

mod liveness;
mod ops;
mod tally;
mod world;

use std::cell::RefCell;

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::support::hand::Machine;
use crate::support::{panicking, variable};
use tally::Tally;
use world::World;

/// Cases in an ordinary run.
const CASES: u32 = 256;

#[test]
fn the_pool_behaves_like_its_model() {
    panicking::install_if_asked();
    // Two parts at once, each on a thread of its own.
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        for part in [0, 1].map(|half| scope.spawn(move || random_cases(half))) {
            tally.add_all(part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    let missing = tally.missing();
    assert!(missing.is_empty(), "never taken: {missing:#?}");
}

/// Half of the cases.
fn random_cases(half: u8) -> Tally {
    // The devices that cases run on, one after another.
    let machine = Machine::new(ops::DEVICES, 256 << 20, 0);
    let tally = RefCell::new(Tally::default());
    let cases = CASES / 2 * variable("PINPOOL_CASES", 1) as u32;
    let shrink = variable("PINPOOL_SHRINK", 400) as u32;
    let config = Config { cases, failure_persistence: None, max_shrink_iters: shrink, ..Config::default() };
    let mut seed = [0x50; 32];
    seed[..8].copy_from_slice(&variable("PINPOOL_SEED", 2).to_le_bytes());
    seed[8] = half;
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let result = TestRunner::new_with_rng(config, rng).run(&ops::case(), |(setup, ops)| {
        let tally = &mut tally.borrow_mut();
        let mut world = World::new(&setup, tally, &machine);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        world.end();
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    tally.into_inner()
}

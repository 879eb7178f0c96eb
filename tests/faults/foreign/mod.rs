//! Foreign code: subscribers, recorders, wakers, values of the program's, sources and sinks that panic (with payloads
//! whose drop panics, too), block, and call back into the pool. None of it costs a byte, a thread of the crate's, or a
//! statistic.
//!
//! `hostile` has the code that misbehaves; `alone` has one misdeed at a time, each where it once did harm; `chaos` has
//! all of it at random calls under random work.
//!
//! Each test has a process of its own, since a process has one subscriber.

#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "StableDeref for a value whose drop panics; steering the stand-in")]

mod alone;
mod chaos;
mod hostile;
#[cfg(feature = "cuda")]
mod standing_in;

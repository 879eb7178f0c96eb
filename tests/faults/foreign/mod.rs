//! Foreign code: subscribers, recorders, wakers, values of the program's, sources and sinks that panic (with
//! payloads whose drop panics, too), block, and call back into the pool. None of it costs a byte, a thread of
//! the crate's, or a statistic.
//! Each test has a process of its own, since a process has one subscriber.

#![cfg(target_os = "linux")]

mod alone;
mod chaos;

//! What the example of an async server promises to those who copy it.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use pinpool::host::HostConfig;
use pinpool::{Device, Error};
use tokio::sync::Mutex;

use example::{STATUS, Slot, answer, answered, serve};

#[path = "../../examples/async_server.rs"]
mod example;

#[test]
fn each_class_of_errors_has_a_status() {
    let device = Device::open("host").unwrap();
    let pool = crate::pool(&device, 1 << 20);
    let classes = pool.stats().errors.by_class().map(|(name, _)| name.replace('_', ""));
    assert_eq!(STATUS.map(|(class, ..)| format!("{class:?}").to_lowercase()), classes);
    let status = |error: &Error| answer(error).0;
    assert_eq!(status(&pool.checkout(0).unwrap_err()), 400);
    assert_eq!(status(&pool.checkout(1 << 20).unwrap_err()), 413);
    let held = pool.checkout(900_000).unwrap();
    assert_eq!(status(&pool.try_checkout(900_000).unwrap_err()), 503);
    drop(held);
    assert!(pool.shutdown(Duration::from_secs(20)).drained);
    assert_eq!(status(&pool.checkout(1).unwrap_err()), 503, "a server that goes down blames no client");
    assert_eq!(status(&Error::Cancelled { what: "x".into(), done: 0, total: 1 }), 499);
    assert_eq!(status(&Error::Argument("an alignment of 3".into())), 500);
}

#[test]
fn the_server_serves_and_ends() {
    example::main().unwrap();
}

/// Copies run at any time that their stream's order allows, so the upload of a request that went away is often still to run
/// when the next request has the slot.
#[test]
fn a_slot_is_not_written_by_a_request_that_went_away() {
    let (_node, device) = crate::on(HostConfig::new().late(Duration::from_millis(1), 7));
    let pool = crate::pool(&device, 4 << 20);
    let slot = Arc::new(Mutex::new(Slot::new(&device).unwrap()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let _entered = runtime.enter();
    let serve = |byte: u8| serve(pool.clone(), slot.clone(), vec![byte; 1000]);
    for round in 0..100 {
        {
            let mut gone = pin!(serve(255));
            let _ = gone.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        let answer = runtime.block_on(serve(round)).unwrap();
        assert!(answer.iter().all(|&byte| byte == answered(&device, round)), "round {round}");
        assert!(pool.stats().checked_out_bytes > 0, "the answer's body is the buffer");
    }
    assert!(pool.shutdown(Duration::from_secs(20)).drained);
}

//! Closing an Ascend device: what the library got back when it returns, and what the error says where that was refused.

use std::time::Instant;

use super::*;

/// Opened twice the device is set twice, if only for a short time; both are undone when it is closed.
#[test]
fn a_device_that_was_opened_again_is_let_go_of_as_often() {
    on_each(&[TODAY, ON_DEVICE, OF_2024], |stand_in| {
        for round in 0..20 {
            let device = open(0);
            let pool = pool(&device, 1 << 20);
            round_trip(&pool, &device.stream().unwrap(), round, 10_000);
            drop(pool);
            let others: Vec<Device> = (0..8).map(|_| open(0)).collect();
            drop(others);
            device.close(HANG).unwrap();
            let report = stand_in.report();
            let sets = ["aclrtSetDevice", "aclrtResetDevice"].map(|name| calls(stand_in, name));
            assert_eq!(sets[0], sets[1], "round {round}");
            assert!(report.over && report.leaks.is_empty(), "round {round}: {report:?}");
        }
    });
}

#[test]
fn what_the_library_refuses_to_take_back_is_told() {
    let stand_in = &TODAY.machine();
    for call in ["aclrtFree", "aclrtFreeHost", "aclrtDestroyStream", "aclrtDestroyEvent", "aclrtResetDevice"]
    {
        // Where another thread has given all of it back before, the next round has the failure.
        let error = loop {
            let device = open(0);
            let pool = pool(&device, 1 << 20);
            round_trip(&pool, &device.stream().unwrap(), 1, 10_000);
            stand_in.fail(call, 1, 507_000, false);
            drop(pool);
            let closed = device.close(HANG);
            stand_in.calm();
            if let Err(error) = closed {
                break error;
            }
        };
        assert!(error.is_closed() && error.held_by().leaked == 1, "{call}: {error}");
    }
    assert_eq!(stand_in.struck(), 5);
}

#[test]
fn a_lost_device_is_closed_without_a_call() {
    let stand_in = &TODAY.machine();
    let device = open(0);
    let memory = device.alloc(1000).unwrap();
    // The worker has begun; its beginning takes calls of its own.
    drop(device.alloc(1000).unwrap());
    until("all else is freed", || calls(stand_in, "aclrtMalloc") == calls(stand_in, "aclrtFree") + 1);
    // A free is followed by calls of the same thread.
    let sum = || stand_in.report().calls.iter().map(|call| call.1).sum::<u64>();
    let mut seen = (sum(), Instant::now());
    while seen.1.elapsed() < Duration::from_millis(100) {
        if sum() != seen.0 {
            seen = (sum(), Instant::now());
        }
    }
    stand_in.kill(0, 507_010);
    assert!(device.stream().is_err());
    let before = sum();
    drop(memory);
    let error = device.close(HANG).unwrap_err();
    assert!(error.is_closed() && error.held_by().lost.is_some(), "{error}");
    // The memory, and the device that stays set.
    assert!(error.held_by().leaked >= 2, "{error}");
    assert_eq!(sum(), before);
}

/// Before host memory is freed every device is drained. A device that turns out to be lost then does not use it: what
/// is in flight there never runs.
#[test]
fn another_device_that_is_lost_keeps_nothing_of_this_one() {
    let stand_in = &TODAY.machine();
    let [device, other] = [open(0), open(1)];
    let pool = pool(&device, 1 << 20);
    round_trip(&pool, &device.stream().unwrap(), 1, 10_000);
    assert!(stand_in.report().leaks.iter().any(|leak| leak.starts_with("hosts")));
    stand_in.kill(1, 507_010);
    drop(pool);
    device.close(HANG).unwrap();
    let leaks = stand_in.report().leaks;
    assert!(!leaks.iter().any(|leak| leak.starts_with("hosts")), "{leaks:?}");
    assert!(other.close(HANG).is_err_and(|error| error.is_closed()));
}

/// One refused wait for the device must not leak gigabytes for good.
#[test]
fn freeing_is_tried_again_when_a_device_cannot_be_waited_for_just_now() {
    on_each(&[TODAY], |stand_in| {
        for nth in [1, 2] {
            let devices = [open(0), open(1)];
            let pool = pool(&devices[0], 1 << 20);
            round_trip(&pool, &devices[0].stream().unwrap(), 1, 10_000);
            // The wait for this device, and the wait for the other one.
            stand_in.fail("aclrtSynchronizeDevice", nth, 107_020, false);
            drop(pool);
            devices.into_iter().for_each(|device| device.close(HANG).unwrap());
        }
        assert_eq!(stand_in.struck(), 2);
    });
}

/// A blocking copy that was never submitted, since the work before it cannot be waited for, uses no memory: the error
/// is returned at once, without a wait for the whole device.
#[test]
fn a_copy_that_was_not_submitted_is_not_waited_for() {
    on_each(&[TODAY, OF_2024], |stand_in| {
        let device = open(0);
        let (stream, memory) = (device.stream().unwrap(), device.alloc(1000).unwrap());
        stand_in.fail("aclrtSynchronizeStream", 1, 107_030, false);
        let waited = calls(stand_in, "aclrtSynchronizeDevice");
        assert!(stream.upload_blocking(&[1; 1000], &memory).is_err());
        assert_eq!(calls(stand_in, "aclrtSynchronizeDevice"), waited);
        stream.upload_blocking(&[2; 1000], &memory).unwrap();
    });
}

/// A call of the crate that may be refused, as expected, leaves no message: a reader would take it for that of a later
/// error.
#[test]
fn no_message_of_an_expected_refusal_is_left() {
    on_each(&[TODAY], |stand_in| {
        for _ in 0..2 {
            let device = open(0);
            assert_eq!(message(stand_in), None);
            drop(pool(&device, 1 << 20));
            device.close(HANG).unwrap();
            assert_eq!(message(stand_in), None);
        }
    });
}

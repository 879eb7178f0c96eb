//! Devices that end: closed, with what the library got back by then; lost; and with a library that a program ended.

use std::time::{Duration, Instant};

use super::*;

/// Waits until the crate's threads have made no call for a while, and returns how many were made.
fn quiet(stand_in: &StandIn) -> u64 {
    let sum = || stand_in.report().calls.iter().map(|call| call.1).sum::<u64>();
    let mut seen = (sum(), Instant::now());
    while seen.1.elapsed() < Duration::from_millis(50) {
        if sum() != seen.0 {
            seen = (sum(), Instant::now());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    seen.0
}

/// All that it has is leaked: the library does not say that the device touches it no more.
#[test]
fn a_lost_device_is_not_called_any_more() {
    for way in [TODAY, ON_DEVICE, OF_2024] {
        let stand_in = &way.machine();
        let (device, pool, stream, memory) = first(10_000);
        round_trip(&pool, &stream, &bytes(1, 10_000));
        stand_in.hang(true);
        let flights = [2, 3].map(|n| stream.upload(filled(&pool, &bytes(n, 10_000)), &memory).unwrap());
        stand_in.kill(0, 507_010);
        stand_in.hang(false);
        for flight in flights {
            let error = flight.wait().unwrap_err();
            assert_eq!(error.class(), ErrorClass::DeviceLost, "{error}");
            assert!(error.to_string().contains("LOST_HEARTBEAT"), "{error}");
        }
        until("all that was in flight is quarantined", || pool.stats().in_flight_bytes == 0);
        let made = quiet(stand_in);
        assert_eq!(device.alloc(100).unwrap_err().class(), ErrorClass::DeviceLost);
        drop((pool, stream, memory));
        let error = device.close(HANG).unwrap_err();
        assert!(error.held_by().lost.is_some() && error.held_by().quarantined == 2, "{error}");
        // The memory, and the device that stays set, among others.
        assert!(error.held_by().leaked >= 2, "{error}");
        assert_eq!(quiet(stand_in), made);
        assert_eq!(stand_in.report().violations, Vec::<String>::new());
    }
}

/// Two devices, and a pool of the first that was used.
fn used_beside_another() -> ([Device; 2], Pool) {
    let devices = [open(0), open(1)];
    let pool = pool(&devices[0], 1 << 20);
    round_trip(&pool, &devices[0].stream().unwrap(), &bytes(1, 10_000));
    (devices, pool)
}

/// Before host memory is freed every device is drained. A device that turns out to be lost then does not use it: what
/// is in flight there never runs.
#[test]
fn another_device_that_is_lost_keeps_nothing_of_this_one() {
    let stand_in = &TODAY.machine();
    let ([device, other], pool) = used_beside_another();
    let has_hosts = || stand_in.report().leaks.iter().any(|leak| leak.starts_with("hosts"));
    assert!(has_hosts());
    stand_in.kill(1, 507_010);
    drop(pool);
    device.close(HANG).unwrap();
    assert!(!has_hosts());
    assert!(other.close(HANG).is_err_and(|error| error.is_closed()));
}

/// The library does not say that a copy ends when its device is lost. So it never gets the address of borrowed memory,
/// which is its owner's again when the call returns.
#[test]
fn a_lost_device_has_no_borrowed_memory() {
    const LEN: usize = 10_000;
    for way in [TODAY, ON_DEVICE, OF_2024] {
        let stand_in = &way.machine();
        let late = |at: usize, len: usize| stand_in.command(&format!("late {at} {len}")) == "true";
        let is_used = |memory: &[u8]| late(memory.as_ptr().addr(), memory.len());
        let all_is_used = || late(1, usize::MAX - 1);
        for ordinal in [0, 1] {
            let device = open(ordinal);
            let pool = pool(&device, 1 << 20);
            let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
            // Ordinary and page-locked, both borrowed.
            let (mut ordinary, mut locked) = (bytes(1, LEN), filled(&pool, &bytes(2, LEN)));
            for borrowed in [&mut ordinary[..], &mut locked[..]] {
                let sent = borrowed.to_vec();
                stream.upload_blocking(borrowed, &memory).unwrap();
                borrowed.fill(0);
                stream.download_blocking(&memory, borrowed).unwrap();
                assert!(*borrowed == *sent);
            }
            assert!(ordinal == 1 || !all_is_used());
            stand_in.fail("aclrtMemcpy", 1, 507_010, false);
            let lost = match ordinal {
                0 => stream.upload_blocking(&locked, &memory),
                _ => stream.download_blocking(&memory, &mut ordinary),
            };
            assert_eq!(lost.unwrap_err().class(), ErrorClass::DeviceLost);
            assert!(all_is_used() && !is_used(&ordinary) && !is_used(&locked));
        }
    }
}

#[test]
fn a_library_that_others_end_is_left_alone() {
    for way in [TODAY, ON_DEVICE, OF_2024] {
        let stand_in = &way.machine();
        let (device, pool, stream, memory) = first(10_000);
        stream.upload(filled(&pool, &bytes(1, 10_000)), &memory).unwrap().wait().unwrap();
        stand_in.ok("aclFinalize", &[]);
        // The first call returns an error of class `DriverShutdown`; every later one fails at once.
        let refused = stream.upload(filled(&pool, &bytes(2, 10_000)), &memory).unwrap_err();
        assert_eq!(refused.error.class(), ErrorClass::DriverShutdown, "{}", refused.error);
        until("the device is known to be lost", || device.lost().is_some());
        assert_eq!(device.alloc(10).unwrap_err().class(), ErrorClass::DriverShutdown);
        let made = quiet(stand_in);
        drop((pool, stream, memory, device));
        assert_eq!(quiet(stand_in), made, "nothing is called after that");
    }
}

/// One refused wait for the device, or for another one, must not leak gigabytes for good. And the
/// wait for another one needs its context: that is not let go of meanwhile.
#[test]
fn freeing_is_tried_again_when_a_device_cannot_be_waited_for_just_now() {
    on_each(&[TODAY], |stand_in| {
        // The wait for this device, and that for the other one, once and for a quarter of a second.
        for (refused, closes_first) in [(1..=1, 0), (2..=2, 0), (2..=9, 1)] {
            let (mut devices, pool) = used_beside_another();
            let before = stand_in.struck();
            refused.for_each(|nth| stand_in.fail("aclrtSynchronizeDevice", nth, 107_020, false));
            drop(pool);
            until("a device is waited for", || stand_in.struck() > before);
            devices.rotate_left(closes_first);
            devices.into_iter().for_each(|device| device.close(HANG).unwrap());
            stand_in.calm();
        }
    });
}

//! Devices that are lost: by an error that ends them, and by a program that ends the library.

use super::contexts::Server;
use super::*;

/// For a test after which something stays allocated.
fn leaving_things(body: impl Fn(&StandIn)) {
    [TODAY, ON_DEVICE, OF_2024].iter().for_each(|way| body(&way.machine()));
}

#[test]
fn a_lost_device_is_not_called_any_more() {
    leaving_things(|stand_in| {
        let devices = [open(0), open(1)];
        let pools = devices.each_ref().map(|device| pool(device, 1 << 20));
        let stream = devices[0].stream().unwrap();
        let memory = devices[0].alloc(10_000).unwrap();
        stand_in.hang(true);
        let flights: Vec<_> =
            (0..5).map(|n| stream.upload(filled(&pools[0], &bytes(n, 10_000)), &memory).unwrap()).collect();
        drop(stream.upload(filled(&pools[0], &bytes(9, 10_000)), &memory).unwrap());
        stand_in.kill(0, 507_010);
        stand_in.hang(false);
        for flight in flights {
            let error = flight.wait().unwrap_err();
            assert_eq!(error.class(), ErrorClass::DeviceLost, "{error}");
            let text = error.to_string();
            assert!(text.contains("507010") && text.contains("LOST_HEARTBEAT"), "{text}");
        }
        until("all that was in flight is quarantined", || pools[0].stats().in_flight_bytes == 0);
        assert!(pools[0].stats().quarantined_bytes >= 6 * 10_000);
        assert!(devices[0].lost().is_some());
        assert_eq!(devices[0].alloc(100).unwrap_err().class(), ErrorClass::DeviceLost);
        assert_eq!(devices[0].stream().unwrap_err().class(), ErrorClass::DeviceLost);
        pools[0].check().unwrap();
        // The other one lives.
        assert_eq!(devices[1].lost(), None);
        round_trip(&pools[1], &devices[1].stream().unwrap(), 3, 50_000);
        // What the lost one had is dropped without a call that frees anything.
        let frees = |report: &doubles::Report| -> Vec<(String, u64)> {
            let freeing =
                ["aclrtFree", "aclrtFreeHost", "aclrtDestroyEvent", "aclrtDestroyStream", "aclrtResetDevice"];
            report.calls.iter().filter(|call| freeing.contains(&call.0.as_str())).cloned().collect()
        };
        let [lost, other] = devices;
        let [of_lost, of_other] = pools;
        drop((of_other, other));
        until("the other one is let go", || calls(stand_in, "aclrtResetDevice") == 1);
        let before = frees(&stand_in.report());
        drop((of_lost, stream, memory, lost));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(frees(&stand_in.report()), before);
        assert_eq!(stand_in.report().violations, Vec::<String>::new());
    });
}

/// The library does not say that a copy ends when its device is lost. So it never gets the address of borrowed memory,
/// which is its owner's again when the call returns.
#[test]
fn a_lost_device_has_no_borrowed_memory() {
    const LEN: usize = 10_000;
    leaving_things(|stand_in| {
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
    });
}

#[test]
fn a_library_that_others_end_is_left_alone() {
    leaving_things(|stand_in| {
        let server = Server { stand_in };
        let (device, pool, stream, memory) = first(10_000);
        stream.upload(filled(&pool, &bytes(1, 10_000)), &memory).unwrap().wait().unwrap();
        says!(server, 0, "aclFinalize");
        // The first call returns an error of class `DriverShutdown`; every later one fails at once.
        let refused = stream.upload(filled(&pool, &bytes(2, 10_000)), &memory).unwrap_err();
        assert_eq!(refused.error.class(), ErrorClass::DriverShutdown, "{}", refused.error);
        until("the device is known to be lost", || device.lost().is_some());
        assert_eq!(device.alloc(10).unwrap_err().class(), ErrorClass::DriverShutdown);
        // A thread of the crate may have been in the middle of a call.
        let mut calls = stand_in.report().calls;
        until("calls under way have returned", || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let before = std::mem::replace(&mut calls, stand_in.report().calls);
            before == calls
        });
        drop((pool, stream, memory, device));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(stand_in.report().calls, calls, "nothing is called after that");
    });
}

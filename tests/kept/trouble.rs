//! What goes wrong elsewhere: launches that failed, forks, and the end of the process.

use pinpool::ErrorClass;

use super::*;
use crate::support::exits;

/// "May also return error codes from previous, asynchronous launches": whichever call hears of it first.
#[test]
fn errors_of_earlier_launches_surface_in_the_next_call() {
    on_every_device_leaving(|on| {
        let lost = |device: &Device, error: &Error| {
            assert!(error.is_device_lost() && error.class() == ErrorClass::DeviceLost, "{error}");
            assert!(device.lost().is_some_and(|error| error.is_device_lost()));
            let cause = if on.is_gpu() { "ILLEGAL_ADDRESS" } else { "" };
            assert!(error.to_string().contains(cause), "{error}");
        };
        // A device for each call that is the first to hear of it.
        for ordinal in 0..DEVICES - 1 {
            let device = on.other(ordinal);
            let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
            pool.wait_pinned(None).unwrap();
            let (stream, memory) = (device.stream().unwrap(), device.alloc(1000).unwrap());
            round_trip(&pool, &stream, &bytes(1, 1000));
            let buf = filled(&pool, &bytes(2, 1000));
            // In flight there: never read as done.
            let flight = (ordinal == 0).then(|| {
                on.hang(true);
                stream.upload(filled(&pool, &bytes(2, 1000)), &memory).unwrap()
            });
            on.kill(ordinal);
            on.hang(false);
            let heard = match (ordinal, flight) {
                (_, Some(flight)) => flight.wait().unwrap_err(),
                (1, _) => stream.upload(buf, &memory).unwrap_err().error,
                (2, _) => device.alloc(1).unwrap_err(),
                (3, _) => Pool::builder(&device).capacity(1 << 20).build().unwrap_err(),
                _ => stream.upload_blocking(&buf, &memory).unwrap_err(),
            };
            lost(&device, &heard);
            if ordinal == 0 {
                until("the buffer is quarantined", || pool.stats().in_flight_bytes == 0);
                assert!(pool.stats().quarantined_bytes >= 1000);
            }
            // From then on everything is refused, and the pool's books are in order.
            lost(&device, &device.stream().unwrap_err());
            lost(&device, &stream.synchronize().unwrap_err());
            pool.check().unwrap();
        }
        // No other device is concerned.
        let device = on.other(DEVICES - 1);
        let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
        round_trip(&pool, &device.stream().unwrap(), &bytes(3, 1000));
        assert_eq!(device.lost(), None);
    });
}

#[test]
fn a_child_of_a_fork_can_use_nothing_and_harms_nothing() {
    own_process!();
    on_every_device(|on| {
        let (pool, stream, memory) = (on.pool(1 << 20), on.stream(), on.device.alloc(1000).unwrap());
        on.hang(true);
        let flight = stream.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap();
        let mut parents = Some((pool.clone(), stream.clone(), filled(&pool, &bytes(2, 1000)), flight));
        let code = forked(|| {
            let buf = Request::new(1000);
            let refused = [
                pool.checkout(buf).map(drop),
                pool.try_checkout(buf).map(drop),
                pool.checkout_timeout(buf, Duration::from_secs(3600)).map(drop),
                pool.checkout_many(&[buf], None).map(drop),
                pool.checkout_on(&stream, buf).map(drop),
                on.device.alloc(1).map(drop),
                on.device.stream().map(drop),
                stream.synchronize(),
                stream.upload_blocking(&[1], &memory),
                Device::open("host").map(drop),
            ];
            drop(parents.take());
            let wrong = refused.iter().position(|said| *said != Err(Error::Forked));
            wrong.map_or(0, |at| at as i32 + 1)
        });
        assert_eq!(code, Some(0), "which call was not refused, counted from 1; None: the child hung");
        on.hang(false);
        // The parent has noticed nothing.
        let (.., held, flight) = parents.take().unwrap();
        assert!(*flight.wait().unwrap() == *bytes(1, 1000) && *held == *bytes(2, 1000));
        round_trip(&pool, &stream, &bytes(3, 1000));
        drop(held);
        pool.check().unwrap();
    });
}

/// Processes that end in the midst of their work, each with its own status; no driver is called after the exit began.
/// `library`: the variable that names the driver's, if there is one.
fn ends(test: &str, device: &str, library: &str) {
    // In the children, too, which end here.
    if library.is_empty() || doubles::named(library).is_some() {
        return exits::all(test, device, &[]);
    }
    let Some(built) = doubles::simulation() else { return };
    exits::all(test, device, &[(library, &built)]);
}

#[test]
fn a_process_ends_while_the_host_device_works() {
    ends("a_process_ends_while_the_host_device_works", "host:0", "");
}

#[test]
fn a_process_ends_while_a_gpu_works() {
    ends("a_process_ends_while_a_gpu_works", "cuda:0", doubles::PATH);
}

#[test]
fn a_process_ends_while_an_npu_works() {
    ends("a_process_ends_while_an_npu_works", "acl:0", npu::PATH);
}

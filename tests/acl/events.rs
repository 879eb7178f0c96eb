//! Events: many of them at once, recorded again, and never complete because something failed.

use pinpool::InFlight;

use super::*;

/// More than the smallest device has of events of other kinds.
const MANY: usize = 1000;

/// Submits more copies than there are events while the device hangs: all of them complete when it resumes.
fn more_copies_than_events(stand_in: &StandIn) {
    let device = open(0);
    let (pool, stream) = (pool(&device, 1 << 20), device.stream().unwrap());
    // Handed out to the program: each submit needs an event.
    acl::raw_stream(&stream).unwrap();
    let memory = device.alloc(64 * 64).unwrap();
    stand_in.hang(true);
    let shared = std::sync::Arc::new(filled(&pool, &bytes(1, 64)));
    let flights: Vec<InFlight<std::sync::Arc<PinnedBuf>>> = (0..MANY + 50)
        .map(|n| stream.upload(shared.clone(), memory.slice(n % 64 * 64..(n % 64 + 1) * 64)).unwrap())
        .collect();
    // Far more often than it takes to find that a failure is for good.
    for _ in 0..1500 {
        device.reap();
    }
    assert_eq!(device.lost(), None);
    assert!(flights.iter().all(|flight| !flight.is_done().unwrap()));
    stand_in.hang(false);
    for flight in flights {
        assert!(**flight.wait().unwrap() == *bytes(1, 64));
    }
    stream.synchronize().unwrap();
    assert_eq!((device.lost(), pool.stats().quarantined_bytes), (None, 0));
    let back = stream.download(&memory, pool.checkout(64 * 64).unwrap()).unwrap().wait().unwrap();
    assert!(back.chunks(64).all(|chunk| *chunk == *bytes(1, 64)));
}

#[test]
fn many_copies_are_in_flight_at_once() {
    on_each(&[TODAY, OF_2024], more_copies_than_events);
}

#[test]
fn events_are_recorded_again() {
    on_each(&npu::WAYS, |stand_in| {
        let (_device, pool, stream, memory) = first(5000);
        for round in 0..200 {
            let sent = filled(&pool, &bytes(round, 5000));
            assert!(*stream.upload(sent, &memory).unwrap().wait().unwrap() == bytes(round, 5000));
        }
        let made = calls(stand_in, "aclrtCreateEventExWithFlag");
        let recorded = calls(stand_in, "aclrtRecordEvent");
        assert!(recorded >= 200 && made <= 4, "{made} events for {recorded} recordings");
    });
}

#[test]
fn a_query_that_fails_never_reads_as_done() {
    on_each(&[TODAY, OF_2024], |stand_in| {
        let query = "aclrtQueryEventStatus";
        let (device, pool, stream, memory) = first(10_000);
        for round in 0..40 {
            // An argument error, and a transient one; before the query has run, and after it.
            let code = if round % 2 == 0 { 507_000 } else { 207_001 };
            stand_in.fail(query, 1 + round as u64 % 3, code, round % 4 > 1);
            let buf = filled(&pool, &bytes(round, 10_000));
            let mut buf = stream.upload(buf, &memory).unwrap().wait().unwrap();
            // Were the copy not complete, it would read this now.
            buf.fill(0xFF);
            drop(buf);
            let back = stream.download(&memory, pool.checkout(10_000).unwrap()).unwrap().wait().unwrap();
            assert!(*back == bytes(round, 10_000), "round {round}");
        }
        stand_in.calm();
        assert_eq!(device.lost(), None);
    });
}

//! Waiting for what is in flight: with a deadline, as a task, or by asking.

use super::*;

pub fn timeouts(on: &Subject) {
    let (pool, stream) = (on.pool(2 << 20), on.stream());
    let memory = on.alloc(1 << 20);
    for timeout in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(3600), Duration::MAX] {
        let sent = bytes(1, 1 << 20);
        let flight = stream.upload(filled(&pool, &sent), &memory).unwrap();
        let buf = match flight.wait_timeout(timeout) {
            Ok(buf) => buf,
            Err(SubmitError { error: Error::Timeout(_), buffer: Some(flight) }) => flight.wait().unwrap(),
            Err(wrong) => panic!("{wrong:?}"),
        };
        assert!(*buf == *sent);
    }
    let all: Vec<PinnedBuf> = std::iter::from_fn(|| pool.try_checkout(60_000).ok()).collect();
    let late = pool.checkout_timeout(60_000, Duration::from_millis(1)).unwrap_err();
    assert!(matches!(late, Error::Timeout(_)), "{late}");
    let late = pool.checkout_many(&[60_000.into(), 60_000.into()], Some(Duration::ZERO)).unwrap_err();
    assert!(matches!(late, Error::Timeout(_)), "{late}");
    assert_eq!(pool.stats().waiting, 0);
    drop(all);
    drop(pool.checkout_timeout(60_000, Duration::ZERO).unwrap());
    pool.check().unwrap();
}

pub fn awaited(on: &Subject) {
    let (pool, stream) = (on.pool(128 << 10), on.stream());
    let memory = on.alloc(50_000);
    let pump = || on.pump();
    for round in 0..30 {
        let sent = bytes(round, 50_000);
        let mut buf = block_on(pump, pool.checkout_async(50_000)).unwrap();
        buf.extend_from_slice(&sent);
        let buf = block_on(pump, stream.upload(buf, &memory).unwrap()).unwrap();
        assert!(*buf == *sent);
        let both = block_on(pump, stream.download(&memory, buf).unwrap()).unwrap();
        assert!(*both == *sent);
        drop(stream.upload(both, &memory).unwrap());
        // Two, of a pool that has room for two, one of them in flight.
        let two = block_on(pump, pool.checkout_many_async([50_000.into(), 50_000.into()])).unwrap();
        assert_eq!(two.len(), 2);
    }
}

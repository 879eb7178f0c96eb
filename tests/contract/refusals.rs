//! What a device or a stream refuses, with the buffer given back.

use pinpool::Copier;

use super::*;

pub fn refusals(on: &Subject) {
    let (pool, stream) = (on.pool(4 << 20), on.stream());
    let memory = on.alloc(1000);
    let sent = bytes(0, 2000);
    let full = || filled(&pool, &sent);
    let small = Error::TooSmall { need: 2000, have: 1000 };
    assert_eq!(refusal(stream.upload(full(), &memory), &sent), small);
    let error = refusal(stream.upload(full(), memory.slice(10..1001)), &sent);
    argument(&error, "10..1001 is outside of 1000 bytes");
    let error = refusal(stream.upload_part(full(), 1999..2001, &memory), &sent);
    argument(&error, "1999..2001 is outside of 2000 bytes");
    #[expect(clippy::reversed_empty_ranges, reason = "that is the misuse")]
    let backwards = stream.upload_part(full(), 20..10, &memory);
    argument(&refusal(backwards, &sent), "20..10 ends before it begins, in 2000 bytes");
    argument(&stream.upload((), &memory).unwrap_err().error, "no byte of the buffer was written");
    argument(&refusal(stream.download(memory.slice(3..3), full()), &sent), "nothing to copy");
    let landing = pool.checkout(999).unwrap();
    let error = refusal(stream.download(&memory, landing), &[]);
    assert_eq!(error, Error::TooSmall { need: 1000, have: 999 });
    let error = stream.copy(&memory, memory.slice(1..)).unwrap_err();
    assert_eq!(error, Error::TooSmall { need: 1000, have: 999 });
    assert!(memory.slice(..).unwrap().slice(1..=1000).is_err());
    let launched = pinpool::host::launch(&stream, &[], &[memory.slice(..).unwrap()], |_, _| ());
    match on.device.name().starts_with("host") {
        true => launched.unwrap().wait().unwrap(),
        false => assert!(matches!(launched, Err(Error::Unsupported(_))), "{launched:?}"),
    }
    // What needs a capture.
    argument(&refusal(stream.hold_captured(full()), &sent), "hold_captured needs");
    let shared = Arc::new(full());
    argument(&stream.hold_captured(shared.clone()).unwrap_err().error, "hold_captured needs");
    assert_eq!(Arc::strong_count(&shared), 1);
    drop(shared);
    assert_eq!(pool.stats().checked_out_bytes, 0);
    // Nothing of that has harmed anything.
    stream.synchronize().unwrap();
    all_back(on, &pool);
    assert_eq!(pool.stats().quarantined_bytes, 0);
}

/// Only where there is another device. The error says whose the thing is, whose was wanted, and the
/// remedy of that case and of no other.
pub fn foreign(on: &Subject) {
    let Some(other) = &on.other else { return };
    let (here, there) = (on.device.name(), other.name());
    let wrong = |error: Error, whose: &str, with: &str| {
        mismatch(&error);
        let text = error.to_string();
        assert!(text.contains(whose) && text.contains(&format!("with {with}")), "{text}");
        assert_eq!(text.contains("PoolBuilder::device"), whose.starts_with("pool"), "{text}");
    };
    let of_memory = |error: Error| wrong(error, &format!("device memory of {there}"), here);
    let of_pool = |error: Error| wrong(error, &format!("pool of {here}"), there);
    let of_stream = |error: Error| wrong(error, &format!("stream of {there}"), here);
    let (pool, stream) = (on.pool(1 << 20), on.stream());
    let (stranger, far) = (other.stream().unwrap(), other.alloc(100).unwrap());
    let sent = bytes(0, 100);
    of_memory(refusal(stream.upload(filled(&pool, &sent), &far), &sent));
    of_memory(refusal(stream.download(&far, filled(&pool, &sent)), &sent));
    of_memory(stream.copy(&far, on.alloc(100)).unwrap_err());
    of_memory(stream.upload_blocking(&sent, &far).unwrap_err());
    of_memory(stream.download_blocking(&far, &mut [0; 100]).unwrap_err());
    // SAFETY: refused.
    let error = unsafe { on.device.raw_memory(far.address(), 100, ()) }.unwrap_err().error;
    argument(&error, &format!("that is memory of {there}"));
    let copier = Copier::builder(&pool, &on.device).build().unwrap();
    of_memory(copier.upload_slice(&sent, &far).unwrap_err());
    let near = on.alloc(100);
    let block = (filled(&pool, &sent), near.slice(..).unwrap());
    let transfer = copier.upload_pages(vec![block]).unwrap();
    of_stream(transfer.order(&stranger).unwrap_err());
    of_stream(copier.wait_for(&stranger).unwrap_err());
    of_stream(stream.wait_for(&stranger).unwrap_err());
    drop(transfer.wait().unwrap());
    // The pool does not serve the other device.
    of_pool(refusal(stranger.upload(filled(&pool, &sent), &far), &sent));
    of_pool(refusal(stranger.hold(filled(&pool, &sent)), &sent));
    of_pool(pool.checkout_on(&stranger, 100).unwrap_err());
    of_pool(filled(&pool, &sent).device_address(other).unwrap_err());
    of_pool(Copier::builder(&pool, other).build().unwrap_err());
    let (from, to) = (filled(&pool, &sent), pool.checkout(100).unwrap());
    of_pool(stranger.copy_host(from, to).unwrap_err().error);
    let both =
        Pool::builder(&on.device).device(other).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    let buf = stranger.upload(filled(&both, &sent), &far).unwrap().wait().unwrap();
    drop(stream.upload(buf, &near).unwrap());
    assert!(fetch(&both, &stream, &near) == sent && fetch(&both, &stranger, &far) == sent);
}

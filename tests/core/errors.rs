//! What errors say, and what class they have: what is wrong, whose it is, and the remedy of that very case.

use std::sync::Arc;

use pinpool::{Copier, Device, Error, ErrorClass, Pool};

use crate::{HANG, builder, filled, hosts};

const LEN: usize = 4096;

/// Two devices of one node, with a pool for the first, and a copier.
fn pair() -> ([Device; 2], Pool, Copier) {
    let (_node, devices) = hosts();
    let pool = builder(&devices[0], 1 << 20).build().unwrap();
    let copier = Copier::builder(&pool, &devices[0]).threads(1).build().unwrap();
    (devices, pool, copier)
}

/// The text has all of these.
fn says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
}

#[test]
fn the_end_of_a_pool_and_of_a_transfer_are_no_mistakes_of_the_call() {
    let (_devices, pool, copier) = pair();
    drop(copier);
    assert!(pool.shutdown(HANG).drained);
    let closed = pool.checkout(LEN).unwrap_err();
    let cancelled = Error::Cancelled { what: "weights".into(), done: 1, total: 2 };
    for (error, class) in [(&closed, ErrorClass::Closed), (&cancelled, ErrorClass::Cancelled)] {
        assert_eq!((error.class(), error.is_retryable()), (class, false), "{error}");
    }
    let errors = pool.stats().errors;
    assert_eq!((closed, errors.closed, errors.total()), (Error::Closed, 1, 1), "{errors:?}");
}

/// A size that is rounded to what another one of the message is would say that both are the same.
#[test]
fn sizes_that_are_rounded_have_their_bytes_too() {
    let (_devices, pool, _copier) = pair();
    says(&pool.checkout(1 << 20).unwrap_err(), &["1 MiB", "1048544 bytes", "32 bytes more"]);
    let (a, b, both) = (5_000_001, 5_000_000, ["4.8 MiB (5000001 bytes)", "4.8 MiB (5000000 bytes)"]);
    says(&Error::TooLong { len: a, largest: b }, &both);
    says(&Error::Cancelled { what: "x".into(), done: a as u64, total: b as u64 }, &both);
    let _held = pool.checkout(LEN).unwrap();
    says(&pool.try_checkout((1 << 20) - 32).unwrap_err(), &["1048544 bytes", "1 MiB"]);
}

/// The commonest mistake of a beginner: a buffer has the bytes that were written to it, and at first it has none.
#[test]
fn a_buffer_without_a_written_byte_is_called_that() {
    let ([device, _], pool, copier) = pair();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(LEN).unwrap());
    let slice = || memory.slice(..).unwrap();
    let fresh = || pool.checkout(LEN).unwrap();
    for error in [
        stream.upload(Arc::new(fresh()), &memory).unwrap_err().into(),
        stream.upload_part(fresh(), ..100, &memory).unwrap_err().into(),
        copier.upload_pages(vec![(fresh(), slice())]).unwrap_err().error,
        copier.upload_pages(vec![(fresh(), vec![slice()])]).unwrap_err().error,
    ] {
        let remedies = ["extend_from_slice", "Write", "BufMut", "set_len"];
        says(&error, &["no byte of the buffer was written"]);
        says(&error, &remedies);
    }
}

/// Whose the thing is, whose was wanted, and the remedy of that case and of no other.
#[test]
fn a_thing_of_another_device_is_named_with_both_devices() {
    let ([first, second], pool, copier) = pair();
    let full = || filled(&pool, LEN, 1);
    let (here, there) = (first.stream().unwrap(), second.stream().unwrap());
    let (near, far) = (first.alloc(LEN).unwrap(), second.alloc(LEN).unwrap());
    let sent = copier.upload_pages(vec![(full(), near.slice(..).unwrap())]).unwrap();
    let pieces = [(&[1; LEN][..], far.slice(..).unwrap())];
    let of_pool: [Error; 5] = [
        there.upload(Arc::new(full()), &far).unwrap_err().into(),
        there.download(&far, full()).unwrap_err().error,
        pool.checkout_on(&there, LEN).unwrap_err(),
        full().device_address(&second).unwrap_err(),
        Copier::builder(&pool, &second).build().unwrap_err(),
    ];
    let of_memory = [
        here.download(&far, full()).unwrap_err().error,
        here.copy(&far, &near).unwrap_err(),
        copier.upload_slice(&[1; LEN], &far).unwrap_err(),
        copier.upload_slices(&pieces).unwrap_err(),
    ];
    let of_stream = [here.wait_for(&there).unwrap_err(), sent.order(&there).unwrap_err()];
    for (errors, words, others) in [
        (&of_pool[..], ["pool of host:0", "with host:1", "PoolBuilder::device"], "memory of"),
        (&of_memory[..], ["device memory of host:1", "with host:0", ""], "PoolBuilder"),
        (&of_stream[..], ["stream of host:1", "with host:0", ""], "PoolBuilder"),
    ] {
        for error in errors {
            says(error, &words);
            assert!(!error.to_string().contains(others), "{error}");
        }
    }
    sent.wait().unwrap();
}

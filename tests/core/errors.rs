//! What errors say, and what class they have: what is wrong, whose it is, and the remedy of that very case.

use std::time::Duration;

use pinpool::{Copier, Device, Error, ErrorClass, Pool, Stream};

use crate::{HANG, builder, filled, hosts};

const LEN: usize = 4096;

/// Two devices of one node, with a pool for the first.
struct Pair {
    first: Device,
    second: Device,
    pool: Pool,
}

impl Pair {
    fn new() -> Self {
        let (_node, [first, second]) = hosts();
        let pool = builder(&first, 1 << 20).name("errors").build().unwrap();
        Self { first, second, pool }
    }

    fn stream(&self) -> Stream {
        self.first.stream().unwrap()
    }

    fn copier(&self) -> Copier {
        Copier::builder(&self.pool, &self.first).threads(1).build().unwrap()
    }
}

/// The text has all of these.
fn says(error: impl Into<Error>, words: &[&str]) {
    let error = error.into();
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
}

#[test]
fn the_end_of_a_pool_and_of_a_transfer_are_no_mistakes_of_the_call() {
    let pair = Pair::new();
    assert!(pair.pool.shutdown(HANG).drained);
    let closed = pair.pool.checkout(LEN).unwrap_err();
    assert_eq!(closed, Error::Closed);
    let cancelled = Error::Cancelled { what: "weights".into(), done: 1, total: 2 };
    for error in [&closed, &cancelled] {
        assert_ne!(error.class(), ErrorClass::Argument, "{error}");
        assert!(!error.is_retryable() && !error.is_device_lost(), "{error}");
    }
    assert_eq!((closed.class(), cancelled.class()), (ErrorClass::Closed, ErrorClass::Cancelled));
    let errors = pair.pool.stats().errors;
    assert_eq!((errors.closed, errors.total()), (1, 1), "{errors:?}");
}

/// A size that is rounded to what another one of the message is would say that both are the same.
#[test]
fn sizes_that_are_rounded_have_their_bytes_too() {
    let pair = Pair::new();
    says(pair.pool.checkout(1 << 20).unwrap_err(), &["1 MiB", "1048544 bytes", "32 bytes more"]);
    let held = pair.pool.checkout(LEN).unwrap();
    says(pair.pool.try_checkout((1 << 20) - 32).unwrap_err(), &["1048544 bytes", "1 MiB"]);
    drop(held);
    for (a, b, both) in [
        (5_000_001, 5_000_000, ["4.8 MiB (5000001 bytes)", "4.8 MiB (5000000 bytes)"]),
        ((1 << 30) + 1, 1 << 30, ["1.0 GiB (1073741825 bytes)", "1 GiB"]),
        (65_535, 65_536, ["64.0 KiB (65535 bytes)", "64 KiB"]),
    ] {
        says(Error::TooLong { len: a, largest: b }, &both);
        says(Error::Cancelled { what: "x".into(), done: a as u64, total: b as u64 }, &both);
    }
    says(Error::TooLong { len: 3 << 20, largest: (2 << 20) - 32 }, &["3 MiB", "2.0 MiB"]);
}

/// The commonest mistake of a beginner: a buffer has the bytes that were written to it, and at first it has none.
#[test]
fn a_buffer_without_a_written_byte_is_called_that() {
    let pair = Pair::new();
    let (stream, copier) = (pair.stream(), pair.copier());
    let memory = pair.first.alloc(LEN).unwrap();
    let slice = || memory.slice(..).unwrap();
    let fresh = || pair.pool.checkout(LEN).unwrap();
    let mut errors: Vec<Error> = vec![
        stream.upload(fresh(), &memory).unwrap_err().into(),
        stream.upload(std::sync::Arc::new(fresh()), &memory).unwrap_err().into(),
        stream.upload_part(fresh(), ..100, &memory).unwrap_err().into(),
        stream.copy_host(fresh(), fresh()).unwrap_err().error,
    ];
    errors.push(copier.upload_pages(vec![(fresh(), slice())]).unwrap_err().error);
    errors.push(copier.upload_pages(vec![(fresh(), vec![slice()])]).unwrap_err().error);
    for error in errors {
        says(
            error,
            &["no byte of the buffer was written", "extend_from_slice", "Write", "BufMut", "set_len"],
        );
    }
    // An empty range of a buffer that was written is another thing.
    let mut written = fresh();
    written.extend_from_slice(&[1; 10]);
    let error = stream.upload_part(written, 5..5, &memory).unwrap_err().error;
    assert!(matches!(&error, Error::Argument(text) if text.contains("nothing to copy")));
    says(error, &["the range"]);
}

/// Whose the thing is, whose was wanted, and the remedy of that case and of no other.
#[test]
fn a_thing_of_another_device_is_named_with_both_devices() {
    let pair = Pair::new();
    let full = || filled(&pair.pool, LEN, 1);
    let (here, there) = (pair.stream(), pair.second.stream().unwrap());
    let (near, far) = (pair.first.alloc(LEN).unwrap(), pair.second.alloc(LEN).unwrap());
    let copier = pair.copier();

    // The buffer, or its pool: `there` works for host:1, the pool for host:0.
    let of_pool: Vec<Error> = vec![
        there.upload(full(), &far).unwrap_err().into(),
        there.upload(std::sync::Arc::new(full()), &far).unwrap_err().into(),
        there.download(&far, full()).unwrap_err().error,
        there.hold(full()).unwrap_err().into(),
        pair.pool.checkout_on(&there, LEN).unwrap_err(),
        full().device_address(&pair.second).unwrap_err(),
        Copier::builder(&pair.pool, &pair.second).build().unwrap_err(),
    ];
    for error in of_pool {
        says(error.clone(), &["pool of host:0", "with host:1", "PoolBuilder::device"]);
        assert!(!error.to_string().contains("memory of"), "{error}");
    }

    // The device memory.
    let of_memory: Vec<Error> = vec![
        here.upload(full(), &far).unwrap_err().into(),
        here.download(&far, full()).unwrap_err().error,
        here.copy(&far, &near).unwrap_err(),
        here.upload_blocking(&[1; LEN], &far).unwrap_err(),
        copier.upload_slice(&[1; LEN], &far).unwrap_err(),
        copier.upload_slices(&[(&[1; LEN][..], far.slice(..).unwrap())]).unwrap_err(),
    ];
    for error in of_memory {
        says(error.clone(), &["device memory of host:1", "with host:0"]);
        assert!(!error.to_string().contains("PoolBuilder"), "{error}");
    }

    // The stream.
    let sent = copier.upload_pages(vec![(full(), near.slice(..).unwrap())]).unwrap();
    let of_stream = [here.wait_for(&there).unwrap_err(), sent.order(&there).unwrap_err()];
    for error in of_stream {
        says(error.clone(), &["stream of host:1", "with host:0"]);
        assert!(!error.to_string().contains("PoolBuilder"), "{error}");
    }
    sent.wait().unwrap();
}

#[test]
fn a_pool_and_a_stuck_buffer_print_what_helps() {
    let pair = Pair::new();
    let buf = pair.pool.checkout(pinpool::Request::new(LEN).tag("kv")).unwrap();
    let text = format!("{:?}", pair.pool);
    assert!(text.starts_with(&format!("Pool {{ name: {:?}, devices: ", pair.pool.name())), "{text}");
    let stuck = pair.pool.stuck(Duration::ZERO);
    let text = format!("{stuck:?}");
    assert!(text.starts_with("[StuckBuffer { ") && text.contains("state: CheckedOut"), "{text}");
    assert!(!text.contains("known_by") && !text.contains("Instant"), "{text}");
    drop(buf);
}

#[test]
fn a_range_that_is_turned_round_is_not_called_too_long() {
    let pair = Pair::new();
    let memory = pair.first.alloc(LEN).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "that is the misuse")]
    says(memory.slice(20..10).unwrap_err(), &["20..10 ends before it begins"]);
    says(memory.slice(10..LEN + 1).unwrap_err(), &["10..4097 is outside of 4096 bytes"]);
    says(pair.first.alloc(0).unwrap_err(), &["0 bytes were asked for"]);
}

//! Transfers that stop: what they leave in flight, with workers and in the memory of handles that outlive them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use pinpool::Error;
use pinpool::copier::FileSink;

use super::{HANG, Rig, block_on, io, pattern, reader, told, until};

#[test]
fn a_call_that_fails_leaves_nothing_on_the_wire() {
    for panics in [false, true] {
        let rig = Rig::plain();
        let copier = rig.copier();
        let memory = rig.device.alloc(1 << 20).unwrap();
        rig.node.hang(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                rig.node.resume(0);
            });
            let mut left = (128 << 10) + 10;
            let mut breaks = reader(|into| {
                let n = into.len().min(left);
                left -= n;
                match n {
                    0 if panics => panic!("on purpose"),
                    0 => Err(io::Error::other("the line is dead")),
                    n => Ok(n),
                }
            });
            let call = || copier.upload_read(&mut breaks, &memory);
            match catch_unwind(AssertUnwindSafe(call)) {
                Ok(failed) => assert!(!panics && matches!(failed, Err(Error::Read { .. })), "{failed:?}"),
                Err(_) => assert!(panics),
            }
            assert_eq!(rig.pool.stats().in_flight_bytes, 0, "its memory may be used again");
        });
        rig.all_is_back();
    }
}

#[test]
fn a_canceller_keeps_nothing() {
    let rig = Rig::plain();
    let copier = rig.copier();
    // Of 1 GiB.
    let memory = rig.device.alloc(700 << 20).unwrap();
    let upload = copier.upload(pattern(1 << 20, 1), &memory).unwrap();
    let canceller = upload.canceller();
    assert_eq!(canceller.progress().total, 1 << 20);
    block_on(upload).unwrap();
    drop((copier, memory));
    let progress = canceller.progress();
    assert!(progress.over && progress.done == 1 << 20 && progress.landed_to == 1 << 20, "{progress:?}");
    canceller.cancel();
    assert_eq!(canceller.progress(), progress);
    until("the memory is free", || rig.device.alloc(700 << 20).is_ok());
}

#[test]
fn what_has_stopped_does_not_wait_for_the_rate() {
    let rig = Rig::plain();
    // The second chunk could go after 18 hours.
    let copier = rig.builder().threads(1).rate(1).build().unwrap();
    let memory = rig.device.alloc(1 << 20).unwrap();
    let (go_on, source) = told(1 << 20, 1);
    let upload = copier.upload(source, &memory).unwrap();
    // It is being filled now, or never will be.
    std::thread::sleep(Duration::from_millis(100));
    upload.cancel();
    go_on.send(()).unwrap();
    let ended = upload.wait_timeout(HANG).expect("it ends").map(drop).unwrap_err();
    assert!(matches!(ended.error, Error::Cancelled { .. }), "{ended:?}");
    rig.all_is_back();
}

/// Whether it lands after it was cancelled or before.
#[test]
fn what_has_landed_for_nobody_waits_for_no_worker() {
    for late in [true, false] {
        let rig = Rig::plain();
        let copier = rig.builder().threads(1).build().unwrap();
        let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
        let (go_on, source) = told(1 << 20, 0);
        let upload = copier.upload(source, &memory[0]).unwrap();
        // The only worker is inside the call.
        std::thread::sleep(Duration::from_millis(50));
        let file = tempfile::tempfile().unwrap();
        if late {
            rig.node.hang(0);
        }
        let download = copier.download(&memory[1], FileSink::new(file, "a file")).unwrap();
        // Otherwise all that may land has landed.
        std::thread::sleep(Duration::from_millis(100));
        download.cancel();
        rig.node.resume(0);
        let ended = download.wait_timeout(HANG).expect("it ends").map(drop).unwrap_err();
        assert!(matches!(ended.error, Error::Cancelled { .. }), "{ended:?}");
        drop(go_on);
        upload.wait().unwrap();
        rig.all_is_back();
    }
}

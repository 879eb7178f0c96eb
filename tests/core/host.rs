//! The host device's own rules. `tests/contract` has those of all devices.

use pinpool::ErrorClass;

use super::*;
use crate::support::process::threads;

#[test]
fn what_is_not_there_is_refused_and_addresses_are_never_used_again() {
    assert!([0, 1025].iter().all(|devices| HostNode::new(HostConfig::new().devices(*devices)).is_err()));
    let (node, device) = on(HostConfig::new().devices(3).memory(1000));
    assert!(Device::on(&node, 3).unwrap_err().to_string().contains("host:2"));
    node.kill(9);
    assert_eq!(node.live(9), HostUsage::default());
    let first = device.alloc(600).unwrap();
    let refused = |device: &Device, len| device.alloc(len).unwrap_err().class() == ErrorClass::Transient;
    assert!(refused(&device, 401), "400 bytes are left");
    let stale = first.address() + 600;
    drop(first);
    assert!(device.alloc(1000).unwrap().address() > stale);
    let (_node, device) = on(HostConfig::new().memory(usize::MAX));
    assert!([usize::MAX, 1 << 52].iter().all(|len| refused(&device, *len)));
}

#[test]
fn faults_due_together_strike_one_after_the_other_and_traces_have_all_calls() {
    let (node, device) = on(HostConfig::new());
    node.start_trace();
    for failure in [Failure::Transient, Failure::Argument] {
        node.fail(Fault { device: 0, call: Call::Allocate, nth: 0, failure });
    }
    node.fail(Fault { device: 1, call: Call::Allocate, nth: 0, failure: Failure::Capture });
    assert_eq!(device.alloc(1).unwrap_err().class(), ErrorClass::Transient);
    assert_eq!(device.alloc(1).unwrap_err().class(), ErrorClass::Argument);
    drop(device.alloc(1).unwrap());
    until(|| node.trace().len() == 4, || format!("{:?}", node.trace()));
    assert_eq!(node.trace(), [Call::Allocate, Call::Allocate, Call::Allocate, Call::Free]);
    assert_eq!(node.clear_faults(), 1);
}

/// A stream's delays follow from the seed and its number, which no work of other streams changes.
#[test]
fn streams_are_counted_whatever_the_device_did_before() {
    own_process!();
    let (_node, device) = host();
    let first = device.stream().unwrap();
    first.synchronize().unwrap();
    let _second = device.stream().unwrap();
    let names = || {
        let mut names = threads("pinpool-host-");
        names.sort();
        names
    };
    until(|| names() == ["pinpool-host-1", "pinpool-host-2"], || format!("{:?}", names()));
}

#[test]
fn late_copies_are_overtaken_and_a_device_that_dies_releases_who_waits() {
    let (node, device) = on(HostConfig::new().late(Duration::from_secs(3600), 1));
    let (pool, memory) = (pool(&device, 1 << 20), device.alloc(8).unwrap());
    let [late, quick] = [(); 2].map(|()| device.stream().unwrap());
    let sent = late.upload(filled(&pool, 8, 1), &memory).unwrap();
    quick.synchronize().unwrap();
    assert!(!sent.is_done().unwrap());
    std::thread::scope(|scope| {
        let queued = node.live(0).queued;
        let waits = scope.spawn(|| late.download_blocking(&memory, &mut [0; 8]));
        until(|| node.live(0).queued > queued, || "the copy is queued".into());
        node.kill(0);
        assert!(waits.join().unwrap().unwrap_err().is_device_lost());
    });
    assert_eq!(node.live(0).queued, 0);
    assert!(sent.wait().unwrap_err().is_device_lost());
}

#[test]
fn nothing_is_written_once_a_device_is_known_to_be_dead() {
    for round in 0..16 {
        let (node, device) = on(HostConfig::new().late(Duration::ZERO, round));
        let (stream, memory) = (device.stream().unwrap(), device.alloc(2 << 20).unwrap());
        let mut bytes = vec![1; 2 << 20];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while stream.download_blocking(&memory, &mut bytes).is_ok() {}
                bytes.fill(9);
            });
            std::thread::sleep(Duration::from_micros(100 * round));
            if round % 2 == 0 {
                return node.kill(0);
            }
            node.fail(Fault { device: 0, call: Call::Allocate, nth: 0, failure: Failure::DeviceLost });
            assert!(device.alloc(1).unwrap_err().is_device_lost());
        });
        std::thread::sleep(Duration::from_millis(1));
        assert!(bytes.iter().all(|byte| *byte == 9));
    }
}

#[test]
fn copies_within_a_device_that_cross_do_not_deadlock() {
    const HALF: usize = 3 << 19;
    let (_node, device) = on(HostConfig::new());
    let memory = device.alloc(2 * HALF).unwrap();
    let [there, back] = [(); 2].map(|()| device.stream().unwrap());
    let (low, high) = (memory.slice(..HALF).unwrap(), memory.slice(HALF..).unwrap());
    for _ in 0..20 {
        drop(there.copy(&low, &high).unwrap());
        drop(back.copy(&high, &low).unwrap());
    }
    there.synchronize().unwrap();
    back.synchronize().unwrap();
}

//! Faults, hanging and dying.

use super::*;

fn arm(rig: &Rig, call: Call, nth: u64, failure: Failure) {
    rig.node.fail(Fault { device: 0, call, nth, failure });
}

#[test]
fn a_fault_strikes_the_call_it_was_armed_for() {
    let rig = Rig::stepped();
    arm(&rig, Call::Allocate, 1, Failure::Transient);
    rig.node.fail(Fault { device: 1, call: Call::Allocate, nth: 0, failure: Failure::Argument });
    let a = rig.memory(8);
    let stream = rig.stream();
    assert_eq!(class(rig.driver.allocate(8)), ErrorClass::Transient);
    let b = rig.memory(8);
    assert_eq!(rig.node.clear_faults(), 1, "the fault of the other device has not struck");
    rig.close(&[stream], &[], &[a, b]);
}

#[test]
fn faults_due_together_strike_one_after_the_other() {
    let rig = Rig::stepped();
    arm(&rig, Call::CreateEvent, 0, Failure::Transient);
    rig.node.fail_any(0, Failure::Argument);
    assert_eq!(class(rig.driver.create_event()), ErrorClass::Transient);
    assert_eq!(class(rig.driver.create_event()), ErrorClass::Argument);
    let event = rig.event();
    rig.close(&[], &[event], &[]);
}

#[test]
fn every_call_fails_as_told_and_does_nothing() {
    for call in Call::ALL {
        for (failure, expected) in [
            (Failure::Argument, ErrorClass::Argument),
            (Failure::Transient, ErrorClass::Transient),
            (Failure::Capture, ErrorClass::Capture),
            (Failure::DeviceLost, ErrorClass::DeviceLost),
        ] {
            let rig = Rig::stepped();
            let (stream, event, memory, host) = (rig.stream(), rig.event(), rig.memory(8), Host::new(8, 1));
            let page = crate::os::page_size();
            let [base, other] = [(); 2].map(|()| crate::os::map(page, 1).unwrap());
            // SAFETY: mapped until the end, and used by no copy.
            unsafe { rig.driver.pin(base, page).unwrap() };
            let block = rig.driver.allocate_host(page, HostKind::Managed).unwrap();
            let before = rig.node.live(0);
            arm(&rig, call, 0, failure);
            // SAFETY: as above.
            let result = unsafe {
                match call {
                    Call::Pin => rig.driver.pin(other, page),
                    Call::Unpin => rig.driver.unpin(base, page),
                    Call::AllocateHost => rig.driver.allocate_host(page, HostKind::Managed).map(drop),
                    Call::FreeHost => rig.driver.free_host(block, page, HostKind::Managed),
                    Call::DeviceAddress => rig.driver.device_address(base).map(drop),
                    Call::Allocate => rig.driver.allocate(8).map(drop),
                    Call::Free => rig.driver.free(memory),
                    Call::Examine => rig.driver.examine(memory, 8),
                    Call::CreateStream => rig.driver.create_stream().map(drop),
                    Call::DestroyStream => rig.driver.destroy_stream(stream),
                    Call::Copy => rig.try_upload(stream, &host, memory),
                    Call::CopyBlocking => rig.upload_blocking(stream, &host, memory),
                    Call::Launch => {
                        let driver = rig.driver.as_any().downcast_ref::<HostDriver>().unwrap();
                        driver.launch(stream, &[], &[], Owned::new(Box::new(|_, _| ())))
                    }
                    Call::CreateEvent => rig.driver.create_event().map(drop),
                    Call::DestroyEvent => rig.driver.destroy_event(event),
                    Call::Record => rig.driver.record(event, stream),
                    Call::Query => rig.driver.query(event).map(drop),
                    Call::WaitEvent => rig.driver.wait_event(stream, event),
                }
            };
            let Error::Device(error) = result.unwrap_err() else { panic!("not the device's error") };
            assert_eq!((error.class, error.call, &*error.device), (expected, call.name(), "host:0"));
            let dead = failure == Failure::DeviceLost;
            if !(dead && matches!(call, Call::DestroyStream | Call::DestroyEvent)) {
                assert_eq!(rig.node.live(0), before, "{call:?} {failure:?}");
            }
            // SAFETY: as above.
            unsafe {
                rig.driver.unpin(base, page).unwrap();
                rig.driver.free_host(block, page, HostKind::Managed).unwrap();
                crate::os::unmap(base, page).unwrap();
                crate::os::unmap(other, page).unwrap();
            }
            rig.driver.free(memory).unwrap();
            // Dead or not, the device lets go of streams and events, once.
            let _ = rig.driver.destroy_stream(stream);
            let _ = rig.driver.destroy_event(event);
            let _ = rig.driver.destroy_stream(stream);
            let _ = rig.driver.destroy_event(event);
            assert_eq!(rig.node.live(0), HostUsage::default(), "{call:?} {failure:?}");
        }
    }
}

#[test]
fn what_was_refused_may_run_all_the_same() {
    let rig = Rig::stepped();
    let (a, b, event, memory) = (rig.stream(), rig.stream(), rig.event(), rig.memory(4));
    let (source, target) = (Host::new(4, 6), Host::new(4, 0));
    arm(&rig, Call::Copy, 0, Failure::RunsAnyway);
    arm(&rig, Call::Record, 0, Failure::RunsAnyway);
    arm(&rig, Call::WaitEvent, 0, Failure::RunsAnyway);
    arm(&rig, Call::CopyBlocking, 0, Failure::RunsAnyway);
    arm(&rig, Call::Allocate, 0, Failure::RunsAnyway);
    assert_eq!(class(rig.try_upload(a, &source, memory)), ErrorClass::Transient);
    assert_eq!(class(rig.driver.record(event, a)), ErrorClass::Transient);
    assert_eq!(class(rig.driver.wait_event(b, event)), ErrorClass::Transient);
    assert_eq!(rig.node.queued(0), 3);
    assert!(!rig.query(event));
    assert_eq!(class(rig.download_blocking(b, memory, &target)), ErrorClass::Transient);
    assert!(target.all(6), "the call returned an error, and only after the copy had ended");
    assert!(rig.query(event));
    assert_eq!(class(rig.driver.allocate(8)), ErrorClass::Transient);
    rig.close(&[a, b], &[event], &[memory]);
}

#[test]
fn a_stalled_operation_holds_its_stream_only() {
    let rig = Rig::stepped();
    let (a, b, memory) = (rig.stream(), rig.stream(), rig.memory(4));
    let (first, second) = (rig.event(), rig.event());
    let host = Host::new(4, 6);
    arm(&rig, Call::Copy, 1, Failure::Stall);
    rig.upload(a, &host, memory);
    rig.upload(a, &host, memory);
    rig.record(first, a);
    rig.record(second, b);
    rig.drain();
    assert!(rig.query(second) && !rig.query(first));
    assert_eq!(rig.node.queued(0), 2);
    rig.node.resume(0);
    rig.drain();
    assert!(rig.query(first));
    arm(&rig, Call::CopyBlocking, 0, Failure::Stall);
    assert_eq!(class(rig.upload_blocking(a, &host, memory)), ErrorClass::Transient);
    rig.upload_blocking(a, &host, memory).unwrap();
    rig.close(&[a, b], &[first, second], &[memory]);
}

#[test]
fn the_trace_has_every_call_once() {
    let rig = Rig::stepped();
    assert_eq!((rig.node.calls(), rig.node.trace()), (0, vec![]));
    let before = rig.event();
    rig.node.start_trace();
    let (stream, memory) = (rig.stream(), rig.memory(4));
    rig.upload_blocking(stream, &Host::new(4, 0), memory).unwrap();
    let _ = rig.driver.query(EventHandle(0));
    rig.driver.destroy_event(before).unwrap();
    let expected = [Call::CreateStream, Call::Allocate, Call::CopyBlocking, Call::Query, Call::DestroyEvent];
    assert_eq!((rig.node.calls(), rig.node.trace()), (5, expected.to_vec()));
    assert_eq!(rig.node.stop_trace(), expected);
    rig.driver.free(memory).unwrap();
    assert_eq!((rig.node.calls(), rig.node.trace()), (5, vec![]));
    rig.node.start_trace();
    assert_eq!(rig.node.calls(), 0);
}

#[test]
fn a_scenario_survives_each_call_failing_once() {
    let scenario = |rig: &Rig| -> Result<()> {
        let stream = rig.driver.create_stream()?;
        let event = rig.driver.create_event()?;
        let memory = rig.driver.allocate(16)?;
        rig.upload_blocking(stream, &Host::new(16, 1), memory)?;
        rig.driver.record(event, stream)?;
        rig.drain();
        assert!(rig.driver.query(event)?);
        rig.driver.free(memory)?;
        rig.driver.destroy_event(event)?;
        rig.driver.destroy_stream(stream)
    };
    let rig = Rig::stepped();
    rig.node.start_trace();
    scenario(&rig).unwrap();
    let calls = rig.node.stop_trace();
    for (nth, call) in calls.iter().enumerate() {
        let rig = Rig::stepped();
        rig.node.fail_any(nth as u64, Failure::Transient);
        let Error::Device(error) = scenario(&rig).unwrap_err() else { panic!("not the device's error") };
        assert_eq!(error.call, call.name());
    }
}

#[test]
fn a_dead_device_touches_nothing_and_says_so() {
    let rig = Rig::stepped();
    let (stream, event, memory, target) = (rig.stream(), rig.event(), rig.memory(4), Host::new(4, 1));
    rig.download(stream, memory, &target);
    rig.record(event, stream);
    rig.node.kill(0);
    rig.node.kill(0);
    assert!(!rig.node.step());
    assert_eq!(rig.node.queued(0), 0);
    assert!(target.all(1));
    assert_eq!(class(rig.driver.query(event)), ErrorClass::DeviceLost);
    assert_eq!(class(rig.try_download(stream, memory, &target)), ErrorClass::DeviceLost);
    assert_eq!(class(rig.download_blocking(stream, memory, &target)), ErrorClass::DeviceLost);
    assert_eq!(class(rig.driver.create_stream()), ErrorClass::DeviceLost);
    assert!(text(rig.driver.allocate(1)).contains("was killed"));
    assert_eq!(class(rig.driver.destroy_stream(stream)), ErrorClass::DeviceLost);
    assert_eq!(class(rig.driver.destroy_event(event)), ErrorClass::DeviceLost);
    rig.close(&[], &[], &[memory]);
}

#[test]
fn devices_die_alone() {
    let node = HostNode::new(HostConfig::new().devices(2).memory(1 << 20).stepped(1)).unwrap();
    let (a, b) = (node.driver(0).unwrap(), node.driver(1).unwrap());
    node.kill(0);
    assert!(a.create_stream().is_err());
    b.create_stream().unwrap();
}

#[test]
fn a_copy_after_the_free_of_its_memory_kills_the_device() {
    for within in [false, true] {
        let rig = Rig::stepped();
        let (stream, event, host) = (rig.stream(), rig.event(), Host::new(4, 0));
        let (kept, freed) = (rig.memory(4), rig.memory(4));
        if within {
            rig.on_device(stream, kept, freed, 4);
        } else {
            rig.upload(stream, &host, freed);
        }
        rig.record(event, stream);
        rig.driver.free(freed).unwrap();
        assert_eq!(rig.node.live(0).allocations, 1);
        rig.drain();
        let error = text(rig.driver.query(event));
        assert!(error.contains("freed"), "{error}");
        assert_eq!(rig.node.queued(0), 0);
    }
}

#[test]
fn a_blocking_copy_behind_a_fatal_one_is_lost_with_it() {
    let rig = Rig::stepped();
    let (stream, host, memory, freed) = (rig.stream(), Host::new(4, 0), rig.memory(4), rig.memory(4));
    rig.upload(stream, &host, freed);
    rig.driver.free(freed).unwrap();
    assert_eq!(class(rig.upload_blocking(stream, &host, memory)), ErrorClass::DeviceLost);
}

#[test]
fn hanging_holds_streams_made_later_too() {
    let rig = Rig::stepped();
    rig.node.hang(0);
    let (stream, event) = (rig.stream(), rig.event());
    rig.record(event, stream);
    assert_eq!((rig.node.runnable(0), rig.node.queued(0)), (0, 1));
    assert!(!rig.node.step() && !rig.node.step_stream(0, 0));
    rig.node.resume(0);
    assert_eq!(rig.node.runnable(0), 1);
    rig.drain();
    assert!(rig.query(event));
    rig.close(&[stream], &[event], &[]);
}

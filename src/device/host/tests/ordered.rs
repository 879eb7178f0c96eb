//! Memory in a stream's order, memory by its address, and copies between host memory.

use super::*;
use crate::device::host::HostUsage;
use crate::error::AddressFault;

impl Rig {
    fn on_host(&self, stream: StreamHandle, src: &Host, dst: &Host) {
        // SAFETY: the tests keep both until the copy has ended or is dropped.
        unsafe {
            self.driver
                .copy(stream, Transfer::OnHost { src: src.ptr(), dst: dst.ptr(), len: src.len() })
                .unwrap()
        }
    }

    fn address_fault(&self, address: u64, len: usize) -> AddressFault {
        match self.driver.examine(DevicePtr(address), len) {
            Err(Error::BadAddress { fault, .. }) => fault,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn memory_is_there_in_its_streams_order() {
    let rig = Rig::stepped();
    let (stream, source, target) = (rig.stream(), Host::new(4, 3), Host::new(4, 0));
    let memory = rig.driver.allocate_on(stream, 4).unwrap();
    rig.upload(stream, &source, memory);
    rig.download(stream, memory, &target);
    rig.driver.free_on(stream, memory).unwrap();
    assert_eq!(rig.node.live(0).allocations, 1, "its turn has not come");
    // From here on no call may name the memory, though it is still there.
    assert!(rig.try_upload(stream, &source, memory).is_err());
    assert_eq!(rig.address_fault(memory.0, 1), AddressFault::Unknown);
    assert!(rig.driver.free_on(stream, memory).is_err(), "twice");
    while rig.node.step() {}
    assert!(target.all(3));
    assert_eq!(rig.node.live(0).allocations, 0);
    rig.close(&[stream], &[], &[]);
}

#[test]
fn using_it_before_its_turn_kills_the_device() {
    let rig = Rig::stepped();
    let (home, other, event) = (rig.stream(), rig.stream(), rig.event());
    let source = Host::new(4, 3);
    // Behind an event the copy is allowed, in any order of the streams.
    let memory = rig.driver.allocate_on(home, 4).unwrap();
    rig.record(event, home);
    rig.driver.wait_event(other, event).unwrap();
    rig.upload(other, &source, memory);
    while rig.node.step() {}
    rig.driver.check_alive();
    let memory = rig.driver.allocate_on(home, 4).unwrap();
    rig.upload(other, &source, memory);
    assert!(rig.node.step_stream(0, 1));
    let error = rig.driver.create_event().unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("not yet"), "{error}");
}

/// Whether a device still serves calls, by any of its drivers.
trait Alive {
    fn check_alive(&self);
}

impl Alive for Arc<dyn Driver> {
    fn check_alive(&self) {
        let event = self.create_event().unwrap();
        self.destroy_event(event).unwrap();
    }
}

#[test]
fn what_is_to_be_freed_goes_with_its_stream_and_its_device() {
    for how in ["killed", "destroyed", "closed"] {
        let rig = Rig::stepped();
        let stream = rig.stream();
        let memory = rig.driver.allocate_on(stream, 4).unwrap();
        let later = rig.driver.allocate_on(stream, 4).unwrap();
        rig.driver.free_on(stream, memory).unwrap();
        match how {
            "killed" => {
                rig.node.kill(0);
                assert_eq!(rig.node.live(0).allocations, 1);
                rig.driver.free_on(stream, later).unwrap();
                let _ = rig.driver.destroy_stream(stream);
            }
            "destroyed" => {
                rig.driver.free_on(stream, later).unwrap();
                rig.driver.destroy_stream(stream).unwrap();
                assert_eq!(rig.node.live(0).allocations, 2);
                while rig.node.step() {}
            }
            _ => {
                rig.driver.free_on(stream, later).unwrap();
                rig.driver.destroy_stream(stream).unwrap();
                let Rig { node, driver } = rig;
                drop(driver);
                assert_eq!(node.live(0), HostUsage::default(), "{how}");
                continue;
            }
        }
        assert_eq!(rig.node.live(0), HostUsage::default(), "{how}");
    }
}

#[test]
fn an_address_is_told_what_it_is() {
    let node = HostNode::new(HostConfig::new().devices(2).memory(1 << 20).stepped(1)).unwrap();
    let (rig, far) = (Rig { driver: node.driver(0).unwrap(), node: node.clone() }, node.driver(1).unwrap());
    let (memory, foreign) = (rig.memory(100), far.allocate(100).unwrap());
    let at = memory.0;
    rig.driver.examine(memory, 100).unwrap();
    rig.driver.examine(DevicePtr(at + 99), 1).unwrap();
    let past = |over| AddressFault::PastEnd { start: at, size: 100, over };
    assert_eq!(rig.address_fault(at, 101), past(1));
    assert_eq!(rig.address_fault(at + 99, 3), past(2));
    assert_eq!(rig.address_fault(at + 1, usize::MAX), past(usize::MAX - 99));
    assert_eq!(rig.address_fault(at + 100, 1), AddressFault::Unknown);
    assert_eq!(rig.address_fault(foreign.0, 1), AddressFault::OtherDevice { device: "host:1".into() });
    assert_eq!(rig.address_fault(1, 1), AddressFault::Unknown);
    assert_eq!(rig.address_fault(u64::MAX, 1), AddressFault::Unknown);
    rig.driver.free(memory).unwrap();
    assert_eq!(rig.address_fault(at, 1), AddressFault::Unknown);
    far.free(foreign).unwrap();
}

#[test]
fn copies_between_host_memory_are_late_too() {
    let rig = Rig::stepped();
    let stream = rig.stream();
    let (source, target) = (Host::new(3 << 20, 1), Host::new(3 << 20, 0));
    rig.on_host(stream, &source, &target);
    assert!(target.all(0));
    source.set(7);
    assert!(rig.node.step());
    assert!(target.all(7));
    // The queued copy uses both.
    let page = crate::os::page_size();
    let [from, to] = [(); 2].map(|()| crate::os::map(page, 1).unwrap());
    for base in [from, to] {
        // SAFETY: mapped until the end.
        unsafe { rig.driver.pin(base, page).unwrap() };
    }
    let transfer = Transfer::OnHost { src: from.as_ptr(), dst: to.as_ptr(), len: page };
    // SAFETY: both are mapped, and nothing else uses them.
    unsafe { rig.driver.copy(stream, transfer).unwrap() };
    for base in [from, to] {
        // SAFETY: refused.
        assert!(unsafe { rig.driver.unpin(base, page) }.is_err());
    }
    while rig.node.step() {}
    for base in [from, to] {
        // SAFETY: pinned and mapped above, and no copy uses them any more.
        unsafe {
            rig.driver.unpin(base, page).unwrap();
            crate::os::unmap(base, page).unwrap();
        }
    }
    rig.close(&[stream], &[], &[]);
}

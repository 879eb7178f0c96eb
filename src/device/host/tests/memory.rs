//! Memory by its address, and copies between host memory.

use super::*;
use crate::device::address::AddressFault;

impl Rig {
    fn on_host(&self, stream: StreamHandle, src: &Host, dst: &Host) {
        // SAFETY: the tests keep both until the copy has ended or is dropped.
        unsafe {
            self.driver
                .copy(stream, Transfer::OnHost { src: src.ptr(), dst: dst.ptr(), len: src.len() })
                .unwrap()
        }
    }

    fn is_told(&self, address: u64, len: usize, fault: AddressFault) {
        let told = self.driver.examine(DevicePtr(address), len).unwrap_err();
        assert_eq!(told, fault.of("host:0", address, len));
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
    rig.is_told(at, 101, past(1));
    rig.is_told(at + 99, 3, past(2));
    rig.is_told(at + 1, usize::MAX, past(usize::MAX - 99));
    rig.is_told(at + 100, 1, AddressFault::Unknown);
    rig.is_told(foreign.0, 1, AddressFault::OtherDevice { device: "host:1".into() });
    rig.is_told(1, 1, AddressFault::Unknown);
    rig.is_told(u64::MAX, 1, AddressFault::Unknown);
    rig.driver.free(memory).unwrap();
    rig.is_told(at, 1, AddressFault::Unknown);
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

//! Page-locked host memory.

use std::ops::{Deref, DerefMut};

use crate::support::doubles::ascendcl::{Acl, made, says};

const PINNED: usize = 0x1000_0000;
const MAPPED: usize = 2;

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; 4096]);

/// Memory that begins and ends with a page.
pub struct Pages(Vec<Page>);

pub fn pages(count: usize) -> Pages {
    Pages(vec![Page([1; 4096]); count])
}

impl Deref for Pages {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: a page is its bytes and nothing else.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 4096) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 4096) }
    }
}

rules! {
    HOST:

    hst_1_blocks_are_freed_whole_and_once (ready) |a| {
        let host = a.host(256);
        says!(a, 107_000, "aclrtFreeHost", host.at + 64);
        says!(a, 0, "aclrtFreeHost", host.at);
        says!(a, 107_000, "aclrtFreeHost", host.at);
        let pages = pages(1);
        says!(a, 107_000, "aclrtFreeHost", pages.as_ptr());
        a.broken(&["HST-1"; 3]);
    }

    hst_2_blocks_are_not_freed_under_a_copy (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(64), a.host(256));
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtFreeHost", host.at);
        a.broken(&["HST-2"]);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert_eq!(a.read(memory, 64), [0xDD; 64]);
        // A copy to freed memory is discarded.
        let host = a.host(256);
        assert_eq!(a.download(host.at, memory, 64, stream), 0);
        says!(a, 0, "aclrtFreeHost", host.at);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        a.broken(&["HST-2", "HST-2"]);
        // One call waits.
        let mut host = a.host(256);
        host.fill(5);
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtFreeHostWithDevSync", host.at);
        assert_eq!(a.read(memory, 64), [5; 64]);
        a.broken(&["HST-2", "HST-2"]);
    }

    hst_3_streams_are_waited_for_before_blocks_are_freed (ready) |a| {
        let (stream, memory, event, host) = (a.stream(), a.memory(64), a.event(), a.host(256));
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtRecordEvent", event, stream);
        a.wait(event);
        says!(a, 0, "aclrtFreeHost", host.at);
        a.broken(&["HST-3"]);
        // Waiting for another stream does not count; waiting for the device does.
        let (host, other) = (a.host(256), a.stream());
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtRecordEvent", event, stream);
        a.wait(event);
        says!(a, 0, "aclrtSynchronizeStream", other);
        says!(a, 0, "aclrtFreeHost", host.at);
        a.broken(&["HST-3", "HST-3"]);
        let host = a.host(256);
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtSynchronizeDevice");
        says!(a, 0, "aclrtFreeHost", host.at);
        a.broken(&["HST-3", "HST-3"]);
    }

    reg_1_whole_pages_are_registered (ready) |a| {
        let mut pages = pages(2);
        let at = pages.as_mut_ptr() as usize;
        says!(a, 507_899, "aclrtHostRegisterV2", at + 64, 4096, PINNED);
        says!(a, 507_899, "aclrtHostRegisterV2", at, 4095, PINNED);
        let mut mapped = 0_usize;
        says!(a, 507_899, "aclrtHostRegister", at, 64, 0, &raw mut mapped);
        a.broken(&["REG-1"; 3]);
        says!(a, 0, "aclrtHostRegisterV2", at, 8192, PINNED | MAPPED);
        says!(a, 0, "aclrtHostGetDevicePointer", at, &raw mut mapped, 0);
        a.broken(&["REG-1"; 3]);
    }

    reg_2_nothing_is_registered_twice (ready) |a| {
        let mut pages = pages(2);
        let at = pages.as_mut_ptr() as usize;
        says!(a, 0, "aclrtHostRegisterV2", at, 4096, PINNED);
        says!(a, 507_910, "aclrtHostRegisterV2", at, 4096, PINNED);
        says!(a, 507_910, "aclrtHostRegisterV2", at, 8192, MAPPED);
        a.broken(&["REG-2", "REG-2"]);
        says!(a, 0, "aclrtHostRegisterV2", at + 4096, 4096, PINNED);
        a.broken(&["REG-2", "REG-2"]);
        assert_eq!(a.stand_in.report().leaks, ["devices 1", "registrations 2"]);
    }

    reg_3_what_was_registered_is_unregistered (ready) |a| {
        let mut pages = pages(2);
        let (at, mut mapped) = (pages.as_mut_ptr() as usize, 0_usize);
        says!(a, 507_911, "aclrtHostUnregister", at);
        says!(a, 0, "aclrtHostRegisterV2", at, 8192, PINNED);
        says!(a, 507_911, "aclrtHostUnregister", at + 4096);
        // Pinned, and not mapped.
        says!(a, 507_911, "aclrtHostGetDevicePointer", at, &raw mut mapped, 0);
        says!(a, 0, "aclrtHostUnregister", at);
        says!(a, 507_911, "aclrtHostUnregister", at);
        a.broken(&["REG-3"; 4]);
        says!(a, 0, "aclrtHostRegister", at, 8192, 0, &raw mut mapped);
        let mut second = 0_usize;
        says!(a, 0, "aclrtHostGetDevicePointer", at + 4096, &raw mut second, 0);
        assert_eq!(second, mapped + 4096);
        a.broken(&["REG-3"; 4]);
    }

    reg_4_memory_that_is_there_is_registered (ready) |a| {
        let mut pages = pages(1);
        says!(a, 107_000, "aclrtHostRegisterV2", pages.as_mut_ptr(), 0, PINNED);
        says!(a, 107_000, "aclrtHostRegisterV2", 4096, 4096, PINNED);
        a.broken(&["REG-4", "REG-4"]);
    }

    reg_5_memory_is_not_unregistered_under_a_copy (ready) |a| {
        let (stream, memory, mut pages) = (a.stream(), a.memory(64), pages(1));
        let at = pages.as_mut_ptr() as usize;
        says!(a, 0, "aclrtHostRegisterV2", at, 4096, PINNED);
        assert_eq!(a.upload(memory, at, 64, stream), 0);
        says!(a, 0, "aclrtHostUnregister", at);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert_eq!(a.read(memory, 64), [0xDD; 64]);
        a.broken(&["REG-5"]);
        // Nor is it freed while it is registered.
        let host = a.host(8192);
        let page = host.at.next_multiple_of(4096);
        says!(a, 0, "aclrtHostRegisterV2", page, 4096, MAPPED);
        says!(a, 0, "aclrtFreeHost", host.at);
        a.broken(&["REG-5", "REG-5"]);
    }

    reg_6_page_locked_memory_is_not_pinned_again (ready) |a| {
        let host = a.host(8192);
        let page = host.at.next_multiple_of(4096);
        says!(a, 107_000, "aclrtHostRegisterV2", page, 4096, PINNED);
        a.broken(&["REG-6"]);
        says!(a, 0, "aclrtHostRegisterV2", page, 4096, MAPPED);
        a.broken(&["REG-6"]);
    }
}

#[test]
fn blocks_are_aligned_as_promised_and_no_more() {
    let Some(a) = Acl::ready() else { return };
    let blocks = [(); 4].map(|()| a.host(1000));
    assert!(blocks.iter().all(|b| b.at % 64 == 0 && b.at % 4096 != 0 && b[..] == [0xA5; 1000]));
    assert!(blocks.iter().any(|b| b.at % 128 != 0));
}

#[test]
fn on_the_device_the_pool_aligns_by_itself() {
    let Some(a) = Acl::on_device() else { return };
    assert_eq!(made!(a, "aclrtGetRunMode") & 0xFFFF_FFFF, 0);
    let (stream, memory, host) = (a.stream(), a.memory(64), a.host(1024));
    assert!(host.at % 64 != 0 && host.at % 16 == 0);
    let at = host.at.next_multiple_of(64);
    // Any way, since all of it is the device's.
    for kind in 0..4 {
        says!(a, 0, "aclrtMemcpyAsync", memory, 64, at, 64, kind, stream);
    }
    says!(a, 0, "aclrtMemcpyAsync", at, 64, at + 128, 64, 0, stream);
    a.broken(&[]);
    assert_eq!(a.upload(memory, host.at, 64, stream), 0);
    a.broken(&["CPY-5"]);
    let (mut free, mut total) = (0_usize, 0_usize);
    says!(a, 0, "aclrtGetMemInfo", 0, &raw mut free, &raw mut total);
    assert_eq!(total - free, 1024 + 64);
    // There is nothing to register.
    let mut pages = pages(1);
    says!(a, 207_000, "aclrtHostRegisterV2", pages.as_mut_ptr(), 4096, PINNED);
    a.broken(&["CPY-5"]);
}

#[test]
fn blocks_and_registering_have_limits() {
    let Some(a) = Acl::ready() else { return };
    let mut at = 0_usize;
    a.limit_host(1 << 20, 3 << 20);
    says!(a, 207_001, "aclrtMallocHost", &raw mut at, (1 << 20) + 1);
    let blocks = [(); 3].map(|()| a.host(1 << 20).at);
    says!(a, 207_001, "aclrtMallocHost", &raw mut at, 1);
    says!(a, 0, "aclrtFreeHost", blocks[0]);
    a.host(1 << 20);
    a.enable(false, false);
    let mut pages = pages(1);
    says!(a, 207_000, "aclrtHostRegisterV2", pages.as_mut_ptr(), 4096, PINNED);
    a.broken(&[]);
}

#[test]
fn blocks_are_configured_where_the_driver_can() {
    #[repr(C)]
    struct Attribute(u32, [u32; 2]);
    let Some(a) = Acl::ready() else { return };
    let mut at = 0_usize;
    says!(a, 0, "aclrtMallocHostWithCfg", &raw mut at, 64, 0);
    let attribute = Attribute(3, [1, 0]);
    let config = [&raw const attribute as usize, 1];
    says!(a, 207_000, "aclrtMallocHostWithCfg", &raw mut at, 64, &raw const config);
    a.enable(true, true);
    says!(a, 0, "aclrtMallocHostWithCfg", &raw mut at, 64, &raw const config);
    a.broken(&[]);
    let unknown = Attribute(9, [0, 0]);
    let config = [&raw const unknown as usize, 1];
    says!(a, 107_000, "aclrtMallocHostWithCfg", &raw mut at, 64, &raw const config);
    let config = [0_usize, 1];
    says!(a, 107_000, "aclrtMallocHostWithCfg", &raw mut at, 64, &raw const config);
    a.broken(&["ARG-2", "ARG-1"]);
}

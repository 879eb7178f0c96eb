//! Device memory: which addresses are valid, how much there is, when it is freed.

use crate::support::doubles::ascendcl::{made, says};

rules! {
    MEMORY:

    mem_1_device_memory_that_is_not_there (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(64), a.host(512));
        assert_eq!(a.upload(memory, host.at, 128, stream), 107_000);
        assert_eq!(a.upload(memory + 64, host.at, 64, stream), 107_000);
        assert_eq!(a.download(host.at, memory, 65, stream), 107_000);
        says!(a, 107_000, "aclrtMemsetAsync", memory + 128, 64, 0, 64, stream);
        a.broken(&["MEM-1"; 4]);
    }

    mem_2_no_more_than_fits (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(256), a.host(512));
        says!(a, 107_000, "aclrtMemcpyAsync", memory, 64, host.at, 128, 1, stream);
        says!(a, 107_000, "aclrtMemcpy", memory, 64, host.at, 128, 1);
        says!(a, 107_000, "aclrtMemset", memory, 64, 0, 128);
        says!(a, 107_000, "aclrtMemsetAsync", memory, 64, 0, 128, stream);
        a.broken(&["MEM-2"; 4]);
        says!(a, 0, "aclrtMemcpyAsync", memory, 128, host.at, 128, 1, stream);
        a.broken(&["MEM-2"; 4]);
    }

    mem_3_memory_that_is_page_locked_in_part (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(4096), a.host(512));
        assert_eq!(a.upload(memory, host.at + 256, 512, stream), 107_000);
        a.broken(&["MEM-3"]);
    }

    mem_4_no_more_room_than_there_is (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(256), a.host(512));
        says!(a, 0, "aclrtMemcpyAsync", memory, 257, host.at, 64, 1, stream);
        says!(a, 0, "aclrtMemcpyAsync", memory + 192, 128, host.at, 64, 1, stream);
        says!(a, 0, "aclrtMemcpyAsync", host.at + 256, 512, memory, 64, 2, stream);
        a.broken(&["MEM-4"; 3]);
        says!(a, 0, "aclrtMemcpyAsync", memory + 192, 64, host.at, 64, 1, stream);
        a.broken(&["MEM-4"; 3]);
    }

    mem_5_allocations_are_freed_whole_and_once (ready) |a| {
        let memory = a.memory(256);
        says!(a, 107_000, "aclrtFree", memory + 64);
        says!(a, 0, "aclrtFree", memory);
        says!(a, 107_000, "aclrtFree", memory);
        a.broken(&["MEM-5", "MEM-5"]);
    }

    mem_6_memory_is_not_freed_under_a_copy (ready) |a| {
        let (stream, memory, mut host) = (a.stream(), a.memory(64), a.host(256));
        assert_eq!(a.download(host.at, memory, 64, stream), 0);
        says!(a, 0, "aclrtFree", memory);
        a.broken(&["MEM-6"]);
        // No call waited: the copy brings the bytes of freed memory.
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert_eq!(host[..64], [0xDD; 64]);
        let memory = a.memory(64);
        host.fill(1);
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        says!(a, 0, "aclrtFree", memory);
        a.broken(&["MEM-6"]);
    }
}

/// Memory that is full is an error and no mistake.
#[test]
fn a_device_has_so_much_memory() {
    let Some(a) = crate::support::doubles::ascendcl::Acl::ready() else { return };
    let (mut free, mut total, mut at) = (0_usize, 0_usize, 0_usize);
    says!(a, 0, "aclrtGetMemInfo", 1, &raw mut free, &raw mut total);
    assert_eq!((free, total), (256 << 20, 256 << 20));
    let memory = a.memory(200 << 20);
    says!(a, 0, "aclrtGetMemInfo", 1, &raw mut free, &raw mut total);
    assert_eq!(free, 56 << 20);
    says!(a, 207_001, "aclrtMalloc", &raw mut at, 57 << 20, 0);
    says!(a, 0, "aclrtFree", memory);
    // On the device itself host memory is part of it.
    made!(a, "aclrtMallocHost", 4096);
    assert_eq!(made!(a, "aclrtMalloc", 256 << 20, 0) % 64, 0);
    a.broken(&[]);
}

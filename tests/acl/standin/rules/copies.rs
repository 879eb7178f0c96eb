//! Copies and fills.

use crate::support::doubles::ascendcl::says;

/// Memory that is not page-locked, at a multiple of 64.
#[repr(C, align(64))]
struct Pageable([u8; 64]);

rules! {
    COPIES:

    cpy_1_only_ways_there_are (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(64), a.host(256));
        says!(a, 100_000, "aclrtMemcpyAsync", memory, 64, host.at, 64, 8, stream);
        says!(a, 100_000, "aclrtMemcpy", memory, 64, host.at, 64, -1_i32);
        a.broken(&["CPY-1", "CPY-1"]);
        // The library finds out the kind by itself.
        says!(a, 0, "aclrtMemcpyAsync", memory, 64, host.at, 64, 4, stream);
        a.broken(&["CPY-1", "CPY-1"]);
    }

    cpy_2_the_way_fits_the_memory (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(64), a.host(256));
        assert_eq!(a.upload(host.at, memory, 64, stream), 107_000);
        assert_eq!(a.download(memory, host.at, 64, stream), 107_000);
        says!(a, 107_000, "aclrtMemcpyAsync", memory, 64, host.at, 64, 3, stream);
        says!(a, 107_000, "aclrtMemcpy", memory, 64, host.at, 64, 0);
        a.broken(&["CPY-2"; 4]);
    }

    cpy_3_no_asynchronous_copies_within_the_host (ready) |a| {
        let (stream, host) = (a.stream(), a.host(256));
        says!(a, 207_000, "aclrtMemcpyAsync", host.at, 64, host.at + 128, 64, 0, stream);
        says!(a, 207_000, "aclrtMemcpyAsync", host.at, 64, host.at + 128, 64, 4, stream);
        a.broken(&["CPY-3", "CPY-3"]);
        says!(a, 0, "aclrtMemcpy", host.at, 64, host.at + 128, 64, 0);
        a.broken(&["CPY-3", "CPY-3"]);
    }

    cpy_4_pageable_memory_is_silently_wrong (ready) |a| {
        let (stream, memory) = (a.stream(), a.memory(64));
        let (from, mut to) = (Pageable([1; 64]), Pageable([2; 64]));
        assert_eq!(a.upload(memory, from.0.as_ptr() as usize, 64, stream), 0);
        assert_eq!(a.download(to.0.as_mut_ptr() as usize, memory, 64, stream), 0);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert_eq!(a.read(memory, 64), [0xDB; 64]);
        assert_eq!(to.0, [2; 64]);
        says!(a, 0, "aclrtMemsetAsync", to.0.as_mut_ptr(), 64, 3, 64, stream);
        a.broken(&["CPY-4"; 3]);
        // A blocking copy may use any memory, and so may a call that checks the memory first.
        says!(a, 0, "aclrtMemcpyAsyncWithCondition", memory, 64, from.0.as_ptr(), 64, 1, stream);
        assert_eq!(a.read(memory, 64), [1; 64]);
        says!(a, 0, "aclrtMemset", memory, 64, 0, 64);
        says!(a, 0, "aclrtMemcpy", memory, 64, from.0.as_ptr(), 64, 1);
        assert_eq!(a.read(memory, 64), [1; 64]);
        a.broken(&["CPY-4"; 3]);
    }

    cpy_5_both_sides_on_a_multiple_of_64 (ready) |a| {
        let (stream, memory, mut host) = (a.stream(), a.memory(256), a.host(512));
        host[64..128].fill(4);
        assert_eq!(a.upload(memory + 64, host.at + 64, 64, stream), 0);
        a.broken(&[]);
        assert_eq!(a.upload(memory, host.at + 32, 64, stream), 0);
        assert_eq!(a.upload(memory + 1, host.at, 64, stream), 0);
        assert_eq!(a.download(host.at + 8, memory + 8, 64, stream), 0);
        a.broken(&["CPY-5"; 4]);
        // Lengths are free.
        assert_eq!(a.upload(memory, host.at, 33, stream), 0);
        says!(a, 0, "aclrtMemcpy", memory + 1, 3, host.at + 65, 3, 1);
    }

    cpy_6_what_is_queued_has_no_order_with_what_is_done_at_once (ready) |a| {
        let (stream, memory, mut host) = (a.stream(), a.memory(64), a.host(256));
        host.fill(6);
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        assert_eq!(a.read(memory, 64), [0xA5; 64]);
        says!(a, 0, "aclrtMemset", host.at, 64, 7, 64);
        a.broken(&["CPY-6", "CPY-6"]);
        // Reading read-only memory, too, is in no copy's way.
        says!(a, 0, "aclrtMemcpy", host.at + 128, 64, host.at, 64, 0);
        a.broken(&["CPY-6", "CPY-6"]);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert_eq!(a.read(memory, 64), [7; 64]);
        a.broken(&["CPY-6", "CPY-6"]);
    }

    cpy_7_the_address_that_devices_have_of_it_is_not_copied_from (ready) |a| {
        let (stream, memory) = (a.stream(), a.memory(64));
        let mut pages = super::host::pages(1);
        let mut mapped = 0_usize;
        says!(a, 0, "aclrtHostRegister", pages.as_mut_ptr(), 4096, 0, &raw mut mapped);
        assert_eq!(a.upload(memory, mapped, 64, stream), 107_000);
        a.broken(&["CPY-7"]);
        assert_eq!(a.upload(memory, pages.as_ptr() as usize, 64, stream), 0);
        a.broken(&["CPY-7"]);
    }

    seg_1_parts_of_a_block_end_before_its_end (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(512), a.host(512));
        // All of it, and parts that leave enough.
        assert_eq!(a.upload(memory, host.at, 512, stream), 0);
        assert_eq!(a.upload(memory, host.at + 256, 224, stream), 0);
        assert_eq!(a.upload(memory, host.at + 256, 193, stream), 0);
        a.broken(&[]);
        assert_eq!(a.upload(memory, host.at + 256, 225, stream), 0);
        assert_eq!(a.upload(memory, host.at + 256, 256, stream), 0);
        assert_eq!(a.download(host.at + 448, memory, 64, stream), 0);
        a.broken(&["SEG-1"; 3]);
        // What was registered is not divided by the library's rules.
        let mut pages = super::host::pages(1);
        says!(a, 0, "aclrtHostRegisterV2", pages.as_mut_ptr(), 4096, 0x1000_0000);
        assert_eq!(a.upload(memory, pages.as_ptr() as usize + 4032, 64, stream), 0);
        a.broken(&["SEG-1"; 3]);
    }

    seg_2_segments_keep_their_distance (ready) |a| {
        let (stream, memory, host) = (a.stream(), a.memory(512), a.host(1024));
        // Parts of one segment may touch each other.
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        assert_eq!(a.upload(memory, host.at + 64, 64, stream), 0);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        a.broken(&[]);
        a.copy_whole_segments(true);
        // 64 bytes span 96, and the next begin on a multiple of 64.
        assert_eq!(a.upload(memory, host.at, 64, stream), 0);
        assert_eq!(a.upload(memory, host.at + 128, 33, stream), 0);
        assert_eq!(a.upload(memory, host.at + 256, 64, stream), 0);
        // From one segment more than once.
        assert_eq!(a.upload(memory, host.at + 256, 64, stream), 0);
        a.broken(&[]);
        assert_eq!(a.upload(memory, host.at + 64, 1, stream), 0);
        a.broken(&["SEG-2"]);
        says!(a, 0, "aclrtSynchronizeStream", stream);
        assert_eq!(a.upload(memory, host.at + 256, 64, stream), 0);
        assert_eq!(a.upload(memory, host.at + 192, 64, stream), 0);
        a.broken(&["SEG-2", "SEG-2"]);
    }
}

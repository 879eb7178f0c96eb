//! Rules of the stand-in about memory of the host's.

use crate::standin::probe::PAGE;

rules! {
    HOST:

    hst_1_host_memory_is_freed_from_its_start_and_once (ready) |d| {
        let (locked, managed) = (made!(d, "cuMemHostAlloc", PAGE, 0), made!(d, "cuMemAllocManaged", PAGE, 1));
        for wrong in [locked + 64, managed, locked + PAGE] {
            says!(d, 1, "cuMemFreeHost", wrong);
        }
        says!(d, 0, "cuMemFreeHost", locked);
        says!(d, 1, "cuMemFreeHost", locked);
        d.broken(&["HST-1"; 4]);
        says!(d, 0, "cuMemFree_v2", managed);
        says!(d, 1, "cuMemFree_v2", managed);
        assert_eq!(made!(d, "cuMemHostAlloc", 0, 0), 0, "nothing, and no error");
        let mut at = 0_usize;
        says!(d, 1, "cuMemAllocManaged", &raw mut at, 0, 1);
    }

    hst_2_host_memory_freed_too_early (ready) |d| {
        let (stream, memory) = (d.stream(), d.memory(PAGE));
        let locked = made!(d, "cuMemHostAlloc", PAGE, 1);
        says!(d, 0, "cuMemcpyHtoDAsync_v2", memory, locked, PAGE, stream);
        says!(d, 0, "cuMemFreeHost", locked);
        let managed = made!(d, "cuMemAllocManaged", PAGE, 1);
        says!(d, 0, "cuMemcpyHtoDAsync_v2", memory, managed, PAGE, stream);
        says!(d, 0, "cuMemFree_v2", managed);
        d.broken(&["HST-2", "HST-2"]);
        // They ran first.
        let mut back = vec![0; PAGE];
        d.downloads(0, &mut back, memory, stream);
        says!(d, 0, "cuStreamSynchronize", stream);
        // New memory is filled with that.
        assert!(!d.is_stand_in() || back == [0xA5; PAGE]);
    }

    hst_3_the_drivers_own_memory_is_not_registered (ready) |d| {
        let (locked, managed) = (made!(d, "cuMemHostAlloc", PAGE, 7), made!(d, "cuMemAllocManaged", PAGE, 1));
        says!(d, 1, "cuMemHostRegister_v2", locked, PAGE, 1);
        says!(d, 1, "cuMemHostRegister_v2", managed + 100, 10, 1);
        d.broken(&["HST-3", "HST-3"]);
        says!(d, 1, "cuMemHostUnregister", locked);
    }

    hst_4_only_known_host_memory_has_an_address_on_the_device (ready) |d| {
        let mut bytes = d.pages(2, 0);
        d.registers(0, &mut bytes[100..200]);
        let (start, host) = (bytes.as_ptr() as usize, made!(d, "cuMemHostAlloc", PAGE, 0));
        let (managed, mut address) = (made!(d, "cuMemAllocManaged", PAGE, 1), 0_usize);
        for at in [start + 100, start + 199, host, host + PAGE - 1] {
            says!(d, 0, "cuMemHostGetDevicePointer_v2", &raw mut address, at, 0);
            assert_eq!(address, at);
        }
        for at in [start + 99, start + 200, managed, d.memory(64)] {
            says!(d, 1, "cuMemHostGetDevicePointer_v2", &raw mut address, at, 0);
        }
        d.broken(&["HST-4"; 4]);
        if !d.is_stand_in() {
            return;
        }
        d.stand_in.attribute(19, 0);
        says!(d, 1, "cuMemHostGetDevicePointer_v2", &raw mut address, host, 0);
        d.broken(&["HST-4"; 4]);
    }

    hst_5_memory_that_is_registered_is_mapped (ready) |d| {
        let map = memmap2::MmapMut::map_anon(4 * PAGE).unwrap();
        let start = map.as_ptr() as usize;
        let map = map.make_read_only().unwrap();
        says!(d, 1, "cuMemHostRegister_v2", start, PAGE, 1);
        says!(d, 0, "cuMemHostRegister_v2", start, PAGE, 9);
        says!(d, 0, "cuMemHostUnregister", start);
        drop(map);
        says!(d, 1, "cuMemHostRegister_v2", PAGE, PAGE, 9);
        // On a machine that is moved by hand as well.
        if d.is_stand_in() {
            d.stand_in.command("by-hand 1");
        }
        says!(d, 1, "cuMemHostRegister_v2", PAGE, PAGE, 0);
        d.broken(&["HST-5"; 3]);
    }

    hst_6_what_is_only_read_is_not_written_to (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(PAGE), d.pages(1, 0));
        says!(d, 0, "cuMemHostRegister_v2", bytes.as_mut_ptr(), PAGE, 9);
        d.uploads(0, memory, &bytes, stream);
        d.downloads(1, &mut bytes, memory, stream);
        d.broken(&["HST-6"]);
        says!(d, 0, "cuStreamSynchronize", stream);
        says!(d, 0, "cuMemHostUnregister", bytes.as_ptr());
        d.registers(0, &mut bytes);
        d.downloads(0, &mut bytes, memory, stream);
        says!(d, 0, "cuStreamSynchronize", stream);
    }

    hst_7_flags_that_do_not_exist (ready) |d| {
        let (mut at, bytes) = (0_usize, vec![0_u8; 64]);
        says!(d, 1, "cuMemHostRegister_v2", bytes.as_ptr(), 64, 64);
        says!(d, 1, "cuMemHostAlloc", &raw mut at, PAGE, 8);
        says!(d, 1, "cuMemAllocManaged", &raw mut at, PAGE, 0);
        d.broken(&["HST-7", "HST-7", "HST-7"]);
    }

    hst_8_only_read_where_the_device_can (ready) |d| {
        let mut bytes = d.pages(1, 0);
        let mut value = 7_i32;
        says!(d, 0, "cuDeviceGetAttribute", &raw mut value, 113, 0);
        assert!(!d.is_stand_in() || value == 1);
        says!(d, 1, "cuDeviceGetAttribute", &raw mut value, 99_999, 0);
        says!(d, 101, "cuDeviceGetAttribute", &raw mut value, 113, 99);
        if !d.is_stand_in() {
            return;
        }
        d.stand_in.attribute(113, 0);
        says!(d, 801, "cuMemHostRegister_v2", bytes.as_ptr(), 64, 9);
        d.broken(&["HST-8"]);
        d.registers(0, &mut bytes);
    }

    hst_9_managed_memory_where_the_host_may_use_it (ready) |d| {
        let managed = made!(d, "cuMemAllocManaged", PAGE, 1);
        says!(d, 0, "cuMemFree_v2", managed);
        if !d.is_stand_in() {
            return;
        }
        d.stand_in.attribute(89, 0);
        made!(d, "cuMemAllocManaged", PAGE, 1);
        d.broken(&["HST-9"]);
    }
}

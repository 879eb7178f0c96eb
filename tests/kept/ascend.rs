//! What only Ascend has, on each library and in both run modes: on a host (EP) and on the device itself (RC).

use pinpool::acl;

use super::*;

/// Whether the program runs on the device itself.
fn is_rc(on: &On) -> bool {
    on.stand_in().is_some_and(|stand_in| stand_in.is("rc true"))
}

#[test]
fn aclrt_malloc_host_is_the_backing_in_both_modes() {
    on_each_npu(|on| {
        assert_eq!(acl::about(&on.device).unwrap().on_device, is_rc(on));
        let stream = on.stream();
        let asked = || on.calls("aclrtMallocHost");
        for explicit in [false, true] {
            let (before, freed) = (asked(), on.calls("aclrtFreeHost"));
            let sizes = Pool::builder(&on.device).capacity(256 << 10).region(256 << 10).extent(128 << 10);
            let builder = match explicit {
                true => sizes.backing(Backing::HostAlloc(HostAllocFlags::default())),
                false => sizes,
            };
            let pool = builder.build().unwrap();
            pool.wait_pinned(Some(HANG)).unwrap();
            assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (256 << 10, 0));
            assert!(asked() - before >= 2, "a block for each extent");
            assert!(filled(&pool, b"pinned").is_pinned());
            round_trip(&pool, &stream, &bytes(1, 100_000));
            assert!(pool.shutdown(HANG).drained);
            drop(pool);
            until("both blocks are freed", || on.calls("aclrtFreeHost") - freed >= 2);
        }
        assert_eq!(on.calls("aclrtHostRegister") + on.calls("aclrtHostRegisterV2"), 0);
    });
}

#[test]
fn zeros_are_written_by_aclrt_memset_on_the_device() {
    on_each_npu(|on| {
        let pool = on.pool(256 << 10);
        for len in [1, 31, 4096, 100_001] {
            drop(filled(&pool, &vec![0xEE; len]));
            let before = on.calls("aclrtMemset");
            assert!(*pool.checkout_zeroed(len).unwrap() == *vec![0; len]);
            // On a host the CPU writes them.
            assert_eq!(on.calls("aclrtMemset") - before, u64::from(is_rc(on)));
        }
    });
}

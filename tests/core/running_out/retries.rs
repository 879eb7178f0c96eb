//! Pinning that is refused for a while, or as long as it is asked for too much: who waits is served all the same, and
//! what went unpinned is pinned later.

use super::*;

/// A pool with a region of 16 pages, of which 12 are held for good, and room for three more regions.
fn held(rig: &Rig) -> (Pool, PinnedBuf) {
    let pool = rig.builder(64 * PAGE).region(16 * PAGE).initial(16 * PAGE).build().unwrap();
    let tier = pool.checkout(pages(12)).unwrap();
    (pool, tier)
}

/// There is no room to grow for who came first, so what was refused is tried again for who can be served.
#[test]
fn a_refusal_strands_nobody_behind_one_that_growing_cannot_serve() {
    let one = vec![pages(8)];
    let two = vec![pages(4); 2];
    for (capacity, refusals, request) in
        [(26, 1, &one), (26, 4, &one), (30, 1, &one), (30, 4, &one), (26, 0, &two), (26, 1, &two)]
    {
        let rig = Rig::threads();
        let pool = rig.builder(capacity * PAGE).region(16 * PAGE).initial(16 * PAGE).build().unwrap();
        let tier = pool.checkout(pages(12)).unwrap();
        let mut first = Waiter::new(pool.checkout_async(pages(16)));
        rig.refuse_pins(refusals);
        let bufs = match &request[..] {
            [one] => vec![pool.checkout_timeout(*one, HANG).unwrap()],
            several => pool.checkout_many(several, Some(HANG)).unwrap(),
        };
        first.still_waits();
        drop((bufs, tier));
        drop((first.ready().unwrap(), pool));
        rig.all_is_given_back();
    }
}

#[test]
fn a_timeout_says_why_growing_failed_and_what_there_was() {
    let rig = Rig::threads();
    let (pool, tier) = held(&rig);
    rig.refuse_pins(10_000);
    let timeout = Duration::from_millis(60);
    let waiting = Waiter::new(pool.checkout_async(pages(13)));
    for error in [
        pool.checkout_timeout(pages(12), timeout).unwrap_err(),
        pool.checkout_many(&[pages(6), pages(6)], Some(timeout)).unwrap_err(),
        block_on(pool.checkout_async(pages(12)).timeout(timeout)).unwrap_err(),
    ] {
        let Error::Timeout(waited) = &error else { panic!("{error}") };
        let shortage = waited.shortage.as_ref().unwrap();
        assert_eq!((shortage.capacity, shortage.waiting), (64 * PAGE, 1));
        assert!(
            matches!(shortage.growth.as_deref(), Some(Error::Device(e)) if e.call == "pin"),
            "{shortage:?}"
        );
        let text = error.to_string();
        for part in
            ["capacity 256 KiB", "1 other request waits", "growing failed: host:0: pin", "raise the capacity"]
        {
            assert!(text.contains(part), "{part:?} is missing: {text}");
        }
    }
    drop((tier, waiting));
}

#[test]
fn memory_that_went_unpinned_is_pinned_later_unless_it_never_can_be() {
    let rig = Rig::threads();
    let builder = rig.builder(64 * PAGE).region(16 * PAGE).extent(8 * PAGE).initial(16 * PAGE);
    rig.refuse_pins(3);
    let pool = builder.unpinned(Unpinned::Allow).build().unwrap();
    pool.wait_pinned(Some(HANG)).unwrap();
    // A buffer may be out meanwhile.
    let mut buf = pool.checkout(pages(8)).unwrap();
    buf.extend_from_slice(&[7; 5000]);
    until(|| pool.stats().unpinned_bytes == 0, || format!("{pool:?}"));
    assert!(buf.is_pinned() && *buf == [7; 5000]);
    assert_eq!(checked(&pool).pinned_bytes, 16 * PAGE);
    rig.refuse_pins(1);
    pool.adopt(vec![0_u8; 17 * PAGE]).map_err(|refused| refused.error).unwrap();
    until(|| pool.stats().unpinned_bytes == 0, || format!("{pool:?}"));
    assert!(pool.regions().iter().all(|region| region.pinned == region.len), "{:?}", pool.regions());
    let pinned = checked(&pool).pinned_bytes;
    assert_eq!(rig.node.live(0).pinned_bytes, pinned);
    drop((buf, pool));
    // Both extents are refused before the memory is adopted, and then the first of them for good.
    let builder = rig.builder(16 * PAGE).initial(0).extent(8 * PAGE);
    let pool = builder.unpinned(Unpinned::Allow).build().unwrap();
    rig.refuse_pins(2);
    rig.node.fail(Fault { device: 0, call: Call::Pin, nth: 0, failure: Failure::Argument });
    let info = pool.adopt(memmap2::MmapMut::map_anon(16 * PAGE).unwrap()).unwrap();
    assert_eq!((info.len, info.pinned), (16 * PAGE, 0));
    until(|| pool.stats().pinned_bytes == 8 * PAGE, || format!("{pool:?}"));
    std::thread::sleep(Duration::from_millis(300));
    let stats = checked(&pool);
    assert_eq!((stats.pinned_bytes, stats.unpinned_bytes), (8 * PAGE, 8 * PAGE), "{stats:?}");
    assert_eq!(pool.trim(0), 16 * PAGE);
    drop(pool);
    rig.all_is_given_back();
}

//! One pool for GPUs on several NUMA nodes, on the stand-in driver: each node has regions of its own, and a request
//! comes from the node of the device that it names.

#![cfg(all(feature = "cuda", target_os = "linux"))]

use pinpool::{Backing, Device, Error, HostAllocFlags, Pool, PoolBuilder, RegisterError, Request};

use crate::support::doubles::gpu::until;
use crate::support::doubles::{self, HANG, StandIn};

const MIB: usize = 1 << 20;

/// Runs the body in a child, on a stand-in whose two GPUs are on these nodes.
fn on_nodes(test: &str, nodes: &str, body: impl FnOnce(&StandIn)) {
    if !doubles::is_set() {
        return doubles::again(test, &[("PINPOOL_STANDIN_NUMA", nodes)]);
    }
    if let Some(stand_in) = StandIn::of_this_process() {
        body(&stand_in);
        let report = stand_in.final_report();
        assert_eq!((report.violations, report.leaks), (vec![], vec![]));
    }
}

fn both() -> (Device, Device) {
    (Device::open("cuda:0").unwrap(), Device::open("cuda:1").unwrap())
}

fn builder(first: &Device, second: &Device) -> PoolBuilder {
    Pool::builder(first).device(second).capacity(8 * MIB).region(MIB).extent(MIB / 2).thread_cache(64 << 10)
}

/// The node of the region that an address lies in.
fn node_of(pool: &Pool, address: *const u8) -> Option<u32> {
    let address = address.addr();
    let within = |base: usize, len: usize| (base..base + len).contains(&address);
    let regions = pool.regions();
    regions.iter().find(|r| within(r.base.as_ptr().addr(), r.len)).expect("in a region").node
}

#[test]
fn each_device_is_fed_from_its_own_node() {
    on_nodes("each_device_is_fed_from_its_own_node", "0,1", |_| {
        let (first, second) = both();
        let pool = builder(&first, &second).build().unwrap();
        assert_eq!(pool.stats().capacity_bytes, 8 * MIB);
        let mut kept = Vec::new();
        for len in [1, 5_000, 300_000, 500_000] {
            for (device, node) in [(&first, 0), (&second, 1)] {
                // Twice: the second time it is a hit.
                for _ in 0..2 {
                    let mut buf = pool.checkout(Request::new(len).near(device)).unwrap();
                    assert_eq!(node_of(&pool, buf.as_ptr()), Some(node), "{len} near {}", device.name());
                    buf.try_resize(len, 3).unwrap();
                    // Near or not, every device can use it.
                    let stream = second.stream().unwrap();
                    let memory = second.alloc(len).unwrap();
                    drop(stream.upload(buf, &memory).unwrap().wait().unwrap());
                    let landing = pool.checkout_on(&stream, len).unwrap();
                    let back = stream.download(&memory, landing).unwrap().wait().unwrap();
                    assert_eq!(node_of(&pool, back.as_ptr()), Some(1), "near the stream's device");
                    assert!(back.iter().all(|b| *b == 3));
                }
                kept.push(pool.checkout(Request::new(len).near(device)).unwrap());
            }
            assert_eq!(node_of(&pool, pool.checkout(len).unwrap().as_ptr()), Some(0), "the first by default");
        }
        pool.check().unwrap();
        drop(kept);
        let pinned = pool.stats().pinned_bytes;
        assert_eq!(pool.pinning().ready, pinned);
        assert_eq!(pool.trim(0), pinned, "on all nodes");
        assert!(pool.shutdown(HANG).drained);
    });
}

#[test]
fn a_node_that_is_used_up_leaves_the_others_alone() {
    on_nodes("a_node_that_is_used_up_leaves_the_others_alone", "1,0", |_| {
        let (first, second) = both();
        let pool = builder(&first, &second).build().unwrap();
        let request = Request::new(200_000).near(&second);
        // Half of the capacity: two in each extent.
        let mut held: Vec<_> = (0..16).map(|_| pool.checkout_timeout(request, HANG).unwrap()).collect();
        assert!(matches!(pool.try_checkout(request), Err(Error::Exhausted { .. })));
        assert_eq!(pool.wait_pinned(Some(HANG)).unwrap().ready, 5 * MIB);
        drop(pool.try_checkout(200_000).unwrap());
        drop(pool.try_checkout(Request::new(200_000).near(&first)).unwrap());
        // A waiter is served by what returns on that node.
        let waiting = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| pool.checkout_timeout(request, HANG).unwrap());
            while pool.stats().waiting == 0 {
                std::thread::yield_now();
            }
            drop(pool.checkout(200_000).unwrap());
            assert_eq!(pool.stats().waiting, 1, "another node's does not help");
            drop(held.pop());
            waiting.join().unwrap()
        });
        assert_eq!(node_of(&pool, waiting.as_ptr()), Some(0));
    });
}

#[test]
fn devices_on_one_node_or_on_none_share_everything() {
    for (nodes, expected) in [("0,0", Some(0)), ("-1,-1", None), ("0,-1", Some(0))] {
        on_nodes("devices_on_one_node_or_on_none_share_everything", nodes, |_| {
            let Ok(nodes) = std::env::var("PINPOOL_STANDIN_NUMA") else { return };
            let expected = if nodes.starts_with("-1") { None } else { expected.or(Some(0)) };
            let (first, second) = both();
            let pool = builder(&first, &second).build().unwrap();
            let a = pool.checkout(Request::new(100).near(&first)).unwrap();
            let b = pool.checkout(Request::new(100).near(&second)).unwrap();
            assert_eq!(node_of(&pool, a.as_ptr()), expected);
            assert_eq!(node_of(&pool, b.as_ptr()), expected);
            assert_eq!(pool.regions().len(), 1);
        });
        if doubles::is_set() {
            return;
        }
    }
}

#[test]
fn what_cannot_be_near_is_refused() {
    on_nodes("what_cannot_be_near_is_refused", "0,1", |_| {
        let (first, second) = both();
        let alone = Pool::builder(&first).capacity(MIB).build().unwrap();
        let error = alone.checkout(Request::new(100).near(&second)).unwrap_err();
        assert!(matches!(&error, Error::WrongDevice { device, .. } if device == "cuda:1"), "{error}");
        let pool = builder(&first, &second).reserve("urgent", 64 << 10).build().unwrap();
        let mixed = [Request::new(100).near(&first), Request::new(100).near(&second)];
        assert!(matches!(pool.checkout_many(&mixed, None), Err(Error::Config(_))));
        assert_eq!(pool.checkout_many(&[mixed[1]; 3], None).unwrap().len(), 3);
        // A reserve has one place.
        let buf = pool.checkout(Request::new(40_000).near(&second).reserve("urgent")).unwrap();
        assert_eq!(node_of(&pool, buf.as_ptr()), Some(0));
        drop(buf);
        let less = Pool::builder(&first).device(&second).capacity(4096).build().unwrap_err();
        assert!(less.to_string().contains("2 NUMA nodes"), "{less}");
    });
}

#[test]
fn a_pool_grows_for_the_living_when_the_first_device_is_dead() {
    for nodes in ["0,0", "0,1"] {
        on_nodes("a_pool_grows_for_the_living_when_the_first_device_is_dead", nodes, |d| {
            for (backing, known) in [
                (Backing::Registered, true),
                (Backing::Registered, false),
                (Backing::HostAlloc(HostAllocFlags::default()), false),
            ] {
                let (first, second) = both();
                let capacity = 32 * MIB;
                let pool = builder(&first, &second).capacity(capacity).region(2 * MIB).backing(backing);
                let pool = pool.build().unwrap();
                let before = pool.wait_pinned(Some(HANG)).unwrap().ready;
                d.kill(0, 700);
                // Otherwise growing finds it out.
                assert!(!known || first.alloc(1).unwrap_err().is_device_lost());
                let held: Vec<_> = (0..8).map(|_| pool.checkout_timeout(400_000, HANG).unwrap()).collect();
                let pinning = pool.wait_pinned(Some(HANG)).unwrap();
                assert_eq!((pinning.error, pinning.wanted), (None, pinning.ready));
                assert!(pinning.ready > before && first.lost().is_some());
                let (stream, target) = (second.stream().unwrap(), second.alloc(400_000).unwrap());
                for mut buf in held {
                    buf.try_resize(400_000, 7).unwrap();
                    drop(stream.upload(buf, &target).unwrap().wait().unwrap());
                }
                let adopted = pool.adopt(vec![0_u8; 3 * MIB]).map_err(|e| e.error).unwrap().len;
                pool.check().unwrap();
                // What the living device has pinned is given back, and so is what the dead one had (which it cannot
                // undo).
                assert_eq!((pool.trim(0), pool.pinning().ready), (pinning.ready + adopted, 0));
                assert!(pool.shutdown(HANG).drained);
                drop((pool, stream, target, first, second));
                d.final_report();
                d.reset();
            }
        });
        if doubles::is_set() {
            return;
        }
    }
}

/// Growing, adopting, trimming, several requests at once and futures that are dropped, on both nodes at the same time.
#[test]
fn nodes_are_used_from_many_threads() {
    on_nodes("nodes_are_used_from_many_threads", "0,1", |_| {
        let (first, second) = both();
        let pool = builder(&first, &second).capacity(4 * MIB).initial(0).reserve("urgent", 256 << 10);
        let pool = pool.build().unwrap();
        let devices = [&first, &second];
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..150_usize {
                        let near = devices[(thread + round) % 2];
                        let len = [100, 5_000, 60_000, 200_000][(thread * 7 + round) % 4];
                        let request = Request::new(len).near(near);
                        match round % 6 {
                            0 => drop(pool.checkout_many(&[request; 2], Some(HANG)).unwrap()),
                            1 => drop(pool.checkout_async(request)),
                            2 => {
                                pool.trim(round * 4096);
                            }
                            3 => match pool.adopt(vec![7; 64 << 10]) {
                                Ok(_) | Err(RegisterError { error: Error::OverCapacity { .. }, .. }) => {}
                                Err(other) => panic!("{other}"),
                            },
                            4 => drop(
                                pool.checkout_timeout(Request::new(len).reserve("urgent"), HANG).unwrap(),
                            ),
                            _ => {
                                let stream = near.stream().unwrap();
                                let memory = near.alloc(len).unwrap();
                                let mut buf = pool.checkout_timeout(request, HANG).unwrap();
                                buf.try_resize(len, thread as u8).unwrap();
                                drop(stream.upload(buf, &memory).unwrap());
                                let landing = pool.checkout_on(&stream, len).unwrap();
                                let back = stream.download(&memory, landing).unwrap().wait().unwrap();
                                assert!(back.iter().all(|b| *b == thread as u8));
                            }
                        }
                        let (stats, pinning) = (pool.stats(), pool.pinning());
                        assert!(stats.pinned_bytes <= stats.capacity_bytes, "{stats:?}");
                        assert!(pinning.ready <= pinning.wanted && pinning.error.is_none(), "{pinning:?}");
                    }
                });
            }
        });
        let pinning = pool.wait_pinned(Some(HANG)).unwrap();
        assert_eq!(pinning.wanted, pinning.ready);
        pool.check().unwrap();
        // The reaper may still be giving back what a thread saw complete.
        until("nothing is in flight", || pool.stats().in_flight_bytes == 0);
        // The regions of the reserve stay.
        assert_eq!((pool.trim(0), pool.pinning().wanted), (pinning.ready, 0));
        assert_eq!(pool.stats().pinned_bytes, 256 << 10);
        assert!(pool.shutdown(HANG).drained);
    });
}

#[test]
fn what_a_pool_starts_with_is_shared_out_and_not_rounded_away() {
    on_nodes("what_a_pool_starts_with_is_shared_out_and_not_rounded_away", "0,1", |_| {
        let (first, second) = both();
        for (capacity, initial, expected) in [
            (8 * MIB, 0, 0),
            // A page is the least, and each node has one.
            (8 * MIB, 64 << 10, 64 << 10),
            (128 << 10, 64 << 10, 64 << 10),
            (8 * MIB, 8 * MIB, 8 * MIB),
            (8 * MIB, 4096, 8192),
            (5 * 4096, 5 * 4096, 4 * 4096),
        ] {
            let pool = builder(&first, &second).capacity(capacity).initial(initial).build().unwrap();
            pool.wait_pinned(Some(HANG)).unwrap();
            assert_eq!(pool.stats().pinned_bytes, expected, "{initial} of {capacity}");
        }
        let more = builder(&first, &second).capacity(8 * MIB).initial(8 * MIB + 4096).build().unwrap_err();
        let told = "are 4 KiB more than the capacity of 8 MiB";
        assert!(matches!(&more, Error::Config(text) if text.contains(told)), "{more}");
    });
}

#[test]
fn memory_is_adopted_by_the_living_when_adopting_finds_the_first_one_dead() {
    on_nodes("memory_is_adopted_by_the_living_when_adopting_finds_the_first_one_dead", "0,0", |d| {
        let (first, second) = both();
        let pool = builder(&first, &second).initial(0).build().unwrap();
        d.kill(0, 700);
        let adopted = pool.adopt(vec![0_u8; MIB]).map_err(|e| e.error).unwrap();
        assert!(first.lost().is_some() && adopted.pinned == adopted.len);
        assert_eq!((pool.pinning().wanted, pool.trim(0)), (adopted.len, adopted.len));
        // The worker has unpinned it when it has done a later call.
        second.register(vec![0; 1]).map_err(|e| e.error).unwrap().into_inner().unwrap();
        // Where all devices are dead, the caller is told, and gets the memory back.
        d.kill(1, 700);
        let refused = pool.adopt(vec![0_u8; MIB]).unwrap_err();
        assert!(refused.error.is_device_lost() && refused.memory.is_some_and(|m| m.len() == MIB));
        assert_eq!(pool.pinning().wanted, 0);
    });
}

/// The device that pins dies while many requests wait for what it was to pin.
#[test]
fn nobody_who_waits_notices_that_another_device_pins() {
    on_nodes("nobody_who_waits_notices_that_another_device_pins", "0,0", |d| {
        for backing in [Backing::Registered, Backing::HostAlloc(HostAllocFlags::default())] {
            for round in 0..10 {
                let (first, second) = both();
                let builder = builder(&first, &second).capacity(24 * MIB).initial(0).backing(backing);
                let pool = builder.region(2 * MIB).build().unwrap();
                let got = std::thread::scope(|scope| {
                    let threads = [0; 4].map(|_| {
                        scope.spawn(|| {
                            let get = |_| pool.checkout_timeout(400_000, HANG).unwrap();
                            (0..5).map(get).collect::<Vec<_>>()
                        })
                    });
                    while pool.stats().checkouts < round {
                        std::thread::yield_now();
                    }
                    d.kill(0, 700);
                    threads.map(|thread| thread.join().unwrap())
                });
                let pinning = pool.wait_pinned(Some(HANG)).unwrap();
                assert_eq!((pinning.wanted, pinning.error), (pinning.ready, None));
                assert_eq!(pool.stats().pinned_bytes, pinning.ready);
                pool.check().unwrap();
                drop(got);
                drop((pool, first, second));
                d.final_report();
                d.reset();
            }
        }
    });
}

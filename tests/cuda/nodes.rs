//! Pools for GPUs on several NUMA nodes, on the stand-in driver: the node that a pool lies on, a pool for
//! each node, and a pool that goes on with another GPU when its first one dies. (`core/regressions.rs` has
//! the same on host devices.)

use pinpool::{Backing, Device, Error, HostAllocFlags, Pool, PoolBuilder};

use crate::rig::{self, both, is_clean};
use crate::support::doubles::{self, HANG, StandIn};

const MIB: usize = 1 << 20;

/// Runs the body on two simulated GPUs that are on these nodes.
fn on_nodes(nodes: [i32; 2], body: impl FnOnce(&StandIn)) {
    doubles::on_stand_in(|stand_in| {
        for (device, node) in nodes.into_iter().enumerate() {
            stand_in.command(&format!("setup node {device} {node}"));
        }
        body(stand_in);
        is_clean(stand_in);
    });
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
fn a_pool_lies_on_the_node_that_is_named_or_that_of_its_first_device() {
    for nodes in [[0, 1], [-1, -1], [0, -1], [1, 0], [-1, 1]] {
        on_nodes(nodes, |_| {
            let (first, second) = both();
            let own = u32::try_from(nodes[0]).ok();
            for (named, expected) in [(None, own), (Some(0), Some(0)), (Some(1), Some(1))] {
                let builder = builder(&first, &second);
                let pool = named.into_iter().fold(builder, PoolBuilder::numa_node).build().unwrap();
                // Whichever device they are for, what the pool starts with, a hit, and what it grows by.
                let mut held = Vec::new();
                for device in [&first, &second] {
                    rig::round_trip(&pool, &device.stream().unwrap(), &device.alloc(5000).unwrap(), 1);
                    held.extend((0..6).map(|_| pool.checkout_timeout(400_000, HANG).unwrap()));
                }
                held.push(pool.checkout(100).unwrap());
                for buf in &held {
                    assert_eq!(node_of(&pool, buf.as_ptr()), expected, "{nodes:?} {named:?}");
                }
                // Where an adopted region lies is the program's choice.
                assert_eq!(pool.adopt(vec![0; 64 << 10]).map_err(|e| e.error).unwrap().node, None);
            }
            // From a node that there is not pages come from elsewhere, and the pool works.
            let pool = builder(&first, &second).numa_node(999).build().unwrap();
            assert!(pool.checkout(300_000).unwrap().is_pinned());
        });
    }
}

#[test]
fn what_a_pool_starts_with_is_not_rounded_away() {
    on_nodes([0, 1], |_| {
        let (first, second) = both();
        let small = |capacity, initial| builder(&first, &second).capacity(capacity).initial(initial).build();
        for (capacity, initial) in
            [(8 * MIB, 0), (128 << 10, 64 << 10), (8 * MIB, 8 * MIB), (5 * 4096, 5 * 4096)]
        {
            let pool = small(capacity, initial).unwrap();
            pool.wait_pinned(Some(HANG)).unwrap();
            assert_eq!(pool.stats().pinned_bytes, initial, "of {capacity}");
        }
        let more = small(8 * MIB, 8 * MIB + 4096).unwrap_err();
        let told = "are 4 KiB more than the capacity of 8 MiB";
        assert!(matches!(&more, Error::Argument(text) if text.contains(told)), "{more}");
    });
}

#[test]
fn memory_is_adopted_by_the_living_when_adopting_finds_the_first_one_dead() {
    on_nodes([0, 0], |d| {
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
        assert!(refused.error.is_device_lost() && refused.buffer.is_some_and(|m| m.len() == MIB));
        assert_eq!(pool.pinning().wanted, 0);
    });
}

/// The device that pins dies while many requests wait for what it was to pin.
#[test]
fn nobody_who_waits_notices_that_another_device_pins() {
    on_nodes([0, 0], |d| {
        for backing in [Backing::Registered, Backing::HostAlloc(HostAllocFlags::default())] {
            for round in [0, 3, 6, 9] {
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
                // What the living device has pinned is given back, and so is what the dead one had (which it
                // cannot undo).
                assert_eq!((pool.trim(0), pool.pinning().ready), (pinning.ready, 0));
                drop((pool, first, second));
                d.final_report();
                d.reset();
            }
        }
    });
}

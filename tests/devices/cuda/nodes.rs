//! Pools for GPUs on several NUMA nodes, on the stand-in driver: the node that a pool lies on.
//! (`core/regressions.rs` has a pool that goes on with another device when its first one dies.)

use pinpool::{Device, Pool, PoolBuilder};

use crate::cuda::rig::{self, both};
use crate::support::doubles::{self, HANG, StandIn};

const MIB: usize = 1 << 20;

/// Runs the body on two simulated GPUs that are on these nodes.
fn on_nodes(nodes: [i32; 2], body: impl FnOnce(&StandIn)) {
    doubles::on_stand_in(|stand_in| {
        for (device, node) in nodes.into_iter().enumerate() {
            stand_in.command(&format!("setup node {device} {node}"));
        }
        body(stand_in);
        stand_in.no_trace();
    });
}

fn builder(first: &Device, second: &Device) -> PoolBuilder {
    Pool::builder(first).device(second).capacity(8 * MIB).region(MIB).extent(MIB / 2).thread_cache(64 << 10)
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
                // Whichever device they are for, what the pool starts with, and what it grows by.
                for device in [&first, &second] {
                    rig::round_trip(&pool, &device.stream().unwrap(), &device.alloc(5000).unwrap(), 1);
                }
                let held: Vec<_> = (0..12).map(|_| pool.checkout_timeout(400_000, HANG).unwrap()).collect();
                let regions = pool.regions();
                assert!(regions.iter().all(|region| region.node == expected), "{named:?}: {regions:?}");
                drop(held);
                // Where an adopted region lies is the program's choice.
                assert_eq!(pool.adopt(vec![0; 64 << 10]).map_err(|e| e.error).unwrap().node, None);
            }
            // From a node that there is not pages come from elsewhere, and the pool works.
            let pool = builder(&first, &second).numa_node(999).build().unwrap();
            assert!(pool.checkout(300_000).unwrap().is_pinned());
        });
    }
}

//! Systems where registering host memory is not what it is elsewhere: those that refuse it for a moment or
//! for good, those where the device has registered memory at another address (WSL2), and those with
//! several NUMA nodes.

use pinpool::{
    Backing, Copier, Device, DeviceSlice, Error, ErrorClass, PinnedBuf, Pool, PoolBuilder, Unpinned,
};

use crate::cuda::rig::{self, PAGE, both, open, small};
use crate::record;
use crate::support::bytes;
use crate::support::doubles::gpu::{calls, filled};
use crate::support::doubles::{HANG, on_stand_in};

/// `CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM` and `HOST_REGISTER_SUPPORTED`, as the stand-in knows them.
const SAME_ADDRESS: i32 = 91;
const REGISTERS: i32 = 99;

fn round_trip(pool: &Pool, device: &Device) {
    rig::round_trip(pool, &device.stream().unwrap(), &device.alloc(5000).unwrap(), 3);
}

/// What the drivers say of pages that they cannot pin now: 2, and also 1, which of a program's memory means
/// another thing.
#[test]
fn a_passing_refusal_to_pin_is_no_wrong_argument() {
    on_stand_in(|d| {
        let device = open();
        let refuse = |code| d.fail("cuMemHostRegister_v2", 1, code, false);
        for code in [1, 2] {
            refuse(code);
            let error = small(&device).build().unwrap_err();
            let text = error.to_string();
            assert_eq!(error.class(), ErrorClass::Transient, "{text}");
            let told =
                ["could not pin these pages", "Unpinned::Allow"].iter().all(|word| text.contains(word));
            assert!((told || code == 2) && !text.contains("register_read_only"), "{text}");
            refuse(code);
            let pool = small(&device).initial(2 * PAGE).unpinned(Unpinned::Allow).build().unwrap();
            assert_eq!(pool.stats().unpinned_bytes, 2 * PAGE);
            round_trip(&pool, &device);
            drop(pool);
            // The next attempt may come through.
            round_trip(&small(&device).build().unwrap(), &device);
        }
        refuse(1);
        let refused = device.register(bytes(1, 100)).unwrap_err();
        assert_eq!(refused.error.class(), ErrorClass::Argument);
        assert!(refused.error.to_string().contains("register_read_only"), "{}", refused.error);
        assert_eq!(d.report().violations, Vec::<String>::new());
    });
}

/// As under WSL2. A batch names memory by addresses alone, so none may have the host's.
#[test]
fn batches_never_have_addresses_that_the_device_does_not_know() {
    const COUNT: usize = 80;
    const LEN: usize = 4096;
    on_stand_in(|d| {
        for same in [true, false] {
            d.attribute(SAME_ADDRESS, same.into());
            let device = open();
            let pool = Pool::builder(&device).capacity(16 << 20).build().unwrap();
            let memory = device.alloc(2 * COUNT * LEN).unwrap();
            let buf = filled(&pool, b"x");
            assert_eq!(buf.device_address(&device).unwrap() == buf.as_ptr().addr() as u64, same);
            // Places that are no neighbours, so that their copies would be a batch.
            let place = |i: usize| memory.slice(2 * i * LEN..(2 * i + 1) * LEN).unwrap();
            let places: Vec<DeviceSlice> = (0..COUNT).map(place).collect();
            let sent = bytes(1, COUNT * LEN);
            // Without a ring every page goes from where it is.
            let copier = Copier::builder(&pool, &device).ring(0).build().unwrap();
            let before = calls(d, "cuMemcpyBatchAsync");
            let blocks = vec![(filled(&pool, &sent), places.clone())];
            let mut blocks = copier.upload_pages(blocks).unwrap().wait().unwrap();
            blocks[0].fill(0);
            let landing = vec![(places.clone(), blocks.remove(0))];
            assert!(*copier.download_pages(landing).unwrap().wait().unwrap()[0] == *sent);
            assert_eq!(calls(d, "cuMemcpyBatchAsync") > before, same);
            // Staged pieces, with a ring and without, and plain copies.
            for copier in [copier, Copier::builder(&pool, &device).build().unwrap()] {
                let pieces: Vec<_> = sent.chunks(LEN).zip(places.iter().cloned()).collect();
                copier.upload_slices(&pieces).unwrap();
                let mut back = vec![0; COUNT * LEN];
                let mut targets: Vec<_> = places.iter().cloned().zip(back.chunks_mut(LEN)).collect();
                copier.download_slices(&mut targets).unwrap();
                assert!(back == sent);
            }
            round_trip(&pool, &device);
            assert_eq!(device.lost(), None);
            drop((pool, memory, buf, places));
            device.close(HANG).unwrap();
            assert_eq!(d.report().violations, Vec::<String>::new());
        }
    });
}

/// As on machines in confidential-computing mode.
#[test]
fn where_memory_cannot_be_registered_the_driver_allocates_it() {
    on_stand_in(|d| {
        d.attribute(REGISTERS, 0);
        record::record();
        let device = open();
        // What grows later falls back as what is there at the start does.
        for initial in [0, 7 * PAGE] {
            let pool = small(&device).initial(initial).build().unwrap();
            round_trip(&pool, &device);
            let all: Vec<PinnedBuf> =
                (0..3).map(|_| pool.checkout_timeout(2 * PAGE - 4096, HANG).unwrap()).collect();
            assert!(all.iter().all(PinnedBuf::is_pinned));
            let stats = pool.stats();
            assert_eq!((stats.unpinned_bytes, stats.pinned_bytes >= 6 * PAGE), (0, true), "{stats:?}");
            drop(all);
            pool.check().unwrap();
            pool.trim(0);
        }
        // The driver was asked once, and the program told once.
        assert_eq!(calls(d, "cuMemHostRegister_v2"), 1);
        let said = record::all(|event| {
            event.target == "pinpool::region" && event.level == tracing::Level::WARN && event.span.is_none()
        });
        assert!(said.len() == 1 && said[0].field("message").contains("Backing::HostAlloc"), "{said:?}");
        // A backing that was chosen is not changed, and the error says what to choose.
        let chosen =
            |policy| small(&device).backing(Backing::Registered).unpinned(policy).build().unwrap_err();
        let refused = device.register(bytes(1, 100)).unwrap_err();
        assert!(refused.buffer.is_some());
        assert!(matches!(chosen(Unpinned::Allow), Error::Unsupported(_)));
        for error in [chosen(Unpinned::Refuse), chosen(Unpinned::Allow), refused.error] {
            assert!(error.to_string().contains("Backing::HostAlloc"), "{error}");
        }
        drop(device);
        d.no_trace();
    });
}

/// The node that a pool lies on is that which is named, or its first device's.
#[test]
fn a_pool_lies_on_the_node_that_is_named_or_that_of_its_first_device() {
    for nodes in [[0, 1], [-1, -1], [0, -1], [1, 0], [-1, 1]] {
        on_stand_in(|d| {
            for (device, node) in nodes.into_iter().enumerate() {
                d.command(&format!("setup node {device} {node}"));
            }
            let (first, second) = both();
            let builder = || {
                let both = Pool::builder(&first).device(&second).thread_cache(64 << 10);
                both.capacity(8 << 20).region(1 << 20).extent(512 << 10)
            };
            let own = u32::try_from(nodes[0]).ok();
            for (named, expected) in [(None, own), (Some(0), Some(0)), (Some(1), Some(1))] {
                let builder = named.into_iter().fold(builder(), PoolBuilder::numa_node);
                let pool = builder.build().unwrap();
                // Whichever device they are for, what the pool starts with, and what it grows by.
                [&first, &second].into_iter().for_each(|device| round_trip(&pool, device));
                let more = |_| pool.checkout_timeout(400_000, HANG).unwrap();
                let held: Vec<_> = (0..12).map(more).collect();
                let regions = pool.regions();
                let is_there = regions.iter().all(|region| region.node == expected);
                assert!(is_there, "{named:?}: {regions:?}");
                drop(held);
                // Where an adopted region lies is the program's choice.
                assert_eq!(pool.adopt(vec![0; 64 << 10]).map_err(|e| e.error).unwrap().node, None);
            }
            // From a node that there is not pages come from elsewhere, and the pool works.
            let pool = builder().numa_node(999).build().unwrap();
            assert!(pool.checkout(300_000).unwrap().is_pinned());
            drop((pool, first, second));
            d.no_trace();
        });
    }
}

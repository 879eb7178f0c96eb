//! The package itself: what it stands on, its commands, and what it counts.

use std::path::Path;

use pinpool::telemetry::{DeviceStats, Snapshot, StreamStats};
use pinpool::{Pinning, PoolStats};

use crate::support::bytes;
use crate::{filled, on_every_device};

/// All source files below a folder, in one text.
fn source(folder: &Path) -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            all += &source(&path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all += &std::fs::read_to_string(&path).unwrap();
        }
    }
    all
}

#[test]
fn crates_of_others_do_real_work() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(here.join("Cargo.toml")).unwrap();
    // What the workspace has for all of its packages stands above the main package.
    let (_, manifest) = manifest.split_once("\n[package]\n").unwrap();
    let (src, tests) = (source(&here.join("src")), source(&here.join("tests")));
    for (name, text, used) in [
        ("cudarc", &src, "::cudarc::driver"),
        ("crossbeam", &src, "crossbeam::"),
        ("parking_lot", &src, "parking_lot::"),
        ("slab", &src, "slab::Slab"),
        ("tracing", &src, "tracing::"),
        ("proptest", &tests, "proptest::prelude"),
    ] {
        let own = |line: &str| {
            line.starts_with(&format!("{name} = ")) || line == format!("{name}.workspace = true")
        };
        assert!(manifest.lines().any(own), "{name} is no dependency");
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        assert!(code.filter(|line| line.contains(used)).count() > 0, "{name} is not used");
    }
    let targets = std::fs::read_to_string(here.join("fuzz/Cargo.toml")).unwrap();
    assert!(targets.matches("[[bin]]").count() >= 4, "the fuzz harness has its targets");
}

/// Each field that dashboards and servers read, with a value that this test knows.
#[test]
fn a_snapshot_has_its_fields() {
    on_every_device(|on| {
        const CAPACITY: usize = 1 << 20;
        let (pool, stream, memory) = (on.pool(CAPACITY), on.stream(), on.device.alloc(1000).unwrap());
        pool.wait_pinned(None).unwrap();
        on.hang(true);
        let flight = stream.upload(filled(&pool, &bytes(1, 1000)), &memory).unwrap();
        let held = pool.checkout(3000).unwrap();
        let Snapshot { pool: stats, classes, devices, pinning, waiting, holding, flight: flights, .. } =
            pool.snapshot();
        let PoolStats {
            pinned_bytes,
            unpinned_bytes,
            free_bytes,
            cached_bytes,
            checked_out_bytes,
            in_flight_bytes,
            claimed_bytes,
            quarantined_bytes,
            cut_bytes,
            requested_bytes,
            granted_bytes,
            rounding_bytes,
            largest_free_bytes,
            capacity_bytes,
            checkouts,
            returns,
            misses,
            reclaims,
            growths,
            growth_failures,
            waits,
            timeouts,
            waiting: waiting_now,
            errors: _,
            ..
        } = stats;
        assert_eq!((pinned_bytes + unpinned_bytes, capacity_bytes), (CAPACITY, CAPACITY));
        let parts = free_bytes + checked_out_bytes + in_flight_bytes + quarantined_bytes + cut_bytes;
        assert_eq!(parts, CAPACITY, "{stats:?}");
        assert!(checked_out_bytes >= 3000 && in_flight_bytes >= 1000 && claimed_bytes == 0, "{stats:?}");
        assert!(cached_bytes <= free_bytes && largest_free_bytes <= free_bytes, "{stats:?}");
        assert_eq!((requested_bytes, granted_bytes), (4000, checked_out_bytes + in_flight_bytes));
        assert_eq!((rounding_bytes, quarantined_bytes), (granted_bytes - requested_bytes, 0));
        assert_eq!((checkouts, returns), (2, 0));
        assert!((1..=2).contains(&misses), "{stats:?}");
        assert_eq!([reclaims, growths, growth_failures, waits, timeouts, waiting_now as u64], [0; 6]);
        let out: usize = classes.iter().map(|class| class.out_bytes).sum();
        assert_eq!((out, classes.iter().map(|class| class.out).sum()), (granted_bytes, 2));
        for class in &classes {
            assert!(class.stride.is_some() && class.cached <= class.free, "{class:?}");
            assert_eq!(class.checkouts, class.returns + class.out, "{class:?}");
        }
        let [DeviceStats { name, lost, registered_bytes, submitted, completed, streams, .. }] = &devices[..]
        else {
            panic!("{devices:?}")
        };
        assert_eq!((&**name, lost, *registered_bytes), (on.device.name(), &None, 0));
        assert_eq!((*submitted, *completed), (1, 0));
        let [StreamStats { stream: number, in_flight, in_flight_bytes: on_stream, lost: false, .. }] =
            &streams[..]
        else {
            panic!("{streams:?}")
        };
        assert_eq!((*number, *in_flight, *on_stream), (stream.number(), 1, in_flight_bytes));
        let Pinning { wanted, ready, made, error, .. } = pinning;
        assert_eq!((wanted, ready, made, error), (CAPACITY, CAPACITY, CAPACITY, None));
        assert_eq!((waiting.count(), flights.count()), (0, 0));
        let _ = holding;
        on.hang(false);
        drop((flight.wait().unwrap(), held));
        let snapshot = pool.snapshot();
        let device = &snapshot.devices[0];
        assert_eq!((device.completed, device.uploaded_bytes, device.downloaded_bytes), (1, 1000, 0));
        assert_eq!(
            (snapshot.flight.count(), snapshot.pool.returns, snapshot.pool.in_flight_bytes),
            (1, 2, 0)
        );
    });
}

//! The package itself: what it stands on, its commands, and what it counts.

use std::path::Path;
use std::process::Command;

use super::*;

#[test]
fn crates_of_others_do_real_work() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(here.join("Cargo.toml")).unwrap();
    // What the workspace has for all of its packages stands above the main package.
    let (_, manifest) = manifest.split_once("\n[package]\n").unwrap();
    for (name, folder, used) in [
        ("cudarc", "src", "::cudarc::driver"),
        ("crossbeam", "src", "crossbeam::"),
        ("parking_lot", "src", "parking_lot::"),
        ("slab", "src", "slab::Slab"),
        ("tracing", "src", "tracing::"),
        ("proptest", "tests", "proptest::prelude"),
    ] {
        let own = |line: &str| {
            line.starts_with(&format!("{name} = ")) || line == format!("{name}.workspace = true")
        };
        assert!(manifest.lines().any(own), "{name} is no dependency");
        // In a line that is no comment.
        let code = format!("^ *([^ /].*)?{used}");
        let found =
            Command::new("grep").args(["-rqE", "--include=*.rs", &code]).arg(here.join(folder)).status();
        assert!(found.unwrap().success(), "{name} is not used");
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
        let snapshot = pool.snapshot();
        let (s, classes) = (snapshot.pool, &snapshot.classes);
        assert_eq!((s.pinned_bytes + s.unpinned_bytes, s.capacity_bytes), (CAPACITY, CAPACITY));
        let parts =
            s.free_bytes + s.checked_out_bytes + s.in_flight_bytes + s.quarantined_bytes + s.cut_bytes;
        assert_eq!(parts, CAPACITY, "{s:?}");
        assert!(s.checked_out_bytes >= 3000 && s.in_flight_bytes >= 1000 && s.claimed_bytes == 0, "{s:?}");
        assert!(s.cached_bytes <= s.free_bytes && s.largest_free_bytes <= s.free_bytes, "{s:?}");
        assert_eq!((s.requested_bytes, s.granted_bytes), (4000, s.checked_out_bytes + s.in_flight_bytes));
        assert_eq!((s.rounding_bytes, s.quarantined_bytes), (s.granted_bytes - s.requested_bytes, 0));
        assert_eq!((s.checkouts, s.returns), (2, 0));
        assert!((1..=2).contains(&s.misses), "{s:?}");
        let none = [s.reclaims, s.growths, s.growth_failures, s.waits, s.timeouts, s.waiting as u64];
        assert_eq!((none, s.errors.total()), ([0; 6], 0));
        let out: usize = classes.iter().map(|class| class.out_bytes).sum();
        assert_eq!((out, classes.iter().map(|class| class.out).sum()), (s.granted_bytes, 2));
        for class in classes {
            assert!(class.stride.is_some() && class.cached <= class.free, "{class:?}");
            assert_eq!(class.checkouts, class.returns + class.out, "{class:?}");
        }
        let [device] = &snapshot.devices[..] else { panic!("{:?}", snapshot.devices) };
        assert_eq!((&*device.name, &device.lost, device.registered_bytes), (on.device.name(), &None, 0));
        assert_eq!((device.submitted, device.completed), (1, 0));
        let [of_stream] = &device.streams[..] else { panic!("{device:?}") };
        assert_eq!((of_stream.stream, of_stream.lost), (stream.number(), false));
        assert_eq!((of_stream.in_flight, of_stream.in_flight_bytes), (1, s.in_flight_bytes));
        let pinning = &snapshot.pinning;
        assert_eq!((pinning.wanted, pinning.ready, pinning.made), (CAPACITY, CAPACITY, CAPACITY));
        assert_eq!(pinning.error, None);
        assert_eq!([&snapshot.waiting, &snapshot.flight].map(|times| times.count()), [0, 0]);
        _ = snapshot.holding;
        on.hang(false);
        drop((flight.wait().unwrap(), held));
        let snapshot = pool.snapshot();
        let (device, s) = (&snapshot.devices[0], snapshot.pool);
        assert_eq!((device.completed, device.uploaded_bytes, device.downloaded_bytes), (1, 1000, 0));
        assert_eq!((snapshot.flight.count(), s.returns, s.in_flight_bytes), (1, 2, 0));
    });
}

//! After a run: everything is driven to its end, and nothing is left, neither in the pool nor on the device.

use super::*;

/// Drives everything to its end and looks for bytes that are not where they belong.
pub fn audit(pool: &Pool, device: &Device, node: &HostNode, threaded: bool, report: &mut Report) {
    let (since, mut quiet) = (Instant::now(), 0);
    loop {
        node.resume(0);
        let moved = node.step() | device.reap();
        quiet = if moved { 0 } else { quiet + 1 };
        let stats = pool.stats();
        let idle = stats.in_flight_bytes == 0 && stats.checked_out_bytes == 0;
        if threaded {
            std::thread::sleep(Duration::from_micros(200));
        }
        if quiet > 8 && (idle || !threaded) || since.elapsed() > HANG {
            break;
        }
    }
    let found = pool.check();
    let stats = pool.stats();
    let sum = stats.free_bytes
        + stats.checked_out_bytes
        + stats.in_flight_bytes
        + stats.quarantined_bytes
        + stats.cut_bytes;
    if let Err(error) = found {
        report.wrong.push(format!("check: {error}"));
    }
    if sum != stats.pinned_bytes + stats.unpinned_bytes {
        report.wrong.push(format!("the parts sum to {sum}: {stats:?}"));
    }
    if (stats.checked_out_bytes, stats.in_flight_bytes) != (0, 0) {
        report.wrong.push(format!("not everything is back: {stats:?}"));
    }
    if stats.quarantined_bytes == 0 && (stats.requested_bytes != 0 || stats.checkouts != stats.returns) {
        report.wrong.push(format!("requested bytes or returns are off: {stats:?}"));
    }
    report.quarantined = stats.quarantined_bytes;
    report.lost |= device.lost().is_some();
    let end = pool.shutdown(HANG);
    if end.drained != (stats.quarantined_bytes == 0) || end.quarantined_bytes != stats.quarantined_bytes {
        report.wrong.push(format!("{end:?} after {stats:?}"));
    }
    if !matches!(pool.try_checkout(1), Err(Error::Closed)) {
        report.wrong.push("a closed pool serves".into());
    }
}

/// What is wrong with what a run left on the device.
pub fn leftovers(
    node: &HostNode,
    threaded: bool,
    failed: Option<(Call, Failure)>,
    report: &Report,
) -> Option<String> {
    let allowed = |left: HostUsage| {
        let (call, failure) = failed.unzip();
        let own = |which: Call| call == Some(which) && failure != Some(Failure::Stall);
        // Quarantined memory stays pinned for good, and its device stays open for it.
        let quarantined = report.quarantined > 0;
        (left.streams == 0 || own(Call::DestroyStream) && left.streams == 1)
            && (left.events == 0 || own(Call::DestroyEvent) && left.events == 1 || quarantined)
            && (left.allocations == 0 || own(Call::Free) && left.allocations == 1)
            && (left.pinned_bytes == 0 || own(Call::Unpin) && left.pinned_bytes <= 128 << 10 || quarantined)
            && left.queued == 0
    };
    let since = Instant::now();
    // With threads the last things are given back a little later.
    while !allowed(node.live(0)) {
        if !threaded || since.elapsed() > HANG {
            return Some(format!("left on the device: {:?}", node.live(0)));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

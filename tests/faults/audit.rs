//! After a run: everything is driven to its end, and nothing is left, neither in the pool nor on the device.

use pinpool::host::HostUsage;

use super::*;
use crate::support::doubles;

/// Drives everything to its end and looks for bytes that are not where they belong.
pub fn audit(pool: &Pool, device: &Device, site: &Site, report: &mut Report) {
    let threaded = site.has_threads();
    let (since, mut quiet) = (Instant::now(), 0);
    loop {
        site.resume();
        let moved = site.step() | device.reap();
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
pub fn leftovers(site: &Site, failed: Option<Failed>, report: &Report) -> Option<String> {
    match site {
        Site::Host(node) => left_on_host(node, failed, report),
        Site::Hand(machine) => left_on_gpu(&doubles::Report::parse(&machine.report()), failed, report),
    }
}

fn left_on_host(node: &HostNode, failed: Option<Failed>, report: &Report) -> Option<String> {
    let own = |which: Call| failed.is_some_and(|f| f.0 == which.name() && f.1 != Failure::Stall);
    let allowed = |left: HostUsage| {
        // Memory that is quarantined or in flight on a lost device stays pinned for good, and its device open for it.
        let kept = report.quarantined > 0 || report.lost;
        let pinned = own(Call::Unpin) || own(Call::FreeHost) && left.host_bytes > 0;
        (left.streams == 0 || own(Call::DestroyStream) && left.streams == 1)
            && (left.events == 0 || own(Call::DestroyEvent) && left.events == 1 || kept)
            && (left.allocations == 0 || own(Call::Free) && left.allocations == 1 || kept)
            && (left.pinned_bytes == 0 || pinned && left.pinned_bytes <= 128 << 10 || kept)
            && (left.host_bytes == 0 || own(Call::FreeHost) && left.host_bytes == 128 << 10 || kept)
            && left.queued == 0
    };
    let values = || report.values.load(Ordering::SeqCst);
    let since = Instant::now();
    // With threads the last things are given back a little later.
    while !allowed(node.live(0)) || values() > usize::from(own(Call::Unpin)) && !report.lost {
        if since.elapsed() > HANG {
            return Some(format!("left on the device: {:?}, and {} values", node.live(0), values()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// A lost device may keep all that it had, since nothing of it may be touched any more.
fn left_on_gpu(left: &doubles::Report, failed: Option<Failed>, report: &Report) -> Option<String> {
    let lost = failed.is_some_and(|f| f.1 == Failure::DeviceLost);
    let own = match failed.map_or("", |f| f.0) {
        // Without a context nothing is given back.
        name if name.starts_with("cuCtx") => {
            &["streams 1", "events 1", "allocations 1", "hosts 1", "registrations 1"][..]
        }
        "cuStreamDestroy_v2" => &["streams 1"],
        "cuEventDestroy_v2" => &["events 1"],
        "cuMemFree_v2" => &["allocations 1", "hosts 1"],
        "cuMemFreeHost" => &["hosts 1"],
        "cuMemHostUnregister" => &["registrations 1"],
        "cuDevicePrimaryCtxRelease_v2" => &["contexts 1"],
        _ => &[],
    };
    let is_kept = |what: &String| !lost && !own.contains(&what.as_str());
    let kept: Vec<_> = left.leaks.iter().filter(|what| is_kept(what)).collect();
    let closed = left.over || lost;
    let values = report.values.load(Ordering::SeqCst);
    // A value that is still registered is never dropped.
    let registered = !lost && values > usize::from(own.contains(&"registrations 1"));
    (!closed || registered || !kept.is_empty() || !left.violations.is_empty()).then(|| {
        let broken = &left.violations;
        format!("closed: {closed}, left on the device: {kept:?} and {values} values, broken: {broken:?}")
    })
}

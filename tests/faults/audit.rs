//! After a run: everything is driven to its end, and nothing is left, neither in the pool nor on the device.

use super::*;
use crate::support::doubles;

/// Drives everything to its end and looks for bytes that are not where they belong.
pub fn audit(pool: &Pool, device: &Device, machine: &Machine, report: &mut Report) {
    let mut quiet = 0;
    while quiet <= 8 {
        resume(machine);
        let moved = machine.step() | device.reap();
        quiet = if moved { 0 } else { quiet + 1 };
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
    report.quarantined = stats.quarantined_bytes;
    report.lost |= device.lost().is_some();
    // The buffer of a graph that the driver does not let go of is out for good.
    if machine.wrong().contains("leak objects") {
        return;
    }
    if (stats.checked_out_bytes, stats.in_flight_bytes) != (0, 0) {
        report.wrong.push(format!("not everything is back: {stats:?}"));
    }
    if stats.quarantined_bytes == 0 && (stats.requested_bytes != 0 || stats.checkouts != stats.returns) {
        report.wrong.push(format!("requested bytes or returns are off: {stats:?}"));
    }
    let end = pool.shutdown(HANG);
    if end.drained != (stats.quarantined_bytes == 0) || end.quarantined_bytes != stats.quarantined_bytes {
        report.wrong.push(format!("{end:?} after {stats:?}"));
    }
    if !matches!(pool.try_checkout(1), Err(Error::Closed)) {
        report.wrong.push("a closed pool serves".into());
    }
}

/// What is wrong with what a run left on the device. A lost one may keep all that it had, since nothing of it may be
/// touched any more; and so may one that has a graph's buffer for good.
pub fn leftovers(machine: &Machine, failed: Option<Failed>, report: &Report) -> Option<String> {
    let left = doubles::Report::parse(&machine.report());
    let lost = failed.is_some_and(|f| f.1 == Failure::DeviceLost || f.0 == "cuUserObjectRelease");
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

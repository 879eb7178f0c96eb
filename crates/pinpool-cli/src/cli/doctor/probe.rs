//! The trial: a device is opened, a little memory is pinned through a real pool, copied both ways
//! and compared, and the speed of the copies is compared with that of the device's PCIe link.
//!
//! Several copies are in flight at once and the best of a few rounds counts, since other load makes
//! single copies slow. A low speed is only a warning. Each step has a timeout; the buffers of a
//! device that does not answer stay with the pool, and the report is printed all the same.

use std::time::{Duration, Instant, UNIX_EPOCH};

use pinpool::{Device, Error, Pool, Result, Unpinned};

use super::super::bench::{Copies, ROUNDS, Target};
use super::super::{pool, rate, threads};
use super::link::link;
use super::{Amount, Case, Measured, Report, Verdict, parse};

/// Bytes to pin and copy by default: few, and enough to reach full speed.
const USUAL_TRIAL: u64 = 64 << 20;
/// The smallest trial: less does not show a speed.
const LEAST_TRIAL: u64 = 1 << 20;
/// All memory that the trial uses, in sizes of it: the pool, what is copied and what comes back,
/// and on the host device the device's memory. It is half of what is left at most.
const TRIALS_TAKEN: u64 = 4;
/// The timeout of each step of the trial: longer than a step takes on a device that works.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// The most bytes of one copy: enough for full speed, and far below the length of an extent.
const LARGEST_COPY: usize = 16 << 20;
/// Copies below this share of the expected speed are a warning.
const POOR: f64 = 0.7;

/// Bytes to pin and copy as asked for.
fn asked(case: &Case) -> u64 {
    case.pin.unwrap_or(case.capacity.min(USUAL_TRIAL)).max(LEAST_TRIAL)
}

/// Bytes to pin and copy: as asked for, cut to a part of what is left. `None`: too little.
fn trial(case: &Case) -> Option<u64> {
    let most = case.left.map_or(u64::MAX, |left| (left / (2 * TRIALS_TAKEN)) & !(LEAST_TRIAL - 1));
    Some(asked(case).min(most)).filter(|trial| *trial >= LEAST_TRIAL)
}

/// Adds the checks `device`, `pin`, `copy` and `link`. Returns the measured speeds.
pub fn probe(case: &Case, report: &mut Report) -> Measured {
    let mut measured = Measured::default();
    // The check that failed before has the remedy.
    let skipped =
        |why| Verdict::warn(format!("not tried: {why}"), fixes![Here: "see the checks that failed above"]);
    report.add("device", Ok(device(case)));
    let Ok(device) = &case.device else {
        for name in ["pin", "copy"] {
            report.add(name, Ok(skipped("there is no device")));
        }
        report.add("link", Ok(link(case).0));
        return measured;
    };
    let (pinned, pool) = pin(case, device, &mut measured);
    report.add("pin", Ok(pinned));
    let result = pool.as_ref().map(|pool| copy(device, pool, PATIENCE, &mut measured));
    // Right after the copies, while the link is still at full speed.
    let (link, expected) = link(case);
    measured.expected = expected.filter(|_| pool.is_some());
    let copied = result.map(|result| copied(result, &measured));
    report.add("copy", Ok(copied.unwrap_or_else(|| skipped("nothing could be pinned"))));
    report.add("link", Ok(link));
    if let Some(pool) = pool {
        let _ = pool.shutdown(PATIENCE); // (`copy` has the verdict.)
    }
    measured
}

/// Whether the device opens. An error has its cause and the remedy.
fn device(case: &Case) -> Verdict {
    let device = match &case.device {
        Ok(device) => device,
        Err(error) => return Verdict::fail(error.to_string(), fixes![Here: "as the message says"]),
    };
    let place = device.pci_address().map_or_else(String::new, |address| format!(" at {address}"));
    let mut found = format!("{}{place}", device.name());
    if case.spec != "auto" || case.accelerator().is_some() {
        return Verdict::ok(found);
    }
    for name in ["cuda:0", "acl:0"] {
        let why = Device::open(name).err().map_or_else(String::new, |error| error.to_string());
        found += &format!("; {why}");
    }
    Verdict::warn(
        found,
        fixes![Here: "a server that needs an accelerator names it; --device host looks at none"],
    )
}

/// Builds a small pool and waits until all of it is pinned.
fn pin(case: &Case, device: &Device, measured: &mut Measured) -> (Verdict, Option<Pool>) {
    let left = Amount(case.left.unwrap_or(0));
    let Some(trial) = trial(case) else {
        let least = Amount(2 * TRIALS_TAKEN * LEAST_TRIAL);
        let found = format!("not tried: {left} of memory are left, and a trial wants {least}");
        return (Verdict::warn(found, fixes![Here: "see memory and cgroup above"]), None);
    };
    let mut what = Amount(trial).to_string();
    if trial < asked(case) {
        what += &format!(" ({} asked for; {left} of memory are left)", Amount(asked(case)));
    }
    let pool_of = |bytes: u64| -> Result<Pool> {
        let pool = pool(device, case.backing).capacity(bytes as usize).initial(bytes as usize);
        let pool = pool.unpinned(Unpinned::Refuse).build()?;
        pool.wait_pinned(Some(PATIENCE))?.error.map_or(Ok(pool), Err)
    };
    // A device's first registration costs something of its own, which is no speed of pinning.
    let first = pool_of(LEAST_TRIAL).map(drop);
    let (before, start) = (huge_bytes(), Instant::now());
    match first.and_then(|()| pool_of(trial)) {
        Ok(pool) => {
            measured.pin = rate(trial, start.elapsed());
            let at = measured.pin.map_or_else(String::new, |rate| format!(" at {}", speed(rate)));
            let huge = huge_bytes().zip(before).map_or_else(String::new, |(now, before)| {
                format!(", {} of it on huge pages", Amount(now.saturating_sub(before).min(trial)))
            });
            (Verdict::ok(format!("{what}{at} on {} threads{huge}", threads(None))), Some(pool))
        }
        Err(error) => {
            let fix = fixes![
                Here: "see memlock, memory and cgroup above; pinpool -v doctor prints the library's log"
            ];
            (Verdict::fail(format!("{what} could not be pinned: {error}"), fix), None)
        }
    }
}

/// Bytes of this process's memory on transparent huge pages, by the real `/proc`, whatever the
/// root: the trial runs on the real system. `None`: it is not shown (before Linux 4.14).
fn huge_bytes() -> Option<u64> {
    parse::kib(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?, "AnonHugePages")
}

/// Uploads and downloads several times, compares every byte, and measures the times. Returns the
/// offset of the first wrong byte, counted over all buffers, if there is one.
fn copy(device: &Device, pool: &Pool, patience: Duration, measured: &mut Measured) -> Result<Option<usize>> {
    let stats = pool.stats();
    let part = ((stats.pinned_bytes + stats.unpinned_bytes) / 8).min(LARGEST_COPY) & !4095;
    // As many buffers as the pool has room for.
    let mut bufs = Vec::new();
    loop {
        match pool.try_checkout(part) {
            Ok(buf) => bufs.push(buf),
            Err(Error::Exhausted(_)) if !bufs.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    let bytes = part * bufs.len();
    let (memory, streams) = (device.alloc(bytes)?, vec![device.stream()?]);
    // Different bytes in each run: device memory may still hold those of an earlier run.
    let run = UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos())) << 32;
    let mut copies = Copies::new(memory, bufs, streams, 1, patience, run)?;
    for (to, speed) in [(Target::Device, &mut measured.upload), (Target::Pinned, &mut measured.download)] {
        let mut best = Duration::MAX;
        for _ in 0..ROUNDS {
            let (took, wrong) = copies.once(to, |copies| copies.plain(to, 1))?;
            if wrong.is_some() {
                return Ok(wrong);
            }
            best = best.min(took);
        }
        *speed = rate(bytes as u64, best);
    }
    Ok(None)
}

/// The verdict on the copies.
fn copied(result: Result<Option<usize>>, measured: &Measured) -> Verdict {
    match result {
        Ok(None) => {}
        Ok(Some(at)) => {
            let fix = fixes![
                Here: "test the machine's memory (memtest86+) and the device (for NVIDIA: dcgmi diag -r 3), and look for \
                       errors: sudo dmesg | grep -iE 'xid|aer|mce'"
            ];
            return Verdict::fail(format!("byte {at} came back wrong"), fix);
        }
        Err(error) => {
            let fix = fixes![
                Here: "see memory and cgroup above, whether others have the device's memory, and sudo dmesg for its \
                       driver's errors"
            ];
            return Verdict::fail(error.to_string(), fix);
        }
    }
    let (Some(up), Some(down)) = (measured.upload, measured.download) else {
        return Verdict::ok("every byte came back; too fast to measure");
    };
    let found = format!("every byte came back; up at {}, down at {}", speed(up), speed(down));
    let Some(expected) = measured.expected else { return Verdict::ok(found) };
    let found = format!("{found}; its link should give {}", speed(expected));
    if up.min(down) >= expected * POOR {
        return Verdict::ok(found);
    }
    let fix = fixes![
        Here: "run it again when nothing else copies or computes; look at link, at the bridges above it (lspci -tv), and \
               at numa: memory on another node is slower"
    ];
    Verdict::warn(found, fix)
}

fn speed(gb_per_s: f64) -> String {
    format!("{gb_per_s:.1} GB/s")
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;
    use pinpool::host::{HostConfig, HostNode};

    #[test]
    fn a_wrong_byte_fails() {
        let verdict = copied(Ok(Some(7)), &Measured::default());
        assert_eq!((verdict.status, verdict.fix.len()), (Status::Fail, 1));
        assert!(verdict.found.contains("byte 7"), "{verdict:?}");
    }

    #[test]
    fn a_device_that_hangs_is_given_up_on() {
        let node = HostNode::new(HostConfig::new()).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
        node.hang(0);
        let mut measured = Measured::default();
        let result = copy(&device, &pool, Duration::from_millis(50), &mut measured);
        let verdict = copied(result, &measured);
        assert_eq!(verdict.status, Status::Fail, "{verdict:?}");
        assert!(verdict.found.contains("timed out after "), "{verdict:?}");
        assert!(measured.upload.is_none());
        node.resume(0);
    }
}

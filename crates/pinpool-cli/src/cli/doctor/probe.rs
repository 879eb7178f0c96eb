//! The trial: a device is opened, a little memory is pinned through a real pool, copied both ways and compared, and the
//! speeds are compared with what this machine should reach.
//!
//! The expected speed of copies follows from the PCIe link. The host device has no link, and the processor makes its
//! copies; there it is measured by copying as many bytes between ordinary buffers. The expected speed of pinning is
//! that of touching as much ordinary memory, which is most of the work of pinning.
//!
//! Several copies are in flight at once and the best of a few rounds counts, since other load makes single copies slow.
//! A low speed is only a warning. Each step has a timeout; the buffers of a device that does not answer stay with the
//! pool, and the report is printed all the same.

use std::time::{Duration, Instant, UNIX_EPOCH};

use pinpool::{Device, Error, Pool, Result, Unpinned};

use super::super::bench::{Copies, ROUNDS, Target};
use super::super::spread::each;
use super::super::{pool, rate, room, threads};
use super::link::{self, Link};
use super::{Amount, Case, Check, Measured, Verdict, memory, of_vendor, parse};

/// Bytes to pin and copy by default: few, and enough to reach full speed.
const USUAL_TRIAL: u64 = 64 << 20;
/// The smallest trial: less does not show a speed.
const LEAST_TRIAL: u64 = 1 << 20;
/// All memory that the trial uses, in sizes of it: the pool, what is copied and what comes back, and on the host device
/// the device's memory. It is half of what is left at most.
const TRIALS_TAKEN: u64 = 4;
/// The timeout of each step of the trial: longer than a step takes on a device that works.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// The most bytes of one copy: enough for full speed, and far below the length of an extent.
const LARGEST_COPY: usize = 16 << 20;
/// The fewest bytes whose pinning speed is judged; with fewer, starting threads takes most of the time.
const TELLING: usize = 32 << 20;
/// Pinning below this share of the speed of touching is a warning.
const POOR_PIN: f64 = 0.25;
/// Copies below this share of the expected speed are a warning.
const POOR: f64 = 0.7;
/// The same for the host device. The share is smaller, since the plain copies beside it profit from the processor's
/// caches.
const POOR_HOST: f64 = 0.4;

/// Bytes to pin and copy as asked for.
fn asked(case: &Case) -> u64 {
    case.pin.unwrap_or(case.capacity.min(USUAL_TRIAL)).max(LEAST_TRIAL)
}

/// Bytes to pin and copy: what was asked for, cut to a part of what is left. `None`: too little is left.
pub fn trial(case: &Case) -> Option<u64> {
    let most = case.left.map_or(u64::MAX, |left| (left / (2 * TRIALS_TAKEN)) & !(LEAST_TRIAL - 1));
    Some(asked(case).min(most)).filter(|trial| *trial >= LEAST_TRIAL)
}

/// Adds the checks `device`, `pin`, `fragmentation`, `copy` and `link`. Returns the measured speeds.
pub fn probe(case: &Case, checks: &mut Vec<Check>) -> Measured {
    let mut measured = Measured::default();
    let mut add = |name, verdict| checks.push(Check::new(&case.environment, name, verdict));
    // The check that failed before has the remedy.
    let skipped =
        |why| Verdict::warn(format!("not tried: {why}"), fixes![Here: "see the checks that failed above"]);
    add("device", Ok(device(case)));
    let Ok(device) = &case.device else {
        let skipped = || Ok(skipped("there is no device"));
        add("pin", skipped());
        add("fragmentation", memory::fragmentation(case, None));
        add("copy", skipped());
        add("link", Ok(link::link(case, &Link::path(case))));
        return measured;
    };
    let (pinned, pool) = pin(case, device, &mut measured);
    add("pin", Ok(pinned));
    add("fragmentation", memory::fragmentation(case, measured.huge));
    let result = pool.as_ref().map(|pool| copy(device, pool, PATIENCE, &mut measured));
    // Right after the copies, while the link is still at full speed.
    let links = Link::path(case);
    measured.expected = measured.expected.or_else(|| link::expected(&links)).filter(|_| pool.is_some());
    let copied = result.map(|result| copied(case.opened(), result, &measured));
    add("copy", Ok(copied.unwrap_or_else(|| skipped("nothing could be pinned"))));
    add("link", Ok(link::link(case, &links)));
    if let Some(pool) = pool {
        let _ = pool.shutdown(PATIENCE); // (`copy` has the verdict.)
    }
    measured
}

/// Whether the device opens.
fn device(case: &Case) -> Verdict {
    let device = match &case.device {
        Ok(device) => device,
        Err(error) => {
            let fix = match (error, case.vendor()) {
                (Error::UnknownDevice { .. }, Some(vendor)) => of_vendor(vendor.unknown_device),
                _ => fixes![Here: "as the message says, and see the checks of the driver above"],
            };
            return Verdict::fail(error.to_string(), fix);
        }
    };
    let place = device.pci_address().map_or_else(String::new, |address| format!(" at {address}"));
    let found = format!("{}{place}", device.name());
    let Some((family, _)) = case.family.filter(|_| !case.opened()) else { return Verdict::ok(found) };
    let why = Device::open(&format!("{}:0", family.name)).err();
    let why = why.map_or_else(String::new, |error| format!(": {error}"));
    Verdict::warn(
        format!("{found}, though there are signs of an accelerator{why}"),
        fixes![Here: "see the checks of the driver above; a server that needs the accelerator names it"],
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
            let grown = |(now, before): (u64, u64)| now.saturating_sub(before).min(trial);
            measured.huge = huge_bytes().zip(before).map(grown);
            let at = measured.pin.map_or_else(String::new, |rate| format!(" at {}", speed(rate)));
            let huge = measured.huge.map(|huge| format!(", {} of it on huge pages", Amount(huge)));
            let found = format!("{what}{at} on {} threads{}", threads(None), huge.unwrap_or_default());
            (pinned_at(case.opened(), found, trial as usize, measured), Some(pool))
        }
        Err(error) => {
            let fix = match &error {
                Error::MemLock { .. } => fixes![Here: "see memlock above"],
                Error::OutOfMemory { .. } => fixes![Here: "see memory, cgroup and address-space above"],
                _ => fixes![Here: "see the checks above; pinpool -v doctor prints the library's log"],
            };
            (Verdict::fail(format!("{what} could not be pinned: {}", error), fix), None)
        }
    }
}

/// Bytes of this process's memory that are on transparent huge pages. The trial runs on the real system, so this reads
/// the real `/proc`, whatever the root. `None`: the kernel does not show it (before Linux 4.14).
fn huge_bytes() -> Option<u64> {
    parse::kib(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?, "AnonHugePages")
}

/// Compares the speed of pinning with that of touching as much ordinary memory.
fn pinned_at(accelerator: bool, found: String, bytes: usize, measured: &mut Measured) -> Verdict {
    measured.touch = if bytes < TELLING { None } else { touch(bytes) };
    let (Some(pin), Some(touch)) = (measured.pin, measured.touch) else { return Verdict::ok(found) };
    let found = format!("{found}; ordinary memory comes at {}", speed(touch));
    if pin >= touch * POOR_PIN {
        return Verdict::ok(found);
    }
    let mut fix = fixes![
        Here: "run it again when nothing else pins or maps memory";
        Here: "look at fragmentation: making room for huge pages takes long";
    ];
    if accelerator {
        fix.extend(fixes![
            Here: "look at iommu, and at what others ask of the driver meanwhile: it serves one at a time"
        ]);
    }
    Verdict::warn(format!("{found}, several times as fast"), fix)
}

/// GB/s at which the system provides fresh memory to several threads. `None`: there is no memory.
fn touch(bytes: usize) -> Option<f64> {
    // The allocator maps this much from the system, which provides each page on the first write to it.
    let mut memory = room(bytes).ok()?;
    let fresh = &mut memory.spare_capacity_mut()[..bytes];
    let start = Instant::now();
    // As many threads as a pool uses by default.
    each(fresh, threads(None), |_, part| part.chunks_mut(4096).for_each(|page| _ = page[0].write(1)));
    let took = start.elapsed();
    std::hint::black_box(fresh);
    rate(bytes as u64, took)
}

/// Uploads and downloads several times, compares every byte, and measures the times. Returns the offset of the first
/// wrong byte, counted over all buffers, if there is one.
fn copy(device: &Device, pool: &Pool, patience: Duration, measured: &mut Measured) -> Result<Option<usize>> {
    let stats = pool.stats();
    let part = ((stats.pinned_bytes + stats.unpinned_bytes) / 8).min(LARGEST_COPY) & !4095;
    // As many buffers as the pool has room for.
    let mut bufs = Vec::new();
    loop {
        match pool.try_checkout(part) {
            Ok(buf) => bufs.push(buf),
            Err(Error::Exhausted { .. }) if !bufs.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    let bytes = part * bufs.len();
    let (memory, streams) = (device.alloc(bytes)?, vec![device.stream()?]);
    // Different bytes in each run: device memory may still hold those of an earlier run.
    let run = UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos())) << 32;
    let mut copies = Copies::new(memory, bufs, streams, 1, patience, run)?;
    // The host device's copies are set beside copies of its processor.
    let is_host = device.pci_address().is_none() && device.name().starts_with("host");
    let figures = [
        (Target::Device, &mut measured.upload),
        (Target::Pinned, &mut measured.download),
        (Target::Memory, &mut measured.expected),
    ];
    for (to, speed) in figures.into_iter().take(if is_host { 3 } else { 2 }) {
        let mut best = Duration::MAX;
        for _ in 0..ROUNDS {
            let (took, wrong) = copies.once(to, |piece| piece, |copies| copies.plain(to, 1))?;
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
fn copied(accelerator: bool, result: Result<Option<usize>>, measured: &Measured) -> Verdict {
    let failed = match result {
        Ok(None) => None,
        Ok(Some(at)) => Some((
            format!("byte {at} came back wrong"),
            "test the machine's memory (memtest86+) and the device (for NVIDIA: dcgmi diag -r 3), and look for errors: \
             sudo dmesg | grep -iE 'xid|aer|mce'",
        )),
        Err(error @ Error::OutOfMemory { .. }) => Some((
            error.to_string(),
            "see memory, cgroup and address-space above, and whether others have the device's memory",
        )),
        Err(error) => Some((
            error.to_string(),
            "see whether others have the device's memory, and sudo dmesg for its driver's errors",
        )),
    };
    if let Some((found, fix)) = failed {
        return Verdict::fail(found, fixes![Here: "{fix}"]);
    }
    let (Some(up), Some(down)) = (measured.upload, measured.download) else {
        return Verdict::ok("every byte came back; too fast to measure");
    };
    let found = format!("every byte came back; up at {}, down at {}", speed(up), speed(down));
    let Some(expected) = measured.expected else { return Verdict::ok(found) };
    let (against, poor) =
        if accelerator { ("its link should give", POOR) } else { ("this processor copies at", POOR_HOST) };
    let found = format!("{found}; {against} {}", speed(expected));
    if up.min(down) >= expected * poor {
        return Verdict::ok(found);
    }
    let mut fix = fixes![Here: "run it again when nothing else copies or computes"];
    if accelerator {
        fix.extend(fixes![Here: "look at link and iommu, and at numa: memory on another node is slower"]);
    }
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
        let verdict = copied(false, Ok(Some(7)), &Measured::default());
        assert_eq!((verdict.status, verdict.fix.len()), (Status::Fail, 1));
        assert!(verdict.found.contains("byte 7"), "{verdict:?}");
    }

    #[test]
    fn slow_copies_are_told_and_fast_ones_are_not() {
        let copied = |up, expected| {
            let (upload, download) = (Some(up), Some(9.0));
            copied(false, Ok(None), &Measured { upload, download, expected, ..Measured::default() })
        };
        assert_eq!(copied(9.0, Some(10.0)).status, Status::Ok);
        assert_eq!(copied(0.1, None).status, Status::Ok);
        let slow = copied(1.0, Some(10.0));
        assert_eq!(slow.status, Status::Warn);
        assert!(slow.found.contains("1.0 GB/s") && slow.found.contains("10.0 GB/s"), "{slow:?}");
    }

    #[test]
    fn slow_pinning_is_told() {
        let mut measured = Measured { pin: Some(1e-6), ..Measured::default() };
        let slow = pinned_at(false, "little".into(), TELLING, &mut measured);
        assert_eq!(slow.status, Status::Warn, "{slow:?}");
        assert!(slow.fix.iter().any(|(_, fix)| fix.contains("fragmentation")));
        assert!(measured.touch.unwrap() > 0.0);
        measured.pin = Some(1e6);
        assert_eq!(pinned_at(false, "much".into(), TELLING, &mut measured).status, Status::Ok);
        // Too few bytes to judge.
        measured.pin = Some(1e-6);
        assert_eq!(pinned_at(false, "little".into(), TELLING - 1, &mut measured).status, Status::Ok);
    }

    #[test]
    fn a_device_that_hangs_is_given_up_on() {
        let node = HostNode::new(HostConfig::new()).unwrap();
        let device = Device::on(&node, 0).unwrap();
        let pool = Pool::builder(&device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
        node.hang(0);
        let mut measured = Measured::default();
        let result = copy(&device, &pool, Duration::from_millis(50), &mut measured);
        let verdict = copied(false, result, &measured);
        assert_eq!(verdict.status, Status::Fail, "{verdict:?}");
        assert!(verdict.found.contains("timed out after "), "{verdict:?}");
        assert!(measured.upload.is_none());
        node.resume(0);
    }
}

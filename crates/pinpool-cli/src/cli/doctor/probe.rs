//! The trial: a device is opened, a little memory is pinned through a real pool, copied both ways and compared, and the
//! speeds are compared with what this machine should reach.
//!
//! The expected speed of copies follows from the PCIe link. The host device has no link, and the processor makes its
//! copies; there it is measured by copying as many bytes between ordinary buffers right after. The expected speed of
//! pinning is that of touching as much ordinary memory, which is most of the work of pinning.
//!
//! Several copies are in flight at once and the best of a few rounds counts, since other load makes single copies slow.
//! A low speed is only a warning. Each step has a timeout; the buffers of a device that does not answer stay with the
//! pool, and the report is printed all the same.

use std::time::{Duration, Instant, UNIX_EPOCH};

use pinpool::{Device, Error, InFlight, PinnedBuf, Pool, Result, Unpinned};

use super::report::speed;
use super::{
    Case, Check, LEAST_TRIAL, Measured, PATIENCE, TRIALS_TAKEN, Verdict, link, of_vendor, pages, parse,
};
use crate::cli::amount::Amount;
use crate::cli::spread::each;
use crate::cli::{pool, rate, room, sample, threads};

/// The most bytes of one copy: enough for full speed, and far below the length of an extent.
const LARGEST_COPY: usize = 16 << 20;
const COPY_ROUNDS: usize = 5;
/// The fewest bytes whose pinning speed is judged; with fewer, starting threads takes most of the time.
const TELLING: usize = 32 << 20;
/// Pinning below this share of the speed of touching is a warning.
const POOR_PIN: f64 = 0.25;
/// Copies below this share of the expected speed are a warning.
const POOR: f64 = 0.7;
/// The same for the host device. The share is smaller, since the plain copies beside it profit from the processor's
/// caches.
const POOR_HOST: f64 = 0.4;

/// Adds the checks `device`, `pin`, `fragmentation`, `copy` and `link`. Returns the measured speeds.
pub fn probe(case: &Case, checks: &mut Vec<Check>) -> Measured {
    let mut measured = Measured::default();
    let mut add = |name, verdict| checks.push(Check::new(&case.environment, name, verdict));
    add("device", device(case));
    let mut huge = None;
    let (pinned, pool) = match (&case.device, case.trial()) {
        (Ok(device), Some(trial)) => pin(case, device, trial, &mut huge, &mut measured),
        (Ok(_), None) => (no_room(case), None),
        (Err(_), _) => (skipped("there is no device"), None),
    };
    add("pin", pinned);
    add("fragmentation", pages::fragmentation(case, huge));
    let result = match (&case.device, &pool) {
        (Ok(device), Some(pool)) => Ok(copy(device, pool, PATIENCE, &mut measured)),
        (Ok(_), None) => Err("nothing could be pinned"),
        (Err(_), _) => Err("there is no device"),
    };
    // Right after the copies, while the link is still at full speed.
    let links = case.addresses().first().map_or_else(Vec::new, |address| link::path(case.system, address));
    if result.is_ok() {
        measured.expected = measured.expected.or_else(|| link::expected(&links));
    }
    add("copy", result.map_or_else(skipped, |result| copied(case.opened(), result, &measured)));
    add("link", link::link(case, &links));
    if let Some(pool) = pool {
        let _ = pool.shutdown(PATIENCE); // (`copy` has the verdict.)
    }
    measured
}

/// The verdict of a step that was not tried. The check that failed before it has the remedy.
fn skipped(why: &str) -> Verdict {
    Verdict::warn(format!("not tried: {why}"), fixes![Here: "see the checks that failed above"])
}

/// The verdict where too little memory is left for a trial.
fn no_room(case: &Case) -> Verdict {
    let (left, least) = (Amount(case.left.unwrap_or(0)), Amount(2 * TRIALS_TAKEN * LEAST_TRIAL));
    let found = format!("not tried: {left} of memory are left, and a trial wants {least}");
    Verdict::warn(found, fixes![Here: "see memory and cgroup above"])
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
            return Verdict::fail(one_line(error), fix);
        }
    };
    let place = device.pci_address().map_or_else(String::new, |address| format!(" at {address}"));
    let found = format!("{}{place}", device.name());
    match case.family {
        Some(family) if !case.opened() => {
            let why = Device::open(&format!("{}:0", family.name)).err();
            let why = why.map_or_else(String::new, |error| format!(": {error}"));
            Verdict::warn(
                format!("{found}, though there are signs of an accelerator{why}"),
                fixes![Here: "see the checks of the driver above; a server that needs the accelerator names it"],
            )
        }
        _ => Verdict::ok(found),
    }
}

/// Builds a small pool and waits until all of it is pinned. `huge` gets the bytes of it on huge pages, if the kernel
/// shows them.
fn pin(
    case: &Case,
    device: &Device,
    trial: u64,
    huge: &mut Option<u64>,
    measured: &mut Measured,
) -> (Verdict, Option<Pool>) {
    let what = match case.left {
        Some(left) if trial < case.asked => {
            format!(
                "{} ({} asked for; {} of memory are left)",
                Amount(trial),
                Amount(case.asked),
                Amount(left)
            )
        }
        _ => Amount(trial).to_string(),
    };
    // A device's first registration costs something of its own, which is no speed of pinning.
    let pinned = pool_of(case, device, LEAST_TRIAL).and_then(|_| {
        let (before, start) = (huge_bytes(), Instant::now());
        let pool = pool_of(case, device, trial)?;
        let took = start.elapsed();
        *huge = huge_bytes().zip(before).map(|(now, before)| now.saturating_sub(before).min(trial));
        Ok((pool, took))
    });
    match pinned {
        Ok((pool, took)) => {
            measured.pin = rate(trial, took);
            let at = measured.pin.map_or_else(String::new, |rate| format!(" at {}", speed(rate)));
            let huge =
                huge.map_or_else(String::new, |huge| format!(", {} of it on huge pages", Amount(huge)));
            let found = format!("{what}{at} on {} threads{huge}", threads(None));
            (pinned_at(case.opened(), found, trial as usize, measured), Some(pool))
        }
        Err(error) => {
            let fix = match &error {
                Error::MemLock { .. } => fixes![Here: "see memlock above"],
                Error::OutOfMemory { .. } => fixes![Here: "see memory, cgroup and address-space above"],
                _ => fixes![Here: "see the checks above; pinpool -v doctor prints the library's log"],
            };
            let found = format!("{what} could not be pinned: {}", one_line(&error));
            (Verdict::fail(found, fix), None)
        }
    }
}

/// A pool of this capacity, all of it pinned.
fn pool_of(case: &Case, device: &Device, bytes: u64) -> Result<Pool> {
    let bytes = bytes as usize;
    let builder = pool(device, case.backing).capacity(bytes).initial(bytes);
    let pool = builder.unpinned(Unpinned::Refuse).build()?;
    pool.wait_pinned(Some(PATIENCE))?.error.map_or(Ok(pool), Err)
}

/// Bytes of this process's memory that are on transparent huge pages. The trial runs on the real system, so this reads
/// the real `/proc`, whatever the root. `None`: the kernel does not show it (before Linux 4.14).
fn huge_bytes() -> Option<u64> {
    parse::kib(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?, "AnonHugePages")
}

/// Compares the speed of pinning with that of touching as much ordinary memory.
fn pinned_at(accelerator: bool, found: String, bytes: usize, measured: &mut Measured) -> Verdict {
    if bytes < TELLING {
        return Verdict::ok(found);
    }
    measured.touch = touch(bytes);
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

/// Uploads and downloads several times, compares every downloaded byte, and measures the times. Returns the offset of
/// the first wrong byte, counted over all buffers, if there is one.
fn copy(device: &Device, pool: &Pool, patience: Duration, measured: &mut Measured) -> Result<Option<usize>> {
    let stats = pool.stats();
    let part = ((stats.pinned_bytes + stats.unpinned_bytes) / 8).min(LARGEST_COPY) & !4095;
    // Different bytes in each run: device memory may still hold those of an earlier run.
    let run = UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos())) << 32;
    // As many buffers as the pool has room for.
    let (mut bufs, mut sent) = (Vec::new(), Vec::new());
    loop {
        match pool.try_checkout(part) {
            Ok(mut buf) => {
                buf.try_resize(part, 0)?;
                sample::fill(&mut buf, run + (part * bufs.len()) as u64);
                sent.push(copy_of(&buf)?);
                bufs.push(buf);
            }
            Err(Error::Exhausted { .. }) if !bufs.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    let bytes = part * bufs.len();
    let memory = device.alloc(bytes)?;
    let slice = |index: usize| memory.slice(index * part..(index + 1) * part);
    let stream = device.stream()?;
    let (mut up, mut down) = (Duration::MAX, Duration::MAX);
    for _ in 0..COPY_ROUNDS {
        let (back, took) = round(bufs, patience, |index, buf| Ok(stream.upload(buf, slice(index))?))?;
        (bufs, up) = (back, up.min(took));
    }
    for _ in 0..COPY_ROUNDS {
        // Old bytes in a buffer must not be taken for downloaded ones.
        bufs.iter_mut().for_each(|buf| buf.fill(0));
        let (back, took) = round(bufs, patience, |index, buf| Ok(stream.download(slice(index), buf)?))?;
        (bufs, down) = (back, down.min(took));
        let wrong = wrong(&bufs, &sent);
        if wrong.is_some() {
            return Ok(wrong);
        }
    }
    (measured.upload, measured.download) = (rate(bytes as u64, up), rate(bytes as u64, down));
    if device.pci_address().is_none() && device.name().starts_with("host") {
        measured.expected = own(&sent);
    }
    Ok(None)
}

/// The offset of the first wrong byte, counted over all buffers.
fn wrong<T: std::ops::Deref<Target = [u8]>>(got: &[T], sent: &[Vec<u8>]) -> Option<usize> {
    let mut before = 0;
    for (got, sent) in got.iter().zip(sent) {
        if **got != **sent {
            return Some(before + got.iter().zip(sent).take_while(|(a, b)| a == b).count());
        }
        before += sent.len();
    }
    None
}

/// Submits a copy of each buffer and waits for all of them. Returns the buffers, and the time that this took.
fn round(
    bufs: Vec<PinnedBuf>,
    patience: Duration,
    submit: impl Fn(usize, PinnedBuf) -> Result<InFlight<PinnedBuf>>,
) -> Result<(Vec<PinnedBuf>, Duration)> {
    let start = Instant::now();
    let flights: Result<Vec<_>> = bufs.into_iter().enumerate().map(|(at, buf)| submit(at, buf)).collect();
    let back: Result<_> = flights?.into_iter().map(|flight| Ok(flight.wait_timeout(patience)?)).collect();
    Ok((back?, start.elapsed()))
}

/// The same bytes in ordinary memory.
fn copy_of(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut copy = room(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// GB/s at which one thread copies as many bytes between ordinary buffers. `None`: there is no memory for them.
fn own(from: &[Vec<u8>]) -> Option<f64> {
    let mut to = from.iter().map(|bytes| copy_of(bytes).ok()).collect::<Option<Vec<_>>>()?;
    let best = (0..COPY_ROUNDS).map(|_| {
        let start = Instant::now();
        for (to, from) in to.iter_mut().zip(from) {
            to.copy_from_slice(std::hint::black_box(from));
        }
        std::hint::black_box(&mut to);
        start.elapsed()
    });
    rate(from.iter().map(|bytes| bytes.len() as u64).sum(), best.min()?)
}

/// The verdict on the copies.
fn copied(accelerator: bool, result: Result<Option<usize>>, measured: &Measured) -> Verdict {
    let failed = match result {
        Ok(None) => None,
        Ok(Some(at)) => {
            let fix = "test the machine's memory (memtest86+) and the device (for NVIDIA: dcgmi diag -r 3), and look \
                       for errors: sudo dmesg | grep -iE 'xid|aer|mce'";
            Some((format!("byte {at} came back wrong"), fix))
        }
        Err(error) => {
            let fix = match error {
                Error::OutOfMemory { .. } => {
                    "see memory, cgroup and address-space above, and whether others have the device's memory"
                }
                _ => "see whether others have the device's memory, and sudo dmesg for its driver's errors",
            };
            Some((one_line(&error), fix))
        }
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

fn one_line(error: &Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;
    use pinpool::host::{HostConfig, HostNode};

    #[test]
    fn a_wrong_byte_is_found_and_fails() {
        let sent = vec![vec![1; 100], vec![2; 100]];
        let mut got = sent.clone();
        assert_eq!(wrong(&got, &sent), None);
        got[1][99] = 3;
        assert_eq!(wrong(&got, &sent), Some(199));
        got[0][7] = 3;
        assert_eq!(wrong(&got, &sent), Some(7));
        got[0].truncate(5);
        assert_eq!(wrong(&got, &sent), Some(5));
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

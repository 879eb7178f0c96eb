//! The proof: a device is opened, a little memory is pinned through a real pool, copied both ways and compared, and the
//! speed is set beside what this machine should give.
//!
//! What copies should give is known by the PCIe link for a device on one; for the host device, whose copies are the
//! processor's, by copying as much between ordinary buffers right after. What pinning should give is told by touching
//! as much ordinary memory, which is most of the work.
//!
//! Several copies are in flight at once and the best of a few rounds counts, since a busy machine makes single ones
//! slow; speeds only ever warn. A device that does not answer is given up on after a while; its buffers are the pool's
//! to keep then, and the findings are told all the same.

use std::time::{Duration, Instant};

use pinpool::{Device, DeviceBuffer, Error, InFlight, PinnedBuf, Pool, Stream, Unpinned};

use super::place::By;
use super::report::{size, speed};
use super::{Case, Check, Maker, Measured, Status, link, parse};
use crate::cli::room;

/// Bytes of one copy at most: large enough for full speed, and far below what one extent holds.
const PART: usize = 16 << 20;
const ROUNDS: usize = 5;
/// Bytes from which on the speed of pinning says something; below, it is that of starting threads.
const TELLING: usize = 32 << 20;
/// Below this share of the speed of touching, pinning is held up by something.
const POOR_PIN: f64 = 0.25;
/// Below this share of what was expected, something is in the way.
const POOR: f64 = 0.7;
/// The host's own copies are measured beside those of a thread that has the processor's caches to share.
const POOR_HOST: f64 = 0.4;

/// Adds what came of opening, pinning and copying, and of the link that was copied over.
pub fn probe(case: &Case, checks: &mut Vec<Check>) -> Measured {
    let mut measured = Measured::default();
    checks.push(device(case));
    if let Ok(device) = &case.device {
        let (check, pool) = pin(case, device, &mut measured);
        checks.push(check);
        match pool {
            Some(pool) => {
                let result = copy(device, &pool, case.patience, &mut measured);
                // Now, while the link is still awake.
                let links = links(case);
                measured.expected = measured.expected.or_else(|| link::expected(&links));
                checks.push(copied(case, result, &measured));
                checks.push(link::link(case, &links));
                pool.shutdown(case.patience);
                return measured;
            }
            None => checks.push(skipped("copy", "nothing could be pinned")),
        }
    } else {
        checks.push(skipped("pin", "there is no device"));
        checks.push(skipped("copy", "there is no device"));
    }
    checks.push(link::link(case, &links(case)));
    measured
}

fn links(case: &Case) -> Vec<link::Link> {
    case.addresses().first().map_or_else(Vec::new, |address| link::path(case.system, address))
}

/// The reason is in a check of its own, with its remedy.
fn skipped(name: &'static str, why: &str) -> Check {
    Check::warn(name, format!("not tried: {why}"), vec!["see the checks that failed above".into()])
}

/// Whether the device opens.
fn device(case: &Case) -> Check {
    const NAME: &str = "device";
    match &case.device {
        Ok(device) => {
            let place = device.pci_address().map_or_else(String::new, |address| format!(" at {address}"));
            let found = format!("{}{place}", device.name());
            if case.maker.is_some() && !case.opened() {
                let why = match case.maker {
                    Some(Maker::Nvidia) => Device::open("cuda:0").err(),
                    _ => Device::open("acl:0").err(),
                };
                let why = why.map_or_else(String::new, |error| format!(": {error}"));
                return Check::warn(
                    NAME,
                    format!("{found}, though there are signs of an accelerator{why}"),
                    vec![
                        "see the checks of the driver above; a server that needs the accelerator names it"
                            .into(),
                    ],
                );
            }
            Check::ok(NAME, found)
        }
        Err(error) => {
            let fix = match error {
                Error::UnknownDevice { .. } => case.remedies(&[
                    (By::Shell, "check CUDA_VISIBLE_DEVICES, and nvidia-smi -L for what there is".into()),
                    (By::Docker, "check --gpus, CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES".into()),
                    (By::Kubernetes, "raise nvidia.com/gpu in resources.limits".into()),
                ]),
                _ => vec!["as the message says, and see the checks of the driver above".into()],
            };
            Check::fail(NAME, one_line(error), fix)
        }
    }
}

/// Builds a small pool, all of it pinned.
fn pin(case: &Case, device: &Device, measured: &mut Measured) -> (Check, Option<Pool>) {
    const NAME: &str = "pin";
    let bytes = case.trial as usize;
    let huge = huge_bytes();
    let start = Instant::now();
    let built = Pool::builder(device).capacity(bytes).initial(bytes).unpinned(Unpinned::Refuse).build();
    let pinned = built.and_then(|pool| {
        let pinning = pool.wait_pinned(Some(case.patience))?;
        let took = start.elapsed();
        match pinning.error {
            Some(error) => Err(error),
            None => Ok((pool, took)),
        }
    });
    match pinned {
        Ok((pool, took)) => {
            measured.pin = rate(bytes, took);
            let at = measured.pin.map_or_else(String::new, |rate| format!(" at {}", speed(rate)));
            let huge = huge_bytes().zip(huge).map_or_else(String::new, |(now, before)| {
                format!(", {} of it on huge pages", size(now.saturating_sub(before).min(bytes as u64)))
            });
            let found = format!("{}{at} on {} threads{huge}", size(bytes as u64), pin_threads());
            (pinned_at(case, found, bytes, measured), Some(pool))
        }
        Err(error) => {
            let fix = match &error {
                Error::MemLock { .. } => "see memlock above".to_owned(),
                Error::OutOfMemory { .. } => "see memory, cgroup and address-space above".to_owned(),
                _ => "see the checks above; pinpool -v doctor prints the library's log".to_owned(),
            };
            (
                Check::fail(
                    NAME,
                    format!("{} could not be pinned: {}", size(bytes as u64), one_line(&error)),
                    vec![fix],
                ),
                None,
            )
        }
    }
}

/// Bytes of this process's memory that are on transparent huge pages. The trial is real, so this is the real process's,
/// whatever the root. `None`: the kernel does not say (before Linux 4.14).
fn huge_bytes() -> Option<u64> {
    parse::kib(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?, "AnonHugePages")
}

/// The speed of pinning beside that of touching as much ordinary memory, which the system has to provide just so.
fn pinned_at(case: &Case, found: String, bytes: usize, measured: &mut Measured) -> Check {
    const NAME: &str = "pin";
    if bytes < TELLING {
        return Check::ok(NAME, found);
    }
    measured.touch = touch(bytes);
    match (measured.pin, measured.touch) {
        (Some(pin), Some(touch)) => {
            let found = format!("{found}; ordinary memory comes at {}", speed(touch));
            if pin >= touch * POOR_PIN {
                return Check::ok(NAME, found);
            }
            let mut fix = vec!["run it again when nothing else pins or maps memory".to_owned()];
            fix.push("look at fragmentation: making room for huge pages takes long".into());
            if case.opened() {
                fix.push(
                    "look at iommu, and at what others ask of the driver meanwhile: it serves one at a time"
                        .into(),
                );
            }
            Check::warn(NAME, format!("{found}, several times as fast"), fix)
        }
        _ => Check::ok(NAME, found),
    }
}

/// GB/s at which the system provides fresh memory to as many threads. `None`: it does not, or there are no threads.
fn touch(bytes: usize) -> Option<f64> {
    // The allocator takes this much from the system, which provides each page when it is written to.
    let mut memory = room(bytes).ok()?;
    let fresh = &mut memory.spare_capacity_mut()[..bytes];
    let part = bytes.div_ceil(pin_threads());
    let start = Instant::now();
    let touched = std::thread::scope(|scope| {
        fresh.chunks_mut(part).all(|part| {
            let work = || part.chunks_mut(4096).for_each(|page| _ = page[0].write(1));
            std::thread::Builder::new().spawn_scoped(scope, work).is_ok()
        })
    });
    std::hint::black_box(fresh);
    // Where a thread cannot be had, a part was left out.
    if touched { rate(bytes, start.elapsed()) } else { None }
}

/// As many as a pool takes by default.
fn pin_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8)
}

/// How copying can fail.
enum Fault {
    Error(Error),
    /// What came back is not what went out.
    Wrong {
        at: usize,
    },
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Copies up, down and up again, looks at every byte that came back, and takes the times.
fn copy(device: &Device, pool: &Pool, patience: Duration, measured: &mut Measured) -> Result<(), Fault> {
    let stats = pool.stats();
    let bytes = stats.pinned_bytes + stats.unpinned_bytes;
    let part = (bytes / 8).min(PART) & !4095;
    // As many as there is room for.
    let mut sources = Vec::new();
    loop {
        match pool.try_checkout(part) {
            Ok(mut buf) => {
                fill(&mut buf, sources.len())?;
                sources.push(buf);
            }
            Err(Error::Exhausted { .. }) if !sources.is_empty() => break,
            Err(error) => return Err(error.into()),
        }
    }
    let count = sources.len();
    let memory = device.alloc(part * count)?;
    let stream = device.stream()?;
    let sent = sources.iter().map(|buf| copy_of(buf)).collect::<Result<Vec<_>, _>>()?;
    let mut up = Duration::MAX;
    for _ in 0..ROUNDS {
        let (bufs, took) = round(sources, patience, |index, buf| {
            stream.upload(buf, memory.slice(index * part..(index + 1) * part)).map_err(Error::from)
        })?;
        (sources, up) = (bufs, up.min(took));
    }
    let mut landings = sources;
    let mut down = Duration::MAX;
    for _ in 0..ROUNDS {
        // What was there must not pass for what is to come.
        landings.iter_mut().try_for_each(|buf| {
            buf.clear();
            buf.try_resize(part, 0)
        })?;
        let (bufs, took) = round(landings, patience, |index, buf| {
            back(&stream, &memory, index * part..(index + 1) * part, buf)
        })?;
        (landings, down) = (bufs, down.min(took));
        if let Some(at) = wrong(&landings, &sent) {
            return Err(Fault::Wrong { at });
        }
    }
    measured.upload = rate(part * count, up);
    measured.download = rate(part * count, down);
    if device.pci_address().is_none() && device.name().starts_with("host") {
        measured.expected = own(&sent);
    }
    Ok(())
}

/// The first byte, counted through all buffers, that is not what it should be.
fn wrong<T: std::ops::Deref<Target = [u8]>>(got: &[T], sent: &[Vec<u8>]) -> Option<usize> {
    let mut before = 0;
    for (got, sent) in got.iter().zip(sent) {
        let got: &[u8] = got;
        if got != sent.as_slice() {
            let same = got.iter().zip(sent).take_while(|(a, b)| a == b).count();
            return Some(before + same);
        }
        before += sent.len();
    }
    None
}

fn back(
    stream: &Stream,
    memory: &DeviceBuffer,
    range: std::ops::Range<usize>,
    buf: PinnedBuf,
) -> Result<InFlight<PinnedBuf>, Error> {
    stream.download(memory.slice(range), buf).map_err(Error::from)
}

/// Submits a copy of each buffer, waits for them all, and says how long that took.
fn round(
    bufs: Vec<PinnedBuf>,
    patience: Duration,
    submit: impl Fn(usize, PinnedBuf) -> Result<InFlight<PinnedBuf>, Error>,
) -> Result<(Vec<PinnedBuf>, Duration), Error> {
    let start = Instant::now();
    let flights =
        bufs.into_iter().enumerate().map(|(index, buf)| submit(index, buf)).collect::<Result<Vec<_>, _>>()?;
    let mut back = Vec::with_capacity(flights.len());
    for flight in flights {
        back.push(flight.wait_timeout(patience).map_err(Error::from)?);
    }
    Ok((back, start.elapsed()))
}

/// Bytes that do not repeat, and are others in each run: device memory may still have those of an earlier one.
fn fill(buf: &mut PinnedBuf, index: usize) -> Result<(), Error> {
    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos());
    let mut state = (u64::from(std::process::id()) << 32 | u64::from(now)) ^ (index as u64) << 56 | 1;
    let mut block = [0; 4096];
    while buf.remaining() > 0 {
        for word in block.chunks_exact_mut(8) {
            // Marsaglia's xorshift with the shifts 13, 7, 17.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let part = buf.remaining().min(block.len());
        buf.try_extend_from_slice(&block[..part])?;
    }
    Ok(())
}

/// The same bytes in ordinary memory.
fn copy_of(bytes: &[u8]) -> Result<Vec<u8>, Error> {
    let mut copy = room(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// What the processor gives when one thread copies as much between ordinary buffers. `None`: there is no memory for
/// them.
fn own(from: &[Vec<u8>]) -> Option<f64> {
    let mut to = from.iter().map(|bytes| copy_of(bytes).ok()).collect::<Option<Vec<_>>>()?;
    let best = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        for (to, from) in to.iter_mut().zip(from) {
            to.copy_from_slice(std::hint::black_box(from));
        }
        std::hint::black_box(&mut to);
        start.elapsed()
    });
    rate(from.iter().map(Vec::len).sum(), best.min()?)
}

/// What came of the copies.
fn copied(case: &Case, result: Result<(), Fault>, measured: &Measured) -> Check {
    const NAME: &str = "copy";
    match result {
        Err(Fault::Wrong { at }) => {
            return Check::fail(
                NAME,
                format!("byte {at} came back wrong"),
                vec![
                    "test the machine's memory (memtest86+) and the device (for NVIDIA: dcgmi diag -r 3), and look for \
                     errors: sudo dmesg | grep -iE 'xid|aer|mce'"
                        .into(),
                ],
            );
        }
        Err(Fault::Error(error)) => {
            let fix = match &error {
                Error::OutOfMemory { .. } => {
                    "see memory, cgroup and address-space above, and whether others have the device's memory"
                }
                _ => "see whether others have the device's memory, and sudo dmesg for its driver's errors",
            };
            return Check::fail(NAME, one_line(&error), vec![fix.into()]);
        }
        Ok(()) => {}
    }
    let (Some(up), Some(down)) = (measured.upload, measured.download) else {
        return Check::ok(NAME, "every byte came back; too fast to measure");
    };
    let mut found = format!("every byte came back; up at {}, down at {}", speed(up), speed(down));
    let Some(expected) = measured.expected else { return Check::ok(NAME, found) };
    let (against, poor) =
        if case.opened() { ("its link should give", POOR) } else { ("this processor copies at", POOR_HOST) };
    found += &format!("; {against} {}", speed(expected));
    if up.min(down) >= expected * poor {
        return Check::ok(NAME, found);
    }
    let mut fix = vec!["run it again when nothing else copies or computes".into()];
    if case.opened() {
        fix.push("look at link and iommu, and at numa: memory on another node is slower".into());
    }
    Check { name: NAME, status: Status::Warn, found, fix }
}

/// GB/s of 10^9 bytes.
fn rate(bytes: usize, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| bytes as f64 / time.as_secs_f64() / 1e9)
}

fn one_line(error: &Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::super::place::Place;
    use super::super::system::System;
    use super::*;
    use pinpool::host::{Call, Failure, Fault as Planned, HostConfig, HostNode};

    fn case(system: &System) -> Case<'_> {
        let device = Device::on(&HostNode::new(HostConfig::new()).unwrap(), 0);
        Case {
            system,
            place: Place::of(system),
            spec: "host",
            device,
            capacity: 1 << 20,
            trial: 1 << 20,
            patience: Duration::from_secs(20),
            maker: None,
        }
    }

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

        let nowhere = tempfile::tempdir().unwrap();
        let system = System::new(nowhere.path());
        let check = copied(&case(&system), Err(Fault::Wrong { at: 7 }), &Measured::default());
        assert_eq!((check.status, check.fix.len()), (Status::Fail, 1));
        assert!(check.found.contains("byte 7"), "{check:?}");
    }

    #[test]
    fn slow_copies_are_told_and_fast_ones_are_not() {
        let nowhere = tempfile::tempdir().unwrap();
        let system = System::new(nowhere.path());
        let case = case(&system);
        let measured = |up, expected| Measured {
            upload: Some(up),
            download: Some(9.0),
            expected,
            ..Measured::default()
        };
        assert_eq!(copied(&case, Ok(()), &measured(9.0, Some(10.0))).status, Status::Ok);
        assert_eq!(copied(&case, Ok(()), &measured(0.1, None)).status, Status::Ok);
        let slow = copied(&case, Ok(()), &measured(1.0, Some(10.0)));
        assert_eq!(slow.status, Status::Warn);
        assert!(slow.found.contains("1.0 GB/s") && slow.found.contains("10.0 GB/s"), "{slow:?}");
    }

    #[test]
    fn slow_pinning_is_told() {
        let nowhere = tempfile::tempdir().unwrap();
        let system = System::new(nowhere.path());
        let case = case(&system);
        let mut measured = Measured { pin: Some(1e-6), ..Measured::default() };
        let check = pinned_at(&case, "little".into(), TELLING, &mut measured);
        assert_eq!(check.status, Status::Warn, "{check:?}");
        assert!(check.fix.iter().any(|fix| fix.contains("fragmentation")) && measured.touch.unwrap() > 0.0);
        measured.pin = Some(1e6);
        assert_eq!(pinned_at(&case, "much".into(), TELLING, &mut measured).status, Status::Ok);
        // Too little to judge.
        measured.pin = Some(1e-6);
        assert_eq!(pinned_at(&case, "little".into(), TELLING - 1, &mut measured).status, Status::Ok);
    }

    #[test]
    fn copies_go_both_ways_and_are_compared() {
        let nowhere = tempfile::tempdir().unwrap();
        let system = System::new(nowhere.path());
        let case = case(&system);
        let device = case.device.as_ref().unwrap();
        let pool = Pool::builder(device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
        let mut measured = Measured::default();
        assert!(copy(device, &pool, case.patience, &mut measured).is_ok());
        assert!(measured.upload.is_some() && measured.download.is_some());
        let stats = pool.stats();
        assert!((6..=8).contains(&stats.checkouts), "{stats:?}");
        assert_eq!(stats.checked_out_bytes + stats.in_flight_bytes, 0);
    }

    #[test]
    fn all_of_a_large_pool_is_copied() {
        let nowhere = tempfile::tempdir().unwrap();
        let system = System::new(nowhere.path());
        let case = case(&system);
        let device = case.device.as_ref().unwrap();
        // Extents of which each holds one copy and a rest.
        let builder = Pool::builder(device).capacity(80 << 20).initial(80 << 20).extent(20 << 20);
        let pool = builder.unpinned(Unpinned::Allow).build().unwrap();
        pool.wait_pinned(Some(case.patience)).unwrap();
        assert!(copy(device, &pool, case.patience, &mut Measured::default()).is_ok());
        assert_eq!(pool.stats().checkouts, 4);
    }

    #[test]
    fn a_device_that_hangs_is_given_up_on() {
        let nowhere = tempfile::tempdir().unwrap();
        let system = System::new(nowhere.path());
        let node = HostNode::new(HostConfig::new()).unwrap();
        let case =
            Case { device: Device::on(&node, 0), patience: Duration::from_millis(50), ..case(&system) };
        let mut checks = Vec::new();
        node.hang(0);
        let measured = probe(&case, &mut checks);
        if checks[1].status != Status::Fail {
            assert_eq!((checks[2].name, checks[2].status), ("copy", Status::Fail), "{checks:?}");
            assert!(checks[2].found.contains("timed out after "), "{checks:?}");
        }
        assert!(measured.upload.is_none());
        node.resume(0);
    }

    #[test]
    fn a_device_that_fails_is_told() {
        let nowhere = tempfile::tempdir().unwrap();
        let system = System::new(nowhere.path());
        let mut checks = Vec::new();
        probe(&case(&system), &mut checks);
        if checks[1].status == Status::Fail {
            println!("skipped: {}", checks[1].found);
            return;
        }
        for call in [Call::CreateStream, Call::Allocate, Call::Copy, Call::Pin] {
            let node = HostNode::new(HostConfig::new()).unwrap();
            let mut case = case(&system);
            case.device = Device::on(&node, 0);
            node.fail(Planned { device: 0, call, nth: 0, failure: Failure::DeviceLost });
            let mut checks = Vec::new();
            probe(&case, &mut checks);
            let failed: Vec<&str> =
                checks.iter().filter(|check| check.status == Status::Fail).map(|check| check.name).collect();
            assert_eq!(failed, [if call == Call::Pin { "pin" } else { "copy" }], "{call:?}: {checks:?}");
            let names: Vec<&str> = checks.iter().map(|check| check.name).collect();
            assert_eq!(names, ["device", "pin", "copy", "link"]);
        }
    }
}

//! What the server does in a run: everything that a pool offers, one topic after the other.

use super::audit::audit;
use super::*;

/// A part of what the server does.
pub type Topic = fn(&mut Server<'_>);

/// What a pool does with its own memory.
pub const OWN: &[Topic] = &[copies, memories, holds, shortage, rest];

/// Some topics. The report says what went wrong.
pub fn scenario(machine: &Machine, device: Device, topics: &[Topic]) -> Report {
    let mut report = Report::default();
    let build = || {
        let built = Pool::builder(&device)
            .capacity(CAPACITY)
            .initial(256 << 10)
            .region(256 << 10)
            .extent(128 << 10)
            .pin_threads(1)
            .before_unpin(|_| {})
            .build();
        built.inspect(|pool| drop(pool.wait_pinned(Some(HANG))))
    };
    // Twice each. With one fault in a run, only a lost device fails twice.
    let streams = || (0..3).map(|_| device.stream().or_else(|_| device.stream())).collect::<Result<Vec<_>>>();
    let memory = || device.alloc(SLOTS * SLOT).or_else(|_| device.alloc(SLOTS * SLOT));
    let mut made = None;
    let begun = build().or_else(|_| build()).and_then(|pool| {
        made = Some(pool.clone());
        Ok((pool, streams()?, memory()?))
    });
    let (pool, streams, memory) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            if !error.is_device_lost() {
                report.wrong.push(format!("beginning failed twice: {error}"));
            }
            report.lost = true;
            if let Some(pool) = made {
                audit(&pool, &device, machine, &mut report);
            }
            return report;
        }
    };
    let mut server = Server {
        machine,
        device,
        pool,
        streams,
        memory,
        expected: vec![None; SLOTS],
        sent: Vec::new(),
        seed: 0,
        report,
    };
    topics.iter().for_each(|topic| topic(&mut server));
    let Server { device, pool, streams, memory, mut report, .. } = server;
    audit(&pool, &device, machine, &mut report);
    drop((pool, streams, memory, device));
    report
}

fn copies(s: &mut Server<'_>) {
    for slot in 0..4 {
        s.upload_and_wait(slot % 2, slot);
    }
    for slot in 4..10 {
        s.upload_and_drop(slot % 2, slot);
    }
    s.synchronize(0);
    s.synchronize(1);
    for slot in 0..10 {
        match slot % 3 {
            0 => s.download(2, slot),
            1 => s.download_stream_ready(0, slot),
            _ => s.blocking(1, slot),
        };
    }
    // Within the device.
    let copied = s.again("copy", |s| {
        let flight = s.streams[0].copy(s.slot(0), s.slot(10))?;
        Ok(s.settle(flight))
    });
    if let Some(Some(())) = copied {
        s.expected[10] = s.expected[0];
        s.download(0, 10);
    }
    // Device memory whose handle is dropped while it is in use.
    let short_lived = s.again("alloc", |s| s.device.alloc(SLOT));
    if let (Some(target), Some(mut buf)) = (short_lived, s.checkout(SLOT)) {
        let seed = s.next_seed();
        fill(&mut buf, seed, SLOT);
        drop(s.streams[1].upload(buf, target));
        s.did("device memory dropped in use");
    }
}

/// Memory by its address, and copies between host memory.
fn memories(s: &mut Server<'_>) {
    let seed = s.next_seed();
    s.expected[11] = None;
    // On one stream, and then on another one that waits for it.
    let copied = s.again("wait_for", |s| {
        s.streams[0].upload_blocking(&bytes(seed as usize, SLOT), s.slot(12))?;
        let first = s.streams[0].copy(s.slot(12), s.slot(11))?;
        s.streams[1].wait_for(&s.streams[0])?;
        drop(first);
        let flight = s.streams[1].copy(s.slot(11), s.slot(12))?;
        Ok(s.settle(flight))
    });
    s.expected[12] = None;
    if let Some(Some(())) = copied {
        s.expected[11] = Some(seed);
        s.expected[12] = Some(seed);
        s.download(2, 12);
    }
    let mut back = vec![0; SLOT];
    let by_address = s.again("memory by its address", |s| {
        let (address, owner) = (s.slot(11)?.address(), s.memory.clone());
        // SAFETY: the owner keeps it, and all copies that use it are in order.
        let memory = unsafe { s.device.raw_memory(address, SLOT, owner) }?;
        s.streams[1].download_blocking(memory, &mut back)
    });
    if by_address.is_some() {
        s.compare(11, &back, "memory by its address");
    }
    let landed = s.again("copy on the host", |s| {
        let mut from = s.pool.checkout_timeout(SLOT, HANG)?;
        fill(&mut from, seed, SLOT);
        let landing = s.pool.checkout_timeout(SLOT, HANG)?;
        let (sent, landed) = s.streams[1].copy_host(from, landing)?;
        drop(sent);
        Ok(s.settle(landed))
    });
    if landed.flatten().is_some_and(|buf| *buf != *bytes(seed as usize, SLOT)) {
        s.wrong("a copy between host memory: wrong bytes, reported as done");
    }
}

fn holds(s: &mut Server<'_>) {
    // Waited for, and dropped.
    for dropped in [false, true] {
        if let Some(mut buf) = s.checkout(1000) {
            buf.extend_from_slice(&[7; 1000]);
            s.upload_and_drop(0, 11);
            match s.streams[0].hold(buf) {
                Ok(flight) if dropped => drop(flight),
                Ok(flight) => {
                    if s.settle(flight).is_some_and(|buf| *buf != [7; 1000]) {
                        s.wrong("a held buffer came back with other bytes");
                    }
                    s.did("hold");
                }
                Err(e) if e.error.is_device_lost() => {}
                Err(e) => s.wrong(format!("a hold was refused: {e}")),
            }
        }
    }
    // One buffer that feeds copies on three streams.
    if let Some(mut buf) = s.checkout(SLOT) {
        let seed = s.next_seed();
        fill(&mut buf, seed, SLOT);
        let shared = Arc::new(buf);
        let mut flights = Vec::new();
        for stream in 0..3 {
            s.expected[13 + stream] = None;
            let sent = s.again("shared upload", |s| {
                Ok(s.streams[stream].upload(shared.clone(), s.slot(13 + stream))?)
            });
            flights.extend(sent.map(|flight| (stream, flight)));
        }
        drop(shared);
        for (stream, flight) in flights {
            if s.settle(flight).is_some() {
                s.expected[13 + stream] = Some(seed);
            }
        }
        for slot in 13..16 {
            s.download(2, slot);
        }
    }
    s.synchronize(0);
    s.synchronize(1);
    for slot in 11..13 {
        s.download(0, slot);
    }
}

/// The pool runs short: growth, claims, waiting.
fn shortage(s: &mut Server<'_>) {
    let (mut hogs, mut quiet) = (Vec::new(), 0);
    // Until all that the pool may hold is pinned and used. A region that fails is tried again.
    while quiet < 8 {
        match s.pool.try_checkout(BIG) {
            Ok(buf) => {
                hogs.push(buf);
                quiet = 0;
            }
            Err(Error::Exhausted(_)) => {
                drop(s.pool.wait_pinned(Some(HANG)));
                s.nudge();
                quiet += 1;
            }
            Err(e) => {
                s.wrong(format!("running out ended with {e}"));
                break;
            }
        }
    }
    for buf in &mut hogs {
        buf.extend_from_slice(&[9; 1]);
    }
    if hogs.len() >= 5 {
        s.did("growth");
    }
    // All of them are sent and dropped.
    s.machine.hang(true);
    let kept = hogs.len() / 2;
    for (at, buf) in hogs.into_iter().enumerate() {
        s.expected[20] = None;
        let target = s.memory.slice(20 * SLOT..20 * SLOT + 1);
        let flight = s.streams[usize::from(at >= kept)].upload(buf, target);
        drop(flight);
    }
    // Claimed: unused, on another stream, used.
    let mut claimed = 0;
    for way in 0..3 {
        if let Ok(buf) = s.pool.try_checkout_on(&s.streams[0], BIG) {
            claimed += u32::from(buf.was_claimed());
            match way {
                0 => drop(buf),
                1 => match s.streams[1].download(s.slot(0), buf) {
                    Err(SubmitError {
                        error: Error::Mismatch { what: "a stream-ready buffer", .. },
                        buffer: Some(buf),
                    }) => drop(buf),
                    Err(e) if e.error.is_device_lost() => {}
                    other => s.wrong(format!("a stream-ready buffer on another stream: {other:?}")),
                },
                _ => {
                    if let Ok(flight) = s.streams[0].download(s.slot(0), buf) {
                        resume(s.machine);
                        if let Some(buf) = s.settle(flight) {
                            s.compare(0, &buf, "download into a claimed buffer");
                        }
                        s.did("download into a claimed buffer");
                    }
                }
            }
        }
        s.check(&s.pool.clone());
    }
    if claimed > 0 {
        s.did("claim");
    }
    resume(s.machine);
    if let Ok(buf) = s.pool.try_checkout_on(&s.streams[1], BIG) {
        // Host-ready after waiting.
        match buf.wait() {
            Ok(buf) => drop(buf),
            Err(e) if e.is_device_lost() => {}
            Err(Error::Timeout(_)) => resume(s.machine),
            Err(e) => s.wrong(format!("waiting for a claimed buffer: {e}")),
        }
    }
    // Every request waits until memory returns: a thread, a task, several at once.
    for stream in [0, 1] {
        let mut hogs = Vec::new();
        while let Ok(mut buf) = s.pool.try_checkout(BIG) {
            buf.extend_from_slice(&[9; 1]);
            hogs.push(buf);
        }
        for buf in hogs {
            drop(s.streams[stream].upload(buf, s.memory.slice(20 * SLOT..20 * SLOT + 1)));
        }
        if stream == 0 {
            drop(s.checkout(BIG));
            let both = s.pool.checkout_many_async([Request::new(BIG), Request::new(SLOT)]);
            drop(s.block_on("await several", both));
        } else {
            let one = s.pool.checkout_async(BIG);
            drop(s.block_on("await", one));
            let both = s.again("several", |s| {
                s.pool.checkout_many(&[Request::new(BIG), Request::new(BIG)], Some(HANG))
            });
            drop(both);
        }
    }
    s.synchronize(0);
    s.synchronize(1);
}

/// Trimming, and a last round trip that shows that everything still works.
fn rest(s: &mut Server<'_>) {
    while s.nudge() {}
    let before = s.pool.regions().len();
    let trimmed = s.pool.trim(0);
    if trimmed > 0 {
        s.did("trim");
        if s.pool.regions().len() >= before {
            s.wrong("a region is listed after it was trimmed");
        }
    }
    for (stream, slot) in [(0, 21), (1, 22), (2, 23)] {
        s.upload_and_wait(stream, slot);
        s.download(stream, slot);
    }
}

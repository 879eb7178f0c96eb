//! Every device call fails once, in every way, and nothing is lost.
//!
//! One scenario uses everything that the pool has. It is run once without faults, and the calls that it makes to the
//! device are recorded. Then it is run again for each of these calls and each kind of failure, with exactly that call
//! failing. The scenario deals with errors as a careful server would: it tries again where that makes sense, goes on
//! without where it does not, and never believes an error.
//!
//! After each run: nothing panicked or hung, `check()` finds every byte, nothing is checked out or in flight, bytes are
//! quarantined only if the device was lost, what was reported as done holds the right bytes, and when pool, streams and
//! device are gone the device has everything back (but for what the failing call itself was to give back).
//!
//! On the stepped device the replay is exact: the same calls in the same order up to the one that fails. On the
//! threaded device calls interleave, so there the first few calls of each kind are made to fail.

#![allow(unsafe_code, reason = "memory by its address")]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode, HostUsage};
use pinpool::{
    Device, DeviceBuffer, DeviceSlice, Error, InFlight, Lend, PinnedBuf, Pool, Request, Result, Stream,
    SubmitError,
};

/// Bytes of the pieces of device memory that copies go to.
const SLOT: usize = 2 << 10;
const SLOTS: usize = 24;
/// A length of which few fit into the pool.
const BIG: usize = 100 << 10;
const CAPACITY: usize = 1 << 20;
const RESERVE: usize = 64 << 10;
/// Longer than anything takes here: what is not there by then hangs.
const HANG: Duration = Duration::from_secs(20);

fn fill(buf: &mut PinnedBuf, seed: u64, len: usize) {
    buf.clear();
    buf.extend_from_slice(&pattern(seed, len));
}

/// Bytes that differ between seeds at every place.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (seed.wrapping_mul(0x9e37_79b9).wrapping_add(i * 7 + (i >> 8)) >> 3) as u8)
        .collect()
}

/// What a run did and what was wrong with it.
#[derive(Default)]
struct Report {
    wrong: Vec<String>,
    /// How often each thing was done with success, so that a clean run can show that it did everything.
    done: Vec<&'static str>,
    quarantined: usize,
    lost: bool,
    struck: bool,
}

struct Server<'a> {
    node: &'a HostNode,
    threaded: bool,
    device: Device,
    pool: Pool,
    streams: Vec<Stream>,
    memory: DeviceBuffer,
    /// What each piece of device memory holds for certain.
    expected: Vec<Option<u64>>,
    /// Uploads whose handle was dropped: stream, piece, seed. Certain when the stream has been waited for.
    sent: Vec<(usize, usize, u64)>,
    seed: u64,
    report: Report,
}

impl Server<'_> {
    fn wrong(&mut self, text: impl Into<String>) {
        self.report.wrong.push(text.into());
    }

    fn did(&mut self, what: &'static str) {
        if !self.report.done.contains(&what) {
            self.report.done.push(what);
        }
    }

    /// Tries twice. With one fault in a run, only a lost device fails twice.
    fn again<R>(&mut self, what: &'static str, mut call: impl FnMut(&mut Self) -> Result<R>) -> Option<R> {
        let mut last = None;
        for _ in 0..2 {
            match call(self) {
                Ok(value) => {
                    self.did(what);
                    return Some(value);
                }
                Err(error) if error.is_sticky() => return None,
                Err(error) => last = Some(error),
            }
            // Whatever is stalled goes on, as after an operator's visit.
            self.node.resume(0);
        }
        if !self.dead() {
            self.wrong(format!("{what} failed twice: {last:?}"));
        }
        None
    }

    fn dead(&self) -> bool {
        self.device.lost().is_some()
    }

    fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    fn slot(&self, slot: usize) -> Result<DeviceSlice> {
        self.memory.slice(slot * SLOT..(slot + 1) * SLOT)
    }

    fn checkout(&mut self, len: usize) -> Option<PinnedBuf> {
        self.again("checkout", |s| s.pool.checkout_timeout(len, HANG))
    }

    /// Waits for what is in flight. Only with the device may it be lost.
    fn settle<B: Lend>(&mut self, mut flight: InFlight<B>) -> Option<B> {
        for _ in 0..2 {
            match flight.wait_timeout(HANG) {
                Ok(value) => return Some(value),
                Err(SubmitError { buffer: Some(same), .. }) => {
                    self.node.resume(0);
                    flight = same;
                }
                Err(SubmitError { error, buffer: None }) => {
                    if !error.is_sticky() {
                        self.wrong(format!("a wait ended with {error}, and the device is not lost"));
                    }
                    return None;
                }
            }
        }
        self.wrong("a wait hangs");
        None
    }

    /// Uploads a new pattern. The seed comes with the handle.
    fn upload(&mut self, stream: usize, slot: usize) -> Option<(InFlight<PinnedBuf>, u64)> {
        let seed = self.next_seed();
        let mut buf = self.checkout(SLOT)?;
        fill(&mut buf, seed, SLOT);
        for _ in 0..2 {
            // From here on nobody knows what is there, until a copy is reported as done.
            self.expected[slot] = None;
            let target = self.slot(slot);
            match self.streams[stream].upload(buf, target) {
                Ok(flight) => return Some((flight, seed)),
                Err(SubmitError { error, buffer }) => {
                    if error.is_sticky() {
                        return None;
                    }
                    buf = match buffer {
                        Some(buf) => {
                            if *buf != *pattern(seed, SLOT) {
                                self.wrong("a refused upload changed its buffer");
                            }
                            buf
                        }
                        None => {
                            let mut buf = self.checkout(SLOT)?;
                            fill(&mut buf, seed, SLOT);
                            buf
                        }
                    };
                }
            }
        }
        self.wrong("an upload failed twice");
        None
    }

    fn upload_and_wait(&mut self, stream: usize, slot: usize) -> Option<()> {
        let (flight, seed) = self.upload(stream, slot)?;
        let buf = self.settle(flight)?;
        if *buf != *pattern(seed, SLOT) {
            self.wrong("a buffer came back from an upload with other bytes");
        }
        self.expected[slot] = Some(seed);
        self.did("upload");
        Some(())
    }

    fn upload_and_drop(&mut self, stream: usize, slot: usize) -> Option<()> {
        let (flight, seed) = self.upload(stream, slot)?;
        drop(flight);
        self.sent.push((stream, slot, seed));
        self.did("drop in flight");
        Some(())
    }

    /// After this, what was sent on the stream is certain.
    fn synchronize(&mut self, stream: usize) {
        if self.again("synchronize", |s| s.streams[stream].synchronize()).is_some() {
            for (on, slot, seed) in std::mem::take(&mut self.sent) {
                if on == stream {
                    self.expected[slot] = Some(seed);
                } else {
                    self.sent.push((on, slot, seed));
                }
            }
        }
    }

    fn compare(&mut self, slot: usize, bytes: &[u8], how: &str) {
        if bytes.len() != SLOT {
            self.wrong(format!("{how}: {} bytes came", bytes.len()));
        }
        if let Some(seed) = self.expected[slot] {
            if *bytes != *pattern(seed, SLOT) {
                self.wrong(format!("{how}: wrong bytes at {slot}, reported as done"));
            }
        }
    }

    fn download(&mut self, stream: usize, slot: usize) -> Option<()> {
        let mut landing = self.checkout(SLOT)?;
        for _ in 0..2 {
            let source = self.slot(slot);
            match self.streams[stream].download(source, landing) {
                Ok(flight) => {
                    let buf = self.settle(flight)?;
                    self.compare(slot, &buf, "download");
                    self.did("download");
                    return Some(());
                }
                Err(e) if e.error.is_sticky() => return None,
                Err(SubmitError { buffer: Some(buf), .. }) => landing = buf,
                Err(SubmitError { buffer: None, .. }) => landing = self.checkout(SLOT)?,
            }
        }
        self.wrong("a download failed twice");
        None
    }

    fn download_stream_ready(&mut self, stream: usize, slot: usize) -> Option<()> {
        for _ in 0..2 {
            let landing = self.again("checkout_on", |s| s.pool.checkout_on(&s.streams[stream], SLOT))?;
            let source = self.slot(slot);
            match self.streams[stream].download(source, landing) {
                Ok(flight) => {
                    let buf = self.settle(flight)?;
                    self.compare(slot, &buf, "stream-ready download");
                    self.did("stream-ready download");
                    return Some(());
                }
                Err(e) if e.error.is_sticky() => return None,
                Err(_) => {}
            }
        }
        self.wrong("a stream-ready download failed twice");
        None
    }

    fn blocking(&mut self, stream: usize, slot: usize) -> Option<()> {
        let seed = self.next_seed();
        self.expected[slot] = None;
        self.again("upload_blocking", |s| {
            s.streams[stream].upload_blocking(&pattern(seed, SLOT), s.slot(slot))
        })?;
        self.expected[slot] = Some(seed);
        let mut back = vec![0; SLOT];
        self.again("download_blocking", |s| s.streams[stream].download_blocking(s.slot(slot), &mut back))?;
        self.compare(slot, &back, "blocking download");
        Some(())
    }

    /// Moves a device that does not move by itself, or waits a little for one that does.
    fn nudge(&self) -> bool {
        let moved = self.node.step() | self.device.reap();
        if self.threaded {
            std::thread::sleep(Duration::from_micros(200));
        }
        moved
    }

    fn block_on<R>(&mut self, what: &'static str, future: impl Future<Output = Result<R>>) -> Option<R> {
        let mut future = pin!(future);
        let (since, mut quiet) = (Instant::now(), 0);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(Ok(value)) => {
                    self.did(what);
                    return Some(value);
                }
                Poll::Ready(Err(_)) => return None,
                Poll::Pending => {}
            }
            quiet = if self.nudge() { 0 } else { quiet + 1 };
            if quiet % 8 == 7 {
                self.node.resume(0);
            }
            let hangs = if self.threaded { since.elapsed() > HANG } else { quiet > 64 };
            if hangs {
                if !self.dead() {
                    self.wrong(format!("{what} hangs"));
                }
                return None;
            }
        }
    }
}

/// Everything that there is to do. The report says what went wrong.
fn scenario(node: &HostNode, threaded: bool) -> Report {
    let mut report = Report::default();
    let device = Device::on(node, 0).expect("opening makes no device call");
    let gone = Arc::new(AtomicU64::new(0));
    let build = || {
        let gone = gone.clone();
        let built = Pool::builder(&device)
            .capacity(CAPACITY)
            .initial(256 << 10)
            .region(256 << 10)
            .extent(128 << 10)
            .pin_threads(1)
            .reserve("spare", RESERVE)
            .before_unpin(move |_| {
                gone.fetch_add(1, Ordering::Relaxed);
            })
            .build();
        // With threads the second extent may still be under way, and fail later than the call.
        built.inspect(|pool| drop(pool.wait_pinned(Some(HANG))))
    };
    let twice = |what: &str, report: &mut Report, error: Error| {
        if !error.is_sticky() {
            report.wrong.push(format!("{what} failed twice: {error}"));
        }
    };
    let pool = match build().or_else(|_| build()) {
        Ok(pool) => pool,
        Err(error) => {
            twice("build", &mut report, error);
            report.lost = true;
            return report;
        }
    };
    let mut streams = Vec::new();
    for _ in 0..3 {
        match device.stream().or_else(|_| device.stream()) {
            Ok(stream) => streams.push(stream),
            Err(error) => twice("stream", &mut report, error),
        }
    }
    let memory = device.alloc(SLOTS * SLOT).or_else(|_| device.alloc(SLOTS * SLOT));
    if let Err(error) = &memory {
        twice("alloc", &mut report, error.clone());
    }
    let (3, Ok(memory)) = (streams.len(), memory) else {
        report.lost = true;
        audit(&pool, &device, node, threaded, &mut report);
        return report;
    };
    let mut server = Server {
        node,
        threaded,
        device,
        pool,
        streams,
        memory,
        expected: vec![None; SLOTS],
        sent: Vec::new(),
        seed: 0,
        report,
    };
    copies(&mut server);
    memories(&mut server);
    holds(&mut server);
    shortage(&mut server);
    rest(&mut server);
    let Server { device, pool, streams, memory, mut report, .. } = server;
    audit(&pool, &device, node, threaded, &mut report);
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
    // Device memory that goes while it is in use.
    let short_lived = s.again("alloc", |s| s.device.alloc(SLOT));
    if let (Some(target), Some(mut buf)) = (short_lived, s.checkout(SLOT)) {
        let seed = s.next_seed();
        fill(&mut buf, seed, SLOT);
        drop(s.streams[1].upload(buf, target));
        s.did("device memory dropped in use");
    }
}

/// Memory in stream order, memory by its address, and copies between host memory.
fn memories(s: &mut Server<'_>) {
    let seed = s.next_seed();
    s.expected[11] = None;
    // Used on another stream than the one that it was allocated on, and dropped in use.
    let copied = s.again("memory in stream order", |s| {
        let memory = s.streams[2].alloc(SLOT)?;
        s.streams[0].upload_blocking(&pattern(seed, SLOT), &memory)?;
        let flight = s.streams[1].copy(&memory, s.slot(11))?;
        drop(memory);
        Ok(s.settle(flight))
    });
    if let Some(Some(())) = copied {
        s.expected[11] = Some(seed);
        s.download(1, 11);
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
    if landed.flatten().is_some_and(|buf| *buf != *pattern(seed, SLOT)) {
        s.wrong("a copy between host memory: wrong bytes, reported as done");
    }
}

fn holds(s: &mut Server<'_>) {
    // For one stream, waited for and dropped; for all of them.
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
                Err(e) if e.error.is_sticky() => {}
                Err(e) => s.wrong(format!("a hold was refused: {e}")),
            }
        }
        if let Some(mut buf) = s.checkout(1000) {
            buf.extend_from_slice(&[8; 1000]);
            s.upload_and_drop(1, 12);
            let all: Vec<&Stream> = s.streams.iter().collect();
            match Stream::hold_on_all(&all, buf) {
                Ok(flight) if dropped => drop(flight),
                Ok(flight) => {
                    if s.settle(flight).is_some_and(|buf| *buf != [8; 1000]) {
                        s.wrong("a buffer held by several streams came back with other bytes");
                    }
                    s.did("hold on all");
                }
                Err(e) if e.error.is_sticky() => {}
                Err(e) => s.wrong(format!("a hold on all was refused: {e}")),
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

/// The pool runs short: growth, claims, waiting, the reserve, plain memory.
fn shortage(s: &mut Server<'_>) {
    let (mut hogs, mut quiet) = (Vec::new(), 0);
    // Until all that the pool may hold is pinned and used. A region that fails is tried again.
    while quiet < 8 {
        match s.pool.try_checkout(BIG) {
            Ok(buf) => {
                hogs.push(buf);
                quiet = 0;
            }
            Err(Error::Exhausted { .. }) => {
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
    match s.pool.checkout_or_unpinned(BIG) {
        Ok(pinpool::HostBuf::Unpinned(_)) => s.did("plain memory"),
        Ok(pinpool::HostBuf::Pinned(_)) => {}
        Err(e) if e.is_sticky() => {}
        Err(e) => s.wrong(format!("plain memory was refused: {e}")),
    }
    if let Some(buf) = s.again("reserve", |s| s.pool.try_checkout(Request::new(SLOT).reserve("spare"))) {
        let token = buf.into_token();
        if s.again("token", |s| s.pool.redeem(token)).is_some() && s.pool.redeem(token).is_ok() {
            s.wrong("a token was redeemed twice");
        }
    }
    // All of them go in flight and are dropped.
    s.node.hang(0);
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
                    Err(SubmitError { error: Error::WrongStream, buffer: Some(buf) }) => drop(buf),
                    Err(e) if e.error.is_sticky() => {}
                    other => s.wrong(format!("a stream-ready buffer on another stream: {other:?}")),
                },
                _ => match s.streams[0].download(s.slot(0), buf) {
                    Ok(flight) => {
                        s.node.resume(0);
                        if let Some(buf) = s.settle(flight) {
                            s.compare(0, &buf, "download into a claimed buffer");
                        }
                        s.did("download into a claimed buffer");
                    }
                    Err(e) if e.error.is_sticky() => {}
                    Err(_) => {}
                },
            }
        }
        if let Err(error) = s.pool.check() {
            s.wrong(format!("while claimed: {error}"));
        }
    }
    if claimed > 0 {
        s.did("claim");
    }
    s.node.resume(0);
    if let Ok(buf) = s.pool.try_checkout_on(&s.streams[1], BIG) {
        // Host-ready after waiting.
        match buf.wait() {
            Ok(buf) => drop(buf),
            Err(e) if e.is_sticky() => {}
            Err(Error::Timeout(_)) => s.node.resume(0),
            Err(e) => s.wrong(format!("waiting for a claimed buffer: {e}")),
        }
    }
    // Everybody waits until something comes back: a thread, a task, several at once.
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

/// Drives everything to its end and looks for bytes that are not where they belong.
fn audit(pool: &Pool, device: &Device, node: &HostNode, threaded: bool, report: &mut Report) {
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
    let census = pool.check();
    let stats = pool.stats();
    let sum = stats.free_bytes
        + stats.checked_out_bytes
        + stats.in_flight_bytes
        + stats.quarantined_bytes
        + stats.cut_bytes;
    if let Err(error) = census {
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
fn leftovers(
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
            && (left.allocations == 0 || (own(Call::Free) || own(Call::FreeOn)) && left.allocations == 1)
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

const KINDS: [Failure; 6] = [
    Failure::Argument,
    Failure::Moment,
    Failure::Sticky,
    Failure::RunsAnyway,
    Failure::Capture,
    Failure::Stall,
];

/// What a clean run must have done, so that each of it can fail.
const EVERYTHING: [&str; 22] = [
    "checkout",
    "upload",
    "drop in flight",
    "synchronize",
    "download",
    "stream-ready download",
    "upload_blocking",
    "download_blocking",
    "copy",
    "device memory dropped in use",
    "memory in stream order",
    "memory by its address",
    "copy on the host",
    "hold",
    "hold on all",
    "shared upload",
    "growth",
    "plain memory",
    "reserve",
    "claim",
    "download into a claimed buffer",
    "trim",
];

/// Calls that this scenario makes. (Other memory than the pool's own is in `host_memory.rs`.)
fn expected_calls() -> impl Iterator<Item = Call> {
    let elsewhere = [Call::AllocateHost, Call::FreeHost, Call::DeviceAddress];
    Call::ALL.into_iter().filter(move |call| !elsewhere.contains(call))
}

fn stepped() -> HostNode {
    HostNode::new(HostConfig::new().memory(4 << 20).stepped(11)).unwrap()
}

/// One run with one failing call. What went wrong, if anything did.
fn run(node: &HostNode, threaded: bool, failed: Option<(Call, Failure)>) -> (Report, Vec<String>) {
    let done = catch_unwind(AssertUnwindSafe(|| scenario(node, threaded)));
    let struck = node.clear_faults() == 0;
    let Ok(mut report) = done else { return (Report::default(), vec!["a panic".into()]) };
    report.struck = struck;
    let mut wrong = std::mem::take(&mut report.wrong);
    let failed = failed.filter(|_| struck);
    wrong.extend(leftovers(node, threaded, failed, &report));
    let sticky = failed.is_some_and(|f| f.1 == Failure::Sticky);
    if report.quarantined > 0 && !sticky {
        wrong.push(format!("{} bytes are quarantined without a reason", report.quarantined));
    }
    if report.lost && !sticky {
        wrong.push("the device counts as lost without a reason".into());
    }
    (report, wrong)
}

/// Fails with the findings, the same one of several calls once.
fn assert_none(mut findings: Vec<(Failure, Call, u64, String)>) {
    let all = findings.len();
    findings.sort_by_key(|(failure, call, _, text)| (format!("{failure:?}"), *call, text.clone()));
    findings.dedup_by(|a, b| (a.0, a.1, &a.3) == (b.0, b.1, &b.3));
    let lines: Vec<String> = findings
        .iter()
        .map(|(failure, call, nth, text)| format!("{failure:?} of {call:?} {nth}: {text}"))
        .collect();
    assert!(all == 0, "{all} findings:\n{}", lines.join("\n"));
}

#[test]
fn each_call_fails_once() {
    let node = stepped();
    node.start_trace();
    let (report, wrong) = run(&node, false, None);
    let trace = node.stop_trace();
    assert_eq!(wrong, Vec::<String>::new(), "without a fault");
    for what in EVERYTHING.into_iter().chain(["await several", "await", "several", "token"]) {
        assert!(report.done.contains(&what), "a clean run does not do this: {what}");
    }
    for call in expected_calls() {
        assert!(trace.contains(&call), "a clean run does not call {call:?}");
    }
    let mut failures = Vec::new();
    for failure in KINDS {
        let mut failed = 0;
        for (nth, &call) in trace.iter().enumerate() {
            let node = stepped();
            node.start_trace();
            node.fail_any(nth as u64, failure);
            let (_, mut wrong) = run(&node, false, Some((call, failure)));
            let replayed = node.stop_trace();
            if replayed.get(..=nth) == Some(&trace[..=nth]) {
                failed += 1;
            } else {
                wrong.push("the replay took another way before the fault".into());
            }
            failures.extend(wrong.into_iter().map(|text| (failure, call, nth as u64, text)));
        }
        println!("{failure:?}: {failed} of {} calls failed once", trace.len());
        assert_eq!(failed, trace.len());
    }
    assert_none(failures);
}

#[test]
fn calls_fail_on_threads() {
    let mut failures = Vec::new();
    for failure in KINDS {
        let (mut failed, mut all) = (0, 0);
        for call in expected_calls() {
            for nth in [0, 1, 4, 11] {
                all += 1;
                let config = HostConfig::new().memory(4 << 20).late(Duration::from_micros(20), nth);
                let node = HostNode::new(config).unwrap();
                node.fail(Fault { device: 0, call, nth, failure });
                let over = AtomicBool::new(false);
                let (report, wrong) = std::thread::scope(|scope| {
                    if failure == Failure::Stall {
                        // A blocking copy that stalls comes back when somebody resumes the device.
                        scope.spawn(|| {
                            while !over.load(Ordering::Relaxed) {
                                std::thread::sleep(Duration::from_millis(5));
                                node.resume(0);
                            }
                        });
                    }
                    let done = run(&node, true, Some((call, failure)));
                    over.store(true, Ordering::Relaxed);
                    done
                });
                failed += u32::from(report.struck);
                failures.extend(wrong.into_iter().map(|text| (failure, call, nth, text)));
            }
        }
        println!("{failure:?}, on threads: {failed} of {all} calls failed once (the others did not happen)");
    }
    assert_none(failures);
}

#[test]
fn a_lost_stream_does_not_take_the_device_along() {
    let node = stepped();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(256 << 10).build().unwrap();
    let (lost, other) = (device.stream().unwrap(), device.stream().unwrap());
    let mut buf = pool.checkout(SLOT).unwrap();
    fill(&mut buf, 1, SLOT);
    // The only handle to the target goes with the copy.
    drop(lost.upload(buf, device.alloc(SLOT).unwrap()).unwrap());
    // No mark can ever be made: recording fails until the pool gives up.
    for _ in 0..1200 {
        node.fail(Fault { device: 0, call: Call::Record, nth: 0, failure: Failure::Moment });
    }
    for _ in 0..1200 {
        device.reap();
    }
    let error = lost.synchronize().unwrap_err();
    assert!(matches!(error, Error::Device(_)) && !error.is_sticky(), "{error}");
    node.clear_faults();
    let stats = pool.stats();
    assert_eq!((stats.in_flight_bytes, stats.quarantined_bytes), (0, 2112), "{stats:?}");
    assert!(lost.hold(pool.checkout(1).unwrap()).is_err_and(|e| e.buffer.is_some()), "it fails at once");
    // The copy was submitted all the same, and runs now. Its target must still be there.
    while node.step() {}
    assert_eq!(device.lost(), None);
    let target = device.alloc(SLOT).unwrap();
    let mut buf = pool.checkout(SLOT).unwrap();
    fill(&mut buf, 2, SLOT);
    other.upload(buf, &target).unwrap().wait().unwrap();
    let back = other.download(&target, pool.checkout(SLOT).unwrap()).unwrap().wait().unwrap();
    assert!(*back == *pattern(2, SLOT));
    drop(back);
    let end = pool.shutdown(HANG);
    assert_eq!((end.drained, end.outstanding, end.quarantined_bytes), (false, 1, 2112));
}

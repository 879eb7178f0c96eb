//! Any transfers by a copier: pieces of any lengths, alignments, overlaps and allocations, both ways, borrowed and
//! owned, on a device that the input steps, stalls, fails and loses.
//!
//! The device is a simulated GPU that moves by hand, whose copier has no threads: the input determines the whole run.
//!
//! # What is checked
//!
//! A plain model has the bytes of the device's memory, or that they are unknown: where a transfer is under way, where
//! two of them or two pieces of one met, and where one has failed.
//!
//! - A transfer that ends well has moved every byte, and so has one that ends otherwise in the pieces before
//!   [`landed_to`](pinpool::copier::Progress::landed_to). Nothing beside the pieces is written, on either side.
//! - Buffers come back in their order with their bytes, from a call that is refused too.
//! - A call has read what it borrows when it returns: the source is overwritten then.
//! - Without a fault of the input's there is no error.
//! - At the end nothing is in use, and without faults nothing is quarantined, and the device has everything back.
#![no_main]

mod bytes;
mod foreign;
#[path = "../../tests/support/hand.rs"]
#[allow(dead_code)]
mod hand;

use std::future::Future;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::Poll;
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pinpool::copier::Transfer;
use pinpool::{Copier, Device, DeviceSlice, Error, PinnedBuf, Pool, Stream, SubmitError, Unpinned};

use bytes::{compare, fresh, known, unmap};
use hand::{CALLS, Failure, Machine};

/// The most operations of one input, so that it takes a few milliseconds.
const OPS: usize = 24;
const FLIGHTS: usize = 6;
/// Allocations of device memory, and the bytes of each.
const MEMORIES: usize = 3;
const MEMORY: usize = 160 << 10;
/// The most pieces and bytes of a call.
const PIECES: usize = 500;
const BYTES: usize = 256 << 10;

#[derive(Arbitrary, Debug, Clone, Copy)]
struct Setup {
    seed: u8,
    chunk: u8,
    segments: u8,
    mood: u8,
}

/// Pieces at even distances, or one.
#[derive(Arbitrary, Debug, Clone, Copy)]
struct Row {
    memory: u8,
    at: u16,
    len: u16,
    kind: u8,
    gap: i8,
    times: u8,
    shift: u8,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Then {
    Wait,
    Keep,
    Drop,
    Cancel,
}

#[derive(Arbitrary, Debug, Clone)]
enum Op {
    Upload { rows: Vec<Row>, owned: bool, full: bool, wrong: u8, then: Then },
    Download { rows: Vec<Row>, owned: bool, full: bool, wrong: u8, then: Then },
    Wait { at: u8 },
    WaitFor { at: u8, micros: u8 },
    Poll { at: u8 },
    Landed { at: u8, piece: u8 },
    Order { at: u8 },
    Cancel { at: u8 },
    Forget { at: u8 },
    Step { count: u8 },
    Reap,
    Resume,
    Fail { call: u8, nth: u8, failure: u8 },
    FailAny { nth: u8, failure: u8 },
    Kill { sure: u8 },
}

/// A byte of device memory.
#[derive(Clone, Copy, Default)]
struct Cell {
    /// `None`: unknown.
    value: Option<u8>,
    /// Pieces under way that write it.
    writers: u16,
    /// Two of these met here.
    torn: bool,
    /// A transfer has failed that writes it: a copy may still do so, at any time.
    lost: bool,
}

/// A place on the device.
#[derive(Clone, Copy, Debug)]
struct Span {
    memory: usize,
    at: usize,
    len: usize,
    /// Of the host's side, from a multiple of 16.
    shift: usize,
}

/// What a transfer does, as the model knows it.
struct Plan {
    spans: Vec<Span>,
    /// The bytes of each piece: those that are sent, or those that are expected.
    bytes: Vec<Vec<Option<u8>>>,
    cancelled: bool,
}

impl Plan {
    /// How many pieces have all their bytes before this offset.
    fn landed(&self, to: u64) -> usize {
        let mut end = 0;
        self.bytes
            .iter()
            .take_while(|bytes| {
                end += bytes.len() as u64;
                end <= to
            })
            .count()
    }
}

/// The GPU, for one input after another.
static MACHINE: LazyLock<Machine> = LazyLock::new(|| Machine::new(1, 8 << 20, 0));

/// What comes of buffers.
type Came = Result<Vec<PinnedBuf>, SubmitError<Vec<PinnedBuf>>>;

struct Flight {
    up: bool,
    handle: Transfer<Vec<PinnedBuf>>,
    plan: Plan,
}

struct World {
    device: Device,
    pool: Pool,
    /// Where buffers of the program's come from.
    from: Pool,
    copier: Copier,
    stream: Stream,
    memories: Vec<DeviceSlice>,
    cells: Vec<Vec<Cell>>,
    flights: Vec<Flight>,
    /// Transfers without a handle.
    detached: Vec<Plan>,
    faults: bool,
    next: u32,
}

fn spans(rows: &[Row]) -> Vec<Span> {
    let (mut spans, mut bytes) = (Vec::new(), 0);
    for row in rows {
        let len = usize::from(row.len);
        let len = match row.kind % 8 {
            // No range of device memory is empty.
            0 => 1,
            1..=3 => len % 300,
            4..=6 => len % 5000,
            _ => len,
        }
        .max(1);
        let times = if row.kind / 8 % 4 == 0 { 1 } else { usize::from(row.times) + 1 };
        let mut at = (usize::from(row.at) * 3) as isize;
        for _ in 0..times {
            let fits = usize::try_from(at).is_ok_and(|at| at + len <= MEMORY);
            if !fits || spans.len() == PIECES || bytes + len > BYTES {
                break;
            }
            let memory = usize::from(row.memory) % MEMORIES;
            spans.push(Span { memory, at: at as usize, len, shift: usize::from(row.shift % 16) });
            bytes += len;
            at += len as isize + isize::from(row.gap) / if row.kind / 32 % 2 == 0 { 1 } else { 128 };
        }
    }
    spans
}

impl World {
    fn new(setup: Setup) -> Self {
        MACHINE.renew(setup.seed.into());
        let device = MACHINE.device(0);
        let chunk = (16 << 10) << (setup.chunk % 4);
        let segments = 1 + usize::from(setup.segments % 5);
        let pool = |capacity: usize| {
            let pool = Pool::builder(&device).capacity(capacity).initial(capacity).unpinned(Unpinned::Allow);
            pool.pin_threads(1).build().expect("a sane configuration")
        };
        let from = pool(1 << 20);
        // A segment has room beside its chunk, and is rounded to its class.
        let share = segments * (chunk + chunk / 4 + (24 << 10));
        let pool = pool(share + (64 << 10));
        foreign::behave(setup.mood, &pool);
        let copier = Copier::builder(&pool, &device).threads(3).chunk(chunk).share(share);
        let copier = copier.build().expect("a sane configuration");
        let memories = (0..MEMORIES).map(|_| device.alloc(MEMORY).expect("nothing fails yet")).collect();
        Self {
            stream: device.stream().expect("nothing fails yet"),
            device,
            pool,
            from,
            copier,
            memories,
            cells: vec![vec![Cell::default(); MEMORY]; MEMORIES],
            flights: Vec::new(),
            detached: Vec::new(),
            faults: false,
            next: 0,
        }
    }

    fn slice(&self, span: &Span, less: usize) -> DeviceSlice {
        let Span { memory, at, len, .. } = *span;
        self.memories[memory].slice(at..at + len - less.min(len - 1)).expect("within")
    }

    fn fresh(&mut self, len: usize) -> Vec<u8> {
        self.next += 1;
        fresh(self.next, len)
    }

    fn cell(&mut self, span: &Span) -> &mut [Cell] {
        &mut self.cells[span.memory][span.at..span.at + span.len]
    }

    // --- the model ---------------------------------------------------------------------------------------------------

    /// An upload begins.
    fn begins(&mut self, spans: &[Span]) {
        for span in spans {
            for cell in self.cell(span) {
                cell.torn |= cell.writers > 0;
                cell.writers += 1;
                cell.value = None;
            }
            for flight in &mut self.flights {
                let Flight { up: false, plan, .. } = flight else { continue };
                for (read, bytes) in plan.spans.iter().zip(&mut plan.bytes) {
                    let (start, end) = (read.at.max(span.at), (read.at + read.len).min(span.at + span.len));
                    if read.memory == span.memory && start < end {
                        bytes[start - read.at..end - read.at].fill(None);
                    }
                }
            }
        }
    }

    /// An upload has ended, and the first so many of its pieces are there.
    fn ends(&mut self, plan: &Plan, landed: usize) {
        for (n, (span, bytes)) in plan.spans.iter().zip(&plan.bytes).enumerate() {
            for (cell, byte) in self.cell(span).iter_mut().zip(bytes) {
                cell.writers -= 1;
                cell.lost |= n >= landed;
                if cell.writers > 0 {
                    // In this call, or in another one.
                    continue;
                }
                cell.value = if cell.torn || cell.lost { None } else { *byte };
                cell.torn = false;
            }
        }
    }

    fn expected(&self, spans: &[Span]) -> Vec<Vec<Option<u8>>> {
        let values = |span: &Span| {
            let cells = &self.cells[span.memory][span.at..span.at + span.len];
            cells.iter().map(|cell| cell.value).collect()
        };
        spans.iter().map(values).collect()
    }

    /// An error of a transfer that was started.
    fn failed(&self, error: &Error, cancelled: bool) {
        match error {
            Error::Cancelled { .. } => assert!(cancelled, "not cancelled"),
            Error::Internal(_) | Error::Unsupported(_) => panic!("{error}"),
            _ => assert!(self.faults, "without a fault: {error:?}"),
        }
    }

    // --- operations --------------------------------------------------------------------------------------------------

    /// All that the copier's pool has.
    fn all(&self) -> Vec<PinnedBuf> {
        let mut taken = Vec::new();
        for len in [256 << 10, 64 << 10, 16 << 10, 4 << 10, 1 << 10] {
            taken.extend(std::iter::from_fn(|| self.pool.try_checkout(len).ok()));
        }
        taken
    }

    /// Takes a buffer for each piece, or for the first of them.
    fn bufs(&mut self, spans: &mut Vec<Span>, fill: bool) -> Vec<PinnedBuf> {
        let mut bufs = Vec::new();
        for span in spans.iter() {
            let Ok(mut buf) = self.from.try_checkout(span.len.max(1)) else { break };
            if fill {
                let bytes = self.fresh(span.len);
                buf.try_extend_from_slice(&bytes).expect("it fits");
            }
            bufs.push(buf);
        }
        spans.truncate(bufs.len());
        bufs
    }

    fn upload(&mut self, mut spans: Vec<Span>, owned: bool, full: bool, wrong: u8, then: Then) {
        // The piece whose place, or the block whose buffer, is too short, if any.
        let wrong = usize::from(wrong);
        if !owned {
            let sources: Vec<Vec<u8>> = spans.iter().map(|span| self.fresh(span.shift + span.len)).collect();
            let mut lent = sources.clone();
            let pieces: Vec<(&[u8], DeviceSlice)> = lent
                .iter()
                .zip(&spans)
                .enumerate()
                .map(|(n, (bytes, span))| {
                    (&bytes[span.shift..], self.slice(span, usize::from(n + 200 == wrong)))
                })
                .collect();
            let refused = pieces.iter().any(|(bytes, place)| bytes.len() > place.len());
            self.begins(&spans);
            let sent = self.copier.upload_slices(&pieces);
            drop(pieces);
            lent.iter_mut().for_each(|bytes| bytes.fill(0xEE));
            let bytes = sources.iter().zip(&spans).map(|(bytes, span)| known(&bytes[span.shift..])).collect();
            let plan = Plan { spans, bytes, cancelled: false };
            match sent {
                Ok(()) => {
                    assert!(!refused, "a piece is longer than its place");
                    self.ends(&plan, usize::MAX);
                }
                Err(error) if refused && matches!(error, Error::Piece { .. }) => self.untouched(&plan),
                Err(error) => {
                    self.failed(&error, false);
                    self.ends(&plan, 0);
                }
            }
            return;
        }
        let mut bufs = self.bufs(&mut spans, true);
        let bytes: Vec<_> = bufs.iter().map(|buf| known(buf)).collect();
        if let Some(short) = wrong.checked_sub(200).and_then(|n| bufs.get_mut(n)) {
            short.truncate(short.len() - 1);
        }
        let blocks: Vec<_> =
            bufs.into_iter().zip(&spans).map(|(buf, span)| (buf, self.slice(span, 0))).collect();
        let refused = blocks.iter().any(|(buf, place)| buf.len() < place.len());
        let taken = if full { self.all() } else { Vec::new() };
        self.begins(&spans);
        let sent = self.copier.upload_pages(blocks);
        drop(taken);
        let plan = Plan { spans, bytes, cancelled: false };
        match sent {
            Ok(sent) => {
                assert!(!refused, "a block is shorter than its place");
                self.started(Flight { up: true, handle: sent, plan }, then);
            }
            Err(said) => {
                if !(refused && matches!(said.error, Error::Piece { .. })) {
                    self.failed(&said.error, false);
                }
                let back = said.buffer.expect("refused before anything was copied");
                assert_eq!(back.len(), plan.spans.len());
                for ((buf, place), (bytes, span)) in back.iter().zip(plan.bytes.iter().zip(&plan.spans)) {
                    compare(buf, &bytes[..buf.len()], "a block that was refused");
                    assert_eq!(place.address(), self.slice(span, 0).address(), "in their order");
                }
                self.untouched(&plan);
            }
        }
    }

    /// An upload was refused: nothing was written. (What was there before is forgotten.)
    fn untouched(&mut self, plan: &Plan) {
        let unknown = plan.bytes.iter().map(|bytes| vec![None; bytes.len()]).collect();
        let plan = Plan { spans: plan.spans.clone(), bytes: unknown, cancelled: false };
        self.ends(&plan, usize::MAX);
    }

    fn download(&mut self, mut spans: Vec<Span>, owned: bool, full: bool, wrong: u8, then: Then) {
        let wrong = usize::from(wrong);
        if !owned {
            let expected = self.expected(&spans);
            let mut back: Vec<Vec<u8>> =
                spans.iter().map(|span| vec![0xA5; span.shift + span.len + 3]).collect();
            let target = |(n, (bytes, span)): (usize, (&'_ mut Vec<u8>, &Span))| -> (DeviceSlice, *mut [u8]) {
                let end =
                    if n + 200 == wrong { span.shift + span.len.saturating_sub(1) } else { bytes.len() };
                (self.slice(span, 0), &raw mut bytes[span.shift..end])
            };
            let targets: Vec<(DeviceSlice, *mut [u8])> =
                back.iter_mut().zip(&spans).enumerate().map(target).collect();
            // SAFETY: parts of vectors that nothing else uses before the call has returned.
            let mut targets: Vec<(DeviceSlice, &mut [u8])> =
                targets.into_iter().map(|(place, target)| (place, unsafe { &mut *target })).collect();
            let refused = targets.iter().any(|(place, target)| place.len() > target.len());
            let said = self.copier.download_slices(&mut targets);
            drop(targets);
            match said {
                Err(Error::Piece { .. }) if refused => {
                    assert!(back.iter().flatten().all(|byte| *byte == 0xA5), "written to, and refused");
                }
                Err(error) => self.failed(&error, false),
                Ok(()) => {
                    assert!(!refused, "a piece is longer than its target");
                    for ((bytes, span), expected) in back.iter().zip(&spans).zip(&expected) {
                        compare(&bytes[span.shift..span.shift + span.len], expected, "a piece");
                    }
                }
            }
            for (bytes, Span { shift, len, .. }) in back.iter().zip(&spans) {
                let beside = bytes[..*shift].iter().chain(&bytes[shift + len..]);
                assert!({ beside }.all(|byte| *byte == 0xA5), "written beside a target");
            }
            return;
        }
        let bufs = self.bufs(&mut spans, false);
        let bytes = self.expected(&spans);
        let mut blocks: Vec<_> =
            bufs.into_iter().zip(&spans).map(|(buf, span)| (self.slice(span, 0), buf)).collect();
        if let Some((place, buf)) = wrong.checked_sub(200).and_then(|n| blocks.get_mut(n)) {
            if let (true, Ok(short)) = (place.len() > 1, self.from.try_checkout(place.len() - 1)) {
                *buf = short;
            }
        }
        let refused = blocks.iter().any(|(place, buf)| place.len() > buf.capacity());
        let taken = if full { self.all() } else { Vec::new() };
        let sent = self.copier.download_pages(blocks);
        drop(taken);
        let plan = Plan { spans, bytes, cancelled: false };
        match sent {
            Ok(sent) => {
                assert!(!refused, "a piece is longer than its target");
                self.started(Flight { up: false, handle: sent, plan }, then);
            }
            Err(said) => {
                if !(refused && matches!(said.error, Error::Piece { .. })) {
                    self.failed(&said.error, false);
                }
                let back = said.buffer.expect("refused before anything was copied");
                assert_eq!(back.len(), plan.spans.len());
                for ((place, buf), span) in back.iter().zip(&plan.spans) {
                    assert!(buf.is_empty());
                    assert_eq!(place.address(), self.slice(span, 0).address(), "in their order");
                }
            }
        }
    }

    fn started(&mut self, flight: Flight, then: Then) {
        self.flights.push(flight);
        let at = self.flights.len() - 1;
        match then {
            Then::Wait => self.wait(at),
            Then::Keep if self.flights.len() > FLIGHTS => self.wait(0),
            Then::Keep => {}
            Then::Drop => self.detach(at),
            Then::Cancel => self.cancel(at),
        }
    }

    fn cancel(&mut self, at: usize) {
        let Flight { handle, plan, .. } = &mut self.flights[at];
        handle.cancel();
        plan.cancelled = true;
    }

    /// Drops a handle. The transfer goes on.
    fn detach(&mut self, at: usize) {
        let Flight { up, handle, plan } = self.flights.swap_remove(at);
        drop(handle);
        self.detached.extend(up.then_some(plan));
    }

    fn wait(&mut self, at: usize) {
        let Flight { up, handle, plan } = self.flights.swap_remove(at);
        if up {
            // Waited for first, so that what has landed is known after an error as well.
            let _ = handle.wait_landed(u64::MAX);
            assert!(handle.is_over());
        }
        let landed = plan.landed(handle.progress().landed_to);
        let came = handle.wait();
        self.came(up, came, plan, landed);
    }

    /// A transfer is over, and the first so many of its pieces are there.
    fn came(&mut self, up: bool, came: Came, plan: Plan, landed: usize) {
        let landed = match came {
            Ok(came) => {
                assert_eq!(came.len(), plan.bytes.len());
                let what = if up { "a buffer that was sent" } else { "a buffer that came" };
                came.iter().zip(&plan.bytes).for_each(|(buf, bytes)| compare(buf, bytes, what));
                usize::MAX
            }
            Err(said) => {
                self.failed(&said.error, plan.cancelled);
                landed
            }
        };
        if up {
            self.ends(&plan, landed);
        }
    }

    fn poll(&mut self, at: usize) {
        let Flight { up, mut handle, plan } = self.flights.swap_remove(at);
        match foreign::poll(|cx| Pin::new(&mut handle).poll(cx)) {
            Poll::Ready(came) => {
                let landed = plan.landed(handle.progress().landed_to);
                self.came(up, came, plan, landed);
            }
            Poll::Pending => self.flights.push(Flight { up, handle, plan }),
        }
    }

    /// Waits for a short time, for a download.
    fn wait_for(&mut self, at: usize, time: Duration) {
        if self.flights[at].up {
            return;
        }
        let Flight { up, handle, plan } = self.flights.swap_remove(at);
        match handle.wait_timeout(time) {
            Err(SubmitError { error, buffer: Some(handle) }) => {
                assert!(matches!(error, Error::Timeout(_)));
                self.flights.push(Flight { up, handle, plan });
            }
            Err(late) => self.failed(&late.error, plan.cancelled),
            Ok(came) => self.came(up, came, plan, 0),
        }
    }

    /// A call fails, or any.
    fn fail(&mut self, call: Option<u8>, nth: u64, failure: u8) {
        self.faults = true;
        let failure = Failure::ALL[usize::from(failure) % Failure::ALL.len()];
        let call = call.map_or("", |call| CALLS[usize::from(call) % CALLS.len()]);
        MACHINE.fault(call, nth + 1, failure);
    }

    fn apply(&mut self, op: Op) {
        let nth = |flights: &[Flight], at: u8| (!flights.is_empty()).then(|| usize::from(at) % flights.len());
        match op {
            Op::Upload { rows, owned, full, wrong, then } => {
                self.upload(spans(&rows), owned, full, wrong, then)
            }
            Op::Download { rows, owned, full, wrong, then } => {
                self.download(spans(&rows), owned, full, wrong, then);
            }
            Op::Wait { at } => _ = nth(&self.flights, at).map(|at| self.wait(at)),
            Op::WaitFor { at, micros } => {
                let time = Duration::from_micros(micros.into());
                _ = nth(&self.flights, at).map(|at| self.wait_for(at, time));
            }
            Op::Poll { at } => _ = nth(&self.flights, at).map(|at| self.poll(at)),
            Op::Landed { at, piece } => {
                let Some(at) = nth(&self.flights, at) else { return };
                let Flight { handle, plan, .. } = &self.flights[at];
                let piece = usize::from(piece);
                let offset = plan.bytes.iter().take(piece).map(|bytes| bytes.len() as u64).sum();
                let (there, progress) = (handle.wait_landed(offset), handle.progress());
                assert!(if there { progress.landed_to >= offset } else { progress.over }, "{progress:?}");
            }
            Op::Order { at } => {
                let Some(at) = nth(&self.flights, at) else { return };
                let Flight { handle, plan, .. } = &self.flights[at];
                if let Err(error) = handle.order(&self.stream) {
                    self.failed(&error, plan.cancelled);
                }
            }
            Op::Cancel { at } => _ = nth(&self.flights, at).map(|at| self.cancel(at)),
            Op::Forget { at } => _ = nth(&self.flights, at).map(|at| self.detach(at)),
            Op::Step { count } => {
                for _ in 0..count % 32 {
                    MACHINE.step();
                }
            }
            Op::Reap => {
                self.copier.reap();
                self.device.reap();
            }
            Op::Resume => MACHINE.resume(0, None),
            Op::Fail { call, nth, failure } => self.fail(Some(call), u64::from(nth % 32), failure),
            Op::FailAny { nth, failure } => self.fail(None, nth.into(), failure),
            Op::Kill { sure } => {
                if sure % 16 == 3 {
                    self.faults = true;
                    MACHINE.kill(0);
                }
            }
        }
    }

    /// Until nothing is in use.
    fn wait_for_idle(&self) {
        let in_use = |pool: &Pool| {
            let stats = pool.stats();
            stats.in_flight_bytes + stats.checked_out_bytes
        };
        for _ in 0..1000 {
            while MACHINE.step() {}
            let moved = self.copier.reap() | self.device.reap();
            if !moved && MACHINE.queued(0) == 0 && in_use(&self.pool) + in_use(&self.from) == 0 {
                return;
            }
        }
        panic!("in use: {:?}, {:?}", self.pool.stats(), self.from.stats());
    }

    fn end(mut self) {
        MACHINE.calm();
        MACHINE.resume(0, None);
        while !self.flights.is_empty() {
            self.wait(0);
        }
        self.wait_for_idle();
        for plan in std::mem::take(&mut self.detached) {
            let landed = if self.faults || plan.cancelled { 0 } else { usize::MAX };
            self.ends(&plan, landed);
        }
        for (memory, cells) in self.memories.iter().zip(&self.cells) {
            let mut bytes = vec![0; MEMORY];
            if self.stream.download_blocking(memory, &mut bytes).is_ok() {
                let expected: Vec<_> = cells.iter().map(|cell| cell.value).collect();
                compare(&bytes, &expected, "device memory");
            }
        }
        self.wait_for_idle();
        let Self { device, pool, from, copier, stream, memories, faults, .. } = self;
        drop((copier, stream, memories));
        for pool in [pool, from] {
            pool.check().unwrap_or_else(|wrong| panic!("{wrong}"));
            let stats = pool.stats();
            assert!(faults || stats.quarantined_bytes == 0, "{stats:?}");
            let down = pool.shutdown(Duration::ZERO);
            assert!(down.drained || stats.quarantined_bytes > 0, "{down:?} after {stats:?}");
            let regions = pool.regions();
            drop(pool);
            if down.outstanding > 0 {
                unmap(&regions);
            }
        }
        drop(device);
        // Pieces of one call may meet, which the rules of batches and kernels forbid. After a fault something may be kept.
        let wrong = MACHINE.wrong();
        let is_wrong = |line: &&str| {
            !line.contains("BAT-4") && !line.contains("KER-6") && !(faults && line.starts_with("leak"))
        };
        assert_eq!(wrong.lines().find(is_wrong), None, "a rule was broken, or not everything was given back");
    }
}

fuzz_target!(|input: (Setup, Vec<Op>)| {
    let (setup, mut ops) = input;
    ops.truncate(OPS);
    let mut world = World::new(setup);
    for op in ops {
        world.apply(op);
    }
    foreign::rest();
    world.end();
});

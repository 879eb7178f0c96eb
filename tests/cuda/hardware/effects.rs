//! The rules of the simulation that no code shows: what calls *do* that succeed.
//!
//! `tests/cuda/standin` compares codes. Here a stream is held up, the test does what a careful program would not do,
//! and then looks at where the bytes are. The stand-in, where nothing runs before a call asks for it, and a GPU, which
//! a kernel keeps busy meanwhile, must show the same.

use super::{Gpu, HANG};
use crate::support::kernels::{self, Kernels, Raw};

const LEN: usize = 4096;
/// Far longer than the calls meanwhile take.
const STALL_NANOSECONDS: u64 = 300_000_000;

/// Host memory that the driver knows, read byte by byte since a device may be writing to it.
struct Host<'a> {
    raw: &'a Raw,
    at: *mut u8,
    registered: bool,
}

impl<'a> Host<'a> {
    fn new(raw: &'a Raw, registered: bool) -> Self {
        // Never freed: should a driver write to it late, it writes to no other value. (And page by page, as drivers
        // count.)
        let at = Box::leak(vec![0_u8; 3 * LEN].into_boxed_slice()).as_mut_ptr();
        let at = at.wrapping_add(at.align_offset(LEN));
        if registered {
            raw.register(at, LEN);
        }
        Self { raw, at, registered }
    }

    fn fill(&self, seed: u64) {
        let mut bytes = [0; LEN];
        kernels::fill(&mut bytes, seed);
        // SAFETY: memory of this type, with that room.
        (0..LEN).for_each(|n| unsafe { self.at.add(n).write_volatile(bytes[n]) });
    }

    /// Whether all of the pattern is there.
    fn has(&self, seed: u64) -> bool {
        let mut bytes = [0; LEN];
        // SAFETY: as above.
        (0..LEN).for_each(|n| bytes[n] = unsafe { self.at.add(n).read_volatile() });
        kernels::wrong(&bytes, seed) == 0
    }

    fn unregister(&mut self) {
        self.registered = false;
        self.raw.unregister(self.at);
    }
}

impl Drop for Host<'_> {
    fn drop(&mut self) {
        if self.registered && !std::thread::panicking() {
            self.raw.unregister(self.at);
        }
    }
}

/// What was seen: the rule, what it claims, whether that is so.
type Seen = Vec<(&'static str, &'static str, bool)>;

struct Bench<'a> {
    gpu: &'a Gpu,
    kernels: Option<Kernels<'a>>,
    stream: usize,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        let kernels = gpu.kernels();
        gpu.raw.enter(0);
        Self { gpu, kernels, stream: gpu.raw.stream() }
    }

    /// Nothing that is submitted to the stream from now on runs for a while.
    fn stall(&self, stream: usize) {
        match &self.kernels {
            Some(kernels) => kernels.spin(STALL_NANOSECONDS, stream),
            None => self.gpu.raw.stand_in().hang(true),
        }
    }

    /// Lets the stand-in run what is queued. A GPU is left as busy as it is.
    fn release(&self) {
        if let Some(stand_in) = self.gpu.stand_in() {
            stand_in.hang(false);
        }
    }

    /// Device memory with the pattern.
    fn memory(&self, seed: u64) -> u64 {
        let (at, host) = (self.gpu.raw.alloc(LEN), Host::new(&self.gpu.raw, true));
        host.fill(seed);
        // SAFETY: left as it is until it is waited for.
        unsafe { self.gpu.raw.upload(at, host.at, LEN, self.stream) };
        self.gpu.raw.synchronize(self.stream);
        at
    }

    /// Polls until an event is complete.
    fn wait(&self, event: usize) {
        super::until("an event is complete", || match self.gpu.raw.query(event) {
            0 => true,
            600 => false,
            code => panic!("cuEventQuery: {code} ({})", self.gpu.raw.name(code)),
        });
    }
}

fn judge(test: &str, seen: &Seen) {
    for (rule, claim, so) in seen {
        println!("{test}: {rule:6} {} {claim}", if *so { "so:    " } else { "NOT SO:" });
    }
    let not: Vec<_> = seen.iter().filter(|(_, _, so)| !so).collect();
    println!("{test}: {} claims, {} not so", seen.len(), not.len());
    assert!(not.is_empty(), "{not:?}");
}

pub fn effects(gpu: &Gpu) {
    let bench = Bench::new(gpu);
    let (raw, stream, other) = (&gpu.raw, bench.stream, gpu.raw.stream());
    let mut seen: Seen = Vec::new();

    // A copy reads its source when it runs, not when it is submitted; unless it is plain memory, which is staged.
    for (registered, late) in [(true, true), (false, false)] {
        let (host, back, memory) = (Host::new(raw, registered), Host::new(raw, true), bench.memory(9));
        host.fill(1);
        bench.stall(stream);
        // SAFETY: overwritten on purpose, and there for good.
        unsafe { raw.upload(memory, host.at, LEN, stream) };
        host.fill(2);
        // SAFETY: looked at after the wait.
        unsafe { raw.download(back.at, memory, LEN, stream) };
        bench.release();
        raw.synchronize(stream);
        let claim = match registered {
            true => "a copy from registered memory reads it when it runs",
            false => "plain memory has been read when the call returns",
        };
        seen.push(("late", claim, back.has(if late { 2 } else { 1 })));
        raw.free(memory);
    }

    // Events: not complete before the work that they cover, and not dependent on later work.
    let (first, second) = (raw.event(), raw.event());
    let (back, memory) = (Host::new(raw, true), bench.memory(3));
    bench.stall(stream);
    raw.record(first, stream);
    seen.push(("event", "not complete while its stream is held up", raw.query(first) == 600));
    bench.release();
    bench.wait(first);
    bench.stall(stream);
    // SAFETY: looked at byte by byte, here and below.
    unsafe { raw.download(back.at, memory, LEN, stream) };
    bench.release();
    seen.push(("event", "complete stays complete, whatever comes behind it", raw.query(first) == 0));
    raw.synchronize(stream);
    seen.push(("stream", "synchronising covers everything", back.has(3)));

    // One stream behind another.
    back.fill(0);
    bench.stall(stream);
    raw.record(first, stream);
    raw.wait_event(other, first);
    // SAFETY: as above.
    unsafe { raw.download(back.at, memory, LEN, other) };
    raw.record(second, other);
    let early = raw.query(second) == 0 || back.has(3);
    bench.release();
    bench.wait(second);
    seen.push(("wait", "a stream waits for an event of another", !early && back.has(3)));
    seen.push(("wait", "and then that event is complete, too", raw.query(first) == 0));
    raw.synchronize(stream);

    // Behind a download that is held up.
    let held = |stream: usize, work: &dyn Fn()| {
        back.fill(0);
        bench.stall(stream);
        // SAFETY: as above.
        unsafe { raw.download(back.at, memory, LEN, stream) };
        work();
        bench.release();
    };
    held(stream, &|| {
        raw.record(first, stream);
        raw.record(first, other);
    });
    bench.wait(first);
    seen.push(("EVT-3", "an event recorded again covers the new place only", back.has(0)));
    raw.synchronize(stream);
    seen.push(("EVT-3", "and what it covered before still runs", back.has(3)));
    held(stream, &|| {
        raw.record(second, stream);
        raw.destroy_event(second);
    });
    raw.synchronize(stream);
    seen.push(("EVT-4", "what a destroyed event covered still runs", back.has(3)));
    let gone = raw.stream();
    held(gone, &|| raw.destroy(gone));
    let since = std::time::Instant::now();
    while !back.has(3) && since.elapsed() < HANG {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    seen.push(("STR-2", "a destroyed stream's copies still run", back.has(3)));

    // MEM-8.
    back.fill(0);
    bench.stall(stream);
    // SAFETY: as above.
    unsafe { raw.download(back.at, memory, LEN, stream) };
    raw.free(memory);
    seen.push(("MEM-8", "freeing comes back after the memory's copies have run", back.has(3)));
    bench.release();
    raw.synchronize(stream);
    judge("rules_without_codes_have_the_effects_of_the_stand_in", &seen);
}

/// MEM-4, by itself: where a driver did not wait, the copy's fault would end the context.
pub fn unregistered(gpu: &Gpu) {
    let bench = Bench::new(gpu);
    let (raw, stream) = (&gpu.raw, bench.stream);
    let (mut back, memory) = (Host::new(raw, true), bench.memory(3));
    bench.stall(stream);
    // SAFETY: looked at byte by byte, and there for good.
    unsafe { raw.download(back.at, memory, LEN, stream) };
    back.unregister();
    let ran = back.has(3);
    bench.release();
    let code = raw.synchronized(stream);
    println!("memory_is_unregistered_after_its_copies: the stream then says {code} ({})", raw.name(code));
    let seen = vec![
        ("MEM-4", "unregistering comes back after the memory's copies have run", ran),
        ("MEM-4", "and the context lives on", code == 0),
    ];
    judge("memory_is_unregistered_after_its_copies", &seen);
}

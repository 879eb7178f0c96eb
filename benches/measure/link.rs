//! The bare link of a device, and the speed of this machine's memory: the figures that others are compared with.

use std::time::{Duration, Instant};

use pinpool::{Device, DeviceSlice, InFlight, PinnedBuf, Pool, Stream};

/// The device that `--device` names, else a GPU, else the host device; and whether it is a GPU, by which gates are judged.
pub fn device() -> (Device, bool) {
    let found = || Device::open("cuda:0").or_else(|_| Device::open("host"));
    let device = super::option("device").map_or_else(found, |name| Device::open(&name)).expect("a device");
    let gpu = device.name().starts_with("cuda");
    let required = std::env::var("PINPOOL_REQUIRE").is_ok_and(|names| names.contains("cuda"));
    assert!(gpu || !required, "PINPOOL_REQUIRE asks for a GPU");
    if gpu {
        super::judge();
    }
    (device, gpu)
}

pub const UP: usize = 0;
pub const DOWN: usize = 1;
/// Buffers of each direction.
const PIECES: usize = 8;

/// Page-locked memory and streams, for copies without staging.
pub struct Link {
    streams: Vec<Stream>,
    /// Buffers of `piece` bytes, for each direction.
    pub bufs: [Vec<PinnedBuf>; 2],
    pub piece: usize,
}

impl Link {
    /// Prepares copies of `bytes` bytes in these directions. Each direction takes as much of the pool.
    pub fn new(pool: &Pool, device: &Device, bytes: usize, directions: &[usize]) -> Self {
        let piece = bytes / PIECES;
        let buf = |_| {
            let buf = pool.checkout_timeout(piece, Duration::from_secs(20));
            let mut buf = buf.expect("the pool is large enough");
            buf.try_resize(piece, 1).expect("within its capacity");
            buf
        };
        let bufs = [UP, DOWN].map(|direction| match directions.contains(&direction) {
            true => (0..PIECES).map(buf).collect(),
            false => Vec::new(),
        });
        let streams = (0..PIECES).map(|_| device.stream().expect("a stream")).collect();
        Self { streams, bufs, piece }
    }

    /// Copies all bytes, on `streams` streams for each direction. Returns the seconds.
    pub fn run(&mut self, directions: &[usize], streams: usize, memory: [&DeviceSlice; 2]) -> f64 {
        let since = Instant::now();
        let mut flights: [Vec<InFlight<PinnedBuf>>; 2] = [Vec::new(), Vec::new()];
        for number in 0..PIECES {
            let part = number * self.piece..(number + 1) * self.piece;
            for &direction in directions {
                let buf = self.bufs[direction].remove(0);
                let stream = &self.streams[direction * streams + number % streams];
                let slice = memory[direction].slice(part.clone());
                flights[direction].push(match direction {
                    UP => stream.upload(buf, slice).expect("a copy"),
                    _ => stream.download(slice, buf).expect("a copy"),
                });
            }
        }
        for (bufs, flights) in self.bufs.iter_mut().zip(flights) {
            bufs.extend(flights.into_iter().map(|flight| flight.wait().expect("the device works")));
        }
        since.elapsed().as_secs_f64()
    }
}

/// Fills `bytes` with bytes that do not repeat, by several threads.
pub fn fill(bytes: &mut [u8], threads: usize) {
    let part = bytes.len().div_ceil(threads).next_multiple_of(8).max(8);
    std::thread::scope(|scope| {
        for (number, part) in bytes.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                let mut x = number as u64 + 0x9e37_79b9_7f4a_7c15;
                for eight in part.chunks_mut(8) {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    let n = eight.len();
                    eight.copy_from_slice(&x.to_le_bytes()[..n]);
                }
            });
        }
    });
}

/// Reads `len` bytes of a file by plain loops of several threads, 4 MiB at a time into two segments of ordinary memory
/// for each. Returns the seconds. Staged copies cannot be faster on this machine.
pub fn read(file: &std::fs::File, len: usize, threads: usize) -> f64 {
    use std::os::unix::fs::FileExt;
    const CHUNK: usize = 4 << 20;
    let mut segments = vec![1_u8; threads * 2 * CHUNK];
    let part = len.div_ceil(threads);
    let since = Instant::now();
    std::thread::scope(|scope| {
        for (number, segments) in segments.chunks_mut(2 * CHUNK).enumerate() {
            scope.spawn(move || {
                let end = len.min((number + 1) * part);
                for (turn, at) in (number * part..end).step_by(CHUNK).enumerate() {
                    let segment = &mut segments[turn % 2 * CHUNK..][..CHUNK.min(end - at)];
                    file.read_exact_at(segment, at as u64).expect("the file is there");
                }
            });
        }
    });
    since.elapsed().as_secs_f64()
}

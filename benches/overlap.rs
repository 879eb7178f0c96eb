//! Whether copies overlap with kernels, which is the purpose of pinned memory.
//!
//! # What is measured
//!
//! A kernel stream and a copy stream. The work is done in steps (`--steps`, 16): each step launches a kernel on the one
//! and copies a chunk on the other. The kernels spin for a fixed time and touch no memory. Together they take as long
//! as the copies from the pool alone (measured at the start), so with ideal overlap both take as long as either, and
//! without overlap twice as long. `--mib` (1024) is copied in all, to the device and, separately, from it.
//!
//! | row | what it is |
//! | --- | --- |
//! | `kernels` | the kernels alone |
//! | `pool_copies` | the copies alone, through the pool: `upload` from, or `download` into, its buffers |
//! | `pool_both` | both, steps submitted in turn |
//! | `pageable_copies` | the copies alone, by the driver's asynchronous call, from or into touched ordinary memory |
//! | `pageable_both` | both |
//!
//! Times are from before the first call until both streams are idle; *caller* is the part in which the calling thread
//! submits and can do nothing else. All rows of a round follow each other; a ratio is taken within a round.
//!
//! `cargo bench --bench overlap`, or the executable by itself. Without a GPU it is skipped.
#![allow(missing_docs, unsafe_code)]

mod driver;
mod measure;

use std::time::{Duration, Instant};

use driver::{Address, Driver, Kernel, Mapped};
use measure::{Rounds, Spread, at_most, line, number, option, quantile};
use pinpool::{Device, DeviceSlice, InFlight, PinnedBuf, Pool, Stream};

const KERNELS: usize = 0;
const POOL_COPIES: usize = 1;
const POOL_BOTH: usize = 2;
const PAGEABLE_COPIES: usize = 3;
const PAGEABLE_BOTH: usize = 4;
const ROWS: [&str; 5] = ["kernels", "pool_copies", "pool_both", "pageable_copies", "pageable_both"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToDevice,
    FromDevice,
}

struct Work {
    driver: &'static Driver,
    kernel: Kernel,
    kernels: driver::Stream,
    /// The spinning time of each step's kernel.
    nanos: u64,
    steps: usize,
    chunk: usize,
    direction: Direction,
    // The pool's side.
    pool: Pool,
    stream: Stream,
    memory: Vec<DeviceSlice>,
    bufs: Vec<PinnedBuf>,
    // The driver's side.
    raw: driver::Stream,
    pageable: Mapped,
    target: Address,
}

/// The times of one row.
#[derive(Clone, Copy)]
struct Taken {
    all: f64,
    caller: f64,
}

impl Work {
    fn launch(&self) {
        // Fewer blocks than the smallest device of this kind has multiprocessors: all run at once.
        self.driver.spin(self.kernel, 32, self.nanos, self.kernels);
    }

    fn run(&mut self, row: usize) -> Taken {
        let kernels = matches!(row, KERNELS | POOL_BOTH | PAGEABLE_BOTH);
        let pool = matches!(row, POOL_COPIES | POOL_BOTH);
        let pageable = matches!(row, PAGEABLE_COPIES | PAGEABLE_BOTH);
        let mut flights: Vec<InFlight<PinnedBuf>> = Vec::with_capacity(self.steps);
        let mut bufs = std::mem::take(&mut self.bufs).into_iter();
        let since = Instant::now();
        for step in 0..self.steps {
            if kernels {
                self.launch();
            }
            if pool {
                let (buf, memory) = (bufs.next().expect("one for each step"), &self.memory[step]);
                flights.push(match self.direction {
                    Direction::ToDevice => self.stream.upload(buf, memory).expect("a copy"),
                    Direction::FromDevice => self.stream.download(memory, buf).expect("a copy"),
                });
            }
            if pageable {
                let at = step * self.chunk;
                let device = Address(self.target.0 + at as u64);
                // SAFETY: both are as large as all steps' chunks, live until the streams are idle, and are not used
                // otherwise.
                unsafe {
                    let host = self.pageable.at(at);
                    match self.direction {
                        Direction::ToDevice => self.driver.upload(device, host, self.chunk, self.raw),
                        Direction::FromDevice => self.driver.download(host, device, self.chunk, self.raw),
                    }
                }
            }
        }
        let caller = since.elapsed().as_secs_f64();
        self.bufs.extend(flights.into_iter().map(|flight| flight.wait().expect("the device works")));
        self.driver.synchronize(self.raw);
        self.driver.synchronize(self.kernels);
        let all = since.elapsed().as_secs_f64();
        self.bufs.extend(bufs);
        Taken { all, caller }
    }
}

fn direction(driver: &'static Driver, device: &Device, kernel: Kernel, direction: Direction) {
    let quick = measure::quick();
    let steps = number("steps", 16);
    let bytes = number("mib", if quick { 64 } else { 1024 }) << 20;
    let rounds = number("rounds", if quick { 5 } else { 21 });
    let chunk = bytes / steps;
    assert!(chunk > 0 && chunk <= 200 << 20, "steps of {chunk} bytes: change --steps or --mib");
    // A buffer lies within one extent, and the rest of each extent is lost.
    let capacity = (2 * bytes).max(512 << 20);
    measure::plan(option("mib").is_some(), &[("the pool", capacity), ("ordinary memory", bytes)]);
    let pool = Pool::builder(device).capacity(capacity).initial(capacity).build().expect("memory for a pool");
    let pinning = pool.wait_pinned(None).expect("pinning ends");
    assert!(pinning.error.is_none(), "{pinning:?}");
    let memory = device.alloc(bytes).expect("device memory");
    let slice = |step: usize| memory.slice(step * chunk..(step + 1) * chunk).expect("within the memory");
    let buffer = |step: usize| {
        let mut buf = pool.checkout(chunk).expect("the pool is large enough");
        buf.try_resize(chunk, step as u8).expect("within its capacity");
        buf
    };
    let mut work = Work {
        driver,
        kernel,
        kernels: driver.stream(),
        nanos: 0,
        steps,
        chunk,
        direction,
        stream: device.stream().expect("a stream"),
        memory: (0..steps).map(slice).collect(),
        bufs: (0..steps).map(buffer).collect(),
        pool,
        raw: driver.stream(),
        pageable: Mapped::new(bytes),
        target: driver.allocate(bytes),
    };
    // For warming up, and for the time that the copies take.
    let taken: Vec<f64> = (0..7).map(|_| work.run(POOL_COPIES).all).collect();
    work.nanos = (quantile(&taken, 0.5) * 1e9 / steps as f64) as u64;
    for row in 0..ROWS.len() {
        work.run(row);
    }
    let (mut all, mut caller) = (Rounds::new(ROWS.len()), Rounds::new(ROWS.len()));
    for round in 0..rounds {
        for row in (0..ROWS.len()).map(|row| (row + round) % ROWS.len()) {
            let taken = work.run(row);
            all.add(row, taken.all * 1e3);
            caller.add(row, taken.caller * 1e3);
        }
    }
    let title = match direction {
        Direction::ToDevice => "to_device",
        Direction::FromDevice => "from_device",
    };
    println!(
        "\noverlap, {title}: {steps} kernels of {:.2} ms beside {steps} copies of {:.1} MiB, median of {rounds} rounds",
        work.nanos as f64 / 1e6,
        chunk as f64 / (1 << 20) as f64
    );
    println!("{:<16} {:>9} {:>17} {:>11} {:>9}", "", "ms", "quartiles", "caller ms", "GB/s");
    for (row, name) in ROWS.iter().enumerate() {
        let spread = all.spread(row);
        let rate = match row {
            KERNELS => "-".into(),
            _ => format!("{:.1}", bytes as f64 / spread.mid / 1e6),
        };
        println!(
            "{name:<16} {:>9.2} {:>8.2} {:>8.2} {:>11.2} {rate:>9}",
            spread.mid,
            spread.low,
            spread.high,
            caller.spread(row).mid
        );
        let micros =
            |Spread { low, mid, high }: Spread| Spread { low: low * 1e3, mid: mid * 1e3, high: high * 1e3 };
        line(format!("overlap_us_{title}_{name}"), 1, micros(spread));
    }
    // In each round: both together over the longer of the two alone.
    let over = |both: usize, copies: usize| {
        let alone = all.values(KERNELS).iter().zip(all.values(copies)).map(|(k, c)| k.max(*c));
        let ratios: Vec<f64> = all.values(both).iter().zip(alone).map(|(both, alone)| both / alone).collect();
        Spread::of(&ratios)
    };
    at_most(format!("{title}, from the pool: both over the longer"), over(POOL_BOTH, POOL_COPIES), 1.1, None);
    let (own, pool) = (over(PAGEABLE_BOTH, PAGEABLE_COPIES), all.ratio(PAGEABLE_BOTH, POOL_BOTH));
    println!(
        "{title}, from pageable memory: both over the longer {:.3} ({:.3} to {:.3}); over both from the pool {:.3} \
         ({:.3} to {:.3})",
        own.mid, own.low, own.high, pool.mid, pool.low, pool.high
    );
    assert_eq!(work.bufs.len(), steps);
    drop(work.bufs);
    let census = work.pool.stats();
    assert_eq!(census.in_flight_bytes, 0, "{census:?}");
}

fn main() {
    let Some(driver) = driver::find() else {
        return println!("overlap: skipped without a GPU");
    };
    let Some(kernel) = driver.spin_kernel() else {
        return println!("overlap: skipped, the driver launches no kernels");
    };
    // The kernel must take as long as asked; otherwise there is nothing to overlap with.
    let stream = driver.stream();
    driver.spin(kernel, 32, 1000, stream);
    driver.synchronize(stream);
    let since = Instant::now();
    driver.spin(kernel, 32, 20_000_000, stream);
    driver.synchronize(stream);
    let taken = since.elapsed();
    println!("a kernel of 20 ms takes {:.2} ms", taken.as_secs_f64() * 1e3);
    assert!(
        taken > Duration::from_millis(19) && taken < Duration::from_millis(40),
        "the kernel does not spin"
    );
    let device = Device::open("cuda:0").expect("the driver is there");
    direction(driver, &device, kernel, Direction::ToDevice);
    direction(driver, &device, kernel, Direction::FromDevice);
    measure::used();
}

//! The speed of pinning and unpinning beside `cuMemHostAlloc`, and the delay that they cause to another process.
//!
//! # What is measured
//!
//! | contender | what it does |
//! | --- | --- |
//! | `host_alloc` | one `cuMemHostAlloc` of as much, of 8 GiB at most (`--alloc-gib`), and `cuMemFreeHost` |
//! | `pool_N` | builds a pool of 1 GiB in one region (`--gib`; the results: 24), pinned by N threads, and drops it |
//!
//! *pin* is bytes over the time from before the first call until all memory is pinned, touching included; *first* is
//! the time until the first checkout (of 1 MiB) is served, building included. *unpin* is bytes over the time from
//! dropping the pool until the process has given the memory back to the system, unmapping included, by the resident
//! size, which is polled every millisecond. Contenders take turns, several rounds; a round's ratio is to that round's
//! `host_alloc`. Before the first round as much memory is mapped, touched and unmapped once, since a virtual machine
//! may get its memory only then. Some virtual machines also pin memory for a device only at its first registration: one
//! call for 64 MiB then takes 20 to 70 ms, and the rest is slower. So one round with every contender runs before the
//! rounds that count.
//!
//! *worst neighbour* (and, while memory is unpinned, *unpinning*) is the longest `cuMemGetInfo` of a second process
//! meanwhile. This process starts it (itself, with `--neighbour`), and it repeats that call with pauses of 100 us. The
//! time of a call while no process pins is printed first. *longest call* is the pool's longest pinning call, by the
//! pool's own statistics. A call that is under way when a contender ends is waited for and counted.
//!
//! # Running it
//!
//! `cargo bench --bench pinning -- --gib 24`, or the executable by itself. `--threads 4,8`, `--rounds` and
//! `--alloc-gib` set these. Without a GPU the pool runs alone, on the host device, with page locks as far as the system
//! grants them.
#![allow(missing_docs, unsafe_code)]

mod driver;
mod measure;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use driver::{Driver, Mapped};
use measure::{Rounds, Spread, at_least, at_most, flag, line, number, numbers, option, quantile};
use pinpool::{Device, Pool, Unpinned};

const GIB: usize = 1 << 30;
/// The pause between two contenders.
const PAUSE_BETWEEN: Duration = Duration::from_millis(300);

// --- the neighbour

/// The second process: calls the driver all the time. On `begin` it forgets its earlier calls, on `end` it prints the
/// times of the calls since.
fn neighbour() {
    #[derive(Default)]
    struct Calls {
        taken: Vec<f64>,
        /// Calls since the process began.
        ended: u64,
    }
    let driver = Driver::open().expect("the driver was there for the first process");
    let (calls, changed) = (Mutex::new(Calls::default()), Condvar::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            driver.enter();
            loop {
                let since = Instant::now();
                driver.memory_info();
                let taken = since.elapsed().as_secs_f64();
                let mut calls = calls.lock().expect("no thread panics");
                calls.taken.push(taken);
                calls.ended += 1;
                drop(calls);
                changed.notify_all();
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        println!("ready");
        for line in std::io::stdin().lines() {
            let guard = calls.lock().expect("no thread panics");
            if line.is_ok_and(|line| line == "begin") {
                let mut guard = guard;
                guard.taken.clear();
                println!("begun");
            } else {
                // The call under way belongs to the measurement.
                let until = guard.ended + 1;
                let guard = changed.wait_while(guard, |calls| calls.ended < until).expect("no thread panics");
                let [mid, worst] = [0.5, 1.0].map(|q| quantile(&guard.taken, q));
                println!("{mid} {worst} {}", guard.taken.len());
            }
        }
        // The first process has ended.
        std::process::exit(0);
    });
}

/// The times of the neighbour's calls.
#[derive(Clone, Copy)]
struct Felt {
    median: f64,
    worst: f64,
    calls: usize,
}

/// The first process's handle of the second one.
struct Neighbour {
    child: Child,
    ask: ChildStdin,
    answer: BufReader<ChildStdout>,
}

impl Neighbour {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this executable has a path"));
        let command = command.arg("--neighbour").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this executable can be started again");
        let (ask, answer) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let mut neighbour = Self { child, ask, answer: BufReader::new(answer) };
        assert_eq!(neighbour.read(), "ready");
        neighbour
    }

    fn read(&mut self) -> String {
        let mut text = String::new();
        self.answer.read_line(&mut text).expect("the neighbour answers");
        text.trim().into()
    }

    fn begin(&mut self) {
        writeln!(self.ask, "begin").expect("the neighbour listens");
        assert_eq!(self.read(), "begun");
    }

    /// Between pinning and unpinning: the neighbour's calls so far.
    fn turn(neighbour: &mut Option<Self>) -> Option<Felt> {
        neighbour.as_mut().map(|neighbour| {
            let felt = neighbour.end();
            neighbour.begin();
            felt
        })
    }

    fn end(&mut self) -> Felt {
        writeln!(self.ask, "end").expect("the neighbour listens");
        let text = self.read();
        let mut parts = text.split(' ').map(|part| part.parse::<f64>().expect("a number"));
        let mut next = || parts.next().expect("three numbers");
        Felt { median: next(), worst: next(), calls: next() as usize }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // By the handle of the child process, so no other process is ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// --- the contenders

/// The times of one contender in one round, in seconds.
#[derive(Clone, Copy)]
struct Taken {
    /// The neighbour's calls while memory was pinned, if there is a neighbour.
    felt: Option<Felt>,
    bytes: usize,
    pin: f64,
    first: f64,
    unpin: f64,
    /// The pool's longest pinning call.
    longest: f64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    HostAlloc,
    Pool { threads: usize },
}

impl Way {
    fn name(self) -> String {
        match self {
            Self::HostAlloc => "host_alloc".into(),
            Self::Pool { threads } => format!("pool_{threads}"),
        }
    }
}

/// The resident bytes of this process.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("/proc is there");
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    // SAFETY: asks for a number.
    pages.expect("a number of pages") * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize
}

fn host_alloc(driver: &Driver, bytes: usize, neighbour: &mut Option<Neighbour>) -> Taken {
    let since = Instant::now();
    let start = driver.host_alloc(bytes);
    let pin = since.elapsed().as_secs_f64();
    let felt = Neighbour::turn(neighbour);
    let since = Instant::now();
    // SAFETY: just allocated, and not used.
    unsafe { driver.host_free(start) };
    Taken { felt, bytes, pin, first: pin, unpin: since.elapsed().as_secs_f64(), longest: pin }
}

fn pool(device: &Device, bytes: usize, threads: usize, neighbour: &mut Option<Neighbour>) -> Taken {
    let before = resident();
    let builder = Pool::builder(device).capacity(bytes).initial(bytes).region(bytes);
    let builder = builder.pin_threads(threads);
    let builder = if device.name().starts_with("host") { builder.unpinned(Unpinned::Allow) } else { builder };
    let since = Instant::now();
    let pool = builder.build().expect("memory for a pool");
    let buf = pool.checkout(1 << 20).expect("the pool is larger");
    let first = since.elapsed().as_secs_f64();
    let pinning = pool.wait_pinned(None).expect("pinning ends");
    let pin = since.elapsed().as_secs_f64();
    assert!(pinning.error.is_none() && pinning.ready == bytes, "{pinning:?}");
    drop(buf);
    let felt = Neighbour::turn(neighbour);
    let since = Instant::now();
    drop(pool);
    // All but a hundredth, since other memory of the process may change meanwhile.
    while resident() > before + bytes / 100 {
        assert!(since.elapsed() < Duration::from_secs(60), "the memory does not come back");
        std::thread::sleep(Duration::from_millis(1));
    }
    let longest = pinning.longest_call.as_secs_f64();
    Taken { felt, bytes, pin, first, unpin: since.elapsed().as_secs_f64(), longest }
}

/// Maps and touches memory, so that a hypervisor provides it to the virtual machine.
fn warm_up(bytes: usize) {
    let each = (bytes / 8).next_multiple_of(4096);
    std::thread::scope(|scope| {
        let mapping: Vec<_> = (0..8).map(|_| scope.spawn(move || Mapped::new(each))).collect();
        // All of it is resident at once before any is unmapped.
        let mapped: Vec<Mapped> = mapping.into_iter().map(|m| m.join().expect("memory")).collect();
        drop(mapped);
    });
}

fn main() {
    if flag("neighbour") {
        return neighbour();
    }
    let driver = driver::find();
    let device = match driver {
        Some(_) => Device::open("cuda:0").expect("the driver is there"),
        None => {
            println!("the pool alone, on the host device: nothing here is comparable with a GPU");
            Device::open("host").expect("the host device is always there")
        }
    };
    let bytes = number("gib", 1) * GIB;
    let alloc_bytes = number("alloc-gib", 8.min(bytes / GIB)) * GIB;
    let rounds = number("rounds", 3);
    let threads = numbers("threads", &[4, 8]);
    measure::plan(
        option("gib").or(option("alloc-gib")).is_some(),
        &[("pinned by turns", bytes.max(alloc_bytes))],
    );
    let mut ways = Vec::new();
    let mut neighbour = None;
    if driver.is_some() {
        ways.push(Way::HostAlloc);
        neighbour = Some(Neighbour::start());
    }
    ways.extend(threads.iter().map(|&threads| Way::Pool { threads }));
    warm_up(bytes.max(alloc_bytes));
    if let Some(neighbour) = &mut neighbour {
        neighbour.begin();
        std::thread::sleep(Duration::from_secs(1));
        let Felt { median, worst, calls, .. } = neighbour.end();
        println!(
            "a neighbour's cuMemGetInfo while no process pins: median {:.3} ms, worst {:.3} ms of {calls}",
            median * 1e3,
            worst * 1e3
        );
    }

    let new = || Rounds::new(ways.len());
    let (mut pin, mut unpin, mut first) = (new(), new(), new());
    let (mut worst, mut worst_after, mut longest) = (new(), new(), new());
    let mut calls = vec![0; ways.len()];
    for round in 0..=rounds {
        for i in (0..ways.len()).map(|i| (i + round) % ways.len()) {
            // The system is still freeing the memory of the contender before.
            std::thread::sleep(PAUSE_BETWEEN);
            neighbour.iter_mut().for_each(Neighbour::begin);
            let taken = match (ways[i], driver) {
                (Way::HostAlloc, Some(driver)) => host_alloc(driver, alloc_bytes, &mut neighbour),
                (Way::HostAlloc, None) => unreachable!("not without a driver"),
                (Way::Pool { threads }, _) => pool(&device, bytes, threads, &mut neighbour),
            };
            let after = neighbour.as_mut().map(Neighbour::end);
            if round == 0 {
                continue;
            }
            if let (Some(felt), Some(after)) = (&taken.felt, after) {
                worst.add(i, felt.worst * 1e3);
                worst_after.add(i, after.worst * 1e3);
                calls[i] += felt.calls;
            }
            pin.add(i, taken.bytes as f64 / taken.pin / 1e9);
            unpin.add(i, taken.bytes as f64 / taken.unpin / 1e9);
            first.add(i, taken.first * 1e3);
            longest.add(i, taken.longest * 1e3);
        }
    }

    println!(
        "\npinning {} GiB (host_alloc: {}): median of {rounds} rounds by turns",
        bytes / GIB,
        alloc_bytes / GIB
    );
    for (i, way) in ways.iter().enumerate() {
        let (speed, first) = (pin.spread(i), first.spread(i).mid);
        let most = |rounds: &Rounds| rounds.values(i).iter().copied().fold(f64::NAN, f64::max);
        println!(
            "{:<14} pins {:>6.2} GB/s ({:.2} to {:.2}), longest call {:.3} ms; first checkout after {first:.2} ms; unpins \
             {:.1} GB/s; a neighbour's worst of {} calls {:.3} ms, while it unpins {:.3} ms",
            way.name(),
            speed.mid,
            speed.low,
            speed.high,
            most(&longest),
            unpin.spread(i).mid,
            calls[i],
            most(&worst),
            most(&worst_after),
        );
    }
    // The worst of all rounds counts, not the median of the rounds.
    let worst_of =
        |i| Spread { mid: worst.values(i).iter().copied().fold(f64::NAN, f64::max), ..worst.spread(i) };
    for (i, way) in ways.iter().enumerate() {
        let threads = if let Way::Pool { threads } = way { *threads } else { 1 };
        line(format!("pin_gb_per_s_{}", way.name()), threads, pin.spread(i));
        line(format!("unpin_gb_per_s_{}", way.name()), threads, unpin.spread(i));
        line(format!("first_checkout_ms_{}", way.name()), threads, first.spread(i));
        if neighbour.is_some() {
            line(format!("neighbour_worst_ms_{}", way.name()), threads, worst_of(i));
        }
    }
    let base = ways.iter().position(|&way| way == Way::HostAlloc);
    for (i, way) in ways.iter().enumerate() {
        let Way::Pool { threads } = way else { continue };
        if let Some(base) = base {
            let ratio = pin.ratio(i, base);
            match threads {
                4 => at_least(format!("{} over host_alloc", way.name()), ratio, 8.0, None),
                8 => at_least(format!("{} over host_alloc", way.name()), ratio, 12.0, Some(14.0)),
                _ => println!("{} over host_alloc: {:.2}", way.name(), ratio.mid),
            }
        }
        if neighbour.is_some() {
            at_most(format!("{}, a neighbour's worst call in ms", way.name()), worst_of(i), 10.0, Some(4.0));
        }
    }
    measure::used();
}

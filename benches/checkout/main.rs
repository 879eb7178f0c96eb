//! What a checkout and a return cost, beside other ways to get a buffer and beside the gate's measure: two relaxed
//! increments of an atomic that no other thread uses.
//!
//! # Files
//!
//! `stores.rs` has the contenders, each a `Store` of buffers. `pair.rs` has the patterns that run on a store, and the
//! main groups; read these two first. Each further file is a group of its own (the table below names it). `../measure`
//! has rounds, ratios and options.
//!
//! # How it is measured
//!
//! Threads are started for each measurement, prepare their buffers and run a thousand operations to warm up; a barrier
//! then releases them together. Each thread measures the wall time of its own operations. A measurement is the *mean
//! over the threads*, so a figure is nanoseconds per operation of one thread, however many threads run beside it.
//!
//! Figures of separate runs differ by more than the differences of interest, above all on a machine with other users.
//! So the result is the table at the end: contenders take short turns, round after round, each round gives a ratio to
//! the first contender of the same round (`two_fetch_adds`, where it takes part), and the table has the median of the
//! rounds with their quartiles.
//!
//! # What is measured
//!
//! | group | file | an operation is |
//! | --- | --- | --- |
//! | `checkout_return` | `pair.rs` | check out 64 KiB, write one byte, return |
//! | `checkout_return_64_live` | `pair.rs` | replace one of 64 live buffers of eight sizes, chosen at random |
//! | `cross_thread_return` | `relay.rs` | one thread checks out, another returns; beside it the queue between them |
//! | `churn_65536` | `churn.rs` | as the first, 4 KiB, after a random half of 65,536 segments was returned; and in bursts |
//! | `hand_over` | `waiting.rs` | two threads wait for one segment in turn, beside a mutex and a condition variable |
//! | `on_a_stream` | `stream.rs` | with a GPU: check out, hold on a stream, drop |
//!
//! `glibc` allocates with an alignment of 16 bytes, its fast path, though the pool's is 64. `parking_lot_vec` keeps a
//! stack for each size; the pool finds the size class of each length.
//!
//! # Running it
//!
//! `cargo bench --bench checkout`, or the executable by itself. `--only GROUP,GROUP` runs some groups.
//! `PINPOOL_BENCH_THREADS=1,2,4` sets the numbers of threads, `PINPOOL_BENCH_QUICK=1` makes everything short; `--rounds N` and
//! `--operations N` set these. (`.ci/instructions` counts the instructions of the first group's operation, in a program of its
//! own.)
#![allow(missing_docs, unsafe_code)]

mod churn;
#[path = "../measure/mod.rs"]
mod measure;
mod pair;
mod relay;
mod stores;
mod stream;
mod waiting;

use std::time::Duration;

use measure::{Rounds, line};
use pair::Work;

/// A contender, whatever its type: `run` takes threads and operations, and returns the time.
pub struct Contender {
    name: &'static str,
    run: Box<dyn Fn(usize, u64) -> Duration>,
}

impl Contender {
    pub fn new(name: &'static str, run: impl Fn(usize, u64) -> Duration + 'static) -> Self {
        Self { name, run: Box::new(run) }
    }
}

/// A group: its name, its contenders, the numbers of threads, and the factor by which its rounds are shorter than
/// usual.
struct Group {
    name: &'static str,
    contenders: Vec<Contender>,
    threads: Vec<usize>,
    shorter: u64,
}

/// Measures a group by rounds and prints its table. Each round's ratios are to the round's first contender.
fn table(group: &Group, quick: bool) {
    let Group { name: title, contenders, threads, shorter } = group;
    let (rounds, iters) = if quick { (7, 20_000) } else { (41, 200_000) };
    let (rounds, iters) =
        (measure::number("rounds", rounds), measure::number("operations", iters) as u64 / shorter);
    println!("\n{title}: median of {rounds} rounds by turns, {iters} operations each");
    println!("{:>8} {:<18} {:>9} {:>9}   quartiles of the ratio", "threads", "", "ns", "ratio");
    for &n in threads {
        let mut times = Rounds::new(contenders.len());
        for round in 0..rounds {
            // Each contender comes first in some rounds, so that none always follows the same one.
            for i in 0..contenders.len() {
                let i = (i + round) % contenders.len();
                times.add(i, (contenders[i].run)(n, iters).as_secs_f64() * 1e9 / iters as f64);
            }
        }
        for (i, contender) in contenders.iter().enumerate() {
            let (ns, ratio) = (times.spread(i), times.ratio(i, 0));
            println!(
                "{n:>8} {:<18} {:>9.2} {:>9.3}   {:.3} to {:.3}",
                contender.name, ns.mid, ratio.mid, ratio.low, ratio.high
            );
            line(format_args!("{title}_{}", contender.name), n, ns);
        }
    }
}

fn main() {
    let quick = measure::quick();
    let list = std::env::var("PINPOOL_BENCH_THREADS").unwrap_or_else(|_| "1,2".into());
    let threads: Vec<usize> = list.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    assert!(
        !threads.is_empty() && !threads.contains(&0),
        "PINPOOL_BENCH_THREADS is {list:?}, not like 1,2,4"
    );
    let most = threads.iter().copied().max().unwrap_or(1);

    type Make = Box<dyn Fn() -> Vec<Contender>>;
    let all: [(&str, Make, &[usize], u64); 5] = [
        ("checkout_return", Box::new(move || pair::contenders(Work::Pair, most)), &threads, 1),
        ("checkout_return_64_live", Box::new(move || pair::contenders(Work::Live, most)), &threads, 1),
        ("churn_65536", Box::new(churn::churned), &[1], 1),
        ("hand_over", Box::new(waiting::contenders), &[2], 20),
        ("on_a_stream", Box::new(stream::contenders), &threads, 10),
    ];
    let wanted = all.into_iter().filter(|(name, ..)| measure::wanted(name));
    for (name, make, threads, shorter) in wanted {
        // One group's pools exist at a time: each has up to 2 GiB.
        let one = Group { name, contenders: make(), threads: threads.to_vec(), shorter };
        table(&one, quick);
    }
    if measure::wanted("cross_thread_return") {
        relay::table(quick);
    }
    measure::used();
}

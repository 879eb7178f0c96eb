//! A return on another thread than the checkout.
//!
//! # How it is measured
//!
//! One thread, the *maker*, checks out and writes a byte; another, the *dropper*, returns. Between them a queue with
//! room for 256 buffers takes them one by one: a ring with one thread on each side, the cheapest queue there is, so
//! that little has to be subtracted. For batches of 64 buffers it has room for 4 batches.
//!
//! The cost of a queue depends on which side waits. A dropper that finds the queue empty each time, and polls it, takes
//! the maker's cache lines away, and a little more work on one side may cost, or save, ten times its own time. So both
//! threads work as if alone: a thread that finds the queue full (or empty) waits until it is half empty (or half full),
//! and polls seldom. Then each thread works through at least half a queue without meeting the other, whichever is
//! faster. Each thread is bound to a processor, the same for every row, and the two are not siblings of one core.
//!
//! A run gives three figures, in ns an operation: the wall time, which is that of the slower side; and each side's
//! work, which is its time without waiting. The *difference* is the time that a row takes more than handing over a
//! value as large as a buffer (32 bytes; the row `bare_word` shows what a single word costs), as a multiple of a
//! checkout and return on one thread in the same round. It is printed for the wall time and for both sides' work
//! together, which is the stricter.
//!
//! # By parts
//!
//! The pool's work, added one part at a time (`parts.rs` has the copies):
//!
//! | row | what it does |
//! | --- | --- |
//! | `bare_handle` | hands over 32 bytes |
//! | `touched` | and writes a byte of one buffer after the other, as many as circulate in the pool |
//! | `lists_apart` | and takes the buffers off a list and puts them into another; none goes back |
//! | `lists` | and half a list goes back at a time, by slots like a transfer cache's: a compare-and-swap on each side |
//! | `lists_descriptors` | and reads a buffer's address from a descriptor |
//! | `all_parts` | and has all other parts of a hit (`floor.rs`) |
//! | `pinpool` | the pool |

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use pinpool::PinnedBuf;
use rtrb::RingBuffer;

use super::floor::{ALL, DESCRIPTOR};
use super::measure::{self, Rounds, Spread, line};
use super::parts::{Apart, Cycle, Joined};
use super::stores::{PLAIN, pool, touch};

/// Buffers in a batch, for the rows with batches.
const TOGETHER: usize = 64;

/// The figures of a run, in ns an operation.
#[derive(Clone, Copy, Default)]
struct Sides {
    wall: f64,
    maker: f64,
    dropper: f64,
}

// --- placing

/// Binds the calling thread to these processors.
fn bind(cpus: &[usize]) {
    // SAFETY: all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes into the set, which has room for every number that the kernel has returned.
    cpus.iter().for_each(|cpu| unsafe { libc::CPU_SET(*cpu, &mut set) });
    // SAFETY: reads the set. Where it is refused, threads stay where they are.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
}

/// The processors that this thread may use.
fn allowed() -> Vec<usize> {
    // SAFETY: all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes the set.
    unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    // SAFETY: reads the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// A processor for each side: the first, and the last that is no sibling of it.
fn places(allowed: &[usize]) -> (usize, usize) {
    let first = allowed.first().copied().unwrap_or(0);
    let path = format!("/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list");
    let siblings = std::fs::read_to_string(path).unwrap_or_default();
    let sibling = |cpu: usize| {
        siblings.trim().split(',').any(|range| {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            matches!((from.parse(), to.parse()), (Ok(from), Ok(to)) if (from..=to).contains(&cpu))
        })
    };
    let other = allowed.iter().copied().rev().find(|cpu| *cpu != first && !sibling(*cpu));
    (first, other.or(allowed.last().copied()).unwrap_or(first))
}

// --- one run

/// Waits, polling seldom. Returns for how long.
fn wait(until: impl Fn() -> bool) -> Duration {
    let since = Instant::now();
    while !until() {
        (0..32).for_each(|_| std::hint::spin_loop());
    }
    since.elapsed()
}

/// Sends values from this thread to another through a queue. `dropper` runs on the other thread and makes the function
/// that takes the values.
fn relay<T: Send, D: FnMut(T)>(
    iters: usize,
    room: usize,
    places: (usize, usize),
    mut make: impl FnMut() -> T,
    dropper: impl FnOnce() -> D + Send,
) -> Sides {
    let (mut into, mut from) = RingBuffer::new(room);
    let barrier = Barrier::new(2);
    let each = |time: Duration| time.as_secs_f64() * 1e9 / iters as f64;
    let meet = &barrier;
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            bind(&[places.1]);
            let mut drop = dropper();
            let (mut left, mut waited) = (iters, Duration::ZERO);
            meet.wait();
            let since = Instant::now();
            while left > 0 {
                match from.pop() {
                    Ok(item) => {
                        drop(item);
                        left -= 1;
                    }
                    Err(_) => waited += wait(|| from.slots() >= left.min(room / 2)),
                }
            }
            each(since.elapsed() - waited)
        });
        barrier.wait();
        let (since, mut waited) = (Instant::now(), Duration::ZERO);
        for _ in 0..iters {
            // A place is found first. A value that a full queue may hand back has to be in memory, written in words and
            // then read in wider pieces, and the processor has to wait for that.
            if into.cached_slots() == 0 && into.is_full() {
                waited += wait(|| into.slots() >= room / 2);
            }
            let Ok(()) = into.push(make()) else { unreachable!("no other thread pushes") };
        }
        let maker = each(since.elapsed() - waited);
        let dropper = other.join().expect("the dropper does not panic");
        Sides { wall: each(since.elapsed()), maker, dropper }
    })
}

// --- the rows

type Row = (&'static str, Box<dyn Fn(usize) -> Sides>);

fn rows(places: (usize, usize)) -> Vec<Row> {
    const ROOM: usize = 256;
    // So large that a thread cache may hold as many segments as are under way.
    let pool = pool(1 << 30);
    let checkout = |pool: &pinpool::Pool| {
        let mut buf = pool.checkout(black_box(PLAIN[0])).expect("the pool is large enough");
        // SAFETY: just checked out, and no size is 0.
        unsafe { touch(buf.as_mut_ptr()) };
        buf
    };
    // In whole batches.
    let batches = |iters: usize, run: &dyn Fn(usize) -> Sides| {
        let Sides { wall, maker, dropper } = run(iters.div_ceil(TOGETHER));
        let each = |time: f64| time / TOGETHER as f64;
        Sides { wall: each(wall), maker: each(maker), dropper: each(dropper) }
    };
    fn dropped<T>() -> impl FnMut(T) {
        drop::<T>
    }
    let handle = || black_box([1usize; 4]);
    // The dropper reads the handle: otherwise its cache lines would not move between the processors.
    fn read() -> impl FnMut([usize; 4]) {
        |[a, b, c, d]| {
            black_box(a ^ b ^ c ^ d);
        }
    }
    let (one, many, here) = (pool.clone(), pool.clone(), pool);
    let same_thread = move |iters: usize| {
        // With eight buffers by turns, since the figure may depend on where one lies.
        let (mut held, mut taken) = (Vec::new(), Duration::ZERO);
        for _ in 0..8 {
            let since = Instant::now();
            (0..iters / 8).for_each(|_| drop(checkout(&here)));
            taken += since.elapsed();
            held.push(checkout(&here));
        }
        let wall = taken.as_secs_f64() * 1e9 / (iters / 8 * 8) as f64;
        Sides { wall, maker: wall, dropper: 0.0 }
    };
    let handles = move |iters| {
        let some = || (0..TOGETHER).map(|_| handle()).collect::<Vec<_>>();
        batches(iters, &|n| {
            relay(n, 4, places, some, || |some: Vec<[usize; 4]>| some.into_iter().for_each(read()))
        })
    };
    let together = move |iters| {
        let some = || (0..TOGETHER).map(|_| checkout(&many)).collect::<Vec<_>>();
        batches(iters, &|n| relay(n, 4, places, some, dropped::<Vec<PinnedBuf>>))
    };
    let cycle = Cycle::new();
    let touched = move |iters| {
        let mut next = cycle.turn();
        let make = || {
            // SAFETY: the start of a buffer that the cycle keeps.
            unsafe { touch(next()) };
            handle()
        };
        relay(iters, ROOM, places, make, read)
    };
    fn apart<const PARTS: u32>(iters: usize, places: (usize, usize), apart: &Apart<PARTS>) -> Sides {
        relay(iters, ROOM, places, apart.maker(), || apart.dropper())
    }
    fn joined<const PARTS: u32>(iters: usize, places: (usize, usize), joined: &Joined<PARTS>) -> Sides {
        relay(iters, ROOM, places, joined.maker(), || joined.dropper())
    }
    let lists_apart = Apart::<0>::new();
    let (lists, lists_descriptors, all_parts) =
        (Joined::<0>::new(), Joined::<DESCRIPTOR>::new(), Joined::<ALL>::new());
    vec![
        ("same_thread", Box::new(same_thread)),
        ("bare_handle", Box::new(move |iters| relay(iters, ROOM, places, handle, read))),
        (
            "bare_word",
            Box::new(move |iters| {
                relay(
                    iters,
                    ROOM,
                    places,
                    || black_box(1usize),
                    || {
                        |word| {
                            black_box(word);
                        }
                    },
                )
            }),
        ),
        ("touched", Box::new(touched)),
        ("lists_apart", Box::new(move |iters| apart(iters, places, &lists_apart))),
        ("lists", Box::new(move |iters| joined(iters, places, &lists))),
        ("lists_descriptors", Box::new(move |iters| joined(iters, places, &lists_descriptors))),
        ("all_parts", Box::new(move |iters| joined(iters, places, &all_parts))),
        (
            "pinpool",
            Box::new(move |iters| relay(iters, ROOM, places, || checkout(&one), dropped::<PinnedBuf>)),
        ),
        ("bare_handles_64", Box::new(handles)),
        ("pinpool_64", Box::new(together)),
    ]
}

// --- the table

pub fn table(quick: bool) {
    const TITLE: &str = "cross_thread_return";
    let (rounds, iters) = if quick { (7, 20_000) } else { (41, 200_000) };
    let (rounds, iters) = (measure::number("rounds", rounds), measure::number("operations", iters));
    let allowed = allowed();
    let places = places(&allowed);
    bind(&[places.0]);
    let rows = rows(places);
    // Wall time, the maker's work, the dropper's, and both of these.
    let mut figures: [Rounds; 4] = std::array::from_fn(|_| Rounds::new(rows.len()));
    for round in 0..rounds {
        // Each row comes first in some rounds, so that none always follows the same one.
        for i in (0..rows.len()).map(|i| (i + round) % rows.len()) {
            let Sides { wall, maker, dropper } = (rows[i].1)(iters);
            for (rounds, value) in figures.iter_mut().zip([wall, maker, dropper, maker + dropper]) {
                rounds.add(i, value);
            }
        }
    }
    bind(&allowed);
    println!(
        "\n{TITLE}: median of {rounds} rounds by turns, {iters} operations each, on processors {} and {}",
        places.0, places.1
    );
    println!(
        "{:<18} {:>8} {:>8} {:>8}   difference, of the wall time {:>11} of both sides' work",
        "", "wall ns", "maker", "dropper", ""
    );
    let handle = |i: usize| {
        rows.iter().position(|row| row.0 == if i >= 9 { "bare_handles_64" } else { "bare_handle" })
    };
    for (i, (name, _)) in rows.iter().enumerate() {
        let [wall, maker, dropper, _] = std::array::from_fn(|which| figures[which].spread(i));
        // Less the handle's figure of the round, over the round's figure of one thread.
        let difference = |rounds: &Rounds| {
            let handle = rounds.values(handle(i).unwrap_or(1));
            let more = rounds.values(i).iter().zip(handle).map(|(row, handle)| row - handle);
            Spread::of(&more.zip(figures[0].values(0)).map(|(more, same)| more / same).collect::<Vec<_>>())
        };
        print!("{name:<18} {:>8.2} {:>8.2} {:>8.2}", wall.mid, maker.mid, dropper.mid);
        if *name != "same_thread" {
            for Spread { low, mid, high } in [difference(&figures[0]), difference(&figures[3])] {
                print!("   {mid:>8.2} ({low:.2} to {high:.2})");
            }
        }
        println!();
        line(format_args!("{TITLE}_{name}"), 2, wall);
        for (what, figure) in ["maker", "dropper", "both"].iter().zip(&figures[1..]) {
            line(format_args!("{TITLE}_{name}_{what}"), 2, figure.spread(i));
        }
    }
}

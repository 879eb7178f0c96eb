//! A return on another thread than the checkout.
//!
//! # How it is measured
//!
//! One thread, the *maker*, checks out and writes a byte; another, the *dropper*, returns; in between a queue with room for
//! 256 takes the buffers one by one: a ring for one thread on each side, which is the leanest there is, so that little has to
//! be subtracted. Where they are handed over 64 at a time, it has room for 4 such batches.
//!
//! What a queue costs depends on who waits for whom. A dropper that finds it empty each time, and looks again and again, takes
//! the maker's lines away, and a little work more on one side may cost, or save, ten times what it takes itself. So both
//! threads work as if alone: who finds the queue full (or empty) waits until it is half empty (or half full), and looks
//! seldom. Then each of them works at least through half a queue without meeting the other, whichever is faster.
//! Both are bound to one processor each, the same for every row and no siblings of one core.
//!
//! Three figures come of a run, in ns an operation: the wall time, which is the slower side's; and what each side worked,
//! the time that it waited left out. The *difference* is what a row takes more than handing over a handle, a value as
//! large as a buffer (a buffer is 32 bytes: `bare_word`, a single one, shows what that makes in a queue), over what a
//! checkout and a return cost on one thread, in the same round. It is printed for the wall time and for both sides'
//! work together, which is the harsher.
//!
//! # By parts
//!
//! What the pool has to do for it, added one by one (`parts.rs` has the copies):
//!
//! | row | what it does |
//! | --- | --- |
//! | `bare_handle` | hands over 32 bytes |
//! | `touched` | and writes a byte of one buffer after the other, as many as go round in the pool |
//! | `lists_apart` | and takes them from a list and puts them into one; nothing goes back |
//! | `lists` | and half a list goes back at a time, over hooks like a rack's: a compare-and-swap on each side |
//! | `lists_slots` | and where a buffer is, is found out from its slot |
//! | `all_parts` | and all other parts of a hit (`floor.rs`) |
//! | `pinpool` | the pool |

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use pinpool::PinnedBuf;
use rtrb::RingBuffer;

use super::floor::{ALL, SLOT};
use super::measure::{self, Rounds, Spread, line};
use super::parts::{Apart, Cycle, Hooked};
use super::stores::{PLAIN, pool, touch};

/// Buffers that change threads together, in some rows.
const TOGETHER: usize = 64;

/// What a run took, in ns an operation.
#[derive(Clone, Copy, Default)]
struct Sides {
    wall: f64,
    maker: f64,
    dropper: f64,
}

// --- placing -----------------------------------------------------------------------------------------------------------

/// Binds the calling thread to these processors.
fn bind(cpus: &[usize]) {
    // SAFETY: all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes into the set, which has room for every number that the kernel gave us.
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

/// One for each side: the first, and the last that is no sibling of it.
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

// --- one run -----------------------------------------------------------------------------------------------------------

/// Waits, looking seldom. How long.
fn wait(until: impl Fn() -> bool) -> Duration {
    let since = Instant::now();
    while !until() {
        (0..32).for_each(|_| std::hint::spin_loop());
    }
    since.elapsed()
}

/// From this thread to another through a queue. `dropper` makes there what takes them.
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
            // A place is found first. What may come back would be in memory, put there in words and moved on in wider
            // pieces, for which the processor has to wait.
            if into.cached_slots() == 0 && into.is_full() {
                waited += wait(|| into.slots() >= room / 2);
            }
            let Ok(()) = into.push(make()) else { unreachable!("nobody else pushes") };
        }
        let maker = each(since.elapsed() - waited);
        let dropper = other.join().expect("nobody panics");
        Sides { wall: each(since.elapsed()), maker, dropper }
    })
}

// --- the rows ----------------------------------------------------------------------------------------------------------

type Row = (&'static str, Box<dyn Fn(usize) -> Sides>);

fn rows(places: (usize, usize)) -> Vec<Row> {
    const ROOM: usize = 256;
    // So large that a thread may keep as many as are on the way.
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
    fn gone<T>() -> impl FnMut(T) {
        drop::<T>
    }
    let handle = || black_box([1usize; 4]);
    // Who gets a handle reads it: else its lines would never come over.
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
        batches(iters, &|n| relay(n, 4, places, some, gone::<Vec<PinnedBuf>>))
    };
    let cycle = Cycle::new();
    let touched = move |iters| {
        let mut next = cycle.turn();
        let make = || {
            // SAFETY: of a buffer that the cycle keeps.
            unsafe { touch(next()) };
            handle()
        };
        relay(iters, ROOM, places, make, read)
    };
    fn apart<const PARTS: u32>(iters: usize, places: (usize, usize), apart: &Apart<PARTS>) -> Sides {
        relay(iters, ROOM, places, apart.maker(), || apart.dropper())
    }
    fn hooked<const PARTS: u32>(iters: usize, places: (usize, usize), hooked: &Hooked<PARTS>) -> Sides {
        relay(iters, ROOM, places, hooked.maker(), || hooked.dropper())
    }
    let lists_apart = Apart::<0>::new();
    let (lists, lists_slots, all_parts) = (Hooked::<0>::new(), Hooked::<SLOT>::new(), Hooked::<ALL>::new());
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
        ("lists", Box::new(move |iters| hooked(iters, places, &lists))),
        ("lists_slots", Box::new(move |iters| hooked(iters, places, &lists_slots))),
        ("all_parts", Box::new(move |iters| hooked(iters, places, &all_parts))),
        ("pinpool", Box::new(move |iters| relay(iters, ROOM, places, || checkout(&one), gone::<PinnedBuf>))),
        ("bare_handles_64", Box::new(handles)),
        ("pinpool_64", Box::new(together)),
    ]
}

// --- the table ---------------------------------------------------------------------------------------------------------

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
        // Every row comes first in some rounds, so that none always follows the same one.
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
        "{:<16} {:>8} {:>8} {:>8}   difference, of the wall time {:>11} of both sides' work",
        "", "wall ns", "maker", "dropper", ""
    );
    let handle = |i: usize| {
        rows.iter().position(|row| row.0 == if i >= 9 { "bare_handles_64" } else { "bare_handle" })
    };
    for (i, (name, _)) in rows.iter().enumerate() {
        let [wall, maker, dropper, _] = std::array::from_fn(|which| figures[which].spread(i));
        // To the handle's figure of the round, over the round's figure of one thread.
        let difference = |rounds: &Rounds| {
            let handle = rounds.values(handle(i).unwrap_or(1));
            let more = rounds.values(i).iter().zip(handle).map(|(row, handle)| row - handle);
            Spread::of(&more.zip(figures[0].values(0)).map(|(more, same)| more / same).collect::<Vec<_>>())
        };
        print!("{name:<16} {:>8.2} {:>8.2} {:>8.2}", wall.mid, maker.mid, dropper.mid);
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

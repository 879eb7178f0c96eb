//! A return on another thread than the checkout.
//!
//! One thread, the *maker*, checks out and writes a byte; another, the *dropper*, returns. Between them a queue with
//! room for 256 buffers takes them one by one: a ring with one thread on each side, the cheapest queue there is, so that
//! little has to be subtracted.
//!
//! The cost of a queue depends on which side waits. A dropper that finds the queue empty each time, and polls it, takes
//! the maker's cache lines away, and a little more work on one side may cost, or save, ten times its own time. So both
//! threads work as if alone: a thread that finds the queue full (or empty) waits until it is half empty (or half full),
//! and polls seldom.
//!
//! A run gives three figures, in ns an operation: the wall time, which is that of the slower side; and each side's work,
//! which is its time without waiting. Beside `pinpool`: `bare_handle` hands over a value as large as a buffer (32 bytes),
//! and `same_thread` is a checkout and return on one thread.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use pinpool::PinnedBuf;
use rtrb::RingBuffer;

use super::measure::{self, Rounds, line};
use super::stores::{PLAIN, pool};

/// Buffers that the queue has room for.
const ROOM: usize = 256;

/// The figures of a run, in ns an operation.
#[derive(Clone, Copy, Default)]
struct Sides {
    wall: f64,
    maker: f64,
    dropper: f64,
}

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
    mut make: impl FnMut() -> T,
    dropper: impl FnOnce() -> D + Send,
) -> Sides {
    let (mut into, mut from) = RingBuffer::new(ROOM);
    let barrier = Barrier::new(2);
    let each = |time: Duration| time.as_secs_f64() * 1e9 / iters as f64;
    let meet = &barrier;
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
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
                    Err(_) => waited += wait(|| from.slots() >= left.min(ROOM / 2)),
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
                waited += wait(|| into.slots() >= ROOM / 2);
            }
            let Ok(()) = into.push(make()) else { unreachable!("no other thread pushes") };
        }
        let maker = each(since.elapsed() - waited);
        let dropper = other.join().expect("the dropper does not panic");
        Sides { wall: each(since.elapsed()), maker, dropper }
    })
}

type Row = (&'static str, Box<dyn Fn(usize) -> Sides>);

fn rows() -> [Row; 3] {
    // So large that a thread cache may hold as many segments as are under way.
    let pool = pool(1 << 30);
    let checkout = |pool: &pinpool::Pool| super::stores::checkout(pool, black_box(PLAIN[0]));
    let handle = || black_box([1usize; 4]);
    // The dropper reads the handle: otherwise its cache lines would not move between the processors.
    fn read() -> impl FnMut([usize; 4]) {
        |[a, b, c, d]| {
            black_box(a ^ b ^ c ^ d);
        }
    }
    let here = pool.clone();
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
    [
        ("same_thread", Box::new(same_thread)),
        ("bare_handle", Box::new(move |iters| relay(iters, handle, read))),
        ("pinpool", Box::new(move |iters| relay(iters, || checkout(&pool), || drop::<PinnedBuf>))),
    ]
}

pub fn table(quick: bool) {
    const TITLE: &str = "cross_thread_return";
    let (rounds, iters) = if quick { (7, 20_000) } else { (41, 200_000) };
    let (rounds, iters) = (measure::number("rounds", rounds), measure::number("operations", iters));
    let rows = rows();
    // Wall time, the maker's work, the dropper's.
    let mut figures: [Rounds; 3] = std::array::from_fn(|_| Rounds::new(rows.len()));
    for round in 0..rounds {
        // Each row comes first in some rounds, so that none always follows the same one.
        for i in (0..rows.len()).map(|i| (i + round) % rows.len()) {
            let Sides { wall, maker, dropper } = (rows[i].1)(iters);
            figures.iter_mut().zip([wall, maker, dropper]).for_each(|(rounds, value)| rounds.add(i, value));
        }
    }
    println!("\n{TITLE}: median of {rounds} rounds by turns, {iters} operations each");
    println!("{:<18} {:>8} {:>8} {:>8}", "", "wall ns", "maker", "dropper");
    for (i, (name, _)) in rows.iter().enumerate() {
        let [wall, maker, dropper] = figures.each_ref().map(|rounds| rounds.spread(i));
        println!("{name:<18} {:>8.2} {:>8.2} {:>8.2}", wall.mid, maker.mid, dropper.mid);
        line(format_args!("{TITLE}_{name}"), 2, wall);
        line(format_args!("{TITLE}_{name}_maker"), 2, maker);
        line(format_args!("{TITLE}_{name}_dropper"), 2, dropper);
    }
}

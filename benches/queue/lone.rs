//! One copy at a time, through an idle queue.

use std::time::{Duration, Instant};

use pinpool::Device;

use crate::measure::{self, Rounds, at_most, line, number, quantile};
use crate::{PIECE, checkout, pool, queue};

pub fn lone(device: &Device) {
    let rounds = number("rounds", if measure::quick() { 5 } else { 31 });
    let pool = pool(device, 4 << 20);
    let (stream, queue) = (device.stream().expect("a stream"), queue(device));
    let memory = device.alloc(PIECE).expect("device memory");
    let mut buf = Some(checkout(&pool, PIECE, 1));
    let mut once = |queued: bool| -> f64 {
        let since = Instant::now();
        let own = buf.take().expect("it came back");
        let flight = if queued { queue.upload(own, &memory) } else { stream.upload(own, &memory) };
        buf = Some(flight.expect("a copy").wait().expect("the device works"));
        since.elapsed().as_nanos() as f64
    };
    for (title, idle, samples) in [("back to back", 0, 64), ("after 2 ms without work", 2, 16)] {
        let mut medians = Rounds::new(2);
        for round in 0..=rounds {
            for i in [round % 2, (round + 1) % 2] {
                // Long enough for the queue's thread to fall asleep.
                std::thread::sleep(Duration::from_millis(1));
                let one = |_| {
                    if idle > 0 {
                        std::thread::sleep(Duration::from_millis(idle));
                    }
                    once(i == 1)
                };
                let taken: Vec<f64> = (0..samples).map(one).collect();
                if round > 0 {
                    medians.add(i, quantile(&taken, 0.5));
                }
            }
        }
        println!("\na lone copy of {PIECE} bytes, {title}: {rounds} rounds by turns, {samples} copies each");
        for (i, name) in ["stream", "queue"].into_iter().enumerate() {
            println!("{name:<12} {:>9.0} ns", medians.spread(i).mid);
            line(format!("lone_{name}_{PIECE}{}", if idle > 0 { "_idle" } else { "" }), 1, medians.spread(i));
        }
        at_most(
            format!("a lone copy through the queue over the direct one, {title}"),
            medians.ratio(1, 0),
            1.2,
            None,
        );
    }
}

//! A lone copy of 4 KiB, by an idle copier and on a stream.

use std::time::{Duration, Instant};

use pinpool::{Copier, Device};

use crate::builder;
use crate::measure::{self, Rounds, Spread, at_most, line, number, quantile};
use crate::small::{checkout, pool};

const PIECE: usize = 4 << 10;
/// Each way, and the one that it is compared with.
const WAYS: [(&str, usize); 5] =
    [("stream", 0), ("blocking", 1), ("slice", 1), ("down", 3), ("slice_down", 3)];

pub fn lone(device: &Device) {
    let rounds = number("rounds", if measure::quick() { 5 } else { 31 });
    let pool = pool(device, 64 << 20);
    let stream = device.stream().expect("a stream");
    let copier: Copier = builder(&pool, device).build().expect("a copier");
    let memory = device.alloc(PIECE).expect("device memory");
    let (mut buf, mut bytes) = (Some(checkout(&pool, PIECE, 1)), vec![3; PIECE]);
    let mut once = |way: usize| -> f64 {
        let own = buf.take().expect("it came back");
        let since = Instant::now();
        let own = match WAYS[way].0 {
            "stream" => stream.upload(own, &memory).expect("a copy").wait().expect("the device works"),
            name => {
                match name {
                    "blocking" => stream.upload_blocking(&bytes, &memory).expect("a copy"),
                    "slice" => copier.upload_slice(&bytes, &memory).expect("a copy"),
                    "down" => stream.download_blocking(&memory, &mut bytes).expect("a copy"),
                    _ => copier.download_slice(&memory, &mut bytes).expect("a copy"),
                }
                own
            }
        };
        let taken = since.elapsed().as_nanos() as f64;
        buf = Some(own);
        taken
    };
    for (title, idle, samples) in [("back to back", 0, 64), ("after 2 ms without work", 2, 16)] {
        let mut medians = Rounds::new(WAYS.len());
        for round in 0..=rounds {
            for i in (0..WAYS.len()).map(|i| (i + round) % WAYS.len()) {
                // Long enough for the copier's threads to fall asleep.
                std::thread::sleep(Duration::from_millis(1));
                let one = |_| {
                    if idle > 0 {
                        std::thread::sleep(Duration::from_millis(idle));
                    }
                    once(i)
                };
                let taken: Vec<f64> = (0..samples).map(one).collect();
                if round > 0 {
                    medians.add(i, quantile(&taken, 0.5));
                }
            }
        }
        println!("\na lone copy of {PIECE} bytes, {title}: {rounds} rounds by turns, {samples} copies each");
        for (i, (name, _)) in WAYS.into_iter().enumerate() {
            println!("{name:<12} {:>9.0} ns", medians.spread(i).mid);
            line(format!("lone_{name}_{PIECE}{}", if idle > 0 { "_idle" } else { "" }), 1, medians.spread(i));
        }
        for (i, (name, direct)) in WAYS.into_iter().enumerate().filter(|(i, (_, direct))| i != direct) {
            let over: Spread = medians.ratio(i, direct);
            at_most(format!("a lone {name} over {}, {title}", WAYS[direct].0), over, 1.1, Some(1.0));
        }
    }
}

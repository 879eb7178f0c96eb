//! Work of the command that is spread over threads. Its file is compiled a second time here, since no command line says
//! which thread takes what.

#[path = "../../src/cli/spread.rs"]
mod spreading;

use std::sync::atomic::{AtomicUsize, Ordering};

use spreading::{each, spread};

#[test]
fn each_number_comes_once_and_the_lowest_failure_is_told() {
    let seen: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
    let all = spread(3, 1000, |number| {
        seen[number].fetch_add(1, Ordering::Relaxed);
        Ok::<_, ()>(())
    });
    assert!(all.is_ok() && seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    let failed = spread(3, 1000, |number| match number {
        17.. => Err(number),
        _ => Ok(()),
    });
    assert_eq!(failed, Err(17));
    assert_eq!(spread(1, 0, Err), Ok(()));
}

#[test]
fn each_part_comes_once_with_its_place() {
    for (len, threads) in [(1, 3), (100_000, 1), (100_000, 3), (1 << 16, 4)] {
        let mut all = vec![0; len];
        each(&mut all, threads, |start, part| {
            part.iter_mut().zip(start..).for_each(|(item, place)| *item += place + 1);
        });
        assert!(all.iter().zip(1..).all(|(item, place)| *item == place), "{len} {threads}");
    }
}

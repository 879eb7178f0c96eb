//! `pinpool top`: the pools of a process that serves `/metrics`, live in a terminal, or once as text.
//!
//! Files, in the order in which the numbers pass them: [`scrape`] fetches and reads them, [`view`] works out rates,
//! quantiles and alarms, [`text`] makes lines, and [`screen`] draws these. This code uses no code of the pool. It shows
//! what the other process exports, so a Prometheus sees the same numbers.

mod scrape;
mod screen;
mod text;
mod view;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use super::args::Top;
use super::{Failure, print};
use scrape::Source;
use view::Watch;

/// As wide as most terminals.
const WIDTH: usize = 80;

pub fn run(args: &Top) -> Result<(), Failure> {
    let url = scrape::address(&args.url).map_err(Failure::Usage)?;
    let interval = Duration::from_secs_f64(args.interval);
    let source = Source::new(url);
    if args.once {
        return once(&source, interval);
    }
    if !io::stdout().is_terminal() {
        return Err(Failure::Usage("this is not a terminal: use --once for plain text".into()));
    }
    screen::run(source, interval).map_err(|error| Failure::Failed(format!("the terminal: {error}")))
}

/// Prints one view as text. Fetches twice, an interval apart, since rates need two answers.
fn once(source: &Source, interval: Duration) -> Result<(), Failure> {
    let mut watch = Watch::default();
    for pause in [Duration::ZERO, interval] {
        std::thread::sleep(pause);
        let scrape = source.fetch().map_err(|why| Failure::Failed(format!("{}: {why}", source.url())))?;
        watch.add(Instant::now(), Ok(scrape));
    }
    print(&mut io::stdout(), &text::plain(&watch.items(Instant::now()), WIDTH))
}

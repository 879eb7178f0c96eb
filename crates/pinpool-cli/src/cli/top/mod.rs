//! `pinpool top`: the pools of a process that serves `/metrics`, live in a terminal, or once as text.
//!
//! A number passes through `scrape.rs`, which fetches `/metrics` and parses it; `view.rs`, which computes rates, quantiles
//! and alarms from the answers of the last minutes; `text.rs`, which makes lines of text of them; and `screen.rs`, which
//! draws the lines on a terminal and handles keys. None of the library's code is used: everything shown is computed from
//! the metrics that the other process exports, so a Prometheus server can show the same.

mod scrape;
mod screen;
mod text;
mod view;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use super::args::TopArgs;
use super::{CliError, Result, print};
use scrape::Server;
use view::History;

/// Runs the command.
pub fn run(args: &TopArgs) -> Result<()> {
    let server = Server::new(&args.url).map_err(CliError::Usage)?;
    let interval = Duration::from_secs_f64(args.interval);
    if !args.once {
        if !io::stdout().is_terminal() {
            return Err(CliError::Usage("this is not a terminal: use --once for plain text".into()));
        }
        let failed = |error| CliError::Failed(format!("the terminal: {error}"));
        return screen::run(server, interval).map_err(failed);
    }
    let mut history = History::default();
    // Twice, an interval apart, since a rate needs two answers.
    for pause in [Duration::ZERO, interval] {
        std::thread::sleep(pause);
        let scrape = server.fetch().map_err(|why| CliError::Failed(format!("{}: {why}", server.url())))?;
        history.add(Instant::now(), Ok(scrape));
    }
    print(&mut io::stdout(), &history.page(Instant::now()).plain())
}

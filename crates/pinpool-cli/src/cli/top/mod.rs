//! `pinpool top`: the pools of a process that serves `/metrics`, live in a terminal, or once as text.
//!
//! The files, in the order in which a number passes through them, which is also the order in which to read them:
//!
//! | file | what it does |
//! | --- | --- |
//! | `scrape.rs` | fetches `/metrics` and parses it |
//! | `view.rs` | computes rates, quantiles and alarms from the answers of the last minutes |
//! | `text.rs` | puts these into lines of text: headings, notes, bars, tables |
//! | `screen.rs` | draws the lines on a terminal, and handles keys |
//!
//! None of the library's code is used: everything shown is computed from the metrics that the other process exports, so
//! a Prometheus server can show the same. Only `pinpool top` calls [`run`].

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

/// Columns of `--once`: the width of most terminals.
const WIDTH: usize = 80;

/// Runs the command.
pub fn run(args: &TopArgs) -> Result<()> {
    let url = scrape::address(&args.url).map_err(CliError::Usage)?;
    let interval = Duration::from_secs_f64(args.interval);
    let server = Server::new(url);
    if args.once {
        return once(&server, interval);
    }
    if !io::stdout().is_terminal() {
        return Err(CliError::Usage("this is not a terminal: use --once for plain text".into()));
    }
    screen::run(server, interval).map_err(|error| CliError::Failed(format!("the terminal: {error}")))
}

/// Fetches twice, an interval apart, since a rate needs two answers.
fn once(server: &Server, interval: Duration) -> Result<()> {
    let mut history = History::default();
    for pause in [Duration::ZERO, interval] {
        std::thread::sleep(pause);
        let scrape = server.fetch().map_err(|why| CliError::Failed(format!("{}: {why}", server.url())))?;
        history.add(Instant::now(), Ok(scrape));
    }
    print(&mut io::stdout(), &history.page(Instant::now(), WIDTH).plain())
}

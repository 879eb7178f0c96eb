//! `pinpool top`: the pools of a process that serves `/metrics`, live or once as text.
//!
//! `scrape.rs` fetches `/metrics` and parses it; `view.rs` computes rates, quantiles and alarms
//! from the answers of the last minutes, and makes a page of text of them, which is printed again
//! and again. None of the library's code is used: everything shown is computed from the metrics
//! that the other process exports, so a Prometheus server can show the same.

pub mod scrape;
pub mod view;

use std::time::{Duration, Instant};

use super::args::TopArgs;
use super::{CliError, Result, print};
use console::Term;
use scrape::Server;
use view::History;

/// Runs the command. In a terminal it ends by a signal, such as that of Ctrl-C.
pub fn run(args: &TopArgs) -> Result<()> {
    let server = Server::new(&args.url).map_err(CliError::Usage)?;
    let interval = Duration::from_secs_f64(args.interval);
    let mut history = History::default();
    if args.once {
        // Twice, an interval apart, since a rate needs two answers.
        for pause in [Duration::ZERO, interval] {
            std::thread::sleep(pause);
            let scrape = server.fetch().map_err(|why| CliError::Failed(format!("{}: {why}", server.url)))?;
            history.add(Instant::now(), Ok(scrape));
        }
        return print(&history.page(Instant::now()));
    }
    let term = Term::stdout();
    if !term.is_term() {
        return Err(CliError::Usage("this is not a terminal: use --once for plain text".into()));
    }
    loop {
        draw(&term, &server.url, &history)
            .map_err(|error| CliError::Failed(format!("the terminal: {error}")))?;
        if !history.is_empty() {
            std::thread::sleep(interval);
        }
        let answer = server.fetch();
        history.add(Instant::now(), answer);
    }
}

/// Prints the page over the one before, as much of it as the terminal has lines for.
fn draw(term: &Term, url: &str, history: &History) -> std::io::Result<()> {
    let (rows, columns) = term.size();
    let state = if history.trouble.is_some() { "STALE" } else { "live" };
    let page = history.page(Instant::now());
    let all: Vec<&str> = page.lines().collect();
    let fit = usize::from(rows).saturating_sub(2);
    let cut = |line: &str| line.chars().take(columns.into()).collect::<String>() + "\n";
    let mut text = cut(&format!("pinpool top  {url}  {state}  Ctrl-C ends"));
    text.extend(all.iter().take(fit).map(|line| cut(line)));
    if all.len() > fit {
        text += &cut(&format!("{} more lines: a higher terminal, or --once, shows them", all.len() - fit));
    }
    term.clear_screen()?;
    term.write_str(text.trim_end())?;
    term.flush()
}

//! The terminal: draws what a [`Watch`] shows, until `q` is pressed.
//!
//! One thread fetches the numbers, since a server may take seconds to answer. The main thread draws, and reads the
//! keys. The terminal is restored however the program ends, by a panic too (ratatui's panic hook does that).

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::scrape::{Scrape, Source};
use super::text;
use super::view::{Item, Watch};

/// The longest time until a key or an answer is handled.
const BEAT: Duration = Duration::from_millis(100);
/// How often the screen is worked out anew where no answer comes: it shows how old the numbers are.
const AGE: Duration = Duration::from_secs(1);

/// Shows what the server says until `q`.
pub fn run(source: Source, interval: Duration) -> io::Result<()> {
    let url = source.url();
    let answers = fetch_always(source, interval)?;
    let mut terminal = ratatui::try_init()?;
    let result = draw_always(&mut terminal, &url, &answers);
    ratatui::try_restore().and(result)
}

type Answer = (Instant, Result<Scrape, String>);

/// Fetches on a thread of its own. The thread ends when the receiver is dropped, and with the process at the latest.
fn fetch_always(source: Source, interval: Duration) -> io::Result<Receiver<Answer>> {
    let (sender, answers) = sync_channel(1);
    let fetch = move || {
        loop {
            let answer = source.fetch();
            if sender.send((Instant::now(), answer)).is_err() {
                return;
            }
            std::thread::sleep(interval);
        }
    };
    std::thread::Builder::new().name("fetch".into()).spawn(fetch)?;
    Ok(answers)
}

fn draw_always(
    terminal: &mut ratatui::DefaultTerminal,
    url: &str,
    answers: &Receiver<Answer>,
) -> io::Result<()> {
    let (mut watch, mut scroll) = (Watch::default(), 0u16);
    let mut shown = (Instant::now(), watch.items(Instant::now()));
    loop {
        if shown.0.elapsed() >= AGE {
            shown = (Instant::now(), watch.items(Instant::now()));
        }
        let mut last = 0;
        terminal.draw(|frame| last = draw(frame, &shown.1, watch.trouble().is_some(), url, scroll))?;
        scroll = scroll.min(last);
        match answers.recv_timeout(BEAT) {
            Ok((at, answer)) => {
                watch.add(at, answer);
                shown = (Instant::now(), watch.items(Instant::now()));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the thread that fetches has ended"));
            }
        }
        while event::poll(Duration::ZERO)? {
            let Event::Key(key) = event::read()? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            let interrupt = key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
            scroll = match key.code {
                _ if interrupt => return Ok(()),
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Down | KeyCode::Char('j') => scroll.saturating_add(1),
                KeyCode::Up | KeyCode::Char('k') => scroll.saturating_sub(1),
                KeyCode::PageDown | KeyCode::Char(' ') => scroll.saturating_add(20),
                KeyCode::PageUp => scroll.saturating_sub(20),
                KeyCode::Home => 0,
                KeyCode::End => u16::MAX,
                _ => scroll,
            };
        }
    }
}

/// Draws everything. The furthest that can be scrolled.
fn draw(frame: &mut Frame, items: &[Item], stale: bool, url: &str, scroll: u16) -> u16 {
    let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(frame.area());
    let state = if stale { "STALE".red() } else { "live".green() };
    let title = format!("pinpool top  {url}  ");
    let title = Line::from(vec![title.into(), state.bold(), "  q ends, arrows scroll".dim()]);
    frame.render_widget(title, head);
    let lines = text::lines(items, usize::from(body.width));
    let last = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_sub(body.height);
    let style = if stale { Style::new().dim() } else { Style::new() };
    frame.render_widget(Paragraph::new(lines).style(style).scroll((scroll.min(last), 0)), body);
    last
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::scrape::parsed;
    use super::*;

    fn drawn(watch: &Watch, scroll: u16) -> (String, u16) {
        let mut terminal = Terminal::new(TestBackend::new(90, 12)).unwrap();
        let mut last = 0;
        let (items, stale) = (watch.items(Instant::now()), watch.trouble().is_some());
        terminal.draw(|frame| last = draw(frame, &items, stale, "http://h/metrics", scroll)).unwrap();
        let buffer = terminal.backend().buffer();
        let rows =
            buffer.content().chunks(90).map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
        (rows.map(|row| format!("{}\n", row.trim_end())).collect(), last)
    }

    #[test]
    fn the_screen_says_what_is_live_and_what_is_stale() {
        let mut watch = Watch::default();
        assert!(drawn(&watch, 0).0.contains("waiting for the first answer"));
        let text = "pinpool_memory_capacity_bytes{pool=\"p\"} 1048576\npinpool_memory_bytes{pool=\"p\",state=\"free\"} 524288\n";
        watch.add(Instant::now(), Ok(parsed(text)));
        let (screen, last) = drawn(&watch, 0);
        assert!(
            screen.contains("http://h/metrics  live") && screen.contains("Pool p: 0 B of 1.0 MiB"),
            "{screen}"
        );
        assert!(last > 0, "more than fits");
        let (end, _) = drawn(&watch, u16::MAX);
        assert!(end.contains("in flight") && !end.contains("Pool p"), "{end}");
        watch.add(Instant::now(), Err("nobody listens there".into()));
        let (screen, _) = drawn(&watch, 0);
        assert!(
            screen.contains("STALE") && screen.contains("ALARM: stale: nobody listens there"),
            "{screen}"
        );
        assert!(screen.contains("Pool p"), "what was known is still there: {screen}");
    }
}

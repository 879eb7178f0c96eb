//! The terminal: draws the page of a [`History`] until a key ends it.
//!
//! A thread of its own fetches, since a server may take seconds to answer. The main thread draws and reads keys. The
//! terminal is restored at every end, also after a panic (by ratatui's panic hook).

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use ratatui::{DefaultTerminal, Frame};

use super::scrape::{Scrape, Server};
use super::text::Page;
use super::view::History;

/// How often keys and answers are looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often the page is computed again without a new answer: it shows ages.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);

/// Shows the server's metrics until `q`, Esc or Ctrl-C.
pub fn run(server: Server, interval: Duration) -> io::Result<()> {
    let url = server.url();
    let answers = fetch_always(server, interval)?;
    let mut terminal = ratatui::try_init()?;
    let result = draw_always(&mut terminal, &url, &answers);
    ratatui::try_restore().and(result)
}

/// When an answer came, and the answer.
type Fetched = (Instant, Result<Scrape, String>);

/// Starts the thread that fetches. It ends when the receiver is dropped, or with the process.
fn fetch_always(server: Server, interval: Duration) -> io::Result<Receiver<Fetched>> {
    let (sender, answers) = sync_channel(1);
    let fetch = move || {
        loop {
            let answer = server.fetch();
            if sender.send((Instant::now(), answer)).is_err() {
                return;
            }
            std::thread::sleep(interval);
        }
    };
    std::thread::Builder::new().name("fetch".into()).spawn(fetch)?;
    Ok(answers)
}

fn draw_always(terminal: &mut DefaultTerminal, url: &str, answers: &Receiver<Fetched>) -> io::Result<()> {
    let (mut history, mut scroll) = (History::default(), 0u16);
    let mut shown: Option<(Instant, Page)> = None;
    loop {
        let now = Instant::now();
        shown = shown.filter(|(at, _)| at.elapsed() < REDRAW_INTERVAL);
        let (_, page) = shown.get_or_insert_with(|| (now, history.page(now)));
        let mut last = 0;
        terminal.draw(|frame| last = draw(frame, page, history.trouble.is_some(), url, scroll))?;
        scroll = scroll.min(last);
        match answers.recv_timeout(POLL_INTERVAL) {
            Ok((at, answer)) => {
                history.add(at, answer);
                shown = None;
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

/// Draws everything. Returns the last line that can be scrolled to.
fn draw(frame: &mut Frame, page: &Page, stale: bool, url: &str, scroll: u16) -> u16 {
    let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(frame.area());
    let state = if stale { "STALE".red() } else { "live".green() };
    let title = format!("pinpool top  {url}  ");
    let title = Line::from(vec![title.into(), state.bold(), "  q ends, arrows scroll".dim()]);
    frame.render_widget(title, head);
    let lines = page.lines.clone();
    let last = u16::try_from(lines.len()).unwrap_or(u16::MAX).saturating_sub(body.height);
    let style = if stale { Style::new().dim() } else { Style::new() };
    frame.render_widget(Paragraph::new(lines).style(style).scroll((scroll.min(last), 0)), body);
    last
}

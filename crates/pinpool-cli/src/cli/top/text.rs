//! A page of text in lines. `--once` prints the lines as plain text; the screen also shows their styles.

use std::fmt::Display;

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

/// The severity of a note.
pub enum Severity {
    Fine,
    Warning,
    Alarm,
}

/// Lines of text.
#[derive(Default)]
pub struct Page {
    pub lines: Vec<Line<'static>>,
}

impl Page {
    pub fn heading(&mut self, text: String) {
        self.lines.push(Line::default());
        self.lines.push(Span::styled(text, Style::new().add_modifier(Modifier::BOLD)).into());
    }

    /// A note is never dim, also where the rest of the screen is. Its first word says the same as its colour.
    pub fn note(&mut self, level: Severity, text: impl Display) {
        // Colours of the terminal's own sixteen, so that its theme decides how they look.
        let (word, style) = match level {
            Severity::Fine => ("", Style::new().fg(Color::Green)),
            Severity::Warning => ("warning: ", Style::new().fg(Color::Yellow)),
            Severity::Alarm => ("ALARM: ", Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)),
        };
        self.lines.push(Span::styled(format!("{word}{text}"), style.remove_modifier(Modifier::DIM)).into());
    }

    /// A table; its first column is left-aligned.
    pub fn table<const N: usize>(&mut self, heads: [&str; N], rows: Vec<[String; N]>) {
        let heads = heads.map(str::to_owned);
        let all = || [&heads].into_iter().chain(&rows);
        let width = |column: usize| all().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; N] = std::array::from_fn(width);
        let text = |row: &[String; N]| {
            let cell = |(column, cell): (usize, &String)| match (column, widths[column]) {
                (0, width) => format!("{cell:<width$}"),
                (_, width) => format!("  {cell:>width$}"),
            };
            row.iter().enumerate().map(cell).collect::<String>()
        };
        self.lines.push(Line::default());
        self.lines.push(Span::styled(text(&heads), Style::new().add_modifier(Modifier::DIM)).into());
        self.lines.extend(rows.iter().map(|row| Line::from(text(row))));
    }

    /// The text without styles.
    pub fn plain(&self) -> String {
        self.lines.iter().map(|line| format!("{}\n", line.to_string().trim_end())).collect()
    }
}

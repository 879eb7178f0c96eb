//! A page of text in lines. `--once` prints the lines as plain text; the screen also shows their styles.

use std::fmt::Display;

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

/// The states of memory, in the order of the bar, each with how it is drawn there. The characters differ, so that the
/// bar is readable without colours. The colours are of the terminal's own sixteen, so that its theme decides how they
/// look.
pub const STATES: [(&str, Sign); 5] = [
    ("checked_out", ('#', Style::new().fg(Color::Blue))),
    ("in_flight", ('>', Style::new().fg(Color::Magenta))),
    ("quarantined", ('x', Style::new().fg(Color::Red))),
    ("cut", ('-', Style::new().fg(Color::Yellow))),
    ("free", ('.', DIM)),
];
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// A character and its style.
type Sign = (char, Style);

/// The severity of a note.
pub enum Severity {
    Fine,
    Warning,
    Alarm,
}

/// Lines of at most about `width` columns.
pub struct Page {
    pub lines: Vec<Line<'static>>,
    width: usize,
}

impl Page {
    pub fn new(width: usize) -> Self {
        Self { lines: Vec::new(), width }
    }

    pub fn heading(&mut self, text: String) {
        self.lines.push(Line::default());
        self.lines.push(Span::styled(text, Style::new().add_modifier(Modifier::BOLD)).into());
    }

    /// A note is never dim, also where the rest of the screen is. Its first word says the same as its colour.
    pub fn note(&mut self, level: Severity, text: impl Display) {
        let (word, style) = match level {
            Severity::Fine => ("", Style::new().fg(Color::Green)),
            Severity::Warning => ("warning: ", Style::new().fg(Color::Yellow)),
            Severity::Alarm => ("ALARM: ", Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)),
        };
        self.lines.push(Span::styled(format!("{word}{text}"), style.remove_modifier(Modifier::DIM)).into());
    }

    /// Parts of a whole, in the order of [`STATES`].
    pub fn bar(&mut self, parts: [f64; STATES.len()], whole: f64) {
        let width = self.width.saturating_sub(2).clamp(10, 100);
        let mut line = Line::from("[");
        let (mut sum, mut drawn) = (0.0, 0);
        for ((_, (fill, style)), part) in STATES.iter().zip(parts) {
            sum += part;
            // Each part ends where the rounded sum does, so that rounding errors do not add up.
            let end = if whole > 0.0 { ((sum / whole).min(1.0) * width as f64).round() as usize } else { 0 };
            line.push_span(Span::styled(fill.to_string().repeat(end.saturating_sub(drawn)), *style));
            drawn = end.max(drawn);
        }
        line.push_span(format!("{}]", " ".repeat(width - drawn)));
        self.lines.push(line);
    }

    /// A table; its first column is left-aligned. Each of the first rows may have a sign before it; the table's other
    /// lines are then indented as far.
    pub fn table<const N: usize>(&mut self, heads: [&str; N], rows: Vec<[String; N]>, signs: &[Sign]) {
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
        let indent = if signs.is_empty() { "" } else { "  " };
        self.lines.push(Line::default());
        self.lines.push(Span::styled(format!("{indent}{}", text(&heads)), DIM).into());
        let signs = signs.iter().map(|(fill, style)| Span::styled(format!("{fill} "), *style));
        for (row, sign) in rows.iter().zip(signs.chain(std::iter::repeat(indent.into()))) {
            self.lines.push(Line::from(vec![sign, text(row).into()]));
        }
    }

    /// The text without styles.
    pub fn plain(&self) -> String {
        self.lines.iter().map(|line| format!("{}\n", line.to_string().trim_end())).collect()
    }
}

//! Items as lines of text. `--once` prints the lines as plain text; the screen also shows their styles.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use super::view::{STATES, Severity, ViewItem};

/// How the states of memory are drawn in a bar, in the order of [`STATES`]. The characters differ, so that the bar is
/// readable without colours. The colours are of the terminal's own sixteen, so that its theme decides how they look.
const STATE_LOOKS: [(char, Style); 5] = [
    ('#', Style::new().fg(Color::Blue)),
    ('>', Style::new().fg(Color::Magenta)),
    ('x', Style::new().fg(Color::Red)),
    ('-', Style::new().fg(Color::Yellow)),
    ('.', DIM),
];
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// All items, in lines of at most about `width` columns.
pub fn lines(items: &[ViewItem], width: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    for item in items {
        match item {
            ViewItem::Heading(text) => {
                lines.push(Line::default());
                lines.push(Span::styled(text.clone(), Style::new().add_modifier(Modifier::BOLD)).into());
            }
            ViewItem::Note(level, text) => lines.push(note(*level, text)),
            ViewItem::Bar(parts, whole) => lines.push(bar(parts, *whole, width)),
            ViewItem::Table(heads, rows) => table(heads, rows, &mut lines),
        }
    }
    lines
}

/// All items as one text.
pub fn plain(items: &[ViewItem], width: usize) -> String {
    lines(items, width).iter().map(|line| format!("{}\n", line.to_string().trim_end())).collect()
}

/// A note is never dim, also where the rest of the screen is. Its first word says the same as its colour.
fn note(level: Severity, text: &str) -> Line<'static> {
    let (word, style) = match level {
        Severity::Fine => ("", Style::new().fg(Color::Green)),
        Severity::Warning => ("warning: ", Style::new().fg(Color::Yellow)),
        Severity::Alarm => ("ALARM: ", Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)),
    };
    Span::styled(format!("{word}{text}"), style.remove_modifier(Modifier::DIM)).into()
}

fn bar(parts: &[(&'static str, f64)], whole: f64, width: usize) -> Line<'static> {
    let width = width.saturating_sub(2).clamp(10, 100);
    let mut line = Line::from("[");
    let (mut sum, mut drawn) = (0.0, 0);
    for (name, part) in parts {
        let (fill, style) = STATE_LOOKS[STATES.iter().position(|state| state == name).unwrap_or(0)];
        sum += part;
        // Each part ends where the rounded sum does, so that rounding errors do not add up.
        let end = if whole > 0.0 { ((sum / whole).min(1.0) * width as f64).round() as usize } else { 0 };
        line.push_span(Span::styled(fill.to_string().repeat(end.saturating_sub(drawn)), style));
        drawn = end.max(drawn);
    }
    line.push_span(format!("{}]", " ".repeat(width - drawn)));
    line
}

fn table(heads: &[&str], rows: &[Vec<String>], lines: &mut Vec<Line>) {
    let width = |column: usize, head: &&str| {
        let cells = rows.iter().filter_map(|row| Some(row.get(column)?.chars().count()));
        cells.chain([head.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = heads.iter().enumerate().map(|(column, head)| width(column, head)).collect();
    let row = |cells: &mut dyn Iterator<Item = &str>| {
        let cell = |(column, (cell, &width)): (usize, (&str, &usize))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        };
        cells.zip(&widths).enumerate().map(cell).collect::<String>()
    };
    // A state of memory has the bar's character before its name; the table's other lines are indented as far.
    let state = |cells: &[String]| {
        STATES.iter().position(|state| cells.first().is_some_and(|name| name.replace(' ', "_") == **state))
    };
    let indent = if rows.iter().any(|cells| state(cells).is_some()) { "  " } else { "" };
    lines.push(Line::default());
    lines.push(Span::styled(format!("{indent}{}", row(&mut heads.iter().copied())), DIM).into());
    lines.extend(rows.iter().map(|cells| {
        let sign = match state(cells).map(|at| STATE_LOOKS[at]) {
            Some((fill, style)) => Span::styled(format!("{fill} "), style),
            None => indent.into(),
        };
        Line::from(vec![sign, row(&mut cells.iter().map(String::as_str)).into()])
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_wide_as_it_should_be() {
        for (free, used) in [(0.0, 0.0), (1.0, 2.0), (33.3, 66.7), (0.4, 99.6), (90.0, 90.0)] {
            let parts = vec![("checked_out", used), ("free", free)];
            let text = plain(&[ViewItem::Bar(parts, 100.0)], 42);
            assert_eq!(text.trim_end().len(), 42, "{text}");
        }
        let text = plain(&[ViewItem::Bar(vec![("checked_out", 25.0), ("free", 50.0)], 100.0)], 42);
        assert_eq!(text, format!("[{}{}{}]\n", "#".repeat(10), ".".repeat(20), " ".repeat(10)));
    }

    #[test]
    fn tables_are_aligned() {
        let rows = vec![vec!["a".to_owned(), "100".to_owned()], vec!["long name".to_owned(), "5".to_owned()]];
        let text = plain(&[ViewItem::Table(vec!["name", "n"], rows)], 80);
        assert_eq!(text, "\nname         n\na          100\nlong name    5\n");
    }

    #[test]
    fn what_is_bad_is_said_in_words() {
        let text = plain(
            &[ViewItem::Note(Severity::Alarm, "x".into()), ViewItem::Note(Severity::Warning, "y".into())],
            80,
        );
        assert_eq!(text, "ALARM: x\nwarning: y\n");
    }
}

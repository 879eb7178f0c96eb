//! Items as lines of text: for `--once` as they are, for the screen with the styles that each part names.

use super::view::{Item, Level, STATES};

/// How a part of a line looks, where there are colours. The words say the same without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Plain,
    Dim,
    Heading,
    Note(Level),
    /// A part of the bar, by its place among the states.
    State(usize),
}

/// Parts of a line, each with its look.
pub type Line = Vec<(Look, String)>;

/// The characters that the parts of a bar are drawn with, so that they differ without colours too.
const FILLS: [char; 5] = ['#', '>', 'x', '-', '.'];

/// All items, in lines of at most about `width` columns.
pub fn lines(items: &[Item], width: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for item in items {
        match item {
            Item::Heading(text) => {
                lines.push(Vec::new());
                lines.push(vec![(Look::Heading, text.clone())]);
            }
            Item::Note(level, text) => {
                lines.push(vec![(Look::Note(*level), format!("{}{text}", word(*level)))])
            }
            Item::Bar(parts, whole) => lines.push(bar(parts, *whole, width)),
            Item::Table(heads, rows) => table(heads, rows, &mut lines),
        }
    }
    lines
}

/// The same as one text.
pub fn plain(items: &[Item], width: usize) -> String {
    let line = |line: Line| {
        let text: String = line.into_iter().map(|(_, text)| text).collect();
        format!("{}\n", text.trim_end())
    };
    lines(items, width).into_iter().map(line).collect()
}

fn word(level: Level) -> &'static str {
    match level {
        Level::Fine => "",
        Level::Warning => "warning: ",
        Level::Alarm => "ALARM: ",
    }
}

fn bar(parts: &[(&'static str, f64)], whole: f64, width: usize) -> Line {
    let width = width.saturating_sub(2).clamp(10, 100);
    let mut line = vec![(Look::Plain, "[".to_owned())];
    let (mut sum, mut drawn) = (0.0, 0);
    for (name, part) in parts {
        let at = STATES.iter().position(|state| state == name).unwrap_or(0);
        sum += part;
        // Up to where the sum reaches, so that roundings do not add up.
        let end = if whole > 0.0 { ((sum / whole).min(1.0) * width as f64).round() as usize } else { 0 };
        line.push((Look::State(at), FILLS[at].to_string().repeat(end.saturating_sub(drawn))));
        drawn = end.max(drawn);
    }
    line.push((Look::Plain, format!("{}]", " ".repeat(width - drawn))));
    line
}

fn table(heads: &[&str], rows: &[Vec<String>], lines: &mut Vec<Line>) {
    let columns = heads.len();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([heads.get(column).map_or(0, |head| head.chars().count())]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let row = |cells: &mut dyn Iterator<Item = &str>| {
        let cell = |(column, cell): (usize, &str)| match (column, widths.get(column).copied().unwrap_or(0)) {
            (0, width) => format!("{cell:<width$}"),
            (_, width) => format!("  {cell:>width$}"),
        };
        cells.enumerate().map(cell).collect::<String>()
    };
    // The memory's states have the bar's signs before their names, and other lines of that table are indented as far.
    let state = |cells: &[String]| {
        STATES.iter().position(|state| cells.first().is_some_and(|name| name.replace(' ', "_") == **state))
    };
    let indent = if rows.iter().any(|cells| state(cells).is_some()) { "  " } else { "" };
    lines.push(Vec::new());
    lines.push(vec![(Look::Dim, format!("{indent}{}", row(&mut heads.iter().copied())))]);
    lines.extend(rows.iter().map(|cells| {
        let sign = match state(cells) {
            Some(at) => (Look::State(at), format!("{} ", FILLS[at])),
            None => (Look::Plain, indent.to_owned()),
        };
        vec![sign, (Look::Plain, row(&mut cells.iter().map(String::as_str)))]
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_wide_as_it_should_be() {
        for (free, used) in [(0.0, 0.0), (1.0, 2.0), (33.3, 66.7), (0.4, 99.6), (90.0, 90.0)] {
            let parts = vec![("checked_out", used), ("free", free)];
            let text = plain(&[Item::Bar(parts, 100.0)], 42);
            assert_eq!(text.trim_end().len(), 42, "{text}");
        }
        let text = plain(&[Item::Bar(vec![("checked_out", 25.0), ("free", 50.0)], 100.0)], 42);
        assert_eq!(text, format!("[{}{}{}]\n", "#".repeat(10), ".".repeat(20), " ".repeat(10)));
    }

    #[test]
    fn tables_are_aligned() {
        let rows = vec![vec!["a".to_owned(), "100".to_owned()], vec!["long name".to_owned(), "5".to_owned()]];
        let text = plain(&[Item::Table(vec!["name", "n"], rows)], 80);
        assert_eq!(text, "\nname         n\na          100\nlong name    5\n");
    }

    #[test]
    fn what_is_bad_is_said_in_words() {
        let text = plain(&[Item::Note(Level::Alarm, "x".into()), Item::Note(Level::Warning, "y".into())], 80);
        assert_eq!(text, "ALARM: x\nwarning: y\n");
    }
}

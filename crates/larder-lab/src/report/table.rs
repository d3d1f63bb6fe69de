//! Tables of a report page: sortable, with an explanation of each column.

use std::fmt::Write;

use super::page::escape;

/// A column.
#[derive(Clone)]
pub struct Column {
    /// Name of the same column in CSV and JSON; empty if there is none.
    pub key: &'static str,
    /// Text of the header.
    pub name: String,
    /// What the numbers mean and which way is better; empty if the header says it all.
    pub help: String,
    /// Whether the cells are numbers.
    pub numeric: bool,
}

impl Column {
    /// A column of texts.
    pub fn text(key: &'static str, name: impl Into<String>, help: impl Into<String>) -> Self {
        Column { key, name: name.into(), help: help.into(), numeric: false }
    }

    /// A column of numbers.
    pub fn number(key: &'static str, name: impl Into<String>, help: impl Into<String>) -> Self {
        Column { key, name: name.into(), help: help.into(), numeric: true }
    }
}

/// A cell.
#[derive(Clone, Default)]
pub struct Cell {
    /// The text in the table.
    pub text: String,
    /// The number by which rows are sorted; `None` for text, and for a number that is missing.
    pub value: Option<f64>,
    /// An interval or a remark in small print behind the text.
    pub note: Option<String>,
    /// Whether the text warns.
    pub warns: bool,
}

impl Cell {
    /// A text.
    pub fn text(text: impl Into<String>) -> Self {
        Cell { text: text.into(), ..Cell::default() }
    }

    /// A number and how it is shown.
    pub fn number(value: f64, text: impl Into<String>) -> Self {
        Cell { text: text.into(), value: Some(value), ..Cell::default() }
    }

    /// A number if there is one, shown by `show`.
    pub fn maybe(value: Option<f64>, show: impl Fn(f64) -> String) -> Self {
        value.map_or_else(|| Cell::text("–"), |value| Cell::number(value, show(value)))
    }

    /// With small print.
    pub fn with_note(self, note: Option<String>) -> Self {
        Cell { note, ..self }
    }

    fn html(&self) -> String {
        let mut out = escape(&self.text);
        if self.warns {
            out = format!("<span class=\"warns\">{out}</span>");
        }
        if let Some(note) = &self.note {
            let _ = write!(out, " <small>{}</small>", escape(note));
        }
        out
    }
}

/// A number with twelve significant digits: more than any table shows, and fewer than differ between a number and its
/// copy in JSON.
fn twelve_digits(value: f64) -> f64 {
    format!("{value:.11e}").parse().unwrap_or(value)
}

/// Longer names are broken on narrow screens, so that other columns are visible beside them.
const NAME_CHARS: usize = 14;

/// A table whose first column names the rows.
pub struct Table {
    /// The subject of the table, for readers of the screen.
    pub caption: String,
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows, with a cell for each column.
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table of texts; the first row is the header.
    pub fn plain(caption: &str, rows: &[Vec<String>]) -> Self {
        let (head, body) = rows.split_first().map_or((&[][..], &[][..]), |(head, body)| (head.as_slice(), body));
        Table {
            caption: caption.to_owned(),
            columns: head.iter().map(|name| Column::text("", name.as_str(), "")).collect(),
            rows: body.iter().map(|row| row.iter().map(Cell::text).collect()).collect(),
        }
    }

    /// The table in a box that scrolls, with its legend below.
    pub fn html(&self) -> String {
        let caption = escape(&self.caption);
        let names = self.rows.iter().filter_map(|row| row.first());
        let class = if names.into_iter().any(|cell| cell.text.chars().count() > NAME_CHARS) { " long" } else { "" };
        let mut out = format!(
            "<div class=\"scroll\" role=\"region\" aria-label=\"{caption}\" tabindex=\"0\">\n\
             <table class=\"sortable{class}\">\n<caption>{caption}</caption>\n<thead><tr>"
        );
        for Column { key, name, help, numeric } in &self.columns {
            let class = if *numeric { " class=\"n\"" } else { "" };
            let key = if key.is_empty() { String::new() } else { format!(" data-key=\"{key}\"") };
            let help = if help.is_empty() { String::new() } else { format!(" title=\"{}\"", escape(help)) };
            let _ = write!(out, "<th scope=\"col\"{class}{key}{help}>{}</th>", escape(name));
        }
        out.push_str("</tr></thead>\n<tbody>\n");
        self.rows.iter().for_each(|row| out.push_str(&self.line(row)));
        out.push_str("</tbody>\n</table>\n</div>\n");
        out + &self.legend()
    }

    fn line(&self, row: &[Cell]) -> String {
        let cell = |(at, (cell, column)): (usize, (&Cell, &Column))| {
            let class = if column.numeric { " class=\"n\"" } else { "" };
            let value = cell.value.map_or_else(String::new, |value| format!(" data-v=\"{}\"", twelve_digits(value)));
            match at {
                0 => format!("<th scope=\"row\"{class}{value}>{}</th>", cell.html()),
                _ => format!("<td{class}{value}>{}</td>", cell.html()),
            }
        };
        format!("<tr>{}</tr>\n", row.iter().zip(&self.columns).enumerate().map(cell).collect::<String>())
    }

    /// The explanations of the columns; nothing if there are none.
    fn legend(&self) -> String {
        let explained = self.columns.iter().filter(|column| !column.help.is_empty());
        let rows: String = explained
            .map(|c| format!("<div><dt>{}</dt><dd>{}</dd></div>\n", escape(&c.name), escape(&c.help)))
            .collect();
        if rows.is_empty() {
            String::new()
        } else {
            format!(
                "<details class=\"columns\"><summary>What the columns mean</summary>\n<dl>\n{rows}</dl></details>\n"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_hold_what_they_are_sorted_by_and_texts_are_escaped() {
        let table = Table {
            caption: "<c>".into(),
            columns: vec![Column::text("", "<n>", ""), Column::number("x_y", "x", "\"<h>\"")],
            rows: vec![
                vec![Cell::text("a<b"), Cell::number(0.1 + 0.2, "0.30").with_note(Some("<r>".into()))],
                vec![Cell { warns: true, ..Cell::text("<w>") }, Cell::maybe(None, |n| format!("{n}"))],
            ],
        };
        let html = table.html();
        for bad in ["<c>", "<n>", "<h>", "a<b", "<r>", "<w>"] {
            assert!(!html.contains(bad), "{bad}");
        }
        assert!(html.contains("<td class=\"n\" data-v=\"0.3\">0.30 <small>&lt;r&gt;</small></td>"));
        assert!(html.contains("<td class=\"n\">–</td>") && html.contains("data-key=\"x_y\""));
        assert_eq!(html.matches("<dt>").count(), 1);
    }
}

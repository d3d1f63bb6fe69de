//! Tables of report pages and CSV files, to compare their numbers.

use std::path::Path;

/// A table of a report page.
pub struct PageTable {
    /// Names of the columns in CSV and JSON; empty where there is none.
    pub keys: Vec<String>,
    /// The first cell of each row, as text.
    pub names: Vec<String>,
    /// What each cell is sorted by: its number with twelve digits.
    pub values: Vec<Vec<Option<f64>>>,
}

impl PageTable {
    /// All tables of a page that have a column of this name.
    pub fn with(page: &str, key: &str) -> Vec<PageTable> {
        let tables = page.split("<table").skip(1).map(|rest| rest.split("</table>").next().unwrap());
        tables.map(PageTable::parse).filter(|table| table.keys.iter().any(|k| k == key)).collect()
    }

    fn parse(html: &str) -> PageTable {
        let (head, body) = html.split_once("<tbody>").unwrap();
        let attribute = |tag: &str, name: &str| {
            let tag = tag.split('>').next().unwrap();
            tag.split_once(&format!(" {name}=\"")).map(|(_, rest)| rest.split('"').next().unwrap().to_owned())
        };
        let rows: Vec<&str> = body.split("<tr>").skip(1).collect();
        let cells = |row: &str| row.split("<t").skip(1).map(|cell| attribute(cell, "data-v")).collect::<Vec<_>>();
        let name = |row: &&str| row.split_once('>').unwrap().1.split('<').next().unwrap().to_owned();
        PageTable {
            keys: head.split("<th ").skip(1).map(|th| attribute(th, "data-key").unwrap_or_default()).collect(),
            names: rows.iter().map(name).collect(),
            values: rows
                .iter()
                .map(|row| cells(row).into_iter().map(|value| value.map(|v| v.parse().unwrap())).collect())
                .collect(),
        }
    }

    /// Compares each number of a row with the number of that name in a CSV line; returns how many there were.
    pub fn compare(&self, row: usize, line: &[(String, String)]) -> usize {
        let mut compared = 0;
        for (key, value) in self.keys.iter().zip(&self.values[row]) {
            let (Some(value), Some((_, want))) = (value, line.iter().find(|(name, _)| name == key)) else { continue };
            if want.is_empty() {
                assert!([0.0, 1.0].contains(value), "{key}: {value} in place of nothing");
                continue;
            }
            let decimals = want.split_once('.').map_or(0, |(_, digits)| digits.len());
            let rounding = 0.5 * 10f64.powi(-(decimals as i32)) + 1e-12 * value.abs();
            assert!((value - want.parse::<f64>().unwrap()).abs() <= rounding, "{key}: {value}, in the CSV {want}");
            compared += 1;
        }
        compared
    }
}

/// Whether two numbers, if there are any, have equal first eleven digits.
pub fn is_equal(a: Option<f64>, b: Option<f64>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-11 * a.abs().max(b.abs()),
        (a, b) => a == b,
    }
}

/// The lines of a CSV file, as names and values.
pub fn csv_lines(path: &Path) -> Vec<Vec<(String, String)>> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(cells);
    let head = lines.next().unwrap();
    lines.map(|line| head.iter().cloned().zip(line).collect()).collect()
}

/// The cells of a line; commas in quotes belong to a cell.
fn cells(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            c => cells.last_mut().unwrap().push(c),
        }
    }
    cells
}

/// Checks what every report states and that it loads nothing.
pub fn check_frame(page: &str, command: &str) {
    for part in ["Content-Security-Policy", "default-src 'none'", "Date", "Processor", "kernels", "Threads", "Runs"] {
        assert!(page.contains(part), "the page lacks {part}");
    }
    assert!(page.contains("Intervals") && page.contains(env!("CARGO_PKG_VERSION")) && page.contains(command));
    for part in ["NaN", "href=", "src=", "url(", "@import", " style=", " onclick="] {
        assert!(!page.contains(part), "the page has {part}");
    }
}

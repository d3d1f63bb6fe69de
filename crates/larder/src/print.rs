//! Numbers as people read them.

use larder_engine::Routing;
use larder_policy::routing::quality::Quality;
use serde_json::{Value, json};

/// What routing by the cache has cost, in words.
pub fn quality(strategy: &str, quality: &Quality) -> String {
    format!(
        "{strategy}: {:.1} % of the experts are not the model's own choice, {:.1} % of the router's probability kept, KL \
         {:.4}",
        100.0 * quality.substituted_share(),
        100.0 * quality.kept_mass(),
        quality.mean_kl(),
    )
}

/// The same for a program; null if every choice was the model's own.
pub fn routing(routing: &Routing) -> Value {
    let (Some(quality), Some(report)) = (routing.quality(), routing.report()) else { return Value::Null };
    json!({
        "choices": quality.choices,
        "substituted": quality.substituted_share(),
        "kept_mass": quality.kept_mass(),
        "kl": quality.mean_kl(),
        "lambda": report.lambda,
        "delta": report.delta,
    })
}

/// A share in percent, with a digit behind the point where there is need of it.
pub fn percent(share: f64) -> String {
    let digits = usize::from((100.0 * share).fract().abs() > 1e-9);
    format!("{:.digits$} %", 100.0 * share)
}

/// A number of things, of which one has a name of its own.
pub fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// Bytes with a decimal unit and three digits or so.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match (unit, value) {
        (0, _) => format!("{n} B"),
        (_, v) if v < 9.995 => format!("{v:.2} {}", UNITS[unit]),
        (_, v) if v < 99.95 => format!("{v:.1} {}", UNITS[unit]),
        (_, v) => format!("{v:.0} {}", UNITS[unit]),
    }
}

/// Lines of cells as columns: the first to the left, the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[c] - cell.chars().count());
            match c {
                0 => line.push_str(&format!("{cell}{pad}")),
                _ => line.push_str(&format!("  {pad}{cell}")),
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Columns of words, each as wide as it must be.
pub fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let padded = |(cell, width): (&String, &usize)| format!("{cell:<width$}");
        let cells: Vec<String> = row.iter().zip(&widths).map(padded).collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_never_round_to_a_thousand() {
        let shown: Vec<_> = [0, 999, 999_499, 999_500, 1_234_567_890].into_iter().map(bytes).collect();
        assert_eq!(shown, ["0 B", "999 B", "999 kB", "1.00 MB", "1.23 GB"]);
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "1".into()], vec!["long".into(), "1000".into()]];
        assert_eq!(table(&rows), "a        1\nlong  1000\n");
        assert_eq!(columns(&rows), "a     1\nlong  1000\n");
    }
}

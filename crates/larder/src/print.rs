//! Numbers and tables as text.

use larder_engine::Routing;
use larder_policy::routing::quality::Quality;
use serde_json::{Value, json};

/// Routing quality of a strategy, as text.
pub fn quality(strategy: &str, quality: &Quality) -> String {
    format!(
        "{strategy}: {:.1} % of experts substituted, {:.1} % of the router's probability kept, KL {:.4}",
        100.0 * quality.substituted_share(),
        100.0 * quality.kept_mass(),
        quality.mean_kl(),
    )
}

/// Routing quality as JSON; null for the model's own routing.
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

/// A share in percent, with one decimal if it is not a whole number.
pub fn percent(share: f64) -> String {
    let digits = usize::from((100.0 * share).fract().abs() > 1e-9);
    format!("{:.digits$} %", 100.0 * share)
}

/// A count with its noun: `one` for 1, else `many`.
pub fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];

/// Bytes with a decimal unit and about three digits.
pub fn bytes(n: u64) -> String {
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

/// A table; the first column is left-aligned, the others are right-aligned.
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

/// A table with left-aligned columns.
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

/// The smallest size of three digits, as a flag takes it, that is at least `n` bytes.
pub fn size_up(n: u64) -> String {
    flag_size(n, u64::div_ceil)
}

/// The largest size of three digits, as a flag takes it, that is at most `n` bytes.
pub fn size_down(n: u64) -> String {
    flag_size(n, |n, step| n / step)
}

fn flag_size(n: u64, divide: fn(u64, u64) -> u64) -> String {
    let fits = |(_, unit): &(usize, u64)| divide(n, *unit) < 1000;
    let units = (0..UNITS.len()).map(|at| (at, 1000u64.pow(at as u32)));
    let (at, unit) = units.clone().find(fits).unwrap_or((UNITS.len() - 1, 1000u64.pow(4)));
    // Below 10 and 100, two and one decimals.
    let decimals = match divide(n, unit) {
        _ if at == 0 => 0,
        whole if whole < 10 && divide(n, unit / 100) < 1000 => 2,
        whole if whole < 100 && divide(n, unit / 10) < 1000 => 1,
        _ => 0,
    };
    let step = unit / 10u64.pow(decimals);
    let count = divide(n, step.max(1));
    format!("{:.*}{}", decimals as usize, count as f64 / 10f64.powi(decimals as i32), UNITS[at])
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
    fn suggested_sizes_are_large_or_small_enough() {
        let (up, down) = (size_up(655_360), size_down(655_360));
        assert_eq!((up.as_str(), down.as_str()), ("656kB", "655kB"));
        assert_eq!((size_up(4_194_305), size_down(4_194_305)), ("4.20MB".into(), "4.19MB".into()));
        assert_eq!((size_up(999_999), size_down(999_999)), ("1.00MB".into(), "999kB".into()));
        for n in [0, 1, 999, 1000, 1024, 9_999_999, 99_960_000, 123_456_789_012] {
            let of = |text: String| larder_core::parse_bytes(&text).unwrap();
            assert!(of(size_up(n)) >= n && of(size_down(n)) <= n, "{n}: {} {}", size_up(n), size_down(n));
        }
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "1".into()], vec!["long".into(), "1000".into()]];
        assert_eq!(table(&rows), "a        1\nlong  1000\n");
        assert_eq!(columns(&rows), "a     1\nlong  1000\n");
    }
}

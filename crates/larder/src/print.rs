//! Numbers and tables as text.

use std::time::Duration;

pub use larder_core::format_bytes as bytes;
use larder_core::printable;
use larder_engine::{OutputLoss, Routing};
use larder_model::RowTraffic;
use larder_policy::routing::RoutingSpec;
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

/// How far the outputs of a strategy are from exact ones, as text; `time` is all that decoding took.
pub fn output_loss(loss: &OutputLoss, time: Duration) -> String {
    if loss.tokens == 0 {
        return "output: not measured; tokens can be decoded twice where experts are read into main memory and not each has a slot".into();
    }
    let failed = if loss.failed > 0 { format!("; {} could not be", loss.failed) } else { String::new() };
    let (Some(kl), Some(agreement)) = (loss.mean_kl(), loss.agreement()) else {
        return format!("output: not measured, none of {} tokens was decoded twice{failed}", loss.tokens);
    };
    let interval = loss.half_interval().map(|half| format!(" ± {half:.4}")).unwrap_or_default();
    format!(
        "output: KL {kl:.4}{interval} nats from exact, same likeliest token {:.1} %; {} of {} tokens decoded twice ({:.1} % of the time){failed}",
        100.0 * agreement,
        loss.measured,
        loss.tokens,
        100.0 * loss.time.as_secs_f64() / time.as_secs_f64().max(1e-9),
    )
}

/// The loss that a strategy expects, as text; `None` if it has no budget of it.
pub fn expected_loss(spec: &RoutingSpec, routing: Option<&Routing>) -> Option<String> {
    let (budget, predicted) = (spec.quality_budget()?, routing?.report()?.predicted_loss?);
    Some(format!("quality: loss of {predicted:.4} nats per token expected, {budget} allowed"))
}

/// How far the outputs of a strategy are from exact ones, as JSON.
pub fn output_loss_json(loss: &OutputLoss) -> Value {
    json!({
        "kl": loss.mean_kl(),
        "kl_half_interval": loss.half_interval(),
        "agreement": loss.agreement(),
        "measured": loss.measured,
        "failed": loss.failed,
        "tokens": loss.tokens,
        "seconds": loss.time.as_secs_f64(),
    })
}

/// Routing quality and the loss of outputs as JSON; null for the model's own routing.
pub fn routing(routing: &Routing, loss: &OutputLoss) -> Value {
    let (Some(quality), Some(report)) = (routing.quality(), routing.report()) else { return Value::Null };
    json!({
        "output": output_loss_json(loss),
        "choices": quality.choices,
        "substituted": quality.substituted_share(),
        "kept_mass": quality.kept_mass(),
        "kl": quality.mean_kl(),
        "expected_loss": report.predicted_loss,
        "lambda": report.lambda,
        "delta": report.delta,
    })
}

/// How many rows of tables of n-grams were read from the SSD.
pub fn ngram_rows(rows: RowTraffic) -> String {
    format!("{} n-gram rows read, {} in memory", rows.reads, rows.hits)
}

/// The same as JSON.
pub fn ngram_rows_json(rows: RowTraffic) -> Value {
    json!({"reads": rows.reads, "hits": rows.hits})
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

/// A time in whole seconds, a begun one as a whole one.
pub fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64().ceil() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds} s"),
        (0, _) => format!("{minutes} min {seconds} s"),
        _ => format!("{hours} h {minutes} min"),
    }
}

/// A table; the first column is left-aligned, the others are right-aligned.
pub fn table(rows: &[Vec<String>]) -> String {
    let rows = &printable_cells(rows);
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
    let rows = &printable_cells(rows);
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

/// Cells may have names that a model's files give.
fn printable_cells(rows: &[Vec<String>]) -> Vec<Vec<String>> {
    rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units() {
        let of = |seconds: f64| time(Duration::from_secs_f64(seconds));
        assert_eq!([0.0, 0.2, 59.5, 204.0].map(of), ["0 s", "1 s", "1 min 0 s", "3 min 24 s"]);
        assert_eq!([3600.0, 45_296.0].map(of), ["1 h 0 min", "12 h 34 min"]);
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "1".into()], vec!["long".into(), "1000".into()]];
        assert_eq!(table(&rows), "a        1\nlong  1000\n");
        assert_eq!(table(&[vec!["\x1b[2J".into(), "a\nb".into()]]), "\\u{1b}[2J  a\\nb\n");
        assert_eq!(columns(&rows), "a     1\nlong  1000\n");
    }
}

//! The measurements of `larder tune` as a page: bytes and time per token against the loss of the output.

use larder_core::format_bytes;
use larder_engine::{MeasuredSetting, QualityCalibration};

use super::{Cell, Chart, Column, Line, Page, Style, Table, chart_group, group, paragraph};
use crate::{Fact, ReportOrigin};

/// A calibration with the speed and loss to be expected of budgets.
pub struct QualityReport<'a> {
    /// The calibration.
    pub made: &'a QualityCalibration,
    /// Budgets with their names and the settings that are expected to keep to them.
    pub expected: &'a [(&'a str, f64, MeasuredSetting)],
    /// How well losses of tokens are predicted: the ratio of predicted to true ones, and their correlation.
    pub fit: (f64, f64),
    /// How the numbers came about.
    pub origin: &'a ReportOrigin,
}

/// The measured settings and the budgets, as a self-contained page.
pub fn quality_page(report: &QualityReport) -> String {
    let made = report.made;
    let charts = [
        chart(report, "Read from the SSD", "kB read per token", |setting| setting.bytes / 1e3),
        chart(report, "Time", "ms per token", |setting| setting.milliseconds),
    ];
    let mut body = group(
        "What a loss buys",
        &(paragraph(
            "Each point is a setting of all levers. The loss is the mean KL divergence of the output from the model's own, \
             in nats per token, at tokens that were computed twice.",
        ) + &chart_group(&charts)),
    );
    body += &group("Budgets", &budgets(report).html());
    body += &group("Settings", &settings(report).html());
    Page {
        title: "Speed for a loss of quality",
        lead: &format!(
            "{} tokens of {}, {} of {} experts of each layer in memory: what a budget of output loss saves.",
            made.tokens, made.text, made.slots, made.experts
        ),
        made: report.origin,
        method: &method(report),
    }
    .html(&body)
}

fn method(report: &QualityReport) -> Vec<Fact> {
    let made = report.made;
    vec![
        Fact::new("Text", format!("{}, {} tokens", made.text, made.tokens)),
        Fact::new("Steps", "one token per step, because the choice of experts depends on the cache"),
        Fact::new("Cache", format!("eviction {}, {} slots per layer", made.eviction, made.slots)),
        Fact::new("Runs", "one per setting, each from an empty cache; everything but time repeats exactly"),
        Fact::new("Intervals", "none"),
        Fact::new("Loss", "every second token was computed a second time with the model's own routing"),
        Fact::new(
            "Prediction",
            format!("predicted and true losses of tokens at random settings correlate by {:.2}", report.fit.1),
        ),
    ]
}

fn chart(report: &QualityReport, title: &str, y: &str, value: impl Fn(&MeasuredSetting) -> f64) -> Chart {
    let points = report.made.settings.iter().map(|setting| (setting.loss, value(setting), None)).collect();
    let mut lines = vec![Line { name: "measured".into(), color: 0, style: Style::Strong, points }];
    for (at, (name, _, setting)) in report.expected.iter().enumerate() {
        let points = vec![(setting.loss, value(setting), None)];
        lines.push(Line { name: (*name).to_owned(), color: at + 1, style: Style::Plain, points });
    }
    let x = "loss in nats per token".to_owned();
    Chart { title: title.to_owned(), x, y: y.to_owned(), lines, percent: false, y_range: Some((0.0, 0.0)) }
}

fn budgets(report: &QualityReport) -> Table {
    let row = |(name, budget, setting): &(&str, f64, MeasuredSetting)| {
        let mut cells = vec![Cell::text(format!("--quality {name}")), Cell::number(*budget, budget.to_string())];
        cells.extend(cells_of(setting));
        cells
    };
    let mut columns = vec![
        Column::text("", "flag", ""),
        Column::number("", "budget", "The most that the output may lose on average, in nats per token."),
    ];
    columns.extend(columns_of());
    Table {
        caption: "Expected speed and loss of each budget".into(),
        columns,
        rows: report.expected.iter().map(row).collect(),
    }
}

fn settings(report: &QualityReport) -> Table {
    let row = |(at, setting): (usize, &MeasuredSetting)| {
        let mut cells = vec![Cell::number(at as f64, at.to_string())];
        cells.extend(cells_of(setting));
        cells
    };
    let mut columns = vec![Column::number("", "setting", "0 is the model's own routing.")];
    columns.extend(columns_of());
    let rows = report.made.settings.iter().enumerate().map(row).collect();
    Table { caption: "Measured settings".into(), columns, rows }
}

fn columns_of() -> Vec<Column> {
    vec![
        Column::number("loss", "loss", "Mean KL divergence of the output, in nats per token."),
        Column::number("bytes", "read/token", "Bytes read from the SSD per token."),
        Column::number("milliseconds", "ms/token", "Time per token, without that of computing tokens twice."),
        Column::number("lambda", "λ", "The bonus for experts in memory."),
        Column::number("price", "price", "The loss in nats that is accepted rather than to read an expert."),
    ]
}

fn cells_of(setting: &MeasuredSetting) -> Vec<Cell> {
    let MeasuredSetting { lambda, price, loss, bytes, milliseconds, .. } = *setting;
    vec![
        Cell::number(loss, format!("{loss:.4}")),
        Cell::number(bytes, format_bytes(bytes.round() as u64)),
        Cell::number(milliseconds, format!("{milliseconds:.2}")),
        Cell::number(lambda, format!("{lambda:.2}")),
        Cell::number(price, format!("{price:.2e}")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_every_setting_and_budget() {
        let setting = |loss: f64| MeasuredSetting { loss, bytes: 1e6 * (1.0 - loss), ..MeasuredSetting::default() };
        let settings = vec![setting(0.0), setting(0.01), setting(0.04)];
        let made = QualityCalibration { text: "t <1>".into(), settings, ..QualityCalibration::default() };
        let expected = [("light", 0.005, made.at_loss(0.004)), ("fast", 0.02, made.at_loss(0.015))];
        let origin = ReportOrigin { command: "larder <tune>".into(), ..ReportOrigin::default() };
        let page = quality_page(&QualityReport { made: &made, expected: &expected, fit: (1.0, 0.5), origin: &origin });
        assert!(!page.contains("t <1>") && !page.contains("<tune>") && !page.contains("NaN"));
        assert_eq!((page.matches("<svg viewBox=\"0 0 400").count(), page.matches("<table").count()), (2, 2));
        assert!(page.contains("--quality fast") && page.contains("correlate by 0.50"));
    }
}

//! Measured speeds as a page.

use super::box_plot::{BoxGroup, BoxPlot};
use super::chart::figures;
use super::speed_report::SPEED_COLUMNS;
use super::table::{Cell, Column, Table};
use super::{
    Chart, Line, Page, SpeedColumn, SpeedReport, SpeedSection, StrategySpeeds, Style, definitions, group, paragraph,
};
use crate::{Fact, median_interval_text};

/// The report as a self-contained page.
pub fn speed_page(speeds: &SpeedReport) -> String {
    let method = [
        Fact::new("Runs", format!("{} per strategy, of {} tokens each, in turns", speeds.runs, speeds.tokens)),
        Fact::new("Prompts", "another for each run, the same for all strategies; one warm-up run is not counted"),
        Fact::new("Values", "medians over runs"),
        Fact::new("Intervals", median_interval_text(speeds.runs)),
    ];
    let mut body: String = speeds.sections.iter().map(section).collect();
    if !speeds.machine.is_empty() {
        body += &group("Machine", &definitions("facts", &speeds.machine));
    }
    Page {
        title: "Routing strategies compared",
        lead: "Speed of decode, and what it costs in quality: strategies that prefer experts in memory read less, and \
               choose other experts than the model would.",
        made: &speeds.made,
        method: &method,
    }
    .html(&body)
}

fn section(part: &SpeedSection) -> String {
    let Some(baseline) = part.strategies.first() else { return String::new() };
    let mut body = definitions("facts", &part.facts);
    body += &part.verdict(baseline).map(|text| paragraph(&text)).unwrap_or_default();
    body += &figures(&[part.price(baseline)], &[part.spread()]);
    body += &part.table(baseline).html();
    group(&part.title, &body)
}

/// Index of a strategy's colour.
fn color(strategy: usize) -> usize {
    strategy % 12
}

impl SpeedSection {
    /// The fastest strategy and its price in a sentence.
    fn verdict(&self, baseline: &StrategySpeeds) -> Option<String> {
        let text = |strategy: &StrategySpeeds, key: &str| {
            let column = SPEED_COLUMNS.iter().find(|column| column.key == key)?;
            Some((strategy.estimate(column, baseline)?.value, column.show))
        };
        let speedup = |strategy: &StrategySpeeds| text(strategy, "speedup").map_or(0.0, |(value, _)| value);
        let best = self.strategies.iter().max_by(|a, b| speedup(a).total_cmp(&speedup(b)))?;
        let shown = |key| text(best, key).map(|(value, show)| show(value));
        (best.routing != baseline.routing).then_some(())?;
        Some(format!(
            "Fastest is {}: {} the speed of {}, with {} of the experts that the model itself would have chosen (KL {}).",
            best.routing,
            shown("speedup")?,
            baseline.routing,
            shown("agreement")?,
            shown("kl")?
        ))
    }

    /// Speed against loss of quality.
    fn price(&self, baseline: &StrategySpeeds) -> Chart {
        let of = |strategy: &StrategySpeeds, key: &str| {
            let column = SPEED_COLUMNS.iter().find(|column: &&SpeedColumn| column.key == key)?;
            strategy.estimate(column, baseline)
        };
        let line = |(at, strategy): (usize, &StrategySpeeds)| {
            let point = of(strategy, "kl").zip(of(strategy, "tokens_per_second"));
            let points = point.map(|(kl, speed)| (kl.value, speed.value, Some((speed.low, speed.high))));
            let points = points.into_iter().collect();
            Line { name: strategy.routing.clone(), color: color(at), style: Style::Plain, points }
        };
        Chart {
            title: "Speed and loss of quality".into(),
            x: "KL, nats".into(),
            y: "tokens per second".into(),
            lines: self.strategies.iter().enumerate().map(line).collect(),
            percent: false,
            y_range: Some((0.0, 0.0)),
        }
    }

    fn spread(&self) -> BoxPlot {
        let group = |(at, strategy): (usize, &StrategySpeeds)| BoxGroup {
            name: strategy.routing.clone(),
            color: color(at),
            values: strategy.runs.iter().map(|run| run.tokens_per_second).collect(),
        };
        let groups = self.strategies.iter().enumerate().map(group).collect();
        BoxPlot { title: "Speed of each run".into(), x: "tokens per second".into(), unit: "run", groups }
    }

    fn table(&self, baseline: &StrategySpeeds) -> Table {
        let name = Column::text("routing", "routing", "The routing strategy; the first is the baseline.");
        let column = |column: &SpeedColumn| Column::number(column.key, column.name, column.help);
        let row = |strategy: &StrategySpeeds| {
            let cells = SPEED_COLUMNS.iter().map(|column| cell(strategy, column, baseline));
            std::iter::once(Cell::text(&strategy.routing)).chain(cells).collect()
        };
        Table {
            caption: self.title.clone(),
            columns: std::iter::once(name).chain(SPEED_COLUMNS.iter().map(column)).collect(),
            rows: self.strategies.iter().map(row).collect(),
        }
    }
}

/// A value with its interval, if that is wider than the value.
fn cell(strategy: &StrategySpeeds, column: &SpeedColumn, baseline: &StrategySpeeds) -> Cell {
    let Some(found) = strategy.estimate(column, baseline) else { return Cell::text("–") };
    if strategy.lossless && ["kl", "agreement"].contains(&column.key) {
        return Cell::number(found.value, "exact");
    }
    let [value, low, high] = [found.value, found.low, found.high].map(column.show);
    Cell::number(found.value, value).with_note((low != high).then(|| format!("{low} to {high}")))
}

#[cfg(test)]
mod tests {
    use super::super::speed_report::tests::strategies;
    use super::*;
    use crate::ReportOrigin;

    #[test]
    fn speed_stands_beside_its_price_and_names_are_escaped() {
        let part = SpeedSection { title: "a<b".into(), facts: vec![Fact::new("<k>", "<v>")], strategies: strategies() };
        let made = ReportOrigin::default();
        let page = speed_page(&SpeedReport { made, runs: 3, tokens: 8, machine: vec![], sections: vec![part] });
        for bad in ["a<b", "<x>", "<k>", "<v>", "NaN"] {
            assert!(!page.contains(bad), "{bad}");
        }
        assert!(page.contains("Fastest is prior:&lt;x&gt;: 1.50× the speed of original, with 75.0 % of the experts"));
        assert!(page.contains(">30.00 <small>15.00 to 60.00</small></td>") && page.contains(">exact</td>"), "{page}");
        assert!(page.contains("lowest and highest of 3 runs"));
    }
}

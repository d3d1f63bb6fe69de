//! The results of a sweep as a page.

use larder_core::format_bytes;
use larder_policy::eviction::{BELADY, LRU};

use super::box_plot::{BoxGroup, BoxPlot};
use super::chart::figures;
use super::heatmap::{Heatmap, KEYS};
use super::{Cell, Chart, Column, Line, Page, Style, SweepReport, SweepRow, Table, chart_group, group};
use crate::Fact;

/// The report as a self-contained page.
pub fn sweep_page(report: &SweepReport, heats: &[Heatmap]) -> String {
    let mut body = String::new();
    for scope in report.scopes() {
        let plots: Vec<BoxPlot> = spread(report, scope).into_iter().collect();
        let parts = figures(&charts(report, scope), &plots) + &overview(report, scope).html();
        body += &group(pools(scope), &parts);
    }
    if let Some(chart) = scopes_compared(report) {
        body += &group("Cost of separate pools", &chart_group(&[chart]));
    }
    if !heats.is_empty() {
        let maps: String = heats.iter().map(Heatmap::figure).collect();
        body += &group("One layer, pass by pass", &(KEYS.to_owned() + &maps));
    }
    for scope in report.scopes() {
        body += &group(&format!("All numbers: {}", pools(scope).to_lowercase()), &numbers(report, scope).html());
    }
    Page {
        title: "Eviction policies compared",
        lead: "A recorded routing trace, replayed with each policy and cache size: how often an expert is not in memory.",
        made: &report.made,
        method: &method(report),
    }
    .html(&body)
}

/// The pools of a scope.
fn pools(scope: &str) -> &'static str {
    match scope {
        "global" => "One pool for all layers",
        _ => "One pool per layer",
    }
}

/// The key of a trace's metadata that names the model.
const MODEL: &str = "model";

/// The trace, and what was counted and computed.
fn method(report: &SweepReport) -> Vec<Fact> {
    let trace = &report.trace;
    let model = trace.meta.get(MODEL).map_or("not named in the trace", String::as_str);
    let mut all = vec![
        Fact::new("Model", model),
        Fact::new("Trace", format!("{} tokens in {} sequences", grouped(trace.tokens as u64), trace.sequences)),
        Fact::new(
            "Routing",
            format!("{} of {} experts per token in each of {} layers", trace.top_k, trace.experts, trace.layers),
        ),
        Fact::new(
            "Start",
            match report.start.as_str() {
                "carried" => "each sequence starts with the cache that the previous one left",
                _ => "each sequence starts with an empty cache",
            },
        ),
        Fact::new("Capacity", "slots per layer; one pool for all layers has that many times the number of layers"),
        Fact::new("Runs", "one replay per setting: it counts, and repeats exactly"),
        Fact::new("Intervals", format!("95 %, from {} bootstrap samples of the sequences", crate::gap::SAMPLES)),
    ];
    if let Some(p) = &report.profile {
        let speed = format!(
            "computed, not measured: experts of {:.2} MB, SSD {:.2} GB/s with a latency of {:.0} µs, memory {:.1} GB/s; {:.2} ms \
             per token for everything else; {:.0} % of the compute time overlaps with reads",
            p.expert_bytes / 1e6,
            p.ssd_rate / 1e9,
            p.latency_s * 1e6,
            p.memory_rate / 1e9,
            p.compute_s * 1e3,
            p.overlap * 100.0
        );
        all.push(Fact::new("Speeds", speed));
    }
    let origin = trace.meta.iter().filter(|(key, _)| *key != MODEL);
    all.extend(origin.map(|(key, value)| Fact::new(format!("Trace: {key}"), value.as_str())));
    all
}

/// The charts of one scope.
fn charts(report: &SweepReport, scope: &str) -> Vec<Chart> {
    let tokens = report.trace.tokens.max(1) as f64;
    let chart = |title: &str, y: &str, percent, y_range, value: &dyn Fn(&SweepRow) -> Option<Value>| Chart {
        title: title.into(),
        x: "slots per layer".into(),
        y: y.into(),
        lines: lines(report, scope, value),
        percent,
        y_range,
    };
    let mut all = vec![
        chart("Hit rate", "share of cache hits", true, Some((0.0, 1.0)), &|row| Some((row.hit_rate(), None))),
        chart("Misses", "misses per token", false, Some((0.0, 0.0)), &|row| Some((row.misses as f64 / tokens, None))),
    ];
    let has = |some: fn(&SweepRow) -> bool| report.rows.iter().any(|row| row.scope == scope && some(row));
    if has(|row| row.over_belady.is_some()) {
        all.push(chart("Misses vs. Belady", "multiple of Belady's misses", false, Some((1.0, 1.0)), &|row| {
            row.over_belady.map(|n| (n, None))
        }));
    }
    if has(|row| row.gap_closed.is_some()) {
        all.push(chart(
            "Gap closed from LRU to Belady",
            "share of the gap, from −50 %",
            true,
            Some((0.0, 1.0)),
            &|row| row.gap_closed.filter(|gap| gap.value >= -0.5).map(|gap| (gap.value, Some((gap.low, gap.high)))),
        ));
    }
    if has(|row| row.tokens_per_second.is_some()) {
        all.push(chart("Estimated speed", "tokens per second", false, Some((0.0, 0.0)), &|row| {
            row.tokens_per_second.map(|n| (n, None))
        }));
    }
    all.push(chart("Lifetime in the cache", "passes per stay", false, Some((0.0, 0.0)), &|row| {
        (row.evictions > 0).then_some((row.lifetime, None))
    }));
    all
}

/// A value with its interval.
type Value = (f64, Option<(f64, f64)>);

fn lines(report: &SweepReport, scope: &str, value: &dyn Fn(&SweepRow) -> Option<Value>) -> Vec<Line> {
    let line = |(i, policy): (usize, &str)| {
        let rows = report.rows.iter().filter(|row| row.policy == policy && row.scope == scope);
        let points = rows.filter_map(|row| value(row).map(|(y, range)| (row.slots as f64, y, range))).collect();
        Line { name: policy.to_owned(), color: color(report, i), style: style(policy), points }
    };
    report.policies().into_iter().enumerate().map(line).collect()
}

fn is_baseline(policy: &str) -> bool {
    [LRU, BELADY].contains(&policy)
}

fn style(policy: &str) -> Style {
    match policy {
        LRU => Style::Strong,
        BELADY => Style::Dashed,
        _ => Style::Plain,
    }
}

/// LRU and Belady are grey, the others have distinct colours.
fn color(report: &SweepReport, policy: usize) -> usize {
    let policies = report.policies();
    if is_baseline(policies[policy]) {
        0
    } else {
        1 + policies[..policy].iter().filter(|p| !is_baseline(p)).count() % 11
    }
}

/// The spread over sequences of misses vs. Belady's, at about a quarter of the experts, where the gap is wide.
fn spread(report: &SweepReport, scope: &str) -> Option<BoxPlot> {
    let capacities = report.capacities();
    let quarter = report.trace.experts / 4;
    let slots = capacities.iter().copied().min_by_key(|c| c.abs_diff(quarter))?;
    let belady = report.row(BELADY, scope, slots)?;
    if belady.sequence_misses.len() < 4 {
        return None;
    }
    let group = |(i, policy): (usize, &str)| {
        let row = report.row(policy, scope, slots).filter(|_| policy != BELADY)?;
        let pairs = row.sequence_misses.iter().zip(&belady.sequence_misses);
        let values = pairs.filter(|(_, b)| **b > 0).map(|(m, b)| *m as f64 / *b as f64).collect();
        Some(BoxGroup { name: policy.to_owned(), color: color(report, i), values })
    };
    let groups = report.policies().into_iter().enumerate().filter_map(group).collect();
    let title = format!("Spread over sequences at {slots} slots per layer");
    Some(BoxPlot { title, x: "misses, multiple of Belady's".into(), unit: "sequence", groups })
}

/// Misses with one pool per layer, as a multiple of those with one pool for all.
fn scopes_compared(report: &SweepReport) -> Option<Chart> {
    let ratio = |policy: &str, slots| {
        let misses = |scope| report.row(policy, scope, slots).map(|row| row.misses as f64);
        let (apart, together) = (misses("layer")?, misses("global")?);
        (together > 0.0).then_some((slots as f64, apart / together, None))
    };
    let line = |(i, policy): (usize, &str)| {
        let points: Vec<_> = report.capacities().into_iter().filter_map(|slots| ratio(policy, slots)).collect();
        Line { name: policy.to_owned(), color: color(report, i), style: style(policy), points }
    };
    let lines: Vec<Line> = report.policies().into_iter().enumerate().map(line).collect();
    lines.iter().any(|line| !line.points.is_empty()).then(|| {
        let title = "Misses: one pool per layer vs. one for all".into();
        let (x, y) = ("slots per layer".into(), "ratio of misses".into());
        Chart { title, x, y, lines, percent: false, y_range: Some((1.0, 1.0)) }
    })
}

/// Miss rates of all policies over all capacities, with the gap closed in small print.
fn overview(report: &SweepReport, scope: &str) -> Table {
    let capacities = report.capacities();
    let help = "Misses as a share of requests, by slots per layer. In small print the share of the misses between LRU and \
                Belady that the policy avoids. Belady is the best possible eviction, with knowledge of the future.";
    let mut columns = vec![Column::text("", "policy", help)];
    columns.extend(capacities.iter().map(|slots| Column::number("", format!("{slots}\u{a0}slots"), "")));
    let row = |policy: &str| {
        let cell = |slots: &usize| {
            let row = report.row(policy, scope, *slots);
            let gap = row.and_then(|row| row.gap_closed).filter(|_| !is_baseline(policy));
            let cell = Cell::maybe(row.map(SweepRow::miss_rate), |rate| format!("{:.2} %", 100.0 * rate));
            cell.with_note(gap.map(|gap| whole_percent(gap.value)))
        };
        std::iter::once(Cell::text(policy)).chain(capacities.iter().map(cell)).collect()
    };
    let rows = report.policies().into_iter().map(row).collect();
    Table { caption: format!("Misses: {}", pools(scope).to_lowercase()), columns, rows }
}

/// A column of all numbers: how it is explained, and its cell of a row.
struct Quantity {
    column: Column,
    cell: fn(&SweepReport, &SweepRow) -> Cell,
}

/// All quantities that at least one row has.
fn quantities(report: &SweepReport) -> Vec<Quantity> {
    let has = |some: fn(&SweepRow) -> bool| report.rows.iter().any(some);
    let mut all = counts();
    if has(|row| row.gap_closed.is_some()) {
        all.extend(comparisons());
    }
    if report.profile.is_some() {
        all.extend(speeds());
    }
    if has(|row| row.kl.is_some()) {
        all.extend(qualities());
    }
    all
}

fn quantity(key: &'static str, name: &str, help: &str, cell: fn(&SweepReport, &SweepRow) -> Cell) -> Quantity {
    Quantity { column: Column::number(key, name, help), cell }
}

fn count(n: u64) -> Cell {
    Cell::number(n as f64, grouped(n))
}

fn percent(n: f64) -> String {
    format!("{:.1} %", 100.0 * n)
}

/// In whole percent, without a negative zero.
fn whole_percent(n: f64) -> String {
    format!("{:.0} %", (100.0 * n).round() + 0.0)
}

fn counts() -> Vec<Quantity> {
    vec![
        quantity("slots", "slots", "Slots per layer.", |_, row| count(row.slots as u64)),
        quantity("hit_rate", "hit rate", "Share of requests that found their expert in memory.", |_, row| {
            Cell::number(row.hit_rate(), format!("{:.2} %", 100.0 * row.hit_rate()))
        }),
        quantity("misses_per_token", "misses/token", "Experts that were not in memory, per token.", |report, row| {
            let misses = report.misses_per_token(row);
            Cell::number(misses, format!("{misses:.2}"))
        }),
        quantity("misses", "misses", "Requests whose expert was not in memory.", |_, row| count(row.misses)),
        quantity("wanted", "requests", "Requests of experts, each once per pass and layer.", |_, row| {
            count(row.wanted)
        }),
        quantity("evictions", "evictions", "Experts that made room for others.", |_, row| count(row.evictions)),
        quantity("rereads", "re-reads", "Misses of experts that had been in memory before.", |_, row| {
            count(row.rereads)
        }),
        quantity(
            "refetches_within_5",
            "re-reads within 5",
            "Misses of experts that were evicted at most five passes before.",
            |_, row| count(row.refetches),
        ),
        quantity("lifetime_passes", "lifetime", "Mean number of passes that an expert stays in memory.", |_, row| {
            Cell::number(row.lifetime, format!("{:.1}", row.lifetime))
        }),
        quantity("scratch", "scratch", "Scratch slots, shared by all layers.", |_, row| count(row.scratch as u64)),
    ]
}

fn comparisons() -> Vec<Quantity> {
    let gap = "Share of the misses between LRU and Belady that the policy avoids, with its 95 % interval.";
    vec![
        quantity("misses_over_belady", "vs. Belady", "Misses as a multiple of Belady's, the lower bound.", |_, row| {
            Cell::maybe(row.over_belady, |n| format!("{n:.3}"))
        }),
        quantity("gap_closed", "gap closed", gap, |_, row| {
            let range = row.gap_closed.map(|gap| format!("{} to {}", percent(gap.low), percent(gap.high)));
            Cell::maybe(row.gap_closed.map(|gap| gap.value), percent).with_note(range)
        }),
    ]
}

fn speeds() -> Vec<Quantity> {
    vec![
        quantity("tokens_per_second", "tokens/s", "Computed from the misses and the machine profile.", |_, row| {
            Cell::maybe(row.tokens_per_second, |n| format!("{n:.2}"))
        }),
        quantity("bytes_per_token", "read/token", "Misses per token times the size of an expert.", |report, row| {
            Cell::maybe(report.bytes_per_token(row), |n| format_bytes(n.round() as u64))
        }),
    ]
}

/// What rerouting costs; the recorded choices are exact.
fn qualities() -> Vec<Quantity> {
    fn quality(value: Option<f64>, exact: f64, show: fn(f64) -> String) -> Cell {
        value.map_or_else(|| Cell::number(exact, "exact"), |value| Cell::number(value, show(value)))
    }
    vec![
        quantity(
            "kl",
            "KL",
            "Mean KL divergence of the choices from the recorded ones, in nats; less is better.",
            |_, row| quality(row.kl, 0.0, |n| format!("{n:.4}")),
        ),
        quantity("substituted", "experts changed", "Share of the recorded experts that were not chosen.", |_, row| {
            quality(row.substituted, 0.0, percent)
        }),
        quantity(
            "kept_mass",
            "probability kept",
            "The router's probability of the choices, relative to that of the recorded ones.",
            |_, row| quality(row.kept_mass, 1.0, percent),
        ),
    ]
}

/// One row per policy and capacity.
fn numbers(report: &SweepReport, scope: &str) -> Table {
    let quantities = quantities(report);
    let row = |row: &SweepRow| {
        let cells = quantities.iter().map(|quantity| (quantity.cell)(report, row));
        std::iter::once(Cell::text(&row.policy)).chain(cells).collect()
    };
    let name = "The eviction policy, after the routing strategy if choices were made again.";
    let columns = quantities.iter().map(|quantity| quantity.column.clone());
    Table {
        caption: format!("All numbers: {}", pools(scope).to_lowercase()),
        columns: std::iter::once(Column::text("policy", "policy", name)).chain(columns).collect(),
        rows: report.rows.iter().filter(|row| row.scope == scope).map(row).collect(),
    }
}

/// A number with thousands separators.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    let (head, tail) = digits.split_at(first);
    let threes = tail.as_bytes().chunks(3).map(|three| String::from_utf8_lossy(three).into_owned());
    let parts: Vec<String> = (!head.is_empty()).then(|| head.to_owned()).into_iter().chain(threes).collect();
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use larder_core::CacheScope;
    use larder_policy::eviction::PolicyInputs;

    use super::*;
    use crate::{InitialCache, ReplaySweep, ReportOrigin, SweepAxes, SyntheticRouting, eighths};

    #[test]
    fn digits_are_grouped_in_threes() {
        assert_eq!([0, 999, 1000, 1234567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn a_page_holds_each_scope_and_escapes_the_origin_of_a_trace() {
        let mut trace = SyntheticRouting { tokens: 30, rows: 2, experts: 8, top_k: 2, ..SyntheticRouting::default() }
            .generate()
            .unwrap();
        trace.meta.insert("source".into(), "<script>alert(1)</script>".into());
        let (policies, inputs) = (["lru".parse().unwrap()], PolicyInputs::default());
        let (slots, scopes) = (eighths(8), [CacheScope::Layer, CacheScope::Global]);
        let axes = SweepAxes { policies: &policies, routings: &[], slots: &slots, scopes: &scopes, scratch: 0 };
        let cells = ReplaySweep::new(&trace, &axes, &inputs, InitialCache::Cold).unwrap().run(1, &|_| ()).unwrap();
        let report = SweepReport::new(ReportOrigin::default(), &trace, InitialCache::Cold, &cells, None);
        let made = sweep_page(&report, &[]);
        for word in ["<script>alert", "NaN"] {
            assert!(!made.contains(word), "{word}");
        }
        assert!(made.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
        assert_eq!(made.matches("<table").count(), 4);
    }
}

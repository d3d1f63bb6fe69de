//! The results of a sweep as a page.

use std::fmt::Write;

use larder_policy::eviction::{BELADY, LRU};

use super::chart::{BoxPlot, Chart, Line, Style};
use super::heatmap::Heatmap;
use super::html::{END, begin, escape, table};
use super::{SweepReport, SweepRow};

/// The report as a self-contained page without scripts.
pub fn sweep_page(report: &SweepReport, heats: &[Heatmap]) -> String {
    let mut out = begin("Eviction policies compared");
    intro(&mut out, report);
    for scope in report.scopes() {
        let title = match scope {
            "global" => "One pool for all layers",
            _ => "One pool per layer",
        };
        let _ = writeln!(out, "<h2>{title}</h2>\n<div class=\"charts\">");
        for svg in charts(report, scope) {
            let _ = writeln!(out, "<figure>{svg}</figure>");
        }
        out.push_str("</div>\n");
        out.push_str(&overview(report, scope));
    }
    if let Some(svg) = scopes_compared(report) {
        let _ = writeln!(out, "<h2>Cost of separate pools</h2>\n<div class=\"charts\"><figure>{svg}</figure></div>");
    }
    if !heats.is_empty() {
        out.push_str(
            "<h2>One layer, pass by pass</h2>\n<p class=\"faint\">Green: hit. Red: miss. Pale: resident, not \
             requested. Cross: evicted in this pass, or before the layer's next visit.</p>\n",
        );
        for heat in heats {
            let _ = writeln!(out, "<figure>{}</figure>", heat.svg());
        }
    }
    let _ = writeln!(out, "<h2>All numbers</h2>\n<details open><summary>one row per policy and capacity</summary>");
    out.push_str(&numbers(report));
    out.push_str("</details>\n");
    out.push_str(END);
    out
}

fn intro(out: &mut String, report: &SweepReport) {
    let trace = &report.trace;
    let start = match report.start.as_str() {
        "carried" => "Each sequence starts with the cache that the previous one left.",
        _ => "Each sequence starts with an empty cache.",
    };
    let _ = writeln!(
        out,
        "<h1>Eviction policies compared</h1>\n<p>{} tokens in {} sequences, {} of {} experts per token in each of {} layers. \
         {start} Capacities are slots per layer; one pool for all layers has {} times that.</p>",
        grouped(trace.tokens as u64),
        trace.sequences,
        trace.top_k,
        trace.experts,
        trace.layers,
        trace.layers
    );
    if report.rows.iter().any(|row| row.over_belady.is_some()) {
        out.push_str(
            "<p>Belady = the best possible eviction, with knowledge of the future. Gap closed = the share of the misses \
             between LRU and Belady that a policy avoids.</p>\n",
        );
    }
    let facts: Vec<String> =
        trace.meta.iter().map(|(key, value)| format!("{}: {}", escape(key), escape(value))).collect();
    if !facts.is_empty() {
        let _ = writeln!(out, "<p class=\"faint\">{}</p>", facts.join(" · "));
    }
    if let Some(p) = &report.profile {
        let _ = writeln!(
            out,
            "<p>Speeds are computed, not measured: experts of {:.2} MB, SSD {:.2} GB/s with a latency of {:.0} µs, memory {:.1} GB/s; \
             {:.2} ms per token for everything else; {:.0} % of the compute time overlaps with reads.</p>",
            p.expert_bytes / 1e6,
            p.ssd_rate / 1e9,
            p.latency_s * 1e6,
            p.memory_rate / 1e9,
            p.compute_s * 1e3,
            p.overlap * 100.0
        );
    }
}

/// The charts of one scope.
fn charts(report: &SweepReport, scope: &str) -> Vec<String> {
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
        let title = "Gap closed from LRU to Belady (95 % interval, from −50 %)";
        all.push(chart(title, "gap closed", true, Some((0.0, 1.0)), &|row| {
            row.gap_closed.filter(|gap| gap.value >= -0.5).map(|gap| (gap.value, Some((gap.low, gap.high))))
        }));
    }
    if has(|row| row.tokens_per_second.is_some()) {
        all.push(chart("Estimated speed", "tokens per second", false, Some((0.0, 0.0)), &|row| {
            row.tokens_per_second.map(|n| (n, None))
        }));
    }
    all.push(chart("Lifetime in the cache", "passes per stay", false, Some((0.0, 0.0)), &|row| {
        (row.evictions > 0).then_some((row.lifetime, None))
    }));
    all.iter().map(Chart::svg).chain(spread(report, scope)).collect()
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
    match is_baseline(policies[policy]) {
        true => 0,
        false => 1 + policies[..policy].iter().filter(|p| !is_baseline(p)).count() % 11,
    }
}

/// The spread over sequences of misses vs. Belady's, at about a quarter of the experts, where the gap is wide.
fn spread(report: &SweepReport, scope: &str) -> Option<String> {
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
        let ratios = pairs.filter(|(_, b)| **b > 0).map(|(m, b)| *m as f64 / *b as f64).collect();
        Some((policy.to_owned(), color(report, i), ratios))
    };
    let groups = report.policies().into_iter().enumerate().filter_map(group).collect();
    let title = format!("Spread over sequences at {slots} slots per layer");
    Some(BoxPlot { title, x: "misses, multiple of Belady's".into(), groups }.svg())
}

/// Misses with one pool per layer, as a multiple of those with one pool for all.
fn scopes_compared(report: &SweepReport) -> Option<String> {
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
        Chart { title, x, y, lines, percent: false, y_range: Some((1.0, 1.0)) }.svg()
    })
}

/// Miss rates of all policies over all capacities, with the gap closed in brackets.
fn overview(report: &SweepReport, scope: &str) -> String {
    let capacities = report.capacities();
    let mut rows = vec![vec!["misses (gap closed)".to_owned()]];
    rows[0].extend(capacities.iter().map(|slots| format!("{slots} slots")));
    for policy in report.policies() {
        let cell = |slots: &usize| {
            let Some(row) = report.row(policy, scope, *slots) else { return "–".to_owned() };
            let misses = format!("{:.2} %", 100.0 * row.miss_rate());
            match row.gap_closed.filter(|_| !is_baseline(policy)) {
                Some(gap) => format!("{misses} <span class=\"faint\">({:.0} %)</span>", 100.0 * gap.value),
                None => misses,
            }
        };
        rows.push(std::iter::once(escape(policy)).chain(capacities.iter().map(cell)).collect());
    }
    table(&rows)
}

fn numbers(report: &SweepReport) -> String {
    let heads = [
        "policy",
        "scope",
        "slots",
        "scratch",
        "requests",
        "misses",
        "hit rate",
        "evictions",
        "re-reads",
        "re-reads within 5 passes",
        "lifetime, passes",
        "vs. Belady",
        "gap closed",
        "95 % interval",
        "tokens/s",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for row in &report.rows {
        let some = |n: Option<String>| n.unwrap_or_else(|| "–".into());
        let percent = |n: f64| format!("{:.1} %", 100.0 * n);
        rows.push(vec![
            escape(&row.policy),
            row.scope.clone(),
            row.slots.to_string(),
            row.scratch.to_string(),
            grouped(row.wanted),
            grouped(row.misses),
            format!("{:.2} %", 100.0 * row.hit_rate()),
            grouped(row.evictions),
            grouped(row.rereads),
            grouped(row.refetches),
            format!("{:.1}", row.lifetime),
            some(row.over_belady.map(|n| format!("{n:.3}"))),
            some(row.gap_closed.map(|gap| percent(gap.value))),
            some(row.gap_closed.map(|gap| format!("{} to {}", percent(gap.low), percent(gap.high)))),
            some(row.tokens_per_second.map(|n| format!("{n:.2}"))),
        ]);
    }
    table(&rows)
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
    use crate::{InitialCache, ReplaySweep, SweepAxes, SyntheticRouting, eighths};

    #[test]
    fn digits_are_grouped_in_threes() {
        assert_eq!([0, 999, 1000, 1234567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn a_page_is_self_contained() {
        let mut trace = SyntheticRouting { tokens: 30, rows: 2, experts: 8, top_k: 2, ..SyntheticRouting::default() }
            .generate()
            .unwrap();
        trace.meta.insert("source".into(), "<script>alert(1)</script>".into());
        let (policies, inputs) = (["lru".parse().unwrap()], PolicyInputs::default());
        let (slots, scopes) = (eighths(8), [CacheScope::Layer, CacheScope::Global]);
        let axes = SweepAxes { policies: &policies, routings: &[], slots: &slots, scopes: &scopes, scratch: 0 };
        let cells = ReplaySweep::new(&trace, &axes, &inputs, InitialCache::Cold).unwrap().run(1, &|_| ()).unwrap();
        let report = SweepReport::new(&trace, InitialCache::Cold, &cells, None);
        let made = sweep_page(&report, &[]);
        for word in ["<script", "src=", "href=", "@import", "url(", "NaN"] {
            assert!(!made.contains(word), "{word}");
        }
        assert!(made.contains("prefers-color-scheme: dark") && made.contains("<svg"));
        assert_eq!(made.matches("<table>").count(), 3);
        let again: SweepReport = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(sweep_page(&again, &[]), made);
    }
}

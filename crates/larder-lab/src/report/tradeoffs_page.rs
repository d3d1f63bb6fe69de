//! Perplexity against misses as a page.

use std::fmt::Write;

use super::chart::{Chart, Line, Style};
use super::html::{END, begin, escape, table};
use crate::eval::{Tradeoff, Tradeoffs};

/// Plots leave out rows whose loss exceeds the limit by more than this factor.
const SHOWN: f64 = 10.0;

/// Misses and perplexity of cache-aware routing, as a self-contained page without scripts.
pub fn tradeoffs_page(found: &Tradeoffs) -> String {
    let mut out = begin("Cache-aware routing");
    intro(&mut out, found);
    out.push_str("<h2>Perplexity vs. misses</h2>\n<div class=\"charts\">\n");
    for slots in found.sizes() {
        let _ = writeln!(out, "<figure>{}</figure>", against_misses(found, slots));
    }
    out.push_str("</div>\n<h2>Cache sizes</h2>\n<div class=\"charts\">\n");
    for svg in [sizes(found), lifetimes(found)] {
        let _ = writeln!(out, "<figure>{svg}</figure>");
    }
    out.push_str("</div>\n");
    out.push_str(&within_limits(found));
    out.push_str("<h2>All numbers</h2>\n");
    out.push_str(&numbers(found));
    out.push_str(END);
    out
}

fn intro(out: &mut String, found: &Tradeoffs) {
    let s = &found.setup;
    let limit = percent(s.max_loss);
    let _ = write!(
        out,
        "<h1>Cache-aware routing</h1>\n<p>{} on {} tokens of {} in chunks of {}, one token per step, since the \
         choice of experts depends on the cache. {} layers, {} of {} experts per token; eviction policy {}, cache scope \
         {}. Optimal = the misses of Belady's policy, the best possible eviction with knowledge of the future, under the \
         model's own routing.</p>\n\
         <p><strong>Settings that raise perplexity by more than {limit} are marked as too lossy.</strong> Their text \
         still reads fluently, which misleads: the content suffers before the grammar does.</p>\n",
        escape(&s.model),
        s.tokens,
        escape(&s.text),
        s.chunk,
        s.layers,
        s.top_k,
        s.experts,
        escape(&s.eviction),
        escape(&s.scope)
    );
}

/// One curve per family, by ascending misses.
fn against_misses(found: &Tradeoffs, slots: usize) -> String {
    let most = SHOWN * found.setup.max_loss;
    let shown: Vec<&Tradeoff> = found.rows.iter().filter(|r| r.slots == slots && r.loss.value <= most).collect();
    let line = |(i, family): (usize, &str)| {
        let mut rows: Vec<&Tradeoff> = shown.iter().filter(|row| row.family == family).copied().collect();
        rows.sort_by(|a, b| a.miss_rate.total_cmp(&b.miss_rate));
        let points = rows.iter().map(|row| (100.0 * row.miss_rate, row.perplexity.value, None)).collect();
        Line { name: family.to_owned(), color: i % 12, style: Style::Plain, points }
    };
    let mut lines: Vec<Line> = found.families().into_iter().enumerate().map(line).collect();
    let optimum = found.optimum.iter().find(|(at, _)| *at == slots).zip(found.original(slots));
    if let Some(((_, rate), original)) = optimum {
        let points = vec![(100.0 * rate, original.perplexity.value, None)];
        lines.push(Line { name: "optimal".into(), color: 0, style: Style::Dashed, points });
        let limit = original.perplexity.value * (1.0 + found.setup.max_loss);
        let rates = || shown.iter().map(|row| 100.0 * row.miss_rate);
        let ends = [rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max)];
        let points = ends.map(|x| (x, limit, None)).into();
        let name = format!("+{}", percent(found.setup.max_loss));
        lines.push(Line { name, color: 4, style: Style::Dashed, points });
    }
    let title = format!("{slots} of {} experts in memory, up to +{} perplexity", found.setup.experts, percent(most));
    Chart { title, x: "misses, %".into(), y: "perplexity".into(), lines, percent: false, y_range: None }.svg()
}

/// The fewest misses within each limit of perplexity over cache sizes, with the model's own routing and its optimum.
fn sizes(found: &Tradeoffs) -> String {
    let sizes = found.sizes();
    let over = |value: &dyn Fn(usize) -> Option<f64>| -> Vec<_> {
        sizes.iter().filter_map(|slots| value(*slots).map(|rate| (*slots as f64, rate, None))).collect()
    };
    let own = over(&|slots| found.original(slots).map(|row| row.miss_rate));
    let optimum = found.optimum.iter().map(|(slots, rate)| (*slots as f64, *rate, None)).collect();
    let line = |name: String, color, style, points| Line { name, color, style, points };
    let mut lines = vec![
        line(found.setup.eviction.clone(), 0, Style::Strong, own),
        line("optimal".into(), 0, Style::Dashed, optimum),
    ];
    for at in 0..3 {
        let limit = percent(found.best_within(0)[at].share);
        let points = over(&|slots| found.best_within(slots)[at].best.map(|row| row.miss_rate));
        lines.push(line(format!("up to +{limit}"), at + 1, Style::Plain, points));
    }
    let (title, x) = ("Fewest misses within a limit of perplexity".into(), "slots per layer".into());
    Chart { title, x, y: "miss rate".into(), lines, percent: true, y_range: Some((0.0, 0.0)) }.svg()
}

fn lifetimes(found: &Tradeoffs) -> String {
    let line = |(i, name): (usize, &str)| {
        let rows = found.rows.iter().filter(|row| row.routing == name);
        let points = rows.filter_map(|row| Some((row.slots as f64, row.lifetime?, None))).collect();
        let short = name.split([':', ',']).nth(1).unwrap_or(name);
        Line { name: short.to_owned(), color: i % 12, style: Style::Plain, points }
    };
    let mut names: Vec<&str> = Vec::new();
    found.rows.iter().filter(|row| !row.beyond).for_each(|row| {
        if !names.contains(&row.routing.as_str()) {
            names.push(&row.routing);
        }
    });
    names.truncate(12);
    let lines = names.into_iter().enumerate().map(line).collect();
    let (title, x, y) = ("Lifetime in the cache".into(), "slots per layer".into(), "tokens per stay".into());
    Chart { title, x, y, lines, percent: false, y_range: Some((0.0, 0.0)) }.svg()
}

/// The fewest misses within each limit of perplexity, by cache size.
fn within_limits(found: &Tradeoffs) -> String {
    let mut rows = vec![vec!["slots".to_owned(), found.setup.eviction.clone(), "optimal".to_owned()]];
    rows[0].extend(found.best_within(0).iter().map(|w| format!("up to +{}", percent(w.share))));
    for slots in found.sizes() {
        let none = || "–".to_owned();
        let optimum = found.optimum.iter().find(|(at, _)| *at == slots);
        let mut cells = vec![
            slots.to_string(),
            found.original(slots).map_or_else(none, |row| percent(row.miss_rate)),
            optimum.map_or_else(none, |(_, rate)| percent(*rate)),
        ];
        cells.extend(found.best_within(slots).iter().map(|within| match within.best {
            Some(row) => format!("{} <span class=\"faint\">{}</span>", percent(row.miss_rate), escape(&row.routing)),
            None => none(),
        }));
        rows.push(cells);
    }
    table(&rows)
}

fn numbers(found: &Tradeoffs) -> String {
    let heads = [
        "routing",
        "slots",
        "",
        "perplexity",
        "vs. original",
        "misses",
        "misses per token",
        "lifetime",
        "tokens/s",
        "experts changed",
        "probability kept",
        "KL",
        "λ",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for row in &found.rows {
        let some = |n: Option<f64>, digits: usize| n.map_or_else(|| "–".to_owned(), |n| format!("{n:.digits$}"));
        let with_error = |value: String, error: Option<String>| match error {
            Some(error) => format!("{value} <span class=\"faint\">± {error}</span>"),
            None => value,
        };
        let verdict = match (row.beyond, row.pareto) {
            (true, true) => "Pareto, too lossy",
            (true, false) => "too lossy",
            (false, true) => "Pareto",
            (false, false) => "",
        };
        rows.push(vec![
            escape(&row.routing),
            row.slots.to_string(),
            verdict.to_owned(),
            with_error(format!("{:.4}", row.perplexity.value), row.perplexity.error.map(|e| format!("{e:.3}"))),
            with_error(
                format!("{:+.2} %", 100.0 * row.loss.value),
                row.loss.error.map(|e| format!("{:.2}", 100.0 * e)),
            ),
            percent(row.miss_rate),
            format!("{:.2}", row.misses_per_token),
            some(row.lifetime, 1),
            format!("{:.1}", row.tokens_per_second),
            percent(row.substituted),
            percent(row.kept_mass),
            format!("{:.4}", row.kl),
            some(row.lambda, 3),
        ]);
    }
    table(&rows)
}

fn percent(share: f64) -> String {
    let digits = if (100.0 * share).fract().abs() < 1e-9 { 0 } else { 1 };
    format!("{:.digits$} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::sample_tradeoffs as sweep;

    #[test]
    fn a_page_is_self_contained_and_marks_lossy_settings() {
        let page = tradeoffs_page(&sweep());
        for word in ["<script", "src=", "href=", "@import", "url(", "NaN", "t <1>"] {
            assert!(!page.contains(word), "{word}");
        }
        assert_eq!((page.matches("<svg").count(), page.matches("<table>").count()), (4, 2));
        assert_eq!(page.matches("too lossy</td>").count(), 2);
        assert!(page.contains("Optimal") && page.contains("still reads fluently"));
        let again: Tradeoffs = serde_json::from_str(&sweep().to_json()).unwrap();
        assert_eq!(tradeoffs_page(&again), page);
    }
}

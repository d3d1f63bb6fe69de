use std::fmt::Write;

use super::chart::{Chart, Line, Style};
use super::html::{END, begin, escape, table};
use crate::eval::{Tradeoff, Tradeoffs};

/// Plots leave out what costs more than so many times the loss that is allowed.
const SHOWN: f64 = 10.0;

/// What routing by the cache gives and costs, as one page, which loads nothing and runs nothing.
pub fn tradeoffs_page(found: &Tradeoffs) -> String {
    let mut out = begin("Routing by the cache");
    intro(&mut out, found);
    out.push_str("<h2>Perplexity against misses</h2>\n<div class=\"charts\">\n");
    for slots in found.sizes() {
        let _ = writeln!(out, "<figure>{}</figure>", against_misses(found, slots));
    }
    out.push_str("</div>\n<h2>Cache sizes</h2>\n<div class=\"charts\">\n");
    for svg in [sizes(found), lifetimes(found)] {
        let _ = writeln!(out, "<figure>{svg}</figure>");
    }
    out.push_str("</div>\n");
    out.push_str(&at_a_price(found));
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
        "<h1>Routing by the cache</h1>\n<p>{} on {} tokens of {} in chunks of {}, one token at a time: the cache is part of \
         the model then. {} layers choose {} of {} experts; {} evicts, in scope {}.</p>\n\
         <p><strong>Beyond {limit} more perplexity a setting is marked as too lossy.</strong> The text still reads fluently \
         there, which misleads: what suffers first is what the text says.</p>\n",
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

/// One curve for each family, from the setting with the fewest misses to the one with the most.
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
        let name = format!("{} more", percent(found.setup.max_loss));
        lines.push(Line { name, color: 4, style: Style::Dashed, points });
    }
    let title = format!("{slots} of {} experts in memory, up to {} more", found.setup.experts, percent(most));
    Chart { title, x: "misses, %".into(), y: "perplexity".into(), lines, percent: false, y_range: None }.svg()
}

/// The fewest misses at each price over sizes, beside the model's own routing and its optimum.
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
        let price = percent(found.best_within(0)[at].share);
        let points = over(&|slots| found.best_within(slots)[at].best.map(|row| row.miss_rate));
        lines.push(line(format!("up to {price}"), at + 1, Style::Plain, points));
    }
    let (title, x) = ("Fewest misses at a price".into(), "slots per layer".into());
    Chart { title, x, y: "misses".into(), lines, percent: true, y_range: Some((0.0, 0.0)) }.svg()
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
    let (title, x, y) = ("Lifetimes".into(), "slots per layer".into(), "tokens that an expert stays".into());
    Chart { title, x, y, lines, percent: false, y_range: Some((0.0, 0.0)) }.svg()
}

/// What is the best that can be had for so much perplexity.
fn at_a_price(found: &Tradeoffs) -> String {
    let mut rows = vec![vec!["slots".to_owned(), found.setup.eviction.clone(), "optimal".to_owned()]];
    rows[0].extend(found.best_within(0).iter().map(|w| format!("up to {}", percent(w.share))));
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
        "more",
        "misses",
        "a token",
        "lifetime",
        "tokens/s",
        "others chosen",
        "kept",
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
            (true, true) => "front, too lossy",
            (true, false) => "too lossy",
            (false, true) => "front",
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
    fn a_page_needs_nothing_from_elsewhere_and_says_what_is_too_lossy() {
        let page = tradeoffs_page(&sweep());
        for word in ["<script", "src=", "href=", "@import", "url(", "NaN", "t <1>"] {
            assert!(!page.contains(word), "{word}");
        }
        assert_eq!((page.matches("<svg").count(), page.matches("<table>").count()), (4, 2));
        assert_eq!(page.matches("too lossy</td>").count(), 2);
        assert!(page.contains("optimal") && page.contains("still reads fluently"));
        let again: Tradeoffs = serde_json::from_str(&sweep().to_json()).unwrap();
        assert_eq!(tradeoffs_page(&again), page);
    }
}

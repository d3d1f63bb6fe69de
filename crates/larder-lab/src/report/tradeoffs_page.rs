//! Perplexity against misses as a page.

use larder_core::format_bytes;

use super::chart::figures;
use super::{Cell, Chart, Column, Line, Page, Style, Table, chart_group, group, paragraph};
use crate::Fact;
use crate::eval::{ChunkEstimate, Tradeoff, Tradeoffs};

/// Plots leave out rows whose loss exceeds the limit by more than this factor.
const SHOWN: f64 = 10.0;
/// Colours of the misses by cache size; the lifetimes beside them, in the same legend, have others.
const COLORS_OF_SIZES: usize = 4;

/// Misses, speed and perplexity of cache-aware routing, as a self-contained page.
pub fn tradeoffs_page(found: &Tradeoffs) -> String {
    let (setup, limit) = (&found.setup, percent(found.setup.max_loss));
    let against: Vec<Chart> = found.sizes().into_iter().map(|slots| against_misses(found, slots)).collect();
    let mut body = group(
        "Perplexity and misses",
        &(paragraph(&format!(
            "Settings that raise perplexity by more than {limit} are marked as too lossy. Their text still reads fluently, \
         which misleads: the content suffers before the grammar does."
        )) + &chart_group(&against)),
    );
    let sizes = figures(&[sizes(found), lifetimes(found)], &[]);
    body += &group("Cache sizes", &(sizes + &within_limits(found).html()));
    for slots in found.sizes() {
        let table = numbers(found, slots);
        body += &group(&format!("All numbers: {}", table.caption), &table.html());
    }
    Page {
        title: "Cache-aware routing: speed and perplexity",
        lead: &format!(
            "{} on {} tokens of {}: how many misses, and how much speed, a strategy that prefers experts in memory buys \
             for how much perplexity.",
            setup.model, setup.tokens, setup.text
        ),
        made: &setup.made,
        method: &method(found),
    }
    .html(&body)
}

/// Text, cache and runs of a sweep, and the meaning of its intervals.
fn method(found: &Tradeoffs) -> Vec<Fact> {
    let s = &found.setup;
    let chunks = (s.tokens as usize).div_ceil(s.chunk.max(1));
    vec![
        Fact::new("Text", format!("{}, {} tokens in chunks of {}", s.text, s.tokens, s.chunk)),
        Fact::new("Steps", "one token per step, because the choice of experts depends on the cache"),
        Fact::new("Cache", format!("eviction {}, scope {}", s.eviction, s.scope)),
        Fact::new("Runs", "one per setting, each from an empty cache; everything but speed repeats exactly"),
        Fact::new(
            "Intervals",
            match chunks {
                0 | 1 => "none: they need two chunks or more".to_owned(),
                n => format!("± is the standard error over {n} chunks; a 95 % interval is 1.96 times as wide"),
            },
        ),
    ]
}

/// One curve per family, by ascending misses.
fn against_misses(found: &Tradeoffs, slots: usize) -> Chart {
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
    let title = format!("{slots} of {} experts in memory", found.setup.experts);
    let y = format!("perplexity, up to +{}", percent(most));
    Chart { title, x: "% misses".into(), y, lines, percent: false, y_range: None }
}

/// The fewest misses within each limit of perplexity over cache sizes, with the model's own routing and its optimum.
fn sizes(found: &Tradeoffs) -> Chart {
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
    Chart { title, x, y: "miss rate".into(), lines, percent: true, y_range: Some((0.0, 0.0)) }
}

fn lifetimes(found: &Tradeoffs) -> Chart {
    let line = |(i, name): (usize, &str)| {
        let rows = found.rows.iter().filter(|row| row.routing == name);
        let points = rows.filter_map(|row| Some((row.slots as f64, row.lifetime?, None))).collect();
        let short = name.split([':', ',']).nth(1).unwrap_or(name);
        let color = (i + COLORS_OF_SIZES) % 12;
        Line { name: short.to_owned(), color, style: Style::Plain, points }
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
    Chart { title, x, y, lines, percent: false, y_range: Some((0.0, 0.0)) }
}

/// The fewest misses within each limit of perplexity, by cache size.
fn within_limits(found: &Tradeoffs) -> Table {
    let help = "Fewest misses of the settings that raise perplexity by no more than this, and their routing.";
    let mut columns = vec![
        Column::number("", "slots", "Experts of each layer that are in memory."),
        Column::number(
            "",
            found.setup.eviction.as_str(),
            "Misses with the model's own routing and this eviction policy.",
        ),
        Column::number("", "optimal", OPTIMAL),
    ];
    let limits = found.best_within(0).map(|within| format!("up to +{}", percent(within.share)));
    columns.extend(limits.map(|limit| Column::number("", limit, help)));
    let row = |slots: usize| {
        let optimum = found.optimum.iter().find(|(at, _)| *at == slots);
        let mut cells = vec![
            Cell::number(slots as f64, slots.to_string()),
            Cell::maybe(found.original(slots).map(|row| row.miss_rate), percent),
            Cell::maybe(optimum.map(|(_, rate)| *rate), percent),
        ];
        cells.extend(found.best_within(slots).iter().map(|within| {
            let cell = Cell::maybe(within.best.map(|row| row.miss_rate), percent);
            cell.with_note(within.best.map(|row| row.routing.clone()))
        }));
        cells
    };
    let rows = found.sizes().into_iter().map(row).collect();
    Table { caption: "Fewest misses within a limit of perplexity".into(), columns, rows }
}

const OPTIMAL: &str = "Misses of Belady's policy, the best possible eviction with knowledge of the future, under the model's \
                       own routing.";

/// All settings at a cache size.
fn numbers(found: &Tradeoffs, slots: usize) -> Table {
    let rows = found.rows.iter().filter(|row| row.slots == slots);
    Table {
        caption: format!("{slots} of {} experts in memory", found.setup.experts),
        columns: columns(found),
        rows: rows.map(cells).collect(),
    }
}

/// The columns of [`cells`]: speed and what was read, then the loss of quality.
fn columns(found: &Tradeoffs) -> Vec<Column> {
    let limit = percent(found.setup.max_loss);
    let verdict = format!(
        "Pareto: no other setting of this size has fewer misses without more perplexity. Too lossy: perplexity rises by \
         more than {limit}."
    );
    vec![
        Column::text("routing", "routing", "The strategy with its parameters; original is the model's own."),
        Column::text("", "verdict", verdict),
        Column::number("tokens_per_second", "tokens/s", "Measured speed, one token per step. More is better."),
        Column::number("misses_per_token", "misses/token", "Experts that were not in memory, per token."),
        Column::number("bytes_per_token", "read/token", "Bytes read from the SSD per token."),
        Column::number("perplexity", "perplexity", "Of the text. Less is better."),
        Column::number(
            "loss",
            "vs. original",
            "Rise of perplexity, chunk by chunk, which is more certain than either.",
        ),
        Column::number("kl", "KL", "Mean KL divergence of the chosen experts from the model's own choice, in nats."),
        Column::number("substituted", "experts changed", "Share of the model's own experts that were not chosen."),
        Column::number(
            "kept_mass",
            "probability kept",
            "The router's probability of the chosen experts, relative to that of the model's own choice.",
        ),
        Column::number("miss_rate", "misses", "As a share of the experts that the model's own routing requests."),
        Column::number("lifetime_passes", "lifetime", "Mean number of passes that an expert stays in memory."),
        Column::number("lambda", "λ", "Mean λ over layers, where the strategy has one."),
    ]
}

fn cells(row: &Tradeoff) -> Vec<Cell> {
    let verdict = match (row.beyond, row.pareto) {
        (true, true) => "Pareto, too lossy",
        (true, false) => "too lossy",
        (false, true) => "Pareto",
        (false, false) => "",
    };
    let error =
        |estimate: &ChunkEstimate, show: &dyn Fn(f64) -> String| estimate.error.map(|e| format!("± {}", show(e)));
    let share = |n: f64| Cell::number(n, percent(n));
    let rise = Cell::number(row.loss.value, format!("{:+.2} %", 100.0 * row.loss.value));
    vec![
        Cell::text(&row.routing),
        Cell { warns: row.beyond, ..Cell::text(verdict) },
        Cell::number(row.tokens_per_second, format!("{:.1}", row.tokens_per_second)),
        Cell::number(row.misses_per_token, format!("{:.2}", row.misses_per_token)),
        Cell::number(row.bytes_per_token, format_bytes(row.bytes_per_token.round() as u64)),
        Cell::number(row.perplexity.value, format!("{:.4}", row.perplexity.value))
            .with_note(error(&row.perplexity, &|e| format!("{e:.3}"))),
        Cell { warns: row.beyond, ..rise }.with_note(error(&row.loss, &|e| format!("{:.2}", 100.0 * e))),
        Cell::number(row.kl, format!("{:.4}", row.kl)),
        share(row.substituted),
        share(row.kept_mass),
        share(row.miss_rate),
        Cell::maybe(row.lifetime, |n| format!("{n:.1}")),
        Cell::maybe(row.lambda, |n| format!("{n:.3}")),
    ]
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
    fn a_page_marks_lossy_settings_and_escapes_names() {
        let page = tradeoffs_page(&sweep());
        for word in ["NaN", "t <1>", "larder <eval>"] {
            assert!(!page.contains(word), "{word}");
        }
        assert_eq!((page.matches("<svg viewBox=\"0 0 400").count(), page.matches("<table").count()), (4, 3));
        assert_eq!(page.matches("too lossy</span></td>").count(), 2);
        assert!(page.contains("still reads fluently") && page.contains("standard error over 2 chunks"));
    }
}

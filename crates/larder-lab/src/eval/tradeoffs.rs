use std::io::Write;
use std::path::Path;

use larder_policy::routing::quality::Quality;
use serde::{Deserialize, Serialize};

use super::{ChunkEstimate, ChunkScore, pareto_front, perplexity, perplexity_change};
use crate::LabError;
use crate::export::write_atomically;

/// What all runs of a sweep have in common.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TradeoffSetup {
    /// The model, as it was named.
    pub model: String,
    /// The text.
    pub text: String,
    /// Tokens of it that were read, each alone.
    pub tokens: u64,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Layers that have experts.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Experts per token and layer.
    pub top_k: usize,
    /// Who left when room was needed.
    pub eviction: String,
    /// `layer` or `global`.
    pub scope: String,
    /// By what part perplexity may rise.
    pub max_loss: f64,
}

/// One strategy at one cache size.
pub struct RoutingRun {
    /// The strategy.
    pub routing: String,
    /// What it is called together with others that differ by one number.
    pub family: String,
    /// Slots for each layer.
    pub slots: usize,
    /// What each chunk cost.
    pub chunks: Vec<ChunkScore>,
    /// Experts that were read.
    pub misses: u64,
    /// Passes that an expert stayed, if it is known.
    pub lifetime: Option<f64>,
    /// As measured.
    pub tokens_per_second: f64,
    /// How far choices were from the model's own.
    pub quality: Quality,
    /// The mean λ, if there is one.
    pub lambda: Option<f64>,
}

/// What a strategy gives at a cache size, and what it costs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tradeoff {
    /// The strategy.
    pub routing: String,
    /// What it is called together with others that differ by one number.
    pub family: String,
    /// Slots for each layer.
    pub slots: usize,
    /// Of the text.
    pub perplexity: ChunkEstimate,
    /// By what part that is above the perplexity of `original`.
    pub loss: ChunkEstimate,
    /// Experts read, as a part of those that `original` wants.
    pub miss_rate: f64,
    /// Experts read for a token.
    pub misses_per_token: f64,
    /// Passes that an expert stayed, if it is known.
    pub lifetime: Option<f64>,
    /// As measured.
    pub tokens_per_second: f64,
    /// The share of the model's own experts that were not chosen.
    pub substituted: f64,
    /// The probability kept, 1 being that of the model's own choice.
    pub kept_mass: f64,
    /// The KL divergence to the model's own choice, in nats.
    pub kl: f64,
    /// The mean λ, if there is one.
    pub lambda: Option<f64>,
    /// Whether at this size nothing else has fewer misses and no more perplexity, or the other way round.
    pub pareto: bool,
    /// Whether perplexity rose by more than it may.
    pub beyond: bool,
}

/// What a sweep found.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tradeoffs {
    /// What all runs have in common.
    pub setup: TradeoffSetup,
    /// One strategy at one cache size each.
    pub rows: Vec<Tradeoff>,
    /// For each cache size, the miss rate of `original` if it were known who is wanted next.
    pub optimum: Vec<(usize, f64)>,
}

/// The fewest misses that can be had at a price.
#[derive(Clone, Copy, Debug)]
pub struct BestWithin<'a> {
    /// By what part perplexity may rise.
    pub share: f64,
    /// The strategy that has them, if any does.
    pub best: Option<&'a Tradeoff>,
}

impl Tradeoffs {
    /// Compares runs with that of `original` at the same size. `optimum` has the misses that could not be fewer.
    pub fn new(setup: TradeoffSetup, runs: &[RoutingRun], optimum: &[(usize, u64)]) -> Self {
        let wanted = (setup.tokens * (setup.layers * setup.top_k) as u64).max(1) as f64;
        let mut rows: Vec<Tradeoff> = runs.iter().map(|run| row(run, runs, &setup, wanted)).collect();
        for slots in sizes(&rows) {
            let same: Vec<usize> = (0..rows.len()).filter(|at| rows[*at].slots == slots).collect();
            let points: Vec<_> = same.iter().map(|at| (rows[*at].miss_rate, rows[*at].perplexity.value)).collect();
            same.iter().zip(pareto_front(&points)).for_each(|(at, is)| rows[*at].pareto = is);
        }
        let optimum = optimum.iter().map(|(slots, misses)| (*slots, *misses as f64 / wanted)).collect();
        Tradeoffs { setup, rows, optimum }
    }

    /// The cache sizes, in their order.
    pub fn sizes(&self) -> Vec<usize> {
        sizes(&self.rows)
    }

    /// The families, in their order.
    pub fn families(&self) -> Vec<&str> {
        let mut all: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !all.contains(&row.family.as_str()) {
                all.push(&row.family);
            }
        }
        all
    }

    /// The model's own routing at a size.
    pub fn original(&self, slots: usize) -> Option<&Tradeoff> {
        self.rows.iter().find(|row| row.slots == slots && row.routing == "original")
    }

    /// The fewest misses for one, five and ten times what perplexity may rise by.
    pub fn best_within(&self, slots: usize) -> [BestWithin<'_>; 3] {
        [1.0, 5.0, 10.0].map(|times| {
            let share = times * self.setup.max_loss;
            let fits = |row: &&Tradeoff| row.slots == slots && row.loss.value <= share;
            let best = self.rows.iter().filter(fits).min_by(|a, b| a.miss_rate.total_cmp(&b.miss_rate));
            BestWithin { share, best }
        })
    }

    /// All of it, as one JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("only names and numbers, which JSON can hold")
    }
}

fn sizes(rows: &[Tradeoff]) -> Vec<usize> {
    let mut all: Vec<usize> = rows.iter().map(|row| row.slots).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn row(run: &RoutingRun, all: &[RoutingRun], setup: &TradeoffSetup, wanted: f64) -> Tradeoff {
    let base = all.iter().find(|other| other.slots == run.slots && other.routing == "original").unwrap_or(run);
    let loss = perplexity_change(&run.chunks, &base.chunks);
    Tradeoff {
        routing: run.routing.clone(),
        family: run.family.clone(),
        slots: run.slots,
        perplexity: perplexity(&run.chunks),
        loss,
        miss_rate: run.misses as f64 / wanted,
        misses_per_token: run.misses as f64 / setup.tokens.max(1) as f64,
        lifetime: run.lifetime,
        tokens_per_second: run.tokens_per_second,
        substituted: run.quality.substituted_share(),
        kept_mass: run.quality.kept_mass(),
        kl: run.quality.mean_kl(),
        lambda: run.lambda,
        pareto: false,
        beyond: loss.value > setup.max_loss,
    }
}

const COLUMNS: &str = "routing,slots,perplexity,perplexity_error,loss,loss_error,miss_rate,misses_per_token,\
                       lifetime_passes,tokens_per_second,substituted,kept_mass,kl,lambda,pareto,beyond_max_loss";

/// Writes a line for each strategy at each size, and one for the optimum.
pub fn tradeoffs_csv(found: &Tradeoffs, path: &Path) -> Result<(), LabError> {
    let some = |n: Option<f64>| n.map(|n| format!("{n:.6}")).unwrap_or_default();
    write_atomically(path, |out| {
        writeln!(out, "{COLUMNS}")?;
        for row in &found.rows {
            let Tradeoff { routing, slots, perplexity: p, loss, .. } = row;
            write!(
                out,
                "\"{routing}\",{slots},{:.6},{},{:.6},{}",
                p.value,
                some(p.error),
                loss.value,
                some(loss.error)
            )?;
            write!(out, ",{:.6},{:.4},{}", row.miss_rate, row.misses_per_token, some(row.lifetime))?;
            write!(out, ",{:.3},{:.6},{:.6},{:.6}", row.tokens_per_second, row.substituted, row.kept_mass, row.kl)?;
            writeln!(out, ",{},{},{}", some(row.lambda), row.pareto, row.beyond)?;
        }
        for (slots, rate) in &found.optimum {
            writeln!(out, "\"original, evicted by belady\",{slots},,,,,{rate:.6},,,,,,,,,")?;
        }
        Ok(())
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sweep() -> Tradeoffs {
        let setup = TradeoffSetup {
            model: "m".into(),
            text: "t <1>".into(),
            tokens: 100,
            chunk: 50,
            layers: 2,
            experts: 8,
            top_k: 2,
            eviction: "lru".into(),
            scope: "layer".into(),
            max_loss: 0.01,
        };
        let run = |routing: &str, slots, nats, misses| RoutingRun {
            routing: routing.into(),
            family: routing.split(':').next().unwrap_or_default().into(),
            slots,
            chunks: vec![ChunkScore { tokens: 50, nats }, ChunkScore { tokens: 50, nats: nats + 10.0 }],
            misses,
            lifetime: Some(5.0),
            tokens_per_second: 10.0,
            quality: Quality::default(),
            lambda: None,
        };
        let runs = [
            run("original", 2, 100.0, 200),
            run("prior:lambda=0.1", 2, 100.4, 100),
            run("prior:lambda=0.5", 2, 102.0, 40),
            run("prune:h=1", 2, 103.0, 120),
            run("original", 4, 100.0, 80),
            run("prior:lambda=0.1", 4, 99.9, 40),
        ];
        Tradeoffs::new(setup, &runs, &[(2, 120), (4, 50)])
    }

    #[test]
    fn rows_are_compared_with_the_original_of_their_size() {
        let found = sweep();
        assert_eq!((found.sizes(), found.families()), (vec![2, 4], vec!["original", "prior", "prune"]));
        let of = |value: fn(&Tradeoff) -> bool| found.rows.iter().map(value).collect::<Vec<_>>();
        assert_eq!(of(|r| r.pareto), [true, true, true, false, false, true]);
        assert_eq!(of(|r| r.beyond), [false, false, true, true, false, false]);
        assert_eq!((found.rows[0].miss_rate, found.rows[0].misses_per_token), (0.5, 2.0));
        assert!((found.rows[1].loss.value - 0.008f64.exp_m1()).abs() < 1e-12);
        assert!(found.rows[1].loss.error.unwrap() < 1e-12, "both chunks rose alike");
        assert_eq!(found.optimum, [(2, 0.3), (4, 0.125)]);
    }

    #[test]
    fn the_fewest_misses_are_given_for_each_price() {
        let found = sweep();
        let best = |slots| found.best_within(slots).map(|w| w.best.map(|row| row.routing.as_str()));
        assert_eq!(best(2), [Some("prior:lambda=0.1"), Some("prior:lambda=0.5"), Some("prior:lambda=0.5")]);
        assert_eq!(best(4)[0], Some("prior:lambda=0.1"));
        assert_eq!(best(3)[0], None);
    }

    #[test]
    fn a_table_has_a_line_for_each_row_and_as_many_cells_in_each() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        tradeoffs_csv(&sweep(), &path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let cells: Vec<usize> = crate::eval::csv::records(&text).unwrap().iter().map(|r| r.cells.len()).collect();
        assert_eq!(cells, [16; 9]);
    }
}

//! Perplexity against misses, for many routing strategies and cache sizes.

use std::io::Write;
use std::path::Path;

use larder_engine::OutputLoss;
use larder_policy::routing::ORIGINAL;
use larder_policy::routing::quality::Quality;
use serde::Serialize;

use super::{ChunkEstimate, ChunkScore, pareto_front, perplexity, perplexity_change};
use crate::export::write_atomically;
use crate::{LabError, ReportOrigin};

/// The common settings of a sweep's runs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TradeoffSetup {
    /// The model's file or folder name.
    pub model: String,
    /// Name of the text.
    pub text: String,
    /// Tokens of the text, computed one per step.
    pub tokens: u64,
    /// Tokens per chunk.
    pub chunk: usize,
    /// Layers that have experts.
    pub layers: usize,
    /// Experts per layer.
    pub experts: usize,
    /// Experts per token and layer.
    pub top_k: usize,
    /// The eviction policy.
    pub eviction: String,
    /// `layer` or `global`.
    pub scope: String,
    /// Limit of the relative rise of perplexity.
    pub max_loss: f64,
    /// How the numbers came about.
    pub made: ReportOrigin,
}

/// The run of one strategy at one cache size.
pub struct RoutingRun {
    /// The strategy.
    pub routing: String,
    /// Name of its family: strategies that differ in one number.
    pub family: String,
    /// Slots per layer.
    pub slots: usize,
    /// The loss of each chunk.
    pub chunks: Vec<ChunkScore>,
    /// Cache misses; smaller copies that were read count by their size.
    pub misses: f64,
    /// Bytes read from the SSD.
    pub bytes: u64,
    /// Mean passes that an expert stayed in the cache, if known.
    pub lifetime: Option<f64>,
    /// Measured speed.
    pub tokens_per_second: f64,
    /// Quality of the choices, compared with the model's own.
    pub quality: Quality,
    /// Distance of the outputs from exact ones, at tokens that were computed twice.
    pub loss: OutputLoss,
    /// The mean λ, if the strategy has one.
    pub lambda: Option<f64>,
}

/// Misses and quality of a strategy at a cache size.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Tradeoff {
    /// The strategy.
    pub routing: String,
    /// Name of its family: strategies that differ in one number.
    pub family: String,
    /// Slots per layer.
    pub slots: usize,
    /// Perplexity of the text.
    pub perplexity: ChunkEstimate,
    /// Relative rise of perplexity over `original`.
    pub loss: ChunkEstimate,
    /// Misses, as a share of the experts that `original` requests; smaller copies count by their size.
    pub miss_rate: f64,
    /// Misses per token.
    pub misses_per_token: f64,
    /// Bytes read from the SSD per token.
    pub bytes_per_token: f64,
    /// Mean passes that an expert stayed in the cache, if known.
    pub lifetime: Option<f64>,
    /// Measured speed.
    pub tokens_per_second: f64,
    /// Share of the model's own experts that were not chosen.
    pub substituted: f64,
    /// Router probability of the chosen experts, relative to the model's own choice.
    pub kept_mass: f64,
    /// Mean KL divergence to the model's own choice, in nats.
    pub kl: f64,
    /// Mean KL divergence of the output from an exact one, in nats, at tokens that were computed twice; 0 for the
    /// model's own routing.
    pub output_kl: Option<f64>,
    /// Half of its 95 % interval.
    pub output_kl_half_interval: Option<f64>,
    /// The share of these tokens after which the likeliest token is the same.
    pub output_agreement: Option<f64>,
    /// The mean λ, if the strategy has one.
    pub lambda: Option<f64>,
    /// Whether it is on the Pareto front of misses and perplexity at this cache size.
    pub pareto: bool,
    /// Whether perplexity rose by more than the limit.
    pub beyond: bool,
}

/// The results of a sweep.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Tradeoffs {
    /// The common settings.
    pub setup: TradeoffSetup,
    /// A row per strategy and cache size.
    pub rows: Vec<Tradeoff>,
    /// For each cache size, the miss rate of `original` under Belady's policy, the lower bound.
    pub optimum: Vec<(usize, f64)>,
}

/// The strategy with the fewest misses within a limit of perplexity.
#[derive(Clone, Copy, Debug)]
pub struct BestWithin<'a> {
    /// Limit of the relative rise of perplexity.
    pub share: f64,
    /// The best row within the limit, if there is one.
    pub best: Option<&'a Tradeoff>,
}

impl Tradeoffs {
    /// Compares each run with that of `original` at the same cache size. `optimum` has Belady's misses by size.
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

    /// The cache sizes, ascending.
    pub fn sizes(&self) -> Vec<usize> {
        sizes(&self.rows)
    }

    /// The families, in order of appearance.
    pub fn families(&self) -> Vec<&str> {
        let mut all: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !all.contains(&row.family.as_str()) {
                all.push(&row.family);
            }
        }
        all
    }

    /// The row of the model's own routing at a size.
    pub fn original(&self, slots: usize) -> Option<&Tradeoff> {
        self.rows.iter().find(|row| row.slots == slots && row.routing == ORIGINAL)
    }

    /// The best rows within one, five and ten times the limit of perplexity.
    pub fn best_within(&self, slots: usize) -> [BestWithin<'_>; 3] {
        [1.0, 5.0, 10.0].map(|times| {
            let share = times * self.setup.max_loss;
            let fits = |row: &&Tradeoff| row.slots == slots && row.loss.value <= share;
            let best = self.rows.iter().filter(fits).min_by(|a, b| a.miss_rate.total_cmp(&b.miss_rate));
            BestWithin { share, best }
        })
    }

    /// All results as one JSON object.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("names and numbers serialise to JSON")
    }
}

fn sizes(rows: &[Tradeoff]) -> Vec<usize> {
    let mut all: Vec<usize> = rows.iter().map(|row| row.slots).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn row(run: &RoutingRun, all: &[RoutingRun], setup: &TradeoffSetup, wanted: f64) -> Tradeoff {
    let base = all.iter().find(|other| other.slots == run.slots && other.routing == ORIGINAL).unwrap_or(run);
    let loss = perplexity_change(&run.chunks, &base.chunks);
    Tradeoff {
        routing: run.routing.clone(),
        family: run.family.clone(),
        slots: run.slots,
        perplexity: perplexity(&run.chunks),
        loss,
        miss_rate: run.misses / wanted,
        misses_per_token: run.misses / setup.tokens.max(1) as f64,
        bytes_per_token: run.bytes as f64 / setup.tokens.max(1) as f64,
        lifetime: run.lifetime,
        tokens_per_second: run.tokens_per_second,
        substituted: run.quality.substituted_share(),
        kept_mass: run.quality.kept_mass(),
        kl: run.quality.mean_kl(),
        output_kl: run.loss.mean_kl(),
        output_kl_half_interval: run.loss.half_interval(),
        output_agreement: run.loss.agreement(),
        lambda: run.lambda,
        pareto: false,
        beyond: loss.value > setup.max_loss,
    }
}

const COLUMNS: &str = "routing,slots,perplexity,perplexity_error,loss,loss_error,miss_rate,misses_per_token,\
                       lifetime_passes,tokens_per_second,substituted,kept_mass,kl,lambda,pareto,beyond_max_loss,\
                       bytes_per_token,output_kl,output_kl_half_interval,output_agreement";

/// Writes a CSV table with a line per strategy and size, and one per size for the optimum.
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
            write!(out, ",{},{},{},{:.1}", some(row.lambda), row.pareto, row.beyond, row.bytes_per_token)?;
            writeln!(
                out,
                ",{},{},{}",
                some(row.output_kl),
                some(row.output_kl_half_interval),
                some(row.output_agreement)
            )?;
        }
        for (slots, rate) in &found.optimum {
            writeln!(out, "\"original, evicted by belady\",{slots},,,,,{rate:.6},,,,,,,,,,,,,")?;
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
            made: ReportOrigin { command: "larder <eval>".into(), ..ReportOrigin::default() },
        };
        let run = |routing: &str, slots, nats, misses: u32| RoutingRun {
            routing: routing.into(),
            family: routing.split(':').next().unwrap_or_default().into(),
            slots,
            chunks: vec![ChunkScore { tokens: 50, nats }, ChunkScore { tokens: 50, nats: nats + 10.0 }],
            misses: f64::from(misses),
            bytes: 1000 * u64::from(misses),
            lifetime: Some(5.0),
            tokens_per_second: 10.0,
            loss: OutputLoss::default(),
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
        assert!(found.rows[1].loss.error.unwrap() < 1e-12, "both chunks rose equally");
        assert_eq!(found.optimum, [(2, 0.3), (4, 0.125)]);
    }

    #[test]
    fn the_fewest_misses_are_found_within_each_limit() {
        let found = sweep();
        let best = |slots| found.best_within(slots).map(|w| w.best.map(|row| row.routing.as_str()));
        assert_eq!(best(2), [Some("prior:lambda=0.1"), Some("prior:lambda=0.5"), Some("prior:lambda=0.5")]);
        assert_eq!(best(4)[0], Some("prior:lambda=0.1"));
        assert_eq!(best(3)[0], None);
    }

    #[test]
    fn a_csv_table_has_equally_many_cells_in_each_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.csv");
        tradeoffs_csv(&sweep(), &path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let cells: Vec<usize> = crate::eval::csv::records(&text).unwrap().iter().map(|r| r.cells.len()).collect();
        assert_eq!(cells, [20; 9]);
    }
}
